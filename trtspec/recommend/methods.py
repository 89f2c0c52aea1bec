"""Which ways of drafting exist for a case, each with the sizes that are worth pricing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trtspec.cost.speculation import best_tree
from trtspec.recipe import (
    Acceptance,
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    ExactAcceptance,
    LookaheadSpeculation,
    MedusaSpeculation,
    Model,
    NgramSpeculation,
    NoQuantization,
    NoSpeculation,
    Quantization,
    RejectionAcceptance,
    Speculation,
    TypicalAcceptance,
)
from trtspec.recipe_facts import EMBEDDED_SPECULATION, SPECULATION_ON, drafted_positions
from trtspec.recommend.decision import Path
from trtspec.recommend.formats import NAMES, Format, kv8, quantization, why_not
from trtspec.recommend.pricing import Case

LONGEST_CHAIN = 8
MEDUSA_RANKS = (0.55, 0.13, 0.06, 0.04, 0.03, 0.02)
"""Chance that a head's r-th guess is right: assumption, near what the Medusa paper's figures show."""
NEAREST = {
    ("pytorch", "medusa"): "eagle3", ("pytorch", "eagle"): "eagle3", ("pytorch", "lookahead"): "ngram",
    ("tensorrt", "eagle3"): "eagle",
}  # fmt: skip
DOCUMENTED_UNDER = {"medusa": ("none", "fp8"), "eagle": ("none",)}
"""Target formats that TensorRT-LLM documents for engines with these heads."""
ENDS_AT = "exists only on TensorRT-LLM engines, up to 1.2.1 (backend tensorrt)"
EXISTS_ON = {
    "medusa": ENDS_AT, "lookahead": ENDS_AT, "eagle": ENDS_AT,
    "eagle3": "exists only on the LLM API (backend pytorch, TensorRT-LLM 1.0 and later)",
}  # fmt: skip


@dataclass(frozen=True)
class Method:
    """A drafting method with its sizes: ``options`` from the smallest to the largest."""

    kind: str
    options: tuple[Speculation, ...]
    acceptance: Acceptance
    version: str | None = None


def methods(case: Case, path: Path, chosen: Format) -> Iterable[Method]:
    exact = ExactAcceptance(kind="exact")
    n, backend = chosen.sequences, case.backend
    on = EMBEDDED_SPECULATION if backend == "embedded" else SPECULATION_ON[backend]
    heads = case.heads
    if heads is not None and heads.method not in on:
        nearest = NEAREST.get((backend, heads.method), "ngram")
        trained = f" (to be trained), or untrained {'lookahead' if backend == 'tensorrt' else 'ngram'}"
        where = EXISTS_ON[heads.method] if backend != "embedded" else "is not run by the embedded engine"
        path.reject(
            "speculation", heads.method, f"{where}; the nearest on {backend} is {nearest}"
            + (trained if nearest not in ("ngram", "lookahead") else ""),
        )  # fmt: skip
    elif (
        heads is not None
        and backend == "tensorrt"
        and chosen.quantization.kind not in DOCUMENTED_UNDER.get(heads.method, (chosen.quantization.kind,))
    ):
        names = " and ".join(NAMES[kind] for kind in DOCUMENTED_UNDER[heads.method])
        path.reject("speculation", heads.method, f"its engines are documented under {names} only")
    elif heads is not None:
        yield from _headed(case, path, chosen)
    for kind in ("medusa", "eagle", "eagle3", "lookahead"):
        if kind not in on and backend != "embedded" and (heads is None or heads.method != kind):
            nearest = NEAREST.get((backend, kind), "ngram")
            path.reject("speculation", kind, f"{EXISTS_ON[kind]}; the nearest here is {nearest}")
    between = "on engines it is served by Triton's BLS model: one sequence, no streaming"
    if case.draft is not None:
        if "draft_model" not in on:
            path.reject("speculation", "draft_model", "is not run by the embedded engine")
        elif backend == "tensorrt" and n > 1:
            path.reject("speculation", "draft_model", between)
        elif case.draft.spec.vocab_size != case.spec.vocab_size:
            path.reject("speculation", "draft_model", f"{case.draft.source} has another vocabulary")
        else:
            yield _draft_model(case, chosen, draft_quantization(case, chosen))
    if backend == "tensorrt" and n > 1:
        path.reject("speculation", "ngram", between)
    elif "ngram" in on:
        chain = (
            NgramSpeculation(kind="ngram", num_draft_tokens=k, min_ngram=2, max_ngram=4) for k in lengths()
        )
        yield Method("ngram", tuple(chain), exact)
    if "lookahead" in on:
        small = LookaheadSpeculation(kind="lookahead", window=2, ngram=3, verification_set=2)
        usual = LookaheadSpeculation(kind="lookahead", window=4, ngram=3, verification_set=4)
        yield Method("lookahead", (small, usual), exact)


def lengths() -> range:
    return range(1, LONGEST_CHAIN + 1)


def _headed(case: Case, path: Path, chosen: Format) -> Iterable[Method]:
    heads, sampling = case.heads, case.scenario.temperature > 0
    assert heads is not None
    exact = ExactAcceptance(kind="exact")
    if heads.method == "eagle3":
        rejection = sampling and case.scenario.fidelity != "exact"
        yield Method(
            "eagle3",
            tuple(
                Eagle3Speculation(kind="eagle3", heads=heads.source, num_draft_tokens=k) for k in lengths()
            ),
            RejectionAcceptance(kind="rejection") if rejection else exact,
            ">=1.3,<1.5" if rejection else None,
        )
    elif heads.method == "medusa":
        if sampling:
            text = "Medusa engines are greedy: temperature would silently act as 0"
            path.reject("speculation", "medusa", text)
            return
        trees = tuple(
            MedusaSpeculation(
                kind="medusa",
                heads=heads.source,
                choices=best_tree(MEDUSA_RANKS, nodes, heads.num_heads).paths,
            )
            for nodes in (4, 8, 16, 32, 63)
        )
        yield Method("medusa", trees, exact)
    else:
        if sampling and case.scenario.fidelity != "approximate":
            text = "EAGLE engines sample by typical acceptance only, which changes the output law"
            path.reject("speculation", "eagle", f"{text}; fidelity is {case.scenario.fidelity}")
            return
        trees_eagle = tuple(
            EagleSpeculation(
                kind="eagle", heads=heads.source, depth=depth, top_k=top_k, num_draft_tokens=nodes
            )
            for depth, top_k, nodes in (
                (2, 2, 6),
                (3, 4, 12),
                (4, 4, 20),
                (5, 8, 31),
                (6, 8, 47),
                (6, 10, 63),
            )
        )
        yield Method("eagle", trees_eagle, TypicalAcceptance(kind="typical") if sampling else exact)


def draft_quantization(case: Case, chosen: Format) -> Quantization:
    """The draft model's format: small like the target's. Strict acceptance keeps the output law whatever the
    draft is, so fidelity does not forbid it."""
    assert case.draft is not None
    wanted = chosen.quantization.kind
    order = ["fp8", "w4a16_awq", "nvfp4"]
    if wanted in ("w4a16_awq", "nvfp4") or (wanted == "none" and chosen.sequences == 1):
        order = ["w4a16_awq", "nvfp4", "fp8"]
    for kind in order:
        kv = "fp8" if chosen.quantization.kv_cache == "fp8" and kv8(kind, case) else "none"
        found = quantization(kind, kv, case.draft.spec, chosen.tp) if why_not(kind, case) is None else None
        if found is not None:
            return found
    return NoQuantization(kind="none")


def _draft_model(case: Case, chosen: Format, draft: Quantization) -> Method:
    assert case.draft is not None
    rejection = (
        case.scenario.temperature > 0 and case.scenario.fidelity != "exact" and case.backend == "pytorch"
    )
    chain = (
        DraftModelSpeculation(
            kind="draft_model", model=Model(source=case.draft.source), num_draft_tokens=k, quantization=draft
        )
        for k in lengths()
    )
    acceptance: Acceptance = (
        RejectionAcceptance(kind="rejection") if rejection else ExactAcceptance(kind="exact")
    )
    return Method("draft_model", tuple(chain), acceptance, ">=1.3,<1.5" if rejection else None)


def name_of(speculation: Speculation) -> str:
    drafted = drafted_positions(speculation)
    match speculation:
        case MedusaSpeculation() | EagleSpeculation():
            return f"{speculation.kind} tree of {drafted}"
        case LookaheadSpeculation(window=w, ngram=n, verification_set=g):
            return f"lookahead ({w}, {n}, {g})"
        case NoSpeculation():
            return "none"
        case _:
            return f"{speculation.kind} K={drafted}"

"""How to draft: what exists on the backend, what needs no training, how far it pays as the batch grows.

Times decide: each method is priced at the concurrency asked for, with the best length for it. Where it loses
there, the break-even batch becomes a limit. The time to the first token is never part of it: drafting starts
after the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trtspec.cost.estimate import Estimate
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
from trtspec.recommend.decision import Path, show
from trtspec.recommend.formats import NAMES, Format, quantization, why_not
from trtspec.recommend.pricing import Case, Plan, price

MIN_GAIN = 1.05
"""A smaller predicted gain is within the spread of the acceptance that it rests on."""
LONGEST_CHAIN = 8
LONG_CONTEXT_TOKENS = 4096
SHORT_CONTEXT_TOKENS = 2048
MEDUSA_RANKS = (0.55, 0.13, 0.06, 0.04, 0.03, 0.02)
"""Chance that a head's r-th guess is right: assumption, near what the Medusa paper's figures show."""
NEAREST = {
    ("pytorch", "medusa"): "eagle3", ("pytorch", "eagle"): "eagle3", ("pytorch", "lookahead"): "ngram",
    ("tensorrt", "eagle3"): "eagle",
}  # fmt: skip
ENDS_AT = "exists only on TensorRT-LLM engines, up to 1.2.1 (backend tensorrt)"
EXISTS_ON = {
    "medusa": ENDS_AT, "lookahead": ENDS_AT, "eagle": ENDS_AT,
    "eagle3": "exists only on the LLM API (backend pytorch, TensorRT-LLM 1.0 and later)",
}  # fmt: skip


@dataclass(frozen=True)
class Drafting:
    """``version``: the backend versions that this needs, or None for all. ``estimate`` is at full
    concurrency; None without a GPU."""

    speculation: Speculation
    acceptance: Acceptance
    version: str | None
    estimate: Estimate | None


@dataclass(frozen=True)
class _Method:
    """A drafting method with its sizes: ``options`` from the smallest to the largest."""

    kind: str
    options: tuple[Speculation, ...]
    acceptance: Acceptance
    version: str | None = None


@dataclass(frozen=True)
class _Priced:
    method: _Method
    speculation: Speculation
    estimate: Estimate
    gain: float
    """Over the same weights without speculation, at the same concurrency."""


def choose_drafting(case: Case, path: Path, chosen: Format) -> Drafting:
    """The drafting for the chosen formats, or none where nothing pays."""
    none = Drafting(NoSpeculation(kind="none"), ExactAcceptance(kind="exact"), None, chosen.plain)
    methods = list(_methods(case, path, chosen))
    if case.gpu is None:
        return _without_gpu(case, path, methods, none)
    n = chosen.sequences
    here, later = [], []
    for method in methods:
        best = _best(case, chosen, method, n)
        if best.estimate.memory.max_sequences < n:
            held = max(0, best.estimate.memory.max_sequences)
            lost = best.estimate.memory.draft_weights_bytes / 2**30
            text = (
                f"speculation costs memory: {lost:.2f} GiB of draft weights and its KV leave room for {held}"
            )
            text += f" of {n} sequences"
            path.reject("memory", name_of(best.speculation), text)
        elif best.gain >= MIN_GAIN:
            here.append(best)
        else:
            later.append(best)
    if here:
        here.sort(key=lambda priced: priced.estimate.tpot_ms)
        best = here[0]
        for other in here[1:] + later:
            path.reject(
                "speculation",
                name_of(other.speculation),
                f"gain {other.gain:.2f}x, the chosen {best.gain:.2f}x",
                other.estimate,
            )
        return _take(case, path, chosen, best)
    limited = _limited(case, path, chosen, later) if n > 1 else None
    if limited is not None:
        return limited
    for other in later:
        path.reject("speculation", name_of(other.speculation), _why_it_loses(case, other, n), other.estimate)
    words = "no method that needs no training gains enough" if case.heads is None else "nothing gains enough"
    if not methods:
        words = "nothing that this backend runs needs no training"
    path.take("speculation", "none", f"{words} at {n} sequences (at least {MIN_GAIN:g}x is asked)")
    return none


# --------------------------------------------------------------------------- what exists


def _methods(case: Case, path: Path, chosen: Format) -> Iterable[_Method]:
    exact = ExactAcceptance(kind="exact")
    n, backend = chosen.sequences, case.backend
    on = EMBEDDED_SPECULATION if backend == "embedded" else SPECULATION_ON[backend]
    heads = case.heads
    if heads is None:
        _untrained(case, path, chosen)
    elif heads.method not in on:
        nearest = NEAREST.get((backend, heads.method), "ngram")
        trained = f" (to be trained) or {'ngram' if backend != 'tensorrt' else 'lookahead'}"
        where = EXISTS_ON[heads.method] if backend != "embedded" else "is not run by the embedded engine"
        path.reject(
            "speculation", heads.method, f"{where}; the nearest on {backend} is {nearest}"
            + (trained if nearest not in ("ngram", "lookahead") else ""),
        )  # fmt: skip
    else:
        yield from _headed(case, path, chosen)
    for kind in ("medusa", "eagle", "eagle3", "lookahead"):
        if kind not in on and backend != "embedded" and (heads is None or heads.method != kind):
            path.reject("speculation", kind, EXISTS_ON[kind])
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
            NgramSpeculation(kind="ngram", num_draft_tokens=k, min_ngram=2, max_ngram=4) for k in _lengths()
        )
        yield _Method("ngram", tuple(chain), exact)
    if "lookahead" in on:
        small = LookaheadSpeculation(kind="lookahead", window=2, ngram=3, verification_set=2)
        usual = LookaheadSpeculation(kind="lookahead", window=4, ngram=3, verification_set=4)
        yield _Method("lookahead", (small, usual), exact)


def _lengths() -> range:
    return range(1, LONGEST_CHAIN + 1)


def _headed(case: Case, path: Path, chosen: Format) -> Iterable[_Method]:
    heads, sampling = case.heads, case.scenario.temperature > 0
    assert heads is not None
    exact = ExactAcceptance(kind="exact")
    if heads.method == "eagle3":
        rejection = sampling and case.scenario.fidelity != "exact"
        size = "fp8" if why_not("fp8", case) is None else "none"
        yield _Method(
            "eagle3",
            tuple(
                Eagle3Speculation(kind="eagle3", heads=heads.source, num_draft_tokens=k, quantization=size)  # type: ignore[arg-type]
                for k in _lengths()
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
        yield _Method("medusa", trees, exact)
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
        yield _Method("eagle", trees_eagle, TypicalAcceptance(kind="typical") if sampling else exact)


def draft_quantization(case: Case, chosen: Format) -> Quantization:
    """The draft model's format: small like the target's. Strict acceptance keeps the output law whatever the
    draft is, so fidelity does not forbid it."""
    assert case.draft is not None
    wanted = chosen.quantization.kind
    order = ["fp8", "w4a16_awq", "nvfp4"]
    if wanted in ("w4a16_awq", "nvfp4") or (wanted == "none" and chosen.sequences == 1):
        order = ["w4a16_awq", "nvfp4", "fp8"]
    for kind in order:
        found = (
            quantization(kind, "none", case.draft.spec, chosen.tp) if why_not(kind, case) is None else None
        )
        if found is not None:
            return found
    return NoQuantization(kind="none")


def _draft_model(case: Case, chosen: Format, draft: Quantization) -> _Method:
    assert case.draft is not None
    rejection = (
        case.scenario.temperature > 0 and case.scenario.fidelity != "exact" and case.backend == "pytorch"
    )
    chain = (
        DraftModelSpeculation(
            kind="draft_model", model=Model(source=case.draft.source), num_draft_tokens=k, quantization=draft
        )
        for k in _lengths()
    )
    acceptance: Acceptance = (
        RejectionAcceptance(kind="rejection") if rejection else ExactAcceptance(kind="exact")
    )
    return _Method("draft_model", tuple(chain), acceptance, ">=1.3,<1.5" if rejection else None)


def _untrained(case: Case, path: Path, chosen: Format) -> None:
    """No head is named, so none is recommended; what one would bring, by published acceptance."""
    if case.gpu is None or case.backend == "embedded":
        return
    n = chosen.sequences
    if case.backend == "pytorch":
        chain = (Eagle3Speculation(kind="eagle3", heads="HEAD", num_draft_tokens=k) for k in _lengths())
        method = _Method("eagle3", tuple(chain), ExactAcceptance(kind="exact"))
    elif chosen.quantization.kind == "none":
        tree = EagleSpeculation(kind="eagle", heads="HEAD", depth=5, top_k=8, num_draft_tokens=31)
        method = _Method("eagle", (tree,), ExactAcceptance(kind="exact"))
    else:
        return
    would = _best(case, chosen, method, n)
    text = (
        f"no trained head is named (--heads), and none is invented; one trained for this model would bring "
        f"{would.gain:.2f}x at {n} sequence{'s' if n > 1 else ''}, acceptance length "
        f"{show(would.estimate.acceptance_length)} as published for others"
    )
    path.reject("speculation", f"{method.kind} (untrained)", text, would.estimate)


# --------------------------------------------------------------------------- what pays


def _plan(
    chosen: Format, method: _Method, speculation: Speculation, n: int, tokens: int | None = None
) -> Plan:
    return Plan(chosen.quantization, speculation, method.acceptance, chosen.tp, n, tokens)


def _plain(chosen: Format, n: int, tokens: int | None = None) -> Plan:
    return Plan(chosen.quantization, tp=chosen.tp, concurrency=n, input_tokens=tokens)


def _best(case: Case, chosen: Format, method: _Method, n: int, tokens: int | None = None) -> _Priced:
    """The size of ``method`` with the shortest time per token at ``n`` sequences; the smaller of equals."""
    priced = [(price(case, _plan(chosen, method, s, n, tokens)), s) for s in method.options]
    estimate, speculation = min(priced, key=lambda item: item[0].tpot_ms)
    return _Priced(
        method, speculation, estimate, price(case, _plain(chosen, n, tokens)).tpot_ms / estimate.tpot_ms
    )


def _gain(case: Case, chosen: Format, method: _Method, speculation: Speculation, n: int) -> float:
    plain = price(case, _plain(chosen, n))
    return plain.tpot_ms / price(case, _plan(chosen, method, speculation, n)).tpot_ms


def _limited(case: Case, path: Path, chosen: Format, methods: list[_Priced]) -> Drafting | None:
    """The method that pays up to the largest batch, with that batch as its limit; None where none pays for
    two sequences, or where the backend cannot stop drafting."""
    n = chosen.sequences
    found: list[tuple[int, _Priced]] = []
    for losing in methods:
        if case.scenario.memory == "tight" and losing.estimate.memory.draft_weights_bytes > 0:
            text = (
                "speculation costs memory, and a draft that drafts below its break-even only holds it always"
            )
            path.reject("memory", name_of(losing.speculation), text, losing.estimate)
            continue
        one = _best(case, chosen, losing.method, 1)
        if one.gain < MIN_GAIN:
            path.reject(
                "speculation", name_of(losing.speculation), _why_it_loses(case, one, 1), losing.estimate
            )
            continue
        limit = _break_even(case, chosen, losing.method, n)
        found.append((limit, _best(case, chosen, losing.method, limit)))
    if not found:
        return None
    limit, best = max(found, key=lambda item: (item[0], item[1].gain))
    one = _best(case, chosen, best.method, 1)
    for other_limit, other in found:
        if other is not best:
            path.reject(
                "speculation",
                name_of(other.speculation),
                f"pays up to batch {other_limit}, the chosen up to {limit}",
                other.estimate,
            )
    text = f"pays up to batch {limit} ({best.gain:.2f}x there, {one.gain:.2f}x at 1), not at {n}"
    if limit < 2 or case.backend == "tensorrt" or best.method.kind not in ("ngram", "draft_model", "eagle3"):
        if case.backend == "tensorrt":
            text += "; engines draft at every batch size"
        path.reject(
            "speculation",
            name_of(best.speculation),
            text,
            price(case, _plan(chosen, best.method, best.speculation, n)),
        )
        path.take("speculation", "none", f"{n} sequences are above every break-even batch")
        return Drafting(NoSpeculation(kind="none"), ExactAcceptance(kind="exact"), None, chosen.plain)
    speculation = best.speculation.model_copy(update={"max_concurrency": limit})
    version = best.method.version
    if case.backend == "pytorch" and version is None:
        version = ">=1.3,<1.5" if best.method.kind == "eagle3" else ">=1.1,<1.5"
    path.take(
        "speculation", f"{name_of(speculation)}, at most {limit} sequences at once", text
        + "; above its break-even a draft costs more than it brings",
        ("break-even batch", limit, ""), ("gain there", best.gain, "x"), ("gain at 1", one.gain, "x"),
        ("acceptance length", best.estimate.acceptance_length, "tokens/step"),
    )  # fmt: skip
    # At full concurrency nothing is drafted, so that is what the recipe is priced at.
    return Drafting(speculation, best.method.acceptance, version, chosen.plain)


def _break_even(case: Case, chosen: Format, method: _Method, most: int) -> int:
    """The largest batch from 1 to ``most`` that pays, given that 1 does and gains fall with the batch."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        pays = _best(case, chosen, method, middle).gain >= MIN_GAIN
        low, high = (middle, high) if pays else (low, middle - 1)
    return low


def _take(case: Case, path: Path, chosen: Format, best: _Priced) -> Drafting:
    n = chosen.sequences
    speculation, method = best.speculation, best.method
    tokens = case.scenario.input_tokens + case.scenario.output_tokens
    if tokens > LONG_CONTEXT_TOKENS and len(method.options) > 1:
        short = _best(case, chosen, method, n, SHORT_CONTEXT_TOKENS)
        if drafted_positions(short.speculation) < drafted_positions(speculation):
            speculation = short.speculation  # a long context never lengthens the draft
        path.take(
            "length", name_of(speculation),
            f"the target's step grows with the context it reads: at {tokens} tokens no longer a draft than "
            f"at {SHORT_CONTEXT_TOKENS}",
            ("best at this context", drafted_positions(best.speculation), "positions"),
            ("best at the short one", drafted_positions(short.speculation), "positions"),
        )  # fmt: skip
    estimate = price(case, _plan(chosen, method, speculation, n))
    plain = price(case, _plain(chosen, n))
    gain = plain.tpot_ms / estimate.tpot_ms
    numbers = [
        ("TPOT without", plain.tpot_ms, "ms"), ("with", estimate.tpot_ms, "ms"), ("gain", gain, "x"),
        ("acceptance length", estimate.acceptance_length, "tokens/step"),
    ]  # fmt: skip
    if estimate.break_even_batch is not None:
        numbers.append(("loses from batch", estimate.break_even_batch, ""))
    path.take("speculation", name_of(speculation), _why_it_wins(case, method.kind, n), *numbers)
    path.take(
        "speculation", "no credit for TTFT",
        "the first token waits for the prompt, which no drafting shortens; a draft may add its own",
        ("TTFT without", plain.ttft_ms, "ms"), ("with", estimate.ttft_ms, "ms"),
    )  # fmt: skip
    _draft_format(case, path, chosen, method, speculation, estimate)
    words = {
        "exact": "the target's own token is drawn, a draft that equals it kept: the target's own output",
        "rejection": "sampling with draft probabilities: the same law, more accepted than by equality",
        "typical": "approximate fidelity allows it; the gate lossless is off",
    }
    path.take("acceptance", method.acceptance.kind, words[method.acceptance.kind])
    return Drafting(speculation, method.acceptance, method.version, estimate)


def _draft_format(
    case: Case, path: Path, chosen: Format, method: _Method, speculation: Speculation, estimate: Estimate
) -> None:
    """Quantize the draft too, and say what leaving it out would cost here."""
    held = getattr(speculation, "quantization", None)
    kind = held if isinstance(held, str) else getattr(held, "kind", None)
    if kind in (None, "none"):
        return
    unquantized = NoQuantization(kind="none") if method.kind == "draft_model" else "none"
    left_out = speculation.model_copy(update={"quantization": unquantized})
    slower = price(case, _plan(chosen, method, left_out, chosen.sequences))
    loss = 1 - estimate.tpot_ms / slower.tpot_ms
    path.take(
        "speculation", f"draft in {NAMES[str(kind)]}",
        f"a draft left in 16 bit would cost {loss:.1%} of the speed here; strict acceptance keeps the output "
        "law whatever the draft's format",
        ("TPOT with a 16-bit draft", slower.tpot_ms, "ms"), ("quantized", estimate.tpot_ms, "ms"),
    )  # fmt: skip
    path.reject("speculation", f"{method.kind} with a 16-bit draft", f"costs {loss:.1%} of the speed", slower)


def _without_gpu(case: Case, path: Path, methods: list[_Method], none: Drafting) -> Drafting:
    ngram = next((method for method in methods if method.kind == "ngram"), None)
    if ngram is None or case.scenario.copy_fraction < 0.2:
        text = f"n-gram drafts copy, and only {case.scenario.copy_fraction:.0%} of the answer repeats"
        path.take("speculation", "none", text)
        return none
    speculation = ngram.options[3]
    text = f"{case.scenario.copy_fraction:.0%} of the answer repeats; no training; verify measures the gain"
    path.take("speculation", name_of(speculation), text)
    return Drafting(speculation, ngram.acceptance, None, None)


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


def _why_it_wins(case: Case, kind: str, n: int) -> str:
    users = (
        "one user: verifying a few positions costs hardly more than one"
        if n == 1
        else f"{n} sequences are below its break-even batch"
    )
    if kind == "ngram":
        repeats = f"{case.scenario.copy_fraction:.0%} of the answer repeats known text"
        return f"{users}; {repeats}, and copying needs no training"
    if kind == "draft_model":
        draft = case.draft.source if case.draft else "the draft"
        return f"{users}; {draft} shares the tokenizer and needs no training"
    return users


def _why_it_loses(case: Case, priced: _Priced, n: int) -> str:
    where = f"{priced.gain:.2f}x at {n} sequence{'s' if n > 1 else ''}"
    if priced.method.kind == "ngram" and n == 1:
        return f"{where}: free text (copy fraction {case.scenario.copy_fraction:g}) gives few matches"
    return f"{where}: {MIN_GAIN:g}x is asked"

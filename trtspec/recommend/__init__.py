"""Which quantization, drafting and limits for a scenario, why, and what was rejected by which number.

The tree is plain: :mod:`.formats` chooses weights and KV cache (fidelity first, then what the concurrency
asks for, then what fits), :mod:`.drafting` how to draft, :mod:`.sizes` the limits; :mod:`.pricing` asks the
cost model, :mod:`.decision` is what they fill in, :mod:`.write` the recipe as a file with the reasons in it.
"""

from __future__ import annotations

from dataclasses import replace

from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.errors import InconclusiveError, InputError
from trtspec.hardware import Gpu
from trtspec.known_models import NamedModel
from trtspec.recipe import NoQuantization
from trtspec.recommend.decision import Path, Reason, Recommendation, Rejected, show
from trtspec.recommend.drafting import Drafting, choose_drafting
from trtspec.recommend.evidence import Evidence
from trtspec.recommend.formats import (
    NAMES,
    WEIGHT_ONLY_LOSES_FROM,
    Format,
    choose_format,
    few_kinds,
    parallel_sizes,
    why_not,
)
from trtspec.recommend.heads import Heads
from trtspec.recommend.methods import DOCUMENTED_UNDER, EXISTS_ON, name_of
from trtspec.recommend.pricing import BackendKind, Case, Plan, price
from trtspec.recommend.sizes import build_recipe
from trtspec.scenario import Scenario

__all__ = ["Reason", "Recommendation", "Rejected", "recommend"]

LARGEST_COUNT = 64
CLEARLY_FASTER = 0.9
"""Share of the time per token from which the other format is worth a warning."""


def recommend(
    scenario: Scenario,
    model: NamedModel,
    gpu: Gpu | None,
    *,
    count: int = 1,
    backend: BackendKind | None = None,
    heads: Heads | None = None,
    draft: NamedModel | None = None,
    evidence: Evidence | None = None,
    weights: str | None = None,
    coefficients: Coefficients = DEFAULT,
) -> Recommendation:
    """The recipe for ``scenario`` on ``count`` GPUs (``gpu`` None: a machine without one). ``weights`` leaves
    only that weights format; ``coefficients`` are those of the step times.

    Raises InputError when nothing that is allowed fits, or the request contradicts itself, with what would
    fit; InconclusiveError when only a format fits whose quality gate has not been passed yet.
    """
    _check(scenario, model, gpu, count, backend)
    path = Path()
    kind = _backend(path, gpu, backend, heads)
    only = (weights,) if weights is not None else None
    case = Case(scenario, model, gpu, count, kind, heads, draft, evidence, only, coefficients=coefficients)
    _check_weights(case)
    outcome = _decide(case, path)
    if heads is not None and weights is None and kind == "tensorrt" and heads.method in DOCUMENTED_UNDER:
        outcome = _with_or_without_heads(case, path, outcome)
    return _finish(case, outcome)


def _check(
    scenario: Scenario, model: NamedModel, gpu: Gpu | None, count: int, backend: BackendKind | None
) -> None:
    problems = []
    tokens = scenario.input_tokens + scenario.output_tokens
    if tokens > model.spec.max_positions:
        problems.append(
            f"{scenario.name}: {scenario.input_tokens} + {scenario.output_tokens} = {tokens} tokens exceed "
            f"the {model.spec.max_positions} positions of {model.source}; what fits: --input-tokens "
            f"{max(1, model.spec.max_positions - scenario.output_tokens)}"
        )
    if model.spec.quant is not None:
        problems.append(
            f"{model.source} is quantized already ({model.spec.quant.algo}); name the 16-bit checkpoint, "
            "which is what quality is measured against"
        )
    if not 1 <= count <= LARGEST_COUNT:
        problems.append(f"--count: found {count}; allowed: 1 to {LARGEST_COUNT}")
    if gpu is None and backend not in (None, "embedded"):
        problems.append(f"backend {backend} needs an NVIDIA GPU; name it with --gpu, or choose embedded")
    if gpu is not None and gpu.sm < 80 and backend != "embedded":
        problems.append(f"{gpu.name} (sm{gpu.sm}) is older than TensorRT-LLM supports (sm80)")
    if problems:
        raise InputError("\n".join(problems))


def _check_weights(case: Case) -> None:
    """A weights format that was asked for must exist here and be allowed."""
    for kind in case.only or ():
        reason = why_not(kind, case)
        if reason is not None:
            raise InputError(f"--weights {kind}: {reason}")
        if case.scenario.fidelity == "exact" and kind not in ("none", case.passed_weights):
            raise InconclusiveError(
                f"--weights {kind}: fidelity is exact; build it, let trtspec verify pass its quality gate, "
                "and give the report (--report); or allow it with --fidelity distribution"
            )


def _backend(path: Path, gpu: Gpu | None, asked: BackendKind | None, heads: Heads | None) -> BackendKind:
    if gpu is None:
        path.take("backend", "embedded", "no GPU: trtspec's own engine runs on any machine")
        return "embedded"
    if asked is not None:
        path.take("backend", asked, "asked for")
        return asked
    if heads is not None and heads.method in DOCUMENTED_UNDER:
        path.take("backend", "tensorrt", f"{heads.method} {EXISTS_ON[heads.method]}")
        path.warn(
            "TensorRT-LLM dropped engines after 1.2.1: this recipe pins an ending line; EAGLE-3 succeeds it"
        )
        return "tensorrt"
    path.take("backend", "pytorch", "the LLM API: TensorRT-LLM's only line after 1.2.1")
    return "pytorch"


# --------------------------------------------------------------------------- deciding


class _Outcome:
    """A format, a way to draft and the path to both."""

    def __init__(self, case: Case, path: Path, chosen: Format, drafting: Drafting) -> None:
        self.case, self.path, self.chosen, self.drafting = case, path, chosen, drafting

    @property
    def total(self) -> float:
        """Tokens/s of all replicas together."""
        estimate = self.drafting.estimate
        return estimate.tokens_per_s * self.chosen.replicas if estimate else 0.0

    @property
    def rank(self) -> tuple[float, ...]:
        """Larger is better: sequences held, SLO met, then tokens/s for many and a short answer for few."""
        estimate, slo = self.drafting.estimate, self.case.scenario.slo
        if estimate is None:
            return (0.0,)
        held = min(1.0, self.chosen.sequences / self.chosen.wanted)
        met = float(
            (slo.ttft_ms is None or estimate.ttft_ms <= slo.ttft_ms)
            and (slo.tpot_ms is None or estimate.tpot_ms <= slo.tpot_ms)
        )
        few = self.chosen.wanted < WEIGHT_ONLY_LOSES_FROM
        return (held, met, -self.answer_ms if few else self.total)

    @property
    def answer_ms(self) -> float:
        """Prompt and whole answer of one request."""
        estimate = self.drafting.estimate
        if estimate is None:
            return float("inf")
        return estimate.ttft_ms + estimate.tpot_ms * (self.case.scenario.output_tokens - 1)


def _decide(case: Case, path: Path) -> _Outcome:
    """The best over the tensor parallel sizes that the GPUs allow."""
    outcomes = []
    tried: list[Path] = []
    for tp in parallel_sizes(case):
        by_format = []
        for first in few_kinds(case, tp):
            branch = Path(list(path.because), list(path.rejected), list(path.warnings))
            _serving_first(case, branch)
            chosen = choose_format(replace(case, first=first), branch, tp)
            tried.append(branch)
            if chosen is not None:
                by_format.append(_Outcome(case, branch, chosen, choose_drafting(case, branch, chosen)))
        if by_format:
            outcomes.append(_best_format(by_format))
    if not outcomes:
        _refuse(case, tried)
    best = max(outcomes, key=lambda outcome: outcome.rank)
    if case.count > 1:
        _explain_parallel(best, outcomes)
    if case.only is None and case.scenario.concurrency == 1 and best.chosen.quantization.kind == "w4a16_awq":
        _compare_fp8(case, best)
    return best


def _best_format(outcomes: list[_Outcome]) -> _Outcome:
    """The best of the formats that were tried for a few users, each with its own best drafting."""
    best = max(outcomes, key=lambda outcome: outcome.rank)
    for other in outcomes:
        if other.chosen.quantization.kind != best.chosen.quantization.kind and other.answer_ms < float("inf"):
            what = f"{other.chosen.label} with {name_of(other.drafting.speculation)}"
            text = (
                f"a whole answer takes {show(other.answer_ms)} ms, with the chosen {show(best.answer_ms)} ms"
            )
            best.path.reject(
                "weights", what.replace("with none", "without drafting"), text, other.drafting.estimate
            )
    return best


def _compare_fp8(case: Case, best: _Outcome) -> None:
    """What FP8 with its own best drafting would do for the one user who gets W4A16: more positions are
    verified for free where the arithmetic is not weight-only. Where it looks faster, say so."""
    if case.gpu is None or why_not("fp8", case) is not None:
        return
    other_case = replace(case, only=("fp8",), prices={})
    scratch = Path()
    chosen = choose_format(other_case, scratch, best.chosen.tp)
    if chosen is None or chosen.quantization.kind != "fp8" or best.drafting.estimate is None:
        return
    drafting = choose_drafting(other_case, scratch, chosen)
    if drafting.estimate is None:
        return
    ratio = drafting.estimate.tpot_ms / best.drafting.estimate.tpot_ms
    how = name_of(drafting.speculation)
    what = "FP8 weights without drafting" if how == "none" else f"FP8 weights with {how}"
    text = f"TPOT {ratio:.2f}x of the chosen; it holds {chosen.label}, "
    text += f"{chosen.plain.memory.weights_bytes / 2**30:.1f} GiB of weights" if chosen.plain else ""
    best.path.reject("weights", what, text, drafting.estimate)
    if ratio < CLEARLY_FASTER:
        best.path.warn(
            f"by this estimate {what} takes {ratio:.2f}x the time per token on {case.gpu.name}, with more "
            "memory; W4A16 is the rule for one user: build both (--weights fp8) where it matters"
        )


def _serving_first(case: Case, path: Path) -> None:
    if case.scenario.concurrency > 1:
        words = "they cost nothing: a shared prefix is computed once, requests join and leave the batch at "
        words += "any step, prompts are cut so that they do not stop the others"
        path.take("serving", "prefix cache, in-flight batching, chunked prefill first", words)


def _explain_parallel(best: _Outcome, outcomes: list[_Outcome]) -> None:
    for other in outcomes:
        if other is not best:
            what = f"tensor parallel {other.chosen.tp} x {other.chosen.replicas} replicas"
            text = f"{show(other.total)} tokens/s in all against {show(best.total)}, or slower per token"
            best.path.reject("parallel", what, text, other.drafting.estimate)
    chosen = best.chosen
    few = chosen.wanted < WEIGHT_ONLY_LOSES_FROM
    why = "the shortest time for an answer" if few else "the most tokens/s that meets the bounds"
    replicas = f"{chosen.replicas} replica{'s' if chosen.replicas > 1 else ''}"
    best.path.take(
        "parallel", f"tensor parallel {chosen.tp}, {replicas}",
        f"{why} on {best.case.count} GPUs", ("tokens/s in all", best.total, ""),
    )  # fmt: skip


def _with_or_without_heads(case: Case, path: Path, without: _Outcome) -> _Outcome:
    """Engines with Medusa or EAGLE heads are documented for some target formats only: price the heads under
    those, and keep what is faster."""
    assert case.heads is not None
    method = case.heads.method
    if (
        without.drafting.speculation.kind == method
        and without.chosen.quantization.kind in DOCUMENTED_UNDER[method]
    ):
        return without
    bare = _decide(replace(case, heads=None, prices={}), path)
    try:
        headed = _decide(replace(case, only=DOCUMENTED_UNDER[method], prices={}), path)
    except (InputError, InconclusiveError):
        bare.path.reject("speculation", method, "its documented target formats do not fit here")
        return bare
    if headed.drafting.speculation.kind != method or headed.rank < bare.rank:
        names = " or ".join(NAMES[kind] for kind in DOCUMENTED_UNDER[method])
        text = f"under {names}, which is what its engines are documented for, it is slower than the chosen"
        bare.path.reject("speculation", method, text, headed.drafting.estimate)
        return bare
    text = f"without {method} it would be slower"
    headed.path.reject("weights", bare.chosen.label, text, bare.drafting.estimate)
    return headed


# --------------------------------------------------------------------------- nothing fits


def _refuse(case: Case, tried: list[Path]) -> None:
    """Raise with what would fit: fewer bits, more GPUs, a shorter context."""
    scenario = case.scenario
    gpu = case.gpu
    assert gpu is not None
    misfits = list(
        dict.fromkeys(
            f"{r.what} {r.because}" for branch in tried for r in branch.rejected if r.step == "memory"
        )
    )
    lines = [f"{case.model.source} for {scenario.name} does not fit on {case.count} x {gpu.name}:"]
    lines += [f"  {text}" for text in misfits] or ["  no format is left"]
    would = []
    more = _count_that_fits(case)
    if more is not None:
        would.append(f"--count {more} ({more} x {gpu.name})")
    shorter = _context_that_fits(case)
    if shorter is not None:
        would.append(f"a shorter context (--input-tokens {shorter})")
    gated = _gated_that_fits(case) if scenario.fidelity == "exact" else None
    if gated is not None:
        lines.append(
            f"what would: {gated.label}, once its quality gate is passed (build and verify it, then "
            f"--report FILE){''.join('; or ' + text for text in would)}"
        )
        raise InconclusiveError("\n".join(lines))
    if not would:
        would.append("a GPU with more memory, or a smaller model")
    lines.append(f"what would: {'; or '.join(would)}")
    raise InputError("\n".join(lines))


def _fits(case: Case) -> Format | None:
    found = (choose_format(case, Path(), tp) for tp in parallel_sizes(case))
    return next((chosen for chosen in found if chosen is not None), None)


def _gated_that_fits(case: Case) -> Format | None:
    """The format that loses least quality of those that fit and only lack a passed gate."""
    loose = case.scenario.model_copy(update={"fidelity": "distribution"})
    kinds = [kind for kind in ("fp8", "w8a8_sq", "nvfp4", "w4a8_awq", "w4a16_awq") if case.only is None]
    found = (_fits(replace(case, scenario=loose, only=(kind,), prices={})) for kind in kinds)
    return next((chosen for chosen in found if chosen is not None), None)


def _count_that_fits(case: Case) -> int | None:
    counts = [count for count in (2, 4, 8, 16) if count > case.count]
    return next((n for n in counts if _fits(replace(case, count=n, prices={})) is not None), None)


def _context_that_fits(case: Case) -> int | None:
    """The longest prompt, in steps of 256 tokens, that fits; None where no shorter one does."""
    low, high = 0, case.scenario.input_tokens // 256
    while low < high:
        middle = (low + high + 1) // 2
        shorter = case.scenario.model_copy(update={"input_tokens": 256 * middle})
        fits = _fits(replace(case, scenario=shorter, prices={})) is not None
        low, high = (middle, high) if fits else (low, middle - 1)
    return 256 * low if low else None


# --------------------------------------------------------------------------- the answer


def _finish(case: Case, outcome: _Outcome) -> Recommendation:
    chosen, drafting, path = outcome.chosen, outcome.drafting, outcome.path
    baseline = None
    if case.gpu is not None:
        plan = Plan(NoQuantization(kind="none"), tp=chosen.tp, concurrency=chosen.sequences)
        baseline = price(case, plan)
    recipe = build_recipe(case, chosen, drafting, path, baseline_fits=baseline is not None and baseline.fits)
    _check_slo(case, outcome)
    if case.gpu is not None and case.backend == "embedded":
        path.warn("the step times are those of TensorRT-LLM's kernels; the embedded engine is slower")
    return Recommendation(
        recipe=recipe,
        scenario=case.scenario,
        model=case.model.source,
        gpu=f"{case.count} x {case.gpu.name}" if case.gpu else "a machine without a GPU",
        replicas=chosen.replicas,
        estimate=drafting.estimate,
        plain=chosen.plain,
        baseline=baseline,
        because=tuple(path.because),
        rejected=tuple(path.rejected),
        warnings=tuple(path.warnings),
    )


def _check_slo(case: Case, outcome: _Outcome) -> None:
    estimate, slo, path = outcome.drafting.estimate, case.scenario.slo, outcome.path
    chosen = outcome.chosen
    if chosen.sequences < chosen.wanted:
        held = chosen.sequences * chosen.replicas
        more = _count_that_holds(case)
        path.warn(
            f"{held} of {case.scenario.concurrency} requests run at once, the rest queue (their TTFT grows); "
            + (f"--count {more} holds all" if more else "a larger GPU or a shorter context holds more")
        )
    if estimate is None:
        path.warn("no step times are known without a GPU: build it and let trtspec verify measure")
        return
    for name, bound, value, remedy in (
        (
            "TTFT",
            slo.ttft_ms,
            estimate.ttft_ms,
            "more GPUs, a shorter prompt or fewer requests at once; drafting never helps it",
        ),
        ("TPOT", slo.tpot_ms, estimate.tpot_ms, "more GPUs, fewer requests at once or smaller weights"),
    ):
        if bound is None:
            continue
        met = value <= bound
        path.take("slo", f"{name} {'met' if met else 'missed'}", f"asked for at most {bound:g} ms",
                  (f"estimated {name}", value, "ms"))  # fmt: skip
        if not met:
            path.warn(f"{name} {show(value)} ms misses the {bound:g} ms asked for; what helps: {remedy}")


def _count_that_holds(case: Case) -> int | None:
    for count in (2, 4, 8, 16):
        if count > case.count:
            wider = replace(case, count=count, prices={})
            formats = [choose_format(wider, Path(), tp) for tp in parallel_sizes(wider)]
            if any(chosen is not None and chosen.sequences >= chosen.wanted for chosen in formats):
                return count
    return None

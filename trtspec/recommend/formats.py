"""Which weights and KV formats: what the GPU and the backend run, what fidelity allows, what pays at this
concurrency, what fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtspec.cost.estimate import Estimate
from trtspec.modelspec import ModelSpec, linear_modules
from trtspec.recipe import Quantization
from trtspec.recommend.decision import Path
from trtspec.recommend.pricing import Case, Plan, price

NAMES = {
    "none": "16-bit weights", "fp8": "FP8 weights", "w4a16_awq": "W4A16 (AWQ)", "w4a8_awq": "W4A8 (AWQ)",
    "w8a8_sq": "W8A8 (SmoothQuant)", "nvfp4": "NVFP4 weights",
}  # fmt: skip
KV_NAMES = {"none": "16-bit KV", "fp8": "FP8 KV", "int8": "INT8 KV"}
WEIGHT_ONLY_LOSES_FROM = 8
"""Concurrency from which weight-only 4-bit loses to 16 bit: 0.75x and 0.83x at batch 8 and 64 on an 8B
(Model-Optimizer examples/benchmark.md); TensorRT-LLM's own advice is weight-only up to 4, FP8 from 16."""
KV_SHARE_THAT_MATTERS = 0.1


@dataclass(frozen=True)
class Format:
    """Chosen formats on ``tp`` GPUs: ``sequences`` of the ``wanted`` ones run at once on this engine."""

    quantization: Quantization
    tp: int
    replicas: int
    wanted: int
    sequences: int
    plain: Estimate | None

    @property
    def label(self) -> str:
        return label(self.quantization.kind, self.quantization.kv_cache)


def label(kind: str, kv: str) -> str:
    return f"{NAMES[kind]}, {KV_NAMES[kv]}"


def why_not(kind: str, case: Case) -> str | None:
    """Why this GPU and backend do not run the weights format, or None if they do."""
    if case.backend == "embedded" or case.gpu is None:
        return "the embedded engine does not run NVFP4" if kind == "nvfp4" else None
    sm = case.gpu.sm
    if kind in ("fp8", "w4a8_awq") and sm < 89:
        return f"no FP8 arithmetic on {case.gpu.name} (sm{sm}); it starts with sm89"
    if kind == "nvfp4" and sm < 100:
        return f"no FP4 arithmetic on {case.gpu.name} (sm{sm}); it starts with sm100"
    if kind in ("w4a16_awq", "w4a8_awq") and sm >= 100:
        return f"TensorRT-LLM builds no {NAMES[kind]} engines for sm{sm}; its 4-bit format is NVFP4"
    if kind == "w8a8_sq":
        if case.backend == "pytorch":
            return "INT8 SmoothQuant runs on TensorRT-LLM engines only (backend tensorrt, up to 1.2.1)"
        if sm >= 100:
            return f"TensorRT-LLM refuses SmoothQuant engines on sm{sm}"
    return None


def quantization(kind: str, kv: str, spec: ModelSpec, tp: int) -> Quantization | None:
    """The recipe's section, or None where no group size divides the layers."""
    values: dict[str, Any] = {"kind": kind, "kv_cache": kv}
    if kind in ("w4a16_awq", "w4a8_awq"):
        group = group_size(spec, tp)
        if group is None:
            return None
        values["group_size"] = group
    return _parse(values)


def _parse(values: dict[str, Any]) -> Quantization:
    from pydantic import TypeAdapter

    parsed: Quantization = TypeAdapter(Quantization).validate_python(values)
    return parsed


def group_size(spec: ModelSpec, tp: int) -> int | None:
    """The largest group that divides the input of every linear layer, also when ``tp`` GPUs share it."""
    inputs = {columns for name, (_, columns) in linear_modules(spec).items() if name != "lm_head"}
    shards = {spec.intermediate_size // tp, spec.num_heads * spec.head_dim // tp}
    return next((g for g in (128, 64, 32) if all(size % g == 0 for size in inputs | shards)), None)


def parallel_sizes(case: Case) -> list[int]:
    """Tensor parallel sizes that divide the GPUs and the model, smallest first."""
    if case.backend == "embedded" or case.gpu is None:
        return [1]
    spec = case.spec
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if case.count % size == 0]
    return [
        size
        for size in sizes
        if spec.num_heads % size == 0
        and spec.intermediate_size % size == 0
        and (spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0)
    ]


# --------------------------------------------------------------------------- the tree


@dataclass(frozen=True)
class _Choice:
    kind: str
    kv: str
    because: str


def choose_format(case: Case, path: Path, tp: int) -> Format | None:
    """Weights and KV formats on ``tp`` GPUs, or None when nothing that is allowed fits.

    The first format of the preferred order if it holds all wanted sequences at full length. Where it does
    not, few users get the next one that does (else the one that holds most), many users the one with the
    most tokens/s.
    """
    replicas = max(1, case.count // tp)
    wanted = -(-case.scenario.concurrency // replicas)
    order = _order(case, path, wanted, tp)
    held: list[tuple[Format, str]] = []
    for choice in order:
        candidate = _try(case, path, choice, tp, replicas, wanted)
        if candidate is not None:
            held.append((candidate, choice.because))
            if candidate.sequences >= wanted:
                break
    if not held:
        return None
    if wanted >= WEIGHT_ONLY_LOSES_FROM:
        best, why = max(held, key=lambda item: item[0].plain.tokens_per_s if item[0].plain else 0.0)
    else:
        best, why = max(held, key=lambda item: item[0].sequences)
    _take(case, path, best, why, order)
    return best


def allowed_kinds(case: Case, path: Path) -> list[str]:
    """Weights formats that hardware, backend and fidelity leave, in the order of :data:`NAMES`."""
    kinds = []
    for kind, name in NAMES.items():
        reason = why_not(kind, case)
        if reason is not None:
            path.reject("weights", name, reason)
        elif case.only is not None and kind not in case.only:
            path.reject(
                "weights", name, f"only {' and '.join(NAMES[other] for other in case.only)} asked for"
            )
        elif kind != "none" and case.scenario.fidelity == "exact" and case.passed_weights != kind:
            path.reject(
                "weights", name,
                "fidelity exact: weights are quantized only after a passed quality gate "
                "(build and verify it, then --report)",
            )  # fmt: skip
        else:
            kinds.append(kind)
    return kinds


def kv8(kind: str, case: Case) -> bool:
    """Whether an 8-bit KV cache goes with these weights without losing attention kernels."""
    if case.backend == "embedded":
        return True
    if kind in ("w4a16_awq", "w4a8_awq"):
        return False
    return kind in ("fp8", "nvfp4") or case.backend == "pytorch"


def _order(case: Case, path: Path, n: int, tp: int) -> list[_Choice]:
    """Formats from the most to the least wanted, each with its reason."""
    kinds = allowed_kinds(case, path)
    exact = case.scenario.fidelity == "exact"
    if exact:
        passed = [kind for kind in kinds if kind != "none"]
        if passed:
            path.take(
                "fidelity", f"exact, {NAMES[passed[0]]} allowed",
                f"its quality gate passed ({case.evidence.quality if case.evidence else ''})",
            )  # fmt: skip
        else:
            path.take("fidelity", "exact", "no quality loss: 16-bit weights, strict acceptance")
            flagged = "optional, flagged: 16-bit KV does not hold all sequences; its quality gate must pass"
            order = (
                [_Choice("none", "none", "fidelity exact keeps weights and KV in 16 bit")] if kinds else []
            )
            return order + ([_Choice("none", "fp8", flagged)] if kinds and kv8("none", case) else [])
    else:
        words = "strict acceptance keeps the model's output law; quantization has a quality gate"
        path.take("fidelity", case.scenario.fidelity, words)

    four = next((kind for kind in ("nvfp4", "w4a16_awq", "w4a8_awq") if kind in kinds), None)
    if case.backend == "embedded" and "w4a16_awq" in kinds:
        four = "w4a16_awq"
    share = kv_share(case, n)
    fallback = [
        _Choice(
            kind, "fp8" if kv8(kind, case) and kind != "none" else "none", "what is wanted more does not fit"
        )
        for kind in ("fp8", "w8a8_sq", "none", "nvfp4", "w4a8_awq", "w4a16_awq")
        if kind in kinds
    ]
    if case.scenario.memory == "tight" and share >= KV_SHARE_THAT_MATTERS:
        # Long context: the cache is what fills the card.
        why = f"memory-bound: KV cache first; it would be {share:.0%} of weights and KV in 16 bit; these "
        why += "weights keep the kernels for an 8-bit cache"
        first = [
            _Choice(kind, "fp8", why)
            for kind in ("fp8", "none", "nvfp4")
            if kind in kinds and kv8(kind, case)
        ]
        return first + fallback
    if case.scenario.memory == "tight" and four is not None and n < WEIGHT_ONLY_LOSES_FROM:
        # Small card: the weights are what fills it.
        why = f"memory-bound, but the KV cache is only {share:.1%} of weights and KV: the weights go first"
        kv = "fp8" if kv8(four, case) else "none"
        return [_Choice(four, kv, why), *fallback]
    if n == 1 and four is not None:
        why = "one user: decoding reads every weight for every token, so their bytes decide; arithmetic idles"
        first = [_Choice(four, "none", why)]
        if four == "w4a16_awq" and "fp8" in kinds and _only_fp8_meets_ttft(case, tp):
            why = f"TTFT of at most {case.scenario.slo.ttft_ms:g} ms: weight-only 4-bit does not help prompts"
            first.insert(0, _Choice("fp8", "none", why))
        return first + fallback
    if n < WEIGHT_ONLY_LOSES_FROM:
        users = f"{n} user{'s' if n > 1 else ''}"
        why = f"{users}: the shortest time for a whole answer, prompt and drafting included"
        if case.gpu is None:
            why = f"{users}: the fewest weight bytes; arithmetic is not the bound"
        few = [kind for kind in (case.first, four, "fp8", "none") if kind is not None and kind in kinds]
        return [*(_Choice(kind, "none", why) for kind in dict.fromkeys(few)), *fallback]
    if "fp8" in kinds:
        why = f"{n} sequences a step: FP8 halves weights and KV and doubles the arithmetic, for prompts too"
        return [_Choice("fp8", "fp8", why), *fallback]
    if "w8a8_sq" in kinds and case.backend == "tensorrt":
        why = f"{n} sequences a step and no FP8 arithmetic here: INT8 weights and activations"
        return [_Choice("w8a8_sq", "none", why), *fallback]
    why = f"{n} sequences a step: 16 bit beats weight-only 4-bit from batch {WEIGHT_ONLY_LOSES_FROM}"
    order = [_Choice("none", "none", why)] if "none" in kinds else []
    if "none" in kinds and kv8("none", case):
        order.append(_Choice("none", "fp8", f"{why}; 16-bit KV does not hold all sequences"))
    return order + fallback


def kv_share(case: Case, n: int) -> float:
    """KV bytes of ``n`` full sequences over KV and weights, both in 16 bit."""
    spec = case.spec
    tokens = n * (case.scenario.input_tokens + case.scenario.output_tokens)
    kv = tokens * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
    return kv / (kv + 2 * spec.num_parameters)


def _only_fp8_meets_ttft(case: Case, tp: int) -> bool:
    """Whether the asked TTFT is met by FP8 weights and missed by W4A16."""
    bound = case.scenario.slo.ttft_ms
    fp8, four = (quantization(kind, "none", case.spec, tp) for kind in ("fp8", "w4a16_awq"))
    if bound is None or case.gpu is None or fp8 is None or four is None:
        return False
    priced = price(case, Plan(fp8, tp=tp))
    return priced.fits and priced.ttft_ms <= bound < price(case, Plan(four, tp=tp)).ttft_ms


def few_kinds(case: Case, tp: int) -> list[str | None]:
    """Formats to try in turn, each with its own best drafting; [None] where the tree decides without."""
    n = -(-case.scenario.concurrency // max(1, case.count // tp))
    scenario = case.scenario
    if case.gpu is None or scenario.memory == "tight" or scenario.fidelity == "exact":
        return [None]
    if not 1 < n < WEIGHT_ONLY_LOSES_FROM:
        return [None]
    kinds = allowed_kinds(case, Path())
    four = next((kind for kind in ("nvfp4", "w4a16_awq") if kind in kinds), None)
    tried: list[str | None] = [kind for kind in (four, "fp8", "none") if kind in kinds]
    return tried or [None]


def _try(case: Case, path: Path, choice: _Choice, tp: int, replicas: int, wanted: int) -> Format | None:
    chosen = quantization(choice.kind, choice.kv, case.spec, tp)
    if chosen is None:
        why = "no group of 128, 64 or 32 divides the inputs of every layer"
        path.reject("weights", NAMES[choice.kind], why)
        return None
    if case.gpu is None:
        return Format(chosen, tp, replicas, wanted, wanted, None)
    plain = price(case, Plan(chosen, tp=tp, concurrency=wanted))
    held = plain.memory.max_sequences
    if held < 1:
        path.reject("memory", label(choice.kind, choice.kv), _misfit(case, plain, tp))
        return None
    sequences = min(held, wanted)
    text = f"holds {sequences} of {wanted} sequences at full length"
    if choice.kind == "w4a16_awq" and case.backend != "embedded" and sequences >= WEIGHT_ONLY_LOSES_FROM:
        sequences = WEIGHT_ONLY_LOSES_FROM - 1
        text = f"is given {sequences} of {wanted} sequences: from {sequences + 1} on weight-only 4-bit loses"
    if sequences < wanted:
        plain = price(case, Plan(chosen, tp=tp, concurrency=sequences))
        path.reject("memory", label(choice.kind, choice.kv), text, plain)
    return Format(chosen, tp, replicas, wanted, sequences, plain)


def _misfit(case: Case, plain: Estimate, tp: int) -> str:
    assert case.gpu is not None
    tokens = case.scenario.input_tokens + case.scenario.output_tokens
    memory, gib = plain.memory, 2.0**30
    return (
        f"does not fit: {memory.weights_bytes / gib:.1f} GiB of weights, {memory.reserve_bytes / gib:.1f} of "
        f"runtime and {memory.kv_bytes_per_token * tokens / gib:.2f} of KV for one sequence of {tokens} "
        f"tokens, {memory.capacity_bytes / gib:.1f} there" + (f", on each of {tp} GPUs" if tp > 1 else "")
    )


def _take(case: Case, path: Path, best: Format, why: str, order: list[_Choice]) -> None:
    chosen = best.quantization
    numbers: list[tuple[str, float, str]] = []
    if best.plain is not None:
        numbers = [
            ("weights", best.plain.memory.weights_bytes / 2**30, "GiB"),
            ("TPOT", best.plain.tpot_ms, "ms"),
            ("TTFT", best.plain.ttft_ms, "ms"),
            ("tokens/s", best.plain.tokens_per_s, ""),
        ]
    path.take("weights", NAMES[chosen.kind], why, *numbers)
    if chosen.kv_cache == "none":
        because = "KV stays in 16 bit"
        if chosen.kind in ("w4a16_awq", "w4a8_awq") and not kv8(chosen.kind, case):
            because += (
                f": 8-bit KV under {NAMES[chosen.kind]} loses paged context attention, hence KV reuse, "
            )
            because += "chunked context and drafting with it"
    else:
        because = f"half the cache of 16 bit: {best.sequences} sequences at full length are held"
    path.take("kv_cache", KV_NAMES[chosen.kv_cache], because)
    if case.scenario.fidelity == "exact" and chosen.kv_cache != "none" and case.passed_kv != chosen.kv_cache:
        path.warn(
            "the 8-bit KV cache is optional here and not proven harmless: verify must pass its quality gate "
            "before this serves; without it fewer sequences fit"
        )
    if case.gpu is None or best.plain is None:
        return
    kinds = {choice.kind for choice in order} - {chosen.kind}
    for kind in sorted(kinds):
        other = quantization(
            kind, "fp8" if chosen.kv_cache == "fp8" and kv8(kind, case) else "none", case.spec, best.tp
        )
        if other is None or any(r.step == "memory" and r.what.startswith(NAMES[kind]) for r in path.rejected):
            continue
        priced = price(case, Plan(other, tp=best.tp, concurrency=best.sequences))
        if priced.memory.max_sequences < 1:
            path.reject("memory", label(kind, other.kv_cache), _misfit(case, priced, best.tp))
            continue
        path.reject("weights", label(kind, other.kv_cache), _lost(kind, best, priced), priced)


def _lost(kind: str, best: Format, other: Estimate) -> str:
    assert best.plain is not None
    ratio = other.tpot_ms / best.plain.tpot_ms
    if kind == "w4a16_awq" and best.sequences >= WEIGHT_ONLY_LOSES_FROM:
        return (
            f"weight-only 4-bit loses from batch {WEIGHT_ONLY_LOSES_FROM} and does nothing for prompts: TPOT "
            f"{ratio:.2f}x, TTFT {other.ttft_ms / best.plain.ttft_ms:.2f}x of the chosen"
        )
    text = f"TPOT {ratio:.2f}x, TTFT {other.ttft_ms / best.plain.ttft_ms:.2f}x of the chosen without drafting"
    if ratio < 1 and (kind == "nvfp4" or kind.startswith("w4")):
        return f"{text}; 4-bit weights lose more quality"
    if ratio < 1 and best.wanted == 1:
        gib = (best.plain.memory.weights_bytes / 2**30, other.memory.weights_bytes / 2**30)
        return f"{text}; one user gets the fewest weight bytes ({gib[0]:.1f} against {gib[1]:.1f} GiB)"
    return text

"""The price of one deployment under one workload: memory, TTFT, TPOT, throughput, acceptance, break-even.

:func:`estimate` is pure: the same arguments give the same numbers, each of them with a line in the trace that
says how it came about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtspec.cost.acceptance import Curve, expected_tokens, extrapolate, prior
from trtspec.cost.memory import Memory, Network, head_network, network, plan_memory
from trtspec.cost.speculation import break_even_batch
from trtspec.cost.steps import BACKTESTED_SM, DEFAULT, Basis, Coefficients, Step, decode_step, prefill
from trtspec.cost.trace import Ledger, TraceLine
from trtspec.errors import InputError
from trtspec.hardware import Gpu
from trtspec.modelspec import ModelSpec
from trtspec.recipe import ExactAcceptance, NoQuantization, NoSpeculation

_NO_QUANTIZATION = NoQuantization(kind="none")
_NO_SPECULATION = NoSpeculation(kind="none")
_EXACT = ExactAcceptance(kind="exact")

MEDUSA_HEADS = 4
MEDUSA_NODES = 63
"""Of the default tree of Medusa's repository for four heads."""


@dataclass(frozen=True)
class Workload:
    """The shape of the work. ``copy_fraction``: share of the answer copied from the text before it (only
    n-gram drafting depends on it); None: the task's own. ``concurrency``: requests held in flight."""

    input_tokens: int = 1024
    output_tokens: int = 256
    concurrency: int = 1
    temperature: float = 0.0
    copy_fraction: float | None = None
    task: str = "chat"


@dataclass(frozen=True)
class Deployment:
    """What is run on what. ``quantization``, ``speculation``, ``acceptance`` are a recipe's.
    ``acceptance_curve`` replaces the prior; ``draft_spec`` is needed for a draft model. ``max_num_tokens``:
    rows of one forward."""

    spec: ModelSpec
    gpu: Gpu
    tp: int = 1
    pp: int = 1
    quantization: Any = _NO_QUANTIZATION
    speculation: Any = _NO_SPECULATION
    acceptance: Any = _EXACT
    draft_spec: ModelSpec | None = None
    acceptance_curve: Curve | None = None
    backend: Literal["tensorrt", "pytorch", "embedded"] = "tensorrt"
    max_num_tokens: int = 8192
    max_batch_size: int | None = None


@dataclass(frozen=True)
class Estimate:
    """``interval`` bounds ``tpot_ms``. ``admitted``: sequences that run together, after the KV budget and
    ``max_batch_size``; the rest of the concurrency queues. ``fits``: weights and one full sequence do.
    ``speedup``: plain TPOT of the same quantization over TPOT. ``plain_step_ms`` and ``round_ms`` leave the
    prefills of other requests out. ``break_even_batch``: smallest batch at which drafting loses; None: never
    up to 512, or no drafting."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    memory: Memory
    fits: bool
    admitted: int
    acceptance_length: float
    speedup: float
    plain_step_ms: float
    round_ms: float
    draft_ms: float
    bound: Literal["memory", "compute"]
    break_even_batch: int | None
    interval: tuple[float, float]
    basis: Basis
    assumptions: tuple[str, ...]
    trace: tuple[TraceLine, ...]

    def goodput_per_s(self, *, ttft_ms: float | None, tpot_ms: float | None) -> float:
        """Tokens/s that meet the objectives: all or none, since every request of the workload is alike."""
        late = ttft_ms is not None and self.ttft_ms > ttft_ms
        slow = tpot_ms is not None and self.tpot_ms > tpot_ms
        return 0.0 if late or slow or not self.fits else self.tokens_per_s


@dataclass(frozen=True)
class _Drafting:
    """What a way of drafting costs: ``depth`` positions in sequence, ``nodes`` verified beside the current
    token, ``steps`` draft forwards of ``width`` rows a sequence through ``net`` (``copies`` of it each)."""

    method: str
    depth: int
    nodes: int
    steps: int = 0
    width: int = 1
    net: Network | None = None
    copies: int = 1


def _drafting(ledger: Ledger, deployment: Deployment) -> _Drafting | None:
    spec, s, tp = deployment.spec, deployment.speculation, deployment.tp
    draft = ledger.under("draft.")
    if s.kind == "none":
        return None
    if s.kind == "ngram":
        return _Drafting("ngram", s.num_draft_tokens, s.num_draft_tokens)
    if s.kind == "lookahead":
        nodes = (s.ngram - 2) + (s.window - 1 + s.verification_set) * (s.ngram - 1)
        return _Drafting("lookahead", s.ngram - 1, nodes)
    if s.kind == "draft_model":
        if deployment.draft_spec is None:
            raise InputError("a draft model needs its own config.json to be priced; none was given")
        net = network(draft, deployment.draft_spec, s.quantization, tp, 1)
        k = s.num_draft_tokens
        return _Drafting("draft_model", k, k, k, 1, net)
    net_or_none = head_network(draft, spec, s.kind, s.quantization, tp)
    if s.kind == "medusa":
        heads = max((len(path) for path in s.choices), default=1) if s.choices else MEDUSA_HEADS
        nodes = len(s.choices) if s.choices else MEDUSA_NODES
        return _Drafting("medusa", heads, nodes, 1, 1, net_or_none, heads)
    if s.kind == "eagle":
        depth = max((len(path) for path in s.choices), default=1) if s.choices else s.depth
        nodes = len(s.choices) if s.choices else s.num_draft_tokens
        width = max(1, nodes // depth) if s.choices else s.top_k
        return _Drafting("eagle", depth, nodes, depth, width, net_or_none)
    depth = s.depth or s.num_draft_tokens
    return _Drafting("eagle3", depth, s.num_draft_tokens, depth, s.top_k, net_or_none)


@dataclass(frozen=True)
class _Round:
    total_ms: float
    draft_ms: float
    verify: Step


def _round(
    ledger: Ledger,
    deployment: Deployment,
    coef: Coefficients,
    target: Network,
    drafting: _Drafting | None,
    sequences: float,
    context: float,
) -> _Round:
    """One round of ``sequences`` sequences: drafting, verification, the host's work; without drafting a plain
    step."""
    d = deployment
    nodes = drafting.nodes if drafting else 0
    verify = decode_step(
        ledger.under("verify." if drafting else "plain."),
        target,
        d.gpu,
        coef,
        tp=d.tp,
        pp=d.pp,
        sequences=sequences,
        rows=sequences * (nodes + 1),
        context=context,
    )
    if drafting is None:
        return _Round(verify.total_ms, 0.0, verify)
    if drafting.net is None:
        draft_ms = ledger.compute(
            "draft_ms",
            "ms",
            "share*verify",
            "n-grams are looked up on the host (lookahead: in the same step)",
            share=coef.ngram_share,
            verify=verify.total_ms,
        )
    else:
        one = decode_step(
            ledger.under("draft."),
            drafting.net,
            d.gpu,
            coef,
            tp=d.tp,
            sequences=sequences,
            rows=sequences * drafting.width,
            context=context,
        )
        draft_ms = ledger.compute(
            "draft_ms",
            "ms",
            "steps*(copies*step + draft_step_ms)",
            "draft forwards, sampling between them",
            steps=drafting.steps,
            copies=drafting.copies,
            step=one.total_ms,
            draft_step_ms=coef.draft_step_ms,
        )
    total = ledger.compute(
        "round_ms",
        "ms",
        "verify + draft + round_ms + min(sequences, most)*round_sequence_ms",
        "verification, drafting and the host's work of a round",
        verify=verify.total_ms,
        draft=draft_ms,
        round_ms=coef.round_ms,
        sequences=sequences,
        round_sequence_ms=coef.round_sequence_ms,
        most=coef.round_sequences,
    )
    return _Round(total, draft_ms, verify)


def _acceptance(ledger: Ledger, curve: Curve, depth: int) -> float:
    """Tokens per round, written out so that it can be multiplied by hand."""
    a = extrapolate(curve, depth).conditional
    terms = ["*".join(f"a{i + 1}" for i in range(j + 1)) for j in range(depth)]
    return ledger.compute(
        "acceptance_length",
        "tokens/step",
        " + ".join(["1", *terms]),
        f"E[N] of docs/math.md, section 5; a: {curve.source}",
        **{f"a{i + 1}": value for i, value in enumerate(a)},
    )


def _admitted(deployment: Deployment, workload: Workload, memory: Memory) -> int:
    limit = deployment.max_batch_size or workload.concurrency
    return max(1, min(workload.concurrency, memory.max_sequences, limit))


def estimate(deployment: Deployment, workload: Workload, coefficients: Coefficients = DEFAULT) -> Estimate:
    """Price ``deployment`` under ``workload``.

    Raises InputError for what cannot be priced: a format without a known rate on this GPU, a draft model
    without its config, an unknown task, drafting over pipeline stages.
    """
    d, w, coef = deployment, workload, coefficients
    if min(w.input_tokens, w.output_tokens, w.concurrency, d.tp, d.pp) < 1:
        raise InputError("tokens, concurrency, tp and pp must be at least 1")
    if d.pp > 1 and d.speculation.kind != "none":
        raise InputError("drafting excludes pipeline parallelism; use tensor parallelism (pp: 1)")
    ledger = Ledger()
    target = network(ledger.under("target."), d.spec, d.quantization, d.tp, d.pp)
    drafting = _drafting(ledger, d)
    curve, assumptions = _curve(d, w, drafting)
    nodes = drafting.nodes if drafting else 0
    length = w.input_tokens + w.output_tokens + nodes
    memory = plan_memory(
        ledger.under("memory."),
        d.spec,
        d.gpu,
        target,
        drafting.net if drafting else None,
        draft_copies=drafting.copies if drafting else 1,
        tp=d.tp,
        rows=max(min(d.max_num_tokens, w.input_tokens * w.concurrency), w.concurrency * (nodes + 1)),
        logit_rows=w.concurrency * (nodes + 1),
        tokens_per_sequence=length,
        sequences=w.concurrency,
    )
    admitted = _admitted(d, w, memory)
    if admitted < w.concurrency:
        assumptions.append(
            f"{admitted} of {w.concurrency} requests run together (KV budget or max_batch_size); "
            "the rest queue"
        )
    context = ledger.compute(
        "context",
        "tokens",
        "input + output/2",
        "the mean over a request's life",
        input=w.input_tokens,
        output=w.output_tokens,
    )
    prompt = prefill(ledger.under("prefill."), target, d.gpu, coef, tp=d.tp, pp=d.pp, tokens=w.input_tokens)
    draft_prompt = 0.0
    if drafting and drafting.method == "draft_model" and drafting.net:
        draft_prompt = prefill(
            ledger.under("draft_prefill."), drafting.net, d.gpu, coef, tp=d.tp, tokens=w.input_tokens
        ).added_ms
    others = ledger.compute(
        "interference_ms",
        "ms",
        "(admitted - 1)*(prefill + draft_prefill)/output",
        "in-flight batching: while one request decodes, each of the others is prefilled once",
        admitted=admitted,
        prefill=prompt.added_ms,
        draft_prefill=draft_prompt,
        output=w.output_tokens,
    )
    plain = _round(ledger, d, coef, target, None, admitted, context)
    one = _round(ledger, d, coef, target, drafting, admitted, context) if drafting else plain
    tokens = _acceptance(ledger, curve, drafting.depth) if drafting and curve else 1.0
    plain_tpot = ledger.compute(
        "plain_tpot_ms",
        "ms",
        "step + interference",
        "without drafting",
        step=plain.total_ms,
        interference=others,
    )
    tpot = ledger.compute(
        "tpot_ms",
        "ms",
        "round/acceptance_length + interference",
        "a round yields acceptance_length tokens; drafting does not shorten the prefills of others",
        round=one.total_ms,
        acceptance_length=tokens,
        interference=others,
    )
    gain = ledger.compute("speedup", "x", "plain/tpot", "", plain=plain_tpot, tpot=tpot)
    queue = ledger.compute(
        "queue_ms",
        "ms",
        "(concurrency/admitted - 1)*(prefill + output*tpot)",
        "requests beyond the admitted wait for a place",
        concurrency=w.concurrency,
        admitted=admitted,
        prefill=prompt.alone_ms,
        output=w.output_tokens,
        tpot=tpot,
    )
    ttft = ledger.compute(
        "ttft_ms",
        "ms",
        "prefill + draft_prefill + busy*step/2 + queue",
        "prefill, half a step of those already running, queue; bursts of simultaneous arrivals are not in it",
        prefill=prompt.alone_ms,
        draft_prefill=draft_prompt,
        busy=float(admitted > 1),
        step=one.total_ms,
        queue=queue,
    )
    rate = ledger.compute(
        "tokens_per_s",
        "tokens/s",
        "1e3*admitted*output/(ttft - queue + (output - 1)*tpot)",
        "output tokens of all requests",
        admitted=admitted,
        output=w.output_tokens,
        ttft=ttft,
        queue=queue,
        tpot=tpot,
    )
    limit = None
    if drafting and curve:
        per_round = expected_tokens(curve, drafting.depth)

        def gain_at(batch: int) -> float:
            scratch = Ledger()
            cost = _round(scratch, d, coef, target, drafting, batch, context).total_ms
            return per_round * _round(scratch, d, coef, target, None, batch, context).total_ms / cost

        limit = break_even_batch(gain_at)
    interval = _interval(ledger, d, coef, curve, drafting, tokens, tpot, others)
    return Estimate(
        ttft_ms=ttft,
        tpot_ms=tpot,
        tokens_per_s=rate,
        memory=memory,
        fits=memory.max_sequences >= 1,
        admitted=admitted,
        acceptance_length=tokens,
        speedup=gain,
        plain_step_ms=plain.total_ms,
        round_ms=one.total_ms,
        draft_ms=one.draft_ms,
        bound=one.verify.bound,
        break_even_batch=limit,
        interval=interval,
        basis=coef.basis,
        assumptions=tuple(assumptions),
        trace=tuple(ledger.lines),
    )


def _curve(d: Deployment, w: Workload, drafting: _Drafting | None) -> tuple[Curve | None, list[str]]:
    assumptions: list[str] = []
    if d.gpu.sm not in BACKTESTED_SM:
        assumptions.append(f"step times on {d.gpu.name} (sm{d.gpu.sm}) have no back-test: wider interval")
    if d.gpu.rank == "secondary":
        assumptions.append(f"{d.gpu.name}: {d.gpu.source}")
    if drafting is None:
        return None, assumptions
    if d.acceptance_curve is not None:
        return d.acceptance_curve, assumptions
    curve = prior(drafting.method, w.task, w.copy_fraction, w.temperature, drafting.depth)
    assumptions.append(
        f"acceptance of {drafting.method} on {w.task} from tables, not measured: {curve.source}"
    )
    if drafting.depth > len(curve.conditional):
        assumptions.append(f"acceptance beyond position {len(curve.conditional)} is extrapolated")
    if drafting.method == "draft_model" and d.acceptance.kind == "exact" and w.temperature > 0:
        assumptions.append("exact acceptance accepts no more than rejection sampling when sampling")
    if d.acceptance.kind == "typical":
        assumptions.append("typical acceptance accepts more than this strict prior, and is not lossless")
    return curve, assumptions


def _interval(
    ledger: Ledger,
    d: Deployment,
    coef: Coefficients,
    curve: Curve | None,
    drafting: _Drafting | None,
    tokens: float,
    tpot: float,
    others: float,
) -> tuple[float, float]:
    """Step-time spread and acceptance spread, added in squares."""
    spread = coef.spread if d.gpu.sm in BACKTESTED_SM else max(coef.spread, coef.spread_other)
    fewer = more = 0.0
    if curve and drafting:
        share = (tpot - others) / tpot
        most = min(1 + (tokens - 1) * curve.high, drafting.depth + 1.0)
        least = 1 + (tokens - 1) * curve.low
        fewer, more = share * (tokens / least - 1), share * (1 - tokens / most)
    low = ledger.compute(
        "tpot_low_ms",
        "ms",
        "tpot*max(0, 1 - sqrt(spread**2 + acceptance**2))",
        "spread of the back-test and of the acceptance",
        tpot=tpot,
        spread=spread,
        acceptance=more,
    )
    high = ledger.compute(
        "tpot_high_ms",
        "ms",
        "tpot*(1 + sqrt(spread**2 + acceptance**2))",
        "spread of the back-test and of the acceptance",
        tpot=tpot,
        spread=spread,
        acceptance=fewer,
    )
    return low, high


def round_cost(deployment: Deployment, workload: Workload, coefficients: Coefficients = DEFAULT) -> Any:
    """A function of the draft length K (nodes, for trees): the time of a round with it, in ms; of 0 a plain
    step. What :func:`trtspec.cost.speculation.best_chain_length` and ``best_tree_size`` ask for."""
    d = deployment
    ledger = Ledger()
    target = network(ledger, d.spec, d.quantization, d.tp, d.pp)
    drafting = _drafting(ledger, d)
    context = workload.input_tokens + workload.output_tokens / 2

    def cost(k: int) -> float:
        if drafting is None or k == 0:
            return _round(Ledger(), d, coefficients, target, None, workload.concurrency, context).total_ms
        chain = drafting.depth == drafting.nodes
        sized = replace(drafting, nodes=k, depth=k if chain else drafting.depth)
        if (chain and drafting.steps > 1) or (drafting.method in ("draft_model", "eagle3") and chain):
            sized = replace(sized, steps=k)
        return _round(Ledger(), d, coefficients, target, sized, workload.concurrency, context).total_ms

    return cost


def relative_spread(estimate_: Estimate) -> float:
    """Half the width of the interval over TPOT."""
    return (
        (estimate_.interval[1] - estimate_.interval[0]) / 2 / estimate_.tpot_ms
        if estimate_.tpot_ms
        else math.inf
    )

"""Tables that answer one question each by varying what matters: pure data, rendered elsewhere.

With a recipe the numbers are priced for its model and GPU; without one they are the closed form of
docs/math.md, section 10, in alpha, K, c, q_t and q_d.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from trtspec.cost.acceptance import Curve
from trtspec.cost.estimate import Deployment, Estimate, Workload, estimate, round_cost
from trtspec.cost.speculation import best_chain_length, constant_alpha, speedup
from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.errors import InputError
from trtspec.recipe import Fp8Quantization, NoQuantization, NoSpeculation, W4A16AwqQuantization

Cell = float | int | str | None


@dataclass(frozen=True)
class Series:
    """One line of a plot: its name and its points."""

    name: str
    points: tuple[tuple[float, float], ...]
    scatter: bool = False


@dataclass(frozen=True)
class View:
    """A table and its plot. ``marks`` are vertical lines: (x, label)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    series: tuple[Series, ...] = ()
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    marks: tuple[tuple[float, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Closed:
    """Inputs of the closed form."""

    alpha: float = 0.8
    K: int = 4
    c: float = 10.0
    q_t: float = 2.0
    q_d: float = 2.0

    def speedup(self) -> float:
        """Over plain decoding of the unquantized target."""
        return speedup(constant_alpha(self.alpha, self.K), self.K, self.c, self.q_t, self.q_d)


@dataclass(frozen=True)
class Priced:
    """What a recipe's numbers are computed from."""

    deployment: Deployment
    workload: Workload
    coefficients: Coefficients = DEFAULT

    def estimate(self) -> Estimate:
        """Price it."""
        return estimate(self.deployment, self.workload, self.coefficients)


# --------------------------------------------------------------------------- the four combinations


def scenarios_closed(given: Closed) -> View:
    """Nothing, both, only the target, only the draft quantized."""
    cases = (
        ("neither quantized", 1.0, 1.0),
        ("both quantized", given.q_t, given.q_d),
        ("target only", given.q_t, 1.0),
        ("draft only", 1.0, given.q_d),
    )
    best = given.speedup()
    rows = []
    for name, q_t, q_d in cases:
        value = replace(given, q_t=q_t, q_d=q_d).speedup()
        rows.append((name, q_t, q_d, round(value, 4), f"{value / best - 1:+.1%}"))
    tokens = constant_alpha(given.alpha, given.K)
    notes = (
        f"alpha {given.alpha}, K {given.K}, c {given.c}: E[N] = (1 - a^(K+1))/(1 - a) = {tokens:.4f}; "
        "speedup = E[N]/(1/q_t + K/(c*q_d)), verification for free",
    )
    columns = ("case", "q_t", "q_d", "speedup", "against both")
    return View("Four ways to quantize target and draft", columns, tuple(rows), notes=notes)


def scenarios_priced(given: Priced) -> View:
    """The same with the recipe's formats on its GPU; needs a draft that has its own format."""
    d = given.deployment
    target = d.quantization if d.quantization.kind != "none" else _default_format(d)
    plain = NoQuantization(kind="none", kv_cache=d.quantization.kv_cache)
    base = replace(given, deployment=replace(d, quantization=plain, speculation=NoSpeculation(kind="none")))
    base_ms = base.estimate().tpot_ms
    rows: list[tuple[Cell, ...]] = []
    best = None
    for name, q_target, q_draft in (
        ("neither quantized", False, False),
        ("both quantized", True, True),
        ("target only", True, False),
        ("draft only", False, True),
    ):
        drafting = _with_draft_format(d, q_draft)
        deployment = replace(d, quantization=target if q_target else plain, speculation=drafting)
        e = replace(given, deployment=deployment).estimate()
        if name == "both quantized":
            best = e.tpot_ms
        share = e.draft_ms / e.round_ms
        rows.append((name, round(e.tpot_ms, 3), round(base_ms / e.tpot_ms, 3), f"{share:.1%}"))
    assert_best = best or base_ms
    rows = [(*row, f"{assert_best / float(str(row[1])) - 1:+.1%}") for row in rows]
    columns = ("case", "TPOT ms", "over plain 16 bit", "draft's share", "against both")
    return View(f"Four ways to quantize target and draft on {d.gpu.name}", columns, tuple(rows))


def _default_format(d: Deployment) -> Any:
    fp8 = d.gpu.flops.get("fp8") is not None
    return Fp8Quantization(kind="fp8") if fp8 else W4A16AwqQuantization(kind="w4a16_awq")


def _with_draft_format(d: Deployment, quantized: bool) -> Any:
    s = d.speculation
    if s.kind == "draft_model":
        return s.model_copy(
            update={"quantization": _default_format(d) if quantized else NoQuantization(kind="none")}
        )
    if s.kind in ("medusa", "eagle", "eagle3"):
        return s.model_copy(update={"quantization": "fp8" if quantized else "none"})
    raise InputError(
        f"speculation {s.kind!r} has no draft to quantize; this view needs a draft model or heads"
    )


def draft_loss_closed(given: Closed) -> View:
    """When quantizing the draft is worth most: what leaving it in 16 bit loses, by K and q_t."""
    rows: list[tuple[Cell, ...]] = []
    series: list[Series] = []
    factors = (1.0, 1.5, 2.0, 3.0, 4.0)
    for q_t in factors:
        points = []
        for k in range(1, 11):
            case = replace(given, K=k, q_t=q_t)
            points.append((float(k), 1 - replace(case, q_d=1.0).speedup() / case.speedup()))
        series.append(Series(f"q_t {q_t:g}", tuple(points)))
    for i in range(10):
        rows.append((i + 1, *(f"{s.points[i][1]:.1%}" for s in series)))
    notes = (
        f"c {given.c:g}, q_d {given.q_d:g}; the loss is (K/c)(1 - 1/q_d) / (1/q_t + K/c): "
        "it grows with K and q_t, and does not depend on alpha",
    )
    columns = ("K", *(f"q_t {q:g}" for q in factors))
    return View(
        "What an unquantized draft loses", columns, tuple(rows), tuple(series), "K", "loss of speedup",
        notes=notes,
    )  # fmt: skip


def draft_loss_priced(given: Priced) -> View:
    """The same for the recipe's draft on its GPU, by draft length and concurrency."""
    d = given.deployment
    batches = (1, 4, 16, 64)
    rows: list[tuple[Cell, ...]] = []
    series: list[Series] = []
    for batch in batches:
        points = []
        for k in (1, 2, 3, 4, 5, 6, 8, 10):
            losses = []
            for quantized in (True, False):
                drafting = _sized(_with_draft_format(d, quantized), k)
                case = replace(given, deployment=replace(d, speculation=drafting),
                               workload=replace(given.workload, concurrency=batch))  # fmt: skip
                losses.append(case.estimate().tpot_ms)
            points.append((float(k), 1 - losses[0] / losses[1]))
        series.append(Series(f"concurrency {batch}", tuple(points)))
    for i, (length, _) in enumerate(series[0].points):
        rows.append((int(length), *(f"{s.points[i][1]:.1%}" for s in series)))
    columns = ("K", *(s.name for s in series))
    title = f"What an unquantized draft loses on {d.gpu.name}"
    return View(title, columns, tuple(rows), tuple(series), "K", "loss of speedup")


def _sized(speculation: Any, k: int) -> Any:
    """The speculation with K drafted tokens (of a tree: its depth)."""
    if speculation.kind == "none":
        raise InputError("the recipe drafts nothing; this view needs a way of drafting")
    if speculation.kind == "eagle":
        return speculation.model_copy(update={"depth": k})
    if speculation.kind in ("lookahead", "medusa"):
        raise InputError(f"speculation {speculation.kind!r} has no draft length to vary")
    update: dict[str, Any] = {"num_draft_tokens": k}
    if speculation.kind == "eagle3":
        update["depth"] = None if speculation.top_k == 1 else k
    return speculation.model_copy(update=update)


# --------------------------------------------------------------------------- batch, length, pareto


def by_batch(
    given: Priced, batches: Sequence[int] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
) -> View:
    """Speedup of the recipe's drafting against batch, break-even marked."""
    if given.deployment.speculation.kind == "none":
        raise InputError("the recipe drafts nothing; this view needs a way of drafting")
    rows, points, limit, notes = [], [], None, []
    for batch in batches:
        e = replace(given, workload=replace(given.workload, concurrency=batch)).estimate()
        limit = e.break_even_batch
        if e.admitted < batch:
            notes.append(f"from concurrency {batch} on the KV budget admits {e.admitted} sequences")
            break
        gain = e.acceptance_length * e.plain_step_ms / e.round_ms
        rows.append(
            (batch, round(e.plain_step_ms, 3), round(e.round_ms, 3), round(gain, 3), round(e.speedup, 3),
             round(e.tokens_per_s, 1), e.bound)
        )  # fmt: skip
        points.append((float(batch), gain))
    if not rows:
        raise InputError("not even one sequence fits the KV budget")
    marks = () if limit is None else ((float(limit), f"break-even {limit}"),)
    text = "never below 1 up to 512" if limit is None else f"below 1 from batch {limit}"
    columns = ("batch", "plain step ms", "round ms", "speedup", "with prefills", "tokens/s", "bound")
    shown = tuple(m for m in marks if m[0] <= points[-1][0])
    return View(
        f"Speedup against batch: {given.deployment.speculation.kind} on {given.deployment.gpu.name}", columns,
        tuple(rows), (Series("speedup", tuple(points)),), "batch", "speedup", True, shown,
        (f"{text}; acceptance length {e.acceptance_length:.3f}", *notes),
    )  # fmt: skip


ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)


def best_length_closed(given: Closed) -> View:
    """K* by alpha, with a draft of 1/c of a target step."""
    rows, points = [], []
    for alpha in (*ALPHAS, 0.95):
        value, k = max((replace(given, alpha=alpha, K=k).speedup(), -k) for k in range(33))
        rows.append((alpha, -k, round(value, 4)))
        points.append((alpha, float(-k)))
    columns = ("alpha", "K*", "speedup")
    notes = (f"c {given.c:g}, q_t {given.q_t:g}, q_d {given.q_d:g}; verification for free",)
    return View(
        "Best draft length", columns, tuple(rows), (Series("K*", tuple(points)),), "alpha", "K*", notes=notes
    )


def best_length_priced(given: Priced, contexts: Sequence[int] = (512, 2048, 8192, 32768, 131072)) -> View:
    """K* by alpha and context for the recipe's drafting on its GPU."""
    rows: list[tuple[Cell, ...]] = []
    series = []
    for context in contexts:
        work = replace(given.workload, input_tokens=context, output_tokens=2)
        cost = round_cost(
            replace(given.deployment, speculation=_sized(given.deployment.speculation, 4)),
            work,
            given.coefficients,
        )
        found = [best_chain_length(Curve((alpha,) * 16, "constant alpha"), cost, 16) for alpha in ALPHAS]
        series.append(
            Series(
                f"context {context}", tuple((a, float(f.size)) for a, f in zip(ALPHAS, found, strict=True))
            )
        )
        rows.append((context, *(f"{f.size} ({f.speedup:.2f}x)" for f in found)))
    columns = ("context", *(f"alpha {a}" for a in ALPHAS))
    batch = given.workload.concurrency
    d = given.deployment
    title = f"Best draft length at batch {batch}: {d.speculation.kind} on {d.gpu.name}"
    return View(
        title, columns, tuple(rows), tuple(series), "alpha", "K*", notes=("K* and its speedup, up to K 16",)
    )


def pareto(given: Priced, batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)) -> View:
    """Tokens/s of a GPU against tokens/s of a user, over formats, drafting and batch; the frontier marked."""
    d = given.deployment
    found: list[tuple[float, float, str, int]] = []
    skipped: list[str] = []
    formats: list[Any] = [NoQuantization(kind="none"), Fp8Quantization(kind="fp8", kv_cache="fp8")]
    formats.append(W4A16AwqQuantization(kind="w4a16_awq"))
    if d.quantization.kind not in {"none", "fp8", "w4a16_awq"}:
        formats.append(d.quantization)
    drafts: list[Any] = [NoSpeculation(kind="none")]
    if d.speculation.kind != "none":
        drafts.append(d.speculation)
    for quantization, drafting, batch in product(formats, drafts, batches):
        case = replace(given, deployment=replace(d, quantization=quantization, speculation=drafting),
                       workload=replace(given.workload, concurrency=batch))  # fmt: skip
        name = quantization.kind if drafting.kind == "none" else f"{quantization.kind} + {drafting.kind}"
        try:
            e = case.estimate()
        except InputError as error:
            skipped.append(f"{quantization.kind}: {error}")
            continue
        if e.fits and e.admitted == batch:
            found.append((1e3 / e.tpot_ms, e.tokens_per_s / (d.tp * d.pp), name, batch))
        else:
            skipped.append(f"{name} at batch {batch}: KV budget")
    front = [p for p in found if not any(q[0] >= p[0] and q[1] >= p[1] and q != p for q in found)]
    front.sort()
    rows = tuple(
        (name, batch, round(user, 1), round(gpu, 1), "yes" if (user, gpu, name, batch) in front else "")
        for user, gpu, name, batch in sorted(found)
    )
    names = sorted({p[2] for p in found})
    series = [Series(n, tuple((p[0], p[1]) for p in sorted(found) if p[2] == n), True) for n in names]
    series.append(Series("frontier", tuple((p[0], p[1]) for p in front)))
    columns = ("deployment", "batch", "tokens/s per user", "tokens/s per GPU", "frontier")
    return View(
        f"Throughput against speed on {d.gpu.name}", columns, rows, tuple(series), "tokens/s per user",
        "tokens/s per GPU", notes=tuple(dict.fromkeys(skipped)),
    )  # fmt: skip


# --------------------------------------------------------------------------- free variation

CLOSED_NAMES = ("alpha", "K", "c", "q_t", "q_d")
PRICED_NAMES = (
    "alpha", "K", "batch", "input_tokens", "output_tokens", "context", "temperature", "copy_fraction", "tp",
)  # fmt: skip
METRICS = (
    "speedup", "tpot_ms", "ttft_ms", "tokens_per_s", "round_ms", "plain_step_ms", "draft_ms",
    "acceptance_length", "admitted",
)  # fmt: skip


def _vary_closed(given: Closed, name: str, value: float) -> Closed:
    if name not in CLOSED_NAMES:
        raise InputError(f"cannot vary {name!r} without a recipe; one of {', '.join(CLOSED_NAMES)}")
    changes: dict[str, Any] = {name: int(value) if name == "K" else value}
    return replace(given, **changes)


def _vary_priced(given: Priced, name: str, value: float) -> Priced:
    d, w = given.deployment, given.workload
    if name == "alpha":
        curve = Curve((value,) * 16, f"constant alpha {value}", 1.0, 1.0)
        return replace(given, deployment=replace(d, acceptance_curve=curve))
    if name == "K":
        return replace(given, deployment=replace(d, speculation=_sized(d.speculation, int(value))))
    if name == "tp":
        return replace(given, deployment=replace(d, tp=int(value)))
    if name == "batch":
        return replace(given, workload=replace(w, concurrency=int(value)))
    if name == "context":
        return replace(given, workload=replace(w, input_tokens=max(1, int(value - w.output_tokens / 2))))
    if name in ("input_tokens", "output_tokens"):
        changes: dict[str, Any] = {name: int(value)}
        return replace(given, workload=replace(w, **changes))
    if name in ("temperature", "copy_fraction"):
        changes = {name: value}
        return replace(given, workload=replace(w, **changes))
    raise InputError(f"cannot vary {name!r} of a recipe; one of {', '.join(PRICED_NAMES)}")


def vary(given: Closed | Priced, over: Mapping[str, Sequence[float]], metric: str = "speedup") -> View:
    """``metric`` over one or two varied inputs: the first goes down the rows, the second across."""
    if not 1 <= len(over) <= 2:
        raise InputError("vary one or two inputs at a time")
    if metric not in METRICS or (isinstance(given, Closed) and metric != "speedup"):
        known = "speedup" if isinstance(given, Closed) else ", ".join(METRICS)
        raise InputError(f"no metric {metric!r} here; one of {known}")
    (first, down), *rest = over.items()
    second, across = rest[0] if rest else ("", (0.0,))
    series, table = [], []
    for b in across:
        points = []
        for a in down:
            if isinstance(given, Closed):
                case = _vary_closed(given, first, a)
                value = (_vary_closed(case, second, b) if second else case).speedup()
            else:
                priced = _vary_priced(given, first, a)
                value = float(
                    getattr((_vary_priced(priced, second, b) if second else priced).estimate(), metric)
                )
            points.append((float(a), value))
        series.append(Series(f"{second} {b:g}" if second else metric, tuple(points)))
    for i, a in enumerate(down):
        table.append((float(f"{a:g}"), *(float(f"{s.points[i][1]:.5g}") for s in series)))
    columns = (first, *(s.name for s in series))
    ratio = max(down) / min(down) if min(down) > 0 else 0
    return View(
        f"{metric} over {' and '.join(over)}",
        columns,
        tuple(table),
        tuple(series),
        first,
        metric,
        ratio >= 32,
    )

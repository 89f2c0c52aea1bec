"""How to draft: what exists on the backend, what needs no training, how far it pays as the batch grows.

Times decide: each method is priced at the concurrency asked for, with the best length for it. Where it loses
there, the break-even batch becomes a limit. The time to the first token is never part of it: drafting starts
after the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtspec.cost.estimate import Estimate
from trtspec.recipe import (
    Acceptance,
    Eagle3Speculation,
    EagleSpeculation,
    ExactAcceptance,
    NoQuantization,
    NoSpeculation,
    Speculation,
)
from trtspec.recipe_facts import drafted_positions
from trtspec.recommend.decision import Path, show
from trtspec.recommend.formats import NAMES, Format
from trtspec.recommend.methods import Method, lengths, name_of
from trtspec.recommend.methods import methods as methods_of
from trtspec.recommend.pricing import Case, Plan, price

MIN_GAIN = 1.05
"""A smaller predicted gain is within the spread of the acceptance that it rests on."""
REPETITIVE = 0.5
"""Copy fraction from which work is repetitive."""
CLEARLY = 1.5
"""Beyond the spread of the acceptance priors of a draft model and of copying together."""
LONG_CONTEXT_TOKENS = 4096
SHORT_CONTEXT_TOKENS = 2048


@dataclass(frozen=True)
class Drafting:
    """``version``: the backend versions that this needs, or None for all. ``estimate`` is at full
    concurrency; None without a GPU."""

    speculation: Speculation
    acceptance: Acceptance
    version: str | None
    estimate: Estimate | None


@dataclass(frozen=True)
class _Priced:
    method: Method
    speculation: Speculation
    estimate: Estimate
    gain: float
    """Over the same weights without speculation, at the same concurrency."""


def choose_drafting(case: Case, path: Path, chosen: Format) -> Drafting:
    """The drafting for the chosen formats, or none where nothing pays."""
    none = Drafting(NoSpeculation(kind="none"), ExactAcceptance(kind="exact"), None, chosen.plain)
    methods = list(methods_of(case, path, chosen))
    if case.heads is None:
        _untrained(case, path, chosen)
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
        best = _first(case, here)
        here.sort(key=lambda priced: (priced is not best, priced.estimate.tpot_ms))
        for other in here[1:] + later:
            text = f"gain {other.gain:.2f}x, the chosen {best.gain:.2f}x"
            if other.gain > best.gain:
                text += (
                    f"; repetitive work drafts by n-grams unless another method is {CLEARLY:g}x as fast: they"
                )
                text += " need no memory, and what they copy is in the text"
            path.reject("speculation", name_of(other.speculation), text, other.estimate)
        return _take(case, path, chosen, best)
    limited = _limited(case, path, chosen, later) if n > 1 else None
    if limited is not None:
        return limited
    for other in later:
        path.reject("speculation", name_of(other.speculation), _why_it_loses(case, other, n), other.estimate)
    words = "nothing that needs no training gains enough" if case.heads is None else "nothing gains enough"
    at = f"{n} sequence{'s' if n > 1 else ''}"
    path.take("speculation", "none", f"{words} at {at} (at least {MIN_GAIN:g}x is asked)")
    return none


def _first(case: Case, paying: list[_Priced]) -> _Priced:
    """The fastest, except that repetitive work drafts by n-grams unless another method is clearly faster:
    they need neither memory nor a second model, and what they copy is not a prior but the text itself."""
    fastest = min(paying, key=lambda priced: priced.estimate.tpot_ms)
    ngram = next((priced for priced in paying if priced.method.kind == "ngram"), None)
    if ngram is None or fastest.method.kind != "draft_model" or case.copies < REPETITIVE:
        return fastest
    return ngram if ngram.estimate.tpot_ms <= CLEARLY * fastest.estimate.tpot_ms else fastest


def _untrained(case: Case, path: Path, chosen: Format) -> None:
    """No head is named, so none is recommended; what one would bring, by published acceptance."""
    if case.gpu is None or case.backend == "embedded":
        return
    n = chosen.sequences
    if case.backend == "pytorch":
        chain = (Eagle3Speculation(kind="eagle3", heads="HEAD", num_draft_tokens=k) for k in lengths())
        method = Method("eagle3", tuple(chain), ExactAcceptance(kind="exact"))
    elif chosen.quantization.kind == "none":
        tree = EagleSpeculation(kind="eagle", heads="HEAD", depth=5, top_k=8, num_draft_tokens=31)
        method = Method("eagle", (tree,), ExactAcceptance(kind="exact"))
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
    chosen: Format, method: Method, speculation: Speculation, n: int, tokens: int | None = None
) -> Plan:
    return Plan(chosen.quantization, speculation, method.acceptance, chosen.tp, n, tokens)


def _plain(chosen: Format, n: int, tokens: int | None = None) -> Plan:
    return Plan(chosen.quantization, tp=chosen.tp, concurrency=n, input_tokens=tokens)


def _best(case: Case, chosen: Format, method: Method, n: int, tokens: int | None = None) -> _Priced:
    """The size of ``method`` with the shortest time per token at ``n`` sequences; the smaller of equals."""
    priced = [(price(case, _plan(chosen, method, s, n, tokens)), s) for s in method.options]
    estimate, speculation = min(priced, key=lambda item: item[0].tpot_ms)
    return _Priced(
        method, speculation, estimate, price(case, _plain(chosen, n, tokens)).tpot_ms / estimate.tpot_ms
    )


def _gain(case: Case, chosen: Format, method: Method, speculation: Speculation, n: int) -> float:
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
        ("pays up to batch", limit, ""), ("gain there", best.gain, "x"), ("gain at 1", one.gain, "x"),
        ("acceptance length", best.estimate.acceptance_length, "tokens/step"),
        ("draft weights", best.estimate.memory.draft_weights_bytes / 2**30, "GiB"),
    )  # fmt: skip
    # At full concurrency nothing is drafted, so that is what the recipe is priced at.
    return Drafting(speculation, best.method.acceptance, version, chosen.plain)


def _break_even(case: Case, chosen: Format, method: Method, most: int) -> int:
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
    case: Case, path: Path, chosen: Format, method: Method, speculation: Speculation, estimate: Estimate
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


def _without_gpu(case: Case, path: Path, methods: list[Method], none: Drafting) -> Drafting:
    ngram = next((method for method in methods if method.kind == "ngram"), None)
    if ngram is None or case.copies < 0.2:
        text = f"n-gram drafts copy, and only {case.copies:.0%} of the answer repeats"
        path.take("speculation", "none", text)
        return none
    speculation = ngram.options[3]
    text = f"{case.copies:.0%} of the answer repeats; no training; verify measures the gain"
    path.take("speculation", name_of(speculation), text)
    return Drafting(speculation, ngram.acceptance, None, None)


def _why_it_wins(case: Case, kind: str, n: int) -> str:
    users = (
        "one user: verifying a few positions costs hardly more than one"
        if n == 1
        else f"{n} sequences are below its break-even batch"
    )
    if kind == "ngram":
        repeats = f"{case.copies:.0%} of the answer repeats known text"
        return f"{users}; {repeats}, and copying needs no training"
    if kind == "draft_model":
        draft = case.draft.source if case.draft else "the draft"
        return f"{users}; {draft} shares the tokenizer and needs no training"
    return users


def _why_it_loses(case: Case, priced: _Priced, n: int) -> str:
    where = f"{priced.gain:.2f}x at {n} sequence{'s' if n > 1 else ''}"
    if priced.method.kind == "ngram" and n == 1:
        return f"{where}: free text (copy fraction {case.copies:g}) gives few matches"
    return f"{where}: {MIN_GAIN:g}x is asked"

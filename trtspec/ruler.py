"""The one ruler for every engine: run requests, count tokens in two ways, compare the counts.

Whatever is measured (identity, acceptance, speed) goes through :func:`run`, so that both sides of every
comparison are counted alike. An engine whose own counters disagree with the tokens it returned is not
measured but reported: see :attr:`Run.contradictions`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trtspec.engine import Engine, FinishReason, Output, Request
from trtspec.recipe import NgramSpeculation, NoSpeculation, Speculation

OnProgress = Callable[[str, int, int], None]
"""Gets (stage, done, total)."""
_MAX_CONTRADICTIONS = 20


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    emitted: tuple[int, ...]
    """Tokens of each target step that emitted any."""
    drafted: int
    accepted: int
    drafted_by_step: tuple[int, ...] = ()
    """Drafted tokens of each step of ``emitted``."""
    accepted_by_step: tuple[int, ...] = ()
    """Accepted ones likewise."""


@dataclass(frozen=True)
class Run:
    """Requests run together; ``tokens`` by the engine's own counter."""

    answers: tuple[Answer, ...]
    seconds: float
    tokens: int
    contradictions: tuple[str, ...]
    held_back_steps: int = 0
    """Steps that could have drafted and did not, as the engine counts them."""
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    """Of ``seconds``: the target's forwards and drafting, by the engine's own clock; 0 if it tells none."""


@dataclass
class _Books:
    tokens: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    drafted_by_step: list[int] = field(default_factory=list)
    accepted_by_step: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    finish_reason: FinishReason | None = None


def stage_of(on_progress: OnProgress, name: str) -> Callable[[int, int], None]:
    """Begin the stage ``name``; what is returned gets (done, total) of it."""
    on_progress(name, 0, 0)
    return lambda done, total: on_progress(name, done, total)


def counter(on_progress: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """What counts one more of ``total`` at each call, such as ``on_answer`` of :func:`run`."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    return advance


def shared_start(sequences: Sequence[Sequence[object]]) -> int:
    """How many first items all ``sequences`` share."""
    count = 0
    for column in zip(*sequences, strict=False):
        if any(one != column[0] for one in column[1:]):
            break
        count += 1
    return count


def max_draft(speculation: Speculation) -> int | None:
    """The most tokens one step may draft for a sequence; None when this is not known from the recipe."""
    match speculation:
        case NoSpeculation():
            return 0
        case NgramSpeculation():
            return speculation.num_draft_tokens
        case _:
            return getattr(speculation, "num_draft_tokens", None)


def run(
    engine: Engine,
    requests: Sequence[Request],
    *,
    draft_limit: int | None,
    on_answer: Callable[[], None] = lambda: None,
) -> Run:
    """Run ``requests`` together to their end and check the engine's own counts on the way.

    ``draft_limit``: the most tokens a step may draft (:func:`max_draft`). ``seconds`` is the wall time from
    the first ``add`` to the last output. Raises what :meth:`Engine.add` raises.
    """
    books = {request.id: _Books() for request in requests}
    wrong: list[str] = []
    before = engine.stats()
    began = time.perf_counter()
    for request in requests:
        engine.add(request)
    open_requests = len(books)
    while open_requests:
        outputs = engine.step()
        if not outputs and engine.in_flight == 0:
            wrong.append(f"the engine is idle with {open_requests} requests unanswered")
            break
        for output in outputs:
            book = books.get(output.request_id)
            if book is None or book.finish_reason is not None:
                wrong.append(f"{output.request_id}: an output for a request that is not in flight")
                continue
            _enter(book, output, draft_limit, wrong)
            if output.finish_reason is not None:
                open_requests -= 1
                on_answer()
    seconds = time.perf_counter() - began
    after = engine.stats()

    for request in requests:
        _audit(request, books[request.id], wrong)
    for name, counted in (
        ("generated_tokens", sum(len(book.tokens) for book in books.values())),
        ("decode_steps", sum(len(book.emitted) for book in books.values())),
        ("drafted_tokens", sum(book.drafted for book in books.values())),
        ("accepted_tokens", sum(book.accepted for book in books.values())),
    ):
        claimed = getattr(after, name) - getattr(before, name)
        if claimed != counted:
            wrong.append(f"the engine's counter {name} went up by {claimed}, its outputs hold {counted}")
    answers = tuple(
        Answer(
            request.id,
            tuple(book.tokens),
            book.finish_reason or "cancelled",
            tuple(book.emitted),
            book.drafted,
            book.accepted,
            tuple(book.drafted_by_step),
            tuple(book.accepted_by_step),
        )
        for request in requests
        for book in [books[request.id]]
    )
    tokens = after.generated_tokens - before.generated_tokens
    held_back = after.held_back_steps - before.held_back_steps
    return Run(
        answers,
        seconds,
        tokens,
        tuple(wrong[:_MAX_CONTRADICTIONS]),
        held_back,
        after.target_seconds - before.target_seconds,
        after.draft_seconds - before.draft_seconds,
    )


def _enter(book: _Books, output: Output, draft_limit: int | None, wrong: list[str]) -> None:
    emitted, name = len(output.new_tokens), output.request_id
    drafted, accepted = output.drafted, output.accepted
    if drafted is None or accepted is None:
        wrong.append(f"{name}: this engine does not count the drafts of each step")
        drafted = accepted = 0
    book.tokens.extend(output.new_tokens)
    book.drafted += drafted
    book.accepted += accepted
    book.finish_reason = output.finish_reason
    if emitted:
        book.emitted.append(emitted)
        book.drafted_by_step.append(drafted)
        book.accepted_by_step.append(accepted)
    if accepted > drafted:
        wrong.append(f"{name}: {accepted} tokens accepted of {drafted} drafted")
    if draft_limit is not None and drafted > draft_limit:
        wrong.append(f"{name}: {drafted} tokens drafted in a step, the recipe allows {draft_limit}")
    # A step emits what it accepted and one token of the target's own; the last step may end inside.
    least = accepted if output.finish_reason is not None else accepted + 1
    if emitted and not least <= emitted <= accepted + 1:
        wrong.append(f"{name}: a step emitted {emitted} tokens having accepted {accepted}")


def _audit(request: Request, book: _Books, wrong: list[str]) -> None:
    count = len(book.tokens)
    if book.finish_reason == "length" and count != request.max_new_tokens:
        wrong.append(f"{request.id}: finished by length with {count} tokens of {request.max_new_tokens}")
    if book.finish_reason == "stop" and (not count or book.tokens[-1] not in request.stop_tokens):
        wrong.append(f"{request.id}: finished by a stop token but does not end in one")
    if count > request.max_new_tokens:
        wrong.append(f"{request.id}: {count} tokens, {request.max_new_tokens} were asked for")
    if any(token in request.stop_tokens for token in book.tokens[:-1]):
        wrong.append(f"{request.id}: went on after a stop token")
    if book.finish_reason == "cancelled":
        wrong.append(f"{request.id}: cancelled by the engine")


def acceptance_within(answer: Answer, max_tokens: int) -> tuple[int, int]:
    """Drafted and accepted tokens of the steps that begin within the first ``max_tokens`` new tokens."""
    drafted = accepted = tokens = 0
    for emitted, candidates in zip(answer.emitted, answer.drafted_by_step, strict=True):
        if tokens >= max_tokens:
            break
        tokens += emitted
        drafted += candidates
        accepted += min(emitted - 1, candidates)
    return drafted, accepted


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Tokens emitted per target step that emitted any, bonus or recovered token included."""
    steps = sum(len(answer.emitted) for answer in answers)
    return sum(len(answer.tokens) for answer in answers) / steps if steps else float("nan")


def emitted_histogram(answers: Sequence[Answer]) -> dict[int, int]:
    """How many steps emitted 1, 2, 3 ... tokens."""
    counts = Counter(emitted for answer in answers for emitted in answer.emitted)
    return dict(sorted(counts.items()))

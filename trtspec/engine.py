"""The engine contract: what every backend offers and every verb above it uses.

Engines see token ids, never strings. A caller adds requests, then calls :meth:`Engine.step` until
nothing is in flight; each step advances every scheduled sequence by one target forward and returns
the tokens that became final. Nothing here imports torch.

Terms (used with these meanings everywhere):

* *drafted*: candidate tokens that were verified by the target in a step.
* *accepted*: drafted tokens that became output.
* *acceptance rate*: accepted / drafted.
* *acceptance length*: tokens emitted per target step of a sequence, the bonus or recovered token
  included; 1.0 without speculation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

FinishReason = Literal["length", "stop", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How the target's logits become a law over the next token.

    ``temperature`` 0 is greedy (the other fields are then irrelevant). ``top_k`` 0 and ``top_p`` 1
    keep the whole vocabulary; both apply after temperature, top-k first. ``seed`` starts the
    request's own random stream, so its tokens do not depend on its neighbours in the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Request:
    """One generation. ``id`` is unique among the requests in flight."""

    id: str
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Totals:
    """What a whole request took. None: the engine does not tell."""

    decode_steps: int | None
    """Target steps that emitted tokens, the one that ends the prompt included."""
    drafted: int | None
    accepted: int | None


@dataclass(frozen=True)
class Output:
    """What one step made final for one request.

    ``new_tokens`` may be empty (a cancelled request's last output); a stop token is included as the last
    of ``new_tokens``. ``drafted`` and ``accepted`` count this step only; they are None from engines that
    count whole requests, whose last output has ``totals``, and whose outputs may hold several steps' tokens.
    ``finish_reason`` is None while the request goes on.
    """

    request_id: str
    new_tokens: tuple[int, ...]
    drafted: int | None = 0
    accepted: int | None = 0
    finish_reason: FinishReason | None = None
    totals: Totals | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine opened (tokens, pages and steps are counts; pages are KV pages). None: the
    engine does not tell."""

    steps: int = 0
    target_rows: int = 0
    """Rows of all target forwards: prefill, decode and verified positions alike."""
    generated_tokens: int = 0
    decode_steps: int | None = 0
    """Sequence-steps that emitted tokens; generated_tokens / decode_steps is the acceptance length."""
    drafted_tokens: int | None = 0
    accepted_tokens: int | None = 0
    held_back_steps: int = 0
    """Steps that could have drafted and did not: more sequences than ``speculation.max_concurrency``, or no
    draft would have paid (``speculation.adaptive``)."""
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


@dataclass(frozen=True)
class Scores:
    """Teacher-forced scores of ``tokens[1:]`` of one text, each list of length len(tokens) - 1.

    Position i holds the law of tokens[i + 1] given tokens[: i + 1], at temperature 1: the natural log
    probability of the realised token, the two most likely tokens, and the logit margin between them.
    """

    logprobs: list[float] = field(default_factory=list)
    top_tokens: list[int] = field(default_factory=list)
    second_tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class LawScores:
    """What a law makes of tokens that are there already: teacher-forced, under temperature, top-k and top-p.

    Each list has one entry a token. ``logprobs``: natural log-probability of the token under the law, -inf
    where top-k or top-p exclude it. ``entropies``: -sum p ln p of that law in nats, the mean of the surprisal
    of what it draws; ``variances``: of that surprisal, nats squared. ``above``: the law's mass of the tokens
    that rank above the realised one (more likely ones; of equally likely ones the lower ids), so that it
    occupies [above, above + p) of the cumulative law, most likely token first.
    """

    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    variances: list[float] = field(default_factory=list)
    above: list[float] = field(default_factory=list)


class Engine(Protocol):
    """A target model with its drafter, ready to run requests in one in-flight batch."""

    vocab_size: int
    max_seq_tokens: int

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError if it can never run (empty prompt, token id outside the
        vocabulary, prompt + max_new_tokens over the limits, id already in flight)."""
        ...

    def step(self) -> list[Output]:
        """Run one target forward over the scheduled rows; [] when nothing is in flight."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown ids are ignored. The next step returns an
        Output with finish_reason "cancelled" for it."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests queued or running."""
        ...

    def stats(self) -> EngineStats: ...

    def score(self, tokens: Sequence[int], *, chunk_tokens: int | None = None) -> Scores:
        """Teacher-force one text through the target, ``chunk_tokens`` rows a forward (None: the
        engine's own chunk). Needs no free slot in the batch and leaves no trace in the cache. Raises
        MissingError where the engine cannot."""
        ...

    def score_law(
        self, tokens: Sequence[int], sampling: Sampling, *, first: int, chunk_tokens: int | None = None
    ) -> LawScores:
        """What the target's law under ``sampling`` makes of ``tokens[first:]``, given all that is before
        each (1 <= first). As :meth:`score` otherwise; raises ValueError if ``sampling`` is greedy."""
        ...

    def score_rows(self, tokens: Sequence[int], *, chunk_tokens: int | None = None) -> Iterator[NDArray[Any]]:
        """Chunk by chunk, the natural log-probabilities of the whole vocabulary before each of
        ``tokens[1:]``, at temperature 1: ``[chunk, vocab]`` float32 (float64 if the model computes in it).
        As :meth:`score` otherwise."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Completion:
    """A finished request: its new tokens and what drafting did for it. None: the engine does not tell."""

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    steps: int | None
    drafted: int | None
    accepted: int | None


def add(left: int | None, right: int | None) -> int | None:
    """The sum of two counts; None if one is not known."""
    return None if left is None or right is None else left + right


def generate(engine: Engine, requests: Iterable[Request]) -> list[Completion]:
    """Run ``requests`` together to their end; completions in the order of the requests.

    Every request is added before the first step, so up to the engine's batch limit they share
    forwards. Raises what :meth:`Engine.add` raises; requests added before the bad one are cancelled.
    """
    order: list[str] = []
    try:
        for request in requests:
            engine.add(request)
            order.append(request.id)
    except Exception:
        for request_id in order:
            engine.cancel(request_id)
        engine.step()
        raise
    tokens: dict[str, list[int]] = {request_id: [] for request_id in order}
    steps = dict.fromkeys(order, 0)
    drafted: dict[str, int | None] = dict.fromkeys(order, 0)
    accepted: dict[str, int | None] = dict.fromkeys(order, 0)
    done: dict[str, Completion] = {}
    while len(done) < len(order):
        for output in engine.step():
            key = output.request_id
            if key not in tokens:
                continue
            tokens[key].extend(output.new_tokens)
            steps[key] += bool(output.new_tokens)
            drafted[key] = add(drafted[key], output.drafted)
            accepted[key] = add(accepted[key], output.accepted)
            if output.finish_reason is not None:
                counts = output.totals or Totals(steps[key], drafted[key], accepted[key])
                done[key] = Completion(
                    key,
                    tuple(tokens[key]),
                    output.finish_reason,
                    counts.decode_steps,
                    counts.drafted,
                    counts.accepted,
                )
    return [done[request_id] for request_id in order]

"""The embedded engine: draft, verify with the target, accept; many requests in one batch.

:meth:`EmbeddedEngine.step` is one *round*. It reads top to bottom in :meth:`EmbeddedEngine._round`:

    propose     the drafter offers candidates for sequences whose tokens are all computed
    schedule    rows are chosen under the row and page budget, slots are allocated
    forward     one pass of the target over all rows: prompt chunks, decode rows, candidates
    accept      per sequence: which candidates stay, and the token that follows
    commit      the accepted rows' KV becomes final, the rest is forgotten, tokens are put out

Everything random goes through one generator per request, so a request's tokens depend neither on its
neighbours nor on preemption. In exact arithmetic, that is: a forward of other shape may round otherwise,
which can turn near ties in 16 bit (see docs/math.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from trtspec.embedded.acceptance import Accepted, exact
from trtspec.embedded.batch import SequenceRows, StepBatch
from trtspec.embedded.drafters import Drafter, DraftView
from trtspec.embedded.kvcache import PagedCache
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.sampling import Draw, TargetLaw, generator_draw
from trtspec.embedded.scheduler import ScheduledRows, Scheduler, SequenceState
from trtspec.embedded.scoring import score_laws, score_rows, score_text
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, depths, no_deeper, tree_mask, truncate
from trtspec.engine import EngineStats, FinishReason, LawScores, Output, Request, Sampling, Scores
from trtspec.errors import InputError, Problem
from trtspec.recipe import Limits

Accept = Callable[[Draft, TargetLaw, Draw], Accepted]


@dataclass
class _Counters:
    steps: int = 0
    target_rows: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    held_back_steps: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


class EmbeddedEngine:
    """:class:`trtspec.engine.Engine` over a :class:`Decoder`; :func:`trtspec.embedded.opening.open_embedded`
    makes one from a recipe.

    ``new_store`` gives a KV store of that many slots (one for the batch, one for each :meth:`score`).
    ``accept`` serves requests that sample; greedy ones use :func:`exact`, to which every strict acceptance
    reduces at temperature 0 (and typical acceptance too). Nothing is drafted in a step where more than
    ``max_concurrency`` sequences have room for a draft; such steps are counted as held back.

    Counts. ``drafted`` are the candidates that a forward verified, after trimming to the row, page and
    token budget. ``accepted`` are those that became output: candidates that verified but lie behind a
    stop token or max_new_tokens are not counted. A cancelled request stays in flight, and its id taken,
    until the step that returns its last Output.

    If a round raises (out of memory, non-finite logits), the error passes through, every request in flight
    is dropped without an Output and the prefix cache is emptied; the engine stays usable.
    """

    def __init__(
        self,
        model: Decoder,
        new_store: Callable[[int], KvStore],
        *,
        num_pages: int,
        page_tokens: int = 16,
        prefix_cache: bool = True,
        limits: Limits | None = None,
        drafter: Drafter | None = None,
        max_concurrency: int | None = None,
        accept: Accept = exact,
    ) -> None:
        limits = limits or Limits()
        self.vocab_size = model.spec.vocab_size
        self.max_seq_tokens = limits.max_seq_tokens
        self._limits = limits
        self._model: Decoder | None = model
        self._new_store = new_store
        self._store: KvStore | None = new_store(num_pages * page_tokens)
        self._cache = PagedCache(num_pages, page_tokens, prefix_cache=prefix_cache, device=model.device)
        self._scheduler = Scheduler(
            self._cache, max_batch_size=limits.max_batch_size, max_num_tokens=limits.max_num_tokens
        )
        self._drafter = drafter
        self._max_concurrency = max_concurrency
        self._accept = accept
        self._sequences: dict[str, SequenceState] = {}
        self._draws: dict[str, Draw] = {}
        self._cancelled: dict[str, Output] = {}
        self._counters = _Counters()

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError, with every reason, if it can never run."""
        self._check_open()
        problems = self._problems(request)
        if problems:
            raise InputError([Problem(f"request {request.id!r}: {problem}") for problem in problems])
        sequence = SequenceState(request, list(request.prompt_tokens))
        self._scheduler.add(sequence)
        self._sequences[request.id] = sequence
        self._draws[request.id] = generator_draw(request.sampling.seed)

    def _problems(self, request: Request) -> list[str]:
        limits, prompt = self._limits, request.prompt_tokens
        total = len(prompt) + request.max_new_tokens
        problems = []
        if request.id in self._sequences or request.id in self._cancelled:
            problems.append("this id is in flight already; wait for its last output or choose another")
        if not prompt:
            problems.append("the prompt is empty; give at least one token")
        elif min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
            problems.append(
                f"token id {bad} is outside the vocabulary of {self.vocab_size}; use the model's tokenizer"
            )
        if len(prompt) > limits.max_input_tokens:
            problems.append(
                f"{len(prompt)} prompt tokens exceed limits.max_input_tokens {limits.max_input_tokens}; "
                "shorten the prompt or raise the limit"
            )
        if request.max_new_tokens < 1:
            problems.append(f"max_new_tokens {request.max_new_tokens} is below 1")
        elif total > limits.max_seq_tokens:
            problems.append(
                f"{len(prompt)} prompt tokens and {request.max_new_tokens} new ones exceed "
                f"limits.max_seq_tokens {limits.max_seq_tokens}; ask for fewer or raise the limit"
            )
        return problems + _sampling_problems(request.sampling)

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds now; its last Output comes with the next step."""
        if request_id in self._sequences:
            self._forget(self._sequences[request_id])
            self._cancelled[request_id] = Output(request_id, (), finish_reason="cancelled")

    @property
    def in_flight(self) -> int:
        """Requests queued or running, or cancelled with their last Output still to come."""
        return len(self._sequences) + len(self._cancelled)

    def _forget(self, sequence: SequenceState) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.id]
        del self._draws[sequence.request.id]
        if self._drafter is not None:
            self._drafter.release(sequence.request.id)

    def _drop_all(self) -> None:
        for sequence in list(self._sequences.values()):
            self._forget(sequence)
        self._cache.clear()

    # ------------------------------------------------------------------ the round

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """One target forward over the scheduled rows; [] when nothing is in flight."""
        outputs = list(self._cancelled.values())
        self._cancelled.clear()
        if self._sequences:
            try:
                outputs += self._round()
            except BaseException:
                self._drop_all()
                raise
        return outputs

    def _round(self) -> list[Output]:
        model, store = self._check_open()
        started = time.perf_counter()
        proposed = self._propose()
        drafting_ended = time.perf_counter()

        plan = self._scheduler.schedule({name: len(draft) for name, draft in proposed.items()})
        if not plan.rows:
            return []
        for copy in plan.copies:
            store.copy(copy.source, copy.target)
        names = [rows.sequence.request.id for rows in plan.rows]
        drafts = [
            truncate(proposed.get(name, EMPTY_DRAFT), rows.num_draft)
            for name, rows in zip(names, plan.rows, strict=True)
        ]

        batch = _step_batch(plan.rows, drafts, model.device)
        layers = self._drafter.hidden_layers if self._drafter else ()
        logits, hidden = model.forward(batch, store, layers)
        laws = _target_laws(plan.rows, drafts, logits)
        forward_ended = time.perf_counter()

        accepted = [
            self._verify(rows, draft, law) if law else None
            for rows, draft, law in zip(plan.rows, drafts, laws, strict=True)
        ]
        outputs = []
        for rows, draft, outcome in zip(plan.rows, drafts, accepted, strict=True):
            output = self._commit(rows, draft, outcome, store)
            if output is not None:
                outputs.append(output)
        observing = time.perf_counter()
        self._observe(plan.rows, batch, accepted, hidden, laws)
        observed = time.perf_counter()
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(self._sequences[output.request_id])

        self._counters.steps += 1
        self._counters.target_rows += len(batch.tokens)
        # What a drafter computes from the round's outcome is drafting too.
        self._counters.draft_seconds += drafting_ended - started + observed - observing
        self._counters.target_seconds += forward_ended - drafting_ended
        return outputs

    def _propose(self) -> dict[str, Draft]:
        """Drafts by request id, for the sequences that have room for one."""
        if self._drafter is None or not (room := self._scheduler.draft_room()):
            return {}
        if self._max_concurrency is not None and len(room) > self._max_concurrency:
            self._counters.held_back_steps += 1
            return {}
        views = [_view(*place) for place in room]
        drafts = self._drafter.propose(views)
        return {
            view.id: truncate(no_deeper(draft, view.max_draft), view.room)
            for view, draft in zip(views, drafts, strict=True)
        }

    def _verify(self, rows: ScheduledRows, draft: Draft, law: TargetLaw) -> Accepted:
        accept = exact if law.sampling.greedy else self._accept
        return accept(draft, law, self._draws[rows.sequence.request.id])

    def _commit(
        self, rows: ScheduledRows, draft: Draft, accepted: Accepted | None, store: KvStore
    ) -> Output | None:
        """Make the rows of known tokens and of the accepted path final; None if no token came out."""
        sequence = rows.sequence
        path: tuple[int, ...] = ()
        new: list[int] = []
        reason: FinishReason | None = None
        if accepted is not None:
            emitted = [draft.tokens[node] for node in accepted.path] + [accepted.token]
            new, reason = _cut(emitted, sequence.request.stop_tokens, sequence.num_remaining)
            path = accepted.path[: len(new)]
            sequence.tokens.extend(new)
        kept = [*range(rows.count), *(rows.count + node for node in path)]
        copy = self._cache.commit(rows.table, sequence.tokens, kept)
        if copy is not None:
            store.copy(copy.source, copy.target)
        if accepted is None:
            return None
        self._counters.generated_tokens += len(new)
        self._counters.decode_steps += 1
        self._counters.drafted_tokens += draft.num_candidates
        self._counters.accepted_tokens += len(path)
        return Output(sequence.request.id, tuple(new), draft.num_candidates, len(path), reason)

    def _observe(
        self,
        rows: Sequence[ScheduledRows],
        batch: StepBatch,
        accepted: Sequence[Accepted | None],
        hidden: Mapping[int, Tensor],
        laws: Sequence[TargetLaw | None],
    ) -> None:
        if self._drafter is None:
            return
        self._drafter.observe(
            [_view(scheduled.sequence, 0, 0, scheduled.start) for scheduled in rows],
            accepted,
            [
                {layer: states[part.first : part.first + part.count] for layer, states in hidden.items()}
                for part in batch.sequences
            ],
            [law.logits if law else None for law in laws],
        )

    # ------------------------------------------------------------------ the rest of the contract

    def stats(self) -> EngineStats:
        counters = vars(self._counters)
        # Above max_concurrency, and where a drafter that adapts found that no draft would pay.
        held_back = self._counters.held_back_steps + getattr(self._drafter, "num_held_back", 0)
        return EngineStats(
            **counters | {"held_back_steps": held_back},
            preemptions=self._scheduler.num_preemptions,
            prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_total=self._cache.num_pages,
            pages_free=self._cache.pages_free,
            pages_cached=self._cache.pages_cached,
            pages_held=self._cache.pages_held,
        )

    def score(self, tokens: Sequence[int], *, chunk_tokens: int | None = None) -> Scores:
        """Teacher-force one text, of up to the model's own positions; ``chunk_tokens`` rows a forward.

        Uses a KV store of its own, in the engine's format, and so leaves no trace in the cache.
        """
        model, _ = self._check_open()
        chunk = self._limits.max_num_tokens if chunk_tokens is None else chunk_tokens
        return score_text(model, self._new_store, tokens, chunk)

    def score_law(
        self, tokens: Sequence[int], sampling: Sampling, *, first: int, chunk_tokens: int | None = None
    ) -> LawScores:
        """What the target's law under ``sampling`` makes of ``tokens[first:]``; else as :meth:`score`."""
        model, _ = self._check_open()
        chunk = self._limits.max_num_tokens if chunk_tokens is None else chunk_tokens
        return score_laws(model, self._new_store, tokens, chunk, sampling, first)

    def score_rows(self, tokens: Sequence[int], *, chunk_tokens: int | None = None) -> Iterator[NDArray[Any]]:
        """The log-probabilities of the whole vocabulary, chunk by chunk; as :meth:`score` otherwise."""
        model, _ = self._check_open()
        chunk = self._limits.max_num_tokens if chunk_tokens is None else chunk_tokens
        return score_rows(model, self._new_store, tokens, chunk)

    def close(self) -> None:
        """Drop every request without an Output and give the memory back; harmless if done twice."""
        self._drop_all()
        self._cancelled.clear()
        self._model = self._store = None

    def check_integrity(self) -> None:
        """Raise if the books of the KV cache do not balance; for tests, costs time per page."""
        self._cache.check_integrity()

    def _check_open(self) -> tuple[Decoder, KvStore]:
        if self._model is None or self._store is None:
            raise RuntimeError("the engine is closed")
        return self._model, self._store


def _view(sequence: SequenceState, max_draft: int, max_nodes: int, start: int = 0) -> DraftView:
    request = sequence.request
    return DraftView(request.id, sequence.tokens, max_draft, request.sampling, max_nodes, start)


def _step_batch(rows: Sequence[ScheduledRows], drafts: Sequence[Draft], device: torch.device) -> StepBatch:
    """The rows of one forward: per sequence its known tokens, then the nodes of its draft."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    slots: list[Tensor] = []
    sequences: list[SequenceRows] = []
    for scheduled, draft in zip(rows, drafts, strict=True):
        first, start = len(tokens), scheduled.start
        stop = start + scheduled.count
        tokens += scheduled.sequence.tokens[start:stop]
        tokens += draft.tokens
        positions += range(start, stop)
        positions += (stop - 1 + depth for depth in depths(draft))
        slots.append(scheduled.table.slots(start, stop + len(draft)))
        tree = tree_mask(draft)  # not None only behind a single decode row, so its shape fits
        sequences.append(
            SequenceRows(
                first,
                scheduled.count + len(draft),
                context=scheduled.table.slots(0, start),
                tree=None if tree is None else tree.to(device),
            )
        )
        if scheduled.reaches_end:
            ending = first + scheduled.count - 1
            wanted.append(ending)
            wanted += [ending + 1 + node for node in range(len(draft)) if node not in draft.silent]
    return StepBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slots=torch.cat(slots),
        sequences=tuple(sequences),
        logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
    )


def _target_laws(
    rows: Sequence[ScheduledRows], drafts: Sequence[Draft], logits: Tensor
) -> list[TargetLaw | None]:
    """Of each sequence the laws after its last known token and after each node that is not silent; None in
    mid-prompt. Candidates come first and are never silent, so theirs are rows 1, 2, ...

    ``logits [wanted, vocab]`` in the order of the rows. One argmax serves all greedy sequences.
    """
    ending = [scheduled for scheduled in rows if scheduled.reaches_end]
    greedy = any(scheduled.sequence.request.sampling.greedy for scheduled in ending)
    argmax = logits.argmax(-1).tolist() if greedy else None
    laws: list[TargetLaw | None] = []
    first = 0
    for scheduled, draft in zip(rows, drafts, strict=True):
        if not scheduled.reaches_end:
            laws.append(None)
            continue
        part = slice(first, first + 1 + draft.num_read)
        first = part.stop
        sampling = scheduled.sequence.request.sampling
        laws.append(TargetLaw(logits[part], sampling, argmax[part] if argmax and sampling.greedy else None))
    return laws


def _cut(
    emitted: list[int], stop_tokens: frozenset[int], num_remaining: int
) -> tuple[list[int], FinishReason | None]:
    """The emitted tokens up to the first stop token or the number still wanted, and why it ends there."""
    for count, token in enumerate(emitted, start=1):
        if token in stop_tokens:
            return emitted[:count], "stop"
        if count == num_remaining:
            return emitted[:count], "length"
    return emitted, None


def _sampling_problems(sampling: Sampling) -> list[str]:
    problems = []
    if not 0.0 <= sampling.temperature < float("inf"):
        problems.append(f"temperature {sampling.temperature} is not a finite number >= 0")
    if sampling.top_k < 0:
        problems.append(f"top_k {sampling.top_k} is below 0; 0 keeps the whole vocabulary")
    if not 0.0 < sampling.top_p <= 1.0:
        problems.append(f"top_p {sampling.top_p} is outside (0, 1]; 1 keeps the whole vocabulary")
    if not 0 <= sampling.seed < 2**63:
        problems.append(f"seed {sampling.seed} is outside 0 .. 2^63 - 1")
    return problems

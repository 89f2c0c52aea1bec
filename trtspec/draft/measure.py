"""Measure a drafter on prompts: run, count by position, compare with 16 bit, and hold the books against each
other.

Every request is greedy, so an answer is the target's own whatever is drafted, and what was drafted can be
judged twice: by what the engine says it accepted, and by the answer itself. Where the two disagree (positions
off by one, drafts of another sequence) nothing is measured but the contradiction.

*Cells* are target and drafter, each in 16 bit or as the recipe has it. All answer the same prompts; another
target gives other answers, so a difference between cells is one of prompts, not of tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trtspec.artifact import RECIPE_FILE, Artifact, file_sha256, open_artifact
from trtspec.draft.acceptance import Answered, Step, dead_drafter
from trtspec.embedded.drafters.recorder import Recorded, RecordingDrafter, drafting_through
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.opening import open_embedded
from trtspec.embedded.tree import Draft, children, depths
from trtspec.engine import Request
from trtspec.errors import InputError, MissingError, Problem
from trtspec.prompts import PROMPTS_FILE, Prompt, load_prompts
from trtspec.recipe import (
    DraftModelSpeculation,
    EmbeddedBackend,
    LookaheadSpeculation,
    NgramSpeculation,
    NoQuantization,
    NoSpeculation,
    Recipe,
    Speculation,
)
from trtspec.recipe_facts import drafted_positions, is_quantized
from trtspec.recipe_file import load_recipe, recipe_digest
from trtspec.ruler import Answer, counter, run
from trtspec.text import Tokenizer
from trtspec.user_files import read_user_text

Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""

_SIXTEEN = NoQuantization(kind="none")
_MAX_CONTRADICTIONS = 20
_SHIFTS = (-1, 1, 2)
_ECHO = 0.9
"""A learned drafter whose first candidate is the current token more often is dead: it has learnt nothing."""


@dataclass(frozen=True)
class Cell:
    """A target and a drafter; ``None`` in ``why_not``: it can be measured."""

    target: str
    draft: str
    artifact: Artifact
    why_not: str | None = None

    @property
    def name(self) -> str:
        return f"target {self.target}, draft {self.draft}"


@dataclass(frozen=True)
class Measured:
    """What one cell came to. ``dead`` says why the drafter is, ``hint`` what its drafts look like then."""

    cell: Cell
    answers: tuple[Answered, ...]
    contradictions: tuple[str, ...]
    dead: str
    hint: str


def engine_of(path: Path, engines_dir: Path) -> tuple[Artifact, str, Path | None]:
    """(engine, its recipe's text, folder where the recipe's relative paths start, if known) of an engine's
    folder or of a recipe whose engine stands in ``engines_dir``.

    Raises MissingError for an engine that is not built, InputError for one of another recipe.
    """
    if not path.is_file():
        found = open_artifact(path)
        return found, read_user_text(found.folder / RECIPE_FILE), None
    recipe = load_recipe(path)
    folder = engines_dir / recipe.name
    if not folder.is_dir():
        raise MissingError(f"{folder}: the engine of {path} is not built; run: trtspec build {path}")
    found = open_artifact(folder)
    if found.manifest.recipe_digest != recipe_digest(recipe):
        message = f"was built from another recipe than {path} is now; run: trtspec build {path}"
        raise InputError(Problem(message, file=str(folder)))
    return found, read_user_text(path), path.resolve().parent


def prompts_of(
    artifact: Artifact, data: Path | None, tasks: Sequence[str], num_prompts: int, max_new_tokens: int
) -> list[Prompt]:
    """``num_prompts`` prompts of ``tasks`` (all if none is named) from ``data`` (None: ours), spread evenly
    over it. Prompts that are too long for the engine are refused, of ours passed over.

    Raises InputError for a task that no prompt has, and for fewer than two prompts: one has no interval.
    """
    limits = artifact.recipe.limits
    longest = min(limits.max_input_tokens, limits.max_seq_tokens - max_new_tokens)
    path, tokenizer = data or PROMPTS_FILE, Tokenizer.load(artifact.target_dir)
    found = load_prompts(path, tokenizer, limit=1_000_000, max_tokens=longest, sample=data is None)
    known = sorted({prompt.task for prompt in found} - {""})
    if unknown := [task for task in tasks if task not in known]:
        allowed = ", ".join(known) or "none, no prompt has a task"
        raise InputError(
            Problem(f"--tasks: {', '.join(unknown)}: no such prompts; allowed: {allowed}", str(path))
        )
    found = [prompt for prompt in found if not tasks or prompt.task in tasks]
    if len(found) < 2:
        raise InputError(Problem("one prompt says nothing about spread; give at least two", file=str(path)))
    count = min(num_prompts, len(found))
    return [found[at * len(found) // count] for at in range(count)]


def is_learned(speculation: Speculation) -> bool:
    """Whether the drafter was trained, and so always has something to say."""
    return not isinstance(speculation, NoSpeculation | NgramSpeculation | LookaheadSpeculation)


def checked(artifact: Artifact) -> None:
    """Raise InputError for an engine whose drafting cannot be measured here."""
    recipe = artifact.recipe
    problems = []
    if not isinstance(recipe.backend, EmbeddedBackend):
        message = (
            f"{recipe.backend.kind}: acceptance is measured by the embedded engine, and holds for every GPU; "
            "build the recipe with backend.kind: embedded"
        )
        problems.append(Problem(message, file=str(artifact.folder), key="backend.kind"))
    if isinstance(recipe.speculation, NoSpeculation):
        message = "none: there is no drafter to measure; name one"
        problems.append(Problem(message, file=str(artifact.folder), key="speculation.kind"))
    if problems:
        raise InputError(problems)


def with_speculation(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with every draft verified whole, so that what is measured is the drafter (no ``adaptive``,
    no ``max_concurrency``), and with ``changes`` of its speculation, which are not validated."""
    off = {"adaptive": False, "max_concurrency": None}
    always = {name: off[name] for name in off if name in type(recipe.speculation).model_fields}
    return recipe.model_copy(
        update={"speculation": recipe.speculation.model_copy(update={**always, **changes})}
    )


def cells(artifact: Artifact) -> list[Cell]:
    """What there is to compare: 16 bit first, the recipe itself last."""
    recipe, speculation = artifact.recipe, artifact.recipe.speculation
    targets = [("as in the recipe", artifact)]
    if artifact.manifest.target != "baseline":
        plain = recipe.model_copy(update={"quantization": _SIXTEEN})
        targets.insert(0, ("16 bit", replace(artifact, recipe=plain, target_dir=artifact.baseline_dir)))
    found = []
    for target, one in targets:
        if isinstance(speculation, DraftModelSpeculation) and is_quantized(speculation.quantization):
            folder = _draft_source(artifact)
            changed = speculation.model_copy(update={"quantization": _SIXTEEN})
            own = replace(
                one,
                recipe=one.recipe.model_copy(update={"speculation": changed}),
                draft_dir=folder if isinstance(folder, Path) else None,
            )
            found.append(Cell(target, "16 bit", own, None if isinstance(folder, Path) else folder))
        found.append(Cell(target, "as in the recipe", one))
    return found


def _draft_source(artifact: Artifact) -> Path | str:
    """The 16-bit draft model that the engine was built from, or why it is not there: an engine keeps only
    what it loads."""
    source = artifact.manifest.draft_source
    if source is None:
        return "the engine does not say what its draft model was built from"
    folder = Path(source.path)
    for name, record in source.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != record.size:
            return f"{path}: not there any more as it was when the engine was built"
        if path.stat().st_mtime_ns != record.mtime_ns and file_sha256(path) != record.sha256:
            return f"{path}: changed since the engine was built"
    return folder


# --------------------------------------------------------------------------- running


def open_cell(artifact: Artifact, *, verified: bool = True, **changes: Any) -> EmbeddedEngine:
    """The engine of ``artifact`` with ``changes`` of its speculation (:func:`with_speculation`).

    ``verified``: with so few sequences in a batch that a step has rows for all of their drafts; else those of
    some would be cut, and what is measured would depend on the batch.
    """
    recipe = with_speculation(artifact.recipe, **changes)
    limits = recipe.limits
    if verified:
        batch = limits.max_num_tokens // (1 + drafted_positions(recipe.speculation))
        batch = max(1, min(limits.max_batch_size, batch))
        recipe = recipe.model_copy(
            update={"limits": limits.model_copy(update={"max_batch_size": batch, "kv_cache_bytes": None})}
        )
    return open_embedded(
        recipe,
        artifact.target_dir,
        draft_dir=artifact.draft_dir,
        heads_dir=artifact.heads_dir,
        corpus_dir=artifact.corpus_dir,
    )


def requests_of(prompts: Sequence[Prompt], max_new_tokens: int, stop_tokens: frozenset[int]) -> list[Request]:
    """Greedy requests, in the order of the prompts."""
    return [Request(prompt.id, prompt.tokens, max_new_tokens, stop_tokens=stop_tokens) for prompt in prompts]


def answer_all(
    engine: EmbeddedEngine,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    *,
    verified: bool = True,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[list[Answer], Mapping[str, Mapping[int, Recorded]], list[str]]:
    """(answers, drafts by prompt and known tokens, contradictions of the engine's counts)."""

    def recording(inner: Any) -> RecordingDrafter:
        return RecordingDrafter(inner, verified=verified)

    with drafting_through(engine, recording) as recorder:
        assert isinstance(recorder, RecordingDrafter)
        requests = requests_of(prompts, max_new_tokens, stop_tokens)
        done = run(engine, requests, draft_limit=None, on_answer=on_answer)
    return list(done.answers), recorder.rounds, list(done.contradictions)


def measure_cell(
    cell: Cell,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    on_progress: Progress = lambda stage, done, total: None,
    **changes: Any,
) -> Measured:
    """Answer ``prompts`` greedily with the cell's engine and count. ``changes`` as in :func:`open_cell`.

    Raises MissingError for a cell that is not there.
    """
    if cell.why_not is not None:
        raise MissingError(cell.why_not)
    stop_tokens = Tokenizer.load(cell.artifact.target_dir).eos_token_ids
    on_answer = counter(partial(on_progress, cell.name), len(prompts))
    learned = is_learned(cell.artifact.recipe.speculation)
    with contextlib.closing(open_cell(cell.artifact, **changes)) as engine:
        on_progress(cell.name, 0, len(prompts))
        counted = count(engine, prompts, max_new_tokens, stop_tokens, learned=learned, on_answer=on_answer)
    return Measured(cell, *counted)


def count(
    engine: EmbeddedEngine,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stop_tokens: frozenset[int],
    *,
    learned: bool,
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[tuple[Answered, ...], tuple[str, ...], str, str]:
    """(answers, contradictions, why the drafter is dead, what it drafts then) of ``engine`` on ``prompts``;
    ``learned``: see :func:`is_learned`."""
    found, rounds, wrong = answer_all(engine, prompts, max_new_tokens, stop_tokens, on_answer=on_answer)
    answers = []
    for prompt, answer in zip(prompts, found, strict=True):
        steps, problems = steps_of(prompt, answer, rounds.get(prompt.id, {}))
        answers.append(Answered(prompt.id, prompt.task, answer.tokens, steps))
        wrong += problems
    dead = "" if wrong else dead_drafter(answers, learned=learned)
    shares = shift_shares(prompts, found, rounds)
    if learned and not wrong and not dead and shares.get(-1, 0.0) > _ECHO > 0.5 > shares[0]:
        dead = "it drafts the current token again, whatever the text"
    hint = shift_hint(shares) if dead else ""
    return tuple(answers), tuple(wrong[:_MAX_CONTRADICTIONS]), dead, hint


# --------------------------------------------------------------------------- judging by the answer


def path_of(draft: Draft, said: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(nodes, ranks among siblings) of the path in ``draft`` that says the tokens ``said``, as far as one
    does; of equal siblings the first, as acceptance does."""
    below = children(draft)
    nodes: list[int] = []
    ranks: list[int] = []
    row = 0
    for token in said:
        rank = next((r for r, node in enumerate(below[row]) if draft.tokens[node] == token), None)
        if rank is None:
            break
        ranks.append(rank)
        nodes.append(below[row][rank])
        row = nodes[-1] + 1
    return tuple(nodes), tuple(ranks)


def steps_of(
    prompt: Prompt, answer: Answer, rounds: Mapping[int, Recorded]
) -> tuple[tuple[Step, ...], list[str]]:
    """The steps of ``answer`` after the prompt's own, and what is contradictory about them: drafts that were
    counted differently from what was drafted, and acceptance that the answer does not bear out."""
    steps, wrong = [], []
    at = answer.emitted[0] if answer.emitted else 0
    books = zip(answer.emitted, answer.drafted_by_step, answer.accepted_by_step, strict=True)
    for emitted, drafted, accepted in list(books)[1:]:
        recorded = rounds.get(len(prompt.tokens) + at)
        said = answer.tokens[at : at + emitted]
        where = f"{prompt.id}: token {at}"
        if recorded is None:
            ranks: tuple[int, ...] = ()
            offered = candidates = rows = 0
        else:
            candidates, rows = recorded.draft.num_candidates, len(recorded.draft)
            offered = max(depths(recorded.draft)[:candidates], default=0)
            _, ranks = path_of(recorded.draft, said)
        if candidates != drafted:
            wrong.append(f"{where}: {drafted} candidates counted, {candidates} drafted")
        if len(ranks) != accepted:
            wrong.append(
                f"{where}: the engine says it accepted {accepted} drafted tokens, the answer holds "
                f"{len(ranks)} of them; are drafts and positions off by one?"
            )
        steps.append(Step(emitted, drafted, offered, accepted, ranks, rows))
        at += emitted
    return tuple(steps), wrong


def shift_shares(
    prompts: Sequence[Prompt], answers: Sequence[Answer], rounds: Mapping[str, Mapping[int, Recorded]]
) -> dict[int, float]:
    """In what share of the drafts the first candidate is the token so far from the one that it is for: -1 the
    current token, 0 the right one, 1 the one behind it. {} without drafts."""
    hits = dict.fromkeys((0, *_SHIFTS), 0)
    tried = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = (*prompt.tokens, *answer.tokens)
        for known, recorded in rounds.get(prompt.id, {}).items():
            if not recorded.draft.num_candidates or known + max(_SHIFTS) >= len(text):
                continue
            tried += 1
            for shift in hits:
                hits[shift] += recorded.draft.tokens[0] == text[known + shift]
    return {shift: hit / tried for shift, hit in hits.items()} if tried else {}


def shift_hint(shares: Mapping[int, float]) -> str:
    """What the first candidates of a dead drafter match better than the token they are for, "" if nothing:
    heads of zeros repeat the current token, heads in the wrong order are a token late or early."""
    best = max(_SHIFTS, key=lambda shift: shares.get(shift, 0.0))
    if not shares or shares[best] < max(0.15, 2 * shares[0]):
        return ""
    share = f"its first candidate is that token in {shares[best]:.0%} of the drafts"
    if best == -1:
        return f"it repeats the current token ({share}): heads of zeros do that"
    return (
        f"it drafts the token {best + 1} ahead instead of the next ({share}): "
        "are its heads, or its positions, off by one?"
    )

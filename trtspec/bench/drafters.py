"""Drafters side by side: the same target, the same prompts, one interleaved run.

Each drafter gets an engine over the same weights; every prompt goes to one after the other, round by round,
in an order that turns, so that whatever slows the machine slows all. One request at a time, greedy, exact
acceptance, every answer as long as asked. Time counts from the first token on: drafting does nothing for the
prompt. So for every row the ratio of tokens/s to no drafting is its tokens per step, over those of no
drafting (1), divided by its step cost.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trtspec.artifact import Artifact
from trtspec.backends import open_engine, require_embedded
from trtspec.bench.prompts import prompts_of
from trtspec.bench.rows import spread
from trtspec.engine import Engine, Request
from trtspec.errors import InputError, MissingError, Problem
from trtspec.modelspec import read_modelspec
from trtspec.recipe import ExactAcceptance, NoSpeculation, Recipe, Speculation

HEAD_KINDS = ("medusa", "eagle", "eagle3")
KINDS = ("none", "ngram", "lookahead", "draft_model", *HEAD_KINDS)


@dataclass(frozen=True)
class Contender:
    """A way of drafting and the engine to open for it; ``artifact`` None: it cannot run, see ``note``."""

    name: str
    artifact: Artifact | None
    note: str = ""


@dataclass(frozen=True)
class Trace:
    """One answer. ``steps``: (tokens emitted, drafted, accepted) of each step, the prompt's first;
    ``seconds`` from the first token's step to the last."""

    tokens: tuple[int, ...]
    steps: tuple[tuple[int, int, int], ...]
    seconds: float

    @property
    def decoded(self) -> tuple[int, int]:
        """(tokens, steps) after the prompt's own step, which nothing was drafted for."""
        return sum(emitted for emitted, _, _ in self.steps[1:]), len(self.steps) - 1


@dataclass(frozen=True)
class DrafterRow:
    """One drafter on one workload; what is None was not measured, and ``note`` says why.

    ``tokens_per_step``: the acceptance length, bonus token included. ``by_depth[i]``: the share of the steps
    with drafts in which at least i + 1 drafted tokens were accepted. ``step_cost``: time of a step over that
    of one without drafts, ``ratio`` the same of tokens/s: medians over the rounds, with the lowest and
    the highest round. ``identical``: answers equal to those without drafts, of ``prompts``.
    """

    workload: str
    drafter: str
    tokens_per_step: float | None = None
    drafted: int = 0
    accepted: int = 0
    by_depth: tuple[float, ...] = ()
    step_cost: float | None = None
    tokens_per_s: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    identical: int | None = None
    prompts: int = 0
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """``answers``: by drafter, its answer to the first prompt of the workload ``shown``."""

    rows: tuple[DrafterRow, ...]
    shown: str
    answers: Mapping[str, Trace]


def contenders(artifact: Artifact, kinds: Sequence[str] | None, heads: Path | None) -> list[Contender]:
    """The drafters to compare, no drafting first. The kind that the recipe drafts with keeps its settings,
    others have the defaults. ``kinds`` None: those that need no training, the recipe's own, and what
    ``heads`` holds.

    Raises InputError for an unknown kind, one that this engine has nothing for, heads that do not fit, and an
    engine of TensorRT-LLM.
    """
    require_embedded(artifact)
    own = artifact.recipe.speculation
    found = None if heads is None else _kind_of_heads(heads, artifact)
    if kinds is not None and not kinds:
        raise InputError(f"--kinds: names nothing; allowed: {', '.join(KINDS)}, with commas between them")
    names = list(kinds) if kinds is not None else ["none", "ngram", "lookahead", own.kind, found]
    wanted = ["none", *dict.fromkeys(name for name in names if name is not None and name != "none")]
    problems = []
    result = []
    for name in wanted:
        if name not in KINDS:
            problems.append(Problem(f"--kinds: {name}: unknown; allowed: {', '.join(KINDS)}"))
        elif name == "none":
            result.append(_contender(artifact, NoSpeculation(kind="none")))
        elif name == found:
            speculation = own if own.kind == name else _speculation(name, heads=str(heads))
            result.append(_contender(replace(artifact, heads_dir=heads), speculation))
        elif name == own.kind:
            result.append(_contender(artifact, own))
        elif name in HEAD_KINDS:
            problems.append(Problem(f"--kinds: {name}: no heads; name a folder of {name} heads with --heads"))
        elif name == "draft_model":
            message = "this engine has no draft model; build a recipe with speculation kind: draft_model"
            problems.append(Problem(f"--kinds: draft_model: {message}"))
        else:
            result.append(_contender(artifact, _speculation(name)))
    if problems:
        raise InputError(problems)
    if kinds is None and not {one.name for one in result} & set(HEAD_KINDS):
        result.append(Contender("eagle", None, "no heads"))
    return result


def _speculation(kind: str, **fields: Any) -> Speculation:
    made: Speculation = TypeAdapter(Speculation).validate_python({"kind": kind, **fields})
    return made


def _contender(artifact: Artifact, speculation: Speculation) -> Contender:
    recipe: Recipe = artifact.recipe.model_copy(
        update={
            "speculation": speculation,
            "acceptance": ExactAcceptance(kind="exact"),
            "limits": artifact.recipe.limits.model_copy(update={"max_batch_size": 1, "kv_cache_bytes": None}),
        }
    )
    return Contender(speculation.kind, replace(artifact, recipe=recipe))


def _kind_of_heads(folder: Path, artifact: Artifact) -> str:
    from trtspec.embedded.heads import inspect_heads  # torch

    target = read_modelspec(artifact.target_dir)
    reasons: list[Problem] = []
    for kind in HEAD_KINDS:
        problems: list[Problem] = []
        if inspect_heads(folder, kind, target, problems) is not None:  # type: ignore[arg-type]
            return kind
        # That heads of one kind are none of another is no reason.
        reasons += [one for one in problems if not one.message.startswith("these are ")]
    raise InputError(list(dict.fromkeys(reasons)))


def answer(engine: Engine, prompt: Sequence[int], new_tokens: int) -> Trace:
    """Run one greedy request of exactly ``new_tokens`` and time its steps."""
    engine.add(Request("bench", tuple(prompt), new_tokens))
    tokens: list[int] = []
    steps: list[tuple[int, int, int]] = []
    began = ended = 0.0
    while engine.in_flight:
        for output in engine.step():
            ended = time.perf_counter()
            if not steps:
                began = ended
            tokens += output.new_tokens
            if output.drafted is None or output.accepted is None:
                raise MissingError("this engine does not count the drafts of each step; nothing to compare")
            steps.append((len(output.new_tokens), output.drafted, output.accepted))
    return Trace(tuple(tokens), tuple(steps), ended - began)


def compare_drafters(
    artifact: Artifact,
    drafters: Sequence[Contender],
    *,
    workloads: Sequence[str],
    num_prompts: int,
    new_tokens: int,
    rounds: int,
    shown: str,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Comparison:
    """Race ``drafters`` (the first drafts nothing) on ``num_prompts`` prompts of each workload."""
    limits = artifact.recipe.limits
    longest = min(limits.max_input_tokens, limits.max_seq_tokens - new_tokens)
    prompts = {name: prompts_of(artifact, name, num_prompts, longest) for name in workloads}
    running: dict[str, Engine] = {}
    traces: dict[str, dict[str, list[list[Trace]]]] = {}
    with ExitStack() as stack:
        able = [one for one in drafters if one.artifact is not None]
        for number, one in enumerate(able):
            on_progress("loading", number, len(able))
            assert one.artifact is not None
            running[one.name] = stack.enter_context(closing(open_engine(one.artifact)))
        done, total = 0, rounds * len(running) * sum(map(len, prompts.values()))
        for workload, texts in prompts.items():
            for engine in running.values():
                answer(engine, texts[0], 8)  # warm up
            found: dict[str, list[list[Trace]]] = {name: [] for name in running}
            for turn in range(rounds):
                for name in found:
                    found[name].append([])
                for number, prompt in enumerate(texts):
                    order = list(running.items())
                    first = (turn + number) % len(order)
                    for name, engine in (*order[first:], *order[:first]):
                        found[name][-1].append(answer(engine, prompt, new_tokens))
                        done += 1
                        on_progress("answers, drafters in turn", done, total)
            traces[workload] = found
    rows = [
        row_of(workload, one.name, traces[workload][one.name], traces[workload][drafters[0].name])
        for workload in workloads
        for one in able
    ]
    rows += [DrafterRow("all", one.name, note=one.note) for one in drafters if one.artifact is None]
    answers = {name: rounds_[0][0] for name, rounds_ in traces[shown].items()}
    return Comparison(tuple(rows), shown, answers)


def row_of(
    workload: str, drafter: str, mine: Sequence[Sequence[Trace]], plain: Sequence[Sequence[Trace]]
) -> DrafterRow:
    """The row of ``mine[round][prompt]`` beside ``plain``, the same without drafts."""
    steps = [step for one in mine[0] for step in one.steps[1:]]
    tokens_per_step = sum(emitted for emitted, _, _ in steps) / len(steps)
    drafting = [accepted for _, drafted, accepted in steps if drafted]
    depth = max(drafting, default=0)
    ratio, low, high = spread([_rate(one) / _rate(other) for one, other in zip(mine, plain, strict=True)])
    costs = [_step_s(one) / _step_s(other) for one, other in zip(mine, plain, strict=True)]
    return DrafterRow(
        workload=workload,
        drafter=drafter,
        tokens_per_step=tokens_per_step,
        drafted=sum(drafted for _, drafted, _ in steps),
        accepted=sum(accepted for _, _, accepted in steps),
        by_depth=tuple(sum(one > i for one in drafting) / len(drafting) for i in range(depth)),
        step_cost=statistics.median(costs),
        tokens_per_s=statistics.median(_rate(one) for one in mine),
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        identical=sum(a.tokens == b.tokens for a, b in zip(mine[0], plain[0], strict=True)),
        prompts=len(mine[0]),
    )


def _rate(traces: Sequence[Trace]) -> float:
    """Tokens per second of one round."""
    return sum(one.decoded[0] for one in traces) / sum(one.seconds for one in traces)


def _step_s(traces: Sequence[Trace]) -> float:
    """Seconds of a step of one round."""
    return sum(one.seconds for one in traces) / sum(one.decoded[1] for one in traces)

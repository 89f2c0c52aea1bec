"""The quality checks beyond perplexity, in order: divergence, tasks, retrieval, degenerate text.

What is compared is quantization (and an approximate acceptance) against the 16-bit engine without
speculation; whether speculation is lossless is asked elsewhere, against the same quantization. Divergence and
degenerate text are looked at whenever there is something to compare; tasks and retrieval where the user or a
gate of the recipe asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtspec.engine import Engine
from trtspec.errors import InputError, Problem
from trtspec.prompts import Prompt
from trtspec.recipe import Gates
from trtspec.ruler import Answer, counter, run
from trtspec.text import Tokenizer
from trtspec.verify.degenerate import degenerate_rows, degeneration, judge_degenerate
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.harness import HarnessItem, require_harness, run_harness
from trtspec.verify.judge import judge_command
from trtspec.verify.lossless import requests_for
from trtspec.verify.noninferiority import BASELINE, judge_pairs
from trtspec.verify.records import Records, Row, answers_from
from trtspec.verify.retrieval import judge_retrieval, measure_retrieval, needles
from trtspec.verify.sandbox import isolated
from trtspec.verify.settings import Settings
from trtspec.verify.tasks import (
    TASKS_FILE,
    Item,
    Scored,
    graded_again,
    load_tasks,
    question_of,
    score_items,
    task_files,
    try_judge,
)

Stage = Callable[[str], Callable[[int, int], None]]


@dataclass(frozen=True)
class Side:
    """One of two that are compared. ``writer`` generates, ``scorer`` gives log-likelihoods."""

    writer: Engine
    scorer: Engine
    draft_limit: int | None


@dataclass(frozen=True)
class Plan:
    """What is to be run, read and checked before any engine is opened."""

    items: tuple[Item, ...]
    harness: tuple[str, ...]
    retrieval: bool


def plan_suite(settings: Settings, gates: Gates, tokenizer: Tokenizer, max_seq_tokens: int) -> Plan:
    """Read the tasks that settings or gates ask for, and try the judge. Raises InputError with every bad
    line, MissingError for lm-evaluation-harness."""
    if settings.lm_eval:
        require_harness()
    items = read_items(settings, gates, tokenizer, max_seq_tokens)
    retrieval = settings.retrieval or gates.max_retrieval_loss is not None
    return Plan(items, settings.lm_eval, retrieval)


def read_items(
    settings: Settings, gates: Gates, tokenizer: Tokenizer | None, max_seq_tokens: int | None
) -> tuple[Item, ...]:
    """The items of every file. Raises what :func:`plan_suite` does."""
    if settings.judge is not None:
        judge_command(settings.judge)
    paths = task_files(settings.tasks)
    if gates.max_task_loss is not None and not paths and not settings.lm_eval:
        paths = [TASKS_FILE]
    items: list[Item] = []
    for path in paths:
        more = load_tasks(
            path,
            tokenizer,
            max_seq_tokens=max_seq_tokens,
            limit=settings.task_limit,
            judge=settings.judge is not None,
        )
        twice = {item.task for item in items} & {item.task for item in more}
        if twice:
            message = f"task {', '.join(sorted(twice))} is in an earlier file too; name it otherwise"
            raise InputError(Problem(message, file=str(path)))
        items += more
    if settings.judge is not None:
        try_judge(settings.judge, items)
    return tuple(items)


def check_tasks(
    plan: Plan,
    target: Side,
    baseline: Side,
    tokenizer: Tokenizer,
    settings: Settings,
    gates: Gates,
    stage: Stage,
) -> tuple[list[Check], list[Row]]:
    """The checks ``task:NAME``, one a task, and a row of :func:`degenerate_rows` for each pair of answers."""
    rows: list[Row] = []
    if plan.items:
        advance = counter(stage("tasks: answers that can be checked"), 2 * len(plan.items))
        mine, theirs = (
            score_items(
                plan.items,
                side.writer,
                side.scorer,
                tokenizer,
                draft_limit=side.draft_limit,
                judge=settings.judge,
                on_done=advance,
            )
            for side in (target, baseline)
        )
        stops = tokenizer.eos_token_ids
        rows += [_row(*one, stops) for one in zip(plan.items, mine, theirs, strict=True)]
    if plan.harness:
        advance = counter(stage("tasks of lm-evaluation-harness"), 0)
        ours, others = (
            run_harness(
                plan.harness,
                side.writer,
                side.scorer,
                tokenizer,
                draft_limit=side.draft_limit,
                limit=settings.task_limit,
                folder=settings.lm_eval_path,
                on_done=advance,
            )
            for side in (target, baseline)
        )
        rows += harness_rows(ours, others, tokenizer.eos_token_ids)
    by_task: dict[str, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row)
    checks = [
        judge_task(task, found, margin=gates.max_task_loss, alone=isolated() if _runs_code(found) else None)
        for task, found in by_task.items()
    ]
    written = [row for row in rows if row["target_tokens"] is not None]
    return checks, [
        {
            "stage": f"task {row['task']}",
            "id": row["id"],
            "target": row["target_degenerate"],
            "baseline": row["baseline_degenerate"],
            "tokens": row["target_tokens"],
        }
        for row in written
    ]


def check_suite(
    plan: Plan,
    target: Side,
    baseline: Side,
    prompts: Sequence[Prompt],
    answers: Sequence[Answer],
    earlier: Sequence[Check],
    *,
    tokenizer: Tokenizer,
    settings: Settings,
    gates: Gates,
    stage: Stage,
) -> list[Check]:
    """Tasks, retrieval and degenerate text, as planned. ``answers``: what the target wrote to ``prompts``;
    ``earlier``: the checks so far, whose records hold the other answers."""
    stops = tokenizer.eos_token_ids
    ids = [answer.request_id for answer in answers]
    mine = [answer.tokens for answer in answers]
    rows: list[Row] = []
    if target.scorer is not baseline.scorer:
        advance = counter(stage("degenerate_text: the baseline's answers to the same prompts"), len(prompts))
        requests = requests_for(prompts, settings.max_new_tokens, stops)
        others = run(baseline.writer, requests, draft_limit=baseline.draft_limit, on_answer=advance).answers
        rows += degenerate_rows("greedy", ids, mine, [answer.tokens for answer in others], stops)
    for records in (check.records for check in earlier if check.records is not None):
        if records.judge == "lossless" and target.scorer is baseline.scorer and not rows:
            theirs = [answer.tokens for answer in answers_from(records.tables["reference"])]
            rows += degenerate_rows("greedy", ids, mine, theirs, stops)
        if records.judge == "approximate" and not any(row["stage"] == "sampled" for row in rows):
            ours, strict = (answers_from(records.tables[name]) for name in ("approximate", "strict"))
            written = [[answer.tokens for answer in side] for side in (ours, strict)]
            names = [answer.request_id for answer in ours]
            rows += degenerate_rows("sampled", names, written[0], written[1], stops)
    checks, answered = check_tasks(plan, target, baseline, tokenizer, settings, gates, stage)
    if plan.retrieval:
        checks.append(check_retrieval(target.scorer, baseline.scorer, tokenizer, settings, gates, stage))
    rows += answered
    if rows:
        checks.append(judge_degenerate(rows, margin=gates.max_degenerate_rise))
    return checks


def _runs_code(rows: Sequence[Row]) -> bool:
    return any(row["kind"] == "code" for row in rows)


def item_row(item: Item, target: Scored, baseline: Scored) -> dict[str, Any]:
    """What both sides made of an item, as JSON values."""
    row: dict[str, Any] = {"task": item.task, "id": item.id, "kind": item.kind, "asked": question_of(item)}
    for name, side in (("target", target), ("baseline", baseline)):
        written = item.kind != "choice"
        row |= {
            name: side.value,
            f"{name}_error": side.error,
            f"{name}_why": side.why,
            f"{name}_output": side.output if written else None,
            f"{name}_logprobs": None if written else list(side.logprobs),
        }
    return row


def _row(item: Item, target: Scored, baseline: Scored, stops: frozenset[int]) -> Row:
    """With the tokens, which an engine tells, and whether they are text."""
    row = item_row(item, target, baseline)
    for name, side in (("target", target), ("baseline", baseline)):
        written = item.kind != "choice"
        row |= {
            f"{name}_tokens": list(side.tokens) if written else None,
            f"{name}_degenerate": degeneration(side.tokens, stops) if written else "",
        }
    return row


def harness_rows(
    target: Sequence[HarnessItem], baseline: Sequence[HarnessItem], stops: frozenset[int]
) -> list[Row]:
    """Rows like those of a file's tasks, paired by task and document; what one side lacks scores NaN, which
    is an ERROR of its task."""
    other = {(item.task, item.id): item for item in baseline}
    rows: list[Row] = []
    for item in target:
        pair = other.get((item.task, item.id))
        row: dict[str, object] = {"task": item.task, "id": item.id, "kind": "lm-eval", "metric": item.metric}
        for name, side in (("target", item), ("baseline", pair)):
            fields = {} if side is None else asdict(side)
            tokens = list(fields["tokens"]) if fields.get("tokens") else None
            row |= {
                name: fields.get("value", float("nan")),
                f"{name}_why": "",
                f"{name}_output": fields.get("output") or None,
                f"{name}_tokens": tokens,
                f"{name}_logprobs": None,
                f"{name}_degenerate": degeneration(tokens, stops) if tokens else "",
            }
        rows.append(row)
    return rows


def judge_task(
    task: str,
    rows: Sequence[Row],
    *,
    margin: float | None,
    alone: bool | None = None,
    over: str = BASELINE,
    left_out: str = "",
) -> Check:
    """The verdict on one task's rows. ``margin``: gates.max_task_loss; ``alone``: whether code ran without a
    network, None if none ran; ``over``: the baseline's name; ``left_out``: items that were not asked, and
    why."""
    kinds = list(dict.fromkeys(str(row["kind"]) for row in rows))
    errors = [str(row.get("target_error") or row.get("baseline_error") or "") for row in rows]
    scored = [row for row, error in zip(rows, errors, strict=True) if not error]
    scores = [
        [float("nan") if row[side] is None else float(row[side]) for row in scored]
        for side in ("target", "baseline")
    ]
    lost = [row for row in scored if (row["baseline"] or 0) > (row["target"] or 0)]
    how = f"{', '.join(kinds)}; greedy answers, or log-likelihoods of choices"
    if "lm-eval" in kinds:
        how = f"lm-evaluation-harness, {', '.join(dict.fromkeys(str(row['metric']) for row in rows))} an item"
    warnings: tuple[str, ...] = ()
    if alone is False:
        warnings = (
            "code ran in a process with limits, but with this machine's network: it has no namespaces",
        )
    if left_out:
        warnings += (left_out,)
    records = Records(
        "task",
        {"task": task, "margin": margin, "alone": alone, "over": over, "left_out": left_out},
        {"items": rows},
    )
    if wrong := [
        str(row["id"])
        for row in scored
        for side in ("target", "baseline")
        if row[side] is not None and (again := graded_again(row, side)) is not None and again != row[side]
    ]:
        text = f"{task}: what {wrong[0]} answered does not get the score beside it ({len(wrong)} such scores)"
        return Check(f"task:{task}", Verdict.ERROR, text, required=True, how=how, records=records)
    return judge_pairs(
        f"task:{task}",
        task,
        *scores,
        margin=margin,
        how=how,
        over=over,
        unscored=[error for error in errors if error],
        evidence={"kinds": kinds, "code_without_network": alone},
        records=records,
        warnings=warnings,
        details=tuple(f"{row['id']}: lost; {row['target_why'] or 'another choice'}" for row in lost[:10]),
    )


def check_retrieval(
    target: Engine, baseline: Engine, tokenizer: Tokenizer, settings: Settings, gates: Gates, stage: Stage
) -> Check:
    """The check ``retrieval``, over prompts as long as the engine allows."""
    longest = min(target.max_seq_tokens, settings.retrieval_tokens or target.max_seq_tokens)
    items = needles(tokenizer, longest=longest, per_cell=settings.retrieval_copies)
    progress = stage("retrieval: numbers hidden in long prompts")
    rows = measure_retrieval(target, baseline, items, on_progress=progress)
    return judge_retrieval(rows, margin=gates.max_retrieval_loss)


def skipped_suite(gates: Gates, settings: Settings, reason: str) -> list[Check]:
    """A SKIPPED check for each that settings or gates ask for, where an engine cannot give it."""
    wanted = {
        "mean_kl": gates.max_mean_kl,
        "p99_kl": gates.max_p99_kl,
        "same_top_token": gates.min_same_top_token,
        "tasks": gates.max_task_loss,
        "retrieval": gates.max_retrieval_loss,
        "degenerate_text": gates.max_degenerate_rise,
    }
    asked = {"tasks": bool(settings.tasks or settings.lm_eval), "retrieval": settings.retrieval}
    return [
        Check(name, Verdict.SKIPPED, reason, required=bound is not None)
        for name, bound in wanted.items()
        if bound is not None or asked.get(name)
    ]

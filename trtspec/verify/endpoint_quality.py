"""The quality of two endpoints: tasks, numbers hidden in long prompts, text that is none, perplexity.

The same items go to both, so many at a time, and are judged item by item as those of two engines are
(:mod:`trtspec.verify.noninferiority`). Answers are greedy. A ``prompt`` is continued as it is
(``/v1/completions``, Triton), ``messages`` go to a chat server as they are, and to one that applies no
template as the text that ``--tokenizer`` renders, else their contents one below the other. Choices and
perplexity need log-probabilities of a given text; where a server tells none they are SKIPPED.

A request that fails is an item without a score; a server that has failed :data:`PATIENCE` times in a row is
not asked any more. What was scored stays, and the verdict is then no PASS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from trtspec.artifact import file_sha256
from trtspec.prompts import HELDOUT_FILE, Chat, load_texts, read_texts
from trtspec.recipe import Gates
from trtspec.text import Tokenizer
from trtspec.verify import quality
from trtspec.verify.arrivals import closed_loop, giving_up
from trtspec.verify.degenerate import degeneration, judge_degenerate, pieces
from trtspec.verify.endpoint import Endpoint, Reply, ask
from trtspec.verify.endpoint_harness import harness_at, known_tasks
from trtspec.verify.endpoint_verdict import SIDES, answers_of
from trtspec.verify.gates import Check, skipped
from trtspec.verify.http_stream import Refused, Silent
from trtspec.verify.prompt_scores import choose, prompt_scores, scored_texts, why_no_scores
from trtspec.verify.records import Row
from trtspec.verify.retrieval import Haystack, haystacks, judge_retrieval
from trtspec.verify.sandbox import isolated
from trtspec.verify.settings import Settings
from trtspec.verify.suite import Stage, harness_rows, item_row, judge_task, read_items
from trtspec.verify.tasks import Grader, Item, Scored, cut, task_files

OVER = "the baseline endpoint"
PATIENCE = 5
"""Requests in a row without an answer, after which a server is taken for dead."""
RETRIEVAL_TOKENS = 1500
"""Longest prompt of ``--retrieval`` unless ``--retrieval-tokens`` says: a server does not tell its limit."""
NUMBER_TOKENS = 12
LETTERS_A_TOKEN = 4
"""English text; where there is no tokenizer to count with."""
_TEXT_TOKENS = 128
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Plan:
    """What is asked, read and checked before any server is. ``texts``: for perplexity."""

    settings: Settings
    gates: Gates
    items: tuple[Item, ...]
    hay: tuple[Haystack, ...]
    texts: tuple[str, ...]
    source: str
    tokenizer: Tokenizer | None
    tokenizer_folder: Path | None

    def record(self) -> dict[str, object]:
        """What a report keeps of it, as JSON values."""
        settings = self.settings
        return {
            "heldout": str(settings.heldout or "builtin"),
            "heldout_sha256": file_sha256(settings.heldout or HELDOUT_FILE),
            "tasks": [str(path) for path in settings.tasks],
            "tasks_sha256": [file_sha256(path) for path in task_files(settings.tasks)],
            "lm_eval": list(settings.lm_eval),
            "judge": settings.judge,
            "tokenizer": None if self.tokenizer_folder is None else str(self.tokenizer_folder),
            "gates": self.gates.model_dump(mode="json"),
        }


def plan_quality(settings: Settings, gates: Gates, tokenizer_folder: Path | None) -> Plan:
    """Read everything that ``settings`` and ``gates`` ask for. Raises InputError with every bad line,
    MissingError without lm-evaluation-harness where it is asked for, or without the judge."""
    tokenizer = None if tokenizer_folder is None else Tokenizer.load(tokenizer_folder)
    if settings.lm_eval:
        known_tasks(settings.lm_eval, settings.lm_eval_path)
    items = read_items(settings, gates, tokenizer, None)
    hay: list[Haystack] = []
    if settings.retrieval or gates.max_retrieval_loss is not None:
        hay = haystacks(
            _counting(tokenizer),
            longest=settings.retrieval_tokens or RETRIEVAL_TOKENS,
            per_cell=settings.retrieval_copies,
        )
    file = settings.heldout or HELDOUT_FILE
    sizes = {"total": settings.quality_tokens, "each": _TEXT_TOKENS}
    if tokenizer is None:
        sizes = {name: size * LETTERS_A_TOKEN for name, size in sizes.items()}
        texts = read_texts(file, total_letters=sizes["total"], max_letters=sizes["each"])
    else:
        tokens = load_texts(file, tokenizer, total_tokens=sizes["total"], max_tokens=sizes["each"])
        texts = [tokenizer.decode(one) for one in tokens]
    source = "held-out texts that ship with trtspec" if settings.heldout is None else str(file)
    return Plan(settings, gates, items, tuple(hay), tuple(texts), source, tokenizer, tokenizer_folder)


def _counting(tokenizer: Tokenizer | None) -> Callable[[str], int]:
    if tokenizer is None:
        return lambda text: math.ceil(len(text) / LETTERS_A_TOKEN)
    return lambda text: len(tokenizer.encode(text))


@dataclass(frozen=True)
class _Side:
    """One endpoint and what it can do. ``no_scores``: why it tells no log-probabilities of a text."""

    endpoint: Endpoint
    continues: bool
    """Whether it continues a text, without a chat template."""
    no_scores: str

    @classmethod
    def of(cls, endpoint: Endpoint) -> _Side:
        no_scores = why_no_scores(endpoint)
        continues = endpoint.raw or not no_scores
        if not continues:
            reply = _ask(replace(endpoint, raw=True), "probe", "The cat sat on the", 1)
            continues = not reply.timed.error
        return cls(endpoint, continues, no_scores)


@dataclass(frozen=True)
class _Both:
    """Both sides, asked alike: what one cannot do is asked of neither."""

    url: _Side
    baseline: _Side
    plan: Plan
    concurrency: int
    stage: Stage

    @property
    def sides(self) -> dict[str, _Side]:
        return {"url": self.url, "baseline": self.baseline}

    @property
    def continues(self) -> bool:
        return self.url.continues and self.baseline.continues

    @property
    def no_scores(self) -> str:
        """Why texts cannot be scored on both; "" if they can."""
        found = {side: one.no_scores for side, one in self.sides.items() if one.no_scores}
        if len(found) == 2 and len(set(found.values())) == 1:
            return f"both: {self.url.no_scores}"
        return "; ".join(f"{side}: {why}" for side, why in found.items())

    @property
    def raw(self) -> bool:
        """Whether chats are sent as text."""
        return self.url.endpoint.raw or self.baseline.endpoint.raw


def check_endpoint_quality(
    plan: Plan, endpoints: Mapping[str, Endpoint], rows: Sequence[Row], *, concurrency: int, stage: Stage
) -> list[Check]:
    """The checks ``quality``, ``task:NAME``, ``retrieval`` and ``degenerate_text`` of ``endpoints`` (url and
    baseline). ``rows``: the replies so far, see :mod:`trtspec.verify.endpoint_verdict`."""
    both = _Both(_Side.of(endpoints["url"]), _Side.of(endpoints["baseline"]), plan, concurrency, stage)
    checks = [_perplexity(both)]
    written = greedy_rows(rows)
    asked, more = _tasks(both)
    checks += asked
    written += more
    if plan.settings.lm_eval:
        checks += _harness(both)
    if plan.hay:
        checks.append(_retrieval(both))
    if written:
        margin = plan.gates.max_degenerate_rise
        checks.append(judge_degenerate(written, margin=margin, over=OVER))
    return checks


# --------------------------------------------------------------------------- asking


def _ask(endpoint: Endpoint, name: str, text: str, max_tokens: int) -> Reply:
    chat = Chat(name, ({"role": "user", "content": text},))
    return ask(endpoint, chat, max_tokens=max_tokens, clock=_clock)


def _clock() -> float:
    return 0.0  # nothing here is a measurement of time


def _every(
    both: _Both, count: int, one: Callable[[str, int], _Answer], on_progress: Callable[[int, int], None]
) -> dict[str, list[_Answer | str]]:
    """``one(side, i)`` for both sides and each i, so many at a time; instead of an answer the reason why
    there is none. Sides take turns, so that what a server answered before it died has its pair."""

    def asker(side: str) -> Callable[[int, float | None], _Answer | str]:
        def send(number: int, due: float | None) -> _Answer | str:
            try:
                return one(side, number // 2)
            except (Silent, Refused) as error:
                return f"{side}: {error}"

        def unasked(number: int, due: float | None, why: str) -> _Answer | str:
            return f"{side}: not asked: {PATIENCE} requests in a row failed before ({why})"

        return giving_up(send, _dead, unasked, PATIENCE)

    ask_side = [asker(side) for side in SIDES]
    found = closed_loop(
        lambda number, due: ask_side[number % 2](number, due), 2 * count, both.concurrency, on_progress
    )
    return {side: found[start::2] for start, side in enumerate(SIDES)}


def _dead(found: object) -> str:
    """Why there was no answer, "" if there was, or if the request was refused for what it asks."""
    return found if isinstance(found, str) and not re.search(r": HTTP 4(00|04|13|22)\b", found) else ""


def _answer(endpoint: Endpoint, name: str, text: str, max_tokens: int) -> Reply:
    """A reply, or the exception for what is wrong with it."""
    return _sound(_ask(endpoint, name, text, max_tokens))


def _sound(reply: Reply) -> Reply:
    if reply.timed.error:
        raise Silent(reply.timed.error)
    return reply


# --------------------------------------------------------------------------- perplexity


def _perplexity(both: _Both) -> Check:
    plan, bound = both.plan, both.plan.gates.max_perplexity_ratio
    if both.no_scores:
        return skipped("quality", f"no perplexity: {both.no_scores}", bound is not None)
    found = _every(
        both,
        len(plan.texts),
        lambda side, number: prompt_scores(both.sides[side].endpoint, plan.texts[number]),
        both.stage("quality: perplexity of held-out texts"),
    )
    tokens, unscored = scored_texts(found["url"], found["baseline"])
    source = f"{plan.source}, as prompts (echo, logprobs)"
    return quality.judge_rows(tokens, bound=bound, source=source, over=OVER, unscored=unscored)


# --------------------------------------------------------------------------- tasks of files


def _tasks(both: _Both) -> tuple[list[Check], list[Row]]:
    """The checks of the files' tasks, and their answers as rows for ``degenerate_text``."""
    plan, margin = both.plan, both.plan.gates.max_task_loss
    if not plan.items:
        return [], []
    reasons = [_cannot(both, item) for item in plan.items]
    items = [item for item, reason in zip(plan.items, reasons, strict=True) if not reason]
    answered = {}
    stage = both.stage("tasks: answers that can be checked")
    found = _every(both, len(items), _one_item(both, items), stage)
    for side in SIDES:
        grader = Grader(plan.settings.judge)
        answered[side] = [_graded(grader, *pair) for pair in zip(items, found[side], strict=True)]
    rows: list[Row] = []
    written: list[Row] = []
    for item, (mine, text), (theirs, other) in zip(items, answered["url"], answered["baseline"], strict=True):
        faults: Row = {"target": "", "baseline": ""}
        if text is not None and other is not None:
            faults = _written(f"task {item.task}", item.id, text, other)
            written.append(faults)
        told = {f"{side}_degenerate": faults[side] for side in ("target", "baseline")}
        rows.append({**item_row(item, mine, theirs), **told})
    checks = []
    for task in dict.fromkeys(item.task for item in plan.items):
        why = [reason for item, reason in zip(plan.items, reasons, strict=True) if item.task == task]
        out = [reason for reason in why if reason]
        left_out = f"{len(out)} of {len(why)} items are not asked: {out[0]}" if out else ""
        if not both.continues and any(item.task == task and not item.messages for item in items):
            left_out += "; " if left_out else ""
            left_out += "a server of chats continues no text: prompts are asked as a user's messages"
        mine_only = [row for row in rows if row["task"] == task]
        if not mine_only:
            checks.append(skipped(f"task:{task}", left_out, margin is not None))
            continue
        alone = isolated() if any(row["kind"] == "code" for row in mine_only) else None
        checks.append(judge_task(task, mine_only, margin=margin, alone=alone, over=OVER, left_out=left_out))
    return checks, written


def _cannot(both: _Both, item: Item) -> str:
    """Why ``item`` cannot be asked of both; "" if it can."""
    if item.kind != "choice":
        return ""
    if both.no_scores:
        return f"a choice needs log-probabilities of its texts ({both.no_scores})"
    if item.messages and both.plan.tokenizer is None:
        return "a choice after a chat needs the chat template (--tokenizer DIR)"
    return ""


def _one_item(both: _Both, items: Sequence[Item]) -> Callable[[str, int], Reply | Scored]:
    def one(side: str, number: int) -> Reply | Scored:
        item, end = items[number], both.sides[side].endpoint
        if item.kind == "choice":
            return choose(item, lambda prompt: prompt_scores(end, prompt))
        if item.messages and not both.raw:
            chat = Chat(item.id, tuple(dict(message) for message in item.messages))
            return _sound(ask(end, chat, max_tokens=item.max_new_tokens, clock=_clock))
        if not item.messages and not both.continues:
            # A server that only chats: the text is the user's message, on both sides alike.
            return _answer(end, item.id, item.prompt, item.max_new_tokens)
        text = as_sent(item.prompt, both.plan.tokenizer) if item.messages else item.prompt
        return _answer(replace(end, raw=True), item.id, text, item.max_new_tokens)

    return one


def as_sent(rendered: str, tokenizer: Tokenizer | None) -> str:
    """A rendered chat without the beginning-of-text token that the server's tokenizer puts there itself."""
    if tokenizer is None:
        return rendered
    bare = tokenizer.encode("")
    return rendered.removeprefix(tokenizer.decode(bare, skip_special_tokens=False)) if bare else rendered


def _graded(grader: Grader, item: Item, found: Reply | Scored | str) -> tuple[Scored, Reply | None]:
    if isinstance(found, str):
        return Scored(math.nan, error=found), None
    if isinstance(found, Scored):
        return found, None
    return grader(item, cut(found.text, item.stop), found.token_ids or ()), found


# --------------------------------------------------------------------------- tasks of the harness


def _harness(both: _Both) -> list[Check]:
    plan, margin = both.plan, both.plan.gates.max_task_loss
    checks: list[Check] = []
    for task in plan.settings.lm_eval:
        found = {}
        for side, one in both.sides.items():
            both.stage(f"lm-evaluation-harness: {task}: {side}")
            found[side] = harness_at(
                one.endpoint,
                task,
                continues=both.continues,
                no_scores=both.no_scores,
                tokenizer=plan.tokenizer,
                limit=plan.settings.task_limit,
                folder=plan.settings.lm_eval_path,
                concurrency=both.concurrency,
            )
        mine, theirs = found["url"], found["baseline"]
        if mine.skip or theirs.skip:
            checks.append(skipped(f"task:{task}", mine.skip or theirs.skip, margin is not None))
            continue
        rows: dict[str, list[Row]] = {}
        failed = next((f"{side}: {one.error}" for side, one in found.items() if one.error), "")
        there = {(item.task, item.id) for item in theirs.items}
        for row in harness_rows(mine.items, theirs.items, frozenset()):
            error = "" if (row["task"], row["id"]) in there else failed
            rows.setdefault(row["task"], []).append({**row, "baseline_error": error})
        if not rows:
            empty = {"task": task, "id": "all", "kind": "lm-eval", "metric": "", "target_error": failed}
            rows[task] = [{**empty, "target": math.nan, "baseline": math.nan, "target_why": ""}]
        checks += [judge_task(name, some, margin=margin, over=OVER) for name, some in rows.items()]
    return checks


# --------------------------------------------------------------------------- retrieval, degenerate text


def _retrieval(both: _Both) -> Check:
    plan = both.plan

    def one(side: str, number: int) -> Reply:
        end = replace(both.sides[side].endpoint, raw=both.continues)
        hay = plan.hay[number]
        text = hay.text if both.continues else hay.question
        return _answer(end, hay.id, text, NUMBER_TOKENS if both.continues else 4 * NUMBER_TOKENS)

    found = _every(both, len(plan.hay), one, both.stage("retrieval: numbers hidden in long prompts"))
    rows: list[Row] = []
    for hay, mine, theirs in zip(plan.hay, found["url"], found["baseline"], strict=True):
        row: dict[str, object] = {
            "id": hay.id,
            "length": hay.length,
            "depth": hay.depth,
            "number": hay.number,
        }
        for name, reply in (("target", mine), ("baseline", theirs)):
            output = "" if isinstance(reply, str) else reply.text
            number = re.search(r"\d+(?:,\d{3})*", output)
            row |= {
                name: number is not None and number[0].replace(",", "") == hay.number,
                f"{name}_output": output,
                f"{name}_error": reply if isinstance(reply, str) else "",
            }
        rows.append(row)
    return judge_retrieval(rows, margin=plan.gates.max_retrieval_loss, over=OVER)


def greedy_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of ``degenerate_text`` for the greedy answers that both sides gave to the same prompts."""
    mine, theirs = (answers_of(rows, side, "alone") for side in SIDES)
    found = []
    for key, row in mine.items():
        other = theirs.get(key)
        if other is None or row["error"] or other["error"]:
            continue
        found.append(_pair("greedy", key, *((one["text"], one["token_ids"]) for one in (row, other))))
    return found


def _written(stage: str, name: str, mine: Reply, theirs: Reply) -> Row:
    return _pair(stage, name, *((one.text, one.token_ids) for one in (mine, theirs)))


_Text = tuple[str, Sequence[int] | None]


def _pair(stage: str, name: str, mine: _Text, theirs: _Text) -> Row:
    by_ids = mine[1] is not None and theirs[1] is not None
    tokens: list[Sequence[object]] = []
    for text, ids in (mine, theirs):
        # A server may count the end-of-text token, which is no text.
        tokens.append([] if not text.strip() else list(ids or ()) if by_ids else pieces(text))
    faults = [degeneration(one) for one in tokens]
    return {
        "stage": stage,
        "id": name,
        "target": faults[0],
        "baseline": faults[1],
        "tokens": list(tokens[0]),
    }

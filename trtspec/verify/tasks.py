"""Tasks with an answer that can be checked, from a JSONL file: no hub, no download, the user's own.

One JSON object a line:

========== =================================================================================================
field      meaning
========== =================================================================================================
kind       ``exact``, ``regex``, ``choice``, ``code`` or ``judge``; says how an answer is scored
prompt     text that the model continues as it is (``choice``: may be empty)
messages   or a chat (role, content) that it answers; needs a model with a chat template
answer     exact: the text, or a list of allowed ones; regex: a Python pattern that must be found; choice: the
           number of the right one, from 0; code: Python that is put behind the model's code and must run to
           its end (assertions); judge: a reference for the judge, may be left out
choices    choice only: two or more continuations, scored by their log-likelihood
normalize  choice only: ``none`` or ``bytes`` (log-likelihood per byte, where lengths differ)
extract    exact only: a pattern applied to the output first; its last match counts, its first group if any
ignore_case exact and regex: true or false
prefix     code only: put in front of the output instead of ``prompt`` (with messages: instead of nothing)
stop       list of texts at which the output is cut
max_new_tokens  longest output in tokens, default 64
task       name of the task it belongs to, one line, each judged by itself; default: the name of the file
id         default: its line number
========== =================================================================================================

Answers are greedy. ``exact`` compares without white space around. Ties of a choice count as wrong, so that a
model which cannot tell gains nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trtspec.engine import Engine, Request
from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.prompts import DATA_FOLDER, read_lines, repeats
from trtspec.ruler import run, shared_start
from trtspec.text import Tokenizer
from trtspec.user_files import is_one_line, shown_path
from trtspec.verify.judge import run_judge
from trtspec.verify.sandbox import Limits, run_code

Kind = Literal["exact", "regex", "choice", "code", "judge"]
TASKS_FILE = DATA_FOLDER / "tasks.jsonl"
BUILTIN = "builtin"
"""What --tasks is told instead of a file for :data:`TASKS_FILE`."""
JUDGE_PATIENCE = 5
"""After so many failures in a row a judge is not asked any more."""
CODE_LIMITS = Limits()
_FIELDS = {
    *("id", "task", "kind", "prompt", "messages", "answer", "choices", "normalize", "extract", "ignore_case"),
    *("prefix", "stop", "max_new_tokens"),
}
_LONGEST_NAME = 120
"""Of a task, which names a check."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_OnDone = Callable[[], None]


@dataclass(frozen=True)
class Item:
    """One question. ``tokens``: the prompt; ``choices``: the prompt with each choice, and where the scored
    tokens begin."""

    id: str
    task: str
    kind: Kind
    prompt: str
    tokens: tuple[int, ...]
    answers: tuple[str, ...] = ()
    right: int = -1
    choices: tuple[tuple[int, ...], ...] = ()
    first: int = 0
    weights: tuple[int, ...] = ()
    """Divisor of each choice's log-likelihood."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The chat that ``prompt`` renders, if it is one."""
    texts: tuple[str, ...] = ()
    """The choices as text."""
    extract: str = ""
    ignore_case: bool = False
    prefix: str = ""
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 64


@dataclass(frozen=True)
class Scored:
    """What one side made of one item. ``value`` in [0, 1], NaN with ``error``: why there is no score (a judge
    or a server that failed), which says nothing about the answer."""

    value: float
    output: str = ""
    tokens: tuple[int, ...] = ()
    why: str = ""
    logprobs: tuple[float, ...] = ()
    error: str = ""


class Grader:
    """Scores outputs of items. A judge that fails on one makes that item's error and no more; one that fails
    :data:`JUDGE_PATIENCE` times in a row is not asked again."""

    def __init__(self, judge: str | None = None, limits: Limits = CODE_LIMITS) -> None:
        self._judge, self._limits = judge, limits
        self._failures = 0
        self._last = ""

    def __call__(self, item: Item, output: str, tokens: tuple[int, ...] = ()) -> Scored:
        if item.kind == "judge" and self._failures >= JUDGE_PATIENCE:
            error = f"not judged: the judge failed {self._failures} times in a row ({self._last})"
            return Scored(math.nan, output, tokens, error=error)
        try:
            value, why = grade(item, output, judge=self._judge, limits=self._limits)
        except TrtspecError as failure:
            if item.kind != "judge":
                raise
            self._failures += 1
            self._last = " ".join(str(failure).split())[:200]
            return Scored(math.nan, output, tokens, error=self._last)
        if item.kind == "judge":
            self._failures = 0
        return Scored(value, output, tokens, why)


def try_judge(command: str, items: Sequence[Item]) -> None:
    """Ask the judge once, about the first item that it is to score, before anything is measured.

    Raises what :func:`judged` does: a judge that is broken on this one is taken for broken on all."""
    first = next((item for item in items if item.kind == "judge"), None)
    if first is not None:
        judged(command, first, first.answers[0] if first.answers else "an answer, to try the judge")


def task_files(paths: Sequence[Path]) -> list[Path]:
    """``paths`` without doubles, the file that ships with trtspec for :data:`BUILTIN`."""
    return list(dict.fromkeys(TASKS_FILE if str(path) == BUILTIN else path for path in paths))


def load_tasks(
    path: Path,
    tokenizer: Tokenizer | None,
    *,
    max_seq_tokens: int | None = None,
    limit: int | None = None,
    judge: bool = False,
) -> list[Item]:
    """The items of a file, all of them or ``limit`` of each task, evenly spread.

    ``tokenizer`` None: for servers that take text; items then have no tokens. ``judge``: whether there is a
    judge command. Raises InputError with every bad line.
    """
    items: list[Item] = []
    problems: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    lines: dict[object, int] = {}
    for number, value in read_lines(path, problems):
        try:
            item = _item(value, number, path.stem, tokenizer, judge)
        except ValueError as error:
            problems.append(Problem(str(error), file=shown_path(path), line=number))
            continue
        longest = max((len(item.tokens) + item.max_new_tokens, *map(len, item.choices)))
        if max_seq_tokens is not None and longest > max_seq_tokens:
            message = f"needs {longest} tokens; limits.max_seq_tokens is {max_seq_tokens}"
            problems.append(Problem(message, file=shown_path(path), line=number))
        if (item.task, item.id) in seen:
            problems.append(Problem(f"id {item.id!r} occurs twice", file=shown_path(path), line=number))
        seen.add((item.task, item.id))
        asked = (item.task, item.kind, item.prompt, item.texts, item.answers, item.right)
        if (first := lines.setdefault(asked, number)) != number:
            problems.append(Problem(repeats(first), file=shown_path(path), line=number))
        items.append(item)
    if not items and not problems:
        problems.append(Problem("holds no items", file=shown_path(path)))
    if problems:
        raise InputError(problems)
    if limit is None:
        return items
    chosen = []
    for task in dict.fromkeys(item.task for item in items):
        mine = [item for item in items if item.task == task]
        count = min(limit, len(mine))
        chosen += [mine[i * len(mine) // count] for i in range(count)]
    return chosen


def _item(value: Mapping[str, Any], number: int, stem: str, tokenizer: Tokenizer | None, judge: bool) -> Item:
    """The item of one line; ValueError with everything that is wrong with it."""
    wrong = [f"unknown field {key!r}" for key in value if key not in _FIELDS]
    kind: Kind = value.get("kind", "")
    if kind not in get_args(Kind):
        raise ValueError(
            "; ".join([*wrong, f"kind is {value.get('kind')!r}; allowed: {', '.join(get_args(Kind))}"])
        )
    prompt = _prompt(value, tokenizer, kind == "choice", wrong)
    stop, ignore_case = value.get("stop", []), value.get("ignore_case", False)
    if not (isinstance(stop, list) and all(isinstance(one, str) and one for one in stop)):
        wrong.append("stop must be a list of texts, none empty")
    if not isinstance(ignore_case, bool):
        wrong.append("ignore_case must be true or false")
    max_new = value.get("max_new_tokens", 64)
    if type(max_new) is not int or not 1 <= max_new <= 100_000:
        wrong.append("max_new_tokens must be a whole number from 1")
    for key in ("prefix", "extract", "task"):
        if not isinstance(value.get(key, ""), str):
            wrong.append(f"{key} must be text")
    name = value.get("task") or stem
    if isinstance(name, str) and not (len(name) <= _LONGEST_NAME and is_one_line(name)):
        wrong.append(
            f"task must be one line of at most {_LONGEST_NAME} characters (by default the file's name)"
        )
    if isinstance(extract := value.get("extract"), str):
        _check_pattern("extract", extract, wrong)
    if kind == "judge" and not judge:
        wrong.append("kind judge needs a judge command (--judge)")
    answers, right = _answers(value, kind, wrong)
    choices = _choices(value, wrong) if kind == "choice" else []
    if kind == "choice" and not 0 <= right < max(len(choices), 1):
        wrong.append(f"answer must be the number of a choice, 0 to {len(choices) - 1}")
    if value.get("normalize", "none") not in ("none", "bytes"):
        wrong.append("normalize must be none or bytes")
    if wrong:
        raise ValueError("; ".join(wrong))
    is_chat = "messages" in value
    tokens: list[int] = []
    spelled: tuple[tuple[int, ...], ...] = ()
    first = 0
    if tokenizer is not None:
        if prompt:
            tokens = tokenizer.encode_chat(value["messages"]) if is_chat else tokenizer.encode(prompt)
        # Something must come before the first scored token.
        tokens = tokens or tokenizer.encode("") or [min(tokenizer.eos_token_ids, default=0)]
        spelled, first = _spell(tokens, prompt, choices, tokenizer, is_chat)
    by_bytes = value.get("normalize") == "bytes"
    return Item(
        id=str(value.get("id", f"line-{number}")),
        task=name,
        kind=kind,
        prompt=prompt,
        tokens=tuple(tokens),
        answers=answers,
        right=right,
        choices=spelled,
        first=first,
        weights=tuple(len(one.encode()) if by_bytes else 1 for one in choices),
        extract=value.get("extract", ""),
        ignore_case=ignore_case,
        prefix=value.get("prefix", "" if is_chat else prompt),
        stop=tuple(stop),
        max_new_tokens=0 if kind == "choice" else max_new,
        messages=tuple(value["messages"]) if is_chat else (),
        texts=tuple(choices),
    )


def _prompt(
    value: Mapping[str, Any], tokenizer: Tokenizer | None, may_be_empty: bool, wrong: list[str]
) -> str:
    messages, prompt = value.get("messages"), value.get("prompt")
    if (messages is None) == (prompt is None) and not (may_be_empty and messages is None):
        wrong.append("needs either prompt or messages")
        return ""
    if messages is None:
        if not isinstance(prompt, str | None) or (not prompt and not may_be_empty):
            wrong.append("prompt must be text, not empty")
            return ""
        return prompt or ""
    good = isinstance(messages, list) and messages
    if not good or not all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    ):
        wrong.append("messages must be a list of objects with role and content")
        return ""
    if tokenizer is None:
        return "\n\n".join(str(one["content"]) for one in messages)
    if not tokenizer.has_chat_template:
        wrong.append("messages need a model with a chat template; use prompt")
        return ""
    return tokenizer.render_chat(messages)


def _answers(value: Mapping[str, Any], kind: Kind, wrong: list[str]) -> tuple[tuple[str, ...], int]:
    answer = value.get("answer")
    if kind == "choice":
        if type(answer) is not int:
            wrong.append("answer must be the number of the right choice")
            return (), -1
        return (), answer
    if kind == "judge" and answer is None:
        return (), -1
    several = answer if isinstance(answer, list) and kind == "exact" else [answer]
    if not several or not all(isinstance(one, str) and one.strip() for one in several):
        wrong.append("answer must be text, not empty")
        return (), -1
    if kind == "regex":
        _check_pattern("answer", str(several[0]), wrong)
    return tuple(map(str, several)), -1


def _choices(value: Mapping[str, Any], wrong: list[str]) -> list[str]:
    choices = value.get("choices")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(one, str) and one for one in choices)
        or len(set(choices)) < len(choices)
    ):
        wrong.append("choices must be a list of two or more different texts, none empty")
        return []
    return choices


def _check_pattern(field: str, pattern: str, wrong: list[str]) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        wrong.append(f"{field} is no pattern: {error}")


def _spell(
    tokens: Sequence[int], prompt: str, choices: Sequence[str], tokenizer: Tokenizer, is_chat: bool
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Each choice behind the prompt, and the first token that is scored.

    Prompt and choice are encoded together, as they would be written. Where that merges the end of the prompt
    with the start of a choice, scoring begins before the merge, for all choices alike.
    """
    if not choices:
        return (), 0
    if is_chat:  # encode_chat puts no special tokens around, encode would
        tails = [tokenizer.encode(one) for one in choices]
        empty = len(tokenizer.encode(""))
        spelled = [(*tokens, *tail[empty:]) for tail in tails]
    elif prompt:
        spelled = [tuple(tokenizer.encode(prompt + one)) for one in choices]
    else:
        bare = tokenizer.encode("")
        spelled = [tuple(() if bare else tokens) + tuple(tokenizer.encode(one)) for one in choices]
    return tuple(spelled), max(shared_start((tokens, *spelled)), 1)


def score_items(
    items: Sequence[Item],
    writer: Engine,
    scorer: Engine,
    tokenizer: Tokenizer,
    *,
    draft_limit: int | None,
    judge: str | None = None,
    limits: Limits = CODE_LIMITS,
    on_done: _OnDone = lambda: None,
) -> list[Scored]:
    """What an engine makes of ``items``, in their order. ``writer`` generates, ``scorer`` gives
    log-likelihoods: the same weights, with drafts and without.
    """
    graded = Grader(judge, limits)
    found: dict[int, Scored] = {}
    asked = [number for number, item in enumerate(items) if item.kind != "choice"]
    requests = [
        Request(str(n), items[n].tokens, items[n].max_new_tokens, stop_tokens=tokenizer.eos_token_ids)
        for n in asked
    ]
    for number, item in enumerate(items):
        if item.kind == "choice":
            found[number] = score_choice(item, scorer)
            on_done()
    if requests:
        answers = run(writer, requests, draft_limit=draft_limit, on_answer=on_done).answers
        for number, answer in zip(asked, answers, strict=True):
            output = tokenizer.decode(
                [token for token in answer.tokens if token not in tokenizer.eos_token_ids]
            )
            output = cut(output, items[number].stop)
            found[number] = graded(items[number], output, answer.tokens)
    return [found[number] for number in range(len(items))]


def score_choice(item: Item, scorer: Engine) -> Scored:
    """1 if the right choice is strictly the most likely one."""
    logprobs = tuple(
        math.fsum(scorer.score(one).logprobs[item.first - 1 :]) / weight
        for one, weight in zip(item.choices, item.weights, strict=True)
    )
    return chosen(logprobs, item.right)


def chosen(logprobs: tuple[float, ...], right: int) -> Scored:
    """1 if choice ``right`` is strictly the most likely one."""
    if not all(map(math.isfinite, logprobs)):
        return Scored(math.nan, logprobs=logprobs, why="a log-likelihood is not a finite number")
    others = [value for number, value in enumerate(logprobs) if number != right]
    return Scored(float(logprobs[right] > max(others)), logprobs=logprobs)


def cut(output: str, stops: Sequence[str]) -> str:
    """``output`` up to the first of ``stops``."""
    return output[: min((at for stop in stops if (at := output.find(stop)) >= 0), default=len(output))]


def grade(
    item: Item, output: str, *, judge: str | None = None, limits: Limits = CODE_LIMITS
) -> tuple[float, str]:
    """(score in [0, 1], why it is not 1) of one output. Raises what :func:`judged` does."""
    match item.kind:
        case "exact":
            return _exact(item, output)
        case "regex":
            flags = re.MULTILINE | (re.IGNORECASE if item.ignore_case else 0)
            hit = re.search(item.answers[0], output, flags) is not None
            return float(hit), "" if hit else "the pattern is not found"
        case "code":
            outcome = run_code(program_of(item, output), limits)
            return float(outcome.passed), outcome.why
        case "judge":
            if judge is None:
                raise InputError(Problem(f"item {item.id!r} needs a judge command (--judge)"))
            return judged(judge, item, output), ""
        case "choice":
            raise ValueError("a choice has no output")


def _exact(item: Item, output: str) -> tuple[float, str]:
    found = output
    if item.extract:
        matches = list(re.finditer(item.extract, output, re.MULTILINE))
        if not matches:
            return 0.0, "nothing to extract"
        last = matches[-1]
        found = last.group(1) or "" if last.re.groups else last.group()
    same = str.casefold if item.ignore_case else str
    hit = same(found.strip()) in [same(one.strip()) for one in item.answers]
    return float(hit), "" if hit else f"found {found.strip()[:60]!r}"


def question_of(item: Item) -> dict[str, Any] | None:
    """What an output is graded by, as JSON values; None where that takes a program or a judge."""
    if item.kind == "choice":
        return {"right": item.right}
    if item.kind in ("exact", "regex"):
        return {"answers": list(item.answers), "extract": item.extract, "ignore_case": item.ignore_case}
    return None


def graded_again(row: Mapping[str, Any], side: str) -> float | None:
    """The score that the output (or the log-likelihoods) in a row deserves; None where it does not tell.
    Raises ValueError for a row that makes no sense."""
    asked = row.get("asked")
    if asked is None:
        return None
    if row["kind"] == "choice":
        return chosen(tuple(row[f"{side}_logprobs"]), asked["right"]).value
    if row["kind"] not in ("exact", "regex"):
        return None  # nothing that stands in a file of somebody's is run
    item = Item(
        str(row["id"]),
        str(row["task"]),
        row["kind"],
        "",
        (),
        tuple(asked["answers"]),
        extract=asked["extract"],
        ignore_case=asked["ignore_case"],
    )
    try:
        return grade(item, row[f"{side}_output"])[0]
    except re.error as error:
        raise ValueError(f"no pattern: {error}") from None


def program_of(item: Item, output: str) -> str:
    """The program that a code item runs: what a fence holds, if the output has one, else the output behind
    its prefix; then the item's own assertions."""
    fenced = _FENCE.search(output)
    code = fenced.group(1) if fenced else item.prefix + output
    return f"{code}\n\n{item.answers[0]}\n"


def judged(command: str, item: Item, output: str) -> float:
    """The judge's score of ``output``. Raises what :func:`run_judge` does."""
    question = {
        "id": item.id,
        "task": item.task,
        "prompt": item.prompt,
        "answer": item.answers[0] if item.answers else None,
        "output": output,
    }
    return run_judge(command, question)

"""Speed gained by drafting, load by load, on one engine in this process: {short, long} x {chat, code,
summarization, translation, copy} x batch {1, N} x {English, Chinese}.

Drafting pays where text is predictable and the batch leaves arithmetic free, so one number for one load says
little (``docs/math.md``). A *long* prompt is the same prompt after background material in its language: our
held-out texts, as many as fit the length. Answers have the lengths that they have without speculation, so
that both sides do the same work. Both sides run next to each other, in an order that turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtspec.engine import Engine
from trtspec.errors import InputError, Problem
from trtspec.prompts import Chat, Prompt
from trtspec.recipe import Gates, Recipe
from trtspec.ruler import acceptance_length, max_draft, run, stage_of
from trtspec.stats import CONFIDENCE, least_of_pairs, times_faster
from trtspec.text import Tokenizer
from trtspec.verify.gates import Check, Verdict, skipped
from trtspec.verify.load import CLOCK_SLACK, Contender
from trtspec.verify.load_prompts import background_texts, chats_for_loads, prompt_tokens
from trtspec.verify.lossless import requests_for
from trtspec.verify.records import Records, Row, answers_from, rows_of
from trtspec.verify.sanity import forced_acceptance, impossible_speedup, unequal_work
from trtspec.verify.settings import QUICK_LOAD, LoadSettings, Settings

LENGTHS = ("short", "long")
LANGUAGES = {"en": "English", "zh": "Chinese"}
_MOST_LONG = 1024
_FEWEST_PROMPTS = 6
"""Of a kind of load that can fail a gate."""


@dataclass(frozen=True)
class Cell:
    """Prompts of one length, task and language."""

    length: str
    task: str
    language: str
    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        return f"{self.length} {self.task} {self.language}".strip()


@dataclass(frozen=True)
class LoadPlan:
    """``missing``: cell -> why it cannot be measured."""

    cells: tuple[Cell, ...]
    missing: Mapping[str, str]
    batch: int
    longest: int


def load_settings(settings: Settings, gates: Gates) -> LoadSettings | None:
    """How the matrix is to be measured; None where neither the user nor a gate asks for it."""
    if settings.load is not None or gates.min_speedup_by_load is None:
        return settings.load
    return replace(QUICK_LOAD if settings.quick else LoadSettings(), file=settings.prompts)


def plan_loads(recipe: Recipe, settings: LoadSettings, tokenizer: Tokenizer) -> LoadPlan:
    """The cells, with their prompts. InputError for a file without prompts, or limits that leave none."""
    limits = recipe.limits
    room = min(limits.max_input_tokens, limits.max_seq_tokens - settings.tokens)
    long_tokens = min(room, settings.long_tokens or min(limits.max_seq_tokens // 2, _MOST_LONG))
    batch = settings.batch or min(limits.max_batch_size, 8)
    if batch > limits.max_batch_size:
        message = f"{batch} exceeds limits.max_batch_size {limits.max_batch_size}; lower it"
        raise InputError(Problem(message, key="load batch"))
    chats = chats_for_loads(settings.file)
    cells, missing = [], {}
    for task in dict.fromkeys(chat.task for chat in chats):
        for language in dict.fromkeys(chat.language for chat in chats if chat.task == task):
            of = [chat for chat in chats if (chat.task, chat.language) == (task, language)]
            for length in LENGTHS:
                prompts = []
                background = background_texts(language) if length == "long" else []
                for chat in of:
                    made = _prompt(chat, tokenizer, background, long_tokens if background else 0)
                    if 0 < len(made.tokens) <= room and (
                        length == "short" or len(made.tokens) >= long_tokens / 2
                    ):
                        prompts.append(made)
                    if len(prompts) == max(settings.prompts, batch):
                        break
                cell = Cell(length, task, language, tuple(prompts))
                if prompts:
                    cells.append(cell)
                else:
                    missing[cell.name] = (
                        f"no prompt fits {room} tokens (limits.max_input_tokens, max_seq_tokens)"
                    )
    if not cells:
        raise InputError(
            Problem(f"no prompt has at most {room} tokens; raise limits.max_input_tokens", key="load")
        )
    longest = max(len(prompt.tokens) for cell in cells for prompt in cell.prompts)
    return LoadPlan(tuple(cells), missing, batch, longest)


def _prompt(chat: Chat, tokenizer: Tokenizer, background: Sequence[str], wanted: int) -> Prompt:
    """The chat's prompt, behind as much background as ``wanted`` tokens hold."""
    tokens = prompt_tokens(chat, tokenizer, background=background, wanted=wanted)
    return Prompt(f"long-{chat.id}" if background else chat.id, tuple(tokens), chat.task, chat.language)


def measure_loads(
    contenders: tuple[Contender, Contender],
    plan: LoadPlan,
    settings: LoadSettings,
    stop_tokens: frozenset[int],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """A row for every timed run: one prompt at a time, then ``plan.batch`` together. ``contenders``: the
    recipe, and what it is compared with."""
    over = contenders[1]
    rows: list[dict[str, Any]] = []
    done, total = 0, len(plan.cells) * (1 + settings.rounds * (settings.prompts + 1))
    for cell in plan.cells:
        together = [
            Prompt(f"{prompt.id}#{i}", prompt.tokens, prompt.task, prompt.language)
            for i, prompt in enumerate((cell.prompts * plan.batch)[: max(plan.batch, settings.prompts)])
        ]
        # How long the answers are, and the warm-up: each side answers every prompt once, so that a prefix
        # cache holds the same on both.
        first = run(
            over.engine, requests_for(together, settings.tokens, stop_tokens), draft_limit=over.draft_limit
        )
        lengths = [len(answer.tokens) for answer in first.answers]
        mine = contenders[0]
        run(mine.engine, requests_for(together, lengths, frozenset()), draft_limit=mine.draft_limit)
        done += 1
        on_progress(done, total)
        alone = [[(prompt, length)] for prompt, length in zip(together, lengths, strict=False)]
        work = [(1, place, group) for place, group in enumerate(alone[: settings.prompts])]
        if plan.batch > 1:
            group = list(zip(together, lengths, strict=True))[: plan.batch]
            work.append((plan.batch, 0, group))
        for number in range(settings.rounds):
            for turn, (batch, place, group) in enumerate(work):
                prompts, sizes = [one for one, _ in group], [size for _, size in group]
                requests = requests_for(prompts, sizes, frozenset())
                for one in contenders if (number + turn) % 2 else reversed(contenders):
                    result = run(one.engine, requests, draft_limit=one.draft_limit)
                    rows.append(
                        {
                            "length": cell.length,
                            "task": cell.task,
                            "language": cell.language,
                            "batch": batch,
                            "prompt": place,
                            "round": number,
                            "contender": one.name,
                            "seconds": result.seconds,
                            "counted": result.tokens,
                            "contradictions": list(result.contradictions),
                            "prompt_tokens": [len(prompt.tokens) for prompt in prompts],
                            "answers": rows_of(result.answers),
                        }
                    )
                done += 1
                on_progress(done, total)
    return rows


def check_loads(
    engines: tuple[Engine, Engine, Engine],
    plan: LoadPlan,
    settings: LoadSettings,
    recipe: Recipe,
    stop_tokens: frozenset[int],
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    other: Contender | None = None,
) -> Check:
    """Measure and judge. ``engines``: the recipe's, the same weights without speculation, the 16-bit
    baseline; the same object where there is no difference. ``other``: what to compare with instead."""
    mine, plain, baseline = engines
    over = other
    if over is None:
        over = Contender("baseline", baseline, 0) if mine is plain else Contender("no_speculation", plain, 0)
    if over.engine is mine:
        reason = "the recipe neither speculates nor quantizes: it is the baseline"
        return skipped("speedup_by_load", reason, recipe.gates.min_speedup_by_load is not None)
    contenders = Contender("recipe", mine, max_draft(recipe.speculation)), over
    progress = stage_of(on_progress, "speedup_by_load: each length, task, language and batch")
    rows = measure_loads(contenders, plan, settings, stop_tokens, progress)
    return judge_loads(
        rows,
        name=contenders[0].name,
        over=contenders[1].name,
        missing=plan.missing,
        max_seq_tokens=recipe.limits.max_seq_tokens,
        longest=plan.longest,
        bound=recipe.gates.min_speedup_by_load if other is None else None,
    )


def judge_loads(
    rows: Sequence[Row],
    *,
    name: str,
    over: str,
    missing: Mapping[str, str],
    max_seq_tokens: int,
    longest: int,
    bound: float | None = None,
) -> Check:
    """One check with the speedup of every cell, from the rows of :func:`measure_loads`.

    Interval of a cell: paired bootstrap over three prompts or more and rounds; of a batch, over rounds. A
    cell whose numbers contradict themselves is refused; all of them together are the check's own number.

    ``bound``: the least speedup of every kind of load: each length, task, language and batch, over all
    cells that have it (a cell alone is timed too few times to decide). PASS: the interval of each is above
    it, an intersection-union test; FAIL: one lies below it at 95 % for all kinds together (Bonferroni). The
    check's own number is then that of the slowest kind.
    """
    cells: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["length"], row["task"], row["language"], row["batch"]), []).append(row)
    by_load: list[dict[str, Any]] = []
    refused, details = [], []
    blocks: dict[str, list[list[float]]] = {name: [], over: []}
    kinds: dict[str, dict[str, list[list[float]]]] = {}
    alone: set[str] = set()
    for (length, task, language, batch), found in cells.items():
        load = " ".join(part for part in (length, task, language) if part) + f", batch {batch}"
        one = _cell(found, name, over)
        problem = one["problem"]
        if problem:
            refused.append(f"{load}: {problem}")
            continue
        for side in blocks:
            of_cell = one["by_prompt"][side]
            blocks[side] += of_cell
            for kind in filter(None, (length, task, language, f"batch {batch}")):
                kinds.setdefault(kind, {name: [], over: []})[side] += of_cell
                alone |= {kind} if batch == 1 else set()
        low, high = one["interval"]
        by_load.append(
            {
                "load": load,
                "speedup": one["speedup"],
                "low": low if math.isfinite(low) else None,
                "high": high if math.isfinite(high) else None,
                "acceptance_length": one["acceptance_length"],
                "tokens_per_s": one["tokens_per_s"],
                "prompt_tokens": one["prompt_tokens"],
            }
        )
        spread = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "no interval"
        rates = one["tokens_per_s"]
        details.append(
            f"{load}: {one['speedup']:.2f} ({spread}); {rates[name]:.1f} against "
            f"{rates[over]:.1f} tokens/s, {one['acceptance_length']:.2f} tokens a step, "
            f"prompts of {one['prompt_tokens']:.0f} tokens"
        )
    records = Records(
        "loads",
        {
            "name": name,
            "over": over,
            "missing": dict(missing),
            "max_seq_tokens": max_seq_tokens,
            "longest": longest,
            "bound": bound,
        },
        {"runs": list(rows)},
    )
    how = (
        "each cell: seconds of whole requests, prompts included, greedy, the same prompts to the lengths "
        f"of the answers with {over}, both sides in turn; 95 % paired bootstrap over prompts and rounds (a "
        "batch: over rounds); each prompt was answered once before on both sides, so with a prefix cache its "
        "KV is there; long: after held-out text in the same language"
    )
    details += [f"refused: {line}" for line in refused]
    details += [f"not measured: {cell}: {why}" for cell, why in missing.items()]
    if not by_load:
        text = f"every load is refused as evidence: {refused[0]}" if refused else "nothing was measured"
        return Check(
            "speedup_by_load",
            Verdict.ERROR,
            text,
            bound is not None,
            bound=bound,
            how=how,
            details=tuple(details),
            records=records,
        )
    ratio, interval = times_faster(blocks[name], blocks[over])
    worst, best = (pick(by_load, key=lambda one: one["speedup"]) for pick in (min, max))
    losing = [one["load"] for one in by_load if one["high"] is not None and one["high"] < 1]
    summary = (
        f"{len(by_load)} loads: from {worst['speedup']:.2f} ({worst['load']}) to {best['speedup']:.2f} "
        f"({best['load']}); together {ratio:.3f} (95 % interval {interval[0]:.3f} to {interval[1]:.3f})"
    )
    warnings = []
    if losing:
        warnings.append(f"slower than {over} in {len(losing)} loads: {'; '.join(losing[:8])}")
    if refused:
        warnings.append(f"{len(refused)} loads refused as evidence: {refused[0]}")
    for kind, sides in kinds.items():
        if kind not in alone and len(sides[name]) < _FEWEST_PROMPTS:
            # A few batches, timed several times: then the rounds are all there is to vary.
            kinds[kind] = {side: [[one] for group in found for one in group] for side, found in sides.items()}
    by_kind: list[dict[str, Any]] = [
        {"load": kind, "speedup": value, "low": ends[0], "high": ends[1]}
        for kind, sides in kinds.items()
        for value, ends in [times_faster(sides[name], sides[over])]
    ]
    told = ", ".join(f"{one['load']} {one['speedup']:.2f}" for one in by_kind)
    details.append(f"by kind of load: {told}")
    verdict = Verdict.MEASURED
    if bound is not None:
        verdict = _every_kind(kinds, by_kind, name, over, bound)
        # The kind that fails; else the one that is least sure to be fast enough.
        end = "high" if verdict is Verdict.FAIL else "low"
        slowest = min(by_kind, key=lambda one: one[end])
        ratio, interval = slowest["speedup"], (slowest["low"], slowest["high"])
        summary += (
            f"; slowest kind of load: {slowest['load']}, {ratio:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"
            f"; gate: at least {bound:g} for every kind"
        )
    evidence: dict[str, Any] = {
        "by_load": by_load,
        "by_kind": by_kind,
        "loads": [one["load"] for one in by_load],
        "refused": refused,
        "missing": dict(missing),
        "pitfalls": ["long-context"] if 2 * longest >= max_seq_tokens else [],
        "longest_prompt_tokens": longest,
    }
    return Check(
        "speedup_by_load",
        verdict,
        summary,
        required=bound is not None,
        measured=ratio,
        interval=interval,
        bound=bound,
        sense="at least",
        n=len(by_load),
        n_unit="loads",
        how=how,
        warnings=tuple(warnings),
        evidence=evidence,
        details=tuple(details),
        records=records,
    )


def _every_kind(
    kinds: Mapping[str, Mapping[str, list[list[float]]]],
    by_kind: Sequence[Mapping[str, Any]],
    name: str,
    over: str,
    bound: float,
) -> Verdict:
    """Whether every kind of load is at least ``bound`` times as fast."""
    if all(len(kinds[one["load"]][name]) > 1 and one["low"] >= bound for one in by_kind):
        return Verdict.PASS
    confidence = 1 - (1 - CONFIDENCE) / len(kinds)
    highs = [
        times_faster(sides[name], sides[over], confidence=confidence)[1][1]
        for sides in kinds.values()
        if len(sides[name]) >= _FEWEST_PROMPTS
    ]
    return Verdict.FAIL if any(high < bound for high in highs) else Verdict.INCONCLUSIVE


def _cell(rows: Sequence[Row], name: str, over: str) -> dict[str, Any]:
    """What one cell shows; ``problem``: why it is no evidence, "" if it is."""
    sides = {side: [row for row in rows if row["contender"] == side] for side in (name, over)}
    answers = {
        side: [answer for row in found for answer in answers_from(row["answers"])]
        for side, found in sides.items()
    }
    by_prompt: dict[str, list[list[float]]] = {}
    seconds: dict[str, list[list[float]]] = {}
    rates = {}
    for side, found in sides.items():
        prompts: dict[int, list[float]] = {}
        for row in found:
            prompts.setdefault(row["prompt"], []).append(row["seconds"])
        # One group of prompts, timed several times: then the rounds are all there is to vary.
        blocks = by_prompt[side] = list(prompts.values())
        seconds[side] = blocks if len(blocks) > 1 else [[value] for value in blocks[0]]
        rates[side] = sum(row["counted"] for row in found) / sum(row["seconds"] for row in found)
    speedup, interval = times_faster(seconds[name], seconds[over])
    least = least_of_pairs(seconds[name], seconds[over])
    length = acceptance_length(answers[name])
    told = [line for row in rows for line in row["contradictions"]]
    counts = {
        side: {answer.request_id: len(answer.tokens) for answer in found} for side, found in answers.items()
    }
    too_fast = ""
    if over != "other":  # which may draft at a loss: no count of tokens bounds the speedup over it
        # Timed once, nothing says how sure the number is: then it must be possible itself.
        sure = max(interval[0], least / CLOCK_SLACK) if math.isfinite(interval[0]) else speedup
        too_fast = impossible_speedup(sure, length)
    problem = (
        (told[0] if told else "")
        or unequal_work(counts[name], counts[over])
        or forced_acceptance([one.emitted for one in answers[name] if len(set(one.tokens)) > 4])
        or too_fast
    )
    sizes = [size for row in sides[name] for size in row["prompt_tokens"]]
    return {
        "speedup": speedup,
        # Of two blocks it would reach from a tenth to ten times, and say no more than none.
        "interval": interval if len(seconds[name]) > 2 else (-math.inf, math.inf),
        "seconds": seconds,
        "by_prompt": by_prompt,
        "tokens_per_s": rates,
        "acceptance_length": length,
        "prompt_tokens": sum(sizes) / len(sizes),
        "problem": problem,
    }

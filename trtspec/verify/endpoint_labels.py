"""What an endpoint's drafting does to its answers: as its owner says, and as far as it shows.

The *label* is said (``--acceptance``): a client sees answers, not how drafts are accepted. The *truth table*
is measured, on both endpoints alike: which sampling parameters change answers as they should. In 16 bit the
two best tokens tie every so often, and near temperature 0 either may come: so tokens are counted that go on
as the side's own greedy answer does, and those that part from it, and counts are compared by Fisher's exact
test. A parameter is honoured where it makes a difference on its own side. It is ignored where it makes
none, the baseline honours it, and the counts of the two differ; all else is not told.

Requests go one at a time, so that a seed that does not repeat is no matter of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from trtspec.prompts import Chat
from trtspec.ruler import shared_start
from trtspec.stats import scipy
from trtspec.verify.endpoint import GREEDY, Endpoint, SamplingParams, ask, is_refused, takes
from trtspec.verify.endpoint_sampled import answer_fields, pieces
from trtspec.verify.endpoint_verdict import PARAMETERS_ALPHA
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.labels import MODES, Label, Mode, Obeyed, judge_parameters, label
from trtspec.verify.records import Records, Row

Acceptance = Literal["strict", "typical", "relaxed", "skipped"]
"""Of an endpoint: what its owner says. Typical acceptance is strict for greedy answers alone."""

PARAMETERS = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "n")
_PROMPTS, _TOKENS = 8, 12
_HOT, _COLD = 2.0, 0.001
_SHOWN = 0.01
"""p-value below which a parameter makes a difference; a mistake costs a "not told", or none."""
_COMPARED = 8
"""Comparisons of the two sides that may call a parameter ignored, at PARAMETERS_ALPHA together."""
_LIMITS = (1, 3, 7)
_PROBES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seed": SamplingParams(1.0, seed=11),
    "cold": SamplingParams(_COLD, seed=1),
    "hot": SamplingParams(_HOT, seed=1),
    "top_k": SamplingParams(_HOT, top_k=1, seed=1),
    "top_p": SamplingParams(_HOT, top_p=1e-6, seed=1),
    "seed again": SamplingParams(1.0, seed=11),
    "other seed": SamplingParams(1.0, seed=12),
}
_SENT: dict[str, tuple[str, ...]] = {"top_p": ("top_p",), "top_k": ("top_k",)}


def acceptance_labels(said: Acceptance | None) -> list[Label]:
    """One for each mode of sampling; strict is assumed where nothing is said."""
    if said in (None, "strict"):
        because = "as told by --acceptance" if said else "assumed: --acceptance says nothing"
        return [Label("endpoint", "as served", "strict", mode, "strict", because) for mode in MODES]
    return [label("endpoint", "as served", said, mode) for mode in MODES]


def fidelity_of(said: Acceptance | None, mode: Mode) -> Label:
    """The label of answers in ``mode``."""
    return next(one for one in acceptance_labels(said) if one.mode == mode)


def check_parameters(
    endpoints: Mapping[str, Endpoint],
    chats: Sequence[Chat],
    *,
    acceptance: Acceptance | None,
    drafted: Callable[[], float | None] = lambda: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Check:
    """Ask both endpoints the probes of the truth table and judge them."""
    chats = chats[:_PROMPTS]
    rows: list[Row] = []
    total = 2 * ((len(_PROBES) + 1) * len(chats) + len(_LIMITS) + 1)
    before = drafted()

    for side, end in endpoints.items():
        asked = _questions(end, chats)
        row: Row | None = None
        while True:
            try:
                name, chat, params, max_tokens = asked.send(row)
            except StopIteration:
                break
            reply = ask(end, chat, max_tokens=max_tokens, clock=time.perf_counter, params=params)
            sent = {**asdict(params), "stop": list(params.stop), "max_tokens": max_tokens}
            row = {"side": side, "probe": name, "request_id": chat.id, "asked": sent, **answer_fields(reply)}
            rows.append(row)
            on_progress(min(len(rows), total), total)
            if _gone(rows):
                break
    return judge_endpoint_parameters(
        rows,
        taken={side: [one for one in PARAMETERS if one == "max_tokens" or takes(end, one)]
               for side, end in endpoints.items()},
        acceptance=acceptance,
        drafted=None if before is None else (drafted() or before) - before,
    )  # fmt: skip


_Question = tuple[str, Chat, SamplingParams, int]


def _questions(endpoint: Endpoint, chats: Sequence[Chat]) -> Generator[_Question, Row | None, None]:
    """Probe, prompt, parameters and token limit of each request; the row of the one before is sent in."""
    seeded = True
    longest, chosen = -1, chats[0]
    for name, params in _PROBES.items():
        if any(not takes(endpoint, one) for one in _SENT.get(name, ())):
            continue
        for chat in chats:
            row = yield name, chat, params if seeded else replace(params, seed=None), _TOKENS
            if name == "seed" and row is not None and is_refused(row["error"]):
                seeded = False  # asked once, and left out of all else
            if name != "greedy" or row is None:
                continue
            if len(row["text"]) > longest:
                longest, chosen = len(row["text"]), chat
            if stop := stop_word(row["text"]):
                yield "stop", chat, SamplingParams(stop=(stop,)), _TOKENS
    for limit in _LIMITS:
        yield "max_tokens", chosen, GREEDY, limit
    if takes(endpoint, "n"):
        yield "n", chats[0], SamplingParams(1.0, seed=21 if seeded else None, n=2), _TOKENS


def _gone(rows: Sequence[Row]) -> Row | None:
    """The first of the failed requests with which a side ended, if there are two: its server died."""
    end = []
    for row in reversed(rows):
        if row["side"] != rows[-1]["side"] or not row["error"] or is_refused(row["error"]):
            break
        end.append(row)
    return end[-1] if len(end) > 1 else None


def judge_endpoint_parameters(
    probes: Sequence[Row],
    *,
    taken: Mapping[str, Sequence[str]],
    acceptance: Acceptance | None,
    drafted: float | None,
) -> Check:
    """The truth table over the rows of ``probes`` (side, probe, request_id, asked, and what was answered).
    ``taken``: the parameters that requests to each side can carry."""
    sides = {
        side: _Side([row for row in probes if row["side"] == side], names) for side, names in taken.items()
    }
    tables = {side: [one.obeyed(name) for name in PARAMETERS] for side, one in sides.items()}
    table = [
        _beside(mine, theirs, sides["url"], sides["baseline"])
        for mine, theirs in zip(tables["url"], tables["baseline"], strict=True)
    ]
    told = [row["drafted"] for row in probes if row["side"] == "url" and row["drafted"] is not None]
    all_drafted = sum(told) if told else 1 if drafted is None else int(drafted)
    known = {name for names in taken.values() for name in names}
    check = judge_parameters(  # what no request to either can carry is no question
        table=[asdict(row) for row in table if row.parameter in known],
        labelled=[asdict(one) for one in acceptance_labels(acceptance)],
        drafted=all_drafted,
        required=True,
    )
    for side in taken:
        if (died := _gone([row for row in probes if row["side"] == side])) is not None:
            text = f"{side} stopped answering when asked for {died['probe']}: {died['error']}; restart it"
            check = replace(check, verdict=Verdict.INCONCLUSIVE, summary=text, required=True)
            break
    if not told and drafted is None:
        unknown = "whether anything was drafted in these answers the server does not tell"
        check = replace(check, warnings=(*check.warnings, unknown))
    arguments = {
        "taken": {side: list(names) for side, names in taken.items()},
        "acceptance": acceptance,
        "drafted": drafted,
    }
    evidence = {
        "table": [
            {"parameter": mine.parameter, "url": mine.honoured, "baseline": theirs.honoured}
            for mine, theirs in zip(table, tables["baseline"], strict=True)
        ],
        "counts": {side: one.counts for side, one in sides.items()},
    }
    return replace(
        check,
        how=(
            f"{_TOKENS} tokens to {_PROMPTS} prompts, one at a time, of both endpoints: near temperature 0, "
            "with top-k 1 and with a tiny top-p more tokens must follow the greedy answer than at "
            "temperature 1 or 2; seeds must matter and repeat; stop strings and the token limit must end "
            "an answer; n is counted. A fault is what the baseline honours and the other ignores "
            "(Fisher's exact test)"
        ),
        evidence=evidence,
        records=Records("endpoint_parameters", arguments, {"probes": list(probes)}),
    )


def stop_word(text: str) -> str:
    """A word of the second half of ``text`` that it does not have before; "" if there is none."""
    for piece in pieces(text)[len(pieces(text)) // 2 :]:
        word = piece.strip()
        if len(word) > 1 and text.find(word) >= len(text) // 3:
            return word
    return ""


def _beside(mine: Obeyed, theirs: Obeyed, left: _Side, right: _Side) -> Obeyed:
    """A row of the common table: ignored is only what the baseline honours."""
    found = f"url: {mine.found}; baseline: {theirs.found}"
    honoured = mine.honoured
    if honoured is None and theirs.honoured is True and left.ignores(mine.parameter, right):
        honoured = False
    if honoured is False and theirs.honoured is not True:
        why = "the baseline ignores it too" if theirs.honoured is False else "the baseline does not tell"
        return Obeyed(mine.parameter, None, f"url ignores it, {why} ({found})")
    return Obeyed(mine.parameter, honoured, found)


# --------------------------------------------------------------------------- one side

_NEEDS = {
    "temperature": ("cold", "hot"),
    "top_p": ("top_p", "hot"),
    "top_k": ("top_k", "hot"),
    "seed": ("seed", "seed again", "other seed"),
    "stop": ("greedy", "stop"),
    "max_tokens": ("max_tokens",),
    "n": ("n",),
}
"""The probes that tell of a parameter."""
_LOWER = {"temperature": ("cold",), "top_p": ("top_p",), "top_k": ("top_k",), "seed": ("repeat", "move")}
"""Counts that fall where the parameter is ignored."""
_HIGHER = {"temperature": ("hot",)}


class _Side:
    """What the probes of one side show. ``counts``: (those that do, those that do not), by what is counted:
    tokens that follow the greedy answer, by probe (``one``: at temperature 1); answers that repeat with
    their seed, and that move with another."""

    def __init__(self, rows: Sequence[Row], taken: Sequence[str]) -> None:
        self.rows, self._taken = rows, taken
        by_probe: dict[str, dict[str, Row]] = {}
        for row in rows:
            by_probe.setdefault(row["probe"], {})[row["request_id"]] = row
        self._probes, self._greedy = by_probe, by_probe.get("greedy", {})
        asked: tuple[str, ...] = ("cold", "hot", "top_k", "top_p")
        followed = {name: self._followed([name]) for name in asked if name in by_probe}
        first, again, other = (by_probe.get(name, {}) for name in _NEEDS["seed"])
        both = [
            key
            for key in first
            if key in again
            and key in other
            and not (first[key]["error"] or again[key]["error"] or other[key]["error"])
        ]
        same = sum(_said(first[key]) == _said(again[key]) for key in both)
        moved = sum(_said(first[key]) != _said(other[key]) for key in both)
        self.counts: dict[str, tuple[int, int]] = {
            **followed,
            "one": self._followed(_NEEDS["seed"]),
            "repeat": (same, len(both) - same),
            "move": (moved, len(both) - moved),
        }

    def _followed(self, names: Sequence[str]) -> tuple[int, int]:
        """Tokens that go on as the greedy answer does, and answers that part from it."""
        followed = parted = 0
        for name in names:
            for key, row in self._probes.get(name, {}).items():
                whole = self._greedy.get(key)
                if whole is None or row["error"]:
                    continue
                by_ids = row["token_ids"] is not None and whole["token_ids"] is not None
                mine, theirs = (
                    list(one["token_ids"]) if by_ids else pieces(one["text"]) for one in (row, whole)
                )
                followed += shared_start((mine, theirs))
                parted += mine != theirs
        return followed, parted

    def _asked(self, name: str) -> list[Row]:
        if name == "max_tokens":
            return [row for row in self.rows if row["probe"] == name]
        return [row for probe in _NEEDS[name] for row in self._probes.get(probe, {}).values()]

    def unasked(self, name: str) -> str:
        """Why the answers tell nothing of ``name``; "" where they may."""
        if name not in self._taken:
            return "requests cannot carry it"
        asked = self._asked(name)
        if name in ("temperature", "top_p", "top_k"):
            asked += self._greedy.values()
        wrong = next((row["error"] for row in asked if row["error"]), "")
        if not wrong and name != "stop" and any(one not in self._probes for one in _NEEDS[name]):
            return "not asked any more: the server died before"
        return f"refused or failed: {wrong}" if wrong else ""

    def obeyed(self, name: str) -> Obeyed:
        """What this side's answers say of ``name`` alone."""
        if why := self.unasked(name):
            return Obeyed(name, None, why)
        asked = self._asked(name)
        counts = self.counts
        match name:
            case "temperature":
                honoured = _more(counts["cold"], counts["one"], _SHOWN) and _more(
                    counts["cold"], counts["hot"], _SHOWN
                )
                told = ((f"at {_COLD:g}", "cold"), ("at 1", "one"), (f"at {_HOT:g}", "hot"))
                found = ", ".join(f"{words} {_follow(counts[key])}" for words, key in told)
                return Obeyed(name, honoured or None, found)
            case "top_p" | "top_k":
                found = (
                    f"at temperature {_HOT:g} {_follow(counts[name])}, without it {_follow(counts['hot'])}"
                )
                return Obeyed(name, _more(counts[name], counts["hot"], _SHOWN) or None, found)
            case "seed":
                (same, not_same), (moved, _) = counts["repeat"], counts["move"]
                found = (
                    f"{same} of {same + not_same} answers repeat with the same seed, "
                    f"{moved} change with another"
                )
                return Obeyed(name, (not not_same and moved > 0) or None, found)
            case "stop":
                return Obeyed(name, *_stop(self._probes.get("stop", {}), self._probes.get("greedy", {})))
            case "n":
                count = asked[0]["answers"] if asked else 0
                return Obeyed(name, count == 2, f"2 answers asked, {count} given")
        return Obeyed(name, *_limit(asked))

    def ignores(self, name: str, baseline: _Side) -> bool:
        """Whether the counts differ from those of a baseline that honours ``name``, as ignoring it does."""
        if self.unasked(name):
            return False
        level = PARAMETERS_ALPHA / _COMPARED
        lower = (_more(baseline.counts[key], self.counts[key], level) for key in _LOWER.get(name, ()))
        higher = (_more(self.counts[key], baseline.counts[key], level) for key in _HIGHER.get(name, ()))
        return any(lower) or any(higher)


_Found = tuple[bool | None, str]


def _said(row: Row) -> list[Any]:
    return list(row["token_ids"]) if row["token_ids"] is not None else pieces(row["text"])


def _follow(counts: tuple[int, int]) -> str:
    followed, parted = counts
    return f"{followed} tokens follow the greedy text, {parted} part"


def _more(one: tuple[int, int], other: tuple[int, int], level: float) -> bool:
    """Whether the share of the first count is larger in ``one``: Fisher's exact test, one-sided."""
    total, hits = sum(one) + sum(other), one[0] + other[0]
    return bool(scipy("stats").hypergeom.sf(one[0] - 1, total, hits, sum(one)) <= level)


def _stop(stopped: Mapping[str, Row], greedy: Mapping[str, Row]) -> _Found:
    verdicts = []
    for key, row in stopped.items():
        word, whole, text = row["asked"]["stop"][0], greedy[key]["text"], row["text"]
        at = whole.find(word)
        if text.rstrip() in (whole[:at].rstrip(), whole[: at + len(word)].rstrip()):
            verdicts.append(True)
        elif len(text) > at + len(word) and text.startswith(whole[: at + len(word)]):
            verdicts.append(False)
    found = f"{sum(verdicts)} of {len(stopped)} answers end at their stop string"
    if len(verdicts) < len(stopped):
        found += f", {len(stopped) - len(verdicts)} went another way"
    return (None if not verdicts else all(verdicts)), found


def _limit(rows: Sequence[Row]) -> _Found:
    counts = {row["asked"]["max_tokens"]: row["tokens"] for row in rows}
    if not counts or None in counts.values():
        return None, "tokens are not counted"
    found = ", ".join(f"{asked} asked, {given} given" for asked, given in counts.items())
    ended = {row["asked"]["max_tokens"] for row in rows if row["finish_reason"] == "stop"}
    return all(given == asked or (given < asked and asked in ended) for asked, given in counts.items()), found

"""What an endpoint's drafting does to its answers: as its owner says, and as far as it shows.

The *label* is said (``--acceptance``): a client sees answers, not how drafts are accepted. The *truth table*
is measured, on both endpoints alike: which sampling parameters change answers as they should. What the
baseline ignores too is no matter of drafts; only what it honours and the other ignores is a fault.

Requests go one at a time, so that a seed that does not repeat is no matter of the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from trtspec.prompts import Chat
from trtspec.verify.endpoint import GREEDY, Endpoint, SamplingParams, ask, takes
from trtspec.verify.endpoint_sampled import answer_fields, pieces
from trtspec.verify.gates import Check
from trtspec.verify.labels import MODES, Label, Mode, Obeyed, judge_parameters, label
from trtspec.verify.records import Records, Row

Acceptance = Literal["strict", "typical", "relaxed", "skipped"]
"""Of an endpoint: what its owner says. Typical acceptance is strict for greedy answers alone."""

PARAMETERS = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "n")
_PROMPTS, _TOKENS = 4, 16
_HOT, _COLD = 2.0, 0.001
_AGREES, _DIFFERS = 0.75, 0.6
"""Share of a greedy answer that comes again before another token: from here on it is the same law, below it
is not; 16-bit ties lie between."""
_LIMITS = (1, 3, 7)
_PROBES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "cold": SamplingParams(_COLD, seed=1),
    "hot": SamplingParams(_HOT, seed=1),
    "top_k": SamplingParams(_HOT, top_k=1, seed=1),
    "top_p": SamplingParams(_HOT, top_p=1e-6, seed=1),
    "seed": SamplingParams(1.0, seed=11),
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

    def probe(
        side: str, name: str, chat: Chat, params: SamplingParams, max_tokens: int = _TOKENS
    ) -> Row | None:
        if any(not takes(endpoints[side], one) for one in _SENT.get(name, ())):
            return None
        reply = ask(endpoints[side], chat, max_tokens=max_tokens, clock=time.perf_counter, params=params)
        asked = {**asdict(params), "stop": list(params.stop), "max_tokens": max_tokens}
        row = {"side": side, "probe": name, "request_id": chat.id, "asked": asked, **answer_fields(reply)}
        rows.append(row)
        on_progress(min(len(rows), total), total)
        return row

    for side in endpoints:
        for name, params in _PROBES.items():
            for chat in chats:
                row = probe(side, name, chat, params)
                if name == "greedy" and row is not None and (stop := stop_word(row["text"])):
                    probe(side, "stop", chat, SamplingParams(stop=(stop,)))
        for limit in _LIMITS:
            probe(side, "max_tokens", chats[0], GREEDY, limit)
        if takes(endpoints[side], "n"):
            probe(side, "n", chats[0], SamplingParams(1.0, seed=21, n=2))
    return judge_endpoint_parameters(
        rows,
        taken={side: [one for one in PARAMETERS if one == "max_tokens" or takes(end, one)]
               for side, end in endpoints.items()},
        acceptance=acceptance,
        drafted=None if before is None else (drafted() or before) - before,
    )  # fmt: skip


def judge_endpoint_parameters(
    probes: Sequence[Row],
    *,
    taken: Mapping[str, Sequence[str]],
    acceptance: Acceptance | None,
    drafted: float | None,
) -> Check:
    """The truth table over the rows of ``probes`` (side, probe, request_id, asked, and what was answered).
    ``taken``: the parameters that requests to each side can carry."""
    tables = {side: _table(probes, side, taken[side]) for side in ("url", "baseline")}
    table = [_beside(mine, theirs) for mine, theirs in zip(tables["url"], tables["baseline"], strict=True)]
    told = [row["drafted"] for row in probes if row["side"] == "url" and row["drafted"] is not None]
    all_drafted = sum(told) if told else 1 if drafted is None else int(drafted)
    check = judge_parameters(
        table=[asdict(row) for row in table],
        labelled=[asdict(one) for one in acceptance_labels(acceptance)],
        drafted=all_drafted,
        required=True,
    )
    arguments = {
        "taken": {side: list(names) for side, names in taken.items()},
        "acceptance": acceptance,
        "drafted": drafted,
    }
    evidence = {
        "table": [
            {"parameter": mine.parameter, "url": mine.honoured, "baseline": theirs.honoured}
            for mine, theirs in zip(tables["url"], tables["baseline"], strict=True)
        ]
    }
    return replace(
        check,
        how=(
            f"{_TOKENS} tokens to {_PROMPTS} prompts, one at a time, of both endpoints: near temperature 0, "
            "with top-k 1 and with a tiny top-p the text must be the greedy one, at temperature 2 it must "
            "not; seeds must matter and repeat; stop strings and the token limit must end an answer; n is "
            "counted. A fault is what the baseline honours and the other ignores"
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


def _beside(mine: Obeyed, theirs: Obeyed) -> Obeyed:
    """A row of the common table: ignored is what only the endpoint under test ignores."""
    found = f"url: {mine.found}; baseline: {theirs.found}"
    if mine.honoured is False and theirs.honoured is not True:
        why = "the baseline ignores it too" if theirs.honoured is False else "the baseline does not tell"
        return Obeyed(mine.parameter, None, f"url ignores it, {why} ({found})")
    return Obeyed(mine.parameter, mine.honoured, found)


# --------------------------------------------------------------------------- one side


def _table(probes: Sequence[Row], side: str, taken: Sequence[str]) -> list[Obeyed]:
    greedy = {
        row["request_id"]: row for row in probes if (row["side"], row["probe"]) == ("baseline", "greedy")
    }
    by_probe: dict[str, dict[str, Row]] = {}
    limits = [row for row in probes if (row["side"], row["probe"]) == (side, "max_tokens")]
    for row in probes:
        if row["side"] == side:
            by_probe.setdefault(row["probe"], {})[row["request_id"]] = row
    needs = {
        "temperature": ("cold", "hot"),
        "top_p": ("hot", "top_p"),
        "top_k": ("hot", "top_k"),
        "seed": ("seed", "seed again", "other seed"),
        "stop": ("greedy",),
        "n": ("n",),
    }
    found = []
    for name in PARAMETERS:
        asked = [row for probe in needs.get(name, ()) for row in by_probe.get(probe, {}).values()]
        asked += limits if name == "max_tokens" else ()
        asked += greedy.values() if name in ("temperature", "top_p", "top_k") else ()
        wrong = next((row["error"] for row in asked if row["error"]), "")
        if name not in taken:
            found.append(Obeyed(name, None, "requests cannot carry it"))
        elif wrong:
            found.append(Obeyed(name, None, f"refused or failed: {wrong}"))
        elif name == "max_tokens":
            found.append(Obeyed(name, *_limit(limits)))
        elif name == "stop":
            found.append(Obeyed(name, *_stop(by_probe.get("stop", {}), by_probe.get("greedy", {}))))
        elif name == "n":
            count = next(iter(by_probe["n"].values()))["answers"] if "n" in by_probe else 0
            found.append(Obeyed(name, count == 2, f"2 answers asked, {count} given"))
        elif name == "seed":
            found.append(Obeyed(name, *_seed(*(by_probe[probe] for probe in needs[name]))))
        elif name == "temperature":
            found.append(Obeyed(name, *_temperature(by_probe["cold"], by_probe["hot"], greedy)))
        else:
            found.append(Obeyed(name, *_cut(by_probe[name], by_probe["hot"], greedy)))
    return found


_Found = tuple[bool | None, str]


def _said(row: Row) -> list[Any]:
    return list(row["token_ids"]) if row["token_ids"] is not None else pieces(row["text"])


def _agreement(rows: Mapping[str, Row], greedy: Mapping[str, Row]) -> float:
    """The mean share of the greedy answers that ``rows`` begin with."""
    shares = []
    for key, row in rows.items():
        whole = greedy[key]
        if row["token_ids"] is None or whole["token_ids"] is None:
            mine, theirs = pieces(row["text"]), pieces(whole["text"])
        else:
            mine, theirs = _said(row), _said(whole)
        same = next(
            (at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            min(len(mine), len(theirs)),
        )
        shares.append(same / len(theirs) if theirs else float(not mine))
    return sum(shares) / len(shares) if shares else 0.0


def _temperature(cold: Mapping[str, Row], hot: Mapping[str, Row], greedy: Mapping[str, Row]) -> _Found:
    low, high = _agreement(cold, greedy), _agreement(hot, greedy)
    found = f"at {_COLD:g} {low:.0%} of the greedy text comes again, at {_HOT:g} {high:.0%}"
    if low < _DIFFERS or high == 1.0:
        return False, found
    return (True if low >= _AGREES and high < _DIFFERS else None), found


def _cut(rows: Mapping[str, Row], hot: Mapping[str, Row], greedy: Mapping[str, Row]) -> _Found:
    """Of top-k 1 or a tiny top-p: greedy at any temperature."""
    share, free = _agreement(rows, greedy), _agreement(hot, greedy)
    found = f"at temperature {_HOT:g} {share:.0%} of the greedy text comes again, without it {free:.0%}"
    if free >= _DIFFERS:
        return None, f"{found}: too alike to tell"
    return (True if share >= _AGREES else False if share < _DIFFERS else None), found


def _seed(first: Mapping[str, Row], again: Mapping[str, Row], other: Mapping[str, Row]) -> _Found:
    same = sum(_said(first[key]) == _said(again[key]) for key in first)
    moved = sum(_said(first[key]) != _said(other[key]) for key in first)
    found = f"{same} of {len(first)} answers repeat with the same seed, {moved} change with another"
    if not moved or not same:
        return False, found
    return (True if same == len(first) else None), found


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

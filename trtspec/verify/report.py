"""The report: every check with its evidence, and everything needed to repeat it. JSON is the datum; the
terminal and Markdown renderings (:mod:`trtspec.verify.render`) only show it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from trtspec.recipe_facts import Fidelity
from trtspec.verify.gates import Check, all_ok, exit_code
from trtspec.verify.i18n import speaker
from trtspec.verify.pitfalls import Pitfall, answer_pitfalls

SCHEMA = "trtspec.report/1"


@dataclass(frozen=True)
class Report:
    """What one ``trtspec verify`` found."""

    engine: str
    recipe_name: str
    recipe_digest: str
    recipe: Mapping[str, Any]
    source_digest: str
    created: str
    """UTC, ISO 8601."""
    argv: tuple[str, ...]
    tools: Mapping[str, str]
    """Versions now; ``built_with`` has those of the build."""
    built_with: Mapping[str, str]
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Prompts, lengths, rounds, files and their hashes."""
    seconds: float
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = field(default=())
    fidelity: Fidelity = "strict"
    """``approximate``: the recipe's acceptance changes the law of sampled output; then no check is called
    lossless."""
    other: Mapping[str, Any] = field(default_factory=dict)
    """The second engine of ``verify --baseline`` (:meth:`trtspec.verify.pair.Pair.record`); empty without."""

    @property
    def ok(self) -> bool:
        """Every required check passed, there is at least one, and nothing contradicts itself."""
        return all_ok(self.checks)

    @property
    def exit_code(self) -> int:
        return exit_code(self.checks)


VERDICT_WORDS = {0: "PASS", 1: "FAIL", 4: "INCONCLUSIVE"}


def to_json(report: Report) -> dict[str, Any]:
    """The report as JSON values; numbers that are not finite become null."""
    value = {
        "schema": SCHEMA,
        "verdict": VERDICT_WORDS[report.exit_code],
        "exit_code": report.exit_code,
        **asdict(replace(report, checks=())),
        "checks": [check_fields(check) for check in report.checks],
        "pitfalls": [pitfall_fields(one) for one in pitfalls(report)],
    }
    result: dict[str, Any] = plain(value)
    return result


def to_bytes(report: Report) -> bytes:
    """The JSON file's content."""
    return (json.dumps(to_json(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def check_fields(check: Check) -> dict[str, Any]:
    """A check as JSON values, without its records: those are for a bundle."""
    value = asdict(replace(check, records=None))
    del value["records"]
    result: dict[str, Any] = plain(value)
    return result


def pitfall_fields(found: Pitfall) -> dict[str, str]:
    """An answered or open pitfall as JSON values, its sentences in English."""
    say = speaker("en")
    values = {"found": say(found.key, **found.values), "run": found.command(say)}
    return {"id": found.id, "status": found.status, **values}


def pitfalls(report: Report) -> tuple[Pitfall, ...]:
    """What the report says to each of the nine pitfalls."""
    return answer_pitfalls(
        report.checks, report.recipe, report.settings, engine=report.engine, fidelity=report.fidelity
    )


def plain(value: Any) -> Any:
    """JSON values of what a dataclass holds; numbers that are not finite become None, bytes of a path that
    are no UTF-8 (``\\udcff``, as Python reads them) the text of their escape."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value

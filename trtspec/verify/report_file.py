"""The report as a file: its published JSON Schema, and reading one back.

A later trtspec may add keys to version 1; a reader passes over what it does not know. Values that are not
finite numbers are null: a measured value that is null is not known, an end of an interval is then open.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import InputError, Problem
from trtspec.recipe_facts import Fidelity
from trtspec.user_files import read_user_json, shown_path
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.report import SCHEMA, Report

Object = dict[str, Any]


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False)


class CheckFile(_File):
    """One question, its answer and the evidence."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """Unique in the report."""
    verdict: Verdict
    """MEASURED: a number that no gate asks about. ERROR: a measurement contradicts itself."""
    summary: str
    """What was found, in one line."""
    required: bool
    """Whether the report's verdict rests on it."""
    measured: float | None = None
    interval: tuple[float | None, float | None] | None = None
    """95 %; null: that end is not known."""
    bound: float | None = None
    """The gate."""
    sense: Literal["at least", "at most"] | None = None
    """On which side of the bound the whole interval must lie."""
    unit: str = ""
    n: int = 0
    """Sample size, in n_unit."""
    n_unit: str = ""
    how: str = ""
    """How the number was obtained."""
    warnings: list[str] = []
    evidence: Object = {}
    """Numbers behind the verdict; which ones depends on the check."""
    details: list[str] = []
    """Findings one by one."""


class PitfallFile(_File):
    """One of the nine mistakes that spoil such measurements, and whether the report answers it."""

    id: str
    status: Literal["answered", "open", "does not apply"]
    found: str
    """What answers it, or what is missing."""
    run: str = ""
    """What to run where it is open."""


class ReportFile(_File):
    """What one `trtspec verify` found."""

    schema_: Annotated[Literal["trtspec.report/1"], Field(alias="schema")]
    """Name and version of this format."""
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"]
    """Follows from the required checks."""
    exit_code: Literal[0, 1, 4]
    """Of the command: 0 pass, 1 a required check failed, 4 undecided."""
    engine: str
    """The folder that was verified."""
    recipe_name: str
    recipe_digest: str
    recipe: Object
    """Every key, defaults included."""
    source_digest: str
    """Of the target's checkpoint before quantization."""
    created: str
    """UTC, ISO 8601."""
    argv: list[str]
    """The command."""
    tools: dict[str, str]
    """Versions when verified."""
    built_with: dict[str, str]
    """Versions when built."""
    machine: Object
    settings: Object
    """Prompts, lengths, rounds, files and their hashes."""
    seconds: float
    """How long verifying took."""
    checks: list[CheckFile]
    pitfalls: list[PitfallFile] = []
    """Follow from checks, recipe and settings."""
    notes: list[str] = []
    fidelity: Fidelity = "strict"
    """approximate: sampled output does not have the target's law; then nothing is called lossless."""
    other: Object = {}
    """The second engine of `verify --baseline`: folder, recipe, what was asked of the two; empty without."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a report file, as published in ``docs/report-schema.json``."""
    schema = ReportFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": SCHEMA}


def read_report(path: Path) -> Report:
    """The report of a JSON file that ``verify -o`` wrote, or of the one that ``verify --json`` printed.

    Raises InputError with every problem of the file.
    """
    return report_from(read_user_json(path), shown_path(path))


def report_from(value: object, place: str) -> Report:
    """The report of a JSON value; ``place`` names it in messages. Raises InputError with every problem."""
    if isinstance(value, dict) and isinstance(value.get("report"), dict):
        value = value["report"]
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA:
        message = f"schema is {found!r}, this version reads {SCHEMA}; name a file that verify -o wrote"
        raise InputError(Problem(message, file=place))
    try:
        file = ReportFile.model_validate(value)
    except ValidationError as error:
        raise InputError(
            [
                Problem(
                    f"{one['msg'][0].lower()}{one['msg'][1:]}",
                    file=place,
                    key=".".join(map(str, one["loc"])),
                )
                for one in error.errors()
            ]
        ) from None
    names = [check.name for check in file.checks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(Problem(f"the name {twice[0]!r} occurs twice", file=place, key="checks"))
    return Report(
        engine=file.engine,
        recipe_name=file.recipe_name,
        recipe_digest=file.recipe_digest,
        recipe=file.recipe,
        source_digest=file.source_digest,
        created=file.created,
        argv=tuple(file.argv),
        tools=file.tools,
        built_with=file.built_with,
        machine=file.machine,
        settings=file.settings,
        seconds=file.seconds,
        checks=tuple(map(_check, file.checks)),
        notes=tuple(file.notes),
        fidelity=file.fidelity,
        other=file.other,
    )


def _check(file: CheckFile) -> Check:
    interval = None
    if file.interval is not None:
        low, high = file.interval
        interval = (-math.inf if low is None else low, math.inf if high is None else high)
    return Check(
        name=file.name,
        verdict=file.verdict,
        summary=file.summary,
        required=file.required,
        measured=file.measured,
        interval=interval,
        bound=file.bound,
        sense=file.sense,
        unit=file.unit,
        n=file.n,
        n_unit=file.n_unit,
        how=file.how,
        warnings=tuple(file.warnings),
        evidence=file.evidence,
        details=tuple(file.details),
    )

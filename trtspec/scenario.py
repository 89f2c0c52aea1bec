"""What a deployment is for: the shape of the work, how exact it must be and how fast.

Nine presets ship as YAML files in ``data/scenarios``; a user copies one and changes it, or describes a
scenario by its keys. Every problem of a file is reported at once, with line and key, as for recipes.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtspec.errors import InputError, Problem
from trtspec.recipe import NAME_PATTERN, Milliseconds, TokenCount
from trtspec.recipe_file import allowed, found
from trtspec.recipe_yaml import Document, dotted, dump_plain, read_document, visible

PRESETS = (
    "zero-tolerance",
    "interactive",
    "high-throughput",
    "repetitive",
    "memory-bound",
    "medical-consult",
    "code-completion",
    "customer-service",
    "edge-8gb",
)
MAX_FILE_BYTES = 100_000

Task = Literal["chat", "code", "math", "qa", "rag", "summarization", "translation"]
Fidelity = Literal["exact", "distribution", "approximate"]


class _Mapping(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Slo(_Mapping):
    """What a user waits for, at most; null: no bound."""

    ttft_ms: Milliseconds | None = None
    """Time to the first token, ms."""
    tpot_ms: Milliseconds | None = None
    """Time per output token after the first, ms."""


class Scenario(_Mapping):
    """One kind of work for one engine."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "custom"
    """Names the recipe that is recommended for it."""
    description: Annotated[str, Field(max_length=4096)] = ""
    """For readers; changes nothing."""
    task: Task = "chat"
    """Kind of text: decides which published acceptance is the prior."""
    input_tokens: TokenCount
    """Prompt of a typical request."""
    output_tokens: TokenCount
    """Answer of a typical request."""
    concurrency: Annotated[int, Field(ge=1, le=8192)]
    """Requests in flight at once, at the busiest."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """0: greedy."""
    copy_fraction: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Share of the answer's tokens that continue a phrase of the prompt or of the answer so far; null: as
    published for the task."""
    fidelity: Fidelity
    """exact: no quality loss, strict acceptance; distribution: quantization within its gate, strict
    acceptance; approximate: acceptance may be approximate too."""
    memory: Literal["normal", "tight"] = "normal"
    """tight: KV cache and weights are to be kept small before anything else."""
    slo: Slo = Slo()
    """What a user waits for, at most."""


def load_scenario(source: str, changes: Mapping[str, Any] | None = None) -> Scenario:
    """The preset or file called ``source``, with ``changes`` laid over it (``slo`` key by key).

    Raises InputError with every problem: an unknown preset, a file that cannot be read, bad values.
    """
    if source in PRESETS:
        raw = resources.files("trtspec").joinpath(f"data/scenarios/{source}.yaml").read_bytes()
        return _parse(raw, f"{source} (preset)", changes or {})
    path = Path(source)
    if not path.suffix and not path.exists() and os.sep not in source:
        close = difflib.get_close_matches(source, PRESETS, n=2, cutoff=0.4)
        remedy = f"did you mean {' or '.join(close)}? " if close else ""
        raise InputError(
            f"no scenario {source!r}; {remedy}presets: {', '.join(PRESETS)}; or name a YAML file"
        )
    try:
        with path.open("rb") as handle:
            raw = handle.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        message = f"cannot be read ({error.strerror}); check the path, or name a preset: {', '.join(PRESETS)}"
        raise InputError(Problem(message, visible(source, limit=4096))) from None
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(Problem(f"is larger than {MAX_FILE_BYTES} bytes; is this a scenario?", source))
    return _parse(raw, visible(source, limit=4096), changes or {})


def describe_scenario(values: Mapping[str, Any]) -> Scenario:
    """A scenario given by its keys alone. Raises InputError for bad or missing ones."""
    return _check(dict(values), Document("<options>"))


def dump_scenario(scenario: Scenario) -> str:
    """The scenario as YAML, every key written out; :func:`load_scenario` reads it back."""
    return dump_plain(scenario.model_dump(mode="json"))


def _parse(raw: bytes, file: str, changes: Mapping[str, Any]) -> Scenario:
    document = read_document(raw, file)
    if document.problems:
        raise InputError(document.problems)
    if not isinstance(document.data, dict):
        message = (
            f"found {found(document.data)}; allowed: a mapping (input_tokens: ...); see a preset with: "
            "trtspec recommend --show-scenario interactive"
        )
        raise InputError(Problem(message, file, 1))
    data = dict(document.data)
    for key, value in changes.items():
        below = data.get(key)
        data[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, Mapping) else value
    return _check(data, document)


def _check(data: dict[str, Any], document: Document) -> Scenario:
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as failure:
        raise InputError(_problems(failure, data, document)) from None
    return scenario


def _problems(failure: ValidationError, data: Mapping[str, Any], document: Document) -> list[Problem]:
    problems = []
    for error in failure.errors(include_url=False, include_context=False, include_input=False):
        path = tuple(error["loc"])
        schema, owner = _schema_at(path)
        value: Any = data
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if error["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(path[-1]), owner, n=1)
            hint = f"did you mean {close[0]}?" if close else "remove it"
            message = f"unknown key; allowed here: {', '.join(owner)}; {hint}"
        elif error["type"] == "missing":
            message = f"missing; allowed: {allowed(schema)}; add it"
        else:
            message = f"found {found(value)}; allowed: {allowed(schema)}; change it"
        problems.append(Problem(message, document.file, document.lines.get(path), dotted(path)))
    return problems


def _schema_at(path: tuple[str | int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schema of the key at ``path`` and the keys of the mapping around it."""
    if path[0] == "slo" and len(path) > 1:
        owner = Slo.model_json_schema()["properties"]
    else:
        owner = Scenario.model_json_schema()["properties"]
    key = str(path[-1])
    if key == "slo":
        return {"properties": Slo.model_json_schema()["properties"]}, owner
    return owner.get(key, {}), owner

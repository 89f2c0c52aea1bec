"""The evidence bundle: a report and the raw records behind it, in a folder that anybody can check.

``report.json``, ``records/NN-CHECK/TABLE.jsonl`` (a row a token or a request) and ``manifest.json``, which
says by what judge and with what arguments each verdict was made from which tables, and holds the SHA-256 of
every other file. The manifest's own digest is printed when the bundle is written: who keeps it can tell
whether the bundle is still the same, which no file of the bundle itself can prove.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.folders import new_folder
from trtspec.user_files import explain_os_error, parse_json, read_user_bytes, shown_path
from trtspec.verify.records import Records
from trtspec.verify.report import Report, plain, to_bytes
from trtspec.verify.report_file import report_from

SCHEMA = "trtspec.bundle/1"
MANIFEST = "manifest.json"
REPORT = "report.json"


@dataclass(frozen=True)
class Judged:
    """The checks that one judge made, in its order. ``records`` None: a file of it is missing or broken."""

    checks: tuple[str, ...]
    records: Records | None


@dataclass(frozen=True)
class Bundle:
    """``problems``: files that are missing, changed, broken, or in no manifest."""

    report: Report
    stored: dict[str, Any]
    """The report's JSON as it stands in the file."""
    judged: tuple[Judged, ...]
    problems: tuple[str, ...]


def write_bundle(folder: Path, report: Report) -> str:
    """Write the bundle of ``report``, whole or not at all; returns the manifest's SHA-256.

    Raises InputError where ``folder`` is not free, MissingError for what the disk refuses.
    """
    files = {REPORT: to_bytes(report)}
    judged = []
    written: dict[int, dict[str, Any]] = {}
    for number, check in enumerate(report.checks):
        records = check.records
        if records is None:
            continue
        if id(records) in written:  # several verdicts of one judge
            written[id(records)]["checks"].append(check.name)
            continue
        place = f"records/{number:02d}-{re.sub(r'[^A-Za-z0-9._-]+', '-', check.name)[:60]}"
        tables = {}
        for name, rows in records.tables.items():
            tables[name] = f"{place}/{name}.jsonl"
            files[tables[name]] = "".join(_line(row) for row in rows).encode()
        written[id(records)] = {
            "checks": [check.name],
            "judge": records.judge,
            "arguments": plain(records.arguments),
            "tables": tables,
        }
        judged.append(written[id(records)])
    manifest = {
        "schema": SCHEMA,
        "judged": judged,
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in files.items()
        },
    }
    files[MANIFEST] = (
        json.dumps(plain(manifest), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    ).encode()
    try:
        with new_folder(folder) as partial:
            for name, content in files.items():
                path = partial / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    except OSError as error:  # a full disk tells no name
        raise explain_os_error(error, folder) from None
    return hashlib.sha256(files[MANIFEST]).hexdigest()


def _line(row: object) -> str:
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def open_bundle(folder: Path) -> Bundle:
    """Read a bundle and hold its files against its manifest.

    What is missing or changed is in ``problems``. Raises InputError where there is no manifest or no report
    that can be read: then there is nothing to check.
    """
    place = folder / MANIFEST
    manifest = _parsed(read_user_bytes(place), place)
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        message = f"schema is {found!r}, this version reads {SCHEMA}; name a folder of verify --bundle"
        raise InputError(Problem(message, file=shown_path(place)))
    problems: list[str] = []
    contents = _contents(folder, manifest, problems)
    if REPORT not in contents:
        # Changed or unlisted, it is still what a reader would believe.
        contents[REPORT] = read_user_bytes(folder / REPORT)
    stored = _parsed(contents[REPORT], folder / REPORT)
    report = report_from(stored, shown_path(folder / REPORT))
    judged = tuple(_judged(one, contents, problems) for one in _list(manifest, "judged", problems))
    return Bundle(report, stored, judged, tuple(problems))


def _contents(folder: Path, manifest: dict[str, Any], problems: list[str]) -> dict[str, bytes]:
    listed = manifest.get("files")
    if not isinstance(listed, dict):
        listed = {}
        problems.append(f"{MANIFEST}: files: not an object")
    contents: dict[str, bytes] = {}
    for name, entry in listed.items():
        if name.startswith("/") or ".." in Path(name).parts or "\0" in name:
            problems.append(f"{shown_path(name)}: leads out of the bundle")
            continue
        try:
            content = read_user_bytes(folder / name, max_bytes=2_000_000_000)
        except InputError:
            problems.append(f"{shown_path(name)}: missing")
            continue
        contents[name] = content
        if not isinstance(entry, dict) or hashlib.sha256(content).hexdigest() != entry.get("sha256"):
            problems.append(f"{shown_path(name)}: changed, its SHA-256 is not the manifest's")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in listed and name != MANIFEST:
            problems.append(f"{shown_path(name)}: not in the manifest")
    return contents


def _judged(entry: object, contents: dict[str, bytes], problems: list[str]) -> Judged:
    if not isinstance(entry, dict):
        problems.append(f"{MANIFEST}: judged: an entry is not an object")
        return Judged((), None)
    names = tuple(map(str, _list(entry, "checks", problems)))
    tables: dict[str, list[dict[str, Any]]] = {}
    paths, arguments = entry.get("tables"), entry.get("arguments")
    if not isinstance(paths, dict) or not isinstance(arguments, dict):
        problems.append(f"{MANIFEST}: judged: {', '.join(names)}: no tables or arguments")
        return Judged(names, None)
    for name, path in paths.items():
        if not isinstance(path, str) or path not in contents:
            return Judged(names, None)  # missing: said already, or never listed
        try:
            rows = [parse_json(line) for line in contents[path].split(b"\n") if line.strip()]
        except ValueError as error:
            problems.append(f"{shown_path(path)}: a line is not JSON: {error}")
            return Judged(names, None)
        if not all(isinstance(row, dict) for row in rows):
            problems.append(f"{shown_path(path)}: a line is not an object")
            return Judged(names, None)
        tables[name] = rows
    return Judged(names, Records(str(entry.get("judge")), arguments, tables))


def _list(value: dict[str, Any], key: str, problems: list[str]) -> list[Any]:
    found = value.get(key)
    if isinstance(found, list):
        return found
    problems.append(f"{MANIFEST}: {key}: not a list")
    return []


def _parsed(content: bytes, path: Path) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise InputError(Problem(f"not JSON: {error}", file=shown_path(path))) from None

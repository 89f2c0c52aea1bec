"""AIPerf (NVIDIA's load generator) as the driver of the load on an endpoint, instead of this client.

It pins other versions of libraries than trtspec, so it runs from an environment of its own as a child
process: ``aiperf profile`` with our prompts as request bodies sent verbatim (``raw_payload``), the server's
own token counts, and no network beyond the endpoint. Its per-request records (``profile_export.jsonl``)
become :class:`~trtspec.verify.latency.Timed`, so its runs are judged, also from a bundle, like our client's.

Options and record format are those documented for version 0.13.0, with which it was run against vLLM 0.32
and servers of this repository's tests.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec import process
from trtspec.errors import InputError, MissingError, Problem
from trtspec.prompts import Chat
from trtspec.user_files import parse_json, read_user_bytes, shown_path
from trtspec.verify.endpoint import Endpoint
from trtspec.verify.timed import Timed

VERSION = "0.13.0"
INSTALL = (
    f"it needs an environment of its own: python -m venv aiperf-env && aiperf-env/bin/pip install "
    f"'aiperf=={VERSION}', then --aiperf aiperf-env/bin/aiperf"
)
RECORDS = "profile_export.jsonl"
SUMMARY = "profile_export_aiperf.json"
AIPERF_NOTES = (
    "the load was driven by AIPerf, by its clock and the server's token counts; answers under load are not "
    "compared, so the noise floor is of answers alone",
)
_TOKENIZER = "trtspec/placeholder"
"""AIPerf loads a tokenizer even where the server counts the tokens; its builtin one is downloaded. So it gets
one that knows no word, from a cache of its own, and stays off the network."""
_TOKENIZER_FILES = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{kind}_token": "[UNK]" for kind in ("unk", "bos", "eos")},
    },
}
_MAX_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Driven:
    """One run: its requests, the program's own version ("" where it does not say), and the command."""

    timed: tuple[Timed, ...]
    version: str
    argv: tuple[str, ...]


def find_aiperf(path: Path | None) -> str:
    """The program to run: ``path``, or ``aiperf`` on the PATH. Raises MissingError with how to install it."""
    found = shutil.which("aiperf" if path is None else str(path))
    if found is None:
        name = "aiperf is not on the PATH" if path is None else f"{shown_path(path)}: no such program"
        raise MissingError(f"{name}; {INSTALL}")
    return found


def refuse_for_aiperf(endpoint: Endpoint) -> None:
    """Raise InputError for an endpoint that this driver cannot ask as our own client does."""
    problems = []
    if endpoint.protocol != "openai" or endpoint.raw:
        message = "--driver aiperf speaks OpenAI chat completions here; leave it out for other protocols"
        problems.append(Problem(message, endpoint.url))
    if endpoint.api_key:
        message = "--driver aiperf would show the key on a command line, which others can read; leave it out"
        problems.append(Problem(message, endpoint.url))
    if problems:
        raise InputError(problems)


def aiperf_argv(
    program: str,
    endpoint: Endpoint,
    *,
    payloads: Path,
    artifacts: Path,
    requests: int,
    concurrency: int | None,
    rate_per_s: float | None,
) -> list[str]:
    """``aiperf profile`` for one load: ``concurrency`` at a time, or Poisson arrivals at ``rate_per_s``."""
    if (concurrency is None) == (rate_per_s is None):
        raise ValueError("give exactly one of concurrency and rate_per_s")
    scheme = "https" if endpoint.tls else "http"
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    load = (
        ["--concurrency", str(concurrency)]
        if rate_per_s is None
        else ["--request-rate", f"{rate_per_s:.9g}", "--arrival-pattern", "poisson"]
    )
    return [
        program,
        "profile",
        *("--model", endpoint.model),
        *("--url", f"{scheme}://{host}:{endpoint.port}{endpoint.prefix}"),
        *("--endpoint-type", "chat"),
        "--streaming",
        *("--input-file", str(payloads)),
        *("--custom-dataset-type", "raw_payload"),
        *("--dataset-sampling-strategy", "sequential"),
        *("--request-count", str(requests)),
        *load,
        *("--request-timeout-seconds", f"{20 * endpoint.timeout_s:g}"),
        "--use-server-token-count",
        *("--tokenizer", _TOKENIZER),
        *("--random-seed", "1"),
        *("--artifact-dir", str(artifacts)),
        *("--export-level", "records"),
        *("--ui", "none"),
        "--no-gpu-telemetry",
        "--no-server-metrics",
    ]


def payload_lines(endpoint: Endpoint, chats: Sequence[Chat], max_tokens: int) -> str:
    """A request body a line: greedy and streamed, with the token count at the end, as our client asks."""
    bodies = [
        {
            "model": endpoint.model,
            "messages": list(chat.messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for chat in chats
    ]
    return "".join(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies)


def drive(
    program: str,
    endpoint: Endpoint,
    chats: Sequence[Chat],
    *,
    max_tokens: int,
    requests: int,
    concurrency: int | None,
    rate_per_s: float | None,
) -> Driven:
    """Run one load with AIPerf. Raises InputError for an endpoint that it cannot ask, MissingError where it
    fails or writes what it does not document."""
    refuse_for_aiperf(endpoint)
    with tempfile.TemporaryDirectory(prefix="trtspec-aiperf-") as folder:
        payloads, artifacts = Path(folder) / "payloads.jsonl", Path(folder) / "artifacts"
        payloads.write_text(payload_lines(endpoint, chats, max_tokens), encoding="utf-8")
        argv = aiperf_argv(
            program,
            endpoint,
            payloads=payloads,
            artifacts=artifacts,
            requests=requests,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
        )
        # As long as our own client may take, and the program's start.
        limit = 120 + 20 * endpoint.timeout_s * math.ceil(requests / (concurrency or requests))
        if rate_per_s:
            limit += 3 * requests / rate_per_s
        process.run(argv, env=_environment(Path(folder)), cwd=Path(folder), timeout_s=limit, foreign=True)
        timed, version = read_run(artifacts, requests, open_loop=rate_per_s is not None)
        return Driven(timed, version, tuple(argv))


def _environment(folder: Path) -> dict[str, str]:
    """This process's, offline but for the endpoint, with a cache that holds the placeholder tokenizer."""
    repository = folder / "hub" / f"models--{_TOKENIZER.replace('/', '--')}"
    snapshot = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot)
    place = repository / "snapshots" / snapshot
    place.mkdir(parents=True)
    for name, content in _TOKENIZER_FILES.items():
        (place / name).write_text(json.dumps(content))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub")}
    # It would leave a copy of the prompts of every run in the home and in the folder for temporary files.
    kept = ("AIPERF_DATASET_MMAP_BASE_PATH", "AIPERF_DATASET_MMAP_CACHE_DIR")
    return {**os.environ, **offline, **dict.fromkeys(kept, str(folder / "mmap")), "PYTHONUNBUFFERED": "1"}


def read_run(artifacts: Path, requests: int, *, open_loop: bool = False) -> tuple[tuple[Timed, ...], str]:
    """The requests of a run, in order of sending, and the version that made them. Raises MissingError for
    files that are not there, not as documented, or do not agree with each other."""
    lines = _read(artifacts / RECORDS).split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                record = parse_json(line)
                if record["metadata"].get("benchmark_phase", "profiling") == "profiling":
                    found.append(record)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise _unreadable(f"{RECORDS}: line {number} is no record") from None
    if not found:
        raise _unreadable(f"{RECORDS} holds no requests")
    try:
        timed = timed_from_records(found, open_loop=open_loop)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(f"{RECORDS}: {type(error).__name__}: {error}") from None
    try:
        summary = parse_json(_read(artifacts / SUMMARY))
        version = str(summary.get("aiperf_version", ""))
        counted = summary.get("request_count", {}).get("avg")
        failed = (summary.get("error_request_count") or {}).get("avg") or 0
    except (ValueError, AttributeError) as error:
        raise _unreadable(f"{SUMMARY}: {error}") from None
    good = sum(not one.error for one in timed)
    if counted is not None and round(counted) != good:
        raise _unreadable(f"{SUMMARY} counts {counted:g} good requests, {RECORDS} holds {good}")
    if len(timed) != requests and good + round(failed) != requests:
        raise _unreadable(f"{len(timed)} requests recorded, {requests} were asked for")
    return timed, version


def timed_from_records(records: Sequence[Mapping[str, Any]], *, open_loop: bool = False) -> tuple[Timed, ...]:
    """AIPerf's records of requests as ours: seconds from the first request due, arrivals from time to first
    token and the gaps between chunks (or, without those, the last chunk alone). In an open loop a request is
    due when its credit was issued, as the schedule wanted it; in a closed loop when it was sent."""

    def due_ns(metadata: Mapping[str, Any]) -> int:
        start = int(metadata["request_start_ns"])
        return min(start, int(metadata.get("credit_issued_ns") or start)) if open_loop else start

    zero = min(due_ns(record["metadata"]) for record in records)
    found: list[Timed] = []
    for record in sorted(records, key=lambda one: int(one["metadata"]["request_start_ns"])):
        metadata, metrics = record["metadata"], record.get("metrics") or {}
        sent, ended = ((int(metadata[key]) - zero) / 1e9 for key in ("request_start_ns", "request_end_ns"))
        error = _error(record)
        arrivals = () if error else _arrivals(metrics, sent)
        if not error and not arrivals:
            error = "no text came"
        tokens = _value(metrics, "usage_completion_tokens")
        tokens = _value(metrics, "output_sequence_length") if tokens is None else tokens
        found.append(
            Timed(
                f"request-{metadata.get('session_num', len(found))}",
                (due_ns(metadata) - zero) / 1e9,
                sent,
                arrivals,
                ended if not arrivals else max(ended, arrivals[-1]),
                None if tokens is None or error else round(tokens),
                error,
            )
        )
    return tuple(found)


def _error(record: Mapping[str, Any]) -> str:
    error = record.get("error")
    if isinstance(error, Mapping):
        told = " ".join(str(error[key]) for key in ("code", "type", "message") if error.get(key) is not None)
        return " ".join(told.split())[:200] or "failed"
    if error:
        return " ".join(str(error).split())[:200]
    return "cancelled" if record["metadata"].get("was_cancelled") else ""


def _arrivals(metrics: Mapping[str, Any], sent: float) -> tuple[float, ...]:
    first, whole = (_value(metrics, name) for name in ("time_to_first_token", "request_latency"))
    if first is None:
        return ()
    times = [sent + first / 1e3]
    gaps = (metrics.get("inter_chunk_latency") or {}).get("value")
    if isinstance(gaps, list):
        for gap in gaps:
            times.append(times[-1] + float(gap) / 1e3)
    elif whole is not None and whole > first:
        times.append(sent + whole / 1e3)
    return tuple(times)


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric; times in milliseconds. ValueError for another unit."""
    metric = metrics.get(name)
    if metric is None or metric.get("value") is None:
        return None
    if metric.get("unit", "ms") not in ("ms", "tokens"):
        raise ValueError(f"{name}: unit {metric['unit']!r}, documented are ms and tokens")
    return float(metric["value"])


def _read(path: Path) -> bytes:
    try:
        return read_user_bytes(path, max_bytes=_MAX_BYTES)
    except InputError:
        raise _unreadable(f"it wrote no {path.name}") from None


def _unreadable(what: str) -> MissingError:
    return MissingError(f"aiperf: {what}; this reader knows version {VERSION}: {INSTALL}")

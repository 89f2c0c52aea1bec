"""AIPerf as the driver of a load: its command, its documented records as ours, and a stand-in program that
writes them. The stand-in asks nothing; the real program is run where it is on the PATH."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fake_endpoints import Fake, serving

from trtspec.cli import main
from trtspec.errors import InputError, MissingError
from trtspec.prompts import PROMPTS_FILE, load_chats
from trtspec.verify.aiperf import (
    aiperf_argv,
    drive,
    find_aiperf,
    payload_lines,
    read_run,
    timed_from_records,
)
from trtspec.verify.endpoint import Endpoint, connect

CHATS = load_chats(PROMPTS_FILE, limit=4, sample=True)
END = Endpoint("http://h:8000/v1", "h", 8000, "", False, "openai", "m", 5.0)
S = 1_000_000_000

STAND_IN = '''\
#!{python}
"""Takes the options that AIPerf 0.13.0 documents, no other, and writes its files."""
import argparse, json, os, pathlib, sys

fault = {fault!r}
if sys.argv[1] != "profile":
    sys.exit("error: profile")
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("model", "url", "endpoint-type", "input-file", "custom-dataset-type",
             "dataset-sampling-strategy", "request-count", "concurrency", "request-rate", "arrival-pattern",
             "request-timeout-seconds", "tokenizer", "random-seed", "artifact-dir", "export-level", "ui"):
    parser.add_argument("--" + name)
for name in ("streaming", "use-server-token-count", "no-gpu-telemetry", "no-server-metrics"):
    parser.add_argument("--" + name, action="store_true")
given = parser.parse_args(sys.argv[2:])
bodies = [json.loads(line) for line in open(given.input_file)]
assert all(isinstance(body["messages"], list) for body in bodies)
if fault == "fails":
    print("could not reach the endpoint")
    sys.exit(1)
out = pathlib.Path(given.artifact_dir)
out.mkdir(parents=True)
count = int(given.request_count) - (fault == "few")
start = 1759813207532900363
records = []
for at in range(count):
    sent = start + at * 10_000_000
    records.append({{
        "metadata": {{"session_num": at, "request_start_ns": sent, "request_end_ns": sent + 50_000_000,
                     "benchmark_phase": "profiling", "was_cancelled": False}},
        "metrics": {{"time_to_first_token": {{"value": 20.0, "unit": "ms"}},
                    "request_latency": {{"value": 50.0, "unit": "ms"}},
                    "inter_chunk_latency": {{"value": [10.0, 20.0], "unit": "ms"}},
                    "output_sequence_length": {{"value": 7, "unit": "tokens"}}}},
        "error": None}})
if fault != "no records":
    text = "".join(json.dumps(one) + "\\n" for one in records)
    (out / "profile_export.jsonl").write_text(text + ("not json\\n" if fault == "garbage" else ""))
summary = {{"aiperf_version": "0.13.0", "schema_version": "1.4",
           "request_count": {{"unit": "requests", "avg": float(count + (fault == "disagrees"))}}}}
(out / "profile_export_aiperf.json").write_text(json.dumps(summary))
'''


def stand_in(folder: Path, fault: str = "") -> str:
    path = folder / "aiperf"
    path.write_text(STAND_IN.format(python=sys.executable, fault=fault))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def record(at: int = 0, **changes: Any) -> dict[str, Any]:
    metadata = {"session_num": at, "request_start_ns": 5 * S + at * S, "request_end_ns": 6 * S + at * S}
    metrics = {
        "time_to_first_token": {"value": 200.0, "unit": "ms"},
        "request_latency": {"value": 900.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [300.0, 400.0], "unit": "ms"},
        "output_sequence_length": {"value": 5, "unit": "tokens"},
    }
    made: dict[str, Any] = {"metadata": metadata, "metrics": metrics, "error": None}
    for key, value in changes.items():
        made[key] = {**made[key], **value} if isinstance(made[key], dict) else value
    return made


def test_a_record_is_the_same_request_in_our_terms():
    (one,) = timed_from_records([record()])
    assert one.ttft_s == pytest.approx(0.2)
    assert one.gaps_s == pytest.approx((0.3, 0.4))
    assert one.tpot_s == pytest.approx(0.7 / 4)
    assert one.e2e_s == pytest.approx(1.0)
    assert (one.tokens, one.error, one.due_s, one.sent_s) == (5, "", 0.0, 0.0)


def test_the_server_s_count_goes_first_and_the_schedule_counts_as_due():
    late = record(1, metadata={"credit_issued_ns": 6 * S - S // 2})
    late["metrics"]["usage_completion_tokens"] = {"value": 9, "unit": "tokens"}
    first, second = timed_from_records([late, record(0)], open_loop=True)
    assert (first.request_id, second.request_id) == ("request-0", "request-1")
    assert second.due_s == pytest.approx(0.5)
    assert second.ttft_s == pytest.approx(0.7)
    assert second.tokens == 9
    assert timed_from_records([late, record(0)])[1].due_s == pytest.approx(1.0)  # a closed loop has none


def test_chunks_that_are_not_told_leave_first_and_last():
    one = record()
    del one["metrics"]["inter_chunk_latency"]
    assert timed_from_records([one])[0].arrivals_s == pytest.approx((0.2, 0.9))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"error": {"code": 499, "type": "Cancelled", "message": "after\n0 s"}}, "499 Cancelled after 0 s"),
        ({"metadata": {"was_cancelled": True}}, "cancelled"),
        ({"metrics": {"time_to_first_token": None}}, "no text came"),
    ],
)
def test_a_request_that_failed_has_no_times(changes, told):
    (one,) = timed_from_records([record(**changes)])
    assert (one.error, one.ttft_s, one.tokens) == (told, None, None if changes.get("error") else one.tokens)


def test_a_unit_that_is_not_documented_is_refused():
    with pytest.raises(ValueError, match="unit 's'"):
        timed_from_records([record(metrics={"time_to_first_token": {"value": 0.2, "unit": "s"}})])


def test_the_command_of_both_loops():
    def argv(**load: Any) -> str:
        given: dict[str, Any] = {"concurrency": None, "rate_per_s": None, **load}
        made = aiperf_argv("aiperf", END, payloads=Path("/p"), artifacts=Path("/a"), requests=40, **given)
        return " ".join(made)

    assert argv(concurrency=8) == (
        "aiperf profile --model m --url http://h:8000 --endpoint-type chat --streaming --input-file /p "
        "--custom-dataset-type raw_payload --dataset-sampling-strategy sequential --request-count 40 "
        "--concurrency 8 --request-timeout-seconds 100 --use-server-token-count "
        "--tokenizer trtspec/placeholder --random-seed 1 --artifact-dir /a --export-level records --ui none "
        "--no-gpu-telemetry --no-server-metrics"
    )
    assert "--request-rate 2.5 --arrival-pattern poisson" in argv(rate_per_s=2.5)
    assert "--concurrency" not in argv(rate_per_s=2.5)
    with pytest.raises(ValueError, match="exactly one"):
        argv()


def test_the_bodies_ask_what_our_client_asks():
    bodies = [json.loads(line) for line in payload_lines(END, CHATS, 12).splitlines()]
    assert [body["messages"] for body in bodies] == [list(chat.messages) for chat in CHATS]
    assert {(body["max_tokens"], body["temperature"], body["stream"]) for body in bodies} == {(12, 0, True)}


def test_the_stand_in_is_driven_and_read(tmp_path):
    load = {"max_tokens": 8, "requests": 6, "concurrency": None, "rate_per_s": 100.0}
    driven = drive(stand_in(tmp_path), END, CHATS, **load)
    assert driven.version == "0.13.0"
    assert len(driven.timed) == 6
    assert {one.tokens for one in driven.timed} == {7}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("fails", "could not reach the endpoint"),
        ("no records", "wrote no profile_export.jsonl"),
        ("garbage", "line 7 is no record"),
        ("few", "5 requests recorded, 6 were asked for"),
        ("disagrees", "counts 7 good requests"),
    ],
)
def test_a_run_that_went_wrong_is_no_measurement(tmp_path, fault, told):
    load = {"max_tokens": 8, "requests": 6, "concurrency": 2, "rate_per_s": None}
    with pytest.raises(MissingError, match=told):
        drive(stand_in(tmp_path, fault), END, CHATS, **load)


def test_nothing_there_and_nothing_that_fits_is_told(tmp_path):
    with pytest.raises(MissingError, match=r"pip install 'aiperf==0\.13\.0'"):
        find_aiperf(tmp_path / "aiperf")
    with pytest.raises(MissingError, match="wrote no"):
        read_run(tmp_path, 1)
    with serving(Fake("llmapi")) as (url,), pytest.raises(InputError, match="OpenAI chat"):
        drive("x", connect(url), CHATS, max_tokens=4, requests=2, concurrency=1, rate_per_s=None)


def test_verify_with_the_driver_and_its_bundle(tmp_path, capsys):
    program = stand_in(tmp_path)
    with serving(Fake(per_step=2), Fake()) as (mine, baseline):
        given = ["verify", "--url", mine, "--baseline-url", baseline, "--num-prompts", "4", "--rounds", "1"]
        given += ["--max-new-tokens", "8", "--requests", "10", "--concurrency", "4", "--driver", "aiperf"]
        assert main([*given, "--aiperf", str(tmp_path / "none")]) == 3
        assert "aiperf-env" in capsys.readouterr().err
        main([*given, "--aiperf", program, "--json", "--bundle", str(tmp_path / "b")])
        report = json.loads(capsys.readouterr().out)["report"]
    latency = next(one for one in report["checks"] if one["name"] == "latency_url")
    assert latency["evidence"]["loads"] == ["4 at a time, driven by AIPerf"]
    assert latency["evidence"]["latency"]["TTFT"]["p50_ms"] == pytest.approx(20.0)
    assert report["tools"]["aiperf"] == "0.13.0"
    assert "raw_payload" in report["settings"]["url_aiperf"]
    assert any("AIPerf" in note for note in report["notes"])
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 0
    assert main(["verify", "--url", mine, "--baseline-url", mine, "--aiperf", program]) == 2


@pytest.mark.skipif(shutil.which("aiperf") is None, reason="AIPerf is not on the PATH")
@pytest.mark.parametrize("load", [{"concurrency": 4}, {"rate_per_s": 20.0}])
def test_the_real_program(load):
    with serving(Fake(per_step=2, step_s=0.005)) as (url,):
        given: dict[str, Any] = {"concurrency": None, "rate_per_s": None, **load}
        driven = drive(find_aiperf(None), connect(url), CHATS, max_tokens=12, requests=12, **given)
    assert [(one.tokens, len(one.arrivals_s), one.error) for one in driven.timed] == [(12, 6, "")] * 12
    # Pieces that a busy client reads late come together: the usual gap is that of a step.
    assert median(gap for one in driven.timed for gap in one.gaps_s) > 0.003

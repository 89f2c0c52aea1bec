"""Two endpoints against each other: real HTTP servers of both protocols, and faults that must be caught."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from fake_endpoints import Fake, serving

from trtspec.errors import InputError, MissingError
from trtspec.prompts import PROMPTS_FILE, Chat, load_chats
from trtspec.verify.arrivals import closed_loop, open_loop, poisson_times
from trtspec.verify.bundle import write_bundle
from trtspec.verify.endpoint import connect
from trtspec.verify.endpoint_check import EndpointSettings, verify_endpoints
from trtspec.verify.endpoint_sampled import DrawSettings
from trtspec.verify.endpoint_verdict import judge_endpoints
from trtspec.verify.gates import Verdict
from trtspec.verify.load_prompts import stream_of_chats
from trtspec.verify.recheck import recheck

SMALL = EndpointSettings(
    num_prompts=8, max_new_tokens=12, rounds=2, requests=10, concurrency=4, parameters=False
)
CHATS = load_chats(PROMPTS_FILE, limit=8, sample=True)


def judged(mine: Fake, baseline: Fake, settings: EndpointSettings = SMALL, **named):
    with serving(mine, baseline) as urls:
        ends = [connect(url, timeout_s=5.0, **named) for url in urls]
        report = verify_endpoints(*ends, CHATS, settings)
    return report, {check.name: check for check in report.checks}


@pytest.mark.parametrize("protocol", ["openai", "llmapi", "ensemble"])
def test_a_faster_server_with_the_same_answers_passes(protocol, tmp_path):
    slow = 0.004
    report, checks = judged(
        Fake(protocol, per_step=3, step_s=slow, counters=True), Fake(protocol, step_s=slow, counters=True)
    )
    assert checks["lossless"].verdict is Verdict.PASS
    assert checks["lossless"].evidence["compared"] == ("token ids" if protocol == "openai" else "text")
    assert report.exit_code == 0
    assert checks["speedup"].verdict is Verdict.MEASURED
    assert checks["speedup"].measured > 1.2
    assert checks["token_counter"].verdict is Verdict.MEASURED
    if protocol != "ensemble":  # which tells no drafts
        assert checks["acceptance"].measured == pytest.approx(3.0, abs=0.01)
        assert checks["baseline_without_speculation"].verdict is Verdict.MEASURED
    assert checks["quality"].verdict is Verdict.SKIPPED
    assert {"latency_url", "latency_baseline"} <= set(checks)
    latency = checks["latency_url"].evidence["latency"]
    assert latency["TTFT"]["p99_ms"] is None  # ten requests do not show a p99
    write_bundle(tmp_path / "b", report)
    again = recheck(tmp_path / "b")
    assert (again.problems, again.exit_code) == ((), 0), again
    assert {one.check for one in again.findings if one.status == "no records"} == {
        "quality",
        "lossless_float64",
        "sampled",
        "sampling_parameters",
    }


@pytest.mark.parametrize("protocol", ["openai", "llmapi"])
@pytest.mark.parametrize(
    ("fault", "check", "verdict"),
    [
        ({"lossy": True}, "lossless", Verdict.FAIL),
        ({"short": True}, "lossless", Verdict.FAIL),
        ({"inflate": 5}, "token_counter", Verdict.ERROR),
    ],
)
def test_planted_faults_are_caught(protocol, fault, check, verdict):
    report, checks = judged(Fake(protocol, per_step=2, **fault), Fake(protocol))
    assert checks[check].verdict is verdict, checks[check].summary
    assert report.exit_code == 1


def test_a_counter_that_runs_ahead_is_caught_without_token_ids_too():
    _, checks = judged(Fake(ids=False, inflate=2), Fake(ids=False))
    assert checks["token_counter"].verdict is Verdict.ERROR
    assert "the same text" in checks["token_counter"].summary or "claimed" in checks["token_counter"].summary


def test_a_slow_server_fails_the_gate_and_a_sleep_in_the_baseline_is_no_speedup():
    gate = EndpointSettings(**{**vars(SMALL), "min_speedup": 1.0, "max_new_tokens": 6})
    report, checks = judged(Fake(step_s=0.02), Fake(step_s=0.001), gate)
    assert checks["speedup"].verdict is Verdict.FAIL
    assert report.exit_code == 1
    slept = Fake(step_s=0.03, counters=True)
    _, checks = judged(Fake(per_step=2, step_s=0.001, counters=True), slept, gate)
    assert checks["speedup"].verdict is Verdict.ERROR
    assert "more than 2.00 tokens a step" in checks["speedup"].summary


def test_a_baseline_that_speculates_is_none():
    _, checks = judged(Fake("llmapi", per_step=3), Fake("llmapi", per_step=3))
    assert checks["baseline_without_speculation"].verdict is Verdict.ERROR


def test_more_tokens_a_step_than_a_step_drafts_are_refused():
    settings = EndpointSettings(**{**vars(SMALL), "draft_tokens": 2})
    _, checks = judged(Fake("llmapi", per_step=4), Fake("llmapi"), settings)
    assert checks["acceptance"].verdict is Verdict.ERROR
    assert "at most 3" in checks["acceptance"].summary


def test_noise_of_the_baseline_is_no_fault_of_the_other():
    # Both answer otherwise under load: as much on one side as on the other.
    _, checks = judged(Fake(noise=True, per_step=2, step_s=0.004), Fake(noise=True, step_s=0.004))
    assert checks["lossless"].verdict is Verdict.PASS
    assert checks["lossless"].evidence["floor"] > 0


def test_margins_of_the_baseline_tell_ties_from_faults():
    few = EndpointSettings(**{**vars(SMALL), "rounds": 1})
    # A slip where the best token leads by far: a fault, however few prompts.
    with serving(Fake(lossy=True), Fake(margin=6.0)) as urls:
        report = verify_endpoints(*map(connect, urls), CHATS[:3], few)
    assert report.checks[0].verdict is Verdict.FAIL
    assert "no rounding" in report.checks[0].summary
    # The same slip at ties, and none that the baseline has: three prompts do not tell.
    with serving(Fake(lossy=True), Fake(margin=0.01)) as urls:
        report = verify_endpoints(*map(connect, urls), CHATS[:3], few)
    assert report.checks[0].verdict is Verdict.INCONCLUSIVE
    assert "top-2 margin 0.01" in report.checks[0].details[0]
    # Ties that the baseline takes otherwise too, when it is asked under load.
    noisy = {"noise": True, "margin": 0.01, "step_s": 0.004}
    _, checks = judged(Fake(per_step=2, alone_too=True, **noisy), Fake(**noisy))
    assert checks["lossless"].verdict is Verdict.PASS
    assert "numeric ties only" in checks["lossless"].summary


def test_what_a_server_refuses_is_left_out_and_what_it_does_not_tell_is_skipped():
    _, checks = judged(
        Fake(refuse=("return_token_ids",), usage=False), Fake(refuse=("stream_options",), ids=False)
    )
    assert checks["lossless"].verdict is Verdict.PASS
    assert checks["lossless"].evidence["compared"] == "text"
    assert checks["acceptance"].verdict is Verdict.SKIPPED
    assert checks["token_counter"].verdict is Verdict.SKIPPED


def test_a_chat_server_and_triton_get_the_same_prompt():
    report, checks = judged(Fake("openai", per_step=2), Fake("llmapi"))
    assert checks["lossless"].verdict is Verdict.PASS
    assert "no chat template" in report.settings["url_endpoint"]


def test_requests_that_fail_are_counted_not_raised():
    report, checks = judged(Fake(failing=True), Fake())
    assert checks["lossless"].warnings or checks["lossless"].verdict is Verdict.ERROR
    assert report.exit_code != 0 or checks["latency_url"].evidence["rates"]["failed"] > 0


def test_errors_are_one_line_and_every_wait_ends():
    with pytest.raises(MissingError, match="nothing answers"):
        connect("http://127.0.0.1:9", timeout_s=1.0)
    for bad in ("ftp://x", "http://", "http://u:p@h", "http://h:99999", "http://a b", "http://h/?q=1"):
        with pytest.raises(InputError):
            connect(bad, timeout_s=1.0)
    with serving(Fake(silent=True), Fake(garbage=True), Fake(key="k"), Fake()) as urls:
        for url, text in zip(urls[:2], ("no answer for 0.3 s", "no JSON object"), strict=True):
            with pytest.raises(MissingError, match=text):
                verify_endpoints(connect(url, timeout_s=0.3), connect(urls[3]), CHATS, SMALL)
        with pytest.raises(MissingError, match="wants a key"):
            connect(urls[2])
        connect(urls[2], api_key="k")
        with pytest.raises(InputError, match="no model 'other' there; it has: hash"):
            connect(urls[3], model="other")
        with pytest.raises(InputError, match=r"no model .hash. there|neither"):
            connect(urls[3], protocol="triton")


def test_the_command_line(tmp_path, capsys):
    from trtspec.cli import main

    with serving(Fake(per_step=2), Fake()) as urls:
        given = ["verify", "--url", urls[0], "--baseline-url", urls[1], "--quick", "--num-prompts", "4"]
        more = ["--requests", "8", "--slo-ttft-ms", "2000", "--max-new-tokens", "8"]
        more += ["--sampled-prompts", "1", "--bias", "0.9", "--acceptance", "strict"]
        assert main([*given, *more, "--json", "--html", str(tmp_path / "r.html")]) == 0
        report = json.loads(capsys.readouterr().out)["report"]
        assert report["verdict"] == "PASS"
        assert "goodput_url" in [check["name"] for check in report["checks"]]
        assert main([*given, "--rate", "3", "--concurrency", "2", "--exact-prompts", "2"]) == 2
        told = capsys.readouterr().err
        assert "not both" in told
        assert "--exact-prompts needs an ENGINE" in told
        assert main(["verify", "--url", urls[0]]) == 2


def test_an_open_loop_sends_on_time_and_a_closed_one_holds_its_number():
    times = poisson_times(4000, 50.0, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.06)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert spread == pytest.approx(mean**2, rel=0.15)  # exponential: variance is the mean squared
    import threading
    import time

    lock, now, most = threading.Lock(), [0], [0]

    def send(number, due):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return number, due

    assert [number for number, _ in closed_loop(send, 12, 3)] == list(range(12))
    assert most[0] == 3
    assert [due is not None for _, due in open_loop(send, [0.0, 0.01], time.perf_counter)] == [True, True]


def test_throughput_under_load_is_measured_in_turn_gated_and_judged_again(tmp_path):
    turns = {"requests": 96, "concurrency": 4, "rounds": 1, "max_new_tokens": 6}
    gates = {"min_speedup_under_load": 0.1, "min_tokens_per_s": 0.1}  # far off: machines are busy
    settings = EndpointSettings(**{**vars(SMALL), **turns, **gates})
    sides = Fake(per_step=3, step_s=0.005, counters=True), Fake(step_s=0.005)
    report, checks = judged(*sides, settings)
    for name in ("throughput", "speedup_under_load"):
        assert checks[name].verdict is Verdict.PASS, checks[name].summary
        assert checks[name].evidence["interleaved"]
    assert checks["speedup_under_load"].measured > 1.1
    write_bundle(tmp_path / "b", report)
    assert recheck(tmp_path / "b").problems == ()
    gates = {"min_speedup_under_load": 30.0, "min_tokens_per_s": 1e6}
    report, checks = judged(*sides, EndpointSettings(**{**vars(SMALL), **turns, **gates}))
    assert {checks[name].verdict for name in ("throughput", "speedup_under_load")} == {Verdict.FAIL}
    assert report.exit_code == 1


def test_no_prompt_of_the_load_is_in_a_prefix_cache():
    chats = load_chats(PROMPTS_FILE, limit=3)
    fresh = stream_of_chats(chats, 9, "a1")
    assert [chat.id for chat in fresh] == [chat.id for chat in chats] * 3
    texts = [chat.text for chat in fresh]
    assert len({text[:7] for text in texts}) == 9  # none shares its beginning with another
    assert all(text.endswith(chat.text) for text, chat in zip(texts, chats * 3, strict=True))
    system = Chat("a", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}))
    (one,) = stream_of_chats([system], 1, "a1")
    assert one.messages[0] == system.messages[0]  # servers share it, and so does the load
    assert one.messages[1]["content"] == "[a1-1] Hi"
    assert stream_of_chats(chats, 1, "a1") != stream_of_chats(
        chats, 1, "b2"
    )  # nor is it in that of another run
    sides = Fake(counters=True), Fake(counters=True)
    _, checks = judged(*sides, EndpointSettings(**{**vars(SMALL), "rounds": 1}))
    replies = checks["lossless"].records.tables["replies"]
    alone = {row["request_id"]: row["text"] for row in replies if row["at"] == "alone"}
    assert all(row["text"] == alone[row["request_id"]] for row in replies if row["at"] == "load")
    assert all(row["text"] != alone[row["request_id"]] for row in replies if row["at"] == "timed")


def test_equal_answers_of_a_server_that_drafts_nothing_show_nothing_of_speculation():
    report, checks = judged(Fake(counters=True), Fake(counters=True))
    assert checks["lossless"].verdict is Verdict.INCONCLUSIVE
    assert "is it turned on there?" in checks["lossless"].summary
    assert report.exit_code == 4
    _, checks = judged(Fake(per_step=2, counters=True), Fake(counters=True))
    assert checks["lossless"].verdict is Verdict.PASS


def test_margins_far_wider_than_the_baselines_own_are_no_ties():
    few = EndpointSettings(**{**vars(SMALL), "rounds": 1})

    def rows(own: int) -> list[dict]:
        """Eight prompts: url answers all of them otherwise, the baseline ``own`` of them when asked again."""
        told = {"round": 0, "seconds": 1.0, "tokens": 1, "error": "", "finish_reason": "length", "pieces": 1}
        told |= dict.fromkeys(
            ("drafted", "accepted", "tokens_per_step", "emitted", "prompt_tokens", "prompt_token_ids")
        )
        return [
            {
                **told,
                "side": side,
                "at": at,
                "request_id": f"p{number}",
                "text": "ab"[token],
                "token_ids": [token],
            }
            for number in range(8)
            for side, at, token in (
                *(("url", at, 1) for at in ("alone", "load")),
                ("baseline", "alone", 0),
                ("baseline", "load", int(number < own)),
            )
        ]

    def check(own: int, url: float, floor: float):
        margins = [
            {"request_id": f"p{number}", "token": 0, "at": 0, "nats": floor if number < own else url}
            for number in range(8)
        ]
        return judge_endpoints(
            rows(own), margins=margins, load="", max_new_tokens=few.max_new_tokens, draft_tokens=None,
            min_speedup=None, counters={},
        )[0]  # fmt: skip

    assert check(4, 2.0, 0.1).verdict is Verdict.FAIL
    assert "no rounding does that" in check(4, 2.0, 0.1).summary
    assert check(4, 0.3, 0.1).verdict is Verdict.INCONCLUSIVE  # wider, but as rounding can be
    assert check(1, 2.0, 0.1).verdict is Verdict.INCONCLUSIVE  # one place tells little of the floor's width


def test_what_was_asked_before_ctrl_c_is_judged():
    settings = EndpointSettings(
        **{**vars(SMALL), "rounds": 1, "parameters": True, "draws": DrawSettings(bias=0.3)}
    )

    def stop(stage: str, done: int, total: int) -> None:
        if stage.startswith("sampled"):
            raise KeyboardInterrupt

    with serving(Fake(per_step=2, counters=True), Fake(counters=True)) as urls:
        ends = [connect(url, timeout_s=5.0) for url in urls]
        report = verify_endpoints(*ends, CHATS, settings, on_progress=stop)
    checks = {check.name: check for check in report.checks}
    assert checks["lossless"].verdict is Verdict.PASS
    for name in ("sampled", "sampling_parameters"):
        assert (checks[name].verdict, checks[name].required) == (Verdict.SKIPPED, True)
        assert "Ctrl-C" in checks[name].summary
    assert report.exit_code == 4  # never a pass
    assert any("stopped by Ctrl-C" in note for note in report.notes)

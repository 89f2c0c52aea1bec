"""What vLLM 0.32 really answered (recorded_vllm_0_32.json), read by the client and judged."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trtspec.errors import MissingError
from trtspec.prompts import Chat
from trtspec.verify.arrivals import giving_up, poisson_times
from trtspec.verify.endpoint import ask, connect, learn, lost, not_asked
from trtspec.verify.endpoint_acceptance import judge_acceptance, judge_comparable, judge_plain_baseline
from trtspec.verify.endpoint_check import reply_row
from trtspec.verify.endpoint_labels import PARAMETERS, judge_endpoint_parameters
from trtspec.verify.endpoint_margins import margins, scored_margins
from trtspec.verify.endpoint_verdict import judge_endpoints
from trtspec.verify.gates import Verdict
from trtspec.verify.latency import judge_latency, oversaturated, throttled
from trtspec.verify.server_counters import draft_counters, grown
from trtspec.verify.timed import Timed, timed_rows

RECORDED = json.loads((Path(__file__).parent / "recorded_vllm_0_32.json").read_text())["exchanges"]
CHAT = Chat("one-two", ({"role": "user", "content": "Say one two one two one two one two."},))


@contextmanager
def replayed(**of_path: str):
    """The URL of a server that answers each path (slashes as underscores) with a recorded exchange."""
    known = {"version": "version", "v1_models": "models", "metrics": "metrics_before", **of_path}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            name = known.get(self.path.strip("/").replace("/", "_"))
            found = RECORDED.get(name, {"status": 404, "type": "application/json", "body": "{}"})
            self.send_response(found["status"])
            self.send_header("Content-Type", found["type"] or "text/plain")
            self.end_headers()
            self.wfile.write(found["body"].encode())

        do_POST = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def asked(url: str, *, raw: bool = False, max_tokens: int = 12):
    endpoint = replace(connect(url, timeout_s=5), raw=raw)
    return endpoint, ask(endpoint, CHAT, max_tokens=max_tokens, clock=time.perf_counter)


def grown_between(before: str, after: str):
    counters = []
    for name in (before, after):
        with replayed(metrics=name) as url:
            counters.append(draft_counters(connect(url)))
    return grown(*counters)


@pytest.mark.parametrize(("raw", "name"), [(False, "chat"), (True, "completion")])
def test_a_stream_of_vllm_is_read_whole(raw, name):
    with replayed(v1_chat_completions="chat", v1_completions="completion") as url:
        endpoint, reply = asked(url, raw=raw)
    assert (endpoint.protocol, endpoint.model, endpoint.server) == ("openai", "smollm2", "vllm 0.32.0")
    assert reply.timed.error == ""
    assert reply.finish_reason == "length"
    assert reply.text.strip()
    assert len(reply.token_ids) == reply.timed.tokens == sum(reply.emitted) == 12
    assert (max(reply.emitted) > 1) == raw  # a step that accepted drafts comes as one event
    assert reply.prompt_tokens == len(reply.prompt_token_ids)
    assert f'"prompt_tokens":{reply.prompt_tokens}' in RECORDED[name]["body"]


def test_tokens_a_step_follow_from_vllms_counters_and_others_are_noticed():
    with replayed(v1_chat_completions="chat", v1_completions="completion") as url:
        rows = [reply_row(asked(url, raw=raw)[1], "url", "alone", int(raw)) for raw in (False, True)]
    counted = grown_between("metrics_before", "metrics_after")
    assert counted["generated"] == 24
    assert counted["accepted"] > 0
    check = judge_acceptance(rows, counted, 4)
    steps = 24 - counted["accepted"]
    assert check.measured == pytest.approx(24 / steps)
    assert check.evidence["accepted_by_position"][0] >= check.evidence["accepted_by_position"][-1]
    # Alone the server did not lag: an event is a step.
    assert sum(len(row["emitted"]) for row in rows) == pytest.approx(steps, abs=2)
    others = judge_acceptance(rows, {**counted, "generated": 240.0, "accepted": 200.0}, 4)
    assert "others use it" in others.how
    assert others.measured < 3
    assert "drafting_steps" not in others.evidence
    assert "started anew" in judge_acceptance(rows, {**counted, "generated": -5.0}, 4).how


def test_a_vllm_without_draft_counters_does_not_speculate():
    plain = grown_between("metrics_plain", "metrics_plain")
    assert judge_plain_baseline([], plain).verdict is Verdict.MEASURED
    drafting = grown_between("metrics_before", "metrics_after")
    assert judge_plain_baseline([], drafting).verdict is Verdict.ERROR
    assert judge_plain_baseline([], None).verdict is Verdict.SKIPPED


def test_margins_of_vllm_in_three_forms():
    with replayed(v1_chat_completions="chat_logprobs") as url:
        found = margins(connect(url), CHAT, max_tokens=6)
    told = json.loads(RECORDED["chat_logprobs"]["body"])["choices"][0]
    text = "".join(token for token, _ in found)
    assert text == told["message"]["content"]
    assert "" in [token for token, _ in found]  # one that ends within a character
    assert all(nats >= 0 for _, nats in found)
    with replayed(v1_completions="completion_logprobs") as url:
        endpoint = replace(connect(url), raw=True)
        assert len(margins(endpoint, CHAT, max_tokens=3)) == 3
    ids = RECORDED["prompt_logprobs"]["request"][2]["prompt"]
    with replayed(v1_completions="prompt_logprobs") as url:
        scored = scored_margins(connect(url), ids[:1], ids[1:])
        assert scored_margins(connect(url), ids[:1], ids[1:-1]) is None  # of another text
    assert scored[0] == (" two", pytest.approx(1.5))  # "-" leads "," by that; the given token is 688th


def test_an_engine_that_dies_and_refusals_are_errors_in_its_own_words():
    with replayed(v1_chat_completions="died") as url:
        assert asked(url)[1].timed.error.startswith("EngineCore encountered an issue")
    with replayed(v1_chat_completions="too_long") as url:
        endpoint, reply = asked(url)
        assert reply.timed.error.startswith("HTTP 400: max_tokens=99999 cannot be greater than max_model_len")
        with pytest.raises(MissingError, match="max_model_len"):
            learn(endpoint, CHAT)
    with replayed(v1_models="busy") as url:
        RECORDED["busy"] = {"status": 503, "type": "text/plain", "body": "loading"}
        with pytest.raises(MissingError, match="HTTP 503: loading"):
            connect(url)


def row(side: str, key: str, **more):
    known = {
        "at": "alone",
        "round": 0,
        "seconds": 1.0,
        "pieces": 2,
        "tokens": 3,
        "error": "",
        "text": "a b c",
    }
    none = ("token_ids", "finish_reason", "drafted", "accepted", "tokens_per_step", "emitted")
    return {"side": side, "request_id": key, **known, **dict.fromkeys(none), **more}


def test_what_cannot_be_compared_is_refused():
    same = {"url": "vllm 0.32.0", "baseline": "vllm 0.32.0"}
    rows = [row(side, f"p{i}", prompt_tokens=9 + i) for side in same for i in range(3)]
    assert judge_comparable(rows, same).verdict is Verdict.MEASURED
    other = judge_comparable(rows, {**same, "baseline": "triton"})
    assert other.verdict is Verdict.ERROR
    assert other.required
    assert "unequal baselines" in other.summary
    assert judge_comparable(rows, {**same, "baseline": "somebody"}).verdict is Verdict.MEASURED
    assert judge_comparable(rows, {**same, "baseline": "vllm 0.31.0"}).warnings
    rows[-1]["prompt_tokens"] = 50  # another chat template
    assert "1 prompts are other tokens" in judge_comparable(rows, same).summary
    text = [[1, 2, *((7 * i + j) % 90 for j in range(60)), 3] for i in range(6)]
    noise = [[1, 2, *((7919 * (60 * i + j)) % 49152 for j in range(60)), 3] for i in range(6)]
    for prompts, verdict in ((text, Verdict.MEASURED), (noise, Verdict.ERROR)):
        listed = [row("url", f"p{i}", prompt_token_ids=one) for i, one in enumerate(prompts)]
        assert judge_comparable(listed, same).verdict is verdict


def test_requests_that_failed_are_no_pass():
    rows = [{**row(side, f"p{i}"), "text": f"text {i}"} for side in ("url", "baseline") for i in range(8)]
    arguments = {"load": "", "max_new_tokens": 3, "draft_tokens": None, "min_speedup": None, "counters": {}}
    assert judge_endpoints(rows, **arguments)[0].verdict is Verdict.PASS
    rows[0]["error"] = "the server closed the connection"
    check = judge_endpoints(rows, **arguments)[0]
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "1 requests failed" in check.summary


def test_a_server_that_died_is_not_asked_on():
    sent = []

    def send(number, due):
        sent.append(number)
        error = "no answer for 60 s; gave up (--timeout)" if number >= 3 else ""
        return replace(not_asked(CHAT, 0.0, due, ""), timed=Timed("p", 0, 0, (), 1, None, error))

    ask_on = giving_up(send, lost, lambda number, due, why: not_asked(CHAT, 0.0, due, why))
    replies = [ask_on(number, None) for number in range(20)]
    assert sent == list(range(8))
    assert "not asked, as those before failed: no answer for 60 s" in replies[-1].timed.error
    assert lost(replies[3])
    assert not lost(replies[0])


def open_run(rate: float, served_per_s: float, batch: bool, count: int = 120) -> list[Timed]:
    """Of a server that queues, or that takes all into one ever slower batch."""
    found, free = [], 0.0
    for number, due in enumerate(poisson_times(count, rate, seed=3)):
        free = max(free, due) + 1 / served_per_s
        first = due + 0.1 if batch else free - 0.5 / served_per_s
        found.append(Timed(str(number), due, due, (first, free + 0.2), free + 0.2, 12))
    return found


@pytest.mark.parametrize("batch", [True, False])
def test_over_saturation_shows_in_waiting_or_in_requests_in_flight(batch):
    beyond, below = open_run(10.0, 6.0, batch), open_run(5.0, 10.0, batch)
    assert oversaturated(beyond, 10.0).startswith("over-saturated")
    assert oversaturated(below, 5.0) == ""
    if batch:
        assert "in flight" in oversaturated(beyond, 10.0)
        assert throttled(beyond)  # which it looks like, but the load grew
    check = judge_latency(
        timed_rows(beyond), name="url", side="url", load="", concurrency=None, rate_per_s=10.0,
        objectives={}, bound=None,
    )[0]  # fmt: skip
    assert [word for word in check.warnings if "throttling" in word] == []


def test_a_server_that_died_of_top_k_ignores_nothing_that_it_was_not_asked():
    # As vLLM 0.32 does with n-grams on a CPU: its engine ends at top_k 1.
    answered = {
        "text": "a b c",
        "token_ids": [1, 2, 3],
        "tokens": 3,
        "drafted": None,
        "answers": 2,
        "finish_reason": None,
    }

    def probes(side, names):
        asked = {"stop": [], "max_tokens": 3}
        return [
            {"side": side, "probe": name, "request_id": f"p{i}", "asked": asked, "error": "", **answered}
            for name in names
            for i in range(4)
        ]

    mine = probes("url", ("greedy", "seed", "cold", "hot", "top_k"))
    for one in mine[-2:]:
        one["error"] = "EngineCore encountered an issue"
    every = ("greedy", "seed", "cold", "hot", "top_k", "top_p", "seed again", "other seed", "max_tokens", "n")
    check = judge_endpoint_parameters(
        [*mine, *probes("baseline", every)],
        taken={side: list(PARAMETERS) for side in ("url", "baseline")},
        acceptance=None,
        drafted=3.0,
    )
    assert check.verdict is Verdict.INCONCLUSIVE
    assert "url stopped answering when asked for top_k: EngineCore" in check.summary
    assert not any("IGNORED" in line for line in check.details)
    assert sum("url: not asked any more" in line for line in check.details) == 4

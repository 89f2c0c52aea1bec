"""Loads against servers that hang or are gone: an interrupted program ends, and no time is no division."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from trtspec.verify.arrivals import closed_loop, open_loop
from trtspec.verify.latency import judge_latency
from trtspec.verify.timed import Objectives, Timed, rates, timed_rows

PROGRAM = """
import sys, time
from trtspec.verify.arrivals import closed_loop, open_loop
def send(number, due):
    print("sent", flush=True)
    time.sleep(60)
if sys.argv[1] == "closed":
    closed_loop(send, 8, 4)
else:
    open_loop(send, [0.0, 0.0, 90.0], time.perf_counter)
"""


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_ctrl_c_does_not_wait_for_requests_in_flight(loop: str):
    with subprocess.Popen([sys.executable, "-c", PROGRAM, loop], stdout=-1, stderr=-1, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "sent\n"
            time.sleep(0.1)
            began = time.monotonic()
            program.send_signal(signal.SIGINT)
            _, said = program.communicate(timeout=20)
            assert time.monotonic() - began < 10
            assert said.rstrip().endswith("KeyboardInterrupt")
        finally:
            program.kill()


def test_what_a_request_raises_is_raised_and_ends_the_load():
    sent = []

    def send(number: int, due: float | None) -> int:
        sent.append(number)
        if number == 1:
            raise LookupError("a mistake of ours")
        return number

    with pytest.raises(LookupError, match="a mistake of ours"):
        closed_loop(send, 1000, 1)
    assert sent == [0, 1]
    with pytest.raises(LookupError):
        open_loop(send, [0.0, 0.0, 30.0], time.perf_counter)


def test_more_slots_than_requests_are_as_many_as_requests():
    assert closed_loop(lambda number, due: number, 3, 10**9) == [0, 1, 2]
    assert closed_loop(lambda number, due: number, 0, 4) == []


def test_requests_that_were_given_up_took_no_time():
    given_up = Timed("a", 5.0, 5.0, (), 5.0, None, "not asked, as those before failed: nothing answers there")
    found = rates([given_up], Objectives())
    assert (found.duration_s, found.ended_per_s, found.requests_per_s) == (0.0, 0.0, 0.0)
    for concurrency, rate in ((1, None), (None, 2.0)):
        checks = judge_latency(
            timed_rows([given_up, given_up]),
            name="url",
            side="url",
            load="1 at a time",
            concurrency=concurrency,
            rate_per_s=rate,
            objectives={"ttft_s": 1.0},
            bound=0.5,
        )
        assert "2 of 2 failed" in checks[0].summary or "1 of 1 failed" in checks[0].summary

"""How a load arrives: so many requests in flight (closed loop), or at times of their own (open loop)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Reply = TypeVar("_Reply")


def giving_up(
    send: Callable[[int, float | None], _Reply],
    lost: Callable[[_Reply], str],
    unasked: Callable[[int, float | None, str], _Reply],
    most: int = 5,
) -> Callable[[int, float | None], _Reply]:
    """``send`` until ``most`` requests in a row found no server (``lost`` says why, or ""); from then on
    ``unasked(number, due, why)`` instead. A server that hangs would else cost a time-out a request."""
    failures, lock = 0, threading.Lock()
    why = ""

    def one(number: int, due: float | None) -> _Reply:
        nonlocal failures, why
        if failures >= most:
            return unasked(number, due, why)
        reply = send(number, due)
        with lock:
            why = lost(reply)
            failures = failures + 1 if why else 0
        return reply

    return one


def closed_loop(
    send: Callable[[int, float | None], _Reply],
    count: int,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[_Reply]:
    """``count`` requests, ``concurrency`` of them in flight at any time. ``send(number, None)`` asks one."""
    done, lock = 0, threading.Lock()

    def one(number: int) -> _Reply:
        nonlocal done
        reply = send(number, None)
        with lock:
            done += 1
            on_progress(done, count)
        return reply

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        return list(pool.map(one, range(count)))


def poisson_times(count: int, rate_per_s: float, seed: int) -> list[float]:
    """When the requests of an open loop are due, in seconds: a Poisson process, so gaps are exponential."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate_per_s)
    return times


def open_loop(
    send: Callable[[int, float | None], _Reply],
    times_s: Sequence[float],
    clock: Callable[[], float],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[_Reply]:
    """A request at each of ``times_s`` from now on, whatever became of those before: a slow server meets a
    growing queue, as in life. ``send(number, due)`` asks one."""
    began = clock()
    with ThreadPoolExecutor(max_workers=min(len(times_s), 512)) as pool:
        futures = []
        for number, at in enumerate(times_s):
            wait = began + at - clock()
            if wait > 0:
                time.sleep(wait)
            futures.append(pool.submit(send, number, began + at))
            on_progress(number + 1, len(times_s))
        return [future.result() for future in futures]

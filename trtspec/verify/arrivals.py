"""How a load arrives: so many requests in flight (closed loop), or at times of their own (open loop)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from trtspec.errors import MissingError

_Reply = TypeVar("_Reply")
_MOST_IN_FLIGHT = 512
"""Of an open loop; more wait, which :func:`trtspec.verify.latency.late_client` tells."""


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


class _Crew:
    """Threads that an interrupted program does not wait for: requests in flight end when a server likes.
    (Those of :mod:`concurrent.futures` are joined when Python ends.)"""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._wrong: list[BaseException] = []
        self.ended = threading.Event()

    def start(self, work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                self._wrong.append(error)
                self.ended.set()

        thread = threading.Thread(target=guarded, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            message = f"this machine starts no more than {len(self._threads)} threads; lower --concurrency"
            raise MissingError(message) from None
        self._threads.append(thread)

    def join(self) -> None:
        """Wait for all; raises what one of them raised."""
        for thread in self._threads:
            thread.join()
        if self._wrong:
            raise self._wrong[0]

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()


def closed_loop(
    send: Callable[[int, float | None], _Reply],
    count: int,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[_Reply]:
    """``count`` requests, ``concurrency`` of them in flight at any time. ``send(number, None)`` asks one."""
    replies: dict[int, _Reply] = {}
    numbers, lock = iter(range(count)), threading.Lock()

    with _Crew() as crew:

        def work() -> None:
            while not crew.ended.is_set():
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                reply = send(number, None)
                with lock:
                    replies[number] = reply
                    on_progress(len(replies), count)

        for _ in range(min(concurrency, count)):
            crew.start(work)
        crew.join()
    return [replies[number] for number in range(count)]


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
    replies: dict[int, _Reply] = {}
    slots = threading.Semaphore(_MOST_IN_FLIGHT)
    began = clock()
    with _Crew() as crew:

        def work(number: int, due: float) -> None:
            try:
                replies[number] = send(number, due)
            finally:
                slots.release()

        for number, at in enumerate(times_s):
            while (wait := began + at - clock()) > 0 and not crew.ended.is_set():
                time.sleep(min(wait, 60.0))
            if crew.ended.is_set():
                break  # one of them raised
            slots.acquire()
            crew.start(partial(work, number, began + at))
            on_progress(number + 1, len(times_s))
        crew.join()
    return [replies[number] for number in range(len(times_s))]

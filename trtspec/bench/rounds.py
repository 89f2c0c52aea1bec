"""Peers as running processes: started once, given the same prompts, their answers checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from trtspec import process
from trtspec.bench.peers import Peer

_LOAD_SECONDS = 600.0
Answers = Mapping[str, Sequence[Mapping[str, Any]]]
"""By peer, the answer of each round."""


class Running:
    """A peer's process. A peer that fails, at any time, has ``error`` and answers with it."""

    def __init__(self, peer: Peer, folder: Path, number: int, threads: int) -> None:
        self.peer = peer
        self.version = ""
        self.error: str | None = peer.absent or None
        self._child: process.Child | None = None
        self._connection: Connection | None = None
        self._log = folder / f"{number}.log"
        if self.error is not None:
            return
        address = str(folder / f"{number}.sock")
        with Listener(address, "AF_UNIX") as listener:
            argv = [str(peer.python), str(peer.script), address, peer.kind, json.dumps(dict(peer.options))]
            self._child = process.start(argv, env=environment(threads, peer.env), log=self._log)
            try:
                self._connection = self._accept(listener)
            except BaseException:
                self.close()
                raise
        hello = self._answer()
        self.error, self.version = hello.get("error"), hello.get("version", "")

    def _accept(self, listener: Listener) -> Connection | None:
        """The child's connection; None if it ends without one."""
        assert self._child is not None
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                if self._child.poll() is not None:
                    return None

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Its answer; ``{"error": ...}`` once it has failed, also by answering less or more than asked."""
        if self.error is None and self._connection is not None:
            message = json.dumps({"prompts": prompts, "new_tokens": new_tokens}).encode()
            try:
                self._connection.send_bytes(message)
                reply = self._answer()
            except OSError as error:
                reply = {"error": f"it ended: {error}"}
            self.error = reply.get("error") or refused(reply["outputs"], len(prompts), new_tokens)
            if self.error is None:
                return reply
        return {"error": self.error}

    def _answer(self) -> dict[str, Any]:
        if self._connection is not None:
            if not wait([self._connection], _LOAD_SECONDS):
                self.close()
                return {"error": f"no answer in {_LOAD_SECONDS:g} s"}
            try:
                reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return reply
            except (EOFError, OSError):
                pass
        if self._child is not None:
            self._child.wait(5.0)  # its last words are in the log when it has ended
        tail = self._log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        return {"error": f"it ended: {tail[0][:300] if tail else 'without a word'}"}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            self._child.kill_group()


def refused(outputs: Sequence[Sequence[int]], num_prompts: int, new_tokens: int) -> str | None:
    """Why answers are no evidence: one with another number of tokens is another amount of work."""
    asked = [new_tokens] * num_prompts
    found = [len(tokens) for tokens in outputs]
    if found == asked:
        return None
    if len(found) != num_prompts:
        return f"{len(found)} answers to {num_prompts} prompts: not counted"
    at = next(i for i, count in enumerate(found) if count != new_tokens)
    return f"answer {at + 1} has {found[at]} tokens of {new_tokens} asked: not counted"


def environment(threads: int, more: Mapping[str, str]) -> dict[str, str]:
    """What every peer is started with: the same threads, and a policy under which waiting threads sleep."""
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    count = str(threads)
    return {
        **given,
        **policy(),
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def policy() -> dict[str, str]:
    """OMP_WAIT_POLICY as it is, else passive: spinning threads fight over busy cores."""
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"}


def measure(
    running: Sequence[Running],
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    rounds: int,
    each_round: Callable[[], None] = lambda: None,
    warm_tokens: int | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """The answers of each peer to the same prompts, round by round, after a short one that is not counted
    (to the first ``warm_tokens`` of each prompt; None: to all of it).

    Each round starts with another peer, so that none always comes after the same neighbour.
    """
    answers: dict[str, list[dict[str, Any]]] = {one.peer.name: [] for one in running}
    for one in running:
        one.run([prompt[:warm_tokens] for prompt in prompts], min(8, new_tokens))
    for number in range(rounds):
        start = number % len(running)
        for one in [*running[start:], *running[:start]]:
            answers[one.peer.name].append(one.run(prompts, new_tokens))
        each_round()
    return answers

"""Two clients of one endpoint in turn: trtspec's own and AIPerf, with the same prompts and the same load.

``python benchmarks/load_clients.py URL --aiperf PROGRAM [--concurrency N | --rate R] [--rounds N]``

Prints of each client and each metric the medians of the rounds, and the median over requests of all rounds
with its order-statistic interval. Both ask greedily for answers of equal length; the server's prefix cache
is warmed by one pass over the prompts. Where the server is vLLM its own histograms stand beside the means of
each client: they say how much of a difference between clients is the server's (a client that takes CPU from
the server slows it down) and how much is the client's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from trtspec.prompts import PROMPTS_FILE, load_chats
from trtspec.verify.aiperf import drive
from trtspec.verify.arrivals import closed_loop, open_loop, poisson_times
from trtspec.verify.endpoint import Endpoint, ask, connect, learn
from trtspec.verify.http_stream import get
from trtspec.verify.latency import quantile_of
from trtspec.verify.timed import Objectives, Timed, rates, steady

_HISTOGRAMS = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "TPOT": "vllm:request_time_per_output_token_seconds",
    "whole answer": "vllm:e2e_request_latency_seconds",
}


def server_sums(endpoint: Endpoint) -> dict[str, float]:
    """Sums and counts of vLLM's histograms, by ``NAME_sum`` and ``NAME_count``; empty for other servers."""
    status, body = get(endpoint, "/metrics")
    found: dict[str, float] = {}
    for line in body.decode().splitlines() if status == 200 else ():
        name, _, rest = line.partition("{")
        if name.startswith(tuple(_HISTOGRAMS.values())) and name.endswith(("_sum", "_count")):
            found[name] = found.get(name, 0.0) + float(rest.rpartition(" ")[2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--num-prompts", type=int, default=12)
    options = parser.parse_args()
    chats = load_chats(PROMPTS_FILE, limit=options.num_prompts, sample=True)
    endpoint = learn(connect(options.url), chats[0])
    clock = time.perf_counter

    def own() -> Sequence[Timed]:
        def send(number: int, due: float | None) -> Timed:
            chat = chats[number % len(chats)]
            return ask(endpoint, chat, max_tokens=options.max_tokens, clock=clock, due_s=due).timed

        if options.rate:
            return open_loop(send, poisson_times(options.requests, options.rate, seed=1), clock)
        return closed_loop(send, options.requests, options.concurrency)

    def aiperf() -> Sequence[Timed]:
        return drive(
            options.aiperf,
            endpoint,
            chats,
            max_tokens=options.max_tokens,
            requests=options.requests,
            concurrency=None if options.rate else options.concurrency,
            rate_per_s=options.rate,
        ).timed

    for chat in chats:
        ask(endpoint, chat, max_tokens=options.max_tokens, clock=clock)
    rounds: dict[str, list[Sequence[Timed]]] = {"own": [], "AIPerf": []}
    server: dict[str, list[dict[str, float]]] = {"own": [], "AIPerf": []}
    for number in range(options.rounds):
        order = [("own", own), ("AIPerf", aiperf)]
        for name, run in order if number % 2 else reversed(order):
            before = server_sums(endpoint)
            rounds[name].append(run())
            server[name].append({key: value - before[key] for key, value in server_sums(endpoint).items()})
            print(f"round {number + 1}: {name} done", flush=True)
    load = f"{options.rate:g} requests/s" if options.rate else f"{options.concurrency} at a time"
    print(f"\n{endpoint.server} at {load}, {options.requests} requests of {options.max_tokens} tokens")
    print("\n| metric | own | AIPerf |\n|---|---|---|")
    kept = {
        name: [steady(one, concurrency=None if options.rate else options.concurrency) for one in runs]
        for name, runs in rounds.items()
    }
    values = {
        "TTFT p50, ms": lambda one: one.ttft_s,
        "TPOT p50, ms": lambda one: one.tpot_s,
        "whole answer p50, ms": lambda one: one.e2e_s,
        "longest gap p50, ms": lambda one: max(one.gaps_s, default=None),
    }
    for metric, of in values.items():
        cells = []
        for runs in kept.values():
            each = [[1e3 * value for one in run if (value := of(one)) is not None] for run in runs]
            whole = quantile_of([value for run in each for value in run], 0.5)
            low, high = whole.interval or (float("nan"),) * 2
            medians = ", ".join(f"{statistics.median(run):.1f}" for run in each)
            cells.append(f"{whole.value or float('nan'):.1f} ({low:.1f} to {high:.1f}); rounds {medians}")
        print(f"| {metric} | {' | '.join(cells)} |")
    for metric, histogram in _HISTOGRAMS.items():
        cells = []
        of = values[f"{metric} p50, ms"]
        for name, runs in rounds.items():
            client = [1e3 * value for run in runs for one in run if (value := of(one)) is not None]
            total = sum(one.get(f"{histogram}_sum", 0.0) for one in server[name])
            count = sum(one.get(f"{histogram}_count", 0.0) for one in server[name])
            said = f"; the server says {1e3 * total / count:.1f}" if count else ""
            cells.append(f"{statistics.mean(client):.1f}{said}")
        print(f"| {metric} mean of all, ms | {' | '.join(cells)} |")
    found = [
        ", ".join(f"{rates(run, Objectives()).tokens_per_s or 0:.1f}" for run in runs)
        for runs in kept.values()
    ]
    print(f"| tokens/s of each round | {' | '.join(found)} |")


if __name__ == "__main__":
    main()

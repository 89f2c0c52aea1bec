"""How often does the black-box comparison of two endpoints err? ``python -m benchmarks.two_samples``

Simulated answers, no server: the judge of ``trtspec verify --url`` with the answers that it plans. Equal
sides must pass, the bias of 2026 (10/60/30 % intended, 10.16/63.04/26.80 % produced) must be found.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from trtspec.stats import rate_interval
from trtspec.verify.endpoint_sampled import STREAMS, DrawSettings, judge_draws
from trtspec.verify.gates import Verdict
from trtspec.verify.power import INTENDED, PRODUCED, bias_size

LAW = (0.35, 0.25, 0.15, 0.1, 0.06, 0.04, 0.02, 0.01, 0.01, 0.01)


def answers(rng: Any, first: Any, later: Any, count: int) -> list[list[int]]:
    """Of three tokens each: the first, in which nothing is drafted, has a law of its own."""
    columns = [rng.choice(len(law), size=count, p=np.array(law) / sum(law)) for law in (first, later, later)]
    found: list[list[int]] = np.stack(columns, 1).tolist()
    return found


def verdict(rng: Any, law: Any, other: Any, settings: DrawSettings) -> Verdict:
    """Of one whole comparison, control included."""
    rows = [
        {
            "stream": stream,
            "request_id": str(prompt),
            "error": "",
            "text": "",
            "drafted": 1,
            "token_ids": tokens,
        }
        for stream in STREAMS
        for prompt in range(settings.prompts)
        for tokens in answers(rng, law, other if stream == "url" else law, settings.planned)
    ]
    given: dict[str, Any] = {"temperature": 1.0, "drafted": None, "seeded": {}}
    return judge_draws(rows, planned=settings.planned, bias=settings.bias, **given).verdict


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--null-runs", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    began = time.monotonic()
    null, small = (
        DrawSettings(prompts=2, bias=0.3),
        DrawSettings(prompts=1, bias=bias_size(INTENDED, PRODUCED)),
    )
    found = [verdict(rng, LAW, LAW, null) for _ in range(given.null_runs)]
    alarms, passed = found.count(Verdict.FAIL), found.count(Verdict.PASS)
    low, high = rate_interval(alarms, len(found))
    print(
        f"equal sides, {null.prompts} prompts, {null.planned} answers: {passed} PASS, {alarms} FAIL of "
        f"{len(found)} (95 % {low:.2%} to {high:.2%}), {len(found) - alarms - passed} INCONCLUSIVE (control)"
    )
    caught = [verdict(rng, INTENDED, PRODUCED, small) for _ in range(given.runs)].count(Verdict.FAIL)
    print(f"bias of 2026, 1 prompt, {small.planned} answers: found in {caught} of {given.runs}")
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

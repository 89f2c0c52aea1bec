"""Reports made by hand: every plot, every verdict, a check that nobody knows; and small ones."""

from __future__ import annotations

import random
from typing import Any

from trtspec.verify.gates import Check, Verdict
from trtspec.verify.report import Report

RECIPE: dict[str, Any] = {
    "version": 1,
    "quantization": {"kind": "w4a16_awq", "kv_cache": "fp8"},
    "speculation": {"kind": "ngram", "num_draft_tokens": 4},
    "limits": {"max_seq_tokens": 2048},
}


def made_report(*checks: Check, **changes: Any) -> Report:
    given: dict[str, Any] = {
        "engine": "engines/x",
        "recipe_name": "x",
        "recipe_digest": "0" * 64,
        "recipe": RECIPE,
        "source_digest": "1" * 64,
        "created": "2026-01-01T00:00:00+00:00",
        "argv": ("trtspec", "verify", "engines/x"),
        "tools": {"trtspec": "0", "torch": "2"},
        "built_with": {"torch": "2"},
        "machine": {"processor": "p", "cores": 2},
        "settings": {"max_new_tokens": 48, "longest_prompt_tokens": 300, "prompts_sha256": "a"},
        "seconds": 12.5,
        "checks": checks,
        "notes": ("a note",),
    }
    return Report(**{**given, **changes})


def full_report() -> Report:
    """Every plot and every verdict; some texts would break a page that does not escape them."""
    chance = random.Random(4)
    gaps = [0.031, 0.004, 0.0]
    divergences = [{"prompt_id": f"p<{i}>", "position": i, "gap_nats": gap} for i, gap in enumerate(gaps)]
    seconds = {
        side: [[chance.uniform(low, low + 1) for _ in range(2)] for _ in range(6)]
        for side, low in (("recipe", 1.0), ("no_speculation", 1.7))
    }
    loads = (("chat, 1", 1.6), ("chat, 8", 0.9))
    by_load = [
        {"load": name, "speedup": value, "low": value - 0.1, "high": value + 0.1} for name, value in loads
    ]
    cells = [[{"verdict": "PASS", "speedup": 1.2}, None], [{"verdict": "FAIL"}, {"verdict": "INCONCLUSIVE"}]]
    return made_report(
        Check(
            "lossless",
            Verdict.PASS,
            "3 of 12 <b>differ</b> & more",
            True,
            measured=3.0,
            unit="divergences",
            n=576,
            n_unit="tokens",
            how="greedy",
            details=("p1, token 3: ' x' instead of '<script>alert(1)</script>'",),
            evidence={"divergences": divergences, "noise": {"usual_nats": 0.044, "nats": 0.12}},
        ),
        Check("lossless_float64", Verdict.PASS, "same", True, evidence={"near_misses": {"refused": 130}}),
        Check(
            "quality",
            Verdict.FAIL,
            "worse",
            True,
            measured=1.266,
            interval=(1.252, 1.281),
            bound=1.25,
            sense="at most",
            n=24,
            n_unit="texts",
            evidence={"kl_quantiles": {"0.5": 0.004, "0.9": 0.05, "p99": 0.4, "99.9%": 1.9}},
        ),
        Check(
            "acceptance",
            Verdict.MEASURED,
            "some",
            False,
            measured=2.21,
            interval=(1.9, 2.55),
            sense="at least",
            unit="tokens/step",
            n=12,
            n_unit="requests",
            evidence={
                "acceptance_rate": 0.787,
                "acceptance_length": 2.21,
                "steps_by_tokens_emitted": {"1": 200, "2": 90, "3": 50, "5": 130},
                "acceptance_length_by_task": {"chat": 1.4, "copy": 4.4},
            },
        ),
        Check(
            "speedup",
            Verdict.PASS,
            "fast",
            True,
            measured=1.566,
            interval=(1.31, 1.8),
            bound=1.2,
            sense="at least",
            n=6,
            n_unit="prompts",
            evidence={"interleaved": True, "seconds": seconds},
        ),
        Check(
            "speedup_over_baseline",
            Verdict.INCONCLUSIVE,
            "astride",
            True,
            measured=1.05,
            interval=(0.95, 1.15),
            bound=1.0,
            sense="at least",
            warnings=("busy?",),
            evidence={"interleaved": True},
        ),
        Check("of/tomorrow.x", Verdict.SKIPPED, "", False, evidence={"by_load": by_load}),
        Check(
            "later_still",
            Verdict.ERROR,
            "odd",
            False,
            measured=float("nan"),
            interval=(float("-inf"), float("inf")),
            evidence={
                "samples_ms": {"TTFT": {"recipe": [chance.gauss(40, 5) for _ in range(500)]}},
                "matrix": {"rows": ["BF16", "FP8"], "columns": ["none", "n-gram"], "cells": cells},
            },
        ),
    )

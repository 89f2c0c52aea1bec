"""Writes trtspec/data/acceptance_priors.json from published tables: python -m benchmarks.priors --data DIR

What is taken from each table, and how tasks that a table lacks are filled in, is stated in the file itself.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from statistics import median
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "trtspec" / "data" / "acceptance_priors.json"
PAPER_TASKS = {"chat": "MT-bench", "code": "HumanEval", "math": "GSM8K", "summarization": "CNN/DM"}
BENCH_TASKS = {
    "chat": "mt_conv",
    "math": "math",
    "summarization": "summarization",
    "translation": "translation",
    "qa": "qa",
    "rag": "rag",
}
BUNDLE_TASKS = {
    "chat": ("mtbench",),
    "code": ("humaneval", "livecodebench"),
    "math": ("gsm8k",),
    "qa": ("gpqa",),
}
PAPER = "arXiv 2503.01840v3, tau of Vicuna-13B at temperature 0"
BENCH = "Spec-Bench leaderboard (A100, FP16, greedy)"
RUN_ACCEPTANCE = 0.9


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def eagle3(
    bundle: list[dict[str, str]], bench: list[dict[str, str]], paper: dict[Any, float]
) -> dict[str, Any]:
    tasks: dict[str, Any] = {}
    for task, names in BUNDLE_TASKS.items():
        lengths = {}
        for k in (3, 5, 7):
            found = [
                float(row["accept_length"])
                for row in bundle
                if row["task"] in names
                and row["topk"] == "1"
                and row["steps"] == str(k)
                and "Scout" not in row["model"]
            ]
            lengths[str(k)] = round(median(found), 3)
        tasks[task] = {"acceptance_length": lengths}
    ratio = {"summarization": (paper["EAGLE-3", "CNN/DM"] - 1) / (paper["EAGLE-3", "MT-bench"] - 1)}
    row = next(row for row in bench if row["method"] == "EAGLE3")
    ratio |= {task: float(row[BENCH_TASKS[task]]) / float(row["mt_conv"]) for task in ("translation", "rag")}
    for task, factor in ratio.items():
        chat = tasks["chat"]["acceptance_length"]
        source = f"chat, gain scaled by {factor:.3f}: " + (PAPER if task == "summarization" else BENCH)
        scaled = {k: round(1 + (value - 1) * factor, 3) for k, value in chat.items()}
        tasks[task] = {"acceptance_length": scaled, "source": source}
    return tasks


def by_paper(
    method: str, bench_name: str, depth: int, bench: list[dict[str, str]], paper: dict[Any, float]
) -> dict[str, Any]:
    """Tasks of the EAGLE paper as they are; the others scale the gain of chat by Spec-Bench's speedups."""
    tasks: dict[str, Any] = {
        task: {"acceptance_length": {str(depth): paper[method, name]}} for task, name in PAPER_TASKS.items()
    }
    found = [row for row in bench if row["method"] == bench_name]
    for task in ("translation", "qa", "rag"):
        factor = median(float(row[BENCH_TASKS[task]]) / float(row["mt_conv"]) for row in found)
        value = round(1 + (paper[method, "MT-bench"] - 1) * factor, 3)
        tasks[task] = {
            "acceptance_length": {str(depth): value},
            "source": f"chat, gain scaled by {factor:.3f}: {BENCH}",
        }
    return tasks


def ngram(bench: list[dict[str, str]], paper: dict[Any, float]) -> dict[str, Any]:
    """The copy fraction that explains prompt lookup's acceptance length with 10 drafted tokens."""
    inside = sum(RUN_ACCEPTANCE**j for j in range(11))
    tasks: dict[str, Any] = {}
    lengths = {
        task: median(
            float(row[column]) * float(row["mean_accepted_tokens"]) / float(row["overall_speedup"])
            for row in bench
            if row["method"] == "PLD"
        )
        for task, column in BENCH_TASKS.items()
    }
    lengths["code"] = paper["PLD", "HumanEval"]
    for task, length in lengths.items():
        copied = (1 - 1 / length) / (1 - 1 / inside)
        tasks[task] = {
            "copy_fraction": round(max(0.0, copied), 3),
            "acceptance_length_of_10": round(length, 3),
        }
    return tasks


def draft_model() -> dict[str, Any]:
    alphas = {
        "code": (
            0.86,
            "arXiv 2302.01318, table 1: HumanEval 2.46x with K 4, 14.1 and 1.8 ms a token: E[N] 3.72",
        ),
        "summarization": (0.75, "arXiv 2302.01318, table 1: XSum greedy 2.01x: E[N] 3.04"),
        "translation": (0.75, "arXiv 2211.17192, table 2: T5-small for T5-XXL, EnDe, temperature 0"),
    }
    tasks = {}
    for task in ("chat", "code", "math", "qa", "rag", "summarization", "translation"):
        alpha, source = alphas.get(
            task, (0.75, "as EnDe of arXiv 2211.17192; no table for this task: assumption")
        )
        lengths = {str(k): round(sum(alpha**i for i in range(k + 1)), 4) for k in (1, 2, 3, 4)}
        tasks[task] = {"acceptance_length": lengths, "source": source}
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    oracles = parser.parse_args().data / "oracles"
    bench = rows_of(oracles / "specbench_leaderboard.csv")
    bundle = rows_of(oracles / "specbundle_rows.csv")
    paper = {
        (row["method"], row["task"]): float(row["tau"])
        for row in rows_of(oracles / "eagle_family_paper.csv")
        if row["temperature"] == "0"
    }
    methods = {
        "eagle3": {
            "source": "SpecForge SpecBundle: median over heads and models of chains of 3, 5 and 7",
            "low": 0.7,
            "high": 1.2,
            "temperature_1_factor": 0.83,
            "tasks": eagle3(bundle, bench, paper),
        },
        "eagle": {
            "source": f"{PAPER}, EAGLE-2 (60 nodes)",
            "tree": True,
            "low": 0.6,
            "high": 1.1,
            "temperature_1_factor": 0.89,
            "tasks": by_paper("EAGLE-2", "EAGLE2", 6, bench, paper),
        },
        "medusa": {
            "source": f"{PAPER}, Medusa",
            "tree": True,
            "low": 0.8,
            "high": 1.15,
            "temperature_1_factor": 0.83,
            "tasks": by_paper("Medusa", "Medusa", 4, bench, paper),
        },
        "lookahead": {
            "source": f"{PAPER}, Lookahead",
            "tree": True,
            "low": 0.7,
            "high": 1.2,
            "temperature_1_factor": 0.68,
            "tasks": by_paper("Lookahead", "Lookahead", 2, bench, paper),
        },
        "ngram": {
            "source": f"{BENCH}, prompt lookup with 10 drafted tokens",
            "run_acceptance": RUN_ACCEPTANCE,
            "temperature_1_factor": 0.68,
            "tasks": ngram(bench, paper),
        },
        "draft_model": {
            "source": "alpha of published pairs",
            "low": 0.6,
            "high": 1.2,
            "temperature_1_factor": 0.83,
            "tasks": draft_model(),
        },
    }
    about = (
        "Tokens per target step by draft length (for trees: by depth), bonus token included. low and high "
        "scale what a curve adds to 1: the spread over models and heads. temperature_1_factor scales the "
        "first position at temperature 1: (tau-1) at 1 over (tau-1) at 0 of EAGLE-3, EAGLE-2 and SpS in "
        "arXiv 2503.01840v3, the nearest of them for methods that the paper lacks; draft models: alpha .62 "
        "for .75 (arXiv 2211.17192, table 2). Written by benchmarks/priors.py."
    )
    TARGET.write_text(json.dumps({"about": about, "methods": methods}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

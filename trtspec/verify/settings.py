"""How much ``trtspec verify`` measures: prompts, lengths, rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoadSettings:
    """How much is measured in each cell. ``batch``, ``long_tokens`` None: by the recipe's limits."""

    prompts: int = 3
    rounds: int = 2
    tokens: int = 32
    batch: int | None = None
    long_tokens: int | None = None
    file: Path | None = None
    """The user's own prompts, with ``task`` and ``language``."""


QUICK_LOAD = LoadSettings(prompts=2, rounds=1, tokens=16)


@dataclass(frozen=True)
class LatencySettings:
    """The load of ``verify --latency``: ``concurrency`` or ``rate_per_s``, neither: by the recipe's
    ``gates.load``, else as many in flight as its batch holds, at most 8. ``requests`` None: as many as a p99
    needs, or, for ``tails`` False, a p90."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    requests: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    tails: bool = True


@dataclass(frozen=True)
class Settings:
    """How much is measured. More prompts and tokens narrow the intervals and take longer."""

    num_prompts: int = 12
    max_new_tokens: int = 48
    max_prompt_tokens: int | None = None
    """Of the prompts that ship with trtspec only those up to this length."""
    quality_tokens: int = 3000
    quality_text_tokens: int = 128
    race_prompts: int = 6
    race_tokens: int = 32
    rounds: int = 2
    floor_prompts: int = 6
    noise_texts: int = 2
    noise_tokens: int = 64
    exact_prompts: int = 8
    """Prompts of the comparison in float64: those with the most drafts for the time they take."""
    exact_tokens: int = 32
    sampled_prompts: int = 40
    """Prompts of the sampled answers that judge an approximate acceptance."""
    samples: int = 2
    """Answers to each of them."""
    temperature: float = 1.0
    """Of these; 1: the model's own law."""
    sampled: bool = True
    """Whether sampled answers of a strict acceptance are held to the target's law."""
    sampled_tokens: int = 1248
    """Tokens drawn for that with drafts, and as many without."""
    sampled_bias: float = 0.04
    """The bias w^2 of ten equal cells that they are to find with power 0.99."""
    sampled_seconds: float | None = None
    """Skip this if it would take longer; None: however long it takes."""
    prompts: Path | None = None
    """The user's own JSONL file; None: the prompts that ship with trtspec."""
    heldout: Path | None = None
    tasks: tuple[Path, ...] = ()
    """JSONL files of tasks; ``builtin``: those that ship with trtspec."""
    task_limit: int | None = None
    """Most items of each task."""
    lm_eval: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness."""
    lm_eval_path: Path | None = None
    """Folder of task files of its own."""
    judge: str | None = None
    """Command that scores answers of tasks of kind judge."""
    retrieval: bool = False
    retrieval_copies: int = 1
    """Prompts of each length and depth."""
    retrieval_tokens: int | None = None
    """Longest of them; None: limits.max_seq_tokens."""
    load: LoadSettings | None = None
    """The load matrix; None: only if ``gates.min_speedup_by_load`` asks."""
    latency: LatencySettings | None = None
    """Latency under load; None: only if ``gates.load`` asks."""
    quick: bool = False
    """Whether what the recipe's gates ask is to be measured briefly too."""


QUICK = Settings(
    num_prompts=6,
    max_new_tokens=24,
    max_prompt_tokens=120,
    quality_tokens=2000,
    race_prompts=4,
    race_tokens=16,
    rounds=1,
    floor_prompts=6,
    noise_texts=1,
    noise_tokens=48,
    exact_prompts=4,
    exact_tokens=24,
    sampled_prompts=36,  # as few as can show that loops do not rise by a tenth
    samples=1,
    sampled_seconds=60.0,
    quick=True,
)

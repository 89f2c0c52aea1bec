"""What a rule about TensorRT-LLM looks at, and what it says (:mod:`trtspec.trtllm.rules`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtspec.hardware import Gpu
from trtspec.recipe import DraftModelSpeculation, Quantization, Recipe
from trtspec.trtllm.checkpoint import Checkpoint
from trtspec.trtllm.facts import Facts
from trtspec.versions import parse_version

Path = tuple[str | int, ...]
Told = Iterator[tuple[Path, str]]
"""(path of the recipe's key to blame, message)."""

FP8_COMPUTING = ("fp8", "w4a8_awq", "nvfp4")
"""Weights whose attention may run on FP8: with others an 8-bit KV cache has no paged context kernel."""


@dataclass(frozen=True)
class Case:
    """One recipe on one version. What is None is not known, and no rule that needs it speaks."""

    recipe: Recipe
    facts: Facts
    gpu: Gpu | None
    checkpoint: Checkpoint | None
    draft: Checkpoint | None

    @property
    def engine(self) -> bool:
        return self.recipe.backend.kind == "tensorrt"

    @property
    def version(self) -> str:
        return self.facts.version

    @property
    def method(self) -> str:
        return self.recipe.speculation.kind

    def before(self, version: str) -> bool:
        """Whether this case's version is older than ``version``."""
        return parse_version(self.version) < parse_version(version)

    def has_flag(self, command: str, flag: str) -> bool:
        return flag in self.facts.commands.get(command, {})

    def quantizations(self) -> list[tuple[tuple[str, ...], Quantization]]:
        """The target's, and a draft model's, each with its path."""
        found: list[tuple[tuple[str, ...], Quantization]] = [(("quantization",), self.recipe.quantization)]
        if isinstance(self.recipe.speculation, DraftModelSpeculation):
            found.append((("speculation", "quantization"), self.recipe.speculation.quantization))
        return found

    def models(self) -> list[tuple[tuple[str, ...], Quantization, Checkpoint]]:
        """Those of the recipe's models whose checkpoint is known, with the path of the quantization."""
        known = (self.checkpoint, self.draft)
        return [
            (path, quantization, checkpoint)
            for (path, quantization), checkpoint in zip(self.quantizations(), known, strict=False)
            if checkpoint is not None
        ]

"""Trained draft heads as the embedded engine loads them: the weights, in the target's dtype.

Which layouts are read says :mod:`trtspec.heads_layout`; what must fit a target, :mod:`trtspec.heads_shape`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trtspec.embedded import layers
from trtspec.embedded.layers import Linear
from trtspec.embedded.model import Decoder
from trtspec.errors import InputError, Problem
from trtspec.heads_layout import Heads, HeadsKind, read_heads
from trtspec.heads_shape import EagleShape, MedusaShape, embedded_problems, read_shape
from trtspec.modelspec import ModelSpec
from trtspec.tensor_headers import TensorHeader

__all__ = ["HeadsKind", "HeadsSize", "Loader", "MedusaHead", "MedusaHeads", "describe",
           "inspect_heads", "load_medusa"]  # fmt: skip

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


# --------------------------------------------------------------------------- what is loaded


@dataclass(frozen=True)
class MedusaHead:
    """Residual blocks and an output projection. ``blocks[j]`` is (linear, residual): the block's output is
    residual(x) + silu(linear(x)), residual None meaning x itself."""

    blocks: tuple[tuple[Linear, Linear | None], ...]
    lm_head: Linear


@dataclass(frozen=True)
class MedusaHeads:
    """Head i predicts the i + 2nd token after the one whose hidden state it sees. ``grounded`` (Hydra):
    head i sees [hidden, embeddings of the i + 1 tokens in between]."""

    heads: tuple[MedusaHead, ...]
    grounded: bool
    first: Linear | None = None
    """The linears of all heads' first blocks side by side, where all see the same input: ``[rows, heads *
    hidden]`` in one product. The heads' own ``blocks`` are then those behind it."""


# --------------------------------------------------------------------------- values


def read_values(header: TensorHeader) -> Tensor:
    """The tensor that a header describes, on the CPU, in its own dtype."""
    raw = bytearray(header.read())
    if not raw:
        return torch.empty(header.shape, dtype=_DTYPES[header.dtype])
    return torch.frombuffer(raw, dtype=_DTYPES[header.dtype]).view(header.shape)


class Loader:
    """Values of checked tensors, finite, in the dtype and on the device of the target."""

    def __init__(self, heads: Heads, target: Decoder) -> None:
        self.heads, self.target = heads, target
        self.problems: list[Problem] = []

    def plain(self, name: str) -> Tensor:
        value = read_values(self.heads.tensors[name])
        if not bool(torch.isfinite(value.sum(dtype=torch.float64))):
            self.problems.append(
                self.heads.problem(name, "holds NaN or infinite values; train or copy it again")
            )
        return value.to(self.target.device, self.target.dtype, copy=True)

    def maybe(self, name: str) -> Tensor | None:
        return self.plain(name) if name in self.heads.tensors else None

    def linear(self, *modules: str) -> Linear:
        """The linears ``modules`` on one input, side by side."""
        weight = torch.cat([self.plain(f"{module}.weight") for module in modules])
        bias = None
        if f"{modules[0]}.bias" in self.heads.tensors:
            bias = torch.cat([self.plain(f"{module}.bias") for module in modules])
        return layers.dense(weight, bias)

    def lm_head(self, module: str) -> Linear:
        """An output projection; the target's own where the weights are the same, which saves a copy."""
        weight, bias = self.plain(f"{module}.weight"), self.maybe(f"{module}.bias")
        if bias is None and self.target.spec.tie_embeddings and torch.equal(weight, self.target.embedding):
            return self.target.lm_head
        return layers.dense(weight, bias)


# --------------------------------------------------------------------------- any heads


@dataclass(frozen=True)
class HeadsSize:
    """What heads cost: ``num_values`` weights, and for EAGLE a ``layer`` with keys and values of its own."""

    num_values: int
    num_heads: int
    """Of Medusa; 1 for EAGLE, whose head runs once for each drafted token."""
    layer: ModelSpec | None


def inspect_heads(
    folder: Path, kind: HeadsKind, target: ModelSpec, problems: list[Problem]
) -> HeadsSize | None:
    """The size of the heads in ``folder``; None, with every reason in ``problems``, if they cannot draft for
    ``target`` by ``kind``.

    Reads headers, config.json and the draft vocabulary, not the weights.
    """
    described = describe(folder, kind, target, problems)
    if described is None:
        return None
    heads, shape = described
    values = sum(math.prod(header.shape) for header in heads.tensors.values())
    if isinstance(shape, MedusaShape):
        return HeadsSize(values, len(shape.blocks), None)
    return HeadsSize(values, 1, shape.spec)


def describe(
    folder: Path, kind: HeadsKind, target: ModelSpec, problems: list[Problem]
) -> tuple[Heads, MedusaShape | EagleShape] | None:
    """The heads of a folder and their geometry; None, with every reason in ``problems``, if they cannot run
    here."""
    heads = read_heads(folder, problems)
    if heads is None:
        return None
    if heads.kind != kind:
        message = f"these are {heads.kind} heads; write speculation kind: {heads.kind}, or give {kind} heads"
        problems.append(Problem(message, file=str(folder)))
        return None
    found: list[Problem] = []
    shape = read_shape(heads, target, found)
    found += embedded_problems(heads)
    problems += found
    return None if found else (heads, shape)


# --------------------------------------------------------------------------- Medusa and Hydra


def load_medusa(folder: Path, target: Decoder) -> MedusaHeads:
    """The Medusa or Hydra heads in ``folder``, in the target's dtype. Raises InputError with all problems."""
    problems: list[Problem] = []
    described = describe(folder, "medusa", target.spec, problems)
    if described is None:
        raise InputError(problems)
    found, shape = described
    assert isinstance(shape, MedusaShape)
    load, names = Loader(found, target), found.tensors
    modules = [[f"{head}.{at}" for at in blocks] for head, blocks in enumerate(shape.blocks)]
    starts = [f"{blocks[0]}.linear" for blocks in modules if blocks and not shape.grounded]
    biased = {f"{start}.bias" in names for start in starts}
    residual = any(name.endswith(".res_connection.weight") for name in names)
    together = len(starts) == len(modules) > 0 and len(biased) == 1 and not residual
    heads = []
    for head, blocks_of in enumerate(modules):
        blocks = []
        for module in blocks_of[together:]:
            residual_name = f"{module}.res_connection"
            other = load.linear(residual_name) if f"{residual_name}.weight" in names else None
            blocks.append((load.linear(f"{module}.linear"), other))
        output = load.lm_head(f"{head}.lm_head") if shape.own_output[head] else target.lm_head
        heads.append(MedusaHead(tuple(blocks), output))
    first = load.linear(*starts) if together else None
    if load.problems:
        raise InputError(load.problems)
    return MedusaHeads(tuple(heads), shape.grounded, first)

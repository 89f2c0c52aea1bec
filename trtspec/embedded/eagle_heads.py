"""The weights of EAGLE-1/2 and EAGLE-3 heads; the layouts are named in :mod:`trtspec.heads_layout`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trtspec.embedded.heads import Loader, describe
from trtspec.embedded.layers import Linear
from trtspec.embedded.model import Decoder
from trtspec.errors import InputError, Problem
from trtspec.heads_layout import default_hidden_layers
from trtspec.heads_shape import EagleShape, draft_vocabulary
from trtspec.modelspec import ModelSpec

__all__ = ["EagleWeights", "default_hidden_layers", "load_eagle"]


@dataclass(frozen=True)
class EagleWeights:
    """The one decoder layer of an EAGLE head. ``hidden_norm`` None: EAGLE-1/2."""

    spec: ModelSpec
    """The layer's geometry: one layer, its own heads and rope; ``vocab_size`` is that of its output."""
    hidden_layers: tuple[int, ...]
    """The target's layers that it sees, counted as :meth:`Decoder.forward` does."""
    embedding: Tensor
    fc: Linear
    input_norm: Tensor | None
    hidden_norm: Tensor | None
    qkv: Linear
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    norm: Tensor | None
    lm_head: Linear
    token_ids: Tensor | None
    """[draft vocabulary] int64: the target's id of each drafted one (d2t); None: the same."""


def load_eagle(folder: Path, kind: Literal["eagle", "eagle3"], target: Decoder) -> EagleWeights:
    """The EAGLE head in ``folder``, in the target's dtype. Raises InputError with all problems."""
    problems: list[Problem] = []
    described = describe(folder, kind, target.spec, problems)
    if described is None:
        raise InputError(problems)
    heads, shape = described
    assert isinstance(shape, EagleShape)
    assert shape.spec is not None
    assert shape.hidden_layers is not None
    load, layer, names = Loader(heads, target), "layers.0.", heads.tensors
    embedding = load.maybe("embed_tokens.weight")
    if embedding is None or torch.equal(embedding, target.embedding):
        embedding = target.embedding
    own_output = kind == "eagle3" and "lm_head.weight" in names
    ids = draft_vocabulary(heads)
    token_ids = None if ids is None else torch.tensor(ids, device=target.device)
    weights = EagleWeights(
        spec=shape.spec,
        hidden_layers=shape.hidden_layers,
        embedding=embedding,
        fc=load.linear("fc"),
        input_norm=load.maybe(f"{layer}input_layernorm.weight"),
        hidden_norm=load.maybe(f"{layer}hidden_norm.weight"),
        qkv=load.linear(*[f"{layer}self_attn.{name}_proj" for name in "qkv"]),
        o=load.linear(f"{layer}self_attn.o_proj"),
        post_norm=load.plain(f"{layer}post_attention_layernorm.weight"),
        gate_up=load.linear(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
        down=load.linear(f"{layer}mlp.down_proj"),
        norm=load.maybe("norm.weight"),
        lm_head=load.lm_head("lm_head") if own_output else target.lm_head,
        token_ids=token_ids,
    )
    if load.problems:
        raise InputError(load.problems)
    return weights

"""Medusa heads (arXiv 2401.10774): residual blocks on the target's last state, trained alone (Medusa-1).

Head i learns, from the state of position t, the target's law at position t + 1 + i, that is over token
t + 2 + i, as :mod:`trtspec.embedded.drafters.medusa` uses it. The output projection is the target's own and
frozen: on a small model four of them would be three quarters of a target's weights to train and to read.
Where ModelOpt writes one for each head, ours are the target's, left out of the file.

Blocks start at zero, so that each head starts as the target's own law over the next token. The loss runs over
the most frequent tokens only (the rest gets no probability from the target to speak of).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.draft.features import Batch, Target, distillation_loss, laws, places_in, ranks_of, shifted

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class MedusaTraining:
    """Four heads of one block are the authors'; ``vocab [tokens] int64``, rising: what the loss runs over."""

    target: Target
    vocab: Tensor
    num_heads: int = 4
    num_layers: int = 1
    hard_share: float = 0.5
    head_decay: float = 0.8
    """Head i counts ``head_decay**i``, as in the authors' loss."""

    kind = "medusa"

    def start(self, seed: int) -> Parameters:
        """Zeros: the identity."""
        del seed
        size = self.target.spec.hidden_size
        parameters = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                name = f"medusa_heads.{head}.{layer}.linear"
                parameters[f"{name}.weight"] = torch.zeros(size, size)
                parameters[f"{name}.bias"] = torch.zeros(size)
        return parameters

    def states(self, parameters: Mapping[str, Tensor], head: int, x: Tensor) -> Tensor:
        """``[rows, hidden]``: what goes into the output projection of ``head``."""
        for layer in range(self.num_layers):
            name = f"medusa_heads.{head}.{layer}.linear"
            x = x + F.silu(F.linear(x, parameters[f"{name}.weight"], parameters[f"{name}.bias"]))
        return x

    def loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        size = self.target.spec.hidden_size
        features = batch.hidden[..., -size:]
        rows = self.target.output_rows[self.vocab]
        total = torch.zeros(())
        for head in range(self.num_heads):
            ahead = 1 + head
            usable = batch.taught & shifted(batch.taught, ahead)
            x = features[usable]
            teacher = laws(shifted(features, ahead)[usable], rows)
            said = places_in(self.vocab, shifted(batch.tokens, ahead + 1)[usable])
            logits = F.linear(self.states(parameters, head, x), rows.to(x.dtype))
            total = total + self.head_decay**head * distillation_loss(logits, teacher, said, self.hard_share)
        return total

    def matches(self, parameters: Mapping[str, Tensor], batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Of each head (rank, usable): ``[sequences, length]``, the rank that the head at position t gives to
        the token said at t + 2 + i (over the whole vocabulary), and where there is one."""
        size = self.target.spec.hidden_size
        features = batch.hidden[..., -size:]
        out = []
        for head in range(self.num_heads):
            usable = batch.taught & shifted(batch.taught, 1 + head)
            said = shifted(batch.tokens, 2 + head)[usable]
            logits = F.linear(
                self.states(parameters, head, features[usable]), self.target.output_rows
            ).float()
            ranks = torch.zeros(usable.shape, dtype=torch.int64)
            ranks[usable] = ranks_of(logits, said)
            out.append((ranks, usable))
        return out

    def export(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], str]:
        """(tensors, config.json, file name) in the published layout."""
        dtype = self.target.embedding.dtype
        tensors = {name: value.to(dtype).contiguous() for name, value in parameters.items()}
        config = {
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "hidden_size": self.target.spec.hidden_size,
            "vocab_size": self.target.spec.vocab_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        return tensors, config, "medusa_lm_head.safetensors"

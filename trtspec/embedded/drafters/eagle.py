"""EAGLE-1 and EAGLE-2: a head of one decoder layer that predicts the target's next feature.

EAGLE-1 (arXiv 2401.15077, section 3.1): the *feature* of a position is the target's last hidden state,
after the final norm. The head sees the feature of position t beside the embedding of token t + 1, the token
that was sampled there: that the sampled token is known is what the method lives on. Its output stands for
the feature of t + 1, and the target's own output projection turns it into a law over token t + 2. EAGLE-2
(arXiv 2406.16858) is the same head with a dynamic tree.

The first layer has no input norm, as the authors trained it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.attention import Rope, attend, plan_attention, rotate
from trtspec.embedded.batch import StepBatch
from trtspec.embedded.eagle_heads import EagleWeights
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.layers import rms_norm


class EagleHead:
    """The computation of an EAGLE-1/2 head; no state."""

    def __init__(self, weights: EagleWeights) -> None:
        self.weights = weights
        self.spec = weights.spec
        self.hidden_layers = weights.hidden_layers
        self.feature_size = weights.spec.hidden_size
        self.token_ids = weights.token_ids
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._rope = Rope.of(weights.spec, self.dtype, self.device)

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """``[rows, feature]``: the features of the target's rows, from its hidden states by layer."""
        [layer] = self.hidden_layers
        return hidden[layer]

    def forward(self, features: Tensor, batch: StepBatch, store: KvStore) -> Tensor:
        """``[rows, feature]``: the head's outputs at pairs of ``features [rows, feature]`` and
        ``batch.tokens``; their keys and values are written to ``store``."""
        embedded = self.weights.embedding.index_select(0, batch.tokens)
        x = self.weights.fc(torch.cat((embedded, features), -1))
        norm = self.weights.input_norm
        return self._layer(x if norm is None else rms_norm(x, norm, self.spec.rms_norm_eps), x, batch, store)

    def logits(self, outputs: Tensor) -> Tensor:
        """``[rows, draft vocabulary]`` in float32 or better."""
        return _wide(self.weights.lm_head(outputs))

    def _layer(self, x: Tensor, residual: Tensor, batch: StepBatch, store: KvStore) -> Tensor:
        """One decoder block: attention over ``x``, then the feed-forward part."""
        w, spec = self.weights, self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = w.qkv(x).view(-1, heads + 2 * kv_heads, spec.head_dim)
        cos, sin = self._rope.at(batch.positions)
        qk = rotate(qkv[:, : heads + kv_heads], cos, sin)
        store.write(0, batch.slots, qk[:, heads:], qkv[:, heads + kv_heads :])
        plan = plan_attention(batch, spec, self.dtype)
        out = residual + w.o(attend(qk[:, :heads], 0, store, plan))
        gate_up = w.gate_up(rms_norm(out, w.post_norm, spec.rms_norm_eps))
        inner = spec.intermediate_size
        return out + w.down(F.silu(gate_up[:, :inner]) * gate_up[:, inner:])


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()

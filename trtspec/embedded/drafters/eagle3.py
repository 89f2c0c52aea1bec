"""EAGLE-3: a head on low, middle and top layers of the target, with a vocabulary of its own.

arXiv 2503.01840, section 3. The hidden states of three layers are joined and reduced by ``fc`` to the
feature of a position. The head no longer imitates a feature: from the second drafted token on it goes on
from its own output. The layer's attention sees the embedding and the feature, each normalised, side by
side; the output is normalised and projected onto the *draft vocabulary*, the target's most frequent tokens,
whose ids ``token_ids`` gives.

ModelOpt 0.47 trains with the layer's input norm applied to the feature as well, before the hidden norm; its
exports are served without, by the authors' code, SGLang and TensorRT-LLM, and so they are here: what is
measured is what a deployment will accept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtspec.embedded.batch import StepBatch
from trtspec.embedded.drafters.eagle import EagleHead, _wide
from trtspec.embedded.eagle_heads import EagleWeights
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.layers import rms_norm


class Eagle3Head(EagleHead):
    """The computation of an EAGLE-3 head; no state."""

    def __init__(self, weights: EagleWeights) -> None:
        super().__init__(weights)
        if weights.input_norm is None or weights.hidden_norm is None or weights.norm is None:
            raise ValueError("an EAGLE-3 head has three norms of its own")
        self._norms = weights.input_norm, weights.hidden_norm, weights.norm

    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        return self.weights.fc(torch.cat([hidden[layer] for layer in self.hidden_layers], -1))

    def forward(self, features: Tensor, batch: StepBatch, store: KvStore) -> Tensor:
        input_norm, hidden_norm, _ = self._norms
        eps = self.spec.rms_norm_eps
        embedded = self.weights.embedding.index_select(0, batch.tokens)
        x = torch.cat((rms_norm(embedded, input_norm, eps), rms_norm(features, hidden_norm, eps)), -1)
        return self._layer(x, features, batch, store)

    def logits(self, outputs: Tensor) -> Tensor:
        return _wide(self.weights.lm_head(rms_norm(outputs, self._norms[2], self.spec.rms_norm_eps)))

"""The target: a dense Llama-like decoder that runs rows of many sequences in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.attention import Rope, attend, plan_attention, rotate
from trtspec.embedded.batch import StepBatch
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.layers import Linear, rms_norm
from trtspec.modelspec import ModelSpec


@dataclass(frozen=True)
class DecoderLayer:
    """One block's weights: attention with fused q/k/v, SwiGLU with fused gate/up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Llama, Mistral, Qwen2 or Qwen3 with its weights in whatever form they came (see ``layers``).

    ``kv_scales`` are the checkpoint's (k, v) scales per layer, or None. ``embedding`` [vocab, hidden] and
    ``lm_head`` are public for drafters that share them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
        kv_scales: tuple[tuple[float, float], ...] | None = None,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.kv_scales = kv_scales
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.rope = Rope.of(spec, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, batch: StepBatch, store: KvStore, hidden_layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """(logits, hidden states) of one step; every row's keys and values are written to ``store``.

        Logits are ``[len(batch.logit_rows), vocab]`` in float32 (float64 in float64). ``hidden_layers``
        counts as transformers' ``hidden_states`` does: i is the residual stream ``[rows, hidden]`` after i
        blocks, 0 the embeddings, num_layers the output of the final norm.
        """
        spec = self.spec
        eps, heads, kv_heads, dim = spec.rms_norm_eps, spec.num_heads, spec.num_kv_heads, spec.head_dim
        inner = spec.intermediate_size
        slots = batch.slots
        plan = plan_attention(batch, spec, self.dtype)
        cos, sin = self.rope.at(batch.positions)
        hidden: dict[int, Tensor] = {}
        x = self.embedding.index_select(0, batch.tokens)
        for i, layer in enumerate(self.layers):
            if i in hidden_layers:
                hidden[i] = x
            qkv = layer.qkv(rms_norm(x, layer.input_norm, eps)).view(-1, heads + 2 * kv_heads, dim)
            qk = qkv[:, : heads + kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = qk[:, :heads], qk[:, heads:]
                qk = torch.cat((rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)), 1)
            qk = rotate(qk, cos, sin)
            store.write(i, slots, qk[:, heads:], qkv[:, heads + kv_heads :])
            x = x + layer.o(attend(qk[:, :heads], i, store, plan))
            gate_up = layer.gate_up(rms_norm(x, layer.post_norm, eps))
            x = x + layer.down(F.silu(gate_up[:, :inner]) * gate_up[:, inner:])
        if spec.num_layers in hidden_layers:
            hidden[spec.num_layers] = rms_norm(x, self.final_norm, eps)
        wanted = rms_norm(x.index_select(0, batch.logit_rows), self.final_norm, eps)
        logits = self.lm_head(wanted)
        return logits.to(torch.float64 if self.dtype == torch.float64 else torch.float32), hidden

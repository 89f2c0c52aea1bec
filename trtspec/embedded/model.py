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

# Logits of each row that are computed anew in float32: far more than ever lie within one 16-bit rounding step
# of the best, and cheap (about 0.1 ms a row beside a head of 49,152 tokens).
SHARP_LOGITS = 16


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
    ``lm_head`` are public for drafters that share them. ``output_rows`` [vocab, hidden], the plain weight
    of ``lm_head``, sharpens 16-bit logits (:func:`sharpen`); None (a quantized head): they are not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        final_norm: Tensor,
        lm_head: Linear,
        output_rows: Tensor | None = None,
        kv_scales: tuple[tuple[float, float], ...] | None = None,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.output_rows = output_rows
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
        return self.logits(x.index_select(0, batch.logit_rows)), hidden

    def logits(self, x: Tensor) -> Tensor:
        """``x [rows, hidden]``, the residual stream after the last block -> logits ``[rows, vocab]``, float32
        (float64 in float64)."""
        eps = self.spec.rms_norm_eps
        if self.dtype in (torch.float32, torch.float64):
            return self.lm_head(rms_norm(x, self.final_norm, eps))
        states = rms_norm(x.float(), self.final_norm.float(), eps)
        logits = self.lm_head(states.to(self.dtype))
        if self.output_rows is None:
            return logits.float()
        return sharpen(logits, states, self.output_rows)


def sharpen(logits: Tensor, states: Tensor, weight: Tensor) -> Tensor:
    """``logits [rows, vocab]`` of 16 bit in float32, the largest of each row computed anew in float32.

    A 16-bit product rounds logits to steps of up to 0.125 (bfloat16, between 16 and 32): the two best are
    often exactly equal, and the answer then hangs on their ids. CPUs offer no 16-bit product with a 32-bit
    result, so the ``SHARP_LOGITS`` largest, among which the best is, are summed again from ``states [rows,
    hidden] float32`` and the rows of ``weight [vocab, hidden]``. Each row is computed on its own, its sums in
    float64, so that they do not depend on the rows beside it.
    """
    wide = logits.float()
    if not len(wide):
        return wide
    best = logits.topk(min(SHARP_LOGITS, logits.shape[-1]), -1).indices
    rows = weight.index_select(0, best.flatten()).float().view(*best.shape, -1)
    exact = (rows * states[:, None]).sum(-1, dtype=torch.float64)
    return wide.scatter_(1, best, exact.float())

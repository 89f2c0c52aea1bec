"""The target: a dense Llama-like decoder that runs rows of many sequences in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trtspec.embedded.attention import Rope, attend, plan_attention, rotate
from trtspec.embedded.batch import StepBatch
from trtspec.embedded.kvstore import KvStore, wide_dtype
from trtspec.embedded.layers import Linear, RmsNorm, rms_norm
from trtspec.embedded.threads import ELEMENT_NS, SCORE_NS, Threads, product_us, threads_sleep, worth
from trtspec.modelspec import ModelSpec

# Logits of each row that are computed anew in float32: far more than ever lie within one 16-bit rounding step
# of the best, and cheap (about 0.1 ms a row beside a head of 49,152 tokens).
SHARP_LOGITS = 16

# Rows of every call in the batch-invariant mode. One decode row pays for as many, a prompt for as many calls:
# on Zen 5 a bfloat16 product of 8 rows takes 1.4 times that of one row, 16 rows twice.
BLOCK_ROWS = 8


@dataclass(frozen=True)
class DecoderLayer:
    """One block's weights: attention with fused q/k/v, SwiGLU with fused gate/up."""

    input_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: Linear
    post_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Decoder:
    """Llama, Mistral, Qwen2 or Qwen3 with its weights in whatever form they came (see ``layers``).

    ``kv_scales`` are the checkpoint's (k, v) scales per layer, or None. ``embedding`` [vocab, hidden] and
    ``lm_head`` are public for drafters that share them. ``output_rows`` [vocab, hidden], the plain weight
    of ``lm_head``, sharpens 16-bit logits (:func:`sharpen`); None (a quantized head): they are not.

    ``batch_invariant`` makes a row's results the same bits whatever rows it is computed with: everything that
    acts on rows runs on blocks of exactly ``BLOCK_ROWS`` rows, padded, so that every kernel meets one shape
    only, and attention, whose shape is the sequence's, is summed in float64 and then rounded. Another order
    of those sums changes them by 1e-16, which survives the rounding to 16 bits about once in 1e13 numbers.
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
        batch_invariant: bool = False,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self._final_norm = RmsNorm(final_norm, spec.rms_norm_eps)
        self._final_norm_float = final_norm.float()
        self.lm_head = lm_head
        self.output_rows = output_rows
        self.kv_scales = kv_scales
        self.batch_invariant = batch_invariant
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._threads_sleep = self.device.type == "cpu" and threads_sleep()
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
        available = torch.get_num_threads()
        try:
            return self._forward(batch, store, hidden_layers, self._threads(batch, available))
        finally:
            torch.set_num_threads(available)

    def _threads(self, batch: StepBatch, available: int) -> Threads:
        """All threads for everything, unless waking them costs more than they save; in the batch-invariant
        mode nothing may depend on the batch."""
        if available == 1 or self.batch_invariant or not self._threads_sleep:
            return Threads(available, available, available, available)
        spec, rows = self.spec, len(batch.tokens)
        width = spec.num_heads * spec.head_dim
        weights = 2 * spec.hidden_size * (width + spec.num_kv_heads * spec.head_dim) + 3 * (
            spec.hidden_size * spec.intermediate_size
        )
        scores = sum(part.count * (len(part.context) + part.count) for part in batch.sequences)
        return Threads(
            products=worth(product_us(weights / 4, rows), available),
            attention=worth(scores * width * SCORE_NS / 1000, available),
            head=worth(product_us(spec.vocab_size * spec.hidden_size, len(batch.logit_rows)), available),
            rest=worth(rows * spec.intermediate_size * ELEMENT_NS / 1000, available),
        )

    def _forward(
        self, batch: StepBatch, store: KvStore, hidden_layers: Sequence[int], threads: Threads
    ) -> tuple[Tensor, dict[int, Tensor]]:
        torch.set_num_threads(threads.rest)
        num_heads = self.spec.num_heads
        slots = batch.slots
        if self.batch_invariant:
            plan = plan_attention(batch, self.spec, torch.float64)
        else:
            # 8-bit keys and values of a few rows' contexts, decoded to float32, need not be rounded again.
            wide = store.kv_format != "none" and self.device.type == "cpu"
            plan = plan_attention(batch, self.spec, self.dtype, wide_dtype(self.dtype) if wide else None)
        cos, sin = self.rope.at(batch.positions)
        hidden: dict[int, Tensor] = {}
        x = self.embedding.index_select(0, batch.tokens)
        for i, layer in enumerate(self.layers):
            if i in hidden_layers:
                hidden[i] = x
            qkv = self._by_blocks(partial(self._qkv, layer, threads), x, cos, sin)
            store.write_both(i, slots, qkv[:, num_heads:])
            attention = partial(attend, layer=i, store=store, plan=plan)
            attended = threads.run(threads.attention, attention, qkv[:, :num_heads])
            x = self._by_blocks(partial(self._mix, layer, threads), x, attended)
        if self.spec.num_layers in hidden_layers:
            hidden[self.spec.num_layers] = self._by_blocks(self._final_norm, x)
        if len(batch.logit_rows) < len(x):
            x = x.index_select(0, batch.logit_rows)
        return threads.run(threads.head, self.logits, x), hidden

    def _by_blocks(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """``function`` of all rows at once, or of ``BLOCK_ROWS`` at a time where results must not depend on
        their number; it treats every row alike."""
        rows = len(inputs[0])
        if not self.batch_invariant or rows == 0:
            return function(*inputs)
        missing = -rows % BLOCK_ROWS
        if missing:
            inputs = tuple(torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) for x in inputs)
        blocks = zip(*(torch.split(x, BLOCK_ROWS) for x in inputs), strict=True)
        return torch.cat([function(*(x.contiguous() for x in block)) for block in blocks])[:rows]

    def _qkv(self, layer: DecoderLayer, threads: Threads, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[rows, heads + 2 * kv_heads, head_dim]``: queries and keys, rotated, then values."""
        spec = self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = threads.run(threads.products, layer.qkv, layer.input_norm(x)).view(
            -1, heads + 2 * kv_heads, spec.head_dim
        )
        qk = qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((layer.q_norm(qk[:, :heads]), layer.k_norm(qk[:, heads:])), 1)
        rotate(qk, cos, sin, out=qkv[:, : heads + kv_heads])
        return qkv

    def _mix(self, layer: DecoderLayer, threads: Threads, x: Tensor, attended: Tensor) -> Tensor:
        """The residual stream behind the block: attention's output projection, then SwiGLU."""
        x = x + threads.run(threads.products, layer.o, attended)
        gate, up = threads.run(threads.products, layer.gate_up, layer.post_norm(x)).chunk(2, -1)
        return threads.run(threads.products, layer.down, F.silu(gate).mul_(up)).add_(x)

    def logits(self, x: Tensor) -> Tensor:
        """``x [rows, hidden]``, the residual stream after the last block -> logits ``[rows, vocab]``, float32
        (float64 in float64)."""
        return self._by_blocks(self._logits, x)

    def _logits(self, x: Tensor) -> Tensor:
        if self.dtype in (torch.float32, torch.float64):
            return self.lm_head(self._final_norm(x))
        states = rms_norm(x.float(), self._final_norm_float, self.spec.rms_norm_eps)
        logits = self.lm_head(states.to(self.dtype))
        return logits.float() if self.output_rows is None else sharpen(logits, states, self.output_rows)


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
    best = largest(wide, min(SHARP_LOGITS, logits.shape[-1]))
    rows = weight.index_select(0, best.flatten()).float().view(*best.shape, -1)
    exact = (rows * states[:, None]).sum(-1, dtype=torch.float64)
    return wide.scatter_(1, best, exact.float())


def largest(values: Tensor, count: int) -> Tensor:
    """``[rows, count] int64``: where the ``count`` largest of each row of ``values [rows, n]`` are, in order.

    Of 64 interleaved stretches' maxima (cheap to take) the ``count`` largest lead to candidates that hold
    what is looked for: torch.topk over 49,152 real logits takes 330 us, this 25. Which of equal values at
    the border are among them is left open, as in torch.topk.
    """
    rows, size = values.shape
    columns = size // 64
    if size % 64 or columns < 2 * count:
        return values.topk(count, -1).indices
    grid = values.view(rows, 64, columns)
    best = grid.amax(1).topk(count, -1).indices
    candidates = grid.gather(2, best[:, None].expand(-1, 64, -1)).view(rows, -1)
    at = candidates.topk(count, -1).indices
    # Candidate i of a row stands in line i // count of the grid, in its column best[i % count].
    return (at // count) * columns + best.gather(1, at % count)

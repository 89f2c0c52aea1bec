"""EAGLE-1 and EAGLE-3 heads: one decoder layer, trained over several of its own steps.

The forward is the one that :mod:`trtspec.embedded.drafters.eagle`, ``eagle3`` and ``feature_drafter`` run:

* The pair at position t is (feature of t, token t + 1); its rotary position is t; its output stands for
  the law over token t + 2, which is the target's at position t + 1.
* Step 0 runs all pairs of a sequence on the target's own features. Step j pairs the output that step j - 1
  gave at position p - 1 with token p + 1, at position p: a draft's j-th level. Of the pairs before, those up
  to p - j are the target's, the j - 1 after them come from the steps between ("training-time test", arXiv
  2503.01840, section 3.2; HASS, arXiv 2408.15766, for EAGLE-1).

ModelOpt 0.47 offers EAGLE-3's training, in a forward that normalises the feature twice, while servers do so
once; it has no EAGLE-1. So heads are trained here, in the forward that is deployed, and written in the layout
of ModelOpt's exporter.

The layer starts as the target's last one, on the feature half of its inputs: from random weights a head
learns little in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from trtspec.draft.features import Batch, Target, distillation_loss, laws, places_in, ranks_of, shifted
from trtspec.embedded.attention import Rope, rotate
from trtspec.embedded.layers import rms_norm
from trtspec.errors import InputError, Problem
from trtspec.heads_layout import default_hidden_layers
from trtspec.tensor_headers import read_tensor_headers

Parameters = dict[str, Tensor]
LAYER = "layers.0."


@dataclass(frozen=True)
class EagleTraining:
    """``vocab [tokens] int64``, rising: the draft vocabulary of EAGLE-3; what the loss runs over for
    EAGLE-1, whose output is the target's own. ``num_steps``: steps that are unrolled."""

    kind: Literal["eagle", "eagle3"]
    target: Target
    vocab: Tensor
    num_steps: int = 3
    hard_share: float = 0.5
    step_decay: float = 0.8
    feature_weight: float = 0.1
    """EAGLE-1: weight of the distance between output and the target's feature (smooth L1)."""

    @property
    def third(self) -> bool:
        return self.kind == "eagle3"

    # ------------------------------------------------------------------ weights

    def start(self, seed: int) -> Parameters:
        """The target's last layer, norm and output rows; what it lacks small and random by ``seed``."""
        spec, size = self.target.spec, self.target.spec.hidden_size
        source = f"model.layers.{spec.num_layers - 1}."
        base = _read(self.target.weights, source)
        generator = torch.Generator().manual_seed(seed)

        def small(rows: int, columns: int) -> Tensor:
            return 0.02 * torch.randn(rows, columns, generator=generator)

        parameters: Parameters = {}
        inputs = len(default_hidden_layers(spec.num_layers)) if self.third else 2
        fc = 0.1 * small(size, inputs * size)
        fc[:, -size:] += torch.eye(size)  # the deepest layer, or the feature behind the embedding
        parameters["fc.weight"] = fc
        for name in "qkv":
            weight = base[f"self_attn.{name}_proj.weight"]
            parameters[f"{LAYER}self_attn.{name}_proj.weight"] = (
                torch.cat((small(*weight.shape), weight), -1) if self.third else weight
            )
            if f"self_attn.{name}_proj.bias" in base:
                parameters[f"{LAYER}self_attn.{name}_proj.bias"] = base[f"self_attn.{name}_proj.bias"]
        kept = (
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "post_attention_layernorm",
        )
        for name in kept:
            parameters[f"{LAYER}{name}.weight"] = base[f"{name}.weight"]
        if self.third:
            parameters[f"{LAYER}hidden_norm.weight"] = base["input_layernorm.weight"]
            parameters[f"{LAYER}input_layernorm.weight"] = torch.ones(size)
            parameters["norm.weight"] = _read(self.target.weights, "model.norm.")["weight"]
            parameters["lm_head.weight"] = self.target.output_rows[self.vocab].float()
        return {name: value.clone().contiguous() for name, value in parameters.items()}

    # ------------------------------------------------------------------ forward

    def features(self, parameters: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """``[sequences, length, hidden]``: the features of the target's positions."""
        size = self.target.spec.hidden_size
        if not self.third:
            return hidden[..., -size:]
        return F.linear(hidden[..., :-size], parameters["fc.weight"])

    def unrolled(
        self, parameters: Mapping[str, Tensor], tokens: Tensor, hidden: Tensor, num_steps: int
    ) -> list[Tensor]:
        """The outputs ``[sequences, length, hidden]`` of each step at positions 0 .. length - 1; of step j
        the first j and the last position mean nothing."""
        spec = self.target.spec
        length, dtype = tokens.shape[1], hidden.dtype
        rope = Rope.of(spec, hidden.dtype, hidden.device)
        cos, sin = rope.cos[:length, None], rope.sin[:length, None]
        embedded = F.embedding(shifted(tokens, 1), self.target.embedding).to(dtype)
        features = self.features(parameters, hidden)
        at = torch.arange(length)
        causal = at[None, :] <= at[:, None]
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(num_steps):
            if step:
                features = shifted(outputs[-1], -1)
            x, residual = self._inputs(parameters, embedded, features)
            q, k, v = self._qkv(parameters, x, cos, sin)
            keys.append(k)
            values.append(v)
            seen = causal if step == 0 else at[None, :] <= at[:, None] - step
            attended = _attend(q, keys, values, seen)
            outputs.append(self._mix(parameters, residual, attended.to(x.dtype)))
        return outputs

    def _inputs(
        self, parameters: Mapping[str, Tensor], embedded: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(what attention sees, the residual)."""
        eps = self.target.spec.rms_norm_eps
        if not self.third:
            x = F.linear(torch.cat((embedded, features.to(embedded.dtype)), -1), parameters["fc.weight"])
            return x, x
        input_norm = parameters[f"{LAYER}input_layernorm.weight"]
        hidden_norm = parameters[f"{LAYER}hidden_norm.weight"]
        normed = _norm(embedded, input_norm, eps), _norm(features, hidden_norm, eps)
        return torch.cat(normed, -1), features

    def _qkv(
        self, parameters: Mapping[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values ``[sequences, length, heads, head_dim]``."""
        spec = self.target.spec

        def project(name: str, heads: int) -> Tensor:
            module = f"{LAYER}self_attn.{name}_proj"
            out = F.linear(x, parameters[f"{module}.weight"], parameters.get(f"{module}.bias"))
            return out.view(*x.shape[:2], heads, spec.head_dim)

        q, k, v = (
            project("q", spec.num_heads),
            project("k", spec.num_kv_heads),
            project("v", spec.num_kv_heads),
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _mix(self, parameters: Mapping[str, Tensor], residual: Tensor, attended: Tensor) -> Tensor:
        p = f"{LAYER}mlp."
        out = residual + F.linear(attended, parameters[f"{LAYER}self_attn.o_proj.weight"])
        eps = self.target.spec.rms_norm_eps
        x = _norm(out, parameters[f"{LAYER}post_attention_layernorm.weight"], eps)
        gate = F.linear(x, parameters[f"{p}gate_proj.weight"])
        inner = F.silu(gate) * F.linear(x, parameters[f"{p}up_proj.weight"])
        return out + F.linear(inner, parameters[f"{p}down_proj.weight"])

    def logits(self, parameters: Mapping[str, Tensor], outputs: Tensor, *, whole: bool = False) -> Tensor:
        """``[rows, tokens]`` over the draft vocabulary; ``whole``: what the drafter computes, which for
        EAGLE-1 is the target's whole vocabulary."""
        if self.third:
            normed = _norm(outputs, parameters["norm.weight"], self.target.spec.rms_norm_eps)
            return F.linear(normed, parameters["lm_head.weight"])
        rows = self.target.output_rows if whole else self.target.output_rows[self.vocab]
        return F.linear(outputs, rows.to(outputs.dtype))

    # ------------------------------------------------------------------ loss and acceptance

    def loss(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        spec = self.target.spec
        outputs = self.unrolled(parameters, batch.tokens, batch.hidden, self.num_steps)
        states = batch.hidden[..., -spec.hidden_size :]
        rows = self.target.output_rows[self.vocab]
        usable = batch.taught & shifted(batch.taught, 1)
        teacher_states = shifted(states, 1)
        teacher = torch.zeros(*usable.shape, len(self.vocab), dtype=torch.bfloat16)
        teacher[usable] = laws(teacher_states[usable], rows).to(torch.bfloat16)
        said = places_in(self.vocab, shifted(batch.tokens, 2))
        total = torch.zeros(())
        for step, output in enumerate(outputs):
            here = usable.clone()
            here[:, :step] = False
            found = output[here]
            loss = distillation_loss(
                self.logits(parameters, found), teacher[here].float(), said[here], self.hard_share
            )
            if not self.third:
                distance = F.smooth_l1_loss(found.float(), teacher_states[here].float())
                loss = loss + self.feature_weight * distance
            total = total + self.step_decay**step * loss
        return total

    def matches(self, parameters: Mapping[str, Tensor], batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Of each level j of a draft that starts at position t (rank, usable): ``[sequences, length]``, the
        rank of the token said at t + 2 + j, given that all before it were drafted right, and where there
        is one. The vocabulary's size for a token that the draft vocabulary lacks."""
        out = []
        for step, output in enumerate(self.unrolled(parameters, batch.tokens, batch.hidden, self.num_steps)):
            usable = batch.taught & shifted(batch.taught, 1 + step)
            said = shifted(batch.tokens, 2 + step)[usable]
            logits = self.logits(parameters, shifted(output, step)[usable], whole=True).float()
            at = places_in(self.vocab, said) if self.third else said
            ranks = ranks_of(logits, at.clamp(min=0))
            all_ranks = torch.zeros(usable.shape, dtype=torch.int64)
            all_ranks[usable] = torch.where(at >= 0, ranks, self.target.spec.vocab_size)
            out.append((all_ranks, usable))
        return out

    # ------------------------------------------------------------------ the folder

    def export(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any], str]:
        """(tensors, config.json, file name) in the layout of ModelOpt's exporter and the authors' code."""
        spec, dtype = self.target.spec, self.target.embedding.dtype
        tensors = {name: value.to(dtype).contiguous() for name, value in parameters.items()}
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3" if self.third else "LlamaForCausalLMEagle"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "hidden_act": "silu",
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_theta": spec.rope_theta,
            "rope_scaling": spec.rope_scaling,
            "max_position_embeddings": spec.max_positions,
            "tie_word_embeddings": False,
            "attention_bias": f"{LAYER}self_attn.q_proj.bias" in tensors,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if self.third:
            layers = default_hidden_layers(spec.num_layers)
            config["draft_vocab_size"] = len(self.vocab)
            # ModelOpt names the layer whose output is meant, from 0: one less than ours.
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
            }
            tensors["d2t"] = self.vocab - torch.arange(len(self.vocab))
        else:
            config["bias"] = False
        return tensors, config, "model.safetensors"


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight.to(x.dtype), eps)


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
    """``[sequences, length, heads * head_dim]`` of one step's queries.

    ``seen [length, length]``: which of the first keys, the target's own pairs, each query sees. Of the other
    lists' keys, those of the steps since, it sees one each: of the i-th before the last the key i positions
    before its own.
    """
    batch, length, heads, dim = q.shape
    groups = heads // keys[0].shape[2]
    q = q.transpose(1, 2) * dim**-0.5
    k0, v0 = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (keys[0], values[0]))
    scores = (q @ k0.transpose(-1, -2)).float().masked_fill(~seen, -torch.inf)
    own = []
    for step in range(1, len(keys)):
        back = len(keys) - 1 - step
        k = shifted(keys[step], -back).transpose(1, 2).repeat_interleave(groups, 1)
        own.append((q * k).sum(-1, keepdim=True).float())
    law = torch.cat((scores, *own), -1).softmax(-1).to(v0.dtype)
    out = law[..., :length] @ v0
    for step in range(1, len(keys)):
        back = len(keys) - 1 - step
        v = shifted(values[step], -back).transpose(1, 2).repeat_interleave(groups, 1)
        out = out + law[..., length + step - 1 : length + step] * v
    return out.transpose(1, 2).reshape(batch, length, heads * dim)


def _read(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The plain tensors of ``folder`` whose names begin with ``prefix``, in float32, without it."""
    headers, problems = read_tensor_headers(folder)
    if problems:
        raise InputError(problems)
    found: dict[str, Tensor] = {}
    for name, header in headers.items():
        if not name.startswith(prefix):
            continue
        if header.dtype not in ("F32", "F16", "BF16", "F64"):
            message = f"{header.dtype} weights; heads start from the 16-bit checkpoint, give that as --model"
            raise InputError(Problem(message, file=str(folder), key=name))
        with safe_open(header.file, "pt") as file:  # type: ignore[no-untyped-call]
            found[name.removeprefix(prefix)] = file.get_tensor(name).float()
    return found

"""EAGLE-1/2 and EAGLE-3 heads on disk: their layout checked against a target, and the weights.

The formats are named in :mod:`trtspec.embedded.heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from trtspec.embedded.heads import HeadsKind, HeadTensors, Loader, Reader, describe, layer_prefix
from trtspec.embedded.layers import Linear
from trtspec.embedded.model import Decoder
from trtspec.errors import InputError, Problem
from trtspec.modelspec import ModelSpec, read_rope


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


@dataclass(frozen=True)
class EagleLayout:
    tensors: HeadTensors
    spec: ModelSpec
    hidden_layers: tuple[int, ...]
    layer: str
    """Prefix of the decoder layer's names."""


def default_hidden_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and top of the target as EAGLE-3 takes them: after 2, N // 2 and N - 3 layers. ModelOpt
    says {1, N / 2 - 1, N - 4}: it counts the layer whose output is meant, from 0."""
    return tuple(sorted({2, max(1, num_layers // 2), max(1, num_layers - 3)}))


def eagle_layout(
    reader: Reader, config: Mapping[str, Any], path: Path, target: ModelSpec, kind: HeadsKind
) -> EagleLayout:
    third = kind == "eagle3"
    layer = layer_prefix(reader.tensors.shapes)
    problems = reader.problems

    def bad(key: str, message: str) -> None:
        problems.append(Problem(message, file=str(path), key=key))

    def integer(key: str, default: int) -> int:
        value = config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            bad(key, f"{value!r} is not a whole number of at least 1")
            return default
        return value

    hidden = integer("hidden_size", target.hidden_size)
    heads = integer("num_attention_heads", target.num_heads)
    kv_heads = integer("num_key_value_heads", heads)
    head_dim = integer("head_dim", max(1, hidden // heads))
    vocab = integer("vocab_size", target.vocab_size)
    draft_vocab = integer("draft_vocab_size", vocab) if third else vocab
    inner = integer("intermediate_size", target.intermediate_size)
    if heads % kv_heads:
        bad("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    if head_dim % 2:
        bad("head_dim", f"{head_dim} is odd; rotary embeddings need an even size")
    if integer("num_hidden_layers", 1) != 1:
        bad("num_hidden_layers", f"{config['num_hidden_layers']} layers; heads of one layer are read here")
    if vocab != target.vocab_size:
        bad("vocab_size", f"{vocab}, the target has {target.vocab_size}; these heads are another target's")
    if draft_vocab > vocab:
        bad("draft_vocab_size", f"{draft_vocab} exceeds the vocabulary of {vocab}")
    if not third and hidden != target.hidden_size:
        bad("hidden_size", f"{hidden}, the target has {target.hidden_size}; these heads are another target's")
    if third and config.get("target_hidden_size") not in (None, target.hidden_size):
        found = f"{config['target_hidden_size']}, the target has {target.hidden_size}"
        bad("target_hidden_size", f"{found}; these heads are another target's")
    if config.get("hidden_act", "silu") != "silu":
        bad("hidden_act", f"{config['hidden_act']!r} is not supported; only 'silu'")
    if config.get("quantization_config"):
        bad("quantization_config", "quantized heads are not read here; export them in 16 bit")
    eagle_config = config.get("eagle_config") or {}
    if third and eagle_config.get("use_aux_hidden_state") is False:
        bad(
            "eagle_config.use_aux_hidden_state", "false; heads without the target's inner layers are not read"
        )
    if third and config.get("norm_before_residual"):
        bad("norm_before_residual", "true; only heads whose residual is the feature before its norm are read")
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 < eps < 1:
        bad("rms_norm_eps", f"{eps!r} is not a small positive number")
        eps = 1e-6
    theta, scaling = read_rope(
        config, path, problems, integer("max_position_embeddings", target.max_positions)
    )

    target_hidden = target.hidden_size
    hidden_layers: tuple[int, ...] = (target.num_layers,)
    fc_inputs = 2 * hidden
    if third:
        hidden_layers = _aux_layers(config, eagle_config, target, bad)
        fc_inputs = len(hidden_layers) * target_hidden
    reader.want("fc.weight", hidden, fc_inputs)
    reader.want("fc.bias", hidden, optional=True)
    reader.want("embed_tokens.weight", vocab, hidden, optional=hidden == target_hidden)
    width = 2 * hidden if third else hidden
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        reader.want(f"{attention}{name}_proj.weight", rows * head_dim, width)
        reader.want(f"{attention}{name}_proj.bias", rows * head_dim, optional=True)
    reader.want(f"{attention}o_proj.weight", hidden, heads * head_dim)
    reader.want(f"{mlp}gate_proj.weight", inner, hidden)
    reader.want(f"{mlp}up_proj.weight", inner, hidden)
    reader.want(f"{mlp}down_proj.weight", hidden, inner)
    reader.want(f"{layer}input_layernorm.weight", hidden, optional=not third)
    reader.want(f"{layer}post_attention_layernorm.weight", hidden)
    if third:
        reader.want(f"{layer}hidden_norm.weight", hidden)
        reader.want("norm.weight", hidden)
        same_output = draft_vocab == vocab and hidden == target_hidden
        reader.want("lm_head.weight", draft_vocab, hidden, optional=same_output)
        if reader.want("d2t", draft_vocab, optional=draft_vocab == vocab, dtypes=("I64", "I32")):
            _check_d2t(reader, draft_vocab, vocab)
        reader.seen.add("t2d")
    else:
        reader.want("lm_head.weight", vocab, hidden, optional=True)
    unknown = [name for name in reader.tensors.shapes if name not in reader.seen and "inv_freq" not in name]
    for name in unknown:
        reader.bad(name, f"no part of the {kind} heads that are read here")
    spec = replace(
        target,
        num_layers=1,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draft_vocab,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(eps),
        tie_embeddings=False,
        sliding_window=None,
        quant=None,
    )
    return EagleLayout(reader.tensors, spec, hidden_layers, layer)


def _aux_layers(
    config: Mapping[str, Any],
    eagle_config: Mapping[str, Any],
    target: ModelSpec,
    bad: Callable[[str, str], None],
) -> tuple[int, ...]:
    """The target's layers whose outputs the head sees, in Decoder.forward's counting.

    ``eagle_config.eagle_aux_hidden_state_layer_ids`` is ModelOpt's and names layers from 0, meaning their
    outputs; the same key at the top level is vLLM's and counts the layers before the state.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    listed, shift, where = config.get(key), 0, key
    if eagle_config.get(key):
        listed, shift, where = eagle_config[key], 1, f"eagle_config.{key}"
    if not listed:
        return default_hidden_layers(target.num_layers)
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        bad(where, f"{listed!r} is not a list of layer numbers")
        return default_hidden_layers(target.num_layers)
    # The state after the last layer is only to be had normalised, which is another one.
    last = target.num_layers - 1
    if any(not 0 <= i + shift <= last for i in listed):
        bad(where, f"{listed}; the target of {target.num_layers} layers has {-shift} .. {last - shift}")
    return tuple(i + shift for i in listed)


def _check_d2t(reader: Reader, draft_vocab: int, vocab: int) -> None:
    """``d2t[i]`` is what is added to draft id i: inside the vocabulary, no two the same."""
    if reader.tensors.shapes["d2t"] != (draft_vocab,):
        return
    ids = torch.arange(draft_vocab) + reader.tensors.value("d2t").long()
    outside = int(((ids < 0) | (ids >= vocab)).sum())
    if outside:
        reader.bad(
            "d2t", f"{outside} draft tokens map outside the vocabulary of {vocab}; the map is another's"
        )
    elif len(set(ids.tolist())) != draft_vocab:
        reader.bad(
            "d2t", f"{draft_vocab - len(set(ids.tolist()))} draft tokens share a target token; damaged map"
        )


def load_eagle(folder: Path, kind: Literal["eagle", "eagle3"], target: Decoder) -> EagleWeights:
    """The EAGLE head in ``folder``, in the target's dtype. Raises InputError with all problems."""
    problems: list[Problem] = []
    layout = describe(folder, kind, target.spec, problems)
    if problems:
        raise InputError(problems)
    assert isinstance(layout, EagleLayout)
    load, layer, names = Loader(layout.tensors, target), layout.layer, layout.tensors.shapes
    embedding = load.maybe("embed_tokens.weight")
    if embedding is None or torch.equal(embedding, target.embedding):
        embedding = target.embedding
    own_output = kind == "eagle3" and "lm_head.weight" in names
    token_ids = None
    if "d2t" in names:
        offsets = layout.tensors.value("d2t").long()
        token_ids = (torch.arange(len(offsets)) + offsets).to(target.device)
    weights = EagleWeights(
        spec=layout.spec,
        hidden_layers=layout.hidden_layers,
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

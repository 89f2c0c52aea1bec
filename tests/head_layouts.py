"""Folders of draft heads as the tools of the field write them, for a tiny target.

Written from their sources, not with our converter: which tensors, which names, which config.json, which file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import make_tiny_model
from torch import Tensor

VOCAB, HIDDEN, LAYERS, INNER, DRAFTED = 320, 64, 8, 96, 200
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
THETA = 50000.0
BASE = "someone/tiny-chat"
Tensors = dict[str, Tensor]
Config = dict[str, Any]


def make_target(folder: Path, **options: Any) -> Path:
    """The target that the heads here fit."""
    settings = {"rope_theta": THETA, "dtype": "bfloat16", **options}
    return make_tiny_model(folder, vocab=VOCAB, hidden=HIDDEN, layers=LAYERS, **settings)


def _weights(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16()


def _named(prefix: str, shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    return {
        prefix + name: _weights(*shape, seed=seed + at) for at, (name, shape) in enumerate(shapes.items())
    }


def _layer(prefix: str, width: int) -> Tensors:
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return _named(prefix, shapes, 10)


def _layer_config() -> Config:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_theta": THETA,
        "torch_dtype": "bfloat16",
    }


def draft_ids() -> Tensor:
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFTED].sort().values


def _eagle3(prefix: str, *, mask: bool) -> Tensors:
    tensors = _layer(prefix, 2 * HIDDEN)
    tensors |= _named("", {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (DRAFTED, HIDDEN)}, 40)
    norms = (f"{prefix}input_layernorm.weight", f"{prefix}hidden_norm.weight", "norm.weight")
    tensors |= {name: 1 + _weights(HIDDEN, seed=60 + at) for at, name in enumerate(norms)}
    tensors["d2t"] = draft_ids() - torch.arange(DRAFTED)
    if mask:
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, draft_ids(), True)
    return tensors


def _eagle1(fc: str, prefix: str) -> Tensors:
    shapes = {f"{fc}.weight": (HIDDEN, 2 * HIDDEN), f"{fc}.bias": (HIDDEN,)}
    return _layer(prefix, HIDDEN) | _named("", shapes, 30)


def _medusa(block: str, output: str, count: int = 3) -> Tensors:
    tensors: Tensors = {}
    for head in range(count):
        name = block.format(head)
        tensors[f"{name}.linear.weight"] = _weights(HIDDEN, HIDDEN, seed=100 + head)
        tensors[f"{name}.linear.bias"] = _weights(HIDDEN, seed=200 + head)
        tensors[output.format(head)] = _weights(VOCAB, HIDDEN, seed=300 + head)
    return tensors


def _verifier() -> Config:
    return {
        "algorithm": "eagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": BASE, "architectures": ["LlamaForCausalLM"]},
    }


MEDUSA_CONFIG: Config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": BASE}


def medusa_original() -> tuple[Tensors, Config, str]:
    return _medusa("{}.0", "{}.1.weight"), dict(MEDUSA_CONFIG), "medusa_lm_head.pt"


def medusa_tensorrt() -> tuple[Tensors, Config, str]:
    return _medusa("{}.0", "{}.1.weight"), dict(MEDUSA_CONFIG), "medusa_lm_head.safetensors"


def medusa_modelopt() -> tuple[Tensors, Config, str]:
    """The whole model; the base's tensors and config.json are there too."""
    base = _named("", {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}, 400)
    heads = _medusa("medusa_heads.{}.0", "medusa_heads.{}.1.weight")
    return heads | base, {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB}, "model.safetensors"


def medusa_modelopt_export() -> tuple[Tensors, Config, str]:
    base = _named("", {"transformer.vocab_embedding.weight": (VOCAB, HIDDEN)}, 400)
    heads = _medusa("medusa_heads.{}.medusa_layers.0", "medusa_heads.{}.lm_head.weight")
    return heads | base, {"architecture": "MedusaForCausalLM"}, "rank0.safetensors"


def eagle_original() -> tuple[Tensors, Config, str]:
    config = {"architectures": ["LlamaForCausalLM"], **_layer_config()}
    return _eagle1("fc", "layers.0."), config, "pytorch_model.bin"


def eagle_tensorrt() -> tuple[Tensors, Config, str]:
    return *eagle_original()[:2], "model.safetensors"


def eagle_speculators() -> tuple[Tensors, Config, str]:
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "layernorms": False,
        "fusion_bias": True,
        "transformer_layer_config": _layer_config(),
        "speculators_config": _verifier(),
    }
    return _eagle1("fusion_fc", "transformer."), config, "model.safetensors"


def eagle3_original() -> tuple[Tensors, Config, str]:
    config = {"architectures": ["LlamaForCausalLM"], **_layer_config(), "draft_vocab_size": DRAFTED}
    return _eagle3("midlayer.", mask=True), config, "pytorch_model.bin"


def eagle3_tensorrt() -> tuple[Tensors, Config, str]:
    return _eagle3("midlayer.", mask=False), eagle3_original()[1], "model.safetensors"


def eagle3_modelopt() -> tuple[Tensors, Config, str]:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(),
        "draft_vocab_size": DRAFTED,
        "rope_scaling": {"rope_type": "default"},
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "next_layer_regular": True,
        },
    }
    return _eagle3("layers.0.", mask=False), config, "model.safetensors"


def eagle3_specforge() -> tuple[Tensors, Config, str]:
    config = {"architectures": ["LlamaForCausalLMEagle3"], **_layer_config(), "draft_vocab_size": DRAFTED}
    return _eagle3("midlayer.", mask=True), config, "model.safetensors"


def eagle3_speculators() -> tuple[Tensors, Config, str]:
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "draft_vocab_size": DRAFTED,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": _layer_config(),
        "speculators_config": _verifier(),
    }
    tensors = _eagle3("layers.0.", mask=True)
    tensors["embed_tokens.weight"] = _weights(VOCAB, HIDDEN, seed=500)
    return tensors, config, "model.safetensors"


LAYOUTS: dict[str, Callable[[], tuple[Tensors, Config, str]]] = {
    made.__name__: made
    for made in (
        medusa_original, medusa_tensorrt, medusa_modelopt, medusa_modelopt_export, eagle_original,
        eagle_tensorrt, eagle_speculators, eagle3_original, eagle3_tensorrt, eagle3_modelopt,
        eagle3_specforge, eagle3_speculators,
    )
}  # fmt: skip
"""KIND_LAYOUT -> (tensors, config.json, file of the weights)."""


def write_layout(
    folder: Path, name: str, change: Callable[[Tensors, Config], None] = lambda tensors, config: None
) -> Path:
    """A good folder of a layout, after ``change``."""
    tensors, config, file = LAYOUTS[name]()
    change(tensors, config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder

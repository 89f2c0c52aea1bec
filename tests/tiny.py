"""Tiny random Hugging Face checkpoints, written without transformers, for every test that needs a model.

The weights are scaled so that logits spread over several units: greedy decoding does not collapse to one
token and argmax margins are far above float64 rounding. The tokenizer is a byte-level BPE (one token per
byte plus the merges that ``vocab`` leaves room for) with a ChatML template.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    family: Family = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    vocab: int = 320,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    tie: bool = False,
    max_positions: int = 512,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    rope_parameters_key: bool = False,
    shards: int = 1,
    tokenizer: bool = True,
    config_overrides: dict[str, Any] | None = None,
) -> Path:
    """``folder``, now holding config.json, safetensors weights, generation_config.json and a tokenizer.

    ``vocab`` must be at least 259 (256 bytes and 3 special tokens) when a tokenizer is written.
    ``rope_parameters_key`` writes the rope settings the way transformers 5 does. ``shards`` > 1 splits the
    weights with an index. The same arguments always give the same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden // heads
    intermediate = intermediate or 2 * hidden
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": dtype,
        "use_cache": True,
        "initializer_range": 0.02,
    }
    if rope_parameters_key:
        config["rope_parameters"] = {"rope_theta": rope_theta, "rope_type": "default", **(rope_scaling or {})}
    else:
        config["rope_theta"] = rope_theta
        config["rope_scaling"] = rope_scaling
    if family == "llama":
        config |= {"attention_bias": False, "mlp_bias": False}
    elif family == "mistral":
        config["sliding_window"] = None
    elif family == "qwen2":
        config |= {"use_sliding_window": False, "sliding_window": None}
    else:
        config |= {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    config |= config_overrides or {}
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": [EOS_TOKEN_ID], "do_sample": False},
    )
    tensors = tiny_weights(config, family, seed=seed, dtype=getattr(torch, dtype))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_sharded(folder, tensors, shards)
    if tokenizer:
        write_tokenizer(folder, vocab)
    return folder


def tiny_weights(
    config: dict[str, Any], family: Family, *, seed: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Random weights by Hugging Face name: 1/sqrt(fan in) projections, norms around 1, peaked lm_head."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    rows = {
        "q": config["num_attention_heads"] * head_dim,
        "k": config["num_key_value_heads"] * head_dim,
        "v": config["num_key_value_heads"] * head_dim,
    }

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)

    def linear(out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out_features, in_features, std=gain / math.sqrt(in_features))

    tied = config["tie_word_embeddings"]
    # The final norm brings rows to unit size, so a head row of norm 3 gives logits of deviation 3.
    tensors = {
        "model.embed_tokens.weight": normal(
            config["vocab_size"], hidden, std=3.0 / math.sqrt(hidden) if tied else 1.0
        )
    }
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name in ("q", "k", "v"):
            tensors[f"{p}self_attn.{name}_proj.weight"] = linear(rows[name], hidden, 1.5)
            if family == "qwen2":
                tensors[f"{p}self_attn.{name}_proj.bias"] = normal(rows[name], std=0.3)
        tensors[f"{p}self_attn.o_proj.weight"] = linear(hidden, rows["q"])
        if family == "qwen3":
            tensors[f"{p}self_attn.q_norm.weight"] = normal(head_dim, std=0.1, mean=1.0)
            tensors[f"{p}self_attn.k_norm.weight"] = normal(head_dim, std=0.1, mean=1.0)
        tensors[f"{p}mlp.gate_proj.weight"] = linear(config["intermediate_size"], hidden, 1.5)
        tensors[f"{p}mlp.up_proj.weight"] = linear(config["intermediate_size"], hidden, 1.5)
        tensors[f"{p}mlp.down_proj.weight"] = linear(hidden, config["intermediate_size"])
        tensors[f"{p}input_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        tensors[f"{p}post_attention_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
    tensors["model.norm.weight"] = normal(hidden, std=0.1, mean=1.0)
    if not tied:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden, 3.0)
    return tensors


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a byte-level BPE tokenizer.json with exactly ``vocab`` tokens and its tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    if vocab < len(tokens):
        raise ValueError(f"vocab {vocab} is too small for a tokenizer; at least {len(tokens)}")
    merges: list[tuple[str, str]] = []
    letters = "etaoinshrdlu"
    pairs = [("Ġ", a) for a in letters] + [(a, b) for a in letters for b in letters]
    pairs += [("Ġ" + a, b) for a in letters for b in letters]
    for left, right in pairs:
        if len(tokens) == vocab:
            break
        merges.append((left, right))
        tokens[left + right] = len(tokens)
    for i in range(vocab - len(tokens)):
        tokens[f"<|unused_{i}|>"] = len(tokens)
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _save_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

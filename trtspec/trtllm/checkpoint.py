"""What a checkpoint is to TensorRT-LLM: its architecture, its sizes and what it says of its quantization.

Reads JSON files only: no torch, no network. Unlike :mod:`trtspec.modelspec`, which admits what trtspec itself
computes with, this reads any architecture, because TensorRT-LLM runs more of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.known_models import find_known
from trtspec.modelspec import CONFIG, GENERATION_CONFIG, QUANT_CONFIG, ModelSpec, read_modelspec
from trtspec.tensor_headers import read_json

ENCODER_DECODERS = (
    "T5ForConditionalGeneration",
    "MT5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MBartForConditionalGeneration",
    "WhisperForConditionalGeneration",
)


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face folder's config.json. A size is None where the file does not say it."""

    folder: Path | None
    """None where the numbers come from the table of known models."""
    architecture: str
    num_layers: int | None
    hidden_size: int | None
    intermediate_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    vocab_size: int | None
    max_positions: int | None
    num_experts: int
    """0: dense."""
    encoder_decoder: bool
    tie_embeddings: bool
    rope_theta: float | None
    rope_scaling: Mapping[str, Any] | None
    """Without its spelling differences: ``rope_type`` and that type's keys; None for plain RoPE."""
    eos_token_ids: tuple[int, ...]
    quantization: Mapping[str, Any] | None
    """``quantization`` of hf_quant_config.json (ModelOpt); None without the file."""
    quant_method: str | None
    """``quantization_config.quant_method`` of config.json: what another tool, or ModelOpt, left there."""
    spec: ModelSpec | None
    """Where trtspec can compute with the model too."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``. Raises InputError with every problem of its JSON files."""
    folder = Path(folder)
    problems: list[Problem] = []
    config = read_json(folder / CONFIG, problems) if (folder / CONFIG).exists() else None
    if config is None:
        raise InputError(
            problems or [Problem("missing; the folder is not a checkpoint", file=str(folder / CONFIG))]
        )
    generation = read_json(folder / GENERATION_CONFIG, problems) if _has(folder, GENERATION_CONFIG) else None
    export = read_json(folder / QUANT_CONFIG, problems) if _has(folder, QUANT_CONFIG) else None
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        message = "missing or not a list of names; a Hugging Face config.json names its architecture"
        problems.append(Problem(message, file=str(folder / CONFIG), key="architectures"))
    quantization = None
    if export is not None:
        quantization = export.get("quantization")
        if not isinstance(quantization, dict):
            problems.append(
                Problem("missing or not a mapping", str(folder / QUANT_CONFIG), key="quantization")
            )
    if problems:
        raise InputError(problems)
    text = config.get("text_config")  # multimodal models keep the decoder's numbers there
    values = {**config, **text} if isinstance(text, dict) else config
    method = values.get("quantization_config")
    heads, hidden = _integer(values, "num_attention_heads"), _integer(values, "hidden_size")
    theta, scaling = _rope(values)
    return Checkpoint(
        folder=folder,
        architecture=str(architectures[0]),  # type: ignore[index]
        num_layers=_integer(values, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_integer(values, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_integer(values, "num_key_value_heads") or heads,
        head_dim=_integer(values, "head_dim") or (hidden // heads if hidden and heads else None),
        vocab_size=_integer(values, "vocab_size"),
        max_positions=_integer(values, "max_position_embeddings"),
        num_experts=max(
            _integer(values, key) or 0 for key in ("num_local_experts", "num_experts", "n_routed_experts")
        ),
        encoder_decoder=values.get("is_encoder_decoder") is True,
        tie_embeddings=values.get("tie_word_embeddings") is True,
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=_eos(values, generation),
        quantization=quantization,
        quant_method=str(method["quant_method"])
        if isinstance(method, dict) and "quant_method" in method
        else None,
        spec=_spec(folder),
    )


def of_spec(spec: ModelSpec, folder: Path | None = None) -> Checkpoint:
    """The same facts of a model that trtspec itself can compute."""
    quant = spec.quant
    return Checkpoint(
        folder=folder,
        architecture=spec.architecture,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        num_experts=0,
        encoder_decoder=False,
        tie_embeddings=spec.tie_embeddings,
        rope_theta=spec.rope_theta,
        rope_scaling=spec.rope_scaling,
        eos_token_ids=spec.eos_token_ids,
        quantization=None
        if quant is None
        else {
            "quant_algo": quant.algo,
            "kv_cache_quant_algo": quant.kv_algo,
            "group_size": quant.group_size,
            "exclude_modules": list(quant.exclude_modules),
        },
        quant_method=None if quant is None else "modelopt",
        spec=spec,
    )


def known_checkpoint(source: str) -> Checkpoint | None:
    """The checkpoint of a known model (by hub id or size), without having it; None if it is not known."""
    known = find_known(source)
    return None if known is None else of_spec(known.spec)


def _spec(folder: Path) -> ModelSpec | None:
    try:
        return read_modelspec(folder)
    except InputError:
        return None


def _has(folder: Path, name: str) -> bool:
    return (folder / name).exists()


def _integer(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if type(value) is int and 0 < value <= 1 << 30 else None


def _rope(values: Mapping[str, Any]) -> tuple[float | None, Mapping[str, Any] | None]:
    """transformers 4 writes ``rope_theta`` and ``rope_scaling``, transformers 5 ``rope_parameters``."""
    parameters = values.get("rope_parameters")
    new = dict(parameters) if isinstance(parameters, dict) else {}
    theta = values.get("rope_theta", new.get("rope_theta"))
    old = values.get("rope_scaling")
    scaling = dict(old) if isinstance(old, dict) else {k: v for k, v in new.items() if k != "rope_theta"}
    kind = scaling.pop("rope_type", None) or scaling.get("type") or "default"
    scaling.pop("type", None)
    number = isinstance(theta, int | float) and not isinstance(theta, bool)
    return (
        float(theta) if number else None,  # type: ignore[arg-type]
        None if kind == "default" else {"rope_type": kind, **scaling},
    )


def _eos(values: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    found: set[int] = set()
    for source in (values, generation or {}):
        value = source.get("eos_token_id")
        found.update(token for token in (value if isinstance(value, list) else [value]) if type(token) is int)
    return tuple(sorted(found))

"""Heads from one tool's layout to another's, bit for bit.

Tensors are renamed, never computed: what goes out is the bytes that came in. Three kinds are added or left
out, and each can be made again: ``t2d`` (follows from ``d2t``), the maps of a head that drafts the whole
vocabulary, and zero biases of Medusa blocks. A head that uses the target's output projection gets a copy
where the layout wants one. What a layout cannot say is refused by name, not left out.

The layouts are described in :mod:`trtspec.heads_layout`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.artifact import file_sha256
from trtspec.errors import InputError, Problem
from trtspec.folders import new_folder, write_json
from trtspec.heads_check import Target, check_heads
from trtspec.heads_layout import (
    CONFIG,
    LICENCES,
    MEDUSA_FILES,
    RECORD,
    SPECFORGE_ARCHITECTURE,
    Heads,
    Layout,
    default_hidden_layers,
    named_hidden_layers,
)
from trtspec.heads_shape import EagleShape, MedusaShape, draft_vocabulary, drafted_mask
from trtspec.tensor_headers import DTYPE_BYTES, TensorHeader, read_tensor_headers
from trtspec.user_files import explain_os_error

LAYOUTS: tuple[Layout, ...] = ("tensorrt", "original", "modelopt", "speculators", "specforge")
_AUX = "eagle_aux_hidden_state_layer_ids"
_NOT_OF_A_LAYER = {
    "architectures", "auto_map", "base_model_name_or_path", "draft_vocab_size", "eagle_config", _AUX,
    "embed_requires_grad", "fc_norm", "fusion_bias", "has_no_defaults_at_init", "layernorms",
    "norm_before_fc", "norm_before_residual", "norm_output", "target_hidden_size",
    "transformer_layer_architecture",
}  # fmt: skip
"""Keys of the flat config.json that speculators keep outside ``transformer_layer_config``, or not at all."""
_SPECULATIVE_TOKENS = 5
"""What the converter of speculators writes; vLLM takes it for its number of draft tokens."""


@dataclass(frozen=True)
class Made:
    """A tensor that is in the new folder only."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes

    def read(self) -> bytes:
        return self.values


@dataclass(frozen=True)
class Conversion:
    """What would be written: :attr:`tensors` by their new names."""

    heads: Heads
    layout: Layout
    weights_file: str
    tensors: Mapping[str, TensorHeader | Made]
    config: Mapping[str, Any]
    added: tuple[str, ...]
    left_out: tuple[str, ...]
    """Names in the old file; each can be made again from what is kept."""
    notes: tuple[str, ...]

    @property
    def renamed(self) -> dict[str, str]:
        """Old name -> new name, of the tensors that have another."""
        old = {id(header): name for own, name in self.heads.stored.items()
               for header in (self.heads.tensors[own],)}  # fmt: skip
        pairs = {old[id(part)]: name for name, part in self.tensors.items() if id(part) in old}
        return {before: after for before, after in pairs.items() if before != after}

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in self.tensors.values())


def plan_conversion(folder: Path, layout: Layout, target: Target | None = None) -> Conversion:
    """How the heads in ``folder`` look in ``layout``. Reads headers and the draft vocabulary only.

    ``target`` is needed where the layout wants what the heads leave to it. Raises InputError with everything
    that is wrong with the heads, or that the layout cannot say.
    """
    found = check_heads(folder, target)
    if found.problems or found.heads is None:
        raise InputError(found.problems)
    heads, shape = found.heads, found.shape
    if isinstance(shape, MedusaShape):
        return _medusa(heads, shape, layout, target)
    assert isinstance(shape, EagleShape)
    if heads.kind == "eagle":
        return _eagle(heads, shape, layout, target)
    return _eagle3(heads, shape, layout, target)


def write_conversion(conversion: Conversion, out: Path, *, replace: bool = False) -> None:
    """Write the new folder, whole or not at all, the record of the training with it. Raises as
    :func:`~trtspec.folders.new_folder`; MissingError if the disk is full or torch is not there to pickle."""
    heads = conversion.heads
    with new_folder(out, replace=replace) as partial:
        try:
            write_json(partial / CONFIG, conversion.config)
            weights = partial / conversion.weights_file
            if weights.suffix == ".safetensors":
                write_safetensors(weights, conversion.tensors)
            else:
                _write_pickled(weights, conversion.tensors)
            for path in sorted(heads.folder.iterdir()):
                if path.is_file() and path.name.upper().startswith(LICENCES):
                    (partial / path.name).write_bytes(path.read_bytes())
            if heads.record:
                files = {name: file_sha256(partial / name) for name in (weights.name, CONFIG)}
                source = {"layout": heads.layout, "files": heads.record.get("files")}
                write_json(partial / RECORD, {**heads.record, "files": files, "converted_from": source})
        except OSError as error:
            raise explain_os_error(error, out) from None


def write_safetensors(path: Path, tensors: Mapping[str, TensorHeader | Made]) -> None:
    """A safetensors file of the tensors' bytes, wide values first as the library lays them out, one tensor in
    memory at a time."""
    order = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        end = at + _num_bytes(tensors[name])
        header[name] = {
            "dtype": tensors[name].dtype, "shape": list(tensors[name].shape), "data_offsets": [at, end],
        }  # fmt: skip
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name in order:
            file.write(tensors[name].read())


def _write_pickled(path: Path, tensors: Mapping[str, TensorHeader | Made]) -> None:
    import torch  # only the authors' layouts are pickled

    dtypes = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "I8": torch.int8, "BOOL": torch.bool,
    }  # fmt: skip
    torch.save(
        {
            name: torch.frombuffer(bytearray(part.read()), dtype=dtypes[part.dtype]).view(part.shape)
            for name, part in tensors.items()
        },
        path,
    )


def _num_bytes(part: TensorHeader | Made) -> int:
    return part.num_bytes if isinstance(part, TensorHeader) else len(part.values)


# --------------------------------------------------------------------------- Medusa


def _medusa(heads: Heads, shape: MedusaShape, layout: Layout, target: Target | None) -> Conversion:
    if heads.hydra:
        raise _refused(heads, layout, "Hydra heads exist in their authors' layout only")
    if layout not in ("original", "tensorrt"):
        reasons = {
            "modelopt": "ModelOpt keeps Medusa heads inside the whole model, with a modelopt_state.pth",
            "speculators": "speculators has no Medusa heads that vLLM loads",
            "specforge": "SpecForge has no Medusa heads",
        }
        raise _refused(heads, layout, f"{reasons[layout]}; tensorrt and original can hold them")
    problems: list[Problem] = []
    depths = {len(blocks) for blocks in shape.blocks}
    if len(depths) != 1 or any(blocks != tuple(range(len(blocks))) for blocks in shape.blocks):
        problems.append(Problem("heads of different depths; config.json has one medusa_num_layers for all"))
    depth = max(depths, default=0)
    tensors: dict[str, TensorHeader | Made] = {}
    added: list[str] = []
    dtype = next(iter(heads.tensors.values())).dtype
    for head in range(len(shape.blocks)):
        for block in range(depth):
            weight = heads.tensors.get(f"{head}.{block}.linear.weight")
            if weight is None:
                continue
            name = f"{head}.{block}.linear"
            tensors[f"{name}.weight"] = weight
            bias = heads.tensors.get(f"{name}.bias")
            if bias is None:
                size = weight.shape[0]
                tensors[f"{name}.bias"] = Made(dtype, (size,), bytes(size * DTYPE_BYTES[dtype]))
                added.append(f"{name}.bias (zeros)")
            else:
                tensors[f"{name}.bias"] = bias
        own = heads.tensors.get(f"{head}.lm_head.weight")
        if own is None:
            own = _output_of(target, heads, layout, problems)
            added.append(f"{head}.{depth}.weight (the target's output projection)")
        if own is not None:
            tensors[f"{head}.{depth}.weight"] = own
        if f"{head}.lm_head.bias" in heads.tensors:
            problems.append(heads.problem(f"{head}.lm_head.bias", "output projections have no bias there"))
    if problems:
        raise _refused(heads, layout, list(dict.fromkeys(problems)))
    # A folder of ModelOpt holds the base model's config.json, which is not the heads'.
    config = {} if heads.layout == "modelopt" else dict(heads.config)
    config |= {"medusa_num_heads": len(shape.blocks), "medusa_num_layers": depth}
    base = heads.base_model or _name_of(target)
    if base is not None:
        config["base_model_name_or_path"] = base
    file = MEDUSA_FILES[layout == "tensorrt"]
    return Conversion(heads, layout, file, tensors, config, tuple(added), (), ())


def _output_of(
    target: Target | None, heads: Heads, layout: Layout, problems: list[Problem]
) -> TensorHeader | None:
    """The target's output projection, which is its embedding where the two are tied."""
    if target is None:
        message = "the heads use the target's output projection, the layout wants one of their own"
        problems.append(Problem(f"{message}; name the target: --model DIR"))
        return None
    found, wrong = read_tensor_headers(target.folder)
    problems += wrong
    name = "model.embed_tokens.weight" if target.spec.tie_embeddings else "lm_head.weight"
    header = found.get(name)
    if header is None or header.dtype not in ("F64", "F32", "F16", "BF16"):
        message = "missing or quantized; name the 16-bit target"
        problems.append(Problem(message, file=str(target.folder), key=name))
        return None
    return header


def _name_of(target: Target | None) -> str | None:
    """What tools find the target by: its hub id, else its folder."""
    if target is None:
        return None
    return next((name for name in target.names if "/" in name), str(target.folder))


# --------------------------------------------------------------------------- EAGLE-1/2


def _eagle(heads: Heads, shape: EagleShape, layout: Layout, target: Target | None) -> Conversion:
    if layout in ("modelopt", "specforge"):
        tool = "ModelOpt 0.47" if layout == "modelopt" else "SpecForge"
        raise _refused(heads, layout, f"{tool} has no EAGLE-1/2; tensorrt, original and speculators have")
    tensors: dict[str, TensorHeader | Made] = dict(heads.tensors)
    config = _flat_config(heads, target, "LlamaForCausalLM")
    notes: tuple[str, ...] = ()
    if layout == "speculators":
        if "layers.0.input_layernorm.weight" in tensors:
            message = "speculators has it only together with two more norms"
            raise _refused(heads, layout, [heads.problem("layers.0.input_layernorm.weight", message)])
        tensors = {
            name.replace("layers.0.", "transformer.", 1) if name.startswith("layers.0.")
            else name.replace("fc.", "fusion_fc.", 1) if name.startswith("fc.") else name: part
            for name, part in tensors.items()
        }  # fmt: skip
        config = _speculators_config(heads, target, "eagle", "EagleSpeculator") | {
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "layernorms": False,
            "fusion_bias": "fusion_fc.bias" in tensors,
        }
        if "embed_tokens.weight" in tensors:
            notes = ("embed_tokens is kept; the converter of speculators leaves it to the target",)
    file = "pytorch_model.bin" if layout == "original" else "model.safetensors"
    return Conversion(heads, layout, file, tensors, config, (), (), notes)


# --------------------------------------------------------------------------- EAGLE-3


def _eagle3(heads: Heads, shape: EagleShape, layout: Layout, target: Target | None) -> Conversion:
    problems: list[Problem] = []
    notes: list[str] = []
    config, file = heads.config, str(heads.config_file)
    inner = config.get("eagle_config")
    if isinstance(inner, dict) and inner.get("use_aux_hidden_state") is False:
        problems.append(Problem("false; EAGLE-3 sees inner layers", file=file, key="eagle_config"))
    if layout != "speculators":
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if config.get(key):
                message = "true; only the layout of speculators says so, others would run another network"
                problems.append(Problem(message, file=file, key=key))
    if "fc.bias" in heads.tensors and layout != "modelopt":
        problems.append(heads.problem("fc.bias", "the layout's fc has no bias"))
    listed = _hidden_layers(heads, shape, layout, target, problems, notes)

    tensors: dict[str, TensorHeader | Made] = {}
    prefix = "layers.0." if layout in ("modelopt", "speculators") else "midlayer."
    for name, part in heads.tensors.items():
        new = prefix + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        tensors[new] = part
    added, left_out = _draft_maps(heads, shape, layout, tensors)
    if "lm_head.weight" not in tensors and layout != "tensorrt":
        own = _output_of(target, heads, layout, problems)
        if own is not None:
            tensors["lm_head.weight"] = own
            added.append("lm_head.weight (the target's output projection)")
    if problems:
        raise _refused(heads, layout, problems)
    if layout == "speculators":
        new_config = _speculators_config(heads, target, "eagle3", "Eagle3DraftModel")
        new_config |= {
            "draft_vocab_size": shape.draft_vocab_size,
            "target_hidden_size": config.get("target_hidden_size"),
            "norm_before_residual": bool(config.get("norm_before_residual")),
            "norm_before_fc": bool(config.get("norm_before_fc")),
            _AUX: listed,
        }
    else:
        specforge = layout in ("modelopt", "specforge")
        architecture = SPECFORGE_ARCHITECTURE if specforge else "LlamaForCausalLM"
        new_config = _flat_config(heads, target, architecture)
        new_config["draft_vocab_size"] = shape.draft_vocab_size
        if layout != "original" and (listed is not None or inner):
            new_config["eagle_config"] = dict(inner or {"use_aux_hidden_state": True})
            if listed is not None:
                new_config["eagle_config"][_AUX] = [layer - 1 for layer in listed]
    weights = "pytorch_model.bin" if layout == "original" else "model.safetensors"
    return Conversion(
        heads, layout, weights, tensors, new_config, tuple(added), tuple(left_out), tuple(notes)
    )


def _hidden_layers(
    heads: Heads,
    shape: EagleShape,
    layout: Layout,
    target: Target | None,
    problems: list[Problem],
    notes: list[str],
) -> list[int] | None:
    """The target's layers that config.json names, counted as vLLM does; None: the default ones."""
    key, value, shift = named_hidden_layers(heads.config)
    if not value:
        return None
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):
        problems.append(Problem("not a list of layer numbers", file=str(heads.config_file), key=key))
        return None
    listed = [layer + shift for layer in value]
    if layout == "original":
        if target is None:
            message = f"{value}: the layout cannot say it; --model tells whether these are the default layers"
            problems.append(Problem(message, file=str(heads.config_file), key=key))
        elif tuple(listed) != default_hidden_layers(target.spec.num_layers):
            message = f"{value}: the authors' code always takes the layers 2, N / 2 and N - 3"
            problems.append(Problem(message, file=str(heads.config_file), key=key))
    if layout == "tensorrt" and (
        target is None or tuple(listed) != default_hidden_layers(target.spec.num_layers)
    ):
        ids = [layer - 1 for layer in listed]
        notes.append(f"TensorRT-LLM captures its default layers unless told eagle3_layers_to_capture: {ids}")
    return listed


def _draft_maps(
    heads: Heads, shape: EagleShape, layout: Layout, tensors: dict[str, TensorHeader | Made]
) -> tuple[list[str], list[str]]:
    """(added, left out): the maps as the layout has them. ``t2d`` is in all but ModelOpt's and
    TensorRT-LLM's; a head that drafts the whole vocabulary has no maps there, and both in the authors' and
    in SpecForge's."""
    added: list[str] = []
    left_out: list[str] = []
    ids = draft_vocabulary(heads)
    whole = ids is None or (len(ids) == shape.vocab_size and all(at == token for at, token in enumerate(ids)))
    with_mask = layout in ("original", "specforge", "speculators")
    if "t2d" in tensors and not with_mask:
        del tensors["t2d"]
        left_out.append("t2d")
    if whole and not with_mask and "d2t" in tensors:
        del tensors["d2t"]
        left_out.append("d2t")
    if whole and layout == "speculators":
        return added, left_out
    if with_mask:
        if ids is None:
            ids = list(range(shape.draft_vocab_size))
            tensors["d2t"] = Made("I64", (shape.vocab_size,), bytes(8 * shape.vocab_size))
            added.append("d2t (the whole vocabulary)")
        if "t2d" not in tensors:
            tensors["t2d"] = Made("BOOL", (shape.vocab_size,), drafted_mask(ids, shape.vocab_size))
            added.append("t2d (from d2t)")
    return added, left_out


# --------------------------------------------------------------------------- config.json


def _flat_config(heads: Heads, target: Target | None, architecture: str) -> dict[str, Any]:
    left_out = ("eagle_config", _AUX, "auto_map", "has_no_defaults_at_init", "embed_requires_grad",
                "layernorms", "fusion_bias", "transformer_layer_architecture", "norm_before_residual",
                "norm_before_fc")  # fmt: skip
    config = {key: value for key, value in heads.config.items() if key not in left_out and value is not None}
    config["architectures"] = [architecture]
    config.setdefault("num_hidden_layers", 1)
    config.setdefault("model_type", "llama")
    if "dtype" not in config:
        config.setdefault("torch_dtype", _dtype(heads))
    base = heads.base_model or _name_of(target)
    if base is not None:
        config["base_model_name_or_path"] = base
    return config


def _speculators_config(
    heads: Heads, target: Target | None, algorithm: str, architecture: str
) -> dict[str, Any]:
    layer = {key: value for key, value in heads.config.items() if key not in _NOT_OF_A_LAYER}
    layer.setdefault("model_type", "llama")
    layer.setdefault("num_hidden_layers", 1)
    base = heads.base_model or _name_of(target)
    if base is None:
        message = (
            "no base model is named, vLLM needs speculators_config.verifier; name the target: --model DIR"
        )
        raise _refused(heads, "speculators", message)
    verifier = {"name_or_path": base, "architectures": [target.spec.architecture] if target else []}
    method = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS,
              "verifier_accept_k": 1, "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.4.0",
        "torch_dtype": heads.config.get("torch_dtype") or heads.config.get("dtype") or _dtype(heads),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }


def _dtype(heads: Heads) -> str:
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return next((names[part.dtype] for part in heads.tensors.values() if part.dtype in names), "float32")


def _refused(heads: Heads, layout: Layout, why: str | list[Problem]) -> InputError:
    what = f"cannot be written in the layout {layout}"
    if isinstance(why, str):
        return InputError(Problem(f"{what}: {why}", file=str(heads.folder)))
    return InputError(
        [Problem(f"{what}: {p.message}", p.file or str(heads.folder), p.line, p.key) for p in why]
    )

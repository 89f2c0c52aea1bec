"""Trained draft heads as the tools of the field write them, read into one form. No torch, nothing unpickled.

Layouts (``{i}`` a head, ``{j}`` a block of it); a folder is recognised by names, not by what it calls itself:

* ``original``: what the authors' code loads. Medusa (FasterDecoding/Medusa, medusa_model.py): config.json
  with ``medusa_num_heads``, ``medusa_num_layers``, ``base_model_name_or_path``; ``{i}.{j}.linear.weight`` and
  ``.bias``, ``{i}.{n}.weight`` in medusa_lm_head.pt. EAGLE-1/2 (SafeAILab/EAGLE, cnets1.py): a Llama
  config.json; ``fc.weight`` [hidden, 2 hidden], ``layers.0.*`` in pytorch_model.bin. EAGLE-3 (cnets.py): also
  ``draft_vocab_size``; ``midlayer.*``, ``norm``, ``lm_head``, ``d2t`` and ``t2d``. Hydra: ``hydra_mlp.*``.
* ``tensorrt``: what TensorRT-LLM looks for, the original names in safetensors. Medusa:
  medusa_lm_head.safetensors (convert_checkpoint.py). EAGLE-3: ``architectures`` LlamaForCausalLM and
  ``draft_vocab_size``, by which modeling_auto.py knows the drafter; modeling_speculative.py calls the layer
  ``midlayer``.
* ``modelopt``: NVIDIA ModelOpt 0.47. EAGLE-3 (hf_spec_export.py): ``layers.0.*``, ``d2t``, no ``t2d``;
  ``eagle_config.eagle_aux_hidden_state_layer_ids``. Medusa: ``medusa_heads.{i}.{j}.linear.*``,
  ``medusa_heads.{i}.{n}.weight`` beside the base model, or in its TensorRT-LLM export
  ``medusa_heads.{i}.medusa_layers.{j}.linear.*``, ``medusa_heads.{i}.lm_head.weight``.
* ``speculators`` (vllm-project/speculators, models/eagle3, convert/eagle): config.json with
  ``speculators_model_type``, the sizes inside ``transformer_layer_config`` and the target as
  ``speculators_config.verifier.name_or_path``. EAGLE-3 names are ModelOpt's with ``t2d`` and
  ``embed_tokens``; EAGLE-1 calls ``fc`` ``fusion_fc`` and ``layers.0`` ``transformer``.
* ``specforge`` (sgl-project/SpecForge, modeling/draft): EAGLE-3, ``midlayer.*`` with ``d2t`` and ``t2d`` in
  model.safetensors, ``architectures`` LlamaForCausalLMEagle3, no embedding.

The one form: ``{i}.{j}.linear.*``, ``{i}.lm_head.*`` for Medusa (and Hydra, ``{i}.{j}.res_connection.*``);
``fc``, ``layers.0.*``, ``norm``, ``lm_head``, ``embed_tokens``, ``d2t``, ``t2d`` for EAGLE; config.json flat.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.errors import Problem
from trtspec.pickled_headers import read_pickled_headers
from trtspec.tensor_headers import INDEX_FILE, TensorHeader, read_file_headers, read_json, read_tensor_headers
from trtspec.user_files import shown_path

HeadsKind = Literal["medusa", "eagle", "eagle3"]
Layout = Literal["original", "tensorrt", "modelopt", "speculators", "specforge"]

CONFIG = "config.json"
RECORD = "trtspec_heads.json"
"""What ``trtspec draft train`` says of the heads that it made, written last."""
LICENCES = ("LICENSE", "LICENCE", "NOTICE")
"""How the names of files begin that a conversion copies."""
MEDUSA_SAFETENSORS = "medusa_lm_head.safetensors"
MEDUSA_FILES = ("medusa_lm_head.pt", MEDUSA_SAFETENSORS)
"""In the order in which TensorRT-LLM looks for them."""
EAGLE_FILES = ("pytorch_model.bin", "model.safetensors")
PICKLED = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin")
"""Looked for when a folder has no safetensors, in this order."""
SPECFORGE_ARCHITECTURE = "LlamaForCausalLMEagle3"

_BLOCK = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.(weight|bias)$")
_HEAD = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(?:\d+|lm_head)\.(weight|bias)$")
_HYDRA_BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)$")
_HYDRA_HEAD = re.compile(r"^hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_BASE_MODEL = ("model.", "lm_head.", "transformer.")
"""A Medusa model saved whole holds its base model too."""
_EAGLE_NAMES = (("midlayer.", "layers.0."), ("fusion_fc.", "fc."), ("transformer.", "layers.0."))


@dataclass(frozen=True)
class Heads:
    """A folder of heads in the one form of this module."""

    folder: Path
    kind: HeadsKind
    layout: Layout
    hydra: bool
    """Heads of kind medusa that see the tokens drafted before theirs."""
    config: Mapping[str, Any]
    """config.json, flat; {} if there is none."""
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorHeader]
    stored: Mapping[str, str]
    """The name in the file of each tensor."""
    base_model: str | None
    """The target that config.json names."""
    record: Mapping[str, Any]
    """:data:`RECORD`; {} for heads of other tools."""

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG

    def problem(self, name: str, message: str) -> Problem:
        """Of a tensor, present or missing, as its file names it."""
        header = self.tensors.get(name)
        file = header.file if header else self.files[0] if len(self.files) == 1 else self.folder
        return Problem(message, file=str(file), key=self.stored.get(name, name))


def weight_files(folder: Path) -> list[Path]:
    """The files that the tensors of ``folder`` are read from: all safetensors, else the first pickled one."""
    found = sorted(folder.glob("*.safetensors"))
    return found or [folder / name for name in PICKLED if (folder / name).is_file()][:1]


def head_files(folder: Path) -> list[Path]:
    """All files of ``folder`` that its heads need."""
    return [*[folder / name for name in (CONFIG, RECORD) if (folder / name).is_file()], *weight_files(folder)]


def read_heads(folder: Path, problems: list[Problem]) -> Heads | None:
    """The heads in ``folder``; None, with every reason in ``problems``, if it holds none that are known.

    Reads JSON and headers, no values.
    """
    if not folder.is_dir():
        message = "no such folder; give a folder with trained heads"
        problems.append(Problem(message, file=shown_path(folder)))
        return None
    found: list[Problem] = []
    raw = _read_weight_headers(folder, found)
    path = folder / CONFIG
    values = (read_json(path, found) or {}) if path.exists() else {}
    record = (read_json(folder / RECORD, found) or {}) if (folder / RECORD).exists() else {}
    problems += found
    if found:
        return None
    config = _flat(values)
    kind = _kind_of(raw, config)
    if kind is None:
        message = "no heads that are known here: Medusa, Hydra, EAGLE or EAGLE-3 tensors"
        problems.append(Problem(message, file=str(folder)))
        return None
    hydra = any(name.startswith("hydra_") for name in raw)
    tensors: dict[str, TensorHeader] = {}
    stored: dict[str, str] = {}
    for name, header in raw.items():
        own = _own_name(name, kind, hydra)
        if own is None:
            continue
        if own in stored:
            message = f"the same part as {stored[own]}; keep one of them"
            problems.append(Problem(message, file=str(header.file), key=name))
        tensors[own], stored[own] = header, name
    files = tuple(weight_files(folder))
    layout = _layout_of(kind, raw, values, files)
    return Heads(folder, kind, layout, hydra, config, files, tensors, stored, _base_model(values), record)


def _read_weight_headers(folder: Path, problems: list[Problem]) -> dict[str, TensorHeader]:
    if (folder / INDEX_FILE).exists():
        found, wrong = read_tensor_headers(folder)
        problems += wrong
        return found
    files = weight_files(folder)
    if not files:
        message = f"no weights: neither *.safetensors nor one of {', '.join(PICKLED)}"
        problems.append(Problem(f"{message}; give a folder with trained heads", file=str(folder)))
    headers: dict[str, TensorHeader] = {}
    for path in files:
        read = read_file_headers if path.suffix == ".safetensors" else read_pickled_headers
        found, problem = read(path)
        if problem is not None:
            problems.append(Problem(problem, file=str(path)))
        for name in sorted(headers.keys() & found.keys()):
            problems.append(Problem(f"also in {headers[name].file.name}; keep one", str(path), key=name))
        headers |= found
    return headers


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """speculators keep the decoder layer's sizes one level down."""
    inner = values.get("transformer_layer_config")
    if not isinstance(inner, dict):
        return dict(values)
    left_out = (
        "transformer_layer_config",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
    )
    return {**inner, **{key: value for key, value in values.items() if key not in left_out}}


def _kind_of(names: Iterable[str], config: Mapping[str, Any]) -> HeadsKind | None:
    names = set(names)
    if any(_BLOCK.match(name) or name.startswith("hydra_") for name in names):
        return "medusa"
    if {"fc.weight", "fusion_fc.weight"} & names or config.get("eagle_config"):
        third = "d2t" in names or any(name.endswith(".hidden_norm.weight") for name in names)
        return "eagle3" if third else "eagle"
    return "medusa" if any(_HEAD.match(name) for name in names) else None


def _own_name(name: str, kind: HeadsKind, hydra: bool) -> str | None:
    """The name in the one form; None for a tensor of the base model."""
    if kind != "medusa":
        for theirs, ours in _EAGLE_NAMES:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name
    block, head = (_HYDRA_BLOCK, _HYDRA_HEAD) if hydra else (_BLOCK, _HEAD)
    if match := block.match(name):
        part = match[3] if hydra else "linear"
        return f"{int(match[1])}.{int(match[2])}.{part}.{match[match.lastindex or 0]}"
    if match := head.match(name):
        return f"{int(match[1])}.lm_head.{match[2]}"
    return None if name.startswith(_BASE_MODEL) else name


def _layout_of(
    kind: HeadsKind, names: Iterable[str], values: Mapping[str, Any], files: tuple[Path, ...]
) -> Layout:
    names = set(names)
    pickled = all(file.suffix != ".safetensors" for file in files)
    if values.get("speculators_model_type") is not None or "fusion_fc.weight" in names:
        return "speculators"
    if kind == "medusa":
        if any(name.startswith(("medusa_heads.", "medusa_head.")) for name in names):
            return "modelopt"
        return "tensorrt" if any(file.name == MEDUSA_SAFETENSORS for file in files) else "original"
    if kind == "eagle":
        return "original" if pickled else "tensorrt"
    if not any(name.startswith("midlayer.") for name in names):
        return "modelopt"
    if pickled:
        return "original"
    named = values.get("architectures")
    return "specforge" if isinstance(named, list) and SPECFORGE_ARCHITECTURE in named else "tensorrt"


def _base_model(values: Mapping[str, Any]) -> str | None:
    verifier = values.get("speculators_config")
    verifier = verifier.get("verifier") if isinstance(verifier, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    named = named or values.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def default_hidden_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and top of the target as EAGLE-3 takes them: after 2, N // 2 and N - 3 layers. ModelOpt
    says {1, N / 2 - 1, N - 4}: it counts the layer whose output is meant, from 0."""
    return tuple(sorted({2, max(1, num_layers // 2), max(1, num_layers - 3)}))


def named_hidden_layers(config: Mapping[str, Any]) -> tuple[str, Any, int]:
    """(key, value, what to add): the target's layers that config.json names, if any.

    ``eagle_config.eagle_aux_hidden_state_layer_ids`` is ModelOpt's and names layers from 0, meaning their
    outputs; the same key at the top level is vLLM's and counts the layers before the state, as we do.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    inner = config.get("eagle_config")
    if isinstance(inner, dict) and inner.get(key):
        return f"eagle_config.{key}", inner[key], 1
    return key, config.get(key), 0


def is_heads_file(name: str) -> bool:
    """Whether a folder of heads, trained or converted here, can hold a file of this name."""
    return (
        name in (CONFIG, RECORD, "curve.svg")
        or name.endswith((".safetensors", ".bin", ".pt"))
        or name.upper().startswith(LICENCES)
    )

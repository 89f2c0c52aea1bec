"""Trained draft heads: what a folder holds, whether it fits a target, and the weights.

Layouts that are read (``{i}`` a head, ``{j}`` a block of it):

* Medusa of ModelOpt (``medusa_heads.{i}.{j}.linear.weight``, ``medusa_heads.{i}.{n}.weight``), of its
  TensorRT-LLM export (``medusa_heads.{i}.medusa_layers.{j}.linear.weight``,
  ``medusa_heads.{i}.lm_head.weight``) and of the original repository (``{i}.{j}.linear.weight``,
  ``{i}.{n}.weight`` in medusa_lm_head.pt or .safetensors). A head without an output projection uses the
  target's.
* Hydra (``hydra_mlp.{i}.{j}.linear.weight`` and ``.res_connection.weight``, ``hydra_lm_head.{i}.weight`` in
  hydra_lm_head.pt): heads that see the tokens drafted before theirs; the plain MLP architecture.
* EAGLE-1/2 (``fc.weight``, ``layers.0.*``) and EAGLE-3 (also ``hidden_norm``, ``norm``, ``lm_head``,
  ``d2t``), the layer called ``layers.0`` by ModelOpt and ``midlayer`` by the authors.

Pickled files are read by torch's weights-only unpickler, which builds tensors and nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor

from trtspec.embedded import layers
from trtspec.embedded.layers import Linear
from trtspec.embedded.model import Decoder
from trtspec.errors import InputError, Problem
from trtspec.modelspec import ModelSpec
from trtspec.tensor_headers import read_json

HeadsKind = Literal["medusa", "eagle", "eagle3"]

PICKLED = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin")
"""Looked for when a folder has no safetensors, in this order."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_TORCH_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


# --------------------------------------------------------------------------- what is loaded


@dataclass(frozen=True)
class MedusaHead:
    """Residual blocks and an output projection. ``blocks[j]`` is (linear, residual): the block's output is
    residual(x) + silu(linear(x)), residual None meaning x itself."""

    blocks: tuple[tuple[Linear, Linear | None], ...]
    lm_head: Linear


@dataclass(frozen=True)
class MedusaHeads:
    """Head i predicts the i + 2nd token after the one whose hidden state it sees. ``grounded`` (Hydra):
    head i sees [hidden, embeddings of the i + 1 tokens in between]."""

    heads: tuple[MedusaHead, ...]
    grounded: bool
    first: Linear | None = None
    """The linears of all heads' first blocks side by side, where all see the same input: ``[rows, heads *
    hidden]`` in one product. The heads' own ``blocks`` are then those behind it."""


# --------------------------------------------------------------------------- tensors of a folder


def weight_files(folder: Path) -> list[Path]:
    """The files that the tensors of ``folder`` are read from: all safetensors, else the first pickled one."""
    found = sorted(folder.glob("*.safetensors"))
    return found or [folder / name for name in PICKLED if (folder / name).is_file()][:1]


def head_files(folder: Path) -> list[Path]:
    """All files of ``folder`` that its heads need."""
    config = folder / "config.json"
    return [*([config] if config.is_file() else []), *weight_files(folder)]


class HeadTensors:
    """Names, shapes and dtypes of a folder's tensors; values when asked for."""

    def __init__(self, folder: Path, problems: list[Problem]) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.file: dict[str, Path] = {}
        self._read: dict[str, Callable[[], Tensor]] = {}
        files = weight_files(folder)
        for path in files:
            if path.suffix == ".safetensors":
                self._add_safetensors(path, problems)
            else:
                self._add_pickled(path, problems)
        if not files:
            found = f"no weights: neither *.safetensors nor one of {', '.join(PICKLED)}"
            problems.append(Problem(f"{found}; give a folder with trained heads", file=str(folder)))

    def _add_safetensors(self, path: Path, problems: list[Problem]) -> None:
        try:
            file: Any = safe_open(path, "pt")  # type: ignore[no-untyped-call]
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = part.get_dtype()
                self.file[name] = path
                self._read[name] = lambda file=file, name=name: file.get_tensor(name)  # type: ignore[misc]
        except Exception as error:  # the library's own exception is no stable name
            problems.append(Problem(f"not a whole safetensors file ({error}); copy it again", str(path)))

    def _add_pickled(self, path: Path, problems: list[Problem]) -> None:
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling raises whatever the file makes it raise
            first = str(error).splitlines()[0]
            problems.append(
                Problem(
                    f"not a file of plain tensors ({first}); save the heads' state_dict as safetensors",
                    file=str(path),
                )
            )
            return
        if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
            problems.append(Problem("not a mapping of names to tensors; save the state_dict", str(path)))
            return
        for name, value in values.items():
            self.shapes[name] = tuple(value.shape)
            self.dtypes[name] = _TORCH_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch."))
            self.file[name] = path
            self._read[name] = lambda value=value: value  # type: ignore[misc]

    def value(self, name: str) -> Tensor:
        return self._read[name]()


class Reader:
    """Checks tensors by name against shapes; collects problems and gives values in the target's dtype."""

    def __init__(self, tensors: HeadTensors, problems: list[Problem]) -> None:
        self.tensors, self.problems = tensors, problems
        self.seen: set[str] = set()

    def bad(self, name: str, message: str) -> None:
        file = self.tensors.file.get(name, self.tensors.folder)
        self.problems.append(Problem(message, file=str(file), key=name))

    def has(self, name: str) -> bool:
        return name in self.tensors.shapes

    def want(self, name: str, *shape: int, optional: bool = False, dtypes: tuple[str, ...] = _FLOATS) -> bool:
        """Whether the tensor is there; a problem if it lacks without being optional, or is another."""
        self.seen.add(name)
        if not self.has(name):
            if not optional:
                self.bad(name, f"missing; {list(shape)} is needed")
            return False
        if self.tensors.shapes[name] != shape:
            self.bad(
                name,
                f"shape {list(self.tensors.shapes[name])}, {list(shape)} is needed; "
                "heads work only with the target they were trained for",
            )
        if self.tensors.dtypes[name] not in dtypes:
            self.bad(name, f"{self.tensors.dtypes[name]} values; allowed: {', '.join(dtypes)}")
        return True


class Loader:
    """Values of checked tensors, finite, in the dtype and on the device of the target."""

    def __init__(self, tensors: HeadTensors, target: Decoder) -> None:
        self.tensors, self.target = tensors, target
        self.problems: list[Problem] = []

    def plain(self, name: str) -> Tensor:
        value = self.tensors.value(name)
        if not bool(torch.isfinite(value.sum(dtype=torch.float64))):
            self.problems.append(
                Problem(
                    "holds NaN or infinite values; train or copy it again",
                    str(self.tensors.file[name]),
                    key=name,
                )
            )
        return value.to(self.target.device, self.target.dtype, copy=True)

    def maybe(self, name: str) -> Tensor | None:
        return self.plain(name) if name in self.tensors.shapes else None

    def linear(self, *modules: str) -> Linear:
        """The linears ``modules`` on one input, side by side."""
        weight = torch.cat([self.plain(f"{module}.weight") for module in modules])
        bias = None
        if f"{modules[0]}.bias" in self.tensors.shapes:
            bias = torch.cat([self.plain(f"{module}.bias") for module in modules])
        return layers.dense(weight, bias)

    def lm_head(self, module: str) -> Linear:
        """An output projection; the target's own where the weights are the same, which saves a copy."""
        weight, bias = self.plain(f"{module}.weight"), self.maybe(f"{module}.bias")
        if bias is None and self.target.spec.tie_embeddings and torch.equal(weight, self.target.embedding):
            return self.target.lm_head
        return layers.dense(weight, bias)


# --------------------------------------------------------------------------- any heads


@dataclass(frozen=True)
class HeadsSize:
    """What heads cost: ``num_values`` weights, and for EAGLE a ``layer`` with keys and values of its own."""

    num_values: int
    num_heads: int
    """Of Medusa; 1 for EAGLE, whose head runs once for each drafted token."""
    layer: ModelSpec | None


def inspect_heads(
    folder: Path, kind: HeadsKind, target: ModelSpec, problems: list[Problem]
) -> HeadsSize | None:
    """The size of the heads in ``folder``; None, with every reason in ``problems``, if they cannot draft for
    ``target`` by ``kind``.

    Reads headers, config.json and the draft vocabulary, not the weights (of a pickled file, everything).
    """
    found: list[Problem] = []
    layout = describe(folder, kind, target, found)
    problems += found
    if found:
        return None
    values = sum(math.prod(shape) for shape in layout.tensors.shapes.values())
    if isinstance(layout, MedusaLayout):
        return HeadsSize(values, len(layout.blocks), None)
    return HeadsSize(values, 1, layout.spec)


def describe(folder: Path, kind: HeadsKind, target: ModelSpec, problems: list[Problem]) -> Any:
    """The layout of a folder: a ``MedusaLayout`` or ``EagleLayout``; None with problems."""
    if not folder.is_dir():
        problems.append(Problem("no such folder; give a folder with trained heads", file=str(folder)))
        return None
    tensors = HeadTensors(folder, problems)
    config: dict[str, Any] = {}
    path = folder / "config.json"
    if path.exists():
        config = read_json(path, problems) or {}
    elif kind != "medusa":
        problems.append(Problem("missing; EAGLE heads need it for their sizes and rope", file=str(path)))
    if problems:
        return None
    found = _kind_of(tensors, config)
    if found is None:
        problems.append(
            Problem("no heads that are known here: Medusa, Hydra, EAGLE or EAGLE-3 tensors", file=str(folder))
        )
    elif found != kind:
        problems.append(
            Problem(
                f"these are {found} heads; write speculation kind: {found}, or give {kind} heads",
                file=str(folder),
            )
        )
    if problems:
        return None
    reader = Reader(tensors, problems)
    if kind == "medusa":
        return _medusa_layout(reader, config, target)
    from trtspec.embedded.eagle_heads import eagle_layout

    return eagle_layout(reader, config, path, target, kind)


def _kind_of(tensors: HeadTensors, config: Mapping[str, Any]) -> HeadsKind | None:
    names = tensors.shapes
    if any(_BLOCK.match(name) or name.startswith("hydra_") for name in names):
        return "medusa"
    if "fc.weight" in names or config.get("eagle_config"):
        layer = layer_prefix(names)
        third = "d2t" in names or f"{layer}hidden_norm.weight" in names
        return "eagle3" if third else "eagle"
    return "medusa" if any(_HEAD.match(name) for name in names) else None


def layer_prefix(names: Mapping[str, Any]) -> str:
    return "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."


# --------------------------------------------------------------------------- Medusa and Hydra

_BLOCK = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.(weight|bias)$")
_HEAD = re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+|lm_head)\.weight$")
_HYDRA_BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)$")
_HYDRA_HEAD = re.compile(r"^hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_OTHERS = ("model.", "lm_head.", "transformer.")
"""A Medusa model saved whole holds its base model too."""


@dataclass(frozen=True)
class MedusaLayout:
    tensors: HeadTensors
    blocks: list[list[str]]
    """Module names of each head's residual blocks, in order."""
    lm_heads: list[str | None]
    grounded: bool


def _medusa_layout(reader: Reader, config: Mapping[str, Any], target: ModelSpec) -> MedusaLayout:
    names = reader.tensors.shapes
    hydra = any(name.startswith("hydra_") for name in names)
    blocks: dict[int, dict[int, str]] = {}
    outputs: dict[int, str] = {}
    for name in names:
        is_block, is_head = (_HYDRA_BLOCK, _HYDRA_HEAD) if hydra else (_BLOCK, _HEAD)
        if match := is_block.match(name):
            module = name.rsplit(".", 2 if match.group(2) else 1)[0]
            blocks.setdefault(int(match.group(1)), {})[int(match.group(2))] = module
        elif match := is_head.match(name):
            outputs[int(match.group(1))] = name.rsplit(".", 1)[0]
        elif not name.startswith(_OTHERS):
            reader.bad(name, "no part of the Medusa heads that are read here; remove it, or say which format")
    if hydra:
        _check_hydra(reader, config)
    heads = sorted(blocks.keys() | outputs.keys())
    if heads != list(range(len(heads))):
        reader.bad(
            str(reader.tensors.folder.name), f"heads {heads}; they must be numbered from 0 without gaps"
        )
    told = config.get("medusa_num_heads", config.get("hydra_num_heads"))
    if told is None and isinstance(config.get("medusa"), dict):
        told = config["medusa"].get("num_medusa_heads")
    if told is not None and told != len(heads):
        reader.bad("config.json", f"{told} heads, the weights have {len(heads)}; copy the folder again")
    grounded = hydra and bool(config.get("grounded_heads", True))
    size, vocab = target.hidden_size, target.vocab_size
    ordered = []
    for head in heads:
        modules = [module for _, module in sorted(blocks.get(head, {}).items())]
        ordered.append(modules)
        for at, module in enumerate(modules):
            first = grounded and at == 0
            width = size * (head + 2) if first else size
            reader.want(f"{module}.linear.weight", size, width)
            reader.want(f"{module}.linear.bias", size, optional=True)
            if first:
                reader.want(f"{module}.res_connection.weight", size, width)
                reader.want(f"{module}.res_connection.bias", size, optional=True)
        if head in outputs:
            reader.want(f"{outputs[head]}.weight", vocab, size)
            reader.want(f"{outputs[head]}.bias", vocab, optional=True)
        if not modules and grounded:
            reader.bad(f"hydra_mlp.{head}", "missing; every Hydra head has a block")
    return MedusaLayout(reader.tensors, ordered, [outputs.get(head) for head in heads], grounded)


def _check_hydra(reader: Reader, config: Mapping[str, Any]) -> None:
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture != "mlp" or any(name.startswith("prefix") for name in reader.tensors.shapes):
        reader.bad("config.json", f"hydra_head_arch {architecture!r}; only 'mlp' is read here")
    if config.get("hidden_state_offset"):
        reader.bad("config.json", f"hidden_state_offset {config['hidden_state_offset']}; only 0 is read here")


def load_medusa(folder: Path, target: Decoder) -> MedusaHeads:
    """The Medusa or Hydra heads in ``folder``, in the target's dtype. Raises InputError with all problems."""
    problems: list[Problem] = []
    layout = describe(folder, "medusa", target.spec, problems)
    if problems:
        raise InputError(problems)
    assert isinstance(layout, MedusaLayout)
    load = Loader(layout.tensors, target)
    shapes = layout.tensors.shapes
    starts = [f"{modules[0]}.linear" for modules in layout.blocks if modules and not layout.grounded]
    biased = {f"{start}.bias" in shapes for start in starts}
    residual = any(name.endswith(".res_connection.weight") for name in shapes)
    together = len(starts) == len(layout.blocks) > 0 and len(biased) == 1 and not residual
    heads = []
    for modules, output in zip(layout.blocks, layout.lm_heads, strict=True):
        blocks = []
        for module in modules[together:]:
            residual_name = f"{module}.res_connection"
            other = load.linear(residual_name) if f"{residual_name}.weight" in shapes else None
            blocks.append((load.linear(f"{module}.linear"), other))
        heads.append(MedusaHead(tuple(blocks), load.lm_head(output) if output else target.lm_head))
    first = load.linear(*starts) if together else None
    if load.problems:
        raise InputError(load.problems)
    return MedusaHeads(tuple(heads), layout.grounded, first)

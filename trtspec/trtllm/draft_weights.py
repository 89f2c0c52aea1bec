"""Trees and trained heads in the forms that TensorRT-LLM takes, checked before anything is built.

Layouts, by file names and headers (no weights are read, nothing is unpickled but names and shapes):

- Medusa (engines): ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers``, weights in
  ``medusa_lm_head.pt``, else ``medusa_lm_head.safetensors``; any other file name is not found by the
  convert script. ``{i}.{j}.linear.weight`` [hidden, hidden], ``{i}.{layers}.weight`` [vocabulary, hidden];
  ModelOpt's names (``medusa_heads.{i}.medusa_layers.{j}.linear``, ``medusa_heads.{i}.lm_head``) too.
- EAGLE-1/2 (engines): ``config.json`` of the one-layer decoder, weights in ``pytorch_model.bin`` or
  safetensors: ``fc.weight`` [hidden, 2 hidden], ``layers.0.*``.
- EAGLE-3 (LLM API): the same with ``fc.weight`` [hidden, 3 target hidden], ``midlayer.*`` or
  ``layers.0.*``, ``lm_head.weight`` [draft vocabulary, hidden], and ``d2t`` where the draft vocabulary is a
  part of the target's.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.errors import InputError, Problem
from trtspec.modelspec import ModelSpec
from trtspec.recipe import EagleSpeculation, MedusaSpeculation, Recipe
from trtspec.recipe_facts import drafted_positions
from trtspec.recipe_rules import RULES
from trtspec.tensor_headers import read_file_headers, read_json
from trtspec.user_files import open_user_file, shown_path

Choices = Sequence[Sequence[int]]
HeadsKind = Literal["medusa", "eagle", "eagle3"]

MEDUSA_FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")
"""In the order in which TensorRT-LLM looks for them."""
EAGLE_FILES = ("pytorch_model.bin", "model.safetensors")
DEFAULT_MEDUSA_DEPTH = 4
"""Longest path of TensorRT-LLM's default tree (mc_sim_7b_63)."""
_BRACES = re.compile(r"\{[0-9]+(?:, ?[0-9]+)*\}(?:, ?\{[0-9]+(?:, ?[0-9]+)*\})*")
_MAX_PICKLE_BYTES = 16_000_000


# --------------------------------------------------------------------------- trees


def json_form(choices: Choices) -> str:
    """``[[0], [0, 0], [1]]``: ``run.py --medusa_choices``, LLM API."""
    return json.dumps([list(path) for path in choices])


def brace_form(choices: Choices) -> str:
    """``{0}, {0, 0}, {1}``: Triton's ``medusa_choices`` and ``eagle_choices``."""
    return ", ".join("{" + ", ".join(map(str, path)) + "}" for path in choices)


def parse_brace_form(text: str) -> tuple[tuple[int, ...], ...]:
    """The paths of Triton's form. ValueError for anything else: JSON, escaped commas, an empty path."""
    if not _BRACES.fullmatch(text):
        raise ValueError(f"found {text!r}; allowed: paths in braces, as {{0}}, {{0, 0}}, {{1}}")
    return tuple(tuple(map(int, path.split(","))) for path in re.findall(r"\{([^}]*)\}", text))


def template_value(text: str) -> str:
    """``text`` for NVIDIA's fill_template.py (``key:value,key:value``), its commas escaped; without that
    the script takes ``{0`` for the value and the rest for further keys."""
    return text.replace("\\", "\\\\").replace(",", "\\,")


def template_problems(argument: str) -> Iterator[str]:
    """What is wrong with an argument of fill_template.py: parts that are no ``key:value``."""
    for part in re.split(r"(?<!\\),", argument):
        if not re.fullmatch(r"[A-Za-z_]\w*:.*", part, re.DOTALL):
            yield f"{part.strip()!r} is no key:value; commas inside a value are written \\,"


def choice_problems(
    recipe: Recipe, *, num_heads: int | None = None, max_draft_len: int | None = None
) -> list[Problem]:
    """What is wrong with the recipe's tree: the recipe's own rule (paths, prefixes, EAGLE's depth), then
    what needs the heads and the engine: as deep as there are heads, no more nodes than the engine's
    ``max_draft_len``."""
    rule = RULES["speculation-choices"]
    problems = [Problem(message, key=".".join(map(str, path))) for path, message in rule.check(recipe)]
    speculation = recipe.speculation
    if not isinstance(speculation, MedusaSpeculation | EagleSpeculation):
        return problems
    nodes = drafted_positions(speculation)
    depth = max((len(path) for path in speculation.choices or ()), default=DEFAULT_MEDUSA_DEPTH)
    if isinstance(speculation, MedusaSpeculation) and num_heads is not None and depth > num_heads:
        tree = "the default tree" if speculation.choices is None else "the longest path"
        problems.append(
            Problem(
                f"{tree} is {depth} deep, there are {num_heads} heads; write choices of at most "
                f"{num_heads} levels",
                key="speculation.choices",
            )
        )
    if max_draft_len is not None and nodes > max_draft_len:
        problems.append(
            Problem(
                f"{nodes} nodes, the engine was built for max_draft_len {max_draft_len}; shorten the tree or "
                f"build the engine with {nodes}",
                key="speculation.choices",
            )
        )
    return problems


# --------------------------------------------------------------------------- heads


@dataclass(frozen=True)
class DraftWeights:
    """Trained heads as TensorRT-LLM reads them."""

    kind: HeadsKind
    file: Path
    num_heads: int
    """Medusa heads; 1 for EAGLE, whose head runs once for each level."""
    num_layers: int
    """Residual blocks of a Medusa head; decoder layers of an EAGLE head."""
    draft_vocab_size: int | None = None
    """EAGLE-3: tokens that it can draft."""


def inspect_draft_weights(folder: Path, kind: HeadsKind, target: ModelSpec | None = None) -> DraftWeights:
    """The heads in ``folder``; shapes are held against ``target`` if it is known.

    Raises InputError with every problem: missing or unexpected files, git-lfs pointers, numbers that differ
    between config.json and weights, shapes of another target.
    """
    problems: list[Problem] = []
    if not folder.is_dir():
        raise InputError(Problem("no such folder; give a folder with trained heads", file=shown_path(folder)))
    config = read_json(folder / "config.json", problems) or {}
    wanted = MEDUSA_FILES if kind == "medusa" else EAGLE_FILES
    file = next((folder / name for name in wanted if (folder / name).is_file()), None)
    shapes: dict[str, tuple[int, ...]] = {}
    if file is None:
        found = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".pt", ".bin", ".safetensors")
        )
        problems.append(
            Problem(
                f"no weights that TensorRT-LLM looks for; found: {', '.join(found) or 'none'}; allowed: "
                f"{' or '.join(wanted)}; rename the file",
                file=str(folder),
            )
        )
    else:
        shapes, problem = read_shapes(file)
        if problem is not None:
            problems.append(Problem(problem, file=str(file)))
    if problems or file is None:
        raise InputError(problems)
    checked = _Checked(folder, file, config, shapes, target, problems)
    weights = _medusa(checked) if kind == "medusa" else _eagle(checked, kind)
    if problems:
        raise InputError(problems)
    return weights


@dataclass(frozen=True)
class _Checked:
    folder: Path
    file: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    target: ModelSpec | None
    problems: list[Problem]

    def number(self, key: str) -> int | None:
        value = self.config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        found = "missing" if value is None else f"found {value!r}"
        self.problems.append(
            Problem(
                f"{found}; a whole number is needed, TensorRT-LLM reads it",
                file=str(self.folder / "config.json"),
                key=key,
            )
        )
        return None

    def want(self, name: str, *shape: int | None) -> None:
        """A tensor of that shape; None stands for any size."""
        found = self.shapes.get(name)
        if found is None:
            self.problems.append(Problem("missing", file=str(self.file), key=name))
        elif len(found) != len(shape) or any(
            b is not None and a != b for a, b in zip(found, shape, strict=True)
        ):
            needed = [size if size is not None else "any" for size in shape]
            self.problems.append(
                Problem(
                    f"shape {list(found)}, {needed} is needed; heads work only with the target they were "
                    "trained for",
                    file=str(self.file),
                    key=name,
                )
            )


_BLOCK = re.compile(r"^(?:medusa_heads\.)?(\d+)\.(?:medusa_layers\.)?(\d+)\.linear\.weight$")
_HEAD = re.compile(r"^(?:medusa_heads\.)?(\d+)\.(?:\d+|lm_head)\.weight$")


def _medusa(checked: _Checked) -> DraftWeights:
    blocks: dict[int, set[int]] = {}
    outputs: dict[int, str] = {}
    hidden = checked.target.hidden_size if checked.target else None
    vocabulary = checked.target.vocab_size if checked.target else None
    for name in checked.shapes:
        if match := _BLOCK.match(name):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
            checked.want(name, hidden, hidden)
        elif match := _HEAD.match(name):
            outputs[int(match[1])] = name
            checked.want(name, vocabulary, hidden)
    heads, layers = checked.number("medusa_num_heads"), checked.number("medusa_num_layers")
    config = str(checked.folder / "config.json")
    if heads is not None and sorted(outputs) != list(range(heads)):
        checked.problems.append(
            Problem(
                f"{heads} heads, the weights hold {len(outputs)} ({sorted(outputs)}); copy the folder again",
                file=config,
                key="medusa_num_heads",
            )
        )
    for head in sorted(outputs):
        if layers is not None and blocks.get(head, set()) != set(range(layers)):
            checked.problems.append(
                Problem(
                    f"{layers} layers, head {head} holds {len(blocks.get(head, set()))}",
                    file=config,
                    key="medusa_num_layers",
                )
            )
    return DraftWeights("medusa", checked.file, heads or 0, layers or 0)


def _eagle(checked: _Checked, kind: Literal["eagle", "eagle3"]) -> DraftWeights:
    third = kind == "eagle3"
    hidden, layers = checked.number("hidden_size"), checked.number("num_hidden_layers")
    target = checked.target
    names = checked.shapes
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    inputs = (3 * target.hidden_size if target else None) if third else 2 * hidden if hidden else None
    checked.want("fc.weight", hidden, inputs)
    width = (2 if third else 1) * hidden if hidden else None
    for part in "qkv":
        checked.want(f"{prefix}.self_attn.{part}_proj.weight", None, width)
    checked.want(f"{prefix}.self_attn.o_proj.weight", hidden, None)
    checked.want(f"{prefix}.mlp.down_proj.weight", hidden, None)
    looks_third = f"{prefix}.hidden_norm.weight" in names or "d2t" in names
    if looks_third != third:
        right = "eagle3" if looks_third else "eagle"
        checked.problems.append(
            Problem(
                f"these are {right} heads, {kind} was asked for; write speculation.kind: {right}",
                file=str(checked.folder),
            )
        )
    vocabulary = checked.config.get("vocab_size")
    if target is not None and vocabulary != target.vocab_size:
        checked.problems.append(
            Problem(
                f"found {vocabulary!r}, the target has {target.vocab_size}; these heads are another target's",
                file=str(checked.folder / "config.json"),
                key="vocab_size",
            )
        )
    if target is not None and not third and hidden is not None and hidden != target.hidden_size:
        checked.problems.append(
            Problem(
                f"found {hidden}, the target has {target.hidden_size}; these heads are another target's",
                file=str(checked.folder / "config.json"),
                key="hidden_size",
            )
        )
    drafted = None
    if third:
        drafted = checked.config.get("draft_vocab_size", vocabulary)
        checked.want("lm_head.weight", drafted, hidden)
        if drafted != vocabulary:
            checked.want("d2t", drafted)
    return DraftWeights(kind, checked.file, 1, layers or 0, drafted)


# --------------------------------------------------------------------------- shapes without torch


def read_shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], str | None]:
    """(shapes by name, what is wrong): of a safetensors file or of a zip that torch.save made."""
    if path.suffix == ".safetensors":
        headers, problem = read_file_headers(path)
        return {name: header.shape for name, header in headers.items()}, problem
    with open(open_user_file(path), "rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            return {}, "a git-lfs pointer, not weights; run 'git lfs pull' in the folder"
        if not start.startswith(b"PK"):
            return {}, "not a file that torch.save makes since 1.6 (a zip); save the state_dict again"
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                if archive.getinfo(name).file_size > _MAX_PICKLE_BYTES:
                    return {}, "holds more than tensors; save the state_dict"
                value = _ShapeUnpickler(io.BytesIO(archive.read(name))).load()
        except Exception as error:  # a damaged pickle raises whatever it stumbles over
            return {}, f"not a plain mapping of names to tensors ({error}); save the state_dict"
    if not isinstance(value, dict) or not all(isinstance(item, _Shape) for item in value.values()):
        return {}, "not a plain mapping of names to tensors; save the state_dict"
    return {str(name): item.sizes for name, item in value.items()}, None


@dataclass(frozen=True)
class _Shape:
    sizes: tuple[int, ...]


def _shape(storage: object, offset: int, size: Sequence[int], *rest: object) -> _Shape:
    return _Shape(tuple(map(int, size)))


class _ShapeUnpickler(pickle.Unpickler):
    """Reads the shapes of a state_dict: nothing but tensors, storages and dicts exists for it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _shape
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no tensor")

    def persistent_load(self, pid: Any) -> Any:
        return None

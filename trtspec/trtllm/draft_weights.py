"""Trees and trained heads in the forms that TensorRT-LLM takes, checked before anything is built.

Heads are read by :mod:`trtspec.heads_layout`, by file names and headers: Medusa and EAGLE-1/2 for engines,
EAGLE-3 for the LLM API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec.errors import InputError, Problem
from trtspec.heads_check import backend_problems, tensorrt_file_problem
from trtspec.heads_layout import HeadsKind, read_heads
from trtspec.heads_shape import MedusaShape, read_shape
from trtspec.modelspec import ModelSpec
from trtspec.recipe import EagleSpeculation, MedusaSpeculation, Recipe
from trtspec.recipe_facts import drafted_positions
from trtspec.recipe_rules import RULES
from trtspec.tensor_headers import read_json

Choices = Sequence[Sequence[int]]
DEFAULT_MEDUSA_DEPTH = 4
"""Longest path of TensorRT-LLM's default tree (mc_sim_7b_63)."""
_BRACES = re.compile(r"\{[0-9]+(?:, ?[0-9]+)*\}(?:, ?\{[0-9]+(?:, ?[0-9]+)*\})*")


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
    if folder.is_dir():
        read_json(folder / "config.json", problems)
        if (unfound := tensorrt_file_problem(folder, kind)) is not None:
            raise InputError([*problems, unfound])
    heads = None if problems else read_heads(folder, problems)
    if heads is None:
        raise InputError(problems)
    if heads.kind != kind:
        message = f"these are {heads.kind} heads, {kind} was asked for; write speculation.kind: {heads.kind}"
        raise InputError(Problem(message, file=str(folder)))
    shape = read_shape(heads, target, problems)
    problems += backend_problems(heads, shape, "pytorch" if kind == "eagle3" else "tensorrt", target)
    if problems:
        raise InputError(problems)
    if isinstance(shape, MedusaShape):
        return DraftWeights(kind, heads.files[0], len(shape.blocks), max(map(len, shape.blocks), default=0))
    drafted = shape.draft_vocab_size if kind == "eagle3" else None
    return DraftWeights(kind, heads.files[0], 1, shape.num_layers, drafted)

"""What a recipe asks of its model, checked against the checkpoint where that is on this machine.

Only config.json and the size of the vocabulary are read: no torch, no network, no weights, whose state is a
matter of the machine and checked when building. A model that is not here is no error; :func:`look` says
so in a note. ``MODEL_RULES`` are rules as in :mod:`trtspec.recipe_rules`, with the checkpoints as second
argument. Quantizing asks :func:`module_findings` again, since it also runs without a recipe.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.model_source import find_model
from trtspec.modelspec import CONFIG, ModelSpec, linear_modules, read_modelspec
from trtspec.recipe import (
    DraftModelSpeculation,
    Limits,
    Model,
    NoQuantization,
    Quantization,
    Recipe,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
)
from trtspec.recipe_rules import Finding, Rule
from trtspec.tensor_headers import read_json
from trtspec.user_files import read_user_json, shown_path, user_path

FUSED_INPUTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Layers with one input: AWQ folds their common input scale into the norm before them, and engines fuse
them into one matrix, so they are quantized together or not at all."""

GROUP_SIZES = (128, 64, 32)
AWQ_KINDS = ("w4a16_awq", "w4a8_awq")


@dataclass(frozen=True)
class Checkpoint:
    """One model of the recipe that is on this machine. ``path`` leads to it in the recipe, ``quantized_by``
    to its quantization. ``spec`` is None exactly when config.json has ``problems``."""

    path: tuple[str, ...]
    quantized_by: tuple[str, ...]
    quantization: Quantization
    folder: Path
    spec: ModelSpec | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Look:
    """What was found on this machine; ``notes`` are findings about what could not be checked."""

    checkpoints: tuple[Checkpoint, ...]
    notes: tuple[Finding, ...]


def look(recipe: Recipe, base: Path) -> Look:
    """The recipe's models as they are on this machine; relative folders start at ``base``."""
    wanted: list[tuple[tuple[str, ...], Model, tuple[str, ...], Quantization]] = [
        (("model",), recipe.model, ("quantization",), recipe.quantization)
    ]
    s = recipe.speculation
    if isinstance(s, DraftModelSpeculation):
        wanted.append((("speculation", "model"), s.model, ("speculation", "quantization"), s.quantization))
    checkpoints, notes = [], list[Finding]()
    for path, model, quantized_by, quantization in wanted:
        where = (*path, "source")
        folder = find_model(model.source, base, model.revision)
        if folder is None and (file := _file_of(model.source, base)) is not None:
            wrong = Problem("is a file; name the folder of the checkpoint", file=shown_path(file))
            checkpoints.append(Checkpoint(path, quantized_by, quantization, file, None, (wrong,)))
            continue
        if folder is None:
            how = ""
            if model.source.startswith("sample:"):
                how = f" (run: trtspec fetch {model.source.removeprefix('sample:')})"
            notes.append((where, f"{model.source} is not on this machine{how}; {UNCHECKED}"))
            continue
        spec, problems = None, tuple[Problem, ...]()
        try:
            spec = read_modelspec(folder)
        except InputError as error:
            problems = error.problems
            if recipe.backend.kind != "embedded" and _names_architecture(folder):
                notes += [(where, f"{problem}; {UNCHECKED}") for problem in problems]
                continue
        checkpoints.append(Checkpoint(path, quantized_by, quantization, folder, spec, problems))
    return Look(tuple(checkpoints), tuple(notes))


def _file_of(source: str, base: Path) -> Path | None:
    """The file that ``source`` names instead of a folder, if it does."""
    try:
        path = base / user_path(source)
        return path if path.exists() and not path.is_dir() else None
    except (OSError, InputError):
        return None


def _names_architecture(folder: Path) -> bool:
    """Whether config.json can be read and says what the model is, so that TensorRT-LLM may know it."""
    config = read_json(folder / CONFIG, [])
    names = None if config is None else config.get("architectures")
    return isinstance(names, list) and bool(names) and isinstance(names[0], str)


UNCHECKED = "its group sizes, positions and vocabulary were not checked"


# --------------------------------------------------------------------------- what quantizing asks


def excluded_modules(linears: Mapping[str, tuple[int, int]], quantization: Quantization) -> list[str]:
    """Those of ``linears`` (name -> outputs, inputs) that stay in 16 bit, in their order."""
    if isinstance(quantization, NoQuantization):
        return list(linears)
    excluded = set() if quantization.lm_head else {"lm_head"}
    for pattern in quantization.exclude:
        excluded.update(fnmatch.filter(linears, pattern))
    return [module for module in linears if module in excluded]


def module_findings(spec: ModelSpec, quantization: Quantization) -> Iterator[Finding]:
    """What of ``exclude`` and ``lm_head`` does not fit the model's layers; paths begin below the mapping."""
    if isinstance(quantization, NoQuantization):
        return
    linears = linear_modules(spec)
    fine = True
    if quantization.lm_head and spec.tie_embeddings:
        fine = False
        yield (
            ("lm_head",),
            "true, but this model ties its output projection to the embedding, which stays in 16 bit; "
            "set it to false",
        )
    for index, pattern in enumerate(quantization.exclude):
        if not fnmatch.filter(linears, pattern):
            fine = False
            yield (
                ("exclude", index),
                f"{pattern!r} matches no linear layer; names look like model.layers.0.mlp.down_proj",
            )
    excluded = set(excluded_modules(linears, quantization))
    for message in _split_inputs(spec, excluded):
        fine = False
        yield ("exclude",), message
    if fine and excluded >= set(linears):
        yield ("exclude",), "excludes every layer; use kind none"


def _split_inputs(spec: ModelSpec, excluded: Collection[str]) -> Iterator[str]:
    for members in FUSED_INPUTS:
        split = [
            layer
            for layer in range(spec.num_layers)
            if 0 < sum(f"model.layers.{layer}.{member}" in excluded for member in members) < len(members)
        ]
        if split:
            names = ", ".join(member.rpartition(".")[2] for member in members)
            more = f" (and {len(split) - 1} more)" if len(split) > 1 else ""
            yield (
                f"leaves only some of {names} of layer {split[0]}{more} in 16 bit; they share one input, "
                "exclude all of them or none"
            )


def group_findings(spec: ModelSpec, quantization: Quantization) -> Iterator[Finding]:
    """Whether the group size divides the inputs of every quantized layer; paths begin below the mapping."""
    if not isinstance(quantization, W4A16AwqQuantization | W4A8AwqQuantization):
        return
    linears = linear_modules(spec)
    excluded = set(excluded_modules(linears, quantization))
    inputs = {module: shape[1] for module, shape in linears.items() if module not in excluded}
    size = quantization.group_size
    bad = [module for module, columns in inputs.items() if columns % size]
    if bad:
        fitting = [str(g) for g in sorted(GROUP_SIZES) if not any(columns % g for columns in inputs.values())]
        remedy = f"use {' or '.join(fitting)}" if fitting else "exclude those layers or use fp8 or w8a8_sq"
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        yield (
            ("group_size",),
            f"{size} does not divide the {inputs[bad[0]]} inputs of {bad[0]}{more}; {remedy}",
        )


def fitting_group_size(spec: ModelSpec) -> int | None:
    """The largest group size that divides the inputs of every linear layer but lm_head; None: no one does."""
    inputs = {shape[1] for module, shape in linear_modules(spec).items() if module != "lm_head"}
    return next((size for size in GROUP_SIZES if not any(columns % size for columns in inputs)), None)


def fitting_limits(spec: ModelSpec) -> dict[str, int]:
    """The keys of ``limits`` whose defaults the model's positions do not hold, with values that they do."""
    positions, usual = spec.max_positions, Limits()
    if positions >= usual.max_seq_tokens:
        return {}
    return {
        "max_input_tokens": min(usual.max_input_tokens, max(1, positions // 2)),
        "max_seq_tokens": positions,
    }


def vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id from tokenizer.json, added tokens included; None if there is none that can be read so."""
    try:
        value = read_user_json(folder / "tokenizer.json")
        stored = value["model"]["vocab"]
        if isinstance(stored, list):  # unigram: [token, score], the id is the place
            stored = {str(row[0]): index for index, row in enumerate(stored)}
        added = {str(token["content"]): int(token["id"]) for token in value.get("added_tokens") or ()}
        return {**stored, **added}
    except (TrtspecError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def differing_tokens(target: Mapping[str, int], draft: Mapping[str, int]) -> list[str]:
    """The draft's tokens that the target lacks or counts otherwise."""
    return [token for token, index in draft.items() if target.get(token) != index]


# --------------------------------------------------------------------------- the rules


def _readable(recipe: Recipe, found: Look) -> Iterator[Finding]:
    """The embedded engine runs Llama, Mistral, Qwen2 and Qwen3 decoders; config.json says what a model is.
    With a GPU backend only what no backend could read is an error; the rest is noted.
    """
    for checkpoint in found.checkpoints:
        for problem in checkpoint.problems:
            yield (*checkpoint.path, "source"), str(problem)


def _sixteen_bit(recipe: Recipe, found: Look) -> Iterator[Finding]:
    """The source is what quality is measured against, so it must be the unquantized checkpoint."""
    for checkpoint in found.checkpoints:
        if checkpoint.spec is not None and checkpoint.spec.quant is not None:
            yield (
                (*checkpoint.path, "source"),
                f"{checkpoint.folder} is quantized already (hf_quant_config.json); name the 16-bit "
                "checkpoint, it is what quality is measured against",
            )


def _vocabularies(recipe: Recipe, found: Look) -> Iterator[Finding]:
    """Token ids must mean the same everywhere: tokenizer and model, draft and target."""
    vocabularies: list[dict[str, int]] = []
    for checkpoint in found.checkpoints:
        tokens = vocabulary(checkpoint.folder)
        if tokens is None or checkpoint.spec is None:
            continue
        vocabularies.append(tokens)
        if len(tokens) > checkpoint.spec.vocab_size:
            yield (
                (*checkpoint.path, "source"),
                f"tokenizer.json has {len(tokens)} tokens, the model only {checkpoint.spec.vocab_size}; "
                "they belong to different models, download it again",
            )
    if len(vocabularies) == 2:
        differing = differing_tokens(*vocabularies)
        if differing:
            yield (
                ("speculation", "model", "source"),
                f"{len(differing)} of its tokens differ from the target's, first {differing[0]!r}; a draft "
                "needs the target's own vocabulary, choose a smaller model of its family",
            )


def _positions(recipe: Recipe, found: Look) -> Iterator[Finding]:
    """Rotary positions beyond those of config.json were never trained."""
    longest = recipe.limits.max_seq_tokens
    for checkpoint in found.checkpoints:
        if checkpoint.path == ("model",) and checkpoint.spec and longest > checkpoint.spec.max_positions:
            yield (
                ("limits", "max_seq_tokens"),
                f"found {longest}; the model has {checkpoint.spec.max_positions} positions; lower it to "
                f"{checkpoint.spec.max_positions} or less",
            )


def _of_quantizations(
    found: Look, check: Callable[[ModelSpec, Quantization], Iterator[Finding]]
) -> Iterator[Finding]:
    for checkpoint in found.checkpoints:
        if checkpoint.spec is not None and checkpoint.spec.quant is None:
            for path, message in check(checkpoint.spec, checkpoint.quantization):
                yield (*checkpoint.quantized_by, *path), message


def _groups(recipe: Recipe, found: Look) -> Iterator[Finding]:
    """Each scale of a 4-bit weight belongs to a whole group of inputs, in every quantized layer."""
    return _of_quantizations(found, group_findings)


def _modules(recipe: Recipe, found: Look) -> Iterator[Finding]:
    """Patterns must name layers of this model, and layers with one input are quantized together."""
    return _of_quantizations(found, module_findings)


MODEL_RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule("model-checkpoint", "error", ("model", "speculation", "backend"), _readable),
        Rule("model-16-bit", "error", ("model", "speculation"), _sixteen_bit),
        Rule("model-vocabulary", "error", ("model", "speculation"), _vocabularies),
        Rule("model-positions", "error", ("model", "limits"), _positions),
        Rule("model-group-size", "error", ("model", "quantization", "speculation"), _groups),
        Rule("model-modules", "error", ("model", "quantization", "speculation"), _modules),
    )
}
"""Rules that need the checkpoint; same table form as :data:`trtspec.recipe_rules.RULES`."""

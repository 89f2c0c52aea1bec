"""Draft heads held against their target before anything runs: what would make them draft in vain.

Heads of another model, tokenizer or rope load without an error and are never accepted: an acceptance length
of 1.00 and no message. What can be told apart without running is told here, all of it at once, from headers,
JSON and the draft vocabulary. No torch; nothing of the folder is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtspec.artifact import file_sha256
from trtspec.config_values import shown_value
from trtspec.errors import InputError, MissingError, Problem
from trtspec.heads_layout import (
    CONFIG,
    EAGLE_FILES,
    MEDUSA_FILES,
    RECORD,
    Heads,
    HeadsKind,
    default_hidden_layers,
    named_hidden_layers,
    read_heads,
)
from trtspec.heads_shape import EagleShape, MedusaShape, embedded_problems, read_shape
from trtspec.modelspec import ModelSpec, read_modelspec, read_rope
from trtspec.tensor_headers import read_json
from trtspec.user_files import is_plain_name, read_user_bytes

Backend = Literal["embedded", "tensorrt", "pytorch"]
BACKENDS: tuple[Backend, ...] = ("embedded", "tensorrt", "pytorch")
"""Those that a recipe can name."""

OWN_ROPE = "rope_is_own"
"""In the heads' config.json: true says that they were trained with a rope that is not the target's."""
_ROPE_KEYS = ("rope_type", "factor", "low_freq_factor", "high_freq_factor")
_TOKENIZER = "tokenizer.json"
_HUB_FOLDER = re.compile(r"^models--(.+)$")


@dataclass(frozen=True)
class Target:
    """What is known of the model that heads are held against."""

    folder: Path
    spec: ModelSpec
    names: tuple[str, ...]
    """What it is called: its folder, its folder in the hub's cache, what its config.json says."""
    known: bool
    """Whether one of the names is a hub id, and not only a folder that somebody named."""
    digest: str | None = None
    """:attr:`trtspec.artifact.Source.digest` of its files, where somebody hashed them."""


@dataclass(frozen=True)
class HeadsCheck:
    """What is wrong with a folder of heads. ``heads`` and ``shape`` are None if it could not be read."""

    heads: Heads | None
    shape: MedusaShape | EagleShape | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    obstacles: Mapping[Backend, tuple[Problem, ...]]
    """What keeps a backend from running heads that are sound; () where nothing does."""

    @property
    def runs_on(self) -> tuple[Backend, ...]:
        return tuple(backend for backend in BACKENDS if not self.obstacles.get(backend, ("unread",)))


def read_target(folder: Path, source: str | None = None, digest: str | None = None) -> Target:
    """The target in ``folder``; ``source`` is what the user called it. InputError if it is no model."""
    spec = read_modelspec(folder)
    path = folder.resolve()
    names, known = [path.name], False
    for part in path.parts:
        if match := _HUB_FOLDER.match(part):
            names.append(match[1].replace("--", "/"))
            known = True
    said = (read_json(path / "config.json", []) or {}).get("_name_or_path")
    for name in (said, source):
        if isinstance(name, str) and _is_hub_id(name):
            names.append(name)
            known = known or name is source
        elif isinstance(name, str) and name.startswith("sample:"):
            names.append(name.removeprefix("sample:"))
    return Target(path, spec, tuple(dict.fromkeys(names)), known, digest)


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def check_heads(folder: Path, target: Target | None, kind: HeadsKind | None = None) -> HeadsCheck:
    """Everything that is wrong with the heads in ``folder``, for themselves and for ``target``.

    ``kind``: what they are meant to be. Raises nothing of its own; a file that cannot be read is a problem.
    """
    problems: list[Problem] = []
    warnings: list[Problem] = []
    try:
        heads = read_heads(folder, problems)
        if heads is None:
            return HeadsCheck(None, None, tuple(problems), (), {})
        if kind is not None and heads.kind != kind:
            message = (
                f"these are {heads.kind} heads; write speculation kind: {heads.kind}, or give {kind} heads"
            )
            problems.append(Problem(message, file=str(folder)))
        shape = read_shape(heads, target.spec if target else None, problems)
        _check_record(heads, shape, target, problems, warnings)
        warnings += _dtype_warnings(heads, target)
        if target is not None:
            problems += _tokenizer_problems(heads, target)
            _check_base_model(heads, target, problems, warnings)
            if heads.kind != "medusa":
                _check_rope(heads, target.spec, problems, warnings)
        spec = target.spec if target else None
        obstacles = {backend: tuple(backend_problems(heads, shape, backend, spec)) for backend in BACKENDS}
    except (InputError, MissingError) as error:
        found = error.problems if isinstance(error, InputError) else (Problem(str(error)),)
        return HeadsCheck(None, None, (*problems, *found), tuple(warnings), {})
    return HeadsCheck(heads, shape, tuple(dict.fromkeys(problems)), tuple(warnings), obstacles)


# --------------------------------------------------------------------------- of the target


def _check_rope(heads: Heads, target: ModelSpec, problems: list[Problem], warnings: list[Problem]) -> None:
    """The layer's rotary settings against the target's, with which heads are trained.

    ModelOpt's exporter (hf_spec_export.py, eagle_export_rope_scaling) writes yarn with a factor of 32 into
    heads that were trained without; a config.json without rope_theta means 10000.
    """
    config, file = heads.config, str(heads.config_file)
    theta, scaling = read_rope(config, heads.config_file, [], target.max_positions)
    own = config.get(OWN_ROPE) is True
    found = warnings if own else problems
    remedy = f"; if the heads were trained with it, write {OWN_ROPE}: true"
    parameters = config.get("rope_parameters")
    stated = config.get("rope_theta") is not None or (
        isinstance(parameters, dict) and parameters.get("rope_theta") is not None
    )
    if theta != target.rope_theta and not stated:
        message = f"missing, which means 10000; the target has {target.rope_theta:g}: write that"
        problems.append(Problem(message, file=file, key="rope_theta"))
    elif theta != target.rope_theta:
        message = f"{theta:g}, the target has {target.rope_theta:g}"
        found.append(Problem(message + ("" if own else remedy), file=file, key="rope_theta"))
    theirs, ours = ({k: (s or {}).get(k) for k in _ROPE_KEYS} for s in (scaling, target.rope_scaling))
    if theirs != ours:
        message = f"{_described(scaling)}, the target has {_described(target.rope_scaling)}"
        if scaling and scaling["rope_type"] == "yarn" and not target.rope_scaling and not own:
            message += (
                "; ModelOpt's exporter writes it unless told otherwise (eagle_export_rope_scaling: {}): "
                "remove it"
            )
        found.append(Problem(message + ("" if own else remedy), file=file, key="rope_scaling"))
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions < target.max_positions:
        message = (
            f"{positions}, the target has {target.max_positions}; nothing was drafted beyond in training"
        )
        warnings.append(Problem(message, file=file, key="max_position_embeddings"))


def _described(scaling: Mapping[str, Any] | None) -> str:
    if not scaling:
        return "none"
    return f"{scaling['rope_type']} of factor {shown_value(scaling.get('factor'))}"


def _check_base_model(heads: Heads, target: Target, problems: list[Problem], warnings: list[Problem]) -> None:
    named = heads.base_model
    if named is None:
        return
    short = [name.rstrip("/").rsplit("/", 1)[-1].lower() for name in (named, *target.names)]
    if short[0] in short[1:]:
        return
    message = f"for {shown_value(named)}; the target is {' or '.join(target.names)}"
    key = "speculators_config.verifier.name_or_path" if heads.layout == "speculators" else None
    problem = Problem(message, file=str(heads.config_file), key=key or "base_model_name_or_path")
    # A folder may be called anything, a hub id not.
    (problems if target.known and _is_hub_id(named) else warnings).append(problem)


def _tokenizer_problems(heads: Heads, target: Target) -> Iterator[Problem]:
    """Heads draft the target's token ids: a tokenizer of their own that differs is another model's."""
    own, theirs = heads.folder / _TOKENIZER, target.folder / _TOKENIZER
    if not own.is_file() or not theirs.is_file():
        return
    if read_user_bytes(own) == read_user_bytes(theirs):
        return
    problems: list[Problem] = []
    left, right = (_vocabulary(read_json(path, problems)) for path in (own, theirs))
    yield from problems
    if problems or left == right:
        return
    unlike = sorted(token for token in left.keys() | right.keys() if left.get(token) != right.get(token))
    message = (
        f"{len(unlike)} tokens are not the target's or have other ids, first {shown_value(unlike[0])}; "
        "these heads are another target's"
    )
    yield Problem(message, file=str(own))


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    values = tokenizer if isinstance(tokenizer, dict) else {}
    model = values.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    found = {str(k): v for k, v in vocabulary.items()} if isinstance(vocabulary, dict) else {}
    if isinstance(vocabulary, list):  # Unigram: [[token, score], ...]
        found = {str(item[0]): at for at, item in enumerate(vocabulary) if isinstance(item, list) and item}
    for token in values.get("added_tokens") or ():
        if isinstance(token, dict):
            found[str(token.get("content"))] = token.get("id", -1)
    return found


# --------------------------------------------------------------------------- what trtspec wrote


def _check_record(
    heads: Heads,
    shape: MedusaShape | EagleShape,
    target: Target | None,
    problems: list[Problem],
    warnings: list[Problem],
) -> None:
    """``trtspec draft train`` says what it trained on: a target that is another is none for these heads."""
    record, file = heads.record, str(heads.folder / RECORD)
    if not record:
        return

    def bad(key: str, message: str, found: list[Problem] = problems) -> None:
        found.append(Problem(message, file=file, key=key))

    if record.get("kind") not in (None, heads.kind):
        bad("kind", f"{shown_value(record['kind'])}, the weights are {heads.kind} heads")
    drafted = shape.draft_vocab_size if isinstance(shape, EagleShape) else None
    told = record.get("draft_vocab_size")
    if told is not None and drafted is not None and told != drafted:
        bad("draft_vocab_size", f"{shown_value(told)}, the weights draft {drafted} tokens")
    files = record.get("files")
    for name, digest in sorted(files.items()) if isinstance(files, dict) else ():
        path = heads.folder / str(name)
        # A config.json may be corrected by hand, weights not.
        if path.suffix == ".svg" or not is_plain_name(str(name)) or not path.is_file():
            continue
        if file_sha256(path) != digest and path.name == CONFIG:
            bad("files", f"{name} was changed since the training", warnings)
        elif file_sha256(path) != digest:
            bad("files", f"{name} was changed since the training; copy the heads again")
    if target is None:
        return
    told, tokenizer = record.get("tokenizer_digest"), target.folder / _TOKENIZER
    if told is not None and tokenizer.is_file() and told != file_sha256(tokenizer):
        bad("tokenizer_digest", "the heads were trained with another tokenizer.json than the target's")
    told = record.get("base_digest")
    if told is not None and target.digest is not None and told != target.digest:
        message = f"the heads were trained for {shown_value(record.get('base_model'))}, which has other files"
        # A quantized target is another file: of the same model as far as anybody can tell.
        quantized = target.spec.quant is not None or record.get("target_recipe") is not None
        bad("base_digest", message, warnings if quantized else problems)


# --------------------------------------------------------------------------- of the heads


def _dtype_warnings(heads: Heads, target: Target | None) -> Iterator[Problem]:
    """Floating dtypes that are legal, but that somebody will be surprised by."""
    weights = {n: h for n, h in heads.tensors.items() if n not in ("d2t", "t2d")}
    found = sorted({header.dtype for header in weights.values()})
    if len(found) > 1:
        yield Problem(f"weights in {' and '.join(found)}; a backend casts them to one", str(heads.folder))
    told = heads.config.get("dtype") or heads.config.get("torch_dtype")
    names = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    wanted = names.get(str(told).removeprefix("torch."))
    if heads.kind != "medusa" and wanted and found != [wanted]:
        message = f"{told}, the weights are {' and '.join(found)}; TensorRT-LLM believes config.json"
        yield Problem(message, file=str(heads.config_file), key="torch_dtype")
    own = names.get(target.spec.dtype) if target else None
    if own in ("F16", "BF16") and len(found) == 1 and found[0] in ("F16", "BF16") and found[0] != own:
        message = f"{found[0]} heads for a target in {own}; the cast costs range or precision"
        yield Problem(message, file=str(heads.folder))


def backend_problems(
    heads: Heads, shape: MedusaShape | EagleShape, backend: Backend, target: ModelSpec | None = None
) -> Iterator[Problem]:
    """Why ``backend`` does not run heads that fit ``target``, from the files it looks for to the settings of
    its forward pass."""
    if backend == "embedded":
        yield from embedded_problems(heads)
        return
    wanted = "pytorch" if heads.kind == "eagle3" else "tensorrt"
    if heads.hydra:
        yield Problem("Hydra heads; TensorRT-LLM has none, backend embedded does", file=str(heads.folder))
    elif backend != wanted:
        message = f"TensorRT-LLM runs {heads.kind} heads on backend {wanted} only"
        yield Problem(message, file=str(heads.folder))
    else:
        yield from _tensorrt_problems(heads, shape, target)


def tensorrt_file_problem(folder: Path, kind: HeadsKind) -> Problem | None:
    """That TensorRT-LLM does not find the weights, or finds others than everybody else."""
    names = MEDUSA_FILES if kind == "medusa" else EAGLE_FILES
    present = [name for name in names if (folder / name).is_file()]
    if not present:
        found = sorted(
            path.name for path in folder.iterdir() if path.suffix in (".pt", ".bin", ".safetensors")
        )
        message = (
            f"no weights that TensorRT-LLM looks for; found: {', '.join(found) or 'none'}; allowed: "
            f"{' or '.join(names)}; convert the folder: trtspec draft convert --to tensorrt"
        )
        return Problem(message, file=str(folder))
    if len(present) > 1:
        message = f"{present[1]} is there too; TensorRT-LLM reads this one, everybody else that: keep one"
        return Problem(message, file=str(folder / present[0]))
    return None


def _tensorrt_problems(
    heads: Heads, shape: MedusaShape | EagleShape, target: ModelSpec | None
) -> Iterator[Problem]:
    convert = "trtspec draft convert --to tensorrt"
    if (problem := tensorrt_file_problem(heads.folder, heads.kind)) is not None:
        yield problem
    if heads.layout == "speculators":
        message = f"the layout of speculators, which TensorRT-LLM does not read; {convert}"
        yield Problem(message, file=str(heads.config_file))
        return
    keys: tuple[str, ...] = ("medusa_num_heads", "medusa_num_layers")
    if isinstance(shape, EagleShape):
        keys = ("hidden_size", "num_hidden_layers", "vocab_size")
        keys += ("draft_vocab_size",) if heads.kind == "eagle3" else ()
    for key in keys:
        value = heads.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            found = "missing" if value is None else f"found {shown_value(value)}"
            message = f"{found}; a whole number is needed, TensorRT-LLM reads it"
            yield Problem(message, file=str(heads.config_file), key=key)
    if isinstance(shape, MedusaShape):
        if lacking := [head for head, own in enumerate(shape.own_output) if not own]:
            message = (
                f"heads {lacking} have no output projection; TensorRT-LLM wants one in each: {convert} "
                "--model TARGET copies the target's"
            )
            yield Problem(message, file=str(heads.folder))
        if len({len(blocks) for blocks in shape.blocks}) > 1:
            yield Problem("heads of different depths; TensorRT-LLM has one for all", file=str(heads.folder))
    elif heads.kind == "eagle3":
        default = default_hidden_layers(target.num_layers) if target else shape.hidden_layers
        if shape.hidden_layers != default:
            layers = [layer - 1 for layer in shape.hidden_layers or ()]
            message = (
                f"sees the layers {layers}; TensorRT-LLM captures {[layer - 1 for layer in default or ()]} "
                "unless told eagle3_layers_to_capture (from 1.1), which recipes do not write"
            )
            yield Problem(message, file=str(heads.config_file), key=named_hidden_layers(heads.config)[0])
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if heads.config.get(key):
                message = "true; TensorRT-LLM's EAGLE-3 layer (up to 1.2.1) does not read it"
                yield Problem(message, file=str(heads.config_file), key=key)

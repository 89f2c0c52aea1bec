"""What a build is going to do: a list of steps, each with its command and the digest of its inputs.

:func:`plan_for` is pure; :func:`make_plan` finds and hashes what it needs. Doing it is
:mod:`trtspec.build`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtspec import artifact
from trtspec.artifact import BASELINE_DIR, TARGET_DIR, Source, json_digest
from trtspec.backends import gpu_backend_message
from trtspec.errors import InputError, MissingError, Problem
from trtspec.model_source import resolve_model
from trtspec.modelspec import check_weight_files
from trtspec.recipe import EmbeddedBackend, NoQuantization, Quantization, Recipe
from trtspec.recipe_facts import EMBEDDED_ACCEPTANCE, EMBEDDED_SPECULATION
from trtspec.recipe_file import lint, load_recipe, parse_recipe

ENGINES_DIR = Path("engines")
STEPS_DIR = ".steps"
"""Records of finished steps, in the work folder."""
SOURCE_RECORD = "source.json"

_MODEL_SUFFIXES = {".json", ".safetensors", ".model", ".txt", ".jinja"}
_LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE")
# The tools whose version is part of the quantized weights' identity.
_QUANTIZING_TOOLS = ("trtspec", "torch", "modelopt", "transformers")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Step:
    """One step of a build."""

    name: str
    what: str
    """For people; for a step without ``argv`` it says what the building process itself does."""
    argv: tuple[str, ...]
    """The command that is run; empty when the building process does the step."""
    digest: str
    """Of all inputs; equal digests mean interchangeable outputs."""
    output: Path | None
    """The folder it makes; None for a step that only looks."""


@dataclass(frozen=True)
class Plan:
    """Everything a build is going to do, known before it does anything."""

    recipe: Recipe
    recipe_bytes: bytes
    source_dir: Path
    source: Source
    calibration_digest: str | None
    tools: Mapping[str, str]
    steps: tuple[Step, ...]
    folder: Path
    """engines/NAME"""
    work: Path
    """engines/.NAME.building"""

    @property
    def target(self) -> str:
        return TARGET_DIR if is_quantized(self.recipe.quantization) else BASELINE_DIR


def is_quantized(quantization: Quantization) -> bool:
    """Whether the target's folder differs from the source: weights or KV cache are quantized."""
    return not (isinstance(quantization, NoQuantization) and quantization.kv_cache == "none")


def refuse_unsupported(recipe: Recipe, file: str | None = None) -> None:
    """Raise what keeps this version from building the recipe: MissingError for a GPU backend, InputError
    with every key that the embedded engine does not run yet. What no version can run, the recipe's rules
    have refused before."""
    backend = recipe.backend
    if not isinstance(backend, EmbeddedBackend):
        raise MissingError(gpu_backend_message(backend.kind))
    problems = []
    for section, kind, runs in (
        ("speculation", recipe.speculation.kind, EMBEDDED_SPECULATION),
        ("acceptance", recipe.acceptance.kind, EMBEDDED_ACCEPTANCE),
    ):
        if kind not in runs:
            message = f"{kind}: the embedded engine of this version does not run it; use {' or '.join(runs)}"
            problems.append(Problem(message, file=file, key=f"{section}.kind"))
    if problems:
        raise InputError(problems)


def model_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that an engine keeps: config, weights, tokenizer, licence."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and (path.suffix in _MODEL_SUFFIXES or path.name.upper().startswith(_LICENCE_NAMES))
    )


def plan_for(
    recipe: Recipe,
    *,
    source: Source,
    calibration_digest: str | None,
    quantization_json: str,
    tools: Mapping[str, str],
    work: Path,
    python: str = sys.executable,
) -> tuple[Step, ...]:
    """The steps that build ``recipe`` in the folder ``work``. Pure: reads and writes nothing.

    ``quantization_json`` is the recipe's ``quantization`` with file names made absolute.
    """
    size = sum(file.size for file in source.files.values())
    baseline = work / BASELINE_DIR
    steps = [
        Step(
            name="import",
            what=f"hard link (else copy) {len(source.files)} files, {size / 1e6:.0f} MB, "
            f"from {source.path} to {baseline}",
            argv=(),
            digest=json_digest({"step": "import", "source": source.digest}),
            output=baseline,
        )
    ]
    if is_quantized(recipe.quantization):
        target = work / TARGET_DIR
        argv = (python, "-m", "trtspec.quantize", "--model", str(baseline), "--out", str(target))
        steps.append(
            Step(
                name="quantize",
                what=f"calibrate and export {describe_quantization(recipe.quantization)} to {target}",
                argv=(*argv, "--quantization", quantization_json),
                digest=json_digest(
                    {
                        "step": "quantize",
                        "source": source.digest,
                        "quantization": recipe.quantization.model_dump(mode="json", exclude_defaults=True),
                        "calibration": calibration_digest,
                        "tools": {name: tools.get(name, "") for name in _QUANTIZING_TOOLS},
                    }
                ),
                output=target,
            )
        )
        checked = target
    else:
        checked = baseline
    steps.append(
        Step(
            name="check",
            what=f"read config.json and weight headers of {checked}; "
            "layers, vocabulary, positions, rope and end tokens must be the source's",
            argv=(),
            digest=json_digest({"step": "check", "of": steps[-1].digest}),
            output=None,
        )
    )
    return tuple(steps)


def describe_quantization(quantization: Quantization) -> str:
    """``w4a16_awq (groups of 64), KV cache fp8``"""
    weights: str = "16-bit weights" if isinstance(quantization, NoQuantization) else quantization.kind
    if (group_size := getattr(quantization, "group_size", None)) is not None:
        weights += f" (groups of {group_size})"
    kv = "16-bit KV cache" if quantization.kv_cache == "none" else f"KV cache {quantization.kv_cache}"
    return f"{weights}, {kv}"


def make_plan(recipe_path: Path, engines_dir: Path = ENGINES_DIR, *, say: Say = lambda line: None) -> Plan:
    """Read the recipe, find and hash its source, and list the steps. Writes nothing.

    Source files whose size, time and inode equal those of the engine built before are not read again.
    Raises InputError for a recipe or checkpoint that cannot be built, MissingError for what is not here.
    """
    checked = lint(recipe_path, model=True)  # its errors have lines; what counts is the bytes that are sealed
    if checked.errors:
        raise InputError(checked.errors)
    recipe_bytes = recipe_path.read_bytes()
    recipe = parse_recipe(recipe_bytes, str(recipe_path))
    refuse_unsupported(recipe, str(recipe_path))
    base = recipe_path.resolve().parent
    source_dir = resolve_model(recipe.model.source, base, recipe.model.revision)
    if checked.notes:  # the model was not here before
        load_recipe(recipe_path, model=True)
    if problems := check_weight_files(source_dir):
        raise InputError(problems)

    if engines_dir.exists() and not engines_dir.is_dir():
        raise InputError(Problem("is not a folder; choose another --engines-dir", file=str(engines_dir)))
    folder = engines_dir / recipe.name
    work = engines_dir / f".{recipe.name}.building"
    known = _known_source(folder, work)
    files = model_files(source_dir)
    if known is None:
        size = sum(path.stat().st_size for path in files)
        say(f"hashing {len(files)} source files ({size / 1e6:.0f} MB)")
    try:
        source = artifact.hash_source(source_dir, files, known)
    except OSError as error:
        message = f"{error.filename}: cannot be read: {error.strerror}; give permission to read it"
        raise MissingError(message) from None
    quantization, calibration_digest = _resolve_calibration(recipe, base)
    tools = artifact.tool_versions()
    steps = plan_for(
        recipe,
        source=source,
        calibration_digest=calibration_digest,
        quantization_json=quantization,
        tools=tools,
        work=work,
    )
    return Plan(
        recipe=recipe,
        recipe_bytes=recipe_bytes,
        source_dir=source_dir,
        source=source,
        calibration_digest=calibration_digest,
        tools=tools,
        steps=steps,
        folder=folder,
        work=work,
    )


def _known_source(folder: Path, work: Path) -> Source | None:
    """Hashes of source files from the sealed engine or from an interrupted build."""
    with contextlib.suppress(InputError, OSError):
        return artifact.read_manifest(folder).source
    with contextlib.suppress(OSError, ValueError):
        return Source.model_validate_json((work / STEPS_DIR / SOURCE_RECORD).read_bytes())
    return None


def _resolve_calibration(recipe: Recipe, base: Path) -> tuple[str, str | None]:
    """The quantization as JSON with an absolute calibration file, and the digest of that file."""
    quantization = recipe.quantization
    value = quantization.model_dump(mode="json")
    if not is_quantized(quantization):
        return json.dumps(value), None
    data = quantization.calibration.data
    if data == "builtin":
        path = Path(__file__).parent / "data" / "calibration.jsonl"
    else:
        path = (base / Path(data).expanduser()).resolve()
        value["calibration"]["data"] = str(path)
    if not path.is_file():
        message = f"{data}: no such file (looked at {path})"
        raise InputError(Problem(message, key="quantization.calibration.data"))
    return json.dumps(value), artifact.file_sha256(path)

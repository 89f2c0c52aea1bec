"""The models and texts that a build starts from, as found on this machine: located, checked, hashed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec import artifact
from trtspec.artifact import Source
from trtspec.errors import InputError, MissingError, Problem, TrtspecError
from trtspec.heads_check import check_heads, read_target
from trtspec.heads_layout import head_files
from trtspec.model_check import check_model_folder
from trtspec.model_source import resolve_model
from trtspec.quantize.calibration import read_samples
from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    Quantization,
    Recipe,
)
from trtspec.recipe_facts import is_for_gpu, is_quantized
from trtspec.text import Tokenizer, same_tokenizer
from trtspec.user_files import open_user_file, user_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_MODEL_SUFFIXES = {".json", ".safetensors", ".model", ".txt", ".jinja"}
_LICENCE_NAMES = ("LICENSE", "LICENCE", "NOTICE")

Say = Callable[[str], None]


@dataclass(frozen=True)
class DraftModel:
    """The draft model of a recipe that drafts with one, as found on this machine."""

    folder: Path
    source: Source
    quantization: Quantization
    quantization_json: str
    calibration_digest: str | None


@dataclass(frozen=True)
class TrainedHeads:
    """The trained draft heads of a recipe that drafts with some, as found on this machine."""

    folder: Path
    source: Source


@dataclass(frozen=True)
class CorpusFile:
    """The texts that an n-gram recipe looks up besides the sequence."""

    path: Path
    sha256: str
    min_ngram: int
    min_count: int


def model_files(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that an engine keeps: config, weights, tokenizer, licence."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and (path.suffix in _MODEL_SUFFIXES or path.name.upper().startswith(_LICENCE_NAMES))
    )


def find_corpus(recipe: Recipe, base: Path) -> CorpusFile | None:
    speculation = recipe.speculation
    if not isinstance(speculation, NgramSpeculation) or speculation.corpus is None:
        return None
    try:
        path = (base / user_path(speculation.corpus)).resolve()
        os.close(open_user_file(path))
    except InputError as error:
        problems = [Problem(found.message, found.file, key="speculation.corpus") for found in error.problems]
        raise InputError(problems) from None
    digest = artifact.file_sha256(path)
    return CorpusFile(path, digest, speculation.min_ngram, speculation.corpus_min_count)


def find_heads(recipe: Recipe, base: Path, target_dir: Path, target: Source, say: Say) -> TrainedHeads | None:
    """The recipe's trained heads, found, held against the target (as ``trtspec draft check`` does) and
    against what the backend runs, and hashed. InputError with everything that does not fit."""
    speculation = recipe.speculation
    if not isinstance(speculation, MedusaSpeculation | EagleSpeculation | Eagle3Speculation):
        return None
    folder = resolve_model(speculation.heads, base)
    known = read_target(target_dir, recipe.model.source, target.digest)
    found = check_heads(folder, known, speculation.kind)
    problems = list(found.problems)
    for_gpu = is_for_gpu(recipe)
    if for_gpu:
        problems += found.obstacles.get("pytorch" if recipe.backend.kind == "pytorch" else "tensorrt", ())
    else:
        from trtspec.embedded.heads_opening import heads_problems

        problems += heads_problems(speculation, folder, known.spec)
    if problems:
        raise InputError(list(dict.fromkeys(problems)))
    for warning in found.warnings:
        say(f"warning: {warning}")
    files = head_files(folder)
    if not for_gpu:
        files += [path for path in model_files(folder) if path.name.upper().startswith(_LICENCE_NAMES)]
    return TrainedHeads(folder, _hashed_files(folder, files, None, say))


def hashed(folder: Path, known: Source | None, say: Say) -> Source:
    """The checkpoint's files with their hashes; those that ``known`` has and did not change are not read."""
    return _hashed_files(folder, model_files(folder), known, say)


def _hashed_files(folder: Path, files: Sequence[Path], known: Source | None, say: Say) -> Source:
    if known is None:
        size = sum(path.stat().st_size for path in files)
        say(f"hashing {len(files)} source files ({size / 1e6:.0f} MB)")
    try:
        return artifact.hash_source(folder, files, known)
    except OSError as error:
        message = f"{error.filename}: cannot be read: {error.strerror}; give permission to read it"
        raise MissingError(message) from None


def find_draft(
    recipe: Recipe, base: Path, target_dir: Path, target: Source, engine: Path, say: Say
) -> DraftModel | None:
    """The recipe's draft model, found, hashed and held against the target's tokenizer."""
    speculation = recipe.speculation
    if not isinstance(speculation, DraftModelSpeculation):
        return None
    folder = resolve_model(speculation.model.source, base, speculation.model.revision)
    if problems := check_model_folder(folder).problems:
        raise InputError(problems)
    known = target if folder == target_dir else None
    if known is None:
        with contextlib.suppress(TrtspecError, OSError):
            known = artifact.read_manifest(engine).draft_source
    source = hashed(folder, known, say)
    if any(file_digest(source, name) != file_digest(target, name) for name in TOKENIZER_FILES):
        differences = same_tokenizer(Tokenizer.load(target_dir), Tokenizer.load(folder))
        if differences:
            remedy = "a draft needs the target's own tokenizer; choose a smaller model of its family"
            raise InputError(
                [
                    Problem(f"{difference}; {remedy}", file=str(folder), key="speculation.model.source")
                    for difference in differences
                ]
            )
    quantization = speculation.quantization
    as_json, digest = resolve_calibration(quantization, base, "speculation.quantization")
    return DraftModel(folder, source, quantization, as_json, digest)


def file_digest(source: Source, name: str) -> str | None:
    return source.files[name].sha256 if name in source.files else None


def resolve_calibration(quantization: Quantization, base: Path, key: str) -> tuple[str, str | None]:
    """The quantization as JSON with an absolute calibration file, and the digest of that file."""
    value = quantization.model_dump(mode="json")
    if not is_quantized(quantization):
        return json.dumps(value), None
    data = quantization.calibration.data
    if data == "builtin":
        path = Path(__file__).parent / "data" / "calibration.jsonl"
    else:
        try:
            path = base / user_path(data)
            read_samples(str(path))  # before anything is made, and with the lines of the bad texts
        except InputError as error:
            found = [
                Problem(problem.message, problem.file, problem.line, key=f"{key}.calibration.data")
                for problem in error.problems
            ]
            raise InputError(found) from None
        path = path.resolve()
        value["calibration"]["data"] = str(path)
    return json.dumps(value), artifact.file_sha256(path)

"""What a build is going to do: a list of steps, each with its command and the digest of its inputs.

:func:`plan_for` is pure; :func:`make_plan` finds and hashes what it needs. Doing it is
:mod:`trtspec.build`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtspec import artifact
from trtspec.artifact import (
    BASELINE_DIR,
    CORPUS_DIR,
    DRAFT_DIR,
    HEADS_DIR,
    TARGET_DIR,
    TRTLLM_DIR,
    Source,
    json_digest,
)
from trtspec.errors import InputError, MissingError, Problem, TrtspecError
from trtspec.gpu_plan import engine_files, engine_plan, is_for_gpu, refuse_building
from trtspec.model_check import check_model_folder
from trtspec.model_source import resolve_model
from trtspec.modelspec import read_modelspec
from trtspec.quantize.calibration import read_samples
from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    NoQuantization,
    Quantization,
    Recipe,
)
from trtspec.recipe_file import lint, load_recipe, parse_recipe
from trtspec.text import Tokenizer, same_tokenizer
from trtspec.trtllm.draft_weights import inspect_draft_weights
from trtspec.user_files import open_user_file, user_path

ENGINES_DIR = Path("engines")
STEPS_DIR = ".steps"
"""Records of finished steps, in the work folder."""
SOURCE_RECORD = "source.json"
LOG_FILE = ".build.log"
"""What the steps' tools said, in the work folder and then in the engine."""

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
    draft: DraftModel | None = None
    heads: TrainedHeads | None = None
    corpus: CorpusFile | None = None
    rendered: Mapping[str, str] | None = None
    """For GPU backends: the texts of the engine's folder trtllm, by their paths in it."""

    @property
    def target(self) -> str:
        return TARGET_DIR if is_quantized(self.recipe.quantization) else BASELINE_DIR

    @property
    def imports(self) -> dict[str, tuple[Path, Source]]:
        """Of each step that links a checkpoint into the engine: that checkpoint."""
        found = {"import": (self.source_dir, self.source)}
        if self.draft is not None and not is_quantized(self.draft.quantization):
            found["import-draft"] = (self.draft.folder, self.draft.source)
        if self.heads is not None:
            found["import-heads"] = (self.heads.folder, self.heads.source)
        return found


def is_quantized(quantization: Quantization) -> bool:
    """Whether the target's folder differs from the source: weights or KV cache are quantized."""
    return not (isinstance(quantization, NoQuantization) and quantization.kv_cache == "none")


def refuse_unsupported(recipe: Recipe, file: Path = Path("RECIPE")) -> None:
    """Raise MissingError for what this machine cannot build of a recipe for a GPU. What no version can run,
    the recipe's rules have refused before."""
    if is_for_gpu(recipe):
        refuse_building(recipe, file)


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
    draft: DraftModel | None = None,
    heads: TrainedHeads | None = None,
    corpus: CorpusFile | None = None,
    rendered: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> tuple[Step, ...]:
    """The steps that build ``recipe`` in the folder ``work``. Pure: reads and writes nothing.

    ``quantization_json`` is the recipe's ``quantization`` with file names made absolute.
    """
    baseline = checked = work / BASELINE_DIR
    steps = [_import_step("import", source, baseline)]
    if is_quantized(recipe.quantization):
        checked = work / TARGET_DIR
        argv = (python, "-m", "trtspec.quantize", "--model", str(baseline), "--out", str(checked))
        steps.append(
            Step(
                name="quantize",
                what=f"calibrate and export {describe_quantization(recipe.quantization)} to {checked}",
                argv=(*argv, "--quantization", quantization_json),
                digest=_quantizing_digest(source, recipe.quantization, calibration_digest, tools),
                output=checked,
            )
        )
    depends: dict[str, str] = {"step": "check", "of": steps[-1].digest}
    also = ""
    if draft is not None:
        steps.append(_draft_step(draft, source, tools, work, python))
        depends["draft"] = steps[-1].digest
        also = f" and of {work / DRAFT_DIR}"
    if heads is not None:
        steps.append(_import_step("import-heads", heads.source, work / HEADS_DIR))
        depends["heads"] = steps[-1].digest
    if corpus is not None:
        steps.append(_corpus_step(corpus, source, baseline, work / CORPUS_DIR, python))
    if rendered is not None:
        steps.append(_render_step(rendered, work / TRTLLM_DIR))
    steps.append(
        Step(
            name="check",
            what=f"read config.json and weight headers of {checked}{also}; "
            "layers, vocabulary, positions, rope and end tokens must be the source's",
            argv=(),
            digest=json_digest(depends),
            output=None,
        )
    )
    return tuple(steps)


def _import_step(name: str, source: Source, output: Path) -> Step:
    size = sum(file.size for file in source.files.values())
    return Step(
        name=name,
        what=f"hard link (else copy) {len(source.files)} files, {size / 1e6:.0f} MB, "
        f"from {source.path} to {output}",
        argv=(),
        digest=json_digest({"step": "import", "source": source.digest}),
        output=output,
    )


def _draft_step(draft: DraftModel, target: Source, tools: Mapping[str, str], work: Path, python: str) -> Step:
    """The draft model as the engine loads it: linked in 16 bit, or quantized."""
    output = work / DRAFT_DIR
    if not is_quantized(draft.quantization):
        return _import_step("import-draft", draft.source, output)
    # The target itself in another format is quantized from the copy of it that the engine keeps.
    model = work / BASELINE_DIR if draft.source.digest == target.digest else draft.folder
    argv = (python, "-m", "trtspec.quantize", "--model", str(model), "--out", str(output))
    return Step(
        name="quantize-draft",
        what=f"calibrate and export the draft, {describe_quantization(draft.quantization)}, to {output}",
        argv=(*argv, "--quantization", draft.quantization_json),
        digest=_quantizing_digest(draft.source, draft.quantization, draft.calibration_digest, tools),
        output=output,
    )


def _corpus_step(corpus: CorpusFile, source: Source, model: Path, output: Path, python: str) -> Step:
    argv = (python, "-m", "trtspec.embedded.drafters.corpus", "--tokenizer", str(model))
    sizes = ("--min-ngram", str(corpus.min_ngram), "--min-count", str(corpus.min_count))
    return Step(
        name="corpus",
        what=f"sort the texts of {corpus.path} for look-up, to {output}",
        argv=(*argv, "--data", str(corpus.path), "--out", str(output), *sizes),
        digest=json_digest(
            {
                "step": "corpus",
                "data": corpus.sha256,
                "suffix": corpus.path.suffix,
                "tokenizer": [_sha256(source, name) for name in _TOKENIZER_FILES],
                "sizes": sizes,
            }
        ),
        output=output,
    )


def _render_step(rendered: Mapping[str, str], output: Path) -> Step:
    return Step(
        name="render",
        what=f"write TensorRT-LLM's options and Triton repository ({len(rendered)} files) to {output}",
        argv=(),
        digest=json_digest({"step": "render", "files": dict(rendered)}),
        output=output,
    )


def _quantizing_digest(
    source: Source, quantization: Quantization, calibration_digest: str | None, tools: Mapping[str, str]
) -> str:
    return json_digest(
        {
            "step": "quantize",
            "source": source.digest,
            "quantization": quantization.model_dump(mode="json", exclude_defaults=True),
            "calibration": calibration_digest,
            "tools": {name: tools.get(name, "") for name in _QUANTIZING_TOOLS},
        }
    )


def describe_quantization(quantization: Quantization) -> str:
    """``w4a16_awq (groups of 64), KV cache fp8``"""
    weights: str = "16-bit weights" if isinstance(quantization, NoQuantization) else quantization.kind
    if (group_size := getattr(quantization, "group_size", None)) is not None:
        weights += f" (groups of {group_size})"
    kv = "16-bit KV cache" if quantization.kv_cache == "none" else f"KV cache {quantization.kv_cache}"
    return f"{weights}, {kv}"


def make_plan(
    recipe_path: Path,
    engines_dir: Path = ENGINES_DIR,
    *,
    version: str | None = None,
    say: Say = lambda line: None,
) -> Plan:
    """Read the recipe, find and hash its source, and list the steps. Writes nothing.

    ``version``: TensorRT-LLM's, for GPU backends; None: the newest release that the recipe admits.
    Source files whose size, time and inode equal those of the engine built before are not read again.
    Raises InputError for a recipe or checkpoint that cannot be built, MissingError for what is not here.
    """
    checked = lint(recipe_path, model=True)  # its errors have lines; what counts is the bytes that are sealed
    if checked.errors:
        raise InputError(checked.errors)
    recipe_bytes = recipe_path.read_bytes()
    recipe = parse_recipe(recipe_bytes, str(recipe_path))
    refuse_unsupported(recipe, recipe_path)
    rendered = engine_files(engine_plan(recipe_path, version)) if is_for_gpu(recipe) else None
    base = recipe_path.resolve().parent
    source_dir = resolve_model(recipe.model.source, base, recipe.model.revision)
    if checked.notes:  # the model was not here before
        load_recipe(recipe_path, model=True)
    if engines_dir.exists() and not engines_dir.is_dir():
        raise InputError(Problem("is not a folder; choose another --engines-dir", file=str(engines_dir)))
    folder = engines_dir / recipe.name
    work = engines_dir / f".{recipe.name}.building"
    known = _known_source(folder, work)
    # A source that was built from before, and has not been touched since, was checked then.
    seen = known is not None and artifact.is_unchanged(source_dir, model_files(source_dir), known)
    if not seen and (problems := check_model_folder(source_dir).problems):
        raise InputError(problems)
    source = _hashed(source_dir, known, say)
    draft = _draft_model(recipe, base, source_dir, source, folder, say)
    heads = _trained_heads(recipe, base, source_dir, say)
    corpus = _corpus_file(recipe, base)
    quantization, calibration_digest = _resolve_calibration(recipe.quantization, base, "quantization")
    tools = artifact.tool_versions()
    steps = plan_for(
        recipe,
        source=source,
        calibration_digest=calibration_digest,
        quantization_json=quantization,
        tools=tools,
        work=work,
        draft=draft,
        heads=heads,
        corpus=corpus,
        rendered=rendered,
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
        draft=draft,
        heads=heads,
        corpus=corpus,
        rendered=rendered,
    )


def _corpus_file(recipe: Recipe, base: Path) -> CorpusFile | None:
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


def _trained_heads(recipe: Recipe, base: Path, target_dir: Path, say: Say) -> TrainedHeads | None:
    """The recipe's trained heads, found, held against the target and hashed."""
    speculation = recipe.speculation
    if not isinstance(speculation, MedusaSpeculation | EagleSpeculation | Eagle3Speculation):
        return None
    from trtspec.embedded.heads import head_files
    from trtspec.embedded.heads_opening import heads_problems

    folder = resolve_model(speculation.heads, base)
    if is_for_gpu(recipe):
        weights = inspect_draft_weights(folder, speculation.kind, read_modelspec(target_dir)).file
        return TrainedHeads(folder, _hashed_files(folder, [folder / "config.json", weights], None, say))
    if problems := heads_problems(speculation, folder, read_modelspec(target_dir)):
        raise InputError(problems)
    licences = [path for path in model_files(folder) if path.name.upper().startswith(_LICENCE_NAMES)]
    return TrainedHeads(folder, _hashed_files(folder, [*head_files(folder), *licences], None, say))


def _hashed(folder: Path, known: Source | None, say: Say) -> Source:
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


def _draft_model(
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
    source = _hashed(folder, known, say)
    if any(_sha256(source, name) != _sha256(target, name) for name in _TOKENIZER_FILES):
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
    as_json, digest = _resolve_calibration(quantization, base, "speculation.quantization")
    return DraftModel(folder, source, quantization, as_json, digest)


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def _sha256(source: Source, name: str) -> str | None:
    return source.files[name].sha256 if name in source.files else None


def _known_source(folder: Path, work: Path) -> Source | None:
    """Hashes of source files from the sealed engine or from an interrupted build."""
    with contextlib.suppress(TrtspecError, OSError):
        return artifact.read_manifest(folder).source
    with contextlib.suppress(OSError, ValueError):
        return Source.model_validate_json((work / STEPS_DIR / SOURCE_RECORD).read_bytes())
    return None


def _resolve_calibration(quantization: Quantization, base: Path, key: str) -> tuple[str, str | None]:
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

"""What a build is going to do: a list of steps, each with its command and the digest of its inputs.

:func:`plan_for` is pure; :func:`make_plan` finds and hashes what it needs. Doing it is
:mod:`trtspec.build`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtspec import artifact
from trtspec.artifact import (
    BASELINE_DIR,
    BUILT_DIR,
    CORPUS_DIR,
    DRAFT_DIR,
    HEADS_DIR,
    TARGET_DIR,
    TRTLLM_DIR,
    Source,
    json_digest,
)
from trtspec.errors import InputError, Problem, TrtspecError
from trtspec.model_check import check_model_folder
from trtspec.model_source import resolve_model
from trtspec.plan_inputs import (
    TOKENIZER_FILES,
    CorpusFile,
    DraftModel,
    Say,
    TrainedHeads,
    file_digest,
    find_corpus,
    find_draft,
    find_heads,
    hashed,
    model_files,
    resolve_calibration,
)
from trtspec.recipe import (
    NoQuantization,
    Quantization,
    Recipe,
    TensorrtBackend,
)
from trtspec.recipe_facts import is_for_gpu, is_quantized
from trtspec.recipe_file import lint, load_recipe, parse_recipe

if TYPE_CHECKING:
    from trtspec.gpu_plan import EngineBuild

ENGINES_DIR = Path("engines")
STEPS_DIR = ".steps"
"""Records of finished steps, in the work folder."""
SOURCE_RECORD = "source.json"
ENGINE_SCRIPT = ".build.sh"
"""The script that builds a tensorrt recipe's engine, in the work folder and then in the engine."""
LOG_FILE = ".build.log"
"""What the steps' tools said, in the work folder and then in the engine."""

# The tools whose version is part of the quantized weights' identity.
_QUANTIZING_TOOLS = ("trtspec", "torch", "modelopt", "transformers")


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
    draft: DraftModel | None = None
    heads: TrainedHeads | None = None
    corpus: CorpusFile | None = None
    rendered: Mapping[str, str] | None = None
    """For GPU backends: the texts of the engine's folder trtllm, by their paths in it."""
    engine: EngineBuild | None = None
    """For the backend tensorrt: how trtllm-build makes the engine."""

    @property
    def target(self) -> str:
        quantized_here = self.engine is None and is_quantized(self.recipe.quantization)
        return TARGET_DIR if quantized_here else BASELINE_DIR

    @property
    def imports(self) -> dict[str, tuple[Path, Source]]:
        """Of each step that links a checkpoint into the engine: that checkpoint."""
        found = {"import": (self.source_dir, self.source)}
        if self.draft is not None and not is_quantized(self.draft.quantization):
            found["import-draft"] = (self.draft.folder, self.draft.source)
        if self.heads is not None:
            found["import-heads"] = (self.heads.folder, self.heads.source)
        return found


def refuse_unsupported(recipe: Recipe, file: Path = Path("RECIPE")) -> None:
    """Raise MissingError for what this machine cannot build of a recipe for a GPU. What no version can run,
    the recipe's rules have refused before."""
    if is_for_gpu(recipe):
        from trtspec.gpu_plan import refuse_building  # TensorRT-LLM's tables cost time that others need not

        refuse_building(recipe, file)


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
    engine: EngineBuild | None = None,
    python: str = sys.executable,
) -> tuple[Step, ...]:
    """The steps that build ``recipe`` in the folder ``work``. Pure: reads and writes nothing.

    ``quantization_json`` is the recipe's ``quantization`` with file names made absolute.
    """
    baseline = checked = work / BASELINE_DIR
    steps = [_import_step("import", source, baseline)]
    if is_quantized(recipe.quantization) and engine is None:
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
    if engine is not None:
        inputs = (source, draft.source if draft else None, heads.source if heads else None)
        steps.append(
            _engine_step(engine, [found.digest for found in inputs if found], calibration_digest, work)
        )
        draft = heads = None  # they are in the engine
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
                "tokenizer": [file_digest(source, name) for name in TOKENIZER_FILES],
                "sizes": sizes,
            }
        ),
        output=output,
    )


def _engine_step(
    engine: EngineBuild, inputs: Sequence[str], calibration_digest: str | None, work: Path
) -> Step:
    """The script that a dry run prints, run here: convert or quantize, ``trtllm-build``, read back."""
    built = work / BUILT_DIR
    folders = {**engine.folders, "WORK_DIR": str(built), "CALIB_DATASET": str(built / "texts")}
    variables = [f"{name}={folder}" for name, folder in folders.items()]
    return Step(
        name="engine",
        what=f"run {ENGINE_SCRIPT} with TensorRT-LLM {engine.version}, to {built}",
        argv=("env", *variables, "bash", str(work / ENGINE_SCRIPT)),
        digest=json_digest(
            {"step": "engine", "script": engine.script, "of": list(inputs), "texts": calibration_digest}
        ),
        output=built,
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
    rendered = None
    if is_for_gpu(recipe):
        from trtspec.gpu_plan import engine_files, engine_plan

        rendered = engine_files(engine_plan(recipe_path, version))
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
    source = hashed(source_dir, known, say)
    draft = find_draft(recipe, base, source_dir, source, folder, say)
    heads = find_heads(recipe, base, source_dir, source, say)
    corpus = find_corpus(recipe, base)
    quantization, calibration_digest = resolve_calibration(recipe.quantization, base, "quantization")
    tools = artifact.tool_versions()
    engine = None
    if isinstance(recipe.backend, TensorrtBackend):
        from trtspec.gpu_plan import engine_build

        folders = {"MODEL_DIR": (work / BASELINE_DIR).resolve()}
        folders |= {"DRAFT_DIR": draft.folder} if draft else {}
        folders |= {"HEADS_DIR": heads.folder} if heads else {}
        engine = engine_build(recipe_path, version, folders)
        tools["tensorrt_llm"] = engine.version
        calibration_digest = calibration_digest or (draft.calibration_digest if draft else None)
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
        engine=engine,
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
        engine=engine,
    )


def _known_source(folder: Path, work: Path) -> Source | None:
    """Hashes of source files from the sealed engine or from an interrupted build."""
    with contextlib.suppress(TrtspecError, OSError):
        return artifact.read_manifest(folder).source
    with contextlib.suppress(OSError, ValueError):
        return Source.model_validate_json((work / STEPS_DIR / SOURCE_RECORD).read_bytes())
    return None

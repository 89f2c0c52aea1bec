"""A second engine, OTHER, beside the one that is verified, ENGINE: what they share decides what is asked.

Two questions stay apart:

* the same quantized target in the same arithmetic: only drafting differs, a question of *speculation*. Do
  both give the answers of these weights without drafts, whose drafts are accepted, which is faster?
* the same checkpoint in another format, KV cache or arithmetic: a question of *quality*. What does one lose
  against the other, for which speed? Whether speculation is lossless is then asked of ENGINE alone, against
  its own weights.

Another checkpoint or tokenizer has no tokens to compare and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from trtspec.artifact import REPORT_FILE, Artifact, json_digest
from trtspec.errors import InputError, Problem
from trtspec.recipe import Gates, NoSpeculation, Recipe
from trtspec.recipe_facts import fidelity, is_for_gpu
from trtspec.user_files import shown_path
from trtspec.verify.report import Report
from trtspec.verify.settings import Settings

Question = Literal["speculation", "quality"]
_KEY = "--baseline"
_QUALITY_GATES = (
    "max_perplexity_ratio", "max_mean_kl", "max_p99_kl", "min_same_top_token", "max_task_loss",
    "max_retrieval_loss",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """OTHER, and what is asked of the two. ``other`` is as it was sealed; ``running`` with the threads, the
    device and the gates of ENGINE, so that a difference in speed has one cause."""

    other: Artifact
    running: Artifact
    question: Question
    differs: str
    """What the targets differ in, or that they do not."""
    engine_digest: str
    """:func:`target_digest` of ENGINE."""

    @property
    def drafts(self) -> bool:
        """Whether OTHER speculates."""
        return not isinstance(self.other.recipe.speculation, NoSpeculation)

    def record(self) -> dict[str, Any]:
        """What a report keeps of OTHER, as JSON values."""
        other = self.other
        return {
            "engine": str(other.folder),
            "recipe_name": other.recipe.name,
            "recipe_digest": other.manifest.recipe_digest,
            "recipe": other.recipe.model_dump(mode="json"),
            "built_with": dict(other.manifest.tools),
            "fidelity": fidelity(other.recipe),
            "question": self.question,
            "target_digest": target_digest(other),
            "engine_target_digest": self.engine_digest,
        }

    def notes(self) -> list[str]:
        """What a reader must know of the comparison."""
        other = self.other
        notes = [
            f"OTHER is {other.folder} (recipe {other.recipe.name}, {other.manifest.recipe_digest[:12]}); "
            "vs_other.* hold ENGINE against OTHER, other.* are OTHER's own"
        ]
        if self.question == "speculation":
            notes.append(
                f"a question of speculation: {self.differs}; losslessness is demanded of both, and "
                "gates.min_speedup_over_baseline is over OTHER; quality is the target's and not asked: "
                "trtspec verify without --baseline holds it against the 16-bit baseline"
            )
        else:
            notes.append(
                f"a question of quality: {self.differs}; the gates of quality and "
                "gates.min_speedup_over_baseline refer to OTHER, not to the 16-bit baseline; losslessness is "
                "asked of ENGINE, against its own weights without drafts (OTHER's: trtspec verify OTHER)"
            )
        if self.running.recipe.backend != other.recipe.backend:
            notes.append("OTHER ran with ENGINE's threads and device, not with those of its recipe")
        return notes


def pair_of(built: Artifact, other: Artifact, settings: Settings) -> Pair:
    """Which question the two can answer. Raises InputError where they answer none, or not what ``settings``
    ask for."""
    place = shown_path(other.folder)

    def refused(message: str) -> InputError:
        return InputError(Problem(message, file=place, key=_KEY))

    if built.folder.resolve() == other.folder.resolve():
        raise refused("is ENGINE itself; name another engine of the same model")
    for one in (built, other):
        if is_for_gpu(one.recipe):
            raise refused(
                f"{shown_path(one.folder)} is an engine of TensorRT-LLM, one of which fills the GPU, so the "
                "two cannot run in turn; serve both and give --url and --baseline-url"
            )
    digests = [one.manifest.source.digest for one in (other, built)]
    if digests[0] != digests[1]:
        raise refused(
            f"is built from another checkpoint (source digest {digests[0][:12]}, ENGINE's "
            f"{digests[1][:12]}); name an engine of the same model"
        )
    tokenizers = [_file(one, "tokenizer.json") for one in (other, built)]
    if tokenizers[0] != tokenizers[1]:
        raise refused("has another tokenizer.json than ENGINE, so their tokens cannot be compared")
    differs = _difference(built, other)
    if differs:
        return Pair(other, _as_run(built, other), "quality", differs, target_digest(built))
    both = [one.recipe.speculation for one in (built, other)]
    if all(isinstance(one, NoSpeculation) for one in both):
        raise refused(
            "holds the same target as ENGINE, and neither speculates: there is nothing to compare; name an "
            "engine with drafts or of another quantization"
        )
    asked = {
        "--tasks": settings.tasks,
        "--lm-eval": settings.lm_eval,
        "--retrieval": settings.retrieval,
    }
    if given := [name for name, value in asked.items() if value]:
        raise refused(
            f"holds the same quantized target as ENGINE, so {', '.join(given)} would compare it with itself; "
            "leave that out, or name an engine of another quantization"
        )
    digest = target_digest(built)
    return Pair(
        other,
        _as_run(built, other),
        "speculation",
        f"both hold the same target (digest {digest[:12]}) in {built.recipe.backend.dtype}",
        digest,
    )


def question_of(report: Report) -> Question:
    """The question that what a report says of its two engines makes theirs."""
    other = report.other
    dtypes = {recipe.get("backend", {}).get("dtype") for recipe in (report.recipe, other.get("recipe", {}))}
    same = other.get("engine_target_digest") == other.get("target_digest") and len(dtypes) == 1
    return "speculation" if same else "quality"


def target_digest(built: Artifact) -> str:
    """sha256 over what the engine loads as its target: weights, config and tokenizer, and the KV format."""
    return json_digest({"files": _target_files(built), "kv_cache": built.recipe.quantization.kv_cache})


def asked_gates(gates: Gates, question: Question) -> Gates:
    """The gates without those that the question leaves open."""
    return gates if question == "quality" else gates.model_copy(update=dict.fromkeys(_QUALITY_GATES))


def _target_files(built: Artifact) -> dict[str, str]:
    """Name -> sha256; without reports and logs, which tell the hour."""
    prefix = f"{built.manifest.target}/"
    return {
        name.removeprefix(prefix): record.sha256
        for name, record in built.manifest.files.items()
        if name.startswith(prefix)
        and name.endswith((".json", ".safetensors"))
        and not name.endswith(f"/{REPORT_FILE}")
    }


def _file(built: Artifact, name: str) -> str | None:
    return _target_files(built).get(name)


def _difference(built: Artifact, other: Artifact) -> str:
    """What makes ENGINE's target another than OTHER's; "" where it is the same."""
    found = []
    if target_digest(built) != target_digest(other):
        mine, theirs = (_format(one.recipe) for one in (built, other))
        found.append(
            f"ENGINE holds {mine}, OTHER {theirs}"
            if mine != theirs
            else f"both hold {mine}, in files that differ"
        )
    dtypes = [one.recipe.backend.dtype for one in (built, other)]
    if dtypes[0] != dtypes[1]:
        found.append(f"ENGINE computes in {dtypes[0]}, OTHER in {dtypes[1]}")
    return ", and ".join(found)


def _format(recipe: Recipe) -> str:
    kind, cache = recipe.quantization.kind, recipe.quantization.kv_cache
    weights = "16-bit weights" if kind == "none" else f"{kind} weights"
    return weights if cache == "none" else f"{weights} with an {cache} KV cache"


def _as_run(built: Artifact, other: Artifact) -> Artifact:
    backend = other.recipe.backend.model_copy(
        update={key: getattr(built.recipe.backend, key) for key in ("threads", "device")}
    )
    changes = {"backend": backend, "gates": built.recipe.gates}
    return replace(other, recipe=other.recipe.model_copy(update=changes))

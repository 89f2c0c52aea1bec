"""Which backend runs an engine: the one match statement over ``backend.kind``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ValidationError

from trtspec.artifact import RECIPE_FILE, Artifact
from trtspec.engine import Engine
from trtspec.errors import InputError, MissingError, Problem
from trtspec.recipe import (
    EmbeddedBackend,
    ExactAcceptance,
    NoQuantization,
    NoSpeculation,
    PytorchBackend,
    Recipe,
    TensorrtBackend,
)
from trtspec.user_files import shown_path

Variant = Literal["recipe", "no_speculation", "baseline"]


def variant_recipe(recipe: Recipe, variant: Variant) -> Recipe:
    """The recipe a variant runs.

    ``recipe``: as built. ``no_speculation``: the same weights and KV cache, one token a step.
    ``baseline``: 16-bit weights and KV cache, one token a step. Everything else (dtype, limits, pages)
    stays, so that a difference between two variants has one cause.
    """
    if variant == "recipe":
        return recipe
    changes: dict[str, Any] = {
        "speculation": NoSpeculation(kind="none"),
        "acceptance": ExactAcceptance(kind="exact"),
    }
    if variant == "baseline":
        changes["quantization"] = NoQuantization(kind="none")
    return recipe.model_copy(update=changes)


def open_engine(artifact: Artifact, variant: Variant = "recipe", **overrides: Any) -> Engine:
    """Load a variant of a built engine (see :func:`variant_recipe`).

    ``overrides`` replace keys of the recipe's backend (``dtype="float64"``, ``threads=1`` ...). Raises
    MissingError when this machine or this trtspec cannot run the backend, InputError on bad overrides.
    """
    recipe = variant_recipe(artifact.recipe, variant)
    backend = recipe.backend
    match backend:
        case EmbeddedBackend():
            if overrides:
                recipe = recipe.model_copy(update={"backend": _override(backend, overrides)})
            folder = artifact.baseline_dir if variant == "baseline" else artifact.target_dir
            from trtspec.embedded.opening import open_embedded

            return open_embedded(
                recipe,
                folder,
                speculation=variant == "recipe",
                draft_dir=artifact.draft_dir,
                heads_dir=artifact.heads_dir,
                corpus_dir=artifact.corpus_dir,
            )
        case TensorrtBackend() | PytorchBackend():
            if overrides:
                given = ", ".join(f"{name}={value}" for name, value in overrides.items())
                raise MissingError(f"backend.kind: {backend.kind}: an engine of TensorRT-LLM has no {given}")
            from trtspec.trtllm import opening

            try:
                opening.installed()
            except MissingError as error:
                raise MissingError(f"{gpu_backend_message(backend.kind)} ({error})") from None
            return opening.open_llm(artifact, recipe)


def _override(backend: EmbeddedBackend, overrides: dict[str, Any]) -> EmbeddedBackend:
    try:
        return EmbeddedBackend.model_validate({**backend.model_dump(), **overrides})
    except ValidationError as error:
        raise InputError(
            [Problem(item["msg"], key=".".join(str(part) for part in item["loc"])) for item in error.errors()]
        ) from None


def require_embedded(artifact: Artifact) -> None:
    """InputError for an engine of TensorRT-LLM: it tells too little of its steps to be measured by them."""
    kind = artifact.recipe.backend.kind
    if kind != "embedded":
        message = (
            f"found {kind}; bench measures engines of the embedded backend; trtspec migrate --to embedded "
            "makes such a recipe, and trtspec verify measures this engine where TensorRT-LLM is"
        )
        raise InputError(Problem(message, file=shown_path(artifact.folder / RECIPE_FILE), key="backend.kind"))


def gpu_backend_message(kind: str) -> str:
    """What this machine lacks to run an engine of a GPU backend."""
    return (
        f"backend.kind: {kind}: running this engine needs TensorRT-LLM and an NVIDIA GPU, and they are not "
        "here; trtspec inspect ENGINE says how its files are served in NVIDIA's container, and a recipe with "
        "backend.kind: embedded is served and verified on this machine"
    )

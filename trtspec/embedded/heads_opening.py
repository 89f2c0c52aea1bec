"""From a recipe that drafts with trained heads, and their folder, to the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch

from trtspec.embedded.drafters import Drafter
from trtspec.embedded.drafters.eagle import EagleHead
from trtspec.embedded.drafters.eagle3 import Eagle3Head
from trtspec.embedded.drafters.feature_drafter import FeatureDrafter
from trtspec.embedded.drafters.medusa import MedusaDrafter
from trtspec.embedded.drafters.trees import (
    DynamicTree,
    StaticTree,
    chain_tree,
    default_choices,
    static_tree,
)
from trtspec.embedded.eagle_heads import load_eagle
from trtspec.embedded.heads import inspect_heads, load_medusa
from trtspec.embedded.kvstore import kv_bytes_per_slot
from trtspec.embedded.model import Decoder
from trtspec.errors import InputError, Problem
from trtspec.modelspec import ModelSpec
from trtspec.recipe import (
    Eagle3Speculation,
    EagleSpeculation,
    EmbeddedBackend,
    MedusaSpeculation,
    Recipe,
    RejectionAcceptance,
)

HeadsSpeculation: TypeAlias = MedusaSpeculation | EagleSpeculation | Eagle3Speculation


def heads_problems(speculation: HeadsSpeculation, folder: Path, target: ModelSpec) -> list[Problem]:
    """Why the heads in ``folder`` cannot draft for ``target`` as the recipe says; [] if they can.

    Reads no weights but the draft vocabulary and what is pickled.
    """
    problems: list[Problem] = []
    if speculation.quantization != "none":
        message = (
            f"{speculation.quantization}: the embedded engine runs trained heads in the backend's dtype only "
            "so far; write none"
        )
        problems.append(Problem(message, key="speculation.quantization"))
    size = inspect_heads(folder, speculation.kind, target, problems)
    if size is not None and isinstance(speculation, MedusaSpeculation) and speculation.choices is not None:
        try:
            static_tree(speculation.choices, size.num_heads, target.vocab_size)
        except InputError as error:
            problems += error.problems
    return problems


def checked_heads(speculation: HeadsSpeculation, folder: Path | None, target: ModelSpec) -> Path:
    """``folder`` if its heads fit; InputError with everything that does not."""
    if folder is None:
        found = "the engine holds no trained heads (folder heads); build it again"
        raise InputError(Problem(found, key="speculation.heads"))
    problems = heads_problems(speculation, folder, target)
    if problems:
        raise InputError(problems)
    return folder


def heads_memory(
    speculation: HeadsSpeculation, folder: Path, target: ModelSpec, dtype: torch.dtype
) -> tuple[int, int]:
    """(bytes of the heads' weights, bytes that a KV slot takes more) for heads that fit."""
    size = inspect_heads(folder, speculation.kind, target, [])
    assert size is not None
    if size.layer is None:
        return size.num_values * dtype.itemsize, 0
    slot = kv_bytes_per_slot(size.layer, dtype, "none") + size.layer.hidden_size * dtype.itemsize
    return size.num_values * dtype.itemsize, slot


def heads_drafter(
    recipe: Recipe, speculation: HeadsSpeculation, target: Decoder, num_pages: int, folder: Path
) -> Drafter:
    """The drafter over the heads in ``folder``, which :func:`checked_heads` found to fit ``target``.

    ``num_pages`` of the target's KV cache: the features get as many, and one more for each sequence.
    """
    backend = recipe.backend
    assert isinstance(backend, EmbeddedBackend)
    if isinstance(speculation, MedusaSpeculation):
        heads = load_medusa(folder, target)
        choices = speculation.choices or default_choices(len(heads.heads))
        return MedusaDrafter(heads, target, static_tree(choices, len(heads.heads), target.spec.vocab_size))
    head: EagleHead
    if isinstance(speculation, EagleSpeculation):
        head = EagleHead(load_eagle(folder, "eagle", target))
    else:
        head = Eagle3Head(load_eagle(folder, "eagle3", target))
    shape = tree_shape(speculation)
    batch = recipe.limits.max_batch_size
    return FeatureDrafter(
        head,
        shape,
        num_pages=num_pages + batch,
        page_tokens=backend.page_tokens,
        max_batch_size=batch,
        prefix_cache=backend.prefix_cache,
        samples=isinstance(recipe.acceptance, RejectionAcceptance) and isinstance(shape, StaticTree),
    )


def tree_shape(speculation: EagleSpeculation | Eagle3Speculation) -> StaticTree | DynamicTree:
    """The recipe's tree: static from ``choices``, a chain for ``top_k`` 1, else dynamic."""
    nodes, top_k = speculation.num_draft_tokens, speculation.top_k
    depth = nodes if speculation.depth is None else speculation.depth
    if isinstance(speculation, EagleSpeculation) and speculation.choices is not None:
        return static_tree(speculation.choices, depth)
    if top_k == 1:
        return chain_tree(min(nodes, depth))
    return DynamicTree(top_k, depth, nodes)

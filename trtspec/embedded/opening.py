"""From a recipe and an engine's folders to a running :class:`EmbeddedEngine`.

:func:`_drafter` is the one match statement over the ways of drafting.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from trtspec.embedded.acceptance import exact, rejection, typical
from trtspec.embedded.drafters import Drafter
from trtspec.embedded.drafters.adaptive import AdaptiveDrafter
from trtspec.embedded.drafters.corpus import Corpus
from trtspec.embedded.drafters.draft_model import DraftModelDrafter
from trtspec.embedded.drafters.lookahead import LookaheadDrafter
from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.engine import Accept, EmbeddedEngine
from trtspec.embedded.heads_opening import HeadsSpeculation, checked_heads, heads_drafter, heads_memory
from trtspec.embedded.kvstore import KvStore, kv_bytes_per_slot
from trtspec.embedded.machine import (
    check_memory,
    default_threads,
    estimated_weight_bytes,
    keep_freed_memory,
    num_kv_pages,
    torch_device,
)
from trtspec.embedded.model import Decoder
from trtspec.embedded.weights import load_model
from trtspec.errors import InputError, Problem
from trtspec.modelspec import read_modelspec
from trtspec.recipe import (
    Acceptance,
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    EmbeddedBackend,
    ExactAcceptance,
    Limits,
    LookaheadSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    NoSpeculation,
    Recipe,
    RejectionAcceptance,
    TypicalAcceptance,
)
from trtspec.text import Tokenizer, same_tokenizer


def open_embedded(
    recipe: Recipe,
    target_dir: Path,
    *,
    speculation: bool = True,
    draft_dir: Path | None = None,
    heads_dir: Path | None = None,
    corpus_dir: Path | None = None,
) -> EmbeddedEngine:
    """Load the target in ``target_dir`` and make the engine that ``recipe`` describes.

    ``draft_dir``, ``heads_dir`` and ``corpus_dir`` hold the draft model, the trained heads and the corpus
    store of a recipe that drafts with them. ``speculation`` False drafts nothing, whatever the recipe says.
    Sets torch's thread count and, with glibc, malloc's thresholds for the process. Raises InputError for what
    this backend cannot run and for a bad folder, MissingError when the machine lacks the device or the
    memory.
    """
    backend = recipe.backend
    if not isinstance(backend, EmbeddedBackend):
        raise InputError(
            Problem(
                f"{backend.kind} is not run by the embedded engine; allowed: embedded", key="backend.kind"
            )
        )
    accept = _acceptance(recipe.acceptance)
    device = torch_device(backend.device)
    dtype = getattr(torch, backend.dtype)
    torch.set_num_threads(backend.threads or default_threads())
    spec = read_modelspec(target_dir)
    limits, kv_format = recipe.limits, recipe.quantization.kv_cache
    problems = []
    if limits.max_seq_tokens > spec.max_positions:
        found = f"{limits.max_seq_tokens} exceeds the model's {spec.max_positions} positions; lower it"
        problems.append(Problem(found, key="limits.max_seq_tokens"))
    if kv_format == "nvfp4":
        found = "nvfp4 is not run by the embedded backend; use none, fp8 or int8"
        problems.append(Problem(found, key="quantization.kv_cache"))
    if problems or kv_format == "nvfp4":  # the second half is for the type checker
        raise InputError(problems)
    page_bytes = kv_bytes_per_slot(spec, dtype, kv_format) * backend.page_tokens
    num_pages = num_kv_pages(limits, backend.page_tokens, page_bytes)
    weight_bytes = estimated_weight_bytes(target_dir, dtype, backend.dequantized_copy)
    if speculation and isinstance(recipe.speculation, DraftModelSpeculation):
        draft_dir = _checked_draft(recipe.speculation, target_dir, draft_dir, limits)
        page_bytes += _draft_slot_bytes(recipe.speculation, draft_dir, dtype) * backend.page_tokens
        weight_bytes += estimated_weight_bytes(draft_dir, dtype, backend.dequantized_copy)
    if speculation and isinstance(recipe.speculation, HeadsSpeculation):
        heads_dir = checked_heads(recipe.speculation, heads_dir, spec)
        heads_bytes, slot_bytes = heads_memory(recipe.speculation, heads_dir, spec, dtype)
        page_bytes += slot_bytes * backend.page_tokens
        weight_bytes += heads_bytes
    check_memory(num_pages * page_bytes, weight_bytes, limits, device)
    model = load_model(
        target_dir,
        spec,
        dtype=dtype,
        device=device,
        batch_invariant=backend.batch_invariant,
        dequantized_copy=backend.dequantized_copy,
    )
    if device.type == "cpu":
        keep_freed_memory()  # after loading, whose large blocks are better given back
    new_store = partial(
        KvStore, spec, dtype=dtype, kv_format=kv_format, scales=model.kv_scales, device=device
    )
    return EmbeddedEngine(
        model,
        new_store,
        num_pages=num_pages,
        page_tokens=backend.page_tokens,
        prefix_cache=backend.prefix_cache,
        limits=limits,
        drafter=_drafter(recipe, model, num_pages, draft_dir, heads_dir, corpus_dir) if speculation else None,
        max_concurrency=getattr(recipe.speculation, "max_concurrency", None),
        accept=accept,
    )


def _drafter(
    recipe: Recipe,
    target: Decoder,
    num_pages: int,
    draft_dir: Path | None,
    heads_dir: Path | None,
    corpus_dir: Path | None,
) -> Drafter | None:
    """What drafts for ``target``, which is loaded: its device and dtype are the drafter's.

    ``num_pages`` of the target's KV cache; a drafter with one of its own gets as many.
    """
    speculation = recipe.speculation
    drafter: Drafter
    windows: LookaheadDrafter | None = None
    costly = True
    match speculation:
        case NoSpeculation():
            return None
        case NgramSpeculation(num_draft_tokens=most, min_ngram=shortest, max_ngram=longest):
            corpus = _corpus(speculation, corpus_dir)
            drafter = NgramDrafter(most, shortest, longest, branches=speculation.branches, corpus=corpus)
            costly = False
        case LookaheadSpeculation(window=window, ngram=ngram, verification_set=guesses):
            drafter = windows = LookaheadDrafter(window, ngram, guesses)
            costly = False
        case DraftModelSpeculation():
            drafter = _draft_model(recipe, speculation, target, num_pages, draft_dir)
        case MedusaSpeculation() | EagleSpeculation() | Eagle3Speculation():
            assert heads_dir is not None
            drafter = heads_drafter(recipe, speculation, target, num_pages, heads_dir)
    if not speculation.adaptive:
        return drafter
    return AdaptiveDrafter(drafter, costly=costly, windows=windows)


def _corpus(speculation: NgramSpeculation, corpus_dir: Path | None) -> Corpus | None:
    if speculation.corpus is None:
        return None
    if corpus_dir is None:
        found = "the engine holds no corpus store (folder corpus); build it again"
        raise InputError(Problem(found, key="speculation.corpus"))
    return Corpus.open(corpus_dir)


def _checked_draft(
    speculation: DraftModelSpeculation, target_dir: Path, draft_dir: Path | None, limits: Limits
) -> Path:
    """The folder of a draft model that fits the target; InputError with everything that does not."""
    if draft_dir is None:
        found = "the engine holds no draft model (folder draft); build it again"
        raise InputError(Problem(found, key="speculation.model"))
    spec = read_modelspec(draft_dir)
    problems = [
        Problem(
            f"{found}; a draft needs the target's tokenizer", file=str(draft_dir), key="speculation.model"
        )
        for found in same_tokenizer(Tokenizer.load(target_dir), Tokenizer.load(draft_dir))
    ]
    if limits.max_seq_tokens > spec.max_positions:
        found = f"{limits.max_seq_tokens} exceeds the draft model's {spec.max_positions} positions; lower it"
        problems.append(Problem(found, key="limits.max_seq_tokens"))
    if speculation.quantization.kv_cache == "nvfp4":
        found = "nvfp4 is not run by the embedded backend; use none, fp8 or int8"
        problems.append(Problem(found, key="speculation.quantization.kv_cache"))
    if problems:
        raise InputError(problems)
    return draft_dir


def _draft_slot_bytes(speculation: DraftModelSpeculation, draft_dir: Path, dtype: torch.dtype) -> int:
    kv_format = speculation.quantization.kv_cache
    assert kv_format != "nvfp4"
    return kv_bytes_per_slot(read_modelspec(draft_dir), dtype, kv_format)


def _draft_model(
    recipe: Recipe,
    speculation: DraftModelSpeculation,
    target: Decoder,
    num_pages: int,
    draft_dir: Path | None,
) -> DraftModelDrafter:
    """The drafter over the model in ``draft_dir``, which :func:`_checked_draft` found to fit."""
    kv_format = speculation.quantization.kv_cache
    assert draft_dir is not None
    assert isinstance(recipe.backend, EmbeddedBackend)
    assert kv_format != "nvfp4"
    spec = read_modelspec(draft_dir)
    model = load_model(
        draft_dir,
        spec,
        dtype=target.dtype,
        device=target.device,
        dequantized_copy=recipe.backend.dequantized_copy,
    )
    new_store = partial(
        KvStore,
        spec,
        dtype=target.dtype,
        kv_format=kv_format,
        scales=model.kv_scales,
        device=target.device,
    )
    return DraftModelDrafter(
        model,
        new_store,
        num_draft_tokens=speculation.num_draft_tokens,
        num_pages=num_pages,
        page_tokens=recipe.backend.page_tokens,
        max_rows=recipe.limits.max_num_tokens,
        vocab_size=target.spec.vocab_size,
        prefix_cache=recipe.backend.prefix_cache,
        sampled=isinstance(recipe.acceptance, RejectionAcceptance),
    )


def _acceptance(acceptance: Acceptance) -> Accept:
    match acceptance:
        case ExactAcceptance():
            return exact
        case RejectionAcceptance():
            return rejection
        case TypicalAcceptance():
            return partial(typical, epsilon=acceptance.epsilon, delta=acceptance.delta)

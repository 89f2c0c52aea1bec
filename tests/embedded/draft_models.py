"""Draft models for the tiny target: itself, itself with noise, and a stranger; and drafters over them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from reference import generate_plainly
from tiny import make_tiny_model
from tiny_engine import CPU, VOCAB, store_for, tiny_decoder

from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.draft_model import DraftModelDrafter
from trtspec.embedded.model import Decoder
from trtspec.embedded.tree import Draft
from trtspec.embedded.weights import load_model
from trtspec.engine import Request
from trtspec.modelspec import read_modelspec

Kind = Literal["itself", "noisy", "stranger"]


@functools.cache
def small_decoder(vocab: int, seed: int, layers: int = 1, hidden: int = 16) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(
            Path(folder),
            vocab=vocab,
            seed=seed,
            hidden=hidden,
            layers=layers,
            heads=2,
            kv_heads=1,
            tokenizer=False,
        )
        return load_model(Path(folder), read_modelspec(Path(folder)), dtype=torch.float64, device=CPU)


def with_embedding(model: Decoder, embedding: torch.Tensor) -> Decoder:
    return Decoder(
        model.spec,
        embedding=embedding,
        layers=model.layers,
        final_norm=model.final_norm,
        lm_head=model.lm_head,
    )


@functools.cache
def draft_decoder(kind: Kind) -> Decoder:
    target = tiny_decoder()
    if kind == "itself":
        return target
    if kind == "stranger":
        return small_decoder(VOCAB, 9)
    noise = torch.randn(
        target.embedding.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    return with_embedding(target, target.embedding + 0.3 * target.embedding.std() * noise)


def drafter_of(
    model: Decoder,
    *,
    kind: type[DraftModelDrafter] = DraftModelDrafter,
    length: int = 4,
    page_tokens: int = 4,
    kv_tokens: int = 1024,
    rows: int = 64,
    vocab: int = VOCAB,
    **options: Any,
) -> DraftModelDrafter:
    return kind(
        model,
        store_for(model),
        num_draft_tokens=length,
        num_pages=kv_tokens // page_tokens,
        page_tokens=page_tokens,
        max_rows=rows,
        vocab_size=vocab,
        **options,
    )


@functools.cache
def continuation(kind: Kind, tokens: tuple[int, ...], length: int) -> tuple[int, ...]:
    """What the draft model writes after ``tokens``, computed anew."""
    model = draft_decoder(kind)
    return generate_plainly(model, store_for(model), Request("x", tokens, length))


class Watched:
    """A drafter of which every draft must be the draft model's own continuation of the known tokens."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, drafter: DraftModelDrafter, kind: Kind) -> None:
        self.drafter, self.kind = drafter, kind
        self.num_drafts = 0

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        drafts = self.drafter.propose(sequences)
        self.drafter.check_integrity()
        for view, draft in zip(sequences, drafts, strict=True):
            assert len(draft) <= view.max_draft
            assert draft.is_chain
            if draft.tokens:
                self.num_drafts += 1
                assert draft.tokens == continuation(self.kind, tuple(view.tokens), len(draft)), view.id
        return drafts

    def observe(self, *arguments: Any) -> None:
        self.drafter.observe(*arguments)

    def release(self, sequence_id: str) -> None:
        self.drafter.release(sequence_id)
        self.drafter.check_integrity()

"""Engines over tiny random models in float64, a workload that repeats itself, and drafters for tests."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from reference import NewStore, generate_plainly
from tiny import Family, make_tiny_model

from trtspec.embedded.drafters import DraftView
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.tree import EMPTY_DRAFT, Draft, chain
from trtspec.embedded.weights import load_model
from trtspec.engine import Request, Sampling
from trtspec.modelspec import read_modelspec
from trtspec.recipe import Limits

CPU = torch.device("cpu")
VOCAB = 64


@functools.cache
def tiny_decoder(family: Family = "llama") -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(
            Path(folder), family, vocab=VOCAB, hidden=32, layers=2, heads=4, kv_heads=2, tokenizer=False
        )
        spec = read_modelspec(Path(folder))
        return load_model(Path(folder), spec, dtype=torch.float64, device=CPU)


def store_for(model: Decoder) -> NewStore:
    return functools.partial(
        KvStore, model.spec, dtype=model.dtype, kv_format="none", scales=None, device=model.device
    )


def tiny_engine(
    family: Family = "llama",
    *,
    page_tokens: int = 4,
    kv_tokens: int = 1024,
    batch: int = 8,
    rows: int = 64,
    engine: type[EmbeddedEngine] = EmbeddedEngine,
    **options: Any,
) -> EmbeddedEngine:
    model = tiny_decoder(family)
    limits = Limits(max_batch_size=batch, max_num_tokens=rows, max_input_tokens=128, max_seq_tokens=256)
    return engine(
        model,
        store_for(model),
        num_pages=kv_tokens // page_tokens,
        page_tokens=page_tokens,
        limits=limits,
        **options,
    )


@functools.cache
def expected(family: Family, request: Request) -> tuple[int, ...]:
    model = tiny_decoder(family)
    return generate_plainly(model, store_for(model), request)


GREEDY = Sampling()


def workload(sampling: Sampling = GREEDY, *, count: int = 8, new_tokens: int = 48) -> list[Request]:
    """Prompts that repeat a phrase, some alike at the start, of 1 to 60 tokens."""
    chance = random.Random(5)
    start = [chance.randrange(3, VOCAB) for _ in range(19)]
    requests = []
    for at in range(count):
        phrase = [chance.randrange(3, VOCAB) for _ in range(3 + at)]
        prompt = (start if at % 2 else []) + phrase * (1 + at % 4)
        prompt = prompt[:1] if at == 6 else prompt
        requests.append(Request(f"r{at}", tuple(prompt), new_tokens - at, sampling))
    return requests


class TestDrafter:
    """Drafts by a rule of the test; keeps the views of :meth:`observe` for inspection."""

    __test__ = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.released: list[str] = []

    def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
        return [self.draft(view) for view in sequences]

    def draft(self, view: DraftView) -> Draft:
        return EMPTY_DRAFT

    def observe(self, sequences: Any, accepted: Any, hidden: Any, logits: Any) -> None:
        pass

    def release(self, sequence_id: str) -> None:
        self.released.append(sequence_id)


class Oracle(TestDrafter):
    """Knows the answers: drafts chains of which all tokens are right."""

    def __init__(self, answers: dict[str, tuple[int, ...]], prompts: dict[str, int], length: int = 4) -> None:
        super().__init__()
        self.answers, self.prompts, self.length = answers, prompts, length

    def next_tokens(self, view: DraftView) -> tuple[int, ...]:
        done = len(view.tokens) - self.prompts[view.id]
        return self.answers[view.id][done : done + min(self.length, view.max_draft)]

    def draft(self, view: DraftView) -> Draft:
        return chain(self.next_tokens(view))


class Hostile(Oracle):
    """Random trees with duplicates, dead branches and, here and there, the right path scattered in them."""

    def __init__(self, answers: dict[str, tuple[int, ...]], prompts: dict[str, int]) -> None:
        super().__init__(answers, prompts)
        self.random = random.Random(11)

    def draft(self, view: DraftView) -> Draft:
        right = [*self.next_tokens(view), *[self.random.randrange(VOCAB) for _ in range(8)]]
        num_nodes = self.random.randint(0, min(9, view.max_draft))
        tokens: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        for node in range(num_nodes):
            parent = self.random.randrange(-1, node)
            at = 0 if parent < 0 else depth[parent] + 1
            wrong = self.random.choice([*tokens, self.random.randrange(VOCAB)])
            tokens.append(right[at] if self.random.random() < 0.6 else wrong)
            parents.append(parent)
            depth.append(at)
        return Draft(tuple(tokens), tuple(parents))


def oracle(requests: Sequence[Request], family: Family = "llama", kind: type[Oracle] = Oracle) -> Oracle:
    return kind(
        {request.id: expected(family, request) for request in requests},
        {request.id: len(request.prompt_tokens) for request in requests},
    )

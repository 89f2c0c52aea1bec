"""The batch-invariant mode: at 16 bit a row has the same bits whatever is computed beside it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from batches import Rows, batch_of
from tiny import make_tiny_model
from tiny_engine import Hostile, Oracle

from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import BLOCK_ROWS, Decoder
from trtspec.embedded.weights import load_model
from trtspec.engine import Request, generate
from trtspec.model_source import cache_folder
from trtspec.modelspec import read_modelspec
from trtspec.recipe import Limits

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 320, (90,), generator=torch.Generator().manual_seed(0)).tolist()


def load(folder: Path, invariant: bool) -> Decoder:
    spec = read_modelspec(folder)
    return load_model(folder, spec, dtype=torch.bfloat16, device=CPU, batch_invariant=invariant)


@pytest.fixture(scope="module", params=["llama", "qwen3", "odd_sizes"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = "llama" if request.param == "odd_sizes" else request.param
    sizes = {"hidden": 60, "head_dim": 20, "intermediate": 150} if request.param == "odd_sizes" else {}
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, family, layers=3, dtype="bfloat16", tokenizer=False, **sizes)


def in_pieces(model: Decoder, pieces: list[int], neighbours: int = 0) -> torch.Tensor:
    """[90, vocab]: logits of TOKENS computed in chunks, each beside ``neighbours`` other sequences."""
    store = KvStore(model.spec, 2048, dtype=model.dtype)
    slots = [torch.arange(i * 128, i * 128 + 128) for i in range(neighbours + 1)]
    out, start = [], 0
    for count in pieces:
        beside = [Rows(TOKENS[i : i + 1 + i % 3], 0, slots[i]) for i in range(1, neighbours + 1)]
        own = Rows(TOKENS[start : start + count], start, slots[0])
        out.append(model.forward(batch_of(*beside, own), store)[0][-count:])
        start += count
    return torch.cat(out)


SHAPES = {
    "decode": ([1] * 90, 0),
    "chunks": ([17, 1, 16, 3, 53], 0),
    "batch": ([1] * 90, 11),
    "drafts": ([5] * 18, 3),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_shape(folder: Path, shape: str) -> None:
    model = load(folder, True)
    assert torch.equal(in_pieces(model, *SHAPES[shape]), in_pieces(model, [90]))


def test_without_the_mode_bits_do_depend_on_the_shape(folder: Path) -> None:
    model = load(folder, False)
    whole = in_pieces(model, [90])
    assert not all(torch.equal(in_pieces(model, *shape), whole) for shape in SHAPES.values())


def test_the_mode_computes_the_same_model(folder: Path) -> None:
    exact = load_model(folder, read_modelspec(folder), dtype=torch.float64, device=CPU)
    wanted = in_pieces(exact, [90])
    errors = [float((in_pieces(load(folder, mode), [90]) - wanted).abs().max()) for mode in (True, False)]
    assert errors[0] < 1.5 * errors[1]
    everything = load_model(
        folder, read_modelspec(folder), dtype=torch.float64, device=CPU, batch_invariant=True
    )
    torch.testing.assert_close(in_pieces(everything, [90]), wanted, rtol=0, atol=1e-11)


def test_every_kernel_meets_one_shape_only(folder: Path) -> None:
    model, seen = load(folder, True), set()
    head = model.lm_head

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.add((x.shape[0], x.is_contiguous()))
        return head(x)

    model.lm_head = watched
    in_pieces(model, [17, 1, 16, 3, 53], 5)
    assert seen == {(BLOCK_ROWS, True)}


# ---------------------------------------------------------------- whole answers


def engine_of(model: Decoder, *, rows: int = 64, batch: int = 8, drafter: object = None) -> EmbeddedEngine:
    limits = Limits(max_batch_size=batch, max_num_tokens=rows, max_input_tokens=300, max_seq_tokens=480)
    store = functools.partial(KvStore, model.spec, dtype=model.dtype)
    return EmbeddedEngine(model, store, num_pages=400, limits=limits, drafter=drafter)  # type: ignore[arg-type]


def all_paths(model: Decoder, requests: list[Request]) -> dict[str, list[tuple[int, ...]]]:
    alone = [generate(engine_of(model), [request])[0].tokens for request in requests]
    answers = {request.id: tokens for request, tokens in zip(requests, alone, strict=True)}
    prompts = {request.id: len(request.prompt_tokens) for request in requests}
    engines = {
        "batch": engine_of(model),
        "chunks": engine_of(model, rows=13),
        "ngram": engine_of(model, drafter=NgramDrafter(4, 1, 3)),
        "chain": engine_of(model, drafter=Oracle(answers, prompts)),
        "tree": engine_of(model, drafter=Hostile(answers, prompts)),
    }
    runs = {name: [done.tokens for done in generate(e, requests)] for name, e in engines.items()}
    assert engines["tree"].stats().accepted_tokens > 20
    hit = [generate(engines["chunks"], [request])[0].tokens for request in requests]
    assert engines["chunks"].stats().prefix_hit_tokens > 0
    return {"alone": alone, **runs, "prefix hit": hit}


def test_greedy_answers_are_equal_at_16_bit(folder: Path) -> None:
    requests = [Request(f"r{i}", tuple(TOKENS[i : 2 * i + 3]), 60) for i in range(8)]
    model = load(folder, True)
    paths = all_paths(model, requests)
    assert all(answers == paths["alone"] for answers in paths.values())


@pytest.mark.model
@pytest.mark.slow
def test_greedy_answers_of_a_real_model_are_equal_at_16_bit() -> None:
    source = cache_folder() / "models" / "smollm2-135m-instruct"
    if not source.is_dir():
        if os.environ.get("TRTSPEC_REQUIRE_MODELS"):
            pytest.fail(f"{source} is missing; run: trtspec fetch")
        pytest.skip(f"{source} is missing; run: trtspec fetch")
    words = torch.randint(0, 49152, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    requests = [Request(f"r{i}", tuple(words[i : 9 * i + 9]), 20) for i in range(4)]
    model = load(source, True)
    paths = all_paths(model, requests)
    assert all(answers == paths["alone"] for answers in paths.values())

"""The engine's contract beside its tokens: refusals, counters, cancellation, failure, scores, opening.

One file, because every test drives one engine through the same few helpers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import full_forward
from tiny import make_tiny_model
from tiny_engine import (
    GREEDY,
    VOCAB,
    Hostile,
    Oracle,
    TestDrafter,
    expected,
    oracle,
    store_for,
    tiny_decoder,
    tiny_engine,
    workload,
)

from trtspec.embedded import engine as engine_module
from trtspec.embedded import machine
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.ngram import NgramDrafter
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.opening import open_embedded
from trtspec.embedded.tree import Draft, chain
from trtspec.engine import Output, Request, Sampling, generate
from trtspec.errors import InputError, MissingError
from trtspec.recipe import Recipe

REQUEST = Request("a", (5, 6, 7), 4)


# ---------------------------------------------------------------- what add refuses


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (replace(REQUEST, prompt_tokens=()), "request 'a': the prompt is empty; give at least one token"),
        (
            replace(REQUEST, prompt_tokens=(1, VOCAB)),
            f"token id {VOCAB} is outside the vocabulary of {VOCAB}",
        ),
        (replace(REQUEST, prompt_tokens=(-1, 2)), "token id -1 is outside the vocabulary"),
        (replace(REQUEST, prompt_tokens=(1,) * 129), "129 prompt tokens exceed limits.max_input_tokens 128"),
        (replace(REQUEST, max_new_tokens=0), "max_new_tokens 0 is below 1"),
        (
            replace(REQUEST, max_new_tokens=254),
            "3 prompt tokens and 254 new ones exceed limits.max_seq_tokens 256",
        ),
        (
            replace(REQUEST, sampling=Sampling(temperature=-0.5)),
            "temperature -0.5 is not a finite number >= 0",
        ),
        (replace(REQUEST, sampling=Sampling(temperature=float("nan"))), "temperature nan is not a finite"),
        (replace(REQUEST, sampling=Sampling(top_k=-1)), "top_k -1 is below 0"),
        (replace(REQUEST, sampling=Sampling(top_p=0.0)), "top_p 0.0 is outside (0, 1]"),
        (replace(REQUEST, sampling=Sampling(seed=-1)), "seed -1 is outside 0 .. 2^63 - 1"),
        (replace(REQUEST, max_new_tokens=200), "202 tokens exceed the 40 pages of 4 tokens of the KV cache"),
    ],
)
def test_requests_that_can_never_run_are_refused(request_: Request, message: str) -> None:
    engine = tiny_engine(kv_tokens=160)
    with pytest.raises(InputError, match=re.escape(message)):
        engine.add(request_)
    assert engine.in_flight == 0
    assert engine.step() == []


def test_every_problem_of_a_request_is_named() -> None:
    with pytest.raises(InputError) as raised:
        tiny_engine().add(Request("b", (), 0, Sampling(top_p=2.0)))
    assert len(raised.value.problems) == 3


def test_an_id_is_free_again_after_the_last_output() -> None:
    engine = tiny_engine()
    engine.add(REQUEST)
    with pytest.raises(InputError, match="this id is in flight already"):
        engine.add(REQUEST)
    engine.step()
    engine.cancel("a")
    with pytest.raises(InputError, match="this id is in flight already"):
        engine.add(REQUEST)
    assert engine.step() == [Output("a", (), finish_reason="cancelled")]
    [completion] = generate(engine, [REQUEST])
    assert completion.tokens == expected("llama", REQUEST)


# ---------------------------------------------------------------- cancelling, failing, closing


def test_cancel_frees_at_once_and_reports_with_the_next_step() -> None:
    engine = tiny_engine(batch=1, drafter=(drafter := TestDrafter()))
    for name in "abc":
        engine.add(replace(REQUEST, id=name))
    engine.step()
    engine.cancel("a")  # running
    engine.cancel("c")  # waiting
    engine.cancel("c")
    engine.cancel("nobody")
    assert engine.stats().pages_held == 0
    assert engine.in_flight == 3
    outputs = engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        ("a", "cancelled"),
        ("c", "cancelled"),
        ("b", None),
    ]
    assert engine.in_flight == 1
    assert drafter.released == ["a", "c"]


def test_an_idle_step_runs_nothing() -> None:
    engine = tiny_engine()
    assert engine.step() == []
    assert engine.stats().steps == 0


def test_a_failed_forward_drops_the_requests_and_keeps_the_cache_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = workload()
    drafter = oracle(requests, kind=Hostile)
    engine = tiny_engine(drafter=drafter)
    generate(engine, requests[:3])
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    model = tiny_decoder()
    forward = type(model).forward

    def fail(self: Any, batch: Any, store: Any, layers: Any = ()) -> Any:
        forward(self, batch, store, layers)  # KV written, then lost
        raise MemoryError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", fail)
        with pytest.raises(MemoryError):
            engine.step()
    engine.check_integrity()
    assert engine.in_flight == 0
    assert engine.stats().pages_free == engine.stats().pages_total
    assert {request.id for request in requests} <= set(drafter.released)
    for completion, request in zip(generate(engine, requests), requests, strict=True):
        assert completion.tokens == expected("llama", request)


def test_a_failing_acceptance_commits_nothing() -> None:
    def fail(*_: Any) -> Accepted:
        raise ValueError("bad law")

    engine = tiny_engine(accept=fail)
    engine.add(workload()[0])
    engine.add(replace(REQUEST, sampling=Sampling(temperature=1.0)))
    with pytest.raises(ValueError, match="bad law"):
        engine.step()
    engine.check_integrity()
    assert engine.in_flight == engine.stats().pages_held == engine.stats().pages_cached == 0


def test_close_twice_then_no_more_requests() -> None:
    engine = tiny_engine()
    engine.add(REQUEST)
    engine.close()
    engine.close()
    assert engine.in_flight == 0
    assert engine.step() == []
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.add(REQUEST)


# ---------------------------------------------------------------- counters


def test_counters_add_up() -> None:
    requests = workload()
    engine = tiny_engine(drafter=oracle(requests, kind=Hostile), prefix_cache=False)
    completions = generate(engine, requests)
    stats = engine.stats()
    assert stats.generated_tokens == sum(len(completion.tokens) for completion in completions)
    assert stats.decode_steps == sum(completion.steps for completion in completions)
    assert stats.drafted_tokens == sum(completion.drafted for completion in completions)
    assert stats.accepted_tokens == sum(completion.accepted for completion in completions)
    # A sequence-step emits what it accepted and one more token, unless it ended within what was accepted.
    missing = stats.accepted_tokens + stats.decode_steps - stats.generated_tokens
    assert 0 <= missing <= len(requests)
    prompts = sum(len(request.prompt_tokens) for request in requests)
    assert stats.target_rows == prompts + stats.decode_steps - len(requests) + stats.drafted_tokens
    assert stats.running == stats.waiting == 0
    assert stats.pages_total == stats.pages_free
    assert stats.target_seconds > 0
    assert stats.draft_seconds > 0


def test_without_drafts_every_step_gives_one_token() -> None:
    engine = tiny_engine()
    generate(engine, workload())
    stats = engine.stats()
    assert stats.decode_steps == stats.generated_tokens
    assert stats.drafted_tokens == stats.accepted_tokens == 0


# ---------------------------------------------------------------- the drafter's side of the contract


class Greedy(TestDrafter):
    """Ignores max_draft."""

    def draft(self, view: DraftView) -> Draft:
        assert view.max_draft > 0
        return chain((9,) * 40)


def test_drafts_longer_than_asked_are_trimmed() -> None:
    engine = tiny_engine(drafter=Greedy(), rows=16)
    [completion] = generate(engine, [REQUEST])
    assert completion.tokens == expected("llama", REQUEST)
    # Of 4 tokens the prompt yields the first, so drafts of at most 2, then 1; the last step drafts none.
    assert completion.drafted <= 2 + 1


class Observer(Hostile):
    hidden_layers = (0, 1)

    def observe(
        self,
        sequences: Sequence[DraftView],
        accepted: Sequence[Accepted | None],
        hidden: Any,
        logits: Any,
    ) -> None:
        assert len(sequences) == len(accepted) == len(hidden) == len(logits)
        for view, outcome, states, rows in zip(sequences, accepted, hidden, logits, strict=True):
            assert states.keys() == {0, 1}
            assert (outcome is None) == (rows is None)
            if outcome is None or rows is None:
                self.in_prompt = True
                continue
            assert outcome.token in view.tokens
            num_rows = len(rows)
            # The draft's rows are the last ones, with the current token's before them.
            found = states[1][-num_rows:]
            assert found.shape == (num_rows, tiny_decoder().spec.hidden_size)
            if not outcome.path:
                assert int(rows[0].argmax()) == outcome.token
                self.compared = True


def test_observe_sees_rows_and_logits_by_sequence() -> None:
    requests = workload()
    drafter = oracle(requests, kind=Observer)
    generate(tiny_engine(drafter=drafter, rows=16), requests)
    assert drafter.in_prompt  # type: ignore[attr-defined]
    assert drafter.compared  # type: ignore[attr-defined]


# ---------------------------------------------------------------- scores


def test_scores_are_those_of_one_full_forward() -> None:
    text = workload()[7].prompt_tokens
    model = tiny_decoder()
    logits = full_forward(model, store_for(model), text[:-1], len(text) - 1)
    logprobs = logits.log_softmax(-1)
    top = logits.topk(2)
    for chunk in (1, 7, None, 1000):
        scores = tiny_engine().score(text, chunk_tokens=chunk)
        assert len(scores.logprobs) == len(text) - 1
        for at, token in enumerate(text[1:]):
            assert scores.logprobs[at] == pytest.approx(float(logprobs[at, token]), abs=1e-9)
        assert scores.top_tokens == top.indices[:, 0].tolist()
        assert scores.second_tokens == top.indices[:, 1].tolist()
        assert scores.margins == pytest.approx((top.values[:, 0] - top.values[:, 1]).tolist(), abs=1e-9)


def test_scoring_in_the_middle_of_a_batch_leaves_no_trace() -> None:
    requests = workload()
    engine = tiny_engine(drafter=NgramDrafter(4, 1, 3), kv_tokens=128)
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.in_flight:
        before = engine.stats()
        engine.score(requests[3].prompt_tokens, chunk_tokens=5)
        assert engine.stats() == before
        for output in engine.step():
            tokens[output.request_id] += output.new_tokens
    for request in requests:
        assert tuple(tokens[request.id]) == expected("llama", request)


def test_scores_of_one_token_are_empty_and_bad_texts_are_refused() -> None:
    engine = tiny_engine()
    assert engine.score([3]).logprobs == []
    with pytest.raises(InputError, match="score: no tokens"):
        engine.score([])
    with pytest.raises(InputError, match="score: a token id is outside the vocabulary of 64"):
        engine.score([1, 64])
    with pytest.raises(InputError, match="score: 513 tokens exceed the model's 512 positions"):
        engine.score([1] * 513)
    with pytest.raises(InputError, match="chunk_tokens 0 is below 1"):
        engine.score([1, 2], chunk_tokens=0)


# ---------------------------------------------------------------- opening from a recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), "llama", vocab=VOCAB, hidden=32, layers=2, tokenizer=False
    )


def recipe(**changes: Any) -> Recipe:
    backend = {"kind": "embedded", "dtype": "float64", "threads": 1, **changes.pop("backend", {})}
    limits = {"max_batch_size": 4, "max_num_tokens": 32, "max_input_tokens": 64, "max_seq_tokens": 128}
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "tiny",
            "model": {"source": "tiny"},
            "backend": backend,
            "limits": limits | changes.pop("limits", {}),
            **changes,
        }
    )


NGRAM = {"kind": "ngram", "num_draft_tokens": 4, "min_ngram": 1, "max_ngram": 3}
DRAFT_MODEL = {"kind": "draft_model", "model": {"source": "small"}}


def test_a_recipe_opens_with_and_without_speculation(folder: Path) -> None:
    requests = workload()
    with_drafts = open_embedded(recipe(speculation=NGRAM), folder)
    without = open_embedded(recipe(speculation=NGRAM), folder, speculation=False)
    assert generate(with_drafts, requests)[3].tokens == generate(without, requests)[3].tokens
    assert with_drafts.stats().accepted_tokens > 0
    assert without.stats().drafted_tokens == 0
    assert with_drafts.stats().pages_total == 4 * 128 // 16
    assert with_drafts.vocab_size == VOCAB
    assert with_drafts.max_seq_tokens == 128


@pytest.mark.parametrize("kind", ["exact", "rejection", "typical"])
def test_every_acceptance_of_the_recipe_runs(folder: Path, kind: str) -> None:
    engine = open_embedded(recipe(speculation=NGRAM, acceptance={"kind": kind}), folder)
    completions = generate(engine, [*workload(Sampling(temperature=0.7, seed=1)), replace(REQUEST, id="g")])
    assert all(completion.finish_reason == "length" for completion in completions)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_computes_on_the_cpu(folder: Path, dtype: str) -> None:
    engine = open_embedded(recipe(backend={"dtype": dtype}), folder)
    [completion] = generate(engine, [REQUEST])
    assert len(completion.tokens) == 4


def test_a_quantized_kv_cache_serves_generation_and_scores_alike(folder: Path) -> None:
    engine = open_embedded(recipe(quantization={"kind": "none", "kv_cache": "fp8"}), folder)
    plain = open_embedded(recipe(), folder)
    text = workload()[7].prompt_tokens
    scores = engine.score(text)
    assert scores.logprobs != plain.score(text).logprobs
    assert sum(scores.logprobs) == pytest.approx(sum(plain.score(text).logprobs), rel=0.2)
    # The token that generation chooses after each prefix is the one that scoring puts first.
    for cut in range(5, 30, 6):
        [completion] = generate(engine, [Request("a", tuple(text[:cut]), 1)])
        assert completion.tokens == (scores.top_tokens[cut - 1],)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"speculation": DRAFT_MODEL},
            InputError,
            "speculation.model: the engine holds no draft model (folder draft); build it again",
        ),
        (
            {"limits": {"max_seq_tokens": 1024}},
            InputError,
            "limits.max_seq_tokens: 1024 exceeds the model's 512 positions; lower it",
        ),
        (
            {"limits": {"kv_cache_bytes": 100}},
            InputError,
            "limits.kv_cache_bytes: 100 bytes do not hold one page: 16 tokens take 8192 bytes",
        ),
        (
            {"quantization": {"kind": "none", "kv_cache": "nvfp4"}},
            InputError,
            "quantization.kv_cache: nvfp4 is not run by the embedded backend; use none, fp8 or int8",
        ),
        (
            {"quantization": {"kind": "none", "kv_cache": "int8"}},
            InputError,
            "the INT8 KV cache needs the scales of a calibrated checkpoint",
        ),
        (
            {"limits": {"kv_cache_bytes": 2**50}},
            MissingError,
            "available; lower limits.kv_cache_bytes",
        ),
    ],
)
def test_what_cannot_be_opened_says_why(
    folder: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        open_embedded(recipe(**changes), folder)


def test_without_speculation_a_missing_draft_model_does_not_matter(folder: Path) -> None:
    engine = open_embedded(recipe(speculation=DRAFT_MODEL), folder, speculation=False)
    assert generate(engine, [REQUEST])[0].tokens


def test_too_little_memory_says_how_much_is_needed_and_what_to_lower(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda device: 1000)
    with pytest.raises(
        MissingError, match=r"KV cache needs 262144 bytes .* 1000 available; lower limits.max_batch"
    ):
        open_embedded(recipe(), folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_missing(folder: Path) -> None:
    with pytest.raises(MissingError, match=r"backend\.device: cuda: torch sees no GPU on this machine"):
        open_embedded(recipe(backend={"device": "cuda"}), folder)


def test_another_backend_is_refused(folder: Path) -> None:
    other = Recipe.model_validate(
        {"version": 1, "name": "x", "model": {"source": "x"}, "backend": {"kind": "pytorch"}}
    )
    with pytest.raises(InputError, match=r"backend.kind: pytorch is not run by the embedded engine"):
        open_embedded(other, folder)


def test_kv_cache_bytes_sets_the_pages(folder: Path) -> None:
    engine = open_embedded(recipe(limits={"kv_cache_bytes": 8192 * 5 + 1}), folder)
    assert engine.stats().pages_total == 5
    with pytest.raises(InputError, match="exceed the 5 pages of 16 tokens"):
        engine.add(Request("a", (1,) * 60, 40))


def test_threads_come_from_the_recipe_or_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        open_embedded(recipe(backend={"threads": 2}), folder)
        assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        open_embedded(recipe(backend={"threads": None}), folder)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_cuda_generates_the_tokens_of_the_cpu(folder: Path) -> None:
    requests = workload()
    on_gpu = open_embedded(recipe(backend={"device": "cuda"}, speculation=NGRAM), folder)
    on_cpu = open_embedded(recipe(), folder)
    for left, right in zip(generate(on_gpu, requests), generate(on_cpu, requests), strict=True):
        assert left.tokens == right.tokens


@pytest.mark.parametrize("limit", [1, 2, 5, None])
def test_nothing_is_drafted_above_max_concurrency_and_that_is_counted(limit: int | None) -> None:
    requests = workload()
    asked = []

    class Counted(Oracle):
        def propose(self, sequences: Sequence[DraftView]) -> list[Draft]:
            asked.append(len(sequences))
            return super().propose(sequences)

    engine = tiny_engine(drafter=oracle(requests, kind=Counted), max_concurrency=limit)
    for completion, request in zip(generate(engine, requests), requests, strict=True):
        assert completion.tokens == expected("llama", request)
    assert max(asked) <= (limit or 8)
    held_back = engine.stats().held_back_steps
    assert (held_back > 0) == (limit is not None)


CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")],
)
MARGIN = {"bfloat16": 0.25, "float16": 0.03}
"""Logits closer than this may change places at 16 bit: a few of its steps at the size of the tiny logits."""


def margins_where_it_parts(folder: Path, device: str, dtype: str, changes: dict[str, Any]) -> list[float]:
    """The float32 logit margins where an answer of the 16-bit engine leaves the float32 one on the CPU."""
    requests = workload()
    low = open_embedded(recipe(backend={"device": device, "dtype": dtype}, **changes), folder)
    exact = open_embedded(recipe(backend={"dtype": "float32"}), folder)
    found = []
    for mine, wanted, request in zip(
        generate(low, requests), generate(exact, requests), requests, strict=True
    ):
        pairs = zip(mine.tokens, wanted.tokens, strict=True)
        parted = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if parted is not None:
            scores = exact.score([*request.prompt_tokens, *wanted.tokens])
            found.append(scores.margins[len(request.prompt_tokens) - 1 + parted])
    low.check_integrity()
    assert low.stats().pages_held == 0
    return found


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speculation": NGRAM | {"branches": 3, "adaptive": True}},
        {"speculation": {"kind": "lookahead"}},
    ],
    ids=["plain", "tree", "lookahead"],
)
def test_at_16_bit_answers_part_from_float32_only_where_logits_nearly_tie(
    folder: Path, device: str, dtype: str, changes: dict[str, Any]
) -> None:
    if device == "cpu" and dtype == "float16":
        pytest.skip("float16 is for GPUs")
    parted = margins_where_it_parts(folder, device, dtype, changes)
    assert all(found < MARGIN[dtype] for found in parted), parted
    assert len(parted) < 6


def test_a_fault_is_not_taken_for_rounding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions off by one in a tree: answers part where the margin is large."""
    depths = engine_module.depths
    monkeypatch.setattr(engine_module, "depths", lambda draft: tuple(2 * depth for depth in depths(draft)))
    parted = margins_where_it_parts(folder, "cpu", "bfloat16", {"speculation": NGRAM | {"branches": 3}})
    assert parted
    assert max(parted) > MARGIN["bfloat16"] or len(parted) >= 6


def test_a_plain_engine_has_usable_defaults() -> None:
    model = tiny_decoder()
    engine = EmbeddedEngine(model, store_for(model), num_pages=16)
    [completion] = generate(engine, [replace(REQUEST, sampling=GREEDY)])
    assert completion.tokens == expected("llama", REQUEST)

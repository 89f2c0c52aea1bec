"""The draft model's own laws: strict output whatever it draws, memory within bounds, fit with the target."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from branches import law_of
from draft_models import continuation, draft_decoder, drafter_of, small_decoder, with_embedding
from reference import full_forward
from test_identity import check
from tiny import make_tiny_model
from tiny_engine import store_for, tiny_engine, workload

from trtspec.embedded import opening
from trtspec.embedded.acceptance import Accepted, exact, rejection
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.draft_model import DraftModelDrafter
from trtspec.embedded.engine import EmbeddedEngine
from trtspec.embedded.kvcache import CacheCorrupted
from trtspec.embedded.opening import open_embedded
from trtspec.embedded.sampling import Draw, TargetLaw, draft_draw, generator_draw
from trtspec.engine import Request, Sampling, generate
from trtspec.errors import InputError, MissingError
from trtspec.recipe import Limits, Recipe

# ---------------------------------------------------------------- the exact output law

NUM_NEW = 3
FLAT = Sampling(temperature=2.0)
CUT = Sampling(temperature=4.0, top_k=3, top_p=0.9)


def plain_law(vocab: int, prompt: tuple[int, ...], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The law of NUM_NEW tokens of the target alone, as a product of its conditional laws."""
    model = small_decoder(vocab, 1)

    @functools.cache
    def conditional(tokens: tuple[int, ...]) -> list[float]:
        law: list[float] = (
            TargetLaw(full_forward(model, store_for(model), tokens), sampling).probs(0).tolist()
        )
        return law

    law = {}
    for new in itertools.product(range(vocab), repeat=NUM_NEW):
        mass = 1.0
        for at, token in enumerate(new):
            mass *= conditional((*prompt, *new[:at]))[token]
        if mass > 0.0:
            law[new] = mass
    return law


def speculative_law(
    vocab: int, sampling: Sampling, accept: Callable[..., Accepted], drafter: DraftModelDrafter
) -> dict[tuple[int, ...], float]:
    """The law of NUM_NEW tokens of the engine, over every branch of its own draws and of the drafter's."""
    model = small_decoder(vocab, 1)
    engine = EmbeddedEngine(
        model,
        store_for(model),
        num_pages=8,
        page_tokens=2,
        prefix_cache=False,
        limits=Limits(max_batch_size=1, max_num_tokens=8, max_input_tokens=4, max_seq_tokens=8),
        drafter=drafter,
        accept=accept,
    )

    def program(draw: Draw) -> tuple[int, ...]:
        engine.add(Request("r", (1, 0), NUM_NEW, sampling))
        engine._draws["r"] = draw
        drafter._jobs_draw = draw  # type: ignore[attr-defined]
        tokens: list[int] = []
        while engine.in_flight:
            for output in engine.step():
                tokens += output.new_tokens
        return tuple(tokens)

    return law_of(program)


class DrawsFromTheTest(DraftModelDrafter):
    _jobs_draw: Draw

    def _jobs(self, sequences):
        jobs = super()._jobs(sequences)
        for job in jobs:
            job.state.draw = self._jobs_draw
        return jobs


def assert_strict(
    sampling: Sampling, accept: Callable[..., Accepted], drafter: DraftModelDrafter, vocab: int
):
    found, wanted = speculative_law(vocab, sampling, accept, drafter), plain_law(vocab, (1, 0), sampling)
    difference = sum(abs(found.get(new, 0.0) - wanted.get(new, 0.0)) for new in found.keys() | wanted.keys())
    assert difference < 1e-12
    assert max(wanted.values()) < 0.8  # a law that is nearly certain would prove nothing


def tiny_drafter(
    vocab: int, *, kind: type[DraftModelDrafter] = DrawsFromTheTest, draft_vocab: int = 0, **options: Any
) -> DraftModelDrafter:
    draft = small_decoder(draft_vocab or vocab, 2)
    return drafter_of(draft, kind=kind, length=2, kv_tokens=16, vocab=vocab, prefix_cache=False, **options)


@pytest.mark.parametrize(
    ("sampling", "vocab"), [(FLAT, 3), (CUT, 4), (Sampling(temperature=3.0, top_k=2), 6)]
)
def test_the_output_law_is_the_targets(sampling: Sampling, vocab: int) -> None:
    assert_strict(sampling, rejection, tiny_drafter(vocab, sampled=True), vocab)
    assert_strict(sampling, rejection, tiny_drafter(vocab), vocab)  # point masses
    assert_strict(sampling, exact, tiny_drafter(vocab), vocab)


@pytest.mark.parametrize("draft_vocab", [3, 6])
def test_a_padded_vocabulary_changes_no_law(draft_vocab: int) -> None:
    assert_strict(CUT, rejection, tiny_drafter(4, draft_vocab=draft_vocab, sampled=True), 4)


class HandsOverAnotherLaw(DrawsFromTheTest):
    """The law at temperature 1, not the one that was drawn from."""

    def _choose(self, jobs, logits):
        super()._choose(jobs, logits)
        for row, job in enumerate(jobs):
            job.laws[-1] = TargetLaw(logits, Sampling(temperature=1.0)).probs(row)


class HandsOverLawsOfPicks(DrawsFromTheTest):
    """Picks the likeliest and says it was drawn."""

    def _choose(self, jobs, logits):
        super()._choose(jobs, logits)
        for row, job in enumerate(jobs):
            job.tokens[-1] = int(logits[row].argmax())


def always_accept(draft, law, draw):
    path = tuple(range(len(draft)))
    return Accepted(path, law.sample(len(path), draw))


@pytest.mark.parametrize("broken", [HandsOverAnotherLaw, HandsOverLawsOfPicks])
def test_a_wrong_law_of_the_draft_is_noticed(broken: type[DraftModelDrafter]) -> None:
    with pytest.raises(AssertionError):
        assert_strict(FLAT, rejection, tiny_drafter(3, kind=broken, sampled=True), 3)


def test_accepting_all_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_strict(FLAT, always_accept, tiny_drafter(3, sampled=True), 3)


def test_the_drafters_draws_are_a_stream_of_their_own() -> None:
    weights = torch.ones(1000, dtype=torch.float64)
    streams = [
        [draw(weights) for _ in range(50)]
        for seed in range(4)
        for draw in (generator_draw(seed), draft_draw(seed))
    ]
    assert len({tuple(stream) for stream in streams}) == 8
    again = draft_draw(3)
    assert [again(weights) for _ in range(50)] == streams[-1]


# ---------------------------------------------------------------- bounds


def view(name: str, tokens: tuple[int, ...], room: int = 4) -> DraftView:
    return DraftView(name, list(tokens), room)


def test_a_long_prompt_is_caught_up_with_over_several_calls() -> None:
    drafter = drafter_of(draft_decoder("stranger"), rows=8)
    long, short = view("long", tuple(range(20))), view("short", (1, 2))
    drafts = drafter.propose([long, short])
    assert [len(draft) for draft in drafts] == [0, 4]  # 2 rows of the short one, 6 of the other
    assert [len(draft) for draft in drafter.propose([long])] == [0]
    assert drafter.propose([long])[0].tokens == continuation("stranger", tuple(range(20)), 4)


def test_few_pages_shorten_drafts_and_idle_sequences_lose_theirs() -> None:
    drafter = drafter_of(draft_decoder("stranger"), page_tokens=2, kv_tokens=14)
    drafter.propose([view("idle", (1, 2, 3, 4))])
    assert drafter.pages_held == 4
    [first] = drafter.propose([view("a", (1, 2, 3, 4, 5, 6))])
    assert len(first) == 4
    assert drafter.pages_held == 5  # those of "idle" were taken
    [alone, crowded] = drafter.propose([view("a", (1, 2, 3, 4, 5, 6)), view("b", (7, 2, 3))])
    assert alone.tokens == first.tokens
    assert len(crowded) == 2  # three known tokens and one drafted one fill two pages
    assert crowded.tokens == continuation("stranger", (7, 2, 3), 2)
    [none] = drafter.propose([view("c", tuple(range(15)))])
    assert not none.tokens
    drafter.check_integrity()
    for name in ("idle", "a", "b", "c", "unknown"):
        drafter.release(name)
    assert drafter.pages_held == 0


def test_tokens_that_only_the_target_has_stop_the_draft_alone() -> None:
    small = small_decoder(32, 3)
    drafter = drafter_of(small)
    requests = workload()
    engine = tiny_engine(drafter=drafter)
    check(generate(engine, requests), requests)  # most prompts hold tokens of 32 and above
    assert not drafter.propose([view("x", (3, 40))])[0].tokens
    assert drafter.propose([view("y", (3, 4))])[0].tokens


def test_a_draft_model_that_is_not_finite_is_an_error_and_the_engine_goes_on() -> None:
    target = tiny_decoder_with_nan()
    drafter = drafter_of(target)
    engine = tiny_engine(drafter=drafter)
    requests = workload(count=2)
    for request in requests:
        engine.add(request)
    with pytest.raises(InputError, match="the draft model's logits are not finite"):
        run_out(engine)
    assert engine.in_flight == 0
    assert drafter.pages_held == 0
    drafter.check_integrity()


def run_out(engine: EmbeddedEngine) -> None:
    while engine.in_flight:
        engine.step()


def tiny_decoder_with_nan():
    model = draft_decoder("itself")
    return with_embedding(model, torch.full_like(model.embedding, float("nan")))


def test_the_auditor_sees_a_lost_table() -> None:
    drafter = drafter_of(draft_decoder("stranger"))
    drafter.propose([view("a", (1, 2, 3))])
    drafter.check_integrity()
    drafter._states["b"] = drafter._states.pop("a")
    drafter.check_integrity()
    drafter._states["b"].table = None
    with pytest.raises(CacheCorrupted):
        drafter.check_integrity()


# ---------------------------------------------------------------- from a recipe

LIMITS = {"max_batch_size": 2, "max_num_tokens": 32, "max_input_tokens": 64, "max_seq_tokens": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(base / "target"),
        make_tiny_model(base / "draft", hidden=32, layers=1, seed=4, max_positions=256),
    )


def recipe(**changes: Any) -> Recipe:
    speculation = {"kind": "draft_model", "model": {"source": "d"}} | changes.pop("speculation", {})
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "tiny",
            "model": {"source": "t"},
            "backend": {"kind": "embedded", "dtype": "float64", "threads": 1},
            "limits": LIMITS | changes.pop("limits", {}),
            "speculation": speculation,
            **changes,
        }
    )


@pytest.mark.parametrize("kind", ["exact", "rejection", "typical"])
@pytest.mark.parametrize("kv_cache", ["none", "fp8"])
def test_a_recipe_opens_with_its_draft_model(folders: tuple[Path, Path], kind: str, kv_cache: str) -> None:
    target, draft = folders
    requests = [Request(f"r{at}", (at + 3, 5, 6), 20, Sampling(at * 0.4)) for at in range(3)]
    quantization = {"kind": "none", "kv_cache": kv_cache}
    opened = recipe(acceptance={"kind": kind}, speculation={"quantization": quantization})
    for model in (draft, target):
        engine = open_embedded(opened, target, draft_dir=model)
        plain = open_embedded(opened, target, speculation=False)
        completions = generate(engine, requests)
        assert completions[0].tokens == generate(plain, requests)[0].tokens
        assert engine.stats().drafted_tokens > 0
        assert engine._drafter._sampled == (kind == "rejection")
        assert plain.stats().drafted_tokens == 0
    assert engine.stats().accepted_tokens > 10


def test_what_does_not_fit_the_target_is_one_error(folders: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = folders
    with pytest.raises(InputError, match=re.escape("speculation.model: the engine holds no draft model")):
        open_embedded(recipe(), target)
    with pytest.raises(InputError) as caught:
        open_embedded(recipe(limits={"max_seq_tokens": 300}), target, draft_dir=draft)
    assert "limits.max_seq_tokens: 300 exceeds the draft model's 256 positions" in str(caught.value)
    other = make_tiny_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|im_begin|>"))
    with pytest.raises(InputError) as caught:
        open_embedded(recipe(), target, draft_dir=other)
    message = str(caught.value)
    assert len(caught.value.problems) >= 3
    assert "vocabulary: 1 tokens are missing, first '<|im_start|>'" in message
    assert "special tokens: 2 are special in only one" in message


def test_the_memory_of_both_models_is_counted(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    monkeypatch.setattr(
        opening, "check_memory", lambda kv, weights, limits, device: counted.append((kv, weights))
    )
    target, draft = folders
    open_embedded(recipe(), target, speculation=False)
    open_embedded(recipe(), target, draft_dir=draft)
    (kv, weights), (both_kv, both_weights) = counted
    # 2 x 128 slots; 1 layer, keys and values, 2 heads of 8, float64
    assert both_kv - kv == 256 * 1 * 2 * 2 * 8 * 8
    size = (draft / "model.safetensors").stat().st_size
    assert both_weights - weights == size * 4
    monkeypatch.undo()
    monkeypatch.setattr("trtspec.embedded.machine.available_bytes", lambda device: both_kv + both_weights - 1)
    open_embedded(recipe(), target, speculation=False)
    with pytest.raises(MissingError, match="available"):
        open_embedded(recipe(), target, draft_dir=draft)

"""Heads are trained in the forward that drafts; a training that was killed goes on as if it had not been."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_tiny_model
from torch import Tensor

from trtspec.artifact import open_artifact
from trtspec.build import build
from trtspec.draft.answers import (
    Answers,
    AnswerSettings,
    answers_digest,
    generate_answers,
    open_answers,
    recorded_layers,
)
from trtspec.draft.checkpoint import read_record, write_heads
from trtspec.draft.curves import curve_svg, curve_text
from trtspec.draft.features import (
    Examples,
    Target,
    frequent_tokens,
    ranks_of,
    read_examples,
    shifted,
    target_of,
)
from trtspec.draft.run import TrainingJob, run_training
from trtspec.draft.train_eagle import EagleTraining
from trtspec.draft.train_medusa import MedusaTraining
from trtspec.draft.training import Training, TrainSettings, train, validate
from trtspec.embedded.drafters import DraftView
from trtspec.embedded.drafters.eagle import EagleHead
from trtspec.embedded.drafters.eagle3 import Eagle3Head
from trtspec.embedded.drafters.feature_drafter import FeatureDrafter
from trtspec.embedded.drafters.medusa import medusa_logits
from trtspec.embedded.drafters.trees import chain_tree
from trtspec.embedded.eagle_heads import load_eagle
from trtspec.embedded.heads import load_medusa
from trtspec.embedded.model import Decoder
from trtspec.embedded.weights import load_model
from trtspec.errors import InputError, MissingError
from trtspec.modelspec import read_modelspec

VOCAB = 64
SETTINGS = AnswerSettings(max_new_tokens=24, max_prompt_tokens=32, batch_size=8)
CPU = torch.device("cpu")
_scratch = functools.cache(tempfile.TemporaryDirectory)


@functools.cache
def model_folder() -> Path:
    folder = Path(_scratch().name) / "model"
    return make_tiny_model(
        folder, vocab=VOCAB, hidden=32, layers=6, heads=4, kv_heads=2, tokenizer=False, dtype="float32"
    )


@functools.cache
def decoder() -> Decoder:
    return load_model(model_folder(), read_modelspec(model_folder()), dtype=torch.float32, device=CPU)


def target() -> Target:
    return target_of(decoder(), model_folder())


def prompts(count: int = 70) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(3, VOCAB, (4 + at % 7,), generator=generator).tolist()) for at in range(count)
    ]


@functools.cache
def answers() -> Answers:
    layers = recorded_layers(decoder().spec.num_layers)
    made = open_answers(Path(_scratch().name) / "answers", layers, answers_digest(prompts(), "m", SETTINGS))
    generate_answers(decoder(), prompts(), made, SETTINGS, frozenset())
    return made


def examples() -> Examples:
    return read_examples(answers())


def training(kind: str, **options: Any) -> Training:
    if kind == "medusa":
        return MedusaTraining(target(), torch.arange(VOCAB), **options)
    vocab = torch.arange(0, VOCAB, 2) if kind == "eagle3" else torch.arange(VOCAB)
    return EagleTraining(kind, target(), vocab, **options)  # type: ignore[arg-type]


def some_parameters(of: Training) -> dict[str, Tensor]:
    """Not the start, where much is zero or one."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in of.start(1).items()
    }


def written(of: Training, parameters: dict[str, Tensor], folder: Path) -> Path:
    tensors, config, file = of.export(parameters)
    record = {
        "kind": of.kind, "base_model": "m", "base_digest": "d", "target_recipe": None,
        "tokenizer_digest": "t", "data_digest": "x", "num_answers": 1, "answer_tokens": 1,
        "trained_tokens": 1, "epochs": 1.0,
        "draft_vocab_size": None, "seed": 0, "acceptance": (0.5,), "acceptance_length": 1.5,
        "training_s": 1.0, "training_cpu_s": 1.0, "settings": {}, "curve": (),
    }  # fmt: skip
    write_heads(folder, tensors, config, file, record, "<svg/>")
    return folder


# --------------------------------------------------------------------------- the same forward


def drafted(
    kind: str, folder: Path, tokens: list[int], hidden: dict[int, Tensor]
) -> tuple[list[Tensor], list[int]]:
    """The logits of each level of the drafter's chain behind ``tokens``, and the chain."""
    said: list[Tensor] = []
    base: Any = EagleHead if kind == "eagle" else Eagle3Head

    class Recording(base):  # type: ignore[misc]
        def logits(self, outputs: Tensor) -> Tensor:
            said.append(super().logits(outputs)[0])
            return super().logits(outputs)

    head = Recording(load_eagle(folder, kind, decoder()))  # type: ignore[arg-type]
    drafter = FeatureDrafter(head, chain_tree(3), num_pages=32, page_tokens=4, max_batch_size=1)
    view = DraftView("a", tokens, max_draft=3, max_nodes=3)
    drafter.observe([view], [None], [hidden], [None])
    [draft] = drafter.propose([view])
    return said, list(draft.tokens)


def forward_gap(of: EagleTraining, folder: Path) -> float:
    """The largest difference between the trainer's logits and the drafter's over three levels, by the
    largest logit."""
    parameters = some_parameters(of)
    written(dataclasses.replace(of), parameters, folder)
    answer = examples().train[0]
    known = 20
    tokens = answer.tokens[:known].tolist()
    width = decoder().spec.hidden_size
    rows = answer.hidden[: known - 1]
    states = {layer: rows[:, at * width :][:, :width] for at, layer in enumerate(answers().layers)}
    said, chain = drafted(of.kind, folder, tokens, states)
    whole = torch.tensor([[*tokens, *chain]])
    hidden = torch.full((1, whole.shape[1], answer.hidden.shape[1]), 7.0)  # what is behind must not matter
    hidden[0, : known - 1] = rows
    with torch.no_grad():
        outputs = of.unrolled(parameters, whole, hidden, 3)
        trained = [of.logits(parameters, out[0, known - 2 + j], whole=True) for j, out in enumerate(outputs)]
    size = max(float(a.abs().max()) for a in said)
    return max(float((a - b).abs().max()) for a, b in zip(said, trained, strict=True)) / size


class ShiftedFeature(EagleTraining):
    """Broken: pairs each token with the feature of the token after."""

    def features(self, parameters: Any, hidden: Tensor) -> Tensor:
        return shifted(super().features(parameters, hidden), 1)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trainer_and_drafter_compute_the_same(kind: str, tmp_path: Path) -> None:
    of = training(kind)
    assert isinstance(of, EagleTraining)
    assert forward_gap(of, tmp_path / "right") < 1e-4
    broken = ShiftedFeature(of.kind, of.target, of.vocab)
    assert forward_gap(broken, tmp_path / "shifted") > 0.1


def test_medusa_trainer_and_drafter_compute_the_same(tmp_path: Path) -> None:
    of = training("medusa", num_layers=2)
    assert isinstance(of, MedusaTraining)
    parameters = some_parameters(of)
    heads = load_medusa(written(of, parameters, tmp_path / "heads"), decoder())
    x = examples().train[0].hidden[:5, -decoder().spec.hidden_size :]
    for at, logits in enumerate(medusa_logits(heads, x, 4)):
        ours = decoder().lm_head(of.states(parameters, at, x))
        assert torch.allclose(logits, ours, atol=1e-4)


# --------------------------------------------------------------------------- answers


def test_answers_are_the_engines_and_carry_its_states() -> None:
    answer = examples().train[3]
    spec = decoder().spec
    states = answer.hidden[:, -spec.hidden_size :]
    logits = decoder().lm_head(states[answer.prompt_length - 1 : -1])
    assert logits.argmax(-1).tolist() == answer.tokens[answer.prompt_length :].tolist()
    assert float(answer.hidden[-1].abs().sum()) == 0.0
    assert [a.prompt for a in answers().read()] == list(range(70))


def test_killed_answers_go_on(tmp_path: Path) -> None:
    layers = recorded_layers(decoder().spec.num_layers)
    digest = answers_digest(prompts(), "m", SETTINGS)

    def stop(step: str, done: int, total: int) -> None:
        if done == 66:
            raise KeyboardInterrupt

    made = open_answers(tmp_path / "a", layers, digest)
    with pytest.raises(KeyboardInterrupt):
        generate_answers(decoder(), prompts(), made, SETTINGS, frozenset(), stop)
    assert len(made.shards()) == 1
    took = generate_answers(decoder(), prompts(), made, SETTINGS, frozenset())
    assert took["tokens"] == 6 * 24
    for one, other in zip(made.read(), answers().read(), strict=True):
        assert torch.equal(one.tokens, other.tokens)
    with pytest.raises(InputError, match="other prompts"):
        open_answers(tmp_path / "a", layers, answers_digest(prompts(60), "m", SETTINGS))


def test_frequent_tokens_are_those_said_most() -> None:
    found = frequent_tokens(examples(), 8, VOCAB)
    said = torch.cat([answer.tokens[answer.prompt_length :] for answer in examples().train])
    counts = torch.bincount(said.long(), minlength=VOCAB)
    assert counts[found].min() >= counts.sort(descending=True).values[8]
    assert found.tolist() == sorted(set(found.tolist()))
    assert len(frequent_tokens(examples(), 1000, VOCAB)) == VOCAB


# --------------------------------------------------------------------------- training

QUICK = TrainSettings(
    epochs=6, rows=512, learning_rate=3e-3, evaluations=3, checkpoint_steps=4, patience=None
)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_killed_training_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    of, some = training(kind), examples()

    def kill(step: str, done: int, total: int) -> None:
        if done == 10:  # the last checkpoint is of step 8
            raise KeyboardInterrupt

    whole = train(of, some, QUICK, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(of, some, QUICK, tmp_path / "killed", progress=kill)
    resumed = train(of, some, QUICK, tmp_path / "killed")
    assert resumed.acceptance == whole.acceptance
    assert all(torch.equal(resumed.parameters[name], value) for name, value in whole.parameters.items())
    assert [point["loss"] for point in resumed.curve] == [point["loss"] for point in whole.curve]
    if kind != "medusa":
        return
    # Broken: moments of the optimizer lost with the process.
    with pytest.raises(KeyboardInterrupt):
        train(of, some, QUICK, tmp_path / "forgetful", progress=kill)
    state = torch.load(tmp_path / "forgetful", weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, tmp_path / "forgetful")
    forgetful = train(of, some, QUICK, tmp_path / "forgetful")
    assert any(not torch.equal(forgetful.parameters[name], v) for name, v in whole.parameters.items())


def test_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, epochs=1)
    train(training("medusa"), examples(), settings, tmp_path / "c")
    with pytest.raises(InputError, match="other data or settings"):
        train(training("medusa"), examples(), dataclasses.replace(settings, seed=1), tmp_path / "c")
    (tmp_path / "c").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="no checkpoint"):
        train(training("medusa"), examples(), settings, tmp_path / "c")


def shuffled(some: Examples) -> Examples:
    """States that belong to other positions: nothing to learn from."""
    generator = torch.Generator().manual_seed(0)

    def mix(answer: Any) -> Any:
        rows = torch.randperm(len(answer.hidden) - 1, generator=generator)
        tokens = torch.randint(3, VOCAB, answer.tokens.shape, generator=generator, dtype=torch.int32)
        return dataclasses.replace(
            answer, hidden=torch.cat((answer.hidden[rows], answer.hidden[-1:])), tokens=tokens
        )

    return Examples(tuple(mix(a) for a in some.train), some.validation)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_heads_learn_and_heads_of_zeros_or_of_shuffled_targets_do_not(kind: str, tmp_path: Path) -> None:
    of, train_part = training(kind), examples().train[:12]
    some = Examples(train_part, train_part)  # a random target has no language: what is learnt is known
    pace = (
        {"epochs": 50, "learning_rate": 1e-2, "rows": 96}
        if kind == "medusa"
        else {"epochs": 30, "learning_rate": 1e-2}
    )
    settings = dataclasses.replace(QUICK, evaluations=2, checkpoint_steps=1000, **pace)  # type: ignore[arg-type]
    trained = train(of, some, settings, tmp_path / "right")
    zeros = {name: torch.zeros_like(value) for name, value in of.start(0).items()}
    dead = validate(of, zeros, some)
    wrong = train(of, shuffled(some), settings, tmp_path / "wrong")
    assert trained.acceptance.length > 1.3
    assert trained.acceptance.length > dead.length + 0.2
    assert wrong.curve[-1]["acceptance_length"] < trained.acceptance.length - 0.2
    assert dead.rates[0] < 0.2


def test_early_stop_keeps_the_best(tmp_path: Path) -> None:
    settings = dataclasses.replace(QUICK, learning_rate=1.0, patience=1, evaluations=6)
    found = train(training("eagle"), examples(), settings, tmp_path / "c")
    assert found.stopped == "no better acceptance"
    assert found.acceptance.length == max(point["acceptance_length"] for point in found.curve)


# --------------------------------------------------------------------------- the folder


def test_a_run_writes_heads_that_say_what_they_are(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "m", vocab=320, hidden=32, layers=6, heads=4, kv_heads=2, dtype="bfloat16"
    )
    data = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"text": f"tell me about the number {i}"}) for i in range(24)]
    data.write_text("\n".join(lines))
    job = TrainingJob(
        "eagle3", folder, str(data), tmp_path / "heads", tmp_path / "work", vocab=64,
        answer_settings=dataclasses.replace(SETTINGS, max_prompt_tokens=64),
        train_settings=dataclasses.replace(QUICK, epochs=1),
    )  # fmt: skip
    made = run_training(job)
    assert read_record(tmp_path / "heads") == made
    assert (made.kind, made.draft_vocab_size, made.num_answers) == ("eagle3", 64, 23)
    model = load_model(folder, read_modelspec(folder), dtype=torch.bfloat16, device=CPU)
    assert len(load_eagle(tmp_path / "heads", "eagle3", model).token_ids) == 64
    with pytest.raises(InputError, match="exists"):
        run_training(job)
    assert "<svg" in curve_svg("eagle3", made.curve)
    assert "tokens per step" in curve_text("eagle3", made.curve)


RECIPE = """\
version: 1
name: tiny
model: {source: m}
backend: {kind: embedded, dtype: bfloat16, threads: 1}
limits: {max_batch_size: 8, max_input_tokens: 128, max_seq_tokens: 256, max_num_tokens: 128}
"""


def test_heads_of_a_recipe_imitate_its_target(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "m", vocab=320, hidden=32, layers=6, heads=4, kv_heads=2, dtype="bfloat16"
    )
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    engine = build(tmp_path / "recipe.yaml", tmp_path / "engines").folder
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"what is {i} times two"}) for i in range(12)))
    job = TrainingJob(
        "medusa", folder, str(data), tmp_path / "heads", tmp_path / "work", target_recipe=engine,
        answer_settings=dataclasses.replace(SETTINGS, max_prompt_tokens=64),
        train_settings=dataclasses.replace(QUICK, epochs=1),
    )  # fmt: skip
    made = run_training(job)
    assert made.target_recipe == open_artifact(engine).manifest.recipe_digest
    with pytest.raises(MissingError, match="is not built"):
        run_training(dataclasses.replace(job, target_recipe=tmp_path / "recipe.yaml", out=tmp_path / "other"))


def test_what_is_no_number_ranks_nothing() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [torch.nan] * 3, [torch.inf, 0.0, 0.0]])
    assert ranks_of(logits, torch.tensor([0, 2, 0, 0])).tolist() == [0, 2, 3, 3]

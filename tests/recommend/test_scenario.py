"""Scenarios and known models: what ships, what a user writes, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.cost.acceptance import TASKS
from trtspec.errors import InputError, MissingError
from trtspec.known_models import find_known, find_model, known_models
from trtspec.scenario import PRESETS, Scenario, describe_scenario, dump_scenario, load_scenario

DATA = Path(__file__).resolve().parents[2] / "trtspec" / "data" / "scenarios"


def test_every_preset_ships_and_gives_every_key() -> None:
    assert sorted(path.stem for path in DATA.glob("*.yaml")) == sorted(PRESETS)
    assert len(PRESETS) == 9
    for name in PRESETS:
        scenario = load_scenario(name)
        assert scenario.name == name
        assert scenario.description
        text = (DATA / f"{name}.yaml").read_text()
        assert text.startswith("# ")
        for key in Scenario.model_fields:
            assert f"{key}:" in text, (name, key)


def test_the_tasks_are_those_of_the_acceptance_priors() -> None:
    assert set(TASKS) == set(Scenario.model_json_schema()["properties"]["task"]["enum"])


def test_what_the_presets_are_for() -> None:
    exact = {name for name in PRESETS if load_scenario(name).fidelity == "exact"}
    assert exact == {"zero-tolerance", "medical-consult"}
    assert load_scenario("interactive").concurrency == 1
    assert load_scenario("high-throughput").concurrency >= 32
    assert (load_scenario("repetitive").copy_fraction or 0) >= 0.5
    assert {load_scenario(name).memory for name in ("memory-bound", "edge-8gb")} == {"tight"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_copy_that_is_changed_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_scenario(load_scenario(name)))
    assert load_scenario(str(path)) == load_scenario(name)
    path.write_text(path.read_text().replace("concurrency:", "concurrency: 7 #"))
    assert load_scenario(str(path)).concurrency == 7
    changed = load_scenario(str(path), {"slo": {"ttft_ms": 1.0}, "temperature": 1.0})
    assert (changed.slo.ttft_ms, changed.slo.tpot_ms) == (1.0, load_scenario(name).slo.tpot_ms)
    assert changed.temperature == 1.0


BAD = [
    ("concurrency: 0", "concurrency", "a whole number from 1 to 8192"),
    ("concurrency: many", "concurrency", "found 'many'"),
    ("fidelity: perfect", "fidelity", "one of exact, distribution, approximate"),
    ("copy_fraction: 1.5", "copy_fraction", "a number from 0 to 1, or null"),
    ("task: poetry", "task", "one of chat, code"),
    ("slo: {ttft: 3}", "slo.ttft", "did you mean ttft_ms?"),
    ("slo: 3", "slo", "a mapping with the keys ttft_ms, tpot_ms"),
    ("concurency: 3", "concurency", "did you mean concurrency?"),
]


@pytest.mark.parametrize(("line", "key", "says"), BAD)
def test_mistakes_in_a_file(line: str, key: str, says: str, tmp_path: Path) -> None:
    good = {"input_tokens": 5, "output_tokens": 5, "concurrency": 1, "fidelity": "exact"}
    rest = [f"{name}: {value}" for name, value in good.items() if not line.startswith(f"{name}:")]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join([line, *rest]) + "\n")
    with pytest.raises(InputError) as caught:
        load_scenario(str(path))
    (problem,) = caught.value.problems
    assert (problem.key, problem.line, problem.file) == (key, 1, str(path))
    assert says in problem.message


def test_all_mistakes_at_once_and_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        describe_scenario({"task": "x", "concurrency": -1})
    assert [problem.key for problem in caught.value.problems] == [
        "task", "input_tokens", "output_tokens", "concurrency", "fidelity",
    ]  # fmt: skip
    with pytest.raises(InputError, match="did you mean interactive"):
        load_scenario("interactve")
    with pytest.raises(InputError, match="No such file"):
        load_scenario(str(tmp_path / "none.yaml"))
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="a mapping"):
        load_scenario(str(tmp_path / "list.yaml"))
    (tmp_path / "big.yaml").write_text("#" * 200_000)
    with pytest.raises(InputError, match="larger than"):
        load_scenario(str(tmp_path / "big.yaml"))


# --------------------------------------------------------------------------- models


def test_the_numbers_of_the_table_give_the_published_sizes() -> None:
    """Billions of weights as their model cards say them: a wrong width or depth would show."""
    published = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": 0.135,
        "Qwen/Qwen3-0.6B": 0.6,
        "meta-llama/Llama-3.2-1B-Instruct": 1.24,
        "meta-llama/Llama-3.2-3B-Instruct": 3.21,
        "Qwen/Qwen3-4B": 4.02,
        "mistralai/Mistral-7B-Instruct-v0.3": 7.25,
        "meta-llama/Llama-2-7b-chat-hf": 6.74,
        "lmsys/vicuna-7b-v1.3": 6.74,
        "meta-llama/Llama-3.1-8B-Instruct": 8.03,
        "Qwen/Qwen3-8B": 8.19,
        "lmsys/vicuna-13b-v1.3": 13.0,
        "Qwen/Qwen3-14B": 14.8,
        "Qwen/Qwen3-32B": 32.8,
        "meta-llama/Llama-3.1-70B-Instruct": 70.6,
        "meta-llama/Llama-3.3-70B-Instruct": 70.6,
        "meta-llama/Llama-3.1-405B-Instruct": 406,
    }
    assert {model.id for model in known_models()} == set(published)
    for model in known_models():
        assert model.spec.num_parameters / 1e9 == pytest.approx(published[model.id], rel=0.01), model.id


def test_drafts_are_smaller_and_share_the_vocabulary() -> None:
    for model in known_models():
        if model.draft is not None:
            draft = find_known(model.draft)
            assert draft is not None
            assert draft.spec.vocab_size == model.spec.vocab_size
            assert draft.spec.num_parameters < model.spec.num_parameters / 5


def test_sizes_and_ids() -> None:
    for size in ("7B", "8B", "8b", "32B", "70B"):
        assert find_model(size).source == find_known(size.upper()).id  # type: ignore[union-attr]
    assert find_model("QWEN/qwen3-32b").source == "Qwen/Qwen3-32B"
    with pytest.raises(InputError, match="the nearest is 8B"):
        find_model("9B")
    with pytest.raises(MissingError, match="or name a known model"):
        find_model("nobody/nothing-8b")
    with pytest.raises(InputError, match="no such folder"):
        find_model("./nowhere/at/all")


def test_a_folder_counts_before_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "8B"
    folder.mkdir()
    with pytest.raises(InputError, match=r"config\.json"):
        find_model("8B", tmp_path)
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(InputError, match="GPT2LMHeadModel"):
        find_model("8B", tmp_path)

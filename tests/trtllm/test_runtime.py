"""Engines behind TensorRT-LLM's LLM: requests, streams, counts and errors, with a stand-in of it.

One file, because every test drives the same engine of the same stand-in, whose behaviour each sets otherwise.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import make_tiny_model

from trtspec.artifact import Artifact, open_artifact
from trtspec.backends import open_engine
from trtspec.build import build
from trtspec.cli import main
from trtspec.engine import Completion, Request, Sampling, Totals, generate
from trtspec.errors import InputError, MissingError
from trtspec.prompts import Prompt
from trtspec.recipe_file import parse_recipe
from trtspec.trtllm.facts import VERSIONS, load_facts
from trtspec.trtllm.opening import engine_options, llm_call
from trtspec.trtllm.runtime import (
    Iterations,
    TrtllmEngine,
    finish_of,
    sampling_arguments,
    totals_of,
    until_stop,
    with_iterations,
)
from trtspec.verify.gates import Verdict, exit_code
from trtspec.verify.gpu import check_acceptance, check_gpu, check_same
from trtspec.verify.settings import QUICK

STAND_IN = Path(__file__).parent / "stand_in"
RECIPE = """\
version: 1
name: tiny
model: {source: model}
backend: {kind: pytorch}
speculation: {kind: ngram, num_draft_tokens: 4}
limits: {max_batch_size: 4, max_input_tokens: 400, max_seq_tokens: 500, max_num_tokens: 512}
"""
LIMITS = "limits: {max_batch_size: 4, max_num_tokens: 512, max_seq_tokens: 256, max_input_tokens: 128}\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("runtime")
    make_tiny_model(folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE)
    return open_artifact(build(folder / "recipe.yaml", folder / "engines").folder)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        monkeypatch.delitem(sys.modules, name)


def install(site: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    info = site / f"tensorrt_llm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def trtllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, installed as 1.2.1; its behaviour."""
    install(tmp_path / "site", "1.2.1", monkeypatch)
    monkeypatch.syspath_prepend(STAND_IN)
    forget(monkeypatch)
    module = __import__("tensorrt_llm")
    yield module.behaviour
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def requests(count: int = 3, new_tokens: int = 20, **changes: Any) -> list[Request]:
    return [Request(str(i), (5 + i, 9, 40 + i), new_tokens, **changes) for i in range(count)]


def by_rule(request: Request) -> tuple[int, ...]:
    rule = sys.modules["tensorrt_llm"].next_token
    tokens = list(request.prompt_tokens)
    for _ in range(request.max_new_tokens):
        tokens.append(rule(tokens))
        if tokens[-1] in request.stop_tokens:
            break
    return tuple(tokens[len(request.prompt_tokens) :])


# --------------------------------------------------------------------------- mappings


def test_greedy_is_said_in_the_way_that_every_version_understands() -> None:
    told = sampling_arguments(Request("a", (1,), 7, stop_tokens=frozenset({9, 2})))
    assert told["top_k"] == 1
    assert "temperature" not in told
    assert told["max_tokens"] == 7
    assert told["stop_token_ids"] == [2, 9]
    assert told["end_id"] == -1, "no token ends an answer but the request's"
    assert told["include_stop_str_in_output"]
    assert told["return_perf_metrics"]


def test_sampling_states_what_it_leaves_whole() -> None:
    told = sampling_arguments(Request("a", (1,), 7, Sampling(temperature=0.7, seed=11)))
    assert (told["temperature"], told["top_k"], told["top_p"], told["seed"]) == (0.7, 0, 1.0, 11)
    assert told["stop_token_ids"] is None


def result(steps: int | None, drafted: int = 0, accepted: int = 0) -> Any:
    drafting = SimpleNamespace(total_draft_tokens=drafted, total_accepted_draft_tokens=accepted)
    metrics = SimpleNamespace(speculative_decoding=drafting)
    return SimpleNamespace(outputs=[SimpleNamespace(request_perf_metrics=metrics)], decoding_iter=steps)


def test_counts_are_told_derived_or_unknown_and_never_zero_for_unknown() -> None:
    assert totals_of(result(10, 30, 8), 18, speculates=True) == Totals(10, 30, 8)
    assert totals_of(result(10), 18, speculates=True) == Totals(10, None, 8), "1 + accepted/steps = 18/10"
    assert totals_of(result(None), 18, speculates=True) == Totals(None, None, None)
    assert totals_of(result(18), 18, speculates=False) == Totals(18, 0, 0)
    bare = SimpleNamespace(outputs=[SimpleNamespace()])
    assert totals_of(bare, 3, speculates=True) == Totals(None, None, None)


def test_finish_reasons_and_stop_tokens() -> None:
    assert [finish_of(reason) for reason in ("stop", "length", "cancelled")] == [
        "stop",
        "length",
        "cancelled",
    ]
    with pytest.raises(MissingError, match="timeout"):
        finish_of("timeout")
    assert until_stop((4, 2, 7), frozenset({2})) == ((4, 2), True)
    assert until_stop((4, 7), frozenset({2})) == ((4, 7), False)


def iteration(number: int, drafted: int | None = 4, accepted: int = 1) -> dict[str, Any]:
    drafting = {"numDraftTokens": drafted, "numAcceptedTokens": accepted}
    return {"iter": number, "specDecodingStats": None if drafted is None else drafting}


def test_iterations_add_up_and_a_missing_one_makes_the_sum_unknown() -> None:
    first = with_iterations(Iterations(), [iteration(7), json.dumps(iteration(8, None))])
    assert (first.last, first.drafted, first.accepted) == (8, 4, 1)
    assert with_iterations(first, [iteration(9)]).drafted == 8
    gap = with_iterations(first, [iteration(10)])
    assert (gap.drafted, gap.accepted) == (None, None)
    assert with_iterations(gap, [iteration(11)]).drafted is None, "for good"
    assert with_iterations(Iterations(), [iteration(0, None)]).drafted is None, "nothing on drafting"


# --------------------------------------------------------------------------- what LLM() is called with


@pytest.mark.parametrize("version", [v for v in VERSIONS if "pytorch" in load_facts(v).backends])
def test_the_llm_api_is_called_in_the_spelling_of_its_version(built: Artifact, version: str) -> None:
    call = llm_call(built, built.recipe, version)
    assert call.module == "tensorrt_llm"
    assert call.arguments["model"] == str(built.baseline_dir)
    assert call.arguments["speculative_config"]["decoding_type"] == "NGram"
    assert call.arguments["skip_tokenizer_init"] is True
    assert load_facts(version).check_keys("TorchLlmArgs", call.arguments) == []
    assert load_facts(version).check_keys("TorchLlmArgs", {**call.arguments, "drafts": 4}) != []


ENGINES = {
    "medusa": (
        "{kind: medusa, heads: h, choices: [[0], [1], [0, 0]]}",
        {"medusa_choices", "num_medusa_heads"},
    ),
    "eagle": (
        "{kind: eagle, heads: h, depth: 2, top_k: 4, num_draft_tokens: 16}",
        {"use_dynamic_tree", "dynamic_tree_max_topK"},
    ),
    "lookahead": ("{kind: lookahead}", {"max_window_size", "max_ngram_size"}),
    "none": ("{kind: none}", set()),
}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("version", ["0.21.0", "1.0.0", "1.1.0", "1.2.1"])
def test_an_engine_is_opened_with_its_way_of_drafting(built: Artifact, kind: str, version: str) -> None:
    section, keys = ENGINES[kind]
    recipe = recipe_of("tensorrt", section)
    call = llm_call(replace(built, recipe=recipe), recipe, version)
    assert call.module == ("tensorrt_llm" if version == "0.21.0" else "tensorrt_llm._tensorrt_engine")
    assert call.arguments["model"] == str(built.folder / "built" / "engine")
    assert keys <= set(call.arguments.get("speculative_config", {}))
    assert ("speculative_config" in call.arguments) == bool(keys)


def recipe_of(backend: str, speculation: str) -> Any:
    head = "version: 1\nname: x\nmodel: {source: a/b}\n"
    return parse_recipe(f"{head}backend: {{kind: {backend}}}\nspeculation: {speculation}\n{LIMITS}")


def test_kv_blocks_are_reused_only_where_the_context_kernel_reads_pages() -> None:
    for paged in (True, False):
        text = f"version: 1\nname: x\nmodel: {{source: a/b}}\nspeculation: {{kind: none}}\n{LIMITS}"
        backend = f"backend: {{kind: tensorrt, paged_context_fmha: {str(paged).lower()}}}\n"
        options = engine_options(parse_recipe(text + backend))
        assert options["kv_cache_config"] == {"enable_block_reuse": paged}


def test_what_llm_cannot_run_is_missing_with_the_way_that_can(built: Artifact) -> None:
    for section in ("{kind: ngram}", "{kind: draft_model, model: {source: a/d}}"):
        with pytest.raises(MissingError, match="tensorrt_llm_bls"):
            engine_options(recipe_of("tensorrt", section))
    medusa = recipe_of("tensorrt", ENGINES["medusa"][0])
    with pytest.raises(MissingError, match="built in"):
        llm_call(replace(built, recipe=medusa), recipe_of("tensorrt", "{kind: none}"), "1.2.1")
    with pytest.raises(MissingError, match=r"opens engines with TensorRT-LLM >=0\.21"):
        llm_call(replace(built, recipe=medusa), medusa, "0.17.0")
    with pytest.raises(InputError, match=r"the nearest is 1\.2\.1"):
        llm_call(built, built.recipe, "1.2.0")


# --------------------------------------------------------------------------- the engine


def test_answers_are_the_rules_with_and_without_drafts(built: Artifact, trtllm: Any) -> None:
    wanted = requests(stop_tokens=frozenset({2}))
    expected = [by_rule(request) for request in wanted]
    for variant, drafts in (("recipe", True), ("no_speculation", False)):
        engine = open_engine(built, variant)  # type: ignore[arg-type]
        answers = generate(engine, wanted)
        assert [one.tokens for one in answers] == expected
        assert all(bool(one.drafted) == drafts for one in answers)
        for one in answers:
            assert one.finish_reason == ("stop" if one.tokens[-1] == 2 else "length")
        stats = engine.stats()
        assert stats.generated_tokens == sum(map(len, expected))
        assert stats.drafted_tokens == sum(one.drafted or 0 for one in answers)
        assert stats.decode_steps == sum(one.steps or 0 for one in answers)
        assert engine.in_flight == 0
        assert engine.step() == []
        engine.close()
    assert trtllm.shut == 2
    assert "speculative_config" not in trtllm.opened[1]


def test_tokens_are_streamed_as_steps_made_them(built: Artifact, trtllm: Any) -> None:
    trtllm.step_s = 0.01
    engine = open_engine(built)
    engine.add(requests(1)[0])
    outputs = []
    while engine.in_flight:
        outputs += engine.step()
    assert len(outputs) > 3
    assert all(one.drafted is None and one.accepted is None for one in outputs), "counts are of requests"
    assert [one.totals is None for one in outputs] == [True] * (len(outputs) - 1) + [False]
    assert max(len(one.new_tokens) for one in outputs) > 1, "a step with accepted drafts"


def test_counts_that_are_not_told_stay_unknown(built: Artifact, trtllm: Any) -> None:
    trtllm.reports_drafts = False
    engine = open_engine(built)
    answer = generate(engine, requests(1))[0]
    assert answer.drafted is None
    assert answer.steps
    assert answer.accepted == len(answer.tokens) - answer.steps
    assert engine.stats().drafted_tokens is None
    trtllm.reports_steps = False
    unknown = generate(engine, requests(1))[0]
    assert (unknown.steps, unknown.drafted, unknown.accepted) == (None, None, None)


def test_iteration_statistics_tell_what_requests_do_not(built: Artifact, trtllm: Any) -> None:
    trtllm.reports_iterations = True
    engine = open_engine(built)
    by_requests = generate(engine, requests(1))[0]
    assert (engine.stats().drafted_tokens, engine.stats().pages_total) == (by_requests.drafted, 100)
    trtllm.reports_drafts = False
    generate(engine, requests(1))
    stats = engine.stats()
    assert by_requests.drafted is not None
    assert by_requests.accepted is not None
    assert (stats.drafted_tokens, stats.accepted_tokens) == (
        2 * by_requests.drafted,
        2 * by_requests.accepted,
    )


def test_a_stop_token_ends_an_answer_though_later_tokens_were_verified(built: Artifact, trtllm: Any) -> None:
    trtllm.merges = 4
    stop = by_rule(requests(1)[0])[6]
    answer = generate(open_engine(built), requests(1, stop_tokens=frozenset({stop})))[0]
    assert answer.tokens == by_rule(requests(1, stop_tokens=frozenset({stop}))[0])
    assert answer.finish_reason == "stop"


def test_a_cancelled_request_ends_at_the_next_step_and_its_neighbours_go_on(
    built: Artifact, trtllm: Any
) -> None:
    trtllm.step_s = 0.01
    engine = open_engine(built)
    wanted = requests(3, new_tokens=60)
    for request in wanted:
        engine.add(request)
    engine.cancel("nobody")
    engine.step()
    engine.cancel("1")
    last = [one for one in engine.step() if one.request_id == "1"]
    assert [(one.new_tokens, one.finish_reason) for one in last] == [((), "cancelled")]
    rest: dict[str, int] = {}
    while engine.in_flight:
        for output in engine.step():
            assert output.request_id != "1"
            rest[output.request_id] = 1
    assert set(rest) == {"0", "2"}
    engine.add(wanted[1])
    assert engine.in_flight == 1, "its id is free again"
    engine.close()
    assert engine.in_flight == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("0", (), 4), "empty"),
        (Request("0", (999,), 4), "token 999 is outside the vocabulary of 320"),
        (Request("0", (5,) * 401, 4), "up to 400"),
        (Request("0", (5,) * 400, 101), "exceed max_seq_tokens 500"),
        (Request("0", (5,), 0), "at least 1"),
    ],
)
def test_what_can_never_run_is_refused(built: Artifact, trtllm: Any, request_: Request, message: str) -> None:
    engine = open_engine(built)
    with pytest.raises(InputError, match=message):
        engine.add(request_)
    assert engine.in_flight == 0


def test_one_id_is_in_flight_once(built: Artifact, trtllm: Any) -> None:
    trtllm.step_s = 0.01
    engine = open_engine(built)
    engine.add(requests(1)[0])
    with pytest.raises(InputError, match="in flight"):
        engine.add(requests(1)[0])
    engine.close()


def test_failures_are_told_and_not_waited_for(built: Artifact, trtllm: Any) -> None:
    trtllm.fails_after = 2
    with pytest.raises(MissingError, match="failed on request 0: CUDA error"):
        generate(open_engine(built), requests(1))
    trtllm.fails_after, trtllm.silent = None, True
    module = sys.modules["tensorrt_llm"]
    llm = module.LLM(model=str(built.folder))
    engine = TrtllmEngine(
        llm,
        module.SamplingParams,
        vocab_size=320,
        max_input_tokens=9,
        max_seq_tokens=99,
        speculates=False,
        timeout_s=0.05,
    )
    engine.add(requests(1)[0])
    with pytest.raises(MissingError, match=r"nothing for 0\.05 s with 1 requests in flight"):
        engine.step()
    with pytest.raises(MissingError, match="no scores"):
        engine.score((1, 2))
    engine.close()


# --------------------------------------------------------------------------- opening


def test_environments_that_cannot_be_trusted_are_refused(
    built: Artifact, trtllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingError, match="has no dtype=float64"):
        open_engine(built, dtype="float64")
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "3")
    with pytest.raises(MissingError, match="accepted unseen; unset it"):
        open_engine(built)


def test_another_version_than_the_recipes_is_refused(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "1.0.0", monkeypatch)
    monkeypatch.syspath_prepend(STAND_IN)
    forget(monkeypatch)
    newer = built.recipe.model_copy(
        update={"backend": built.recipe.backend.model_copy(update={"version": ">=1.2,<1.5"})}
    )
    with pytest.raises(MissingError, match=r"wants TensorRT-LLM >=1.2,<1.5, here is 1.0.0"):
        open_engine(replace(built, recipe=newer))


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0.dev2026010100"])
def test_a_version_without_a_table_is_missing_with_the_nearest(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(tmp_path / "site", version, monkeypatch)
    monkeypatch.syspath_prepend(STAND_IN)
    forget(monkeypatch)
    with pytest.raises(MissingError, match=r"TensorRT-LLM version|the nearest is 1\.2\.1"):
        open_engine(built)


def test_the_stub_of_the_package_index_is_not_taken_for_tensorrt_llm(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "1.2.1", monkeypatch)
    (tmp_path / "site" / "tensorrt_llm").mkdir()
    (tmp_path / "site" / "tensorrt_llm" / "__init__.py").write_text("raise RuntimeError('stub')\n")
    forget(monkeypatch)
    with pytest.raises(
        MissingError, match=r"needs TensorRT-LLM and an NVIDIA GPU.*has no code: it is the stub"
    ):
        open_engine(built)


def test_options_that_llm_refuses_are_input_and_what_the_machine_lacks_is_missing(
    built: Artifact, trtllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tensorrt_llm.llmapi.llm_args.update_llm_args_with_extra_dict")
    with pytest.raises(
        InputError, match=r"TensorRT-LLM 1\.2\.1 refuses the engine's options: speculative_config"
    ):
        open_engine(built)
    gone = replace(built, baseline_dir=built.folder / "gone")
    with pytest.raises(MissingError, match="could not load the engine: no such model"):
        open_engine(gone, "no_speculation")


# --------------------------------------------------------------------------- verify


def verified(built: Artifact, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "report.json"
    code = main(["verify", str(built.folder), "--quick", "-o", str(path)])
    report = json.loads(path.read_text())
    return code, {check["name"]: check for check in report["checks"]}


def test_verify_measures_what_there_is_and_skips_the_rest(
    built: Artifact, trtllm: Any, tmp_path: Path
) -> None:
    code, checks = verified(built, tmp_path)
    assert {name: check["verdict"] for name, check in checks.items()} == {
        "lossless": "PASS",
        "lossless_float64": "SKIPPED",
        "sampled": "SKIPPED",
        "quality": "SKIPPED",
        "acceptance": "MEASURED",
        "speedup": "MEASURED",
    }
    assert code == 0
    counts = checks["acceptance"]["evidence"]
    assert counts["acceptance_length"] == pytest.approx(
        1 + counts["accepted"] / counts["decode_steps"], abs=0.1
    )
    assert trtllm.shut == len(trtllm.opened) == 2


def test_verify_does_not_call_a_difference_lossless(built: Artifact, trtllm: Any, tmp_path: Path) -> None:
    trtllm.keeps_wrong_drafts = True
    code, checks = verified(built, tmp_path)
    assert checks["lossless"]["verdict"] == "INCONCLUSIVE"
    assert "gives no scores" in checks["lossless"]["summary"]
    assert code != 0


def test_verify_sees_a_verification_that_accepts_everything(
    built: Artifact, trtllm: Any, tmp_path: Path
) -> None:
    trtllm.accepts_everything = True
    code, checks = verified(built, tmp_path)
    assert checks["acceptance"]["verdict"] == "ERROR"
    assert "NaN" in checks["acceptance"]["summary"]
    assert code == 1


def test_verify_takes_drafts_from_iteration_statistics(built: Artifact, trtllm: Any, tmp_path: Path) -> None:
    told = verified(built, tmp_path)[1]["acceptance"]["evidence"]
    trtllm.reports_drafts, trtllm.reports_iterations = False, True
    trtllm.iterations.clear()
    found = verified(built, tmp_path)[1]["acceptance"]
    assert found["evidence"]["drafted"] is None
    assert found["evidence"]["drafted_by_iterations"] == told["drafted"]
    assert "iteration statistics" in found["summary"]


def test_a_required_check_that_cannot_be_done_is_not_passed(
    built: Artifact, trtllm: Any, tmp_path: Path
) -> None:
    trtllm.reports_drafts = trtllm.reports_steps = False
    code, checks = verified(built, tmp_path)
    assert checks["acceptance"]["verdict"] == "SKIPPED"
    assert checks["lossless"]["verdict"] == "INCONCLUSIVE", (
        "identical, and nothing says that there were drafts"
    )
    assert code == 4


def checked(built: Artifact, recipe: Any, folder: Path) -> dict[str, Any]:
    """The checks of an engine in ``folder`` that runs ``recipe``."""
    artifact = replace(built, folder=folder, recipe=recipe)
    prompts = [Prompt(str(i), (5 + i, 9, 40 + i), "") for i in range(4)]
    quiet = lambda stage, done, total: None  # noqa: E731
    checks = check_gpu(artifact, prompts, frozenset({2}), QUICK, quiet, lossless="lossless")
    assert exit_code(checks) == 4
    return {check.name: check for check in checks}


def test_perplexity_is_skipped_and_its_gate_not_passed(built: Artifact, trtllm: Any, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    quantization = parse_recipe(RECIPE + "quantization: {kind: fp8}\n").quantization
    checks = checked(built, built.recipe.model_copy(update={"quantization": quantization}), tmp_path)
    assert checks["quality"].verdict is Verdict.SKIPPED
    assert checks["quality"].required
    assert "scores" in checks["quality"].summary
    assert checks["lossless"].verdict is Verdict.PASS
    assert checks["speedup_over_baseline"].verdict is Verdict.MEASURED
    assert [Path(one["model"]).name for one in trtllm.opened] == ["target", "target", "baseline"]


def test_sampled_answers_are_compared_from_outside(built: Artifact, trtllm: Any) -> None:
    prompts = [Prompt(str(i), (5 + i, 9, 40 + i), "") for i in range(2)]
    quiet = lambda stage, done, total: None  # noqa: E731
    settings = replace(QUICK, sampled_seconds=None)
    checks = check_gpu(built, prompts, frozenset({2}), settings, quiet, lossless="lossless")
    sampled = next(check for check in checks if check.name == "sampled")
    assert sampled.verdict is Verdict.PASS
    assert sampled.n == sampled.evidence["planned"]
    assert sampled.how.startswith("black box")
    trtllm.keeps_wrong_drafts = True
    checks = check_gpu(built, prompts, frozenset({2}), settings, quiet, lossless="lossless")
    assert [check.verdict for check in checks if check.name == "sampled"] == [Verdict.FAIL]


def test_an_engine_has_no_variant_to_compare_it_with(built: Artifact, trtllm: Any, tmp_path: Path) -> None:
    (tmp_path / "built" / "engine").mkdir(parents=True)
    checks = checked(built, recipe_of("tensorrt", "{kind: lookahead}"), tmp_path)
    for name in ("lossless", "speedup"):
        assert checks[name].verdict is Verdict.SKIPPED
        assert "built in" in checks[name].summary
    assert checks["lossless"].required
    assert checks["acceptance"].verdict is Verdict.MEASURED
    assert len(trtllm.opened) == 1


def test_its_chatter_is_not_in_what_verify_prints(
    built: Artifact, trtllm: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
    capfd.readouterr()
    assert main(["verify", str(built.folder), "--quick", "--json"]) == 0
    shown = capfd.readouterr()
    report = json.loads(shown.out)["report"]
    assert "TensorRT-LLM version" in shown.err
    assert "C++ part" in shown.err
    assert report["tools"]["tensorrt_llm"] == "1.2.1"
    assert report["machine"]["gpus"] == "none seen", "nvidia-smi is not here; the stand-in needs none"


def completion(
    tokens: int, steps: int | None, drafted: int | None = 9, accepted: int | None = 3
) -> Completion:
    return Completion("a", tuple(range(tokens)), "length", steps, drafted, accepted)


def test_impossible_counts_are_errors() -> None:
    def verdict(*answers: Completion) -> Verdict:
        return check_acceptance(answers, draft_limit=4, bound=1.5).verdict

    assert verdict(*[completion(20, 10)] * 12) is Verdict.PASS
    assert verdict(*[completion(20, 10)] * 2) is Verdict.INCONCLUSIVE, (
        "two that are alike may be so by chance"
    )
    assert verdict(completion(20, 21), completion(20, 21)) is Verdict.ERROR, "less than a token a step"
    assert verdict(completion(20, 3), completion(20, 3)) is Verdict.ERROR, "more than drafts allow"
    assert verdict(completion(20, 10, 3, 9), completion(20, 10, 3, 9)) is Verdict.ERROR
    assert verdict(completion(20, 10), completion(20, None)) is Verdict.SKIPPED


def test_equal_answers_without_drafts_prove_little() -> None:
    answers = [completion(8, 8, 0, 0)]
    floor = (answers, answers)
    assert check_same("lossless", answers, answers, floor, drafts=3, required=True).verdict is Verdict.PASS
    for drafts in (0, None):
        check = check_same("lossless", answers, answers, floor, drafts=drafts, required=True)
        assert check.verdict is Verdict.INCONCLUSIVE
    other = [completion(7, 7)]
    assert (
        check_same("lossless", answers, other, floor, drafts=3, required=True).verdict is Verdict.INCONCLUSIVE
    )

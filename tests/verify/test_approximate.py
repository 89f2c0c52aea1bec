"""An approximate acceptance is judged by what it writes, never called lossless, and an acceptance that keeps
anything fails."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from built_tiny import build_tiny, repetitive_prompts, write_jsonl

from trtspec.artifact import Artifact
from trtspec.backends import open_engine
from trtspec.cli import main
from trtspec.embedded.acceptance import Accepted
from trtspec.embedded.drafters.planned import drafting_by_plan
from trtspec.embedded.sampling import Draw, TargetLaw
from trtspec.embedded.tree import Draft, path_to
from trtspec.engine import Engine
from trtspec.errors import InputError
from trtspec.prompts import Prompt
from trtspec.ruler import Answer, Run, run
from trtspec.verify.approximate import (
    MIN_PROMPTS,
    REPETITION_MARGIN,
    Sampled,
    check_approximate,
    judge_approximate,
    perplexity_over,
    repeated_grams,
    repetition_over,
    sampled_requests,
    score_answers,
)
from trtspec.verify.faults import Altered, counts_double
from trtspec.verify.gates import Check, Verdict, exit_code
from trtspec.verify.settings import QUICK

APPROXIMATE = "{lossless: false}\nacceptance: {kind: typical}"


def accept_anything(draft: Draft, law: TargetLaw, draw: Draw, **_options: float) -> Accepted:
    """The whole first branch of the draft, whatever the target thinks of it."""
    last = len(draft) - 1
    return Accepted(path_to(draft, last), law.sample(last + 1, draw))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return build_tiny(tmp_path_factory.mktemp("typical"), gates=APPROXIMATE)


@pytest.fixture(scope="module")
def plain(built: Artifact) -> Engine:
    return open_engine(built, "no_speculation")


def prompts(count: int = 12) -> list[Prompt]:
    return repetitive_prompts(count)


def check(
    engine: Engine, plain: Engine, count: int = 12, margin: float | None = None, draft_limit: int = 3
) -> list[Check]:
    return check_approximate(
        engine,
        plain,
        prompts(count),
        samples=2,
        max_new_tokens=24,
        temperature=0.5,
        stop_tokens=frozenset(),
        draft_limit=draft_limit,
        margin=margin,
    )


# --------------------------------------------------------------------------- with engines


def test_strict_acceptance_in_its_place_passes_both_gates(built: Artifact, plain: Engine) -> None:
    """``exact`` with the seeds of plain sampling draws the same tokens: ratio 1, excess 0."""
    engine: Any = open_engine(built)
    engine._accept = lambda draft, law, draw: Accepted((), law.sample(0, draw))
    likelihood, repetition = check(engine, plain, count=QUICK.sampled_prompts)
    assert (likelihood.verdict, repetition.verdict) == (Verdict.PASS, Verdict.PASS)
    assert likelihood.measured == pytest.approx(1.0, abs=1e-6)
    assert repetition.measured == 0.0
    # Of twelve prompts one in five may be spoilt unseen.
    assert check(engine, plain)[1].verdict is Verdict.INCONCLUSIVE


def test_typical_acceptance_runs_and_is_judged(built: Artifact, plain: Engine) -> None:
    likelihood, repetition = check(open_engine(built), plain)
    for one in (likelihood, repetition):
        assert one.required
        assert one.evidence["fidelity"] == "approximate"
        assert one.evidence["drafted"] > one.evidence["accepted"] > 0
        assert one.n == 12
    assert likelihood.bound == 1.25
    assert likelihood.evidence["margin_from"] == "default"
    assert check(open_engine(built), plain, margin=1.4)[0].bound == 1.4


def test_an_acceptance_of_anything_fails_the_likelihood_gate(built: Artifact, plain: Engine) -> None:
    engine: Any = open_engine(built)
    engine._accept = accept_anything
    likelihood, _ = check(engine, plain)
    assert likelihood.verdict is Verdict.FAIL, likelihood.summary
    assert exit_code([likelihood]) == 1


def test_an_acceptance_of_anything_that_repeats_itself_fails_too(built: Artifact, plain: Engine) -> None:
    """On a real model such text is likely, so likelihood alone would pass it."""
    engine: Any = open_engine(built)
    engine._accept = accept_anything
    loops = {(f"p{i}#{j}", k): (11,) * 6 for i in range(12) for j in range(2) for k in range(64)}
    with drafting_by_plan(engine, loops):
        _, repetition = check(engine, plain, draft_limit=6)
    assert repetition.verdict is Verdict.FAIL, repetition.summary
    assert repetition.measured is not None
    assert repetition.measured > REPETITION_MARGIN


def test_too_few_prompts_or_no_drafts_decide_nothing(built: Artifact, plain: Engine) -> None:
    for one in check(open_engine(built), plain, count=MIN_PROMPTS - 1):
        assert one.verdict is Verdict.INCONCLUSIVE
        assert f"at least {MIN_PROMPTS} are needed" in one.summary
    for one in check(plain, plain):
        assert one.verdict is Verdict.INCONCLUSIVE
        assert "nothing was drafted" in one.summary


def test_scores_are_those_of_the_answer_alone(plain: Engine) -> None:
    requests = sampled_requests(
        prompts(2), samples=2, max_new_tokens=8, temperature=0.7, stop_tokens=frozenset()
    )
    assert len({request.sampling.seed for request in requests}) == 4
    answers = run(plain, requests, draft_limit=0).answers
    scored = score_answers(plain, prompts(2), answers)
    assert scored.tokens().tolist() == [16, 16]
    whole = plain.score((*requests[3].prompt_tokens, *answers[3].tokens)).logprobs
    assert scored.logprobs[1][1] == pytest.approx(sum(whole[-8:]))


# --------------------------------------------------------------------------- the judgement


def made(per_token: list[float], tokens: tuple[int, ...] = tuple(range(20))) -> Sampled:
    answer = Answer("x", tokens, "length", (1,) * len(tokens), 0, 0)
    return Sampled(tuple((answer,) for _ in per_token), tuple((value * len(tokens),) for value in per_token))


DRAFTED = Run((Answer("x", (1, 2), "length", (2,), 4, 1),), 1.0, 2, ())


def test_the_ratio_is_of_perplexities_and_its_interval_is_paired() -> None:
    chance = random.Random(1)
    level = [-chance.uniform(1, 5) for _ in range(30)]
    ratio, (low, high) = perplexity_over(made([value - 0.1 for value in level]), made(level))
    assert ratio == pytest.approx(math.exp(0.1))
    assert low == pytest.approx(high), "the same difference in every prompt: no spread, whatever the levels"


def test_repeated_grams_are_counted_within_an_answer() -> None:
    assert repeated_grams((1, 2, 3, 4, 5)) == (0, 2)
    assert repeated_grams((1, 1, 1, 1, 1, 1)) == (2, 3)
    assert repeated_grams((1, 2)) == (0, 0)
    loops = made([-1.0] * 10, (1, 2) * 10)
    share, excess, interval = repetition_over(loops, made([-1.0] * 10))
    assert share == excess == pytest.approx(15 / 17)
    assert interval[0] < share < interval[1]
    assert repetition_over(loops, loops)[2] == pytest.approx((0.025**0.1 - 1, 1 - 0.025**0.1))


@pytest.mark.parametrize(
    ("shift", "spread", "verdict"),
    [(0.0, 0.01, Verdict.PASS), (0.6, 0.01, Verdict.FAIL), (0.1, 0.8, Verdict.INCONCLUSIVE)],
)
def test_non_inferiority(shift: float, spread: float, verdict: Verdict) -> None:
    chance = random.Random(3)
    noise = [chance.gauss(0, spread) for _ in range(16)]
    approximate = made([-2.0 - shift - value for value in noise])
    checks = judge_approximate(approximate, made([-2.0] * 16), DRAFTED, temperature=1.0, margin=1.25)
    assert checks[0].verdict is verdict
    if verdict is Verdict.INCONCLUSIVE:
        assert "prompts would decide" in checks[0].summary


def test_text_that_is_likely_because_it_repeats_is_caught_by_the_second_gate() -> None:
    checks = judge_approximate(
        made([-0.2] * 16, (5, 6, 7) * 7), made([-2.0] * 16), DRAFTED, temperature=1.0, margin=None
    )
    assert [one.verdict for one in checks] == [Verdict.PASS, Verdict.FAIL]


def test_a_reference_that_miscounts_voids_both(built: Artifact, plain: Engine) -> None:
    for one in check(open_engine(built), Altered(plain, change_stats=counts_double)):
        assert one.verdict is Verdict.ERROR
        assert one.required


def test_counts_that_contradict_each_other_void_both() -> None:
    wrong = Run(DRAFTED.answers, 1.0, 2, ("x: odd",))
    for one in judge_approximate(made([-2.0] * 16), made([-2.0] * 16), wrong, temperature=1.0, margin=None):
        assert one.verdict is Verdict.ERROR


# --------------------------------------------------------------------------- the verb


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(1)
    words = ["tea", "or", "noise", "rain", "the", "lesson", "is", "here", "that", "one"]
    asked = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": " ".join(chance.sample(words, 3) * 2)}]}
        for i in range(40)
    ]
    texts = [{"text": " ".join(chance.choices(words, k=12))} for _ in range(8)]
    return write_jsonl(folder / "prompts.jsonl", asked), write_jsonl(folder / "heldout.jsonl", texts)


def verify(built: Artifact, data: tuple[Path, Path], *more: str) -> int:
    files = ("--prompts", str(data[0]), "--heldout", str(data[1]))
    return main(["verify", str(built.folder), *files, "--quick", "--max-new-tokens", "24", *more])


def test_an_approximate_engine_is_called_nothing_else(
    built: Artifact,
    data: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["pytest"]
    )  # the report has the command, which may name other test files
    output, page = tmp_path / "r.json", tmp_path / "r.md"
    verify(built, data, "-o", str(output), "--markdown", str(page))
    shown = capsys.readouterr().out
    value = json.loads(output.read_text())
    assert value["fidelity"] == "approximate"
    names = [one["name"] for one in value["checks"]]
    assert names[:4] == ["approximate_likelihood", "approximate_repetition", "greedy", "greedy_float64"]
    assert not [name for name in names if "lossless" in name]
    assert [one["name"] for one in value["checks"] if one["required"]] == names[:2]
    assert "approximate" in shown.splitlines()[0]
    assert ", approximate (" in shown.splitlines()[-2]
    assert "fidelity of sampled output: approximate" in page.read_text()
    # The word stands only in the name of the pitfall and in its answer, that nothing is called so.
    pitfall = ("lazy-lossless", "nothing is called lossless")
    for text in (shown, page.read_text()):
        for words in pitfall:
            text = text.replace(words, "")
        assert "lossless" not in text


def test_a_strict_engine_is_labelled_strict(
    tmp_path: Path, data: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(build_tiny(tmp_path / "strict"), data, "--json") == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["fidelity"] == "strict"
    assert "lossless" in [one["name"] for one in report["checks"]]


def test_a_gate_on_losslessness_cannot_be_had_for_it(tmp_path: Path, data: tuple[Path, Path]) -> None:
    """Lint refuses it; the verb has no such check to pass in any case."""
    with pytest.raises(InputError, match="changes the output"):
        build_tiny(tmp_path / "claims", gates="{lossless: true}\nacceptance: {kind: typical}")


def test_an_acceptance_of_anything_exits_1(
    built: Artifact,
    data: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("trtspec.embedded.opening.typical", accept_anything)
    assert verify(built, data, "--temperature", "0.5") == 1
    shown = capsys.readouterr().out
    assert "FAIL          approximate_" in shown
    assert "PASS          greedy_float64" in shown, "greedy requests never use it"


def test_build_and_inspect_say_approximate(built: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(built.folder.parent.parent / "recipe.yaml")
    assert main(["build", recipe, "-o", str(built.folder.parent), "--dry-run"]) == 0
    assert "drafting: ngram, typical acceptance (approximate)" in capsys.readouterr().out
    assert main(["build", recipe, "-o", str(built.folder.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"] == "approximate"
    assert main(["inspect", str(built.folder)]) == 0
    assert "typical acceptance (approximate)" in capsys.readouterr().out
    assert main(["inspect", str(built.folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fidelity"] == "approximate"
    assert main(["list", "--engines-dir", str(built.folder.parent)]) == 0
    assert "typical acceptance (approximate)" in capsys.readouterr().out

"""Two engines of one model: which question they answer, what is refused, and that a broken pair is caught."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from built_tiny import build_tiny, write_jsonl

from trtspec.artifact import Artifact
from trtspec.cli import main
from trtspec.embedded import specimen
from trtspec.errors import InputError
from trtspec.prompts import Prompt
from trtspec.ruler import Answer, Run, run
from trtspec.verify import html, render
from trtspec.verify.faults import Altered
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.i18n import check_title, speaker
from trtspec.verify.lossless import check_lossless, requests_for
from trtspec.verify.pair import pair_of
from trtspec.verify.recheck import rejudge
from trtspec.verify.report import check_fields
from trtspec.verify.report_file import read_report
from trtspec.verify.settings import Settings
from trtspec.verify.versus import against_other, check_acceptances, check_drafts

LOOKAHEAD = "{kind: lookahead}"
PLAIN = "{kind: none}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Engines of one model: by n-gram, by lookahead, without drafts, and in 16 bit."""
    folder = tmp_path_factory.mktemp("pair")
    gates = "{min_speedup_over_baseline: 0.001}"
    kinds = {
        "ngram": {"gates": gates},
        "lookahead": {"speculation": LOOKAHEAD},
        "plain": {"speculation": PLAIN},
        "bfloat16": {"dtype": "bfloat16"},
        "other model": {"seed": 1},
    }
    return {name: build_tiny(folder / name, **given) for name, given in kinds.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    chance = random.Random(1)
    words = ["tea", "or", "noise", "rain", "the", "lesson", "is", "here", "that", "one"]
    contents = [" ".join(chance.sample(words, 3) * 2) for _ in range(4)]
    prompts = [{"id": f"q{i}", "prompt": text} for i, text in enumerate(contents)]
    texts = [{"text": " ".join(chance.choices(words, k=12))} for _ in range(8)]
    files = write_jsonl(folder / "p.jsonl", prompts), write_jsonl(folder / "t.jsonl", texts)
    return ["--prompts", str(files[0]), "--heldout", str(files[1]), "--quick", "--max-new-tokens", "12"]


def verified(
    folder: Path, engine: Artifact, other: Artifact, data: list[str], *more: str
) -> tuple[int, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    given = ["verify", str(engine.folder), "--baseline", str(other.folder), *data, "--no-sampled", *more]
    code = main([*given, "-o", str(folder / "r.json"), "--bundle", str(folder / "b")])
    return code, json.loads((folder / "r.json").read_text())


def test_two_ways_of_drafting(tmp_path, built, data, capsys):
    code, value = verified(tmp_path, built["ngram"], built["lookahead"], data)
    checks = {one["name"]: one for one in value["checks"]}
    assert code == 0, capsys.readouterr()
    assert value["other"]["question"] == "speculation"
    assert value["other"]["recipe_digest"] == built["lookahead"].manifest.recipe_digest
    for name in (
        "lossless",
        "lossless_float64",
        "other.lossless",
        "other.lossless_float64",
        "vs_other.identity",
    ):
        assert (checks[name]["verdict"], checks[name]["required"]) == ("PASS", True), name
    assert set(checks["vs_other.acceptance"]["evidence"]["acceptance_length"]) == {"recipe", "other"}
    assert checks["vs_other.speedup"]["required"]
    assert checks["vs_other.speedup"]["bound"] == 0.001
    assert checks["other.speedup"]["verdict"] == "MEASURED"
    assert "speedup_over_baseline" not in checks
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 0
    told = json.loads((tmp_path / "b" / "report.json").read_text())
    told["other"]["question"] = "quality"
    (tmp_path / "b" / "report.json").write_text(json.dumps(told))
    capsys.readouterr()
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 1
    assert "other.question: not what the two targets make it" in capsys.readouterr().out
    report = read_report(tmp_path / "r.json")
    for lang in ("en", "zh"):
        for text in (
            render.terminal(report, lang=lang),
            render.markdown(report, lang),
            html.page(report, lang),
        ):
            assert str(built["lookahead"].folder) in text
            assert "vs_other" in text
        assert all(check_title(check.name, speaker(lang)) for check in report.checks)


def test_another_arithmetic_is_a_question_of_quality(tmp_path, built, data, capsys):
    """Gates of quality hold against OTHER, and nothing that is said of it speaks of a 16-bit baseline."""
    rows = [{"kind": "choice", "prompt": "", "choices": [f"a{n}", f"b{n}"], "answer": 0} for n in range(20)]
    own = write_jsonl(tmp_path / "own.jsonl", rows)
    more = ["--tasks", str(own), "--retrieval", "--lang", "zh"]
    code, value = verified(tmp_path, built["ngram"], built["bfloat16"], data, *more)
    assert code == 0, capsys.readouterr()
    assert value["other"]["question"] == "quality"
    checks = {one["name"]: one for one in value["checks"]}
    assert checks["vs_other.quality"]["bound"] == 1.25
    assert checks["vs_other.quality"]["required"]
    assert checks["lossless_float64"]["verdict"] == "PASS"
    wanted = {"mean_kl", "p99_kl", "same_top_token", "task:own", "retrieval", "degenerate_text", "speedup"}
    assert {f"vs_other.{name}" for name in wanted} <= set(checks)
    about = [one for name, one in checks.items() if name.startswith("vs_other.")]
    texts = [
        text for one in about for text in (one["summary"], one["how"], *one["warnings"], *one["details"])
    ]
    assert not [text for text in texts if "baseline" in text]
    assert "KL(OTHER || ENGINE)" in checks["vs_other.mean_kl"]["summary"]
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 0
    # Another gate in the records than the recipe's is seen through the wrapping, too.
    manifest = tmp_path / "b" / "manifest.json"
    content = json.loads(manifest.read_text())
    entry = next(one for one in content["judged"] if one["checks"] == ["vs_other.quality"])
    entry["arguments"]["arguments"]["bound"] = 9.0
    manifest.write_text(json.dumps(content))
    assert main(["report", "--recheck", str(tmp_path / "b")]) == 1


@pytest.mark.parametrize(
    ("engine", "other", "told"),
    [
        ("ngram", "ngram", "is ENGINE itself"),
        ("ngram", "other model", "another checkpoint"),
        ("plain", "plain again", "neither speculates"),
    ],
)
def test_pairs_that_answer_nothing(tmp_path, built, engine, other, told):
    second = built.get(other) or build_tiny(tmp_path / "again", speculation=PLAIN)
    with pytest.raises(InputError, match=told):
        pair_of(built[engine], second, Settings())


def test_what_is_refused_before_anything_is_loaded(built, data, capsys):
    pair = ["verify", str(built["ngram"].folder), "--baseline", str(built["lookahead"].folder)]
    for more, told in (
        (["--tasks", "builtin", "--retrieval"], "--tasks, --retrieval would compare it with itself"),
        (["--against", "r.json"], "are two comparisons"),
    ):
        assert main([*pair, *more]) == 2
        error = capsys.readouterr().err
        assert told in error
        assert "loading" not in error
    assert main(["verify", "--baseline", str(built["ngram"].folder)]) == 2
    assert main(["verify", "--url", "http://a", "--baseline-url", "http://b", "--baseline", "x"]) == 2


def test_engines_of_a_gpu_are_refused(built):
    from trtspec.recipe import PytorchBackend

    recipe = built["ngram"].recipe.model_copy(update={"backend": PytorchBackend(kind="pytorch")})
    with pytest.raises(InputError, match="--baseline-url"):
        pair_of(built["ngram"], dataclasses.replace(built["lookahead"], recipe=recipe), Settings())


# --------------------------------------------------------------------------- teeth


PROMPTS = [
    Prompt(f"p{number}", tuple(random.Random(number).randrange(specimen.VOCAB) for _ in range(8)))
    for number in range(5)
]


def drafts(
    built: dict[str, Artifact], other: Any, *, before: Callable[[], None] = lambda: None
) -> dict[str, Check]:
    """The checks of a sound ENGINE against the engine ``other``, said to hold the same target. ``before`` it
    runs, a fault may be planted."""
    with specimen.one_thread():
        plain = specimen.open_specimen()
        limit = specimen.DRAFT_TOKENS
        identity = check_lossless(
            specimen.open_specimen(specimen.model_drafter()),
            plain,
            PROMPTS,
            max_new_tokens=24,
            stop_tokens=frozenset(),
            draft_limit=limit,
            dtype="float64",
            speculates=True,
            required=True,
            noise_texts=0,
        )
        before()
        theirs = run(other, requests_for(PROMPTS, 24, frozenset()), draft_limit=limit)
        claimed = pair_of(built["ngram"], built["lookahead"], Settings())
        recipe = built["ngram"].recipe
        found = check_drafts(claimed, recipe, plain, PROMPTS, identity, theirs, proof=None, own_proof=None)
    return {check.name: check for check in found}


def test_an_other_that_accepts_everything_is_caught(built, monkeypatch):
    sound = drafts(built, specimen.open_specimen(specimen.model_drafter()))
    assert {one.verdict for one in sound.values()} == {Verdict.PASS, Verdict.MEASURED}
    other = specimen.open_specimen(specimen.model_drafter())
    with monkeypatch.context() as patched:
        fault = "trtspec.embedded.engine.exact", specimen.accept_always
        found = drafts(built, other, before=lambda: patched.setattr(*fault))
    for name in ("other.lossless", "vs_other.identity"):
        assert (found[name].verdict, found[name].required) == (Verdict.FAIL, True)
        (again,) = rejudge(found[name].records)
        assert check_fields(again) == check_fields(found[name])


def test_an_other_that_accepts_everything_fails_the_report(tmp_path, built, data, monkeypatch, capsys):
    """ENGINE drafts nothing, so only OTHER meets the fault. Without it the same pair passes."""
    assert verified(tmp_path / "sound", built["plain"], built["ngram"], data)[0] == 0
    monkeypatch.setattr("trtspec.embedded.engine.exact", specimen.accept_always)
    code, value = verified(tmp_path / "broken", built["plain"], built["ngram"], data)
    assert code == 1, capsys.readouterr()
    checks = {one["name"]: one["verdict"] for one in value["checks"]}
    assert checks["lossless"] == "PASS"
    assert checks["other.lossless"] == checks["other.lossless_float64"] == "FAIL"
    assert checks["vs_other.identity"] == checks["vs_other.acceptance"] == "SKIPPED"


def test_a_target_that_is_only_said_to_be_the_same_is_caught(built):
    """OTHER with a quantized head, or other weights, claimed to hold ENGINE's target."""
    for model in (specimen.specimen(head_bits=3), specimen.specimen(seed=1)):
        other = specimen.open_specimen(specimen.model_drafter(), model=model)
        found = drafts(built, other)
        assert found["other.lossless"].verdict is Verdict.FAIL
        assert found["vs_other.identity"].verdict is Verdict.FAIL
        assert found["vs_other.identity"].required


def test_an_other_that_counts_more_than_it_says_is_caught(built):
    def doubled(stats: Any) -> Any:
        return dataclasses.replace(stats, generated_tokens=2 * stats.generated_tokens)

    other = Altered(specimen.open_specimen(specimen.model_drafter()), change_stats=doubled)
    found = drafts(built, other)
    assert (found["vs_other.acceptance"].verdict, found["vs_other.acceptance"].required) == (
        Verdict.ERROR,
        True,
    )


# --------------------------------------------------------------------------- acceptance


def answer(name: str, emitted: list[int], drafted: int = 3) -> Answer:
    accepted = sum(min(one - 1, drafted) for one in emitted)
    steps = len(emitted)
    return Answer(
        name,
        tuple(range(sum(emitted))),
        "length",
        tuple(emitted),
        drafted * steps,
        accepted,
        (drafted,) * steps,
    )


def a_run(*emitted: list[int]) -> Run:
    return Run(tuple(answer(f"p{number}", one) for number, one in enumerate(emitted)), 1.0, 0, ())


def test_acceptance_side_by_side_by_hand():
    mine, other = a_run([1, 2, 4, 1], [3, 3]), a_run([1, 1, 2, 4], [2, 2, 2])
    check = check_acceptances(mine, other, draft_limits=(3, 3))
    assert check.measured == pytest.approx(14 / 6 - 14 / 7)
    first, second, third = check.evidence["acceptance_by_position"]
    assert first["recipe"] == {"steps": 6, "accepted": 4 / 6}
    assert first["other"] == {"steps": 7, "accepted": 5 / 7}
    assert first["difference"] == pytest.approx(4 / 6 - 5 / 7)
    assert second["recipe"] == {"steps": 4, "accepted": 3 / 4}
    assert third["recipe"] == {"steps": 3, "accepted": 1 / 3}
    assert third["other"] == {"steps": 1, "accepted": 1.0}
    (again,) = rejudge(check.records)
    assert check_fields(again) == check_fields(check)


def test_two_equal_sides_differ_by_nothing():
    same = a_run([1, 2, 4, 1], [3, 3], [1, 1])
    check = check_acceptances(same, same, draft_limits=(3, None))
    assert check.measured == 0
    assert check.interval == (0.0, 0.0)
    assert all(one["difference"] == 0 for one in check.evidence["acceptance_by_position"])


@pytest.mark.parametrize("broken", ["too long", "other prompts", "contradicts"])
def test_acceptance_that_cannot_be_is_an_error(broken):
    mine, other = a_run([1, 2], [3, 3]), a_run([2, 2], [2, 2])
    limits = (3, 0) if broken == "too long" else (3, 3)
    if broken == "other prompts":
        other = dataclasses.replace(other, answers=other.answers[::-1])
    if broken == "contradicts":
        other = dataclasses.replace(other, contradictions=("p0: 3 tokens accepted of 2 drafted",))
    check = check_acceptances(mine, other, draft_limits=limits)
    assert (check.verdict, check.required) == (Verdict.ERROR, True)


def test_checks_of_one_judge_keep_one_record():
    from trtspec.verify.divergence import judge_divergence

    rows = [
        {"text": n, "position": i, "target": -1.0, "baseline": -1.1, "same_top": True, "kl": 0.01}
        for n in range(8)
        for i in range(4)
    ]
    found = judge_divergence(rows, max_mean_kl=0.1, max_p99_kl=None, min_same_top_token=0.5, source="ours")
    wrapped = against_other(found)
    assert len({id(check.records) for check in wrapped}) == 1
    assert [check.name for check in wrapped] == [
        "vs_other.mean_kl",
        "vs_other.p99_kl",
        "vs_other.same_top_token",
    ]
    assert [check_fields(one) for one in rejudge(wrapped[0].records)] == [
        check_fields(one) for one in wrapped
    ]

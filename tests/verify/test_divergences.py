"""What the report tells a reader of every divergence, of their rate and of the baseline's own."""

from __future__ import annotations

from pathlib import Path

import built_tiny
import pytest
from built_tiny import build_tiny, repetitive_prompts

from trtspec.backends import open_engine
from trtspec.verify.faults import Altered
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.lossless import check_lossless
from trtspec.verify.lossless_verdict import FAULT, Comparison, Divergence, Noise, judge

NOISE = Noise(0.08, 0.1, 0.03, 500, {"1": 0.1})


def judged(*divergences: Divergence, floor: tuple[Divergence, ...] = ()) -> Check:
    return judge(
        "lossless",
        Comparison(100, max(4, len(divergences)), divergences),
        NOISE,
        Comparison(40, 3, floor),
        dtype="bfloat16",
        drafted=4,
        accepted=2,
        speculates=True,
        required=True,
        contradictions=(),
    )


def test_every_divergence_is_told_with_place_texts_and_margin() -> None:
    divergences = (
        Divergence("a", 3, 1, 2, gap_nats=0.05, margin=0.04, reference_text=" tea", other_text=" rain"),
        Divergence("b", 9, 7, 8, gap_nats=0.06, margin=0.06, reference_text="\ufffd", other_text="\ufffd"),
        Divergence("c", 5, 7, None),
    )
    lines = judged(*divergences).details
    assert lines[0] == "c, token 5: ends early"
    assert lines[1] == "a, token 3: ' rain' instead of ' tea', top-2 margin 0.04, gap 0.05: near tie"
    assert "token 8 instead of token 7" in lines[2], "bytes of a character have no text to tell them by"
    assert lines[3].startswith("mismatch rate: 3 of 100 compared tokens, below 7.5")


def test_identical_answers_bound_the_rate_by_the_rule_of_three() -> None:
    line, _ = judged().details
    bound = float(line.split("below ")[1].split("%")[0]) / 100
    assert bound == pytest.approx(1 - 0.05**0.01, abs=1e-4)
    assert bound < 3 / 100
    assert line.endswith("(less than 3/n)")


def test_the_baselines_own_divergence_is_told_beside_it() -> None:
    own = Divergence("a", 2, 1, 2, gap_nats=0.05, margin=0.05, reference_text="x", other_text="y")
    check = judged(floor=(own,))
    *_, told, where = check.details
    assert told == (
        "without speculation, batch 1 against all 4 prompts together: 1 of 3 answers differ (40 tokens)"
    )
    assert where == "there, a, token 2: 'y' instead of 'x', top-2 margin 0.05, gap 0.05: near tie"


@pytest.mark.parametrize(
    ("own", "proof", "verdict", "result"),
    [
        (0, None, Verdict.FAIL, "more ties than the floor"),
        (0, "lossless_float64", Verdict.INCONCLUSIVE, "more ties than the floor"),
        (4, None, Verdict.PASS, "numeric ties only"),
        (4, "lossless_float64", Verdict.PASS, "numeric ties only"),
    ],
)
def test_ties_are_only_ties_while_there_are_no_more_than_the_floor_has(own, proof, verdict, result) -> None:
    """An acceptance that keeps every near tie has each of its divergences within the noise."""

    def ties(count: int) -> tuple[Divergence, ...]:
        return tuple(Divergence(f"p{i}", 3, 1, 2, gap_nats=0.05) for i in range(count))

    check = judge(
        "lossless", Comparison(100, 12, ties(10)), NOISE, Comparison(60, 6, ties(own)), dtype="bfloat16",
        drafted=40, accepted=20, speculates=True, required=True, contradictions=(), proof=proof,
    )  # fmt: skip
    assert (check.verdict, check.evidence["result"]) == (verdict, result)
    assert check.required == (verdict is not Verdict.INCONCLUSIVE)
    assert ("numeric ties only: " in check.summary) == (verdict is Verdict.PASS)
    assert ("more of them than without speculation" in check.summary) == (verdict is not Verdict.PASS)


def test_many_divergences_are_cut_and_counted() -> None:
    many = tuple(Divergence(f"p{i}", 3, 1, 2, gap_nats=0.05) for i in range(11))
    lines = judged(*many).details
    assert len(lines) == 8
    assert lines[5] == "and 6 more, all of them in the JSON report"


def test_what_decides_is_listed_before_near_ties() -> None:
    ties = tuple(Divergence(f"p{i}", 3, 1, 2, gap_nats=0.05) for i in range(8))
    lines = judged(*ties, Divergence("last", 3, 1, 2, gap_nats=0.3)).details
    assert lines[0].startswith("last, token 3")


def test_divergences_carry_the_tokens_texts(tmp_path: Path) -> None:
    built = build_tiny(tmp_path)
    speculative, plain = open_engine(built), open_engine(built, "no_speculation")
    result = check_lossless(
        Altered(speculative, change_output=built_tiny.changes_one_token("p3")),
        plain,
        repetitive_prompts(),
        max_new_tokens=16,
        stop_tokens=frozenset(),
        draft_limit=3,
        dtype="float32",
        speculates=True,
        required=True,
        spell=lambda token: f"<{token}>",
    )
    [one] = result.check.evidence["divergences"]
    assert one["other_text"] == f"<{one['other_token']}>"
    assert f"'<{one['other_token']}>' instead of '<{one['reference_token']}>'" in result.check.details[0]


def test_without_drafts_batching_is_held_to_the_noise_alone() -> None:
    """There is no proof in float64 to leave it to, and nothing that could hide behind a tie."""

    def verdict(gap: float, speculates: bool) -> Verdict:
        return judge(
            "lossless", Comparison(100, 6, (Divergence("a", 3, 1, 2, gap_nats=gap),)), NOISE,
            Comparison(0, 0, ()), dtype="bfloat16", drafted=4 * speculates, accepted=2 * speculates,
            speculates=speculates, required=True, contradictions=(),
        ).verdict  # fmt: skip

    between = (NOISE.usual_nats + NOISE.nats) / 2
    assert verdict(between, False) is Verdict.PASS
    assert verdict(between, True) is Verdict.INCONCLUSIVE
    assert verdict(1.5 * NOISE.nats, False) is Verdict.INCONCLUSIVE
    assert verdict(1.1 * FAULT * NOISE.nats, False) is Verdict.FAIL

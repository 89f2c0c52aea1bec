"""Labels of every way of drafting, and the truth table of sampling parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict

import pytest

from trtspec.embedded import engine as embedded_engine
from trtspec.embedded import specimen
from trtspec.engine import Request, Sampling
from trtspec.prompts import Prompt
from trtspec.recipe_facts import ACCEPTANCE_ON, fidelity
from trtspec.recipe_file import parse_recipe
from trtspec.verify.faults import Altered
from trtspec.verify.gates import Check, Verdict
from trtspec.verify.labels import check_parameters, judge_parameters, label, labels, recipe_labels
from trtspec.verify.report import plain

PROMPTS = [Prompt(f"p{number}", tuple(range(3 + number, 20, 2))) for number in range(4)]


def test_every_combination_has_a_label():
    found = {(one.engine, one.method, one.acceptance, one.mode): one.fidelity for one in labels()}
    assert len(found) == len(labels())
    for engine, methods in ACCEPTANCE_ON.items():
        for method, kinds in methods.items():
            for kind in kinds:
                assert {(engine, method, kind, mode) for mode in ("greedy", "sampled")} <= set(found)
    assert found["embedded", "medusa", "typical", "sampled"] == "approximate"
    assert found["embedded", "medusa", "typical", "greedy"] == "strict"
    assert found["embedded", "draft_model", "rejection", "sampled"] == "strict"
    assert found["tensorrt", "medusa", "exact", "sampled"] == "approximate"
    assert all(one.because for one in labels())


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_no_verification_is_never_strict(mode):
    for kind in ("relaxed", "skipped"):
        assert label("pytorch", "eagle3", kind, mode).fidelity == "approximate"
    with pytest.raises(ValueError, match="not known"):
        label("embedded", "ngram", "generous", mode)


@pytest.mark.parametrize("acceptance", ["exact", "rejection", "typical"])
def test_the_label_of_sampling_is_the_recipes(acceptance):
    recipe = parse_recipe(
        b"version: 1\nname: x\nmodel: {source: m}\nbackend: {kind: embedded}\n"
        b"speculation: {kind: ngram, num_draft_tokens: 3}\n"
        b"acceptance: {kind: " + acceptance.encode() + b"}\ngates: {lossless: false}\n"
    )
    found = {one.mode: one.fidelity for one in recipe_labels(recipe)}
    assert found == {"greedy": "strict", "sampled": fidelity(recipe)}


# --------------------------------------------------------------------------- the truth table


def table(change: Callable[[Request], Request], dtype: str = "float64") -> Check:
    with specimen.one_thread():
        engine = specimen.open_specimen(specimen.model_drafter())
        return check_parameters(
            Altered(engine, change_request=change),  # type: ignore[arg-type]
            specimen.open_specimen(),
            PROMPTS,
            draft_limit=specimen.DRAFT_TOKENS,
            dtype=dtype,
            required=True,
            labelled=[label("embedded", "draft_model", "rejection", "sampled")],
        )


def without(**fields: object) -> Callable[[Request], Request]:
    """Sampling requests with these fields set, whatever they asked for."""

    def change(request: Request) -> Request:
        if request.sampling.greedy:
            return request
        changed = dataclasses.replace(request.sampling, **fields)  # type: ignore[arg-type]
        return dataclasses.replace(request, sampling=changed)

    return change


def test_an_engine_that_obeys():
    check = table(lambda request: request)
    assert check.verdict is Verdict.PASS, check.details
    assert len(check.details) == 7
    assert not check.warnings, "something was drafted"
    stored = json.loads(json.dumps(plain(check.evidence["raw"])))
    assert plain(asdict(judge_parameters(**stored))) == plain(asdict(check))


@pytest.mark.parametrize(
    ("ignored", "change"),
    [
        ("temperature", without(temperature=1.0)),
        ("temperature", lambda request: dataclasses.replace(request, sampling=Sampling())),
        ("top_k", without(top_k=0)),
        ("top_p", without(top_p=1.0)),
        ("seed", without(seed=5)),
        ("stop", lambda request: dataclasses.replace(request, stop_tokens=frozenset())),
        (
            "max_new_tokens",
            lambda request: dataclasses.replace(request, max_new_tokens=max(2, request.max_new_tokens)),
        ),
    ],
)
def test_what_is_ignored_is_told(ignored, change):
    check = table(change)
    assert check.verdict is Verdict.FAIL
    rows = {row["parameter"]: row["honoured"] for row in check.evidence["raw"]["table"]}
    assert rows[ignored] is False
    assert f"{ignored}: IGNORED" in "\n".join(check.details)


def test_cut_offs_that_are_ignored_now_and_then_are_told():
    """By too few tokens for a share of four in five: in 16 bit one alone is far from any tie."""
    seen = 0

    def change(request: Request) -> Request:
        nonlocal seen
        if request.sampling.top_k == 1:
            seen += 1
            if seen % 4 == 1:
                sampling = dataclasses.replace(request.sampling, top_k=3, seed=3)
                return dataclasses.replace(request, sampling=sampling)
        return request

    check = table(change, dtype="bfloat16")
    told = next(line for line in check.details if line.startswith("top_k"))
    assert check.verdict is Verdict.FAIL
    assert "top_k: IGNORED" in told
    assert "nats below the best, which is no tie" in told
    assert any(f" {share}% of the tokens" in told for share in range(80, 100))


def test_a_stop_token_inside_a_kept_draft_is_looked_for(monkeypatch):
    """An engine that looks for it only at the end of a step runs past it."""
    obeyed = table(lambda request: request)
    assert "inside a draft that is kept" in "\n".join(obeyed.details)

    def at_the_end(emitted, stop_tokens, num_remaining):
        new = emitted[:num_remaining]
        if len(new) == len(emitted) and new[-1] in stop_tokens:
            return new, "stop"
        return new, "length" if len(new) == num_remaining else None

    monkeypatch.setattr(embedded_engine, "_cut", at_the_end)
    check = table(lambda request: request)
    assert check.verdict is Verdict.FAIL
    assert "stop: IGNORED" in "\n".join(check.details)


def test_what_is_not_told_is_no_pass():
    rows = [
        {"parameter": "stop", "honoured": None, "found": ""},
        {"parameter": "seed", "honoured": True, "found": ""},
    ]
    check = judge_parameters(table=rows, labelled=[], drafted=0, required=True)
    assert (check.verdict, check.required) == (Verdict.MEASURED, False)
    assert "not told: stop" in check.summary
    assert check.warnings

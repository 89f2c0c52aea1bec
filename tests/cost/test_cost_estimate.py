"""Laws of the estimate: every number can be recomputed from its line, and moves the way physics says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from models import DRAFTING, FORMATS, priced, spec

from trtspec.cost.acceptance import Curve, expected_tokens
from trtspec.cost.estimate import Deployment, Estimate, Workload, round_cost
from trtspec.cost.speculation import best_chain_length
from trtspec.cost.trace import TraceLine, find_line, recompute
from trtspec.errors import InputError
from trtspec.hardware import find_gpu


def wrong_lines(e: Estimate) -> list[str]:
    """Lines whose value is not what their formula gives, or that show inputs their formula lacks."""
    return [
        line.name
        for line in e.trace
        if not math.isclose(recompute(line), line.value, rel_tol=1e-12, abs_tol=1e-15)
        or not all(name in line.formula for name in line.inputs)
    ]


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("form", ["none", "fp8", "w4a16", "w4a8", "w8a8"])
def test_every_number_can_be_recomputed(drafting: str, form: str) -> None:
    e = priced(drafting=drafting, form=form, concurrency=8, input_tokens=700, tp=2)
    assert wrong_lines(e) == []
    assert len(e.trace) > 30
    for name in ("tpot_ms", "ttft_ms", "tokens_per_s", "speedup"):
        line = find_line(e.trace, name)
        assert line is not None
        assert line.value == getattr(e, name)
        assert line.formula
        assert line.inputs


def test_a_tampered_line_is_seen() -> None:
    e = priced(drafting="eagle3")
    line = e.trace[10]
    bad = TraceLine(line.name, line.value * 1.001, line.unit, line.formula, line.inputs, line.source)
    assert wrong_lines(replace(e, trace=(bad,))) == [line.name]
    assert wrong_lines(replace(e, trace=(replace(line, inputs={**line.inputs, "zz": 1.0}),))) == [line.name]


def test_inputs_of_the_answer_are_lines_of_the_trace() -> None:
    """From tpot_ms down to config.json and the table of GPUs there is no number without a line."""
    e = priced(drafting="eagle3", concurrency=4)
    values = {line.value for line in e.trace}
    for name in ("tpot_ms", "round_ms", "verify.step_ms", "plain_tpot_ms"):
        line = find_line(e.trace, name)
        assert line is not None
        constants = {"round_ms", "sequences", "most", "round_sequence_ms"} if name == "round_ms" else set()
        unexplained = {k: v for k, v in line.inputs.items() if v not in values and k not in constants}
        assert not unexplained, name


def test_the_same_arguments_give_the_same_estimate() -> None:
    assert priced(drafting="medusa", form="fp8") == priced(drafting="medusa", form="fp8")


@pytest.mark.parametrize("drafting", DRAFTING)
def test_more_load_is_never_faster(drafting: str) -> None:
    for name in ("concurrency", "input_tokens"):
        times = [priced(drafting=drafting, **{name: n}).tpot_ms for n in (1, 4, 16, 64, 256)]
        assert times == sorted(times), name


def test_speculation_does_not_touch_ttft() -> None:
    """Only a draft model's own prompt pass may add to it; heads and n-grams leave prefill as it is."""
    for drafting in ("ngram", "medusa", "eagle3"):
        assert priced(drafting=drafting).ttft_ms == pytest.approx(priced().ttft_ms)
    assert priced(drafting="draft_model").ttft_ms > priced().ttft_ms


def test_weight_only_formats_do_not_help_prefill() -> None:
    assert priced(form="w4a16").ttft_ms >= priced().ttft_ms
    assert priced(form="fp8").ttft_ms < 0.7 * priced().ttft_ms


def test_formats_by_batch() -> None:
    """W4A16 beats 16 bit alone, loses to it and to FP8 from batch 8 on."""
    for batch, wins in ((1, True), (8, False), (64, False)):
        assert (priced(form="w4a16", concurrency=batch).tpot_ms < priced(concurrency=batch).tpot_ms) is wins
        assert priced(form="fp8", concurrency=batch).tpot_ms < priced(concurrency=batch).tpot_ms


def test_kv_formats_hold_more_sequences() -> None:
    fp8 = FORMATS["none"].model_copy(update={"kv_cache": "fp8"})
    plain = priced(input_tokens=30000, concurrency=64)
    small = priced(input_tokens=30000, concurrency=64, quantization=fp8)
    assert small.memory.max_sequences >= 2 * plain.memory.max_sequences > 0
    assert small.memory.kv_bytes_per_token == plain.memory.kv_bytes_per_token / 2


def test_speculation_costs_memory() -> None:
    for drafting in ("draft_model", "medusa", "eagle", "eagle3"):
        e = priced(drafting=drafting)
        assert e.memory.draft_weights_bytes > 0
        assert e.memory.max_sequences < priced().memory.max_sequences


def test_what_is_not_admitted_queues_and_says_so() -> None:
    """70B in FP8 with 8k of context on one B200 holds some 70 sequences: TPOT stops, TTFT does not."""
    work = {"input_tokens": 8192, "output_tokens": 1024}
    some = priced("70B", "B200", form="fp8", concurrency=64, **work)
    many = priced("70B", "B200", form="fp8", concurrency=128, **work)
    more = priced("70B", "B200", form="fp8", concurrency=256, **work)
    assert some.admitted == 64
    assert 64 < many.admitted == more.admitted < 100
    assert many.tpot_ms == pytest.approx(more.tpot_ms, rel=0.02)
    assert more.ttft_ms > many.ttft_ms > 10 * some.ttft_ms
    assert any("queue" in text for text in many.assumptions)
    assert not any("queue" in text for text in some.assumptions)


def test_what_does_not_fit_says_so() -> None:
    e = priced("70B", "H100-SXM")
    assert not e.fits
    assert e.goodput_per_s(ttft_ms=None, tpot_ms=None) == 0
    assert priced("70B", "H100-SXM", tp=4).fits


def test_more_gpus_are_faster_and_hold_more() -> None:
    times = [priced("70B", tp=tp, form="fp8") for tp in (2, 4, 8)]
    assert [e.tpot_ms for e in times] == sorted((e.tpot_ms for e in times), reverse=True)
    assert [e.memory.max_sequences for e in times] == sorted(e.memory.max_sequences for e in times)


def test_the_break_even_batch_is_where_speedup_crosses_one() -> None:
    e = priced(drafting="medusa", task="summarization")
    limit = e.break_even_batch
    assert limit is not None

    def gain(batch: int) -> float:
        e = priced(drafting="medusa", task="summarization", concurrency=batch)
        return e.acceptance_length * e.plain_step_ms / e.round_ms

    assert gain(limit) < 1 <= gain(limit - 1)
    assert priced().break_even_batch is None


def best_length(
    context: int, size: str = "8B", form: str = "none", alpha: float = 0.9, batch: int = 16
) -> int:
    deployment = Deployment(
        spec(size), find_gpu("H200"), quantization=FORMATS[form], speculation=DRAFTING["draft_model"],
        draft_spec=spec("1B"),
    )  # fmt: skip
    cost = round_cost(deployment, Workload(context, 2, batch))
    return best_chain_length(Curve((alpha,) * 16, "constant"), cost).size


@pytest.mark.parametrize("form", ["none", "fp8"])
def test_the_best_chain_shrinks_with_context(form: str) -> None:
    """The draft reads its own KV in each of its steps, and verified rows attend to all of the context."""
    lengths = [best_length(context, form=form) for context in (2048, 8192, 32768, 131072)]
    assert lengths == sorted(lengths, reverse=True)
    assert 0 < lengths[-1] < lengths[0]


def test_the_best_chain_grows_with_acceptance_and_with_the_targets_size() -> None:
    lengths = [best_length(1024, alpha=alpha, batch=1) for alpha in (0.6, 0.7, 0.8, 0.9)]
    assert lengths == sorted(lengths)
    assert best_length(1024, "70B", batch=1) > best_length(1024, "8B", batch=1)
    assert best_length(1024, form="fp8", batch=1) <= best_length(1024, batch=1)


def test_acceptance_from_a_curve_replaces_the_prior() -> None:
    curve = Curve((0.9, 0.9, 0.9, 0.9), "measured", 1.0, 1.0, measured=True)
    e = priced(drafting="eagle3", acceptance_curve=curve)
    assert e.acceptance_length == pytest.approx(expected_tokens(curve, 4))
    assert not any("tables" in text for text in e.assumptions)
    assert any("tables" in text for text in priced(drafting="eagle3").assumptions)


def test_intervals_hold_the_estimate_and_grow_with_what_is_not_known() -> None:
    plain, drafted, ampere = priced(), priced(drafting="eagle3"), priced(gpu="A100-SXM-80G")
    for e in (plain, drafted, ampere):
        assert e.interval[0] < e.tpot_ms < e.interval[1]
        assert e.basis == "roofline"

    def width(e: Estimate) -> float:
        return (e.interval[1] - e.interval[0]) / e.tpot_ms

    assert width(drafted) > width(plain)
    assert width(ampere) > width(plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "A100-SXM-80G", "form": "fp8"}, "no FP8 rate"),
        ({"gpu": "A10"}, "no BF16 rate"),
        ({"gpu": "H100", "form": "nvfp4"}, "no FP4 rate"),
        ({"drafting": "eagle3", "pp": 2}, "excludes pipeline"),
        ({"drafting": "eagle3", "task": "poetry"}, "no acceptance prior for task"),
        ({"concurrency": 0}, "at least 1"),
        ({"drafting": "draft_model", "draft_spec": None}, "own config.json"),
    ],
)
def test_what_cannot_be_priced_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        priced(**arguments)


def test_pipeline_stages_share_the_weights_not_the_time() -> None:
    one, two = priced("70B", tp=4), priced("70B", tp=4, pp=2)
    assert two.memory.weights_bytes < 0.6 * one.memory.weights_bytes
    assert two.tpot_ms == pytest.approx(one.tpot_ms, rel=0.05)


@pytest.mark.parametrize(
    ("size", "gpu", "form", "tokens_per_s"),
    [
        ("8B", "H100-SXM", "none", 158.34),  # SGLang documentation, speculative decoding
        ("8B", "H200-SXM", "none", 189.98),  # SpecForge SpecBundle, baseline on MT-bench
        ("70B", "H200-SXM", "fp8", 51.14),  # NVIDIA blog, Llama-3.3-70B without draft
    ],
)
def test_published_rates_that_no_step_constant_was_fitted_to(
    size: str, gpu: str, form: str, tokens_per_s: float
) -> None:
    e = priced(size, gpu, form=form, input_tokens=200, output_tokens=400)
    assert 1e3 / e.tpot_ms == pytest.approx(tokens_per_s, rel=0.10)
    assert e.interval[0] < 1e3 / tokens_per_s < e.interval[1]


def test_slo_decides_goodput() -> None:
    e = priced(concurrency=16)
    assert e.goodput_per_s(ttft_ms=None, tpot_ms=None) == e.tokens_per_s
    assert e.goodput_per_s(ttft_ms=e.ttft_ms + 1, tpot_ms=e.tpot_ms + 1) == e.tokens_per_s
    assert e.goodput_per_s(ttft_ms=e.ttft_ms - 1, tpot_ms=None) == 0
    assert e.goodput_per_s(ttft_ms=None, tpot_ms=e.tpot_ms / 2) == 0

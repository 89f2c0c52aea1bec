# ruff: noqa: E501
"""Each rule fires on what it forbids, and not on the smallest change that its message asks for."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from trtspec.recipe import Recipe
from trtspec.recipe_facts import drafted_positions, longest_acceptance
from trtspec.recipe_file import lint_content
from trtspec.recipe_rules import RULES
from trtspec.recipe_yaml import dump_plain

BASE: dict[str, Any] = {
    "version": 1,
    "name": "a",
    "model": {"source": "sample:smollm2-135m-instruct"},
    "backend": {"kind": "embedded"},
}


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` laid over ``base``, key by key; a mapping with another kind replaces the one below."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        below = result.get(key)
        joins = isinstance(value, dict) and isinstance(below, dict)
        if joins and value.get("kind", below.get("kind")) == below.get("kind"):
            result[key] = _merged(below, value)
        else:
            result[key] = value
    return result


TRT = {"backend": {"kind": "tensorrt"}}
PYT = {"backend": {"kind": "pytorch"}}
MEDUSA = {"kind": "medusa", "heads": "h", "choices": [[0], [0, 0]]}
EAGLE = {"kind": "eagle", "heads": "h"}
EAGLE3 = {"kind": "eagle3", "heads": "h"}
NGRAM = {"kind": "ngram"}
DRAFT = {"kind": "draft_model", "model": {"source": "y"}}
AWQ_KV8 = {"kind": "w4a16_awq", "kv_cache": "fp8"}
WIDE = {"max_num_tokens": 16384}

# (rule, a recipe that breaks it, what to change so that it does not, the key that is blamed)
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("model-revision", {"model": {"source": "./x", "revision": "main"}}, {"model": {"source": "org/x"}}, "model.revision"),
    ("model-revision", {"model": {"source": "sample:smollm2-135m-instruct", "revision": "main"}}, {"model": {"revision": None}}, "model.revision"),
    (
        "model-revision", {"speculation": {**DRAFT, "model": {"source": "/y", "revision": "v1"}}},
        {"speculation": {"model": {"source": "org/y"}}}, "speculation.model.revision",
    ),
    ("model-sample", {"model": {"source": "sample:"}}, {"model": {"source": "sample:smollm2-135m-instruct"}}, "model.source"),
    ("backend-version", {"backend": {"kind": "tensorrt", "version": "1.2"}}, {"backend": {"version": "==1.2"}}, "backend.version"),
    ("backend-version", {"backend": {"kind": "tensorrt", "version": ">=1.0"}}, {"backend": {"version": ">=1.0,<=1.2.1"}}, "backend.version"),
    ("backend-version", {"backend": {"kind": "tensorrt", "version": "<1.3"}}, {"backend": {"version": ">=0.17,<1.2.1"}}, "backend.version"),
    ("backend-version", {"backend": {"kind": "pytorch", "version": ">1.2,<1.2"}}, {"backend": {"version": ">=1.2,<1.3"}}, "backend.version"),
    ("backend-version", {"backend": {"kind": "pytorch", "version": ">=0.21,<1.5"}}, {"backend": {"version": ">=1.0,<1.5"}}, "backend.version"),
    ("parallel-embedded", {"parallel": {"tp": 2}}, {"backend": {"kind": "pytorch"}}, "parallel.tp"),
    ("parallel-embedded", {"parallel": {"pp": 2}}, {"parallel": {"pp": 1}}, "parallel.pp"),
    ("parallel-pipeline", {**PYT, "parallel": {"pp": 2}, "speculation": NGRAM}, {"speculation": {"kind": "none"}}, "parallel.pp"),
    ("parallel-pipeline", {**TRT, "parallel": {"pp": 2}, "speculation": NGRAM}, {"parallel": {"pp": 1, "tp": 2}}, "parallel.pp"),
    ("quantization-nvfp4-cpu", {"quantization": {"kind": "nvfp4"}}, {"backend": {"device": "cuda"}}, "quantization.kind"),
    (
        "quantization-nvfp4-cpu", {"speculation": {**DRAFT, "quantization": {"kind": "nvfp4"}}},
        {"speculation": {"quantization": {"kind": "fp8"}}}, "speculation.quantization.kind",
    ),
    ("quantization-kv-format", {"quantization": {"kind": "fp8", "kv_cache": "nvfp4"}}, PYT, "quantization.kv_cache"),
    ("quantization-kv-format", {**PYT, "quantization": {"kind": "fp8", "kv_cache": "int8"}}, TRT, "quantization.kv_cache"),
    ("quantization-kv-format", {**TRT, "quantization": {"kind": "fp8", "kv_cache": "nvfp4"}}, {"quantization": {"kv_cache": "fp8"}}, "quantization.kv_cache"),
    ("quantization-kv-format", {**PYT, "quantization": {"kind": "none", "kv_cache": "nvfp4"}}, {"quantization": {"kind": "fp8", "kv_cache": "nvfp4"}}, "quantization.kv_cache"),
    ("quantization-int8-weights", {**PYT, "quantization": {"kind": "w8a8_sq"}}, TRT, "quantization.kind"),
    ("quantization-paged-context", {**PYT, "quantization": AWQ_KV8, "limits": WIDE}, {"quantization": {"kv_cache": "none"}}, "quantization.kv_cache"),
    ("quantization-paged-context", {**TRT, "quantization": AWQ_KV8, "limits": WIDE}, {"quantization": {"kind": "fp8", "kv_cache": "fp8"}}, "quantization.kv_cache"),
    ("quantization-paged-context", {**TRT, "quantization": {"kind": "fp8", "kv_cache": "int8"}, "limits": WIDE}, {"quantization": {"kv_cache": "fp8"}}, "quantization.kv_cache"),
    ("quantization-paged-context", {**TRT, "quantization": AWQ_KV8, "limits": WIDE}, {"backend": {"kind": "embedded"}}, "quantization.kv_cache"),
    ("speculation-paged-context", {**TRT, "quantization": AWQ_KV8, "speculation": NGRAM, "limits": WIDE}, {"quantization": {"kv_cache": "none"}}, "speculation.kind"),
    ("speculation-paged-context", {**TRT, "quantization": AWQ_KV8, "speculation": EAGLE, "limits": WIDE}, {"speculation": MEDUSA}, "speculation.kind"),
    ("speculation-paged-context", {"backend": {"kind": "tensorrt", "paged_context_fmha": False}, "speculation": DRAFT, "limits": WIDE}, {"backend": {"paged_context_fmha": True}}, "speculation.kind"),
    ("limits-unchunked-prompt", {**TRT, "quantization": AWQ_KV8}, {"limits": {"max_num_tokens": 1024}}, "limits.max_num_tokens"),
    ("limits-unchunked-prompt", {"backend": {"kind": "tensorrt", "paged_context_fmha": False}}, {"backend": {"paged_context_fmha": True}}, "limits.max_num_tokens"),
    ("quantization-w4a8-kv8", {**PYT, "quantization": {"kind": "w4a8_awq", "kv_cache": "fp8"}}, {"quantization": {"kv_cache": "none"}}, "quantization.kv_cache"),
    ("quantization-under-heads", {**TRT, "quantization": {"kind": "w4a16_awq"}, "speculation": MEDUSA}, {"quantization": {"kind": "fp8"}}, "quantization.kind"),
    ("quantization-under-heads", {**TRT, "quantization": {"kind": "fp8"}, "speculation": EAGLE}, {"quantization": {"kind": "none"}}, "quantization.kind"),
    ("quantization-medusa-heads", {**TRT, "speculation": {**MEDUSA, "quantization": "fp8"}}, {"speculation": {"quantization": "none"}}, "speculation.quantization"),
    ("backend-multiple-profiles", {"backend": {"kind": "tensorrt", "multiple_profiles": True}, "quantization": {"kind": "fp8"}}, {"backend": {"multiple_profiles": False}}, "backend.multiple_profiles"),
    ("speculation-backend", {**PYT, "speculation": MEDUSA}, TRT, "speculation.kind"),
    ("speculation-backend", {**PYT, "speculation": {"kind": "lookahead"}}, {"speculation": NGRAM}, "speculation.kind"),
    ("speculation-backend", {**PYT, "speculation": EAGLE}, {"speculation": EAGLE3}, "speculation.kind"),
    ("speculation-backend", {**TRT, "speculation": EAGLE3}, PYT, "speculation.kind"),
    ("acceptance-approximate", {"speculation": NGRAM, "acceptance": {"kind": "typical"}, "gates": {"lossless": False}}, {"acceptance": {"kind": "rejection"}}, "acceptance.kind"),
    ("acceptance-backend", {**TRT, "speculation": MEDUSA, "acceptance": {"kind": "rejection"}}, {"acceptance": {"kind": "exact"}}, "acceptance.kind"),
    ("acceptance-backend", {**TRT, "speculation": NGRAM, "acceptance": {"kind": "rejection"}}, {"speculation": DRAFT}, "acceptance.kind"),
    ("acceptance-backend", {**PYT, "speculation": EAGLE3, "acceptance": {"kind": "typical"}, "gates": {"lossless": False}}, {"acceptance": {"kind": "exact"}}, "acceptance.kind"),
    ("acceptance-backend", {**PYT, "speculation": EAGLE3, "acceptance": {"kind": "rejection"}}, {"backend": {"version": ">=1.3,<1.5"}}, "acceptance.kind"),
    ("acceptance-typical-lossless", {"speculation": NGRAM, "acceptance": {"kind": "typical"}}, {"gates": {"lossless": False}}, "gates.lossless"),
    ("acceptance-typical-lossless", {"speculation": NGRAM, "acceptance": {"kind": "typical"}}, {"speculation": {"kind": "none"}}, "gates.lossless"),
    ("speculation-ngram-embedded", {**TRT, "speculation": {**NGRAM, "branches": 2}}, {"speculation": {"branches": 1}}, "speculation.branches"),
    ("speculation-ngram-embedded", {**PYT, "speculation": {**NGRAM, "corpus": "a.txt"}}, {"speculation": {"corpus": None}}, "speculation.corpus"),
    ("speculation-adaptive-embedded", {**TRT, "speculation": {**NGRAM, "adaptive": True}}, {"speculation": {"adaptive": False}}, "speculation.adaptive"),
    ("backend-dequantized-copy", {"backend": {"dequantized_copy": True}, "quantization": {"kind": "fp8"}}, {"quantization": {"kind": "w4a16_awq"}}, "backend.dequantized_copy"),
    ("backend-dequantized-copy", {"backend": {"dequantized_copy": True, "dtype": "float32"}}, {"backend": {"dtype": "bfloat16"}}, "backend.dequantized_copy"),
    ("speculation-corpus-count", {"speculation": {**NGRAM, "corpus_min_count": 2}}, {"speculation": {"corpus": "a.txt"}}, "speculation.corpus_min_count"),
    ("speculation-ngram-order", {"speculation": {"kind": "ngram", "min_ngram": 5}}, {"speculation": {"max_ngram": 5}}, "speculation.min_ngram"),
    ("speculation-choices", {**TRT, "speculation": {**MEDUSA, "choices": []}}, {"speculation": {"choices": None}}, "speculation.choices"),
    ("speculation-choices", {**TRT, "speculation": {**MEDUSA, "choices": [[0], [0]]}}, {"speculation": {"choices": [[0], [1]]}}, "speculation.choices[1]"),
    ("speculation-choices", {**TRT, "speculation": {**MEDUSA, "choices": [[], [0]]}}, {"speculation": {"choices": [[0]]}}, "speculation.choices[0]"),
    ("speculation-choices", {**TRT, "speculation": {**MEDUSA, "choices": [[0], [1, 0]]}}, {"speculation": {"choices": [[1, 0], [1]]}}, "speculation.choices[1]"),
    ("speculation-choices", {**TRT, "speculation": {**EAGLE, "depth": 1, "choices": [[0], [0, 0]]}}, {"speculation": {"depth": 2}}, "speculation.choices[1]"),
    ("speculation-tree-size", {**PYT, "speculation": {**EAGLE3, "depth": 3}}, {"speculation": {"depth": 4}}, "speculation.depth"),
    ("speculation-tree-size", {**PYT, "speculation": {**EAGLE3, "top_k": 2}}, {"speculation": {"depth": 3}}, "speculation.depth"),
    ("speculation-tree-size", {**TRT, "speculation": {**EAGLE, "depth": 1}}, {"speculation": {"num_draft_tokens": 8}}, "speculation.num_draft_tokens"),
    ("speculation-eagle3-tree", {**PYT, "speculation": {**EAGLE3, "top_k": 2, "depth": 3}}, {"speculation": {"top_k": 1, "depth": None}}, "speculation.top_k"),
    ("limits-eagle-batch", {**TRT, "speculation": EAGLE, "limits": {"max_batch_size": 513, **WIDE}}, {"limits": {"max_batch_size": 512}}, "limits.max_batch_size"),
    ("backend-overlap", {"backend": {"kind": "pytorch", "overlap_scheduler": True}, "speculation": NGRAM}, {"backend": {"overlap_scheduler": None}}, "backend.overlap_scheduler"),
    ("limits-seq-input", {"limits": {"max_seq_tokens": 1024}}, {"limits": {"max_seq_tokens": 1025}}, "limits.max_seq_tokens"),
    ("limits-rows-batch", {"limits": {"max_batch_size": 513}}, {"limits": {"max_num_tokens": 513}}, "limits.max_num_tokens"),
    ("limits-rows-draft", {"speculation": {**NGRAM, "num_draft_tokens": 32}, "limits": {"max_num_tokens": 32}}, {"limits": {"max_num_tokens": 33}}, "limits.max_num_tokens"),
    ("speculation-concurrency", {**TRT, "speculation": {**NGRAM, "max_concurrency": 8}}, {"speculation": {"max_concurrency": None}}, "speculation.max_concurrency"),
    ("speculation-concurrency", {**PYT, "speculation": {**NGRAM, "max_concurrency": 8}}, {"backend": {"version": ">=1.1,<1.5"}}, "speculation.max_concurrency"),
    ("speculation-concurrency", {"backend": {"kind": "pytorch", "version": ">=1.1,<1.5"}, "speculation": {**EAGLE3, "max_concurrency": 8}}, {"backend": {"version": ">=1.3,<1.5"}}, "speculation.max_concurrency"),
    ("limits-rows-full-batch", {"speculation": {**NGRAM, "max_concurrency": 8}, "limits": {"max_num_tokens": 39}}, {"limits": {"max_num_tokens": 40}}, "limits.max_num_tokens"),
    ("limits-rows-full-batch", {"speculation": NGRAM, "limits": {"max_num_tokens": 79}}, {"limits": {"max_num_tokens": 80}}, "limits.max_num_tokens"),
    ("limits-draft-length", {"speculation": NGRAM, "limits": {"max_seq_tokens": 5, "max_input_tokens": 2}, "serving": {"default_max_tokens": 1}}, {"limits": {"max_seq_tokens": 6}}, "limits.max_seq_tokens"),
    ("serving-default-tokens", {"serving": {"default_max_tokens": 2048}}, {"serving": {"default_max_tokens": 2047}}, "serving.default_max_tokens"),
    ("serving-ports", {"serving": {"grpc_port": 8002}}, {"serving": {"metrics_port": 8001}}, "serving.metrics_port"),
    ("gates-acceptance-length", {"speculation": NGRAM, "gates": {"min_acceptance_length": 5.5}}, {"gates": {"min_acceptance_length": 5.0}}, "gates.min_acceptance_length"),
    ("gates-acceptance-length", {"gates": {"min_acceptance_length": 1.1}}, {"gates": {"min_acceptance_length": 1.0}}, "gates.min_acceptance_length"),
    ("gates-speedup", {"gates": {"min_speedup": 1.1}}, {"speculation": NGRAM}, "gates.min_speedup"),
    ("gates-speedup", {"gates": {"min_speedup_over_baseline": 1.1}}, {"quantization": {"kind": "fp8"}}, "gates.min_speedup_over_baseline"),
    ("gates-speedup", {"gates": {"min_speedup_by_load": 1.1}}, {"quantization": {"kind": "fp8"}}, "gates.min_speedup_by_load"),
    ("gates-speedup", {"gates": {"load": {"concurrency": 8}, "min_speedup_under_load": 1.1}}, {"speculation": NGRAM}, "gates.min_speedup_under_load"),
    ("gates-load", {"gates": {"load": {"concurrency": 8, "rate_per_s": 2.0}}}, {"gates": {"load": {"rate_per_s": None}}}, "gates.load.rate_per_s"),
    ("gates-load", {"gates": {"slo": {"tpot_ms": 50.0}}}, {"gates": {"load": {"concurrency": 8}}}, "gates.slo.tpot_ms"),
    ("gates-load", {"gates": {"min_tokens_per_s": 50.0}}, {"gates": {"load": {"rate_per_s": 0.5}}}, "gates.min_tokens_per_s"),
    ("gates-load", {"speculation": NGRAM, "gates": {"load": {"rate_per_s": 2.0}, "min_speedup_under_load": 1.1}}, {"gates": {"load": {"rate_per_s": None, "concurrency": 8}}}, "gates.min_speedup_under_load"),
    ("gates-load", {"gates": {"load": {"requests": 50}}}, {"gates": {"load": {"concurrency": 1}}}, "gates.load"),
    ("gates-goodput", {"gates": {"load": {"concurrency": 8}, "min_goodput": 0.9}}, {"gates": {"slo": {"e2e_ms": 900.0}}}, "gates.min_goodput"),
    ("gates-goodput", {"gates": {"load": {"concurrency": 8}, "slo": {"ttft_ms": 900.0, "e2e_ms": 800.0}}}, {"gates": {"slo": {"e2e_ms": 900.0}}}, "gates.slo.e2e_ms"),
    ("gates-load-requests", {"gates": {"load": {"concurrency": 8, "requests": 391}, "max_p99_ttft_ms": 9.0}}, {"gates": {"load": {"requests": 392}}}, "gates.load.requests"),
    ("gates-load-requests", {"gates": {"load": {"rate_per_s": 8.0, "requests": 400}, "max_p99_tpot_ms": 9.0}}, {"gates": {"max_p99_tpot_ms": None}}, "gates.load.requests"),
    ("gates-load-limits", {"gates": {"load": {"concurrency": 8, "input_tokens": 1025}}}, {"gates": {"load": {"input_tokens": 1024}}}, "gates.load.input_tokens"),
    ("gates-load-limits", {"gates": {"load": {"concurrency": 8, "input_tokens": 1024, "output_tokens": 1025}}}, {"gates": {"load": {"output_tokens": 1024}}}, "gates.load.output_tokens"),
    ("gates-load-queue", {"gates": {"load": {"concurrency": 17}}}, {"limits": {"max_batch_size": 17}}, "gates.load.concurrency"),
]  # fmt: skip


def _fired(data: dict[str, Any]) -> dict[str, list[str]]:
    """Rule -> keys it blames. Nothing but rules may speak: the cases are valid for the schema."""
    result = lint_content(dump_plain(data), "f")
    fired: dict[str, list[str]] = {}
    for problems, severity in (
        (result.errors, "error"),
        (result.warnings, "warning"),
        (result.notes, "note"),
    ):
        for problem in problems:
            rule = problem.message.rsplit("[", 1)[-1].rstrip("]")
            assert rule in RULES, problem
            assert RULES[rule].severity == severity
            fired.setdefault(rule, []).append(problem.key or "")
    return fired


@pytest.mark.parametrize(
    ("rule", "bad", "change", "key"), CASES, ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)]
)
def test_a_rule_fires_and_its_remedy_silences_it(
    rule: str, bad: dict[str, Any], change: dict[str, Any], key: str
) -> None:
    broken = _merged(BASE, bad)
    assert key in _fired(broken).get(rule, [])
    assert rule not in _fired(_merged(broken, change))


def test_every_rule_has_a_case_and_a_reason() -> None:
    assert {case[0] for case in CASES} == set(RULES)
    assert all(len(rule.why) > 20 for rule in RULES.values())
    assert all(rule.id == name for name, rule in RULES.items())


class _Recorder:
    """A recipe that notes which of its sections are looked at."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            self.seen.add(name)
        return getattr(self._recipe, name)


def test_rules_look_only_at_the_sections_they_declare() -> None:
    """Else a rule would judge the placeholder of a section that has an error."""
    looked: dict[str, set[str]] = {name: set() for name in RULES}
    for _, bad, change, _ in CASES:
        for data in (_merged(BASE, bad), _merged(_merged(BASE, bad), change)):
            recipe = Recipe.model_validate(data)
            for rule in RULES.values():
                recorder = _Recorder(recipe)
                list(rule.check(recorder))  # type: ignore[arg-type]
                looked[rule.id] |= recorder.seen
    assert looked == {name: set(rule.reads) for name, rule in RULES.items()}


@pytest.mark.parametrize(
    ("speculation", "positions", "longest"),
    [
        ({"kind": "none"}, 0, 0),
        (NGRAM, 4, 4),
        ({"kind": "lookahead", "window": 7, "ngram": 7, "verification_set": 7}, 83, 6),
        ({"kind": "lookahead"}, 15, 2),
        (DRAFT, 4, 4),
        (MEDUSA, 2, 2),
        ({**MEDUSA, "choices": None}, 63, None),
        (EAGLE, 31, 5),
        ({**EAGLE, "top_k": 2, "depth": 3}, 10, 3),
        ({**EAGLE, "choices": [[0], [0, 0], [1]]}, 3, 2),
        (EAGLE3, 4, 4),
        ({**EAGLE3, "num_draft_tokens": 20, "top_k": 4, "depth": 3}, 20, 3),
    ],
)
def test_sizes_of_drafts(speculation: dict[str, Any], positions: int, longest: int | None) -> None:
    """Lookahead's two values are those of TensorRT-LLM's own documentation."""
    recipe = Recipe.model_validate({**BASE, "speculation": speculation})
    assert drafted_positions(recipe.speculation) == positions
    assert longest_acceptance(recipe.speculation) == longest

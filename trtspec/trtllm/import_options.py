"""A recipe from a file of LLM API options: what ``--extra_llm_api_options``, now ``--config``, takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trtspec.errors import InputError, Problem
from trtspec.recipe_facts import BACKEND_VERSIONS, CONCURRENCY_VERSIONS, REJECTION_VERSIONS
from trtspec.trtllm.facts import VERSIONS, Facts, load_facts, versions_for, versions_with
from trtspec.trtllm.imported import (
    PLUGIN_KEYS,
    ImportWork,
    leave_beam_width,
    need_heads,
    shown,
    take_quantization,
)
from trtspec.versions import VersionRange, parse_range, parse_version, range_text

_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "quant_config": "QuantConfig",
    "build_config": "BuildConfig",
    "build_config.plugin_config": "",
    "cuda_graph_config": "CudaGraphConfig",
    "scheduler_config": "SchedulerConfig",
    "speculative_config": "",
}
"""Mappings whose keys are accounted for one by one, with their class; others count as one key."""


def import_options(work: ImportWork, data: Mapping[str, Any], version: str | None) -> str:
    """Take what the options say into ``work``; returns the version or versions that know every key (or, if
    none does, the most)."""
    work.flatten(data, tuple(_SECTIONS))
    kind = _options_backend(work)
    own = "TorchLlmArgs" if kind == "pytorch" else "TrtLlmArgs"
    candidates = tuple(v for v in VERSIONS if own in load_facts(v).classes)
    if version is not None:
        asked = load_facts(version).version
        if asked not in candidates:
            message = f"TensorRT-LLM {asked}: the options of {kind} are known for: {', '.join(candidates)}"
            raise InputError(Problem(f"{message}; name one of them, or leave it out"))
        candidates = (asked,)
    unknown = {v: _unknown_options(work, load_facts(v), own) for v in candidates}
    least = min(len(keys) for keys in unknown.values())
    fitting = tuple(v for v, keys in unknown.items() if len(keys) == least)
    for key, to in (
        ("tensor_parallel_size", "parallel.tp"), ("pipeline_parallel_size", "parallel.pp"),
        ("max_batch_size", "limits.max_batch_size"), ("max_input_len", "limits.max_input_tokens"),
        ("max_seq_len", "limits.max_seq_tokens"), ("max_num_tokens", "limits.max_num_tokens"),
    ):  # fmt: skip
        if not work.take(key, to, int):
            work.take(f"build_config.{key}", to, int)
    _options_model(work)
    dtype = work.text("dtype")
    if kind == "tensorrt" and dtype == "auto":
        work.leave("dtype", "an engine's recipe names its dtype; bfloat16 is assumed")
    elif dtype is not None:
        work.use("dtype", "backend.dtype", dtype)
    leave_beam_width(work, "max_beam_width")
    leave_beam_width(work, "build_config.max_beam_width")
    if kind == "pytorch":
        _pytorch_options(work)
    else:
        plugins = "build_config.plugin_config."
        work.take(f"{plugins}use_paged_context_fmha", "backend.paged_context_fmha", bool)
        work.take(f"{plugins}multiple_profiles", "backend.multiple_profiles", bool)
    take_quantization(work, "quant_config.")
    if "quant_config.quant_algo" not in work.values:
        why = "the options do not say; a quantized checkpoint says it itself, so the recipe must too"
        work.assumed.append(("quantization.kind", "none", why))
    _options_kv(work)
    _options_speculation(work, kind)
    _options_versions(work, kind, fitting)
    for key in ("max_batch_size", "max_input_tokens", "max_seq_tokens", "max_num_tokens"):
        if not work.has(f"limits.{key}"):
            work.assumed.append((f"limits.{key}", "the recipe's default", "the options do not say"))
    chosen = load_facts(fitting[-1])
    missing = set(unknown[fitting[-1]])
    work.rest(lambda key: _why_unknown(work, key, own, chosen) if key in missing else "")
    return fitting[0] if len(fitting) == 1 else f"{fitting[0]} to {fitting[-1]}"


def _options_backend(work: ImportWork) -> Literal["pytorch", "tensorrt"]:
    method = _method(work.values.get("speculative_config.decoding_type"))
    named = work.text("backend")
    engine_only = method in ("medusa", "lookahead") or any(
        key.startswith("build_config") for key in work.values
    )
    if named not in (None, "pytorch", "tensorrt"):
        work.bad("backend", f"found {shown(named)}; recipes have pytorch and tensorrt")
    kind: Literal["pytorch", "tensorrt"] = (
        "tensorrt" if (named == "tensorrt" or (named is None and engine_only)) else "pytorch"
    )
    work.set("backend.kind", kind)
    if named is not None:
        work.use("backend", "backend.kind", kind)
    else:
        why = (
            "medusa, lookahead and build_config belong to engines"
            if engine_only
            else "the LLM API's default from 1.0 on"
        )
        work.assumed.append(("backend.kind", kind, why))
    return kind


def _method(decoding_type: Any) -> str:
    return str(decoding_type or "none").replace("_", "").lower()


def _unknown_options(work: ImportWork, facts: Facts, own: str) -> list[str]:
    """The keys of the file that ``facts``' version does not have."""
    return [key for key in work.values if _why_unknown(work, key, own, facts)]


def _why_unknown(work: ImportWork, key: str, own: str, facts: Facts) -> str:
    section, _, last = key.rpartition(".")
    if section == "speculative_config":
        method = work.values.get(key.replace(last, "decoding_type"))
        owner = facts.decoding_types.get(method) if isinstance(method, str) else None
        if last == "decoding_type":
            return "" if owner else f"{shown(method)} is no decoding_type of TensorRT-LLM {facts.version}"
        owners = [owner] if owner else [name for name in facts.classes if name.endswith("DecodingConfig")]
    elif section == "build_config.plugin_config":
        return (
            ""
            if last in PLUGIN_KEYS or versions_with("trtllm-build", f"--{last}")
            else "no known version has it"
        )
    else:
        owners = [_SECTIONS[section]] if section else [own]
    if any(last in facts.classes.get(owner, {}) for owner in owners):
        return ""
    elsewhere = sorted({v for owner in owners for v in versions_with(owner, last)}, key=parse_version)
    where = f"it exists in {', '.join(elsewhere)}" if elsewhere else "no known version has it"
    if not any(owner in facts.classes for owner in owners):
        return f"the table of TensorRT-LLM {facts.version} has no {owners[0] if owners else last}; {where}"
    return f"not in {' or '.join(owners[:1])} of TensorRT-LLM {facts.version}; {where}"


def _options_versions(work: ImportWork, kind: str, fitting: tuple[str, ...]) -> None:
    whole = BACKEND_VERSIONS[kind]
    all_known = versions_for(kind, whole)
    needed = _needed_versions(work) if kind == "pytorch" else whole
    inside = [v for v in fitting if v in all_known and needed.admits(v)]
    if not inside:
        why = f"the keys are those of {fitting[-1]}, which is older than the {kind} recipes' versions"
        work.assume("backend.version", range_text(parse_range(f"{whole},{needed}")), why)
        return
    parts = [str(whole), str(needed)]
    if inside[0] != all_known[0]:
        parts.append(f">={inside[0]}")
    if inside[-1] != all_known[-1]:
        parts.append(f"<={inside[-1]}")
    work.assume(
        "backend.version", range_text(parse_range(",".join(parts))), "the versions that know the keys"
    )


def _needed_versions(work: ImportWork) -> VersionRange:
    """The versions with the recipe's way of accepting and of switching drafting off."""
    parts = [str(BACKEND_VERSIONS["pytorch"])]
    speculation = work.data.get("speculation", {"kind": "none"})
    if work.data.get("acceptance", {}).get("kind") == "rejection":
        parts.append(str(REJECTION_VERSIONS))
    if speculation.get("max_concurrency") is not None and speculation["kind"] in CONCURRENCY_VERSIONS:
        parts.append(str(CONCURRENCY_VERSIONS[speculation["kind"]]))
    return parse_range(",".join(parts))


def _options_model(work: ImportWork) -> None:
    if work.flags.model is not None:
        work.leave("model", f"--model {work.flags.model} was given instead")
        work.set("model.source", work.flags.model)
    elif not work.take("model", "model.source", str):
        message = (
            "the file does not name the checkpoint (trtllm-serve has it on its command line); give --model"
        )
        work.problems.append(Problem(message, work.file, key="model"))
    work.take("revision", "model.revision", str)


def _pytorch_options(work: ImportWork) -> None:
    work.take("attn_backend", "backend.attention", str)
    if work.values.get("disable_overlap_scheduler") is not None and work.take(
        "disable_overlap_scheduler", "backend.overlap_scheduler", bool, "the other way round"
    ):
        work.set("backend.overlap_scheduler", not work.values["disable_overlap_scheduler"])
    if work.take("use_cuda_graph", "backend.cuda_graphs", bool):
        return
    graphs = [key for key in work.values if key.startswith("cuda_graph_config")]
    for key in graphs:
        if key == "cuda_graph_config":
            work.use(key, "backend.cuda_graphs", work.values[key] is not None)
        else:
            work.set("backend.cuda_graphs", True)
            work.leave(key, "trtspec captures the batch sizes up to limits.max_batch_size")


def _options_kv(work: ImportWork) -> None:
    for key in ("kv_cache_config.dtype", "kv_cache_dtype"):
        found = work.text(key)
        if found in ("fp8", "nvfp4", "int8"):
            work.use(key, "quantization.kv_cache", found)
        elif found == "auto":
            work.leave(key, "auto takes the checkpoint's, which quantization.kv_cache of a recipe decides")
        elif found is not None:
            work.bad(key, f"found {shown(found)}; a recipe has auto, fp8 and nvfp4")
    size = work.integer("kv_cache_config.max_gpu_total_bytes")
    if size:
        work.use("kv_cache_config.max_gpu_total_bytes", "limits.kv_cache_bytes", size)


def _options_speculation(work: ImportWork, backend: str) -> None:
    prefix = "speculative_config."
    if not any(key.startswith(prefix) for key in work.values):
        work.set("speculation.kind", "none")
        return
    found = work.values.get(f"{prefix}decoding_type")
    method = {"draft": "draft_model"}.get(_method(found), _method(found))
    kind = {
        "ngram": "ngram", "drafttarget": "draft_model", "medusa": "medusa", "lookahead": "lookahead",
        "eagle3": "eagle3", "eagle": "eagle3" if backend == "pytorch" else "eagle",
    }.get(method)  # fmt: skip
    key = f"{prefix}decoding_type"
    if kind is None:
        allowed = "NGram, Draft_Target, Medusa, Lookahead, Eagle, Eagle3"
        work.bad(key, f"found {shown(found)}; a recipe has {allowed} and none; drop it or choose one")
        return
    work.use(key, "speculation.kind", kind)
    work.set("speculation", {"kind": kind})
    for name in ("speculative_model", "speculative_model_dir", "pytorch_weights_path"):
        _options_draft(work, f"{prefix}{name}", kind)
    if kind in ("medusa", "eagle", "eagle3") and not work.has("speculation.heads"):
        need_heads(work)
    if kind == "draft_model" and not work.has("speculation.model"):
        if work.flags.draft_model:
            work.set("speculation.model.source", work.flags.draft_model)
        else:
            message = "the file does not name the draft model; give --draft-model"
            work.problems.append(Problem(message, work.file, key="speculative_model"))
    names = {
        "ngram": (("max_draft_len", "num_draft_tokens"), ("prompt_lookup_num_tokens", "num_draft_tokens"),
                  ("max_matching_ngram_size", "max_ngram"), ("max_concurrency", "max_concurrency")),
        "draft_model": (("max_draft_len", "num_draft_tokens"), ("max_concurrency", "max_concurrency")),
        "lookahead": (("max_window_size", "window"), ("max_ngram_size", "ngram"),
                      ("max_verification_set_size", "verification_set")),
        "eagle3": (("max_draft_len", "num_draft_tokens"), ("max_concurrency", "max_concurrency")),
        "eagle": (("num_eagle_layers", "depth"), ("max_draft_len", "num_draft_tokens"),
                  ("dynamic_tree_max_topK", "top_k")),
        "medusa": (),
    }[kind]  # fmt: skip
    for key, to in names:
        work.take(f"{prefix}{key}", f"speculation.{to}", int)
    _options_trees(work, prefix, kind)
    _options_acceptance(work, prefix, kind)


def _options_draft(work: ImportWork, key: str, kind: str) -> None:
    found = work.text(key)
    flag, to = work.flags.heads, "speculation.heads"
    if kind == "draft_model":
        flag, to = work.flags.draft_model, "speculation.model.source"
    if found is None:
        return
    if kind in ("ngram", "lookahead"):
        work.leave(key, f"{kind} needs no trained weights")
    elif flag is not None:
        work.set(to, flag)
        work.leave(key, f"{flag} was named on the command line instead")
    else:
        work.use(key, to, found)


def _options_trees(work: ImportWork, prefix: str, kind: str) -> None:
    choices = f"{prefix}{'medusa' if kind == 'medusa' else 'eagle'}_choices"
    found = work.values.get(choices)
    if kind in ("medusa", "eagle") and found is not None:
        if isinstance(found, list):
            work.use(choices, "speculation.choices", found)
        else:
            work.bad(choices, f"found {shown(found)}; a list of paths is needed")
    if kind == "eagle3" and work.values.get(f"{prefix}use_dynamic_tree") is True:
        depth = work.integer(f"{prefix}max_draft_len")
        if work.take(f"{prefix}dynamic_tree_max_topK", "speculation.top_k", int) and depth:
            work.use(f"{prefix}max_draft_len", "speculation.depth", depth)
            work.data["speculation"].pop("num_draft_tokens", None)
            work.take(f"{prefix}max_total_draft_tokens", "speculation.num_draft_tokens", int)
            work.leave(f"{prefix}use_dynamic_tree", "a recipe says it by top_k above 1")
    if kind == "ngram" and isinstance(most := work.data["speculation"].get("max_ngram"), int) and most < 2:
        work.assume("speculation.min_ngram", max(most, 1), "at most max_ngram")


def _options_acceptance(work: ImportWork, prefix: str, kind: str) -> None:
    if work.values.get(f"{prefix}use_rejection_sampling") is True:
        work.use(f"{prefix}use_rejection_sampling", "acceptance.kind", "rejection")
    threshold = work.values.get(f"{prefix}posterior_threshold")
    if kind == "eagle" and threshold is not None and work.values.get(f"{prefix}greedy_sampling") is False:
        work.use(f"{prefix}posterior_threshold", "acceptance.epsilon", threshold)
        work.use(f"{prefix}greedy_sampling", "acceptance.kind", "typical")
        work.assume("gates.lossless", False, "typical acceptance changes the output law")
    for key in ("acceptance_length_threshold", "acceptance_rate_threshold", "draft_len_schedule"):
        if work.values.get(f"{prefix}{key}") is not None:
            work.leave(f"{prefix}{key}", "recipes switch drafting off by max_concurrency only")
    for key in ("use_relaxed_acceptance_for_thinking",):
        if work.values.get(f"{prefix}{key}"):
            work.leave(f"{prefix}{key}", "not lossless, and recipes have no such acceptance")

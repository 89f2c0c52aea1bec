"""A recipe from a TensorRT-LLM engine's ``config.json``, as versions 0.17 to 1.2.1 write it.

It holds ``version``, ``pretrained_config`` (the checkpoint as converted) and ``build_config`` (what the
builder made of its flags). The builder grows ``max_seq_len`` by the draft length before it writes it there,
so the recipe gets it less that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, Problem
from trtspec.known_models import known_models
from trtspec.model_source import find_model
from trtspec.modelspec import read_modelspec
from trtspec.recipe_facts import BACKEND_VERSIONS
from trtspec.trtllm.facts import versions_for, versions_with
from trtspec.trtllm.imported import (
    PLUGIN_KEYS,
    ImportWork,
    leave_beam_width,
    need_heads,
    shown,
    take_quantization,
)
from trtspec.versions import parse_version

_SECTIONS = (
    "pretrained_config",
    "build_config",
    "pretrained_config.mapping",
    "pretrained_config.quantization",
    "build_config.plugin_config",
)
"""Mappings whose keys are accounted for one by one; others count as one key."""
_SPECULATIVE_MODES = {
    1: "none",
    2: "draft_tokens_external",
    4: "medusa",
    8: "lookahead_decoding",
    16: "explicit_draft_tokens",
    32: "eagle",
}
"""Values of TensorRT-LLM's SpeculativeDecodingMode: a config.json holds the number."""
_ARCHITECTURE_KEYS = frozenset(
    {
        "architecture", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_size", "hidden_act", "logits_dtype", "norm_epsilon",
        "position_embedding_type", "max_position_embeddings", "intermediate_size", "runtime_defaults",
        "use_parallel_embedding", "embedding_sharding_dim", "share_embedding_table", "qk_layernorm",
        "mlp_bias", "attn_bias", "rotary_base", "rotary_scaling", "rotary_pct", "rotary_embedding_dim",
        "disable_weight_only_quant_plugin", "num_labels", "use_logn_attn", "moe",
        "moe_intermediate_size", "moe_shared_expert_intermediate_size", "qwen_type", "seq_length",
        "tie_word_embeddings", "residual_mlp", "kv_dtype", "has_partial_lora_mask",
        "remove_duplicated_kv_heads", "fc_after_embed", "use_input_layernorm_in_first_layer",
        "use_last_layernorm", "layer_idx_offset", "embedding_multiplier", "attention_multiplier",
        "residual_multiplier", "num_medusa_heads", "num_medusa_layers", "max_draft_len",
        "medusa_hidden_act", "num_eagle_layers", "max_non_leaves_per_layer", "eagle_net_config",
    }
)  # fmt: skip
"""Keys of ``pretrained_config`` that describe the checkpoint: of Llama, Qwen, Medusa and EAGLE."""
_MAPPING_KEYS = frozenset(
    {
        "world_size", "gpus_per_node", "cp_size", "tp_size", "pp_size", "moe_tp_size", "moe_ep_size",
        "moe_cluster_size", "attn_tp_size", "attn_cp_size", "cp_config", "enable_attention_dp",
        "auto_parallel", "rank", "enable_lm_head_tp_in_adp",
    }
)  # fmt: skip
_OLD_BUILD_KEYS = frozenset({"auto_parallel_config", "builder_opt", "use_fused_mlp", "max_output_len"})
_DEFAULT_MEDUSA_NODES = 63


def import_engine(work: ImportWork, data: Mapping[str, Any], version: str | None, base: Path) -> str:
    """Take what the engine's ``data`` says into ``work``; returns TensorRT-LLM's version. ``base``: where a
    relative path to the model starts. InputError where nothing can be read; the rest is noted in ``work``."""
    work.flatten(data, _SECTIONS)
    for section in ("pretrained_config", "build_config"):
        if not isinstance(data[section], dict):
            raise InputError(
                Problem(f"found {shown(data[section])}; a mapping is needed", work.file, key=section)
            )
    known = _engine_version(work, version)
    work.set("backend.kind", "tensorrt")
    dtype = work.text("pretrained_config.dtype")
    if dtype in ("bfloat16", "float16"):
        work.use("pretrained_config.dtype", "backend.dtype", dtype)
    elif "pretrained_config.dtype" in work.values:
        work.bad(
            "pretrained_config.dtype", f"found {shown(dtype)}; recipes for engines have bfloat16 and float16"
        )
    plugins = "build_config.plugin_config."
    work.take(f"{plugins}use_paged_context_fmha", "backend.paged_context_fmha", bool)
    work.take(f"{plugins}multiple_profiles", "backend.multiple_profiles", bool)
    take_quantization(work, "pretrained_config.quantization.")
    work.take("pretrained_config.mapping.tp_size", "parallel.tp", int)
    work.take("pretrained_config.mapping.pp_size", "parallel.pp", int)
    for key in ("cp_size", "moe_ep_size"):
        if (work.integer(f"pretrained_config.mapping.{key}") or 1) > 1:
            work.leave(
                f"pretrained_config.mapping.{key}", "recipes have tensor and pipeline parallelism only"
            )
    for key, to in (
        ("max_batch_size", "max_batch_size"),
        ("max_input_len", "max_input_tokens"),
        ("max_num_tokens", "max_num_tokens"),
    ):
        if not work.take(f"build_config.{key}", f"limits.{to}", int):
            work.bad(f"build_config.{key}", "missing; an engine has it")
    leave_beam_width(work, "build_config.max_beam_width")
    _engine_speculation(work)
    _engine_length(work)
    if "pretrained_config.quantization.exclude_modules" in work.values:
        work.leave(
            "pretrained_config.quantization.exclude_modules",
            "names of TensorRT-LLM's modules; a recipe's exclude takes the checkpoint's names",
        )
    _engine_model(work, base)
    work.rest(_why_unknown)
    return known


def _engine_version(work: ImportWork, version: str | None) -> str:
    found = work.values.get("version") if version is None else version
    if not isinstance(found, str):
        message = f"found {shown(found)}; the engine does not say its version; give --tensorrt-llm VERSION"
        raise InputError(Problem(message, work.file, key="version"))
    # 1.2.1.post1+cu130 is 1.2.1; a development version counts as its release.
    plain = re.sub(r"(\.(post|dev)\d+|\+[\w.]+)+$", "", found.strip()[:64])
    try:
        admitted = BACKEND_VERSIONS["tensorrt"].admits(plain)
    except ValueError as error:
        raise InputError(Problem(f"{error}; give --tensorrt-llm VERSION", work.file, key="version")) from None
    if not admitted:
        versions = BACKEND_VERSIONS["tensorrt"]
        message = f"found {shown(found)}; engines of {versions} can be imported; rebuild it with one of them"
        raise InputError(Problem(message, work.file, key="version"))
    asked, why = _around(plain)
    if version is None:
        work.use("version", "backend.version", asked, why)
    else:
        work.set("backend.version", asked)
        work.leave("version", f"--tensorrt-llm {version} was given instead")
    return plain


def _around(version: str) -> tuple[str, str]:
    """The range that says ``version``: itself where it has a table, else from one neighbour to the other."""
    wanted = parse_version(version)
    known = {parse_version(one): one for one in versions_for("tensorrt", BACKEND_VERSIONS["tensorrt"])}
    if wanted in known:
        return f"=={version}", ""
    below, above = max(v for v in known if v < wanted), min(v for v in known if v > wanted)
    return f">={known[below]},<={known[above]}", f"{version} has no table; its neighbours have"


def _why_unknown(key: str) -> str:
    section, _, last = key.rpartition(".")
    if section == "pretrained_config":
        is_known = last in _ARCHITECTURE_KEYS
    elif section == "pretrained_config.mapping":
        is_known = last in _MAPPING_KEYS
    elif section == "pretrained_config.quantization":
        is_known = bool(versions_with("QuantConfig", last))
    elif section == "build_config.plugin_config":
        is_known = last in PLUGIN_KEYS or bool(versions_with("trtllm-build", f"--{last}"))
    elif section == "build_config":
        is_known = last in _OLD_BUILD_KEYS or bool(versions_with("BuildConfig", last))
    else:
        is_known = False
    return "" if is_known else "no known version has it"


def _draft_length(work: ImportWork) -> int:
    """Draft tokens the engine takes. Medusa and EAGLE checkpoints bring theirs, which the builder copies."""
    return work.integer("build_config.max_draft_len") or work.integer("pretrained_config.max_draft_len") or 0


def _engine_speculation(work: ImportWork) -> None:
    key = "build_config.speculative_decoding_mode"
    found = work.values.get(key, 1)
    if isinstance(found, str):
        mode: str | None = found.lower().rsplit(".", 1)[-1]
        mode = mode if mode in _SPECULATIVE_MODES.values() else None
    else:
        mode = _SPECULATIVE_MODES.get(found) if type(found) is int else None
    if mode is None or mode == "explicit_draft_tokens":
        what = "ReDrafter, which trtspec does not have" if mode else f"found {shown(found)}"
        choices = ", ".join(name for name in _SPECULATIVE_MODES.values() if name != "explicit_draft_tokens")
        work.bad(key, f"{what}; allowed: {choices}")
        return
    kind = {"draft_tokens_external": "ngram", "lookahead_decoding": "lookahead"}.get(mode, mode)
    if kind == "ngram" and work.flags.draft_model:
        kind = "draft_model"
    if key in work.values:
        work.use(key, "speculation.kind", kind)
    work.set("speculation", {"kind": kind})
    length = _draft_length(work)
    {"none": _no_drafting, "ngram": _external, "draft_model": _external, "medusa": _medusa_engine,
     "lookahead": _lookahead_engine, "eagle": _eagle_engine}[kind](work, length)  # fmt: skip


def _no_drafting(work: ImportWork, length: int) -> None:
    """Nothing more to take."""


def _external(work: ImportWork, length: int) -> None:
    if not work.take("build_config.max_draft_len", "speculation.num_draft_tokens", int):
        work.bad("build_config.max_draft_len", "missing; an engine that drafts has it")
    if work.flags.draft_model:
        work.set("speculation.model.source", work.flags.draft_model)
    else:
        why = "the engine takes drafts from outside and does not say whose; --draft-model names a draft model"
        work.assumed.append(("speculation.kind", "ngram", why))


def _medusa_engine(work: ImportWork, length: int) -> None:
    need_heads(work)
    if length != _DEFAULT_MEDUSA_NODES:
        why = (
            f"the engine takes {length} draft tokens, so its tree is not the default one of 63, and no "
            "engine holds its tree; write its choices into the recipe"
        )
        work.assumed.append(("speculation.choices", None, why))
    work.leave("build_config.max_draft_len", "nodes of the tree; a recipe lists them as choices")


def _eagle_engine(work: ImportWork, length: int) -> None:
    need_heads(work)
    work.take("pretrained_config.num_eagle_layers", "speculation.depth", int)
    key = (
        "build_config.max_draft_len"
        if work.values.get("build_config.max_draft_len")
        else "pretrained_config.max_draft_len"
    )
    if length and key in work.values:
        work.use(key, "speculation.num_draft_tokens", length)
    work.assumed.append(
        (
            "speculation.choices",
            None,
            "static tree or dynamic is chosen at run time, not in the engine; dynamic here",
        )
    )


def _lookahead_engine(work: ImportWork, length: int) -> None:
    """(window, ngram, verification set) from the one number that is left of them."""
    fitting = [
        (w, n, g)
        for n in range(2, 17)
        for w in range(2, 33)
        for g in range(1, 33)
        if (n - 2) + (w - 1 + g) * (n - 1) == length
    ]
    if not fitting or "build_config.max_draft_len" not in work.values:
        work.bad(
            "build_config.max_draft_len", f"found {length}; no lookahead (window, ngram, set) has that size"
        )
        return
    # The published settings have window = set, and the default (4, 3, 4) is the smallest of them.
    w, n, g = min(fitting, key=lambda one: (one[0] != one[2], abs(one[0] - one[1]), one))
    why = f"{len(fitting)} settings have {length} draft positions; requests may ask for a smaller one"
    work.use("build_config.max_draft_len", "speculation.window", w, f"one of {len(fitting)} that fit")
    work.assumed.append(("speculation.window, ngram, verification_set", [w, n, g], why))
    work.data["speculation"].update({"window": w, "ngram": n, "verification_set": g})


def _engine_length(work: ImportWork) -> None:
    key = "build_config.max_seq_len"
    total = work.integer(key)
    if total is None:
        work.bad(key, "missing; an engine has it")
        return
    grown = _draft_length(work) if work.data.get("speculation", {}).get("kind") != "none" else 0
    if work.data.get("speculation", {}).get("kind") == "eagle":
        grown += work.integer("pretrained_config.num_eagle_layers") or 0
    why = f"less the {grown} positions that the builder adds for drafting" if grown else ""
    work.use(key, "limits.max_seq_tokens", total - grown, why)


def _engine_model(work: ImportWork, base: Path) -> None:
    sizes = {
        "num_layers": work.integer("pretrained_config.num_hidden_layers"),
        "hidden_size": work.integer("pretrained_config.hidden_size"),
        "num_heads": work.integer("pretrained_config.num_attention_heads"),
        "intermediate_size": work.integer("pretrained_config.intermediate_size"),
    }
    told = {name: value for name, value in sizes.items() if value is not None}
    if work.flags.model is None:
        fits = [
            model.id
            for model in known_models()
            if told and all(getattr(model.spec, name) == value for name, value in told.items())
        ]
        shape = ", ".join(f"{name} {value}" for name, value in told.items()) or "sizes unknown"
        hint = f"; its sizes ({shape}) are those of {' and '.join(fits)}" if fits else f" ({shape})"
        message = f"an engine does not say which checkpoint it is from{hint}; give --model"
        work.problems.append(Problem(message, work.file, key="model"))
        return
    work.set("model.source", work.flags.model)
    folder = find_model(work.flags.model, base)
    if folder is None:
        return
    try:
        spec = read_modelspec(folder)
    except InputError:
        return  # lint and build say what is wrong with the checkpoint
    for name, value in told.items():
        if getattr(spec, name) != value:
            message = f"the engine has {name} {value}, --model {work.flags.model} has {getattr(spec, name)}"
            work.problems.append(Problem(message, work.file, key="model"))

"""What TensorRT-LLM does with a recipe: refusals, known failures and silent adjustments, by version and GPU.

:func:`check` runs :data:`RULES` for one version. *error*: it cannot be built, or cannot run. *warning*: it
is reported to go wrong, or is not what one would expect. *note*: you ask for one thing and the builder does
another, or leaves it to you. Each rule is one function over a :class:`~trtspec.trtllm.case.Case`
(:mod:`~trtspec.trtllm.rules_build`, :mod:`~trtspec.trtllm.rules_draft`, :mod:`~trtspec.trtllm.rules_model`);
its docstring is the reason that ``trtspec lint --explain`` prints, ``source`` says where it was learned:
``#`` is an issue or pull request of NVIDIA/TensorRT-LLM, ``TB #`` of its Triton backend, ``MO #`` of
ModelOpt.
Combinations that hold for every version are in :mod:`trtspec.recipe_rules`. Nothing here was tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trtspec.hardware import Gpu
from trtspec.modelspec import ModelSpec
from trtspec.recipe import Recipe
from trtspec.trtllm import rules_build as build
from trtspec.trtllm import rules_draft as draft_
from trtspec.trtllm import rules_model as model
from trtspec.trtllm.case import Case, Path, Told
from trtspec.trtllm.checkpoint import Checkpoint, of_spec
from trtspec.trtllm.facts import load_facts

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """``path``: the recipe's key to blame, as in :mod:`trtspec.recipe_rules`."""

    rule: str
    severity: Severity
    path: Path
    message: str


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    source: str
    check: Callable[[Case], Told]

    @property
    def why(self) -> str:
        return " ".join((self.check.__doc__ or "").split())


def check(
    recipe: Recipe,
    version: str,
    *,
    gpu: Gpu | None = None,
    checkpoint: Checkpoint | ModelSpec | None = None,
    draft: Checkpoint | ModelSpec | None = None,
) -> list[Finding]:
    """What TensorRT-LLM ``version`` does with ``recipe``, in the order of :data:`RULES`.

    ``gpu`` turns on the rules of its architecture; ``checkpoint`` and ``draft`` (the recipe's models, see
    :mod:`trtspec.trtllm.checkpoint`) those of their sizes. A recipe for the embedded backend has no findings.
    Raises InputError for a version without a table.
    """
    facts = load_facts(version)
    if recipe.backend.kind == "embedded":
        return []
    case = Case(recipe, facts, gpu, _plain(checkpoint), _plain(draft))
    return [
        Finding(rule.id, rule.severity, path, message)
        for rule in RULES.values()
        for path, message in rule.check(case)
    ]


def _plain(checkpoint: Checkpoint | ModelSpec | None) -> Checkpoint | None:
    return of_spec(checkpoint) if isinstance(checkpoint, ModelSpec) else checkpoint


_HARDWARE = "table of hardware in the documentation of 1.2.1"
_BUILDER = "builder of 1.2.1, source"

_TABLE = (
    # version and GPU
    Rule("trtllm-version", "error", "tables of each version; #8223, #15907, #15918, #16369", build.version),
    Rule("trtllm-last-engines", "note", "#11723, #15907, #15918, #16369", build.last_engines),
    Rule("trtllm-fp8-sm", "error", f"#1770; {_HARDWARE}", build.fp8_sm),
    Rule("trtllm-nvfp4-sm", "error", _HARDWARE, build.nvfp4_sm),
    Rule("trtllm-nvfp4-kv-sm", "error", _HARDWARE, build.nvfp4_kv_sm),
    Rule("trtllm-engine-blackwell", "error", _BUILDER, build.engine_blackwell),
    Rule("trtllm-awq-blackwell", "warning", _HARDWARE, build.awq_blackwell),
    Rule("trtllm-w4a8-kv8-ada", "error", "#9253", build.w4a8_kv8_ada),
    Rule("trtllm-w4a8-engine-ada", "warning", "#1792, #1104, #1770", build.w4a8_engine_ada),
    Rule("trtllm-fp8-phi-blackwell", "warning", "#8308", build.fp8_phi_blackwell),
    Rule("trtllm-memory", "error", "arithmetic; #1012", build.memory),
    # quantization
    Rule("trtllm-quant-format", "error", "tables of each version; #6680", build.quant_format),
    Rule("trtllm-awq-group", "error", "#988; message of the fine-grained GEMM kernels", build.awq_group),
    Rule("trtllm-lm-head-option", "error", "tables of each version", build.lm_head_option),
    Rule("trtllm-lm-head", "warning", "MO #153", build.lm_head),
    Rule("trtllm-engine-exclude", "error", "tables of each version", build.engine_exclude),
    Rule("trtllm-engine-alpha", "warning", "tables of each version; ModelOpt's preset", build.engine_alpha),
    Rule("trtllm-sq-dtype", "warning", "#2559", build.sq_dtype),
    Rule("trtllm-paged-refused", "error", "builder of 0.17, source", build.paged_refused),
    Rule("trtllm-paged-off", "note", f"#8862, #2166, TB #271; {_BUILDER}", build.paged_off),
    Rule("trtllm-awq-kv8-kernel", "warning", "#8862", build.awq_kv8_kernel),
    Rule("trtllm-awq-kv8-drafting", "error", "#8862", build.awq_kv8_drafting),
    Rule("trtllm-fp8-context", "note", f"#2112; {_BUILDER}", build.fp8_context),
    Rule("trtllm-fused-mlp", "note", _BUILDER, build.fused_mlp),
    Rule("trtllm-nvfp4-gemm", "note", _BUILDER, build.nvfp4_gemm),
    # limits
    Rule("trtllm-kv-fraction", "note", "#1012", build.kv_fraction),
    Rule("trtllm-kv-bytes", "error", "tables of each version", build.kv_bytes),
    Rule("trtllm-kv-tokens", "note", "parameters of the C++ backend 0.19.0", build.kv_tokens),
    Rule("trtllm-vanilla", "warning", "attention classes of the LLM API, source", build.vanilla),
    Rule("trtllm-rows-raised", "note", _BUILDER, build.rows_raised),
    Rule("trtllm-rows-capped", "note", _BUILDER, build.rows_capped),
    Rule("trtllm-rows-large", "warning", _BUILDER, build.rows_large),
    Rule("trtllm-several-nodes", "warning", "documentation of launch_triton_server.py", build.several_nodes),
    # drafting
    Rule("trtllm-ngram-engine", "warning", "documentation of run.py", draft_.ngram_engine),
    Rule("trtllm-ngram-shortest", "note", "tables of each version", draft_.ngram_shortest),
    Rule("trtllm-bls", "warning", "TB #676, #2709, #2671", draft_.bls),
    Rule("trtllm-bls-logits", "note", "TB #676; documentation of run.py", draft_.bls_logits),
    Rule("trtllm-draft-memory", "note", "#3497", draft_.draft_memory),
    Rule("trtllm-draft-reuse", "note", "#5448", draft_.draft_reuse),
    Rule("trtllm-overlap-off", "note", "drafting documentation; ai-dynamo/dynamo #14339", draft_.overlap_off),
    Rule("trtllm-greedy-only", "note", "Medusa and EAGLE documentation", draft_.greedy_only),
    Rule("trtllm-typical-delta", "warning", "EAGLE documentation", draft_.typical_delta),
    Rule("trtllm-default-tree", "note", "#2506", draft_.default_tree),
    Rule("trtllm-heads-format", "error", "#2115; tables of each version", draft_.heads_format),
    Rule("trtllm-eagle-target", "error", "EAGLE documentation; tables of each version", draft_.eagle_target),
    Rule("trtllm-serve", "warning", "Triton's guide to drafting, C++ backend, source; TB #309", draft_.serve),
    Rule("trtllm-converted-length", "note", "builder of 0.17, source", draft_.converted_length),
    Rule("trtllm-grown-sequence", "note", _BUILDER, draft_.grown_sequence),
    Rule("trtllm-eagle3-tree", "error", "tables of each version", draft_.eagle3_tree),
    Rule("trtllm-eagle3-workstation", "warning", "#11125", draft_.eagle3_workstation),
    Rule("trtllm-acceptance-gate", "note", "#18905, #5146", draft_.acceptance_gate),
    # checkpoints
    Rule("trtllm-encoder-decoder", "error", "#2419", model.encoder_decoder),
    Rule("trtllm-architecture", "warning", "list of models of 1.0.0, documentation", model.architecture),
    Rule("trtllm-foreign-checkpoint", "error", "#3548", model.foreign_checkpoint),
    Rule("trtllm-medusa-architecture", "error", "#1798; Medusa documentation", model.medusa_architecture),
    Rule("trtllm-medusa-qwen", "warning", "#2678", model.medusa_qwen),
    Rule("trtllm-eagle-architecture", "error", "#10396", model.eagle_architecture),
    Rule("trtllm-eagle3-architecture", "warning", "#18905, #6158, #7488", model.eagle3_architecture),
    Rule(
        "trtllm-engine-quantized-architecture",
        "error",
        "#6513, MO #271; table of the engine flow",
        model.engine_quantized_architecture,
    ),
    Rule("trtllm-qwen-fp8-kv", "warning", "#8572", model.qwen_fp8_kv),
    Rule("trtllm-heads-shard", "error", "arithmetic", model.heads_shard),
    Rule("trtllm-layers-shard", "error", "arithmetic", model.layers_shard),
    Rule("trtllm-group-shard", "error", "#9253", model.group_shard),
    Rule("trtllm-draft-vocabulary", "warning", "drafting documentation; #2684", model.draft_vocabulary),
    Rule("trtllm-draft-logits", "error", "drafting documentation; #2684", model.draft_logits),
    Rule("trtllm-draft-tokens", "error", "drafting documentation; #2684", model.draft_tokens),
    Rule("trtllm-positions", "error", "arithmetic", model.positions),
    Rule("trtllm-draft-positions", "warning", "arithmetic", model.draft_positions),
    Rule("trtllm-grown-positions", "note", _BUILDER, model.grown_positions),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _TABLE}
"""Rule id -> rule."""

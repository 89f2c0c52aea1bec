# ruff: noqa: E501
"""Recipes that TensorRT-LLM refuses, gets wrong or changes, and for each the least change that makes it silent.

``changes`` are laid over the backend's base recipe; ``Good`` is what to change besides (a version, a GPU, a
checkpoint count as changes too). One table, longer than other files because every case is written out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.hardware import Gpu, find_gpu
from trtspec.recipe import Recipe
from trtspec.recipe_file import lint_content
from trtspec.recipe_yaml import dump_plain
from trtspec.trtllm.checkpoint import Checkpoint, known_checkpoint

TRT: dict[str, Any] = {
    "version": 1,
    "name": "a",
    "model": {"source": "org/model"},
    "backend": {"kind": "tensorrt", "version": ">=0.17,<=1.2.1"},
    "limits": {"max_num_tokens": 4096, "kv_cache_bytes": None},
}
PYT: dict[str, Any] = {**TRT, "backend": {"kind": "pytorch", "version": ">=1.0,<1.5"}}

VOCABULARIES = Path(__file__).parent / "vocabularies"
"""Folders a and b: two tokenizers that number one token otherwise."""

MEDUSA = {"kind": "medusa", "heads": "h", "choices": [[0], [0, 0]]}
EAGLE = {"kind": "eagle", "heads": "h", "depth": 2, "choices": [[0], [0, 0]]}
EAGLE3 = {"kind": "eagle3", "heads": "h"}
NGRAM = {"kind": "ngram"}
LOOKAHEAD = {"kind": "lookahead"}
DRAFT = {"kind": "draft_model", "model": {"source": "org/draft"}}


def _known(name: str) -> Checkpoint:
    found = known_checkpoint(name)
    assert found is not None
    return found


LLAMA = _known("8B")
LLAMA_70B = _known("70B")
SMALL = _known("1B")
QWEN2 = replace(LLAMA, architecture="Qwen2ForCausalLM", spec=None)
QWEN3_MOE = replace(LLAMA, architecture="Qwen3MoeForCausalLM", num_experts=128, spec=None)
MIXTRAL = replace(LLAMA, architecture="MixtralForCausalLM", num_experts=8, spec=None)
GEMMA3 = replace(LLAMA, architecture="Gemma3ForCausalLM", spec=None)
LLAMA4 = replace(LLAMA, architecture="Llama4ForConditionalGeneration", num_experts=16, spec=None)
MISTRAL = replace(LLAMA, architecture="MistralForCausalLM", spec=None)
PHI3 = replace(LLAMA, architecture="Phi3ForCausalLM", spec=None)
T5 = replace(LLAMA, architecture="T5ForConditionalGeneration", encoder_decoder=True, spec=None)
GPTQ = replace(LLAMA, quant_method="gptq", spec=None)


@dataclass(frozen=True)
class Good:
    """What of a bad case to change; ``changes`` are laid over its own."""

    changes: dict[str, Any] | None = None
    version: str | None = None
    gpu: str | None = None
    checkpoint: Checkpoint | None = None
    draft: Checkpoint | None = None


@dataclass(frozen=True)
class Bad:
    rule: str
    base: dict[str, Any]
    version: str
    changes: dict[str, Any]
    key: str
    good: Good
    gpu: str | None = None
    checkpoint: Checkpoint | None = None
    draft: Checkpoint | None = None

    def recipe(self) -> Recipe:
        return made(self.base, self.changes)

    def board(self) -> Gpu | None:
        return None if self.gpu is None else find_gpu(self.gpu)

    def repaired(self) -> Bad:
        good = self.good
        return replace(
            self,
            changes=merged(self.changes, good.changes or {}),
            version=good.version or self.version,
            gpu=good.gpu or self.gpu,
            checkpoint=good.checkpoint or self.checkpoint,
            draft=good.draft or self.draft,
        )


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` laid over ``base``, key by key; a mapping with another kind replaces the one below."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        below = result.get(key)
        joins = isinstance(value, dict) and isinstance(below, dict)
        if joins and value.get("kind", below.get("kind")) == below.get("kind"):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def made(base: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    """The recipe; every other rule of trtspec must accept it, so that only TensorRT-LLM's can object."""
    result = lint_content(dump_plain(merged(base, changes)))
    assert result.recipe is not None, [str(problem) for problem in result.errors]
    return result.recipe


def _q(kind: str, kv: str = "none", **more: Any) -> dict[str, Any]:
    return {"quantization": {"kind": kind, "kv_cache": kv, **more}}


def _s(speculation: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"speculation": {**speculation, **more}}


BAD_RECIPES: tuple[Bad, ...] = (
    # version and GPU
    Bad("trtllm-version", TRT, "1.3.0rc27", {}, "backend.kind", Good(version="1.2.1")),
    Bad("trtllm-version", TRT, "1.4.0rc4", _s(MEDUSA), "backend.kind", Good(version="0.21.0")),
    Bad("trtllm-version", PYT, "0.21.0", {}, "backend.kind", Good(version="1.0.0")),
    Bad("trtllm-version", PYT, "1.0.0", {"backend": {"version": ">=1.2,<1.5"}}, "backend.version", Good(version="1.2.1")),
    Bad("trtllm-last-engines", TRT, "1.2.1", {}, "backend.kind", Good(version="1.1.0")),
    Bad("trtllm-fp8-sm", TRT, "1.2.1", _q("fp8"), "quantization.kind", Good(gpu="L40S"), gpu="A100-SXM-80G"),
    Bad("trtllm-fp8-sm", PYT, "1.2.1", _q("w4a8_awq"), "quantization.kind", Good(_q("w4a16_awq")), gpu="A10"),
    Bad("trtllm-fp8-sm", TRT, "1.0.0", _s(DRAFT, quantization={"kind": "fp8"}), "speculation.quantization.kind", Good(_s({"quantization": {"kind": "none"}})), gpu="A30"),
    Bad("trtllm-nvfp4-sm", PYT, "1.2.1", _q("nvfp4"), "quantization.kind", Good(gpu="B200-SXM"), gpu="H100-SXM"),
    Bad("trtllm-nvfp4-sm", TRT, "1.2.1", _q("nvfp4", "fp8"), "quantization.kind", Good(_q("fp8", "fp8")), gpu="L40S"),
    Bad("trtllm-nvfp4-kv-sm", PYT, "1.2.1", _q("fp8", "nvfp4"), "quantization.kv_cache", Good(gpu="B300-SXM"), gpu="H200-SXM"),
    Bad("trtllm-nvfp4-kv-sm", PYT, "1.2.1", _q("fp8", "nvfp4"), "quantization.kv_cache", Good(_q("fp8", "fp8")), gpu="RTX-5090"),
    Bad("trtllm-engine-blackwell", TRT, "1.2.1", _q("w4a16_awq"), "quantization.kind", Good(_q("fp8")), gpu="B200-SXM"),
    Bad("trtllm-engine-blackwell", TRT, "1.0.0", _q("w8a8_sq", alpha=1.0), "quantization.kind", Good(gpu="H100-SXM"), gpu="GB200"),
    Bad("trtllm-engine-blackwell", TRT, "1.2.1", _q("fp8", "int8"), "quantization.kv_cache", Good(_q("fp8", "fp8")), gpu="B200-SXM"),
    Bad("trtllm-awq-blackwell", PYT, "1.1.0", _q("w4a16_awq"), "quantization.kind", Good(version="1.2.1"), gpu="B200-SXM"),
    Bad("trtllm-awq-blackwell", PYT, "1.2.1", _q("w4a8_awq"), "quantization.kind", Good(_q("nvfp4")), gpu="RTX-5090"),
    Bad("trtllm-w4a8-kv8-ada", PYT, "1.2.1", _q("w4a8_awq", "fp8"), "quantization.kv_cache", Good(_q("w4a8_awq")), gpu="L40S"),
    Bad("trtllm-w4a8-kv8-ada", PYT, "1.1.0", _q("w4a8_awq", "fp8"), "quantization.kv_cache", Good(gpu="H100-SXM"), gpu="L4"),
    Bad("trtllm-w4a8-engine-ada", TRT, "1.0.0", _q("w4a8_awq"), "quantization.kind", Good(gpu="H100-SXM"), gpu="RTX-4090"),
    Bad("trtllm-fp8-phi-blackwell", PYT, "1.0.0", _q("fp8"), "quantization.kind", Good(gpu="H100-SXM"), gpu="B200-SXM", checkpoint=PHI3),
    Bad("trtllm-memory", PYT, "1.2.1", {}, "parallel.tp", Good({"parallel": {"tp": 4}}), gpu="H100-SXM", checkpoint=LLAMA_70B),
    Bad("trtllm-memory", TRT, "1.2.1", _s(DRAFT), "parallel.tp", Good(_q("fp8") | _s({"quantization": {"kind": "fp8"}})), gpu="L4", checkpoint=LLAMA, draft=LLAMA),
    # quantization
    Bad("trtllm-quant-format", TRT, "0.17.0", _q("nvfp4"), "quantization.kind", Good(version="0.21.0")),
    Bad("trtllm-quant-format", TRT, "0.17.0", _s(DRAFT, quantization={"kind": "nvfp4"}), "speculation.quantization.kind", Good(_s({"quantization": {"kind": "fp8"}}))),
    Bad("trtllm-awq-group", PYT, "1.2.1", _q("w4a16_awq", group_size=32), "quantization.group_size", Good(_q("w4a16_awq", group_size=64))),
    Bad("trtllm-awq-group", TRT, "1.0.0", _q("w4a8_awq", group_size=64), "quantization.group_size", Good(_q("w4a8_awq", group_size=128))),
    Bad("trtllm-awq-group", TRT, "1.0.0", _s(DRAFT, quantization={"kind": "w4a16_awq", "group_size": 32}), "speculation.quantization.group_size", Good(_s({"quantization": {"group_size": 128}}))),
    Bad("trtllm-lm-head-option", TRT, "0.17.0", _q("fp8", lm_head=True), "quantization.lm_head", Good(version="1.2.1")),
    Bad("trtllm-lm-head-option", TRT, "1.2.1", _q("w4a16_awq", lm_head=True), "quantization.lm_head", Good(_q("w4a16_awq", lm_head=False))),
    Bad("trtllm-lm-head", TRT, "1.2.1", _q("fp8", lm_head=True), "quantization.lm_head", Good(_q("fp8", lm_head=False))),
    Bad("trtllm-lm-head", PYT, "1.2.1", _q("w4a16_awq", lm_head=True), "quantization.lm_head", Good(_q("w4a16_awq", lm_head=False))),
    Bad("trtllm-engine-exclude", TRT, "1.2.1", _q("fp8", exclude=["*.down_proj"]), "quantization.exclude", Good(_q("fp8", exclude=[]))),
    Bad("trtllm-engine-exclude", TRT, "0.17.0", _s(DRAFT, quantization={"kind": "fp8", "exclude": ["*.o_proj"]}), "speculation.quantization.exclude", Good(_s({"quantization": {"exclude": []}}))),
    Bad("trtllm-engine-alpha", TRT, "1.0.0", _q("w8a8_sq"), "quantization.alpha", Good(_q("w8a8_sq", alpha=1.0))),
    Bad("trtllm-sq-dtype", TRT, "1.0.0", _q("w8a8_sq", "fp8", alpha=1.0), "backend.dtype", Good({"backend": {"dtype": "float16"}})),
    Bad("trtllm-paged-refused", TRT, "0.17.0", _q("fp8", "int8"), "backend.paged_context_fmha", Good({"backend": {"paged_context_fmha": False}})),
    Bad("trtllm-paged-refused", TRT, "0.17.0", _q("w4a16_awq", "fp8"), "backend.paged_context_fmha", Good(version="0.21.0")),
    Bad("trtllm-paged-off", TRT, "1.2.1", _q("w4a16_awq", "fp8"), "quantization.kv_cache", Good(_q("w4a16_awq"))),
    Bad("trtllm-paged-off", PYT, "1.2.1", _q("w4a16_awq", "fp8"), "quantization.kv_cache", Good(_q("fp8", "fp8"))),
    Bad("trtllm-awq-kv8-kernel", PYT, "1.1.0", _q("w4a16_awq", "fp8"), "quantization.kv_cache", Good(version="1.2.1")),
    Bad("trtllm-awq-kv8-drafting", PYT, "1.2.1", _q("w4a16_awq", "fp8") | _s(NGRAM), "speculation.kind", Good(_q("w4a16_awq"))),
    Bad("trtllm-awq-kv8-drafting", PYT, "1.0.0", _q("w4a16_awq", "fp8") | _s(EAGLE3), "speculation.kind", Good(_q("fp8", "fp8"))),
    Bad("trtllm-fp8-context", TRT, "1.2.1", _q("fp8"), "quantization.kv_cache", Good(_q("fp8", "fp8"))),
    Bad("trtllm-fused-mlp", TRT, "1.2.1", _q("w4a16_awq"), "quantization.kind", Good(_q("fp8"))),
    Bad("trtllm-nvfp4-gemm", TRT, "1.2.1", _q("nvfp4", "fp8"), "quantization.kind", Good(_q("fp8", "fp8"))),
    # limits
    Bad("trtllm-kv-fraction", PYT, "1.2.1", {}, "limits.kv_cache_bytes", Good({"limits": {"kv_cache_bytes": 2**33}})),
    Bad("trtllm-kv-bytes", PYT, "1.0.0", {"limits": {"kv_cache_bytes": 2**33}}, "limits.kv_cache_bytes", Good(version="1.1.0")),
    Bad("trtllm-kv-bytes", PYT, "1.0.0", {"limits": {"kv_cache_bytes": 2**33}}, "limits.kv_cache_bytes", Good({"limits": {"kv_cache_bytes": None}})),
    Bad("trtllm-kv-tokens", TRT, "1.0.0", {"limits": {"kv_cache_bytes": 2**33}}, "limits.kv_cache_bytes", Good({"limits": {"kv_cache_bytes": None}})),
    Bad("trtllm-vanilla", PYT, "1.2.1", {"backend": {"attention": "VANILLA"}}, "backend.attention", Good({"backend": {"attention": "FLASHINFER"}})),
    Bad("trtllm-rows-raised", TRT, "1.2.1", _s(MEDUSA) | {"limits": {"max_batch_size": 2048}}, "limits.max_num_tokens", Good({"limits": {"max_batch_size": 1024}})),
    Bad("trtllm-rows-capped", TRT, "1.2.1", {"limits": {"max_batch_size": 1}}, "limits.max_num_tokens", Good({"limits": {"max_batch_size": 2}})),
    Bad("trtllm-rows-large", TRT, "1.2.1", _s({**MEDUSA, "choices": None}) | {"limits": {"max_batch_size": 512}}, "limits.max_batch_size", Good({"limits": {"max_batch_size": 8}})),
    Bad("trtllm-several-nodes", PYT, "1.2.1", {"parallel": {"tp": 16}}, "parallel.tp", Good({"parallel": {"tp": 8}})),
    # drafting
    Bad("trtllm-ngram-engine", TRT, "1.2.1", _s(NGRAM), "speculation.kind", Good(_s(LOOKAHEAD))),
    Bad("trtllm-ngram-shortest", PYT, "1.2.1", _s(NGRAM), "speculation.min_ngram", Good(_s({"min_ngram": 1}))),
    Bad("trtllm-bls", TRT, "1.2.1", _s(DRAFT), "speculation.kind", Good(_s(EAGLE))),
    Bad("trtllm-bls-logits", TRT, "1.2.1", _s(DRAFT) | {"acceptance": {"kind": "rejection"}}, "acceptance.kind", Good({"acceptance": {"kind": "exact"}})),
    Bad("trtllm-draft-memory", PYT, "1.2.1", _s(DRAFT), "speculation.kind", Good(_s(NGRAM))),
    Bad("trtllm-draft-reuse", PYT, "1.0.0", _s(DRAFT), "speculation.kind", Good(version="1.1.0")),
    Bad("trtllm-overlap-off", PYT, "1.2.1", _s(NGRAM), "backend.overlap_scheduler", Good({"backend": {"overlap_scheduler": False}})),
    Bad("trtllm-greedy-only", TRT, "1.2.1", _s(EAGLE), "acceptance.kind", Good({"acceptance": {"kind": "typical"}, "gates": {"lossless": False}})),
    Bad("trtllm-typical-delta", TRT, "1.2.1", _s(EAGLE) | {"acceptance": {"kind": "typical", "delta": 0.2}, "gates": {"lossless": False}}, "acceptance.delta", Good({"acceptance": {"delta": 0.09}})),
    Bad("trtllm-default-tree", TRT, "1.2.1", _s({**MEDUSA, "choices": None}), "speculation.choices", Good(_s({"choices": [[0], [1]]}))),
    Bad("trtllm-heads-format", TRT, "1.2.1", _s(MEDUSA, quantization="fp8"), "speculation.quantization", Good(_q("fp8", "fp8"))),
    Bad("trtllm-heads-format", TRT, "1.2.1", _s(EAGLE, quantization="fp8"), "speculation.quantization", Good(_s({"quantization": "none"}))),
    Bad("trtllm-heads-format", PYT, "1.2.1", _s(EAGLE3, quantization="fp8"), "speculation.quantization", Good(_s({"quantization": "none"}))),
    Bad("trtllm-eagle-target", TRT, "1.2.1", _q("fp8", "fp8") | _s(EAGLE), "quantization.kind", Good(_q("none"))),
    Bad("trtllm-eagle-target", TRT, "0.17.0", _q("w4a16_awq") | _s(EAGLE), "quantization.kind", Good(_s(MEDUSA))),
    Bad("trtllm-serve", TRT, "1.2.1", _s(EAGLE) | {"acceptance": {"kind": "typical"}, "gates": {"lossless": False}}, "acceptance.kind", Good({"acceptance": {"kind": "exact"}})),
    Bad("trtllm-serve", TRT, "1.2.1", {"serving": {"model_name": "ensemble"}}, "serving.model_name", Good({"serving": {"model_name": "llama"}})),
    Bad("trtllm-serve", TRT, "1.2.1", _s(DRAFT) | {"serving": {"grpc_port": 9001}}, "serving.grpc_port", Good({"serving": {"grpc_port": 8001}})),
    Bad("trtllm-serve", PYT, "1.2.1", {"parallel": {"tp": 16}}, "parallel.tp", Good({"parallel": {"tp": 8, "pp": 2}})),
    Bad("trtllm-serve", TRT, "1.2.1", _s({**EAGLE, "choices": None, "num_draft_tokens": 31}), "speculation.choices", Good(_s({"choices": [[0], [0, 0]]}))),
    Bad("trtllm-converted-length", TRT, "0.17.0", _s(MEDUSA), "speculation.kind", Good(version="0.21.0")),
    Bad("trtllm-grown-sequence", TRT, "1.2.1", _s(LOOKAHEAD), "limits.max_seq_tokens", Good({"speculation": {"kind": "none"}})),
    Bad("trtllm-eagle3-tree", PYT, "1.1.0", _s(EAGLE3, top_k=4, depth=2), "speculation.top_k", Good(version="1.2.1")),
    Bad("trtllm-eagle3-tree", PYT, "1.0.0", _s(EAGLE3, top_k=4, depth=2), "speculation.top_k", Good(_s({"top_k": 1, "depth": None}))),
    Bad("trtllm-eagle3-workstation", PYT, "1.2.1", _s(EAGLE3), "speculation.kind", Good(gpu="B200-SXM"), gpu="RTX-PRO-6000-Server"),
    Bad("trtllm-acceptance-gate", PYT, "1.2.1", _s(EAGLE3), "gates.min_acceptance_length", Good({"gates": {"min_acceptance_length": 1.5}})),
    Bad("trtllm-acceptance-gate", PYT, "1.2.1", _s(EAGLE3) | {"gates": {"min_acceptance_length": 1.0}}, "gates.min_acceptance_length", Good({"gates": {"min_acceptance_length": 1.1}})),
    # checkpoints
    Bad("trtllm-encoder-decoder", TRT, "1.2.1", {}, "model.source", Good(checkpoint=LLAMA), checkpoint=T5),
    Bad("trtllm-encoder-decoder", PYT, "1.2.1", {}, "model.source", Good(checkpoint=QWEN2), checkpoint=replace(LLAMA, encoder_decoder=True, spec=None)),
    Bad("trtllm-architecture", PYT, "1.0.0", {}, "model.source", Good(checkpoint=MISTRAL), checkpoint=PHI3),
    Bad("trtllm-foreign-checkpoint", TRT, "1.2.1", {}, "model.source", Good(checkpoint=LLAMA), checkpoint=GPTQ),
    Bad("trtllm-foreign-checkpoint", PYT, "1.2.1", _s(DRAFT), "speculation.model.source", Good(draft=SMALL), checkpoint=LLAMA, draft=GPTQ),
    Bad("trtllm-medusa-architecture", TRT, "1.2.1", _s(MEDUSA), "speculation.kind", Good(checkpoint=LLAMA), checkpoint=MIXTRAL),
    Bad("trtllm-medusa-architecture", TRT, "0.17.0", _s(MEDUSA), "speculation.kind", Good(_s(LOOKAHEAD)), checkpoint=GEMMA3),
    Bad("trtllm-medusa-qwen", TRT, "1.2.1", _s(MEDUSA), "speculation.kind", Good(checkpoint=LLAMA), checkpoint=QWEN2),
    Bad("trtllm-eagle-architecture", TRT, "1.2.1", _s(EAGLE), "speculation.kind", Good(checkpoint=LLAMA), checkpoint=QWEN2),
    Bad("trtllm-eagle3-architecture", PYT, "1.2.1", _s(EAGLE3), "speculation.kind", Good(checkpoint=LLAMA), checkpoint=LLAMA4),
    Bad("trtllm-eagle3-architecture", PYT, "1.1.0", _s(EAGLE3), "speculation.kind", Good(_s(NGRAM)), checkpoint=MISTRAL),
    Bad("trtllm-engine-quantized-architecture", TRT, "1.2.1", _q("w4a16_awq"), "quantization.kind", Good(_q("fp8")), checkpoint=MIXTRAL),
    Bad("trtllm-engine-quantized-architecture", TRT, "1.2.1", _q("fp8"), "quantization.kind", Good(_q("none")), checkpoint=QWEN3_MOE),
    Bad("trtllm-engine-quantized-architecture", TRT, "0.21.0", _q("fp8"), "quantization.kind", Good(checkpoint=LLAMA), checkpoint=GEMMA3),
    Bad("trtllm-qwen-fp8-kv", PYT, "1.2.1", _q("fp8", "fp8") | {"gates": {"max_perplexity_ratio": None}}, "gates.max_perplexity_ratio", Good({"gates": {"max_perplexity_ratio": 1.1}}), checkpoint=QWEN2),
    Bad("trtllm-heads-shard", TRT, "1.2.1", {"parallel": {"tp": 3}}, "parallel.tp", Good({"parallel": {"tp": 4}}), checkpoint=LLAMA),
    Bad("trtllm-heads-shard", PYT, "1.2.1", {"parallel": {"tp": 4}}, "parallel.tp", Good({"parallel": {"tp": 2}}), checkpoint=replace(LLAMA, num_kv_heads=6, spec=None)),
    Bad("trtllm-heads-shard", PYT, "1.2.1", {"parallel": {"tp": 8}, **_s(DRAFT)}, "parallel.tp", Good(draft=SMALL), checkpoint=LLAMA, draft=replace(LLAMA, num_heads=9, num_kv_heads=3, spec=None)),
    Bad("trtllm-layers-shard", TRT, "1.2.1", {"parallel": {"pp": 33}}, "parallel.pp", Good({"parallel": {"pp": 2}}), checkpoint=LLAMA),
    Bad("trtllm-group-shard", PYT, "1.2.1", _q("w4a16_awq") | {"parallel": {"tp": 4}}, "quantization.group_size", Good({"parallel": {"tp": 2}}), checkpoint=replace(LLAMA, intermediate_size=11008, spec=None)),
    Bad("trtllm-group-shard", TRT, "1.0.0", _q("w4a8_awq") | {"parallel": {"tp": 8}}, "quantization.group_size", Good({"parallel": {"tp": 1}}), checkpoint=replace(LLAMA, intermediate_size=18944, spec=None)),
    Bad("trtllm-group-shard", PYT, "1.2.1", _q("w4a16_awq"), "quantization.group_size", Good(_q("w4a16_awq", group_size=64)), checkpoint=replace(LLAMA, hidden_size=4160, spec=None)),
    Bad("trtllm-draft-vocabulary", PYT, "1.2.1", _s(DRAFT), "speculation.model.source", Good(draft=SMALL), checkpoint=LLAMA, draft=replace(SMALL, vocab_size=128000)),
    Bad("trtllm-draft-logits", TRT, "1.2.1", _s(DRAFT) | {"acceptance": {"kind": "rejection"}}, "acceptance.kind", Good({"acceptance": {"kind": "exact"}}), checkpoint=LLAMA, draft=replace(SMALL, vocab_size=128000)),
    Bad("trtllm-draft-logits", TRT, "0.21.0", _s(DRAFT) | {"acceptance": {"kind": "rejection"}}, "acceptance.kind", Good(draft=SMALL), checkpoint=LLAMA, draft=replace(SMALL, vocab_size=32000)),
    Bad("trtllm-draft-tokens", PYT, "1.2.1", _s(DRAFT), "speculation.model.source", Good(draft=replace(SMALL, folder=VOCABULARIES / "a")), checkpoint=replace(LLAMA, folder=VOCABULARIES / "a"), draft=replace(SMALL, folder=VOCABULARIES / "b")),
    Bad("trtllm-positions", PYT, "1.2.1", {"limits": {"max_seq_tokens": 8192}}, "limits.max_seq_tokens", Good({"limits": {"max_seq_tokens": 4096}}), checkpoint=replace(LLAMA, max_positions=4096)),
    Bad("trtllm-positions", TRT, "0.21.0", {"limits": {"max_seq_tokens": 8193}}, "limits.max_seq_tokens", Good({"limits": {"max_seq_tokens": 8192}}), checkpoint=replace(LLAMA, max_positions=8192)),
    Bad("trtllm-draft-positions", PYT, "1.2.1", _s(DRAFT) | {"limits": {"max_seq_tokens": 4096}}, "limits.max_seq_tokens", Good({"limits": {"max_seq_tokens": 2048}}), checkpoint=LLAMA, draft=replace(SMALL, max_positions=2048)),
    Bad("trtllm-grown-positions", TRT, "1.2.1", _s(LOOKAHEAD), "limits.max_seq_tokens", Good({"limits": {"max_seq_tokens": 2033}}), checkpoint=replace(LLAMA, max_positions=2048)),
)  # fmt: skip

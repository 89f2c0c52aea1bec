"""Rules about drafting; see :mod:`trtspec.trtllm.rules`."""

from __future__ import annotations

from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    MedusaSpeculation,
    NgramSpeculation,
    PytorchBackend,
    TypicalAcceptance,
)
from trtspec.recipe_facts import drafted_positions
from trtspec.trtllm.case import Case, Told
from trtspec.trtllm.launch import placement_problems
from trtspec.trtllm.triton_cpp import cpp_problems

_DRAFTER = ("speculation", "kind")
_TYPICAL_DELTA = TypicalAcceptance(kind="typical").delta


def ngram_engine(case: Case) -> Told:
    """The engine only verifies tokens that it is sent; looking them up is the client's part."""
    if case.engine and case.method == "ngram":
        yield (
            _DRAFTER,
            "engines verify tokens sent from outside: run.py --prompt_lookup_config drafts, Triton's models "
            "do not; for a server choose backend kind: pytorch",
        )


def ngram_shortest(case: Case) -> Told:
    """TensorRT-LLM is told the longest match only and falls back to shorter ones down to one token."""
    s = case.recipe.speculation
    if isinstance(s, NgramSpeculation) and s.min_ngram > 1:
        yield (
            ("speculation", "min_ngram"),
            f"found {s.min_ngram}; TensorRT-LLM has max_ngram only and takes matches of one token too",
        )


def bls(case: Case) -> Told:
    """Triton's scripted model (tensorrt_llm_bls) calls draft and target engine in turn."""
    if case.engine and case.method == "draft_model":
        yield (
            _DRAFTER,
            "Triton drafts through its BLS model: one sequence a request and no streaming; for streaming "
            "choose backend kind: pytorch, or eagle",
        )


def bls_logits(case: Case) -> Told:
    """Acceptance by probability compares the logits of both engines, which must be built to return them."""
    s, acceptance = case.recipe.speculation, case.recipe.acceptance.kind
    if case.engine and isinstance(s, DraftModelSpeculation) and acceptance == "rejection":
        yield (
            ("acceptance", "kind"),
            "rejection: both engines are built with gather_generation_logits, and requests cannot ask for "
            "logits themselves",
        )


def draft_memory(case: Case) -> Told:
    """Two models share one GPU, each with weights and a KV cache of its own."""
    if case.method == "draft_model":
        yield (
            _DRAFTER,
            "the draft model's weights and KV cache come on top of the target's; each takes its part of the "
            "memory that is free when it loads",
        )


def draft_reuse(case: Case) -> Told:
    """In mid 2025 reuse of KV blocks had to be off with a draft model; later versions allow it."""
    if not case.engine and case.method == "draft_model" and case.before("1.1"):
        yield _DRAFTER, f"draft_model in {case.version}: KV blocks are not reused between requests"


def overlap_off(case: Case) -> Told:
    """These methods draft between the target's steps, so the next step cannot be scheduled early."""
    backend = case.recipe.backend
    if (
        isinstance(backend, PytorchBackend)
        and case.method in ("ngram", "draft_model")
        and backend.overlap_scheduler is None
    ):
        yield (
            ("backend", "overlap_scheduler"),
            f"null with {case.method}, which drafts between steps: the overlap scheduler is switched off",
        )


def greedy_only(case: Case) -> Told:
    """Medusa engines compare with the target's best token; EAGLE engines too unless acceptance is typical."""
    if case.engine and case.method in ("medusa", "eagle") and case.recipe.acceptance.kind == "exact":
        yield (
            ("acceptance", "kind"),
            f"{case.method} engines decode greedily: a request's temperature has no effect on what is drawn",
        )


def typical_delta(case: Case) -> Told:
    """--eagle_posterior_threshold is epsilon; the factor of the entropy is derived from it."""
    acceptance = case.recipe.acceptance
    if case.engine and isinstance(acceptance, TypicalAcceptance) and acceptance.delta != _TYPICAL_DELTA:
        yield (
            ("acceptance", "delta"),
            f"found {acceptance.delta:g}; EAGLE engines are told epsilon only; remove it",
        )


def default_tree(case: Case) -> Told:
    """The built-in tree has 63 nodes for four heads; with fewer heads its overhead is paid for nothing."""
    s = case.recipe.speculation
    if case.engine and isinstance(s, MedusaSpeculation) and s.choices is None:
        yield (
            ("speculation", "choices"),
            "null: the engine is built for 63 drafted tokens whatever the heads; with fewer than four heads "
            "list the paths",
        )


def heads_format(case: Case) -> Told:
    """quantize.py quantizes Medusa heads with an FP8 target only; nothing quantizes EAGLE heads."""
    s = case.recipe.speculation
    where = ("speculation", "quantization")
    if isinstance(s, EagleSpeculation | Eagle3Speculation) and s.quantization != "none":
        yield where, f"found {s.quantization}; no step of TensorRT-LLM quantizes {s.kind} heads; write none"
    if (
        isinstance(s, MedusaSpeculation)
        and s.quantization == "fp8"
        and case.recipe.quantization.kind != "fp8"
    ):
        yield where, "found fp8; --quant_medusa_head goes with an fp8 target; write none"


def eagle_target(case: Case) -> Told:
    """EAGLE's converter writes 16-bit targets; quantize.py has no option for EAGLE heads."""
    if case.engine and case.method == "eagle" and case.recipe.quantization.kind != "none":
        yield (
            ("quantization", "kind"),
            f"{case.recipe.quantization.kind} under eagle: its converter makes 16-bit targets only; write "
            "none, or choose medusa (fp8), or backend kind: pytorch with eagle3",
        )


def serve(case: Case) -> Told:
    """Some engines can be built and not served: Triton's C++ backend has no parameter for what they need."""
    problems = [*placement_problems(case.recipe)]
    if case.engine and "tensorrt" in case.facts.backends:
        problems += cpp_problems(case.recipe, case.version)
    for problem in problems:
        yield (
            tuple((problem.key or "backend.kind").split(".")),
            f"trtspec serve refuses it: {problem.message}",
        )


def converted_length(case: Case) -> Told:
    """Up to 0.20 the engine's max_draft_len is the converted checkpoint's; later the flag counts if given."""
    if case.engine and case.method in ("medusa", "eagle") and case.before("0.21"):
        yield (
            _DRAFTER,
            f"{case.version} takes max_draft_len from the converted checkpoint and ignores the flag: convert "
            "again after every change of the tree",
        )


def grown_sequence(case: Case) -> Told:
    """The drafted positions need room behind the last token: trtllm-build adds them to max_seq_len."""
    s, limits = case.recipe.speculation, case.recipe.limits
    if case.engine and s.kind != "none":
        more = drafted_positions(s) + (s.depth if isinstance(s, EagleSpeculation) else 0)
        yield (
            ("limits", "max_seq_tokens"),
            f"found {limits.max_seq_tokens}; trtllm-build adds {more} for drafts, which makes "
            f"{limits.max_seq_tokens + more}",
        )


def eagle3_tree(case: Case) -> Told:
    """A tree needs the keys for its width and its size; older versions have chains only."""
    s = case.recipe.speculation
    name = case.facts.decoding_types.get("Eagle3") or case.facts.decoding_types.get("Eagle", "")
    keys = ("use_dynamic_tree", "dynamic_tree_max_topK", "max_total_draft_tokens")
    missing = [key for key in keys if key not in case.facts.classes.get(name, {})]
    if not case.engine and isinstance(s, Eagle3Speculation) and s.top_k > 1 and missing:
        yield (
            ("speculation", "top_k"),
            f"found {s.top_k}; {case.version} has no {', '.join(missing)}: it drafts chains; write 1, or "
            "narrow backend.version to 1.2 and later",
        )


def eagle3_workstation(case: Case) -> Told:
    """EAGLE-3 wrote gibberish on a workstation Blackwell card with a candidate of 1.2."""
    if case.method == "eagle3" and case.gpu is not None and case.gpu.sm >= 120 and case.before("1.3"):
        yield (
            _DRAFTER,
            f"eagle3 is reported to write gibberish on sm{case.gpu.sm} ({case.gpu.name}) with 1.2; compare "
            "its answers with the target's alone on that GPU before serving",
        )


def acceptance_gate(case: Case) -> Told:
    """A drafter that nothing is accepted from costs time and shows in no other gate of a server."""
    gate = case.recipe.gates.min_acceptance_length
    if case.method != "none" and (gate is None or gate < 1.1):
        yield (
            ("gates", "min_acceptance_length"),
            f"{'null' if gate is None else format(gate, 'g')}: a dead drafter, about 1.0 tokens a step, "
            "would pass; give at least 1.1",
        )

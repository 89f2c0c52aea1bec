"""The rules that span keys: combinations that the schema allows key by key and no backend can run.

Each rule is a small function that yields (path of the key to blame, message); its docstring is the reason
that ``trtspec lint --explain`` prints. ``RULES`` gives each an id, a severity and the sections it looks at.
Errors stop every verb; warnings are printed by ``trtspec lint``. What depends on the model's sizes is in
:mod:`trtspec.recipe_model`. The file is one list of small functions; splitting it would only scatter
the list.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from trtspec.model_source import SAMPLE_NAMES
from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    EmbeddedBackend,
    MedusaSpeculation,
    Model,
    NgramSpeculation,
    PytorchBackend,
    Quantization,
    Recipe,
    TensorrtBackend,
)
from trtspec.recipe_facts import (
    ACCEPTANCE_ON,
    BACKEND_VERSIONS,
    CONCURRENCY_VERSIONS,
    P99_REQUESTS,
    REJECTION_VERSIONS,
    SPECULATION_ON,
    asks_of_load,
    drafted_positions,
    fidelity,
    is_quantized,
    longest_acceptance,
    paged_context_off,
    requests_for_p99,
    tree_nodes,
)
from trtspec.versions import VersionRange, parse_range

Finding = tuple[tuple[str | int, ...], str]
Severity = Literal["error", "warning", "note"]
"""A note says what a recipe is, where that should not go unseen; there is nothing to mend."""


@dataclass(frozen=True)
class Rule:
    """``reads``: top-level keys that ``check`` looks at; it does not run when one of them has an error.

    The rules of :mod:`trtspec.recipe_model` take the checkpoint as their second argument."""

    id: str
    severity: Severity
    reads: tuple[str, ...]
    check: Callable[..., Iterator[Finding]]

    @property
    def why(self) -> str:
        return " ".join((self.check.__doc__ or "").split())


# --------------------------------------------------------------------------- model and backend


def _models(recipe: Recipe) -> list[tuple[tuple[str, ...], Model]]:
    result: list[tuple[tuple[str, ...], Model]] = [(("model",), recipe.model)]
    if isinstance(recipe.speculation, DraftModelSpeculation):
        result.append((("speculation", "model"), recipe.speculation.model))
    return result


def _revision_without_hub(recipe: Recipe) -> Iterator[Finding]:
    """Only the hub has revisions; a folder or sample would ignore it silently."""
    for path, model in _models(recipe):
        if model.revision is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model.source):
            yield (
                (*path, "revision"),
                f"a revision with the source {model.source!r}; allowed: only with a hub id "
                "(org/name); remove it",
            )


def _sample_name(recipe: Recipe) -> Iterator[Finding]:
    """A sample is one of those that `trtspec fetch` has; no other name can ever be fetched."""
    names = [f"sample:{name}" for name in SAMPLE_NAMES]
    for path, model in _models(recipe):
        if model.source.startswith("sample:") and model.source not in names:
            close = difflib.get_close_matches(model.source, names, n=1, cutoff=0.5)
            remedy = f"did you mean {close[0]}?" if close else "write one of them, a folder or a hub id"
            yield (*path, "source"), f"found {model.source!r}; allowed: {', '.join(names)}; {remedy}"


def _version_range(recipe: Recipe) -> Iterator[Finding]:
    """TensorRT-LLM dropped engines after 1.2.1; its LLM API settled with 1.0. A recipe says which versions it
    means, so that a container of another version is refused before it builds.
    """
    backend = recipe.backend
    if not isinstance(backend, TensorrtBackend | PytorchBackend):
        return
    where = ("backend", "version")
    allowed = BACKEND_VERSIONS[backend.kind]
    try:
        asked = parse_range(backend.version)
    except ValueError as error:
        yield where, f"{error}; allowed: comparisons such as {allowed}; rewrite it"
        return
    if asked.is_empty():
        yield where, f"no version satisfies {backend.version}; allowed: within {allowed}; widen it"
    elif not asked.within(allowed):
        yield where, f"{backend.version} goes beyond {allowed}, the versions with this backend; narrow it"


def _asked_versions(recipe: Recipe) -> VersionRange | None:
    try:
        return parse_range(recipe.backend.version)  # type: ignore[union-attr]
    except (ValueError, AttributeError):
        return None


def _parallel_embedded(recipe: Recipe) -> Iterator[Finding]:
    """The embedded engine runs one process on one device."""
    for key, size in (("tp", recipe.parallel.tp), ("pp", recipe.parallel.pp)):
        if recipe.backend.kind == "embedded" and size > 1:
            yield ("parallel", key), f"found {size}; the embedded backend runs on one device; write 1"


def _pipeline_drafting(recipe: Recipe) -> Iterator[Finding]:
    """Drafting under pipeline parallelism is not implemented in TensorRT-LLM; tensor parallelism is."""
    if recipe.backend.kind != "embedded" and recipe.parallel.pp > 1 and recipe.speculation.kind != "none":
        yield (
            ("parallel", "pp"),
            f"found {recipe.parallel.pp} with speculation {recipe.speculation.kind}; TensorRT-LLM drafts "
            "with pp 1 only; write 1 and use tp, or speculation kind: none",
        )


# --------------------------------------------------------------------------- quantization


def _quantizations(recipe: Recipe) -> list[tuple[tuple[str, ...], Quantization]]:
    result: list[tuple[tuple[str, ...], Quantization]] = [(("quantization",), recipe.quantization)]
    if isinstance(recipe.speculation, DraftModelSpeculation):
        result.append((("speculation", "quantization"), recipe.speculation.quantization))
    return result


def _nvfp4_cpu(recipe: Recipe) -> Iterator[Finding]:
    """ModelOpt's NVFP4 kernels exist for CUDA only."""
    if recipe.backend.kind == "embedded" and recipe.backend.device == "cpu":
        for path, quantization in _quantizations(recipe):
            if quantization.kind == "nvfp4":
                yield (
                    (*path, "kind"),
                    "nvfp4 needs a CUDA GPU to calibrate and the backend's device is cpu; "
                    "choose fp8 or w4a16_awq, or device: cuda",
                )


def _dequantized_copy(recipe: Recipe) -> Iterator[Finding]:
    """Only 4-bit weights under 16-bit activations, in bfloat16 on a CPU, are run from their codes."""
    b = recipe.backend
    if not isinstance(b, EmbeddedBackend) or not b.dequantized_copy:
        return
    kinds = {quantization.kind for _, quantization in _quantizations(recipe)}
    if b.dtype != "bfloat16" or b.device != "cpu" or not kinds & {"none", "w4a16_awq"}:
        yield (
            ("backend", "dequantized_copy"),
            f"found true, without effect for {' and '.join(sorted(kinds))} in {b.dtype} on {b.device}; "
            "write false, or use w4a16_awq in bfloat16 on cpu",
        )


def _kv_format(recipe: Recipe) -> Iterator[Finding]:
    """The PyTorch backend reads FP8 and NVFP4 KV caches (NVFP4 with FP8 weights only), engines FP8 and INT8,
    the embedded engine FP8 and INT8.
    """
    allowed = {
        "embedded": ("none", "fp8", "int8"),
        "tensorrt": ("none", "fp8", "int8"),
        "pytorch": ("none", "fp8", "nvfp4"),
    }[recipe.backend.kind]
    for path, quantization in _quantizations(recipe):
        if quantization.kv_cache not in allowed:
            yield (
                (*path, "kv_cache"),
                f"found {quantization.kv_cache}; allowed on {recipe.backend.kind}: {', '.join(allowed)}; "
                "choose fp8",
            )
        elif quantization.kv_cache == "nvfp4" and quantization.kind != "fp8":
            yield (
                (*path, "kv_cache"),
                f"nvfp4 with {quantization.kind} weights; a 4-bit KV cache goes with fp8 weights only; "
                "choose kv_cache fp8 or kind: fp8",
            )


def _int8_weights(recipe: Recipe) -> Iterator[Finding]:
    """SmoothQuant's INT8 path is part of the engine backend."""
    if recipe.backend.kind == "pytorch":
        for path, quantization in _quantizations(recipe):
            if quantization.kind == "w8a8_sq":
                yield (
                    (*path, "kind"),
                    "w8a8_sq runs on engines only; choose fp8, or backend kind: tensorrt",
                )


def _paged_context_lost(recipe: Recipe) -> Iterator[Finding]:
    """Attention kernels over a paged 8-bit KV cache exist for FP8-computing weights. With others TensorRT-LLM
    switches paged context attention off, and with it KV reuse and chunked context.
    """
    reason = paged_context_off(recipe)
    if reason is not None and recipe.quantization.kv_cache != "none":
        yield (
            ("quantization", "kv_cache"),
            f"{reason}: no KV reuse, no chunked context; "
            "choose fp8 or w4a8_awq weights, or kv_cache none, if you need them",
        )


def _drafting_without_paging(recipe: Recipe) -> Iterator[Finding]:
    """External draft tokens (ngram, draft_model) and EAGLE verify through paged context attention."""
    reason = paged_context_off(recipe)
    method = recipe.speculation.kind
    if reason and recipe.backend.kind == "tensorrt" and method in ("ngram", "draft_model", "eagle"):
        yield (
            ("speculation", "kind"),
            f"{method} on tensorrt verifies through paged context attention, and {reason}; change the "
            "quantization, or choose medusa, lookahead or none",
        )


def _prompt_without_chunks(recipe: Recipe) -> Iterator[Finding]:
    """Without paged context attention there is no chunked context: a prompt is one piece."""
    reason = paged_context_off(recipe)
    limits = recipe.limits
    if reason and limits.max_input_tokens > limits.max_num_tokens:
        yield (
            ("limits", "max_num_tokens"),
            f"found {limits.max_num_tokens}, and {reason}: a prompt of {limits.max_input_tokens} cannot be "
            f"split; raise it to {limits.max_input_tokens} or more",
        )


def _awq8_fp8_kv(recipe: Recipe) -> Iterator[Finding]:
    """Users of Ada GPUs met 'FMHA kernels are not found' with this pair."""
    q = recipe.quantization
    if recipe.backend.kind != "embedded" and q.kind == "w4a8_awq" and q.kv_cache == "fp8":
        yield (
            ("quantization", "kv_cache"),
            "w4a8_awq with kv_cache fp8 is reported to lack an attention kernel on Ada GPUs (sm89); "
            "choose kv_cache none there, or fp8 weights",
        )


def _heads_base_precision(recipe: Recipe) -> Iterator[Finding]:
    """Medusa engines are documented for 16-bit and FP8 targets, EAGLE engines for 16-bit ones."""
    documented = {"medusa": ("none", "fp8"), "eagle": ("none",)}.get(recipe.speculation.kind)
    if recipe.backend.kind == "tensorrt" and documented and recipe.quantization.kind not in documented:
        names = " and ".join("16 bit" if name == "none" else name for name in documented)
        yield (
            ("quantization", "kind"),
            f"{recipe.quantization.kind} target under {recipe.speculation.kind}; TensorRT-LLM documents "
            f"{names} only; expect build trouble and verify",
        )


def _quantized_medusa_heads(recipe: Recipe) -> Iterator[Finding]:
    """Heads are small; leaving them in 16 bit costs little and is the tested path."""
    if (
        recipe.backend.kind == "tensorrt"
        and isinstance(recipe.speculation, MedusaSpeculation)
        and recipe.speculation.quantization != "none"
    ):
        yield (
            ("speculation", "quantization"),
            "FP8 Medusa heads are reported to fail in the engine build; write none",
        )


def _multiple_profiles(recipe: Recipe) -> Iterator[Finding]:
    """FP8 and W4A8 engines with several optimization profiles were reported to give wrong output."""
    backend = recipe.backend
    risky = recipe.quantization.kind in ("fp8", "w4a8_awq")
    if isinstance(backend, TensorrtBackend) and backend.multiple_profiles and risky:
        yield (
            ("backend", "multiple_profiles"),
            f"with {recipe.quantization.kind} weights reported to go wrong; write false",
        )


# --------------------------------------------------------------------------- speculation


def _method_on_backend(recipe: Recipe) -> Iterator[Finding]:
    """Medusa, lookahead and EAGLE-1/2 exist only in engines (TensorRT-LLM 1.2.1 and older), EAGLE-3 only in
    the PyTorch backend.
    """
    backend, method = recipe.backend.kind, recipe.speculation.kind
    allowed = SPECULATION_ON.get(backend)
    if allowed is None or method in allowed:
        return
    if backend == "pytorch":
        nearest = {"medusa": "eagle3", "eagle": "eagle3", "lookahead": "ngram"}[method]
        remedy = f"the nearest is {nearest}, or backend kind: tensorrt (engines up to 1.2.1 have {method})"
    else:
        remedy = "the nearest is eagle, or backend kind: pytorch, which has eagle3"
    yield ("speculation", "kind"), f"found {method}; allowed on {backend}: {', '.join(allowed)}; {remedy}"


def _acceptance_on_backend(recipe: Recipe) -> Iterator[Finding]:
    """Engines accept greedily, EAGLE engines also by typical acceptance, a draft model's logits also by
    rejection; the PyTorch backend compares tokens, and rejects by probability from 1.3 on.
    """
    method, acceptance = recipe.speculation.kind, recipe.acceptance.kind
    allowed = ACCEPTANCE_ON.get(recipe.backend.kind, {}).get(method)
    if allowed is None:
        return
    if acceptance not in allowed:
        greedy = "; Medusa engines are greedy" if method == "medusa" else ""
        yield (
            ("acceptance", "kind"),
            f"found {acceptance}; allowed for {method} on {recipe.backend.kind}: {', '.join(allowed)}"
            f"{greedy}; write exact",
        )
    elif acceptance == "rejection" and recipe.backend.kind == "pytorch":
        asked = _asked_versions(recipe)
        if asked is not None and not asked.is_empty() and not asked.within(REJECTION_VERSIONS):
            yield (
                ("acceptance", "kind"),
                f"rejection needs TensorRT-LLM {REJECTION_VERSIONS} and backend.version admits older ones; "
                "write exact, or narrow backend.version",
            )


def _typical_lossless(recipe: Recipe) -> Iterator[Finding]:
    """Typical acceptance keeps tokens that the target would have drawn less often: the output law changes, so
    the gate would fail by construction.
    """
    if recipe.acceptance.kind == "typical" and recipe.speculation.kind != "none" and recipe.gates.lossless:
        yield (
            ("gates", "lossless"),
            "found true with acceptance kind: typical, which changes the output; "
            "write false, or acceptance kind: exact",
        )


def _approximate(recipe: Recipe) -> Iterator[Finding]:
    """Approximate acceptance is a choice; it should be one that was seen. Greedy requests stay exact."""
    if fidelity(recipe) == "approximate":
        yield (
            ("acceptance", "kind"),
            f"{recipe.acceptance.kind} is approximate: sampled output is not the target's law; verify gates "
            "its quality instead of calling it lossless",
        )


def _ngram_order(recipe: Recipe) -> Iterator[Finding]:
    """Suffixes are looked up from the longest to the shortest."""
    s = recipe.speculation
    if isinstance(s, NgramSpeculation) and s.min_ngram > s.max_ngram:
        yield (
            ("speculation", "min_ngram"),
            f"found {s.min_ngram}; allowed: at most max_ngram ({s.max_ngram}); lower it or raise max_ngram",
        )


def _ngram_sources(recipe: Recipe) -> Iterator[Finding]:
    """TensorRT-LLM's n-gram drafting follows one continuation of the sequence's own text."""
    s = recipe.speculation
    if recipe.backend.kind == "embedded" or not isinstance(s, NgramSpeculation):
        return
    if s.branches > 1:
        yield (
            ("speculation", "branches"),
            f"found {s.branches}; {recipe.backend.kind} drafts a chain; write 1, or backend kind: embedded",
        )
    if s.corpus is not None:
        yield (
            ("speculation", "corpus"),
            f"{recipe.backend.kind} has no corpus source; write null, or backend kind: embedded",
        )


def _adaptive(recipe: Recipe) -> Iterator[Finding]:
    """Lengths chosen while running are the embedded engine's own."""
    if getattr(recipe.speculation, "adaptive", False) and recipe.backend.kind != "embedded":
        yield (
            ("speculation", "adaptive"),
            f"{recipe.backend.kind} drafts a fixed length; write false, or backend kind: embedded",
        )


def _corpus_count(recipe: Recipe) -> Iterator[Finding]:
    """It shapes the corpus store and nothing else."""
    s = recipe.speculation
    if isinstance(s, NgramSpeculation) and s.corpus is None and s.corpus_min_count > 1:
        yield (
            ("speculation", "corpus_min_count"),
            f"found {s.corpus_min_count} without a corpus; it has no effect; remove it, or name a corpus",
        )


def _tree_choices(recipe: Recipe) -> Iterator[Finding]:
    """A tree is given as its nodes, each as the path of child numbers from the root; nodes need parents."""
    s = recipe.speculation
    if not isinstance(s, MedusaSpeculation | EagleSpeculation) or s.choices is None:
        return
    where = ("speculation", "choices")
    if not s.choices:
        yield where, "an empty tree; allowed: at least one path such as [0]; add one, or write null"
    counts = Counter(s.choices)
    for index, path in enumerate(s.choices):
        shown = list(path)
        if not path:
            yield (*where, index), "found []; the root is implied; remove it"
        elif counts[path] > 1 and s.choices.index(path) != index:
            yield (*where, index), f"{shown} is listed twice; keep one"
        elif len(path) > 1 and path[:-1] not in counts:
            yield (*where, index), f"{shown} without its prefix {shown[:-1]}; every prefix is a node; add it"
        elif isinstance(s, EagleSpeculation) and len(path) > s.depth:
            yield (*where, index), f"{shown} is deeper than depth {s.depth}; shorten it or raise depth"


def _dynamic_tree(recipe: Recipe) -> Iterator[Finding]:
    """The first level of a dynamic tree has top_k nodes, each later one top_k squared (EAGLE-2)."""
    s = recipe.speculation
    if isinstance(s, Eagle3Speculation):
        if s.top_k == 1 and s.depth is not None and s.depth != s.num_draft_tokens:
            yield (
                ("speculation", "depth"),
                f"found {s.depth} for a chain of {s.num_draft_tokens} (top_k 1); write null, or raise top_k",
            )
        if s.top_k > 1 and s.depth is None:
            yield (
                ("speculation", "depth"),
                f"missing for a tree (top_k {s.top_k}); give it, or write top_k: 1",
            )
    if isinstance(s, EagleSpeculation | Eagle3Speculation) and s.depth is not None and s.top_k > 1:
        nodes = tree_nodes(s.top_k, s.depth)
        if getattr(s, "choices", None) is None and s.num_draft_tokens > nodes:
            yield (
                ("speculation", "num_draft_tokens"),
                f"found {s.num_draft_tokens}, but {s.depth} levels of top_k {s.top_k} have {nodes} nodes; "
                f"lower it to {nodes} or less",
            )


def _eagle3_tree(recipe: Recipe) -> Iterator[Finding]:
    """TensorRT-LLM's one-model EAGLE-3 drafts chains; trees came later and not everywhere."""
    s = recipe.speculation
    if recipe.backend.kind == "pytorch" and isinstance(s, Eagle3Speculation) and s.top_k > 1:
        yield (
            ("speculation", "top_k"),
            f"found {s.top_k}; a tree works on some versions only, a chain on all; write 1 unless tested",
        )


def _eagle_batch(recipe: Recipe) -> Iterator[Finding]:
    """trtllm-build asserts it."""
    eagle_engine = recipe.backend.kind == "tensorrt" and recipe.speculation.kind == "eagle"
    if eagle_engine and recipe.limits.max_batch_size > 512:
        yield (
            ("limits", "max_batch_size"),
            f"found {recipe.limits.max_batch_size}; EAGLE engines allow at most 512; lower it",
        )


def _concurrency_limit(recipe: Recipe) -> Iterator[Finding]:
    """Engines draft at every batch size; the LLM API can stop above one, n-gram and draft models from 1.1 on,
    EAGLE-3 from 1.3 on.
    """
    s, backend = recipe.speculation, recipe.backend
    if getattr(s, "max_concurrency", None) is None:
        return
    where = ("speculation", "max_concurrency")
    if isinstance(backend, TensorrtBackend):
        yield where, "engines draft at every batch size; lower limits.max_batch_size instead, or write null"
    elif isinstance(backend, PytorchBackend):
        asked, needed = _asked_versions(recipe), CONCURRENCY_VERSIONS[s.kind]
        if asked is not None and not asked.is_empty() and not asked.within(needed):
            yield (
                where,
                f"for {s.kind} it needs TensorRT-LLM {needed} and backend.version admits older ones; "
                "write null, or narrow backend.version",
            )


def _overlap_two_models(recipe: Recipe) -> Iterator[Finding]:
    """Methods that draft outside the target's forward need its result before the next step is scheduled."""
    backend = recipe.backend
    between = recipe.speculation.kind in ("ngram", "draft_model")
    if isinstance(backend, PytorchBackend) and backend.overlap_scheduler and between:
        yield (
            ("backend", "overlap_scheduler"),
            f"found true with {recipe.speculation.kind}, which drafts between steps; write null or false",
        )


# --------------------------------------------------------------------------- limits, serving, gates


def _seq_input(recipe: Recipe) -> Iterator[Finding]:
    """A prompt of the longest allowed length needs room for at least one token."""
    limits = recipe.limits
    if limits.max_seq_tokens <= limits.max_input_tokens:
        yield (
            ("limits", "max_seq_tokens"),
            f"found {limits.max_seq_tokens}; it holds prompt and answer, so at least max_input_tokens + 1 = "
            f"{limits.max_input_tokens + 1}; raise it",
        )


def _rows_batch(recipe: Recipe) -> Iterator[Finding]:
    """A decode step has one row for each sequence at least."""
    limits = recipe.limits
    if limits.max_num_tokens < limits.max_batch_size:
        yield (
            ("limits", "max_num_tokens"),
            f"found {limits.max_num_tokens}; a batch of {limits.max_batch_size} needs as many rows; "
            f"raise it to {limits.max_batch_size} or more",
        )


def _rows_draft(recipe: Recipe) -> Iterator[Finding]:
    """A verification is the current token and every drafted position, in one forward."""
    limits, rows = recipe.limits, drafted_positions(recipe.speculation) + 1
    if limits.max_num_tokens < rows:
        yield (
            ("limits", "max_num_tokens"),
            f"found {limits.max_num_tokens}; {recipe.speculation.kind} verifies {rows} rows per sequence; "
            f"raise it to {rows} or more",
        )


def _rows_full_batch(recipe: Recipe) -> Iterator[Finding]:
    """With fewer rows than batch x (drafted + 1), speculation is cut exactly when the batch is full."""
    limits, rows = recipe.limits, drafted_positions(recipe.speculation) + 1
    drafting = getattr(recipe.speculation, "max_concurrency", None) or limits.max_batch_size
    full = rows * min(drafting, limits.max_batch_size)
    if rows > 1 and max(rows, limits.max_batch_size) <= limits.max_num_tokens < full:
        consequence = (
            "trtllm-build raises it silently" if recipe.backend.kind == "tensorrt" else "drafts are cut short"
        )
        yield (
            ("limits", "max_num_tokens"),
            f"found {limits.max_num_tokens}; a full batch verifies {full // rows} x {rows} = {full} "
            f"rows, {consequence}; raise it to {full}",
        )


def _draft_length(recipe: Recipe) -> Iterator[Finding]:
    """A sequence must be longer than what one step can emit."""
    longest = longest_acceptance(recipe.speculation)
    if longest is not None and longest + 1 >= recipe.limits.max_seq_tokens:
        yield (
            ("limits", "max_seq_tokens"),
            f"found {recipe.limits.max_seq_tokens}; one step can emit {longest + 1}; raise it",
        )


def _default_tokens(recipe: Recipe) -> Iterator[Finding]:
    """A request without its own limit would always be refused."""
    if recipe.serving.default_max_tokens >= recipe.limits.max_seq_tokens:
        yield (
            ("serving", "default_max_tokens"),
            f"found {recipe.serving.default_max_tokens}; limits.max_seq_tokens is "
            f"{recipe.limits.max_seq_tokens} with the prompt; lower it",
        )


def _ports(recipe: Recipe) -> Iterator[Finding]:
    """Two servers cannot listen on one port."""
    seen: dict[int, str] = {}
    for key in ("http_port", "grpc_port", "metrics_port"):
        port = getattr(recipe.serving, key)
        if port in seen:
            yield ("serving", key), f"found {port}, which is {seen[port]} too; choose another port"
        seen.setdefault(port, key)


def _impossible_acceptance(recipe: Recipe) -> Iterator[Finding]:
    """A step emits the accepted draft tokens and one more of the target's own."""
    gate, longest = recipe.gates.min_acceptance_length, longest_acceptance(recipe.speculation)
    if gate is not None and longest is not None and gate > longest + 1:
        yield (
            ("gates", "min_acceptance_length"),
            f"found {gate:g}; {recipe.speculation.kind} emits at most {longest + 1} tokens per step; "
            "lower it",
        )


def _speedup_over_itself(recipe: Recipe) -> Iterator[Finding]:
    """A gate that compares a thing with itself decides nothing."""
    gates = recipe.gates
    if recipe.speculation.kind != "none":
        return
    for key in ("min_speedup", "min_speedup_under_load"):
        if getattr(gates, key) is not None:
            yield (
                ("gates", key),
                "measures what speculation gains, and speculation is none; remove it, or choose a method",
            )
    plain = not is_quantized(recipe.quantization)
    for key in ("min_speedup_over_baseline", "min_speedup_by_load"):
        if plain and getattr(gates, key) is not None:
            yield (
                ("gates", key),
                "the recipe is its own baseline (no quantization, no speculation); remove it",
            )


def _one_load(recipe: Recipe) -> Iterator[Finding]:
    """A latency means nothing without its load: so many requests in flight, or so many a second."""
    load, asked = recipe.gates.load, asks_of_load(recipe.gates)
    if load.concurrency is not None and load.rate_per_s is not None:
        yield (
            ("gates", "load", "rate_per_s"),
            f"found {load.rate_per_s:g} beside concurrency {load.concurrency}; a load is a closed loop or "
            "has a rate; remove one of the two",
        )
    if load.rate_per_s is not None and recipe.gates.min_speedup_under_load is not None:
        yield (
            ("gates", "min_speedup_under_load"),
            "needs a closed loop: at a given rate both sides' throughput is that rate; use load.concurrency",
        )
    if load.concurrency is not None or load.rate_per_s is not None:
        return
    if asked:
        path = ("gates", *asked[0].split("."))
        yield path, "says nothing without its load; add gates.load: {concurrency: 8} or {rate_per_s: 2}"
    elif any(value is not None for _, value in load):
        yield ("gates", "load"), "needs concurrency or rate_per_s; add one of the two"


def _goodput_of_something(recipe: Recipe) -> Iterator[Finding]:
    """Goodput counts the requests that meet every objective; without one it counts them all."""
    gates = recipe.gates
    if gates.min_goodput is not None and all(value is None for _, value in gates.slo):
        yield (
            ("gates", "min_goodput"),
            f"found {gates.min_goodput:g}, and gates.slo has no objective to meet; add one, such as "
            "slo: {ttft_ms: 500}, or remove it",
        )
    if None not in (gates.slo.ttft_ms, gates.slo.e2e_ms) and (gates.slo.e2e_ms or 0) < (
        gates.slo.ttft_ms or 0
    ):
        yield (
            ("gates", "slo", "e2e_ms"),
            f"found {gates.slo.e2e_ms:g}, below ttft_ms {gates.slo.ttft_ms:g}: the last token would have to "
            "come before the first may; raise it",
        )


def _requests_for_a_tail(recipe: Recipe) -> Iterator[Finding]:
    """A p99 of fewer requests has no interval, so its gate could never be decided."""
    load, gates = recipe.gates.load, recipe.gates
    needed = requests_for_p99(load)
    tails = [key for key in ("max_p99_ttft_ms", "max_p99_tpot_ms") if getattr(gates, key) is not None]
    if tails and load.requests is not None and load.requests < needed:
        yield (
            ("gates", "load", "requests"),
            f"found {load.requests}; {tails[0]} needs {needed}, of which {P99_REQUESTS} fall into the steady "
            f"state; raise it to {needed}, or remove it",
        )


def _load_fits(recipe: Recipe) -> Iterator[Finding]:
    """The engine refuses prompts and answers beyond its limits."""
    load, limits = recipe.gates.load, recipe.limits
    if load.input_tokens is not None and load.input_tokens > limits.max_input_tokens:
        yield (
            ("gates", "load", "input_tokens"),
            f"found {load.input_tokens}; limits.max_input_tokens is {limits.max_input_tokens}; lower it",
        )
    elif (load.input_tokens or 1) + (load.output_tokens or 2) > limits.max_seq_tokens:
        yield (
            ("gates", "load", "output_tokens" if load.output_tokens else "input_tokens"),
            f"prompt and answer exceed limits.max_seq_tokens {limits.max_seq_tokens}; lower it",
        )


def _load_queues(recipe: Recipe) -> Iterator[Finding]:
    """More requests in flight than the batch holds wait, and their waiting is in TTFT."""
    load, batch = recipe.gates.load, recipe.limits.max_batch_size
    if load.concurrency is not None and load.concurrency > batch:
        yield (
            ("gates", "load", "concurrency"),
            f"{load.concurrency} is more than limits.max_batch_size {batch}: the others wait, and that is "
            "in TTFT",
        )


def _rule(id: str, severity: Severity, reads: str, check: Callable[[Recipe], Iterator[Finding]]) -> Rule:
    return Rule(id, severity, tuple(reads.split()), check)


_TABLE = (
    _rule("model-revision", "error", "model speculation", _revision_without_hub),
    _rule("model-sample", "error", "model speculation", _sample_name),
    _rule("backend-version", "error", "backend", _version_range),
    _rule("parallel-embedded", "error", "backend parallel", _parallel_embedded),
    _rule("parallel-pipeline", "error", "backend parallel speculation", _pipeline_drafting),
    _rule("quantization-nvfp4-cpu", "error", "backend quantization speculation", _nvfp4_cpu),
    _rule("backend-dequantized-copy", "warning", "backend quantization speculation", _dequantized_copy),
    _rule("quantization-kv-format", "error", "backend quantization speculation", _kv_format),
    _rule("quantization-int8-weights", "error", "backend quantization speculation", _int8_weights),
    _rule("quantization-paged-context", "warning", "backend quantization", _paged_context_lost),
    _rule(
        "speculation-paged-context",
        "error",
        "backend quantization speculation",
        _drafting_without_paging,
    ),
    _rule("limits-unchunked-prompt", "error", "backend quantization limits", _prompt_without_chunks),
    _rule("quantization-w4a8-kv8", "warning", "backend quantization", _awq8_fp8_kv),
    _rule("quantization-under-heads", "warning", "backend quantization speculation", _heads_base_precision),
    _rule("quantization-medusa-heads", "warning", "backend speculation", _quantized_medusa_heads),
    _rule("backend-multiple-profiles", "warning", "backend quantization", _multiple_profiles),
    _rule("speculation-backend", "error", "backend speculation", _method_on_backend),
    _rule("acceptance-backend", "error", "backend speculation acceptance", _acceptance_on_backend),
    _rule("acceptance-approximate", "note", "acceptance speculation", _approximate),
    _rule("acceptance-typical-lossless", "error", "acceptance speculation gates", _typical_lossless),
    _rule("speculation-ngram-order", "error", "speculation", _ngram_order),
    _rule("speculation-ngram-embedded", "error", "backend speculation", _ngram_sources),
    _rule("speculation-adaptive-embedded", "error", "backend speculation", _adaptive),
    _rule("speculation-corpus-count", "warning", "speculation", _corpus_count),
    _rule("speculation-choices", "error", "speculation", _tree_choices),
    _rule("speculation-tree-size", "error", "speculation", _dynamic_tree),
    _rule("speculation-eagle3-tree", "warning", "backend speculation", _eagle3_tree),
    _rule("limits-eagle-batch", "error", "backend speculation limits", _eagle_batch),
    _rule("speculation-concurrency", "error", "backend speculation", _concurrency_limit),
    _rule("backend-overlap", "error", "backend speculation", _overlap_two_models),
    _rule("limits-seq-input", "error", "limits", _seq_input),
    _rule("limits-rows-batch", "error", "limits", _rows_batch),
    _rule("limits-rows-draft", "error", "limits speculation", _rows_draft),
    _rule("limits-rows-full-batch", "warning", "backend limits speculation", _rows_full_batch),
    _rule("limits-draft-length", "error", "limits speculation", _draft_length),
    _rule("serving-default-tokens", "error", "serving limits", _default_tokens),
    _rule("serving-ports", "error", "serving", _ports),
    _rule("gates-acceptance-length", "error", "gates speculation", _impossible_acceptance),
    _rule("gates-speedup", "error", "gates speculation quantization", _speedup_over_itself),
    _rule("gates-load", "error", "gates", _one_load),
    _rule("gates-goodput", "error", "gates", _goodput_of_something),
    _rule("gates-load-requests", "error", "gates", _requests_for_a_tail),
    _rule("gates-load-limits", "error", "gates limits", _load_fits),
    _rule("gates-load-queue", "note", "gates limits", _load_queues),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _TABLE}
"""Rule id -> rule, in the order of ``docs/recipes.md``."""

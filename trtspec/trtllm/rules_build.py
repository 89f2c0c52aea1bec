"""Rules about versions, GPUs, quantization and limits; see :mod:`trtspec.trtllm.rules`."""

from __future__ import annotations

from trtspec.recipe import (
    NoQuantization,
    PytorchBackend,
    TensorrtBackend,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
    W8A8SqQuantization,
)
from trtspec.recipe_facts import drafted_positions, paged_context_off
from trtspec.trtllm.case import FP8_COMPUTING, Case, Told
from trtspec.versions import parse_range

# --------------------------------------------------------------------------- version


def version(case: Case) -> Told:
    """Engines ended with 1.2.1, the LLM API is taken from 1.0 on; a recipe says what it means."""
    backend = case.recipe.backend
    if backend.kind not in case.facts.backends:
        yield (
            ("backend", "kind"),
            f"{backend.kind} does not exist in TensorRT-LLM {case.version}, which has "
            f"{' and '.join(case.facts.backends)}; choose another version, or migrate the recipe",
        )
    elif isinstance(backend, TensorrtBackend | PytorchBackend) and not parse_range(backend.version).admits(
        case.version
    ):
        yield (
            ("backend", "version"),
            f"{backend.version} does not admit {case.version}; widen it, or choose another version",
        )


def last_engines(case: Case) -> Told:
    """The engine backend, its converters and its Triton backend were removed after 1.2.1."""
    if case.engine and not case.before("1.2.1"):
        yield (
            ("backend", "kind"),
            "1.2.1 is the last version with engines; what replaces this recipe later: trtspec migrate",
        )


# --------------------------------------------------------------------------- GPU


def fp8_sm(case: Case) -> Told:
    """Tensor cores multiply FP8 from Ada (sm89) on."""
    if case.gpu is not None and case.gpu.sm < 89:
        for path, quantization in case.quantizations():
            if quantization.kind in ("fp8", "w4a8_awq"):
                yield (
                    (*path, "kind"),
                    f"{quantization.kind} computes in FP8, which needs sm89 or newer, and {case.gpu.name} is "
                    f"sm{case.gpu.sm}; choose w4a16_awq",
                )


def nvfp4_sm(case: Case) -> Told:
    """Tensor cores multiply NVFP4 from Blackwell (sm100) on."""
    if case.gpu is not None and case.gpu.sm < 100:
        for path, quantization in case.quantizations():
            if quantization.kind == "nvfp4":
                yield (
                    (*path, "kind"),
                    f"nvfp4 needs sm100 or newer and {case.gpu.name} is sm{case.gpu.sm}; choose fp8",
                )


def nvfp4_kv_sm(case: Case) -> Told:
    """The table of hardware lists an NVFP4 KV cache for sm100 and sm103 only."""
    if case.gpu is not None and not 100 <= case.gpu.sm < 120:
        for path, quantization in case.quantizations():
            if quantization.kv_cache == "nvfp4":
                yield (
                    (*path, "kv_cache"),
                    f"nvfp4 is listed for sm100 and sm103, and {case.gpu.name} is sm{case.gpu.sm}; "
                    "choose fp8",
                )


def engine_blackwell(case: Case) -> Told:
    """trtllm-build raises RuntimeError for integer weights, SmoothQuant and INT8 KV from sm100 to sm119."""
    if not case.engine or case.gpu is None or not 100 <= case.gpu.sm < 120:
        return
    for path, quantization in case.quantizations():
        if quantization.kind in ("w4a16_awq", "w8a8_sq"):
            yield (
                (*path, "kind"),
                f"trtllm-build refuses {quantization.kind} on sm{case.gpu.sm} ({case.gpu.name}); choose "
                "fp8 or nvfp4, or backend kind: pytorch",
            )
        if quantization.kv_cache == "int8":
            yield (
                (*path, "kv_cache"),
                f"trtllm-build refuses int8 on sm{case.gpu.sm} ({case.gpu.name}); choose fp8",
            )


def awq_blackwell(case: Case) -> Told:
    """The LLM API's table of hardware lists AWQ on sm100 and sm103 from 1.2 on, and not on sm120."""
    if case.engine or case.gpu is None or case.gpu.sm < 100:
        return
    if case.gpu.sm >= 120 or case.before("1.2"):
        for path, quantization in case.quantizations():
            if quantization.kind in ("w4a16_awq", "w4a8_awq"):
                yield (
                    (*path, "kind"),
                    f"{case.version} does not list {quantization.kind} for sm{case.gpu.sm} "
                    f"({case.gpu.name}); choose nvfp4 or fp8, or try it before you rely on it",
                )


def w4a8_kv8_ada(case: Case) -> Told:
    """On Ada cards users of the LLM API met "FMHA kernels are not found" with this pair (open when read)."""
    q = case.recipe.quantization
    if (
        not case.engine
        and case.gpu is not None
        and case.gpu.sm == 89
        and isinstance(q, W4A8AwqQuantization)
        and q.kv_cache == "fp8"
    ):
        yield (
            ("quantization", "kv_cache"),
            f"w4a8_awq with kv_cache fp8 has no attention kernel on sm89 ({case.gpu.name}); write none, "
            "or choose fp8 weights",
        )


def w4a8_engine_ada(case: Case) -> Told:
    """W4A8 AWQ engines were reported not to build, or to build wrong, on Ada cards."""
    q = case.recipe.quantization
    if case.engine and case.gpu is not None and case.gpu.sm == 89 and isinstance(q, W4A8AwqQuantization):
        yield (
            ("quantization", "kind"),
            f"w4a8_awq engines were reported to fail on sm89 ({case.gpu.name}); build a small model first, "
            "or choose fp8",
        )


def fp8_phi_blackwell(case: Case) -> Told:
    """Context attention of Phi-3 in FP8 was reported to fail on B200."""
    name = case.checkpoint.architecture if case.checkpoint else ""
    if (
        name.startswith("Phi3")
        and case.gpu is not None
        and 100 <= case.gpu.sm < 120
        and case.recipe.quantization.kind == "fp8"
    ):
        yield (
            ("quantization", "kind"),
            f"fp8 {name} on sm{case.gpu.sm} ({case.gpu.name}) is reported to fail in context attention; "
            "try it before you rely on it",
        )


def memory(case: Case) -> Told:
    """The weights alone must fit the GPUs' memory; the KV cache and activations come on top."""
    from trtspec.cost.memory import weight_bytes  # only with a GPU and a model: keeps `lint` light

    if case.gpu is None:
        return
    parallel = case.recipe.parallel
    total = 0.0
    for _, quantization, checkpoint in case.models():
        if checkpoint.spec is None or checkpoint.spec.quant is not None:
            return
        total += weight_bytes(checkpoint.spec, quantization, parallel.tp, parallel.pp)
    if total > case.gpu.memory_bytes:
        yield (
            ("parallel", "tp"),
            f"the weights take {total / 1e9:.1f} GB of each GPU and {case.gpu.name} has "
            f"{case.gpu.memory_bytes / 1e9:.1f} GB; raise tp, or choose a smaller weight format",
        )


# --------------------------------------------------------------------------- quantization

QFORMATS = {
    "fp8": "fp8",
    "w4a16_awq": "int4_awq",
    "w4a8_awq": "w4a8_awq",
    "w8a8_sq": "int8_sq",
    "nvfp4": "nvfp4",
}
"""Weight format of a recipe -> ``--qformat`` of quantize.py."""


def quant_format(case: Case) -> Told:
    """quantize.py makes the formats that its version knows."""
    flags = case.facts.commands.get("quantize.py", {})
    if not case.engine or "--qformat" not in flags:
        return
    for path, quantization in case.quantizations():
        if quantization.kind == "none" or QFORMATS[quantization.kind] in flags["--qformat"].choices:
            continue
        known = [kind for kind, name in QFORMATS.items() if name in flags["--qformat"].choices]
        yield (
            (*path, "kind"),
            f"quantize.py of {case.version} has no {quantization.kind}; allowed: {', '.join(known)}; "
            "choose one, or narrow backend.version",
        )


def awq_group(case: Case) -> Told:
    """The 4-bit kernels exist for 64 and 128 weights a scale, those with FP8 activations for 128 alone."""
    for path, quantization in case.quantizations():
        if isinstance(quantization, W4A8AwqQuantization) and quantization.group_size != 128:
            allowed = "128"
        elif isinstance(quantization, W4A16AwqQuantization) and quantization.group_size == 32:
            allowed = "64 and 128"
        else:
            continue
        yield (
            (*path, "group_size"),
            f"found {quantization.group_size}; TensorRT-LLM has {quantization.kind} kernels for {allowed}; "
            "write 128",
        )


def lm_head_option(case: Case) -> Told:
    """quantize.py quantizes the output projection for FP8 only, and where it has --quantize_lm_head."""
    if not case.engine:
        return
    able = case.has_flag("quantize.py", "--quantize_lm_head")
    for path, quantization in case.quantizations():
        if isinstance(quantization, NoQuantization) or not quantization.lm_head:
            continue
        if not able or quantization.kind != "fp8":
            yield (
                (*path, "lm_head"),
                f"quantize.py of {case.version} leaves the output projection in 16 bit with "
                f"{quantization.kind}; write false",
            )


def lm_head(case: Case) -> Told:
    """Loaders expect the output projection among the excluded modules; a quantized one is a rare path."""
    able = case.has_flag("quantize.py", "--quantize_lm_head")
    for path, quantization in case.quantizations():
        if isinstance(quantization, NoQuantization) or not quantization.lm_head:
            continue
        if not case.engine or (able and quantization.kind == "fp8"):
            yield (
                (*path, "lm_head"),
                "a quantized output projection is a rare path and moves every logit; write false",
            )


def engine_exclude(case: Case) -> Told:
    """No option of quantize.py leaves single modules in 16 bit, so the patterns would be lost."""
    if not case.engine:
        return
    for path, quantization in case.quantizations():
        if not isinstance(quantization, NoQuantization) and quantization.exclude:
            yield (
                (*path, "exclude"),
                "engines are quantized by quantize.py, which has no option for it; remove it, or choose "
                "backend kind: pytorch",
            )


def engine_alpha(case: Case) -> Told:
    """quantize.py has no option for SmoothQuant's alpha and takes ModelOpt's preset, which is 1.0."""
    for path, quantization in case.quantizations():
        if case.engine and isinstance(quantization, W8A8SqQuantization) and quantization.alpha != 1.0:
            yield (
                (*path, "alpha"),
                f"found {quantization.alpha:g}; quantize.py has no option for it and uses 1.0; write 1.0 "
                "and gate the quality",
            )


def sq_dtype(case: Case) -> Told:
    """SmoothQuant engines with an FP8 KV cache were reported to mix bfloat16 and float16 in the build."""
    backend, q = case.recipe.backend, case.recipe.quantization
    if (
        isinstance(backend, TensorrtBackend)
        and q.kind == "w8a8_sq"
        and q.kv_cache == "fp8"
        and backend.dtype == "bfloat16"
    ):
        yield (
            ("backend", "dtype"),
            "bfloat16 with w8a8_sq and kv_cache fp8 is reported to fail in the build; write float16",
        )


# --------------------------------------------------------------------------- attention over a small KV cache


def _asks_paged_context(case: Case) -> bool:
    backend = case.recipe.backend
    return isinstance(backend, TensorrtBackend) and backend.paged_context_fmha


def paged_refused(case: Case) -> Told:
    """Up to 0.20 trtllm-build raises RuntimeError where later versions switch paged context attention off."""
    reason = paged_context_off(case.recipe)
    if reason and _asks_paged_context(case) and case.before("0.21"):
        yield (
            ("backend", "paged_context_fmha"),
            f"found true, and {reason}: trtllm-build {case.version} refuses it; write false, or narrow "
            "backend.version to 0.21 and later",
        )


def paged_off(case: Case) -> Told:
    """trtllm-build (1.2.1; 0.17 refuses it) and the LLM API (from about 1.2) switch it off with a warning."""
    reason = paged_context_off(case.recipe)
    built = _asks_paged_context(case) and not case.before("0.21")
    if reason and (built or (not case.engine and not case.before("1.2"))):
        yield (
            ("quantization", "kv_cache"),
            f"{reason}: paged context attention is asked for and will be switched off",
        )


def awq_kv8_kernel(case: Case) -> Told:
    """Before the change of November 2025 the LLM API looked for a kernel that was never compiled."""
    reason = paged_context_off(case.recipe)
    if reason and not case.engine and case.before("1.2"):
        yield (
            ("quantization", "kv_cache"),
            f"{reason}: {case.version} stops with 'FMHA kernels are not found' where prompts share blocks or "
            "come in chunks; write none, or narrow backend.version to 1.2 and later",
        )


def awq_kv8_drafting(case: Case) -> Told:
    """Drafted tokens are verified through the context kernel over the paged cache."""
    reason = paged_context_off(case.recipe)
    if reason and not case.engine and case.method != "none":
        yield (
            ("speculation", "kind"),
            f"{case.method} verifies through paged context attention, and {reason}; write kv_cache none, or "
            "choose fp8 weights",
        )


def fp8_context(case: Case) -> Told:
    """use_fp8_context_fmha follows the KV cache: on with FP8 KV, off without it."""
    q = case.recipe.quantization
    if case.engine and q.kind in FP8_COMPUTING and q.kv_cache != "fp8":
        yield (
            ("quantization", "kv_cache"),
            f"{q.kind} weights with kv_cache {q.kv_cache}: trtllm-build switches FP8 context attention off; "
            "choose fp8 to have it",
        )


def fused_mlp(case: Case) -> Told:
    """use_fused_mlp is dropped unless the weights are 16 bit or FP8."""
    q = case.recipe.quantization
    if case.engine and q.kind not in ("none", "fp8"):
        yield ("quantization", "kind"), f"{q.kind}: trtllm-build drops use_fused_mlp, which is on by default"


def nvfp4_gemm(case: Case) -> Told:
    """With NVFP4 weights gemm_plugin becomes nvfp4 unless it is disabled by name."""
    if case.engine and case.recipe.quantization.kind == "nvfp4":
        yield ("quantization", "kind"), "nvfp4: trtllm-build sets gemm_plugin to nvfp4 whatever is asked for"


# --------------------------------------------------------------------------- limits


def kv_fraction(case: Case) -> Told:
    """Without a size the KV cache takes a fraction of the memory that is free once the weights are loaded."""
    if case.recipe.limits.kv_cache_bytes is None:
        yield (
            ("limits", "kv_cache_bytes"),
            "null: the KV cache takes most of the memory that is free (0.9 of it by default); give bytes "
            "where other programs share the GPU",
        )


def kv_bytes(case: Case) -> Told:
    """The LLM API takes the size of the KV cache in bytes from 1.1 on."""
    known = "max_gpu_total_bytes" in case.facts.classes.get("KvCacheConfig", {})
    if case.recipe.limits.kv_cache_bytes is not None and not case.engine and not known:
        yield (
            ("limits", "kv_cache_bytes"),
            f"{case.version} has no key for bytes; write null, or narrow backend.version to 1.1 and later",
        )


def kv_tokens(case: Case) -> Told:
    """Triton's C++ backend takes the size of the KV cache in tokens, not bytes."""
    if case.recipe.limits.kv_cache_bytes is not None and case.engine:
        yield (
            ("limits", "kv_cache_bytes"),
            "engines are told tokens: the bytes are divided by those of one token, rounded down",
        )


def vanilla(case: Case) -> Told:
    """The plain attention has no kernel over a paged cache for prompts: no KV reuse, no chunked context."""
    backend = case.recipe.backend
    if isinstance(backend, PytorchBackend) and backend.attention == "VANILLA":
        yield (
            ("backend", "attention"),
            "VANILLA is for comparisons: no KV reuse, no chunked prefill; write TRTLLM to serve",
        )


def built_rows(case: Case) -> int:
    """max_num_tokens of the engine that trtllm-build makes."""
    limits = case.recipe.limits
    rows = max(
        limits.max_num_tokens, limits.max_batch_size * (drafted_positions(case.recipe.speculation) + 1)
    )
    return min(rows, limits.max_seq_tokens * limits.max_batch_size)


def rows_raised(case: Case) -> Told:
    """A step of a full batch verifies max_batch_size x (drafted + 1) rows; fewer are not accepted."""
    limits, rows = case.recipe.limits, built_rows(case)
    if case.engine and case.method != "none" and rows > limits.max_num_tokens:
        yield (
            ("limits", "max_num_tokens"),
            f"found {limits.max_num_tokens}; trtllm-build raises it to {rows}, and the activations' memory "
            "with it",
        )


def rows_capped(case: Case) -> Told:
    """More rows than max_batch_size whole sequences cannot come together."""
    limits = case.recipe.limits
    most = limits.max_seq_tokens * limits.max_batch_size
    if case.engine and limits.max_num_tokens > most:
        yield (
            ("limits", "max_num_tokens"),
            f"found {limits.max_num_tokens}; trtllm-build lowers it to max_batch_size x max_seq_tokens = "
            f"{most}",
        )


def rows_large(case: Case) -> Told:
    """trtllm-build warns above 16384: the buffers of such a step are large and seldom pay."""
    rows = built_rows(case)
    if case.engine and rows > 16384:
        yield (
            ("limits", "max_batch_size"),
            f"the engine is built for {rows} rows a step, which trtllm-build warns about; lower the batch or "
            "the drafted tokens",
        )


def several_nodes(case: Case) -> Told:
    """One machine has eight GPUs as a rule; more are launched with one process a GPU over MPI."""
    parallel = case.recipe.parallel
    if parallel.tp * parallel.pp > 8:
        yield (
            ("parallel", "tp"),
            f"{parallel.tp * parallel.pp} GPUs are more than one machine's eight: the launch goes over MPI, "
            "and a tensor parallel group across machines is slow; prefer tp 8 and pp",
        )

"""The recipe: one YAML file that carries a model from checkpoint to verdict (schema version 1).

This module is the schema: each class is one mapping of the YAML, each field one key, each docstring
what an editor shows. ``quantization``, ``speculation``, ``acceptance`` and ``backend`` are unions tagged
by ``kind``; every variant has only its own fields. Reading a file with line numbers, the rules that
span keys and the error texts are in :mod:`trtspec.recipe_file`; ``recipes/reference.yaml`` shows every
key with a comment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

WeightFormat = Literal["none", "fp8", "w4a16_awq", "w4a8_awq", "w8a8_sq", "nvfp4"]
KvFormat = Literal["none", "fp8", "int8", "nvfp4"]

PositiveInt = Annotated[int, Field(gt=0)]


class _Mapping(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


# --------------------------------------------------------------------------- model


class Model(_Mapping):
    """The target checkpoint."""

    source: Annotated[str, Field(min_length=1)]
    """A Hugging Face folder (relative paths start at the recipe's folder), ``sample:NAME`` for a model
    that ``trtspec fetch NAME`` put into the cache, or a hub id (``org/name``), which needs the network."""
    revision: str | None = None
    """Hub revision; only with a hub id."""


# --------------------------------------------------------------------------- backend


class EmbeddedBackend(_Mapping):
    """trtspec's own torch engine: any machine, no GPU needed."""

    kind: Literal["embedded"]
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Computation and unquantized weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Never changed silently: ``cuda`` without a GPU is an error."""
    page_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens of one KV cache page."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts and reuse it for prompts that start alike."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Torch threads; null: one per core."""


class TensorrtBackend(_Mapping):
    """TensorRT-LLM engines (``trtllm-build``), versions 0.17 to 1.2.1, NVIDIA GPU."""

    kind: Literal["tensorrt"]
    version: str = ">=0.17,<=1.2.1"
    """TensorRT-LLM versions that this recipe is for: comma-separated comparisons."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    paged_context_fmha: bool = True
    """Needed for KV reuse, chunked context and most drafting."""
    multiple_profiles: bool = False


class PytorchBackend(_Mapping):
    """TensorRT-LLM's LLM API (PyTorch flow), versions 1.0 and later, NVIDIA GPU."""

    kind: Literal["pytorch"]
    version: str = ">=1.0,<1.5"
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    cuda_graphs: bool = True
    overlap_scheduler: bool | None = None
    """null: on wherever the drafting method and version allow it."""
    attention: Literal["TRTLLM", "FLASHINFER", "VANILLA"] = "TRTLLM"


Backend = Annotated[EmbeddedBackend | TensorrtBackend | PytorchBackend, Field(discriminator="kind")]


# --------------------------------------------------------------------------- quantization


class Calibration(_Mapping):
    """The texts on which scales are measured."""

    data: str = "builtin"
    """``builtin`` (texts that ship with trtspec) or a JSONL file with ``text`` or ``messages`` per line."""
    num_samples: PositiveInt = 64
    max_tokens: Annotated[int, Field(ge=16)] = 512
    """Length of one calibration batch row; texts are packed to it."""
    seed: Annotated[int, Field(ge=0)] = 0


class _Quantization(_Mapping):
    kv_cache: KvFormat = "none"
    """Format of the KV cache."""


class _CalibratedQuantization(_Quantization):
    lm_head: bool = False
    """Quantize the output projection too (rarely wise; refused by some engines)."""
    exclude: tuple[str, ...] = ()
    """Further modules to leave in 16 bit, as glob patterns on module names."""
    calibration: Calibration = Calibration()


class NoQuantization(_Quantization):
    """16-bit weights; only the KV cache may be quantized."""

    kind: Literal["none"]
    calibration: Calibration = Calibration()


class Fp8Quantization(_CalibratedQuantization):
    """FP8 E4M3 weights and activations, per tensor, static scales."""

    kind: Literal["fp8"]


class W4A16AwqQuantization(_CalibratedQuantization):
    """4-bit integer weights in groups with 16-bit activations; AWQ (arXiv 2306.00978)."""

    kind: Literal["w4a16_awq"]
    group_size: Literal[32, 64, 128] = 128
    """Must divide the input size of every quantized layer."""


class W4A8AwqQuantization(_CalibratedQuantization):
    """4-bit integer weights with FP8 activations; AWQ."""

    kind: Literal["w4a8_awq"]
    group_size: Literal[32, 64, 128] = 128


class W8A8SqQuantization(_CalibratedQuantization):
    """INT8 weights and activations; SmoothQuant (arXiv 2211.10438)."""

    kind: Literal["w8a8_sq"]
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """How much of the activations' range moves into the weights."""


class Nvfp4Quantization(_CalibratedQuantization):
    """NVFP4 weights and activations; calibrating needs a CUDA GPU, running it Blackwell."""

    kind: Literal["nvfp4"]


Quantization = Annotated[
    NoQuantization
    | Fp8Quantization
    | W4A16AwqQuantization
    | W4A8AwqQuantization
    | W8A8SqQuantization
    | Nvfp4Quantization,
    Field(discriminator="kind"),
]


# --------------------------------------------------------------------------- speculation


class NoSpeculation(_Mapping):
    kind: Literal["none"]


class NgramSpeculation(_Mapping):
    """Prompt lookup: continue the latest place where the current suffix occurred before."""

    kind: Literal["ngram"]
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 4
    min_ngram: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix that counts as a match."""
    max_ngram: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest suffix looked for; longer matches win."""


class LookaheadSpeculation(_Mapping):
    """Lookahead decoding (arXiv 2402.02057)."""

    kind: Literal["lookahead"]
    window: Annotated[int, Field(ge=1, le=32)] = 4
    ngram: Annotated[int, Field(ge=2, le=16)] = 3
    verification_set: Annotated[int, Field(ge=1, le=32)] = 4


class DraftModelSpeculation(_Mapping):
    """A smaller model with the same tokenizer drafts a chain (arXiv 2211.17192)."""

    kind: Literal["draft_model"]
    model: Model
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 4
    quantization: Quantization = NoQuantization(kind="none")
    """The draft's own."""


class MedusaSpeculation(_Mapping):
    """Extra heads on the target's last hidden state (arXiv 2401.10774)."""

    kind: Literal["medusa"]
    heads: Annotated[str, Field(min_length=1)]
    """Folder with the trained heads."""
    choices: tuple[tuple[int, ...], ...] | None = None
    """Tree paths (``[0]``, ``[0, 1]`` ...); null: the default tree for the number of heads."""
    quantization: Literal["none", "fp8"] = "none"
    """The heads' own."""


class EagleSpeculation(_Mapping):
    """EAGLE-1 (static tree, arXiv 2401.15077) or EAGLE-2 (dynamic tree, arXiv 2406.16858)."""

    kind: Literal["eagle"]
    heads: Annotated[str, Field(min_length=1)]
    depth: Annotated[int, Field(ge=1, le=16)] = 5
    choices: tuple[tuple[int, ...], ...] | None = None
    """Static tree; null: the dynamic tree given by ``top_k`` and ``num_draft_tokens``."""
    top_k: Annotated[int, Field(ge=1, le=32)] = 8
    num_draft_tokens: Annotated[int, Field(ge=1, le=255)] = 31
    """Nodes kept for verification."""
    quantization: Literal["none", "fp8"] = "none"


class Eagle3Speculation(_Mapping):
    """EAGLE-3 (arXiv 2503.01840)."""

    kind: Literal["eagle3"]
    heads: Annotated[str, Field(min_length=1)]
    num_draft_tokens: Annotated[int, Field(ge=1, le=255)] = 4
    top_k: Annotated[int, Field(ge=1, le=32)] = 1
    """1 drafts a chain; more, a tree (not on every backend)."""
    depth: Annotated[int, Field(ge=1, le=16)] | None = None
    """Depth of the tree; null: num_draft_tokens (a chain)."""
    quantization: Literal["none", "fp8"] = "none"


Speculation = Annotated[
    NoSpeculation
    | NgramSpeculation
    | LookaheadSpeculation
    | DraftModelSpeculation
    | MedusaSpeculation
    | EagleSpeculation
    | Eagle3Speculation,
    Field(discriminator="kind"),
]


# --------------------------------------------------------------------------- acceptance


class ExactAcceptance(_Mapping):
    """Draw the target's own token, keep the draft that equals it. Strict: the output law is the target's."""

    kind: Literal["exact"]


class RejectionAcceptance(_Mapping):
    """Accept with probability min(1, p/q), else draw from the residual (arXiv 2211.17192). Strict."""

    kind: Literal["rejection"]


class TypicalAcceptance(_Mapping):
    """Accept what the target finds plausible enough (Medusa, section 2.3.1). Approximate, not lossless."""

    kind: Literal["typical"]
    epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Posterior threshold."""
    delta: Annotated[float, Field(gt=0.0, le=1.0)] = 0.09
    """Factor of exp(-entropy)."""


Acceptance = Annotated[
    ExactAcceptance | RejectionAcceptance | TypicalAcceptance, Field(discriminator="kind")
]


# --------------------------------------------------------------------------- the rest


class Limits(_Mapping):
    """Sizes the engine is built for."""

    max_batch_size: Annotated[int, Field(ge=1, le=8192)] = 16
    """Sequences in flight."""
    max_input_tokens: PositiveInt = 1024
    max_seq_tokens: PositiveInt = 2048
    """Prompt and answer together."""
    max_num_tokens: PositiveInt = 512
    """Rows of one forward: prefill chunks, decode and verified positions together."""
    kv_cache_bytes: PositiveInt | None = None
    """Memory for the KV cache; null: enough for max_batch_size full sequences on embedded, the engine's own
    fraction of free memory on a GPU."""


class Parallel(_Mapping):
    """Tensor and pipeline parallel GPUs."""

    tp: Annotated[int, Field(ge=1, le=64)] = 1
    pp: Annotated[int, Field(ge=1, le=64)] = 1


class Serving(_Mapping):
    """How ``trtspec serve`` listens."""

    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")] = "tensorrt_llm"
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    grpc_port: Annotated[int, Field(ge=1, le=65535)] = 8001
    metrics_port: Annotated[int, Field(ge=1, le=65535)] = 8002
    max_queue_requests: PositiveInt = 256
    """Requests waiting beyond the batch before new ones are refused."""
    default_max_tokens: PositiveInt = 64
    """Used when a request does not say how many tokens it wants."""


class Gates(_Mapping):
    """What ``trtspec verify`` must show for exit code 0. null: measured and reported, not required."""

    lossless: bool = True
    """Speculation changes nothing against the same weights without it (strict acceptance only)."""
    max_perplexity_ratio: Annotated[float, Field(gt=1.0)] | None = 1.25
    """Upper end of the interval of perplexity over that of the 16-bit baseline."""
    min_acceptance_length: Annotated[float, Field(ge=1.0)] | None = None
    """Tokens per target step, bonus token included."""
    min_speedup: Annotated[float, Field(gt=0.0)] | None = None
    """Tokens/s over the same weights without speculation: lower end of the interval."""
    min_speedup_over_baseline: Annotated[float, Field(gt=0.0)] | None = None
    """Tokens/s over the 16-bit baseline without speculation: lower end of the interval."""


class Recipe(_Mapping):
    """One model, one backend, one quantization, one way of drafting: what every verb reads."""

    version: Literal[1]
    """Version of this schema."""
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Names the folder engines/NAME."""
    description: str = ""
    model: Model
    backend: Backend
    quantization: Quantization = NoQuantization(kind="none")
    speculation: Speculation = NoSpeculation(kind="none")
    acceptance: Acceptance = ExactAcceptance(kind="exact")
    limits: Limits = Limits()
    parallel: Parallel = Parallel()
    serving: Serving = Serving()
    gates: Gates = Gates()

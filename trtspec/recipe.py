"""The recipe: one YAML file that carries a model from checkpoint to verdict (schema version 1).

This module is the schema: each class is one mapping of the YAML, each field one key, each docstring
what an editor shows. ``quantization``, ``speculation``, ``acceptance`` and ``backend`` are unions tagged
by ``kind``; every variant has only its own fields. Reading a file with line numbers and the error texts
are in :mod:`trtspec.recipe_file`, the rules that span keys in :mod:`trtspec.recipe_rules`;
``recipes/reference.yaml`` shows every key with a comment. The file is longer than others because it is the
whole schema in reading order.

Values are strict: text is never read as a number, ``true`` is never 1; a whole number may stand where a
fraction is allowed, and a list where a tuple is.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

SCHEMA_VERSION = 1

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
MODEL_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"
HOST_PATTERN = r"^[A-Za-z0-9.:_-]{1,253}$"

WeightFormat = Literal["none", "fp8", "w4a16_awq", "w4a8_awq", "w8a8_sq", "nvfp4"]
KvFormat = Literal["none", "fp8", "int8", "nvfp4"]
HeadsFormat = Literal["none", "fp8"]


def _whole_number(value: Any) -> Any:
    """Literal compares with ==, so that True and 1.0 would pass for 1; they must not."""
    if type(value) is not int:
        raise PydanticCustomError("int_type", "not a whole number")
    return value


TokenCount = Annotated[int, Field(ge=1, le=2**24)]
GroupSize = Annotated[Literal[32, 64, 128], BeforeValidator(_whole_number)]
# strict=False is for the container alone (a YAML list is not a tuple); the items stay strict.
TreePath = Annotated[tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(strict=False, max_length=16)]
TreePaths = Annotated[tuple[TreePath, ...], Field(strict=False, max_length=255)]
Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=1000)]
Folder = Annotated[str, Field(min_length=1, max_length=4096)]
MaxConcurrency = Annotated[int, Field(ge=1, le=8192)]
Milliseconds = Annotated[float, Field(gt=0.0, le=1e6)]


class _Mapping(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


# --------------------------------------------------------------------------- model


class Model(_Mapping):
    """A checkpoint."""

    source: Annotated[str, Field(min_length=1, max_length=4096)]
    """A Hugging Face folder (relative paths start at the recipe's folder), ``sample:NAME`` for a model
    that ``trtspec fetch NAME`` put into the cache, or a hub id (``org/name``), which needs the network."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Hub revision: a branch, tag or commit; only with a hub id."""


# --------------------------------------------------------------------------- backend


class EmbeddedBackend(_Mapping):
    """trtspec's own torch engine: any machine, no GPU needed."""

    kind: Literal["embedded"]
    """trtspec's own torch engine: any machine, no GPU needed."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Number format of the computation and of unquantized weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the engine runs. Never changed silently: ``cuda`` without a GPU is an error."""
    page_tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens of one KV cache page."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts and reuse it for prompts that start alike."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Torch threads; null: one per core."""
    batch_invariant: bool = False
    """Give every request the same bits whatever is computed beside it (batch, prompt chunks, drafts), so that
    greedy answers are equal at 16 bit too. Slower: docs/limits.md has the figures."""
    dequantized_copy: bool = False
    """Keep 4-bit weights a second time, dequantized to bfloat16, for steps of many rows (prompts, batches,
    verification): the same weights, faster from about 10 rows on. Takes 2.5 bytes a weight instead of 1."""


class TensorrtBackend(_Mapping):
    """TensorRT-LLM engines (``trtllm-build``), versions 0.17 to 1.2.1, NVIDIA GPU."""

    kind: Literal["tensorrt"]
    """TensorRT-LLM engines (``trtllm-build``), versions 0.17 to 1.2.1, NVIDIA GPU."""
    version: Annotated[str, Field(min_length=1, max_length=100)] = ">=0.17,<=1.2.1"
    """TensorRT-LLM versions that this recipe is for: comparisons separated by commas."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Number format of activations and of unquantized weights."""
    paged_context_fmha: bool = True
    """Paged attention kernel for prompts; KV reuse, chunked context and most drafting need it."""
    multiple_profiles: bool = False
    """Several TensorRT optimization profiles: a longer build, better kernels for small batches."""


class PytorchBackend(_Mapping):
    """TensorRT-LLM's LLM API (PyTorch flow), versions 1.0 and later, NVIDIA GPU."""

    kind: Literal["pytorch"]
    """TensorRT-LLM's LLM API (PyTorch flow), versions 1.0 and later, NVIDIA GPU."""
    version: Annotated[str, Field(min_length=1, max_length=100)] = ">=1.0,<1.5"
    """TensorRT-LLM versions that this recipe is for: comparisons separated by commas."""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Number format of activations and of unquantized weights; auto: the checkpoint's."""
    cuda_graphs: bool = True
    """Capture decode steps as CUDA graphs."""
    overlap_scheduler: bool | None = None
    """Schedule the next step while this one runs; null: on wherever the drafting method allows it."""
    attention: Literal["TRTLLM", "FLASHINFER", "VANILLA"] = "TRTLLM"
    """Attention kernels."""


Backend = Annotated[EmbeddedBackend | TensorrtBackend | PytorchBackend, Field(discriminator="kind")]


# --------------------------------------------------------------------------- quantization


class Calibration(_Mapping):
    """The texts on which scales are measured."""

    data: Annotated[str, Field(min_length=1, max_length=4096)] = "builtin"
    """``builtin`` (texts that ship with trtspec) or a JSONL file with ``text`` or ``messages`` per line."""
    num_samples: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Texts to calibrate on, drawn from the data by the seed; a warning says so when the data has fewer."""
    max_tokens: Annotated[int, Field(ge=16, le=131_072)] = 512
    """Tokens of one row: the texts are joined and cut into rows of this length, never padded."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the choice of texts."""


class _Quantization(_Mapping):
    kv_cache: KvFormat = "none"
    """Format of the KV cache; none: 16 bit (or the backend's dtype)."""


class _CalibratedQuantization(_Quantization):
    lm_head: bool = False
    """Quantize the output projection too (rarely wise; refused by some engines)."""
    exclude: Patterns = ()
    """Further modules to leave in 16 bit, as glob patterns on module names."""
    calibration: Calibration = Calibration()
    """The texts on which scales are measured."""


class NoQuantization(_Quantization):
    """16-bit weights; only the KV cache may be quantized."""

    kind: Literal["none"]
    """16-bit weights; only the KV cache may be quantized."""
    calibration: Calibration = Calibration()
    """The texts on which the scales of a quantized KV cache are measured."""


class Fp8Quantization(_CalibratedQuantization):
    """FP8 E4M3 weights and activations, per tensor, static scales."""

    kind: Literal["fp8"]
    """FP8 E4M3 weights and activations, per tensor, static scales."""


class W4A16AwqQuantization(_CalibratedQuantization):
    """4-bit integer weights in groups with 16-bit activations; AWQ (arXiv 2306.00978)."""

    kind: Literal["w4a16_awq"]
    """4-bit integer weights in groups with 16-bit activations; AWQ (arXiv 2306.00978)."""
    group_size: GroupSize = 128
    """Weights that share a scale; must divide the input size of every quantized layer."""


class W4A8AwqQuantization(_CalibratedQuantization):
    """4-bit integer weights in groups with FP8 activations; AWQ."""

    kind: Literal["w4a8_awq"]
    """4-bit integer weights in groups with FP8 activations; AWQ."""
    group_size: GroupSize = 128
    """Weights that share a scale; must divide the input size of every quantized layer."""


class W8A8SqQuantization(_CalibratedQuantization):
    """INT8 weights and activations; SmoothQuant (arXiv 2211.10438)."""

    kind: Literal["w8a8_sq"]
    """INT8 weights and activations; SmoothQuant (arXiv 2211.10438)."""
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """How much of the activations' range moves into the weights."""


class Nvfp4Quantization(_CalibratedQuantization):
    """NVFP4 weights and activations; calibrating needs a CUDA GPU, running it Blackwell."""

    kind: Literal["nvfp4"]
    """NVFP4 weights and activations; calibrating needs a CUDA GPU, running it Blackwell."""


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
    """One token per target step."""

    kind: Literal["none"]
    """One token per target step."""


class NgramSpeculation(_Mapping):
    """Prompt lookup: continue the latest place where the current suffix occurred before."""

    kind: Literal["ngram"]
    """Prompt lookup: continue the latest place where the current suffix occurred before."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 4
    """Tokens proposed per step, at most."""
    min_ngram: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest suffix that counts as a match, in tokens."""
    max_ngram: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest suffix looked for, in tokens; longer matches win."""
    branches: Annotated[int, Field(ge=1, le=16)] = 1
    """Ways to go on that are verified at once, as a tree of num_draft_tokens nodes, where the suffix went on
    in several ways; 1: a chain. Only on embedded."""
    corpus: Folder | None = None
    """Texts that are looked up besides the sequence itself (REST, arXiv 2311.08252): a JSONL file with
    ``text``, ``messages`` or ``tokens`` per line, a ``.npy`` file of token ids, or plain text; null: none.
    Only on embedded."""
    corpus_min_count: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Keep the places of the corpus whose first min_ngram tokens occur there at least so often; more than 1
    makes a smaller store (after CREST, arXiv 2408.04678)."""
    max_concurrency: MaxConcurrency | None = None
    """Draft only while at most this many sequences decode; beyond its break-even batch a draft costs more
    than it brings. null: always."""
    adaptive: bool = False
    """Verify of each draft the nodes that pay, by their measured acceptance against the measured cost of a
    step; none above the batch where drafting stops paying. Which they are then depends on timing, and with
    ``rejection`` so do sampled tokens. Only on embedded."""


class LookaheadSpeculation(_Mapping):
    """Lookahead decoding: n-grams from parallel Jacobi iterations (arXiv 2402.02057)."""

    kind: Literal["lookahead"]
    """Lookahead decoding: n-grams from parallel Jacobi iterations (arXiv 2402.02057)."""
    window: Annotated[int, Field(ge=2, le=32)] = 4
    """W: positions generated in parallel."""
    ngram: Annotated[int, Field(ge=2, le=16)] = 3
    """N: length of the n-grams collected; at most N - 1 drafted tokens are accepted per step."""
    verification_set: Annotated[int, Field(ge=1, le=32)] = 4
    """G: n-grams verified per step. A step has (N - 2) + (W - 1 + G)(N - 1) drafted positions."""
    adaptive: bool = False
    """Verify of each draft the nodes that pay, by their measured acceptance against the measured cost of a
    step; none above the batch where drafting stops paying. Which they are then depends on timing, and with
    ``rejection`` so do sampled tokens. Only on embedded."""


class DraftModelSpeculation(_Mapping):
    """A smaller model with the same tokenizer drafts a chain (arXiv 2211.17192)."""

    kind: Literal["draft_model"]
    """A smaller model with the same tokenizer drafts a chain (arXiv 2211.17192)."""
    model: Model
    """The draft checkpoint."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=32)] = 4
    """Tokens drafted per step."""
    quantization: Quantization = NoQuantization(kind="none")
    """Format of the draft's weights, activations and KV cache."""
    max_concurrency: MaxConcurrency | None = None
    """Draft only while at most this many sequences decode; beyond its break-even batch a draft costs more
    than it brings. null: always."""
    adaptive: bool = False
    """Verify of each draft the nodes that pay, by their measured acceptance against the measured cost of a
    step; none above the batch where drafting stops paying. Which they are then depends on timing, and with
    ``rejection`` so do sampled tokens. Only on embedded."""


class MedusaSpeculation(_Mapping):
    """Extra heads on the target's last hidden state (arXiv 2401.10774)."""

    kind: Literal["medusa"]
    """Extra heads on the target's last hidden state (arXiv 2401.10774)."""
    heads: Folder
    """Trained heads: a folder (relative paths start at the recipe's folder) or a hub id."""
    choices: TreePaths | None = None
    """Tree paths (``[0]``, ``[0, 1]`` ...); null: the default tree for the number of heads."""
    quantization: HeadsFormat = "none"
    """Format of the heads' weights."""
    adaptive: bool = False
    """Verify of each draft the nodes that pay, by their measured acceptance against the measured cost of a
    step; none above the batch where drafting stops paying. Which they are then depends on timing, and with
    ``rejection`` so do sampled tokens. Only on embedded."""


class EagleSpeculation(_Mapping):
    """EAGLE-1 (static tree, arXiv 2401.15077) or EAGLE-2 (dynamic tree, arXiv 2406.16858)."""

    kind: Literal["eagle"]
    """EAGLE-1 (static tree, arXiv 2401.15077) or EAGLE-2 (dynamic tree, arXiv 2406.16858)."""
    heads: Folder
    """Trained draft head: a folder (relative paths start at the recipe's folder) or a hub id."""
    depth: Annotated[int, Field(ge=1, le=16)] = 5
    """Levels of the tree: draft steps per target step."""
    choices: TreePaths | None = None
    """Static tree; null: the dynamic tree given by ``top_k`` and ``num_draft_tokens``."""
    top_k: Annotated[int, Field(ge=1, le=32)] = 8
    """Children tried for each node of a dynamic tree."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=255)] = 31
    """Nodes kept for verification."""
    quantization: HeadsFormat = "none"
    """Format of the head's weights."""
    adaptive: bool = False
    """Verify of each draft the nodes that pay, by their measured acceptance against the measured cost of a
    step; none above the batch where drafting stops paying. Which they are then depends on timing, and with
    ``rejection`` so do sampled tokens. Only on embedded."""


class Eagle3Speculation(_Mapping):
    """EAGLE-3: a draft head on hidden states of three layers (arXiv 2503.01840)."""

    kind: Literal["eagle3"]
    """EAGLE-3: a draft head on hidden states of three layers (arXiv 2503.01840)."""
    heads: Folder
    """Trained draft head: a folder (relative paths start at the recipe's folder) or a hub id."""
    num_draft_tokens: Annotated[int, Field(ge=1, le=255)] = 4
    """Nodes verified per step."""
    top_k: Annotated[int, Field(ge=1, le=32)] = 1
    """1 drafts a chain; more, a tree (not on every backend)."""
    depth: Annotated[int, Field(ge=1, le=16)] | None = None
    """Depth of the tree; null: num_draft_tokens (a chain)."""
    quantization: HeadsFormat = "none"
    """Format of the head's weights."""
    max_concurrency: MaxConcurrency | None = None
    """Draft only while at most this many sequences decode; beyond its break-even batch a draft costs more
    than it brings. null: always."""
    adaptive: bool = False
    """Verify of each draft the nodes that pay, by their measured acceptance against the measured cost of a
    step; none above the batch where drafting stops paying. Which they are then depends on timing, and with
    ``rejection`` so do sampled tokens. Only on embedded."""


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
    """Draw the target's own token, keep the draft that equals it. Strict: the output law is the target's."""


class RejectionAcceptance(_Mapping):
    """Accept with probability min(1, p/q), else draw from the residual (arXiv 2211.17192). Strict."""

    kind: Literal["rejection"]
    """Accept with probability min(1, p/q), else draw from the residual (arXiv 2211.17192). Strict."""


class TypicalAcceptance(_Mapping):
    """Accept what the target finds plausible enough (Medusa, section 2.3.1). Approximate, not lossless."""

    kind: Literal["typical"]
    """Accept what the target finds plausible enough (Medusa, section 2.3.1). Approximate, not lossless."""
    epsilon: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Posterior threshold: the largest probability that acceptance may require."""
    delta: Annotated[float, Field(gt=0.0, le=1.0)] = 0.09
    """Factor of exp(-entropy): the uncertain target accepts more."""


Acceptance = Annotated[ExactAcceptance | RejectionAcceptance | TypicalAcceptance, Field(discriminator="kind")]


# --------------------------------------------------------------------------- the rest


class Limits(_Mapping):
    """Sizes the engine is built for."""

    max_batch_size: Annotated[int, Field(ge=1, le=8192)] = 16
    """Sequences in flight."""
    max_input_tokens: TokenCount = 1024
    """Longest prompt."""
    max_seq_tokens: TokenCount = 2048
    """Prompt and answer together."""
    max_num_tokens: TokenCount = 512
    """Rows of one forward: prefill chunks, decode and verified positions together."""
    kv_cache_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None
    """Memory for the KV cache; null: enough for max_batch_size full sequences on embedded, the engine's own
    fraction of free memory on a GPU."""


class Parallel(_Mapping):
    """Tensor and pipeline parallel GPUs."""

    tp: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel: GPUs that share each layer."""
    pp: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline parallel: groups of layers on different GPUs; excludes drafting."""


class Serving(_Mapping):
    """How ``trtspec serve`` listens."""

    model_name: Annotated[str, Field(pattern=MODEL_NAME_PATTERN)] = "tensorrt_llm"
    """Name under which the server offers the model."""
    host: Annotated[str, Field(pattern=HOST_PATTERN)] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the server to the network."""
    http_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port of the HTTP endpoint."""
    grpc_port: Annotated[int, Field(ge=1, le=65535)] = 8001
    """Port of the gRPC endpoint."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] = 8002
    """Port of the Prometheus metrics."""
    max_queue_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Requests waiting beyond the batch before new ones are refused."""
    default_max_tokens: TokenCount = 64
    """Used when a request does not say how many tokens it wants."""


class Load(_Mapping):
    """The load under which ``gates`` are about latency, goodput and throughput: a closed loop of
    ``concurrency`` requests or Poisson arrivals at ``rate_per_s``, one of the two."""

    concurrency: Annotated[int, Field(ge=1, le=8192)] | None = None
    """Requests in flight at any time; beyond ``limits.max_batch_size`` they wait."""
    rate_per_s: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Requests a second, arriving at random times of their own."""
    requests: Annotated[int, Field(ge=10, le=1_000_000)] | None = None
    """Requests measured; null: as many as a p99 needs."""
    input_tokens: TokenCount | None = None
    """Prompts are lengthened to about this by text before their question; null: as they are."""
    output_tokens: Annotated[int, Field(ge=2, le=2**24)] | None = None
    """Longest answer; null: 32."""


class ServiceLevel(_Mapping):
    """What one request may take under ``gates.load``; null: no bound."""

    ttft_ms: Milliseconds | None = None
    """Time to its first token, from when it was due."""
    tpot_ms: Milliseconds | None = None
    """Time per token after the first."""
    e2e_ms: Milliseconds | None = None
    """Time to its last token, from when it was due."""


class Gates(_Mapping):
    """What ``trtspec verify`` must show for exit code 0. null: measured and reported, not required."""

    lossless: bool = True
    """Speculation changes nothing against the same weights without it (strict acceptance only)."""
    max_perplexity_ratio: Annotated[float, Field(gt=1.0, le=1e6)] | None = 1.25
    """Upper end of the interval of perplexity over that of the 16-bit baseline. Typical acceptance: also of
    the text that it samples over that of strict sampling, both under the target (null: 1.25 there)."""
    min_acceptance_length: Annotated[float, Field(ge=1.0, le=256.0)] | None = None
    """Tokens per target step, bonus token included."""
    min_speedup: Annotated[float, Field(gt=0.0, le=1e3)] | None = None
    """Tokens/s over the same weights without speculation, one request at a time: lower end of the
    interval."""
    min_speedup_over_baseline: Annotated[float, Field(gt=0.0, le=1e3)] | None = None
    """Tokens/s over the 16-bit baseline without speculation, one request at a time: lower end of the
    interval."""
    max_mean_kl: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """Mean KL(16-bit baseline || target) of the next token's law, in nats: upper end of the interval."""
    max_p99_kl: Annotated[float, Field(gt=0.0, le=1e3)] | None = None
    """99th percentile of that divergence over tokens, in nats: upper end of the interval."""
    min_same_top_token: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of tokens whose most likely token is the 16-bit baseline's: lower end of the interval."""
    max_task_loss: Annotated[float, Field(gt=0.0, le=0.5)] | None = None
    """Largest loss of each task's score against the 16-bit baseline, as a share of 1: the interval of the
    difference must lie above it. Tasks are those of ``verify --tasks`` and ``--lm-eval``, or else those that
    ship with trtspec."""
    max_retrieval_loss: Annotated[float, Field(gt=0.0, le=0.5)] | None = None
    """The same for numbers hidden in long prompts: what a quantized KV cache still finds."""
    max_degenerate_rise: Annotated[float, Field(gt=0.0, le=0.5)] | None = None
    """The same for answers that are no text (empty, one token, a loop). null: only a rise beyond chance
    fails."""
    min_speedup_by_load: Annotated[float, Field(gt=0.0, le=1e3)] | None = None
    """The speedup for the worst kind of load of ``verify --load``: each length, task, language and batch,
    the lower end of each one's interval."""
    load: Load = Load()
    """The load of the gates below."""
    slo: ServiceLevel = ServiceLevel()
    """What one request may take there."""
    min_goodput: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of requests within ``slo``: lower end of the interval."""
    max_p99_ttft_ms: Milliseconds | None = None
    """99th percentile of the time to the first token: upper end of the interval."""
    max_p99_tpot_ms: Milliseconds | None = None
    """99th percentile of a request's time per token after the first: upper end of the interval."""
    min_tokens_per_s: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """Throughput, all answers together: lower end of the interval."""
    min_speedup_under_load: Annotated[float, Field(gt=0.0, le=1e3)] | None = None
    """Throughput over that of the same weights without speculation: lower end of the interval."""


class Recipe(_Mapping):
    """One model, one backend, one quantization, one way of drafting: what every verb reads."""

    version: Annotated[Literal[1], BeforeValidator(_whole_number)]
    """Version of this schema."""
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Names the folder engines/NAME."""
    description: Annotated[str, Field(max_length=4096)] = ""
    """For readers; changes nothing."""
    model: Model
    """The target checkpoint."""
    backend: Backend
    """What runs the model."""
    quantization: Quantization = NoQuantization(kind="none")
    """Format of the target's weights, activations and KV cache."""
    speculation: Speculation = NoSpeculation(kind="none")
    """How draft tokens are proposed."""
    acceptance: Acceptance = ExactAcceptance(kind="exact")
    """How drafted tokens are judged; without speculation it has no effect."""
    limits: Limits = Limits()
    """Sizes the engine is built for."""
    parallel: Parallel = Parallel()
    """Tensor and pipeline parallel GPUs."""
    serving: Serving = Serving()
    """How ``trtspec serve`` listens."""
    gates: Gates = Gates()
    """What ``trtspec verify`` must show for exit code 0; null: measured and reported, not required."""

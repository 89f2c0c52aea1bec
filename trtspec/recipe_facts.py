"""What each backend can run and how large a draft is: facts that the recipe rules and the builders share.

They hold for the TensorRT-LLM versions that a recipe can name: engines 0.17 to 1.2.1, the LLM API 1.0 to 1.4.
"""

from __future__ import annotations

import math
from typing import Literal

from trtspec.recipe import (
    Eagle3Speculation,
    EagleSpeculation,
    ExactAcceptance,
    Gates,
    Load,
    LookaheadSpeculation,
    MedusaSpeculation,
    NoQuantization,
    NoSpeculation,
    PytorchBackend,
    Quantization,
    Recipe,
    RejectionAcceptance,
    Speculation,
    TensorrtBackend,
    TypicalAcceptance,
)
from trtspec.versions import parse_range

SPECULATION_ON = {
    "tensorrt": ("none", "ngram", "draft_model", "medusa", "eagle", "lookahead"),
    "pytorch": ("none", "ngram", "draft_model", "eagle3"),
}
"""Methods that TensorRT-LLM has, by backend."""

EMBEDDED_SPECULATION = ("none", "ngram", "lookahead", "draft_model", "medusa", "eagle", "eagle3")
"""Methods that the embedded engine runs today; build refuses the others there."""
Fidelity = Literal["strict", "approximate"]
"""*strict*: whatever is drafted, the output law is the target's. *approximate*: it is not."""

ACCEPTANCE_ON = {
    "tensorrt": {
        "ngram": ("exact",),
        "draft_model": ("exact", "rejection"),
        "medusa": ("exact",),
        "eagle": ("exact", "typical"),
        "lookahead": ("exact",),
    },
    "pytorch": {
        "ngram": ("exact",),
        "draft_model": ("exact", "rejection"),
        "eagle3": ("exact", "rejection"),
    },
}
"""Acceptance kinds by backend and method."""

BACKEND_VERSIONS = {"tensorrt": parse_range(">=0.17,<=1.2.1"), "pytorch": parse_range(">=1.0,<1.5")}
REJECTION_VERSIONS = parse_range(">=1.3")
CONCURRENCY_VERSIONS = {
    "ngram": parse_range(">=1.1"),
    "draft_model": parse_range(">=1.1"),
    "eagle3": parse_range(">=1.3"),
}
"""LLM API versions that stop drafting above a batch size (``max_concurrency``): two-model drafting first, the
one-model path of EAGLE-3 with TensorRT-LLM pull request 10860."""
MEDUSA_DEFAULT_NODES = 63
"""Paths of the default Medusa tree of TensorRT-LLM (mc_sim_7b_63)."""


def is_quantized(quantization: Quantization) -> bool:
    """Whether what runs differs from the 16-bit source: weights or KV cache are quantized."""
    return not (isinstance(quantization, NoQuantization) and quantization.kv_cache == "none")


def is_for_gpu(recipe: Recipe) -> bool:
    """Whether TensorRT-LLM runs the recipe."""
    return isinstance(recipe.backend, TensorrtBackend | PytorchBackend)


def fidelity(recipe: Recipe) -> Fidelity:
    """What the recipe's way of accepting drafts does to sampled output: the label that every verb prints.

    Derived wherever it is shown and stored nowhere, so a recipe cannot be labelled otherwise than it runs.
    """
    if isinstance(recipe.speculation, NoSpeculation):
        return "strict"
    match recipe.acceptance:
        case ExactAcceptance() | RejectionAcceptance():
            return "strict"
        case TypicalAcceptance():
            return "approximate"


def describe_acceptance(recipe: Recipe) -> str:
    """``typical acceptance (approximate)``; ``no speculation`` where nothing is drafted."""
    if isinstance(recipe.speculation, NoSpeculation):
        return "no speculation"
    return f"{recipe.acceptance.kind} acceptance ({fidelity(recipe)})"


def drafted_positions(speculation: Speculation) -> int:
    """Drafted positions that one sequence verifies per target step, at most.

    Lookahead: (N - 2) + (W - 1 + G)(N - 1), TensorRT-LLM's own sizing. Dynamic trees: the smaller of
    num_draft_tokens and the nodes that ``depth`` levels of ``top_k`` children can have (EAGLE-2).
    """
    match speculation:
        case NoSpeculation():
            return 0
        case LookaheadSpeculation(window=w, ngram=n, verification_set=g):
            return (n - 2) + (w - 1 + g) * (n - 1)
        case MedusaSpeculation(choices=choices):
            return MEDUSA_DEFAULT_NODES if choices is None else len(choices)
        case EagleSpeculation(choices=None):
            return min(speculation.num_draft_tokens, tree_nodes(speculation.top_k, speculation.depth))
        case EagleSpeculation(choices=choices):
            return len(choices or ())
        case _:
            return speculation.num_draft_tokens


def longest_acceptance(speculation: Speculation) -> int | None:
    """Drafted tokens that one step can accept at most; None when it depends on the trained heads."""
    match speculation:
        case NoSpeculation():
            return 0
        case LookaheadSpeculation(ngram=n):
            return n - 1
        case MedusaSpeculation(choices=None):
            return None
        case MedusaSpeculation(choices=choices):
            return max((len(path) for path in choices or ()), default=0)
        case EagleSpeculation(choices=None):
            return min(speculation.depth, speculation.num_draft_tokens)
        case EagleSpeculation(choices=choices):
            return max((len(path) for path in choices or ()), default=0)
        case Eagle3Speculation(depth=depth, num_draft_tokens=nodes):
            return nodes if depth is None else min(depth, nodes)
        case _:
            return speculation.num_draft_tokens


def tree_nodes(top_k: int, depth: int) -> int:
    """Nodes of a dynamic tree: top_k at the first level, top_k squared at each later one (EAGLE-2)."""
    return top_k + top_k * top_k * (depth - 1)


def paged_context_off(recipe: Recipe) -> str | None:
    """Why a GPU backend runs this recipe without paged context attention, or None if it has it.

    Without it: no KV reuse, no chunked context, no drafting that verifies through the context kernel.
    """
    weights, kv = recipe.quantization.kind, recipe.quantization.kv_cache
    if isinstance(recipe.backend, TensorrtBackend):
        if not recipe.backend.paged_context_fmha:
            return "backend.paged_context_fmha is false"
        if kv == "int8":
            return "kv_cache int8 has no paged context kernel"
        if kv == "fp8" and weights not in ("fp8", "w4a8_awq", "nvfp4"):
            return f"kv_cache fp8 with {weights} weights has no paged context kernel"
    if isinstance(recipe.backend, PytorchBackend) and kv == "fp8" and weights == "w4a16_awq":
        return "kv_cache fp8 with w4a16_awq weights has no paged context kernel"
    return None


LOAD_GATES = (
    "min_goodput",
    "max_p99_ttft_ms",
    "max_p99_tpot_ms",
    "min_tokens_per_s",
    "min_speedup_under_load",
)
"""Keys of ``gates`` that are about ``gates.load``, beside ``slo``."""
P99_REQUESTS = 368
"""The least number of requests for which a p99 has an interval from order statistics (0.99^n <= 0.025)."""


def asks_of_load(gates: Gates) -> list[str]:
    """The keys given of ``gates`` that are about its load."""
    given = [f"slo.{key}" for key, value in gates.slo if value is not None]
    return given + [key for key in LOAD_GATES if getattr(gates, key) is not None]


def requests_for_p99(load: Load) -> int:
    """Requests of which enough fall into the steady state: a closed loop loses about three times its
    concurrency to filling and draining, an open one its first tenth (by time, so a few more)."""
    if load.rate_per_s is not None:
        return math.ceil(P99_REQUESTS * 1.15)
    return P99_REQUESTS + 3 * (load.concurrency or 1)

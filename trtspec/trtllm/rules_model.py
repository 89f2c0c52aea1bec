"""Rules that need a checkpoint: architecture, sizes and shards; see :mod:`trtspec.trtllm.rules`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from trtspec.recipe import (
    EagleSpeculation,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
)
from trtspec.recipe_facts import drafted_positions
from trtspec.recipe_model import differing_tokens, vocabulary
from trtspec.trtllm.case import Case, Told
from trtspec.trtllm.checkpoint import ENCODER_DECODERS

_SOURCE = ("model", "source")

LLM_API_ARCHITECTURES = (
    "DeciLMForCausalLM",
    "DeepseekV3ForCausalLM",
    "Exaone4ForCausalLM",
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "Llama4ForConditionalGeneration",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MllamaForConditionalGeneration",
    "NemotronForCausalLM",
    "NemotronNASForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Decoders in the table of supported models of 1.0.0; later versions have more."""


def encoder_decoder(case: Case) -> Told:
    """Their engines come in pairs and need a cross-attention share of the KV cache, which no recipe has."""
    c = case.checkpoint
    if c is not None and (c.encoder_decoder or c.architecture in ENCODER_DECODERS):
        yield _SOURCE, f"{c.architecture} is an encoder-decoder; recipes are for decoders; name another model"


def architecture(case: Case) -> Told:
    """The documentation lists the models that the LLM API loads."""
    c = case.checkpoint
    if case.engine or c is None or c.encoder_decoder or c.architecture in ENCODER_DECODERS:
        return
    if c.architecture not in LLM_API_ARCHITECTURES:
        yield (
            _SOURCE,
            f"{c.architecture} is not in the list of models of 1.0.0; look it up in the documentation of "
            f"{case.version} first",
        )


def foreign_checkpoint(case: Case) -> Told:
    """Weights packed by another tool are not what convert_checkpoint.py and the loaders expect."""
    for path, _, checkpoint in case.models():
        if checkpoint.quant_method not in (None, "modelopt"):
            yield (
                (*_model_of(path), "source"),
                f"quantized with {checkpoint.quant_method}; TensorRT-LLM loads ModelOpt's exports "
                "(hf_quant_config.json); name the 16-bit checkpoint",
            )


def _model_of(path: tuple[str, ...]) -> tuple[str, ...]:
    return ("speculation", "model") if path[0] == "speculation" else ("model",)


def medusa_architecture(case: Case) -> Told:
    """Medusa's converter knows the Llama layout (Vicuna) and a Qwen2 variant."""
    c = case.checkpoint
    if (
        case.engine
        and case.method == "medusa"
        and c is not None
        and c.architecture not in ("LlamaForCausalLM", "Qwen2ForCausalLM")
    ):
        yield (
            ("speculation", "kind"),
            f"medusa on {c.architecture}; its converter knows Llama and Qwen2 layouts; choose lookahead",
        )


def medusa_qwen(case: Case) -> Told:
    """A small Qwen2 with Medusa heads was reported to fail or to write garbage."""
    c = case.checkpoint
    if case.engine and case.method == "medusa" and c is not None and c.architecture == "Qwen2ForCausalLM":
        yield (
            ("speculation", "kind"),
            "medusa on Qwen2 was reported to write garbage; compare its answers with the target's alone",
        )


def eagle_architecture(case: Case) -> Told:
    """The engine's EAGLE model is a Llama with a drafter; no other target has one."""
    c = case.checkpoint
    if case.engine and case.method == "eagle" and c is not None and c.architecture != "LlamaForCausalLM":
        yield (
            ("speculation", "kind"),
            f"eagle on {c.architecture}; EAGLE engines exist for Llama targets only; choose lookahead, or "
            "backend kind: pytorch with eagle3",
        )


def eagle3_architecture(case: Case) -> Told:
    """Reported: Llama 4 with hardly any acceptance, Mistral in the two-model form only, Gemma 3 without."""
    c = case.checkpoint
    told = {
        "Llama4ForConditionalGeneration": "was reported with an acceptance length of about 1.01",
        "MistralForCausalLM": "was reported to work in the two-model form only",
        "Gemma3ForCausalLM": "was asked for and not seen supported",
    }
    if case.method == "eagle3" and c is not None and c.architecture in told:
        yield ("speculation", "kind"), f"eagle3 on {c.architecture} {told[c.architecture]}; try it first"


def engine_quantized_architecture(case: Case) -> Told:
    """The engine flow quantizes the models of its own list; its maintainers send others to the LLM API."""
    c, kind = case.checkpoint, case.recipe.quantization.kind
    if not case.engine or c is None or kind == "none":
        return
    bad = (
        (c.architecture == "MixtralForCausalLM" and kind in ("w4a16_awq", "w4a8_awq", "w8a8_sq"))
        or c.architecture == "Qwen3MoeForCausalLM"
        or c.architecture.startswith("Gemma3")
    )
    if bad:
        yield (
            ("quantization", "kind"),
            f"{kind} engines of {c.architecture} cannot be made; choose backend kind: pytorch",
        )


def qwen_fp8_kv(case: Case) -> Told:
    """Qwen's keys have a few very large channels, which FP8 with one scale a layer cuts off."""
    c, q = case.checkpoint, case.recipe.quantization
    if (
        c is not None
        and c.architecture.startswith("Qwen")
        and q.kv_cache == "fp8"
        and case.recipe.gates.max_perplexity_ratio is None
    ):
        yield (
            ("gates", "max_perplexity_ratio"),
            f"null with {c.architecture} and kv_cache fp8, whose large keys are known to suffer; give a "
            "ratio, or kv_cache none",
        )


# --------------------------------------------------------------------------- shards


def heads_shard(case: Case) -> Told:
    """Each GPU of a tensor parallel group holds whole attention heads."""
    tp = case.recipe.parallel.tp
    for path, _, c in case.models():
        heads, kv = c.num_heads, c.num_kv_heads
        owner = "the draft's " if path[0] == "speculation" else ""
        if heads and heads % tp:
            yield ("parallel", "tp"), f"found {tp}, which does not divide {owner}{heads} attention heads"
        elif kv and kv % tp and tp % kv:
            yield ("parallel", "tp"), f"found {tp}; {owner}{kv} KV heads can be neither split nor repeated so"


def layers_shard(case: Case) -> Told:
    """Each pipeline stage needs a layer at least."""
    c, pp = case.checkpoint, case.recipe.parallel.pp
    if c is not None and c.num_layers and pp > c.num_layers:
        yield ("parallel", "pp"), f"found {pp}, and the model has {c.num_layers} layers; lower it"


def group_shard(case: Case) -> Told:
    """A scale covers a group of inputs, and a tensor parallel shard cannot cut through one."""
    tp = case.recipe.parallel.tp
    for path, q, c in case.models():
        if not isinstance(q, W4A16AwqQuantization | W4A8AwqQuantization):
            continue
        attention = c.num_heads * c.head_dim if c.num_heads and c.head_dim else None
        inputs = (
            ("q_proj", c.hidden_size, 1),
            ("down_proj", c.intermediate_size, tp),
            ("o_proj", attention, tp),
        )
        for name, columns, parts in inputs:
            if columns and columns % (parts * q.group_size):
                shard = f", {columns / parts:g} on each of {parts} GPUs" if parts > 1 else ""
                yield (
                    (*path, "group_size"),
                    f"found {q.group_size}; {name} has {columns} inputs{shard}, which are not whole groups; "
                    f"{'lower tp, or ' if parts > 1 else ''}use fp8",
                )
                break


# --------------------------------------------------------------------------- draft and target, positions


def _differing_widths(case: Case) -> tuple[int, int] | None:
    """Ids that target and draft put out, where both are known and differ."""
    a, b = case.checkpoint, case.draft
    if a is None or b is None or not a.vocab_size or not b.vocab_size or a.vocab_size == b.vocab_size:
        return None
    return a.vocab_size, b.vocab_size


def draft_vocabulary(case: Case) -> Told:
    """Engines share token ids; where the outputs differ in width only the common ids can be drafted."""
    widths = _differing_widths(case)
    if widths and case.recipe.acceptance.kind == "exact":
        target, draft = widths
        yield (
            ("speculation", "model", "source"),
            f"its output has {draft} ids, the target's {target}; make sure that only the padding differs",
        )


def draft_logits(case: Case) -> Told:
    """Acceptance by probability divides the target's by the draft's, id by id."""
    widths = _differing_widths(case)
    if widths and case.recipe.acceptance.kind == "rejection":
        target, draft = widths
        yield (
            ("acceptance", "kind"),
            f"rejection compares logits, and the draft has {draft} ids, the target "
            f"{target}; write exact, or choose another draft",
        )


def _tokens(folder: Path) -> dict[str, int] | None:
    """The vocabulary in ``folder``, read once for all versions of a ``lint``: megabytes of JSON."""
    file = folder / "tokenizer.json"
    return _read_tokens(folder, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=2)
def _read_tokens(folder: Path, changed: int) -> dict[str, int] | None:
    return vocabulary(folder)


def draft_tokens(case: Case) -> Told:
    """Token ids must mean the same to draft and target; so the tokens of both tokenizers are compared."""
    folders = [c.folder for c in (case.checkpoint, case.draft) if c is not None and c.folder is not None]
    vocabularies = [tokens for folder in folders if (tokens := _tokens(folder)) is not None]
    if len(vocabularies) == 2:
        differing = differing_tokens(*vocabularies)
        if differing:
            yield (
                ("speculation", "model", "source"),
                f"{len(differing)} of its tokens differ from the target's, first {differing[0]!r}; choose a "
                "smaller model of the target's family",
            )


def positions(case: Case) -> Told:
    """Rotary positions beyond those of config.json were never trained."""
    c, longest = case.checkpoint, case.recipe.limits.max_seq_tokens
    if c is not None and c.max_positions and longest > c.max_positions:
        yield (
            ("limits", "max_seq_tokens"),
            f"found {longest}; the model has {c.max_positions} positions; lower it to those or less",
        )


def draft_positions(case: Case) -> Told:
    """Beyond its own positions a draft model proposes what nobody trained."""
    c, longest = case.draft, case.recipe.limits.max_seq_tokens
    if c is not None and c.max_positions and longest > c.max_positions:
        yield (
            ("limits", "max_seq_tokens"),
            f"found {longest}; the draft model has {c.max_positions} positions: nothing useful is drafted "
            "beyond them",
        )


def grown_positions(case: Case) -> Told:
    """trtllm-build adds the drafted positions to the sequence, past what the model was trained for."""
    s, c, limits = case.recipe.speculation, case.checkpoint, case.recipe.limits
    if not case.engine or s.kind == "none" or c is None or not c.max_positions:
        return
    grown = limits.max_seq_tokens + drafted_positions(s) + (s.depth if isinstance(s, EagleSpeculation) else 0)
    if limits.max_seq_tokens <= c.max_positions < grown:
        yield (
            ("limits", "max_seq_tokens"),
            f"found {limits.max_seq_tokens}; the engine is built for {grown} with drafts and the model has "
            f"{c.max_positions} positions; lower it to {limits.max_seq_tokens - (grown - c.max_positions)}",
        )

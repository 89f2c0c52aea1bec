"""A recipe moved to another backend: what each of its keys becomes there, and why.

:func:`migrate` turns a valid recipe into one that lints without errors on the other backend, and accounts for
every key of the source exactly once: kept, renamed, replaced or lost. The account cannot disagree with the
result: :mod:`trtspec.trtllm.account` derives it by comparing the two, and a difference that no step below
gave a reason for is a bug.

What exists where is of :mod:`trtspec.recipe_facts` and :mod:`trtspec.trtllm.rules`: engines have no EAGLE-3,
the LLM API has neither Medusa nor lookahead nor EAGLE-1/2, the embedded engine has all of them. Where trained
heads do not carry over and no others are named or known, prompt lookup takes their place: it needs no
training.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from trtspec.errors import InputError, Problem
from trtspec.model_source import find_model
from trtspec.modelspec import read_modelspec
from trtspec.recipe import Recipe
from trtspec.recipe_facts import (
    ACCEPTANCE_ON,
    BACKEND_VERSIONS,
    CONCURRENCY_VERSIONS,
    EMBEDDED_SPECULATION,
    REJECTION_VERSIONS,
    SPECULATION_ON,
    drafted_positions,
    paged_context_off,
)
from trtspec.recipe_file import json_schema, lint_content, plain_recipe, resolve, variants
from trtspec.recipe_yaml import dotted, dump_plain
from trtspec.trtllm.account import Migration, Work, account
from trtspec.trtllm.facts import versions_for
from trtspec.trtllm.lint import models_of
from trtspec.trtllm.rules import Finding, check
from trtspec.versions import VersionRange, parse_range, range_text

Target = Literal["embedded", "pytorch", "tensorrt"]
TARGETS: tuple[Target, ...] = ("embedded", "pytorch", "tensorrt")

KNOWN_HEADS = {
    ("eagle3", "meta-llama/Llama-3.1-8B-Instruct"): "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ("eagle3", "meta-llama/Llama-3.3-70B-Instruct"): "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    ("eagle3", "lmsys/vicuna-13b-v1.3"): "yuhuili/EAGLE3-Vicuna1.3-13B",
    ("eagle", "lmsys/vicuna-7b-v1.3"): "yuhuili/EAGLE-Vicuna-7B-v1.3",
    ("eagle", "lmsys/vicuna-13b-v1.3"): "yuhuili/EAGLE-Vicuna-13B-v1.3",
}
"""(method, target's hub id) -> hub id of heads that EAGLE's authors list for that very target."""

_EAGLE_MAX_BATCH = 512
_NAME_LENGTH = 63


def migrate(
    recipe: Recipe, to: Target, *, heads: str | None = None, name: str | None = None, base: Path = Path(".")
) -> Migration:
    """``recipe`` for the backend ``to``.

    ``heads``: trained heads to use there (a folder or hub id). ``name``: of the result, so that the two
    engines do not share a folder; None: the source's with the backend at its end. ``base``: the folder where
    the recipe's relative paths start; what is known of the models there is looked at. Raises InputError when
    the recipe is for ``to`` already, when the heads go with no method there, and for a recipe that has no
    legal form on ``to``.
    """
    if recipe.backend.kind == to:
        raise InputError(Problem(f"found {to}: the recipe is for that backend already", key="backend.kind"))
    work = Work(copy.deepcopy(plain_recipe(recipe)))
    work.set(
        "name",
        _renamed(recipe.name, to) if name is None else name,
        "engines/NAME belongs to the source's engine",
    )
    _backend(work, recipe, to, base)
    _parallel(work, to)
    _quantization(work, to)
    _speculation(work, recipe, to, heads)
    _heads_format(work, to)
    _kv_for_drafting(work)
    _acceptance_and_version(work, recipe, to)
    _limits(work)
    result = _checked(work, to)
    if to != "embedded":
        result = _on_some_version(work, result, to, base)
    return account(recipe, result, work)


def _trial(work: Work) -> Recipe | None:
    """The recipe so far; None with a name or heads that no recipe can have, as the check at the end says."""
    try:
        return Recipe.model_validate(work.data)
    except ValidationError:
        return None


def _checked(work: Work, to: Target) -> Recipe:
    checked = lint_content(dump_plain(work.data), f"recipe for {to}")
    if checked.recipe is None:
        raise InputError(
            [Problem(f"no legal form on {to}: {found.message}", key=found.key) for found in checked.errors]
        )
    return checked.recipe


def _keys(section: str, kind: str) -> set[str]:
    """The keys of one kind of a section tagged by ``kind``."""
    return set(variants(resolve(json_schema()["properties"][section]))[kind]["properties"])


# --------------------------------------------------------------------------- backend, parallel


def _renamed(name: str, to: Target) -> str:
    stem = re.sub(rf"-({'|'.join(TARGETS)})$", "", name)
    return f"{stem[: _NAME_LENGTH - len(to) - 1]}-{to}"


_LOST_KEYS = {
    "version": "the embedded engine is trtspec's own; no TensorRT-LLM is involved",
    "device": "a TensorRT-LLM backend runs on NVIDIA GPUs",
    "page_tokens": "TensorRT-LLM chooses the tokens of a block itself (tokens_per_block)",
    "prefix_cache": "KV reuse there is the server's, on by default where paged context attention is",
    "threads": "a setting of torch on CPUs",
    "batch_invariant": "TensorRT-LLM has no such mode: greedy answers at 16 bit may differ with the batch",
    "dequantized_copy": "TensorRT-LLM's 4-bit kernels serve every number of rows",
    "paged_context_fmha": "a choice of the engine builder; elsewhere the runtime picks its kernels",
    "multiple_profiles": "TensorRT optimization profiles exist in engines only",
    "cuda_graphs": "the LLM API's; engines have a runtime option instead, the embedded engine none",
    "overlap_scheduler": "the LLM API's scheduler; engines and the embedded engine have their own",
    "attention": "kernels of the LLM API; engines use gpt_attention_plugin, the embedded engine torch",
}


def _backend(work: Work, recipe: Recipe, to: Target, base: Path) -> None:
    old = work.data["backend"]
    new: dict[str, Any] = {"kind": to}
    work.why["backend.kind"] = "asked for"
    dtype = old["dtype"]
    allowed = {
        "embedded": ("bfloat16", "float16", "float32", "float64"),
        "pytorch": ("auto", "bfloat16", "float16"),
        "tensorrt": ("bfloat16", "float16"),
    }[to]
    if dtype in allowed:
        new["dtype"] = dtype
    elif dtype == "auto":
        stored = _checkpoint_dtype(recipe, base)
        new["dtype"] = stored if stored in allowed else "bfloat16"
        where = f"the checkpoint's dtype is {stored}" if stored else "the checkpoint is not here"
        work.why["backend.dtype"] = f"{to} wants a dtype by name, and {where}"
    else:
        new["dtype"] = "bfloat16"
        work.why["backend.dtype"] = f"TensorRT-LLM computes in 16 bit; {dtype} is for the embedded engine"
    if to != "embedded":
        # The range is chosen last, when it is known what needs a newer version.
        new["version"] = old.get("version", str(BACKEND_VERSIONS[to]))
    for key in old:
        if key not in new:
            work.why[f"backend.{key}"] = _LOST_KEYS[key]
    work.data["backend"] = new


def _checkpoint_dtype(recipe: Recipe, base: Path) -> str | None:
    folder = find_model(recipe.model.source, base, recipe.model.revision)
    if folder is None:
        return None
    try:
        return read_modelspec(folder).dtype
    except InputError:
        return None


def _parallel(work: Work, to: Target) -> None:
    if to == "embedded":
        for key in ("tp", "pp"):
            work.drop(f"parallel.{key}", 1, "the embedded engine runs on one device")


# --------------------------------------------------------------------------- quantization


def _quantizations(work: Work) -> list[str]:
    drafts = work.data["speculation"]["kind"] == "draft_model"
    return ["quantization", "speculation.quantization"] if drafts else ["quantization"]


def _quantization(work: Work, to: Target) -> None:
    for section in _quantizations(work):
        kind = work.get(section)["kind"]
        if to == "pytorch" and kind == "w8a8_sq":
            _exchange_weights(work, section, "fp8", "SmoothQuant's INT8 kernels exist in engines only")
        elif to == "embedded" and kind == "nvfp4":
            why = "calibrating NVFP4 needs a CUDA GPU, and the embedded engine's device is cpu"
            _exchange_weights(work, section, "fp8", why)
        formats = {"pytorch": ("none", "fp8", "nvfp4")}.get(to, ("none", "fp8", "int8"))
        kv = work.get(section)["kv_cache"]
        if kv not in formats:
            why = f"{to} has no {kv} KV cache; fp8 is the nearest"
            work.set(f"{section}.kv_cache", "fp8", why + " and as large" * (kv == "int8"))
        if to != "embedded":
            _kernels(work, section, to)


def _kernels(work: Work, section: str, to: Target) -> None:
    """What TensorRT-LLM's kernels and quantize.py take."""
    now = work.get(section)
    kind = now["kind"]
    sizes = {"w4a16_awq": (64, 128), "w4a8_awq": (128,)}.get(kind)
    if sizes is not None and now["group_size"] not in sizes:
        why = f"TensorRT-LLM has {kind} kernels for groups of {' and '.join(map(str, sizes))}"
        work.set(f"{section}.group_size", 128, why)
    if to != "tensorrt":
        return
    if now.get("exclude"):
        work.drop(
            f"{section}.exclude", [], "engines are quantized by quantize.py, which has no option for it"
        )
    if now.get("lm_head") and kind != "fp8":
        why = f"quantize.py leaves the output projection in 16 bit with {kind}"
        work.drop(f"{section}.lm_head", False, why)
    if "alpha" in now:
        work.set(f"{section}.alpha", 1.0, "quantize.py has no option for it and uses 1.0")


def _exchange_weights(work: Work, section: str, kind: str, why: str) -> None:
    old = work.get(section)
    kept = {key: value for key, value in old.items() if key in _keys("quantization", kind)}
    work.exchange(section, {**kept, "kind": kind}, why, f"{kind} has no such setting")


def _kv_for_drafting(work: Work) -> None:
    """Methods that verify through paged context attention need a KV format that has it."""
    trial = _trial(work)
    if trial is None:
        return
    to, method = trial.backend.kind, trial.speculation.kind
    # Medusa and lookahead engines bring a kernel of their own; the LLM API has one for all methods.
    paged = method not in ("none", "medusa", "lookahead") if to == "tensorrt" else method != "none"
    reason = paged_context_off(trial)
    if reason is None or not paged:
        return
    computes_fp8 = trial.quantization.kind in ("fp8", "w4a8_awq", "nvfp4")
    why = f"{method} verifies through paged context attention, and {reason}"
    if not computes_fp8:
        why += "; at 16 bit it is twice as large"
    work.set("quantization.kv_cache", "fp8" if computes_fp8 else "none", why)


# --------------------------------------------------------------------------- speculation


def _speculation(work: Work, recipe: Recipe, to: Target, heads: str | None) -> None:
    old = work.data["speculation"]
    kind = old["kind"]
    allowed = EMBEDDED_SPECULATION if to == "embedded" else SPECULATION_ON[to]
    quantized = work.data["quantization"]["kind"] != "none"
    if kind not in allowed:
        place = "engines have" if to == "tensorrt" else "the LLM API has"
        _other_method(work, recipe, to, heads, f"{place} no {kind}")
    elif heads is not None:
        if "heads" not in old:
            raise InputError(Problem(f"found {heads!r}, and {kind} has no heads; leave it out", key="heads"))
        work.set("speculation.heads", heads, "named on the command line")
    elif to == "tensorrt" and kind == "eagle" and quantized:
        _other_method(work, recipe, to, None, "EAGLE engines are made for 16-bit targets only")
    if to == "tensorrt" and work.data["speculation"]["kind"] == "eagle" and quantized:
        why = "EAGLE engines are made for 16-bit targets only, and heads for one were named"
        _exchange_weights(work, "quantization", "none", why)
    if to != "embedded":
        for key, default, why in (
            ("branches", 1, f"{to} drafts one chain"),
            ("corpus", None, f"{to} looks up the sequence's own text only"),
            ("corpus_min_count", 1, "it shapes the corpus, and there is none"),
            ("adaptive", False, f"{to} drafts a fixed length"),
        ):
            if key in work.data["speculation"]:
                work.drop(f"speculation.{key}", default, why)


def _other_method(work: Work, recipe: Recipe, to: Target, heads: str | None, gone: str) -> None:
    """The nearest trained method if there are heads for it, else prompt lookup."""
    old = work.data["speculation"]
    kind = old["kind"]
    trained: Literal["eagle", "eagle3"] = "eagle" if to == "tensorrt" else "eagle3"
    origin = "with the heads that were named"
    if heads is None and kind != "lookahead" and (to == "pytorch" or recipe.quantization.kind == "none"):
        heads, origin = (
            KNOWN_HEADS.get((trained, recipe.model.source)),
            "with heads published for this target",
        )
    if heads is None:
        choice = "ngram drafts without training"
        if kind != "lookahead":
            choice += f"; name heads for {trained} to keep trained drafting"
        new: dict[str, Any] = {"kind": "ngram"}
    else:
        choice = f"{trained} is the nearest, {origin}"
        new = {"kind": trained, "heads": heads}
    method = new["kind"]
    keys = _keys("speculation", method)
    # These mean the same for every method that has them.
    new |= {
        key: old[key] for key in ("quantization", "max_concurrency", "adaptive") if key in old and key in keys
    }
    if "heads" in old:
        work.why["speculation.heads"] = f"heads of {kind} fit no other method; {choice}"
    length = {"eagle": "depth", "eagle3": "num_draft_tokens"}.get(kind)
    if length is not None:
        goal, limit = {"eagle": ("depth", 16), "eagle3": ("num_draft_tokens", 255)}.get(
            method, ("num_draft_tokens", 32)
        )
        new[goal] = min(old[length], limit)
        work.why[f"speculation.{length}"] = "tokens drafted in a row" + f", at most {limit}" * (
            old[length] > limit
        )
        if length != goal:
            work.renamed[f"speculation.{length}"] = f"speculation.{goal}"
            work.why.setdefault(
                f"speculation.{goal}", "a chain is drafted, so no nodes are chosen from a tree"
            )
    work.exchange("speculation", new, f"{gone}; {choice}", f"{method} has no such setting")


def _heads_format(work: Work, to: Target) -> None:
    speculation = work.data["speculation"]
    if to == "embedded" or speculation.get("quantization") != "fp8":
        return
    method = speculation["kind"]
    if method in ("eagle", "eagle3"):
        work.drop("speculation.quantization", "none", f"nothing in TensorRT-LLM quantizes {method} heads")
    elif work.data["quantization"]["kind"] != "fp8":
        work.drop("speculation.quantization", "none", "quantize.py has FP8 heads with an FP8 target only")


# --------------------------------------------------------------------------- acceptance, versions, limits


def _acceptance_and_version(work: Work, recipe: Recipe, to: Target) -> None:
    method, acceptance = work.data["speculation"]["kind"], work.data["acceptance"]["kind"]
    if to == "embedded":
        return
    allowed = ACCEPTANCE_ON[to].get(method)
    if allowed is not None and acceptance not in allowed:
        _exact(work, f"{method} on {to} accepts by {' or '.join(allowed)}")
    needs: dict[str, VersionRange] = {}
    if to == "pytorch" and work.data["acceptance"]["kind"] == "rejection" and method != "none":
        needs["rejection"] = REJECTION_VERSIONS
    concurrency = work.data["speculation"].get("max_concurrency")
    if to == "tensorrt" and concurrency is not None:
        why = "engines draft at every batch size; lower limits.max_batch_size where that does not pay"
        work.drop("speculation.max_concurrency", None, why)
    elif concurrency is not None:
        needs["max_concurrency"] = CONCURRENCY_VERSIONS[method]
    asked, why = _versions(recipe, to)
    for what, needed in needs.items():
        narrowed = parse_range(f"{asked},{needed}")
        if versions_for(to, narrowed):
            asked = narrowed
            why += f"; {what} needs {needed}"
        elif what == "rejection":
            _exact(work, f"rejection needs TensorRT-LLM {needed}, and the recipe is for {asked}")
        else:
            lost = (
                f"{method} stops by batch size in TensorRT-LLM {needed} only, and the recipe is for {asked}"
            )
            work.drop("speculation.max_concurrency", None, lost)
    # Comparisons joined by commas would grow with every migration.
    work.set("backend.version", range_text(asked), why)
    work.why.setdefault("backend.version", why)


def _exact(work: Work, why: str) -> None:
    work.exchange("acceptance", {"kind": "exact"}, why, "exact acceptance has no thresholds")


def _versions(recipe: Recipe, to: Target) -> tuple[VersionRange, str]:
    """The versions to ask for and why: the source's own choice where it made one that has the backend."""
    whole = BACKEND_VERSIONS[to]
    own = getattr(recipe.backend, "version", None)
    if own is None or BACKEND_VERSIONS[recipe.backend.kind].within(parse_range(own)):
        return whole, f"the versions with the {to} backend"
    both = parse_range(f"{own},{whole}")
    if not versions_for(to, both):
        return whole, f"no known version of {own} has the {to} backend; these have it"
    return both, f"those of {own} that have the {to} backend"


def _limits(work: Work) -> None:
    limits, trial = work.data["limits"], _trial(work)
    if trial is None:
        return
    if trial.backend.kind == "tensorrt" and trial.speculation.kind == "eagle":
        most = min(limits["max_batch_size"], _EAGLE_MAX_BATCH)
        work.set("limits.max_batch_size", most, f"EAGLE engines allow at most {_EAGLE_MAX_BATCH}")
    rows = drafted_positions(trial.speculation) + 1
    if limits["max_num_tokens"] < rows:
        why = f"{trial.speculation.kind} verifies {rows} rows of a sequence in one forward"
        work.set("limits.max_num_tokens", rows, why)
    reason = paged_context_off(trial)
    if reason and limits["max_input_tokens"] > limits["max_num_tokens"]:
        why = f"{reason}, so a prompt cannot be computed in pieces"
        work.set("limits.max_num_tokens", limits["max_input_tokens"], why)


# --------------------------------------------------------------------------- by version


def _on_some_version(work: Work, result: Recipe, to: Target, base: Path) -> Recipe:
    """``result``, its versions narrowed to those whose rules have no error for it."""
    errors = _errors(result, to, base)
    if not all(errors.values()):
        return _narrowed(work, result, to, errors)
    rules = {finding.rule for found in errors.values() for finding in found}
    if rules == {"trtllm-paged-refused"}:
        why = "these versions of trtllm-build refuse it with this KV cache"
        work.set("backend.paged_context_fmha", False, why)
    elif rules == {"trtllm-kv-bytes"}:
        why = "these versions of the LLM API take tokens, not bytes"
        work.drop("limits.kv_cache_bytes", None, why)
    else:
        told = {finding.path: finding.message for finding in next(iter(errors.values()))}
        raise InputError(
            [Problem(f"no legal form on {to}: {message}", key=dotted(path)) for path, message in told.items()]
        )
    result = _checked(work, to)
    return _narrowed(work, result, to, _errors(result, to, base))


def _errors(recipe: Recipe, to: Target, base: Path) -> Mapping[str, list[Finding]]:
    """Known version in the recipe's range -> what is an error there."""
    target, draft = models_of(recipe, base)
    asked = parse_range(recipe.backend.version)  # type: ignore[union-attr]
    return {
        version: [f for f in check(recipe, version, checkpoint=target, draft=draft) if f.severity == "error"]
        for version in versions_for(to, asked)
    }


def _narrowed(work: Work, result: Recipe, to: Target, errors: Mapping[str, list[Finding]]) -> Recipe:
    good = [version for version, found in errors.items() if not found]
    bad = {version: found[0] for version, found in errors.items() if found}
    if not bad:
        return result
    if not good:
        raise InputError(
            [Problem(f"no legal form on {to}: {f.message}", key=dotted(f.path)) for f in bad.values()]
        )
    versions = list(errors)
    parts = [work.data["backend"]["version"]]
    if versions[0] in bad:
        parts.append(f">={good[0]}")
    if versions[-1] in bad:
        parts.append(f"<={good[-1]}")
    between = versions[versions.index(good[0]) : versions.index(good[-1])]
    parts += [f"!={version}" for version in between if version in bad]
    reasons = "; ".join(f"{version}: {found.message}" for version, found in bad.items())
    work.set("backend.version", range_text(parse_range(",".join(parts))), reasons)
    return _checked(work, to)

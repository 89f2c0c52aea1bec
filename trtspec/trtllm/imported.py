"""What one import knows of its file: each key, what became of it, and the recipe so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtspec.errors import InputError, Problem
from trtspec.recipe import Recipe
from trtspec.recipe_file import lint_content
from trtspec.recipe_yaml import dump_plain, visible

Outcome = Literal["used", "no counterpart", "unknown"]

WEIGHTS = {
    "NO_QUANT": "none",
    "FP8": "fp8",
    "W4A16_AWQ": "w4a16_awq",
    "W4A8_AWQ": "w4a8_awq",
    "W8A8_SQ_PER_CHANNEL": "w8a8_sq",
    "NVFP4": "nvfp4",
}
"""TensorRT-LLM's QuantAlgo -> a recipe's quantization."""
KV_CACHES = {"FP8": "fp8", "INT8": "int8", "NVFP4": "nvfp4"}
PLUGIN_KEYS = frozenset(
    {
        "dtype", "explicitly_disable_gemm_plugin", "qserve_gemm_plugin", "identity_plugin", "paged_kv_cache",
        "weight_only_groupwise_quant_matmul_plugin", "weight_only_quant_matmul_plugin", "manage_weights",
        "smooth_quant_plugins", "smooth_quant_gemm_plugin", "layernorm_quantization_plugin",
        "rmsnorm_quantization_plugin", "quantize_per_token_plugin", "quantize_tensor_plugin",
        "fuse_fp4_quant", "norm_quant_fusion",
    }
)  # fmt: skip
"""Keys of ``plugin_config`` that are no flags of trtllm-build (source of 0.17, engines of 0.17 and 1.0)."""


@dataclass(frozen=True)
class Use:
    """What became of one key of the file; ``to``: the recipe's key, if it has one."""

    key: str
    found: Any
    outcome: Outcome
    to: str | None
    why: str


@dataclass
class Flags:
    model: str | None
    heads: str | None
    draft_model: str | None


class ImportWork:
    """One file under import: its keys, what became of them, and the recipe so far."""

    def __init__(self, file: str, flags: Flags) -> None:
        self.file, self.flags = file, flags
        self.values: dict[str, Any] = {}
        self.uses: dict[str, Use] = {}
        self.data: dict[str, Any] = {"version": 1}
        self.problems: list[Problem] = []
        self.assumed: list[tuple[str, Any, str]] = []

    def flatten(self, data: Mapping[str, Any], sections: tuple[str, ...], prefix: str = "") -> None:
        """Take the keys of ``data`` as ``values``; those of ``sections`` one by one, others whole."""
        for key, value in data.items():
            # A dot inside a key must not pass for a section's.
            path = f"{prefix}{key}" if "." not in key else f"{prefix}{json.dumps(key)}"
            if path in sections and isinstance(value, dict):
                self.flatten(value, sections, f"{path}.")
            elif path in sections and value is not None:
                self.bad(path, f"found {shown(value)}; a mapping is needed")
                self.values[path] = value
            else:
                self.values[path] = value

    def bad(self, key: str, message: str) -> None:
        self.problems.append(Problem(message, self.file, key=visible(key)))

    def set(self, to: str, value: Any) -> None:
        place = self.data
        *sections, last = to.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value

    def has(self, to: str) -> bool:
        place: Any = self.data
        for part in to.split("."):
            if not isinstance(place, dict) or part not in place:
                return False
            place = place[part]
        return True

    def use(self, key: str, to: str, value: Any, why: str = "") -> None:
        self.set(to, value)
        self.uses[key] = Use(key, _plain(self.values[key]), "used", to, why)

    def leave(self, key: str, why: str = "") -> None:
        if key in self.values:
            self.uses[key] = Use(key, _plain(self.values[key]), "no counterpart", None, why)

    def assume(self, to: str, value: Any, why: str) -> None:
        self.set(to, value)
        self.assumed.append((to, value, why))

    def integer(self, key: str) -> int | None:
        """The whole number at ``key``; None, noting a problem unless it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not int:
            self.bad(key, f"found {shown(value)}; a whole number is needed")
            return None
        return value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            self.bad(key, f"found {shown(value)}; text is needed")
            return None
        return value

    def take(self, key: str, to: str, kind: type, why: str = "") -> bool:
        """Use ``key`` for the recipe's ``to`` where it is given and of ``kind``."""
        value = self.values.get(key)
        if value is None:
            return False
        if type(value) is not kind:
            words = {int: "a whole number", str: "text", bool: "true or false"}[kind]
            self.bad(key, f"found {shown(value)}; {words} is needed")
            return False
        self.use(key, to, value, why)
        return True

    def rest(self, known: Callable[[str], str]) -> None:
        """Account for the keys that nothing used; ``known`` says what is wrong with one, empty if nothing."""
        for key, value in self.values.items():
            if key not in self.uses:
                wrong = known(key)
                outcome: Outcome = "unknown" if wrong else "no counterpart"
                self.uses[key] = Use(key, _plain(value), outcome, None, wrong)
        self.uses = {key: self.uses[key] for key in self.values}

    def recipe(self) -> Recipe:
        """The recipe, or InputError with every problem of the file and of the recipe made from it."""
        unused = {
            "--model": self.flags.model and not self.has("model.source"),
            "--heads": self.flags.heads and not self.has("speculation.heads"),
            "--draft-model": self.flags.draft_model and not self.has("speculation.model"),
        }
        method = self.data.get("speculation", {}).get("kind", "none")
        for flag, is_unused in unused.items():
            if is_unused and not self.problems:
                self.problems.append(Problem(f"{flag} has no use: the file drafts by {method}; leave it out"))
        if self.problems:
            raise InputError(self.problems)
        checked = lint_content(dump_plain(self.data), self.file)
        if checked.recipe is None:
            back = {use.to: use.key for use in self.uses.values() if use.to}
            raise InputError(
                [
                    Problem(f"as a recipe's {p.key}: {p.message}", self.file, key=back.get(p.key or ""))
                    for p in checked.errors
                ]
            )
        return checked.recipe


def _plain(value: Any) -> Any:
    """``value`` if JSON can hold it, else as text (a NaN)."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return str(value)[:200]
    return value


def shown(value: Any) -> str:
    """A value of the file for a message."""
    return visible(str(value) if not isinstance(value, str) else repr(value), limit=60)


def describe_use(use: Use) -> str:
    """``build_config.max_batch_size 64 -> limits.max_batch_size`` and the like."""
    text = f"{visible(use.key)} {shown(use.found)}"
    if use.to:
        text += f" -> {use.to}"
    return f"{text}: {use.why}" if use.why else text


# --------------------------------------------------------------------------- keys of both kinds of file


def leave_beam_width(work: ImportWork, key: str) -> None:
    """Say that a beam width above 1 is lost."""
    if (work.integer(key) or 1) > 1:
        work.leave(key, "recipes decode with beam width 1, and so does all drafting")


def take_quantization(work: ImportWork, prefix: str) -> None:
    """QuantConfig's keys under ``prefix``."""
    algorithm = work.text(f"{prefix}quant_algo")
    kind = WEIGHTS.get(algorithm or "NO_QUANT")
    if kind is None:
        work.bad(
            f"{prefix}quant_algo",
            f"found {shown(algorithm)}; a recipe has {', '.join(WEIGHTS)} and null; start from one of them",
        )
        return
    work.set("quantization.kind", kind)
    if f"{prefix}quant_algo" in work.values:
        work.use(f"{prefix}quant_algo", "quantization.kind", kind)
    kv = work.text(f"{prefix}kv_cache_quant_algo")
    if kv is not None and kv not in KV_CACHES:
        work.bad(
            f"{prefix}kv_cache_quant_algo", f"found {shown(kv)}; allowed: {', '.join(KV_CACHES)} or null"
        )
    elif f"{prefix}kv_cache_quant_algo" in work.values:
        work.use(f"{prefix}kv_cache_quant_algo", "quantization.kv_cache", KV_CACHES.get(kv or "", "none"))
    if kind in ("w4a16_awq", "w4a8_awq"):
        work.take(f"{prefix}group_size", "quantization.group_size", int)
    if kind == "w8a8_sq" and isinstance(alpha := work.values.get(f"{prefix}smoothquant_val"), int | float):
        work.use(f"{prefix}smoothquant_val", "quantization.alpha", alpha)


def need_heads(work: ImportWork) -> None:
    """Take the heads from the command line, or note that they are lacking."""
    method = work.data["speculation"]["kind"]
    if work.flags.heads is None:
        work.problems.append(
            Problem(
                f"the file does not say where the heads for {method} are; give --heads",
                work.file,
                key="heads",
            )
        )
    work.set("speculation.heads", work.flags.heads or "missing")

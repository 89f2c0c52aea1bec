"""Whether a quantized checkpoint is one that TensorRT-LLM can load, and still its source's model.

:func:`check_export` looks at a Hugging Face folder with hf_quant_config.json, as ModelOpt writes it, whoever
made it: JSON files and the headers of the weights, for any architecture. ``trtspec quantize`` checks its own
exports more closely (values too); this is for folders from elsewhere, before hours of building.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtspec.errors import Problem
from trtspec.modelspec import CONFIG, QUANT_CONFIG
from trtspec.recipe import Quantization, W4A8AwqQuantization, W4A16AwqQuantization
from trtspec.tensor_headers import TensorHeader, read_tensor_headers
from trtspec.trtllm.checkpoint import Checkpoint, read_checkpoint
from trtspec.trtllm.facts import Facts, Kind, load_facts

ALGORITHMS = {
    "none": None,
    "fp8": "FP8",
    "w4a16_awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "w8a8_sq": "W8A8_SQ_PER_CHANNEL",
    "nvfp4": "NVFP4",
}
"""Weight format of a recipe -> ``quant_algo`` of hf_quant_config.json."""

_ENGINE_ALGORITHMS = ("FP8", "W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "NVFP4")
_STATIC_INPUTS = ("FP8", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "NVFP4")
_PACKED = ("F8_E4M3", "U8", "I8")
_ROUTERS = ("*.gate", "*.router", "*.shared_expert_gate")
_KEPT = ("num_layers", "hidden_size", "vocab_size", "max_positions", "rope_theta", "rope_scaling")


@dataclass(frozen=True)
class ExportCase:
    """What was read of one export. ``source``: the 16-bit checkpoint it was made from."""

    folder: Path
    export: Checkpoint
    headers: Mapping[str, TensorHeader]
    broken: tuple[Problem, ...]
    source: Checkpoint | None
    kind: Kind | None
    facts: Facts | None
    asked: Quantization | None

    @property
    def algorithm(self) -> str | None:
        value = (self.export.quantization or {}).get("quant_algo")
        return value if isinstance(value, str) else None

    def weights(self) -> Iterator[tuple[str, bool]]:
        """(module, stored quantized) of every matrix that could be quantized: not embeddings, not norms."""
        for name, header in self.headers.items():
            module = name.removesuffix(".weight")
            if module != name and len(header.shape) == 2 and "embed" not in module and "norm" not in module:
                yield module, header.dtype in _PACKED

    def of_config(self, message: str, key: str = "") -> Problem:
        return Problem(message, file=str(self.folder / QUANT_CONFIG), key=key or None)


@dataclass(frozen=True)
class ExportRule:
    id: str
    severity: Literal["error", "warning"]
    source: str
    check: Callable[[ExportCase], Iterator[Problem]]

    @property
    def why(self) -> str:
        return " ".join((self.check.__doc__ or "").split())


@dataclass(frozen=True)
class ExportFinding:
    rule: str
    severity: Literal["error", "warning"]
    problem: Problem


def check_export(
    folder: Path,
    *,
    source: Path | None = None,
    kind: Kind | None = None,
    version: str | None = None,
    asked: Quantization | None = None,
) -> list[ExportFinding]:
    """What is wrong with the export in ``folder``; rules that need what is None do not speak.

    ``source``: the 16-bit checkpoint it was made from. ``kind``, ``version``: the backend and TensorRT-LLM
    version that shall load it. ``asked``: the recipe's quantization. Raises InputError for unreadable JSON
    files and for a version without a table.
    """
    folder = Path(folder)
    headers, broken = read_tensor_headers(folder)
    case = ExportCase(
        folder,
        read_checkpoint(folder),
        headers,
        tuple(broken),
        None if source is None else read_checkpoint(source),
        kind,
        None if version is None else load_facts(version),
        asked,
    )
    return [
        ExportFinding(rule.id, rule.severity, problem)
        for rule in EXPORT_RULES.values()
        for problem in rule.check(case)
    ]


# --------------------------------------------------------------------------- the rules


def _weights(case: ExportCase) -> Iterator[Problem]:
    """Downloads without git-lfs leave pointer files, broken ones leave truncated weights."""
    yield from case.broken


def _foreign(case: ExportCase) -> Iterator[Problem]:
    """TensorRT-LLM goes by hf_quant_config.json, which ModelOpt writes and other tools do not."""
    if case.export.quantization is None:
        method = case.export.quant_method
        what = "it is a 16-bit checkpoint" if method is None else f"config.json says {method}"
        yield case.of_config(f"missing; {what}; quantize the 16-bit checkpoint with ModelOpt")


def _algorithm(case: ExportCase) -> Iterator[Problem]:
    """Each version knows a list of formats, and engines can be built from fewer than the LLM API loads."""
    algorithm = case.algorithm
    if algorithm is None:
        return
    known = case.facts.enums["QuantAlgo"] if case.facts is not None else None
    if known is not None and algorithm not in known:
        assert case.facts is not None
        yield case.of_config(
            f"{algorithm} is unknown in TensorRT-LLM {case.facts.version}; choose fp8 or a newer version",
            "quantization.quant_algo",
        )
    elif case.kind == "tensorrt" and algorithm not in _ENGINE_ALGORITHMS:
        yield case.of_config(
            f"{algorithm} cannot be built as an engine; allowed: {', '.join(_ENGINE_ALGORITHMS)}; use the "
            "pytorch backend",
            "quantization.quant_algo",
        )


def _asked(case: ExportCase) -> Iterator[Problem]:
    """A folder of another format than the recipe's would be served under a wrong name."""
    if case.asked is None or case.export.quantization is None:
        return
    wanted, found = ALGORITHMS[case.asked.kind], case.algorithm
    if found != wanted:
        yield case.of_config(f"found {found}; the recipe asks for {wanted}", "quantization.quant_algo")
    wanted_kv = None if case.asked.kv_cache == "none" else case.asked.kv_cache.upper()
    found_kv = case.export.quantization.get("kv_cache_quant_algo")
    if found_kv != wanted_kv:
        yield case.of_config(
            f"found {found_kv}; the recipe asks for {wanted_kv}", "quantization.kv_cache_quant_algo"
        )
    if isinstance(case.asked, W4A16AwqQuantization | W4A8AwqQuantization):
        group = case.export.quantization.get("group_size")
        if group is not None and group != case.asked.group_size:
            yield case.of_config(
                f"found {group}; the recipe asks for {case.asked.group_size}", "quantization.group_size"
            )


def _scales(case: ExportCase) -> Iterator[Problem]:
    """Without a calibration run there are no activation scales, and the build fails hours later."""
    wanted = ["weight_scale"]
    if case.algorithm in _STATIC_INPUTS:
        wanted.append("input_scale")
    for suffix in wanted:
        missing = [m for m, packed in case.weights() if packed and f"{m}.{suffix}" not in case.headers]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            yield Problem(
                f"missing{more}; the model was quantized without calibration; quantize it with texts",
                file=str(case.folder),
                key=f"{missing[0]}.{suffix}",
            )


def _kv_scales(case: ExportCase) -> Iterator[Problem]:
    """A quantized KV cache without scales is read with scale 1, which cuts off or wastes its range."""
    kv = (case.export.quantization or {}).get("kv_cache_quant_algo")
    names = (".k_scale", ".v_scale")
    if kv in ("FP8", "INT8") and not any(name.endswith(names) for name in case.headers):
        yield case.of_config(
            f"{kv}, and no k_scale or v_scale among the weights: they count as 1; calibrate the KV cache",
            "quantization.kv_cache_quant_algo",
        )


def _excluded(case: ExportCase) -> Iterator[Problem]:
    """Loaders go by exclude_modules, so it has to name what the files hold in 16 bit, and nothing else."""
    if case.algorithm is None or case.algorithm == "MIXED_PRECISION":
        return
    listed = (case.export.quantization or {}).get("exclude_modules")
    patterns = [p for p in listed if isinstance(p, str)] if isinstance(listed, list) else []
    for wrong, text in ((False, "is in 16 bit and not named"), (True, "is quantized and named")):
        found = [
            module
            for module, packed in case.weights()
            if packed == wrong and any(fnmatch.fnmatchcase(module, p) for p in patterns) == wrong
        ]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            yield case.of_config(f"{found[0]}{more} {text}; export again", "quantization.exclude_modules")


def _routers(case: ExportCase) -> Iterator[Problem]:
    """A router picks experts by small differences of its logits, which quantizing turns over."""
    for module, packed in case.weights():
        if packed and any(fnmatch.fnmatchcase(module, pattern) for pattern in _ROUTERS):
            yield Problem(
                "a quantized router; exclude *.gate and *.router and quantize again",
                file=str(case.folder),
                key=module,
            )
            return


def _lm_head(case: ExportCase) -> Iterator[Problem]:
    """The output projection is left in 16 bit by default; loaders support a quantized one only in part."""
    if any(packed and module == "lm_head" for module, packed in case.weights()):
        yield Problem("quantized; exclude lm_head and quantize again", file=str(case.folder), key="lm_head")


def _groups(case: ExportCase) -> Iterator[Problem]:
    """The scales' shape must be the inputs divided by the group size that the file names."""
    group = (case.export.quantization or {}).get("group_size")
    if case.algorithm not in ("W4A16_AWQ", "W4A8_AWQ") or type(group) is not int or group < 1:
        return
    for module, packed in case.weights():
        scale = case.headers.get(f"{module}.weight_scale")
        columns = case.headers[f"{module}.weight"].shape[1]
        if packed and scale is not None and len(scale.shape) == 2 and scale.shape[1] * group != columns:
            yield case.of_config(
                f"found {group}; {module} has {columns} inputs and {scale.shape[1]} scales a row",
                "quantization.group_size",
            )
            return


def _config(case: ExportCase) -> Iterator[Problem]:
    """Some exporters dropped the scaling of rotary positions; theta, sizes and end tokens can go as well."""
    if case.source is None:
        return
    path = str(case.folder / CONFIG)
    for name in _KEPT:
        before, after = getattr(case.source, name), getattr(case.export, name)
        added = before is None and name == "rope_scaling" and after is not None
        if added or (before is not None and before != after):
            yield Problem(f"found {after}; the source has {before}; export again", file=path, key=name)
    if not set(case.source.eos_token_ids) <= set(case.export.eos_token_ids):
        yield Problem(
            f"found {list(case.export.eos_token_ids)}; the source ends at "
            f"{list(case.source.eos_token_ids)}; copy generation_config.json",
            file=path,
            key="eos_token_id",
        )


def _tokenizer(case: ExportCase) -> Iterator[Problem]:
    """ModelOpt's export does not write the tokenizer; the server looks for it beside the weights."""
    if not any((case.folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        yield Problem("no tokenizer.json; copy the source's tokenizer files", file=str(case.folder))


_TABLE = (
    ExportRule("trtllm-export-weights", "error", "#2052", _weights),
    ExportRule("trtllm-export-foreign", "error", "#3548", _foreign),
    ExportRule("trtllm-export-format", "error", "#6680; tables of each version", _algorithm),
    ExportRule("trtllm-export-asked", "error", "the recipe", _asked),
    ExportRule("trtllm-export-scales", "error", "MO #500", _scales),
    ExportRule("trtllm-export-kv-scales", "warning", "MO #500", _kv_scales),
    ExportRule("trtllm-export-excluded", "error", "MO #153", _excluded),
    ExportRule("trtllm-export-router", "error", "MO #153", _routers),
    ExportRule("trtllm-export-lm-head", "warning", "MO #153", _lm_head),
    ExportRule("trtllm-export-group", "error", "#9253", _groups),
    ExportRule("trtllm-export-config", "error", "#1676", _config),
    ExportRule("trtllm-export-tokenizer", "error", "ModelOpt's export", _tokenizer),
)

EXPORT_RULES: dict[str, ExportRule] = {rule.id: rule for rule in _TABLE}
"""Rule id -> rule, for :func:`check_export`."""

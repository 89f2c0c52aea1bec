"""What TensorRT-LLM does with a recipe: refusals, known failures and silent adjustments, by version and GPU.

:func:`check` runs :data:`RULES` for one version. *error*: it cannot be built, or cannot run. *warning*: it is
reported to go wrong, or is not what one would expect. *note*: you ask for one thing and the builder does another,
or leaves it to you. Each rule is one function over a :class:`Case`; its docstring is the reason that
``trtspec lint --explain`` prints, ``source`` says where it was learned (#: NVIDIA/TensorRT-LLM issue or pull
request; TB: tensorrtllm_backend; MO: Model-Optimizer). The combinations that hold for every version are in
:mod:`trtspec.recipe_rules`. The file is one list of small functions; splitting it would only scatter the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from trtspec.hardware import Gpu
from trtspec.modelspec import ModelSpec
from trtspec.recipe import (
    DraftModelSpeculation,
    Quantization,
    Recipe,
    TensorrtBackend,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
)
from trtspec.trtllm.checkpoint import Checkpoint, of_spec
from trtspec.trtllm.facts import Facts, load_facts
from trtspec.versions import parse_range, parse_version

Severity = Literal["error", "warning", "note"]
Path = tuple[str | int, ...]
Told = Iterator[tuple[Path, str]]


@dataclass(frozen=True)
class Case:
    """One recipe on one version. What is None is not known, and no rule that needs it speaks."""

    recipe: Recipe
    facts: Facts
    gpu: Gpu | None
    checkpoint: Checkpoint | None
    draft: Checkpoint | None

    @property
    def engine(self) -> bool:
        return isinstance(self.recipe.backend, TensorrtBackend)

    @property
    def version(self) -> str:
        return self.facts.version

    def before(self, version: str) -> bool:
        """Whether this case's version is older than ``version``."""
        return parse_version(self.version) < parse_version(version)


@dataclass(frozen=True)
class Finding:
    """``path``: the recipe's key to blame, as in :mod:`trtspec.recipe_rules`."""

    rule: str
    severity: Severity
    path: Path
    message: str


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    source: str
    check: Callable[[Case], Told]

    @property
    def why(self) -> str:
        return " ".join((self.check.__doc__ or "").split())


def check(
    recipe: Recipe,
    version: str,
    *,
    gpu: Gpu | None = None,
    checkpoint: Checkpoint | ModelSpec | None = None,
    draft: Checkpoint | ModelSpec | None = None,
) -> list[Finding]:
    """What TensorRT-LLM ``version`` does with ``recipe``, in the order of :data:`RULES`.

    ``gpu`` turns on the rules of its architecture; ``checkpoint`` and ``draft`` (the recipe's models, see
    :mod:`trtspec.trtllm.checkpoint`) those of their sizes. A recipe for the embedded backend has no findings.
    Raises InputError for a version without a table.
    """
    if recipe.backend.kind == "embedded":
        return []
    case = Case(recipe, load_facts(version), gpu, _plain(checkpoint), _plain(draft))
    return [
        Finding(rule.id, rule.severity, path, message)
        for rule in RULES.values()
        for path, message in rule.check(case)
    ]


def _plain(checkpoint: Checkpoint | ModelSpec | None) -> Checkpoint | None:
    return of_spec(checkpoint) if isinstance(checkpoint, ModelSpec) else checkpoint


def _quantizations(recipe: Recipe) -> list[tuple[tuple[str, ...], Quantization]]:
    found: list[tuple[tuple[str, ...], Quantization]] = [(("quantization",), recipe.quantization)]
    if isinstance(recipe.speculation, DraftModelSpeculation):
        found.append((("speculation", "quantization"), recipe.speculation.quantization))
    return found


# --------------------------------------------------------------------------- version and GPU


def _version(case: Case) -> Told:
    """Engines ended with 1.2.1, the LLM API is taken from 1.0 on, and a recipe says which versions it means."""
    backend = case.recipe.backend
    asked = parse_range(backend.version)  # type: ignore[union-attr]
    if backend.kind not in case.facts.backends:
        yield (
            ("backend", "kind"),
            f"{backend.kind} does not exist in TensorRT-LLM {case.version}; it has "
            f"{' and '.join(case.facts.backends)}; choose another version, or migrate the recipe",
        )
    elif not asked.admits(case.version):
        yield ("backend", "version"), f"{asked} does not admit {case.version}; widen it or choose another"


def _fp8_sm(case: Case) -> Told:
    """Tensor cores multiply FP8 from Ada (sm89) on."""
    if case.gpu is not None and case.gpu.sm < 89:
        for path, quantization in _quantizations(case.recipe):
            if quantization.kind in ("fp8", "w4a8_awq"):
                yield (
                    (*path, "kind"),
                    f"{quantization.kind} computes in FP8 and {case.gpu.name} is sm{case.gpu.sm}; it needs "
                    "sm89 or newer; choose w4a16_awq",
                )


def _nvfp4_sm(case: Case) -> Told:
    """Tensor cores multiply NVFP4 from Blackwell (sm100) on."""
    if case.gpu is not None and case.gpu.sm < 100:
        for path, quantization in _quantizations(case.recipe):
            if quantization.kind == "nvfp4":
                yield (
                    (*path, "kind"),
                    f"nvfp4 needs sm100 or newer and {case.gpu.name} is sm{case.gpu.sm}; choose fp8",
                )


def _awq_group(case: Case) -> Told:
    """The groupwise 4-bit kernels exist for 64 and 128 weights a scale, those with FP8 activations for 128."""
    for path, quantization in _quantizations(case.recipe):
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


_TABLE: Sequence[Rule] = (
    Rule("trtllm-version", "error", "facts of each version; #8223, PR #15907, #15918, #16369", _version),
    Rule("trtllm-fp8-sm", "error", "#1770; hardware table of 1.2.1", _fp8_sm),
    Rule("trtllm-nvfp4-sm", "error", "hardware table of 1.2.1", _nvfp4_sm),
    Rule("trtllm-awq-group", "error", "#988; message of the fine-grained GEMM kernels", _awq_group),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _TABLE}
"""Rule id -> rule."""

"""Deployments that the tests of the cost model share."""

from __future__ import annotations

from typing import Any

from trtspec.cost.estimate import Deployment, Estimate, Workload, estimate
from trtspec.hardware import find_gpu
from trtspec.known_models import find_known
from trtspec.modelspec import ModelSpec
from trtspec.recipe import (
    DraftModelSpeculation,
    Eagle3Speculation,
    EagleSpeculation,
    Fp8Quantization,
    LookaheadSpeculation,
    MedusaSpeculation,
    Model,
    NgramSpeculation,
    NoQuantization,
    NoSpeculation,
    Nvfp4Quantization,
    W4A8AwqQuantization,
    W4A16AwqQuantization,
    W8A8SqQuantization,
)

FORMATS: dict[str, Any] = {
    "none": NoQuantization(kind="none"),
    "fp8": Fp8Quantization(kind="fp8", kv_cache="fp8"),
    "w4a16": W4A16AwqQuantization(kind="w4a16_awq"),
    "w4a8": W4A8AwqQuantization(kind="w4a8_awq"),
    "w8a8": W8A8SqQuantization(kind="w8a8_sq"),
    "nvfp4": Nvfp4Quantization(kind="nvfp4"),
}
DRAFTING: dict[str, Any] = {
    "none": NoSpeculation(kind="none"),
    "ngram": NgramSpeculation(kind="ngram"),
    "lookahead": LookaheadSpeculation(kind="lookahead"),
    "draft_model": DraftModelSpeculation(kind="draft_model", model=Model(source="small")),
    "medusa": MedusaSpeculation(kind="medusa", heads="heads"),
    "eagle": EagleSpeculation(kind="eagle", heads="heads"),
    "eagle3": Eagle3Speculation(kind="eagle3", heads="heads"),
}


def spec(size: str) -> ModelSpec:
    known = find_known(size)
    assert known is not None, size
    return known.spec


def priced(
    size: str = "8B", gpu: str = "H100-SXM", drafting: str = "none", form: str = "none", **fields: Any
) -> Estimate:
    """The estimate; fields of the workload by name, the rest go to the deployment."""
    work = {key: fields.pop(key) for key in list(fields) if key in Workload.__dataclass_fields__}
    given: dict[str, Any] = {"speculation": DRAFTING[drafting], "quantization": FORMATS[form], **fields}
    given.setdefault("draft_spec", spec("1B"))
    deployment = Deployment(spec(size), find_gpu(gpu), **given)
    return estimate(deployment, Workload(**work))

"""Step times from AIConfigurator's database of measured kernels, where that package is installed.

The extra ``trtspec[silicon]`` (PyPI aiconfigurator, Apache-2.0, some 850 MB) predicts TTFT and TPOT of
dense models without drafting. A few of its predictions refit the step law
(:func:`trtspec.cost.calibrate.fit_steps`), so that rounds, break-even and memory follow from the same
formulas; without it the roofline stands, and the estimate says so.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtspec.cost.calibrate import Measurement, fit_steps
from trtspec.cost.estimate import Deployment, Workload
from trtspec.cost.memory import kv_format, weight_format
from trtspec.cost.steps import DEFAULT, Coefficients
from trtspec.errors import InputError, MissingError
from trtspec.modelspec import FAMILIES, ModelSpec
from trtspec.recipe import NoSpeculation

SYSTEMS = {
    "A100-PCIe-80G": "a100_pcie",
    "A100-SXM-80G": "a100_sxm",
    "B200-SXM": "b200_sxm",
    "B300-SXM": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "H100-PCIe": "h100_pcie",
    "H100-SXM": "h100_sxm",
    "H200-SXM": "h200_sxm",
    "L40S": "l40s",
}
"""GPU -> AIConfigurator's name of the system that it has measured."""
GEMM = {"none": "bfloat16", "fp8": "fp8_static", "w4a16_awq": "int4_wo", "nvfp4": "nvfp4"}
KV = {"none": "bfloat16", "fp8": "fp8", "int8": "int8"}


def installed() -> bool:
    """Whether the package can be imported (it is not imported here: that takes seconds)."""
    return importlib.util.find_spec("aiconfigurator") is not None


@dataclass(frozen=True)
class Prediction:
    """AIConfigurator's times for one deployment and workload, without drafting."""

    ttft_ms: float
    tpot_ms: float
    version: str


def _config(spec: ModelSpec) -> dict[str, Any]:
    architecture = next(name for name, family in FAMILIES.items() if family == spec.family)
    return {
        "architectures": [architecture],
        "model_type": spec.family,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tie_embeddings,
        "torch_dtype": "bfloat16",
    }


def predict(deployment: Deployment, workloads: Sequence[Workload]) -> list[Prediction]:
    """AIConfigurator's TTFT and TPOT under TensorRT-LLM's in-flight batching; offline, from a config.json
    in a temporary folder. Raises MissingError without the package, InputError for what it lacks."""
    if not installed():
        raise MissingError("measured kernel times need AIConfigurator; run: pip install 'trtspec[silicon]'")
    d = deployment
    system = SYSTEMS.get(d.gpu.name)
    gemm, kv = GEMM.get(weight_format(d.spec, d.quantization)), KV.get(kv_format(d.spec, d.quantization))
    if system is None or gemm is None or kv is None:
        raise InputError(
            f"AIConfigurator has no measurements of {d.quantization.kind} with {d.quantization.kv_cache} KV "
            f"on {d.gpu.name}; leave --silicon out for the roofline"
        )
    logging.getLogger("aiconfigurator").setLevel(logging.CRITICAL)
    from aiconfigurator.cli.api import cli_estimate

    out = []
    with tempfile.TemporaryDirectory(prefix="trtspec-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(d.spec)), encoding="utf-8")
        for w in workloads:
            try:
                found = cli_estimate(
                    folder,
                    system,
                    backend_name="trtllm",
                    isl=w.input_tokens,
                    osl=w.output_tokens,
                    batch_size=w.concurrency,
                    tp_size=d.tp,
                    gemm_quant_mode=gemm,
                    kvcache_quant_mode=kv,
                )
            except Exception as error:  # its own many kinds; all mean that it cannot tell
                text = " ".join(str(error).split())[:200]
                raise InputError(f"AIConfigurator cannot price this: {text}") from error
            out.append(Prediction(float(found.ttft), float(found.tpot), str(found.backend_version)))
    return out


def silicon_coefficients(
    deployment: Deployment, workload: Workload, start: Coefficients = DEFAULT
) -> Coefficients:
    """The step law through AIConfigurator's TPOT of this workload alone, at its concurrency, at four times
    that, and with four times the prompt. Raises as :func:`predict`."""
    plain = replace(deployment, speculation=NoSpeculation(kind="none"), max_batch_size=None)
    batches = sorted({1, workload.concurrency, 4 * workload.concurrency, 16})
    points = [replace(workload, concurrency=batch) for batch in batches]
    points.append(replace(workload, input_tokens=4 * workload.input_tokens))
    found = predict(plain, points)
    rows = [Measurement(plain, w, p.tpot_ms) for w, p in zip(points, found, strict=True)]
    fit = fit_steps(rows, start, pull=0.05)  # its small unevenness must not decide what these leave open
    source = f"AIConfigurator, TensorRT-LLM {found[0].version}: {len(rows)} predictions from measured kernels"
    return replace(
        fit.coefficients, basis="silicon", source=source, spread=max(0.05, fit.coefficients.spread)
    )

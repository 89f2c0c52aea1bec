"""The report of one run of the protocol: its checks, with what they ran on and how much was measured."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from trtspec.artifact import Artifact, machine_summary, tool_versions
from trtspec.prompts import HELDOUT_FILE, PROMPTS_FILE, Prompt
from trtspec.recipe_facts import fidelity, is_for_gpu
from trtspec.user_files import read_user_bytes
from trtspec.verify.gates import Check, raw_as_records
from trtspec.verify.gpu import gpu_record
from trtspec.verify.pair import Pair
from trtspec.verify.report import Report
from trtspec.verify.settings import Settings
from trtspec.verify.tasks import task_files


def report_of(
    built: Artifact,
    settings: Settings,
    prompts: Sequence[Prompt],
    recorded: Mapping[str, object],
    checks: Sequence[Check],
    *,
    argv: Sequence[str],
    began: float,
    created: str,
    pair: Pair | None = None,
) -> Report:
    """``recorded``: :func:`settings_record`, made when the files were read; ``began``: ``time.monotonic()``
    when the run began; ``created``: the same moment, UTC."""
    recipe, label = built.recipe, fidelity(built.recipe)
    gpu_tools, gpus = gpu_record() if is_for_gpu(recipe) else ({}, {})
    notes = ["1 nat is a factor of 2.72 in probability, 0.1 nat of 1.11"]
    if pair is not None:
        notes = [*pair.notes(), *notes]
    if (wanted := settings.num_prompts) > len(prompts):
        notes.append(f"{wanted} prompts were asked for, {len(prompts)} are there and fit the limits")
    if label == "approximate":
        notes.append(
            f"{recipe.acceptance.kind} acceptance is approximate: sampled output does not have the target's "
            "law; greedy requests, in which acceptance and speed are measured, accept exactly"
        )
    return Report(
        engine=str(built.folder),
        recipe_name=recipe.name,
        recipe_digest=built.manifest.recipe_digest,
        recipe=recipe.model_dump(mode="json"),
        source_digest=built.manifest.source.digest,
        created=created,
        argv=tuple(argv),
        tools={**tool_versions(), **gpu_tools},
        built_with=built.manifest.tools,
        machine={
            **machine_summary(),
            **gpus,
            "threads": getattr(recipe.backend, "threads", None) or "default",
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        },
        settings=recorded,
        seconds=round(time.monotonic() - began, 1),
        checks=tuple(map(raw_as_records, checks)),
        notes=tuple(notes),
        fidelity=label,
        other={} if pair is None else pair.record(),
    )


def settings_record(settings: Settings, prompts: Sequence[Prompt]) -> dict[str, object]:
    """What was asked for, with hashes of the user's files as they are now: after minutes of measuring they
    may be others or gone. Raises InputError for one that cannot be read."""
    prompts_file, heldout = settings.prompts or PROMPTS_FILE, settings.heldout or HELDOUT_FILE
    return {
        **asdict(settings),
        "num_prompts": len(prompts),
        "longest_prompt_tokens": max(len(prompt.tokens) for prompt in prompts),
        "prompts": "builtin" if settings.prompts is None else str(prompts_file),
        "prompts_sha256": _sha256(prompts_file),
        "heldout": "builtin" if settings.heldout is None else str(heldout),
        "heldout_sha256": _sha256(heldout),
        "load": None
        if (load := settings.load) is None
        else {**asdict(load), "file": str(load.file or "builtin")},
        "tasks": [str(path) for path in settings.tasks],
        "tasks_sha256": [_sha256(path) for path in task_files(settings.tasks)],
        "lm_eval": list(settings.lm_eval),
        "lm_eval_path": None if settings.lm_eval_path is None else str(settings.lm_eval_path),
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_user_bytes(path)).hexdigest()

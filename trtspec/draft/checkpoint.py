"""Files of a training: its checkpoint, and what a folder of trained heads says of itself.

``HEADS/trtspec_heads.json`` is written last, after the weights: a folder that has it is whole. It is an
addition to the published layouts; what reads those ignores it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from trtspec.artifact import file_sha256, tool_versions, utc_now
from trtspec.errors import InputError, Problem
from trtspec.folders import new_folder
from trtspec.user_files import read_user_bytes, read_user_json, write_user_file

RECORD_FILE = "trtspec_heads.json"
RECORD_SCHEMA = "trtspec.heads/1"
CURVE_FILE = "curve.svg"
MAX_CHECKPOINT_BYTES = 64_000_000_000


@dataclass(frozen=True)
class HeadsRecord:
    """What heads were trained on and what they reached; JSON in :data:`RECORD_FILE` under these names."""

    kind: str
    """medusa, eagle or eagle3."""
    base_model: str
    """The folder of the target at the time of the training (a note)."""
    base_digest: str
    """Of the target's files: :attr:`trtspec.artifact.Source.digest`."""
    target_recipe: str | None
    """Digest of the recipe whose quantized target was imitated; None: the 16-bit checkpoint."""
    tokenizer_digest: str
    """sha256 of the target's tokenizer.json."""
    data_digest: str
    """Of the prompts, the target and how it answered."""
    num_answers: int
    answer_tokens: int
    """Answered tokens that were learnt."""
    trained_tokens: int
    """The same, each as often as it was seen."""
    epochs: float
    draft_vocab_size: int | None
    """None: the whole vocabulary is drafted."""
    seed: int
    acceptance: tuple[float, ...]
    """On answers kept back: of each level the share of drafted tokens that the target says, given that all
    levels before were right; best candidate only, greedy."""
    acceptance_length: float
    """1 + sum of the products of ``acceptance``: of a chain; a tree accepts more."""
    training_s: float
    training_cpu_s: float
    settings: dict[str, Any]
    curve: tuple[dict[str, Any], ...]
    """Points of the training: step, tokens, loss, acceptance."""
    created: str
    versions: dict[str, str]
    files: dict[str, str]
    """sha256 of the other files of the folder, by name."""


def write_heads(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    weights_file: str,
    record: Mapping[str, Any],
    curve_svg: str,
    *,
    replace: bool = False,
) -> HeadsRecord:
    """Write ``folder`` whole: weights, config.json, the curve, and last the record, whose ``created``,
    ``versions`` and ``files`` are filled in. Raises as :func:`trtspec.folders.new_folder`."""
    with new_folder(folder, replace=replace) as partial:
        write_user_file(partial / weights_file, save(dict(tensors), metadata={"format": "pt"}))
        write_user_file(partial / "config.json", (json.dumps(config, indent=2) + "\n").encode())
        write_user_file(partial / CURVE_FILE, curve_svg.encode())
        names = (weights_file, "config.json", CURVE_FILE)
        made = HeadsRecord(
            **record,
            created=utc_now(),
            versions=tool_versions(),
            files={name: file_sha256(partial / name) for name in names},
        )
        value = {"schema": RECORD_SCHEMA, **asdict(made)}
        write_user_file(partial / RECORD_FILE, (json.dumps(value, indent=1) + "\n").encode())
    return made


def read_record(folder: Path) -> HeadsRecord | None:
    """What ``folder`` says of its heads; None for heads of others, which have no record.

    Raises InputError for a record that is damaged or of a version that is not known here.
    """
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    value = read_user_json(path)
    if not isinstance(value, dict) or value.get("schema") != RECORD_SCHEMA:
        found = value.get("schema") if isinstance(value, dict) else None
        raise InputError(
            Problem(f"schema {found!r}; {RECORD_SCHEMA!r} is read here; remove the file", file=str(path))
        )
    names = {field.name for field in fields(HeadsRecord)}
    if missing := sorted(names - value.keys()):
        raise InputError(Problem(f"lacks {', '.join(missing)}; remove the file", file=str(path)))
    known = {name: value[name] for name in names}
    for name in ("acceptance", "curve"):
        known[name] = tuple(known[name])
    return HeadsRecord(**known)


# --------------------------------------------------------------------------- checkpoints


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a training so that after a crash the file holds this state or the one before."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_user_file(path, buffer.getvalue())


def load_checkpoint(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The state in ``path``; None if there is none. Raises InputError if it belongs to a training with other
    data or settings, or is damaged."""
    if not path.exists():
        return None
    raw = read_user_bytes(path, max_bytes=MAX_CHECKPOINT_BYTES)
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        found = state["fingerprint"]
    except Exception as error:  # unpickling raises whatever the file makes it raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            Problem(f"no checkpoint ({first}); remove it to start anew", file=str(path))
        ) from None
    if found != fingerprint:
        message = "the checkpoint of a training with other data or settings; remove it to start anew"
        raise InputError(Problem(message, file=str(path)))
    return state

"""Open dense models known by size or hub id, so that a deployment can be planned before any download.

``data/models.json`` holds the numbers of each model's config.json. What is planned here is built from the
checkpoint later, whose own config.json then counts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, MissingError
from trtspec.model_source import resolve_model
from trtspec.modelspec import FAMILIES, ModelSpec, read_modelspec

_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?[bm]", re.IGNORECASE)


@dataclass(frozen=True)
class KnownModel:
    """``draft``: hub id of a published smaller model with the same tokenizer, or None."""

    id: str
    sizes: tuple[str, ...]
    spec: ModelSpec
    draft: str | None


@dataclass(frozen=True)
class NamedModel:
    """A model as the user named it. ``source`` is what a recipe's ``model.source`` holds; ``origin`` says
    where the numbers come from; ``draft`` as in :class:`KnownModel`."""

    source: str
    spec: ModelSpec
    origin: str
    draft: str | None


@lru_cache(maxsize=1)
def known_models() -> tuple[KnownModel, ...]:
    """Every model of the table, smallest first."""
    text = resources.files("trtspec").joinpath("data/models.json").read_text(encoding="utf-8")
    return tuple(_known(row) for row in json.loads(text)["models"])


def _known(row: dict[str, Any]) -> KnownModel:
    family = FAMILIES[row["architecture"]]
    spec = ModelSpec(
        architecture=row["architecture"],
        family=family,
        num_layers=row["layers"],
        hidden_size=row["hidden"],
        intermediate_size=row["intermediate"],
        num_heads=row["heads"],
        num_kv_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        vocab_size=row["vocab"],
        rope_theta=float(row["rope_theta"]),
        rope_scaling=None,
        rms_norm_eps=row["eps"],
        max_positions=row["max_positions"],
        tie_embeddings=row["tied"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        sliding_window=None,
        eos_token_ids=(),
        dtype="bfloat16",
        quant=None,
    )
    return KnownModel(row["id"], tuple(row["sizes"]), spec, row["draft"])


def find_known(name: str) -> KnownModel | None:
    """The table's model of that size (``8B``) or hub id, whatever its case; None if it has none."""
    plain = name.lower()
    for model in known_models():
        if plain == model.id.lower() or plain in (size.lower() for size in model.sizes):
            return model
    return None


def find_model(source: str, base: Path = Path(".")) -> NamedModel:
    """The model called ``source``: a folder, ``sample:NAME``, a hub id or a size such as 8B.

    A folder's own config.json counts before the table. Raises InputError for an unknown size, an unknown
    architecture or no such folder, MissingError for a hub id that is neither in the local cache nor in the
    table. Never uses the network.
    """
    known = find_known(source)
    if known is not None and not (base / source).is_dir():
        return NamedModel(known.id, known.spec, f"the numbers of {known.id}'s config.json", known.draft)
    if _SIZE.fullmatch(source) and not (base / source).is_dir():
        sizes = [size for model in known_models() for size in model.sizes]
        nearest = min(sizes, key=lambda size: abs(_weights(size) - _weights(source)))
        raise InputError(
            f"no model of size {source!r} is known; the nearest is {nearest}; known: {', '.join(sizes)}; "
            "or name a checkpoint folder or a hub id"
        )
    try:
        folder = resolve_model(source, base, allow_network=False)
    except MissingError as error:
        if source.startswith("sample:"):
            raise
        ids = [model.id for model in known_models()]
        raise MissingError(f"{error}; or name a known model: {', '.join(ids)}") from None
    # A recipe's relative paths start at its own folder, not here.
    named = source if not (base / Path(source).expanduser()).is_dir() else str(folder)
    return NamedModel(named, read_modelspec(folder), f"{folder / 'config.json'}", None)


def _weights(size: str) -> float:
    return float(size[:-1]) * (1e9 if size[-1] in "bB" else 1e6)

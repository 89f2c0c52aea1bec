"""Trained draft heads, read from their config.json: the method they are for, whether they fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtspec.errors import InputError, MissingError, Problem
from trtspec.model_source import resolve_model
from trtspec.modelspec import ModelSpec
from trtspec.tensor_headers import read_json

HeadMethod = Literal["medusa", "eagle", "eagle3"]


@dataclass(frozen=True)
class Heads:
    """``source`` is what the recipe's ``heads`` key holds. ``spec`` is the draft's decoder (EAGLE); Medusa
    has ``num_heads`` heads of ``num_layers`` residual blocks instead."""

    source: str
    method: HeadMethod
    spec: ModelSpec | None
    num_heads: int = 0
    num_layers: int = 0


def read_heads(source: str, target: ModelSpec, base: Path = Path(".")) -> Heads:
    """The heads in the folder (or the locally cached hub id) ``source``, checked against ``target``.

    Raises InputError when the folder holds no head that is known here or one for another target, MissingError
    when a hub id is not in the local cache. Never uses the network.
    """
    try:
        folder = resolve_model(source, base, allow_network=False)
    except MissingError as error:
        raise MissingError(f"--heads {error}") from None
    if (base / Path(source).expanduser()).is_dir():
        source = str(folder)  # a recipe's relative paths start at its own folder, not here
    path = folder / "config.json"
    problems: list[Problem] = []
    values = read_json(path, problems)
    if values is None:
        raise InputError(problems or Problem("missing; a folder with trained heads has one", str(path)))
    if "medusa_num_heads" in values:
        heads = Heads(source, "medusa", None, _count(values, "medusa_num_heads", path),
                      _count(values, "medusa_num_layers", path))  # fmt: skip
        wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    else:
        heads = _eagle(source, values, target, path)
        wanted = {"vocab_size": target.vocab_size}
        if heads.method == "eagle":
            wanted["hidden_size"] = target.hidden_size
        else:
            wanted["target_hidden_size"] = target.hidden_size
    for key, value in wanted.items():
        if values.get(key) not in (None, value):
            text = (
                f"found {values[key]}, the target has {value}; heads work only with the target they are for"
            )
            problems.append(Problem(text, str(path), key=key))
    if problems:
        raise InputError(problems)
    return heads


def _eagle(source: str, values: dict[str, Any], target: ModelSpec, path: Path) -> Heads:
    names = values.get("architectures") or [""]
    third = "eagle3" in str(names[0]).lower() or "draft_vocab_size" in values
    if not third and values.get("num_hidden_layers") != 1:
        text = (
            f"found architecture {names[0]!r}; allowed: Medusa heads (medusa_num_heads), EAGLE (one layer), "
            "EAGLE-3 (draft_vocab_size); give a folder with trained heads"
        )
        raise InputError(Problem(text, str(path), key="architectures"))
    hidden = values.get("hidden_size", target.hidden_size)
    heads = values.get("num_attention_heads", target.num_heads)
    spec = replace(
        target,
        num_layers=_count(values, "num_hidden_layers", path),
        hidden_size=hidden,
        intermediate_size=values.get("intermediate_size", target.intermediate_size),
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads", heads),
        head_dim=values.get("head_dim") or max(1, hidden // heads),
        # EAGLE-3 has an output projection of its own, often over fewer tokens; EAGLE-1/2 use the target's.
        vocab_size=values.get("draft_vocab_size") or target.vocab_size,
        tie_embeddings=not third,
        quant=None,
    )
    return Heads(source, "eagle3" if third else "eagle", spec)


def _count(values: dict[str, Any], key: str, path: Path) -> int:
    value = values.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
        raise InputError(
            Problem(f"found {value!r}; allowed: a whole number from 1 to 64", str(path), key=key)
        )
    return value

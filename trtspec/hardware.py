"""The GPUs whose memory, bandwidth and dense rates are known: data/gpus.json, one row a board.

A name is looked up, never guessed: an unknown or ambiguous name is an error that lists what is known.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from trtspec.errors import InputError

RATES = ("bf16", "int8", "fp8", "fp4")


@dataclass(frozen=True)
class Gpu:
    """One board. ``flops`` holds dense operations/s by format (keys of :data:`RATES`); None where the board
    has no unit for the format, or no dense figure is known. Link bandwidths are one way."""

    name: str
    arch: str
    sm: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops: dict[str, float | None]
    nvlink_bytes_per_s: float | None
    pcie_bytes_per_s: float
    watts: float
    sm_cycles_per_s: float
    """Streaming multiprocessors times boost clock: what conversions of weight-only formats scale with."""
    source: str
    rank: Literal["primary", "secondary"]
    aliases: tuple[str, ...] = ()

    @property
    def link_bytes_per_s(self) -> float:
        """To its peers, one way: NVLink where the board has it, else PCIe."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s


def _plain(name: str) -> str:
    text = "".join(c for c in name.lower() if c.isalnum())
    for word in ("nvidia", "geforce", "tesla"):
        text = text.replace(word, "")
    return text


def _gpu(row: dict[str, Any]) -> Gpu:
    if "memory_gib" in row:
        memory = row["memory_gib"] * 2.0**30
    elif "memory_mib" in row:
        memory = row["memory_mib"] * 2.0**20
    else:
        memory = row["memory_gb"] * 1e9
    tera = (row["bf16_tflops"], row["int8_tops"], row["fp8_tflops"], row["fp4_tflops"])
    return Gpu(
        name=row["name"],
        arch=row["arch"],
        sm=row["sm"],
        memory_bytes=memory,
        bandwidth_bytes_per_s=row["bandwidth_gb_per_s"] * 1e9,
        flops={rate: None if t is None else t * 1e12 for rate, t in zip(RATES, tera, strict=True)},
        nvlink_bytes_per_s=None if row["nvlink_gb_per_s"] is None else row["nvlink_gb_per_s"] * 1e9,
        pcie_bytes_per_s=row["pcie_gb_per_s"] * 1e9,
        watts=row["watts"],
        sm_cycles_per_s=row["sms"] * row["boost_ghz"] * 1e9,
        source=row["source"],
        rank=row["rank"],
        aliases=tuple(row["aliases"]),
    )


@lru_cache(maxsize=1)
def _table() -> tuple[Gpu, ...]:
    text = resources.files("trtspec").joinpath("data/gpus.json").read_text(encoding="utf-8")
    return tuple(_gpu(row) for row in json.loads(text)["gpus"])


def all_gpus() -> list[Gpu]:
    """Every board of the table, in its order (by architecture)."""
    return list(_table())


def find_gpu(name: str) -> Gpu:
    """The board called ``name``; case, separators and "NVIDIA" do not matter.

    Raises InputError for a name that fits several boards (``A100``: the form factors differ) or none; the
    message lists the candidates or the closest names. There is no default.
    """
    wanted = _plain(name)
    exact = [gpu for gpu in _table() if wanted in {_plain(gpu.name), *map(_plain, gpu.aliases)}]
    if exact:
        return exact[0]
    several = [gpu.name for gpu in _table() if wanted and _plain(gpu.name).startswith(wanted)]
    if several:
        raise InputError(f"GPU {name!r} could be {' or '.join(several)}; name one of them")
    names = {_plain(gpu.name): gpu.name for gpu in _table()}
    close = [names[key] for key in difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)]
    remedy = f"did you mean {' or '.join(close)}?" if close else "no name is close."
    raise InputError(f"GPU {name!r} is not in the table; {remedy} Known: {', '.join(names.values())}")

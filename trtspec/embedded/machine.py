"""What this machine offers an engine: device, threads, memory."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path

import torch

from trtspec.available_memory import available_memory_bytes
from trtspec.errors import InputError, MissingError, Problem
from trtspec.recipe import Limits
from trtspec.tensor_headers import read_tensor_headers


def torch_device(name: str) -> torch.device:
    """``cpu`` or ``cuda``; MissingError if torch sees no GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise MissingError(
            "backend.device: cuda: torch sees no GPU on this machine; use a GPU machine with a CUDA build of "
            "torch, or set device: cpu"
        )
    return torch.device(name)


def default_threads() -> int:
    """OMP_NUM_THREADS if the launcher set it, else one per core that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Of glibc's malloc.h: option and bytes. Blocks up to the first size come from the heap, not from mappings of
# their own; of the heap's free end that much is kept.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 256 * 2**20


def keep_freed_memory() -> bool:
    """Have this process's malloc keep up to ``KEPT_BYTES`` that a forward freed for the next; False where the
    C library is not glibc, or the user's MALLOC_ variables say what it does.

    glibc gives large freed blocks back and asks the system again, which clears each page anew: the
    intermediate results of 1000 rows of SmolLM2 cost 6,000 to 54,000 page faults a forward, about 6 % of its
    time.
    """
    if any(name.startswith("MALLOC_") or "glibc.malloc" in value for name, value in os.environ.items()):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
        ctypes.CDLL(None).gnu_get_libc_version  # noqa: B018 - other libraries' mallopt may mean other things
    except (OSError, AttributeError, TypeError):
        return False
    # Older glibc allows a threshold of at most 32 MB.
    large = mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) or mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
    return bool(large and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def num_kv_pages(limits: Limits, page_tokens: int, page_bytes: int) -> int:
    """Pages of the KV cache: what ``limits.kv_cache_bytes`` holds, or max_batch_size full sequences.

    Raises InputError if not even one page of ``page_bytes`` fits.
    """
    if limits.kv_cache_bytes is None:
        return limits.max_batch_size * -(-limits.max_seq_tokens // page_tokens)
    num_pages = limits.kv_cache_bytes // page_bytes
    if num_pages < 1:
        raise InputError(
            Problem(
                f"{limits.kv_cache_bytes} bytes do not hold one page: {page_tokens} tokens take {page_bytes} "
                "bytes; raise it or lower backend.page_tokens",
                key="limits.kv_cache_bytes",
            )
        )
    return num_pages


def estimated_weight_bytes(folder: Path, dtype: torch.dtype, dequantized_copy: bool = False) -> int:
    """About what the weights will take: the files, twice or four times that for 32 or 64 bit; with
    ``dequantized_copy`` 2 bytes more for each 4- or 8-bit integer weight."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    total = stored * max(1, dtype.itemsize // 2)
    if dequantized_copy:
        headers, _ = read_tensor_headers(folder)
        weights_a_byte = {"U8": 2, "I8": 1}
        total += sum(2 * weights_a_byte.get(h.dtype, 0) * math.prod(h.shape) for h in headers.values())
    return total


def check_memory(num_kv_bytes: int, num_weight_bytes: int, limits: Limits, device: torch.device) -> None:
    """Raise MissingError, saying what to lower, if cache and weights exceed what is available."""
    available = available_bytes(device)
    if available is None or num_kv_bytes + num_weight_bytes <= available:
        return
    remedy = (
        "lower limits.max_batch_size or limits.max_seq_tokens, or set limits.kv_cache_bytes"
        if limits.kv_cache_bytes is None
        else "lower limits.kv_cache_bytes"
    )
    raise MissingError(
        f"the KV cache needs {num_kv_bytes} bytes and the weights about {num_weight_bytes}, but {device} has "
        f"{available} available; {remedy}"
    )


def available_bytes(device: torch.device) -> int | None:
    """Memory that can be had now, in bytes; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()

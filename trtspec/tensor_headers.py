"""What the safetensors files of a folder say they hold, from names, sizes and headers only."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.errors import InputError, MissingError, Problem
from trtspec.user_files import is_plain_name, open_user_file, parse_json, read_user_json, shown_path

_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads at most."""
_MAX_DIMENSIONS = 8

_JSON_NAMES = {
    list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as a safetensors header describes it."""

    dtype: str
    """F64, F32, F16, BF16, F8_E4M3, I8, U8 ..."""
    shape: tuple[int, ...]
    file: Path
    start: int
    """Where its bytes begin in the file."""
    strides: tuple[int, ...] | None = None
    """Of a pickled tensor whose values do not lie in the order of its indices, in values."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def read(self) -> bytes:
        """The values, row by row. InputError or MissingError if the file cannot be read any more."""
        count, size = math.prod(self.shape), DTYPE_BYTES[self.dtype]
        with open(open_user_file(self.file), "rb") as file:
            file.seek(self.start)
            if self.strides is None or not count:
                raw = file.read(count * size)
            else:
                last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
                raw = _in_order(file.read((last + 1) * size), self.shape, self.strides, size)
        if len(raw) != count * size:
            raise InputError(Problem("became shorter while it was read", file=shown_path(self.file)))
        return raw


def _in_order(raw: bytes, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bytes:
    values = array({1: "B", 2: "H", 4: "I", 8: "Q"}[size], raw)
    starts = [0]
    for length, stride in zip(shape[:-1], strides[:-1], strict=True):
        starts = [start + at * stride for start in starts for at in range(length)]
    length, stride = shape[-1], strides[-1]
    if stride == 0:
        return b"".join(values[start : start + 1].tobytes() * length for start in starts)
    reach = (length - 1) * stride + 1
    return b"".join(values[start : start + reach : stride].tobytes() for start in starts)


DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


def read_tensor_headers(folder: Path) -> tuple[dict[str, TensorHeader], list[Problem]]:
    """(headers by tensor name, problems): what the safetensors files of ``folder`` say they hold.

    Problems: a path that safetensors cannot open, no safetensors weights (pickled ones are refused), git-lfs
    pointers, truncated or malformed files, shards that the index names and the folder lacks, and the reverse
    for tensors.
    """
    problems: list[Problem] = []
    weight_map: dict[str, str] | None = None
    if str(folder).encode(errors="replace").decode() != str(folder):
        message = "the path is not UTF-8, and safetensors opens no other; move the folder"
        return {}, [Problem(message, file=shown_path(folder))]
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        files = [single]
    elif index.exists():
        value = (read_json(index, problems) or {}).get("weight_map")
        if problems:
            return {}, problems
        if not isinstance(value, dict) or not value or not all(isinstance(v, str) for v in value.values()):
            return {}, [Problem("missing, empty or not a mapping", file=str(index), key="weight_map")]
        if outside := sorted({name for name in value.values() if not is_plain_name(name)}):
            message = (
                f"{shown_path(outside[0])!r} is not the name of a file in this folder; download it again"
            )
            return {}, [Problem(message, file=str(index), key="weight_map")]
        weight_map = value
        files = [folder / name for name in sorted(set(value.values()))]
    else:
        return {}, [Problem(_no_weights(folder), file=str(folder))]
    headers: dict[str, TensorHeader] = {}
    for path in files:
        if not path.exists():
            problems.append(
                Problem(f"missing; {INDEX_FILE} names it. Download the folder again", file=str(path))
            )
            continue
        found, problem = read_file_headers(path)
        if problem is not None:
            problems.append(Problem(problem, file=str(path)))
        headers |= found
    if weight_map is not None and not problems:
        for name in sorted(weight_map):
            if name not in headers or headers[name].file.name != weight_map[name]:
                problems.append(
                    Problem(f"not in {weight_map[name]}, where the index puts it", str(index), key=name)
                )
    return headers, problems


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return (
            "only pickled weights (*.bin), which can run code when loaded; convert them to safetensors: "
            'load with transformers and save_pretrained("OUT", safe_serialization=True)'
        )
    return f"no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"


def read_file_headers(path: Path) -> tuple[dict[str, TensorHeader], str | None]:
    """The tensors of one safetensors file and what is wrong with it."""
    again = "download or export it again"
    try:
        descriptor = open_user_file(path)
    except (InputError, MissingError) as error:
        return {}, _message(error)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        start = file.read(8)
        if start.startswith(b"version "):
            return {}, "a git-lfs pointer, not weights; run 'git lfs pull' in the folder"
        if len(start) < 8:
            return {}, f"only {size} bytes, not a safetensors file; {again}"
        length = int.from_bytes(start, "little")
        if length > size - 8:
            return {}, f"truncated or not safetensors: header of {length} bytes in {size} bytes; {again}"
        if length > _MAX_HEADER_BYTES:
            return {}, f"a header of {length:,} bytes; safetensors allows {_MAX_HEADER_BYTES:,}; {again}"
        try:
            header = parse_json(file.read(length))
            items = {k: v for k, v in header.items() if k != "__metadata__"}
            spans = {name: _lengths(v["data_offsets"], 2) for name, v in items.items()}
            tensors = {
                name: TensorHeader(
                    str(v["dtype"]), _lengths(v["shape"], _MAX_DIMENSIONS), path, 8 + length + spans[name][0]
                )
                for name, v in items.items()
            }
            if any(len(span) != 2 for span in spans.values()):
                raise ValueError("data_offsets")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return {}, f"the safetensors header is malformed; {again}"
    for name, (begin, end) in spans.items():
        wanted = math.prod(tensors[name].shape) * DTYPE_BYTES.get(tensors[name].dtype, 0)
        if end - begin != wanted:
            return {}, f"{name} ({tensors[name].dtype} {list(tensors[name].shape)}) has {end - begin} bytes"
    expected = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header says"
        return {}, f"{kind}: {size} bytes, {expected} expected; {again}"
    if misplaced := _misplaced(spans):
        return {}, f"{misplaced}; {again}"
    return tensors, None


def _lengths(values: Any, most: int) -> tuple[int, ...]:
    """A shape, or a pair of offsets; ValueError for what is neither."""
    good = isinstance(values, list) and len(values) <= most and all(type(n) is int and n >= 0 for n in values)
    if not good:
        raise ValueError(values)
    return tuple(values)


def _misplaced(spans: Mapping[str, tuple[int, ...]]) -> str | None:
    """The tensors must tile the data: two in one place would be one tensor under two names."""
    at, before = 0, ""
    for (begin, end), name in sorted((span, name) for name, span in spans.items()):
        if begin < at:
            return f"{name} overlaps {before}"
        if begin > at:
            return f"{begin - at} bytes before {name} belong to no tensor"
        at, before = end, name
    return None


def _message(error: InputError | MissingError) -> str:
    return error.problems[0].message if isinstance(error, InputError) else str(error)


def read_json(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """The mapping in a JSON file, or None with the reason appended to ``problems``."""
    try:
        value = read_user_json(path)
    except InputError as error:
        problems.extend(error.problems)
        return None
    except MissingError as error:
        problems.append(Problem(str(error)))
        return None
    if not isinstance(value, dict):
        problems.append(Problem(f"holds {_JSON_NAMES[type(value)]}; a mapping is needed", file=str(path)))
        return None
    return value

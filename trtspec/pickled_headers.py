"""What a file that ``torch.save`` made says it holds, without torch and without running anything of it.

Such a file is a zip: ``NAME/data.pkl``, a pickle of the mapping in which tensors are references to storages,
and one stored (never compressed) member ``NAME/data/KEY`` for each storage. A pickle is a program; here it is
read by an unpickler for which nothing exists but mappings, storages and the two functions that make a tensor
of one, and those make headers. The values stay where they are: a header says at which byte they begin.

Source: torch/serialization.py of PyTorch (the zip format since 1.6), torch/_utils.py.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.tensor_headers import DTYPE_BYTES, TensorHeader
from trtspec.user_files import open_user_file

_MAX_PICKLE_BYTES = 16_000_000
_STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL",
}  # fmt: skip
_LOCAL_HEADER_BYTES = 30
"""Of a zip member, before its name and its extra field (APPNOTE.TXT 4.3.7)."""


def read_pickled_headers(path: Path) -> tuple[dict[str, TensorHeader], str | None]:
    """(headers by name, what is wrong) of a pickled state_dict. ``strides`` are set where the values of a
    tensor do not lie one after the other in the order of its indices."""
    with open(open_user_file(path), "rb") as file:
        start = file.read(8)
        if start.startswith(b"version "):
            return {}, "a git-lfs pointer, not weights; run 'git lfs pull' in the folder"
        if not start.startswith(b"PK"):
            return {}, "not a file that torch.save makes since 1.6 (a zip); save the state_dict again"
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
                prefix = name.removesuffix("data.pkl")
                if archive.getinfo(name).file_size > _MAX_PICKLE_BYTES:
                    return {}, "holds more than tensors; save the state_dict"
                if (
                    f"{prefix}byteorder" in archive.namelist()
                    and archive.read(f"{prefix}byteorder") == b"big"
                ):
                    return {}, "written on a big-endian machine; save it as safetensors there"
                value = _HeaderUnpickler(io.BytesIO(archive.read(name))).load()
                if not isinstance(value, dict) or not all(
                    isinstance(item, _Tensor) for item in value.values()
                ):
                    return {}, "not a plain mapping of names to tensors; save the state_dict"
                headers = {
                    str(key): _header(path, file, archive.getinfo(f"{prefix}data/{item.storage.key}"), item)
                    for key, item in value.items()
                }
        except Exception as error:  # a damaged pickle raises whatever it stumbles over
            return {}, f"not a plain mapping of names to tensors ({error}); save the state_dict"
    return headers, None


@dataclass(frozen=True)
class _Storage:
    dtype: str
    key: str


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(
    storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> _Tensor:
    sizes, strides = tuple(map(int, size)), tuple(map(int, stride))
    if not isinstance(storage, _Storage) or len(sizes) != len(strides) or min((offset, *sizes, *strides)) < 0:
        raise pickle.UnpicklingError("no tensor")
    return _Tensor(storage, int(offset), sizes, strides)


def _parameter(tensor: _Tensor, *_: object) -> _Tensor:
    return tensor


class _HeaderUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _parameter
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(str(dtype), str(key))


def _header(path: Path, file: Any, member: zipfile.ZipInfo, tensor: _Tensor) -> TensorHeader:
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("compressed values")
    file.seek(member.header_offset)
    local = file.read(_LOCAL_HEADER_BYTES)
    data = member.header_offset + _LOCAL_HEADER_BYTES + _short(local, 26) + _short(local, 28)
    size = DTYPE_BYTES[tensor.storage.dtype]
    last = sum((n - 1) * s for n, s in zip(tensor.sizes, tensor.strides, strict=True))
    if math.prod(tensor.sizes) and (tensor.offset + last + 1) * size > member.file_size:
        raise ValueError("a tensor beyond the end of its storage")
    strides = None if _in_order(tensor) else tensor.strides
    return TensorHeader(tensor.storage.dtype, tensor.sizes, path, data + tensor.offset * size, strides)


def _short(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 2], "little")


def _in_order(tensor: _Tensor) -> bool:
    step = 1
    for size, stride in reversed(list(zip(tensor.sizes, tensor.strides, strict=True))):
        if size > 1 and stride != step:
            return False
        step *= size
    return True

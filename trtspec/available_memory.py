"""The memory that this process may still take: :func:`available_memory_bytes`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROC = Path("/proc")


def available_memory_bytes(proc: Path = _PROC) -> int | None:
    """Bytes that can be had now without swapping; None where the system tells nothing.

    The least of what the machine has (``MemAvailable``; where there is no /proc/meminfo, all its physical
    memory) and of what is left in this process's cgroup and in each cgroup around it, in version 1 and 2.
    A cgroup's usage counts the page cache, which the kernel gives up before it kills: the file pages of its
    LRU lists are therefore not counted as taken (those of tmpfs, which cannot be given up, are on the
    anonymous lists). ``memory.high`` slows down and does not refuse, hence is not a limit here.
    Source: the kernel's documentation, proc(5), admin-guide/cgroup-v2 (memory) and cgroup-v1/memory.
    """
    machine = _machine_bytes(proc)
    bounds = [] if machine is None else [machine]
    for folder, version in _memory_groups(proc):
        left = _left_in(folder, version)
        if left is not None:
            bounds.append(left)
    return min(bounds) if bounds else None


def _machine_bytes(proc: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    if found is not None:
        return int(found.group(1)) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _memory_groups(proc: Path) -> Iterator[tuple[Path, int]]:
    """Each cgroup folder that may limit memory, from this process's up to what is mounted, with its version.

    /proc/self/cgroup names the group from its hierarchy's root, mountinfo says which part of the hierarchy
    is mounted where: in a container the two roots differ, and the group may lie outside what is mounted;
    then the mount's top is the closest that can be seen.
    """
    groups: dict[int, PurePosixPath] = {}
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            groups[2] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            groups[1] = PurePosixPath(path)
    for line in _text(proc / "self" / "mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        fields, described = mount.split(), kind.split()
        if len(fields) < 5 or len(described) < 2 or not described[0].startswith("cgroup"):
            continue
        version = 2 if described[0] == "cgroup2" else 1 if "memory" in described[-1].split(",") else 0
        if version not in groups:
            continue
        root, top, group = PurePosixPath(fields[3]), Path(fields[4]), groups[version]
        inside = group.relative_to(root).parts if group.is_relative_to(root) else ()
        if ".." in inside or not top.joinpath(*inside).is_dir():
            inside = ()
        for depth in range(len(inside), -1, -1):
            yield top.joinpath(*inside[:depth]), version


def _left_in(folder: Path, version: int) -> int | None:
    """What one cgroup's limit leaves; None without a limit (a root group has none, v1 says so by a number
    near 2^63)."""
    limit_name, usage_name = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    limit, usage = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit.isdigit() or not usage.isdigit() or int(limit) >= 1 << 62:
        return None
    # In version 1 the plain names leave out the groups below, whose pages the usage counts.
    prefix = "" if version == 2 else "total_"
    cached = re.findall(
        rf"^{prefix}(?:active|inactive)_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE
    )
    return max(0, int(limit) - int(usage) + sum(map(int, cached)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

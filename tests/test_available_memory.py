"""What memory is left, by made-up /proc and cgroup trees of both versions; and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtspec.available_memory import available_memory_bytes

MIB = 1 << 20
NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


def make_proc(folder: Path, cgroup: str, mounts: str, available_mib: int | None = 1000) -> Path:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    if available_mib is not None:
        (proc / "meminfo").write_text(f"MemTotal: 9999999 kB\nMemAvailable:   {available_mib * 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "self" / "mountinfo").write_text(mounts)
    return proc


def group_v2(folder: Path, limit: int | str, used: int, active: int = 0, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    # "file" counts tmpfs too, which is no cache that can be given up.
    (folder / "memory.stat").write_text(
        f"anon 5\nfile {active + inactive + 70 * MIB}\nshmem {70 * MIB}\n"
        f"inactive_anon 7\nactive_file {active}\ninactive_file {inactive}\nunevictable 0\n"
    )


def group_v1(folder: Path, limit: int, used: int, own: int = 0, total: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"cache {total}\nactive_file {own}\ninactive_file 0\n"
        f"total_active_file 0\ntotal_inactive_file {total}\n"
    )


def v2_mount(top: Path, root: str = "/") -> str:
    return f"31 23 0:28 {root} {top} ro,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate\n"


def v1_mount(top: Path, root: str = "/", controllers: str = "memory") -> str:
    return f"35 31 0:32 {root} {top} rw,relatime - cgroup cgroup rw,{controllers}\n"


def test_without_limits_it_is_the_machines(tmp_path: Path) -> None:
    assert available_memory_bytes(make_proc(tmp_path, "0::/\n", "")) == 1000 * MIB


def test_without_proc_it_is_at_most_the_physical_memory(tmp_path: Path) -> None:
    found, here = available_memory_bytes(tmp_path / "none"), available_memory_bytes()
    assert found is not None
    assert here is not None
    assert 0 < here <= found


@pytest.mark.parametrize(
    ("limit", "used", "cached", "expected_mib"),
    [
        ("max", 900 * MIB, 0, 1000),
        (400 * MIB, 300 * MIB, 0, 100),
        (400 * MIB, 300 * MIB, 250 * MIB, 350),  # page cache is given up before anybody is killed
        (400 * MIB, 401 * MIB, 0, 0),
        (4000 * MIB, 300 * MIB, 0, 1000),
    ],
)
def test_a_version_2_group(
    tmp_path: Path, limit: int | str, used: int, cached: int, expected_mib: int
) -> None:
    top = tmp_path / "cgroup"
    group_v2(top, limit, used, active=cached // 5, inactive=cached - cached // 5)
    assert available_memory_bytes(make_proc(tmp_path, "0::/\n", v2_mount(top))) == expected_mib * MIB


@pytest.mark.parametrize(
    ("inner", "outer", "expected_mib"), [(200, 500, 200), (500, 200, 200), (500, "max", 500)]
)
def test_the_tightest_of_the_groups_around_counts(
    tmp_path: Path, inner: int, outer: int | str, expected_mib: int
) -> None:
    top = tmp_path / "cgroup"
    group_v2(top / "user.slice" / "run.scope", inner * MIB, 0)
    group_v2(top / "user.slice", outer if outer == "max" else int(outer) * MIB, 0)
    (top / "memory.pressure").write_text("the root of version 2 has no memory.max")
    proc = make_proc(tmp_path, "0::/user.slice/run.scope\n", v2_mount(top))
    assert available_memory_bytes(proc) == expected_mib * MIB


def test_a_version_1_group_counts_the_cache_of_the_groups_below(tmp_path: Path) -> None:
    top = tmp_path / "cgroup" / "memory"
    group_v1(top, NO_LIMIT_V1, 3 * MIB)
    group_v1(top / "docker" / "a", 600 * MIB, 500 * MIB, own=0, total=50 * MIB)
    cgroup = "9:name=systemd:/\n4:cpu,memory:/docker/a\n2:cpuset:/b\n0::/\n"
    mounts = v1_mount(tmp_path / "cpuset", controllers="cpuset") + v1_mount(top, controllers="cpu,memory")
    assert available_memory_bytes(make_proc(tmp_path, cgroup, mounts)) == 150 * MIB


@pytest.mark.parametrize(
    ("group", "root"),
    [
        ("/docker/a", "/docker/a"),  # version 1: the container sees the host's path, and its own part mounted
        ("/", "/"),  # a cgroup namespace: both are its own roots
        ("/../../other.scope", "/"),  # entered from outside: the group cannot be seen
        ("/docker/a", "/docker/b"),
        ("/not/there", "/"),
    ],
)
def test_a_container_sees_its_own_limit_at_the_top_of_what_is_mounted(
    tmp_path: Path, group: str, root: str
) -> None:
    first, second = tmp_path / "one" / "memory", tmp_path / "two"
    group_v1(first, 300 * MIB, 100 * MIB)
    proc = make_proc(tmp_path / "one", f"4:memory:{group}\n0::/\n", v1_mount(first, root))
    assert available_memory_bytes(proc) == 200 * MIB
    group_v2(second / "top", 300 * MIB, 100 * MIB)
    assert (
        available_memory_bytes(make_proc(second, f"0::{group}\n", v2_mount(second / "top", root)))
        == 200 * MIB
    )


def test_nonsense_limits_nothing(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    group_v2(top, "many", 5)
    mounts = f"broken\n\n31 23 - cgroup2\n{v2_mount(top)}"
    assert available_memory_bytes(make_proc(tmp_path, "broken\n0::/\n", mounts)) == 1000 * MIB

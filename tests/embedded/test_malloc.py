"""What a forward frees is there for the next one, without the system clearing its pages anew."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds of glibc's malloc")

# Prints whether it was asked and allowed, and the page faults of five rounds of 48 MB taken and freed.
CHILD = """
import ctypes, resource, sys
from trtspec.embedded.machine import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else False
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(16 * 2**20) for _ in range(3)]
    for block in blocks:
        ctypes.memset(block, 1, 16 * 2**20)
    for block in blocks:
        libc.free(block)
use()
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(asked: str, **env: str) -> tuple[bool, int]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, asked],
        env={**inherited, **env},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


def test_freed_memory_is_kept() -> None:
    kept, count = faults("kept")
    assert kept
    assert count < 100


def test_without_it_every_round_pays_again() -> None:
    assert faults("as it is")[1] > 10_000


def test_the_users_own_settings_win() -> None:
    kept, count = faults("kept", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert count > 10_000

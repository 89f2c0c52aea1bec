"""Fixtures that several test modules share, and what each needs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

# Spinning OpenMP threads wait for threads that are not scheduled: with another busy process on the
# machine that costs a factor of 15. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One process a core: each would otherwise start as many threads as there are cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Programs that the tests start must buffer their output as they do for most users, and find compiled modules:
# compiling this package anew costs each of a hundred starts up to a second.
os.environ.pop("PYTHONUNBUFFERED", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

# Under nohup, or in the background of a shell, these are ignored, by children too, and the tests of Ctrl-C
# would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples on every run: a failure that comes and goes says nothing of the change that it came with.
with contextlib.suppress(ImportError):  # NVIDIA's container, where only the tests marked gpu run, lacks it
    from hypothesis import settings

    settings.register_profile("same", derandomize=True, database=None)
    settings.load_profile("same")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party data for back-tests, beside the checkout; not part of the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED_DATA

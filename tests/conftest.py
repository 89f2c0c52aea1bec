"""Fixtures that several test modules share, and what each needs."""

from __future__ import annotations

import os
from pathlib import Path

# Spinning OpenMP threads wait for threads that are not scheduled: with another busy process on the
# machine that costs a factor of 15. Must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Programs that the tests start must buffer their output as they do for most users.
os.environ.pop("PYTHONUNBUFFERED", None)

import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Third-party data for back-tests, beside the checkout; not part of the project."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return SHARED_DATA

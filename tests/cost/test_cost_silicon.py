"""The optional step times of AIConfigurator: refused with the remedy without it, sane with it."""

from __future__ import annotations

import pytest
from models import FORMATS, spec

from trtspec.cost.estimate import Deployment, Workload, estimate
from trtspec.cost.silicon import SYSTEMS, installed, predict, silicon_coefficients
from trtspec.errors import InputError, MissingError
from trtspec.hardware import find_gpu

PLAIN = Deployment(spec("8B"), find_gpu("H100"))


def test_systems_are_boards_of_the_table() -> None:
    for name in SYSTEMS:
        assert find_gpu(name).name == name


@pytest.mark.skipif(installed(), reason="aiconfigurator is installed")
def test_without_the_package_the_remedy_is_named() -> None:
    with pytest.raises(MissingError, match=r"trtspec\[silicon\]"):
        predict(PLAIN, [Workload()])


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="aiconfigurator is not installed")
def test_published_times_within_five_percent() -> None:
    """Llama-3.1-8B, H100, 1024 in, 512 out: 7.417, 8.354, 9.877 and 13.102 ms."""
    published = {8: 7.417, 16: 8.354, 32: 9.877, 64: 13.102}
    found = predict(PLAIN, [Workload(1024, 512, batch) for batch in published])
    for prediction, tpot in zip(found, published.values(), strict=True):
        assert prediction.tpot_ms == pytest.approx(tpot, rel=0.05)
    coefficients = silicon_coefficients(PLAIN, Workload(1024, 512, 8))
    e = estimate(PLAIN, Workload(1024, 512, 8), coefficients)
    assert e.basis == "silicon"
    assert e.tpot_ms == pytest.approx(7.417, rel=0.03)
    odd = Deployment(spec("8B"), find_gpu("H100"), quantization=FORMATS["w4a8"])
    with pytest.raises(InputError, match="no measurements"):
        predict(odd, [Workload()])

"""Which kernels are shared among threads, and that a forward leaves the thread count as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from batches import chain_batch
from tiny import make_tiny_model

from trtspec.embedded.kvstore import KvStore
from trtspec.embedded.model import Decoder
from trtspec.embedded.threads import WAKE_US, Threads, product_us, worth
from trtspec.embedded.weights import load_model
from trtspec.modelspec import read_modelspec


@pytest.fixture
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def sleeping(
    monkeypatch: pytest.MonkeyPatch, folder: Path, policy: str = "PASSIVE", **options: bool
) -> Decoder:
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    spec = read_modelspec(make_tiny_model(folder, tokenizer=False))
    return load_model(folder, spec, dtype=torch.float64, device=torch.device("cpu"), **options)


def test_work_is_shared_where_that_saves_more_than_waking_costs() -> None:
    assert worth(2 * WAKE_US, 2) == 1
    assert worth(2 * WAKE_US + 1, 2) == 2
    assert worth(WAKE_US * 4 / 3 + 1, 4) == 4
    assert worth(1e9, 1) == 1
    small, large = 576 * 1536, 2048 * 8192
    assert [worth(product_us(small, rows), 2) for rows in (1, 64)] == [1, 2]
    assert worth(product_us(large, 1), 2) == 2


@pytest.mark.usefixtures("two_threads")
def test_a_small_step_runs_on_one_thread_and_a_long_prompt_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sleeping(monkeypatch, tmp_path)
    seen: list[int] = []
    head = model.lm_head

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return head(x)

    model.lm_head = watched
    store = KvStore(model.spec, 1024, dtype=model.dtype)
    model.forward(chain_batch([5]), store)
    assert (seen, torch.get_num_threads()) == ([1], 2)
    assert model._threads(chain_batch([5]), 2) == Threads(1, 1, 1, 1)
    assert model._threads(chain_batch([5] * 600), 2).attention == 2


@pytest.mark.usefixtures("two_threads")
def test_nothing_changes_where_threads_spin_or_the_batch_must_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, policy, options in (
        ("spin", "ACTIVE", {}),
        ("unset", "", {}),
        ("invariant", "PASSIVE", {"batch_invariant": True}),
    ):
        model = sleeping(monkeypatch, tmp_path / folder, policy, **options)
        assert model._threads(chain_batch([5]), 2) == Threads(2, 2, 2, 2)


@pytest.mark.usefixtures("two_threads")
def test_the_count_is_restored_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sleeping(monkeypatch, tmp_path)
    store = KvStore(model.spec, 2, dtype=model.dtype)  # too few slots
    with pytest.raises(IndexError):
        model.forward(chain_batch([5, 6, 7]), store)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_the_numbers_are_those_of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sleeping(monkeypatch, tmp_path)
    batch = chain_batch(list(range(40)))
    shared = model.forward(batch, KvStore(model.spec, 64, dtype=model.dtype))[0]
    torch.set_num_threads(1)
    alone = model.forward(batch, KvStore(model.spec, 64, dtype=model.dtype))[0]
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-12)

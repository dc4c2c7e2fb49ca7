"""However an epoch on backend="dali" ends, nothing hangs and nothing stays behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torchvision import transforms

from dataloaders import DataLoader
from helpers.photos import Opened, folder
from helpers.processes import is_true_in_a_fork

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali

CHAIN = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])


def loader(**options: Any) -> DataLoader[Any]:
    given = {"dataset": folder(CHAIN), "batch_size": 2, "seed": 1, "device": "cpu", **options}
    return DataLoader(**{"backend": Dali(threads=2, depth=2), **given})


def ours() -> list[str]:
    """Names of this backend's own threads that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("dataloaders-dali")]


def gone(seconds: float = 10) -> list[str]:
    """Those that still live after so long."""
    deadline = time.monotonic() + seconds
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    return ours()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    gc.collect()
    assert gone() == []
    yield
    gc.collect()
    assert gone() == []


@pytest.mark.nightly
def test_no_thread_outlives_a_loader_for_a_moment() -> None:
    for _ in range(10):
        kept = loader()
        list(kept)
        assert "dataloaders-dali-behind_0" in ours()
        del kept
        assert ours() == []


def test_a_loader_that_turns_to_another_backend_ends_the_live_iterator() -> None:
    kept = loader()
    iterator = iter(kept)
    next(iterator)
    kept.backend = "stock"
    assert len(list(kept)) == 6
    with pytest.raises(RuntimeError, match="was closed, or has another backend"):
        next(iterator)
    assert gone() == []


def test_persistent_workers_serve_the_newest_iterator() -> None:
    kept = loader(dataset=Opened(CHAIN), num_workers=1, persistent_workers=True)
    iterator = iter(kept)
    next(iterator)
    newer = iter(kept)
    next(newer)
    with pytest.raises(RuntimeError, match="a newer iterator of it uses its persistent"):
        next(iterator)
    assert len(list(newer)) == 5


def test_a_transform_that_changes_between_epochs_is_the_one_that_runs() -> None:
    data = folder(CHAIN)
    kept = loader(dataset=data)
    assert next(iter(kept))[0].shape[-1] == 16
    data.transform = transforms.Compose([transforms.RandomResizedCrop(9), transforms.ToTensor()])
    assert next(iter(kept))[0].shape[-1] == 9


def test_an_iterator_that_a_fork_inherits_says_so_and_ends_with_it() -> None:
    iterator = iter(loader())
    first = next(iterator)

    def child() -> bool:
        nonlocal iterator
        with pytest.raises(RuntimeError, match="made before a fork"):
            next(iterator)
        del iterator
        gc.collect()
        return True

    assert is_true_in_a_fork(child)
    assert len([first, *iterator]) == 6


def test_workers_of_another_loader_may_be_forked_in_mid_epoch() -> None:
    iterator = iter(loader())
    next(iterator)
    assert sum(len(batch) for batch in DataLoader(range(20), 4, num_workers=2)) == 20
    assert len(list(iterator)) == 5

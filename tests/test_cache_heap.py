"""Workers of a build use the memory again that they have freed."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from dataloaders.cache import precompute
from dataloaders.cache.heap import settle_in

PAGES = 10 * (3 << 20) // resource.getpagesize()

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="malloc is not glibc's"
)


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen when the test begins; what conftest.py froze is so again after it."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class Faults(Dataset[Any]):
    """How many pages were faulted in while 30 MiB were filled and freed again."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(3 << 20, np.uint8) for _ in range(10)]
        del arrays
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@needs_glibc
def test_a_sample_s_memory_is_not_faulted_in_anew(tmp_path: Path) -> None:
    cached = precompute(Faults(), tmp_path / "a.h5", num_workers=2, allow_random=True)
    assert statistics.median(cached[index] for index in range(len(cached))) < PAGES / 10


@pytest.mark.usefixtures("thawed")
@pytest.mark.nightly
def test_the_process_that_builds_is_left_as_it_is(tmp_path: Path) -> None:
    frozen = gc.get_freeze_count()
    precompute(Faults(), tmp_path / "a.h5", num_workers=0, allow_random=True)
    assert gc.get_freeze_count() == frozen


@pytest.mark.usefixtures("thawed")
def test_another_malloc_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    settle_in()
    assert gc.get_freeze_count() > 0

from __future__ import annotations

from pathlib import Path

import pytest

from backends.h5 import H5
from backends.prefetch import Prefetch
from dataloaders import Backend
from helpers.contract import BackendContract
from helpers.datasets import EVERYTHING, FEW, STREAMS


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where caches are: one that a test has built is opened by those after it."""
    return tmp_path_factory.mktemp("caches")


class TestH5(BackendContract):
    # A cache keeps no objects of a user's class, and no numbers that are drawn anew.
    served = EVERYTHING - STREAMS - {"dataclasses", "draws of its own"}
    refuses = "has no samples by index|Record, which a cache does not keep|draws random numbers"
    everyday = (*FEW, "namedtuples", "strings", "list of samples", "concatenated")
    fails_in = ("collate", "sampler")  # a sample that fails does so while the cache is built

    @pytest.fixture
    def backend(self, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setenv("DATALOADERS_CACHE", str(caches))
        return H5()


class TestPrefetchOfH5(TestH5):
    everyday = FEW
    ends = ()
    by_day = ("test_batches_of_persistent_workers_are_torchs", "test_nothing_outlives_a_loader")

    @pytest.fixture
    def backend(self, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setenv("DATALOADERS_CACHE", str(caches))
        return Prefetch(inner=H5())

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from backends.h5 import H5
from backends.prefetch import Prefetch
from dataloaders import Backend, DataLoader
from dataloaders.errors import CacheError
from helpers.contract import BackendContract

NOT_KEPT = ("Record, which a cache does not keep", "MapDataset draws random numbers")
"""Datasets whose samples a cache must refuse: objects of a user's class, numbers drawn anew."""


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where caches are: one that a test has built is opened by those after it."""
    return tmp_path_factory.mktemp("caches")


class TestH5(BackendContract):
    @pytest.fixture
    def backend(self, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setenv("DATALOADERS_CACHE", str(caches))
        return H5()

    def loader(self, backend: Backend, **arguments: Any) -> DataLoader[Any]:
        loader = super().loader(backend, **arguments)
        cache = backend.inner if isinstance(backend, Prefetch) else backend
        assert isinstance(cache, H5)
        try:
            cache.cached(loader)
        except CacheError as error:
            if any(known in str(error) for known in NOT_KEPT):
                pytest.skip(str(error))
            raise
        return loader

    # A sample that fails or hangs does so while the cache is built, before there is a batch.

    test_an_error_is_torchs: ClassVar[None] = None  # type: ignore[assignment]
    test_a_sample_that_hangs_is_torchs_time_out: ClassVar[None] = None  # type: ignore[assignment]
    test_the_epoch_after_an_error_is_whole: ClassVar[None] = None  # type: ignore[assignment]

    # The dataset that workers have is the cache.

    test_worker_init_fn_runs_in_each_worker: ClassVar[None] = None  # type: ignore[assignment]


class TestPrefetchOfH5(TestH5):
    @pytest.fixture
    def backend(self, caches: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setenv("DATALOADERS_CACHE", str(caches))
        return Prefetch(inner=H5())

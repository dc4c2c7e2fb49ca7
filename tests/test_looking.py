"""Nothing that looks changes what training sees: files that a dataset opens when it is first read.

A look that reads the dataset in this process leaves its file open here; every worker forked later
inherits it, and all of them share one offset.
"""

from __future__ import annotations

import multiprocessing
from contextlib import suppress

import pytest
import torch

import dataloaders
from backends.dali import Dali
from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.synthetic import Synthetic
from dataloaders import DataLoader, wrap
from dataloaders.cache import estimate, precompute
from dataloaders.cache.fingerprint import fingerprint
from helpers.lazy_files import PLACES, STORES, LazyImages, forget, opened_here, wrong_samples

BACKENDS = {
    "stock": lambda: "stock",
    "prefetch": lambda: Prefetch(tail=True),
    "h5": H5,
    "prefetched h5": lambda: Prefetch(inner=H5(), tail=True),
    "dali": Dali,
    "synthetic": Synthetic,
}
WORKERS = {
    "none": {},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.fixture(autouse=True)
def nothing_open(tmp_path, monkeypatch):
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def explains(dataset, **options):
    for make in BACKENDS.values():
        loader = DataLoader(dataset, 8, backend=make(), **options)
        assert loader.explain().runs, loader.explain()
        assert wrap(torch.utils.data.DataLoader(dataset, 8, **options), backend=make()).explain()


def caches(dataset, folder):
    path = folder / "cache.h5"
    fingerprint(dataset)
    estimate(dataset, path)
    precompute(dataset, path)
    precompute(dataset, path, num_workers=0)  # it is only opened


def assert_unchanged(dataset, **options):
    """Nothing was opened in this process, and an epoch by workers has every sample."""
    assert not opened_here()
    options = {"num_workers": 2, "shuffle": True, **options}
    assert wrong_samples(torch.utils.data.DataLoader(dataset, 8, **options)) == []
    assert wrong_samples(DataLoader(dataset, 8, **options)) == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.covering
def test_explaining_and_caching(store, place, tmp_path):
    dataset = LazyImages(store, place, tmp_path)
    explains(dataset)
    caches(dataset, tmp_path)
    assert_unchanged(dataset)


class LazyAttributes(LazyImages):
    """Properties and a ``__getattr__`` that open the file, as of a dataset around an HDF5 file."""

    def _opened(self):
        return self[0][1]

    classes = class_to_idx = data = dataset = datasets = encoded = loader = property(_opened)
    root = target = target_transform = transforms = property(_opened)

    def __getattr__(self, name):
        if not name.startswith("_") or name == "__getitems__":
            self._opened()
        raise AttributeError(name)


def test_properties_of_a_dataset(tmp_path):
    dataset = LazyAttributes("buffered", "below", tmp_path)
    explains(dataset)
    caches(dataset, tmp_path)
    DataLoader(dataset, 8, num_workers="auto")
    dataloaders.tune(DataLoader(dataset, 8, num_workers=1), budget_s=0.5, max_workers=1)
    dataloaders.check_bottleneck(DataLoader(dataset, 8, num_workers=1), len, budget_s=0.5)
    assert_unchanged(dataset)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.covering
def test_epochs_of_each_backend(backend, workers, tmp_path):
    dataset = LazyImages("buffered", "below", tmp_path)
    loader = DataLoader(dataset, 8, shuffle=True, backend=BACKENDS[backend](), **WORKERS[workers])
    for _ in range(2):
        loader.explain()
        batches = list(loader)
        if backend != "synthetic":
            assert wrong_samples(batches) == []
    if workers != "none":  # a loop without workers reads here: that is what it is
        assert_unchanged(dataset)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("backend", ["stock", "prefetch", "h5", "dali"])
@pytest.mark.covering
def test_tuning(backend, workers, tmp_path):
    dataset = LazyImages("unbuffered", "self", tmp_path)
    loader = DataLoader(dataset, 8, backend=BACKENDS[backend](), **WORKERS[workers])
    for step in (None, lambda batch: torch.zeros(64, 64) @ torch.zeros(64, 64)):
        dataloaders.tune(loader, step, budget_s=0.5, max_workers=2, remember=False)
    assert_unchanged(dataset)


@pytest.mark.parametrize("backend", ["stock", "prefetch", "h5", "dali"])
@pytest.mark.covering
def test_the_check(backend, tmp_path):
    dataset = LazyImages("unbuffered", "self", tmp_path)
    loader = DataLoader(dataset, 8, backend=BACKENDS[backend](), num_workers=1)
    dataloaders.check_bottleneck(loader, lambda batch: batch[0].sum(), budget_s=0.5)
    assert_unchanged(dataset)


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.nightly
def test_processes_that_are_not_forked(context, tmp_path):
    dataset = LazyImages("zip", "below", tmp_path)
    options = {"num_workers": 1, "multiprocessing_context": context}
    for backend in ("prefetch", "dali"):
        loader = DataLoader(dataset, 8, backend=BACKENDS[backend](), **options)
        assert loader.explain().runs, loader.explain()
    start = multiprocessing.get_context(context)
    precompute(dataset, tmp_path / "x.h5", num_workers=1, multiprocessing_context=start)
    dataloaders.tune(loader, budget_s=0.5, max_workers=1, remember=False)
    assert_unchanged(dataset)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.thinned(8)
def test_an_epoch_that_is_under_way_in_this_process(store, place, tmp_path):
    """A fork shares the offsets of files that are open here: reading there must not move them."""
    dataset = LazyImages(store, place, tmp_path)
    loader = DataLoader(dataset, 8)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) in (1, 5):
            for backend in ("prefetch", "dali", "synthetic"):
                wrap(loader, backend=BACKENDS[backend]()).explain()
        if len(batches) == 3:
            with suppress(dataloaders.DataLoadersError):  # LMDB cannot be used in a fork
                fingerprint(dataset)
            dataloaders.tune(loader, budget_s=0.3, max_workers=1, remember=False)
    assert wrong_samples(batches) == []

"""The contract of each backend, see `helpers.contract`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from backends.synthetic import Synthetic
from helpers.compare import same
from helpers.contract import BackendContract, EpochContract, in_both_processes, in_every_process
from helpers.datasets import EVERYTHING, FEW, STREAMS
from helpers.ends import EVERYDAY
from helpers.processes import is_true_in_a_fork


class TestStock(BackendContract):
    tested = Stock()
    everyday = EVERYTHING
    ends = EVERYDAY


class TestPrefetch(BackendContract):
    tested = Prefetch(inner=Stock())


@pytest.fixture(scope="class")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where caches are: one that a test has built is opened by those after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATALOADERS_CACHE", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.mark.usefixtures("caches")
class TestH5(BackendContract):
    tested = H5()
    # A cache keeps no objects of a user's class, and no numbers that are drawn anew.
    served = EVERYTHING - STREAMS - {"dataclasses", "draws of its own"}
    refuses = "has no samples by index|Record, which a cache does not keep|draws random numbers"
    everyday = (*FEW, "namedtuples", "strings", "list of samples", "concatenated")
    fails_in = ("collate", "sampler")  # a sample that fails does so while the cache is built


@pytest.mark.nightly
class TestPrefetchOfH5(TestH5):
    tested = Prefetch(inner=H5())
    everyday = FEW


class TestDali(BackendContract):
    """Batches would be delivered on a CUDA device; the contract compares on the CPU."""

    # Samples without images pass through prefetch and stock, as in the contract of prefetch.
    everyday = ("dicts", "stream", "no batches", "folder of photos", "photos by their files")
    usual = "folder of photos"
    options = {"device": "cpu"}  # noqa: RUF012

    @pytest.fixture
    def backend(self):
        pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
        from backends.dali import Dali

        return Dali(fast=())

    @in_every_process
    def test_a_forked_child_has_batches_of_its_own(self, backend, workers):
        """Photos between two epochs only: forked while threads decode, a child may hang."""
        loader = self.loader(backend, **self.arguments(), **workers)
        whole = list(loader)
        assert is_true_in_a_fork(lambda: same(list(loader), whole))
        self.usual = "dicts"
        super().test_a_forked_child_has_batches_of_its_own(backend, workers)

    @pytest.mark.gpu
    @in_both_processes
    def test_batches_are_on_the_gpu_that_device_says(self, backend, workers):
        """Pixels of files are near to torch's there, and not equal: see tests/test_dali.py."""
        self.usual = "dicts"
        super().test_batches_are_on_the_gpu_that_device_says(backend, workers)


class TestSynthetic(EpochContract):
    tested = Synthetic()
    served = EVERYTHING - {"stream", "stream of samples"}
    refuses = "is iterable and has no length"
    starts_workers = False
    ends = ()

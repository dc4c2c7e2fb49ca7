"""The contract of each backend, see `helpers.contract`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.utils.data

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from backends.synthetic import Synthetic
from dataloaders import Backend, DataLoader
from helpers.compare import assert_same_epochs, run_epochs, same
from helpers.contract import BackendContract, EpochContract, in_every_process
from helpers.datasets import BY_NAME, EVERYTHING, FEW, STREAMS
from helpers.ends import EVERYDAY
from helpers.processes import is_true_in_a_fork


class TestStock(BackendContract):
    everyday = EVERYTHING
    ends = EVERYDAY

    @pytest.fixture
    def backend(self):
        return Stock()


def test_without_a_backend_it_is_torchs_loader_to_the_bit():
    for name in FEW:
        ours = DataLoader(**BY_NAME[name].make())
        theirs = torch.utils.data.DataLoader(**BY_NAME[name].make())
        assert_same_epochs(run_epochs(ours), run_epochs(theirs))


class TestPrefetch(BackendContract):
    @pytest.fixture
    def backend(self):
        return Prefetch(inner=Stock())


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


class TestDali(BackendContract):
    """Batches would be delivered on a CUDA device; the contract compares on the CPU."""

    # Samples without images pass through prefetch and stock, as in the contract of prefetch.
    everyday = ("dicts", "stream", "no batches", "folder of photos", "photos by their files")
    by_day = (
        "test_a_break_leaves_a_fresh_next_epoch_and_two_iterators_are_independent",
        "test_a_copy_taken_in_mid_epoch_is_a_loader_of_its_own",
        "test_a_forked_child_has_batches_of_its_own",
        "test_a_sample_that_hangs_is_torchs_time_out",
        "test_a_script_ends_cleanly_while_its_iterators_live",
        "test_an_error_is_torchs_and_the_next_epoch_begins_anew",
        "test_an_iterator_ends_for_good_and_its_batches_can_be_kept",
        "test_another_backend_ends_what_this_one_held",
        "test_batches_are_like_torchs",
        "test_batches_are_on_the_gpu_that_device_says",
        "test_batches_of_persistent_workers_are_torchs",
        "test_every_dataset_is_explained_and_the_others_are_refused",
        "test_nothing_outlives_a_loader",
    )
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


class TestSynthetic(EpochContract):
    served = EVERYTHING - {"stream", "stream of samples"}
    refuses = "is iterable and has no length"
    starts_workers = False
    ends = ()

    @pytest.fixture
    def backend(self):
        return Synthetic()

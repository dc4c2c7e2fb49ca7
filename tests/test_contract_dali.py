"""The contract on dali: every dataset is served, and its samples are torch's.

On a machine with a CUDA device batches would be delivered there; the contract compares on the CPU.
"""

import pytest

from helpers.compare import same
from helpers.contract import BackendContract, in_every_process
from helpers.processes import is_true_in_a_fork

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali


class TestDali(BackendContract):
    # Samples without images pass through prefetch and stock, as in the contract of prefetch.
    everyday = ("dicts", "stream", "no batches", "folder of photos", "photos by their files")
    by_day = (
        "test_a_break_leaves_a_fresh_next_epoch",
        "test_a_copy_taken_in_mid_epoch_is_a_loader_of_its_own",
        "test_a_forked_child_has_batches_of_its_own",
        "test_a_sample_that_hangs_is_torchs_time_out",
        "test_a_script_ends_cleanly_while_its_iterators_live",
        "test_an_error_is_torchs_and_the_next_epoch_begins_anew",
        "test_an_iterator_ends_for_good_and_outlives_its_loader",
        "test_another_backend_ends_what_this_one_held",
        "test_batches_are_like_torchs",
        "test_batches_are_on_the_gpu_that_device_says",
        "test_batches_can_be_kept",
        "test_batches_of_persistent_workers_are_torchs",
        "test_every_dataset_is_explained_and_the_others_are_refused",
        "test_nothing_outlives_a_loader",
        "test_pinned_batches_are_pinned",
        "test_two_iterators_are_independent",
    )
    usual = "folder of photos"
    options = {"device": "cpu"}  # noqa: RUF012

    @pytest.fixture
    def backend(self):
        return Dali(fast=())

    @in_every_process
    def test_a_forked_child_has_batches_of_its_own(self, backend, workers):
        """Photos between two epochs only: forked while threads decode, a child may hang."""
        loader = self.loader(backend, **self.arguments(), **workers)
        whole = list(loader)
        assert is_true_in_a_fork(lambda: same(list(loader), whole))
        self.usual = "dicts"
        super().test_a_forked_child_has_batches_of_its_own(backend, workers)

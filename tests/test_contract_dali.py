"""The contract on dali: every dataset is served, and its samples are torch's.

On a machine with a CUDA device batches would be delivered there; the contract compares on the CPU.
"""

import pytest

from helpers.compare import same
from helpers.contract import BackendContract, in_every_process
from helpers.datasets import FEW
from helpers.processes import is_true_in_a_fork

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali


class TestDali(BackendContract):
    everyday = (*FEW, "folder of photos", "photos by their files", "photos opened by own code")
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

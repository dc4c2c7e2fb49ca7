"""The contract on dali: every dataset is served, and its samples are torch's.

On a machine with a CUDA device batches would be delivered there; the contract compares on the CPU.
"""

import pytest

from helpers.contract import BackendContract
from helpers.datasets import FEW

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali


class TestDali(BackendContract):
    everyday = (*FEW, "folder of photos", "photos by their files", "photos opened by own code")
    options = {"device": "cpu"}  # noqa: RUF012
    threads_begun_late = 6  # those that decode

    @pytest.fixture
    def backend(self):
        return Dali(fast=())

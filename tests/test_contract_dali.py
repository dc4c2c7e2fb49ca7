"""The contract on dali: image datasets are served, all others are refused with a reason.

On a machine with a CUDA device batches would be delivered there; the contract compares on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from dataloaders import Backend, DataLoader
from helpers.contract import BackendContract

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali


class TestDali(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return Dali(fast=())

    def loader(self, backend: Backend, **arguments: Any) -> DataLoader[Any]:
        return super().loader(backend, **{"device": "cpu", **arguments})


def test_image_datasets_are_served() -> None:
    from helpers.datasets import CASES

    served = {
        case.name
        for case in CASES
        if DataLoader(backend=Dali(fast=()), **case.make()).explain().obstacle is None
    }
    assert served == {
        "folder of photos",
        "photos by their files",
        "pixels in memory",
        "photos opened by own code",
    }

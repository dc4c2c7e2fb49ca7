"""The contract on dali: image datasets are served, all others are refused with a reason.

On a machine with a CUDA device batches would be delivered there; the contract compares on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from dataloaders import Backend
from helpers.contract import BackendContract, fails_at_five
from helpers.photos import Opened

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali


class FailsAtFive(Opened):
    """Images by code of its own, whose targets are refused."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return image, fails_at_five(target)


class TestDali(BackendContract):
    served = frozenset(
        {
            "folder of photos",
            "photos by their files",
            "pixels in memory",
            "photos opened by own code",
        }
    )
    refuses = "is not known to decode files|an iterable dataset has no samples by index"
    everyday = served
    usual = "photos opened by own code"
    options = {"device": "cpu"}  # noqa: RUF012
    threads_begun_late = 6  # readers, and what is done after the graph
    alive = (("photos opened by own code", {"batch_size": 1}),)
    ends = ()
    fails_in = ("dataset", "collate", "sampler")

    def fails(self, place: str) -> dict[str, Any]:
        if place == "dataset":
            chain = self.arguments()["dataset"].transform
            return {"dataset": FailsAtFive(chain), "batch_size": 2}
        return super().fails(place)

    @pytest.fixture
    def backend(self) -> Backend:
        return Dali(fast=())

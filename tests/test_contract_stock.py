from __future__ import annotations

from typing import Any

import pytest
import torch.utils.data

from backends.stock import Stock
from dataloaders import Backend, DataLoader
from helpers.compare import assert_same_epochs, run_epochs
from helpers.contract import BackendContract
from helpers.datasets import CASES, Case


class TestStock(BackendContract):
    serves_everything = True

    @pytest.fixture
    def backend(self) -> Backend:
        return Stock()


class TestNoneGiven:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_is_torchs_loader_to_the_bit(self, case: Case) -> None:
        ours: DataLoader[Any] = DataLoader(**case.make())
        theirs = torch.utils.data.DataLoader(**case.make())
        assert_same_epochs(run_epochs(ours), run_epochs(theirs))

import pytest
import torch.utils.data

from backends.stock import Stock
from dataloaders import DataLoader
from helpers.compare import assert_same_epochs, run_epochs
from helpers.contract import BackendContract
from helpers.datasets import BY_NAME, EVERYTHING, FEW
from helpers.ends import EVERYDAY


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

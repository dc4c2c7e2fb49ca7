import pytest

from backends.synthetic import Synthetic
from helpers.contract import EpochContract
from helpers.datasets import EVERYTHING


class TestSynthetic(EpochContract):
    served = EVERYTHING - {"stream", "stream of samples"}
    refuses = "is iterable and has no length"
    starts_workers = False

    ends = ()

    @pytest.fixture
    def backend(self):
        return Synthetic()

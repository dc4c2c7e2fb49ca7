import pytest

from backends.prefetch import Prefetch
from backends.stock import Stock
from helpers.contract import BackendContract


class TestPrefetch(BackendContract):
    @pytest.fixture
    def backend(self):
        return Prefetch(inner=Stock())

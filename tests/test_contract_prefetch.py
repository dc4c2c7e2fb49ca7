from __future__ import annotations

import pytest

from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders import Backend
from helpers.contract import BackendContract


class TestPrefetch(BackendContract):
    serves_everything = True

    @pytest.fixture
    def backend(self) -> Backend:
        return Prefetch(inner=Stock())

from __future__ import annotations

import pytest

from backends.synthetic import Synthetic
from dataloaders import Backend
from helpers.contract import BackendContract


class TestSynthetic(BackendContract):
    @pytest.fixture
    def backend(self) -> Backend:
        return Synthetic()

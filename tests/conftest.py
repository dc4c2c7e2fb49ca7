"""What every test module shares: the helpers on the path, and the marker for CUDA."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.utils.data._utils

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests, saying why, where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def workers_end_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time that torch gives a worker to end before it terminates it.

    A worker that raised does not hear the request to end, and torch waits five seconds for it.
    """
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()  # an iterator that a traceback holds ends now, while the short time is set

"""Keeps the harness's garbage collections from walking through all that was imported."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Freeze what is imported, as tests/conftest.py does; here for runs of this folder alone."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter take down what was frozen."""
    gc.unfreeze()

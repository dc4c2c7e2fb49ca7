"""A script that ends while its iterators live, where only our base dependencies are installed.

Each backend's own endings are in its contract (`helpers.contract`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from helpers import base_environment, ends
from helpers.contract import WORKERS

BUILD = """
from dataloaders.cache import precompute
from helpers.datasets import BY_NAME

precompute(BY_NAME["large tensors"].make()["dataset"], "cache.h5", num_workers=0)
"""
WITH_TESTS = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(("main guard, until modules are cleared", "error in the loop"), id="everyday"),
        pytest.param(tuple(ends.SOURCES), id="all", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_without_extras_a_script_ends_cleanly_while_its_iterators_live(ways, tmp_path):
    # Only to build the cache: reading it needs no h5py.
    builder = base_environment.make(tmp_path / "with h5py", "h5")
    subprocess.run([builder, "-c", BUILD], cwd=tmp_path, env=WITH_TESTS, check=True)
    alive = [
        ends.Alive(backend, "large tensors", workers, len(workers) > 0)
        for backend in (Stock(), Prefetch(), H5(tmp_path / "cache.h5", build="never"))
        for workers in WORKERS.values()
    ]
    python = base_environment.make(tmp_path / "base")
    found = "import importlib.util; print(importlib.util.find_spec('torchvision'))"
    said = subprocess.run([python, "-c", found], capture_output=True, check=True, text=True)
    assert said.stdout == "None\n"
    ends.assert_ends_cleanly(tmp_path, alive, ways, python=python, path="")


@pytest.mark.nightly
def test_a_forked_child_that_exits_does_not_wait_for_threads_of_its_parent(tmp_path):
    alive = [ends.Alive(Prefetch(), "large tensors", {"device": "cpu"}, 0)] * 20
    ends.assert_ends_cleanly(tmp_path, alive, ["forked child"])

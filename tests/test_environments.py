"""What works with torch and numpy alone, and what says so instead."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.stock import Stock
from dataloaders.cache import precompute
from helpers import base_environment, ends
from helpers.contract import WORKERS
from helpers.processes import run_script

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment without any extra."""
    return base_environment.make(tmp_path_factory.mktemp("base"))


def run(folder, source, python, **env):
    return run_script(folder, source, env={"PYTHONPATH": "", **env}, python=python)


def test_commands_without_rich_and_psutil(python, tmp_path):
    precompute(TensorDataset(torch.zeros(32, 3).byte()), tmp_path / "train.h5", num_workers=0)
    script = "for batch in torch.utils.data.DataLoader(range(400)): pass\n"
    (tmp_path / "train.py").write_text(f"import torch\n{script}")
    done = run(
        tmp_path,
        """
        from dataloaders.cli import main

        print("status", main(["check", "train.py"]))
        print("status", main(["tune", "--budget", "0.5", "--quiet", "train.py"]), flush=True)
        assert main(["cache", "info", "train.h5"]) == 0
        assert main(["cache", "verify", "train.h5", "--quiet"]) == 0
        assert main(["backends"]) == 0
        """,
        python,
        DATALOADERS_CACHE=str(tmp_path),
    )
    lines = done.stdout.splitlines()
    assert [one for one in lines if one.startswith("status")] == ["status 2", "status 0"]
    assert done.stderr.startswith("dataloaders check: the bottleneck check needs psutil and rich, ")
    assert done.stderr.endswith("; install them with: pip install 'gpu-dataloaders[check]'\n")
    assert "tensor:uint8" in done.stdout
    assert "train.h5 is whole" in done.stdout
    assert "nvidia-dali-cuda130" in done.stdout


BUILD = """
from dataloaders.cli import main
assert main(["cache", "build", "data.py:train", "x.h5", "--workers", "0"]) == 0
"""


def test_a_script_ends_cleanly_while_its_iterators_live(python, tmp_path):
    # Built without torchvision, as it is read. Only building needs h5py.
    (tmp_path / "data.py").write_text("from helpers.datasets import large\ntrain = large()\n")
    builder = base_environment.make(tmp_path / "with h5py", "h5")
    built = run(tmp_path, BUILD, builder, PYTHONPATH=str(ROOT / "tests"))
    assert built.stderr.startswith("build  256 samples, about ")
    assert built.stdout.startswith("x.h5: 256 samples, ")
    alive = [
        ends.Alive(backend, "large tensors", workers, len(workers) > 0)
        for backend in (Stock(), Prefetch(), H5(tmp_path / "x.h5", build="never"))
        for workers in WORKERS.values()
    ]
    for way in ends.SOURCES:
        ends.assert_ends_cleanly(tmp_path, alive, way, python=python)


def test_a_forked_child_that_exits_does_not_wait_for_threads_of_its_parent(tmp_path):
    alive = [ends.Alive(Prefetch(), "large tensors", {"device": "cpu"}, 0)] * 20
    ends.assert_ends_cleanly(tmp_path, alive, "forked child")

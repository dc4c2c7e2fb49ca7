"""What works with torch and numpy alone, and what names the extra that it needs."""

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


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment without any extra."""
    return base_environment.make(tmp_path_factory.mktemp("base"))


@pytest.fixture
def cache(tmp_path):
    data = TensorDataset(torch.arange(96, dtype=torch.uint8).reshape(32, 3), torch.arange(32))
    precompute(data, tmp_path / "train.h5", num_workers=0)
    return tmp_path / "train.h5"


def run(folder, source, python, **env):
    return run_script(folder, source, env={"PYTHONPATH": "", **env}, fresh=True, python=python)


def test_training_and_reading_a_cache_need_torch_and_numpy_only(python, cache, tmp_path):
    done = run(
        tmp_path,
        f"""
import importlib.util

for package in ("rich", "psutil", "torchvision"):
    assert importlib.util.find_spec(package) is None

from torch import nn, optim

from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, verify

model = nn.Linear(3, 1)
optimizer = optim.SGD(model.parameters(), 1e-6)
for arguments in (
    dict(num_workers=2, seed=1),
    dict(num_workers="auto", prefetch_factor="auto", pin_memory="auto"),
    dict(backend="prefetch", num_workers=1),
    dict(backend="synthetic"),
):
    loader = DataLoader(CachedDataset({str(cache)!r}), 8, **arguments)
    assert loader.explain().runs
    for rows, labels in loader:
        loss = (model(rows.float()).squeeze(1) - labels.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
assert verify({str(cache)!r}) == []
""",
        python,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_commands_without_rich_and_psutil(python, cache, tmp_path):
    script = "for batch in torch.utils.data.DataLoader(range(400)): pass\n"
    (tmp_path / "train.py").write_text(f"import torch\n{script}")
    done = run(
        tmp_path,
        f"""
        from dataloaders.cli import main

        print("status", main(["check", "train.py"]))
        print("status", main(["tune", "--budget", "0.5", "--quiet", "train.py"]), flush=True)
        assert main(["cache", "info", {str(cache)!r}]) == 0
        assert main(["cache", "verify", {str(cache)!r}, "--quiet"]) == 0
        assert main(["backends"]) == 0
        """,
        python,
        DATALOADERS_CACHE=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [one for one in lines if one.startswith("status")] == ["status 2", "status 0"]
    assert done.stderr.startswith("dataloaders check: the bottleneck check needs psutil and rich, ")
    assert done.stderr.endswith("; install them with: pip install 'gpu-dataloaders[check]'\n")
    assert "tensor:uint8" in done.stdout
    assert f"{cache} is whole" in done.stdout
    assert "nvidia-dali-cuda130" in done.stdout


def test_a_cache_is_built_with_h5py_alone(tmp_path):
    (tmp_path / "data.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "train = TensorDataset(torch.zeros(8, 3))\n"
    )
    build = "['cache', 'build', 'data.py:train', 'train.h5', '--workers', '0']"
    source = f"from dataloaders.cli import main\nassert main({build}) == 0\n"
    done = run(tmp_path, source, base_environment.make(tmp_path / "h5", "h5"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("build  8 samples, about ")
    assert done.stdout.startswith("train.h5: 8 samples, ")


BUILD = """
from dataloaders.cache import precompute
from helpers.datasets import CASES

precompute(CASES["large tensors"]()["dataset"], "x.h5", num_workers=0)
"""


def test_a_script_ends_cleanly_while_its_iterators_live(python, tmp_path):
    # Built without torchvision, as it is read. Only building needs h5py.
    builder = base_environment.make(tmp_path / "with h5py", "h5")
    built = run(tmp_path, BUILD, builder, PYTHONPATH=str(Path(__file__).parent))
    assert built.returncode == 0, built.stderr
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

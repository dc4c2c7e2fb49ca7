"""DALI that is missing, too old or broken: the error says which line installs the one that fits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "nvidia.dali" or name.startswith("nvidia.dali."):
            raise ModuleNotFoundError("No module named 'nvidia.dali'", name=name)

sys.meta_path.insert(0, Hide())
"""

OTHER = """
import sys, types
import nvidia
sys.modules["nvidia.dali"] = nvidia.dali = types.ModuleType("nvidia.dali")
nvidia.dali.__version__ = {version!r}
"""

USED = """
import torch
torch.version.cuda = {cuda!r}
from torch.utils.data import TensorDataset
from dataloaders import DataLoader
loader = DataLoader(TensorDataset(torch.zeros(3)), backend="dali")
iter(loader)
"""


def told(before, cuda=torch.version.cuda):
    """What is told of backend="dali" in a process where ``before`` has run."""
    script = before + USED.format(cuda=cuda)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("cuda", "package"),
    [
        ("13.0", "nvidia-dali-cuda130"),
        ("12.8", "nvidia-dali-cuda120"),
        (None, "nvidia-dali-cuda130"),
    ],
)
@pytest.mark.nightly
def test_without_dali_the_error_is_the_line_that_installs_it(cuda, package):
    last = told(HIDDEN, cuda)
    assert last.startswith("dataloaders.errors.MissingDependency: ")
    assert "backend='dali' needs NVIDIA DALI, which cannot be imported" in last
    assert last.endswith(f"install it with: pip install --upgrade {package}")


@pytest.mark.parametrize("version", ["1.50.0", "0.9", "unknown"])
@pytest.mark.nightly
def test_one_that_is_too_old_is_named_with_its_version(version):
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    last = told(OTHER.format(version=version), "13.0")
    assert f"backend='dali' needs NVIDIA DALI 2.0 or newer, and {version} is installed" in last
    assert last.endswith("install it with: pip install --upgrade nvidia-dali-cuda130")


@pytest.mark.nightly
def test_what_can_run_here_is_told_without_dali():
    script = f"{HIDDEN}\nfrom dataloaders.cli import main\nsys.exit(main(['backends']))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "nvidia-dali-cuda1" in done.stdout

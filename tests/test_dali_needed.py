"""DALI that is missing, too old or broken: the error says which line installs the one that fits."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # a fresh interpreter each

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


MISSING = "needs NVIDIA DALI, which cannot be imported"


@pytest.mark.parametrize(
    ("before", "cuda", "why", "package"),
    [
        (HIDDEN, "13.0", MISSING, "cuda130"),
        (HIDDEN, "12.8", MISSING, "cuda120"),
        (HIDDEN, None, MISSING, "cuda130"),
        (OTHER.format(version="1.50.0"), "13.0", "2.0 or newer, and 1.50.0 is", "cuda130"),
        (OTHER.format(version="unknown"), "13.0", "2.0 or newer, and unknown is", "cuda130"),
    ],
)
def test_the_error_is_the_line_that_installs_one_that_fits(before, cuda, why, package):
    if before != HIDDEN:
        pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    script = before + USED.format(cuda=cuda)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dataloaders.errors.MissingDependency: backend='dali'")
    assert why in last
    assert last.endswith(f"install it with: pip install --upgrade nvidia-dali-{package}")

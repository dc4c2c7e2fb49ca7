"""Names of backends: entry points, missing packages, a user's own ``backends`` package."""

import pytest
import torch.utils.data

from dataloaders import DataLoader, wrap
from dataloaders.errors import BackendWarning, CacheError, UnknownBackend
from helpers.datasets import MapDataset, tensor_sample
from helpers.processes import run_script

DATASET = MapDataset(tensor_sample)
VARIABLE = "DATALOADERS_BACKEND"
THEIRS = """
from dataclasses import dataclass
from backends.stock import Stock
from dataloaders import Plan

@dataclass(frozen=True)
class Mine(Stock):
    name = "mine"

    def explain(self, loader):
        return Plan(self.name)

@dataclass(frozen=True)
class Refuses(Mine):
    def explain(self, loader):
        return Plan(self.name, obstacle="mine cannot read this; use another")
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A third party's distribution: metadata, entry points and a module."""
    info = tmp_path / "their_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-backends\nVersion: 1.0\n")
    points = {"gone": "no_such_module:Mine", "renamed": "their_backend:Renamed"}
    points |= dict.fromkeys(("stock", "mine"), "their_backend:Mine")
    points["refuses"] = "their_backend:Refuses"
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[dataloaders.backends]", *lines]))
    (tmp_path / "their_backend.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_third_party_backends_register_by_entry_point():
    loader = DataLoader(DATASET, backend="mine")
    assert len(list(loader)) == len(DATASET)
    assert loader.explain().backend == "mine"
    assert DataLoader(DATASET, backend="stock").explain().backend == "stock"  # ours win
    with pytest.raises(ImportError, match=r"backend='gone' needs no_such_module"):
        DataLoader(DATASET, backend="gone")
    with pytest.raises(UnknownBackend, match=r"registered by their-backends .* no 'Renamed'"):
        DataLoader(DATASET, backend="renamed")
    with pytest.raises(ValueError, match=r"'stok' is not a .*: stock, prefetch, .*mine"):
        DataLoader(DATASET, backend="stok")


@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        ("raise ImportError('no DALI here')", "which cannot be imported (no DALI here)"),
        ("__version__ = '0.9.3'", "needs NVIDIA DALI 2.0 or newer, and 0.9.3 is installed"),
        ("__version__ = 'unknown'", "2.0 or newer, and unknown is"),
    ],
    ids=["missing", "too old", "odd"],
)
def test_a_missing_or_old_dali_names_the_install_command(stand_in, says, tmp_path):
    (tmp_path / "nvidia" / "dali").mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").write_text("")
    (tmp_path / "nvidia" / "dali" / "__init__.py").write_text(stand_in)
    done = run_script(
        tmp_path,
        """
        import torch
        from dataloaders import DataLoader
        from dataloaders.errors import MissingDependency
        for cuda in ("13.0", "12.8", None):
            torch.version.cuda = cuda
            try:
                DataLoader(range(8), backend="dali").explain()
                iter(DataLoader(range(8), backend="dali"))
            except MissingDependency as error:
                print(error)
        """,
    )
    lines = done.stdout.splitlines()
    for line, package in zip(lines, ("cuda130", "cuda120", "cuda130"), strict=True):
        assert line.startswith("backend='dali' needs NVIDIA DALI")
        assert says in line
        assert line.endswith(f"install it with: pip install --upgrade nvidia-dali-{package}")


SHADOWED = """
import sys
import torch
from dataloaders import DataLoader
import backends
from backends import vgg

if __name__ == "__main__":
    batches = list(DataLoader(range(8), 4, backend="stock"))
    if {spawns}:
        spawned = DataLoader(range(8), 4, num_workers=1, multiprocessing_context="spawn", seed=3)
        assert torch.equal(torch.cat(list(spawned)), torch.cat(batches))
    assert not [name for name in sys.modules if name == "backends.stock"]
    print(DataLoader(range(8), backend="stock").explain().backend, len(batches))
"""


@pytest.mark.parametrize(
    "theirs",
    [
        {"backends.py": "vgg = 1\n"},
        {"backends/vgg.py": "", "backends/stock.py": "raise RuntimeError('mine')"},
        pytest.param({"backends/__init__.py": "vgg = 1\n"}, marks=pytest.mark.nightly),
    ],
    ids=["module", "folder without __init__", "package"],
)
def test_a_users_own_backends_package_hides_nothing(theirs, tmp_path):
    (tmp_path / "backends").mkdir()
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    done = run_script(tmp_path, SHADOWED.format(spawns="backends/__init__.py" in theirs))
    assert done.stdout == "stock 2\n"


# The environment


def test_the_variable_names_the_backend_of_loaders_without_one(monkeypatch):
    loader = DataLoader(DATASET)
    for value, expected in (("", "stock"), ("synthetic", "synthetic")):
        monkeypatch.setenv(VARIABLE, value)
        assert loader.explain().backend == expected
        assert DataLoader(DATASET, backend="stock").explain().backend == "stock"
    monkeypatch.setenv(VARIABLE, "stok")
    assert len(list(torch.utils.data.DataLoader(DATASET))) == len(DATASET)
    with pytest.raises(UnknownBackend, match=rf"\${VARIABLE}: .*'stok' is not a backend"):
        iter(loader)
    assert VARIABLE in loader.explain().obstacle


@pytest.mark.usefixtures("installed")
def test_a_backend_from_the_variable_that_cannot_serve_warns_once(monkeypatch):
    monkeypatch.setenv(VARIABLE, "refuses")
    for loader in (DataLoader(DATASET), wrap(torch.utils.data.DataLoader(DATASET))):
        message = rf"\${VARIABLE}=refuses cannot serve .* stays stock: mine cannot read this"
        with pytest.warns(BackendWarning, match=message) as caught:
            first = list(loader)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert len(first) == len(list(loader)) == len(DATASET)  # warns no second time
        plan = loader.explain()
        assert plan.backend == "stock"
        assert "stays stock" in str(plan)


def random_sample(index):
    return torch.rand(2)


def test_a_loader_stays_stock_if_the_variables_backend_refuses_its_dataset(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "h5")
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path))
    dataset = MapDataset(random_sample)
    loader = DataLoader(dataset, batch_size=4)
    torch.manual_seed(1)
    message = rf"\${VARIABLE}=h5 cannot serve .* stays stock: MapDataset draws random numbers"
    with pytest.warns(BackendWarning, match=message) as caught:
        batches = [*loader, *loader]  # warns no second time
    assert [one.filename for one in caught] == [__file__]
    torch.manual_seed(1)
    same = torch.utils.data.DataLoader(dataset, batch_size=4)
    torch.testing.assert_close(batches, [*same, *same], rtol=0, atol=0)
    with pytest.raises(CacheError, match="draws random numbers"):
        iter(DataLoader(dataset, backend="h5"))

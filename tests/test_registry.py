"""Names of backends: who is found, what is said of those who are not, and whose folder wins."""

from __future__ import annotations

import pytest
import torch.utils.data

import backends.stock
from dataloaders import DataLoader, registry, wrap
from dataloaders.errors import BackendWarning, DataLoadersError, MissingDependency, UnknownBackend
from helpers.datasets import MapDataset, tensor_sample
from helpers.processes import run_script

DATASET = MapDataset(tensor_sample)
VARIABLE = "DATALOADERS_BACKEND"


def install(folder, points, **modules):
    """An installed distribution in ``folder``: metadata, entry points and modules."""
    info = folder / "their_backends-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dataloaders.backends]\n{points}\n")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


THEIRS = """
from dataclasses import dataclass
from backends.stock import Stock

@dataclass(frozen=True)
class Mine(Stock):
    name = "mine"
"""


def test_ours_are_found_by_name():
    assert registry.load("stock") is backends.stock.Stock
    assert list(registry.entries())[:4] == ["stock", "prefetch", "h5", "dali"]
    for name, entry in registry.entries().items():
        assert entry.name == name
        assert entry.summary


def test_an_unknown_name_is_answered_with_the_names_there_are():
    with pytest.raises(
        UnknownBackend, match=r"backend='stok' is not a backend; .*: stock, prefetch"
    ):
        DataLoader(DATASET, backend="stok")
    assert issubclass(UnknownBackend, ValueError)
    assert issubclass(UnknownBackend, DataLoadersError)


@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        ("raise ImportError('no DALI here')", "which cannot be imported (no DALI here)"),
        ("__version__ = '0.9.3'", "needs NVIDIA DALI 2.0 or newer, and 0.9.3 is installed"),
    ],
    ids=["missing", "too old"],
)
def test_a_missing_or_old_dali_is_answered_with_the_line_that_installs_it(stand_in, says, tmp_path):
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
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line, package in zip(lines, ("cuda130", "cuda120", "cuda130"), strict=True):
        assert says in line
        assert line.endswith(f"install it with: pip install --upgrade nvidia-dali-{package}")


def test_a_third_party_registers_through_its_entry_point(tmp_path, monkeypatch):
    install(tmp_path, "mine = their_backend:Mine", their_backend=THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = registry.entries()["mine"]
    assert (entry.origin, entry.target) == ("their-backends", "their_backend:Mine")
    loader = DataLoader(DATASET, backend="mine")
    assert len(list(loader)) == len(DATASET)
    assert loader.explain().backend in ("mine", "stock")


def test_ours_win_over_a_third_party_and_its_mistakes_name_it(tmp_path, monkeypatch):
    points = "stock = their_backend:Mine\ngone = no_such_module:Mine\n"
    install(tmp_path, points + "renamed = their_backend:Renamed", their_backend=THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.load("stock") is backends.stock.Stock
    with pytest.raises(MissingDependency, match=r"backend='gone' needs no_such_module") as caught:
        DataLoader(DATASET, backend="gone")
    assert isinstance(caught.value, ImportError)
    with pytest.raises(UnknownBackend, match=r"registered by their-backends .* no 'Renamed'"):
        DataLoader(DATASET, backend="renamed")


SHADOWED = """
import sys
import torch
from dataloaders import DataLoader
import backends

if __name__ == "__main__":
    assert backends.OWNER == "the user's", backends
    batches = torch.cat(list(DataLoader(range(8), batch_size=4, backend="stock")))
    spawned = DataLoader(range(8), 4, num_workers=1, multiprocessing_context="spawn", seed=3)
    assert torch.equal(torch.cat(list(spawned)), batches)
    assert not [name for name in sys.modules if name.startswith("backends.")]
    print(DataLoader(range(8), backend="stock").explain().backend, sorted(batches.tolist()))
"""


@pytest.mark.nightly
def test_a_backends_package_of_the_users_own_hides_nothing(tmp_path):
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text('OWNER = "the user\'s"\n')
    done = run_script(tmp_path, SHADOWED)
    assert done.stdout.startswith("stock "), done.stderr


@pytest.mark.parametrize("kind", ["module", "folder without __init__"])
def test_nor_does_another_thing_of_that_name(tmp_path, kind):
    if kind == "module":
        (tmp_path / "backends.py").write_text("vgg = 1\n")
    else:
        (tmp_path / "backends").mkdir()
        (tmp_path / "backends" / "vgg.py").write_text("")
        (tmp_path / "backends" / "stock.py").write_text("raise RuntimeError('mine')")
    done = run_script(
        tmp_path,
        """
        from dataloaders import DataLoader
        from backends import vgg
        print(len(list(DataLoader(range(8), backend="stock"))))
        """,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "8"), done.stderr


class TestEnvironment:
    def test_it_names_the_backend_of_our_loaders_that_name_none(self, monkeypatch):
        loader = DataLoader(DATASET)
        for value, expected in (("", "stock"), ("synthetic", "synthetic")):
            monkeypatch.setenv(VARIABLE, value)
            assert loader.explain().backend == expected
            assert DataLoader(DATASET, backend="stock").explain().backend == "stock"
        monkeypatch.setenv(VARIABLE, "no such backend")
        assert len(list(torch.utils.data.DataLoader(DATASET))) == len(DATASET)

    def test_an_unknown_name_names_the_variable(self, monkeypatch):
        monkeypatch.setenv(VARIABLE, "stok")
        loader = DataLoader(DATASET)
        with pytest.raises(UnknownBackend, match=rf"\${VARIABLE}: .*'stok' is not a backend"):
            iter(loader)
        plan = loader.explain()
        assert not plan.runs
        assert VARIABLE in str(plan)

    def test_one_that_cannot_serve_leaves_the_loader_stock_with_one_warning(
        self, tmp_path, monkeypatch
    ):
        source = THEIRS + (
            "    def explain(self, loader):\n"
            "        from dataloaders import Plan\n"
            "        return Plan(self.name, obstacle='mine cannot read this; use another')\n"
        )
        install(tmp_path, "refuses = refusing_backend:Mine", refusing_backend=source)
        monkeypatch.syspath_prepend(str(tmp_path))
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

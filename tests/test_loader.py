"""Names, defaults and accepted combinations are torch's own; names of backends."""

import inspect
import itertools
import warnings

import pytest
import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler

from dataloaders import DataLoader, wrap
from dataloaders.errors import BackendWarning, CacheError, OptionError, UnknownBackend
from helpers.datasets import CountingStream, MapDataset, ShortStream, integer_sample
from helpers.processes import run_script

TorchLoader = torch.utils.data.DataLoader
OURS = {"backend": None, "device": None, "seed": None, "on_error": "raise"}
DATASET = MapDataset(integer_sample)

# Pairs of arguments are combined with each other: three or more only repeat the first refusal.
VALUES = {
    "batch_size": [1, 4, None, 0, -1, 2.5, True, "3"],
    "shuffle": [None, True, False, 1],
    "sampler": [None, [2, 0], SequentialSampler(DATASET)],
    "batch_sampler": [None, [[1], [2, 0]], BatchSampler(SequentialSampler(DATASET), 2, False)],
    "num_workers": [0, 1, -1, "two", None],
    "collate_fn": [None, list],
    "pin_memory": [False, True],
    "drop_last": [False, True, 1],
    "timeout": [0, 3, -1, 0.5],
    "multiprocessing_context": [None, "fork", "nonsense", 3],
    "prefetch_factor": [None, 2, 0, -1],
    "persistent_workers": [False, True],
    "pin_memory_device": ["", "cuda"],
    "in_order": [True, False],
}
LONGER = [
    {"num_workers": 1, "persistent_workers": True, "timeout": 2, "prefetch_factor": 4},
    {"num_workers": 1, "multiprocessing_context": "spawn", "in_order": False},
    {"batch_size": None, "sampler": [1], "collate_fn": list},
    {"batch_size": 2, "shuffle": True, "drop_last": True, "pin_memory": True},
]


def test_torchs_parameters_come_first_and_ours_are_keyword_only():
    theirs = list(inspect.signature(TorchLoader).parameters.values())
    parameters = list(inspect.signature(DataLoader).parameters.values())
    first, ours = parameters[: len(theirs)], parameters[len(theirs) :]
    assert [(p.name, p.kind, p.default) for p in first] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert {p.name: p.default for p in ours} == OURS
    assert {p.kind for p in ours} == {inspect.Parameter.KEYWORD_ONLY}


def test_our_arguments_are_the_only_other_attributes():
    for given in ({}, {"backend": "stock", "device": "cpu", "seed": 4}):
        ours, theirs = DataLoader(DATASET, **given), TorchLoader(DATASET)
        list(ours)  # what an epoch leaves behind is private too
        public = {name for name in vars(ours) if not name.startswith("_")}
        assert public == {name for name in vars(theirs) if not name.startswith("_")} | set(given)
        assert all(getattr(ours, name) == value for name, value in given.items())
        for name in inspect.signature(DataLoader).parameters:
            assert hasattr(ours, name) or name == "shuffle"


def outcome(loader_class, dataset, arguments):
    """The attributes of the loader that was made, or the error's type and message."""
    try:
        loader = loader_class(dataset, **arguments)
    except Exception as error:
        return type(error), str(error)
    names = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "drop_last", "timeout")
    return {name: getattr(loader, name) for name in names}


@pytest.mark.filterwarnings("ignore")  # compared in test_the_same_warnings
@pytest.mark.parametrize("dataset", [DATASET, CountingStream()], ids=["map", "stream"])
def test_arguments_are_accepted_or_refused_as_torch_does(dataset):
    pairs = [
        {one: first, other: second}
        for one, other in itertools.combinations(VALUES, 2)
        for first, second in itertools.product(VALUES[one], VALUES[other])
    ]
    made = []
    for arguments in pairs + LONGER:
        theirs = outcome(TorchLoader, dataset, arguments)
        assert outcome(DataLoader, dataset, arguments) == theirs, arguments
        made.append(isinstance(theirs, dict))
    assert sum(made) > 100
    assert dataset is not DATASET or all(made[-len(LONGER) :])


def test_the_same_warnings():
    seen = []
    for loader_class in (DataLoader, TorchLoader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader_class(DATASET, num_workers=4096)
            list(loader_class(DATASET, pin_memory=True, pin_memory_device="cuda"))
            stream = loader_class(ShortStream(), batch_size=2)
            len(stream)
            list(stream)
        seen.append([(w.category, str(w.message).partition("object at")[0]) for w in caught])
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 2


def test_it_is_a_torch_loader_whose_attributes_are_guarded_as_torchs_are():
    loader, theirs = (kind(DATASET, batch_size=4) for kind in (DataLoader, TorchLoader))
    for name in (
        *("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"),
    ):
        messages = []
        for each in (loader, theirs):
            with pytest.raises(ValueError, match="should not be set after") as caught:
                setattr(each, name, getattr(each, name))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    loader.collate_fn, loader.seed = list, 3
    assert next(iter(loader)) == [0, 3, 6, 9]
    assert isinstance(DataLoader[int](DATASET), TorchLoader)
    assert DataLoader.__parameters__ == DataLoader.__orig_bases__[0].__parameters__


def test_our_own_options_are_checked():
    for arguments, message in (
        ({"backend": 3}, r"backend=3: must be a name"),
        ({"backend": "no such"}, r"backend='no such' is not a backend; the names are: stock"),
        ({"device": "gpu"}, r"device='gpu': must be a torch device"),
        ({"device": 1.5}, r"device=1\.5: must be a torch device"),
        ({"seed": "7"}, r"seed='7': must be an int"),
        ({"seed": True}, r"seed=True: must be an int"),
        ({"seed": 2**64}, r"must fit in 64 bits"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            DataLoader(DATASET, **arguments)
        assert isinstance(caught.value, OptionError) or arguments.get("backend") == "no such"


# Names of backends: entry points, missing packages, a user's own ``backends`` package


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


WITHOUT_DALI = """
import torch
from dataloaders import DataLoader
from dataloaders.errors import MissingDependency
for cuda in ("13.0", "12.8", None):
    torch.version.cuda = cuda
    try:
        loader = DataLoader(range(8), backend="dali")
        loader.explain(), iter(loader)
    except MissingDependency as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        ("raise ImportError('no DALI here')", "which cannot be imported (no DALI here)"),
        ("__version__ = '0.9.3'", "needs NVIDIA DALI 2.0 or newer, and 0.9.3 is installed"),
        ("__version__ = 'unknown'", "2.0 or newer, and unknown is"),
    ],
)
def test_a_missing_or_old_dali_names_the_install_command(stand_in, says, tmp_path):
    (tmp_path / "nvidia" / "dali").mkdir(parents=True)
    (tmp_path / "nvidia" / "__init__.py").touch()
    (tmp_path / "nvidia" / "dali" / "__init__.py").write_text(stand_in)
    lines = run_script(tmp_path, WITHOUT_DALI).stdout.splitlines()
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


@pytest.mark.parametrize(
    ("dataset", "error", "why"),
    [
        (MapDataset("drawing"), CacheError, "MapDataset draws random numbers"),
        (
            MapDataset("array", failing=[9]),  # which the sampler leaves out
            ValueError,
            r"ValueError\('no sample 9 today'\); .* sample 9 .*cache",
        ),
    ],
)
def test_a_loader_stays_stock_if_the_variables_backend_refuses_its_dataset(
    monkeypatch, tmp_path, dataset, error, why
):
    monkeypatch.setenv(VARIABLE, "h5")
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path))
    loader = DataLoader(dataset, batch_size=4, sampler=range(8))
    torch.manual_seed(1)
    message = rf"\${VARIABLE}=h5 cannot serve .* stays stock: {why}"
    with pytest.warns(BackendWarning, match=message) as caught:
        batches = [*loader, *loader]  # warns no second time
    assert [one.filename for one in caught] == [__file__]
    torch.manual_seed(1)
    same = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=range(8))
    torch.testing.assert_close(batches, [*same, *same], rtol=0, atol=0)
    with pytest.raises(error):
        iter(DataLoader(dataset, backend="h5"))

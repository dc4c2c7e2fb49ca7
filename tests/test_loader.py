"""Names, defaults and accepted combinations are torch's own; names of backends."""

import inspect
import itertools

import pytest
import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler

from dataloaders import DataLoader, wrap
from dataloaders.errors import BackendWarning, OptionError, UnknownBackend
from helpers.datasets import CountingStream, MapDataset, integer_sample
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
    loader = DataLoader[int](DATASET, batch_size=4)
    assert isinstance(loader, TorchLoader)
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 3
    loader.collate_fn, loader.seed = list, 3
    assert next(iter(loader)) == [0, 3, 6, 9]


def outcome(loader_class, dataset, arguments):
    """The attributes of the loader that was made, or the error's type and message."""
    try:
        loader = loader_class(dataset, **arguments)
    except Exception as error:
        return type(error), str(error)
    names = ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "drop_last", "timeout")
    return {name: getattr(loader, name) for name in names}


@pytest.mark.filterwarnings("ignore")
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


def test_our_own_options_are_checked():
    for arguments, message in (
        ({"backend": 3}, r"backend=3: must be a name"),
        ({"backend": "no such"}, r"backend='no such' is not a backend; the names are: stock"),
        ({"device": "gpu"}, r"device='gpu': must be a torch device"),
        ({"seed": True}, r"seed=True: must be an int"),
        ({"seed": 2**64}, r"must fit in 64 bits"),
        ({"on_error": "skip"}, "only 'raise' exists"),
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
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A third party's distribution: metadata, entry points and a module."""
    info = tmp_path / "their_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-backends\nVersion: 1.0\n")
    points = {"gone": "no_such_module:Mine"}
    points |= dict.fromkeys(("stock", "mine"), "their_backend:Mine")
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
    with pytest.raises(ValueError, match=r"'stok' is not a .*: stock, prefetch, .*mine"):
        DataLoader(DATASET, backend="stok")


SHADOWED = """
import sys
from dataloaders import DataLoader
import backends
from backends import vgg

assert len(list(DataLoader(range(8), 4, backend="stock"))) == 2
assert "backends.stock" not in sys.modules
print(DataLoader(range(8), backend="stock").explain().backend)
"""


@pytest.mark.parametrize(
    "theirs",
    [
        {"backends.py": "vgg = 1\n"},
        {"backends/vgg.py": "", "backends/stock.py": "raise RuntimeError('mine')"},
    ],
)
def test_a_users_own_backends_package_hides_nothing(theirs, tmp_path):
    (tmp_path / "backends").mkdir()
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    assert run_script(tmp_path, SHADOWED).stdout == "stock\n"


# The environment


def test_the_variable_names_the_backend_of_loaders_without_one(monkeypatch):
    loader = DataLoader(DATASET)
    for value, expected in (("", "stock"), ("synthetic", "synthetic")):
        monkeypatch.setenv(VARIABLE, value)
        assert loader.explain().backend == expected
        assert DataLoader(DATASET, backend="stock").explain().backend == "stock"
    monkeypatch.setenv(VARIABLE, "stok")
    assert len(list(TorchLoader(DATASET))) == len(DATASET)
    with pytest.raises(UnknownBackend, match=rf"\${VARIABLE}: .*'stok' is not a backend"):
        iter(loader)
    assert VARIABLE in loader.explain().obstacle


def test_a_backend_from_the_variable_that_cannot_serve_warns_once(monkeypatch):
    monkeypatch.setenv(VARIABLE, "synthetic")
    for loader in (DataLoader(CountingStream()), wrap(TorchLoader(CountingStream()))):
        message = rf"\${VARIABLE}=synthetic cannot serve .* stays stock: CountingStream is iterable"
        with pytest.warns(BackendWarning, match=message) as caught:
            first = list(loader)
        assert [one.filename for one in caught] == [__file__]
        assert len(first) == len(list(loader)) == 11  # warns no second time
        plan = loader.explain()
        assert plan.backend == "stock"
        assert "stays stock" in str(plan)


def test_a_loader_stays_stock_if_the_variables_backend_refuses_its_dataset(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "h5")
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path))
    dataset = MapDataset("array", failing=[9])  # which the sampler leaves out
    loader = DataLoader(dataset, batch_size=4, sampler=range(8))
    message = (
        rf"\${VARIABLE}=h5 cannot .* stays stock: ValueError\('no sample 9 .* sample 9 .*cache"
    )
    with pytest.warns(BackendWarning, match=message) as caught:
        batches = [*loader, *loader]  # warns no second time
    assert [one.filename for one in caught] == [__file__]
    same = TorchLoader(dataset, batch_size=4, sampler=range(8))
    torch.testing.assert_close(batches, [*same, *same], rtol=0, atol=0)
    with pytest.raises(ValueError, match="no sample 9"):
        iter(DataLoader(dataset, backend="h5"))

"""The names, defaults and accepted combinations are torch's own."""

import inspect
import itertools
import warnings

import pytest
import torch.utils.data
from torch.utils.data import BatchSampler, SequentialSampler

from dataloaders import DataLoader
from dataloaders.errors import OptionError
from helpers.datasets import CountingStream, MapDataset, ShortStream, integer_sample

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


@pytest.mark.parametrize("dataset", [DATASET, CountingStream()], ids=["map", "stream"])
def test_arguments_are_accepted_or_refused_as_torch_does(dataset):
    pairs = [
        {one: first, other: second}
        for one, other in itertools.combinations(VALUES, 2)
        for first, second in itertools.product(VALUES[one], VALUES[other])
    ]
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compared in test_the_same_warnings
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

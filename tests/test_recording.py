"""Datasets of all kinds, recorded and replayed: equal to the bit, and so are the generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from helpers import recorded
from helpers.codes import CODES, COLLATIONS, exact_types, padded
from helpers.compare import assert_same, seed_everything
from helpers.recorded import Code, as_recorded, equal, is_recorded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CODES)
def test_a_recorded_sample_is_the_datasets_own(name: str) -> None:
    function, how = CODES[name]
    dataset = Code(function)
    expected = [dataset[index] for index in range(len(dataset))]
    made, count = as_recorded(dataset)
    assert [equal(*pair) for pair in zip(made, expected, strict=True)] == [True] * len(dataset)
    if how == "all":
        looks = [recorded.describe_sample(dataset, index)["looks"] for index in range(len(dataset))]
        assert (count, looks) == (len(dataset), [[]] * len(dataset))
    else:
        assert (count > 0) == (how == "some")
    tailed, _ = as_recorded(dataset, "tail")
    assert all(map(equal, tailed, expected))


def test_the_docs_say_what_is_recorded() -> None:
    page = (Path(__file__).parents[1] / "docs" / "dali.md").read_text()
    table = page.split("<!-- tests/test_recording.py -->")[1].split("<!-- end -->")[0]
    rows = [line.split(" | ") for line in table.strip().splitlines()[2:]]
    told = {name.strip("| "): how for names, how, _ in rows for name in names.split(", ")}
    told.pop("by torchcodec" if find_spec("torchcodec") is None else "", None)
    assert told == {name.replace("_", " "): how for name, (_, how) in CODES.items()}


# Through torch's workers


class Labelled:
    def __init__(self, name: str = "v1_train") -> None:
        self.name = name

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        return CODES[self.name][0](index % 5), index % 7


class Bulk(Labelled):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        yield from (Labelled()[index] for index in range(worker.id if worker else 0, 13, 2))


def shown(worker_id: int) -> None:
    worker = torch.utils.data.get_worker_info()
    assert worker is not None
    assert type(worker.dataset) in (Labelled, *map(type, DATASETS))
    random.seed(worker_id)


JOINED = ConcatDataset([Labelled(), Labelled("arrays")])
DATASETS = Bulk(), Stream(), Subset(Labelled(), range(3, 9)), JOINED


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [*((Labelled(), function) for function in COLLATIONS), *((each, None) for each in DATASETS)],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_torchs(dataset: Any, collate_fn: Any, workers: int) -> None:
    streams = isinstance(dataset, IterableDataset)
    options = {"num_workers": workers, "worker_init_fn": shown, "shuffle": not streams or None}
    loader: Any = DataLoader(dataset, 4, collate_fn=collate_fn, **options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers: sums of floats depend on it
    try:
        seed_everything()
        expected = list(loader)
        seed_everything()
        sent = list(recorded.recording(loader))
        assert_same([recorded.finished(batch) for batch in sent], expected)
    finally:
        torch.set_num_threads(threads)
    fails = collate_fn in (padded, exact_types)
    assert [is_recorded(batch) for batch in sent] == [not fails] * len(expected)
    if not streams and not fails:
        before = torch.get_rng_state()
        assert_same([recorded.ask_again(batch.again, loader) for batch in sent], expected)
        assert torch.equal(torch.get_rng_state(), before)

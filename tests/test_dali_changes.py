"""backend="dali" from epoch to epoch: what its owner changes on a dataset counts, as under stock.

And the ways in which batches may be asked for: any index, any batch, any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable
from helpers.compare import assert_same
from helpers.photos import SIZE, Digits, Files, Opened, Tiny, folder, picture, write_folder

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali, line

CROP = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
WHOLE = transforms.Compose([transforms.Resize((9, 9)), transforms.ToTensor()])

Change = Callable[[Any], Any]


def pair(dataset: Any, **options: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    options = {"batch_size": 3, "seed": 1, **options}
    ours: DataLoader[Any] = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    return DataLoader(dataset, **options), ours


def assert_noticed(data: Any, change: Change, **options: Any) -> None:
    """Batches are stock's before ``change``, and in both epochs after it."""
    theirs, ours = pair(data, **options)
    assert_same(list(ours), list(theirs))
    change(data)
    assert_same([list(ours), list(ours)], [list(theirs), list(theirs)])
    assert len(ours) == len(theirs)


def chained(data: Any) -> None:
    data.transform = WHOLE


def other_loader(data: Any) -> None:
    data.loader = lambda path: picture(len(path))


def fewer(data: Any) -> None:
    data.samples = data.samples[:4]


def more(data: Any) -> None:
    data.samples.append((data.samples[0][0], 77))


def other_files(data: Any) -> None:
    data.samples[1] = (data.samples[8][0], 5)


def replaced_files(data: Any) -> None:
    for number in (0, 7):
        picture(90 + number, 33, 44).save(data.samples[number][0])


def other_targets(data: Any) -> None:
    data.target_transform = str


def numbers_in_place(data: Any) -> None:
    data.transform.transforms[0].size = (7, 5)
    data.transform.transforms[0].scale = (0.5, 0.6)


@pytest.mark.parametrize(
    "change",
    [
        chained,
        other_loader,
        fewer,
        more,
        other_files,
        replaced_files,
        other_targets,
        numbers_in_place,
    ],
)
@pytest.mark.thinned(3)
def test_what_is_changed_on_a_folder_counts_from_the_next_epoch_on(
    change: Change, tmp_path: Path
) -> None:
    chain = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    data = ImageFolder(str(write_folder(tmp_path)), chain)
    assert_noticed(data, change, shuffle=True)


def reversed_rows(data: Any) -> None:
    data.data, data.targets = data.data[::-1].copy(), data.targets[::-1]


def four_rows(data: Any) -> None:
    data.data, data.targets = data.data[:4], data.targets[:4]


@pytest.mark.parametrize("change", [reversed_rows, four_rows, chained])
def test_what_is_changed_in_memory_counts_from_the_next_epoch_on(change: Change) -> None:
    assert_noticed(Tiny(CROP), change)


def test_pixels_of_a_type_that_no_graph_takes_are_noticed() -> None:
    data = Tiny(CROP)
    _, ours = pair(data)
    list(ours)
    data.data = data.data.astype(np.float32)
    with pytest.raises(BackendUnavailable, match="holds float32"):
        iter(ours)


def other_rows(data: Any) -> None:
    data.indices = [7, 7, 2]


def one_row_more(data: Any) -> None:
    data.indices.append(9)


def other_part(data: Any) -> None:
    data.dataset = Tiny(WHOLE)


@pytest.mark.parametrize("change", [other_rows, one_row_more, other_part])
@pytest.mark.parametrize("whole", [folder, Tiny, Opened])
@pytest.mark.thinned(3)
def test_other_rows_of_a_part_are_those_that_come(whole: Any, change: Change) -> None:
    assert_noticed(Subset(whole(CROP), [1, 2, 3, 4]), change)


def test_other_parts_of_a_row_are_those_that_come() -> None:
    whole = folder(CROP)
    data = ConcatDataset([Subset(whole, [1, 2]), Subset(whole, [3, 4])])
    theirs, ours = pair(data)
    assert_same(list(ours), list(theirs))
    data.datasets[1] = Subset(whole, [8, 9])
    assert_same(list(ours), list(theirs))
    data.datasets[0].indices = [5, 6]  # type: ignore[attr-defined]
    assert_same(list(ours), list(theirs))


class Over(torch.utils.data.Dataset[Any]):
    """A dataset of somebody's own over another one, whose images it transforms."""

    def __init__(self, inner: Any, transform: Any) -> None:
        self.dataset, self.transform = inner, transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        image, number = self.dataset[index]
        return self.transform(image), number


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.covering
def test_another_dataset_under_somebodys_own_is_seen_as_torchs_workers_see_it(
    persistent: bool,
) -> None:
    data = Over(Subset(Opened(), [1, 2, 3]), CROP)
    theirs, ours = pair(data, num_workers=1, persistent_workers=persistent)
    assert_same(list(ours), list(theirs))
    data.dataset = Subset(Opened(), [5, 6, 7])
    after = list(ours)
    assert_same(after, list(theirs))  # workers that live on have the dataset that they began with
    assert after[0][1].tolist() == ([1, 2, 3] if persistent else [5, 6, 7])


def test_equal_chains_that_become_different_in_place_are_refused() -> None:
    def chain() -> Any:
        return transforms.Compose([transforms.CenterCrop(12), transforms.ToTensor()])

    data = ConcatDataset([folder(chain()), folder(chain())])
    theirs, ours = pair(data)
    assert_same(list(ours), list(theirs))
    data.datasets[1].transform.transforms[0].size = (12, 11)  # type: ignore[attr-defined]
    with pytest.raises(BackendUnavailable, match="different transforms, and a graph serves one"):
        iter(ours)


def test_why_its_own_code_decodes_is_told() -> None:
    data = folder(CROP)
    _, ours = pair(data)
    other_loader(data)
    assert "the dataset's own code decodes: ImageFolder loads files by <lambda>" in str(
        ours.explain()
    )
    opened = str(pair(Opened(CROP))[1].explain())
    assert "own code decodes: Opened is not known to decode files; give it the methods" in opened


@pytest.mark.nightly
def test_workers_may_be_more_or_fewer_in_the_next_epoch() -> None:
    theirs, ours = pair(Opened(CROP), num_workers=1)
    for workers in (1, 2, 0):
        for loader in (theirs, ours):
            loader.num_workers = workers
            loader.prefetch_factor = 2 if workers else None
        assert_same(list(ours), list(theirs))


# What may be asked for


class Given:
    """A sampler, or a batch sampler, of what it is given."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


KEYS = [3, 1, 1, 8, 2, 0, SIZE - 1, 3]
DATASETS = pytest.mark.parametrize(
    "dataset",
    [folder, Files, Tiny, Opened, lambda chain: Subset(folder(chain), range(SIZE)[::-1])],
    ids=["files", "protocol", "memory", "own code", "subset"],
)


@DATASETS
@pytest.mark.parametrize(
    "as_index",
    [int, np.int64, np.uint8, torch.tensor, lambda key: key - SIZE, str],
    ids=["int", "np.int64", "np.uint8", "tensor", "negative", "str"],
)
@pytest.mark.parametrize("batch_size", [3, 1, None])
@pytest.mark.thinned(16)
def test_indices_of_any_type(dataset: Any, as_index: Any, batch_size: int | None) -> None:
    data = dataset(CROP)
    theirs, ours = pair(data, sampler=Given(list(map(as_index, KEYS))), batch_size=batch_size)
    assert_same(outcomes(ours), outcomes(theirs))


@DATASETS
@pytest.mark.filterwarnings("error::dataloaders.errors.BackendWarning")
@pytest.mark.parametrize("collate_fn", [None, list], ids=["torch's", "own"])
@pytest.mark.thinned(3)
def test_batches_of_any_size_and_type(dataset: Any, collate_fn: Any) -> None:
    batches = [[0], [], [1, 2, 3, 4, 5], (6, 7), range(2), np.array([3, 4]), [1] * 9, [0]]
    theirs, ours = pair(
        dataset(CROP), batch_sampler=Given(batches), batch_size=1, collate_fn=collate_fn
    )
    expected = [outcomes(theirs), outcomes(theirs)]
    assert_same([outcomes(ours), outcomes(ours)], expected)
    assert len(expected[0]) == len(batches)


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [folder, Opened])
@pytest.mark.thinned(4)
def test_a_generator_of_the_users_is_drawn_from_as_torch_does(
    dataset: Any, seed: int | None, num_workers: int
) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": seed, "num_workers": num_workers}
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    # Without a seed crops are others than stock's, so none are drawn here.
    theirs = pair(dataset(WHOLE), generator=generators[0], **options)[0]
    ours = pair(dataset(WHOLE), generator=generators[1], **options)[1]
    assert_same([list(ours), list(ours)], [list(theirs), list(theirs)])
    assert torch.equal(generators[0].get_state(), generators[1].get_state())


@pytest.mark.parametrize("dataset", [folder, Digits, Opened])
def test_an_epoch_may_be_iterated_on_another_thread_or_change_it(dataset: Any) -> None:
    chain = transforms.Compose([transforms.RandomCrop(15), transforms.ToTensor()])
    theirs, ours = pair(dataset(chain))
    whole = list(theirs)
    got: list[Any] = []
    run_in_thread(lambda: got.extend(ours))
    assert_same(got, whole)
    ours.set_epoch(0)
    batches = iter(ours)
    got = [next(batches)]
    run_in_thread(lambda: got.extend(batches))
    assert_same(got, whole)


class Marked(Opened):
    """Samples that tell what a worker_init_fn has set on the dataset."""

    mark = "none"

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), self.mark)


def marks(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.mark = f"set in worker {worker}"


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.nightly
def test_workers_of_any_start_method_see_the_users_dataset(context: str) -> None:
    theirs, ours = pair(Marked(CROP), worker_init_fn=marks, num_workers=1)
    ours.multiprocessing_context = context
    got = list(ours)
    assert_same(got, list(theirs))
    assert set(got[0][2]) == {"set in worker 0"}


def run_in_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def outcomes(loader: DataLoader[Any]) -> list[Any]:
    """What each ``next()`` gave; an error as its type and text."""
    found: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except Exception as error:
            found.append((type(error).__name__, str(error)))


# What is kept


@pytest.mark.parametrize("dataset", [folder, Tiny, Opened])
def test_the_graph_is_built_once_and_kept_across_epochs(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []

    class Counted(line.Graph):
        def __init__(self, *nodes: Any, **options: Any) -> None:
            built.append(nodes)
            super().__init__(*nodes, **options)

    monkeypatch.setattr(line, "Graph", Counted)
    chain = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    data = dataset(chain)
    _, ours = pair(data, shuffle=True, batch_size=4)  # the last batch of each epoch is short
    for epoch in range(4):
        list(ours)
        next(iter(ours))  # an epoch that a loop breaks off
        chain.transforms[0].scale = (0.1 * (epoch + 1), 1.0)
    assert len(built) == 1
    chain.transforms.insert(0, transforms.RandomHorizontalFlip())  # another step in the graph
    list(ours)
    list(ours)
    assert len(built) == 2

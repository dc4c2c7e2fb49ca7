"""Order, random states and the workers' own random streams, epoch after epoch, as torch's loader.

With persistent workers the next epoch's first tasks are guessed and begun while an epoch ends; each
sample notes by a clock that the loop sets whether that happened.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from backends.prefetch import Prefetch
from dataloaders import DataLoader
from helpers.compare import assert_same, generator_states, seed_everything
from helpers.contract import Unloadable, fails_at_five
from helpers.datasets import SIZE, CountingStream, MapDataset, integer_sample

WORKERS = 2
IN_FLIGHT = 2 * WORKERS


class Noting(MapDataset):
    """Samples with draws from every process-wide generator of the worker, and who made them when.

    Attributes:
        clock: set by the loop to the number of the epoch that it is about to begin.
        made: how many samples each worker has made.
    """

    epoch = -1

    def __init__(self, size: int = 24) -> None:
        super().__init__(integer_sample, size)
        self.clock = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.made = torch.zeros(WORKERS, dtype=torch.int64).share_memory_()

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info().id
        draws = (torch.rand(2).tolist(), float(np.random.rand()), random.random())
        sample = (super().__getitem__(index), worker, *draws, self.epoch, int(self.clock))
        self.made[worker] += 1
        return sample


class NotingEpochs(Noting):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Draws(Sampler[int]):
    """A user's sampler, which draws each index when it is asked for it."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        for _ in range(24):
            yield int(torch.randint(24, (1,)))


def batch_of(samples: Any) -> Any:
    return samples  # as they are: without tensors in shared memory


class Scene(NamedTuple):
    """One loop.

    Attributes:
        options: of a loader for the dataset that is given.
        between: what happens before each epoch.
        early: "+" for each epoch that begins early.
        wasted: guesses that turn out wrong, where none is made after the last epoch.
    """

    options: Callable[[Any], dict[str, Any]] = lambda dataset: {"shuffle": True}
    between: Callable[[Any, int], None] = lambda loader, epoch: None
    early: str = "-++"
    wasted: int | None = None


def _draw(loader: Any, epoch: int) -> None:
    if epoch == 2:
        torch.rand(3)


def _validate(loader: Any, epoch: int) -> None:
    if epoch:
        for _ in torch.utils.data.DataLoader(MapDataset(integer_sample), shuffle=True):
            pass


def _draw_ever_more(loader: Any, epoch: int) -> None:
    for _ in range(epoch * (epoch + 1) // 2):  # as many seeds as no number of them between epochs
        torch.empty((), dtype=torch.int64).random_()


def _shorten(loader: Any, epoch: int) -> None:
    loader.dataset.size = 24 - 2 * epoch


def _reseed(loader: Any, epoch: int) -> None:
    if epoch == 2:
        loader.generator.manual_seed(9)


def _other_batches(loader: Any, epoch: int) -> None:
    loader.batch_sampler.batch_size = 2 + epoch


def _set_epoch(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


def _jump(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch((0, 5, 6, 7)[epoch])


def _distributed(dataset: Any) -> dict[str, Any]:
    return {"sampler": DistributedSampler(dataset, num_replicas=2, rank=1)}


def _own_generator(dataset: Any) -> dict[str, Any]:
    return {"shuffle": True, "generator": torch.Generator()}


def _weighted(dataset: Any) -> dict[str, Any]:
    generator = torch.Generator()
    return {"sampler": WeightedRandomSampler([1.0] * 24, 24, generator=generator)}


def _subset(dataset: Any) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(SubsetRandomSampler(range(3, 20)), 3, drop_last=True)}


SCENES = {
    "in order": Scene(lambda dataset: {}, early="-+++"),
    "shuffled": Scene(early="-+++"),
    "own generator": Scene(_own_generator, early="-+++"),
    "weighted": Scene(_weighted),
    "subset": Scene(_subset),
    "distributed": Scene(_distributed, _set_epoch),
    "samples": Scene(lambda dataset: {"batch_size": None, "shuffle": True}),
    "short": Scene(lambda dataset: {"batch_size": 11, "shuffle": True}),
    "as long as what is in flight": Scene(lambda dataset: {"batch_size": 6, "shuffle": True}),
    "one sample": Scene(lambda dataset: {"sampler": SequentialSampler([0])}),
    "a validation loop": Scene(between=_validate, early="--++"),
    "ever more validation loops": Scene(between=_draw_ever_more, early="-------", wasted=3),
    "a draw": Scene(between=_draw, early="-+--", wasted=1),
    "another length": Scene(between=_shorten, early="---"),
    "another seed": Scene(_own_generator, _reseed, early="-+--", wasted=1),
    "other batches": Scene(between=_other_batches, early="---"),
    "another epoch": Scene(_distributed, _jump, early="----", wasted=1),
    "the same epoch": Scene(_distributed, early="---", wasted=1),
    "a user's sampler": Scene(lambda dataset: {"sampler": Draws()}, early="---", wasted=0),
    "without order": Scene(
        lambda dataset: {"in_order": False, "num_workers": 1}, early="---", wasted=0
    ),
}


def play(kind: Any, scene: Scene, dataset: Noting | None = None, **ours: Any) -> Any:
    """Run the epochs of ``scene``: batches, states of generators, and whether each began early.

    It did if the clock of its first sample is of the epoch before.
    """
    seed_everything()
    dataset = dataset or Noting()
    options: dict[str, Any] = {"batch_size": 2, "num_workers": WORKERS, **scene.options(dataset)}
    if "batch_sampler" in options:
        del options["batch_size"]
    loader = kind(dataset, collate_fn=batch_of, persistent_workers=True, **options, **ours)
    result, early = [], ""
    for epoch, guessed in enumerate(scene.early):
        if "backend" in ours and guessed == "+":
            wait_for_early_tasks(dataset, result[0][0], epoch, early.count("+"))
        scene.between(loader, epoch)
        dataset.clock.fill_(epoch)
        batches = list(loader)
        if options.get("batch_size", 2) is None:
            batches = [[sample] for sample in batches]
        early += "+" if batches[0][0][-1] < epoch else "-"
        notes = [[sample[:-1] for sample in batch] for batch in batches]
        result.append((notes, generator_states(loader)))
    return result, early


def wait_for_early_tasks(dataset: Noting, batches: list[Any], epochs: int, used: int) -> None:
    """Return when the workers have made the next epoch's first batches, after ``epochs`` epochs.

    Each of these ended with a guess, of which ``used`` turned out right.
    """
    sizes = [len(batch) for batch in batches]
    wanted = epochs * sum(sizes) + (epochs - used) * sum(sizes[:IN_FLIGHT])
    deadline = time.monotonic() + 20
    while int(dataset.made.sum()) < wanted:
        assert time.monotonic() < deadline, "the next epoch does not begin early"
        time.sleep(0.002)


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.thinned(8)
def test_epochs_with_persistent_workers_equal_torchs(name: str) -> None:
    scene, dataset = SCENES[name], Noting()
    expected, _ = play(torch.utils.data.DataLoader, scene)
    got, early = play(DataLoader, scene, dataset, backend="prefetch")
    assert_same(got, expected)
    assert early == scene.early
    if scene.wasted is not None:
        sizes = [[len(batch) for batch in batches] for batches, _ in got]
        wasted = scene.wasted * sum(sizes[0][:IN_FLIGHT])
        assert int(dataset.made.sum()) == sum(map(sum, sizes)) + wasted


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seeded_epoch_begins_early_and_is_stocks(seed: int) -> None:
    scene = Scene(early="-+++")
    expected, _ = play(DataLoader, scene, seed=seed)
    got, early = play(DataLoader, scene, seed=seed, backend="prefetch")
    assert_same(got, expected)
    assert early == "-+++"


def test_seeded_gathers_are_stocks() -> None:
    for workers in (0, 2):
        results = []
        for backend in ("prefetch", "stock"):
            loader = DataLoader(
                TensorDataset(torch.arange(30)),
                batch_size=4,
                shuffle=True,
                num_workers=workers,
                persistent_workers=workers > 0,
                seed=3,
                backend=backend,
            )
            seed_everything()
            results.append([(list(loader), generator_states(loader)) for _ in range(3)])
        assert_same(*results)


class EpochStream(IterableDataset[Any]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([[self.epoch]] * 4)


@pytest.mark.parametrize("context", [None, pytest.param("forkserver", marks=pytest.mark.nightly)])
def test_set_epoch_reaches_the_datasets_of_persistent_workers(context: str | None) -> None:
    options = {"batch_size": 2, "collate_fn": batch_of, "persistent_workers": True}
    options |= {"multiprocessing_context": context, "backend": "prefetch"}
    for dataset in (NotingEpochs(), EpochStream()):
        loader = DataLoader(dataset, num_workers=WORKERS if context is None else 1, **options)
        for epoch in (0, 1, 2, 7, 7, 8):
            loader.set_epoch(epoch)
            told = {
                sample[-2] if len(sample) > 1 else sample[0] for batch in loader for sample in batch
            }
            assert told == {epoch}


def test_a_datasets_next_epoch_begins_early() -> None:
    def between(loader: Any, epoch: int) -> None:
        loader.set_epoch((3, 4, 5, 9, 10)[epoch])

    _, early = play(
        DataLoader, Scene(between=between, early="-++--"), NotingEpochs(), backend="prefetch"
    )
    assert early == "-++--"


def test_a_dataset_that_no_set_epoch_was_called_for_keeps_its_own() -> None:
    result, early = play(DataLoader, Scene(), NotingEpochs(), backend="prefetch")
    assert {sample[-1] for batches, _ in result for batch in batches for sample in batch} == {-1}
    assert early == "-++"


def test_a_loop_that_stops_at_the_last_batch_has_ended_its_epoch() -> None:
    for size in (8, 24):
        dataset = Noting(size)
        loader = DataLoader(
            dataset,
            2,
            collate_fn=batch_of,
            num_workers=2,
            persistent_workers=True,
            backend="prefetch",
        )
        batches: list[Any] = []
        for epoch in range(3):
            if epoch:
                wait_for_early_tasks(dataset, batches, epoch, epoch - 1)
            dataset.clock.fill_(epoch)
            iterator = iter(loader)
            batches = [next(iterator) for _ in range(size // 2)]  # and not the end
            assert [sample[0] for batch in batches for sample in batch] == list(
                range(0, 3 * size, 3)
            )
            assert (batches[0][0][-1] < epoch) == (epoch > 0)


def test_why_the_next_epoch_does_not_begin_early() -> None:
    base = {"dataset": MapDataset(integer_sample), "num_workers": 1, "backend": "prefetch"}
    kept = {**base, "persistent_workers": True}
    not_early = "do not begin the next epoch before it is requested: "
    for options, words in (
        (kept, "the workers begin the next epoch while this one ends"),
        (base, not_early + "workers start anew for each epoch: persistent_workers=True keeps them"),
        ({**kept, "dataset": CountingStream()}, not_early + "an iterable dataset"),
        ({**kept, "in_order": False}, not_early + "in_order=False"),
        ({**kept, "sampler": Draws()}, not_early + "Draws, the sampler, is not"),
        ({**kept, "batch_sampler": [[1]]}, not_early + "list, the batch_sampler, is not"),
    ):
        assert words in str(DataLoader(**options).explain())


@pytest.mark.usefixtures("workers_end_fast")
def test_a_sample_that_cannot_be_loaded_early_fails_its_own_epoch() -> None:
    # Sample 5 fails in each epoch; the first tasks of a shuffled one may hold it.
    results = []
    for kind, ours in ((DataLoader, {"backend": "prefetch"}), (torch.utils.data.DataLoader, {})):
        seed_everything()
        dataset = MapDataset(fails_at_five, 6)
        loader = kind(dataset, shuffle=True, num_workers=2, persistent_workers=True, **ours)
        found: list[Any] = []
        for _ in range(5):
            seen: list[Any] = []
            with pytest.raises(Unloadable) as caught:
                seen.extend(batch.tolist() for batch in loader)
            found.append((seen, str(caught.value)))
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.usefixtures("workers_end_fast")
def test_workers_whose_set_up_failed_go_on_as_torchs_do() -> None:
    # torch reports the failure with a worker's first task, and resumes the worker at iter().
    dataset = MapDataset(integer_sample, 2)
    results = []
    for kind, ours in ((DataLoader, {"backend": "prefetch"}), (torch.utils.data.DataLoader, {})):
        options = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": fails}
        loader = kind(dataset, batch_size=2, **options, **ours)
        with pytest.raises(Unloadable, match="worker 0"):
            next(iter(loader))
        results.append([[batch.tolist() for batch in loader] for _ in range(2)])
    assert results[0] == results[1] == [[[0, 3]]] * 2


def fails(worker: int) -> None:
    raise Unloadable(f"worker {worker}")


# Programs of loops that break off, over all kinds of loaders


class Raises(Sampler[int]):
    """Raises behind a few indices, drawn one by one, and then goes on."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        for number in range(20):
            if number == self.after:
                raise Unloadable("the sampler")
            yield int(torch.randint(SIZE, (1,)))


SAMPLERS: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "in order": lambda dataset, own: SequentialSampler(dataset),
    "shuffled": lambda dataset, own: RandomSampler(dataset, num_samples=20),
    "shuffled, own generator": lambda dataset, own: RandomSampler(dataset, generator=own),
    "replacement": lambda dataset, own: RandomSampler(
        dataset, replacement=True, num_samples=20, generator=own
    ),
    "as it goes": lambda dataset, own: Draws(),
    "raises": lambda dataset, own: Raises(after=7),
    "raises early": lambda dataset, own: Raises(after=1),
}

PROGRAMS = st.fixed_dictionaries(
    {
        "sampler": st.sampled_from(list(SAMPLERS)),
        "workers": st.integers(0, 2),
        "batch_size": st.integers(1, 4),
        "prefetch_factor": st.integers(1, 3),
        "persistent": st.booleans(),
        "tensors": st.booleans(),
        "epochs": st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=1, max_size=4),
    }
)


def run(program: dict[str, Any], kind: Any, **ours: Any) -> list[Any]:
    """Batches or the error of each epoch, and the generators' states after it."""
    seed_everything()
    own = torch.Generator().manual_seed(5)
    numbers = torch.arange(24) * 3
    data: Any = TensorDataset(numbers) if program["tensors"] else MapDataset(integer_sample, 24)
    options: dict[str, Any] = {"num_workers": program["workers"]}
    if program["workers"]:
        options["prefetch_factor"] = program["prefetch_factor"]
        options["persistent_workers"] = program["persistent"]
    sampler = SAMPLERS[program["sampler"]](data, own)
    loader = kind(data, sampler=sampler, batch_size=program["batch_size"], **options, **ours)
    seen: list[Any] = []
    for most in program["epochs"]:
        try:
            for batch in itertools.islice(loader, most):
                seen.append(torch.as_tensor(batch[0] if program["tensors"] else batch).tolist())
        except Unloadable as error:
            seen.append(str(error))
        # Without workers tensors are gathered ahead: their sampler is ahead of torch's at a break.
        gathered = program["tensors"] and not program["workers"]
        if not gathered:
            seen.append([generator_states(), own.get_state().tolist()])
        else:
            seed_everything()
            own.manual_seed(5)
    return seen


def _example(sampler: str, workers: int, epochs: list[int | None], **changes: Any) -> Any:
    usual = {"batch_size": 2, "prefetch_factor": 2, "persistent": True, "tensors": False}
    program = {"sampler": sampler, "workers": workers, "epochs": epochs}
    return example({**usual, **program, **changes})


@settings(max_examples=5)
@given(PROGRAMS)
@_example("as it goes", 2, [1, 6, 9, None])
@_example("in order", 2, [9, None, 10, None])  # after the sampler's end, before the last batch
@_example("replacement", 1, [7, None], persistent=False)
@_example("raises", 2, [None, 1, None], batch_size=1)
@_example("raises", 0, [None, 5], tensors=True)
@_example("shuffled", 0, [None, 3, None], tensors=True)
def test_loops_that_break_off_leave_order_and_generators_as_torch_does(
    program: dict[str, Any],
) -> None:
    check(program)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@settings(max_examples=200)
@given(PROGRAMS)
def test_many_loops_that_break_off_leave_order_and_generators_as_torch_does(
    program: dict[str, Any],
) -> None:
    check(program)


def check(program: dict[str, Any]) -> None:
    # More batches ahead than torch has in flight would ask the sampler for the difference.
    ahead = max(1, min(2, program["workers"] * program["prefetch_factor"]))
    expected = run(program, torch.utils.data.DataLoader)
    assert_same(run(program, DataLoader, backend=Prefetch(ahead=ahead)), expected)

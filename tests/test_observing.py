"""Looking changes nothing that training sees; where looking is impossible, the plan says why.

A look that reads the dataset in this process leaves its file open here; every worker forked later
inherits it, and all of them share one offset. So a process is started as torch starts a worker.
"""

import itertools
import multiprocessing
import os
import re
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchvision.transforms import Compose, Normalize, ToTensor

import dataloaders
from backends.dali import Dali
from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.synthetic import Synthetic
from dataloaders import DataLoader, observing, wrap
from dataloaders.cache import estimate, precompute
from dataloaders.errors import BackendUnavailable, CacheError
from helpers.compare import assert_same, generator_states

pytestmark = pytest.mark.usefixtures("cache_folder")

BACKENDS = {
    "stock": lambda: "stock",
    "prefetch": lambda: Prefetch(tail=True),
    "h5": H5,
    "prefetched h5": lambda: Prefetch(inner=H5(), tail=True),
    "dali": Dali,
    "synthetic": Synthetic,
}
PERSISTENT = {"num_workers": 2, "persistent_workers": True}
COUNT, SIDE = 120, 8
BYTES = SIDE * SIDE * 3


class Images(Dataset):
    """(image, index), by a chain that every backend can serve; every byte of image i is i.

    The file is opened when it is first read, as is usual with HDF5 and archives. Each process that
    reads is noted; ``behave`` may end it.
    """

    file = None

    def __init__(self, folder, behave=int):
        self.path, self.log, self.behave = folder / "images", folder / "processes", behave
        self.path.write_bytes(b"".join(bytes([index]) * BYTES for index in range(COUNT)))
        self.log.touch()
        self.transform = Compose([ToTensor(), Normalize((0.0,) * 3, (1.0,) * 3)])

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        self.behave()
        if self.file is None:
            self.file = open(self.path, "rb", buffering=5 * BYTES)  # noqa: SIM115
        self.file.seek(index * BYTES)
        row = np.frombuffer(self.file.read(BYTES), np.uint8)
        return self.transform(Image.fromarray(row.reshape(SIDE, SIDE, 3))), index

    @property
    def readers(self):
        """The processes that read it."""
        return {int(line) for line in self.log.read_text().split()}


def wrong_samples(batches):
    """Return the samples of an epoch that are wrong; assert that the epoch is whole."""
    images, indices = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert sorted(indices.tolist()) == list(range(COUNT))
    same = (images.flatten(1) * 255).round().long() == indices[:, None]
    return indices[~same.all(1)].tolist()


class LazyAttributes(Images):
    """Attributes that open the file too, as around an HDF5 file."""

    @property
    def classes(self):
        return self[0][1]

    class_to_idx = data = dataset = datasets = encoded = loader = classes
    root = target = target_transform = transforms = classes

    def __getattr__(self, name):
        if not name.startswith("_") or name == "__getitems__":
            self[0]
        raise AttributeError(name)


def assert_unchanged(dataset):
    """Assert that this process read nothing and that workers read every sample."""
    assert os.getpid() not in dataset.readers
    assert wrong_samples(DataLoader(dataset, 8, num_workers=2, shuffle=True)) == []


def test_explaining_and_caching(tmp_path):
    dataset = LazyAttributes(tmp_path)
    for make in BACKENDS.values():
        assert wrap(torch.utils.data.DataLoader(dataset, 8), backend=make()).explain().runs
    DataLoader(dataset, 8, num_workers="auto")
    estimate(dataset, tmp_path / "cache.h5")
    for workers in (1, 0):  # without workers it is only opened: it was built
        precompute(dataset, tmp_path / "cache.h5", num_workers=workers)
    assert_unchanged(dataset)


def tuned(loader):
    for step in (None, lambda batch: torch.zeros(64, 64) @ torch.zeros(64, 64)):
        dataloaders.tune(loader, step, budget_s=0.1, max_workers=2, remember=False)


def checked(loader):
    dataloaders.check_bottleneck(loader, lambda batch: batch[0].sum(), budget_s=0.2)


@pytest.mark.parametrize(
    ("look", "backend", "workers"),
    [
        (tuned, "stock", {}),
        (tuned, "dali", PERSISTENT),
        (checked, "h5", {"num_workers": 2}),
        (checked, "prefetch", {"num_workers": 2}),
    ],
)
def test_tuning_and_the_check(look, backend, workers, tmp_path):
    dataset = LazyAttributes(tmp_path)
    look(DataLoader(dataset, 8, backend=BACKENDS[backend](), **workers))
    assert_unchanged(dataset)


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.nightly
def test_processes_that_are_not_forked(context, tmp_path):
    dataset = Images(tmp_path)
    options = {"num_workers": 1, "multiprocessing_context": multiprocessing.get_context(context)}
    for backend in ("prefetch", "dali"):
        loader = DataLoader(dataset, 8, backend=BACKENDS[backend](), **options)
        assert loader.explain().runs, loader.explain()
    precompute(dataset, tmp_path / "x.h5", **options)
    dataloaders.tune(loader, budget_s=0.5, max_workers=1, remember=False)
    assert_unchanged(dataset)


class Lines(IterableDataset):
    """The numbers in the lines of an open file, one after the other."""

    def __init__(self, file):
        self.file = file

    def __iter__(self):
        return map(int, self.file)


def test_reading_on_where_a_file_is_open(tmp_path):
    """A fork reads on after what was read here, and what it reads is read here as well."""
    path, batches = tmp_path / "lines", []
    path.write_text("".join(f"{number:07}\n" for number in range(20_000)))

    def a_line_far_on(dataset):
        return next(itertools.islice(dataset, 2999, None))

    with open(path) as file:
        loader = DataLoader(Lines(file), 100)
        for batch in loader:
            batches.append(batch)
            if len(batches) == 10:  # at the end of a buffer
                assert observing.observe(loader, a_line_far_on) == 3999
    assert torch.equal(torch.cat(batches), torch.arange(20_000))


# The process that looks


def start(worker):
    get_worker_info().dataset.started = worker


def facts(dataset):
    info = get_worker_info()
    worker_info = None if info is None else (info.id, info.num_workers, info.dataset is dataset)
    return worker_info, getattr(dataset, "started", None), torch.get_num_threads(), os.getppid()


def raises(dataset):
    raise LookupError("no such sample")


def test_the_process_is_like_a_worker_of_the_loader_and_draws_nothing_here(tmp_path):
    generator = torch.Generator().manual_seed(1)
    options = {"shuffle": True, "generator": generator, "worker_init_fn": start}
    states = generator_states(), generator.get_state()
    for workers, worker_info in ((2, ((0, 2, True), 0)), (0, (None, None))):
        loader = DataLoader(Images(tmp_path), 4, num_workers=workers, **options)
        assert observing.observe(loader, facts) == (*worker_info, 1, os.getpid())
    assert_same((generator_states(), generator.get_state()), states)


def test_what_the_look_raises_is_raised_here(tmp_path):
    loader = DataLoader(Images(tmp_path), 4)
    with pytest.raises(LookupError, match="no such sample"):
        observing.observe(loader, raises)
    message = "the facts about Images cannot be sent between processes"
    with pytest.raises(observing.Unobserved, match=message):
        observing.observe(loader, lambda dataset: lambda: 1)


@pytest.mark.parametrize("workers", [{"num_workers": 1}, PERSISTENT], ids=["one", "persistent"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.covering
def test_epochs_are_read_by_workers_and_nothing_is_observed_twice(backend, workers, tmp_path):
    dataset = Images(tmp_path)
    loader = DataLoader(dataset, 8, shuffle=True, backend=BACKENDS[backend](), **workers)
    for _ in range(2):
        loader.explain()
    observed = backend in ("prefetch", "dali")
    assert len(dataset.readers) == observed
    list(loader)
    readers = dataset.readers
    for _ in range(2):
        loader.explain()
        batches = list(loader)
        assert backend == "synthetic" or wrong_samples(batches) == []
    assert os.getpid() not in dataset.readers
    if backend in ("stock", "prefetch", "dali"):  # a new worker an epoch, or those of the first one
        assert len(dataset.readers) == observed + (2 if workers is PERSISTENT else 3)
    else:
        assert dataset.readers == readers


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (lambda: os._exit(3), r"the process that read samples of Images died \(.*exited unexpect"),
        (lambda: os._exit(0), r"the process that read samples of Images died \("),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"the process that .* of Images died \(.*"),
        (lambda: time.sleep(1000), r"Images returned no sample within 1 s .* a larger timeout="),
    ],
    ids=["dies", "ends", "is killed", "hangs"],
)
@pytest.mark.nightly
def test_a_dataset_that_ends_or_hangs_its_process(behave, reason, tmp_path, workers_end_fast):
    def loader(backend):
        return DataLoader(Images(tmp_path, behave), 4, backend=backend, num_workers=1, timeout=1)

    plan = str(loader(Prefetch(tail=True)).explain())
    assert "images are normalised before the copy" in plan
    for text in (plan, str(loader(Dali()).explain())):
        assert re.search(reason, text), text
    for backend, error, more in (
        (Synthetic(), BackendUnavailable, r".*Synthetic\(like=batch\)"),
        (H5(), CacheError, ""),
    ):
        with pytest.raises(error, match=reason + more):
            iter(loader(backend))


def test_where_no_process_can_be_started_the_plan_says_why(tmp_path, capfd):
    options = {"backend": Prefetch(tail=True), "num_workers": 1}
    images = Images(tmp_path, behave=lambda: None)
    plan = str(DataLoader(images, 4, multiprocessing_context="spawn", **options).explain())
    assert "must be picklable unless they are forked" in plan
    with torch.device("meta"):  # which has no generators
        other = str(DataLoader(images, 4, **options).explain())
    for text in (plan, other):
        assert "no process could be started to read samples of Images (" in text
    assert capfd.readouterr().err == ""

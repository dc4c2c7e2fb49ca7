"""However an epoch on backend="dali" ends, nothing hangs and nothing stays behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import SequentialSampler, Subset
from torchvision import transforms

from dataloaders import DataLoader
from helpers import ends
from helpers.compare import assert_same
from helpers.photos import SIZE, Opened, folder, write_folder
from helpers.processes import children, run_script, start_script, wait_until_gone

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali

CHAIN = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])


def loader(**options: Any) -> DataLoader[Any]:
    given = {"dataset": folder(CHAIN), "batch_size": 2, "seed": 1, "device": "cpu", **options}
    return DataLoader(**{"backend": Dali(threads=2, depth=2), **given})


def ours() -> list[str]:
    """Names of this backend's own threads that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith("dataloaders-dali")]


def gone(seconds: float = 10) -> list[str]:
    """Those that still live after so long."""
    deadline = time.monotonic() + seconds
    while ours() and time.monotonic() < deadline:
        time.sleep(0.01)
    return ours()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    gc.collect()
    assert gone() == []
    yield
    gc.collect()
    assert gone() == []


def test_threads_live_between_epochs_and_end_with_the_loader_without_the_collector() -> None:
    gc.disable()
    try:
        kept = loader()
        list(kept)
        first = ours()
        list(kept)
        assert "dataloaders-dali" in first
        assert ours().count("dataloaders-dali") == 1
        del kept
        assert gone() == []
    finally:
        gc.enable()


def test_no_thread_outlives_a_loader_for_a_moment() -> None:
    for _ in range(40):
        kept = loader()
        list(kept)
        assert "dataloaders-dali-behind_0" in ours()
        del kept
        assert ours() == []


def test_a_break_a_dropped_iterator_and_an_error_in_the_step_end_the_epoch_alone() -> None:
    kept = loader()
    whole = list(kept)
    kept.set_epoch(0)
    for _ in kept:
        break
    iterator = iter(kept)
    next(iterator)
    del iterator
    with pytest.raises(ValueError, match="the step failed"):
        fails(kept)
    assert_same(list(kept), whole)
    assert ours().count("dataloaders-dali") == 1


def fails(kept: DataLoader[Any]) -> None:
    for _ in kept:
        raise ValueError("the step failed")


def test_an_iterator_outlives_its_loader() -> None:
    iterator = iter(loader())
    next(iterator)
    gc.collect()
    assert len(list(iterator)) == SIZE // 2
    del iterator
    assert gone() == []


def test_two_iterators_at_once_are_independent() -> None:
    kept = loader(shuffle=True)
    kept.set_epoch(3)
    whole = list(kept)
    one, two = iter(kept), iter(kept)
    both = [(next(one), next(two)) for _ in range(len(kept))]
    assert_same([first for first, _ in both], whole)
    assert_same([second for _, second in both], whole)
    for each in (one, two):
        with pytest.raises(StopIteration):
            next(each)


def test_an_exhausted_iterator_stays_exhausted_and_knows_its_length() -> None:
    iterator = iter(loader())
    assert iter(iterator) is iterator
    assert len(iterator) == len(list(iterator)) == 6
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_an_empty_dataset_ends_at_once() -> None:
    nothing = Subset(folder(CHAIN), [])
    empty = loader(dataset=nothing, sampler=SequentialSampler(nothing))
    assert [list(empty), list(empty)] == [[], []]


def test_a_loader_that_turns_to_another_backend_ends_the_live_iterator() -> None:
    kept = loader()
    iterator = iter(kept)
    next(iterator)
    kept.backend = "stock"
    assert len(list(kept)) == 6
    with pytest.raises(RuntimeError, match="was closed, or has another backend"):
        next(iterator)
    assert gone() == []


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))]
)
def test_a_copy_taken_in_mid_epoch_is_a_loader_of_its_own(copied: Any) -> None:
    kept = loader()
    kept.set_epoch(2)
    iterator = iter(kept)
    first = next(iterator)
    other = copied(kept)
    assert_same(list(other), [first, *iterator])


def test_many_epochs_leave_threads_and_files_flat() -> None:
    kept = loader()

    def epochs(count: int) -> tuple[int, int]:
        for _ in range(count):
            list(kept)
            next(iter(kept))
        process = psutil.Process()
        return process.num_threads(), process.num_fds()

    threads, files = epochs(3)
    threads_after, files_after = epochs(20)
    # Readers and what is behind the graph begin threads as they need them, up to 4 and 2.
    assert threads_after <= threads + 6
    assert files_after <= files


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_that_record_end_with_the_loader(persistent_workers: bool) -> None:
    before = children()
    kept = loader(
        dataset=Opened(CHAIN), num_workers=2, persistent_workers=persistent_workers, seed=None
    )
    for _ in kept:
        break
    whole = list(kept)
    assert len(whole) == 6
    assert len(children() - before) == 2 * persistent_workers
    iterator = iter(kept)
    next(iterator)
    newer = iter(kept)
    next(newer)
    if persistent_workers:
        with pytest.raises(RuntimeError, match="a newer iterator of it uses its persistent"):
            next(iterator)
    else:
        assert len(list(iterator)) == 5
    assert len(list(newer)) == 5
    started = list(children() - before)
    del kept, iterator, newer
    gc.collect()
    assert wait_until_gone(started) == []


def test_a_transform_that_changes_between_epochs_is_the_one_that_runs() -> None:
    data = folder(CHAIN)
    kept = loader(dataset=data)
    assert next(iter(kept))[0].shape[-1] == 16
    data.transform = transforms.Compose([transforms.RandomResizedCrop(9), transforms.ToTensor()])
    assert next(iter(kept))[0].shape[-1] == 9


def test_a_forked_child_opens_its_own_session() -> None:
    kept = loader()
    kept.set_epoch(1)
    iterator = iter(kept)
    first = next(iterator)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            try:
                next(iterator)
            except RuntimeError as error:
                status = 2 if "made before a fork" in str(error) else 3
            own = list(kept)
            assert_same(own[0], first)
            del iterator, kept
            gc.collect()
            status = 0 if status == 2 else status
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len([first, *iterator]) == 6


SCRIPT = """
import os, sys
from torchvision import transforms
from torchvision.datasets import ImageFolder
from dataloaders import DataLoader

def make():
    chain = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    return DataLoader(ImageFolder(sys.path[0] + "/photos", chain), 2, backend="dali", device="cpu")

if __name__ == "__main__":
"""


LIVE = """
import sys
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder
from dataloaders import DataLoader

class Opened(ImageFolder):  # which workers record
    def __getitem__(self, index):
        path, label = self.samples[index]
        with Image.open(path) as image:
            return self.transform(image.convert("RGB")), label

def begin():
    chain = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    folder, opened = (kind(sys.path[0] + "/photos", chain) for kind in (ImageFolder, Opened))
    loaders = [
        DataLoader(batch_size=2, backend="dali", device="cpu", **options)
        for options in (
            {"dataset": folder},
            {"dataset": opened, "num_workers": 1},
            {"dataset": opened, "num_workers": 1, "persistent_workers": True},
        )
    ]
    iterators = [iter(loader) for loader in loaders]
    batches = [next(iterator) for iterator in iterators]
    print("done", flush=True)
    return loaders, iterators, batches, iter(DataLoader(folder, 2, backend="dali", device="cpu"))
"""


@pytest.mark.parametrize("end", ends.SOURCES)
def test_an_interpreter_that_exits_with_live_iterators_exits_cleanly(
    end: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "photos")
    done = run_script(tmp_path, LIVE + ends.SOURCES[end], fresh=True)
    assert ends.words_of(done, end) == ["done"]


def test_a_forked_child_that_exits_with_live_iterators_exits_cleanly(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos")
    done = run_script(
        tmp_path,
        SCRIPT
        + """
    kept = make()
    one = iter(kept)
    next(one)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    print(len(list(one)), len(list(kept)))
""",
        fresh=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 6\n", "")


def test_workers_of_another_loader_may_be_forked_in_mid_epoch(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos")
    done = run_script(
        tmp_path,
        SCRIPT
        + """
    one = iter(make())
    next(one)
    print(sum(len(batch) for batch in DataLoader(range(20), 4, num_workers=2)), len(list(one)))
""",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "20 5\n", "")


def test_ctrl_c_reaches_the_loop_and_ends_the_process(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos")
    process = start_script(
        tmp_path,
        SCRIPT
        + """
    while True:
        for batch in make():
            print("batch", flush=True)
""",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "batch\n"
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in output
    assert process.returncode == -signal.SIGINT

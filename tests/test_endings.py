"""However an epoch ends, the cause reaches the loop and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import SequentialSampler, TensorDataset

from dataloaders import DataLoader, wrap
from helpers import base_environment, ends
from helpers.contract import Unloadable, fails_at_five
from helpers.datasets import SIZE, MapDataset, tensor_sample
from helpers.processes import children, open_files, run_script, start_script, wait_until_gone


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(**{"dataset": MapDataset(tensor_sample), "batch_size": 2, **options})


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Any:
    gc.collect()
    before = children()
    yield
    gc.collect()
    assert wait_until_gone(list(children() - before)) == []


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_break_and_a_dropped_loader_end_the_workers_without_the_collector(
    persistent_workers: bool,
) -> None:
    before = children()
    gc.disable()
    try:
        ours = loader(num_workers=2, persistent_workers=persistent_workers)
        iterator = iter(ours)
        next(iterator)
        started = children() - before
        assert len(started) == 2
        del iterator, ours
        assert wait_until_gone(list(started)) == []
    finally:
        gc.enable()


def test_persistent_workers_stay_between_epochs_and_end_with_the_loader() -> None:
    before = children()
    ours = loader(num_workers=2, persistent_workers=True)
    list(ours)
    first = children() - before
    list(ours)
    assert len(first) == 2
    assert children() - before == first
    del ours
    assert wait_until_gone(list(first)) == []


def test_an_exception_in_the_step_ends_the_workers() -> None:
    before = children()

    def train() -> None:
        for _ in loader(num_workers=2):
            started.extend(children() - before)
            raise ValueError("the step failed")

    started: list[int] = []
    with pytest.raises(ValueError, match="the step failed") as caught:
        train()
    del caught
    gc.collect()
    assert len(started) == 2
    assert wait_until_gone(started) == []


@pytest.mark.usefixtures("workers_end_fast")
def test_an_exception_in_a_worker_has_its_type_and_says_where() -> None:
    ours = loader(dataset=MapDataset(fails_at_five), num_workers=2)
    with pytest.raises(Unloadable, match=r"Caught Unloadable in DataLoader worker process \d") as e:
        list(ours)
    assert "fails_at_five" in str(e.value)
    del e


def test_a_killed_worker_is_torchs_error(tmp_path: Path) -> None:
    # In an interpreter of its own: torch raises out of its SIGCHLD handler, wherever that runs.
    done = run_script(
        tmp_path,
        """
        import os, signal
        from dataloaders import DataLoader

        class Deadly:
            def __len__(self):
                return 10

            def __getitem__(self, index):
                if index == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return index

        if __name__ == "__main__":
            list(DataLoader(Deadly(), num_workers=1, collate_fn=list))
        """,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: DataLoader worker (pid")
    assert "killed by signal" in last or "exited unexpectedly" in last


def test_an_empty_dataset_ends_at_once() -> None:
    nothing = TensorDataset(torch.empty(0, 2))
    for num_workers in (0, 1):
        empty = loader(dataset=nothing, sampler=SequentialSampler(nothing), num_workers=num_workers)
        assert list(empty) == []
        assert len(empty) == 0


def test_many_epochs_leave_threads_files_and_children_flat() -> None:
    in_process, workers = loader(shuffle=True), loader(num_workers=1)
    kept = loader(num_workers=1, persistent_workers=True)

    def epochs(count: int) -> tuple[int, int, set[int]]:
        for _ in range(count):
            assert len(list(in_process)) == len(list(kept)) == (SIZE + 1) // 2
            next(iter(in_process))
        for _ in range(count // 5):
            list(workers)
        files = open_files()
        return threading.active_count(), files, children()

    threads, files, processes = epochs(5)
    threads_after, files_after, processes_after = epochs(50)
    assert threads_after <= threads
    assert files_after == files
    assert processes_after == processes


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_forked_child_opens_its_own_session_and_leaves_the_parents_alone(
    persistent_workers: bool,
) -> None:
    before = children()
    ours = loader(num_workers=1, persistent_workers=persistent_workers)
    first = list(ours)
    # While it lives in a variable too, nothing can free the iterator that the child inherits.
    iterator = None if persistent_workers else iter(ours)
    started = children() - before
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            whole = list(ours)
            gc.collect()
            status = 0 if all(map(torch.equal, whole, first)) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(started) == 1
    assert all(psutil.pid_exists(worker) for worker in started)
    if iterator is not None:
        assert len(list(iterator)) == len(ours)
    assert len(list(ours)) == len(ours)


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start_script(
        tmp_path,
        """
        import itertools
        import psutil
        from dataloaders import DataLoader

        if __name__ == "__main__":
            loader = DataLoader(range(1_000_000), num_workers=2)
            for count, _ in enumerate(loader):
                if count == 0:
                    print(*[c.pid for c in psutil.Process().children()], flush=True)
        """,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) >= 2
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    output, _ = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in output
    assert process.returncode == -signal.SIGINT
    assert wait_until_gone(pids) == []


LIVE = """
import importlib.util
import multiprocessing
import sys
import torch
from torch.utils.data import TensorDataset
from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset

IMAGES = torch.zeros(128, 3, 192, 192, dtype=torch.uint8)  # enough for the pool and the h5 threads

def begin():
    images = {"dataset": TensorDataset(IMAGES), "batch_size": 64}
    numbers = {"dataset": range(100), "num_workers": 1}
    persistent = {**numbers, "persistent_workers": True}
    h5 = {**images, "backend": H5(sys.argv[0] + ".h5")}
    loaders = [
        DataLoader(**options)
        for options in (
            images,
            numbers,
            persistent,
            {**images, "backend": "prefetch"},
            {**numbers, "backend": "prefetch"},
            {**persistent, "backend": "prefetch"},
            h5,
            {**h5, "num_workers": 1, "persistent_workers": True},
            {**images, "dataset": CachedDataset(sys.argv[0] + ".h5")},
        )
    ]
    iterators = [iter(loader) for loader in loaders]
    batches = [next(iterator) for iterator in iterators]
    has_extras = importlib.util.find_spec("torchvision") is not None
    print(has_extras, *[c.pid for c in multiprocessing.active_children()], flush=True)
    return loaders, iterators, batches
"""


class Environment:
    """An interpreter, and a cache that it can open."""

    def __init__(self, name: str, folder: Path) -> None:
        self.has_extras = name == "development"
        self.cache = folder / "cache.h5"
        source = f"""
            import torch
            from torch.utils.data import TensorDataset
            from dataloaders.cache import precompute

            images = TensorDataset(torch.zeros(128, 3, 192, 192, dtype=torch.uint8))
            precompute(images, {str(self.cache)!r}, num_workers=0)
            """
        if self.has_extras:
            self.python = Path(sys.executable)
            built = run_script(folder, source)
        else:
            # Only to build the cache: reading it needs no h5py.
            self.python = base_environment.make(folder / "with h5py", "h5")
            built = self.run(folder, source)
            self.python = base_environment.make(folder / "base")
        assert (built.returncode, built.stderr) == (0, "")

    def run(self, folder: Path, source: str) -> Any:
        nothing = {} if self.has_extras else {"PYTHONPATH": ""}
        return run_script(folder, source, env=nothing, fresh=True, python=self.python)


@pytest.fixture(scope="module", params=["base", "development"])
def environment(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Environment:
    """With our base dependencies alone, and the one that runs the tests."""
    return Environment(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("end", ends.SOURCES)
def test_an_interpreter_that_exits_with_live_iterators_exits_cleanly(
    end: str, environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "script.py.h5").symlink_to(environment.cache)
    done = environment.run(tmp_path, LIVE + ends.SOURCES[end])
    has_extras, *workers = ends.words_of(done, end)
    assert has_extras == str(environment.has_extras)
    assert len(workers) == 5
    assert wait_until_gone([int(worker) for worker in workers]) == []


def test_an_interpreter_that_exits_after_its_workers_died_exits_cleanly(
    environment: Environment, tmp_path: Path
) -> None:
    done = environment.run(
        tmp_path,
        """
        import os
        from dataloaders import DataLoader

        class Deadly:
            def __len__(self):
                return 10

            def __getitem__(self, index):
                if index == 5:
                    os._exit(1)
                return index

        kept = []
        common = {"dataset": Deadly(), "num_workers": 2, "collate_fn": list}
        for backend in ("stock", "prefetch"):
            for persistent_workers in (False, True):
                loader = DataLoader(
                    **common, backend=backend, persistent_workers=persistent_workers
                )
                try:
                    kept.append((loader, iter(loader)))
                    for batch in kept[-1][1]:
                        pass
                except RuntimeError as error:
                    print(str(error)[:22])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 4 * "DataLoader worker (pid\n"


def test_a_forked_child_that_exits_does_not_wait_for_threads_of_its_parent(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        import os, sys
        import torch
        from torch.utils.data import TensorDataset
        from dataloaders import DataLoader

        data = TensorDataset(torch.zeros(100))
        kept = [iter(DataLoader(data, backend="prefetch")) for _ in range(20)]
        for batches in kept:
            next(batches)
        if (pid := os.fork()) == 0:
            sys.exit(4)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print({len(list(batches)) for batches in kept})
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n{99}\n", "")


def test_changing_the_backend_closes_what_the_last_one_held() -> None:
    before = children()
    ours = loader(num_workers=1, persistent_workers=True)
    list(ours)
    started = children() - before
    ours.backend = "synthetic"
    next(iter(ours))
    assert len(started) == 1
    assert wait_until_gone(list(started)) == []


def test_a_wrapped_loader_leaves_the_workers_of_the_other_one_alone() -> None:
    theirs = torch.utils.data.DataLoader(
        MapDataset(tensor_sample), num_workers=1, persistent_workers=True
    )
    iterator = iter(theirs)
    next(iterator)
    ours = wrap(theirs)
    assert len(list(ours)) == SIZE
    del ours
    gc.collect()
    assert len(list(iterator)) == SIZE - 1

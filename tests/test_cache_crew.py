"""Workers of a build: what they are asked, what they answer, and how they end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dataloaders.cache import crew
from helpers.processes import children, start_script, wait_until_gone

FIFTY = list(range(50))
METHODS = multiprocessing.get_all_start_methods()


@contextmanager
def results(
    dataset: Dataset[Any], numbers: list[int], *, num_workers: int, **options: Any
) -> Iterator[Iterator[Any]]:
    """The samples with these numbers, as a crew reads them."""
    context = options.pop("context", None)
    work = dataset.__getitem__
    with crew.Crew(work, dataset, most=num_workers, context=context) as workers:
        workers.hire(num_workers)
        yield workers.answers(numbers, **options)


class Numbers(Dataset[Any]):
    """Its own numbers; each reading leaves a file in a folder, if one is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if self.folder is not None:
            self.folder.joinpath(str(index)).touch()
        return index


class Does(Numbers):
    """Numbers, but for 20: what ``act`` gives."""

    def __init__(self, act: Callable[[], Any], folder: Path | None = None) -> None:
        super().__init__(folder)
        self.act = act

    def __getitem__(self, index: int) -> Any:
        return self.act() if index == 20 else super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_answers_of_one_process_are_in_order(num_workers: int) -> None:
    with results(Numbers(), [7, *FIFTY], num_workers=num_workers) as samples:
        assert list(samples) == [7, *FIFTY]


@pytest.mark.parametrize("count", [1, 4, 5, 50])
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.thinned(2)
def test_each_number_is_answered_once(num_workers: int, count: int) -> None:
    with results(Numbers(), FIFTY[:count], num_workers=num_workers) as samples:
        assert sorted(samples) == FIFTY[:count]


def test_a_worker_is_asked_for_few_numbers_ahead(tmp_path: Path) -> None:
    with results(Numbers(tmp_path), FIFTY, num_workers=1) as samples:
        assert [next(samples) for _ in range(3)] == [0, 1, 2]
    read = {int(file.name) for file in tmp_path.iterdir()}
    assert {0, 1, 2} <= read <= set(range(3 + crew.AHEAD))


def whoami() -> Any:
    info: Any = get_worker_info()
    drawn = (torch.initial_seed(), random.random(), float(np.random.rand()))
    return info.id, info.num_workers, info.seed, type(info.dataset), torch.get_num_threads(), drawn


class Whoami(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return whoami()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.nightly
def test_datasets_see_a_worker_of_torchs(method: str) -> None:
    loader = DataLoader(
        Whoami(),
        batch_size=None,
        sampler=[0, 1],
        num_workers=2,
        generator=torch.Generator(),
        multiprocessing_context=method,
    )
    torchs = sorted(tuple(sample[:5]) for sample in loader)
    with results(Whoami(), [0, 1], num_workers=2, context=method) as samples:
        mine = sorted(samples)
    assert [sample[:5] for sample in mine] == torchs
    assert [sample[5][0] for sample in mine] == [sample[2] for sample in mine]
    assert len({draw for sample in mine for draw in sample[5]}) == 6
    with results(Whoami(), [0, 1], num_workers=2, context=method) as samples:
        assert sorted(samples) == mine


def death(dataset: Dataset[Any], num_workers: int) -> tuple[list[Any], int, BaseException]:
    """What was answered, the pid of a worker, what was raised; all workers have ended by then."""
    before, seen, named = children(), [], "number {}".format
    with (  # noqa: PT012 - the samples before the error are looked at
        pytest.raises(RuntimeError, match="DataLoader worker") as raised,
        results(dataset, FIFTY, num_workers=num_workers, named=named) as samples,
    ):
        seen.append(next(samples))
        started = list(children() - before)
        seen.extend(samples)
    assert len(started) == num_workers
    assert wait_until_gone(started, timeout=0) == []
    return seen, started[0], raised.value


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda: os._exit(3), "ended with exit status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9 (Killed)"),
    ],
    ids=["exit", "kill"],
)
def test_who_dies_is_told_behind_all_that_it_has_answered(
    end: Callable[[], object], how: str
) -> None:
    seen, pid, error = death(Does(end), 1)
    assert seen == FIFTY[:20]
    assert str(error) == f"DataLoader worker (pid {pid}) {how} while it read number 20"
    assert "num_workers=0 (--workers 0) shows where" in error.__notes__[0]


def test_nobody_survives_another_workers_death() -> None:
    seen, _, error = death(Does(lambda: os._exit(3)), 3)
    assert len(set(seen)) == len(seen) < 50
    assert "while it read number 20" in str(error)


@pytest.mark.timeout(30)
def test_a_worker_that_is_killed_in_the_midst_of_an_answer() -> None:
    def act() -> bytes:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return bytes(10 << 20)  # more than fits into a pipe that nobody reads

    before = children()
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="killed by signal 14"),
        results(Does(act), [1, 20], num_workers=1) as samples,
    ):
        assert next(samples) == 1
        (pid,) = children() - before
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # and only then is the answer read
        next(samples)


@pytest.mark.timeout(30)
def test_a_worker_whose_own_child_holds_its_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "_END_S", 0.1)

    def act() -> None:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        tmp_path.joinpath("child").write_text(str(pid))
        os._exit(3)

    try:
        with (
            pytest.raises(RuntimeError, match="ended with exit status 3"),
            results(Does(act), [20], num_workers=1) as samples,
        ):
            next(samples)
    finally:
        os.kill(int(tmp_path.joinpath("child").read_text()), signal.SIGKILL)


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "_END_S", 0.1)

    def act() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        while True:
            signal.pause()

    before = children()
    with results(Does(act), [1, 20], num_workers=1) as samples:
        assert next(samples) == 1
        started = list(children() - before)
    assert len(started) == 1
    assert wait_until_gone(started, timeout=0) == []


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit])
def test_what_a_dataset_raises_is_raised_with_its_traceback(error: type[BaseException]) -> None:
    def act() -> None:
        raise error("enough")

    with (
        pytest.raises(error, match="enough") as raised,
        results(Does(act), FIFTY, num_workers=2) as samples,
    ):
        list(samples)
    assert "in act" in str(raised.value.__cause__)


def test_workers_stay_for_more_tasks_and_others_come() -> None:
    with crew.Crew(Pid(), Numbers(), most=3) as workers:
        assert list(workers.answers([1])) == [(1, os.getpid(), None)]
        seen: list[set[tuple[int, int]]] = []
        for count in (1, 3, 3):
            workers.hire(count)
            answers = list(workers.answers(FIFTY))
            assert sorted(task for task, _, _ in answers) == FIFTY
            seen.append({(pid, most) for _, pid, most in answers})
        assert len(seen[0]) == 1
        assert seen[0] < seen[1] == seen[2]
        assert {most for _, most in seen[1]} == {3}
        workers.dismiss(keep=1)
        assert {(pid, most) for _, pid, most in workers.answers(FIFTY)} == seen[0]
        workers.dismiss()
        assert {pid for _, pid, _ in workers.answers(FIFTY)} == {os.getpid()}
    assert wait_until_gone([pid for pid, _ in seen[1]], timeout=0) == []


class Pid:
    """The task, who does it, and one of how many workers that is."""

    def __call__(self, task: int) -> Any:
        info = get_worker_info()
        return task, os.getpid(), None if info is None else info.num_workers


def test_a_worker_that_is_interrupted_interrupts() -> None:
    act = functools.partial(signal.raise_signal, signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt),
        results(Does(act), FIFTY, num_workers=2) as samples,
    ):
        list(samples)


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_interrupted_at_any_moment_no_worker_stays(tmp_path: Path) -> None:
    process = start_script(
        tmp_path,
        """
        import os, random, signal, threading, time
        from dataloaders.cache import crew

        class Numbers:
            def __getitem__(self, index):
                return index

        def work():
            begun = time.monotonic()
            with crew.Crew(Numbers().__getitem__, Numbers(), most=2) as workers:
                workers.hire(2)
                for sample in workers.answers(list(range(200))):
                    pass
            return time.monotonic() - begun

        def children():
            me = os.getpid()
            return open(f"/proc/{me}/task/{me}/children").read().split()

        values, interrupted, whole = random.Random(1), 0, work()
        for _ in range(60):
            timer = threading.Timer(values.uniform(0, whole), os.killpg, (0, signal.SIGINT))
            try:
                timer.start()
                work()
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
        print(interrupted, children())
        """,
    )
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    assert re.fullmatch(r"\d\d \[\]\n", output)  # nothing else: no tracebacks of workers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.nightly
def test_workers_end_with_a_builder_that_is_killed(method: str, tmp_path: Path) -> None:
    process = start_script(
        tmp_path,
        f"""
        import os, signal
        from dataloaders.cache import crew

        class Waits:
            def __getitem__(self, index):
                os.write(1, b"%d\\n" % os.getpid())  # at once, whoever else writes
                signal.pause()

        if __name__ == "__main__":
            work = Waits().__getitem__
            with crew.Crew(work, Waits(), most=2, context={method!r}) as workers:
                workers.hire(2)
                next(workers.answers([0, 1]))
        """,
    )
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert wait_until_gone(workers) == []

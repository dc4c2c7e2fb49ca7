"""Prefetch as a loader uses it: who takes batches, how it ends, what it says. Device: the CPU."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset

from backends.prefetch import Prefetch
from backends.stock import Stock
from backends.synthetic import Synthetic
from dataloaders import Backend, DataLoader, Plan, Session, wrap
from dataloaders.backend import Ahead, Cancelled
from dataloaders.errors import BackendWarning, OptionError
from helpers.compare import assert_same
from helpers.contract import Unloadable, fails_at_five, hangs
from helpers.datasets import SIZE, MapDataset, SizedStream, integer_sample, tensor_sample
from helpers.processes import children, open_files, start_script, wait_until_gone

THREAD = "dataloaders-prefetch"


def threads() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == THREAD}


def becomes_true(condition: Any, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(condition())


@dataclass(frozen=True, eq=False)
class Numbers(Backend):
    """Somebody's backend: numbers that a thread may take, each once the test allows it."""

    count: int = 6
    fail_at: int | None = None
    gate: threading.Semaphore | None = None
    taken: list[str] = field(default_factory=list)  # by which threads
    supplied: list[str] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    name: ClassVar[str] = "numbers"

    def explain(self, loader: Any) -> Plan:
        return Plan(self.name)

    def takes_ahead(self, loader: Any) -> bool:
        return True

    def open(self, loader: Any) -> Session:
        return NumbersSession(self)


class NumbersSession(Session):
    def __init__(self, options: Numbers) -> None:
        self.options = options

    def epoch(self) -> Iterator[Any]:
        raise AssertionError("a thread may take these: epoch() is not asked")

    def epoch_ahead(self) -> Ahead:
        return NumbersAhead(self.options)

    def close(self) -> None:
        pass


class NumbersAhead(Ahead):
    def __init__(self, options: Numbers) -> None:
        self.options = options
        self.next_number = 0

    def __next__(self) -> Any:
        number, gate = self.next_number, self.options.gate
        while gate is not None and not gate.acquire(timeout=0.02):
            if self.options.cancelled.is_set():
                raise Cancelled
        self.next_number += 1
        self.options.taken.append(threading.current_thread().name)
        if number == self.options.fail_at:
            raise LookupError(f"number {number}")
        if number >= self.options.count:
            raise StopIteration
        return torch.full((2,), number)

    def supply(self, batches: int) -> None:
        self.options.supplied.append(threading.current_thread().name)

    def cancel(self) -> None:
        self.options.cancelled.set()


def numbers_loader(numbers: Numbers | None = None, **options: Any) -> DataLoader[Any]:
    return DataLoader([0], backend=Prefetch(numbers or Numbers(), **options))


def on_both(make: Any) -> list[Any]:
    """What ``make`` returns for prefetch, and for torch's loader."""
    return [make(DataLoader, backend="prefetch"), make(torch.utils.data.DataLoader)]


class TestTakingAhead:
    def test_a_thread_takes_and_the_loop_supplies(self) -> None:
        numbers = Numbers()
        assert [int(batch[0]) for batch in numbers_loader(numbers)] == list(range(6))
        assert set(numbers.taken) == {THREAD}
        assert set(numbers.supplied) == {threading.current_thread().name}

    @pytest.mark.parametrize("ahead", [1, 2, 5])
    def test_at_most_ahead_batches_wait(self, ahead: int) -> None:
        handed_over, waiting = 0, []

        class Watched(list[str]):
            def append(self, thread: str) -> None:
                super().append(thread)
                waiting.append(len(self) - handed_over)

        numbers = Numbers(count=50, taken=Watched())
        iterator = iter(numbers_loader(numbers, ahead=ahead))
        for number in range(50):
            taken = min(number + ahead, 50)
            assert becomes_true(lambda taken=taken: len(numbers.taken) >= taken)
            handed_over += 1
            assert int(next(iterator)[0]) == number
        assert next(iterator, None) is None
        assert max(waiting) == ahead

    def test_a_ready_batch_is_handed_out_before_the_next_one_is_made(self) -> None:
        gate = threading.Semaphore(1)
        iterator = iter(numbers_loader(Numbers(gate=gate), ahead=3))
        assert int(next(iterator)[0]) == 0  # with a gate that lets no second one through
        gate.release()
        assert int(next(iterator)[0]) == 1

    def test_an_error_comes_where_its_batch_would_have_come_and_the_rest_follows(self) -> None:
        iterator = iter(numbers_loader(Numbers(fail_at=2)))
        assert [outcome(iterator) for _ in range(7)] == [
            *("[0, 0]", "[1, 1]", "LookupError: number 2"),
            *("[3, 3]", "[4, 4]", "[5, 5]", "StopIteration"),
        ]

    def test_the_thread_lives_across_epochs_and_ends_with_its_loader(self) -> None:
        before, seen = threads(), set()
        loader = numbers_loader()
        for _ in range(5):
            assert len(list(loader)) == 6
            seen |= threads() - before
        assert len(seen) == 1
        del loader
        assert becomes_true(lambda: threads() <= before)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_user_code_in_this_process_runs_on_the_loops_thread(self, workers: int) -> None:
        seen = []

        class Watched(MapDataset):
            def __getitem__(self, index: int) -> Any:
                seen.append(threading.current_thread().name)
                return super().__getitem__(index)

        class Watching(torch.utils.data.SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                for index in super().__iter__():
                    seen.append(threading.current_thread().name)
                    yield index

        dataset = Watched(tensor_sample)
        options = {"batch_size": 4, "sampler": Watching(dataset), "num_workers": workers}
        loader = DataLoader(dataset, backend="prefetch", **options)
        assert_same(list(loader), list(torch.utils.data.DataLoader(dataset, 4)))
        assert set(seen) == {threading.current_thread().name}

    def test_tensors_in_memory_are_gathered_on_the_thread(self) -> None:
        before = threads()
        loader = DataLoader(TensorDataset(torch.arange(100)), 8, backend="prefetch")
        for _ in range(5):
            waiting = iter(loader)
            time.sleep(0.02)  # so that the thread waits for indices, or nothing is tested
            del waiting
        assert len(list(loader)) == 13
        assert len(threads() - before) == 1

    def test_more_batches_ahead_than_workers_queue_by_default(self) -> None:
        dataset = MapDataset(integer_sample, 40)
        loader = DataLoader(dataset, num_workers=1, backend=Prefetch(ahead=7))
        batches = iter(loader)
        assert becomes_true(lambda: batches.counts()[0] >= 7)
        assert loader.prefetch_factor == 2
        assert [int(batch) for batch in batches] == [3 * index for index in range(40)]

    def test_a_sampler_without_a_length(self) -> None:
        class Endless(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(7))

        data = TensorDataset(torch.arange(100))
        batches = iter(DataLoader(data, 3, sampler=Endless(), backend="prefetch"))
        with pytest.raises(TypeError, match=r"^object of type 'Endless' has no len\(\)$"):
            len(batches)  # type: ignore[arg-type]
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6]]

    @pytest.mark.parametrize("persistent", [False, True])
    def test_torchs_names_on_an_iterator_are_there(self, persistent: bool) -> None:
        options = {"num_workers": 2, "persistent_workers": persistent, "backend": "prefetch"}
        batches = iter(DataLoader(MapDataset(tensor_sample), **options))
        workers = [worker.pid for worker in batches._workers]
        assert set(workers) <= children()
        assert len(batches) == len(list(batches)) == SIZE
        assert [worker.pid for worker in batches._workers] == workers
        assert "#_MultiProcessingDataLoaderIter.__next__" in batches._profile_name
        with pytest.raises(AttributeError, match="nothing_of_torchs"):
            _ = batches.nothing_of_torchs
        gathered = iter(DataLoader(TensorDataset(torch.arange(3)), backend="prefetch"))
        assert not hasattr(gathered, "_workers")

    def test_more_batches_than_an_iterable_said_warn_when_they_are_handed_over(self) -> None:
        class Short(SizedStream):
            def __len__(self) -> int:
                return 2

        def warned(kind: Any, **ours: Any) -> list[str]:
            loader = kind(Short(), num_workers=1, **ours)
            assert len(loader) == 2
            batches = iter(loader)
            for _ in range(2):  # warnings are errors here
                next(batches)
            if ours:  # until the thread has taken what is one too many
                assert becomes_true(lambda: batches.counts()[0] >= 2)
            with pytest.warns(UserWarning, match="was reported to be 2") as caught:
                assert next(batches).tolist() == [2]
            return [re.sub("0x[0-9a-f]+", "", str(warning.message)) for warning in caught]

        ours, theirs = on_both(warned)
        assert ours == theirs
        assert len(ours) == 1

    @pytest.mark.usefixtures("workers_end_fast")
    def test_of_two_errors_at_one_batch_the_samplers_comes_first_as_under_torch(self) -> None:
        class Ending(torch.utils.data.Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                yield from (1, 5, 3)
                raise LookupError("the sampler")

        def outcomes(kind: Any, **ours: Any) -> list[str]:
            options = {"sampler": Ending(), "num_workers": 1}
            batches = iter(kind(MapDataset(fails_at_five), **options, **ours))
            return [outcome(batches) for _ in range(4)]

        ours, theirs = on_both(outcomes)
        assert ours == theirs == ["[1]", "LookupError: the sampler", "[3]", "StopIteration"]


def outcome(batches: Iterator[torch.Tensor]) -> str:
    try:
        return str(next(batches).tolist())
    except StopIteration:
        return "StopIteration"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Failing(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(9)
        raise Unloadable("the sampler")


KEPT = {"num_workers": 2, "persistent_workers": True, "backend": "prefetch"}


class TestEndings:
    @pytest.mark.parametrize("persistent", [False, True])
    @pytest.mark.parametrize("how", ["break", "step", "worker", "sampler", "early", "hangs"])
    @pytest.mark.usefixtures("workers_end_fast")
    @pytest.mark.thinned(7)
    def test_a_dropped_loader_leaves_nothing_without_the_collector(
        self, how: str, persistent: bool
    ) -> None:
        before, processes = threads(), children()
        sample = {"worker": fails_at_five, "hangs": hangs}.get(how, integer_sample)
        options = {**KEPT, "persistent_workers": persistent, "batch_size": 2}
        if how == "sampler":
            options["sampler"] = Failing()

        def train() -> None:
            loader = DataLoader(MapDataset(sample, 24), **options)
            batches = iter(loader)
            if how in ("worker", "sampler"):
                with pytest.raises(Unloadable):
                    list(batches)
            elif how == "early":  # the next epoch's first tasks are on their way
                for _ in range(12):
                    next(batches)
            elif how != "hangs":
                next(batches)
            if how != "early" or persistent:
                assert len(children() - processes) == 2
            if how == "break" and not persistent:
                del batches
                assert children() - processes == set()  # at once, as under torch
            if how == "step":
                raise ZeroDivisionError

        gc.disable()
        try:
            if how == "step":
                with pytest.raises(ZeroDivisionError):
                    train()
            else:
                train()
            assert wait_until_gone(list(children() - processes)) == []
            assert becomes_true(lambda: threads() <= before)
        finally:
            gc.enable()

    def test_an_iterator_that_waits_for_a_stuck_loader_can_be_dropped(self) -> None:
        before = threads()
        numbers = Numbers(gate=threading.Semaphore(0))
        loader = numbers_loader(numbers)
        iterator = iter(loader)
        assert becomes_true(lambda: threads() - before)
        del iterator
        assert numbers.cancelled.is_set()
        del loader
        assert becomes_true(lambda: threads() <= before)

    def test_the_last_batches_do_not_wait_for_the_workers_to_end(self, tmp_path: Path) -> None:
        flag = tmp_path / "go"

        def end_late() -> None:
            while not flag.exists():
                time.sleep(0.01)

        def init(worker: int) -> None:
            Finalize(None, end_late, exitpriority=10)

        options = {"num_workers": 1, "worker_init_fn": init, "backend": "prefetch"}
        batches = iter(DataLoader(MapDataset(integer_sample, 3), **options))
        (worker,) = batches._workers
        assert [int(next(batches)) for _ in range(2)] == [0, 3]
        assert becomes_true(lambda: batches._shutdown)  # on the thread, which waits for the worker
        assert int(next(batches)) == 6
        assert worker.is_alive()
        flag.touch()
        assert next(batches, None) is None

    def test_a_batch_is_not_held_by_us(self) -> None:
        iterator = iter(numbers_loader(Numbers(count=3)))
        first = weakref.ref(next(iterator))
        assert first() is None
        assert len(list(iterator)) == 2

    @pytest.mark.usefixtures("workers_end_fast")
    def test_persistent_workers_serve_the_newest_iterator(self, tmp_path: Path) -> None:
        flag, processes = tmp_path / "go", children()

        def sample(index: int) -> int:
            while index > 4 and not flag.exists():  # the first iterator's thread is in next()
                time.sleep(0.01)
            return index

        loader = DataLoader(MapDataset(sample), batch_size=2, **KEPT)
        one = iter(loader)
        next(one)
        threading.Timer(0.2, flag.touch).start()
        assert [batch.tolist() for batch in loader][:2] == [[0, 1], [2, 3]]
        with pytest.raises(RuntimeError, match="newer iterator"):
            next(one)
        assert len(children() - processes) == 2

    @pytest.mark.usefixtures("workers_end_fast")
    def test_frameworks_can_shut_the_workers_down_where_torch_keeps_them(self) -> None:
        processes = children()
        loader = DataLoader(MapDataset(tensor_sample), **KEPT)
        whole = list(loader)
        for hanging in (False, True):
            if hanging:
                loader = DataLoader(MapDataset(hangs), **KEPT)
                batches = iter(loader)
            started = list(children() - processes)
            loader._iterator._shutdown_workers()  # as Lightning does at the end of a run
            loader._iterator = None
            assert wait_until_gone(started) == []
            if not hanging:
                assert_same(list(loader), whole)
                loader._iterator._shutdown_workers()
        del batches  # its thread, which waited for a worker, is gone

    def test_a_forked_child_iterates_on_its_own(self) -> None:
        loader = numbers_loader()
        iterator = iter(loader)
        next(iterator)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = 0 if [int(b[0]) for b in loader] == list(range(6)) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(list(iterator)) == 5

    @pytest.mark.parametrize("workers", [0, 1])
    @pytest.mark.nightly
    def test_many_epochs_leave_threads_files_and_children_flat(self, workers: int) -> None:
        data: Any = MapDataset(integer_sample) if workers else TensorDataset(torch.rand(64, 10))
        options = {"num_workers": 1, "persistent_workers": True} if workers else {}
        # Without tensors in shared memory: those on their way are files, as many as it happens.
        options["collate_fn"] = list if workers else None
        loader = DataLoader(data, batch_size=4, backend="prefetch", **options)

        def run(epochs: int) -> tuple[int, int, set[int]]:
            for epoch in range(epochs):
                for _ in itertools.islice(loader, 2 if epoch % 3 else None):
                    pass
            return psutil.Process().num_threads(), open_files(), children()

        run(5)
        threads_before, files_before, children_before = run(5)
        threads_after, files_after, children_after = run(60)
        assert threads_after <= threads_before
        assert files_after <= files_before
        assert children_after == children_before

    @pytest.mark.nightly
    def test_ctrl_c_while_waiting_ends_the_program(self, tmp_path: Path) -> None:
        process = start_script(
            tmp_path,
            """
            import time
            from dataloaders import DataLoader

            class Slow:
                def __len__(self):
                    return 1000
                def __getitem__(self, index):
                    time.sleep(0 if index < 4 else 1000)
                    return index

            if __name__ == "__main__":
                for batch in DataLoader(Slow(), num_workers=2, backend="prefetch"):
                    print(int(batch), flush=True)
            """,
        )
        assert process.stdout is not None
        for number in range(4):
            assert int(process.stdout.readline()) == number
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert "KeyboardInterrupt" in output
        assert process.returncode == -signal.SIGINT
        assert wait_until_gone(pids) == []

    @pytest.mark.usefixtures("workers_end_fast")
    @pytest.mark.nightly
    def test_a_time_out_counts_from_when_the_loop_waits_as_torchs_does(
        self, tmp_path: Path
    ) -> None:
        def sample(index: int) -> int:
            while index == 1 and not tmp_path.joinpath("go").exists():
                time.sleep(0.01)
            return index if index < 2 else threading.Event().wait()

        options = {"num_workers": 1, "timeout": 2, "backend": "prefetch"}
        batches = iter(DataLoader(MapDataset(sample), **options))
        assert next(batches) == 0
        time.sleep(2)  # a step as long as the time-out, in which no batch comes
        threading.Timer(0.5, tmp_path.joinpath("go").touch).start()
        assert next(batches) == 1
        with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 2 seconds$"):
            next(batches)


class TestWhatItSays:
    @pytest.mark.parametrize(
        ("options", "number", "named"),
        [
            ({"batch_size": 2}, 3, "one of 2 samples: 4, 5"),
            ({"batch_size": None}, 6, "sample 5"),
            (
                {"batch_size": 100, "sampler": [5, *[0] * 99]},
                1,
                f"one of 100 samples: 5, {'0, ' * 63}...",
            ),
        ],
        ids=["batches", "samples", "long batches"],
    )
    @pytest.mark.usefixtures("workers_end_fast")
    def test_an_error_in_a_worker_names_the_samples(
        self, options: dict[str, Any], number: int, named: str
    ) -> None:
        for backend in ("prefetch", "stock"):
            loader = DataLoader(
                MapDataset(fails_at_five), num_workers=2, backend=backend, **options
            )
            with pytest.raises(Unloadable) as caught:
                list(loader)
            notes = [
                f"dataloaders: raised in a worker by {named}",
                f"dataloaders: while batch {number} of this epoch was taken ahead",
            ]
            assert getattr(caught.value, "__notes__", []) == notes * (backend == "prefetch")

    @pytest.mark.parametrize(
        ("backend", "workers", "words"),
        [
            (Prefetch(device="cpu", ahead=3), 2, "a thread takes up to 3 batches ahead"),
            (Prefetch(device="cpu"), 2, "nothing to copy"),
            (Prefetch(), 0, "num_workers=0: the dataset's own code runs on the loop's thread"),
            (Prefetch(device="cuda:0"), 0, "cuda:0: copied on a side stream, from pinned memory"),
            (Prefetch(device="xpu:1"), 2, "xpu:1: copied on a side stream, from pinned memory"),
            (Prefetch(device="cuda:0", pin_memory=False), 2, "from pageable memory"),
            (Prefetch(device="cuda:0", reuse=True, ahead=1), 2, "is valid until 1 more were taken"),
            (Prefetch(device="meta"), 2, "copied to meta as they are asked for"),
        ],
        ids=str,
    )
    def test_the_plan(self, backend: Prefetch, workers: int, words: str) -> None:
        loader = DataLoader(MapDataset(tensor_sample), num_workers=workers, backend=backend)
        assert words in re.sub(r"  +", ": ", str(loader.explain()))

    def test_what_is_not_taken_ahead(self) -> None:
        class OwnIterator(DataLoader[Any]):
            def _get_iterator(self) -> Any:
                return super()._get_iterator()

        own = OwnIterator(MapDataset(tensor_sample), num_workers=1, backend="prefetch")
        gathers = DataLoader(TensorDataset(torch.ones(2)), backend=Prefetch(Stock(gather=False)))
        for loader, length in ((own, SIZE), (gathers, 2)):
            assert "a thread takes" not in str(loader.explain())
            assert len(list(loader)) == length

    def test_a_device_wraps_a_host_backend(self) -> None:
        plan = DataLoader([1], backend=Stock(), device="cuda:0").explain()
        assert plan.backend == "prefetch"
        assert plan.delivers == "cuda:0"
        assert DataLoader([1], backend=Stock(), device="cpu").explain().backend == "stock"

    def test_only_batches_that_are_ours_are_pinned_as_they_are_made(self) -> None:
        # The user's own code may give tensors on a device, which torch's pinning refuses.
        own = DataLoader(MapDataset(tensor_sample))
        gathered = DataLoader(TensorDataset(torch.ones(4, 2)))
        workers = DataLoader(MapDataset(tensor_sample), num_workers=1)
        for loader, pins in ((own, False), (gathered, True), (workers, False)):
            for device in ("cuda:0", "xpu:0"):
                changes = Prefetch().changes(loader, torch.device(device), Stock())
                assert changes["pin_memory"] is pins
            assert "pin_memory" not in Prefetch().changes(loader, torch.device("cpu"), Stock())
        never = Prefetch(pin_memory=False).changes(gathered, torch.device("cuda", 0), Stock())
        assert never["pin_memory"] is False

    def test_ranks_that_would_share_a_device_are_warned_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A machine with two devices: there is none here.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setenv("LOCAL_RANK", "1")

        class Here(Prefetch):
            def transfer(self, device: Any) -> Any:
                return super().transfer(None)

            def changes(self, *arguments: Any) -> Any:
                return {}

        loader = DataLoader([1, 2], backend=Here(tail=False))
        with pytest.warns(
            BackendWarning, match=r"LOCAL_RANK is 1.*cuda:0.*device='cuda:1'"
        ) as told:
            assert len(list(loader)) == 2
        assert told[0].filename == __file__
        assert len(list(loader)) == 2  # warnings are errors here
        assert len(list(DataLoader([1, 2], backend=Here(tail=False, device="cuda:0")))) == 2
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert len(list(DataLoader([1, 2], backend=Here(tail=False)))) == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ahead": 0}, r"Prefetch\(ahead=0\): must be an int of at least 1"),
            ({"ahead": True}, r"ahead=True"),
            ({"device": "nowhere"}, r"Prefetch\(device='nowhere'\): must be a torch device"),
            ({"pin_memory": "auto"}, r"pin_memory='auto'\): must be True or False"),
            ({"inner": Synthetic()}, r"inner='synthetic'\): that backend delivers on the device"),
            ({"inner": 3}, r"inner=3\): must be a backend"),
            ({"dtype": torch.int64}, r"dtype=torch.int64\): must be a float dtype"),
            ({"memory_format": torch.channels_last_3d}, r"memory_format=.*must be one of"),
            ({"tail": False, "dtype": torch.float16}, r"tail=False\) with dtype="),
        ],
    )
    def test_an_option_that_cannot_be_is_told_at_once(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(OptionError, match=message):
            Prefetch(**options)

    def test_a_wrapped_loader_of_another_class_is_prefetched_by_its_own_iteration(self) -> None:
        class Reversed(torch.utils.data.DataLoader[Any]):
            def __iter__(self) -> Any:
                return reversed(list(super().__iter__()))

        assert [int(b) for b in wrap(Reversed([1, 2, 3]), backend="prefetch")] == [3, 2, 1]

    def test_the_stages_have_names_in_a_profile(self) -> None:
        loader = numbers_loader()
        list(loader)
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every_thread, acc_events=True) as profile:
            list(loader)
        names = {event.key for event in profile.key_averages()}
        assert {"dataloaders: wait", "dataloaders: take"} <= names

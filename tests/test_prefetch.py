"""Prefetch as a loader uses it: who takes batches, how it ends, what it says. Device: the CPU."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
import torch.utils.data
from torch.utils.data import RandomSampler, TensorDataset

from backends.prefetch import Prefetch
from backends.stock import Stock
from backends.synthetic import Synthetic
from dataloaders import Backend, DataLoader, Plan, Session, wrap
from dataloaders.backend import Ahead, Cancelled
from dataloaders.errors import OptionError
from helpers.compare import assert_same
from helpers.contract import fails_at_five
from helpers.datasets import SIZE, MapDataset, SizedStream, integer_sample, tensor_sample
from helpers.processes import children, open_files, run_script, start_script, wait_until_gone

THREAD = "dataloaders-prefetch"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def ended(before: int, seconds: float = 10) -> bool:
    """Whether the prefetching threads are as few as ``before``, soon."""
    deadline = time.monotonic() + seconds
    while len(threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(threads()) <= before


@dataclass(frozen=True, eq=False)
class Numbers(Backend):
    """Somebody's backend: numbers that a thread may take, each once the test allows it."""

    count: int = 6
    fail_at: int | None = None
    gate: threading.Semaphore | None = None

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
    taken_by: ClassVar[list[tuple[int, str]]] = []
    supplied_by: ClassVar[list[str]] = []

    def __init__(self, options: Numbers) -> None:
        self.options = options
        self.next_number = 0
        self.cancelled = threading.Event()

    def __next__(self) -> Any:
        number = self.next_number
        gate = self.options.gate
        while gate is not None and not gate.acquire(timeout=0.02):
            if self.cancelled.is_set():
                raise Cancelled
        if self.cancelled.is_set():
            raise Cancelled
        self.next_number += 1
        self.taken_by.append((number, threading.current_thread().name))
        if number == self.options.fail_at:
            raise LookupError(f"number {number}")
        if number >= self.options.count:
            raise StopIteration
        return torch.full((2,), number)

    def supply(self, batches: int) -> None:
        self.supplied_by.append(threading.current_thread().name)

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture(autouse=True)
def _fresh_logs() -> None:
    NumbersAhead.taken_by.clear()
    NumbersAhead.supplied_by.clear()


def numbers_loader(backend: Backend) -> DataLoader[Any]:
    return DataLoader([0], backend=backend)


class TestTakingAhead:
    def test_a_thread_takes_and_the_loop_supplies(self) -> None:
        loader = numbers_loader(Prefetch(Numbers()))
        assert [int(batch[0]) for batch in loader] == list(range(6))
        assert {name for _, name in NumbersAhead.taken_by} == {THREAD}
        assert set(NumbersAhead.supplied_by) == {threading.current_thread().name}

    @pytest.mark.parametrize("ahead", [1, 2, 5])
    def test_at_most_ahead_batches_wait(self, ahead: int) -> None:
        loader = numbers_loader(Prefetch(Numbers(count=50), ahead=ahead))
        iterator = iter(loader)
        for handed_over in range(1, 6):
            assert int(next(iterator)[0]) == handed_over - 1
            deadline = time.monotonic() + 5
            while len(NumbersAhead.taken_by) < handed_over + ahead:
                assert time.monotonic() < deadline, "the thread does not run ahead"
                time.sleep(0.001)
            time.sleep(0.02)  # time enough to take one too many
            assert len(NumbersAhead.taken_by) == handed_over + ahead

    def test_a_ready_batch_is_handed_out_before_the_next_one_is_made(self) -> None:
        gate = threading.Semaphore(1)
        iterator = iter(numbers_loader(Prefetch(Numbers(gate=gate), ahead=3)))
        assert int(next(iterator)[0]) == 0  # with a gate that lets no second one through
        gate.release()
        assert int(next(iterator)[0]) == 1
        del iterator

    def test_an_error_comes_where_its_batch_would_have_come_and_the_rest_follows(self) -> None:
        iterator = iter(numbers_loader(Prefetch(Numbers(fail_at=2))))
        seen: list[Any] = []
        while True:
            try:
                seen.append(int(next(iterator)[0]))
            except LookupError as error:
                seen.append(str(error))
            except StopIteration:
                break
        assert seen == [0, 1, "number 2", 3, 4, 5]

    def test_the_thread_lives_across_epochs(self) -> None:
        before = len(threads())
        loader = numbers_loader(Prefetch(Numbers()))
        seen = set()
        for _ in range(5):
            assert len(list(loader)) == 6
            seen |= {thread.ident for thread in threads()}
            assert len(threads()) == before + 1
        assert len(seen) == before + 1
        del loader
        assert ended(before)

    def test_user_code_in_this_process_runs_on_the_loops_thread(self) -> None:
        seen = []

        class Watched(MapDataset):
            def __getitem__(self, index: int) -> Any:
                seen.append(threading.current_thread().name)
                return super().__getitem__(index)

        loader = DataLoader(Watched(tensor_sample), batch_size=4, backend=Prefetch())
        assert_same(list(loader), list(torch.utils.data.DataLoader(loader.dataset, 4)))
        assert set(seen) == {threading.current_thread().name}

    def test_tensors_in_memory_are_gathered_on_the_thread(self) -> None:
        before = len(threads())
        data = TensorDataset(torch.arange(100.0), torch.arange(100))
        loader = DataLoader(data, batch_size=8, shuffle=True, backend="prefetch")
        theirs = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
        for seed in range(3):
            torch.manual_seed(seed)
            expected, expected_draw = list(theirs), torch.rand(3)
            torch.manual_seed(seed)
            assert_same(list(loader), expected)
            assert_same(torch.rand(3), expected_draw)
        assert len(threads()) == before + 1

    def test_tensors_in_memory_and_a_sampler_without_a_length(self) -> None:
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
        loader = DataLoader(
            MapDataset(tensor_sample),
            num_workers=2,
            persistent_workers=persistent,
            backend="prefetch",
        )
        batches = iter(loader)
        workers = [worker.pid for worker in batches._workers]
        assert set(workers) <= children()
        assert len(list(batches)) == SIZE
        assert [worker.pid for worker in batches._workers] == workers
        assert batches._num_workers == 2
        with pytest.raises(AttributeError, match="nothing_of_torchs"):
            _ = batches.nothing_of_torchs
        gathered = iter(DataLoader(TensorDataset(torch.arange(3)), backend="prefetch"))
        assert not hasattr(gathered, "_workers")

    def test_more_batches_than_an_iterable_said_warn_when_they_are_handed_over(self) -> None:
        class Short(SizedStream):
            def __len__(self) -> int:
                return 2

        told = []
        for kind, ours in (
            (DataLoader, {"backend": "prefetch"}),
            (torch.utils.data.DataLoader, {}),
        ):
            loader = kind(Short(), num_workers=1, **ours)
            assert len(loader) == 2
            batches = iter(loader)
            for _ in range(2):  # warnings are errors here
                next(batches)
            while ours and not batches._trip.ready.qsize():
                time.sleep(0.01)  # until the thread has taken what is one too many
            with pytest.warns(UserWarning, match="was reported to be 2") as caught:
                assert next(batches).tolist() == [2]
            told.append([re.sub("0x[0-9a-f]+", "", str(warning.message)) for warning in caught])
        assert told[0] == told[1]
        assert len(told[0]) == 1

    def test_samplers_run_on_the_loops_thread(self) -> None:
        seen = []

        class Watched(torch.utils.data.SequentialSampler):
            def __iter__(self) -> Iterator[int]:
                for index in super().__iter__():
                    seen.append(threading.current_thread().name)
                    yield index

        dataset = MapDataset(tensor_sample)
        loader = DataLoader(
            dataset, batch_size=2, sampler=Watched(dataset), num_workers=1, backend="prefetch"
        )
        assert len(list(loader)) == len(loader)
        assert set(seen) == {threading.current_thread().name}


@pytest.mark.usefixtures("workers_end_fast")
def test_of_two_errors_at_one_batch_the_samplers_comes_first_as_under_torch() -> None:
    class Ending(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            yield from (1, 5, 3)
            raise LookupError("the sampler")

    results = []
    for kind, ours in ((DataLoader, {"backend": "prefetch"}), (torch.utils.data.DataLoader, {})):
        loader = kind(MapDataset(fails_at_five), sampler=Ending(), num_workers=1, **ours)
        batches = iter(loader)
        results.append([outcome(batches) for _ in range(4)])
    assert results[0] == results[1] == ["[1]", "LookupError", "[3]", "StopIteration"]


def outcome(batches: Iterator[torch.Tensor]) -> str:
    try:
        return str(next(batches).tolist())
    except Exception as error:
        return type(error).__name__


class DrawsAsItGoes(torch.utils.data.Sampler[int]):
    """Draws each index when it is asked for it, from torch's default generator."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        for _ in range(40):
            yield int(torch.randint(SIZE, (1,)))


def epochs_with_breaks(kind: Any, sampler: str, after: int, **options: Any) -> list[Any]:
    """Batches of three epochs broken off, and the states of all generators after each."""
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(5)
    dataset = MapDataset(integer_sample)
    samplers = {
        "draws as it goes": DrawsAsItGoes(),
        "with replacement": RandomSampler(dataset, replacement=True, num_samples=40, generator=own),
        "shuffled, own generator": RandomSampler(dataset, num_samples=40, generator=own),
        "shuffled": RandomSampler(dataset, num_samples=40),
    }
    loader = kind(dataset, sampler=samplers[sampler], batch_size=4, num_workers=2, **options)
    seen: list[Any] = []
    for _ in range(3):
        seen.extend(batch.tolist() for batch in itertools.islice(loader, after))
        seen.append((torch.get_rng_state().tolist(), own.get_state().tolist()))
    return seen


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "sampler", ["draws as it goes", "with replacement", "shuffled, own generator", "shuffled"]
)
def test_a_break_leaves_order_and_generators_as_torchs_does(sampler: str, persistent: bool) -> None:
    for after in (1, 6, 7, 9):  # of 10: before and behind the batch at which the sampler ends
        options = {"persistent_workers": persistent}
        theirs = epochs_with_breaks(torch.utils.data.DataLoader, sampler, after, **options)
        ours = epochs_with_breaks(DataLoader, sampler, after, backend="prefetch", **options)
        assert ours == theirs, f"after a break behind {after} batches"


class TestEndings:
    def test_a_break_ends_what_the_epoch_held(self) -> None:
        before, processes = len(threads()), children()
        loader = DataLoader(
            MapDataset(tensor_sample), batch_size=2, num_workers=2, backend="prefetch"
        )
        for _ in loader:
            break
        assert children() - processes == set()  # at once: torch's own break leaves none either
        assert len(list(loader)) == len(loader)
        del loader
        gc.collect()
        assert ended(before)
        assert children() - processes == set()

    def test_an_error_in_the_step_leaves_nothing_behind(self) -> None:
        before, processes = len(threads()), children()

        def train() -> None:
            loader = DataLoader(
                MapDataset(tensor_sample),
                num_workers=2,
                persistent_workers=True,
                backend="prefetch",
            )
            for _ in loader:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        gc.collect()
        assert ended(before)
        assert wait_until_gone(list(children() - processes)) == []

    def test_an_iterator_that_waits_for_a_stuck_loader_can_be_dropped(self) -> None:
        before = len(threads())
        gate = threading.Semaphore(0)
        loader = numbers_loader(Prefetch(Numbers(gate=gate)))
        iterator = iter(loader)
        began = time.monotonic()
        del iterator, loader
        gc.collect()
        assert ended(before)
        assert time.monotonic() - began < 4  # and not the time after which it gives up waiting

    def test_a_batch_is_not_held_by_us(self) -> None:
        loader = numbers_loader(Prefetch(Numbers(count=3)))
        iterator = iter(loader)
        first = weakref.ref(next(iterator))
        assert first() is None
        assert len(list(iterator)) == 2

    def test_persistent_workers_serve_the_newest_iterator(self) -> None:
        loader = DataLoader(
            MapDataset(tensor_sample),
            batch_size=2,
            num_workers=1,
            persistent_workers=True,
            backend="prefetch",
        )
        processes = children()
        one = iter(loader)
        next(one)
        two = list(iter(loader))
        assert_same(two, list(torch.utils.data.DataLoader(loader.dataset, batch_size=2)))
        with pytest.raises(RuntimeError, match="newer iterator"):
            next(one)
        assert len(children() - processes) == 1

    def test_frameworks_can_shut_the_workers_down_where_torch_keeps_them(self) -> None:
        processes = children()
        loader = DataLoader(
            MapDataset(tensor_sample), num_workers=1, persistent_workers=True, backend="prefetch"
        )
        whole = list(loader)
        loader._iterator._shutdown_workers()  # as Lightning does at the end of a run
        loader._iterator = None
        assert wait_until_gone(list(children() - processes)) == []
        assert_same(list(loader), whole)

    def test_training_and_validation_loaders_at_once(self) -> None:
        train = DataLoader(MapDataset(tensor_sample), 2, num_workers=1, backend="prefetch")
        valid = DataLoader(MapDataset(tensor_sample), 4, num_workers=1, backend="prefetch")
        expected = list(torch.utils.data.DataLoader(valid.dataset, 4))
        for turn, _ in enumerate(train):
            if turn % 3 == 0:
                assert_same(list(valid), expected)

    def test_a_forked_child_iterates_on_its_own(self) -> None:
        loader = numbers_loader(Prefetch(Numbers()))
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

    def test_many_epochs_leave_threads_handles_and_memory_flat(self) -> None:
        data = TensorDataset(torch.rand(64, 1000))
        loader = DataLoader(data, batch_size=16, backend="prefetch")
        process = psutil.Process()

        def run(epochs: int) -> tuple[int, int, int]:
            for epoch in range(epochs):
                batches: Iterator[Any] = iter(loader)
                for _ in itertools.islice(batches, 2 if epoch % 3 else None):
                    pass
            del batches
            files = open_files()
            return process.num_threads(), files, process.memory_info().rss

        run(20)
        threads_before, handles_before, rss_before = run(20)
        threads_after, handles_after, rss_after = run(200)
        assert threads_after <= threads_before
        assert handles_after <= handles_before
        assert rss_after - rss_before < 8e6

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
                    time.sleep(0.2 if index < 4 else 1000)
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

    def test_an_interpreter_exits_cleanly_in_mid_epoch(self, tmp_path: Path) -> None:
        done = run_script(
            tmp_path,
            """
            import psutil
            import torch
            from torch.utils.data import TensorDataset
            from dataloaders import DataLoader

            if __name__ == "__main__":
                arguments = {"num_workers": 1, "backend": "prefetch"}
                kept = DataLoader(range(100), persistent_workers=True, **arguments)
                one, two = iter(kept), iter(DataLoader(range(100), **arguments))
                memory = DataLoader(TensorDataset(torch.arange(100)), backend="prefetch")
                three = iter(memory)
                next(one), next(two), next(three)
                print(*[c.pid for c in psutil.Process().children()])
            """,
            fresh=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert wait_until_gone([int(word) for word in done.stdout.split()]) == []


@pytest.mark.usefixtures("workers_end_fast")
def test_a_time_out_counts_from_when_the_loop_waits_as_torchs_does(tmp_path: Path) -> None:
    def sample(index: int) -> int:
        while index == 1 and not tmp_path.joinpath("go").exists():
            time.sleep(0.01)
        return index if index < 2 else threading.Event().wait()

    arguments: dict[str, Any] = {"dataset": MapDataset(sample), "num_workers": 1, "timeout": 0.5}
    for make in (torch.utils.data.DataLoader, functools.partial(DataLoader, backend="prefetch")):
        tmp_path.joinpath("go").unlink(missing_ok=True)
        batches = iter(make(**arguments))
        assert next(batches) == 0
        time.sleep(1.5)  # a step of three time-outs, in which no batch comes
        tmp_path.joinpath("go").touch()
        assert next(batches) == 1
        with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds"):
            next(batches)


class TestWhatItSays:
    def test_the_plan_names_the_thread_and_that_nothing_is_copied(self) -> None:
        loader = DataLoader(
            MapDataset(tensor_sample), num_workers=2, backend=Prefetch(device="cpu", ahead=3)
        )
        text = str(loader.explain())
        assert "backend 'prefetch'" in text
        assert "nothing to copy" in text
        assert "a thread takes up to 3 batches ahead" in text

    def test_the_plan_says_where_nothing_can_be_taken_ahead(self) -> None:
        text = str(DataLoader(MapDataset(tensor_sample), backend="prefetch").explain())
        assert "num_workers=0: the dataset's own code runs on the loop's thread" in text

    def test_a_device_wraps_a_host_backend(self) -> None:
        plan = DataLoader([1], backend=Stock(), device="cuda:0").explain()
        assert plan.backend == "prefetch"
        assert plan.delivers == "cuda:0"
        assert DataLoader([1], backend=Stock(), device="cpu").explain().backend == "stock"

    def test_only_batches_that_are_ours_are_pinned_as_they_are_made(self) -> None:
        # The user's own code may give tensors on a device, which torch's pinning refuses.
        cuda = torch.device("cuda", 0)
        own = DataLoader(MapDataset(tensor_sample))
        gathered = DataLoader(TensorDataset(torch.ones(4, 2)))
        workers = DataLoader(MapDataset(tensor_sample), num_workers=1)
        for loader, pins in ((own, False), (gathered, True), (workers, False)):
            assert Prefetch().changes(loader, cuda, Stock()) == {"pin_memory": pins}
            assert Prefetch().changes(loader, torch.device("cpu"), Stock()) == {}
        never = Prefetch(pin_memory=False)
        assert never.changes(gathered, cuda, Stock()) == {"pin_memory": False}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"ahead": 0}, r"Prefetch\(ahead=0\): must be an int of at least 1"),
            ({"ahead": True}, r"ahead=True"),
            ({"device": "nowhere"}, r"Prefetch\(device='nowhere'\): must be a torch device"),
            ({"pin_memory": "maybe"}, r"pin_memory='maybe'\): must be True, False or 'auto'"),
            ({"inner": Synthetic()}, r"inner='synthetic'\): that backend delivers on the device"),
            ({"inner": 3}, r"inner=3\): must be a backend"),
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
        loader = numbers_loader(Prefetch(Numbers()))
        list(loader)
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every_thread, acc_events=True) as profile:
            list(loader)
        names = {event.key for event in profile.key_averages()}
        assert {"dataloaders: wait", "dataloaders: take"} <= names

"""Prefetch on the CPU: the thread that takes batches, endings, messages.

Endings and errors that every backend has are in its contract (`helpers.contract`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
import torch.utils.data
from torch.utils.data import TensorDataset

from backends.prefetch import Prefetch
from backends.synthetic import Synthetic
from dataloaders import Backend, DataLoader, Plan, Session
from dataloaders.backend import Ahead, Cancelled
from dataloaders.errors import BackendWarning, OptionError
from helpers.compare import assert_same
from helpers.contract import Unloadable, fails_at_five, hangs
from helpers.datasets import MapDataset, ShortStream, integer_sample, tensor_sample
from helpers.processes import Held, becomes_true, children, is_true_in_a_fork

TorchLoader = torch.utils.data.DataLoader
KEPT = {"num_workers": 2, "persistent_workers": True, "backend": "prefetch"}


class Numbers(Backend, Session, Ahead):
    """A third party's backend, session and epoch: numbers, each when the test allows it."""

    name: ClassVar[str] = "numbers"

    def __init__(self, count=6, fail_at=None, gate=None, taken=None):
        self.count, self.fail_at, self.gate = count, fail_at, gate
        self.taken = [] if taken is None else taken
        self.cancelled = threading.Event()

    def explain(self, loader):
        return Plan(self.name)

    def takes_ahead(self, loader):
        return True

    def open(self, loader):
        return self

    def epoch(self):
        raise AssertionError("a thread may take these: epoch() is not asked")

    def epoch_ahead(self):
        begun = copy.copy(self)
        begun.numbers = itertools.count()
        return begun

    def close(self):
        pass

    def __next__(self):
        while self.gate is not None and not self.gate.acquire(timeout=0.02):
            if self.cancelled.is_set():
                raise Cancelled
        number = next(self.numbers)
        self.taken.append(number)
        if number == self.fail_at:
            raise LookupError(f"number {number}")
        if number >= self.count:
            raise StopIteration
        return torch.full((2,), number)

    def supply(self, batches):
        pass

    def cancel(self):
        self.cancelled.set()


def numbers_loader(numbers=None, **options):
    return DataLoader([0], backend=Prefetch(numbers or Numbers(), **options))


def outcome(batches):
    try:
        return str(next(batches).tolist())
    except StopIteration:
        return "StopIteration"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# Taking ahead


@pytest.mark.parametrize("ahead", [1, 5])
def test_at_most_ahead_batches_wait(ahead):
    handed_over, waiting = 0, []

    class Watched(list):
        def append(self, number):
            super().append(number)
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


def test_a_ready_batch_is_handed_out_before_the_next_one_is_made():
    gate = threading.Semaphore(1)
    iterator = iter(numbers_loader(Numbers(count=2, gate=gate), ahead=3))
    assert int(next(iterator)[0]) == 0  # with a gate that lets no second one through
    gate.release()
    batch = next(iterator)
    assert int(batch[0]) == 1  # nor the end
    held = weakref.ref(batch)
    del batch
    assert held() is None


def test_an_error_is_raised_in_place_of_its_batch_and_later_batches_follow():
    iterator = iter(numbers_loader(Numbers(fail_at=2)))
    assert [outcome(iterator) for _ in range(7)] == [
        *("[0, 0]", "[1, 1]", "LookupError: number 2"),
        *("[3, 3]", "[4, 4]", "[5, 5]", "StopIteration"),
    ]


@pytest.mark.parametrize("of", [list, torch.tensor])
def test_a_batch_sampler_may_use_its_list_again(of):
    class Again:
        def __iter__(self):
            rows = of([0, 0])
            for row in range(6):
                rows[0], rows[1] = row, row + 1
                yield rows

    options = {"dataset": TensorDataset(torch.arange(8)), "batch_sampler": Again()}
    on_torch, ahead = TorchLoader(**options), DataLoader(**options, backend=Prefetch(ahead=3))
    assert_same(list(ahead), list(on_torch))


@pytest.mark.parametrize("workers", [0, 1])
def test_user_code_in_this_process_runs_on_the_loops_thread(workers):
    seen = []

    def noted(value):
        seen.append(threading.current_thread().name)
        return value

    class Watched(list):
        def __iter__(self):
            return map(noted, super().__iter__())

    dataset, order = MapDataset(lambda index: noted(tensor_sample(index))), Watched(range(11))
    loader = DataLoader(dataset, 4, sampler=order, num_workers=workers, backend="prefetch")
    assert_same(list(loader), list(TorchLoader(dataset, 4)))
    assert set(seen) == {threading.current_thread().name}


def test_more_batches_than_announced_warn_when_they_are_handed_over():
    def warned(kind, **ours):
        loader = kind(ShortStream(), num_workers=1, **ours)
        assert len(loader) == 2
        batches = iter(loader)
        for _ in range(2):  # warnings are errors here
            next(batches)
        if ours:  # until the thread has taken what is one too many
            assert becomes_true(lambda: batches.counts()[0] >= 2)
        with pytest.warns(UserWarning, match="was reported to be 2") as caught:
            assert next(batches).tolist() == [2]
        return [re.sub("0x[0-9a-f]+", "", str(warning.message)) for warning in caught]

    ours, theirs = warned(DataLoader, backend="prefetch"), warned(TorchLoader)
    assert ours == theirs
    assert len(ours) == 1


def test_without_workers_the_iterator_counts_the_batches_of_its_thread():
    rows = TensorDataset(torch.arange(40))
    batches = iter(DataLoader(rows, 4, backend=Prefetch(ahead=3)))
    for left in range(9, -1, -1):
        next(batches)
        assert becomes_true(lambda: len(set(batches.counts())) == 1)
        assert batches.counts()[0] == min(3, left + 1)  # of the last one the end


def test_an_iterator_has_the_attributes_of_torchs():
    for data, workers in ((TensorDataset(torch.arange(8)), 0), (MapDataset(tensor_sample, 8), 1)):
        batches = iter(DataLoader(data, 4, num_workers=workers, backend="prefetch"))
        torchs = iter(TorchLoader(data, 4, num_workers=workers))
        for name in ("_num_workers", "_dataset_kind", "_num_yielded", "_index_sampler"):
            assert type(getattr(batches, name)) is type(getattr(torchs, name))
        assert len(list(batches)) == batches._num_yielded == 2
        assert not hasattr(batches, "_no_such_name")


# Endings


@pytest.mark.usefixtures("workers_end_fast")
def test_a_dropped_loader_leaves_nothing_without_the_collector():
    """While a worker hangs, and after an error; after a break and an epoch: the contract."""
    before = Held.now()
    gc.disable()
    try:
        for sample in (hangs, str):
            iterator = iter(DataLoader(MapDataset(sample), 2, collate_fn=torch.tensor, **KEPT))
            assert len(children() - before.processes) == 2
            if sample is str:
                with contextlib.suppress(TypeError, ValueError):
                    next(iterator)
            del iterator
            assert before.left_behind() == []
    finally:
        gc.enable()


@pytest.mark.usefixtures("workers_end_fast")
def test_persistent_workers_serve_the_newest_iterator(tmp_path):
    waiting, go, processes = tmp_path / "waiting", tmp_path / "go", children()

    def sample(index):
        if index == 4:
            waiting.touch()
            becomes_true(go.exists)
        return index

    class Order(list):
        def __iter__(self):  # called by iter(loader), once the workers are the newer iterator's
            if waiting.exists():
                go.touch()
            return super().__iter__()

    order = Order([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])
    loader = DataLoader(MapDataset(sample), batch_sampler=order, **KEPT)
    one = iter(loader)
    assert next(one).tolist() == [0, 1]
    assert becomes_true(waiting.exists)  # the first iterator's thread is in next(), or will be
    assert [batch.tolist() for batch in loader] == list(order)
    late = []
    with pytest.raises(RuntimeError, match="newer iterator"):
        late.extend(batch.tolist() for batch in one)
    assert late in ([], [[2, 3]])  # it may have been ready
    assert len(children() - processes) == 2


@pytest.mark.usefixtures("workers_end_fast")
def test_an_older_iterator_takes_no_batch_of_a_newer_one():
    loader = DataLoader(MapDataset(integer_sample, 24), 2, **KEPT)
    whole = [batch.tolist() for batch in loader]
    older = iter(loader)
    assert next(older).tolist() == whole[0]
    assert becomes_true(lambda: len(set(older.counts())) == 1)  # its thread waits for a free slot
    newer, late = iter(loader), []
    assert next(newer).tolist() == whole[0]
    with pytest.raises(RuntimeError, match="newer iterator"):
        late.extend(batch.tolist() for batch in older)
    assert late == whole[1 : 1 + len(late)]  # those that were ready
    assert [batch.tolist() for batch in newer] == whole[1:]


def test_loops_of_several_threads_have_epochs_of_their_own():
    class Order(list):
        def __iter__(self):  # called by iter(loader)
            time.sleep(0.05)
            return super().__iter__()

    order = Order([[0, 1], [2, 3], [4, 5], [6, 7]])
    rows = TensorDataset(torch.arange(8))
    loader = DataLoader(rows, batch_sampler=order, num_workers=1, backend="prefetch")
    with ThreadPoolExecutor(2) as pool:
        epochs = list(pool.map(lambda _: [batch.tolist() for (batch,) in loader], range(2)))
    assert epochs == [order, order]


def test_a_forked_process_cannot_go_on_with_an_iterator():
    rows = TensorDataset(torch.arange(24))
    batches = iter(DataLoader(rows, 4, num_workers=1, backend="prefetch"))
    whole = next(batches)[0].tolist()

    def child():
        with pytest.raises(RuntimeError, match=r"in a forked process .* iter\(loader\)"):
            next(batches)
        return True

    assert is_true_in_a_fork(child)
    for (batch,) in batches:
        whole += batch.tolist()
    assert whole == list(range(24))


def test_workers_that_a_framework_shuts_down_in_the_midst_of_an_epoch():
    loader = DataLoader(MapDataset(tensor_sample), **KEPT)
    batches = iter(loader)
    loader._iterator._shutdown_workers()
    with pytest.raises(RuntimeError, match="workers of this iterator were shut down"):
        list(batches)


@pytest.mark.usefixtures("workers_end_fast")
@pytest.mark.nightly
def test_a_timeout_counts_from_when_the_loop_waits(tmp_path):
    go = tmp_path / "go"

    def sample(index):
        return index if index < 1 or (index == 1 and becomes_true(go.exists)) else hangs(index)

    options = {"num_workers": 1, "timeout": 2, "backend": "prefetch"}
    batches = iter(DataLoader(MapDataset(sample), **options))
    assert next(batches) == 0
    time.sleep(2)  # a step as long as the time-out, in which no batch comes
    threading.Timer(0.5, go.touch).start()
    assert next(batches) == 1
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 2 seconds$"):
        next(batches)


# What it says


@pytest.mark.usefixtures("workers_end_fast")
def test_an_error_in_a_worker_names_the_samples():
    loader = DataLoader(MapDataset(fails_at_five), 2, num_workers=1, backend="prefetch")
    with pytest.raises(Unloadable) as caught:
        list(loader)
    assert caught.value.__notes__ == [
        "dataloaders: raised in a worker by one of 2 samples: 4, 5",
        "dataloaders: while batch 3 of this epoch was taken ahead",
    ]


def test_explain():
    for backend, workers, words in (
        (Prefetch(device="cpu", ahead=3), 2, "a thread takes up to 3 batches ahead"),
        (Prefetch(), 0, "num_workers=0: the dataset's own code runs on the loop's thread"),
        (Prefetch(device="xpu:1"), 2, "xpu:1: copied on a side stream, from pinned memory"),
    ):
        loader = DataLoader(MapDataset(tensor_sample), num_workers=workers, backend=backend)
        assert words in re.sub(r"  +", ": ", str(loader.explain()))
    plan = DataLoader([1], backend="stock", device="cuda:0").explain()
    assert (plan.backend, plan.delivers) == ("prefetch", "cuda:0")
    assert DataLoader([1], backend="stock", device="cpu").explain().backend == "stock"
    # The user's own code may give tensors on a device, which torch's pinning refuses.
    loader = DataLoader(MapDataset(tensor_sample), pin_memory=True)
    assert Prefetch().changes(loader, torch.device("cuda", 0)) == {"pin_memory": False}
    assert Prefetch().changes(loader, torch.device("cpu")) == {}


@pytest.mark.parametrize(("kind", "delivers"), [("xpu", "xpu:1"), ("mps", "cpu")])
def test_the_default_device_is_the_accelerator_if_it_has_streams(kind, delivers, monkeypatch):
    # A machine with that device: there is none here.
    device = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **check: device)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    assert DataLoader([1], num_workers=1, backend="prefetch").explain().delivers == delivers


def test_ranks_that_would_share_a_device_are_warned_once(monkeypatch):
    # A machine with two devices: there is none here.
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **check: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")

    class Here(Prefetch):
        def transfer(self, device):
            return super().transfer(torch.device("cpu"))

        def changes(self, *arguments):
            return {}

    loader = DataLoader([1, 2], backend=Here(tail=False))
    message = r"LOCAL_RANK is 1.*cuda:0.*device='cuda:1'"
    with pytest.warns(BackendWarning, match=message) as caught:
        assert len(list(loader)) == 2
    assert caught[0].filename == __file__
    assert len(list(loader)) == 2  # warnings are errors here


def test_invalid_options_raise_at_once():
    for options, message in (
        ({"ahead": 0}, r"ahead=0"),
        ({"device": "nowhere"}, r"Prefetch\(device='nowhere'\): must be a torch device"),
        ({"pin_memory": "auto"}, r"pin_memory='auto'\): must be True or False"),
        ({"inner": Synthetic()}, r"inner='synthetic'\): that backend delivers on the device"),
        ({"dtype": torch.int64}, r"dtype=torch.int64\): must be a float dtype"),
        ({"memory_format": torch.channels_last_3d}, r"memory_format=.*must be one of"),
        ({"tail": False, "dtype": torch.float16}, r"tail=False\) with dtype="),
    ):
        with pytest.raises(OptionError, match=message):
            Prefetch(**options)

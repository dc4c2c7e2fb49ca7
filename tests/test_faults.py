"""What is interrupted at any of its steps leaves nothing wrong, and can be done again.

A step is a change of files below a folder: one is opened, synced, renamed, linked, cut or removed.
Work that is interrupted at each of them, one after the other, has met every state that a kill, a
Ctrl-C or a full disk can leave on the disk.
"""

import errno
import itertools
import os
import signal
import sys
import warnings

import pytest
import torch

from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, merge, precompute, verify
from dataloaders.errors import CacheError
from helpers.compare import assert_same
from helpers.datasets import Numbered
from helpers.fake_cuda import FakeCuda, PlayedPrefetch
from helpers.processes import Held

SAMPLES = 9
STEPS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
ENDED = {-signal.SIGKILL: "killed", 0: "done", 3: "raised", 4: "swallowed"}


def ctrl_c():
    raise KeyboardInterrupt


def disk_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted_at(step, fault, work, folder):
    """Run ``work`` in a fork, with ``fault`` at its step of this number; return how it ended.

    "killed"; "raised": the fault's error left ``work``; "swallowed": it did not, and ``work`` came
    to its end; or "done": ``work`` has fewer steps.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = with_fault(step, fault, work, str(folder))
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in ENDED, f"status {status} after a fault at step {step}"
    return ENDED[status]


def with_fault(step, fault, work, folder):
    steps, struck, sync = 0, False, os.fsync

    def count(event, args):
        nonlocal steps, struck
        if event not in STEPS or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        if struck or not os.fsdecode(args[0]).startswith(folder):
            return
        steps += 1
        if steps == step:
            struck = True
            fault()

    def counted_sync(file):
        count("open", (folder,))
        sync(file)

    signal.alarm(60)
    warnings.simplefilter("ignore")
    os.fsync = counted_sync
    sys.addaudithook(count)
    try:
        work()
    except BaseException as error:
        ours = (KeyboardInterrupt, OSError, CacheError)  # a file that cannot be read has its own
        if struck and any(isinstance(e, ours) for e in (error, error.__cause__, error.__context__)):
            return 3
        sys.excepthook(*sys.exc_info())
        return 1
    return 4 if struck else 0


at_each_fault = pytest.mark.parametrize("fault", [kill, ctrl_c, disk_full])
step_by_step = pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.nightly), 11], ids=["every step", "some steps"]
)


def interrupt_everywhere(fault, stride, work, folder, begin, check):
    """Interrupt ``work`` at each step, or at one of ``stride``, and ``check`` what it left."""
    for step in itertools.count(1, stride):
        begin()
        ended = interrupted_at(step, fault, work, folder)
        check(ended)
        if ended == "done":
            break
    assert step > 10


@at_each_fault
@step_by_step
@pytest.mark.parametrize(
    "interrupted",
    [{"single_file": True}, {"single_file": False}, {"shard": (1, 2), "wait": False}],
    ids=["one file", "parts", "a rank"],
)
def test_a_build(fault, stride, interrupted, tmp_path):
    folder, dataset = tmp_path / "caches", Numbered(SAMPLES)
    path, numbers = folder / "train.h5", itertools.count()
    options = {"num_workers": 0, "rows": 4}

    def begin():
        if folder.exists():
            folder.rename(tmp_path / str(next(numbers)))
        folder.mkdir()

    def check(ended):
        if path.exists():
            try:
                assert_same(list(CachedDataset(path)), [dataset[row] for row in range(SAMPLES)])
            except CacheError:
                assert ended != "done"
        precompute(dataset, path, **options)
        assert_same(list(CachedDataset(path)), [dataset[row] for row in range(SAMPLES)])
        assert verify(path) == []
        assert [file for file in folder.rglob("*") if file.suffix == ".tmp"] == []

    def work():
        precompute(dataset, path, **options, **interrupted)

    interrupt_everywhere(fault, stride, work, folder, begin, check)


@at_each_fault
@step_by_step
def test_a_merge(fault, stride, tmp_path):
    folder, dataset = tmp_path / "caches", Numbered(SAMPLES)
    folder.mkdir()
    path, one = folder / "train.h5", folder / "one.h5"
    cached = precompute(dataset, path, num_workers=0, rows=4, single_file=False)
    samples = list(cached)

    def check(ended):
        assert verify(path) == []
        if one.exists():
            assert_same(list(CachedDataset(one)), samples)
            one.unlink()
        merge(path, one)
        assert_same(list(CachedDataset(one)), samples)
        one.unlink()
        assert [file for file in folder.iterdir() if file.suffix == ".tmp"] == []

    interrupt_everywhere(fault, stride, lambda: merge(path, one), folder, lambda: None, check)


class Broken(Exception):
    """The device's error."""


class Breaking(FakeCuda):
    """A device whose call of this number raises."""

    def __init__(self, call):
        super().__init__(0)
        self.left = call

    def __getattribute__(self, name):
        calls = ("record", "stream_waits", "pinned_like", "empty_like", "copy", "used_on")
        if name in calls and "backends" in sys._getframe(1).f_code.co_filename:
            self.left -= 1
            if not self.left:
                raise Broken(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("workers", [0, 1])
@step_by_step
def test_a_prefetching_epoch(workers, stride):
    batches = [torch.full((2, 3), float(number)) for number in range(5)]
    for call in itertools.count(1, stride):
        before, cuda = Held.now(), Breaking(call)
        loader = DataLoader(
            batches, batch_size=None, num_workers=workers, backend=PlayedPrefetch(cuda=cuda)
        )
        seen, raised = [], False
        try:
            for batch in loader:
                cuda.drain()
                seen.append(batch.clone())
        except Broken:
            raised = True
        assert_same(seen, batches[: len(seen)])
        assert raised == (len(seen) < 5)
        seen, cuda.left = [], 0
        for batch in loader:  # the next epoch begins anew
            cuda.drain()
            seen.append(batch.clone())
        assert_same(seen, batches)
        del loader, batch
        assert before.left_behind() == []
        if not raised:
            break
    assert call > 10

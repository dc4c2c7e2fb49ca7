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
from dataloaders.cache import CachedDataset, merge, verify
from dataloaders.errors import CacheError
from helpers.cached import built
from helpers.compare import assert_same
from helpers.datasets import Numbered
from helpers.fake_cuda import FakeCuda, PlayedPrefetch
from helpers.processes import Held

SAMPLES = [Numbered()[row] for row in range(9)]
STEPS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def comes_to_its_end(step, fault, work, folder):
    """Run ``work`` in a fork, with ``fault`` at its step of this number, if it has so many.

    Otherwise it was killed, or raised the fault's error, or went on in spite of it.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = with_fault(step, fault, work, str(folder))
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (-signal.SIGKILL, 0, 3), f"status {status} after a fault at step {step}"
    return status == 0


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
            if fault is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise fault

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
    return 3 if struck else 0


at_each_fault = pytest.mark.parametrize(
    "fault",
    [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), None],
    ids=["ctrl_c", "disk_full", "kill"],
)
step_by_step = pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.nightly), 11], ids=["every step", "some steps"]
)


def interrupt_everywhere(fault, stride, work, folder, check, begin=lambda: None):
    """Interrupt ``work`` at each step, or at one of ``stride``, and ``check`` what it left."""
    for step in itertools.count(1, stride):
        begin()
        done = comes_to_its_end(step, fault, work, folder)
        check(done)
        if done:
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
    folder, numbers = tmp_path / "caches", itertools.count()
    path = folder / "train.h5"

    def begin():
        if folder.exists():
            folder.rename(tmp_path / str(next(numbers)))
        folder.mkdir()

    def work(**options):
        built(Numbered(len(SAMPLES)), path, rows=4, **options)

    def check(done):
        if path.exists():
            try:
                assert_same(list(CachedDataset(path)), SAMPLES)
            except CacheError:
                assert not done
        work()
        assert_same(list(CachedDataset(path)), SAMPLES)
        assert verify(path) == [] == [file for file in folder.rglob("*") if file.suffix == ".tmp"]

    interrupt_everywhere(fault, stride, lambda: work(**interrupted), folder, check, begin)


@at_each_fault
@step_by_step
def test_a_merge(fault, stride, tmp_path):
    path, one = tmp_path / "train.h5", tmp_path / "one.h5"
    built(Numbered(len(SAMPLES)), path, rows=4, single_file=False)

    def check(done):
        assert verify(path) == []
        if one.exists():
            assert_same(list(CachedDataset(one)), SAMPLES)
            one.unlink()
        merge(path, one)
        assert_same(list(CachedDataset(one)), SAMPLES)
        one.unlink()
        assert [file for file in tmp_path.iterdir() if file.suffix == ".tmp"] == []

    interrupt_everywhere(fault, stride, lambda: merge(path, one), tmp_path, check)


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

        def epoch(seen, loader=loader, cuda=cuda):
            for batch in loader:
                cuda.drain()
                seen.append(batch.clone())

        seen, again, raised = [], [], False
        try:
            epoch(seen)
        except Broken:
            raised = True
        assert_same(seen, batches[: len(seen)])
        assert raised == (len(seen) < 5)
        cuda.left = 0
        epoch(again)  # the next epoch begins anew
        assert_same(again, batches)
        del loader, epoch
        assert before.left_behind() == []
        if not raised:
            break
    assert call > 10

"""One builder a folder: among processes, among threads, and after one was killed."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataloaders.cache.lock import BuildLock, builder_of
from dataloaders.errors import CacheError


@contextmanager
def forked_owner(folder: Path) -> Iterator[int]:
    """A child that has the lock; killed at the end."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            got = BuildLock(folder).try_acquire()
            os.write(writes, b"y" if got else b"n")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(reads, 1) == b"y"
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reads)
        os.close(writes)


def test_another_process_is_kept_out_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "building"
    lock = BuildLock(folder)
    with forked_owner(folder) as pid:
        assert not lock.try_acquire()
        assert builder_of(folder) == f"process {pid}"
    assert lock.try_acquire()
    lock.release(remove=True)
    assert not folder.exists()


def test_another_thread_is_kept_out(tmp_path: Path) -> None:
    folder = tmp_path / "building"
    mine, other = BuildLock(folder), BuildLock(folder)
    assert mine.try_acquire()
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(other.try_acquire()))
    thread.start()
    thread.join()
    assert got == [False]
    assert builder_of(folder) == "another thread"
    with forked_loser(folder) as lost:  # having tried, this process still has it
        assert lost
    mine.release()
    assert other.try_acquire()
    other.release(remove=True)


@contextmanager
def forked_loser(folder: Path) -> Iterator[bool]:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not BuildLock(folder).try_acquire() else 1)
    yield os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_neither_holds_nor_frees_its_parents_lock(tmp_path: Path) -> None:
    folder = tmp_path / "building"
    lock = BuildLock(folder)
    assert lock.try_acquire()
    pid = os.fork()
    if pid == 0:  # as a worker does: it inherits the open file, and closes it
        os.close(lock._file)
        os._exit(0)
    os.waitpid(pid, 0)
    with forked_loser(folder) as lost:
        assert lost
    lock.release(remove=True)


def test_who_waits_for_a_folder_that_is_removed_gets_a_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "building"
    first, second = BuildLock(folder), BuildLock(folder)
    for _ in range(20):
        assert first.try_acquire()
        first.release(remove=True)
        assert second.try_acquire()
        assert (folder / "lock").exists()
        second.release(remove=True)
    assert not folder.exists()


def test_many_processes_hold_it_one_at_a_time(tmp_path: Path) -> None:
    """Each takes it, makes a file that must be new, and removes all of it, at once."""
    folder, children = tmp_path / "building", []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                lock = BuildLock(folder)
                for _ in range(25):
                    while not lock.try_acquire():
                        os.sched_yield()
                    os.close(os.open(folder / "work", os.O_CREAT | os.O_EXCL))
                    (folder / "work").unlink()
                    lock.release(remove=True)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4


def test_a_folder_that_was_left_behind_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "building"
    folder.mkdir()
    (folder / "lock").write_bytes(b"")
    (folder / "builder").write_text("not two words of it\n")
    lock = BuildLock(folder)
    assert builder_of(folder) == "another process"
    assert lock.try_acquire()
    lock.release()
    assert (folder / "lock").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    lock = BuildLock(tmp_path / "missing" / "building")
    with pytest.raises(CacheError, match="missing"):
        lock.try_acquire()
    (tmp_path / "missing").mkdir()
    assert lock.try_acquire()  # the failed try left nothing locked
    lock.release()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 256, "File name too long"),
        ("absent/building", "No such file or directory"),
        ("file", "Not a directory"),
        ("link", "No such file or directory"),
        ("loop", "Too many levels of symbolic links"),
        ("linked lock", "No such file or directory"),
        ("/proc/building", "No such file or directory|Permission denied"),
    ],
)
def test_a_folder_that_cannot_be_made_is_told(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "linked lock").mkdir()
    (tmp_path / "linked lock" / "lock").symlink_to("nowhere/at all")
    lock = BuildLock(tmp_path / name)
    for _ in range(2):  # it is not kept by the first try
        with pytest.raises(CacheError, match=rf"\(({why})\).* give a path in a folder"):
            lock.try_acquire()

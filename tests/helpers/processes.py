"""Run scripts as a user runs them, wait for processes, and find what they leave behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import warm

PATIENCE_S = 20
"""How long tests wait for what has to come, such as the end of a process."""


def run_script(
    folder: Path,
    source: str,
    *,
    env: Mapping[str, str] | None = None,
    python: str | Path | None = None,
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Write ``source`` to ``folder/script.py`` and run it there, as `warm.run` does.

    Warnings are errors in it; ``env`` has variables besides ours.
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    arguments = ["-W", "error", script]
    variables = {**os.environ, **(env or {})}
    return warm.run(arguments, cwd=folder, env=variables, python=python, status=status)


def wait_until_gone(pids: list[int]) -> list[int]:
    """Wait for each process to end; return those still there after `PATIENCE_S`."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def children() -> set[int]:
    """Return this process's children, without multiprocessing's long-lived helpers."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if not any(helper in line for helper in ("resource_tracker", "forkserver")):
            found.add(child.pid)
    return found


def is_true_in_a_fork(action: Callable[[], bool]) -> bool:
    """Return whether ``action`` is true in a forked child, which has a minute for it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(60)
            status = 0 if action() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@dataclass(frozen=True)
class Held:
    """What this process held at one moment."""

    processes: frozenset[int]
    threads: frozenset[int | None]
    files: int
    shared: frozenset[str]  # torch's segments of shared memory

    @classmethod
    def now(cls) -> Held:
        """Collect garbage, then look."""
        files = open_files()
        threads = frozenset(thread.ident for thread in threading.enumerate())
        shared = frozenset(path.name for path in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
        return cls(frozenset(children()), threads, files, shared)

    def left_behind(self) -> list[str]:
        """Return the threads and processes that are new since then, after time to end.

        Does not call the garbage collector.
        """

        def new() -> list[threading.Thread]:
            return [each for each in threading.enumerate() if each.ident not in self.threads]

        becomes_true(lambda: not new())
        alive = wait_until_gone(list(children() - self.processes))
        return [f"thread {thread.name}" for thread in new()] + [f"process {pid}" for pid in alive]


def open_files() -> int:
    """Return how many files are open, once the threads that feed closed queues have ended."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(0.5)
    gc.collect()
    return int(psutil.Process().num_fds())


@contextmanager
def takes_less_than(nbytes: int) -> Iterator[None]:
    """Assert that Python and NumPy take less than so many bytes inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def becomes_true(condition: Callable[[], object]) -> bool:
    """Return whether ``condition`` becomes true within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(found)

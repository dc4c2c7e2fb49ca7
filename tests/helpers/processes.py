"""Scripts run as a user runs them: a file, a fresh interpreter, a real exit status."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil

from . import warm


def run_script(
    folder: Path,
    source: str,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    fresh: bool = False,
    python: str | Path = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Write ``source`` to ``folder/script.py`` and run it there; output is text.

    Args:
        folder: the script's.
        source: of the script; warnings are errors in it.
        env: variables besides ours.
        timeout: in seconds.
        fresh: in an interpreter that has imported nothing, and is taken down in the end: see
            `warm`.
        python: the interpreter of a fresh one; see `base_environment` for another than ours.
    """
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    arguments = ["-W", "error", str(script)]
    if not fresh:
        return warm.run(arguments, cwd=folder, env={**os.environ, **(env or {})}, timeout=timeout)
    return subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_script(folder: Path, source: str) -> subprocess.Popen[str]:
    """Start ``source`` in a process group of its own, its standard output a pipe."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until_gone(pids: list[int], timeout: float = 10) -> list[int]:
    """Wait for the end of each process; those still there after ``timeout`` seconds."""
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def children() -> set[int]:
    """Child processes of this one, without multiprocessing's long-lived helpers."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if not any(helper in line for helper in ("resource_tracker", "forkserver", warm.__file__)):
            found.add(child.pid)
    return found


def open_files() -> int:
    """File handles of this process, once the threads of queues that were closed have ended.

    A queue that multiprocessing closes is fed to its end by a thread, which holds its pipe until
    then; the queue of a live loader keeps its thread, which is not waited for.
    """
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(0.5)
    gc.collect()
    return int(psutil.Process().num_fds())

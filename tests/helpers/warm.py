"""Python programs as ``python`` runs them, without its seconds of importing torch.

    test ──start──> multiprocessing's fork server, which has imported torch ──fork──> the program
         <──────────────────────── status; output in files ────────────────────────

A program has an ``__main__``, ``sys.argv`` and ``sys.path`` of its own, and is a session of its
own. It ends as Python does up to the exit handlers; modules are not cleared. So a test of imports,
of memory or of how Python starts and ends needs a fresh interpreter: `sys.executable`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, process
from pathlib import Path
from typing import Any

_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "CUDA_", "TZ")
"""Variables that are read when an interpreter or torch starts, by how their names begin."""


@functools.cache
def begin() -> tuple[dict[str, str], list[str]]:
    """Start the server, without waiting for its seconds of imports.

    Returns:
        The variables that it began with, and ``sys.path`` of a new interpreter but its first entry.
    """
    forkserver.ensure_running()
    command = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    return _at_start(os.environ), subprocess.check_output(command, text=True).splitlines()


def run(
    arguments: Sequence[object],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Return what ``python *arguments`` gives, as `subprocess.run` does, with text output.

    Args:
        arguments: ``-W`` with its value any number of times, then a script, ``-c`` or ``-m``, then
            the program's own.
        cwd: where it runs; None: here.
        env: all of its variables; None: those of this process.
        timeout: seconds after which it is killed, with what it has started.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    words = [str(word) for word in arguments]
    given = dict(os.environ if env is None else env)
    command = [sys.executable, *words]
    at_start, paths = begin()
    if _at_start(given) != at_start:
        options: dict[str, Any] = {"cwd": cwd, "env": given, "timeout": timeout}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        where = os.path.abspath(cwd or os.getcwd())
        program = multiprocessing.get_context("forkserver").Process(
            target=_program, args=(words, where, given, paths, outputs)
        )
        program.start()
        program.join(timeout)
        status = program.exitcode
        if status is None:
            assert program.pid is not None
            os.killpg(program.pid, signal.SIGKILL)
            program.join()
        output, errors = (Path(name).read_text() for name in outputs)
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, output, errors)
    return subprocess.CompletedProcess(command, status, output, errors)


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}


def _program(
    words: list[str], cwd: str, env: dict[str, str], paths: list[str], outputs: list[str]
) -> None:
    """Make this process, a fork of the server, like a new interpreter; run its program."""
    import numpy as np

    gc.freeze()  # else a collection copies what the forks share
    os.setsid()
    for number, name in enumerate([os.devnull, *outputs]):
        one = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(one, number)
        os.close(one)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _forget_the_server(cwd)
    np.random.seed()
    tempfile.tempdir = None  # TMPDIR says where
    importlib.invalidate_caches()
    sys.excepthook = _shown
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        del words[:2]
    kind = words.pop(0) if words[0] in ("-c", "-m") else "script"
    what = words.pop(0)
    sys.argv = [what if kind == "script" else kind, *words]
    sys.path[:] = [{"-c": "", "-m": cwd}.get(kind, str(Path(what).resolve().parent)), *paths]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    if kind == "-m":
        _run(lambda: runpy._run_module_as_main(what))  # type: ignore[attr-defined]
    if kind == "script":
        name = os.path.join(cwd, what)
        main.__dict__.update(__file__=name, __cached__=None)
        source = Path(name).read_bytes()
    else:
        source, name = what.encode(), "<string>"
    _run(lambda: exec(compile(source, name, "exec"), main.__dict__))


def _forget_the_server(cwd: str) -> None:
    """Make this the main process, as a new interpreter is."""
    process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    this = vars(process.current_process())
    this.update(_identity=(), _name="MainProcess", _parent_pid=None)
    this["_config"].pop("tempdir", None)  # the server's own, which another user may not enter
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]


def _run(program: Callable[[], object]) -> None:
    """Run it and its exit handlers, and end; Ctrl-C ends this process as it ends Python."""
    status = 0
    try:
        try:
            program()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _shown(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error as Python does, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)

"""Python programs as ``python`` runs them, without its seconds of importing torch.

    test ──request──> server, which has imported torch ──fork──> the program, its output in files
         <──status───

A program has an ``__main__``, ``sys.argv`` and ``sys.path[0]`` of its own, and is a session of its
own. It ends as Python does up to the exit handlers; the interpreter is taken down only on request,
as that copies all that the fork shares. So what looks at imports, at memory or at how Python starts
needs a fresh interpreter: `sys.executable`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "CUDA_", "TZ")
"""Variables that are read when an interpreter or torch starts, by how their names begin."""


def begin() -> None:
    """Start the server, which takes seconds, without waiting for it."""
    _server(os.getpid())


def run(
    arguments: Sequence[object],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    taken_down: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Return what ``python *arguments`` gives, as `subprocess.run` does, with text output.

    Args:
        arguments: ``-W`` with its value any number of times, then a script, ``-c`` or ``-m``, then
            the program's own.
        cwd: where it runs; None: here.
        env: all of its variables; None: ours.
        timeout: seconds after which it is killed, with what it has started.
        taken_down: whether modules are cleared in the end.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    words = [str(word) for word in arguments]
    given = dict(os.environ if env is None else env)
    command = [sys.executable, *words]
    server, at_start = _server(os.getpid())
    if _at_start(given) != at_start:
        options: dict[str, Any] = {"cwd": cwd, "env": given, "timeout": timeout}
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        where = os.path.abspath(cwd or os.getcwd())
        print(json.dumps([words, where, given, timeout, taken_down, outputs]), file=server.stdin)
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        output, errors = (Path(name).read_text() for name in outputs)
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, output, errors)
    return subprocess.CompletedProcess(command, status, output, errors)


@functools.cache
def _server(pid: int) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start the server of the test process ``pid``; return it and the variables it began with."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the tests
    )
    atexit.register(_end_server, server, pid)
    return server, _at_start(os.environ)


def _end_server(server: subprocess.Popen[str], pid: int) -> None:
    if os.getpid() == pid:
        with server:
            server.kill()


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}


# What the server does


def _serve() -> Callable[[], object]:
    """Fork for each program; in the fork, return the function that runs it."""
    import torchvision.datasets
    import torchvision.transforms.v2  # noqa: F401

    gc.collect()
    gc.freeze()  # else a collection copies what the fork shares
    while request := sys.stdin.readline():
        words, cwd, env, timeout, taken_down, outputs = json.loads(request)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's threads wait for work: they hold no lock
            pid = os.fork()
        if pid == 0:
            return _program(words, cwd, env, taken_down, outputs)
        handle = os.pidfd_open(pid)
        ended = select.select([handle], [], [], timeout)[0]
        os.close(handle)
        if not ended:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps(status if ended else None), flush=True)
    os._exit(0)  # the tests have ended


def _program(
    words: list[str], cwd: str, env: dict[str, str], taken_down: bool, outputs: list[str]
) -> Callable[[], object]:
    """Make this process like a new interpreter; return the function that runs its program."""
    import multiprocessing.process

    import numpy as np

    os.setsid()
    for number, name in enumerate([os.devnull, *outputs]):
        one = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(one, number)
        os.close(one)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
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
    sys.path[0] = {
        "-c": "",
        "-m": cwd,
        "script": str(Path(what).resolve().parent),
    }[kind]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    end = _run if taken_down else _end
    if kind == "-m":
        return lambda: end(lambda: runpy._run_module_as_main(what))  # type: ignore[attr-defined]
    if kind == "script":
        name = os.path.join(cwd, what)
        main.__dict__.update(__file__=name, __cached__=None)
        source = Path(name).read_bytes()
    else:
        source, name = what.encode(), "<string>"
    return lambda: end(lambda: exec(compile(source, name, "exec"), main.__dict__))


def _run(program: Callable[[], object]) -> None:
    """Run it, and leave its end to Python."""
    program()


def _end(program: Callable[[], object]) -> None:
    """Run it to the exit handlers; Ctrl-C ends this process as it ends Python."""
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


if __name__ == "__main__":
    _serve()()

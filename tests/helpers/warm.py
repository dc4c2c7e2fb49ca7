"""Python programs as ``python`` runs them, without its seconds of importing torch.

    test ──stdin, stdout, stderr, request──> server, which has imported torch ──fork──> the program
         <──its pid, then how it ended──────

A program has an ``__main__``, ``sys.argv`` and ``sys.path[0]`` of its own, and is a session of its
own. It ends as Python does up to the exit handlers; the interpreter is taken down only on request,
as that copies all that the fork shares. So what looks at imports, at memory or at how Python starts
needs a fresh interpreter: `sys.executable`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "CUDA_", "TZ")
"""Variables that are read when an interpreter or torch starts, by how their names begin."""


def begin() -> None:
    """Start what takes seconds to start, without a wait for it."""
    _Server.of(os.environ)


def run(
    arguments: Sequence[object],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    taken_down: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What ``python *arguments`` gives: as `subprocess.run`, with its output as text.

    Args:
        arguments: ``-W`` with its value any number of times, then a script, ``-c`` or ``-m``, then
            the program's own.
        cwd: where it runs; None: here.
        env: all of its variables; None: ours.
        timeout: seconds after which it is killed, with what it has started.
        taken_down: whether modules are cleared in the end.

    Raises:
        subprocess.TimeoutExpired: it was.
    """
    words = [str(word) for word in arguments]
    given = dict(os.environ if env is None else env)
    command = [sys.executable, *words]
    server = _Server.of(given)
    if server is None:
        return subprocess.run(
            command,
            cwd=cwd,
            env=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    program = server.start(words, os.path.abspath(cwd or os.getcwd()), given, taken_down)
    output, errors, status = program.communicate(timeout)
    return subprocess.CompletedProcess(command, status, output.decode(), errors.decode())


# What a test's process knows


class _Server:
    """A process that has imported torch, and is forked for each program."""

    _known: _Server | None = None

    @classmethod
    def of(cls, env: Mapping[str, str]) -> _Server | None:
        """The one of this process; None if a program with ``env`` would start otherwise."""
        if cls._known is None or cls._known.pid != os.getpid():
            cls._known = cls()
        return cls._known if _at_start(env) == cls._known.at_start else None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.at_start = _at_start(os.environ)
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the tests
            )
        atexit.register(self._end)

    def start(
        self, words: list[str], cwd: str, env: Mapping[str, str], taken_down: bool
    ) -> _Program:
        ours, theirs = socket.socketpair()
        outputs, inputs = zip(os.pipe(), os.pipe(), strict=True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            given = [nothing, *inputs, theirs.fileno()]
            socket.send_fds(self._ours, [b"."], given)
        finally:
            theirs.close()
            for one in (nothing, *inputs):
                os.close(one)
        request = {"words": words, "cwd": cwd, "env": dict(env), "taken_down": taken_down}
        ours.sendall(json.dumps(request).encode() + b"\n")
        return _Program(words, ours, outputs)

    def _end(self) -> None:
        if os.getpid() == self.pid:
            self._ours.shutdown(socket.SHUT_RDWR)  # for forks of this process that hold it too
            self._ours.close()
            self._process.wait()


class _Program:
    def __init__(self, words: list[str], told: socket.socket, outputs: Sequence[int]) -> None:
        self._words = words
        self._told = told.makefile("r")
        told.close()
        self._outputs = outputs
        self.pid = int(self._told.readline())

    def communicate(self, timeout: float) -> tuple[bytes, bytes, int]:
        """All that it wrote, and its status, once nobody holds its output any more."""
        end = time.monotonic() + timeout
        text: dict[int, bytes] = dict.fromkeys(self._outputs, b"")
        left = set(self._outputs)
        try:
            while left or not select.select([self._told], [], [], 0)[0]:
                wanted = [*left] or [self._told]
                ready = select.select(wanted, [], [], max(0.0, end - time.monotonic()))[0]
                if not ready:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(self.pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(
                        self._words, timeout, *(text[one] for one in self._outputs)
                    )
                for one in left.intersection(ready):
                    more = os.read(one, 1 << 16)
                    text[one] += more
                    left -= set() if more else {one}
            status = int(self._told.readline())
        finally:
            self._told.close()
            for one in self._outputs:
                os.close(one)
        output, errors = (text[one] for one in self._outputs)
        return output, errors, status


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}


# What the server does


def _serve(descriptor: int) -> Callable[[], object]:
    """Fork for each program; returns in the forks alone, what runs theirs."""
    import torchvision.datasets
    import torchvision.transforms.v2  # noqa: F401

    gc.collect()
    gc.freeze()  # else a collection copies what the fork shares
    asked = socket.socket(fileno=descriptor)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready in select.select([asked, *running], [], [])[0]:
            if ready is not asked:
                pid, told = running.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with told, contextlib.suppress(BrokenPipeError):
                    told.sendall(f"{status}\n".encode())
                continue
            given = socket.recv_fds(asked, 1, 4)[1]
            if not given:
                os._exit(0)  # the tests have ended
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's threads wait for work: they hold no lock
                pid = os.fork()
            if pid == 0:
                asked.close()
                for one, (_, told) in running.items():
                    os.close(one)
                    told.close()
                return _program(given)
            for one in given[:3]:
                os.close(one)
            told = socket.socket(fileno=given[3])
            told.sendall(f"{pid}\n".encode())
            running[os.pidfd_open(pid)] = pid, told


def _program(given: Sequence[int]) -> Callable[[], object]:
    """Make this process one that Python has just started; what runs its program."""
    import multiprocessing.process

    import numpy as np

    os.setsid()
    for number, one in enumerate(given[:3]):
        os.dup2(one, number)
        os.close(one)
    with socket.socket(fileno=given[3]) as told, told.makefile("r") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]
    np.random.seed()
    tempfile.tempdir = None  # TMPDIR says where
    importlib.invalidate_caches()
    sys.excepthook = _shown
    words = list(request["words"])
    while words[0] == "-W":
        sys.warnoptions.append(words[1])
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        del words[:2]
    kind = words.pop(0) if words[0] in ("-c", "-m") else "script"
    what = words.pop(0)
    sys.argv = [what if kind == "script" else kind, *words]
    sys.path[0] = {
        "-c": "",
        "-m": request["cwd"],
        "script": str(Path(what).resolve().parent),
    }[kind]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    end = _run if request["taken_down"] else _end
    if kind == "-m":
        return lambda: end(lambda: runpy._run_module_as_main(what))  # type: ignore[attr-defined]
    if kind == "script":
        name = os.path.join(request["cwd"], what)
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
    """As Python shows an error, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))()

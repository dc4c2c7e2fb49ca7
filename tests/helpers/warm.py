"""Python programs as ``python`` runs them, without its seconds of importing torch.

    test ──a line of JSON──> a server, which has imported torch ──fork──> the program
         <── exit status; output in files ──────────────────────────────────┘

A program has an ``__main__``, ``sys.argv`` and ``sys.path`` of its own, is a session of its own,
and ends as any interpreter does. A test of imports, of memory or of how Python starts needs a fresh
interpreter: `sys.executable`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "CUDA_", "TZ")
"""Variables that are read when an interpreter or torch starts, by how their names begin."""

SERVER = r"""
import atexit, gc, importlib, json, os, runpy, select, signal, sys, tempfile, types, warnings
from multiprocessing import process

import numpy
import torchvision.datasets, torchvision.transforms.v2

gc.freeze()  # else a collection copies what the forks share
atexit.register(gc.unfreeze)  # else nanobind reports what is never freed as leaks
for REQUEST in sys.stdin:
    WORDS, CWD, ENV, OUTPUTS, TIMEOUT = json.loads(REQUEST)
    if (PID := os.fork()) == 0:
        break
    FILE = os.pidfd_open(PID)
    ENDED = select.select([FILE], [], [], TIMEOUT)[0]
    os.close(FILE)
    if not ENDED:
        os.killpg(PID, signal.SIGKILL)
    STATUS = os.waitstatus_to_exitcode(os.waitpid(PID, 0)[1])
    print(json.dumps(STATUS if ENDED else None), flush=True)
else:
    sys.exit()

# The program is the last statement, and this interpreter ends after it.
os.setsid()
for NUMBER, NAME in enumerate([os.devnull, *OUTPUTS]):
    FILE = os.open(NAME, os.O_RDWR | os.O_CREAT)
    os.dup2(FILE, NUMBER)
    os.close(FILE)
os.chdir(CWD)
os.environ.clear()
os.environ.update(ENV)
process.ORIGINAL_DIR = CWD
numpy.random.seed()
tempfile.tempdir = None  # TMPDIR says where
importlib.invalidate_caches()

def shown(kind, error, trace, own=globals()):
    while trace is not None and trace.tb_frame.f_globals is own:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)

sys.excepthook = shown
while WORDS[0] == "-W":
    sys.warnoptions.append(WORDS[1])
    warnings.simplefilter(WORDS[1])
    del WORDS[:2]
KIND = WORDS.pop(0) if WORDS[0] in ("-c", "-m") else "script"
WHAT = WORDS.pop(0)
sys.argv = [WHAT if KIND == "script" else KIND, *WORDS]
FILE = os.path.join(CWD, WHAT)
sys.path[0] = {"-c": "", "-m": CWD}.get(KIND, os.path.dirname(os.path.realpath(FILE)))
MAIN = sys.modules["__main__"] = types.ModuleType("__main__")
vars(MAIN).update(__builtins__=__builtins__, __annotations__={})
if KIND == "script":
    vars(MAIN).update(__file__=FILE, __cached__=None)
    with open(FILE, "rb") as file:
        WHAT = file.read()
if KIND == "-m":
    runpy._run_module_as_main(WHAT)
else:
    exec(compile(WHAT, FILE if KIND == "script" else "<string>", "exec"), vars(MAIN))
"""


@functools.cache
def begin() -> tuple[dict[str, str], subprocess.Popen[str]]:
    """Start the server, without waiting for its seconds of imports.

    Returns:
        The variables that it begins with, and its process.
    """
    command = [sys.executable, "-c", SERVER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, **pipes, start_new_session=True)
    atexit.register(server.communicate)  # closes its input, so that it ends
    return _at_start(os.environ), server


def run(
    arguments: Sequence[object],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
    python: str | Path | None = None,
    status: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Return what ``python *arguments`` gives, as `subprocess.run` does, with text output.

    Args:
        arguments: ``-W`` with its value any number of times, then a script, ``-c`` or ``-m``, then
            the program's own.
        cwd, env: as `subprocess.run` has them.
        timeout: seconds after which it is killed, with what it has started (TimeoutExpired).
        python: a new interpreter; None: a fork, unless ``env`` has variables of its own that are
            read at the start.
        status: the exit status that is asserted; None: any.
    """
    words = [str(word) for word in arguments]
    given = dict(os.environ if env is None else env)
    command = [str(python or sys.executable), *words]
    if python is None and _at_start(given) == begin()[0]:
        done = _forked(command, os.path.abspath(cwd or os.getcwd()), given, timeout)
    else:
        options: dict[str, Any] = {"cwd": cwd, "env": given, "timeout": timeout, "text": True}
        options["start_new_session"] = True  # Ctrl-C in it is not this process's
        done = subprocess.run(command, capture_output=True, check=False, **options)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def _forked(
    command: list[str], cwd: str, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    _, server = begin()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps((command[1:], cwd, env, outputs, timeout)) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        output, errors = (Path(name).read_text() for name in outputs)
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, output, errors)
    return subprocess.CompletedProcess(command, status, output, errors)


def _at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_AT_START)}

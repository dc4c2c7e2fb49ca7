"""Runs tests in a copy of the working tree, in forks of a process that has torch imported.

the tree, copied ──> fork ──> tests collected, run ──> fork ──> functions swapped ──> passed,
        └── one file changed: workers and scripts of the tests read it         failed, broken, hung

What cannot be swapped in place, since it runs when its module is imported, is collected anew.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import gc
import importlib
import inspect
import json
import marshal
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import NoReturn

import hypothesis
import pytest
import torch.utils.data

__all__ = ["ROOT", "Tests", "Tree"]

ROOT = Path(__file__).resolve().parents[2]

_HEAVY = ("torch.distributed", "torchvision.transforms.v2", "PIL.Image", "h5py")
_OPTIONS = ["-x", "-q", "--ff", "--tb=line", "-p", "no:xdist", "--hypothesis-profile=mutants"]
# hypothesis is imported before pytest runs, and need not be rewritten.
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
_LEAST_LIMIT_S = 5.0  # of one test: a busy machine is no failed test
_UNCHANGED_LIMIT_S = 3600.0


class Tree:
    """A copy of the files that git knows or does not ignore; removed at the end of a ``with``."""

    def __enter__(self) -> Tree:
        for name in _HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        # Torch gives a worker that has raised 5 s to end: as long as a test may take at least.
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
        # The same examples each time, and no minutes spent on making one smaller.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutants", deadline=None, phases=phases, derandomize=True, database=None
        )
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        # By content: a changed file may have the time and the size that it had before.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        for name in ("dataloaders", "backends"):
            compileall.compile_dir(self.folder / name, quiet=2, invalidation_mode=mode)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def tests(self, names: list[str], file: str) -> Tests:
        """Return the tests that pytest finds by ``names``, to be run on changes of ``file``."""
        return Tests(self.folder, names, self.folder / file)


class Tests:
    """Tests that were collected and run once; each change of a function is tried in a fork.

    As a plugin of pytest it runs the tests and notes the functions that each calls. Then it waits
    for changes, and begins each time with the tests that call what has changed, the fastest first.

    Attributes:
        unchanged: what they say of the unchanged file, as `of` has it.
    """

    def __init__(self, folder: Path, names: list[str], file: Path) -> None:
        self._folder, self._names, self._file = folder, names, file
        self._source = file.read_text()
        self._ours, self._theirs = Pipe()
        began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            self._run_pytest(self)
        self._theirs.close()
        self.unchanged = self._answer()
        self._limit = 5 * (_LEAST_LIMIT_S + time.monotonic() - began)  # of all tests

    def end(self) -> None:
        """End the process that waits for changes."""
        self._ours.close()
        _waited(self._pid, 5.0)

    def output(self) -> str:
        """Return the end of what the last tests wrote."""
        return (self._folder / "output").read_text(errors="replace")[-4000:]

    def of(self, source: str) -> str:
        """Return what the tests say with ``source`` in the file.

        "passed"; "failed"; "broken": they could not begin, since a test file could not be imported;
        or "hung": one took ten times its seconds, or all took five times theirs.
        """
        self._file.write_text(source)
        try:
            if swaps := swappable(self._source, source, str(self._file)):
                self._ours.send(swaps)
                if (found := self._answer()) != "broken":
                    return found
            if (pid := os.fork()) == 0:
                self._run_pytest()
            return _waited(pid, self._limit)
        finally:
            self._file.write_text(self._source)

    def _answer(self) -> str:
        try:
            return str(self._ours.recv())
        except EOFError:  # they could not be collected
            return "broken"

    def _run_pytest(self, *plugins: object) -> NoReturn:
        """Run the tests of the copy in this process, a fork, and end it."""
        code = 70
        try:
            os.setsid()
            output = os.open(self._folder / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self._folder)
            ours = {str(ROOT), str(ROOT / "tests"), ""}
            sys.path[:] = [str(self._folder), *(place for place in sys.path if place not in ours)]
            sys.dont_write_bytecode = True
            os.environ.update(PYTHONPATH=str(self._folder), PYTHONDONTWRITEBYTECODE="1")
            options = [*_OPTIONS, f"--basetemp={self._folder / 'tmp'}"]
            code = int(pytest.main([*options, *self._names], plugins))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests, then wait for changes and try them until nobody sends any more."""
        notes = self._folder / "notes.json"
        self._theirs.send(_forked(lambda: self._note_calls(session, notes), _UNCHANGED_LIMIT_S))
        try:
            swaps = self._theirs.recv()
            calls, seconds = json.loads(notes.read_text())
            functions = self._functions()
            while True:
                if functions and not all(functions[name] for name in swaps):
                    self._theirs.send("broken")
                else:
                    order = sorted(
                        range(len(calls)),
                        key=lambda n: (swaps.keys().isdisjoint(calls[n]), seconds[n]),
                    )
                    tests = [(session.items[n], 10 * seconds[n]) for n in order]
                    attempt = partial(_try, session, functions, swaps, tests)
                    self._theirs.send(_forked(attempt, _UNCHANGED_LIMIT_S))
                swaps = self._theirs.recv()
        except EOFError:
            return True

    def _note_calls(self, session: pytest.Session, notes: Path) -> bool:
        """Run the tests; write the functions of the file that each calls, and its seconds."""
        calls: list[list[str]] = []
        seconds = []
        found: set[str] = set()

        def note(frame: FrameType, event: str, value: object) -> None:
            if frame.f_code.co_filename == str(self._file):
                found.add(frame.f_code.co_qualname)

        threading.settrace(note)
        for item, after in zip(session.items, [*session.items[1:], None], strict=True):
            found.clear()
            began = time.monotonic()
            sys.settrace(note)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            sys.settrace(None)
            calls.append(sorted(found))
            seconds.append(time.monotonic() - began)
            if session.testsfailed:
                return False
        notes.write_text(json.dumps([calls, seconds]))
        return True

    def _functions(self) -> dict[str, list[FunctionType]]:
        """Return the functions of the file, by qualified name; none if it was not imported."""
        found: dict[str, list[FunctionType]] = defaultdict(list)
        gc.unfreeze()  # what is frozen is not listed
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename == str(self._file):
                found[each.__code__.co_qualname].append(each)
        gc.freeze()
        return found


def _try(
    session: pytest.Session,
    functions: dict[str, list[FunctionType]],
    swaps: dict[str, bytes],
    tests: list[tuple[pytest.Item, float]],
) -> bool:
    """Return whether all tests pass with the swaps; SIGALRM ends this process at a test's limit."""
    for name, code in swaps.items():
        for function in functions[name]:
            function.__code__ = marshal.loads(code)
    items = [item for item, _ in tests]
    for (item, limit), after in zip(tests, [*items[1:], None], strict=True):
        signal.setitimer(signal.ITIMER_REAL, max(_LEAST_LIMIT_S, limit))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if session.testsfailed:
            return False
    return True


def swappable(before: str, after: str, place: str) -> dict[str, bytes]:
    """Return the code of the functions that differ, by qualified name.

    Nothing if more differs than functions: what a module or a class does when it is imported.
    """
    if sys.version_info < (3, 11):
        return {}
    plain = ast.unparse(ast.parse(before))  # as `mutants` writes it
    swaps = {}
    pending = [(compile(plain, place, "exec"), compile(after, place, "exec"))]
    while pending:
        old, new = pending.pop()
        pairs = list(zip(old.co_consts, new.co_consts, strict=False))
        inner = [pair for pair in pairs if all(isinstance(each, CodeType) for each in pair)]
        names = Counter(one.co_qualname for one, _ in inner)
        if len(old.co_consts) != len(new.co_consts) or old.co_code != new.co_code:
            return {}
        if any(a is not b and repr(a) != repr(b) for a, b in pairs if (a, b) not in inner):
            return {}
        for one, other in inner:
            if one == other:
                continue
            if names[one.co_qualname] > 1:  # a property's two, lambdas
                return {}
            if one.co_flags & inspect.CO_OPTIMIZED:  # a function, not the body of a class
                swaps[one.co_qualname] = marshal.dumps(other)
            else:
                pending.append((one, other))
    return swaps


def _forked(action: Callable[[], bool], limit: float) -> str:
    """Return whether ``action`` is true in a fork: "passed", "failed", "broken" or "hung"."""
    if (pid := os.fork()) == 0:
        code = 70
        try:
            os.setsid()
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return _waited(pid, limit)


def _waited(pid: int, limit: float) -> str:
    """Return how a fork ended, and kill all that it left."""
    deadline = time.monotonic() + limit
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.005)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return "hung"
    known = {0: "passed", 1: "failed", -signal.SIGALRM: "hung"}
    return known.get(os.waitstatus_to_exitcode(status), "broken")

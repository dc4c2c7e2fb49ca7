"""Runs tests in a copy of the working tree, in forks of a process that has torch imported.

the tree, copied ──> fork ──> tests collected ──> fork ──> functions swapped ──> passed, failed,
        └── one file changed: workers and scripts of the tests read it            broken, hung

What cannot be swapped in place, since it runs when its module is imported, is collected anew.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import gc
import importlib
import inspect
import marshal
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from multiprocessing import Pipe
from pathlib import Path
from types import CodeType, FunctionType
from typing import NoReturn, TypeAlias

import hypothesis
import pytest

__all__ = ["ROOT", "Tree"]

Swaps: TypeAlias = dict[tuple[str, str], CodeType]
ROOT = Path(__file__).resolve().parents[2]

_HEAVY = ("torch.utils.data", "torch.distributed", "torchvision.transforms.v2", "PIL.Image", "h5py")
_OPTIONS = ["-x", "-q", "--ff", "--tb=line", "-p", "no:xdist", "--hypothesis-profile=mutants"]
# hypothesis is imported before pytest runs, and need not be rewritten.
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]


class Tree:
    """A copy of the files that git knows or does not ignore; removed at the end of a ``with``."""

    def __enter__(self) -> Tree:
        for name in _HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
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
        self._last: Collected | None = None
        # By content: a changed file may have the time and the size that it had before.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        for name in ("dataloaders", "backends"):
            compileall.compile_dir(self.folder / name, quiet=2, invalidation_mode=mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def outcome(self, tests: list[str], limit: float, file: str = "", source: str = "") -> str:
        """Return what the tests say, with ``source`` in ``file`` if one is given.

        "passed"; "failed"; "broken": they could not begin, since a test file could not be imported;
        or "hung": they took more than ``limit`` seconds.
        """
        if not file:
            return self._run(tests, limit)
        place = self.folder / file
        kept = place.read_text()
        try:
            place.write_text(source)
            swaps = swappable(kept, source, str(place))
            found = self._collected(tests).outcome(limit, swaps) if swaps else None
            return found or self._run(tests, limit)
        finally:
            place.write_text(kept)

    def output(self) -> str:
        """Return the end of what the last tests wrote."""
        return (self.folder / "output").read_text(errors="replace")[-4000:]

    def _collected(self, tests: list[str]) -> Collected:
        if self._last is None or self._last.tests != tests:
            self._end()
            self._last = Collected(self, tests)
        return self._last

    def _end(self) -> None:
        if self._last is not None:
            self._last.end()
            self._last = None

    def _run(self, tests: list[str], limit: float) -> str:
        pid = os.fork()
        if pid == 0:
            self.run_pytest(tests)
        return _waited(pid, limit)

    def run_pytest(self, tests: list[str], *plugins: object) -> NoReturn:
        """Run the tests of the copy in this process, a fork, and end it."""
        code = 70
        try:
            os.setsid()
            output = os.open(self.folder / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            ours = {str(ROOT), str(ROOT / "tests"), ""}
            sys.path[:] = [str(self.folder), *(place for place in sys.path if place not in ours)]
            sys.dont_write_bytecode = True
            os.environ.update(PYTHONPATH=str(self.folder), PYTHONDONTWRITEBYTECODE="1")
            code = int(
                pytest.main([*_OPTIONS, f"--basetemp={self.folder / 'tmp'}", *tests], plugins)
            )
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class Collected:
    """Tests that were collected once; each change of a function is tried in a fork.

    As a plugin of pytest it runs, in place of the tests, a loop that waits for changes.
    """

    def __init__(self, tree: Tree, tests: list[str]) -> None:
        self.tests = tests
        self._ours, self._theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._ours.close()
            tree.run_pytest(tests, self)
        self._theirs.close()

    def outcome(self, limit: float, swaps: Swaps) -> str | None:
        """Return what the tests say with ``swaps``; None if that cannot be tried in this way."""
        try:
            self._ours.send((limit, {name: marshal.dumps(code) for name, code in swaps.items()}))
            found: str | None = self._ours.recv()
        except (EOFError, OSError):  # they could not be collected
            return None
        return found

    def end(self) -> None:
        """End the process that waits."""
        self._ours.close()
        _waited(self._pid, 5.0)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Wait for changes and try them until nobody sends any more."""
        functions: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType:
                functions[each.__code__.co_filename, each.__code__.co_qualname].append(each)
        loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        items = session.items
        while True:
            try:
                limit, packed = self._theirs.recv()
            except EOFError:
                return True
            swaps = [
                (functions[name], marshal.loads(code))
                for name, code in packed.items()
                if name[0] in loaded  # else it is imported from the changed file
            ]
            reads, writes = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                os._exit(_tried(session, items, swaps, writes))
            os.close(writes)
            found = _waited(pid, limit)
            with open(reads) as said:
                failed = said.read()
            if failed:  # the next change may well fail it too
                items.insert(0, items.pop(int(failed)))
            self._theirs.send(None if found == "broken" else found)


def _tried(
    session: pytest.Session,
    items: list[pytest.Item],
    swaps: list[tuple[list[FunctionType], CodeType]],
    writes: int,
) -> int:
    """Return 1 and write the number of the first test that fails, 0 if none does; else 70."""
    try:
        for functions, code in swaps:
            if not functions:
                return 70
            for function in functions:
                function.__code__ = code
        for number, item in enumerate(items):
            after = items[number + 1] if number + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if session.testsfailed:
                os.write(writes, str(number).encode())
                return 1
    except BaseException:
        return 70
    return 0


def swappable(before: str, after: str, place: str) -> Swaps:
    """Return the code of the functions that differ, by file and qualified name.

    Nothing if more differs than functions: what a module or a class does when it is imported.
    """
    if sys.version_info < (3, 11):
        return {}
    plain = ast.unparse(ast.parse(before))  # as `mutants` writes it
    swaps: Swaps = {}
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
                swaps[place, one.co_qualname] = other
            else:
                pending.append((one, other))
    return swaps


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
    known = {0: "passed", 1: "failed"}
    return known.get(os.waitstatus_to_exitcode(status), "broken")

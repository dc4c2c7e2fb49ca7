"""Runs tests in a copy of the working tree, in forks of a process that has torch imported."""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

import hypothesis
import pytest
import torch.utils.data

ROOT = Path(__file__).resolve().parents[2]

_HEAVY = ("torch.distributed", "torchvision.transforms.v2", "PIL.Image", "h5py")
# The test that noticed the last change runs first.
_OPTIONS = ["-x", "-q", "--ff", "--tb=line", "-p", "no:xdist"]
_OPTIONS += ["--hypothesis-profile=mutants"]
# hypothesis is imported before pytest runs, and need not be rewritten.
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
_LEAST_LIMIT_S = 5.0  # a busy machine is no failed test
_LEAST_TIMEOUT_S = 10.0  # of one test, as well
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
        gc.collect()
        gc.freeze()  # in each fork, the collector would copy all that was imported
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        # Valid by content: a changed file may have the time and the size that it had before.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        for name in ("dataloaders", "backends"):
            compileall.compile_dir(self.folder / name, quiet=2, invalidation_mode=mode)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def tests(self, names: list[str], file: str) -> Tests:
        """Return the tests that pytest finds by ``names``, to be run on changes of ``file``."""
        return Tests(self.folder, names, self.folder / file)


class _Quickest:
    """Runs the quickest files first, and in each its quickest tests; one that hangs fails.

    The seconds are those of the first run, of the unchanged tree, which writes them to ``place``.
    """

    def __init__(self, place: Path) -> None:
        self._place, self._took = place, defaultdict[str, float](float)
        known = json.loads(place.read_text()) if place.exists() else {}
        self._known = defaultdict[str, float](float, known)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if not self._known:
            return
        files = defaultdict[Path, float](float)
        for item in items:
            files[item.path] += self._known[item.nodeid]
            most_s = _LEAST_TIMEOUT_S + 5 * self._known[item.nodeid]
            item.add_marker(pytest.mark.timeout(most_s), append=False)
        # A fixture of a whole file is made once: its tests stay together.
        items.sort(key=lambda item: (files[item.path], self._known[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if not self._known:
            self._place.write_text(json.dumps(self._took))


class Tests:
    """Tests to be run on changes of one file.

    Attributes:
        unchanged: what they say of the unchanged file, as `of` has it.
    """

    def __init__(self, folder: Path, names: list[str], file: Path) -> None:
        self._folder, self._names, self._file = folder, names, file
        self._source = file.read_text()
        self._took = folder / "took.json"
        self._took.unlink(missing_ok=True)
        self._limit = _UNCHANGED_LIMIT_S
        began = time.monotonic()
        self.unchanged = self.of(self._source)
        self._limit = 5 * (_LEAST_LIMIT_S + time.monotonic() - began)

    def output(self) -> str:
        """Return the end of what the last tests wrote."""
        return (self._folder / "output").read_text(errors="replace")[-4000:]

    def of(self, source: str) -> str:
        """Return what the tests say with ``source`` in the file.

        "passed"; "failed"; "broken": they could not begin, since a test file could not be imported;
        or "hung": they took more than five times their seconds.
        """
        self._file.write_text(source)
        try:
            if (pid := os.fork()) == 0:
                self._run_pytest()
            return _waited(pid, self._limit)
        finally:
            self._file.write_text(self._source)

    def _run_pytest(self) -> NoReturn:
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
            os.environ["PYTHONPATH"] = str(self._folder)
            options = [*_OPTIONS, f"--basetemp={self._folder / 'tmp'}", *self._names]
            code = int(pytest.main(options, plugins=[_Quickest(self._took)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


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
    return {0: "passed", 1: "failed"}.get(os.waitstatus_to_exitcode(status), "broken")

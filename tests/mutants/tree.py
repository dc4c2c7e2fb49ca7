"""Runs tests in a copy of the working tree, in forks of a process that has torch imported.

    the tree, copied, one file changed ──> fork ──> pytest ──> passed, failed, broken, hung
                                            └─ workers and scripts of the tests read the copy too

The tests that failed before come first, then the quick ones; the first failure ends the run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from mutants.broken import ROOT

__all__ = ["NotPassing", "Tree"]

_HEAVY = ("torch.utils.data", "torch.distributed", "torchvision.transforms.v2", "PIL.Image", "h5py")
_LEAST_LIMIT = 20.0  # seconds: a busy machine is no failed test
_OPTIONS = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
# hypothesis is imported before pytest runs, and need not be rewritten.
_OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]


class NotPassing(Exception):
    """Tests do not pass without a change, so that they cannot notice one."""


class Tree:
    """A copy of the files that git knows or does not ignore; removed at the end of a ``with``."""

    def __enter__(self) -> Tree:
        for name in _HEAVY:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self._scratch = Path(tempfile.mkdtemp(prefix="mutants-")).resolve()
        self.folder = self._scratch / "tree"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.folder / name)
        self._failures: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._began = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def check(self, tests: list[str]) -> float:
        """Return the seconds that the tests take on the unchanged tree.

        Raises:
            NotPassing: they do not pass.
        """
        began = time.monotonic()
        outcome = self._run(tests, 3600.0, writes_bytecode=True)
        if outcome != "passed":
            print((self._scratch / "output").read_text(errors="replace")[-4000:])
            raise NotPassing(f"{' '.join(tests)} {outcome} on the unchanged tree: repair that")
        return time.monotonic() - began

    def outcome(self, file: str, source: bytes, tests: list[str], usual: float) -> str:
        """Return what the tests say with ``source`` in ``file``.

        "passed"; "failed"; "broken": they could not begin, since a test file could not be imported;
        or "hung": they took five times ``usual`` seconds.
        """
        place = self.folder / file
        kept, times = place.read_bytes(), place.stat()
        try:
            place.write_bytes(source)
            self._began += 1  # a time that no other version of the file had: no bytecode fits it
            os.utime(place, (self._began, self._began))
            return self._run(tests, max(_LEAST_LIMIT, 5 * usual))
        finally:
            place.write_bytes(kept)
            os.utime(place, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _run(self, tests: list[str], limit: float, *, writes_bytecode: bool = False) -> str:
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)
        said = self._scratch / "said"
        said.write_text('{"seconds": {}, "failed": []}')
        pid = os.fork()
        if pid == 0:
            self._child(tests, said, writes_bytecode)
        deadline = time.monotonic() + limit
        status = None
        while status is None and time.monotonic() < deadline:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = code if ended else None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):  # with all that the tests left behind
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
            return "hung"
        words = json.loads(said.read_text())
        self._seconds.update(words["seconds"])
        self._failures.update(words["failed"])
        known = {0: "passed", 1: "failed"}
        return known.get(os.waitstatus_to_exitcode(status), "broken")

    def _child(self, tests: list[str], said: Path, writes_bytecode: bool) -> None:
        code = 70
        try:
            os.setsid()
            output = os.open(self._scratch / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            ours = {str(ROOT), str(ROOT / "tests"), ""}
            sys.path[:] = [str(self.folder), *(place for place in sys.path if place not in ours)]
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.dont_write_bytecode = not writes_bytecode
            if not writes_bytecode:
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            plugin = _Plugin(said, self._failures, self._seconds)
            code = int(pytest.main([*_OPTIONS, *tests], plugins=[plugin]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class _Plugin:
    def __init__(self, said: Path, failures: Counter[str], seconds: dict[str, float]) -> None:
        self._said = said
        self._failures, self._seconds = failures, seconds
        self._now: dict[str, Any] = {"seconds": {}, "failed": []}

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        # The same examples each time, and no minutes spent on making one smaller.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutants", deadline=None, phases=phases, derandomize=True, database=None
        )
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(
            key=lambda item: (-self._failures[item.nodeid], self._seconds.get(item.nodeid, 0.0))
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._now["seconds"]
        seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._now["failed"].append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._said.write_text(json.dumps(self._now))

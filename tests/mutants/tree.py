"""Runs tests in a copy of the working tree, in forks of a process that has torch imported.

the tree, copied, one file changed ──> fork ──> pytest ──> passed, failed, broken, hung
                                        └─ workers and scripts of the tests read the copy too
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import hypothesis
import pytest

__all__ = ["ROOT", "Tree"]

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
        # By content: a changed file may have the time and the size that it had before.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        for name in ("dataloaders", "backends"):
            compileall.compile_dir(self.folder / name, quiet=2, invalidation_mode=mode)
        return self

    def __exit__(self, *_: object) -> None:
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
            return self._run(tests, limit)
        finally:
            place.write_text(kept)

    def output(self) -> str:
        """Return the end of what the last tests wrote."""
        return (self.folder / "output").read_text(errors="replace")[-4000:]

    def _run(self, tests: list[str], limit: float) -> str:
        pid = os.fork()
        if pid == 0:
            self._child(tests)
        deadline = time.monotonic() + limit
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            time.sleep(0.02)
            ended, status = os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(ProcessLookupError):  # with all that the tests left behind
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            os.waitpid(pid, 0)
            return "hung"
        known = {0: "passed", 1: "failed"}
        return known.get(os.waitstatus_to_exitcode(status), "broken")

    def _child(self, tests: list[str]) -> None:
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
            code = int(pytest.main([*_OPTIONS, *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

"""Run a user's program in this process as ``python`` would.

    Target("train.py", "file") or Target("pkg.train", "module")
        └── run(args) ──> Outcome ┬ finished    came to its end
                                  ├ exited      called sys.exit()
                                  ├ raised      an exception reached the top
                                  ├ interrupted Ctrl-C
                                  └ stopped     we ended it (StopScript)

The program gets its own ``__main__``, ``sys.argv`` and ``sys.path[0]``, so ``if __name__ ==
"__main__"``, argparse, pickling of its classes and spawned workers work as usual.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Literal

from dataloaders.errors import DataLoadersError
from dataloaders.scripts.stopping import StopScript, stoppable

Ending = Literal["finished", "exited", "raised", "interrupted", "stopped"]


class ScriptError(DataLoadersError):
    """The named program cannot be started."""


@dataclass(frozen=True)
class Outcome:
    """Says how a program ended."""

    ending: Ending
    status: int  # the exit status that python would have had; 0 when we stopped it
    error: BaseException | None = None  # that ended it; its traceback begins in the program

    def show_error(self) -> None:
        """Write the error that ended the program to stderr, as ``python`` would."""
        if isinstance(self.error, SystemExit):
            if self.error.code is not None and not isinstance(self.error.code, int):
                print(self.error.code, file=sys.stderr)
        elif self.error is not None:
            sys.stdout.flush()
            sys.excepthook(type(self.error), self.error, self.error.__traceback__)


@dataclass(frozen=True)
class Target:
    """Names a program: a file, or a module as for ``python -m``."""

    name: str  # the path or the dotted name, as given
    kind: Literal["file", "module"]

    @property
    def folder(self) -> Path:
        """The folder that becomes ``sys.path[0]``: that of the file, or the current one."""
        return Path(self.name).resolve().parent if self.kind == "file" else Path.cwd()

    def refuse_missing(self) -> None:
        """Raise ScriptError if it names a file that does not exist."""
        path = Path(self.name)
        if self.kind == "file" and not (path.is_file() and os.access(path, os.R_OK)):
            what = "cannot be read" if path.exists() else "does not exist"
            what = "is a folder" if path.is_dir() else what
            raise ScriptError(
                f"{self.name!r} {what}; give the path of a Python file, or -m and a module's name"
            )

    def run(self, args: list[str]) -> Outcome:
        """Run the program to its end with ``args`` as its command line.

        Its ``__main__`` module stays in place afterwards: exit handlers, and threads that outlive
        the program's last line, still need their globals.

        Raises:
            ScriptError: there is no such file or module, or it does not compile.
        """
        if not getattr(sys.flags, "safe_path", False):  # python -P puts no folder there
            sys.path[0] = str(self.folder)
        sys.argv = [self.name, *args]
        # Without a spec, multiprocessing has spawned workers run the file by its path.
        code, spec = (self._compiled(), None) if self.kind == "file" else self._module()
        main = ModuleType("__main__")
        # Keep the old module: without a reference to it, its functions lose their globals.
        _replaced_mains.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
        run: Any = runpy._run_code  # type: ignore[attr-defined]  # as `python -m` does
        file = code.co_filename
        return executed(lambda: run(code, vars(main), None, "__main__", spec, script_name=file))

    def _compiled(self) -> CodeType:
        self.refuse_missing()
        path = str(Path(self.name).resolve())
        with io.open_code(path) as file:
            source = file.read()
        try:
            return compile(source, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ScriptError(f"{self.name!r} does not compile: {error}") from error

    def _module(self) -> tuple[CodeType, ModuleSpec]:
        try:
            # As pdb and trace do. Of a package, it returns its __main__.
            _, spec, code = runpy._get_module_details(self.name)  # type: ignore[attr-defined]
        except ImportError as error:
            if error.name is not None:  # an import of its own failed
                raise
            raise ScriptError(
                f"-m {self.name}: {error}; the import path starts with {sys.path[0]!r}: run this "
                "from the folder that holds the package"
            ) from error
        sys.argv[0] = spec.origin or self.name
        return code, spec


def hidden_by(folder: Path) -> Path | None:
    """Return what scripts in ``folder`` import as ``dataloaders`` in place of ours, or None."""
    ours = Path(__file__).resolve().parents[1]
    as_file, as_folder = folder / "dataloaders.py", folder / "dataloaders"
    if as_file.is_file():
        return as_file
    if as_folder.is_dir() and as_folder.resolve() != ours and any(as_folder.glob("*.py")):
        return as_folder
    return None


_replaced_mains: list[ModuleType] = []


def executed(run: Callable[[], object]) -> Outcome:
    """Run a program, and wait for its threads; return how it ended."""
    usual, before = threading.excepthook, set(threading.enumerate())
    # A thread of the script whose loop was stopped prints no traceback.
    threading.excepthook = lambda args: (
        None if issubclass(args.exc_type, StopScript) else threading.__excepthook__(args)
    )
    try:
        with stoppable():
            run()
            for thread in set(threading.enumerate()) - before:
                # An executor's is told to end when Python does.
                module = getattr(getattr(thread, "_target", None), "__module__", "")
                if not thread.daemon and not module.startswith("concurrent."):
                    thread.join()  # as Python does at its end
    except StopScript:
        return Outcome("stopped", 0)
    except KeyboardInterrupt as error:
        return Outcome("interrupted", 130, _from_script(error))
    except SystemExit as error:
        if isinstance(error.__context__, StopScript):
            return Outcome("stopped", 0)
        if isinstance(error.__context__, KeyboardInterrupt):
            # Lightning catches Ctrl-C, tears down and calls sys.exit().
            return Outcome("interrupted", 130, None)
        given = error.code or 0
        return Outcome("exited", given if isinstance(given, int) else 1, error)
    except BaseException as error:
        return Outcome("raised", 1, _from_script(error))
    finally:
        threading.excepthook = usual
    return Outcome("finished", 0)


def _from_script(error: BaseException) -> BaseException:
    """Return ``error`` with our frames and runpy's cut off the front of its traceback."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals["__name__"] in (__name__, "runpy"):
        trace = trace.tb_next
    return error.with_traceback(trace)

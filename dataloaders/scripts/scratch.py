"""Protect the files that existed before a check from the program that it runs.

    open(old, "w"), torch.save(x, old), os.replace(new, old)    write to a scratch folder
    os.remove(old), then os.link(new, old) or os.symlink        make a copy there
    open(old) and torch.load(old) after that                    read what was written there
    os.remove(old), shutil.rmtree(folder of old files)          do nothing
    new checkpoints, new event files of TensorBoard             are moved there at the end

A check trains the program's model on a few batches, over and over, so its checkpoints must not
replace real ones. The ``st_ctime`` of a file shows whether it existed before. Files that a library
in C opens itself are not protected, nor those opened for changes in place (``"r+"``, the default of
``numpy.memmap``).
"""

from __future__ import annotations

import atexit
import builtins
import errno
import functools
import importlib
import importlib.util
import io
import os
import pathlib
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

_CHECKPOINTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors", ".tar")
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_EVENTS = "events.out.tfevents"
_PATHS = (str, bytes, os.PathLike)


class Scratch:
    """Diverts writes of this process from files that existed before, while entered.

    Args:
        training: returns whether the program has begun to train. From then on, new files with a
            checkpoint's suffix are moved to the scratch folder; earlier ones are the dataset's.
        but_in: a folder in which anything may be overwritten.
    """

    def __init__(self, training: Callable[[], bool], but_in: Path | None = None) -> None:
        # Where diverted files go; it may not exist yet.
        self.folder = Path(tempfile.gettempdir()) / f"dataloaders-check-{secrets.token_hex(4)}"
        self.diverted: dict[str, str] = {}  # the program's path -> the path in the folder
        self.kept: list[str] = []  # files that the program deleted or moved away
        self._training = training
        self._here = os.getcwd()  # the program may change it, or delete it
        self._leave = _NOT_FILES if but_in is None else (*_NOT_FILES, f"{but_in}{os.sep}")
        self._old: set[str] = set()  # old files found so far; their st_ctime may change
        self._new_files: list[str] = []
        self._new_folders: dict[str, bool] = {}  # -> whether it was made in training
        self._began_ns = 0
        self._undo = ExitStack()

    def __enter__(self) -> Scratch:
        with tempfile.NamedTemporaryFile() as probe:
            self._began_ns = os.stat(probe.name).st_ctime_ns
        time.sleep(0.02)  # until the file system's clock has ticked: later files are newer
        self._real_open = builtins.open
        self._real_unlink = os.unlink
        self._real_rename = os.replace
        self._real_mkdir, self._real_rmtree = os.mkdir, shutil.rmtree
        self._real_register = atexit.register
        scripted: Any = torch.jit.RecursiveScriptModule  # type: ignore[attr-defined]
        accessor = getattr(pathlib, "_NormalAccessor", None)  # pathlib's own names, in Python 3.10
        for owner, name, function in (
            (io, "open", self._open),
            (os, "remove", self._remove),
            (os, "unlink", self._remove),
            (os, "rename", self._move),
            (os, "replace", self._move),
            (os, "link", functools.partial(self._link, os.link)),
            (os, "symlink", functools.partial(self._link, os.symlink)),
            (os, "chmod", self._at(os.chmod, 0, "path", self._changes)),
            (os, "utime", self._at(os.utime, 0, "path", self._changes)),
            (os, "mkdir", self._mkdir),
            (shutil, "rmtree", self._rmtree),
            (atexit, "register", self._register),
            (torch, "save", self._at(torch.save, 1, "f", self._writes)),
            (torch, "load", self._at(torch.load, 0, "f", self._reads)),
            (scripted, "save", self._at(scripted.save, 1, "f", self._writes)),
            (torch.jit, "load", self._at(torch.jit.load, 0, "f", self._reads)),
        ):
            self._replace(owner, name, function)
            if owner in (io, os) and hasattr(accessor, name):
                self._replace(accessor, name, staticmethod(function))
        # builtins, and modules with a name of their own for it, such as tarfile.
        for each in list(sys.modules.values()):
            for name, value in list(getattr(each, "__dict__", {}).items()):
                if value is self._real_open:
                    self._replace(each, name, self._open)
        openers: Any = np.lib._datasource._file_openers  # type: ignore[attr-defined]
        self._undo.enter_context(mock.patch.dict(openers._file_openers, {None: self._open}))
        if importlib.util.find_spec("safetensors") is not None:
            module: Any = importlib.import_module("safetensors.torch")
            save, load = module.save_file, module.load_file
            self._replace(module, "save_file", self._at(save, 1, "filename", self._writes))
            self._replace(module, "load_file", self._at(load, 0, "filename", self._reads))
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()
        for path in dict.fromkeys(self._new_root(file) for file in self._new_files):
            if os.path.exists(path):
                self._put_away(path)
        for path in sorted(self._new_folders, reverse=True):
            with suppress(OSError):
                os.rmdir(path)  # of those that are empty now

    def notes(self) -> list[str]:
        """Return sentences that say what was diverted."""
        notes = []
        if self.diverted:
            notes.append(
                f"written to {self.folder} and not in place, since the check trained the model: "
                f"{self._some(self.diverted)}; --let-write writes in place"
            )
        if self.kept:
            some = self._some(dict.fromkeys(self.kept))
            notes.append(f"not deleted, since the check ran the script: {some}")
        return notes

    def _some(self, paths: Collection[str]) -> str:
        names = [os.path.relpath(path, self._here) for path in list(paths)[:4]]
        more = len(paths) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    # Called by the program

    def _open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(mode, str) and isinstance(file, _PATHS):
            if mode[:1] in ("w", "a", "x"):
                file = self._writes(file, appends=mode[0] == "a")
            else:
                file = self._reads(file)
        return self._real_open(file, mode, *args, **options)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        if dir_fd is None and self._is_old(path, follow=False):
            absolute = _absolute(path)
            self.kept.append(absolute)
            with suppress(KeyError, OSError):
                self._real_unlink(self.diverted.pop(absolute))
            return
        self._real_unlink(path, dir_fd=dir_fd)

    def _move(self, src: Any, dst: Any, **descriptors: Any) -> None:
        if descriptors:
            self._real_rename(src, dst, **descriptors)
            return
        source = self._reads(src)
        if os.path.isdir(source):
            if self._holds_old(source):
                self.kept.append(_absolute(src))
            else:
                self._real_rename(source, dst)
                self._moved_folder(_absolute(src), _absolute(dst))
            return
        target = self._writes(dst)
        if self._is_old(source):
            shutil.copy(source, target)
            self.kept.append(_absolute(src))
            return
        if target == dst and source == src:
            self._real_rename(src, dst)
        else:
            shutil.copy(source, target)
            self._real_unlink(source)
        self.diverted.pop(_absolute(src), None)

    def _link(self, make: Any, src: Any, dst: Any, *args: Any, **options: Any) -> None:
        if any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            make(src, dst, *args, **options)
            return
        symbolic, absolute = make.__name__ == "symlink", _absolute(dst)
        original = os.path.join(os.path.dirname(dst), src) if symbolic else src
        source, target = self._reads(original), dst
        if absolute in self.kept and absolute not in self.diverted:  # the program removed it
            self.diverted[absolute] = target = self._aside(absolute)
        elif os.path.lexists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        else:
            self._writes(dst)
        shares = not symbolic and self._is_old(src)  # one file would have two names
        if target == dst and source == original and not shares:
            make(src, dst, *args, **options)
        elif os.path.isfile(source):
            shutil.copy(source, target)
        else:
            make(_absolute(source), target)

    def _rmtree(self, path: Any, *args: Any, **options: Any) -> None:
        if isinstance(path, _PATHS) and self._holds_old(path):
            self.kept.append(_absolute(path))
        else:
            self._real_rmtree(path, *args, **options)

    def _mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        absolute = _absolute(path)
        try:
            self._real_mkdir(path, *args, **options)
        except FileExistsError:
            if not any(_inside(absolute, one) for one in self.kept):
                raise
            return  # the program removed it, or a folder around it
        if not options.get("dir_fd"):
            self._new_folders[absolute] = self._training()

    def _register(self, function: Any, *args: Any, **options: Any) -> Any:
        def protected() -> None:
            with self:
                function(*args, **options)

        self._real_register(protected)
        return function

    # Paths

    def _writes(self, path: Any, appends: bool = False) -> Any:
        """Return where to write instead of ``path``; note new checkpoints."""
        if not isinstance(path, _PATHS):
            return path
        absolute = _absolute(path)
        if absolute in self.diverted:
            return self.diverted[absolute]
        if self._is_old(path):
            aside = self._aside(absolute)
            if appends:
                shutil.copyfile(absolute, aside)
            self.diverted[absolute] = aside
            return aside
        name = os.path.basename(absolute)
        if _EVENTS in name or (name.endswith(_CHECKPOINTS) and self._training()):
            self._new_files.append(absolute)
        return path

    def _reads(self, path: Any) -> Any:
        if self.diverted and isinstance(path, _PATHS):
            return self.diverted.get(_absolute(path), path)
        return path

    def _aside(self, absolute: str) -> str:
        aside = self.folder / absolute.lstrip("/")
        os.makedirs(aside.parent, exist_ok=True)
        return str(aside)

    def _changes(self, path: Any) -> Any:
        """Return the file whose mode or times are set; its st_ctime changes, so it is noted."""
        if isinstance(path, _PATHS):
            self._is_old(path)
        return self._reads(path)

    def _is_old(self, path: Any, follow: bool = True) -> bool:
        try:
            found, absolute = os.stat(path, follow_symlinks=follow), _absolute(path)
        except (OSError, ValueError, TypeError):
            return False
        is_file = stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)
        old = is_file and (found.st_ctime_ns <= self._began_ns or absolute in self._old)
        if old:
            self._old.add(absolute)
        return old and not absolute.startswith(self._leave)

    def _holds_old(self, folder: Any) -> bool:
        return any(
            self._is_old(os.path.join(where, name))
            for where, _, names in os.walk(folder)
            for name in names
        )

    def _new_root(self, file: str) -> str:
        """Return the outermost folder made in training that holds ``file``, or the file itself."""
        folders = [one for one, trained in self._new_folders.items() if trained]
        return min((one for one in folders if _inside(file, one)), key=len, default=file)

    def _moved_folder(self, before: str, after: str) -> None:
        def moved(path: str) -> str:
            return after + path[len(before) :] if _inside(path, before) else path

        self._new_files = [moved(path) for path in self._new_files]
        self._new_folders = {moved(path): trained for path, trained in self._new_folders.items()}

    def _put_away(self, path: str) -> None:
        aside = self._aside(path)
        try:
            shutil.move(path, aside)
        except OSError:
            return  # no room there: it stays where it is
        self.diverted[path] = aside

    # Replacing functions

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._undo.enter_context(mock.patch.object(owner, name, function))

    def _at(self, function: Any, position: int, name: str, where: Callable[[Any], Any]) -> Any:
        """Return ``function`` with its path argument replaced by ``where`` of it."""

        @functools.wraps(function)
        def redirected(*args: Any, **options: Any) -> Any:
            if name in options:
                options[name] = where(options[name])
            args = (*args[:position], *map(where, args[position : position + 1]),
                    *args[position + 1 :])  # fmt: skip
            return function(*args, **options)

        return redirected


def quiet_trackers(folder: Path) -> AbstractContextManager[Any]:
    """Switch W&B off, MLflow and TensorBoard to ``folder``; set DATALOADERS_CHECK=1."""
    wanted = {
        "DATALOADERS_CHECK": "1",
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
    }
    return mock.patch.dict(os.environ, wanted)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(os.fspath(path)))

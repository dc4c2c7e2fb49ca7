"""Keeps the files that existed before a check as they are, whatever the program writes.

    open(old, "w"), torch.save(x, old), os.replace(new, old)    ──> a scratch folder
    os.remove(old), then os.link(new, old) or os.symlink        ──> a copy there
    open(old) and torch.load(old) after that                    ──> what was written there
    os.remove(old), shutil.rmtree(folder of old files)          ──> nothing happens
    new checkpoints, new event files of TensorBoard             ──> moved there in the end

A check trains the program's model on few batches, over and over: its checkpoints must not take the
place of real ones. What is old is what the file system says (``st_ctime``). Files that a library
written in C opens itself, and files that are opened for changing in place (``"r+"``, as
``numpy.memmap`` does by default), are not looked after.
"""

from __future__ import annotations

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
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_CHECKPOINTS = (".bin", ".ckpt", ".pt", ".pth", ".safetensors", ".tar")
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_EVENTS = "events.out.tfevents"


class Scratch:
    """Diverts what this process writes over files that were there before, while entered.

    A new checkpoint is moved to the scratch folder if it was written once the program was
    ``training``: before, files are the dataset's. Anything may be written in ``but_in``.
    """

    def __init__(self, training: Callable[[], bool], but_in: Path | None = None) -> None:
        # Where everything goes that is diverted; it may not exist yet.
        self.folder = Path(tempfile.gettempdir()) / f"dataloaders-check-{secrets.token_hex(4)}"
        self.diverted: dict[str, str] = {}  # where a file exists, or existed -> where it is there
        self.kept: list[str] = []  # what the program wanted to delete or move
        self._training = training
        self._leave = _NOT_FILES if but_in is None else (*_NOT_FILES, f"{but_in}{os.sep}")
        self._old: set[str] = set()  # files seen to be so: st_ctime may change
        self._new_files: list[str] = []
        self._new_folders: dict[str, bool] = {}  # whether each was made in training
        self._began_ns = 0
        self._undo = ExitStack()

    def __enter__(self) -> Scratch:
        with tempfile.NamedTemporaryFile() as probe:
            self._began_ns = os.stat(probe.name).st_ctime_ns
        time.sleep(0.02)  # the file system's clock ticks: what comes from now on is newer
        self._real_open = builtins.open
        self._real_unlink = os.unlink
        self._real_rename = os.replace
        self._real_mkdir, self._real_rmtree = os.mkdir, shutil.rmtree
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 binds them there
        for owner, name, ours in (
            (builtins, "open", self._open),
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
            (torch, "save", self._at(torch.save, 1, "f", self._writes)),
            (torch, "load", self._at(torch.load, 0, "f", self._reads)),
        ):
            self._replace(owner, name, ours)
            if owner in (io, os) and hasattr(accessor, name):
                self._replace(accessor, name, staticmethod(ours))
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
        """Return what was diverted, in sentences."""
        notes = []
        if self.diverted:
            some = [os.path.relpath(path) for path in list(self.diverted)[:4]]
            more = len(self.diverted) - len(some)
            names = ", ".join(some) + (f" and {more} more" if more else "")
            notes.append(
                f"written to {self.folder} and not in place, since the check trained the model: "
                f"{names}; --let-write writes in place"
            )
        if self.kept:
            some = [os.path.relpath(path) for path in [*dict.fromkeys(self.kept)][:4]]
            notes.append(f"not deleted, since the check ran the script: {', '.join(some)}")
        return notes

    # What the program calls

    def _open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if isinstance(mode, str) and isinstance(file, (str, os.PathLike)):
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
        absolute, source, target = _absolute(dst), src, dst
        shares = make.__name__ == "link" and self._is_old(src)  # one file with two names
        if make.__name__ == "symlink":  # relative to where it stands
            source = os.path.join(os.path.dirname(dst), src)
        if absolute in self.kept and absolute not in self.diverted:  # the program removed it
            self.diverted[absolute] = target = self._aside(absolute)
        elif os.path.lexists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        else:
            self._writes(dst)
        if target == dst and self._reads(source) == source and not shares:
            make(src, dst, *args, **options)
        elif os.path.isfile(self._reads(source)):
            shutil.copy(self._reads(source), target)
        else:
            make(_absolute(source), target)

    def _rmtree(self, path: Any, *args: Any, **options: Any) -> None:
        if isinstance(path, (str, os.PathLike)) and self._holds_old(path):
            self.kept.append(_absolute(path))
        else:
            self._real_rmtree(path, *args, **options)

    def _mkdir(self, path: Any, *args: Any, **options: Any) -> None:
        self._real_mkdir(path, *args, **options)
        if not options.get("dir_fd"):
            self._new_folders[_absolute(path)] = self._training()

    # Where things are

    def _writes(self, path: Any, appends: bool = False) -> Any:
        """Return the path to write ``path`` to; a new checkpoint's own is noted."""
        if not isinstance(path, (str, os.PathLike)):
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
        if self.diverted and isinstance(path, (str, os.PathLike)):
            return self.diverted.get(_absolute(path), path)
        return path

    def _aside(self, absolute: str) -> str:
        aside = self.folder / absolute.lstrip("/")
        os.makedirs(aside.parent, exist_ok=True)
        return str(aside)

    def _changes(self, path: Any) -> Any:
        """Return the path of the file whose mode or times, and so st_ctime, are to be changed."""
        if isinstance(path, (str, os.PathLike)):
            self._is_old(path)  # remembered
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
        return min((one for one in folders if file.startswith(one + os.sep)), key=len, default=file)

    def _moved_folder(self, before: str, after: str) -> None:
        def moved(path: str) -> str:
            inside = path == before or path.startswith(before + os.sep)
            return after + path[len(before) :] if inside else path

        self._new_files = [moved(path) for path in self._new_files]
        self._new_folders = {moved(path): trained for path, trained in self._new_folders.items()}

    def _put_away(self, path: str) -> None:
        aside = self._aside(path)
        try:
            shutil.move(path, aside)
        except OSError:
            return  # no room for it there: it stays where the program put it
        self.diverted[path] = aside

    # How they are called here

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._undo.enter_context(mock.patch.object(owner, name, function))

    def _at(self, function: Any, position: int, name: str, where: Callable[[Any], Any]) -> Any:
        """Return ``function`` with its path argument sent through ``where``."""

        @functools.wraps(function)
        def sent(*args: Any, **options: Any) -> Any:
            if name in options:
                options[name] = where(options[name])
            args = (*args[:position], *map(where, args[position : position + 1]),
                    *args[position + 1 :])  # fmt: skip
            return function(*args, **options)

        return sent


def quiet_trackers(folder: Path) -> AbstractContextManager[Any]:
    """Inside: W&B is off, MLflow and TensorBoard write to ``folder``, DATALOADERS_CHECK is 1."""
    wanted = {
        "DATALOADERS_CHECK": "1",
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "TENSORBOARD_LOGGING_DIR": str(folder / "tensorboard"),
    }
    return mock.patch.dict(os.environ, wanted)


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(os.fspath(path)))

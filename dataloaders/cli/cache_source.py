"""Find the dataset that a command line names."""

from __future__ import annotations

import importlib
import inspect
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataloaders.cli.similar import similar
from dataloaders.errors import MissingDependency, OptionError

__all__ = ["dataset_of"]


def dataset_of(text: str, *, resize: int | None = None, crop: int | None = None) -> Any:
    """Return the dataset called ``text``, such as ``package.module:name`` or ``file.py:name``.

    The name is of a dataset, or of a function without arguments that returns one. ``text`` may also
    be a folder with one folder of images for each class, ``resize`` their shorter side, ``crop``
    the middle of them.

    Raises:
        OptionError: there is none; the message says how to name one.
        MissingDependency: a folder of images needs torchvision.
    """
    if os.path.isdir(text):  # of a Path, it raises where one may not look
        return _images(Path(text), resize, crop)
    source, colon, name = text.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise OptionError(_no_dataset(text))
    if resize is not None or crop is not None:
        raise OptionError(
            f"--resize and --crop are for a folder of images, and {text!r} is none; put Resize and "
            "CenterCrop into the dataset's transforms"
        )
    found = _found(source, name)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        try:
            with suppress(ValueError):  # it does not say what it takes
                inspect.signature(found).bind()
        except TypeError as error:  # its own errors are not caught here: it is not called
            raise OptionError(
                f"{text!r} cannot be called without arguments ({error}); give the name of a "
                "dataset, or of a function without arguments that returns one"
            ) from None
        found = found()
    if not hasattr(found, "__getitem__") or not hasattr(found, "__len__"):
        raise OptionError(
            f"{text!r} is a {type(found).__name__}; a cache is built of a dataset with __getitem__ "
            "and __len__, or of a function without arguments that returns one"
        )
    return found


def _no_dataset(text: str) -> str:
    rule, path = "give module:name, file.py:name or a folder of images", Path(text)
    if text.endswith(".py"):
        return f"{text!r} is a file, and which dataset in it is not said; give {text}:name"
    if os.path.isfile(path):  # of a Path, it raises where one may not look
        return f"{text!r} is a file, and the dataset comes before the path of the cache; {rule}"
    near = similar(path.name, os.listdir(path.parent)) if os.path.isdir(path.parent) else ""
    return f"{text!r} names no dataset, and there is no such folder{near}; {rule}"


def _found(source: str, name: str) -> Any:
    path = Path(source)
    try:
        if not source.endswith(".py"):
            sys.path.insert(0, "")  # as python -m does
            module: Any = importlib.import_module(source)
        elif not os.path.isfile(path):
            raise OptionError(f"{source!r} does not exist; give the path of a Python file")
        else:
            sys.path.insert(0, str(path.resolve().parent))
            if path.stem.isidentifier():  # under its own name, so that spawned workers import it
                module = importlib.import_module(path.stem)
            else:
                module = type("Script", (), runpy.run_path(source, run_name=path.stem))
    except ModuleNotFoundError as error:
        if error.name is None or not (source + ".").startswith(error.name + "."):
            raise
        near = similar(source, [path.stem for path in Path().glob("*.py")])
        raise OptionError(
            f"there is no module {source!r} ({error}){near}; run this from the folder it is in"
        ) from None
    if not hasattr(module, name):
        near = similar(name, [each for each in vars(module) if not each.startswith("_")])
        raise OptionError(f"{source!r} has no {name!r} at its top level{near}")
    return getattr(module, name)


def _images(folder: Path, resize: int | None, crop: int | None) -> Any:
    try:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2
    except ImportError as error:
        raise MissingDependency(
            f"a folder of images needs torchvision ({error}); install it with: "
            "pip install 'gpu-dataloaders[vision]'"
        ) from error
    sizes = ((v2.Resize, resize), (v2.CenterCrop, crop))
    steps = [member(size) for member, size in sizes if size is not None]
    try:
        return ImageFolder(str(folder), transform=v2.Compose(steps) if steps else None)
    except OSError as error:
        raise OptionError(
            f"{str(folder)!r} is no folder of images: {error}; it must hold one folder of images "
            "for each class"
        ) from None

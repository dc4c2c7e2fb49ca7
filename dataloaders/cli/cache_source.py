"""Find the dataset that a command line names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from contextlib import suppress
from typing import Any

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
    if os.path.isdir(text):
        return _images(text, resize, crop)
    source, _, name = text.rpartition(":")
    if not source or not name.isidentifier():
        raise OptionError(
            f"{text!r} names no dataset; give module:name, file.py:name or a folder of images"
        )
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


def _found(source: str, name: str) -> Any:
    """Return what is called ``name`` in a module or a Python file."""
    module, folder = source, ""  # where python -m looks first
    if source.endswith(".py"):
        if not os.path.isfile(source):
            raise OptionError(f"{source!r} does not exist; give the path of a Python file")
        folder, file = os.path.split(os.path.realpath(source))
        module = file.removesuffix(".py")  # under its own name, so that spawned workers import it
    sys.path.insert(0, folder)
    try:
        members = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise
        raise OptionError(
            f"there is no module {module!r} ({error}); run this from the folder it is in"
        ) from None
    if name not in members:
        raise OptionError(f"{source!r} has no {name!r} at its top level")
    return members[name]


def _images(folder: str, resize: int | None, crop: int | None) -> Any:
    for flag, size in (("--resize", resize), ("--crop", crop)):
        if size is not None and size < 1:
            raise OptionError(f"{flag} {size}: it must be 1 or more, in pixels")
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
        return ImageFolder(folder, transform=v2.Compose(steps) if steps else None)
    except OSError as error:
        raise OptionError(
            f"{folder!r} is no folder of images: {error}; it must hold one folder of images for "
            "each class"
        ) from None

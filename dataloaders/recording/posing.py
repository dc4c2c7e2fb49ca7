"""Subclasses that pose as the classes that they derive from."""

from __future__ import annotations

import copyreg
import functools
from typing import Any


def posed(cls: Any) -> Any:
    """Return the class that ``cls`` poses as; ``cls`` itself if it does not pose."""
    return cls.__dict__.get("_posed", cls)


@functools.cache
def posing(mixin: type, cls: type) -> Any:
    """Return a subclass of ``mixin`` and ``cls`` that equals ``cls``, also as a key of a dict.

    torchvision and collation look transforms and kernels up by exact type.
    """
    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(cls, name) for name in names}
    return _meta(type(cls))(cls.__name__, (mixin, cls), {**body, "_posed": cls})


@functools.cache
def _meta(base: type) -> Any:
    class Posing(base):  # type: ignore[misc]
        def __eq__(cls, other: object) -> bool:
            return posed(cls) is (posed(other) if isinstance(other, type) else other)

        def __hash__(cls) -> int:
            return hash(posed(cls)) if posed(cls) is not cls else type.__hash__(cls)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return posed(cls)(*args, **kwargs)

    copyreg.pickle(Posing, lambda cls: (_same, (posed(cls),)))
    return Posing


def _same(cls: Any) -> Any:
    return cls

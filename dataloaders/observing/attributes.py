"""Read attributes of a dataset without running its code."""

from __future__ import annotations

from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

_QUIET = (FunctionType, staticmethod, classmethod, MemberDescriptorType, GetSetDescriptorType)
"""Class members that Python itself reads: methods, slots, attributes of built-in types."""


def held(value: Any, name: str) -> Any:
    """Return attribute ``name`` of ``value``; None if there is none, or if reading it runs code.

    A property or a ``__getattr__`` may open a file, which would then be open in this process.
    Properties of torch's and torchvision's classes open nothing, so they are read.
    """
    kind = type(value)
    in_class = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    if isinstance(in_class, property):
        module = str(getattr(in_class.fget, "__module__", ""))
        return getattr(value, name) if module.startswith(("torch.", "torchvision.")) else None
    own = getattr(value, "__dict__", {})
    if name in own:
        return own[name]
    if isinstance(in_class, _QUIET):
        try:
            return in_class.__get__(value, kind)
        except AttributeError:  # a slot that was never filled
            return None
    # Anything else with a __get__ runs code.
    return None if hasattr(type(in_class), "__get__") else in_class

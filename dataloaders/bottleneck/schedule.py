"""Decisions of the check from numbers that it is given: no clock, no loader, no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Agree"]

Agree: TypeAlias = Callable[[list[float]], list[float]]
"""Called at the same points by every rank with its own numbers; returns rank 0's."""

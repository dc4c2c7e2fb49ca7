"""Rows of a dataset: each as cells, and some at a time where that is faster.

    read, read, ... read ──nothing drawn──> cells, cells, ... cells
                         ──something──────> each read again, the generators seeded by its number

What is done with a row besides reading it takes twice as long if it is done row by row: whenever a
sample was decoded, the core's caches hold nothing of it any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaders.cache.cut import Call, Cut
from dataloaders.cache.failure import not_interrupted
from dataloaders.cache.sample import Cell, Structure, split
from dataloaders.cache.seeds import draws_since, seed_for, states
from dataloaders.errors import CacheError, add_note

__all__ = ["MOST_BYTES", "Reader", "cells_of", "read_row", "row_of"]

MOST_BYTES = 4 << 20
"""Rows that are read at a time have about so many; the core's caches hold them."""

_MOST_ROWS = 16
_MOST_S = 0.1  # after which no more rows are added to those that were read


def read_row(
    cut: Cut, index: int, calls: Sequence[Call] | None = None
) -> tuple[Structure, list[Cell]]:
    """Row ``index`` as cells.

    Raises:
        CacheError, Exception: as `row_of` and `cells_of`.
    """
    return cells_of(cut, index, row_of(cut, index, calls))


def row_of(cut: Cut, index: int, calls: Sequence[Call] | None = None) -> Any:
    """Row ``index`` as it is read.

    Raises:
        CacheError: it went through the transforms in another way than ``calls`` say.
        Exception: what reading it raised, with a note that names the sample.
    """
    try:
        return cut.read(index, calls)
    except BaseException as error:
        _name(error, cut, index)
        raise


def cells_of(cut: Cut, index: int, row: Any) -> tuple[Structure, list[Cell]]:
    """What was read as row ``index`` as cells.

    Raises:
        CacheError: it cannot be kept; the message names it.
        Exception: what an image raised that is only decoded now, with a note that names the sample.
    """
    try:
        return split(row)
    except BaseException as error:
        _name(error, cut, index)
        raise


def _name(error: BaseException, cut: Cut, index: int) -> None:
    """Have ``error`` name the sample.

    Raises:
        CacheError: instead of one that names none.
    """
    if isinstance(error, CacheError):
        raise CacheError(f"sample {index} cannot be kept: {error}") from error
    not_interrupted(error)
    note = (
        f"dataloaders: raised by sample {index} of {type(cut.dataset).__name__} while its cache "
        "was built"
    )
    if isinstance(error, Exception):
        note += '; on_error="skip" leaves such samples out'
    add_note(error, note)


@dataclass(frozen=True)
class _Unread:
    """Stands for a row, reading which raised this."""

    error: BaseException


class Reader:
    """Reads rows, each as it is with the process-wide generators seeded by its number.

    Args:
        cut: gives the rows.
        calls: how each of them must go through the transforms; None: however it does.
        drawn: whether rows draw from these generators: then they are seeded for each. Else they
            are once one does.
        fleeting: whether a row may have changed when another one has been read.
    """

    def __init__(
        self, cut: Cut, calls: Sequence[Call] | None, *, drawn: bool, fleeting: bool
    ) -> None:
        self._cut = cut
        self._calls = calls
        self._drawn = drawn
        self._most = 1 if fleeting else _MOST_ROWS
        self._count = 1

    def groups(self, numbers: range, before: Callable[[], None]) -> Iterator[list[tuple[int, Any]]]:
        """The rows with these numbers: those that are read at a time, each for `cells`.

        ``before`` is called before some are read.
        """
        seed_for(numbers.start)
        undrawn = states()
        while numbers:
            before()
            rows = self._some(numbers[: self._count])
            if not self._drawn and draws_since(undrawn):
                self._drawn = True
                rows = self._some(numbers[: self._count])
            numbers = numbers[len(rows) :]
            yield rows

    def cells(self, index: int, row: Any) -> tuple[Structure, list[Cell]]:
        """One of a group as cells.

        Raises:
            CacheError, Exception: as `read_row`.
        """
        if isinstance(row, _Unread):
            raise row.error
        found = cells_of(self._cut, index, row)
        size = sum(cell.array.nbytes for cell in found[1])
        self._count = max(1, min(self._most, MOST_BYTES // max(1, size)))
        return found

    def _some(self, numbers: range) -> list[tuple[int, Any]]:
        """The first of these rows, up to one that cannot be read."""
        until = time.monotonic() + _MOST_S
        found: list[tuple[int, Any]] = []
        for index in numbers:
            if self._drawn:
                seed_for(index)
            try:
                found.append((index, row_of(self._cut, index, self._calls)))
            except BaseException as error:
                found.append((index, _Unread(not_interrupted(error))))
                break
            if time.monotonic() >= until:
                break
        return found

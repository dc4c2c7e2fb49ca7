"""Make one part of a cache: samples read one by one, their leaves copied, one finished file.

    samples 1200 to 1699 ──read──> leaves, images encoded ──> RowBuffer ──writing.py──> 01200.h5

A part is closed early when its rows take too much memory or too long; the rest is another part.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dataloaders.cache.build.parts import BuildFolder, Part, unfinished_at
from dataloaders.cache.build.reading import (
    BYTES_PER_LEAF,
    DrawDetector,
    draws_refused,
    error_text,
    read_row,
    seed_for,
)
from dataloaders.cache.format.disk import writing
from dataloaders.cache.format.entries import MOST_FIXED, MOST_VARIANTS, ColumnEntry, Variant
from dataloaders.cache.format.writing import About, Table, write_cache
from dataloaders.cache.sample.cut import Call, Cut
from dataloaders.cache.sample.encoding import images_encoded
from dataloaders.cache.sample.images import Images
from dataloaders.cache.sample.leaf import Leaf
from dataloaders.cache.sample.sample import Structure, column_names
from dataloaders.errors import CacheError
from dataloaders.seeding.states import random_states_kept

PART_BYTES = 96 << 20
"""Rows are written when they take more memory than this."""

PART_SECONDS = 30.0
"""... or took longer than this."""

_READ_BETWEEN_CHECKS = 64  # a check takes some 100 us
_NO_SAMPLE = 2_718_281_827  # its seed is one that datasets are unlikely to use themselves


@dataclass(frozen=True)
class Maker:
    """Make the parts of a range of samples: one, unless it takes too much memory or time."""

    cut: Cut
    calls: tuple[Call, ...]  # how each row must have gone through the transforms
    allow_random: bool
    skip: bool
    images: Images
    folder: BuildFolder
    about: About  # but for the samples

    def __call__(self, samples: range) -> list[Part]:
        """Return what was made. The last part is still to be finished, while others are made.

        Raises:
            CacheError: the samples cannot be kept in one cache, or the disk is full.
            Exception: the sample's own.
        """
        made: list[Part] = []
        left = samples
        while left or not made:  # of no samples there is a part, too
            if made:
                made[-1] = self.folder.finish(made[-1])
            rows = RowBuffer()
            failed: list[tuple[int, str]] = []
            with random_states_kept(cuda=False):
                stop = self._read(left, rows, failed)
            with writing(self.folder.path):
                made.append(self._written(range(left.start, stop), rows, failed))
            left = range(stop, samples.stop)
        return made

    def _read(self, samples: range, rows: RowBuffer, failed: list[tuple[int, str]]) -> int:
        """Read rows until the part is full; return the number of the first sample not read."""
        cut = self.cut
        detector = None if self.allow_random else DrawDetector(_NO_SAMPLE)
        until = time.monotonic() + PART_SECONDS
        for index in samples:
            if rows.memory > PART_BYTES or time.monotonic() > until:
                samples = range(samples.start, index)
                break
            if detector is None:
                seed_for(index)
            elif index % _READ_BETWEEN_CHECKS == 0:
                self._refuse_draws(detector, samples, index)
            row = None
            try:
                structure, leaves = read_row(cut, index, self.calls)
                row = structure, images_encoded(self.images, index, structure, leaves)
            except Exception as error:
                if not self.skip:
                    raise
                failed.append((index, error_text(error)))
            if row is not None:
                try:
                    rows.add(index, *row)
                except CacheError:
                    self._refuse_draws(detector, samples, index + 1)
                    raise
        self._refuse_draws(detector, samples, samples.stop)
        return samples.stop

    def _refuse_draws(self, detector: DrawDetector | None, samples: range, stop: int) -> None:
        """Raise CacheError if one of the last samples before ``stop`` drew random numbers.

        Also if it failed: which samples are left out must not depend on what is drawn.
        """
        if detector is None or not (moved := detector.moved()):
            return
        for index in range(max(samples.start, stop - _READ_BETWEEN_CHECKS), stop - 1):
            again = DrawDetector(_NO_SAMPLE)
            with suppress(Exception):  # it may fail: it is read only to see whether it draws
                read_row(self.cut, index, self.calls)
            if again.moved():
                stop = index + 1
                break
        raise draws_refused(self.cut.name, stop - 1, moved)

    def _written(self, samples: range, rows: RowBuffer, failed: list[tuple[int, str]]) -> Part:
        """Write these rows as the part of ``samples``, which is not finished yet."""
        fingerprint = dict(self.about.fingerprint)
        if samples != range(self.folder.length):
            fingerprint["first"] = samples.start
        about = replace(
            self.about,
            samples=len(samples),
            failed=[(number - samples.start, text) for number, text in failed],
            fingerprint=fingerprint,
        )
        path = unfinished_at(self.folder.part_path(samples.start))
        try:
            index = write_cache(path, about, rows.table())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Part(path, index)


class RowBuffer:
    """Hold the rows of one part, column by column; ``memory`` is about how many bytes they take."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.rows = self.memory = self._first = 0
        self._columns: list[_Column] = []

    def add(self, number: int, structure: Structure, leaves: list[Leaf]) -> None:
        """Add the row of sample ``number``.

        Raises:
            CacheError: it cannot stand in one file with those before.
        """
        if self.structure is None:
            self.structure, self._first = structure, number
            self._columns = list(map(_Column, column_names(structure)))
        elif structure != self.structure:
            raise other_structure(f"samples {self._first} and {number}", self.structure, structure)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(number, leaf)
            self.memory += leaf.values.nbytes + BYTES_PER_LEAF
        self.rows += 1

    def table(self) -> Table:
        """Return all rows, to be written."""
        entries = [column.entry() for column in self._columns]
        return Table(self.structure, self.rows, entries, self._blocks)

    def _blocks(self, number: int, dataset: str) -> Iterable[npt.NDArray[Any]]:
        return self._columns[number].blocks(dataset)


class _Column:
    """The rows of one column so far."""

    def __init__(self, name: str) -> None:
        self._name, self._dtype = name, ""
        self._first = 0, ""  # number and kind of the first leaf that is not None
        self._codes = bytearray()
        self._variants: dict[Variant, int] = {}  # their codes
        self._rows: list[npt.NDArray[Any] | None] = []
        self._pixels = 0

    def add(self, number: int, leaf: Leaf) -> None:
        """Add the leaf of sample ``number``; CacheError: it is of another type than the others."""
        values = None if leaf.kind == "none" else leaf.values
        if values is not None:
            if not self._dtype:
                self._dtype, self._first = values.dtype.str, (number, leaf.kind)
            if values.dtype.str != self._dtype:
                first, kind = self._first
                raise CacheError(
                    f"column {self._name!r} holds {self._dtype} ({kind}) in sample {first} and "
                    f"{values.dtype.str} ({leaf.kind}) in sample {number}; convert them to one "
                    "type in the dataset"
                )
        variant = leaf.kind, 0 if values is None else values.ndim
        self._codes.append(self._variants.setdefault(variant, len(self._variants)))
        refuse_many(self._name, self._variants)
        self._rows.append(values)
        self._pixels = max(self._pixels, leaf.pixels)

    def entry(self) -> ColumnEntry:
        """Return what the column is, without places."""
        one, *others = {None if values is None else values.shape for values in self._rows}
        shape = None if others or len(one or ()) > MOST_FIXED else one
        sizes = self._sizes()
        return ColumnEntry.of_rows(
            self._name,
            self._dtype or "|u1",
            tuple(self._variants),
            shape if self._dtype else (0,),  # of rows that are all None, which take no bytes
            len(self._rows),
            size=sum(sizes),
            most_values=max(sizes),
            most_pixels=self._pixels or None,
        )

    def _sizes(self) -> list[int]:
        return [0 if values is None else values.size for values in self._rows]

    def blocks(self, dataset: str) -> Iterable[npt.NDArray[Any]]:
        """Return the arrays that make up one dataset."""
        if dataset == "values":
            return (values for values in self._rows if values is not None)
        if dataset == "codes":
            return [np.frombuffer(self._codes, "|u1")]
        if dataset == "offsets":
            return [np.cumsum([0, *self._sizes()], dtype="<u8")]
        shapes = np.zeros((len(self._rows), max(of for _, of in self._variants)), "<u8")
        for row, values in zip(shapes, self._rows, strict=True):
            if values is not None:
                row[: values.ndim] = values.shape
        return [shapes]


def refuse_many(name: str, variants: Collection[Variant]) -> None:
    """Raise CacheError if a column has more kinds of value than a file can tell apart."""
    if len(variants) > MOST_VARIANTS:
        raise CacheError(f"column {name!r} holds more than {MOST_VARIANTS} kinds of value")


def other_structure(who: str, one: Structure | None, other: Structure | None) -> CacheError:
    """Return the error for two samples that are built differently."""
    return CacheError(
        f"{who} are built differently: {_shown(one)} and {_shown(other)}; a cache needs the same "
        "keys in the same order, and the same lengths, in all of them. Return what varies as one "
        "tensor, array, str or plain list"
    )


def _shown(structure: Structure | None) -> str:
    names = column_names(structure or 0)
    return f"{len(names)} leaves ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"

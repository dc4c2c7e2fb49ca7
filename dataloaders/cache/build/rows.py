"""Make one part of a cache: samples read one by one, their leaves copied, one finished file.

    samples 1200 to 1699 ──read──> leaves, images encoded ──> RowBuffer ──writing.py──> 01200.h5

A part is closed early when its rows take too much memory or too long; the rest is another part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

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
from dataloaders.cache.format.writing import About, Block, bytes_of, write_cache
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

_Shape: TypeAlias = "tuple[int, ...] | None"  # of a row; None: the row is None

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
    rows: RowBuffer = field(default_factory=lambda: RowBuffer())  # of the part that is being made

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
            self.rows.clear()
            failed: list[tuple[int, str]] = []
            with random_states_kept(cuda=False):
                stop = self._read(left, failed)
            with writing(self.folder.path):
                made.append(self._written(range(left.start, stop), failed))
            left = range(stop, samples.stop)
        return made

    def _read(self, samples: range, failed: list[tuple[int, str]]) -> int:
        """Read rows until the part is full; return the number of the first sample not read."""
        cut, rows = self.cut, self.rows
        detector = None if self.allow_random else DrawDetector(_NO_SAMPLE)
        until = time.monotonic() + PART_SECONDS
        for index in samples:
            if rows.memory > PART_BYTES or time.monotonic() > until:
                return index
            if self.allow_random:
                seed_for(index)
            row = None
            try:
                structure, leaves = read_row(cut, index, self.calls)
                row = structure, images_encoded(self.images, index, structure, leaves)
            except Exception as error:
                if not self.skip:
                    raise
                failed.append((index, error_text(error)))
            # Also if it failed: which samples are left out must not depend on what is drawn.
            if detector is not None and (moved := detector.moved()):
                raise draws_refused(cut.name, index, moved)
            if row is not None:
                rows.add(index, *row)
        return samples.stop

    def _written(self, samples: range, failed: list[tuple[int, str]]) -> Part:
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
        path, rows = unfinished_at(self.folder.part_path(samples.start)), self.rows
        try:
            index = write_cache(path, about, rows.structure, rows.rows, rows.entries(), rows.blocks)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Part(path, samples, index)


class RowBuffer:
    """Hold the rows of one part, column by column; ``memory`` is about how many bytes they take."""

    def __init__(self) -> None:
        self._columns: list[_Column] = []
        self.clear()

    def clear(self) -> None:
        """Remove all rows. Their memory is used again: the system takes long to give new pages."""
        self.structure: Structure | None = None
        self.rows = self.memory = self._first = 0
        self._memory = [column.memory for column in self._columns]
        self._columns = []

    def add(self, number: int, structure: Structure, leaves: list[Leaf]) -> None:
        """Add the row of sample ``number``.

        Raises:
            CacheError: it cannot stand in one file with those before.
        """
        if self.structure is None:
            self.structure, self._first = structure, number
            memory = iter(self._memory)
            self._columns = [
                _Column(name, next(memory, bytearray())) for name in column_names(structure)
            ]
        elif structure != self.structure:
            raise other_structure(f"samples {self._first} and {number}", self.structure, structure)
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.add(number, leaf)
            self.memory += leaf.values.nbytes + BYTES_PER_LEAF
        self.rows += 1

    def entries(self) -> list[ColumnEntry]:
        """Return the columns, without places."""
        return [column.entry() for column in self._columns]

    def blocks(self, number: int, part: str) -> Iterator[Block]:
        """Yield the buffers that make up one dataset of a column."""
        yield self._columns[number].dataset(part)


class _Column:
    """The rows of one column so far: what stands in its datasets; ``memory``: for its values."""

    def __init__(self, name: str, memory: bytearray) -> None:
        self.memory, self._used = memory, 0  # the bytes of the values come first
        self._name, self._dtype = name, ""
        self._first = 0, ""  # number and kind of the first leaf that is not None
        self._codes = bytearray()
        self._variants: dict[Variant, int] = {}  # their codes
        self._shapes: list[_Shape] = []  # of each row
        self._known: dict[_Shape, _Shape] = {}  # the shapes that occur
        self._pixels = 0

    def add(self, number: int, leaf: Leaf) -> None:
        """Add the leaf of sample ``number``; CacheError: it is of another type than the others."""
        shape = None if leaf.kind == "none" else leaf.values.shape
        dtype = leaf.values.dtype.str
        if shape is not None and not self._dtype:
            self._dtype, self._first = dtype, (number, leaf.kind)
        if shape is not None and dtype != self._dtype:
            first, kind = self._first
            raise CacheError(
                f"column {self._name!r} holds {self._dtype} ({kind}) in sample {first} and {dtype} "
                f"({leaf.kind}) in sample {number}; convert them to one type in the dataset"
            )
        code = self._variants.setdefault((leaf.kind, len(shape or ())), len(self._variants))
        refuse_many(self._name, self._variants)
        self._codes.append(code)
        shape = self._known.setdefault(shape, shape)  # so that equal ones are one object
        self._shapes.append(shape)
        data, first = bytes_of(leaf.values), self._used
        self._used += len(data)
        self.memory[first : self._used] = data
        self._pixels = max(self._pixels, leaf.pixels)

    def entry(self) -> ColumnEntry:
        """Return what the column is, without places."""
        one, *others = self._known
        shape = None if others or len(one or ()) > MOST_FIXED else one
        if not self._dtype:
            shape = (0,)  # all rows are None: a column that takes no bytes
        dtype = self._dtype or "|u1"
        return ColumnEntry.of_rows(
            self._name,
            dtype,
            tuple(self._variants),
            shape,
            len(self._shapes),
            size=self._used // np.dtype(dtype).itemsize,
            most_values=max(map(_size, self._known)),
            most_pixels=self._pixels or None,
        )

    def dataset(self, part: str) -> Block:
        """Return the contents of one dataset."""
        if part == "values":
            return memoryview(self.memory)[: self._used]
        if part == "codes":
            return self._codes
        if part == "offsets":
            return np.cumsum([0, *map(_size, self._shapes)], dtype="<u8")
        dimensions = max(of for _, of in self._variants)
        shapes = np.zeros((len(self._shapes), dimensions), "<u8")
        for row, shape in zip(shapes, self._shapes, strict=True):
            row[: len(shape or ())] = shape or ()
        return shapes


def _size(shape: _Shape) -> int:
    return 0 if shape is None else math.prod(shape)


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

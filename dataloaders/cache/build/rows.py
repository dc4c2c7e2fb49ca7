"""Make one part of a cache: samples read one by one, their leaves copied, one finished file.

    samples 1200 to 1699 ──read──> leaves, images encoded ──> RowBuffer ──writing.py──> 01200.h5

A part is closed early when its rows take too much memory or too long; the rest is another part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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
from dataloaders.cache.format.writing import About, write_cache
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
            rows, failed = RowBuffer(), list[tuple[int, str]]()
            with random_states_kept(cuda=False):
                stop = self._read(left, rows, failed)
            with writing(self.folder.path):
                made.append(self._written(rows, range(left.start, stop), failed))
            left = range(stop, samples.stop)
        return made

    def _read(self, samples: range, rows: RowBuffer, failed: list[tuple[int, str]]) -> int:
        """Read rows until the part is full; return the number of the first sample not read."""
        cut = self.cut
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

    def _written(self, rows: RowBuffer, samples: range, failed: list[tuple[int, str]]) -> Part:
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
            index = write_cache(path, about, rows.structure, rows.rows, rows.entries(), rows.blocks)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return Part(path, samples, index)


class RowBuffer:
    """Hold the rows of one part, column by column; ``memory`` is about how many bytes they take."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.rows = self.memory = 0
        self._columns: list[list[Leaf]] = []
        self._numbers: list[int] = []
        self._names: list[str] = []
        self._entries: list[ColumnEntry] = []

    def add(self, number: int, structure: Structure, leaves: list[Leaf]) -> None:
        """Add the row of sample ``number``; its leaves own their memory.

        Raises:
            CacheError: it cannot stand in one file with those before.
        """
        if self.structure is None:
            self.structure, self._names = structure, column_names(structure)
            self._columns = [[] for _ in self._names]
        elif structure != self.structure:
            raise other_structure(
                f"samples {self._numbers[0]} and {number}", self.structure, structure
            )
        for column, leaf in zip(self._columns, leaves, strict=True):
            column.append(leaf)
            self.memory += leaf.values.nbytes + BYTES_PER_LEAF
        self._numbers.append(number)
        self.rows += 1

    def entries(self) -> list[ColumnEntry]:
        """Return the columns, without places.

        Raises:
            CacheError: a column has values of several types; names the samples.
        """
        self._entries = list(map(self._entry, self._names, self._columns))
        return self._entries

    def _entry(self, name: str, leaves: list[Leaf]) -> ColumnEntry:
        dtype = self._dtype(name, leaves)
        variants = tuple(dict.fromkeys(map(_variant, leaves)))
        refuse_many(name, variants)
        shapes = {None if leaf.kind == "none" else leaf.values.shape for leaf in leaves}
        one = next(iter(shapes))
        shape = one if len(shapes) == 1 and len(one or ()) <= MOST_FIXED else None
        if shapes == {None}:
            shape = (0,)  # a column that takes no bytes
        sizes = [leaf.values.size for leaf in leaves] if shape is None else []
        return ColumnEntry.of_rows(
            name,
            dtype,
            variants,
            shape,
            self.rows,
            size=sum(sizes),
            most_values=max(sizes, default=0),
            most_pixels=max((leaf.pixels for leaf in leaves), default=0) or None,
        )

    def _dtype(self, name: str, leaves: list[Leaf]) -> str:
        firsts: dict[str, tuple[int, str]] = {}
        for number, leaf in zip(self._numbers, leaves, strict=True):
            if leaf.kind != "none":
                firsts.setdefault(leaf.values.dtype.str, (number, leaf.kind))
        if len(firsts) > 1:
            (one, (first, kind)), (other, (later, its)), *_ = firsts.items()
            raise CacheError(
                f"column {name!r} holds {one} ({kind}) in sample {first} and {other} ({its}) in "
                f"sample {later}; convert them to one type in the dataset"
            )
        return next(iter(firsts), "|u1")

    def blocks(self, number: int, part: str) -> Iterator[npt.NDArray[Any]]:
        """Yield the arrays that make up one dataset of a column, after `entries`."""
        entry, leaves = self._entries[number], self._columns[number]
        if part == "values":
            yield from (leaf.values for leaf in leaves)
        elif part == "offsets":
            yield np.cumsum([0, *(leaf.values.size for leaf in leaves)], dtype="<u8")
        elif part == "shapes":
            shapes = np.zeros((len(leaves), entry.dimensions), "<u8")
            for row, leaf in enumerate(leaves):
                shapes[row, : leaf.values.ndim] = leaf.values.shape  # None is empty
            yield shapes
        else:
            codes = {variant: code for code, variant in enumerate(entry.variants)}
            yield np.array([codes[_variant(leaf)] for leaf in leaves], "|u1")


def refuse_many(name: str, variants: Sequence[Variant]) -> None:
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


def _variant(leaf: Leaf) -> Variant:
    return leaf.kind, 0 if leaf.kind == "none" else leaf.values.ndim


def _shown(structure: Structure | None) -> str:
    names = column_names(structure or 0)
    return f"{len(names)} leaves ({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"

"""A cache without its values: HDF5 with names, types and places, and the index that knows them.

    layouts, About ──> an index with places of the most digits ──its length──> user block
                   ──skeleton──> the places ──> the index, but for the checksums' digest

How long the index is, and how many checksums the file has, must be known before they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from dataloaders.cache.about import About, check_failed, failures_of
from dataloaders.cache.attributes import encoded
from dataloaders.cache.block import DIGEST, VERSION, block_for
from dataloaders.cache.checksums import BLOCK
from dataloaders.cache.codecs import codec_of
from dataloaders.cache.compress import Compressed
from dataloaders.cache.entries import ColumnEntry, Extent, Packing, Shard
from dataloaders.cache.hdf5 import Chunked, Virtual, add_dataset, skeleton
from dataloaders.cache.index import Index
from dataloaders.cache.layout import Layout
from dataloaders.cache.pieces import chunk_of
from dataloaders.cache.sample import Structure
from dataloaders.errors import CacheError

__all__ = ["Planned", "laid_out", "values_path", "with_checksums"]

_WIDEST = Extent((1 << 48) - 1, (1 << 48) - 1)  # no place in a file takes more digits
_TRIES = 10

Made = TypeVar("Made")


@dataclass(frozen=True)
class Planned:
    """One column as a file is to have it.

    Attributes:
        layout: what it is.
        rows: of the file.
        compress: how it is compressed, if its layout says that it is.
        elsewhere: whether its values stand in shards, and only their number here.
    """

    layout: Layout
    rows: int
    compress: Compressed | None = None
    elsewhere: bool = False

    @property
    def path(self) -> str:
        """Of the column in the HDF5 file."""
        return _path(self.layout.name)

    @property
    def datasets(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and shape of each of its datasets, by their paths."""
        return {
            self.path_of(part): found for part, found in self.layout.datasets(self.rows).items()
        }

    @property
    def table(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The same of the table of its compressed pieces, if there are some."""
        piece = self.layout.piece
        return (
            {_table_path(self.layout.name): ("<u8", (-(-self.layout.size // piece), 2))}
            if piece
            else {}
        )

    def path_of(self, part: str) -> str:
        """Of one dataset: the column is itself one, or has several below it."""
        alone = self.layout.shape is not None and len(self.layout.datasets(self.rows)) == 1
        return self.path if alone else f"{self.path}/{part}"

    def chunked(self, compress: Compressed) -> Chunked:
        """How its values are compressed in HDF5's words."""
        layout = self.layout
        width = np.dtype(layout.dtype).itemsize
        codec = codec_of(compress.codec, width)
        filters = codec.filters(compress.chosen_level, layout.piece * width)
        return Chunked(chunk_of(layout.shape, layout.piece), filters)

    def entry(self, places: Mapping[str, Extent]) -> ColumnEntry:
        """What the index says of it; what has no place yet takes the widest one."""
        layout = self.layout
        there = layout.datasets(self.rows)

        def place(part: str) -> Extent | None:
            return places.get(self.path_of(part), _WIDEST) if part in there else None

        packing = None
        if self.compress is not None and layout.piece:
            table = places.get(_table_path(layout.name), _WIDEST)
            packing = Packing(self.compress.codec, layout.piece, table)
        return ColumnEntry(
            name=layout.name,
            dtype=layout.dtype,
            variants=layout.variants,
            shape=layout.shape,
            dimensions=layout.dimensions,
            values=Extent(0, layout.size) if self.elsewhere else place("values") or _WIDEST,
            offsets=place("offsets"),
            shapes=place("shapes"),
            codes=place("codes"),
            packing=packing,
            most_values=self._number(layout.most_values, places),
            most_pixels=self._number(layout.most_pixels, places),
        )

    @staticmethod
    def _number(found: int | None, places: Mapping[str, Extent]) -> int | None:
        # Before anything has a place, rows that are still to come may be larger.
        return found if found is None or places else _WIDEST.size


def laid_out(
    path: str,
    about: About,
    structure: Structure | None,
    rows: int,
    columns: Sequence[Planned],
    *,
    first: Sequence[int] = (),
    virtual: Mapping[str, Virtual] | None = None,
    shards: Sequence[Shard] = (),
) -> Index:
    """The index, but for what is in the checksums, of the file made at ``path`` without any values.

    Args:
        path: of the file, which is replaced.
        about: what it says of itself.
        structure: of each sample; None without rows.
        rows: how many there will be.
        columns: in the order of the leaves.
        first: numbers of those that stand first in the file, in this order.
        virtual: datasets that stand in other files, by their paths.
        shards: these files.

    Raises:
        CacheError: it cannot be written.
        MissingDependency: h5py, or what compressing takes, is not installed.
    """
    check_failed(about, rows)
    numbers, messages = failures_of(about)
    attributes = encoded(about.attributes)
    index = Index(
        user_block=0,
        file_bytes=_WIDEST.size,
        rows=rows,
        samples=about.samples,
        structure=structure,
        columns=tuple(column.entry({}) for column in columns),
        checksums=_WIDEST,
        checksums_digest="0" * 2 * DIGEST,
        failed=(_WIDEST, _WIDEST) if about.failed else None,
        attributes=_WIDEST if attributes else None,
        fingerprint=dict(about.fingerprint),
        head=tuple(about.head),
        tail=tuple(about.tail),
        shards=tuple(shards),
    )
    user_block = block_for(len(index.text()))
    order = [*first, *(number for number in range(len(columns)) if number not in first)]
    datasets = {
        name: found
        for number in order
        for name, found in columns[number].datasets.items()
        if name not in (virtual or {})
    }
    for column in columns:
        datasets.update(column.table)
    if about.failed:
        datasets["/failed/rows"] = ("<u8", numbers.shape)
        datasets["/failed/messages"] = ("|u1", messages.shape)
    if attributes:
        datasets["/attributes"] = ("|u1", (len(attributes),))
    said: dict[str, dict[str, str | int]] = {
        "/": {"format": index.format, "version": VERSION, "rows": rows}
    }
    if shards:
        said["/"]["shards"] = len(shards)
    for column in columns:
        kinds = " ".join(kind for kind, _ in column.layout.variants)
        said[column.path] = {"kinds": kinds}
    chunked = {
        column.path_of("values"): column.chunked(column.compress)
        for column in columns
        if column.compress is not None and column.layout.piece
    }
    if chunked:  # the checksums come last, behind the compressed pieces
        places = skeleton(path, datasets, user_block, said, chunked)
    else:

        def make(blocks: int) -> dict[str, Extent]:
            table = {"/checksums": ("<u4", (blocks,))}
            return skeleton(path, {**datasets, **table}, user_block, said, virtual=virtual)

        places = _fitting(path, user_block, make)
    return replace(
        index,
        user_block=user_block,
        file_bytes=os.path.getsize(path),
        columns=tuple(column.entry(places) for column in columns),
        checksums=places.get("/checksums", _WIDEST),
        failed=(places["/failed/rows"], places["/failed/messages"]) if about.failed else None,
        attributes=places.get("/attributes"),
    )


def with_checksums(path: str, index: Index) -> Index:
    """``index`` with the place of the checksums, made last in a file that has all else."""
    place = _fitting(
        path, index.user_block, lambda blocks: add_dataset(path, "/checksums", "<u4", (blocks,))
    )
    return replace(index, file_bytes=os.path.getsize(path), checksums=place)


def values_path(entry: ColumnEntry) -> str:
    """Of the dataset of a column's values: as `Planned.path_of` has it."""
    alone = entry.offsets is None and entry.codes is None
    return _path(entry.name) + ("" if alone else "/values")


def _path(column: str) -> str:
    return f"/columns/{column}"


def _table_path(column: str) -> str:
    return f"/pieces/{column}"


def _fitting(path: str, user_block: int, make: Callable[[int], Made]) -> Made:
    """What ``make`` gives when it is told how many checksums the file at ``path`` then needs.

    How long the file is depends on the number of checksums, and that on how long the file is.
    """
    blocks = 1
    for _ in range(_TRIES):
        made = make(blocks)
        needed = -(-(os.path.getsize(path) - user_block) // BLOCK)
        if needed == blocks:
            return made
        blocks = needed
    raise CacheError(f"the cache {path} cannot be laid out: its checksums do not fit its length")

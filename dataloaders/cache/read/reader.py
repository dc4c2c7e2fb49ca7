"""A cache as a dataset: rows out of a mapped file, restored to what the dataset gave.

    dataset[i] ──> each column's values at row i ──> leaves ──> tails ──> sample ──> transform

The file is mapped and never read through libhdf5, so that threads, forked and spawned workers
read it at once, and nothing in it can do more than be wrong. Of a joined cache the shards are
mapped, each when the first of its rows is read.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from dataloaders.cache.format.attributes import attributes_in, differences
from dataloaders.cache.format.block import open_file
from dataloaders.cache.format.changes import changes
from dataloaders.cache.format.entries import ColumnEntry
from dataloaders.cache.format.fields import Malformed
from dataloaders.cache.format.index import Index
from dataloaders.cache.printable import shown
from dataloaders.cache.read.columns import mapped
from dataloaders.cache.read.files import Column, Files, MappedFile
from dataloaders.cache.read.shards import first_of, folder_of
from dataloaders.cache.sample.sample import Classes, join, leaf_paths
from dataloaders.errors import CacheError
from dataloaders.machine.page_cache import DiskWatch, tells_truth, will_read
from dataloaders.transforms.read import Kind, read

__all__ = ["CachedDataset"]

Tail = tuple[tuple[Any, ...], Callable[[Any], Any]]
"""The keys to a leaf, and what is called on it."""


class CachedDataset(Dataset[Any]):
    """The samples of a cache, in the order in which they were built.

    Rows are copies: they may be changed and kept. Opening reads only the file's index. A pickled
    copy opens the file again, and accepts only the same cache. The file must not change while it is
    open. Replacing it (`os.replace`) is safe. Cutting it short is not: the next row is an error,
    and a read at that very moment ends the process. Parts are opened through the file that names
    them, each when the first of its rows is read, and stay next to it.

    Args:
        path: the path of the file.
        transform: called on each sample, after the tails.
        tails: the transforms that were not computed in advance: functions for single leaves, each
            with the keys to its leaf.
        expect: a fingerprint; each of its entries must be as it was when the cache was built.
        largest: the bytes that one value of a sample may take in memory (for an encoded image four
            a pixel), for untrusted files. A file that declares larger values is refused; if it
            declares nothing, each larger row is. None: as large as the file declares.

    Attributes:
        path: the absolute path.
        index: the file's description of itself.
        data: all bytes of the file, mapped.
        readers: each column's values, for whoever makes whole batches of them.
        namedtuples: classes for namedtuples in samples, by name and fields; a missing class is
            created with the same name and fields.

    Raises:
        CacheError: there is no cache, or it is malformed, unfinished, or of something else; or one
            of its shards is missing or a different file; or it has values larger than ``largest``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        transform: Callable[[Any], Any] | None = None,
        tails: Sequence[Tail] = (),
        expect: Mapping[str, Any] | None = None,
        largest: int | None = None,
    ) -> None:
        self.largest = largest
        self.path = Path(os.path.abspath(path))
        self.transform = transform
        self.tails = [(tuple(keys), call) for keys, call in tails]
        self.namedtuples: Classes = {}
        self._open()
        if expect is not None:
            self.refuse_changed(expect)

    def refuse_changed(self, expect: Mapping[str, Any]) -> None:
        """Compare the fingerprint's entries with ``expect``.

        Raises:
            CacheError: one of these was another one when the cache was built; names it.
        """
        changed = changes(self.index.fingerprint, expect, "when it was built")
        if changed:
            raise self._of_something_else(changed)

    def _of_something_else(self, changed: list[str]) -> CacheError:
        return CacheError(
            f"the cache {self.path} was built from something else: {'; '.join(changed)}; "
            "build it again with precompute(..., overwrite=True), or dataloaders cache "
            "build --overwrite, or at another path"
        )

    def _open(self) -> None:
        descriptor = open_file(str(self.path))
        try:
            self.index = Index.parse(descriptor, str(self.path))
            file = MappedFile(self.path, descriptor, self.index.file_bytes)
        finally:
            os.close(descriptor)
        self.data = file.data
        self._files = Files(self.path, self.index, file, self.largest)
        self.readers = tuple(
            Column(entry, number, self._files, self.largest)
            for number, entry in enumerate(self.index.columns)
        )
        self._attributes: dict[str, Any] | None = None
        self._disk, self._looks, self._exact = DiskWatch(), tells_truth(self.path), False
        self._find_leaves()

    def with_tails(self, tails: Sequence[Tail]) -> CachedDataset:
        """Put ``tails`` in place of those that it was opened with, and return it.

        Raises:
            CacheError: the samples have no leaf where one is to be called.
        """
        self.tails = [(tuple(keys), call) for keys, call in tails]
        self._find_leaves()
        return self

    def _find_leaves(self) -> None:
        """Note the column of the leaf that each tail is called on."""
        rows = self.index.rows
        paths = [] if self.index.structure is None else leaf_paths(self.index.structure)
        self._calls: list[tuple[int, Callable[[Any], Any]]] = []
        for keys, call in self.tails:
            if keys not in paths and rows:
                raise CacheError(
                    f"the samples of {self.path} have no leaf at {keys}; they have "
                    f"{', '.join(map(shown, paths[:8]))}"
                )
            if rows:
                self._calls.append((paths.index(keys), call))

    def __len__(self) -> int:
        return self.index.rows

    def __getitem__(self, row: Any) -> Any:
        """Return the sample of this row, counted from the end if negative; of a slice, a list."""
        if isinstance(row, slice):
            return self.__getitems__(range(*row.indices(self.index.rows)))
        return self._sample(self.leaves(row))

    def __getitems__(self, rows: Sequence[Any]) -> list[Any]:
        """Return the samples of these rows, in this order."""
        found = [self._row(row) for row in rows]
        self.about_to_read(found)
        columns = [column.leaves(found) for column in self.readers]
        if not columns:
            return [self._sample([]) for _ in found]
        return [self._sample(list(leaves)) for leaves in zip(*columns, strict=True)]

    def __iter__(self) -> Iterator[Any]:
        for row in range(self.index.rows):
            yield self[row]

    def _row(self, row: Any) -> int:
        try:
            found = operator.index(row)
        except TypeError as error:
            raise TypeError(
                f"a row of a cache must be an int or a slice, not {type(row).__name__}"
            ) from error
        rows = self.index.rows
        if not -rows <= found < rows:
            raise IndexError(f"row {found} of a cache of {rows} rows")
        return found + rows if found < 0 else found

    def _sample(self, leaves: list[Any]) -> Any:
        for number, call in self._calls:
            leaves[number] = call(leaves[number])
        structure = self.index.structure
        sample = None if structure is None else join(structure, leaves, self.namedtuples)
        return sample if self.transform is None else self.transform(sample)

    def leaves(self, row: int) -> list[Any]:
        """The leaves of this row as they were kept, before any tail, in the columns' order."""
        found = self._row(row)
        self._files.refuse_cut_short([found])
        return [column.leaf(found) for column in self.readers]

    def will_read(self, first: int, last: int) -> None:
        """Have the kernel start to read rows ``first`` to ``last - 1`` from disk, without waiting.

        For callers that know what this process or its workers read next: consecutive rows are read
        in long runs. Rows that do not exist are ignored.
        """
        first, last = max(0, first), min(last, self.index.rows)
        if first < last:
            for column in self.readers:
                for values in column.stretches(first, last):
                    will_read(values, look=self._looks)

    def about_to_read(self, rows: Sequence[int]) -> None:
        """Say that these rows are read now: if they may be on disk, all are asked for at once.

        Otherwise one page after the other would be found missing, waited for, and read with all
        that stands around it. While nothing comes from a disk, nothing is asked for.

        Raises:
            CacheError: a file is shorter than it was: what is not there cannot be touched.
        """
        self._files.refuse_cut_short(rows)
        reads = self._disk.reads()
        if reads != self._exact:
            self._exact = reads
            self._files.expect_exactly(reads)
        if reads:
            for row in rows:
                self.will_read(row, row + 1)

    @property
    def row_bytes(self) -> float:
        """The bytes of a row in the file, on average; 0 without rows."""
        if self.index.shards:
            return self.index.all_bytes / max(1, self.index.rows)
        parts = (part for column in self.index.columns for part in column.parts())
        total = sum(extent.size * np.dtype(dtype).itemsize for _, dtype, extent in parts)
        total += sum(column.packed_bytes() or 0 for column in self.readers)
        return total / max(1, self.index.rows)

    @property
    def calls(self) -> tuple[tuple[int, Callable[[Any], Any]], ...]:
        """The tails: the number of a column, and what is called on its leaves."""
        return tuple(self._calls)

    @property
    def runs_only_torchvision(self) -> bool:
        """Whether all that runs when a sample is made is this package's and torchvision's."""
        calls = [call for _, call in self.tails]
        return self.transform is None and not any(
            member.kind is Kind.OPAQUE for call in calls for member in read(call)
        )

    @property
    def columns(self) -> tuple[ColumnEntry, ...]:
        """The columns, in the order of the sample's leaves."""
        return self.index.columns

    @property
    def attributes(self) -> dict[str, Any]:
        """What the dataset said of its classes: `classes`, `class_to_idx`, or nothing.

        Raises:
            CacheError: this is damaged.
        """
        if self._attributes is None:
            place = self.index.attributes
            try:
                text = b"" if place is None else mapped(self.data, "|u1", place).tobytes()
                self._attributes = attributes_in(text) if text else {}
            except Malformed as error:
                raise CacheError(
                    f"what {self.path} says of its dataset's classes is damaged: {error}; build "
                    "the cache again"
                ) from error
        return self._attributes

    @property
    def classes(self) -> list[Any]:
        """The names of the classes, as in the dataset's ``classes``; synonyms are tuples.

        Raises:
            AttributeError: the dataset had none, or the file is of an older version.
            CacheError: they are damaged.
        """
        return self._attribute("classes")  # type: ignore[no-any-return]

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class, as in the dataset's ``class_to_idx``.

        Raises:
            AttributeError, CacheError: as `classes`.
        """
        return self._attribute("class_to_idx")  # type: ignore[no-any-return]

    def _attribute(self, name: str) -> Any:
        if name not in self.attributes:
            raise AttributeError(
                f"the cache {self.path} has no {name}: the dataset that it was built from had none"
            )
        return self.attributes[name]

    def refuse_other_classes(self, now: Mapping[str, Any]) -> None:
        """Nothing if the classes of a dataset, as `attributes_of` gives them, are those kept here.

        Raises:
            CacheError: they are others; says which.
        """
        changed = differences(self.attributes, now)
        if changed:
            raise self._of_something_else(changed)

    @property
    def identity(self) -> str:
        """The digest of the whole file, as hexadecimal digits; it stands for its shards too."""
        return self.index.identity

    @property
    def shards(self) -> tuple[Path, ...]:
        """The shards of a joined cache, in the order of their rows; empty for a single file."""
        folder = folder_of(self.path)
        return tuple(folder / shard.name for shard in self.index.shards)

    @property
    def failed(self) -> list[tuple[int, str]]:
        """The number in the dataset, and the error message, of each sample that was left out.

        Raises:
            CacheError: the list is damaged.
        """
        if self.index.failed is None:
            return []
        rows, messages = self.index.failed
        numbers = mapped(self.data, "<u8", rows).tolist()
        try:
            texts = json.loads(mapped(self.data, "|u1", messages).tobytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise self._failed_damaged() from error
        if (
            type(texts) is not list
            or len(texts) != len(numbers)
            or not all(type(text) is str for text in texts)
        ):
            raise self._failed_damaged()
        first = first_of(self.index)
        return [(first + number, text) for number, text in zip(numbers, texts, strict=True)]

    def _failed_damaged(self) -> CacheError:
        return CacheError(
            f"the list of failed samples in {self.path} is damaged; build the cache again"
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return all rows of a fixed column, (rows, *shape), as a read-only view of the file.

        An image's shape is (channels, height, width). A row that is None is zero.

        Raises:
            CacheError: there is no such column, its rows differ in shape or stand in several files,
        or it is compressed.
        """
        for column in self.readers:
            if column.entry.name == name:
                if not column.entry.fixed:
                    raise CacheError(
                        f"the rows of column {name!r} in {self.path} have different shapes; read "
                        "them one by one"
                    )
                if self.index.shards:
                    raise CacheError(
                        f"the rows of column {name!r} in {self.path} stand in "
                        f"{len(self.index.shards)} shards, so they are not one array; read "
                        "rows by their numbers, or each shard's: [CachedDataset(shard).column("
                        f"{name!r}) for shard in cached.shards]"
                    )
                return column.of(0).values
        names = ", ".join(shown(column.entry.name) for column in self.readers[:8])
        raise CacheError(f"{self.path} has no column {name!r}; it has {names or 'none'}")

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "identity": self.identity,
            "transform": self.transform,
            "tails": self.tails,
            "largest": self.largest,
            "namedtuples": self.namedtuples,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.transform = state["path"], state["transform"]
        self.largest = state["largest"]
        self.tails, self.namedtuples = state["tails"], state["namedtuples"]
        self._open()
        if self.identity != state["identity"]:
            raise CacheError(
                f"{self.path} is not the cache that was open: it was replaced in the "
                "meantime; open it again with CachedDataset"
            )

    def __repr__(self) -> str:
        return f"CachedDataset({str(self.path)!r}, {self.index.rows} rows)"

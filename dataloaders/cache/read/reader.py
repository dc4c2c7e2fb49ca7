"""CachedDataset: a cache as a dataset, whose samples are those that the original dataset gave.

    cached[i] ──> each column's values at row i ──> leaves ──> sample ──> tails ──> transform

Files are mapped and never read through libhdf5: threads, forked and spawned workers read them at
once, and nothing in a file can do more harm than be wrong.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt
from torch.utils.data import Dataset

from dataloaders.cache.format.attributes import attributes_in, differences
from dataloaders.cache.format.block import open_file
from dataloaders.cache.format.changes import changes
from dataloaders.cache.format.entries import Extent
from dataloaders.cache.format.fields import Malformed, loads, require, typed
from dataloaders.cache.printable import printable, shown
from dataloaders.cache.read.columns import mapped
from dataloaders.cache.read.files import Files, Located, MappedFile
from dataloaders.cache.read.shards import first_of, folder_of
from dataloaders.cache.sample.sample import Classes, Tail, finished, join, leaf_paths
from dataloaders.errors import CacheError
from dataloaders.options import option

ACCEPTABLE = ("dataset", "head")
"""Entries of a fingerprint that may change although the rows do not: a class is renamed, a new
torchvision prints a transform in another way. ``expect`` may give the old ones."""


class CachedDataset(Dataset[Any]):
    """The samples of a cache, in the order in which they were built.

    Samples are copies: they may be changed and kept. Opening reads only the file's index. A pickled
    copy opens the file again, and accepts only the same cache. Replacing an open file
    (`os.replace`) is safe. Cutting it short is not: the next row is an error, and a read at that
    very moment ends the process.

    Args:
        path: the path of the file.
        transform: called on each sample, after the tails.
        tails: the transforms that were not computed in advance: functions for parts of a sample,
            each with the keys to its part.
        expect: entries that the fingerprint must have, as it was when the cache was built.
        largest: for untrusted files, the bytes that one value of a sample may take in memory (four
            a pixel for an encoded image). A file that declares larger values is refused; if it
            declares nothing, each larger row is. None: as large as the file declares.

    Attributes:
        path: the absolute path.
        index: the file's description of itself.
        columns: the columns as the index has them, in the order of the sample's leaves.
        identity: the digest of the file and of its parts, in hexadecimal.
        file: the file itself, mapped.
        namedtuples: classes for namedtuples in samples, by name and fields; a missing one is
            created.

    Raises:
        CacheError: there is no cache; or it is malformed, unfinished, or of something else; or one
            of its parts is missing, or another file; or it has values larger than ``largest``.
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
        self.tails = list(tails)
        self.namedtuples: Classes = {}
        self._open()
        self.refuse_changed(expect or {})

    def _open(self) -> None:
        self.file = MappedFile(self.path, open_file(str(self.path)), self.largest, {})
        self.index = self.file.index
        self.columns, self.identity = self.index.columns, self.index.identity
        self._files = Files(self.path, self.file, self.largest)
        self.with_tails(self.tails)

    def with_tails(self, tails: Sequence[Tail]) -> CachedDataset:
        """Replace the tails by these, and return the cache itself."""
        self.tails = [(tuple(keys), call) for keys, call in tails]
        structure = self.index.structure
        paths = [] if structure is None else leaf_paths(structure)
        for keys, _ in self.tails:
            # It may lead to a part of a leaf, where that is any value that JSON can hold.
            if paths and not any(keys[: len(path)] == path[: len(keys)] for path in paths):
                raise CacheError(
                    f"the samples of {self.path} have no leaf at {keys}; they have "
                    f"{', '.join(map(shown, paths[:8]))}"
                )
        return self

    def refuse_changed(self, expect: Mapping[str, Any]) -> None:
        """Raise a CacheError that names the entries of ``expect`` that the fingerprint lacks."""
        built = self.index.fingerprint
        other = {name: built.get(name) for name in expect if expect[name] != built.get(name)}
        advice = ""
        if set(other) <= set(ACCEPTABLE):
            advice = f". To read its rows as they are, pass expect={printable(repr(other), 4000)}"
        self._refuse(changes(built, expect, "when it was built"), advice)

    def refuse_part(self) -> None:
        """Raise a CacheError if this file has the samples of one part, or of one rank, only."""
        has, length = self.index.samples, self.index.fingerprint.get("length", self.index.samples)
        self._refuse(
            [] if has == length else [f"it is a part, with {has} of {shown(length)} samples"]
        )

    def refuse_other_classes(self, now: Mapping[str, Any]) -> None:
        """Raise a CacheError if these classes, from `attributes_of`, differ from the cache's."""
        self._refuse(differences(self.attributes, now))

    def _refuse(self, changed: list[str], advice: str = "") -> None:
        if changed:
            raise CacheError(
                f"the cache {self.path} was built from something else: {'; '.join(changed)}; "
                f"build it again with {option('overwrite', True)}, or at another path{advice}"
            )

    def __len__(self) -> int:
        return self.index.rows

    def __getitem__(self, row: Any) -> Any:
        """Return the sample of this row, counted from the end if negative; of a slice, a list."""
        if isinstance(row, slice):
            return self.__getitems__(range(*row.indices(self.index.rows)))
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Iterable[Any]) -> list[Any]:
        """Return the samples of these rows, in this order."""
        numbers = [self._row(row) for row in rows]
        found: list[list[Any]] = [[]] * len(numbers)
        for place, columns, own in self.located(numbers):
            found[place] = [column.leaf(own) for column in columns]
        return [self._finished(leaves) for leaves in found]

    def located(self, rows: Sequence[int]) -> list[Located]:
        """Return where these rows are, which are counted from 0 on; see `Files.located`."""
        return self._files.located(rows)

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

    def _finished(self, leaves: list[Any]) -> Any:
        """Return the sample of these leaves, after the tails."""
        sample = finished(join(self.index.structure, leaves, self.namedtuples), self.tails)
        return sample if self.transform is None else self.transform(sample)

    def will_read(self, first: int, last: int) -> None:
        """Have the kernel start to read rows ``first`` to ``last - 1`` from disk, without waiting.

        Consecutive rows are read in long runs. Rows that do not exist are ignored.
        """
        first, last = max(0, first), min(last, self.index.rows)
        if first < last:
            with suppress(CacheError):  # reading the row raises it
                self._files.will_read(first, last)

    @property
    def row_bytes(self) -> float:
        """The bytes of a row on the disk, on average: those of all files, by rows."""
        return self.index.all_bytes / self.index.rows if self.index.rows else 0

    @property
    def shards(self) -> tuple[Path, ...]:
        """The shards of a joined cache, in the order of their rows; empty for a single file."""
        folder = folder_of(self.path)
        return tuple(folder / shard.name for shard in self.index.shards)

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The dataset's `classes` and `class_to_idx`, as far as it had them."""
        if self.index.attributes is None:
            return {}
        try:
            return attributes_in(self._values("|u1", self.index.attributes).tobytes())
        except Malformed as error:
            raise CacheError(
                f"what {self.path} has of its dataset's classes is damaged: {error}; delete it "
                "and build again"
            ) from error

    @property
    def classes(self) -> list[Any]:
        """The names of the classes, as in the dataset's ``classes``; synonyms are tuples."""
        return self._attribute("classes")  # type: ignore[no-any-return]

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class, as in the dataset's ``class_to_idx``."""
        return self._attribute("class_to_idx")  # type: ignore[no-any-return]

    def _attribute(self, name: str) -> Any:
        if name not in self.attributes:
            raise AttributeError(
                f"the cache {self.path} has no {name}: the dataset that it was built from had none"
            )
        return self.attributes[name]

    @property
    def failed(self) -> list[tuple[int, str]]:
        """The number in the dataset, and the error message, of each sample that was left out."""
        if self.index.failed is None:
            return []
        rows, messages = self.index.failed.rows, self.index.failed.messages
        numbers = self._values("<u8", rows).tolist()
        try:
            found = loads(self._values("|u1", messages).tobytes())
            texts = typed(found, tuple[str, ...], "it")
            require(len(texts) == len(numbers), f"it has {len(texts)} messages")
        except Malformed as error:
            raise CacheError(
                f"the list of failed samples in {self.path} is damaged: {error}; delete it and "
                "build again"
            ) from error
        first = first_of(self.index)
        return [(first + number, text) for number, text in zip(numbers, texts, strict=True)]

    def _values(self, dtype: str, extent: Extent) -> npt.NDArray[Any]:
        """Return values of the cache's own file, as a view of it."""
        self.file.refuse_cut_short()
        return mapped(self.file.data, dtype, extent)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return all rows of a column, (rows, *shape), as a read-only view of the file.

        An image's shape is (channels, height, width). A CacheError says why there is no such array:
        rows differ in shape or are None, are in several files, or compressed.
        """
        names = [entry.name for entry in self.columns]
        if name not in names:
            known = ", ".join(map(shown, names[:8])) or "none"
            raise CacheError(f"{self.path} has no column {name!r}; it has {known}")
        number = names.index(name)
        if self.columns[number].shape is None:
            why = "have different shapes, or are None; read them one by one"
        elif self.index.shards:
            why = (
                f"stand in {len(self.index.shards)} shards, so they are not one array; read rows "
                "by their numbers, or each shard's: "
                f"[CachedDataset(shard).column({name!r}) for shard in cached.shards]"
            )
        else:
            self.file.refuse_cut_short()
            return self.file.columns[number].values
        raise CacheError(f"the rows of column {name!r} in {self.path} {why}")

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "identity", "transform", "tails", "largest", "namedtuples")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        identity = state.pop("identity")
        vars(self).update(state)
        self._open()
        if self.identity != identity:
            raise CacheError(
                f"{self.path} is not the cache that was open: it was replaced in the "
                "meantime; open it again with CachedDataset"
            )

    def __repr__(self) -> str:
        return f"CachedDataset({str(self.path)!r}, {self.index.rows} rows)"

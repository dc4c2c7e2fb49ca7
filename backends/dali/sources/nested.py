"""Parts of datasets, and several in a row, as torch has them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from dataloaders.cache.sample.cut import equal_state

from .source import Failed, Found, Source

__all__ = ["Part", "Row", "row_of"]


class Part(Source):
    """A Subset of another source."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source = source
        self._indices = indices
        self.kind, self.channels, self.form = source.kind, source.channels, source.form
        self.wraps, self.at_once = source.wraps, source.at_once

    @property
    def transform(self) -> Any:
        """See `Source`."""
        return self._source.transform

    @property
    def user_code(self) -> bool:
        """See `Source`."""
        return self._source.user_code

    def __len__(self) -> int:
        return len(self._indices)

    def image(self, index: Any, *, decode: bool = False) -> Found:
        """See `Source`."""
        try:
            inner = self._indices[index]
        except Exception as error:
            return Failed(error)
        return self._source.image(inner, decode=decode)

    def images(self, indices: Sequence[Any], *, decode: bool = False) -> list[Found]:
        """See `Source`."""
        try:
            inner = [self._indices[index] for index in indices]
        except Exception:
            return super().images(indices, decode=decode)
        return self._source.images(inner, decode=decode)

    def sample(self, index: Any, image: Any) -> Any:
        """See `Source`."""
        return self._source.sample(self._indices[index], image)


def row_of(sources: Sequence[Source]) -> Source | str:
    """``sources``, one behind the other; or why a graph cannot serve all of them, in words."""
    first = sources[0]
    for other in sources[1:]:
        if _sort(other) != _sort(first):
            return (
                f"a ConcatDataset joins {_told(first)} and {_told(other)}, and a graph serves one "
                "sort; use a loader for each"
            )
        if not _same_transform(first.transform, other.transform):
            return (
                "a ConcatDataset joins datasets with different transforms, and a graph serves one; "
                "give all of them the same"
            )
    return Row(sources)


def _sort(source: Source) -> tuple[Any, ...]:
    return source.kind, source.channels, source.form, source.wraps


def _told(source: Source) -> str:
    colours = "RGB" if source.channels == 3 else "grey"
    return f"{colours} {'files' if source.kind == 'encoded' else 'pixels'}"


def _same_transform(one: Any, other: Any) -> bool:
    if one is other:
        return True
    state = equal_state(one)
    return state is not None and state == equal_state(other)


class Row(Source):
    """Several sources of one sort, one behind the other: a ConcatDataset."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))
        first = sources[0]
        self.kind, self.channels, self.form = first.kind, first.channels, first.form
        self.wraps = first.wraps

    @property
    def transform(self) -> Any:
        """See `Source`."""
        return self._sources[0].transform

    @property
    def user_code(self) -> bool:
        """See `Source`."""
        return any(source.user_code for source in self._sources)

    def __len__(self) -> int:
        return self._ends[-1]

    def image(self, index: Any, *, decode: bool = False) -> Found:
        """See `Source`."""
        try:
            source, inner = self._at(index)
        except Exception as error:
            return Failed(error)
        return source.image(inner, decode=decode)

    def sample(self, index: Any, image: Any) -> Any:
        """See `Source`."""
        source, inner = self._at(index)
        return source.sample(inner, image)

    def _at(self, index: Any) -> tuple[Source, int]:
        if index < 0:
            if -index > len(self):
                raise ValueError("absolute value of index should not exceed dataset length")
            index += len(self)
        number = bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)

"""A dataset's own encoded files as the rows of a cache: all of its transforms stay live.

Source ──bytes, target──> (EncodedFile, target)     the row
the reader ──decode──> RGB ──transform──> what the dataset itself would have given
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataloaders.cache.sample.cut import Cut, Run, equal_state, told
from dataloaders.datasets.files import Source, source_of
from dataloaders.errors import CacheError
from dataloaders.transforms.find import Found
from dataloaders.transforms.read import Member

__all__ = ["packed"]


def packed(dataset: Any) -> Cut:
    """The cut of ``dataset`` whose rows are its encoded files.

    Raises:
        CacheError: where its files are is not known; says what would help.
    """
    source = source_of(dataset)
    if isinstance(source, str):
        raise CacheError(
            f'images="packed" keeps the encoded files of a dataset, and {source}. Or keep what is '
            'decoded: images="jpeg", "png" or "webp"'
        )
    rows = _Files(source)
    tails: list[Run] = []
    after: list[tuple[Found, Sequence[Member]]] = []
    for transform in rows.transforms:
        if transform is None:
            tails.append(Run([]))
            continue
        found = Found(transform, "transform")
        tails.append(Run([member.transform for member in found.members]))
        after.append((found, found.members))
    return Cut(rows, tuple(tails), rows.made, (), told(after), type(dataset).__name__)


class _Files:
    """The rows: samples with an `EncodedFile` where their image would be.

    Attributes:
        transforms: the different ones that there are.
        made: (number of its transform, its file) of the row that was read.
    """

    def __init__(self, source: Source) -> None:
        self.transforms: list[Any] = []
        self.made: list[tuple[int, Any]] = []
        self._source = source
        self._states: list[bytes | None] = []
        for transform in source.transforms:
            self._number(transform)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        file = self._source.encoded(index)
        try:
            file.check()
        except ValueError as error:
            raise CacheError(f"{file.name or 'its file'}: {error}") from error
        self.made.append((self._number(self._source.transform(index)), file))
        return self._source.sample(index, file)

    def _number(self, transform: Any) -> int:
        """Which of the transforms it is; equal ones, each an object of its own, are one."""
        for number, known in enumerate(self.transforms):
            if known is transform:
                return number
        state = equal_state(transform)
        if state is None or state not in self._states:
            self.transforms.append(transform)
            self._states.append(state)
            return len(self.transforms) - 1
        return self._states.index(state)

"""Which samples are in which chunk of a build.

    Chunking(1000, rows=100, last_rows=25)      chunk 0    0 .. 99
                                                ...
                                                chunk 7  700 .. 799
                                                chunk 8  800 .. 824
                                                ...

Each chunk takes time of its own, so that they are large; and at the end workers have nothing to do
while another one finishes its chunk, so that the last ones are small.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Chunking"]

_LAST = 8  # the part of the samples whose chunks are small: one of so many
_MOST_LAST = 64  # large chunks that these would be, at most: a few for each worker


@dataclass(frozen=True)
class Chunking:
    """How ``samples`` samples are divided.

    Attributes:
        samples: in all.
        rows: of a large chunk.
        last_rows: of a small one; as many as ``rows``: all are of one size.
    """

    samples: int
    rows: int
    last_rows: int

    def __len__(self) -> int:
        return self._large + -(-(self.samples - self._large * self.rows) // self.last_rows)

    def part(self, chunk: int) -> range:
        """The samples in this chunk, counted from the first one of all."""
        large = min(chunk, self._large)
        begin = large * self.rows + (chunk - large) * self.last_rows
        size = self.rows if chunk < self._large else self.last_rows
        return range(min(begin, self.samples), min(begin + size, self.samples))

    @property
    def _large(self) -> int:
        """How many chunks are large."""
        small = 0
        if self.last_rows < self.rows:
            small = min(self.samples // _LAST, _MOST_LAST * self.rows)
        return (self.samples - small) // self.rows

"""How many rows a BlockShuffle asks for before the first one is given out."""

from __future__ import annotations

import pytest

from dataloaders.samplers import BlockShuffle

MIB = 1 << 20


class Rows:
    """A file of rows, which remembers those that were asked for."""

    def __init__(self, rows, row_bytes):
        self.rows = rows
        self.row_bytes = row_bytes
        self.asked = []

    def __len__(self):
        return self.rows

    def will_read(self, first, last):
        self.asked.append((first, last))


@pytest.mark.parametrize(
    ("row_bytes", "block", "window", "rows"),
    [
        # Half a window, what keeps a disk busy (a quarter of it, from 16 to 64 MiB), the 16 rows
        # or the block that are given out until the next look.
        (MIB, 1, 64, 32 + 16 + 16),
        (MIB, 1, 20, 10 + 16 + 16),
        (MIB, 1, 128, 64 + 32 + 16),
        (MIB, 1, 129, 65 + 32 + 16),
        (MIB, 1, 1024, 512 + 64 + 16),
        (MIB / 2, 1, 128, 64 + 32 + 16),
        (MIB, 32, 128, 64 + 32 + 32),
        (MIB, 30, 128, 150),  # blocks of 30 rows that begin within 126
        (MIB, 1, 5000, 4096),  # a window beyond the end: all rows
        (64 * MIB, 2048, 4096, 4096),
    ],
)
def test_rows_that_are_asked_for_first(row_bytes, block, window, rows):
    dataset = Rows(4096, row_bytes)
    next(iter(BlockShuffle(dataset, block=block, window=window, seed=0)))
    assert sum(last - first for first, last in dataset.asked) == rows
    assert len({first for first, _ in dataset.asked}) == len(dataset.asked)

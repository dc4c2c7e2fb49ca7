"""Files of format version 3 are read as ever: single, compressed, and joined from shards."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dataloaders.cache import CachedDataset, merge, verify
from dataloaders.errors import CacheError
from helpers.compare import bits

FILES = Path(__file__).parent / "data" / "cache_v3"


def row(index):
    return {
        "image": np.full((2, 3, index % 2 + 1), index, np.uint8),
        "label": index,
        "name": None if index == 4 else "ab" * index,
    }


@pytest.mark.parametrize(
    ("name", "sample"),
    [("one.h5", row), ("zstd.h5", lambda index: f"abc{index}" * 6000), ("joined.h5", row)],
)
def test_rows_and_checksums(name, sample):
    cached = CachedDataset(FILES / name)
    assert bits(list(cached)) == bits(list(map(sample, range(6))))
    assert verify(FILES / name) == []


def test_a_joined_file_has_its_shards_beside_it(tmp_path):
    for file in FILES.glob("joined*"):
        shutil.copy(file, tmp_path)
    cached = CachedDataset(tmp_path / "joined.h5")
    assert [shard.name for shard in cached.shards] == [
        f"joined.0000{n}-of-00002.h5" for n in (0, 1)
    ]
    merge(tmp_path / "joined.h5", tmp_path / "one.h5")
    assert bits(list(CachedDataset(tmp_path / "one.h5"))) == bits(list(cached))
    cached.shards[1].unlink()
    with pytest.raises(CacheError, match=r"joined\.00001-of-00002\.h5 of the cache .* is missing"):
        CachedDataset(tmp_path / "joined.h5")

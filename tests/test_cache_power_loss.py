"""What a power cut took of a build is made again."""

import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.cache import precompute
from helpers.numbered import Made

SIZE, ROWS = 48, 4


def sample(index):
    shape = (3, 30, 41 + index % 7)
    image = np.random.default_rng(index).integers(1, 256, shape, dtype=np.uint8)
    return {"image": torch.from_numpy(image), "name": f"sample {index}"}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A build that was interrupted, and the file that it is to become."""
    folder = tmp_path_factory.mktemp("begun")
    dataset = Made(sample, SIZE)
    dataset.failing = frozenset([SIZE - 3])
    with pytest.raises(ValueError, match="no sample 45 today"):
        precompute(dataset, folder / "a.h5", num_workers=0, rows=ROWS)
    whole = precompute(Made(sample, SIZE), folder / "whole.h5", num_workers=0)
    return folder / "a.h5", whole.path.read_bytes()


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_never_reached_the_disk_is_made_again(begun, tmp_path_factory, data):
    """Names without files, files without contents, in any combination.

    A part is synced before it has its name, so nothing else is lost of one that has it.
    """
    interrupted, whole = begun
    path = tmp_path_factory.mktemp("cut") / "a.h5"
    folder = path.with_suffix(".parts")
    shutil.copytree(interrupted.with_suffix(".parts"), folder)
    parts = sorted(folder.glob("*.h5"))
    assert len(parts) == SIZE // ROWS - 1
    for number in sorted(data.draw(st.sets(st.integers(0, len(parts) - 1)))):
        part = parts[number]
        size = part.stat().st_size
        how = data.draw(st.sampled_from(["no name", "empty", "zeros", "begins late", "shorter"]))
        if how == "no name":
            part.unlink()
        elif how == "empty":
            part.write_bytes(b"")
        elif how == "zeros":
            part.write_bytes(bytes(size))
        elif how == "begins late":  # pages after it had arrived
            with open(part, "r+b") as opened:
                opened.write(bytes(data.draw(st.integers(1, size - 1))))
        else:
            os.truncate(part, data.draw(st.integers(1, size - 1)))
    if data.draw(st.booleans()):
        (folder / "build.json").unlink()
    precompute(Made(sample, SIZE), path, num_workers=0)
    assert path.read_bytes() == whole

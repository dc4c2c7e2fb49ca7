"""The demo and its photographs."""

import os
import re

import pytest
from PIL import Image

from dataloaders.cli.photos import make_photos
from helpers import warm


def test_photographs_have_a_cameras_sizes_and_are_made_once(tmp_path):
    folder = make_photos(tmp_path / "deep" / "photos", count=10)
    files = sorted(folder.rglob("*.jpg"))
    assert len(files) == 10
    assert len({file.parent for file in files}) == 4
    for file in files:
        assert 60_000 < file.stat().st_size < 320_000
        with Image.open(file) as image:
            assert (image.format, image.mode) == ("JPEG", "RGB")
            assert image.size in {(640, 480), (480, 640), (800, 600), (1024, 768)}
    stamps = [file.stat().st_mtime_ns for file in files]
    assert make_photos(folder, count=10) == folder
    assert [file.stat().st_mtime_ns for file in files] == stamps
    assert [child.name for child in folder.parent.iterdir()] == ["photos"]
    again = make_photos(tmp_path / "again", count=2)  # the same for a seed
    assert len(list(again.rglob("*.jpg"))) == 2
    for file in again.rglob("*.jpg"):
        assert file.read_bytes() == (folder / file.relative_to(again)).read_bytes()


@pytest.mark.nightly
def test_the_demo_checks_the_example_and_tries_remedies(tmp_path):
    env = {**os.environ, "DATALOADERS_CACHE": str(tmp_path)}
    done = warm.run(["-m", "dataloaders", "demo", "--budget", 4], env=env, timeout=100)
    command = r"\$ dataloaders check --try --budget 4 \S+/examples/train_images.py -- --data \S+ "
    assert re.search(command, done.stdout)
    for text in ("INPUT-BOUND", "measured in loader 1: DataLoader of ImageFolder", "what if"):
        assert text in done.stdout

"""The demo and its photographs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataloaders.cli.demo import demo
from dataloaders.cli.photos import make_photos
from dataloaders.errors import OptionError


def test_photographs_are_like_a_cameras_and_made_once(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = make_photos(tmp_path / "deep" / "photos", count=10, progress=lambda *n: told.append(n))
    files = sorted(folder.rglob("*.jpg"))
    assert len(files) == 10
    assert told == [(done, 10) for done in range(1, 11)]
    assert len({file.parent for file in files}) == 4
    for file in files:
        assert 60_000 < file.stat().st_size < 320_000
        with Image.open(file) as image:
            assert image.format == "JPEG"
            assert image.mode == "RGB"
            assert image.size in {(640, 480), (480, 640), (800, 600), (1024, 768)}
    stamps = [file.stat().st_mtime_ns for file in files]
    assert make_photos(folder, count=10) == folder
    assert [file.stat().st_mtime_ns for file in files] == stamps
    assert [child.name for child in folder.parent.iterdir()] == ["photos"]


def test_photographs_are_the_same_for_a_seed(tmp_path: Path) -> None:
    folders = [make_photos(tmp_path / name, count=2) for name in "ab"]
    one, other = (sorted(f.read_bytes() for f in folder.rglob("*.jpg")) for folder in folders)
    assert one == other


def test_an_interrupted_making_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_photos(tmp_path / "photos", count=6, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="one subfolder of images for each class"):
        demo(images=str(tmp_path))
    with pytest.raises(OptionError, match=r"--images .*nowhere"):
        demo(images=str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_the_demo_runs_its_three_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(64):
        file = tmp_path / "images" / f"class{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (160, 160, 3), dtype=np.uint8)).save(file)
    done = subprocess.run(
        [sys.executable, "-m", "dataloaders", "demo",
         "--images", str(tmp_path / "images"), "--budget", "2"],
        capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "DATALOADERS_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = re.search(r"^use num_workers=(\d+)", done.stdout, re.MULTILINE)
    assert chosen is not None, done.stdout
    workers = chosen[1]
    typed = re.findall(r"^\$ dataloaders (\w+) examples/train_images.py(.*)$", done.stdout, re.M)
    *parts, conclusion = re.split(r"^=== what was found$", done.stdout, flags=re.MULTILINE)
    assert len(parts) == 1
    verdicts = re.findall(r"^ *(.*): \S+-bound|^ *(.*): inconclusive", conclusion, re.MULTILINE)
    found = ["".join(names) for names in verdicts]
    assert [command for command, _ in typed[:2]] == ["check", "tune"]
    assert typed[0][1] == typed[1][1]
    if workers == "0":
        assert len(typed) == 2
        assert "the second check would be the first again" in parts[0]
        assert found == ["as it is"]
    else:
        assert typed[2:] == [("check", f"{typed[0][1]} --workers {workers}")]
        assert found == ["as it is", f"with {workers} workers"]
    # Each check printed its own report, of the loader that it says.
    reported = re.findall(r"note: measured in loader 1: .*num_workers=(\d+)", parts[0])
    assert reported == ["0", workers][: len(typed) - 1]
    assert parts[0].count("note: tuned loader 1: ") == 1
    assert re.search(r"^what to try next\n  \S", conclusion, re.MULTILINE)

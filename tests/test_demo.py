"""The demo and its photographs."""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dataloaders.cli import main
from dataloaders.cli.photos import make_photos


def test_photographs_are_like_a_cameras_and_made_once(tmp_path):
    told = []
    folder = make_photos(tmp_path / "deep" / "photos", count=10, progress=lambda *n: told.append(n))
    files = sorted(folder.rglob("*.jpg"))
    assert len(files) == 10
    assert told == [(done, 10) for done in range(1, 11)]
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


def test_an_interrupted_making_leaves_nothing(tmp_path):
    def interrupt(done, count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_photos(tmp_path / "photos", count=6, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_classes_is_refused(tmp_path, capsys):
    for folder, says in ((".", "one subfolder of images for each class"), ("nowhere", "--images ")):
        assert main(["demo", "--images", str(tmp_path / folder)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.nightly
def test_the_demo_runs_its_parts(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(64):
        file = tmp_path / "images" / f"class{number % 2}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (160, 160, 3), dtype=np.uint8)).save(file)
    done = subprocess.run(
        [sys.executable, "-m", "dataloaders", "demo",
         "--images", str(tmp_path / "images"), "--budget", "2"],
        capture_output=True, text=True, check=False,
        # One thread: on a busy machine several spend minutes waiting for each other.
        env={
            "PATH": "/usr/bin:/bin",
            "DATALOADERS_CACHE": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report, conclusion = re.split(r"^=== what was found$", done.stdout, flags=re.MULTILINE)
    typed = re.findall(r"^\$ (?:\w+=h5 )?dataloaders (\w+) examples/\S+(.*)$", report, re.MULTILINE)
    assert [name for name, _ in typed[:2]] == ["check", "tune"]
    (tuned,) = re.findall(r"^use num_workers=(\d+)", report, re.MULTILINE)
    checks = [
        words.partition("--workers ")[2].split()[:1] for name, words in typed if name == "check"
    ]
    assert [tuned] in checks or (tuned == "0" and "Tuning left the script as it is" in report)
    # Each check printed its own report, of the loader that it says.
    reported = re.findall(r"note: measured in loader 1: .*num_workers=(\d+)", report)
    assert reported == [(words or ["0"])[0] for words in checks]
    verdicts = re.findall(r"^ *(.*): (\S+-bound|inconclusive)", conclusion, re.MULTILINE)
    assert len(verdicts) == len(checks)
    assert len(checks) > 1 or verdicts[0][1] == "step-bound"  # else a cache is the next to try
    assert re.search(r"^what to try next\n  \S", conclusion, re.MULTILINE)
    assert list((tmp_path / "cache").glob("demo-*")) == []

"""``dataloaders cache``, run as its user runs it: real files, a real folder of images."""

import os
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from dataloaders.cache import CachedDataset
from dataloaders.cli.cache_options import FLAGS
from helpers import warm
from helpers.cached import built, refused, spoil
from helpers.compare import assert_same
from helpers.pictures import smooth, write_folder

DATA = """
import torch
from torchvision.transforms import v2
from helpers.datasets import MapDataset
from helpers.pictures import Opened

squares = Opened(v2.Compose([v2.Resize((8, 8)), v2.RandomCrop(6)]), size=6)

def partly():
    return Opened(size=6, failing={2})

class Loose(MapDataset):
    size = 4
    def sample(self, index):
        return torch.rand(3)

number = 3
"""


@pytest.fixture
def command(command, monkeypatch, tmp_path):
    """``dataloaders cache`` in a folder with a file of datasets."""
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "squares_data.py").write_text(DATA)
    return partial(command, "cache")


def build(command, *words, **options):
    return command("build", *words, "--workers", 0, **options)


@pytest.mark.parametrize("name", ["squares_data.py:squares", "squares_data:squares"])
def test_a_dataset_of_a_file_or_module_is_built_up_to_its_first_random_transform(
    command, name, monkeypatch
):
    assert "squares.h5: 6 samples" in build(command, name, "squares.h5").out
    assert_same(CachedDataset("squares.h5")[3], (v2.Resize((8, 8))(smooth(3)), 3))
    shown = command("info", "squares.h5").out
    for line in (
        "squares.h5: 6 samples",
        r"image:RGB +uint8 +3 x 8 x 8",
        r"transforms computed: .*Resize",
        r"transforms left to run live: .*RandomCrop",
    ):
        assert re.search(line, shown)
    monkeypatch.setenv("COLUMNS", "30")
    assert "…" not in command("info", "squares.h5").out


def test_what_a_build_says(command):
    words = ("build", "squares_data.py:squares", "squares.h5", "--workers", 2)
    for options, before in (((), False), ((), True), (("--overwrite",), False)):
        done = command(*words, *options)
        assert (", built before" in done.out) is before
        assert ("of 6 samples" in done.err) is not before
    assert command(*words, "--overwrite", "--quiet").err == ""


def test_what_torchrun_starts_again_does_not_take_the_old_cache_for_the_new_one(
    command, monkeypatch, tmp_path
):
    words = ("some_numbers.py:numbers", "a.h5", "--overwrite")
    for number, restarts in ((1, 0), (2, 1)):
        (tmp_path / "some_numbers.py").write_text(f"numbers = [{number}] * 4")
        monkeypatch.delitem(sys.modules, "some_numbers", raising=False)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        build(command, *words)
        assert list(CachedDataset("a.h5")) == [number] * 4
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "100")  # a user's, who may give it again
    assert "--build-id" in build(command, *words, status=2).err


def test_a_folder_of_images_is_resized_and_cropped(command):
    write_folder(Path("photos"), 4)
    build(command, "photos", "photos.h5", "--resize", 16, "--crop", 12)
    cached = CachedDataset("photos.h5")
    assert [label for _, label in cached] == [0, 0, 1, 2]
    assert {image.size for image, _ in cached} == {(12, 12)}
    build(command, "photos", "plain.h5")
    assert CachedDataset("plain.h5")[3][0].size == smooth(2).size


def test_samples_that_fail_end_the_build_or_are_left_out(command):
    words = "squares_data.py:partly", "partly.h5"
    notes = refused("no sample 2", build, command, *words, error=ValueError).__notes__
    (note,) = [note for note in notes if "sample 2" in note]
    assert note.endswith("; on_error='skip' (--skip) leaves such samples out")
    assert "1 samples were left out" in build(command, *words, "--skip").out
    assert [label for _, label in CachedDataset("partly.h5")] == [0, 1, 3, 4, 5]
    info = command("info", "partly.h5").out
    assert "left out, since reading them failed: 1 samples" in info
    assert re.search("sample 2: .*no sample 2 today", info)
    # The name of a class that takes no arguments is one of a dataset, too.
    words = "squares_data.py:Loose", "loose.h5"
    rule = "pass allow_random=True (--allow-random) to keep one draw of each sample"
    assert rule in build(command, *words, status=2).err
    build(command, *words, "--allow-random")
    assert len(CachedDataset("loose.h5")) == 4


INTERRUPTED = """
import os
import torch
from helpers.datasets import Made

def sample(index, at=10):
    if index == at and os.path.exists("x.parts/00000.h5"):
        raise KeyboardInterrupt
    return torch.full((12 << 20,), index, dtype=torch.uint8)

interrupted = Made(sample, 12)
"""


def test_ctrl_c_says_what_is_kept_and_the_same_command_goes_on(command):
    Path("interrupted.py").write_text(INTERRUPTED)
    done = build(command, "interrupted.py:interrupted", "x.h5", status=130)
    kept = r"dataloaders cache: interrupted: [1-9] of 12 samples are kept in .*x.parts; start it"
    assert re.search(kept, done.err)
    Path("interrupted.py").write_text(INTERRUPTED.replace("at=10", "at=1000"))
    build(command, "interrupted.py:interrupted", "x.h5")
    assert len(CachedDataset("x.h5")) == 12


def test_names_that_the_terminal_cannot_show_are_escaped(path):
    built([{"\u4e2d": 1}], path)
    words = ["-m", "dataloaders", "cache", "info", path]
    done = warm.run(words, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert r"\u4e2d" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "x.h5"], "'nowhere' names no dataset; give module:name"),
        (["squares_daat:squares", "x.h5"], "there is no module 'squares_daat'"),
        (["squares_data.py:sqares", "x.h5"], "has no 'sqares' at its top level"),
        (["torch.utils.data:Subset", "x.h5"], "cannot be called without arguments (missing a req"),
        (["squares_data.py:number", "x.h5"], "is a int; a cache is built of a dataset"),
        (["squares_data.py:squares", "x.h5", "--crop", "3"], "are for a folder of images"),
        (["empty", "x.h5"], "'empty' is no folder of images"),
    ],
)
def test_a_dataset_that_is_none(command, words, message):
    Path("empty").mkdir()
    assert message in build(command, *words, status=2).err
    assert not Path("x.h5").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_workers", ["--workers", "-1"]),
        ("images", ["--images", "gif"]),
        ("quality", ["--images", "jpeg", "--quality", "0"]),
        ("compress", ["--compress", "lz4"]),
        ("level", ["--compress", "gzip", "--level", "10"]),
        ("shard", ["--shard", "1/70000"]),
        ("build_id", ["--shard", "0/2", "--overwrite"]),
    ],
)
def test_an_option_that_cannot_be_is_named_as_it_was_given(command, name, words):
    done = command("build", "squares_data.py:squares", "x.h5", *words, status=2)
    assert re.search(rf"{name}=.* \({FLAGS[name]}\)", done.err)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--images jpeg --quality 70 --max-side 20", "images: jpeg, quality 70, max_side 20"),
        ("--compress zstd --level 9", "compress: zstd, level 9"),
        ("--images png --quality 80", None),
        ("--level 9", None),
    ],
)
def test_how_values_are_stored_stands_in_the_file(command, words, told):
    write_folder(Path("photos"), 3)
    build(command, "photos", "x.h5", *words.split(), status=2 if told is None else 0)
    assert told is None or f"built from {told}" in command("info", "x.h5").out


def test_a_cache_is_verified_and_its_parts_are_merged(command):
    built([(torch.full((5,), row), row) for row in range(9)], "a.h5", rows=4, single_file=False)
    done = command("merge", "a.h5", "one.h5")
    assert re.search(r"merge  the copy takes \d+\.\d KiB of disk, besides the parts", done.err)
    assert "one.h5: 9 samples, " in done.out
    assert [label for _, label in CachedDataset("one.h5")] == list(range(9))
    command("merge", "a.h5", "one.h5", status=2)
    assert command("verify", "one.h5").out == "one.h5 is whole\n"
    spoil(Path("one.h5"), Path("one.h5").stat().st_size // 2)
    done = command("verify", "one.h5", status=1)
    assert done.out.splitlines()[1].startswith("one.h5 is damaged: build it again")

"""Several ranks build one cache: each its shard, whatever dies and is started again."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from dataloaders.cache import CachedDataset
from dataloaders.errors import OptionError
from helpers.cached import built, refused, spoil
from helpers.compare import assert_same
from helpers.datasets import NUMBERED as SIZE
from helpers.datasets import Made, Numbered

ROOT = Path(__file__).resolve().parent.parent
PARTS = ["00000.h5", "00010.h5", "00020.h5", "00030.h5"]


def build(dataset, path, rank, of=4, **options):
    return built(dataset, path, shard=(rank, of), **options)


def built_in_turn(dataset, path, of=4, **options):
    """The cache that ``of`` ranks build one after the other, the last of which joins."""
    for rank in range(of):
        cached = build(dataset, path, rank, of, wait=rank == of - 1, single_file=False, **options)
    return cached


def labels(cached):
    return [sample["label"] for sample in cached]


def names(folder):
    return sorted(path.name for path in (folder / "a.parts").iterdir())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What four ranks build of `Numbered`, when nothing happens to them."""
    folder = tmp_path_factory.mktemp("expected")
    built_in_turn(Numbered(), folder / "a.h5")
    return folder


def test_who_comes_later_only_opens_it(expected, tmp_path):
    path = shutil.copytree(expected, tmp_path / "copy") / "a.h5"
    before = {each: each.stat().st_mtime_ns for each in path.parent.iterdir()}
    for shard in ((1, 4), (0, 2), None):
        cached = built(Numbered(), path, shard=shard)
        assert (cached.path, len(cached)) == (path, SIZE)
    assert {each: each.stat().st_mtime_ns for each in path.parent.iterdir()} == before
    for changed, rule in (
        (Numbered(42), "length"),
        (Numbered(shift=1), "the contents of sample 0"),
    ):
        rule = f"was built from something else: {rule}"
        refused(rule, build, changed, path, 1, check="contents")


def test_overwriting_ranks_join_no_part_of_an_earlier_build(path):
    """A rank that is done before another one has begun; what changed, no look at samples shows."""

    def samples(added):
        looked_at = (0, 13, 27, 40)
        return Made(lambda index: {"label": index + (0 if index in looked_at else added)})

    built_in_turn(samples(0), path, of=2)
    options = {"of": 2, "overwrite": True, "build_id": "second", "single_file": False}
    seen = []

    def look(progress):
        seen.append(CachedDataset(path)[30]["label"])

    # The last one comes when the others have finished, and begins no build.
    for rank in (0, 1, 1):
        cached = build(samples(1000), path, rank, progress=look, **options)
        assert list(cached) == list(map(samples(1000).__getitem__, range(SIZE)))
    assert seen[0] == 30  # the old one stays until the new one is finished
    assert len(names(path.parent)) == 2
    rule = r"with shard=.* needs build_id= \(--build-id\)"
    refused(rule, build, samples(0), path, 0, overwrite=True, error=OptionError)
    path.write_bytes(b"no cache")
    assert len(build(Numbered(3), path, 0, 1, overwrite=True, build_id="third")) == 3


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("single_file", [True, False])
def test_another_number_of_ranks_goes_on(path, first, then, single_file):
    options = {"rows": 12, "single_file": single_file}
    failing = Numbered(failing={38})  # which no look at a few samples reads
    for rank in range(first):
        with suppress(ValueError):
            build(failing, path, rank, first, wait=False, **options)
    own = [build(Numbered(), path, rank, then, wait=False, **options) for rank in range(then)]
    assert [label for cached in own for label in labels(cached)] == list(range(SIZE))
    cached = build(Numbered(), path, 0, then, **options)
    assert labels(cached) == list(range(SIZE))
    if single_file:
        assert not path.with_suffix(".parts").exists()
    else:
        assert names(path.parent) == [shard.name for shard in cached.shards]


def test_other_ranks_have_other_parts(path, tmp_path):
    """The part of fewer ranks is returned; one that is made again after a join ends earlier."""
    build(Numbered(), tmp_path / "b.h5", 0, 1, wait=False, rows=20)
    cached = build(Numbered(), tmp_path / "b.h5", 1, 8, wait=False)  # samples 5 to 9
    assert labels(cached) == list(range(20))
    built_in_turn(Numbered(), path)
    (path.with_suffix(".parts") / "00010.h5").unlink()
    assert len(build(Numbered(), path, 0, 3, wait=False)) == 13
    assert labels(build(Numbered(), path, 1, 3, single_file=False)) == list(range(SIZE))


def test_parts_that_have_samples_twice_are_not_joined(path, tmp_path):
    """As versions have left them that took parts by where they begin."""
    for folder, rows in ((tmp_path, 12), (tmp_path / "other", 20)):
        folder.mkdir(exist_ok=True)
        build(Numbered(), folder / "a.h5", 0, 1, wait=False, rows=rows)
    shutil.copy(tmp_path / "other" / "a.parts" / "00020.h5", tmp_path / "a.parts")
    assert labels(built(Numbered(), path, rows=12, single_file=False)) == list(range(SIZE))
    assert names(tmp_path) == ["00000.h5", "00012.h5", "00024.h5", "00036.h5"]


KILLED = """
import os
from helpers.datasets import Numbered

class Killed(Numbered):
    before = None

    def __getitem__(self, index):
        # In the middle of a part; whose it is, a late rank's may be made by another.
        if (self.before, index) == (27, 28) and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        self.before = index
        return super().__getitem__(index)

killed = Killed()
"""


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_torchrun_starts_again_when_a_rank_is_killed(tmp_path):
    (tmp_path / "killed_data.py").write_text(KILLED)
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"],
        *["--max-restarts", "3", "-m", "dataloaders", "cache", "build"],
        *["killed_data:killed", "a.h5", "--workers", "0"],
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    options = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exitcode: -9" in done.stderr
    lines = done.stdout.splitlines()  # of four ranks one, which may finish before torchrun ends it
    assert 1 <= len(lines) <= 2
    assert all(line.startswith("a.h5: 41 samples, ") for line in lines)
    assert_same(list(CachedDataset(tmp_path / "a.h5")), [Numbered()[row] for row in range(SIZE)])


def test_samples_that_fail_have_the_numbers_of_the_dataset(path, tmp_path):
    dataset = Numbered(failing={3, 20, 21, *range(30, 41)})
    cached = built_in_turn(dataset, path, on_error="skip")
    told = [(index, f"ValueError: no sample {index} today") for index in sorted(dataset.failing)]
    assert cached.failed == told
    assert (labels(cached)[18:22], cached.index.samples) == ([19, 22, 23, 24], 41)
    assert CachedDataset(cached.shards[2]).failed == told[1:3]
    assert len(CachedDataset(cached.shards[3])) == 0  # all of its samples failed
    own = build(dataset, tmp_path / "c.h5", 1, 2, rows=5, wait=False, on_error="skip")
    assert own.failed == told[1:]
    dataset.failing = range(41)
    rule = r"none of the 41 samples .* read.*no sample 0 today"
    refused(rule, built_in_turn, dataset, tmp_path / "b.h5", on_error="skip")


def test_more_ranks_than_samples(path, tmp_path):
    options = {"of": 5, "single_file": False}
    for rank in (1, 3):
        build(Numbered(3), path, rank, wait=False, **options)
    refused("no samples for rank 0 of 5", build, Numbered(3), path, 0, wait=False, **options)
    for rank in (4, 0, 2):
        cached = build(Numbered(3), path, rank, **options)
    assert labels(cached) == [0, 1, 2]
    assert len(cached.shards) == 3
    assert len(build(Numbered(0), tmp_path / "none.h5", 1, 2)) == 0


class Late(Numbered):
    """Says when it is read, and gives its samples once there is a file; is killed by sample 15."""

    def __init__(self, file: Path, *, killed: bool = False) -> None:
        super().__init__()
        self.file, self.killed = file, killed

    def __getitem__(self, index):
        self.file.with_name("begun").touch()
        while not self.file.exists():
            time.sleep(0.01)
        if self.killed and index == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("killed", [False, True])
def test_who_waits_for_a_rank_makes_the_parts_that_it_leaves(tmp_path: Path, killed: bool) -> None:
    path, seen = tmp_path / "a.h5", []

    def look(progress):
        if progress.waiting and progress.samples_done:
            seen.append(progress)
            (tmp_path / "rank 1 waits").touch()

    dataset = Late(tmp_path / "rank 1 waits", killed=killed)
    rank_0 = multiprocessing.get_context("fork").Process(
        target=build, args=(dataset, path, 0, 2), kwargs={"rows": 10}
    )
    rank_0.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    cached = build(Late(tmp_path), path, 1, 2, rows=10, progress=look)
    assert_same(list(cached), [Numbered()[row] for row in range(SIZE)])
    rank_0.join()
    assert rank_0.exitcode == (-9 if killed else 0)
    assert (seen[0].samples_done, seen[0].samples) == (21, SIZE)


def test_a_sample_that_fails_is_an_error_of_each_rank(path):
    failing = Numbered(failing={17})
    for rank in (0, 1):
        error = refused("no sample 17 today", build, failing, path, rank, 2, error=ValueError)
    assert any("21 of 21 samples are kept in" in note for note in error.__notes__)
    assert len(build(Numbered(), path, 1, 2)) == SIZE


@pytest.fixture
def build_command(command, tmp_path):
    (tmp_path / "some_data.py").write_text(
        "from helpers.datasets import Numbered\nsamples = Numbered()\n"
    )
    return partial(command, "cache", "build", "some_data.py:samples", "a.h5", "--workers", "0")


def test_shards_that_are_built_apart_are_joined(command, build_command, expected, tmp_path):
    def assert_joined():
        """Without reading more than a few samples: each part stays."""
        parts = [tmp_path / "a.parts" / name for name in PARTS]
        files = [part.stat().st_ino for part in parts]
        built(Numbered(), tmp_path / "a.h5", single_file=False)
        assert (names(tmp_path), [part.stat().st_ino for part in parts]) == (PARTS, files)
        for name in ["a.h5", *(f"a.parts/{name}" for name in PARTS)]:
            assert (tmp_path / name).read_bytes() == (expected / name).read_bytes(), name

    for rank in range(4):
        assert f"a.parts/{PARTS[rank]}: " in build_command(f"--shard={rank}/4", "--no-wait").out
    assert_joined()
    told = command("cache", "info", "a.h5").out
    assert "in 4 parts:" in told
    assert "a.parts/00030.h5: 11 samples" in told
    part = tmp_path / "a.parts" / "00010.h5"
    spoil(part, part.stat().st_size // 2)
    damaged, advice = command("cache", "verify", "a.h5", status=1).out.splitlines()
    assert damaged.startswith("a.parts/00010.h5: ")
    assert "delete a.parts/00010.h5 and build again" in advice
    part.unlink()
    assert "is missing" in command("cache", "info", "a.h5", status=2).err
    build_command("--shard", "1/4", "--no-wait")
    assert_joined()


def test_the_rank_is_that_of_torchrun(build_command, monkeypatch, tmp_path):
    def told(rank, world, *words, status=2):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        return build_command(*words, status=status).err

    told("1", "2", "--no-wait", status=0)
    assert [path.name for path in (tmp_path / "a.parts").glob("*.h5")] == ["00020.h5"]
    told("0", "1", status=0)
    assert [path.name for path in tmp_path.rglob("*.h5")] == ["a.h5"]
    monkeypatch.delenv("WORLD_SIZE")
    for word, message in (
        ("--no-wait", "--no-wait is for shards"),
        ("--shard=a/4", "--shard: invalid shard value: 'a/4'"),
        ("--shard=4/4", "it must be None or (rank, of), such as (3, 8)"),
    ):
        assert message in build_command(word, status=2).err

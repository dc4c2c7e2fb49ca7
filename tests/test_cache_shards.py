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
import torch

from dataloaders.cache import CachedDataset, join, precompute
from dataloaders.errors import CacheError, OptionError
from helpers.cached import built, spoil
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


def names(folder):
    return sorted(path.name for path in (folder / "a.parts").iterdir())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What four ranks build of `Numbered`, when nothing happens to them."""
    folder = tmp_path_factory.mktemp("expected")
    built_in_turn(Numbered(), folder / "a.h5")
    return folder


def assert_equal_to_the_bit(folder, expected):
    assert names(folder) == PARTS
    for name in ["a.h5", *(f"a.parts/{name}" for name in PARTS)]:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def test_the_joined_cache_is_the_dataset(expected, tmp_path):
    cached = CachedDataset(expected / "a.h5")
    assert names(expected) == PARTS
    assert_same(list(cached), [Numbered()[row] for row in range(SIZE)])
    one = built(Numbered(), tmp_path / "one.h5")
    assert cached.index.fingerprint == one.index.fingerprint
    shards = [CachedDataset(shard) for shard in cached.shards]
    assert [len(shard) for shard in shards] == [10, 10, 10, 11]
    assert [shard[0]["label"] for shard in shards] == [0, 10, 20, 30]


def test_a_rank_reads_its_part_and_no_more_than_a_look_at_the_rest(path):
    dataset = Numbered(400, log=path.with_name("log"))
    cached = build(dataset, path, 2, wait=False)
    assert cached.path == path.with_suffix(".parts") / "00200.h5"
    assert [sample["label"] for sample in cached] == list(range(200, 300))
    assert len([index for index in dataset.reads() if not 200 <= index < 300]) < 40
    assert not path.exists()


def test_who_comes_later_only_opens_it(expected, tmp_path):
    path = shutil.copytree(expected, tmp_path / "copy") / "a.h5"
    before = {each: each.stat().st_mtime_ns for each in path.parent.iterdir()}
    for shard in ((1, 4), (0, 2), None):
        cached = built(Numbered(), path, shard=shard)
        assert (cached.path, len(cached)) == (path, SIZE)
    assert {each: each.stat().st_mtime_ns for each in path.parent.iterdir()} == before
    with pytest.raises(CacheError, match="was built from something else: length"):
        build(Numbered(SIZE + 1), path, 1)
    with pytest.raises(CacheError, match="was built from something else: the contents of sample 0"):
        build(Numbered(shift=1), path, 1, check="contents")


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
    with pytest.raises(OptionError, match=r"with shard=.* needs build_id= \(--build-id\)"):
        build(samples(0), path, 0, overwrite=True)
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
    assert [sample["label"] for cached in own for sample in cached] == list(range(SIZE))
    cached = build(Numbered(), path, 0, then, **options)
    assert [sample["label"] for sample in cached] == list(range(SIZE))
    if single_file:
        assert not path.with_suffix(".parts").exists()
    else:
        assert names(path.parent) == [shard.name for shard in cached.shards]


def test_a_part_of_other_samples_does_not_stand_for_the_one_that_was_joined(path):
    """Another number of ranks mends a cache: the part that is made again ends earlier."""
    built_in_turn(Numbered(), path)
    (path.with_suffix(".parts") / "00010.h5").unlink()
    assert len(build(Numbered(), path, 0, 3, wait=False)) == 13
    cached = build(Numbered(), path, 1, 3, single_file=False)
    assert [sample["label"] for sample in cached] == list(range(SIZE))


def test_a_rank_whose_samples_are_in_the_part_of_another_one_returns_that_part(path):
    """As a build by fewer ranks leaves it."""
    build(Numbered(), path, 0, 1, wait=False, rows=20)
    cached = build(Numbered(), path, 1, 8, wait=False)  # samples 5 to 9
    assert [sample["label"] for sample in cached] == list(range(20))


def test_parts_that_have_samples_twice_are_not_joined(path, tmp_path):
    """As versions have left them that took parts by where they begin."""
    for folder, rows in ((tmp_path, 12), (tmp_path / "other", 20)):
        folder.mkdir(exist_ok=True)
        build(Numbered(), folder / "a.h5", 0, 1, wait=False, rows=rows)
    shutil.copy(tmp_path / "other" / "a.parts" / "00020.h5", tmp_path / "a.parts")
    rule = r"00020\.h5 begins with sample 20, and those before it end with sample 23"
    with pytest.raises(CacheError, match=rule):
        join(path)
    cached = built(Numbered(), path, rows=12, single_file=False)
    assert [sample["label"] for sample in cached] == list(range(SIZE))
    assert names(tmp_path) == ["00000.h5", "00012.h5", "00024.h5", "00036.h5"]


def test_ranks_say_of_the_whole_whether_it_becomes_one_file(path):
    told = []

    def announce(estimate):
        told.append(estimate)
        raise Fits

    def look(size, **options):
        dataset = Made(lambda index: torch.zeros(2**20, dtype=torch.uint8), size)
        with pytest.raises(Fits):
            build(dataset, path, 0, 8, announce=announce, **options)
        shutil.rmtree(path.with_suffix(".parts"), ignore_errors=True)
        return told[-1].disk_needed / told[-1].bytes

    assert look(800) == 1
    assert look(100) == 2
    assert look(100, wait=False) == 1
    assert look(800, single_file=True) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from helpers.datasets import Numbered

class Killed(Numbered):
    def __getitem__(self, index):
        # As the third rank reads it for itself, in the middle of its part.
        if index == 28 and os.environ["RANK"] == "2" and not os.path.exists("killed"):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

killed = Killed()
"""


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_torchrun_starts_again_when_a_rank_is_killed(tmp_path):
    (tmp_path / "killed_data.py").write_text(KILLED.format(tests=str(ROOT / "tests")))
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"],
        *["--max-restarts", "3", "-m", "dataloaders", "cache", "build"],
        *["killed_data:killed", "a.h5", "--workers", "0"],
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run(command, cwd=tmp_path, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exitcode: -9" in done.stderr
    lines = done.stdout.splitlines()  # of four ranks one, which may finish before torchrun ends it
    assert 1 <= len(lines) <= 2
    assert all(line.startswith("a.h5: 41 samples, ") for line in lines)
    assert_same(list(CachedDataset(tmp_path / "a.h5")), [Numbered()[row] for row in range(SIZE)])


def test_a_rank_that_failed_says_what_is_kept_and_of_what(path):
    failing = Numbered(failing={17})
    options = {"rows": 2, "wait": False}
    with pytest.raises(ValueError, match="no sample 17 today") as caught:
        build(failing, path, 1, **options)
    assert any("6 of 10 samples are kept in" in note for note in caught.value.__notes__)
    for changed, rule in (
        (Numbered(shift=1), "contents of sample 0"),
        (Numbered(42), "length: 41 "),
    ):
        with pytest.raises(CacheError, match=f"unfinished build of something else; .*{rule}"):
            build(changed, path, 1, **options)
    seen = []
    build(Numbered(), path, 1, progress=seen.append, **options)
    assert (seen[0].samples_done, seen[0].samples) == (6, 10)


def test_samples_that_fail_have_the_numbers_of_the_dataset(path, tmp_path):
    dataset = Numbered(failing={3, 20, 21, *range(30, 41)})
    cached = built_in_turn(dataset, path, on_error="skip")
    told = [(index, f"ValueError: no sample {index} today") for index in sorted(dataset.failing)]
    assert cached.failed == told
    assert (len(cached), cached.index.samples) == (27, 41)
    assert [sample["label"] for sample in cached[18:22]] == [19, 22, 23, 24]
    assert CachedDataset(cached.shards[2]).failed == told[1:3]
    assert len(CachedDataset(cached.shards[3])) == 0  # all of its samples failed
    own = build(dataset, tmp_path / "c.h5", 1, 2, rows=5, wait=False, on_error="skip")
    assert own.failed == told[1:]
    dataset.failing = range(41)
    with pytest.raises(CacheError, match=r"none of the 41 samples .* read.*no sample 0 today"):
        built_in_turn(dataset, tmp_path / "b.h5", on_error="skip")


def test_more_ranks_than_samples(path, tmp_path):
    for rank in (1, 3):
        build(Numbered(3), path, rank, 5, wait=False, single_file=False)
    with pytest.raises(CacheError, match="no samples for rank 0 of 5"):
        build(Numbered(3), path, 0, 5, wait=False, single_file=False)
    for rank in (4, 0, 2):
        cached = build(Numbered(3), path, rank, 5, single_file=False)
    assert [sample["label"] for sample in cached] == [0, 1, 2]
    assert [len(CachedDataset(shard)) for shard in cached.shards] == [1, 1, 1]
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
    options = {"shard": (0, 2), "rows": 10}
    rank_0 = multiprocessing.get_context("fork").Process(
        target=built, args=(dataset, path), kwargs=options
    )
    rank_0.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    cached = build(Late(tmp_path), path, 1, 2, rows=10, progress=look)
    assert_same(list(cached), [Numbered()[row] for row in range(SIZE)])
    rank_0.join()
    assert rank_0.exitcode == (-9 if killed else 0)
    assert (seen[0].shards_left, seen[0].samples_done, seen[0].samples) == (1, 21, SIZE)


def test_a_sample_that_fails_is_an_error_of_each_rank(path):
    failing = Numbered(failing={17})
    for rank in (0, 1):
        with pytest.raises(ValueError, match="no sample 17 today") as caught:
            build(failing, path, rank, 2)
    assert any("21 of 21 samples are kept in" in note for note in caught.value.__notes__)
    assert len(build(Numbered(), path, 1, 2)) == SIZE


def test_a_shard_that_cannot_be(path):
    for shard in ((4, 4), (-1, 4), (0, 0), (0,), [0, 4], (0.0, 4), (True, 4), "0/4", (0, 1 << 17)):
        with pytest.raises(OptionError, match=r"it must be None or \(rank, of\), such as \(3, 8\)"):
            precompute(Numbered(), path, shard=shard)


# The command line


@pytest.fixture
def build_command(command, tmp_path):
    (tmp_path / "some_data.py").write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "from helpers.datasets import Numbered\nsamples = Numbered()\n"
    )
    return partial(command, "cache", "build", "some_data.py:samples", "a.h5", "--workers", "0")


def test_shards_that_are_built_apart_are_joined(command, build_command, expected, tmp_path):
    for rank in range(4):
        assert f"a.parts/{PARTS[rank]}: " in build_command(f"--shard={rank}/4", "--no-wait").out
    assert "a.h5: 41 samples in 4 parts, " in command("cache", "join", "a.h5").out
    assert_equal_to_the_bit(tmp_path, expected)
    told = command("cache", "info", "a.h5").out
    assert "in 4 parts:" in told
    assert "a.parts/00030.h5: 11 samples" in told
    part = tmp_path / "a.parts" / "00010.h5"
    spoil(part, part.stat().st_size // 2)
    done = command("cache", "verify", "a.h5", status=1)
    damaged, advice = done.out.splitlines()
    assert damaged.startswith("a.parts/00010.h5: ")
    assert "delete a.parts/00010.h5 and build again" in advice
    part.unlink()
    assert "is missing" in command("cache", "info", "a.h5", status=2).err
    build_command("--shard", "1/4", "--no-wait")
    command("cache", "join", "a.h5")
    assert_equal_to_the_bit(tmp_path, expected)


def test_the_rank_is_that_of_torchrun(build_command, monkeypatch, tmp_path):
    def refused(message, *words):
        assert message in build_command(*words, status=2).err

    for rank, world, files in (("1", "2", ["a.parts/00020.h5"]), ("0", "1", ["a.h5"])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        build_command(*(["--no-wait"] if world == "2" else []))
        assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.h5")) == files
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    refused("shard=(2, 2) (--shard)")
    monkeypatch.delenv("WORLD_SIZE")
    refused("--no-wait is for shards", "--no-wait")
    for text in ("3", "a/4", "1/"):
        refused(f"--shard: invalid shard value: '{text}'", f"--shard={text}")
    for text in ("4/4", "-1/4"):
        refused("it must be None or (rank, of), such as (3, 8)", f"--shard={text}")


class Fits(Exception):
    """There is room: nothing needs to be built."""


def test_room_for_all_ranks_that_write_on_the_disk(path):
    room = os.statvfs(path.parent)  # rows of a mebibyte, of which all fill the disk twice
    size = 2 * room.f_bavail * room.f_frsize // 2**20
    dataset = Made(lambda index: torch.zeros(2**20, dtype=torch.uint8), size)

    def begin(wait):
        def announced(estimate):
            raise Fits

        build(dataset, path, 2, 8, wait=wait, announce=announced)

    with pytest.raises(CacheError, match=r"are needed.* and .* are free in"):  # an eighth would fit
        begin(True)
    with pytest.raises(Fits):  # each rank may have a folder of its own
        begin(False)
    assert not path.exists()

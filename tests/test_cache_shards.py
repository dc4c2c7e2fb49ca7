"""Several ranks build one cache: each its shard, whatever dies and is started again."""

import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, join, precompute, verify
from dataloaders.cache.build import ranks as ranks_module
from dataloaders.cache.build.estimation import workers_for
from dataloaders.cache.build.study import Findings
from dataloaders.cli import main
from dataloaders.errors import CacheError, CacheWarning, OptionError
from helpers.cached import smooth, spoil
from helpers.compare import assert_same, bits
from helpers.numbered import SIZE, Made, Numbered

ROOT = Path(__file__).resolve().parent.parent
PARTS = ["00000.h5", "00010.h5", "00020.h5", "00030.h5"]


def build(dataset, path, rank, of=4, **options):
    return precompute(dataset, path, shard=(rank, of), **{"num_workers": 0, **options})


def built(dataset, path, of=4, **options):
    """The cache that ``of`` ranks build one after the other, the last of which joins."""
    for rank in range(of):
        cached = build(dataset, path, rank, of, wait=rank == of - 1, single_file=False, **options)
    return cached


def names(folder):
    return sorted(path.name for path in (folder / "a.parts").iterdir())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.h5"


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What four ranks build of `Numbered`, when nothing happens to them."""
    folder = tmp_path_factory.mktemp("expected")
    built(Numbered(), folder / "a.h5")
    return folder


def assert_equal_to_the_bit(folder, expected):
    assert names(folder) == PARTS
    for name in ["a.h5", *(f"a.parts/{name}" for name in PARTS)]:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def test_the_joined_cache_is_the_dataset(expected, tmp_path):
    cached = CachedDataset(expected / "a.h5")
    assert names(expected) == PARTS
    one = precompute(Numbered(), tmp_path / "one.h5", num_workers=0)
    assert [bits(sample) for sample in cached] == [bits(sample) for sample in one]
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
        cached = precompute(Numbered(), path, shard=shard, num_workers=0)
        assert (cached.path, len(cached)) == (path, SIZE)
    assert {each: each.stat().st_mtime_ns for each in path.parent.iterdir()} == before
    with pytest.raises(CacheError, match="was built from something else: length"):
        build(Numbered(SIZE + 1), path, 1)
    with pytest.raises(CacheError, match="was built from something else: the contents of sample 0"):
        build(Numbered(shift=1), path, 1, check="contents")


def test_a_missing_part_is_made_again_by_whoever_builds(expected, tmp_path):
    path = shutil.copytree(expected, tmp_path / "copy") / "a.h5"
    (path.parent / "a.parts" / "00020.h5").unlink()
    dataset = Numbered(log=tmp_path / "log")
    assert len(build(dataset, path, 2, single_file=False)) == SIZE
    assert {*range(20, 30)} <= set(dataset.reads()) < {*range(SIZE)}
    assert_equal_to_the_bit(path.parent, expected)


def test_overwriting_ranks_join_no_part_of_an_earlier_build(path):
    """A rank that is done before another one has begun; what changed, no look at samples shows."""

    def samples(added):
        looked_at = (0, 13, 27, 40)
        return Made(lambda index: {"label": index + (0 if index in looked_at else added)})

    old, found = built(samples(0), path, of=2), []
    options = {"of": 2, "overwrite": True, "single_file": False}
    first = threading.Thread(target=lambda: found.append(build(samples(1000), path, 0, **options)))
    first.start()
    while not list(path.with_suffix(".parts").glob("00000-*.h5")):
        time.sleep(0.01)
    assert old[30]["label"] == 30  # it stays until the new one is finished
    found.append(build(samples(1000), path, 1, **options))
    first.join(30)
    for cached in found:
        assert list(cached) == list(map(samples(1000).__getitem__, range(SIZE)))
    assert len(names(path.parent)) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from helpers.numbered import Numbered

class Killed(Numbered):
    def __getitem__(self, index):
        # As the third rank reads it for itself, in the middle of its part.
        if index == 28 and os.environ["RANK"] == "2" and not os.path.exists("killed"):
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

Killed.__module__, Killed.__qualname__ = "helpers.numbered", "Numbered"
killed = Killed()
"""


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_torchrun_starts_again_when_a_rank_is_killed(expected, tmp_path):
    """Four ranks, one of which is killed with -9 while it builds; the result is the same."""
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
    assert (tmp_path / "killed").exists()
    assert "exitcode: -9" in done.stderr
    (line,) = done.stdout.splitlines()  # of four ranks one speaks
    assert line.startswith("a.h5: 41 samples, ")
    ours, theirs = (CachedDataset(folder / "a.h5") for folder in (tmp_path, expected))
    assert [bits(s) for s in ours] == [bits(s) for s in theirs]


def test_a_rank_goes_on_with_what_it_had(expected, path):
    dataset = Numbered()
    dataset.failing = frozenset([17])
    options = {"rows": 2, "wait": False}
    with pytest.raises(ValueError, match="no sample 17 today") as caught:
        build(dataset, path, 1, **options)
    assert any("sample 17 of Numbered" in note for note in caught.value.__notes__)
    assert any("6 of 10 samples are kept in" in note for note in caught.value.__notes__)
    for changed, rule in (
        (Numbered(shift=1), "unfinished build of something else; the contents of sample 0"),
        (Numbered(42), r"unfinished build of something else; .*length: 41 .* 42"),
    ):
        with pytest.raises(CacheError, match=rule):
            build(changed, path, 1, **options)
    seen = []
    build(Numbered(), path, 1, progress=seen.append, **options)
    assert (seen[0].samples_done, seen[0].samples) == (6, 10)
    for rank in (0, 2, 3):
        build(Numbered(), path, rank, **options)
    join(path)
    theirs = CachedDataset(expected / "a.h5")
    assert [bits(s) for s in CachedDataset(path)] == [bits(s) for s in theirs]


def test_samples_that_fail_have_the_numbers_of_the_dataset(path, tmp_path):
    dataset = Numbered()
    dataset.failing = frozenset([3, 20, 21, *range(30, 41)])
    cached = built(dataset, path, on_error="skip")
    told = [(index, f"ValueError: no sample {index} today") for index in sorted(dataset.failing)]
    assert cached.failed == told
    assert (len(cached), cached.index.samples) == (27, 41)
    assert [sample["label"] for sample in cached[18:22]] == [19, 22, 23, 24]
    assert CachedDataset(cached.shards[2]).failed == told[1:3]
    assert len(CachedDataset(cached.shards[3])) == 0  # all of its samples failed
    dataset.failing = frozenset(range(41))
    with pytest.raises(CacheError, match=r"none of the 41 samples could be read"):
        built(dataset, tmp_path / "b.h5", on_error="skip")


def test_more_ranks_than_samples(path, tmp_path):
    for rank in (1, 3):
        build(Numbered(3), path, rank, 5, wait=False, single_file=False)
    with pytest.raises(CacheError, match="no samples for rank 00000-of-00005"):
        build(Numbered(3), path, 0, 5, wait=False, single_file=False)
    for rank in (4, 0, 2):
        cached = build(Numbered(3), path, rank, 5, single_file=False)
    assert [sample["label"] for sample in cached] == [0, 1, 2]
    assert [len(CachedDataset(shard)) for shard in cached.shards] == [1, 1, 1]
    assert len(build(Numbered(0), tmp_path / "none.h5", 1, 2)) == 0


def test_a_rank_that_waits_says_for_whom(path, monkeypatch):
    monkeypatch.setattr(ranks_module, "_STALL_S", 0.2)
    monkeypatch.setattr(ranks_module, "_TELL_S", 0.05)
    build(Numbered(), path, 2, wait=False)
    failing = Numbered()
    failing.failing = frozenset([17])
    with pytest.raises(ValueError, match="no sample 17 today"):
        build(failing, path, 1, wait=False)
    seen = []

    def tell(progress):
        seen.append(progress)
        if caught and progress.waiting:  # it has warned: the others come at last
            for rank in (1, 3):
                build(Numbered(), path, rank, wait=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        assert len(build(Numbered(), path, 0, progress=tell)) == SIZE
    (warning,) = caught
    assert warning.category is CacheWarning
    assert f"{path} waits for samples 10 to 19, 30 to 40 of other ranks" in str(warning.message)
    ended = "other ranks: 1 (ended before this one began: ValueError: no sample 17 today), 3."
    assert ended in str(warning.message)
    waits = [one for one in seen if one.waiting]
    assert (waits[0].shards_left, waits[0].samples_done, waits[0].samples) == (2, 20, SIZE)


def in_another_process(dataset, path, **options):
    """Return a child that builds, and exits with 3 if it fails."""
    pid = os.fork()
    if pid:
        return pid
    try:
        precompute(dataset, path, num_workers=0, **options)
        os._exit(0)
    finally:
        os._exit(3)


class Late(Numbered):
    """Says when it is read, and gives its samples once there is a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __getitem__(self, index):
        self.file.with_name("begun").touch()
        while not self.file.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


def test_the_error_of_a_rank_is_that_of_those_that_wait_for_it(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    failing = Numbered()
    failing.failing = frozenset([3])
    assert os.waitpid(in_another_process(failing, path, shard=(0, 2)), 0)[1] == 3 << 8
    # An earlier start's is not: that rank may come again.
    ranks = [in_another_process(Numbered(), path, shard=(rank, 2)) for rank in (1, 0)]
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]

    path = tmp_path / "b.h5"  # whose ranks have left no error yet

    def tell(progress):
        if progress.waiting and not failed.exists():
            failed.touch()

    failed = tmp_path / "rank 1 waits"
    late = Late(failed)
    late.failing = frozenset([3])
    rank_0 = in_another_process(late, path, shard=(0, 2))
    with pytest.raises(CacheError, match=r"rank 0 of 2 ended.* no sample 3 today"):
        precompute(Numbered(), path, shard=(1, 2), num_workers=0, progress=tell)
    assert os.waitpid(rank_0, 0)[1] == 3 << 8


def test_a_late_rank_whose_parts_are_joined_begins_no_second_build(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    precompute(Late(tmp_path), path, shard=(1, 2), num_workers=0, wait=False)
    rank_1 = in_another_process(Late(path), path, shard=(1, 2))
    while not (tmp_path / "begun").exists():  # it has looked, and found no cache
        time.sleep(0.01)
    precompute(Late(tmp_path), path, shard=(0, 2), num_workers=0)
    assert os.waitpid(rank_1, 0)[1] == 0
    assert len(CachedDataset(path)) == SIZE


@pytest.mark.parametrize(
    "shard", [(4, 4), (-1, 4), (0, 0), (0,), [0, 4], (0.0, 4), (True, 4), "0/4", (0, 1 << 17)]
)
def test_a_shard_that_cannot_be(path, shard):
    with pytest.raises(OptionError, match=r"it must be None or \(rank, of\), such as \(3, 8\)"):
        precompute(Numbered(), path, shard=shard)


def test_ranks_cannot_begin_anew_one_by_one(path):
    """A rank could join what another one has made before and is about to make again."""
    with pytest.raises(OptionError, match=r"resume=False with shard=.* delete the folder"):
        build(Numbered(), path, 0, resume=False)


def test_a_build_takes_the_cores_and_the_memory_that_it_is_given():
    found, room = Findings(seconds=[1.0, 1.0], bytes=[10]), 64 << 30
    assert workers_for(found, 1000, cores=8, memory=room) == 8
    assert workers_for(found, 1000, cores=1, memory=room) == 0  # it reads by itself
    assert workers_for(found, 3, cores=8, memory=room) == 3
    assert workers_for(found, 1000, cores=8, memory=2 << 30) == 4


class Pictures(Made):
    """Images of one size, or of several, whose crops stay live, and more columns."""

    def __init__(self, *sizes):
        chain = [v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        super().__init__(None, 30, sizes=sizes, transform=v2.Compose(chain))

    def __getitem__(self, index):
        return {
            "image": self.transform(smooth(index, self.sizes[index % len(self.sizes)], 12)),
            "label": index, "even": index % 2 == 0, "name": f"no {index}",
            "half": torch.full((2,), index, dtype=torch.bfloat16),
        }  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("sizes", "stored"),
    [((10, 13), {}), ((10, 13), {"images": {"image": "png"}}), ((200,), {"compress": "zstd"})],
)
@pytest.mark.covering
def test_batches_of_a_joined_cache_are_those_of_one_file(path, sizes, stored, num_workers):
    dataset = Pictures(*sizes)
    cached = built(dataset, path, 2 if "compress" in stored else 4, **stored)
    options = {"sampler": [29, 0, 3, 3, 15, 14], "seed": 2, "num_workers": num_workers}
    ours = DataLoader(dataset, 4, backend=H5(path), **options)
    assert ("batches are made at once" in str(ours.explain())) == ("images" not in stored)
    assert_same(list(ours), list(DataLoader(dataset, 4, **options)))
    assert verify(path) == []
    if "compress" in stored:
        packed = [CachedDataset(shard).columns[0].packing is not None for shard in cached.shards]
        assert packed == [True, True]
        assert cached.readers[0].packed_bytes() is not None
        assert cached.readers[1].packed_bytes() is None
        assert main(["cache", "info", str(path)]) == 0


# The command line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "some_data.py").write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "from helpers.numbered import Numbered\nsamples = Numbered()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "some_data", raising=False)
    return tmp_path


def build_command(*words):
    return main(["cache", "build", "some_data.py:samples", "a.h5", "--workers", "0", *words])


def test_shards_that_are_built_apart_are_joined(folder, expected, capsys):
    for rank in range(4):
        assert build_command("--shard", f"{rank}/4", "--no-wait") == 0
        assert f"a.parts/000{rank}0.h5: 1" in capsys.readouterr().out
    assert main(["cache", "join", "a.h5"]) == 0
    assert "a.h5: 41 samples in 4 parts, " in capsys.readouterr().out
    assert_equal_to_the_bit(folder, expected)
    assert main(["cache", "info", "a.h5"]) == 0
    told = capsys.readouterr().out
    assert "in 4 parts:" in told
    assert "a.parts/00030.h5: 11 samples" in told
    capsys.readouterr()
    part = folder / "a.parts" / "00010.h5"
    spoil(part, part.stat().st_size // 2)
    assert main(["cache", "verify", "a.h5"]) == 1
    damaged, advice = capsys.readouterr().out.splitlines()
    assert damaged.startswith("a.parts/00010.h5: ")
    assert "delete a.parts/00010.h5 and build again" in advice
    part.unlink()
    assert main(["cache", "info", "a.h5"]) == 2
    assert "is missing" in capsys.readouterr().err
    assert build_command("--shard", "1/4", "--no-wait") == 0
    assert main(["cache", "join", "a.h5"]) == 0
    assert_equal_to_the_bit(folder, expected)


def test_the_rank_is_that_of_torchrun(folder, monkeypatch, capsys):
    for rank, world, files in (("1", "2", ["a.parts/00020.h5"]), ("0", "1", ["a.h5"])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        assert build_command(*(["--no-wait"] if world == "2" else [])) == 0
        assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.h5")) == files
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("", "2", "x"):
        monkeypatch.setenv("RANK", rank)
        assert build_command() == 2
        assert f"WORLD_SIZE=2 and RANK={rank!r} in the environment" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert build_command("--no-wait") == 2
    assert "--no-wait is for shards" in capsys.readouterr().err
    for text in ("3", "4/4", "a/4", "1/", "-1/4"):
        with pytest.raises(SystemExit):
            build_command(f"--shard={text}")
        assert "give RANK/OF, such as 3/8" in capsys.readouterr().err


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

    message = r"are needed for all ranks and .* are free in"
    with pytest.raises(CacheError, match=message):  # an eighth of it would fit
        begin(True)
    with pytest.raises(Fits):  # each rank may have a folder of its own
        begin(False)
    assert not path.exists()

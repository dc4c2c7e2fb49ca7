"""Several ranks build one cache: each its shard, whatever dies and is started again."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from backends.h5.batches import Batches, batches_of
from dataloaders.cache import BuildProgress, CachedDataset, join, precompute, verify
from dataloaders.cache.build import ranks as ranks_module
from dataloaders.cache.build.estimation import workers_for
from dataloaders.cache.build.findings import Findings
from dataloaders.cache.build.parts import parts_folder
from dataloaders.cli import main
from dataloaders.errors import CacheError, CacheWarning, OptionError
from dataloaders.transforms.draws import FreeDraws
from helpers.compare import assert_same, bits
from helpers.numbered import SIZE, Numbered
from helpers.processes import run_script

ROOT = Path(__file__).resolve().parent.parent


def built(dataset: Any, path: Path, of: int = 4, **options: Any) -> CachedDataset:
    """The cache that ``of`` ranks build one after the other, the last of which joins."""
    for rank in range(of):
        wait = rank == of - 1
        cached = precompute(
            dataset, path, shard=(rank, of), num_workers=0, wait=wait, single_file=False, **options
        )
    return cached


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in parts_folder(folder / "a.h5").iterdir())


PARTS = ["00000.h5", "00010.h5", "00020.h5", "00030.h5"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four ranks build of `Numbered`, when nothing happens to them."""
    folder = tmp_path_factory.mktemp("expected")
    built(Numbered(), folder / "a.h5")
    return folder


def assert_equal_to_the_bit(folder: Path, expected: Path) -> None:
    assert names(folder) == PARTS
    for name in ["a.h5", *(f"a.parts/{name}" for name in PARTS)]:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def test_the_joined_cache_is_the_dataset(expected: Path, tmp_path: Path) -> None:
    cached = CachedDataset(expected / "a.h5")
    assert names(expected) == PARTS
    assert [bits(sample) for sample in cached] == [
        bits(sample) for sample in map(Numbered().__getitem__, range(SIZE))
    ]
    one = precompute(Numbered(), tmp_path / "one.h5", num_workers=0)
    assert cached.index.fingerprint == one.index.fingerprint
    assert [(c.name, c.dtype, c.variants, c.shape) for c in cached.columns] == [
        (c.name, c.dtype, c.variants, c.shape) for c in one.columns
    ]
    shards = [CachedDataset(shard) for shard in cached.shards]
    assert [len(shard) for shard in shards] == [10, 10, 10, 11]
    assert [int(shard[0]["label"]) for shard in shards] == [0, 10, 20, 30]
    assert verify(expected / "a.h5") == []


def test_a_rank_reads_its_part_and_no_more_than_a_look_at_the_rest(tmp_path: Path) -> None:
    cached = precompute(
        Numbered(400, log=tmp_path / "log"), tmp_path / "a.h5", shard=(2, 4), num_workers=0,
        wait=False,
    )  # fmt: skip
    assert cached.path == tmp_path / "a.parts" / "00200.h5"
    assert [sample["label"] for sample in cached] == list(range(200, 300))
    reads = [int(line) for line in (tmp_path / "log").read_text().split()]
    assert len([index for index in reads if not 200 <= index < 300]) < 40
    assert not (tmp_path / "a.h5").exists()


def test_who_comes_later_only_opens_it(expected: Path, tmp_path: Path) -> None:
    shutil.copytree(expected, tmp_path / "copy")
    path = tmp_path / "copy" / "a.h5"
    before = {each: each.stat().st_mtime_ns for each in path.parent.iterdir()}
    for shard in ((1, 4), (0, 2), None):
        cached = precompute(Numbered(), path, shard=shard, num_workers=0)
        assert cached.path == path
        assert len(cached) == SIZE
    assert {each: each.stat().st_mtime_ns for each in path.parent.iterdir()} == before
    with pytest.raises(CacheError, match="was built from something else: length"):
        precompute(Numbered(SIZE + 1), path, shard=(1, 4), num_workers=0)
    with pytest.raises(CacheError, match="was built from something else: the contents of sample 0"):
        precompute(Numbered(shift=1), path, shard=(1, 4), num_workers=0, check="contents")


def test_a_missing_part_is_made_again_by_whoever_builds(expected: Path, tmp_path: Path) -> None:
    for number, shard in enumerate([None, (2, 4)]):
        folder = tmp_path / str(number)
        shutil.copytree(expected, folder)
        (folder / "a.parts" / "00020.h5").unlink()
        with pytest.raises(
            CacheError, match=r"shard a\.parts/00020\.h5 of the cache .* is missing"
        ):
            CachedDataset(folder / "a.h5")
        dataset = Numbered(log=tmp_path / f"log{number}")
        options: Any = {"shard": shard, "num_workers": 0, "single_file": False}
        assert len(precompute(dataset, folder / "a.h5", **options)) == SIZE
        reads = [int(line) for line in (tmp_path / f"log{number}").read_text().split()]
        assert {*range(20, 30)} <= set(reads)
        assert len(set(reads)) < SIZE
        assert_equal_to_the_bit(folder, expected)


class Unnoticed(Numbered):
    """Changes in samples that no build looks at before."""

    def __init__(self, added: int = 0) -> None:
        super().__init__()
        self.added = added

    def __getitem__(self, index: int) -> Any:
        looked_at = index in (0, 13, 27, 40)
        return {**super().__getitem__(index), "label": index + (0 if looked_at else self.added)}


def test_overwriting_ranks_join_no_part_of_an_earlier_build(tmp_path: Path) -> None:
    """A rank that is done before another one has begun; what changed, no look at samples shows."""

    path, found = tmp_path / "a.h5", list[CachedDataset]()
    old = built(Unnoticed(), path, of=2)
    options: Any = {"num_workers": 0, "overwrite": True, "single_file": False}
    first = threading.Thread(
        target=lambda: found.append(precompute(Unnoticed(1000), path, shard=(0, 2), **options))
    )
    first.start()
    while not list(parts_folder(path).glob("00000-*.h5")):
        time.sleep(0.01)
    assert old[30]["label"] == 30  # it stays until the new one is finished
    found.append(precompute(Unnoticed(1000), path, shard=(1, 2), **options))
    first.join(30)
    for cached in found:
        assert [int(sample["label"]) for sample in cached] == [
            Unnoticed(1000)[n]["label"] for n in range(SIZE)
        ]
    assert len(names(tmp_path)) == 2


def test_four_processes_at_once(expected: Path, tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        f"""
        import os, sys
        sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT)!r}]
        from helpers.numbered import Numbered
        from dataloaders.cache import precompute
        if __name__ == "__main__":
            pids = []
            for rank in range(4):
                pids.append(os.fork())
                if pids[-1] == 0:
                    seen = []
                    options = dict(num_workers=2 if rank == 3 else 0, progress=seen.append)
                    options.update(single_file=False)
                    cached = precompute(Numbered(), "a.h5", shard=(rank, 4), **options)
                    good = len(cached) == 41 and str(cached.path).endswith("/a.h5")
                    good = good and all(0 <= one.shards_left < 4 for one in seen)
                    waits = [one for one in seen if one.waiting]
                    good = good and all(one.samples == 41 for one in waits)
                    os._exit(0 if good else 3)
            print([os.waitpid(pid, 0)[1] for pid in pids])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0, 0, 0, 0]\n"
    assert_equal_to_the_bit(tmp_path, expected)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from helpers.numbered import Numbered

class Killed(Numbered):
    def __getitem__(self, index):
        # As the third rank reads it for itself, in the middle of its part.
        if index == 28 and os.environ["RANK"] == "2" and not os.path.exists("killed"):
            chunks = list(Path("a.parts").glob("0002*.h5"))
            Path("killed").write_text(str(len(chunks)))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

Killed.__module__, Killed.__qualname__ = "helpers.numbered", "Numbered"
killed = Killed()
"""


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_torchrun_starts_again_when_a_rank_is_killed(expected: Path, tmp_path: Path) -> None:
    """Four ranks, one of which is killed with -9 while it builds; the result is the same."""
    (tmp_path / "killed_data.py").write_text(KILLED.format(tests=str(ROOT / "tests")))
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"],
        *["--max-restarts", "3", "-m", "dataloaders", "cache", "build"],
        *["killed_data:killed", "a.h5", "--workers", "0"],
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    assert "exitcode: -9" in done.stderr
    (line,) = done.stdout.splitlines()  # of four ranks one speaks
    assert line.startswith("a.h5: 41 samples, ")
    cached = CachedDataset(tmp_path / "a.h5")
    assert [bits(s) for s in cached] == [bits(s) for s in CachedDataset(expected / "a.h5")]


def test_a_rank_goes_on_with_what_it_had(expected: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = Numbered(log=tmp_path / "log")
    dataset.failing = frozenset([17])
    options: dict[str, Any] = {"num_workers": 0, "shard": (1, 4), "rows": 2, "wait": False}
    with pytest.raises(ValueError, match="no sample 17 today") as caught:
        precompute(dataset, path, **options)
    assert any("sample 17 of Numbered" in note for note in caught.value.__notes__)
    assert any("6 of 10 samples are kept in" in note for note in caught.value.__notes__)
    changed = Numbered(shift=1)
    with pytest.raises(
        CacheError, match="unfinished build of something else; the contents of sample 0"
    ):
        precompute(changed, path, **options)
    with pytest.raises(CacheError, match=r"unfinished build of something else; .*length: 41 .* 42"):
        precompute(Numbered(42), path, **options)
    seen: list[BuildProgress] = []
    precompute(Numbered(), path, progress=seen.append, **options)
    assert (seen[0].samples_done, seen[0].samples) == (6, 10)
    for rank in (0, 2, 3):
        precompute(Numbered(), path, shard=(rank, 4), num_workers=0, rows=2, wait=False)
    join(path)
    assert [bits(s) for s in CachedDataset(path)] == [
        bits(s) for s in CachedDataset(expected / "a.h5")
    ]


def test_samples_that_fail_have_the_numbers_of_the_dataset(tmp_path: Path) -> None:
    dataset = Numbered()
    dataset.failing = frozenset([3, 20, 21, *range(30, 41)])
    path = tmp_path / "a.h5"
    cached = built(dataset, path, on_error="skip")
    told = [(index, f"ValueError: no sample {index} today") for index in sorted(dataset.failing)]
    assert cached.failed == told
    assert (len(cached), cached.index.samples) == (27, 41)
    assert [int(sample["label"]) for sample in cached[18:22]] == [19, 22, 23, 24]
    third = CachedDataset(cached.shards[2])
    assert third.failed == told[1:3]
    assert len(CachedDataset(cached.shards[3])) == 0  # all of its samples failed
    dataset.failing = frozenset(range(41))
    with pytest.raises(CacheError, match=r"none of the 41 samples could be read"):
        built(dataset, tmp_path / "b.h5", on_error="skip")


@pytest.mark.parametrize("compress", ["zstd", "gzip"])
def test_compressed_shards_are_read_each_by_its_own_codec(tmp_path: Path, compress: str) -> None:
    pytest.importorskip("hdf5plugin")
    dataset = Pictures((200,))  # a column of less than 64 KiB would not be compressed
    path = tmp_path / "a.h5"
    cached = built(dataset, path, 2, compress=compress)
    one = precompute(dataset, tmp_path / "one.h5", num_workers=0)
    packed = [CachedDataset(shard).columns[0].packing is not None for shard in cached.shards]
    assert len(cached) == 30
    assert verify(path) == []
    assert [bits(row) for row in map(cached.leaves, range(30))] == [
        bits(row) for row in map(one.leaves, range(30))
    ]
    batches, plain = batches_of(cached), batches_of(one)
    assert isinstance(batches, Batches)
    assert isinstance(plain, Batches)
    rows = np.random.default_rng(0).integers(0, 30, 40)
    assert_same(
        batches.of(rows, FreeDraws(len(rows), np.random.default_rng(1))),
        plain.of(rows, FreeDraws(len(rows), np.random.default_rng(1))),
    )
    assert packed == [True, True]
    assert cached.readers[0].packed_bytes() is not None
    assert cached.readers[1].packed_bytes() is None
    assert main(["cache", "info", str(path)]) == 0


def test_more_ranks_than_samples(tmp_path: Path) -> None:
    path, options = tmp_path / "a.h5", {"num_workers": 0, "single_file": False}
    for rank in (1, 3):
        precompute(Numbered(3), path, shard=(rank, 5), wait=False, **options)  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="no samples for rank 00000-of-00005"):
        precompute(Numbered(3), path, shard=(0, 5), wait=False, **options)  # type: ignore[arg-type]
    for rank in (4, 0, 2):
        cached = precompute(Numbered(3), path, shard=(rank, 5), **options)  # type: ignore[arg-type]
    assert [bits(sample) for sample in cached] == [bits(Numbered(3)[row]) for row in range(3)]
    assert [len(CachedDataset(shard)) for shard in cached.shards] == [1, 1, 1]
    assert len(precompute(Numbered(0), tmp_path / "none.h5", shard=(1, 2), num_workers=0)) == 0


def test_a_rank_that_waits_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_STALL_S", 0.2)
    monkeypatch.setattr(ranks_module, "_TELL_S", 0.05)
    path = tmp_path / "a.h5"
    precompute(Numbered(), path, shard=(2, 4), num_workers=0, wait=False)
    failing = Numbered()
    failing.failing = frozenset([17])
    with pytest.raises(ValueError, match="no sample 17 today"):
        precompute(failing, path, shard=(1, 4), num_workers=0, wait=False)
    seen: list[BuildProgress] = []

    def tell(progress: BuildProgress) -> None:
        seen.append(progress)
        if caught and progress.waiting:  # it has warned: the others come at last
            for rank in (1, 3):
                precompute(Numbered(), path, shard=(rank, 4), num_workers=0, wait=False)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        cached = precompute(Numbered(), path, shard=(0, 4), num_workers=0, progress=tell)
    assert len(cached) == SIZE
    (warning,) = caught
    assert warning.category is CacheWarning
    assert f"{path} waits for samples 10 to 19, 30 to 40 of other ranks" in str(warning.message)
    assert (
        "other ranks: 1 (ended before this one began: ValueError: no sample 17 today), 3 (never"
        in (str(warning.message))
    )
    waits = [one for one in seen if one.waiting]
    assert (waits[0].shards_left, waits[0].samples_done, waits[0].samples) == (2, 20, SIZE)


def in_another_process(dataset: Any, path: Path, **options: Any) -> int:
    """Build in a child, which exits with 3 if that fails; returns its number."""
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

    def __getitem__(self, index: int) -> Any:
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
    rank_0 = in_another_process(Numbered(), path, shard=(0, 2))
    assert len(precompute(Numbered(), path, shard=(1, 2), num_workers=0)) == SIZE
    assert os.waitpid(rank_0, 0)[1] == 0
    path.unlink()

    def tell(progress: BuildProgress) -> None:
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
def test_a_shard_that_cannot_be(tmp_path: Path, shard: Any) -> None:
    with pytest.raises(OptionError, match=r"it must be None or \(rank, of\), such as \(3, 8\)"):
        precompute(Numbered(), tmp_path / "a.h5", shard=shard)


def test_a_build_takes_the_cores_and_the_memory_that_it_is_given() -> None:
    found = Findings(seconds=[1.0, 1.0], bytes=[10])
    room = 64 << 30
    assert workers_for(found, 1000, cores=8, memory=room) == 8
    assert workers_for(found, 1000, cores=1, memory=room) == 0  # it reads by itself
    assert workers_for(found, 3, cores=8, memory=room) == 3
    assert workers_for(found, 1000, cores=8, memory=2 << 30) == 4


# Whole batches


class Pictures(Dataset[Any]):
    """Images of one size, or of several, whose crops stay live."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.transform = v2.Compose([v2.RandomCrop(8), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        size = self.sizes[index % len(self.sizes)]
        values = np.random.default_rng(index).integers(0, 256, (size, 12, 3), dtype=np.uint8)
        return {
            "image": self.transform(v2.functional.to_pil_image(values)),
            "label": index, "even": index % 2 == 0, "name": f"no {index}",
            "half": torch.full((2,), index, dtype=torch.bfloat16),
        }  # fmt: skip


@pytest.mark.parametrize("sizes", [(10,), (10, 13)])
def test_batches_of_a_joined_cache_are_those_of_one_file(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    dataset = Pictures(sizes)
    one = precompute(dataset, tmp_path / "one.h5", num_workers=0)
    cached = built(dataset, tmp_path / "a.h5", 4)
    ours, theirs = batches_of(cached), batches_of(one)
    assert isinstance(ours, Batches)
    assert isinstance(theirs, Batches)
    draw = np.random.default_rng(0)
    for count in (1, 7, 30, 64):
        rows = draw.integers(0, 30, count)
        batch = ours.of(rows, FreeDraws(len(rows), np.random.default_rng(count)))
        assert batch is not None
        assert_same(batch, theirs.of(rows, FreeDraws(len(rows), np.random.default_rng(count))))
        assert batch["label"].tolist() == rows.tolist()
        # As a spawned worker gets them: not as a copy of what is mapped.
        for made in (ours, theirs):
            sent = pickle.dumps(made)
            assert len(sent) < 5000
            assert_same(
                batch,
                pickle.loads(sent).of(rows, FreeDraws(len(rows), np.random.default_rng(count))),
            )


# The command line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "some_data.py").write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT / 'tests')!r}]\n"
        "from helpers.numbered import Numbered\nsamples = Numbered()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "some_data", raising=False)
    return tmp_path


def build_command(*words: str) -> int:
    return main(["cache", "build", "some_data.py:samples", "a.h5", "--workers", "0", *words])


def test_shards_that_are_built_apart_are_joined(
    folder: Path, expected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        assert build_command("--shard", f"{rank}/4", "--no-wait") == 0
        assert f"a.parts/000{rank}0.h5: 1" in capsys.readouterr().out
    assert main(["cache", "join", "a.h5"]) == 0
    assert "a.h5: 41 samples in 4 parts, " in capsys.readouterr().out
    assert_equal_to_the_bit(folder, expected)
    assert main(["cache", "verify", "a.h5"]) == 0
    assert capsys.readouterr().out == "a.h5 is whole\n"
    assert main(["cache", "info", "a.h5"]) == 0
    told = capsys.readouterr().out
    assert "in 4 parts:" in told
    assert "a.parts/00030.h5: 11 samples" in told
    data = bytearray((folder / "a.parts" / "00010.h5").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "a.parts" / "00010.h5").write_bytes(data)
    capsys.readouterr()
    assert main(["cache", "verify", "a.h5"]) == 1
    damaged, advice = capsys.readouterr().out.splitlines()
    assert damaged.startswith("a.parts/00010.h5: ")
    assert "delete a.parts/00010.h5 and build again" in advice
    (folder / "a.parts" / "00010.h5").unlink()
    assert main(["cache", "info", "a.h5"]) == 2
    assert "is missing" in capsys.readouterr().err
    assert build_command("--shard", "1/4", "--no-wait") == 0
    assert main(["cache", "join", "a.h5"]) == 0
    assert_equal_to_the_bit(folder, expected)


def test_the_rank_is_that_of_torchrun(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, world, names in (("1", "2", ["a.parts/00020.h5"]), ("0", "1", ["a.h5"])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        assert build_command(*(["--no-wait"] if world == "2" else [])) == 0
        assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.h5")) == names
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


def test_shards_are_listed_and_deleted_with_their_file(
    expected: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    shutil.copytree(expected, tmp_path / "h5")
    assert main(["cache", "list"]) == 0
    told = capsys.readouterr().out
    assert "41 samples in 4 parts of helpers.numbered.Numbered" in told
    assert main(["cache", "prune", "--unused", "0", "--yes"]) == 0
    assert {each.suffix for each in (tmp_path / "h5").iterdir()} == {".lock"}


def test_the_help_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    for words, texts in {
        ("build",): ["torchrun", "--shard RANK/OF", "--no-wait"],
        ("join",): ["--no-wait", "have to stay there"],
    }.items():
        with pytest.raises(SystemExit):
            main(["cache", *words, "--help"])
        told = textwrap.dedent(capsys.readouterr().out)
        assert all(text in told for text in texts)


class Filling(Dataset[Any]):
    """Rows of a mebibyte, of which all fill the disk twice."""

    def __init__(self, folder: Path) -> None:
        room = os.statvfs(folder)
        self.length = 2 * room.f_bavail * room.f_frsize // 2**20

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2**20, dtype=torch.uint8)


class Fits(Exception):
    """There is room: nothing needs to be built."""


def begin(dataset: Any, path: Path, shard: tuple[int, int], *, wait: bool) -> None:
    def announced(estimate: Any) -> None:
        raise Fits

    precompute(dataset, path, shard=shard, num_workers=0, wait=wait, announce=announced)


def test_room_for_all_ranks_that_write_on_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path, dataset = tmp_path / "a.h5", Filling(tmp_path)
    message = r"are needed, of which .*iB for 7 other ranks, and .* are free in"
    with pytest.raises(CacheError, match=message):  # an eighth of it would fit
        begin(dataset, path, (2, 8), wait=True)
    with pytest.raises(Fits):  # each machine may have a disk of its own
        begin(dataset, path, (2, 8), wait=False)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(Fits):  # three eighths
        begin(dataset, path, (2, 8), wait=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    with pytest.raises(CacheError, match="for 5 other ranks"):
        begin(dataset, path, (2, 8), wait=False)
    assert not path.exists()

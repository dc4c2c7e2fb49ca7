"""Building a cache: the same file however it is built, and a clear word where it cannot be."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dataloaders.cache import BuildProgress, CachedDataset, precompute, verify
from dataloaders.cache.build.builder import estimate
from dataloaders.cache.build.fingerprint import fingerprint
from dataloaders.cache.format.block import parts_folder
from dataloaders.errors import CacheError, OptionError
from helpers.processes import children, run_script, wait_until_gone

SIZE = 40


class Samples(Dataset[Any]):
    """Of every kind: fixed, variable, None, text; each reading is noted in a file if wanted."""

    def __init__(self, size: int = SIZE, *, log: Path | None = None, shift: int = 0) -> None:
        self.size = size
        self.log = log
        self.shift = shift

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        return self.sample(index)

    def sample(self, index: int) -> Any:
        values = np.random.default_rng(index + self.shift)
        return {
            "image": torch.from_numpy(values.integers(0, 256, (3, 8, 8), dtype=np.uint8)),
            "words": values.random(index % 5).astype(np.float32),
            "name": f"sample {index}",
            "extra": (index, None if index % 3 else "every third"),
        }

    def reads(self) -> list[int]:
        assert self.log is not None
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


class Shortage(Exception):
    """A failure of the user's own."""


class Failing(Samples):
    """Raises at some samples, as long as a file is there."""

    def __init__(self, flag: Path, at: tuple[int, ...], **options: Any) -> None:
        super().__init__(**options)
        self.flag = flag
        self.at = at

    def sample(self, index: int) -> Any:
        if index in self.at and self.flag.exists():
            raise Shortage(f"no sample {index} today")
        return super().sample(index)


class Random(Samples):
    """Draws from each of the process-wide generators."""

    def sample(self, index: int) -> Any:
        return {"a": torch.rand(3), "b": np.random.rand(2), "c": random.random(), "d": index}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of `Samples`, built at once in this process."""
    path = tmp_path_factory.mktemp("expected") / "a.h5"
    precompute(Samples(), path, num_workers=0)
    return path.read_bytes()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = children()
    yield
    assert wait_until_gone(list(children() - before)) == []


def interrupted(path: Path, tmp_path: Path, at: int, **options: Any) -> Failing:
    """A build in the middle: its samples before ``at`` are kept; and the dataset to go on with."""
    flag = tmp_path / "flag"
    flag.touch()
    dataset = Failing(flag, (at,), log=tmp_path / "log")
    with pytest.raises(Shortage):
        precompute(dataset, path, **{"num_workers": 0, "rows": 4, **options})
    flag.unlink()
    assert (tmp_path / "log").exists()
    (tmp_path / "log").unlink()
    return dataset


def kept(path: Path) -> list[int]:
    """The first sample of each part."""
    return sorted(int(part.stem) for part in parts_folder(path).glob("*.h5"))


def left(folder: Path) -> list[str]:
    """What is in the folder, but for lock files, which stay."""
    return sorted(file.name for file in folder.iterdir() if file.suffix != ".lock")


# The same file


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rows", [1, 7, 40, None])
def test_the_file_depends_on_neither_workers_nor_chunks(
    num_workers: int, rows: int | None, expected: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    cached = precompute(Samples(), path, num_workers=num_workers, rows=rows)
    assert path.read_bytes() == expected
    assert len(cached) == SIZE
    assert left(tmp_path) == ["a.h5"]


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
@pytest.mark.nightly
def test_nor_on_how_workers_start(context: str, expected: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    precompute(Samples(), path, num_workers=2, multiprocessing_context=context)
    assert path.read_bytes() == expected


def test_an_empty_dataset_and_one_sample(tmp_path: Path) -> None:
    assert len(precompute(Samples(0), tmp_path / "0.h5")) == 0
    assert len(precompute(Samples(0), tmp_path / "0.h5", num_workers=2, overwrite=True)) == 0
    one = precompute([torch.ones(2)], tmp_path / "1.h5", num_workers=2)
    assert torch.equal(one[0], torch.ones(2))


def test_a_file_that_is_there_is_opened_and_not_built(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = Samples(log=tmp_path / "log")
    first = precompute(dataset, path, num_workers=0)
    (tmp_path / "log").unlink()
    found = path.stat()
    again = precompute(dataset, path, num_workers=0)
    assert again.identity == first.identity
    assert path.stat().st_ino == found.st_ino
    assert len(set(dataset.reads())) < SIZE  # only those that the fingerprint needs
    precompute(dataset, path, num_workers=0, overwrite=True)
    assert path.stat().st_ino != found.st_ino
    assert set(dataset.reads()) == set(range(SIZE))


def test_a_link_stays_and_what_it_leads_to_is_built(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "a.h5").symlink_to(tmp_path / "disk" / "real.h5")
    precompute(Samples(3), tmp_path / "a.h5", num_workers=0)
    assert (tmp_path / "a.h5").is_symlink()
    assert (tmp_path / "disk" / "real.h5").is_file()


# Going on


def test_what_is_finished_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = interrupted(path, tmp_path, at=22)
    assert kept(path) == [0, 4, 8, 12, 16]
    precompute(dataset, path, num_workers=0)
    studied = {0, 13, 26, 39}
    again = [index for index in dataset.reads() if index < 20]
    assert set(range(20, 40)) <= set(dataset.reads())
    assert len(set(again)) < 20
    assert studied <= set(dataset.reads())


def test_resume_false_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = interrupted(path, tmp_path, at=22)
    precompute(dataset, path, num_workers=0, resume=False)
    assert set(dataset.reads()) == set(range(SIZE))


def damaged(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "removed":
        file.unlink()
        return
    if how == "truncated":
        del content[-5:]
    elif how == "a flipped bit":
        content[len(content) // 2] ^= 4
    elif how == "empty":
        content.clear()
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "a flipped bit", "removed", "empty"])
@pytest.mark.parametrize("first", [0, 32], ids=["oldest", "newest"])
def test_a_damaged_part_is_made_again(how: str, first: int, tmp_path: Path) -> None:
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    dataset = interrupted(path, tmp_path, at=37)
    assert kept(path) == list(range(0, 36, 4))
    damaged(parts_folder(path) / f"{first:05d}.h5", how)
    precompute(dataset, path, num_workers=0)
    assert {first + 1, first + 2} <= set(dataset.reads())
    assert len(set(range(36)) - set(dataset.reads())) > 10  # the others were not
    precompute(dataset, other, num_workers=0)
    assert path.read_bytes() == other.read_bytes()


def test_settings_that_cannot_be_read_lose_no_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = interrupted(path, tmp_path, at=22)
    (parts_folder(path) / "build.json").write_text("[" * 100_000)
    assert len(precompute(dataset, path, num_workers=0)) == SIZE
    assert len(set(dataset.reads())) < SIZE


def test_who_opens_an_unfinished_build_is_told_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = interrupted(path, tmp_path, 20)
    rule = r"no cache at .*a\.h5 yet: .*a\.parts holds the parts of a build; .* goes on"
    for open_it in (CachedDataset, verify):
        with pytest.raises(CacheError, match=rule):
            open_it(path)
    assert len(precompute(dataset, path, num_workers=0)) == SIZE


# What changed


def test_other_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = interrupted(path, tmp_path, at=22)
    with pytest.raises(CacheError, match="length: 40 when it was begun, 41 now") as caught:
        precompute(Failing(tmp_path / "flag", (), size=41), path, num_workers=0)
    assert "overwrite=True" in str(caught.value)
    with pytest.raises(CacheError, match="rows: 4 when it was begun, 5 now"):
        precompute(dataset, path, num_workers=0, rows=5)
    with pytest.raises(CacheError, match=r"dataset: .*Failing when it was begun, .*Samples now"):
        precompute(Samples(), path, num_workers=0)
    shifted = Failing(tmp_path / "flag", (), shift=1)
    with pytest.raises(CacheError, match="the contents of sample 0, 13, 26, 39"):
        precompute(shifted, path, num_workers=0)
    assert kept(path) == [0, 4, 8, 12, 16]  # and nothing was lost
    cached = precompute(shifted, path, num_workers=0, overwrite=True)
    assert torch.equal(cached[7]["image"], shifted[7]["image"])


def test_a_finished_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    precompute(Samples(), path, num_workers=0)
    with pytest.raises(CacheError, match=r"length: 40 when it was built, 39 now.*overwrite=True"):
        precompute(Samples(39), path, num_workers=0)
    assert len(precompute(Samples(39), path, num_workers=0, overwrite=True)) == 39


def test_overwriting_that_is_interrupted_leaves_the_old_file_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    old = precompute(Samples(7), path, num_workers=0)
    dataset = interrupted(path, tmp_path, at=22, overwrite=True)
    assert CachedDataset(path).identity == old.identity
    assert len(precompute(dataset, path, num_workers=0, overwrite=True)) == SIZE
    assert len(set(dataset.reads())) < SIZE


def test_fingerprints_are_plain_and_the_same_each_time() -> None:
    found = fingerprint(Samples())
    assert found == fingerprint(Samples())
    assert found["length"] == SIZE
    assert {"dataset", "head", "torch", "numpy", "PIL", "torchvision", "sample 0"} <= set(found)
    assert fingerprint(Samples(shift=1))["sample 0"] != found["sample 0"]
    drawn = fingerprint(Random())
    assert drawn == fingerprint(Random())


class Urandom(Samples):
    """Random in a way that no seed fixes."""

    def sample(self, index: int) -> Any:
        return os.urandom(8)


def test_a_fingerprint_of_what_no_seed_fixes_can_be_expected(tmp_path: Path) -> None:
    assert fingerprint(Urandom())["sample 0"] == "random"
    with pytest.raises(CacheError, match="Urandom is random"):
        precompute(Urandom(), tmp_path / "a.h5", num_workers=0)
    first = precompute(Urandom(), tmp_path / "a.h5", num_workers=0, allow_random=True)
    again = precompute(Urandom(), tmp_path / "a.h5", num_workers=0, allow_random=True)
    assert first[5] == again[5]


# Samples that fail


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_fails_raises_its_own_error_and_says_which(
    num_workers: int, tmp_path: Path
) -> None:
    path, flag = tmp_path / "a.h5", tmp_path / "flag"
    flag.touch()
    dataset = Failing(flag, (22,))
    with pytest.raises(Shortage, match=r"^no sample 22 today") as caught:
        precompute(dataset, path, num_workers=num_workers, rows=4)
    notes = "\n".join(caught.value.__notes__)
    assert "sample 22 of Failing" in notes
    assert 'on_error="skip"' in notes
    if num_workers == 0:
        assert f"20 of 40 samples are kept in {parts_folder(path)}; start it" in notes
    flag.unlink()
    assert len(precompute(dataset, path, num_workers=num_workers)) == SIZE


def test_the_first_sample_fails_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "flag").touch()
    for num_workers in (0, 2):
        with pytest.raises(Shortage, match="no sample 0 today"):
            precompute(Failing(tmp_path / "flag", (0,)), tmp_path / "a.h5", num_workers=num_workers)
    assert left(tmp_path) == ["flag"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skip_leaves_them_out_and_lists_them(num_workers: int, tmp_path: Path) -> None:
    (tmp_path / "flag").touch()
    dataset = Failing(tmp_path / "flag", (0, 3, 4, 5, 39))
    cached = precompute(
        dataset, tmp_path / "a.h5", num_workers=num_workers, rows=3, on_error="skip"
    )
    assert len(cached) == SIZE - 5
    assert cached.failed == [(i, f"Shortage: no sample {i} today") for i in (0, 3, 4, 5, 39)]
    assert [sample["extra"][0] for sample in cached][:4] == [1, 2, 6, 7]
    assert cached.index.samples == SIZE


def test_going_on_with_skip_after_an_error_and_back(tmp_path: Path) -> None:
    path, flag = tmp_path / "a.h5", tmp_path / "flag"
    flag.touch()
    dataset = Failing(flag, (22, 33))
    with pytest.raises(Shortage, match="22"):
        precompute(dataset, path, num_workers=0, rows=4)

    def stop(progress: BuildProgress) -> None:
        if progress.samples_done >= 28:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="28 of 40 samples are kept"):
        precompute(dataset, path, num_workers=0, on_error="skip", progress=stop)
    assert kept(path) == list(range(0, 28, 4))
    with pytest.raises(Shortage, match="22"):  # it was left out, and may not be any more
        precompute(dataset, path, num_workers=0)
    flag.unlink()
    assert precompute(dataset, path, num_workers=0).failed == []


def test_all_samples_failing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "flag").touch()
    with pytest.raises(CacheError, match=r"none of the 5 samples could be read.*no sample 0 today"):
        precompute(
            Failing(tmp_path / "flag", tuple(range(5)), size=5),
            tmp_path / "a.h5",
            num_workers=0,
            on_error="skip",
        )


class Unkeepable(Samples):
    def sample(self, index: int) -> Any:
        return index, object() if index == 22 else index


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_cannot_be_kept_is_named(num_workers: int, tmp_path: Path) -> None:
    rule = r"sample 22 cannot be kept: sample\[1\] is of type builtins.object"
    with pytest.raises(CacheError, match=rule):
        precompute(Unkeepable(), tmp_path / "a.h5", num_workers=num_workers)
    cached = precompute(
        Unkeepable(), tmp_path / "a.h5", num_workers=num_workers, on_error="skip", overwrite=True
    )
    assert [index for index, _ in cached.failed] == [22]


class Differing(Samples):
    def sample(self, index: int) -> Any:
        return {"a": index, "b": 1} if index == 22 else {"a": index}


@pytest.mark.parametrize("rows", [1, 40])
def test_samples_that_are_built_differently_are_named(rows: int, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"samples \d+ .*22 are built differently"):
        precompute(Differing(), tmp_path / "a.h5", num_workers=0, rows=rows)


class Unsendable(Samples):
    def sample(self, index: int) -> Any:
        class Local(Exception):
            pass

        if index == 22:
            raise Local("of a class that no other process knows")
        return index


def test_an_error_that_cannot_be_sent_is_told(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="Local: of a class that no other process knows"):
        precompute(Unsendable(), tmp_path / "a.h5", num_workers=2)


# Random samples


class Ends(Samples):
    """Raises what is no ordinary error, or cannot be shown, at a sample."""

    def __init__(self, error: type[BaseException], at: int = 20) -> None:
        super().__init__()
        self.error = error
        self.at = at

    def sample(self, index: int) -> Any:
        if index == self.at:
            raise self.error("enough")
        return super().sample(index)


class Dies(Samples):
    """Ends the worker that reads sample 20."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__()
        self.end = end

    def sample(self, index: int) -> Any:
        if index == 20 and get_worker_info() is not None:
            self.end()
        return super().sample(index)


class Unshowable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [StopIteration, SystemExit, GeneratorExit])
def test_what_ends_loops_and_programs_ends_a_build_with_its_sample(
    error: type[BaseException], num_workers: int, tmp_path: Path
) -> None:
    with pytest.raises(error, match="enough") as raised:
        precompute(Ends(error), tmp_path / "a.h5", num_workers=num_workers, rows=4)
    notes = raised.value.__notes__
    assert any("raised by sample 20 of Ends" in note for note in notes), notes
    assert any("of 40 samples are kept" in note for note in notes), notes
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("at", [0, SIZE - 1])
def test_what_the_study_reads_may_end_programs_too(
    at: int, num_workers: int, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="enough") as raised:
        precompute(Ends(SystemExit, at), tmp_path / "a.h5", num_workers=num_workers)
    assert any(f"raised by sample {at} of Ends" in note for note in raised.value.__notes__)


@pytest.mark.parametrize(
    "end",
    [
        lambda: os._exit(3),
        lambda: (faulthandler.disable(), signal.raise_signal(signal.SIGSEGV)),
    ],
    ids=["exit", "segv"],
)
def test_a_worker_that_dies_is_told_with_what_to_do(
    end: Callable[[], object], tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        precompute(Dies(end), tmp_path / "a.h5", num_workers=1, rows=4)
    notes = raised.value.__notes__
    assert any("num_workers=0 (--workers 0) shows where" in note for note in notes), notes
    assert any("samples are kept" in note for note in notes), notes


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_whose_text_cannot_be_shown_is_left_out_too(
    num_workers: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.h5"
    cached = precompute(Ends(Unshowable), path, num_workers=num_workers, on_error="skip")
    assert cached.failed == [(20, "Unshowable: (its text cannot be shown)")]


def test_a_random_dataset_is_refused_with_its_leaf(tmp_path: Path) -> None:
    for num_workers in (0, 2):
        with pytest.raises(
            CacheError,
            match=r"Random draws random numbers: .*sample 0 .*generators of torch, NumPy and "
            r"Python's random; sample 0 read twice differs in the values of 'a' "
            r"\(tensor:float32\).*allow_random=True",
        ):
            precompute(Random(), tmp_path / "a.h5", num_workers=num_workers)
    assert left(tmp_path) == []


def test_allow_random_keeps_one_draw_the_same_in_any_process(tmp_path: Path) -> None:
    contents = set()
    for number, (workers, rows) in enumerate([(0, 40), (2, 3), (1, 7)]):
        path = tmp_path / f"{number}.h5"
        cached = precompute(Random(), path, num_workers=workers, rows=rows, allow_random=True)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    assert len({cached[index]["c"] for index in range(SIZE)}) == SIZE


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_generators_are_as_they_were(num_workers: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    precompute(Random(), tmp_path / "a.h5", num_workers=num_workers, allow_random=True)
    precompute(Samples(), tmp_path / "b.h5", num_workers=num_workers)
    fingerprint(Random())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[union-attr]


class OwnGenerator(Samples):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def sample(self, index: int) -> Any:
        return torch.rand(2, generator=self.generator)


def test_a_generator_of_the_datasets_own_is_seen_and_put_back(tmp_path: Path) -> None:
    dataset = OwnGenerator()
    before = dataset.generator.get_state()
    with pytest.raises(CacheError, match="OwnGenerator is random"):
        precompute(dataset, tmp_path / "a.h5", num_workers=0)
    assert torch.equal(dataset.generator.get_state(), before)


# Options, estimates, progress


class Iterable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(3))


class Lengthless:
    def __getitem__(self, index: int) -> int:
        return index


def test_options_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for number in (-1, 1.5, True, "all"):
        with pytest.raises(OptionError, match=r'num_workers=.*"auto" or an int from 0 on'):
            precompute(Samples(), path, num_workers=number)  # type: ignore[arg-type]
    for rows in (0, "all"):
        with pytest.raises(OptionError, match=r"rows=.*samples in a part"):
            precompute(Samples(), path, rows=rows)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="on_error='ignore': it must be"):
        precompute(Samples(), path, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Iterable has no samples by index"):
        precompute(Iterable(), path)
    with pytest.raises(OptionError, match="Lengthless has no len"):
        precompute(Lengthless(), path)
    with pytest.raises(OptionError, match=r"Samples has no len\(\) \(.*>= 0\)"):
        precompute(Samples(-1), path)
    with pytest.raises(OptionError, match="set has no __getitem__"):
        precompute({1, 2}, path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CacheError, match=r"cannot be read \(Too many levels of symbolic"):
        precompute(Samples(), tmp_path / "loop")
    (tmp_path / "loop").unlink()
    with pytest.raises(CacheError, match=r"missing is not a folder.*create it"):
        precompute(Samples(), tmp_path / "missing" / "a.h5")
    with pytest.raises(CacheError, match=r"missing is not a folder.*create it"):
        estimate(Samples(), tmp_path / "missing" / "a.h5")
    assert left(tmp_path) == []


class Huge(Samples):
    def sample(self, index: int) -> Any:
        return torch.zeros(2**20, dtype=torch.uint8)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    rule = r"samples will take about 9\d\d.\d TiB.* more are needed and .* are free in"
    with pytest.raises(CacheError, match=rule):
        precompute(Huge(10**9), tmp_path / "a.h5", num_workers=0)
    assert left(tmp_path) == []


def test_an_estimate_says_what_it_will_take(tmp_path: Path) -> None:
    told = estimate(Huge(100), tmp_path / "a.h5", num_workers=2)
    assert told.samples == 100
    assert 100 * 2**20 <= told.bytes < 101 * 2**20
    assert told.disk_needed == 2 * told.bytes  # its parts are copied into one file
    large = estimate(Huge(1000), tmp_path / "a.h5", num_workers=0)
    assert large.disk_needed == large.bytes
    assert 80 < large.rows <= 96
    single = estimate(Huge(1000), tmp_path / "a.h5", num_workers=0, single_file=True)
    assert single.disk_needed == 2 * single.bytes
    assert told.disk_free > 0
    assert told.seconds > 0
    assert replace(told, samples=1) != told
    assert left(tmp_path) == []


def test_the_disk_takes_what_the_estimate_says(tmp_path: Path) -> None:
    """Also if a sample fails, or has another shape than all others."""
    done = run_script(
        tmp_path,
        """
        import os, sys
        from pathlib import Path
        import torch
        from dataloaders.cache import precompute

        class Large:
            what = ""

            def __len__(self):
                return 120

            def __getitem__(self, index):
                if self.what == "fails" and index == 1:
                    raise ValueError("broken")
                more = self.what == "is larger" and index == 100
                return torch.full((50_000 + more,), index % 100, dtype=torch.uint8)

        peak = 0

        def look(event, args):  # before a file is renamed or removed
            global peak
            if event in ("os.rename", "os.remove"):
                files = [path for path in Path(folder).rglob("*") if path.is_file()]
                peak = max(peak, sum(file.stat().st_size for file in files))

        sys.addaudithook(look)
        dataset, told = Large(), []
        options = {"rows": 40, "num_workers": 0, "on_error": "skip", "announce": told.append}
        for single_file in (False, True):
            for dataset.what in ("fails", "is larger"):
                folder, peak = f"{dataset.what} {single_file}", 0
                os.mkdir(folder)
                precompute(dataset, f"{folder}/a.h5", single_file=single_file, **options)
                print(peak / told[-1].disk_needed)
        """,
    )
    ratios = list(map(float, done.stdout.split()))
    assert len(ratios) == 4, done.stderr
    assert all(0.95 < ratio < 1.05 for ratio in ratios), ratios


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
def test_going_on_does_not_read_what_is_finished(tmp_path: Path) -> None:
    done = run_script(
        tmp_path,
        """
        from pathlib import Path
        import torch
        from dataloaders.cache import precompute

        class Large:
            fails = True

            def __len__(self):
                return 200

            def __getitem__(self, index):
                if self.fails and index == 190:
                    raise ValueError("broken")
                return torch.full((100_000,), index % 100, dtype=torch.uint8)

        def read():
            return int(Path("/proc/self/io").read_text().split()[1])

        dataset, options = Large(), {"rows": 10, "num_workers": 0, "single_file": False}
        try:
            precompute(dataset, "a.h5", **options)
        except ValueError:
            dataset.fails = False
        before = read()
        cached = precompute(dataset, "a.h5", **options)
        print(len(cached.shards), read() - before)
        """,
    )
    parts, size = map(int, done.stdout.split())
    assert parts == 20
    assert size < 4 << 20, "of 20 MB: the indexes, and its own part"


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    seen: list[BuildProgress] = []
    path = tmp_path / "a.h5"
    precompute(Samples(), path, num_workers=2, rows=5, progress=seen.append)
    computed = [one for one in seen if one.phase == "compute"]
    assert [one.samples_done for one in computed] == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert computed[0].samples_per_second is None
    assert computed[0].bytes_expected > 0
    assert computed[-1].samples_per_second is not None
    assert computed[-1].seconds_left == 0
    assert seen[-1].phase == "assemble"
    assert seen[-1].bytes_done == seen[-1].bytes_expected > 0
    assert not any(one.waiting for one in seen)
    assert {one.samples for one in seen} == {SIZE}


def test_what_progress_raises_ends_the_build_and_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"

    def stop(progress: BuildProgress) -> None:
        if progress.phase == "assemble":
            raise Shortage("enough")

    dataset = Samples(log=tmp_path / "log")
    with pytest.raises(Shortage, match="enough"):
        precompute(dataset, path, num_workers=2, rows=5, progress=stop)
    assert not path.exists()
    assert kept(path) == list(range(0, 40, 5))
    (tmp_path / "log").unlink()
    precompute(dataset, path, num_workers=2)
    assert len(set(dataset.reads())) < SIZE


# Processes, threads, memory


class OpensOnce(Samples):
    """Opens something at its first sample, which no other process may use."""

    owner = 0

    def sample(self, index: int) -> Any:
        self.owner = self.owner or os.getpid()
        assert self.owner == os.getpid()
        return index


def test_what_a_sample_opens_is_opened_in_each_worker(tmp_path: Path) -> None:
    dataset = OpensOnce()
    assert len(precompute(dataset, tmp_path / "a.h5", num_workers=2, rows=3)) == SIZE
    assert dataset.owner == 0


class Waits(Samples):
    """Once sample 0 is being read, 20 fails; 0 waits for ever."""

    def __init__(self, begun: Path) -> None:
        super().__init__()
        self.begun = begun

    def sample(self, index: int) -> Any:
        if get_worker_info() is not None and get_worker_info().num_workers == 2:
            if index == 1:
                self.begun.touch()
                threading.Event().wait()
            while index == 20 and not self.begun.exists():
                time.sleep(0.01)
            if index == 20:
                raise ValueError("enough")
        return index


def test_an_error_ends_other_parts_half_way(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough"):
        precompute(Waits(tmp_path / "begun"), tmp_path / "a.h5", num_workers=2, rows=20)


def test_two_threads_build_once(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    dataset = Samples(log=tmp_path / "log")
    found: list[CachedDataset] = []
    ready = threading.Barrier(2)

    def build() -> None:
        ready.wait()
        found.append(precompute(dataset, path, num_workers=0))

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(one) for one in found] == [SIZE, SIZE]
    assert found[0].identity == found[1].identity
    studied = set(range(SIZE)) - {n for n in range(SIZE) if dataset.reads().count(n) == 1}
    assert len(studied) < SIZE  # most were read once


@pytest.mark.nightly
def test_memory_is_bounded(tmp_path: Path) -> None:
    """400 MB of samples in one chunk, by a process that may take 200 MB more than it has."""
    done = run_script(
        tmp_path,
        """
        import resource
        import h5py, psutil, torch
        from dataloaders.cache import precompute

        class Large:
            def __len__(self):
                return 400

            def __getitem__(self, index):
                return torch.full((10**6 + index,), index % 100, dtype=torch.uint8)

        if __name__ == "__main__":
            data = psutil.Process().memory_info().data
            limit = data + 200 * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            cached = precompute(Large(), "a.h5", rows=400, num_workers=0)
            print(len(cached), int(cached[399].long().sum()) == 99 * (10**6 + 399))
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "400 True\n"

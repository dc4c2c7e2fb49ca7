"""Building a cache: the same file however it is built, and a clear word where it cannot be."""

import faulthandler
import os
import re
import resource
import shutil
import signal
import stat
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from filelock import FileLock
from torch.utils.data import get_worker_info

from dataloaders.cache import CachedDataset, Compressed, estimate, verify
from dataloaders.errors import OptionError
from helpers.cached import built, refused, spoil
from helpers.compare import assert_same
from helpers.datasets import CountingStream, Made, Numbered
from helpers.processes import children, is_true_in_a_fork, wait_until_gone

SIZE = 40
ALL = set(range(SIZE))


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    before = children()
    yield
    assert wait_until_gone(list(children() - before)) == []


def interrupted(path, at=22, **options):
    """The dataset of a build that ended at a sample, to go on with; its log is empty."""
    dataset = Numbered(SIZE, failing={at}, log=path.with_name("log"))
    refused(f"no sample {at} today", built, dataset, path, rows=4, error=ValueError, **options)
    dataset.failing = ()
    dataset.log.write_text("")
    return dataset


def kept(path):
    """The first sample of each part."""
    return sorted(int(part.stem) for part in path.with_suffix(".parts").glob("*.h5"))


def left(folder):
    return sorted(file.name for file in folder.iterdir() if file.suffix != ".lock")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return built(Numbered(SIZE), tmp_path_factory.mktemp("expected") / "a.h5").path.read_bytes()


@pytest.mark.parametrize(
    ("num_workers", "rows", "context"),
    [
        (0, 1, None),
        (2, 7, None),
        *(pytest.param(2, 9, how, marks=pytest.mark.nightly) for how in ("spawn", "forkserver")),
    ],
)
def test_the_file_depends_on_neither_workers_nor_chunks(num_workers, rows, context, expected, path):
    built(Numbered(SIZE), path, num_workers=num_workers, rows=rows, multiprocessing_context=context)
    assert path.read_bytes() == expected
    assert left(path.parent) == ["a.h5"]


# Going on


def test_what_is_finished_is_not_read_again(path):
    dataset = interrupted(path)
    assert kept(path) == [0, 4, 8, 12, 16]
    for look in (CachedDataset, verify):
        refused(r"no cache at .*a\.h5 yet: .*a\.parts holds the parts of a build;", look, path)
    path.write_bytes(b"of somebody else")
    refused("is no cache", built, dataset, path)
    assert path.read_bytes() == b"of somebody else"
    path.unlink()
    (path.with_suffix(".parts") / "build.json").write_text("[" * 100_000)  # as if there were none
    assert len(built(dataset, path)) == SIZE
    assert {0, 13, *range(20, 40)} <= set(dataset.reads()) < ALL
    assert len(set(range(20)) - set(dataset.reads())) > 8
    path.unlink()
    dataset = interrupted(path)
    built(dataset, path, resume=False)
    assert set(dataset.reads()) == ALL


def test_a_damaged_part_is_named_and_made_again(path, expected):
    dataset = interrupted(path, 37)
    part = path.with_suffix(".parts") / "00032.h5"
    spoil(part, part.stat().st_size // 2)
    refused(r"the part .*00032\.h5 is damaged: .*; delete it", built, dataset, path)
    part.unlink()
    built(dataset, path)
    assert path.read_bytes() == expected


def test_other_settings_are_named(path):
    interrupted(path)
    shifted = Numbered(SIZE, shift=1)
    for other, what in (
        (Numbered(41), "length: 40 when it was begun, 41 now.*overwrite=True"),
        (Made(int, SIZE), "dataset: .*Numbered when it was begun, .*Made now"),
        (shifted, "the contents of sample 0, 13, 26, 39"),
    ):
        refused(what, built, other, path)
    # A builder dies after the one that waits for it has looked how far it is.
    with FileLock(path.with_name(".a.h5.lock"), thread_local=False) as lock:
        rule = "holds an unfinished build of something else; the contents of sample 0"
        refused(rule, built, shifted, path, progress=lambda _: lock.release())
    assert kept(path) == [0, 4, 8, 12, 16]  # and nothing was lost
    assert torch.equal(built(shifted, path, overwrite=True)[7]["image"], shifted[7]["image"])
    rule = r"length: 40 when it was built, 39 now.*overwrite=True"
    refused(rule, built, Numbered(39), path)


def test_a_part_is_not_the_whole_and_a_missing_one_is_made_for_its_own_dataset_only(path):
    dataset = Numbered(SIZE, log=path.with_name("log"))
    built(dataset, path, rows=10, single_file=False)
    whole, part = path.read_bytes(), path.with_suffix(".parts") / "00010.h5"
    assert verify(part) == []
    shutil.copy(part, path)
    refused("it is a part, with 10 of 40 samples", built, dataset, path)
    (damage,) = verify(path)
    assert re.search("it is a part, with 10 of 40 samples, and no whole cache", damage.what)
    path.write_bytes(whole)
    part.unlink()
    for other, options, what in (
        (Numbered(39), {}, "length: 40 when it was begun, 39 now"),
        (Numbered(SIZE, shift=1), {}, "the contents of sample 0"),
        (dataset, {"compress": "gzip"}, "compress: none when it was begun, gzip, level 4"),
    ):
        rule = f"a.h5 lacks parts, and is of .*{what}.*overwrite"
        refused(rule, built, other, path, **options)
    dataset.log.unlink()
    built(dataset, path)
    assert path.read_bytes() == whole
    assert len(set(dataset.reads())) < 30


def test_parts_and_files_are_synced_before_they_have_their_names(path, monkeypatch):
    """By the calls of this process, as no power is cut here."""
    synced, renamed = {}, []

    def fsync(file, own=os.fsync):
        own(file)
        synced[os.fstat(file).st_ino] = os.fstat(file).st_mtime_ns

    def rename(source, target, own=os.rename):
        found = os.stat(source)
        if str(target).endswith(".h5"):
            assert synced.get(found.st_ino) == found.st_mtime_ns, f"{target} was not synced"
            assert str(target) == str(path) or os.stat(path.parent).st_ino in synced
            renamed.append(os.path.dirname(target))
        own(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    built(Numbered(SIZE), path, rows=20, single_file=False)
    assert len(renamed) == 3  # two parts and the file
    for folder in set(renamed):  # their names, too
        assert synced[os.stat(folder).st_ino]


def test_a_builder_that_another_one_overtakes_builds_nothing(path):
    """The other one finishes just when this one has seen that there is no file."""
    dataset, others = Numbered(SIZE, log=path.with_name("log")), []

    def look(event, args):
        if event == "open" and str(args[0]).endswith(".a.h5.lock") and not others:
            others.append("begun")  # hooks stay
            assert is_true_in_a_fork(lambda: len(built(Numbered(SIZE), path)) == SIZE)

    sys.addaudithook(look)
    assert len(built(dataset, path)) == SIZE
    assert not dataset.log.exists()


@pytest.mark.parametrize("single_file", [True, False])
def test_overwriting_takes_nothing_of_a_build_that_was_killed_when_it_had_finished(
    path, single_file
):
    parts, left = path.with_suffix(".parts"), path.with_suffix(".left")

    def look(progress):
        if progress.samples_done == SIZE:  # its parts and what it says of itself, to come back
            shutil.rmtree(left, ignore_errors=True)
            shutil.copytree(parts, left)

    options = {"rows": 4, "overwrite": True, "single_file": single_file}
    built(Made(lambda index: index, SIZE), path, progress=look, **options)
    shutil.copytree(left, parts, dirs_exist_ok=True)
    changed = Made(lambda index: -1 if index == 5 else index, SIZE)  # no look at a few shows it
    assert built(changed, path, progress=look, **options)[5] == -1
    shutil.copytree(left, parts, dirs_exist_ok=True)
    built(changed, path)  # it is removed, as are its parts
    assert len(list(parts.glob("*"))) == (0 if single_file else 10)


def test_overwriting_that_is_interrupted_leaves_the_old_file_and_goes_on(path):
    old = built(Numbered(7), path)
    dataset = interrupted(path, overwrite=True)
    assert CachedDataset(path).identity == old.identity
    assert len(built(dataset, path, overwrite=True)) == SIZE
    assert set(dataset.reads()) < ALL


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_fails_raises_its_own_error_and_says_which(num_workers, path):
    for at in (0, 22):
        assert not path.with_suffix(".parts").exists()
        options = {"num_workers": num_workers, "rows": 4, "error": ValueError}
        rule, dataset = rf"^no sample {at} today", Numbered(SIZE, failing={at})
        error = refused(rule, built, dataset, path, **options)
    notes = "\n".join(error.__notes__)
    assert "sample 22 of Numbered" in notes
    assert "on_error='skip' (--skip)" in notes
    if num_workers == 0:
        assert f"20 of 40 samples are kept in {path.with_suffix('.parts')}; start it" in notes


def test_going_on_with_skip_after_an_error_and_back(path):
    dataset = Numbered(SIZE, failing={22, 33})
    refused("22", built, dataset, path, rows=4, error=ValueError)

    def stop(progress):
        if progress.samples_done >= 28:
            raise KeyboardInterrupt

    options = {"rows": 4, "on_error": "skip", "progress": stop, "error": KeyboardInterrupt}
    refused("28 of 40 samples are kept", built, dataset, path, **options)
    assert kept(path) == list(range(0, 28, 4))
    refused("22", built, dataset, path, error=ValueError)  # it was left out, and may not be now
    assert built(Numbered(SIZE), path).failed == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_cannot_be_kept_is_named(num_workers, path):
    """It is the first one that is wrong: a later one cannot be read."""
    dataset = Made(lambda index: (index, object() if index == 22 else index), SIZE, failing={24})
    rule = r"sample 22 cannot be kept: sample\[1\] is of type builtins.object"
    refused(rule, built, dataset, path, num_workers=num_workers)
    cached = built(dataset, path, num_workers=num_workers, on_error="skip", overwrite=True)
    assert [index for index, _ in cached.failed] == [22, 24]


@pytest.mark.parametrize("rows", [1, 40])
def test_samples_that_are_built_differently_are_named(rows, path):
    samples = Made(lambda i: {"a": i, "b": 1} if i == 22 else {"a": i}, SIZE)
    refused(r"samples \d+ .*22 are built differently", built, samples, path, rows=rows)


@pytest.mark.parametrize(
    ("error", "at", "num_workers"),
    [(StopIteration, 20, 0), (SystemExit, 20, 1), (GeneratorExit, SIZE - 1, 0)],
)
def test_what_ends_loops_and_programs_ends_a_build_with_its_sample(error, at, num_workers, path):
    def sample(index):
        if index == at:
            raise error("enough")

    options = {"num_workers": num_workers, "rows": 4, "error": error}
    raised = refused("enough", built, Made(sample, SIZE), path, **options)
    assert any(f"raised by sample {at} of Made" in note for note in raised.__notes__)
    assert not path.exists()


def test_a_worker_that_dies_is_told_with_what_to_do(path):
    def sample(index):
        if index == 20 and get_worker_info() is not None:
            faulthandler.disable()
            signal.raise_signal(signal.SIGSEGV)

    options = {"num_workers": 1, "rows": 4, "error": RuntimeError}
    error = refused("DataLoader worker", built, Made(sample, SIZE), path, **options)
    for said in (r"num_workers=0 \(--workers\) shows where", "samples are kept"):
        assert re.search(said, "\n".join(error.__notes__))


def test_a_part_of_something_else_is_made_again(path, tmp_path):
    dataset, other = interrupted(path), tmp_path / "other.h5"
    built(Made(lambda index: "other", SIZE), other, rows=4, single_file=False)
    part = other.with_suffix(".parts") / "00020.h5"
    part.rename(path.with_suffix(".parts") / part.name)
    assert all(sample != "other" for sample in built(dataset, path, rows=4))


def test_what_no_seed_fixes(path):
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    for sample in (lambda index: torch.rand(2, generator=generator), lambda index: os.urandom(8)):
        refused("Made is random", built, Made(sample, SIZE, generator=generator), path)
    assert torch.equal(generator.get_state(), before)
    first, again = (built(Made(sample, SIZE), path, allow_random=True) for _ in range(2))
    assert first.index.fingerprint["sample 0"] == "random"
    assert again[5] == first[5]


# Options, estimates, progress


@pytest.mark.parametrize(
    ("dataset", "options", "rule"),
    [
        (Numbered(), {"num_workers": True}, r"num_workers=.*'auto' or an int from 0 on"),
        (Numbered(), {"rows": 0}, r"rows=.*samples in a part"),
        (Numbered(), {"shard": (4, 4)}, r"it must be None or \(rank, of\), such as \(3, 8\)"),
        (Numbered(), {"on_error": "ignore"}, "on_error='ignore' \\(--skip\\): it must be"),
        (CountingStream(), {}, "CountingStream has no samples by index"),
        (Numbered(-1), {}, r"Numbered has no len\(\) \(.*>= 0\)"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(dataset, options, rule, path):
    refused(rule, built, dataset, path, error=OptionError, **options)
    assert left(path.parent) == []


def large(size):
    return Made(lambda index: torch.zeros(2**19, dtype=torch.int16), size)


def test_an_estimate_says_what_it_will_take(path):
    told = estimate(large(100), path, num_workers=2)
    assert (told.samples, told.bytes >> 20) == (100, 100)
    assert told.disk_needed == 2 * told.bytes  # its parts are copied into one file
    assert min(told.disk_free, told.seconds) > 0
    parts, single = (
        estimate(large(10_000), path, num_workers=0, single_file=one) for one in (None, True)
    )
    assert (parts.disk_needed, single.disk_needed) == (parts.bytes, 2 * single.bytes)
    assert 80 < parts.rows <= 96
    rule = r"samples will take about 9\d\d.\d TiB.* more are needed and .* are free in"
    refused(rule, built, large(10**9), path)
    assert left(path.parent) == []


def test_there_are_no_more_parts_than_a_cache_may_have(path):
    def stop(told):
        raise LookupError(told.rows)

    refused("^2$", built, Numbered(65_537), path, rows=1, announce=stop, error=LookupError)


@pytest.mark.parametrize("compress", ["gzip", Compressed("zstd", 1)])
@pytest.mark.parametrize("kind", ["tokens", "noise", "masks"])
def test_the_estimate_is_what_compressed_columns_take(compress, kind, path):
    def sample(index):
        values = np.random.default_rng(index)
        if kind == "tokens":
            return values.integers(0, 3000, values.integers(400, 600), np.int64)
        if kind == "noise":
            return values.random(1000), index
        return np.kron(values.integers(0, 9, (32, 32), np.uint8), np.ones((4, 4), np.uint8))

    told = []
    built(Made(sample, 600), path, compress=compress, announce=told.append, single_file=False)
    assert 0.95 < told[0].disk_needed / path.stat().st_size < 1.05


@pytest.mark.parametrize("single_file", [True, False])
def test_the_disk_takes_what_the_estimate_says(path, single_file):
    """Also if a sample fails, or has another shape than all others."""
    peak, told = 0, []

    def look(progress):
        nonlocal peak
        files = [file.stat().st_size for file in path.parent.rglob("*") if file.is_file()]
        peak = max(peak, sum(files))

    dataset = Made(lambda n: np.full(50_000 + (n == 100), n % 100, np.uint8), 120, failing={1})
    options = {"rows": 40, "single_file": single_file, "announce": told.append}
    built(dataset, path, on_error="skip", progress=look, **options)
    assert 0.95 < peak / told[-1].disk_needed < 1.05


def test_paths_that_cannot_be(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.parts").symlink_to(tmp_path / "folder")
    for name, rule in (
        ("a.h5", "would hold the parts, and is a link or a file"),
        ("missing/a.h5", r"missing is not a folder.*create it"),
        (f"{'a' * 239}.h5", r"File name too long.*a shorter one"),  # files of a build have 14 more
        ("folder", "folder is a folder; give the path of a file"),
        ("pipe", "pipe is no plain file; give the path of a file"),
    ):
        refused(rule, built, Numbered(), tmp_path / name, overwrite=True)


def test_a_pipe_that_has_the_name_of_a_file_of_a_build_is_waited_for_by_no_build(path):
    folder, dataset = path.with_suffix(".parts"), Numbered(SIZE)
    folder.mkdir()
    for pipe in (folder / "00000.h5", path.with_name(".a.h5.lock")):
        os.mkfifo(pipe)
    for kind in (stat.S_IFIFO, stat.S_IFSOCK):
        os.mknod(folder / "build.json", kind | 0o600)
        refused(r"build\.json is no plain file; delete it", built, dataset, path)
        (folder / "build.json").unlink()
    assert len(built(dataset, path)) == SIZE


def test_caches_whose_names_differ_by_h5_share_neither_parts_nor_unfinished_files(path):
    others = path.with_name(f".{path.name}.12345678.tmp")  # what another process would write now
    sizes = {path: SIZE, path.with_suffix(""): SIZE - 1, path.with_name("a..h5"): SIZE - 2}
    for each, size in sizes.items():
        built(Numbered(size), each, rows=10, single_file=False)
        others.touch()
    for each, size in sizes.items():
        assert_same(list(CachedDataset(each)), [Numbered()[row] for row in range(size)])
    assert others.exists()


def test_progress_rises_to_the_end_and_what_it_raises_ends_the_build(path):
    seen, ends = [], 10  # as the parts begin to be copied

    def look(progress):
        seen.append(progress)
        if len(seen) == ends:
            raise LookupError("enough")

    options = {"num_workers": 2, "rows": 5, "progress": look}
    refused("enough", built, Numbered(SIZE), path, error=LookupError, **options)
    assert [one.samples_done for one in seen[:9]] == list(range(0, 41, 5))
    assert [one.phase for one in seen] == ["compute"] * 9 + ["assemble"]
    assert not path.exists()
    assert kept(path) == list(range(0, 40, 5))
    built(Numbered(SIZE), path, **options)
    assert seen[-1].bytes_done == seen[-1].bytes_expected > 0
    assert {(one.waiting, one.samples) for one in seen} == {(False, SIZE)}


# Processes, threads, memory


def test_an_error_ends_other_parts_half_way(path):
    begun = path.with_name("begun")

    def sample(index):  # once a worker reads sample 1 and waits for ever, 20 fails in another
        if get_worker_info() is not None and get_worker_info().num_workers == 2:
            if index == 1:
                begun.touch()
                threading.Event().wait()
            while index == 20 and not begun.exists():
                time.sleep(0.01)
            if index == 20:
                raise ValueError("enough")

    options = {"num_workers": 2, "rows": 20, "error": ValueError}
    refused("enough", built, Made(sample, SIZE), path, **options)


def test_who_does_not_wait_for_another_builder(path):
    seen = []
    with FileLock(path.with_name(".a.h5.lock"), thread_local=False) as lock:
        refused(r"being built by .* \(wait", built, Numbered(), path, wait=False)

        def look(progress):
            seen.append(progress)
            lock.release()

        built(Numbered(), path, progress=look)
    assert (seen[0].waiting, seen[0].samples, seen[1].samples) == (True, 0, 41)  # it has not said


@pytest.mark.nightly
def test_memory_is_bounded(path):
    """400 MB of samples in one chunk, by a process that may take 200 MB more than it has."""
    large = Made(lambda index: torch.full((10**6 + index,), index % 100, dtype=torch.uint8), 400)

    def is_built():
        limit = psutil.Process().memory_info().data + 200 * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        cached = built(large, path, rows=400)
        return len(cached) == 400 and torch.equal(cached[399], large[399])

    assert is_true_in_a_fork(is_built)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_disk_that_is_full_loses_nothing(num_workers, path):
    """While parts are written, then while they are copied: no file may become larger."""
    dataset = Made(lambda index: np.full(1000 * index, index, np.uint8), 60)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for most, finished in ((100_000, r"\d+"), (300_000, "60")):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
            options = {"rows": 4, "num_workers": num_workers}
            error = refused(r"File too large.*make room", built, dataset, path, **options)
            kept = rf"{finished} of 60 samples are kept in .*a\.parts; start it again"
            assert re.search(kept, "\n".join(error.__notes__))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(list(built(dataset, path)), list(dataset))
    assert (verify(path), left(path.parent)) == ([], ["a.h5"])

"""A finished cache opens at once: no process, no sample read, and what changed is named."""

import ast
import functools
import importlib.util
import multiprocessing
import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, merge, precompute, verify
from dataloaders.errors import CacheError, CacheWarning, OptionError
from helpers import datasets, warm
from helpers.cached import built, newer_pillow, refused
from helpers.compare import assert_same
from helpers.datasets import Made
from helpers.hostile import Whole
from helpers.pictures import Opened, noise
from helpers.processes import is_true_in_a_fork


class Pictures(Opened):
    """Images by a chain of transforms; reading one raises while ``gone`` is there."""

    size, shift = 12, 0

    def __init__(self, folder, **options):
        floats = v2.ToImage(), v2.ToDtype(torch.float32, scale=True)
        chain = v2.Compose([v2.CenterCrop(8), v2.RandomHorizontalFlip(), *floats])
        super().__init__(chain, gone=folder / "gone", **options)

    def picture(self, index):
        assert not self.gone.exists(), f"image {index} was moved away"
        return noise(9, 9, seed=index + self.shift)


@pytest.fixture
def path(tmp_path):
    """A finished cache whose raw images are gone."""
    built(Pictures(tmp_path), tmp_path / "a.h5")
    (tmp_path / "gone").touch()
    return tmp_path / "a.h5"


def first_batch(dataset, backend=None, **settings):
    torch.manual_seed(7)
    return next(iter(DataLoader(dataset, batch_size=12, backend=backend, seed=3, **settings)))


@pytest.mark.parametrize(("build", "num_workers"), [("if_missing", 1), ("never", 0)])
def test_batches_are_those_of_the_dataset_though_no_sample_can_be_read(
    path, tmp_path, build, num_workers
):
    (tmp_path / "gone").unlink()
    wanted = first_batch(Pictures(tmp_path))
    (tmp_path / "gone").touch()
    ours = first_batch(Pictures(tmp_path), H5(path, build=build), num_workers=num_workers)
    assert_same(ours, wanted)


def test_contents_are_compared_when_asked(path, tmp_path):
    shifted = Pictures(tmp_path, shift=1)
    refused(r"check='all'", precompute, shifted, path, check="all", error=OptionError)
    refused(r"H5\(check='all'\)", H5, check="all", error=OptionError)
    (tmp_path / "gone").unlink()
    precompute(shifted, path)  # as documented: contents are not compared
    rule = "the contents of sample 0, 4, 7, 11"
    refused(rule, precompute, shifted, path, check="contents")
    refused(rule, first_batch, shifted, H5(path, check="contents"))
    assert len(precompute(Pictures(tmp_path), path, check="contents")) == 12


class Labelled(Dataset):
    """Labels as ``kind`` keeps them; ``seen`` changes as they are read."""

    def __init__(self, kind, labels, folder="data"):
        self.kept = {
            "list": labels,
            "array": np.array(labels),
            "tensor": torch.tensor(labels, dtype=torch.bfloat16),
            "paths": [Path(folder, f"{label}.jpg") for label in labels],
            "table": [{"path": f"{folder}/a.jpg", "box": np.full(4, label)} for label in labels],
        }[kind]
        self.label = {"paths": lambda e: int(e.stem), "table": lambda e: e["box"][0]}.get(kind, int)
        self.seen = [None] * len(labels)

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, index):
        self.seen[index] = index
        return int(self.label(self.kept[index]))


@pytest.mark.parametrize("kind", ["list", "array", "tensor", "paths", "table"])
def test_labels_that_change_are_noticed_though_their_samples_are_not_read(
    tmp_path, cache_folder, kind
):
    before, path = [0] * 50, tmp_path / "a.h5"
    after = [*before[:40], 1, *before[41:]]
    for labels in (before, after, before):
        batch = next(iter(DataLoader(Labelled(kind, labels), 50, backend="h5")))
        assert batch.tolist() == labels
    assert len(list((cache_folder / "h5").glob("*.h5"))) == 2
    built(Labelled(kind, before), path, num_workers=0)
    with pytest.warns(CacheWarning, match="the values of kept in Labelled changed since"):
        assert precompute(Labelled(kind, after), path)[40] == 0
    refused("values of kept: ", precompute, Labelled(kind, after), path, check="contents")
    for check in (None, "contents"):  # a dataset may be moved
        assert len(precompute(Labelled(kind, before, "/mnt/data"), path, check=check)) == 50


def test_another_version_is_a_warning_and_an_error_if_expected(tmp_path, cache_folder, monkeypatch):
    path, dataset = tmp_path / "a.h5", Pictures(tmp_path)
    with newer_pillow(monkeypatch, tmp_path):
        built(dataset, path)
        first_batch(dataset, "h5")
    with pytest.warns(CacheWarning, match=r"PIL: 999\.0 when it was built"):
        first_batch(dataset, "h5")  # the same file
    dataset.gone.touch()
    with pytest.warns(CacheWarning, match=r"PIL: 999\.0 when it was built, .* now"):
        assert len(precompute(dataset, path)) == 12
    rule = r"PIL: 999\.0 when it was built, 11\.0 now; new: not known"
    expect = {"PIL": "11.0", "new": 1}
    refused(rule, precompute, dataset, path, expect=expect)
    refused(rule, first_batch, dataset, H5(path, expect=expect))
    dataset.gone.unlink()
    rule, path = r"expect=.*: .* built now would have {'PIL': '.*', 'new': None}", tmp_path / "b.h5"
    refused(rule, built, dataset, path, expect=expect)
    refused(rule, first_batch, dataset, H5(path, expect=expect))
    assert not path.exists()  # it says so before it builds


class Renamed(Pictures):
    """Another name, and a transform that is printed in another way."""

    def __init__(self, folder):
        super().__init__(folder)
        self.transform.transforms[0] = v2.CenterCrop(7)


def test_rows_of_what_only_has_another_text_are_read_if_that_is_accepted(path, tmp_path):
    rule, dataset = r"To read its rows as they are, pass expect=\{", Renamed(tmp_path)
    error = refused(rule, first_batch, dataset, H5(path))
    expect = ast.literal_eval(str(error).partition("pass expect=")[2])
    assert set(expect) == {"dataset", "head"}
    images, _ = first_batch(dataset, H5(path, expect=expect))
    assert (images.shape, images.dtype) == ((12, 3, 8, 8), torch.float32)
    assert len(precompute(dataset, path, expect=expect)) == 12
    path.write_bytes(Whole(path.read_bytes()).changed({"fingerprint.head": 5}))  # of a stranger
    assert len(precompute(Pictures(tmp_path), path, expect={"head": 5})) == 12
    rule, part = "length: 12 when it was built, 2 now", Subset(Pictures(tmp_path), [0, 1])
    assert "pass expect" not in str(refused(rule, precompute, part, path))


def test_another_subset_of_the_same_length_is_another_dataset(tmp_path):
    """As random_split gives it at the next start of a script."""
    path, dataset = tmp_path / "a.h5", Pictures(tmp_path)
    built(Subset(dataset, [0, 1, 2]), path)
    for other in ([3, 4, 5], torch.arange(1, 4), np.array([0, 2, 1])):
        rule = r"something else: indices: \w+ when it was built"
        refused(rule, first_batch, Subset(dataset, other), H5(path))
    assert len(precompute(Subset(dataset, torch.arange(3)), path)) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (v2.ToDtype(torch.float32, scale=True), v2.ToDtype(torch.float16, scale=True)),
        (v2.Pad(1, fill={torch.Tensor: 3}), v2.Pad(1, fill={torch.Tensor: 4})),
        [v1.LinearTransformation(torch.eye(243), mean)
         for mean in (torch.zeros(243), torch.arange(243.0) // 242)],
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:The transform `Convert:UserWarning")
def test_options_that_torchvision_does_not_print_are_compared(tmp_path, before, after):
    dataset = Pictures(tmp_path)
    for each in (before, after):
        dataset.transform = v2.Compose([v1.ToTensor(), each, v2.CenterCrop(8)])
        if each is before:
            built(dataset, tmp_path / "a.h5")
            assert len(precompute(dataset, tmp_path / "a.h5")) == 12
    refused(r"head: .* when it was built, .* now", precompute, dataset, tmp_path / "a.h5")


OPTIONS, LEFT_OUT = {"add": 0}, {40, 8}


@functools.lru_cache(maxsize=0)
def option(name):
    return OPTIONS[name]


class Files(Dataset):
    """Files of a folder, which holds the numbers of their names."""

    log, shift = Path("read.log"), 0

    def __init__(self, folder, names="abcdefgh", add=0):
        self.folder, self.names, self.add = folder, list(names), add

    def __len__(self):
        return len(self.names)

    @torch.no_grad()
    def __getitem__(self, index):
        with open(self.log, "a") as log:
            log.write(f"{index}\n")
        number = int((self.folder / self.names[index]).read_text())
        others = [option(name) for name in ("add",)] + [int(os.getenv("ADD", "0"))]
        assert index not in LEFT_OUT
        return number + self.add + self.shift + datasets.SIZE % 11 + sum(others)


class Others(Files):
    """The same, of another name."""


@pytest.fixture
def opened_before(tmp_path, monkeypatch, cache_folder):
    """Files whose cache stands in the user's cache folder; what a loader of a dataset gives.

    And how often it reads a sample.
    """
    monkeypatch.chdir(tmp_path)
    folder = Path("files")
    folder.mkdir()
    for number, name in enumerate("abcdefgh"):
        (folder / name).write_text(str(number))

    def opened(dataset, **options):
        Files.log.write_text("")
        (batch,) = DataLoader(dataset, batch_size=99, backend=H5(**options))
        return batch.tolist(), len(Files.log.read_text().split())

    assert opened(Files(folder))[1] > 8
    return folder, opened


def test_without_a_path_nothing_is_read_where_nothing_changed(opened_before, monkeypatch):
    folder, opened = opened_before
    rows = list(range(8))
    with monkeypatch.context() as alone:
        alone.setattr(multiprocessing.process.BaseProcess, "start", None)  # none can be started
        assert opened(Files(folder)) == (rows, 0)
    assert opened(Files(folder), check="contents")[1] > 0
    monkeypatch.setattr(sys.modules[__name__], "LEFT_OUT", {8, 40})  # in another order
    assert opened(Files(folder)) == (rows, 0)


def test_a_note_that_is_a_pipe_is_not_waited_for(opened_before):
    folder, opened = opened_before
    for note in (folder.parent / "cache" / "h5").glob("*.json"):
        note.unlink()
        os.mkfifo(note)
    refused(r"\.json is no plain file; delete it", opened, Files(folder))


def a_note_cut_short(folder, _):
    for note in (folder.parent / "cache" / "h5").glob("*.json"):
        note.write_text(note.read_text()[:-9])


def another_current_folder(folder, monkeypatch):
    shutil.copytree(folder, Path("other") / folder)
    monkeypatch.chdir("other")
    (folder / "a").write_text("9")


@pytest.mark.parametrize(
    ("change", "dataset", "rows"),
    [
        (None, lambda folder: Others(folder), range(8)),
        (None, lambda folder: Files(folder, add=10), range(10, 18)),
        (None, lambda folder: Files(folder, "bacdefgh"), [1, 0, *range(2, 8)]),
        (lambda folder, _: (folder / "h").write_text("70"), Files, [*range(7), 70]),
        (a_note_cut_short, Files, range(8)),
        (another_current_folder, Files, [9, *range(1, 8)]),
        (lambda _, patch: patch.setitem(OPTIONS, "add", 5), Files, range(5, 13)),
        (lambda _, patch: patch.setattr(datasets, "SIZE", 12), Files, range(1, 9)),
        (lambda _, patch: patch.setattr(Files, "shift", 30), Files, range(30, 38)),
        (lambda _, patch: patch.setenv("ADD", "40"), Files, range(40, 48)),
    ],
)
def test_without_a_path_what_changed_is_never_read_from_the_old_cache(
    opened_before, monkeypatch, change, dataset, rows
):
    folder, opened = opened_before
    if change is not None:
        change(folder, monkeypatch)
    found, read = opened(dataset(folder))
    assert found == list(rows)
    assert read > 0
    assert opened(dataset(folder)) == (list(rows), 0)


NUMBERS = """
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index) + ADD
"""


def test_without_a_path_a_class_is_that_of_its_file(tmp_path, monkeypatch, cache_folder):
    """Projects, and scripts, have classes of one name; no file of the other one has changed."""
    for add in (0, 10, 0):
        file = tmp_path / str(add) / "mine.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(NUMBERS.replace("ADD", str(add)))
        os.utime(file, (0, 1000))  # long before it runs: no other code was loaded
        spec = importlib.util.spec_from_file_location("mine", file)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine", module)
        spec.loader.exec_module(module)
        (batch,) = DataLoader(module.Numbers(), batch_size=8, backend="h5")
        assert batch.tolist() == [add + number for number in range(8)]


SCRIPT = f"""
import multiprocessing, sys
from backends.h5 import H5
from dataloaders import DataLoader

multiprocessing.set_start_method(sys.argv[1])
{NUMBERS}
print(next(iter(DataLoader(Numbers(), batch_size=8, backend=H5(*sys.argv[2:])))).tolist())
"""


@pytest.mark.parametrize("path", [pytest.param([], marks=pytest.mark.nightly), ["a.h5"]])
def test_a_script_without_a_main_guard_opens_it_under_forkserver(tmp_path, path):
    """Where no path says which cache it is, that of other code is not taken for it."""
    script, env = tmp_path / "script.py", {**os.environ, "DATALOADERS_CACHE": str(tmp_path)}

    def last_line(method):
        done = warm.run(["-W", "error", script, method, *path], cwd=tmp_path, env=env)
        return done.stdout.splitlines()[-1]

    for add in (0,) if path else (0, 10):
        script.write_text(SCRIPT.replace("ADD", str(add)))
        os.utime(script, (0, 1000 + add))  # long before it runs: no other code was loaded
        rows = str([add + number for number in range(8)])
        assert last_line("fork") == rows
    assert last_line("forkserver") == rows


def test_a_file_that_is_cut_short_under_a_reader(tmp_path):
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    fails = Made(lambda row: (np.arange(row % 2 + 4000), row), 30, failing={3})
    cached = built(fails, path, on_error="skip")
    whole = path.read_bytes()
    os.truncate(path, 4096)
    for read in (
        lambda: cached[28],
        lambda: cached.__getitems__([0, 28]),
        lambda: cached.failed,
        lambda: cached.column("1"),
    ):
        refused(r"a\.h5 was cut short while it was open: it had", read)
    cached.will_read(0, 29)  # advice: it raises nothing
    path.write_bytes(whole)  # somebody copied over it
    assert len(cached[20:]) == 9
    other.write_bytes(b"shorter")
    other.replace(path)  # another file of its name: the one that is open stays as it is
    assert len(cached[20:]) == 9
    other.write_bytes(whole)
    cached = CachedDataset(other)
    os.truncate(other, 4096)  # and then it is replaced by a whole file, or removed
    path.write_bytes(whole)
    path.replace(other)
    for _ in range(2):
        refused(r"b\.h5 was cut short while it was open", cached.__getitem__, 28)
        other.unlink(missing_ok=True)
    cached = built(list(range(9)), path, rows=1, single_file=False)
    assert [cached[row] for row in (0, 3)] == [0, 3]
    os.truncate(cached.shards[3], 4096)
    refused(rf"{cached.shards[3].name} was cut short while it was", cached.__getitem__, 3)
    assert cached[0] == 0


def test_a_cache_may_have_more_parts_than_a_process_may_open_files(tmp_path):
    def is_read():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        cached = built(list(range(70)), tmp_path / "a.h5", rows=1, single_file=False)
        merge(cached.path, tmp_path / "b.h5")
        merged = CachedDataset(tmp_path / "b.h5")
        return len(cached.shards) == 70 and cached[:] == merged[:] == list(range(70))

    def is_no_damage():
        """Return whether a part that may not be opened is an error, rather than to be deleted."""
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, 64))  # for the joined file
        with pytest.raises(CacheError, match=r"shard a.parts/.* opened: Too many open files"):
            verify(tmp_path / "a.h5")
        return True

    assert is_true_in_a_fork(
        lambda: is_read() and verify(tmp_path / "a.h5") == [] and is_no_damage()
    )


def test_a_user_without_a_home_is_told_what_to_set():
    """As in containers that are started under a number, which only root becomes here."""

    def is_told():
        for name in ("HOME", "XDG_CACHE_HOME", "DATALOADERS_CACHE"):
            os.environ.pop(name, None)
        if os.getuid() == 0:
            os.setuid(54321)
            rule = "no folder for caches is known, since this user has no home; set DATALOADERS_CA"
            refused(rule, list, DataLoader([1, 2], backend="h5"), error=OptionError)
        return len(DataLoader([1, 2], num_workers="auto")) == 2

    assert is_true_in_a_fork(is_told)

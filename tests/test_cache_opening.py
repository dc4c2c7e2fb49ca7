"""A finished cache opens at once: no process, no sample read, and what changed is named."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import precompute
from dataloaders.errors import CacheError, CacheWarning, OptionError
from helpers.processes import run_script


class Pictures(Dataset[Any]):
    """Images by a chain of transforms; reading one raises while ``gone`` is there."""

    def __init__(self, folder, shift=0):
        self.gone, self.shift = folder / "gone", shift
        floats = v2.ToDtype(torch.float32, scale=True)
        self.transform = v2.Compose(
            [v2.CenterCrop(8), v2.RandomHorizontalFlip(), v2.ToImage(), floats]
        )

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if self.gone.exists():
            raise FileNotFoundError(f"image {index} was moved away")
        values = np.random.default_rng(index + self.shift).integers(0, 256, (9, 9, 3), np.uint8)
        return self.transform(Image.fromarray(values)), index


@pytest.fixture
def path(tmp_path):
    """A finished cache whose raw images are gone."""
    precompute(Pictures(tmp_path), tmp_path / "a.h5", num_workers=0)
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
    cached = H5(path, build=build)
    images, labels = first_batch(Pictures(tmp_path), cached, num_workers=num_workers)
    assert torch.equal(images, wanted[0])
    assert torch.equal(labels, wanted[1])


def test_contents_are_compared_when_asked(path, tmp_path):
    with pytest.raises(OptionError, match=r"check='all'"):
        precompute(Pictures(tmp_path), path, check="all")
    with pytest.raises(OptionError, match=r"H5\(check='all'\)"):
        H5(check="all")
    (tmp_path / "gone").unlink()
    shifted = Pictures(tmp_path, shift=1)
    precompute(shifted, path)  # as documented: not looked at
    rule = "the contents of sample 0, 4, 7, 11"
    with pytest.raises(CacheError, match=rule):
        precompute(shifted, path, check="contents")
    with pytest.raises(CacheError, match=rule):
        first_batch(shifted, H5(path, check="contents"))
    assert len(precompute(Pictures(tmp_path), path, check="contents")) == 12


def test_another_version_is_a_warning_and_an_error_if_expected(tmp_path, monkeypatch):
    installed = tmp_path / "installed" / "pillow-999.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pillow\nVersion: 999.0\n")
    path, dataset = tmp_path / "a.h5", Pictures(tmp_path)
    with monkeypatch.context() as newer:
        newer.syspath_prepend(installed.parent)
        precompute(dataset, path, num_workers=0)
        monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "caches"))
        first_batch(dataset, "h5")
    with pytest.warns(CacheWarning, match=r"PIL: 999\.0 when it was built"):
        first_batch(dataset, "h5")  # the same file
    dataset.gone.touch()
    with pytest.warns(CacheWarning, match=r"PIL: 999\.0 when it was built, .* now"):
        assert len(precompute(dataset, path)) == 12
    rule = r"PIL: 999\.0 when it was built, 11\.0 now"
    with pytest.raises(CacheError, match=rule):
        precompute(dataset, path, expect={"PIL": "11.0"})
    with pytest.raises(CacheError, match=rule):
        first_batch(dataset, H5(path, expect={"PIL": "11.0"}))


def test_a_script_without_a_main_guard_opens_it_under_forkserver(tmp_path):
    done = run_script(
        tmp_path,
        """
        import multiprocessing, sys, torch
        from backends.h5 import H5
        from dataloaders import DataLoader
        from dataloaders.cache import precompute

        multiprocessing.set_start_method("forkserver")

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                return torch.tensor(index)

        precompute(Numbers(), "a.h5", num_workers=0)
        loader = DataLoader(Numbers(), batch_size=8, backend=H5("a.h5", build="never"))
        print(next(iter(loader)).tolist())
        """,
    )
    assert done.stdout.strip() == str(list(range(8))), done.stderr


def test_a_file_that_is_cut_short_under_a_reader(tmp_path):
    path = tmp_path / "a.h5"
    cached = precompute([np.arange(4000)] * 30, path, num_workers=0)
    whole = path.read_bytes()
    os.truncate(path, len(whole) // 2)
    for read in (cached.__getitem__, lambda row: cached.__getitems__([0, row])):
        with pytest.raises(CacheError, match=r"a\.h5 was cut short while it was open: it has"):
            read(29)
    path.write_bytes(whole)  # somebody copied over it
    assert len(cached[20:]) == 10
    other = tmp_path / "b.h5"
    other.write_bytes(b"shorter")
    other.replace(path)  # another file of its name: the one that is open stays as it is
    assert len(cached[20:]) == 10
    cached = precompute(
        list(range(9)), path, num_workers=0, rows=1, single_file=False, overwrite=True
    )
    assert [cached[row] for row in (0, 3)] == [0, 3]
    os.truncate(cached.shards[3], 4096)
    with pytest.raises(CacheError, match=rf"{cached.shards[3].name} was cut short while it was"):
        cached[3]
    assert cached[0] == 0


def test_a_cache_may_have_more_parts_than_a_process_may_open_files(tmp_path):
    done = run_script(
        tmp_path,
        """
        import resource
        from dataloaders.cache import CachedDataset, merge, precompute, verify

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        cached = precompute(list(range(70)), "a.h5", num_workers=0, rows=1, single_file=False)
        print(len(cached.shards), sum(cached[:]), verify("a.h5"))
        merge("a.h5", "b.h5")
        print(sum(CachedDataset("b.h5")[:]))
        """,
    )
    assert done.stdout.split() == ["70", "2415", "[]", "2415"], done.stderr

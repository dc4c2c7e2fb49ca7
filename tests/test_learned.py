"""What tuning learned, on disk: found again, never wrong, never in the way."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, Subset

from dataloaders.tuning import learned
from dataloaders.tuning.learned import Learned

CHOICE = Learned(3, 2, False, 812.5, batch_bytes=4096, memory_per_worker=2**20)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Photos(Dataset[int]):
    def __init__(self, root="photos", size=10, transform=None):
        self.root, self.size, self.transform = root, size, transform

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Resize:
    def __init__(self, size):
        self.size = size

    def __repr__(self):
        return f"Resize({self.size})"


def key_of(dataset, batch_size=4, sampler=None, f=None):
    return learned.key_of(dataset, batch_size, sampler, f)


def stack(samples):
    return torch.tensor(samples)


class TestOnDisk:
    def test_what_was_remembered_is_recalled(self):
        key = key_of(Photos())
        assert learned.recall(key) is None
        path = learned.remember(key, CHOICE)
        assert path is not None
        assert learned.recall(key) == CHOICE

    def test_the_last_one_wins_and_nothing_else_is_left(self, cache):
        key = key_of(Photos())
        learned.remember(key, CHOICE)
        later = Learned(0, None, True, 1.0)
        path = learned.remember(key, later)
        assert learned.recall(key) == later
        assert list((cache / "tuned").iterdir()) == [path]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda entry: "",
            lambda entry: "{",
            lambda entry: "[" * 100_000,
            lambda entry: "null",
            lambda entry: "x" * 200_000,
            lambda entry: json.dumps({**entry, "version": 2}),
            lambda entry: json.dumps({**entry, "key": {}}),
            lambda entry: json.dumps({**entry, "learned": {}}),
            lambda entry: json.dumps({**entry, "learned": {**entry["learned"], "surplus": 1}}),
            *(
                lambda entry, name=name, value=value: json.dumps(
                    {**entry, "learned": {**entry["learned"], name: value}}
                )
                for name, value in [
                    ("num_workers", -1),
                    ("num_workers", "4"),
                    ("num_workers", True),
                    ("num_workers", 0),
                    ("prefetch_factor", None),
                    ("prefetch_factor", 0),
                    ("prefetch_factor", 1.5),
                    ("pin_memory", 1),
                    ("batch_bytes", -5),
                    ("memory_per_worker", "much"),
                ]
            ),
        ],
    )
    def test_a_damaged_file_is_as_good_as_none(self, damage):
        key = key_of(Photos())
        path = learned.remember(key, CHOICE)
        assert path is not None
        path.write_text(damage(json.loads(path.read_text())))
        assert learned.recall(key) is None
        assert learned.remember(key, CHOICE) == path
        assert learned.recall(key) == CHOICE

    def test_a_file_that_is_no_text_is_as_good_as_none(self):
        key = key_of(Photos())
        path = learned.remember(key, CHOICE)
        assert path is not None
        path.write_bytes(b"\xff\xfe\x00")
        assert learned.recall(key) is None

    def test_a_cache_that_cannot_be_written_is_told_by_none(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "file"))
        assert learned.remember(key_of(Photos()), CHOICE) is None
        assert learned.recall(key_of(Photos())) is None

    def test_readers_never_see_half_a_file(self):
        key = key_of(Photos())
        learned.remember(key, CHOICE)
        writer = multiprocessing.get_context("fork").Process(target=_write_often, args=(key,))
        writer.start()
        while writer.is_alive():
            assert learned.recall(key) is not None
        writer.join()
        assert writer.exitcode == 0

    def test_the_folder_follows_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.delenv("DATALOADERS_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert learned.cache_folder() == tmp_path / "xdg" / "gpu-dataloaders"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert learned.cache_folder() == tmp_path / ".cache" / "gpu-dataloaders"


def _write_often(key):
    for number in range(300):
        learned.remember(key, Learned(number, 2, False, 1.0) if number else CHOICE)


class TestKey:
    def test_it_is_stable_and_shows_no_path_and_no_address(self):
        one = key_of(Photos("some/where", transform=object()))
        two = key_of(Photos(os.path.abspath("some/where"), transform=object()))
        assert one == two
        assert "some" not in str(one)

    @pytest.mark.parametrize(
        "other",
        [
            key_of(Photos("elsewhere")),
            key_of(Photos(size=11)),
            key_of(Photos(transform=Resize(32))),
            key_of(Photos(), batch_size=8),
            key_of(Photos(), batch_size=None),
            key_of(Photos(), f=stack),
            key_of(Subset(Photos(), range(10))),
            key_of(list(range(10))),
        ],
    )
    def test_what_differs_is_told_apart(self, other):
        assert key_of(Photos()) != other

    def test_a_subset_is_known_by_what_it_is_of(self):
        small, large = (key_of(Subset(Photos(transform=Resize(n)), range(5))) for n in (32, 224))
        assert small != large

    @pytest.mark.parametrize("batch_size", [4, None])
    @pytest.mark.parametrize("collate", [None, stack])
    def test_arguments_and_attributes_give_the_same_key(self, batch_size, collate):
        dataset = Photos()
        loader = DataLoader(dataset, batch_size, shuffle=True, collate_fn=collate)
        from_loader = learned.key_of(
            loader.dataset, loader.batch_size, loader.batch_sampler, loader.collate_fn
        )
        assert from_loader == key_of(dataset, batch_size, None, collate)

    def test_a_batch_sampler_of_the_users_gives_the_same_key_both_ways(self):
        dataset = Photos()
        sampler = BatchSampler(SequentialSampler(dataset), 3, False)
        loader = DataLoader(dataset, batch_sampler=sampler)
        from_loader = learned.key_of(
            loader.dataset, loader.batch_size, loader.batch_sampler, loader.collate_fn
        )
        assert from_loader == key_of(dataset, None, sampler)

    def test_a_dataset_that_raises_at_everything_has_a_key(self):
        class Hostile:
            def __getattr__(self, name):
                raise RuntimeError(name)

            def __len__(self):
                raise ValueError("no length")

        assert "Hostile" in key_of(Hostile()).dataset

    def test_a_dataset_of_itself_ends(self):
        dataset = Photos()
        vars(dataset)["dataset"] = vars(Photos())["dataset"] = dataset
        vars(dataset)["datasets"] = [dataset]
        assert "Photos" in key_of(dataset).dataset

    @given(root=st.text(min_size=1).filter(lambda text: "\0" not in text))
    def test_any_path_can_be_hashed_and_stored(self, root):
        key = key_of(Photos(root))
        assert learned.remember(key, CHOICE) is not None
        assert learned.recall(key) == CHOICE

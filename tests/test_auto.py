"""What "auto" becomes: plain values, at once, from what was learned or from the machine."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from dataloaders import DataLoader
from dataloaders.errors import CapacityWarning
from dataloaders.machine import resources
from dataloaders.tuning import auto, learned
from dataloaders.tuning.learned import Learned

NO_CUDA = torch.cuda.device_count() == 0


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


class Files(Dataset[torch.Tensor]):
    loaded = 0

    def __init__(self, size=1000):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded += 1
        return torch.zeros(3)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        return iter(torch.zeros(8, 3))


def settings(loader):
    return loader.num_workers, loader.prefetch_factor, loader.pin_memory


def resolved(dataset, **arguments):
    given = {
        "batch_size": 4,
        "num_workers": "auto",
        "prefetch_factor": "auto",
        "pin_memory": "auto",
        "needs_workers": False,
    }
    return auto.resolve(dataset, **(given | arguments))


def learn(dataset, choice, batch_size=4):
    assert learned.remember(learned.key_of(dataset, batch_size, None, None), choice) is not None


class TestRule:
    def test_attributes_are_plain_and_no_sample_is_loaded(self):
        files = Files()
        loader = DataLoader(files, 4, num_workers="auto", prefetch_factor="auto", pin_memory="auto")
        assert type(loader.num_workers) is int
        assert type(loader.pin_memory) is bool
        assert loader.num_workers > 0
        assert loader.prefetch_factor == 2
        assert loader.pin_memory is not NO_CUDA
        assert files.loaded == 0

    @pytest.mark.parametrize(("cores", "workers"), [(1, 1), (6, 6), (64, 16)])
    def test_one_worker_a_core_and_no_more_than_16(self, cores, workers, monkeypatch):
        monkeypatch.setattr(resources, "usable_cores", lambda: cores)
        monkeypatch.setattr(resources, "available_memory", lambda: 2**40)
        monkeypatch.setattr(resources, "shm_room", lambda path=None: None)
        assert resolved(Files())[0] == workers

    @pytest.mark.parametrize(
        "dataset",
        [
            TensorDataset(torch.zeros(100, 3)),
            Subset(TensorDataset(torch.zeros(100, 3)), range(50)),
            ConcatDataset([TensorDataset(torch.zeros(9)), TensorDataset(torch.zeros(9))]),
        ],
    )
    def test_tensors_in_memory_get_no_workers(self, dataset):
        assert auto.in_memory(dataset)
        assert resolved(dataset) == (0, None, False)

    def test_a_subclass_with_a_getitem_of_its_own_is_not_known_to_be_in_memory(self):
        class Augmented(TensorDataset):
            def __getitem__(self, index):
                return super().__getitem__(index)[0] + torch.rand(1)

        for dataset in (Augmented(torch.zeros(99)), Subset(Augmented(torch.zeros(99)), range(99))):
            assert not auto.in_memory(dataset)
            assert resolved(dataset)[0] > 0

    def test_no_more_workers_than_batches(self):
        assert resolved(Files(4))[0] == 1
        assert resolved(Files(0))[0] == 0

    def test_an_iterable_dataset_gets_one_since_more_may_repeat_samples(self):
        assert resolved(Stream())[0] == 1

    def test_ranks_on_one_machine_share_its_cores(self, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(resources.usable_cores()))
        assert resolved(Files())[0] == 1
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
        assert resolved(Files())[0] == min(resources.usable_cores(), 16)

    @pytest.mark.parametrize(
        "arguments", [{"persistent_workers": True}, {"timeout": 5.0}, {"prefetch_factor": 3}]
    )
    def test_at_least_one_where_another_argument_needs_workers(self, arguments):
        dataset = TensorDataset(torch.zeros(100, 3))
        assert DataLoader(dataset, num_workers="auto", **arguments).num_workers == 1

    def test_what_is_given_stays_as_it_is(self):
        assert settings(DataLoader(Files(), num_workers=0, prefetch_factor="auto"))[:2] == (0, None)
        assert settings(DataLoader(Files(), num_workers=1, prefetch_factor="auto"))[:2] == (1, 2)
        assert settings(DataLoader(Files(), num_workers="auto", prefetch_factor=5))[1] == 5

    @pytest.mark.skipif(not NO_CUDA, reason="there is a CUDA device here")
    def test_nothing_is_pinned_without_cuda(self):
        learn(Files(), Learned(1, 2, True, 1.0))
        assert resolved(Files())[2] is False

    @pytest.mark.parametrize("size", [-1, "long", 2**80, 1.5, None])
    def test_an_odd_length_is_survived(self, size):
        assert resolved(Files(size))[0] >= 0

    def test_a_dataset_that_raises_at_everything_is_survived(self):
        class Hostile:
            def __getattr__(self, name):
                raise RuntimeError(name)

        assert resolved(Hostile())[0] >= 1

    @pytest.mark.parametrize("wrong", [-1, "many"])
    def test_what_is_wrong_is_left_for_torch_to_say(self, wrong):
        with pytest.raises((ValueError, TypeError)):
            DataLoader(Files(), num_workers=wrong, pin_memory="auto", prefetch_factor="auto")

    @given(
        size=st.integers(0, 10**9),
        batch_size=st.none() | st.integers(1, 64),
        needs=st.booleans(),
        prefetch=st.just("auto") | st.none() | st.integers(1, 8),
    )
    def test_it_is_always_what_torch_accepts(self, size, batch_size, needs, prefetch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CapacityWarning)
            count, depth, pinned = resolved(
                Files(size), batch_size=batch_size, needs_workers=needs, prefetch_factor=prefetch
            )
        assert int(needs) <= count <= max(1, resources.usable_cores())
        assert count > 0 or depth is None
        assert isinstance(pinned, bool)


class TestLearned:
    def test_a_learned_choice_is_used(self):
        learn(Files(), Learned(1, 4, False, 100.0))
        assert settings(
            DataLoader(Files(), 4, num_workers="auto", prefetch_factor="auto", pin_memory="auto")
        ) == (1, 4, False)

    def test_it_is_bounded_by_the_cores(self):
        learn(Files(), Learned(1000, 2, False, 100.0, batch_bytes=1, memory_per_worker=1))
        assert resolved(Files())[0] == max(8, 4 * resources.usable_cores())

    def test_it_holds_for_its_batch_size_only(self):
        learn(Files(), Learned(5, 4, False, 100.0))
        assert resolved(Files(), batch_size=8)[0] != 5

    def test_no_workers_learned_but_needed(self):
        learn(Files(), Learned(0, None, False, 100.0))
        assert resolved(Files())[:2] == (0, None)
        assert resolved(Files(), needs_workers=True)[:2] == (1, 2)

    def test_fewer_where_memory_no_longer_bears_it(self, monkeypatch):
        monkeypatch.setattr(resources, "available_memory", lambda: 500)  # half of it is for workers
        learn(Files(), Learned(5, 2, False, 100.0, memory_per_worker=100))
        assert resolved(Files())[0] == 2

    def test_fewer_where_shared_memory_no_longer_holds_its_batches(self, monkeypatch):
        monkeypatch.setattr(resources, "shm_room", lambda path=None: 500)
        learn(Files(), Learned(5, 2, False, 100.0, batch_bytes=100))
        with pytest.warns(CapacityWarning, match=r"num_workers=3, prefetch_factor=1: 5 workers"):
            assert resolved(Files())[:2] == (3, 1)
        with pytest.warns(CapacityWarning, match="--shm-size"):
            assert resolved(Files(), prefetch_factor=2)[0] == 1

    def test_none_where_not_one_batch_fits(self, monkeypatch):
        monkeypatch.setattr(resources, "shm_room", lambda path=None: 500)
        learn(Files(), Learned(5, 2, False, 100.0, batch_bytes=1000))
        with pytest.warns(CapacityWarning) as caught:
            loader = DataLoader(Files(), 4, num_workers="auto", prefetch_factor="auto")
        assert settings(loader)[:2] == (0, None)
        assert [warning.filename for warning in caught] == [__file__]  # the line that asked


def test_without_a_known_batch_its_size_is_a_guess(monkeypatch):
    # Three batches fit: one in the queue of one worker, and two that the step holds.
    monkeypatch.setattr(resources, "shm_room", lambda path=None: 8 * 2**20)
    monkeypatch.setattr(resources, "usable_cores", lambda: 4)
    rule = '"auto" chose num_workers=1, prefetch_factor=1: .* 8.0 MiB are free .* is a guess'
    with pytest.warns(CapacityWarning, match=rule):
        assert resolved(Files())[:2] == (1, 1)

"""Synthetic batches: copies of a real one, as many as the loader has, safe to write into."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, get_worker_info

from backends.synthetic import Synthetic
from dataloaders import DataLoader, wrap
from dataloaders.errors import BackendUnavailable, OptionError
from helpers.compare import assert_same, generator_states
from helpers.datasets import CountingStream, CustomBatch, MapDataset, Point, SizedStream


def photo(index):
    return {
        "image": torch.full((3, 4, 4), 10 + index, dtype=torch.uint8),
        "score": torch.rand(2) - 0.5,
        "label": index,
        "name": f"n{index}",
    }


PHOTOS = MapDataset(photo, 10)
DRAWING = MapDataset(
    lambda _: torch.tensor([random.random(), np.random.rand(), torch.rand(())]), 10
)


def synthetic(dataset=PHOTOS, batch_size=2, **options):
    return DataLoader(dataset, batch_size, **{"backend": "synthetic", "device": "cpu", **options})


def test_a_batch_is_copied_whatever_it_holds():
    real = {
        "unsigned": torch.tensor([3, 2**64 - 1], dtype=torch.uint64),
        "not finite": torch.tensor([float("nan"), float("inf")]),
        "eighth": torch.ones(2).to(torch.float8_e4m3fn),
        "complex": Point(torch.tensor([1 + 2j]), None),
        "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "text": ["a", "b"],
        "sparse": torch.eye(3).to_sparse(),
        "custom": CustomBatch([(torch.ones(2), 3)]),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.rand(3), torch.rand(2)]),
    }
    ((made,),) = synthetic([0], 1, backend=Synthetic(like=[real], pool=1))
    assert made["custom"] is not real["custom"]
    assert_same(made, real)
    parameter = torch.nn.Parameter(torch.rand(2))
    ((made,),) = synthetic([0], 1, backend=Synthetic(like=[parameter], pool=1))
    assert not made.requires_grad
    assert made.data_ptr() != parameter.data_ptr()


class Endless:
    def __iter__(self):
        while True:
            yield from ([0, 1], [2])


def test_an_epoch_has_the_loaders_number_of_batches_or_the_given_one():
    batches = iter(synthetic(batch_size=1, batch_sampler=Endless()))
    assert [len(next(batches)["label"]) for _ in range(5)] == [2] * 5
    with pytest.raises(BackendUnavailable, match=r"give it: backend=Synthetic\(batches=1000\)"):
        iter(synthetic(CountingStream(7), 3))
    for dataset, options, sizes in (
        (CountingStream(7), {"backend": Synthetic(batches=4)}, [3] * 4),
        (SizedStream(7), {}, [3, 3, 1]),
        (SizedStream(7), {"drop_last": True}, [3, 3]),
        (PHOTOS, {"sampler": []}, []),
    ):
        assert [len(leaf) for leaf in synthetic(dataset, 3, **options)] == sizes
    with pytest.raises(OptionError, match=r"batches=-1\): must be an int of at least 0"):
        Synthetic(batches=-1)


class Unreadable(MapDataset):
    opened = False

    def __getitem__(self, index):
        if not self.opened:
            raise OSError("not open")
        return torch.zeros(2)


def test_like_reads_no_sample_and_a_worker_reads_what_worker_init_fn_opens():
    backend = Synthetic(like={"x": torch.rand(4, 2), "kept": torch.arange(4)})
    batches = list(synthetic(Unreadable(photo, 10), 4, backend=backend))
    assert [tuple(batch["x"].shape) for batch in batches] == [(4, 2), (4, 2), (2, 2)]
    assert batches[2]["kept"].tolist() == [0, 1]
    with pytest.raises(OSError, match="not open"):
        iter(synthetic(Unreadable(photo, 10), 4))
    opens = {"worker_init_fn": lambda _: setattr(get_worker_info().dataset, "opened", True)}
    opened = synthetic(Unreadable(photo, 10), 4, num_workers=2, **opens)
    assert [len(batch) for batch in opened] == [4, 4, 2]


def test_reading_the_real_batch_leaves_every_generator_alone():
    sampler = RandomSampler(DRAWING, generator=torch.Generator().manual_seed(4))
    mine = {"shuffle": True, "generator": sampler.generator}
    for options in (mine, {"sampler": sampler}, {"shuffle": True}):
        loader = synthetic(DRAWING, 4, **options)
        before = [*generator_states(loader), sampler.generator.get_state()]
        list(loader)
        assert_same([*generator_states(loader), sampler.generator.get_state()], before)


def test_a_pool_is_reissued_in_new_containers_and_no_write_of_the_step_reaches_a_later_batch():
    loader = synthetic(backend=Synthetic(pool=2))
    batches = list(loader)
    assert len({batch["score"].data_ptr() for batch in batches}) == 2
    assert batches[0]["score"].data_ptr() == batches[2]["score"].data_ptr()
    batches[0].clear()
    kept = []
    made = synthetic()
    with torch.inference_mode():
        next(iter(made))
        for _ in range(3):
            for batch in loader:
                assert batch["score"].abs().max() <= 0.5
                kept.append(batch["score"].fill_(100.0))
    assert all((leaf == 100).all() for leaf in kept)
    weight = torch.ones(2, requires_grad=True)
    for batch in made:  # also one that was made in inference mode takes part in autograd
        (batch["score"] * weight).sum().backward()
    assert weight.grad is not None


class Doubled(torch.utils.data.DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield torch.cat([batch["label"], batch["label"]])


def test_batches_are_made_on_the_loaders_device_also_of_a_loader_with_its_own_iteration():
    doubled = wrap(Doubled(PHOTOS, 4), backend="synthetic", device="meta")
    assert next(iter(doubled)).shape == (8,)
    for loader in (synthetic(device="meta"), doubled):
        batch = next(iter(loader))
        leaf = batch if isinstance(batch, torch.Tensor) else batch["score"]
        assert leaf.device.type == loader.explain().delivers == "meta"
        assert "8 copies of the first real batch" in str(loader.explain())

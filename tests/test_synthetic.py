"""Synthetic batches: like the real ones in all but their values, as many, and free of trouble."""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, RandomSampler, get_worker_info

from backends.synthetic import Synthetic, TensorSpec
from dataloaders import DataLoader, wrap
from dataloaders.errors import BackendUnavailable, OptionError
from helpers.compare import assert_same, generator_states
from helpers.datasets import CountingStream, SizedStream


class Photos(Dataset):
    def __init__(self, size=10):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {
            "image": torch.full((3, 4, 4), 10 + index, dtype=torch.uint8),
            "score": torch.rand(2) - 0.5,
            "label": index,
            "name": f"n{index}",
        }


def synthetic(dataset=None, batch_size=2, **options):
    options = {"backend": "synthetic", "device": "cpu", **options}
    return DataLoader(Photos() if dataset is None else dataset, batch_size, **options)


def made_like(batch, device="cpu", seed=1):
    """One batch that is made like ``batch``."""
    backend = Synthetic(like=[batch], seed=seed, pool=1)
    (made,) = next(iter(synthetic([0], 1, backend=backend, device=device)))
    return made


@dataclass
class Item:
    values: Any


class Pair(NamedTuple):
    one: Any
    other: Any


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64,
)  # fmt: skip
OTHERS = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(FLOATS + INTEGERS + OTHERS))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape))
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        values = st.lists(st.integers(limits.min, limits.max), min_size=count, max_size=count)
        kind = str(dtype).removeprefix("torch.")
        return torch.from_numpy(np.array(draw(values), dtype=kind).reshape(shape))
    values = st.floats(allow_nan=True, allow_infinity=True, width=16)
    listed = draw(st.lists(values, min_size=count, max_size=count))
    return torch.tensor(listed, dtype=torch.float64).reshape(shape).to(dtype)


NESTS = st.recursive(
    tensors() | st.text(max_size=2) | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Item, inner)
    ),
    max_leaves=5,
)


def assert_like(made, real):
    """The same structure and leaves, with finite values in the range of the real finite ones."""
    assert type(made) is type(real)
    if isinstance(real, torch.Tensor):
        assert (made.shape, made.dtype) == (real.shape, real.dtype)
        assert made.numel() == 0 or made.stride() == real.stride()
        if made.device.type != "meta" and real.numel():
            low, high = bounds(real)
            assert low <= bounds(made)[0] <= bounds(made)[1] <= high
            assert made.untyped_storage().data_ptr() != real.untyped_storage().data_ptr()
    elif isinstance(real, dict):
        assert list(made) == list(real)
        assert_like(list(made.values()), list(real.values()))
    elif isinstance(real, (list, tuple)):
        assert len(made) == len(real)
        for one, other in zip(made, real, strict=True):
            assert_like(one, other)
    elif isinstance(real, Item):
        assert_like(made.values, real.values)
    else:
        assert made is real


def bounds(leaf):
    """The least and the greatest finite value, 0 and 0 without one; integers are exact."""
    leaf = torch.view_as_real(leaf) if leaf.dtype.is_complex else leaf
    if leaf.dtype not in INTEGERS:
        leaf = leaf.double()[leaf.double().isfinite()]
    values = leaf.flatten().tolist() or [0]
    return min(values), max(values)


@settings(max_examples=200)
@given(batch=NESTS)
@example(batch=torch.tensor(2**63 + 1025, dtype=torch.uint64))
@example(batch=torch.tensor([3, 2**64 - 1], dtype=torch.uint64))
@example(batch=torch.tensor([2**63 - 1]))
@example(batch=torch.tensor([-(2**63), 2**63 - 1]))
def test_any_nesting_is_made_alike(batch):
    made = made_like(batch)
    assert_like(made, batch)
    assert_same(made_like(batch), made)
    assert_like(made_like(batch, "meta"), batch)


def test_values_fill_the_range_of_the_real_ones():
    real = [
        torch.tensor([2.0, 5.0]).repeat(500),
        torch.tensor([3, 6]).repeat(500),
        torch.tensor([True, False, False, False]).repeat(250),
        torch.tensor([1 + 10j, 2 + 20j]).repeat(500),
        torch.tensor([float("nan"), float("inf"), 1.0, 2.0]).repeat(250),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    ]
    made = made_like(real)
    assert abs(made[0].mean() - 3.5) < 0.2
    assert made[1].unique().tolist() == [3, 4, 5, 6]
    assert abs(made[2].float().mean() - 0.25) < 0.1
    assert abs(made[3].imag.mean() - 15) < 1
    assert made[4].isfinite().all()
    assert made[5].is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(made_like(real[0], seed=2), made[0])


class Moving:
    """A custom batch type, whose values may have to fit together."""

    def __init__(self):
        self.offsets = torch.tensor([0, 3, 9])

    def to(self, device):
        return self


def test_what_cannot_be_made_is_the_real_one():
    real = {
        "sparse": torch.eye(3).to_sparse(),
        "custom": Moving(),
        "packed": torch.nn.utils.rnn.pack_sequence([torch.rand(3), torch.rand(2)]),
        "infinite": torch.full((2,), float("inf")),
        "text": ["a", "b"],
    }
    parameter = torch.nn.Parameter(torch.rand(2))
    made = made_like({**real, "parameter": parameter})
    assert torch.equal(made.pop("parameter"), parameter)
    assert made["custom"] is not real["custom"]
    assert_same(made, real)


def test_samples_in_lists_are_cut_with_the_last_batch_and_square_columns_are_not():
    def detection(samples):
        return tuple(sample["image"] for sample in samples), [sample["name"] for sample in samples]

    loader = synthetic(batch_size=4, collate_fn=detection)
    assert [(len(images), len(names)) for images, names in loader] == [(4, 4), (4, 4), (2, 2)]
    assert all(image.shape == (3, 4, 4) for images, _ in loader for image in images)
    like = Synthetic(like=[torch.zeros(2, 5), torch.zeros(2)])  # as many columns as samples
    last = list(synthetic(Photos(3), backend=like))[-1]
    assert [tuple(leaf.shape) for leaf in last] == [(1, 5), (1,)]


class Endless:
    def __iter__(self):
        while True:
            yield from ([0, 1], [2])


def test_batches_end_where_the_loaders_would_or_where_it_is_told():
    batches = iter(synthetic(batch_size=1, batch_sampler=Endless()))
    assert [len(next(batches)["label"]) for _ in range(5)] == [2, 1, 2, 1, 2]
    with pytest.raises(BackendUnavailable, match=r"give it: backend=Synthetic\(batches=1000\)"):
        iter(synthetic(CountingStream(7), 3))
    for dataset, options, sizes in (
        (CountingStream(7), {"backend": Synthetic(batches=4)}, [3] * 4),
        (SizedStream(7), {}, [3, 3, 1]),
        (SizedStream(7), {"drop_last": True}, [3, 3]),
        (Photos(), {"sampler": []}, []),
    ):
        assert [len(leaf) for leaf in synthetic(dataset, 3, **options)] == sizes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Synthetic(pool=0), r"pool=0\): must be an int of at least 1"),
        (lambda: Synthetic(like=1, spec=[TensorSpec((1,))]), "give one of them, not both"),
        (lambda: Synthetic(spec={"a": 1}), "holds no TensorSpec"),
        (lambda: TensorSpec((-1,)), "sizes must not be negative"),
        (lambda: TensorSpec((1,), "float"), r"dtype='float': must be a torch\.dtype"),
        (lambda: TensorSpec((1,), low=2), "low=2, high=1: both must be finite, low not above high"),
        (lambda: TensorSpec((1,), torch.uint8, high=256), "holds values from 0 to 255"),
    ],
)
def test_options_that_cannot_be_used(make, message):
    with pytest.raises(OptionError, match=message):
        make()


class Unreadable(Photos):
    opened = False

    def __getitem__(self, index):
        if not self.opened:
            raise OSError("not open")
        return torch.zeros(2)


def open_in_worker(worker_id):
    get_worker_info().dataset.opened = True


def test_like_and_spec_need_no_dataset_and_a_worker_reads_one_that_is_opened_there():
    kept = torch.tensor([0, 2, 4, 6])
    for backend in (
        Synthetic(like={"x": torch.rand(4, 2), "kept": kept}),
        Synthetic(spec={"x": TensorSpec((4, 2)), "kept": kept}),
    ):
        batches = list(synthetic(Unreadable(), 4, backend=backend))
        assert [tuple(batch["x"].shape) for batch in batches] == [(4, 2), (4, 2), (2, 2)]
        assert all(0 <= batch["x"].min() <= batch["x"].max() <= 1 for batch in batches)
        assert batches[2]["kept"].shape == (2,)
    spec = Synthetic(spec=TensorSpec((4,), torch.int64, 5, 5))
    assert next(iter(synthetic(Unreadable(), 4, backend=spec))).tolist() == [5] * 4
    with pytest.raises(OSError, match="not open"):
        iter(synthetic(Unreadable(), 4))
    opened = synthetic(Unreadable(), 4, num_workers=2, worker_init_fn=open_in_worker)
    assert [len(batch) for batch in opened] == [4, 4, 2]


class Drawing(Photos):
    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(())])


def test_reading_the_real_batch_leaves_every_generator_alone():
    mine = torch.Generator().manual_seed(3)
    sampler = RandomSampler(Drawing(), generator=torch.Generator().manual_seed(4))
    for options in ({"shuffle": True, "generator": mine}, {"sampler": sampler}, {"shuffle": True}):
        loader = synthetic(Drawing(), 4, **options)
        before = [*generator_states(loader), sampler.generator.get_state()]
        list(loader)
        assert_same([*generator_states(loader), sampler.generator.get_state()], before)


@pytest.mark.parametrize("inference", [False, True])
def test_a_pool_is_reissued_in_new_containers_and_no_write_of_the_step_reaches_a_later_batch(
    inference,
):
    loader = synthetic(backend=Synthetic(pool=2))
    batches = list(loader)
    assert len({batch["score"].data_ptr() for batch in batches}) == 2
    assert batches[0]["score"].data_ptr() == batches[2]["score"].data_ptr()
    assert not torch.equal(batches[0]["score"], batches[1]["score"])
    batches[0].clear()
    kept = []
    made = synthetic()
    with torch.inference_mode(inference):
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_batches_are_made_on_the_loaders_device_also_of_a_loader_with_its_own_iteration(device):
    doubled = wrap(Doubled(Photos(), 4), backend="synthetic", device=device)
    assert tuple(next(iter(doubled)).shape) == (8,)
    for loader in (synthetic(device=device), doubled):
        batch = next(iter(loader))
        leaf = batch if isinstance(batch, torch.Tensor) else batch["score"]
        assert leaf.device.type == device
        assert loader.explain().delivers == device
        assert "8 random batches like the first real one" in str(loader.explain())


@pytest.mark.gpu
def test_on_the_current_cuda_device_where_a_write_is_noticed():
    before = torch.cuda.get_rng_state()
    loader = synthetic(backend=Synthetic(pool=2), device=None)
    for batch in [*loader, *loader]:
        assert batch["score"].device == torch.device("cuda", torch.cuda.current_device())
        assert 10 <= batch["image"].min() <= batch["image"].max() <= 13
    for _ in range(2):
        for batch in loader:
            assert batch["score"].abs().max().item() <= 0.5
            batch["score"].fill_(100.0)
    assert torch.equal(torch.cuda.get_rng_state(), before)

"""Batches of large samples through the loader: torch's, and torch's errors, in pooled memory."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserList, namedtuple
from numbers import Number

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset, default_collate, default_convert
from torch.utils.data._utils import collate as torch_collate
from torchvision import tv_tensors

from backends.stock import collate as ours
from dataloaders import DataLoader
from dataloaders.batches import memory
from helpers.compare import assert_same

Pair = namedtuple("Pair", ["image", "label"])
BYTES = ours.SMALLEST_SAMPLE
MANY = 150  # samples of 16 KiB: a batch of them is large enough for the loader's pool


def large(value=1, dtype=torch.float32):
    return torch.full((4, 16, BYTES // 256), value).to(dtype)


def pooling():
    pool = memory.HostPool(smallest=1)
    return ours.PooledCollate(pool), pool


def outcome(collate, samples):
    try:
        return collate(samples)
    except Exception as error:
        return type(error), str(error)


SAMPLES = {
    "tensor": lambda i: large(i),
    "list": lambda i: [large(i), large(-i), "name"],
    "dict": lambda i: {"image": large(i), "deep": {"mask": large(i, torch.bool)}, "id": i},
    "ordered": lambda i: OrderedDict(a=large(i), b=float(i)),
    "namedtuple": lambda i: Pair(large(i), i),
    "user list": lambda i: UserList([large(i), i]),
    "array": lambda i: np.full((64, BYTES // 64), i, np.float32),
    "torchvision's": lambda i: tv_tensors.Image(large(i).movedim(0, 2).contiguous().movedim(2, 0)),
    "array in a tuple": lambda i: (np.full((64, BYTES // 64), i, np.int16), np.float32(i)),
}


def test_the_nesting_is_torchs_and_the_memory_the_pools():
    for name, make in SAMPLES.items():
        collate, pool = pooling()
        samples = [make(i) for i in range(5)]
        batch = collate(samples)
        assert_same(batch, default_collate(samples), name)
        assert pool.lent_bytes >= 5 * BYTES, name
        del batch
        assert pool.lent_bytes == 0, name
    with tv_tensors.set_return_type("TVTensor"):
        images = [SAMPLES["torchvision's"](i) for i in range(3)]
        assert type(pooling()[0](images)) is type(default_collate(images))


LAYOUTS = ["plain", "last", "last, thinned", "transposed", "expanded", "sliced", "conj"]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool, torch.uint16]


@settings(max_examples=60)
@given(
    shape=st.lists(st.sampled_from([1, 2]), max_size=4),
    place=st.integers(0, 4),
    count=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    layouts=st.sampled_from(LAYOUTS).map(lambda layout: [layout] * 3)
    | st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    inference=st.booleans(),
)
def test_strides_are_torchs(shape, place, count, dtype, layouts, inference):
    collate, pool = pooling()
    shape.insert(place, BYTES // dtype.itemsize)
    samples = [laid_out(shape, dtype, layout) for layout in layouts[:count]]
    with torch.inference_mode(inference):
        batch, theirs = collate(samples), default_collate(samples)
    assert_same(batch, theirs, storage=True)
    for name in ("is_inference", "is_conj", "_is_view"):
        assert getattr(batch, name)() is getattr(theirs, name)()
    assert pool.lent_bytes or len(shape) > 3


def laid_out(shape, dtype, layout):
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)
    if layout == "last" and tensor.dim() in (4, 5):
        format_ = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=format_)
    if layout == "last, thinned" and tensor.dim() in (4, 5):
        return laid_out([*shape[:-1], 2 * shape[-1]], dtype, "last")[..., ::2]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "expanded":
        return tensor.flatten()[:1].view([1] * len(shape)).expand(shape)
    if layout == "sliced":
        return torch.stack([tensor, tensor], -1)[..., 0]
    return tensor.conj() if layout == "conj" and dtype.is_complex else tensor


@dataclasses.dataclass
class Strange:
    tensor: torch.Tensor


class Scaled(torch.Tensor):
    """A subclass of the user's."""


UNUSUAL = {
    "other shapes": lambda: [large(), large()[:2]],
    "other dimensions": lambda: [large(), large().flatten()],
    "other types": lambda: [large(), large(dtype=torch.float64)],
    "other kinds": lambda: [large(), 3],
    "a number among tensors in a tuple": lambda: [(large(), 1), (2.5, 1)],
    "gradients": lambda: [large().requires_grad_(), large()],
    "parameters": lambda: [torch.nn.Parameter(large()), torch.nn.Parameter(large())],
    "a subclass": lambda: [large(i).as_subclass(Scaled) for i in range(3)],
    "sparse": lambda: [large().to_sparse(), large().to_sparse()],
    "nested": lambda: [torch.nested.nested_tensor([large(), large()[:1]])] * 2,
    "later on meta": lambda: [large(), large().to("meta")],
    "no elements": lambda: [large()[:0], large()[:0]],
    "unequal lists": lambda: [[large(), large()], [large()]],
    "unknown": lambda: [Strange(large()), Strange(large())],
    "none": lambda: [None, None],
    "nothing": list,
    "text arrays": lambda: [np.full((9000,), "a")] * 2,
    "a tensor as list": lambda: large(),
    "an odd sequence": lambda: UserList([large(), large()]),
    "a negative view": lambda: [large(dtype=torch.complex64).conj().imag] * 2,
}


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whatever_is_unusual_is_torchs(grad):
    for name, make in UNUSUAL.items():
        with torch.set_grad_enabled(grad):
            batch, theirs = outcome(pooling()[0], make()), outcome(default_collate, make())
        assert_same(batch, theirs, name)
        if isinstance(theirs, torch.Tensor):
            assert type(batch.grad_fn) is type(theirs.grad_fn), name
            assert batch.is_neg() is theirs.is_neg()


def test_the_users_own_table_is_respected(monkeypatch):
    collate, pool = pooling()
    table = torch_collate.default_collate_fn_map
    samples = [(large(i), Strange(large(i))) for i in range(3)]
    assert outcome(collate, samples) == outcome(default_collate, samples)

    def strange(batch, *, collate_fn_map):
        tensors = [sample.tensor for sample in batch]
        return Strange(torch_collate.collate(tensors, collate_fn_map=collate_fn_map))

    monkeypatch.setitem(table, Strange, strange)
    batch = collate(samples)
    assert_same(batch, default_collate(samples))
    assert pool.lent_bytes == 2 * 3 * BYTES
    del batch
    monkeypatch.setitem(table, torch.Tensor, lambda batch, **_: torch.stack(batch[::-1]))
    assert_same(collate(samples), default_collate(samples))
    assert pool.lent_bytes == 0
    monkeypatch.undo()
    batch = collate([large(), large()])
    assert (len(batch), pool.lent_bytes >= 2 * BYTES) == (2, True)


class Marker:
    pass


class MarkedList(Marker, list):
    """Makes its other base a kind of a list."""


ADDED = {
    False: (Strange, (Strange, torch.Generator)),
    True: (torch.Tensor, torch.nn.Parameter, bool, Pair, Marker, Number, (Strange, tuple)),
}


def test_a_table_that_only_grew_is_torchs_and_one_that_concerns_samples_is_not(monkeypatch):
    table = torch_collate.default_collate_fn_map
    loader = DataLoader(TensorDataset(torch.ones(2)))

    def is_changed():
        return "default_collate_fn_map" in str(loader.explain())

    assert not is_changed()
    for changes, kinds in ADDED.items():
        for kind in kinds:
            with monkeypatch.context() as patch:
                patch.setitem(table, kind, lambda *_, **__: None)
                assert is_changed() == changes, kind
    monkeypatch.delitem(table, float)
    assert is_changed()


def test_small_batches_do_not_hide_a_large_one_for_long():
    collate, pool = pooling()
    small = [torch.arange(3), torch.arange(3)]
    for _ in range(100):
        assert_same(collate(small), default_collate(small))
    assert pool.lent_bytes == 0
    kept = [collate([large(), large()]) for _ in range(16)]
    assert pool.lent_bytes >= 2 * BYTES
    for _ in range(5):
        kept = [collate(small), collate([large(), large()])]  # taking turns: each one is pooled
        assert pool.lent_bytes == 2 * BYTES
    assert len(kept) == 2


def test_what_follows_the_operations_sees_torchs_own():
    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    records = []
    for each in (pooling()[0], default_collate):
        seen = []
        with Recording():
            each([large(), large()])
        records.append(seen)
    assert records[0] == records[1] != []


def test_a_pool_without_memory_is_not_in_the_way():
    class Exhausted(memory.HostPool):
        def empty(self, shape, dtype):
            raise RuntimeError("cannot allocate memory")

    samples = [large(i) for i in range(3)]
    assert_same(ours.PooledCollate(Exhausted(smallest=1))(samples), default_collate(samples))


# In a loader


def columns():
    return TensorDataset(torch.rand(2 * MANY + 130, 64, 64), torch.arange(2 * MANY + 130))


def images():
    return [(large(index), index) for index in range(2 * MANY + 130)]


def test_the_plan_says_where_batches_come_from():
    said = "come from a pool, which reuses their memory once nothing refers to it"
    for pools, loader in (
        (True, DataLoader(images())),
        (True, DataLoader(columns())),
        (True, DataLoader(columns(), seed=1)),
        (False, DataLoader(images(), seed=1)),
        (False, DataLoader(images(), collate_fn=list)),
        (False, DataLoader(images(), collate_fn=default_convert)),
        (False, DataLoader(images(), batch_size=None)),
    ):
        assert (said in str(loader.explain())) == pools


@pytest.mark.gpu
@pytest.mark.parametrize("make", [images, columns])
def test_pinned_batches_survive_being_dropped_behind_a_long_kernel(make):
    data, on_device = make(), []
    expected = list(torch.utils.data.DataLoader(data, batch_size=MANY))
    for image, label in DataLoader(data, batch_size=MANY, pin_memory=True):
        assert image.is_pinned()
        assert label.is_pinned()
        torch.cuda._sleep(200_000_000)
        on_device.append([image.to("cuda", non_blocking=True), label])
        del image, label
    for one, other in zip(on_device, expected, strict=True):
        assert_same(one[0].cpu(), other[0])

"""Collation and gathers into pooled memory: torch's batches, and torch's errors, to the bit."""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict, UserList, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import (
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from backends.stock import Stock
from backends.stock.collate import SMALLEST_SAMPLE, PooledCollate
from dataloaders import DataLoader
from dataloaders.batches.memory import HostPool
from helpers.compare import assert_same

TorchLoader = torch.utils.data.DataLoader
Pair = namedtuple("Pair", ["image", "label"])
BYTES = SMALLEST_SAMPLE


def large(value: float = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4, 16, BYTES // 256), value).to(dtype)


def pooling() -> tuple[PooledCollate, HostPool]:
    pool = HostPool(smallest=1)
    return PooledCollate(pool), pool


def outcome(collate: Callable[[Any], Any], samples: Any) -> Any:
    try:
        return collate(samples)
    except Exception as error:
        return type(error), str(error)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: large(i),
    "pair": lambda i: (large(i), i),
    "list": lambda i: [large(i), large(-i), "name"],
    "dict": lambda i: {"image": large(i), "deep": {"mask": large(i, torch.bool)}, "id": i},
    "ordered": lambda i: OrderedDict(a=large(i), b=float(i)),
    "namedtuple": lambda i: Pair(large(i), i),
    "user list": lambda i: UserList([large(i), i]),
    "array": lambda i: np.full((64, BYTES // 64), i, np.float32),
    "array in a tuple": lambda i: (np.full((64, BYTES // 64), i, np.int16), np.float32(i)),
}


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES.keys())
def test_the_nesting_is_torchs_and_the_memory_the_pools(make: Callable[[int], Any]) -> None:
    collate, pool = pooling()
    samples = [make(i) for i in range(5)]
    ours = collate(samples)
    assert_same(ours, default_collate(samples))
    assert pool.lent_bytes >= 5 * BYTES
    del ours
    assert pool.lent_bytes == 0


LAYOUTS = ["plain", "last", "last, thinned", "transposed", "expanded", "sliced", "conj"]


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)
    | st.lists(st.sampled_from([1, 2, 3]), min_size=4, max_size=6),
    count=st.integers(1, 3),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool, torch.uint16]
    ),
    layouts=st.sampled_from(LAYOUTS).map(lambda layout: [layout] * 3)
    | st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    inference=st.booleans(),
)
def test_strides_are_torchs(
    shape: list[int], count: int, dtype: torch.dtype, layouts: list[str], inference: bool
) -> None:
    collate, pool = pooling()
    pool_everything = pytest.MonkeyPatch()
    pool_everything.setattr("backends.stock.collate.SMALLEST_SAMPLE", 1)
    samples = [laid_out(shape, dtype, layout) for layout in layouts[:count]]
    try:
        with torch.inference_mode(inference):
            ours, theirs = collate(samples), default_collate(samples)
    finally:
        pool_everything.undo()
    assert_same(ours, theirs)
    assert ours.is_inference() is theirs.is_inference()
    assert ours.is_conj() is theirs.is_conj()
    assert ours.requires_grad is theirs.requires_grad is False
    assert ours._is_view() is theirs._is_view()
    assert ours.storage_offset() == theirs.storage_offset() == 0
    assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    if len(shape) <= 3:
        assert pool.lent_bytes


def laid_out(shape: list[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
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
    if layout == "conj" and dtype.is_complex:
        return tensor.conj()
    return tensor


@dataclasses.dataclass
class Strange:
    tensor: torch.Tensor


UNUSUAL: dict[str, Callable[[], list[Any]]] = {
    "other shapes": lambda: [large(), large()[:2]],
    "other dimensions": lambda: [large(), large().flatten()],
    "other types": lambda: [large(), large(dtype=torch.float64)],
    "narrower types": lambda: [large(dtype=torch.float64), large()],
    "integers among floats": lambda: [large(), large(dtype=torch.int64)],
    "other kinds": lambda: [large(), 3],
    "a number among tensors in a tuple": lambda: [(large(), 1), (2.5, 1)],
    "gradients": lambda: [large().requires_grad_(), large()],
    "later gradients": lambda: [large(), large().requires_grad_()],
    "parameters": lambda: [torch.nn.Parameter(large()), torch.nn.Parameter(large())],
    "sparse": lambda: [large().to_sparse(), large().to_sparse()],
    "later sparse": lambda: [large(), large().to_sparse()],
    "nested": lambda: [torch.nested.nested_tensor([large(), large()[:1]])] * 2,
    "on meta": lambda: [large().to("meta"), large().to("meta")],
    "later on meta": lambda: [large(), large().to("meta")],
    "no elements": lambda: [large()[:0], large()[:0]],
    "unequal lists": lambda: [[large(), large()], [large()]],
    "unknown": lambda: [Strange(large()), Strange(large())],
    "none": lambda: [None, None],
    "nothing": list,
    "text arrays": lambda: [np.full((9000,), "a")] * 2,
    "a tensor as list": lambda: large(),  # type: ignore[dict-item,return-value]
    "an odd sequence": lambda: UserList([large(), large()]),  # type: ignore[dict-item,return-value]
    "a negative view": lambda: [large(dtype=torch.complex64).conj().imag] * 2,
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL.keys())
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_whatever_is_unusual_is_torchs(make: Callable[[], Any], grad: bool) -> None:
    collate, _ = pooling()
    with torch.set_grad_enabled(grad):
        ours, theirs = outcome(collate, make()), outcome(default_collate, make())
    if isinstance(theirs, torch.Tensor):
        assert isinstance(ours, torch.Tensor)
        assert ours.device == theirs.device
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert ours.requires_grad is theirs.requires_grad
        assert type(ours.grad_fn) is type(theirs.grad_fn)
        assert ours.is_neg() is theirs.is_neg()
        assert ours.is_meta or torch.equal(ours, theirs)
    elif isinstance(theirs, tuple):
        assert ours == theirs
    else:
        assert_same(ours, theirs)


class Scaled(torch.Tensor):
    """A subclass with a table entry of its own, or none."""


def test_subclasses_are_left_to_torch() -> None:
    collate, pool = pooling()
    samples = [large(i).as_subclass(Scaled) for i in range(3)]
    batch = collate(samples)
    assert type(batch) is type(default_collate(samples)) is Scaled
    assert pool.lent_bytes == 0


def test_torchvisions_images_are_pooled() -> None:
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    collate, pool = pooling()
    images = [tv_tensors.Image(large(i).movedim(0, 2).contiguous().movedim(2, 0)) for i in range(3)]
    ours = collate(images)
    assert_same(ours, default_collate(images))
    assert pool.lent_bytes == 3 * BYTES
    with tv_tensors.set_return_type("TVTensor"):
        assert type(collate(images)) is type(default_collate(images))


def test_the_users_own_table_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    collate, pool = pooling()
    table = torch_collate.default_collate_fn_map
    samples = [(large(i), Strange(large(i))) for i in range(3)]
    assert outcome(collate, samples) == outcome(default_collate, samples)

    def strange(batch: Any, *, collate_fn_map: Any) -> Any:
        return Strange(
            torch_collate.collate([s.tensor for s in batch], collate_fn_map=collate_fn_map)
        )

    monkeypatch.setitem(table, Strange, strange)
    ours = collate(samples)
    assert_same(ours, default_collate(samples))
    assert pool.lent_bytes == 2 * 3 * BYTES
    del ours

    def backwards(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(batch[::-1])

    monkeypatch.setitem(table, torch.Tensor, backwards)
    assert_same(collate(samples), default_collate(samples))
    assert pool.lent_bytes == 0
    monkeypatch.undo()
    assert collate([large(), large()]).shape[0] == 2
    assert table == collate._torchs


def test_small_batches_do_not_hide_a_large_one_for_long() -> None:
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


def test_a_worker_collates_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    collate, pool = pooling()
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", object())
    assert collate([large(), large()]).is_shared()
    assert pool.lent_bytes == 0


@pytest.mark.parametrize("real", [False, True], ids=["fake samples", "real samples"])
def test_fake_tensors_stay_fake(real: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    collate, pool = pooling()
    samples = [large(), large()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        if not real:
            samples = [torch.empty(BYTES), torch.empty(BYTES)]
        batch = collate(samples)
        assert type(batch) is type(default_collate(samples)) is FakeTensor
    assert pool.lent_bytes == 0


def test_a_dispatch_mode_sees_torchs_own_operations() -> None:
    class Recording(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    collate, _ = pooling()
    samples = [large(), large()]
    records = []
    for each in (collate, default_collate):
        with Recording() as mode:
            each(samples)
        records.append(mode.seen)
    assert records[0] == records[1] != []


def test_a_pool_without_memory_is_not_in_the_way() -> None:
    class Exhausted(HostPool):
        def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
            raise RuntimeError("cannot allocate memory")

    samples = [large(i) for i in range(3)]
    assert_same(PooledCollate(Exhausted(smallest=1))(samples), default_collate(samples))


# In a loader

MANY = 150  # samples of 16 KiB: a batch of them is large enough for the pool


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 2 * MANY + 130  # the last, short batch is large enough too

    def __getitem__(self, index: int) -> Any:
        return large(index), index


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(large(index) for index in range(2 * MANY))


def columns() -> TensorDataset:
    length = len(Images())
    return TensorDataset(torch.rand(length, 64, 64), torch.arange(length))


def pool_of(loader: DataLoader[Any]) -> HostPool:
    session: Any = loader._session
    found = session._pool
    assert isinstance(found, HostPool)
    return found


@pytest.mark.parametrize("make", [Images, Stream, columns])
def test_a_loaders_batches_come_from_its_pool(make: Callable[[], Any]) -> None:
    data = make()
    loader, theirs = (kind(data, batch_size=MANY) for kind in (DataLoader, TorchLoader))
    expected = list(theirs)
    kept = list(loader)
    assert_same(kept, expected)
    pool = pool_of(loader)
    assert pool.lent_bytes >= 2 * MANY * BYTES
    again = list(loader)
    del again
    assert_same(kept, expected)  # as safe to keep as a fresh one
    assert pool.free_bytes > 0
    del kept, loader
    gc.collect()


def test_an_epoch_needs_two_buffers() -> None:
    loader = DataLoader(Images(), batch_size=MANY)
    addresses = {images.data_ptr() for _ in range(3) for images, _ in loader}
    assert len(addresses) == 2


@pytest.mark.parametrize("make", [Images, Stream])
def test_the_iterator_is_torchs_and_the_loader_unchanged(make: Callable[[], Any]) -> None:
    loader = DataLoader(make(), batch_size=4)
    iterator: Any = iter(loader)
    assert type(iterator) is _SingleProcessDataLoaderIter
    assert loader.collate_fn is default_collate is iterator._collate_fn
    assert isinstance(iterator._dataset_fetcher.collate_fn, PooledCollate)


@pytest.mark.parametrize(
    "options",
    [
        {"collate_fn": default_convert},
        {"collate_fn": list},
        {"batch_size": None},
    ],
    ids=["default_convert", "list", "no batches"],
)
def test_other_collations_are_left_alone(options: dict[str, Any]) -> None:
    iterator: Any = iter(DataLoader(Images(), **options))
    assert iterator._dataset_fetcher.collate_fn is iterator._collate_fn
    assert "pool" not in str(DataLoader(Images(), **options).explain())


def test_the_plan_says_where_batches_come_from() -> None:
    said = "come from a pool, which reuses their memory once nothing refers to it"
    assert said in str(DataLoader(Images()).explain())
    assert said in str(DataLoader(columns()).explain())
    assert said not in str(DataLoader(Images(), collate_fn=list).explain())
    assert said not in str(DataLoader(Images(), seed=1).explain())
    assert said in str(DataLoader(columns(), seed=1).explain())


def test_an_iterator_outlives_its_loader_and_the_pool_with_it() -> None:
    loader = DataLoader(Images(), batch_size=MANY)
    iterator = iter(loader)
    kept = [next(iterator)]
    del loader
    kept.extend(iterator)
    assert_same(kept, list(TorchLoader(Images(), batch_size=MANY)))


def test_a_dropped_loader_leaves_no_pool() -> None:
    loader = DataLoader(Images(), batch_size=MANY)
    first = next(iter(loader))
    gone = pool_of(loader)._itself
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()
    assert_same(first[0][3], large(3))


@pytest.mark.parametrize("seed", [None, 5])
def test_a_seed_changes_nothing(seed: int | None) -> None:
    loader = DataLoader(Images(), batch_size=MANY, seed=seed)
    assert_same(list(loader), list(TorchLoader(Images(), batch_size=MANY)))


def test_without_the_gather_the_collation_pools() -> None:
    loader = DataLoader(columns(), batch_size=MANY, backend=Stock(gather=False))
    batch = next(iter(loader))
    assert pool_of(loader).lent_bytes >= MANY * BYTES
    assert batch[0].shape == (MANY, 64, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Images, columns])
def test_pinned_batches_survive_being_dropped_behind_a_long_kernel(
    make: Callable[[], Any],
) -> None:
    data = make()
    loader = DataLoader(data, batch_size=MANY, pin_memory=True)
    expected = list(TorchLoader(data, batch_size=MANY))
    on_device = []
    for images, labels in loader:
        assert images.is_pinned()
        assert labels.is_pinned()
        torch.cuda._sleep(200_000_000)
        on_device.append([images.to("cuda", non_blocking=True), labels])
        del images, labels
    for ours, theirs in zip(on_device, expected, strict=True):
        assert_same(ours[0].cpu(), theirs[0])


@pytest.mark.gpu
def test_torchs_pinning_passes_pinned_batches_on() -> None:
    pinned = torch.empty(10, pin_memory=True)
    assert pinned.pin_memory() is pinned or pinned.pin_memory().data_ptr() == pinned.data_ptr()

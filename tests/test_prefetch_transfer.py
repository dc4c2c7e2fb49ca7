"""Copies, events and memory of prefetch, on a simulated device that reorders all it may."""

import itertools

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from torchvision import tv_tensors
from torchvision.transforms import functional as F

from dataloaders import DataLoader
from dataloaders.errors import CapacityWarning
from helpers.compare import assert_same, tensors_in
from helpers.datasets import CustomBatch, MapDataset
from helpers.fake_cuda import FakeCuda, PlayedPrefetch
from helpers.pictures import noise


def batch_of(number, samples=4):
    image = torch.full((samples, 3, 5), float(number)).add_(torch.arange(5.0))
    return {"image": image, "meta": (torch.tensor([number, 7]), f"name {number}")}


def loader_of(batches, **options):
    """Return a loader that yields ``batches`` as they are."""
    backend = PlayedPrefetch(**options)
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch, backend=backend)


def delivered(leaf, cuda=None, **options):
    """Return the batch ``leaf`` as it arrives, after the device has done its work."""
    cuda = cuda or FakeCuda(0)
    (batch,) = loader_of([leaf], cuda=cuda, **options)
    cuda.drain()
    return batch


ACTIONS = st.lists(st.integers(0, 99), min_size=10, max_size=80)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    actions=ACTIONS,
    ahead=st.integers(1, 4),
    pins=st.booleans(),
    streams=st.integers(1, 3),
    keep=st.booleans(),
)
def test_each_step_reads_its_own_batch(seed, actions, ahead, pins, streams, keep):
    """Send and receive in the order of ``actions``, the device running behind at random.

    Each step reads its batch. Now and then an epoch is broken off, and what was sent and not
    received is dropped.
    """
    cuda = FakeCuda(seed)
    transfer = PlayedPrefetch(cuda=cuda, ahead=ahead, pin_memory=pins).transfer()
    consumers = [cuda.default, *(cuda.stream() for _ in range(streams - 1))]
    sent, received, reads, numbers = [], [], [], itertools.count()
    transfer.start()
    for action in actions:
        cuda.progress(action % 4)
        if action == 99:
            sent.clear()
            transfer.start()
        elif action % 2 and len(sent) < transfer.slots:
            number = next(numbers)
            host = batch_of(number)
            sent.append((number, transfer.send(host)))
            host["image"].fill_(-1)  # the loader may do what it likes with it from here on
        elif sent:
            with cuda.on(consumers[action % len(consumers)]):
                number, handle = sent.pop(0)
                batch = transfer.receive(handle)
                for leaf, wanted in zip(*map(tensors_in, (batch, batch_of(number))), strict=True):
                    reads.append((wanted, []))
                    cuda.kernel(leaf, reads[-1][1])
            received = [*received, (number, batch)][-len(actions) if keep else -ahead :]
            del batch, leaf
    cuda.drain()
    for wanted, read in reads:
        assert_same(read, [wanted])
    for number, batch in received if keep else received[-ahead:]:
        assert_same(batch, batch_of(number))


@pytest.mark.parametrize("ahead", [1, 3])
def test_device_memory_is_bounded_however_far_the_host_runs_ahead(ahead):
    cuda = FakeCuda(ahead)
    for batch in loader_of(MapDataset(batch_of, 60), cuda=cuda, ahead=ahead):
        cuda.kernel(batch["image"], [])
        del batch
    assert cuda.bytes_allocated() <= (ahead + 2) * (4 * 3 * 5 * 4 + 2 * 8)


def test_a_batch_waits_for_its_own_copies_and_for_no_later_ones():
    cuda = FakeCuda(0)
    transfer = PlayedPrefetch(cuda=cuda).transfer()
    transfer.start()
    first, second = transfer.send(batch_of(0)), transfer.send(batch_of(1))
    batch = transfer.receive(first)
    side = cuda.streams[1]
    while not first.copied.is_set():
        assert side.queue[0]() is not False
        side.queue.popleft()
    while cuda.default.queue:  # what the consumer's stream waits for has happened
        assert cuda.default.queue[0]() is not False
        cuda.default.queue.popleft()
    assert not second.copied.is_set()
    assert_same(batch, batch_of(0))


LEAVES = {
    "transposed": torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2),
    "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.zeros(3, 1).expand(3, 4),
    "scalar": torch.tensor(5),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "bf16": torch.arange(6, dtype=torch.bfloat16),
}


class Wrapping(torch.Tensor):
    """A subclass that wraps another tensor and has no storage."""

    @staticmethod
    def __new__(cls, inner):
        wrapping = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapping.inner = inner
        return wrapping

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(function(args[0].inner, *args[1:], **(kwargs or {})))


def test_batches_arrive_as_by_to():
    for leaf in LEAVES.values():
        (got,) = delivered([leaf])
        assert_same(got, torch.empty_like(leaf).copy_(leaf))
    assert_same(delivered([Wrapping(torch.ones(2))])[0].inner, torch.ones(2))
    cuda = FakeCuda(0)
    boxes = tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(3, 4))
    (got,) = delivered([boxes], cuda)
    assert_same(got, boxes)
    assert (got.format, got.canvas_size) == (boxes.format, boxes.canvas_size)
    assert got.data_ptr() != boxes.data_ptr()
    assert cuda.pinned


def test_images_of_the_tail_in_a_batch_of_a_class_of_the_users_own():
    def sample(index):
        return F.normalize(F.to_tensor(noise(8, 9, 3, index)), [0.5], [0.2]), index

    class Batch(CustomBatch):
        def pin_memory(self):
            self.pinned = type(self.inputs)
            return self

    options = {"dataset": MapDataset(sample), "batch_size": 4, "collate_fn": Batch}
    cuda = FakeCuda(0)
    ours = list(DataLoader(**options, backend=PlayedPrefetch(cuda=cuda, tail=True)))
    cuda.drain()
    theirs = list(torch.utils.data.DataLoader(**options))
    assert {vars(batch).pop("pinned") for batch in ours} == {torch.Tensor}
    assert_same(ours, theirs)


SPARSE, FOR_HIDDEN = torch.eye(3).to_sparse(), FakeCuda(0)


class Hidden:
    """A batch whose tensors only its own ``to`` knows; keeps the stream of its copy."""

    __slots__ = ("stream",)

    def to(self, device):
        self.stream = FOR_HIDDEN.current_stream()
        return self


class PartlyHidden(Hidden):
    """One that holds a tensor, and another one or a sparse tensor."""

    def __init__(self, inner):
        self.inner, self.x = inner, torch.ones(2)


def test_memory_of_tensors_that_are_not_found_is_the_consumers_streams():
    """Else the next copy could overwrite them while a step still reads them."""
    objects = [Hidden(), *(PartlyHidden(inner) for inner in (Hidden(), SPARSE))]
    batch = {"graphs": objects, "x": torch.ones(2), "n": (1, "a")}
    got = delivered(batch, FOR_HIDDEN)
    assert all(each.stream is FOR_HIDDEN.default for each in got["graphs"])
    assert (got["x"].tolist(), got["n"]) == ([1.0, 1.0], (1, "a"))


def test_tensors_that_are_not_dense_are_not_recorded_on_a_stream():
    """record_stream has no kernel for them."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    batch, cuda = [torch.ones(2), nested, SPARSE], FakeCuda(0)
    recorded, used_on = [], cuda.used_on
    cuda.used_on = lambda leaf, stream: (recorded.append(leaf), used_on(leaf, stream))
    got = delivered(batch, cuda)
    assert all(mine is given for mine, given in zip(got[1:], batch[1:], strict=True))
    assert [leaf.tolist() for leaf in recorded] == [[1.0, 1.0]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_object_is_pinned_unless_a_device_has_some_of_it(device):
    """A remainder makes images on the device, beside labels on the host."""

    class Pinning:
        is_pinned = False

        def __init__(self):
            self.images, self.labels = torch.ones(2, device=device), torch.ones(2)

        def pin_memory(self):
            self.is_pinned = True
            return self

        def to(self, device):
            return self

    assert delivered(Pinning()).is_pinned is (device == "cpu")


# Devices on which something fails


def failing(call, error):
    """A device one of whose calls raises, each time anew."""

    def fails(*given):
        raise type(error)(*error.args)

    cuda = FakeCuda(0)
    setattr(cuda, call, fails)
    return cuda


def test_memory_that_cannot_be_pinned_is_one_warning():
    cuda = failing("pinned_like", RuntimeError("cudaHostAlloc: out of memory"))
    loader = loader_of(MapDataset(batch_of, 4), cuda=cuda)
    with pytest.warns(CapacityWarning, match="could not be pinned.*cudaHostAlloc") as caught:
        batches = list(loader)
    cuda.drain()
    assert_same(batches, [batch_of(number) for number in range(4)])
    assert len(caught) == 1


def test_out_of_device_memory_names_the_batch():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        delivered([torch.zeros(250_000)], failing("empty_like", error), ahead=3)
    assert "1.0 MB ([float32 250000])" in str(caught.value)


def test_an_error_of_the_device_or_its_thread_comes_to_the_loop():
    data = TensorDataset(torch.arange(4))
    asserted = failing("copy", torch.AcceleratorError("CUDA error: device-side assert triggered"))
    loader = DataLoader(data, backend=PlayedPrefetch(cuda=asserted))
    with pytest.raises(torch.AcceleratorError, match="device-side assert") as caught:
        next(iter(loader))
    first, second = caught.value.__notes__
    assert first == "dataloaders: while batch 1 of this epoch was copied ahead"
    assert "the training step may have caused this one" in second
    unusable = failing("enter_thread", RuntimeError("no such device"))
    loader = DataLoader(data, backend=PlayedPrefetch(cuda=unusable))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such device"):
            next(iter(loader))


def test_devices_without_streams_get_copies_and_no_device_none():
    batch = batch_of(1)
    for device, kind in ((None, "cpu"), ("meta", "meta")):
        options = {"backend": "prefetch", "device": device, "collate_fn": lambda batch: batch}
        (got,) = DataLoader([batch], batch_size=None, **options)
        assert got["image"].device.type == kind
        assert (got is batch) == (device is None)

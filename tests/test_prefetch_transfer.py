"""Copies, events and memory of the prefetcher, on a played device that reorders all it may."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.prefetch.cuda import dense_parts
from backends.prefetch.transfer import CudaTransfer, PlainTransfer
from helpers.compare import assert_same
from helpers.fake_cuda import FakeCuda


def batch_of(number: int, samples: int = 4) -> dict[str, Any]:
    image = torch.full((samples, 3, 5), float(number)).add_(torch.arange(5.0))
    return {"image": image, "meta": (torch.tensor([number, 7]), f"name {number}")}


def play(
    *,
    seed: int,
    actions: list[int],
    ahead: int,
    reuse: bool,
    pins: bool | None,
    streams: int,
    keep: bool,
) -> tuple[FakeCuda, list[Any], list[list[torch.Tensor]], list[dict[str, Any]]]:
    """Send and receive in the order that ``actions`` says, the device running behind at random.

    What was received, what each step read of its batch when the device came to it, and what it
    should have read. With ``reuse`` each step reads the batches before it once more, and that is
    checked here.
    """
    cuda = FakeCuda(seed)
    transfer = CudaTransfer(cuda, ahead=ahead, reuse=reuse, pins=pins)  # type: ignore[arg-type]
    consumers = [cuda.default, *(cuda.stream() for _ in range(streams - 1))]
    on_the_way: list[Any] = []
    received: list[Any] = []
    reads: list[list[torch.Tensor]] = []
    rereads: list[tuple[int, list[torch.Tensor]]] = []
    permits, sent = transfer.permits, 0
    transfer.start()
    for action in actions:
        cuda.progress(action % 4)
        if action % 2 and permits:
            host = batch_of(sent)
            on_the_way.append(transfer.send(host))
            host["image"].fill_(-1)  # the loader may do what it likes with it from here on
            sent += 1
            permits -= 1
        elif on_the_way:
            with cuda.on(consumers[action % len(consumers)]):
                batch = transfer.receive(on_the_way.pop(0))
                permits += 1
                reads.append([])
                cuda.kernel(batch["image"], reads[-1])
                cuda.kernel(batch["meta"][0], reads[-1])
                if reuse:  # the ones before are valid still, and may be read on this stream
                    for position in range(max(0, len(received) - ahead + 1), len(received)):
                        again: list[torch.Tensor] = []
                        cuda.kernel(received[position]["image"], again)
                        rereads.append((position, again))
            received.append(batch if keep or reuse else None)
            del batch
    cuda.drain()
    for position, again in rereads:
        assert_same(again, [batch_of(position)["image"]])
    return cuda, received, reads, [batch_of(number) for number in range(len(reads))]


ACTIONS = st.lists(st.integers(0, 99), min_size=10, max_size=120)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    actions=ACTIONS,
    ahead=st.integers(1, 4),
    pins=st.booleans(),
    streams=st.integers(1, 3),
    keep=st.booleans(),
)
def test_what_the_step_reads_is_its_own_batch(seed, actions, ahead, pins, streams, keep):
    _cuda, received, reads, expected = play(
        seed=seed,
        actions=actions,
        ahead=ahead,
        reuse=False,
        pins=pins,
        streams=streams,
        keep=keep,
    )
    for read, wanted in zip(reads, expected, strict=True):
        assert_same(read, [wanted["image"], wanted["meta"][0]])
    if keep:
        assert_same(received, expected)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    actions=ACTIONS,
    ahead=st.integers(1, 4),
    pins=st.booleans(),
    streams=st.integers(1, 3),
)
def test_static_buffers_hold_a_batch_until_ahead_more_were_taken(
    seed, actions, ahead, pins, streams
):
    _cuda, received, reads, expected = play(
        seed=seed,
        actions=actions,
        ahead=ahead,
        reuse=True,
        pins=pins,
        streams=streams,
        keep=True,
    )
    valid = received[-ahead:]
    addresses = {batch["image"].data_ptr() for batch in received}
    for read, wanted in zip(reads, expected, strict=True):
        assert_same(read, [wanted["image"], wanted["meta"][0]])
    assert_same(valid, expected[len(expected) - len(valid) :])
    assert len(addresses) <= ahead + min(ahead, 2)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), ahead=st.integers(1, 4), reuse=st.booleans())
def test_device_memory_is_bounded_however_far_the_host_runs_ahead(seed, ahead, reuse):
    actions = [1, 0] * 60
    cuda, *_ = play(
        seed=seed, actions=actions, ahead=ahead, reuse=reuse, pins=True, streams=1, keep=False
    )
    batch = 4 * 3 * 5 * 4 + 2 * 8
    assert cuda.bytes_allocated() <= (ahead + 2) * batch


def test_a_batch_waits_for_its_own_copies_and_for_no_later_ones():
    cuda = FakeCuda(0)
    transfer = CudaTransfer(cuda, ahead=2, pins=True)  # type: ignore[arg-type]
    transfer.start()
    first, second = transfer.send(batch_of(0)), transfer.send(batch_of(1))
    batch = transfer.receive(first)
    side = cuda.streams[1]
    while not first.copied.happened:
        assert side.queue[0]()
        side.queue.popleft()
    assert not second.copied.happened
    while cuda.default.queue:  # what the consumer's stream waits for has happened
        assert cuda.default.queue[0]()
        cuda.default.queue.popleft()
    assert_same(batch, batch_of(0))


def test_pinned_memory_is_pinned_once_for_many_batches():
    cuda = FakeCuda(0)
    transfer = CudaTransfer(cuda, ahead=2, pins=True)  # type: ignore[arg-type]
    transfer.start()
    for number in range(50):
        assert_same(transfer.receive(transfer.send(batch_of(number))).keys(), batch_of(0).keys())
    assert cuda.calls.count("pin") == 2


def test_a_larger_batch_gets_a_larger_buffer():
    cuda = FakeCuda(0)
    for reuse in (False, True):
        transfer = CudaTransfer(cuda, ahead=1, pins=True, reuse=reuse)  # type: ignore[arg-type]
        transfer.start()
        for samples in (2, 9, 1, 40, 3):
            got = transfer.receive(transfer.send(batch_of(samples, samples)))
            cuda.drain()
            assert_same(got, batch_of(samples, samples))


def test_a_batch_that_is_pinned_is_not_staged():
    cuda = FakeCuda(0)
    transfer = CudaTransfer(cuda, ahead=1, pins=True)  # type: ignore[arg-type]
    transfer.start()
    pinned = cuda.pinned(64).view(torch.float32).fill_(3)
    before = cuda.calls.count("pin")
    got = transfer.receive(transfer.send([pinned]))
    cuda.drain()
    assert cuda.calls.count("pin") == before
    assert_same(got, [torch.full((16,), 3.0)])


@pytest.mark.parametrize("reuse", [False, True])
def test_an_epoch_broken_off_leaves_the_next_one_whole(reuse):
    cuda = FakeCuda(1)
    transfer = CudaTransfer(cuda, ahead=3, pins=True, reuse=reuse)  # type: ignore[arg-type]
    for epoch in range(5):
        transfer.start()
        waiting = [transfer.send(batch_of(number)) for number in range(transfer.permits)]
        for number in range(epoch):
            if waiting:
                read: list[torch.Tensor] = []
                batch = transfer.receive(waiting.pop(0))
                cuda.kernel(batch["image"], read)
                waiting.append(transfer.send(batch_of(number + transfer.permits)))
                cuda.drain()
                assert_same(read, [batch_of(number)["image"]])


def test_pinning_is_measured_on_the_first_large_batches():
    cuda = FakeCuda(0)
    transfer = CudaTransfer(cuda, ahead=1)  # type: ignore[arg-type]
    transfer.start()
    transfer.receive(transfer.send(batch_of(0)))
    assert transfer.pins is None  # far too small to tell
    large = torch.zeros(1 << 18)
    for _ in range(12):
        transfer.receive(transfer.send([large]))
    assert transfer.pins in (True, False)


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(24.0).reshape(2, 3, 4).transpose(1, 2),
        torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(3, 1).expand(3, 4),
        torch.tensor(5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.arange(6, dtype=torch.bfloat16),
    ],
    ids=["transposed", "channels_last", "expanded", "scalar", "empty", "bool", "complex", "bf16"],
)
@pytest.mark.parametrize("reuse", [False, True])
def test_strides_and_dtypes_are_those_of_to(leaf, reuse):
    cuda = FakeCuda(0)
    transfer = CudaTransfer(cuda, ahead=1, pins=True, reuse=reuse)  # type: ignore[arg-type]
    transfer.start()
    (got,) = transfer.receive(transfer.send([leaf]))
    cuda.drain()
    like = torch.empty_like(leaf)
    assert got.stride() == like.stride()
    assert_same(got, like.copy_(leaf))


class OutOfRoom(FakeCuda):
    def empty_like(self, leaf: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def test_out_of_device_memory_names_the_batch_and_ahead():
    transfer = CudaTransfer(OutOfRoom(0), ahead=3, pins=True)  # type: ignore[arg-type]
    transfer.start()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        transfer.send([torch.zeros(250_000)])
    text = str(caught.value)
    assert "1.0 MB ([float32 250000])" in text
    assert "ahead=3" in text
    assert "lower ahead" in text
    assert "Tried to allocate 1 GiB" in text


class OutOfRoomForLarge(FakeCuda):
    def empty_like(self, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.numel() > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().empty_like(leaf)


def test_a_batch_without_room_takes_no_static_buffer_with_it():
    cuda = OutOfRoomForLarge(0)
    transfer = CudaTransfer(cuda, ahead=1, pins=True, reuse=True)  # type: ignore[arg-type]
    transfer.start()
    received = []
    for _ in range(6):
        received.append(transfer.receive(transfer.send([torch.ones(4), torch.ones(4)])))
        with pytest.raises(torch.OutOfMemoryError):
            transfer.send([torch.ones(4), torch.ones(1000)])
    cuda.drain()
    assert len({batch[0].data_ptr() for batch in received}) <= 2


def test_a_plain_transfer_changes_nothing_unless_a_device_is_given():
    batch = batch_of(1)
    plain = PlainTransfer(None, 2)
    assert plain.receive(plain.send(batch)) is batch
    meta = PlainTransfer(torch.device("meta"), 2)
    assert meta.receive(meta.send(batch))["image"].device.type == "meta"


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr]
)
def test_the_memory_of_a_sparse_tensor_is_that_of_its_parts(layout: torch.layout) -> None:
    blocks = (2, 2) if layout is torch.sparse_bsr else None
    sparse = torch.eye(4).to_sparse(layout=layout, blocksize=blocks)
    parts = dense_parts(sparse)
    assert all(part.layout is torch.strided for part in parts)
    own = {torch.eye(4).dtype, torch.int64}
    assert {part.dtype for part in parts} == own
    assert sum(part.numel() for part in parts if part.dtype.is_floating_point) >= 4


def test_the_memory_of_other_tensors_is_their_own() -> None:
    dense = torch.eye(4)
    assert dense_parts(dense) == (dense,)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert dense_parts(nested)[0] is nested

"""A loader whose workers run the user's dataset and collate_fn on stand-ins.

recording_changes(loader) ──> dataset, collate_fn, worker_init_fn for a view of it
batch                     ──> a RecordedBatch; the user's own, if no stand-in is left
an error on stand-ins     ──> the generators' states put back, the batch asked for again, for real;
                              if that works, this worker does not record any more
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind, get_worker_info

from dataloaders.batches.collation import fetched
from dataloaders.batches.tree import map_children
from dataloaders.batches.whole import ShowsDataset
from dataloaders.recording import hooks, tensor
from dataloaders.recording.context import Recorder, is_users, recorder, recording
from dataloaders.recording.posing import posed
from dataloaders.recording.program import Again, is_image, mapped, pack
from dataloaders.recording.ring import FileRing, segment
from dataloaders.recording.tail import Trailing, trailing
from dataloaders.seeding.states import restore, states_now

_log = logging.getLogger(__name__)


def recording_changes(loader: Any, upto: str = "files") -> dict[str, Any]:
    """Return the changes that make a view of ``loader`` send recorded batches.

    Args:
        loader: as torch would iterate it; under ``seed=``, the seeded view.
        upto: "files": encoded bytes travel, as a `RecordedBatch`. "tail": the dataset's own code
            runs up to the steps that make floats of bytes, and a `Trailing` stands for an image.
    """
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return {}  # torch seeds their shuffles by their class
    streams = loader._dataset_kind == _DatasetKind.Iterable
    dataset, collate_fn, _ = recorded(loader.dataset, loader.collate_fn, upto, streams=streams)
    if upto == "files" and loader.num_workers:
        # Beside those of its queue: the one that is replayed, the one that is written, a spare.
        collate_fn.ring = FileRing(loader.num_workers, loader.prefetch_factor + 3)
    init = ShowsDataset(loader.worker_init_fn)
    return {"dataset": dataset, "collate_fn": collate_fn, "worker_init_fn": init}


def recorded(
    dataset: Any, collate_fn: Callable[[Any], Any], upto: str, *, streams: bool = False
) -> tuple[Any, _Collate, State]:
    """Return ``dataset`` and ``collate_fn`` as workers use them that record, and their notes."""
    state = State(upto == "tail")
    kind = _Stream if streams else _Map
    return kind(dataset, state), _Collate(collate_fn, state), state


def ask_again(again: Again, collate_fn: Callable[[Any], Any], batched: bool, dataset: Any) -> Any:
    """Return a batch as a loader of ``dataset`` makes it without recording, with equal draws.

    The generators are left as the dataset leaves them.

    Raises:
        Exception: the dataset's own.
    """
    restore(again.states)
    (made,) = fetched(_DatasetKind.Map, dataset, batched, collate_fn, again.keys)
    return made


class State:
    """This process's recording.

    Attributes:
        tail: whether only tails are recorded.
        stopped: why nothing is recorded any more.
        looks: what needed values in the dataset's code, of the last batch.
    """

    def __init__(self, tail: bool) -> None:
        self.tail = tail
        self.stopped: str | None = None
        self.looks: list[str] = []

    def ready(self) -> bool:
        """Whether to record; hooks what has been imported by now."""
        if self.stopped is None:
            hooks.install()
            self.stopped = None if self.tail else hooks.obstacle()  # to Pillow's stand-ins
        return self.stopped is None

    def for_real(self, again: Again, make: Callable[[], Any], error: Exception | None) -> Any:
        """Return what ``make`` makes without recording, from the same states.

        With an ``error``, which recording may have caused, nothing is recorded any more.

        Raises:
            Exception: the dataset's own, made without recording, too.
        """
        restore(again.states)
        made = make()
        if error is None:
            return made
        lines = [
            f" at {frame.f_code.co_filename}:{line}"
            for frame, line in traceback.walk_tb(error.__traceback__)
            if is_users(frame)
        ]
        text = " ".join(str(error).split())[:200]
        self.stopped = f"{type(error).__name__}: {text}{''.join(lines[-1:])}"
        _log.info("recording stopped: %s", self.stopped)
        return made


class _Taken(NamedTuple):
    """Samples (or one) on their way to collation; ``own`` is None if they are real."""

    samples: Any
    own: Recorder | None
    again: Again | None
    fetch: Callable[[], Any] | None


class _Map:
    """A map dataset that records."""

    def __init__(self, dataset: Any, state: State) -> None:
        self.dataset = dataset
        self._state = state

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> _Taken:
        return self._taken(key, lambda: self.dataset[key])

    def __getitems__(self, keys: Any) -> _Taken:
        bulk = getattr(self.dataset, "__getitems__", None)
        if bulk:
            return self._taken(keys, lambda: bulk(keys))
        return self._taken(keys, lambda: [self.dataset[key] for key in keys])

    def _taken(self, keys: Any, fetch: Callable[[], Any]) -> _Taken:
        if not self._state.ready():
            return _Taken(fetch(), None, None, None)
        own, again = Recorder(tail=self._state.tail), Again(keys, states_now())
        error = None
        try:
            with recording(own):
                samples = fetch()
        except Exception as raised:
            if not own.sources:
                raise  # without a stand-in, it is the dataset's
            error = raised
        # If it failed, the dataset has caught that, after other draws than its own.
        if error is None and not own.failed:
            return _Taken(samples, own, again, fetch)
        try:  # out of the handler: the dataset's own error has no other one as its context
            return _Taken(self._state.for_real(again, fetch, error), None, None, None)
        finally:
            del error  # its traceback holds this frame


class _Stream:
    """An iterable dataset that records."""

    def __init__(self, dataset: Any, state: State) -> None:
        self.dataset = dataset
        self._state = state

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[_Taken]:
        samples = None
        while True:
            own = Recorder(tail=self._state.tail) if self._state.ready() else None
            try:
                with recording(own):
                    samples = iter(self.dataset) if samples is None else samples
                    sample = next(samples)
            except StopIteration:
                return
            yield _Taken(sample, own, None, None)


class _Collate:
    """The user's collate_fn, run on stand-ins.

    Attributes:
        ring: memory for the files of a batch; None: a new segment for each.
    """

    ring: FileRing | None = None

    def __init__(self, collate_fn: Callable[[Any], Any], state: State) -> None:
        self._collate_fn = collate_fn
        self._state = state

    def __call__(self, taken: Any) -> Any:
        """Return the batch, recorded."""
        if isinstance(taken, list):  # an iterable's samples, each on its own
            own = taken[-1].own
            if own is not None:
                own.sources = sum(each.own.sources for each in taken if each.own)
            taken = _Taken([each.samples for each in taken], own, None, None)
        samples, own, again, fetch = taken
        if own is None:
            return self._collate_fn(samples)
        before = again or Again(None, states_now())
        try:
            self._state.looks = own.looks
            with recording(own):
                return self._packed(self._collate_fn(samples), again)
        except Exception as raised:
            if not own.sources:
                raise  # without a stand-in, it is the collate_fn's
            error = raised
        fetched = fetch or (lambda: mapped(samples, _real))
        try:
            return self._state.for_real(before, lambda: self._collate_fn(fetched()), error)
        finally:
            del error

    def _packed(self, batch: Any, again: Again | None) -> Any:
        if self._state.tail:
            return mapped(batch, _with_tail)
        return pack(batch, _sent, again, self._memory)

    def _memory(self, size: int) -> torch.Tensor:
        in_ring = None if self.ring is None else self.ring.memory(size)
        return _memory(size) if in_ring is None else in_ring


def _sent(value: Any) -> Any:
    """Return the step of a stand-in, if replaying it gives all there is; else the value itself."""
    if isinstance(value, tensor.Recorded):
        return value._node if value._real is None else value._real
    if is_image(value):
        from dataloaders.recording import image

        if isinstance(value, image.Recorded):
            node = image.node_of(value)
            plain = posed(type(value)).__name__ == "Image" and not vars(value).get("_touched")
            if node is not None and plain:
                return node
            image.materialise(value, "its class or info")
    return _real(value)


def _real(value: Any) -> Any:
    """Return a stand-in's tensor, the image that it has become, or an object that holds such ones.

    An object of an unknown class is sent as it is, by a thread that drops what it cannot pickle.
    """
    if isinstance(value, tensor.Recorded):
        return tensor.materialise(value, "collation")
    if is_image(value):
        value.im  # noqa: B018  # decodes
        return value
    for name, held in getattr(value, "__dict__", {}).items():
        if isinstance(held, (torch.Tensor, list, tuple, dict)) or is_image(held):
            made = mapped(held, _real)
            if isinstance(held, tensor.Recorded):
                vars(value)[name] = made
    return value


def _with_tail(value: Any) -> Any:
    """Return a stand-in's bytes with the steps that are left, or its tensor; others as they are."""
    if not isinstance(value, tensor.Recorded):
        return _real(value)
    if value._real is None:
        found = trailing(value._node, _memory)
        if isinstance(found, Trailing):
            return found
        if (own := recorder()) is not None:
            own.looks.append(f"{found}, after they are made")
    with recording(None):
        real = tensor.materialise(value, "")
    return Trailing(real, ()) if real.is_floating_point() and real.ndim > 2 else real


def _memory(size: int) -> torch.Tensor:
    """Return new memory that a worker's queue sends without a copy."""
    if get_worker_info():
        return segment(size)
    return torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is


def equal(one: Any, other: Any, *, strides: bool = True) -> bool:
    """Whether two samples or batches are equal: types, values and, if wanted, strides."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        same = same and (not strides or one.stride() == other.stride())
        if same and one.dtype.itemsize == 1:  # torch compares no float8
            return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))
        return same and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    children: tuple[list[Any], list[Any]] = [], []
    for value, found in zip((one, other), children, strict=True):
        map_children(value, found.append)
    if any(children):
        same = len(children[0]) == len(children[1])
        same = same and (not isinstance(one, Mapping) or list(one) == list(other))
        return same and all(equal(*pair, strides=strides) for pair in zip(*children, strict=True))
    same = one == other
    return type(one).__eq__ is cast(Any, object.__eq__) or bool(same)

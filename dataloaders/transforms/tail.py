"""The device tail: ToTensor and Normalize, once a batch, after the copy.

    before  dataset: decode, augment, ToTensor, Normalize ──float32──> collate ──> copy ──> step
    after   dataset: decode, augment ──uint8──> collate ──> copy ──> Tail.apply ──float──> step

A quarter of the bytes is collated, sent by the workers and copied. The result is what the dataset's
own transforms make, to the bit, or there is no tail and `NoTail` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from dataloaders.backend import Remainder
from dataloaders.batches.tree import Batch, map_tensors
from dataloaders.errors import BackendUnavailable, OptionError
from dataloaders.observing import Unobserved, held, observe
from dataloaders.transforms.find import Copies, Found, NotCopyable, find_chains, open_files_of
from dataloaders.transforms.proof import Batching, Proof, prove, told
from dataloaders.transforms.read import Member
from dataloaders.transforms.table import Table, same_bits, tables_of
from dataloaders.transforms.trailing import Deferred, arithmetic_of, deferred_chain, trailing
from dataloaders.transforms.ways import Way, way_for

__all__ = ["Fill", "NoTail", "Tail", "device_tail"]

Fill: TypeAlias = Callable[[torch.Tensor, Way, torch.Tensor], bool]
"""Fill the last tensor with what the way makes of the images of the first one, or return False."""

_FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last)


@dataclass(frozen=True)
class NoTail:
    """There is no device tail.

    Attributes:
        reason: what stands in the way, and what to do about it.
    """

    reason: str


def device_tail(
    loader: DataLoader[Any],
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
    observe: Callable[[DataLoader[Any], Callable[[Any], Any]], Any] = observe,
) -> Tail | NoTail:
    """Return a `Tail` proved on this loader's own samples, or `NoTail` with the reason.

    Reads up to four samples of the dataset twice (up to sixteen where the dataset's code is not
    torchvision's, within about two seconds), in a process of its own (`dataloaders.observing`).
    Nothing in this process changes.

    Args:
        loader: any torch DataLoader over a dataset with torchvision transforms, v1 or v2.
        dtype: a float dtype for the images, each value rounded to it once; None: the dataset's.
        memory_format: ``torch.channels_last`` or ``torch.contiguous_format`` for batches of
            images [N, C, H, W]; ``torch.preserve_format``: as the dataset's own batches are.
        observe: runs the proof; another function than `dataloaders.observing.observe` where the
            dataset runs no code but torchvision's.

    Raises:
        OptionError: for a ``dtype`` that is no float dtype, or another ``memory_format``.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype={dtype!r}: images become floats; give a float dtype or None")
    if memory_format not in _FORMATS:
        known = ", ".join(map(str, _FORMATS))
        raise OptionError(f"memory_format={memory_format!r}: it must be one of {known}")
    try:
        return _device_tail(loader, dtype, memory_format, observe)
    except NotCopyable as error:
        return NoTail(str(error))
    except Exception as error:  # a loader may hold anything; without a tail it works as before
        name = type(getattr(loader, "dataset", None)).__name__
        return NoTail(f"the transforms of {name} could not be read: {told(error)}")


class Tail(Remainder):
    """What a device does of a dataset's transforms; made by `device_tail`.

    Attributes:
        exact: whether the images are the dataset's own to the bit: always, unless a ``dtype``
            asks for another one.
        largest_difference: between an image value and the dataset's own, over every byte and
            channel; 0.0 if ``exact``.
        bytes_saved: a sample, on every way that it takes: between processes, to the device.
        samples_read: for the proof.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        moved: _Moved,
        proof: Proof,
        dtype: torch.dtype | None,
        memory_format: torch.memory_format,
    ) -> None:
        self._dataset = loader.dataset
        self._collate_fn = loader.collate_fn
        self._moved = moved
        self._copies = Copies(loader.dataset, moved.replace)
        self._proof = proof
        self._dtype = dtype
        self._memory_format = memory_format
        self._ways: dict[tuple[torch.device, int], Way] = {}
        self.bytes_saved = proof.bytes_saved
        self.samples_read = proof.samples
        tables = list(moved.tables.values())
        self._float_dtype = tables[0].values.dtype
        self.exact = all(dtype in (None, table.values.dtype) for table in tables)
        self.largest_difference = max(_difference(table.values, dtype) for table in tables)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that applies it needs no dataset; one that is open could not be sent to it.
        return {**self.__dict__, "_dataset": None, "_collate_fn": None, "_copies": None}

    def changes(self, loader: DataLoader[Any]) -> dict[str, Any] | None:
        """Return what `view_of` takes for this epoch; None if ``loader`` is not what was proved.

        Call it at each ``iter()``: it copies attributes that were assigned on the dataset since
        (an epoch, a strength). After None, ask `device_tail` again.
        """
        if loader.dataset is not self._dataset or loader.collate_fn is not self._collate_fn:
            return None
        if not self._moved.is_current(find_chains(loader.dataset)):
            return None
        self._copies.refresh()
        return {"dataset": self._copies.dataset}

    def prepare(self, device: torch.device) -> None:
        """Try the arithmetic on ``device`` now (which waits for the device)."""
        for channels in self._moved.tables:
            self._way(device, channels)

    def apply(
        self,
        batch: Batch,
        *,
        move: Callable[[Batch], Batch] = lambda batch: batch,
        empty_like: Callable[..., torch.Tensor] = torch.empty_like,
        fill: Fill | None = None,
    ) -> Batch:
        """Return the batch that the dataset's own transforms would make.

        The same nesting, in new containers. Each uint8 image [..., C, H, W] becomes a float tensor
        of that shape, on the same device, written on the current stream; other leaves are the
        same objects. Runs none of the user's code.

        Args:
            batch: what the loader gave with `changes`.
            move: copies it to the device first.
            empty_like: makes the float tensors, called with a uint8 tensor and ``dtype=``.
            fill: tried first to fill them, where a tensor of ``batch`` only stands for images.

        Raises:
            BackendUnavailable: it has no image: a dataset may work on the images of some samples
                only, none of which was among those of the proof.
        """
        count, images = -1, 0

        def convert(leaf: torch.Tensor) -> torch.Tensor:
            nonlocal count, images
            count += 1
            if not self._is_image(leaf, count):
                return leaf
            images += 1
            return self._converted(leaf, empty_like, fill)

        converted = map_tensors(move(batch), convert)
        if not images or (self._proof.leaves or count + 1) != count + 1:
            raise BackendUnavailable(
                f"a batch holds {images} uint8 images among {count + 1} tensors, which is not what "
                "the device tail was proved for: the dataset or its collate_fn works on images "
                "after the transform, for some samples; turn it off: Prefetch(tail=False)"
            )
        return converted

    def describe(self) -> str:
        """Return one sentence: what moved, what it saves, and how it was proved."""
        names = ", ".join(member.name for member in self._moved.run)
        sentence = (
            f"{names} once a batch on the device ({self._moved.run[0].where} and after): "
            f"{self.bytes_saved} bytes a sample less to collate and copy, "
            f"equal to the bit on {self.samples_read} samples of this dataset"
        )
        if not self.exact:
            dtype = str(self._dtype).removeprefix("torch.")
            sentence += f"; then rounded to {dtype}, at most {self.largest_difference:.2g} off"
        return sentence

    def _is_image(self, leaf: torch.Tensor, position: int) -> bool:
        if self._proof.positions is not None:
            return position in self._proof.positions
        return leaf.dtype is torch.uint8 and leaf.ndim >= 3

    def _converted(
        self, leaf: torch.Tensor, empty_like: Callable[..., torch.Tensor], fill: Fill | None
    ) -> torch.Tensor:
        bytes_ = leaf.as_subclass(torch.Tensor)
        if bytes_.ndim == 4 and self._memory_format is not torch.preserve_format:
            bytes_ = bytes_.contiguous(memory_format=self._memory_format)
        way = self._way(bytes_.device, bytes_.shape[-3])
        out = empty_like(bytes_, dtype=self._dtype or self._float_dtype)
        if fill is None or not fill(leaf, way, out):
            way.run(bytes_, out)
        kind = self._proof.classes.get(type(leaf), torch.Tensor)
        return out if kind is torch.Tensor else out.as_subclass(kind)

    def _way(self, device: torch.device, channels: int) -> Way:
        way = self._ways.get((device, channels))
        if way is None:
            table = self._moved.tables.get(channels)
            if table is None:
                raise BackendUnavailable(
                    f"a batch holds a uint8 image of {channels} channels, and the device tail "
                    f"knows {', '.join(map(str, self._moved.tables))}; turn it off: "
                    "Prefetch(tail=False)"
                )
            way = way_for(table, self._dtype or table.values.dtype, device)
            self._ways[device, channels] = way
        return way


class _Moved:
    """Chains of a dataset whose trailing runs make the same of every byte."""

    def __init__(self, found: Found, run: tuple[Member, ...]) -> None:
        self.run = run
        self.tables, self.channels = tables_of(arithmetic_of(run))
        self._runs = [(found, run)]

    @property
    def places(self) -> list[str]:
        """Return the places of its chains."""
        return [found.where for found, _ in self._runs]

    def join(self, other: _Moved) -> bool:
        """Take over the chains of ``other`` if its tables are the same."""
        same = _same_tables(self.tables, other.tables) and self.channels == other.channels
        self._runs += other._runs if same else []
        return same

    def replace(self, chain: Any) -> Any:
        """Return ``chain`` without its run, if it is one of these; else ``chain``."""
        for found, run in self._runs:
            if found.chain is chain:
                deferred = Deferred([member.transform for member in run], self.channels)
                return deferred_chain(chain, found.members, deferred)
        return chain

    def is_current(self, now: list[Found]) -> bool:
        """Return whether the chains are the same objects as before, and make the same."""
        members = {id(found.chain): found.members for found in now}
        for found, run in self._runs:
            known = members.get(id(found.chain), ())
            if [id(m.transform) for m in known] != [id(m.transform) for m in found.members]:
                return False
            if not _same_tables(tables_of(arithmetic_of(run))[0], self.tables):
                return False
        return True


def _device_tail(
    loader: DataLoader[Any],
    dtype: torch.dtype | None,
    memory_format: torch.memory_format,
    observe: Callable[[DataLoader[Any], Callable[[Any], Any]], Any],
) -> Tail | NoTail:
    dataset: Any = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, (IterableDataset, MapDataPipe)):
        return NoTail(f"{name} has no samples by index on which a device tail could be proved")
    chains = find_chains(dataset)
    if not chains:
        return NoTail(_nothing_found(dataset))
    moved, reasons = _candidates(chains)
    if not moved:
        return NoTail(reasons[0])
    try:
        empty = not len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        empty = True
    if empty:
        return NoTail(f"{name} has no len() or no samples, so that nothing could be proved on it")
    batched = loader.batch_sampler is not None
    batching = Batching(loader.collate_fn, loader.batch_size, batched)
    try:
        proved = observe(loader, partial(_proved, batching))
    except Unobserved as error:
        return NoTail(str(error))
    if isinstance(proved, str):
        return NoTail(proved)
    number, places, proof = proved
    if number >= len(moved) or moved[number].places != places:
        return NoTail(
            f"worker_init_fn gives {name} other transforms in a worker; assign them before the "
            "loader is iterated"
        )
    return Tail(loader, moved[number], proof, dtype, memory_format)


def _proved(batching: Batching, dataset: Any) -> tuple[int, list[str], Proof] | str:
    """Return which candidate was proved and the places of its chains, or why none was."""
    reason = ""
    open_files_of(dataset)
    for number, candidate in enumerate(_candidates(find_chains(dataset))[0]):
        try:
            rewritten = Copies(dataset, candidate.replace).dataset
        except NotCopyable as error:
            return str(error)
        proof = prove(batching, dataset, rewritten, _on_cpu(candidate.tables))
        if isinstance(proof, Proof):
            return number, candidate.places, proof
        reason = proof
    return reason


def _candidates(chains: Iterable[Found]) -> tuple[list[_Moved], list[str]]:
    moved: list[_Moved] = []
    reasons: list[str] = []
    for found in chains:
        run = trailing(found.members)
        if isinstance(run, str):
            reasons.append(run)
            continue
        candidate = _Moved(found, run)
        if not candidate.tables:
            reasons.append(f"{run[0]} and after could not be run on an image of 1 to 4 channels")
        elif not any(earlier.join(candidate) for earlier in moved):
            moved.append(candidate)
    return moved, reasons


def _on_cpu(tables: dict[int, Table]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    ways = {c: way_for(t, t.values.dtype, torch.device("cpu")) for c, t in tables.items()}

    def convert(leaf: torch.Tensor) -> torch.Tensor | None:
        if not leaf.is_cpu or leaf.ndim < 3 or leaf.shape[-3] not in ways:
            return None
        bytes_ = leaf.as_subclass(torch.Tensor)
        out = torch.empty_like(bytes_, dtype=tables[bytes_.shape[-3]].values.dtype)
        ways[bytes_.shape[-3]].run(bytes_, out)
        return out

    return convert


def _same_tables(one: dict[int, Table], other: dict[int, Table]) -> bool:
    return one.keys() == other.keys() and all(
        same_bits(one[channels].values, other[channels].values) for channels in one
    )


def _difference(values: torch.Tensor, dtype: torch.dtype | None) -> float:
    off = (values.to(dtype or values.dtype).double() - values.double()).abs().nan_to_num(0.0)
    return float(off.max())


def _nothing_found(dataset: Any) -> str:
    name = type(dataset).__name__
    transform = held(dataset, "transform") or held(dataset, "transforms")
    if transform is None:
        return f"{name} holds no torchvision transform in any attribute"
    called = getattr(transform, "__name__", type(transform).__name__)
    return (
        f"the transform of {name} is {called}, which is not a torchvision Compose; make it one "
        "that ends in ToTensor and Normalize"
    )

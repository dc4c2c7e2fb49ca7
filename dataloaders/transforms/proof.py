"""Prove on samples of the dataset itself that two ways of making batches are equal to the bit.

    dataset ──> samples ──collate_fn──> batch ─────────────────────────┐
                                                                       equal, leaf by leaf?
    its copy ─> samples ──collate_fn──> batch ──uint8 leaves by table──┘

Both ways see the same random states, in the process in which the dataset is observed. A collate_fn
that is not torch's is also tried with images of different sizes (padding with zeros differs before
Normalize and after) and with other random numbers (mixing images only now and then).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch.utils.data._utils.collate import default_collate, default_convert

from dataloaders.batches.tree import Batch, leaves, map_tensors
from dataloaders.transforms.find import find_generators
from dataloaders.transforms.read import is_chain
from dataloaders.transforms.table import same_bits

__all__ = ["Batching", "Convert", "Proof", "prove", "told"]

Convert: TypeAlias = Callable[[torch.Tensor], "torch.Tensor | None"]
"""A uint8 leaf -> what the run makes of it, as a plain tensor; None if it is no such image."""

_INDICES = 4
_SEEDS_OF_UNKNOWN_CODE = 4
_COLLATIONS = 16
_SECONDS = 2.0
"""After this long no further seeds are tried; every index is read once all the same."""


@dataclass
class Proof:
    """What was found to be equal, and where the images are.

    Attributes:
        samples: how many samples were read each way.
        bytes_saved: by one sample.
        classes: class of a uint8 leaf -> class of the float leaf in its place.
        positions: which leaves of a batch are images, by their order; None if every uint8 leaf
            of three or more dimensions is one.
        leaves: leaves in each batch; None where this number depends on the batch.
    """

    samples: int = 0
    bytes_saved: int = 0
    classes: dict[type, type] = field(default_factory=dict)
    positions: frozenset[int] | None = None
    leaves: int | None = None


class Batching(NamedTuple):
    """How a loader makes batches of samples, without the loader.

    Attributes:
        collate_fn: the loader's.
        batch_size: the loader's; None with a batch sampler of the user's own.
        batched: whether samples are collated several at a time.
    """

    collate_fn: Callable[[Any], Any]
    batch_size: int | None
    batched: bool


class _Different(Exception):
    """The two ways differ; the message says in what."""


class _Looks(NamedTuple):
    """How many leaves a batch has, and the places of images and of other uint8 leaves like them."""

    total: int
    images: frozenset[int]
    others: frozenset[int]


def prove(batching: Batching, original: Any, rewritten: Any, convert: Convert) -> Proof | str:
    """Return a `Proof`, or say what stands in the way.

    Reads a few samples of both datasets and moves the process-wide generators and those of the
    datasets: for a process that ends afterwards.
    """
    try:
        return _Trial(batching, original, rewritten, convert).proved()
    except _Different as different:
        return str(different)


class _Trial:
    def __init__(self, batching: Batching, original: Any, rewritten: Any, convert: Convert) -> None:
        self._batching = batching
        self._datasets = original, rewritten
        self._convert = convert
        self._generators = [(put, get()) for get, put in find_generators(original)]
        self._proof = Proof()
        self._seen: list[_Looks] = []
        self._name = type(original).__name__
        function = batching.collate_fn
        self._collation = f"collate_fn {getattr(function, '__name__', type(function).__name__)}"
        self._plain = function in (default_collate, default_convert)

    def proved(self) -> Proof:
        original, rewritten = self._datasets
        seeds = 1 if _is_known(original) else _SEEDS_OF_UNKNOWN_CODE
        started = time.monotonic()
        for seed, group in product(range(seeds), self._groups(len(original))):
            if seed and time.monotonic() - started > _SECONDS:
                break
            try:
                theirs = self._read(original, group, seed)
            except Exception as error:
                text = f"reading samples {group} of {self._name} failed: {told(error)}"
                raise _Different(text) from error
            try:
                ours = self._read(rewritten, group, seed)
            except Exception as error:
                raise _Different(
                    f"{self._name} cannot be read without the members that would move: "
                    f"{told(error)}; let nothing but the transform work on the image's values"
                ) from error
            self._compare(theirs, ours, group)
            if not seed and not self._plain:
                self._probe_collation(theirs, ours)
        if any(looks.others for looks in self._seen):
            if len({(looks.total, looks.images) for looks in self._seen}) > 1:
                raise _Different(
                    "a batch holds other uint8 tensors beside the images, at places that change"
                )
            self._proof.leaves, self._proof.positions, _ = self._seen[0]
        return self._proof

    def _groups(self, length: int) -> list[list[int]]:
        """Return indices spread over the dataset, in groups that the loader could collate."""
        last = min(length, _INDICES) - 1
        indices = sorted({round(i * (length - 1) / max(1, last)) for i in range(last + 1)})
        size = min(self._batching.batch_size or _INDICES, _INDICES) if self._batching.batched else 1
        return [indices[begin : begin + size] for begin in range(0, len(indices), size)]

    def _read(self, dataset: Any, indices: list[int], seed: int) -> list[Any]:
        for put, state in self._generators:
            put(state)
        bulk = getattr(dataset, "__getitems__", None) if self._batching.batched else None
        if bulk:  # torch's own test
            _seed(seed, indices[0])
            return list(bulk(indices))
        samples = []
        for index in indices:
            _seed(seed, index)
            samples.append(dataset[index])
        return samples

    def _compare(self, theirs: list[Any], ours: list[Any], group: list[int]) -> None:
        """Collate both and compare."""
        try:
            expected = self._collated(theirs)
        except Exception as error:
            raise _Different(f"collating samples {group} failed: {told(error)}") from error
        try:
            found = self._collated(ours)
            looks = self._looks(expected, found)
        except Exception as error:
            who = self._name if self._plain else f"{self._name} or its {self._collation}"
            raise _Different(
                f"{who} works on the image after its transform (found {told(error)}); move that "
                "into the transform, before ToTensor, or into the training step"
            ) from error
        if not looks.images:
            raise _Different(
                f"no float image of {self._name} comes from its transform unchanged: it works on "
                "the image afterwards, or does not use the transform"
            )
        self._seen.append(looks)
        if looks.others and len(group) > 1:  # is their place the same in a batch of another size?
            self._seen.append(self._looks(self._collated(theirs[:1]), self._collated(ours[:1])))
        saved = 0
        for number, (wanted, leaf) in enumerate(zip(leaves(expected), leaves(found), strict=True)):
            if number in looks.images:
                saved += wanted.nbytes - leaf.nbytes
                if self._proof.classes.setdefault(type(leaf), type(wanted)) is not type(wanted):
                    raise _Different("images of one class become images of several")
        self._proof.bytes_saved = saved // len(group)
        self._proof.samples += len(group)

    def _probe_collation(self, theirs: list[Any], ours: list[Any]) -> None:
        """Try a collate_fn with an image of another size, and with other random numbers."""
        smaller = self._looks(theirs[0], ours[0]).images

        def outcome(samples: list[Any], number: int) -> Any:
            first = samples[0] if number else _cropped(samples[0], smaller)
            try:
                return self._collated([first, *samples[1:]], number)
            except Exception as error:
                return error

        for number in range(_COLLATIONS):
            expected, found = outcome(theirs, number), outcome(ours, number)
            if isinstance(expected, Exception) and isinstance(found, Exception):
                continue
            try:
                self._looks(expected, found)
            except _Different as error:
                what = "some random numbers" if number else "images of different sizes"
                raise _Different(
                    f"{self._collation} works on the values of images (seen with {what}: {error}); "
                    "move that into the training step, or keep to torch's collation"
                ) from error

    def _collated(self, samples: list[Any], seed: int = 0) -> Batch:
        # Clones: a collate_fn may work on its samples in place, and they are collated again.
        # The method: torch.clone makes plain tensors of tv_tensors.
        samples = [map_tensors(sample, lambda leaf: leaf.clone()) for sample in samples]
        _seed(seed, -1)
        return self._batching.collate_fn(samples if self._batching.batched else samples[0])

    def _looks(self, expected: Batch, found: Batch) -> _Looks:
        """Compare two batches or samples.

        Raises:
            _Different: they are not equal.
        """
        _compare_rest(expected, found)
        images, others = set(), set()
        pairs = list(zip(leaves(expected), leaves(found), strict=True))
        for number, (wanted, leaf) in enumerate(pairs):
            made: torch.Tensor | None = leaf
            if leaf.dtype is torch.uint8 and wanted.dtype is not torch.uint8:
                images.add(number)
                made, wanted = self._convert(leaf), wanted.as_subclass(torch.Tensor)
            elif leaf.dtype is torch.uint8 and leaf.ndim >= 3:
                others.add(number)
            if made is None or type(made) is not type(wanted) or not _same(made, wanted):
                raise _Different(f"{_shaped(leaf)} with other values for {_shaped(wanted)}")
        return _Looks(len(pairs), frozenset(images), frozenset(others))


def _seed(seed: int, index: int) -> None:
    number = seed * 1_000_003 + index + 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed reseeds every CUDA device too
    np.random.seed(number % 2**32)
    random.seed(number)


def _is_known(dataset: Any) -> bool:
    """Return whether only code of torch's and torchvision's reads the dataset."""
    if type(dataset) is Subset:
        return _is_known(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        parts = dataset.datasets
        return all(map(_is_known, parts.values() if isinstance(parts, dict) else parts))
    transforms = (getattr(dataset, name, None) for name in ("transform", "transforms"))
    return type(dataset).__module__.startswith("torchvision.datasets.") and all(
        held is None or is_chain(held) or type(held).__module__.startswith("torchvision.")
        for held in transforms
    )


def _cropped(sample: Any, images: frozenset[int]) -> Any:
    """Return ``sample`` with one row and one column less in each of its images."""
    count = -1

    def crop(leaf: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return leaf[..., :-1, :-1].clone().as_subclass(type(leaf)) if count in images else leaf

    return map_tensors(sample, crop)


def _compare_rest(expected: Any, found: Any) -> None:
    """Compare all that is no tensor: types, keys, lengths and values."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return
    if type(expected) is not type(found):
        raise _Different(f"{type(found).__name__} for {type(expected).__name__}")
    pairs: list[tuple[Any, Any]] = []
    kind: Any = type(expected)
    if isinstance(expected, np.ndarray):
        same = expected.dtype == found.dtype and np.array_equal(expected, found)
    elif isinstance(expected, Mapping):
        same = list(expected) == list(found)
        pairs = [(expected[key], found[key]) for key in expected] if same else []
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes, bytearray)):
        same = len(expected) == len(found)
        pairs = list(zip(expected, found, strict=same))
    elif dataclasses.is_dataclass(expected) or kind.__eq__ is object.__eq__:
        # Equality would mean being the same object: compare what it holds.
        values, others = getattr(expected, "__dict__", {}), getattr(found, "__dict__", {})
        same = list(values) == list(others)
        pairs = [(values[name], others[name]) for name in values] if same else []
    else:
        same = bool(expected == found) or expected != expected
    if not same:
        raise _Different(f"another {kind.__name__}")
    for one, other in pairs:
        _compare_rest(one, other)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one.layout is other.layout and one.shape == other.shape
    one, other = one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
    return one.stride() == other.stride() and same_bits(one, other)


def _shaped(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def told(error: object) -> str:
    """Return an error as a short text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, _Different) else f"{type(error).__name__}: {text[:200]}"

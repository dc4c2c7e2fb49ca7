"""Samples of the dataset itself, made both ways and compared to the bit.

    dataset ──> samples ──collate_fn──> batch ─────────────────────────┐
                                                                       equal, leaf by leaf?
    its copy ─> samples ──collate_fn──> batch ──uint8 leaves by table──┘

Both ways see the same random states, in the process in which the dataset is observed. Further
trials ask what a collate_fn of the user's own does with images of different sizes (padding with
zeros is not the same before Normalize and after) and with other random numbers (mixing images only
now and then).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch.utils.data._utils.collate import default_collate, default_convert

from dataloaders.batches.tree import Batch, leaves, map_tensors
from dataloaders.transforms.find import find_generators
from dataloaders.transforms.read import is_chain
from dataloaders.transforms.table import same_bits

__all__ = ["Batching", "Convert", "Proof", "prove"]

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


@dataclass(frozen=True)
class Batching:
    """How a loader makes batches of samples, without the loader.

    Attributes:
        collate_fn: the loader's.
        batch_size: the loader's; None with a batch sampler of the user's own.
        batched: whether samples are collated several at a time.
    """

    collate_fn: Callable[[Any], Any]
    batch_size: int | None
    batched: bool

    @classmethod
    def of(cls, loader: Any) -> Batching:
        """That of ``loader``."""
        return cls(loader.collate_fn, loader.batch_size, loader.batch_sampler is not None)


class _Different(Exception):
    """The two ways differ; the message says in what."""


def prove(batching: Batching, original: Any, rewritten: Any, convert: Convert) -> Proof | str:
    """Return a `Proof`, or why there is none: a sentence that names what stands in the way.

    Reads a few samples of both datasets and moves the process-wide generators and those of the
    datasets: for a process that ends afterwards.
    """
    trial = _Trial(batching, original, convert)
    generators = [(put, get()) for get, put in find_generators(original)]

    def read(dataset: Any, indices: list[int], seed: int) -> list[Any]:
        for put, state in generators:
            put(state)
        return _read(dataset, indices, seed, batched=batching.batched)

    try:
        return _prove(trial, lambda *of: read(original, *of), lambda *of: read(rewritten, *of))
    except _Different as different:
        return str(different)


_Read: TypeAlias = Callable[[list[int], int], list[Any]]


def _prove(trial: _Trial, read_theirs: _Read, read_ours: _Read) -> Proof | str:
    name = type(trial.dataset).__name__
    seeds = 1 if _is_known(trial.dataset) else _SEEDS_OF_UNKNOWN_CODE
    started = time.monotonic()
    for seed in range(seeds):
        for group in _groups(trial.batching, len(trial.dataset)):
            if seed and time.monotonic() - started > _SECONDS:
                break
            try:
                theirs = read_theirs(group, seed)
            except Exception as error:
                return f"reading samples {group} of {name} failed: {_told(error)}"
            try:
                ours = read_ours(group, seed)
            except Exception as error:
                return (
                    f"{name} cannot be read without the members that would move: {_told(error)}; "
                    "let nothing but the transform work on the image's values"
                )
            trial.compare_collated(theirs, ours, group)
            trial.proof.samples += len(group)
            if not seed and not trial.collates_as_torch:
                trial.probe_collation(theirs, ours, group)
    return trial.finished()


class _Trial:
    def __init__(self, batching: Batching, dataset: Any, convert: Convert) -> None:
        self.batching = batching
        self.dataset = dataset
        self.proof = Proof()
        self.collates_as_torch = batching.collate_fn in (default_collate, default_convert)
        self._convert = convert
        self._seen: list[tuple[int, frozenset[int], frozenset[int]]] = []

    def compare_collated(self, theirs: list[Any], ours: list[Any], group: list[int]) -> None:
        """Collate both and compare; what a difference is due to is told by the samples."""
        try:
            expected = self._collate(theirs, 0)
        except Exception as error:
            raise _Different(f"collating samples {group} failed: {_told(error)}") from error
        try:
            found = self._collate(ours, 0)
            images, others = self._images(expected, found)
        except Exception as error:
            raise self._blame(theirs, ours, error) from error
        if not images:
            raise _Different(
                f"no float image of {type(self.dataset).__name__} comes from its transform "
                "unchanged: it works on the image afterwards, or does not use the transform"
            )
        self._seen.append((sum(1 for _ in leaves(found)), images, others))
        if others and len(group) > 1:  # is their place the same in a batch of another size?
            smaller = self._images(
                self._collate(theirs[:1], 0), batch := self._collate(ours[:1], 0)
            )
            self._seen.append((sum(1 for _ in leaves(batch)), *smaller))
        floats, bytes_ = (
            [leaf for number, leaf in enumerate(leaves(batch)) if number in images]
            for batch in (expected, found)
        )
        saved = sum(leaf.nbytes for leaf in floats) - sum(leaf.nbytes for leaf in bytes_)
        self.proof.bytes_saved = saved // len(group)
        for one, other in zip(bytes_, floats, strict=True):
            if self.proof.classes.setdefault(type(one), type(other)) is not type(other):
                raise _Different("images of one class become images of several")

    def probe_collation(self, theirs: list[Any], ours: list[Any], group: list[int]) -> None:
        """What a collate_fn that is not torch's does with other sizes and other random numbers."""
        cut = [set(self._images(*pair)[0]) for pair in zip(theirs, ours, strict=True)]
        for number in range(_COLLATIONS):
            results: list[tuple[Any, Exception | None]] = []
            for samples in (theirs, ours):
                if number == 0:
                    samples = [_cropped(samples[0], cut[0]), *samples[1:]]
                try:
                    results.append((self._collate(samples, number), None))
                except Exception as error:
                    results.append((None, error))
            (expected, failure), (found, other_failure) = results
            if failure is not None and other_failure is not None:
                continue
            try:
                if failure is not None or other_failure is not None:
                    raise _Different(_told(failure or other_failure))
                self._images(expected, found)
            except _Different as error:
                what = "images of different sizes" if number == 0 else "some random numbers"
                raise _Different(
                    f"{self._collation} works on the values of images (seen with {what}: {error}); "
                    "move that into the training step, or keep to torch's collation"
                ) from error

    def finished(self) -> Proof:
        """The proof, with the rule by which images are told from other uint8 leaves."""
        if any(others for _, _, others in self._seen):
            if len({(count, images) for count, images, _ in self._seen}) > 1:
                raise _Different(
                    "a batch holds other uint8 tensors beside the images, at places that change"
                )
            count, images, _ = self._seen[0]
            self.proof.positions, self.proof.leaves = images, count
        return self.proof

    def _collate(self, samples: list[Any], seed: int) -> Batch:
        # Clones: a collate_fn may work on its samples in place, and they are collated again.
        samples = [map_tensors(sample, _clone) for sample in samples]
        _seed(seed, -1)
        return self.batching.collate_fn(samples if self.batching.batched else samples[0])

    def _images(self, expected: Batch, found: Batch) -> tuple[frozenset[int], frozenset[int]]:
        """Places of the image leaves, and of other uint8 leaves that look like images."""
        _compare_rest(expected, found)
        images, others = set(), set()
        pairs = zip(leaves(expected), leaves(found), strict=True)
        for number, (wanted, leaf) in enumerate(pairs):
            if leaf.dtype is torch.uint8 and wanted.dtype is not torch.uint8:
                self._compare_image(wanted, leaf)
                images.add(number)
            elif type(wanted) is not type(leaf) or not _same(wanted, leaf):
                raise _Different(f"{_shaped(leaf)} for {_shaped(wanted)}")
            elif leaf.dtype is torch.uint8 and leaf.ndim >= 3:
                others.add(number)
        return frozenset(images), frozenset(others)

    def _compare_image(self, wanted: torch.Tensor, leaf: torch.Tensor) -> None:
        made = self._convert(leaf)
        plain = wanted.as_subclass(torch.Tensor)
        if made is None or made.shape != plain.shape or made.dtype is not plain.dtype:
            raise _Different(f"{_shaped(leaf)} for {_shaped(wanted)}")
        if not same_bits(made, plain):
            raise _Different(f"other values in {_shaped(wanted)}")
        if made.stride() != plain.stride():
            raise _Different(f"another memory layout of {_shaped(wanted)}")

    def _blame(self, theirs: list[Any], ours: list[Any], error: Exception) -> _Different:
        try:
            for pair in zip(theirs, ours, strict=True):
                self._images(*pair)
        except _Different as different:
            name = type(self.dataset).__name__
            return _Different(
                f"{name} works on the image after its transform (found {different}); move that "
                "into the transform, before ToTensor, or into the training step"
            )
        return _Different(
            f"{self._collation} works on the values of images (found {_told(error)}); move that "
            "into the training step"
        )

    @property
    def _collation(self) -> str:
        function = self.batching.collate_fn
        return f"collate_fn {getattr(function, '__name__', type(function).__name__)}"


def _groups(batching: Batching, length: int) -> Iterator[list[int]]:
    """Indices spread over the dataset, in groups that the loader could collate."""
    last = min(length, _INDICES) - 1
    indices = sorted({round(number * (length - 1) / max(1, last)) for number in range(last + 1)})
    size = min(batching.batch_size or _INDICES, _INDICES) if batching.batched else 1
    for begin in range(0, len(indices), size):
        yield indices[begin : begin + size]


def _read(dataset: Any, indices: list[int], seed: int, *, batched: bool) -> list[Any]:
    bulk = getattr(dataset, "__getitems__", None) if batched else None
    if bulk:  # torch's own test
        _seed(seed, indices[0])
        return list(bulk(indices))
    samples = []
    for index in indices:
        _seed(seed, index)
        samples.append(dataset[index])
    return samples


def _seed(seed: int, index: int) -> None:
    number = seed * 1_000_003 + index + 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed reseeds every CUDA device too
    np.random.seed(number % 2**32)
    random.seed(number)


def _is_known(dataset: Any) -> bool:
    """Whether only code of torch's and torchvision's reads the dataset."""
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


def _cropped(sample: Any, images: set[int]) -> Any:
    """``sample`` with one row and one column less in each of its images."""
    count = -1

    def crop(leaf: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return leaf[..., :-1, :-1].clone().as_subclass(type(leaf)) if count in images else leaf

    return map_tensors(sample, crop)


def _compare_rest(expected: Any, found: Any) -> None:
    """All that is no tensor: types, keys, lengths and values."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return
    if type(expected) is not type(found):
        raise _Different(f"{type(found).__name__} for {type(expected).__name__}")
    pairs: list[tuple[Any, Any]] = []
    same = True
    if isinstance(expected, np.ndarray):
        same = expected.dtype == found.dtype and np.array_equal(expected, found)
    elif isinstance(expected, Mapping):
        same = list(expected) == list(found)
        pairs = [(expected[key], found[key]) for key in expected] if same else []
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes, bytearray)):
        same = len(expected) == len(found)
        pairs = list(zip(expected, found, strict=same))
    elif dataclasses.is_dataclass(expected) or _is_identified(expected):
        values, others = getattr(expected, "__dict__", {}), getattr(found, "__dict__", {})
        same = list(values) == list(others)
        pairs = [(values[name], others[name]) for name in values] if same else []
    else:
        same = bool(expected == found) or expected != expected
    if not same:
        raise _Different(f"another {type(expected).__name__}")
    for one, other in pairs:
        _compare_rest(one, other)


def _is_identified(value: Any) -> bool:
    """Whether equality means being the same object, so that what it holds must be compared."""
    own: Any = type(value).__eq__
    return own is object.__eq__


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()  # the method: torch.clone makes plain tensors of tv_tensors


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return one.layout is other.layout and one.shape == other.shape
    one, other = one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
    return one.stride() == other.stride() and same_bits(one, other)


def _shaped(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _told(error: object) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if not isinstance(error, _Different) else text

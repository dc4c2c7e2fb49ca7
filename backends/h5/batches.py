"""Make whole batches from a cache: gather columns, crop and flip images into the batch.

    rows ──> numbers, tensors   one gather a column
             text               a list
             images             a window each, straight from the mapped file into the batch;
                                floats, if a tail makes them, as soon as a window is copied
             encoded images,    one by one, through torchvision's own functions with arguments
             longer chains      that are drawn for the whole batch (pictures.py)
             compressed         as these, decoded row by row

The batch equals ``default_collate([cached[row] for row in rows])``. This is proved on rows of this
very cache, with torchvision's own random numbers, before any batch is made this way.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate, get_worker_info

from dataloaders.batches.collation import collates_as_torch
from dataloaders.batches.memory import HostMemory
from dataloaders.batches.tree import Batch, same_bits
from dataloaders.cache import CachedDataset
from dataloaders.cache.read.files import Column, groups
from dataloaders.cache.sample.sample import Structure, join
from dataloaders.recording.tail import Trailing
from dataloaders.replaying.ways import Arithmetic, Way
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.trailing import CONVERTERS

from .floats import Floats, split
from .geometry import Geometry, Windows, geometry_of
from .mirroring import Mirror
from .pictures import Made, Steps, header_of, is_image, steps_of
from .team import Team

__all__ = ["Batches", "NotThisBatch", "Windowed", "batches_of", "is_proved"]

Leaf: TypeAlias = Callable[["Rows"], Any]
"""A function that makes a column's part of a batch."""

_PROVED_ROWS = 4
_AT_ONCE = 1 << 18  # values: 1 MiB of floats
Integers: TypeAlias = "npt.NDArray[np.int64]"
Image: TypeAlias = "npt.NDArray[np.uint8]"
"""uint8 [C, H, W], in the file: read-only."""

_BYTES = ("tensor:uint8", "tv_tensor:Image:uint8")
"""The cache's names for tensors of bytes; when stacked, all of them become plain tensors."""
_MODES = ("image:L", "image:RGB", "image:RGBA", "image:CMYK", "image:YCbCr")


class NotThisBatch(Exception):
    """Leave these rows to `default_collate`, which may raise."""


class Rows:
    """The rows of one batch, and the random numbers for them."""

    def __init__(
        self,
        numbers: npt.NDArray[np.int64],
        memory: HostMemory | None,
        draws: Draws,
        team: Team | None = None,
        puts_off: bool = False,
    ) -> None:
        self.numbers = numbers
        self.memory = memory
        self.draws = draws
        self.team = team or Team()
        self.puts_off = puts_off
        self.located: tuple[Integers, Integers] | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a part of the batch."""
        return empty(shape, dtype, self.memory)


def empty(shape: Sequence[int], dtype: torch.dtype, memory: HostMemory | None) -> torch.Tensor:
    """Return memory for a part of a batch: shared in a worker, else from the pool if large."""
    nbytes = math.prod(shape) * dtype.itemsize
    if get_worker_info() is not None:
        storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]
    if memory is not None and memory.pays_for(nbytes):
        return memory.empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype)


class Batches:
    """Make batches of one cache. Created by `batches_of`, once in each process that uses it.

    Attributes:
        cached: the cache, whose tails are part of the batches.
        random: whether two batches of the same rows may differ.
    """

    def __init__(self, cached: CachedDataset, leaves: list[Leaf], random: bool) -> None:
        self.cached = cached
        self.random = random
        self._leaves = leaves
        assert cached.index.structure is not None
        self._structure = _as_collated(cached.index.structure)

    def of(
        self,
        rows: Sequence[Any],
        draws: Draws,
        memory: HostMemory | None = None,
        team: Team | None = None,
        puts_off: bool = False,
    ) -> Batch | None:
        """Return the batch of these rows; None if it has to be collated sample by sample.

        Args:
            rows: integers from 0 on.
            draws: the random numbers of each row.
            memory: where large tensors come from, outside workers.
            team: shares the work on images.
            puts_off: whether a `Trailing` stands for images that end as floats.
        """
        if not collates_as_torch():
            return None
        try:
            numbers = np.asarray(rows)
        except (TypeError, ValueError):
            return None
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
            return None
        if numbers.min() < 0 or numbers.max() >= len(self.cached):
            return None
        self.cached.about_to_read(numbers.tolist())
        task = Rows(numbers.astype(np.int64), memory, draws, team, puts_off)
        try:
            parts = [leaf(task) for leaf in self._leaves]
        except NotThisBatch:
            return None
        return join(self._structure, parts, self.cached.namedtuples)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the file itself: a map would be pickled as a copy.
        return _again, (self.cached,)


def _again(cached: CachedDataset) -> Batches:
    """Return the batches of a cache for which they were proved in another process."""
    made = _made(cached)
    assert isinstance(made, Batches), made
    return made


def batches_of(
    cached: CachedDataset, prove: Callable[[CachedDataset], bool] | None = None
) -> Batches | str:
    """Return how batches of ``cached`` are made at once; or say in a few words why they cannot be.

    Args:
        cached: the cache, with its live transforms.
        prove: whether such batches equal torch's; None: `is_proved`, on this thread.
    """
    batches = _made(cached)
    if isinstance(batches, str):
        return batches
    proved = (prove or is_proved)(cached)
    return batches if proved else "its batches differ from those of default_collate"


def _made(cached: CachedDataset) -> Batches | str:
    if cached.transform is not None:
        return "the cache is given a transform of whole samples"
    if not len(cached) or cached.index.structure is None:
        return "the cache has no rows"
    tails = dict(cached.calls)
    if len(tails) != len(cached.calls):
        return "a leaf has two tails"
    leaves: list[Leaf] = []
    random = False
    for number, column in enumerate(cached.readers):
        made = _leaf_of(column, tails.get(number))
        if isinstance(made, str):
            return f"column {column.entry.name!r}: {made}"
        leaves.append(made)
        random = random or (isinstance(made, (_Images, _Pictures)) and made.random)
    return Batches(cached, leaves, random)


def _leaf_of(column: Column, tail: Any) -> Leaf | str:
    kinds = {kind for kind, _ in column.entry.variants}
    if tail is not None and all(map(is_image, kinds)):
        return _images_of(column, kinds, tail)
    if len(kinds) != 1:
        return "its rows are of several kinds"
    kind = next(iter(kinds))
    floats = None
    if tail is not None:
        before, floats = split(tail)
        makers = () if floats is None else floats.makes_bytes
        pure = all(type(each).__name__ == "ToPureTensor" for each in makers)
        if kind not in _BYTES or before or floats is None or not pure:
            return f"its tail works on {kind}"
        kind = _BYTES[0]
    if kind in ("str", "bytes"):
        return lambda rows: column.leaves(rows.numbers.tolist())
    family = kind.partition(":")[0]
    if family not in ("int", "float", "bool", "tensor", "array", "scalar"):
        return f"default_collate cannot collate {kind}, or not at once"
    if not column.entry.fixed:
        return "its rows differ in shape"
    if column.entry.dtype.startswith(">"):
        return "its bytes are in another order than this machine's"
    bits = torch.bfloat16 if kind == "tensor:bfloat16" else None
    return _Values(column, bits, floats)


class _Parts:
    """The files that have a column, each with the values of its rows as an array."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self._arrays: dict[int, npt.NDArray[Any] | None] = {}

    def locate(self, rows: Rows) -> tuple[Integers, Integers]:
        """Return the part of each row and its number there; looked up once for all columns."""
        if rows.located is None:
            rows.located = self.column.files.locate(rows.numbers)
        return rows.located

    def array(self, part: int) -> npt.NDArray[Any] | None:
        """Return the rows of this part; None if they differ in shape or are compressed."""
        if part not in self._arrays:
            column = self.column.of(part)
            values = None
            if column.entry.fixed and column.entry.packing is None:
                values = column.values
                if values.dtype.kind == "b":
                    values = values.view(np.uint8)  # a byte other than 0 and 1 would be neither
                if not values.flags.aligned:  # as columns of a few bytes may be: copying is cheap
                    values = values.copy()
            self._arrays[part] = values
        return self._arrays[part]


class _Values:
    """A column of one shape, gathered."""

    def __init__(self, column: Column, bits: torch.dtype | None, floats: Floats | None) -> None:
        self._parts = _Parts(column)
        dtype = np.dtype(column.entry.dtype)
        self._bool = dtype.kind == "b"
        self._dtype = np.dtype(np.uint8) if self._bool else dtype
        self._shape = column.entry.shape or ()
        self._bits = bits
        self._floats = floats

    def __call__(self, rows: Rows) -> Any:
        parts, numbers = self._parts.locate(rows)
        shape = (len(numbers), *self._shape)
        out = rows.empty(shape, _tensor(np.empty(0, self._dtype)).dtype)
        # NumPy's: torch takes longer for a few rows of each part, and cannot scatter all types.
        values = out.numpy()
        for part, places in groups(parts):
            array, own = self._parts.array(part), numbers[places]
            if array is None:
                column = self._parts.column.of(part)
                for number, place in sorted(zip(own.tolist(), places.tolist(), strict=True)):
                    found = column.view(number)  # in the file's order: pieces are decoded once
                    assert found is not None  # its rows are of one kind
                    values[place] = found.view(self._dtype)
            elif len(own) < len(numbers):
                values[places] = array[own]
            else:
                torch.index_select(_tensor(array), 0, torch.from_numpy(numbers), out=out)
        if self._floats is not None:
            return _floats_of(out, self._floats, rows)
        if self._bool:
            return out != 0
        return out if self._bits is None else out.view(self._bits)


class _Images:
    """Images of one mode, each window copied straight into a uint8 batch [N, C, H, W]."""

    def __init__(self, column: Column, geometry: Geometry, floats: Floats | None) -> None:
        self._parts = _Parts(column)
        self._floats = floats
        self.geometry = geometry
        self.random = geometry.random

    def __call__(self, rows: Rows) -> Any:
        images = self._images(rows)
        heights = np.array([image.shape[1] for image in images])
        widths = np.array([image.shape[2] for image in images])
        drawn = self.geometry.draw(heights, widths, rows.draws)
        if drawn is None:
            raise NotThisBatch
        windows, outside = drawn
        height, width = int(windows.height[0]), int(windows.width[0])
        if (windows.height != height).any() or (windows.width != width).any():
            raise NotThisBatch
        shape = (len(images), images[0].shape[0], height, width)
        if not outside:
            return _filled(Windowed(images, windows), shape, torch.uint8, self._floats, rows)
        batch = rows.empty(shape, torch.uint8)
        _fill_with_border(batch, images, windows)
        return batch if self._floats is None else _floats_of(batch, self._floats, rows)

    def _images(self, rows: Rows) -> list[Image]:
        images = []
        for part, number in zip(*(each.tolist() for each in self._parts.locate(rows)), strict=True):
            array = self._parts.array(part)
            image = self._parts.column.of(part).view(number) if array is None else array[number]
            if image is None:
                raise NotThisBatch
            images.append(image)
        return images


class _Pictures:
    """Images that are decoded, or need more than a window; made one by one."""

    def __init__(self, column: Column, steps: Steps) -> None:
        self._column = column
        self._steps = steps
        self.random = steps.random
        self._known: tuple[int, torch.dtype] | None = None

    def __call__(self, rows: Rows) -> Any:
        with _left_to_samples():
            return self._made(rows)

    def _made(self, rows: Rows) -> Any:
        headers = [header_of(self._column, row) for row in rows.numbers.tolist()]
        made = Made(self._steps, headers, rows.draws)
        sizes = made.sizes
        height, width = int(sizes.height[0]), int(sizes.width[0])
        if (sizes.height != height).any() or (sizes.width != width).any():
            raise NotThisBatch
        if self._known is None:
            first = made.first()
            self._known = (first.shape[0], first.dtype)
        channels, dtype = self._known
        shape = (len(headers), channels, height, width)
        return _filled(made, shape, dtype, self._steps.floats, rows)


class Windowed:
    """Images of a batch, still in the file, and the window of each."""

    def __init__(self, images: list[Image], windows: Windows) -> None:
        self._images = images
        self._windows = windows

    def into(self, out: torch.Tensor, team: Team) -> None:
        """Fill ``out``, uint8 [n, C, H, W] and contiguous."""
        places = out.numpy()
        team.split(len(out), out.nbytes, lambda begin, end: self._put(places[begin:end], begin))

    def _put(self, places: npt.NDArray[np.uint8], begin: int) -> None:
        # By NumPy, which copies short rows faster than torch.
        mirror = Mirror(places.shape[1:])
        windows = self._parts(places.shape, begin)
        for place, (part, upside_down, mirrored) in zip(places, windows, strict=True):
            seen = part[:, ::-1] if upside_down else part
            if mirrored:
                mirror.put(seen, place)
            else:
                place[...] = seen

    def through(self, way: Way, out: torch.Tensor, team: Team) -> None:
        """Fill ``out`` with the result of ``way`` for the windows.

        A few at a time, so that they stay in the core's cache between two steps.
        """
        team.split(len(out), out.nbytes, lambda begin, end: self._some(way, out[begin:end], begin))

    def _some(self, way: Way, out: torch.Tensor, begin: int) -> None:
        parts = self._tensors(out, begin)
        steps = way if isinstance(way, Arithmetic) and out.dtype is torch.float32 else None
        if steps is not None and out[0].numel() * 2 > _AT_ONCE:
            for place, part in zip(out.unbind(0), parts, strict=True):
                place.copy_(part)  # converts bytes to floats
                steps.finish(place)
            return
        at_once = max(1, _AT_ONCE // max(1, out[0].numel()))
        for some in (out[n : n + at_once] for n in range(0, len(out), at_once)):
            bytes_ = torch.empty(some.shape, dtype=torch.uint8) if steps is None else some
            for place, part in zip(bytes_.unbind(0), parts, strict=False):
                place.copy_(part)
            if steps is None:
                way.run(bytes_, some)
            else:
                steps.finish(some)

    def _tensors(self, out: torch.Tensor, begin: int) -> Iterator[torch.Tensor]:
        """Yield the windows from number ``begin`` on, as ``out`` needs them; some are views."""
        for part, upside_down, mirrored in self._parts(out.shape, begin):
            tensor = _tensor(part)
            if mirrored or upside_down:
                tensor = torch.flip(tensor, [1] * upside_down + [2] * mirrored)
            yield tensor

    def _parts(
        self, shape: Sequence[int], begin: int
    ) -> Iterator[tuple[npt.NDArray[np.uint8], bool, bool]]:
        """Yield unflipped windows of images from number ``begin`` on, and whether to flip."""
        windows, some = self._windows, slice(begin, begin + shape[0])
        height, width = shape[2:]
        upside_down, mirrored = windows.upside_down[some].tolist(), windows.mirrored[some].tolist()
        tops, lefts = windows.top[some].tolist(), windows.left[some].tolist()
        for image, top, left, *flips in zip(
            self._images[some], tops, lefts, upside_down, mirrored, strict=True
        ):
            yield image[:, top : top + height, left : left + width], *flips


def _filled(
    images: Windowed | Made,
    shape: Sequence[int],
    dtype: torch.dtype,
    floats: Floats | None,
    rows: Rows,
) -> Any:
    """Return ``images``; where ``floats`` are made of them, each as soon as it is copied."""
    with _left_to_samples():
        if floats is None or rows.puts_off:
            batch = rows.empty(shape, dtype)
            images.into(batch, rows.team)
        else:
            way, dtype = floats.way(shape[1])
            batch = rows.empty(shape, dtype)
            images.through(way, batch, rows.team)
            return batch
    return batch if floats is None else _floats_of(batch, floats, rows)


def _floats_of(bytes_: torch.Tensor, floats: Floats, rows: Rows) -> Any:
    with _left_to_samples():
        way, dtype = floats.way(bytes_.shape[-3])
        if rows.puts_off:
            return Trailing(bytes_, floats.steps)
        out = rows.empty(bytes_.shape, dtype)
        way.run(bytes_, out)
    return out


@contextmanager
def _left_to_samples() -> Iterator[None]:
    """Turn an image's error into `NotThisBatch`: fetching the sample then raises its own error."""
    try:
        yield
    except Exception as error:
        raise NotThisBatch from error


def _fill_with_border(batch: torch.Tensor, images: list[Image], windows: Windows) -> None:
    """Do what `Windowed.into` does, for windows that extend beyond their images."""
    batch.zero_()
    height, width = batch.shape[2:]
    for number, image in enumerate(map(_tensor, images)):
        top, left = int(windows.top[number]), int(windows.left[number])
        rows = slice(max(top, 0), min(top + height, image.shape[1]))
        columns = slice(max(left, 0), min(left + width, image.shape[2]))
        place = batch[number]
        axes = [1] * bool(windows.upside_down[number]) + [2] * bool(windows.mirrored[number])
        if rows.start >= rows.stop or columns.start >= columns.stop:
            continue
        part = torch.flip(image[:, rows, columns], axes) if axes else image[:, rows, columns]
        above = top + height - rows.stop if 1 in axes else rows.start - top
        beside = left + width - columns.stop if 2 in axes else columns.start - left
        place[:, above : above + part.shape[1], beside : beside + part.shape[2]] = part


def _images_of(column: Column, kinds: set[str], tail: Any) -> Leaf | str:
    geometry = _tail_geometry(tail) if len(kinds) == 1 and kinds <= set(_MODES) else ""
    if isinstance(geometry, Geometry):
        return _Images(column, geometry, split(tail)[1])
    steps = steps_of(tail)
    return steps if isinstance(steps, str) else _Pictures(column, steps)


def _tail_geometry(tail: Any) -> Geometry | str:
    """Return what ``tail`` does to an image of bytes if that is all; or say why it is not known."""
    before, floats = split(tail)
    members = list(before)
    ends = floats is not None and bool(floats.makes_bytes)
    while floats is None and members and members[-1].torchvision in CONVERTERS:
        members.pop()
        ends = True
    return geometry_of(members) if ends else "its tail does not end in an image of bytes"


def is_proved(cached: CachedDataset) -> bool:
    """Whether batches of one row and of several equal torch's, including random numbers.

    Reads a few rows both ways, with their live transforms, which may be user code. Restores all
    random states.
    """
    batches = _made(cached)
    if isinstance(batches, str):
        return False
    spread = np.linspace(0, len(cached) - 1, _PROVED_ROWS).astype(np.int64)
    tries = [[int(row)] for row in spread] + [[int(row) for row in spread]]
    proved = False
    for seed, rows in enumerate(tries):
        seeding = words(seed, 0, np.arange(len(rows)))
        with random_states_kept(cuda=False):
            try:
                theirs: Any = default_collate(
                    [_seeded(cached, *each) for each in zip(rows, seeding.tolist(), strict=True)]
                )
            except Exception:  # such rows are left to default_collate, which raises
                theirs = None
        ours = batches.of(rows, Draws(seeding))
        if theirs is None and ours is None:
            continue
        if ours is None or not _same(ours, theirs):
            return False
        proved = True
    return proved


def _seeded(cached: CachedDataset, row: int, words: list[int]) -> Any:
    seed_generators((words[0], words[1], words[2], words[3]))
    return cached[row]


def _same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, torch.Tensor):
        return same_bits(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(_same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


def _as_collated(structure: Structure) -> Structure:
    """Return the structure of a batch: default_collate makes lists of plain tuples."""
    if isinstance(structure, int):
        return structure
    ((kind, members),) = structure.items()
    if kind == "namedtuple":
        name, fields = members
        return {kind: [name, [(field, _as_collated(inner)) for field, inner in fields]]}
    if kind == "dict":
        return {kind: [(key, _as_collated(inner)) for key, inner in members]}
    return {"list": [_as_collated(inner) for inner in members]}


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over ``values``, which are mapped from a file: read-only."""
    _have_torch_warned()
    return torch.from_numpy(values)


@functools.cache
def _have_torch_warned() -> None:
    """Trigger torch's one warning that such a tensor must not be written to: nobody sees these."""
    values = np.zeros(1, np.uint8)
    values.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(values)

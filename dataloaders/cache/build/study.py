"""Read a few samples before a cache is built: find the cut, measure rows, detect randomness.

cuts ──read, finish, compare with the dataset's own sample──> the first that holds, else whole
     ──generators drawn from, rows read again─────────────> random or not
     ──────────────────────────────────────────────────────> bytes, seconds, digests
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dataloaders.cache.build.reading import (
    BYTES_PER_LEAF,
    STAY_LIVE,
    DrawDetector,
    Failure,
    draws_refused,
    error_text,
    not_interrupted,
    read_row,
    seed_for,
)
from dataloaders.cache.build.rows import RowBuffer
from dataloaders.cache.build.values import digests_of_values
from dataloaders.cache.format.attributes import attributes_of
from dataloaders.cache.format.compress import Compressed
from dataloaders.cache.format.writing import bytes_in_file
from dataloaders.cache.sample.cut import (
    Call,
    Cut,
    cut_of,
    equal_state,
    sample_of,
    whole,
)
from dataloaders.cache.sample.encoding import images_encoded
from dataloaders.cache.sample.images import Images
from dataloaders.cache.sample.leaf import Leaf, value_of
from dataloaders.cache.sample.packed import packed
from dataloaders.cache.sample.palette import PALETTE, contents
from dataloaders.cache.sample.sample import Structure, column_names, finished, join, split
from dataloaders.errors import CacheError
from dataloaders.observing.opened import Files, files_opened
from dataloaders.options import option
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.find import find_generators, find_indices

_PROVED = 4
_MEASURED = 16
_SECONDS = 1.0
"""After this long no more samples are read than must be."""

_SAMPLED_BYTES = 16 << 20
"""Rows of so many bytes are kept, to see what they take in a file."""

_UNREAD = "no sample could be read"

_Row = tuple[Structure, list[Leaf]]


@dataclass
class Findings:
    """What `Study` found."""

    choice: int = -1  # which of its cuts holds; the last one stands for whole samples
    calls: tuple[Call, ...] = ()  # how its rows go through the transforms
    reason: str = ""  # why it is not a better one; "" if it is the best
    # The first sample whose row drew from process-wide generators, and their names.
    drawn: tuple[int, tuple[str, ...]] | None = None
    random: str = ""  # what differs between two readings of one row; "" if nothing does
    # Of the rows that were read, by sample; or "random", or "failed".
    digests: dict[int, str] = field(default_factory=dict)
    # Of each row that was read, its images encoded; and the seconds that this took.
    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    in_file: float = 1.0  # what a byte of them takes in a file, with offsets and compression
    columns: dict[str, bool] = field(default_factory=dict)  # whether a PIL image was in it
    attributes: dict[str, Any] = field(default_factory=dict)  # see `attributes_of`
    files: Files = field(default_factory=dict)  # that were read, where a process observed it

    @property
    def row_bytes(self) -> float:
        """The bytes of a row in the file, as the mean of those that were read."""
        return statistics.fmean(self.bytes) * self.in_file if self.bytes else 0.0

    @property
    def row_memory(self) -> float:
        """The bytes that a row takes in memory, as the mean of those that were read."""
        size = statistics.fmean(self.bytes) if self.bytes else 0.0
        return size + BYTES_PER_LEAF * max(1, len(self.columns))

    @property
    def row_seconds(self) -> float:
        """The median of `seconds`, without the first row, which imports and opens things."""
        return statistics.median(self.seconds[1:] or self.seconds or [0.0])


def ways_to_cut(dataset: Any, images: Images) -> tuple[list[Cut], str]:
    """Return the ways to cut ``dataset``, the better one first, and why there is none.

    The last one is the dataset itself, without tails. To be packed there is only one, which gives
    its files.

    Raises:
        CacheError: the files are to be packed, and the dataset cannot be copied.
    """
    if images.packed:
        return [packed(dataset)], ""
    cut, reason = cut_of(dataset, images=images.rows == "images")
    return [*filter(None, [cut]), whole(dataset)], reason


def described(dataset: Any, length: int, cut: Cut) -> dict[str, Any]:
    """Return what a fingerprint says of ``dataset`` without reading it."""
    kind = type(dataset)
    module = "" if kind.__module__ in ("__main__", "__mp_main__") else f"{kind.__module__}."
    says = {"dataset": f"{module}{kind.__qualname__}", "length": length, "head": list(cut.head)}
    subsets = list(map(np.asarray, find_indices(dataset)))
    if subsets:  # random_split gives others at each start of a script
        digest = hashlib.blake2b(digest_size=16)
        for indices in subsets:
            is_whole = indices.dtype.kind in "iu"
            values = indices.astype("<i8").tobytes() if is_whole else str(list(indices)).encode()
            digest.update(f"{len(values)} ".encode() + values)
        says["indices"] = digest.hexdigest()
    return says


class Study:
    """Read a few samples of a dataset, in another process or here; ``found``: what they show."""

    def __init__(
        self,
        dataset: Any,
        samples: int,
        *,
        skip: bool,
        images: Images,
        compress: Compressed | None = None,
    ) -> None:
        self.images = images
        self._compress = compress
        self.cuts, reason = ways_to_cut(dataset, images)
        self.found = Findings(reason=reason)
        self._dataset = dataset
        self._values = digests_of_values(dataset)  # now: samples that are read may change them
        self._samples = samples
        self._skip = skip

    @property
    def cut(self) -> Cut:
        """The cut that holds."""
        return self.cuts[self.found.choice]

    @property
    def contents(self) -> dict[str, Any]:
        """What the rows depend on, by name, all of it JSON.

        The class, length, head and images; digests of attributes with an entry a sample; and for
        some samples ``sample 17``, a digest of what this one gives before it is encoded. Not the
        live tail: the same rows serve another augmentation.
        """
        digests = sorted(self.found.digests.items())
        return {
            **described(self._dataset, self._samples, self.cut),
            "images": str(self.images),
            **self._values,
            **{f"sample {index}": digest for index, digest in digests},
        }

    def report(self, dataset: Any) -> Findings | Failure:
        """Return the findings with the files read, or the failure, ready to be sent."""
        files = files_opened()
        try:
            return replace(self(), files=files)
        except BaseException as error:  # a sample may call sys.exit()
            return Failure.of(not_interrupted(error))

    def __call__(self) -> Findings:
        """Read the samples; all random states are restored afterwards."""
        self._own = [(put, get()) for get, put in find_generators(self._dataset)]
        try:
            with random_states_kept(cuda=False):
                return self._findings()
        finally:
            for put, state in self._own:
                put(state)

    def _findings(self) -> Findings:
        found = self.found
        found.attributes = attributes_of(self._dataset)
        for found.choice, cut in enumerate(self.cuts):
            if not cut.tails or not self._samples:
                continue
            calls = self._calls(cut)
            if not isinstance(calls, str):
                found.calls = calls
                break
            found.reason = calls
            if self.images.packed:
                self._refuse_packing()
        self._measure()
        return found

    def _refuse_packing(self) -> None:
        """Raise CacheError: a user who asks for files must get files, and there is no other cut."""
        if self.found.reason == _UNREAD:
            self._measure()  # which raises what reading raises, if it is not to be skipped
        raise CacheError(
            f"{option('images', 'packed')}: {type(self._dataset).__name__} does more than open its "
            f"files in RGB and apply its transform: {self.found.reason}. Keep what it gives "
            f"instead: {option('images', 'jpeg')}, 'png' or 'webp'"
        )

    def refuse_no_images(self) -> None:
        """Raise CacheError if there is no image to encode, or none in a column that was named."""
        found = self.found
        if self.images.rows != "images" or not found.bytes:
            return
        columns = dict(self.images.columns)
        missing = [name for name in columns if name and not found.columns.get(name)]
        if not missing and any(found.columns.values()):
            return
        why = f" ({found.reason})" if found.reason else ""
        raise CacheError(
            f"{option('images', str(self.images))}: there is no PIL image in "
            f"{', '.join(map(repr, missing)) or 'any column'} of {type(self._dataset).__name__}"
            f"{why}, whose columns are {', '.join(map(repr, found.columns)) or 'none'}. Tensors "
            "are kept raw: have the dataset give PIL images, with ToTensor or ToImage after what "
            "is computed, or leave images out"
        )

    def refuse_random(self) -> None:
        """Raise CacheError if rows drew from process-wide generators, or differ when read again."""
        found = self.found
        why = f"; {found.random}" if found.random else ""
        if found.reason and found.choice == len(self.cuts) - 1:
            why += f", and nothing can stay live: {found.reason}"
        if found.drawn is not None:
            raise draws_refused(self.cuts[0].name, *found.drawn, why)
        if found.random:
            raise CacheError(
                f"{type(self._dataset).__name__} is random{why}. It drew from none of the "
                "generators of torch, NumPy and Python's random, so it has a generator of its own "
                f"or depends on something else that changes. {STAY_LIVE} to keep what each sample "
                "is when it is read"
            )

    def _calls(self, cut: Cut) -> tuple[Call, ...] | str:
        """Return how rows go through ``cut``, or why rows and tails do not give the samples."""
        calls: tuple[Call, ...] | None = None
        for index in _spread(self._samples, _PROVED):
            try:
                expected = self._dataset_sample(index)
            except BaseException as error:
                not_interrupted(error)
                continue  # its row is read too, further on: that raises the error
            try:
                self._seed(index, 0)
                row = cut.read(index)
                now = cut.calls_in(row)
                if isinstance(now, str):
                    return now
                if not now and not self.images.packed:
                    return "its transforms are not called"
                kept = _rejoined(row)
                self._seed(index, 0)
                actual = finished(kept, cut.tails_of(now))
            except Exception as error:
                if self.images.packed and isinstance(error, CacheError):
                    continue  # the same
                return f"a row could not be made or finished ({error_text(error)})"
            if calls not in (None, now):
                return "samples go through its transforms in different ways"
            calls = now
            # A tail with generators of its own gives other values each time: nothing to compare.
            if not same_samples(actual, expected) and same_samples(
                self._dataset_sample(index), expected
            ):
                return "what its transforms give is changed or seeded elsewhere in the dataset"
        return _UNREAD if calls is None else calls

    def _dataset_sample(self, index: int) -> Any:
        self._seed(index, 0)
        sample = sample_of(self._dataset, index)
        try:
            return _rejoined(sample)  # the dataset may use its memory again for the next reading
        except CacheError:  # what a tail makes may be something that no cache keeps
            return sample

    def _measure(self) -> None:
        found = self.found
        must = _spread(self._samples, _PROVED)
        self._rows, self._sampled_bytes = RowBuffer(), 0
        started = time.monotonic()
        for index in dict.fromkeys([*must, *_scattered(self._samples, _MEASURED)]):
            if index not in must and time.monotonic() - started > _SECONDS:
                break
            try:
                self._measure_one(index, index in must)
            except BaseException as error:
                not_interrupted(error)
                if not self._skip or not isinstance(error, Exception):
                    raise
                if index in must:  # of the others, how many are read is a matter of time
                    found.digests[index] = "failed"
        if self._sampled_bytes:
            size = bytes_in_file(self._rows.table(), self._compress, self._samples)
            found.in_file = size / self._sampled_bytes

    def _measure_one(self, index: int, must: bool) -> None:
        found, cut = self.found, self.cut
        self._seed(index, 0)
        detector = DrawDetector(index)
        begun = time.perf_counter()
        try:
            first = read_row(cut, index, found.calls)
        finally:
            if moved := detector.moved():
                found.drawn = min(filter(None, (found.drawn, (index, moved))))
        structure, leaves = first
        for name, leaf in zip(column_names(structure), leaves, strict=True):
            found.columns[name] = found.columns.get(name, False) or leaf.is_image
        try:
            leaves = images_encoded(self.images, index, structure, leaves)
        except CacheError:
            if not self._skip:
                raise
            # It is left out; its digest stays that of what was read.
        found.seconds.append(time.perf_counter() - begun)
        found.bytes.append(sum(leaf.values.nbytes for leaf in leaves))
        if self._rows.structure in (None, structure) and self._sampled_bytes < _SAMPLED_BYTES:
            with suppress(CacheError):  # making a part raises it
                self._rows.add(index, structure, leaves)
                self._sampled_bytes += found.bytes[-1]
        if not must:
            return
        found.digests[index] = _digest(first)
        self._seed(index, 1)
        differs = _difference(first, read_row(cut, index, found.calls))
        if differs:
            found.random = found.random or f"sample {index} read twice differs in {differs}"
            self._seed(index, 0)
            if _difference(first, read_row(cut, index, found.calls)):
                found.digests[index] = "random"

    def _seed(self, index: int, turn: int) -> None:
        """Seed the generators; on turn 0 also restore those of the dataset itself."""
        seed_for(index, turn)
        if turn == 0:
            for put, state in self._own:
                put(state)


def _spread(samples: int, count: int) -> list[int]:
    """Return up to ``count`` samples, evenly spread, with the first and the last."""
    last = min(samples, count) - 1
    return sorted({round(n * (samples - 1) / max(1, last)) for n in range(last + 1)})


def _scattered(samples: int, count: int) -> list[int]:
    """Like `_spread`, but of many samples a random few: kinds of samples may alternate."""
    if samples <= 6 * count:
        return _spread(samples, count)
    return sorted(random.Random(0).sample(range(samples), count))


def _rejoined(sample: Any) -> Any:
    """Return ``sample`` as a cache gives it back, in memory of its own.

    Raises:
        CacheError: no cache keeps it.
    """
    structure, leaves = split(sample)
    return join(structure, [value_of(leaf.kind, leaf.values) for leaf in leaves])


def _digest(row: _Row) -> str:
    structure, leaves = row
    digest = hashlib.blake2b(json.dumps(structure).encode(), digest_size=16)
    for leaf in leaves:
        if leaf.kind == PALETTE:  # another zlib makes another file of the same image
            digest.update(repr((PALETTE, contents(value_of(PALETTE, leaf.values)))).encode())
            continue
        digest.update(f"{leaf.kind} {leaf.values.dtype.str} {leaf.values.shape} ".encode())
        digest.update(leaf.values.tobytes())
    return digest.hexdigest()


def _difference(one: _Row, other: _Row) -> str:
    """Say in which column two readings of a sample differ; "" if in none."""
    if one[0] != other[0]:
        return "the keys or lengths of its containers"
    for name, a, b in zip(column_names(one[0]), one[1], other[1], strict=True):
        if a.kind != b.kind or (a.values.shape != b.values.shape and a.kind != PALETTE):
            return f"the type or shape of {name!r} ({a.kind} {list(a.values.shape)})"
        if a.values.tobytes() != b.values.tobytes():
            return f"the values of {name!r} ({a.kind})"
    return ""


def same_samples(one: Any, other: Any) -> bool:
    """Return whether two samples have the same types, structure and values, to the bit."""
    try:
        return not _difference(split(one), split(other))
    except CacheError:  # what a tail makes may be something that no cache keeps
        if isinstance(one, (dict, list, tuple)) and type(one) is type(other):
            members = (each.items() if isinstance(each, dict) else each for each in (one, other))
            return len(one) == len(other) and all(map(same_samples, *members))
        state = equal_state(one)
        return state is not None and state == equal_state(other)

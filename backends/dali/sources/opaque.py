"""Any other dataset: its own code loads its images, in torch's workers, and a graph does the rest.

    dataset[i] ──user's code──> image ──chain──> sample          as it is
                                  │
    a copy     ──user's code──> image ──Recorder──> sample with a Placeholder
                                  └──> pixels ─────────────────> graph

What stands in front of the chain and is not known (somebody's own functions, ToPILImage) runs in
the workers too. Code of the dataset's that draws random numbers before the chain moves the
streams from which the chain draws: where they have come to is handed on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dataloaders.cache.cut import Call, Cut, Path, equal_state, part_at, put
from dataloaders.cache.study import same_samples
from dataloaders.errors import BackendUnavailable
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.find import Copies, Found, NotCopyable, find_chains
from dataloaders.transforms.operators.table import operator_of
from dataloaders.transforms.read import Member, Run

from ..odd import pixels_into
from .proof import as_tensor, attempts, generators_kept, spread

__all__ = ["Opaque", "Placeholder", "Recorded", "Recordings", "opaque_for"]

_PROVED = 4
_BLOCK = 624  # words of a Mersenne twister's state
_MOST_BLOCKS = 1 << 12
_CHANNELS = {"L": 1, "RGB": 3}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Placeholder:
    """What stands in a sample for the image that a graph is yet to make."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Placeholder()"


class Recorded(NamedTuple):
    """One sample whose image has not gone through the chain.

    Attributes:
        sample: with a `Placeholder` for the image.
        pixels: uint8 [height, width, channels].
        stream: what torch's generator was seeded with last, and how many words it had given, if
            the dataset moved it before the chain; else None. (Nor is it known, nor needed, where
            the dataset draws from a generator that was not seeded for this sample.)
        python: the state of the module ``random``, if the dataset moved it; else None.
    """

    sample: Any
    pixels: npt.NDArray[np.uint8]
    stream: tuple[int, int] | None
    python: Any


class Recordings(NamedTuple):
    """The samples of one batch, fit to be sent by a worker.

    Attributes:
        samples: n of them, each with a `Placeholder` for its image.
        pixels: uint8, those of all images, one behind the other; in shared memory from a worker.
        shapes: (height, width, channels) of each.
        streams, pythons: by place in the batch; see `Recorded`.
    """

    samples: list[Any]
    pixels: torch.Tensor
    shapes: list[tuple[int, ...]]
    streams: dict[int, tuple[int, int]]
    pythons: dict[int, Any]

    @classmethod
    def of(cls, samples: Sequence[Recorded]) -> Recordings:
        """These, packed; to be called where they were made, as a collate_fn is."""
        ends = np.cumsum([0, *(each.pixels.size for each in samples)]).tolist()
        flat = torch.empty(0, dtype=torch.uint8)
        if (
            ends[-1] and get_worker_info() is not None
        ):  # straight into what is sent, as torch collates there
            whole = flat._typed_storage()  # type: ignore[no-untyped-call]
            flat = flat.new(whole._new_shared(ends[-1], device=flat.device))
        flat = flat.resize_(ends[-1])
        array = flat.numpy()
        for each, first, last in zip(samples, ends, ends[1:], strict=False):
            array[first:last] = each.pixels.reshape(-1)
        numbered = list(enumerate(samples))
        return cls(
            [each.sample for each in samples],
            flat,
            [each.pixels.shape for each in samples],
            {n: each.stream for n, each in numbered if each.stream is not None},
            {n: each.python for n, each in numbered if each.python is not None},
        )

    @property
    def images(self) -> list[npt.NDArray[np.uint8]]:
        """uint8 [height, width, channels] each: views of ``pixels``."""
        found, place, flat = [], 0, self.pixels.numpy()
        for shape in self.shapes:
            size = int(np.prod(shape))
            found.append(flat[place : place + size].reshape(shape))
            place += size
        return found

    def draws(self, words: npt.ArrayLike) -> Draws:
        """The streams as the chain finds them, of samples that were seeded with these words."""
        words, skipped = np.array(words, np.uint64), np.zeros(len(self.samples), np.int64)
        for number, (seed, given) in self.streams.items():
            words[number, 0], skipped[number] = seed, given
        draws = Draws(words)
        if self.streams:
            draws.skip(skipped)
        for number, state in self.pythons.items():
            draws.python(number).setstate(state)
        return draws


class Opaque:
    """A dataset whose own code loads its images.

    Attributes:
        dataset: gives a `Recorded` for each index, in workers or here; map-style.
        head: what runs on an image there, in front of the rest.
        transform: the rest of the chain: what each recorded image is to go through.
        path: the keys to the image in a sample.
        form: what the rest of the chain is given: a PIL image ("pil"), or a uint8 tensor ("bytes").
        wraps: whether that tensor is one of torchvision's ``tv_tensors.Image``.
        channels: of each image.
        user_code: False: what there is has run when a sample is recorded.
    """

    user_code = False

    def __init__(self, dataset: _Recording, head: Run, transform: Run, copies: Copies) -> None:
        self.dataset = dataset
        self.head = head
        self.transform = transform
        self._copies = copies

    @property
    def path(self) -> Path:
        """See above."""
        return self.dataset.path or ()

    @property
    def form(self) -> Literal["pil", "bytes"]:
        """See above."""
        return self.dataset.recorder.form or "pil"

    @property
    def wraps(self) -> bool:
        """See above."""
        return self.dataset.recorder.wraps

    @property
    def channels(self) -> int:
        """See above."""
        return self.dataset.recorder.channels

    def refresh(self) -> None:
        """What was assigned on the user's dataset since comes over: its epoch, for instance."""
        self._copies.refresh()

    def sample(self, recorded: Any, image: Any) -> Any:
        """``recorded``, a sample with a `Placeholder`, with ``image`` in its place."""
        return put(recorded, self.path, lambda _: image)


def opaque_for(dataset: Any) -> Opaque | str:
    """How images of ``dataset`` are recorded; or what stands in the way and what to do, in words.

    Reads up to four samples of throw-away copies, on this thread; random states are then what they
    were.
    """
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return f"{name} is iterable, and has no samples by index; give it __getitem__ and __len__"
    try:
        chains = find_chains(dataset)
        obstacle = _obstacle(name, chains)
        if obstacle is not None:
            return obstacle
        trial = _opaque(dataset, chains)
        obstacle = _proved(dataset, trial)
        if obstacle is not None:
            return f"{name}: {obstacle}"
        found = _opaque(dataset, chains)
        found.dataset.path = trial.dataset.path
        found.dataset.recorder.expect(trial.dataset.recorder)
        return found
    except NotCopyable as error:
        return str(error)
    except Exception as error:  # a dataset may be anything
        return f"{name} could not be copied and read ({type(error).__name__}: {error})"


def _obstacle(name: str, chains: list[Found]) -> str | None:
    if not chains:
        return (
            f"{name} holds no torchvision transform that could move; keep it as an attribute, such "
            "as self.transform, and call that on the image"
        )
    states = [equal_state([member.transform for member in found.members]) for found in chains]
    if len(chains) > 1 and (None in states or len(set(states)) > 1):
        places = ", ".join(found.where for found in chains)
        return f"{name} holds {len(chains)} different chains ({places}), and a graph serves one"
    if _known(chains[0].members) == len(chains[0].members):
        return f"nothing in {chains[0].where} is known, so that nothing of it could move"
    return None


def _known(members: Sequence[Member]) -> int:
    """How many members are in front of the first one that a graph may take."""
    return next(
        (
            number
            for number, member in enumerate(members)
            if member.torchvision != "ToPILImage" and not isinstance(operator_of(member), str)
        ),
        len(members),
    )


def _opaque(dataset: Any, chains: list[Found]) -> Opaque:
    members = chains[0].members
    known = _known(members)
    head = Run([member.transform for member in members[:known]])
    recorder = Recorder(head)
    ids = {id(found.chain) for found in chains}
    copies = Copies(dataset, lambda chain: recorder if id(chain) in ids else chain)
    kind = _ManyRecording if hasattr(copies.dataset, "__getitems__") else _Recording
    rest = Run([member.transform for member in members[known:]])
    return Opaque(kind(copies.dataset, recorder), head, rest, copies)


def _proved(dataset: Any, opaque: Opaque) -> str | None:
    """Why its samples are not those of ``dataset``; None: those compared are."""
    recorder, transform = opaque.dataset.recorder, opaque.transform
    own = Copies(dataset, lambda chain: chain).dataset
    late = False

    def ours(index: int) -> Any:
        nonlocal late
        recorder.whole = ()
        found = opaque.dataset.record([index])[0]
        late = not _same_states(recorder.whole, _all_states())
        _restore(recorder.whole)
        value = recorder.as_recorded(found.pixels)
        return opaque.sample(found.sample, transform(value))

    with generators_kept(dataset) as restart:
        read = 0
        for index in spread(len(dataset), _PROVED):
            theirs, made = attempts(index, restart, lambda at: _sample(own, at), ours)
            if isinstance(theirs, Exception):
                continue  # it is raised when that sample is asked for
            read += 1
            if isinstance(made, BackendUnavailable):
                return str(made)
            if isinstance(made, Exception):
                return (
                    f"without its transform sample {index} could not be made "
                    f"({type(made).__name__}: {made}); let nothing work on what the transform gives"
                )
            if not same_samples(theirs, made):
                if late:
                    return (
                        "its own code draws random numbers after its transform, which then would "
                        "be others; draw them before"
                    )
                return f"its own code changes what its transform gives (sample {index} is another)"
    return None if read or not len(dataset) else "none of the samples tried could be read"


class Recorder(Run):
    """What stands in the copy for the chain: keeps what it is called with.

    Attributes:
        form, channels, wraps: of what was recorded; all must be alike.
        whole: if not None, the random states when it was called last, NumPy's too.
    """

    def __init__(self, head: Run) -> None:
        super().__init__(head.transforms)
        self.form: Literal["pil", "bytes"] | None = None
        self.channels = 3
        self.wraps = False
        self.whole: tuple[Any, ...] | None = None
        self._calls: list[tuple[Placeholder, Any, Any]] = []

    def __call__(self, *values: Any) -> Any:
        """A placeholder for what the chain would make of the image.

        Raises:
            BackendUnavailable: it is no image, or not like those before it.
        """
        if not values or not all(map(_is_plain, values[1:])):
            raise BackendUnavailable(
                f"its transform is called with {len(values)} values, and a graph makes one image; "
                "call it with the image alone, or use backend='prefetch'"
            )
        pixels = self._pixels(super().__call__(values[0]))
        if self.whole is not None:
            self.whole = _all_states()
        placeholder = Placeholder()
        self._calls.append((placeholder, pixels, _states()))
        return placeholder if len(values) == 1 else (placeholder, *values[1:])

    def take(self) -> list[tuple[Placeholder, Any, Any]]:
        """(placeholder, pixels, random states) of each call since this was last asked."""
        calls, self._calls = self._calls, []
        return calls

    def expect(self, other: Recorder) -> None:
        """Images are to be like those of ``other``."""
        self.form, self.channels, self.wraps = other.form, other.channels, other.wraps

    def as_recorded(self, pixels: npt.NDArray[np.uint8]) -> Any:
        """What was recorded, again."""
        if self.form == "bytes":
            return as_tensor(pixels, wraps=self.wraps)
        from PIL import Image

        return Image.fromarray(pixels if self.channels == 3 else pixels[..., 0])

    def _pixels(self, value: Any) -> npt.NDArray[np.uint8]:
        form: Literal["pil", "bytes"]
        wraps = _is_wrapped(value)
        plain = wraps or type(value) is torch.Tensor
        if plain and value.dtype is torch.uint8 and value.ndim == 3:
            form, channels = "bytes", len(value)
            told = f"a uint8 tensor of {channels} channels"
            known = channels in (1, 3)
        elif callable(getattr(value, "tobytes", None)) and hasattr(value, "mode"):
            form, channels = "pil", _CHANNELS.get(value.mode, 0)
            told, known = f"a PIL image of mode {value.mode}", channels > 0
        else:
            form, channels, known = "pil", 0, False
            told = f"a {type(value).__module__}.{type(value).__name__}"
        if not known:
            raise BackendUnavailable(
                f"its transform is given {told}, and a graph takes PIL images of mode RGB or L and "
                "uint8 tensors of 1 or 3 channels; convert it in the dataset"
            )
        if self.form is None:
            self.form, self.channels, self.wraps = form, channels, wraps
        elif (form, channels, wraps) != (self.form, self.channels, self.wraps):
            raise BackendUnavailable(
                f"its transform is given {told}, and before that another sort of image of "
                f"{self.channels} channels, and a graph takes one; convert it in the dataset"
            )
        if form == "bytes":
            planes = value.as_subclass(torch.Tensor).cpu()
            return np.ascontiguousarray(planes.permute(1, 2, 0).numpy())
        value.load()  # what is wrong with a file shows here
        pixels = np.empty((value.height, value.width, channels), np.uint8)
        pixels_into(pixels.reshape(-1), value)
        return pixels


class _Recording:
    """The dataset in the workers.

    Attributes:
        path: the keys to the image in a sample; None: not known yet.
    """

    def __init__(self, dataset: Any, recorder: Recorder) -> None:
        self.dataset = dataset
        self.recorder = recorder
        self.path: Path | None = None

    def __repr__(self) -> str:
        return repr(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Recorded:
        return self.record([index])[0]

    def record(self, indices: Sequence[Any]) -> list[Recorded]:
        """These samples.

        Raises:
            BackendUnavailable: the transform was not called once for each.
        """
        self.recorder.take()  # of a sample that failed
        before = _states()
        samples = [self.dataset[index] for index in indices]
        return self._recorded(indices, samples, before)

    def _recorded(
        self, indices: Sequence[Any], samples: Sequence[Any], before: tuple[Any, ...]
    ) -> list[Recorded]:
        calls = self.recorder.take()
        if len(calls) != len(samples):
            where = f"sample {indices[0]!r}" if len(indices) == 1 else f"{len(indices)} samples"
            raise BackendUnavailable(
                f"{where} of {type(self.dataset).__name__} called the transform {len(calls)} "
                "times, and a graph serves one call for each sample; use backend='prefetch'"
            )
        found = []
        for index, sample, (placeholder, pixels, states) in zip(
            indices, samples, calls, strict=True
        ):
            if self.path is None:
                self.path = self._path(sample, placeholder)
            if not _is_at(sample, self.path, placeholder):
                raise BackendUnavailable(
                    f"in sample {index!r} of {type(self.dataset).__name__} the image is not where "
                    "it is in the first ones; use backend='prefetch'"
                )
            found.append(Recorded(sample, pixels, *_moved(before, states)))
        return found

    def _path(self, sample: Any, placeholder: Placeholder) -> Path:
        calls: tuple[Call, ...] | str = Cut(None, (), [(0, placeholder)], (), ()).calls_in(sample)
        if isinstance(calls, str):
            raise BackendUnavailable(f"{calls}; give it as one part of the sample, unchanged")
        return calls[0][1]


class _ManyRecording(_Recording):
    """The same, of a dataset that is asked for many samples at once."""

    def __getitems__(self, indices: Sequence[Any]) -> list[Recorded]:
        return self.record(indices)

    def record(self, indices: Sequence[Any]) -> list[Recorded]:
        """See `_Recording`."""
        self.recorder.take()
        before = _states()
        samples = self.dataset.__getitems__(list(indices))
        return self._recorded(indices, samples, before)


def _sample(dataset: Any, index: int) -> Any:
    many = getattr(dataset, "__getitems__", None)
    return dataset[index] if many is None else many([index])[0]


def _is_at(sample: Any, path: Path, placeholder: Placeholder) -> bool:
    try:
        return part_at(sample, path) is placeholder
    except (LookupError, TypeError, AttributeError):
        return False


def _is_wrapped(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ == "Image" and kind.__module__.startswith("torchvision.tv_tensors")


def _is_plain(value: Any) -> bool:
    """Whether a transform that is called with it beside an image hands it on as it is."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _states() -> tuple[Any, ...]:
    """Those that operators draw from."""
    return torch.default_generator.get_state(), random.getstate()


def _all_states() -> tuple[Any, ...]:
    return *_states(), np.random.get_state()


def _restore(states: tuple[Any, ...] | None) -> None:
    assert states
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _same_states(one: tuple[Any, ...] | None, other: tuple[Any, ...]) -> bool:
    assert one
    numpys = zip(one[2], other[2], strict=True)
    return (
        torch.equal(one[0], other[0])
        and one[1] == other[1]
        and all(np.array_equal(a, b) for a, b in numpys)
    )


def _moved(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[tuple[int, int] | None, Any]:
    """Where torch's and Python's generators have come to; None for what has not moved."""
    stream = None
    if not torch.equal(before[0], after[0]) and (
        _is_fresh(before[0]) or _seed(before[0]) != _seed(after[0])
    ):
        stream = _stream(after[0])
    return stream, None if before[1] == after[1] else after[1]


def _is_fresh(state: torch.Tensor) -> bool:
    """Whether torch's generator was seeded and has given nothing, as it is under ``seed=``."""
    numbers = state.numpy()
    return bool(numbers[8] == 1 and not numbers[16:24].any())


def _seed(state: torch.Tensor) -> int:
    return int(state.numpy()[:4].view(np.uint32)[0])


def _stream(state: torch.Tensor) -> tuple[int, int]:
    """What torch's generator in this state was seeded with, and how many words it has given.

    The state is ATen's ``CPUGeneratorImplStateLegacy``: the seed, how many words of the block are
    left (1: none), a flag, how many are given, and the block.

    Raises:
        BackendUnavailable: it has not come there from its seed.
    """
    numbers, seed = state.numpy(), _seed(state)
    given = int(numbers[16:24].view(np.uint64)[0])
    block = numbers[24 : 24 + 8 * _BLOCK].view(np.uint64).astype(np.uint32)
    bits: Any = np.random.MT19937(0)
    bits._legacy_seeding(seed)
    for number in range(_MOST_BLOCKS):
        if np.array_equal(bits.state["state"]["key"], block):
            return seed, (number - 1) * _BLOCK + given if number else 0
        bits.random_raw(_BLOCK if number else 1, output=False)  # which makes the next block
    raise BackendUnavailable(
        "the dataset's own code set the state of torch's generator to one that is not known; seed "
        "it instead, or use a generator of its own"
    )

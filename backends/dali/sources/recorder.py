"""A dataset in the workers, with a recorder in the place of its chain.

dataset[i] ──user's code──> image ──Recorder──> Placeholder ──user's code──> sample
                                        └─ pixels, random states ─┐            │
                                                                  Recorded <───┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dataloaders.cache.sample.cut import Call, Cut, Path, part_at
from dataloaders.errors import BackendUnavailable
from dataloaders.transforms.read import Run

from ..odd import pixels_into
from .proof import as_tensor
from .recordings import Placeholder, Recorded
from .streams import all_states, moved, states

__all__ = ["ManyRecording", "Recorder", "Recording"]

_CHANNELS = {"L": 1, "RGB": 3}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Recorder(Run):
    """What stands in the copy for the chain: keeps what it is called with.

    Attributes:
        form, channels, wraps: of what was recorded; all must be alike.
        whole: if not None, the random states when it was called last, NumPy's too.
        given_arrays: whether it was called with an array of NumPy's.
    """

    def __init__(self, head: Run) -> None:
        super().__init__(head.transforms)
        self.form: Literal["pil", "bytes"] | None = None
        self.channels = 3
        self.wraps = False
        self.whole: tuple[Any, ...] | None = None
        self.given_arrays = False
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
            self.whole = all_states()
        placeholder = Placeholder()
        self._calls.append((placeholder, pixels, states()))
        return placeholder if len(values) == 1 else (placeholder, *values[1:])

    def take(self) -> list[tuple[Placeholder, Any, Any]]:
        """(placeholder, pixels, random states) of each call since this was last asked."""
        calls, self._calls = self._calls, []
        return calls

    def expect(self, form: Literal["pil", "bytes"] | None, channels: int, wraps: bool) -> None:
        """Images are to be like these."""
        self.form, self.channels, self.wraps = form, channels, wraps

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
            self.given_arrays = isinstance(value, np.ndarray)
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


class Recording:
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
        before = states()
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
        for index, sample, (placeholder, pixels, then) in zip(indices, samples, calls, strict=True):
            if self.path is None:
                self.path = self._path(sample, placeholder)
            if not _is_at(sample, self.path, placeholder):
                raise BackendUnavailable(
                    f"in sample {index!r} of {type(self.dataset).__name__} the image is not where "
                    "it is in the first ones; use backend='prefetch'"
                )
            found.append(Recorded(sample, pixels, *moved(before, then)))
        return found

    def _path(self, sample: Any, placeholder: Placeholder) -> Path:
        calls: tuple[Call, ...] | str = Cut(None, (), [(0, placeholder)], (), ()).calls_in(sample)
        if isinstance(calls, str):
            raise BackendUnavailable(f"{calls}; give it as one part of the sample, unchanged")
        return calls[0][1]


class ManyRecording(Recording):
    """The same, of a dataset that is asked for many samples at once."""

    def __getitems__(self, indices: Sequence[Any]) -> list[Recorded]:
        return self.record(indices)

    def record(self, indices: Sequence[Any]) -> list[Recorded]:
        """See `Recording`."""
        self.recorder.take()
        before = states()
        samples = self.dataset.__getitems__(list(indices))
        return self._recorded(indices, samples, before)


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

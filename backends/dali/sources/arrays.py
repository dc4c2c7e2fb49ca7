"""torchvision's datasets that hold all of their pixels in memory.

MNIST.data[indices] ──> [28, 28, 1] each          CIFAR10.data[indices] ──> [32, 32, 3] each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .source import Failed, Found, Image, Source

__all__ = ["ArraySource", "array_source"]


@dataclass(frozen=True)
class _Layout:
    """Where a class keeps its samples.

    Attributes:
        target: from (dataset, index), before any target_transform.
        channels: of a pixel.
        planes: whether an image's channels come first.
        data: the attribute with the pixels.
    """

    target: Callable[[Any, Any], Any]
    channels: int
    planes: bool = False
    data: str = "data"


def _labels(dataset: Any, index: Any) -> Any:
    return None if dataset.labels is None else int(dataset.labels[index])


def _qmnist(dataset: Any, index: Any) -> Any:
    target = dataset.targets[index]
    return int(target[0]) if dataset.compat else target


def _targets(dataset: Any, index: Any) -> int:
    return int(dataset.targets[index])


_KNOWN = {
    "MNIST": _Layout(_targets, 1),  # and FashionMNIST, KMNIST, EMNIST
    "QMNIST": _Layout(_qmnist, 1),
    "CIFAR10": _Layout(lambda dataset, index: dataset.targets[index], 3),  # and CIFAR100
    "SVHN": _Layout(_labels, 3, planes=True),
    "STL10": _Layout(_labels, 3, planes=True),
    "USPS": _Layout(_targets, 1),
    "SEMEION": _Layout(_labels, 1),
    "FER2013": _Layout(lambda dataset, index: dataset._samples[index][1], 1, data="_samples"),
}
"""By the name of the class in torchvision.datasets whose ``__getitem__`` it is."""


def array_source(dataset: Any) -> Source | str | None:
    """The pixels of ``dataset``; why they cannot be used; None if it is of no class known here."""
    try:
        from torchvision import datasets
    except ImportError:
        return None

    kind = type(dataset)
    for name, layout in _KNOWN.items():
        known = getattr(datasets, name, None)
        if known is None or kind.__getitem__ is not known.__getitem__:
            continue
        if getattr(kind, "__getitems__", None) is not getattr(known, "__getitems__", None):
            return None
        source = ArraySource(dataset, layout)
        return source.obstacle() or source
    return None


class ArraySource(Source):
    """Pixels in memory; what the dataset holds is looked at anew for each batch."""

    kind = "pixels"
    at_once = True

    def __init__(self, dataset: Any, layout: _Layout) -> None:
        self._dataset = dataset
        self._layout = layout
        self.channels = layout.channels

    @property
    def transform(self) -> Any:
        """See `Source`."""
        return self._dataset.transform

    @property
    def user_code(self) -> bool:
        """See `Source`."""
        return self._dataset.target_transform is not None

    def __len__(self) -> int:
        return len(self._dataset)

    def obstacle(self) -> str | None:
        """Why its pixels cannot be used, in words."""
        data, layout = getattr(self._dataset, self._layout.data), self._layout
        one = data[0][0] if layout.data == "_samples" and len(data) else data[:1]
        shape, dtype = tuple(one.shape)[-3:], str(getattr(one, "dtype", type(one).__name__))
        places = 2 if layout.channels == 1 else 3
        channels = shape[-3 if layout.planes else -1] if len(shape) >= 3 else 0
        if dtype.removeprefix("torch.") != "uint8" or (places == 3 and channels != 3):
            return (
                f"{type(self._dataset).__name__}.{layout.data} holds {dtype} {list(shape)}, and "
                "known are images of uint8 as torchvision reads them"
            )
        return None

    def image(self, index: Any, *, decode: bool = False) -> Found:
        """See `Source`."""
        try:
            data = getattr(self._dataset, self._layout.data)[index]
            return self._image(_array(data[0] if self._layout.data == "_samples" else data))
        except Exception as error:  # an index that is none
            return Failed(error)

    def images(self, indices: Sequence[Any], *, decode: bool = False) -> list[Found]:
        """See `Source`: out of a whole array, they are taken at once."""
        data = getattr(self._dataset, self._layout.data)
        if isinstance(data, (np.ndarray, torch.Tensor)):
            try:
                return [self._image(pixels) for pixels in _array(data)[np.asarray(indices)]]
            except Exception:
                pass  # one by one it shows which of them is none
        return super().images(indices)

    def sample(self, index: Any, image: Any) -> Any:
        """See `Source`."""
        target, change = self._layout.target(self._dataset, index), self._dataset.target_transform
        return image, target if change is None else change(target)

    def _image(self, pixels: npt.NDArray[np.uint8]) -> Image:
        if self._layout.channels == 1:
            pixels = pixels[..., None]
        elif self._layout.planes:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != self.channels:
            raise TypeError(f"an image of {pixels.dtype} {list(pixels.shape)}")
        return Image(np.ascontiguousarray(pixels), *pixels.shape[:2])


def _array(data: Any) -> npt.NDArray[Any]:
    return data.numpy() if isinstance(data, torch.Tensor) else np.asarray(data)

"""What a dataset's samples consist of, for a graph: an image as bytes or pixels, and the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Failed", "Found", "Image", "Source"]


class Image(NamedTuple):
    """One image, as a graph takes it.

    Attributes:
        data: an encoded file, uint8 [bytes]; or pixels, uint8 [height, width, channels]. Read only.
        height, width: in pixels, before any transform.
        name: of the file, for messages; "" if it has none.
        format: Pillow's name of the encoded file's; "PPM" where Pillow decoded it; "" of pixels.
    """

    data: npt.NDArray[np.uint8]
    height: int
    width: int
    name: str = ""
    format: str = ""


class Failed(NamedTuple):
    """An image that cannot be had.

    Attributes:
        error: what the dataset's own loader raises for it, of that type and with that text.
        name: of the file, for messages; "" if it is not known.
    """

    error: Exception
    name: str = ""


Found: TypeAlias = "Image | Failed"


class Source(ABC):
    """The images of a dataset by index, and what its samples have beside them.

    Attributes:
        kind: what `images` gives: "encoded" files, or "pixels".
        channels: of an image before any transform: 3 for RGB, 1 for Pillow's mode L.
        form: what the dataset hands to its transform: a PIL image ("pil"), or a uint8 tensor
            ("bytes") of [channels, height, width].
        wraps: whether that tensor is one of torchvision's ``tv_tensors.Image``.
        at_once: whether `images` takes a whole batch at once, so that single ones cost more.
        transform: the one chain that every image goes through; None: there is none.
        user_code: whether `sample` runs code of the user's.
        first_size: height and width of image 0 before any transform; None: not observed, or none.
    """

    kind: Literal["encoded", "pixels"]
    channels: int = 3
    form: Literal["pil", "bytes"] = "pil"
    wraps: bool = False
    at_once: bool = False
    first_size: tuple[int, int] | None = None

    @property
    @abstractmethod
    def transform(self) -> Any:
        """See above; what the dataset has now."""

    @property
    @abstractmethod
    def user_code(self) -> bool:
        """See above."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def image(self, index: Any, *, decode: bool = False) -> Found:
        """Image ``index``. On any thread, and on several at once; never raises.

        Args:
            index: what the dataset would be asked for.
            decode: whether Pillow has to decode an encoded file, whatever its header says: then
                what comes out is a file that DALI reads for sure, or the dataset's own error.
        """

    def images(self, indices: Sequence[Any], *, decode: bool = False) -> list[Found]:
        """`image` of each of ``indices``."""
        return [self.image(index, decode=decode) for index in indices]

    @abstractmethod
    def sample(self, index: Any, image: Any) -> Any:
        """Sample ``index`` of the dataset, with ``image`` for what the transform makes of it.

        May run the user's own code (``target_transform``), so on the consumer's thread only.
        """

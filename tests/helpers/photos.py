"""Image datasets as people have them: folders, files by a protocol, arrays, code of one's own."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.datasets import MNIST, ImageFolder

from .pictures import smooth as picture

__all__ = ["SIZE", "Digits", "Files", "Opened", "folder", "picture", "write_folder"]

SIZE = 11
"""Images in each: prime, so that no batch size but 1 divides it."""

Transform = Callable[[Any], Any] | None


def write_folder(root: Path, images: int = SIZE, format: str = "JPEG") -> Path:
    """Classes of JPEG files, as ImageFolder reads them."""
    for number in range(images):
        place = root / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        picture(number).save(place / f"{number:03}.{format.lower()}", format, quality=90)
    return root


@functools.cache
def _shared() -> Path:
    root = Path(tempfile.mkdtemp(prefix="dataloaders-photos-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return write_folder(root)


def folder(transform: Transform = None, target_transform: Transform = None) -> ImageFolder:
    """An ImageFolder of `SIZE` JPEG files, the same files in all of this process."""
    return ImageFolder(_shared(), transform, target_transform)


class Files(Dataset[Any]):
    """A dataset of somebody's own, with samples that are dicts."""

    def __init__(self, transform: Transform = None) -> None:
        self.paths = sorted(_shared().rglob("*.jpeg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def assemble(self, image: Any, target: int) -> dict[str, Any]:
        return {"image": image, "meta": {"label": target, "name": f"n{target}"}}

    def __getitem__(self, index: int) -> Any:
        image: Any = Image.open(self.paths[index]).convert("RGB")
        image = image if self.transform is None else self.transform(image)
        return self.assemble(image, 3 * index)


class Digits(MNIST):
    """torchvision's MNIST, of noise that is in memory from the start."""

    def __init__(self, transform: Transform = None, target_transform: Transform = None) -> None:
        self.data = torch.randint(
            0, 256, (SIZE, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        self.targets = torch.arange(SIZE) % 10
        self.transform = transform
        self.target_transform = target_transform


class Opened(Dataset[Any]):
    """A dataset of somebody's own, which decodes by code of its own and calls its transform."""

    def __init__(self, transform: Transform = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        image: Any = picture(index)
        return image if self.transform is None else self.transform(image), index

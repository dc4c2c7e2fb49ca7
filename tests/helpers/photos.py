"""Image datasets as users have them: folders, arrays, their own classes, and torchvision's."""

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
from torchvision import datasets

from .datasets import SIZE, MapDataset
from .pictures import noise, smooth

Transform = Callable[[Any], Any] | None


def write_folder(root: Path, images: int = SIZE, format: str = "JPEG") -> Path:
    """Write classes of image files, as ImageFolder reads them."""
    for number in range(images):
        place = root / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        smooth(number).save(place / f"{number:03}.{format.lower()}", format, quality=90)
    return root


@functools.cache
def _shared() -> Path:
    root = Path(tempfile.mkdtemp(prefix="dataloaders-photos-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return write_folder(root)


def folder(transform: Transform = None, target_transform: Transform = None) -> datasets.ImageFolder:
    """Return an ImageFolder of `SIZE` JPEG files, the same in all of this process."""
    return datasets.ImageFolder(_shared(), transform, target_transform)


class Opened(MapDataset):
    """A user's own dataset, which opens ``picture(index)`` and calls its transform."""

    picture: Callable[[int], Any] = staticmethod(smooth)

    def __init__(self, transform: Transform = None, **attributes: Any) -> None:
        super().__init__(transform=transform, **attributes)

    def sample(self, index: int) -> Any:
        image = self.picture(index)
        return image if self.transform is None else self.transform(image), index


class Files(Opened):
    """Another one, of files, whose samples are dicts."""

    def __init__(self, transform: Transform = None) -> None:
        super().__init__(transform)
        self.paths = sorted(_shared().rglob("*.jpeg"))

    def sample(self, index: int) -> Any:
        image: Any = Image.open(self.paths[index]).convert("RGB")
        image = image if self.transform is None else self.transform(image)
        return {"image": image, "meta": {"label": 3 * index, "name": f"n{index}"}}


class Digits(datasets.MNIST):
    """torchvision's MNIST, of noise in memory."""

    def __init__(self, transform: Transform = None, target_transform: Transform = None) -> None:
        self.data = torch.randint(
            0, 256, (SIZE, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        self.targets = torch.arange(SIZE) % 10
        self.transform = transform
        self.target_transform = target_transform


# torchvision's own, of one file a sample and of two; each takes an empty folder.


def image_folder(root: Path, **options: Any) -> Any:
    photos = write_folder(root / "photos", 6)
    noise(9, 12, 4).save(photos / "class2" / "9.png")
    return datasets.ImageFolder(str(photos), **options)


def voc_segmentation(root: Path, **options: Any) -> Any:
    base, names = root / "VOCdevkit" / "VOC2012", ("2012_0", "2012_1", "2012_2")
    (base / "ImageSets" / "Segmentation").mkdir(parents=True)
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text("\n".join(names))
    for kind, suffix, channels in (("JPEGImages", "jpg", 3), ("SegmentationClass", "png", 1)):
        (base / kind).mkdir()
        for number, name in enumerate(names):
            noise(9 + number, 12, channels, number).save(base / kind / f"{name}.{suffix}")
    return datasets.VOCSegmentation(str(root), **options)


OF_TORCHVISION = {"image_folder": image_folder, "voc_segmentation": voc_segmentation}

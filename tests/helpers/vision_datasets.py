"""torchvision's own datasets over tiny folders and files of the right layout.

One class of each way to open and pair files: by a loader, `Image.open` converted or as it is, with
a mask, with annotations. Each function takes an empty folder and the dataset's further arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchvision import datasets
from torchvision.datasets.vision import VisionDataset

from helpers.pictures import noise


def photo(path: Path, seed: int, channels: int = 3) -> None:
    """A JPEG or what the suffix says, of a size that depends on ``seed``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(9 + seed % 5, 12 + seed % 3, channels, seed).save(path)


def lines(path: Path, *texts: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))


def classes(folder: Path, *names: str) -> None:
    """Three photos in the folder of each class."""
    for label, name in enumerate(names):
        for number in range(3):
            photo(folder / name / f"{number}.jpg", 5 * label + number)


def image_folder(root: Path, **options: Any) -> Any:
    classes(root / "photos", "cat", "dog")
    photo(root / "photos" / "dog" / "9.png", 9, 4)
    return datasets.ImageFolder(str(root / "photos"), **options)


def pets(root: Path, **options: Any) -> Any:
    base = root / "oxford-iiit-pet"
    for number, name in enumerate(("Abyssinian_1", "beagle_1", "beagle_2")):
        photo(base / "images" / f"{name}.jpg", number)
        photo(base / "annotations" / "trimaps" / f"{name}.png", number, 1)
    texts = ("Abyssinian_1 1 1 1", "beagle_1 2 2 1", "beagle_2 2 2 2")
    lines(base / "annotations" / "trainval.txt", *texts)
    return datasets.OxfordIIITPet(str(root), **options)


def pets_segmented(root: Path, **options: Any) -> Any:
    return pets(root, target_types="segmentation", **options)


def inaturalist(root: Path, **options: Any) -> Any:
    classes(root / "2021_train", "00000_A_B_C_D_E_F_g", "00001_A_B_X_D_E_F_h")
    return datasets.INaturalist(str(root), target_type=["full", "class"], **options)


class _Annotations:
    """What pycocotools, which is not installed, has of three images."""

    def loadImgs(self, number: int) -> list[Any]:
        return [{"file_name": f"{number}.jpg"}]

    def getAnnIds(self, number: int) -> list[int]:
        return [10 * number, 10 * number + 1]

    def loadAnns(self, numbers: list[int]) -> list[Any]:
        return [{"id": number, "caption": f"a {number}"} for number in numbers]


def coco_detection(root: Path, **options: Any) -> Any:
    for number in (3, 5, 8):
        photo(root / f"{number}.jpg", number, 1 if number == 5 else 3)
    dataset = object.__new__(datasets.CocoDetection)  # whose constructor needs pycocotools
    VisionDataset.__init__(dataset, str(root), **options)
    dataset.__dict__.update(coco=_Annotations(), ids=[3, 5, 8])
    return dataset


def voc_segmentation(root: Path, **options: Any) -> Any:
    base, names = root / "VOCdevkit" / "VOC2012", ("2012_0", "2012_1", "2012_2")
    lines(base / "ImageSets" / "Segmentation" / "train.txt", *names)
    for number, name in enumerate(names):
        photo(base / "JPEGImages" / f"{name}.jpg", number)
        photo(base / "SegmentationClass" / f"{name}.png", number, 1)
    return datasets.VOCSegmentation(str(root), **options)


MAKERS: tuple[Callable[..., Any], ...] = (
    image_folder,
    pets,
    pets_segmented,
    inaturalist,
    coco_detection,
    voc_segmentation,
)
FILES = {maker.__name__: maker for maker in MAKERS}

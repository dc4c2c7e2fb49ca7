"""torchvision's own datasets over tiny folders and files of the right layout.

One class of each way to open and pair files: by a loader, with a mask, with annotations. Each
function takes an empty folder and the dataset's further arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchvision import datasets
from torchvision.datasets.vision import VisionDataset

from helpers.pictures import noise


def photo(path: Path, seed: int, channels: int = 3) -> None:
    """A JPEG or what the suffix says, of a size that depends on ``seed``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(9 + seed % 5, 12 + seed % 3, channels, seed).save(path)


def image_folder(root: Path, **options: Any) -> Any:
    for label, name in enumerate(("cat", "dog")):
        for number in range(3):
            photo(root / "photos" / name / f"{number}.jpg", 5 * label + number)
    photo(root / "photos" / "dog" / "9.png", 9, 4)
    return datasets.ImageFolder(str(root / "photos"), **options)


def voc_segmentation(root: Path, **options: Any) -> Any:
    base, names = root / "VOCdevkit" / "VOC2012", ("2012_0", "2012_1", "2012_2")
    (base / "ImageSets" / "Segmentation").mkdir(parents=True)
    (base / "ImageSets" / "Segmentation" / "train.txt").write_text("\n".join(names))
    for number, name in enumerate(names):
        photo(base / "JPEGImages" / f"{name}.jpg", number)
        photo(base / "SegmentationClass" / f"{name}.png", number, 1)
    return datasets.VOCSegmentation(str(root), **options)


def coco_detection(root: Path, **options: Any) -> Any:
    for number in (3, 5, 8):
        photo(root / f"{number}.jpg", number, 1 if number == 5 else 3)
    dataset = object.__new__(datasets.CocoDetection)  # whose constructor needs pycocotools
    VisionDataset.__init__(dataset, str(root), **options)
    names = {number: {"file_name": f"{number}.jpg"} for number in (3, 5, 8)}
    coco = SimpleNamespace(
        loadImgs=lambda number: [names[number]],
        getAnnIds=lambda number: [10 * number, 10 * number + 1],
        loadAnns=lambda numbers: [{"id": number, "caption": f"a {number}"} for number in numbers],
    )
    dataset.__dict__.update(coco=coco, ids=[3, 5, 8])
    return dataset


FILES: dict[str, Callable[..., Any]] = {
    "image_folder": image_folder,
    "voc_segmentation": voc_segmentation,
    "coco_detection": coco_detection,
}

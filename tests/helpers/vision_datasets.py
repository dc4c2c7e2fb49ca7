"""torchvision's own datasets over tiny folders and files of the right layout.

One class of each way to find, open and pair files; those that differ in names only are left out.
Each function takes an empty folder and the dataset's further arguments. Classes that ask for the
checksums of the published archives are told that all is well; their ``__getitem__`` is untouched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchvision import datasets
from torchvision.datasets.folder import default_loader
from torchvision.datasets.vision import VisionDataset

from helpers.pictures import noise

Maker = Callable[..., Any]


def photo(path: Path, seed: int, channels: int = 3) -> None:
    """A JPEG or what the suffix says, of a size that depends on ``seed``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise(9 + seed % 5, 12 + seed % 3, channels, seed).save(path)


def lines(path: Path, *texts: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))


def classes(folder: Path, names: tuple[str, ...], form: str, count: int = 3) -> None:
    """``count`` photos in the folder of each class."""
    for label, name in enumerate(names):
        for number in range(count):
            photo(
                folder / name / form.format(label=label + 1, number=number + 1), 5 * label + number
            )


def _without_checks(kind: Any, **others: Any) -> Any:
    return type(kind.__name__, (kind,), {"_check_integrity": lambda *_: True, **others})


# Of files


def image_folder(root: Path, **options: Any) -> Any:
    classes(root / "photos", ("cat", "dog"), "{number}.jpg")
    photo(root / "photos" / "dog" / "9.png", 9, 4)
    return datasets.ImageFolder(str(root / "photos"), **options)


def gtsrb(root: Path, **options: Any) -> Any:
    classes(root / "gtsrb" / "GTSRB" / "Training", ("00000", "00001"), "{number}.ppm")
    return datasets.GTSRB(str(root), **options)


def food101(root: Path, **options: Any) -> Any:
    classes(root / "food-101" / "images", ("pie", "soup"), "{number}.jpg")
    meta = {"pie": ["pie/1", "pie/3"], "soup": ["soup/2"]}
    lines(root / "food-101" / "meta" / "train.json", json.dumps(meta))
    return datasets.Food101(str(root), **options)


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
    kinds = ("00000_A_B_C_D_E_F_g", "00001_A_B_X_D_E_F_h")
    classes(root / "2021_train", kinds, "{number}.jpg")
    return datasets.INaturalist(str(root), target_type=["full", "class"], **options)


def flickr30k(root: Path, **options: Any) -> Any:
    for number in range(2):
        photo(root / f"{number}.jpg", number)
    lines(root / "captions", "0.jpg#0\ta cat", "0.jpg#1\tone cat", "1.jpg#0\ta dog")
    return datasets.Flickr30k(str(root), ann_file=str(root / "captions"), **options)


def caltech101(root: Path, **options: Any) -> Any:
    base = root / "caltech101" / "101_ObjectCategories"
    classes(base, ("BACKGROUND_Google", "ant", "bass"), "image_{number:04d}.jpg")
    return _without_checks(datasets.Caltech101)(str(root), **options)


def celeba(root: Path, **options: Any) -> Any:
    base, names = root / "celeba", [f"00000{n}.jpg" for n in range(3)]
    for number, name in enumerate(names):
        photo(base / "img_align_celeba" / name, number)
    lines(base / "list_eval_partition.txt", *(f"{name} 0" for name in names))
    lines(base / "identity_CelebA.txt", *(f"{name} {n}" for n, name in enumerate(names)))
    for file, width in (("bbox", 4), ("landmarks_align", 10), ("attr", 2)):
        heads = " ".join(f"h{n}" for n in range(width))
        rows = (f"{name} " + " ".join(["1"] * width) for name in names)
        lines(base / f"list_{file}_celeba.txt", 3, heads, *rows)
    options.setdefault("target_type", ["attr", "identity", "bbox", "landmarks"])
    return _without_checks(datasets.CelebA)(str(root), **options)


def lfw(root: Path, **options: Any) -> Any:
    base = root / "lfw-py"
    for number in range(2):
        photo(base / "lfw_funneled" / "Ann" / f"Ann_{number + 1:04d}.jpg", number)
    lines(base / "lfw-names.txt", "Ann\t2")
    lines(base / "peopleDevTrain.txt", 1, "Ann\t2")
    return _without_checks(datasets.LFWPeople)(str(root), split="train", **options)


def _filled(kind: Any, root: Path, options: dict[str, Any], **attributes: Any) -> Any:
    """A dataset whose constructor reads files by SciPy, with what it would have read."""
    dataset = object.__new__(kind)
    VisionDataset.__init__(dataset, str(root), **options)
    dataset.__dict__.update(attributes)
    return dataset


def stanford_cars(root: Path, **options: Any) -> Any:
    for number in range(3):
        photo(root / f"{number}.jpg", number)
    samples = [(str(root / f"{number}.jpg"), number) for number in range(3)]
    return _filled(datasets.StanfordCars, root, options, _samples=samples, loader=default_loader)


def clevr(root: Path, **options: Any) -> Any:
    base, scenes = root / "clevr" / "CLEVR_v1.0", []
    for number in range(3):
        photo(base / "images" / "train" / f"{number}.png", number)
        scenes.append({"image_filename": f"{number}.png", "objects": [{}] * (number + 1)})
    lines(base / "scenes" / "CLEVR_train_scenes.json", json.dumps({"scenes": scenes}))
    return datasets.CLEVRClassification(str(root), **options)


def cityscapes(root: Path, **options: Any) -> Any:
    for number in range(2):
        name = f"bern_{number}"
        photo(root / "leftImg8bit" / "train" / "bern" / f"{name}_leftImg8bit.png", number)
        truth = root / "gtFine" / "train" / "bern"
        photo(truth / f"{name}_gtFine_labelIds.png", number, 1)
        lines(truth / f"{name}_gtFine_polygons.json", json.dumps({"objects": [number]}))
    return datasets.Cityscapes(str(root), target_type=["semantic", "polygon"], **options)


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
    return _filled(datasets.CocoDetection, root, options, coco=_Annotations(), ids=[3, 5, 8])


def kitti(root: Path, **options: Any) -> Any:
    part = root / "Kitti" / "raw" / "training"
    for number in range(3):
        photo(part / "image_2" / f"00{number}.png", number)
        lines(part / "label_2" / f"00{number}.txt", *(["Car" + " 1" * 14] * (number + 1)))
    return datasets.Kitti(str(root), **options)


def _voc(root: Path, kind: str) -> None:
    base = root / "VOCdevkit" / "VOC2012"
    names = [f"2012_{number}" for number in range(3)]
    lines(base / "ImageSets" / kind / "train.txt", *names)
    for number, name in enumerate(names):
        photo(base / "JPEGImages" / f"{name}.jpg", number)
        photo(base / "SegmentationClass" / f"{name}.png", number, 1)
        objects = "<object><name>cat</name></object>" * (number + 1)
        lines(base / "Annotations" / f"{name}.xml", f"<annotation>{objects}</annotation>")


def voc_detection(root: Path, **options: Any) -> Any:
    _voc(root, "Main")
    return datasets.VOCDetection(str(root), **options)


def voc_segmentation(root: Path, **options: Any) -> Any:
    _voc(root, "Segmentation")
    return datasets.VOCSegmentation(str(root), **options)


def wider_face(root: Path, **options: Any) -> Any:
    base, texts = root / "widerface", []
    for number in range(2):
        photo(base / "WIDER_train" / "images" / f"{number}.jpg", number)
        texts += [f"{number}.jpg", number + 1, *(["1 2 3 4 0 0 0 0 0 0"] * (number + 1))]
    lines(base / "wider_face_split" / "wider_face_train_bbx_gt.txt", *texts)
    return _without_checks(datasets.WIDERFace)(str(root), **options)


FILES: dict[str, Maker] = {
    maker.__name__: maker
    for maker in (
        image_folder,
        gtsrb,
        food101,
        pets,
        pets_segmented,
        inaturalist,
        flickr30k,
        caltech101,
        celeba,
        lfw,
        stanford_cars,
        clevr,
        coco_detection,
        cityscapes,
        kitti,
        voc_detection,
        voc_segmentation,
        wider_face,
    )
}

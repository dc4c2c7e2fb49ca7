"""Which file and which target each sample of torchvision's own datasets has.

    Food101[i]  ──>  _image_files[i], _labels[i]

Their ``__getitem__`` opens that file, turns it into RGB (`Files.as_it_is`: it does not), applies
the transforms, and gives both. A subclass is known as long as it has the very same one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = ["Files", "files_of"]


def _none(dataset: Any) -> str | None:
    return None


@dataclass(frozen=True)
class Files:
    """How a class of datasets finds its samples.

    Attributes:
        path: of the file, from (dataset, index).
        target: from (dataset, index), before any target_transform.
        as_it_is: whether the image keeps the mode that the file has.
        joint: whether ``transforms`` is applied, to image and target; else ``transform`` and
            ``target_transform``.
        loader: the attribute that holds the function that loads a file, where there is one.
        obstacle: from a dataset, what stands in the way, in words; None: nothing does.
    """

    path: Callable[[Any, int], str | os.PathLike[str]]
    target: Callable[[Any, int], Any]
    as_it_is: bool = False
    joint: bool = False
    loader: str = "loader"
    obstacle: Callable[[Any], str | None] = _none


def files_of(dataset: Any) -> Files | None:
    """How ``dataset`` finds its samples; None if it is none of those known.

    Raises:
        ImportError: torchvision is not installed.
    """
    from torchvision import datasets

    kind = type(dataset)
    for name, files in _KNOWN.items():
        known = getattr(datasets, name, None)
        if known is not None and getattr(kind, "__getitem__", None) is known.__getitem__:
            many = getattr(kind, "__getitems__", None), getattr(known, "__getitems__", None)
            return files if many[0] is many[1] else None
    return None


def _member(attribute: str, part: int | None, dataset: Any, index: int) -> Any:
    """Entry ``index`` of a list, or a part of it."""
    found = getattr(dataset, attribute)[index]
    return found if part is None else found[part]


def _pairs(attribute: str, **others: Any) -> Files:
    """Of (path, target), in a list."""
    return Files(partial(_member, attribute, 0), partial(_member, attribute, 1), **others)


def _lists(paths: str, targets: str, **others: Any) -> Files:
    """Of two lists."""
    return Files(partial(_member, paths, None), partial(_member, targets, None), **others)


def _one_or_all(targets: list[Any]) -> Any:
    return targets[0] if len(targets) == 1 else tuple(targets) or None


def _caltech_path(images: str, name: str, dataset: Any, index: int) -> str:
    category, number = dataset.y[index], dataset.index[index]
    file = name.format(category=category + 1, number=number)
    return os.path.join(dataset.root, images, dataset.categories[category], file)


def _caltech_target(dataset: Any, index: int) -> Any:
    return _one_or_all([dataset.y[index] for _ in getattr(dataset, "target_type", "1")])


def _caltech_obstacle(dataset: Any) -> str | None:
    if set(getattr(dataset, "target_type", ())) <= {"category"}:
        return None
    return "it reads annotations, which is left to its own code"


def _caltech(images: str, name: str) -> Files:
    path = partial(_caltech_path, images, name)
    return Files(path, _caltech_target, as_it_is=True, obstacle=_caltech_obstacle)


def _celeba_path(dataset: Any, index: int) -> str:
    name = str(dataset.filename[index])
    return os.path.join(dataset.root, dataset.base_folder, "img_align_celeba", name)


def _celeba_target(dataset: Any, index: int) -> Any:
    kinds = {
        "attr": lambda: dataset.attr[index, :],
        "identity": lambda: dataset.identity[index, 0],
        "bbox": lambda: dataset.bbox[index, :],
        "landmarks": lambda: dataset.landmarks_align[index, :],
    }
    return _one_or_all([kinds[kind]() for kind in dataset.target_type])


def _celeba_obstacle(dataset: Any) -> str | None:
    if dataset.target_type or dataset.target_transform is None:
        return None
    return "it has no targets, so that its target_transform is not called"


def _cityscapes_target(dataset: Any, index: int) -> Any:
    from PIL import Image

    paths = zip(dataset.target_type, dataset.targets[index], strict=False)
    return _one_or_all(
        [
            dataset._load_json(path) if kind == "polygon" else Image.open(path)
            for kind, path in paths
        ]
    )


def _coco_path(dataset: Any, index: int) -> str:
    name = dataset.coco.loadImgs(dataset.ids[index])[0]["file_name"]
    return os.path.join(str(dataset.root), str(name))


def _coco_target(dataset: Any, index: int) -> Any:
    return dataset._load_target(dataset.ids[index])


def _coco_obstacle(dataset: Any) -> str | None:
    from torchvision.datasets import CocoDetection

    if type(dataset)._load_image is CocoDetection._load_image:
        return None
    return "it has a _load_image() of its own, which is left to its own code"


def _flickr_target(dataset: Any, index: int) -> Any:
    return dataset.annotations[dataset.ids[index]]


def _below_root(folders: tuple[str, ...], names: str, dataset: Any, index: int) -> str:
    return os.path.join(dataset.root, *folders, getattr(dataset, names)[index])


def _inaturalist_path(dataset: Any, index: int) -> str:
    category, name = dataset.index[index]
    return os.path.join(str(dataset.root), str(dataset.all_categories[category]), str(name))


def _inaturalist_target(dataset: Any, index: int) -> Any:
    category = dataset.index[index][0]
    return _one_or_all(
        [
            category if kind == "full" else dataset.categories_map[category][kind]
            for kind in dataset.target_type
        ]
    )


def _kitti_target(dataset: Any, index: int) -> Any:
    return dataset._parse_target(index) if dataset.train else None


def _mask(attribute: str, dataset: Any, index: int) -> Any:
    from PIL import Image

    return Image.open(getattr(dataset, attribute)[index])


def _pet_target(dataset: Any, index: int) -> Any:
    from PIL import Image

    targets = []
    for kind in dataset._target_types:
        if kind == "category":
            targets.append(dataset._labels[index])
        elif kind == "binary-category":
            targets.append(dataset._bin_labels[index])
        else:
            targets.append(Image.open(dataset._segs[index]))
    return _one_or_all(targets)


def _voc_target(dataset: Any, index: int) -> Any:
    from torchvision.datasets.voc import ET_parse

    return dataset.parse_voc_xml(ET_parse(dataset.annotations[index]).getroot())


def _wider_path(dataset: Any, index: int) -> str:
    return str(dataset.img_info[index]["img_path"])


def _wider_target(dataset: Any, index: int) -> Any:
    return None if dataset.split == "test" else dataset.img_info[index]["annotations"]


_KNOWN = {
    "DatasetFolder": _pairs("samples"),  # and ImageFolder, ImageNet, EuroSAT, Country211
    "Caltech101": _caltech("101_ObjectCategories", "image_{number:04d}.jpg"),
    "Caltech256": _caltech("256_ObjectCategories", "{category:03d}_{number:04d}.jpg"),
    "CelebA": Files(_celeba_path, _celeba_target, as_it_is=True, obstacle=_celeba_obstacle),
    "Cityscapes": Files(partial(_member, "images", None), _cityscapes_target, joint=True),
    "CLEVRClassification": _lists("_image_files", "_labels"),
    "CocoDetection": Files(_coco_path, _coco_target, joint=True, obstacle=_coco_obstacle),
    "DTD": _lists("_image_files", "_labels"),
    "FGVCAircraft": _lists("_image_files", "_labels"),
    "Flickr30k": Files(partial(_below_root, (), "ids"), _flickr_target),
    "Flickr8k": Files(partial(_member, "ids", None), _flickr_target),
    "Flowers102": _lists("_image_files", "_labels"),
    "Food101": _lists("_image_files", "_labels"),
    "GTSRB": _pairs("_samples"),
    "INaturalist": Files(_inaturalist_path, _inaturalist_target, as_it_is=True),
    "Imagenette": _pairs("_samples"),
    "Kitti": Files(partial(_member, "images", None), _kitti_target, as_it_is=True, joint=True),
    "LFWPeople": _lists("data", "targets", loader="_loader"),
    "OxfordIIITPet": Files(partial(_member, "_images", None), _pet_target, joint=True),
    "Places365": _pairs("imgs", joint=True),
    "RenderedSST2": _pairs("_samples"),
    "SBU": Files(partial(_below_root, ("dataset",), "photos"), partial(_member, "captions", None)),
    "StanfordCars": _pairs("_samples"),
    "SUN397": _lists("_image_files", "_labels"),
    "VOCDetection": Files(partial(_member, "images", None), _voc_target, joint=True),
    "VOCSegmentation": Files(partial(_member, "images", None), partial(_mask, "masks"), joint=True),
    "WIDERFace": Files(_wider_path, _wider_target, as_it_is=True),
}
"""By the name of the class in torchvision.datasets whose ``__getitem__`` it is."""

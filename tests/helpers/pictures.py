"""Pictures, image files and datasets of them as users have, made here, the same each time."""

from __future__ import annotations

import atexit
import functools
import io
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import datasets

from .datasets import SIZE, MapDataset

Transform = Callable[[Any], Any] | None


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Image.Image:
    """Return a PIL image of independent values: mode L, LA, RGB or RGBA."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values)


def smooth(
    number: int, height: int | None = None, width: int | None = None, mode: str = "RGB"
) -> Image.Image:
    """Return a smooth picture, a different one for each number; RGBA and CMYK have four planes."""
    height = height or 20 + 7 * (number % 5)
    width = width or 24 + 5 * (number % 4)
    y, x = np.mgrid[:height, :width]
    planes = [np.sin(x / (9 + number)) * 80 + 120, np.cos(y / 7) * 70 + 110, (x + y) * 3 + number]
    pixels = np.stack([*planes, x * 7 + number], 2).astype(np.uint8)
    if mode in ("RGBA", "CMYK"):
        return Image.frombytes(mode, (width, height), pixels.tobytes())
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3])).convert(mode)


def saved(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """Return the bytes of a file of ``image``."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def exif(orientation: int = 6, thumbnail: bytes = b"") -> bytes:
    """Return the content of an EXIF segment, followed by a JPEG thumbnail."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes() + thumbnail


def resampled(data: bytes, *factors: int) -> bytes:
    """Return a JPEG file whose header gives its components these sampling factors."""
    changed, place = bytearray(data), data.index(b"\xff\xc0")
    for number, factor in enumerate(factors):
        changed[place + 11 + 3 * number] = factor
    return bytes(changed)


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """Return a JPEG file with one more segment after its first two bytes."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + data[2:]


def adobe(transform: int) -> bytes:
    return b"Adobe\0\x64\0\0\0\0" + bytes([transform])


def without_jfif(data: bytes) -> bytes:
    assert data[2:4] == b"\xff\xe0"
    return data[:2] + data[4 + int.from_bytes(data[4:6], "big") :]


def image_files() -> dict[str, bytes]:
    """Return JPEG files of many writers, and some files of each other format."""
    colour, grey, clear = noise(21, 34), noise(21, 34, 1), noise(21, 34, 4)
    jpeg, square = saved(colour, subsampling=0), saved(noise(32, 32), subsampling=1)
    inks = noise(21, 34, 4, 1)
    inked = saved(Image.frombytes("CMYK", inks.size, inks.tobytes()))
    ycck = inked.replace(adobe(0), adobe(2))
    assert ycck != inked
    deep = Image.fromarray(np.random.default_rng(2).integers(0, 65536, (21, 34), np.uint16))
    frames: dict[str, Any] = {"save_all": True, "append_images": [noise(21, 34, seed=3)]}
    found = {
        "jpeg": saved(colour),
        "jpeg 4:4:4": jpeg,
        "jpeg 4:2:2": saved(colour, subsampling=1),
        "jpeg progressive": saved(colour, progressive=True),
        "jpeg restarts": saved(colour, restart_marker_blocks=1),
        "jpeg grey": saved(grey),
        "jpeg rgb": saved(colour, keep_rgb=True, subsampling=0),
        "jpeg comment": saved(colour, comment=b"\xff\xd9" * 9, icc_profile=b"p" * 99999),
        "jpeg no jfif": without_jfif(jpeg),
        "jpeg turned": saved(colour, exif=exif(6)),
        "jpeg thumbnail": saved(colour, exif=exif(8, saved(noise(7, 9)))),
        "jpeg several": saved(colour, "MPO", save_all=True, append_images=[noise(9, 9)]),
        "jpeg zeros behind": jpeg + bytes(99),
        "jpeg fill bytes": jpeg[:20] + b"\xff\xff" + jpeg[20:],
        "jpeg junk between": jpeg[:20] + b"\0\0" + jpeg[20:],
        "jpeg one pixel": saved(noise(1, 1)),
        "jpeg one wide": saved(noise(50, 1)),
        "jpeg cmyk": inked,
        "jpeg ycck": ycck,
        "jpeg ycck 4:2:0": resampled(saved(noise(32, 32, 4).convert("CMYK")), 0x22),
        "png turned": saved(colour, "PNG", exif=exif(6), dpi=(72, 72)),
        "png alpha": saved(clear, "PNG"),
        "png palette": saved(colour.quantize(9), "PNG", transparency=3),
        "png bits": saved(colour.convert("1"), "PNG"),
        "png 16 grey": saved(deep, "PNG"),
        "png animated": saved(colour, "PNG", **frames),
        "png cut behind the pixels": saved(colour, "PNG")[:-2],
        "webp": saved(colour, "WEBP"),
        "webp alpha lossless": saved(clear, "WEBP", lossless=True),
        "webp animated": saved(colour, "WEBP", **frames),
        "gif animated": saved(colour.quantize(9), "GIF", **frames),
        "bmp": saved(colour, "BMP"),
        "tiff": saved(colour, "TIFF"),
    }
    found["jpeg grey sampled"] = resampled(saved(grey), 0x22)
    for factors in ((0x12,), (0x41,), (0x14,), (0x31,), (0x42,), (0x22, 0x21, 0x12), (0x21,) * 3):
        found[f"jpeg sampled {factors}"] = resampled(square, *factors)
    for transform in (0, 1, 2):
        found[f"jpeg adobe {transform}"] = with_segment(jpeg, 0xEE, adobe(transform))
        bare = with_segment(without_jfif(jpeg), 0xEE, adobe(transform))
        found[f"jpeg adobe {transform} no jfif"] = bare
    return found


# Datasets: folders, arrays, own classes, and those of torchvision


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

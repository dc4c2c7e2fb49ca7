"""The table of transforms and dataset code as users write it, by name (see docs/dali.md)."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms as v1
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision import tv_tensors
from torchvision.io import decode_jpeg, read_file, read_image
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from .datasets import MapDataset
from .recorded import encoded, path

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CODES: dict[str, tuple[Callable[[int], Any], str]] = {}
"""By name: the dataset's code, and whether all, some or none of it is recorded."""


def code(how: str) -> Callable[[Callable[[int], Any]], Callable[[int], Any]]:
    def keep(function: Callable[[int], Any]) -> Callable[[int], Any]:
        CODES[function.__name__] = function, how
        return function

    return keep


def rgb(index: int) -> Any:
    return Image.open(path(index % 5)).convert("RGB")


def grey(index: int) -> Any:
    return Image.open(path(index % 5, "PNG", "L"))


def chain(name: str, *steps: Any, of: Callable[[int], Any] = rgb) -> None:
    transform = v1.Compose(list(steps))
    CODES[name] = (lambda index: transform(of(index))), "all"


tail = v1.ToTensor(), v1.Normalize(MEAN, STD)
floats = v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)
jitter = 0.4, 0.4, 0.4, 0.1
chain("v1_train", v1.RandomResizedCrop(32), v1.RandomHorizontalFlip(), *tail)
chain("v1_eval", v1.Resize(48), v1.CenterCrop(40), *tail)
chain(
    "v1_colour",
    *(v1.ColorJitter(*jitter), v1.RandomGrayscale(), v1.GaussianBlur(5), v1.ToTensor()),
    *(v1.RandomErasing(0.7), v1.Normalize(MEAN, STD, inplace=True)),
)
chain("v1_randaugment", v1.RandomResizedCrop(32), v1.RandAugment(), *tail)
chain("v1_autoaugment", v1.RandomCrop(40, 4, padding_mode="reflect"), v1.AutoAugment(), *tail)
chain(
    "v1_warps",
    *(v1.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 5), v1.RandomPerspective()),
    *(v1.RandomRotation(30, expand=True), v1.Resize((30, 30)), *tail),
)
chain(
    "v1_on_tensors",
    *(v1.ToTensor(), v1.Resize(48), v1.RandomCrop(32, 3), v1.RandomVerticalFlip()),
    *(v1.ColorJitter(*jitter), v1.GaussianBlur(3), v1.RandomAffine(20), tail[1]),
)
chain(
    "v1_policy",
    *(v1.RandomCrop(20, 4), v1.RandomChoice([v1.RandAugment(), v1.TrivialAugmentWide()])),
    *(v1.RandomApply([v1.GaussianBlur(3)]), *tail, v1.RandomErasing(value="random")),
)
chain("v1_bytes", v1.RandomResizedCrop(32, interpolation=3), v1.PILToTensor())
chain("v1_to_pil", v1.ToTensor(), v1.ToPILImage(), v1.Resize(40), v1.PILToTensor())
chain("v2_image_first", v2.ToImage(), v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *floats)
chain("v2_trivial", v2.RandomResizedCrop(32), v2.TrivialAugmentWide(), v2.ToImage(), *floats)
chain(
    "v2_photometric",
    *(v2.ToImage(), v2.Resize(40), v2.RandomPhotometricDistort(), v2.ColorJitter(*jitter)),
    *(v2.GaussianBlur(3), v2.RandomRotation(20), v2.CenterCrop(36), v2.Pad(2), floats[0]),
    *(v2.RandomErasing(0.5), v2.ToPureTensor()),
)
half = v2.ToImage(), v2.ToDtype(torch.float16, scale=True), v2.ToPureTensor()
chain("v2_half", v2.RandomResizedCrop(20), v2.AutoAugment(), *half)
chain("v2_augmix", v2.Resize((32, 32)), v2.AugMix(), v2.ToImage())
chain(
    "read_image_and_v2",
    *(v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *floats),
    of=lambda i: read_image(path(i), "RGB"),
)
chain(
    "arrays",
    *(v1.RandomCrop(32, 4), v1.RandomHorizontalFlip(), *tail),
    of=lambda i: Image.fromarray(np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8)),
)


def codes(how: str, **functions: Callable[[int], Any]) -> None:
    CODES.update({name: (function, how) for name, function in functions.items()})


crop = v2.RandomResizedCrop(32)
view, fill = (
    v1.Compose([v1.RandomResizedCrop(32), *tail]),
    {tv_tensors.Mask: 255, tv_tensors.Image: 3},
)
kinds = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
to_dtype = v2.ToDtype(kinds, scale=True)
joint = v2.Compose([v2.ToImage(), crop, v2.RandomHorizontalFlip(), to_dtype, floats[1]])
frames = ("GIF", "RGB"), ("TIFF", "RGB"), ("PNG", "I;16"), ("PPM", "L"), ("BMP", "RGB")
codes(
    "all",
    v2_mask=lambda i: joint(rgb(i), tv_tensors.Mask(grey(i))),
    fill_by_type=lambda i: v2.RandomAffine(30, fill=fill)(
        tv_tensors.Image(rgb(i)), tv_tensors.Mask(grey(i))
    ),
    dict_of_two_views=lambda i: {"views": [*map(view, [rgb(i)] * 2)], "label": i, "name": f"n{i}"},
    five_crops_and_frames=lambda i: (
        torch.stack([F.to_tensor(each) for each in v1.FiveCrop(24)(rgb(i))]),
        torch.stack([F.to_tensor(rgb(i + k).resize((9, 9))) for k in range(4)], 1),
    ),
    decoded_and_arithmetic=lambda i: (
        (decode_jpeg(read_file(path(i)))[:, :32, :32].float() / 255.0 - 0.5) / 0.5
    ),
)
codes(
    "some",
    mask_by_numpy=lambda i: (
        F.to_tensor(rgb(i)),
        torch.from_numpy(np.array(grey(i).resize((9, 8), 0))),
    ),
)
codes(
    "none",
    several_frames_and_depths=lambda i: F.to_tensor(Image.open(path(i, *frames[i])).resize((9, 9))),
)


@code("all")
def pillow_by_hand(index: int) -> Any:
    image = ImageOps.mirror(rgb(index)) if np.random.rand() < 0.5 else rgb(index)
    image = ImageEnhance.Contrast(image).enhance(np.random.uniform(0.5, 1.5))
    image = ImageEnhance.Sharpness(image).enhance(1.4).rotate(random.uniform(-20, 20), 2)
    left, top = np.random.randint(0, image.width - 32), np.random.randint(0, image.height - 32)
    image = ImageOps.autocontrast(image.crop((left, top, left + 32, top + 32)))
    return F.to_tensor(image.filter(ImageFilter.GaussianBlur(1.5)).transpose(Image.ROTATE_90))


@code("all")
def segmentation_by_functionals(index: int) -> Any:
    image, mask = rgb(index), grey(index)
    box = v1.RandomCrop.get_params(image, (32, 32))
    image, mask = F.crop(image, *box), F.crop(mask, *box)
    if random.random() < 0.5:
        image, mask = F.hflip(image), F.hflip(mask)
    return F.normalize(F.to_tensor(image), MEAN, STD), F.pil_to_tensor(mask).long().squeeze(0)


@code("all")
def detection(index: int) -> Any:
    image = rgb(index)
    size = image.size[::-1]
    boxes = tv_tensors.BoundingBoxes([[3, 3, 30, 40]], format="XYXY", canvas_size=size)
    steps = [v2.ToImage(), v2.RandomPhotometricDistort(), v2.RandomZoomOut(3), v2.RandomIoUCrop()]
    last = [v2.RandomHorizontalFlip(), v2.Resize((32, 32)), v2.SanitizeBoundingBoxes(), floats[0]]
    transform = v2.Compose([*steps, *last])
    return transform({"image": image, "boxes": boxes, "labels": torch.tensor([1])})


def by_torchcodec(index: int) -> Any:
    from torchcodec import decoders

    transform = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), *floats])
    grey = decoders.decode_png(Path(path(index, "PNG", "L")), mode="GRAY")
    return transform(decoders.decode_image(path(index))), grey[:, 2:30]


if find_spec("torchcodec") is not None:
    code("all")(by_torchcodec)


@code("all")
def by_size_and_exif(index: int) -> Any:
    image = ImageOps.exif_transpose(Image.open(path(index)))
    image = image.rotate(90, expand=True) if image.width < image.height else image
    return F.to_tensor(image.convert("RGB").resize((30, 30)))


@code("all")
def as_webdataset(index: int) -> Any:
    with io.BytesIO(encoded(index)) as stream:  # its handler for "pilrgb"
        image = Image.open(stream)
        image.load()
    return v1.RandomResizedCrop(20)(image.convert("RGB")), {"__key__": f"{index}"}


@code("all")
def as_hugging_face_datasets(index: int) -> Any:
    image = Image.open(io.BytesIO(encoded(index)))
    image.load()  # it closes files early
    if image.getexif().get(Image.ExifTags.Base.Orientation) is not None:
        image = ImageOps.exif_transpose(image)
    item = {"image": image, "label": index}
    return {"pixel_values": v2.PILToTensor()(item["image"].resize((20, 20))), "label": index}


@code("some")
def thumbnails(index: int) -> Any:
    image = Image.open(path(index))
    image.thumbnail((24, 24))
    return F.to_tensor(image), F.to_tensor(rgb(index).resize((9, 9)))


@code("all")
def mixup_by_hand(index: int) -> Any:
    share = np.random.beta(1, 1)
    one, other = (F.to_tensor(rgb(i).resize((9, 9))) for i in (index, random.randrange(5)))
    return share * one + (1 - share) * other


@code("all")
def modes(index: int) -> Any:
    kinds = ("PNG", "RGBA"), ("PNG", "P"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("JPEG", "L")
    image = Image.open(path(index, *kinds[index]))
    return F.pil_to_tensor(image.resize((20, 19), 0)), F.to_tensor(image.convert("RGB"))


@code("some")
def cut_out_and_noise(index: int) -> Any:
    image = F.to_tensor(rgb(index).resize((32, 32)))
    image[:, 3:9, random.randrange(9) :] = 0
    return image + torch.randn_like(image) if index % 2 else image


@code("some")
def damaged_and_caught(index: int) -> Any:
    data = encoded(index)[: 500 if index % 2 else None]
    try:
        return F.to_tensor(Image.open(io.BytesIO(data)).convert("RGB"))
    except OSError:
        return torch.zeros(3)


@code("none")
def looks_at_pixels(index: int) -> Any:
    image = rgb(index)
    mean = np.asarray(image).mean()
    return F.to_tensor(image) - mean


@code("none")
def letterbox(index: int) -> Any:
    canvas = Image.new("RGB", (99, 99), 7)
    canvas.paste(rgb(index), (2, 3))
    return F.to_tensor(canvas)


SIZES_DIFFER = {
    *("detection", "modes", "fill_by_type", "by_torchcodec"),
    *("v1_colour", "v1_to_pil", "as_webdataset"),
}
STACKED = [name for name, (_, how) in CODES.items() if how == "all" and name not in SIZES_DIFFER]


class Codes(MapDataset):
    """A dataset whose sample holds what each of these codes makes."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(None, 5, names=list(names))

    def sample(self, index: int) -> Any:
        return {name: CODES[name][0](index) for name in self.names}


def padded(samples: Any) -> Any:
    out = torch.zeros(len(samples), 3, 70, 70)
    for number, (image, _) in enumerate(samples):
        out[number, :, : image.shape[1], : image.shape[2]] = image
    return out

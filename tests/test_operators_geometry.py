"""Geometric transforms drawn for a batch: torchvision's own pixels for the same seeds."""

from __future__ import annotations

from typing import Any

import PIL.Image
import pytest
import torch
import torchvision.transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import v2

from tests.helpers.exact import assert_exact, images

LIBRARIES = {"v1": v1, "v2": v2}
KINDS = ("RGB", "L", "bytes", "floats")

BOTH: dict[str, Any] = {
    "resize to the shorter side": lambda t: t.Resize(8),
    "resize a list of one": lambda t: t.Resize([8]),
    "resize to a pair": lambda t: t.Resize((11, 6)),
    "resize at most": lambda t: t.Resize(8, max_size=14),
    "resize nearest": lambda t: t.Resize(8, interpolation=Mode.NEAREST),
    "resize nearest-exact": lambda t: t.Resize((4, 30), interpolation=Mode.NEAREST_EXACT),
    "resize bicubic": lambda t: t.Resize((4, 30), interpolation=Mode.BICUBIC),
    "resize lanczos": lambda t: t.Resize((4, 30), interpolation=Mode.LANCZOS),
    "resize box": lambda t: t.Resize((4, 30), interpolation=Mode.BOX),
    "resize hamming": lambda t: t.Resize((4, 30), interpolation=Mode.HAMMING),
    "resize by Pillow's number": lambda t: t.Resize((4, 30), interpolation=PIL.Image.BICUBIC),
    "resize not antialiased": lambda t: t.Resize((4, 5), antialias=False),
    "resize antialias None": lambda t: t.Resize((4, 5), antialias=None),
    "centre": lambda t: t.CenterCrop(10),
    "centre of odd": lambda t: t.CenterCrop((9, 14)),
    "centre of one pixel": lambda t: t.CenterCrop([1]),
    "pad": lambda t: t.Pad(3),
    "pad two": lambda t: t.Pad((1, 4)),
    "pad one in a list": lambda t: t.Pad([2]),
    "pad four": lambda t: t.Pad((1, 2, 3, 4), fill=7),
    "pad colour": lambda t: t.Pad(2, fill=(10, 20, 30)),
    "pad edge": lambda t: t.Pad((1, 2, 3, 4), padding_mode="edge"),
    "pad reflect": lambda t: t.Pad((1, 2, 3, 4), padding_mode="reflect"),
    "pad symmetric": lambda t: t.Pad((1, 2, 3, 4), padding_mode="symmetric"),
    "pad less": lambda t: t.Pad((-1, 2, 1, -2)),
    "crop": lambda t: t.RandomCrop(7),
    "crop of a pair": lambda t: t.RandomCrop((5, 7)),
    "crop padded": lambda t: t.RandomCrop(8, padding=4),
    "crop padded wider than the crop": lambda t: t.RandomCrop(3, padding=9),
    "crop padded by two": lambda t: t.RandomCrop((8, 6), padding=(1, 4)),
    "crop padded by four": lambda t: t.RandomCrop((8, 6), padding=[5, 1, 3, 2]),
    "crop padded by nothing": lambda t: t.RandomCrop(5, padding=0),
    "crop padded grey": lambda t: t.RandomCrop(8, padding=4, fill=128),
    "crop padded with a colour": lambda t: t.RandomCrop(8, padding=4, fill=(1, 2, 3)),
    "crop padded edge": lambda t: t.RandomCrop(8, padding=4, padding_mode="edge"),
    "crop padded reflect": lambda t: t.RandomCrop(8, padding=4, padding_mode="reflect"),
    "crop padded symmetric": lambda t: t.RandomCrop(8, padding=4, padding_mode="symmetric"),
    "crop if needed": lambda t: t.RandomCrop(12, pad_if_needed=True),
    "crop if needed grey": lambda t: t.RandomCrop((12, 9), pad_if_needed=True, fill=9),
    "crop if needed edge": lambda t: t.RandomCrop(12, pad_if_needed=True, padding_mode="edge"),
    "crop both": lambda t: t.RandomCrop((12, 20), padding=2, pad_if_needed=True),
    "crop both reflect": lambda t: t.RandomCrop(
        (12, 20), padding=(1, 0), pad_if_needed=True, padding_mode="reflect"
    ),
    "crop both grey": lambda t: t.RandomCrop((12, 20), padding=2, pad_if_needed=True, fill=3),
    "crop none fill": lambda t: t.RandomCrop(8, padding=4, fill=None),
    "resized crop": lambda t: t.RandomResizedCrop(8),
    "resized crop of a pair": lambda t: t.RandomResizedCrop((6, 9), antialias=True),
    "resized crop bicubic": lambda t: t.RandomResizedCrop(8, interpolation=Mode.BICUBIC),
    "resized crop never fits": lambda t: t.RandomResizedCrop(8, scale=(2.0, 3.0)),
    "resized crop tall": lambda t: t.RandomResizedCrop(8, ratio=(0.1, 0.2)),
    "resized crop wide": lambda t: t.RandomResizedCrop(8, ratio=(5, 9)),
    "resized crop whole": lambda t: t.RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(1.0, 1.0)),
    "resized crop tiny": lambda t: t.RandomResizedCrop(8, scale=(0.0, 0.01)),
    "resized crop of ints": lambda t: t.RandomResizedCrop(8, scale=(0, 1), ratio=(1, 2)),
    "flip": lambda t: t.RandomHorizontalFlip(),
    "flip often": lambda t: t.RandomHorizontalFlip(0.9),
    "flip always": lambda t: t.RandomHorizontalFlip(1),
    "flip never": lambda t: t.RandomVerticalFlip(0.0),
    "flip over": lambda t: t.RandomVerticalFlip(0.3),
    "rotate": lambda t: t.RandomRotation(30),
    "rotate to one angle": lambda t: t.RandomRotation((90, 90)),
    "rotate not at all": lambda t: t.RandomRotation(0),
    "rotate bilinear": lambda t: t.RandomRotation((-10, 200), interpolation=Mode.BILINEAR),
    "rotate bicubic": lambda t: t.RandomRotation(40, interpolation=Mode.BICUBIC),
    "rotate expand": lambda t: t.RandomRotation(180, expand=True),
    "rotate expand 90": lambda t: t.RandomRotation((90, 90), expand=True),
    "rotate expand 180": lambda t: t.RandomRotation((180, 180), expand=True),
    "rotate expand 270": lambda t: t.RandomRotation((270, 270), expand=True),
    "rotate expand 360": lambda t: t.RandomRotation((-360, -360), expand=True),
    "rotate expand center": lambda t: t.RandomRotation(50, expand=True, center=(1, 2)),
    "rotate center": lambda t: t.RandomRotation(50, center=[3.5, 2]),
    "rotate fill": lambda t: t.RandomRotation(50, fill=99),
    "rotate fill list": lambda t: t.RandomRotation(50, fill=[1, 2, 3]),
    "rotate fill one": lambda t: t.RandomRotation(50, fill=(55,)),
    "rotate fill none": lambda t: t.RandomRotation(50, fill=None),
    "affine": lambda t: t.RandomAffine(20),
    "affine moved": lambda t: t.RandomAffine(0, translate=(0.3, 0.1)),
    "affine scaled": lambda t: t.RandomAffine(0, scale=(0.5, 2)),
    "affine sheared": lambda t: t.RandomAffine((5, 60), shear=10),
    "affine sheared pair": lambda t: t.RandomAffine(0, shear=(-5, 20)),
    "affine sheared four": lambda t: t.RandomAffine(0, shear=[-5, 20, 3, 9]),
    "affine all": lambda t: t.RandomAffine(
        20, (0.1, 0.2), (0.8, 1.2), (-5, 20, 3, 9), interpolation=Mode.BILINEAR, fill=7
    ),
    "affine fill": lambda t: t.RandomAffine(20, fill=(7, 8, 9), center=(0, 0)),
    "perspective": lambda t: t.RandomPerspective(p=1.0),
    "perspective half": lambda t: t.RandomPerspective(0.3, fill=3, interpolation=Mode.NEAREST),
    "perspective none": lambda t: t.RandomPerspective(0.0, p=0.9),
    "erase": lambda t: t.RandomErasing(),
    "erase always": lambda t: t.RandomErasing(1, value=0.3),
    "erase whole numbers": lambda t: t.RandomErasing(0.9, value=3),
    "erase colour": lambda t: t.RandomErasing(0.9, value=(0.1, 0.2, 0.3)),
    "erase a list of one": lambda t: t.RandomErasing(0.9, value=[0.7]),
    "erase two levels": lambda t: t.RandomErasing(0.5, value=(1, 2)),
    "erase noise": lambda t: t.RandomErasing(0.7, value="random"),
    "erase little noise": lambda t: t.RandomErasing(1.0, (0.0, 0.02), value="random"),
    "erase tall": lambda t: t.RandomErasing(1.0, (0.4, 0.9), (1, 9)),
    "erase too much": lambda t: t.RandomErasing(1.0, (0.99, 1.0), (1.0, 1.0)),
    "erase in place": lambda t: t.RandomErasing(1.0, inplace=True),
}  # fmt: skip

ONLY_V2: dict[str, Any] = {
    "resize the longer side": lambda: v2.Resize(None, max_size=9),
    "pad by type": lambda: v2.Pad(2, fill={PIL.Image.Image: 3, "others": 4}),
    "pad by type of tensor": lambda: v2.Pad(2, fill={torch.Tensor: 3, tv_tensors.Image: (4, 5, 6)}),
    "crop by type": lambda: v2.RandomCrop(8, 4, fill={PIL.Image.Image: (1, 2, 3), "others": 9}),
    "rotate by type": lambda: v2.RandomRotation(40, fill={tv_tensors.Image: 3, "others": None}),
    "affine by type": lambda: v2.RandomAffine(40, fill={"others": 3, torch.Tensor: [4]}),
    "perspective by type": lambda: v2.RandomPerspective(p=1.0, fill={"others": 3}),
    "zoom out": lambda: v2.RandomZoomOut(),
    "zoom out of a colour": lambda: v2.RandomZoomOut((1, 2, 3), (1.0, 1.7), p=0.9),
    "zoom out by nothing": lambda: v2.RandomZoomOut(side_range=(1, 1), p=1),
    "random size": lambda: v2.RandomResize(5, 20),
    "shortest size": lambda: v2.RandomShortestSize([5, 8, 11, 30]),
    "shortest size at most": lambda: v2.RandomShortestSize(20, max_size=33),
    "scale jitter": lambda: v2.ScaleJitter((20, 30)),
    "scale jitter bicubic": lambda: v2.ScaleJitter((20, 30), (0.5, 0.9), Mode.BICUBIC, False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_drawn_and_done_is_torchvisions(library: str, name: str, kind: str) -> None:
    assert_exact(BOTH[name](LIBRARIES[library]), images(kind))


@pytest.mark.parametrize("kind", [*KINDS, "tv"])
@pytest.mark.parametrize("name", ONLY_V2)
def test_what_only_v2_has_is_too(name: str, kind: str) -> None:
    assert_exact(ONLY_V2[name](), images(kind))

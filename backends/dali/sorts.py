"""What an image is to torchvision along a chain: a PIL image, bytes, numbers, and of which class.

    "pil" ──PILToTensor──> "bytes" ──ToDtype(float32)──> "floats" ──ToPILImage──> "pil"
                                   └─ToDtype(int16)──> "ints"
    tensors besides: whether each is a ``tv_tensors.Image``: ToImage ──> yes, ToPureTensor ──> no,
    a step of v1's ──> yes, where it left the image alone

What a step gives for every image is told before any is made; what torchvision would refuse for
every image, or what differs from image to image where it must not, is an obstacle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dataloaders.transforms.actions import Primitive
from dataloaders.transforms.kernels.kernel import Form
from dataloaders.transforms.kinds import torchvision_name
from dataloaders.transforms.primitives.auto import AugMixed
from dataloaders.transforms.primitives.convert import Converted
from dataloaders.transforms.primitives.fills import ByType

__all__ = ["NotServed", "Sort", "behind", "looks_at_types"]

_WIDE = ("1", "F", "I", "I;16")


class Sort(NamedTuple):
    """What all images of a dataset are at one place of its chain.

    Attributes:
        form: "pil"; or a tensor [C, H, W] of uint8 ("bytes"), of other whole numbers ("ints") or
            of "floats".
        wraps: whether that tensor is a torchvision ``tv_tensors.Image``; None: some are.
    """

    form: Form
    wraps: bool | None = False


class NotServed(Exception):
    """This step stands in the way; the message says why and what to do."""


def behind(primitive: Primitive, before: Sort) -> Sort:
    """What an image is behind ``primitive``.

    Raises:
        NotServed: torchvision raises for every image, or the images then differ in their form.
    """
    if before.wraps is None and looks_at_types(primitive):
        raise NotServed(
            "it looks at the class of a tensor, and behind transforms of v1 some are "
            "tv_tensors.Image and others are not; take all of them from torchvision.transforms.v2"
        )
    if isinstance(primitive, Converted):
        return _converted(primitive.transform, before)
    return _kept(before, v2=getattr(primitive, "v2", True))


def looks_at_types(primitive: Primitive | None) -> bool:
    """Whether the class of a tensor matters to it: v2's dicts of colours and of dtypes."""
    if isinstance(primitive, AugMixed):
        return any(map(looks_at_types, primitive.steps))
    if isinstance(primitive, Converted):
        return isinstance(getattr(primitive.transform, "dtype", None), dict)
    return isinstance(getattr(primitive, "fill", None), ByType)


def _kept(before: Sort, *, v2: bool) -> Sort:
    # v1's functions make plain tensors; where they have nothing to do, the image stays what it is.
    return before if v2 or not before.wraps else before._replace(wraps=None)


def _converted(transform: Any, before: Sort) -> Sort:
    name, v2 = torchvision_name(transform), ".v2" in type(transform).__module__
    if before.form == "pil":
        if name == "ToPILImage" and not v2:
            raise NotServed("it is given PIL images, at which torchvision raises; leave it out")
        made = {"ToTensor": Sort("floats"), "PILToTensor": Sort("bytes")}
        return Sort("bytes", True) if name == "ToImage" else made.get(name or "", before)
    if name in ("ToTensor", "PILToTensor") and not v2:
        raise NotServed("it is given tensors, at which torchvision raises; leave it out")
    if name == "ToPILImage":
        if before.form == "ints" or transform.mode in _WIDE:
            raise NotServed("it makes PIL images of other than 8 bits a value; leave it out")
        return Sort("pil")
    if name in ("ToImage", "ToPureTensor"):
        return before._replace(wraps=name == "ToImage")
    if name == "Normalize" and not v2:
        return before._replace(wraps=False)
    if name in ("ConvertImageDtype", "ToDtype"):
        before = before._replace(form=_form_of(transform.dtype, before))
    return _kept(before, v2=v2)


def _form_of(dtype: Any, before: Sort) -> Form:
    if isinstance(dtype, dict):
        dtype = dtype.get(_class_of(before), dtype.get("others"))
    if not isinstance(dtype, torch.dtype):
        return before.form
    if dtype.is_floating_point:
        return "floats"
    return "bytes" if dtype is torch.uint8 else "ints"


def _class_of(sort: Sort) -> Any:
    if not sort.wraps:
        return torch.Tensor
    from torchvision.tv_tensors import Image

    return Image

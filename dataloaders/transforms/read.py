"""Read a chain of transforms as a flat list of members.

    Compose([Resize, Compose([RandomCrop, ToTensor]), my_function])
        ──> Resize         transforms[0]                deterministic
            RandomCrop     transforms[1].transforms[0]  random
            ToTensor       transforms[1].transforms[1]  deterministic
            my_function    transforms[2]                opaque

A container that decides which of its members run, such as RandomApply, is one member.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

CONVERTERS = ("PILToTensor", "ToImage", "ToPureTensor")
"""They change the type of a sample and no value of it."""


class Kind(enum.Enum):
    """What is known of a transform.

    Attributes:
        DETERMINISTIC: the same input gives the same output.
        RANDOM: torchvision's own, and not known to be deterministic.
        OPAQUE: somebody's own code; nothing is known of it.
    """

    DETERMINISTIC = "deterministic"
    RANDOM = "random"
    OPAQUE = "opaque"


_DETERMINISTIC = frozenset(
    (
        "CenterCrop", "ClampBoundingBoxes", "ClampKeyPoints", "ConvertBoundingBoxFormat",
        "ConvertImageDtype", "FiveCrop", "Grayscale", "Identity", "LinearTransformation",
        "Normalize", "PILToTensor", "Pad", "RGB", "Resize", "SanitizeBoundingBoxes",
        "SanitizeKeyPoints", "SetClampingMode", "TenCrop", "ToDtype", "ToImage", "ToPILImage",
        "ToPureTensor", "ToTensor", "UniformTemporalSubsample",
        # of weights, such as ResNet18_Weights.DEFAULT.transforms()
        "ImageClassification", "ObjectDetection", "OpticalFlow", "SemanticSegmentation",
        "StereoMatching", "VideoClassification",
    )
)  # fmt: skip


def torchvision_name(transform: Any) -> str | None:
    """Return ``"Normalize"`` for torchvision's class of that name, v1 or v2; None for any other.

    A subclass is somebody's own: it may do anything.
    """
    kind = type(transform)
    return kind.__qualname__ if kind.__module__.startswith("torchvision.transforms.") else None


def kind_of(transform: Any) -> Kind:
    """Return what is known of one transform that is no container of others."""
    name = torchvision_name(transform)
    if name is None or name == "Lambda" or not callable(transform):
        return Kind.OPAQUE
    return Kind.DETERMINISTIC if name in _DETERMINISTIC else Kind.RANDOM


@dataclass(frozen=True)
class Member:
    """One transform of a chain.

    Attributes:
        transform: the user's own object.
        where: its place, such as ``transform.transforms[2]``.
        kind: whether it is known, and whether it draws random numbers.
    """

    transform: Any
    where: str
    kind: Kind

    @property
    def name(self) -> str:
        """The name of its class; of a function, the function's."""
        return str(getattr(self.transform, "__name__", type(self.transform).__name__))

    @property
    def torchvision(self) -> str | None:
        """The class's name if it is torchvision's own; else None."""
        return torchvision_name(self.transform)

    def __str__(self) -> str:
        return f"{self.name} at {self.where}"


class Run:
    """Apply some transforms, one after the other: a part of a Compose that was cut."""

    def __init__(self, transforms: Iterable[Any]) -> None:
        self.transforms = tuple(transforms)

    def __call__(self, value: Any) -> Any:
        """Return what the transforms make of ``value``."""
        for transform in self.transforms:
            value = transform(value)
        return value

    def __repr__(self) -> str:
        return f"Run({', '.join(map(repr, self.transforms))})"


def is_chain(value: Any) -> bool:
    """Return whether ``value`` is a Compose, Sequential or Run, or a transform of torchvision."""
    return _members_of(value) is not None or kind_of(value) is not Kind.OPAQUE


def read(transform: Any, where: str = "transform") -> tuple[Member, ...]:
    """Return the members of ``transform`` in the order in which they run; ``where`` names it.

    A Compose, ``nn.Sequential`` or `Run` is flattened, however deep; anything else is one member.
    """
    inner = _members_of(transform)
    if inner is None:
        return (Member(transform, where, kind_of(transform)),)
    place = where if type(transform) is torch.nn.Sequential else f"{where}.transforms"
    return tuple(
        member
        for position, each in enumerate(inner)
        for member in read(each, f"{place}[{position}]")
    )


def _members_of(transform: Any) -> Iterable[Any] | None:
    if type(transform) is torch.nn.Sequential:
        return transform
    if type(transform) is Run or torchvision_name(transform) == "Compose":
        return transform.transforms  # type: ignore[no-any-return]
    return None


def trailing(members: Sequence[Member]) -> tuple[Member, ...]:
    """Return the longest trailing run that makes floats of bytes one by one; () if there is none.

    It consists of converters, one member that makes floats (ToTensor, ConvertImageDtype or ToDtype
    with a float dtype), and Normalize.
    """
    begin = len(members)
    while begin and is_pointwise(members[begin - 1]):
        begin -= 1
    run = tuple(members[begin:])
    first = next((member for member in run if member.torchvision not in CONVERTERS), None)
    return run if first is not None and _makes_floats(first) else ()


def is_pointwise(member: Member) -> bool:
    """Return whether ``member`` changes the type of a sample, or each value by itself."""
    return member.torchvision in (*CONVERTERS, "Normalize") or _makes_floats(member)


def _makes_floats(member: Member) -> bool:
    if member.torchvision in ("ConvertImageDtype", "ToDtype"):
        dtype = member.transform.dtype
        return isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return member.torchvision == "ToTensor"

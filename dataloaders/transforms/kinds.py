"""Tell which torchvision transforms are known, by the names of their classes."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["Kind", "kind_of", "torchvision_name"]


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

_CALLS_OTHERS = ("Lambda",)


def torchvision_name(transform: Any) -> str | None:
    """Return ``"Normalize"`` for torchvision's class of that name, v1 or v2; None for any other.

    A subclass is somebody's own: it may do anything.
    """
    kind = type(transform)
    return kind.__qualname__ if kind.__module__.startswith("torchvision.transforms.") else None


def kind_of(transform: Any) -> Kind:
    """Return what is known of one transform that is no container of others."""
    name = torchvision_name(transform)
    if name is None or name in _CALLS_OTHERS or not callable(transform):
        return Kind.OPAQUE
    return Kind.DETERMINISTIC if name in _DETERMINISTIC else Kind.RANDOM

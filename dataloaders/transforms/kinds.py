"""Tell which torchvision transforms are known, by the names of their classes."""

from __future__ import annotations

import enum
import functools
from typing import Any

__all__ = ["Kind", "changed_by_hand", "kind_of", "torchvision_name"]


class Kind(enum.Enum):
    """What is known of a transform.

    Attributes:
        DETERMINISTIC: the same input gives the same output.
        RANDOM: it draws random numbers each time.
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
    )
)  # fmt: skip

_RANDOM = frozenset(
    (
        "AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianBlur",
        "GaussianNoise", "JPEG", "MixUp", "RandAugment", "RandomAdjustSharpness", "RandomAffine",
        "RandomApply", "RandomAutocontrast", "RandomChannelPermutation", "RandomChoice",
        "RandomCrop", "RandomEqualize", "RandomErasing", "RandomGrayscale", "RandomHorizontalFlip",
        "RandomInvert", "RandomIoUCrop", "RandomOrder", "RandomPerspective",
        "RandomPhotometricDistort", "RandomPosterize", "RandomResize", "RandomResizedCrop",
        "RandomRotation", "RandomShortestSize", "RandomSolarize", "RandomVerticalFlip",
        "RandomZoomOut", "ScaleJitter", "TrivialAugmentWide",
    )
)  # fmt: skip


_TORCHVISION = "torchvision.transforms."
_CONTAINER = "torch.nn.modules.container"
_LIBRARIES = ("torchvision.", "torch.")
_CALLED = ("__call__", "forward", "transform", "make_params", "get_params")


def torchvision_name(transform: Any) -> str | None:
    """Return ``"Normalize"`` for torchvision's class of that name, v1 or v2; None for any other.

    A subclass is somebody's own, and so is what was `changed_by_hand`: it may do anything.
    """
    kind = type(transform)
    if kind.__module__.startswith(_TORCHVISION) and changed_by_hand(transform) is None:
        return kind.__qualname__
    return None


def changed_by_hand(transform: Any) -> str | None:
    """Say what makes a transform of torchvision's, or an nn.Sequential, do something else.

    Looks for hooks, and methods replaced on the object or on its class (not for hooks of all
    modules, nor torchvision's functions replaced). None: there are none, or it is of another class.
    """
    kind: Any = type(transform)
    if not kind.__module__.startswith((_TORCHVISION, _CONTAINER)):
        return None
    own: dict[str, Any] = getattr(transform, "__dict__", {})
    if own.get("_forward_hooks") or own.get("_forward_pre_hooks"):
        return "it has forward hooks"
    for name in own.keys() & _methods_of(kind):
        return f"its {name} was replaced"
    for name in _CALLED:
        written_in = getattr(getattr(kind, name, None), "__globals__", {}).get("__name__", "torch.")
        if not written_in.startswith(_LIBRARIES):
            return f"{kind.__name__}.{name} was replaced"
    return None


@functools.cache
def _methods_of(kind: Any) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def kind_of(transform: Any) -> Kind:
    """Return what is known of one transform that is no container of others."""
    name = torchvision_name(transform)
    if name in _DETERMINISTIC:
        return Kind.DETERMINISTIC
    if name in _RANDOM:
        return Kind.RANDOM
    return Kind.OPAQUE

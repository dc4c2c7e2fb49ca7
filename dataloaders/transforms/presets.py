"""The transforms that come with torchvision's weights, as the steps that they are.

    ResNet18_Weights.DEFAULT.transforms()
        ──> Resize  CenterCrop  PILToTensor  ConvertImageDtype  Normalize

Each is a module whose settings are attributes and whose steps are calls of v1's functions, in this
order. torchvision may change them in any version: one with other attributes than these is left
whole, and so are those of videos and of pairs of images.
"""

from __future__ import annotations

import weakref
from typing import Any

from dataloaders.transforms.kinds import torchvision_name

__all__ = ["steps_of"]

_MODULE = "torchvision.transforms._presets"
_RESIZED = frozenset(("resize_size", "interpolation", "antialias"))
_SETTINGS = {
    "ImageClassification": _RESIZED | {"crop_size", "mean", "std"},
    "SemanticSegmentation": _RESIZED | {"mean", "std"},
    "ObjectDetection": frozenset[str](),
}
_OF_MODULES = frozenset(("training",))

_KNOWN: weakref.WeakKeyDictionary[Any, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()
"""Preset -> its settings as text, and its steps: the same objects as long as those stay."""


def steps_of(preset: Any) -> list[Any] | None:
    """torchvision's own transforms that do what ``preset`` does, in order; None: it is no preset.

    The same objects each time, until one of its settings changes.
    """
    name = torchvision_name(preset)
    if name not in _SETTINGS or type(preset).__module__ != _MODULE:
        return None
    own = {key: value for key, value in vars(preset).items() if not key.startswith("_")}
    settings = {key: value for key, value in own.items() if key not in _OF_MODULES}
    if settings.keys() != _SETTINGS[name]:
        return None
    told = repr(sorted(settings.items()))
    known, steps = _KNOWN.get(preset, ("", []))
    if known != told:
        try:
            steps = _steps(settings)
        except Exception:  # torchvision's classes refuse what its functions may refuse later
            return None
        _KNOWN[preset] = told, steps
    return steps


def _steps(settings: dict[str, Any]) -> list[Any]:
    import torch
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    steps: list[Any] = []
    if settings.get("resize_size") is not None:
        steps.append(
            v1.Resize(
                settings["resize_size"],
                settings["interpolation"],
                antialias=settings["antialias"],
            )
        )
    if "crop_size" in settings:
        steps.append(v1.CenterCrop(settings["crop_size"]))
    # v2's leaves tensors alone, as presets do; v1's raises.
    steps += [v2.PILToTensor(), v1.ConvertImageDtype(torch.float)]
    if "mean" in settings:
        steps.append(v1.Normalize(list(settings["mean"]), list(settings["std"])))
    return steps

"""A chain of transforms as a flat list of members.

    Compose([Resize, Compose([RandomCrop, ToTensor]), my_function])
        ──> Resize         transforms[0]                deterministic
            RandomCrop     transforms[1].transforms[0]  random
            ToTensor       transforms[1].transforms[1]  deterministic
            my_function    transforms[2]                opaque

A container that decides which of its members run, such as RandomApply, is one member. The
transforms of torchvision's weights are modules whose settings are attributes and whose steps are
calls of v1's functions; they are read as these steps:

    ResNet18_Weights.DEFAULT.transforms()
        ──> Resize  CenterCrop  PILToTensor  ConvertImageDtype  Normalize

torchvision may change them in any version: one with other attributes than these is one member, and
so are those of videos and of pairs of images.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dataloaders.transforms.kinds import Kind, changed_by_hand, kind_of, torchvision_name

__all__ = ["Kind", "Member", "Run", "is_chain", "read"]

_PRESETS = "torchvision.transforms._presets"
_RESIZED = frozenset(("resize_size", "interpolation", "antialias"))
_SETTINGS = {
    "ImageClassification": _RESIZED | {"crop_size", "mean", "std"},
    "SemanticSegmentation": _RESIZED | {"mean", "std"},
    "ObjectDetection": frozenset[str](),
}

_KNOWN: weakref.WeakKeyDictionary[Any, tuple[str, list[Any]]] = weakref.WeakKeyDictionary()
"""Preset -> its settings as text, and its steps."""


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
    """Some transforms, one after the other; ours, where a Compose has been taken apart."""

    def __init__(self, transforms: Iterable[Any]) -> None:
        self.transforms = tuple(transforms)

    def __call__(self, value: Any) -> Any:
        """What they make of ``value``."""
        for transform in self.transforms:
            value = transform(value)
        return value

    def __repr__(self) -> str:
        return f"Run({', '.join(map(repr, self.transforms))})"


def is_chain(value: Any) -> bool:
    """Whether `read` knows something of ``value``: a Compose, Sequential, Run or torchvision's."""
    known = _steps_of(value) or _members_of(value)
    return known is not None or kind_of(value) is not Kind.OPAQUE


def read(transform: Any, where: str = "transform") -> tuple[Member, ...]:
    """The members of ``transform`` in the order in which they run; ``where`` names it.

    A Compose, ``nn.Sequential`` or `Run` is flattened, however deep; anything else is one member.
    """
    return tuple(_read(transform, where))


def _read(transform: Any, where: str) -> Iterator[Member]:
    steps = _steps_of(transform)
    for step in steps or ():
        yield Member(step, f"{where} ({type(transform).__name__})", kind_of(step))
    if steps is not None:
        return
    inner = _members_of(transform)
    if inner is None:
        yield Member(transform, where, kind_of(transform))
        return
    for position, member in enumerate(inner):
        place = "" if _is_sequential(transform) else ".transforms"
        yield from _read(member, f"{where}{place}[{position}]")


def _members_of(transform: Any) -> list[Any] | None:
    if _is_sequential(transform):
        return list(transform)
    if type(transform) is Run or torchvision_name(transform) == "Compose":
        return list(transform.transforms)
    return None


def _is_sequential(transform: Any) -> bool:
    return type(transform) is torch.nn.Sequential and changed_by_hand(transform) is None


def _steps_of(preset: Any) -> list[Any] | None:
    """Return transforms that do what ``preset`` does, in order; None: it is no preset.

    The same objects each time, until one of its settings changes.
    """
    name = torchvision_name(preset)
    if name not in _SETTINGS or type(preset).__module__ != _PRESETS:
        return None
    settings = {k: v for k, v in vars(preset).items() if k[0] != "_" and k != "training"}
    if settings.keys() != _SETTINGS[name]:
        return None
    text = repr(sorted(settings.items()))
    known, steps = _KNOWN.get(preset, ("", []))
    if known != text:
        try:
            steps = _made_of(settings)
        except Exception:  # torchvision's classes refuse what its functions may refuse later
            return None
        _KNOWN[preset] = text, steps
    return steps


def _made_of(settings: dict[str, Any]) -> list[Any]:
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    steps: list[Any] = []
    if settings.get("resize_size") is not None:
        options = {name: settings[name] for name in ("interpolation", "antialias")}
        steps.append(v1.Resize(settings["resize_size"], **options))
    if "crop_size" in settings:
        steps.append(v1.CenterCrop(settings["crop_size"]))
    # v2's leaves tensors alone, as presets do; v1's raises.
    steps += [v2.PILToTensor(), v1.ConvertImageDtype(torch.float)]
    if "mean" in settings:
        steps.append(v1.Normalize(list(settings["mean"]), list(settings["std"])))
    return steps

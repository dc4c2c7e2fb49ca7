"""Transforms of torchvision that are known and not read: why, and what to do in their place."""

from __future__ import annotations

from typing import Any

from dataloaders.transforms.actions import Operator

from .table import NotRead, reads


@reads("FiveCrop", "TenCrop")
def _several_crops(transform: Any, v2: bool) -> Operator:
    name = type(transform).__name__
    function = {"FiveCrop": "five_crop", "TenCrop": "ten_crop"}[name]
    raise NotRead(
        f"{name} makes several images of one; leave images of one size in the dataset, and cut "
        f"whole batches in the loop: torchvision.transforms.v2.functional.{function}(images, "
        f"{list(transform.size)})"
    )


@reads(
    "ClampBoundingBoxes",
    "ClampKeyPoints",
    "ConvertBoundingBoxFormat",
    "RandomIoUCrop",
    "SanitizeBoundingBoxes",
    "SanitizeKeyPoints",
    "SetClampingMode",
)
def _of_boxes(transform: Any, v2: bool) -> Operator:
    raise NotRead(
        f"{type(transform).__name__} changes boxes or key points along with the image, and only "
        "images are read here"
    )


@reads("CutMix", "MixUp")
def _of_batches(transform: Any, v2: bool) -> Operator:
    raise NotRead(
        f"{type(transform).__name__} mixes the samples of a batch; call it in collate_fn or in "
        "the loop"
    )


@reads("OpticalFlow")
def _of_pairs(transform: Any, v2: bool) -> Operator:
    raise NotRead("OpticalFlow takes two images at once, and only samples of one are read here")


@reads("UniformTemporalSubsample", "VideoClassification")
def _of_videos(transform: Any, v2: bool) -> Operator:
    raise NotRead(
        f"{type(transform).__name__} takes the frames of a video, and only images are read here"
    )

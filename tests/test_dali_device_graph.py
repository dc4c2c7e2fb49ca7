"""The graph for a CUDA device, defined and not built: operators, arguments, and where each runs.

DALI looks at names and arguments of operators against their schemas as they are put into a
pipeline; only its build asks for a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from dataloaders.transforms.actions import Action, Primitive, Sizes
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Posterize,
    Saturation,
    Sharpness,
    Solarize,
)
from dataloaders.transforms.primitives.erasing import Erase
from dataloaders.transforms.primitives.geometry import (
    Crop,
    HorizontalFlip,
    Pad,
    Resize,
    VerticalFlip,
)
from dataloaders.transforms.primitives.turns import Affine, Perspective, Rotate

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from nvidia.dali import Pipeline
from nvidia.dali.ops import cpu_ops, gpu_ops, mixed_ops

from backends.dali import colour_nodes, nodes, turn_nodes
from backends.dali.graph import Graph
from backends.dali.nodes import FAST, Node, node_for

PRIMITIVES: dict[str, Primitive] = {
    "crop": Crop(),
    "pad": Pad(fill=(1, 2, 3)),
    "horizontal flip": HorizontalFlip(),
    "vertical flip": VerticalFlip(),
    "resize": Resize("bilinear"),
    "resize, bicubic": Resize("bicubic"),
    "resize, lanczos": Resize("lanczos"),
    "brightness": Brightness(),
    "contrast": Contrast(),
    "saturation": Saturation(),
    "grayscale": Grayscale(3),
    "invert": Invert(),
    "posterize": Posterize(),
    "solarize": Solarize(),
    "sharpness": Sharpness(),
    "autocontrast": Autocontrast(),
    "equalize": Equalize(),
    "erase": Erase((7.0,)),
    "blur": GaussianBlur(5, 3),
    "hue": Hue(),
    "rotate": Rotate(fill=9),
    "rotate, colours": Rotate(fill=(1, 2, 3), expand=True),
    "affine": Affine("bilinear", fill=(1, 2, 3)),
    "perspective": Perspective("nearest"),
    "perspective, bilinear": Perspective("bilinear", fill=(1, 2, 3)),
}
OF_COLOURED = ("pad", "grayscale", "rotate, colours", "affine", "perspective, bilinear")

CHAINS: dict[str, Sequence[str]] = {
    "nothing": (),
    "imagenet": ("crop", "resize", "horizontal flip"),
    "guide": (
        "resize",
        "horizontal flip",
        "vertical flip",
        "brightness",
        "contrast",
        "saturation",
        "hue",
    ),
    "everything": tuple(PRIMITIVES),
    **{name: (name,) for name in PRIMITIVES},
}


def nodes_of(names: Sequence[str]) -> list[Node]:
    found = [
        node_for(PRIMITIVES[name], form="pil", device="cuda", fast=tuple(FAST)) for name in names
    ]
    assert not [node for node in found if isinstance(node, str)]
    return found  # type: ignore[return-value]


def operators(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    """(schema, device of what comes out) of each operator that the outputs need."""
    pipeline._build_graph()
    for one in pipeline._ops:
        schema = getattr(one._op, "schema_name", None) or "ExternalSource"
        yield schema, one.outputs[0].device


def test_each_kind_of_node_is_among_these() -> None:
    known = {*nodes._MAKERS, *colour_nodes.MAKERS, *turn_nodes.MAKERS}
    assert {type(primitive) for primitive in PRIMITIVES.values()} == known


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("chain", CHAINS)
def test_images_stay_on_the_device_and_numbers_come_from_the_host(
    chain: str, channels: int, device: str
) -> None:
    names = [name for name in CHAINS[chain] if channels == 3 or name not in OF_COLOURED]
    for encoded in (True, False):
        graph = Graph(
            nodes_of(names),
            batch_size=4,
            device=torch.device(device),
            threads=2,
            encoded=encoded,
            channels=channels,
        )
        pipeline = graph._defined(windowed=False)
        assert pipeline.device_id == int(device[-1])
        assert pipeline.exec_dynamic
        decoders = []
        for schema, where in operators(pipeline):
            if schema == "ExternalSource":
                assert where == "cpu"
            elif schema.startswith("decoders"):
                decoders.append(schema)
                assert where == "gpu"
                assert schema in mixed_ops()
            else:
                assert schema in (gpu_ops() if where == "gpu" else cpu_ops()), f"{schema}, {where}"
        (made,) = pipeline._graph_outputs
        assert made.device == "gpu"
        assert decoders == (["decoders__Image"] if encoded else [])


def test_windows_are_left_to_the_decoder_only_where_that_is_asked_for() -> None:
    sizes = Sizes([40], [50])
    numbers = dict(zip(Crop.numbers, np.array([[3], [4], [20], [30]]), strict=True))
    for device, windows, expected in [
        ("cpu", None, True),
        ("cpu", False, False),
        ("cuda:0", None, False),
        ("cuda:0", True, True),
    ]:
        graph = Graph(
            nodes_of(["crop"]),
            batch_size=1,
            device=torch.device(device),
            threads=1,
            windows=windows,
        )
        run = graph._run_of([np.zeros(9, np.uint8)], [Action(Crop(), numbers)], sizes)
        assert run.windowed is expected
        schemas = [schema for schema, _ in operators(graph._defined(run.windowed))]
        assert ("decoders__ImageSlice" in schemas) is expected
        assert ("Slice" in schemas) is not expected

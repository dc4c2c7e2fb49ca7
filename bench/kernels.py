"""Kernels on a batch beside torchvision on PIL images: how equal, and how fast."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from bench.harness import (
    Case,
    Result,
    Scale,
    cpu_of,
    device_here,
    finished,
    interleave,
    on_one_thread,
)
from dataloaders.transforms.actions import Action, Primitive
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.kernels import EXACT, Images, kernel_for, run
from dataloaders.transforms.kernels.neighbours import BLUR_EXACT
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.primitives.auto import Shear, Shift, Turn
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    PermuteChannels,
    Posterize,
    Rgb,
    Saturation,
    Sharpness,
    Solarize,
)
from dataloaders.transforms.primitives.erasing import Erase, EraseByNoise
from dataloaders.transforms.primitives.geometry import (
    Crop,
    HorizontalFlip,
    Pad,
    Resize,
    VerticalFlip,
)
from dataloaders.transforms.primitives.turns import Affine, Perspective, Rotate

Numbers: TypeAlias = Mapping[str, Any]
Steps: TypeAlias = "dict[str, tuple[Primitive, Numbers]]"


@on_one_thread  # as in a worker
def on_cpu(scale: Scale) -> Result:
    count, side = scale.pick(full=16, tiny=2), scale.pick(full=224, tiny=24)
    images = photographs(count, side)
    rows, data, met = [], {}, True
    for name, action in actions(count, side, scale).items():
        pictures = [pil(image) for image in images]
        from_tensors = "pil, from tensors and back"
        timings = interleave(
            {
                "kernel": lambda action=action: run([action], images),
                "pil": lambda action=action, pictures=pictures: [
                    action.apply(sample, picture) for sample, picture in enumerate(pictures)
                ],
                from_tensors: lambda action=action: by_torchvision(action, images),
            },
            rounds=scale.pick(full=7, tiny=1),
            warmups=scale.pick(full=1, tiny=0),
        )
        off = difference(run([action], images), by_torchvision(action, images))
        met = met and off[0] <= (allowed(action) or 0)
        each = (times.median("cpu") * 1e3 / count for times in timings.values())
        rows.append((name, *each, str(timings["kernel"].ratio(timings[from_tensors])), *off))
        data[name] = cpu_of(timings)
    return Result(
        (
            "step",
            "kernel, CPU ms an image",
            "torchvision on PIL images",
            "the same, from tensors and back",
            "kernel / the latter (spread)",
            *_OFF,
        ),
        tuple(rows),
        met,
        (
            f"{count} images of {side} x {side} (waves, an edge and noise), one thread; each has "
            "numbers of its own.",
        ),
        data,
    )


def on_cuda(scale: Scale) -> Result:
    count, side = scale.pick(full=256, tiny=2), scale.pick(full=224, tiny=24)
    device = device_here()
    images = photographs(count, side)
    there = images.to(device)
    rows, met = [], True
    for name, action in actions(count, side, scale).items():
        seconds = []
        for _ in range(scale.pick(full=12, tiny=2)):
            finished(device)
            begun = time.perf_counter()
            run([action], there)
            queued = time.perf_counter() - begun
            finished(device)
            seconds.append((time.perf_counter() - begun, queued))
        whole, queued = 1e3 * np.median(np.array(seconds[1:]), 0)
        off = difference(run([action], there), by_torchvision(action, images))
        most = allowed(action)
        met = met and (most is None or off[0] <= most)
        rows.append((name, float(whole), float(queued), *off))
    return Result(
        ("step", f"ms a batch of {count}", "of which until all was queued", *_OFF),
        tuple(rows),
        met,
        (f"{count} images of {side} x {side}; each has numbers of its own.",),
    )


_OFF = ("largest difference to torchvision on PIL images, levels", "bytes that differ, %")


def actions(count: int, side: int, scale: Scale) -> dict[str, Action]:
    """Return all of `steps`; of a tiny run every tenth, because tests cover each."""
    found = list(steps(count, side).items())[:: scale.pick(full=1, tiny=10)]
    return {name: Action(primitive, numbers) for name, (primitive, numbers) in found}


def allowed(action: Action) -> int | None:
    """Return by how many levels a kernel may be off; None: by any, it is torchvision's own."""
    kernel = kernel_for(action.primitive)
    assert kernel is not None, f"{type(action.primitive).__name__} has no kernel"
    return {EXACT: 0, BLUR_EXACT: 1}.get(kernel.exact)


def steps(count: int, side: int) -> Steps:
    """Return each kernel with numbers as common transforms draw them, for ``count`` images."""
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**32, (count, 4), np.uint64)

    def between(low: float, high: float) -> Any:
        return generator.uniform(low, high, count)

    def whole(low: int, high: int) -> Any:
        return generator.integers(low, high, count)

    factor = {"factor": between(0.6, 1.4)}
    size = side * 7 // 8
    window = {"top": whole(0, side - size), "left": whole(0, side - size)}
    window |= {name: np.full(count, size) for name in ("height", "width")}
    part = {"top": whole(0, side // 4), "left": whole(0, side // 4)}
    part |= {name: whole(side // 4, side * 3 // 4) for name in ("height", "width")}
    border = {name: np.full(count, 4) for name in ("left", "top", "right", "bottom")}
    smaller = {name: np.full(count, side * 5 // 7) for name in ("height", "width")}
    larger = {name: np.full(count, side * 9 // 7) for name in ("height", "width")}
    moved = {
        "angle": between(-30, 30),
        "translate": np.stack([whole(-9, 9), whole(-9, 9)], 1),
        "scale": between(0.8, 1.2),
        "shear": np.stack([between(-10, 10), between(-10, 10)], 1),
    }
    square = np.array([[0, 0], [side, 0], [side, side], [0, side]])
    inward = generator.integers(0, side // 4, (count, 4, 2)) * np.where(square > 0, -1, 1)
    boxes = np.stack([np.full(count, 3), part["height"], part["width"]], 1)
    noise = Draws(seeds).normal(boxes)
    orders = np.array([[2, 0, 1], [1, 0, 2]])
    found: Steps = {
        "brightness": (Brightness(), factor),
        "contrast": (Contrast(), factor),
        "saturation": (Saturation(), factor),
        "hue": (Hue(), {"factor": between(-0.1, 0.1)}),
        "grayscale": (Grayscale(3), {}),
        "rgb": (Rgb(), {}),
        "channels in another order": (
            PermuteChannels(),
            {"permutation": np.resize(orders, (count, 3))},
        ),
        "invert": (Invert(), {}),
        "posterize": (Posterize(), {"bits": whole(2, 8)}),
        "solarize": (Solarize(), {"threshold": between(0, 256)}),
        "autocontrast": (Autocontrast(), {}),
        "equalize": (Equalize(), {}),
        "sharpness": (Sharpness(), factor),
        "blur 5 x 5": (GaussianBlur(5, 5), {"sigma": between(0.1, 2)}),
        "blur 23 x 23": (GaussianBlur(23, 23), {"sigma": between(0.1, 2)}),
        "horizontal flip": (HorizontalFlip(), {}),
        "vertical flip": (VerticalFlip(), {}),
        "crop": (Crop(), window),
        "crops of many sizes": (Crop(), part),
        "pad": (Pad(), border),
        "pad, reflected": (Pad(mode="reflect"), border),
        "rotate": (Rotate(), {"angle": moved["angle"]}),
        "rotate, bilinear": (Rotate("bilinear"), {"angle": moved["angle"]}),
        "affine": (Affine(), moved),
        "affine, bicubic": (Affine("bicubic"), moved),
        "shear": (Shear("x"), {"level": between(-0.3, 0.3)}),
        "shift": (Shift("y"), {"pixels": whole(-9, 9)}),
        "turn": (Turn(), {"angle": moved["angle"]}),
        "perspective, bilinear": (Perspective("bilinear"), {"corners": square + inward}),
        "resize, smaller": (Resize("bilinear"), smaller),
        "resize, larger": (Resize("bilinear"), larger),
        "resize, bicubic": (Resize("bicubic"), smaller),
        "resize, nearest": (Resize("nearest"), smaller),
        "erase": (Erase((1.0, 2.0, 3.0)), part),
        "erase, by noise": (EraseByNoise(), {**part, "noise": noise}),
    }
    for transform in (v2.AugMix(), v2.ElasticTransform(sigma=2.0)):
        (action,) = chain_of(transform).draw(seeds, [side] * count, [side] * count)[0][0]
        found[type(transform).__name__] = (action.primitive, action.numbers)
    return found


def photographs(count: int, side: int) -> torch.Tensor:
    """Return uint8 [count, 3, side, side]: waves, an edge, noise."""
    generator = np.random.default_rng(1)
    y, x = np.mgrid[0:side, 0:side]
    phase = generator.uniform(0, 6, (count, 3, 1, 1))
    values = 127 + 90 * np.sin(x / 9 + y / 23 + phase) + generator.normal(0, 9, (1, 3, side, side))
    values[:, :, side // 3 :, side // 2 :] += 60
    return torch.from_numpy(np.clip(values, 0, 255).astype(np.uint8))


def by_torchvision(action: Action, images: torch.Tensor) -> list[torch.Tensor]:
    """Return uint8 [C, h, w] each, as a dataset of tensors would have to do it."""
    made = [action.apply(sample, pil(image)) for sample, image in enumerate(images)]
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in made]


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))


def difference(got: Images, expected: list[torch.Tensor]) -> tuple[int, float]:
    """Return the largest difference in levels, and the share of bytes that differ in percent."""
    off = [(a.cpu().int() - b.int()).abs().flatten() for a, b in zip(got, expected, strict=True)]
    every = torch.cat(off)
    return int(every.max()), 100 * float((every > 0).double().mean())


CASES = [
    Case(
        "kernels_cpu",
        "What do the kernels cost on the CPU beside torchvision on PIL images, and are they equal?",
        "no byte differs (the blur: by 1 level at most)",
        on_cpu,
    ),
    Case(
        "kernels_cuda",
        "What do the kernels cost on a GPU, and are they equal to torchvision on PIL images there?",
        "no byte differs (the blur: by 1 level at most; torchvision's own functions: no bar)",
        on_cuda,
        gpu=True,
        limit_s=90,
    ),
]

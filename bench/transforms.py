"""How far is each torchvision transform from torchvision's own result, wherever it is done?

    photos ──torch, seed=──────────────> bytes ─┐
           ──backend="dali" on the CPU─> bytes ─┼─ the largest difference, in levels of 256
           ──actions, kernels──────────> bytes ─┤
           ──actions, DALI's nodes─────> bytes ─┘

``python -m bench.transforms`` writes the table of the kept result into docs/transforms.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.dali import dali_version, folder_of_photos
from bench.harness import RESULTS, Case, Cell, Result, Scale, in_folder, on_one_thread
from dataloaders import DataLoader
from dataloaders.seeding.philox import FIRST_RESERVED_DRAW, words

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "transforms.md"
BEGIN, END = "<!-- python -m bench.transforms -->", "<!-- end -->"

_MAKE_TENSORS = ("ToTensor", "ToImage", "ImageClassification")
_SEED = 5
_SIDE = 96


def transforms(m: Any) -> dict[str, list[Any]]:
    """Return the transforms to look at, of torchvision's v1 or v2; a chain ends in one size."""
    half, resize = 0.5, (_SIDE, 70)
    bilinear, nearest = _mode("bilinear"), _mode("nearest")
    alone = {
        "Resize": [m.Resize(resize)],
        "Resize, bicubic": [m.Resize(resize, _mode("bicubic"))],
        "Resize, lanczos": [m.Resize(resize, _mode("lanczos"))],
        "Resize, nearest": [m.Resize(resize, nearest)],
        "Resize, max_size": [m.Resize(80, max_size=120), m.CenterCrop(_SIDE)],
        "CenterCrop": [m.CenterCrop(_SIDE)],
        "RandomCrop": [m.RandomCrop(_SIDE, padding=20, pad_if_needed=True)],
        "RandomResizedCrop": [m.RandomResizedCrop(_SIDE)],
    }
    cropped = {
        "RandomHorizontalFlip": [m.RandomHorizontalFlip()],
        "RandomVerticalFlip": [m.RandomVerticalFlip()],
        "RandomRotation": [m.RandomRotation(30)],
        "RandomRotation, bilinear": [m.RandomRotation(30, bilinear)],
        "RandomAffine": [m.RandomAffine(20, (0.1, 0.2), (0.8, 1.2), 10, bilinear)],
        "RandomPerspective": [m.RandomPerspective(0.4, 0.7)],
        "RandomPerspective, nearest": [m.RandomPerspective(0.4, 0.7, nearest)],
        "Pad": [m.Pad((3, 5), 7)],
        "Pad, reflect": [m.Pad((3, 5), 0, "reflect")],
        "ColorJitter": [m.ColorJitter(half, half, half, 0.2)],
        "ColorJitter, hue": [m.ColorJitter(0, 0, 0, half)],
        "Grayscale": [m.Grayscale(3)],
        "RandomGrayscale": [m.RandomGrayscale(half)],
        "GaussianBlur": [m.GaussianBlur(5)],
        "RandomInvert": [m.RandomInvert()],
        "RandomPosterize": [m.RandomPosterize(3)],
        "RandomSolarize": [m.RandomSolarize(100)],
        "RandomAutocontrast": [m.RandomAutocontrast()],
        "RandomEqualize": [m.RandomEqualize()],
        "RandomAdjustSharpness": [m.RandomAdjustSharpness(2)],
        "AutoAugment": [m.AutoAugment()],
        "RandAugment": [m.RandAugment()],
        "TrivialAugmentWide": [m.TrivialAugmentWide()],
        "AugMix": [m.AugMix()],
        "ElasticTransform": [m.ElasticTransform()],
        "RandomErasing": [m.PILToTensor(), m.RandomErasing(1, value=9)],
        "RandomApply": [m.RandomApply([m.ColorJitter(half)])],
        "RandomChoice": [m.RandomChoice([m.RandomRotation(9), m.RandomInvert()])],
        "RandomOrder": [m.RandomOrder([m.RandomRotation(9), m.ColorJitter(half)])],
    }
    guides = [
        m.Resize((160, 160)),
        m.RandomHorizontalFlip(),
        m.RandomVerticalFlip(),
        m.RandomRotation(10),
        m.ColorJitter(0.05, 0.05, 0.05, 0.05),
    ]
    nested = m.Compose([m.CenterCrop(_SIDE), m.Compose([m.RandomHorizontalFlip()])])
    pure = [m.ToPureTensor()] if hasattr(m, "ToPureTensor") else []
    more = {
        "ToTensor; v2: ToImage, ToDtype": _floats(m),
        "PILToTensor, ConvertImageDtype": [m.PILToTensor(), m.ConvertImageDtype(torch.float32)],
        "Normalize; v2: and ToPureTensor": [*_floats(m), m.Normalize(**_TO_LEVELS), *pure],
    }
    return {
        **alone,
        **{name: [m.CenterCrop(_SIDE), *members] for name, members in cropped.items()},
        "the guides' chain": guides,
        "Compose in Compose": [nested],
        **{name: [m.CenterCrop(_SIDE), *members] for name, members in more.items()},
        "transforms of weights": [_of_weights()],
    }


_TO_LEVELS: dict[str, list[float]] = {"mean": [0.0] * 3, "std": [1 / 255] * 3}
"""Floats that are levels again: so that differences are."""


def _floats(m: Any) -> list[Any]:
    if hasattr(m, "ToImage"):
        return [m.ToImage(), m.ToDtype(torch.float32, scale=True)]
    return [m.ToTensor()]


def _of_weights() -> Any:
    from torchvision.models import ResNet18_Weights

    preset = ResNet18_Weights.DEFAULT.transforms()
    vars(preset).update(resize_size=[_SIDE + 14], crop_size=[_SIDE], **_TO_LEVELS)
    return preset


@on_one_thread
@in_folder
def run(scale: Scale, folder: Path) -> Result:
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    count = scale.pick(full=48, tiny=3)
    photos = folder_of_photos(folder, count, count)
    chains = [transforms(module) for module in (v1, v2)]
    rows: list[tuple[Cell, ...]] = []
    for name in list(chains[0])[:: scale.pick(full=1, tiny=5)]:
        cells = [
            differences(photos, module.Compose(chain[name]), count)
            for module, chain in zip((v1, v2), chains, strict=True)
        ]
        rows.append((name, *(worst(column) for column in zip(*cells, strict=True))))
    return Result(
        ("transform, v1 and v2", "on the CPU", "kernels", "quicker (fast=)", "nodes (fast=)"),
        tuple(rows),
        all(row[1] == "equal" for row in rows),
        (
            f"{count} JPEG photographs, each drawn for once, seed={_SEED}, against torch's loader "
            "with the same seed. Largest difference of a level of 0 to 255; in brackets the share "
            "of levels that differ by more than 1. Equal: no bit differs.",
            "On the CPU: Dali(fast=()). Kernels: what runs behind the graph on a GPU, "
            "computed on the CPU here (not yet run on a GPU). Quicker: on the CPU with all names "
            "of Dali(fast=...); the one for resizing is allowed by default. Nodes: with all names "
            "what DALI's graph on a GPU does, and kernels the rest; both computed on the CPU here.",
            "Floats are made by the table that their members make of all bytes, in each way; "
            "Normalize, where there is one, makes levels of them again.",
            f"nvidia-dali {dali_version()}.",
        ),
    )


def differences(photos: Path, chain: Any, count: int) -> tuple[Any, ...]:
    """Differences of each way from torch's result; None where the way has nothing of its own."""
    from torchvision.transforms import Compose, PILToTensor

    from backends.dali import Dali
    from backends.dali.nodes import FAST

    # RandomErasing takes tensors only, so its chain makes them itself, as those of floats do.
    makes_tensors = any(name in repr(chain) for name in _MAKE_TENSORS)
    whole = chain if makes_tensors else Compose([chain, PILToTensor()])
    wanted = images_of(photos, whole, count, "stock")
    plain = difference(images_of(photos, whole, count, Dali(fast=())), wanted)
    quick = images_of(photos, whole, count, Dali(fast=tuple(FAST)))
    fast = difference(quick, wanted)
    kernels, nodes = by_kernels(photos, chain, wanted), by_nodes(photos, whole, wanted, count)
    return plain, kernels, None if fast == plain else fast, nodes


def images_of(photos: Path, transform: Any, count: int, backend: Any) -> Any:
    """uint8 or floats [n, C, h, w] of one batch."""
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(str(photos), transform)
    (batch,) = DataLoader(dataset, count, backend=backend, seed=_SEED, device="cpu")
    return batch[0]


def by_kernels(photos: Path, chain: Any, wanted: Any) -> Any:
    """The same by `dataloaders.transforms.kernels`; None where one is missing."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    from backends.dali.plan import TailRun
    from dataloaders.transforms.kernels import kernel_for
    from dataloaders.transforms.kernels import run as run_kernels
    from dataloaders.transforms.operators import chain_of
    from dataloaders.transforms.trailing import trailing

    read = chain_of(chain)
    run = trailing(read.members)
    tail = run if isinstance(run, tuple) else ()
    head = read.operators[: len(read.operators) - len(tail)]
    primitives = [each for operator in head for each in operator.primitives]
    if any(kernel_for(primitive) is None for primitive in primitives):
        return None
    images = [image for image, _ in ImageFolder(str(photos), PILToTensor())]
    made = run_kernels(drawn(read, images)[: len(primitives)], images)
    return difference(floats(TailRun(tail), made) if tail else made, wanted)


def floats(tail: Any, images: Any) -> Any:
    """What a device makes of bytes by the table of the last members."""
    from backends.dali.behind import Whole, memory_of
    from dataloaders.batches.memory import HostPool

    return Whole(tail, memory_of(HostPool()))(images, ())


def by_nodes(photos: Path, whole: Any, wanted: Any, count: int) -> Any:
    """The same by the nodes that DALI has for a device, and kernels behind them.

    None where it has none but for crops and flips, or a kernel is missing.
    """
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import PILToTensor

    from backends.dali.behind import OnDevice
    from backends.dali.graph import Graph
    from backends.dali.nodes import FAST, Flip, Window
    from backends.dali.plan import Behind, Work, work_of

    work = work_of(whole, form="pil", device="cuda", fast=tuple(FAST))
    assert isinstance(work, Work), work
    behind = [part for part in work.parts if isinstance(part, Behind)]
    nodes = [node for node in work.graph.nodes if not isinstance(node, (Flip, Window))]
    if not nodes or any(OnDevice.exactness(part) is None for part in behind):
        return None
    images = [image for image, _ in ImageFolder(str(photos), PILToTensor())]
    actions = drawn(work.chain, images)
    cpu = torch.device("cpu")
    graph = Graph(work.graph.nodes, batch_size=count, device=cpu, threads=1, encoded=False)
    pixels = [np.ascontiguousarray(image.permute(1, 2, 0).numpy()) for image in images]
    graph.feed(pixels, [actions[place] for place in work.graph.places])
    made = graph.take()
    for part in work.parts:
        made = OnDevice(part)(made, actions) if isinstance(part, Behind) else floats(part, made)
    graph.close()
    return difference(made, wanted)


def drawn(chain: Any, images: Any) -> list[Any]:
    """The actions of a chain that was read, seeded as samples of epoch 0 are."""
    seeding = words(_SEED, 0, np.arange(len(images)), 0, FIRST_RESERVED_DRAW)
    heights, widths = zip(*(image.shape[1:] for image in images), strict=True)
    actions, _ = chain.draw(seeding, heights, widths)
    return [action for each in actions for action in each]


def difference(found: Any, wanted: Any) -> tuple[float, float]:
    """The largest difference of two batches, in levels of bytes, and the share above 1."""
    apart = (found.double() - wanted.double()).abs()
    more = apart > 1.001  # a level of floats, taken from another one, is not quite 1
    return float(apart.max()), float(more.float().mean())


def worst(column: tuple[Any, ...]) -> str:
    """Of v1 and v2, in words; nothing where there is none."""
    found = [each for each in column if each is not None]
    if not found:
        return ""
    largest, share = (max(values) for values in zip(*found, strict=True))
    return "equal" if not largest else f"{largest:.3g} ({share:.2%})"


def table() -> str:
    """Return the table of the kept result."""
    lines = (RESULTS / "transforms.md").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def documented() -> str:
    """Return what docs/transforms.md has between its marks."""
    return DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].strip()


def write() -> None:
    """Put the table of the kept result into docs/transforms.md."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


def _mode(name: str) -> Any:
    from torchvision.transforms import InterpolationMode

    return InterpolationMode(name)


CASES = [
    Case(
        "transforms",
        "How far is each transform from torchvision's own result?",
        "on the CPU no bit differs",
        run,
    ),
]

if __name__ == "__main__":
    write()

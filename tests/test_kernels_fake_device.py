"""Kernels and the device tail on a CUDA device that is not there: shapes, devices and waits.

torch's FakeTensorMode runs every operation without memory: it refuses tensors of two devices in
one, and whatever would need a value of a device (``.item()``, ``nonzero``). Beside it each copy
between host and device is looked at: one that is not queued would wait for the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as v1
from torchvision.transforms import v2

from bench.kernels import steps
from dataloaders.transforms.actions import Action, Sizes, drawn
from dataloaders.transforms.draws import Draws
from dataloaders.transforms.kernels import levels, place, run
from dataloaders.transforms.kernels.hue import _tables
from dataloaders.transforms.kernels.neighbours import gaussian_blur
from dataloaders.transforms.kernels.own import OWN
from dataloaders.transforms.kernels.resize import _vertical_first
from dataloaders.transforms.kernels.table import kernel_for
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.primitives.elastic import Elastic
from dataloaders.transforms.primitives.turns import Perspective
from dataloaders.transforms.table import tables_of
from dataloaders.transforms.ways import Arithmetic, Lookup
from helpers.drawn import seeds_of
from test_kernels_chains import CHAINS

COUNT, SIDE = 6, 40
STEPS = steps(COUNT, SIDE)


class Copies(TorchDispatchMode):
    """Counts copies between devices that are not queued: the host waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocking: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.name() in ("aten::_to_copy", "aten::copy_"):
            from_tensor = args[1] if func.name() == "aten::copy_" else args[0]
            queued = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if from_tensor.device.type != out.device.type and not queued:
                self.blocking.append(f"{tuple(from_tensor.shape)} to {out.device}")
        return out


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside, tensors on "cuda" can be made and worked on; gives the copies that wait."""
    _vertical_first()  # it looks at pixels, once, on the host

    def apply(self: Perspective, *args: Any, **numbers: Any) -> Any:
        with unset_fake_temporarily():  # torchvision solves for coefficients, on the host
            return real(self, *args, **numbers)

    real = Perspective.apply
    # The mode has no pinned memory; nor is it asked for real pointers.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)
    runs = import_module("dataloaders.transforms.kernels.run")
    monkeypatch.setattr(runs, "_own_memory", lambda *_: False)
    monkeypatch.setattr(Perspective, "apply", apply)
    _tables.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
            _tables(torch.device("cuda", 0))  # they are copied once
            copies.blocking.clear()
            yield copies.blocking
    finally:
        _tables.cache_clear()  # of tensors without memory


def images_of(kind: str) -> Any:
    if kind == "list":
        sides = [(SIDE + i, SIDE + 2 * (i % 3)) for i in range(COUNT)]
        return [torch.empty(3, *side, dtype=torch.uint8, device="cuda") for side in sides]
    images = torch.empty(COUNT, 3, SIDE, SIDE, dtype=torch.uint8, device="cuda")
    return images.contiguous(memory_format=torch.channels_last) if kind == "last" else images


@pytest.mark.parametrize("kind", ["batch", "list", "last"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.thinned(16)
def test_kernels_stay_on_the_device_and_wait_for_nothing(
    name: str, kind: str, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    primitive, numbers = STEPS[name]
    own_size = isinstance(primitive, Elastic) and kind == "list"
    where = np.arange(COUNT) % 2 == 0 if some else None
    with fake_cuda(monkeypatch) as blocking:
        # Fields of movements are drawn for images of one size.
        images = list(images_of("batch")) if own_size else images_of(kind)
        made = run([Action(primitive, numbers, where)], images)
        assert {image.device.type for image in made} == {"cuda"}
        assert {image.dtype for image in made} == {torch.uint8}
        # torchvision's own functions make their few constants on the device, and wait for it.
        found = kernel_for(primitive)
        assert found is not None
        few = 9 if found.exact == OWN else -1
        assert [copy for copy in blocking if numbers_in(copy) > few] == []


def numbers_in(copy: str) -> int:
    """How many were copied, as `Copies` tells it."""
    return math.prod(map(int, re.findall(r"\d+", copy.partition(" to ")[0])))


@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.thinned(8)
def test_chains_stay_on_the_device(name: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(module.Compose(CHAINS[name](module)))
    picture = Image.new("RGB", (SIDE + 9, SIDE + 8))
    sizes = Sizes([picture.height] * COUNT, [picture.width] * COUNT)
    actions = drawn(chain.operators, Draws(seeds_of(COUNT)), sizes)
    assert all(kernel_for(action.primitive) is not None for action in actions)
    with fake_cuda(monkeypatch) as blocking:
        shape = (COUNT, 3, picture.height, picture.width)
        made = run(actions, torch.empty(shape, dtype=torch.uint8, device="cuda"), ours=True)
        assert {image.device.type for image in made} == {"cuda"}
        assert blocking == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_tail_stays_on_the_device(
    dtype: torch.dtype, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables_of([v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.3))])[0][3]
    assert table.steps is not None
    device = torch.device("cuda", 0)
    with fake_cuda(monkeypatch) as blocking:
        ways = [Arithmetic(table.steps, device), Lookup(table.values.to(dtype), device)]
        blocking.clear()  # constants, once
        for way in ways:
            images = images_of("batch").contiguous(memory_format=layout)
            out = torch.empty_like(images, dtype=dtype)
            way.run(images, out)
            assert out.device == device
        assert blocking == []


def test_a_copy_that_waits_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda(monkeypatch) as blocking:
        images_of("batch").cpu()
        torch.empty(3).to("cuda")
        torch.empty(3).to("cuda", non_blocking=True)
        assert len(blocking) == 2
        with pytest.raises(Exception, match=r"(?i)data.dependent|_local_scalar_dense"):
            images_of("batch")[0, 0, 0, 0].item()
        with pytest.raises(RuntimeError, match="device"):
            torch.empty(3, device="cuda") + torch.empty(3)


@pytest.mark.parametrize("count", [1, 2])
def test_a_blur_is_never_cudnns(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own kernel for depthwise convolutions: of dense planes, two or more."""
    seen: list[tuple[bool, int]] = []
    real = functional.conv2d

    def conv2d(values: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append((values.is_contiguous(), options["groups"]))
        assert values.shape[1] == options["groups"]
        return real(values, *args, **options)

    monkeypatch.setattr(functional, "conv2d", conv2d)
    images = torch.zeros(count, 3, 9, 8, dtype=torch.uint8)
    for some in (images, images.contiguous(memory_format=torch.channels_last), images[:, :1]):
        gaussian_blur(some, (3, 3), np.ones(count))
    assert seen == [(True, 3 * count), (True, 3 * count), (True, max(2, count))]


def test_windows_by_index_are_the_windows() -> None:
    """What a device does in one step, tried on the host."""
    images = torch.randint(0, 256, (4, 3, 9, 8), dtype=torch.uint8)
    boxes = np.array([[0, 0, 5, 4], [2, 3, 5, 4], [-2, -1, 5, 4], [7, 6, 5, 4]])
    expected = torch.stack(
        [place._window(image, box) for image, box in zip(images, boxes.tolist(), strict=True)]
    )
    assert torch.equal(place._gathered(images, boxes, False), expected)
    assert torch.equal(place._gathered(images[:2], boxes[:2], True), expected[:2])


def test_levels_by_index_are_counted_as_by_row() -> None:
    rows = torch.randint(0, 256, (5, 1000), dtype=torch.uint8)
    counts = torch.zeros(5, 256, dtype=torch.int64)
    levels._count_by_index(rows, counts)
    assert torch.equal(counts, torch.stack([torch.bincount(row, minlength=256) for row in rows]))

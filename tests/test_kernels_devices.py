"""What a GPU would be asked to do, as far as it shows without one.

On the meta device tensors have no values: a kernel that looks at one, and so would wait for the
GPU, raises. Fake CUDA tensors raise where a step mixes tensors of the host and of the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.kernels import steps
from dataloaders.transforms.actions import Action
from dataloaders.transforms.kernels import run
from dataloaders.transforms.kernels.hue import _tables
from dataloaders.transforms.primitives.geometry import Resize

COUNT, SIDE = 4, 64

STEPS = steps(COUNT, SIDE)
STEPS["resize, to many sizes"] = (
    Resize("lanczos"),
    {"height": np.arange(40, 40 + COUNT), "width": np.arange(30, 30 + COUNT)},
)
SOME = [None, np.array([True, False, True, False])]


@pytest.fixture(autouse=True)
def tables_are_made_anew() -> Iterator[None]:
    yield
    _tables.cache_clear()


@pytest.mark.parametrize("where", SOME, ids=["all", "some"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.thinned(3)
def test_no_kernel_waits_for_the_device(name: str, where: Any) -> None:
    primitive, numbers = STEPS[name]
    images = torch.empty(COUNT, 3, SIDE, SIDE, dtype=torch.uint8, device="meta")
    odd = [images[0], images[1], images[2, :, :60], images[3]]
    on_host = torch.zeros(COUNT, 3, SIDE, SIDE, dtype=torch.uint8)
    odd_on_host = [on_host[0], on_host[1], on_host[2, :, :60], on_host[3]]
    ways: list[Any] = [(images, on_host), (odd, odd_on_host)]
    if name == "ElasticTransform":  # its fields have one size
        ways.pop()
    for there, here in ways:
        got = run([Action(primitive, numbers, where)], there)
        expected = run([Action(primitive, numbers, where)], here)
        assert [image.shape for image in got] == [image.shape for image in expected]
        assert {image.device.type for image in got} == {"meta"}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", [name for name in STEPS if "perspective" not in name])
@pytest.mark.thinned(3)
def test_no_kernel_mixes_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # (Perspective: torchvision solves for its coefficients, which fake tensors cannot.)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    primitive, numbers = STEPS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(COUNT, 3, SIDE, SIDE, dtype=torch.uint8, device="cuda")
        for where in SOME:
            got = run([Action(primitive, numbers, where)], images)
            assert {image.device.type for image in got} == {"cuda"}

"""How a chain is cut up for DALI, and what is done behind the graph, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from dataloaders.batches.memory import HostPool
from dataloaders.transforms.actions import Action, Sizes, drawn
from dataloaders.transforms.draws import Draws
from helpers.photos import picture

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali.behind import ByHost, Each, OnDevice, Whole, apart, dense, memory_of
from backends.dali.nodes import FAST
from backends.dali.plan import Behind, TailRun, Work, work_of

COUNT = 6
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.3, 0.1]


def work(*members: Any, form: str = "pil", device: str = "cpu") -> Work:
    found = work_of(transforms.Compose(members), form=form, device=device, fast=("resize",))
    assert isinstance(found, Work), found
    return found


def cut(*members: Any, form: str = "pil", device: str = "cpu") -> list[str]:
    """The parts of a chain, each as its kind and primitives or members."""
    found = work(*members, form=form, device=device)
    told = ["graph " + " ".join(type(node.primitive).__name__ for node in found.graph.nodes)]
    for part in found.parts:
        if isinstance(part, Behind):
            names = [getattr(p, "name", type(p).__name__) for p in part.primitives]
            told.append(f"{part.form} " + " ".join(names))
        else:
            told.append("tail " + " ".join(member.name for member in part.members))
    return [*told, found.form + (" wrapped" if found.wraps else "")]


def test_the_graph_takes_the_longest_beginning_and_the_tail_the_end() -> None:
    assert cut(
        transforms.RandomCrop(8),
        transforms.RandomHorizontalFlip(),
        transforms.GaussianBlur(3),
        transforms.RandomVerticalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
        transforms.RandomErasing(),
    )[-4:] == [
        "pil GaussianBlur VerticalFlip",
        "tail ToTensor Normalize",
        "floats Erase",
        "floats",
    ]


def test_members_that_change_no_value_are_in_nobodys_way() -> None:
    chain = (v2.ToImage(), v2.RandomCrop(8), v2.ToPureTensor(), v2.RandomHorizontalFlip())
    told = cut(*chain, v2.ToDtype(torch.float32, scale=True))
    assert told[0].endswith("Crop HorizontalFlip")
    assert told[1:] == ["tail ToDtype", "floats"]
    assert cut(v2.CenterCrop(4), v2.ToImage())[-1] == "bytes wrapped"
    assert cut(v2.CenterCrop(4), v2.ToImage())[1:] == ["bytes wrapped"]
    assert cut(v2.CenterCrop(4), form="bytes")[-1] == "bytes"


def test_floats_that_no_tail_makes_are_made_one_by_one() -> None:
    integers = cut(transforms.PILToTensor(), transforms.ConvertImageDtype(torch.int32))
    assert integers == ["graph ", "pil PILToTensor ConvertImageDtype", "ints"]
    twice = cut(transforms.ToTensor(), transforms.RandomErasing(), transforms.Normalize(MEAN, STD))
    assert twice == ["graph ", "tail ToTensor", "floats Erase Normalize", "floats"]


def test_on_a_cuda_device_resizes_and_colours_are_dalis_too() -> None:
    told = cut(
        transforms.RandomResizedCrop(8),
        transforms.ColorJitter(brightness=0.3),
        transforms.ToTensor(),
        device="cuda",
    )
    assert told == ["graph Crop Resize Brightness", "tail ToTensor", "floats"]


FEW = [
    transforms.ColorJitter(0.3, 0.3, hue=0.1),
    v2.RandomOrder([v2.RandomInvert(), v2.RandomHorizontalFlip()]),
    transforms.AutoAugment(),
    v2.RandAugment(),
    transforms.RandomApply([transforms.TrivialAugmentWide()]),
    v2.RandomChoice([v2.RandomInvert(), v2.AutoAugment()]),
]


@pytest.mark.parametrize("member", FEW, ids=lambda member: type(member).__name__)
def test_on_a_device_steps_stay_behind_where_each_image_takes_a_few_of_them(member: Any) -> None:
    chain = transforms.Compose([transforms.CenterCrop(8), member, transforms.ToTensor()])
    found = work_of(chain, form="pil", device="cuda", fast=tuple(FAST))
    assert isinstance(found, Work)
    assert [type(node.primitive).__name__ for node in found.graph.nodes] == ["Crop"]
    assert "a graph would put every image through all of them" in str(found.graph.why)
    assert type(member).__name__ in str(found.graph.why)


def test_on_the_cpu_dali_has_cheap_steps_only_and_does_all_of_them() -> None:
    flips = transforms.RandomOrder([transforms.RandomVerticalFlip()] * 2)
    jitter = transforms.ColorJitter(0.3, 0.3)
    assert cut(flips, jitter, to_bytes)[:2] == [
        "graph VerticalFlip VerticalFlip VerticalFlip VerticalFlip",
        "pil Brightness Contrast Brightness Contrast PILToTensor",
    ]


# Behind the graph


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def batch(height: int = 12, width: int = 10) -> torch.Tensor:
    """Six pictures as a graph gives them: [n, C, H, W] in the order [n, H, W, C]."""
    pixels = np.stack([np.asarray(picture(n, height, width)) for n in range(COUNT)])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def actions_of(found: Work, height: int = 12, width: int = 10, seed: int = 3) -> list[Action]:
    words = np.random.default_rng(seed).integers(0, 2**32, (COUNT, 4), np.uint64)
    return drawn(found.chain.operators, Draws(words), Sizes([height] * COUNT, [width] * COUNT))


to_bytes = transforms.PILToTensor()


def expected(actions: list[Action], images: torch.Tensor) -> list[torch.Tensor]:
    """Image by image as torchvision has it, of PIL images."""
    made = []
    for sample, image in enumerate(images):
        value: Any = Image.fromarray(image.permute(1, 2, 0).numpy())
        for action in actions:
            value = action.apply(sample, value)
        made.append(
            value if isinstance(value, torch.Tensor) else v2.functional.pil_to_tensor(value)
        )
    return made


BEHIND = {
    "all": [transforms.GaussianBlur(3)],
    "some": [transforms.RandomSolarize(100, p=0.5)],
    "none": [transforms.RandomInvert(p=0.0)],
    "sizes": [transforms.Resize((7, 5)), transforms.RandomRotation(30)],
    "some sizes": [transforms.RandomApply([transforms.CenterCrop(6)], p=0.5)],
    "grey": [transforms.Grayscale()],
}


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("members", BEHIND.values(), ids=BEHIND)
def test_each_image_is_torchvisions(
    members: list[Any], as_list: bool, threads: ThreadPoolExecutor
) -> None:
    found = work(transforms.RandomInvert(p=0.5), *members, transforms.PILToTensor())
    part = found.parts[0]
    assert isinstance(part, Behind)
    actions, images = actions_of(found), batch()
    wanted = expected(actions, images.clone())
    step = Each(part, threads, 2, memory_of(HostPool()))
    got = step(list(images.clone()) if as_list else images.clone(), actions)
    assert isinstance(got, torch.Tensor) or len({each.shape for each in wanted}) > 1 or as_list
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("members", BEHIND.values(), ids=BEHIND)
def test_kernels_make_of_a_batch_what_torchvision_does(
    members: list[Any], threads: ThreadPoolExecutor
) -> None:
    found = work(transforms.RandomInvert(p=0.5), *members, transforms.PILToTensor())
    part = found.parts[0]
    assert isinstance(part, Behind)
    assert OnDevice.exactness(part) is not None
    actions, images = actions_of(found), batch()
    wanted = expected(actions, images.clone())
    by_host = ByHost(Each(part, threads, 2, memory_of(HostPool())))
    for step in (OnDevice(part), by_host):
        for one, other in zip(step(images.clone(), actions), wanted, strict=True):
            assert torch.equal(one, other)


def test_an_error_in_a_thread_is_raised_when_all_have_ended(threads: ThreadPoolExecutor) -> None:
    found = work(transforms.ToTensor(), transforms.RandomErasing(), transforms.Normalize(MEAN, STD))
    part = found.parts[1]
    assert isinstance(part, Behind)
    step = Each(part, threads, 2, memory_of(HostPool()))
    images = [torch.rand(3, 6, 6) for _ in range(COUNT)]
    images[3] = images[3].to(torch.uint8)
    with pytest.raises(TypeError, match="should be a float tensor"):
        step(images, actions_of(found, 6, 6))


@pytest.mark.parametrize("grey", [False, True])
def test_the_tail_is_its_members_to_the_bit(grey: bool) -> None:
    found = work(transforms.ToTensor(), transforms.Normalize([0.3], [0.7]))
    (run,) = found.parts
    assert isinstance(run, TailRun)
    images = batch()[:, :1] if grey else batch()
    whole = Whole(run, memory_of(HostPool()))
    wanted = torch.stack(
        [transforms.Normalize([0.3], [0.7])(image.contiguous() / 255) for image in images]
    )
    assert torch.equal(whole(images, []), wanted)
    several = whole([images[0], images[1, :, :4]], [])
    assert torch.equal(several[0], wanted[0])
    assert torch.equal(several[1], wanted[1, :, :4])


def test_bytes_are_delivered_in_torchvisions_order_of_memory() -> None:
    images = batch()
    memory = memory_of(HostPool())
    ordered = dense(images, memory)
    assert isinstance(ordered, torch.Tensor)
    assert ordered.is_contiguous()
    assert torch.equal(ordered, images)
    assert dense(ordered, memory) is ordered
    assert all(image.is_contiguous() for image in dense(list(images), memory))


def test_what_lies_in_memory_that_is_not_ours_is_copied_on_a_device() -> None:
    taken = batch()
    assert apart(taken[:, :1], taken).data_ptr() != taken.data_ptr()
    other = torch.zeros(2)
    mixed = apart([other, taken[0]], taken)
    assert mixed[0] is other
    assert mixed[1].data_ptr() != taken.data_ptr()
    assert torch.equal(mixed[1], taken[0])

"""Kernels compute what Pillow does: compared byte by byte, on the CPU and (marked gpu) on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from bench.kernels import steps
from dataloaders.transforms.actions import Action, Primitive
from dataloaders.transforms.kernels import EXACT, TABLE, kernel_for, run
from dataloaders.transforms.kernels.hue import hue, rgb_of
from dataloaders.transforms.kernels.levels import grayscale
from dataloaders.transforms.kernels.own import OWN
from dataloaders.transforms.kernels.resize import _weights
from dataloaders.transforms.operators import chain_of
from dataloaders.transforms.primitives import auto, colour, elastic, erasing, geometry, turns
from dataloaders.transforms.primitives.colour import (
    Autocontrast,
    Brightness,
    Contrast,
    Equalize,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Jpeg,
    PermuteChannels,
    Posterize,
    Rgb,
    Saturation,
    Sharpness,
    Solarize,
)
from dataloaders.transforms.primitives.geometry import (
    Crop,
    HorizontalFlip,
    Resize,
    VerticalFlip,
)
from helpers.batches import assert_images, batch, by_torchvision, bytes_of, pil
from helpers.drawn import seeds_of
from helpers.pictures import KINDS, pixels

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

SIDES = st.integers(1, 40)
BATCHES = st.builds(
    batch,
    st.integers(1, 4),
    st.sampled_from(KINDS),
    st.sampled_from([1, 3]),
    SIDES,
    SIDES,
    st.integers(0, 1 << 20),
)
FACTORS = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(0, 2),
    st.sampled_from([0.0, -0.0, 1.0, 0.5, 1.5, 1e-7, 1 - 1e-9, 1 + 1e-9, 255.0, -1e9, 1e9]),
)


def check(
    primitive: Primitive, images: Any, numbers: dict[str, Any] | None = None, device: str = "cpu"
) -> Any:
    """Assert that the kernel of ``primitive`` gives torchvision's bytes; gives them."""
    kernel = kernel_for(primitive)
    assert kernel is not None
    assert kernel.exact in (EXACT, OWN)
    own = {name: np.asarray(values) for name, values in (numbers or {}).items()}
    if isinstance(images, torch.Tensor):
        before = images.clone()
        there = images.to(device)
        got = kernel(there, own)
        assert torch.equal(there.cpu(), before), "it wrote into what it was given"
    else:
        got = kernel([image.to(device) for image in images], own)
    assert all(image.device.type == device for image in got)
    assert_images(got, by_torchvision(primitive, images, own))
    return got


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("primitive", [Brightness(), Contrast(), Saturation(), Sharpness()])
@given(images=BATCHES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_blends(device: str, primitive: Primitive, images: torch.Tensor, data: Any) -> None:
    factors = data.draw(st.lists(FACTORS, min_size=len(images), max_size=len(images)))
    check(primitive, images, {"factor": factors}, device)


@pytest.mark.parametrize("device", DEVICES)
@given(images=BATCHES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_hue(device: str, images: torch.Tensor, data: Any) -> None:
    factors = data.draw(st.lists(st.floats(-0.5, 0.5), min_size=len(images), max_size=len(images)))
    check(Hue(), images, {"factor": factors}, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.nightly
def test_hue_of_every_colour(device: str) -> None:
    colours = torch.arange(1 << 24, dtype=torch.int32)
    every = torch.stack([colours >> 16, (colours >> 8) & 255, colours & 255], 1).to(torch.uint8)
    every = every.reshape(256, 256, 256, 3).permute(0, 3, 1, 2).contiguous()
    factors = np.random.default_rng(0).uniform(-0.5, 0.5, 256)
    got = hue(every.to(device), factors)
    assert_images(got, by_torchvision(Hue(), every, {"factor": factors}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.nightly
def test_every_hue_saturation_and_value_becomes_the_colour_that_pillow_gives(device: str) -> None:
    # Colours reach few of the triples: the closed form is held against Pillow for all of them.
    triples = torch.arange(1 << 24, dtype=torch.int32)
    h, s, v = triples >> 16, (triples >> 8) & 255, triples & 255
    hsv = torch.stack([h, s, v], -1).to(torch.uint8).reshape(256, 256, 256, 3)
    for one in hsv:
        # Bands merged, since Image.fromarray's mode is going away.
        bands = [Image.fromarray(one[..., band].contiguous().numpy()) for band in range(3)]
        expected = bytes_of(Image.merge("HSV", bands).convert("RGB"))
        planes = one.permute(2, 0, 1).unsqueeze(1).to(device)
        got = rgb_of(planes[:1].short(), planes[1:2].float(), planes[2:].float())
        assert torch.equal(got[0].cpu(), expected)


def test_hues_out_of_range_are_refused_as_torchvision_does() -> None:
    images = batch(2, "noise", 3, 4, 4)
    with pytest.raises(ValueError, match=r"hue_factor \(0\.6\) is not in \[-0\.5, 0\.5\]\."):
        hue(images, np.array([0.1, 0.6]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "primitive",
    [
        Invert(),
        Autocontrast(),
        Equalize(),
        Grayscale(),
        Grayscale(1),
        Grayscale(3),
        Rgb(),
        HorizontalFlip(),
        VerticalFlip(),
    ],
)
@given(images=BATCHES)
@settings(max_examples=40, deadline=None)
def test_without_numbers(device: str, primitive: Primitive, images: torch.Tensor) -> None:
    check(primitive, images, {}, device)


@pytest.mark.parametrize("device", DEVICES)
def test_grey_of_every_colour(device: str) -> None:
    colours = torch.arange(1 << 24, dtype=torch.int32)
    every = torch.stack([colours >> 16, (colours >> 8) & 255, colours & 255]).to(torch.uint8)
    every = every.reshape(3, 4096, 4096)
    got = grayscale(every.unsqueeze(0).to(device), 1)[0].cpu()
    assert torch.equal(got, bytes_of(pil(every).convert("L")))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.nightly
def test_autocontrast_of_every_pair_of_levels(device: str) -> None:
    # All tables that there are: each lowest with each highest level, and all levels between.
    images = torch.zeros(256, 1, 256, 256, dtype=torch.uint8)
    levels = torch.arange(256)
    for low in range(256):
        images[low, 0] = torch.maximum(torch.minimum(levels, levels[:, None]), torch.tensor(low))
    rows = images.permute(0, 2, 1, 3).reshape(-1, 1, 1, 256)
    got = kernel_for(Autocontrast())(rows.to(device), {})  # type: ignore[misc]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:4000]
    assert_images(got[chosen], by_torchvision(Autocontrast(), rows[chosen], {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", [16, 17, 23, 64])
def test_equalize_where_few_pixels_make_coarse_steps(device: str, side: int) -> None:
    # Counts near multiples of 255 are where the table overflows a byte or is left alone.
    images = torch.stack([pixels(kind, 3, side, side, seed) for kind in KINDS for seed in range(8)])
    images[:, 0, 0] = 255
    check(Equalize(), images, {}, device)


@pytest.mark.parametrize("device", DEVICES)
def test_posterize_and_solarize(device: str) -> None:
    images = batch(12, "noise", 3, 9, 11)
    check(Posterize(), images, {"bits": [1, 2, 3, 4, 5, 6, 7, 8, 8, 4, 1, 2]}, device)
    thresholds = [0, 1, 127.5, 128, 254.99, 255, 255.5, 256, 300.0, -3, 0.001, 64]
    check(Solarize(), images, {"threshold": thresholds}, device)
    shares = np.linspace(-0.1, 1.1, 12)
    check(Solarize(share=True), images, {"threshold": shares}, device)


def test_bits_out_of_range_are_refused_as_pillow_does() -> None:
    kernel = kernel_for(Posterize())
    assert kernel is not None
    with pytest.raises(ValueError, match="bits must be between or equal to 1 and 8"):
        kernel(batch(2, "noise", 1, 3, 3), {"bits": np.array([4, 0])})


@pytest.mark.parametrize("device", DEVICES)
def test_channels_in_another_order(device: str) -> None:
    images = batch(4, "noise", 3, 5, 6)
    orders = np.array([[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]])
    check(PermuteChannels(), images, {"permutation": orders}, device)
    wider = np.concatenate([orders, np.full((4, 1), -1)], 1)
    check(PermuteChannels(), images, {"permutation": wider}, device)


@pytest.mark.parametrize("device", DEVICES)
@given(images=BATCHES, data=st.data())
@settings(max_examples=80, deadline=None)
def test_crops(device: str, images: torch.Tensor, data: Any) -> None:
    height, width = images.shape[-2:]
    start = {
        "top": st.integers(-height - 2, height + 2),
        "left": st.integers(-width - 2, width + 2),
    }
    size = {"height": st.integers(1, 2 * height), "width": st.integers(1, 2 * width)}
    alike = data.draw(st.booleans())
    numbers = {}
    for name, values in {**start, **size}.items():
        drawn = [data.draw(values) for _ in images]
        numbers[name] = drawn[:1] * len(images) if alike and name in size else drawn
    got = check(Crop(), images, numbers, device)
    assert isinstance(got, torch.Tensor) or len({image.shape for image in got}) > 1


def test_a_crop_that_is_the_same_for_all_is_a_view() -> None:
    images = batch(3, "noise", 3, 9, 9)
    numbers = {"top": [1] * 3, "left": [2] * 3, "height": [4] * 3, "width": [5] * 3}
    got = check(Crop(), images, numbers)
    assert got.untyped_storage().data_ptr() == images.untyped_storage().data_ptr()


MODES = ["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@given(images=BATCHES, data=st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.thinned(4)
def test_resize(device: str, mode: str, images: torch.Tensor, data: Any) -> None:
    sides = st.one_of(st.integers(1, 5), st.integers(1, 90))
    numbers = {name: [data.draw(sides) for _ in images] for name in ("height", "width")}
    check(Resize(mode), images, numbers, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.thinned(3)
def test_resize_of_many_sizes_to_one(device: str, mode: str) -> None:
    sizes = [(300, 200), (224, 224), (37, 411), (1, 9), (64, 64), (500, 31), (224, 90), (700, 2)]
    images = [pixels("photo", 3, *size) for size in sizes]
    got = check(Resize(mode), images, {"height": [224] * 8, "width": [224] * 8}, device)
    assert got.shape == (8, 3, 224, 224)
    check(Resize(mode), images, {"height": [33] * 8, "width": [57] * 8}, device)


@pytest.mark.parametrize("mode", ["bilinear", "lanczos"])
def test_resize_of_very_long_images(mode: str) -> None:
    # So many pixels to one that a digit of nine bits would not do.
    images = [pixels("noise", 1, 3, 5000), pixels("extremes", 1, 4000, 2)]
    check(Resize(mode), images, {"height": [3, 2], "width": [2, 2]})


@pytest.mark.parametrize("mode", ["box", "bilinear", "hamming", "bicubic", "lanczos"])
@pytest.mark.parametrize("sizes", [(9, 224), (500, 224), (5000, 300), (9000, 7), (20000, 1)])
def test_resize_sums_whole_numbers_that_no_device_rounds(mode: str, sizes: tuple[int, int]) -> None:
    # float32 holds them below 2**24 in any order of adding; bfloat16 holds each factor.
    before, after = (np.array([size]) for size in sizes)
    weights = _weights(before, after, mode, torch.device("cpu"))
    matrix = weights.matrix.reshape(*before, weights.digits, *after)
    assert torch.equal(matrix, matrix.to(torch.bfloat16).float())
    assert (matrix.abs().sum(0) * 255 <= 1 << 24).all()
    total = sum(matrix[:, d].double() * 2.0 ** (weights.bits * d) for d in range(weights.digits))
    # Together they are Pillow's numbers of 22 bits, whose sum is 1 up to their roundings.
    assert ((total.sum(0) / (1 << 22) - 1).abs() < 1e-6 * before[0]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_resize_in_any_memory_order(device: str) -> None:
    images = batch(3, "photo", 3, 50, 60).to(memory_format=torch.channels_last)
    check(Resize("bicubic"), images, {"height": [20] * 3, "width": [70] * 3}, device)
    views = [image[:, 3:40, 5:33] for image in images]
    check(Resize("bicubic"), views, {"height": [20] * 3, "width": [70] * 3}, device)


SIDE = 80
STEPS = steps(3, SIDE)


def test_the_list_of_steps_has_every_kernel() -> None:
    listed = {type(primitive) for primitive, _ in STEPS.values()}
    assert listed == {primitive for row in TABLE for primitive in row.primitives}


@pytest.mark.parametrize("name", [name for name in STEPS if "blur" not in name])
@pytest.mark.covering
def test_any_memory_order_and_any_number_of_images(name: str) -> None:
    primitive, numbers = STEPS[name]
    images = batch(3, "photo", 3, SIDE, SIDE)
    check(primitive, images.to(memory_format=torch.channels_last), numbers)
    check(primitive, batch(3, "photo", 3, 2 * SIDE, 3 * SIDE).flip(0)[:, :, ::2, 1::3], numbers)
    # More than is worked on at a time.
    many = {name: values[np.arange(30) % 3] for name, values in numbers.items()}
    check(primitive, batch(30, "photo", 3, SIDE, SIDE), many)
    kernel = kernel_for(primitive)
    assert kernel is not None
    none = {name: values[:0] for name, values in numbers.items()}
    assert kernel(images[:0], none).shape == (0, 3, SIDE, SIDE)  # type: ignore[union-attr]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("module", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AugMix", {}),
        ("AugMix", {"severity": 10, "chain_depth": 2, "mixture_width": 4, "all_ops": False}),
        ("AugMix", {"interpolation": InterpolationMode.NEAREST, "fill": [3, 200, 9]}),
        ("ElasticTransform", {"sigma": 2.0}),
        ("ElasticTransform", {"sigma": [1.0, 3.0], "alpha": [90.0, 20.0], "fill": 7}),
        ("ElasticTransform", {"interpolation": InterpolationMode.NEAREST, "sigma": 1.0}),
    ],
)
@pytest.mark.covering
def test_what_torchvision_does_by_tensors(
    name: str, options: dict[str, Any], module: Any, channels: int
) -> None:
    if channels == 1 and options.get("fill") == [3, 200, 9]:
        options = {**options, "fill": 9}
    check_drawn(getattr(module, name)(**options), batch(12, "photo", channels, 40, 61))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_mean_of_an_image_is_summed_as_if_it_were_alone() -> None:
    # Threads share the sum of one image, whose last bit then is another than beside others.
    images = torch.rand(4, 3, 300, 300, generator=torch.Generator().manual_seed(3))
    primitive = auto.AugMixed(("Contrast",), (Contrast(),))
    numbers = {
        "original": np.full(4, 0.5, np.float32),
        "weights": np.full((4, 1), 0.5, np.float32),
        "operations": np.zeros((4, 1, 1), np.int64),
        "levels": np.full((4, 1, 1), 0.3),
    }
    action = Action(primitive, numbers)
    got = run([action], images, "floats")
    for sample, image in enumerate(images):
        assert torch.equal(got[sample], action.apply(sample, image))


def check_drawn(transform: Any, images: torch.Tensor) -> None:
    """Assert that the kernel of ``transform`` gives torchvision's bytes, for all and for some."""
    count, channels, height, width = images.shape
    drawn, _ = chain_of(transform).draw(
        seeds_of(count), [height] * count, [width] * count, channels
    )
    ((action,),) = drawn
    check(action.primitive, images, dict(action.numbers))
    some = np.arange(count) % 3 > 0
    got = run([Action(action.primitive, action.numbers, some)], images)
    for sample, image in enumerate(images):
        assert torch.equal(got[sample], bytes_of(action.apply(sample, pil(image)))) == some[sample]
        assert torch.equal(got[sample], image) != some[sample]


@pytest.mark.parametrize(
    ("transform", "form"),
    [
        (v1.AugMix(), "bytes"),
        (v2.AugMix(), "bytes"),
        (v2.AugMix(), "floats"),
        (v1.ElasticTransform(sigma=2.0), "floats"),
        (v2.ElasticTransform(sigma=2.0), "bytes"),
    ],
)
def test_the_same_of_tensors(transform: Any, form: Any) -> None:
    images = batch(8, "photo", 3, 40, 50)
    images = images if form == "bytes" else images.float().div_(255)
    drawn, _ = chain_of(transform).draw(seeds_of(8), [40] * 8, [50] * 8, 3, True)
    ((action,),) = drawn
    got = run([action], images, form)
    assert isinstance(got, torch.Tensor)
    assert got.dtype is images.dtype
    for sample, image in enumerate(images):
        assert torch.equal(got[sample], action.apply(sample, image))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("size", [(3, 3), (5, 9), (23, 23)])
def test_blur_is_at_most_one_level_off(device: str, v2: bool, size: tuple[int, int]) -> None:
    primitive = GaussianBlur(*size, v2=v2)
    kernel = kernel_for(primitive)
    assert kernel is not None
    assert "1 level" in kernel.exact
    for channels in (1, 3):
        for kind in KINDS:
            images = batch(4, kind, channels, 40, 31)
            numbers = {"sigma": np.array([0.1, 0.7, 2.0, 30.0])}
            got = kernel(images.to(device), numbers)
            for one, other in zip(got, by_torchvision(primitive, images, numbers), strict=True):
                off = (one.cpu().int() - other.int()).abs()
                assert off.max() <= 1
                assert off.float().mean() < 0.002


def test_every_primitive_is_in_the_table_or_has_no_kernel() -> None:
    rows = {name: row for row in TABLE for name in row.names}
    assert len(rows) == sum(len(row.primitives) for row in TABLE)
    given = {"GaussianBlur": (3, 3), "Shear": ("x",), "Shift": ("y",), "AugMixed": ((), ())}
    given["Elastic"] = ((1.0, 1.0), (1.0, 1.0))
    known = [
        value
        for module in (auto, colour, elastic, erasing, geometry, turns)
        for name, value in vars(module).items()
        if name in module.__all__ and isinstance(value, type) and issubclass(value, Primitive)
    ]
    assert set(rows) <= {kind.__name__ for kind in known}
    for kind in known:
        primitive = kind(*given.get(kind.__name__, ()))
        kernel = kernel_for(primitive)
        assert (kernel is None) == (kind.__name__ == "Jpeg")
        assert (kernel is None) == (kind.__name__ not in rows)
        if kernel is not None:
            assert (kernel.name, kernel.exact) == (kind.__name__, rows[kind.__name__].exact)


def test_which_kernels_are_light_on_the_cpu() -> None:
    for light in (Hue(), Equalize(), Crop(), GaussianBlur(3, 3), geometry.Pad(mode="edge")):
        kernel = kernel_for(light)
        assert kernel is not None
        assert kernel.light
    for heavy in (Resize(), turns.Rotate(), auto.Shear("y"), auto.AugMixed((), ())):
        kernel = kernel_for(heavy)
        assert kernel is not None
        assert not kernel.light


def test_what_pillow_cannot_interpolate_has_no_kernel() -> None:
    assert kernel_for(turns.Rotate("lanczos")) is None
    assert kernel_for(Resize("lanczos")) is not None


def test_primitives_of_other_makers_have_no_kernel() -> None:
    class Brightness(Primitive):
        def apply(self, value: Any, **numbers: Any) -> Any:
            return value

    assert kernel_for(Brightness()) is None


def test_other_types_and_channels_are_refused() -> None:
    for wrong in (torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, 4, dtype=torch.uint8)):
        with pytest.raises(TypeError, match="Invert computes what Pillow does to bytes"):
            run([Action(Invert())], wrong)
    floats = torch.rand(2, 5, 4, 4)
    assert torch.equal(run([Action(HorizontalFlip())], floats), floats.flip(-1))


class TestRun:
    def actions(self, count: int, seed: int = 0) -> list[Action]:
        """Crop, resize, flip, jitter in any order, grey for some: as a chain would draw them."""
        generator = np.random.default_rng(seed)
        where = generator.random((8, count)) < 0.6
        sides = {
            "top": generator.integers(0, 5, count),
            "left": generator.integers(0, 5, count),
            "height": generator.integers(3, 30, count),
            "width": generator.integers(3, 30, count),
        }
        factor = {"factor": generator.uniform(0.4, 1.6, count)}
        return [
            Action(Crop(), sides),
            Action(Resize(), {"height": np.full(count, 24), "width": np.full(count, 20)}),
            Action(HorizontalFlip(), {}, where[0]),
            Action(Brightness(), factor, where[1]),
            Action(Hue(), {"factor": generator.uniform(-0.1, 0.1, count)}, ~where[1]),
            Action(Contrast(), factor, where[2] & False),
            Action(Saturation(), factor, where[2] | True),
            Action(Grayscale(3), {}, where[3]),
            Action(VerticalFlip()),
        ]

    def expected(self, actions: list[Action], images: Any) -> list[torch.Tensor]:
        found = []
        for sample, image in enumerate(images):
            value: Any = pil(image)
            for action in actions:
                value = action.apply(sample, value)
            found.append(bytes_of(value))
        return found

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("count", [1, 2, 9])
    def test_a_chain_on_images_of_one_size_and_of_many(self, device: str, count: int) -> None:
        for seed in range(5):
            actions = self.actions(count, seed)
            images = batch(count, "photo", 3, 40, 36, seed)
            before = images.clone()
            got = run(actions, images.to(device))
            assert isinstance(got, torch.Tensor)
            assert_images(got, self.expected(actions, images))
            assert torch.equal(images, before)
            sizes = [(40 + sample % 3, 36 + sample % 2) for sample in range(count)]
            odd = [pixels("photo", 3, *size, seed) for size in sizes]
            kept = [image.clone() for image in odd]
            got = run(actions, [image.to(device) for image in odd])
            assert isinstance(got, torch.Tensor)
            assert_images(got, self.expected(actions, odd))
            assert all(torch.equal(*pair) for pair in zip(odd, kept, strict=True))

    def test_what_nobody_takes_costs_nothing(self) -> None:
        images = batch(3, "photo", 3, 9, 9)
        none = np.zeros(3, np.bool_)
        assert run([Action(Hue(), {"factor": np.zeros(3)}, none)], images) is images
        assert run([], images) is images

    def test_what_was_given_is_never_written_into(self) -> None:
        # A view, then a step that some take: the view's memory is the caller's.
        images = batch(4, "photo", 3, 9, 9)
        before = images.clone()
        some = np.array([True, False, True, False])
        window = {name: np.full(4, 4) for name in Crop.numbers}
        actions = [Action(Crop(), window), Action(Invert(), {}, some)]
        got = run(actions, images)
        assert torch.equal(images, before)
        assert_images(got, self.expected(actions, images))
        views = [image[:, 1:8] for image in images]
        actions = [Action(Invert(), {}, some), Action(Brightness(), {"factor": np.ones(4)}, ~some)]
        assert_images(run(actions, views), self.expected(actions, views))
        assert torch.equal(images, before)

    def test_sizes_may_part_and_meet_again(self) -> None:
        images = batch(4, "photo", 3, 12, 15)
        some = np.array([True, False, True, False])
        size = {"height": np.array([5, 6, 7, 8]), "width": np.array([3, 3, 9, 9])}
        parted = [Action(Resize(), size, some), Action(HorizontalFlip(), {}, ~some)]
        got = run(parted, images)
        assert isinstance(got, list)
        assert_images(got, self.expected(parted, images))
        meet = {"height": np.full(4, 10), "width": np.full(4, 11)}
        actions = [*parted, Action(Grayscale(1), {}, some), Action(Resize("bicubic"), meet)]
        # Images of one and of three channels are never one tensor.
        got = run(actions, images)
        assert isinstance(got, list)
        assert_images(got, self.expected(actions, images))

    def test_empty_batches(self) -> None:
        empty = torch.zeros(0, 3, 9, 9, dtype=torch.uint8)
        actions = [Action(Hue(), {"factor": np.zeros(0)}), Action(HorizontalFlip())]
        assert run(actions, empty).shape == (0, 3, 9, 9)  # type: ignore[union-attr]
        assert run(actions, []) == []

    def test_a_step_without_a_kernel_is_named(self) -> None:
        action = Action(Jpeg(), {"quality": np.array([50])})
        with pytest.raises(TypeError, match=r"Jpeg: no kernel computes it.*kernel_for.*applied"):
            run([action], batch(1, "photo", 3, 9, 9))

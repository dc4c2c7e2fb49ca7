"""A cache keeps what a sample was when it was read, whatever the dataset does with its memory."""

import io
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import Compose, Resize
from torchvision.transforms.functional import pil_to_tensor

from dataloaders.cache import precompute
from dataloaders.errors import CacheError
from helpers.cached import Point
from helpers.numbered import Made

SIZE = 60  # more than are looked at at once, and in several shapes of buffers
DTYPES = {
    "u1": torch.uint8, "i2": torch.int16, "f4": torch.float32, "f8": torch.float64,
    "c8": torch.complex64, ">i4": torch.int32,  # torch has only the machine's byte order
}  # fmt: skip


def ring(form, dtype, shape, buffers):
    """Sample ``i`` is filled with ``i`` modulo 251, in the next of a few buffers used in turn."""
    # One column more than a sample has: the sample is a view, and no buffer is contiguous.
    arrays = [np.zeros((*shape, 2), dtype) for _ in range(buffers)]
    tensors = [torch.zeros((*shape, 2), dtype=DTYPES[dtype]) for _ in range(buffers)]
    turns = [0]

    def sample(index):
        turns[0] += 1
        array, tensor = arrays[turns[0] % buffers], tensors[turns[0] % buffers]
        array[...] = index % 251
        tensor.fill_(index % 251)
        return {
            "array": array,
            "tensor": tensor,
            "views": (array[..., 0], tensor[..., 1], index),
            "one memory": {
                "array": tensor.numpy(),
                "tensor": tensor,
                "bytes": bytearray(array[:1]),
            },
            "nested": {"label": index, "pair": Point([array, None], {"deep": (tensor, tensor.mT)})},
        }[form]

    return sample


def values_in(sample):
    """All arrays and tensors in ``sample``, as flat arrays."""
    if isinstance(sample, dict):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        return [values for part in sample for values in values_in(part)]
    if isinstance(sample, (np.ndarray, torch.Tensor)):
        return [np.asarray(sample).reshape(-1)]
    return []


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    form=st.sampled_from(["array", "tensor", "views", "one memory", "nested"]),
    dtype=st.sampled_from(sorted(DTYPES)),
    shape=st.one_of(
        st.tuples(st.integers(1, 128)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.integers(1, 3), st.integers(64, 128), st.integers(64, 128)),
    ),
    buffers=st.integers(1, 300),
    num_workers=st.sampled_from([0, 0, 0, 0, 0, 2]),
)
@example(form="array", dtype="f4", shape=(64,), buffers=32, num_workers=0)
@example(form="tensor", dtype="f4", shape=(64,), buffers=64, num_workers=2)
@example(form="views", dtype="u1", shape=(2,), buffers=300, num_workers=2)
@example(form="nested", dtype="f8", shape=(3, 80, 80), buffers=12, num_workers=2)
@pytest.mark.nightly
def test_buffers_used_in_turn(form, dtype, shape, buffers, num_workers):
    size = int(np.prod(shape)) * 2 * np.dtype(dtype).itemsize
    buffers = max(1, min(buffers, (8 << 20) // size))
    samples = max(4, min(2 * buffers + 3, (16 << 20) // size))
    dataset = Made(ring(form, dtype, shape, buffers), samples)
    with TemporaryDirectory() as folder:
        cached = precompute(dataset, f"{folder}/a.h5", num_workers=num_workers)
        for index, sample in enumerate(cached):
            parts = values_in(sample)
            assert parts
            assert all((values == index % 251).all() for values in parts), index
            if form == "one memory" and dtype == "u1":
                assert set(sample["bytes"]) == {index % 251}


def picture(index, mode="RGB"):
    image = Image.new("RGB", (12, 10), (index % 256, index // 256, 7))
    image.putpixel((index % 12, 3), (255, 255, 255))
    return image.quantize(8) if mode == "P" else image.convert(mode)


def one_canvas():
    """One and the same image of each mode, drawn anew for each sample."""
    canvases = {mode: picture(0, mode) for mode in ("RGB", "L", "1", "I", "F", "LA")}

    def sample(index):
        for mode, canvas in canvases.items():
            canvas.paste(picture(index, mode))
        return {"image": canvases, "label": index}

    return sample


def one_palette():
    """The indices and the palette of one image are replaced."""
    canvas = picture(0, "P")

    def sample(index):
        new = picture(index, "P")
        canvas.putdata(list(new.tobytes()))
        canvas.putpalette(new.getpalette())
        return {"image": {"P": canvas}, "label": index}

    return sample


def one_file():
    """Images that are not decoded yet, of a file in memory that is written anew for each."""
    file = io.BytesIO()

    def sample(index):
        file.seek(0)
        file.truncate()
        picture(index).save(file, "PNG")
        file.seek(0)
        return {"image": {"RGB": Image.open(file)}, "label": index}

    return sample


def one_list():
    """One list, one dict in it, one bytearray and one array."""
    words, data, single = ["", 0, {}], bytearray(8), np.zeros((), np.int16)

    def sample(index):
        words[:2] = [f"sample {index}", index]
        words[2]["n"] = index
        data[:] = index.to_bytes(8, "big")
        single[...] = index
        return {"words": words, "data": data, "single": single, "label": index}

    return sample


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "images"),
    [
        (one_canvas, None),
        (one_canvas, {"image/RGB": "png", "image/L": "png"}),
        (one_palette, "png"),
        (one_file, None),
        (one_file, "png"),
        (one_list, None),
        (lambda: ring("one memory", "u1", (3, 4), 2), None),
    ],
)
@pytest.mark.covering
def test_what_is_changed_in_place_for_the_next_sample(make, images, num_workers, tmp_path):
    dataset = Made(make(), SIZE)
    cached = precompute(dataset, tmp_path / "a.h5", images=images, num_workers=num_workers)
    for index, sample in enumerate(cached):
        assert sample.get("label", index) == index
        for mode, image in sample.get("image", {}).items():
            expected = picture(index, mode)
            assert image.mode == mode
            assert image.tobytes() == expected.tobytes()
            assert image.getpalette() == expected.getpalette()
        if "words" in sample:
            assert sample["words"] == [f"sample {index}", index, {"n": index}]
            assert sample["data"] == index.to_bytes(8, "big")
            assert sample["single"] == index
        if "tensor" in sample:
            assert all((values == index).all() for values in values_in(sample))
            assert set(sample["bytes"]) == {index}


class Adds:
    """A transform whose results all have the same memory."""

    def __init__(self):
        self.number = 0
        self.result = torch.zeros(3, 5, 6)

    def __call__(self, image):
        return torch.add(pil_to_tensor(image).float(), self.number, out=self.result)


class SetsNumber(Made):
    """The transform adds what the dataset sets: it cannot run live."""

    def __init__(self):
        super().__init__(None, SIZE)
        self.adds = Adds()
        self.transform = Compose([Resize((5, 6)), self.adds])

    def __getitem__(self, index):
        self.adds.number = index
        try:
            return self.transform(picture(index))
        finally:
            self.adds.number = 0


def test_a_transform_whose_results_share_memory_is_compared_with_what_it_gave(tmp_path):
    dataset = SetsNumber()
    cached = precompute(dataset, tmp_path / "a.h5", num_workers=0)
    assert cached.index.tail == ()
    for index in (0, 1, 47, SIZE - 1):
        assert torch.equal(cached[index], dataset[index])


def test_the_first_sample_that_is_wrong_is_the_one_that_is_told(tmp_path):
    """One sample cannot be kept, and a later one cannot be read."""
    dataset = Made(lambda index: object() if index == 201 else index, 400)
    dataset.failing = frozenset([203])
    with pytest.raises(CacheError, match="sample 201 cannot be kept"):
        precompute(dataset, tmp_path / "a.h5", num_workers=0)
    cached = precompute(dataset, tmp_path / "a.h5", num_workers=0, on_error="skip")
    assert [index for index, _ in cached.failed] == [201, 203]
    assert [cached[row] for row in range(200, 203)] == [200, 202, 204]

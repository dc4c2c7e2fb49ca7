"""A cache keeps what a sample was when it was read, whatever the dataset does with its memory."""

from __future__ import annotations

import io
from collections import namedtuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import Compose, Resize
from torchvision.transforms.functional import pil_to_tensor

from dataloaders.cache import precompute
from dataloaders.errors import CacheError

SIZE = 400

Pair = namedtuple("Pair", "first second")

DTYPES = {
    "u1": torch.uint8,
    "i2": torch.int16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    ">i4": torch.int32,  # torch has only the machine's byte order
}


class Ring(Dataset[Any]):
    """Sample ``i`` is filled with ``i`` modulo 251, in the next of a few buffers used in turn."""

    def __init__(self, form: str, dtype: str, shape: tuple[int, ...], buffers: int, size: int):
        self.form, self.dtype, self.size, self.at = form, dtype, size, 0
        # One column more than a sample has: the sample is a view, and no buffer is contiguous.
        self.buffers = [np.zeros((*shape, 2), dtype) for _ in range(buffers)]
        self.tensors = [torch.zeros((*shape, 2), dtype=DTYPES[dtype]) for _ in range(buffers)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.at = (self.at + 1) % len(self.buffers)
        array, tensor = self.buffers[self.at], self.tensors[self.at]
        array[...] = index % 251
        tensor.fill_(index % 251)
        if self.form == "array":
            return array
        if self.form == "tensor":
            return tensor
        if self.form == "views":
            return array[..., 0], tensor[..., 1], index
        if self.form == "one memory":
            return {"array": tensor.numpy(), "tensor": tensor, "bytes": bytearray(array[:1])}
        return {"label": index, "pair": Pair([array, None], {"deep": (tensor, tensor.mT)})}


def values_in(sample: Any) -> list[Any]:
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
def test_buffers_used_in_turn(
    form: str, dtype: str, shape: tuple[int, ...], buffers: int, num_workers: int
) -> None:
    size = int(np.prod(shape)) * 2 * np.dtype(dtype).itemsize
    buffers = max(1, min(buffers, (8 << 20) // size))
    samples = max(4, min(2 * buffers + 3, (16 << 20) // size))
    dataset = Ring(form, dtype, shape, buffers, samples)
    with TemporaryDirectory() as folder:
        cached = precompute(dataset, Path(folder) / "a.h5", num_workers=num_workers)
        for index in range(samples):
            sample = cached[index]
            parts = values_in(sample)
            assert parts
            assert all((values == index % 251).all() for values in parts), index
            if form == "one memory" and dtype == "u1":
                assert set(sample["bytes"]) == {index % 251}


class Reused(Dataset[Any]):
    """Samples made of something that is changed for the next one."""

    def __len__(self) -> int:
        return SIZE


def picture(index: int, mode: str = "RGB") -> Image.Image:
    image = Image.new("RGB", (12, 10), (index % 256, index // 256, 7))
    image.putpixel((index % 12, 3), (255, 255, 255))
    return image.quantize(8) if mode == "P" else image.convert(mode)


class OneCanvas(Reused):
    """One and the same image of each mode, drawn anew for each sample."""

    def __init__(self) -> None:
        self.canvases = {mode: picture(0, mode) for mode in ("RGB", "L", "1", "I", "F", "LA")}

    def __getitem__(self, index: int) -> Any:
        for mode, canvas in self.canvases.items():
            canvas.paste(picture(index, mode))
        return {"image": self.canvases, "label": index}


class OnePalette(Reused):
    """The indices and the palette of one image are replaced."""

    def __init__(self) -> None:
        self.canvas = picture(0, "P")

    def __getitem__(self, index: int) -> Any:
        new = picture(index, "P")
        self.canvas.putdata(list(new.tobytes()))
        self.canvas.putpalette(new.getpalette())
        return {"image": {"P": self.canvas}, "label": index}


class OneFile(Reused):
    """Images that are not decoded yet, of a file in memory that is written anew for each."""

    def __init__(self) -> None:
        self.file = io.BytesIO()

    def __getitem__(self, index: int) -> Any:
        self.file.seek(0)
        self.file.truncate()
        picture(index).save(self.file, "PNG")
        self.file.seek(0)
        return {"image": {"RGB": Image.open(self.file)}, "label": index}


class OneList(Reused):
    """One list, one dict in it and one bytearray."""

    def __init__(self) -> None:
        self.words: list[Any] = ["", 0, {}]
        self.data = bytearray(8)
        self.single = np.zeros((), np.int16)

    def __getitem__(self, index: int) -> Any:
        self.words[:2] = [f"sample {index}", index]
        self.words[2]["n"] = index
        self.data[:] = index.to_bytes(8, "big")
        self.single[...] = index
        return {"words": self.words, "data": self.data, "single": self.single, "label": index}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "images"),
    [
        (OneCanvas, None),
        (OneCanvas, {"image/RGB": "png", "image/L": "png"}),
        (OnePalette, "png"),
        (OneFile, None),
        (OneFile, "png"),
        (OneList, None),
    ],
)
@pytest.mark.thinned(4)
def test_what_is_changed_in_place_for_the_next_sample(
    kind: type[Reused], images: Any, num_workers: int, tmp_path: Path
) -> None:
    cached = precompute(kind(), tmp_path / "a.h5", images=images, num_workers=num_workers)
    for index in range(SIZE):
        sample = cached[index]
        assert sample["label"] == index
        for mode, image in sample.get("image", {}).items():
            expected = picture(index, mode)
            assert image.mode == mode
            assert image.tobytes() == expected.tobytes()
            assert image.getpalette() == expected.getpalette()
        if kind is OneList:
            assert sample["words"] == [f"sample {index}", index, {"n": index}]
            assert sample["data"] == index.to_bytes(8, "big")
            assert sample["single"] == index


class Adds:
    """A transform whose results all have the same memory."""

    def __init__(self) -> None:
        self.number = 0
        self.result = torch.zeros(3, 5, 6)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        return torch.add(pil_to_tensor(image).float(), self.number, out=self.result)


class SetsNumber(Reused):
    """The transform adds what the dataset sets: it cannot run live."""

    def __init__(self) -> None:
        self.adds = Adds()
        self.transform = Compose([Resize((5, 6)), self.adds])

    def __getitem__(self, index: int) -> Any:
        self.adds.number = index
        try:
            return self.transform(picture(index))
        finally:
            self.adds.number = 0


def test_a_transform_whose_results_share_memory_is_compared_with_what_it_gave(
    tmp_path: Path,
) -> None:
    dataset = SetsNumber()
    cached = precompute(dataset, tmp_path / "a.h5", num_workers=0)
    assert cached.index.tail == ()
    for index in (0, 1, 77, SIZE - 1):
        assert torch.equal(cached[index], dataset[index])


class Kinds(Reused):
    """One sample cannot be kept, and a later one cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 203:
            raise ValueError("unreadable")
        return object() if index == 201 else index


def test_the_first_sample_that_is_wrong_is_the_one_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="sample 201 cannot be kept"):
        precompute(Kinds(), tmp_path / "a.h5", num_workers=0)
    cached = precompute(Kinds(), tmp_path / "a.h5", num_workers=0, on_error="skip")
    assert [index for index, _ in cached.failed] == [201, 203]
    assert [cached[row] for row in range(200, 203)] == [200, 202, 204]

"""Normalisation after the copy, as a loader has it; test_device_tail tests what may move."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.data

from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable
from helpers.compare import assert_same, seed_everything

transforms = pytest.importorskip("torchvision.transforms")
datasets = pytest.importorskip("torchvision.datasets")
Image = pytest.importorskip("PIL.Image")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("images")
    draws = np.random.default_rng(0)
    for number in range(12):
        kind = root / f"class{number % 2}"
        kind.mkdir(exist_ok=True)
        pixels = draws.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(kind / f"{number}.png")
    return root


def images(folder: Path, *last: Any) -> Any:
    steps = [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip()]
    tail = last or (transforms.ToTensor(), transforms.Normalize(MEAN, STD))
    return datasets.ImageFolder(str(folder), transforms.Compose([*steps, *tail]))


def epochs(loader: Any, count: int = 2) -> list[Any]:
    seed_everything()
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_batches_are_the_datasets_own_to_the_bit(folder: Path, workers: dict[str, Any]) -> None:
    dataset = images(folder)
    arguments = {"dataset": dataset, "batch_size": 4, "shuffle": True, **workers}
    ours = DataLoader(backend=Prefetch(tail=True), **arguments)
    assert "normalise" in str(ours.explain())
    theirs = torch.utils.data.DataLoader(**arguments)
    assert_same(epochs(ours), epochs(theirs))
    if not workers:  # a transform that changes between epochs is followed
        dataset.transform.transforms[-1] = transforms.Normalize((0.5,) * 3, (0.25,) * 3)
        assert_same(epochs(ours, 1), epochs(theirs, 1))


class Watching(Prefetch):
    """Notes the dtype of the first image of each batch that is sent."""

    seen: ClassVar[list[torch.dtype]] = []

    def transfer(self, device: Any) -> Any:
        transfer = super().transfer(device)
        send = transfer.send
        transfer.send = lambda batch: (self.seen.append(batch[0][0].dtype), send(batch))[1]
        return transfer


def test_workers_send_bytes(folder: Path) -> None:
    Watching.seen.clear()
    loader = DataLoader(images(folder), 4, num_workers=1, backend=Watching(tail=True))
    plan = DataLoader(images(folder), 4, backend=Prefetch(device="cpu")).explain()
    assert plan.stages[-1].name == "transfer", "nothing moves to the CPU unless asked"
    assert {batch[0].dtype for batch in loader} == {torch.float32}
    assert set(Watching.seen) == {torch.uint8}


def test_other_dtypes_and_layouts(folder: Path) -> None:
    options = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    ours = epochs(DataLoader(images(folder), 4, backend=Prefetch(**options)), 1)[0]
    theirs = epochs(torch.utils.data.DataLoader(images(folder), 4), 1)[0]
    for (image, label), (wanted, label_wanted) in zip(ours, theirs, strict=True):
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert_same([image.contiguous(), label], [wanted.to(torch.bfloat16), label_wanted])


def test_a_chain_that_does_not_end_in_bytes_stays_and_says_why(folder: Path) -> None:
    dataset = images(folder, transforms.ToTensor(), transforms.Lambda(torch.sqrt))
    loader = DataLoader(dataset, 4, backend=Prefetch(tail=True))
    text = str(loader.explain())
    assert "images are normalised before the copy" in text
    assert "works on the floats: Tensor.sqrt" in text
    assert_same(epochs(loader, 1), epochs(torch.utils.data.DataLoader(dataset, 4), 1))
    with pytest.raises(BackendUnavailable, match=r"dtype= or memory_format=.*sqrt"):
        next(iter(DataLoader(dataset, 4, backend=Prefetch(dtype=torch.float16))))


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_the_gpu_they_are_the_datasets_own_to_the_bit(folder: Path, num_workers: int) -> None:
    arguments = {"dataset": images(folder), "batch_size": 4, "num_workers": num_workers}
    ours = DataLoader(backend=Prefetch(), **arguments)
    assert "normalise" in str(ours.explain())
    seed_everything()
    got = [(image.cpu(), label.cpu()) for image, label in ours]
    theirs = epochs(torch.utils.data.DataLoader(**arguments), 1)[0]
    assert_same(got, [tuple(batch) for batch in theirs])


def test_h5_leaves_its_tail_too(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    from backends.h5 import H5

    steps = [transforms.Resize(20), transforms.RandomCrop(16), transforms.ToTensor()]
    chain = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 1}
    dataset, inner = datasets.ImageFolder(str(folder), chain), H5(tmp_path / "small.h5")
    Watching.seen.clear()
    ours = DataLoader(dataset, 4, backend=Watching(inner=inner, tail=True), **options)
    assert_same(list(ours), list(DataLoader(dataset, 4, **options)))
    assert set(Watching.seen) == {torch.uint8}


def test_a_class_of_the_users_own_without_transforms(folder: Path) -> None:
    paths = sorted(folder.rglob("*.png"))

    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            image = Image.open(paths[index]).convert("RGB").resize((16, 16))
            image = transforms.functional.to_tensor(image)
            return {"image": transforms.functional.normalize(image, MEAN, STD), "index": index}

    loader = DataLoader(Own(), 4, num_workers=1, backend=Prefetch(tail=True))
    assert "2304 bytes a sample less" in str(loader.explain())
    assert_same(epochs(loader), epochs(torch.utils.data.DataLoader(Own(), 4)))

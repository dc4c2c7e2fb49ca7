"""Under backend="dali" an error is the dataset's own, at its batch, and the epoch goes on.

Errors of a sampler and of collation: the contract.
"""

import traceback
import warnings
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable, BackendWarning
from helpers.compare import assert_same
from helpers.pictures import folder, image_files, write_folder

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali

CHAIN = v1.Compose([v1.RandomResizedCrop(16), v1.RandomHorizontalFlip(), v1.ToTensor()])
WHOLE = v1.Compose([v1.Resize((12, 14)), v1.ToTensor()])


def outcomes(loader):
    """What each ``next()`` gave, an error as its type, the end of its text and how many errors it
    names that were being handled; and the errors.
    """
    found, errors = [], []
    batches = iter(loader)
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, errors
        except Exception as error:
            text = str(error).strip().rpartition(": ")[2]
            chain = "".join(traceback.format_exception(error)).count("another exception occurred")
            found.append((type(error).__name__, text, chain))
            errors.append(error)


def compared(dataset, **options):
    """The errors of two epochs on dali, whose batches and errors are stock's."""
    options = {"batch_size": 3, "seed": 1, **options}
    on_stock = DataLoader(dataset, **options)
    on_dali = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    errors = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        expected, _ = outcomes(on_stock)
        torch.manual_seed(epoch)
        got, raised = outcomes(on_dali)
        assert_same(got, expected)
        errors += raised
    return errors


# Files


def cut(path, end=None):
    path.write_bytes(path.read_bytes()[: end or path.stat().st_size // 2])


def wrong_inside(path):
    """A PNG file whose compressed pixels end in nonsense, under a checksum that is right."""
    data = path.read_bytes()
    place = data.index(b"IDAT") - 4
    length = int.from_bytes(data[place : place + 4], "big")
    pixels = data[place + 8 : place + 8 + length // 2] + b"\xff" * (length - length // 2)
    sealed = zlib.crc32(b"IDAT" + pixels).to_bytes(4, "big")
    path.write_bytes(data[: place + 8] + pixels + sealed + data[place + 12 + length :])


def damaged(folder, damages, kind=ImageFolder):
    """A dataset whose second, fourth, ... file is damaged in these ways."""
    data = kind(folder, CHAIN)
    for (path, _), damage in zip(data.samples[1::2], damages, strict=False):
        damage(Path(path))
    return data


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:dali could not make a batch")
def test_a_broken_file_is_the_datasets_error_and_the_epoch_goes_on(num_workers, tmp_path):
    """Also one that is broken inside its pixels, which are not looked at when it is recorded."""
    text = b"no image at all, but long enough to be looked at as one"
    ways = [Path.unlink, cut, *(partial(Path.write_bytes, data=data) for data in (text, b""))]
    headers = damaged(write_folder(tmp_path / "jpeg"), ways)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(compared(headers, batch_size=2, num_workers=num_workers)) == 8
    png = write_folder(tmp_path / "png", format="PNG")
    pixels = damaged(png, [wrong_inside, partial(cut, end=-2), cut])
    assert len(compared(pixels, batch_size=2, num_workers=num_workers, shuffle=True)) >= 2
    if num_workers == 0:  # a worker that goes on has drawn for the broken image
        assert len(compared(pixels, batch_size=2, seed=None)) >= 2
    caught = damaged(write_folder(tmp_path / "caught", format="PNG"), [cut, wrong_inside], Instead)
    assert compared(caught, num_workers=num_workers) == []


class Instead(ImageFolder):
    """Gives ``instead`` of an image that cannot be read, or the next one, as many datasets do."""

    instead = None

    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except Exception:
            return self.instead or super().__getitem__((index + 1) % len(self))


def test_several_batches_in_a_row_that_only_the_dataset_can_make(tmp_path):
    data = Instead(write_folder(tmp_path, format="PNG"), CHAIN)
    data.instead = torch.zeros(3, 16, 16), -1
    for path, _ in data.samples[4:7]:
        wrong_inside(Path(path))
    backend = Dali(dtype=torch.bfloat16)
    on_dali = iter(DataLoader(data, num_workers=1, backend=backend, device="cpu"))
    good = [next(on_dali) for _ in range(4)]
    with pytest.warns(BackendWarning, match="the dataset itself made it"):
        good += [next(on_dali) for _ in range(2)]
    with pytest.raises(BackendUnavailable, match="3 batches in a row"):
        next(on_dali)
    good += on_dali
    assert {images.dtype for images, _ in good} == {torch.bfloat16}
    assert [int(label) for _, label in good].count(-1) == 2


class Unknown:
    """A batch of a class of the user's own, as in torch's documentation."""

    def __init__(self, samples):
        self.images = torch.stack([image for image, _ in samples])
        self.apart = {"first": samples[0][0]}


class Attributes(dict):
    """A dict whose keys are attributes, as many write it."""

    __getattr__ = dict.get

    def __init__(self, samples):
        super().__init__(vars(Unknown(samples)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [Unknown, Attributes])
def test_a_batch_of_a_class_of_the_users_own(num_workers, collate_fn, tmp_path):
    """A thread of the worker sends it: an error there would be lost, and the loop wait for ever."""
    data = damaged(write_folder(tmp_path, format="PNG"), [wrong_inside])
    options = {"batch_size": 2, "num_workers": num_workers, "timeout": 60 * num_workers}
    assert len(compared(data, collate_fn=collate_fn, **options)) == 2
    batch = next(iter(DataLoader(data, 1, collate_fn=collate_fn, backend="dali", device="cpu")))
    assert type(batch.images) is torch.Tensor


class Opens(ImageFolder):
    """Its first sample leaves something open, as of a file of all images."""

    is_open = False

    def __getitem__(self, index):
        self.is_open = True
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_replayed_is_not_made_here(tmp_path):
    """Else workers that are forked later would share a file's offset, and read other samples."""
    data = damaged(write_folder(tmp_path, format="PNG"), [wrong_inside], Opens)
    assert len(compared(data, batch_size=2, num_workers=2)) == 2
    assert not data.is_open


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
def test_files_of_every_kind_through_a_loader(tmp_path):
    files = list(image_files().values())
    broken = [data[: len(data) * 2 // 3] for data in files]
    (tmp_path / "class").mkdir()
    for number, data in enumerate([*files, *broken, b"", b"no image" * 20]):
        (tmp_path / "class" / f"{number:03}.jpg").write_bytes(data)
    data = ImageFolder(tmp_path, lambda image: (CHAIN(image), WHOLE(image)))
    errors = compared(data, batch_size=1)
    assert len(broken) // 4 < len(errors) // 2 < len(broken) + 10
    assert len(compared(data, batch_size=16, shuffle=True)) > 2


# Code


SMALL = v1.Compose([v1.RandomCrop(22), v1.ToTensor()])
TWO_MEANS = v1.Compose([v1.ToTensor(), v1.Normalize([0.5] * 2, [0.5] * 2)])
ERRORS = {
    "too small for its crop": ((SMALL,), {}, ValueError),
    "other channels": ((TWO_MEANS,), {"collate_fn": list}, RuntimeError),
    "several sizes": ((v1.ToTensor(),), {"num_workers": 1}, RuntimeError),
    "target_transform": ((CHAIN, [5, 6].__getitem__), {}, IndexError),
    "an index": ((CHAIN,), {"sampler": [0, 1, 2, 3, 400, 5]}, IndexError),
}


@pytest.mark.parametrize(("transforms", "options", "error"), ERRORS.values(), ids=ERRORS)
def test_an_error_of_the_users_code_is_raised_at_its_batch(transforms, options, error):
    assert {type(raised) for raised in compared(folder(*transforms), **options)} == {error}

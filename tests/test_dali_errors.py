"""Under backend="dali" an error is the dataset's own, at its batch, and the epoch goes on."""

import itertools
import zlib
from pathlib import Path

import pytest
import torch
from torch.utils.data import Sampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from dataloaders import DataLoader
from helpers.compare import assert_same
from helpers.image_files import odd_files, plain_files
from helpers.photos import SIZE, folder, picture, write_folder

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import Dali

CHAIN = transforms.Compose(
    [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


WORKERS = pytest.mark.parametrize("num_workers", [0, 1])


def outcomes(loader):
    """What each ``next()`` gave, an error as its type and the end of its text; and the errors.

    A worker's text ends in that of the error itself.
    """
    found = []
    errors = []
    batches = iter(loader)
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, errors
        except Exception as error:
            found.append((type(error).__name__, str(error).strip().rpartition(": ")[2]))
            errors.append(error)


def compared(dataset, **options):
    """The errors of two epochs on dali, whose batches and errors are stock's."""
    options = {"batch_size": 3, "seed": 1, **options}
    theirs = DataLoader(dataset, **options)
    ours = DataLoader(dataset, backend=Dali(fast=()), device="cpu", **options)
    errors = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        expected, _ = outcomes(theirs)
        torch.manual_seed(epoch)
        got, raised = outcomes(ours)
        assert_same(got, expected)
        errors += raised
    return errors


def removed(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path):
    path.write_bytes(b"")


def text(path):
    path.write_text("no image at all, but long enough to be looked at as one")


@pytest.mark.parametrize("damage", [removed, cut, emptied, text])
@WORKERS
def test_a_broken_file_is_the_datasets_error_and_the_epoch_goes_on(damage, num_workers, tmp_path):
    data = ImageFolder(write_folder(tmp_path), CHAIN)
    damage(Path(data.samples[4][0]))
    assert len(compared(data, num_workers=num_workers)) == 2


def chunk_at(data, name):
    return data.index(name) - 4


def wrong_inside(path):
    """A PNG file whose compressed pixels end in nonsense, under a checksum that is right."""
    data = path.read_bytes()
    place = chunk_at(data, b"IDAT")
    length = int.from_bytes(data[place : place + 4], "big")
    pixels = data[place + 8 : place + 8 + length // 2] + b"\xff" * (length - length // 2)
    sealed = zlib.crc32(b"IDAT" + pixels).to_bytes(4, "big")
    path.write_bytes(data[: place + 8] + pixels + sealed + data[place + 12 + length :])


def without_its_end(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize(("damage", "raises"), [(wrong_inside, True), (without_its_end, False)])
@WORKERS
@pytest.mark.filterwarnings("ignore:dali could not make a batch")
def test_damage_inside_the_pixels_is_the_datasets_error_too(damage, raises, num_workers, tmp_path):
    data = ImageFolder(write_folder(tmp_path, format="PNG"), CHAIN)
    damage(Path(data.samples[4][0]))
    assert len(compared(data, num_workers=num_workers)) == 2 * raises
    assert len(compared(data, shuffle=True, num_workers=num_workers)) == 2 * raises


class Skips(ImageFolder):
    """Takes the next file for one that cannot be read, as many datasets do."""

    def __getitem__(self, index):
        try:
            return super().__getitem__(index)
        except Exception:
            return super().__getitem__((index + 1) % len(self))


@pytest.mark.parametrize("damage", [cut, wrong_inside])
@pytest.mark.filterwarnings("ignore:dali could not make a batch")
def test_a_dataset_that_catches_the_error_of_a_broken_file(damage, tmp_path):
    data = Skips(write_folder(tmp_path, format="PNG"), CHAIN)
    damage(Path(data.samples[4][0]))
    assert compared(data, num_workers=1) == []


WHOLE = transforms.Compose([transforms.Resize((12, 14)), transforms.ToTensor()])


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
@pytest.mark.parametrize(
    "chain",
    [CHAIN, pytest.param(WHOLE, marks=pytest.mark.nightly)],
    ids=["windows", "whole"],
)
def test_files_of_every_kind_through_a_loader(chain, tmp_path):
    files = {**plain_files(), **odd_files()}
    damaged = {f"{name}, cut": data[: len(data) * 2 // 3] for name, data in files.items()}
    everything = {**files, **damaged, "empty": b"", "text": b"no image" * 20}
    places = tmp_path / "class"
    places.mkdir()
    for number, data in enumerate(everything.values()):
        (places / f"{number:03}.jpg").write_bytes(data)
    data = ImageFolder(str(tmp_path), chain)
    assert len(data) == len(everything)
    errors = compared(data, batch_size=1)
    assert len(damaged) // 4 < len(errors) // 2 < len(damaged) + 10
    assert len(compared(data, batch_size=16, shuffle=True)) > 2


def test_several_broken_files_and_a_broken_batch_by_batch_epoch(tmp_path):
    data = ImageFolder(write_folder(tmp_path), CHAIN)
    for path, _ in data.samples[::3]:
        cut(Path(path))
    assert len(compared(data)) == 8


KINDS = {
    "missing": removed,
    "truncated": cut,
    "empty": emptied,
    "no image": text,
    "wrong inside": wrong_inside,
    "without a pixel once resized": lambda path: picture(1, 1, 400).save(path),
    "of another size than the last step takes": lambda path: picture(1, 30, 24).save(path),
    "a target that is refused": lambda path: None,
}
PAIRS = list(itertools.permutations(KINDS, 2))
LATE = transforms.Compose(
    [
        transforms.RandomHorizontalFlip(),
        transforms.Resize(24, max_size=30),
        transforms.ToTensor(),
        transforms.LinearTransformation(torch.eye(1872), torch.zeros(1872)),
    ]
)


@pytest.mark.nightly
def test_of_several_bad_samples_the_first_raises_as_under_stock(tmp_path):
    """Batches of four files with two bad ones, of every two kinds."""
    paths, refused = [], set()
    for number, pair in enumerate(PAIRS):
        for place, kind in enumerate((None, *pair, None)):
            path = tmp_path / "class" / f"{number:03}-{place}.png"
            path.parent.mkdir(exist_ok=True)
            picture(place, 22, 24).save(path)
            paths.append((path, kind))

    def refuse(target):
        if target in refused:
            raise LookupError(f"no target {target}")
        return target

    data = ImageFolder(tmp_path, LATE, refuse)
    data.samples = [(str(path), number) for number, (path, _) in enumerate(paths)]
    for number, (path, kind) in enumerate(paths):
        if kind is not None:
            KINDS[kind](path)
        if kind == "a target that is refused":
            refused.add(number)
    assert len(compared(data, batch_size=4)) == 2 * len(PAIRS)


def test_an_image_too_small_for_its_crop_is_torchvisions_error():
    chain = transforms.Compose([transforms.RandomCrop(22), transforms.ToTensor()])
    assert compared(folder(chain))


def test_a_normalize_of_other_channels_is_torchvisions_error():
    chain = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize([0.5, 0.5], [0.5, 0.5])]
    )
    assert len(compared(folder(chain), collate_fn=list)) == 8


def no_third(target):
    if target == 2:
        raise LookupError("no third class")
    return target


def test_an_error_of_a_target_transform_is_raised_at_its_batch():
    errors = compared(folder(CHAIN, target_transform=no_third))
    assert {type(error) for error in errors} == {LookupError}


def refuses_all(samples):
    raise LookupError(f"{len(samples)} samples")


def test_an_error_of_a_collate_fn_is_raised_at_its_batch():
    assert len(compared(folder(CHAIN), collate_fn=refuses_all)) == 8


class Breaks(Sampler[int]):
    def __iter__(self):
        yield from range(5)
        raise LookupError("no sixth sample")

    def __len__(self):
        return SIZE


def test_an_error_of_a_sampler_is_raised_where_its_batch_would_have_come():
    assert len(compared(folder(CHAIN), sampler=Breaks())) == 2


class OutOfRange(Sampler[int]):
    def __iter__(self):
        return iter([0, 1, 2, 3, 400, 5])

    def __len__(self):
        return 6


def test_an_index_that_is_none_is_the_datasets_error():
    errors = compared(folder(CHAIN), sampler=OutOfRange())
    assert {type(error) for error in errors} == {IndexError}

"""Datasets that only their own code can read: recorded in workers, and finished by the chain.

What is recorded, put through the rest of the chain with the streams that are handed on, is what the
dataset gives under the same seeds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from backends.dali.sources.opaque import Opaque, Placeholder, Recordings, opaque_for
from backends.dali.sources.proof import as_tensor
from dataloaders.errors import BackendUnavailable
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.actions import Sizes, applied, drawn
from dataloaders.transforms.operators.table import chain_of
from helpers.compare import bits
from helpers.image_files import noise
from helpers.vision_datasets import image_folder, pets

# torchvision's: an image that is opened and not read, as OxfordIIITPet's masks, stays open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def chain(*first: Any) -> Any:
    return v2.Compose([*first, v2.RandomCrop(5), v2.RandomHorizontalFlip(), v2.ToImage()])


class Photos(Dataset[Any]):
    """Images of a user's own, some code before and behind the transform."""

    def __init__(self, transform: Any, *, size: int = 6) -> None:
        self.transform = transform
        self.size = size

    def __len__(self) -> int:
        return self.size

    def image(self, index: int) -> Any:
        return noise(9 + index, 8, seed=index)

    def before(self, index: int) -> Any:
        return None

    def __getitem__(self, index: int) -> Any:
        extra = self.before(index)
        return {"extra": extra, "image": self.transform(self.image(index)), "label": index}


def known(dataset: Any) -> Opaque:
    found = opaque_for(dataset)
    assert isinstance(found, Opaque), found
    return found


def seeded(count: int) -> Any:
    return words(7, 0, list(range(count)), [0] * count, 1)


def stock(dataset: Any, index: int, own: Any) -> Any:
    with random_states_kept(cuda=False):
        seed_generators(tuple(int(word) for word in own[index]))  # type: ignore[arg-type]
        return dataset[index]


def recorded(opaque: Opaque, own: Any) -> Recordings:
    """All samples, seeded one by one as stock does it."""
    found = []
    with random_states_kept(cuda=False):
        for index in range(len(own)):
            seed_generators(tuple(int(word) for word in own[index]))  # type: ignore[arg-type]
            found.append(opaque.dataset[index])
    return Recordings.of(found)


def assert_gives(dataset: Any, opaque: Opaque) -> None:
    """Under equal seeds each sample is the dataset's own, its random numbers drawn as a batch's."""
    count = len(dataset)
    own = seeded(count)
    batch = recorded(opaque, own)
    images = batch.images
    read = chain_of(opaque.transform)
    assert read.why is None
    sizes = Sizes([image.shape[0] for image in images], [image.shape[1] for image in images])
    actions = drawn(read.operators, batch.draws(own), sizes)
    for index, (sample, pixels) in enumerate(zip(batch.samples, images, strict=True)):
        value: Any = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
        if opaque.form == "bytes":
            value = as_tensor(pixels, wraps=opaque.wraps)
        ours = opaque.sample(sample, applied(actions, index, value))
        assert bits(ours) == bits(stock(dataset, index, own))


def test_a_dataset_of_the_users_own() -> None:
    dataset = Photos(chain())
    opaque = known(dataset)
    assert (opaque.form, opaque.channels, opaque.path) == ("pil", 3, ("image",))
    assert len(opaque.dataset) == 6
    sample = opaque.dataset[2].sample
    assert (sample["label"], type(sample["image"])) == (2, Placeholder)
    assert_gives(dataset, opaque)
    assert isinstance(dataset.transform, v2.Compose)  # it is as it was


class Drawing(Photos):
    """Draws random numbers before the transform, another number of them for each sample."""

    def before(self, index: int) -> Any:
        return torch.rand(index * 400).sum(), random.random() if index % 2 else 0


class Seeding(Photos):
    """Seeds the generators itself."""

    def before(self, index: int) -> Any:
        torch.manual_seed(index + 2**33)
        random.seed(index)
        return torch.rand(index)


@pytest.mark.parametrize("kind", [Drawing, Seeding])
def test_random_numbers_before_the_transform(kind: type[Photos]) -> None:
    dataset = kind(v1.Compose([v1.RandomCrop(5), v1.RandomChoice([v1.RandomHorizontalFlip()] * 3)]))
    assert_gives(dataset, known(dataset))


def test_a_stream_that_was_not_seeded_for_the_sample_is_not_followed() -> None:
    opaque = known(Drawing(chain()))
    torch.rand(3)
    assert opaque.dataset[2].stream is None
    assert known(Seeding(chain())).dataset[2].stream == (2, 2)


def test_a_state_of_unknown_origin() -> None:
    class Restoring(Photos):
        def before(self, index: int) -> Any:
            state = torch.get_rng_state()
            state[96] ^= 1
            torch.set_rng_state(state)

    assert "set the state of torch's generator" in str(opaque_for(Restoring(chain())))


class Pair(NamedTuple):
    image: Any
    label: Any


class Grouped(Photos):
    def __getitem__(self, index: int) -> Any:
        return [Pair(self.transform(self.image(index)), index), "text"]


class Transformed(Dataset[Any]):
    """The usual way to give a part of a dataset transforms of its own."""

    def __init__(self, subset: Any, transform: Any) -> None:
        self.subset = subset
        self.transform = transform

    def __len__(self) -> int:
        return len(self.subset)

    def __getitem__(self, index: int) -> Any:
        image, target = self.subset[index]
        return self.transform(image), target


def test_samples_of_other_structures(tmp_path: Path) -> None:
    grouped = known(Grouped(chain()))
    assert grouped.path == (0, "image")
    assert_gives(Grouped(chain()), grouped)
    folder = image_folder(tmp_path)
    wrapped = Transformed(Subset(folder, [3, 0, 1]), chain())
    assert_gives(wrapped, known(wrapped))
    alone = Subset(Transformed(folder, chain()), [6, 2])
    assert_gives(alone, known(alone))


def test_image_and_target_at_once(tmp_path: Path) -> None:
    dataset = pets(tmp_path, transforms=chain())
    assert_gives(dataset, known(dataset))
    masks = pets(tmp_path, transforms=chain(), target_types="segmentation")
    assert "its transform is called with 2 values" in str(opaque_for(masks))


def test_torchvisions_fake_data() -> None:
    dataset = FakeData(4, (3, 9, 8), transform=chain())
    assert_gives(dataset, known(dataset))


class Grey(Photos):
    def image(self, index: int) -> Any:
        return noise(9, 8 + index, 1, index)


class Tensors(Photos):
    def image(self, index: int) -> Any:
        return torch.from_numpy(np.array(noise(9, 8 + index, 3, index))).permute(2, 0, 1)


class Wrapped(Tensors):
    def image(self, index: int) -> Any:
        return tv_tensors.Image(super().image(index))


class Arrays(Photos):
    def image(self, index: int) -> Any:
        return np.array(noise(9, 8 + index, 3, index))


class Clear(Photos):
    def image(self, index: int) -> Any:
        return noise(9, 8, 4, index)


def opened(image: Any) -> Any:
    return image.convert("RGB")


def test_images_of_other_sorts() -> None:
    grey, tensors = known(Grey(chain())), known(Tensors(chain()))
    assert (grey.form, grey.channels) == ("pil", 1)
    assert (tensors.form, tensors.channels) == ("bytes", 3)
    assert_gives(Grey(chain()), grey)
    assert_gives(Tensors(chain()), tensors)
    wrapped = known(Wrapped(chain()))
    assert (wrapped.form, wrapped.wraps, tensors.wraps) == ("bytes", True, False)
    assert_gives(Wrapped(chain()), wrapped)
    for dataset, told in ((Arrays, "numpy.ndarray"), (Clear, "PIL image of mode RGBA")):
        reason = str(opaque_for(dataset(v2.Compose([v2.ToImage()]))))
        assert f"its transform is given a {told}" in reason


def test_what_stands_in_front_and_is_not_known_runs_in_the_workers() -> None:
    for dataset in (Arrays(chain(v2.ToPILImage())), Clear(chain(opened))):
        opaque = known(dataset)
        assert len(opaque.head.transforms) == 1
        assert type(opaque.transform.transforms[0]) is v2.RandomCrop
        assert_gives(dataset, opaque)


def test_arrays_of_which_v2_makes_images_are_made_so_in_the_workers() -> None:
    dataset = Arrays(chain(v2.ToImage()))
    opaque = known(dataset)
    assert [type(member) for member in opaque.head.transforms] == [v2.ToImage]
    assert (opaque.form, opaque.wraps) == ("bytes", True)
    assert_gives(dataset, opaque)
    pictures = known(Photos(chain(v2.ToImage())))  # of pictures DALI's graph begins with it
    assert not pictures.head.transforms


class Coloured(Photos):
    def image(self, index: int) -> Any:
        return noise(9, 8, 3 if index % 2 else 1, index)


def test_images_that_the_transform_makes_one_sort() -> None:
    dataset = Coloured(chain(v2.RGB()))
    assert_gives(dataset, known(dataset))
    assert "another sort of image" in str(opaque_for(Coloured(chain(), size=5)))


def test_files_whose_transform_begins_with_code_of_the_users(tmp_path: Path) -> None:
    dataset = image_folder(tmp_path, transform=chain(opened))
    assert_gives(dataset, known(dataset))


def test_an_image_of_another_sort_later_on() -> None:
    class Mixed(Photos):
        def image(self, index: int) -> Any:
            return noise(9, 8, 1 if index == 7 else 3, index)

    opaque = known(Mixed(chain(), size=20))
    with pytest.raises(BackendUnavailable, match="of mode L, and before that another sort of"):
        opaque.dataset[7]
    assert opaque.dataset[8].pixels.shape == (9, 8, 3)


class Twice(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.image(index)), self.transform(self.image(index))


class Never(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.image(index)


class Changed(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.image(index)).float() / 2


class Hidden(Photos):
    def __getitem__(self, index: int) -> Any:
        return [self.transform(self.image(index))] * 2


class Late(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.transform(self.image(index)), float(torch.rand(1))


class Both(Photos):
    def __init__(self, transform: Any) -> None:
        super().__init__(transform)
        self.target_transform = v2.Compose([v2.Resize(3)])


class Closing(Photos):
    def __del__(self) -> None:
        pass


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Twice(chain()), "sample 0 of Twice called the transform 2 times, and a graph serves one"),
        (Never(chain()), "sample 0 of Never called the transform 0 times"),
        (Changed(chain()), "without its transform sample 0 could not be made"),
        (Hidden(chain()), "what the transform gives stands more than once in the sample"),
        (Late(chain()), "draws random numbers after its transform"),
        (Both(chain()), r"2 different chains (dataset.transform, dataset.target_transform)"),
        (Closing(chain()), "Closing has a __del__"),
        (Streamed(), "Streamed is iterable"),
        (Photos(opened), "Photos holds no torchvision transform that could move"),
        (Photos(v2.Compose([opened])), "nothing in dataset.transform is known"),
        (object(), "object holds no torchvision transform"),
    ],
)
def test_what_stands_in_the_way(dataset: Any, reason: str) -> None:
    assert reason in str(opaque_for(dataset))


def test_a_sample_that_goes_another_way_later_on() -> None:
    class Sometimes(Photos):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                return super().__getitem__(index)["image"], index
            return super().__getitem__(index) if index != 8 else None

    opaque = known(Sometimes(chain(), size=20))
    with pytest.raises(BackendUnavailable, match="in sample 7 of Sometimes the image is not"):
        opaque.dataset[7]
    with pytest.raises(BackendUnavailable, match="sample 8 of Sometimes called the transform 0"):
        opaque.dataset[8]


def test_errors_of_the_dataset_are_its_own() -> None:
    class Broken(Photos):
        def before(self, index: int) -> Any:
            if index == 3:
                raise KeyError("nothing there")

    opaque = known(Broken(chain()))
    with pytest.raises(KeyError, match="nothing there"):
        opaque.dataset[3]
    assert opaque.dataset[4].sample["label"] == 4

    class Gone(Photos):
        def before(self, index: int) -> Any:
            raise KeyError("nothing there")

    assert "none of the samples tried could be read" in str(opaque_for(Gone(chain())))


class Many(Photos):
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("kind", [Photos, Many])
@pytest.mark.parametrize("workers", [0, 2])
def test_in_torchs_workers(kind: type[Photos], workers: int) -> None:
    dataset = kind(chain())
    opaque = known(dataset)
    assert hasattr(opaque.dataset, "__getitems__") == (kind is Many)
    loader = DataLoader(opaque.dataset, batch_size=4, num_workers=workers, collate_fn=Recordings.of)
    batches = list(loader)
    assert [len(batch.samples) for batch in batches] == [4, 2]
    assert all(batch.pixels.is_shared() == (workers > 0) for batch in batches)
    images = [image for batch in batches for image in batch.images]
    labels = [sample["label"] for batch in batches for sample in batch.samples]
    assert labels == list(range(6))
    for index, image in enumerate(images):
        np.testing.assert_array_equal(image, np.array(dataset.image(index)))


def test_what_is_assigned_later_comes_over() -> None:
    dataset = Photos(chain())
    opaque = known(dataset)
    dataset.size = 3
    assert len(opaque.dataset) == 6
    opaque.refresh()
    assert len(opaque.dataset) == 3


def test_random_states_are_kept() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    known(Drawing(chain()))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_no_samples() -> None:
    assert len(known(Photos(chain(), size=0)).dataset) == 0
    assert Recordings.of([]).images == []

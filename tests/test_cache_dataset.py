"""What a cache keeps of a dataset: samples as they were when read, without draws, and classes."""

import io
import json
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Resize, v2
from torchvision.transforms.functional import pil_to_tensor

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, join, precompute, verify
from dataloaders.errors import CacheError
from helpers.cached import built, spoil
from helpers.compare import assert_same, generator_states
from helpers.datasets import Made
from helpers.hostile import say_less
from helpers.pictures import saved, write_folder

MANY = 60  # more than a study reads


def picture(index, mode="RGB"):
    image = Image.new("RGB", (12, 10), (index % 256, index // 256, 7))
    image.putpixel((index % 12, 3), (255, 255, 255))
    return image.convert(mode)


def one_memory():
    """All that a dataset may use again: canvases, a file, a list, a dict, arrays and tensors."""
    canvases = {mode: picture(0, mode) for mode in ("RGB", "L", "1", "I", "F", "LA")}
    words, data, single = ["", 0, {}], bytearray(8), np.zeros((), np.int16)
    tensor = torch.zeros((3, 4), dtype=torch.uint8)
    array = np.zeros((3, 4, 2), np.float32)
    file = io.BytesIO()

    def sample(index):
        for mode, canvas in canvases.items():
            canvas.paste(picture(index, mode))
        file.seek(0)
        file.truncate()
        picture(index).save(file, "PNG")
        words[:2] = [f"sample {index}", index]
        words[2]["n"] = index
        data[:] = index.to_bytes(8, "big")
        for each in (single, array, tensor.numpy()):
            each[...] = index
        views = {"tensors": [tensor, tensor.numpy(), tensor.mT], "views": (array[..., 0], array)}
        lazy = Image.open(file)  # decoded when it is read
        return {"image": canvases, "lazy": lazy, "words": words, "data": data, "n": single, **views}

    return sample


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("images", [None, {"image/RGB": "png", "image/L": "png", "lazy": "png"}])
@pytest.mark.covering
def test_what_is_changed_in_place_for_the_next_sample(images, num_workers, tmp_path):
    dataset = Made(one_memory(), MANY)
    cached = precompute(dataset, tmp_path / "a.h5", images=images, num_workers=num_workers)
    for index, sample in enumerate(cached):
        for mode, image in {**sample["image"], "RGB": sample["lazy"]}.items():
            assert_same(image, picture(index, mode))
        assert_same(sample["image"]["RGB"], sample["lazy"])
        assert sample["words"] == [f"sample {index}", index, {"n": index}]
        assert sample["data"] == index.to_bytes(8, "big")
        values = sample["n"], *sample["tensors"], *sample["views"]
        assert all(np.unique(each).tolist() == [index] for each in values)


class Adds:
    """A transform whose results all have the same memory."""

    def __init__(self):
        self.number = 0
        self.result = torch.zeros(3, 5, 6)

    def __call__(self, image):
        return torch.add(pil_to_tensor(image).float(), self.number, out=self.result)


class SetsNumber(Made):
    """The transform adds what the dataset sets: it cannot run live."""

    size = MANY

    def __init__(self):
        self.adds = Adds()
        self.transform = Compose([Resize((5, 6)), self.adds])

    def sample(self, index):
        self.adds.number = index
        try:
            return self.transform(picture(index))
        finally:
            self.adds.number = 0


def test_a_transform_whose_results_share_memory_is_compared_with_what_it_gave(tmp_path):
    dataset = SetsNumber()
    cached = built(dataset, tmp_path / "a.h5")
    assert cached.index.tail == ()
    for index in (0, 1, 47, MANY - 1):
        assert torch.equal(cached[index], dataset[index])


# A dataset that draws random numbers for what is kept is refused, in whichever sample it draws


SIZE = 400
UNSTUDIED = 377  # neither among the samples that the study reads of so many, nor near them

DRAWS = {
    "torch, normal": (lambda: float(torch.randn(())), "torch"),
    "torch, seeded": (lambda: float(torch.manual_seed(5).initial_seed()), "torch"),
    "NumPy, normal": (lambda: float(np.random.randn()), "NumPy"),
    "NumPy, two normals": (lambda: np.random.randn(2), "NumPy"),
    "NumPy, seeded": (lambda: np.random.seed(5), "NumPy"),
    "random, one bit": (lambda: random.getrandbits(1), "Python's random"),
    "random, normal": (lambda: random.gauss(0, 1), "Python's random"),
    "random, seeded": (lambda: random.seed(5), "Python's random"),
}


def drawing(draw, at, *, shown=False):
    """Some samples draw; what they draw is not in them unless they are told to."""

    def sample(index):
        drawn = draw() if index in at else None
        return index, torch.full((4,), index), drawn if shown else None

    return Made(sample, SIZE)


@pytest.mark.parametrize("name", DRAWS)
def test_one_draw_without_effect_anywhere_in_the_build(name, path):
    draw, generator = DRAWS[name]
    message = (
        f"^Made draws random numbers: .* sample {UNSTUDIED} .* drew from, or seeded, the "
        f"generator of {generator}. A cache would keep one draw for ever; drawing or seeding "
        r"counts even if it has no effect on the sample\. .*transform= stays live.*"
        "allow_random=True"
    )
    with pytest.raises(CacheError, match=message):
        built(drawing(draw, [UNSTUDIED]), path)
    assert not path.exists()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("at", [0, 15, 16, UNSTUDIED, SIZE - 1])
@pytest.mark.covering
def test_draws_in_workers_and_where_samples_may_be_left_out(at, num_workers, on_error, path):
    dataset = drawing(lambda: (torch.rand(()), random.random()), [at])
    with pytest.raises(CacheError, match=f"sample {at} .*of torch and Python's random"):
        precompute(dataset, path, num_workers=num_workers, on_error=on_error)


def fails(index):
    """One sample fails by chance, so that it depends on a draw whether it is left out."""
    if index == UNSTUDIED and random.random() < 2:
        raise ValueError("not today")
    return index


def seeds(index):
    """Deterministic, by a seed of its own for each sample."""
    torch.manual_seed(index)
    return torch.rand(3)


def test_a_sample_that_drew_and_failed_is_not_left_out(path):
    with pytest.raises(CacheError, match="drew from, or seeded, the generator of Python's random"):
        built(Made(fails, SIZE), path, on_error="skip")


def test_draws_are_the_reason_if_they_change_what_a_sample_consists_of(path):
    def sample(index):
        return [index] * (2 if index == UNSTUDIED and random.random() < 2 else 1)

    with pytest.raises(CacheError, match=f"draws random numbers: .* sample {UNSTUDIED} "):
        built(Made(sample, SIZE), path)


def test_a_refused_build_goes_on_with_allow_random(path, tmp_path):
    def draws():
        return [float(torch.rand(())), np.random.rand(), random.random()]

    before, dataset = generator_states(), drawing(draws, [UNSTUDIED], shown=True)
    with pytest.raises(CacheError, match=f"sample {UNSTUDIED}"):
        built(dataset, path, rows=10)
    rare = built(dataset, path, rows=10, allow_random=True)
    again = built(dataset, tmp_path / "b.h5", allow_random=True)
    assert path.read_bytes() == again.path.read_bytes()
    # What is drawn is a function of the sample's number, whether or not the others draw.
    all_draw, options = drawing(draws, range(SIZE), shown=True), {"allow_random": True}
    every = precompute(all_draw, tmp_path / "c.h5", num_workers=2, rows=30, **options)
    other = precompute(all_draw, tmp_path / "d.h5", num_workers=1, rows=70, **options)
    assert every.path.read_bytes() == other.path.read_bytes()
    assert rare[UNSTUDIED][2] == every[UNSTUDIED][2]
    assert all(len(set(drawn)) == SIZE for drawn in zip(*(row[2] for row in every), strict=True))
    assert_same(generator_states(), before)


def test_a_finished_cache_is_opened_whatever_its_dataset_draws(path):
    built(Made(seeds, SIZE), path, allow_random=True)
    assert len(built(Made(seeds, SIZE), path)) == SIZE
    loader = DataLoader(Made(seeds, SIZE), 50, backend=H5(path, build="never"))
    assert len(list(loader)) == SIZE // 50


def test_the_targets_of_packed_files_may_not_be_drawn(path):
    file = saved(Image.new("RGB", (8, 8)), "PNG")

    def sample(index):
        target = random.random() if index == UNSTUDIED else 0.5
        return Image.open(io.BytesIO(file)).convert("RGB"), target

    with pytest.raises(CacheError, match=f"^Made draws .* sample {UNSTUDIED} "):
        built(Made(sample, SIZE), path, images="packed")


def test_a_seeded_draw_that_puts_the_state_back_is_no_draw(path):
    def sample(index):
        state = random.getstate()
        random.seed(index)
        random.random()
        random.setstate(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return torch.rand(2)

    cached = built(Made(sample, 50), path)
    assert all(torch.equal(cached[index], sample(index)) for index in range(50))


def test_builds_in_two_threads_do_not_see_each_others_draws(tmp_path):
    def sample(index):
        time.sleep(0.001)
        return index

    def length(name):
        return len(built(Made(sample, 100), tmp_path / name))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(length, ["a.h5", "b.h5"])) == [100, 100]


# `classes` and `class_to_idx` are there in the cache, which says if they are others


def numbers(rows=6, **said):
    return Made(lambda index: {"number": index}, rows, **said)


def test_of_an_image_folder(tmp_path):
    write_folder(tmp_path / "photos", 6)
    (tmp_path / "photos" / "class1").rename(tmp_path / "photos" / "Über")
    dataset = ImageFolder(str(tmp_path / "photos"), v2.Compose([v2.Resize(8), v2.CenterCrop(8)]))
    cached = built(dataset, tmp_path / "a.h5")
    assert cached.classes == dataset.classes == ["class0", "class2", "Über"]
    assert cached.class_to_idx == dataset.class_to_idx
    assert list(cached.class_to_idx) == list(dataset.class_to_idx)
    again = pickle.loads(pickle.dumps(CachedDataset(tmp_path / "a.h5")))
    assert (again.classes, again.class_to_idx) == (cached.classes, cached.class_to_idx)
    first, second = random_split(cached, [4, 2])
    nested = built(ConcatDataset([Subset(first, [1, 0]), second]), tmp_path / "b.h5")
    assert nested.class_to_idx == dataset.class_to_idx
    assert verify(tmp_path / "a.h5") == []


def test_what_hdf5_info_and_verify_make_of_them(path, tmp_path, command):
    classes = ["cat", "\x1b[2J", "x" * 90, ("tench", "Tinca")]
    cached = built(numbers(classes=classes, class_to_idx={"cat": 0, "\x1b[2J": 1}), path)
    with h5py.File(path) as file:
        read = json.loads(bytes(file["attributes"][:]))
    assert read["classes"] == ["cat", "\x1b[2J", "x" * 90, ["tench", "Tinca"]]
    shown = command("cache", "info", path).out
    assert f"classes: 4 (cat, \\x1b[2J, {'x' * 40}..., ...)" in shown
    assert "class_to_idx: 2 (cat: 0, \\x1b[2J: 1)" in shown
    spoil(path, cached.index.attributes.offset + 14)
    assert any("the dataset's classes" in damage.what for damage in verify(path))
    none = built(numbers(), tmp_path / "b.h5")
    assert (none.attributes, hasattr(none, "classes")) == ({}, False)
    with pytest.raises(AttributeError, match=r"b\.h5 has no class_to_idx: the dataset that it was"):
        none.class_to_idx  # noqa: B018


class Raises(Made):
    @property
    def classes(self):
        raise RuntimeError("not yet loaded")


ODD = ["", "\ud800", "\0", "é" * 99]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"classes": [*ODD, tuple(ODD), ()], "class_to_idx": {"a": -(2**63), "\ud800": 2**63 - 1}},
         None),
        ({"classes": ("a", "b")}, {"classes": ["a", "b"]}),
        ({"classes": [np.str_("a"), ["c"]]}, {"classes": ["a", ("c",)]}),
        ({"class_to_idx": {"a": np.int64(3)}}, {"class_to_idx": {"a": 3}}),
        ({"classes": 3, "class_to_idx": {"a": 1}}, {"class_to_idx": {"a": 1}}),
        ({"classes": [f"{number:030}" for number in range(300_000)]}, {}),
        *(({"class_to_idx": each}, {})
          for each in ({"a": True}, {"a": 2**63}, {"a": 1.0}, {1: 1}, [("a", 1)])),
        *(({"classes": each}, {})
          for each in ([1, 2], ["a", None], [("a", 1)], "abc", 10, torch.zeros(3))),
    ],
    ids=lambda each: ascii(each)[:40],
)  # fmt: skip
def test_what_is_kept_of_what_a_dataset_says(path, said, found):
    assert built(numbers(**said), path).attributes == (said if found is None else found)


def test_of_several_datasets_what_all_agree_on(tmp_path):
    one = numbers(classes=["a", "b"], class_to_idx={"a": 0, "b": 1})
    same = numbers(classes=("a", "b"), class_to_idx={"b": 1, "a": 0})
    other = numbers(classes=["a", "b"], class_to_idx={"a": 1, "b": 0})
    both = {"classes": ["a", "b"], "class_to_idx": {"a": 0, "b": 1}}
    own = Subset(one, [0])
    own.classes = ["of the subset"]
    for number, (dataset, found) in enumerate(
        (
            (ConcatDataset([Subset(one, [0]), ConcatDataset([same, one])]), both),
            (ConcatDataset([one, same, other]), {"classes": ["a", "b"]}),
            (ConcatDataset([one, numbers()]), {}),
            (own, {"classes": ["of the subset"]}),
            (Raises(int, 3), {}),  # which cannot be asked
        )
    ):
        assert built(dataset, tmp_path / f"{number}.h5").attributes == found


def test_other_classes_than_the_file_was_built_with(path):
    built(numbers(classes=["cat", "dog"], class_to_idx={"cat": 0, "dog": 1}), path)
    message = (
        "was built from something else: classes: 2 when it was built, 3 now; the first that "
        "differs is 1: dog then, cow now"
    )
    with pytest.raises(CacheError, match=message):
        built(numbers(classes=["cat", "cow", "dog"]), path)
    with pytest.raises(CacheError, match=r"class_to_idx: .* differs is cat: 0 then, 1 now"):
        built(numbers(class_to_idx={"cat": 1, "dog": 0}), path)
    # A dataset that says nothing of them, and one that says the same, take the file as it is.
    assert built(numbers(), path).classes == ["cat", "dog"]
    assert built(numbers(classes=("cat", "dog")), path).classes == ["cat", "dog"]
    new = built(numbers(classes=["cat", "cow", "dog"]), path, overwrite=True)
    assert new.classes == ["cat", "cow", "dog"]


def test_joined_shards(path, tmp_path):
    names = [f"n{number:029d}" for number in range(3000)]
    dataset = numbers(7, classes=names, class_to_idx={name: n for n, name in enumerate(names)})
    for rank in range(3):
        built(dataset, path, shard=(rank, 3), wait=False)
    join(path)
    cached = CachedDataset(path)
    assert (cached.classes, cached.class_to_idx) == (dataset.classes, dataset.class_to_idx)
    # Beside the index, not in it: what does not ask for them does not read them.
    assert cached.index.user_block == 4096
    assert verify(path) == []
    say_less(cached.shards[1])
    join(path)
    assert CachedDataset(path).attributes == {}  # one of them says nothing
    for rank, classes in enumerate((["cat", "dog"], ["cat", "cow"])):
        built(numbers(classes=classes), tmp_path / "b.h5", shard=(rank, 2), wait=False)
    message = "from different builds: classes: 2 .* differs is 1: dog then, cow now"
    with pytest.raises(CacheError, match=message):
        join(tmp_path / "b.h5")

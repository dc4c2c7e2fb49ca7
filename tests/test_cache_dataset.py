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
from torch.utils.data import Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Resize, v2
from torchvision.transforms.functional import pil_to_tensor

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import precompute, verify
from helpers.cached import built, refused, spoil
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


def test_a_transform_whose_results_share_memory_is_compared_with_what_it_gave(path):
    number, result = [0], torch.zeros(3, 5, 6)

    def add(image):
        return torch.add(pil_to_tensor(image).float(), number[0], out=result)

    class SetsNumber(Made):
        """The transform adds what the dataset sets: it cannot run live."""

        def sample(self, index):
            number[0] = index
            made = self.transform(picture(index))
            number[0] = 0
            return made

    dataset = SetsNumber(size=MANY, transform=Compose([Resize((5, 6)), add]))
    cached = built(dataset, path)
    assert cached.index.tail == ()
    for index in (0, 1, 47, MANY - 1):
        assert torch.equal(cached[index], dataset[index])


# A dataset that draws random numbers for what is kept is refused, in whichever sample it draws


SIZE = 400
UNSTUDIED = 377  # neither among the samples that the study reads of so many, nor near them

DRAWS = {
    "torch, normal": (lambda: float(torch.randn(())), "torch"),
    "torch, seeded": (lambda: float(torch.manual_seed(5).initial_seed()), "torch"),
    "NumPy, two normals": (lambda: np.random.randn(2), "NumPy"),
    "random, one bit": (lambda: random.getrandbits(1), "Python's random"),
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
    refused(message, built, drawing(draw, [UNSTUDIED]), path)
    assert not path.exists()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("at", [0, 63, 64, UNSTUDIED, SIZE - 1])
@pytest.mark.covering
def test_draws_in_workers_and_where_samples_may_be_left_out(at, num_workers, on_error, path):
    dataset = drawing(lambda: (torch.rand(()), random.random()), [at])
    options = {"num_workers": num_workers, "on_error": on_error}
    refused(f"sample {at} .*of torch and Python's random", precompute, dataset, path, **options)


def is_drawn(index):
    return index == UNSTUDIED and random.random() < 2


SQUARE = saved(Image.new("RGB", (8, 8)), "PNG")


@pytest.mark.parametrize(
    ("sample", "options"),
    [  # it is left out; it is built in another way; it is the target of an image as it is
        (lambda index: 1 // 0 if is_drawn(index) else index, {"on_error": "skip"}),
        (lambda index: [index] * (2 if is_drawn(index) else 1), {}),
        (lambda index: (Image.open(io.BytesIO(SQUARE)).convert("RGB"), int(is_drawn(index))),
         {"images": "packed"}),
    ],
)  # fmt: skip
def test_draws_are_the_reason_whatever_they_lead_to(sample, options, path):
    rule = f"^Made draws random numbers: .* sample {UNSTUDIED} .*the generator of Python's random"
    refused(rule, built, Made(sample, SIZE), path, **options)


def test_a_refused_build_goes_on_with_allow_random(path, tmp_path):
    def draws():
        return [float(torch.rand(())), np.random.rand(), random.random()]

    before, dataset = generator_states(), drawing(draws, [UNSTUDIED], shown=True)
    refused(f"sample {UNSTUDIED}", built, dataset, path, rows=10)
    rare = built(dataset, path, rows=10, allow_random=True)
    again = built(dataset, tmp_path / "b.h5", allow_random=True)
    assert path.read_bytes() == again.path.read_bytes()
    # What is drawn is a function of the sample's number, whether or not the others draw.
    all_draw, options = drawing(draws, range(SIZE), shown=True), {"allow_random": True}
    every, other = (
        built(all_draw, tmp_path / f"{workers}.h5", num_workers=workers, rows=rows, **options)
        for workers, rows in ((2, 30), (1, 70))
    )
    assert every.path.read_bytes() == other.path.read_bytes()
    assert rare[UNSTUDIED][2] == every[UNSTUDIED][2]
    assert all(len(set(drawn)) == SIZE for drawn in zip(*(row[2] for row in every), strict=True))
    assert_same(generator_states(), before)
    assert len(built(all_draw, other.path)) == SIZE  # a finished one is opened
    backend = H5(other.path, build="never")
    assert_same(list(DataLoader(all_draw, 1, collate_fn=list, backend=backend))[7], every[7:8])


def test_a_seeded_draw_that_puts_the_state_back_is_no_draw(path):
    def sample(index):
        state = random.getstate()
        random.seed(index)
        random.setstate(state)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            return torch.rand(2)

    assert_same(list(built(Made(sample), path)), list(Made(sample)))


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
    for each in (cached, pickle.loads(pickle.dumps(cached))):
        assert each.classes == dataset.classes == ["class0", "class2", "Über"]
        assert list(each.class_to_idx.items()) == list(dataset.class_to_idx.items())
    first, _ = random_split(cached, [4, 2])
    nested = built(Subset(first, [1, 0]), tmp_path / "b.h5")
    assert nested.class_to_idx == dataset.class_to_idx


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
    assert not hasattr(built(numbers(), tmp_path / "b.h5"), "classes")


ODD = ["", "\ud800", "\0", "é" * 99]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"classes": [*ODD, tuple(ODD), ()], "class_to_idx": {"a": -(2**63), "\ud800": 2**63 - 1}},
         None),
        ({"classes": [np.str_("a"), ["c"]]}, {"classes": ["a", ("c",)]}),
        ({"classes": 3, "class_to_idx": {"a": np.int64(3)}}, {"class_to_idx": {"a": 3}}),
        ({"classes": [f"{number:030}" for number in range(300_000)]}, {}),
        *(({"class_to_idx": each}, {}) for each in ({"a": 2**63}, {"a": 1.0}, {1: 1})),
        *(({"classes": each}, {}) for each in ([1, 2], "abc", torch.zeros(3))),
    ],
    ids=lambda each: ascii(each)[:40],
)  # fmt: skip
def test_what_is_kept_of_what_a_dataset_says(path, said, found):
    assert built(numbers(**said), path).attributes == (said if found is None else found)


def test_other_classes_than_the_file_was_built_with(path):
    same, other = (numbers(classes=each) for each in (("cat", "dog"), ["cat", "cow", "dog"]))
    built(numbers(classes=["cat", "dog"], class_to_idx={"cat": 0, "dog": 1}), path)
    message = (
        "was built from something else: classes: 2 when it was built, 3 now; the first that "
        "differs is 1: dog then, cow now"
    )
    refused(message, built, other, path)
    message = r"class_to_idx: .* differs is cat: 0 then, 1 now"
    refused(message, built, numbers(class_to_idx={"cat": 1, "dog": 0}), path)
    for dataset in (numbers(), same):  # which says nothing of them, or the same
        assert built(dataset, path).classes == ["cat", "dog"]


def test_joined_shards(path, tmp_path):
    names = [f"n{number:029d}" for number in range(3000)]
    dataset = numbers(7, classes=names, class_to_idx={name: n for n, name in enumerate(names)})
    cached = built(dataset, path, rows=3, single_file=False)
    assert (cached.classes, cached.class_to_idx) == (dataset.classes, dataset.class_to_idx)
    assert verify(path) == []
    say_less(cached.shards[1])
    path.unlink()
    assert built(dataset, path, rows=3, single_file=False).attributes == {}  # one says nothing
    one, other = (numbers(classes=["cat", each]) for each in ("dog", "cow"))
    built(one, tmp_path / "b.h5", shard=(0, 2), wait=False)
    message = "of other datasets: classes: 2 .* differs is 1: dog then, cow now"
    refused(message, built, other, tmp_path / "b.h5", shard=(1, 2))

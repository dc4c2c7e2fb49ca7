"""`classes` and `class_to_idx` of a dataset are there in its cache, and say if they are others."""

import pickle

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, random_split
from torchvision.datasets import MNIST, FakeData, ImageFolder
from torchvision.transforms import v2

from dataloaders.cache import CachedDataset, join, precompute, verify
from dataloaders.cache.format.attributes import attributes_in, attributes_of, encoded
from dataloaders.cli import cache_info
from dataloaders.errors import CacheError
from helpers.older import say_less
from helpers.photos import write_folder


class Numbers:
    """Plain rows, and what it is told to say of itself."""

    def __init__(self, rows=6, **said):
        self.rows = rows
        self.__dict__.update(said)

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return {"number": index}


def kept(path, dataset, **options):
    return precompute(dataset, path, num_workers=0, **options)


def test_of_an_image_folder(tmp_path):
    write_folder(tmp_path / "photos", 6)
    (tmp_path / "photos" / "class1").rename(tmp_path / "photos" / "Über")
    dataset = ImageFolder(str(tmp_path / "photos"), v2.Compose([v2.Resize(8), v2.CenterCrop(8)]))
    cached = kept(tmp_path / "a.h5", dataset)
    assert cached.classes == dataset.classes == ["class0", "class2", "Über"]
    assert cached.class_to_idx == dataset.class_to_idx
    assert list(cached.class_to_idx) == list(dataset.class_to_idx)
    again = pickle.loads(pickle.dumps(CachedDataset(tmp_path / "a.h5")))
    assert (again.classes, again.class_to_idx) == (cached.classes, cached.class_to_idx)
    first, second = random_split(cached, [4, 2])
    nested = kept(tmp_path / "b.h5", ConcatDataset([Subset(first, [1, 0]), second]))
    assert nested.class_to_idx == dataset.class_to_idx
    assert verify(tmp_path / "a.h5") == []


def test_of_no_attribute_there_is_none(tmp_path):
    cached = kept(tmp_path / "a.h5", Numbers())
    assert cached.index.attributes is None
    assert cached.attributes == {}
    assert not hasattr(cached, "classes")
    with pytest.raises(AttributeError, match=r"a\.h5 has no class_to_idx: the dataset that it was"):
        cached.class_to_idx  # noqa: B018


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"classes": ("a", "b")}, {"classes": ["a", "b"]}),
        ({"classes": [("a", "b"), ["c"]]}, {"classes": [("a", "b"), ("c",)]}),
        ({"classes": [np.str_("a")]}, {"classes": ["a"]}),
        ({"classes": []}, {"classes": []}),
        ({"classes": ["\udc80", "\x1b[2J"]}, {"classes": ["\udc80", "\x1b[2J"]}),
        ({"class_to_idx": {"a": np.int64(3)}}, {"class_to_idx": {"a": 3}}),
        ({"class_to_idx": {"a": True}}, {}),
        ({"class_to_idx": {"a": 2**63}}, {}),
        ({"class_to_idx": {"a": 1.0}}, {}),
        ({"class_to_idx": {1: 1}}, {}),
        ({"class_to_idx": [("a", 1)]}, {}),
        ({"classes": [1, 2]}, {}),
        ({"classes": ["a", None]}, {}),
        ({"classes": [("a", 1)]}, {}),
        ({"classes": "abc"}, {}),
        ({"classes": 10}, {}),
        ({"classes": torch.zeros(3)}, {}),
        ({"classes": 3, "class_to_idx": {"a": 1}}, {"class_to_idx": {"a": 1}}),
    ],
    ids=repr,
)
def test_what_is_kept_of_what_a_dataset_says(said, found):
    assert attributes_of(Numbers(**said)) == found
    assert not found or attributes_in(encoded(found)) == found


class Raises(Numbers):
    @property
    def classes(self):
        raise RuntimeError("not yet loaded")


def test_a_property_that_raises_is_left_out():
    assert attributes_of(Raises()) == {}


def test_a_property_of_torchvision(tmp_path):
    dataset = MNIST.__new__(MNIST)  # its files are not needed for what it says of its classes
    assert attributes_of(dataset)["class_to_idx"]["3 - three"] == 3
    assert attributes_of(FakeData(3)) == {}


def test_of_several_datasets_what_all_agree_on():
    one = Numbers(classes=["a", "b"], class_to_idx={"a": 0, "b": 1})
    same = Numbers(classes=("a", "b"), class_to_idx={"b": 1, "a": 0})
    other = Numbers(classes=["a", "b"], class_to_idx={"a": 1, "b": 0})
    both = {"classes": ["a", "b"], "class_to_idx": {"a": 0, "b": 1}}
    assert attributes_of(ConcatDataset([one, same])) == both
    assert attributes_of(ConcatDataset([Subset(one, [0]), ConcatDataset([same, one])])) == both
    assert attributes_of(ConcatDataset([one, other])) == {"classes": ["a", "b"]}
    assert attributes_of(ConcatDataset([one, Numbers()])) == {}
    own = Subset(one, [0])
    own.classes = ["of the subset"]
    assert attributes_of(own) == {"classes": ["of the subset"]}


def names(count, length=9):
    return [f"n{number:0{length - 1}d}" for number in range(count)]


def test_tens_of_thousands_of_classes(tmp_path):
    classes = names(30_000, 30)
    numbers = {name: number for number, name in enumerate(classes)}
    cached = kept(tmp_path / "a.h5", Numbers(classes=classes, class_to_idx=numbers))
    assert (cached.classes, cached.class_to_idx) == (classes, numbers)
    # Beside the index, not in it: what does not ask for them does not read them.
    assert cached.index.user_block == 4096
    assert attributes_of(Numbers(classes=names(300_000, 30))) == {}


TEXTS = st.text(st.characters(codec=None, categories=None), max_size=5)


@settings(deadline=None)
@given(
    st.lists(TEXTS | st.lists(TEXTS, max_size=2).map(tuple), max_size=4),
    st.dictionaries(TEXTS, st.integers(-(2**63), 2**63 - 1), max_size=4),
)
def test_any_names_come_back(classes, numbers):
    found = attributes_of(Numbers(classes=classes, class_to_idx=numbers))
    assert found == {"classes": classes, "class_to_idx": numbers}
    assert attributes_in(encoded(found)) == found


def test_other_classes_than_the_file_was_built_with(tmp_path):
    path = tmp_path / "a.h5"
    kept(path, Numbers(classes=["cat", "dog"], class_to_idx={"cat": 0, "dog": 1}))
    message = (
        "was built from something else: classes: 2 when it was built, 3 now; the first that "
        "differs is 1: dog then, cow now"
    )
    with pytest.raises(CacheError, match=message):
        kept(path, Numbers(classes=["cat", "cow", "dog"]))
    with pytest.raises(CacheError, match=r"class_to_idx: .* differs is cat: 0 then, 1 now"):
        kept(path, Numbers(class_to_idx={"cat": 1, "dog": 0}))
    # A dataset that says nothing of them, and one that says the same, take the file as it is.
    assert kept(path, Numbers()).classes == ["cat", "dog"]
    assert kept(path, Numbers(classes=("cat", "dog"))).classes == ["cat", "dog"]
    new = kept(path, Numbers(classes=["cat", "cow", "dog"]), overwrite=True)
    assert new.classes == ["cat", "cow", "dog"]


def test_joined_shards(tmp_path):
    dataset = Numbers(7, classes=["cat", "dog"], class_to_idx={"cat": 0, "dog": 1})
    for rank in range(3):
        kept(tmp_path / "a.h5", dataset, shard=(rank, 3), wait=False)
    join(tmp_path / "a.h5")
    cached = CachedDataset(tmp_path / "a.h5")
    assert (cached.classes, cached.class_to_idx) == (dataset.classes, dataset.class_to_idx)
    assert verify(tmp_path / "a.h5") == []
    old = cached.shards[1]
    say_less(old)
    join(tmp_path / "a.h5")
    assert CachedDataset(tmp_path / "a.h5").attributes == {}  # one of them says nothing


def test_shards_of_other_classes_are_not_joined(tmp_path):
    for rank, classes in enumerate((["cat", "dog"], ["cat", "cow"])):
        kept(tmp_path / "a.h5", Numbers(classes=classes), shard=(rank, 2), wait=False)
    message = "from different builds: classes: 2 .* differs is 1: dog then, cow now"
    with pytest.raises(CacheError, match=message):
        join(tmp_path / "a.h5")


def test_any_hdf5_reader_finds_them(tmp_path):
    kept(tmp_path / "a.h5", Numbers(classes=["cat", "dog"]))
    with h5py.File(tmp_path / "a.h5") as file:
        assert bytes(file["attributes"][:]) == b'{"classes":["cat","dog"]}'


def test_a_flipped_bit_is_named(tmp_path):
    place = kept(tmp_path / "a.h5", Numbers(classes=["cat", "dog"])).index.attributes
    assert place is not None
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[place.offset + 14] ^= 1
    (tmp_path / "a.h5").write_bytes(data)
    damages = verify(tmp_path / "a.h5")
    assert any("the dataset's classes" in damage.what for damage in damages)


def test_info_shows_them(tmp_path, capsys):
    classes = ["cat", "\x1b[2J", "x" * 90, "dog"]
    numbers = {name: number for number, name in enumerate(classes)}
    kept(tmp_path / "a.h5", Numbers(classes=classes, class_to_idx=numbers))
    cache_info.info(str(tmp_path / "a.h5"))
    shown = capsys.readouterr().out
    assert f"classes: 4 (cat, \\x1b[2J, {'x' * 40}..., ...)" in shown
    assert f"class_to_idx: 4 (cat: 0, \\x1b[2J: 1, {'x' * 40}...: 2, ...)" in shown
    kept(tmp_path / "b.h5", Numbers(classes=[("tench", "Tinca"), ("shark",)]))
    cache_info.info(str(tmp_path / "b.h5"))
    assert "classes: 2 (tench/Tinca, shark)" in capsys.readouterr().out

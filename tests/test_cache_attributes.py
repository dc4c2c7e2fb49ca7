"""`classes` and `class_to_idx` of a dataset are there in its cache, and say if they are others."""

import json
import pickle

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, random_split
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from dataloaders.cache import CachedDataset, join, precompute, verify
from dataloaders.errors import CacheError
from helpers.cached import spoil
from helpers.datasets import Made
from helpers.hostile import say_less
from helpers.photos import write_folder


def numbers(rows=6, **said):
    return Made(lambda index: {"number": index}, rows, **said)


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


def test_what_hdf5_info_and_verify_make_of_them(path, tmp_path, command):
    classes = ["cat", "\x1b[2J", "x" * 90, ("tench", "Tinca")]
    cached = kept(path, numbers(classes=classes, class_to_idx={"cat": 0, "\x1b[2J": 1}))
    with h5py.File(path) as file:
        read = json.loads(bytes(file["attributes"][:]))
    assert read["classes"] == ["cat", "\x1b[2J", "x" * 90, ["tench", "Tinca"]]
    shown = command("cache", "info", path).out
    assert f"classes: 4 (cat, \\x1b[2J, {'x' * 40}..., ...)" in shown
    assert "class_to_idx: 2 (cat: 0, \\x1b[2J: 1)" in shown
    spoil(path, cached.index.attributes.offset + 14)
    assert any("the dataset's classes" in damage.what for damage in verify(path))
    none = kept(tmp_path / "b.h5", numbers())
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
def test_what_is_kept_of_what_a_dataset_says(tmp_path, said, found):
    assert kept(tmp_path / "a.h5", numbers(**said)).attributes == (said if found is None else found)


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
        assert kept(tmp_path / f"{number}.h5", dataset).attributes == found


def test_other_classes_than_the_file_was_built_with(path):
    kept(path, numbers(classes=["cat", "dog"], class_to_idx={"cat": 0, "dog": 1}))
    message = (
        "was built from something else: classes: 2 when it was built, 3 now; the first that "
        "differs is 1: dog then, cow now"
    )
    with pytest.raises(CacheError, match=message):
        kept(path, numbers(classes=["cat", "cow", "dog"]))
    with pytest.raises(CacheError, match=r"class_to_idx: .* differs is cat: 0 then, 1 now"):
        kept(path, numbers(class_to_idx={"cat": 1, "dog": 0}))
    # A dataset that says nothing of them, and one that says the same, take the file as it is.
    assert kept(path, numbers()).classes == ["cat", "dog"]
    assert kept(path, numbers(classes=("cat", "dog"))).classes == ["cat", "dog"]
    new = kept(path, numbers(classes=["cat", "cow", "dog"]), overwrite=True)
    assert new.classes == ["cat", "cow", "dog"]


def test_joined_shards(path, tmp_path):
    names = [f"n{number:029d}" for number in range(3000)]
    dataset = numbers(7, classes=names, class_to_idx={name: n for n, name in enumerate(names)})
    for rank in range(3):
        kept(path, dataset, shard=(rank, 3), wait=False)
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
        kept(tmp_path / "b.h5", numbers(classes=classes), shard=(rank, 2), wait=False)
    message = "from different builds: classes: 2 .* differs is 1: dog then, cow now"
    with pytest.raises(CacheError, match=message):
        join(tmp_path / "b.h5")

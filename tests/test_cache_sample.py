"""A sample taken apart and put together: the same to the bit, or a message that says why not."""

import copy
import io
import pickle
import re
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torchvision import tv_tensors

from dataloaders.cache.sample.leaf import DTYPES, fits, value_of
from dataloaders.cache.sample.sample import column_names, join, leaf_paths, namedtuples_in, split
from dataloaders.errors import CacheError
from helpers.cached import KEYS, SAMPLES, Point, palettes, refused
from helpers.compare import bits


def there_and_back(sample):
    structure, leaves = split(sample)
    return join(structure, [value_of(leaf.kind, leaf.values) for leaf in leaves])


@settings(max_examples=250, deadline=None)
@given(SAMPLES)
def test_a_sample_comes_back_to_the_bit(sample):
    assert bits(there_and_back(sample)) == bits(sample)
    structure, leaves = split(sample)
    assert len(leaf_paths(structure)) == len(leaves)
    for leaf in leaves:
        of = 0 if leaf.kind == "none" else leaf.values.ndim
        assert leaf.values.dtype.str in DTYPES
        assert fits(leaf.kind, leaf.values.dtype.str, of, leaf.values.shape)
        assert fits(leaf.kind, leaf.values.dtype.str, of, None)


@settings(max_examples=250, deadline=None)
@given(palettes(st.none() | st.integers(-2, 300) | st.binary(max_size=300)))
def test_an_image_with_a_palette_comes_back_or_is_refused(image):
    known = image.info.get("transparency")
    try:
        (leaf,) = split(image)[1]
    except CacheError:
        refused(r"mode 'P', which .*PNG does not give its palette", split, image)
        if type(known) is bytes:  # those that Pillow reads as an int, or not at all
            assert len(known) > 256 or re.fullmatch(b"\xff*\0\xff*\n?", known)
        else:
            assert not 0 <= known < 256
        return
    assert (leaf.kind, leaf.pixels) == ("encoded:PNG:P", image.width * image.height)
    back = value_of(leaf.kind, leaf.values)
    assert (type(back), bits(back)) == (Image.Image, bits(image))
    file = Image.open(io.BytesIO(leaf.values.tobytes()))  # as others read it
    assert file.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    back.putpixel((0, 0), 1)  # may be changed
    assert split(image)[1][0].values.tobytes() == leaf.values.tobytes()


def test_a_palette_that_cannot_be():
    image = Image.new("P", (2, 2))
    image.putpalette([1, 2, 3, 4, 5, 6])
    for said in ("", "RGB", "RGB 3", "RGB -1", "RGB 01", "CMYK 1", "RGBA 1"):
        info, file = PngInfo(), io.BytesIO()
        info.add_text("palette", said)
        image.save(file, "PNG", pnginfo=info)
        rule = "what it says of its palette cannot be"
        refused(rule, value_of, "encoded:PNG:P", np.frombuffer(file.getvalue(), np.uint8))
    image.putpalette([1, 2, 3, 4], "RGBA")
    refused(r"mode 'P', .*PNG does not .*numpy\.array\(image\)", split, image)


VIDEO = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 2, 2)


@pytest.mark.parametrize(
    "value",
    [
        *(getattr(tv_tensors, kind)(VIDEO) for kind in ("Image", "Mask", "Video")),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)).data,
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.complex(torch.ones(2), torch.ones(2)).conj().imag,
        torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last),
        np.arange(6)[::-2],
    ],
)
def test_values_that_look_at_memory_in_their_own_way(value):
    wanted = value.detach() if isinstance(value, torch.Tensor) else value
    assert bits(there_and_back(value)) == bits(wanted)


def test_a_namedtuple_can_be_pickled():
    back = there_and_back(Point(1, "a"))
    assert type(back).__name__ == "Point"
    assert type(there_and_back(Point(2, "b"))) is type(back)
    assert namedtuples_in(split([(), Point(1, 2)])[0]) == {("Point", ("x", "y"))}
    assert namedtuples_in(None) == set()
    for again in (pickle.loads(pickle.dumps(back)), copy.deepcopy(back)):
        assert (type(again), again) == (type(back), Point(1, "a"))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (object(), r"sample is of type builtins.object, which a cache does not keep; it keeps te"),
        ({"a": [torch.zeros(1), object()]}, r"sample\['a'\]\[1\] is of type"),
        (OrderedDict(a=1), "OrderedDict"),
        ({("a", 1): 2}, r"key \('a', 1\) of type tuple; a cache keeps keys that are str"),
        ({True: 1}, "key True of type bool"),
        ({2**70: 1}, "64 bits"),
        ({"\ud800": 1}, "without surrogates"),
        (2**63, "int beyond 64 bits; return it as a str"),
        (np.array(["a"]), "array of <U1; a cache keeps arrays of numbers"),
        (np.ma.masked_array([1], [True]), r"a masked array, .*return \.filled\(\)"),
        (torch.zeros(2).to_sparse(), r"torch.sparse_coo; .*call .to_dense\(\)"),
        (torch.zeros(2, device="meta"), r"is on meta; return .cpu\(\)"),
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "nested .* as a list"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "tensor of torch.float8_e4m3fnuz, which"),
        (Image.new("PA", (2, 2)), r"mode 'PA', .*one of 1, L, .*or return numpy.array\(image\)"),
        (
            namedtuple("A", map("x{}".format, range(256)))(*range(256)),
            "that .* up to 255 fields, .*; return a dict",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_kept_is_named(sample, message):
    refused(message, split, sample)


def test_a_sample_without_an_end():
    endless, looped = [], {}
    endless.append(endless)
    looped["a"] = looped
    for sample in (endless, looped):
        refused("nested more than 64 deep", split, sample)
    sample, deep = {}, {"dict": []}
    for _ in range(64):
        sample, deep = {"a": sample}, {"dict": [["a", deep]]}
    assert split(sample) == (deep, [])
    assert leaf_paths(deep) == []
    refused(r"sample(\['a'\]){65} is nested more than 64 deep", split, {"a": sample})
    refused("no container", leaf_paths, {"dict": [["a", deep]]})


def test_names():
    def names(sample):
        return column_names(split(sample)[0])

    assert names(1) == ["sample"]
    assert names((1, "a")) == ["0", "1"]
    assert names({"a": {"b": 1}, "c": (1, Point(1, 2))}) == ["a/b", "c/0", "c/1/x", "c/1/y"]
    assert names({"a": {"b": 1}, "a/b": 1, 1: 1, "1": 1}) == ["a/b", "a%2fb", "1", "1~2"]
    assert names({1: 1, "1": {"x": 2}}) == ["1", "1~2/x"]
    assert names({"1": {"x": 2}, 1: 1, "1~2": 3}) == ["1/x", "1~2", "1%7e2"]
    assert names({".": 1, "..": 2, "": 3, "é\0": 4}) == ["%.", "%..", "%", "é%00"]
    assert len(names({"a" * 5000: 1})[0]) == 200


@settings(max_examples=200, deadline=None)
@given(SAMPLES | st.dictionaries(st.sampled_from(["a", "a~2", 1, "1", "1~2"]) | KEYS, st.just(1)))
def test_no_name_is_in_the_way_of_another(sample):
    names = column_names(split(sample)[0])
    assert len(set(names)) == len(names)
    for name in names:
        assert name
        for part in name.split("/"):
            assert part.strip(". ")
        assert not any(other.startswith(f"{name}/") for other in names)


@pytest.mark.parametrize(
    "structure",
    [
        None, True, "a", 1, -1, [], {}, {"set": []}, {"dict": 1}, {"dict": {}}, {"dict": [["a"]]},
        {"dict": [["a", 0], ["a", 1]]}, {"dict": [[None, 0]]}, {"dict": [[[], 0]]},
        {"list": {"a": 0}}, {"list": [1, 0]}, {"list": [0, 0]}, {"list": [0], "tuple": [0]},
        {"namedtuple": ["a b", []]}, {"namedtuple": ["A", [["x", 0], ["x", 1]]]},
        {"namedtuple": ["A", [["_x", 0]]]}, {"namedtuple": ["A", [["if", 0]]]},
        {"namedtuple": ["A", [["\N{LATIN SMALL LIGATURE FI}", 0], ["fi", 1]]]},
        {"namedtuple": [[], [["x", 0]]]},
        {"namedtuple": ["A", [["x)); import os; ((", 0]]]}, {"namedtuple": ["A"]},
    ],
)  # fmt: skip
def test_a_malformed_structure(structure):
    refused("structure of the samples is malformed", leaf_paths, structure)


def long_names(count):
    """A structure of leaves whose names have 1,024 characters."""
    structure = {"dict": [[f"{number:019}", number] for number in range(count)]}
    for _ in range(5):
        structure = {"dict": [["a" * 200, structure]]}
    return structure


@pytest.mark.parametrize(
    ("make", "most", "message"),
    [
        (lambda count: {"tuple": [*range(count)]}, 10_000, "more than 10000 leaves.*fewer"),
        (long_names, 8192, "more than 8388608 characters, .*; use shorter keys"),
        (
            lambda count: {"list": [{"namedtuple": [f"A{n}", []]} for n in range(count)]},
            1000,
            "namedtuples of more than 1000 sorts",
        ),
        (lambda count: {"namedtuple": ["A", [[f"x{n}", n] for n in range(count)]]}, 255, "255"),
    ],
)
def test_a_structure_has_so_many_leaves_names_and_namedtuples(make, most, message):
    column_names(make(most))
    refused(message, column_names, make(most + 1))


def test_values_that_are_too_many_or_too_deep():
    for shape in ((3, 2**40, 0), (3, 0, 2**60), (3, 2**30, 0)):
        refused("too many lines", value_of, "image:RGB", np.empty(0, "|u1").reshape(shape))
    refused("cannot hold", value_of, "json", np.frombuffer(b"[" * 100_000, "|u1"))

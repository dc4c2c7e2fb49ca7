"""Files that somebody made to do harm: a value or a CacheError, and nothing else ever.

Each is read in this process, to the last row. Python's and NumPy's memory is counted, and pytest's
time limit ends a hang. Damage at random is the fuzzer's: test_fuzz.py.
"""

import copy
import re
import struct

import numpy as np
import pytest
import torch

from dataloaders.cache import CachedDataset, Compressed
from dataloaders.cache.format.block import block_for
from helpers.cached import build, built, mixed, refused, spoil
from helpers.datasets import Made
from helpers.hostile import HEADER, Whole, said_of, seal
from helpers.pictures import smooth

ROWS = 11
CLASSES = {"classes": ["a", ("b", "c")], "class_to_idx": {"a": 0, "b": 1}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a file with every sort of column, a compressed one, one of PNGs, and a joined one."""
    folder = tmp_path_factory.mktemp("whole")
    said = {"failed": [(2, "a"), (5, "b")], "fingerprint": {"f": [1]}, "attributes": CLASSES}
    build(folder / "mixed.h5", mixed(ROWS), **said)
    row = {"image": np.zeros(3000, np.uint8), "text": "ab" * 100}
    build(folder / "zstd.h5", [row] * 400, compress=Compressed("zstd"))
    pictures = Made(lambda n: (smooth(n, 20 + n), np.arange(n), n), 3)
    built(pictures, folder / "png.h5", images="png")
    built(mixed(9), folder / "joined.h5", rows=3, single_file=False)
    return folder


@pytest.fixture(scope="module")
def wholes(folder):
    return {path.stem: Whole(path.read_bytes()) for path in folder.glob("*.h5")}


@pytest.fixture
def whole(wholes):
    return wholes["mixed"]


@pytest.fixture
def read(folder, wholes):
    """What errors say of a file with these bytes; "read" if there are none. Files are replaced."""

    def read(data, name="mixed", **options):
        return "; ".join(sorted(said_of(folder / f"{name}.h5", data, **options))) or "read"

    return read


def put(data, place, new):
    return data[:place] + new + data[place + len(new) :]


def whole_of(path, samples, **said):
    build(path, samples, **said)
    return Whole(path.read_bytes())


def test_truncated(read, whole):
    lengths = {*range(0, 200, 3), *range(0, len(whole.data), 977), whole.block}
    lengths |= {whole.block + near for near in (-1, 1)} | {len(whole.data) - 1}
    lengths |= {HEADER + len(whole.text) + near for near in (-1, 0, 1)}
    for length in sorted(lengths):
        assert re.search("truncated|no cache|no finished cache", read(whole.data[:length])), length


# The index, its digest right, so that the parser is reached


DEEP, WIDE, NAMES = 0, {"tuple": list(range(100_000))}, {"tuple": list(range(9_000))}
for _ in range(200):
    DEEP = {"list": [DEEP]}
for _ in range(50):  # a key stands once in the structure, and in the names of all leaves below it
    NAMES = {"dict": [["\U0001f600" * 150, NAMES]]}
SORTS = {"list": [{"namedtuple": [f"T{n}", []]} for n in range(1001)]}
KINDS = [
    [kind.format("bfloat16"), dimensions]
    for kind in ("array", "tensor::{}", "tv_tensor:Image:{}", "tv_tensor:Mask:{}")
    for dimensions in range(64)
]

# Each is said to be malformed; what it is in particular, only where an accident could do it.
MALFORMED = {
    "mixed": {
        "format": ("HDF5", None, []),
        "rows": (-1, True, 10**30, 12, 1.0, "11"),
        "samples": (5, 12, 10**30),
        "file_bytes": (1 << 40, 5000, -1),
        "structure": (
            None, {"set": []}, {"dict": []}, {"k" * 9000: []}, DEEP, WIDE, NAMES, SORTS,
            {"namedtuple": ["T" * 9000 + "!", []]}, {"namedtuple": ["T", [["x):0#", 0]]]},
        ),
        "columns": ({}, [], None),
        "columns.0": ([], None),
        "columns.0.name": ("photo", 3),
        "columns.0.dtype": ("|O", "<f8", "<f16", None),
        "columns.0.variants": (
            [["pickle", 3]], [], [["image:RGB", 3]] * 2, [["image:RGB", 65]],
            [["image:RGB", 3], ["none", 0]],
        ),
        "columns.0.shape": (
            [6, 5, 3], [3, 6, 6], [3, 2**47, 0], [1] * 31, [1] * 32, [2**48] * 100_000,
        ),
        "columns.2.variants": ([["array", 2]], []),
        "columns.5.variants": (KINDS, KINDS[:255]),
        "columns.0.dimensions": (2, None),
        "columns.0.values": ([0, 990], [2**48, 990], [2**63, 990], [4096], None),
        "columns.0.values.1": (2**48, 989),
        "columns.0.codes": ([4096, 11],),
        "columns.0.offsets": ([4096, 12],),
        "columns.1.shapes": (None,),
        "columns.3.codes": (None, [4096, 10]),
        "columns.10.dtype": ("|O",),  # of which all rows are None
        "columns.11.dtype": ("|O", "|V4"),
        "checksums.values.1": (32, 0),
        "checksums.block": (1,),
        "checksums.digest": (None,),
        "attributes": ([], [4096, 2**40]),
        "failed.rows": ([4096, 100],),
        "fingerprint": ([],),
        "head": ([1], "a"),
        "more": (1,),
        "user_block": (4096,),
        "shards": ([],),
    },
    "zstd": {
        "columns.0.values": ([4096, 1_200_000], [0, 1_199_999], 7),
        "columns.0.packing": (None, []),
        "columns.0.packing.codec": ("blosc", None),
        "columns.0.packing.piece": (0, 3001, 264_000, 261_000, 3000),
        "columns.0.packing.pieces": ([0, 0], [0, 40]),
        "columns.0.packing.more": (5,),
    },
    "png": {
        "columns.0.most_pixels": (0, "a", 2**60),
        "columns.0.most_values": (-1,),
        "columns.1.most_pixels": (9,),
        "columns.2.most_values": (1,),
        "columns.1.most": (1,),
    },
    "joined": {
        "format": ("dataloaders cache", "dataloaders cache, torn"),
        "shards": ([], {}, [None] * 3, [{}] * 70_000),
        "shards.0.name": ("joined.parts/00003.h5", 3),
        "shards.1.name": (
            "", ".", "..", "../a.h5", "/etc/passwd", "c/b/a.h5", "../b/a.h5", "a/../b.h5", "/a.h5",
            "a/", "../..", "a\\b.h5", "a\0.h5", "a\n.h5", "\ud800", "é" * 128, "a" * 256,
            "\x1b[2J.h5", "\u202ea.h5",
        ),
        "shards.0.rows": (2, -1),
        "shards.0.samples": (2, 4),
        "shards.0.identity": ("F" * 32, ""),
        "shards.0.more": (1,),
        "rows": (10,),
        "columns.2.values.1": (8,),
        "columns.2.dtype": ("<i4",),
        "structure.dict.2.0": ("other",),
    },
}  # fmt: skip
SAID = [
    ("mixed", "file_bytes", 1 << 40, "had 1099511627776 when it was built, so it is truncated"),
    ("mixed", "columns.11.values", [4096, 0], r"malformed: column 'empty' is said to stand at"),
    ("mixed", "columns.0.shape", [6, 5, 3], r"variants of column 'image' is \(\('image:RGB', 3\)"),
    ("mixed", "columns.2.most_values", 1, "malformed: most_values of column 'label' is 1, which"),
    ("zstd", "columns.0.packing.piece", 0, "malformed: packing of column 'image' is Packing"),
    ("zstd", "columns.0.values", [4096, 1_200_000], "malformed: values of column 'image' is Ext"),
    ("joined", "columns.2.values", [4096, 9], "malformed: values of column 'label' is Extent"),
    ("joined", "shards.0.name", "é b%/a.h5", "é b%/a.h5 of the cache .* is missing"),
    ("joined", "shards.0.name", "none.h5", "none.h5 of the cache .* is missing"),
    ("joined", "shards.0.name", "n" * 255, "of the cache .* is missing"),
    ("joined", "shards.0.name", "joined.h5", "shard joined.h5 of the cache .* is not the one"),
    *(("joined", "shards.0.file_bytes", size, "when it was joined") for size in (64, 2**48)),
    ("joined", "shards.0.identity", "f" * 32, "is not the one that was joined"),
    ("joined", "columns.0.variants", [["image:YCbCr", 3]], "has other values in column 'image'"),
    ("joined", "columns.11.shape", [3, 0], "has other values in column 'empty'"),
    ("joined", "columns.11.dtype", "<f4", "has other values in column 'empty'"),
]


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, ways in MALFORMED.items() for way in ways]
)
def test_an_index_that_cannot_be_is_malformed(read, wholes, name, way):
    for value in MALFORMED[name][way]:
        said = read(wholes[name].changed({way: value}), name)
        assert "the index of the cache" in said, (value, said)
        assert "is malformed: " in said, (value, said)
        assert len(said) < 600


@pytest.mark.parametrize(("name", "way", "value", "message"), SAID)
def test_what_is_wrong_with_parts_and_lengths_is_said(read, wholes, name, way, value, message):
    assert re.search(message, read(wholes[name].changed({way: value}), name))


def test_columns_that_overlap(read, whole):
    place, size = whole.fields["columns"][2]["values"]
    for values in (
        {"columns.3.values": [place, size]},
        {"columns.3.values": [place + 8 * ROWS - 1, size]},
        {"checksums.values.0": place},
    ):
        assert "overlap" in read(whole.changed(values))


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"null", b"[]", b"{}", b"1", b'"a"', b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 100_000, b'{"rows":1,"rows":2}', b"NaN", b"[1e999]", b"9" * 1_000_000,
        b"-" + b"9" * 5000, b'"\\ud800"', b"[" + b"{}," * 100_000 + b"{}]",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_texts_that_are_no_index(read, whole, text):
    assert "malformed" in read(whole.with_text(text))


def test_other_texts_that_are_no_index(read, whole):
    longest = b"[]".ljust(8 << 20)
    for text, message in (
        (whole.text.replace(b'"rows":11,', b'"rows":11,"rows":11,'), "a key occurs twice"),
        (longest, "it is no object"),
        (longest + b" ", "truncated or damaged"),
    ):
        assert message in read(whole.with_text(text))


@pytest.mark.parametrize("way", ["rows", "fingerprint.f"])
def test_an_index_as_deep_as_json_reads_it(read, whole, way):
    """Deeper than any message or comparison could follow it: `repr` is nearer to Python's limit."""
    for depth in (290, 297, 298, 299, 310, 900):
        deep = 1
        for _ in range(depth):
            deep = [deep]
        said = read(whole.changed({way: deep}))
        is_deep = "nested more than 300 deep" in said
        assert is_deep == (depth > (298 if way == "rows" else 297))
        assert is_deep or "malformed" in said or said == "read"


def test_a_fingerprint_of_anything_is_only_shown(read, folder, whole):
    for value in (-1, "a", [[[]]], 10**39, "\x1b]0;x\x07\ud800" + "y" * 300):
        assert read(whole.changed({"fingerprint.f": value})) == "read"
    rule = r"f: \\x1b\]0;x\\x07\\ud800y+\.\.\. when"
    error = refused(rule, CachedDataset, folder / "mixed.h5", expect={"f": 1})
    assert str(error).isprintable()
    assert read(whole.data) == "read"
    CachedDataset(folder / "mixed.h5", expect={"f": (1,)})  # as JSON has it


def test_rows_by_the_billion_that_take_no_room(path, read):
    """Nothing in the file bounds the rows of samples that are always the same empty thing."""
    one = np.zeros((2, 3, 0))
    for samples, values, message in (
        ([None] * 2, {"rows": 2**48, "samples": 2**48}, "read"),
        ([None] * 2, {"rows": 2**48 + 1, "samples": 2**48 + 1}, "malformed"),
        ([None] * 2, {"structure": None, "columns": []}, "structure is missing"),
        ([one] * 2, {"columns.0.shape": [2**48, 1, 0]}, "malformed: shape of"),
        ([one] * 2, {"columns.0.shape": [2**47, 1, 0]}, "read"),
        ([one], {"columns.0.shape": [2**48, 1, 0]}, "read"),
        ([one], {"columns.0.shape": [2**48, 2**48, 0]}, "malformed: shape of"),
    ):
        said = read(whole_of(path, samples).changed(values))
        assert said == message if message == "read" else message in said


def test_as_many_dimensions_and_kinds_as_a_column_may_have(path):
    """The index makes one row of four."""
    rows = [np.zeros((1,) * 32, np.uint16), torch.zeros((1,) * 32, dtype=torch.bfloat16)] * 2
    # With room for all kinds, where the block ends.
    whole = whole_of(path, rows, fingerprint={"room": "-" * 8192})
    for kinds, dimensions, is_malformed in (
        ([["array", 64], ["array", 0]], 64, False),
        ([["array", 65], ["array", 0]], 65, True),
        (KINDS[:255], 63, False),
        (KINDS[:256], 63, True),
    ):
        said = {"variants": kinds, "dimensions": dimensions, "shapes.1": dimensions}
        said |= {"values.1": 1, "offsets.1": 2, "codes.1": 1}
        said = {f"columns.0.{name}": each for name, each in said.items()}
        path.write_bytes(whole.changed({"rows": 1, "samples": 1, **said}))
        if is_malformed:
            refused("is malformed: variants of column", CachedDataset, path)
        else:
            assert len(CachedDataset(path)) == 1


@pytest.mark.parametrize(
    ("length", "block", "version", "message"),
    [
        (10, 4096, 5, "has version 5 of the cache format, and this package reads versions 3 to 4"),
        (10, 4096, 2, "has version 2 of"),
        (10, 4096, 3, "the index of the cache .* is damaged"),
        (2**63, 2**64 - 1, 4, "truncated or damaged"),
        (4033, 4096, 4, "truncated or damaged"),
        (8 << 20, 1 << 30, 4, "truncated or damaged"),
        (10, 4096, 4, "the index of the cache .* is damaged"),
    ],
)
def test_headers(read, whole, length, block, version, message):
    start = seal(b"", 64, version)[:16] + struct.pack("<QQ", length, block) + bytes(32)
    assert re.search(message, read(start + whole.data[HEADER:]))


def test_a_block_that_is_no_power_of_two(path, read):
    whole = whole_of(path, [None])
    assert [block_for(text) for text in (0, 4032, 4033, 8 << 20)] == [4096, 4096, 8192, 16 << 20]
    for block in (2048, 4095, 4097, 12288):
        said = read(seal(whole.text, block) + whole.body)
        assert f"its block has {block} bytes" in said
    assert read(seal(whole.text.ljust(4096 - HEADER), 4096) + whole.body) == "read"  # it fits


def test_shards_in_another_order_and_other_counts_and_names(path, read, wholes, folder):
    whole = wholes["joined"]
    other = built(mixed(9), folder / "b.joined", rows=3, single_file=False)
    shard = {"name": "b.joined", "rows": 9, "samples": 9, "identity": other.identity}
    shard["file_bytes"] = other.index.file_bytes
    counts = {
        f"shards.{n}.{of}": rows for n, rows in enumerate((1, 5, 3)) for of in ("rows", "samples")
    }
    for values, message in (
        ({"shards": [shard]}, "b.joined is itself a joined cache"),
        (counts, "has 3 rows, and 1 when it was joined"),
        # A joined file may do that: they are rows, in another order.
        ({"shards": whole.fields["shards"][::-1]}, "read"),
        ({"structure.dict.2.0": "other", "columns.2.name": "other"},
         "has samples that are built differently"),
    ):  # fmt: skip
        said = read(whole.changed(values), "joined")
        assert said == message if message == "read" else message in said
    most = 1 << 48
    for fingerprint, first in (
        ({"first": most}, most),
        ({"shard": "1 of 2", "length": most}, most // 2),
        ({"shard": "2 of 3", "length": 10}, 6),
        *((nothing_of_a_shard, 0) for nothing_of_a_shard in (
            {"first": -1}, {"first": True}, {"first": most + 1}, {"shard": "1 of 3"},
            {"shard": "3 of 3", "length": 9}, {"shard": "1 of 0", "length": 9},
            {"shard": "1 of 3", "length": -9}, {"shard": "1 of 3", "length": True},
            {"shard": "1 of 2", "length": most + 1}, {"shard": "9" * 5000 + " of 3", "length": 9},
        )),
    ):  # fmt: skip
        build(path, [1], failed=[(1, "b")], fingerprint=fingerprint)
        assert CachedDataset(path).failed == [(first + 1, "b")]


# Arrays in the data that say where rows are


@pytest.mark.parametrize(
    ("array", "row", "value", "message"),
    [
        ("name offsets", 4, 2**63, r"row 3: it has values \d+ to 9223372036854775808, of"),
        ("name offsets", 4, 0, r"row 3: it has values \d+ to 0, of"),
        ("boxes shapes", 2, 2**64 - 1, r"row 1: its shape is \[18446744073709551615, 4\]"),
        ("boxes shapes", 0, 2**62, r"row 0: its shape is \[4611686018427387904, 4\], of 0 values"),
        ("either codes", 3, 2, r"row 3: it is of kind number 2, of 2"),
        ("score codes", 3, 255, r"row 3: it is of kind number 255, of 2"),
    ],
)
def test_a_row_that_leads_elsewhere(read, whole, array, row, value, message):
    name, part = array.split()
    (column,) = (each for each in whole.fields["columns"] if each["name"] == name)
    width = 1 if part == "codes" else 8
    place = column[part][0] + width * row
    said = read(put(whole.data, place, value.to_bytes(width, "little")))
    assert re.search(message, said), said
    assert f"column '{name}'" in said
    assert "the file is damaged: find where with verify()" in said


def test_more_of_a_shape_than_there_are_dimensions(path, read):
    whole = whole_of(path, [np.zeros((2, 2)), np.zeros(3)])
    place = whole.fields["columns"][0]["shapes"][0] + 24
    assert "row 1: its shape is [3, 1], of 1 dimensions" in read(put(whole.data, place, b"\1"))


def test_failed_samples_that_are_no_list(read, whole):
    place, size = whole.fields["failed"]["messages"]
    for text in (b"[" * size, b"{}", b'["a"]', b"[1, 2]", b"\xff" * size, b'["a","b","c"]'):
        said = read(put(whole.data, place, text[:size].ljust(size)))
        assert "the list of failed samples" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "is no object of classes and class_to_idx"),
        (b'{"classes":{}}', "classes is no list"),
        (b'{"classes":[["a",[]]]}', "a class is \\[\\], and no text"),
        (b'{"class_to_idx":{"a":9223372036854775808}}', "no number of 64 bits"),
        (b'{"classes":' + b"[" * 40, "is no JSON"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_classes_is_said(path, whole, text, message):
    offset, size = whole.fields["attributes"]
    assert len(text) <= size
    spoil(path, offset, text.ljust(size), whole.data)
    message = f"dataset's classes is damaged.*{message}.*; delete it"
    refused(message, lambda: CachedDataset(path).attributes)


def test_a_bool_is_true_or_false(path):
    for column in whole_of(path, [(np.zeros(4, bool), True)]).fields["columns"]:
        place, size = column["values"]
        spoil(path, place, b"\x02" * size)
    array, flag = CachedDataset(path)[0]
    assert array.tobytes() == b"\x01\x01\x01\x01"
    assert flag is True


def test_a_row_of_many_values_takes_no_more_memory_than_there_is_room_for(read, wholes):
    """All pieces of the texts are the first one, and row 0 has all of them: it is too long."""
    whole = copy.copy(wholes["zstd"])
    fields, data = copy.deepcopy(whole.fields), bytearray(whole.data)
    column = fields["columns"][1]
    table, _ = fields["columns"][0]["packing"]["pieces"]
    size = (1 << 28) + 1
    count = -(-size // (1 << 18))
    data += bytes(-len(data) % 8)
    column["packing"] |= {"piece": 1 << 18, "pieces": [len(data), 2 * count]}
    data += data[table : table + 16] * count
    column |= {"shape": None, "values": [0, size], "offsets": [len(data), 401]}
    column |= {"variants": [["bytes", 1]], "dimensions": 1}
    data += struct.pack("<401Q", 0, *[size] * 400)
    blocks = -(-(len(data) - whole.block) // (1 << 16))
    fields["checksums"]["values"] = [len(data), blocks]
    data += bytes(4 * blocks)
    fields["file_bytes"] = len(data)
    whole.data, whole.body = bytes(data), bytes(data[whole.block :])
    said = read(whole.with_fields(fields), "zstd", rows=[0, 7, 399], most=8 << 20)
    assert "more than a compressed row may" in said

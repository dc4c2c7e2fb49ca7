"""Files that somebody made to do harm: a value or a CacheError, and nothing else ever.

Each is read in this process, to the last row. Python's and NumPy's memory is counted, the
addresses that the parser lets through are checked, and pytest's time limit ends a hang.
"""

import copy
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders.cache import CachedDataset, verify
from dataloaders.errors import CacheError
from helpers import hostile
from helpers.cached import build, mixed, spoil
from helpers.hostile import HEADER, Whole, said_of, seal

ROWS = 11

relaxed = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.h5"
    classes = {"classes": ["a", ("b", "c")], "class_to_idx": {"a": 0, "b": 1}}
    failed = [(2, "a"), (5, "b")]
    build(path, mixed(ROWS), failed=failed, fingerprint={"f": [1]}, attributes=classes)
    return Whole(path)


def read(path, data):
    return "; ".join(sorted(said_of(path, data))) or "read"


def test_the_file_that_nobody_spoilt(tmp_path, whole):
    assert read(tmp_path / "a.h5", whole.data) == "read"
    assert read(tmp_path / "a.h5", whole.with_fields(whole.fields)) == "read"


def test_truncated(tmp_path, whole):
    lengths = {*range(0, 200, 3), *range(0, len(whole.data), 977), whole.index.user_block}
    lengths |= {whole.index.user_block + near for near in (-1, 1)} | {len(whole.data) - 1}
    lengths |= {HEADER + len(whole.text) + near for near in (-1, 0, 1)}
    for length in sorted(lengths):
        said = read(tmp_path / "a.h5", whole.data[:length])
        assert said != "read"
        assert any(word in said for word in ("truncated", "no cache", "no finished cache"))


@relaxed
@given(st.data())
def test_bytes_changed_anywhere(tmp_path, whole, data):
    spoilt = bytearray(whole.data)
    for _ in range(data.draw(st.integers(1, 20))):
        spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    read(tmp_path / "a.h5", bytes(spoilt))


# The index, its digest right, so that the parser is reached


NUMBERS = st.sampled_from(hostile.NUMBERS) | st.integers(0, 60_000)


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        ("format", "HDF5", "format is 'HDF5'"),
        ("rows", -1, "rows is -1, and no whole number from 0"),
        ("rows", True, "rows is True"),
        ("rows", 1.0, "rows is 1.0"),
        ("rows", 10**30, "rows is"),
        ("rows", 12, "values has .* values, and should have"),
        ("rows", 0, "values has .* values, and should have"),
        ("samples", 5, "samples is 5, and no whole number from 11"),
        ("samples", 12, "2 samples were left out, of 1"),
        ("file_bytes", 1 << 40, "so it is truncated"),
        ("structure", None, "structure is missing"),
        ("structure", {"set": []}, "a container of kind 'set'"),
        ("structure", {"dict": []}, "structure has 0 leaves, and there are 12 columns"),
        ("columns", {}, "columns is no list"),
        ("columns.0", [], "column 0 is no object"),
        ("columns.0.name", "photo", "column 'image' is named 'photo'"),
        ("columns.0.dtype", "|O", "column 'image' has dtype '|O'"),
        ("columns.0.dtype", "<f8", "cannot hold 'image:RGB' with 3 dimensions in <f8"),
        ("columns.0.variants", [["pickle", 3]], "cannot hold 'pickle'"),
        ("columns.0.variants", [], "no, too many or twice the same variants"),
        ("columns.0.variants", [["image:RGB", 3]] * 2, "twice the same variants"),
        ("columns.0.shape", [6, 5, 3], "cannot hold 'image:RGB'"),
        ("columns.0.shape", [3, 6, 6], "values has 990 values, and should have 1188"),
        ("columns.0.shape", [3, 2**47, 0], "too many values"),
        ("columns.0.shape", [1] * 40, "40 dimensions, of at most 31"),
        ("columns.0.dimensions", 2, "has 2 dimensions, and its variants do not"),
        ("columns.0.values", [0, 990], "is said to stand at bytes 0 to 990, outside"),
        ("columns.0.values", [2**48, 990], "outside"),
        ("columns.0.values", [2**63, 990], "values is 9223372036854775808"),
        ("columns.0.values", [-8, 990], "values is -8"),
        ("columns.0.values", [4096], "is no list of 2"),
        ("columns.0.values.1", 2**48, "values, and should have 990"),
        ("columns.0.codes", [4096, 11], "codes should not be there"),
        ("columns.0.offsets", [4096, 12], "offsets should not be there"),
        ("columns.1.shapes", None, "shapes is no list"),
        ("columns.3.codes", None, "codes is no list"),
        ("columns.11.values", [4096, 0], "has no values, and a place"),
        ("checksums.values.1", 32, "values has 32 values, and should have 1"),
        ("checksums.block", 1, "checksums.block is 1"),
        ("checksums.digest", None, "checksums.digest is None, and no text"),
        ("attributes", [], "attributes is no list of 2"),
        ("attributes", [4096, 2**40], "classes is said to stand at"),
        ("failed.rows", [4096, 100], "100 samples were left out, of 2"),
        ("fingerprint", [], "fingerprint is no object"),
        ("head", [1], "head is 1, and no text"),
        ("more", 1, "the index lacks, or should not have, 'more'"),
        ("structure", {"k" * 9000: []}, "structure of the samples is malformed"),
        ("structure", {"namedtuple": ["T" * 9000 + "!", []]}, "of the samples is malformed"),
        ("structure", {"namedtuple": ["T", [["x):0#", 0]]]}, "of the samples is malformed"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, whole, way, value, message):
    said = read(tmp_path / "a.h5", whole.changed({way: value}))
    assert re.search(message, said), said
    assert "malformed" in said
    assert len(said) < 600


def test_columns_that_overlap(tmp_path, whole):
    place = whole.fields["columns"][2]["values"]
    for way, shift in (("columns.3.values", 0), ("columns.3.values", 8 * ROWS - 1)):
        said = read(tmp_path / "a.h5", whole.changed({way: [place[0] + shift, place[1]]}))
        assert "overlap" in said
    said = read(tmp_path / "a.h5", whole.changed({"checksums.values.0": place[0]}))
    assert "overlap" in said


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"null", b"[]", b"{}", b"1", b'"a"', b"\xff\xfe", b"[" * 100_000,
        b'{"a":' * 100_000, b'{"rows":1,"rows":2}', b"NaN", b"[1e999]", b"9" * 1_000_000,
        b"-" + b"9" * 5000, b'"\\ud800"', b"[" + b"{}," * 100_000 + b"{}]",
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_texts_that_are_no_index(tmp_path, whole, text):
    assert "malformed" in read(tmp_path / "a.h5", whole.with_text(text))


def test_a_key_that_occurs_twice(tmp_path, whole):
    text = whole.text.replace(b'"rows":11,', b'"rows":11,"rows":11,')
    assert text != whole.text
    assert "a key occurs twice" in read(tmp_path / "a.h5", whole.with_text(text))


@pytest.mark.parametrize("way", ["rows", "fingerprint.f"])
def test_an_index_as_deep_as_json_reads_it(tmp_path, whole, way):
    """Deeper than any message or comparison could follow it: `repr` is nearer to Python's limit."""
    for depth in (290, 297, 298, 299, 300, 301, 310, 900):
        deep = 1
        for _ in range(depth):
            deep = [deep]
        said = read(tmp_path / "a.h5", whole.changed({way: deep}))
        is_deep = "nested more than 300 deep" in said
        assert is_deep or depth <= 300
        assert is_deep or "malformed" in said or said == "read"


def test_more_of_a_shape_than_there_are_dimensions(tmp_path):
    index = build(tmp_path / "a.h5", [np.zeros((2, 2)), np.zeros(3)])
    assert index.columns[0].shapes is not None
    spoilt = bytearray((tmp_path / "a.h5").read_bytes())
    spoilt[index.columns[0].shapes.offset + 24] = 1
    said = read(tmp_path / "b.h5", bytes(spoilt))
    assert "row 1: its shape is [3, 1], of 1 dimensions" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is no JSON"),
        (b"{}", "is no object of classes and class_to_idx"),
        (b'{"head":1}', "is no object of"),
        (b'{"classes":{}}', "classes is no list"),
        (b'{"classes":[["a",[]]]}', "a class is \\[\\], and no text"),
        (b'{"class_to_idx":[]}', "class_to_idx is no object"),
        (b'{"class_to_idx":{"a":true}}', "no number of 64 bits"),
        (b'{"class_to_idx":{"a":9223372036854775808}}', "no number of 64 bits"),
        (b'{"classes":' + b"[" * 40, "is no JSON"),
        (b'{"class_to_idx":{"a":1,"a":2}}', "a key occurs twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_classes_is_said(tmp_path, whole, text, message):
    offset, size = whole.index.attributes
    assert len(text) <= size
    spoil(tmp_path / "a.h5", offset, text.ljust(size), whole.data)
    with pytest.raises(CacheError, match=f"dataset's classes is damaged.*{message}"):
        _ = CachedDataset(tmp_path / "a.h5").attributes


@pytest.mark.parametrize("value", [-1, "a", [[[]]], 10**39])
def test_a_fingerprint_of_anything_is_only_shown(tmp_path, whole, value):
    assert read(tmp_path / "a.h5", whole.changed({"fingerprint.f": value})) == "read"


def test_a_structure_that_is_deep_or_wide(tmp_path, whole):
    deep = 0
    for _ in range(200):
        deep = {"list": [deep]}
    assert "malformed" in read(tmp_path / "a.h5", whole.changed({"structure": deep}))
    fields = {**whole.fields, "structure": {"tuple": list(range(100_000))}}
    fields["file_bytes"] = len(whole.with_fields(fields))
    said = read(tmp_path / "a.h5", whole.with_fields(fields))
    assert "more than 10000 leaves" in said


def header(length, block, version=3):
    return b"\x89DLCACHE\r\n\x1a\n" + version.to_bytes(4, "little") + length.to_bytes(
        8, "little"
    ) + block.to_bytes(8, "little") + bytes(32)  # fmt: skip


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (
            header(10, 4096, 5),
            "has version 5 of the cache format, and this package reads versions 3 to 4",
        ),
        (header(2**63, 2**64 - 1), "truncated or damaged"),
        (header(4033, 4096), "truncated or damaged"),
        (header(8 << 20, 1 << 30), "truncated or damaged"),
        (header(10, 4096), "the index of the cache .* is damaged"),
    ],
)
def test_headers(tmp_path, whole, start, message):
    assert re.search(message, read(tmp_path / "a.h5", start + whole.data[HEADER:]))


@pytest.mark.parametrize("block", [64, 2048, 4097, 8191])
def test_a_block_that_is_no_power_of_two(tmp_path, whole, block):
    text = whole.text if block > len(whole.text) + HEADER else b"{}"
    said = read(tmp_path / "a.h5", seal(text, max(block, 4096))[:64] + whole.data[64:])
    assert said != "read"
    said = read(tmp_path / "a.h5", seal(text, block) + whole.data[whole.index.user_block :])
    assert said != "read"


# Arrays in the data that say where rows are


def arrays_of(whole):
    """Column and part, place, values and their size, of offsets, shapes and codes."""
    return [
        (f"{column.name} {part}", extent.offset, extent.size, np.dtype(dtype).itemsize)
        for column in whole.index.columns
        for part, dtype, extent in column.parts()
        if part != "values"
    ]


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
def test_a_row_that_leads_elsewhere(tmp_path, whole, array, row, value, message):
    spoilt = bytearray(whole.data)
    ((place, width),) = [(p, w) for name, p, _, w in arrays_of(whole) if name == array]
    spoilt[place + width * row : place + width * (row + 1)] = value.to_bytes(width, "little")
    said = read(tmp_path / "a.h5", bytes(spoilt))
    assert re.search(message, said), said
    assert f"column '{array.split()[0]}'" in said
    assert "the file is damaged: find where with verify()" in said


def test_failed_samples_that_are_no_list(tmp_path, whole):
    assert whole.index.failed is not None
    place, size = whole.index.failed[1]
    for text in (b"[" * size, b"{}", b'["a"]', b"[1, 2]", b"\xff" * size, b'["a","b","c"]'):
        spoilt = bytearray(whole.data)
        spoilt[place : place + size] = text[:size].ljust(size)
        assert "the list of failed samples" in read(tmp_path / "a.h5", bytes(spoilt))


def test_a_bool_is_true_or_false(tmp_path):
    index = build(tmp_path / "a.h5", [(np.zeros(4, bool), True)])
    data = bytearray((tmp_path / "a.h5").read_bytes())
    for column in index.columns:
        place, size = column.values
        data[place : place + size] = b"\x02" * size
    (tmp_path / "b.h5").write_bytes(data)
    array, flag = CachedDataset(tmp_path / "b.h5")[0]
    assert array.tobytes() == b"\x01\x01\x01\x01"
    assert flag is True


def test_rows_by_the_billion_that_take_no_room(tmp_path):
    """Nothing in the file bounds the rows of samples that are always the same empty thing."""
    build(tmp_path / "a.h5", [None, None])
    spoilt = Whole(tmp_path / "a.h5")
    fields = copy.deepcopy(spoilt.fields)
    fields["rows"] = fields["samples"] = 2**48
    assert read(tmp_path / "b.h5", spoilt.with_fields(fields)) == "read"
    fields["rows"] = fields["samples"] = 2**48 + 1
    assert "malformed" in read(tmp_path / "b.h5", spoilt.with_fields(fields))


# What the fuzzer found, and what was found beside it


def test_names_that_are_long_in_each_of_many_leaves(tmp_path, whole):
    """A key stands once in the structure, and in the names of all leaves below it."""
    structure = {"tuple": list(range(9_000))}
    for _ in range(50):
        structure = {"dict": [["\U0001f600" * 150, structure]]}
    said = read(tmp_path / "a.h5", whole.changed({"structure": structure}))
    assert "the names of the columns have more than" in said


def test_namedtuples_of_one_file_leave_room_for_those_of_the_next(tmp_path, whole):
    for start in (0, 900, 1800):
        names = [{"namedtuple": [f"T{start + n}", []]} for n in range(900)]
        assert "has 0 leaves" in read(
            tmp_path / "a.h5", whole.changed({"structure": {"list": names}})
        )
    assert read(tmp_path / "a.h5", whole.data) == "read"
    too_many = {"list": [{"namedtuple": [f"T{n}", []]} for n in range(1001)]}
    said = read(tmp_path / "a.h5", whole.changed({"structure": too_many}))
    assert "namedtuples of more than 1000 sorts" in said


def test_names_are_shown_in_part(tmp_path):
    """Messages stay short, whatever the keys are."""
    build(tmp_path / "a.h5", [{f"{n}" + "k" * 190: {"k" * 190: ["x", n]}} for n in (1, 1)])
    spoil(tmp_path / "a.h5", CachedDataset(tmp_path / "a.h5").columns[0].values.offset)
    (damage,) = verify(tmp_path / "a.h5")
    assert len(damage.what) < 200
    with pytest.raises(CacheError, match="kkk") as caught:
        CachedDataset(tmp_path / "a.h5")[0]
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-8-sig"])
def test_json_is_utf8(tmp_path, encoding):
    """json itself guesses the encoding of bytes, and imports what decodes it."""
    index = build(tmp_path / "a.h5", [["a" * 28]], failed=[(1, "b" * 64)])
    data = bytearray((tmp_path / "a.h5").read_bytes())
    for place, size in (index.columns[0].values, index.failed[1]):
        data[place : place + size] = ("[1]" + " " * size).encode(encoding)[:size]
    path = tmp_path / "b.h5"
    path.write_bytes(data)
    cached = CachedDataset(path)
    with pytest.raises(CacheError, match="cannot hold"):
        cached[0]
    with pytest.raises(CacheError, match="the list of failed samples"):
        _ = cached.failed


def test_a_fingerprint_is_shown_as_text(tmp_path, whole):
    (tmp_path / "a.h5").write_bytes(
        whole.changed({"fingerprint.f": "\x1b]0;x\x07\ud800" + "y" * 300})
    )
    with pytest.raises(CacheError, match=r"f: \\x1b\]0;x\\x07\\ud800y+\.\.\. when") as caught:
        CachedDataset(tmp_path / "a.h5", expect={"f": 1})
    assert str(caught.value).isprintable()

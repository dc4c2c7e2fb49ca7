"""A cache joined of shards: the rows of all of them, for this package and for HDF5 alike.

And files that somebody made to do harm: a value or a CacheError, and nothing else ever.
"""

import os
import pickle
import re
import shutil
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.cache import CachedDataset, join, merge, verify
from dataloaders.errors import CacheError
from helpers.cached import build, datasets, mixed, spoil
from helpers.compare import bits
from helpers.hostile import HEADER, Whole, said_of


def part_path(path, first):
    return path.with_suffix(".parts") / f"{first:05d}.h5"


def build_part(path, first, rows, of, **said):
    """A part that begins with sample ``first`` of ``of``."""
    path.with_suffix(".parts").mkdir(exist_ok=True)
    fingerprint = {"length": of, **said.pop("fingerprint", {})}
    if len(rows) < of:
        fingerprint["first"] = first
    build(part_path(path, first), rows, fingerprint=fingerprint, **said)


def joined(folder, samples, of, name="a.h5", **options):
    """The index of a file that joins these samples as so many parts."""
    ends = [len(samples) * rank // of for rank in range(of + 1)]
    for first, end in pairwise(ends):
        if end > first or not samples:
            build_part(folder / name, first, samples[first:end], len(samples), **options)
    return join(folder / name)


def shards(folder):
    return sorted((folder / "a.parts").glob("*.h5"))


def all_bits(samples):
    return [bits(sample) for sample in samples]


# The same rows as one file's


def test_rows_are_read_in_every_way(tmp_path):
    wanted = all_bits(mixed(30))
    index = joined(tmp_path, mixed(30), 4)
    assert (index.rows, index.samples, len(index.shards)) == (30, 30, 4)
    (tmp_path / "link.h5").symlink_to(tmp_path / "a.h5")
    cached = CachedDataset(tmp_path / "link.h5")
    assert bits(cached[-1]) == wanted[-1]
    assert all_bits(cached[5:25:7]) == wanted[5:25:7]
    rows = np.random.default_rng(4).integers(-30, 30, 50).tolist()
    assert all_bits(cached.__getitems__(rows)) == [wanted[row] for row in rows]
    assert all_bits(pickle.loads(pickle.dumps(cached))) == wanted
    assert cached.shards == tuple(shards(tmp_path))
    assert str(tmp_path).encode() not in (tmp_path / "a.h5").read_bytes()
    with pytest.raises(IndexError, match="row 30 of a cache of 30 rows"):
        cached[30]


MIXED_SHARDS = [  # fixed in each shard, of other shapes, kinds and dimensions; and None in one
    *[(np.full((2, 3), 1.5), np.uint8(row), "ab", None) for row in range(2)],
    *[(None, None, "ab", None)] * 2,
    *[(np.full((4, 1), 2.5), np.full(3, row, np.uint8), "cd", None) for row in range(2)],
    *[(None if row else np.full((2, 3), 3.5), None, "", None) for row in range(2)],
]


def test_hdf5_reads_what_it_reads_of_one_file(tmp_path, monkeypatch):
    joined(tmp_path, mixed(30), 4)
    build(tmp_path / "one.h5", mixed(30))
    monkeypatch.chdir("/")  # shards are found beside the file, wherever the reader is
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "one.h5") as one:

        def compare(name, wanted):
            if not isinstance(wanted, h5py.Dataset):
                assert name == "columns" or dict(file[name].attrs) == dict(wanted.attrs)
                return
            np.testing.assert_array_equal(file[name][()], wanted[()], name, strict=True)
            holds_values = name.rpartition("/")[2] not in ("offsets", "shapes", "codes")
            assert file[name].is_virtual == (wanted.size > 0 and holds_values)

        one.visititems(compare)
        assert file.attrs["format"] == b"dataloaders cache, joined"


def bytes_by_hdf5(found, row):
    """The values of a leaf, found as docs/cache-format.md says; None if it is."""
    kinds, flat = found.attrs["kinds"].split(), isinstance(found, h5py.Dataset)
    if kinds[found["codes"][row] if not flat and "codes" in found else 0] == b"none":
        return None
    if flat:  # a single value is h5py's scalar, in this machine's order of bytes
        return np.asarray(found[row]).astype(found.dtype).tobytes()
    first, last = found["offsets"][row : row + 2] if "offsets" in found else (row, row + 1)
    return found["values"][first:last].tobytes()


@settings(max_examples=15)
@given(samples=datasets() | st.just(MIXED_SHARDS), of=st.integers(1, 6))
def test_any_samples_in_any_number_of_shards(tmp_path_factory, samples, of):
    """Also in h5py, and merged into the very file that one process writes."""
    folder = tmp_path_factory.mktemp("any")
    try:
        joined(folder, samples, of, "%b.h5")  # a name that HDF5 would read as a pattern
        cached = CachedDataset(folder / "%b.h5")
        wanted = all_bits(samples)
        assert all_bits(cached) == wanted
        backwards = range(len(samples) - 1, -1, -1)
        assert all_bits(cached.__getitems__(backwards)) == wanted[::-1]
        assert verify(folder / "%b.h5") == []
        with h5py.File(folder / "%b.h5") as file:
            for column, reader in zip(cached.columns, cached.readers, strict=True):
                for row in range(len(samples)):
                    values, found = reader.cell(row)[1], file["columns"][column.name]
                    wanted = None if values is None else values.tobytes()
                    assert bytes_by_hdf5(found, row) == wanted
        merge(folder / "%b.h5", folder / "m.h5")
        build(folder / "one.h5", samples, fingerprint={"length": len(samples)})
        assert (folder / "m.h5").read_bytes() == (folder / "one.h5").read_bytes()
    finally:
        shutil.rmtree(folder)


def test_no_rows_and_a_whole_column(tmp_path):
    index = joined(tmp_path, [], 3, "none.h5")
    assert (index.rows, index.structure, len(index.shards)) == (0, None, 1)
    assert CachedDataset(tmp_path / "none.h5")[:] == []
    assert verify(tmp_path / "none.h5") == []
    joined(tmp_path, mixed(8), 2)
    cached = CachedDataset(tmp_path / "a.h5")
    for name, rule in (
        ("label", r"stand in 2 shards.*CachedDataset\(shard\)\.column"),
        ("photo", "different shapes"),
        ("x", "has no column 'x'; it has 'image'"),
    ):
        with pytest.raises(CacheError, match=rule):
            cached.column(name)
    columns = [CachedDataset(shard).column("label") for shard in cached.shards]
    assert np.concatenate(columns).tolist() == list(range(8))


def test_only_the_shards_that_are_read_are_mapped(tmp_path):
    joined(tmp_path, mixed(12), 4)
    cached = CachedDataset(tmp_path / "a.h5")

    def mapped():
        found = re.findall(rf"{tmp_path}/(.*)", Path("/proc/self/maps").read_text())
        return set(found) - {"a.h5"}

    assert mapped() == set()
    cached[4]
    cached.__getitems__([4, 11, 5])
    assert mapped() == {"a.parts/00003.h5", "a.parts/00009.h5"}


# Shards that are not what was joined


def test_a_shard_that_is_missing_cut_or_another_one(tmp_path):
    path = tmp_path / "a.h5"
    joined(tmp_path, mixed(12), 4)
    one, other = shards(tmp_path)[1:3]
    whole, others = one.read_bytes(), other.read_bytes()
    opened, copied = CachedDataset(path), pickle.dumps(CachedDataset(path))
    spoilt = {
        "is missing: .* does not exist; copy it there, or run the build again": None,
        f"has {len(whole) - 1} bytes, and had {len(whole)} when it was joined": whole[:-1],
        f"has {len(whole) + 9} bytes, and had {len(whole)}": whole + bytes(9),
        "is no finished cache": bytes(len(whole)),
        "is no finished cache;": b"",
        "is not the one that was joined: it was swapped": others,
    }
    for message, data in spoilt.items():
        one.unlink(missing_ok=True)
        if data is not None:
            one.write_bytes(data)
        with pytest.raises(CacheError, match=message) as caught:
            CachedDataset(path)[:]  # one of the same size is opened when it is read
        assert f"shard a.parts/{one.name} of the cache {path}" in str(caught.value)
        (damage,) = verify(path)
        assert damage.shard == f"a.parts/{one.name}"
        assert re.search(message, damage.what)
    for cached in (opened, pickle.loads(copied)):  # it was replaced before it is first read
        assert cached[0] is not None
        with pytest.raises(CacheError, match=rf"shard a\.parts/{one.name} .* is not the one"):
            cached[4]
    one.write_bytes(whole)
    spoil(one, HEADER + 5)  # its head says that it is the one; its index is looked at when mapped
    cached = CachedDataset(path)
    cached[0]
    for read in (cached.__getitem__, lambda row: cached.__getitems__([0, row])):
        with pytest.raises(CacheError, match=rf"the index of the cache .*{one.name} is damaged"):
            read(4)
    (damage,) = verify(path)
    assert (damage.shard, damage.what[:10]) == (f"a.parts/{one.name}", "the index:")


def test_a_shard_that_is_no_plain_file(tmp_path):
    (tmp_path / "a").mkdir()
    joined(tmp_path / "a", mixed(12), 4)
    path, shard = tmp_path / "a" / "a.h5", shards(tmp_path / "a")[1]
    named = f"shard a.parts/{shard.name} of the cache"
    shard.rename(shard.with_name("renamed.h5"))
    shard.symlink_to("renamed.h5")
    assert len(CachedDataset(path)[:]) == 12
    shard.unlink()
    shutil.move(shard.with_name("renamed.h5"), tmp_path / "elsewhere.h5")
    for make, rule in (
        (lambda: shard.symlink_to("../../elsewhere.h5"), "is a symbolic link to another folder"),
        (lambda: shard.symlink_to(tmp_path / "elsewhere.h5"), "a symbolic link to another folder"),
        (lambda: shard.symlink_to(shard.name), "cannot be opened: Too many levels"),
        (lambda: os.mkfifo(shard), named),  # nobody writes to it: opening must not wait
    ):
        make()
        with pytest.raises(CacheError, match=rule):
            CachedDataset(path)
        shard.unlink()
    shard.mkdir()
    with pytest.raises(CacheError, match=f"{named} .* cannot be read"):
        CachedDataset(path)
    shard.parent.rename(tmp_path / "b.parts")
    (tmp_path / "a" / "a.parts").symlink_to(tmp_path / "b.parts")
    with pytest.raises(CacheError, match="is a symbolic link to another folder"):
        CachedDataset(path)


def test_flipped_bits_are_found_in_all_files(tmp_path):
    index = joined(tmp_path, mixed(12), 3, failed=())
    files = [tmp_path / "a.h5", *shards(tmp_path)]
    draw, seen = np.random.default_rng(3), []
    for path in files:
        for offset in draw.integers(path.stat().st_size, size=5).tolist():
            spoil(path, offset)
            damages = verify(files[0], lambda *told: seen.append(told))
            shard = "" if path == files[0] else f"a.parts/{path.name}"
            assert {damage.shard for damage in damages} == {shard}, (path, offset)
            assert all(damage.offset <= offset for damage in damages)
            spoil(path, offset)  # and back
    assert {whole for _, whole in seen} == {index.all_bytes}
    spoil(files[0], index.columns[1].offsets.offset)
    assert any("column 'photo' (offsets)" in damage.what for damage in verify(files[0]))


# Joining


def test_what_cannot_be_joined_is_said(tmp_path):
    path, ones = tmp_path / "a.h5", [np.float32(1)] * 9
    zero, one = part_path(path, 0), part_path(path, 3)

    def rebuilt(samples, first=3, **fingerprint):
        build_part(path, first, samples, 9, fingerprint=fingerprint)

    def refused(message):
        with pytest.raises(CacheError, match=message):
            join(path)
        assert not path.exists()

    refused(r"no parts of .*a\.h5 in .*a\.parts; copy them there")
    for first in (0, 3, 6):
        rebuilt(ones[:3], first)
    one.unlink()
    refused(r"a\.parts is not complete: samples 3 to 5 are missing; copy the other parts there")
    shutil.copy(zero, one)
    refused(r"00003\.h5 begins with sample 0: it was renamed or swapped with another one")
    rebuilt([np.float64(1)] * 3)
    refused(r"column 'sample' holds <f4 in the part a\.parts/00000\.h5 and <f8 in a\.parts/00003")
    rebuilt([(np.float32(1), 2)] * 3)
    refused(r"parts a\.parts/00000\.h5 and a\.parts/00003\.h5 are built differently: 1 leaves")
    rebuilt(ones[:3], torch="9.9")
    refused(r"from different builds: torch is nothing in one and 9\.9 in the other")
    rebuilt(ones[:3])
    one.write_bytes(one.read_bytes()[:-1])
    refused("truncated")
    rebuilt(ones[:3])
    assert join(path).rows == 9
    shutil.copy(zero, path)
    with pytest.raises(CacheError, match=r"a\.h5 exists and is not a joined cache; delete it"):
        join(path)
    path.unlink()
    for first in (0, 3, 6):
        rebuilt(["ab" * row for row in range(first, first + 3)], first)
    offsets, whole = join(path).columns[0], one.read_bytes()
    place = CachedDataset(one).columns[0].offsets.offset
    assert offsets.shape is None
    for row, value in ((0, 1), (1, 1 << 60), (3, 5)):
        one.write_bytes(whole)
        spoil(one, place + 8 * row, value.to_bytes(8, "little"))
        with pytest.raises(CacheError, match=r"the part a\.parts/00003\.h5 is damaged, in column"):
            join(path)


def test_parts_are_joined_in_the_order_of_their_samples(tmp_path):
    """Also where their names have six digits."""
    path, ends = tmp_path / "a.h5", (0, 99_990, 100_010, 100_020)
    for first, end in pairwise(ends):
        build_part(path, first, range(first, end), ends[-1])
    join(path)
    rows = [0, 99_989, 99_990, 100_009, 100_010, 100_019]
    assert CachedDataset(path).__getitems__(rows) == rows


def test_a_cache_is_moved_with_its_parts_and_merged_into_one_file(tmp_path):
    joined(tmp_path, mixed(20), 3)
    there, done = tmp_path / "there", []
    there.mkdir()
    for name in ("a.h5", "a.parts"):
        shutil.move(tmp_path / name, there)
    index = merge(there / "a.h5", tmp_path / "m.h5", progress=lambda *told: done.append(told))
    assert (index.rows, index.shards, done[-1][0]) == (20, (), done[-1][1])
    with pytest.raises(CacheError, match=r"m\.h5 exists; delete it"):
        merge(there / "a.h5", tmp_path / "m.h5")
    part = there / "a.parts" / "00006.h5"
    spoil(part, part.stat().st_size - 9)
    with pytest.raises(CacheError, match=r"the part .*00006\.h5 is damaged: .*; delete it"):
        merge(there / "a.h5", tmp_path / "n.h5")
    part.unlink()
    with pytest.raises(CacheError, match=r"shard a\.parts/00006\.h5 of the cache .* is missing"):
        merge(there / "a.h5", tmp_path / "n.h5")


# Indexes that somebody made up


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.h5"
    joined(path.parent, mixed(9), 3)
    whole = Whole(path)
    whole.path = path
    assert read(whole, {}) == "read"
    return whole


def read(whole, values):
    """What errors say of the file with other values in its index; "read" if there are none."""
    return "; ".join(sorted(said_of(whole.path, whole.changed(values)))) or "read"


NAMES = ["", ".", "..", "../a.h5", "/etc/passwd", "c/b/a.h5", "../b/a.h5", "a/../b.h5", "/a.h5",
         "a/", "../..", "a\\b.h5", "a\0.h5", "a\n.h5", "\ud800", "é" * 128, "a" * 300,
         "\x1b[2J.h5", "\u202ea.h5"]  # fmt: skip


def test_a_shard_is_a_file_beside_this_one(whole):
    for name in NAMES:
        assert "shard 1 is named" in read(whole, {"shards.1.name": name}), ascii(name)


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        ("format", "dataloaders cache", "should not have, 'shards'"),
        ("format", "dataloaders cache, torn", "should not have, 'shards'"),
        ("shards", [], "there are 0 shards, and not 1 to 65536"),
        ("shards", {}, "shards is no list"),
        ("shards", [None] * 3, "shard 0 is no object"),
        ("shards", [{}] * 70_000, "there are 70000 shards"),
        ("shards.0.name", "a.parts/00003.h5", "two shards have the same name"),
        ("shards.0.name", "é b%/a.h5", "é b%/a.h5 of the cache .* is missing"),
        ("shards.0.name", 3, "shard 0: name is 3, and no text"),
        ("shards.0.name", "none.h5", "none.h5 of the cache .* is missing"),
        ("shards.0.name", "a.h5", "shard a.h5 of the cache .* is not the one"),
        ("shards.0.rows", 2, "its shards have 8 rows, and it says 9"),
        ("shards.0.rows", -1, "shard 0: rows is -1"),
        ("shards.0.rows", 2**60, "shard 0: rows is"),
        ("shards.0.samples", 2, "shard 0: samples is 2"),
        ("shards.0.samples", 4, "its shards have 10 samples, and it says 9"),
        ("shards.0.file_bytes", 7, "shard 0: file_bytes is 7"),
        ("shards.0.file_bytes", 2**48, "when it was joined"),
        ("shards.0.identity", "f" * 32, "is not the one that was joined"),
        ("shards.0.identity", "F" * 32, "identity is 'F+', and no digest"),
        ("shards.0.identity", "", "identity is '', and no digest"),
        ("shards.0.more", 1, "shard 0 lacks, or should not have, 'more'"),
        ("rows", 10, "malformed"),
        ("columns.0.values", [4096, 270], "malformed"),
        ("columns.2.values.0", 4096, "column 'label': values have a place, and stand in shards"),
        ("columns.2.values.1", 8, "has 8 values, and should have 9"),
        ("columns.2.dtype", "<i4", "cannot hold 'int'"),
        ("columns.0.variants", [["image:YCbCr", 3]], "has other values in column 'image'"),
        ("structure.dict.2.0", "other", "column 'other' is named 'label'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(whole, way, value, message):
    said = read(whole, {way: value})
    assert re.search(message, said), said


def test_shards_in_another_order_and_other_counts_and_names(whole):
    ways = {
        f"shards.{n}.{of}": rows for n, rows in enumerate((1, 5, 3)) for of in ("rows", "samples")
    }
    assert "has 3 rows, and 1 when it was joined" in read(whole, ways)
    # A joined file may do that: they are rows, in another order.
    assert read(whole, {"shards": whole.fields["shards"][::-1]}) == "read"
    names = {"structure.dict.2.0": "other", "columns.2.name": "other"}
    assert "has samples that are built differently" in read(whole, names)
    says = [
        {"first": -1}, {"first": True}, {"first": 1 << 60}, {"shard": "1 of 3"},
        {"shard": "3 of 3", "length": 9}, {"shard": "1 of 0", "length": 9},
        {"shard": "1 of 3", "length": -9}, {"shard": "1 of 3", "length": True},
        {"shard": "1 of 3", "length": 10**30}, {"shard": ["1 of 3"], "length": 9},
        {"shard": "9" * 5000 + " of 3", "length": 9}, {"shard": "\u0661 of \u0663", "length": 9},
    ]  # fmt: skip
    for fingerprint in says:  # nothing of a shard
        build(whole.path, [1], failed=[(1, "b")], fingerprint=fingerprint)
        assert CachedDataset(whole.path).failed == [(1, "b")]

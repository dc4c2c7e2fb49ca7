"""A cache joined of shards: the rows of all of them, for this package and for HDF5 alike."""

import os
import pickle
import re
import shutil
from itertools import product

import h5py
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.cache import CachedDataset, merge, verify
from helpers.cached import build, built, datasets, mixed, refused, spoil
from helpers.compare import bits
from helpers.hostile import HEADER
from helpers.processes import open_files


def joined(folder, samples, of, name="a.h5"):
    """The index of a cache of these samples in so many parts."""
    rows = -(-len(samples) // of)
    return built(samples, folder / name, rows=rows, single_file=False).index


def shards(folder):
    return sorted((folder / "a.parts").glob("*.h5"))


MIXED_SHARDS = [  # fixed in each shard, of other shapes, kinds and dimensions; and None in one
    *[(np.full((2, 3), 1.5), np.uint8(row), "ab", None) for row in range(2)],
    *[(None, None, "ab", None)] * 2,
    *[(np.full((4, 1), 2.5), np.full(3, row, np.uint8), "cd", None) for row in range(2)],
    *[(None if row else np.full((2, 3), 3.5), None, "", None) for row in range(2)],
]


@settings(max_examples=12)
@given(samples=datasets() | st.just(MIXED_SHARDS) | st.just(mixed(20)), of=st.integers(1, 6))
def test_any_samples_in_any_number_of_shards(tmp_path_factory, samples, of):
    """In h5py too, and merged into the very file that one process writes."""
    folder = tmp_path_factory.mktemp("any")
    path, one = folder / "%b.h5", folder / "one.h5"  # a name that HDF5 would read as a pattern
    before = os.getcwd()
    try:
        joined(folder, samples, of, path.name)
        assert str(folder).encode() not in path.read_bytes()
        cached, backwards = CachedDataset(path), range(len(samples) - 1, -1, -1)
        assert bits(list(cached)) == bits(samples)
        assert bits(cached.__getitems__(backwards)) == bits(samples[::-1])
        assert verify(path) == []
        build(one, samples, fingerprint=cached.index.fingerprint)
        merge(path, folder / "m.h5")
        assert (folder / "m.h5").read_bytes() == one.read_bytes()
        os.chdir("/")  # shards are found beside the file, wherever the reader is
        with h5py.File(path) as found, h5py.File(one) as plain:
            form = b"dataloaders cache" + b", joined" * bool(cached.shards)
            assert found.attrs["format"] == form
            for column, row in product(cached.columns, range(len(samples))):
                ours, theirs = (file["columns"][column.name] for file in (found, plain))
                assert bytes_by_hdf5(ours, row) == bytes_by_hdf5(theirs, row)
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def bytes_by_hdf5(found, row):
    """The values of a leaf, found as docs/cache-format.md says; None if it is."""
    kinds, flat = found.attrs["kinds"].split(), isinstance(found, h5py.Dataset)
    if kinds[found["codes"][row] if not flat and "codes" in found else 0] == b"none":
        return None
    if flat:  # a single value is h5py's scalar, in this machine's order of bytes
        return np.asarray(found[row]).astype(found.dtype).tobytes()
    first, last = found["offsets"][row : row + 2] if "offsets" in found else (row, row + 1)
    return found["values"][first:last].tobytes()


def test_no_rows_and_a_whole_column(tmp_path):
    index = built([], tmp_path / "none.h5").index
    assert (index.rows, index.structure) == (0, None)
    assert CachedDataset(tmp_path / "none.h5")[:] == verify(tmp_path / "none.h5") == []
    joined(tmp_path, mixed(8), 2)
    cached = CachedDataset(tmp_path / "a.h5")
    files = [tmp_path / "a.h5", *shards(tmp_path)]
    assert cached.index.all_bytes == sum(file.stat().st_size for file in files)
    for name, rule in (
        ("label", r"stand in 2 shards.*CachedDataset\(shard\)\.column"),
        ("photo", "different shapes"),
        ("x", "has no column 'x'; it has 'image'"),
    ):
        refused(rule, cached.column, name)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["columns/label"].is_virtual
    columns = [CachedDataset(shard).column("label") for shard in cached.shards]
    assert np.concatenate(columns).tolist() == list(range(8))


def test_a_shard_that_is_missing_cut_or_another_one(path, tmp_path):
    joined(tmp_path, mixed(12), 4)
    one, other = shards(tmp_path)[1:3]
    whole, others = one.read_bytes(), other.read_bytes()
    opened, copied = CachedDataset(path), pickle.dumps(CachedDataset(path))
    before, named = open_files(), rf"shard a\.parts/{one.name} of the cache {path} "
    one.unlink()
    for message, data, is_seen_by_opening in (
        ("is missing: .* does not exist; copy it there, or run the build again", None, True),
        (f"has {len(whole) - 1} bytes, and had {len(whole)} when it was", whole[:-1], True),
        (f"has {len(whole) + 9} bytes, and had {len(whole)}", whole + bytes(9), True),
        ("is no finished cache", bytes(len(whole)), False),
        ("is no finished cache;", b"", True),
        ("is not the one that was joined: it was swapped", others, False),
    ):
        if data is not None:
            one.write_bytes(data)
        rows = slice(0) if is_seen_by_opening else slice(None)
        refused(named + message, lambda: CachedDataset(path)[rows])  # noqa: B023
        (damage,) = verify(path)
        assert damage.shard == f"a.parts/{one.name}"
        assert re.search(message, damage.what)
    for cached in (opened, pickle.loads(copied)):  # it was replaced before it is first read
        assert cached[0] is not None
        refused(f"{named}is not the one", cached.__getitem__, 4)
    one.write_bytes(whole)
    spoil(one, HEADER + 5)  # its head says that it is the one; its index is looked at when mapped
    cached = CachedDataset(path)
    cached[0]
    for read in (cached.__getitem__, lambda row: cached.__getitems__([0, row])):
        refused(rf"the index of the cache .*{one.name} is damaged", read, 4)
    (damage,) = verify(path)
    assert (damage.shard, damage.what[:10]) == (f"a.parts/{one.name}", "the index:")
    assert open_files() == before


def test_a_shard_that_is_no_plain_file(tmp_path):
    folder, parts = tmp_path / "a", tmp_path / "a" / "a.parts"
    folder.mkdir()
    joined(folder, mixed(12), 4)
    before = open_files()
    path, shard = folder / "a.h5", shards(folder)[1]
    named = f"shard a.parts/{shard.name} of the cache"
    shard.rename(parts / "renamed.h5")
    shard.symlink_to("renamed.h5")
    assert len(CachedDataset(path)[:]) == 12
    shard.unlink()
    shutil.move(parts / "renamed.h5", tmp_path / "elsewhere.h5")
    for make, rule in (
        (lambda: shard.symlink_to(tmp_path / "elsewhere.h5"), "a symbolic link to another folder"),
        (lambda: shard.symlink_to(shard.name), "cannot be opened: Too many levels"),
        (lambda: os.mkfifo(shard), named),  # nobody writes to it: opening must not wait
    ):
        make()
        refused(rule, CachedDataset, path)
        shard.unlink()
    shard.mkdir()
    refused(f"{named} .* cannot be read", CachedDataset, path)
    shard.rmdir()
    parts.rename(tmp_path / "b.parts")
    parts.symlink_to(tmp_path / "b.parts")
    refused("is a symbolic link to another folder", CachedDataset, path)
    assert open_files() == before


def test_what_cannot_be_joined_is_said(path):
    rule = r"column 'sample' holds <f4 in the part a\.parts/00000\.h5 and <f8 in a\.parts/00003"
    refused(rule, joined, path.parent, [np.float32(1)] * 3 + [np.float64(1)] * 3, 2)
    shutil.rmtree(path.with_suffix(".parts"))
    joined(path.parent, ["ab" * row for row in range(9)], 3)
    one = path.with_suffix(".parts") / "00003.h5"
    whole, place = one.read_bytes(), CachedDataset(one).columns[0].offsets.offset
    path.unlink()
    for row, value in ((0, 1), (1, 1 << 60), (3, 5)):
        spoil(one, place + 8 * row, value.to_bytes(8, "little"), whole)
        rule = r"the part a\.parts/00003\.h5 is damaged, in column"
        refused(rule, joined, path.parent, ["ab" * row for row in range(9)], 3)


def test_a_cache_is_moved_with_its_parts_and_merged_into_one_file(tmp_path):
    joined(tmp_path, mixed(20), 3)
    path, part = tmp_path / "there" / "a.h5", tmp_path / "there" / "a.parts" / "00007.h5"
    path.parent.mkdir()
    for name in ("a.h5", "a.parts"):
        shutil.move(tmp_path / name, path.parent)
    index = merge(path, tmp_path / "m.h5")
    assert (index.rows, index.shards) == (20, ())
    rule = r"absent is not a folder, .*; create it"
    refused(rule, merge, path, tmp_path / "absent" / "m.h5")
    refused(r"m\.h5 exists; delete it", merge, path, tmp_path / "m.h5")
    assert merge(tmp_path / "m.h5", tmp_path / "p.h5").rows == 20
    rule = "is a part, with 7 of 20 samples, and no whole cache"
    refused(rule, merge, shutil.copy(part.with_name("00000.h5"), tmp_path), tmp_path / "q.h5")
    whole = part.read_bytes()
    shutil.copy(part.with_name("00000.h5"), part)
    refused(r"shard a\.parts/00007\.h5 .* is not the one", merge, path, tmp_path / "n.h5")
    spoil(part, len(whole) - 9, whole=whole)
    rule = r"the part .*00007\.h5 is damaged: .*; delete it"
    refused(rule, merge, path, tmp_path / "n.h5")
    part.unlink()
    rule = r"shard a\.parts/00007\.h5 of the cache .* is missing"
    refused(rule, merge, path, tmp_path / "n.h5")

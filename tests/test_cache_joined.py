"""A cache joined of shards: the rows of all of them, for this package and for HDF5 alike.

And files that somebody made to do harm: a value or a CacheError, and nothing else ever.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders.cache import CachedDataset, join, merge, verify
from dataloaders.cache.build.parts import parts_folder, range_of
from dataloaders.cache.format.block import HEADER, seal
from dataloaders.cache.format.entries import is_shard_name
from dataloaders.cache.format.index import Index
from dataloaders.cache.read.shards import first_of
from dataloaders.errors import CacheError
from helpers.cached import build, datasets, mixed
from helpers.compare import bits

relaxed = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def part_path(path: Path, rank: int, of: int, samples: int) -> Path:
    """Where a part stands, of ``of`` parts of so many samples."""
    return parts_folder(path) / f"{range_of(rank, of, samples).start:05d}.h5"


def build_part(path: Path, rank: int, of: int, samples: Sequence[Any], **said: Any) -> None:
    part = range_of(rank, of, len(samples))
    fingerprint = {"length": len(samples), **said.pop("fingerprint", {})}
    if len(part) < len(samples):
        fingerprint["first"] = part.start
    parts_folder(path).mkdir(exist_ok=True)
    build(
        part_path(path, rank, of, len(samples)),
        samples[part.start : part.stop],
        fingerprint=fingerprint,
        **said,
    )


def joined(
    folder: Path, samples: Sequence[Any], of: int, name: str = "a.h5", **options: Any
) -> Index:
    """These samples as so many parts, and the file that joins them."""
    for rank in range(of):
        if range_of(rank, of, len(samples)) or (rank == 0 and not samples):
            build_part(folder / name, rank, of, samples, **options)
    return join(folder / name)


def shards(folder: Path) -> list[Path]:
    return sorted(parts_folder(folder / "a.h5").glob("*.h5"))


# The same rows as one file's


@pytest.mark.parametrize("of", [1, 3, 4, 40])
def test_the_rows_of_all_shards_in_their_order(tmp_path: Path, of: int) -> None:
    samples = mixed(30)
    wanted = [bits(sample) for sample in samples]
    index = joined(tmp_path, samples, of)
    assert (index.rows, index.samples, len(index.shards)) == (30, 30, min(of, 30))
    cached = CachedDataset(tmp_path / "a.h5")
    assert len(cached) == 30
    assert [bits(sample) for sample in cached] == wanted
    assert bits(cached[-1]) == wanted[-1]
    assert [bits(sample) for sample in cached[5:25:7]] == wanted[5:25:7]
    rows = np.random.default_rng(of).integers(-30, 30, 50).tolist()
    assert [bits(s) for s in cached.__getitems__(rows)] == [wanted[row] for row in rows]
    assert [bits(sample) for sample in pickle.loads(pickle.dumps(cached))] == wanted
    assert cached.shards == tuple(shards(tmp_path))
    with pytest.raises(IndexError, match="row 30 of a cache of 30 rows"):
        cached[30]
    assert verify(tmp_path / "a.h5") == []


def test_hdf5_reads_what_it_reads_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = mixed(30)
    joined(tmp_path, samples, 4)
    build(tmp_path / "one.h5", samples)
    monkeypatch.chdir("/")  # shards are found beside the file, wherever the reader is
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "one.h5") as one:
        names: list[str] = []

        def compare(name: str, wanted: Any) -> None:
            if not isinstance(wanted, h5py.Dataset):
                assert name == "columns" or dict(file[name].attrs) == dict(wanted.attrs)
            else:
                names.append(name)
                np.testing.assert_array_equal(file[name][()], wanted[()], name, strict=True)
                assert file[name].is_virtual == (wanted.size > 0 and _holds_values(name))

        one.visititems(compare)
        assert len(names) > 20
        assert dict(file.attrs) == {
            "format": b"dataloaders cache, joined", "version": 4, "rows": 30, "shards": 4,
        }  # fmt: skip


def _holds_values(name: str) -> bool:
    return name.rpartition("/")[2] not in ("offsets", "shapes", "codes")


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump (hdf5-tools) is not installed")
def test_h5dump_reads_the_same_values(tmp_path: Path) -> None:
    samples = [(np.arange(row, row + 6).reshape(2, 3), "ab" * row) for row in range(9)]
    joined(tmp_path, samples, 4)

    def numbers(name: str) -> list[int]:
        command = ["h5dump", "-y", "-w", "0", "-d", name, str(tmp_path / "a.h5")]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [int(n) for n in re.findall(r"\d+", re.findall(r"DATA \{(.*?)\}", text, re.S)[0])]

    assert numbers("/columns/0") == [n for array, _ in samples for n in array.reshape(-1).tolist()]
    assert numbers("/columns/1/values") == list("".join(text for _, text in samples).encode())
    assert numbers("/columns/1/offsets") == np.cumsum([0] + [len(t) for _, t in samples]).tolist()


def leaf_by_hdf5(file: Any, index: Index, name: str, row: int) -> Any:
    """The values of a leaf, found as docs/cache-format.md says; None if it is."""
    found = file["columns"][name]
    (column,) = [column for column in index.columns if column.name == name]
    if isinstance(found, h5py.Dataset):
        return None if found.attrs["kinds"] == b"none" else found[row]
    kinds = found.attrs["kinds"].decode().split()
    code = int(found["codes"][row]) if "codes" in found else 0
    if kinds[code] == "none":
        return None
    if "offsets" not in found:
        return found["values"][row]
    first, last = map(int, found["offsets"][row : row + 2])
    values = found["values"][first:last]
    if "shapes" in found:
        dimensions = column.variants[code][1]
        assert not found["shapes"][row, dimensions:].any()
        values = values.reshape(found["shapes"][row, :dimensions].astype(int))
    return values


def test_columns_that_only_together_are_variable(tmp_path: Path) -> None:
    """Fixed in each shard, of other shapes, kinds and numbers of dimensions; and None in one."""
    none = [(None, None, "ab", None)] * 2
    samples = [
        *[(np.full((2, 3), 1.5), np.uint8(row), "ab", None) for row in range(2)],
        *none,
        *[(np.full((4, 1), 2.5), np.full(3, row, np.uint8), "cd", None) for row in range(2)],
        *[(None if row else np.full((2, 3), 3.5), None, "", None) for row in range(2)],
    ]
    index = joined(tmp_path, samples, 4)
    assert [column.shape for column in index.columns] == [None, None, None, (0,)]
    assert [column.variants for column in index.columns] == [
        (("array", 2), ("none", 0)),
        (("scalar", 0), ("none", 0), ("array", 1)),
        (("str", 1),),
        (("none", 0),),
    ]
    cached = CachedDataset(tmp_path / "a.h5")
    assert [bits(sample) for sample in cached] == [bits(sample) for sample in samples]
    with h5py.File(tmp_path / "a.h5") as file:
        for row, sample in enumerate(samples):
            array = leaf_by_hdf5(file, index, "0", row)
            np.testing.assert_equal(array, sample[0])
            found = leaf_by_hdf5(file, index, "1", row)
            if sample[1] is None:
                assert found is None
            else:
                np.testing.assert_array_equal(found, np.atleast_1d(sample[1]), strict=True)
            assert bytes(leaf_by_hdf5(file, index, "2", row)).decode() == sample[2]
            assert leaf_by_hdf5(file, index, "3", row) is None


def test_a_fixed_column_that_is_none_in_a_whole_shard(tmp_path: Path) -> None:
    samples = [np.full(3, row, "<i4") if row < 2 or row > 3 else None for row in range(6)]
    index = joined(tmp_path, samples, 3)
    assert index.columns[0].shape == (3,)
    assert [bits(s) for s in CachedDataset(tmp_path / "a.h5")] == [bits(s) for s in samples]
    with h5py.File(tmp_path / "a.h5") as file:
        values = file["columns/sample/values"][:]
        assert values[:, 0].tolist() == [0, 1, 0, 0, 4, 5]
        assert file["columns/sample/codes"][:].tolist() == [0, 0, 1, 1, 0, 0]


@relaxed
@given(samples=datasets(), of=st.integers(1, 6))
def test_any_samples_in_any_number_of_shards(
    tmp_path_factory: pytest.TempPathFactory, samples: list[Any], of: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        joined(folder, samples, of)
        cached = CachedDataset(folder / "a.h5")
        wanted = [bits(sample) for sample in samples]
        assert [bits(sample) for sample in cached] == wanted
        assert [bits(s) for s in cached.__getitems__(range(len(samples) - 1, -1, -1))] == wanted[
            ::-1
        ]
        assert verify(folder / "a.h5") == []
        with h5py.File(folder / "a.h5") as file:
            for column in cached.columns:
                for row in range(len(samples)):
                    reader = cached.readers[cached.columns.index(column)]
                    values = reader.view(row)
                    found = leaf_by_hdf5(file, cached.index, column.name, row)
                    assert (found is None) == (values is None)
                    if values is not None:
                        # A single value is h5py's scalar, in this machine's order of bytes.
                        same = np.asarray(found).astype(values.dtype)
                        assert same.tobytes() == values.tobytes()
    finally:
        shutil.rmtree(folder)


def test_names_that_hdf5_would_read_as_patterns(tmp_path: Path) -> None:
    samples = [{"÷": row, "50%b": np.arange(row)} for row in range(4)]
    index = joined(tmp_path, samples, 2, "a%b.h5")
    assert "%b" in index.columns[0].name or "%b" in index.columns[1].name
    with h5py.File(tmp_path / "a%b.h5") as file:
        assert file["columns"][index.columns[0].name][:].tolist() == [0, 1, 2, 3]
        assert file["columns"][index.columns[1].name]["values"][:].tolist() == [0, 0, 1, 0, 1, 2]


def test_the_same_shards_give_the_same_file_wherever_they_are(tmp_path: Path) -> None:
    joined(tmp_path, mixed(20), 3)
    first = (tmp_path / "a.h5").read_bytes()
    join(tmp_path / "a.h5")
    assert (tmp_path / "a.h5").read_bytes() == first
    assert str(tmp_path).encode() not in first
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert len(CachedDataset(tmp_path / "copy" / "a.h5")[:]) == 20
    join(tmp_path / "copy" / "a.h5")
    assert (tmp_path / "copy" / "a.h5").read_bytes() == first
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        "a.parts", "a.h5", ".a.h5.lock",
    }  # fmt: skip


def test_no_rows_at_all(tmp_path: Path) -> None:
    index = joined(tmp_path, [], 3)
    assert (index.rows, index.structure, len(index.shards)) == (0, None, 1)
    assert CachedDataset(tmp_path / "a.h5")[:] == []
    assert verify(tmp_path / "a.h5") == []


def test_only_the_shards_that_are_read_are_mapped(tmp_path: Path) -> None:
    joined(tmp_path, mixed(12), 4)
    cached = CachedDataset(tmp_path / "a.h5")

    def mapped() -> set[str]:
        found = re.findall(rf"{tmp_path}/(.*)", Path("/proc/self/maps").read_text())
        return set(found) - {"a.h5"}

    assert mapped() == set()
    cached[4]
    cached.__getitems__([4, 11, 5])
    assert mapped() == {"a.parts/00003.h5", "a.parts/00009.h5"}


def test_a_whole_column_is_not_one_array(tmp_path: Path) -> None:
    joined(tmp_path, mixed(8), 2)
    cached = CachedDataset(tmp_path / "a.h5")
    with pytest.raises(CacheError, match=r"stand in 2 shards.*CachedDataset\(shard\)\.column"):
        cached.column("label")
    with pytest.raises(CacheError, match="different shapes"):
        cached.column("photo")
    with pytest.raises(CacheError, match="has no column 'x'; it has 'image'"):
        cached.column("x")
    columns = [CachedDataset(shard).column("label") for shard in cached.shards]
    assert np.concatenate(columns).tolist() == list(range(8))


def test_a_link_to_the_joined_file_finds_the_shards(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    joined(tmp_path / "there", mixed(4), 2)
    (tmp_path / "here.h5").symlink_to(tmp_path / "there" / "a.h5")
    assert len(CachedDataset(tmp_path / "here.h5")[:]) == 4


# Shards that are not what was joined


def test_a_shard_that_is_missing_cut_or_another_one(tmp_path: Path) -> None:
    joined(tmp_path, mixed(12), 4)
    one, other = shards(tmp_path)[1:3]
    whole, others = one.read_bytes(), other.read_bytes()
    spoilt: dict[str, bytes | None] = {
        "is missing: .* does not exist; copy it there, or run the build again": None,
        f"has {len(whole) - 1} bytes, and had {len(whole)} when it was joined": whole[:-1],
        f"has {len(whole) + 9} bytes, and had {len(whole)}": whole + bytes(9),
        "is not the one that was joined: it was swapped": others,
        "is no finished cache": bytes(len(whole)),
        "is no finished cache;": b"",
    }
    for message, data in spoilt.items():
        one.unlink(missing_ok=True)
        if data is not None:
            one.write_bytes(data)
        with pytest.raises(CacheError, match=message) as caught:
            CachedDataset(tmp_path / "a.h5")[:]  # one of the same size is opened when it is read
        assert f"shard a.parts/{one.name} of the cache {tmp_path / 'a.h5'}" in str(caught.value)
        (damage,) = verify(tmp_path / "a.h5")
        assert damage.shard == f"a.parts/{one.name}"
        assert re.search(message, damage.what)
    one.write_bytes(others)
    other.write_bytes(whole)
    with pytest.raises(CacheError, match="swapped"):
        CachedDataset(tmp_path / "a.h5")[4]
    other.write_bytes(others)
    one.write_bytes(whole)
    assert len(CachedDataset(tmp_path / "a.h5")[:]) == 12


def test_a_shard_whose_index_does_not_match_its_digest(tmp_path: Path) -> None:
    """Its head says that it is the one; only when it is mapped is the index looked at."""
    joined(tmp_path, mixed(12), 4)
    shard = shards(tmp_path)[1]
    data = bytearray(shard.read_bytes())
    data[HEADER + 5] ^= 1
    shard.write_bytes(data)
    cached = CachedDataset(tmp_path / "a.h5")
    cached[0]
    with pytest.raises(CacheError, match=rf"the index of the cache .*{shard.name} is damaged"):
        cached[4]
    with pytest.raises(CacheError, match="damaged"):
        cached.__getitems__([0, 4])
    (damage,) = verify(tmp_path / "a.h5")
    assert (damage.shard, damage.what[:10]) == (f"a.parts/{shard.name}", "the index:")


def test_a_shard_that_is_replaced_before_it_is_first_read(tmp_path: Path) -> None:
    joined(tmp_path, mixed(12), 4)
    cached = CachedDataset(tmp_path / "a.h5")
    copied = pickle.dumps(cached)
    shutil.copy(shards(tmp_path)[2], shards(tmp_path)[1])
    cached[0]
    with pytest.raises(CacheError, match=r"shard a\.parts/00003\.h5 .* is not the one"):
        cached[4]
    with pytest.raises(CacheError, match="is not the one"):
        pickle.loads(copied)[4]


def test_a_shard_that_is_no_plain_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    joined(tmp_path / "a", mixed(12), 4)
    path, shard = tmp_path / "a" / "a.h5", shards(tmp_path / "a")[1]
    shard.rename(shard.with_name("renamed.h5"))
    shard.symlink_to("renamed.h5")
    assert len(CachedDataset(path)[:]) == 12
    shard.unlink()
    shutil.move(shard.with_name("renamed.h5"), tmp_path / "elsewhere.h5")
    for target in ("../../elsewhere.h5", str(tmp_path / "elsewhere.h5")):
        shard.symlink_to(target)
        with pytest.raises(CacheError, match="is a symbolic link to another folder"):
            CachedDataset(path)
        shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(CacheError, match="cannot be opened: Too many levels"):
        CachedDataset(path)
    shard.unlink()
    os.mkfifo(shard)  # nobody writes to it: opening must not wait
    with pytest.raises(CacheError, match=f"shard a.parts/{shard.name} of the cache"):
        CachedDataset(path)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(
        CacheError, match=f"shard a.parts/{shard.name} of the cache .* cannot be read"
    ):
        CachedDataset(path)


def test_every_flipped_bit_is_found_in_all_files(tmp_path: Path) -> None:
    joined(tmp_path, mixed(12), 3, failed=())
    files = [tmp_path / "a.h5", *shards(tmp_path)]
    draw = np.random.default_rng(3)
    for path in files:
        whole = path.read_bytes()
        for _ in range(25):
            data = bytearray(whole)
            offset = int(draw.integers(len(data)))
            data[offset] ^= 1 << int(draw.integers(8))
            path.write_bytes(data)
            damages = verify(tmp_path / "a.h5")
            assert damages, (path, offset)
            assert {damage.shard for damage in damages} == {
                "" if path == files[0] else f"a.parts/{path.name}"
            }
            assert all(damage.offset <= offset for damage in damages)
        path.write_bytes(whole)
    place = Index.parse(str(files[0])).columns[1].offsets
    assert place is not None
    data = bytearray(files[0].read_bytes())
    data[place.offset] ^= 1
    files[0].write_bytes(data)
    assert any("column 'photo' (offsets)" in damage.what for damage in verify(files[0]))


def test_progress_of_verifying_is_that_of_all_files(tmp_path: Path) -> None:
    index = joined(tmp_path, [np.zeros(70_000, np.uint8)] * 12, 3)
    seen: list[tuple[int, int]] = []
    verify(tmp_path / "a.h5", lambda done, whole: seen.append((done, whole)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {whole for _, whole in seen} == {index.all_bytes}
    assert seen[-1][0] <= index.all_bytes
    assert len(seen) >= 4


# Joining


def test_what_cannot_be_joined_is_said(tmp_path: Path) -> None:
    path, ones = tmp_path / "a.h5", [np.float32(1)] * 9

    def rebuilt(samples: Any, **fingerprint: Any) -> None:
        build_part(path, 1, 3, samples, fingerprint=fingerprint)

    def refused(message: str) -> None:
        with pytest.raises(CacheError, match=message):
            join(path)
        assert not path.exists()

    refused(r"no parts of .*a\.h5: .*a\.parts cannot be read \(No such file")
    for rank in range(3):
        build_part(path, rank, 3, ones)
    one = part_path(path, 1, 3, 9)
    one.rename(tmp_path / "b.h5")
    refused(r"a\.parts is not complete: samples 3 to 5 are missing; copy the other parts there")
    shutil.copy(part_path(path, 0, 3, 9), one)
    refused(r"00003\.h5 begins with sample 0: it was renamed or swapped with another one")
    rebuilt([np.float64(1)] * 9)
    refused(r"column 'sample' holds <f4 in the part a\.parts/00000\.h5 and <f8 in a\.parts/00003")
    rebuilt([(np.float32(1), 2)] * 9)
    refused(r"parts a\.parts/00000\.h5 and a\.parts/00003\.h5 are built differently: 1 leaves")
    rebuilt(ones, torch="9.9")
    refused(r"from different builds: torch is nothing in one and 9\.9 in the other")
    rebuilt(ones)
    one.write_bytes(one.read_bytes()[:-1])
    refused("truncated")
    rebuilt(ones)
    assert join(path).rows == 9
    assert CachedDataset(path)[:] == [1] * 9


def test_a_folder_that_is_a_link_elsewhere_is_not_followed(tmp_path: Path) -> None:
    joined(tmp_path, mixed(6), 2)
    parts_folder(tmp_path / "a.h5").rename(tmp_path / "b.parts")
    (tmp_path / "a.parts").symlink_to(tmp_path / "b.parts")
    with pytest.raises(CacheError, match="is a symbolic link to another folder"):
        CachedDataset(tmp_path / "a.h5")


def test_a_cache_is_moved_with_its_parts_and_merged_into_one_file(tmp_path: Path) -> None:
    samples = mixed(20)
    joined(tmp_path, samples, 3)
    build(tmp_path / "one.h5", samples, fingerprint={"length": 20})
    (tmp_path / "there").mkdir()
    shutil.move(tmp_path / "a.h5", tmp_path / "there")
    shutil.move(tmp_path / "a.parts", tmp_path / "there")
    done: list[tuple[int, int]] = []
    index = merge(
        tmp_path / "there" / "a.h5", tmp_path / "m.h5", progress=lambda *told: done.append(told)
    )
    assert (tmp_path / "m.h5").read_bytes() == (tmp_path / "one.h5").read_bytes()
    assert (index.rows, index.shards, done[-1][0]) == (20, (), done[-1][1])
    with pytest.raises(CacheError, match=r"m\.h5 exists; delete it"):
        merge(tmp_path / "there" / "a.h5", tmp_path / "m.h5")
    (tmp_path / "there" / "a.parts" / "00006.h5").unlink()
    with pytest.raises(CacheError, match=r"shard a\.parts/00006\.h5 of the cache .* is missing"):
        merge(tmp_path / "there" / "a.h5", tmp_path / "n.h5")


@relaxed
@given(samples=datasets(), of=st.integers(1, 6))
def test_any_parts_are_merged_into_the_file_that_one_process_writes(
    tmp_path_factory: pytest.TempPathFactory, samples: list[Any], of: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        joined(folder, samples, of)
        merge(folder / "a.h5", folder / "m.h5")
        build(folder / "one.h5", samples, fingerprint={"length": len(samples)})
        assert (folder / "m.h5").read_bytes() == (folder / "one.h5").read_bytes()
    finally:
        shutil.rmtree(folder)


def test_a_shard_with_impossible_offsets_is_not_joined(tmp_path: Path) -> None:
    joined(tmp_path, ["ab" * row for row in range(6)], 2)
    shard = shards(tmp_path)[1]
    place = Index.parse(str(shard)).columns[0].offsets
    assert place is not None
    whole = shard.read_bytes()
    for row, value in ((0, 1), (1, 1 << 60), (3, 5)):
        data = bytearray(whole)
        data[place.offset + 8 * row : place.offset + 8 * row + 8] = value.to_bytes(8, "little")
        shard.write_bytes(data)
        with pytest.raises(
            CacheError, match=f"the part a.parts/{shard.name} is damaged, in column"
        ):
            join(tmp_path / "a.h5")


def test_a_file_that_is_no_joined_one_is_not_replaced(tmp_path: Path) -> None:
    joined(tmp_path, mixed(6), 2)
    shutil.copy(shards(tmp_path)[0], tmp_path / "a.h5")
    with pytest.raises(CacheError, match=r"a\.h5 exists and is not a joined cache; delete it"):
        join(tmp_path / "a.h5")


def test_the_samples_of_a_rank() -> None:
    for samples in (0, 1, 7, 100, 10**9 + 7):
        for of in (1, 3, 8, 1000):
            ranges = [range_of(rank, of, samples) for rank in range(of)]
            assert ranges[0].start == 0
            assert ranges[-1].stop == samples
            assert all(one.stop == other.start for one, other in pairwise(ranges))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


# Indexes that somebody made up


class Whole:
    """A sound joined file of three shards, and the parts of it that tests spoil."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.h5"
        self.index = joined(folder, mixed(9), 3)
        self.data = self.path.read_bytes()
        self.fields: dict[str, Any] = json.loads(self.index.text())

    def read(self, fields: Any) -> str:
        """Everything in the file with this index, its digest right: "read", or the errors."""
        block = self.index.user_block
        while len(json.dumps(fields)) + HEADER > block:
            block *= 2
        if block > self.index.user_block:
            fields["file_bytes"] += block - self.index.user_block
        text = json.dumps(fields).encode()
        self.path.write_bytes(seal(text, block) + self.data[self.index.user_block :])
        said = []
        tracemalloc.start()
        try:
            try:
                cached = CachedDataset(self.path)
            except CacheError as error:
                return str(error)
            finally:
                verify(self.path)
            for row in range(min(len(cached), 20)):
                try:
                    cached[row]
                except CacheError as error:
                    said.append(str(error))
            try:
                cached.__getitems__(range(min(len(cached), 20)))
                assert all(type(text) is str for _, text in cached.failed)
            except CacheError as error:
                said.append(str(error))
            assert tracemalloc.get_traced_memory()[1] < 30 << 20
        finally:
            tracemalloc.stop()
        assert all(len(text) < 3000 for text in said)
        return "; ".join(said) or "read"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


def test_the_index_that_nobody_spoilt(whole: Whole) -> None:
    assert whole.read(whole.fields) == "read"


NAMES = ["", ".", "..", "../a.h5", "/etc/passwd", "c/b/a.h5", "../b/a.h5",
         "a/../b.h5", "/a.h5", "a/", "../..", "a\\b.h5", "a\0.h5", "a\n.h5", "\ud800",
         "é" * 128, "a" * 300, "\x1b[2J.h5", "\u202ea.h5"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_shard_is_a_file_beside_this_one(whole: Whole, name: str) -> None:
    assert not is_shard_name(name)
    fields = copy.deepcopy(whole.fields)
    fields["shards"][1]["name"] = name
    assert "shard 1 is named" in whole.read(fields)
    assert is_shard_name("é b%.h5")
    assert is_shard_name("é b%/a.h5")


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
def test_what_is_wrong_is_said(whole: Whole, way: str, value: Any, message: str) -> None:
    fields = copy.deepcopy(whole.fields)
    *keys, last = (int(key) if key.isdigit() else key for key in way.split("."))
    inner: Any = fields
    for key in keys:
        inner = inner[key]
    inner[last] = value
    said = whole.read(fields)
    assert re.search(message, said), said


def test_rows_that_are_counted_otherwise_in_the_shards(whole: Whole) -> None:
    fields = copy.deepcopy(whole.fields)
    for number, rows in enumerate((1, 5, 3)):
        fields["shards"][number]["rows"] = fields["shards"][number]["samples"] = rows
    said = whole.read(fields)
    assert "has 3 rows, and 1 when it was joined" in said
    fields = copy.deepcopy(whole.fields)
    fields["shards"].reverse()  # a joined file may do that: they are rows, in another order
    assert whole.read(fields) == "read"


def test_another_structure_than_that_of_the_shards(whole: Whole) -> None:
    fields = copy.deepcopy(whole.fields)
    fields["structure"]["dict"][2][0] = fields["columns"][2]["name"] = "other"
    assert "has samples that are built differently" in whole.read(fields)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**64) | st.text(max_size=9) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(relaxed, max_examples=120)
@given(st.data())
@pytest.mark.nightly
def test_values_of_the_index_changed(whole: Whole, data: st.DataObject) -> None:
    fields = copy.deepcopy(whole.fields)
    for _ in range(data.draw(st.integers(1, 3))):
        inner: Any = fields
        key: Any = data.draw(st.sampled_from(["shards", "columns", "rows", "samples", "structure"]))
        while isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.integers(0, 5)):
            inner = inner[key]
            key = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict)
                                            else range(len(inner))))  # fmt: skip
        if type(inner[key]) is int and data.draw(st.booleans()):
            inner[key] += data.draw(st.integers(-9, 9))
        else:
            inner[key] = data.draw(ANY)
    whole.read(fields)


# A shard by itself


def test_a_part_is_a_cache_whose_failures_have_the_numbers_of_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    parts_folder(path).mkdir()
    for rank in range(3):
        fingerprint = {"length": 12, "first": 4 * rank}
        build(
            parts_folder(path) / f"{4 * rank:05d}.h5", mixed(3), failed=[(rank, f"no {rank}")],
            fingerprint=fingerprint,
        )  # fmt: skip
    cached = [CachedDataset(shard) for shard in shards(tmp_path)]
    assert [each.failed for each in cached] == [[(0, "no 0")], [(5, "no 1")], [(10, "no 2")]]
    assert verify(shards(tmp_path)[1]) == []
    index = join(path)
    assert (index.rows, index.samples) == (9, 12)
    assert CachedDataset(path).failed == [(0, "no 0"), (5, "no 1"), (10, "no 2")]
    with h5py.File(path) as file:
        assert file["failed/rows"][:].tolist() == [0, 5, 10]


@pytest.mark.parametrize(
    "fingerprint",
    [
        {}, {"first": -1}, {"first": True}, {"first": "1"}, {"first": 1 << 60},
        {"shard": "1 of 3"}, {"shard": "3 of 3", "length": 9}, {"shard": "1 of 0", "length": 9},
        {"shard": "1 of 3", "length": -9}, {"shard": "1 of 3", "length": True},
        {"shard": "1 of 3", "length": 10**30}, {"shard": ["1 of 3"], "length": 9},
        {"shard": "9" * 5000 + " of 3", "length": 9}, {"shard": "\u0661 of \u0663", "length": 9},
    ],
    ids=lambda each: repr(each)[:40],
)  # fmt: skip
def test_a_fingerprint_that_says_nothing_of_a_shard(tmp_path: Path, fingerprint: Any) -> None:
    build(tmp_path / "a.h5", [1], failed=[(1, "b")], fingerprint=fingerprint)
    cached = CachedDataset(tmp_path / "a.h5")
    assert first_of(cached.index) == 0
    assert cached.failed == [(1, "b")]

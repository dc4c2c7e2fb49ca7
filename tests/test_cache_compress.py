"""Compressed columns: the same samples, the same bits however built, and nothing believed."""

import re
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, Compressed, merge, verify
from dataloaders.cache.format.codecs import Codec, Undecodable
from helpers.cached import build, built, refused, spoil
from helpers.compare import assert_same, bits
from helpers.datasets import Made
from helpers.processes import takes_less_than

hdf5plugin = pytest.importorskip("hdf5plugin", reason="needs hdf5plugin")
zstandard = pytest.importorskip("zstandard", reason="needs zstandard")

FILTERS = {"zstd": "32015", "gzip": "gzip"}  # as h5py has them
BOTH = pytest.mark.parametrize("codec", FILTERS)


def rows_of(count):
    """Samples that compress, with columns of every sort: bytes, floats, one shape and many."""
    ramp = np.arange(4000)
    return [
        {
            "image": Image.fromarray((ramp[:2700] // 30 + row).astype(np.uint8).reshape(30, 30, 3)),
            "photo": Image.fromarray(
                (ramp[: 300 * (5 + row % 4)] // 90 + row).astype(np.uint8).reshape(-1, 20, 3)
            ),
            "features": torch.arange(100.0) + row,
            "big endian": (ramp[:150] * row).astype(">i4"),
            "waves": np.exp(1j * np.round(ramp[: row % 50] / 7, 2)),
            "words": f"row {row} " * (row % 40),
            "flags": ramp[:200] % (row + 2) == 0,
            "some": None if row % 3 else ramp[:300].astype(np.uint16),
            "either": (ramp[: 90 + row % 2] % 99).astype(np.uint8) if row % 5 else f"{row} " * 40,
            "noise": np.random.default_rng(row).bytes(700),
            "label": row,
        }
        for row in range(count)
    ]


def picture(index, height=40, width=48):
    """An image that compresses."""
    places = np.arange(height * width * 3).reshape(height, width, 3) // 50 + index * 31
    return Image.fromarray((places % 251).astype(np.uint8))


pictures = Made(
    lambda n: {"image": picture(n), "vector": torch.full((300,), n / 7), "label": n}, 60
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Path and index of a compressed cache, by its codec; and the samples."""
    folder, samples, caches = tmp_path_factory.mktemp("packed"), rows_of(700), {}
    build(folder / "plain.h5", samples)
    for codec in FILTERS:
        path = folder / f"{codec}.h5"
        caches[codec] = path, build(path, samples, compress=Compressed(codec))
    return caches, samples


@BOTH
def test_rows_are_the_samples_in_many_threads(packed, codec):
    (path, index), samples = packed[0][codec], packed[1]
    assert [column.name for column in index.columns if column.packing is None] == ["label"]
    cached, wanted = CachedDataset(path), [bits(sample) for sample in samples]

    def is_read(seed):
        rows = np.random.default_rng(seed).integers(0, 700, 80).tolist()
        found = [cached[row] for row in rows] if seed % 2 else cached.__getitems__(rows)
        return [bits(sample) for sample in found] == [wanted[row] for row in rows]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(is_read, range(8)))
    assert verify(path) == []
    refused(rf"'image' is compressed with {codec}, so it .*rows", cached.column, "image")
    assert cached.column("label").tolist() == list(range(700))


@BOTH
def test_h5py_reads_the_same_values(packed, codec):
    path = packed[0][codec][0]
    assert hdf5plugin.get_filters()
    seen = 0
    with h5py.File(path.with_name("plain.h5")) as plain, h5py.File(path) as file:

        def compare(name, found):
            nonlocal seen
            if isinstance(found, h5py.Dataset):
                other = file[f"columns/{name}"]
                assert (other.dtype, other.shape) == (found.dtype, found.shape)
                assert other[()].tobytes() == found[()].tobytes(), name
                seen += FILTERS[codec] in other._filters

        plain["columns"].visititems(compare)
        assert sorted(file["pieces"]) == sorted(set(file["columns"]) - {"label"})
        for name in ("image", "features"):
            table, dataset = file[f"pieces/{name}"][:], file[f"columns/{name}"]
            for row, (place, length) in enumerate(table.tolist()):
                chunk = dataset.id.get_chunk_info_by_coord(
                    (row * dataset.chunks[0],) + (0,) * (dataset.ndim - 1)
                )
                assert (chunk.byte_offset, chunk.size) == (place, length)
    assert seen == 10


@BOTH
def test_a_row_of_several_pieces(tmp_path, codec):
    rows = [np.arange(number * 50_000, dtype="<u4") // 9 for number in range(4)]
    fixed = [np.full(70_000, number, "<u4") for number in range(3)]  # larger than a piece is else
    for samples in (rows, fixed, fixed[:1]):  # the last has one piece
        build(tmp_path / "a.h5", samples, compress=Compressed(codec))
        cached = CachedDataset(tmp_path / "a.h5")
        assert bits(list(cached)) == bits(cached[:]) == bits(samples)


def test_no_piece_of_each_part_is_kept(path):
    samples = Made(lambda row: [np.full(1 << 14, row % 251, np.uint8)] * 4, 240)
    cached = built(samples, path, compress="gzip", rows=8, single_file=False)
    assert len(cached.shards) == 30
    with takes_less_than(4 << 20):  # 30 times four pieces are twice as much
        for row in range(240):
            assert all((each == row % 251).all() for each in cached[row])


@BOTH
def test_the_file_and_how_it_was_compressed(tmp_path, codec):
    def make(name, compress, **options):
        return built(pictures, tmp_path / name, compress=compress, **options)

    one = make("a.h5", codec)
    two = make("b.h5", Compressed(codec), num_workers=2, rows=7)
    assert one.path.read_bytes() == two.path.read_bytes()
    assert [column.packing is not None for column in one.columns] == [True, True, False]
    assert make("a.h5", None).identity == make("a.h5", codec).identity == one.identity
    assert make("c.h5", None).index.file_bytes > 2 * one.index.file_bytes
    level = {"zstd": 3, "gzip": 4}[codec]
    rule = f"compress: {codec}, level {level} when it was built, {codec}, level 9 now"
    refused(rule, make, "a.h5", Compressed(codec, 9))
    refused(f"compress: none when it was built, {codec}, level {level} now", make, "c.h5", codec)
    assert make("c.h5", codec, overwrite=True).columns[0].packing is not None


@pytest.mark.parametrize("says", ["zstd, level 99", f"gzip, level {'9' * 5000}", ["gzip"]])
def test_a_copy_of_a_file_that_says_what_no_build_does(path, tmp_path, says):
    build(path, [1, 2, 3], fingerprint={"compress": says})
    merge(path, tmp_path / "m.h5")
    assert list(CachedDataset(tmp_path / "m.h5")) == [1, 2, 3]


class Rows(Made):
    def sample(self, index):
        image = self.transform(picture(index, *self.sizes[index % len(self.sizes)]))
        rest = {"flags": torch.arange(200) % (index + 2) == 0, "words": f"row {index} " * 20}
        return {"image": image, **rest, "label": index}


@pytest.mark.parametrize(
    ("codec", "num_workers", "sizes", "single_file"),
    [
        ("zstd", 0, ((40, 48), (52, 44), (64, 64)), True),
        ("gzip", 2, ((40, 48),), True),
        ("zstd", 0, ((40, 48),), False),
    ],
)
def test_whole_batches_of_compressed_columns(path, codec, num_workers, sizes, single_file):
    chain = v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    dataset = Rows(size=700, transform=chain, sizes=sizes)
    cached = built(dataset, path, compress=codec, rows=100, single_file=single_file)
    packed = [column.packing is not None for column in cached.columns]
    assert packed == [True] * 3 + [False] or not single_file
    options = {"sampler": [5, 699, 5, 0, 333], "seed": 3, "num_workers": num_workers}
    ours = DataLoader(dataset, 4, backend=H5(cached.path), **options)
    assert "batches are made at once" in str(ours.explain())
    assert_same(list(ours), list(DataLoader(dataset, 4, **options)))


@BOTH
def test_a_damaged_piece_is_named_by_verify_and_by_its_row(packed, codec):
    path, index = packed[0][codec]
    whole = path.read_bytes()
    for column in index.columns:
        if column.packing is None:
            continue
        place, length = struct.unpack_from("<QQ", whole, column.packing.pieces.offset)
        spoil(path, place + length // 2, whole=whole)
        (damage,) = verify(path)
        assert damage.offset <= place + length // 2 < damage.offset + damage.bytes
        assert re.search(f"column '{column.name}'|compressed values", damage.what)
    table = index.columns[0].packing.pieces.offset
    spoil(path, table, b"\xff" * 16, whole)
    assert "(pieces)" in verify(path)[0].what
    place, length = struct.unpack_from("<QQ", whole, table)
    spoil(path, place, bytes(length), whole)
    cached = CachedDataset(path)
    rule = "column 'image', row 3: piece 0 of it does not decode to 64800 bytes: .*verify"
    for read, rows in ((cached.__getitem__, 3), (cached.__getitems__, [3])):
        refused(rule, read, rows)
    assert cached[699]["label"] == 699
    path.write_bytes(whole)


@BOTH
@settings(max_examples=40)
@given(data=st.data(), raw=st.binary(min_size=1, max_size=80))
def test_bytes_decode_to_the_size_or_do_not(codec, data, raw):
    found = Codec(codec, 1)
    encoded = found.encode(np.frombuffer(raw, np.uint8), 5)
    assert found.decode(np.frombuffer(encoded, np.uint8), len(raw)).tobytes() == raw
    wrong = [(encoded, len(raw) + 1), (encoded, 1 << 29), (encoded + b"\0", len(raw))]
    wrong.append((encoded[: data.draw(st.integers(0, len(encoded) - 1))], len(raw)))
    for each, size in wrong:
        with pytest.raises(Undecodable):
            found.decode(np.frombuffer(each, np.uint8), size)
    with suppress(Undecodable):
        assert found.decode(np.frombuffer(raw, np.uint8), 99).size == 99


def test_bombs_take_no_memory():
    size, zeros = 1 << 16, bytes(1 << 28)
    bomb = zstandard.ZstdCompressor().compress(zeros)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(size)))
    lying[6:] = bomb[8:]  # the length of a piece, and the blocks of the bomb
    zipped = zlib.compress(zeros)
    del zeros
    parameters = zstandard.ZstdCompressionParameters(window_log=27)  # larger than the piece
    wide = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    window = wide.compress(b"abc") + wide.flush()
    for codec, data, most in (
        *(("zstd", each, size) for each in (bomb, unsized, bytes(lying))),
        ("gzip", zipped, size),
        ("zstd", window, 3),
    ):
        with takes_less_than(2 << 20), pytest.raises(Undecodable):
            Codec(codec, 1).decode(np.frombuffer(data, np.uint8), most)

"""Compressed columns: the same samples, the same bits however built, and nothing believed."""

import copy
import hashlib
import itertools
import json
import re
import struct
import threading
import tracemalloc
import zlib
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from backends.h5 import H5
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, Compressed, precompute, verify
from dataloaders.cache.format import compress as compressing
from dataloaders.cache.format import writing
from dataloaders.cache.format.codecs import CODECS, Undecodable, codec_of
from dataloaders.cache.format.compress import piece_of
from dataloaders.cache.format.entries import LARGEST_ROW
from dataloaders.cli import main
from dataloaders.errors import CacheError, OptionError
from helpers.cached import build, datasets, spoil
from helpers.compare import assert_same, bits
from helpers.compressible import Pictures, rows_of
from helpers.hostile import seal

BOTH = pytest.mark.parametrize("codec", CODECS)
FILTERS = {"zstd": "32015", "gzip": "gzip"}
relaxed = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def digest(path):
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@pytest.fixture
def small(monkeypatch):
    """Columns of any size are compressed, in pieces of a few values."""
    monkeypatch.setattr(compressing, "_LEAST", 1)
    monkeypatch.setattr(compressing, "_LEAST_ROW", 0)
    monkeypatch.setattr(compressing, "_PIECE", 48)
    monkeypatch.setattr(writing, "_WORTH", 1 << 20)


# The same samples, the same bits


@BOTH
@relaxed
@given(data=st.data())
@pytest.mark.nightly
def test_samples_come_back_to_the_bit(tmp_path, small, codec, data):
    samples = data.draw(datasets())
    samples = [samples[number % len(samples)] for number in range(3 * len(samples))]
    path = tmp_path / "a.h5"
    index = build(path, samples, compress=Compressed(codec))
    for column in index.columns:
        encoded = any(kind.startswith("encoded:") for kind, _ in column.variants)  # mode P
        assert (column.packing is None) == (column.values.size == 0 or encoded)
    cached = CachedDataset(path)
    wanted = [bits(sample) for sample in samples]
    assert [bits(sample) for sample in cached] == wanted
    assert [bits(sample) for sample in cached.__getitems__(range(len(samples))[::-1])] == wanted[
        ::-1
    ]
    assert verify(path) == []


def test_what_does_not_get_smaller_is_kept_as_it_is(tmp_path):
    samples = [np.random.default_rng(row).integers(0, 256, 70_000, np.uint8) for row in range(30)]
    plain = build(tmp_path / "plain.h5", samples)
    index = build(tmp_path / "a.h5", samples, compress=Compressed("zstd"))
    assert index.columns[0].packing is not None
    assert abs(index.file_bytes - plain.file_bytes) < 20_000
    cached = CachedDataset(tmp_path / "a.h5")
    assert all((cached[row] == samples[row]).all() for row in range(30))
    cached[3][:] = 0  # a copy all the same
    assert (cached[3] == samples[3]).all()


@BOTH
def test_small_columns_and_no_rows(tmp_path, codec):
    index = build(tmp_path / "a.h5", rows_of(20), compress=Compressed(codec))
    packed = [column.name for column in index.columns if column.packing is not None]
    assert packed == []
    build(tmp_path / "plain.h5", rows_of(20))
    assert digest(tmp_path / "a.h5") == digest(tmp_path / "plain.h5")
    assert build(tmp_path / "a.h5", [], compress=Compressed(codec)).columns == ()
    build(tmp_path / "a.h5", [None] * 100_000, compress=Compressed(codec))
    assert CachedDataset(tmp_path / "a.h5")[99_999] is None


def test_what_is_worth_it():
    assert piece_of(1, 100, (3, 8, 8), 19200, 192) == 0  # all of it is little
    assert piece_of(8, 10**7, (), 10**7, 1) == 0  # a label is little
    assert piece_of(1, 1000, (3, 64, 64), 12288 * 1000, 12288) == 5 * 12288
    assert piece_of(4, 1000, (3, 640, 640), 10**9, 3 * 640 * 640) == 3 * 640 * 640
    assert piece_of(4, 1000, None, 10**7, 10**5) == 1 << 14
    assert piece_of(1, 2, (LARGEST_ROW,), 2 * LARGEST_ROW, LARGEST_ROW) == LARGEST_ROW
    assert piece_of(2, 2, (LARGEST_ROW,), 2 * LARGEST_ROW, LARGEST_ROW) == 0
    assert piece_of(1, 2, None, 2 * LARGEST_ROW + 1, LARGEST_ROW + 1) == 0


# HDF5's own library


@BOTH
def test_h5py_reads_the_same_values(tmp_path, codec):
    samples = rows_of(700)
    build(tmp_path / "plain.h5", samples)
    build(tmp_path / "a.h5", samples, compress=Compressed(codec))
    assert hdf5plugin.get_filters()
    seen = 0
    with h5py.File(tmp_path / "plain.h5") as plain, h5py.File(tmp_path / "a.h5") as file:

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


# Reading


@BOTH
@pytest.mark.nightly
def test_threads_and_forks_and_other_workers_read_at_once(tmp_path, codec):
    samples = rows_of(400)
    build(tmp_path / "a.h5", samples, compress=Compressed(codec))
    cached = CachedDataset(tmp_path / "a.h5")
    wanted = [bits(sample) for sample in samples]
    wrong = []

    def read(seed):
        for row in np.random.default_rng(seed).integers(0, 400, 80).tolist():
            if bits(cached[row]) != wanted[row]:
                wrong.append(row)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for context in ("fork", "forkserver") if codec == "zstd" else ("fork",):
        loader = torch.utils.data.DataLoader(
            cached, batch_size=None, num_workers=1, multiprocessing_context=context, collate_fn=bits
        )
        assert list(loader) == wanted


def test_a_compressed_column_is_no_array(tmp_path):
    build(tmp_path / "a.h5", rows_of(300), compress=Compressed("zstd"))
    cached = CachedDataset(tmp_path / "a.h5")
    with pytest.raises(CacheError, match=r"'image' is compressed with zstd, so it .*rows"):
        cached.column("image")
    assert cached.column("label").tolist() == list(range(300))


# Building


@BOTH
def test_precompute(tmp_path, codec):
    one = precompute(Pictures(), tmp_path / "a.h5", compress=codec, num_workers=0)
    two = precompute(
        Pictures(), tmp_path / "b.h5", compress=Compressed(codec), num_workers=2, rows=7
    )
    assert digest(tmp_path / "a.h5") == digest(tmp_path / "b.h5")
    assert [column.packing is not None for column in one.columns] == [True, True, False]
    assert [bits(sample) for sample in two] == [bits(Pictures()[row]) for row in range(60)]
    again = precompute(Pictures(), tmp_path / "a.h5")  # as it is
    assert again.identity == one.identity
    assert precompute(Pictures(), tmp_path / "a.h5", compress=codec).identity == one.identity
    plain = precompute(Pictures(), tmp_path / "c.h5")
    assert plain.index.file_bytes > 2 * one.index.file_bytes


def test_a_file_that_is_compressed_otherwise_is_an_error(tmp_path):
    precompute(Pictures(), tmp_path / "a.h5", compress="zstd", num_workers=0)
    with pytest.raises(
        CacheError, match="compress: zstd, level 3 when it was built, gzip, level 4"
    ):
        precompute(Pictures(), tmp_path / "a.h5", compress="gzip", num_workers=0)
    with pytest.raises(
        CacheError, match="compress: zstd, level 3 when it was built, zstd, level 9"
    ):
        precompute(Pictures(), tmp_path / "a.h5", compress=Compressed("zstd", 9), num_workers=0)
    precompute(Pictures(), tmp_path / "b.h5", num_workers=0)
    with pytest.raises(CacheError, match="compress: none when it was built, zstd, level 3 now"):
        precompute(Pictures(), tmp_path / "b.h5", compress="zstd", num_workers=0)
    done = precompute(Pictures(), tmp_path / "b.h5", compress="zstd", num_workers=0, overwrite=True)
    assert done.columns[0].packing is not None


@pytest.mark.parametrize(
    ("compress", "message"),
    [
        ("blosc", "compress='blosc': it must be None, 'zstd' or 'gzip'"),
        (9, r"compress=9: it must be None, a codec's name, or Compressed\(codec, level\)"),
        (lambda: Compressed("zstd", 23), r"level=23\): the level must be an int from 1 to 22"),
        (lambda: Compressed("gzip", 0), r"level=0\): .* from 1 to 9, or None for 4"),
        (lambda: Compressed("zstd", True), "level=True"),
    ],
)
def test_options(tmp_path, compress, message):
    with pytest.raises(OptionError, match=message):
        precompute(
            Pictures(), tmp_path / "a.h5", compress=compress() if callable(compress) else compress
        )
    assert not (tmp_path / "a.h5").exists()


# backend="h5"


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sizes", [((40, 48),), ((40, 48), (52, 44), (64, 64))])
@pytest.mark.covering
def test_whole_batches_of_compressed_columns(tmp_path, codec, num_workers, sizes):
    chain = v2.Compose([v2.RandomCrop(32), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    dataset = Rows(chain, sizes=sizes)
    cached = precompute(dataset, tmp_path / "a.h5", compress=codec, num_workers=0)
    assert [column.packing is None for column in cached.columns] == [False] * 3 + [True]
    options = {"sampler": [5, 699, 5, 0, 333], "seed": 3, "num_workers": num_workers}
    ours = DataLoader(dataset, 4, backend=H5(cached.path), **options)
    assert "batches are made at once" in str(ours.explain())
    assert_same(list(ours), list(DataLoader(dataset, 4, **options)))


class Rows(Pictures):
    def __init__(self, *given, **options):
        super().__init__(*given, count=700, **options)

    def __getitem__(self, index):
        rest = {"flags": torch.arange(200) % (index + 2) == 0, "words": f"row {index} " * 20}
        return {"image": self.transform(super().image(index)), **rest, "label": index}


# The command line


def test_the_command_line(tmp_path, capsys):
    source = f"{Path(__file__).parent / 'helpers' / 'compressible.py'}:pictures"
    path = str(tmp_path / "a.h5")
    command = ["cache", "build", source, path, "--compress", "zstd", "--level", "9", "--quiet"]
    assert main([*command, "--workers", "0"]) == 0
    assert CachedDataset(path).index.fingerprint["compress"] == "zstd, level 9"
    capsys.readouterr()
    assert main(["cache", "info", path]) == 0
    told = capsys.readouterr().out
    assert re.search(r"image +image:RGB +uint8 +3 x 40 x 48 +\S+ KiB +zstd, to 1/\d+\.\d", told)
    assert "built from compress: zstd, level 9" in told
    assert main(["cache", "verify", path, "--quiet"]) == 0
    assert main(["cache", "build", source, path, "--level", "9"]) != 0
    assert "--level 9: give --compress too" in capsys.readouterr().err


# Damage


@BOTH
def test_verify_names_the_column_of_a_damaged_piece(tmp_path, codec):
    path = tmp_path / "a.h5"
    index = build(path, rows_of(300), compress=Compressed(codec))
    whole = path.read_bytes()
    for column in index.columns:
        if column.packing is None:
            continue
        offset, size = column.packing.pieces
        place, length = np.frombuffer(whole, "<u8", size, offset).reshape(-1, 2)[0].tolist()
        spoil(path, place + length // 2)
        (damage,) = verify(path)
        assert damage.offset <= place + length // 2 < damage.offset + damage.bytes
        assert f"column '{column.name}'" in damage.what
        spoil(path, place + length // 2)
    offset = next(c.packing.pieces.offset for c in index.columns if c.packing is not None)
    spoil(path, offset, b"\xff" * 16)
    assert "(pieces)" in verify(path)[0].what


def test_a_damaged_piece_is_an_error_that_names_its_row(tmp_path):
    path = tmp_path / "a.h5"
    index = build(path, rows_of(700), compress=Compressed("zstd"))
    packing = index.columns[0].packing
    assert packing is not None
    whole = path.read_bytes()
    place, length = struct.unpack_from("<QQ", whole, packing.pieces.offset)
    spoil(path, place, bytes(length))
    cached = CachedDataset(path)
    pattern = "column 'image', row 3: piece 0 of it does not decode to 64800 bytes: .*verify"
    for read in (lambda: cached[3], lambda: cached.__getitems__([3]), lambda: cached[3:4]):
        with pytest.raises(CacheError, match=pattern):
            read()
    assert cached[100]["label"] == 100


# Files that somebody made to do harm


class Hostile:
    """A sound file, and ways to spoil it that keep the index's digest right."""

    def __init__(self, path, codec):
        samples = [
            {"image": np.full(3000, row % 250, np.uint8), "text": "ab" * 100} for row in range(400)
        ]
        self.index = build(path, samples, compress=Compressed(codec))
        self.data = bytearray(path.read_bytes())
        self.fields = json.loads(self.index.text())

    def tables(self):
        return [tuple(each["packing"]["pieces"]) for each in self.fields["columns"]]

    def with_fields(self, fields):
        block = self.index.user_block
        text = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
        return seal(text, block) + bytes(self.data[block:])


@pytest.fixture(scope="module", params=list(CODECS))
def hostile(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "a.h5"
    made = Hostile(path, request.param)
    for data in (bytes(made.data), made.with_fields(made.fields)):
        assert read_all(path, data) == set()
    return made


def read_all(path, data, most=8 << 20):
    """What the errors said while all was read, of which no more memory was taken."""
    path.write_bytes(data)
    said = set()
    tracemalloc.start()
    try:
        try:
            cached = CachedDataset(path)
        except CacheError as error:
            return {str(error)}
        for row in range(0, len(cached), 7):
            try:
                cached[row]
            except CacheError as error:
                said.add(str(error))
        try:
            cached.__getitems__([0, 399])
        except CacheError as error:
            said.add(str(error))
        for damage in verify(path):
            assert len(damage.what) < 1000
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    return said


@relaxed
@given(data=st.data())
def test_spoilt_tables_and_pieces(tmp_path, hostile, data):
    spoilt = bytearray(hostile.data)
    places = [
        (offset + 8 * number, 8) for offset, size in hostile.tables() for number in range(size)
    ]
    for offset, size in hostile.tables():
        for place, length in struct.iter_unpack("<QQ", hostile.data[offset : offset + 8 * size]):
            places += [(place, min(length, 40)), (place, length)]
    numbers = [
        0,
        1,
        2**16,
        2**63,
        2**64 - 1,
        len(spoilt),
        len(spoilt) - 1,
        hostile.index.user_block,
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        place, length = data.draw(st.sampled_from(places))
        if length == 8:
            spoilt[place : place + 8] = data.draw(st.sampled_from(numbers)).to_bytes(8, "little")
        else:
            at = place + data.draw(st.integers(0, length - 1))
            some = data.draw(st.binary(min_size=1, max_size=8))[: place + length - at]
            spoilt[at : at + len(some)] = some
    for said in read_all(tmp_path / "a.h5", bytes(spoilt)):
        assert re.match("column '(image|text)', row \\d+: ", said), said


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(("values", values, "the index of the cache .* values")
          for values in ([4096, 1_200_000], [0, 1_199_999], [0, 0], [0, -1], 7)),
        ("packing", None, "is said to stand at bytes 0 to 1200000, outside"),
        ("codec", "blosc", "is compressed with 'blosc', of zstd, gzip"),
        ("codec", None, "packing.codec is None"),
        ("piece", 0, "packing.piece is 0"),
        ("piece", 3001, "cannot be compressed in pieces of 3001 values"),
        ("piece", 300_000, "cannot be compressed in pieces of 300000 values"),
        ("piece", 2**47, "packing.piece is 140737488355328"),
        ("piece", 3000, "packing.pieces has 40 values, and should have 800"),
        ("pieces", [0, 0], "packing.pieces has 0 values"),
        ("pieces", [0, 40], "outside"),
        ("pieces", [2**47, 40], "outside"),
        ("pieces", 5, "is no list of 2"),
        ("more", 5, "lacks, or should not have, 'more'"),
    ],
)  # fmt: skip
def test_spoilt_packings(tmp_path, hostile, field, value, message):
    fields = copy.deepcopy(hostile.fields)
    column = fields["columns"][0]
    (column if field in ("values", "packing") else column["packing"])[field] = value
    (said,) = read_all(tmp_path / "a.h5", hostile.with_fields(fields))
    assert re.search(message, said)


def test_a_row_of_many_values_takes_no_more_memory_than_there_is_room_for(tmp_path, hostile):
    """All pieces of the texts are the first one, and row 0 has all of them: it is too long."""
    fields, data = copy.deepcopy(hostile.fields), bytearray(hostile.data)
    column = fields["columns"][1]
    table, _ = fields["columns"][0]["packing"]["pieces"]
    column["shape"] = None
    size = LARGEST_ROW + 1
    column["values"], column["packing"]["piece"] = [0, size], 1 << 18
    count = -(-size // (1 << 18))
    end = len(data)
    data += bytes(-len(data) % 8)
    column["packing"]["pieces"] = [len(data), 2 * count]
    data += data[table : table + 16] * count
    column["offsets"] = [len(data), 401]
    data += struct.pack("<401Q", 0, *[size] * 400)
    column["variants"], column["dimensions"] = [["bytes", 1]], 1
    blocks = -(-(len(data) - hostile.index.user_block) // (1 << 16))
    fields["checksums"]["values"] = [len(data), blocks]
    data += bytes(4 * blocks)
    fields["file_bytes"] = len(data)
    assert -(-(len(data) - hostile.index.user_block) // (1 << 16)) == blocks, end
    spoilt = Hostile.__new__(Hostile)
    spoilt.index, spoilt.data = hostile.index, data
    said = read_all(tmp_path / "a.h5", spoilt.with_fields(fields))
    assert any("more than a compressed row may" in each for each in said), said


# The codecs by themselves


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@BOTH
@relaxed
@given(data=st.data())
def test_a_codec_there_and_back(codec, width, data):
    found = codec_of(codec, width)
    unit = data.draw(st.binary(min_size=width, max_size=4 * width))
    raw = (unit * 50)[: data.draw(st.integers(1, 40)) * width]
    piece = np.frombuffer(raw, np.uint8)
    level = data.draw(st.sampled_from([1, 5, 9]))
    encoded = np.frombuffer(found.encode(piece, level), np.uint8)
    assert found.decode(encoded, len(raw)).tobytes() == raw
    for size in (len(raw) - width, len(raw) + width, 1 << 29):
        if size > 0:
            with pytest.raises(Undecodable):
                found.decode(encoded, size)
    with pytest.raises(Undecodable):
        found.decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))], len(raw))
    with pytest.raises(Undecodable):
        found.decode(np.append(encoded, np.uint8(0)), len(raw))


@BOTH
@relaxed
@given(raw=st.binary(max_size=80), size=st.integers(1, 300))
def test_any_bytes_decode_or_do_not(codec, raw, size):
    found = codec_of(codec, 1)
    start = found.encode(np.zeros(size, np.uint8), 1)
    for data in (raw, start + raw, start[: len(raw)] + raw, raw + start[len(raw) :]):
        try:
            assert found.decode(np.frombuffer(data, np.uint8), size).size == size
        except Undecodable:
            pass


def test_bombs_take_no_memory():
    size = 1 << 16
    zeros = bytes(1 << 28)
    bomb = zstandard.ZstdCompressor().compress(zeros)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(size)))
    lying[6:] = bomb[8:]  # the length of a piece, and the blocks of the bomb
    zipped = zlib.compress(zeros)
    del zeros
    tracemalloc.start()
    try:
        for codec, data in itertools.chain(
            zip(itertools.repeat("zstd"), (bomb, unsized, bytes(lying))), [("gzip", zipped)]
        ):
            with pytest.raises(Undecodable):
                codec_of(codec, 1).decode(np.frombuffer(data, np.uint8), size)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_a_window_larger_than_the_piece_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(b"abc") + compressor.flush()
    with pytest.raises(Undecodable):
        codec_of("zstd", 1).decode(np.frombuffer(frame, np.uint8), 3)

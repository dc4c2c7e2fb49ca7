"""Compressed columns: the same samples, the same bits however built, and nothing believed."""

import copy
import itertools
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
from dataloaders.cache.format.codecs import CODECS, Undecodable, codec_of
from dataloaders.cache.format.compress import piece_of
from dataloaders.cache.format.entries import LARGEST_ROW
from dataloaders.cli import main
from dataloaders.errors import CacheError, OptionError
from helpers.cached import build, spoil
from helpers.compare import assert_same, bits
from helpers.compressible import Pictures, rows_of
from helpers.hostile import Whole, said_of

BOTH = pytest.mark.parametrize("codec", CODECS)
FILTERS = {"zstd": "32015", "gzip": "gzip"}
relaxed = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# The same samples, the same bits


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Path, index and samples of a compressed cache, by its codec."""
    samples = rows_of(700)
    folder = tmp_path_factory.mktemp("packed")
    build(folder / "plain.h5", samples)
    return {
        codec: (folder / f"{codec}.h5", build(folder / f"{codec}.h5", samples, compress=how))
        for codec, how in ((codec, Compressed(codec)) for codec in CODECS)
    }, samples


@BOTH
def test_rows_are_the_samples_in_many_threads(packed, codec):
    (path, index), samples = packed[0][codec], packed[1]
    named = {column.name for column in index.columns if column.packing is not None}
    assert named == {column.name for column in index.columns} - {"label"}
    cached, wanted, wrong = CachedDataset(path), [bits(sample) for sample in samples], []

    def read(seed):
        rows = np.random.default_rng(seed).integers(0, 700, 80).tolist()
        found = [bits(cached[row]) for row in rows] if seed % 2 else None
        found = found or [bits(sample) for sample in cached.__getitems__(rows)]
        wrong.extend(row for row, each in zip(rows, found, strict=True) if each != wanted[row])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert verify(path) == []
    with pytest.raises(CacheError, match=rf"'image' is compressed with {codec}, so it .*rows"):
        cached.column("image")
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


def test_small_columns_are_not_compressed(tmp_path):
    index = build(tmp_path / "a.h5", rows_of(20), compress=Compressed("zstd"))
    assert [column.name for column in index.columns if column.packing is not None] == []
    build(tmp_path / "plain.h5", rows_of(20))
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "plain.h5").read_bytes()
    assert build(tmp_path / "a.h5", [], compress=Compressed("zstd")).columns == ()


@BOTH
def test_a_row_of_several_pieces(tmp_path, codec):
    rows = [np.arange(number * 50_000, dtype="<u4") // 9 for number in range(4)]
    build(tmp_path / "a.h5", rows, compress=Compressed(codec))
    cached = CachedDataset(tmp_path / "a.h5")
    assert (
        [bits(row) for row in cached] == [bits(row) for row in cached[:]] == list(map(bits, rows))
    )


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


def test_what_is_worth_it():
    assert piece_of(1, 100, (3, 8, 8), 19200, 192) == 0  # all of it is little
    assert piece_of(8, 10**7, (), 10**7, 1) == 0  # a label is little
    assert piece_of(1, 1000, (3, 64, 64), 12288 * 1000, 12288) == 5 * 12288
    assert piece_of(4, 1000, (3, 640, 640), 10**9, 3 * 640 * 640) == 3 * 640 * 640
    assert piece_of(4, 1000, None, 10**7, 10**5) == 1 << 14
    assert piece_of(1, 2, (LARGEST_ROW,), 2 * LARGEST_ROW, LARGEST_ROW) == LARGEST_ROW
    assert piece_of(2, 2, (LARGEST_ROW,), 2 * LARGEST_ROW, LARGEST_ROW) == 0
    assert piece_of(1, 2, None, 2 * LARGEST_ROW + 1, LARGEST_ROW + 1) == 0


# Building


@BOTH
def test_precompute(tmp_path, codec):
    one = precompute(Pictures(), tmp_path / "a.h5", compress=codec, num_workers=0)
    two = precompute(
        Pictures(), tmp_path / "b.h5", compress=Compressed(codec), num_workers=2, rows=7
    )
    assert one.path.read_bytes() == two.path.read_bytes()
    assert [column.packing is not None for column in one.columns] == [True, True, False]
    assert [bits(sample) for sample in two] == [bits(Pictures()[row]) for row in range(60)]
    again = precompute(Pictures(), tmp_path / "a.h5")  # as it is
    assert again.identity == one.identity
    assert precompute(Pictures(), tmp_path / "a.h5", compress=codec).identity == one.identity
    plain = precompute(Pictures(), tmp_path / "c.h5")
    assert plain.index.file_bytes > 2 * one.index.file_bytes


def test_a_file_that_is_compressed_otherwise_is_an_error(tmp_path):
    def make(name, compress, **options):
        return precompute(Pictures(), tmp_path / name, compress=compress, num_workers=0, **options)

    make("a.h5", "zstd")
    rule = "compress: zstd, level 3 when it was built, zstd, level 9 now"
    with pytest.raises(CacheError, match=rule):
        make("a.h5", Compressed("zstd", 9))
    make("b.h5", None)
    with pytest.raises(CacheError, match="compress: none when it was built, gzip, level 4 now"):
        make("b.h5", "gzip")
    assert make("b.h5", "gzip", overwrite=True).columns[0].packing is not None


@pytest.mark.parametrize("compress", ["blosc", 9, ("zstd", 23), ("gzip", 0), ("zstd", True)])
def test_options(tmp_path, compress):
    def make():
        given = Compressed(*compress) if type(compress) is tuple else compress
        precompute(Pictures(), tmp_path / "a.h5", compress=given)

    with pytest.raises(OptionError, match=r"it must be None|must be an int from 1 to"):
        make()
    assert not (tmp_path / "a.h5").exists()


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
    assert main(["cache", "build", source, path, "--level", "9"]) != 0
    assert "--level 9: give --compress too" in capsys.readouterr().err


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


# Damage


@BOTH
def test_a_damaged_piece_is_named_by_verify_and_by_its_row(packed, codec):
    path, index = packed[0][codec]
    whole = path.read_bytes()
    for column in index.columns:
        if column.packing is None:
            continue
        offset, size = column.packing.pieces
        place, length = np.frombuffer(whole, "<u8", size, offset).reshape(-1, 2)[0].tolist()
        spoil(path, place + length // 2)
        (damage,) = verify(path)
        assert damage.offset <= place + length // 2 < damage.offset + damage.bytes
        assert "compressed values" in damage.what
        spoil(path, place + length // 2)
    table = index.columns[0].packing.pieces.offset
    spoil(path, table, b"\xff" * 16)
    assert "(pieces)" in verify(path)[0].what
    spoil(path, table, whole[table : table + 16])
    place, length = struct.unpack_from("<QQ", whole, table)
    spoil(path, place, bytes(length))
    cached = CachedDataset(path)
    pattern = "column 'image', row 3: piece 0 of it does not decode to 64800 bytes: .*verify"
    for read in (lambda: cached[3], lambda: cached.__getitems__([3]), lambda: cached[3:4]):
        with pytest.raises(CacheError, match=pattern):
            read()
    assert cached[699]["label"] == 699
    path.write_bytes(whole)


# Files that somebody made to do harm


@pytest.fixture(scope="module", params=list(CODECS))
def hostile(request, tmp_path_factory):
    samples = [
        {"image": np.full(3000, row % 250, np.uint8), "text": "ab" * 100} for row in range(400)
    ]
    path = tmp_path_factory.mktemp("hostile") / "a.h5"
    build(path, samples, compress=Compressed(request.param))
    whole = Whole(path)
    assert read_all(path, whole.with_fields(whole.fields)) == set()
    return whole


def read_all(path, data):
    return said_of(path, data, [*range(0, 400, 7), 399], most=8 << 20)


@relaxed
@given(data=st.data())
def test_spoilt_tables_and_pieces(tmp_path, hostile, data):
    spoilt = bytearray(hostile.data)
    places = []
    for offset, size in (each["packing"]["pieces"] for each in hostile.fields["columns"]):
        places += [(offset + 8 * number, 8) for number in range(size)]
        for place, length in struct.iter_unpack("<QQ", hostile.data[offset : offset + 8 * size]):
            places += [(place, min(length, 40)), (place, length)]
    numbers = [0, 1, 2**16, 2**63, 2**64 - 1, len(spoilt), len(spoilt) - 1, 4096]
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
    ("way", "value", "message"),
    [
        *(("values", values, "the index of the cache .* values")
          for values in ([4096, 1_200_000], [0, 1_199_999], [0, 0], [0, -1], 7)),
        ("packing", None, "is said to stand at bytes 0 to 1200000, outside"),
        ("packing.codec", "blosc", "is compressed with 'blosc', of zstd, gzip"),
        ("packing.codec", None, "packing.codec is None"),
        ("packing.piece", 0, "packing.piece is 0"),
        ("packing.piece", 3001, "cannot be compressed in pieces of 3001 values"),
        ("packing.piece", 300_000, "cannot be compressed in pieces of 300000 values"),
        ("packing.piece", 2**47, "packing.piece is 140737488355328"),
        ("packing.piece", 3000, "packing.pieces has 40 values, and should have 800"),
        ("packing.pieces", [0, 0], "packing.pieces has 0 values"),
        ("packing.pieces", [0, 40], "outside"),
        ("packing.pieces", [2**47, 40], "outside"),
        ("packing.pieces", 5, "is no list of 2"),
        ("packing.more", 5, "lacks, or should not have, 'more'"),
    ],
)  # fmt: skip
def test_spoilt_packings(tmp_path, hostile, way, value, message):
    (said,) = read_all(tmp_path / "a.h5", hostile.changed({f"columns.0.{way}": value}))
    assert re.search(message, said)


def test_a_row_of_many_values_takes_no_more_memory_than_there_is_room_for(tmp_path, hostile):
    """All pieces of the texts are the first one, and row 0 has all of them: it is too long."""
    fields, data = copy.deepcopy(hostile.fields), bytearray(hostile.data)
    column = fields["columns"][1]
    table, _ = fields["columns"][0]["packing"]["pieces"]
    size = LARGEST_ROW + 1
    count = -(-size // (1 << 18))
    data += bytes(-len(data) % 8)
    column["packing"] |= {"piece": 1 << 18, "pieces": [len(data), 2 * count]}
    data += data[table : table + 16] * count
    column |= {"shape": None, "values": [0, size], "offsets": [len(data), 401]}
    column |= {"variants": [["bytes", 1]], "dimensions": 1}
    data += struct.pack("<401Q", 0, *[size] * 400)
    blocks = -(-(len(data) - hostile.index.user_block) // (1 << 16))
    fields["checksums"]["values"] = [len(data), blocks]
    data += bytes(4 * blocks)
    fields["file_bytes"] = len(data)
    spoilt = copy.copy(hostile)
    spoilt.data = bytes(data)
    said = read_all(tmp_path / "a.h5", spoilt.with_fields(fields))
    assert any("more than a compressed row may" in each for each in said), said


# The codecs by themselves


@BOTH
@relaxed
@given(data=st.data(), width=st.sampled_from([1, 2, 4, 8, 16]))
def test_a_codec_there_and_back(codec, width, data):
    found = codec_of(codec, width)
    unit = data.draw(st.binary(min_size=width, max_size=4 * width))
    raw = (unit * 50)[: data.draw(st.integers(1, 40)) * width]
    encoded = np.frombuffer(found.encode(np.frombuffer(raw, np.uint8), 5), np.uint8)
    assert found.decode(encoded, len(raw)).tobytes() == raw
    short = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    sizes = (len(raw) - width, len(raw) + width, 1 << 29)
    wrong = [(encoded, size) for size in sizes if size > 0]
    for each, size in (*wrong, (short, len(raw)), (np.append(encoded, np.uint8(0)), len(raw))):
        with pytest.raises(Undecodable):
            found.decode(each, size)


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

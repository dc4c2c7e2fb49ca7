"""The index of a cache: where in the file each value stands, read without HDF5.

    byte 0   magic (12), version (4), length of the text (8), size of the user block (8),
             blake2b-16 of these 32 bytes and the text (16), zero (16)
    byte 64  text: JSON, ASCII, keys sorted
    ...      zero, up to the size of the user block, where plain HDF5 begins

A joined cache has the same index, and with it the list of its shards, which have the values.

Nothing in a file is believed: `Index.parse` takes a bounded number of bytes, and checks the type
and range of each field, so that whoever reads by an `Index` reads inside the file.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dataloaders.cache.chunk import MOST_VARIANTS, Variant
from dataloaders.cache.codecs import CODECS
from dataloaders.cache.printable import shown as _shown
from dataloaders.cache.sample import DTYPES, Structure, column_names, fits
from dataloaders.errors import CacheError

__all__ = [
    "BLOCK",
    "DIGEST",
    "HEADER",
    "LARGEST_PIECE",
    "LARGEST_ROW",
    "MAGIC",
    "MOST_FIXED",
    "MOST_SHARDS",
    "VERSION",
    "ColumnEntry",
    "Extent",
    "Index",
    "Packing",
    "Shard",
    "block_for",
    "digest_at",
    "is_shard_name",
    "open_file",
    "seal",
]

MAGIC = b"\x89DLCACHE\r\n\x1a\n"
VERSION = 2
HEADER = 64
BLOCK = 1 << 16
"""Bytes of the file that share a checksum, which is a crc32."""
DIGEST = 16
"""Bytes of a digest: blake2b, unkeyed."""
MOST_FIXED = 31
"""Dimensions of a row in a fixed column: HDF5 has 32, the first of which counts the rows."""
LARGEST_ROW = 1 << 28
"""Bytes of a row of a compressed column: as much as one sample may make a reader allocate."""
LARGEST_PIECE = 1 << 18
"""Bytes that are compressed together, unless a single row of a fixed column has more."""

MOST_SHARDS = 1 << 16
"""Files that one joined cache consists of: the kernel maps about as many for a process."""

_FORMAT = "dataloaders cache"
_JOINED = "dataloaders cache, joined"
_LONGEST = 8 << 20  # bytes of the text; JSON may take 30 times as much memory
_LARGEST = 1 << 48  # rows, values, bytes: no disk has more, and no product of two overflows
_MOST_DIMENSIONS = 64
_DEEPEST = 300  # lists and objects in each other; a structure that is allowed has four a level
_SMALLEST_BLOCK = 4096
_LONGEST_NAME = 255  # bytes of a file's name
_LARGEST_BLOCK = 2 * _LONGEST
_HEAD = struct.Struct("<12sIQQ16s16s")
_AGAIN = "copy it again from where it came, or build it again with precompute()"


class Extent(NamedTuple):
    """Some values that stand one after the other: the first one's place in the file, and how many.

    Without values the place is 0.
    """

    offset: int
    size: int


class Shard(NamedTuple):
    """One file of a joined cache.

    Attributes:
        name: of the file, which stands beside the joined one.
        rows: in it.
        samples: of the dataset that it was built from, those left out included.
        file_bytes: of the file.
        identity: its `Index.identity`.
    """

    name: str
    rows: int
    samples: int
    file_bytes: int
    identity: str


@dataclass(frozen=True)
class Packing:
    """How a column's values are compressed.

    Attributes:
        codec: a name in `CODECS`.
        piece: values that are compressed together; zeros follow the last ones.
        pieces: uint64, the place of each piece in the file, and its length in bytes. A piece as
            long as its values is not compressed.
    """

    codec: str
    piece: int
    pieces: Extent


@dataclass(frozen=True)
class ColumnEntry:
    """One column of a cache: one leaf of all rows.

    Attributes:
        name: unique; its path under ``/columns`` in the HDF5 file.
        dtype: of the values, as NumPy writes it.
        variants: the kinds of cell that occur, each with its number of dimensions.
        shape: that of every row of a fixed column; None where it varies.
        dimensions: the most that a variant has.
        values: of all rows. In a fixed column a row that is None has zeros. Compressed values
            have no place of their own: it is 0. In a joined cache they stand in its shards, and
            here is only their number.
        offsets: uint64, of a variable column: value number ``offsets[i]`` is row i's first one,
            ``offsets[i + 1]`` the one behind its last.
        shapes: uint64, (rows, dimensions), of a variable column with more than one dimension.
        codes: uint8, each row's number in ``variants``, if there are several.
        packing: how the values are compressed; None: they are not.
    """

    name: str
    dtype: str
    variants: tuple[Variant, ...]
    shape: tuple[int, ...] | None
    dimensions: int
    values: Extent
    offsets: Extent | None
    shapes: Extent | None
    codes: Extent | None
    packing: Packing | None = None

    @property
    def fixed(self) -> bool:
        """Whether every row has the same shape."""
        return self.shape is not None

    def parts(self) -> Iterable[tuple[str, str, Extent]]:
        """What there is of it in the file: name, dtype and place; compressed values left out."""
        if self.packing is None:
            yield "values", self.dtype, self.values
        else:
            yield "pieces", "<u8", self.packing.pieces
        if self.offsets is not None:
            yield "offsets", "<u8", self.offsets
        if self.shapes is not None:
            yield "shapes", "<u8", self.shapes
        if self.codes is not None:
            yield "codes", "|u1", self.codes


@dataclass(frozen=True)
class Index:
    """What a cache says of itself.

    Attributes:
        user_block: bytes in front of the HDF5 file.
        file_bytes: of the whole file.
        rows: samples in it.
        samples: of the dataset that it was built from, those left out included.
        structure: of each sample; None without rows.
        columns: in the order of the sample's leaves.
        checksums: uint32, a crc32 for each BLOCK behind the user block.
        checksums_digest: of their bytes, in hexadecimal.
        failed: the numbers (uint64) and the messages (JSON, a list) of samples left out; or None.
        fingerprint: of what it was built from.
        head: the transforms whose result it holds, one text a member.
        tail: those that are still to be applied.
        shards: the files that have the values, in the order of their rows; none: they are here.
        identity: the index's own digest in hexadecimal; it differs if any bit of the file does.
    """

    user_block: int
    file_bytes: int
    rows: int
    samples: int
    structure: Structure | None
    columns: tuple[ColumnEntry, ...]
    checksums: Extent
    checksums_digest: str
    failed: tuple[Extent, Extent] | None
    fingerprint: Mapping[str, Any]
    head: tuple[str, ...]
    tail: tuple[str, ...]
    shards: tuple[Shard, ...] = ()
    identity: str = ""

    @property
    def format(self) -> str:
        """What kind of file it is."""
        return _JOINED if self.shards else _FORMAT

    @property
    def all_bytes(self) -> int:
        """The size of the file, and of its shards."""
        return self.file_bytes + sum(shard.file_bytes for shard in self.shards)

    def parts(self, column: ColumnEntry) -> Iterable[tuple[str, str, Extent]]:
        """What there is of ``column`` in this very file: name, dtype and place."""
        for name, dtype, extent in column.parts():
            if name != "values" or not self.shards:
                yield name, dtype, extent

    def encode(self) -> bytes:
        """The user block, header and zeros included.

        Raises:
            CacheError: it is too long, or the fingerprint is nothing that JSON keeps.
        """
        return seal(self.text(), self.user_block)

    def text(self) -> bytes:
        """The JSON in it.

        Raises:
            CacheError: as `encode`.
        """
        fields: dict[str, Any] = {
            "format": self.format,
            "file_bytes": self.file_bytes,
            "rows": self.rows,
            "samples": self.samples,
            "structure": self.structure,
            "columns": [
                {
                    "name": column.name,
                    "dtype": column.dtype,
                    "variants": column.variants,
                    "shape": column.shape,
                    "dimensions": column.dimensions,
                    "values": column.values,
                    "offsets": column.offsets,
                    "shapes": column.shapes,
                    "codes": column.codes,
                    "packing": None
                    if column.packing is None
                    else {
                        "codec": column.packing.codec,
                        "piece": column.packing.piece,
                        "pieces": column.packing.pieces,
                    },
                }
                for column in self.columns
            ],
            "checksums": {
                "block": BLOCK,
                "digest": self.checksums_digest,
                "values": self.checksums,
            },
            "failed": None
            if self.failed is None
            else {"rows": self.failed[0], "messages": self.failed[1]},
            "fingerprint": dict(self.fingerprint),
            "head": self.head,
            "tail": self.tail,
        }
        if self.shards:
            fields["shards"] = [shard._asdict() for shard in self.shards]
        try:
            text = json.dumps(fields, sort_keys=True, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise CacheError(f"the fingerprint cannot be written as JSON: {error}") from error
        if len(text) > _LONGEST:
            shards = f", or {len(self.shards)} shards," if self.shards else ""
            raise CacheError(
                f"the index of the cache takes {len(text)} bytes, of {_LONGEST} that it may: "
                f"{len(self.columns)} columns{shards} are too many; return fewer and larger leaves"
            )
        return text.encode("ascii")

    @classmethod
    def from_text(cls, text: bytes, user_block: int, file_bytes: int) -> Index:
        """The index with this JSON in it, checked as one in a file of that size.

        Raises:
            CacheError: it is malformed.
        """
        try:
            return _index(_loads(text), user_block, "", file_bytes)
        except _Malformed as error:
            raise CacheError(f"the index is malformed: {error}") from error

    @classmethod
    def parse(cls, source: str | os.PathLike[str] | int, name: str | None = None) -> Index:
        """The index of the file at this path, or of this open file descriptor.

        Args:
            source: the path or descriptor.
            name: of the file, for messages.

        Raises:
            CacheError: there is none, or it is malformed, truncated or damaged.
        """
        if isinstance(source, int):
            return _parse(source, name or f"in file descriptor {source}")
        name = name or os.fspath(source)
        descriptor = open_file(name)
        try:
            return _parse(descriptor, name)
        finally:
            os.close(descriptor)


def is_shard_name(name: str) -> bool:
    """Whether ``name`` is that of a file in the same folder, and can be shown."""
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and not set(name) & set("/\\")
        and len(name.encode("utf-8", "replace")) <= _LONGEST_NAME
    )


def digest_at(descriptor: int) -> str:
    """The digest that this file begins with, not compared with its index; "" if it is no cache."""
    head = os.pread(descriptor, HEADER, 0)
    return head[32:48].hex() if len(head) == HEADER and head[: len(MAGIC)] == MAGIC else ""


def open_file(name: str) -> int:
    """A descriptor for reading ``name``.

    Raises:
        CacheError: it cannot be opened.
    """
    try:
        # Not blocking, so that a named pipe is an error and not a wait for its writer.
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CacheError(f"there is no cache at {name}; build one with precompute()") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CacheError(f"the cache {name} cannot be opened: {reason}") from error


def block_for(text: int) -> int:
    """The size of the user block for a text of so many bytes: a power of two, 4096 at least."""
    return max(_SMALLEST_BLOCK, 1 << (HEADER + text - 1).bit_length())


def seal(text: bytes, user_block: int) -> bytes:
    """The user block with this text in it."""
    start = _HEAD.pack(MAGIC, VERSION, len(text), user_block, b"", b"")[:32]
    header = start + blake2b(start + text, digest_size=DIGEST).digest()
    return (header.ljust(HEADER, b"\0") + text).ljust(user_block, b"\0")


# Reading what anybody may have written


class _Malformed(Exception):
    """What is wrong with a field."""


def _parse(descriptor: int, name: str) -> Index:
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, HEADER, 0)
    except OSError as error:
        raise CacheError(f"the cache {name} cannot be read: {error.strerror}") from error
    if len(head) < HEADER or head[: len(MAGIC)] != MAGIC:
        if not any(head):
            raise CacheError(
                f"{name} is no finished cache: it has no index; wait for the process that builds "
                "it, or build it again with precompute()"
            )
        raise CacheError(
            f"{name} is no cache: it does not begin with the bytes of one; give the path of a "
            "file that precompute() built"
        )
    _, version, length, user_block, digest, rest = _HEAD.unpack(head)
    if version != VERSION:
        raise CacheError(
            f"{name} has version {version} of the cache format, and this package reads version "
            f"{VERSION}; build it again, or install the package that built it"
        )
    if length > _LONGEST or not HEADER + length <= user_block <= min(size, _LARGEST_BLOCK):
        raise CacheError(
            f"the cache {name} is truncated or damaged: its index has {length} bytes in a block of "
            f"{user_block}, and the file {size}; {_AGAIN}"
        )
    try:
        text = os.pread(descriptor, length, HEADER)
    except OSError as error:
        raise CacheError(f"the cache {name} cannot be read: {error.strerror}") from error
    if blake2b(head[:32] + text, digest_size=DIGEST).digest() != digest or any(rest):
        raise CacheError(f"the index of the cache {name} is damaged; {_AGAIN}")
    try:
        return _index(_loads(text), user_block, digest.hex(), size)
    except _Malformed as error:
        raise CacheError(
            f"the index of the cache {name} is malformed: {error}; {_AGAIN}"
        ) from error


def _loads(text: bytes) -> Any:
    try:
        found = json.loads(
            text.decode("ascii"),
            object_pairs_hook=_once,
            parse_constant=_constant,
            parse_int=_whole,
        )
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"it is no JSON that a cache has ({error})") from error
    _check_depth(found)
    return found


def _check_depth(found: Any) -> None:
    """Whether all that goes into it, later, stays clear of Python's limit."""
    level = [found]
    for _ in range(_DEEPEST):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise _Malformed(f"it is nested more than {_DEEPEST} deep")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _whole(text: str) -> int:
    # Python 3.10 takes time that grows with the square of the digits.
    if len(text) > 40:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


_FIELDS = (
    "format", "file_bytes", "rows", "samples", "structure", "columns", "checksums", "failed",
    "fingerprint", "head", "tail",
)  # fmt: skip
_SHARD_FIELDS = Shard._fields
_COLUMN_FIELDS = (
    "name", "dtype", "variants", "shape", "dimensions", "values", "offsets", "shapes", "codes",
    "packing",
)  # fmt: skip


def _index(found: Any, user_block: int, identity: str, size: int) -> Index:
    joined = type(found) is dict and found.get("format") == _JOINED
    fields = _fields(found, "the index", (*_FIELDS, "shards") if joined else _FIELDS)
    if not joined and fields["format"] != _FORMAT:
        raise _Malformed(f"format is {_shown(fields['format'])}")
    if user_block < _SMALLEST_BLOCK or user_block & (user_block - 1):
        raise _Malformed(f"its block has {user_block} bytes, which is no power of two from 4096 on")
    file_bytes = _number(fields["file_bytes"], "file_bytes")
    if file_bytes != size:
        raise _Malformed(
            f"the file has {size} bytes, and had {file_bytes} when it was built"
            + (", so it is truncated" if size < file_bytes else "")
        )
    rows = _number(fields["rows"], "rows")
    samples = _number(fields["samples"], "samples", least=rows)
    columns = _columns(fields["structure"], _list(fields["columns"], "columns"), rows)
    checks = _fields(fields["checksums"], "checksums", ("block", "digest", "values"))
    if checks["block"] != BLOCK or type(checks["block"]) is not int:
        raise _Malformed(f"checksums.block is {_shown(checks['block'])} and not {BLOCK}")
    blocks = -(-(file_bytes - user_block) // BLOCK)
    checksums = _extent(checks["values"], "checksums.values", blocks)
    failed = _failed(fields["failed"], samples - rows)
    fingerprint = fields["fingerprint"]
    if type(fingerprint) is not dict:
        raise _Malformed("fingerprint is no object")
    index = Index(
        user_block,
        file_bytes,
        rows,
        samples,
        fields["structure"],
        columns,
        checksums,
        _text(checks["digest"], "checksums.digest"),
        failed,
        fingerprint,
        _texts(fields["head"], "head"),
        _texts(fields["tail"], "tail"),
        _shards(fields["shards"], rows, samples) if joined else (),
        identity,
    )
    _check_places(index)
    return index


def _shards(found: Any, rows: int, samples: int) -> tuple[Shard, ...]:
    entries = _list(found, "shards")
    if not 0 < len(entries) <= MOST_SHARDS:
        raise _Malformed(f"there are {len(entries)} shards, and not 1 to {MOST_SHARDS}")
    shards = []
    for number, each in enumerate(entries):
        where = f"shard {number}"
        fields = _fields(each, where, _SHARD_FIELDS)
        name = _text(fields["name"], f"{where}: name")
        if not is_shard_name(name):
            raise _Malformed(f"{where} is named {_shown(name)}, which is no file beside this one")
        own = _number(fields["rows"], f"{where}: rows")
        identity = _text(fields["identity"], f"{where}: identity")
        if len(identity) != 2 * DIGEST or set(identity) - set("0123456789abcdef"):
            raise _Malformed(f"{where}: identity is {_shown(identity)}, and no digest")
        shards.append(
            Shard(
                name,
                own,
                _number(fields["samples"], f"{where}: samples", least=own),
                _number(fields["file_bytes"], f"{where}: file_bytes", least=HEADER),
                identity,
            )
        )
    if len({shard.name for shard in shards}) != len(shards):
        raise _Malformed("two shards have the same name")
    for what, whole, sizes in (
        ("rows", rows, [shard.rows for shard in shards]),
        ("samples", samples, [shard.samples for shard in shards]),
    ):
        if sum(sizes) != whole:
            raise _Malformed(f"its shards have {sum(sizes)} {what}, and it says {whole}")
    return tuple(shards)


def _columns(structure: Any, found: list[Any], rows: int) -> tuple[ColumnEntry, ...]:
    if structure is None:
        if rows or found:
            raise _Malformed("structure is missing")
        return ()
    try:
        names = column_names(structure)
    except (CacheError, RecursionError) as error:
        raise _Malformed(str(error)) from error
    if len(names) != len(found):
        raise _Malformed(f"structure has {len(names)} leaves, and there are {len(found)} columns")
    return tuple(_column(each, name, rows) for each, name in zip(found, names, strict=True))


def _column(found: Any, name: str, rows: int) -> ColumnEntry:
    where = f"column {_shown(name)}"
    fields = _fields(found, where, _COLUMN_FIELDS)
    if fields["name"] != name:
        raise _Malformed(f"{where} is named {_shown(fields['name'])}")
    dtype = _text(fields["dtype"], f"{where}: dtype")
    if dtype not in DTYPES:
        raise _Malformed(f"{where} has dtype {_shown(dtype)}")
    dimensions = _number(fields["dimensions"], f"{where}: dimensions", most=_MOST_DIMENSIONS)
    shape = None if fields["shape"] is None else _shape(fields["shape"], f"{where}: shape")
    variants = _variants(fields["variants"], where, dtype, shape)
    if dimensions != max((of for _, of in variants), default=0):
        raise _Malformed(f"{where} has {dimensions} dimensions, and its variants do not")
    several = len(variants) > 1
    codes = _optional(fields["codes"], f"{where}: codes", rows if several else None)
    if shape is not None:
        # NumPy multiplies the sizes of an empty array too, leaving out what is 0.
        if max(rows, 1) * math.prod(filter(None, shape)) > _LARGEST:
            raise _Malformed(f"{where} has too many values")
        count = rows * math.prod(shape)
        values, packing = _values(fields, where, dtype, count, math.prod(shape))
        _optional(fields["offsets"], f"{where}: offsets", None)
        _optional(fields["shapes"], f"{where}: shapes", None)
        return ColumnEntry(
            name, dtype, variants, shape, dimensions, values, None, None, codes, packing
        )
    values, packing = _values(fields, where, dtype, None, None)
    offsets = _extent(fields["offsets"], f"{where}: offsets", rows + 1)
    needed = rows * dimensions if dimensions > 1 else None
    shapes = _optional(fields["shapes"], f"{where}: shapes", needed)
    return ColumnEntry(
        name, dtype, variants, None, dimensions, values, offsets, shapes, codes, packing
    )


def _values(
    fields: Mapping[str, Any], where: str, dtype: str, count: int | None, row: int | None
) -> tuple[Extent, Packing | None]:
    """The values, so many if that is known, and how they are compressed.

    Args:
        row: values of a row of a fixed column.
    """
    if fields["packing"] is None:
        return _extent(fields["values"], f"{where}: values", count), None
    packing = _fields(fields["packing"], f"{where}: packing", ("codec", "piece", "pieces"))
    offset, size = (
        _number(each, f"{where}: values") for each in _list(fields["values"], f"{where}: values", 2)
    )
    if offset or not size or count not in (None, size):
        raise _Malformed(f"{where} is compressed, and its values are {_shown([offset, size])}")
    codec = _text(packing["codec"], f"{where}: packing.codec")
    if codec not in CODECS:
        raise _Malformed(f"{where} is compressed with {_shown(codec)}, of {', '.join(CODECS)}")
    width = np.dtype(dtype).itemsize
    piece = _number(packing["piece"], f"{where}: packing.piece", least=1, most=size)
    most = LARGEST_PIECE if row is None else max(LARGEST_PIECE, row * width)
    if piece * width > min(most, LARGEST_ROW) or (row is not None and piece % row):
        raise _Malformed(f"{where} cannot be compressed in pieces of {piece} values")
    pieces = _extent(packing["pieces"], f"{where}: packing.pieces", 2 * -(-size // piece))
    return Extent(0, size), Packing(codec, piece, pieces)


def _variants(
    found: Any, where: str, dtype: str, shape: tuple[int, ...] | None
) -> tuple[Variant, ...]:
    variants = []
    for each in _list(found, f"{where}: variants"):
        pair = _list(each, f"{where}: a variant", 2)
        kind = _text(pair[0], f"{where}: a variant's kind")
        of = _number(pair[1], f"{where}: a variant's dimensions", most=_MOST_DIMENSIONS)
        if not fits(kind, dtype, of, shape):
            raise _Malformed(f"{where} cannot hold {_shown(kind)} with {of} dimensions in {dtype}")
        if kind != "none" and shape is not None and of != len(shape):
            raise _Malformed(f"{where} has rows of {len(shape)} dimensions, and one kind {of}")
        variants.append((kind, of))
    if not 0 < len(variants) <= MOST_VARIANTS or len(set(variants)) != len(variants):
        raise _Malformed(f"{where} has no, too many or twice the same variants")
    return tuple(variants)


def _failed(found: Any, most: int) -> tuple[Extent, Extent] | None:
    if found is None:
        return None
    fields = _fields(found, "failed", ("rows", "messages"))
    rows = _extent(fields["rows"], "failed.rows")
    if rows.size > most:
        raise _Malformed(f"{rows.size} samples were left out, of {most}")
    return rows, _extent(fields["messages"], "failed.messages")


def _check_places(index: Index) -> None:
    """Whether each extent is inside the HDF5 part, and none on another one."""
    places = [("checksums", "<u4", index.checksums)]
    for column in index.columns:
        where = f"column {_shown(column.name)}"
        places += [(f"{where}: {p}", d, e) for p, d, e in index.parts(column)]
        if index.shards and column.values.offset:
            raise _Malformed(f"{where}: values have a place, and stand in shards")
    if index.failed is not None:
        places += [("failed.rows", "<u8", index.failed[0])]
        places += [("failed.messages", "|u1", index.failed[1])]
    taken = []
    for name, dtype, (offset, size) in places:
        if size == 0:
            continue
        end = offset + size * np.dtype(dtype).itemsize
        if offset < index.user_block or end > index.file_bytes:
            raise _Malformed(
                f"{name} is said to stand at bytes {offset} to {end}, outside "
                f"{index.user_block} to {index.file_bytes}"
            )
        taken.append((offset, end, name))
    taken.sort()
    for (_, end, name), (begin, _, other) in pairwise(taken):
        if begin < end:
            raise _Malformed(f"{name} and {other} overlap")


def _fields(found: Any, where: str, names: Sequence[str]) -> dict[str, Any]:
    if type(found) is not dict:
        raise _Malformed(f"{where} is no object")
    if found.keys() != set(names):
        wrong = sorted(found.keys() ^ set(names))
        raise _Malformed(f"{where} lacks, or should not have, {_shown(wrong[0])}")
    return found


def _list(found: Any, where: str, length: int | None = None) -> list[Any]:
    if type(found) is not list or (length is not None and len(found) != length):
        raise _Malformed(f"{where} is no list" + ("" if length is None else f" of {length}"))
    return found


def _number(found: Any, where: str, *, least: int = 0, most: int = _LARGEST) -> int:
    if type(found) is not int or not least <= found <= most:
        raise _Malformed(f"{where} is {_shown(found)}, and no whole number from {least} to {most}")
    return found


def _text(found: Any, where: str) -> str:
    if type(found) is not str:
        raise _Malformed(f"{where} is {_shown(found)}, and no text")
    return found


def _texts(found: Any, where: str) -> tuple[str, ...]:
    return tuple(_text(each, where) for each in _list(found, where))


def _shape(found: Any, where: str) -> tuple[int, ...]:
    shape = tuple(_number(each, where) for each in _list(found, where))
    if len(shape) > MOST_FIXED:
        raise _Malformed(f"{where} has {len(shape)} dimensions, of at most {MOST_FIXED}")
    return shape


def _extent(found: Any, where: str, count: int | None = None) -> Extent:
    pair = _list(found, where, 2)
    offset, values = (_number(each, where) for each in pair)
    if count is not None and values != count:
        raise _Malformed(f"{where} has {values} values, and should have {count}")
    if values == 0 and offset != 0:
        raise _Malformed(f"{where} has no values, and a place")
    return Extent(offset, values)


def _optional(found: Any, where: str, count: int | None) -> Extent | None:
    """The extent of so many values; with None there must be none."""
    if count is None:
        if found is not None:
            raise _Malformed(f"{where} should not be there")
        return None
    return _extent(found, where, count)

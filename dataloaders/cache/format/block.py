"""The block in front of a cache: what the file is, and the text of its index, sealed by a digest.

byte 0   magic (12), version (4), length of the text (8), size of the user block (8),
         blake2b-16 of these 32 bytes and the text (16), zero (16)
byte 64  text: JSON, ASCII, keys sorted
...      zero, up to the size of the user block, where plain HDF5 begins
"""

from __future__ import annotations

import os
import struct
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from dataloaders.cache.format.disk import open_plain
from dataloaders.errors import CacheError

MAGIC = b"\x89DLCACHE\r\n\x1a\n"
VERSION, _OLDEST = 4, 3  # what is written; of version 3 shards stand beside the joined file
HEADER = 64
DIGEST = 16  # bytes of a digest: blake2b, unkeyed
LONGEST = 8 << 20  # bytes of the text; JSON may take 30 times as much memory
SMALLEST_BLOCK = 4096
AGAIN = "copy it again from where it came, or build it again with precompute()"

_HEAD = struct.Struct("<12sIQQ16s16s")


class Sealed(NamedTuple):
    """What the block in front of a file has in it."""

    text: bytes  # of the index; its digest is right
    user_block: int  # bytes in front of the HDF5 file
    digest: str  # of header and text, in hexadecimal
    file_bytes: int  # of the whole file, as the system has it


def digest_at(descriptor: int) -> str:
    """Return the digest that this file begins with, not compared; "" if it is no cache."""
    head = os.pread(descriptor, HEADER, 0)
    return head[32:48].hex() if len(head) == HEADER and head.startswith(MAGIC) else ""


def open_file(name: str) -> int:
    """Return a descriptor for reading ``name``; a CacheError says why there is none."""
    try:
        return open_plain(name, "give the path of a file that precompute() built")
    except FileNotFoundError as error:
        unfinished = parts_folder(name)
        if unfinished.is_dir():
            raise CacheError(
                f"there is no cache at {name} yet: {unfinished} holds the parts of a build; the "
                "command or call that began it goes on with it"
            ) from error
        raise CacheError(f"there is no cache at {name}; build one with precompute()") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CacheError(f"the cache {name} cannot be opened: {reason}") from error


def parts_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the parts of the cache at ``path``: ``train.parts`` of ``train.h5``.

    That of ``train`` is ``train-parts``, so that no two caches share a folder.
    """
    target = Path(os.path.realpath(path))
    is_h5 = target.suffix == ".h5"
    return target.with_name(f"{target.stem}.parts" if is_h5 else f"{target.name}-parts")


def is_parts_folder(folder: Path) -> bool:
    """Return whether a folder has a name as `parts_folder` gives it."""
    return folder.name.endswith((".parts", "-parts"))


def block_for(text: int) -> int:
    """Return the size of the user block for a text of so many bytes: a power of two."""
    return max(SMALLEST_BLOCK, 1 << (HEADER + text - 1).bit_length())


def seal(text: bytes, user_block: int) -> bytes:
    """Return the user block with this text in it."""
    start = _HEAD.pack(MAGIC, VERSION, len(text), user_block, b"", b"")[:32]
    header = start + blake2b(start + text, digest_size=DIGEST).digest()
    return (header.ljust(HEADER, b"\0") + text).ljust(user_block, b"\0")


def read_block(descriptor: int, name: str) -> Sealed:
    """Return what the block in front of this open file has in it; a CacheError if it is wrong."""
    try:
        size = os.fstat(descriptor).st_size
        head = os.pread(descriptor, HEADER, 0)
        is_cache = len(head) == HEADER and head.startswith(MAGIC)
        text = (
            os.pread(descriptor, min(_HEAD.unpack(head)[2], LONGEST), HEADER) if is_cache else b""
        )
    except OSError as error:
        raise CacheError(f"the cache {name} cannot be read: {error.strerror}") from error
    if not any(head):
        raise CacheError(
            f"{name} is no finished cache: it has no index; wait for the process that builds it, "
            "or build it again with precompute()"
        )
    if not is_cache:
        raise CacheError(
            f"{name} is no cache: it does not begin with the bytes of one; give the path of a "
            "file that precompute() built"
        )
    _, version, length, user_block, digest, rest = _HEAD.unpack(head)
    if not _OLDEST <= version <= VERSION:
        raise CacheError(
            f"{name} has version {version} of the cache format, and this package reads versions "
            f"{_OLDEST} to {VERSION}; build it again, or install the package that built it"
        )
    if length > LONGEST or not HEADER + length <= user_block <= min(size, 2 * LONGEST):
        raise CacheError(
            f"the cache {name} is truncated or damaged: its index has {length} bytes in a block of "
            f"{user_block}, and the file {size}; {AGAIN}"
        )
    if blake2b(head[:32] + text, digest_size=DIGEST).digest() != digest or any(rest):
        raise CacheError(f"the index of the cache {name} is damaged; {AGAIN}")
    return Sealed(text, user_block, digest.hex(), size)

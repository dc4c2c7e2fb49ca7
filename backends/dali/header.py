"""Format and size of an encoded image, from its bytes, without decoding it.

    FF D8 .. SOF .. SOS .. FF D9 ──peek──> Header("JPEG", 375, 500, "RGB", plain=True)

A file is plain if DALI's CPU decoder is known to give what Pillow's ``convert("RGB")`` gives, to
the bit: 8 bits a value, of the kinds that `tests/test_dali_files.py` compares, its end is there,
and the compressed data of a JPEG is sound (scans.py). All others are for Pillow. Nothing here
trusts the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from .scans import sound

__all__ = ["Header", "peek"]

_MOST_PIXELS = (1 << 30) // 4 // 3
"""Pillow warns of larger images, and refuses those twice as large."""

_SHORTEST = 30
"""Bytes; no image of any format has fewer."""

_MOST_SEGMENTS = 4096

_MOST_CHUNKS = 1 << 16
"""Of pixels; common are 8 to 64 KiB in each."""

_FRAMES = (0xC0, 0xC1, 0xC2)
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_PROGRESSIVE = 0xC2
_SCAN = 0xDA
_JPEG_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_COMPONENTS = {mode: count for count, mode in _JPEG_MODES.items()}
# What Pillow reads of these segments where they are there: so many bytes behind the length.
_ALWAYS_READ = {0xE0: (b"JFIF", 14), 0xE2: (b"ICC_PROFILE\0", 14), 0xEE: (b"Adobe", 12)}

_PNG_MODES = {0: "L", 2: "RGB", 3: "P", 4: "LA", 6: "RGBA"}
_PNG_DEPTHS = {0: (1, 2, 4, 8), 2: (8,), 3: (1, 2, 4, 8), 4: (8,), 6: (8,)}
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"

_BMP_MODES = {8: "P", 24: "RGB"}
_PPM_MODES = {b"P5": "L", b"P6": "RGB"}


class Header(NamedTuple):
    """What the first bytes of a file say of its image.

    Attributes:
        format: Pillow's name of it.
        height, width: in pixels, as stored: EXIF turns nothing. 0: not known.
        mode: Pillow's name of what the file has. "": not known.
        plain: whether DALI may decode it.
    """

    format: str
    height: int = 0
    width: int = 0
    mode: str = ""
    plain: bool = False


def peek(data: bytes) -> Header | None:
    """The `Header` of the whole file ``data``; None if it is of no format that is known here.

    Never raises, whatever the bytes are. Takes a few microseconds.
    """
    for magic, format, reader in _READERS:
        if not data.startswith(magic):
            continue
        found = reader(data) if len(data) >= _SHORTEST else None
        if found is None:
            return Header(format)
        if found.plain and not 0 < found.height * found.width <= _MOST_PIXELS:
            return found._replace(plain=False)
        return found
    return None


def _jpeg(data: bytes) -> Header | None:
    found, plain, place, frame = None, True, 2, 0
    for _ in range(_MOST_SEGMENTS):
        segment = data[place : place + 4]
        if len(segment) < 4 or segment[0] != 0xFF:
            return found
        marker, size = segment[1], segment[2] << 8 | segment[3]
        if marker == 0xFF:  # a fill byte
            place += 1
            continue
        if marker == _SCAN:
            break
        if marker < 0xC0 or 0xD0 <= marker <= 0xD9 or size < 2:
            return found
        if marker in _OTHER_FRAMES or (marker in _FRAMES and found is not None):
            return found
        if marker in _FRAMES:
            inside = data[place + 4 : place + 2 + size]
            found, frame = _frame(inside), marker
            if found is None:
                return None
        elif marker in _ALWAYS_READ:
            magic, least = _ALWAYS_READ[marker]
            if data.startswith(magic, place + 4):
                plain &= size >= 2 + least
        place += 2 + size
    else:
        return found
    if found is None:
        return None
    plain &= found.mode != "CMYK"  # DALI rounds these in another way
    return found._replace(
        plain=plain
        and sound(
            data, place, components=_COMPONENTS[found.mode], progressive=frame == _PROGRESSIVE
        )
    )


def _frame(inside: bytes) -> Header | None:
    if len(inside) < 6 or inside[0] != 8 or inside[5] not in _JPEG_MODES:
        return None
    if len(inside) != 6 + 3 * inside[5]:
        return None
    height, width = inside[1] << 8 | inside[2], inside[3] << 8 | inside[4]
    return Header("JPEG", height, width, _JPEG_MODES[inside[5]])


def _png(data: bytes) -> Header | None:
    if data[8:16] != b"\0\0\0\rIHDR":
        return None
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    depth, colour, compression, filtering, interlace = data[24:29]
    plain = depth in _PNG_DEPTHS.get(colour, ()) and compression == filtering == 0
    plain = plain and interlace <= 1 and data.endswith(_PNG_END) and _png_chunks(data)
    mode = "1" if (colour, depth) == (0, 1) else _PNG_MODES.get(colour, "")
    return Header("PNG", height, width, "" if depth == 16 else mode, plain)


def _png_chunks(data: bytes) -> bool:
    """Whether all is well up to the pixels, and their chunks lead to the end of the file.

    Pillow refuses wrong checksums, DALI a few of them. Where a chunk's length is wrong both refuse
    the file, and nvImageCodec writes that to stderr besides.
    """
    place = 8
    for _ in range(_MOST_SEGMENTS):
        size, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        if kind == b"IDAT":
            break
        end = place + 8 + size
        if end + 4 > len(data) or kind == b"acTL":
            return False
        if crc32(data[place + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            return False
        place = end + 4
    else:
        return False
    end = len(data) - len(_PNG_END)
    for _ in range(_MOST_CHUNKS):
        if place >= end:
            break
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return place == end


def _bmp(data: bytes) -> Header | None:
    start, size = int.from_bytes(data[10:14], "little"), int.from_bytes(data[14:18], "little")
    if size < 40 or len(data) < 54:
        return None
    width = int.from_bytes(data[18:22], "little", signed=True)
    height = abs(int.from_bytes(data[22:26], "little", signed=True))
    bits, packing = int.from_bytes(data[28:30], "little"), int.from_bytes(data[30:34], "little")
    plain = width > 0 and bits == 24 and packing == 0 and size == 40 and start >= 54
    plain = plain and start + (3 * width + 3) // 4 * 4 * height <= len(data)
    return Header("BMP", height, max(0, width), _BMP_MODES.get(bits, ""), plain)


def _gif(data: bytes) -> Header:
    width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
    return Header("GIF", height, width)


def _webp(data: bytes) -> Header | None:
    if data[8:12] != b"WEBP":
        return None
    plain = int.from_bytes(data[4:8], "little") + 8 == len(data) and _webp_ends(data)
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(data[at : at + 2], "little") & 0x3FFF for at in (26, 28))
        return Header("WEBP", height, width, "RGB", plain)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        mode = "RGBA" if bits >> 28 & 1 else "RGB"
        return Header("WEBP", (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, mode, plain)
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        mode, animated = "RGBA" if data[20] & 0x10 else "RGB", data[20] & 2
        return Header("WEBP", height, width, mode, plain and not animated)
    return None


def _webp_ends(data: bytes) -> bool:
    """Whether the last chunk ends where the file does."""
    place = 12
    for _ in range(_MOST_SEGMENTS):
        if place >= len(data):
            break
        place += 8 + (int.from_bytes(data[place + 4 : place + 8], "little") + 1) // 2 * 2
    return place == len(data)


def _ppm(data: bytes) -> Header | None:
    """Of three numbers behind P5 or P6, with single blanks between and no comments."""
    parts = data[:40].split(maxsplit=3)
    if len(parts) < 4 or not all(part.isdigit() and len(part) < 8 for part in parts[1:3]):
        return None
    width, height = int(parts[1]), int(parts[2])
    mode = _PPM_MODES.get(parts[0], "")
    start = sum(len(part) + 1 for part in parts[:3]) + 4
    last = data[start - 4 : start]
    whole = start + height * width * (3 if mode == "RGB" else 1) <= len(data)
    return Header("PPM", height, width, mode, last[:3] == b"255" and last[3:].isspace() and whole)


def _unread(format: str) -> Callable[[bytes], Header | None]:
    return lambda data: Header(format)


_READERS: tuple[tuple[bytes, str, Callable[[bytes], Header | None]], ...] = (
    (b"\xff\xd8\xff", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WEBP", _webp),
    (b"GIF87a", "GIF", _gif),
    (b"GIF89a", "GIF", _gif),
    (b"BM", "BMP", _bmp),
    (b"P5", "PPM", _ppm),
    (b"P6", "PPM", _ppm),
    (b"II*\0", "TIFF", _unread("TIFF")),
    (b"MM\0*", "TIFF", _unread("TIFF")),
)

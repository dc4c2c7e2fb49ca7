"""Encoded images of every kind, made here."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from .pictures import noise


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def exif(orientation: int = 6, thumbnail: bytes = b"") -> bytes:
    """An EXIF segment's content, with a JPEG thumbnail behind it."""
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes() + thumbnail


# JPEG


def frame_at(data: bytes) -> int:
    """Where the frame header of a JPEG file stands: at its FF."""
    place = 2
    while data[place + 1] not in (0xC0, 0xC1, 0xC2):
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return place


def resampled(data: bytes, *factors: int) -> bytes:
    """A JPEG file whose components are said to be sampled so; its bytes are read in that way."""
    changed, place = bytearray(data), frame_at(data)
    for number, factor in enumerate(factors):
        changed[place + 11 + 3 * number] = factor
    return bytes(changed)


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG file with one more segment, behind its first two bytes."""
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content + data[2:]


def adobe(transform: int) -> bytes:
    return b"Adobe\0\x64\0\0\0\0" + bytes([transform])


def without_jfif(data: bytes) -> bytes:
    assert data[2:4] == b"\xff\xe0"
    return data[:2] + data[4 + int.from_bytes(data[4:6], "big") :]


# PNG: Pillow writes none that is interlaced, and not all depths


def png(height: int, width: int, colour: int, depth: int, *, interlaced: bool, extra: Any) -> bytes:
    """A PNG file of noise.

    Args:
        height, width: in pixels.
        colour: type, as the format numbers them.
        depth: bits of a value.
        interlaced: whether in Adam7's seven passes.
        extra: (type, content) of further chunks before the pixels.
    """
    values = np.random.default_rng(colour * 100 + depth)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2)]
        passes += [(0, 1, 2, 2), (1, 0, 2, 1)]
    lines = b""
    for top, left, down, right in passes:
        rows, columns = len(range(top, height, down)), len(range(left, width, right))
        for _ in range(rows if columns else 0):
            size = (columns * channels * depth + 7) // 8
            lines += b"\0" + values.integers(0, 256, size, np.uint8).tobytes()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))]
    if colour == 3:
        chunks.append((b"PLTE", values.integers(0, 256, 3 << depth, np.uint8).tobytes()))
    chunks += [*extra, (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def pngs() -> dict[str, bytes]:
    """Every colour type, depth and interlacing of 8 bits and less; with and without tRNS."""
    found = {}
    transparent = {0: b"\0\1", 2: b"\0\1\0\2\0\3", 3: b"\0\x7f\xff"}
    for colour, depths in {0: (1, 2, 4, 8), 2: (8,), 3: (2, 4, 8), 4: (8,), 6: (8,)}.items():
        for depth in depths:
            for interlaced in (False, True):
                for extra in ([], [(b"tRNS", transparent[colour])] if colour < 4 else []):
                    name = f"png {colour}/{depth}{' adam7' * interlaced}{' tRNS' * bool(extra)}"
                    found[name] = png(13, 11, colour, depth, interlaced=interlaced, extra=extra)
    return found


def plain_files() -> dict[str, bytes]:
    """Those that DALI is to decode itself."""
    colour, grey = noise(21, 34), noise(21, 34, 1)
    clear = noise(21, 34, 4)
    jpeg, square = saved(colour, "JPEG", subsampling=0), saved(noise(32, 32), "JPEG", subsampling=1)
    found = {
        "jpeg": saved(colour, "JPEG"),
        "jpeg 4:4:4": jpeg,
        "jpeg 4:2:2": saved(colour, "JPEG", subsampling=1),
        "jpeg quality 5": saved(colour, "JPEG", quality=5),
        "jpeg quality 100": saved(colour, "JPEG", quality=100),
        "jpeg optimised": saved(colour, "JPEG", optimize=True),
        "jpeg progressive": saved(colour, "JPEG", progressive=True),
        "jpeg restarts": saved(colour, "JPEG", restart_marker_blocks=1),
        "jpeg grey": saved(grey, "JPEG"),
        "jpeg grey progressive": saved(grey, "JPEG", progressive=True),
        "jpeg rgb": saved(colour, "JPEG", keep_rgb=True, subsampling=0),
        "jpeg comment": saved(colour, "JPEG", comment=b"\xff\xd9" * 9, icc_profile=b"p" * 99999),
        "jpeg no jfif": without_jfif(jpeg),
        "jpeg turned": saved(colour, "JPEG", exif=exif(6)),
        "jpeg mirrored": saved(colour, "JPEG", exif=exif(5)),
        "jpeg thumbnail": saved(colour, "JPEG", exif=exif(8, saved(noise(7, 9), "JPEG"))),
        "jpeg several": saved(colour, "MPO", save_all=True, append_images=[noise(9, 9)]),
        "jpeg zeros behind": jpeg + bytes(99),
        "jpeg text behind": jpeg + b"text",
        "jpeg fill bytes": jpeg[:20] + b"\xff\xff" + jpeg[20:],
        "jpeg one pixel": saved(noise(1, 1), "JPEG"),
        "jpeg one wide": saved(noise(50, 1), "JPEG"),
        "jpeg one high": saved(noise(1, 50), "JPEG"),
        "png": saved(colour, "PNG"),
        "png turned": saved(colour, "PNG", exif=exif(6)),
        "png profile": saved(colour, "PNG", icc_profile=b"p" * 999, dpi=(72, 72)),
        "png one wide": saved(noise(50, 1), "PNG"),
        "webp": saved(colour, "WEBP"),
        "webp lossless": saved(colour, "WEBP", lossless=True),
        "webp alpha": saved(clear, "WEBP"),
        "webp alpha lossless": saved(clear, "WEBP", lossless=True),
        "webp turned": saved(colour, "WEBP", exif=exif(6)),
        "webp one wide": saved(noise(50, 1), "WEBP"),
        "bmp": saved(colour, "BMP"),
        "bmp one wide": saved(noise(50, 1), "BMP"),
        "ppm": saved(colour, "PPM"),
        "ppm grey": saved(grey, "PPM"),
        "ppm one wide": saved(noise(50, 1), "PPM"),
    }
    for factors in ((0x11,), (0x21,), (0x22,), (0x44,)):
        found[f"jpeg grey sampled {factors[0]:x}"] = resampled(saved(grey, "JPEG"), *factors)
    for factors in ((0x12, 0x11), (0x41, 0x11), (0x14, 0x11), (0x31, 0x11), (0x42, 0x11)):
        found[f"jpeg sampled {factors[0]:x}"] = resampled(square, *factors)
    for factors in ((0x11, 0x21, 0x11), (0x22, 0x21, 0x12), (0x22, 0x12, 0x12), (0x21, 0x21, 0x21)):
        found["jpeg sampled " + " ".join(f"{f:x}" for f in factors)] = resampled(square, *factors)
    for transform in (0, 1, 2):
        found[f"jpeg adobe {transform}"] = with_segment(jpeg, 0xEE, adobe(transform))
        bare = with_segment(without_jfif(jpeg), 0xEE, adobe(transform))
        found[f"jpeg adobe {transform} no jfif"] = bare
    return {**found, **pngs()}


def odd_files() -> dict[str, bytes]:
    """Those that Pillow has to decode."""
    colour, grey, inks = noise(21, 34), noise(21, 34, 1), noise(21, 34, 4, 1)
    cmyk = Image.frombytes("CMYK", inks.size, inks.tobytes())
    inked = saved(cmyk, "JPEG")
    ycck = inked.replace(adobe(0), adobe(2))
    assert ycck != inked
    deep = Image.fromarray(np.random.default_rng(2).integers(0, 65536, (21, 34), np.uint16))
    frames: dict[str, Any] = {"save_all": True, "append_images": [noise(21, 34, seed=3)]}
    jpeg = saved(colour, "JPEG")
    return {
        "jpeg cmyk": inked,
        "jpeg ycck": ycck,
        "jpeg ycck 4:2:0": resampled(saved(noise(32, 32, 4).convert("CMYK"), "JPEG"), 0x22),
        "jpeg junk between": jpeg[:20] + b"\0\0" + jpeg[20:],
        "png 16 grey": saved(deep, "PNG"),
        "png 16 rgb": png(13, 11, 2, 16, interlaced=False, extra=[]),
        "png 16 rgba": png(13, 11, 6, 16, interlaced=True, extra=[]),
        "png animated": saved(colour, "PNG", **frames),
        "png cut behind the pixels": saved(colour, "PNG")[:-2],
        "webp animated": saved(colour, "WEBP", **frames),
        "gif": saved(colour.quantize(9), "GIF"),
        "gif animated": saved(colour.quantize(9), "GIF", **frames),
        "gif grey": saved(grey, "GIF"),
        "bmp palette": saved(colour.quantize(9), "BMP"),
        "bmp grey": saved(grey, "BMP"),
        "bmp bits": saved(colour.convert("1"), "BMP"),
        "bmp alpha": saved(noise(21, 34, 4), "BMP"),
        "ppm bits": saved(colour.convert("1"), "PPM"),
        "ppm 16 grey": saved(deep, "PPM"),
        "ppm text": b"P3 2 1 255 1 2 3 4 5 6" + b" " * 30,
        "ppm comment": b"P6\n# 3 3 3\n2 1\n255\n" + bytes(range(6)) + bytes(20),
        "tiff": saved(colour, "TIFF"),
        "tiff lzw": saved(colour, "TIFF", compression="tiff_lzw"),
        "tiff bits": saved(colour.convert("1"), "TIFF"),
        "tiff palette": saved(colour.quantize(9), "TIFF"),
        "tiff 16": saved(deep, "TIFF"),
        "jpeg 2000": saved(colour, "JPEG2000"),
        "ico": saved(noise(32, 32), "ICO", sizes=[(32, 32)]),
    }

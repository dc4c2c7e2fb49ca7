"""Read from a JPEG file's header whether all decoders make the same colours of it."""

from __future__ import annotations

from typing import Any

_SAMPLED = (0x11, 0x21, 0x22)
"""Luma's sampling beside chroma's 1 x 1: 4:4:4, 4:2:2, 4:2:0."""


def is_common(file: Any) -> bool:
    """Whether ``file`` is a whole Huffman-coded JPEG file of bytes, grey or YCbCr.

    Of a header that it cannot read, DALI 2.4 dies if it gets 32 files or more. Of a file that was
    cut short, nvImageCodec's decoder for the engine reports success as soon as its work is queued.
    Not RGB, which decoders recognise in different ways (Adobe's marker, names of components), and
    no other sampling of chroma than 4:4:4, 4:2:2 and 4:2:0.
    """
    frame, transform, place, marker = b"", 1, 2, 0
    if bytes(file[:2]) != b"\xff\xd8" or bytes(file[-2:]) != b"\xff\xd9":
        return False
    while place + 4 <= len(file) and file[place] == 0xFF:
        marker = file[place + 1]
        if marker == 0xFF:  # padding
            place += 1
            continue
        length = file[place + 2] << 8 | file[place + 3]
        if marker == 0xEE and bytes(file[place + 4 : place + 9]) == b"Adobe" and length >= 14:
            transform = file[place + 15]
        elif marker in (0xC0, 0xC1, 0xC2):
            frame = bytes(file[place + 4 : place + 2 + length])
        elif marker == 0xDA:  # the first scan
            break
        place += 2 + length
    if marker != 0xDA or len(frame) < 9 or frame[0] != 8:
        return False
    named, sampled = frame[6::3], frame[7::3]
    if len(named) == 1:
        return True
    usual = sampled[0] in _SAMPLED and sampled[1:] == b"\x11\x11"
    return len(named) == 3 and named != b"RGB" and transform == 1 and usual

"""Decode JPEG files on the CPU by nvImageCodec, DALI's own decoder library: whole, or a window.

    file, window ──> uint8 [H, W, 3], Pillow's RGB to the bit
                 └──> None: Pillow must decode it, or raise

Left to Pillow: other formats, CMYK, more than 8 bits, windows that reach outside or are one pixel
wide (libjpeg then ignores the neighbouring chroma), and files that fail. A damaged file does not
affect its neighbours.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from nvidia import nvimgcodec


class WindowDecoder:
    """Decodes in whatever threads call it, without the GIL; each has a decoder of its own."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._params = nvimgcodec.DecodeParams(
            apply_exif_orientation=False,  # Pillow does not
            color_spec=nvimgcodec.ColorSpec.SRGB,
        )

    def decode(self, file: Any, window: tuple[int, int, int, int]) -> npt.NDArray[np.uint8] | None:
        """Return the pixels, or None: see the module.

        Args:
            file: its bytes, which are read where they are, and not after this returns.
            window: Pillow's box (left, upper, right, lower).
        """
        stream = _stream(file, window)
        if stream is None:
            return None
        (image,) = self._decoder().decode([stream], params=self._params)
        return None if image is None else np.asarray(image)

    def _decoder(self) -> Any:
        decoder = getattr(self._own, "decoder", None)
        if decoder is None:
            decoder = self._own.decoder = nvimgcodec.Decoder(
                device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,  # which is the calling one
                backends=[nvimgcodec.Backend(nvimgcodec.CPU_ONLY)],
            )
        return decoder


def _stream(file: Any, window: tuple[int, int, int, int]) -> Any:
    """Return what nvImageCodec decodes as Pillow does; None for anything else."""
    try:
        stream = nvimgcodec.CodeStream(file)
        if stream.codec_name != "jpeg" or stream.num_channels == 4 or stream.precision != 8:
            return None
        if window == (0, 0, stream.width, stream.height):
            return stream
        left, upper, right, lower = window
        inside = left >= 0 and upper >= 0 and right <= stream.width and lower <= stream.height
        if not inside or right - left < 2 or lower <= upper:
            return None
        return stream.get_sub_code_stream(0, nvimgcodec.Region(upper, left, lower, right))
    except (RuntimeError, ValueError):  # no image at all
        return None

"""Makes JPEG files with the statistics of photographs, for the demo.

    1/f texture (natural images' spectrum) + lit gradient + sensor noise
    ──> 640x480 and 1024x768, RGB, quality 90 ──> class folders, about 60 to 300 KB a file

The spectrum: D. J. Field, "Relations between the statistics of natural images and the response
properties of cortical cells", JOSA A 4 (1987): amplitude falls as 1/frequency, with
exponents of 0.7 to 1.5 from scene to scene.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

_SIZES = ((640, 480), (640, 480), (1024, 768), (480, 640), (800, 600))
_HUES = {
    "sand": (205, 178, 140),
    "leaf": (96, 140, 84),
    "sky": (130, 165, 205),
    "brick": (165, 100, 82),
}
_TEXTURE_SIDE = 1536
_QUALITY = 90

Floats = npt.NDArray[np.float32]


def make_photos(folder: Path, *, count: int = 300, seed: int = 0) -> Path:
    """Return ``folder`` with ``count`` JPEG files in class folders; make it unless it exists.

    The same seed gives the same pictures.
    """
    if folder.is_dir():
        return folder
    rng = np.random.default_rng(seed)
    textures = [_texture(rng) for _ in range(3)]
    noise = rng.standard_normal((_TEXTURE_SIDE, _TEXTURE_SIDE), dtype=np.float32)
    names = list(_HUES)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        photos = Path(unfinished, "photos")
        for name in names:
            (photos / name).mkdir(parents=True)

        def make(number: int) -> None:
            name = names[number % len(names)]
            image = _photo(np.random.default_rng((seed, number)), name, textures, noise)
            image.save(photos / name / f"{number:04d}.jpg", "JPEG", quality=_QUALITY)

        # NumPy and Pillow give up the GIL in nearly all of this work: threads use every core.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            list(pool.map(make, range(count)))
        photos.rename(folder)
    return folder


def _texture(rng: np.random.Generator) -> Floats:
    """Return a square field with a 1/f^1.2 amplitude spectrum, mean 0 and standard deviation 1."""
    side = _TEXTURE_SIDE
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :])
    frequency[0, 0] = np.inf
    phase = rng.uniform(0, 2 * np.pi, frequency.shape)
    field = np.fft.irfft2(np.exp(1j * phase) / frequency**1.2, s=(side, side))
    return np.asarray(field / field.std(), dtype=np.float32)


def _photo(
    rng: np.random.Generator, name: str, textures: list[Floats], noise: Floats
) -> Image.Image:
    width, height = _SIZES[rng.integers(len(_SIZES))]
    relief, tint, detail = (_window(rng, field, width, height) for field in textures)
    across = np.linspace(-1, 1, width, dtype=np.float32)[None, :] * rng.normal(0, 22)
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None] * rng.normal(0, 30)
    light = across + down + 34 * relief + rng.uniform(1.5, 4) * _window(rng, noise, width, height)
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    for channel, level in enumerate(_HUES[name]):
        plane = light + np.float32(level) + (6, -2, -6)[channel] * tint + 3 * detail
        pixels[:, :, channel] = np.clip(plane, 0, 255)
    return Image.fromarray(pixels)


def _window(rng: np.random.Generator, field: Floats, width: int, height: int) -> Floats:
    """Return a random part of ``field``, randomly mirrored."""
    top = rng.integers(field.shape[0] - height + 1)
    left = rng.integers(field.shape[1] - width + 1)
    steps = (int(rng.choice((-1, 1))), int(rng.choice((-1, 1))))
    window: Floats = field[top : top + height, left : left + width][:: steps[0], :: steps[1]]
    return window

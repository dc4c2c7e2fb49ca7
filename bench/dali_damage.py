"""Which damaged JPEG files does DALI decode otherwise than Pillow, and does the backend see them?

sound file ──random damage──> peek ──DALI or Pillow?──┐
               ├─────────> DALI, whole and a window ──┼─ the same pixels? who raises?
               └─────────> Pillow ────────────────────┘
"""

from __future__ import annotations

import io
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bench.dali import dali_version, folder_of_photos
from bench.harness import Case, Cell, Result, Scale, in_folder, interleave

OUTCOMES = (
    "the same pixels",
    "both raise",
    "only DALI raises",
    "only Pillow raises",
    "other pixels",
)
WRONG = OUTCOMES[3:]

Pixels = npt.NDArray[np.uint8]

_WAYS = ("bit", "zero", "byte", "ff", "noise", "zeros", "removed", "inserted", "repeated")
_LENGTHS = (1, 2, 4, 16, 64)
_SEED = 5


@in_folder
def run(scale: Scale, folder: Path) -> Result:
    count = scale.pick(full=12_000, tiny=20)
    found: Counter[tuple[str, str, str]] = Counter()
    for data, where, outcome in compared(count, _SEED):
        found[where, _read_by(data), outcome] += 1
    rows: list[tuple[Cell, ...]] = []
    for where in ("compressed data", "headers"):
        for reader in ("DALI", "Pillow"):
            counts = [found[where, reader, outcome] for outcome in OUTCOMES]
            rows.append((f"{where}, read by {reader}", sum(counts), *counts))
    looking, decoding = cost(scale, folder)
    wrong = sum(found[where, "DALI", each] for where, _, _ in found for each in WRONG)
    return Result(
        ("damage in", "files", *OUTCOMES),
        tuple(rows),
        wrong == 0,
        (
            f"{count} files of about 100 x 60 pixels, each damaged once: a bit, a byte, or up to "
            "64 bytes overwritten, removed, inserted or repeated. Sequential, progressive, with "
            "restarts, in colour and grey.",
            "DALI's CPU decoder got each of them, whole and for a window, also those that the "
            "backend hands to Pillow: the rows of Pillow tell what that is for.",
            f"Of a photo of 500 pixels on the longer side: looking at its header takes "
            f"{looking * 1e6:.0f} CPU us, its compressed data included, decoding "
            f"{decoding * 1e6:.0f}: {looking / decoding:.1%}.",
            f"nvidia-dali {dali_version()}.",
        ),
    )


def cost(scale: Scale, folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of looking at a photo's header, and of decoding it by DALI."""
    from backends.dali.header import peek

    decode = Decoder()
    (file,) = folder_of_photos(folder, 1, 1).rglob("*.jpg")
    data = file.read_bytes()
    ways = {"look": lambda: peek(data), "decode": lambda: decode(data, None)}
    timings = interleave(ways, rounds=scale.pick(full=100, tiny=2))
    return timings["look"].low("cpu"), timings["decode"].low("cpu")


def compared(count: int, seed: int) -> Iterator[tuple[bytes, str, str]]:
    """Yield ``count`` damaged files, where each is damaged, and one of `OUTCOMES`."""
    chance, decode = random.Random(seed), Decoder()
    files = sound_files()
    while count > 0:
        whole = chance.choice(files)
        data, where = damaged(whole, chance)
        if data != whole:
            yield data, where, _outcome(data, decode, chance)
            count -= 1


def sound_files() -> list[bytes]:
    """Return small JPEG files of every kind that DALI reads."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"subsampling": 0},
        {"subsampling": 1},
        {"quality": 95},
        {"optimize": True},
        {"progressive": True},
        {"restart_marker_blocks": 2},
        {"restart_marker_rows": 1},
        {"mode": "L"},
    )
    found = []
    for seed in range(3):
        for kind in kinds:
            options = {name: value for name, value in kind.items() if name != "mode"}
            file = io.BytesIO()
            _picture(60 + 7 * seed, 90 + 5 * seed, seed, kind.get("mode", "RGB")).save(
                file, "JPEG", **options
            )
            found.append(file.getvalue())
    return found


def damaged(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return ``data`` with one damage, and where that is; its last bytes stay."""
    scan = data.index(b"\xff\xda") + 14
    inside = chance.random() < 0.8
    low, high = (scan, len(data) - 2) if inside else (2, scan)
    place, way = chance.randrange(low, high), chance.choice(_WAYS)
    length = min(chance.choice(_LENGTHS), high - place)
    source = chance.randrange(low, high)
    new = {
        "bit": lambda: bytes([data[place] ^ 1 << chance.randrange(8)]),
        "zero": lambda: b"\0",
        "byte": lambda: chance.randbytes(1),
        "ff": lambda: b"\xff",
        "noise": lambda: chance.randbytes(length),
        "zeros": lambda: bytes(length),
        "removed": lambda: b"",
        "inserted": lambda: chance.randbytes(length),
        "repeated": lambda: data[source : source + length],
    }[way]()
    gone = {"removed": length, "inserted": 0, "repeated": 0}.get(way, len(new))
    return data[:place] + new + data[place + gone :], "compressed data" if inside else "headers"


Window: TypeAlias = "tuple[int, int, int, int]"
"""Top, left, rows and columns of a part of an image."""


class Decoder:
    """DALI's CPU decoder as the backend uses it, one file at a time."""

    def __init__(self) -> None:
        self._pipelines: dict[bool, Any] = {}  # by whether a window is cut out

    def __call__(self, data: bytes, window: Window | None) -> Pixels:
        """Return uint8 [rows, columns, 3] of the whole image or of ``window``.

        Raises:
            RuntimeError: DALI cannot decode it.
        """
        windowed = window is not None
        if windowed not in self._pipelines:
            self._pipelines[windowed] = _pipeline(windowed)
        pipeline = self._pipelines[windowed]
        try:
            pipeline.feed_input("files", [np.frombuffer(data, np.uint8)])
            if window is not None:
                pipeline.feed_input("start", [np.array(window[:2], np.int32)])
                pipeline.feed_input("shape", [np.array(window[2:], np.int32)])
            (found,) = pipeline.run()
        except RuntimeError:
            del self._pipelines[windowed]  # a pipeline that failed cannot be used again
            raise
        return np.array(found.at(0))


def _outcome(data: bytes, decode: Decoder, chance: random.Random) -> str:
    """Return the worse outcome of the whole image and a window."""
    from PIL import Image

    window, theirs = (0, 0, 1, 2), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data))
            window = _window(image.height, image.width, chance)
            theirs = np.asarray(image.convert("RGB"))
        except Exception:  # of damaged bytes, any of Pillow's
            pass
    outcomes = (_one(data, decode, theirs, part) for part in (None, window))
    return max(outcomes, key=OUTCOMES.index)


def _one(data: bytes, decode: Decoder, theirs: Pixels | None, window: Window | None) -> str:
    try:
        ours = decode(data, window)
    except RuntimeError:
        return "both raise" if theirs is None else "only DALI raises"
    if theirs is None:
        return "only Pillow raises"
    if window is not None:
        top, left, rows, columns = window
        theirs = theirs[top : top + rows, left : left + columns]
    return "the same pixels" if np.array_equal(ours, theirs) else "other pixels"


def _window(height: int, width: int, chance: random.Random) -> Window:
    rows, columns = chance.randint(1, height), chance.randint(min(2, width), width)
    return chance.randint(0, height - rows), chance.randint(0, width - columns), rows, columns


def _read_by(data: bytes) -> str:
    from backends.dali.header import peek

    header = peek(data)
    return "DALI" if header is not None and header.plain else "Pillow"


def _picture(height: int, width: int, seed: int, mode: str) -> Any:
    """Return something between a photograph and noise, which has most coefficients."""
    from PIL import Image

    values = np.random.default_rng(seed)
    small = Image.fromarray(values.integers(0, 256, (height // 8, width // 8, 3), np.uint8))
    smooth = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    rough = smooth + values.integers(-12, 13, (height, width, 3))
    return Image.fromarray(rough.clip(0, 255).astype(np.uint8)).convert(mode)


def _pipeline(windowed: bool) -> Any:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)  # type: ignore[untyped-decorator]
    def decoding() -> Any:
        files = fn.external_source(name="files")
        options = {"device": "cpu", "output_type": types.RGB, "adjust_orientation": False}
        if not windowed:
            return fn.decoders.image(files, **options)
        start, shape = fn.external_source(name="start"), fn.external_source(name="shape")
        return fn.decoders.image_slice(files, start=start, shape=shape, axis_names="HW", **options)

    pipeline = decoding()
    pipeline.build()
    return pipeline


CASES = [
    Case(
        "dali_damage",
        "Of damaged JPEG files, which does DALI decode otherwise than Pillow?",
        "none of those that the backend has DALI read: the same pixels, or DALI raises",
        run,
    )
]

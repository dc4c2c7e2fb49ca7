"""DALI on a CUDA device: which engine decodes.

dali_hw_decoder   the share of JPEG files that the hardware engine decodes (hw_decoder_load), whole
                  or windows ──> how far from Pillow, from another place in the batch, images/s

Each setting runs in a process of its own, because nvImageCodec 0.9.0 crashes on
windows (its issue 55).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.dali import dali_version, folder_of_photos
from bench.harness import Case, Result, Scale, device_here, finished, in_folder, version_of
from dataloaders.machine.resources import usable_cores

HEADINGS = (
    "setting",
    "largest difference to Pillow, levels",
    "mean",
    "share the same",
    "largest difference to itself at another place in the batch",
    "images/s",
)
_LIMIT_S = 30.0  # for one setting


@in_folder
def run_engines(scale: Scale, folder: Path) -> Result:
    if dali_version() is None:
        return Result(HEADINGS, (("not measured: NVIDIA DALI is not installed", *[None] * 5),))
    photos = folder_of_photos(folder, 64, scale.pick(full=64, tiny=4))
    settings = [(0.0, False), (0.65, False), (1.0, False), (0.0, True), (0.65, True)]
    found = {
        f"load {load}, {'windows' if windows else 'whole files'}": _in_a_process(
            photos, load, windows
        )
        for load, windows in settings[: scale.pick(full=None, tiny=1)]
    }
    well = [one for one in found.values() if "error" not in one]
    keys = ("largest", "mean", "same", "elsewhere", "rate")
    return Result(
        HEADINGS,
        tuple((name, *(one.get(key) for key in keys)) for name, one in found.items()),
        None,
        (
            f"64 JPEG photos, jpeg_fancy_upsampling=True, on {device_here()}; images/s of decoding "
            "alone, by batches of 64.",
            *(f"{name}: {one['error']}" for name, one in found.items() if "error" in one),
            f"nvidia-dali {dali_version()}, nvImageCodec "
            f"{version_of('nvidia-nvimgcodec-cu13', 'nvidia-nvimgcodec-cu12')}; JPEG libraries in "
            f"the process: {', '.join(next((one['libraries'] for one in well), ()))}.",
        ),
        found,
    )


def setting_works(photos: Path, *, windows: bool) -> bool:
    """Return whether this device decodes so, tried in a process that may crash."""
    return "error" not in _in_a_process(photos, 0.0, windows)


def _in_a_process(photos: Path, load: float, windows: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.dali_device", str(photos), str(load), str(int(windows))]
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_LIMIT_S:.0f} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {done.stderr[-1500:]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_engine(photos: Path, load: float, windows: bool) -> dict[str, Any]:
    """Measure pixels and speed of one setting in this process."""
    from nvidia.dali import fn, pipeline_def
    from PIL import Image

    paths = sorted(photos.rglob("*.jpg"))[:64]
    files = [np.fromfile(path, np.uint8) for path in paths]
    pictures = [np.asarray(Image.open(path).convert("RGB")).astype(int) for path in paths]
    device = device_here()
    gpu = device.type == "cuda"
    options: dict[str, Any] = {"jpeg_fancy_upsampling": True, "device": "cpu"}
    if gpu:
        options.update(device="mixed", hw_decoder_load=load)

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=len(files),
        num_threads=usable_cores(),
        device_id=0 if gpu else None,
        prefetch_queue_depth=1,
    )
    def pipeline() -> Any:
        encoded = fn.external_source(name="files")
        if windows:
            box = {"start": (40, 60), "shape": (120, 160), "axis_names": "HW"}
            return fn.decoders.image_slice(encoded, **box, **options)
        return fn.decoders.image(encoded, **options)

    decoding = pipeline()
    decoding.build()

    def decoded(order: Any) -> list[Any]:
        decoding.feed_input("files", [files[i] for i in order])
        (made,) = decoding.run()
        made = made.as_cpu() if gpu else made
        return [np.asarray(made.at(place)).astype(int) for place in range(len(order))]

    if windows:
        pictures = [picture[40:160, 60:220] for picture in pictures]
    straight = np.arange(len(files))
    order = np.random.default_rng(0).permutation(len(files))
    first = decoded(straight)
    again = dict(zip(order.tolist(), decoded(order), strict=True))
    off = np.concatenate([np.abs(a - b).ravel() for a, b in zip(first, pictures, strict=True)])
    seconds = []
    for _ in range(8 if gpu else 2):
        decoding.feed_input("files", files)
        finished(device)
        begun = time.perf_counter()
        decoding.run()
        finished(device)
        seconds.append(time.perf_counter() - begun)
    return {
        "largest": int(off.max()),
        "mean": float(off.mean()),
        "same": float((off == 0).mean()),
        "elsewhere": max(int(np.abs(first[i] - again[i]).max()) for i in straight),
        "rate": len(files) / float(np.median(seconds)),
        "libraries": _mapped("libnvjpeg", "libnvimgcodec", "nvjpeg_ext"),
    }


def _mapped(*names: str) -> list[str]:
    """Return mapped files of these names; without nvJPEG a CPU decodes, without a warning."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[-1]).name for line in lines}
    return sorted(file for file in files if any(name in file for name in names))


CASES = [
    Case(
        "dali_hw_decoder",
        "What does a device's JPEG engine change: pixels, their place in the batch, speed?",
        "none: it shows which hw_decoder_load is worth it, and whether windows can be decoded",
        run_engines,
        gpu=True,
        limit_s=140,
    ),
]

if __name__ == "__main__":
    folder_, load_, windows_ = sys.argv[1:]
    print(json.dumps(measure_engine(Path(folder_), float(load_), windows_ == "1")))

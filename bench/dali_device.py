"""DALI on a CUDA device, one process a setting: which engine decodes, and what memory that takes.

dali_hw_decoder   the share of JPEG files that the hardware engine decodes (hw_decoder_load), whole
                  or windows ──> how far from Pillow, from another place in the batch, images/s
dali_memory       what explain() foretells ──> beside what the device and torch say

A setting may crash: nvImageCodec 0.9.0 does on windows (its issue 55). Then it alone is lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.dali import chain, dali_version, folder_of_photos, loader
from bench.harness import Case, Cell, Result, Scale, device_here, finished, version_of
from dataloaders.machine.resources import usable_cores

__all__ = ["CASES", "settings_work"]

_LIMIT_S = 30.0
"""Of one setting: if both with windows hang, the others still get into the result."""


def run_engines(scale: Scale) -> Result:
    """Each setting in a process of its own."""
    if dali_version() == "none":
        return Result(_HEADINGS, (("not measured: NVIDIA DALI is not installed", *[None] * 6),))
    count = scale.pick(full=128, tiny=4)
    rows: list[tuple[Cell, ...]] = []
    data: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        photos = folder_of_photos(Path(folder), count, scale.pick(full=64, tiny=4))
        settings = [(load, False) for load in (0.0, 0.65, 1.0)] + [(0.0, True), (0.65, True)]
        for load, windows in settings[:: scale.pick(full=1, tiny=5)]:
            found = _in_a_process(photos, load, windows, scale.pick(full=256, tiny=4))
            name = f"load {load}, {'windows' if windows else 'whole files'}"
            data[name] = found
            keys = ("largest", "mean", "within one", "same", "elsewhere", "rate")
            rows.append((name, *(found.get(key) for key in keys)))
    return Result(
        _HEADINGS,
        tuple(rows),
        None,
        (
            f"{count} JPEG photos, jpeg_fancy_upsampling=True, on {device_here()}; images/s of a "
            "crop, a resize to 224 x 224 and flips, by batches of 256.",
            *(f"{name}: {found['error']}" for name, found in data.items() if "error" in found),
            f"nvidia-dali {dali_version()}, nvImageCodec {_codec()}; libraries in the process: "
            f"{', '.join(next((f['libraries'] for f in data.values() if 'libraries' in f), ()))}.",
        ),
        data,
    )


_HEADINGS = (
    "setting",
    "largest difference to Pillow, levels",
    "mean",
    "share within 1 level",
    "share the same",
    "largest difference to itself at another place in the batch",
    "images/s",
)


def settings_work(photos: Path, *, windows: bool) -> bool:
    """Whether this device decodes so, tried in a process that may crash."""
    return "error" not in _in_a_process(photos, 0.0, windows, 4)


def _in_a_process(photos: Path, load: float, windows: bool, batch: int) -> dict[str, Any]:
    arguments = [str(photos), str(load), str(int(windows)), str(batch)]
    command = [sys.executable, "-m", "bench.dali_device", *arguments]
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


def measure_engine(photos: Path, load: float, windows: bool, batch: int) -> dict[str, Any]:
    """Pixels and speed of one setting, in this process."""
    from PIL import Image

    from backends.dali.graph import Graph
    from backends.dali.nodes import FAST, node_for
    from dataloaders.transforms.actions import Action, Sizes
    from dataloaders.transforms.primitives.geometry import Crop, HorizontalFlip, Resize

    device = device_here()
    paths = sorted(photos.rglob("*.jpg"))[:64]
    files = [np.fromfile(path, np.uint8) for path in paths]
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    sides = np.array([picture.shape[:2] for picture in pictures])
    nodes: list[Any] = [
        node_for(primitive, form="pil", device="cuda", fast=tuple(FAST))
        for primitive in (Crop(), Resize("bilinear"), HorizontalFlip())
    ]
    options: dict[str, Any] = {"device": device, "windows": windows, "engine": load}
    threads = usable_cores()

    def cut(order: Any) -> Action:
        height, width = sides[order].T
        box = (height // 5, width // 4, height // 2, width // 2)
        return Action(Crop(), dict(zip(Crop.numbers, box, strict=True)))

    def decoded(order: Any) -> list[Any]:
        graph = Graph(nodes[:1], batch_size=len(files), threads=threads, **options)
        graph.feed([files[i] for i in order], [cut(order)], Sizes(*sides[order].T))
        made = graph.take()
        return [image.permute(1, 2, 0).cpu().numpy().astype(int) for image in made]

    straight = np.arange(len(files))
    order = np.random.default_rng(0).permutation(len(files))
    first = decoded(straight)
    again = dict(zip(order.tolist(), decoded(order), strict=True))
    numbers = cut(straight).numbers
    boxes = np.stack([numbers[name] for name in Crop.numbers], 1).tolist()
    off = np.concatenate(
        [
            np.abs(image - picture[y : y + h, x : x + w]).ravel()
            for image, picture, (y, x, h, w) in zip(first, pictures, boxes, strict=True)
        ]
    )
    graph = Graph(nodes, batch_size=batch, threads=threads, **options)
    many = np.resize(straight, batch)
    whole = {"height": np.full(batch, 224), "width": np.full(batch, 224)}
    flip = Action(HorizontalFlip(), {}, np.arange(batch) % 2 == 0)

    def feed() -> None:
        actions = [cut(many), Action(Resize("bilinear"), whole), flip]
        graph.feed([files[i] for i in many], actions, Sizes(*sides[many].T))

    batches = 16 if device.type == "cuda" else 1
    seconds = []
    feed()
    for _ in range(3):  # the first one warms up
        begun = time.perf_counter()
        for _ in range(batches):
            feed()
            graph.take()
        finished(device)
        seconds.append(time.perf_counter() - begun)
    graph.close()
    return {
        "largest": int(off.max()),
        "mean": float(off.mean()),
        "within one": float((off <= 1).mean()),
        "same": float((off == 0).mean()),
        "elsewhere": max(int(np.abs(first[i] - again[i]).max()) for i in range(len(files))),
        "rate": batch * batches / min(seconds[1:]),
        "libraries": _mapped("libnvjpeg", "libnvimgcodec", "nvjpeg_ext"),
    }


def run_memory(scale: Scale) -> Result:
    """An epoch by DALI; the device's free memory looked at after each batch."""
    from backends.dali import Dali
    from backends.dali.job import Job
    from backends.dali.memory import batch_memory

    headings = ("what", "MiB")
    device = device_here()
    count, side = scale.pick(full=4096, tiny=8), scale.pick(full=224, tiny=16)
    batch = scale.pick(full=256, tiny=4)
    with tempfile.TemporaryDirectory() as folder:
        photos = folder_of_photos(Path(folder), count, scale.pick(full=64, tiny=4))
        ours = loader(photos, chain(side), batch, backend="dali", device=device, drop_last=True)
        job = Dali().job(ours)
        told = batch_memory(job) if isinstance(job, Job) else None
        assert told is not None
        torch.zeros(1, device=device)
        before, used = _free(device), []
        for _ in range(3):
            least = before
            for _batch in ours:
                least = min(least, _free(device))
            finished(device)
            used.append(before - least)
        torchs = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        plan = str(ours.explain())
    mib = 2**20
    rows = (
        ("foretold: inside DALI", told.inside / mib),
        ("foretold: finished batches that wait", told.waiting / mib),
        ("foretold: one finished batch", told.finished / mib),
        *((f"taken from the device, epoch {n}", one / mib) for n, one in enumerate(used, 1)),
        ("of which torch's, at most", torchs / mib),
    )
    flat = used[-1] <= 1.05 * used[0] + 64 * mib
    return Result(
        headings,
        rows,
        flat if device.type == "cuda" else None,
        (f"{count} photos, batches of {batch}, on {device}.", f"explain(): {plan}"),
    )


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _mapped(*names: str) -> list[str]:
    """Files of these names in this process's memory; without nvJPEG a CPU decodes, in silence."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines}
    return sorted(file for file in files if any(name in Path(file).name for name in names))


def _codec() -> str:
    names = ("nvidia-nvimgcodec-cu13", "nvidia-nvimgcodec-cu12")
    return next((found for found in map(version_of, names) if found is not None), "unknown")


CASES = [
    Case(
        "dali_hw_decoder",
        "What does a device's JPEG engine change: pixels, their place in the batch, speed?",
        "none: it shows which hw_decoder_load is worth it, and whether windows can be decoded",
        run_engines,
        gpu=True,
    ),
    Case(
        "dali_memory",
        "Does a device's memory hold what explain() foretells, epoch after epoch?",
        "the third epoch takes at most 5 % and 64 MiB more than the first",
        run_memory,
        gpu=True,
    ),
]

if __name__ == "__main__":
    folder_, load_, windows_, batch_ = sys.argv[1:]
    print(json.dumps(measure_engine(Path(folder_), float(load_), windows_ == "1", int(batch_))))

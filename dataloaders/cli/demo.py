"""Shows the check, tuning and the cache on photographs made on the spot.

    photos ──> check train_images.py ──> tune it ──> check with what was chosen ──> what next
                                             └─ not step-bound yet ──> check with a cache ─┘

Each part is the very command that a user would type, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from dataloaders.bottleneck import Report
from dataloaders.bottleneck.outputs.contents import times
from dataloaders.errors import DataLoadersError, MissingDependency, OptionError
from dataloaders.measuring.progress import ProgressLine
from dataloaders.tuning.learned import cache_folder

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = "examples/train_images.py"
_CACHED = "with a cache"
# Bytes of images that are some ten times as large decoded.
_MOST_TO_CACHE = 64 * 2**20


def carry_out(options: Namespace) -> int:
    """Check the example, tune it, check it again, and with a cache if it still waits; return 0.

    ``options.images`` is a folder with one subfolder of images for each class; None makes about 300
    JPEGs once, in the cache folder. ``options.budget`` is the most seconds for each part; the
    cache's takes its building in addition.

    Raises:
        MissingDependency: torchvision or Pillow is not installed.
        OptionError: the images are not in such a folder.
        DataLoadersError: the example is not there, or one of the parts failed.
    """
    if not (_ROOT / _EXAMPLE).is_file():
        raise DataLoadersError(
            f"the demo runs {_ROOT / _EXAMPLE}, which is not there: examples are part of a "
            "checkout, not of an installed wheel; clone the repository and run `make demo` in it"
        )
    missing = [each for each in ("PIL", "torchvision") if importlib.util.find_spec(each) is None]
    if missing:
        raise MissingDependency(
            f"the demo reads JPEG files with torchvision and Pillow, and {missing[0]} cannot be "
            "imported; install them with: pip install 'gpu-dataloaders[vision]'"
        )
    folder = made_photos() if options.images is None else _given(options.images)
    # 37 batches an epoch: enough of them for a steady state.
    script = ["--data", str(folder), "--epochs", "1000", "--batch-size", "8"]
    with tempfile.TemporaryDirectory() as results:

        def part(title: str, command: str, words: list[str], **variables: str) -> Path:
            result = Path(results, f"{len(os.listdir(results))}.json")
            _part(title, [command, "--budget", f"{options.budget:g}"], words, result, variables)
            return result

        def checked(title: str, words: list[str], **variables: str) -> Report:
            return Report.from_json(part(title, "check", words, **variables))

        found = [("as it is", checked("the script as it is", script))]
        tuned = json.loads(part("tuning its loader", "tune", script).read_text(encoding="utf-8"))
        chosen = _arguments(tuned)
        if chosen:
            title = f"the same with what tuning chose: {' '.join(chosen)}"
            found.append(("tuned", checked(title, [*script, *chosen])))
        else:
            print(f"\nTuning left the script as it is: {tuned['reason']}.")
        if found[-1][1].verdict != "step-bound" and _may_cache(folder):
            cache_folder().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="demo-", dir=cache_folder()) as cache:
                title = 'the same with a cache of the decoded images: DataLoader(..., backend="h5")'
                variables = {"DATALOADERS_BACKEND": "h5", "DATALOADERS_CACHE": cache}
                found.append((_CACHED, checked(title, script, **variables)))
    _conclude(found, "" if chosen else str(tuned["reason"]))
    return 0


def _part(
    title: str, command: list[str], words: list[str], result: Path, variables: dict[str, str]
) -> None:
    backend = "DATALOADERS_BACKEND=h5 " if variables else ""
    shown = " ".join([command[0], _EXAMPLE, "--", *words])
    print(f"\n=== {title}\n$ {backend}dataloaders {shown}\n", flush=True)
    start = [sys.executable, "-m", "dataloaders", *command, "--json", str(result)]
    # From our own folder: a folder of the user's called dataloaders cannot come first there.
    done = subprocess.run(
        [*start, _EXAMPLE, "--", *words], cwd=_ROOT, env={**os.environ, **variables}, check=False
    )
    if done.returncode == 130 or done.returncode < 0:
        raise KeyboardInterrupt
    if not result.is_file():
        raise DataLoadersError(
            f"`dataloaders {command[0]}` ended with status {done.returncode} and no result; "
            "what it printed above says why"
        )


def _arguments(tuned: dict[str, Any]) -> list[str]:
    """Return the example's arguments for what tuning chose; none if it changed nothing."""
    choice, arguments = tuned["choice"], []
    if choice["num_workers"]:
        arguments += ["--workers", str(choice["num_workers"])]
        arguments += ["--prefetch", str(choice["prefetch_factor"])]
    if tuned["given"]["pin_memory"] and not choice["pin_memory"]:
        arguments += ["--no-pin"]
    return arguments


def _may_cache(folder: Path) -> bool:
    """Return whether a cache of the decoded images is built in seconds and can be built here."""
    if sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) > _MOST_TO_CACHE:
        return False
    if importlib.util.find_spec("h5py") is None:
        print("\nA cache is not shown: building one needs h5py (pip install h5py).")
        return False
    return True


def _conclude(found: list[tuple[str, Report]], why_not_tuned: str) -> None:
    print("\n=== what was found")
    first, (last, report) = found[0][1], found[-1]
    for name, one in found:
        faster, bound = one.against(first).arms.get("real"), one.speedup_bound
        compared = f"; {times(faster[2])} as fast as it is" if faster and one is not first else ""
        perfect = f"; a perfect input would be {times(bound)} as fast" if bound else ""
        print(f"{name:>15}: {one.verdict}{compared}{perfect}")
    if why_not_tuned:
        print(f"{'tuning':>15}: no change, since {why_not_tuned}")
    print("\nwhat to try next")
    faster = report.against(first).arms.get("real")
    if last == _CACHED and faster and faster[2].low > 1:
        print('  a cache, built once: DataLoader(..., backend="h5"), or dataloaders cache build')
    for line in report.advice:
        print(f"  {line}")
    print("  your own script: dataloaders check train.py -- ARGS")


def _given(images: str) -> Path:
    folder = Path(images).expanduser().resolve()
    if not folder.is_dir() or not any(child.is_dir() for child in folder.iterdir()):
        raise OptionError(
            f"--images {images}: must be a folder with one subfolder of images for each class"
        )
    return folder


def made_photos() -> Path:
    """Return the folder of the demo's photographs; make them unless they are there."""
    from dataloaders.cli.photos import make_photos  # needs Pillow

    folder = cache_folder() / "demo" / "photos-2"
    line = ProgressLine()
    if not folder.is_dir():
        print(f"making photographs in {folder}", flush=True)
    try:
        make_photos(folder, progress=lambda done, count: line(f"photographs  {done} of {count}"))
    finally:
        line.close()
    return folder

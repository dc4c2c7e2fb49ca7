"""The package's main job, shown on photographs made on the spot.

    photos ──> check train_images.py ──> tune it ──> check with tuned workers ──> what next

Each part is the very command that a user would type, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dataloaders.errors import DataLoadersError, MissingDependency, OptionError
from dataloaders.learned import cache_folder

__all__ = ["demo"]

_MANY_EPOCHS = "1000"


def demo(*, images: str | None = None, budget_s: float = 25.0) -> int:
    """Check the example as it is, tune it, check it again; prints both verdicts. Returns 0.

    Args:
        images: a folder with one subfolder of images for each class; None makes about 300 JPEGs
            once, in the cache folder.
        budget_s: the most seconds for each of the three parts.

    Raises:
        MissingDependency: torchvision or Pillow is not installed.
        OptionError: ``images`` is not such a folder.
        DataLoadersError: the example is not there, or one of the parts failed.
    """
    example = _example()
    _need_vision()
    folder = _given(images) if images is not None else _made()
    script = [str(example), "--", "--data", str(folder), "--epochs", _MANY_EPOCHS]
    script += ["--batch-size", "8"]  # 37 batches an epoch: enough of them for a steady state
    with tempfile.TemporaryDirectory() as results:
        before = _part("the script as it is", "check", budget_s, script, Path(results, "1.json"))
        tuned = _part("tuning its loader", "tune", budget_s, script, Path(results, "2.json"))
        workers = str(tuned["choice"]["num_workers"])
        if workers == "0":
            print("\nTuning chose no workers: the second check would be the first again.")
            after = before
        else:
            script += ["--workers", workers]
            title = f"the same with the tuned number of workers: {workers}"
            after = _part(title, "check", budget_s, script, Path(results, "3.json"))
    _conclude(before, after, workers)
    return 0


def _conclude(before: dict[str, Any], after: dict[str, Any], workers: str) -> None:
    print("\n=== what was found")
    reports = [("as it is", before)]
    if after is not before:
        reports.append((f"with {workers} workers", after))
    for name, report in reports:
        bound = report["speedup_bound"]
        gain = (
            ""
            if bound is None
            else (
                f"; a perfect input would be {bound['estimate']:.2f} x as fast "
                f"({bound['low']:.2f} to {bound['high']:.2f})"
            )
        )
        print(f"{name:>15}: {report['verdict']}{gain}")
    took = [report["seconds_per_batch"].get("real") for report in (before, after)]
    if after is not before and all(took) and took[0]["low"] > 0 and took[1]["low"] > 0:
        first, second = took
        print(
            f"{'the loop runs':>15}: {first['estimate'] / second['estimate']:.2f} x as fast as "
            f"before ({first['low'] / second['high']:.2f} to {first['high'] / second['low']:.2f})"
        )
    print("\nwhat to try next")
    for line in after["advice"]:
        print(f"  {line}")
    print("  your own script: dataloaders check train.py -- ARGS")


def _part(title: str, command: str, budget_s: float, script: list[str], result: Path) -> Any:
    options = [command, "--budget", f"{budget_s:g}", "--json", str(result)]
    shown = script.copy()
    shown[0] = "examples/train_images.py"
    print(f"\n=== {title}\n$ dataloaders {command} {' '.join(shown)}\n", flush=True)
    # From our own folder: a folder of the user's called dataloaders cannot come first there.
    done = subprocess.run(
        [sys.executable, "-m", "dataloaders", *options, *script],
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )
    if done.returncode == 130 or done.returncode < 0:
        raise KeyboardInterrupt
    if not result.is_file():
        raise DataLoadersError(
            f"`dataloaders {command}` ended with status {done.returncode} and no result; "
            "what it printed above says why"
        )
    return json.loads(result.read_text(encoding="utf-8"))


def _example() -> Path:
    path = Path(__file__).resolve().parents[2] / "examples" / "train_images.py"
    if not path.is_file():
        raise DataLoadersError(
            f"the demo runs {path}, which is not there: examples are part of a checkout, not of "
            "an installed wheel; clone the repository and run `make demo` in it"
        )
    return path


def _need_vision() -> None:
    try:
        import PIL.Image  # noqa: F401
        import torchvision  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"the demo reads JPEG files with torchvision and Pillow, and {error.name} cannot be "
            "imported; install them with: pip install 'gpu-dataloaders[vision]'"
        ) from error


def _given(images: str) -> Path:
    folder = Path(images).expanduser().resolve()
    if not folder.is_dir() or not any(child.is_dir() for child in folder.iterdir()):
        raise OptionError(
            f"--images {images}: must be a folder with one subfolder of images for each class"
        )
    return folder


def _made() -> Path:
    from dataloaders.cli.photos import make_photos
    from dataloaders.cli.progress import ProgressLine

    folder = cache_folder() / "demo" / "photos-1"
    line = ProgressLine()
    if not folder.is_dir():
        print(f"making photographs in {folder}", flush=True)
    try:
        make_photos(folder, progress=lambda done, count: line(f"photographs  {done} of {count}"))
    finally:
        line.close()
    return folder

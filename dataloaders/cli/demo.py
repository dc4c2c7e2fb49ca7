"""Run the check on the example training script, with photographs that are made first.

photos ──> dataloaders check --try examples/train_images.py -- --data photos
"""

from __future__ import annotations

import importlib.util
import shlex
from argparse import Namespace
from pathlib import Path

from dataloaders import cli
from dataloaders.errors import DataLoadersError, MissingDependency
from dataloaders.tuning.learned import cache_folder

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_images.py"


def carry_out(options: Namespace) -> int:
    """Check the example, try each change, and return the exit status of the check.

    About 300 JPEG files are made once, in the cache folder.

    Raises:
        MissingDependency: torchvision or Pillow is not installed.
        DataLoadersError: the example is not there.
    """
    if not _EXAMPLE.is_file():
        raise DataLoadersError(
            f"the demo runs {_EXAMPLE}, which is not there: examples are part of a checkout, not "
            "of an installed wheel; clone the repository and run `make demo` in it"
        )
    missing = [each for each in ("PIL", "torchvision") if importlib.util.find_spec(each) is None]
    if missing:
        raise MissingDependency(
            f"the demo reads JPEG files with torchvision and Pillow, and {missing[0]} cannot be "
            "imported; install them with: pip install 'gpu-dataloaders[vision]'"
        )
    data = ["--data", str(made_photos())]
    # 37 batches an epoch: enough of them for a steady state.
    script = [str(_EXAMPLE), "--", *data, "--epochs", "1000", "--batch-size", "8"]
    words = ["check", "--try", "--budget", f"{options.budget:g}", *script]
    print(f"$ dataloaders {shlex.join(words)}\n", flush=True)
    return cli.main(words)


def made_photos() -> Path:
    """Return the folder of the demo's photographs; make it unless it exists."""
    from dataloaders.cli.photos import make_photos  # needs Pillow

    folder = cache_folder() / "demo" / "photos-3"
    if not folder.is_dir():
        print(f"making photographs in {folder}", flush=True)
    return make_photos(folder)

"""What works without what Windows or macOS lack, and what says so instead.

Played on Linux (`helpers.other_platform`), in interpreters of their own: no more than that.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys

from helpers.other_platform import become

become({platform!r})
if {without_psutil}:
    sys.modules["psutil"] = None

import torch
from torch.utils.data import Dataset

from dataloaders import DataLoader
from dataloaders.errors import DataLoadersError


class Large(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((3, 300, 300), float(index))  # a batch's memory comes from the pool


if __name__ == "__main__":
    torch.multiprocessing.set_start_method("spawn")
    settings = [
        dict(num_workers=0),
        dict(num_workers=2, seed=1),
        dict(num_workers="auto", prefetch_factor="auto", pin_memory="auto"),
        dict(backend="prefetch"),
    ]
    for arguments in settings:
        loader = DataLoader(Large(), 4, **arguments)
        assert [float(batch[0, 0, 0, 0]) for batch in loader] == [0.0, 4.0, 8.0, 12.0]
        assert loader.explain().runs

    def said(make):
        try:
            make()
        except (DataLoadersError, OSError) as error:
            print(error)

    def pages():
        from dataloaders.machine.page_cache import resident_pages

        resident_pages(__file__)

    said(pages)
    said(lambda: __import__("dataloaders.cache"))
    said(lambda: DataLoader(Large(), 4, backend="h5").explain())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another system is itself, and plays no other")
@pytest.mark.parametrize(("platform", "without_psutil"), [("win32", False), ("darwin", True)])
@pytest.mark.nightly
def test_plain_loaders_work_and_the_rest_says_what_is_missing(platform, without_psutil, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(platform=platform, without_psutil=without_psutil))
    tests = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
            "DATALOADERS_CACHE": str(tmp_path / "cache"),
        },
    )
    assert run.returncode == 0, run.stderr
    says = f"not known, and 4 GiB are assumed: on {platform} psutil tells it; install it with: "
    assert (says + "pip install 'gpu-dataloaders[check]'" in run.stderr) == without_psutil
    pages, *caches = run.stdout.splitlines()
    assert pages.startswith("only Linux tells which pages of a file are in memory")
    assert f"this is {platform}, which has no /proc/self/maps" in pages
    needs = "dataloaders.cache, and with it backend='h5' and 'dali', needs fcntl and os.pread"
    assert len(caches) == (2 if platform == "win32" else 0)
    assert all(line.startswith(f"{needs}, which Windows lacks") for line in caches)

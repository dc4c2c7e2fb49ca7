"""Folders that this user may not look into, and users without a folder: said, with what to do."""

import os
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from helpers.processes import run_script

AS_SOMEBODY_ELSE = """
import contextlib, importlib, io, os, pkgutil, sys
import h5py, torch, torchvision
from torch.utils.data import Dataset
import backends.h5, backends.stock, dataloaders
for module in pkgutil.walk_packages(dataloaders.__path__, "dataloaders."):
    if "cache" in module.name or "cli" in module.name or "learned" in module.name:
        importlib.import_module(module.name)
from dataloaders.cli import main

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index)

def command(*words):
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        status = main(["cache", *words])
    print(status, told.getvalue().strip())

if os.getuid() == 0:  # who may look anywhere; what is root's own cannot be imported afterwards
    list(torch.utils.data.DataLoader(Numbers(), 4, shuffle=True, num_workers=1))
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)
"""


@pytest.fixture
def closed():
    """A folder that nobody but root may look into, in one that everybody may."""
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o777)
        folder = Path(open_to_all) / "closed"
        folder.mkdir()
        folder.chmod(0)
        yield folder
        folder.chmod(0o700)


def told(folder, source, **environment):
    done = run_script(folder, AS_SOMEBODY_ELSE + source, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_folder_that_may_not_be_looked_into(closed, tmp_path):
    photos = closed.parent / "photos" / "cat"
    photos.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(photos / "1.png")
    here = closed.parent
    lines = told(
        tmp_path,
        f"""
from dataloaders.cache import precompute
from dataloaders.errors import CacheError
for path in ({str(closed / "a.h5")!r}, {str(closed / "deeper" / "a.h5")!r}):
    try:
        precompute(Numbers(), path, num_workers=0)
    except CacheError as error:
        print(error)
command("build", {str(photos.parent)!r}, {str(closed / "a.h5")!r}, "--workers", "0")
command("build", {str(photos.parent)!r}, {str(here / "a.h5")!r}, "--workers", "0", "--quiet")
command("build", {str(closed)!r}, {str(here / "b.h5")!r})
command("build", {str(closed / "data.py") + ":data"!r}, {str(here / "b.h5")!r})
""",
    )
    rule = "cannot be read (Permission denied); give a path in a folder that you may read"
    assert lines[0].startswith(f"{closed} {rule}")
    assert lines[1].startswith(f"{closed / 'deeper'} {rule}")
    assert lines[2].startswith(f"2 dataloaders cache: {closed} {rule}")
    assert lines[3].startswith(f"{here / 'a.h5'}: 1 samples")
    assert lines[4].strip() == "0"
    assert lines[5].startswith(f"2 dataloaders cache: {str(closed)!r} is no folder of images: ")
    assert "Permission denied" in lines[5]
    assert lines[6].startswith(f"2 dataloaders cache: {str(closed / 'data.py')!r} does not exist")


BUILD = """
from dataloaders import DataLoader
from dataloaders.errors import DataLoadersError
for words in ({"backend": "h5"}, {"num_workers": "auto"}):
    try:
        print(sum(len(batch) for batch in DataLoader(Numbers(), batch_size=4, **words)))
    except DataLoadersError as error:
        print(error)
"""


def test_a_cache_folder_that_cannot_be_made(closed, tmp_path):
    folder = closed / "cache"
    first, second = told(tmp_path, BUILD, DATALOADERS_CACHE=str(folder))
    assert first.startswith(f"{folder / 'h5'} cannot be created or read (Permission denied); ")
    assert first.endswith('written to, or give H5("train.h5") as the backend')
    assert second == "8"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that there is not")
def test_a_user_without_a_home(tmp_path):
    source = "for name in ('HOME', 'XDG_CACHE_HOME', 'DATALOADERS_CACHE'):\n"
    source += "    os.environ.pop(name, None)\n"
    first, second = told(tmp_path, f"{source}{BUILD}\n")
    rule = "no folder for caches is known, since this user has no home; set DATALOADERS_CACHE to"
    assert first.startswith(rule)
    assert second == "8"

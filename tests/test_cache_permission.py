"""Folders that this user may not look into, and users without a folder: said, with what to do."""

import os
import tempfile
from pathlib import Path

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


BUILD = """
from dataloaders import DataLoader
from dataloaders.cache import precompute
from dataloaders.errors import DataLoadersError
def attempt(make):
    try:
        print(make())
    except DataLoadersError as error:
        print(error)
def with_caches_of_the_user():
    for words in ({"backend": "h5"}, {"num_workers": "auto"}):
        attempt(lambda: sum(map(len, DataLoader(Numbers(), batch_size=4, **words))))

here, closed = os.environ["HERE"], os.environ["CLOSED"]
for path in (f"{closed}/a.h5", f"{closed}/deeper/a.h5"):
    attempt(lambda: precompute(Numbers(), path, num_workers=0))
command("build", f"{here}/photos", f"{closed}/a.h5", "--workers", "0")
command("build", f"{here}/photos", f"{here}/a.h5", "--workers", "0", "--quiet")
command("build", closed, f"{here}/b.h5")
command("build", f"{closed}/data.py:data", f"{here}/b.h5")
os.environ["DATALOADERS_CACHE"] = f"{closed}/cache"
with_caches_of_the_user()
for name in ("HOME", "XDG_CACHE_HOME", "DATALOADERS_CACHE"):
    os.environ.pop(name, None)
with_caches_of_the_user()
"""


def test_folders_that_may_not_be_looked_into_and_a_user_without_a_home(tmp_path):
    with tempfile.TemporaryDirectory() as open_to_all:
        here = Path(open_to_all)
        here.chmod(0o777)
        (here / "photos" / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(here / "photos" / "cat" / "1.png")
        closed = here / "closed"
        closed.mkdir()
        closed.chmod(0)
        places = {"HERE": str(here), "CLOSED": str(closed)}
        done = run_script(tmp_path, AS_SOMEBODY_ELSE + BUILD, env=places)
        closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    rule = "cannot be read (Permission denied); give a path in a folder that you may read"
    begins = [
        f"{closed} {rule}",
        f"{closed / 'deeper'} {rule}",
        f"2 dataloaders cache: {closed} {rule}",
        f"{here / 'a.h5'}: 1 samples",
        "0",
        f"2 dataloaders cache: {str(closed)!r} is no folder of images: ",
        f"2 dataloaders cache: {str(closed / 'data.py')!r} does not exist",
        f"{closed / 'cache' / 'h5'} cannot be created or read (Permission denied); ",
        "8",
    ]
    lines = done.stdout.splitlines()
    for line, begin in zip(lines, begins, strict=False):
        assert line.startswith(begin)
    assert lines[7].endswith('written to, or give H5("train.h5") as the backend')
    if os.getuid() == 0:  # only root became a user that there is not
        rule = "no folder for caches is known, since this user has no home; set DATALOADERS_CACHE"
        assert lines[9].startswith(rule)
        assert lines[10] == "8"

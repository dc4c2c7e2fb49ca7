"""Folders that this user may not look into, and users without a folder: said, with what to do."""

import os
import tempfile
from pathlib import Path

from helpers.processes import run_script

AS_SOMEBODY_ELSE = """
import importlib, os, pkgutil
import h5py, torch, torchvision
from torch.utils.data import Dataset
import backends.h5, backends.stock, dataloaders
for module in pkgutil.walk_packages(dataloaders.__path__, "dataloaders."):
    if "cache" in module.name or "cli" in module.name or "learned" in module.name:
        importlib.import_module(module.name)
from dataloaders import DataLoader
from dataloaders.cache import precompute
from dataloaders.cli import main
from dataloaders.errors import DataLoadersError

class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index)

if os.getuid() == 0:  # who may look anywhere; what is root's own cannot be imported afterwards
    list(torch.utils.data.DataLoader(Numbers(), 4, shuffle=True, num_workers=1))
    os.setgroups([])
    os.setgid(54321)
    os.setuid(54321)

def attempt(make):
    try:
        print(make())
    except DataLoadersError as error:
        print(error)

def loaded(**options):
    return sum(map(len, DataLoader(Numbers(), batch_size=4, **options)))

closed = os.environ["CLOSED"]
for path in (f"{closed}/a.h5", f"{closed}/deeper/a.h5"):
    attempt(lambda: precompute(Numbers(), path, num_workers=0))
print(main(["cache", "build", closed, "b.h5"]), main(["cache", "build", f"{closed}/x.py:x", "b"]))
os.environ["DATALOADERS_CACHE"] = f"{closed}/cache"
attempt(lambda: loaded(backend="h5"))
print(loaded(num_workers="auto"))
for name in ("HOME", "XDG_CACHE_HOME", "DATALOADERS_CACHE"):
    os.environ.pop(name, None)
attempt(lambda: loaded(backend="h5"))
print(loaded(num_workers="auto"))
"""


def test_folders_that_may_not_be_looked_into_and_a_user_without_a_home(tmp_path):
    with tempfile.TemporaryDirectory() as open_to_all:
        closed = Path(open_to_all) / "closed"
        Path(open_to_all).chmod(0o755)
        closed.mkdir(mode=0)
        done = run_script(tmp_path, AS_SOMEBODY_ELSE, env={"CLOSED": str(closed)})
        closed.chmod(0o700)
    rule = "cannot be read (Permission denied); give a path in a folder that you may read"
    first, second, statuses, third, eight, *rest = done.stdout.splitlines()
    assert first.startswith(f"{closed} {rule}")
    assert second.startswith(f"{closed / 'deeper'} {rule}")
    assert (statuses, eight, rest[1:]) == ("2 2", "8", ["8"])
    assert "cannot be created or read (Permission denied)" in third
    assert third.endswith('written to, or give H5("train.h5") as the backend')
    if os.getuid() == 0:  # only root became a user that there is not
        rule = "no folder for caches is known, since this user has no home; set DATALOADERS_CACHE"
        assert rest[0].startswith(rule)

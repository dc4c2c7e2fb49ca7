"""HDF5 files that lead elsewhere or nowhere: nothing beside them is opened, and nothing hangs.

Each is tried as it is, and with an index of ours in front whose digest is right, as somebody who
forges a cache would have it. HDF5 itself follows all of them.
"""

import h5py
import numpy as np

from helpers.cached import build
from helpers.hostile import SMALLEST_BLOCK, Whole
from helpers.processes import run_script

SECRET = b"of somebody else"
SIZE = len(SECRET)


def external_link(file, folder):
    file["columns/sample"] = h5py.ExternalLink(str(folder / "secret.h5"), "/secret")


def external_storage(file, folder):
    elsewhere = [(str(folder / "secret.bin"), 0, SIZE)]
    file.create_dataset("columns/sample", (SIZE,), "u1", external=elsewhere)


def virtual_dataset(file, folder):
    layout = h5py.VirtualLayout((SIZE,), "u1")
    layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "secret", (SIZE,))
    file.create_virtual_dataset("columns/sample", layout)


def soft_links_in_a_circle(file, folder):
    file["columns/sample"] = h5py.SoftLink("/columns/other")
    file["columns/other"] = h5py.SoftLink("/columns/sample")


LEADS = [external_link, external_storage, virtual_dataset, soft_links_in_a_circle]
READ = """
import sys
from pathlib import Path
import PIL.Image, rich.console, rich.table
from dataloaders.cache import CachedDataset, verify
from dataloaders.cli import main
from dataloaders.errors import CacheError

main(["cache", "info", "sound.h5"])  # whatever this imports
print("---")
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
for path in [*map(str, Path().glob("*.plain.h5")), *map(str, Path().glob("*.forged.h5"))]:
    try:
        cached = CachedDataset(path)
        print("rows", [cached[row] for row in range(len(cached))])
    except CacheError as error:
        print("error", error)
    print("damages", len(verify(path)))
    for words in (["info", path], ["verify", path]):
        print(words[0], main(["cache", *words]))
print("secrets", [path for path in opened if "secret" in path])
print("h5py", "h5py" in sys.modules)
"""


def test_what_hdf5_would_follow(tmp_path):
    (tmp_path / "secret.bin").write_bytes(SECRET)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["secret"] = np.frombuffer(SECRET, "u1")
    build(tmp_path / "sound.h5", [b"one", b"two!"])
    for lead in LEADS:
        plain = tmp_path / f"{lead.__name__}.plain.h5"
        with h5py.File(plain, "w", userblock_size=SMALLEST_BLOCK) as file:
            file.create_group("columns")
            file["room"] = np.zeros(20_000, "u1")  # for what the index says
            lead(file, tmp_path)
        if lead is not soft_links_in_a_circle:
            with h5py.File(plain, "r") as file:
                assert file["columns/sample"][:].tobytes() == SECRET
        whole = Whole((tmp_path / "sound.h5").read_bytes())
        whole.body = plain.read_bytes()[SMALLEST_BLOCK:]
        whole.fields["file_bytes"] = SMALLEST_BLOCK + len(whole.body)
        (tmp_path / f"{lead.__name__}.forged.h5").write_bytes(whole.with_fields(whole.fields))

    done = run_script(tmp_path, READ)
    assert done.returncode == 0, done.stderr
    told = done.stdout.partition("---\n")[2]
    lines = [line.split(maxsplit=1) for line in told.splitlines()]
    assert told.count(".plain.h5 is no finished cache: it has no index") >= len(LEADS)
    assert [said for key, said in lines if key == "verify"] == ["1"] * 2 * len(LEADS)
    assert all(int(said) >= 1 for key, said in lines if key == "damages")
    assert ["secrets", "[]"] in lines
    assert ["h5py", "False"] in lines
    assert SECRET.decode() not in done.stdout + done.stderr

"""Build the sdist and the wheel, and use the wheel as a user does: ``make package``.

    tracked files ──build──> sdist ──build──> wheel ──pip──> an environment of torch and numpy
                             what is in them?                --help, backends, a training, mypy

Nothing is downloaded: the environment's other packages are links into this interpreter's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import base_environment  # noqa: E402

OURS = ("dataloaders/", "backends/")
TRAINING = """
import sys

import torch

import dataloaders
from dataloaders import DataLoader

if __name__ == "__main__":
    assert dataloaders.__file__.startswith(sys.prefix), dataloaders.__file__
    data = [(torch.rand(3), torch.rand(1)) for _ in range(32)]
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options in (
        {},
        {"num_workers": 2, "seed": 1},
        {"num_workers": "auto", "prefetch_factor": "auto", "pin_memory": "auto"},
        {"backend": "prefetch", "num_workers": 1},
        {"backend": "synthetic"},
    ):
        for inputs, targets in DataLoader(data, batch_size=8, **options):
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("trained")
"""
TYPED = """
from backends.synthetic import Synthetic
from dataloaders import DataLoader
reveal_type(DataLoader.explain)
reveal_type(Synthetic)
"""
REVEALED = ("-> dataloaders.plan.Plan", "-> backends.synthetic.Synthetic")


def main() -> None:
    """Build, check and use; any failure ends it with a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tracked = copied(scratch / "source")
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(scratch / "dist")]
        output_of(build, scratch / "source")
        ours = {name for name in tracked if name.startswith(OURS)}
        check_sdist(next((scratch / "dist").glob("*.tar.gz")), ours)
        wheel = next((scratch / "dist").glob("*.whl"))
        check_wheel(wheel, ours)
        python = base_environment.make(scratch / "venv", wheel=wheel)
        use(python, scratch)
        print(f"{wheel.name}: {len(ours)} files, installed and used")


def copied(source: Path) -> list[str]:
    """Copy what git tracks, so that a forgotten file is noticed; return the names."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    return names


def check_sdist(path: Path, ours: set[str]) -> None:
    """Check that the sdist has all of our packages, and neither tests nor bench."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert ours | {"pyproject.toml", "README.md", "LICENSE"} <= names, ours - names
    others = {name for name in names if name.startswith(("tests/", "bench/", "examples/"))}
    assert not others, others


def check_wheel(path: Path, ours: set[str]) -> None:
    """Check that the wheel has our packages, py.typed, the licence, and nothing else."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    about = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert names - about == ours, (names - about) ^ ours
    assert {f"{package}py.typed" for package in OURS} <= names
    assert any(name.endswith("/LICENSE") for name in about)


def use(python: Path, scratch: Path) -> None:
    """Do what a user does first, in an empty folder."""
    empty = scratch / "empty"
    empty.mkdir()
    (empty / "train.py").write_text(TRAINING)
    (empty / "typed.py").write_text(TYPED)
    command = str(python.with_name("dataloaders"))
    assert "dataloaders check train.py" in output_of([command, "--help"], empty)
    assert "prefetch" in output_of([command, "backends"], empty)
    assert output_of([str(python), "-W", "error", "train.py"], empty) == "trained\n"
    mypy = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python)]
    revealed = output_of([*mypy, "--cache-dir", str(scratch / "mypy"), "typed.py"], empty)
    assert all(one in revealed for one in REVEALED), revealed


def output_of(command: list[str], folder: Path) -> str:
    """Return what the command prints; it must succeed, and sees nothing of the checkout."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        command, cwd=folder, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


if __name__ == "__main__":
    main()

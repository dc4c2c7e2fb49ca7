"""A virtual environment that has our base dependencies and nothing else.

    requirements of gpu-dataloaders ──importlib.metadata──> their distributions, transitively
        ──symbolic links into this environment──> site-packages of a new venv

Which modules there are decides in which order Python clears them at its end: the development
environment, with h5py, DALI, torchvision and Lightning, does not show what others see.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

import backends
import dataloaders

_OURS = "gpu-dataloaders"


def make(folder: Path, *extras: str, wheel: Path | None = None) -> Path:
    """Make the environment, with these extras of ours, and return its interpreter's path.

    Our packages are linked as they stand in the checkout, or installed from ``wheel``.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / Path(sys.executable).name
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    if wheel is None:
        ours = distribution(_OURS)
        for package in (dataloaders, backends):
            (packages / package.__name__).symlink_to(package.__path__[0])
    else:
        pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
        subprocess.run([*pip, "install", "--no-index", "--no-deps", str(wheel)], check=True)
        (ours,) = Distribution.discover(name=_OURS, path=[str(packages)])
    for found in _distributions(ours, extras):
        # Two levels deep: several distributions share the folder "nvidia".
        for parts in {file.parts[:2] for file in found.files or () if ".." not in file.parts}:
            link = packages.joinpath(*parts)
            if not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(Path(str(found.locate_file("/".join(parts)))))
    return python


def _distributions(ours: Distribution, extras: tuple[str, ...]) -> list[Distribution]:
    """Return the distributions that pip would install beside ours."""
    found: dict[tuple[str, frozenset[str]], Distribution] = {}
    wanted = [(_OURS, frozenset(extras))]
    while wanted:
        name, of_it = wanted.pop()
        if (name, of_it) in found:
            continue
        found[name, of_it] = ours if name == _OURS else distribution(name)
        for line in found[name, of_it].requires or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in (*of_it, "")):
                wanted.append((needed.name, frozenset(needed.extras)))
    return [each for (name, _), each in found.items() if name != _OURS]

"""Check that DALI is installed and new enough; else name the command that installs it."""

from __future__ import annotations

import re

import torch

from dataloaders.errors import MissingDependency

OLDEST = (2, 0)
"""The oldest version with which the tests of the graph ran, and for which PyPI has wheels."""


def pip_line() -> str:
    """Return the command that installs the DALI for this torch's CUDA."""
    version = torch.version.cuda or "13"
    major = "120" if version.split(".")[0] == "12" else "130"
    return f"pip install --upgrade nvidia-dali-cuda{major}"


def check_dali() -> None:
    """Import DALI.

    Raises:
        MissingDependency: it is not installed, or older than `OLDEST`; says what to install.
    """
    try:
        import nvidia.dali
    except ImportError as error:
        raise MissingDependency(
            f"backend='dali' needs NVIDIA DALI, which cannot be imported ({error}); "
            f"install it with: {pip_line()}"
        ) from error
    version = str(getattr(nvidia.dali, "__version__", "0"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingDependency(
            f"backend='dali' needs NVIDIA DALI {oldest} or newer, and {version} is installed; "
            f"install it with: {pip_line()}"
        )

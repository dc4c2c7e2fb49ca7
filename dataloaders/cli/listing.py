"""The table that ``dataloaders backends`` prints: what can run here, and why not."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataloaders import registry
from dataloaders.errors import DataLoadersError
from dataloaders.scripts.target import hidden_by

__all__ = ["backends"]


def backends() -> int:
    """Print which backends there are, which can run here, and why the others cannot."""
    console = Console()
    console.print(_backends_table())
    if torch.cuda.is_available():
        console.print(f"CUDA: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        console.print(f"CUDA: no device that torch {torch.__version__} can use")
    hidden = hidden_by(Path.cwd(), "backends") or registry.shadowing_folder("backends")
    if hidden is not None:
        console.print(
            f"note: {hidden} has the name of our package 'backends'; backends named by a string "
            "still come from ours, but `import backends` in a script there finds yours",
            soft_wrap=True,
        )
    return 0


def _backends_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("backend", no_wrap=True)
    table.add_column("what it does")
    table.add_column("can it run here?")
    for entry in registry.entries().values():
        try:
            registry.load(entry.name)
            here = "yes"
        except DataLoadersError as error:
            here = f"no: {error}"
        except Exception as error:
            # A third party's module may fail at import in any way; the others are still listed.
            here = f"no: importing {entry.target} failed with {type(error).__name__}: {error}"
        table.add_row(entry.name, Text(entry.summary), Text(here))  # no markup in their words
    return table

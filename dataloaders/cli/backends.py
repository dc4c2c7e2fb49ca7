"""The table that ``dataloaders backends`` prints: what can run here, and why not."""

from __future__ import annotations

import torch

from dataloaders import registry
from dataloaders.errors import DataLoadersError
from dataloaders.measuring.table import table


def carry_out(parsed: object) -> int:
    """Print which backends there are, which can run here, and why the others cannot."""
    print(table(["backend", "what it does", "can it run here?"], _rows()))
    if torch.cuda.is_available():
        print(f"CUDA: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        print(f"CUDA: no device that torch {torch.__version__} can use")
    return 0


def _rows() -> list[list[str]]:
    rows = []
    for entry in registry.entries().values():
        try:
            registry.load(entry.name)
            here = "yes"
        except DataLoadersError as error:
            here = f"no: {error}"
        except Exception as error:
            # A third party's module may fail at import in any way; the others are still listed.
            here = f"no: importing {entry.target} failed with {type(error).__name__}: {error}"
        rows.append([entry.name, entry.summary, here])
    return rows

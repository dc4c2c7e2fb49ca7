"""Samples that are a function of their number; light to import, for processes that are started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

SIZE = 41


class Numbered(Dataset[Any]):
    """Fixed and variable columns, with None; each reading is noted in a file if wanted."""

    def __init__(self, size: int = SIZE, *, log: Path | None = None, shift: int = 0) -> None:
        self.size, self.log, self.shift = size, log, shift
        self.failing: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        if index in self.failing:
            raise ValueError(f"no sample {index} today")
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        return self.sample(index)

    def sample(self, index: int) -> Any:
        values = np.random.default_rng(index + self.shift)
        return {
            "image": torch.from_numpy(values.integers(0, 256, (3, 8, 8), dtype=np.uint8)),
            "words": values.random(index % 5).astype(np.float32),
            "name": f"sample {index}" if index % 3 else None,
            "label": index,
        }

    def reads(self) -> list[int]:
        """Return the numbers of the samples that were read."""
        return [int(line) for line in self.log.read_text().split()] if self.log else []


class Made(Numbered):
    """What a function makes of each number; the class of a user's own dataset, in a line."""

    def __init__(self, make: Callable[[int], Any], size: int = SIZE, **said: Any) -> None:
        super().__init__(size)
        self.sample = make  # type: ignore[method-assign]
        self.__dict__.update(said)


numbered = Numbered()

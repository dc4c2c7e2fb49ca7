"""Compare recorded samples of a dataset with its own, in a process of their own."""

from __future__ import annotations

from typing import Any

import torch

from dataloaders.backend import Specification
from dataloaders.observing import Unobserved, observe

__all__ = ["proved"]

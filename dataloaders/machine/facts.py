"""What a reader needs to know of a machine to judge figures that were measured on it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from dataloaders.machine import resources


def machine_facts() -> dict[str, str]:
    """Return cores, processor, memory, system, GPU and versions, each as a short text.

    It does not initialise CUDA, so that this process can still fork children that use it.
    """
    cores = f"{resources.machine_cores()} cores"
    if resources.ranks_here() > 1:
        cores += f", {resources.usable_cores()} of them for this rank"
    return {
        "cores": cores,
        "cpu": resources.cpu_model(),
        "memory": f"{round(resources.total_memory() / 2**30)} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "device": gpu_name() or "no GPU",
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
    }


def gpu_name(root: Path = Path("/")) -> str | None:
    """Return the name of torch's current device if CUDA is in use, else of the first NVIDIA GPU.

    None where no GPU is known. ``root`` is the folder that stands for ``/``.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        try:
            text = file.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                return value.strip()
    return None

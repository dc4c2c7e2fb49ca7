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


def accelerator_in_use() -> torch.device | None:
    """Return the kind of accelerator that this process has initialised; None if there is none.

    Nothing is initialised: a process that has initialised CUDA cannot fork workers that use it.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    # MPS needs no initialisation.
    is_initialised = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)
    return kind if is_initialised() else None


def gpu_name(root: Path = Path("/")) -> str | None:
    """Return the name of torch's current device if CUDA is in use, else of the first NVIDIA GPU.

    None where no GPU is known. ``root`` is the folder that stands for ``/``.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.get_device_name()
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return next(filter(None, (resources.field_of(file, "Model") for file in files)), None)

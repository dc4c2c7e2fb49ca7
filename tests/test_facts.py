"""Facts about the machine, for readers of measured figures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dataloaders.machine.facts import gpu_name, machine_facts
from dataloaders.machine.resources import machine_cores


def test_facts_name_cores_and_versions(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    facts = machine_facts()
    assert facts["cores"] == f"{machine_cores()} cores"
    assert facts["torch"] == f"torch {torch.__version__}"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(machine_cores()))
    assert machine_facts()["cores"].endswith(", 1 of them for this rank")


def test_a_gpu_is_found_in_the_drivers_files(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # other tests may use it
    assert gpu_name(tmp_path) is None
    file = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    file.parent.mkdir(parents=True)
    file.write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 29\n")
    assert gpu_name(tmp_path) == "NVIDIA H200"


@pytest.mark.gpu
def test_facts_do_not_initialise_cuda():
    source = (
        "import torch; from dataloaders.machine.facts import machine_facts\n"
        "machine_facts(); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", source], check=True)

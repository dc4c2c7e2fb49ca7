"""The batch-size probe: rates at growing sizes, and an end where memory ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dataloaders.batches.synthetic import TensorSpec
from dataloaders.errors import OptionError
from dataloaders.findings import Probe, Trial, probe_batch_sizes
from helpers import warm


def limited(most: int, asked: list[int]) -> Any:
    def step(batch: dict[str, Any]) -> None:
        x, names = batch["x"], batch["names"]
        assert len(names) == len(x)
        asked.append(len(x))
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")

    return step


@pytest.mark.parametrize(("most", "largest"), [(100, 100), (3, 3), (1, 1), (0, None)])
def test_sizes_double_and_the_gap_is_halved(most: int, largest: int | None) -> None:
    asked: list[int] = []
    batch = {"x": torch.arange(8.0), "names": list("abcdefgh"), "scale": torch.tensor(2.0)}
    probe = probe_batch_sizes(batch, limited(most, asked), seconds_each=0.001)
    assert probe.largest is None if largest is None else largest * 15 / 16 <= probe.largest <= most
    sizes = [trial.batch_size for trial in probe.trials]
    assert sizes == sorted(set(asked))
    assert len(sizes) < 12
    failed = [trial for trial in probe.trials if trial.why_not]
    assert failed[0].why_not == "CUDA out of memory. Tried to allocate"
    data = json.loads(probe.to_json())
    assert data["largest"] == probe.largest
    assert f"largest that fits: {probe.largest}" in str(probe)


def test_sizes_end_where_asked() -> None:
    spec = {"x": TensorSpec((4, 10)), "y": TensorSpec((4,), torch.int64, 0, 9)}
    seen: list[tuple[int, ...]] = []
    probe = probe_batch_sizes(spec, lambda b: seen.append(b["x"].shape), most=20, seconds_each=0.01)
    assert [trial.batch_size for trial in probe.trials] == [4, 8, 16, 20]
    assert seen[-1] == (20, 10)
    assert probe.fastest is not None
    assert all(trial.seconds and trial.memory for trial in probe.trials)


def test_samples_keep_their_order_and_other_errors_are_raised() -> None:
    batches: list[Any] = []
    probe_batch_sizes((torch.tensor([3, 2]), ["a", "b"]), batches.append, most=4, seconds_each=0)
    assert batches[-1][0].tolist() == [3, 3, 2, 2]  # lengths in descending order stay so
    assert batches[-1][1] == ["a", "a", "b", "b"]
    with pytest.raises(RuntimeError, match="another one"):
        probe_batch_sizes(
            torch.ones(2), lambda b: (_ for _ in ()).throw(RuntimeError("another one"))
        )
    with pytest.raises(OptionError, match="nothing with 7 rows"):
        probe_batch_sizes(torch.ones(2), print, batch_size=7)


def test_random_states_are_put_back() -> None:
    before = torch.get_rng_state()
    probe_batch_sizes(torch.ones(2), lambda b: torch.rand(2), most=2, seconds_each=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_fastest_is_the_smallest_that_is_near_the_best() -> None:
    from dataloaders.bottleneck import Interval

    def took(size: int, seconds: float) -> Trial:
        return Trial(size, Interval(seconds, seconds, seconds), 1)

    probe = Probe((took(8, 1.0), took(16, 1.02), took(32, 2.0), Trial(64, why_not="full")))
    assert (probe.largest, probe.fastest) == (32, 16)


LIMITED = """
import resource, torch
from dataloaders.findings import probe_batch_sizes

torch.set_num_threads(1)
scale = torch.ones((), requires_grad=True)
(torch.ones(8, 1 << 16) * scale).sum().backward()
size = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20), size + (400 << 20)))
def step(batch):
    (batch * scale).sum().backward()
probe = probe_batch_sizes(torch.ones(64, 1 << 16), step, seconds_each=0)
print(probe.to_json())
step(torch.ones(64, 1 << 16))  # what failed has left room
"""


@pytest.mark.nightly
def test_memory_that_is_limited_ends_it_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    probe = json.loads(done.stdout)
    # A sample and what is computed from it take 256 KiB each.
    assert 64 <= probe["largest"] < (400 << 20) / (512 << 10)
    failed = [trial["why_not"] for trial in probe["trials"] if trial["why_not"]]
    assert any("allocate" in why for why in failed)


SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for batch in DataLoader(torch.ones(64, 8), batch_size=2):
        if len(batch) > 3:
            if sys.argv[1] == "killed": os.kill(os.getpid(), 9)
            raise {"memory": MemoryError, "other": ValueError}[sys.argv[1]]("no room")
        model(batch).sum().backward()
        optimizer.step()
"""


@pytest.mark.nightly
def test_a_scripts_own_loop_is_fed_with_other_sizes(tmp_path: Path) -> None:
    done, report = probed(tmp_path, "memory", "--most", "3")
    assert done.returncode == 0, done.stderr
    assert [one["batch_size"] for one in report["trials"]] == [2, 3]
    assert "largest that fits: 3" in done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["memory", "killed"])
def test_a_script_is_started_anew_until_the_largest_batch_is_known(
    how: str, tmp_path: Path
) -> None:
    done, report = probed(tmp_path, how)
    assert done.returncode == 0, done.stderr
    assert report["largest"] == 3
    assert [one["batch_size"] for one in report["trials"]] == [2, 3, 4]
    assert "largest that fits: 3" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_script_that_fails_otherwise_ends_it_with_what_is_known(tmp_path: Path) -> None:
    done, report = probed(tmp_path, "other")
    assert done.returncode == 0
    assert "ValueError: no room" in done.stderr
    assert "ended by itself at batch size 4" in done.stdout
    assert report["largest"] == 2


def probed(
    folder: Path, how: str, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    (folder / "train.py").write_text(SCRIPT)
    words = ["-m", "dataloaders", "probe", "--budget", "0.01", "--json", "probe.json", *options]
    root = str(Path(__file__).parents[1])
    done = warm.run(
        [*words, "train.py", how], cwd=folder, env={**os.environ, "PYTHONPATH": root}, timeout=100
    )
    return done, json.loads((folder / "probe.json").read_text())

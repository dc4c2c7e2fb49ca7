"""The batch-size probe: rates at growing sizes, up to the end of memory."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from dataloaders.bottleneck import Interval
from dataloaders.errors import OptionError
from dataloaders.findings import Probe, Trial, probe_batch_sizes
from helpers import warm


def runs_out():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")


@pytest.mark.parametrize(
    ("most", "largest", "fails"),
    [
        (100, 100, runs_out),
        (3, 3, lambda: torch.empty(1 << 50, dtype=torch.uint8)),
        (0, None, runs_out),
    ],
)
def test_sizes_double_and_the_gap_is_halved(most, largest, fails):
    asked = []

    def step(batch):
        asked.append(len(batch["x"]))
        assert len(batch["names"]) == asked[-1]
        if asked[-1] > most:
            fails()

    batch = {"x": torch.arange(8.0), "names": list("abcdefgh"), "scale": torch.tensor(2.0)}
    probe = probe_batch_sizes(batch, step, seconds_each=0.001)
    assert probe.largest is None if largest is None else largest * 15 / 16 <= probe.largest <= most
    sizes = [trial.batch_size for trial in probe.trials]
    assert sizes == sorted(set(asked))
    assert len(sizes) < 12
    failed = [trial for trial in probe.trials if trial.why_not]
    assert re.search("out of memory. Tried to allocate$|can't allocate memory", failed[0].why_not)
    assert json.loads(probe.to_json())["largest"] == probe.largest
    assert f"largest that fits: {probe.largest}" in str(probe)


def test_sizes_end_where_asked_and_random_states_are_put_back():
    like = {"x": torch.rand(4, 10), "y": torch.randint(10, (4,))}
    before, seen = torch.get_rng_state(), []

    def step(batch):
        seen.append(batch["x"].shape)
        torch.rand(2)

    probe = probe_batch_sizes(like, step, most=20, seconds_each=0.01)
    assert [trial.batch_size for trial in probe.trials] == [4, 8, 16, 20]
    assert seen[-1] == (20, 10)
    assert probe.fastest is not None
    assert all(trial.seconds and trial.memory for trial in probe.trials)
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_keep_their_order_and_other_errors_are_raised():
    batches = []
    probe_batch_sizes((torch.tensor([3, 2]), ["a", "b"]), batches.append, most=4, seconds_each=0)
    assert batches[-1][0].tolist() == [3, 3, 2, 2]  # lengths in descending order stay so
    assert batches[-1][1] == ["a", "a", "b", "b"]
    with pytest.raises(TypeError, match="not supported"):
        probe_batch_sizes(torch.ones(2), lambda batch: batch < "another one")
    with pytest.raises(OptionError, match="most=0"):
        probe_batch_sizes(torch.ones(2), len, most=0)
    with pytest.raises(OptionError, match="nothing with 7 rows"):
        probe_batch_sizes(torch.ones(2), print, batch_size=7)


def test_the_fastest_is_the_smallest_that_is_near_the_best():
    def took(size, seconds):
        return Trial(size, Interval(seconds, seconds, seconds), 1)

    probe = Probe((took(8, 1.0), took(16, 1.02), took(32, 2.0), Trial(64, why_not="full")))
    assert (probe.largest, probe.fastest) == (32, 16)


LIMITED = """
import resource, sys, torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1 << 20, 1)  # 4 MiB a sample
optimizer = torch.optim.SGD(model.parameters(), 0.01)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)
for epoch in range(9):
    for batch in DataLoader(torch.ones(40, 1), batch_size=8, collate_fn=list):
        model(torch.stack(batch).expand(len(batch), 1 << 20).contiguous()).sum().backward()
        optimizer.step()
"""


def probed(folder, text, *options):
    """What ``dataloaders probe`` of a script writes and prints."""
    (folder / "train.py").write_text(text)
    words = ["-m", "dataloaders", "probe", "--budget", "0.01", "--json", "probe.json", *options]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = warm.run([*words, "train.py"], cwd=folder, env=env, timeout=100)
    return json.loads((folder / "probe.json").read_text()), done


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space so")
def test_a_script_under_a_memory_limit_ends_cleanly_at_the_largest_batch(tmp_path):
    """Its batches are lists, which grow by samples."""
    report, done = probed(tmp_path, LIMITED)
    assert 8 <= report["largest"] < 64  # 64 samples of 4 MiB are 256 MiB
    assert any("memory" in (one["why_not"] or "") for one in report["trials"])
    assert f"largest that fits: {report['largest']}" in done.stdout
    assert "Traceback" not in done.stderr


SCRIPT = """
import os, sys, torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
padded = [torch.ones(2, 5 + i // 4) for i in range(32)]
for batch in DataLoader(padded, batch_size=None):
    print("length", batch.shape[1], flush=True)
    if len(batch) > 3:
        if sys.argv[1] == "killed": os.kill(os.getpid(), 9)
        raise {"memory": MemoryError, "other": ValueError}[sys.argv[1]]("no room")
    model(batch[..., None]).sum().backward()
    optimizer.step()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "options", "sizes", "largest"),
    [
        ("memory", ["--most", "3"], [2, 3], 3),
        ("memory", [], [2, 3, 4], 3),
        ("killed", [], [2, 3, 4], 3),
        ("other", [], [2, 4], 2),
    ],
)
def test_a_script_is_restarted_until_the_largest_batch_is_known(
    how, options, sizes, largest, tmp_path
):
    script = SCRIPT.replace("sys.argv[1]", repr(how))
    report, done = probed(tmp_path, script, "--budget", "0.2", *options)
    assert [one["batch_size"] for one in report["trials"]] == sizes
    assert report["largest"] == largest
    assert f"largest that fits: {largest}" in done.stdout
    assert ("ended by itself at batch size 4" in done.stdout) == (how == "other")
    assert ("ValueError: no room" in done.stderr) == (how == "other")
    assert ("Traceback" in done.stderr) == (how == "other")
    # The script's own first batch, then the longest one, which is not among the first eight.
    assert set(re.findall("^length .*", done.stdout, re.MULTILINE)) == {"length 5", "length 12"}

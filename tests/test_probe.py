"""The batch-size probe: rates at growing sizes, up to the end of memory."""

import json
import re
import sys

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
import resource, torch
from dataloaders.findings import probe_batch_sizes

model = torch.nn.Linear(1 << 20, 1)  # 4 MiB a sample
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20),) * 2)

def step(batch):
    model(torch.stack(batch).expand(len(batch), 1 << 20).contiguous()).sum().backward()

print(probe_batch_sizes([torch.ones(1)] * 8, step, batch_size=8, seconds_each=0.01).largest)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space so")
def test_under_a_memory_limit_it_ends_at_the_largest_batch():
    """Its batches are lists, which grow by samples; 64 of 4 MiB are 256 MiB."""
    assert 8 <= int(warm.run(["-c", LIMITED]).stdout) < 64

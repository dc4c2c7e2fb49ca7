"""Findings in a script that provokes them, and none in the same script once mended."""

import json

import pytest

from helpers import warm

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)
{before}
model = {model}
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader([torch.ones(3, 16, 16)] * 1000, batch_size=4)
for epoch in range(1000):
    for i, batch in enumerate(loader, 1):
{step}
"""
PLAIN = "nn.Conv2d(3, 4, 3)"
STEP = """
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DISTRIBUTED = (
    "store = torch.distributed.HashStore()\n"
    "torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)"
)
ACCUMULATED = """
        last = i % 2 == 0
        with {context}:
            model(batch).mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
"""
CYCLE = """
        model(batch).mean().backward()
        if i % 4 == 0:
            optimizer.step()
            optimizer.zero_grad({options})
"""
POINTWISE = STEP.replace("model(batch)", "{call}(model(batch).repeat(40, 4, 1, 1))")
GELU = "def gelu(x): return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))"
PRODUCT = STEP.replace("loss =", "torch.mm(square, square)\n        loss =")
SQUARE = "square = torch.ones(1000, 1000, dtype=torch.bfloat16)\n"
DDP = f"nn.parallel.DistributedDataParallel({PLAIN})"
NO_SYNC = "torch.enable_grad() if last else model.no_sync()"

# The finding and what its line has, if any; what the script begins with, its model and its step.
PAIRS = [
    (
        "accumulation", ".backward()",
        (DISTRIBUTED, DDP, ACCUMULATED.format(context="torch.enable_grad()")),
        (DISTRIBUTED, DDP, ACCUMULATED.format(context=NO_SYNC)),
    ),
    (
        "zero-grad", "zero_grad(",
        ("", PLAIN, CYCLE.format(options="set_to_none=False")),
        ("", PLAIN, CYCLE.format(options="")),
    ),
    (
        "bias", "model(batch)",
        ("", f"nn.Sequential({PLAIN}, nn.BatchNorm2d(4))", STEP),
        ("", "nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))", STEP),
    ),
    (
        "debugging", "model(batch)",
        ("torch.autograd.set_detect_anomaly(True)", PLAIN, STEP),
        ("", PLAIN, STEP),
    ),
    (
        "pointwise", "def gelu",
        (GELU, PLAIN, POINTWISE.format(call="gelu")),
        (GELU, PLAIN, POINTWISE.format(call="nn.functional.gelu")),
    ),
    (
        "threads", None,
        (SQUARE + "torch.set_num_threads(64)", PLAIN, PRODUCT),
        ("torch.set_num_threads(64)", PLAIN, STEP),  # too little to compute
    ),
]  # fmt: skip


def findings_in(folder, before, model, step):
    script, result = folder / "train.py", folder / "report.json"
    script.write_text(SCRIPT.format(before=before, model=model, step=step.strip("\n")))
    words = ["-m", "dataloaders", "check", "--budget", 1, "--no-predict", "--quiet"]
    done = warm.run([*words, "--json", result, script.name], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())["findings"], script.read_text().splitlines()


@pytest.mark.thinned(len(PAIRS))
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_a_script_that_provokes_a_finding_and_the_same_one_mended(pair, tmp_path):
    name, at, provoking, mended = pair
    (finding,), lines = findings_in(tmp_path, *provoking)
    assert finding["name"] == name
    if at is None:
        assert finding["where"] is None
    else:
        file, _, line = finding["where"].rpartition(":")
        assert file == "train.py"
        assert at in lines[int(line) - 1]
    assert findings_in(tmp_path, *mended)[0] == []

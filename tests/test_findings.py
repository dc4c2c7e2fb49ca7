"""What the check finds in the step itself: provoked by a step of its own, absent in a clean one."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from bench.played import HostOn, VirtualTime
from dataloaders import check_bottleneck
from dataloaders.bottleneck import Interval
from dataloaders.findings import Facts, Place, Watch, findings_of
from helpers.on_cuda import Played


def checked(step):
    loader = DataLoader([torch.ones(3, 8, 8)] * 1000, batch_size=2)
    return check_bottleneck(loader, step, budget_s=0.3)


def watched(step, steps=4):
    watch = Watch()
    for number in range(1, steps + 1):
        with watch.step(number):
            step(number)
    facts = watch.facts()
    assert facts is not None
    return facts


def trained(model, **options):
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        loss = model(batch).square().mean()
        optimizer.zero_grad(**options)
        loss.backward()
        optimizer.step()

    return step


# in a loop that is checked ----------------------------------------------------------------------


def test_a_clean_step_has_no_findings_and_is_left_as_it_was():
    before = torch.cuda.empty_cache, torch.cuda.memory.empty_cache, torch._tensor_str._str
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    report = checked(trained(model))
    assert report.findings == ()
    after = torch.cuda.empty_cache, torch.cuda.memory.empty_cache, torch._tensor_str._str
    assert after == before
    assert "step:" not in str(report)


def test_gradients_zeroed_by_writing_name_the_line_and_the_guide():
    report = checked(trained(nn.Conv2d(3, 4, 3), set_to_none=False))
    (finding,) = report.findings
    assert finding.name == "zero-grad"
    assert "writes zeros over 448 bytes of gradients" in finding.message
    assert "Use parameter.grad = None" in finding.source
    file, _, line = finding.where.rpartition(":")
    assert Path(file).name == "test_findings.py"
    assert "zero_grad" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert json.loads(report.to_json())["findings"][0]["where"] == finding.where
    shown = replace(report, verdict="step-bound"), replace(report, verdict="input-bound")
    assert ["step: " in str(one) for one in shown] == [True, False]


def test_what_was_left_on_is_told_whatever_the_verdict():
    inputs = torch.ones(2, dtype=torch.double, requires_grad=True)

    def debugged(number):
        profile = torch.autograd.profiler.profile(use_kineto=False)
        with profile, torch.autograd.detect_anomaly(check_nan=False):
            inputs.sum().backward()
        torch.autograd.gradcheck(torch.sin, (inputs,))

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        findings = findings_of(watched(debugged))
    assert all(one.name == "debugging" and one.anyway for one in findings)
    places = {one.message.partition(" is on")[0]: str(one.where) for one in findings}
    assert set(places) == {"anomaly detection", "a profiler", "gradcheck"}
    assert "test_findings.py:" in places["gradcheck"]


def test_what_one_step_in_many_does_is_not_found():
    value = Played(torch.ones(3)).sum()
    assert watched(lambda number: value.item() if number == 2 else None).places == {}
    assert watched(lambda number: value.item()).of_kind("sync")


def test_a_step_that_raises_leaves_nothing_on():
    watch = Watch()
    before = torch._tensor_str._str
    with pytest.raises(ZeroDivisionError), watch.step(2):
        raise ZeroDivisionError
    assert torch._tensor_str._str is before
    assert watch.facts() is None


# in steps that are watched, some of them on a device that is played -----------------------------

LARGE, BATCH, PINNED = torch.ones(300, 300), torch.ones(4), torch.empty(4)
ON_DEVICE, STATIC = Played(torch.ones(4)), Played(torch.empty(4))
CONV, NORM, RELU = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
EVALUATED = nn.BatchNorm2d(4).eval()  # what the running mean takes away is another number
LAYER_NORM, LINEAR = nn.LayerNorm(300), nn.Linear(300, 300)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))


def block(x):
    x = x + nn.functional.dropout(LINEAR(LAYER_NORM(x)))
    return x + nn.functional.dropout(LINEAR(nn.functional.gelu(LINEAR(LAYER_NORM(x)))))


def convolved(*layers):
    nn.Sequential(nn.Sequential(*layers))(torch.ones(2, 3, 8, 8)).sum().backward()


PROVOKED = [
    # Its name, how its message begins, a step that provokes it, and one that nearly does.
    ("synchronisation", "reading a value", lambda x: x.sum().item()),
    ("synchronisation", "reading a value (", lambda x: bool((x > 0).all())),
    ("synchronisation", "nonzero()", torch.nonzero),
    ("synchronisation", "a boolean mask", lambda x: x[x > 0]),
    ("synchronisation", "masked_select()", lambda x: torch.masked_select(x, x > 0)),
    ("synchronisation", ".cpu()", lambda x: x.cpu()),
    ("synchronisation", "unique()", torch.unique),
    ("synchronisation", "torch.equal()", lambda x: torch.equal(x, x)),
    (
        "synchronisation", "",
        lambda x: PINNED.copy_(ON_DEVICE),
        lambda x: PINNED.copy_(ON_DEVICE, non_blocking=True),
    ),
    (
        "made-on-cpu", "",
        lambda x: STATIC.copy_(torch.zeros(2, 2).view(4) + 1),
        lambda x: STATIC.copy_(BATCH + torch.zeros(4)),
    ),
    ("bias", "0.0: ", lambda x: convolved(CONV, NORM), lambda x: convolved(CONV, RELU, NORM)),
    ("bias", "0.0: ", lambda x: convolved(CONV, NORM), lambda x: convolved(CONV, EVALUATED)),
    ("pointwise", "", lambda x: gelu(LARGE), lambda x: gelu(LARGE[:2])),
    ("pointwise", "", lambda x: gelu(LARGE), lambda x: (LARGE - 1).square()),
    ("pointwise", "", lambda x: gelu(LARGE), lambda x: nn.functional.dropout(LARGE)),
    ("pointwise", "", lambda x: gelu(LARGE), lambda x: block(LARGE)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "begins", "step", "clean"), [(*row, row[2])[:4] for row in PROVOKED]
)
def test_what_a_step_does_is_found_with_its_line(name, begins, step, clean):
    found = [one for one in findings_of(watched(lambda _: step(ON_DEVICE))) if one.name == name]
    assert found
    assert found[0].message.startswith(begins)
    assert name == "bias" or "test_findings.py:" in found[0].where
    names = {one.name for one in findings_of(watched(lambda _: clean(torch.ones(4))))}
    assert name not in names


def test_printing_is_named_as_that():
    places = watched(lambda _: str(torch.ones(3))).of_kind("sync")
    assert {(place.what, place.device) for place in places} == {("printing a tensor", "cpu")}


def test_empty_cache_in_the_loop():
    facts = watched(lambda _: torch.cuda.empty_cache())
    (finding,) = findings_of(replace(facts, device="cuda"))
    assert finding.name == "empty-cache"
    assert "test_findings.py:" in str(finding.where)
    assert findings_of(facts) == ()  # where it does nothing


def test_a_setting_is_tried_around_the_step_and_put_back(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    time, square = VirtualTime(), torch.ones(800, 800)
    steps = []

    def step(batch):
        steps.append(torch.is_autocast_enabled("cpu"))
        if len(steps) < 4:
            torch.mm(square, square)
        time.sleep(0.006 if steps[-1] else 0.01)

    loader = DataLoader(torch.ones(1000, 4), batch_size=1)
    options = {"budget_s": 2, "clock": HostOn(time)}
    report = check_bottleneck(loader, step, advise=True, **options)
    (finding,) = report.findings
    assert finding.name == "autocast"
    assert {each.step for each in report.timeline["synthetic"]} == {0.01}  # not those tried
    assert 0.0039 < finding.gain.low <= finding.gain.high < 0.0041
    assert not torch.is_autocast_enabled("cpu")
    steps.clear()
    (finding,) = check_bottleneck(loader, step, **options).findings
    assert finding.gain is None
    assert not any(steps)


# decided on given facts -------------------------------------------------------------------------

SINGLE = {
    ("cuda", torch.float32, "convolution"): 10**11,
    ("cuda", torch.float32, "product"): 10**10,
}
HALF = {("cuda", torch.bfloat16, "convolution"): 10**11, ("cuda", torch.float32, "product"): 10**8}
ON_CUDA = Facts(
    device="cuda", flops=HALF, convolutions=53, autotuner=True, half=torch.bfloat16, tf32=True,
    memory=0.5, threads=8, cores=8,
)  # fmt: skip
ON_CPU = Facts(
    device="cpu", flops={("cpu", torch.float32, "product"): 10**11}, threads=8, cores=8
)  # fmt: skip
STALL = Interval(0.001, 0.002, 0.003)
DECISIONS = [
    ("autotuner", ON_CUDA, {"autotuner": False}, {"autotuner": False, "deterministic": True}),
    ("autotuner", ON_CUDA, {"autotuner": False}, {"autotuner": False, "varied": True}),
    ("autotuner", ON_CUDA, {"autotuner": False}, {"autotuner": False, "fixed_shapes": False}),
    ("autotuner", ON_CUDA, {"autotuner": False}, {"autotuner": False, "convolutions": 0}),
    ("autocast", ON_CUDA, {"flops": SINGLE, "matmul_precision": "high"}, {}),
    ("matmul-precision", ON_CUDA, {"flops": SINGLE, "half": None}, {"tf32": False}),
    ("channels-last", ON_CUDA, {"planar": 53}, {"planar": 53, "half": None}),
    ("data-parallel", ON_CUDA, {"data_parallel": 4}, {"data_parallel": 1}),
    ("accumulation", ON_CUDA, {"reduces_early": True, "cycle": 4}, {"reduces_early": True}),
    ("checkpointing", ON_CUDA, {"memory": 0.95}, {"memory": 0.95, "checkpointed": True}),
    ("autocast", ON_CPU, {"half": torch.bfloat16}, {"half": torch.bfloat16, "flops": {}}),
    ("threads", ON_CPU, {"threads": 32}, {"threads": 8}),
    ("threads", ON_CPU, {"threads": 1}, {"threads": 4}),
    ("threads", ON_CPU, {"threads": 1}, {"threads": 1, "workers": 7}),
    ("threads", ON_CPU, {"numa_nodes": 2}, {"numa_nodes": 2, "threads": 1, "cores": 1}),
    ("contention", ON_CPU, {"contention": STALL, "workers": 4}, {"workers": 4}),
    ("zero-grad", ON_CPU, {"places": {Place("zeroed", "", "cpu", None): 1 << 20}}, {}),
    ("debugging", ON_CPU, {"places": {Place("debugging", "a profiler", "", None): 1}}, {}),
]


@pytest.mark.parametrize("case", DECISIONS, ids=lambda case: case[0])
def test_a_rule_on_given_facts(case):
    name, clean, bad, good = case
    assert [one.name for one in findings_of(replace(clean, **bad))] == [name]
    assert findings_of(replace(clean, **good)) == ()


def test_a_stall_that_was_measured_is_the_gain():
    (finding,) = findings_of(replace(ON_CPU, contention=STALL, workers=4))
    assert finding.gain == STALL
    (alone,) = findings_of(replace(ON_CPU, contention=STALL, workers=4, threads=1, cores=2))
    assert "the step's 1 thread share" in alone.message
    assert "set_num_threads" not in alone.message
    assert "measured here: 2.00 ms a batch less (1.00 to 3.00)" in str(finding)


def test_gradients_reduced_before_the_optimizer_steps(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts one of its own there
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(number, synchronised):
            if number % 2 and not synchronised:
                with model.no_sync():
                    model(torch.ones(2, 4)).sum().backward()
            else:
                model(torch.ones(2, 4)).sum().backward()
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

        early = watched(lambda number: step(number, synchronised=True))
        right = watched(lambda number: step(number, synchronised=False))
    finally:
        torch.distributed.destroy_process_group()
    assert [one.name for one in findings_of(replace(early, cycle=2))] == ["accumulation"]
    assert findings_of(replace(right, cycle=2)) == ()


@pytest.mark.gpu
def test_settings_of_a_gpu():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)).cuda()
    batch = torch.ones(8, 3, 128, 128, device="cuda")
    step = trained(model)
    names = {one.name for one in findings_of(watched(lambda _: step(batch)))}
    assert {"autotuner", "autocast", "channels-last"} <= names

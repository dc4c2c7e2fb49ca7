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


def test_a_bias_that_the_normalisation_takes_away_names_the_convolution():
    conv, norm, relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def biased(*layers):
        model, batch = nn.Sequential(nn.Sequential(*layers)), torch.ones(2, 3, 8, 8)
        facts = watched(lambda _: model(batch).sum().backward())
        return [one for one in findings_of(facts) if one.name == "bias"]

    (finding,) = biased(conv, norm)
    assert finding.message.startswith("0.0: ")
    assert not biased(conv, relu, norm)
    norm.eval()  # what the running mean takes away is another number
    assert not biased(conv, norm)


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


def test_a_chain_of_pointwise_operators_and_what_is_none():
    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))

    large = torch.ones(300, 300)
    chain = watched(lambda _: gelu(large)).places
    assert max(chain.values()) == 8
    names = [one.name for one in findings_of(Facts(places=chain))]
    assert names
    assert set(names) == {"pointwise"}
    clean = watched(lambda _: (nn.functional.dropout(large), gelu(large[:2]), (large - 1).square()))
    assert findings_of(clean) == ()
    norm, linear = nn.LayerNorm(300), nn.Linear(300, 300)

    def block(x):
        x = x + nn.functional.dropout(linear(norm(x)))
        return x + nn.functional.dropout(linear(nn.functional.gelu(linear(norm(x)))))

    assert findings_of(replace(watched(lambda _: block(large)), half=None)) == ()


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


# on a device that is played ---------------------------------------------------------------------

SYNCS = {
    "reading a value": lambda x: x.sum().item(),
    "reading a value (": lambda x: bool((x > 0).all()),
    "nonzero()": torch.nonzero,
    "a boolean mask": lambda x: x[x > 0],
    "masked_select()": lambda x: torch.masked_select(x, x > 0),
    ".cpu()": lambda x: x.cpu(),
    "unique()": lambda x: torch.unique(x),
    "torch.equal()": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("what", list(SYNCS))
def test_a_wait_for_the_device_names_its_line(what):
    on_device = Played(torch.ones(4))
    (finding,) = findings_of(watched(lambda _: SYNCS[what](on_device)))
    assert finding.name == "synchronisation"
    assert finding.message.startswith(what)
    assert finding.where is not None
    assert "test_findings.py:" in finding.where
    on_host = torch.ones(4)
    assert findings_of(watched(lambda _: SYNCS[what](on_host))) == ()


def test_printing_is_named_as_that_and_a_copy_that_does_not_wait_is_none():
    places = watched(lambda _: str(torch.ones(3))).of_kind("sync")
    assert {(place.what, place.device) for place in places} == {("printing a tensor", "cpu")}
    on_device, pinned = Played(torch.ones(4)), torch.empty(4)
    assert findings_of(watched(lambda _: pinned.copy_(on_device, non_blocking=True))) == ()
    assert findings_of(watched(lambda _: pinned.copy_(on_device)))


def test_what_is_made_on_the_cpu_and_moved():
    static, batch = Played(torch.empty(4)), torch.ones(4)
    facts = watched(lambda _: static.copy_(torch.zeros(2, 2).view(4) + 1))
    (finding,) = findings_of(facts)
    assert finding.name == "made-on-cpu"
    assert "is copied to cuda in each step" in finding.message
    assert findings_of(watched(lambda _: static.copy_(batch + torch.zeros(4)))) == ()


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
    (finding,) = check_bottleneck(loader, step, advise=True, **options).findings
    assert finding.name == "autocast"
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

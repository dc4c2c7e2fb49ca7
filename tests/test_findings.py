"""Findings about the step: each is provoked by a step of its own and absent in a clean one."""

import itertools
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

from bench.check.played import HostOn, VirtualTime
from dataloaders import check_bottleneck
from dataloaders.bottleneck import Interval
from dataloaders.findings import TOGGLES, Facts, Place, Watch, findings_of
from dataloaders.machine import resources

with FakeTensorMode():  # from then on torch asks no driver whether there is such a device
    pass


class Played(torch.Tensor):
    """A tensor whose ``device`` is ``cuda:0``; ``kept`` is what it is computed with.

    It goes to the CPU, and is copied into. Autograd, which would want a thread of the device's, and
    ``.to("cuda")``, which would want its driver, are left out.
    """

    @staticmethod
    def __new__(cls, kept):
        return torch.Tensor._make_wrapper_subclass(
            cls, kept.shape, kept.stride(), dtype=kept.dtype, device="cuda:0"
        )

    def __init__(self, kept):
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        options = dict(kwargs or {})
        to_host = options.pop("device", torch.device("cuda")).type == "cpu"
        given, options = tree_map_only(Played, lambda leaf: leaf.kept, (args, options))
        out = func(*given, **options)
        if out is given[0]:
            return args[0]
        return out if to_host else tree_map_only(torch.Tensor, Played, out)


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


def trained(model):
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


# in a loop that is checked ----------------------------------------------------------------------


def patched():
    return torch.cuda.empty_cache, torch.cuda.memory.empty_cache, torch._tensor_str._str


def test_a_clean_step_has_no_findings_and_is_left_as_it_was():
    before = patched()
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    report = checked(trained(model))
    assert (report.findings, patched()) == ((), before)
    assert "step:" not in str(report)
    watch = Watch()
    with pytest.raises(ZeroDivisionError), watch.step(2):
        raise ZeroDivisionError
    assert (watch.facts(), patched()) == (None, before)


def test_an_operator_that_cannot_be_analysed_is_named(monkeypatch):
    def formula(*args, **options):
        raise ValueError("an odd shape")

    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, formula)
    report = checked(lambda batch: torch.ones(3, 3) @ torch.ones(3, 3))
    assert report.findings == ()
    assert any("not known: aten.mm.default: an odd shape" in note for note in report.notes)


def test_debugging_that_was_left_on_is_found_under_every_verdict():
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
    assert all("test_findings.py:" in where for where in places.values())


def test_an_operator_in_one_watched_step_only_is_not_found():
    value = Played(torch.ones(3)).sum()
    assert watched(lambda number: value.item() if number == 2 else None).places == {}
    assert watched(lambda number: value.item()).of_kind("sync")


@pytest.mark.parametrize(("every", "found"), [(4, True), (8, False)])
def test_an_operator_in_each_accumulation_cycle_is_found(every, found):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number):
        model(torch.ones(2, 3)).sum().backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % every != 0)

    findings = findings_of(watched(step, steps=20))
    assert [one.name for one in findings] == ["zero-grad"] * found
    for one in findings:
        assert "writes zeros over 16 bytes of gradients" in one.message
        assert "Use parameter.grad = None, https://" in one.source
        assert "test_findings.py:" in one.where


@pytest.mark.parametrize("waits", [False, True])
def test_gradients_that_ddp_reduces_before_the_last_batch_of_a_cycle(waits, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the next line sets one for good
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, calls = nn.parallel.DistributedDataParallel(nn.Linear(8, 1)), itertools.count(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(batch):
            last = next(calls) % 2 == 0
            with model.no_sync() if waits and not last else nullcontext():
                model(batch).mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

        findings = checked(step).findings
    finally:
        dist.destroy_process_group()
    assert [one.name for one in findings] == ["accumulation"] * (not waits)
    for one in findings:
        assert "in each backward pass, and the optimizer steps after 2: " in one.message
        assert "test_findings.py:" in one.where


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
    ("synchronisation", "nonzero()", torch.nonzero),
    ("synchronisation", "a boolean mask", lambda x: x[x > 0]),
    ("synchronisation", ".cpu()", lambda x: x.cpu()),
    (
        "synchronisation", "",
        lambda x: PINNED.copy_(ON_DEVICE),
        lambda x: PINNED.copy_(ON_DEVICE, non_blocking=True),
    ),
    (
        "synchronisation", "a copy to the device",
        lambda x: STATIC.copy_(BATCH),
        lambda x: STATIC.copy_(BATCH, non_blocking=True),
    ),
    (
        "made-on-cpu", "",
        lambda x: STATIC.copy_(torch.zeros(2, 2).view(4) + 1),
        lambda x: STATIC.copy_(BATCH + torch.zeros(4)),
    ),
    ("bias", "0.0: ", lambda x: convolved(CONV, NORM), lambda x: convolved(CONV, RELU, NORM)),
    ("bias", "0.0: ", lambda x: convolved(CONV, NORM), lambda x: convolved(CONV, EVALUATED)),
    ("pointwise", "", lambda x: gelu(LARGE), lambda x: (gelu(LARGE[:2]), (LARGE - 1).square())),
    ("pointwise", "", lambda x: gelu(LARGE), lambda x: block(nn.functional.dropout(LARGE))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "begins", "step", "clean"), [(*row, row[2])[:4] for row in PROVOKED]
)
def test_each_finding_is_provoked_and_has_its_line(name, begins, step, clean):
    found = [one for one in findings_of(watched(lambda _: step(ON_DEVICE))) if one.name == name]
    assert found
    assert found[0].message.startswith(begins)
    assert "test_findings.py:" in found[0].where
    names = {one.name for one in findings_of(watched(lambda _: clean(torch.ones(4))))}
    assert name not in names


def test_printing_a_tensor_is_named():
    places = watched(lambda _: str(torch.ones(3))).of_kind("sync")
    assert {(place.what, place.device) for place in places} == {("printing a tensor", "cpu")}


@pytest.mark.parametrize(
    ("owner", "call", "name"),
    [
        (torch.cuda, "empty_cache", "empty-cache"),
        (torch.cuda, "synchronize", "synchronisation"),
        (torch.cuda.Stream, "synchronize", "synchronisation"),
    ],
)
def test_a_call_that_waits_for_the_device_is_found_with_its_line(owner, call, name, monkeypatch):
    monkeypatch.setattr(owner, call, lambda *given: None)  # there is no device to wait for
    facts = watched(lambda _: getattr(owner, call)(None))
    (finding,) = findings_of(replace(facts, device="cuda"))
    assert finding.name == name
    assert "test_findings.py:" in finding.where
    assert call in finding.message
    with ThreadPoolExecutor(1) as loader:  # which copies ahead, and waits for that
        facts = watched(lambda _: loader.submit(getattr(owner, call), None).result())
    assert findings_of(replace(facts, device="cuda")) == ()


class Waits(Played):
    """A tensor whose operators wait for the device, according to torch's debug mode."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_operators_that_torch_warns_of_are_found_and_its_warnings_not_shown(monkeypatch):
    modes, waits = [], Waits(torch.ones(3))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step(number):
        if number in (2, 3):
            warnings.warn("the script's own", stacklevel=1)
            waits.cumsum(0)

    with pytest.warns(UserWarning, match="the script's own") as shown:
        (finding,) = findings_of(watched(step))
    assert {str(one.message) for one in shown} == {"the script's own"}
    assert modes == ["warn", 0] * 2
    assert finding.message.startswith("cumsum() waits for the device")
    assert "test_findings.py:" in finding.where


def test_a_model_on_several_devices_in_one_process():
    model = nn.DataParallel(nn.Linear(4, 1))
    # Without devices it runs its module as it is; that it had some is seen from within.
    model.module.register_forward_pre_hook(lambda *_: setattr(model, "device_ids", [0, 1]))

    def step(number):
        model.device_ids = []
        model(torch.ones(2, 4))

    (finding,) = findings_of(watched(step))
    assert finding.name == "data-parallel"
    assert "to 2 devices" in finding.message
    assert "test_findings.py:" in finding.where


def test_findings_about_the_whole_step_have_the_line_of_its_first_operator(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, images = nn.Conv2d(2, 2, 3, bias=False), torch.ones(2, 2, 8, 8)

    def step(number):
        torch.mm(LARGE, LARGE)
        model(images).sum().backward()

    on_cuda = {"device": "cuda", "flops": SINGLE, "half": torch.bfloat16, "tf32": True}
    facts = watched(step)
    assert facts.flops["cpu", torch.float32, "product"] == 2 * 300**3
    assert (facts.threads, facts.cores) == (torch.get_num_threads(), resources.usable_cores())
    findings = findings_of(replace(facts, **on_cuda))
    assert [one.name for one in findings] == ["autocast", "matmul-precision",
        "convolution-precision", "autotuner", "channels-last"]  # fmt: skip
    lines = [Path(__file__).read_text().splitlines()[int(one.where.rpartition(":")[2]) - 1]
             for one in findings]  # fmt: skip
    assert ["mm(" in line for line in lines] == [False, True, False, False, False]
    assert ["model(images)" in line for line in lines] == [True, False, True, True, True]
    assert facts.sites["backward"] == facts.sites["convolution"]


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
    ("autocast", ON_CUDA, {"flops": SINGLE, "matmul_precision": "high"}, {}),
    ("matmul-precision", ON_CUDA, {"flops": SINGLE, "half": None}, {"tf32": False}),
    (
        "convolution-precision", ON_CUDA,
        {"flops": SINGLE, "half": None, "matmul_precision": "high", "convolution_tf32": False},
        {"convolution_tf32": False},  # they are in bfloat16
    ),
    ("channels-last", ON_CUDA, {"planar": 53}, {"planar": 53, "half": None}),
    ("data-parallel", ON_CUDA, {"data_parallel": 4}, {"data_parallel": 1}),
    ("accumulation", ON_CUDA, {"reduces_early": True, "cycle": 4}, {"reduces_early": True}),
    ("checkpointing", ON_CUDA, {"memory": 0.95}, {"memory": 0.95, "checkpointed": True}),
    ("autocast", ON_CPU, {"half": torch.bfloat16}, {"half": torch.bfloat16, "flops": {}}),
    ("threads", ON_CPU, {"threads": 9}, {"threads": 8}),
    ("threads", ON_CPU, {"threads": 1}, {"threads": 1, "workers": 7}),
    ("threads", ON_CPU, {"numa_nodes": 2}, {"numa_nodes": 2, "threads": 1, "cores": 1}),
    ("contention", ON_CPU, {"contention": STALL, "workers": 4}, {"workers": 4}),
]  # fmt: skip


@pytest.mark.parametrize("case", DECISIONS, ids=lambda case: case[0])
def test_a_rule_on_given_facts(case):
    name, clean, bad, good = case
    assert [one.name for one in findings_of(replace(clean, **bad))] == [name]
    assert findings_of(replace(clean, **good)) == ()


def test_copies_to_the_device_are_one_finding_where_the_step_is_the_limit():
    what = "a copy to the device without non_blocking=True"
    places = {Place("sync", what, "cuda", f"train.py:{line}"): 1 for line in (7, 8)}
    (copies,) = findings_of(replace(ON_CUDA, places=places))
    assert copies.where == "train.py:7"
    assert "in each step (also train.py:8): copy with it, from pinned memory" in copies.message
    assert not copies.anyway
    (value,) = findings_of(replace(ON_CUDA, places={Place("sync", ".item()", "cuda", None): 1}))
    assert value.anyway


def test_a_stall_that_was_measured_is_the_gain():
    (finding,) = findings_of(replace(ON_CPU, contention=STALL, workers=4))
    assert finding.gain == STALL
    assert "torch.set_num_threads(4) in place of 8" in finding.message
    assert "measured here: 2.00 ms a batch less (1.00 to 3.00)" in str(finding)


CUDNN, CHANNELS_LAST = torch.backends.cudnn, {"memory_format": torch.channels_last}
IS_ON = {
    "autocast": lambda weight: torch.is_autocast_enabled("cpu"),
    "matmul-precision": lambda weight: torch.get_float32_matmul_precision() == "high",
    "convolution-precision": lambda weight: CUDNN.conv.fp32_precision == "tf32",
    "autotuner": lambda weight: CUDNN.benchmark,
    "channels-last": lambda weight: weight.is_contiguous(**CHANNELS_LAST),
}


@pytest.fixture
def set_to():
    """Set the autotuner, precisions of convolutions and products, threads; they are put back."""

    def set_to(benchmark, convolutions, products, threads):
        CUDNN.benchmark, CUDNN.conv.fp32_precision = benchmark, convolutions
        torch.set_float32_matmul_precision(products)
        torch.set_num_threads(threads)

    products, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    before = CUDNN.benchmark, CUDNN.conv.fp32_precision, products, threads
    yield set_to
    set_to(*before)


@pytest.mark.parametrize("name", TOGGLES)
def test_a_setting_is_tried_around_blocks_of_steps_and_put_back(name, set_to, monkeypatch):
    set_to(False, "ieee", "highest", 1)  # one thread, as steps are tiny
    found = {row[0]: replace(row[1], **row[2]) for row in DECISIONS}[name]
    monkeypatch.setattr(Watch, "facts", lambda self, **more: found)
    time, model = VirtualTime(), nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(model.parameters())
    weight, seen = model[0].weight, []
    before = [(id(tensor), tensor.data_ptr(), tensor.stride()) for tensor in model.parameters()]

    def step(batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        state = optimizer.state[weight]["exp_avg"]
        alike = weight.grad.stride() == state.stride() == weight.stride()
        seen.append((IS_ON[name](weight), alike, weight.data_ptr(), weight.detach().clone()))
        time.sleep(0.024 if seen[-1][0] else 0.04)

    loader = DataLoader(torch.ones(1000, 2, 4, 4), batch_size=2)
    report = check_bottleneck(loader, step, budget_s=3, clock=HostOn(time))
    (finding,) = report.findings
    assert finding.name == name
    assert {each.step for each in report.timeline["synthetic"]} == {0.04}  # not those tried
    said = " ".join(str(report).partition("-> the one change to make: ")[2].split())
    assert said == " ".join(str(finding).split())  # the last line
    assert 0.0159 < finding.gain.low <= finding.gain.high < 0.0161
    switched = [on for (on, *_), (after, *_) in itertools.pairwise(seen) if on != after]
    assert 2 * len(switched) < sum(on for on, *_ in seen)  # a block has several steps
    assert all(alike for on, alike, *_ in seen)
    assert all(one[2] == two[2] for one, two in itertools.pairwise(seen) if one[0] == two[0])
    # As it was, but for what it was trained to.
    assert not IS_ON[name](weight)
    assert before == [(id(one), one.data_ptr(), one.stride()) for one in model.parameters()]
    assert torch.equal(weight, seen[-1][3])
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride() == weight.grad.stride()


def test_a_setting_that_cannot_be_tried_is_reported_with_the_reason(monkeypatch):
    found = replace(ON_CUDA, flops=SINGLE, half=torch.float16, matmul_precision="high")
    monkeypatch.setattr(Watch, "facts", lambda self, **more: found)
    time, loader = VirtualTime(), DataLoader(torch.ones(1000, 4))
    report = check_bottleneck(loader, lambda _: time.sleep(0.01), budget_s=2, clock=HostOn(time))
    (finding,) = report.findings
    assert finding.message.endswith("not measured: in float16 the loss has to be scaled, too")


GPU_SETTINGS = {
    "autotuner": {"benchmark": False},
    "autocast": {"half": False},
    "matmul-precision": {"half": False, "products": "highest"},
    "convolution-precision": {"half": False, "convolutions": "ieee"},
    "channels-last": {"layout": torch.contiguous_format},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SETTINGS)
def test_each_setting_of_a_gpu_is_found_and_not_in_a_clean_step(name, set_to):
    def names(
        *, benchmark=True, half=True, products="high", convolutions="tf32",
        layout=torch.channels_last,
    ):  # fmt: skip
        set_to(benchmark, convolutions, products, torch.get_num_threads())
        # More than 1 GFLOP in convolutions, and in a product
        layers = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(2), nn.Linear(60 * 60, 1000)
        step = trained(nn.Sequential(*layers).cuda().to(memory_format=layout))
        images = torch.ones(8, 3, 64, 64, device="cuda").to(memory_format=layout)

        def run(_):
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
                step(images)

        return {one.name for one in findings_of(watched(run))}

    assert name in names(**GPU_SETTINGS[name])
    assert name not in names()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("begins", "step", "clean"),
    [
        ("repeat_interleave()", lambda x: x.repeat_interleave(x), None),
        ("a copy to the device", lambda x: BATCH.to("cuda"), lambda x: x.to("cuda")),
        ("index_put_()", lambda x: x.index_put_((x > 1,), x[:0]), lambda x: x.add_(0)),
    ],
)
def test_operators_that_wait_for_a_gpu(begins, step, clean):
    counts = torch.ones(4, dtype=torch.int64, device="cuda")
    (finding,) = findings_of(watched(lambda _: step(counts)))
    assert finding.message.startswith(begins)
    assert "test_findings.py:" in finding.where
    assert findings_of(watched(lambda _: (clean or torch.square)(counts))) == ()

"""The check in a loop: what it yields, counts, ends with and hands back; on a played time.

Loaders and steps wait on a virtual time, so that verdicts are exact and no test takes long.
"""

import builtins
import gc
import itertools
import random
import re
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

from bench.check.played import HostOn, Loop, PlayedLoader, VirtualTime
from dataloaders import DataLoader, bottleneck_check
from dataloaders.bottleneck import Check, check_bottleneck
from dataloaders.errors import CheckError, OptionError
from helpers.compare import assert_same, generator_states
from helpers.datasets import MapDataset, Waiting


@pytest.fixture
def time():
    return VirtualTime()


def checked(loader, step, time, budget_s=15):
    """The report; ``step`` is a function, or its seconds: one number, or one after the other."""
    if not callable(step):
        seconds = itertools.repeat(step) if isinstance(step, float) else iter(step)

        def step(batch):
            time.sleep(next(seconds))

    return check_bottleneck(loader, step, budget_s=budget_s, clock=HostOn(time))


def check_of(loader, time, budget_s=15, **options):
    return Check(loader, budget_s=budget_s, clock=HostOn(time), **options)


class MadeAhead(PlayedLoader):
    """Batches that a thread makes ahead without workers, as backend="prefetch" does of a cache."""

    def __iter__(self):
        batches = iter(PlayedLoader(self.time, self.loads, workers=1, prefetch=8))
        batches.ahead = 8  # so many are ready after each other arm
        return batches


LOOPS = {
    # A name: the loader's durations and options, the step's, the factor that is lost.
    "workers too slow": ([0.06], {"workers": 2}, 0.02, 1.5),
    "workers quick enough": ([0.03], {"workers": 2}, 0.02, 1.0),
    "one batch an epoch": ([0.05], {"batches": 1}, 0.02, 3.5),
    "three batches an epoch, a worker": ([0.05], {"batches": 3, "workers": 1}, 0.02, 0.17 / 0.06),
    "nine batches an epoch, a worker": ([0.05], {"batches": 9, "workers": 1}, 0.02, 0.47 / 0.18),
    "a slow first batch": ([0.2, *[0.001] * 39], {"batches": 40, "workers": 1}, 0.02, 1.25),
    "each tenth step long": ([0.004], {}, [0.01] * 9 + [0.15], 1 + 0.004 / 0.024),
    "made ahead too slowly": ([0.03], {"kind": MadeAhead}, 0.02, 1.5),
    "made ahead just in time": ([0.019], {"kind": MadeAhead}, 0.02, 1.0),
}


class TestVerdicts:
    @pytest.mark.parametrize("loader_class", [TorchLoader, DataLoader])
    def test_a_slow_serial_loader_is_input_bound_and_freed(self, loader_class, time):
        loader = loader_class(Waiting(5000, 0.01, time.sleep))
        freed = weakref.ref(loader)
        gc.disable()
        try:
            report = checked(loader, 0.005, time)
            del loader
            assert freed() is None  # not only once a collection has found a cycle
        finally:
            gc.enable()
        assert report.verdict == "input-bound"
        assert report.candidates
        assert report.speedup_bound.estimate == pytest.approx(3.0)
        assert set(report.seconds_per_batch) == {"synthetic", "real"}
        assert report.stalls["prep"].estimate == pytest.approx(0.01)
        assert "try_candidates=True" in report.advice[0]
        assert "DataLoader(..., num_workers=" in str(report).splitlines()[-1]
        for text in ("INPUT-BOUND", "float32 1x4", "synthetic", "could not have been seen"):
            assert text in str(report)

    @pytest.mark.parametrize("loop", LOOPS)
    def test_the_speedup_bound_is_the_truth(self, loop, time):
        loads, options, step, truth = LOOPS[loop]
        cycle = step if isinstance(step, list) else [step]
        given = {"kind": PlayedLoader, **options}
        report = checked(given.pop("kind")(time, loads, **given), itertools.cycle(cycle), time)
        assert report.verdict == ("input-bound" if truth > 1.06 else "step-bound")
        assert report.speedup_bound.estimate == pytest.approx(truth, rel=0.02)
        if options.get("workers") == 2:
            assert report.seconds_per_batch["contended"].estimate == pytest.approx(0.02)
        if len(cycle) > 1:
            assert report.speedup_bound.estimate == pytest.approx(truth, rel=0.002)
            assert any(f"every {len(cycle)} batches" in note for note in report.notes)

    @pytest.mark.parametrize(
        ("step", "load", "options", "noise", "truth"),
        [
            (5.0, 2.0, {"workers": 2}, 0.02, 1.0),
            (5.0, 20.0, {"workers": 2}, 0.02, 2.0),
            (8.0, 4.0, {}, 0.05, 1.5),  # imagenet on a CPU: two steps in a budget
            (8.0, 1.0, {"workers": 4}, 0.0, 1.0),
            # An epoch that no budget holds, and too short for a queue to find its state.
            (1.0, 8.0, {"workers": 4, "batches": 40}, 0.0, 2.0),
        ],
    )
    def test_slow_steps_get_a_verdict_within_twice_a_budget_of_20_s(
        self, step, load, options, noise, truth, time
    ):
        draw = random.Random(1)
        loader = PlayedLoader(time, [load], **options)
        report = checked(loader, lambda batch: time.sleep(step * draw.gauss(1, noise)), time, 20)
        assert report.verdict == ("input-bound" if truth > 1 else "step-bound")
        assert report.speedup_bound.low <= truth <= report.speedup_bound.high
        assert report.seconds <= 40

    def test_a_step_that_pays_once_for_each_shape_is_not_input_bound(self, time):
        draw = random.Random(0).randrange
        batches = [torch.zeros(draw(50, 600)) for _ in range(4000)]
        seen = set()

        def step(batch):
            time.sleep(0.02 if batch.shape in seen else 0.17)
            seen.add(batch.shape)

        loader = PlayedLoader(time, [0.0001], made=batches)
        report = checked(loader, step, time)
        assert report.verdict == "step-bound"
        assert any("first on its shape" in note for note in report.notes)

    @pytest.mark.parametrize(("workers", "truth"), [(0, 1.2), (2, 1.0)])
    def test_batches_that_differ_in_size_are_compared_at_one_size(self, workers, truth, time):
        batches = [torch.zeros(5 + 7 * k % 31) for k in range(31)]
        loader = PlayedLoader(time, [0.004], workers=workers, made=batches)
        report = checked(loader, lambda batch: time.sleep(0.001 * len(batch)), time)
        assert report.speedup_bound.estimate == pytest.approx(truth, abs=0.015)


def is_right(step, load, workers, *, noise, seed, budget_s, neighbour=None):
    """Whether the verdict is true of a machine with nothing else to do; None: there is none.

    Every step and load is off by ``noise``; the neighbour is `VirtualTime`'s.
    """
    draw = random.Random(seed)
    time = VirtualTime(neighbour, seed)

    def work(batch):
        time.burn("busy", step * max(0.3, draw.gauss(1, noise)))

    loads = [load * max(0.3, draw.gauss(1, noise)) for _ in range(97)]
    verdict = checked(PlayedLoader(time, loads, workers=workers), work, time, budget_s).verdict
    assert time.now() < 2 * budget_s + 5
    truth = max(step, load / workers) / step if workers else 1 + load / step
    assert truth < 1.03 or truth > 1.1
    return None if verdict == "inconclusive" else (verdict == "step-bound") == (truth < 1.03)


def seeds(few, many):
    return [few, pytest.param(many, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]


class TestNoise:
    """How often the check is right where steps differ and other processes run."""

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("seeds", seeds(5, 40))
    @pytest.mark.parametrize("step", [0.5, 0.7, 1.0])
    def test_slow_steps_that_differ_get_a_verdict_in_nine_of_ten(self, step, seeds):
        """Ten per cent of noise, with workers: within twice the budget, and never a wrong one."""
        verdicts = [
            is_right(step, step * share, workers, noise=0.1, seed=seed, budget_s=30)
            for share, workers in ((0.1, 1), (0.5, 1), (1.6, 2), (0.5, 4), (1.3, 1), (3.0, 2))
            for seed in range(seeds)
        ]
        assert verdicts.count(False) <= (0 if seeds < 10 else len(verdicts) / 200)
        assert verdicts.count(None) <= 0.1 * len(verdicts)

    @pytest.mark.thinned(2)
    @pytest.mark.parametrize("seeds", seeds(2, 20))
    @pytest.mark.parametrize(
        "neighbour",
        [((0.01, 0.3), (0.01, 0.3), 0.5), ((1, 8), (1, 8), 0.4), ((2, 6), (5, 15), 0.5)],
        ids=["short", "long", "rare"],
    )
    def test_another_process_never_makes_a_verdict_wrong(self, neighbour, seeds):
        """Also where its bursts hide that the loader is too slow: then there is no verdict."""
        cases = (
            (0.02, 0.001, 1),
            (0.02, 0.046, 2),
            (0.03, 0.138, 4),
            (0.1, 0.26, 2),
            (0.02, 0.01, 0),
        )
        verdicts = {
            case: [
                is_right(*case, noise=0.02, seed=seed, budget_s=20, neighbour=neighbour)
                for seed in range(seeds)
            ]
            for case in cases
        }
        assert not any(False in those for those in verdicts.values())
        assert verdicts[0.02, 0.01, 0] == [True] * seeds

    @pytest.mark.parametrize("seed", [0, 7, 9])
    @pytest.mark.parametrize("on_a_device", [False, True])
    def test_slow_batches_that_no_block_measures_rule_step_bound_out(self, on_a_device, seed, time):
        """One batch in 20 takes as long as 16 steps; a wait between blocks may hide it."""
        draw = random.Random(seed)
        loads = [1.6 if draw.random() < 0.05 else 0.05 for _ in range(2000)]
        loop = Loop(tuple(loads), (0.1,), workers=2, queue=8, host_s=0.01)
        assert loop.truth() > 1.2
        if on_a_device:
            loader, step = loop.made(time)
            report = check_bottleneck(loader, step, clock=step.clock)
        else:
            report = checked(PlayedLoader(time, loads, workers=2), 0.1, time, 30)
        assert report.verdict in ("input-bound", "inconclusive")
        assert report.speedup_bound.high > 1.08


class TestRhythm:
    @pytest.mark.parametrize("hooked", [False, True])
    @pytest.mark.parametrize(
        ("load", "step", "taken", "workers", "truth"),
        [(0.1, 0.02, 8, 2, 2.5), (0.03, 0.15, 4, 0, 1.2), (0.01, 0.05, 4, 2, 1.0)],
    )
    def test_batches_taken_in_bursts(self, load, step, taken, workers, truth, hooked, time):
        """As HF Trainer does with gradient accumulation: it takes k batches, then makes k steps."""
        check = check_of(PlayedLoader(time, [load], workers=workers), time)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        batches = iter(check)
        while burst := [batch for _, batch in zip(range(taken), batches, strict=False)]:
            time.sleep(step * len(burst))
            if hooked:
                optimizer.step()
        report = check.report()
        assert report.speedup_bound.estimate == pytest.approx(truth, rel=0.01)
        assert report.verdict == ("step-bound" if truth == 1.0 else "input-bound")
        assert time.now() < 30

    def test_accumulation_in_the_users_step_is_seen_by_the_optimizers_hook(self, time):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        calls = itertools.count(1)

        def step(batch):
            time.sleep(0.01)
            if next(calls) % 4 == 0:
                optimizer.step()
                time.sleep(0.01)

        report = checked(PlayedLoader(time, [0.005]), step, time)
        assert any("every 4 batches" in note for note in report.notes)
        assert report.speedup_bound.estimate == pytest.approx(1.4, rel=0.002)

    def test_the_budget_begins_when_steps_are_steady(self, time):
        steps = itertools.chain([0.02, 60], itertools.repeat(0.02))  # the second one compiles
        report = checked(PlayedLoader(time, [0.02]), steps, time, 6)
        assert report.verdict == "input-bound"
        assert report.speedup_bound.estimate == pytest.approx(2.0)
        assert report.seconds <= 6
        assert time.now() < 67

    @pytest.mark.parametrize(("quick", "steps"), [(5e-4, 2000), (1e-6, 20_000), (1e-6, 60_000)])
    def test_a_step_that_becomes_slow_ends_its_block(self, quick, steps, time):
        """Also within a segment: of steps that a loop skips at first, it has thousands."""
        steps = itertools.chain([quick] * steps, itertools.repeat(0.5))
        checked(PlayedLoader(time, [0.0001]), steps, time, 6)
        assert time.now() < 7


class TestLoops:
    @pytest.mark.parametrize("every", [7, 41])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_a_loop_does_between_its_epochs_is_neither_step_nor_budget(
        self, every, workers, time
    ):
        """It breaks, validates for a second and begins a new epoch: no block is ever whole."""
        truth = 4.0 + 1 / every if workers else 5.0  # the step hides none of an epoch's first load
        check = check_of(PlayedLoader(time, [0.004], workers=workers), time, 5)
        loops = 0
        while not check.finished:
            loops += 1
            for number, _ in enumerate(check, 1):
                time.sleep(0.001)
                if number == every:
                    break
            time.sleep(1.0)
        report = check.report()
        assert loops > 2
        assert report.verdict == "input-bound"
        assert report.speedup_bound.estimate == pytest.approx(truth, rel=0.05)
        assert report.seconds <= 5
        assert report.waits["longest"] < 0.01
        assert any(f"leaves each epoch after {every} batches" in one for one in report.notes)

    @pytest.mark.parametrize("slow", [False, True])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_one_short_epoch_is_not_prolonged_if_its_waits_carry_the_verdict(
        self, workers, slow, time
    ):
        load = 0.02 * max(1, workers) if slow else 0.0002
        loader = PlayedLoader(time, [load], workers=workers, batches=40)
        check = check_of(loader, time, 30, only_epoch=True)
        steps = 0
        for _ in check:
            time.sleep(0.01)
            steps += 1
        report = check.report()
        assert report.verdict == ("input-bound" if slow else "step-bound")
        assert steps == 38  # two batches were the script's own
        assert "single steps in " in str(report)
        assert len(report.timeline["real"]) >= 30
        assert report.waits["longest"] < 0.05

    @pytest.mark.parametrize("only", [False, True])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_an_epoch_that_fills_a_cache_does_not_count_and_is_prolonged(self, only, workers, time):
        class Filling(PlayedLoader):
            seconds = iter([0.02 * max(1, workers)])

            def __iter__(self):
                self.loads = (next(self.seconds, 0.0),)
                return super().__iter__()

        check = check_of(Filling(time, [], workers=workers, batches=40), time, only_epoch=only)
        for _ in check:
            time.sleep(0.01)
        assert check.report().verdict == "step-bound"
        assert "leave the input as it is" in check.report().advice[0]

    @pytest.mark.parametrize(("length", "workers"), [(4, 0), (6, 1), (40, 2)])
    def test_a_consumer_that_counts_its_batches_never_asks_for_the_end(self, length, workers, time):
        loader = PlayedLoader(time, [0.004], workers=workers, batches=length)
        check = check_of(loader, time, 6)
        for _ in range(300):
            batches = iter(check)  # as Lightning does: len(loader) batches, then a new iterator
            for _ in range(length):
                if next(batches, None) is None:
                    break
                time.sleep(0.001)
            if check.finished:
                break
        assert check.report().verdict == "input-bound"

    def test_epochs_that_turn_out_shorter_than_thought_end_the_check(self, time):
        class Shrinking:
            lengths = itertools.chain([40], itertools.repeat(5))  # nothing to settle in

            def __iter__(self):
                return iter(torch.zeros(next(self.lengths), 4))

        assert checked(Shrinking(), 0.001, time, 2).rounds >= 2

    def test_a_short_last_batch_has_its_share_in_every_arm(self, time):
        # 9 batches, the last of 1 sample instead of 20: 8 full ones alone would cost 11 % more.
        loader = DataLoader(TensorDataset(torch.zeros(161, 2)), batch_size=20)
        report = checked(loader, lambda batch: time.sleep(0.0005 * len(batch[0])), time)
        usual = 0.0005 * 161 / 9
        assert report.seconds_per_batch["synthetic"].estimate == pytest.approx(usual, rel=1e-6)
        assert report.verdict == "step-bound"

    def test_the_batches_that_were_waited_for_longest_are_named(self, time):
        loads = [0.001] * 59 + [0.05]
        report = checked(PlayedLoader(time, loads, batches=600), 0.01, time)
        batches = report.waits["batches"]
        epoch, batch, seconds = batches[0]
        assert batch % 60 == 59
        assert seconds == pytest.approx(0.05)
        assert f"batch {batch} of epoch {epoch}" in str(report)

    def test_progress_is_reported_between_blocks_and_the_report_is_there_at_any_time(self, time):
        shown = []
        check = check_of(PlayedLoader(time, [0.002]), time, 4, progress=shown.append)
        assert check.report().verdict == "inconclusive"
        abandoned = [iter(check)]
        next(abandoned[0])
        for index, _ in enumerate(check):
            time.sleep(0.001)
            if index == 20:
                abandoned.clear()  # the iterator in use goes on
        assert check.finished
        assert check.report().verdict == "input-bound"
        phases = [one.phase for one in shown]
        assert phases[0] == "warm-up"
        assert {"synthetic", "real"} <= set(phases)
        assert shown[-1].interval is not None
        assert [one.seconds for one in shown] == sorted(one.seconds for one in shown)

    def test_a_notebook_shows_progress_in_one_line_and_the_report(self, time, monkeypatch, capsys):
        shown = []
        shell = type("ZMQInteractiveShell", (), {"kernel": None})
        display = types.SimpleNamespace(display=shown.append)
        notebook = types.SimpleNamespace(get_ipython=shell, display=display)
        monkeypatch.setitem(sys.modules, "IPython", notebook)
        monkeypatch.setitem(sys.modules, "IPython.display", display)
        monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
        loader = DataLoader(Waiting(1000, 0.03, time.sleep), batch_size=None)
        with bottleneck_check(loader, budget_s=10, clock=HostOn(time)) as check:
            for _ in check:
                time.sleep(0.01)
        assert re.fullmatch(r"[^\n]*\rcheck  [^\n]*\r", capsys.readouterr().out)
        report = check.report()
        assert 3.8 < report.speedup_bound.estimate < 4.2
        assert re.match(r"<pre(?s:.*)INPUT-BOUND", report._repr_html_())
        assert str(report).startswith("INPUT-BOUND")
        assert shown == []  # by rich, beside what is returned


class TestTraces:
    def test_a_step_that_writes_into_its_batch_sees_what_the_loader_delivered(self, time):
        seen = []

        def step(batch):
            images = batch.pop("images")  # the batch is the step's own
            seen.append(images[0, 0].item())
            images.mul_(0.5).requires_grad_()
            time.sleep(0.01)

        loader = DataLoader([{"images": torch.ones(2)}] * 4000, batch_size=2)
        report = checked(loader, step, time, 3)
        assert report.verdict == "step-bound"
        assert any("writes into its batch" in note for note in report.notes)
        # Only the block in which the writing is noticed may hand a written batch out again.
        assert seen.count(1.0) > 0.9 * len(seen)

    def test_a_step_is_compiled_once_while_it_is_watched(self, time):
        graphs, seen = [], []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model = torch.compile(torch.nn.Linear(8, 8), backend=backend, fullgraph=True)

        def step(batch):
            model(batch).sum().backward()
            seen.append(len(graphs))
            time.sleep(0.01)

        loader = DataLoader(torch.ones(4000, 8), 2)
        checked(loader, step, time, 2)
        assert set(seen) == {1}

    def test_random_states_are_put_back_and_training_is_the_same(self, time):
        rows = TensorDataset(torch.arange(300))
        generator = torch.Generator().manual_seed(5)

        def step(batch):
            torch.rand(1), np.random.rand(), random.random()
            time.sleep(0.001)

        for options in ({"generator": generator}, {"seed": 3}):
            loader = DataLoader(rows, 3, shuffle=True, **options)
            before = generator_states(loader)
            checked(loader, step, time, 1)
            assert_same(generator_states(loader), before)
        assert_same(list(loader), list(DataLoader(rows, 3, shuffle=True, seed=3)))


BROKEN = MapDataset("array", 100, failing=[3])


class TestErrors:
    @pytest.mark.parametrize("budget", [0, -1, float("nan")])
    def test_a_budget_must_be_positive(self, budget):
        with pytest.raises(OptionError, match="budget_s"):
            Check([], budget_s=budget)

    @pytest.mark.usefixtures("workers_end_fast")
    @pytest.mark.parametrize(
        ("loader", "step", "error"),
        [
            (DataLoader(torch.zeros(3), 4, drop_last=True), id, CheckError("no batch.*drop_last")),
            ((torch.zeros(1) for _ in range(60)), id, CheckError("give one that can be iterated")),
            (DataLoader(BROKEN), id, ValueError("no sample 3 today")),
            (DataLoader(BROKEN, num_workers=1), id, ValueError("no sample 3 today")),
            ([torch.zeros(1)], lambda _: 1 / 0, ZeroDivisionError("division by zero")),
        ],
    )
    def test_errors_reach_the_caller_and_say_what_to_give(self, loader, step, error):
        with pytest.raises(type(error), match=str(error)):
            check_bottleneck(loader, step, budget_s=1)

    def test_an_interrupt_carries_what_is_known_so_far(self, time):
        steps = itertools.count()

        def step(batch):
            time.sleep(0.001)
            if next(steps) == 60:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            checked(PlayedLoader(time, [0.001]), step, time, 20)
        report = caught.value.report
        assert report.verdict == "input-bound"  # by the waits of the first steps
        assert any("before the check had enough" in note for note in report.notes)


@pytest.mark.measures
@pytest.mark.gpu
def test_a_step_on_cuda_has_a_host_arm_and_nothing_waits_inside_blocks():
    loader = DataLoader(TensorDataset(torch.zeros(4096, 1024)), batch_size=64, pin_memory=True)
    weight = torch.zeros(1024, 1024, device="cuda")

    def step(batch):
        batch[0].to("cuda", non_blocking=True) @ weight

    def forbid_waiting(progress):
        # From the end of the warm-up on, every operation that waits for the device raises;
        # synchronize(), which stands behind the last mark of a block, is not one of them.
        torch.cuda.set_sync_debug_mode("error")

    try:
        report = check_bottleneck(loader, step, budget_s=4, progress=forbid_waiting)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "host" in report.seconds_per_batch
    assert report.rounds >= 2

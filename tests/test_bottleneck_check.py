"""The check on loaders and steps whose costs are known and far apart; no figure is asserted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from dataloaders import DataLoader
from dataloaders.bottleneck import Check, Progress, check_bottleneck
from dataloaders.measuring.feed import Feed
from dataloaders.errors import CheckError, OptionError
from helpers.waits import SlowOnce, Waiting, wait

pytestmark = pytest.mark.measures

NOT_BOUND = ("step-bound", "inconclusive")
"""A machine busy with something else may widen the interval, never turn the verdict round."""


def waiting_step(seconds: float) -> Callable[[Any], None]:
    return lambda batch: wait(seconds)


@pytest.mark.parametrize("loader_class", [TorchLoader, DataLoader])
def test_a_slow_serial_loader_is_input_bound(loader_class: Any) -> None:
    loader = loader_class(Waiting(500, 0.01), batch_size=1)
    report = check_bottleneck(loader, waiting_step(0.001), budget_s=3)
    assert report.verdict == "input-bound"
    assert report.exit_status == 10
    assert report.speedup_bound is not None
    assert report.speedup_bound.low > 2
    assert set(report.seconds_per_batch) == {"synthetic", "real"}
    assert report.stalls["prep"].estimate > report.stalls["contention"].estimate
    assert "num_workers" in report.advice[0]


def test_a_slow_step_is_step_bound() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4000, 4)), batch_size=4)
    report = check_bottleneck(loader, waiting_step(0.01), budget_s=4)
    assert report.verdict in NOT_BOUND
    assert report.exit_status in (0, 20)
    assert report.speedup_bound is not None
    assert report.speedup_bound.low < 1.05


def test_workers_that_are_too_slow_are_input_bound_and_end_with_the_check() -> None:
    loader = DataLoader(Waiting(2000, 0.02), batch_size=1, num_workers=2)
    before = {child.pid for child in psutil.Process().children()}
    report = check_bottleneck(loader, waiting_step(0.001), budget_s=4)
    assert report.verdict == "input-bound"
    assert "contended" in report.seconds_per_batch
    assert {child.pid for child in psutil.Process().children()} <= before


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("workers", [0, 1])
def test_short_loaders_are_measured_by_whole_epochs(length: int, workers: int) -> None:
    loader = DataLoader(Waiting(length, 0.005), batch_size=1, num_workers=workers)
    report = check_bottleneck(loader, waiting_step(0.0005), budget_s=2.5)
    assert report.rounds >= 2
    assert report.verdict in ("input-bound", "inconclusive")
    assert f"{length} batches an epoch" in report.loader


def test_a_first_epoch_that_fills_a_cache_does_not_count() -> None:
    loader = DataLoader(SlowOnce(60, 0.005), batch_size=1)
    report = check_bottleneck(loader, waiting_step(0.01), budget_s=4)
    assert report.verdict in NOT_BOUND


class Counting(IterableDataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.length):
            wait(0.003)
            yield torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_without_a_length(workers: int) -> None:
    loader = DataLoader(Counting(40), batch_size=1, num_workers=workers)
    report = check_bottleneck(loader, waiting_step(0.0002), budget_s=2)
    assert report.rounds >= 2
    assert report.verdict in ("input-bound", "inconclusive")


def test_any_iterable_of_batches_can_be_checked() -> None:
    batches = [torch.zeros(2) for _ in range(200)]
    report = check_bottleneck(batches, waiting_step(0.01), budget_s=2)
    assert report.verdict in NOT_BOUND
    assert report.loader.startswith("list over list")


def test_a_step_that_writes_into_its_batch_always_sees_what_the_loader_delivered() -> None:
    seen: set[float] = set()

    def step(batch: list[torch.Tensor]) -> None:
        seen.update(batch[0].flatten().tolist())
        batch[0].mul_(0.5)
        wait(0.001)

    loader = DataLoader(TensorDataset(torch.ones(400, 2)), batch_size=2)
    report = check_bottleneck(loader, step, budget_s=1.5)
    # Only the block in which the writing is noticed may hand a written batch out again.
    assert any("writes into its batch" in note for note in report.notes)
    assert 1.0 in seen


def test_an_empty_loader_is_an_error_that_says_what_to_look_at() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(3)), batch_size=4, drop_last=True)
    with pytest.raises(CheckError, match=r"yields no batch.*drop_last"):
        check_bottleneck(loader, waiting_step(0), budget_s=1)


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_positive(budget: float) -> None:
    with pytest.raises(OptionError, match="budget_s"):
        Check([], budget_s=budget)


def test_random_states_are_put_back() -> None:
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(
        TensorDataset(torch.zeros(300)), batch_size=3, shuffle=True, generator=generator
    )

    def step(batch: Any) -> None:
        torch.rand(1), np.random.rand(), random.random()
        wait(0.001)

    before = generator.get_state(), torch.get_rng_state(), random.getstate()
    check_bottleneck(loader, step, budget_s=1)
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert random.getstate() == before[2]


def test_a_seeded_loader_trains_the_same_after_a_check() -> None:
    def batches(loader: Any) -> list[Any]:
        return [batch.tolist() for batch in loader]

    def loader() -> Any:
        return DataLoader(Waiting(20, 0), batch_size=4, shuffle=True, seed=3)

    checked = loader()
    check_bottleneck(checked, waiting_step(0.001), budget_s=0.5)
    assert batches(checked) == batches(loader())


def test_the_generator_of_a_sampler_inside_a_batch_sampler_is_put_back() -> None:
    generator = torch.Generator().manual_seed(5)
    dataset = Waiting(30, 0)
    sampler = RandomSampler(dataset, generator=generator)
    loader = TorchLoader(dataset, batch_sampler=BatchSampler(sampler, 3, False))
    before = generator.get_state()
    check_bottleneck(loader, waiting_step(0.001), budget_s=0.5)
    assert torch.equal(generator.get_state(), before)


def test_errors_of_the_step_and_of_the_loader_reach_the_caller() -> None:
    class Broken(Dataset[int]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise LookupError("sample 3 is broken")
            return index

    with pytest.raises(LookupError, match="sample 3 is broken"):
        check_bottleneck(DataLoader(Broken()), waiting_step(0), budget_s=1)
    with pytest.raises(LookupError, match="sample 3 is broken"):
        check_bottleneck(DataLoader(Broken(), num_workers=1), waiting_step(0), budget_s=1)

    def step(batch: Any) -> None:
        raise ZeroDivisionError("in the step")

    with pytest.raises(ZeroDivisionError, match="in the step"):
        check_bottleneck(DataLoader(Waiting(10, 0)), step, budget_s=1)


def test_an_interrupt_carries_what_is_known_so_far() -> None:
    steps = 0

    def step(batch: Any) -> None:
        nonlocal steps
        steps += 1
        wait(0.001)
        if steps == 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        check_bottleneck(DataLoader(Waiting(1000, 0.001)), step, budget_s=20)
    report = caught.value.report  # type: ignore[attr-defined]
    assert report.verdict == "inconclusive"
    assert any("rounds were measured" in note for note in report.notes)


def test_a_loop_that_breaks_and_comes_back_finishes_the_check() -> None:
    check = Check(DataLoader(Waiting(400, 0.004), num_workers=1), budget_s=3)
    loops = 0
    while not check.finished:
        loops += 1
        for index, _ in enumerate(check):
            wait(0.001)
            if index == 70:
                break
    assert loops > 2
    assert check.report().verdict == "input-bound"


@pytest.mark.parametrize(("length", "workers"), [(4, 0), (6, 1), (40, 2)])
def test_a_consumer_that_counts_its_batches_never_asks_for_the_end(
    length: int, workers: int
) -> None:
    loader = DataLoader(Waiting(length, 0.004), num_workers=workers)
    check = Check(loader, budget_s=4)
    for _ in range(300):
        batches = iter(check)  # as Lightning does: len(loader) batches, then a new iterator
        for _ in range(length):
            if next(batches, None) is None:
                break
            wait(0.001)
        if check.finished:
            break
    assert check.report().rounds >= 2


def test_an_iterator_left_behind_does_not_disturb_the_one_in_use() -> None:
    check = Check(DataLoader(Waiting(400, 0.002)), budget_s=1)
    left_behind = [iter(check)]
    next(left_behind[0])
    for index, _ in enumerate(check):
        wait(0.001)
        if index == 20:
            left_behind.clear()
    assert check.finished
    assert check.report().rounds >= 2


class Shrinking(IterableDataset[torch.Tensor]):
    """An epoch of 40 samples, then of 5 each: nothing to settle in."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.epochs += 1
        yield from torch.arange(40 if self.epochs == 1 else 5)


def test_epochs_that_turn_out_shorter_than_thought_end_the_check_all_the_same() -> None:
    report = check_bottleneck(DataLoader(Shrinking()), waiting_step(0.001), budget_s=1)
    assert report.rounds >= 2


def test_an_epoch_that_ends_inside_a_block_keeps_its_length() -> None:
    report = check_bottleneck(DataLoader(Waiting(61, 0.001)), waiting_step(0.001), budget_s=2)
    assert "61 batches an epoch" in report.loader


def test_a_short_last_batch_has_its_share_in_every_arm() -> None:
    # 9 batches, the last of 1 sample instead of 20: 8 full ones alone would cost 11 % more.
    loader = DataLoader(TensorDataset(torch.zeros(161, 2)), batch_size=20)
    report = check_bottleneck(loader, lambda batch: wait(0.0005 * len(batch[0])), budget_s=4)
    assert report.seconds_per_batch["synthetic"].low <= 1.06 * 0.0005 * 161 / 9
    assert report.verdict in NOT_BOUND


def test_inference_mode() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(900, 2)), 3)
    with torch.inference_mode():
        report = check_bottleneck(loader, waiting_step(0.002), budget_s=1)
    assert report.rounds >= 2


def test_progress_is_told_between_blocks_and_the_report_is_there_at_any_time() -> None:
    told: list[Progress] = []
    check = Check(DataLoader(Waiting(400, 0.002)), budget_s=1.5, progress=told.append)
    assert check.report().verdict == "inconclusive"
    for _ in check:
        wait(0.001)
    phases = [one.phase for one in told]
    assert phases[0] == "warm-up"
    assert {"synthetic", "real"} <= set(phases)
    assert told[-1].interval is not None
    assert [one.seconds for one in told] == sorted(one.seconds for one in told)


def test_the_report_as_text_json_and_html(tmp_path: Path) -> None:
    loader = DataLoader(Waiting(400, 0.004))
    report = check_bottleneck(loader, waiting_step(0.001), budget_s=1.5)
    text = str(report)
    assert text.startswith("INPUT-BOUND")
    assert "float32 1x4" in text
    assert "synthetic" in text
    assert "could not have been seen" in text
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == data
    assert data["verdict"] == "input-bound"
    assert data["exit_status"] == 10
    assert data["speedup_bound"]["low"] <= data["speedup_bound"]["estimate"]
    report.to_html(tmp_path / "report.html")
    assert "INPUT-BOUND" in (tmp_path / "report.html").read_text()


def test_takers_take_one_batch_a_step_at_most() -> None:
    feed = Feed(DataLoader(Waiting(50, 0), num_workers=1))
    feed.start()
    takers = Takers(feed)
    for _ in range(5):
        takers.step()
        wait(0.05)
    takers.stop()
    assert 1 <= feed.taken - 1 <= 5
    assert not takers.exhausted
    feed.close()


def test_an_idle_feed_has_every_batch_ready() -> None:
    feed = Feed(DataLoader(Waiting(100, 0), num_workers=2, prefetch_factor=3))
    feed.start()
    feed.wait_until_idle(30, 0.0)
    assert feed.ready() == 6
    feed.bring_to(2, 30)
    assert feed.ready() is not None
    feed.close()


@pytest.mark.gpu
def test_a_step_on_cuda_has_a_host_arm_and_nothing_waits_inside_blocks() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4096, 1024)), batch_size=64, pin_memory=True)
    weight = torch.zeros(1024, 1024, device="cuda")

    def step(batch: list[torch.Tensor]) -> None:
        batch[0].to("cuda", non_blocking=True) @ weight

    def forbid_waiting(progress: Progress) -> None:
        # From the end of the warm-up on, every operation that waits for the device raises;
        # torch.cuda.synchronize(), which stands at the edges of blocks, is not one of them.
        torch.cuda.set_sync_debug_mode("error")

    try:
        report = check_bottleneck(loader, step, budget_s=4, progress=forbid_waiting)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "host" in report.seconds_per_batch
    assert report.rounds >= 2

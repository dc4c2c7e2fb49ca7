"""Training loops of which it is known what holds them back: the examination of the verdict.

    Workload ──make()──> (loader, step)          as a user would write them
             ──computed(...)──> real / synthetic in the long run, from the known times, or None
             ──causes──> the verdicts that name the cause of a gap rightly

The truth compares whole epochs of ordinary training with the step alone, so what an epoch costs
to start belongs to it where epochs are short. Where cores are contended for, or only torch's own
costs matter, no truth can be computed; `bench.check.truth` then measures it. The loaders are
torch's own: the truth must not depend on the package that is examined.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import DataLoader, TensorDataset

from bench.check.known_work import BATCH, Kind, Rows, Step, Stream, as_array, burn
from bench.check.played import Loop, Overhead, RealTime, seconds_per_batch

Gap: TypeAlias = Literal["small", "between", "large"]

ENDLESS = 1_000_000
"""Batches of an epoch that no check comes to the end of."""

_INPUT = frozenset({"input-bound"})
_EITHER = frozenset({"input-bound", "contention-bound"})
_CONTENTION = frozenset({"contention-bound"})
_TRANSFER = frozenset({"transfer-bound"})


@dataclass(frozen=True)
class Workload:
    """One loader and step with what is known about them.

    Attributes:
        name: on the command line and in the table.
        about: what it examines.
        make: returns a new loader and a new step.
        causes: the verdicts that are right where there is a gap.
        computed: overhead -> real / synthetic; None where it can only be measured.
        cores: the cores that the whole workload runs on; None for all of them.
        settle_s: the longest that workers go on working after the loop stops taking batches.
        warm_s: seconds of training before the steady state.
        period: batches after which the loop repeats itself, where that is known and short.
        load_s, step_s: mean seconds to make a batch and to step on it, for the calibration.
        step_kind: how the step spends them.
        neighbour: whether another process takes half a core meanwhile, at random.
        device: where the step wants its batches, for the check; None: it finds that out.
        loop: what its device plays; None on the host.
    """

    name: str
    about: str
    make: Callable[[], tuple[DataLoader[Any], Callable[[Any], None]]]
    causes: frozenset[str] = _INPUT
    computed: Callable[[Overhead], float] | None = None
    cores: int | None = None
    settle_s: float = 0.2
    warm_s: float = 0.5
    period: int = 1
    load_s: float = 0.0
    step_s: float = 0.02
    step_kind: Kind = "busy"
    neighbour: bool = False
    device: str | None = None
    loop: Loop | None = None


def gap_class(truth: float) -> Gap:
    """Of real / synthetic: "large" from 10 % on, "small" up to 3 %."""
    if truth >= 1.10:
        return "large"
    return "small" if truth <= 1.03 else "between"


def accepted(workload: Workload, truth: float) -> frozenset[str]:
    """The verdicts that are right, "inconclusive" apart, if ``truth`` is real / synthetic."""
    gap = gap_class(truth)
    if gap == "small":
        return frozenset({"step-bound"})
    return workload.causes if gap == "large" else workload.causes | {"step-bound"}


def _known(
    name: str,
    about: str,
    *,
    loads_ms: Sequence[float] = (0,),
    steps_ms: Sequence[float] = (0,),
    workers: int = 0,
    prefetch: int = 2,
    in_order: bool = True,
    batches: int = ENDLESS,
    batch_size: int | None = BATCH,
    load: Kind = "wait",
    step: Kind = "busy",
    stream: bool = False,
    cached: bool = False,
    tensors: bool = False,
    collate: Callable[[list[torch.Tensor]], Any] | None = None,
    persistent: bool = False,
    writes: bool = False,
    lengths: Sequence[int] = (16,),
    per_length_ms: float = 0.0,
    causes: frozenset[str] = _INPUT,
    cores: int | None = None,
    computable: bool = True,
) -> Workload:
    """A workload of known times; the truth follows from the rules of torch's queues.

    Batches come from workers as NumPy arrays unless ``tensors``: a tensor costs the main process
    up to a millisecond, which would turn a balanced loop into one that is not. ``stream``: of an
    iterable dataset; ``cached``: the steady state is that of batches read before.
    """
    loads, steps = ([ms / 1e3 for ms in each] for each in (loads_ms, steps_ms))
    if per_length_ms:
        steps = [length * per_length_ms / 1e3 for length in lengths]
    if collate is None and workers and not tensors:
        collate = as_array

    def make() -> tuple[DataLoader[Any], Callable[[Any], None]]:
        each = {"batches": batches, "batch": batch_size or 1, "lengths": lengths, "once": cached}
        loader: DataLoader[Any] = DataLoader(
            Stream(loads, load) if stream else Rows(loads, load, **each),  # type: ignore[arg-type]
            batch_size,
            num_workers=workers,
            collate_fn=collate,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=persistent,
            in_order=in_order,
        )
        return loader, Step(steps, step, per_length=per_length_ms / 1e3, writes=writes)

    def computed(overhead: Overhead) -> float:
        real = seconds_per_batch(
            [0.0] if cached else loads,
            steps,
            workers=workers,
            prefetch=prefetch,
            in_order=in_order,
            batches=None if batches == ENDLESS else batches,
            overhead=overhead,
        )
        return real / statistics.fmean(steps)

    period = math.lcm(len(loads), len(steps))
    return Workload(
        name=name,
        about=about,
        make=make,
        causes=causes,
        computed=computed if computable else None,
        cores=cores,
        settle_s=0.2 + max(loads) * prefetch if workers else 0.0,
        warm_s=batches * (max(loads) + 0.03) if cached else 0.5,
        period=period if period <= 100 else 1,
        load_s=0.0 if cached else statistics.fmean(loads),
        step_s=statistics.fmean(steps),
        step_kind=step,
    )


def _lognormal(mean: float, sigma: float, seed: str) -> list[float]:
    """500 values of a lognormal distribution, scaled to have exactly this mean."""
    generator = random.Random(seed)
    drawn = [generator.lognormvariate(0.0, sigma) for _ in range(500)]
    return [value * mean * len(drawn) / sum(drawn) for value in drawn]


def _with_tokens(tokens: list[str], samples: list[torch.Tensor]) -> dict[str, Any]:
    """Collate to rows and strings, which the main process has to unpickle."""
    return {"row": torch.stack(samples), "tokens": tokens}


def _collate_work(samples: list[torch.Tensor]) -> torch.Tensor:
    burn("work", 0.008)
    return torch.stack(samples)


def _training() -> tuple[DataLoader[Any], Callable[[Any], None]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20_000, 784, generator=generator)
    labels = torch.randint(0, 10, (20_000,), generator=generator)
    loader: DataLoader[Any] = DataLoader(TensorDataset(rows, labels), 256, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return loader, step


def _every(period: int, rare: float, usual: float) -> list[float]:
    return [usual] * (period - 1) + [rare]


def _on_device(
    name: str,
    about: str,
    *,
    loads_ms: Sequence[float] = (1,),
    kernels_ms: Sequence[float] = (30,),
    host_ms: float = 1,
    copy_ms: float = 0,
    side_ms: float = 0,
    causes: frozenset[str] = _INPUT,
    cores: int | None = None,
    computable: bool = True,
    **options: Any,
) -> Workload:
    """A workload on a played device; its truth is computed on a virtual time.

    ``copy_ms`` is what a batch's copy takes, ``host_ms`` the host's part of each launch.
    """
    loop = Loop(
        tuple(load / 1e3 for load in loads_ms),
        tuple(kernel / 1e3 for kernel in kernels_ms),
        host_s=host_ms / 1e3,
        nbytes=round(copy_ms * 10e6),
        side_s=side_ms / 1e3,
        **options,
    )
    return Workload(
        name=f"device_{name}",
        about=about,
        make=lambda: loop.made(RealTime()),
        causes=causes,
        computed=(lambda cost: loop.truth(take_s=cost.take, make_s=cost.make))
        if computable
        else None,
        cores=cores,
        settle_s=0.2 + max(loop.loads) * loop.prefetch if loop.workers else 0.2,
        warm_s=1.0,
        load_s=statistics.fmean(loop.loads),
        step_s=max(
            loop.launches * each for each in (host_ms / 1e3, statistics.fmean(loop.kernels))
        ),
        device="meta" if copy_ms and not loop.ahead else None,
        loop=loop,
    )


_VARIED = tuple(5 + 7 * k % 31 for k in range(31))  # 5 to 35 columns, mean 20, in mixed order

_SERIAL = [
    _known("serial_double", "waits as long as it steps", loads_ms=(10,), steps_ms=(10,)),
    _known("serial_eighth", "12 % of a long step", loads_ms=(3.6,), steps_ms=(30,)),
    _known("serial_twentieth", "5 %: neither large nor small", loads_ms=(1.5,), steps_ms=(30,)),
    _known("serial_hundredth", "1 %", loads_ms=(0.3,), steps_ms=(30,)),
    _known(
        "serial_cpu", "CPU work between steps", loads_ms=(10,), steps_ms=(20,), load="work",
        step="work",
    ),
]  # fmt: skip

_BALANCED = [
    _known("balanced_3", "1 worker, 3 % faster than the step", loads_ms=(38.8,), steps_ms=(40,),
           workers=1),
    _known("balanced_10", "4 workers of 1 batch each, 10 % faster", loads_ms=(144,),
           steps_ms=(40,), workers=4, prefetch=1),
    _known("slower_5", "1 worker, 5 % slower: neither large nor small", loads_ms=(42,),
           steps_ms=(40,), workers=1),
    _known("slower_15", "4 workers with 4 batches each, 15 % slower", loads_ms=(138,),
           steps_ms=(30,), workers=4, prefetch=4),
    _known("workers_tenfold", "2 workers, ten times too slow", loads_ms=(100,), steps_ms=(5,),
           workers=2),
    _known("workers_free", "a worker with almost nothing to do", loads_ms=(1,), steps_ms=(40,),
           workers=1),
    _known("sleeping_step", "a step that waits, as for a device", loads_ms=(20,),
           steps_ms=(60,), workers=2, step="wait"),
    _known("sleeping_step_slow", "the same, 30 % slower than the step", loads_ms=(78,),
           steps_ms=(30,), workers=2, step="wait"),
]  # fmt: skip

_BURSTS = [
    _known("burst_absorbed", "every 8th batch is 4 steps late; 8 batches ahead hide it",
           loads_ms=_every(8, 160, 10), steps_ms=(40,), workers=2, prefetch=4),
    _known("burst_not_absorbed", "every 8th batch is 4 steps late; 1 ahead",
           loads_ms=_every(8, 160, 10), steps_ms=(40,), workers=1, prefetch=1),
    _known("burst_rare", "every 40th batch is 15 steps late; 4 ahead",
           loads_ms=_every(40, 600, 10), steps_ms=(40,), workers=2),
    _known("burst_serial", "every 10th batch waits 60 ms, without workers",
           loads_ms=_every(10, 60, 0), steps_ms=(30,)),
    _known("first_epoch_serial", "a slow first epoch of 4 s, then from memory", loads_ms=(60,),
           steps_ms=(20,), batches=60, cached=True),
    _known("first_epoch_worker", "the same in a persistent worker", loads_ms=(60,),
           steps_ms=(20,), batches=60, cached=True, workers=1, persistent=True),
]  # fmt: skip

_JITTER = [
    _known("jitter_step", "lognormal steps, 2 workers 20 % faster", loads_ms=(48,),
           steps_ms=_lognormal(30, 0.5, "step 0"), workers=2, prefetch=4),
    _known("jitter_step_periodic", "every 10th step is long (checkpointing); the queue refills",
           loads_ms=(36,), steps_ms=_every(10, 150, 10), workers=2),
    _known("jitter_load", "lognormal loads, 2 workers 10 % faster on average",
           loads_ms=_lognormal(54, 0.5, "load 0"), steps_ms=(30,), workers=2),
    _known("jitter_both", "lognormal loads and steps, 2 workers 30 % slower",
           loads_ms=_lognormal(78, 0.4, "load 0"), steps_ms=_lognormal(30, 0.3, "step 0"),
           workers=2),
    _known("jitter_serial", "heavy-tailed waits, half a step on average",
           loads_ms=_lognormal(15, 1.0, "load 0"), steps_ms=(30,)),
]  # fmt: skip

_CORES = [
    _known("one_core", "worker and step share one core: 10 + 30 ms of CPU", loads_ms=(10,),
           steps_ms=(30,), load="work", step="work", workers=1, cores=1, causes=_CONTENTION,
           computable=False),
    _known("one_core_heavy", "the same, preparation the larger part: 40 + 20 ms", loads_ms=(40,),
           steps_ms=(20,), load="work", step="work", workers=1, cores=1, causes=_EITHER,
           computable=False),
    _known("one_core_free", "the same with almost nothing to prepare: 0.3 + 60 ms",
           loads_ms=(0.3,), steps_ms=(60,), load="work", step="work", workers=1, cores=1,
           causes=_EITHER, computable=False),
    _known("two_cores", "2 workers at work 44 ms a batch, steps of 30 ms, on 2 cores",
           loads_ms=(44,), steps_ms=(30,), load="work", step="work", workers=2, cores=2,
           causes=_EITHER, computable=False),
    _known("two_cores_crowded", "4 workers at work 50 ms a batch, steps of 20 ms, on 2 cores",
           loads_ms=(50,), steps_ms=(20,), load="work", step="work", workers=4, cores=2,
           causes=_EITHER, computable=False),
    _known("two_cores_enough", "1 worker at work 20 ms a batch, steps of 40 ms, on 2 cores",
           loads_ms=(20,), steps_ms=(40,), load="work", step="work", workers=1, cores=2,
           causes=_EITHER, computable=False),
]  # fmt: skip

_SHAPES = [
    _known("collate_heavy", "8 ms of CPU in the collate function, without workers",
           steps_ms=(16,), step="work", collate=_collate_work, computable=False),
    _known("collate_strings", "60,000 strings a batch, unpickled by the main process",
           loads_ms=(2,), steps_ms=(20,), workers=2, causes=_EITHER, computable=False,
           collate=partial(_with_tokens, [f"token {number}" for number in range(60_000)])),
    _known("large_batches", "64 rows, 9.6 MB in all, through shared memory", steps_ms=(50,),
           workers=2, batch_size=64, lengths=(3 * 224 * 224 // 4,), tensors=True, causes=_EITHER,
           computable=False),
    _known("tiny_serial", "steps of 100 us over a loader that only stacks rows",
           steps_ms=(0.1,), computable=False),
    _known("tiny_workers", "steps of 200 us, 2 workers that only stack rows", steps_ms=(0.2,),
           workers=2, tensors=True, causes=_EITHER, computable=False),
    Workload("training", "a real network on rows in memory", _training),
    _known("iterable_serial", "an iterable dataset without end or length", loads_ms=(10,),
           steps_ms=(20,), stream=True),
    _known("iterable_workers", "the same from 2 workers, hidden by the step", loads_ms=(30,),
           steps_ms=(40,), workers=2, stream=True),
    _known("ready_batches", "batch_size=None", loads_ms=(9,), steps_ms=(30,), batch_size=None),
    _known("short_epochs", "epochs of 10 batches: workers start again and again",
           loads_ms=(10,), steps_ms=(20,), workers=2, batches=10, computable=False),
    _known("short_persistent", "epochs of 20 batches that each wait for their first",
           loads_ms=(80,), steps_ms=(20,), workers=8, batches=20, persistent=True),
    _known("short_serial", "epochs of 5 batches", loads_ms=(6,), steps_ms=(30,), batches=5),
    _known("writes_slow", "a step that writes into its batch, loader half as slow again",
           loads_ms=(60,), steps_ms=(40,), workers=1, tensors=True, writes=True),
    _known("writes_free", "a step that writes into its batch, loader hidden", loads_ms=(20,),
           steps_ms=(80,), workers=1, tensors=True, writes=True),
    _known("lengths_serial", "step time in proportion to the batch's length, 20 % on top",
           loads_ms=(4,), lengths=_VARIED, per_length_ms=1.0),
    _known("lengths_free", "step time in proportion to the batch's length, loader hidden",
           loads_ms=(10,), workers=2, lengths=_VARIED, per_length_ms=2.0),
    _known("out_of_order", "in_order=False hides a worker's slow batches",
           loads_ms=_every(6, 150, 10), steps_ms=(40,), workers=2, prefetch=3, in_order=False),
    _known("in_order", "the same in order", loads_ms=_every(6, 250, 10), steps_ms=(30,),
           workers=2, prefetch=1),
]  # fmt: skip

_DEVICE = [
    _on_device("hidden", "load 60 ms, step 100 ms", loads_ms=(60,), kernels_ms=(100,),
               host_ms=15, queue=2),
    _on_device("hidden_short", "load 20 ms, step 30 ms", loads_ms=(20,), host_ms=5, queue=2),
    _on_device("below", "load and launch 3 % shorter than the kernel", loads_ms=(92,),
               kernels_ms=(100,), host_ms=5),
    _on_device("at", "load and launch 1 % longer than the kernel", loads_ms=(96,),
               kernels_ms=(100,), host_ms=5),
    _on_device("above_5", "5 % longer: neither large nor small", loads_ms=(100,),
               kernels_ms=(100,), host_ms=5),
    _on_device("above_15", "15 % longer", loads_ms=(29.5,), host_ms=5),
    _on_device("double", "load 200 ms, step 100 ms", loads_ms=(200,), kernels_ms=(100,),
               host_ms=15, queue=2),
    _on_device("launch_bound", "20 launches of 2 ms, kernels of 0.5 ms, load 6 ms",
               loads_ms=(6,), kernels_ms=(0.5,), launches=20, host_ms=2),
    _on_device("launch_bound_free", "the same, load 0.4 ms", loads_ms=(0.4,), kernels_ms=(0.5,),
               launches=20, host_ms=2),
    _on_device("deep_queue", "every 8th load takes 4 steps; the queue holds 10 steps",
               loads_ms=_every(8, 160, 5), kernels_ms=(4,), launches=10, host_ms=0.2, queue=100),
    _on_device("shallow_queue", "the same, the queue holds a fifth of a step",
               loads_ms=_every(8, 160, 5), kernels_ms=(4,), launches=10, host_ms=0.2, queue=2),
    _on_device("deep_queue_above", "load 12 % longer than the step, behind a queue of 10 steps",
               loads_ms=(43,), kernels_ms=(4,), launches=10, host_ms=0.2, queue=100),
    _on_device("accumulation", "gradients accumulated over 5 batches, the 5th three times as long",
               loads_ms=(30,), kernels_ms=_every(5, 90, 30), host_ms=2, queue=8,
               optimizer_every=5),
    _on_device("jitter", "lognormal loads, 30 % shorter than the step, a queue of 8",
               loads_ms=_lognormal(21, 0.5, "load 0"), host_ms=1, queue=8),
    _on_device("workers", "2 workers 20 % faster than the step", loads_ms=(48,), workers=2),
    _on_device("workers_slower", "2 workers 15 % slower", loads_ms=(69,), workers=2),
    _on_device("workers_double", "1 worker that takes twice as long", loads_ms=(60,), workers=1),
    _on_device("workers_burst", "every 8th batch is 4 steps late; 8 batches ahead hide it",
               loads_ms=_every(8, 120, 10), workers=2, prefetch=4),
    _on_device("copy_pinned", "a pinned copy of a third of the step, on its stream", copy_ms=10,
               causes=_TRANSFER),
    _on_device("copy_pinned_small", "a pinned copy of 1 % of the step", copy_ms=0.3,
               causes=_TRANSFER),
    _on_device("copy_pageable", "a pageable copy of a third: the host waits for the device",
               loads_ms=(5,), copy_ms=10, pinned=False, causes=_TRANSFER),
    _on_device("copy_pageable_load", "the same, and a load that the waiting host cannot hide",
               loads_ms=(45,), copy_ms=3, pinned=False),
    _on_device("copy_workers", "batches of a worker, copied pinned: 20 % of the step",
               loads_ms=(20,), workers=1, copy_ms=6, causes=_TRANSFER),
    _on_device("ahead", "the copy of a third of the step on a stream of its own, one ahead",
               copy_ms=10, ahead=1),
    _on_device("ahead_too_slow", "copies that take longer than the step, ahead or not",
               copy_ms=36, ahead=1),
    _on_device("ahead_load", "copies hidden, loads 20 % too slow", loads_ms=(35,), copy_ms=10,
               ahead=1),
    _on_device("item", "the loss is read at each step: a third on top", loads_ms=(10,),
               item_every=1),
    _on_device("item_rare", "the loss is read at every 10th step: 1 % on top", loads_ms=(4,),
               item_every=10),
    _on_device("two_streams", "two kernels beside each other, load hidden", loads_ms=(18,),
               side_ms=24),
    _on_device("two_streams_slow", "the same, load 30 % longer than the longer of them",
               loads_ms=(38,), side_ms=24),
    _on_device("contended", "launches of 3 ms of CPU on a worker's core", loads_ms=(10,),
               kernels_ms=(1,), launches=10, host_ms=3, host_kind="work", load_kind="work",
               workers=1, cores=1, causes=_CONTENTION, computable=False),
    _on_device("contended_hidden", "the same core shared, behind kernels of 60 ms",
               loads_ms=(10,), kernels_ms=(60,), host_ms=5, host_kind="work", load_kind="work",
               workers=1, cores=1, causes=_EITHER, computable=False),
]  # fmt: skip

_SLOW = [
    _known("slow_serial_free", "steps of 1.2 s, 2 % on top", loads_ms=(24,), steps_ms=(1200,)),
    _known("slow_serial", "steps of 1 s, 30 % on top", loads_ms=(300,), steps_ms=(1000,)),
    _known("slow_workers_free", "steps of 0.8 s, 2 workers with little to do", loads_ms=(200,),
           steps_ms=(800,), workers=2),
    _known("slow_workers", "steps of 0.4 s, 2 workers half as slow again", loads_ms=(1200,),
           steps_ms=(400,), workers=2),
]  # fmt: skip

_ON_THE_HOST = [*_SERIAL, *_BALANCED, *_BURSTS, *_JITTER, *_CORES, *_SHAPES, *_SLOW]

_BESIDE_A_NEIGHBOUR = (
    "serial_double", "serial_eighth", "serial_hundredth", "serial_cpu", "balanced_10", "slower_15",
    "workers_free", "workers_tenfold", "sleeping_step", "sleeping_step_slow", "slow_serial_free",
    "slow_workers_free",
)  # fmt: skip

_LOADED = [
    replace(workload, name=f"loaded_{workload.name}", neighbour=True)
    for workload in _ON_THE_HOST
    if workload.name in _BESIDE_A_NEIGHBOUR
]

WORKLOADS: dict[str, Workload] = {
    workload.name: workload for workload in (*_ON_THE_HOST, *_LOADED, *_DEVICE)
}
"""Every workload by its name: ``loaded_`` beside a neighbour, ``device_`` on a played device."""

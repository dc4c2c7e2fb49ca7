"""Seconds a batch of a training loop over torch's loader, computed from times of its stages.

    worker 0  ── batch 0 ── batch 2 ──┐
    worker 1  ── batch 1 ── batch 3 ──┴─ queue: workers x prefetch ──> take ──> step ──> ...

Each stage is measured alone, and a queue puts them together: DS-Analyzer predicts what-if questions
from stage rates (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021),
tf.data models a pipeline as queues of stages to place its parallelism (Murray et al., "tf.data",
VLDB 2021), and Plumber adds what CPU a stage costs, which bounds any parallelism (Kuchnik et al.,
MLSys 2022). Here the queue is torch's own, batch by batch, so that uneven batches count.
"""

from __future__ import annotations

from collections.abc import Sequence


def seconds_per_batch(
    loads: Sequence[float], step_s: float, *, workers: int, prefetch: int = 2, take_s: float = 0.0
) -> float:
    """Return the mean seconds of a batch in the long run.

    As torch does: ``workers * prefetch`` batches are ordered at once, then one for each that is
    taken; batch ``k`` goes to worker ``k % workers``.

    Args:
        loads: seconds to make batch ``k`` are ``loads[k % len(loads)]``.
        step_s: seconds of a step.
        workers: number of workers, at least one.
        prefetch: batches in flight for each worker.
        take_s: seconds of the main process to take a batch that is ready.
    """
    in_flight = workers * prefetch
    skipped = 20 * in_flight + 2 * len(loads)  # the start is left out
    counted = 20 * max(len(loads), 50)
    free_at, taken_at, ends = [0.0] * workers, [0.0] * in_flight, [0.0]
    for k in range(skipped + counted):
        # A batch's place in the queue is free once the batch before it in that place is taken.
        begin = max(free_at[k % workers], taken_at[k % in_flight])
        free_at[k % workers] = begin + loads[k % len(loads)]
        taken_at[k % in_flight] = max(ends[-1], free_at[k % workers]) + take_s
        ends.append(taken_at[k % in_flight] + step_s)
    return (ends[-1] - ends[skipped]) / counted

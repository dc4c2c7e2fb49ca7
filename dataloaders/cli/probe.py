"""``dataloaders probe``: run a script's own loop on growing batches, up to the end of memory.

    this process ──starts──> the script, whose loop gets sizes 64, 128, 256: out of memory
         └── again, with what is known ──> 192: out of memory ── again ──> 160, ... ──> the table

The processes write to a file: each size before it is tried, and its result afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Generator
from pathlib import Path
from typing import Any

from dataloaders.batches.tree import Batch, counter_of_samples, nbytes
from dataloaders.cli.running import (
    NOTHING_MEASURED,
    begin_measuring,
    no_loader,
    untouched_files,
)
from dataloaders.findings import Probe, Trial
from dataloaders.findings.probe import next_size, ran_out, rows_of, trial_steps
from dataloaders.measuring.intervals import Interval
from dataloaders.scripts.takeover import Takeover
from dataloaders.scripts.target import Target
from dataloaders.specification import size_of_batches

_RAN_OUT = 77
"""Exit status of a process whose script ran out of memory."""
_KILLED = (-9, 137)
_FIRST = 8
"""Batches that are looked at, at the least, for the one with the largest samples."""


def carry_out(target: Target, args: list[str], options: Namespace) -> int:
    """Run ``target`` in separate processes until the largest batch is known; print the table.

    Returns 0 if a size could be measured, 130 after Ctrl-C; else 3, or the status of a script that
    failed.
    """
    if options.state is not None:
        return _probe_here(target, args, options, Path(options.state))
    begin_measuring(target, "probe", options.json, quiet=options.quiet)
    with tempfile.TemporaryDirectory(prefix="dataloaders-probe-") as folder:
        state = Path(folder, "state")
        state.touch()
        note = None
        while note is None:
            before = state.read_text()
            try:
                status = _start(target, args, options, state)
            except KeyboardInterrupt:
                status = 130
            trials, unfinished = _known(state)
            if not trials or (state.read_text() == before and status != 130):
                return status or NOTHING_MEASURED
            if status == 130:
                note = "interrupted"
                trials = [one for one in trials if one.batch_size != unfinished]
            elif unfinished is not None and status not in (_RAN_OUT, *_KILLED):
                note = f"the script ended by itself at batch size {unfinished}, status {status}"
            elif next_size(0, trials, options.most) is None:
                break
    result = Probe(tuple(sorted(trials, key=lambda trial: trial.batch_size)))
    print(result.largest if options.quiet else result)
    if note is not None:
        print(f"note: {note}; this is what was known by then")
    if options.json is not None:
        result.to_json(options.json)
    if status == 130 or result.largest is None:
        return status or NOTHING_MEASURED
    return 0


def _start(target: Target, args: list[str], options: Namespace, state: Path) -> int:
    words = ["--state", str(state)]
    for name in ("budget", "most"):
        words += [f"--{name}", str(getattr(options, name))]
    if options.loader is not None:
        words += ["--loader", str(options.loader)]
    words += ["--let-write"] * options.let_write
    script = [target.name] if target.kind == "file" else ["-m", target.name]
    command = [sys.executable, "-m", "dataloaders", "probe", *words, *script, "--", *args]
    return subprocess.run(command, check=False).returncode


def _probe_here(target: Target, args: list[str], options: Namespace, state: Path) -> int:
    def note(**facts: Any) -> None:
        # The next thing may be the end of this process.
        print(json.dumps(facts), file=found, flush=True)

    def probed(loader: Any, iterate: Any) -> Generator[Batch, None, None]:
        batch, of = _largest(loader, iterate, options.budget)
        while (size := next_size(of, trials, options.most)) is not None:
            note(size=size)
            steps = trial_steps(batch, of, size, trials, seconds=options.budget)
            trials.append((yield from steps))
            note(size=size, trial=dataclasses.asdict(trials[-1]))

    trials, _ = _known(state)
    takeover = Takeover(probed, options.loader)
    # Opened before files that exist are protected.
    keeping = untouched_files(takeover, let_write=options.let_write)
    with state.open("a") as found, keeping, takeover:
        outcome = target.run(args)
    sys.stdout.flush()
    if takeover.taken is not None and ran_out(outcome.error):
        return _RAN_OUT
    outcome.show_error()
    return no_loader(takeover, outcome) if takeover.taken is None else outcome.status


def _largest(loader: Any, iterate: Any, seconds: float) -> tuple[Batch, int]:
    """Return the batch with the largest samples, and their number.

    Of padded batches, that is the one with the longest sequence. It is one of the first eight, or
    of those that an epoch yields in so many seconds.
    """
    until = time.perf_counter() + seconds
    batches = iter(iterate())
    largest = next(batches)
    samples_in = counter_of_samples(largest, size_of_batches(loader))

    def each(batch: Batch) -> float:
        return nbytes(batch) / (samples_in(batch) or 1)

    for number, batch in enumerate(batches, 2):
        if each(batch) > each(largest):
            largest = batch
        if number >= _FIRST and time.perf_counter() >= until:
            break
    return largest, samples_in(largest) or rows_of(largest)


def _known(state: Path) -> tuple[list[Trial], int | None]:
    """Return the trials so far, and the last size if its trial did not end."""
    trials: dict[int, Trial] = {}
    unfinished = None
    for line in state.read_text().splitlines():
        facts = json.loads(line)
        size, trial = facts["size"], facts.get("trial")
        unfinished = None if trial else size
        trials[size] = Trial(size, why_not="out of memory")
        if trial:
            seconds = trial.pop("seconds")
            trials[size] = Trial(seconds=seconds and Interval(**seconds), **trial)
    return list(trials.values()), unfinished

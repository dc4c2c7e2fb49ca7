"""Share what the commands that run a script have in common: refusals, protection, messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from dataloaders.errors import DataLoadersError, OptionError
from dataloaders.measuring.progress import ProgressLine
from dataloaders.scripts.scratch import Scratch, quiet_trackers
from dataloaders.scripts.takeover import Takeover
from dataloaders.scripts.target import Outcome, Target, hidden_by
from dataloaders.tuning.learned import cache_folder

NOTHING_MEASURED = 3
"""Exit status when the script ended and nothing could be measured in it."""

_LAUNCHERS = {
    "torchrun": "torchrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate": "accelerate launch",
    "accelerate.commands.launch": "accelerate launch",
}


def refuse_unfit(target: Target, command: str) -> None:
    """Raise DataLoadersError, before anything starts, if the script cannot be run.

    It does not exist, it only starts the processes that train, or its folder has its own
    ``dataloaders``.
    """
    hidden = hidden_by(target.folder)
    if hidden is not None:
        raise DataLoadersError(
            f"{hidden} has the same name as this package, {Path(__file__).resolve().parents[1]}: "
            f"{target.name} can import only one of them as 'dataloaders'; rename yours"
        )
    name = target.name if target.kind == "module" else Path(target.name).name
    launcher = _LAUNCHERS.get(name)
    if launcher is not None:
        raise OptionError(
            f"{target.name} starts the processes that train; put it first, so that {command} runs "
            f"in each of them: {launcher} ... -m dataloaders {command} train.py -- ARGS"
        )
    if command == "tune" and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise OptionError(
            "tune measures one process, and WORLD_SIZE says that there are several: run it "
            f"without a launcher, as dataloaders tune {target.name}; "
            '"auto" plans with each rank\'s share of the machine'
        )
    target.refuse_missing()


def begin_measuring(target: Target, command: str, *paths: str | None, quiet: bool) -> None:
    """Say what a command that measures does to the user's model and files.

    Raises:
        DataLoadersError: the script cannot be run, or a folder to write to does not exist.
    """
    for path in paths:
        if path is not None and Path(path).is_dir():
            raise OptionError(f"{path!r} is a folder; give the path of a file to write")
        if path is not None and not Path(path).parent.is_dir():
            raise OptionError(
                f"{path!r}: the folder {str(Path(path).parent)!r} does not exist; "
                "make it first, or write elsewhere"
            )
    refuse_unfit(target, command)
    if not quiet:
        print(
            f"dataloaders {command} runs {target.name} and trains its model, on some batches many "
            "times: use none of its results. Files that exist are kept (--let-write turns that "
            "off), W&B, MLflow and TensorBoard are off, DATALOADERS_CHECK=1 is set.",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def untouched_files(takeover: Takeover, *, let_write: bool) -> Iterator[Scratch | None]:
    """In the block, trackers are off and files that existed before stay, see `Scratch`."""
    try:
        own: Path | None = cache_folder().absolute()
    except OptionError:  # without a home, nothing is written there
        own = None
    scratch = Scratch(lambda: takeover.optimizers.steps > 0, but_in=own)
    with quiet_trackers(scratch.folder), ExitStack() as stack:
        yield None if let_write else stack.enter_context(scratch)


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restore stdout and stderr after the block: a script may have replaced or closed its own.

    It may also have put a log in the place of descriptor 1, for output of code in C.
    """
    own = os.dup(1)
    try:
        with redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
            yield
    finally:
        if not sys.stdout.closed:
            sys.stdout.flush()  # what the script printed goes to its log
        os.dup2(own, 1)
        os.close(own)
        if sys.stdout.closed:
            sys.stdout = os.fdopen(1, "w", closefd=False)


def run_shown(
    target: Target,
    args: list[str],
    line: ProgressLine,
    shows: Callable[[BaseException | None], bool] = lambda error: True,
) -> Outcome:
    """Run the script; then erase ``line`` and show the error that ended the script, if any."""
    try:
        with streams_kept():
            outcome = target.run(args)
    finally:
        line.close()
    if shows(outcome.error):
        outcome.show_error()
    return outcome


def no_loader(takeover: Takeover, outcome: Outcome, started: int = 0) -> int:
    """Say why nothing was measured in a script that ``started`` processes; return the status."""
    if outcome.ending == "interrupted":
        return outcome.status
    lines = [f"no loader was taken over; the script iterated {len(takeover.seen)} of them"]
    alike = {(seen.description, seen.why_not): seen.number for seen in reversed(takeover.seen)}
    lines += [f"  {n}. {text}: {why}" for (text, why), n in reversed(alike.items())]
    if takeover.left_for is not None:
        lines.append(f"the script was ended, since it {takeover.left_for}")
    if outcome.ending == "raised":
        lines.append("the script failed before that")
    elif takeover.seen:
        # The reason for a refusal says what to do.
        choose = "choose one with --loader N, its number in this list"
        lines += [] if takeover.refused else [choose]
    elif started:
        lines.append(
            f"it started {started} processes, and none of them trained in a loop over a "
            "torch.utils.data.DataLoader that could be taken over; check the script that trains, "
            "under torchrun if there are several ranks"
        )
    else:
        lines.append(
            "only loops over torch.utils.data.DataLoader and its subclasses can be taken over, "
            "and not in a process of a pool or of os.fork(); for any other, call "
            "dataloaders.check_bottleneck(loader, step) in the script"
        )
    print("\n".join(lines), file=sys.stderr)
    return outcome.status or NOTHING_MEASURED

"""The ``dataloaders`` command: its options and its help.

dataloaders check    train.py -- ARGS   is the input pipeline what holds this script back?
dataloaders tune     train.py -- ARGS   which num_workers, prefetch_factor and pin_memory?
dataloaders probe    train.py -- ARGS   which batch sizes fit, and how fast is each?
dataloaders run      train.py -- ARGS   the script on another backend
dataloaders cache    ACTION             a dataset computed once, in one file
dataloaders backends                    what can run here, and why not
dataloaders demo                        all of it on images made on the spot
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dataloaders.cli.cache_options import add_parsers as add_cache_parsers
from dataloaders.cli.similar import options_of, similar

__all__ = ["main"]

_EPILOG = """\
examples:
  dataloaders check train.py -- --epochs 3 --batch-size 64
      runs train.py as it is, measures inside its own training loop, ends it and prints the
      verdict: input-bound, transfer-bound, contention-bound, step-bound or inconclusive
  dataloaders tune train.py -- --epochs 3
      finds the smallest worker setting that keeps up with the script's own step
  dataloaders run --backend synthetic train.py
      runs the script on input that costs nothing
  dataloaders cache build mypackage.data:training_set train.h5
      computes what the dataset's transforms do before the first random one, once
  dataloaders demo
      shows the check and the tuning on photographs that it makes itself
"""

_CHECK = """\
Runs an unmodified training script and takes over its first training loader: the loop's own body
is the step that is measured, on real and on synthetic input in turn. When enough is known the
script is ended and the report printed. Nothing in the script needs to change.

The loader taken over is the first one in whose loop an optimizer steps; in a script without an
optimizer, the first one that is iterated with gradients on. Its epochs have at least 4 batches (or
no length). --loader chooses another.

The script's model is trained, on some batches many times. So files that existed before are not
overwritten or deleted: checkpoints go to a folder that the notes name (--let-write turns that off).
W&B, MLflow and TensorBoard are switched off, and DATALOADERS_CHECK=1 is set for the script.

Where the input costs something, the report also says of which calls preparation consists and what
each remedy would gain, or why it cannot be used (--no-predict turns that off, --try runs them).

Under torchrun every rank measures at the same time, and rank 0 reports:
  torchrun --nproc-per-node 2 -m dataloaders check train.py -- ARGS
"""

_CHECK_EPILOG = """\
exit status:
   0  measured, whatever the verdict is
   1  the verdict is one of those that --fail-if names
   2  the command cannot be carried out as it was given
   3  nothing could be measured: no loader was taken over
 130  Ctrl-C; what was known by then is printed
      the script's own, if it fails by itself

examples:
  dataloaders check train.py
  dataloaders check --budget 60 --json report.json train.py -- --data photos --epochs 5
  dataloaders check -m mypackage.train -- --config small.yaml
  dataloaders check --json before.json train.py
  dataloaders check --against before.json --html report.html train.py   (after a change)
  dataloaders check --markdown "$GITHUB_STEP_SUMMARY" --fail-if input-bound train.py
"""

_TUNE = """\
Runs an unmodified training script, measures how many samples a second its own step takes, and
tries worker settings on its loader until it has the smallest that keeps up. Prints the trials and
the line to change. The choice is remembered: num_workers="auto" uses it from then on. Where the
step computes on the CPU, fewer threads for it (torch.set_num_threads) are tried with workers. With
--backend dali, or where the loader has that backend, what is tried are its threads and depth.

With --backends it checks first what each change of the input would gain (see dataloaders check),
then tries each one that may gain anything in the script's loop, in turns with the loader as it is.
The best way is remembered for this dataset, script and machine: backend="auto" uses it from then
on, and loader.explain() says which it is and since when. h5 is tried with --cache FILE only: that
cache, which is built first if it is missing and the prediction says that it may gain.
"""

_PROBE = """\
Runs an unmodified training script on batches of other sizes, made by repeating the samples of its
first ones (the longest of eight): sizes double until memory ends, then the gap is halved. Prints
samples a second and memory at each size, and the largest that fits. The script is started anew
after each size that does not fit, so that it may also be killed for it.
"""

_RUN = """\
Runs an unmodified script with its DataLoaders on another backend (as DATALOADERS_BACKEND=NAME does
for loaders of ours). A loader that the backend cannot serve stays stock, with one warning.
"""

_DEMO = """\
Makes about 300 JPEG photographs once, checks examples/train_images.py on them as it is, tunes its
loader, and checks again; if it still waits for input, also with a cache of the decoded images.
Takes less than two minutes on two cores, without a GPU.
"""

_VERDICTS = ("input-bound", "transfer-bound", "contention-bound", "step-bound", "inconclusive")


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line; returns the exit status.

    Raises:
        SystemExit: for ``--help``, and with status 2 for options that cannot be parsed.
    """
    parser = _parser()
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        near = similar(unknown[0].partition("=")[0], options_of(parser))
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    if parsed.command is None:
        parser.print_help()
        return 2
    from dataloaders.errors import DataLoadersError

    try:
        status = _carry_out(parsed)
        print(end="", flush=True)  # there may be no stdout
        return status
    except DataLoadersError as error:
        print(f"dataloaders {parsed.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in `dataloaders backends | head -3`: enough was read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141
    except KeyboardInterrupt as error:
        if error.args:  # what of its work is kept
            print(f"dataloaders {parsed.command}: {error}", file=sys.stderr)
        return 130


def _carry_out(parsed: argparse.Namespace) -> int:
    if parsed.command == "backends":
        from dataloaders.cli import listing

        return listing.backends()
    if parsed.command == "cache":
        from dataloaders.cli import cache

        return cache.carry_out(parsed)
    if parsed.command == "demo":
        from dataloaders.cli import demo

        return demo.demo(images=parsed.images, budget_s=parsed.budget)

    from dataloaders.errors import OptionError
    from dataloaders.scripts.target import Target

    words = [*(parsed.module or ()), *parsed.script]
    if not words:
        raise OptionError(
            "no script was given; give its path, or -m and a module's name: "
            f"dataloaders {parsed.command} train.py -- ARGS"
        )
    target = Target(words[0], "file" if parsed.module is None else "module")
    args = words[2:] if words[1:2] == ["--"] else words[1:]
    if parsed.command == "run":
        from dataloaders.cli.run import run

        return run(target, args, backend=parsed.backend, explain=parsed.explain)
    if parsed.command == "probe":
        from dataloaders.cli.probe import probe

        return probe(target, args, parsed)
    if parsed.command == "tune":
        from dataloaders.cli.tune import tune

        return tune(target, args, parsed)
    from dataloaders.cli.check import check

    return check(target, args, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dataloaders",
        description="Find out whether the input pipeline holds your training back; "
        "if it does, change one argument.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, help_: str, usage: str, text: str, epilog: str = "") -> _Parser:
        return commands.add_parser(
            name,
            help=help_,
            usage=f"dataloaders {name} {usage}",
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_script(name: str, help_: str, text: str, epilog: str = "") -> _Parser:
        usage = "[OPTIONS] {train.py | -m MODULE} [--] [ARGS]"
        parser = add(name, help_, usage, text, epilog)
        # Each takes all that follows: that belongs to the script.
        parser.add_argument("script", nargs=argparse.REMAINDER, help="a file, and its arguments")
        parser.add_argument(
            "-m", nargs=argparse.REMAINDER, dest="module", help="a module, as with python -m"
        )
        return parser

    check = add_script(
        "check", "is the input pipeline what holds a script back?", _CHECK, _CHECK_EPILOG
    )
    _add_measuring(check)
    for name, help_ in (
        ("--html", "write a page with charts, one file"),
        ("--against", "compare with the report in an earlier --json"),
        ("--markdown", "write a summary for a pull request; -: print that instead"),
        ("--trace", "write the last measured steps for ui.perfetto.dev"),
    ):
        check.add_argument(name, metavar="F", help=help_)
    check.add_argument(
        "--fail-if",
        type=_verdicts,
        default=(),
        metavar="VERDICTS",
        help="exit with 1 for these, separated by commas: " + ", ".join(_VERDICTS),
    )
    remedies = check.add_mutually_exclusive_group()
    remedies.add_argument(
        "--try",
        action="store_true",
        dest="try_candidates",
        help="run each remedy that needs no build in the script's loop, beside its prediction",
    )
    remedies.add_argument(
        "--no-predict",
        action="store_false",
        dest="predict",
        help="do not look for what preparation consists of, and what remedies would gain",
    )
    check.add_argument(
        "--advise",
        action="store_true",
        help="measure what autocast, TF32 and cuDNN's autotuner gain, where they apply",
    )
    tune = add_script(
        "tune", "which num_workers, prefetch_factor and pin_memory, or which backend?", _TUNE
    )
    _add_measuring(tune)
    which = tune.add_mutually_exclusive_group()
    which.add_argument("--backend", metavar="NAME", help="tune for this one, as run uses it")
    which.add_argument(
        "--backends", action="store_true", help="try what may gain, backends too; keep the best"
    )
    tune.add_argument(
        "--cache", metavar="F", help="with --backends: try h5 with this cache; built if missing"
    )
    probe = add_script("probe", "which batch sizes fit, and how fast is each?", _PROBE)
    _add_measuring(probe, 1.0, "measure each batch size for S seconds")
    probe.add_argument(
        "--most", type=_count, default=1 << 20, metavar="N", help="try no larger batch than N"
    )
    probe.add_argument("--state", help=argparse.SUPPRESS)  # for the processes that it starts
    run = add_script("run", "run a script on another backend", _RUN)
    run.add_argument("--backend", required=True, metavar="NAME", help="see dataloaders backends")
    run.add_argument(
        "--explain", action="store_true", help="print each loader's plan when first iterated"
    )
    add_cache_parsers(commands)
    add("backends", "what can run here, and why not", "", "Lists every backend.")
    demo = add("demo", "all of it on images made on the spot", "[--images F] [--budget S]", _DEMO)
    demo.add_argument(
        "--images", metavar="FOLDER", help="use these instead: one folder of images for each class"
    )
    demo.add_argument(
        "--budget", type=_seconds, default=25.0, metavar="S", help="seconds for each part (25)"
    )
    return parser


_Parser = argparse.ArgumentParser


def _add_measuring(
    parser: _Parser,
    budget_s: float = 30.0,
    budget: str = "measure for at most S seconds, fewer if the answer is clear earlier",
) -> None:
    parser.add_argument(
        "--budget", type=_seconds, default=budget_s, metavar="S", help=f"{budget} ({budget_s:.0f})"
    )
    parser.add_argument(
        "--loader",
        type=_count,
        metavar="N",
        help="take the N-th loader that the script iterates, whatever it is",
    )
    parser.add_argument("--json", metavar="F", help="write the result as JSON, too")
    parser.add_argument(
        "--let-write",
        action="store_true",
        help="let the script overwrite and delete its files, as it does in training",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="no progress, and the result in one line"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number of seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more; loaders are numbered from 1")
    return value


def _verdicts(text: str) -> tuple[str, ...]:
    verdicts = tuple(text.split(","))
    for one in verdicts:
        if one not in _VERDICTS:
            raise argparse.ArgumentTypeError(f"{one!r}: the verdicts are {', '.join(_VERDICTS)}")
    return verdicts

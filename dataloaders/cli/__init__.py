"""The ``dataloaders`` command: its options and its help.

dataloaders check    train.py -- ARGS   is the input pipeline what holds this script back?
dataloaders tune     train.py -- ARGS   which num_workers, prefetch_factor and pin_memory?
dataloaders run      train.py -- ARGS   the script on another backend
dataloaders cache    ACTION             a dataset computed once, in one file
dataloaders backends                    what can run here, and why not
dataloaders demo                        the check on photographs that it makes first
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from dataloaders.cli.cache_options import add_parsers as add_cache_parsers

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
      computes once what the dataset's transforms do before the first random one
  dataloaders demo
      shows the check on photographs that it makes itself
"""

_CHECK = """\
Runs an unmodified training script and measures its first training loop: the loop's own body is the
step, on real and on synthetic input in turns. Once enough is known, the script is ended and the
report printed. Nothing in the script needs to change.

The training loop is the first one in which an optimizer steps; in a script without an optimizer,
the first one with gradients on. Its epochs have at least 4 batches (or no length). --loader chooses
another loader.

The script's model is trained, on some batches many times. So files that existed before are not
overwritten or deleted: checkpoints go to a folder that the notes name (--let-write turns that off).
W&B, MLflow and TensorBoard are switched off, and DATALOADERS_CHECK=1 is set for the script.

If the input costs something, the report also says which calls preparation consists of, and what
each change would gain or why it cannot be made (--try runs the changes). If the step is the limit,
the report names what slows the step down, and measures the gain of settings that can be switched
from outside, such as autocast. --no-predict turns both off.

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
  dataloaders check --against report.json --html report.html train.py   (after a change)
  dataloaders check --markdown "$GITHUB_STEP_SUMMARY" --fail-if input-bound train.py
"""

_TUNE = """\
Runs an unmodified training script, measures how many samples a second its step takes, and tries
worker settings on its loader to find the smallest that keeps up. Prints the trials and the line to
change. The choice is remembered: num_workers="auto" uses it from then on.

With --backends it predicts what each change of the input would gain, as dataloaders check does, and
tries those that may be the best in the script's loop, between two turns of the loader as it is. The
best way is remembered for this dataset, script and machine: backend="auto" uses it from then on,
and loader.explain() says which it is and since when. h5 is tried only with --cache FILE; that cache
is built if it is missing.

examples:
  dataloaders tune train.py -- --epochs 3
  dataloaders tune --backends --cache train.h5 train.py
"""

_RUN = """\
Runs an unmodified script with its DataLoaders on another backend (as DATALOADERS_BACKEND=NAME does
for our loaders), also in processes that it starts by multiprocessing, as mp.spawn does. A loader
that the backend cannot serve stays stock, with one warning.

examples:
  dataloaders run --backend prefetch --explain train.py -- --epochs 3
  DATALOADERS_CACHE=caches dataloaders run --backend h5 train.py
"""

_DEMO = """\
Makes about 300 JPEG photographs, once; checks examples/train_images.py on them; tries each change:
more workers, other backends, a cache. Takes about a minute on two cores without a GPU.

example:
  dataloaders demo --budget 10
"""

_VERDICTS = ("input-bound", "transfer-bound", "contention-bound", "step-bound", "inconclusive")
_SCRIPT = "[OPTIONS] {train.py | -m MODULE} [--] [ARGS]"


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line; return the exit status.

    Raises:
        SystemExit: for ``--help``, and with status 2 for options that cannot be parsed.
    """
    parser = _parser()
    parsed = parser.parse_args(argv)
    if parsed.command is None:
        parser.print_help()
        return 2
    from dataloaders.errors import DataLoadersError

    try:
        status = _carry_out(parsed)
        print(end="", flush=True)  # there may be no stdout
        if argv is None and parsed.command in ("check", "tune"):
            from dataloaders.scripts.stopping import end_soon

            end_soon(status)
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
    carry_out: Callable[..., int]
    carry_out = importlib.import_module(f"dataloaders.cli.{parsed.command}").carry_out
    if "script" not in parsed:
        return carry_out(parsed)
    from dataloaders.errors import OptionError
    from dataloaders.scripts.target import Target

    words = [*(parsed.module or ()), *parsed.script]
    if not words:
        raise OptionError(
            "no script was given; give its path, or -m and a module's name: "
            f"dataloaders {parsed.command} train.py -- ARGS"
        )
    target = Target(words[0], "file" if parsed.module is None else "module")
    return carry_out(target, words[2:] if words[1:2] == ["--"] else words[1:], parsed)


def _parser() -> argparse.ArgumentParser:
    layout: Any = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    about = "Find out whether the input pipeline holds your training back; "
    about += "if it does, change one argument."
    parser = argparse.ArgumentParser("dataloaders", description=about, epilog=_EPILOG, **layout)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, help_: str, text: str, epilog: str = "", usage: str = _SCRIPT) -> Any:
        usage = f"dataloaders {name} {usage}"
        added = commands.add_parser(
            name, help=help_, usage=usage, description=text, epilog=epilog, **layout
        )
        if usage.endswith(_SCRIPT):  # each takes all that follows: that belongs to the script
            rest: Any = {"nargs": argparse.REMAINDER}
            added.add_argument("script", help="a file, and its arguments", **rest)
            added.add_argument("-m", dest="module", help="a module, as with python -m", **rest)
        return added

    check = add("check", "is the input pipeline what holds a script back?", _CHECK, _CHECK_EPILOG)
    _add_measuring(check)
    for name, help_ in (
        ("--html", "write a page with charts, one file"),
        ("--against", "compare with the report in an earlier --json"),
        ("--markdown", "write a summary for a pull request; -: print that instead"),
        ("--trace", "write the last measured steps for ui.perfetto.dev"),
    ):
        check.add_argument(name, type=_path, metavar="F", help=help_)
    verdicts = "exit with 1 for these, separated by commas: " + ", ".join(_VERDICTS)
    check.add_argument("--fail-if", type=_verdicts, default=(), metavar="VERDICTS", help=verdicts)
    remedies = check.add_mutually_exclusive_group()
    remedies.add_argument(
        "--try",
        action="store_true",
        dest="try_candidates",
        help="run each change in the script's loop, and print its gain beside the prediction",
    )
    remedies.add_argument(
        "--no-predict",
        action="store_false",
        dest="predict",
        help="do not find out what changes of the input or settings of the step would gain",
    )
    tune = add("tune", "which num_workers, prefetch_factor and pin_memory, or backend?", _TUNE)
    _add_measuring(tune)
    ways = "try what may gain, backends too; keep the best"
    tune.add_argument("--backends", action="store_true", help=ways)
    with_cache = "with --backends: h5 is among the ways, with this cache; built if missing"
    tune.add_argument("--cache", type=_path, metavar="F", help=with_cache)
    # With --backends it is a check.
    unused = dict.fromkeys(("html", "against", "markdown", "trace"))
    tune.set_defaults(**unused, fail_if=(), predict=True, try_candidates=True, remember=True)
    check.set_defaults(cache=None, remember=False)
    run = add("run", "run a script on another backend", _RUN)
    run.add_argument("--backend", required=True, metavar="NAME", help="see dataloaders backends")
    plans = "print each loader's plan when first iterated"
    run.add_argument("--explain", action="store_true", help=plans)
    add_cache_parsers(commands)
    add("backends", "what can run here, and why not", "Lists every backend.", usage="")
    demo = add("demo", "the check on images made on the spot", _DEMO, usage="[--budget S]")
    _add_budget(demo, 25.0, "seconds for the check, and about as many for the remedies")
    return parser


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    about = "measure for at most S seconds, fewer if the answer is clear earlier"
    _add_budget(parser, 30.0, about)
    loader = "take the N-th loader that the script iterates, whatever it is"
    parser.add_argument("--loader", type=_count, metavar="N", help=loader)
    parser.add_argument("--json", type=_path, metavar="F", help="write the result as JSON, too")
    for name, help_ in (
        ("--let-write", "let the script overwrite and delete its files, as it does in training"),
        ("--quiet", "no progress, and the result in one line"),
    ):
        parser.add_argument(name, action="store_true", help=help_)


def _add_budget(parser: argparse.ArgumentParser, budget_s: float, about: str) -> None:
    help_ = f"{about} ({budget_s:.0f})"
    parser.add_argument("--budget", type=_seconds, default=budget_s, metavar="S", help=help_)


def _path(text: str) -> str:
    return text if text == "-" else os.path.abspath(text)  # the script may change the folder


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text}: must be a positive number of seconds")


def _count(text: str) -> int:
    with suppress(ValueError):
        if (value := int(text)) >= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text}: must be a whole number, 1 or more")


def _verdicts(text: str) -> tuple[str, ...]:
    verdicts = tuple(text.split(","))
    for one in verdicts:
        if one not in _VERDICTS:
            raise argparse.ArgumentTypeError(f"{one!r}: the verdicts are {', '.join(_VERDICTS)}")
    return verdicts

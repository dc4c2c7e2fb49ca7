"""``dataloaders cache``: build, join, look at, check, take apart, list and delete caches."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloaders.errors import OptionError

if TYPE_CHECKING:
    from dataloaders.cache import CachedDataset
    from dataloaders.cache.estimation import Estimate
    from dataloaders.cache.progress import BuildProgress

__all__ = ["add_parsers", "carry_out"]

_CACHE = """\
A cache holds what a dataset gives before anything random happens to it, in one HDF5 file: decoded
and resized once, read at the speed of memory from then on. It is worth it where the check says
input-bound and a profile says decoding.
"""

_CACHE_EPILOG = """\
examples:
  dataloaders cache build mypackage.data:training_set train.h5
      training_set is a dataset, or a function without arguments that returns one; what its
      transforms do before the first random one is computed and kept, the rest stays live
  dataloaders cache build photos/train train.h5 --resize 256 --crop 256
      a folder with one folder of images for each class
  dataloaders cache build photos/train train.h5 --images jpeg --quality 90 --max-side 512
      a tenth of the room or less; reading then decodes
  dataloaders cache build photos/train train.h5 --images packed
      the files themselves, all transforms live
  dataloaders cache build mypackage.data:training_set small.h5 --compress zstd --level 9
  dataloaders cache info train.h5 --sheet train.png
  dataloaders cache verify train.h5
  torchrun --nproc-per-node 4 -m dataloaders cache build mypackage.data:training_set train.h5
      four processes, each a shard, that train.h5 joins; on several machines as well

then, in the script:
  from dataloaders.cache import CachedDataset
  loader = DataLoader(CachedDataset("train.h5", transform=...), ...)
"""

_BUILD = """\
Reads every sample once, in parallel, and writes one file. Ctrl-C and crashes lose nothing that was
finished: the same command goes on where it stopped. A second process that builds the same file
waits for the first.

Under torchrun (RANK and WORLD_SIZE say so) each rank builds a shard of its own beside the path,
such as train.00003-of-00008.h5, and when all are there one of them joins them: train.h5 then reads
as one cache. With torchrun --max-restarts N a rank that dies loses only what it had not finished.
Give --shard RANK/OF where something else starts the processes (Slurm: --shard
$SLURM_PROCID/$SLURM_NTASKS), and --no-wait where the machines share no folder: then copy the shards
into one and run dataloaders cache join.
"""

_BUILD_EPILOG = """\
examples:
  dataloaders cache build photos/train train.h5 --resize 256 --crop 256
  dataloaders cache build mypackage.data:training_set train.h5 --workers 8
  dataloaders cache build data.py:training_set train.h5 --images image=jpeg,mask=png --quality 95

Exit status 0: the file is there and whole; 2: it cannot be built as it was asked for; 130: Ctrl-C.
"""

_JOIN = """\
Joins shards that were built with --no-wait and copied into one folder: writes the file PATH that
reads as one cache of all of them. They stay as they are, and have to stay beside it.
"""

_JOIN_EPILOG = """\
example:
  dataloaders cache build data:train train.h5 --shard 0/2 --no-wait   # on one machine
  dataloaders cache build data:train train.h5 --shard 1/2 --no-wait   # on another one
  dataloaders cache join train.h5      # where train.00000-of-00002.h5 and the other one now are
"""

_INFO = """\
Prints each column with its kind, type, the shape of a row and its size; the transforms that were
computed (the head) and those that are left to run live (the tail); classes; what the cache was
built from; and the samples that were left out. --sheet draws the first 64 images as they are kept:
a look at what a training will see.
"""

_INFO_EPILOG = """\
example:
  dataloaders cache info train.h5 --sheet train.png
"""

_VERIFY = """\
Reads the whole file and compares every block with its checksum: any flipped bit is found, and what
it hit is named; of a joined cache all shards are read. Exit status 0: whole; 1: damaged, with a
line for each damaged part.
"""

_EXTRACT = """\
Writes samples as plain files into a new folder: images as PNG (TIFF where PNG lacks their mode),
encoded and packed ones as the files that they are, large arrays as .npy, and the rest as
samples.jsonl, one line a row.
"""

_EXTRACT_EPILOG = """\
examples:
  dataloaders cache extract train.h5 look               # the first 16 rows
  dataloaders cache extract train.h5 look --rows 100:200
  dataloaders cache extract train.h5 all --rows :       # every row
"""

_FOLDER = """\
the user's cache folder: $DATALOADERS_CACHE/h5, else
$XDG_CACHE_HOME/gpu-dataloaders/h5, else ~/.cache/gpu-dataloaders/h5
"""

_LIST = f"""\
Name, size, last use and contents of the caches that backend="h5" built without a path, interrupted
builds included, in {_FOLDER}
"""

_PRUNE = f"""\
Deletes what was not used for some time from {_FOLDER}
Says what it would delete; --yes does it. A build that is under way is kept. A cache that is deleted
is built again when it is next asked for. The time of the last use is the file system's: where that
does not keep it (noatime), it is the time when the cache was built.
"""

_PRUNE_EPILOG = """\
examples:
  dataloaders cache prune                    # what was not used for 30 days
  dataloaders cache prune --unused 7 --yes
"""


def _shard(text: str) -> tuple[int, int]:
    rank, slash, of = text.partition("/")
    if not slash or not rank.isdecimal() or not of.isdecimal() or not int(rank) < int(of):
        raise argparse.ArgumentTypeError(
            f"{text}: give RANK/OF, such as 3/8: which one, counted from 0, and how many there are"
        )
    return int(rank), int(of)


def _pixels(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number of pixels from 1 on")
    return int(text)


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = math.nan
    if not days >= 0:
        raise argparse.ArgumentTypeError(f"{text}: give a number of days from 0 on")
    return days


def _option(help_: str, metavar: str | None = None, **how: Any) -> dict[str, Any]:
    return {"help": help_, **({"metavar": metavar} if metavar else {}), **how}


def _flag(help_: str, **how: Any) -> dict[str, Any]:
    return {"help": help_, "action": "store_true", **how}


Arguments = dict[str, dict[str, Any]]

# With the name of an argument of `precompute` as dest: the value goes to it as it is.
_BUILD_OPTIONS: Arguments = {
    "dataset": _option("module:name or file.py:name of a dataset, or a folder of images"),
    "path": _option("the file to write, such as train.h5"),
    "--workers": _option(
        "processes (as many as cores)", "N", type=int, dest="num_workers", default=argparse.SUPPRESS
    ),
    "--resize": _option("of a folder: the shorter side", "N", type=_pixels),
    "--crop": _option("of a folder: the middle N x N", "N", type=_pixels),
    "--images": _option(
        "raw, jpeg, png, webp, packed (the dataset's own files), or some of the first four by "
        "column, as in image=jpeg,mask=png (raw)",
        "HOW",
    ),
    "--quality": _option("of jpeg, 1 to 100 (90)", "N", type=int),
    "--max-side": _option("of encoded images: larger ones are made smaller", "N", type=int),
    "--skip": _option(
        "leave out samples that fail; info lists them",
        action="store_const",
        const="skip",
        default="raise",
        dest="on_error",
    ),
    "--allow-random": _flag(
        "keep one draw of each sample of a dataset that draws random numbers", dest="allow_random"
    ),
    "--overwrite": _flag("begin anew, whatever there is at the path", dest="overwrite"),
    "--check": _option(
        "of a file that is there: compare a few samples with it, too",
        choices=["contents"],
        dest="check",
    ),
    "--compress": _option(
        "zstd (small) or blosc (fast to read); takes the extra gpu-dataloaders[compressed]", "CODEC"
    ),
    "--level": _option("of --compress: zstd 1 to 22 (3), blosc 1 to 9 (9)", "N", type=int),
    "--shard": _option("this part only, such as 3/8 (of torchrun's)", "RANK/OF", type=_shard),
    "--no-wait": _option(
        "of a shard: do not wait for the others, nor join", action="store_false", dest="wait"
    ),
    "--quiet": _flag("no progress"),
}
_PATH: Arguments = {"path": _option("of the cache")}
# Action -> one line about it, its description, its examples, its arguments.
_ACTIONS: dict[str, tuple[str, str, str | None, Arguments]] = {
    "build": ("compute a dataset's samples once", _BUILD, _BUILD_EPILOG, _BUILD_OPTIONS),
    "join": (
        "make one cache of shards that were built apart",
        _JOIN,
        _JOIN_EPILOG,
        {"path": _option("the file to write, such as train.h5, beside its shards")},
    ),
    "info": (
        "what is in a cache",
        _INFO,
        _INFO_EPILOG,
        {**_PATH, "--sheet": _option("draw the first images into this PNG file", "F")},
    ),
    "verify": ("find any flipped bit", _VERIFY, None, {**_PATH, "--quiet": _flag("no progress")}),
    "extract": (
        "samples as plain files",
        _EXTRACT,
        _EXTRACT_EPILOG,
        {
            **_PATH,
            "folder": _option("made if it does not exist"),
            "--rows": _option("which rows (the first 16)", "A:B"),
            "--overwrite": _flag("though something is in it"),
        },
    ),
    "list": ("caches in the user's cache folder", _LIST, None, {}),
    "prune": (
        "delete caches from the user's cache folder",
        _PRUNE,
        _PRUNE_EPILOG,
        {
            "--unused": _option("not used for so long (30)", "DAYS", type=_days, default=30.0),
            "--yes": _flag("delete them"),
        },
    ),
}


def add_parsers(commands: Any) -> None:
    """Add ``cache`` and what it can do to the subcommands of the parser."""

    def add(to: Any, name: str, about: str, text: str, epilog: str | None) -> Any:
        return to.add_parser(
            name,
            help=about,
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    about = "precompute a dataset into one file, and look after it"
    cache = add(commands, "cache", about, _CACHE, _CACHE_EPILOG)
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (about, text, epilog, arguments) in _ACTIONS.items():
        action = add(actions, name, about, text, epilog)
        for argument, how in arguments.items():
            action.add_argument(argument, **how)


def carry_out(parsed: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    if parsed.action == "build":
        return _build(parsed)
    if parsed.action == "join":
        return _join(parsed)
    if parsed.action == "verify":
        return _verify(parsed.path, quiet=parsed.quiet)
    if parsed.action == "info":
        from dataloaders.cli import cache_info

        return cache_info.info(parsed.path, sheet=parsed.sheet)
    if parsed.action == "extract":
        from dataloaders.cli.cache_extract import extract

        return extract(parsed.path, parsed.folder, rows=parsed.rows, overwrite=parsed.overwrite)
    from dataloaders.cli import cache_folder

    if parsed.action == "list":
        return cache_folder.show()
    return cache_folder.prune(parsed.unused, delete=parsed.yes)


def _build(parsed: argparse.Namespace) -> int:
    from dataloaders.cache import Compressed, precompute
    from dataloaders.cli.cache_source import dataset_of, images_of

    if parsed.level is not None and parsed.compress is None:
        raise OptionError(f"--level {parsed.level}: give --compress too, whose level it is")
    names = [how["dest"] for how in _BUILD_OPTIONS.values() if "dest" in how]
    given = {name: getattr(parsed, name) for name in names if name in parsed}
    rank = given["shard"] = parsed.shard or _shard_of_rank()
    if not parsed.wait and rank is None:
        raise OptionError("--no-wait is for shards: give --shard RANK/OF, or start it by torchrun")
    # A rank that torchrun starts again goes on with what it had begun anew.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")
    given["overwrite"] = parsed.overwrite and not restarted
    # One of the ranks on a terminal speaks for all, of which each would say the same.
    speaks = rank is None or not parsed.wait or rank[0] == 0
    dataset = dataset_of(parsed.dataset, resize=parsed.resize, crop=parsed.crop)
    before = None if parsed.overwrite else _stamp(parsed.path)
    with _Progress(quiet=parsed.quiet or not speaks) as progress:
        cached = precompute(
            dataset,
            parsed.path,
            images=images_of(parsed.images, quality=parsed.quality, max_side=parsed.max_side),
            compress=parsed.compress and Compressed(parsed.compress, parsed.level),
            progress=progress,
            announce=progress.announce,
            **given,
        )
    if not speaks:
        return 0
    path = parsed.path if parsed.wait else cached.path
    same = ", built before" if before is not None and before == _stamp(parsed.path) else ""
    print(f"{path}: {_summary(cached)}{same}")
    if cached.failed:
        print(f"{len(cached.failed)} samples were left out; dataloaders cache info lists them")
    return 0


def _shard_of_rank() -> tuple[int, int] | None:
    """Return the rank that torchrun says this process is; None if there is only one."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal() or int(world) < 2:
        return None
    if not rank.isdecimal() or int(rank) >= int(world):
        raise OptionError(
            f"WORLD_SIZE={world} and RANK={rank!r} in the environment say nothing of a shard; give "
            "--shard RANK/OF, or unset them"
        )
    return int(rank), int(world)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _join(parsed: argparse.Namespace) -> int:
    from dataloaders.cache import CachedDataset, join

    join(parsed.path)
    print(f"{parsed.path}: {_summary(CachedDataset(parsed.path))}")
    print(f"dataloaders cache verify {parsed.path} finds what was damaged on the way")
    return 0


def _summary(cached: CachedDataset) -> str:
    from dataloaders.cache.disk import size_of

    shards = f" in {len(cached.shards)} shards" if cached.shards else ""
    return f"{len(cached):,} samples{shards}, {size_of(cached.index.all_bytes)}"


def _verify(path: str, *, quiet: bool) -> int:
    from dataloaders.cache import verify
    from dataloaders.cache.disk import size_of
    from dataloaders.cache.shards import listed
    from dataloaders.cli.progress import ProgressLine

    line = ProgressLine(quiet=quiet)
    damages = verify(
        Path(path), lambda done, whole: line(f"verify  {size_of(done)} of {size_of(whole)}")
    )
    line.close()
    if not damages:
        print(f"{path} is whole")
        return 0
    for damage in damages:
        where = f"{damage.shard}: " if damage.shard else ""
        print(f"{where}{damage.what} (bytes {damage.offset} to {damage.offset + damage.bytes})")
    shards = sorted({damage.shard for damage in damages} - {""})
    if shards:
        print(f"{path} is damaged: delete these shards ({listed(shards)}) and build again")
    elif "is no cache" in damages[0].what:  # overwriting it may not be what is wanted
        print(f"if {path} was one, its first bytes are damaged: delete it, build it again")
    else:
        print(f"{path} is damaged: build it again, dataloaders cache build --overwrite")
    return 1


class _Progress:
    """A build's progress on stderr, in one line."""

    def __init__(self, *, quiet: bool) -> None:
        from dataloaders.cli.progress import ProgressLine

        self._quiet = quiet
        self._line = ProgressLine(quiet=quiet)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def announce(self, estimate: Estimate) -> None:
        """Show what it will take."""
        if not self._quiet:
            for text in filter(None, (str(estimate), estimate.advice)):
                print(f"build  {text}", file=sys.stderr)

    def __call__(self, progress: BuildProgress) -> None:
        """Show ``progress``."""
        from dataloaders.cache.disk import size_of

        doing: str = progress.phase
        if progress.waiting:
            doing = "waiting for the process that builds it"
        if progress.shards_left:
            doing = f"waiting for {progress.shards_left} shards of others"
        rate = progress.samples_per_second
        text = f"{progress.samples_done:,} of {progress.samples:,} samples"
        if rate:
            text += f", {rate:,.0f}/s"
        text += f", {size_of(progress.bytes_done)}"
        if progress.bytes_expected:
            text += f" of {'about ' if progress.phase == 'compute' else ''}"
            text += size_of(progress.bytes_expected)
        if progress.failed:
            text += f", {progress.failed} left out"
        left = progress.seconds_left
        self._line(f"{doing}  {text}" + ("" if left is None else f", {left:,.0f} s left"))

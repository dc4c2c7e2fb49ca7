"""``dataloaders cache``: build, look at, check, take apart, list and delete caches."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloaders.cli.cache_ranks import restarted, shard, shard_of_rank
from dataloaders.cli.cache_words import as_options, told_as_options
from dataloaders.errors import OptionError

if TYPE_CHECKING:
    from dataloaders.cache import CachedDataset
    from dataloaders.cache.build.estimation import Estimate
    from dataloaders.cache.build.progress import BuildProgress

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

Subparsers = Any


def add_parsers(commands: Subparsers) -> None:
    """Add ``cache`` and what it can do to the subcommands of the parser."""
    cache = _add(
        commands,
        "cache",
        "precompute a dataset into one file, and look after it",
        _CACHE,
        _CACHE_EPILOG,
    )
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)

    build = _add(actions, "build", "compute a dataset's samples once", _BUILD, _BUILD_EPILOG)
    build.add_argument(
        "dataset", help="module:name or file.py:name of a dataset, or a folder of images"
    )
    build.add_argument("path", help="the file to write, such as train.h5")
    build.add_argument("--workers", type=int, metavar="N", help="processes (as many as cores)")
    build.add_argument("--resize", type=_pixels, metavar="N", help="of a folder: the shorter side")
    build.add_argument("--crop", type=_pixels, metavar="N", help="of a folder: the middle N x N")
    build.add_argument(
        "--images",
        metavar="HOW",
        help="raw, jpeg, png, webp, packed (the dataset's own files), or some of the first four by "
        "column, as in image=jpeg,mask=png (raw)",
    )
    build.add_argument("--quality", type=int, metavar="N", help="of jpeg, 1 to 100 (90)")
    build.add_argument(
        "--max-side", type=int, metavar="N", help="of encoded images: larger ones are made smaller"
    )
    build.add_argument(
        "--skip", action="store_true", help="leave out samples that fail; info lists them"
    )
    build.add_argument(
        "--allow-random",
        action="store_true",
        help="keep one draw of each sample of a dataset that draws random numbers",
    )
    build.add_argument(
        "--overwrite", action="store_true", help="begin anew, whatever there is at the path"
    )
    build.add_argument(
        "--check",
        choices=["contents"],
        help="of a file that is there: compare a few samples with it, too",
    )
    build.add_argument(
        "--compress",
        metavar="CODEC",
        help="zstd (takes the extra gpu-dataloaders[compressed]) or gzip",
    )
    build.add_argument(
        "--level", type=int, metavar="N", help="of --compress: zstd 1 to 22 (3), gzip 1 to 9 (4)"
    )
    build.add_argument(
        "--shard",
        type=shard,
        metavar="RANK/OF",
        help="this part only, such as 3/8 (of torchrun's)",
    )
    build.add_argument(
        "--no-wait", action="store_true", help="of a shard: do not wait for the others, nor join"
    )
    build.add_argument("--quiet", action="store_true", help="no progress")

    join = _add(
        actions, "join", "make one cache of shards that were built apart", _JOIN, _JOIN_EPILOG
    )
    join.add_argument("path", help="the file to write, such as train.h5, beside its shards")

    info = _add(actions, "info", "what is in a cache", _INFO, _INFO_EPILOG)
    info.add_argument("path", help="of the cache")
    info.add_argument("--sheet", metavar="F", help="draw the first images into this PNG file")

    verify = _add(actions, "verify", "find any flipped bit", _VERIFY)
    verify.add_argument("path", help="of the cache")
    verify.add_argument("--quiet", action="store_true", help="no progress")

    extract = _add(actions, "extract", "samples as plain files", _EXTRACT, _EXTRACT_EPILOG)
    extract.add_argument("path", help="of the cache")
    extract.add_argument("folder", help="made if it does not exist")
    extract.add_argument("--rows", metavar="A:B", help="which rows (the first 16)")
    extract.add_argument("--overwrite", action="store_true", help="though something is in it")

    _add(actions, "list", "caches in the user's cache folder", _LIST)
    prune = _add(
        actions, "prune", "delete caches from the user's cache folder", _PRUNE, _PRUNE_EPILOG
    )
    prune.add_argument(
        "--unused", type=_days, default=30.0, metavar="DAYS", help="not used for so long (30)"
    )
    prune.add_argument("--yes", action="store_true", help="delete them")


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


def carry_out(parsed: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "build": _build,
        "join": _join,
        "info": _info,
        "verify": _verify,
        "extract": _extract,
        "list": _list,
        "prune": _prune,
    }
    with told_as_options():
        return actions[parsed.action](parsed)


def _build(parsed: argparse.Namespace) -> int:
    from dataloaders.cache import Compressed, precompute
    from dataloaders.cli.cache_source import dataset_of, images_of

    if parsed.level is not None and parsed.compress is None:
        raise OptionError(f"--level {parsed.level}: give --compress too, whose level it is")
    compress = None if parsed.compress is None else Compressed(parsed.compress, parsed.level)
    part = parsed.shard or shard_of_rank()
    if parsed.no_wait and part is None:
        raise OptionError("--no-wait is for shards: give --shard RANK/OF, or start it by torchrun")
    # One of the ranks on a terminal speaks for all, of which each would say the same.
    first = part is None or parsed.no_wait or part[0] == 0
    dataset = dataset_of(parsed.dataset, resize=parsed.resize, crop=parsed.crop)
    before = None if parsed.overwrite else _stamp(parsed.path)
    with _Told(quiet=parsed.quiet or not first) as told:
        cached = precompute(
            dataset,
            parsed.path,
            images=images_of(parsed.images, quality=parsed.quality, max_side=parsed.max_side),
            num_workers="auto" if parsed.workers is None else parsed.workers,
            allow_random=parsed.allow_random,
            on_error="skip" if parsed.skip else "raise",
            check=parsed.check,
            # A rank that torchrun starts again goes on with what it had begun anew.
            overwrite=parsed.overwrite and not restarted(),
            compress=compress,
            progress=told,
            announce=told.announce,
            wait=not parsed.no_wait,
            shard=part,
        )
    if not first:
        return 0
    path = cached.path if parsed.no_wait else parsed.path
    same = ", built before" if before is not None and before == _stamp(parsed.path) else ""
    print(f"{path}: {_told(cached)}{same}")
    if cached.failed:
        print(f"{len(cached.failed)} samples were left out; dataloaders cache info lists them")
    return 0


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _join(parsed: argparse.Namespace) -> int:
    from dataloaders.cache import CachedDataset, join

    join(parsed.path)
    print(f"{parsed.path}: {_told(CachedDataset(parsed.path))}")
    print(f"dataloaders cache verify {parsed.path} finds what was damaged on the way")
    return 0


def _told(cached: CachedDataset) -> str:
    from dataloaders.cache.format.disk import size_of

    shards = f" in {len(cached.shards)} shards" if cached.shards else ""
    return f"{len(cached):,} samples{shards}, {size_of(cached.index.all_bytes)}"


def _info(parsed: argparse.Namespace) -> int:
    from dataloaders.cli import cache_info

    return cache_info.info(parsed.path, sheet=parsed.sheet)


def _extract(parsed: argparse.Namespace) -> int:
    from dataloaders.cli.cache_extract import extract

    return extract(parsed.path, parsed.folder, rows=parsed.rows, overwrite=parsed.overwrite)


def _verify(parsed: argparse.Namespace) -> int:
    from dataloaders.cache.format.disk import size_of
    from dataloaders.cache.read.shards import listed
    from dataloaders.cache.read.verification import verify
    from dataloaders.cli.progress import ProgressLine

    line = ProgressLine(quiet=parsed.quiet)

    def told(done: int, whole: int) -> None:
        line(f"verify  {size_of(done)} of {size_of(whole)}")

    damages = verify(Path(parsed.path), told)
    line.close()
    for damage in damages:
        where = f"{damage.shard}: " if damage.shard else ""
        print(f"{where}{damage.what} (bytes {damage.offset} to {damage.offset + damage.bytes})")
    shards = sorted({damage.shard for damage in damages} - {""})
    if shards:
        print(f"{parsed.path} is damaged: delete these shards ({listed(shards)}) and build again")
        return 1
    if damages and "is no cache" in damages[0].what:  # overwriting it may not be what is wanted
        print(f"if {parsed.path} was one, its first bytes are damaged: delete it, build it again")
        return 1
    if damages:
        print(f"{parsed.path} is damaged: build it again, dataloaders cache build --overwrite")
        return 1
    print(f"{parsed.path} is whole")
    return 0


def _list(parsed: argparse.Namespace) -> int:
    from dataloaders.cli import cache_folder

    return cache_folder.show()


def _prune(parsed: argparse.Namespace) -> int:
    from dataloaders.cli import cache_folder

    return cache_folder.prune(parsed.unused, delete=parsed.yes)


class _Told:
    """A build's progress on stderr, in one line."""

    def __init__(self, *, quiet: bool) -> None:
        from dataloaders.cli.progress import ProgressLine

        self._quiet = quiet
        self._line = ProgressLine(quiet=quiet)

    def __enter__(self) -> _Told:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def announce(self, estimate: Estimate) -> None:
        """Show what it will take."""
        if not self._quiet:
            for text in filter(None, (str(estimate), as_options(estimate.advice))):
                print(f"build  {text}", file=sys.stderr)

    def __call__(self, progress: BuildProgress) -> None:
        """Show ``progress``."""
        from dataloaders.cache.format.disk import size_of

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


def _add(
    commands: Subparsers, name: str, help_: str, text: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help_,
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser

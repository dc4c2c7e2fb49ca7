"""The command line of ``dataloaders cache``: a table of actions, with their help and options."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["BUILD", "add_parsers"]

_CACHE = """\
A cache holds what a dataset gives before anything random happens to it, in HDF5 files: decoded and
resized once, read at the speed of memory from then on. It is worth it where the check says
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
  dataloaders cache info train.h5
  dataloaders cache verify train.h5
  torchrun --nproc-per-node 4 -m dataloaders cache build mypackage.data:training_set train.h5

then, in the script:
  from dataloaders.cache import CachedDataset
  loader = DataLoader(CachedDataset("train.h5", transform=...), ...)
"""

_BUILD = """\
Reads every sample once, in parallel, and writes parts of some 96 MiB into the folder train.parts,
which train.h5 joins; a small cache, and one with --single-file, is one file. Ctrl-C and crashes
lose no part that was finished: the same command goes on where it stopped. A second process that
builds the same file waits for the first.

Under torchrun (RANK and WORLD_SIZE say so) each rank builds the parts of its own samples, and when
all are there one of them writes train.h5. Give --shard RANK/OF where something else starts the
processes (Slurm: --shard $SLURM_PROCID/$SLURM_NTASKS), and --no-wait where the machines share no
folder: then copy the parts into one and run dataloaders cache join.
"""

_BUILD_EPILOG = """\
examples:
  dataloaders cache build photos/train train.h5 --resize 256 --crop 256
  dataloaders cache build mypackage.data:training_set train.h5 --workers 8
  dataloaders cache build data.py:training_set train.h5 --images image=jpeg,mask=png --quality 95

Exit status 0: the file is there and whole; 2: it cannot be built as it was asked for; 130: Ctrl-C.
"""

_JOIN = """\
Joins parts that were built with --no-wait and copied into one folder, such as train.parts: writes
train.h5, which reads as one cache of all of them. They stay as they are, and have to stay there.
"""

_JOIN_EPILOG = """\
example:
  dataloaders cache build data:train train.h5 --shard 0/2 --no-wait   # on one machine
  dataloaders cache build data:train train.h5 --shard 1/2 --no-wait   # on another one
  dataloaders cache join train.h5      # where train.parts now has the parts of both
"""

_MERGE = """\
Copies a cache with all of its parts into one file, which takes as much disk again. The cache stays
as it is.
"""

_MERGE_EPILOG = """\
example:
  dataloaders cache merge train.h5 one.h5
"""

_INFO = """\
Prints each column with its kind, type, the shape of a row and its size; the transforms that were
computed (the head) and those that are left to run live (the tail); classes; what the cache was
built from; and the samples that were left out.
"""

_VERIFY = """\
Reads the whole cache, with all of its parts, and compares every block with its checksum:
any flipped bit is found, and what it hit is named. Exit status 0: whole; 1: damaged, with a line
for each damage. Delete the parts that it names and build again: only these are made anew.
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


def _option(help_: str, metavar: str | None = None, **how: Any) -> dict[str, Any]:
    return {"help": help_, **({"metavar": metavar} if metavar else {}), **how}


def _flag(help_: str, **how: Any) -> dict[str, Any]:
    return {"help": help_, "action": "store_true", **how}


Arguments = dict[str, dict[str, Any]]

# With the name of an argument of `precompute` as dest: the value goes to it as it is.
BUILD: Arguments = {
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
    "--overwrite": _flag("build anew, whatever is there; again: go on with that", dest="overwrite"),
    "--check": _option(
        "of a file that is there: compare a few samples with it, too",
        choices=["contents"],
        dest="check",
    ),
    "--compress": _option(
        "zstd (takes the extra gpu-dataloaders[compressed]) or gzip, by HDF5's filters", "CODEC"
    ),
    "--level": _option("of --compress", "N", type=int),
    "--single-file": _option(
        "one file, however large: takes its size once more on the disk meanwhile",
        action="store_const",
        const=True,
        dest="single_file",
        default=argparse.SUPPRESS,
    ),
    "--shard": _option("these samples only, such as 3/8 (of torchrun's)", "RANK/OF", type=_shard),
    "--no-wait": _option(
        "with --shard: do not wait for the others, nor join", action="store_false", dest="wait"
    ),
    "--quiet": _flag("no progress"),
}
_PATH: Arguments = {"path": _option("of the cache")}
# Action -> one line about it, its description, its examples, its arguments.
_ACTIONS: dict[str, tuple[str, str, str | None, Arguments]] = {
    "build": ("compute a dataset's samples once", _BUILD, _BUILD_EPILOG, BUILD),
    "join": (
        "make one cache of parts that were built apart",
        _JOIN,
        _JOIN_EPILOG,
        {"path": _option("the file to write, such as train.h5, beside train.parts")},
    ),
    "merge": (
        "copy a cache into one file",
        _MERGE,
        _MERGE_EPILOG,
        {**_PATH, "one_file": _option("the file to write"), "--quiet": _flag("no progress")},
    ),
    "info": ("what is in a cache", _INFO, None, _PATH),
    "verify": ("find any flipped bit", _VERIFY, None, {**_PATH, "--quiet": _flag("no progress")}),
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

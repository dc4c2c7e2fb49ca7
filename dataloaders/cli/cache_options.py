"""The command line of ``dataloaders cache``: its actions, with their help and options."""

from __future__ import annotations

import argparse
from typing import Any

from dataloaders.options import FLAGS

__all__ = ["add_parsers"]

_CACHE = """\
A cache holds what a dataset gives before anything random happens to it, in HDF5 files: decoded and
resized once, read at the speed of memory from then on. It is worth it where the check says
input-bound and a profile says decoding.

examples:
  dataloaders cache build mypackage.data:training_set train.h5
      training_set is a dataset, or a function without arguments that returns one; what its
      transforms do before the first random one is computed and kept, the rest stays live
  dataloaders cache info train.h5
  dataloaders cache verify train.h5

then, in the script:
  from dataloaders.cache import CachedDataset
  loader = DataLoader(CachedDataset("train.h5", transform=...), ...)
"""

_BUILD = """\
Reads every sample once, in parallel, and writes parts into the folder train.parts, which train.h5
joins; a small cache is one file. Ctrl-C and crashes lose no part that was finished: the same
command goes on where it stopped. A second process that builds the same file waits for the first.

Under torchrun each rank builds the parts of its own samples, and one of them writes train.h5. Give
--shard RANK/OF where something else starts the processes (--shard $SLURM_PROCID/$SLURM_NTASKS),
and --no-wait where machines share no folder: then copy all files of each train.parts into one, and
build once more with the same options, without --shard: this only joins them.

examples:
  dataloaders cache build photos/train train.h5 --resize 256 --crop 256
  dataloaders cache build photos/train train.h5 --images jpeg --quality 90 --max-side 512
  dataloaders cache build photos/train train.h5 --images packed
  dataloaders cache build data.py:training_set train.h5 --workers 8
  dataloaders cache build mypackage.data:training_set small.h5 --compress zstd --level 9
  torchrun --nproc-per-node 4 -m dataloaders cache build mypackage.data:training_set train.h5

Exit status 0: the file is there and whole; 2: it cannot be built as it was asked for; 130: Ctrl-C.
"""

_VERIFY = """\
Reads the whole cache and compares every block with its checksum: any flipped bit is found. Exit
status 0: whole; 1: damaged. Delete the parts that it names and build again: only these are made.
"""


def shard(text: str) -> tuple[int, int]:  # argparse shows its name
    rank, of = map(int, text.split("/"))
    return rank, of


def _build(parser: argparse.ArgumentParser) -> None:
    add: Any = parser.add_argument

    def option(name: str, about: str, **how: Any) -> None:
        add(FLAGS[name], dest=name, help=about, **how)

    number: Any = {"metavar": "N", "type": int}
    add("dataset", help="module:name or file.py:name of a dataset, or a folder of images")
    add("path", help="the file to write, such as train.h5")
    option("num_workers", "processes (as many as cores)", default=argparse.SUPPRESS, **number)
    add("--resize", help="of a folder: the shorter side", **number)
    add("--crop", help="of a folder: the middle N x N", **number)
    images = "raw, jpeg, png, webp or packed (the dataset's own files) (raw)"
    option("images", images, metavar="HOW")
    option("quality", "of jpeg, 1 to 100 (90)", **number)
    option("max_side", "of encoded images: larger ones are made smaller", **number)
    skip = {"action": "store_const", "const": "skip", "default": "raise"}
    option("on_error", "leave out samples that fail; info lists them", **skip)
    draw = "keep one draw of each sample of a dataset that draws random numbers"
    option("allow_random", draw, action="store_true")
    overwrite = "build, whatever is there; given again, go on with that build"
    option("overwrite", overwrite, action="store_true")
    check = "of a file that is there: compare a few samples with it, too"
    option("check", check, choices=["contents"])
    compress = "zstd (takes the extra gpu-dataloaders[compressed]) or gzip, by HDF5's filters"
    option("compress", compress, metavar="CODEC")
    option("level", f"of {FLAGS['compress']}", **number)
    single = "one file, however large: takes its size once more on the disk meanwhile"
    option("single_file", single, action="store_const", const=True)
    these = "these samples only, such as 3/8, counted from 0 (of torchrun's)"
    option("shard", these, metavar="RANK/OF", type=shard)
    no_wait = f"with {FLAGS['shard']}: do not wait for the others, nor join the parts"
    option("wait", no_wait, action="store_false")
    build = f"where ranks {FLAGS['overwrite']}: a text for all of them, another one for each build"
    option("build_id", build, metavar="ID")


# Action -> one line about it, and its description with examples.
_ACTIONS = {
    "build": ("compute a dataset's samples once", _BUILD),
    "merge": ("copy a cache into one file, which takes as much disk again", None),
    "info": ("what is in a cache, what it was built from, and what was left out", None),
    "verify": ("find any flipped bit", _VERIFY),
}


def add_parsers(commands: Any) -> None:
    """Add ``cache`` and what it can do to the subcommands of the parser."""

    def add(to: Any, name: str, about: str, text: str | None) -> Any:
        how = argparse.RawDescriptionHelpFormatter
        texts = {"help": about, "description": text or about}
        return to.add_parser(name, **texts, formatter_class=how, allow_abbrev=False)

    about = "precompute a dataset into one file, and look after it"
    actions = add(commands, "cache", about, _CACHE).add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    for name, texts in _ACTIONS.items():
        action = add(actions, name, *texts)
        if name == "build":
            _build(action)
        else:
            action.add_argument("path", help="of the cache")
        if name == "merge":
            action.add_argument("one_file", help="the file to write")
        if name in ("build", "merge", "verify"):
            action.add_argument("--quiet", action="store_true", help="no progress")

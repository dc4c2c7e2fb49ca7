"""The names of a build's options: in Python, and as ``dataloaders cache build`` takes them."""

from __future__ import annotations

FLAGS = {
    "num_workers": "--workers",
    "images": "--images",
    "quality": "--quality",
    "max_side": "--max-side",
    "on_error": "--skip",
    "allow_random": "--allow-random",
    "overwrite": "--overwrite",
    "check": "--check",
    "compress": "--compress",
    "level": "--level",
    "single_file": "--single-file",
    "shard": "--shard",
    "wait": "--no-wait",
    "build_id": "--build-id",
}


def option(name: str, *value: object) -> str:
    """Return ``num_workers=-1 (--workers)``: an option as messages name it, with its value."""
    flag = FLAGS.get(name)
    return f"{name}={''.join(map(repr, value))}{f' ({flag})' if flag else ''}"

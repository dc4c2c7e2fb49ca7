"""One target under Atheris (libFuzzer), until its time is over or it finds something.

python tests/fuzz TARGET [FILE or FOLDER of inputs ...] [-max_total_time=300 ...]

An input that does what it must not do is written to build/fuzz; given as FILE, it runs again.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path
from random import Random

import atheris

sys.path[0] = str(Path(__file__).resolve().parents[1])
with atheris.instrument_imports(include=["dataloaders", "backends"]):
    from fuzz.damage import damaged
    from fuzz.guard import Guard
    from fuzz.targets import TARGETS, sound_files

OPTIONS = {"timeout": 25, "rss_limit_mb": 4096, "max_len": 1 << 17, "len_control": 0}


def main() -> None:
    """Fuzz; does not return."""
    name, *words = sys.argv[1:] or [""]
    if name not in TARGETS:
        sys.exit(f"{__doc__}\nTARGET is one of {', '.join(TARGETS)}")
    corpus = Path("build/fuzz", name)
    corpus.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    guard = Guard(work)

    def run(data: bytes, *, guarded: bool = True) -> None:
        empty = work / "one"
        empty.mkdir()
        try:
            if guarded:
                guard.watch(lambda: TARGETS[name](data, empty))
            else:
                TARGETS[name](data, empty)
        finally:
            shutil.rmtree(empty)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        def raw(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, min(2 * len(part) + 64, most)))

        return damaged(bytes(data), Random(seed), raw)[:most]

    for data in sound_files(work):
        (corpus / hashlib.sha1(data).hexdigest()[:12]).write_bytes(data)
        run(data, guarded=False)  # what is imported and read at first use is no finding
    options = [f"-{key}={value}" for key, value in OPTIONS.items()]
    inputs = [] if any(not word.startswith("-") for word in words) else [str(corpus)]
    arguments = [sys.argv[0], *options, f"-artifact_prefix={corpus.parent}/", *words, *inputs]
    atheris.Setup(arguments, run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

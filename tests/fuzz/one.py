"""One target under Atheris, until its time is over; findings go into files.

    python tests/fuzz/one.py TARGET FOLDER SECONDS SEED

FOLDER/corpus grows by each input that reaches new branches; FOLDER/findings has a file for each
sort of finding, and its trace beside it.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import atheris

sys.path[0] = str(Path(__file__).resolve().parents[1])
with atheris.instrument_imports(include=["dataloaders", "backends"]):
    from fuzz.guard import Guard
    from fuzz.targets import TARGETS

_MOST_FINDINGS = 100
_HANG_S = 25


def main() -> None:
    """Fuzz until the time is over; does not return."""
    name, where, seconds, seed = sys.argv[1:]
    target, folder = TARGETS[name], Path(where)
    corpus, findings = folder / "corpus", folder / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    guard = Guard(work)
    known: set[str] = set()
    started = time.monotonic()

    def run(data: bytes, *, first: bool = False) -> None:
        empty = work / "one"
        empty.mkdir()
        try:
            found = guard.watch(
                lambda: target.run(data, empty), audited=target.audited and not first
            )
        finally:
            shutil.rmtree(empty)
        for finding in found:
            if finding.what in known or len(known) >= _MOST_FINDINGS:
                continue
            known.add(finding.what)
            file = findings / f"{name}-{hashlib.sha1(data).hexdigest()[:12]}"
            file.write_bytes(data)
            file.with_suffix(".txt").write_text(f"{finding.what}\n{finding.trace}")
            print(f"FINDING {name}: {finding.what} ({file})", flush=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        def raw(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, min(2 * len(part) + 64, most)))

        return target.mutate(bytes(data), Random(seed), raw)[:most]

    for data in list(target.seeds(work)):
        (corpus / f"seed-{hashlib.sha1(data).hexdigest()[:12]}").write_bytes(data)
        run(data, first=True)  # what is imported and read at first use is no finding

    options = {
        "max_total_time": max(1, int(float(seconds) - (time.monotonic() - started))),
        "timeout": _HANG_S,
        "rss_limit_mb": 4096,
        "max_len": 1 << 17,
        "len_control": 0,
        "seed": seed,
        "print_final_stats": 1,
        "artifact_prefix": f"{findings}/",
    }
    arguments = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

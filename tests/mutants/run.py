"""Run tests on each change of the modules in `modules.toml`, or on the versions of `broken.toml`.

A change that survives fails the run, unless `baseline.json` or `equivalent.toml` holds it. So does
a broken version that passes its tests.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutants.points import Mutant, mutants
from mutants.tree import ROOT, Tree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

__all__ = ["changed", "main", "read", "versions"]

_FOLDER = Path(__file__).resolve().parent
_LEAST_LIMIT = 20.0  # seconds: a busy machine is no failed test


def main(tree: Tree, words: Sequence[str], baseline: Path = _FOLDER / "baseline.json") -> int:
    """Return 1 if a change survives that is not known to."""
    parser = argparse.ArgumentParser(
        prog="python tests/mutants", description="Break the package; do its tests notice?"
    )
    parser.add_argument(
        "names", nargs="*", help="modules of modules.toml, or broken versions; all by default"
    )
    parser.add_argument("--sample", type=int, help="so many mutants of each module, at random")
    parser.add_argument("--renew", action="store_true", help="write what survives to the baseline")
    parser.add_argument("--broken", action="store_true", help="the versions of broken.toml instead")
    parser.add_argument("--jobs", type=int, default=1, help="so many modules at a time")
    options = parser.parse_args(words)
    table: dict[str, Any] = versions() if options.broken else read("modules.toml")["modules"]
    unknown = [name for name in options.names if name not in table]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not known; there are\n  " + "\n  ".join(table))
    names = options.names or list(table)
    if options.jobs > 1:
        command = [sys.executable, str(_FOLDER), *["--renew"] * options.renew]
        command += ["--broken"] * options.broken
        command += ["--sample", str(options.sample)] if options.sample else []
        with ThreadPoolExecutor(options.jobs) as pool:
            return max(pool.map(lambda name: subprocess.call([*command, name]), names))
    status = 0
    for name in names:
        if options.broken:
            status |= not _is_noticed(tree, table[name])
            continue
        every = mutants((ROOT / f"{name}.py").read_text())
        equal = read("equivalent.toml").get(name, {})
        every = [each for each in every if each.key not in equal]
        count = min(len(every), options.sample or len(every))
        picked = random.Random(0).sample(every, count)
        known = _read(baseline).get(name, {})
        before = known.get("survivors", {})
        found = _outcomes(tree, name, table[name], picked, before)
        if found is None:
            status = 1
            continue
        survived = [each for each, outcome in found if outcome == "passed"]
        if options.renew:
            now = {each.key: str(each) for each in survived}
            kept = {each.key: str(each) for each in every if each.key in before}
            for each in picked:
                kept.pop(each.key, None)
            counts = {"of": len(every), **Counter(outcome for _, outcome in found)}
            if options.sample and known:  # those of the last whole run stay
                counts = known
            _renew(baseline, name, {**counts, "survivors": dict(sorted((kept | now).items()))})
        else:
            status |= any(each.key not in before for each in survived)
    return status


def _read(baseline: Path) -> dict[str, Any]:
    return json.loads(baseline.read_text()) if baseline.exists() else {}


def _renew(baseline: Path, name: str, entry: dict[str, Any]) -> None:
    """Replace one module's entry; several runs may share the file."""
    with open(baseline, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = {**json.loads(file.read() or "{}"), name: entry}
        file.truncate(0)
        file.write(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


def read(name: str) -> dict[str, Any]:
    """Return what a TOML file of this folder holds."""
    return tomllib.loads((_FOLDER / name).read_text())


def versions() -> dict[str, dict[str, Any]]:
    """Return name -> file, before, after, tests of each broken version."""
    return {version["name"]: version for version in read("broken.toml")["version"]}


def changed(version: dict[str, Any]) -> str:
    """Return the source of the version's file with its text replaced.

    Raises:
        ValueError: the file does not hold the text exactly once, or is no file.
    """
    place = ROOT / version["file"]
    source = place.read_text() if place.is_file() else ""
    count = source.count(version["before"])
    if count != 1:
        found = f"holds its text {count} times, not once" if source else "is no file"
        raise ValueError(
            f"tests/mutants/broken.toml, {version['name']!r}: {version['file']} {found}. Write the "
            "version anew for the code as it is now, or delete it if what it breaks is gone"
        )
    return source.replace(version["before"], version["after"])


def _limit(tree: Tree, tests: list[str]) -> float | None:
    """Return how many seconds the tests get; None if they do not pass on the unchanged tree."""
    began = time.monotonic()
    outcome = tree.outcome(tests, 3600.0)
    if outcome != "passed":
        print(f"{tree.output()}\n{' '.join(tests)} {outcome} on the unchanged tree: repair that")
        return None
    return max(_LEAST_LIMIT, 5 * (time.monotonic() - began))


def _outcomes(
    tree: Tree, name: str, tests: list[str], picked: list[Mutant], before: dict[str, str]
) -> list[tuple[Mutant, str]] | None:
    limit = _limit(tree, tests)
    if limit is None:
        return None
    found = []
    for each in picked:
        found.append((each, tree.outcome(tests, limit, f"{name}.py", each.source)))
        if found[-1][1] == "passed":
            new = "" if each.key in before else "NEW "
            print(f"  {new}survivor {each.key}, {each}", flush=True)
    counts = ", ".join(f"{n} {what}" for what, n in Counter(what for _, what in found).items())
    print(f"{name}: {len(picked)} mutants, {counts}", flush=True)
    return found


def _is_noticed(tree: Tree, version: dict[str, Any]) -> bool:
    source, tests = changed(version), version["tests"]
    limit = _limit(tree, tests)
    if limit is None:
        return False
    outcome = tree.outcome(tests, limit, version["file"], source)
    noticed = outcome == "failed" or (outcome == "hung" and version.get("hangs", False))
    print(f"{'noticed' if noticed else 'NOT NOTICED'} ({outcome}): {version['name']}", flush=True)
    return noticed

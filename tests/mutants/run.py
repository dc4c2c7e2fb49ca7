"""Run tests on each change of the modules in `modules.toml`, or on the versions of `broken.toml`.

A change that survives fails the run, unless `baseline.json` or `equivalent.toml` holds it. So does
a broken version that passes its tests.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants.points import mutants
from mutants.tree import ROOT, Tests, Tree

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

_FOLDER = Path(__file__).resolve().parent


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
    options = parser.parse_args(words)
    table: dict[str, Any] = versions() if options.broken else read("modules.toml")["modules"]
    unknown = [name for name in options.names if name not in table]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not known; there are\n  " + "\n  ".join(table))
    names = options.names or list(table)
    if options.broken:
        found = [_is_noticed(tree, table[name]) for name in names]
    else:
        found = [_are_known(tree, name, table[name], options, baseline) for name in names]
    return int(not all(found))


def _is_noticed(tree: Tree, version: dict[str, Any]) -> bool:
    source = changed(version)
    tests = _passing(tree, version["tests"], version["file"])
    outcome = tests.of(source) if tests else "not tried"
    noticed = outcome in ("failed", "hung")
    print(f"{'noticed' if noticed else 'NOT NOTICED'} ({outcome}): {version['name']}", flush=True)
    return noticed


def _are_known(
    tree: Tree, name: str, tests: list[str], options: argparse.Namespace, baseline: Path
) -> bool:
    """Try a module's mutants; return whether the baseline has, or now gets, all that survive."""
    equal = read("equivalent.toml").get(name, {})
    every = [each for each in mutants((ROOT / f"{name}.py").read_text()) if each.key not in equal]
    count = min(len(every), options.sample or len(every))
    picked = random.Random(0).sample(every, count)
    before = json.loads(baseline.read_text()).get(name, {}) if baseline.exists() else {}
    counts, survived = Counter[str](), {}
    passing = _passing(tree, tests, f"{name}.py")
    if passing is None:
        return False
    for each in picked:
        outcome = passing.of(each.source)
        counts[outcome] += 1
        if outcome == "passed":
            survived[each.key] = str(each)
            new = "" if each.key in before else "NEW "
            print(f"  {new}survivor {each.key}, {each}", flush=True)
    said = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    print(f"{name}: {len(picked)} mutants, {said}", flush=True)
    if not options.renew:
        return survived.keys() <= before.keys()
    tried = {each.key for each in picked}
    kept = {each.key: str(each) for each in every if each.key in before.keys() - tried}
    _renew(baseline, name, dict(sorted((kept | survived).items())))
    return True


def _passing(tree: Tree, names: list[str], file: str) -> Tests | None:
    """Return the tests of the unchanged tree; None if they do not pass."""
    tests = tree.tests(names, file)
    if tests.unchanged == "passed":
        return tests
    print(f"{tests.output()}\n{' '.join(names)} {tests.unchanged} unchanged: repair that")
    return None


def _renew(baseline: Path, name: str, survivors: dict[str, str]) -> None:
    """Replace one module's entry; several runs may share the file."""
    with open(baseline, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = {**json.loads(file.read() or "{}"), name: survivors}
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

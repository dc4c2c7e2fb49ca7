"""Takes the modules of `modules.toml`, or the versions of `broken.toml`, one change at a time.

A change that the tests noticed when `baseline.json` was last renewed, and that survives now, fails
the run. So does a broken version that passes its tests.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants.broken import ROOT, changed, read, versions
from mutants.points import Mutant, mutants
from mutants.tree import NotPassing, Tree

_BASELINE = Path(__file__).resolve().parent / "baseline.json"


def main(tree: Tree, words: Sequence[str]) -> int:
    """Return 1 if a change survives that was noticed before, or that has to be."""
    parser = argparse.ArgumentParser(
        prog="python tests/mutants", description="Break the package; do its tests notice?"
    )
    parser.add_argument(
        "names",
        nargs="*",
        help="modules of modules.toml, or names of broken versions; all by default",
    )
    parser.add_argument(
        "--sample", type=int, help="so many mutants of each module, drawn at random"
    )
    parser.add_argument("--survivors", action="store_true", help="only those that survived before")
    parser.add_argument(
        "--since", metavar="COMMIT", help="only functions that differ from those of a commit"
    )
    parser.add_argument(
        "--against",
        type=Path,
        default=_BASELINE,
        help="what was noticed before (default: %(default)s)",
    )
    parser.add_argument("--renew", action="store_true", help="write what is found to the baseline")
    parser.add_argument("--broken", action="store_true", help="the versions of broken.toml instead")
    options = parser.parse_args(words)
    return _broken(tree, options.names) if options.broken else _modules(tree, options)


def _modules(tree: Tree, options: argparse.Namespace) -> int:
    table = read("modules.toml")["modules"]
    known = json.loads(options.against.read_text()) if options.against.exists() else {}
    equal = read("equivalent.toml")
    names = _chosen(table, options.names)
    sources = {name: (ROOT / f"{name}.py").read_bytes() for name in names}  # as they are copied
    lost = failures = 0
    for name in names:
        file = f"{name}.py"
        every = mutants(sources[name])
        left_out = equal.get(name, {})
        for key in left_out.keys() - {mutant.key for mutant in every}:
            print(f"{name}: no change has the key {key} of equivalent.toml any more: take it out")
        every = [mutant for mutant in every if mutant.key not in left_out]
        picked = every if options.since is None else _since(options.since, file, every)
        before = known.get(name, {"killed": "", "survived": {}})
        if options.survivors:
            picked = [mutant for mutant in picked if mutant.key in before["survived"]]
        if options.sample is not None and len(picked) > options.sample:
            picked = random.Random(0).sample(picked, options.sample)
        if not picked:
            continue
        killed = set(before["killed"].split())
        try:
            usual = tree.check(table[name])
        except NotPassing as error:
            failures += 1
            print(f"{name}: {error}", flush=True)
            continue
        print(f"{name}: {len(picked)} of {len(every)} mutants, {usual:.0f} s of tests", flush=True)
        noticed, survived = set(), {}
        for mutant in sorted(picked, key=lambda mutant: mutant.line):
            if tree.outcome(file, mutant.source, table[name], usual) != "passed":
                noticed.add(mutant.key)
                continue
            survived[mutant.key] = mutant.text
            is_lost = mutant.key in killed
            lost += is_lost
            print(f"  {'LOST' if is_lost else 'survived'} {mutant}", flush=True)
        print(f"  {len(noticed)} of {len(picked)} noticed", flush=True)
        if options.renew:
            known[name] = _joined(every, before, noticed, survived)
            text = json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False)
            options.against.write_text(text + "\n")
    if lost and not options.renew:
        print(f"{lost} changes survive that the tests noticed before: see LOST above")
        return 1
    return 1 if failures else 0


def _joined(
    every: list[Mutant], before: dict[str, Any], noticed: set[str], survived: dict[str, str]
) -> dict[str, Any]:
    """What is known of a module now: earlier findings about what still stands in it, and these."""
    exist = {mutant.key for mutant in every}
    found = noticed | survived.keys()
    killed = {key for key in before["killed"].split() if key in exist - found} | noticed
    kept = {key: text for key, text in before["survived"].items() if key in exist - found}
    order = {mutant.key: place for place, mutant in enumerate(every)}
    lines = sorted((kept | survived).items(), key=lambda item: order[item[0]])
    return {"killed": " ".join(sorted(killed)), "survived": dict(lines)}


def _since(commit: str, file: str, every: list[Mutant]) -> list[Mutant]:
    """The mutants of functions, and of lines outside of them, that changed since a commit."""
    command = ["git", "diff", "--unified=0", commit, "--", file]
    changed: set[int] = set()
    for first, count in re.findall(
        r"^@@ \S+ \+(\d+)(?:,(\d+))? @@",
        subprocess.check_output(command, cwd=ROOT, text=True),
        re.M,
    ):
        changed.update(range(int(first), int(first) + max(1, int(count or 1))))
    return [
        mutant
        for mutant in every
        if not changed.isdisjoint(
            range(mutant.span[0], mutant.span[1] + 1) if mutant.function else [mutant.line]
        )
    ]


def _broken(tree: Tree, names: list[str]) -> int:
    table = versions()
    failures = 0
    for name in _chosen(table, names):
        version = table[name]
        source = changed(version)
        try:
            usual = tree.check(version["tests"])
        except NotPassing as error:
            failures += 1
            print(f"{name}: {error}", flush=True)
            continue
        outcome = tree.outcome(version["file"], source, version["tests"], usual)
        noticed = outcome == "failed" or (outcome == "hung" and version.get("hangs", False))
        failures += not noticed
        print(f"{'noticed' if noticed else 'NOT NOTICED'} ({outcome}): {name}", flush=True)
    return 1 if failures else 0


def _chosen(table: dict[str, Any], names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: not known; there are\n  " + "\n  ".join(table))
    return names or list(table)

"""What all tests share: the helpers' path, the tiers, the order, and the `dataloaders` command."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
import torch.utils.data._utils

sys.path.insert(0, str(Path(__file__).resolve().parent))
from helpers import warm

pytest.register_assert_rewrite("helpers.contract", "helpers.ends")  # whose messages then say why

hypothesis.settings.register_profile("no deadline", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("no deadline")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
# "forkserver" pickles what workers get, as "spawn" does, but its workers need no seconds to import
# torch. The contract of backends and a few tests use both; all others use the first.
multiprocessing.set_forkserver_preload(["torch.utils.data"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device, and mark most of a product nightly."""
    products: dict[object, list[pytest.Item]] = defaultdict(list)
    tables: dict[object, list[pytest.Item]] = defaultdict(list)
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("covering") is not None:
            products[test].append(item)
        if item.get_closest_marker("thinned") is not None:
            tables[test].append(item)
        by_day = getattr(getattr(item, "cls", None), "by_day", None)
        if by_day is not None and item.originalname not in by_day:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.nightly)
    for cases in tables.values():
        mark = cases[0].get_closest_marker("thinned")
        assert mark is not None
        for number, case in enumerate(cases):
            if number % mark.args[0]:
                case.add_marker(pytest.mark.nightly)
    for cases in products.values():
        mark = cases[0].get_closest_marker("covering")
        assert mark is not None
        strength = mark.args[0] if mark.args else 1
        params: list[dict[str, Any]] = [case.callspec.params for case in cases]  # type: ignore[attr-defined]
        values = [{name: id(value) for name, value in each.items()} for each in params]
        kept = covering(values, strength)
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.nightly)
    if order := os.environ.get("TEST_ORDER"):
        _shuffle(items, order)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def _shuffle(items: list[pytest.Item], seed: str) -> None:
    """Order the files, and the tests in each, by this seed."""
    keys = {item: random.Random(f"{seed}{item.nodeid}").random() for item in items}
    files = {item.path: random.Random(f"{seed}{item.path.name}").random() for item in items}
    items.sort(key=lambda item: (files[item.path], keys[item]))


def covering(cases: Sequence[Mapping[str, int]], strength: int) -> set[int]:
    """Return the numbers of few of ``cases`` in which each value of each parameter occurs.

    With a ``strength`` of 2 each pair of values, with 3 each triple: see Cohen et al., "The AETG
    System", 1997. Each next case is the one that adds most.
    """
    parts = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*parts)
    kept: set[int] = set()
    while missing:
        best = max(range(len(parts)), key=lambda number: len(parts[number] & missing))
        kept.add(best)
        missing -= parts[best]
    return kept


def pytest_collection_finish() -> None:
    """Keep the garbage collector off what was imported.

    It would copy a million objects in each forked worker in which it runs.
    """
    gc.collect()
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        warm.begin()  # it takes seconds, which are no test's


def pytest_unconfigure() -> None:
    """Let the collector free what was imported."""
    gc.unfreeze()


@pytest.fixture
def workers_end_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time that torch gives a worker to end before it terminates it.

    A worker that raised ignores the request to end, and torch waits five seconds for it.
    """
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()  # an iterator that a traceback holds ends now, while the short time is set


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., SimpleNamespace]:
    """Return a function that runs `dataloaders` in this process, in a folder of its own.

    It returns the exit status and the output, and restores what a script has replaced.
    """
    from dataloaders.cli import main

    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DATALOADERS_BACKEND", "stock")  # `run` sets it for good
    monkeypatch.chdir(tmp_path)

    def carry_out(*words: object) -> SimpleNamespace:
        with monkeypatch.context() as kept:
            kept.setattr(sys, "argv", sys.argv)
            kept.setattr(sys, "path", ["", *sys.path])
            kept.setitem(sys.modules, "__main__", sys.modules["__main__"])
            capfd.readouterr()
            try:
                status = main([str(word) for word in words])
            except SystemExit as error:
                status = int(error.code or 0)
        for name, module in list(sys.modules.items()):
            if str(tmp_path) in repr(module):
                del sys.modules[name]
        out, err = capfd.readouterr()
        return SimpleNamespace(status=status, out=out, err=err)

    return carry_out

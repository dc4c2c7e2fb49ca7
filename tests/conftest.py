"""What every test module shares: the helpers on the path, and the marker for CUDA."""

from __future__ import annotations

import gc
import multiprocessing
import os
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

hypothesis.settings.register_profile(
    "no deadline", deadline=None
)  # how long is the machine's doing
hypothesis.settings.load_profile("no deadline")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What is sent to workers is pickled for "forkserver" as for "spawn", whose workers import torch for
# seconds each: the contract of backends and a few others look at both, all else at the first.
multiprocessing.set_forkserver_preload(["torch.utils.data"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device; leave most of a product to the night."""
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
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


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
    """Keep the collector off what was imported: it would copy that in each worker that it runs in.

    And a test that calls it would wait for a million objects.
    """
    gc.collect()
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        warm.begin()  # so that no test is as long as that takes


def pytest_unconfigure() -> None:
    """Let the interpreter take down what it was kept off."""
    gc.unfreeze()


@pytest.fixture
def workers_end_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shorten the time that torch gives a worker to end before it terminates it.

    A worker that raised does not hear the request to end, and torch waits five seconds for it.
    """
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()  # an iterator that a traceback holds ends now, while the short time is set


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., SimpleNamespace]:
    """Run `dataloaders` with these words here, in a folder of its own; return what it ends with.

    What a script replaces is put back.
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

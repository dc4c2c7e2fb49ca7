"""What all tests share: the helpers' path, the tiers, the order, and the `dataloaders` command."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

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
multiprocessing.set_forkserver_preload(["torchvision.datasets", "torchvision.transforms.v2"])


def pytest_configure(config: pytest.Config) -> None:
    """Show CUDA devices to ``pytest -m gpu`` alone: where there is one, backends deliver on it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests where there is no CUDA device, and mark most of a product nightly."""
    seen: dict[str, set[object]] = defaultdict(set)
    for item in items:
        test = item.nodeid.partition("[")[0]
        thinned = item.get_closest_marker("thinned")
        if thinned is not None:
            if len(seen[test]) % thinned.args[0]:
                item.add_marker(pytest.mark.nightly)
            seen[test].add(item)
        elif item.get_closest_marker("covering") is not None:
            values = {(name, id(value)) for name, value in item.callspec.params.items()}  # type: ignore[attr-defined]
            if values <= seen[test]:
                item.add_marker(pytest.mark.nightly)
            seen[test] |= values
    if seed := os.environ.get("TEST_ORDER"):  # of the files, and of the tests in each

        def drawn(name: str) -> float:
            return random.Random(f"{seed}{name}").random()

        items.sort(key=lambda item: (drawn(item.path.name), drawn(item.nodeid)))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and pytest -m gpu, which shows it")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


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
def path(tmp_path: Path) -> Path:
    """Return where a cache may be built."""
    return tmp_path / "a.h5"


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty folder for caches and for what is learned."""
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    cache_folder: Path,
) -> Callable[..., SimpleNamespace]:
    """Return a function that runs `dataloaders` in this process, in a folder of its own.

    It asserts the exit status, returns the output, and restores what a script has replaced.
    """
    from dataloaders.cli import main

    monkeypatch.setenv("DATALOADERS_BACKEND", "stock")  # `run` sets it for good
    monkeypatch.chdir(tmp_path)

    def carry_out(*words: object, status: int | None = 0) -> SimpleNamespace:
        with monkeypatch.context() as kept:
            kept.setattr(sys, "argv", sys.argv)
            kept.setattr(sys, "path", ["", *sys.path])
            kept.setitem(sys.modules, "__main__", sys.modules["__main__"])
            capfd.readouterr()
            try:
                ended = main([str(word) for word in words])
            except SystemExit as error:
                ended = int(error.code or 0)
        for name, module in list(sys.modules.items()):
            if str(tmp_path) in repr(module):
                del sys.modules[name]
        out, err = capfd.readouterr()
        assert status in (None, ended), out + err
        return SimpleNamespace(status=ended, out=out, err=err)

    return carry_out

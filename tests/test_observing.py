"""Observing: a process started as torch starts a worker, and what is said where there is none."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info
from torchvision.transforms import Compose, Normalize, ToTensor

from backends.dali import Dali
from backends.h5 import H5
from backends.prefetch import Prefetch
from backends.synthetic import Synthetic
from dataloaders import DataLoader
from dataloaders.errors import BackendUnavailable, CacheError
from dataloaders.observing import Unobserved, observe

_CHAIN = Compose([ToTensor(), Normalize((0.5,) * 3, (0.5,) * 3)])


class Images(Dataset[Any]):
    """Notes each process that reads it in a file."""

    def __init__(self, folder):
        self.log = folder / "processes"
        self.log.touch()
        self.transform = _CHAIN

    def __len__(self):
        return 16

    def __getitem__(self, index):
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.behave()
        return self.transform(Image.fromarray(np.full((8, 8, 3), index, np.uint8))), index

    def behave(self):
        pass

    @property
    def readers(self):
        """The processes that read it."""
        return {int(line) for line in self.log.read_text().split()}


class Dies(Images):
    def behave(self):
        os._exit(3)


class Ends(Images):
    def behave(self):
        os._exit(0)


class IsKilled(Images):
    def behave(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Images):
    def behave(self):
        time.sleep(1000)


class _Start:
    def __init__(self, worker):
        self.worker = worker

    def __call__(self, worker_id):
        info = get_worker_info()
        assert info is not None
        info.dataset.started = worker_id


def _facts(dataset):
    info = get_worker_info()
    told = None if info is None else (info.id, info.num_workers, info.dataset is dataset)
    return told, getattr(dataset, "started", None), torch.get_num_threads(), os.getppid()


def test_the_process_is_like_a_worker_of_the_loader(tmp_path):
    loader = DataLoader(Images(tmp_path), 4, num_workers=2, worker_init_fn=_Start(0))
    assert observe(loader, _facts) == ((0, 2, True), 0, 1, os.getpid())


def test_the_process_is_like_the_loop_of_a_loader_without_workers(tmp_path):
    loader = DataLoader(Images(tmp_path), 4, worker_init_fn=_Start(0))
    assert observe(loader, _facts) == (None, None, 1, os.getpid())


def test_nothing_is_drawn_here(tmp_path):
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(Images(tmp_path), 4, shuffle=True, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    observe(loader, _facts)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def _raises(dataset):
    raise LookupError("no such sample")


def test_what_the_look_raises_is_raised_here(tmp_path):
    with pytest.raises(LookupError, match="no such sample"):
        observe(DataLoader(Images(tmp_path), 4), _raises)


def test_facts_that_cannot_be_pickled(tmp_path):
    with pytest.raises(Unobserved, match="the facts about Images cannot be sent between processes"):
        observe(DataLoader(Images(tmp_path), 4), lambda dataset: lambda: 1)


BACKENDS = {"prefetch": lambda: Prefetch(tail=True), "dali": Dali, "h5": H5, "synthetic": Synthetic}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.thinned(3)
def test_nothing_is_observed_twice(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    dataset = Images(tmp_path)
    loader = DataLoader(dataset, 4, backend=BACKENDS[backend](), num_workers=1)
    for _ in range(2):
        loader.explain()
    observers = dataset.readers
    assert len(observers) == (backend in ("prefetch", "dali"))
    list(loader)
    readers = dataset.readers
    for _ in range(2):
        loader.explain()
        list(loader)
    assert os.getpid() not in dataset.readers
    if backend in ("h5", "synthetic"):
        assert dataset.readers == readers
    else:  # a new worker an epoch, and no other process
        assert len(dataset.readers) == len(observers) + 3


REASONS = {
    Dies: r"the process that read samples of Dies died \(.*exited unexpectedly",
    IsKilled: r"the process that read samples of IsKilled died \(.*",
    Hangs: r"Hangs returned no sample within 1 s in a separate process; .* a larger timeout=",
}


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.nightly
def test_a_dataset_that_ends_or_hangs_its_process(kind, tmp_path, monkeypatch, workers_end_fast):
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path / "cache"))
    reason = REASONS[kind]

    def loader(backend):
        return DataLoader(kind(tmp_path), 4, backend=backend, num_workers=1, timeout=1)

    plan = str(loader(Prefetch(tail=True)).explain())
    assert "images are normalised before the copy" in plan
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(plan)
    with pytest.raises(BackendUnavailable, match=reason):
        iter(loader(Dali()))
    with pytest.raises(BackendUnavailable, match=rf"{reason}.*Synthetic\(like=batch\)"):
        iter(loader(Synthetic()))
    with pytest.raises(CacheError, match=reason):
        iter(loader(H5()))


@pytest.mark.timeout(60)
@pytest.mark.nightly
def test_a_dataset_that_ends_its_process_without_an_error(tmp_path):
    loader = DataLoader(Ends(tmp_path), 4, backend=Prefetch(tail=True), num_workers=1, timeout=300)
    assert "the process that read samples of Ends died" in str(loader.explain())


def test_a_dataset_that_cannot_be_sent_to_a_process(tmp_path):
    class Local(Images):
        pass

    loader = DataLoader(
        Local(tmp_path),
        4,
        backend=Prefetch(tail=True),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    plan = str(loader.explain())
    assert "no process could be started to read samples of Local (" in plan
    assert "must be picklable unless they are forked" in plan


def test_a_default_device_that_has_no_generators(tmp_path, capfd):
    loader = DataLoader(Images(tmp_path), 4, backend=Prefetch(tail=True), num_workers=1)
    with torch.device("meta"):
        plan = str(loader.explain())
    assert "no process could be started to read samples of Images (" in plan
    assert capfd.readouterr().err == ""

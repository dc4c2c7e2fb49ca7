"""Threads of ours: what is told to torch and CUDA in them concerns no other thread."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from dataloaders.machine import threads
from dataloaders.machine.threads import limit_torch_threads, use_thread_local_capture


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_share_of_one_thread_leaves_others_as_they_were(count):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:

        def own():
            limit_torch_threads(count)
            return torch.get_num_threads()

        assert in_a_thread(own) == count
        assert in_a_thread(torch.get_num_threads) == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_threads_that_begin_at_once_put_back_what_was_there():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    together = threading.Barrier(8)

    def own():
        together.wait()
        limit_torch_threads(1)

    try:
        threads = [threading.Thread(target=own) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert in_a_thread(torch.get_num_threads) == 3
    finally:
        torch.set_num_threads(before)


def test_without_cuda_there_is_nothing_to_capture():
    assert use_thread_local_capture() is None  # nor does it begin to use CUDA
    if not torch.cuda.is_available():
        assert not torch.cuda.is_initialized()


def test_the_driver_is_told_of_this_thread(monkeypatch):
    told = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode):
            told.append(mode._obj.value)
            return 0

    monkeypatch.setattr(threads, "_driver", Driver)
    use_thread_local_capture()
    assert told == [1]


@pytest.mark.gpu
def test_the_driver_knows_the_mode_of_each_thread():
    torch.zeros(1, device="cuda")
    driver = threads._driver()

    def mode():
        swapped = ctypes.c_int(0)
        assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) == 0
        return swapped.value

    def told():
        torch.cuda.set_device(0)
        use_thread_local_capture()
        return mode()

    assert in_a_thread(told) == 1
    assert in_a_thread(mode) == 0

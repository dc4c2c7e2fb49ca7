"""Background threads: torch's threads and CUDA's capture mode in them; Ctrl-C during a wait."""

import ctypes
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dataloaders import DataLoader
from dataloaders.machine import threads
from helpers.processes import is_true_in_a_fork


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_limiting_one_thread_leaves_others_unchanged():
    before, together = torch.get_num_threads(), threading.Barrier(8)
    torch.set_num_threads(3)

    def own(count):
        together.wait()
        threads.limit_torch_threads(count)
        return torch.get_num_threads()

    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(own, range(1, 9))) == list(range(1, 9))
        assert in_a_thread(torch.get_num_threads) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_setting_the_capture_mode_does_not_initialise_cuda():
    threads.use_thread_local_capture()
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_the_driver_knows_the_mode_of_each_thread():
    torch.zeros(1, device="cuda")
    driver = threads._driver()

    def mode():
        swapped = ctypes.c_int(0)
        assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) == 0
        return swapped.value

    def exempt():
        torch.cuda.set_device(0)
        threads.use_thread_local_capture()
        return mode()

    assert in_a_thread(exempt) == 1
    assert in_a_thread(mode) == 0


# Waiting


@pytest.fixture
def interrupted_elsewhere():
    """Interrupt this process in a thread other than the one that waits."""
    gone, wanted = threading.Event(), threading.Event()

    def interrupt():
        wanted.wait()
        if not gone.wait(0.3):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    # The kernel now gives the signal to the other thread: nothing wakes a wait of this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    yield wanted.set
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    gone.set()
    wanted.set()
    thread.join()


def test_ctrl_c_delivered_to_another_thread_ends_a_wait_for_a_batch(interrupted_elsewhere):
    ready = multiprocessing.get_context("fork").Event()

    def late(samples):
        assert ready.wait(20)
        return samples

    batches = iter(DataLoader([1], num_workers=1, collate_fn=late, backend="prefetch"))
    interrupted_elsewhere()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    ready.set()
    assert next(batches) == [1]


def test_a_child_forked_while_a_thread_is_limited_can_limit_its_own():
    ended = threading.Event()

    def tell():
        while not ended.is_set():
            threads.limit_torch_threads(1)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        for _ in range(20):
            assert is_true_in_a_fork(lambda: threads.limit_torch_threads(1) is None)
    finally:
        ended.set()
        thread.join()

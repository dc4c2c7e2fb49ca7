from __future__ import annotations

import os
import signal
import threading
import time
from queue import SimpleQueue

import pytest

from dataloaders.machine import waiting


@pytest.fixture
def unheard():
    """Interrupts this process, in a thread that is not the one that waits."""
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


def test_ctrl_c_that_another_thread_is_given_ends_a_wait_for_a_queue(unheard):
    unheard()
    with pytest.raises(KeyboardInterrupt):
        waiting.get(SimpleQueue())


def test_ctrl_c_that_another_thread_is_given_ends_a_wait_for_a_thread(unheard):
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    unheard()
    try:
        with pytest.raises(KeyboardInterrupt):
            waiting.join(thread)
    finally:
        end.set()
        thread.join()


def test_what_comes_late_is_given():
    queue = SimpleQueue()
    thread = threading.Thread(target=lambda: (time.sleep(0.3), queue.put("late")))
    thread.start()
    assert waiting.get(queue) == "late"
    waiting.join(thread)
    assert not thread.is_alive()

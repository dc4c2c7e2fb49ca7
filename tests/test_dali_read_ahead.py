"""Images read ahead on threads: in order, in bounded memory, errors in place, and with an end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder

from backends.dali import read_ahead
from backends.dali.read_ahead import ReadAhead
from backends.dali.sources import Failed, Found, Image, Source, source_for
from helpers.image_files import noise
from helpers.vision_datasets import ARRAYS

SIZE = 1000
"""Bytes of each image."""


class Numbers(Source):
    """Images that consist of their number, read when they are let go."""

    kind = "pixels"
    transform = None
    user_code = False

    def __init__(self, *, open: bool = True) -> None:
        self.gate = threading.Event()
        self.read: list[int] = []
        self.threads: set[int] = set()
        if open:
            self.gate.set()

    def __len__(self) -> int:
        return 10_000

    def image(self, index: Any, *, decode: bool = False) -> Found:
        assert self.gate.wait(60)
        self.read.append(index)
        self.threads.add(threading.get_ident())
        if index % 7 == 6:
            return Failed(ValueError(f"no {index}"), "file")
        return Image(np.full((10, SIZE // 10, 1), index % 256, np.uint8), 10, SIZE // 10)

    def sample(self, index: Any, image: Any) -> Any:
        return image


class AtOnce(Numbers):
    at_once = True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def settled(numbers: Numbers) -> int:
    """How many images were read, once no more are."""
    before = -1
    while before != len(numbers.read):
        before = len(numbers.read)
        time.sleep(0.05)
    return before


BEFORE: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _of_others() -> None:
    """Threads of readers that another test's traceback still holds are not looked at here."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())


def ours() -> list[threading.Thread]:
    """Threads of this test's readers that live."""
    return [
        each
        for each in set(threading.enumerate()) - BEFORE
        if each.name.startswith("dataloaders-dali-read")
    ]


def check(keys: list[int], found: list[Found]) -> None:
    assert len(found) == len(keys)
    for key, image in zip(keys, found, strict=True):
        if key % 7 == 6:
            assert isinstance(image, Failed)
            assert str(image.error) == f"no {key}"
        else:
            assert not isinstance(image, Failed)
            assert (image.data == key % 256).all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 999), max_size=9), max_size=12),
    st.integers(1, 5),
    st.sampled_from([1, 5 * SIZE, 1 << 20]),
    st.sampled_from([Numbers, AtOnce]),
)
def test_batches_come_in_order(
    batches: list[list[int]], threads: int, most_bytes: int, kind: type[Numbers]
) -> None:
    reader = ReadAhead(kind(), threads=threads, most_bytes=most_bytes)
    readings = [reader(keys) for keys in batches]
    for keys, reading in zip(batches, readings, strict=True):
        check(keys, reading.result(60))
        assert reading.done()
    assert len(ours()) <= threads
    reader.close()
    assert not ours()


def test_files_of_a_folder(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / "class").mkdir(exist_ok=True)
        noise(9, 8, seed=number).save(tmp_path / "class" / f"{number}.png")
    dataset = ImageFolder(str(tmp_path))
    source = source_for(dataset)
    assert isinstance(source, Source)
    reader = ReadAhead(source, threads=3)
    keys = [3, 0, 8, 8]
    for image, key in zip(reader(keys).result(60), keys, strict=True):
        assert image.name == dataset.samples[key][0]
        assert image.data.tobytes() == Path(image.name).read_bytes()  # type: ignore[union-attr]
    reader.close()


def test_pixels_in_memory_are_taken_at_once(tmp_path: Path) -> None:
    source = source_for(ARRAYS["cifar10"][0](tmp_path))
    assert isinstance(source, Source)
    reader = ReadAhead(source, threads=4)
    found = reader([5, 1]).result(60)
    assert [image.data.shape for image in found] == [(32, 32, 3)] * 2  # type: ignore[union-attr]
    assert len(ours()) == 1
    reader.close()


def test_several_threads_read_one_batch() -> None:
    numbers = Numbers(open=False)
    reader = ReadAhead(numbers, threads=3)
    reading = reader(list(range(6)))
    until(lambda: len(ours()) == 3)
    numbers.gate.set()
    check(list(range(6)), reading.result(60))
    reader.close()


def test_no_more_bytes_are_read_ahead_than_was_said() -> None:
    numbers = Numbers()
    reader = ReadAhead(numbers, threads=2, most_bytes=10 * SIZE)
    readings = [reader([0, 1, 2, 3]) for _ in range(20)]
    # What is begun below the limit is finished: an image for each thread.
    assert 10 <= settled(numbers) <= 10 + 2
    assert readings[0].done()
    assert not readings[3].done()
    check([0, 1, 2, 3], readings[0].result(60))
    until(lambda: len(numbers.read) >= 14)
    assert settled(numbers) <= 14 + 2
    for reading in readings:
        check([0, 1, 2, 3], reading.result(60))
    assert len(numbers.read) == 80
    reader.close()


def test_a_batch_larger_than_all_that_may_be_read() -> None:
    reader = ReadAhead(Numbers(), threads=2, most_bytes=1)
    for reading in [reader(list(range(50))) for _ in range(3)]:
        check(list(range(50)), reading.result(60))
    reader.close()


def test_readings_that_nobody_holds_take_no_room() -> None:
    numbers = Numbers()
    reader = ReadAhead(numbers, threads=2, most_bytes=4 * SIZE)
    readings = [reader([0, 1, 2, 3]) for _ in range(20)]
    settled(numbers)
    del readings[:]
    gc.collect()
    before = len(numbers.read)
    check([5, 6], reader([5, 6]).result(60))
    assert len(numbers.read) <= before + 2 + 2
    reader.close()


def test_the_next_batch_is_read_when_one_that_filled_the_room_is_dropped() -> None:
    numbers = Numbers()
    reader = ReadAhead(numbers, threads=2, most_bytes=SIZE)
    first, second = reader([0, 1]), reader([2, 3])
    until(first.done)
    settled(numbers)
    del first
    gc.collect()
    check([2, 3], second.result(20))
    reader.close()


def test_closing_wakes_whoever_waits() -> None:
    numbers = Numbers(open=False)
    reader = ReadAhead(numbers, threads=2)
    readings = [reader([0, 1]), reader([2])]
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            readings[0].result(60)
        except BaseException as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    threading.Timer(0.05, numbers.gate.set).start()
    reader.close()
    reader.close()
    waiting.join(60)
    assert [type(error) for error in raised] in ([CancelledError], [])
    assert not ours()
    with pytest.raises(RuntimeError, match="this reader of images is closed"):
        reader([1])


def test_a_file_that_never_comes_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_PATIENCE_S", 0.05)
    numbers = Numbers(open=False)
    reader = ReadAhead(numbers, threads=2)
    reading = reader([0, 1])
    reader.close()
    with pytest.raises(CancelledError):
        reading.result(60)
    numbers.gate.set()
    until(lambda: not ours())


def test_a_reader_that_is_dropped_ends_its_threads() -> None:
    reader = ReadAhead(Numbers(), threads=3)
    check([1, 2], reader([1, 2]).result(60))
    del reader
    gc.collect()
    until(lambda: not ours())


def test_a_mistake_of_the_source_reaches_the_consumer() -> None:
    class Wrong(Numbers):
        def image(self, index: Any, *, decode: bool = False) -> Found:
            if index == 3:
                raise MemoryError("too much")
            return super().image(index)

    reader = ReadAhead(Wrong(), threads=2)
    readings = [reader([1, 3, 2]), reader([1, 2])]
    with pytest.raises(MemoryError, match="too much"):
        readings[0].result(60)
    check([1, 2], readings[1].result(60))
    reader.close()


def _in_child(reader: ReadAhead, found: Any) -> None:
    found.put([int(image.data[0, 0, 0]) for image in reader([4, 5]).result(60)])  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_in_a_fork() -> None:
    reader = ReadAhead(Numbers(), threads=2)
    reader([1, 2]).result(60)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(reader, found))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert found.get() == [4, 5]
    check([3], reader([3]).result(60))
    reader.close()


class Slow(threading.Condition):
    """The loop's thread goes on from here when all that it asked for is read."""

    def __init__(self, readings: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._readings = readings

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if threading.current_thread() is threading.main_thread():
            until(lambda: all(reading is None or reading.done() for reading in self._readings()))


@pytest.mark.parametrize("kind", [Numbers, AtOnce])
def test_images_that_are_read_while_they_are_asked_for(kind: type[Numbers]) -> None:
    reader = ReadAhead(kind(), threads=2)
    shelf = reader._shelf
    shelf._changed = Slow(lambda: [batch.reading() for batch in list(shelf._kept) if batch.keys])
    assert [len(reader([n] * n).result()) for n in (1, 3, 0, 2)] == [1, 3, 0, 2]
    reader.close()

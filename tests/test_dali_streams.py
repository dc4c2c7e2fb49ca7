"""From DALI's memory to the loop's stream: in which order, on streams that only write down.

DALI's memory is read on the line's own stream and on no other; what is handed over is torch's,
behind an event for which the loop's stream waits before it may use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali import epoch, line
from backends.dali.line import Line
from backends.dali.plan import work_of
from backends.dali.sources import Image
from backends.dali.task import Made, Task

DEVICE = torch.device("cuda", 1)


class Cuda:
    """What `torch.cuda` is asked for, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = "default"
        cuda = self

        class Event:
            def record(self, stream: Any) -> None:
                cuda.told.append(f"event on {stream.name}")

        self.Event = Event

    def Stream(self, device: torch.device) -> Any:
        self.told.append(f"stream of {device}")
        return SimpleNamespace(name="side")

    def set_device(self, device: torch.device) -> None:
        self.told.append(f"thread on {device}")

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    played = Cuda()
    for name in ("Event", "Stream", "set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(played, name))
    monkeypatch.setattr(
        line, "use_thread_local_capture", lambda: played.told.append("captures apart")
    )
    return played


class Graph:
    def __init__(self, cuda: Cuda, images: Any) -> None:
        self.cuda, self.images = cuda, images

    def take(self) -> Any:
        self.cuda.told.append(f"taken on {self.cuda.current}")
        return self.images


@pytest.mark.parametrize("kind", ["one", "list"])
@pytest.mark.parametrize("works", [False, True], ids=["as taken", "worked on"])
def test_what_dali_made_leaves_its_memory_before_the_event(
    cuda: Cuda, kind: str, works: bool
) -> None:
    taken: Any = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 4, 5, 3)
    taken = taken.permute(0, 3, 1, 2)
    if kind == "list":
        taken = [taken[0], taken[1, :, :2]]

    def step(images: Any, actions: Any) -> Any:
        cuda.told.append(f"work on {cuda.current}")
        if not works:
            return images
        return images.flip(-1) if kind == "one" else [image.flip(-1) for image in images]

    expected = step(taken, None)
    cuda.told.clear()
    ours = Line()
    ours._job = SimpleNamespace(device=DEVICE)  # type: ignore[assignment]
    ours._steps = [step]  # type: ignore[list-item]
    task: Any = SimpleNamespace(actions=[])
    for batch in range(2):
        made = ours._made(task, Graph(cuda, taken))  # type: ignore[arg-type]
        begun = ["stream of cuda:1"] if not batch else []
        assert cuda.told == [*begun, "taken on side", "work on side", "event on side"]
        cuda.told.clear()
        theirs = {image.untyped_storage().data_ptr() for image in taken}
        for image, wanted in zip(made.images, expected, strict=True):
            assert torch.equal(image, wanted)
            assert image.untyped_storage().data_ptr() not in theirs
        assert made.ready is not None


def test_the_thread_is_on_the_device_before_a_graph_is_built(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*given: Any, **options: Any) -> Any:
        cuda.told.append(f"graph on {options['device']}")
        return SimpleNamespace(feed=lambda *images: None)

    monkeypatch.setattr(line, "Graph", built)
    work = work_of(v2.Compose([v2.CenterCrop(4), v2.ToImage()]), form="pil", device="cuda")
    source = SimpleNamespace(channels=3, kind="pixels", form="pil")
    job: Any = SimpleNamespace(
        work=work, kind="pixels", source=source, device=DEVICE, threads=1, batch_size=2, fast=()
    )
    ours = Line()
    ours.begin(job)
    reading: Future[Any] = Future()
    reading.set_result([Image(np.zeros((8, 8, 3), np.uint8), 8, 8)])
    task = Task(1, [0], np.zeros((1, 4), np.uint32), reading)
    ours.start(task)
    assert task.item is None
    assert cuda.told == ["thread on cuda:1", "captures apart", "graph on cuda:1"]


@pytest.mark.parametrize("count", [1, 3])
def test_the_loops_stream_waits_and_then_holds_each_image(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    stream = SimpleNamespace(wait_event=lambda event: told.append(("waits", event)))

    def current_stream(device: torch.device) -> Any:
        assert device == DEVICE
        return stream

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    images: Any = [
        SimpleNamespace(device=DEVICE, record_stream=lambda used, place=place: told.append(place))
        for place in range(count)
    ]
    task: Any = None
    epoch._wait_for(Made(task, images if count > 1 else images[0], "event"))
    assert told == [("waits", "event"), *range(count)]

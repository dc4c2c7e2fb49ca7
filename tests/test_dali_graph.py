"""One graph of DALI: what it decodes and does is what Pillow and torchvision do, run after run."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataloaders.transforms.actions import Action, Primitive, Sizes
from dataloaders.transforms.primitives.geometry import (
    Crop,
    HorizontalFlip,
    Pad,
    Resize,
    VerticalFlip,
)

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali.graph import Graph, GraphFailed
from backends.dali.nodes import FAST, Node, node_for

CPU = torch.device("cpu")


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with noise: what JPEG's chroma is made for."""
    rng = np.random.default_rng((seed, height, width))
    y, x = np.mgrid[:height, :width]
    planes = [
        120 + 100 * np.sin(x / rng.uniform(4, 40) + y / rng.uniform(4, 40) + rng.uniform(0, 6))
        for _ in range(3)
    ]
    noisy = np.stack(planes, 2) + rng.normal(0, 6, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def file_of(image: Image.Image, kind: str = "JPEG", **options: Any) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def opened(file: np.ndarray) -> Image.Image:
    return Image.open(io.BytesIO(file.tobytes())).convert("RGB")


def sizes_of(files: Sequence[np.ndarray]) -> Sizes:
    images = [opened(file) for file in files]
    return Sizes([image.height for image in images], [image.width for image in images])


def nodes_of(
    *primitives: Primitive, fast: Sequence[str] = ("resize",), device: str = "cuda"
) -> list[Node]:
    found = [node_for(p, form="pil", device=device, fast=fast) for p in primitives]
    assert not [node for node in found if isinstance(node, str)]
    return found  # type: ignore[return-value]


def graph_of(*primitives: Primitive, batch_size: int = 8, **options: Any) -> Graph:
    made = {"device": CPU, "threads": 2, "depth": 2, **options}
    return Graph(nodes_of(*primitives), batch_size=batch_size, **made)


def as_arrays(taken: torch.Tensor | list[torch.Tensor]) -> list[np.ndarray]:
    """Images [H, W, C]."""
    return [image.permute(1, 2, 0).numpy() for image in taken]


def cropped(*windows: tuple[int, int, int, int], where: Any = None) -> Action:
    columns = np.array(windows, np.int64).T
    return Action(Crop(), dict(zip(Crop.numbers, columns, strict=True)), where)


FILES = [
    file_of(picture(61, 83), quality=92),
    file_of(picture(48, 50, 1), quality=70, subsampling=0),
    file_of(picture(33, 90, 2), progressive=True),
    file_of(picture(40, 30, 3).convert("L")),
]


def test_a_file_is_decoded_as_pillow_does_it() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned: torchvision leaves it as it is
    files = [
        *FILES,
        file_of(picture(20, 31), exif=exif),
        file_of(picture(9, 1)),
        file_of(picture(24, 25), "PNG"),
        file_of(picture(24, 25), "PPM"),
    ]
    graph = graph_of()
    graph.feed(files, [], sizes_of(files))
    for file, image in zip(files, as_arrays(graph.take()), strict=True):
        assert np.array_equal(image, np.asarray(opened(file)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_window_of_a_file_is_that_part_of_it(data: st.DataObject) -> None:
    """Those inside are cut out by the decoder, others behind it; both to the pixel."""
    sizes = sizes_of(FILES)
    outside = data.draw(st.booleans())
    windows = []
    for height, width in zip(sizes.height.tolist(), sizes.width.tolist(), strict=True):
        spare = 20 if outside else 0
        top = data.draw(st.integers(-spare, height - 1))
        left = data.draw(st.integers(-spare, width - 1))
        h = data.draw(st.integers(1, height - top + spare))
        w = data.draw(st.integers(1, width - left + spare))
        windows.append((top, left, h, w))
    where = data.draw(st.none() | st.lists(st.booleans(), min_size=4, max_size=4).map(np.array))
    action = cropped(*windows, where=where)
    SHARED.feed(FILES, [action], sizes)
    for place, image in enumerate(as_arrays(SHARED.take())):
        assert np.array_equal(image, np.asarray(action.apply(place, opened(FILES[place]))))


SHARED = graph_of(Crop())


def test_what_the_decoder_may_not_cut_out_is_cut_out_behind_it() -> None:
    """libjpeg takes chroma of a column at the left edge otherwise when it is all that is asked."""
    file = file_of(picture(64, 70, 5), subsampling=2, quality=80)
    narrow = cropped((3, 0, 30, 1))
    graph = graph_of(Crop())
    graph.feed([file], [narrow], sizes_of([file]))
    assert np.array_equal(as_arrays(graph.take())[0], np.asarray(narrow.apply(0, opened(file))))


@settings(max_examples=30, deadline=None)
@given(
    across=st.lists(st.booleans(), min_size=4, max_size=4),
    down=st.none() | st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_flips(across: list[bool], down: list[bool] | None) -> None:
    actions = [
        Action(HorizontalFlip(), {}, np.array(across)),
        Action(VerticalFlip(), {}, None if down is None else np.array(down)),
    ]
    FLIPS.feed(FILES, actions, sizes_of(FILES))
    for place, image in enumerate(as_arrays(FLIPS.take())):
        expected = opened(FILES[place])
        for action in actions:
            expected = action.apply(place, expected)
        assert np.array_equal(image, np.asarray(expected))


FLIPS = graph_of(HorizontalFlip(), VerticalFlip())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(32, 32), (20, 100)])
def test_dalis_filters_differ_by_as_much_as_they_say(mode: str, size: tuple[int, int]) -> None:
    graph = graph_of(Crop(), Resize(mode), HorizontalFlip())
    actions = [
        cropped((5, 3, 40, 60), (0, 0, 48, 50), (3, 7, 20, 33), (1, 1, 39, 29)),
        Action(Resize(mode), {"height": np.full(4, size[0]), "width": np.full(4, size[1])}),
        Action(HorizontalFlip(), {}, np.array([True, False, True, False])),
    ]
    graph.feed(FILES, actions, sizes_of(FILES))
    taken = graph.take()
    assert isinstance(taken, torch.Tensor)
    assert taken.dtype is torch.uint8
    assert taken.shape == (4, 3, *size)
    for place, image in enumerate(as_arrays(taken)):
        expected = opened(FILES[place])
        for action in actions:
            expected = action.apply(place, expected)
        off = np.abs(image.astype(int) - np.asarray(expected, int))
        assert off.max() <= 19
        assert (off <= 1).mean() > 0.97  # small images: few levels, and much of them edges
        assert (off <= 2).mean() > 0.99


def test_a_resize_that_samples_leave_out_leaves_them_alone() -> None:
    graph = graph_of(Resize("bilinear"))
    where = np.array([True, False, False, True])
    numbers = {"height": np.full(4, 17), "width": np.full(4, 19)}
    graph.feed(FILES, [Action(Resize("bilinear"), numbers, where)], sizes_of(FILES))
    taken = as_arrays(graph.take())
    assert taken[0].shape == taken[3].shape == (17, 19, 3)
    for place in (1, 2):
        assert np.array_equal(taken[place], np.asarray(opened(FILES[place])))


def test_bytes_without_antialias_differ_by_one_level_at_most() -> None:
    primitive = Resize("bilinear", antialias=False)
    node = node_for(primitive, form="bytes", device="cuda")
    assert isinstance(node, Node)
    assert node.exact == "1 level"
    pixels = [np.asarray(picture(40, 50, seed)) for seed in range(3)]
    action = Action(primitive, {"height": np.full(3, 23), "width": np.full(3, 31)})
    graph = Graph([node], batch_size=3, device=CPU, threads=1, encoded=False)
    graph.feed(pixels, [action])
    for place, image in enumerate(graph.take()):
        expected = action.apply(place, torch.from_numpy(pixels[place].copy()).permute(2, 0, 1))
        assert (image.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_in_one_piece_come_as_one_tensor(channels: int) -> None:
    """The usual augmentation of CIFAR: a padded crop and a flip."""
    rng = np.random.default_rng(0)
    pixels = list(rng.integers(0, 256, (5, 32, 32, channels), np.uint8))
    actions = [
        cropped((-4, 2, 32, 32), (0, 0, 32, 32), (4, 4, 32, 32), (3, -3, 32, 32), (0, 1, 32, 32)),
        Action(HorizontalFlip(), {}, np.array([True, False, True, False, True])),
    ]
    graph = graph_of(Crop(), HorizontalFlip(), encoded=False)
    graph.feed(pixels, actions)
    taken = graph.take()
    assert isinstance(taken, torch.Tensor)
    for place in range(5):
        expected = torch.from_numpy(pixels[place]).permute(2, 0, 1)
        for action in actions:
            expected = action.apply(place, expected)
        assert torch.equal(taken[place], expected)


@pytest.mark.parametrize(
    ("fill", "channels"), [(0, 3), (255, 1), ((7, 80, 200), 3), ((9,), 1), (None, 3)]
)
@pytest.mark.parametrize("where", [None, np.array([True, False, True])])
def test_borders(fill: Any, channels: int, where: Any) -> None:
    """As wide as asked for, and for each sample its own; negative ones cut off."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (9 + k, 12 - k, channels), np.uint8) for k in range(3)]
    sides = {"left": [1, 0, 3], "top": [0, 2, -2], "right": [4, 0, -3], "bottom": [0, 1, 5]}
    numbers = {name: np.array(side) for name, side in sides.items()}
    action = Action(Pad(fill), numbers, where)
    graph = graph_of(Pad(fill), Crop(), encoded=False, channels=channels)
    crop = cropped((-1, 2, 8, 6), (0, 0, 9, 9), (2, 1, 5, 5))
    graph.feed(pixels, [action, crop])
    for place, image in enumerate(as_arrays(graph.take())):
        plain = pixels[place][:, :, 0] if channels == 1 else pixels[place]
        expected = crop.apply(place, action.apply(place, Image.fromarray(plain)))
        assert np.array_equal(image.reshape(np.asarray(expected).shape), np.asarray(expected))


def test_what_comes_out_is_never_the_memory_that_went_in() -> None:
    pixels = [np.full((4, 5, 3), level, np.uint8) for level in range(3)]
    graph = graph_of(encoded=False)
    graph.feed(pixels, [])
    for image in graph.take():
        image.fill_(99)
    assert [int(array.max()) for array in pixels] == [0, 1, 2]


def test_grey_files_stay_grey_if_asked() -> None:
    graph = graph_of(channels=1)
    graph.feed([FILES[3]], [], sizes_of([FILES[3]]))
    assert np.array_equal(
        as_arrays(graph.take())[0][:, :, 0], np.asarray(opened(FILES[3]).convert("L"))
    )


def test_runs_come_in_order_and_the_last_may_be_short() -> None:
    graph = graph_of(Crop(), depth=3)
    batches = [FILES[:4], FILES[1:3], FILES[2:3]]
    for files in batches:
        graph.feed(files, [cropped(*[(0, 0, 5, 7)] * len(files))], sizes_of(files))
    assert len(graph) == 3
    for files in batches:
        taken = as_arrays(graph.take())
        assert len(taken) == len(files)
        for file, image in zip(files, taken, strict=True):
            assert np.array_equal(image, np.asarray(opened(file))[:5, :7])
    assert len(graph) == 0


def test_batches_may_be_kept() -> None:
    """Over many runs, the graph's end and garbage collection; and written into."""
    graph = graph_of(Crop(), Resize("bilinear"), depth=3)
    sizes = sizes_of(FILES)

    def feed(graph: Graph, number: int) -> None:
        window = cropped(*[(number % 20, 0, 10, 20)] * 4)
        resized = {"height": np.full(4, 64), "width": np.full(4, 64)}
        graph.feed(FILES, [window, Action(Resize("bilinear"), resized)], sizes)

    kept, copies = [], []
    feed(graph, 0)
    feed(graph, 1)
    for number in range(40):
        taken = graph.take()
        assert isinstance(taken, torch.Tensor)
        if number % 3 == 0:
            kept.append(taken)
            copies.append(taken.clone())
        else:
            taken.zero_()
        if number < 38:
            feed(graph, number + 2)
    end = weakref.ref(graph)
    graph.close()
    del graph
    gc.collect()
    assert end() is None
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
    assert len({copy.sum().item() for copy in copies}) > 5


def test_a_run_that_fails_takes_no_other_one_with_it() -> None:
    cut = file_of(picture(200, 200, 8))[:-2000]
    graph = graph_of(HorizontalFlip(), depth=3)
    flipped = Action(HorizontalFlip())
    good, sizes = FILES[:2], sizes_of(FILES[:2])
    for _ in range(2):
        graph.feed(good, [flipped], sizes)
        graph.feed([good[0], cut], [flipped], Sizes([61, 200], [83, 200]))
        graph.feed(good[::-1], [flipped], Sizes(sizes.height[::-1], sizes.width[::-1]))
        first = as_arrays(graph.take())
        with pytest.raises(GraphFailed, match="decode") as caught:
            graph.take()
        assert caught.value.sample == 1
        third = as_arrays(graph.take())
        for one, other, file in zip(first, third[::-1], good, strict=True):
            expected = np.asarray(opened(file))[:, ::-1]
            assert np.array_equal(one, expected)
            assert np.array_equal(other, expected)


def test_failures_leave_no_threads_behind() -> None:
    graph = graph_of()
    broken = np.frombuffer(b"no image", np.uint8)
    counts = []
    kept = []
    gc.disable()  # nor must they wait to be collected
    try:
        for _ in range(12):
            graph.feed([broken], [], Sizes([1], [1]))
            with pytest.raises(GraphFailed) as caught:
                graph.take()
            kept.append(caught.value)
            counts.append(_threads())
    finally:
        gc.enable()
    assert counts[-1] <= counts[0] + 2
    assert all(failed.cause is not None for failed in kept)


@pytest.mark.parametrize("file", [b"", b"x", b"not an image, at all, by any means"])
def test_what_is_no_image_fails(file: bytes) -> None:
    graph = graph_of()
    graph.feed([FILES[0], np.frombuffer(file, np.uint8)], [], Sizes([61, 1], [83, 1]))
    with pytest.raises(GraphFailed):
        graph.take()
    graph.feed(FILES[:1], [], sizes_of(FILES[:1]))
    assert len(as_arrays(graph.take())) == 1


def test_images_are_let_go_of_once_they_are_used() -> None:
    graph = graph_of(HorizontalFlip())
    fed: list[weakref.ref[np.ndarray]] = []
    for number in range(12):
        files = [file.copy() for file in FILES]
        fed += [weakref.ref(file) for file in files]
        graph.feed(files, [Action(HorizontalFlip())], sizes_of(files))
        del files
        if number % 2:
            graph.take()
            graph.take()
    gc.collect()
    alive = sum(file() is not None for file in fed)
    assert alive <= 3 * len(FILES)  # DALI may hold what it was given last


def test_closing_while_another_thread_takes() -> None:
    graph = graph_of(Resize("lanczos"), depth=20)
    size = {"height": np.full(4, 400), "width": np.full(4, 400)}
    for _ in range(20):
        graph.feed(FILES, [Action(Resize("lanczos"), size)], sizes_of(FILES))
    ended: list[BaseException] = []
    begun = threading.Event()

    def take() -> None:
        while not ended:
            try:
                graph.take()
                begun.set()
            except RuntimeError as error:
                if "feed() one first" not in str(error):  # all were taken before the end came
                    ended.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert begun.wait(60)
    graph.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "closed" in str(ended[0])


def test_one_thread_feeds_while_another_takes() -> None:
    graph = graph_of(Crop(), depth=4)
    sizes = sizes_of(FILES)
    room, fed = threading.Semaphore(4), threading.Semaphore(0)
    rows = [1 + number % 30 for number in range(60)]

    def feeder() -> None:
        for row in rows:
            room.acquire()
            graph.feed(FILES, [cropped(*[(0, 0, row, 9)] * 4)], sizes)
            fed.release()

    thread = threading.Thread(target=feeder, daemon=True)
    thread.start()
    seen = []
    for _ in rows:
        assert fed.acquire(timeout=60)
        seen.append(as_arrays(graph.take())[0].shape[0])
        room.release()
    thread.join(60)
    assert seen == rows


def test_taking_leaves_the_interpreter_to_other_threads() -> None:
    graph = graph_of(Resize("lanczos"))
    size = {"height": np.full(4, 900), "width": np.full(4, 900)}
    graph.feed(FILES, [Action(Resize("lanczos"), size)], sizes_of(FILES))
    counted, over = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not over.is_set():
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted
        graph.take()
        assert counted > before
    finally:
        over.set()
        thread.join()


def test_it_says_what_does_not_fit() -> None:
    graph = graph_of(HorizontalFlip(), batch_size=2, depth=1)
    flipped, sizes = Action(HorizontalFlip()), sizes_of(FILES[:1])
    with pytest.raises(ValueError, match=r"0 images: a run takes 1 to 2"):
        graph.feed([], [flipped], sizes)
    with pytest.raises(ValueError, match=r"3 images: a run takes 1 to 2"):
        graph.feed(FILES[:3], [flipped], sizes)
    with pytest.raises(ValueError, match=r"0 actions for a graph of 1 nodes"):
        graph.feed(FILES[:1], [], sizes)
    with pytest.raises(ValueError, match="without the sizes"):
        graph.feed(FILES[:1], [flipped])
    with pytest.raises(RuntimeError, match=r"feed\(\) one first"):
        graph.take()
    graph.feed(FILES[:1], [flipped], sizes)
    with pytest.raises(RuntimeError, match="depth=1"):
        graph.feed(FILES[:1], [flipped], sizes)
    graph.take()


def test_what_dali_does_not_take_leaves_the_other_runs_alone() -> None:
    graph = graph_of(HorizontalFlip())
    flipped, sizes = Action(HorizontalFlip()), sizes_of(FILES[:1])
    graph.feed(FILES[:1], [flipped], sizes)
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        graph.feed(["a path"], [flipped], sizes)  # type: ignore[list-item]
    graph.feed(FILES[:1], [flipped], sizes)
    expected = np.asarray(opened(FILES[0]))[:, ::-1]
    for _ in range(2):
        assert np.array_equal(as_arrays(graph.take())[0], expected)


def test_closing_ends_its_threads() -> None:
    before = _threads()
    graph = graph_of(Resize("lanczos"), threads=3, depth=4)
    size = {"height": np.full(4, 500), "width": np.full(4, 500)}
    for _ in range(4):
        graph.feed(FILES, [Action(Resize("lanczos"), size)], sizes_of(FILES))
    assert _threads() > before
    kept = graph.take()
    graph.close()
    graph.close()
    for _ in range(100):  # a thread that has ended may be listed for a moment
        if _threads() <= before:
            break
        time.sleep(0.02)
    assert _threads() <= before
    assert len(kept) == 4
    with pytest.raises(RuntimeError, match="closed"):
        graph.take()
    with pytest.raises(RuntimeError, match="closed"):
        graph.feed(FILES, [Action(Resize("lanczos"), size)], sizes_of(FILES))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


SCRIPT = """
import io, os, sys
import numpy as np, torch
from PIL import Image
from backends.dali.graph import Graph
from dataloaders.transforms.actions import Sizes

buffer = io.BytesIO()
Image.fromarray(np.arange(48000, dtype=np.uint8).reshape(100, 160, 3)).save(buffer, "JPEG")
file = np.frombuffer(buffer.getvalue(), np.uint8)
graph = Graph([], batch_size=64, device=torch.device("cpu"), threads=2, depth=8)
for _ in range(6):
    graph.feed([file] * 64, [], Sizes([100] * 64, [160] * 64))
kept = graph.take()
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "del graph",
        # Kept: a thread that frees a view meanwhile aborts in torch, whose views let go of the GIL.
        "import threading\ntaken = []\nthreading.Thread(target=lambda: [taken.append(graph.take())"
        " for _ in range(5)], daemon=True).start()",
    ],
)
@pytest.mark.nightly
def test_the_interpreter_ends_with_runs_on_their_way(end: str) -> None:
    done = _run(SCRIPT + end)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.nightly
def test_a_forked_child_ends() -> None:
    """Its parent's threads are not there; waiting for them, it would hang."""
    source = """
def in_child(body):
    pid = os.fork()
    if pid == 0:
        body()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, body

def drops():
    global graph
    del graph
    gc.collect()

def makes_another():
    new = Graph([], batch_size=1, device=torch.device("cpu"), threads=1)
    new.feed([file], [], Sizes([100], [160]))
    assert torch.equal(new.take()[0], kept[0])

def takes():
    try:
        graph.take()
    except RuntimeError as error:
        assert "before a fork" in str(error)
    else:
        raise AssertionError

import gc
def closes():
    takes()
    graph.close()
    makes_another()

for body in (drops, closes):
    in_child(body)
assert len(graph.take()) == 64
"""
    done = _run(SCRIPT + source)
    assert done.returncode == 0, done.stderr


def _run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("primitive", "form", "device", "fast", "reason"),
    [
        (Resize("bilinear"), "pil", "cpu", (), "take longer than Pillow's"),
        (Resize("bilinear"), "pil", "cpu", ("resize",), "take longer than Pillow's"),
        (Pad(mode="edge"), "pil", "cpu", (), "padding_mode='edge'"),
        (Pad(fill=0.5), "pil", "cpu", (), "fill=0.5"),
        (Pad(fill=300), "pil", "cpu", (), "fill=300"),
        (Resize("bilinear"), "pil", "cuda", (), "are not torchvision's: "),
        (Resize("hamming"), "pil", "cuda", ("resize",), "torchvision's hamming"),
        (Resize("nearest"), "pil", "cuda", ("resize",), "torchvision's nearest"),
        (Resize("bicubic", antialias=False), "bytes", "cuda", (), "bicubic without antialias"),
        (HorizontalFlip(), "floats", "cpu", (), "images are floats"),
    ],
)
def test_why_there_is_no_node(
    primitive: Primitive, form: str, device: str, fast: tuple[str, ...], reason: str
) -> None:
    found = node_for(primitive, form=form, device=device, fast=fast)
    assert isinstance(found, str)
    assert reason in found


def test_where_there_is_one() -> None:
    for primitive in (Crop(), HorizontalFlip(), VerticalFlip()):
        for device in ("cpu", "cuda"):
            for form in ("pil", "bytes"):
                node = node_for(primitive, form=form, device=device, fast=())
                assert isinstance(node, Node)
                assert node.exact == "exact"
    node = node_for(Resize("bilinear"), form="pil", device="cuda", fast=("resize",))
    assert isinstance(node, Node)
    assert node.exact == FAST["resize"]


@pytest.mark.gpu
def test_on_a_device_files_come_near_to_pillows() -> None:
    device = torch.device("cuda", 0)
    nodes = [node_for(Crop(), form="pil", device="cuda"), *nodes_of(HorizontalFlip())]
    graph = Graph(nodes, batch_size=4, device=device, threads=2)  # type: ignore[arg-type]
    actions = [
        cropped((5, 3, 40, 60), (0, 0, 48, 50), (3, 7, 20, 33), (1, 1, 39, 29)),
        Action(HorizontalFlip(), {}, np.array([True, False, True, False])),
    ]
    kept = []
    for _ in range(10):
        graph.feed(FILES, actions, sizes_of(FILES))
        kept.append(graph.take())
    for taken in kept:
        for place, image in enumerate(taken):
            assert image.device == device
            expected = opened(FILES[place])
            for action in actions:
                expected = action.apply(place, expected)
            off = np.abs(image.permute(1, 2, 0).cpu().numpy().astype(int) - np.asarray(expected))
            assert off.max() <= 16
            assert off.mean() < 1

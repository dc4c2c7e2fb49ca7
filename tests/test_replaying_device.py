"""Batches replayed by a graph and kernels, here on the CPU: Pillow's bytes, but for the resize."""

from contextlib import contextmanager
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from backends.dali.decode import WindowDecoder
from backends.dali.graph import Graph
from dataloaders.replaying import DecodeError, ReplayError, kernels
from dataloaders.replaying.device import DeviceReplay
from dataloaders.replaying.host import HostReplay
from helpers.compare import assert_same
from helpers.pictures import saved, smooth
from helpers.recorded import Photos, both

CPU = torch.device("cpu")
COUNT, SIDE = 64, 40
FILES = [saved(smooth(n, SIDE + 5 + n % 7, SIDE + 3 + n % 5)) for n in range(COUNT)]
FILES[7] = saved(smooth(0, 50, 50).convert("L"))
NORMAL = [v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))]


def shifted(image):
    angle, scale, shear = (float(torch.empty(1).uniform_(-20, 20)) for _ in range(3))
    image = F.affine(image, angle, [int(scale), 3], 1 + scale / 50, [shear, 1.0], fill=[9, 8, 250])
    return F.affine(image, 0, [0, 0], 1 + scale / 50, [0.0, 0.0])


colours = v1.ColorJitter(0.9, 0.9, 0.9, 0.5)
EXACT = {
    "jitter": colours,
    "grey": v1.RandomGrayscale(0.5),
    "sharpness": v1.RandomAdjustSharpness(1.7),
    "autocontrast": v1.RandomAutocontrast(0.8),
    "equalize": v1.RandomEqualize(0.8),
    "invert": v1.RandomInvert(),
    "posterize": v1.RandomPosterize(3),
    "solarize": v1.RandomSolarize(100.5),
    "gamma": lambda image: F.adjust_gamma(image, float(torch.rand(())) + 0.5),
    "affine": shifted,
    "rotation": v1.RandomRotation(180, fill=7),
    "quarter": lambda image: F.rotate(image, 90.0 * int(torch.randint(0, 4, ()))),
    "flips": v1.Compose([colours, v1.RandomHorizontalFlip(), v1.RandomVerticalFlip()]),
    "RandAugment": v1.RandAugment(4, 20),
    "AutoAugment": v1.AutoAugment(),
    "TrivialAugment": v1.TrivialAugmentWide(),
    "filter": lambda image: image.filter(ImageFilter.BLUR),
    "erasing": lambda image: image,
}


@pytest.fixture(scope="module")
def host():
    replay = HostReplay(WindowDecoder(), 2)
    yield replay
    replay.close()


@pytest.fixture(scope="module")
def replay(host):
    graph, threads = Graph(COUNT, CPU, threads=1), torch.get_num_threads()
    torch.set_num_threads(1)  # small images: threads of torch would only wait for each other
    yield DeviceReplay(graph, host, CPU)
    torch.set_num_threads(threads)
    graph.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", EXACT)
def test_colours_and_warps_are_pillows(name, replay):
    last = [v1.RandomErasing(0.7, value="random")] if name == "erasing" else []
    make = v1.Compose([v1.RandomCrop(SIDE), EXACT[name], *NORMAL, *last])
    for seed in range(2):
        stock, recorded = both(Photos(FILES, make), seed=seed)
        assert_same(replay.apply(recorded), stock)


V2_LEVELS = [
    *((transform, 0) for transform in (v2.ColorJitter(brightness=0.9), v2.RandomAffine(30))),
    *((v2.ColorJitter(**{name: 0.9}), 1) for name in ("contrast", "saturation")),
    (v2.ColorJitter(hue=0.5), 1),
    *((transform, 0) for transform in (v2.RandomPosterize(3), v2.RandomSolarize(100))),
    *((v2.RandomAdjustSharpness(1.7), 1), (v2.RandomAutocontrast(0.8), 1)),
    *((v2.RandomEqualize(0.8), 0), (v2.RandomGrayscale(0.5), 1)),
]


def test_tensors_of_v2_are_some_levels_off(replay):
    """They are computed as Pillow does it; torchvision's own formulas for tensors differ."""
    for transform, levels in V2_LEVELS:
        make = v2.Compose([v2.ToImage(), v2.RandomCrop(SIDE), transform])
        stock, recorded = both(Photos(FILES, make))
        distance = (replay.apply(recorded).int() - stock.int()).abs()
        assert distance.max() <= levels, transform


def test_a_resize_is_seldom_more_than_a_level_off(replay):
    files = [saved(smooth(n, 50, 65).resize((260 - n, 200 + n))) for n in range(16)]
    for make in (v1.RandomResizedCrop(96), v1.Compose([v1.Resize(110), v1.CenterCrop(96)])):
        stock, recorded = both(Photos(files, v1.Compose([make, v1.PILToTensor()])))
        distance = (replay.apply(recorded).int() - stock.int()).abs()
        assert distance.max() <= 12
        assert (distance > 1).float().mean() < 0.005


def test_batches_begun_ahead_with_two_views_and_odd_files(replay):
    files = [*FILES[:5], saved(smooth(0, 50, 49), "PNG"), saved(smooth(0, 45, 60).convert("CMYK"))]
    view = v1.Compose([v1.RandomCrop(SIDE), colours, *NORMAL])
    photos = Photos(files, lambda image: (view(image), view(image), image.size))
    pairs = [both(photos, seed=seed) for seed in (1, 2)]
    begun = [replay.begin(recorded) for _, recorded in pairs]
    for one, (stock, _) in zip(begun, pairs, strict=True):
        assert_same(replay.finish(one), stock)


def test_a_refused_file_goes_by_the_cpu_from_then_on(host):
    fed = []

    class Counting(Graph):
        def decode(self, files, *given):
            fed.append(len(files))
            super().decode(files, *given)

    graph = Counting(COUNT, CPU, threads=1)
    replay = DeviceReplay(graph, host, CPU)
    # Few: DALI 2.4 may die of a file that fails among 32 or more.
    stock, recorded = both(Photos(FILES[:8], v1.Compose([v1.RandomCrop(SIDE), *NORMAL])))
    offsets = list(recorded.offsets)
    offsets[5] = (offsets[5][0], offsets[5][1] - 200)  # after it was recorded: cut short
    damaged = recorded._replace(offsets=offsets)
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"\[5\]"):
            replay.apply(damaged)
    assert fed == [8, 7]
    assert torch.equal(replay.apply(recorded), stock)
    graph.close()


class Copies(TorchDispatchMode):
    """Notes copies between devices that the host waits for."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.name() in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if func.name() == "aten::copy_" else args[0]
            queued = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if source.device.type != out.device.type and not queued:
                self.waiting.append(f"{tuple(source.shape)} to {out.device}")
        return out


class NoGraph:
    """Stands for a graph on a device that is not there."""

    def decode(self, *given):
        """Leave the images as they are."""


@contextmanager
def fake_cuda(monkeypatch):
    """Inside, tensors on "cuda" can be made and worked on; gives the copies that wait."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)
    kernels._hsv_tables.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Copies() as copies:
            kernels._hsv_tables(torch.device("cuda", 0))  # copied once
            copies.waiting.clear()
            yield copies.waiting
    finally:
        kernels._hsv_tables.cache_clear()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name", [name for name in EXACT if name != "filter"]
)  # that one is made on the CPU
def test_nothing_waits_for_a_device(name, host, monkeypatch):
    """torch's fake tensors refuse two devices in one step, and whatever needs a value."""
    cuda = torch.device("cuda", 0)
    make = v1.Compose([v1.RandomCrop(SIDE), EXACT[name], *NORMAL])
    _, recorded = both(Photos(FILES, make))
    replay = DeviceReplay(NoGraph(), host, cuda, torch.bfloat16, torch.channels_last)
    begun = replay.begin(recorded)
    replay._tails.of_stack(begun[3][0].stack, begun[1])  # made on the host, once
    with fake_cuda(monkeypatch) as waiting:
        made = replay.finish(begun)
        assert (made.device, made.dtype, made.shape[0]) == (cuda, torch.bfloat16, COUNT)
        assert made.is_contiguous(memory_format=torch.channels_last)
        assert [copy for copy in waiting if "768" not in copy and "(3, 1, 1)" not in copy] == []


def test_a_graph_decodes_windows_as_pillow_does():
    graph = Graph(8, CPU, threads=2, depth=2, most_pixels=SIDE * SIDE * 8)
    files, wanted, columns = FILES[:21], [], []
    for place, file in enumerate(files):
        image = Image.open(BytesIO(file)).convert("RGB")
        top, left = place % 4, place % 3
        window = image.crop((left, top, left + 32, top + 30))
        wanted.append(np.asarray(window.transpose(1) if place % 2 else window))
        columns.append((*image.size[::-1], top, left, 30, 32, 30, 32, 0, 0, 30, 32, place % 2, 0))
    given = np.array(columns, np.int32)
    out = torch.empty(21, 30, 32, 3, dtype=torch.uint8)
    damaged = list(files)
    damaged[12] = files[12][:-200]
    graph.decode(files, given, out)
    assert np.array_equal(out.numpy(), np.stack(wanted))
    with pytest.raises(DecodeError) as caught:
        graph.decode(damaged, given, out)
    assert caught.value.sample == 12
    graph.decode(files, given, out.zero_())
    assert np.array_equal(out.numpy(), np.stack(wanted))
    graph.close()
    with pytest.raises(RuntimeError, match="closed"):
        graph.decode(files, given, out)


@pytest.mark.parametrize("engine", [0.0, 1.0])
def test_the_graph_of_a_device(engine):
    """Defined and not built: DALI checks names and arguments, and only its build needs a device."""
    from nvidia.dali.ops import gpu_ops, mixed_ops

    pipeline = Graph(4, torch.device("cuda:1"), threads=3, depth=2, engine=engine).defined()
    pipeline._build_graph()
    assert (pipeline.device_id, pipeline.num_threads, pipeline.exec_dynamic) == (1, 3, True)
    assert pipeline.prefetch_queue_depth == 2
    decoders = 0
    for one in pipeline._ops:
        schema = getattr(one._op, "schema_name", None) or "ExternalSource"
        if schema.startswith("decoders"):
            decoders += 1
            assert schema in mixed_ops()
        elif one.outputs[0].device == "gpu":
            assert schema in gpu_ops()
    assert decoders == 1
    (made,) = pipeline._graph_outputs
    assert made.device == "gpu"

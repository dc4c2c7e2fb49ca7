"""Batches replayed by a graph and kernels, here on the CPU: Pillow's bytes, but for the resize."""

from contextlib import closing, contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, ImageFilter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")

from nvidia.dali import Pipeline, backend

from backends.dali import Dali
from backends.dali.decode import WindowDecoder
from backends.dali.graph import Graph, _failure
from dataloaders import DataLoader
from dataloaders.replaying import DecodeError, ReplayError, device, grouped, jpeg, kernels
from dataloaders.replaying.host import HostReplay
from helpers.compare import assert_same
from helpers.pictures import resampled, saved, smooth
from helpers.processes import run_script
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
ERASING = [v1.RandomErasing(0.7, value="random"), v1.RandomErasing(0.5, value=(0.1, 0.2, 0.3))]
AFTER = {  # on floats, once ToDtype has made them
    "flips": v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]),
    "sharpness": v2.RandomAdjustSharpness(1.7),
}


@pytest.fixture(scope="module")
def host():
    replay = HostReplay(WindowDecoder(), 2)
    yield replay
    replay.close()


class Counting(Graph):
    """Notes how many files it is fed at once."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.fed = []

    def decode(self, files, *given):
        self.fed.append(len(files))
        super().decode(files, *given)


@pytest.fixture(scope="module")
def graph():
    graph, threads = Counting(COUNT, CPU, threads=1), torch.get_num_threads()
    torch.set_num_threads(1)  # small images: threads of torch would only wait for each other
    yield graph
    torch.set_num_threads(threads)
    graph.close()


@pytest.fixture
def replay(graph, host):
    graph.fed.clear()
    return device.DeviceReplay(graph, host, CPU)


def exact(name):
    """Photos that go through ``EXACT[name]`` and become floats, which are erased in part."""
    last = ERASING if name == "erasing" else []
    return Photos(FILES, v1.Compose([v1.RandomCrop(SIDE), EXACT[name], *NORMAL, *last]))


def after(name):
    """Photos whose floats go through ``AFTER[name]`` and Normalize, and are erased in part."""
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), AFTER[name]]
    normal = v2.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    erasing = v2.RandomErasing(0.5, value="random")
    return Photos(FILES, v2.Compose([v2.RandomCrop(SIDE), *floats, normal, erasing]))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", EXACT)
def test_colours_and_warps_are_pillows(name, replay):
    for seed in range(2):
        stock, recorded = both(exact(name), seed=seed)
        assert_same(replay.apply(recorded), stock)


def test_colours_are_pillows_whatever_the_users_default_dtype_is(replay):
    stock, recorded = both(exact("jitter"))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same(replay.apply(recorded), stock)
    finally:
        torch.set_default_dtype(torch.float32)


def levels_off(replay, photos, op):
    """How far each byte is from stock's: no further than ``op`` may be."""
    stock, recorded = both(photos)
    off = (replay.apply(recorded).int() - stock.int()).abs()
    assert off.max() <= grouped.levels_off(op), op
    return off


ON_TENSORS = {
    "adjust_brightness": v2.ColorJitter(brightness=0.9),
    "affine": v2.RandomAffine(30),
    "adjust_contrast": v2.ColorJitter(contrast=0.9),
    "adjust_saturation": v2.ColorJitter(saturation=0.9),
    "adjust_hue": v2.ColorJitter(hue=0.5),
    "posterize": v2.RandomPosterize(3),
    "solarize": v2.RandomSolarize(100),
    "adjust_sharpness": v2.RandomAdjustSharpness(1.7),
    "autocontrast": v2.RandomAutocontrast(0.8),
    "equalize": v2.RandomEqualize(0.8),
    "rgb_to_grayscale": v2.RandomGrayscale(0.5),
}


def test_tensors_of_v2_are_some_levels_off(replay):
    """They are computed as Pillow does it; torchvision's own formulas for tensors differ."""
    for name, transform in ON_TENSORS.items():
        make = v2.Compose([v2.ToImage(), v2.RandomCrop(SIDE), transform])
        levels_off(replay, Photos(FILES, make), f"v2.{name}")


def test_a_resize_is_seldom_more_than_a_level_off(replay):
    files = [saved(smooth(n, 50, 65).resize((260 - n, 200 + n))) for n in range(16)]
    photos = Photos(files, v1.Compose([v1.Resize(110), v1.RandomCrop(96), v1.PILToTensor()]))
    assert (levels_off(replay, photos, "pil.resize") > 1).float().mean() < 0.005


@pytest.mark.parametrize("name", AFTER)
def test_steps_on_floats_are_torchvisions(name, replay, graph):
    stock, recorded = both(after(name))
    made = replay.apply(recorded)
    assert graph.fed == ([] if name == "sharpness" else [COUNT])  # without a kernel: the CPU
    assert torch.allclose(made, stock, atol=2e-5)
    assert (made != 0).any()


def test_a_blur_is_at_most_a_level_off(replay):
    blur = v1.RandomApply([v1.GaussianBlur((5, 23), (0.1, 3.0))])
    make = v1.Compose([v1.RandomCrop(SIDE), blur, v1.PILToTensor()])
    off = levels_off(replay, Photos(FILES, make), "v1t.gaussian_blur")
    assert (off > 0).float().mean() < 1e-4


def test_two_views_and_odd_files(replay):
    files = [*FILES[:5], saved(smooth(0, 50, 49), "PNG"), saved(smooth(0, 45, 60).convert("CMYK"))]
    view = v1.Compose([v1.RandomCrop(SIDE), colours, *NORMAL])
    photos = Photos(files, lambda image: (view(image), view(image), image.size))
    for seed in (1, 2):
        stock, recorded = both(photos, seed=seed)
        assert_same(replay.apply(recorded), stock)


def weighed(samples):
    images, masks = map(torch.stack, zip(*samples, strict=True))
    return images * torch.linspace(0, 1, len(images)).view(-1, 1, 1, 1), masks


def masked(image):
    crop = v1.RandomCrop.get_params(image, (SIDE, SIDE))
    mask = F.pil_to_tensor(F.crop(image.convert("L"), *crop)).long()
    return v1.Compose(NORMAL)(F.crop(image, *crop)), mask


def test_a_refused_file_goes_by_the_cpu_from_then_on(host, monkeypatch):
    graph = Counting(COUNT, CPU, threads=1)
    replay = device.DeviceReplay(graph, host, CPU)
    # Few: DALI 2.4 may die of a file that fails among 32 or more.
    stock, recorded = both(Photos(FILES[:8], v1.Compose([v1.RandomCrop(SIDE), *NORMAL])))
    damaged = recorded._replace(files=recorded.files.clone())
    begin = recorded.offsets[5][0] + FILES[5].index(b"\xff\xc4") + 5  # after it was recorded
    damaged.files[begin : begin + 16] = 255  # codes of a Huffman table
    for _ in range(2):
        with pytest.raises(ReplayError, match=r"\[5\]"):
            replay.apply(damaged)
    assert graph.fed == [8, 7]
    assert torch.equal(replay.apply(recorded), stock)
    graph.close()
    monkeypatch.setattr(torch.cuda, "device", None)  # after a fork none can be entered
    graph.close()
    with pytest.raises(RuntimeError, match="closed"):
        replay.apply(recorded)


def test_damage_is_told_from_a_failing_device_by_no_path():
    where = 'Error in MIXED operator: File "/opt/cuda/decode/graph.py", line 6, in defined\n'
    damage = {"Failed to decode sample #2 : ": 12, "nvImageCodec failure: '#3'": None}
    damage["nvImageCodec failure: '#14'"] = None
    for said, sample in damage.items():
        made = _failure(RuntimeError(where + said), 10)
        assert (type(made), made.sample) == (DecodeError, sample)
    memory = "CUDA runtime API error cudaErrorMemoryAllocation (2):\nout of memory"
    for said in (memory, "nvImageCodec failure: '#5'", "nvImageCodec failure: '#21'"):
        error = RuntimeError(where + said)
        assert _failure(error, 0) is error


class Operations(TorchDispatchMode):
    """Notes copies between devices for which the host waits: those not queued, or not pinned."""

    def __init__(self):
        super().__init__()
        self.waiting, self.pinned = [], []

    def pin(self, tensor, device=None):
        """Stand for ``tensor.pin_memory()``, which needs a device and refuses expanded tensors."""
        assert all(
            stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.pinned.append(tensor)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.name() in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if func.name() == "aten::copy_" else args[0]
            queued = kwargs.get("non_blocking", len(args) > 2 and args[2])
            queued = queued and any(each is source for each in self.pinned)
            if source.device.type != out.device.type and not queued:
                self.waiting.append(f"{tuple(source.shape)} to {out.device}")
        return out


@contextmanager
def fake_cuda(monkeypatch):
    """Inside, tensors on "cuda" can be made and worked on; gives the copies that wait."""
    kernels._hsv_tables.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), Operations() as copies:
            monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *given: copies.pin(*given))
            kernels._hsv_tables(torch.device("cuda", 0))  # copied once
            copies.waiting.clear()
            yield copies.waiting
    finally:
        kernels._hsv_tables.cache_clear()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "case",
    ["expanded", *EXACT, *(f"after {name}" for name in AFTER if name != "sharpness"), "masks"],
)
def test_nothing_waits_for_a_device(case, monkeypatch):
    """torch's fake tensors refuse two devices in one step, and whatever needs a value."""
    cuda = torch.device("cuda", 0)
    grey = v1.Compose([v1.RandomCrop(SIDE), v1.PILToTensor(), v1.Grayscale(3)])
    cases = {"masks": (Photos(FILES, masked), weighed), "expanded": (Photos(FILES, grey), list)}
    made = after(case[6:]) if case.startswith("after") else None
    photos, collate_fn = cases.get(case) or (made or exact(case), default_collate)
    photos.files[3] = saved(smooth(3, 50, 49), "PNG")
    _, recorded = both(photos, collate_fn)
    host = HostReplay(WindowDecoder(), 2)
    host.apply(recorded)  # makes what is made once
    unpacked = device.unpack(recorded)  # fake tensors have no memory
    monkeypatch.setattr(device.program, "unpack", lambda batch: unpacked)
    no_graph = SimpleNamespace(decode=lambda *given: None)  # of a device that is not there
    with fake_cuda(monkeypatch) as waiting:
        made = device.DeviceReplay(no_graph, host, cuda).apply(recorded)
        if case == "expanded":
            made = torch.stack(made)
        images, *masks = made if case == "masks" else [made]
        assert (images.device, images.shape) == (cuda, (COUNT, 3, SIDE, SIDE))
        assert [(mask.device, mask.dtype) for mask in masks] == [(cuda, torch.int64)] * len(masks)
        assert waiting == []
    host.close()


def test_common_jpeg_files():
    image = smooth(0, 50, 49)
    long = {"exif": b"Exif\0\0" + bytes(9000), "comment": b"x"}
    for options in ({}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}, long):
        assert jpeg.is_common(saved(image, **options))
    assert jpeg.is_common(saved(image.convert("L")))
    file = saved(image)
    cmyk, rgb = saved(image.convert("CMYK")), saved(image, keep_rgb=True)
    cut = file[: file.index(b"\xff\xc0") + 6], file[:300], file[:3], file[:-200], file[:-1]
    for each in (resampled(file, 0x12), rgb, cmyk, saved(image, "PNG"), *cut):
        assert not jpeg.is_common(each)


def test_a_run_of_a_graph_has_bounded_pixels_and_files(host, monkeypatch):
    most, runs = SIDE * SIDE * 4, []
    feed = Pipeline.feed_input

    def fed(self, name, given):
        if name == "files":
            sizes = [Image.open(BytesIO(bytes(file))).size for file in given]
            runs.append((len(sizes), sum(height * width for height, width in sizes)))
        return feed(self, name, given)

    monkeypatch.setattr(Pipeline, "feed_input", fed)
    stock, recorded = both(Photos(FILES[:21], v1.Compose([v1.RandomCrop(SIDE), *NORMAL])))
    for batch_size in (2, 32):
        runs.clear()
        with closing(Graph(batch_size, CPU, threads=1, most_pixels=most)) as graph:
            assert_same(device.DeviceReplay(graph, host, CPU).apply(recorded), stock)
        assert sum(files for files, _ in runs) == 21
        assert max(files for files, _ in runs) == min(batch_size, 3)
        assert max(pixels for _, pixels in runs) <= most


def test_the_graph_of_a_device():
    """Defined and not built: DALI checks names and arguments, and only its build needs a device."""
    from nvidia.dali.ops import gpu_ops, mixed_ops

    pipeline = Graph(4, torch.device("cuda:1"), threads=3, engine=0.5).defined()
    pipeline._build_graph()
    assert (pipeline.device_id, pipeline.num_threads, pipeline.exec_dynamic) == (1, 3, True)
    assert pipeline.prefetch_queue_depth == 2
    decoders = 0
    for one in pipeline._ops:
        schema = getattr(one._op, "schema_name", None) or "ExternalSource"
        if schema.startswith("decoders"):
            decoders += 1
            assert schema in mixed_ops()
            assert "hw_decoder_load: 0.5" in str(one.spec)
        elif one.outputs[0].device == "gpu":
            assert schema in gpu_ops()
    assert decoders == 1
    (made,) = pipeline._graph_outputs
    assert made.device == "gpu"
    backend.check_cuda_runtime()  # of a build for a device: without a warning of missing NPP


DAMAGED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from torchvision import transforms
from backends.dali import Dali
from dataloaders import DataLoader
from helpers.pictures import saved, smooth
from helpers.recorded import Photos

file = saved(smooth(0, 80, 90))
make = transforms.Compose([transforms.RandomCrop(40), transforms.ToTensor()])
photos = Photos([file] * 40 + [file[:-200]] + [file] * 23, make)
for _ in range(5):
    try:
        list(DataLoader(photos, 64, backend=Dali()))
    except OSError as error:
        print(error)
"""


@pytest.mark.gpu
def test_a_damaged_file_among_many_on_a_gpu(tmp_path):
    """In a process that may die: DALI 2.4 does where 32 files or more come with a bad header."""
    done = run_script(tmp_path, DAMAGED)
    assert done.stdout.count("truncated") == 5


@pytest.mark.gpu
def test_a_cuda_graph_is_captured_while_batches_flow():
    """In the mode in which the calls of DALI's own threads do not count."""
    make = v1.Compose([v1.RandomResizedCrop(SIDE), colours, *NORMAL])
    loader = DataLoader(Photos(FILES * 4, make), 16, num_workers=2, backend=Dali())
    for _ in range(3):
        for images in loader:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total = images.sum(dtype=torch.float64)
            graph.replay()
            assert float(total) == float(images.sum(dtype=torch.float64))

"""backend="h5": whole batches out of the mapped file, equal to what torch makes of its samples."""

from __future__ import annotations

import gc
import os
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from backends.h5 import H5
from backends.h5.batches import Batches, batches_of
from backends.h5.geometry import Geometry, geometry_of
from backends.h5.mirroring import Mirror
from backends.prefetch import Prefetch
from dataloaders import DataLoader
from dataloaders.cache import CachedDataset, precompute
from dataloaders.errors import BackendUnavailable, CacheError, OptionError
from dataloaders.seeding.philox import words
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.states import random_states_kept
from dataloaders.transforms.draws import Draws, FreeDraws
from dataloaders.transforms.read import read
from helpers.compare import assert_same
from helpers.datasets import MapDataset, tensor_sample

COUNT = 12


class Images(Dataset[Any]):
    """Images whose every pixel tells the image and the place, of one size or of several."""

    def __init__(
        self,
        transform: Any = None,
        *,
        mode: str = "RGB",
        sizes: Any = ((20, 24),),
        count: int = COUNT,
    ) -> None:
        self.transform, self.mode, self.sizes, self.count = transform, mode, sizes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        height, width = self.sizes[index % len(self.sizes)]
        places = np.arange(height * width * 4).reshape(height, width, 4) * 7 + index * 31
        pixels = (places % 251).astype(np.uint8)
        channels = len(Image.new(self.mode, (1, 1)).getbands())
        shaped = pixels[..., 0] if channels == 1 else pixels[..., :channels]
        image: Any = Image.fromarray(np.ascontiguousarray(shaped), self.mode)
        if self.transform is not None:
            image = self.transform(image)
        return {"image": image, "label": index, "name": f"image {index}"}


def turned_somehow(image: Any) -> Any:
    """Code of one's own that draws."""
    return image.rotate(float(torch.rand(1)) * 40 - 20)


LAST = v1.PILToTensor()
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CHAINS: dict[str, Callable[[], Any]] = {
    "v1 bytes": lambda: v1.Compose(
        [v1.RandomCrop(16), v1.RandomHorizontalFlip(), v1.PILToTensor()]
    ),
    "v1 floats": lambda: v1.Compose(
        [v1.RandomCrop((10, 16)), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    ),
    "v1 both flips": lambda: v1.Compose(
        [v1.RandomVerticalFlip(0.3), v1.RandomCrop(7), v1.RandomHorizontalFlip(0.9), LAST]
    ),
    "v1 middle": lambda: v1.Compose(
        [v1.RandomHorizontalFlip(), v1.CenterCrop((7, 10)), v1.RandomCrop((3, 10)), LAST]
    ),
    "v2 bytes": lambda: v2.Compose(
        [v2.RandomCrop((20, 9)), v2.RandomVerticalFlip(), v2.PILToTensor()]
    ),
    "v2 floats": lambda: v2.Compose(
        [
            v2.RandomCrop(16),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    ),
    "no random ones": lambda: v1.Compose(
        [v1.CenterCrop(13), v1.ToTensor(), v1.Normalize(MEAN, STD)]
    ),
}


@pytest.fixture
def cache_of(tmp_path: Path) -> Callable[..., CachedDataset]:
    def build(dataset: Any, **options: Any) -> CachedDataset:
        return precompute(dataset, tmp_path / "cache.h5", num_workers=0, **options)

    return build


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERS_CACHE", str(tmp_path))


def fast(cached: CachedDataset) -> Batches:
    made = batches_of(cached)
    assert isinstance(made, Batches), made
    return made


# Geometry


def windows_as_torchvision(transform: Any, height: int, width: int, seeding: Any) -> torch.Tensor:
    """What torchvision makes of an image that holds each pixel's own number."""
    image = torch.arange(height * width).reshape(1, height, width)
    with random_states_kept(cuda=False):
        seed_generators(tuple(seeding.tolist()))
        result: torch.Tensor = transform(image)
    return result


def seeded_samples(dataset: Any, rows: list[int], seeding: Any) -> list[Any]:
    """The samples of these rows, each with the generators seeded by its words."""
    samples = []
    with random_states_kept(cuda=False):
        for row, each in zip(rows, seeding.tolist(), strict=True):
            seed_generators(tuple(each))
            samples.append(dataset[row])
    return samples


def unseeded(count: int) -> FreeDraws:
    return FreeDraws(count, np.random.default_rng(0))


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(
        st.sampled_from(["crop", "centre", "horizontal", "vertical"]), min_size=1, max_size=5
    ),
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    shrink=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=5, max_size=5),
    second=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_window_is_what_torchvision_takes(
    steps: list[str],
    sides: tuple[int, int],
    shrink: list[tuple[int, int]],
    second: bool,
    seed: int,
) -> None:
    module: Any = v2 if second else v1
    height, width = sides
    members = []
    for step, (down, right) in zip(steps, shrink, strict=False):
        if step in ("crop", "centre"):
            height, width = max(1, height - down), max(1, width - right)
            kind = module.RandomCrop if step == "crop" else module.CenterCrop
            members.append(kind((height, width)))
        else:
            flip = "RandomHorizontalFlip" if step == "horizontal" else "RandomVerticalFlip"
            members.append(getattr(module, flip)(0.5))
    compose = module.Compose(members)
    geometry = geometry_of(read(compose))
    assert isinstance(geometry, Geometry)
    seeding = words(seed, 0, 0)
    wanted = windows_as_torchvision(compose, *sides, seeding)
    drawn = geometry.draw(np.array(sides[:1]), np.array(sides[1:]), Draws(seeding))
    assert drawn is not None
    window, outside = drawn
    assert not outside
    image = torch.arange(sides[0] * sides[1]).reshape(1, *sides)
    top, left = int(window.top[0]), int(window.left[0])
    found = image[:, top : top + int(window.height[0]), left : left + int(window.width[0])]
    axes = [1] * bool(window.upside_down[0]) + [2] * bool(window.mirrored[0])
    assert torch.equal(torch.flip(found, axes), wanted)


def test_windows_without_seeds_are_spread_as_torchvisions() -> None:
    compose = v1.Compose([v1.RandomCrop((4, 2)), v1.RandomHorizontalFlip(0.25)])
    geometry = geometry_of(read(compose))
    assert isinstance(geometry, Geometry)
    size = np.full(30_000, 7)
    found = geometry.draw(size, size - 3, FreeDraws(len(size), np.random.default_rng(0)))
    assert found is not None
    drawn, _ = found
    tops = np.bincount(drawn.top, minlength=4) / len(size)
    lefts = np.bincount(drawn.left, minlength=3) / len(size)
    assert tops == pytest.approx(np.full(4, 1 / 4), abs=0.015)
    assert lefts == pytest.approx(np.full(3, 1 / 3), abs=0.015)
    assert drawn.mirrored.mean() == pytest.approx(0.25, abs=0.015)
    pairs = np.corrcoef(np.stack([drawn.top, drawn.left, drawn.mirrored]))
    assert np.abs(pairs[np.triu_indices(3, 1)]).max() < 0.03  # independent of each other
    assert not drawn.upside_down.any()


@pytest.mark.parametrize(
    ("transform", "why"),
    [
        (v1.RandomCrop(4, padding=1, fill=3), "only borders of zeros are read"),
        (v1.RandomRotation(4), "is not supported for a whole batch: only torchvision's crops"),
        (v1.RandomResizedCrop(4), "does more than crop and flip"),
        (v1.Lambda(abs), "is not supported for a whole batch: "),
    ],
    ids=["padding", "rotation", "resize", "own"],
)
def test_what_is_no_window_is_told(transform: Any, why: str) -> None:
    assert why in str(geometry_of(read(transform)))


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("flips", [0, 1, 2])
def test_a_border_of_zeros(
    cache_of: Callable[..., CachedDataset], second: bool, flips: int
) -> None:
    module: Any = v2 if second else v1
    chain = module.Compose(
        [
            *[module.RandomVerticalFlip(), module.RandomHorizontalFlip()][:flips],
            module.RandomCrop((18, 26), padding=(3, 2), pad_if_needed=True),
            module.RandomHorizontalFlip(),
            module.CenterCrop((16, 24)),
            module.PILToTensor(),
        ]
    )
    cached = cache_of(Images(chain, sizes=((18, 22), (25, 30))))
    rows = list(range(COUNT))
    seeding = words(8, 0, rows)
    wanted = default_collate(seeded_samples(cached, rows, seeding))
    assert_same(fast(cached).of(rows, Draws(seeding)), wanted)


@settings(max_examples=200, deadline=None)
@given(
    sides=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40)),
    left=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_mirrored_bytes(sides: tuple[int, int, int], left: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    channels, height, width = sides
    image = random.integers(0, 256, (channels, height + 1, width + left + 1), np.uint8)
    part = image[:, 1:, left : left + width]
    places = np.zeros((2, *sides), np.uint8)
    mirror = Mirror(sides)
    for place in places:  # the second one begins where the first one ends: often not aligned
        mirror.put(part, place)
        mirror.put(part[:, ::-1], place)
        assert np.array_equal(place, part[:, ::-1, ::-1])


# Batches


@pytest.mark.parametrize("chain", ["v1 bytes", "v1 both flips", "v1 middle", "v2 bytes"])
@pytest.mark.parametrize(
    "sizes", [((20, 24),), ((20, 24), (31, 17), (20, 16))], ids=["one", "three"]
)
def test_batches_are_those_of_default_collate(
    cache_of: Callable[..., CachedDataset], chain: str, sizes: Any
) -> None:
    cached = cache_of(Images(CHAINS[chain](), sizes=sizes))
    batches = fast(cached)
    assert batches.random
    for seed, rows in enumerate(([3, 1, 1, 11, 0], [7], list(range(COUNT)))):
        seeding = words(seed, 0, rows, np.arange(len(rows)))
        wanted = default_collate(seeded_samples(cached, rows, seeding))
        assert_same(batches.of(rows, Draws(seeding)), wanted)


HALVES = [v2.ToImage(), v2.ToDtype(torch.float16, scale=True)]


@pytest.mark.parametrize("large", [False, True])  # a few at once, or one by one
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("chain", ["floats", "halves"])
@pytest.mark.thinned(4)
def test_floats_are_stocks_however_many_images_are_made_at_once(
    chain: str, mode: str, large: bool
) -> None:
    flips = [v1.RandomCrop((290, 310) if large else (10, 16)), v1.RandomHorizontalFlip()]
    floats = [v1.RandomVerticalFlip(), v1.ToTensor(), v1.Normalize(0.4, 0.3)]
    steps = HALVES if chain == "halves" else floats
    sizes = ((300 if large else 20, 320 if large else 24),)
    module: Any = v2 if chain == "halves" else v1
    dataset = Images(module.Compose([*flips, *steps]), mode=mode, sizes=sizes)
    ours = DataLoader(dataset, 5, shuffle=True, backend=H5(), seed=4)
    batches = list(ours)
    assert_same(batches, list(DataLoader(dataset, 5, shuffle=True, backend="stock", seed=4)))
    assert batches[0]["image"].dtype is (torch.float16 if chain == "halves" else torch.float32)
    plan = str(ours.explain())
    assert "batches are made at once" in plan, plan


class Pair(Images):
    """An image that becomes floats, and its twin that stays bytes."""

    def __init__(self) -> None:
        super().__init__(CHAINS["v2 floats"]())
        self.other = CHAINS["v1 bytes"]()

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {"twin": self.other(Images()[index]["image"]), **sample}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_bytes_beside_floats_stay_bytes(num_workers: int) -> None:
    loaders = [
        DataLoader(Pair(), 5, backend=each, seed=4, num_workers=num_workers)
        for each in (H5(), "stock")
    ]
    found, wanted = (list(loader) for loader in loaders)
    assert_same(found, wanted)
    assert found[0]["twin"].dtype is torch.uint8
    assert found[0]["image"].dtype is torch.float32
    assert "batches are made at once" in str(loaders[0].explain())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_random_transforms_the_batches_are_torchs(num_workers: int) -> None:
    dataset = Images(CHAINS["no random ones"](), sizes=((20, 24), (31, 17)))
    ours = DataLoader(dataset, 5, shuffle=True, num_workers=num_workers, backend=H5())
    theirs = torch.utils.data.DataLoader(dataset, 5, shuffle=True, num_workers=num_workers)
    epochs = []
    for loader in (ours, theirs):
        torch.manual_seed(6)
        epochs.append([list(loader), list(loader), torch.get_rng_state()])
    assert_same(*epochs)


def test_epochs_batches_and_seeds_differ_and_repeat() -> None:
    dataset = Images(CHAINS["v1 bytes"](), count=4, sizes=((40, 40),))
    loader = DataLoader(dataset, 4, backend=H5())

    def epoch(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        (batch,) = loader
        image: torch.Tensor = batch["image"]
        return image

    first = epoch(1)
    assert torch.equal(first, epoch(1))
    assert not torch.equal(first, epoch(2))
    torch.manual_seed(1)
    one, two = (next(iter(loader))["image"] for _ in range(2))
    assert torch.equal(one, first)
    assert not torch.equal(one, two)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("chain", list(CHAINS))
@pytest.mark.thinned(8)
def test_with_a_seed_the_samples_are_those_of_stock(chain: str, num_workers: int) -> None:
    dataset = Images(CHAINS[chain]())
    sampler = [3, 3, 0, 11, 5, 3, 7]  # repeats are drawn anew
    options: dict[str, Any] = {"sampler": sampler, "seed": 4, "num_workers": num_workers}
    stock = DataLoader(dataset, 5, **options)
    ours = DataLoader(dataset, 5, backend=H5(), **options)
    threaded = DataLoader(dataset, 5, backend=Prefetch(H5()), **options)
    for _ in range(2):
        wanted = list(stock)
        assert_same(list(ours), wanted)
        assert_same(list(threaded), wanted)


def test_with_a_seed_what_cannot_be_made_at_once_is_as_stock_has_it() -> None:
    """A batch with an image that is smaller than its crop, behind one that is not."""
    chain = CHAINS["v1 bytes"]
    dataset = Images(chain(), sizes=((20, 24),) * 11 + ((8, 8),))
    random = Images(v1.Compose([turned_somehow, v1.PILToTensor()]))
    for loader in (DataLoader(random, 5, seed=1, backend=H5()),):
        assert_same(list(loader), list(DataLoader(random, 5, seed=1)))
    state = torch.get_rng_state()
    iterator = iter(DataLoader(dataset, 6, seed=1, backend=H5()))
    next(iterator)
    with pytest.raises(ValueError, match="is larger than input image size"):
        next(iterator)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_workers_a_thread_makes_the_batches_ahead() -> None:
    dataset = Images(CHAINS["v1 bytes"]())
    loader = DataLoader(dataset, 2, backend=Prefetch(H5()))
    assert "a thread takes up to" in str(loader.explain())
    torch.manual_seed(3)
    wanted = list(DataLoader(dataset, 2, backend=H5()))
    torch.manual_seed(3)
    assert_same(list(loader), wanted)
    by_sample = Images(v1.Compose([turned_somehow, v1.PILToTensor()]))
    plan = str(DataLoader(by_sample, 2, backend=Prefetch(H5())).explain())
    assert "the dataset's own code runs on the loop's thread" in plan


def test_a_sampler_runs_on_the_loops_thread_only() -> None:
    threads = set()

    class Sampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            for index in range(COUNT):
                threads.add(threading.get_ident())
                yield index

    dataset = Images(CHAINS["v1 bytes"]())
    loader = DataLoader(dataset, 2, sampler=Sampler(), backend=Prefetch(H5()))
    assert len(list(loader)) == COUNT // 2
    assert threads == {threading.get_ident()}


class Notes:
    """A worker_init_fn that notes the class of the worker's dataset."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        with self.path.open("a") as file:
            file.write(f"{type(info.dataset).__name__}\n")


@pytest.mark.parametrize("options", [{}, {"seed": 3}])
def test_worker_init_fn_sees_the_cache_in_workers_and_the_dataset_where_it_is_read(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    dataset = Images(CHAINS["v1 bytes"]())
    start = Notes(tmp_path / "seen")
    loader = DataLoader(dataset, 4, num_workers=1, worker_init_fn=start, backend=H5(), **options)
    assert len(list(loader)) == COUNT // 4
    seen = start.path.read_text().split()
    assert seen[0] == "Images"  # the process that studies it
    assert seen[-1] == "CachedDataset"


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (
            Images(v1.Compose([v1.RandomCrop(9), turned_somehow, v1.PILToTensor()])),
            r"turned_somehow at .*\[1\] is not supported for a whole batch: it is code of your",
        ),
        (Images(v1.Compose([v1.RandomCrop(4), np.asarray])), "code of your own"),
    ],
    ids=["between", "last"],
)
def test_another_tail_runs_sample_by_sample(
    cache_of: Callable[..., CachedDataset], dataset: Images, why: str
) -> None:
    cached = cache_of(dataset)
    assert re.search(why, str(batches_of(cached)))
    assert re.search(why, str(DataLoader(dataset, 4, backend=H5(cached.path)).explain()))
    torch.manual_seed(0)
    found = list(DataLoader(dataset, 4, backend=H5(cached.path)))
    torch.manual_seed(0)
    assert_same(found, list(torch.utils.data.DataLoader(dataset, 4)))


def test_an_image_smaller_than_its_crop_is_torchvisions_error() -> None:
    dataset = Images(CHAINS["v1 bytes"](), sizes=((20, 24),) * 11 + ((8, 8),))
    loader = DataLoader(dataset, 5, backend=H5())
    iterator = iter(loader)
    assert len([next(iterator), next(iterator)]) == 2
    with pytest.raises(ValueError, match="is larger than input image size"):
        next(iterator)


def test_batches_are_safe_to_keep() -> None:
    dataset = Images(CHAINS["v1 bytes"](), sizes=((600, 600),), count=COUNT)
    dataset.transform.transforms[0] = v1.RandomCrop(590)  # large enough for the pool
    loader = DataLoader(dataset, 2, backend=H5())
    kept, sums = [], []
    for _ in range(3):
        for batch in loader:
            kept.append(batch["image"])
            sums.append(int(batch["image"].sum()))
    assert [int(image.sum()) for image in kept] == sums
    kept[0].fill_(0)  # its own memory, and not the file's
    assert int(kept[1].sum()) == sums[1]


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "YCbCr"])
def test_modes(cache_of: Callable[..., CachedDataset], mode: str) -> None:
    transform = v1.Compose([v1.RandomCrop(8), v1.PILToTensor()])
    batches = fast(cache_of(Images(transform, mode=mode)))
    seeding = words(5, 0, [2, 5])
    wanted = default_collate(seeded_samples(batches.cached, [2, 5], seeding))
    assert_same(batches.of([2, 5], Draws(seeding)), wanted)


class Columns(Dataset[Any]):
    """One of everything that default_collate makes a batch of."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return (
            {
                "int": index - 3,
                "float": index / 3,
                "bool": index % 3 == 0,
                "text": "x" * index,
                "bytes": bytes([index]),
                "tensor": torch.full((2, 3), index, dtype=torch.int16),
                "flags": torch.tensor([index % 2 == 0, True]),
                "bfloat16": torch.tensor([index / 7], dtype=torch.bfloat16),
                "array": np.full((4,), index / 2, np.float32),
                "scalar": np.float32(index),
                "number": torch.tensor(index),
            },
            [index, (index + 1,)],
        )


def test_columns_of_all_kinds(cache_of: Callable[..., CachedDataset]) -> None:
    batches = fast(cache_of(Columns()))
    assert not batches.random
    wanted = default_collate([batches.cached[row] for row in (4, 4, 0, 11)])
    found = batches.of([4, 4, 0, 11], unseeded(4))
    assert_same(found, wanted)
    assert found is not None
    found[0]["tensor"].fill_(9)
    assert_same(batches.of([4, 4, 0, 11], unseeded(4)), wanted)


@pytest.mark.parametrize("rows", [[-1, 2], [0, COUNT], [], [0.5], ["a"], [[0, 1]]], ids=str)
def test_rows_that_are_no_plain_numbers_are_left_to_torch(
    cache_of: Callable[..., CachedDataset], rows: list[Any]
) -> None:
    assert fast(cache_of(Columns())).of(rows, unseeded(len(rows))) is None


def test_negative_and_missing_indices_are_torchs() -> None:
    dataset = Columns()
    for sampler, fails in (([-1, 0], False), ([0, COUNT], True)):
        loader = DataLoader(dataset, 2, sampler=sampler, backend=H5())
        if fails:
            with pytest.raises(IndexError):
                list(loader)
        else:
            assert next(iter(loader))[0]["int"].tolist() == [COUNT - 4, -3]


# The backend


def test_the_file_is_built_once_and_named_after_what_is_in_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        list(DataLoader(Columns(), 4, backend=H5()))
    (path,) = (tmp_path / "h5").glob("*.h5")
    assert capfd.readouterr().err.count(f"backend 'h5' builds {path}") == 1
    list(DataLoader(Subset(Columns(), [1, 2]), 4, backend="h5"))
    assert len(list((tmp_path / "h5").glob("*.h5"))) == 2


def test_a_cache_of_something_else_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    list(DataLoader(Columns(), 4, backend=H5(path)))
    with pytest.raises(CacheError, match="length: 12 when it was built, 2 now"):
        list(DataLoader(Subset(Columns(), [0, 1]), 4, backend=H5(path)))


def test_never_build(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    loader = DataLoader(Columns(), 4, backend=H5(path, build="never"))
    assert "there is no cache at" in str(loader.explain())
    with pytest.raises(BackendUnavailable, match="dataloaders cache build"):
        list(loader)
    precompute(Columns(), path, num_workers=0)
    assert len(list(loader)) == 3
    assert not os.path.exists(f"{path}.building")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"build": "always"}, "must be 'if_missing' or 'never'"),
        ({"build": "never"}, "needs a path"),
    ],
)
def test_bad_options(options: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        H5(**options)


def test_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "train.h5"
    loader = DataLoader(Columns(), 4, backend=H5(path))
    assert "built at the first iter()" in str(loader.explain())
    assert not path.exists()
    list(loader)
    assert f"rows of {path}\n" in str(loader.explain())
    assert [stage.name for stage in loader.explain().stages].count("fetch") == 1
    for dataset in (Columns(), TensorDataset(torch.zeros(4, 2))):
        plan = str(DataLoader(dataset, 4, backend=H5(path)).explain())
        assert "gather" not in plan  # that is what stock would do without the cache
        assert "sample by sample" not in plan
    stream = DataLoader(iter_dataset(), backend=H5(path))
    assert "an iterable dataset has no samples by index" in str(stream.explain())


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        ([v1.Resize(20), v1.CenterCrop(18), v1.RandomCrop(16), v1.ToTensor()],
         "RandomCrop, ToTensor; in the cache: Resize, CenterCrop"),
        ([v1.RandomCrop(16), v1.ToTensor()], "RandomCrop, ToTensor"),
        ([v1.Resize(20), v1.PILToTensor()], "none; in the cache: Resize, PILToTensor"),
    ],
)  # fmt: skip
def test_the_plan_says_which_transforms_run(chain: list[Any], told: str, tmp_path: Path) -> None:
    dataset: Any = Images(v1.Compose(chain))
    dataset.loader = Image.open  # as an ImageFolder has one: stock tells that it decodes
    stages = DataLoader(dataset, 4, backend=H5(tmp_path / "a.h5")).explain().stages
    assert [stage.how for stage in stages if stage.name == "augment"] == [told]
    assert "decode" not in [stage.name for stage in stages]


def iter_dataset() -> Any:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    return Stream()


def test_another_dataset_on_the_same_loader_is_another_cache() -> None:
    loader = DataLoader(Columns(), 4, backend=H5())
    assert len(next(iter(loader))[0]["int"]) == 4
    loader.__dict__["dataset"] = Images(CHAINS["v1 bytes"]())
    assert set(next(iter(loader))) == {"image", "label", "name"}


def other_chain(images: Images) -> None:
    images.transform = v2.Compose([v2.RandomCrop(12), v2.ToImage()])


def other_member(images: Images) -> None:
    images.transform.transforms[0] = v2.RandomCrop(9)


def other_number(images: Images) -> None:
    images.transform.transforms[1].p = 1.0


def other_code(images: Images) -> None:
    images.transform = v2.Compose([v2.RandomCrop(16), Shifted(7), v2.ToImage()])


class Shifted:
    """Code of one's own, which looks the same whatever its number."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, image: Any) -> Any:
        return image.point(lambda value: value + self.by)

    def __repr__(self) -> str:
        return "Shifted()"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("change", [other_chain, other_member, other_number, other_code])
@pytest.mark.thinned(6)
def test_transforms_that_are_changed_between_epochs_are_those_of_the_next(
    change: Callable[[Images], None], num_workers: int
) -> None:
    def loader(backend: Any) -> DataLoader[Any]:
        chain = [v2.RandomCrop(16), v2.RandomHorizontalFlip(0.0), Shifted(1), v2.ToImage()]
        images = Images(v2.Compose(chain))
        return DataLoader(images, 4, shuffle=True, seed=5, num_workers=num_workers, backend=backend)

    ours, stock = loader(H5()), loader("stock")
    for epoch in range(3):
        assert_same(list(ours), list(stock))
        if epoch == 0:
            for each in (ours, stock):
                change(each.dataset)


def test_workers_that_stay_have_the_transforms_that_they_began_with() -> None:
    images = Images(v2.Compose([v2.RandomCrop(16), v2.ToImage()]))
    loader = DataLoader(images, 4, num_workers=1, persistent_workers=True, backend=H5())
    list(loader)
    other_member(images)
    assert next(iter(loader))["image"].shape == (4, 3, 16, 16)


def test_a_head_that_is_changed_between_epochs_is_another_cache(tmp_path: Path) -> None:
    def chain(side: int) -> Any:
        return v2.Compose([v2.Resize((side, side)), v2.RandomCrop(8), v2.ToImage()])

    images = Images(chain(10))
    loader, fixed = (DataLoader(images, 4, backend=H5(path)) for path in (None, tmp_path / "a.h5"))
    list(loader), list(fixed)
    images.transform = chain(12)
    list(loader)
    with pytest.raises(CacheError, match=r"head: .*10, 10.* when it was built, .*12, 12.* now"):
        list(fixed)


def test_a_dataset_that_grows_between_epochs_is_another_cache() -> None:
    images = Images(v2.Compose([v2.CenterCrop(8), v2.ToImage()]))
    loader = DataLoader(images, 4, backend=H5())
    assert len(list(loader)) == 3
    images.count = 16
    assert [int(label) for batch in loader for label in batch["label"]] == list(range(16))


def test_samples_that_were_left_out_have_no_row() -> None:
    class Partly(Columns):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise ValueError("broken")
            return index

    path = Path(os.environ["DATALOADERS_CACHE"]) / "partly.h5"
    precompute(Partly(), path, num_workers=0, on_error="skip")
    with pytest.raises(CacheError, match="left out 1 samples"):
        list(DataLoader(Partly(), 4, backend=H5(path)))


def test_options_pickle_and_are_shown() -> None:
    backend = H5("train.h5")
    assert pickle.loads(pickle.dumps(backend)) == backend
    assert repr(backend) == (
        "H5(path='train.h5', build='if_missing', images=None, check=None, expect=None, "
        "threads=None)"
    )


def test_a_dropped_loader_ends_its_session_without_the_collector(tmp_path: Path) -> None:
    gc.disable()
    try:
        loader: DataLoader[Any] = DataLoader(
            MapDataset(tensor_sample), 2, backend=H5(tmp_path / "a.h5")
        )
        for _ in range(2):
            list(loader)
        session = weakref.ref(loader._session)  # type: ignore[arg-type]
        del loader
        assert session() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.nightly
def test_workers_that_are_not_forked_apply_the_tail(context: str, tmp_path: Path) -> None:
    """What makes their batches is sent to them, and must not hold the file that is mapped here."""
    dataset = Images(v1.Compose([v1.ToTensor(), v1.Normalize((0.5,) * 3, (0.5,) * 3)]))
    backend = H5(tmp_path / "x.h5")
    ours = DataLoader(dataset, 4, num_workers=1, multiprocessing_context=context, backend=backend)
    for batch, wanted in zip(ours, DataLoader(dataset, 4), strict=True):
        assert_same(batch, wanted)

"""Other ways of reading precomputed images.

    images [n, 3, S, S] ──written once in the peer's own format──> page cache ──> batches, labels

Each gives the same: crops of one size, mirrored or not, every image once, in a new order each epoch
(`check.py` compares every pixel). To install all of them: ``pip install -e '.[vision,h5,peers]'``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from bench.harness import Samples

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Batches: TypeAlias = Iterable[Any]
"""An epoch at each ``iter()``: pairs of images [b, 3, side, side] and labels [b], tensors."""


@dataclass(frozen=True)
class Job:
    """What each way has to do.

    Attributes:
        folder: for files; two jobs may share it.
        images: uint8 [n, 3, height, width], their first channel the row of each pixel, the second
            its column; the label of an image is its number.
        side: pixels of a crop.
        batch: images in a batch; the last batch may be smaller.
        floats: float32, scaled to 0..1 and normalised with `MEAN` and `STD`; else uint8.
    """

    folder: Path
    images: npt.NDArray[np.uint8]
    side: int
    batch: int
    floats: bool

    def __len__(self) -> int:
        return len(self.images)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.floats else torch.uint8

    @cached_property
    def mapped(self) -> npt.NDArray[np.uint8]:
        """The images as a mapped file; copy on write, because torch warns of read-only memory."""
        path = self.folder / "plain.bin"
        if not path.exists():
            self.images.tofile(path)
        return np.memmap(path, np.uint8, "c", shape=self.images.shape).view(np.ndarray)

    def transform(self) -> Any:
        """Return torchvision's transforms for one image, a uint8 tensor."""
        from torchvision.transforms import v2

        floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        crop = [v2.RandomCrop(self.side), v2.RandomHorizontalFlip()]
        return v2.Compose([*crop, *(floats if self.floats else [])])


class Epochs:
    """Iterates what ``make`` returns, anew at each ``iter()``."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def over_h5py(job: Job) -> Dataset[Any]:
    """Return the dataset that tutorials write: each worker opens the file, h5py reads the rows."""
    import h5py

    path, transform = job.folder / "plain.h5", job.transform()
    if not path.exists():
        with h5py.File(path, "w") as file:
            file["images"], file["labels"] = job.images, np.arange(len(job))

    @cache
    def opened() -> tuple[Any, Any]:
        file = h5py.File(path, "r")
        return file["images"], file["labels"]

    def sample(index: int) -> Any:
        images, labels = opened()
        return transform(torch.from_numpy(images[index])), int(labels[index])

    return Samples(sample, len(job))


def over_memmap(job: Job) -> Dataset[Any]:
    """Return the dataset over np.memmap; only the crop is copied."""
    images, transform = job.mapped, job.transform()
    return Samples(lambda index: (transform(torch.from_numpy(images[index])), index), len(images))


def under_torch(dataset: Callable[[Job], Dataset[Any]], job: Job, workers: int) -> Batches:
    """Return torch's loader over a dataset of samples; workers persist."""
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    return DataLoader(dataset(job), job.batch, shuffle=True, **options)


def over_dali(job: Job) -> Batches:
    """Return DALI's batches on the CPU, one thread (the cheapest), fed views of the map.

    Its executor gives each batch memory of its own, which torch takes over.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    source, numbers = job.mapped, np.arange(len(job))[:, None]
    mean, std = (255 * np.array(MEAN), 255 * np.array(STD)) if job.floats else ([0.0], [1.0])

    def batches() -> Iterator[Any]:
        order = np.random.permutation(len(job))
        for begin in range(0, len(job), job.batch):
            rows = order[begin : begin + job.batch]
            yield [source[row] for row in rows], [numbers[row] for row in rows]

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=job.batch,
        num_threads=1,
        device_id=None,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )
    def graph() -> Any:
        images, labels = fn.external_source(
            source=Epochs(batches),
            num_outputs=2,
            cycle="raise",
            no_copy=True,
            layout=["CHW", None],
            dtype=[types.UINT8, types.INT64],
        )
        windows = fn.crop_mirror_normalize(
            images,
            crop=(job.side, job.side),
            crop_pos_x=fn.random.uniform(range=(0.0, 1.0)),
            crop_pos_y=fn.random.uniform(range=(0.0, 1.0)),
            mirror=fn.random.coin_flip(),
            mean=list(mean),
            std=list(std),
            dtype=types.FLOAT if job.floats else types.UINT8,
            output_layout="CHW",
        )
        return windows, labels

    pipeline = graph()
    pipeline.build()
    epochs = DALIGenericIterator([pipeline], ["images", "labels"], auto_reset=True)
    return Epochs(lambda: ((batch["images"], batch["labels"].flatten()) for (batch,) in epochs))


# Those with workers come first: they are forked before the others start threads.
PEERS: dict[str, Callable[[Job], Batches]] = {
    **{
        f"torch over {name}, {workers or 'no'} workers": partial(
            under_torch, dataset, workers=workers
        )
        for name, dataset in (("h5py", over_h5py), ("np.memmap", over_memmap))
        for workers in (2, 0)
    },
    "DALI, fresh memory": over_dali,
}
"""By name, what opens each way for a job; ImportError where its package is missing."""
PACKAGES = ("h5py", "numpy", "nvidia-dali-cuda130", "nvidia-dali-cuda120")

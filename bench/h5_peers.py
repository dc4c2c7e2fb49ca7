"""The other ways of reading images that were precomputed, each in its documented fast form.

    images [n, 3, S, S] ──written once in the peer's own format──> page cache ──> batches, labels

A peer gives what ours gives: crops of one size, mirrored or not, every image once, in an order of
its own each epoch; `h5_check.py` looks at every pixel before anything is timed. Peers that are not
installed are named in the result. All of them::

    apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev    # FFCV is compiled
    pip install -e '.[vision,h5,peers]'                # in an environment of its own
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["MEAN", "PEERS", "STD", "Job", "Peer"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Batches: TypeAlias = Iterable[Any]
"""An epoch at each ``iter()``: pairs of images [b, 3, side, side] and labels [b], tensors."""


@dataclass(frozen=True)
class Job:
    """What every way is asked for.

    Attributes:
        folder: for files; two jobs may share it.
        images: uint8 [n, 3, height, width]; the label of an image is its number.
        side: of a crop, in pixels.
        batch: images in a batch; the last one may have fewer.
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
        """Of a batch's images."""
        return torch.float32 if self.floats else torch.uint8

    @cached_property
    def mapped(self) -> npt.NDArray[np.uint8]:
        """The images as a mapped file: copy on write, so that torch takes them as they are."""
        path = self.folder / "plain.bin"
        if not path.exists():
            self.images.tofile(path)
        return np.memmap(path, np.uint8, "c", shape=self.images.shape).view(np.ndarray)

    @cached_property
    def interleaved(self) -> npt.NDArray[np.uint8]:
        """The same, each image [H, W, C], as it is decoded."""
        path = self.folder / "interleaved.bin"
        if not path.exists():
            np.ascontiguousarray(self.images.transpose(0, 2, 3, 1)).tofile(path)
        count, channels, height, width = self.images.shape
        shape = (count, height, width, channels)
        return np.memmap(path, np.uint8, "c", shape=shape).view(np.ndarray)

    def transform(self) -> Any:
        """Torchvision's transforms of one image, a uint8 tensor."""
        from torchvision.transforms import v2

        floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        crop = [v2.RandomCrop(self.side), v2.RandomHorizontalFlip()]
        return v2.Compose([*crop, *(floats if self.floats else [])])

    def orders(self) -> Iterator[npt.NDArray[np.int64]]:
        """The numbers of each batch of an epoch, for ways without a sampler of their own."""
        order = np.random.permutation(len(self))
        for begin in range(0, len(self), self.batch):
            yield order[begin : begin + self.batch]


@dataclass(frozen=True)
class Peer:
    """One way.

    Attributes:
        name: in the table.
        packages: any one of these distributions is needed.
        open: the batches for a job. Raises ImportError where something is not installed.
        kept: whether a batch stays what it is when the next one is made.
        workers: worker processes.
        limit: whether it is nothing that one installs, but what the work takes by hand.
    """

    name: str
    packages: tuple[str, ...]
    open: Callable[[Job], Batches]
    kept: bool = True
    workers: int = 0
    limit: bool = False


class Epochs:
    """What ``make`` yields, from the beginning at each ``iter()``."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


def under_torch(dataset: Callable[[Job], Any], job: Job, workers: int) -> Batches:
    """Torch's loader over a dataset of samples; workers persist."""
    made = dataset(job)
    shuffle = not isinstance(made, torch.utils.data.IterableDataset)
    return DataLoader(
        made,
        job.batch,
        shuffle=shuffle,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


class OverH5py(Dataset[Any]):
    """The dataset that tutorials write: a file opened in each worker, rows read by h5py."""

    def __init__(self, job: Job) -> None:
        import h5py

        self.path, self.length = job.folder / "plain.h5", len(job)
        self.transform, self.file = job.transform(), None
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                file["images"], file["labels"] = job.images, np.arange(len(job))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r")
            self.images, self.labels = self.file["images"], self.file["labels"]
        return self.transform(torch.from_numpy(self.images[index])), int(self.labels[index])


class OverMemmap(Dataset[Any]):
    """The same over np.memmap; only the crop is copied."""

    def __init__(self, job: Job) -> None:
        self.images, self.transform = job.mapped, job.transform()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.from_numpy(self.images[index])), index


class OverLmdb(Dataset[Any]):
    """A key for each image, raw bytes; values are looked at in the map, and only crops copied."""

    def __init__(self, job: Job) -> None:
        import lmdb

        self.path, self.shape, self.length = job.folder / "lmdb", job.images.shape[1:], len(job)
        self.transform, self.reading = job.transform(), None
        if not self.path.exists():
            size = 2 * job.images.nbytes + (1 << 24)
            with (
                lmdb.open(str(self.path), map_size=size) as file,
                file.begin(write=True) as writing,
            ):
                for number, image in enumerate(job.images):
                    writing.put(b"%08d" % number, image.tobytes())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.reading is None:
            import lmdb

            file = lmdb.open(
                str(self.path), readonly=True, lock=False, readahead=False, meminit=False
            )
            self.reading = file.begin(buffers=True)
        image = np.frombuffer(self.reading.get(b"%08d" % index), np.uint8).reshape(self.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is read-only: nobody writes to it
            return self.transform(torch.from_numpy(image)), index


def over_mds(job: Job) -> Any:
    """MosaicML's StreamingDataset over a local folder, which shuffles by itself."""
    from streaming import MDSWriter, StreamingDataset

    shape = ",".join(map(str, job.images.shape[1:]))
    folder = job.folder / "mds"
    if not folder.exists():
        columns = {"image": f"ndarray:uint8:{shape}", "label": "int"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for number, image in enumerate(job.images):
                writer.write({"image": image, "label": number})

    class Samples(StreamingDataset):
        transform = job.transform()

        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as in OverLmdb
                image = torch.from_numpy(sample["image"])
            return self.transform(image), sample["label"]

    return Samples(local=str(folder), batch_size=job.batch, shuffle=True)


def over_ffcv(job: Job, copied: bool) -> Batches:
    """FFCV: raw images, one thread (the cheapest), its crop and flip compiled, channels last.

    A crop that is not resized is its random resized crop of one scale and ratio. Its batches are
    buffers that it fills again, so that those to keep are copied.
    """
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )
    from ffcv.writer import DatasetWriter

    path, stored = job.folder / "images.beton", job.images.shape[2]
    if not path.exists():
        interleaved = [
            (np.ascontiguousarray(image.transpose(1, 2, 0)), number)
            for number, image in enumerate(job.images)
        ]
        fields = {"image": RGBImageField("raw"), "label": IntField()}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress
            DatasetWriter(str(path), fields, num_workers=1).from_indexed_dataset(interleaved)
    scale = (job.side / stored) ** 2
    images: list[Any] = [
        RandomResizedCropRGBImageDecoder((job.side, job.side), (scale, scale), (1.0, 1.0)),
        RandomHorizontalFlip(),
    ]
    if job.floats:
        images.append(NormalizeImage(255 * np.array(MEAN), 255 * np.array(STD), np.float32))
    loader = Loader(
        str(path),
        batch_size=job.batch,
        num_workers=1,
        os_cache=True,
        order=OrderOption.RANDOM,
        drop_last=False,
        batches_ahead=1,
        pipelines={
            "image": [*images, ToTensor(), ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze([1])],
        },
    )
    if not copied:
        return loader  # type: ignore[no-any-return]
    return Epochs(lambda: ((images.clone(), labels.clone()) for images, labels in loader))


def over_dali(job: Job, fresh: bool) -> Batches:
    """DALI on the CPU, one thread (the cheapest), fed views of the map without a copy.

    With ``fresh``, its executor gives each batch memory of its own, which torch takes over; else a
    batch is the pipeline's buffer, until the next one.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    source, numbers = job.mapped, np.arange(len(job))[:, None]
    mean, std = (255 * np.array(MEAN), 255 * np.array(STD)) if job.floats else ([0.0], [1.0])

    def batches() -> Iterator[Any]:
        for rows in job.orders():
            yield [source[row] for row in rows], [numbers[row] for row in rows]

    @pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=job.batch,
        num_threads=1,
        device_id=None,
        prefetch_queue_depth=1,
        exec_dynamic=fresh,
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
    if fresh:
        epochs = DALIGenericIterator([pipeline], ["images", "labels"], auto_reset=True)
        return Epochs(lambda: ((batch["images"], batch["labels"].flatten()) for (batch,) in epochs))

    def own() -> Iterator[Any]:
        while True:
            try:
                images, labels = pipeline.run()
            except StopIteration:
                pipeline.reset()
                return
            yield (
                torch.from_numpy(np.asarray(images.as_tensor())),
                torch.from_numpy(np.asarray(labels.as_tensor()).ravel()),
            )

    return Epochs(own)


Gather: TypeAlias = Callable[..., None]


def compiled(job: Job, planar: bool, fresh: bool) -> Batches:
    """What a person who knows how writes: a gather for just this case, compiled by numba.

    One thread, no loader around it; scale and normalisation are one multiplication and addition.

    Args:
        job: what is asked for.
        planar: whether rows are kept as ours are, [C, H, W]; else as images are decoded, [H, W, C].
        fresh: whether each batch is in memory of its own.
    """
    gather = (_of_planes if planar else _of_pixels)(job)
    source = job.mapped if planar else job.interleaved
    stored, side = job.images.shape[2], job.side

    def memory(count: int) -> npt.NDArray[Any]:
        return np.empty((count, 3, side, side), np.float32 if job.floats else np.uint8)

    buffer, pixels = memory(job.batch), source.reshape(-1)

    def epoch() -> Iterator[Any]:
        for rows in job.orders():
            count = len(rows)
            tops, lefts = np.random.randint(0, stored - side + 1, (2, count))
            out = memory(count) if fresh else buffer[:count]
            gather(pixels, rows, tops, lefts, np.random.rand(count) < 0.5, out.reshape(-1))
            yield torch.from_numpy(out), torch.from_numpy(rows)

    return Epochs(epoch)


def _scale_and_offset() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """By which bytes become normalised floats: times, plus; of each channel."""
    deviation = np.array(STD, np.float32)
    scale = (1 / (255 * deviation)).astype(np.float32)
    return scale, (-np.array(MEAN, np.float32) / deviation).astype(np.float32)


def _of_planes(job: Job) -> Gather:
    import numba

    side, stored, floats = job.side, job.images.shape[2], job.floats
    scale, offset = _scale_and_offset()

    # Unsigned places: numba then vectorises the loops, as nothing counts from the end.
    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def gather(pixels: Any, rows: Any, tops: Any, lefts: Any, mirrored: Any, out: Any) -> None:
        width, one = np.uintp(side), np.uintp(1)
        for place in range(len(rows)):
            for channel in range(3):
                by, plus = scale[channel], offset[channel]
                for line in range(side):
                    above = (rows[place] * 3 + channel) * stored + tops[place] + line
                    first = np.uintp(above * stored + lefts[place])
                    last = first + width - one
                    to = np.uintp(((place * 3 + channel) * side + line) * side)
                    if floats and mirrored[place]:
                        for x in range(width):
                            out[to + x] = pixels[last - x] * by + plus
                    elif floats:
                        for x in range(width):
                            out[to + x] = pixels[first + x] * by + plus
                    elif mirrored[place]:
                        for x in range(width):
                            out[to + x] = pixels[last - x]
                    else:
                        for x in range(width):
                            out[to + x] = pixels[first + x]

    return gather


def _of_pixels(job: Job) -> Gather:
    import numba

    side, stored, floats = job.side, job.images.shape[2], job.floats
    scale, offset = _scale_and_offset()

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def gather(pixels: Any, rows: Any, tops: Any, lefts: Any, mirrored: Any, out: Any) -> None:
        width, one, three = np.uintp(side), np.uintp(1), np.uintp(3)
        for place in range(len(rows)):
            for line in range(side):
                above = rows[place] * stored + tops[place] + line
                first = np.uintp((above * stored + lefts[place]) * 3)
                last = first + (width - one) * three
                for channel in range(3):
                    by, plus, more = scale[channel], offset[channel], np.uintp(channel)
                    to = np.uintp(((place * 3 + channel) * side + line) * side)
                    if floats and mirrored[place]:
                        for x in range(width):
                            out[to + x] = pixels[last - x * three + more] * by + plus
                    elif floats:
                        for x in range(width):
                            out[to + x] = pixels[first + x * three + more] * by + plus
                    elif mirrored[place]:
                        for x in range(width):
                            out[to + x] = pixels[last - x * three + more]
                    else:
                        for x in range(width):
                            out[to + x] = pixels[first + x * three + more]

    return gather


def _under_torch(
    name: str, packages: tuple[str, ...], dataset: Callable[[Job], Any]
) -> Iterator[Peer]:
    for workers, told in ((2, "2 workers"), (0, "no workers")):
        way = partial(under_torch, dataset, workers=workers)
        yield Peer(f"{name}, {told}", packages, way, workers=workers)


def _compiled(name: str, planar: bool) -> Iterator[Peer]:
    for fresh, told in ((False, "one buffer"), (True, "fresh memory")):
        way = partial(compiled, planar=planar, fresh=fresh)
        yield Peer(f"{name}, {told}", ("numba",), way, kept=fresh, limit=True)


DALI = ("nvidia-dali-cuda130", "nvidia-dali-cuda120")

# Those with workers first: they are forked before the others have threads.
PEERS = (
    *_under_torch("torch over h5py", ("h5py",), OverH5py),
    *_under_torch("torch over np.memmap", ("numpy",), OverMemmap),
    *_under_torch("torch over LMDB", ("lmdb",), OverLmdb),
    *_under_torch("mosaicml-streaming", ("mosaicml-streaming",), over_mds),
    Peer("FFCV, its buffers", ("ffcv",), partial(over_ffcv, copied=False), kept=False),
    Peer("FFCV, copied", ("ffcv",), partial(over_ffcv, copied=True)),
    Peer("DALI, its buffer", DALI, partial(over_dali, fresh=False), kept=False),
    Peer("DALI, fresh memory", DALI, partial(over_dali, fresh=True)),
    *_compiled("compiled gather", planar=False),
    *_compiled("compiled gather of planar rows", planar=True),
)

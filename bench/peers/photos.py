"""DALI by hand: JPEG files, RandomResizedCrop, flip, normalise, as in DALI's own examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.peers.readers import MEAN, STD


def hand_written(
    photos: Path,
    batch: int,
    side: int,
    *,
    device: str = "cpu",
    threads: int = 2,
    windows: bool = True,
    **decoder: Any,
) -> Callable[[], Iterator[Any]]:
    """Return what makes an epoch; on the CPU each batch is copied, so that it is safe to keep.

    Args:
        photos: a folder of class folders.
        batch: samples in a batch.
        side: pixels of a crop.
        device: "cpu" or "gpu".
        threads: DALI's.
        windows: decode only the windows; else whole files, and cut while resizing.
        decoder: more options of DALI's decoder.
    """
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    gpu = device == "gpu"

    @pipeline_def(batch_size=batch, num_threads=threads, device_id=0 if gpu else None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        files, labels = fn.readers.file(
            file_root=str(photos), random_shuffle=True, name="reader", prefetch_queue_depth=2
        )
        options = {"device": "mixed" if gpu else "cpu", **decoder}
        drawn = {"random_area": (0.08, 1.0), "random_aspect_ratio": (3 / 4, 4 / 3)}
        size: Any = {"size": (side, side), "interp_type": types.INTERP_TRIANGULAR}
        if windows:
            images = fn.resize(fn.decoders.image_random_crop(files, **options, **drawn), **size)
        else:
            images = fn.random_resized_crop(fn.decoders.image(files, **options), **drawn, **size)
        images = fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
            output_layout="CHW",
        )
        return images, labels

    iterator = DALIGenericIterator(
        [pipeline()],
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )

    def epoch() -> Iterator[Any]:
        for (found,) in iterator:
            yield (found["images"] if gpu else found["images"].clone()), found["labels"]

    return epoch

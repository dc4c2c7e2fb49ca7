"""One row of a dataset as cells, its errors with the number of the sample; and refusing draws."""

from __future__ import annotations

from collections.abc import Sequence

from dataloaders.cache.build.failure import not_interrupted
from dataloaders.cache.sample.cut import Call, Cut
from dataloaders.cache.sample.sample import Cell, Structure, split
from dataloaders.errors import CacheError, add_note

__all__ = ["BYTES_PER_CELL", "draws_refused", "read_row"]

BYTES_PER_CELL = 400
"""What a cell takes in memory besides its values, about."""


def read_row(
    cut: Cut, index: int, calls: Sequence[Call] | None = None
) -> tuple[Structure, list[Cell]]:
    """Read row ``index`` and copy it into cells: the dataset may use its memory again.

    Raises:
        CacheError: it went through the transforms in another way than ``calls`` say, or it cannot
            be kept; the message names it.
        Exception: what reading it raised, with a note that names the sample.
    """
    try:
        return split(cut.read(index, calls))
    except CacheError as error:
        raise CacheError(f"sample {index} cannot be kept: {error}") from error
    except BaseException as error:
        not_interrupted(error)
        note = f"dataloaders: raised by sample {index} of {cut.name} while its cache was built"
        if isinstance(error, Exception):
            note += '; on_error="skip" (--skip) leaves such samples out'
        add_note(error, note)
        raise


def draws_refused(name: str, index: int, generators: Sequence[str], why: str = "") -> CacheError:
    """Return the error for a row that drew from process-wide generators.

    Args:
        name: of the dataset's class.
        index: of the sample.
        generators: their names, as `DrawDetector.moved` gives them.
        why: what else is known of it, to follow the generators' names.
    """
    *most, last = generators
    names = f"generators of {', '.join(most)} and {last}" if most else f"generator of {last}"
    return CacheError(
        f"{name} draws random numbers: making the part of sample {index} that "
        f"a cache keeps drew from, or seeded, the {names}{why}. A cache would keep one draw for "
        "ever; drawing or seeding counts even if it has no effect on the sample. Take it out of "
        "the dataset (a torchvision Compose as transform= stays live from its first random member "
        "on), or pass allow_random=True (--allow-random) to keep one draw of each sample, "
        "with the generators "
        "seeded by the sample's number"
    )

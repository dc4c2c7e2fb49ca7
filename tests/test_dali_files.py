"""Files of every kind: what DALI decodes itself is Pillow's to the bit, the rest goes by Pillow.

The pixels come out of a real DALI pipeline, as the dataset's own loader gives them; or what fails
fails with that loader's own error.
"""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from torchvision.datasets import DatasetFolder
from torchvision.datasets.folder import default_loader

from helpers.image_files import (
    Decoder,
    exif,
    frame_at,
    noise,
    odd_files,
    opened,
    plain_files,
    saved,
    with_segment,
)

pytest.importorskip("nvidia.dali", reason="DALI is not installed")

from backends.dali.header import Header, peek
from backends.dali.odd import as_file
from backends.dali.sources import Failed, Found, source_for
from backends.dali.sources.source import Source
from bench.dali_damage import WRONG, compared

# What Pillow warns of in odd and damaged files; here warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
]

PLAIN, ODD = plain_files(), odd_files()


@pytest.fixture(scope="module")
def decode() -> Decoder:
    return Decoder()


def source_of_file(folder: Path, data: bytes) -> tuple[Source, str]:
    """The source of a folder with this one file, and its path."""
    (folder / "class").mkdir(exist_ok=True)
    path = folder / "class" / "file.img"
    path.write_bytes(data)
    source = source_for(DatasetFolder(str(folder), default_loader, extensions=(".img",)))
    assert isinstance(source, Source), source
    return source, str(path)


def loaded(path: str) -> Any:
    """What the dataset's own loader makes of the file: pixels, or what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return np.asarray(default_loader(path))
        except Exception as error:
            return error


def assert_same_error(found: Found, theirs: Exception) -> None:
    assert isinstance(found, Failed)
    assert type(found.error) is type(theirs)
    assert str(found.error) == str(theirs)


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_file(name: str, decode: Decoder) -> None:
    data, image = PLAIN[name], Image.open(io.BytesIO(PLAIN[name]))
    format = "JPEG" if image.format == "MPO" else image.format
    assert peek(data) == Header(str(format), image.height, image.width, image.mode, True)
    np.testing.assert_array_equal(decode(data), opened(data))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_file_is_handed_on_as_it_is(tmp_path: Path, name: str) -> None:
    source, path = source_of_file(tmp_path, PLAIN[name])
    found = source.image(0)
    assert not isinstance(found, Failed)
    assert found.data.tobytes() == PLAIN[name]
    assert (found.name, found.height, found.width) == (path, *opened(PLAIN[name]).shape[:2])


@pytest.mark.parametrize("name", ODD)
def test_any_other_file(tmp_path: Path, name: str, decode: Decoder) -> None:
    data = ODD[name]
    header = peek(data)
    assert header is None or not header.plain
    if header is not None and header.height:
        assert (header.height, header.width) == opened(data).shape[:2]
    source, path = source_of_file(tmp_path, data)
    found = source.image(0)
    assert not isinstance(found, Failed)
    assert (found.name, found.format) == (path, "PPM")
    assert (found.height, found.width) == opened(data).shape[:2]
    np.testing.assert_array_equal(decode(found.data), loaded(path))


@pytest.mark.parametrize("name", PLAIN)
def test_any_file_can_be_decoded_by_pillow(tmp_path: Path, name: str, decode: Decoder) -> None:
    found = source_of_file(tmp_path, PLAIN[name])[0].image(0, decode=True)
    assert not isinstance(found, Failed)
    assert found.format == "PPM"
    np.testing.assert_array_equal(decode(found.data), opened(PLAIN[name]))


def test_exif_turns_nothing(decode: Decoder) -> None:
    assert PLAIN["jpeg turned"] != PLAIN["jpeg"]
    np.testing.assert_array_equal(decode(PLAIN["jpeg turned"]), decode(PLAIN["jpeg"]))


@pytest.mark.parametrize("name", [*PLAIN, *ODD])
@pytest.mark.thinned(2)
def test_a_file_that_ends_early(tmp_path: Path, name: str, decode: Decoder) -> None:
    data = {**PLAIN, **ODD}[name]
    for length in {1, 10, 30, len(data) // 2, len(data) * 9 // 10, len(data) - 3, len(data) - 1}:
        source, path = source_of_file(tmp_path, data[:length])
        found, theirs = source.image(0), loaded(path)
        if isinstance(theirs, Exception):
            assert_same_error(found, theirs)
        else:  # text behind an image, or the second one of two
            assert not isinstance(found, Failed)
            np.testing.assert_array_equal(decode(found.data), theirs)


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"text" * 99, bytes(999), b"\xff\xd8\xff", b"RIFF" + bytes(40), b"BM" + bytes(60)],
)
def test_what_is_no_image(tmp_path: Path, data: bytes) -> None:
    source, path = source_of_file(tmp_path, data)
    theirs = loaded(path)
    assert isinstance(theirs, Exception)
    assert_same_error(source.image(0), theirs)
    assert_same_error(source.image(0, decode=True), theirs)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    source, path = source_of_file(tmp_path, PLAIN["jpeg"])
    Path(path).unlink()
    found = source.image(0)
    assert_same_error(found, loaded(path))
    assert found.name == path
    assert isinstance(source.image(7), Failed)


@pytest.mark.nightly
def test_twenty_megapixels(tmp_path: Path, decode: Decoder) -> None:
    image = noise(80, 100).resize((5000, 4000), Image.Resampling.NEAREST)
    for data in (saved(image, "JPEG"), saved(image, "TIFF")):
        source, path = source_of_file(tmp_path, data)
        found = source.image(0)
        assert not isinstance(found, Failed)
        assert (found.height, found.width) == (4000, 5000)
        assert np.array_equal(decode(found.data), loaded(path))


def test_an_image_larger_than_pillow_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = source_of_file(tmp_path, PLAIN["jpeg"])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    theirs = loaded(path)
    assert isinstance(theirs, Image.DecompressionBombError)
    assert_same_error(source.image(0), theirs)
    huge = with_size(PLAIN["jpeg"], 40_000, 40_000)
    assert peek(huge) == Header("JPEG", 40_000, 40_000, "RGB", False)


def with_size(jpeg: bytes, height: int, width: int) -> bytes:
    place = frame_at(jpeg) + 5
    return (
        jpeg[:place]
        + bytes([height >> 8, height & 255, width >> 8, width & 255])
        + jpeg[place + 4 :]
    )


def test_truncated_images_that_pillow_was_told_to_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode: Decoder
) -> None:
    data = PLAIN["jpeg"]
    source, path = source_of_file(tmp_path, data[: len(data) * 3 // 4])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = source.image(0)
    assert not isinstance(found, Failed)
    np.testing.assert_array_equal(decode(found.data), loaded(path))


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (513, 1025), (3, 262_145)])
def test_pixels_as_a_file(size: tuple[int, int], decode: Decoder) -> None:
    image = noise(*size)
    np.testing.assert_array_equal(decode(as_file(image)), np.asarray(image))


# What the header says


def test_the_first_frame_counts_and_not_the_thumbnails() -> None:
    thumbnail = saved(noise(7, 9), "JPEG")
    for data in (
        with_segment(PLAIN["jpeg"], 0xE1, exif(1, thumbnail)),
        with_segment(PLAIN["jpeg"], 0xE0, b"JFXX\0\x10" + thumbnail),
        with_segment(PLAIN["jpeg"], 0xED, thumbnail),
    ):
        assert peek(data) == Header("JPEG", 21, 34, "RGB", True)
        # Its end is missing, though the thumbnail has one.
        assert peek(data[:-2]) == Header("JPEG", 21, 34, "RGB", False)


@pytest.mark.parametrize(
    ("marker", "depth"), [(0xC0, 12), (0xC1, 12), (0xC3, 8), (0xC9, 8), (0xCA, 8), (0xC5, 8)]
)
def test_jpeg_that_is_not_for_dali(marker: int, depth: int) -> None:
    data, place = bytearray(PLAIN["jpeg"]), frame_at(PLAIN["jpeg"])
    data[place + 1], data[place + 4] = marker, depth
    header = peek(bytes(data))
    assert header is not None
    assert (header.format, header.plain) == ("JPEG", False)


def test_checksums_before_the_pixels_of_a_png() -> None:
    data = PLAIN["png 2/8 tRNS"]
    place = data.index(b"tRNS") + 4
    wrong = data[:place] + b"\7" + data[place + 1 :]
    with pytest.raises(OSError, match="cannot identify"):
        opened(wrong)
    header = peek(wrong)
    assert header is not None
    assert not header.plain


def test_chunks_of_a_png_lead_to_its_end() -> None:
    data = PLAIN["png"]
    place = data.index(b"IDAT") - 4
    for length in (0, 1, len(data), 2**32 - 1):
        header = peek(data[:place] + length.to_bytes(4, "big") + data[place + 4 :])
        assert header is not None
        assert not header.plain


def scans_of(jpeg: bytes) -> list[int]:
    """Where the scans of a JPEG file begin, and its end."""
    return [found.start() for found in re.finditer(rb"\xff[\xda\xd9]", jpeg)]


@pytest.mark.parametrize("name", ["jpeg", "jpeg restarts", "jpeg grey", "jpeg progressive"])
@pytest.mark.parametrize("marker", [0x01, 0x3A, 0xC0, 0xC8, 0xD8, 0xDC, 0xF0, 0xFD])
def test_a_marker_where_pixels_should_be(name: str, marker: int) -> None:
    data, place = PLAIN[name], scans_of(PLAIN[name])[0] + 16
    header = peek(data[:place] + bytes([0xFF, marker]) + data[place + 2 :])
    assert header is not None
    assert not header.plain


def test_a_progressive_image_that_lacks_a_scan_is_for_pillow() -> None:
    data = PLAIN["jpeg progressive"]
    *scans, last, end = scans_of(data)
    assert len(scans) > 5
    for place in (*scans[1:], last):
        header = peek(data[:place] + data[end:])
        assert header is not None
        assert not header.plain


def test_damaged_jpeg_files_are_read_by_pillow_where_dali_would_read_them_otherwise() -> None:
    caught = 0
    for data, _, outcome in compared(400, seed=1):
        header = peek(data)
        if outcome in WRONG:
            assert header is not None
            assert not header.plain, outcome
            caught += 1
    assert caught > 5


def test_many_segments_take_no_time() -> None:
    empty = b"\xff\xe5\0\2" * 100_000
    assert peek(PLAIN["jpeg"][:2] + empty + PLAIN["jpeg"][2:]) == Header("JPEG")
    chunks = PLAIN["png"][:33] + b"\0\0\0\0teXt\xd3\x9b\x8c\x8c" * 100_000 + PLAIN["png"][33:]
    header = peek(chunks)
    assert header is not None
    assert not header.plain


_STARTS = sorted({data[:4] for data in {**PLAIN, **ODD}.values()})


@given(st.sampled_from(_STARTS), st.binary(max_size=300))
def test_any_bytes_can_be_looked_at(start: bytes, rest: bytes) -> None:
    header = peek(start + rest)
    assert header is None or (header.height >= 0 and header.width >= 0)
    assert peek(rest) is None or peek(rest).format  # type: ignore[union-attr]


@given(
    st.sampled_from(["jpeg", "jpeg grey", "jpeg progressive"]),
    st.lists(st.sampled_from([b"\xff", b"\xda", b"\xd9", b"\xc4", b"\0"]) | st.binary(max_size=9)),
)
def test_any_bytes_can_stand_in_place_of_the_scans(name: str, rest: list[bytes]) -> None:
    header = peek(PLAIN[name][: scans_of(PLAIN[name])[0]] + b"\xff\xda" + b"".join(rest))
    assert header is not None
    assert header.format == "JPEG"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(PLAIN[draw(st.sampled_from(sorted(PLAIN)))])
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, min(len(data), 900) - 1))
        part = draw(st.binary(min_size=1, max_size=3))
        data[place : place + draw(st.sampled_from([len(part), len(part), len(part), 0, 4]))] = part
    return bytes(data)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(damaged())
def test_damaged_files_give_the_same_pixels_or_fail_in_both(decode: Decoder, data: bytes) -> None:
    header = peek(data)
    if header is None or not header.plain:
        return
    try:
        ours = decode(data)
    except RuntimeError:
        return  # whoever decodes it asks Pillow then
    theirs = opened(data)
    assert theirs.shape == (header.height, header.width, 3)
    np.testing.assert_array_equal(ours, theirs)

"""Writing at a place, and the checksums of what is written."""

from __future__ import annotations

import os
import textwrap
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.cache import checksums
from dataloaders.cache.disk import write_all
from helpers.processes import run_script


def written(path: Path, offset: int, pieces: Sequence[bytes | memoryview]) -> bytes:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        write_all(file, offset, *pieces)
    finally:
        os.close(file)
    return path.read_bytes()


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 5000])
def test_any_number_of_pieces(count: int, tmp_path: Path) -> None:
    pieces = [bytes([number % 251]) * (number % 4) for number in range(count)]
    found = written(tmp_path / "a", 3 if count else 0, pieces)
    assert found == (b"\0\0\0" if b"".join(pieces) else b"") + b"".join(pieces)


@pytest.mark.parametrize("most", [1, 3, 4, 5, 9, 100])
def test_what_the_system_takes_in_parts(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwritev

    def in_parts(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        return whole(file, [b"".join(pieces)[:most]], offset)

    monkeypatch.setattr(os, "pwritev", in_parts)
    pieces = [b"abcd", b"", memoryview(b"efghi"), b"j", memoryview(b"klmn")]
    assert written(tmp_path / "a", 0, pieces) == b"abcdefghijklmn"


@pytest.mark.parametrize("sizes", [[3 << 20], [1 << 20], [700_000] * 5, [1, 2 << 20, 0, 5]])
def test_much_is_written_in_parts(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = os.pwritev, list[int]()

    def noted(file: int, pieces: Sequence[memoryview], offset: int) -> int:
        calls.append(sum(map(len, pieces)))
        return whole(file, pieces, offset)

    monkeypatch.setattr(os, "pwritev", noted)
    pieces = [np.random.default_rng(n).bytes(size) for n, size in enumerate(sizes)]
    assert written(tmp_path / "a", 7, pieces) == bytes(7) + b"".join(pieces)
    assert sum(calls) == sum(sizes)
    assert max(calls) <= 1 << 20
    assert len(calls) <= sum(sizes) / (1 << 20) + 1


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1))
def test_every_crc32_is_the_same(data: bytes, before: int) -> None:
    assert checksums.crc32(data, before) == zlib.crc32(data, before)
    assert checksums.crc32(memoryview(data)) == zlib.crc32(data)


def test_without_isal_the_file_is_the_same(tmp_path: Path) -> None:
    pytest.importorskip("isal")
    source = """
        import torch
        from dataloaders.cache import checksums, precompute, verify
        values = torch.arange(40 * 3000, dtype=torch.int32).reshape(40, 3000)
        precompute([(row, n) for n, row in enumerate(values)], "a.h5", overwrite=True)
        print(checksums.crc32.__module__, verify("a.h5"))
        """
    files = []
    for before, module in (
        ("", "isal.isal_zlib"),
        ("import sys; sys.modules['isal'] = None", "zlib"),
    ):
        done = run_script(tmp_path, before + textwrap.dedent(source))
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{module} []\n"
        files.append((tmp_path / "a.h5").read_bytes())
    assert files[0] == files[1]

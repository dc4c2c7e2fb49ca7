"""The journal of a build: what was written is read, and what a crash tore is not."""

from __future__ import annotations

import os
import resource
import signal
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders.cache.journal import Journal, Record, read_journal

RECORDS = st.builds(
    Record,
    chunk=st.integers(0, 50),
    file=st.text(st.characters(exclude_characters="/"), max_size=20),
    rows=st.integers(0, 1000),
    parts=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    digest=st.text("0123456789abcdef", min_size=32, max_size=32),
    structure=st.text("0123456789abcdef", max_size=16),
    spans=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=3).map(tuple),
    sums=st.integers(0, 2**40),
    size=st.integers(0, 2**40),
    failed=st.lists(st.tuples(st.integers(0, 2**40), st.text(max_size=20)), max_size=3).map(tuple),
)
SAME_FOLDER = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def written(path: Path, records: list[Record]) -> bytes:
    path.unlink(missing_ok=True)
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()
    return path.read_bytes()


def latest(records: list[Record]) -> dict[int, Record]:
    return {record.chunk: record for record in records}


@SAME_FOLDER
@given(records=st.lists(RECORDS, max_size=6))
def test_what_is_written_is_read(tmp_path: Path, records: list[Record]) -> None:
    path = tmp_path / "journal"
    written(path, records)
    assert read_journal(path).records == latest(records)


def test_no_file_is_an_empty_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "journal").records == {}
    assert not read_journal(tmp_path / "journal").assembled


@SAME_FOLDER
@given(records=st.lists(RECORDS, min_size=1, max_size=5), data=st.data())
def test_cut_anywhere_it_gives_whole_lines_and_can_be_gone_on_with(
    tmp_path: Path, records: list[Record], data: st.DataObject
) -> None:
    path = tmp_path / "journal"
    whole = written(path, records)
    end = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:end])
    lines = whole[:end].count(b"\n")
    assert read_journal(path).records == latest(records[:lines])
    journal = Journal(path)
    journal.append(records[-1])
    journal.close()
    assert read_journal(path).records == latest([*records[:lines], records[-1]])


@SAME_FOLDER
@given(records=st.lists(RECORDS, min_size=1, max_size=5), data=st.data())
def test_a_flipped_bit_ends_it_before_that_line(
    tmp_path: Path, records: list[Record], data: st.DataObject
) -> None:
    path = tmp_path / "journal"
    whole = bytearray(written(path, records))
    position = data.draw(st.integers(0, len(whole) - 1))
    line = whole[:position].count(b"\n")
    whole[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    assert read_journal(path).records == latest(records[:line])


def test_that_the_file_is_assembled_is_said_and_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    record = Record(0, "chunk", 1, (8,), "00" * 16, "")
    journal = Journal(path)
    journal.append(record)
    journal.set_assembled("whole")
    assert read_journal(path).assembled == "whole"
    journal.set_assembled("")
    journal.set_assembled("")
    journal.close()
    assert not read_journal(path).assembled
    assert path.read_bytes().count(b"\n") == 3
    assert read_journal(path).records == {0: record}


def test_a_line_that_finds_no_room_leaves_the_lines_before_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    small = Record(0, "chunk", 1, (8,), "00" * 16, "")
    large = replace(small, chunk=1, file="x" * 5000)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            journal = Journal(path)
            journal.append(small)
            with pytest.raises(OSError, match="too large"):
                journal.append(large)
            assert journal.records == {0: small}
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            journal.append(large)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_journal(path).records == {0: small, 1: large}


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000, b"3", b"null", b"{}", b'{"assembled":3}',
        b'{"assembled":"../a"}', b"9" * 5000, b"\xff\xfe1\0",
        b'{"chunk":[],"file":"a","rows":1,"parts":[8],"digest":"","structure":"","failed":[]}',
        b'{"chunk":-1,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","failed":[]}',
        b'{"chunk":0,"file":3,"rows":1,"parts":[8],"digest":"","structure":"","failed":[]}',
        b'{"chunk":0,"file":"../a","rows":1,"parts":[8],"digest":"","structure":"","failed":[]}',
        b'{"chunk":0,"file":"a","rows":null,"parts":[8],"digest":"","structure":"","failed":[]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[1e999],"digest":"","structure":"","failed":[]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[-8],"digest":"","structure":"","failed":[]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":0,"structure":"","failed":[]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":[],"failed":[]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","failed":[[1]]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","failed":[["1",2]]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","spans":[[1]]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","spans":[[1,-1]]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","spans":[["",1]]}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","sums":1.5}',
        b'{"chunk":0,"file":"a","rows":1,"parts":[8],"digest":"","structure":"","size":-1}',
    ],
    ids=lambda text: repr(text[:60]),
)  # fmt: skip
def test_a_line_that_no_builder_writes_ends_it(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "journal"
    record = Record(0, "chunk", 1, (8,), "00" * 16, "")
    whole = written(path, [record])
    path.write_bytes(whole + b"%08x %s\n" % (zlib.crc32(text), text) + whole)
    assert read_journal(path).records == {0: record}
    assert read_journal(path).good == len(whole)

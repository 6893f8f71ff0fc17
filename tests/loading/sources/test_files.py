"""Files: runs of bytes at positions, and JSON as hostile input."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError
from holdfast.loading.sources import files as json_file
from holdfast.loading.sources import files as open_file
from holdfast.loading.sources.files import MAX_GAP_BYTES, OpenFile, parse_json, read_json_object


@pytest.fixture
def content(tmp_path):
    data = random.Random(0).randbytes(200_000)
    (tmp_path / "data").write_bytes(data)
    return tmp_path / "data", data


def runs_of(data, offset, stride, run_bytes, num_runs):
    return b"".join(data[start : start + run_bytes] for start in range(offset, offset + num_runs * stride, stride))


def test_open_file_reads_up_to_the_end_of_the_file(content):
    path, data = content
    opened = OpenFile(path)
    for offset, num_bytes in [(0, 10), (7, 0), (12_345, 99_999), (199_990, 20), (300_000, 5)]:
        buffer = bytearray(b"\xaa" * num_bytes)
        num_read = opened.read(offset, memoryview(buffer))
        assert num_read == len(data[offset : offset + num_bytes])
        assert buffer[:num_read] == data[offset : offset + num_bytes]
        assert set(buffer[num_read:]) <= {0xAA}


@for_each("gap", [0, 1, 100, MAX_GAP_BYTES, MAX_GAP_BYTES + 1])
@for_each("run_bytes", [1, 3, 77])
@for_each("num_runs", [1, 2, 5])
def test_read_runs_skips_the_gaps(content, gap, run_bytes, num_runs):
    path, data = content
    opened = OpenFile(path)
    buffer = bytearray(run_bytes * num_runs)
    assert opened.read_runs(11, run_bytes + gap, run_bytes, memoryview(buffer)) == len(buffer)
    assert buffer == runs_of(data, 11, run_bytes + gap, run_bytes, num_runs)


def test_read_runs_thousands_of_runs_take_few_calls(content, monkeypatch):
    path, data = content
    opened = OpenFile(path)
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(len(args[1])) or preadv(*args))
    buffer = bytearray(3 * 5000)
    assert opened.read_runs(0, 30, 3, memoryview(buffer)) == len(buffer)
    assert buffer == runs_of(data, 0, 30, 3, 5000)
    assert len(calls) == 10
    assert max(calls) <= 1024, "more buffers than a system takes"


@for_each("at_once", [1, 2, 5, 1000])
@for_each("gap", [0, 4, MAX_GAP_BYTES + 1])
def test_scatter_short_reads_are_continued(content, at_once, gap, monkeypatch):
    path, data = content
    opened = OpenFile(path)
    pread = os.pread

    def little(descriptor, buffers, offset):
        done = 0
        for byte in pread(descriptor, at_once, offset):
            while buffers and not len(buffers[0]):
                buffers = buffers[1:]
            if not buffers:
                break
            buffers = list(buffers)
            buffers[0][0] = byte
            buffers[0] = buffers[0][1:]
            done += 1
        return done

    monkeypatch.setattr(os, "preadv", little)
    buffer = bytearray(4 * 7)
    assert opened.read_runs(5, 7 + gap, 7, memoryview(buffer)) == len(buffer)
    assert buffer == runs_of(data, 5, 7 + gap, 7, 4)


@pytest.mark.parametrize("gap", [0, 4, MAX_GAP_BYTES + 1])
def test_read_runs_past_the_end_reads_what_exists(content, gap):
    path, data = content
    opened = OpenFile(path)
    buffer = bytearray(50 * 10)
    start = len(data) - 25 - 2 * gap
    num_read = opened.read_runs(start, 10 + gap, 10, memoryview(buffer))
    assert num_read == 25
    assert buffer[:25] == runs_of(data, start, 10 + gap, 10, 3)


def test_open_file_is_thread_safe(content):
    path, data = content
    opened = OpenFile(path)

    def read(offset):
        buffer = bytearray(5000)
        opened.read(offset, memoryview(buffer))
        return bytes(buffer) == data[offset : offset + 5000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [index * 997 % 190_000 for index in range(500)]))


def test_open_file_closes_with_its_last_reference(content, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(
        open_file.os, "close", lambda descriptor, close=os.close: closed.append(descriptor) or close(descriptor)
    )
    opened = OpenFile(content[0])
    reader = opened
    del opened
    assert closed == []
    del reader
    assert len(closed) == 1
    with pytest.raises(FileNotFoundError):
        OpenFile(tmp_path / "absent")
    assert len(closed) == 1


def test_read_json_object_reads_values_and_unicode(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, 2.5, null, "é"]}', encoding="utf-8")
    assert read_json_object(tmp_path / "config.json") == {"a": [1, 2.5, None, "é"]}


@for_each(
    "content, code",
    [
        (b"", "file.not_json"),
        (b"{", "file.not_json"),
        (b"[1]", "file.wrong_content"),
        (b"3", "file.wrong_content"),
        (b'{"a": 1, "a": 2}', "file.not_json"),
        (b'{"a": Infinity}', "file.not_json"),
        (b'{"a": "\xff"}', "file.not_json"),
        (b"[" * 200_000, "file.not_json"),
        (b'{"a": ' + b"1" * 5000 + b"}", "file.not_json"),
        (b'{"a\nb": 1}', "file.not_json"),
    ],
)
def test_read_json_object_broken_is_refused_in_one_line(tmp_path, content, code):
    (tmp_path / "config.json").write_bytes(content)
    with raises_code(code, ModelFormatError) as caught:
        read_json_object(tmp_path / "config.json")
    assert str(caught.value).startswith("config.json")
    assert str(caught.value).isprintable()


def test_read_json_object_too_large_is_refused_unparsed(tmp_path, monkeypatch):
    monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 100)
    (tmp_path / "big.json").write_text('{"a": "' + "x" * 100 + '"}')
    with raises_code("file.too_large", ModelFormatError):
        read_json_object(tmp_path / "big.json")


def test_read_json_object_folder_pipe_or_absent_is_refused(tmp_path):
    with raises_code("file.not_regular", ModelFormatError):
        read_json_object(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with raises_code("file.not_regular", ModelFormatError):
        read_json_object(tmp_path / "pipe.json")
    with raises_code("file.unreadable", ModelFormatError):
        read_json_object(tmp_path / "absent.json")


def test_parse_json_checks_numbers_as_text():
    def positive(digits: str) -> int:
        if digits.startswith("-"):
            raise ValueError("negative")
        return int(digits)

    assert parse_json(b"[1]", "x", parse_int=positive) == [1]
    with raises_code("file.not_json", ModelFormatError):
        parse_json(b"[-0]", "x", parse_int=positive)

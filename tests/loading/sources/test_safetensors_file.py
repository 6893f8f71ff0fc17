import json
import os
import random
import struct
from pathlib import Path

import pytest

from holdfast.errors import ModelFormatError
from holdfast.loading.sources.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from loading.safetensors_bytes import file_bytes, header_of, write

GOOD = {"a.weight": ("F32", [3, 5]), "b": ("BF16", [7]), "empty": ("F16", [0, 4]), "scalar": ("F64", [])}
GOOD_BYTES = 60 + 14 + 0 + 8


def info(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(path: Path) -> str:
    with pytest.raises(ModelFormatError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert path.name in message
    assert message.isprintable()
    assert len(message) < 500
    return message


def test_tensors_are_listed_in_the_order_of_their_data(tmp_path):
    header = header_of(GOOD)
    shuffled = {"__metadata__": {"format": "pt"}, **dict(reversed(header.items()))}
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(shuffled, GOOD_BYTES))
    file = SafetensorsFile(path)
    assert [tensor.name for tensor in file.tensors.values() if tensor.num_bytes] == ["a.weight", "b", "scalar"]
    assert file.tensors["a.weight"].shape == (3, 5)
    assert file.tensors["b"].torch_dtype == "bfloat16"
    assert file.tensors["empty"].num_bytes == 0
    file.close()


def test_bytes_are_read_from_any_place(tmp_path):
    path = write(tmp_path / "m.safetensors", GOOD)
    data = path.read_bytes()
    file = SafetensorsFile(path)
    for name, tensor in file.tensors.items():
        for start in (0, tensor.num_bytes // 2):
            buffer = bytearray(tensor.num_bytes - start)
            file.read_into(name, start, memoryview(buffer))
            assert bytes(buffer) == data[tensor.offset + start : tensor.offset + tensor.num_bytes]
    file.close()


def test_buffers_are_filled_one_after_the_other_as_far_as_the_file_goes(tmp_path):
    path = write(tmp_path / "m.safetensors", GOOD)
    data, file = path.read_bytes(), SafetensorsFile(path)
    for sizes, is_filled in (((3, 0, 20, 1), True), ((len(data), 1), False)):
        buffers = [bytearray(size) for size in sizes]
        offset = 5 if is_filled else 0
        assert file.scatter(offset, [memoryview(buffer) for buffer in buffers]) == is_filled
        assert b"".join(buffers)[: len(data)] == data[offset:][: sum(sizes)]
    path.write_bytes(data + b"!")
    assert not file.scatter(0, [memoryview(bytearray(3))]), "the file is not the one that was checked"
    file.close()


@pytest.mark.parametrize(
    ("change", "is_open"),
    [("truncate", False), ("grow", False), ("replace", False), ("truncate", True), ("grow", True)],
)
def test_a_file_that_changes_after_it_was_checked_is_noticed(tmp_path, change, is_open):
    path = write(tmp_path / "m.safetensors", GOOD)
    file = SafetensorsFile(path)
    if is_open:
        file.read_into("b", 0, memoryview(bytearray(2)))
    if change == "replace":
        write(tmp_path / "other", GOOD)
        (tmp_path / "other").replace(path)
    else:
        os.truncate(path, path.stat().st_size + (-3 if change == "truncate" else 3))
    with pytest.raises(ModelFormatError, match=r"m\.safetensors was changed before 'scalar' was read"):
        file.read_into("scalar", 0, memoryview(bytearray(8)))
    file.close()


def test_a_file_that_vanishes_is_told(tmp_path):
    path = write(tmp_path / "m.safetensors", GOOD)
    file = SafetensorsFile(path)
    path.unlink()
    with pytest.raises(ModelFormatError, match=r"m\.safetensors: 'b' cannot be read; No such file"):
        file.read_into("b", 0, memoryview(bytearray(2)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes"),
        (b"1234567", "has 7 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "git lfs pull"),
        (struct.pack("<Q", 2**40) + b"{}", "says its header has 1099511627776 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most 16777216"),
        (struct.pack("<Q", 100) + b"{}", "cut off"),
        (struct.pack("<Q", 0), "does not begin as safetensors do"),
        (file_bytes(b"[]", 0), "does not begin as safetensors do"),
        (file_bytes(b" {}", 0), "does not begin as safetensors do"),
        (file_bytes(b"{", 0), "not sound JSON"),
        (file_bytes(b'{"a": 1} x', 0), "not sound JSON"),
        (file_bytes(b'{"\xff": 1}', 0), "not UTF-8"),
        (file_bytes(b'{"a":' * 100_000, 0), "nested too deeply"),
        (file_bytes(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "dtype": "F32"}}', 4), "twice"),
        (file_bytes(json.dumps({"a": info()})[:-1] + ', "a": 1}', 4), "'a' appears twice"),
        (file_bytes(b'{"a": NaN}', 0), "NaN"),
        (file_bytes(b'{"a": ' + b"9" * 5000 + b"}", 0), "out of range"),
        (file_bytes('{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', 4), "no sound name"),
        (file_bytes({"a": 1}, 0), "'a' is not described"),
        (file_bytes({"a": {"dtype": "F32", "shape": [1]}}, 4), "'a' is not described"),
        (file_bytes({"a": info() | {"extra": 1}}, 4), "'a' is not described"),
        (file_bytes({"a": info("F31")}, 4), "'a' has the unknown type 'F31'"),
        (file_bytes({"a": info() | {"dtype": 3}}, 4), "'a' has the unknown type 3"),
        (file_bytes({"a": info() | {"shape": 1}}, 4), "'a' has the shape 1"),
        (file_bytes({"a": info() | {"shape": [1.0]}}, 4), "'a' has the shape [1.0]"),
        (file_bytes({"a": info() | {"shape": [True]}}, 4), "'a' has the shape [True]"),
        (file_bytes({"a": info(shape=[-1])}, 4), "-1 is out of range"),
        (file_bytes({"a": info(shape=[1] * 9)}, 4), "'a' has the shape"),
        (file_bytes({"a": info() | {"data_offsets": [4]}}, 4), "'a' has data_offsets [4]"),
        (file_bytes({"a": info(offsets=(4, 0))}, 4), "'a' has data_offsets [4, 0]"),
        (file_bytes({"a": info(shape=(2,))}, 4), "'a' has 4 bytes; F32 of shape [2] needs 8"),
        (file_bytes({"a": info("F4", (3,), (0, 1))}, 1), "needs 1.5"),
        (
            file_bytes({"a": info("U8", (4194305, 4194305, 211106198978564), (0, 4))}, 4),
            "'a' has the shape [4194305, 4194305, 211106198978564]",
        ),
        (file_bytes({"a": info("U8", (2**62, 4, 0), (0, 0))}, 0), "no file is that large"),
        (file_bytes({"a": info(offsets=(4, 8))}, 8), "'a' leaves a hole before it"),
        (file_bytes({"a": info(), "b": info()}, 4), "overlaps the tensor before it"),
        (file_bytes({"a": info(), "b": info(offsets=(2, 6))}, 6), "'b' overlaps"),
        (file_bytes({"a": info(), "b": info(offsets=(8, 12))}, 12), "'b' leaves a hole"),
        (file_bytes({"a": info(), "b": info(offsets=(4, 8))}, 7), "cut off in 'b'"),
        (file_bytes({"a": info()}, 6), "2 bytes after its last tensor"),
        (file_bytes({"__metadata__": {"a": 1}}, 0), "__metadata__"),
        (file_bytes({"__metadata__": []}, 0), "__metadata__"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_files_are_refused_in_one_line(tmp_path, content, words):
    path = tmp_path / "model-1.safetensors"
    path.write_bytes(content)
    assert words in refusal(path)


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path):
    assert "not a regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in refusal(tmp_path / "pipe.safetensors")
    assert "cannot be read" in refusal(tmp_path / "absent.safetensors")


def test_a_hundred_thousand_tensors_are_read(tmp_path):
    path = write(tmp_path / "m.safetensors", {f"layer.{index}.w": ("U8", [1]) for index in range(100_000)})
    file = SafetensorsFile(path)
    assert len(file.tensors) == 100_000
    file.close()


def reference_accepts(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            list(file.keys())
    except (SafetensorError, OSError, ValueError):
        return False
    return True


def accepts(path: Path) -> bool:
    """Ours; anything but ModelFormatError fails the test."""
    try:
        SafetensorsFile(path).close()
    except ModelFormatError as error:
        message = str(error)
    else:
        return True
    assert path.name in message
    assert message.isprintable()
    return False


def test_a_file_cut_anywhere_is_refused(tmp_path):
    data = write(tmp_path / "whole.safetensors", GOOD).read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert not accepts(path), f"{length} of {len(data)} bytes were accepted"


JUNK = (
    b"-0",
    b"1e2",
    b"18446744073709551616",
    b"null",
    b'"',
    b"[",
    b"}",
    b"\\ud834",
    b"\x00",
    b",",
    b"[[",
    b"4294967297",
)


def mutant(data: bytes, source: random.Random) -> bytes:
    """One to three edits, most of them inside the header."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    changed = bytearray(data)
    for _ in range(source.randint(1, 3)):
        place = (
            source.randrange(min(header_end, len(changed))) if source.random() < 0.9 else source.randrange(len(changed))
        )
        match source.randrange(6):
            case 0:
                changed[place] ^= 1 << source.randrange(8)
            case 1:
                changed[place] = source.choice(b'0123456789,:{}[]" -.eE\\')
            case 2:
                del changed[place : place + source.randint(1, 12)]
            case 3:
                changed[place:place] = source.choice(JUNK)
            case 4:
                other = source.randrange(len(changed))
                changed[place:place] = changed[other : other + source.randint(1, 40)]
            case 5:
                changed = changed[: source.randrange(9, len(changed) + 1)]
        if len(changed) < 12:
            break
    if source.random() < 0.7:  # keep the length honest, so that edits reach the JSON
        changed[:8] = struct.pack("<Q", max(0, header_end - 8 + len(changed) - len(data)))
    return bytes(changed)


@pytest.mark.parametrize("seed", range(3))
def test_mutants_are_refused_in_words_and_never_more_readily_accepted_than_by_the_reference(tmp_path, seed):
    source = random.Random(seed)
    data = write(tmp_path / "whole.safetensors", GOOD).read_bytes()
    path = tmp_path / "mutant.safetensors"
    num_accepted = num_accepted_there = 0
    for _ in range(1200):
        path.write_bytes(mutant(data, source))
        ours, theirs = accepts(path), reference_accepts(path)
        assert theirs or not ours, path.read_bytes()
        num_accepted += ours
        num_accepted_there += theirs
    assert num_accepted_there > 0, "every mutant is broken for both: the mutation is too coarse to compare anything"
    assert num_accepted >= num_accepted_there * 0.5

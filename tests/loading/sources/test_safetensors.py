"""Safetensors: files that the package accepts and no others; folders with an index; rows of all files as one source."""

import gc
import json
import os
import random
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from tempfile import mkdtemp

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.sources.files import MAX_RUNS
from holdfast.loading.sources.safetensors import (
    MAX_HEADER_BYTES,
    MAX_OPEN_FILES,
    SafetensorsFile,
    SafetensorsSource,
    file_inside,
    open_weight_files,
)
from holdfast.loading.sources.source import RowRead, read_rows
from loading.safetensors_bytes import file_bytes, header_of, write

GOOD = {"a.weight": ("F32", [3, 5]), "b": ("BF16", [7]), "empty": ("F16", [0, 4]), "scalar": ("F64", [])}
GOOD_BYTES = 60 + 14 + 0 + 8


def info(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def check_refused(path: Path, code: str) -> None:
    with raises_code(code, ModelFormatError) as caught:
        SafetensorsFile(path)
    message = str(caught.value)
    assert path.name in message
    assert message.isprintable()
    assert len(message) < 500


def test_safetensors_file_lists_tensors_in_data_order(tmp_path):
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


def test_safetensors_file_reads_bytes_from_any_offset(tmp_path):
    path = write(tmp_path / "m.safetensors", GOOD)
    data = path.read_bytes()
    file = SafetensorsFile(path)
    for name, tensor in file.tensors.items():
        for start in (0, tensor.num_bytes // 2):
            buffer = bytearray(tensor.num_bytes - start)
            file.read_into(name, start, memoryview(buffer))
            assert bytes(buffer) == data[tensor.offset + start : tensor.offset + tensor.num_bytes]
    file.close()


def test_scatter_fills_buffers_up_to_the_end_of_the_file(tmp_path):
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


@for_each(
    "change, is_open", [("truncate", False), ("grow", False), ("replace", False), ("truncate", True), ("grow", True)]
)
def test_safetensors_file_changed_after_opening_is_refused(tmp_path, change, is_open):
    path = write(tmp_path / "m.safetensors", GOOD)
    file = SafetensorsFile(path)
    if is_open:
        file.read_into("b", 0, memoryview(bytearray(2)))
    if change == "replace":
        write(tmp_path / "other", GOOD)
        (tmp_path / "other").replace(path)
    else:
        os.truncate(path, path.stat().st_size + (-3 if change == "truncate" else 3))
    with raises_code("file.changed", ModelFormatError):
        file.read_into("scalar", 0, memoryview(bytearray(8)))
    file.close()


def test_read_vanished_file_is_refused(tmp_path):
    path = write(tmp_path / "m.safetensors", GOOD)
    file = SafetensorsFile(path)
    path.unlink()
    with raises_code("file.unreadable", ModelFormatError):
        file.read_into("b", 0, memoryview(bytearray(2)))


@for_each(
    "content, code",
    [
        (b"", "weights.truncated"),
        (b"1234567", "weights.truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "file.lfs_pointer"),
        (struct.pack("<Q", 2**40) + b"{}", "weights.not_safetensors"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "weights.not_safetensors"),
        (struct.pack("<Q", 100) + b"{}", "weights.truncated"),
        (struct.pack("<Q", 0), "weights.not_safetensors"),
        (file_bytes(b"[]", 0), "weights.not_safetensors"),
        (file_bytes(b" {}", 0), "weights.not_safetensors"),
        (file_bytes(b"{", 0), "file.not_json"),
        (file_bytes(b'{"a": 1} x', 0), "file.not_json"),
        (file_bytes(b'{"\xff": 1}', 0), "file.not_json"),
        (file_bytes(b'{"a":' * 100_000, 0), "file.not_json"),
        (
            file_bytes(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "dtype": "F32"}}', 4),
            "file.not_json",
        ),
        (file_bytes(json.dumps({"a": info()})[:-1] + ', "a": 1}', 4), "file.not_json"),
        (file_bytes(b'{"a": NaN}', 0), "file.not_json"),
        (file_bytes(b'{"a": ' + b"9" * 5000 + b"}", 0), "file.not_json"),
        (file_bytes('{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', 4), "weights.malformed"),
        (file_bytes({"a": 1}, 0), "weights.malformed"),
        (file_bytes({"a": {"dtype": "F32", "shape": [1]}}, 4), "weights.malformed"),
        (file_bytes({"a": info() | {"extra": 1}}, 4), "weights.malformed"),
        (file_bytes({"a": info("F31")}, 4), "weights.malformed"),
        (file_bytes({"a": info() | {"dtype": 3}}, 4), "weights.malformed"),
        (file_bytes({"a": info() | {"shape": 1}}, 4), "weights.malformed"),
        (file_bytes({"a": info() | {"shape": [1.0]}}, 4), "weights.malformed"),
        (file_bytes({"a": info() | {"shape": [True]}}, 4), "weights.malformed"),
        (file_bytes({"a": info(shape=[-1])}, 4), "file.not_json"),
        (file_bytes({"a": info(shape=[1] * 9)}, 4), "weights.malformed"),
        (file_bytes({"a": info() | {"data_offsets": [4]}}, 4), "weights.malformed"),
        (file_bytes({"a": info(offsets=(4, 0))}, 4), "weights.malformed"),
        (file_bytes({"a": info(shape=(2,))}, 4), "weights.malformed"),
        (file_bytes({"a": info("F4", (3,), (0, 1))}, 1), "weights.malformed"),
        (
            file_bytes({"a": info("U8", (4194305, 4194305, 211106198978564), (0, 4))}, 4),
            "weights.malformed",
        ),
        (file_bytes({"a": info("U8", (2**62, 4, 0), (0, 0))}, 0), "weights.malformed"),
        (file_bytes({"a": info(offsets=(4, 8))}, 8), "weights.malformed"),
        (file_bytes({"a": info(), "b": info()}, 4), "weights.malformed"),
        (file_bytes({"a": info(), "b": info(offsets=(2, 6))}, 6), "weights.malformed"),
        (file_bytes({"a": info(), "b": info(offsets=(8, 12))}, 12), "weights.malformed"),
        (file_bytes({"a": info(), "b": info(offsets=(4, 8))}, 7), "weights.truncated"),
        (file_bytes({"a": info()}, 6), "weights.malformed"),
        (file_bytes({"__metadata__": {"a": 1}}, 0), "weights.malformed"),
        (file_bytes({"__metadata__": []}, 0), "weights.malformed"),
    ],
)
def test_safetensors_file_broken_is_refused_in_one_line(tmp_path, content, code):
    path = tmp_path / "model-1.safetensors"
    path.write_bytes(content)
    check_refused(path, code)


def test_safetensors_file_of_another_kind_is_refused_at_once(tmp_path):
    check_refused(tmp_path, "file.not_regular")
    os.mkfifo(tmp_path / "pipe.safetensors")
    check_refused(tmp_path / "pipe.safetensors", "file.not_regular")
    check_refused(tmp_path / "absent.safetensors", "file.unreadable")


@pytest.mark.slow
def test_safetensors_file_reads_100k_tensors(tmp_path):
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


def test_safetensors_file_cut_at_any_byte_is_refused(tmp_path):
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


@pytest.mark.parametrize(("seed", "count"), [(0, 500), pytest.param(1, 2500, marks=pytest.mark.slow)])
def test_safetensors_file_mutants_match_the_reference(tmp_path, seed, count):
    source = random.Random(seed)
    data = write(tmp_path / "whole.safetensors", GOOD).read_bytes()
    path = tmp_path / "mutant.safetensors"
    num_accepted = num_accepted_there = 0
    for _ in range(count):
        path.write_bytes(mutant(data, source))
        ours, theirs = accepts(path), reference_accepts(path)
        assert theirs or not ours, path.read_bytes()
        num_accepted += ours
        num_accepted_there += theirs
    assert num_accepted_there > 0, "every mutant is broken for both: the mutation is too coarse to compare anything"
    assert num_accepted >= num_accepted_there * 0.5


def shards(folder, files, weight_map=None):
    """Files with their tensors, and an index over them."""
    for name, tensors in files.items():
        write(folder / name, {tensor: ("F32", [2]) for tensor in tensors})
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def names_in(folder):
    files = open_weight_files(folder)
    names = [name for file in files for name in file.tensors]
    for file in files:
        file.close()
    return names


def refusal_of_folder(folder, code, kind=ModelFormatError):
    with raises_code(code, kind) as caught:
        open_weight_files(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_safetensors_folder_single_file_wins_over_an_index(tmp_path):
    shards(tmp_path, {"b-2.safetensors": ["x", "y"], "a-1.safetensors": ["z"]})
    assert names_in(tmp_path) == ["z", "x", "y"]
    write(tmp_path / "model.safetensors", {"only": ("F32", [1])})
    assert names_in(tmp_path) == ["only"]


@for_each(
    "target",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "x.bin",
        ".x.safetensors",
        3,
        None,
        ["x"],
    ],
)
def test_index_that_names_other_files_is_refused_unopened(tmp_path, target):
    shards(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "evil": target})
    (tmp_path / "a.safetensors").write_bytes(b"would be refused if it were opened")
    message = refusal_of_folder(tmp_path, "weights.malformed")
    assert "'evil'" in message
    assert "model.safetensors.index.json" in message


@for_each(
    "index, code",
    [
        *((index, "weights.malformed") for index in ("{}", '{"weight_map": []}', '{"weight_map": {}}')),
        ("[]", "file.wrong_content"),
        ('{"weight_map"', "file.not_json"),
    ],
)
def test_index_without_a_map_is_refused(tmp_path, index, code):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal_of_folder(tmp_path, code)


def test_safetensors_folder_link_out_of_it_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    outside = write(tmp_path / "secret.safetensors", {"x": ("F32", [1])})
    (tmp_path / "model" / "model.safetensors").symlink_to(outside)
    assert "link that leads out of model" in refusal_of_folder(tmp_path / "model", "file.bad_link")
    (tmp_path / "model" / "model.safetensors").unlink()
    shards(tmp_path / "model", {}, {"x": "a.safetensors"})
    (tmp_path / "model" / "a.safetensors").symlink_to(outside)
    assert "a.safetensors is a link that leads out" in refusal_of_folder(tmp_path / "model", "file.bad_link")
    (tmp_path / "model" / "a.safetensors").unlink()
    (tmp_path / "model" / "a.safetensors").symlink_to("a.safetensors")
    assert "a.safetensors" in refusal_of_folder(tmp_path / "model", "file.bad_link")


@for_each(
    "put, code",
    [
        (os.mkfifo, "file.not_regular"),
        (Path.mkdir, "file.not_regular"),
        (lambda path: path.symlink_to("blob that was never downloaded"), "file.bad_link"),
        (lambda path: path.symlink_to(path.name), "file.bad_link"),
    ],
)
def test_safetensors_folder_irregular_weight_file_is_refused(tmp_path, put, code):
    for name in ("model.safetensors", "model.safetensors.index.json"):
        folder = Path(mkdtemp(dir=tmp_path))
        put(folder / name)
        assert name in refusal_of_folder(folder, code)


def test_safetensors_folder_follows_hugging_face_cache_links(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    write(tmp_path / "models--x" / "blobs" / "abc", {"x": ("F32", [1])})
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert names_in(snapshot) == ["x"]
    (snapshot / "config.json").symlink_to("../../../outside")
    with raises_code("file.bad_link", ModelFormatError):
        file_inside(snapshot, "config.json")


def test_safetensors_folder_may_be_a_symlink(tmp_path):
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "model.safetensors", {"x": ("F32", [1])})
    (tmp_path / "link").symlink_to("real")
    assert names_in(tmp_path / "link") == ["x"]


def test_safetensors_folder_missing_shards_are_named(tmp_path):
    shards(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"})
    message = refusal_of_folder(tmp_path, "weights.missing_files", ModelNotFoundError)
    assert "b.safetensors, c.safetensors" in message


def test_index_and_files_must_agree(tmp_path):
    shards(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y"]}, {"x": "b.safetensors", "y": "b.safetensors"})
    assert "disagree about the tensor 'x'" in refusal_of_folder(tmp_path, "weights.index_mismatch")
    shards(tmp_path, {"a.safetensors": ["x", "extra"]}, {"x": "a.safetensors"})
    assert "a.safetensors disagree about the tensor 'extra'" in refusal_of_folder(tmp_path, "weights.index_mismatch")


def test_safetensors_folder_tensor_in_two_files_is_refused(tmp_path):
    shards(
        tmp_path,
        {"a.safetensors": ["x", "y"], "b.safetensors": ["y", "z"]},
        {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"},
    )
    message = refusal_of_folder(tmp_path, "weights.index_mismatch")
    assert "b.safetensors disagree about the tensor 'y'" in message


def test_safetensors_folder_truncated_shard_is_named(tmp_path):
    shards(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y"]})
    data = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[:-1])
    assert "b.safetensors is cut off: 'y' needs" in refusal_of_folder(tmp_path, "weights.truncated")


def test_safetensors_folder_pickles_are_refused_unopened(tmp_path):
    (tmp_path / "pytorch_model.bin").mkdir()  # opening it would fail
    message = refusal_of_folder(tmp_path, "weights.pickle", UnsupportedModelError)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_safetensors_folder_without_weights_lists_its_contents(tmp_path):
    assert "holds no weights" in refusal_of_folder(tmp_path, "weights.none", ModelNotFoundError)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert "model-00001-of-00002.safetensors" in refusal_of_folder(tmp_path, "weights.none", ModelNotFoundError)


def source_of(tmp_path, files, renames=()):
    return SafetensorsSource(
        [SafetensorsFile(write(tmp_path / name, tensors)) for name, tensors in files.items()], renames
    )


def test_safetensors_source_entries_follow_files_and_data(tmp_path):
    source = source_of(
        tmp_path, {"2.safetensors": {"z": ("F32", [2]), "a": ("F16", [3, 1])}, "1.safetensors": {"m": ("BF16", [1])}}
    )
    assert list(source.entries) == ["z", "a", "m"]
    entry = source.entries["a"]
    assert (entry.dtype, entry.shape, entry.file, entry.num_bytes) == ("float16", (3, 1), "2.safetensors", 6)
    source.close()
    source.close()


def test_safetensors_source_unreadable_types_keep_their_name(tmp_path):
    source = source_of(
        tmp_path, {"m.safetensors": {"a": ("F8_E4M3", [4]), "b": ("F8_E5M2", [4]), "c": ("F8_E8M0", [4])}}
    )
    assert source.entries["a"].dtype == "float8_e4m3fn"
    assert source.entries["b"].dtype == "F8_E5M2"
    assert source.entries["c"].dtype == "uint8", "exponents are bytes"
    source.close()


def test_safetensors_source_old_buffers_are_ignorable(tmp_path):
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"]
    source = source_of(tmp_path, {"m.safetensors": {name: ("F32", [4]) for name in names}})
    assert source.ignorable == {names[0]}
    source.close()


def test_safetensors_source_prefix_clash_is_a_duplicate(tmp_path):
    tensors = {"decoder.a": ("F32", [1]), "lm_head.weight": ("F32", [1])}
    source = source_of(tmp_path, {"m.safetensors": tensors}, [("decoder.", "model.decoder.")])
    assert list(source.entries) == ["model.decoder.a", "lm_head.weight"]
    source.close()
    with raises_code("weights.duplicate_tensor", ModelFormatError):
        source_of(
            tmp_path,
            {"1.safetensors": {"decoder.a": ("F32", [1])}, "2.safetensors": {"model.decoder.a": ("F32", [1])}},
            [("decoder.", "model.decoder.")],
        )


TENSORS = {
    "odd": ("U8", [3]),  # puts what follows at an odd address
    "f64": ("F64", [5, 2]),
    "f32": ("F32", [7, 3]),
    "f16": ("F16", [9]),
    "bf16": ("BF16", [4, 2, 3]),
    "scalar": ("F32", []),
    "f8": ("F8_E4M3", [3, 5]),
}


def same_bytes(rows, wanted):
    import torch

    assert rows.dtype == wanted.dtype
    return torch.equal(rows.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8))


def test_safetensors_source_rows_match_the_package(tmp_path):
    from safetensors.torch import load_file

    source = source_of(tmp_path, {"m.safetensors": TENSORS})
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        whole = tensor.view(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.view(-1)
        for start in range(len(whole)):
            for end in range(start + 1, len(whole) + 1):
                assert same_bytes(read_rows(source, name, start, end), whole[start:end])
                for columns in [(0, 1), (1, 2), (1, 3), (0, 2)]:
                    if tensor.ndim > 1 and columns[1] <= tensor.shape[-1]:
                        rows = read_rows(source, name, start, end, columns)
                        assert same_bytes(rows, whole[start:end, columns[0] : columns[1]])
    source.close()


@for_each(
    "rows, columns, num_bytes",
    [
        ((0, 8), None, 96),
        ((-1, 2), None, 36),
        ((3, 2), None, 0),
        ((0, 7), (0, 4), 112),
        ((0, 7), (2, 2), 0),
        ((0, 7), None, 83),
    ],
)
def test_safetensors_source_read_outside_is_an_assertion(tmp_path, rows, columns, num_bytes):
    source = source_of(tmp_path, {"m.safetensors": TENSORS})
    with pytest.raises(AssertionError, match="f32"):
        source.read_into("f32", *rows, memoryview(bytearray(num_bytes)), columns)


@pytest.mark.parametrize("columns", [None, (1, 3)])
def test_read_together_cut_file_is_refused_by_name(tmp_path, columns):
    source = source_of(tmp_path, {"m.safetensors": TENSORS})
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 1)
    with raises_code("file.changed", ModelFormatError):
        read_rows(source, "f8", 0, 3, columns)


def reads_of(source, *wanted_reads):
    """Reads of (name, first row, last row, columns), each into memory of its own."""
    reads = []
    for name, row_start, row_end, columns in wanted_reads:
        entry = source.entries[name]
        num_columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        element_bytes = entry.num_bytes // max(1, prod(entry.shape))
        width = num_columns if columns is None else columns[1] - columns[0]
        out = memoryview(bytearray((row_end - row_start) * width * element_bytes))
        reads.append(RowRead(name, row_start, row_end, out, columns))
    return reads


def count_calls(monkeypatch):
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: calls.append(len(args[1])) or preadv(*args))
    return calls


def test_read_together_adjacent_reads_are_one_system_call(tmp_path, monkeypatch):
    more = {"next": ("F32", [2, 2]), "none": ("F32", [0, 2]), "last": ("F32", [2])}
    source = source_of(tmp_path, {"1.safetensors": TENSORS, "2.safetensors": more})
    wanted_reads = [
        *((name, 0, rows, None) for name, rows in (("odd", 3), ("f64", 5))),
        ("f32", 0, 4, None),  # all up to here lie side by side
        ("f32", 5, 7, None),
        ("f16", 0, 9, None),
        ("bf16", 0, 8, (1, 3)),
        ("scalar", 0, 1, None),
        ("f8", 1, 3, None),
        ("next", 0, 2, None),
        ("none", 0, 0, None),
        ("last", 0, 2, None),
    ]
    reads = reads_of(source, *wanted_reads)
    calls = count_calls(monkeypatch)
    source.read_together(reads)
    assert [count for count in calls if count < 10] == [3, 2, 1, 1, 3]
    alone = reads_of(source, *wanted_reads)
    for read in alone:
        source.read_into(*read)
    assert [bytes(read.out) for read in reads] == [bytes(read.out) for read in alone]
    source.read_together([])
    source.close()


def test_read_together_reads_each_file_at_its_own_offsets(tmp_path):
    """Where the tensor of one file ends, that of the other begins: a place in a file says nothing of the file."""
    source = source_of(tmp_path, {"1.safetensors": {"a": ("U8", [6]), "b": ("U8", [6])}})
    source.close()
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    data = first.read_bytes()
    second.write_bytes(data[:-12].replace(b'"a"', b'"c"').replace(b'"b"', b'"d"') + bytes(range(100, 112)))
    source = SafetensorsSource([SafetensorsFile(first), SafetensorsFile(second)])
    reads = reads_of(source, ("a", 0, 6, None), ("d", 0, 6, None), ("c", 0, 6, None), ("b", 0, 6, None))
    source.read_together(reads)
    assert [bytes(read.out) for read in reads] == [
        *(bytes(range(6)), bytes(range(106, 112))),
        *(bytes(range(100, 106)), bytes(range(6, 12))),
    ]
    source.close()


def test_safetensors_source_keeps_recently_read_files_open(tmp_path, monkeypatch):
    """As many as may be; the one that was read longest ago goes, not the one that was opened first."""
    names = [f"{index}.safetensors" for index in range(MAX_OPEN_FILES + 1)]
    source = source_of(tmp_path, {name: {f"t{name[0]}": ("F32", [2])} for name in names})
    opened: list[str] = []
    really_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(Path(path).name) or really_open(path, *rest))
    for number in [*range(MAX_OPEN_FILES), *range(MAX_OPEN_FILES), 0]:
        read_rows(source, f"t{number}", 0, 2)
    assert opened == names[:-1]
    for number in (MAX_OPEN_FILES, 0, 1):
        read_rows(source, f"t{number}", 0, 2)
    assert opened == [*names, names[1]]
    source.close()


def test_read_together_above_max_runs_takes_several_calls(tmp_path, monkeypatch):
    count = 2 * MAX_RUNS + 5
    source = source_of(tmp_path, {"m.safetensors": {f"t{index:05}": ("U8", [3]) for index in range(count)}})
    reads = reads_of(source, *((name, 0, 3, None) for name in source.entries))
    calls = count_calls(monkeypatch)
    source.read_together(reads)
    assert calls == [MAX_RUNS, MAX_RUNS, 5]
    data = (tmp_path / "m.safetensors").read_bytes()
    assert b"".join(bytes(read.out) for read in reads) == data[-3 * count :]


def test_read_together_error_names_the_tensor(tmp_path, monkeypatch):
    source = source_of(tmp_path, {"m.safetensors": TENSORS})
    (good, bad) = reads_of(source, ("f64", 0, 5, None), ("f32", 0, 7, None))
    with pytest.raises(AssertionError, match="f32"):
        source.read_together([good, bad._replace(row_end=8)])
    with pytest.raises(AssertionError, match="f32"):
        source.read_together([good, bad._replace(row_start=-1, row_end=6)])

    def fail(descriptor, buffers, offset):
        raise OSError(5, "the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with raises_code("file.unreadable", ModelFormatError):
            source.read_together([good, bad])
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 1)
    with raises_code("file.changed", ModelFormatError):
        source.read_together([good, bad])


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_safetensors_source_opens_few_files_at_a_time(tmp_path):
    files = {f"{index:03}.safetensors": {f"t{index}": ("F32", [2])} for index in range(50)}
    source = source_of(tmp_path, files)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(50):
        read_rows(source, f"t{index}", 0, 2)
        assert len(os.listdir("/proc/self/fd")) <= before + MAX_OPEN_FILES
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_safetensors_source_many_files_are_thread_safe(tmp_path):
    """Files are closed for others while some are being read: a number that is used again must not be mistaken."""
    files = {f"{index:03}.safetensors": {f"t{index}": ("F32", [40, 50 + index])} for index in range(20)}
    source = source_of(tmp_path, files)
    gc.collect()  # errors of earlier tests hold open files
    before = len(os.listdir("/proc/self/fd"))
    wanted = {name: read_rows(source, name, 0, 40) for name in source.entries}

    def read(number):
        name = f"t{number * 7 % 20}"
        start = number % 30
        columns = (number % 10, 40 + number % 10) if number % 3 else None
        rows = wanted[name][start : start + 10]
        rows = rows if columns is None else rows[:, columns[0] : columns[1]]
        return same_bytes(read_rows(source, name, start, start + 10, columns), rows)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(2000)))
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before

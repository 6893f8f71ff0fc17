import os
import sys
from concurrent.futures import ThreadPoolExecutor
from math import prod

import pytest
from holdfast.loading.sources.read_rows import read_rows

from holdfast.errors import ModelFormatError
from holdfast.loading.sources.files import MAX_RUNS
from holdfast.loading.sources.safetensors import MAX_OPEN_FILES, SafetensorsFile, SafetensorsSource
from holdfast.loading.sources.source import RowRead
from loading.safetensors_bytes import write


def source_of(tmp_path, files, renames=()):
    return SafetensorsSource(
        [SafetensorsFile(write(tmp_path / name, tensors)) for name, tensors in files.items()], renames
    )


def test_entries_are_in_the_order_of_files_and_data(tmp_path):
    source = source_of(
        tmp_path, {"2.safetensors": {"z": ("F32", [2]), "a": ("F16", [3, 1])}, "1.safetensors": {"m": ("BF16", [1])}}
    )
    assert list(source.entries) == ["z", "a", "m"]
    entry = source.entries["a"]
    assert (entry.dtype, entry.shape, entry.file, entry.num_bytes) == ("float16", (3, 1), "2.safetensors", 6)
    source.close()
    source.close()


def test_types_that_torch_does_not_read_keep_their_name_for_messages(tmp_path):
    source = source_of(
        tmp_path, {"m.safetensors": {"a": ("F8_E4M3", [4]), "b": ("F8_E5M2", [4]), "c": ("F8_E8M0", [4])}}
    )
    assert source.entries["a"].dtype == "float8_e4m3fn"
    assert source.entries["b"].dtype == "F8_E5M2"
    assert source.entries["c"].dtype == "uint8", "exponents are bytes"
    source.close()


def test_buffers_of_older_checkpoints_may_stay_unused(tmp_path):
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"]
    source = source_of(tmp_path, {"m.safetensors": {name: ("F32", [4]) for name in names}})
    assert source.ignorable == {names[0]}
    source.close()


def test_prefixes_are_renamed_and_a_clash_is_a_duplicate(tmp_path):
    tensors = {"decoder.a": ("F32", [1]), "lm_head.weight": ("F32", [1])}
    source = source_of(tmp_path, {"m.safetensors": tensors}, [("decoder.", "model.decoder.")])
    assert list(source.entries) == ["model.decoder.a", "lm_head.weight"]
    source.close()
    with pytest.raises(
        ModelFormatError, match=r"'model\.decoder\.a' is in 2\.safetensors; it is in 1\.safetensors too"
    ):
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


def test_rows_are_those_that_the_safetensors_package_reads(tmp_path):
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


@pytest.mark.parametrize(
    ("rows", "columns", "num_bytes"),
    [
        ((0, 8), None, 96),
        ((-1, 2), None, 36),
        ((3, 2), None, 0),
        ((0, 7), (0, 4), 112),
        ((0, 7), (2, 2), 0),
        ((0, 7), None, 83),
    ],
)
def test_reads_outside_the_tensor_are_our_own_mistake(tmp_path, rows, columns, num_bytes):
    source = source_of(tmp_path, {"m.safetensors": TENSORS})
    with pytest.raises(AssertionError, match="f32"):
        source.read_into("f32", *rows, memoryview(bytearray(num_bytes)), columns)


@pytest.mark.parametrize("columns", [None, (1, 3)])
def test_a_file_that_was_cut_is_told_with_its_name_and_the_tensor(tmp_path, columns):
    source = source_of(tmp_path, {"m.safetensors": TENSORS})
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 1)
    with pytest.raises(ModelFormatError, match=r"m\.safetensors was changed before 'f8' was read"):
        read_rows(source, "f8", 0, 3, columns)


def reads_of(source, *asked):
    """Reads of (name, first row, last row, columns), each into memory of its own."""
    reads = []
    for name, row_start, row_end, columns in asked:
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


def test_reads_that_lie_side_by_side_are_one_call_of_the_system(tmp_path, monkeypatch):
    more = {"next": ("F32", [2, 2]), "none": ("F32", [0, 2]), "last": ("F32", [2])}
    source = source_of(tmp_path, {"1.safetensors": TENSORS, "2.safetensors": more})
    asked = [
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
    reads = reads_of(source, *asked)
    calls = count_calls(monkeypatch)
    source.read_together(reads)
    assert [count for count in calls if count < 10] == [3, 2, 1, 1, 3]
    alone = reads_of(source, *asked)
    for read in alone:
        source.read_into(*read)
    assert [bytes(read.out) for read in reads] == [bytes(read.out) for read in alone]
    source.read_together([])
    source.close()


def test_more_side_by_side_than_a_system_takes_are_several_calls(tmp_path, monkeypatch):
    count = 2 * MAX_RUNS + 5
    source = source_of(tmp_path, {"m.safetensors": {f"t{index:05}": ("U8", [3]) for index in range(count)}})
    reads = reads_of(source, *((name, 0, 3, None) for name in source.entries))
    calls = count_calls(monkeypatch)
    source.read_together(reads)
    assert calls == [MAX_RUNS, MAX_RUNS, 5]
    data = (tmp_path / "m.safetensors").read_bytes()
    assert b"".join(bytes(read.out) for read in reads) == data[-3 * count :]


def test_what_goes_wrong_together_is_told_with_the_tensor(tmp_path, monkeypatch):
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
        with pytest.raises(ModelFormatError, match=r"m\.safetensors: 'f64' cannot be read; the disk is gone"):
            source.read_together([good, bad])
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 1)
    with pytest.raises(ModelFormatError, match=r"m\.safetensors was changed before 'f64' was read"):
        source.read_together([good, bad])


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_few_files_are_open_at_a_time(tmp_path):
    files = {f"{index:03}.safetensors": {f"t{index}": ("F32", [2])} for index in range(50)}
    source = source_of(tmp_path, files)
    before = len(os.listdir("/proc/self/fd"))
    for index in range(50):
        read_rows(source, f"t{index}", 0, 2)
        assert len(os.listdir("/proc/self/fd")) <= before + MAX_OPEN_FILES
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_threads_in_many_files_get_their_own_bytes(tmp_path):
    """Files are closed for others while some are being read: a number that is used again must not be mistaken."""
    files = {f"{index:03}.safetensors": {f"t{index}": ("F32", [40, 50 + index])} for index in range(20)}
    source = source_of(tmp_path, files)
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

import os
import struct

import pytest

from holdfast.errors import ModelFormatError
from holdfast.loading.gguf.file import GGUFData, read_floats, read_gguf

VALUES = [0.5, -2.0, 3.25, 8.0]


@pytest.fixture
def file(tmp_path):
    """One F32 tensor, by hand."""
    path = tmp_path / "model.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    header += struct.pack("<Q4sIQIQ", 4, b"four", 1, len(VALUES), 0, 0)
    path.write_bytes(header + bytes(-len(header) % 32) + struct.pack("<4f", *VALUES))
    return read_gguf(path)


def test_floats(file):
    assert read_floats(file, file.tensors["four"]) == VALUES


def test_a_range_is_read_and_nothing_beside_it(file):
    data = GGUFData(file)
    buffer = bytearray(b"\xaa" * 12)
    data.read_into(file.tensors["four"], 4, memoryview(buffer)[2:10])
    assert buffer == b"\xaa\xaa" + struct.pack("<2f", *VALUES[1:3]) + b"\xaa\xaa"
    data.close()
    data.close()


def test_file_is_closed_and_can_be_read_again(file):
    data = GGUFData(file)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(3):
        buffer = bytearray(16)
        data.read_into(file.tensors["four"], 0, memoryview(buffer))
        assert struct.unpack("<4f", buffer) == tuple(VALUES)
        data.close()
        assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_reads_outside_the_tensor_are_our_own_mistake(file):
    with pytest.raises(AssertionError, match="four"):
        GGUFData(file).read_into(file.tensors["four"], 4, memoryview(bytearray(16)))


@pytest.mark.parametrize("change", ["shorter", "longer", "touched", "gone"])
def test_changed_file_is_refused(file, change):
    if change == "shorter":
        os.truncate(file.path, file.file_bytes - 4)
    elif change == "longer":
        file.path.write_bytes(file.path.read_bytes() + b"\0")
    elif change == "touched":
        os.utime(file.path, ns=(1, 1))
    else:
        file.path.unlink()
    with pytest.raises(ModelFormatError, match=r"model\.gguf"):
        read_floats(file, file.tensors["four"])


def test_file_cut_while_it_is_read(file):
    data = GGUFData(file)
    data.read_into(file.tensors["four"], 0, memoryview(bytearray(4)))
    os.truncate(file.path, file.file_bytes - 8)
    with pytest.raises(ModelFormatError, match="changed after its header was read"):
        data.read_into(file.tensors["four"], 0, memoryview(bytearray(16)))
    data.close()

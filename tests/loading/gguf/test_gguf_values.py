import struct
from array import array

import numpy as np
import pytest

from holdfast.loading.gguf.file import read_gguf

gguf = pytest.importorskip("gguf")

LIMITS = {
    "uint8": (0, 255),
    "int8": (-128, 127),
    "uint16": (0, 2**16 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint32": (0, 2**32 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint64": (0, 2**64 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float32": (-0.0, 3.4028234663852886e38),
    "float64": (5e-324, -1.7976931348623157e308),
}
TEXTS = ["", "a", "Ġthe", "日本", "🙂", "x" * 3000]


def write(path, fill) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def everything(tmp_path):
    """A file with every type of value, alone and in arrays, written by the gguf package."""
    path = tmp_path / "values.gguf"

    def fill(writer) -> None:
        for name, limits in LIMITS.items():
            for index, value in enumerate(limits):
                getattr(writer, f"add_{name}")(f"{name}.{index}", value)
            writer.add_key_value(
                f"{name}.array",
                list(limits),
                gguf.GGUFValueType.ARRAY,
                sub_type=getattr(gguf.GGUFValueType, name.upper()),
            )
        writer.add_bool("bool.0", False)
        writer.add_bool("bool.1", True)
        writer.add_array("bool.array", [True, False, True])
        for index, text in enumerate(TEXTS):
            writer.add_string(f"string.{index}", text)
        writer.add_array("string.array", TEXTS[1:])
        writer.add_array("int.array", list(range(-1000, 1000)))
        writer.add_tensor("one", np.arange(5, dtype=np.float32))
        writer.add_tensor("two", np.arange(6, dtype=np.float16).reshape(2, 3))
        writer.add_tensor("three", gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q5_1),
                          raw_dtype=gguf.GGMLQuantizationType.Q5_1)  # fmt: skip
        writer.add_tensor("four", np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4))

    write(path, fill)
    return path


def test_every_value_reads_as_the_gguf_package_reads_it(everything):
    file = read_gguf(everything)
    fields = {name: field for name, field in gguf.GGUFReader(everything).fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for name, field in fields.items():
        ours, theirs = file.metadata[name], field.contents()
        ours = list(ours) if isinstance(ours, array) else ours
        assert ours == theirs, name
        if isinstance(theirs, list):
            assert all(a == b for a, b in zip(ours, theirs, strict=True)), name
        else:
            assert type(ours) is type(theirs), name
    assert struct.pack("<f", file.metadata["float32.0"]) == struct.pack("<f", -0.0)


def test_every_tensor_lies_where_the_gguf_package_finds_it(everything):
    file = read_gguf(everything)
    theirs = {found.name: found for found in gguf.GGUFReader(everything).tensors}
    assert list(file.tensors) == list(theirs)
    for name, found in theirs.items():
        ours = file.tensors[name]
        assert ours.type.name == found.tensor_type.name
        assert ours.shape == tuple(reversed(found.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (found.data_offset, found.n_bytes)


def test_arrays_are_compact(everything):
    metadata = read_gguf(everything).metadata
    assert metadata["int8.array"].itemsize == metadata["bool.array"].itemsize == 1
    assert metadata["float64.array"].itemsize == 8

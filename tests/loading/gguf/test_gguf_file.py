"""GGUF files: read as the `gguf` package reads them; broken and hostile headers are refused; data by positional reads."""

import os
import random
import struct
import tracemalloc
from array import array
from pathlib import Path

import numpy as np
import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.gguf.file import MAX_ENTRIES, OTHER_TYPES, TYPES, GGUFData, GGUFFile, read_floats, read_gguf

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


def test_read_gguf_metadata_matches_gguf_package(everything):
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


def test_read_gguf_tensor_places_match_gguf_package(everything):
    file = read_gguf(everything)
    theirs = {found.name: found for found in gguf.GGUFReader(everything).tensors}
    assert list(file.tensors) == list(theirs)
    for name, found in theirs.items():
        ours = file.tensors[name]
        assert ours.type.name == found.tensor_type.name
        assert ours.shape == tuple(reversed(found.shape.tolist()))
        assert (ours.offset, ours.num_bytes) == (found.data_offset, found.n_bytes)


def test_read_gguf_arrays_are_compact(everything):
    metadata = read_gguf(everything).metadata
    assert metadata["int8.array"].itemsize == metadata["bool.array"].itemsize == 1
    assert metadata["float64.array"].itemsize == 8


U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
Q8_0 = 8


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key(name: bytes, value_type: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", value_type) + value


def strings(*items: bytes) -> bytes:
    return struct.pack("<IQ", STRING, len(items)) + b"".join(map(string, items))


def tensor(name: bytes, dims: tuple[int, ...], ggml_type: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)


ARCHITECTURE = key(b"general.architecture", STRING, string(b"llama"))
TOKENS = key(b"tokenizer.ggml.tokens", ARRAY, strings(b"a", b"\xff\xfe", "é".encode(), b""))
FLAGS = key(b"flags", ARRAY, struct.pack("<IQ3B", BOOL, 3, 1, 0, 1))
SCORES = key(b"scores", ARRAY, struct.pack("<IQ3f", F32, 3, 0.5, -1.0, 2.0))
KEYS = (ARCHITECTURE, TOKENS, FLAGS, SCORES, key(b"eps", F32, struct.pack("<f", 0.25)), key(b"on", BOOL, b"\1"))
NORM = tensor(b"norm", (8,), 0, 0)
EMBED = tensor(b"embed", (32, 3), Q8_0, 32)
DATA = bytes(range(32)) + bytes(102)


def build(
    keys: tuple[bytes, ...] = KEYS,
    tensors: tuple[bytes, ...] = (NORM, EMBED),
    data: bytes = DATA,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_keys = len(keys) if num_keys is None else num_keys
    header = magic + version + struct.pack("<QQ", num_tensors, num_keys) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


def parse(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def check_sound(file: GGUFFile) -> None:
    """What every accepted header promises to its readers."""
    end = file.data_start
    for stored in sorted(file.tensors.values(), key=lambda stored: stored.offset):
        assert stored.offset >= end
        assert stored.offset % file.alignment == file.data_start % file.alignment == 0
        assert stored.num_bytes > 0
        end = stored.offset + stored.num_bytes
    assert end <= file.file_bytes or not file.tensors


@pytest.mark.parametrize("version", [2, 3])
def test_header_is_read(tmp_path, version):
    file = parse(tmp_path, build(version=struct.pack("<I", version)))
    assert file.version == version
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["eps"] == 0.25
    assert file.metadata["on"] is True
    assert list(file.metadata["flags"]) == [True, False, True]
    assert list(file.metadata["scores"]) == [0.5, -1.0, 2.0]
    assert file.tensors["norm"].shape == (8,)
    assert file.tensors["embed"].shape == (3, 32)
    assert file.tensors["embed"].offset == file.data_start + 32
    assert file.tensors["embed"].num_bytes == 102
    check_sound(file)


def test_read_gguf_tokens_not_utf8_keep_their_bytes(tmp_path):
    tokens = parse(tmp_path, build()).metadata["tokenizer.ggml.tokens"]
    assert [token.encode("utf-8", "surrogateescape") for token in tokens] == [b"a", b"\xff\xfe", "é".encode(), b""]


@for_each("alignment", [1, 8, 64, 4096])
def test_read_gguf_uses_the_alignment_of_the_file(tmp_path, alignment):
    keys = (*KEYS, key(b"general.alignment", U32, struct.pack("<I", alignment)))
    tensors = (NORM, tensor(b"embed", (32, 3), Q8_0, max(32, alignment)))
    file = parse(tmp_path, build(keys, tensors, bytes(max(32, alignment) + 102), alignment=alignment))
    assert file.alignment == alignment
    check_sound(file)


def test_read_gguf_without_tensors_is_read(tmp_path):
    assert parse(tmp_path, build(tensors=(), data=b"")).tensors == {}


def test_gguf_types_agree_with_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    ours = {number: (known.block_elements, known.block_bytes) for number, known in TYPES.items()}
    assert ours == {number: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] for number in TYPES}
    for number, name in (*((number, known.name) for number, known in TYPES.items()), *OTHER_TYPES.items()):
        if number in set(gguf.GGMLQuantizationType):
            assert gguf.GGMLQuantizationType(number).name == name


def with_key(*keys: bytes) -> bytes:
    return build((*KEYS, *keys))


def with_tensor(*tensors: bytes) -> bytes:
    return build(tensors=(NORM, *tensors))


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "gguf.truncated"),
    "other magic": (build(magic=b"ggjt"), "gguf.not_gguf"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "gguf.not_gguf"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "file.lfs_pointer"),
    "version 0": (build(version=struct.pack("<I", 0)), "gguf.unsupported_version"),
    "version 1": (build(version=struct.pack("<I", 1)), "gguf.unsupported_version"),
    "version 4": (build(version=struct.pack("<I", 4)), "gguf.unsupported_version"),
    "big endian": (build(version=struct.pack(">I", 3)), "gguf.unsupported_version"),
    "key count 2**64-1": (build(num_keys=2**64 - 1), "gguf.malformed"),
    "key count one too many": (build(num_keys=len(KEYS) + 1, tensors=(), data=b""), "gguf.malformed"),
    "key count over the limit": (build(num_keys=MAX_ENTRIES + 1, data=bytes(16 * MAX_ENTRIES)), "gguf.malformed"),
    "tensor count 2**63": (build(num_tensors=2**63), "gguf.malformed"),
    "tensor count wraps in bytes": (build(num_tensors=2**64 // 33 + 1), "gguf.malformed"),
    "key length 2**63": (build((struct.pack("<Q", 2**63) + b"x" * 20,)), "gguf.malformed"),
    "key of no characters": (with_key(key(b"", U8, b"\0")), "gguf.malformed"),
    "key of 64 KiB": (with_key(key(b"k" * 2**16, U8, b"\0")), "gguf.malformed"),
    "key not UTF-8": (with_key(key(b"\xc3\x28", U8, b"\0")), "gguf.malformed"),
    "key twice": (with_key(ARCHITECTURE), "gguf.malformed"),
    "value type 13": (with_key(key(b"odd", 13, bytes(8))), "gguf.malformed"),
    "value type 2**32-1": (with_key(key(b"odd", 2**32 - 1, bytes(8))), "gguf.malformed"),
    "string length 2**63": (with_key(key(b"name", STRING, struct.pack("<Q", 2**63))), "gguf.truncated"),
    "string length 2**64-1": (with_key(key(b"name", STRING, struct.pack("<Q", 2**64 - 1))), "gguf.truncated"),
    "string past the end": (with_key(key(b"name", STRING, struct.pack("<Q", 10**6))), "gguf.truncated"),
    "string not UTF-8": (with_key(key(b"name", STRING, string(b"\xed\xa0\x80"))), "gguf.malformed"),
    "bool 2": (with_key(key(b"flag", BOOL, b"\2")), "gguf.malformed"),
    "array of bool 7": (with_key(key(b"flag", ARRAY, struct.pack("<IQB", BOOL, 1, 7))), "gguf.malformed"),
    "array of arrays": (with_key(key(b"nest", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))), "gguf.malformed"),
    "array type 99": (with_key(key(b"odd", ARRAY, struct.pack("<IQ", 99, 0))), "gguf.malformed"),
    "array length 2**61": (with_key(key(b"long", ARRAY, struct.pack("<IQ", U64, 2**61))), "gguf.malformed"),
    "array length 2**64-1": (with_key(key(b"long", ARRAY, struct.pack("<IQ", U8, 2**64 - 1))), "gguf.malformed"),
    "string array length 2**61": (with_key(key(b"long", ARRAY, struct.pack("<IQ", STRING, 2**61))), "gguf.malformed"),
    "string in an array past the end": (
        with_key(key(b"long", ARRAY, struct.pack("<IQQ", STRING, 1, 2**62))),
        "gguf.truncated",
    ),
    "alignment 0": (with_key(key(b"general.alignment", U32, struct.pack("<I", 0))), "gguf.malformed"),
    "alignment 48": (with_key(key(b"general.alignment", U32, struct.pack("<I", 48))), "gguf.malformed"),
    "alignment 2**31": (with_key(key(b"general.alignment", U32, struct.pack("<I", 2**31))), "gguf.malformed"),
    "alignment negative": (with_key(key(b"general.alignment", I32, struct.pack("<i", -32))), "gguf.malformed"),
    "alignment as text": (with_key(key(b"general.alignment", STRING, string(b"32"))), "gguf.malformed"),
    "alignment as a bool": (with_key(key(b"general.alignment", BOOL, b"\1")), "gguf.malformed"),
    "tensor name empty": (with_tensor(tensor(b"", (8,), 0, 32)), "gguf.malformed"),
    "tensor name not UTF-8": (with_tensor(tensor(b"\x80", (8,), 0, 32)), "gguf.malformed"),
    "tensor name length 2**63": (with_tensor(struct.pack("<Q", 2**63)), "gguf.malformed"),
    "tensor twice": (with_tensor(tensor(b"norm", (8,), 0, 32)), "gguf.malformed"),
    "no dimensions": (with_tensor(tensor(b"odd", (), 0, 32)), "gguf.malformed"),
    "5 dimensions": (with_tensor(tensor(b"odd", (1, 1, 1, 1, 1), 0, 32)), "gguf.malformed"),
    "2**32-1 dimensions": (with_tensor(string(b"odd") + struct.pack("<I", 2**32 - 1)), "gguf.malformed"),
    "zero dimension": (with_tensor(tensor(b"odd", (8, 0), 0, 32)), "gguf.malformed"),
    "dimensions whose product wraps to 1": (
        with_tensor(tensor(b"odd", (2**63 + 1, 2**63 + 1), 0, 32)),
        "gguf.truncated",
    ),
    "dimensions whose product wraps to 0": (with_tensor(tensor(b"odd", (2**32, 2**32), 0, 32)), "gguf.truncated"),
    "row of half a block": (with_tensor(tensor(b"odd", (48, 1), Q8_0, 32)), "gguf.malformed"),
    "offset 2**64-32": (with_tensor(tensor(b"odd", (8,), 0, 2**64 - 32)), "gguf.truncated"),
    "offset past the end": (with_tensor(tensor(b"odd", (8,), 0, 2**20)), "gguf.truncated"),
    "one element too many": (with_tensor(tensor(b"odd", (26,), 0, 32)), "gguf.truncated"),
    "offset out of line": (with_tensor(tensor(b"odd", (8,), 0, 40)), "gguf.malformed"),
    "two tensors at one place": (with_tensor(tensor(b"odd", (8,), 0, 0)), "gguf.overlap"),
    "overlap by one block": (
        build(tensors=(tensor(b"a", (32, 2), Q8_0, 0), tensor(b"b", (8,), 0, 64))),
        "gguf.overlap",
    ),
}


@for_each("case", BROKEN)
def test_read_gguf_broken_file_is_refused_by_name(tmp_path, case):
    content, code = BROKEN[case]
    with raises_code(code, ModelFormatError) as caught:
        parse(tmp_path, content)
    message = str(caught.value)
    assert "model.gguf" in message
    assert "\n" not in message
    assert len(message) < 500


@for_each("number", [4, 5, 9, 15, 19, 28, 29, 33, 34, 35, 41, 42, 77, 2**32 - 1])
def test_read_gguf_unknown_type_is_refused(tmp_path, number):
    with raises_code("gguf.unsupported_type", UnsupportedModelError):
        parse(tmp_path, with_tensor(tensor(b"odd", (256,), number, 32)))


def test_read_gguf_truncated_at_any_byte_is_refused(tmp_path):
    content = build()
    parse(tmp_path, content)
    for num_bytes in range(len(content)):
        with pytest.raises(ModelFormatError):
            parse(tmp_path, content[:num_bytes])


def test_read_gguf_oversized_string_is_refused_unread(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(with_key(key(b"name", STRING, struct.pack("<Q", 2**32))))
    with open(path, "r+b") as file:
        file.truncate(2**33)
    tracemalloc.start()
    try:
        with raises_code("gguf.truncated", ModelFormatError):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_header_longer_than_the_first_read(tmp_path):
    tokens = [b"token%d" % index for index in range(120_000)]
    keys = (ARCHITECTURE, key(b"tokenizer.ggml.tokens", ARRAY, strings(*tokens)), FLAGS)
    file = parse(tmp_path, build(keys))
    assert file.metadata["tokenizer.ggml.tokens"] == [token.decode() for token in tokens]
    assert file.data_start > 1.5 * 2**20
    check_sound(file)


WORST_VALUES = {
    "bools": struct.pack("<IQ", BOOL, 2**18) + bytes(2**18),
    "negative bytes": struct.pack("<IQ", I8, 2**18) + b"\x80" * 2**18,
    "doubles": struct.pack("<IQ", F64, 2**15) + b"\x3f" * 2**18,
    "empty strings": strings(*[b""] * 2**14),
    "short strings": strings(*[b"\xc3\xa9x"] * 2**14),
}


@for_each("case", WORST_VALUES)
def test_memory_is_a_few_times_the_file(tmp_path, case):
    content = build((ARCHITECTURE, key(b"values", ARRAY, WORST_VALUES[case])))
    tracemalloc.start()
    try:
        parse(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < 9 * len(content)
    finally:
        tracemalloc.stop()


def test_read_gguf_missing_path_or_folder_is_refused(tmp_path):
    with raises_code("gguf.not_found", ModelNotFoundError):
        read_gguf(tmp_path / "none.gguf")
    with raises_code("gguf.not_found", ModelNotFoundError):
        read_gguf(tmp_path / "nul\0byte")
    with raises_code("file.not_regular", ModelFormatError):
        read_gguf(tmp_path)
    assert not list(tmp_path.iterdir())


def mutants(content: bytes, count: int, seed: int):
    """Copies with one to three places overwritten: single bytes, and integers at their limits."""
    choose = random.Random(seed)
    for _ in range(count):
        mutant = bytearray(content)
        for _ in range(choose.randint(1, 3)):
            width = choose.choice((1, 1, 1, 4, 8))
            place = choose.randrange(len(content) - width)
            limits = (0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), choose.randrange(2 ** (8 * width)))
            mutant[place : place + width] = choose.choice(limits).to_bytes(width, "little")
        yield bytes(mutant)


def read_or_refuse(folder, mutant: bytes) -> tuple[bool, int]:
    """Whether it was read, and the bytes that took at their peak, those of other threads of this process included."""
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        check_sound(parse(folder, mutant + DATA))
        is_read = True
    except (ModelFormatError, UnsupportedModelError) as error:
        assert "model.gguf" in str(error)  # noqa: PT017 - most mutants fail, some do not
        is_read = False
    return is_read, tracemalloc.get_traced_memory()[1] - before


@pytest.mark.parametrize(("seed", "count"), [(0, 300), pytest.param(1, 2000, marks=pytest.mark.slow)])
def test_read_gguf_mutants_are_refused_or_bounded_in_memory(tmp_path, seed, count):
    content = build()
    most_bytes, num_accepted = 8 * len(content) + 2**15, 0
    tracemalloc.start()
    try:
        for mutant in mutants(content[: len(content) - len(DATA)], count, seed):
            is_read, peak_bytes = read_or_refuse(tmp_path, mutant)
            if peak_bytes >= most_bytes:  # what another thread took it does not take again
                peak_bytes = min(read_or_refuse(tmp_path, mutant)[1] for _ in range(3))
            assert peak_bytes < most_bytes
            num_accepted += is_read
    finally:
        tracemalloc.stop()
    assert 0 < num_accepted < count


VALUES = [0.5, -2.0, 3.25, 8.0]


@pytest.fixture
def file(tmp_path):
    """One F32 tensor, by hand."""
    path = tmp_path / "model.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    header += struct.pack("<Q4sIQIQ", 4, b"four", 1, len(VALUES), 0, 0)
    path.write_bytes(header + bytes(-len(header) % 32) + struct.pack("<4f", *VALUES))
    return read_gguf(path)


def test_gguf_data_reads_floats(file):
    assert read_floats(file, file.tensors["four"]) == VALUES


def test_gguf_data_reads_only_the_requested_range(file):
    data = GGUFData(file)
    buffer = bytearray(b"\xaa" * 12)
    data.read_into(file.tensors["four"], 4, memoryview(buffer)[2:10])
    assert buffer == b"\xaa\xaa" + struct.pack("<2f", *VALUES[1:3]) + b"\xaa\xaa"
    data.close()
    data.close()


def test_gguf_data_reads_again_after_close(file):
    data = GGUFData(file)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(3):
        buffer = bytearray(16)
        data.read_into(file.tensors["four"], 0, memoryview(buffer))
        assert struct.unpack("<4f", buffer) == tuple(VALUES)
        data.close()
        assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_gguf_data_read_outside_the_tensor_is_an_assertion(file):
    with pytest.raises(AssertionError, match="four"):
        GGUFData(file).read_into(file.tensors["four"], 4, memoryview(bytearray(16)))


@for_each("change", ["shorter", "longer", "touched", "gone"])
def test_gguf_data_changed_file_is_refused(file, change):
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


def test_gguf_data_file_cut_while_reading_is_refused(file):
    data = GGUFData(file)
    data.read_into(file.tensors["four"], 0, memoryview(bytearray(4)))
    os.truncate(file.path, file.file_bytes - 8)
    with raises_code("file.changed", ModelFormatError):
        data.read_into(file.tensors["four"], 0, memoryview(bytearray(16)))
    data.close()

"""Headers of GGUF files as written: read by the `gguf` package and by our reader; metadata of another file unchanged."""

from array import array
from pathlib import Path
from typing import Any

import gguf

from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.model_files import find_default_model
from holdfast.loading.writing.gguf_header import (
    DROPPED_KEYS,
    PlacedTensor,
    encode_value,
    header_bytes,
    stored_metadata,
)

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "a.text": "é 中 \x00",
    "a.count": 4_000_000_000,
    "a.number": 1e-5,
    "a.yes": True,
    "a.no": False,
    "a.texts": ["", "x", "Ġé"],
    "a.nothing": [],
    "a.flags": [True, False, True],
    "a.kinds": array("i", [1, -2, 3]),
    "a.scores": array("f", [0.0, -1.5]),
}
TENSORS = (PlacedTensor("one", (3, 64), 8, 0), PlacedTensor("two", (2, 5, 32), 0, 224))


def write_header(path: Path) -> Path:
    header = header_bytes({key: encode_value(value) for key, value in VALUES.items()}, TENSORS)
    assert len(header) % 32 == 0
    path.write_bytes(header + bytes(224 + 4 * 320))
    return path


def test_header_bytes_are_read_by_both_readers(tmp_path):
    path = write_header(tmp_path / "a.gguf")
    theirs = gguf.GGUFReader(path)
    for key, value in VALUES.items():
        expected = list(value) if isinstance(value, array) else value
        found = theirs.fields[key].contents()
        assert abs(found - value) < 1e-9 if isinstance(value, float) else found == expected, key
    assert [(tensor.name, tensor.shape.tolist()) for tensor in theirs.tensors] == [
        ("one", [64, 3]),
        ("two", [32, 5, 2]),
    ]
    ours = read_gguf(path)
    for key, value in VALUES.items():
        found = ours.metadata[key]
        if isinstance(value, float):
            assert isinstance(found, float)
            assert abs(found - value) < 1e-9
        else:
            assert (found.tolist() if isinstance(found, array) else found) == (
                list(map(int, value)) if key == "a.flags" else value.tolist() if isinstance(value, array) else value
            ), key
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {"one": (3, 64), "two": (2, 5, 32)}


def test_stored_metadata_of_a_file_is_written_unchanged(tmp_path):
    source = find_default_model()
    path = tmp_path / "copy.gguf"
    kept = stored_metadata(source)
    path.write_bytes(header_bytes(kept, ()))
    ours, theirs = read_gguf(path).metadata, read_gguf(source).metadata
    assert ours == {key: value for key, value in theirs.items() if key not in DROPPED_KEYS}
    assert list(ours) == [key for key in theirs if key not in DROPPED_KEYS]
    assert len(ours) == len(theirs) - 2


def test_encode_value_keeps_bytes_that_are_no_utf8():
    raw = b"\xff\xc3"
    assert encode_value([raw.decode("utf-8", "surrogateescape")]).endswith(raw)


def test_encode_value_empty_list_holds_strings():
    # llama.cpp refuses a tokenizer whose merges are of another type.
    assert encode_value([]) == encode_value(["x"])[:8] + bytes(8)

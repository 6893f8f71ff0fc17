import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.errors import ModelFormatError
from holdfast.loading.gguf.file import GGUFFile
from holdfast.loading.quantized.manifest import DIGEST_BYTES, digest, header_digest, identify_source
from holdfast.loading.sources.dummy import DummySource
from loading.saved_weights import FILES, open_written, write_model


def test_a_model_may_be_moved(tmp_path):
    model = write_model(tmp_path / "here")
    then = identify_source(model)
    assert then is not None
    assert [file.name for file in then.files] == sorted(FILES)
    assert then.num_bytes == sum((tmp_path / "here" / name).stat().st_size for name in FILES)
    (tmp_path / "here").rename(tmp_path / "there")
    assert identify_source(open_written(tmp_path / "there")) == then


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def rename_tensor(path: Path) -> None:
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"norm"', b'"worm"'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("model-a.safetensors", grow, r"model-a\.safetensors has \d+ bytes and had \d+"),
        ("model-a.safetensors", rename_tensor, "model-a.safetensors has another header"),
        ("model-b.safetensors", touch, "model-b.safetensors was written at another time"),
        ("config.json", grow, "config.json was changed"),
    ],
)
def test_what_changed_is_told(tmp_path, file, change, words):
    model = write_model(tmp_path / "m")
    then = identify_source(model)
    change(tmp_path / "m" / file)
    now = identify_source(model)
    assert then is not None
    assert now is not None
    assert then.change(then) is None
    told = now.change(then)
    assert told is not None
    assert re.match(words, told)


def test_files_that_came_and_went_are_told(tmp_path):
    now = identify_source(write_model(tmp_path / "m"))
    assert now is not None
    less = replace(now, files=now.files[1:])
    assert now.change(less) == "model-a.safetensors is new"
    assert less.change(now) == "model-a.safetensors is gone"


def test_made_up_weights_are_nobody(tmp_path):
    model = write_model(tmp_path / "m")
    assert identify_source(replace(model, source=DummySource(model.parameters, "bfloat16"))) is None


def test_a_gguf_file_is_known_by_its_own_header(tmp_path):
    model = write_model(tmp_path / "m")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"header__weights")
    entries = {name: replace(entry, file="m.gguf") for name, entry in model.source.entries.items()}

    class Source:
        pass

    source = Source()
    source.entries = entries  # type: ignore[attr-defined]
    gguf = GGUFFile(path, 3, 32, 8, 15, 0, {}, {})
    model = replace(model, path=path, kind="gguf", source=source, gguf=gguf)  # type: ignore[arg-type]
    identity = identify_source(model)
    assert identity is not None
    (file,) = identity.files
    assert file.header_digest == digest(b"header__").hex()
    assert (file.name, file.num_bytes) == ("m.gguf", 15)
    assert len(file.header_digest) == 2 * DIGEST_BYTES


def test_a_file_that_is_gone_or_no_safetensors_is_named(tmp_path):
    with pytest.raises(ModelFormatError, match=r"a\.safetensors cannot be read"):
        header_digest(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(ModelFormatError, match=r"b\.safetensors says its header has"):
        header_digest(tmp_path / "b.safetensors")

"""Manifests of saved weights: what tells one source from another, and hostile files that say they are one."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.distributed.mesh import Mesh
from holdfast.errors import HoldfastError, ModelFormatError, UnsupportedModelError
from holdfast.loading.gguf.file import GGUFFile
from holdfast.loading.planning.moves import PlannedWeight
from holdfast.loading.quantized.manifest import (
    DIGEST_BYTES,
    Manifest,
    PlaneFile,
    SourceFile,
    SourceIdentity,
    digest,
    header_digest,
    identify_source,
    manifest_text,
    read_manifest,
    unsaved,
)
from holdfast.loading.sources.dummy import DummySource
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, INT8, MXFP4, WeightRecipe
from loading.saved_weights import FILES, open_written, write_model


def test_identify_source_is_equal_after_a_move(tmp_path):
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
def test_source_identity_change_is_described(tmp_path, file, change, words):
    model = write_model(tmp_path / "m")
    then = identify_source(model)
    change(tmp_path / "m" / file)
    now = identify_source(model)
    assert then is not None
    assert now is not None
    assert then.change(then) is None
    change_text = now.change(then)
    assert change_text is not None
    assert re.match(words, change_text)


def test_source_identity_change_lists_new_and_removed_files(tmp_path):
    now = identify_source(write_model(tmp_path / "m"))
    assert now is not None
    less = replace(now, files=now.files[1:])
    assert now.change(less) == "model-a.safetensors is new"
    assert less.change(now) == "model-a.safetensors is gone"


def test_dummy_weights_have_no_identity(tmp_path):
    model = write_model(tmp_path / "m")
    assert identify_source(replace(model, source=DummySource(model.parameters, "bfloat16"))) is None


def test_identify_source_of_gguf_digests_only_the_header(tmp_path):
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


def test_header_digest_of_missing_or_broken_file_is_refused(tmp_path):
    with raises_code("file.unreadable", ModelFormatError):
        header_digest(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 16)
    with raises_code("weights.not_safetensors", ModelFormatError):
        header_digest(tmp_path / "b.safetensors")


DIGEST = "0123456789abcdef" * 2
MANIFEST = Manifest(
    dtype="bfloat16",
    recipe=WeightRecipe(FP8_BLOCK, "all", ("*.down*", "re:x")),
    mesh=Mesh(1, 2),
    plan_digest=DIGEST,
    source=SourceIdentity((SourceFile("a.safetensors", 12, -5, DIGEST),), DIGEST),
    weights=(
        PlannedWeight("a", (8,), "bfloat16"),
        PlannedWeight("b", (128, 64), "bfloat16", replace(FP8_BLOCK, block_rows=64)),
    ),
    files=(PlaneFile("model-00001.safetensors", 99, DIGEST, {"a": 0, "b": 2**64 - 1, "b.scale": 5}),),
)


def test_manifest_round_trips(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest_text(MANIFEST))
    assert read_manifest(path) == MANIFEST
    assert MANIFEST.num_bytes == 99


def test_unsaved_describes_a_scheme_that_cannot_be_saved():
    assert unsaved(MANIFEST.weights) is None
    for scheme in (replace(FP8_BLOCK, block_rows=256), replace(MXFP4, block_columns=16), replace(INT8, name="own")):
        reason = unsaved([PlannedWeight("b", (256, 64), "bfloat16", scheme)])
        assert reason is not None
        assert reason.startswith("b is stored as")


HOSTILE = [
    (("format",), "else", "format"),
    (("dtype",), "int8", "dtype"),
    (("dtype",), ["bfloat16"], "dtype"),
    (("recipe",), None, "recipe"),
    (("recipe", "scheme"), "fp7", "scheme"),
    (("recipe", "embeddings"), 5, "embeddings"),
    (("recipe", "ignore"), [5], "ignore"),
    (("mesh", "rank"), 2, "rank"),
    (("mesh", "num_ranks"), 0, "num_ranks"),
    (("plan",), "zz" * 16, "plan"),
    (("source", "files"), "all", "files"),
    (("source", "files", 0, "bytes"), -1, "bytes"),
    (("source", "settings"), "00", "settings"),
    (("files", 0, "name"), "../model-00001.safetensors", "name"),
    (("files", 0, "name"), "/etc/passwd", "name"),
    (("files", 0, "name"), "model-00001.safetensors\n", "name"),
    (("files", 0, "bytes"), 2**70, "bytes"),
    (("files", 0, "header"), None, "header"),
    (("files", 0, "planes"), [], "planes"),
    (("files", 0, "planes", "a"), "00" * 7, "a"),
    (("files", 0, "planes", "a"), "00" * 16, "a"),
    (("files", 0, "planes", "a"), "0G" * 8, "a"),
    (("files", 0, "planes", "a"), 5, "a"),
    (("files", 0, "planes", "a"), "", "a"),
    (("weights",), {}, "weights"),
    (("weights", 0, "name"), "n" * 600, "name"),
    (("weights", 0, "name"), "", "name"),
    (("weights", 0, "shape"), [], "shape"),
    (("weights", 0, "shape"), [0], "shape"),
    (("weights", 0, "shape"), [-1], "shape"),
    (("weights", 0, "shape"), [2**39, 2**39], "shape"),
    (("weights", 0, "shape"), [1] * 9, "shape"),
    (("weights", 0, "dtype"), "float4", "dtype"),
    (("weights", 1, "shape"), [128], "shape"),
    (("weights", 1, "shape"), [2, 100, 64], "shape"),
    (("weights", 1, "scheme"), "fp8", "scheme"),
    (("weights", 1, "scheme", "name"), "own", "name"),
    (("weights", 1, "scheme", "block_rows"), 0, "block_rows"),
    (("weights", 1, "scheme", "block_rows"), 48, "block_rows"),
    (("weights", 1, "scheme"), {"name": "mxfp4", "block_rows": 1, "x": 0}, None),
]


@for_each("place, value, key", HOSTILE)
def test_read_manifest_hostile_value_is_refused(tmp_path, place, value, key):
    values = json.loads(manifest_text(MANIFEST))
    inner = values
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(values))
    if key is None:
        assert read_manifest(path).weights[1].scheme == MXFP4
        return
    with raises_code("weights.bad_manifest", ModelFormatError):
        read_manifest(path)


@for_each("place", [("dtype",), ("files", 0), ("weights", 1, "scheme"), ("mesh",), ("source",)])
@for_each("junk", [None, 0, "x", [], {}, [[]], {"a": 1}, 1e300])
def test_read_manifest_junk_value_is_read_or_refused(tmp_path, place, junk):
    values = json.loads(manifest_text(MANIFEST))
    inner = values
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = junk
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(values))
    if place[-1] == "scheme" and junk is None:
        assert read_manifest(path).weights[1].scheme is None
        return
    with raises_code("weights.bad_manifest", HoldfastError):
        read_manifest(path)


def test_read_manifest_other_version_has_its_own_code(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest_text(MANIFEST).replace('"version": 2', '"version": 1'))
    with raises_code("weights.manifest_version", UnsupportedModelError):
        read_manifest(path)
    path.write_text("[]")
    with raises_code("file.wrong_content", ModelFormatError):
        read_manifest(path)


def test_manifest_without_quantization_round_trips(tmp_path):
    path = tmp_path / "manifest.json"
    plain = replace(MANIFEST, recipe=WeightRecipe(), weights=(PlannedWeight("b", (4, 4), "float32", FP8),))
    path.write_text(manifest_text(plain))
    assert read_manifest(path) == plain

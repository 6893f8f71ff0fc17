import json
import os
from pathlib import Path

import pytest

from holdfast.errors import ModelError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.sources.safetensors import file_inside, open_weight_files
from loading.safetensors_bytes import write


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


def refusal(folder, kind=ModelError):
    with pytest.raises(kind) as caught:
        open_weight_files(folder)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_one_file_or_an_index(tmp_path):
    shards(tmp_path, {"b-2.safetensors": ["x", "y"], "a-1.safetensors": ["z"]})
    assert names_in(tmp_path) == ["z", "x", "y"]
    write(tmp_path / "model.safetensors", {"only": ("F32", [1])})
    assert names_in(tmp_path) == ["only"]


@pytest.mark.parametrize(
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
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused_before_a_file_is_opened(tmp_path, target):
    shards(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "evil": target})
    (tmp_path / "a.safetensors").write_bytes(b"would be refused if it were opened")
    message = refusal(tmp_path, ModelFormatError)
    assert "'evil'" in message
    assert "model.safetensors.index.json" in message


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", '{"weight_map"'])
def test_an_index_without_a_map_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(tmp_path, ModelFormatError)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    outside = write(tmp_path / "secret.safetensors", {"x": ("F32", [1])})
    (tmp_path / "model" / "model.safetensors").symlink_to(outside)
    assert "link that leads out of model" in refusal(tmp_path / "model", ModelFormatError)
    (tmp_path / "model" / "model.safetensors").unlink()
    shards(tmp_path / "model", {}, {"x": "a.safetensors"})
    (tmp_path / "model" / "a.safetensors").symlink_to(outside)
    assert "a.safetensors is a link that leads out" in refusal(tmp_path / "model", ModelFormatError)
    (tmp_path / "model" / "a.safetensors").unlink()
    (tmp_path / "model" / "a.safetensors").symlink_to("a.safetensors")
    assert "a.safetensors" in refusal(tmp_path / "model")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("put", "words"),
    [
        (os.mkfifo, "no regular file"),
        (Path.mkdir, "no regular file"),
        (lambda path: path.symlink_to("blob that was never downloaded"), "a link to nowhere"),
        (lambda path: path.symlink_to(path.name), "a link to nowhere"),
    ],
    ids=["pipe", "folder", "dangling link", "link to itself"],
)
def test_what_has_the_name_of_a_file_and_is_none_is_refused(tmp_path, name, put, words):
    put(tmp_path / name)
    assert f"has {name}; it is {words}" in refusal(tmp_path, ModelFormatError)


def test_the_download_cache_of_hugging_face_is_read_through_its_links(tmp_path):
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    write(tmp_path / "models--x" / "blobs" / "abc", {"x": ("F32", [1])})
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert names_in(snapshot) == ["x"]
    (snapshot / "config.json").symlink_to("../../../outside")
    with pytest.raises(ModelFormatError, match="leads out"):
        file_inside(snapshot, "config.json")


def test_a_folder_may_itself_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "model.safetensors", {"x": ("F32", [1])})
    (tmp_path / "link").symlink_to("real")
    assert names_in(tmp_path / "link") == ["x"]


def test_missing_shards_are_named(tmp_path):
    shards(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"})
    message = refusal(tmp_path, ModelNotFoundError)
    assert "b.safetensors, c.safetensors" in message


def test_index_and_files_must_agree(tmp_path):
    shards(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y"]}, {"x": "b.safetensors", "y": "b.safetensors"})
    assert "places 'x' in b.safetensors; it is missing" in refusal(tmp_path, ModelFormatError)
    shards(tmp_path, {"a.safetensors": ["x", "extra"]}, {"x": "a.safetensors"})
    assert "a.safetensors holds the tensor 'extra'; it is not mentioned" in refusal(tmp_path, ModelFormatError)


def test_a_tensor_in_two_files_is_a_duplicate(tmp_path):
    shards(
        tmp_path,
        {"a.safetensors": ["x", "y"], "b.safetensors": ["y", "z"]},
        {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"},
    )
    message = refusal(tmp_path, ModelFormatError)
    assert "b.safetensors holds the tensor 'y'; it is placed in a.safetensors" in message


def test_a_truncated_shard_is_named(tmp_path):
    shards(tmp_path, {"a.safetensors": ["x"], "b.safetensors": ["y"]})
    data = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[:-1])
    assert "b.safetensors is cut off in 'y'" in refusal(tmp_path, ModelFormatError)


def test_pickles_are_refused_unopened(tmp_path):
    (tmp_path / "pytorch_model.bin").mkdir()  # opening it would fail
    message = refusal(tmp_path, UnsupportedModelError)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message


def test_other_contents_are_told(tmp_path):
    assert "holds no weights" in refusal(tmp_path, ModelNotFoundError)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert "model-00001-of-00002.safetensors" in refusal(tmp_path, ModelNotFoundError)

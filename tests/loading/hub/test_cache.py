"""The local cache, laid out as the client lays it out: found without the network and without the client."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from error_codes import raises_code
from for_each import for_each
from holdfast.errors import ModelError, ModelNotFoundError
from holdfast.loading.declared import open_declared
from holdfast.loading.hub.cache import (
    cache_folder,
    cached_repos,
    find_files,
    find_snapshot,
    is_offline,
    known_revisions,
    write_ref,
)
from holdfast.loading.hub.names import HubName
from holdfast.loading.model_files import open_model

COMMIT, OTHER = "a" * 40, "b" * 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "torch_dtype": "bfloat16",
}


def put(cache: Path, files: dict[str, bytes], repo: str = "org/tiny", commit: str = COMMIT, ref: str | None = "main"):
    """A snapshot as the client leaves it: blobs, and links to them."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    for place, (name, data) in enumerate(files.items()):
        blob = folder / "blobs" / f"{commit[:8]}{place}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if ref is not None:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return folder / "snapshots" / commit


@for_each(
    "variables, folder",
    [
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "~/hf"}, "/home/me/hf/hub"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HUB_CACHE": "$PLACE/new", "HUGGINGFACE_HUB_CACHE": "/old"}, "/disk/new"),
        ({"HF_HUB_CACHE": "", "HF_HOME": ""}, "/home/me/.cache/huggingface/hub"),
    ],
)
def test_cache_folder_follows_environment_variables(variables, folder, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", "PLACE": "/disk", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_cache_folder_and_is_offline_match_huggingface_hub(tmp_path):
    """Against the real one, in a process of its own: it reads its variables once."""
    pytest.importorskip("huggingface_hub")
    code = "import huggingface_hub.constants as c; print(c.HF_HUB_CACHE, c.HF_HUB_OFFLINE)"
    for variables in (
        {"HF_HOME": "~/hf"},
        {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "yes"},
        {"XDG_CACHE_HOME": "/x"},
    ):
        bare = {"HOME": "/home/me", "PATH": os.environ["PATH"]} | variables
        said = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True).stdout
        ours = "import os; from holdfast.loading.hub.cache import *; print(cache_folder(), is_offline())"
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", ours], env=bare | path, capture_output=True, text=True, check=True)
        assert done.stdout == said


@for_each("value, offline", [("1", True), ("TRUE", True), ("on", True), ("0", False), ("", False)])
def test_is_offline_follows_environment_variables(value, offline, monkeypatch):
    for name, other in (("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), ("TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")):
        monkeypatch.setenv(name, value)
        monkeypatch.delenv(other, raising=False)
        assert is_offline() is offline


def test_find_snapshot_resolves_refs_and_short_commits(cache):
    put(cache, {"config.json": b"{}"})
    put(cache, {"config.json": b"[]"}, commit=OTHER, ref="refs/pr/1")
    for revision, commit in (
        (None, COMMIT),
        ("main", COMMIT),
        ("refs/pr/1", OTHER),
        (OTHER, OTHER),
        ("bbbbbbb", OTHER),
    ):
        found = find_snapshot(HubName("org/tiny", revision))
        assert found is not None
        assert found.commit == commit
    for revision in ("v9", "c" * 40, "bbbbbb"):
        assert find_snapshot(HubName("org/tiny", revision)) is None
    assert known_revisions("org/tiny") == ("main", "refs/pr/1")
    assert list(cached_repos()) == ["org/tiny"]


def test_find_snapshot_ambiguous_short_commit_is_none(cache):
    """A short commit that two snapshots begin with leads to neither; one letter more leads to each."""
    first, second = "b" * 8 + "c" * 32, "b" * 8 + "d" * 32
    for commit in (first, second):
        put(cache, {"config.json": commit.encode()}, commit=commit, ref=None)
    assert find_snapshot(HubName("org/tiny", "b" * 8)) is None
    for commit in (first, second):
        found = find_snapshot(HubName("org/tiny", commit[:9]))
        assert found is not None
        assert found.commit == commit
    assert known_revisions("org/tiny") == (first, second)
    put(cache, {}, commit=second, ref="v2")
    assert known_revisions("org/tiny") == ("v2", first)
    assert find_snapshot(HubName("org/tiny")) is None, "nothing says which of them is main"


def test_cached_repos_lists_models_of_several_owners(cache):
    """Models alone, each of several owners, whatever else lies beside them."""
    for repo in ("b/tiny", "a/tiny", "a/Other--name"):
        put(cache, {"config.json": b"{}"}, repo)
    for name in ("datasets--a--words", "spaces--a--b", "models--alone", ".locks", "version.txt"):
        (cache / name).mkdir()
    assert list(cached_repos()) == ["a/Other--name", "a/tiny", "b/tiny"]
    assert "Did you mean a/tiny, which is in the Hugging Face cache?" in refusal("Tiny", "model.not_found")
    for owner in "ab":
        found = find_snapshot(HubName(f"{owner}/tiny"))
        assert found is not None
        assert f"models--{owner}--tiny" in str(found.folder)


def test_write_ref_skips_refs_of_commits(cache):
    put(cache, {"config.json": b"{}"}, ref=None)
    write_ref("org/tiny", COMMIT, COMMIT)
    assert not (cache / "models--org--tiny" / "refs").exists()
    write_ref("org/tiny", "refs/pr/1", COMMIT)
    write_ref("org/tiny", "main", "no commit")
    assert known_revisions("org/tiny") == ("refs/pr/1",)
    write_ref("org/tiny", "refs/pr/1", OTHER)
    assert (cache / "models--org--tiny" / "refs" / "refs" / "pr" / "1").read_text() == OTHER


@pytest.mark.parametrize("text", ["../../../../etc", "", "x" * 4000, "A" * 40])
def test_find_snapshot_ref_without_a_commit_is_none(cache, text):
    put(cache, {"config.json": b"{}"}, ref=None)
    (cache / "models--org--tiny" / "refs").mkdir()
    (cache / "models--org--tiny" / "refs" / "main").write_text(text)
    assert find_snapshot(HubName("org/tiny")) is None


def test_open_model_from_cache_needs_no_huggingface_hub(cache, sharded):
    """In a process where the client cannot be imported and nothing may connect."""
    folder = put(cache, sharded)
    code = (
        "import sys, socket; sys.modules['huggingface_hub'] = None; socket.socket.connect = None\n"
        "from holdfast.loading.model_files import open_model\n"
        "from holdfast.loading.declared import open_declared\n"
        "opened = open_model('org/tiny', 'auto')\n"
        "print(opened.path, opened.name, len(opened.source.entries), open_declared('hf.co/org/tiny').num_layers)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(folder), "tiny", "21", "2"], done


def test_open_declared_from_cache_needs_only_the_config(cache):
    put(cache, {"config.json": json.dumps(CONFIG).encode()})
    declared = open_declared("org/tiny")
    assert (declared.name, declared.num_layers) == ("tiny", 5)
    assert open_declared("org/tiny", "main").num_layers == 5
    with raises_code("hub.not_cached", ModelError):
        open_model("org/tiny", "auto")


def test_open_declared_prefers_cache_then_catalogue(cache):
    assert open_declared("Qwen/Qwen3-8B").num_layers == 36
    assert open_declared("unsloth/Qwen3-8B-GGUF:Q4_K_M").num_layers == 36
    put(cache, {"config.json": json.dumps(CONFIG).encode()}, "Qwen/Qwen3-8B")
    assert open_declared("Qwen/Qwen3-8B").num_layers == 5
    with pytest.raises(ModelNotFoundError, match="not in the Hugging Face cache either"):
        open_declared("nowhere/nothing")


def refusal(model: str, code: str = "hub.not_cached", **options: str) -> str:
    with raises_code(code, ModelNotFoundError) as caught:
        open_model(model, "auto", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_locate_model_lists_missing_shards_and_broken_links(cache, sharded):
    folder = put(cache, sharded)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "tokenizer_config.json").resolve().unlink()
    assert "half-downloaded, without model-00002-of-00003.safetensors, tokenizer_config.json" in refusal("org/tiny")
    cut = put(cache, sharded, "org/cut", ref=None)
    (cut / "model-00001-of-00003.safetensors").unlink()
    assert "half-downloaded, without model-00001-of-00003.safetensors" in refusal("org/cut")


def test_find_files_broken_gguf_links_are_missing(cache):
    files = [f"m-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for broken in ([0], [1], [1, 2]):
        folder = put(cache, dict.fromkeys(files, b"GGUF"), f"org/cut{len(broken)}{broken[0]}")
        for part in broken:
            (folder / files[part]).resolve().unlink()
        name = HubName(f"org/cut{len(broken)}{broken[0]}")
        snapshot = find_snapshot(name)
        assert snapshot is not None
        assert find_files(snapshot, name, "auto").missing == tuple(files[part] for part in broken)


def test_open_model_cached_without_tokenizer_opens(cache, sharded):
    """Another tokenizer may replace it; the engine reports a missing one."""
    put(cache, {name: data for name, data in sharded.items() if name != "tokenizer.json"})
    assert open_model("org/tiny", "auto").spec.num_layers == 2


def test_locate_model_suggests_other_revisions_and_names(cache, sharded):
    put(cache, sharded, commit=OTHER, ref="v1")
    message = refusal("org/tiny@v2")
    assert "revision v2 is not there, only v1, and HF_HUB_OFFLINE" in message
    assert "Write org/tiny@v1" in message
    assert "Did you mean org/tiny, which is there?" in refusal("org/tinny")
    assert "Did you mean org/tiny, which is in the Hugging Face cache?" in refusal("tiny", "model.not_found")
    assert open_model("org/tiny", "auto", revision="v1").name == "tiny"


def test_open_model_local_path_wins_over_cache_and_warns(cache, sharded, caplog):
    put(cache, sharded)
    here = Path("org/tiny")
    here.mkdir(parents=True)
    for name, data in sharded.items():
        (here / name).write_bytes(data)
    with caplog.at_level("WARNING", "holdfast"):
        assert open_model("org/tiny", "auto").path == here
    assert "using the folder org/tiny here; hf.co/org/tiny is the one in the cache" in caplog.text
    assert open_model("hf.co/org/tiny", "auto").path != here
    assert "Did you mean org/tiny?" in refusal("org/tinny", "model.not_here_or_cached")


def test_open_model_cached_gguf_is_found_by_its_tag(cache, monkeypatch):
    from holdfast.loading import model_files

    monkeypatch.setattr(model_files, "open_path", lambda path, load_format: path)
    monkeypatch.setattr(model_files, "replace", lambda opened, label: opened)
    files = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]
    folder = put(cache, dict.fromkeys(files, b"GGUF"))
    assert open_model("org/tiny", "auto") == folder / files[0]
    assert open_model("org/tiny:q8_0", "auto") == folder / files[1]
    assert open_model("hf.co/org/tiny:BF16", "auto") == folder / files[2]
    assert open_model(f"org/tiny/{files[1]}", "auto") == folder / files[1]
    assert "half-downloaded, without a GGUF file of Q5_K_M" in refusal("org/tiny:Q5_K_M")
    (folder / files[3]).unlink()
    assert "1 of 2 parts of BF16/m-BF16" in refusal("org/tiny:BF16")


def test_open_model_without_huggingface_hub_names_the_package(cache, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refusal("org/tiny@v1")
    assert "huggingface_hub, which would download it, is not installed" in message
    assert "Run pip install huggingface_hub to have it downloaded, or run hf download org/tiny --revision v1" in message
    assert "holdfast[" not in message

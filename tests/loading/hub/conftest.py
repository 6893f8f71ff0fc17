"""Fixtures of the Hub's tests: an empty cache, a server that speaks its protocol, and a tiny model in three shards."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loading.hub.local_hub import LocalHub, serving


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache, a working directory without models, and no network."""
    for name in ("HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HF_TOKEN", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A server, and the real client pointed to it."""
    from huggingface_hub import constants

    with serving() as hub:
        monkeypatch.delenv("HF_HUB_OFFLINE")
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache.parent / "no-token"))
        # So that a connection that is cut leaves something behind, of a file of a few hundred thousand bytes.
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
        yield hub


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a tiny model in three shards, by name."""
    from safetensors.numpy import load_file, save

    from cli.cli_models import make_model

    folder = make_model(tmp_path_factory.mktemp("sharded") / "model")
    tensors = load_file(folder / "model.safetensors")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "model.safetensors"}
    weight_map = {}
    for place in range(3):
        shard = f"model-{place + 1:05}-of-00003.safetensors"
        names = sorted(tensors)[place::3]
        files[shard] = save({name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files

"""Downloads by the real client from a server that speaks the Hub's protocol: files that are fetched, resumed and refused."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_hub  # noqa: F401
import pytest

from cli.cli_models import finish, start
from error_codes import raises_code
from holdfast.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from holdfast.loading.declared import open_declared
from holdfast.loading.hub import download as downloads
from holdfast.loading.hub.cache import find_snapshot
from holdfast.loading.hub.names import HubName
from holdfast.loading.model_files import open_model
from loading.hub.local_hub import LocalHub, Repo, commit_of

JUNK = {
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"another",
    "original/consolidated.00.pth": b"pickle",
    "onnx/model.onnx": b"graph",
    "README.md": b"words",
}


class Disk(NamedTuple):
    """Like the result of shutil.disk_usage."""

    total: int
    used: int
    free: int


class Watched:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.seen: list[downloads.Download] = []
        self.counts: list[int] = []

    @contextmanager
    def __call__(self, download):
        self.seen.append(download)
        yield self.counts.append


def refusal(code: str, model: str, kind: type[ModelError] = ModelNotFoundError, **options) -> str:
    with raises_code(code, kind) as caught:
        open_model(model, "auto", **options)
    message = str(caught.value)
    assert message.isprintable()
    return message


def test_fetch_model_takes_only_needed_files_then_the_cache(hub, cache, sharded):
    hub.repos["org/tiny"] = Repo(sharded | JUNK)
    watch = Watched()
    opened = open_model("org/tiny", "auto", watch=watch)
    assert opened.path == cache / "models--org--tiny" / "snapshots" / commit_of(sharded | JUNK)
    snapshot = find_snapshot(HubName("org/tiny"))
    assert snapshot is not None
    assert snapshot.files == set(sharded)
    [seen] = watch.seen
    rest = set(sharded) - {"config.json", "model.safetensors.index.json"}
    assert (seen.num_files, seen.num_bytes) == (len(rest), sum(len(sharded[name]) for name in rest))
    assert watch.counts[-1] == seen.num_bytes
    assert watch.counts == sorted(watch.counts)
    num_requests = len(hub.requests)
    assert open_model("org/tiny@main", "auto").path == opened.path
    assert open_declared("org/tiny").num_layers == 2
    assert len(hub.requests) == num_requests


def test_llm_downloaded_model_opens_again_without_the_server(hub, sharded, monkeypatch):
    from holdfast import LLM, SamplingParams

    hub.repos["org/tiny"] = Repo(sharded)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM("org/tiny", max_num_seqs=1) as llm:
        first = llm.generate("Hello", params)[0].outputs[0].token_ids
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    hub.repos.clear()
    with LLM("org/tiny", revision="main", max_num_seqs=1) as llm:
        assert llm.generate("Hello", params)[0].outputs[0].token_ids == first
    assert len(first) == 8


def test_open_model_resumes_a_cut_download(hub, sharded):
    shard = "model-00002-of-00003.safetensors"
    hub.repos["org/tiny"], hub.cuts[shard] = Repo(sharded), 50_000
    open_model("org/tiny", "auto").source.close()
    begin, again = hub.gets(f"store/org/tiny/{commit_of(sharded)}/{shard}")
    assert begin == ""
    start_byte = int(again.removeprefix("bytes=").rstrip("-"))
    assert 0 < start_byte <= 50_000


def test_open_model_skips_files_of_an_earlier_download(hub, cache, sharded):
    last = "model-00003-of-00003.safetensors"
    hub.repos["org/tiny"] = Repo({name: data for name, data in sharded.items() if name != last})
    assert last in refusal("hub.missing_file", "org/tiny")
    hub.repos["org/tiny"] = Repo(sharded)
    commit = commit_of(sharded)
    open_model("org/tiny", "auto").source.close()
    (cache / "models--org--tiny" / "snapshots" / commit / last).resolve().unlink()
    hub.requests.clear()
    open_model("org/tiny", "auto").source.close()
    assert [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/store/" in path] == [
        last
    ]


def test_open_model_revision_selects_the_commit(hub, sharded):
    small = json.loads(sharded["config.json"]) | {"max_position_embeddings": 77}
    other = sharded | {"config.json": json.dumps(small).encode()}
    hub.repos["org/tiny"] = Repo(sharded, other_refs={"v1": other})
    assert open_model("org/tiny", "auto", revision="v1").spec.max_position == 77
    assert open_model("org/tiny@v1", "auto").path.name == commit_of(other)
    assert open_model(f"org/tiny@{commit_of(sharded)}", "auto").spec.max_position == 256
    assert "org/tiny has no revision v9. Name a branch" in refusal("hub.no_revision", "org/tiny@v9")


def test_open_model_gguf_repository_fetches_one_quantization(hub, monkeypatch, caplog):
    from holdfast.loading import model_files

    monkeypatch.setattr(model_files, "open_path", lambda path, load_format: path)
    monkeypatch.setattr(model_files, "replace", lambda opened, label: opened)
    files = {
        "m-Q4_K_M.gguf": b"GGUF four",
        "m-Q8_0-00001-of-00002.gguf": b"GGUF eight",
        "m-Q8_0-00002-of-00002.gguf": b"GGUF more",
        "mmproj-F16.gguf": b"GGUF eyes",
        "config.json": b"{}",
    }
    hub.repos["org/tiny-GGUF"] = Repo(files, gguf={"architecture": "llama"})
    first = open_model("hf.co/org/tiny-GGUF:q8_0", "auto")
    assert isinstance(first, Path)
    assert sorted(path.name for path in first.parent.iterdir()) == [name for name in sorted(files) if "Q8_0" in name]
    assert first.name == "m-Q8_0-00001-of-00002.gguf"
    hub.repos["org/other-GGUF"] = Repo(files)
    with caplog.at_level(logging.WARNING, "holdfast"):
        chosen = open_model("org/other-GGUF", "auto")
    assert isinstance(chosen, Path)
    assert chosen.name == "m-Q4_K_M.gguf"
    assert "using Q4_K_M; org/other-GGUF also has Q8_0" in caplog.text
    assert "the Hub has Q4_K_M, Q8_0. Write org/tiny-GGUF:Q4_K_M" in refusal(
        "hub.no_quantization", "org/tiny-GGUF:Q5_0"
    )
    num_requests = len(hub.requests)
    assert open_model("org/tiny-GGUF:Q8_0", "auto") == first
    assert len(hub.requests) == num_requests


def test_fetch_model_unsupported_family_fetches_no_weights(hub, sharded):
    config = json.loads(sharded["config.json"]) | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    hub.repos["org/mamba"] = Repo(sharded | {"config.json": json.dumps(config).encode()})
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        open_model("org/mamba", "auto")
    hub.repos["org/mamba-GGUF"] = Repo({"m-Q8_0.gguf": b"GGUF"}, gguf={"architecture": "mamba"})
    refusal("gguf.unsupported_architecture", "org/mamba-GGUF", UnsupportedModelError)
    hub.repos["org/pickle"] = Repo({"config.json": b"{}", "pytorch_model.bin": b"x"})
    refusal("weights.pickle", "org/pickle", UnsupportedModelError)
    assert not hub.gets("/store/")


def test_download_without_disk_room_is_refused_before_weights(hub, sharded, monkeypatch):
    hub.repos["org/tiny"] = Repo(sharded)
    usage = Disk(10**9, 10**9, 100_000)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path: usage)
    assert "has 97.66 KiB free. Free some space" in refusal("hub.no_space", "org/tiny")
    assert not hub.gets("/store/")


def test_download_room_excludes_blobs_already_present(tmp_path, monkeypatch):
    """To the byte: what is not whole counts, what another download has finished does not."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "there").write_bytes(bytes(300))
    files = [downloads.HubFile("a", 300, "there"), downloads.HubFile("b", 500, "not"), downloads.HubFile("c", 11, "")]
    download = downloads.Download("org/tiny", 3, 811, tmp_path)
    for free in (511, 510):
        usage = Disk(10**9, 10**9, free)
        monkeypatch.setattr(downloads.shutil, "disk_usage", lambda path, usage=usage: usage)
        if free == 511:
            downloads.check_space(download, files, tmp_path)
    with raises_code("hub.no_space", ModelNotFoundError, needed="511 B", free="510 B"):
        downloads.check_space(download, files, tmp_path)


def test_bytes_there_takes_the_largest_partial_file(tmp_path):
    """A download that was cut leaves one behind: the larger is how far it is, and a whole blob ends it."""
    (tmp_path / "blobs").mkdir()
    file = downloads.HubFile("a", 90_000, "blob")
    assert downloads.bytes_there(file, tmp_path) == 0
    for ending, num_bytes in (("", 20_000), (".0123abcd", 50_000)):
        (tmp_path / "blobs" / f"blob{ending}.incomplete").write_bytes(b"x" * num_bytes)
    assert downloads.bytes_there(file, tmp_path) == 50_000
    (tmp_path / "blobs" / "blob").write_bytes(b"x" * 90_000)
    assert downloads.bytes_there(file, tmp_path) == 90_000
    assert downloads.bytes_there(downloads.HubFile("b", 5, ""), tmp_path) == 0


def repository(fetch_one) -> downloads.Repository:
    """A repository whose files are fetched by a function."""
    repo = object.__new__(downloads.Repository)
    repo.name, repo.fetch_one = HubName("org/tiny"), fetch_one  # type: ignore[method-assign]
    return repo


def test_fetch_first_failure_stops_the_others(tmp_path):
    """The third of twenty files fails: running ones end, no further one begins, and its error is raised."""
    begun: list[str] = []

    def fetch_one(file: str, stop: threading.Event) -> None:
        begun.append(file)
        if file == "2":
            raise OSError("the disk is gone")
        assert stop.wait(10)
        raise downloads.StoppedError

    files = [downloads.HubFile(str(number), 1, "") for number in range(20)]
    with raises_code("hub.failed", ModelNotFoundError):
        repository(fetch_one).fetch_all(files, tmp_path, lambda num_bytes: None)
    assert len(begun) <= downloads.NUM_WORKERS


def test_download_hung_thread_removes_only_its_partial_file(tmp_path, monkeypatch):
    """After Ctrl-C, that alone: what another download writes stays, and what a later one takes up again."""
    monkeypatch.setattr(downloads, "SECONDS_TO_STOP", 0.05)
    blobs, begun, release = tmp_path / "blobs", threading.Event(), threading.Event()
    blobs.mkdir()
    (blobs / "other.01234567.incomplete").touch()

    def fetch_one(file: str, stop: threading.Event) -> None:
        for ending in (".89abcdef", ""):
            (blobs / f"own{ending}.incomplete").touch()
        begun.set()
        release.wait(10)

    def interrupt(num_bytes: int) -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            repository(fetch_one).fetch_all([downloads.HubFile("a", 1, "")], tmp_path, interrupt)
    finally:
        release.set()
    assert sorted(path.name for path in blobs.iterdir()) == ["other.01234567.incomplete", "own.incomplete"]


@pytest.mark.parametrize(
    ("state", "kind", "code"),
    [
        ("gated", UnsupportedModelError, "hub.gated"),
        ("private", ModelNotFoundError, "hub.not_found"),
        ("absent", ModelNotFoundError, "hub.not_found"),
        ("broken", ModelNotFoundError, "hub.http_error"),
    ],
)
def test_hub_error_is_one_line_with_the_fix(hub, sharded, state, kind, code, monkeypatch):
    if state != "absent":
        hub.repos["org/tiny"] = Repo(sharded, state)
    refusal(code, "org/tiny", kind)
    if state in ("gated", "private"):
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert open_model("org/tiny", "auto").spec.num_layers == 2


def test_open_model_unreachable_or_silent_hub_is_refused(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    message = refusal("hub.unreachable", "org/tiny")
    assert "http://127.0.0.1:1 cannot be reached, and model 'org/tiny' is not in the cache." in message
    assert "run hf download org/tiny on a machine with one" in message
    message = refusal("hub.unreachable", "org/tiny:Q8_0@v1")
    assert 'run hf download org/tiny --include "*Q8_0*.gguf" --include "*q8_0*.gguf" --revision v1 on' in message
    with threading_server() as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(downloads, "SHORT_PATIENCE_SECONDS", 0.3)
        with raises_code("hub.timeout", ModelNotFoundError):
            open_declared("org/tiny")


@contextmanager
def threading_server():
    """One that takes connections and never says a word."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_plan_fetches_only_the_config_of_unknown_names(hub, sharded):
    hub.repos["org/tiny"] = Repo(sharded)
    assert open_declared("Qwen/Qwen3-8B").num_layers == 36
    assert not hub.requests
    assert open_declared("org/tiny").num_layers == 2
    assert not hub.gets("/store/")
    num_requests = len(hub.requests)
    assert open_declared("org/tiny").num_layers == 2
    assert len(hub.requests) == num_requests
    assert open_model("org/tiny", "auto").spec.num_layers == 2
    hub.repos["org/gguf"] = Repo({"m-Q8_0.gguf": b"GGUF"})
    with raises_code("hub.no_config", ModelNotFoundError) as caught:
        open_declared("org/gguf")
    download = 'hf download org/gguf --include "*Q8_0*.gguf" --include "*q8_0*.gguf"'
    assert caught.value.hints[0] == f"It has only GGUF files: download one with {download}."


def test_dummy_weights_and_a_tokenizer_fetch_no_weights(hub, sharded):
    from holdfast.config import EngineConfig
    from holdfast.engine.open_text import open_tokenizer

    hub.repos["org/tiny"] = Repo(sharded)
    opened = open_model("org/tiny", "dummy")
    assert {entry.file for entry in opened.source.entries.values()} == {"dummy weights"}
    hub.repos["org/words"] = Repo(sharded)
    tokenizer = open_tokenizer(EngineConfig(tokenizer="org/words"), opened)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert not hub.gets("model-0000")


def environment(hub: LocalHub, cache: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_CACHE": str(cache),
        "HF_HOME": str(cache.parent),
        "HF_HUB_DISABLE_XET": "1",
    }


@pytest.mark.slow
def test_run_command_prints_the_download_and_keeps_json_clean(hub, cache, sharded):
    hub.repos["org/tiny"] = Repo(sharded)
    env = environment(hub, cache)
    ended = finish(start("run", "org/tiny", "-p", "Hi", "--max-tokens", "1", env=env))
    assert ended.code == 0, ended
    lines = ended.err.splitlines()
    assert lines[0].startswith("Downloading org/tiny: 6 files, ")
    assert lines[1] == "Loading tiny"
    assert "\x1b" not in ended.err
    hub.repos["org/more"] = Repo(sharded)
    ended = finish(start("run", "org/more", "-p", "Hi", "--max-tokens", "1", "--json", env=env))
    assert (ended.code, ended.err, json.loads(ended.out)["model"]) == (0, "", "more"), ended


@pytest.mark.parametrize("num_signals", [1, 2])
def test_download_interrupted_leaves_no_partial_file(hub, cache, sharded, num_signals):
    shard = "model-00002-of-00003.safetensors"
    hub.repos["org/tiny"], hub.waits[shard] = Repo(sharded), threading.Event()
    process = start("run", "org/tiny", "-p", "Hi", env=environment(hub, cache))
    blobs = cache / "models--org--tiny" / "blobs"
    deadline = time.monotonic() + 60
    while not list(blobs.glob("*.incomplete")) or not hub.gets(shard):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, "no download began"
        time.sleep(0.05)
    for _ in range(num_signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    if num_signals == 1:
        hub.waits[shard].set()
    ended = finish(process)
    hub.waits[shard].set()
    assert (ended.code, ended.err.splitlines()[-1]) == (130, "interrupted"), ended
    assert not list(blobs.glob("*.incomplete"))
    assert find_snapshot(HubName("org/tiny")) is None


def test_open_model_cached_does_not_import_huggingface_hub(hub, sharded, cache):
    hub.repos["org/tiny"] = Repo(sharded)
    open_model("org/tiny", "auto").source.close()
    code = (
        "import sys; from holdfast.loading.model_files import open_model; open_model('org/tiny', 'auto');"
        "print([name for name in ('huggingface_hub', 'httpx', 'httpx2', 'requests', 'torch') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment(hub, cache),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"

"""What is wrong with ranks is one sentence, and no process is left: sizes, devices, ports, unlike ranks, and nonsense over a channel."""

import json
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch

from cli.cli_models import make_model
from engine.dying_engine import children_of
from engine.fake_rank import NONSENSE
from engine.rank_groups import open_group, with_tests
from engine.test_core_process import is_gone
from engine.unlike_rank import UNLIKE
from holdfast import LLM
from holdfast.config import EngineConfig
from holdfast.engine import build as engine_build
from holdfast.engine import launched, rank_build
from holdfast.engine.launched import Launched, accept_ranks
from holdfast.engine.rank_build import OVERLAPPING, check_devices
from holdfast.engine.rank_messages import RankLoaded, RankPlanned, RankReported
from holdfast.engine.ranks import RankGroup
from holdfast.errors import ConfigError, EngineDeadError, HoldfastError
from loading.compressed_models import CONFIG as COMPRESSED

OPTIONS = {"device": "cpu", "dtype": "float32", "memory_limit": "1GiB", "max_model_len": 64}


@pytest.fixture(autouse=True)
def children_find_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", with_tests(dict(os.environ))["PYTHONPATH"])


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 90}, 4, "90 columns of the MLP"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}, 4, "6 query heads"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
            3,
            "2 key heads neither divide into 3",
        ),
    ],
)
def test_tensor_parallel_size_that_does_not_divide_is_refused(
    tmp_path: Path, monkeypatch, settings, size, words
) -> None:
    monkeypatch.setattr(rank_build, "RankGroup", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=words) as caught:
        LLM(str(make_model(tmp_path / "m", **settings)), tensor_parallel_size=size, **OPTIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, {"size": 3}, "4 query heads do not divide into 3 equal parts. Try 1, 2."),
        ({}, {"size": 4}, "2 groups of heads do not divide into 4 equal parts. Try 1, 2."),
        ({"moe_intermediate_size": 161}, {"size": 2}, "161 columns of an expert do not divide into 2 equal parts. Try 1."),
        ({}, {"size": 2, "whole": True}, "3 experts do not divide into 2 equal parts. Try 1."),
    ],
    ids=["heads", "groups", "columns", "experts"],
)  # fmt: skip
def test_ranks_of_compressed_attention_name_what_divides(
    tmp_path: Path, monkeypatch, settings: dict, options: dict, words: str
) -> None:
    """Also when memory is short, which is no reason here: more memory would not help."""
    monkeypatch.setattr(rank_build, "RankGroup", lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "config.json").write_text(json.dumps(COMPRESSED | settings))
    ranks = {"tensor_parallel_size": options["size"], "enable_expert_parallel": options.get("whole", False)}
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        LLM(str(tmp_path), **OPTIONS | ranks | {"memory_limit": "1MiB", "load_format": "dummy", "tokenizer": "none"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "num_devices", "mask", "size", "words"),
    [
        ("cuda", 2, None, 4, "4 ranks from cuda:0 on need a GPU each, but torch sees 2 CUDA devices. Use at most 2 ranks"),
        ("cuda:1", 2, None, 2, "2 ranks from cuda:1 on need a GPU each, but torch sees 2 CUDA devices. Use at most 1 ranks"),
        ("cuda", 1, "3", 2, "torch sees 1 CUDA devices (CUDA_VISIBLE_DEVICES=3)"),
        ("auto", 1, "0", 8, "8 ranks from cuda:0 on need a GPU each, but torch sees 1 CUDA devices (CUDA_VISIBLE_DEVICES=0)"),
        ("cuda", 0, "", 2, "0 CUDA devices"),
    ],
)  # fmt: skip
def test_check_devices_refuses_more_ranks_than_gpus(monkeypatch, device, num_devices, mask, size, words) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.delenv(OVERLAPPING, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(ConfigError) as caught:
        check_devices(EngineConfig(device=device, tensor_parallel_size=size))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("model", "rank 1 was to run with the others; its model (a digest of its headers) is 'of other files', and rank 0's is"),
        ("version", "rank 1 was to run with the others; its torch is '1.0', and rank 0's is"),
        ("dtype", "rank 1 was to be planned as rank 0 planned it; dtype is 'bfloat16' in its own plan, and 'float32' in rank 0's"),
    ],
)  # fmt: skip
def test_rank_unlike_first_is_refused(tmp_path: Path, monkeypatch, kind, words) -> None:
    """Real processes, from the model's headers on."""
    monkeypatch.setenv(UNLIKE, kind)
    build_ranks, command = engine_build.build_ranks, (sys.executable, "-P", "-m", "engine.unlike_rank")
    monkeypatch.setattr(
        engine_build, "build_ranks", lambda *reported, **named: build_ranks(*reported, command=command, **named)
    )
    read: list[int] = []
    with pytest.raises(ConfigError) as caught:
        LLM(
            str(make_model(tmp_path / "m")),
            tensor_parallel_size=2,
            on_progress=lambda done, total: read.append(done),
            **OPTIONS,
        )
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert kind == "dtype" or not read, "a weight was read"
    assert not [pid for pid in children_of(os.getpid()) if not is_gone(pid)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("a stranger's", "oversized", "altered") else ())
        for name in NONSENSE
    ],
)
def test_rank_group_malformed_reply_ends_all_ranks(name: str) -> None:
    """The other way round than test_rank_processes.py: rank 0 hears it."""
    group = open_group(name, num_ranks=3)
    try:
        group.expect(RankReported)
        group.send_all(RankPlanned({}))
        with pytest.raises(EngineDeadError) as caught:
            _expect_twice(group)  # of two that are the same, the first is sound
        assert "rank 2" in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        group.end()
    assert all(map(is_gone, group.pids))


def _expect_twice(group: RankGroup) -> None:
    for _ in range(2):
        group.expect(RankLoaded)


def test_accept_ranks_port_in_use_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(launched, "PEER_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(HoldfastError) as caught:
            accept_ranks(Launched(0, 2, "127.0.0.1", port, False))
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_accept_ranks_keeps_first_of_duplicate_rank(monkeypatch) -> None:
    """The second is hung up on, and the first stays."""
    store: dict[str, str] = {}
    is_set = threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            store[key] = value
            is_set.set()

    monkeypatch.setattr(launched, "_store", lambda reported: Store())
    found: list = []
    meeting = threading.Thread(target=lambda: found.extend(accept_ranks(Launched(0, 3, "127.0.0.1", 1, True))))
    meeting.start()
    assert is_set.wait(10)
    port, _, secret = next(iter(store.values())).partition(":")
    connections = []
    life_line = launched._LIFE_LINE
    for number in (1, 1, 2, life_line + 1, life_line + 2):
        connections.append(socket.create_connection(("127.0.0.1", int(port)), 10))
        connections[-1].sendall(launched._HELLO.pack(bytes.fromhex(secret), number, launched.own_place()))
        if len(connections) == 2:
            assert connections[-1].recv(1) == b"", "it was hung up on"
    meeting.join(10)
    assert len(found) == 2
    connections[0].sendall(b"x")
    assert found[0].channel.wait(5.0)
    for peer in found:
        peer.channel.close()
        peer.life_line.close()
    for connection in connections:
        connection.close()

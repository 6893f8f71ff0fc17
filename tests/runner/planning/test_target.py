"""Targets that need no device."""

import pytest

from holdfast.errors import ConfigError
from holdfast.memory.devices import CONTEXT_BYTES, GPUS
from holdfast.planning.target import cpu_target, gpu_target, memory_target

GIB = 1024**3


@pytest.mark.parametrize("key", GPUS)
def test_a_gpu_by_name_is_free(key: str) -> None:
    gpu = GPUS[key]
    target = gpu_target(gpu)
    assert (target.kind, target.name) == ("cuda", gpu.name)
    assert target.total_bytes == target.available_bytes == gpu.total_bytes
    assert target.held_by_others_bytes == 0
    assert target.context_bytes == gpu.context_bytes
    assert target.reason == gpu.source
    assert target.capability == gpu.capability


def test_a_gpu_by_size() -> None:
    target = memory_target("24GiB")
    assert (target.kind, target.total_bytes, target.context_bytes) == ("cuda", 24 * GIB, CONTEXT_BYTES)
    assert target == memory_target(24 * GIB)
    assert "24.00 GiB" in target.name
    assert target.capability is cpu_target().capability is None


@pytest.mark.parametrize("size", ["0", "-1GiB", "110%", "twenty", "", 0, -5, "1" * 30 + "GiB", True, None])
def test_sizes_that_are_none(size) -> None:
    with pytest.raises(ConfigError, match="memory="):
        memory_target(size)


def test_a_host_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.planning.target.available_host_bytes", lambda: 10 * GIB)
    target = cpu_target()
    assert (target.kind, target.name, target.context_bytes) == ("cpu", "cpu", 0)
    assert target.total_bytes == target.available_bytes == 10 * GIB

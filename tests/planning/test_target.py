"""The device that is there: chosen, and what others leave of it."""

import pytest
import torch

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.memory.devices import CONTEXT_BYTES, GPUS, MIB, PLANNED_GPUS
from holdfast.planning.target import (
    BARE_CONTEXT_BYTES,
    MOST_ANONYMOUS_BYTES,
    PROCESS_BYTES,
    PROCESS_ROUNDING_BYTES,
    choose_device,
    cpu_target,
    device_target,
    gpu_target,
    measure_process,
    memory_target,
    tokenizer_bytes,
)

GIB = 1024**3


@pytest.mark.parametrize("key", GPUS)
def test_gpu_target_by_name_has_all_memory_free(key: str) -> None:
    gpu = GPUS[key]
    target = gpu_target(gpu)
    assert (target.kind, target.key) == ("cuda", gpu.key)
    sizes = {other.nominal_gb for other in GPUS.values() if other.name == gpu.name}
    assert target.name == (gpu.name if len(sizes) == 1 else f"{gpu.name} ({gpu.nominal_gb} GB)")
    assert target.total_bytes == target.available_bytes == gpu.total_bytes
    assert target.held_by_others_bytes == 0
    assert target.context_bytes == gpu.context_bytes
    assert target.reason == gpu.source
    assert target.capability == gpu.capability


def test_memory_target_is_gpu_of_given_size() -> None:
    target = memory_target("24GiB")
    assert (target.kind, target.total_bytes, target.context_bytes) == ("cuda", 24 * GIB, CONTEXT_BYTES)
    assert target == memory_target(24 * GIB)
    assert "24.00 GiB" in target.name
    assert target.capability is cpu_target().capability is None


@pytest.mark.parametrize("size", ["0", "-1GiB", "110%", "twenty", "", 0, -5, "1" * 30 + "GiB", True, None])
def test_sizes_that_are_none(size) -> None:
    with raises_code("config.not_a_size", ConfigError, name="memory"):
        memory_target(size)


def test_cpu_target_has_available_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.planning.target.available_host_bytes", lambda: 10 * GIB)
    target = cpu_target()
    assert (target.kind, target.name, target.context_bytes) == ("cpu", "cpu", PROCESS_BYTES)
    assert target.total_bytes == target.available_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("anonymous", "files", "num_bytes", "present"),
    [
        (180 * MIB, 85 * MIB, 304 * MIB, 180 * MIB),
        (180 * MIB, 92 * MIB, 304 * MIB, 180 * MIB),
        (180 * MIB + 1, 92 * MIB, 312 * MIB, 180 * MIB + 1),
        (8 * GIB, 92 * MIB, 448 * MIB, MOST_ANONYMOUS_BYTES),
        (None, 92 * MIB, PROCESS_BYTES, 0),
    ],
    ids=["as on this host", "to the byte", "rounded up", "a caller's arrays are the caller's", "not Linux"],
)
def test_device_target_cpu_counts_its_own_process(monkeypatch, anonymous, files, num_bytes, present) -> None:
    """What it holds has a line; what no file is behind is not available any more, and is ours."""
    monkeypatch.setattr("holdfast.planning.target.GROWTH_BYTES", 32 * MIB)
    assert PROCESS_ROUNDING_BYTES == 8 * MIB
    monkeypatch.setattr("holdfast.planning.target.available_host_bytes", lambda: 10 * GIB)
    monkeypatch.setattr("holdfast.planning.target.anonymous_bytes", lambda: anonymous)
    monkeypatch.setattr("holdfast.planning.target.file_bytes", lambda: files)
    assert measure_process() == (num_bytes, present)
    target = device_target("cpu")
    assert (target.context_bytes, target.present_bytes) == (num_bytes, present)
    assert target.total_bytes == target.available_bytes == 10 * GIB + present


def test_process_with_a_large_vocabulary_is_counted(monkeypatch) -> None:
    """A tokenizer of 262,144 tokens takes more than the bound on what a process may be beside it."""
    monkeypatch.setattr("holdfast.planning.target.anonymous_bytes", lambda: 500 * MIB)
    monkeypatch.setattr("holdfast.planning.target.file_bytes", lambda: 80 * MIB)
    assert tokenizer_bytes(262_144) == 200 * MIB
    assert measure_process(262_144).present_bytes == 500 * MIB
    assert measure_process(32_000).present_bytes == MOST_ANONYMOUS_BYTES + 800 * 32_000


@pytest.fixture
def gpu(monkeypatch):
    """gpu(free, total, ...): a device that says so."""

    def pretend(
        free: int,
        total: int,
        *,
        reserved: int = 0,
        allocated: int = 0,
        has_worked: bool = False,
        name: str = "NVIDIA H200",
    ):
        stats = {
            "reserved_bytes.all.current": reserved,
            "allocated_bytes.all.current": allocated,
            "allocation.all.allocated": int(has_worked),
        }
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats if reserved or has_worked else {})
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        return device_target("cuda:1")

    return pretend


@pytest.mark.parametrize(
    ("device", "num_devices", "chosen"),
    [
        ("auto", 0, ("cpu", "no GPU is there")),
        ("auto", 2, ("cuda:0", "a GPU is there")),
        ("cpu", 2, ("cpu", "given")),
        ("cuda", 1, ("cuda:0", "given")),
        ("cuda:1", 2, ("cuda:1", "given")),
    ],
)
def test_present_device_is_chosen(device, num_devices, chosen, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert choose_device(EngineConfig(device=device)) == chosen


def test_choose_device_on_torch_for_rocm_takes_the_cpu(monkeypatch) -> None:
    """There a GPU of AMD is cuda:0, and (9, 4) would be new enough."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.2.41133")
    device, reason = choose_device(EngineConfig(device="auto"))
    assert device == "cpu"
    assert "AMD GPUs are not supported, and AMD Instinct MI300X is one" in reason
    with raises_code("device.unfit", ConfigError, value="cuda", other="an NVIDIA GPU"):
        choose_device(EngineConfig(device="cuda"))


def test_choose_device_too_old_gpu_takes_cpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    words = "does not run: needs compute capability 8.0, and Tesla T4 has 7.5"
    assert choose_device(EngineConfig()) == ("cpu", f"the GPU that is there {words}")
    with raises_code("device.unfit", ConfigError, value="cuda:0", reason=words):
        choose_device(EngineConfig(device="cuda:0"))


@pytest.mark.parametrize("old", [0, 1, 2])
def test_choose_device_checks_each_gpu_by_itself(monkeypatch, old: int) -> None:
    """One of three is too old: that one is refused, and no other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU number {device}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5) if device == old else (9, 0))
    for index in range(3):
        if index == old:
            with raises_code("device.unfit", ConfigError, value=f"cuda:{index}"):
                choose_device(EngineConfig(device=f"cuda:{index}"))
        else:
            assert choose_device(EngineConfig(device=f"cuda:{index}")) == (f"cuda:{index}", "given")
    assert choose_device(EngineConfig())[0] == ("cpu" if old == 0 else "cuda:0")


@pytest.mark.parametrize(("device", "num_devices"), [("cuda", 0), ("cuda:2", 2), ("cuda:7", 0)])
def test_absent_device_is_refused(device, num_devices, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    with raises_code("device.not_here", ConfigError, value=device, num_devices=num_devices):
        choose_device(EngineConfig(device=device))


def test_device_target_empty_gpu_is_fully_available(gpu) -> None:
    total = GPUS["h200"].total_bytes
    target = gpu(total - BARE_CONTEXT_BYTES, total)
    assert (target.kind, target.name) == ("cuda", "cuda:1")
    assert target.available_bytes == target.total_bytes == total, "the context that asking made is ours"
    assert target.context_bytes == GPUS["h200"].context_bytes
    assert "held by others" not in target.reason


def test_reason_shows_what_others_hold(gpu) -> None:
    target = gpu(100 * GIB - BARE_CONTEXT_BYTES, 140 * GIB)
    assert target.available_bytes == 100 * GIB
    assert target.reason == "40.00 GiB of 140.00 GiB are held by others"


def test_tensors_of_another_engine_are_not_available(gpu) -> None:
    context = GPUS["h200"].context_bytes
    used = 60 * GIB + context
    target = gpu(140 * GIB - used, 140 * GIB, reserved=60 * GIB, allocated=45 * GIB, has_worked=True)
    assert target.held_by_others_bytes == 45 * GIB


def test_noise_does_not_count_as_others(gpu) -> None:
    target = gpu(140 * GIB - BARE_CONTEXT_BYTES - 10 * MIB, 140 * GIB)
    assert "held by others" not in target.reason


def test_never_more_than_there_is(gpu) -> None:
    assert gpu(80 * GIB, 80 * GIB, name="Some GPU").available_bytes == 80 * GIB


def test_device_target_cpu_needs_no_driver(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    assert device_target("cpu").kind == "cpu"


@pytest.mark.gpu
@pytest.mark.alone
def test_device_target_real_gpu_subtracts_held_tensors() -> None:
    before = device_target("cuda:0")
    held = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda:0")
    after = device_target("cuda:0")
    assert before.total_bytes == after.total_bytes
    assert abs(before.available_bytes - after.available_bytes - held.nbytes) < 256 * MIB
    del held
    assert abs(device_target("cuda:0").available_bytes - before.available_bytes) < 256 * MIB, "cached memory is ours"


def test_gpu_target_of_a_shared_name_says_its_memory() -> None:
    small, large = (gpu_target(PLANNED_GPUS[f"rtx3080-laptop-{size}g"]).name for size in (8, 16))
    assert (small[-6:], large[-7:]) == ("(8 GB)", "(16 GB)")

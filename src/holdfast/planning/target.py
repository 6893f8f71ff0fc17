"""Target: the memory of a device that is present or only named, and the choice of a device; imports torch late."""

import os
import platform
from typing import Literal, NamedTuple

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError
from holdfast.memory.devices import (
    CONTEXT_BYTES,
    GPUS,
    LEAST_CAPABILITY,
    MIB,
    PLANNED_GPUS,
    SAME_AS_H200,
    SPLIT_K_BYTES,
    Gpu,
    available_host_bytes,
)
from holdfast.memory.profiler import anonymous_bytes, file_bytes
from holdfast.memory.sizes import format_bytes, parse_bytes


class Target(NamedTuple):
    """One device's memory."""

    kind: Literal["cpu", "cuda"]
    name: str
    """torch's name of a device that is present, such as cuda:0; else its product name."""
    total_bytes: int
    available_bytes: int
    """Bytes that other processes leave free."""
    context_bytes: int
    """Fixed bytes of this process: CUDA and its libraries on a GPU, Python and torch on a host."""
    reason: str
    """Source of the numbers, and bytes of other processes."""
    present_bytes: int = 0
    """The part of the context that existed before the device was used."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None if unknown, and for a CPU."""
    key: str = ""
    """The GPU's key in memory/devices.py; empty for a size, a CPU and a device that is present."""

    @property
    def held_by_others_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


def gpu_target(gpu: Gpu) -> Target:
    """Return a whole GPU of a known kind. Its name has the memory if GPUs of other sizes share the driver's name."""
    sizes = {other.nominal_gb for other in PLANNED_GPUS.values() if other.name == gpu.name}
    name = gpu.name if len(sizes) < 2 else f"{gpu.name} ({gpu.nominal_gb} GB)"
    both = gpu.total_bytes, gpu.total_bytes
    return Target("cuda", name, *both, gpu.context_bytes, gpu.source, 0, gpu.capability, gpu.key)


def memory_target(num_bytes: str | int) -> Target:
    """Return a whole GPU of that size."""
    total_bytes = parse_bytes(num_bytes, "memory")
    name = f"a GPU with {format_bytes(total_bytes)}"
    return Target("cuda", name, total_bytes, total_bytes, CONTEXT_BYTES, f"the size was given; context {SAME_AS_H200}")


def too_old_reason(target: Target) -> str | None:
    """Return why kernels do not run on a GPU; None if they do, or if its capability is unknown."""
    if target.kind != "cuda" or target.capability is None or target.capability >= LEAST_CAPABILITY:
        return None
    needs, has = (".".join(map(str, capability)) for capability in (LEAST_CAPABILITY, target.capability))
    return f"does not run: needs compute capability {needs}, and {target.name} has {has}"


IS_X86 = platform.machine() == "x86_64"
PROCESS_BYTES = (248 if IS_X86 else 288) * MIB
"""Python and torch on a host, without a vocabulary and without what sampling takes. Measured with torch for CPUs on Linux: 244
and 245 MiB after answers (x86-64); 240 after all imports and 264 after an answer (aarch64), and rounding."""
TOKEN_BYTES = 800
"""Bytes of a token in the tokenizers library. Measured with a BPE vocabulary of 262,144 tokens: 752 after the file is read, 792
after an engine has started."""
GROWTH_BYTES = (12 if IS_X86 else 32) * MIB
"""Growth after a plan is made: threads, code and C kernels. Measured: 9 and 13 MiB without what sampling takes (x86-64), 30 with
it (aarch64)."""
MOST_ANONYMOUS_BYTES = 320 * MIB
"""Most that Python and torch take without a vocabulary; the rest of a process belongs to its caller or another engine."""
PROCESS_ROUNDING_BYTES = 8 * MIB
"""Measurements are rounded up to a multiple, so that two starts make the same plan."""


class ProcessBytes(NamedTuple):
    """Host memory of this process beside the engine's own tensors."""

    num_bytes: int
    """Includes what is still to come."""
    present_bytes: int
    """The part that is already taken, without file-backed memory, which the system counts as available."""


AS_MEASURED = ProcessBytes(PROCESS_BYTES, 0)


def cpu_target(process: ProcessBytes = AS_MEASURED) -> Target:
    """Return this host's free memory. A plan without an engine takes a typical process."""
    available = available_host_bytes() + process.present_bytes
    reason = "what this host can give without swapping"
    return Target("cpu", "cpu", available, available, process.num_bytes, reason, process.present_bytes)


def tokenizer_bytes(vocab_size: int) -> int:
    return TOKEN_BYTES * vocab_size


def measure_process(vocab_size: int = 0) -> ProcessBytes:
    """Measure this process after torch is imported and before a weight is read."""
    anonymous, files = anonymous_bytes(), file_bytes()
    if anonymous is None or files is None:
        return AS_MEASURED
    own_bytes = min(anonymous, MOST_ANONYMOUS_BYTES + tokenizer_bytes(vocab_size))
    units = -(-(own_bytes + files + GROWTH_BYTES) // PROCESS_ROUNDING_BYTES)
    return ProcessBytes(units * PROCESS_ROUNDING_BYTES, own_bytes)


BARE_CONTEXT_BYTES = 552_402_944
"""The part of the context that the driver takes before a library or a kernel is loaded; measured on an H200."""
SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Environment that stops cuBLAS from splitting products along K, which it would do by the number of rows."""
NOISE_BYTES = 64 * MIB
"""Memory that an idle device may already lack."""


def choose_device(config: EngineConfig) -> tuple[str, str]:
    """Return torch's name of the device, and why. Raises if it is not there."""
    import torch

    if config.device == "auto":
        if not torch.cuda.is_available():
            return "cpu", "no GPU is there"
        unfit = _unfit_here(0)
        return ("cuda:0", "a GPU is there") if unfit is None else ("cpu", f"the GPU that is there {unfit}")
    if config.device == "cpu":
        return "cpu", "given"
    index = int(config.device.partition(":")[2] or 0)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_devices:
        raise ConfigError("device.not_here", name="device", value=config.device, num_devices=num_devices)
    unfit = _unfit_here(index)
    if unfit is not None:
        other = "an NVIDIA GPU" if torch.version.hip else "a newer GPU"
        raise ConfigError("device.unfit", name="device", value=config.device, reason=unfit, other=other)
    return f"cuda:{index}", "given"


def _unfit_here(index: int) -> str | None:
    """Return why kernels do not run on a GPU of this machine; None if they do."""
    import torch

    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if torch.version.hip:  # torch for ROCm calls AMD GPUs cuda devices, and their capabilities are other numbers
        return f"does not run: AMD GPUs are not supported, and {name} is one (torch is built for ROCm)"
    return too_old_reason(Target("cuda", name, 0, 0, 0, "", capability=capability))


def device_target(device: str, vocab_size: int = 0) -> Target:
    """Return what one engine may use of a device: the free memory, and what this process holds for it.

    `vocab_size` bounds the tokenizer's part of a process on a CPU. Tensors of another engine in this process are not
    available; memory that torch's allocator holds without using is.
    """
    import torch

    if device == "cpu":
        return cpu_target(measure_process(vocab_size))
    where = torch.device(device)
    name = torch.cuda.get_device_name(where)
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == name), None)
    context_bytes = CONTEXT_BYTES if gpu is None else gpu.context_bytes
    free_bytes, total_bytes = torch.cuda.mem_get_info(where)  # this makes the context, if there was none
    stats = torch.cuda.memory_stats(where)
    unused_bytes = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
    # Libraries and kernels come with the first work, so before that only a part of the context is there.
    has_worked = stats.get("allocation.all.allocated", 0) > 0
    is_small = SMALL_WORKSPACE.items() <= os.environ.items()
    worked_bytes = context_bytes - (SPLIT_K_BYTES if is_small else 0)
    present_bytes = worked_bytes if has_worked else min(context_bytes, BARE_CONTEXT_BYTES)
    available_bytes = min(total_bytes, free_bytes + unused_bytes + present_bytes)
    others_bytes = total_bytes - available_bytes
    reason = f"{name}, as its driver says"
    if others_bytes > NOISE_BYTES:
        reason = f"{format_bytes(others_bytes)} of {format_bytes(total_bytes)} are held by others"
    capability = torch.cuda.get_device_capability(where)
    return Target("cuda", device, total_bytes, available_bytes, context_bytes, reason, present_bytes, capability)

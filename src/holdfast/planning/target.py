"""Target: one device's memory, whether it is there or only named; which device to take; no torch until one is asked."""

import os
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
    """A device that is there as torch names it, such as cuda:0; else what it is called."""
    total_bytes: int
    available_bytes: int
    """What others leave of it."""
    context_bytes: int
    """What this process takes of it whatever the model: CUDA and its libraries on a GPU, Python and torch on a host."""
    reason: str
    """Where the numbers come from, and who else holds memory."""
    present_bytes: int = 0
    """What of the context was there before anything was asked of the device."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None where it is unknown, and of a CPU."""
    key: str = ""
    """The GPU's key in memory/devices.py; empty for a size, a CPU and a device that is there."""

    @property
    def held_by_others_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


def gpu_target(gpu: Gpu) -> Target:
    """A GPU of a known kind, all of it free."""
    total_bytes, name = gpu.total_bytes, _sized_name(gpu)
    return Target("cuda", name, total_bytes, total_bytes, gpu.context_bytes, gpu.source, 0, gpu.capability, gpu.key)


def _sized_name(gpu: Gpu) -> str:
    """The driver's name, with the memory if GPUs of other sizes share that name."""
    sizes = {other.nominal_gb for other in PLANNED_GPUS.values() if other.name == gpu.name}
    return gpu.name if len(sizes) < 2 else f"{gpu.name} ({gpu.nominal_gb} GB)"


def memory_target(num_bytes: str | int) -> Target:
    """A GPU of that size, all of it free."""
    total_bytes = parse_bytes(num_bytes, "memory")
    name = f"a GPU with {format_bytes(total_bytes)}"
    return Target("cuda", name, total_bytes, total_bytes, CONTEXT_BYTES, f"the size was given; context {SAME_AS_H200}")


def too_old_words(target: Target) -> str | None:
    """None, or why kernels do not run on a GPU, in words. One whose age is unknown is believed to be new enough."""
    if target.kind != "cuda" or target.capability is None or target.capability >= LEAST_CAPABILITY:
        return None
    needs, has = _dotted(LEAST_CAPABILITY), _dotted(target.capability)
    return f"does not run: needs compute capability {needs}, and {target.name} has {has}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


PROCESS_BYTES = 288 * MIB
"""What Python and torch hold of a host, without a vocabulary: 240 MiB when all is imported, 264 once an engine has answered;
with what an engine adds for later and rounds up. Measured with torch for CPUs on Linux (aarch64)."""
TOKEN_BYTES = 800
"""Bytes of a token in the tokenizers library: its text, its id and its merge, in hash tables. Measured with a BPE vocabulary of
262,144 tokens: 752 after the file is read, 792 after an engine has started."""
GROWTH_BYTES = 32 * MIB
"""Of these, what comes after a plan is made: threads, code that is used then, the C kernels; measured, 30 MiB."""
MOST_ANONYMOUS_BYTES = 320 * MIB
"""Python and torch take no more, vocabulary apart; what a process has beyond is its caller's, or another engine's."""
PROCESS_ROUNDING_BYTES = 16 * MIB
"""What is measured is rounded up to a multiple, so that two starts make one plan."""


class ProcessBytes(NamedTuple):
    """What this process takes of a host beside the engine's own tensors."""

    num_bytes: int
    """With what is still to come."""
    present_bytes: int
    """What of it is taken already; without what files are behind, which the system counts as available."""


AS_MEASURED = ProcessBytes(PROCESS_BYTES, 0)


def cpu_target(process: ProcessBytes = AS_MEASURED) -> Target:
    """This host's memory, as far as nobody else has it. A plan without an engine takes a process as it was measured."""
    available = available_host_bytes() + process.present_bytes
    reason = "what this host can give without pushing anybody out"
    return Target("cpu", "cpu", available, available, process.num_bytes, reason, process.present_bytes)


def tokenizer_bytes(vocab_size: int) -> int:
    """Bytes that a tokenizer takes of a host."""
    return TOKEN_BYTES * vocab_size


def measure_process(vocab_size: int = 0) -> ProcessBytes:
    """This process, once torch is imported and before a weight is read; libraries are files, and cost no page cache twice."""
    anonymous, files = anonymous_bytes(), file_bytes()
    if anonymous is None or files is None:
        return AS_MEASURED
    own_bytes = min(anonymous, MOST_ANONYMOUS_BYTES + tokenizer_bytes(vocab_size))
    units = -(-(own_bytes + files + GROWTH_BYTES) // PROCESS_ROUNDING_BYTES)
    return ProcessBytes(units * PROCESS_ROUNDING_BYTES, own_bytes)


BARE_CONTEXT_BYTES = 552_402_944
"""Of the context, what the driver takes before a library or a kernel is loaded; measured on an H200."""
SMALL_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
"""Without room for partial sums cuBLAS does not split products along K, which it would do by the number of rows; for a whole process."""
NOISE_BYTES = 64 * MIB
"""What a device that nobody uses may already miss."""


def choose_device(config: EngineConfig) -> tuple[str, str]:
    """The device as torch names it, and why; one that is not there raises."""
    import torch

    if config.device == "auto":
        if not torch.cuda.is_available():
            return "cpu", "no GPU is there"
        unfit = _unfit_here(0)
        return ("cuda:0", "a GPU is there") if unfit is None else ("cpu", f"the GPU that is there {unfit}")
    if config.device == "cpu":
        return "cpu", "asked"
    index = int(config.device.partition(":")[2] or 0)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= num_devices:
        raise ConfigError(
            f"device={config.device!r} was asked", f"torch sees {num_devices} CUDA devices here", "try device='auto'"
        )
    unfit = _unfit_here(index)
    if unfit is not None:
        other = "an NVIDIA GPU" if torch.version.hip else "a newer GPU"
        raise ConfigError(f"device={config.device!r} was asked", f"it {unfit}", f"try device='cpu', or {other}")
    return f"cuda:{index}", "asked"


def _unfit_here(index: int) -> str | None:
    """None, or why kernels do not run on a GPU that is there, in words."""
    import torch

    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if torch.version.hip:  # torch for ROCm calls AMD GPUs cuda devices, and their capabilities are other numbers
        return f"does not run: AMD GPUs are not supported, and {name} is one (torch is built for ROCm)"
    return too_old_words(Target("cuda", name, 0, 0, 0, "", capability=capability))


def device_target(device: str, vocab_size: int = 0) -> Target:
    """What is left for one engine on a device: the free memory, and what this process holds and would use for it.

    `vocab_size` bounds what of a process on a CPU may be its tokenizer.
    Tensors of another engine in this process are somebody else's; what torch's allocator keeps without using it is not.
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

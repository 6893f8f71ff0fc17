"""Target: the memory that a plan is made for, whether the device is there or only named; no torch."""

from typing import Literal, NamedTuple

from holdfast.memory.gpus import CONTEXT_BYTES, SAME_AS_H200, Gpu
from holdfast.memory.host import available_host_bytes
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
    """What CUDA and its libraries take of it for this process."""
    reason: str
    """Where the numbers come from, and who else holds memory."""
    present_bytes: int = 0
    """What of the context was there before anything was asked of the device."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None where it is unknown, and of a CPU."""

    @property
    def held_by_others_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


def gpu_target(gpu: Gpu) -> Target:
    """A GPU of a known kind, all of it free."""
    return Target("cuda", gpu.name, gpu.total_bytes, gpu.total_bytes, gpu.context_bytes, gpu.source, 0, gpu.capability)


def memory_target(num_bytes: str | int) -> Target:
    """A GPU of that size, all of it free."""
    total_bytes = parse_bytes(num_bytes, "memory")
    name = f"a GPU with {format_bytes(total_bytes)}"
    return Target("cuda", name, total_bytes, total_bytes, CONTEXT_BYTES, f"the size was given; context {SAME_AS_H200}")


def cpu_target() -> Target:
    """This host's memory, as far as nobody else has it."""
    available = available_host_bytes()
    return Target("cpu", "cpu", available, available, 0, "what this host can give without pushing anybody out")

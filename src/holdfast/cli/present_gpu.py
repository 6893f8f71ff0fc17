"""present_gpu: the first NVIDIA GPU of this machine, from its driver; no torch."""

import shutil
import subprocess
from typing import NamedTuple

from holdfast.memory.devices import PLANNED_GPUS
from holdfast.memory.sizes import format_bytes

DRIVER = "nvidia-smi"
QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SECONDS = 3.0
"""Longest time to wait for the driver; a GPU that hangs must not stop a plan."""
SAME_MEMORY = 0.05
"""Relative tolerance between the driver's memory and the table's."""
MIB = 2**20


class PresentGpu(NamedTuple):
    """One GPU of this machine."""

    name: str
    total_bytes: int

    @property
    def option(self) -> str:
        """Option that plans for it: --gpu with its table key, else --memory."""
        for gpu in PLANNED_GPUS.values():
            if gpu.name == self.name and abs(gpu.total_bytes - self.total_bytes) <= SAME_MEMORY * gpu.total_bytes:
                return f"--gpu {gpu.key}"
        return f"--memory {self.total_bytes // MIB}MiB"


def present_gpu() -> PresentGpu | None:
    """Query the driver; None if it is missing or does not respond."""
    program = shutil.which(DRIVER)
    if program is None:
        return None
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=SECONDS, check=True)
        name, _, mebibytes = done.stdout.splitlines()[0].rpartition(",")
        return PresentGpu(name.strip(), int(mebibytes) * MIB)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def no_device_note() -> str:
    """Say that the plan is for the CPU, and how to plan for the GPU of this machine."""
    words = "this is a plan for the CPU of this machine: neither --gpu nor --memory was given"
    gpu = present_gpu()
    if gpu is None:
        return f"{words}; --gpu h200 plans for a GPU"
    return f"{words}; {gpu.option} plans for its {gpu.name} ({format_bytes(gpu.total_bytes)})"

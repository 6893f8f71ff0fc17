"""Several processes on one GPU at the same time: NVIDIA's Multi-Process Service (MPS) while a block runs; no torch.

    with mps() as environment:  # None where there is none
        subprocess.run(command, env={**os.environ, **environment})

    python benchmarks/mps.py python script.py ...  # the same for one command

Ranks that share a GPU without it take turns by time slices, and each call that waits for a peer takes milliseconds.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MPS_COMMAND = "nvidia-cuda-mps-control"
OVERLAP = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Without it torch refuses symmetric memory among ranks of one GPU."""


def pretended_node(rank: int) -> dict[str, str]:
    """What a process needs in its environment for NCCL to take it for one on a machine of its own, though all share one and its GPU."""
    return {"NCCL_HOSTID": f"node-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """What processes need in their environment to share the GPU, and ranks to share symmetric memory there; None where MPS cannot be had."""
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in places.values():
            Path(place).mkdir()
        environment = {**os.environ, **places}
        try:
            subprocess.run([MPS_COMMAND, "-d"], env=environment, check=True, timeout=20, capture_output=True)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no MPS: {error}", file=sys.stderr)
            yield None
            return
        try:
            yield places | OVERLAP
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    [MPS_COMMAND], input=b"quit\n", env=environment, timeout=20, check=False, capture_output=True
                )


def main() -> None:
    """One command under MPS."""
    with mps() as environment:
        done = subprocess.run(sys.argv[1:], env={**os.environ, **(environment or OVERLAP)}, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

"""Run several processes on one GPU at once, with NVIDIA's Multi-Process Service (MPS) during a block; no torch.

    with mps() as environment:  # None without MPS
        subprocess.run(command, env={**os.environ, **environment})

    python benchmarks/mps.py python script.py ...  # the same for one command

Without MPS, ranks on one GPU take time slices, and each call that waits for a peer takes milliseconds.
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
"""Without this variable torch refuses symmetric memory among ranks of one GPU."""


def pretended_node(rank: int) -> dict[str, str]:
    """Return the environment that makes NCCL treat a process as a separate host, although all share one GPU."""
    return {"NCCL_HOSTID": f"node-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


@contextmanager
def mps() -> Iterator[dict[str, str] | None]:
    """Yield the environment for processes that share the GPU and symmetric memory; None if MPS is not available."""
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
    """Run one command under MPS."""
    with mps() as environment:
        done = subprocess.run(sys.argv[1:], env={**os.environ, **(environment or OVERLAP)}, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()

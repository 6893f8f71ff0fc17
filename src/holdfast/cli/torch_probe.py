"""Facts about torch, CUDA and Triton, as one JSON object on stdout: the process of `holdfast doctor`.

A broken torch or driver may abort the process or hang; only this process is lost then.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from holdfast.kernels.native_library import find_native_build


def probe() -> dict[str, object]:
    """Collect the facts; a failed part becomes an error text."""
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _triton(),
        "num_threads": torch.get_num_threads(),
        **_cuda(),
        **_native(),
    }


def _triton() -> str | None:
    for name in ("triton", "pytorch-triton"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _cuda() -> dict[str, object]:
    """List the GPUs that torch sees, or why it sees none."""
    if torch.version.cuda is None:
        return {"gpus": [], "cuda_problem": None}
    try:
        torch.cuda.init()
        return {"gpus": [_gpu(index) for index in range(torch.cuda.device_count())], "cuda_problem": None}
    except Exception as error:
        return {"gpus": [], "cuda_problem": words(error)}


def _gpu(index: int) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(index)
    gpu: dict[str, object] = {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "total_bytes": properties.total_memory,
        "free_bytes": None,
        "problem": None,
    }
    try:
        gpu["free_bytes"] = torch.cuda.mem_get_info(index)[0]
    except Exception as error:  # full, or in exclusive use
        gpu["problem"] = words(error)
    return gpu


def _native() -> dict[str, object]:
    try:
        build = find_native_build()
        return {"kernel_file": str(build.path), "are_kernels_compiled": build.path.exists(), "kernel_problem": None}
    except OSError as error:
        return {"kernel_file": None, "are_kernels_compiled": False, "kernel_problem": words(error)}


def words(error: BaseException) -> str:
    """Shorten an error to one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))

"""A device that has failed: it does nothing more for this process, and some memory cannot even be let go of.

When pinned or symmetric memory goes, torch asks the device whether it is done with it. The answer is an error, which is thrown where
nothing may be thrown, and ends the process. Such memory stays with the process instead: nobody has it again before that goes.
"""

import ctypes

import torch


def has_failed(device: torch.device) -> bool:
    """As far as is known without waiting for what still runs. A CPU never fails, nor a GPU that this process has not used yet."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        if not torch.cuda.is_current_stream_capturing():  # where it is, asking would be an error by itself
            torch.cuda.current_stream(device).query()
    except RuntimeError:
        return True
    return False


def keep_with_process(held: object) -> None:
    """It is never collected, nor is what it holds: not at the interpreter's end either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

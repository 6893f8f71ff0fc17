"""Findings from a child process to the benchmark that started it, and the GPU's used memory; the standard library alone.

A child may hold another engine with packages of its own versions, so this module imports none.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def keep(findings: Mapping[str, object], result: Path | None) -> None:
    """Save the findings so far, in case the time runs out."""
    if result is not None:
        partial = result.with_suffix(".partial")
        partial.write_text(json.dumps(findings))
        partial.rename(result.with_suffix(".kept"))


def leave(findings: Mapping[str, object], result: Path) -> None:
    """Send findings to the parent process, and wait until it has measured."""
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(findings))
    partial.rename(result)
    sys.stdin.read()


def smi(field: str) -> str | None:
    """Query nvidia-smi for the first GPU, without a CUDA context; None if there is no GPU."""
    command = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "--id=0")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None if done.returncode == 0 else None


def used_bytes() -> int | None:
    """Return the used bytes of the first GPU, over all processes, to the MiB."""
    mebibytes = smi("memory.used")
    return int(mebibytes) * 2**20 if mebibytes is not None and mebibytes.isdecimal() else None

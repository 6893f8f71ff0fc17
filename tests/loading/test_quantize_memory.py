"""Host memory of a conversion, measured in a process of its own: a constant, whatever the model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.loading.convert import TARGETS
from holdfast.memory.profiler import anonymous_bytes

PROBE = Path(__file__).with_name("quantize_memory_probe.py")
MIB = 2**20
BOUND_BYTES = 64 * MIB
"""Measured: 1 to 26 MiB, of which 8 are a step of rows in float32 and as stored."""
SOME = ("nvfp4",)
"""It holds the most, and reads every row twice."""


@pytest.mark.skipif(anonymous_bytes() is None, reason="the system does not tell anonymous memory")
@pytest.mark.parametrize("targets", [SOME, pytest.param(TARGETS, marks=pytest.mark.slow)], ids=["some", "every"])
def test_host_memory_of_a_conversion_is_a_constant(tmp_path, targets):
    """80 MiB of weights in bfloat16, on a CPU."""
    ran = subprocess.run(
        [sys.executable, str(PROBE), str(tmp_path), *targets],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert tuple(line["target"] for line in found) == tuple(targets)
    for line in found:
        assert line["read"] > 72 * MIB
        assert line["over"] < BOUND_BYTES, f"{line['target']}: {line['over'] / MIB:.1f} MiB"
    assert max(line["over"] for line in found) > 4 * MIB, "no step of rows was seen"

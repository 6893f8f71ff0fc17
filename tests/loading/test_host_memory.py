"""Host memory of loads, measured in a process of their own: no more than is planned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.memory.profiler import anonymous_bytes
from holdfast.quant.weight_schemes import UNQUANTIZED, WEIGHT_SCHEMES

PROBE = Path(__file__).with_name("host_memory_probe.py")
MIB = 2**20
BOUND_BYTES = 64 * MIB
"""Measured: 14 MiB as stored, 28 to 36 MiB quantized, of which 12 are chunks and the rest is what plain torch works with."""


EVERY = (UNQUANTIZED, *WEIGHT_SCHEMES)
SOME = (UNQUANTIZED, "fp8")
"""As stored, and codes with scales."""


@pytest.mark.slow
@pytest.mark.skipif(anonymous_bytes() is None, reason="the system does not tell anonymous memory")
@pytest.mark.parametrize("names", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_host_memory_of_a_load_is_weights_plus_a_constant(tmp_path, names):
    """300 MB in an order of their own over three files, on a CPU."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, str(PROBE), str(tmp_path), *names],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = {line["name"]: line for line in map(json.loads, ran.stdout.splitlines())}
    assert tuple(found) == names
    for name, line in found.items():
        assert line["read"] > 280 * MIB
        assert line["over"] < BOUND_BYTES, f"{name}: {line['over'] / MIB:.1f} MiB over the final weights"
        assert line["over"] > 8 * MIB, f"{name}: the chunks themselves were not seen"
        assert line["planned"] < BOUND_BYTES
    assert found["fp8"]["final"] < 0.65 * found[UNQUANTIZED]["final"]

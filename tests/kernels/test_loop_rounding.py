"""Large tiles round a block of tokens alike whether or not it is masked: which it is, follows from where a prompt is cut."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "loop_rounding.py"


@pytest.mark.slow
@pytest.mark.parametrize("softcap", ["plain_scores", "softcap"])
@pytest.mark.parametrize("pages", ["half", "quantized"])
def test_clear_and_masked_blocks_are_contracted_alike(pages, softcap):
    """A product that becomes one instruction with a sum rounds once, and twice where something stands between them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), pages, softcap]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    clear, masked = json.loads(done.stdout)
    assert clear == masked
    assert clear["fma"] > 16, f"{clear}: these are not the loops over tokens"

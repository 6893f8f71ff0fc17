"""memory_limit bounds the whole process on a host: Python and torch are an owner, and the peak stays within it."""

import json
import subprocess
import sys

import pytest

from holdfast.memory.profiler import anonymous_bytes

MIB = 2**20
LIMIT_MIB = 1100
SLACK_MIB = 16
"""What a measurement of resident memory may be off by."""
SCRIPT = f"""
import json
from holdfast import LLM, SamplingParams
from holdfast.memory.profiler import named_bytes
llm = LLM(memory_limit="{LIMIT_MIB}MiB", max_model_len=1024, max_num_batched_tokens=512, max_num_seqs=4)
llm.generate(["The sea is " * 40] * 2, SamplingParams(max_tokens=2, temperature=0.8, top_p=0.9, seed=1))
rows = {{row.owner: [row.planned_bytes, row.held_bytes] for row in llm.memory.rows}}
print(json.dumps({{"rows": rows, "planned": llm.memory.planned_bytes, "peak": named_bytes('VmHWM')}}))
"""


@pytest.mark.skipif(anonymous_bytes() is None, reason="the system does not tell what is resident")
def test_memory_limit_bounds_peak_of_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    planned, held = found["rows"]["python and torch"]
    assert planned == held
    assert 100 * MIB < planned < 700 * MIB
    assert found["planned"] <= LIMIT_MIB * MIB
    assert found["peak"] <= (LIMIT_MIB + SLACK_MIB) * MIB
    assert found["peak"] >= 0.85 * found["planned"], "and the plan is no wild guess"

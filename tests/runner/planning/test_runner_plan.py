"""The door to planning: a plan, or a refusal whose advice works; and no torch behind it."""

import json
import subprocess
import sys

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import MemoryPlanError
from holdfast.planning.plan import RunnerPlan, plan_runner, plan_unfitting
from runner.plan_cases import A100, H200, HOST, RTX4090, blueprint


def test_a_plan() -> None:
    plan = plan_runner(EngineConfig(), blueprint("Qwen3-8B"), H200)
    assert isinstance(plan, RunnerPlan)
    assert plan.kv_tokens > 700_000
    coded = plan_runner(EngineConfig(kv_cache_dtype="fp8"), blueprint("Qwen3-8B"), H200)
    assert coded.kv_tokens > 1.9 * plan.kv_tokens
    assert coded.not_in_this_version == ()


@pytest.mark.parametrize(
    ("name", "target", "options", "do"),
    [
        ("Qwen3-32B", A100, {"max_model_len": 40960}, r"raise memory_utilization to 0\.\d\d, which fits"),
        ("Llama-3.1-8B", RTX4090, {"max_model_len": 131072}, r"lower max_model_len to \d+, which fits"),
        ("Qwen3-32B", RTX4090, {}, r"keep weights in mxfp4, which fits"),
        ("Llama-3.1-70B", RTX4090, {}, r"take b200, which fits"),
        (
            "Qwen3-0.6B",
            HOST,
            {"memory_limit": "2GiB", "max_model_len": 2048},
            r"raise memory_limit to \d+MiB, which fits",
        ),
        (
            "DeepSeek-R1",
            H200,
            {},
            r"take a smaller model; to share it among 8 GPUs would fit, but tensor parallelism is not",
        ),
    ],
)
def test_a_refusal_ends_with_the_smallest_change(name, target, options, do) -> None:
    with pytest.raises(MemoryPlanError, match=do) as caught:
        plan_runner(EngineConfig(**options), blueprint(name), target)
    error = caught.value
    assert error.args == (error.asked, error.has, error.do)
    assert error.table is not None, "the table comes along"
    assert error.table.short_bytes > 0
    plan = plan_unfitting(EngineConfig(**options), blueprint(name), target)
    assert plan.memory.peak_bytes - plan.memory.budget_bytes == error.table.short_bytes


def test_pages_alone_that_are_too_few() -> None:
    with pytest.raises(MemoryPlanError, match="leave out kv_cache_memory, which fits"):
        plan_runner(EngineConfig(kv_cache_memory="1MiB", max_model_len=4096), blueprint("Qwen3-8B"), H200)


def test_planning_imports_no_torch() -> None:
    code = """
import json, sys
from holdfast.config import EngineConfig
from holdfast.errors import MemoryPlanError
from holdfast.loading.blueprints import open_blueprint
from holdfast.memory.devices import find_gpu
from holdfast.planning.alternatives import alternatives
from holdfast.planning.plan import plan_runner
from holdfast.planning.target import cpu_target, gpu_target
for name in ("Qwen3-32B", "DeepSeek-V4-Pro", "Qwen1.5-MoE-A2.7B"):
    for target in (gpu_target(find_gpu("h200")), cpu_target()):
        try:
            plan_runner(EngineConfig(), open_blueprint(name), target)
        except MemoryPlanError:
            pass
        alternatives(EngineConfig(), open_blueprint(name), target)
print(json.dumps([name for name in ("torch", "triton", "numpy", "transformers") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []

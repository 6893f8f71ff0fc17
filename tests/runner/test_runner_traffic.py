"""The steps of the GPU's tests, on a CPU: they are legal, the same each time, and rows do not see their company."""

import pytest

from kernels.exactness import require_native, same_bits
from runner import gpu_traffic
from runner.gpu_traffic import MODELS, build_dummy, recorded, traffic
from runner.test_runner_gpu import check_companies

ON_CPU = {"device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("windows", "shared", "gpt_oss", "gemma3")))
        for name in MODELS
    ],
)
def test_the_same_seed_takes_the_same_steps_to_the_same_bits(tmp_path, name):
    require_native()
    built = build_dummy(tmp_path, name, **ON_CPU)
    runs, sizes = [], []
    for _ in range(2):
        with recorded(built) as kept:
            for step in traffic(built).steps(60, asks_prompts=True):
                assert 0 < step.num_tokens <= built.runner.limits.max_num_batched_tokens
                sizes.append(len(step.scheduled))
                built.runner.execute(step)
        runs.append(kept)
    assert len(runs[0]) > 30
    assert len(set(sizes)) > 5
    for left, right in zip(*runs, strict=True):
        assert bool(left.isfinite().all())
        assert same_bits(left, right)


def test_companies_on_a_cpu(tmp_path, monkeypatch):
    require_native()
    monkeypatch.setattr(gpu_traffic, "SMALL", gpu_traffic.SMALL | ON_CPU)
    check_companies(tmp_path, "float32", enforce_eager=True)

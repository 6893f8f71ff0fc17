"""The steps of the GPU's tests, on a CPU: they are legal, the same each time, and rows do not see their company."""

import pytest

from kernels.exactness import require_native, same_bits
from runner import gpu_traffic
from runner.gpu_traffic import MODELS, build_dummy, recorded, traffic
from runner.test_runner_gpu import ALL_CODED, assert_coded, check_companies, check_free_pages

ON_CPU = {"device": "cpu", "dtype": "float32"}


AT_ONCE = ("qwen3", "experts")
"""For whole steps on a CPU: those of the others are slow."""
SHORT = {"max_num_batched_tokens": 64, "max_model_len": 400}
"""What a step of wide latents multiplies is nearly all that it costs; contexts outgrow what rows of a sparse model attend to."""


@pytest.mark.parametrize(
    ("name", "num_steps", "sizes"),
    [
        *(pytest.param(name, 60, {}, marks=pytest.mark.slow, id=name) for name in MODELS),
        *(pytest.param(name, 30, {}, id=f"few of {name}") for name in AT_ONCE),
        pytest.param("latent", 12, SHORT, id="short latent"),
        pytest.param("sparse", 12, SHORT, marks=pytest.mark.slow, id="short sparse"),
    ],
)
def test_traffic_same_seed_gives_same_steps_and_bits(tmp_path, name, num_steps, sizes):
    require_native()
    built = build_dummy(tmp_path, name, **ON_CPU, **sizes)
    runs, counts = [], []
    for _ in range(2):
        with recorded(built) as kept:
            for step in traffic(built).steps(num_steps, asks_prompts=True):
                assert 0 < step.num_tokens <= built.runner.limits.max_num_batched_tokens
                counts.append(len(step.scheduled))
                built.runner.execute(step)
        runs.append(kept)
    assert len(runs[0]) > num_steps // 2
    assert len(set(counts)) > 5
    for left, right in zip(*runs, strict=True):
        assert bool(left.isfinite().all())
        assert same_bits(left, right)


@pytest.mark.parametrize(
    "kv_format",
    ["turboquant_k8v4", pytest.param("turboquant_4bit_nc", marks=pytest.mark.slow), "turboquant_3bit_nc"],
)
def test_coded_pages_on_a_cpu_ignore_nan_in_free_pages(tmp_path, kv_format):
    options = {"kv_cache_dtype": kv_format, **ALL_CODED}
    built = build_dummy(tmp_path, "qwen3", **ON_CPU, **SHORT, **options)
    assert_coded(built, options)
    check_free_pages(built, 16)


def test_batch_invariance_check_passes_on_cpu(tmp_path, monkeypatch):
    require_native()
    monkeypatch.setattr(gpu_traffic, "SMALL", gpu_traffic.SMALL | ON_CPU)
    counts = (*range(10), 15, 16, 17, 31, 32, 33)
    check_companies(tmp_path, "float32", enforce_eager=True, counts=counts, longest=300)

"""Speed of a plan: ranges and their assumptions, what makes a step slower or faster, ranks, and a CPU against its record."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.memory.cache_folder import CACHE_VARIABLE
from holdfast.memory.device_rates import Measured, Rates, cpu_identity, sheet_rates, write_measured
from holdfast.memory.devices import GPUS
from holdfast.planning.exchange_time import exchange_seconds, sum_seconds
from holdfast.planning.fit import fit_runner
from holdfast.planning.resolve import PlanRequest, resolve
from holdfast.planning.speed import (
    SPEED_CONTEXT,
    Range,
    SpeedEstimate,
    decode_rate,
    estimate_speed,
    find_device_speed,
    first_token_seconds,
)
from holdfast.planning.step_time import StepLoad, kv_reads, step_seconds
from holdfast.planning.target import Target, gpu_target, memory_target
from planning.plan_cases import H200, HOST, RTX4090, declared, plan_request

RECORDS = Path(__file__).parent.parent.parent / "benchmarks" / "records"
RATES = sheet_rates("h200")
NEOVERSE = Rates("cpu", 22.7e9, 66.7e9, link="host")
"""Two Neoverse-N1 cores: the best of several runs of what `holdfast doctor --measure` times, 2026-11-18."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No measurement of this machine has a say."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def estimate(name: str = "Qwen3-8B", target: Target = H200, **options: object) -> SpeedEstimate:
    request = plan_request(name, target, **options)
    found = estimate_speed(fit_runner(request))
    assert found is not None, f"{name} on {target.name}"
    return found


def seconds(load: StepLoad, name: str = "Qwen3-8B", rates: Rates = RATES, **options: object) -> float:
    return step_seconds(resolve(plan_request(name, H200 if rates.kind == "cuda" else HOST, **options)), rates, load)


def test_range_middle_is_as_far_from_both_bounds() -> None:
    assert Range(2.0, 8.0).middle == 4.0


def test_estimate_of_an_h200_has_ranges_and_an_assumption() -> None:
    found = estimate()
    assert found.one_stream.low < 230 < found.one_stream.high
    assert found.batch_size == 256
    assert found.batch.middle > 20 * found.one_stream.middle
    assert found.first_token_seconds.low < 0.046 < found.first_token_seconds.high
    assert found.assumption == "contexts of 2,048 tokens; 4,370 GB/s and 790 TFLOP/s as measured on an H200"


def test_estimate_of_another_gpu_is_wider_and_says_why() -> None:
    known, other = estimate().one_stream, estimate(target=RTX4090)
    assert other.one_stream.high / other.one_stream.low > 1.2 * known.high / known.low
    assert "data sheet's 1,008 GB/s, not measured on this GPU" in other.assumption


@pytest.mark.parametrize("target", [memory_target("64GiB"), gpu_target(GPUS["v100-32g"])], ids=["size", "too old"])
def test_estimate_without_rates_is_none(target: Target) -> None:
    request = plan_request("Qwen3-0.6B", target)
    assert estimate_speed(fit_runner(request)) is None


def test_find_device_speed_knows_every_supported_gpu() -> None:
    for gpu in GPUS.values():
        assert (find_device_speed(gpu_target(gpu)) is None) == gpu.is_too_old, gpu.key


def test_batch_size_is_what_fits_at_the_context() -> None:
    assert estimate(max_num_seqs=7).batch_size == 7
    small = estimate("Qwen3-8B", RTX4090)
    fit = fit_runner(plan_request("Qwen3-8B", RTX4090))
    assert small.batch_size == fit.kv_tokens // SPEED_CONTEXT
    windows, whole = estimate("gpt-oss-20b", RTX4090), fit_runner(plan_request("gpt-oss-20b", RTX4090))
    assert whole.memory.num_pages * 16 // (2 * SPEED_CONTEXT) < windows.batch_size
    short = estimate(max_model_len=512)
    assert short.assumption.startswith("contexts of 512 tokens")


@pytest.mark.parametrize("name", ["Qwen3-8B", "gpt-oss-20b", "gemma-3-12b-it"])
def test_batch_is_of_sequences_whose_groups_all_fit(name: str) -> None:
    """Counted by hand: pages of 16 tokens of every group, those of a window as many as it touches."""
    request = plan_request(
        name, RTX4090, max_model_len=4096, quantization="mxfp4" if name.startswith("gemma") else None
    )
    fit, found = fit_runner(request), estimate_speed(fit_runner(request))
    pages = fit.resolved.pages()
    assert found is not None
    assert pages is not None
    own = 0
    for group in pages.groups:
        tokens = SPEED_CONTEXT if group.window is None else min(SPEED_CONTEXT, group.window + group.page_tokens)
        own += -(-tokens // group.page_tokens)
    assert abs(found.batch_size - fit.memory.num_pages // own) <= fit.memory.num_pages // own // 20
    assert len(pages.groups) > 1 or found.batch_size == fit.kv_tokens // SPEED_CONTEXT


def test_batch_has_one_sequence_at_least() -> None:
    """A context of the speeds that has no room beside itself still has a speed."""
    request = plan_request("Qwen3-8B", H200, kv_cache_memory=8 * 16 * 147456, max_num_seqs=4)
    fit = fit_runner(request)
    assert fit.kv_tokens == fit.resolved.limits.max_model_len == 128
    found = estimate_speed(replace(fit, resolved=fit.resolved.with_max_model_len(4096, "longer than it has")))
    assert found is not None
    assert found.batch_size == 1


@pytest.mark.parametrize("target", [H200, RTX4090, HOST], ids=lambda target: target.name)
def test_bounds_are_shares_of_what_is_predicted(target: Target) -> None:
    """Rates of one stream and of a batch by both shares, seconds by their inverse."""
    request = plan_request("Qwen3-0.6B", target)
    fit, device = fit_runner(request), find_device_speed(target)
    found = estimate_speed(fit)
    assert found is not None
    assert device is not None
    for rates, batch in ((found.one_stream, 1), (found.batch, found.batch_size)):
        rate = decode_rate(fit.resolved, device.rates, batch, SPEED_CONTEXT)
        assert rates == pytest.approx((device.slowest * rate, device.fastest * rate))
    seconds = first_token_seconds(fit.resolved, device.rates, SPEED_CONTEXT)
    assert found.first_token_seconds == pytest.approx((seconds / device.fastest, seconds / device.slowest))
    assert found.first_token_seconds.low < found.first_token_seconds.high


def test_estimate_speed_every_assumption_lowers_low_bound() -> None:
    """0.8 of the low bound for ranks, and 0.8 of that without graphs; the high bound stays."""

    def shares(**options: object) -> tuple[float, float]:
        request = plan_request("Qwen3-8B", RTX4090, **options)
        fit, device = fit_runner(request), find_device_speed(RTX4090)
        found = estimate_speed(fit)
        assert found is not None
        assert device is not None
        rate = decode_rate(fit.resolved, device.rates, 1, SPEED_CONTEXT)
        return found.one_stream.low / rate, found.one_stream.high / rate

    assert shares() == pytest.approx((0.65, 1.15))
    assert shares(tensor_parallel_size=2) == pytest.approx((0.8 * 0.65, 1.15))
    assert shares(tensor_parallel_size=2, enforce_eager=True) == pytest.approx((0.64 * 0.65, 1.15))


def test_kept_measurement_of_a_gpu_is_used() -> None:
    gpu = GPUS["rtx4090"]
    write_measured([Measured(gpu.name, gpu.total_bytes, 0.5e12, 100e12, "2026-11-18")])
    found = estimate(target=RTX4090)
    assert "500 GB/s and 100 TFLOP/s as holdfast doctor measured on 2026-11-18" in found.assumption
    assert found.one_stream.middle < 33


def test_measurement_of_a_gpu_with_other_memory_is_not_taken() -> None:
    """GPUs of one name come with more or less memory; drivers keep a little of it."""
    gpu = GPUS["rtx4090"]
    for share, is_taken in ((1.2, False), (0.5, False), (0.97, True)):
        rates = Measured(gpu.name, int(share * gpu.total_bytes), 0.5e12, 100e12, "2026-11-18")
        found = find_device_speed(RTX4090, (rates._replace(device="another"), rates))
        assert found is not None
        assert ("as holdfast doctor measured" in found.source) is is_taken, share


def test_cpu_without_a_measurement_asks_for_one() -> None:
    found = estimate("Qwen3-0.6B", HOST)
    assert "holdfast doctor --measure" in found.assumption
    assert found.one_stream.high > 4 * found.one_stream.low


def test_kept_measurement_of_this_cpu_is_used() -> None:
    write_measured([Measured(cpu_identity(), 0, 100e9, 900e9, "2026-11-18")])
    found = estimate("Qwen3-0.6B", HOST)
    assert "100 GB/s and 900 GFLOP/s as holdfast doctor measured on 2026-11-18" in found.assumption
    assert 25 < found.one_stream.middle < 45  # 2.4 GB of float32


@pytest.mark.parametrize(("batch", "measure"), [(1, "decode, batch 1"), (8, "decode, batch 8")])
def test_cpu_decode_is_within_25_percent_of_its_record(batch: int, measure: str) -> None:
    rows = json.loads((RECORDS / "neoverse-n1-2026-11-15-latency.json").read_text())["results"]
    measured = next(row["values"]["holdfast"] for row in rows if row["measure"] == measure)
    resolved = resolve(plan_request("SmolLM2-135M", HOST))
    assert decode_rate(resolved, NEOVERSE, batch, 128) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("prompt", [512, 2048])
def test_cpu_prefill_is_within_25_percent_of_its_record(prompt: int) -> None:
    rows = json.loads((RECORDS / "neoverse-n1-2026-11-15-latency.json").read_text())["results"]
    rate = next(row["values"]["holdfast"] for row in rows if row["measure"] == f"prefill, {prompt} tokens")
    resolved = resolve(plan_request("SmolLM2-135M", HOST))
    assert first_token_seconds(resolved, NEOVERSE, prompt) == pytest.approx(prompt / rate, rel=0.25)


SLOWER = [
    ("rows", StepLoad(1, 512), StepLoad(2, 512), {}, {}),
    ("many rows", StepLoad(64, 512), StepLoad(128, 512), {}, {}),
    ("context", StepLoad(8, 512), StepLoad(8, 32768), {}, {}),
    ("prompt rows", StepLoad(8, 512), StepLoad(8, 512, 512), {}, {}),
    ("tokens before a prompt's chunk", StepLoad(0, 0, 512), StepLoad(0, 0, 512, prompt_context=8192), {}, {}),
    ("wider weights", StepLoad(1, 512), StepLoad(1, 512), {"quantization": "fp8"}, {}),
    ("wider pages", StepLoad(32, 8192), StepLoad(32, 8192), {"kv_cache_dtype": "fp8"}, {}),
    ("no graphs", StepLoad(1, 512), StepLoad(1, 512), {}, {"enforce_eager": True}),
    ("batch invariance", StepLoad(1, 512), StepLoad(1, 512), {}, {"batch_invariant": True}),
]


@pytest.mark.parametrize(
    ("why", "fast", "slow", "fast_options", "slow_options"), SLOWER, ids=lambda part: str(part)[:20]
)
def test_step_with_more_to_do_takes_longer(
    why: str, fast: StepLoad, slow: StepLoad, fast_options: dict, slow_options: dict
) -> None:
    assert seconds(fast, **fast_options) < seconds(slow, **slow_options), why


def test_distinct_experts_decide_what_a_step_reads() -> None:
    name = "Qwen3-30B-A3B"
    few, uniform = StepLoad(64, 512, distinct_experts=16), StepLoad(64, 512)
    assert seconds(few, name) < 0.5 * seconds(uniform, name)
    assert seconds(uniform, name) == pytest.approx(seconds(StepLoad(64, 512, distinct_experts=125.94), name), rel=1e-3)


def test_windows_bound_what_decode_rows_read() -> None:
    resolved = resolve(plan_request("gemma-3-27b-it"))
    windows = {read.most_rows: read.num_layers for read in kv_reads(resolved)}
    assert windows == {1024: 52, None: 10}
    inside = step_seconds(resolved, RATES, StepLoad(8, 1024))
    beyond = step_seconds(resolved, RATES, StepLoad(8, 8192))
    whole = seconds(StepLoad(8, 8192), "Qwen3-32B") - seconds(StepLoad(8, 1024), "Qwen3-32B")
    assert beyond - inside < 0.4 * whole


def test_index_bounds_latents_that_are_attended_to() -> None:
    resolved = resolve(plan_request("DeepSeek-V3.2", kv_cache_dtype="fp8_ds_mla"))
    latents, index = kv_reads(resolved)
    assert latents.attended(100_000) == 2048
    assert index.attended(100_000) == 100_000
    assert index.row_bytes == 132


def test_entries_of_compressed_attention_stand_for_their_tokens() -> None:
    resolved = resolve(plan_request("DeepSeek-V4-Flash", kv_cache_dtype="fp8"))
    attended = {read.attended(131_072) for read in kv_reads(resolved)}
    assert attended >= {128.0, 512.0, 1024.0, 32_768.0}


def test_prompt_rows_attend_to_half_of_a_square() -> None:
    (read,) = kv_reads(resolve(plan_request("Qwen3-8B")))
    assert read.attended_by_prompt(1000) == 500_000
    window = read._replace(most_rows=100)
    assert window.attended_by_prompt(1000) == sum(min(row, 100) for row in range(1000)) + 50


def test_smaller_steps_do_not_read_a_prompt_sooner() -> None:
    whole, parts = (
        first_token_seconds(resolve(plan_request("Qwen3-8B", max_num_batched_tokens=rows)), RATES, 2048)
        for rows in (2048, 256)
    )
    assert whole < parts < 1.6 * whole


def test_cpu_codes_cost_no_less_than_float32() -> None:
    load = StepLoad(1, 128)
    plain, codes = (seconds(load, "Qwen3-0.6B", NEOVERSE, quantization=scheme) for scheme in ("none", "int8"))
    assert codes >= plain


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("batch", "engine"), [(1, "reduce (fused decode)"), (128, "reduce")])
def test_ranks_are_within_20_percent_of_their_prediction(size: int, batch: int, engine: str) -> None:
    rows = json.loads((RECORDS / "predicted-2026-11-17-ranks.json").read_text())["results"]
    expected = next(
        row["values"][engine] for row in rows if row["measure"] == f"Qwen3-32B, batch {batch}, tensor {size}"
    )
    resolved = resolve(plan_request("Qwen3-32B", tensor_parallel_size=size))
    assert decode_rate(resolved, RATES, batch, 553) == pytest.approx(expected, rel=0.2)


def test_estimate_with_guessed_parts_is_wider_and_says_so() -> None:
    alone, ranks = estimate("Qwen3-32B"), estimate("Qwen3-32B", tensor_parallel_size=2)
    assert ranks.assumption.endswith("exchange of 2 ranks over NVLink as published for H200")
    assert ranks.one_stream.high / ranks.one_stream.low > alone.one_stream.high / alone.one_stream.low
    assert estimate("Qwen3-8B", RTX4090, tensor_parallel_size=2).assumption.endswith("over PCIe, assumed")
    assert estimate(enforce_eager=True).assumption.endswith("launches without graphs, assumed")


def test_stages_add_up_for_one_stream_and_share_a_batch() -> None:
    config, model = EngineConfig.from_options(pipeline_parallel_size=2), declared("Qwen3-32B")
    mesh = Mesh(num_stages=2, layers=(0, 32))
    resolved = resolve(PlanRequest(config, model, H200, mesh))
    alone = resolve(plan_request("Qwen3-32B"))
    one, both = (decode_rate(settled, RATES, 1, 512) for settled in (resolved, alone))
    assert 0.9 * both < one < 1.05 * both
    assert decode_rate(resolved, RATES, 128, 512) > 1.05 * decode_rate(alone, RATES, 128, 512)
    staged, whole = (first_token_seconds(settled, RATES, 2048) for settled in (resolved, alone))
    assert staged == pytest.approx(whole, rel=0.1)


def test_prompt_through_experts_multiplies_by_those_chosen() -> None:
    """3B of 30B parameters are active."""
    load = StepLoad(0, 0, 8192)
    assert seconds(load, "Qwen3-30B-A3B") < seconds(load, "Qwen3-8B")


def test_exchange_grows_with_ranks_rows_and_slower_links() -> None:
    mesh = Mesh(tensor_size=2)
    fast = exchange_seconds(mesh, 32, 64, 8192, "nvlink")
    assert 0 == exchange_seconds(Mesh(), 32, 64, 8192, "nvlink") < fast
    assert fast < exchange_seconds(mesh, 32, 64, 8192, "pcie") < exchange_seconds(mesh, 32, 64, 8192, "host")
    assert fast < exchange_seconds(replace(mesh, is_exact=True), 32, 64, 8192, "nvlink")
    assert sum_seconds(65536, 2) < sum_seconds(65536, 3) == sum_seconds(65536, 4) < sum_seconds(65536, 16)


def test_estimate_speed_covers_every_planned_model() -> None:
    target = gpu_target(GPUS["gb300"])._replace(total_bytes=2**42, available_bytes=2**42)
    for name in ("Mixtral-8x7B-v0.1", "gemma-2-9b", "Kimi-K2-Instruct", "OPT-125m", "DeepSeek-V3"):
        found = estimate(name, target)
        assert 0 < found.one_stream.low < found.batch.high

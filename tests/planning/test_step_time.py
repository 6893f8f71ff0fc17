"""Seconds of a step against the same sum by hand: every term of every kind of model, each input moved alone."""

from collections import Counter
from collections.abc import Callable
from math import ceil, hypot

import pytest

from holdfast.distributed.mesh import Mesh
from holdfast.memory.device_rates import Rates
from holdfast.models.catalogue import CATALOGUE
from holdfast.planning.exchange_time import exchange_seconds, sum_seconds
from holdfast.planning.resolve import resolve
from holdfast.planning.speed import decode_rate, first_token_seconds
from holdfast.planning.step_time import KvRead, StepLoad, step_seconds
from planning.plan_cases import H200, HOST, plan_request

READ, FLOPS, FP8 = 1e12, 1e14, 3e14
GPU = Rates("cuda", READ, FLOPS, FP8, "nvlink", 132)
CPU = Rates("cpu", 2e10, 5e10, link="host")
FIXED = 60e-6


def seconds(name: str, load: StepLoad, rates: Rates = GPU, **options: object) -> float:
    return step_seconds(resolve(plan_request(name, HOST if rates.kind == "cpu" else H200, **options)), rates, load)


def product(num_bytes: float, share: float, flops: float, flops_per_second: float = FLOPS) -> float:
    """Return seconds of weights that a step reads at a share of the rate and multiplies by at 0.9 of it."""
    return hypot(num_bytes / (share * READ), flops / (0.9 * flops_per_second))


# Qwen3-8B: 36 layers of 32 query heads and 8 key heads of 128, hidden 4096, inner 12288, vocabulary 151936, head of its own.
QWEN_LAYERS = 36 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
QWEN_NORMS = 36 * (2 * 4096 + 2 * 128)
QWEN_HEAD = 151936 * 4096
QWEN_TOKEN = 36 * 2 * 8 * 128 * 2
QWEN_PROMPT_FLOPS = 36 * 4 * 32 * 128


def qwen_products(rows: int, logit_rows: int, share: float) -> float:
    layers = product(2 * (QWEN_LAYERS + QWEN_NORMS), share, 2 * rows * QWEN_LAYERS)
    return layers + product(2 * 4096, share, 0) + product(2 * QWEN_HEAD, share, 2 * logit_rows * QWEN_HEAD)


def qwen_decode(rows: int, context: int, launch: float, share: float, occupied: float) -> float:
    attention = rows * context * QWEN_TOKEN / (0.95 * occupied * READ)
    return FIXED + 36 * launch + qwen_products(rows, rows, share) + attention


@pytest.mark.parametrize(
    ("rows", "launch", "share", "alone"),
    [
        (1, 16e-6, 1.0, 0.6),
        (2, 31e-6, 0.93, 0.6 + 0.4 / 7),
        (8, 31e-6, 0.93, 1.0),
        (16, 31e-6, 0.93, 1.0),
        (17, 42e-6, 0.93, 1.0),
        (64, 42e-6, 0.93, 1.0),
    ],
)
def test_step_of_decode_rows_is_the_sum_by_hand(rows: int, launch: float, share: float, alone: float) -> None:
    waves = rows * 8 / 132
    occupied = alone * (waves / ceil(waves) if waves > 1 else 1.0)
    expected = qwen_decode(rows, 3000, launch, share, occupied)
    assert seconds("Qwen3-8B", StepLoad(rows, 3000)) == pytest.approx(expected, rel=1e-9)


def test_step_of_prompts_is_the_sum_by_hand() -> None:
    """Two prompts of 500 rows after 700 tokens each: half of a square, less what was computed before."""
    pairs = 2 * (1200**2 - 700**2) / 2
    expected = FIXED + 36 * 42e-6 + qwen_products(1000, 2, 0.93) + pairs * QWEN_PROMPT_FLOPS / (0.43 * FLOPS)
    load = StepLoad(0, 0, 1000, num_prompts=2, prompt_context=700)
    assert seconds("Qwen3-8B", load) == pytest.approx(expected, rel=1e-9)


def test_step_of_both_kinds_of_rows_adds_their_attention() -> None:
    """A prompt beside decode rows: no fused layer, and logits of every sequence."""
    decode = 4 * 100 * QWEN_TOKEN / (0.95 * (0.6 + 0.4 * 3 / 7) * READ)
    prompt = 10**2 / 2 * QWEN_PROMPT_FLOPS / (0.43 * FLOPS)
    expected = FIXED + 36 * 42e-6 + qwen_products(14, 5, 0.93) + decode + prompt
    assert seconds("Qwen3-8B", StepLoad(4, 100, 10)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "prompt_rows", "options", "layers"),
    [
        (1, 0, {}, 0),
        (1, 0, {"enforce_eager": True}, 28),
        (1024, 0, {}, 0),
        (1025, 0, {}, 28),
        (0, 512, {}, 0),
        (0, 513, {}, 28),
    ],
)
def test_step_is_never_shorter_than_the_host(rows: int, prompt_rows: int, options: dict, layers: int) -> None:
    """A device without limits leaves 0.3 ms, 20 us a sequence and 150 us a layer that no graph holds."""
    endless = GPU._replace(read_bytes_per_second=1e30, flops_per_second=1e30)
    sequences = rows + (1 if prompt_rows else 0)
    expected = max(300e-6 + 20e-6 * sequences + 150e-6 * layers, FIXED + 28 * (16e-6 if rows == 1 else 42e-6))
    found = seconds("Qwen3-0.6B", StepLoad(rows, 10, prompt_rows), endless, **options)
    assert found == pytest.approx(expected, rel=1e-6)


def test_step_with_weights_in_fp8_takes_its_own_rates() -> None:
    """Codes are read at 0.9 of the rate and multiplied at that of fp8; the head is int8."""
    layers = 6_951_979_008
    head = QWEN_HEAD + 4 * 151936
    expected = (
        *(FIXED + 36 * 42e-6 + product(layers, 0.9, 2 * 64 * QWEN_LAYERS, FP8), product(2 * 4096, 0.93, 0)),
        *(product(head, 0.9, 2 * 64 * QWEN_HEAD), 64 * 500 * QWEN_TOKEN / (0.95 * 64 * 8 / 132 / 4 * READ)),
    )
    assert seconds("Qwen3-8B", StepLoad(64, 500), quantization="fp8") == pytest.approx(sum(expected), rel=1e-9)
    slower = GPU._replace(fp8_flops_per_second=0.0)
    assert seconds("Qwen3-8B", StepLoad(64, 500), slower, quantization="fp8") > 1.2 * sum(expected)


def test_step_with_pages_in_fp8_reads_at_their_share() -> None:
    """Quantized pages know no waves."""
    plain, coded = (seconds("Qwen3-8B", StepLoad(64, 500), kv_cache_dtype=name) for name in ("auto", "fp8"))
    token = 36 * 8 * 260
    expected = 64 * 500 * (token / (0.92 * READ) - QWEN_TOKEN / (0.95 * 64 * 8 / 132 / 4 * READ))
    assert coded - plain == pytest.approx(expected, rel=1e-6)


def test_step_of_experts_reads_those_that_are_chosen() -> None:
    """gpt-oss-20b: 32 experts of which a row takes 4, in mxfp4 at 1.3 TB/s at most; half of the layers have a window."""
    rows, context = 32, 1000
    chosen = 1 - (1 - 4 / 32) ** rows
    experts = 24 * 32 * 3 * 2880 * 2880
    dense = 24 * (2880 * 64 * (64 + 2 * 8) + 64 * 64 * 2880 + 2880 * 32)
    head = 201088 * 2880
    token = 2 * 8 * 64 * 2
    waves = rows * 8 / 132
    attention = rows * 12 * (context + 128) * token / (0.95 * waves / ceil(waves) * READ)
    for rates, share in ((GPU, 0.9), (GPU._replace(read_bytes_per_second=4e12), 2.6 / 4)):
        faster = rates.read_bytes_per_second / READ
        expected = (
            *(FIXED + 24 * 45e-6, attention / faster, product(5888, 0.93 * faster, 0)),
            product(1_292_396_544, 0.93 * faster, 2 * rows * dense),
            product(chosen * 10_152_345_600, share * faster, 2 * rows * 4 / 32 * experts),
            product(2 * head, 0.93 * faster, 2 * rows * head),
        )
        found = seconds("gpt-oss-20b", StepLoad(rows, context), rates)
        assert found == pytest.approx(sum(expected), rel=1e-9)


def difference(name: str, first: StepLoad, second: StepLoad, **options: object) -> float:
    return seconds(name, second, **options) - seconds(name, first, **options)


def test_latents_are_read_or_multiplied_whichever_is_longer() -> None:
    """GLM-4.7-Flash: 20 heads over latents of 512 and 64, in 47 layers; prompts have them up-projected."""
    more = difference("GLM-4.7-Flash", StepLoad(64, 1000), StepLoad(64, 2000))
    read = 64 * 1000 * 47 * 2 * 576 / (0.95 * READ)
    absorbed = 64 * 1000 * 47 * 2 * 20 * (512 + 576) / (0.52 * FLOPS)
    assert more == pytest.approx(max(read, absorbed), rel=1e-6)
    longer = difference("GLM-4.7-Flash", StepLoad(0, 0, 500), StepLoad(0, 0, 500, prompt_context=300))
    pairs = (800**2 - 300**2 - 500**2) / 2
    assert longer == pytest.approx(pairs * 47 * 2 * 20 * (192 + 64 + 256) / (0.43 * FLOPS), rel=1e-6)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "share", "token"), [("auto", 0.4, 2 * 576), ("fp8_ds_mla", 0.4, 656)], ids=["plain", "fp8"]
)
def test_index_reads_all_and_latents_what_it_chose(kv_cache_dtype: str, share: float, token: int) -> None:
    """DeepSeek-V3.2: 2,048 tokens are attended to, and the keys of 128 that choose them are read whole."""
    options = {"kv_cache_dtype": kv_cache_dtype}
    index = 2 * 128 if kv_cache_dtype == "auto" else 132
    beyond = difference("DeepSeek-V3.2", StepLoad(64, 4096), StepLoad(64, 8192), **options)
    assert beyond == pytest.approx(64 * 4096 * 61 * index / (0.8 * READ), rel=1e-6)
    within = difference("DeepSeek-V3.2", StepLoad(64, 1024), StepLoad(64, 2048), **options)
    absorbed = 64 * 1024 * 61 * 2 * 128 * (512 + 576) / (share * FLOPS)
    read = 64 * 1024 * 61 * token / (0.95 * READ)
    assert within == pytest.approx(max(absorbed, read) + 64 * 1024 * 61 * index / (0.8 * READ), rel=1e-6)


def test_entries_are_read_by_their_ratio() -> None:
    """DeepSeek-V4-Flash: windows of 128, entries of 4 tokens of which 512 are chosen, entries of 128 that are all read."""
    ratios = Counter(CATALOGUE["DeepSeek-V4-Flash"]["compress_ratios"][:43])  # type: ignore[index]
    row = max(1024 / (0.95 * READ), 4 * 64 * 512 / (0.4 * FLOPS))
    beyond = difference("DeepSeek-V4-Flash", StepLoad(64, 2**17), StepLoad(64, 2**18))
    index = ratios[4] * 2**17 / 4 * 256 / (0.8 * READ)
    assert beyond == pytest.approx(64 * (ratios[128] * 2**17 / 128 * row + index), rel=1e-6)
    within = difference("DeepSeek-V4-Flash", StepLoad(64, 64), StepLoad(64, 128))
    entries = ratios[4] * 16 + ratios[128] / 2
    index = ratios[4] * 16 * 256 / (0.8 * READ)
    assert within == pytest.approx(64 * ((43 * 64 + entries) * row + index), rel=1e-6)
    longer = difference("DeepSeek-V4-Flash", StepLoad(0, 0, 64), StepLoad(0, 0, 64, prompt_context=64))
    pairs = 64 * 64 * (43 + ratios[4] / 4 + ratios[128] / 128) * 4 * 64 * 512
    indexed = 64 * 64 * ratios[4] / 4 * 2 * 64 * 128
    assert longer == pytest.approx((pairs + indexed) / (0.43 * FLOPS), rel=1e-6)


LAUNCHES = {
    "Qwen3-0.6B": (16e-6, 42e-6),
    "Qwen3-30B-A3B": (26e-6, 45e-6),
    "DeepSeek-V2-Lite": (42e-6, 55e-6),
    "GLM-4.7-Flash": (50e-6, 63e-6),
    "DeepSeek-V3.2": (100e-6, 100e-6),
    "DeepSeek-V4-Flash": (75e-6, 75e-6),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_layer_of_each_kind_has_its_launches(name: str) -> None:
    """Rates without limits leave what is fixed; 17 rows are too many for the fused path, of 2 to 16 it takes 15 us more."""
    endless = GPU._replace(read_bytes_per_second=1e30, flops_per_second=1e30, fp8_flops_per_second=1e30)
    fused, plain = LAUNCHES[name]
    layers = plan_request(name).declared.num_layers
    has_few_bits = name == "DeepSeek-V4-Flash"  # mxfp4 has a bound of its own, whatever the device
    for rows, launch in ((1, fused), (2, min(plain, fused + 15e-6)), (16, min(plain, fused + 15e-6)), (17, plain)):
        expected = max(FIXED + layers * launch, 300e-6 + 20e-6 * rows)
        found = seconds(name, StepLoad(rows, 1), endless)
        assert found == pytest.approx(expected, rel=1e-6) or (has_few_bits and found > expected)


def test_step_on_a_cpu_adds_reading_and_products() -> None:
    """Qwen3-0.6B in float32, whose tied embedding is its head; codes and half precision are multiplied at 0.3."""
    layers = 28 * 1024 * (2048 + 2 * 1024 + 2048 + 3 * 3072)
    head = 151936 * 1024
    read, flops = CPU.read_bytes_per_second, CPU.flops_per_second
    attention = 3 * 100 * 28 * 2 * 8 * 128 * 4 / (0.95 * read)
    for dtype, share, element in (("float32", 0.9, 4), ("bfloat16", 0.3, 2)):
        products = 4 * (layers + head) / read + 2 * 3 * (layers + head) / (share * flops)
        expected = FIXED + 28 * 60e-6 + products + attention * element / 4
        assert seconds("Qwen3-0.6B", StepLoad(3, 100), CPU, dtype=dtype) == pytest.approx(expected, rel=1e-9)
    prompt = FIXED + 28 * 60e-6 + 4 * (layers + head) / read + 2 * (50 * layers + head) / (0.9 * flops)
    prompt += 50**2 / 2 * 28 * 4 * 16 * 128 / flops
    assert seconds("Qwen3-0.6B", StepLoad(0, 0, 50), CPU) == pytest.approx(prompt, rel=1e-9)


def test_prompt_attends_to_whole_rows_before_it() -> None:
    """Rows of a window, and entries that stand for several tokens, against a count of every row."""
    for ratio, most in ((1, None), (1, 100), (4, None), (4, 50)):
        read = KvRead(1, 1, 1.0, ratio, most)
        for length in (10, 99, 100, 101, 199, 200, 201, 5000):
            counted = sum(min((row + 0.5) / ratio, length if most is None else most) for row in range(length))
            assert read.attended_by_prompt(length) == pytest.approx(counted, rel=2e-3, abs=1), (ratio, most, length)
        assert read.attended(60) == 60 / ratio
        assert read.attended(5000) == (5000 / ratio if most is None else most)


# Exchange.


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_sum_is_between_its_rows_and_in_proportion_beyond(size: int) -> None:
    ends = {2: (4.64, 6.34, 8.43, 42.99), 4: (4.77, 10.48, 12.1, 51.77), 8: (5.14, 11.14, 14.07, 48.39)}
    low, before, after, last = ends[{3: 4, 16: 8}.get(size, size)]
    assert sum_seconds(1, size) == sum_seconds(4096, size) == pytest.approx(low * 1e-6)
    assert sum_seconds(262144, size) == pytest.approx(before * 1e-6)
    assert sum_seconds(262144 * 1.25, size) == pytest.approx((before + (after - before) / 4) * 1e-6)
    assert sum_seconds(3 * 4194304, size) == pytest.approx(3 * last * 1e-6)


EXCHANGES: dict[str, tuple[Mesh, str, Callable[[], float]]] = {
    "one rank": (Mesh(), "nvlink", lambda: 0.0),
    "two sums a layer": (Mesh(tensor_size=4), "nvlink", lambda: 10 * 2 * sum_seconds(64 * 4096, 4)),
    "four gathers": (Mesh(tensor_size=4, is_exact=True), "nvlink", lambda: 10 * 4 * sum_seconds(16 * 4096, 4)),
    "pcie": (Mesh(tensor_size=4), "pcie", lambda: 10 * 2 * (20e-6 + 1.5 * 64 * 8192 / 20e9)),
    "host": (Mesh(tensor_size=2), "host", lambda: 10 * 2 * (200e-6 + 64 * 8192 / 4e9)),
    "stages": (Mesh(num_stages=2, layers=(0, 5)), "pcie", lambda: 10e-6 + 64 * 8192 / 50e9),
    "stages of ranks": (
        Mesh(tensor_size=2, num_stages=2, layers=(0, 5)),
        "host",
        lambda: 10e-6 + 64 * 8192 / 50e9 + 10 * 2 * (200e-6 + 64 * 8192 / 4e9),
    ),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_exchange_of_a_step_is_the_sum_by_hand(case: str) -> None:
    mesh, link, expected = EXCHANGES[case]
    assert exchange_seconds(mesh, 10, 64, 8192, link) == pytest.approx(expected(), rel=1e-9)  # type: ignore[arg-type]


def test_step_of_ranks_adds_its_exchange() -> None:
    """Every product and every head is a half; the exchange comes on top."""
    mesh = Mesh(tensor_size=2)
    resolved = resolve(plan_request("Qwen3-8B", mesh=mesh))
    halves = product(QWEN_LAYERS + 2 * QWEN_NORMS, 0.93, 64 * QWEN_LAYERS)
    halves += product(2 * 4096, 0.93, 0) + product(QWEN_HEAD, 0.93, 64 * QWEN_HEAD)
    waves = 64 * 4 / 132
    attention = 64 * 100 * QWEN_TOKEN / 2 / (0.95 * waves / ceil(waves) * READ)
    exchange = exchange_seconds(mesh, 36, 64, 2 * 4096, "nvlink")
    expected = FIXED + 36 * 42e-6 + halves + attention + exchange
    assert step_seconds(resolved, GPU, StepLoad(64, 100)) == pytest.approx(expected, rel=1e-9)


def test_stages_share_a_batch_and_pass_every_prompt() -> None:
    """Three sequences on two stages are two and one; the larger step counts, and each stage takes it."""
    resolved = resolve(plan_request("Qwen3-8B", mesh=Mesh(num_stages=2, layers=(0, 18)), max_num_batched_tokens=64))
    step = step_seconds(resolved, GPU, StepLoad(2, 100))
    assert decode_rate(resolved, GPU, 3, 100) == pytest.approx(3 / (2 * step))
    loads = [StepLoad(0, 0, 64), StepLoad(0, 0, 64, prompt_context=64), StepLoad(0, 0, 22, prompt_context=128)]
    expected = 2 * sum(step_seconds(resolved, GPU, load) for load in loads)
    assert first_token_seconds(resolved, GPU, 150) == pytest.approx(expected)

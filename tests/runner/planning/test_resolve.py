"""Every open setting is settled, with a reason."""

from dataclasses import replace

import pytest

from holdfast.config import EngineConfig, Limits
from holdfast.errors import ConfigError
from holdfast.models.blueprints.blueprint import read_blueprint, spec_blueprint
from holdfast.models.catalogue import CATALOGUE
from holdfast.models.spec import ModelSpec, RopeSpec
from holdfast.planning.resolve import CPU_KV_BYTES, Resolved, resolve
from holdfast.planning.target import Target
from holdfast.quant.formats import KV_FORMATS

GIB = 1024**3
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
    checkpoint_dtype="bfloat16",
    norm_eps=1e-5,
    rope=RopeSpec(10_000.0),
)
HOST = Target("cpu", "cpu", 10 * GIB, 10 * GIB, 0, "")
SHARED = Target("cuda", "cuda:0", 80 * GIB, 60 * GIB, GIB // 2, "20.00 GiB of 80.00 GiB are held by others")
FREE = Target("cuda", "cuda:1", 80 * GIB, 80 * GIB, GIB // 2, "")


def settle(spec: ModelSpec = SPEC, target: Target = HOST, **options: object) -> Resolved:
    resolved = resolve(EngineConfig.from_options(**options), spec, target)
    blueprint = spec_blueprint(spec, "the same")
    assert resolve(EngineConfig.from_options(**options), blueprint, target) == resolved
    return resolved


def reasons(resolved: Resolved) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.reason) for choice in resolved.choices}


def test_everything_left_open_on_a_cpu() -> None:
    resolved = settle()
    assert resolved.device == "cpu"
    assert resolved.dtype == "float32"
    assert resolved.kv_format.name == "float32"
    assert resolved.limits == Limits(64, 2048, 512, 16)
    assert resolved.may_shorten
    assert resolved.budget_bytes == 9 * GIB
    assert resolved.max_kv_bytes == CPU_KV_BYTES
    assert reasons(resolved) == {
        "dtype": ("float32", "the fastest exact type on a CPU"),
        "kv_cache_dtype": ("float32", "the same as dtype"),
        "max_model_len": ("512", "what the model was made for"),
        "memory": ("9.00 GiB", "90% of 10.00 GiB available"),
    }


def test_everything_left_open_on_a_gpu() -> None:
    resolved = settle(target=SHARED)
    assert resolved.device == "cuda:0"
    assert resolved.dtype == resolved.kv_format.name == "bfloat16"
    assert resolved.limits == Limits(256, 8192, 512, 16)
    assert resolved.budget_bytes == 60 * GIB, "others hold 20 GiB, so 90 % of the device is not there"
    assert resolved.max_kv_bytes is None
    assert reasons(resolved)["dtype"] == ("bfloat16", "the checkpoint's own")
    held = "what others leave: they hold 20.00 GiB of the device's 80.00 GiB"
    assert reasons(resolved)["memory"] == ("60.00 GiB", held)


@pytest.mark.parametrize(
    ("checkpoint_dtype", "dtype"), [("float16", "float16"), ("float32", "bfloat16"), ("float64", "bfloat16")]
)
def test_the_dtype_on_a_gpu_follows_the_checkpoint(checkpoint_dtype: str, dtype: str) -> None:
    assert settle(replace(SPEC, checkpoint_dtype=checkpoint_dtype), FREE).dtype == dtype


def test_what_is_asked_is_taken_and_needs_no_reason() -> None:
    resolved = settle(
        dtype="bfloat16",
        kv_cache_dtype="float16",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        page_tokens=4,
        memory_limit="2GiB",
        kv_cache_memory="1MiB",
    )
    assert resolved.dtype == "bfloat16"
    assert resolved.kv_format.name == "float16"
    assert resolved.limits == Limits(3, 7, 100, 4)
    assert not resolved.may_shorten
    assert (resolved.budget_bytes, resolved.max_kv_bytes) == (2 * GIB, 1024**2)
    assert reasons(resolved) == {"memory": ("2.00 GiB", "memory_limit")}


@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_format_is_taken(name: str) -> None:
    resolved = settle(kv_cache_dtype=name)
    assert resolved.kv_format is KV_FORMATS[name]
    assert "kv_cache_dtype" not in reasons(resolved)


def test_pages_of_coded_formats_are_a_tile_unless_somebody_says_otherwise() -> None:
    resolved = settle(kv_cache_dtype="fp8")
    assert resolved.limits.page_tokens == 64
    assert reasons(resolved)["page_tokens"] == ("64", "attention over quantized pages works in tiles of 64 tokens")
    asked = settle(kv_cache_dtype="fp8", block_size=16)
    assert asked.limits.page_tokens == 16
    assert "page_tokens" not in reasons(asked)
    latent = resolve(EngineConfig(kv_cache_dtype="fp8"), read_blueprint(CATALOGUE["DeepSeek-R1"], "x"), FREE)
    assert latent.limits.page_tokens == 16, "nothing is coded by head there"


def test_protected_layers_are_a_choice_with_a_reason() -> None:
    deep = replace(SPEC, num_layers=30)
    assert reasons(settle(deep, kv_cache_dtype="turboquant_4bit_nc"))["kv_protected_layers"] == (
        "4",
        "the default of turboquant_4bit_nc; kept in fp8: the first and the last (0,1,28,29)",
    )
    assert settle(deep, kv_cache_dtype="turboquant_4bit_nc").protected.layers == (0, 1, 28, 29)
    assert "kv_protected_layers" not in reasons(settle(deep)), "plain pages protect nothing"


def test_other_layers_replace_the_choice() -> None:
    resolved = settle(replace(SPEC, num_layers=30, qkv_bias=True), kv_cache_dtype="turboquant_4bit_nc")
    protected = resolved.protected._replace(layers=(3, 4, 5, 6), reason="made up")
    other = resolved.with_protected(protected)
    assert other.protected is protected
    assert reasons(other)["kv_protected_layers"] == ("3,4,5,6", "made up")
    assert len(other.choices) == len(resolved.choices)


@pytest.mark.parametrize("name", [name for name, value in KV_FORMATS.items() if value.is_coded])
def test_heads_that_cannot_be_coded_are_told_what_works(name: str) -> None:
    odd = replace(SPEC, head_dim=72)
    with pytest.raises(ConfigError) as caught:
        settle(odd, kv_cache_dtype=name)
    assert str(caught.value) == (
        f"kv_cache_dtype={name} was asked; head_dim is 72, and heads of a multiple of 16 elements can be quantized; "
        "try bfloat16"
    )
    assert settle(odd, kv_cache_dtype="bfloat16").kv_format.name == "bfloat16"


def test_shares_of_a_gpu() -> None:
    resolved = settle(target=SHARED, memory_utilization=0.5)
    assert resolved.budget_bytes == 40 * GIB
    assert resolved.budget_reason == "50% of the device's 80.00 GiB"
    assert settle(target=SHARED, memory_limit="7GiB", memory_utilization=0.5).budget_bytes == 7 * GIB, (
        "a size outranks a share"
    )


@pytest.mark.parametrize(
    ("target", "limit", "budget", "reason"),
    [
        (SHARED, "70GiB", 60 * GIB, "what others leave: they hold 20.00 GiB"),
        (FREE, "200GiB", 80 * GIB, "all of the device's 80.00 GiB, less than memory_limit"),
        (FREE, "70GiB", 70 * GIB, "memory_limit"),
    ],
)
def test_a_limit_does_not_make_memory(target: Target, limit: str, budget: int, reason: str) -> None:
    resolved = settle(target=target, memory_limit=limit)
    assert resolved.budget_bytes == budget
    assert resolved.budget_reason.startswith(reason)


def test_a_limit_does_not_make_memory_of_a_host_either() -> None:
    resolved = settle(memory_limit="1000TiB")
    assert resolved.budget_bytes == 9 * GIB, "its last page would be the end of the process"
    assert resolved.budget_reason == "90% of 10.00 GiB available, less than memory_limit"
    assert settle(memory_limit=10 * GIB).budget_bytes == 10 * GIB
    assert settle(memory_limit=10 * GIB + 1, memory_utilization=0.5).budget_bytes == 5 * GIB


def test_a_share_is_told_as_it_was_asked() -> None:
    assert settle(memory_utilization=0.975).budget_reason == "97.5% of 10.00 GiB available"
    assert settle(target=FREE, memory_utilization=0.29).budget_reason == "29% of the device's 80.00 GiB"


def test_a_share_of_the_host_is_for_all_of_it() -> None:
    resolved = settle(memory_utilization=0.5)
    assert resolved.budget_bytes == 5 * GIB
    assert resolved.budget_reason == "50% of 10.00 GiB available"
    assert resolved.max_kv_bytes is None, "who names a share gets all of it"


def test_a_bound_on_pages_that_was_asked_replaces_our_own() -> None:
    assert settle(kv_cache_memory="3GiB").max_kv_bytes == 3 * GIB


def test_a_context_beyond_the_model_s() -> None:
    resolved = settle(max_model_len=4096)
    assert resolved.limits.max_model_len == 4096
    assert reasons(resolved)["max_model_len"] == ("4096", "asked, beyond the model's 512")


def test_learned_positions_cannot_be_exceeded() -> None:
    learned = read_blueprint(CATALOGUE["OPT-125m"], "opt")
    for model, longest in ((replace(SPEC, rope=None), 512), (learned, 2048)):
        with pytest.raises(ConfigError, match=f"the model has learned {longest} positions; ask for at most {longest}"):
            resolve(EngineConfig(max_model_len=longest + 1), model, HOST)
        assert resolve(EngineConfig(max_model_len=longest), model, HOST).limits.max_model_len == longest


def test_a_model_that_does_not_run_is_settled_too() -> None:
    resolved = resolve(EngineConfig(), read_blueprint(CATALOGUE["DeepSeek-V4-Pro"], "x"), FREE)
    assert resolved.dtype == "bfloat16"
    assert resolved.limits.max_model_len == 2**20


def test_a_shorter_context_replaces_the_choice() -> None:
    shorter = settle().with_max_model_len(100, "no room")
    assert shorter.limits.max_model_len == 100
    assert reasons(shorter)["max_model_len"] == ("100", "no room")
    assert len(shorter.choices) == len(settle().choices)

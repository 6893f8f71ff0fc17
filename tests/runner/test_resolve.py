from dataclasses import replace

import pytest
import torch

from holdfast.config import EngineConfig, Limits
from holdfast.errors import ConfigError
from holdfast.models.spec import ModelSpec, RopeSpec
from holdfast.runner.resolve import CPU_KV_BYTES, Resolved, resolve

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


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("holdfast.runner.resolve.available_host_bytes", lambda: 10 * GIB)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))


def settle(spec: ModelSpec = SPEC, **options: object) -> Resolved:
    return resolve(EngineConfig.from_options(**options), spec)


def reasons(resolved: Resolved) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.reason) for choice in resolved.choices}


def test_everything_left_open_on_a_cpu():
    resolved = settle()
    assert resolved.device == "cpu"
    assert resolved.dtype == "float32"
    assert resolved.kv_format.name == "float32"
    assert resolved.limits == Limits(64, 2048, 512, 16)
    assert resolved.may_shorten
    assert resolved.budget_bytes == 9 * GIB
    assert resolved.max_kv_bytes == CPU_KV_BYTES
    assert reasons(resolved) == {
        "device": ("cpu", "no GPU is there"),
        "dtype": ("float32", "the fastest exact type on a CPU"),
        "kv_cache_dtype": ("float32", "the same as dtype"),
        "max_model_len": ("512", "what the model was made for"),
        "memory": ("9.00 GiB", "90% of 10.00 GiB available"),
    }


@pytest.mark.usefixtures("two_gpus")
def test_everything_left_open_on_a_gpu():
    resolved = settle()
    assert resolved.device == "cuda:0"
    assert resolved.dtype == resolved.kv_format.name == "bfloat16"
    assert resolved.limits == Limits(256, 8192, 512, 16)
    assert resolved.budget_bytes == 60 * GIB, "others hold 20 GiB, so 90 % of the device is not there"
    assert resolved.max_kv_bytes is None
    assert reasons(resolved)["dtype"] == ("bfloat16", "the checkpoint's own")
    assert reasons(resolved)["memory"] == ("60.00 GiB", "what others leave free of the device's 80.00 GiB")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("checkpoint_dtype", "dtype"), [("float16", "float16"), ("float32", "bfloat16"), ("float64", "bfloat16")]
)
def test_the_dtype_on_a_gpu_follows_the_checkpoint(checkpoint_dtype, dtype):
    assert settle(replace(SPEC, checkpoint_dtype=checkpoint_dtype)).dtype == dtype


def test_what_is_asked_is_taken_and_needs_no_reason():
    resolved = settle(
        device="cpu",
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


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "device"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")])
def test_devices_that_are_there(asked, device):
    assert settle(device=asked).device == device


@pytest.mark.parametrize("asked", ["cuda", "cuda:2"])
def test_devices_that_are_not_there(asked, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked != "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    seen = 0 if asked == "cuda" else 2
    with pytest.raises(ConfigError, match=f"device='{asked}' was asked; torch sees {seen} CUDA devices here"):
        settle(device=asked)


@pytest.mark.usefixtures("two_gpus")
def test_shares_of_a_gpu():
    resolved = settle(memory_utilization=0.5)
    assert resolved.budget_bytes == 40 * GIB
    assert resolved.budget_reason == "50% of the device's 80.00 GiB"
    assert settle(memory_limit="7GiB", memory_utilization=0.5).budget_bytes == 7 * GIB, "a size outranks a share"


def test_a_share_of_the_host_is_for_all_of_it():
    resolved = settle(memory_utilization=0.5)
    assert resolved.budget_bytes == 5 * GIB
    assert resolved.budget_reason == "50% of 10.00 GiB available"
    assert resolved.max_kv_bytes is None, "who names a share gets all of it"


def test_a_context_beyond_the_model_s():
    resolved = settle(max_model_len=4096)
    assert resolved.limits.max_model_len == 4096
    assert reasons(resolved)["max_model_len"] == ("4096", "asked, beyond the model's 512")


def test_learned_positions_cannot_be_exceeded():
    with pytest.raises(ConfigError, match="the model has learned 512 positions; ask for at most 512"):
        settle(replace(SPEC, rope=None), max_model_len=513)
    assert settle(replace(SPEC, rope=None), max_model_len=512).limits.max_model_len == 512


def test_a_shorter_context_replaces_the_choice():
    shorter = settle().with_max_model_len(100, "no room")
    assert shorter.limits.max_model_len == 100
    assert reasons(shorter)["max_model_len"] == ("100", "no room")
    assert len(shorter.choices) == len(settle().choices)

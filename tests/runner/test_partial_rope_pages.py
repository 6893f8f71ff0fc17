"""Quantized pages of models whose RoPE turns part of each head: means, key biases and key scales change no exact token."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.models.grouped_readers import FAMILIES
from holdfast.models.rope import rope_frequencies
from holdfast.models.spec import RopeSpec
from holdfast.runner.key_means import average_turn
from kernels.exactness import random
from loading.tiny_models import save_tiny
from runner.test_key_scales import FEW_BITS, TEXT, error_of, logits_of, scales_of
from runner.tiny_runners import TinyBuilder
from runner.unbalanced_models import unbalance

HEAD_DIM, ROTARY_DIM = 32, 8
SHAPE = {"head_dim": HEAD_DIM, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
PARTIAL = ("Llama", "Qwen2", "Qwen3")


@pytest.fixture(scope="module", autouse=True)
def partial() -> Iterator[None]:
    """Families whose RoPE turns the first elements of each head."""
    with pytest.MonkeyPatch.context() as patch:
        for prefix in PARTIAL:
            family = FAMILIES[f"{prefix}ForCausalLM"]

            def read(settings, own, whole=family.read):
                return replace(whole(settings, own), rotary_dim=ROTARY_DIM)

            patch.setitem(FAMILIES, family.architecture, replace(family, read=read))  # type: ignore[arg-type]
        yield


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> TinyBuilder:
    """Models with key biases far larger than keys, and with queries and keys that do not share their size evenly."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "qwen3"):
        (folder / family).mkdir()
        torch.manual_seed(0)
        save_tiny(family, folder / family, **SHAPE, initializer_range=0.3)
        if family != "qwen3":
            unbalance(folder / family, HEAD_DIM, 4.0, ROTARY_DIM)
    return TinyBuilder(folder)


@for_each("family", ["llama", "qwen2", "qwen3"])
def test_partial_rope_near_rows_are_exact(build, family):
    """Bias, mean and scale of codes are those of near rows and queries: within the first block scores are the model's."""
    options = {"kv_near_tokens": 64, "page_tokens": 64, "kv_key_scale": True}
    assert error_of(build, family, **options) < 1e-4
    built = build(family, text_ids=TEXT, **FEW_BITS | options)
    has_scales = any(bool((scales != 1).any()) for scales in scales_of(built))
    assert has_scales or family == "qwen3", "nothing is scaled, so nothing is tested"
    assert any(spec.has_key_bias for spec in built.plan.attention_specs) == (family == "qwen2")
    owners = ("attention/key_bias", "attention/key_scales", "attention/key_means", "rope/table", "rope/frequencies")
    held = {entry.owner: entry.num_bytes for entry in built.ledger if entry.owner in owners}
    assert held == {term.owner: term.num_bytes for term in built.plan.memory.terms if term.owner in owners}
    assert held["rope/frequencies"] == 4 * ROTARY_DIM // 2
    built.release()


@for_each("kv_format", ["turboquant_k8v4", "turboquant_4bit_nc"])
def test_partial_rope_codes_without_key_bias_stay_near(build, kv_format):
    """With its bias in the codes, or a bias turned in other pairs, a key of few bits would be mostly wrong."""
    error = error_of(build, "qwen2", kv_cache_dtype=kv_format, kv_near_tokens=0, kv_key_scale=False)
    assert error < (0.3 if kv_format == "turboquant_k8v4" else 0.5)


def test_partial_rope_scales_balance_planted_pairs(build):
    unscaled, scaled = (error_of(build, "llama", kv_near_tokens=0, kv_key_scale=own) for own in (False, True))
    assert scaled < 0.6 * unscaled, (scaled, unscaled)


def test_partial_rope_logits_differ_from_whole_rope(build, monkeypatch):
    built = build("llama", max_model_len=200, page_tokens=16)
    found = logits_of(built)
    built.release()
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", replace(FAMILIES["LlamaForCausalLM"], read=whole_llama))
    whole = build("llama", max_model_len=200, page_tokens=16)
    assert float((logits_of(whole) - found).norm() / found.norm()) > 0.05
    whole.release()


def whole_llama(settings, family):
    from holdfast.models.grouped_readers import READERS

    return READERS["llama"](settings, family)


def test_average_turn_leaves_other_elements_alone() -> None:
    """In pair order: turned pairs are averaged, with the magnitude, and the last pairs stay, without it."""
    rope = RopeSpec(5000.0, "yarn", factor=4.0, original_max_position=64, attention_factor=1.5)
    for num_positions in (1, 300):
        frequency_P, magnitude = rope_frequencies(rope, ROTARY_DIM, 256, num_positions)
        turn_DD = average_turn(frequency_P, magnitude, num_positions, HEAD_DIM // 2)
        key_KD = random(3, HEAD_DIM, seed=1)
        angle_LP = torch.outer(torch.arange(num_positions).double(), frequency_P.double())
        first, second = key_KD.double().chunk(2, dim=-1)
        turned_KP = torch.complex(first[:, :4], second[:, :4]) * torch.polar(magnitude + 0 * angle_LP, angle_LP).mean(0)
        wanted = torch.cat((turned_KP.real, first[:, 4:], turned_KP.imag, second[:, 4:]), dim=-1)
        torch.testing.assert_close((key_KD @ turn_DD).double(), wanted, rtol=1e-4, atol=1e-5)

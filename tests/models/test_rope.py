"""cos and sin of every scaling kind against transformers, at any length; the rows of a step for every layer."""

from typing import Any

import pytest
import torch

from holdfast.kernels.attention.rope_rows import fill_rope_rows
from holdfast.models.grouped_readers import read_spec
from holdfast.models.rope import StepRope, make_step_rope
from holdfast.models.settings import Settings, read_rope
from models.rope_oracle import step_rows
from models.test_family_fields import CASES

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}


def longrope(head_dim: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.05 * i for i in range(head_dim // 2)],
        "long_factor": [1.5 + 0.5 * i for i in range(head_dim // 2)],
    }


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 4.0}),
    "linear by less than one": ("linear", {"factor": 0.5}),
    "llama3": ("llama3", LLAMA3),
    "llama3 of a long text": ("llama3", LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
    "llama3 of another band": ("llama3", LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 2.5}),
    "yarn": ("yarn", YARN),
    "yarn of a long text": ("yarn", YARN | {"factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn with other turns": ("yarn", YARN | {"beta_fast": 16, "beta_slow": 2}),
    "yarn not truncated": ("yarn", YARN | {"truncate": False}),
    "yarn with a magnitude": ("yarn", YARN | {"attention_factor": 1.5}),
    "yarn with two scales": ("yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}),
    "yarn with one scale": ("yarn", YARN | {"mscale": 0.7}),
    "yarn that does not stretch": ("yarn", YARN | {"factor": 1.0}),
    "yarn of one turn": ("yarn", YARN | {"beta_fast": 3, "beta_slow": 3, "truncate": False}),
}


def tables(kind, settings, head_dim, theta, max_position, num_positions):
    """cos and sin from transformers, [L, D], and from here, [L, D / 2], for a text of `num_positions`."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = settings | {"rope_type": kind, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters=dict(parameters),
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
    rope = read_rope(Settings({"rope_parameters": parameters}, "config.json"), head_dim, max_position)
    ours = step_rows(rope, head_dim, max_position, num_positions, torch.arange(num_positions))
    return [table.squeeze(0) for table in theirs], ours


def check(kind, settings, head_dim=16, theta=10_000.0, max_position=512, num_positions=512):
    (cos, sin), ours = tables(kind, settings, head_dim, theta, max_position, num_positions)
    half = head_dim // 2
    phase = 2e-7 * num_positions  # a frequency that is off by a unit in the last place turns this far by the end
    for part in (slice(half), slice(half, None)):
        torch.testing.assert_close(ours.cos_TP, cos[:, part], rtol=0, atol=phase)
        torch.testing.assert_close(ours.sin_TP, sin[:, part], rtol=0, atol=phase)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 128], ids=lambda size: f"D{size}")
def test_rope_tables_match_transformers(name, head_dim):
    check(*KINDS[name], head_dim)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("theta", [100.0, 500_000.0, 1e6])
def test_rope_tables_match_transformers_at_any_base(name, theta):
    check(*KINDS[name], theta=theta)


@pytest.mark.parametrize("num_positions", [10, 64, 65, 100, 512])
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_dynamic_at_the_longest_text_that_is_allowed(num_positions, factor):
    """Within the model's own length nothing is stretched; beyond it all positions are, for max_model_len."""
    check("dynamic", {"factor": factor}, max_position=64, num_positions=num_positions)


@pytest.mark.parametrize("num_positions", [10, 64, 65, 512], ids=["short", "just short", "just long", "long"])
@pytest.mark.parametrize("head_dim", [16, 96])
@pytest.mark.parametrize("extra", [{}, {"factor": 4.0}, {"attention_factor": 1.25}, {"factor": 0.5}], ids=str)
def test_longrope_short_and_long(num_positions, head_dim, extra):
    check("longrope", longrope(head_dim) | extra, head_dim, num_positions=num_positions)


def test_rope_tables_of_kinds_differ():
    """A table that ignored its settings would pass many of the tests above where the settings change little."""
    seen = {name: tables(*KINDS[name], 16, 10_000.0, 512, 512)[1].cos_TP for name in KINDS}
    alike = [
        {one, other} for one in seen for other in seen if one < other and (seen[one] - seen[other]).abs().max() < 1e-3
    ]
    assert alike == [{"default", "yarn that does not stretch"}, {"yarn", "yarn with one scale"}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_computed_in_float32_and_rounded_once(dtype):
    rope = read_rope(Settings({}, "config.json"), 16, 4096)
    fine, coarse = (step_rows(rope, 16, 4096, 4096, torch.arange(4096), kind) for kind in (torch.float32, dtype))
    assert coarse.cos_TP.dtype == dtype
    assert torch.equal(coarse.cos_TP, fine.cos_TP.to(dtype))
    assert torch.equal(coarse.sin_TP, fine.sin_TP.to(dtype))


def test_rope_tables_of_shorter_context_are_a_prefix():
    """Where the kind does not look at the length, rows do not depend on how many there are."""
    for kind, settings in KINDS.values():
        short = tables(kind, settings, 16, 10_000.0, 512, 100)[1]
        long = tables(kind, settings, 16, 10_000.0, 512, 512)[1]
        assert torch.equal(short.cos_TP, long.cos_TP[:100])
        assert torch.equal(short.sin_TP, long.sin_TP[:100])


def step_rope_of(architecture: str, **settings: Any) -> StepRope:
    small = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 99, **settings}
    spec = read_spec({"architectures": [architecture], "intermediate_size": 8, **small})
    return make_step_rope(spec, 2**20, 6, torch.float32, torch.device("cpu"))


def test_step_rope_of_alike_layers_has_one_set() -> None:
    rope = step_rope_of("LlamaForCausalLM")
    assert rope.rows is not None
    assert rope.rows.cos_STP.shape == (1, 6, 8)
    assert {rotary.cos_TP.data_ptr() for rotary in rope.rotaries if rotary} == {rope.rows.cos_STP.data_ptr()}
    assert rope.entries == (None,) * 4


def test_step_rope_of_two_rotations_has_two_sets() -> None:
    rope = step_rope_of(
        "Gemma3ForCausalLM", head_dim=16, num_key_value_heads=1, sliding_window=8, sliding_window_pattern=2
    )
    assert rope.rows is not None
    fill_rope_rows(torch.tensor([2**20 - 1]), rope.rows)
    first, second, third, fourth = rope.rotaries
    assert first is not None
    assert second is not None
    assert first is third
    assert second is fourth
    assert not torch.equal(first.cos_TP[0], second.cos_TP[0])


def test_entries_are_turned_at_their_first_token() -> None:
    """Ratios of eight and sixteen, each with the rotation of its layer; a layer without entries has none."""
    spec = CASES["deepseek_v4"][1]
    rope = make_step_rope(spec, 300, 40, torch.float32, torch.device("cpu"))
    assert rope.rows is not None
    positions = torch.tensor([0, 7, 8, 15, 16, 33, 250])
    for ratio, layer in ((8, 0), (16, 2), (8, 3)):
        fill_rope_rows(positions // ratio * ratio, rope.rows)
        firsts = rope.rotaries[layer]
        assert firsts is not None
        wanted = firsts.cos_TP[: len(positions)].clone(), firsts.sin_TP[: len(positions)].clone()
        fill_rope_rows(positions, rope.rows)
        entries = rope.entries[layer]
        assert entries is not None
        found = entries.cos_TP[: len(positions)], entries.sin_TP[: len(positions)]
        assert all(torch.equal(own, other) for own, other in zip(found, wanted, strict=True))
    assert rope.entries[1] is None


def test_step_rope_of_learned_positions_has_no_rows() -> None:
    rope = step_rope_of("OPTForCausalLM", ffn_dim=8, max_position_embeddings=64, word_embed_proj_dim=32)
    assert rope.rows is None
    assert rope.rotaries == (None,) * 4

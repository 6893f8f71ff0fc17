from array import array

import pytest

from holdfast.errors import ModelFormatError, UnsupportedModelError
from holdfast.loading.gguf.config import gguf_config
from holdfast.loading.gguf.file import TYPES, GGUFTensor
from holdfast.models.families import read_spec
from holdfast.models.spec import ExpertsSpec, ModelSpec
from loading.gguf.test_gguf_config import file

EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_feed_forward_length": 40,
}
ARCHITECTURES = {"qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}


def tensor(name: str, *shape: int) -> GGUFTensor:
    return GGUFTensor(name, TYPES[0], shape, 0, 0)


ROUTERS = tuple(tensor(f"blk.{layer}.ffn_gate_inp.weight", 8, 64) for layer in range(2))


def spec(arch: str, tensors: tuple[GGUFTensor, ...] = ROUTERS, **keys: object) -> ModelSpec:
    return read_spec(gguf_config(file(arch, tensors=tensors, **(EXPERTS | keys))), "some.gguf")


def test_numbers_arrive():
    two, three = spec("qwen2moe"), spec("qwen3moe")
    assert [two.architecture, three.architecture] == list(ARCHITECTURES.values())
    assert two.experts == ExpertsSpec(8, 3, 24, shared_size=40, has_shared_gate=True, normalizes=False)
    assert three.experts == ExpertsSpec(8, 3, 24, normalizes=True)
    assert (two.hidden_size, two.intermediate_size, two.num_layers, two.qk_norm) == (64, 96, 2, False)
    assert three.qk_norm


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_file_may_say_whether_shares_are_normalized(arch):
    for normalizes in (False, True):
        experts = spec(arch, expert_weights_norm=normalizes).experts
        assert experts is not None
        assert experts.normalizes == normalizes


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sliding_window_is_in_every_layer(arch):
    """Whichever layers the settings of a family would give it to."""
    assert spec(arch, attention__sliding_window=64).sliding_windows == (64, 64)
    assert spec(arch).sliding_windows == ()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_neutral_values_change_nothing(arch):
    neutral = {
        "leading_dense_block_count": 0,
        "expert_gating_func": 1,
        "expert_weights_scale": 1.0,
        "expert_shared_count": 1,
        "expert_group_count": 0,
        "interleave_moe_layer_step": 1,
        "swiglu_clamp_exp": array("f", [0.0, 0.0]),
    }
    assert spec(arch, **neutral) == spec(arch)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("leading_dense_block_count", 1),
        ("expert_gating_func", 2),
        ("expert_weights_scale", 2.5),
        ("expert_weights_scale", float("nan")),
        ("expert_group_count", 4),
        ("moe_every_n_layers", 2),
        ("swiglu_clamp_exp", array("f", [0.0, 7.0])),
        ("logit_scale", 0.5),
    ],
)
def test_what_is_not_computed_is_declined_in_words(key, value):
    with pytest.raises(UnsupportedModelError, match=rf"some\.gguf sets qwen3moe\.{key} = "):
        spec("qwen3moe", **{key: value})


BROKEN: dict[str, tuple[dict[str, object], str]] = {
    "no count": ({"expert_count": None}, "qwen2moe.expert_count"),
    "no experts": ({"expert_count": 0}, "qwen2moe.expert_count"),
    "a billion experts": ({"expert_count": 10**9}, "qwen2moe.expert_count"),
    "count as text": ({"expert_count": "8"}, "qwen2moe.expert_count"),
    "more experts than routers know": ({"expert_count": 9}, "blk.0.ffn_gate_inp.weight"),
    "another width than routers have": ({"embedding_length": 128}, "blk.0.ffn_gate_inp.weight"),
    "more layers than routers": ({"block_count": 3}, "blk.2.ffn_gate_inp.weight"),
    "no used count": ({"expert_used_count": None}, "qwen2moe.expert_used_count"),
    "none used": ({"expert_used_count": 0}, "qwen2moe.expert_used_count"),
    "more used than there are": ({"expert_used_count": 9}, "qwen2moe.expert_used_count"),
    "no width": ({"expert_feed_forward_length": None}, "qwen2moe.expert_feed_forward_length"),
    "width 2**40": ({"expert_feed_forward_length": 2**40}, "qwen2moe.expert_feed_forward_length"),
    "widths by layer": ({"expert_feed_forward_length": array("I", [24, 32])}, "'an array of 2 values'"),
    "no shared width": ({"expert_shared_feed_forward_length": None}, "qwen2moe.expert_shared_feed_forward_length"),
    "shared width 0": ({"expert_shared_feed_forward_length": 0}, "qwen2moe.expert_shared_feed_forward_length"),
    "norm as a number": ({"expert_weights_norm": 1}, "qwen2moe.expert_weights_norm"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_wrong_values_are_refused_by_name(case):
    keys, named = BROKEN[case]
    with pytest.raises(ModelFormatError) as caught:
        spec("qwen2moe", ROUTERS, **keys)
    assert "some.gguf" in str(caught.value)
    assert named in str(caught.value)


def test_single_experts_are_declined_in_words():
    split = tensor("blk.1.ffn_up.7.weight", 24, 64)
    with pytest.raises(UnsupportedModelError, match=r"some\.gguf: tensor 'blk\.1\.ffn_up\.7\.weight' is a single"):
        spec("qwen3moe", (*ROUTERS, split))
    with pytest.raises(UnsupportedModelError, match=r"sets llama\.expert_count = 8"):
        gguf_config(file("llama", tensors=(split,), expert_count=8))

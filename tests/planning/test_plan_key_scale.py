"""Plans with key scales: bytes by hand, ranks and stages, and settings in which they have no effect."""

import pytest

from holdfast.distributed.mesh import Mesh
from holdfast.planning.fit import fit_runner
from holdfast.planning.resolve import resolve
from planning.plan_cases import H200, plan_request

NARROW = {"kv_cache_dtype": "turboquant_4bit_nc", "max_model_len": 300, "max_num_batched_tokens": 64, "max_num_seqs": 2}


def scale_bytes(name: str = "Qwen3-8B", mesh: Mesh | None = None, **options) -> int | None:
    own = {} if mesh is None else {"mesh": mesh}
    plan = fit_runner(plan_request(name, H200, **own, **{"kv_key_scale": True} | NARROW | options))
    return {term.owner: term.num_bytes for term in plan.memory.terms}.get("attention/key_scales")


def test_key_scales_of_qwen3_8b_by_hand() -> None:
    """36 layers of 8 heads of 128, less those in fp8; a number for the key and one for the query, in float32."""
    assert scale_bytes(kv_protected_layers=0) == 36 * 8 * 128 * 2 * 4
    assert scale_bytes(kv_protected_layers=4) == 32 * 8 * 128 * 2 * 4
    assert scale_bytes(kv_near_tokens=64) == 36 * 8 * 128 * 2 * 4
    assert scale_bytes(kv_key_scale=False) is None


@pytest.mark.parametrize(
    ("mesh", "num_bytes"),
    [(Mesh(tensor_size=2), 36 * 4 * 128 * 8), (Mesh(num_stages=3, stage=1, layers=(11, 25)), 14 * 8 * 128 * 8)],
)
def test_key_scales_of_a_rank_are_those_of_its_heads(mesh: Mesh, num_bytes: int) -> None:
    assert scale_bytes(mesh=mesh, kv_protected_layers=0) == num_bytes


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Qwen3-8B", {"kv_cache_dtype": "turboquant_k8v4"}, "no layer stores keys in fewer than 8 bits"),
        ("Qwen3-8B", {"kv_cache_dtype": "auto"}, "no layer stores keys"),
        ("DeepSeek-V3", {"kv_cache_dtype": "turboquant_mla_4bit"}, "no layer stores keys"),
        ("Qwen3-8B", {"tokenizer": "none"}, "tokenizer=none reads none"),
        ("Qwen3-8B", {"mesh": Mesh(tensor_size=16)}, "16 ranks share 8 key heads"),
    ],
)
def test_key_scales_without_effect_say_why(name: str, options: dict, reason: str) -> None:
    resolved = resolve(plan_request(name, H200, **{"kv_key_scale": True} | NARROW | options))
    (choice,) = (one for one in resolved.choices if one.name == "kv_key_scale")
    assert not resolved.key_scale
    assert choice.value == "False"
    assert reason in choice.reason

"""Plans with key scales: bytes by hand, ranks and stages, and settings in which they have no effect."""

import pytest

from holdfast.distributed.mesh import Mesh
from holdfast.planning.fit import fit_runner
from holdfast.planning.resolve import resolve
from planning.plan_cases import H200, plan_request

NARROW = {"kv_cache_dtype": "turboquant_4bit_nc", "max_model_len": 300, "max_num_batched_tokens": 64, "max_num_seqs": 2}


def scale_bytes(name: str = "Qwen3-8B", mesh: Mesh | None = None, **options) -> int | None:
    own = {} if mesh is None else {"mesh": mesh}
    plan = fit_runner(plan_request(name, H200, **own, **NARROW | options))
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
    ("name", "options", "has_scales"),
    [
        ("Qwen3-8B", {}, True),
        ("Qwen3-8B", {"kv_key_scale": False}, False),
        ("Qwen3-8B", {"kv_cache_dtype": "turboquant_k8v4"}, False),
        (
            "Qwen3-8B",
            {"kv_cache_dtype": "turboquant_k8v4", "kv_protected_dtype": "auto", "kv_protected_layers": 3},
            False,
        ),
        ("Qwen3-8B", {"kv_cache_dtype": "auto"}, False),
        ("DeepSeek-V3", {"kv_cache_dtype": "turboquant_mla_4bit"}, False),
        ("Qwen3-8B", {"tokenizer": "none"}, False),
        ("Qwen3-8B", {"mesh": Mesh(tensor_size=8)}, True),
        ("Qwen3-8B", {"mesh": Mesh(tensor_size=16)}, False),
    ],
)
def test_key_scales_need_codes_by_head_and_a_text(name: str, options: dict, has_scales: bool) -> None:
    """Ranks that share a key head have not all of its queries."""
    assert resolve(plan_request(name, H200, **NARROW | options)).key_scale == has_scales

"""Plans of releases by name on 24 GB: the widest KV format that holds a declared context, and refusals with advice."""

from collections.abc import Mapping

import pytest

from holdfast.config import EngineConfig
from holdfast.errors import MemoryPlanError
from holdfast.loading.declared import open_declared
from holdfast.memory.devices import find_gpu
from holdfast.models.declared_weights import WeightGroup
from holdfast.planning.fit import RunnerPlan
from holdfast.planning.plan import plan_runner
from holdfast.planning.resolve import PlanRequest
from holdfast.planning.target import gpu_target

LIMIT = "24GB"
DECLARED = 262_144
PACKED = "Qwen/Qwen3.6-27B:Q4_K_M"


def plan(name: str, **options: object) -> RunnerPlan:
    """The plan of an engine that may take 24 GB of an H200."""
    config = EngineConfig.from_options(memory_limit=LIMIT, **options)
    return plan_runner(PlanRequest(config, open_declared(name), gpu_target(find_gpu("h200"))))


def packed(**options: object) -> RunnerPlan:
    return plan(PACKED, max_model_len=DECLARED, packed_weights="as_stored", **options)


def test_plan_27b_widest_format_of_the_whole_context_is_k5v4() -> None:
    """k8v4 is short even with one sequence and no snapshot: weights, pages and the context take more than 24 GB."""
    for snapshots in (None, 0):
        with pytest.raises(MemoryPlanError) as caught:
            packed(kv_cache_dtype="turboquant_k8v4", max_num_seqs=1, state_snapshots=snapshots)
        assert "short" in str(caught.value)
    for format_ in ("turboquant_k5v4", "turboquant_4bit_nc"):
        found = packed(kv_cache_dtype=format_, max_num_seqs=2)
        assert found.resolved.limits.max_model_len == DECLARED
        assert found.memory.total_bytes <= 24 * 10**9


def test_plan_27b_quality_chooses_k5v4_and_says_why() -> None:
    found = packed(kv_quality="high", max_num_seqs=1)
    (choice,) = (one for one in found.resolved.choices if one.name == "kv_cache_dtype")
    assert choice.value == "turboquant_k5v4"
    assert "turboquant_k8v4" in choice.reason


def test_plan_27b_packs_embedding_and_head() -> None:
    found = packed(kv_cache_dtype="turboquant_k5v4", max_num_seqs=1)
    groups = {name: group.stored_as for name, group in groups_of(found).items()}
    assert (groups["embed"], groups["lm_head"]) == (("Q4_K",), ("Q6_K",))


def groups_of(found: RunnerPlan) -> Mapping[str, WeightGroup]:
    resolved = found.resolved
    return resolved.declared.group_bytes(resolved.dtype, resolved.recipe)


def test_plan_27b_fp8_weights_are_refused_with_four_bits_as_advice() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan(
            "Qwen3.6-27B", max_model_len=DECLARED, quantization="fp8", kv_cache_dtype="turboquant_k5v4", max_num_seqs=2
        )
    assert "mxfp4" in str(caught.value)


def test_plan_gpt_oss_20b_as_stored_holds_two_declared_contexts() -> None:
    found = plan("gpt-oss-20b", max_model_len=131_072, max_num_seqs=2)
    assert found.resolved.recipe.scheme is not None
    assert found.resolved.recipe.scheme.name == "mxfp4"
    assert found.resolved.limits.max_model_len == 131_072

"""What a rank's build holds and declines: plan and ledger to the byte, shares kept for the next start, and sentences where ranks cannot be equal."""

from collections import Counter
from pathlib import Path

import pytest

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.errors import ConfigError
from holdfast.loading.model_files import open_model
from holdfast.planning.exactness import EXACT_ROWS, exact_rows
from holdfast.planning.target import Target
from holdfast.runner import build as building
from holdfast.runner.build import plan_model
from holdfast.runner.weight_load import plan_weights
from kernels.exactness import require_native
from loading.tiny_models import save_tiny
from runner.rank_runs import OPTIONS, Built, Ranks, one_rank, plan_rank, write_model
from runner.test_weight_load import assert_same, loaded

GIB = 2**30
GPU = Target("cuda", "a GPU", 80 * GIB, 80 * GIB, GIB, "a test", capability=(9, 0))


def held_by_owner(built: Built) -> dict[str, int]:
    """The ledger in the owners of a plan, which counts weights by group, experts apart, and pages as one."""
    held: Counter[str] = Counter()
    for entry in built.build.ledger:
        group, _, name = entry.owner.partition("/")
        of_weights = "experts" if ".experts." in name and not name.endswith("bias") else name.partition(".")[0]
        owner = {"weights": f"weights/{of_weights}", "kv pages": "kv pages"}.get(group, entry.owner)
        held[owner] += entry.num_bytes
    return dict(held)


@pytest.mark.parametrize("exact", [False, True], ids=["reduce", "exact"])
@pytest.mark.parametrize(
    ("name", "num_ranks", "whole_experts"),
    [("llama", 2, False), ("qwen3", 4, False), ("gpt_oss", 2, True), ("deepseek_v3", 2, False)],
)
def test_rank_build_held_bytes_equal_its_plan(tmp_path, name, num_ranks, whole_experts, exact):
    """All but the exchange, which is the caller's."""
    path = write_model(tmp_path, name)
    for built in Ranks(path, num_ranks, exact=exact, whole_experts=whole_experts).built:
        plan, held = built.build.plan, held_by_owner(built)
        terms = [
            term
            for term in plan.memory.terms
            if "serve" in term.phases and (term.group != "sampling" or term.owner == "sampling/shares")
        ]
        planned = {term.owner: term.num_bytes for term in terms if not term.owner.startswith("exchange/")}
        assert len(planned) < len(terms), "no line for the exchange"
        padding_bytes, kv_bytes = planned.pop("kv pages/padding", 0), held.pop("kv pages")
        planned.pop("attention/blocks", None)  # what torch takes for latents in a step
        assert held == planned
        assert plan.memory.kv_bytes <= kv_bytes <= plan.memory.kv_bytes + padding_bytes


def test_rank_build_single_rank_has_no_exchange_terms(tmp_path):
    plan = one_rank(write_model(tmp_path, "llama")).build.plan
    assert plan.exchange_needs is None
    assert not [term.owner for term in plan.memory.terms if "exchange" in term.owner or "gathered" in term.owner]


def test_shares_are_kept_for_the_next_start_rank_by_rank(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    save_tiny("llama", folder)
    config = EngineConfig.from_options(quantization="int8")
    ranks = (*meshes(2), *meshes(2, is_exact=True))

    def planned(mesh: Mesh):
        return plan_weights(config, open_model(str(folder), "auto"), "float32", config.recipe, True, mesh)

    first = [loaded(planned(mesh)) for mesh in ranks]
    assert len(list((tmp_path / "cache" / "weights").iterdir())) == len(ranks)
    for mesh, weights in zip(ranks, first, strict=True):
        again = planned(mesh)
        assert again.slot is not None
        assert again.slot.hit is not None
        assert again.slot.hit[0].manifest.mesh == mesh
        assert_same(loaded(again), weights)


def test_rank_build_save_quantized_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama")
    with raises_code("runner.shares_not_saved", ConfigError):
        plan_rank(path, {"quantization": "int8", "save_quantized": str(tmp_path / "out")}, meshes(2)[0])


def plan_on_gpu(path: Path, num_ranks: int, **options):
    config = EngineConfig.from_options(**(OPTIONS | {"dtype": "bfloat16", "batch_invariant": True} | options))
    model = open_model(str(path), "dummy")
    return plan_model(config, model, GPU, mesh=meshes(num_ranks, is_exact=True)[0])[1]


def test_rank_build_inexact_gpu_shares_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama", num_attention_heads=16, num_key_value_heads=16, vocab_size=512)
    assert plan_on_gpu(path, 4).mesh.is_exact
    assert plan_on_gpu(path, 8, max_num_batched_tokens=64).mesh.is_exact
    with pytest.raises(ConfigError, match="below 64 rows"):
        plan_on_gpu(path, 8)
    with pytest.raises(ConfigError, match="16 ranks"):
        plan_on_gpu(path, 16, max_num_batched_tokens=64)
    few_heads = write_model(tmp_path / "few", "llama", num_attention_heads=16, num_key_value_heads=2)
    assert plan_on_gpu(few_heads, 2).mesh.is_exact
    with pytest.raises(ConfigError, match="2 key heads"):
        plan_on_gpu(few_heads, 4)
    with pytest.raises(ConfigError, match="batch_invariant=True"):
        plan_on_gpu(path, 2, batch_invariant=False)
    with pytest.raises(ConfigError, match="fp8"):
        plan_on_gpu(path, 2, quantization="fp8")


def test_rank_build_exact_entries_on_gpu_need_whole_experts_and_few_rows(tmp_path: Path) -> None:
    sizes = {"head_dim": 80, "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_lora_rank": 64, "num_attention_heads": 64}

    def plan(num_ranks: int, whole_experts: bool = True, heads: int = 64, **options: object) -> None:
        own = sizes | {"num_attention_heads": heads, "o_groups": 8}
        path = write_model(tmp_path / f"{heads}", "v4_flash", **own)
        config = EngineConfig.from_options(**(OPTIONS | {"dtype": "bfloat16"} | options))
        mesh = meshes(num_ranks, is_exact=True, has_expert_parallelism=whole_experts)[0]
        plan_model(config, open_model(str(path), "dummy"), GPU, mesh=mesh)

    plan(2)
    plan(4, max_num_batched_tokens=512)
    with raises_code("plan.exact_needs_whole_experts", ConfigError, num_ranks=2):
        plan(2, whole_experts=False)
    with raises_code("plan.exact_needs_fewer_rows", ConfigError, rows=513, maximum=512):
        plan(2, max_num_batched_tokens=513)
    plan(2, heads=128)
    with raises_code("plan.exact_never_measured", ConfigError, num_ranks=8):
        plan(8)


def test_exact_needs_our_kernels_on_a_cpu(tmp_path: Path, monkeypatch) -> None:
    require_native()
    path, ranks = write_model(tmp_path, "llama"), meshes(2, is_exact=True)
    assert plan_rank(path, {}, ranks[0])[-1].mesh == ranks[0]
    monkeypatch.setattr(building, "native_library", lambda: None)
    with raises_code("runner.no_c_kernels", ConfigError):
        plan_rank(path, {}, ranks[0])


def test_rows_from_which_on_shares_are_equal():
    assert [exact_rows(ranks) for ranks in (2, 3, 4, 5, 8, 9)] == [16, 16, 16, 64, 64, None]
    assert max(EXACT_ROWS) == 8

"""All ranks planned by one: what they have in common, what each plans for itself, and refusals with rank, term and both numbers."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from error_codes import raises_code
from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh
from holdfast.errors import ConfigError, MemoryPlanError
from holdfast.memory.planner import Term
from holdfast.planning.fit import fit_runner, try_fit
from holdfast.planning.plan import plan_runner
from holdfast.planning.ranks import (
    Agreement,
    RankReport,
    check_ranks,
    plan_digest,
    plan_ranks,
    plan_summary,
    rank_meshes,
    refuse_difference,
    refuse_unlike_plans,
    report_rank,
    worst_request,
)
from holdfast.planning.resolve import Agreed, PlanRequest, resolve
from planning.plan_cases import GIB, H200, HOST, RTX4090, declared

MODEL = "Qwen3-8B"


def reports_of(*targets, model: str = "m") -> list[RankReport]:
    first = report_rank(0, targets[0], model)
    return [first._replace(rank=rank, target=target, device=f"gpu {rank}") for rank, target in enumerate(targets)]


def config_of(size: int = 2, num_stages: int = 1, **options: Any) -> EngineConfig:
    return EngineConfig(tensor_parallel_size=size, pipeline_parallel_size=num_stages, **options)


def smaller(target, num_bytes: int):
    return target._replace(available_bytes=num_bytes)


def test_pages_and_context_are_the_least_of_all() -> None:
    crowded = smaller(H200, 40 * GIB)
    plans = plan_ranks(config_of(), declared(MODEL), reports_of(H200, crowded))
    alone = fit_runner(PlanRequest(config_of(), declared(MODEL), crowded, Mesh(1, 2)))
    assert plans.worst == 1
    assert {plan.memory.num_pages for plan in plans.plans} == {alone.memory.num_pages} == {min(plans.least)}
    assert plans.least[0] > plans.least[1]
    assert {plan.resolved.limits.max_model_len for plan in plans.plans} == {40960}
    assert [plan.mesh for plan in plans.plans] == [*rank_meshes(config_of())]
    assert plans.plans[0].memory.pages_reason == "as many as the rank with the fewest has"


def test_plan_ranks_context_is_shortest_of_all_ranks() -> None:
    tight = smaller(RTX4090, 11 * GIB)
    plans = plan_ranks(config_of(), declared(MODEL), reports_of(RTX4090, tight))
    alone = fit_runner(PlanRequest(config_of(), declared(MODEL), tight, Mesh(1, 2)))
    length = alone.resolved.limits.max_model_len
    assert length < 40960
    assert {plan.resolved.limits.max_model_len for plan in plans.plans} == {length}
    assert plans.agreement.max_model_len == length


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 2)])
def test_plan_ranks_each_rank_plans_same_for_itself(size: int, num_stages: int) -> None:
    """From what it receives over a channel, with what loading really holds; then nothing differs."""
    config, model = config_of(size, num_stages), declared(MODEL)
    reports = reports_of(*(smaller(H200, (60 + 10 * rank) * GIB) for rank in range(size * num_stages)))
    sent = json.loads(json.dumps([report.as_dict() for report in reports]))
    assert [RankReport.of(one) for one in sent] == reports
    plans = plan_ranks(config, model, reports)
    agreement = Agreement.of(json.loads(json.dumps(plans.agreement.as_dict())))
    assert agreement == plans.agreement
    staging = Term("staging", 12345, "as the files are", ("load",))
    for rank, mesh in enumerate(rank_meshes(config, agreement.cuts)):
        target = agreement.target(rank, reports[rank].target)
        request = PlanRequest(config, model, target, mesh, staging=staging, agreed=agreement.agreed)
        own = plan_runner(request)
        agreement.check(rank, own)
        assert plan_digest(own) == plan_digest(plans.plans[rank])
    assert len({plan_digest(plan) for plan in plans.plans}) > 1, "rank 0 holds more"


def test_ranks_on_one_device_share_its_memory() -> None:
    reports = [report_rank(rank, HOST, "m", "cpu") for rank in range(2)]
    plans = plan_ranks(config_of(kv_cache_memory="1GiB"), declared("Qwen3-0.6B"), reports)
    assert plans.agreement.num_sharing == (2, 2)
    assert all(plan.target.available_bytes == HOST.available_bytes // 2 for plan in plans.plans)
    assert "shared by 2 ranks" in plans.plans[0].target.reason


def test_stages_hold_all_layers_once() -> None:
    model = declared(MODEL)
    plans = plan_ranks(config_of(1, 3), model, reports_of(H200, smaller(H200, 30 * GIB), H200))
    cuts = plans.agreement.cuts
    assert cuts is not None
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == model.num_layers
    sizes = [last - first for first, last in cuts]
    assert sizes[1] < min(sizes[0], sizes[2]), "the stage with less memory has fewer layers"
    held = sum(plan.declared.weight_bytes("bfloat16", plan.resolved.recipe, plan.mesh) for plan in plans.plans)
    assert held == model.weight_bytes("bfloat16")


REFUSED = [
    ({"size": 3}, MODEL, "tensor_parallel_size=3 is not possible: 32 query heads do not divide into 3 equal parts. Try 1, 2, 4, 8, 16"),
    ({"size": 1, "num_stages": 37}, MODEL, "pipeline_parallel_size is 37, but Qwen3-8B has 36 layers"),
    ({"enable_expert_parallel": True}, MODEL, "enable_expert_parallel=True does not apply: Qwen3-8B has no experts"),
    ({"size": 3, "enable_expert_parallel": True}, "Qwen3-30B-A3B", "32 query heads do not divide into 3"),
    ({"size": 64}, "Qwen1.5-MoE-A2.7B", "16 query heads do not divide into 64"),
    ({"size": 16, "enable_expert_parallel": True}, "Qwen1.5-MoE-A2.7B", "60 experts do not divide into 16 equal parts"),
    ({"size": 3}, "DeepSeek-V4-Flash", "64 query heads do not divide into 3 equal parts. Try 1, 2, 4, 8."),
    ({"size": 16}, "DeepSeek-V4-Flash", "8 groups of heads do not divide into 16 equal parts. Try 1, 2, 4, 8."),
    ({"size": 1, "num_stages": 44}, "DeepSeek-V4-Flash", "pipeline_parallel_size is 44, but DeepSeek-V4-Flash has 43 layers"),
    ({"size": 16}, "DeepSeek-V4-Pro", "192 of 3072 columns of layers.0.shared.down.weight cut a block of 128, which share a scale. Try 1, 2, 4, 8."),
    ({"size": 16, "tensor_parallel_sums": "exact"}, "DeepSeek-V4-Pro", "448 of 7168 rows of layers.0.o_b.weight cut a block of 128, which share a scale. Try 1, 2, 4, 8."),
    ({"size": 8}, "gpt-oss-120b", "360 of 2880 columns of layers.0.experts.down.weight cut a block of 32, which share a scale. Try 1, 2, or enable_expert_parallel."),
    ({"size": 8, "quantization": "fp8_block"}, "Qwen3-30B-A3B", "96 of 768 columns of layers.0.experts.down.weight cut a block of 128, which share a scale. Try 1, 2, or enable_expert_parallel."),
    ({"size": 2, "num_stages": 2}, "gemma-2-9b", "2 stages are planned of models that run"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "name", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_plan_ranks_indivisible_model_refused_in_one_line(options, name, words) -> None:
    config = config_of(**options)
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    for ask in (
        lambda: check_ranks(config, declared(name)),
        lambda: plan_ranks(config, declared(name), reports_of(*[H200] * num_ranks)),
        lambda: worst_request(config, declared(name), H200),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "num_stages"),
    [(2, 1), (8, 1), (1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 1), (2, 2)))],
)
def test_plan_ranks_of_v4_context_too_long_names_what_fits(size: int, num_stages: int) -> None:
    """The length that the error names is planned, and one block more is not."""
    model, reports = declared("DeepSeek-V4-Flash"), reports_of(*[H200] * (size * num_stages))
    options: dict[str, Any] = {"kv_cache_memory": "2GiB"}
    with pytest.raises(MemoryPlanError) as caught:
        plan_ranks(config_of(size, num_stages, **options, max_model_len=1_048_576), model, reports)
    words = str(caught.value)
    assert f"of {size * num_stages} (" in words
    assert "\n" not in words
    found = re.search(r"lower max_model_len to (\d+)", words)
    assert found is not None, words
    length = int(found[1])
    assert plan_ranks(config_of(size, num_stages, **options, max_model_len=length), model, reports).plans
    with pytest.raises(MemoryPlanError):
        plan_ranks(config_of(size, num_stages, **options, max_model_len=length + 2048), model, reports)


def test_worst_request_invalid_ranks_refused_before_reports(monkeypatch) -> None:
    """4096 x 4096 reports are minutes of work for one sentence."""
    monkeypatch.setattr("holdfast.planning.ranks.report_rank", lambda *_: pytest.fail("a report was made"))
    with pytest.raises(ConfigError, match="32 query heads do not divide into 4096 equal parts"):
        worst_request(config_of(4096, 4096), declared(MODEL), H200)


@pytest.mark.slow
def test_stages_of_an_index_begin_where_a_layer_chooses() -> None:
    """GLM-5.2: most layers attend to what one before them chose."""
    model = declared("GLM-5.2")
    heads = model.declaration.heads(Mesh())
    assert heads is not None
    config = config_of(8, 2, max_model_len=4096)
    plans = plan_ranks(config, model, reports_of(*[H200] * 16))
    assert plans.agreement.cuts is not None
    assert not {first for first, _ in plans.agreement.cuts} & heads.shared_layers


def test_rank_unlike_rank_0_is_refused() -> None:
    model, config, reports = declared(MODEL), config_of(4), reports_of(*[H200] * 4)
    for rank in (1, 2, 3):
        own = reports[rank]
        for changed, values in (
            (own._replace(model="other"), {"name": "model (a digest of its headers)", "value": "'other'"}),
            (own._replace(versions={**own.versions, "torch": "1.0"}), {"name": "torch", "value": "'1.0'"}),
            (own._replace(target=HOST), {"name": "device", "value": "'cpu'", "expected": "'cuda'"}),
        ):
            with raises_code("plan.rank_differs", ConfigError, rank=rank, **values):
                plan_ranks(config, model, [*reports[:rank], changed, *reports[rank + 1 :]])


def test_tokenizer_is_held_by_rank_0_alone() -> None:
    """Terms of processes that were not measured with it."""
    host = HOST._replace(context_bytes=GIB)
    plans = plan_ranks(config_of(4, max_model_len=64), declared("Qwen3-0.6B"), reports_of(*[host] * 4)).plans
    held = [[term.num_bytes for term in plan.memory.terms if term.owner == "tokenizer"] for plan in plans]
    assert held == [[800 * 151936], [], [], []]


def test_context_that_ranks_agreed_on_does_not_shrink() -> None:
    """A rank that has no room for it is refused: its pages would mean other places than those of the others."""
    tight = smaller(RTX4090, 11 * GIB)
    alone = fit_runner(PlanRequest(config_of(), declared(MODEL), tight, Mesh(1, 2)))
    length = alone.resolved.limits.max_model_len
    assert length < 40960
    for agreed, fits in ((length, True), (length + 16, False), (40960, False)):
        request = PlanRequest(config_of(), declared(MODEL), tight, Mesh(1, 2), agreed=Agreed(agreed))
        found = try_fit(resolve(request))
        assert (found is not None) is fits
        assert found is None or found.resolved.limits.max_model_len == agreed


def test_check_ranks_accepts_as_many_nodes_as_ranks() -> None:
    check_ranks(config_of(4, nnodes=4), declared(MODEL))
    with raises_code("plan.more_nodes_than_ranks", ConfigError, value=5, num_ranks=4):
        check_ranks(config_of(4, nnodes=5), declared(MODEL))


def test_reports_that_are_not_one_of_each_rank_are_refused() -> None:
    first, second = reports_of(H200, H200)
    for reports in ([first], [second, first], [first, second, second._replace(rank=2)]):
        with raises_code("plan.missing_ranks", ConfigError, num_ranks=2):
            plan_ranks(config_of(), declared(MODEL), reports)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_with_the_fewest_pages_decides_for_all(rank: int) -> None:
    """Whichever it is: pages and context of all are its own, and of equals the first is shown."""
    targets = [H200] * 4
    targets[rank] = smaller(H200, 20 * GIB)
    plans = plan_ranks(config_of(4), declared(MODEL), reports_of(*targets))
    assert plans.worst == rank
    assert {plan.memory.num_pages for plan in plans.plans} == {plans.least[rank]} == {min(plans.least)}
    assert plans.least[rank] < plans.least[0]
    assert plans._replace(least=(5, 3, 3, 4)).worst == 1, "the first of equals"


@pytest.mark.parametrize("rank", [1, 3])
def test_setting_of_one_rank_alone_is_refused(rank: int) -> None:
    summary = plan_summary(plan_ranks(config_of(), declared(MODEL), reports_of(H200, H200)).plans[0])
    summaries = [summary] * 4
    refuse_unlike_plans(summaries)
    summaries[rank] = summary | {"settings": summary["settings"] | {"dtype": "float16"}}
    values = {"rank": rank, "name": "dtype", "value": "float16", "expected": "bfloat16"}
    with raises_code("plan.rank_setting_differs", ConfigError, **values):
        refuse_unlike_plans(summaries)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_cut_goes_by_the_smallest_rank_of_each_stage(rank: int) -> None:
    """Two stages of two ranks: the stage of a rank with little memory has fewer layers, whichever of its ranks it is."""
    targets = [H200] * 4
    targets[rank] = smaller(H200, 40 * GIB)
    cuts = plan_ranks(config_of(2, 2, max_model_len=4096), declared("Qwen3-32B"), reports_of(*targets)).agreement.cuts
    assert cuts is not None
    first, second = (last - begin for begin, last in cuts)
    assert (first < second) == (rank < 2)


@pytest.mark.parametrize("change", [{"node": None}, {"target": None}, {"target": {"capability": None, "kind": "cpu"}}])
def test_report_of_another_release_is_refused(change) -> None:
    """It must be readable before versions are compared."""
    sent = {key: value for key, value in (report_rank(1, HOST, "m").as_dict() | change).items() if value}
    with raises_code("plan.rank_report", ConfigError, rank=1):
        RankReport.of(sent)


def test_plan_ranks_choice_unsupported_on_one_device_refused() -> None:
    """Products in fp8 are not on every GPU: what an option leaves open must be the same everywhere."""
    old = H200._replace(capability=(8, 0))
    with pytest.raises(ConfigError) as caught:
        plan_ranks(config_of(quantization="fp8"), declared(MODEL), reports_of(H200, old))
    assert "\n" not in str(caught.value)


def test_plan_ranks_names_rank_with_too_little_memory() -> None:
    with pytest.raises(MemoryPlanError) as caught:
        plan_ranks(config_of(1, 2), declared("Qwen3-32B"), reports_of(H200, RTX4090._replace(available_bytes=2 * GIB)))
    words = str(caught.value)
    assert words.startswith("rank 1 of 2 (NVIDIA GeForce RTX 4090, layers ")
    assert "budget is 2.00 GiB" in words


def test_refuse_difference_names_both_values() -> None:
    plans = plan_ranks(config_of(), declared(MODEL), reports_of(H200, H200))
    own = plan_summary(plans.plans[1])
    refuse_difference(1, own, plans.agreement.summaries[1])
    for part, name, value, printed in (
        ("terms", "workspace/layers", 7, {"value": "7 B (7 B)"}),
        ("numbers", "num_pages", 5, {"value": "5"}),
        ("settings", "dtype", "float16", {"value": "'float16'", "expected": "'bfloat16'"}),
        ("terms", "another owner", 9, {"value": "9 B (9 B)", "expected": "missing"}),
    ):
        other = own | {part: own[part] | {name: value}}
        with raises_code("plan.rank_differs", ConfigError, rank=1, name=name, **printed):
            refuse_difference(1, other, plans.agreement.summaries[1])


def test_worst_request_is_of_worst_rank() -> None:
    request, plans = worst_request(config_of(4), declared(MODEL), H200)
    assert plans is not None
    assert request.mesh == rank_meshes(config_of(4))[plans.worst]
    assert fit_runner(request).memory.num_pages == plans.agreement.num_pages
    config = replace(config_of(2), max_model_len=131072, max_num_seqs=1)
    request, plans = worst_request(config, declared("Llama-3.1-405B"), H200)
    assert plans is None, "nothing fits"
    assert request.mesh.rank == 0


def test_ranks_of_several_nodes_exchange_by_nccl() -> None:
    """Each of them plans so for itself; a plan for one node names what differs."""
    config, model = config_of(1, 2), declared(MODEL)
    here, there = (report._replace(node=node) for report, node in zip(reports_of(H200, H200), "ab", strict=True))
    plans = plan_ranks(config, model, (here, there))
    agreement = plans.agreement
    assert Agreement.of(json.loads(json.dumps(agreement.as_dict()))).exchange == agreement.exchange == "nccl"
    assert [plan.exchange_kind for plan in plans.plans] == ["nccl", "nccl"]
    mesh = rank_meshes(config, agreement.cuts)[1]
    agreement.check(1, plan_runner(PlanRequest(config, model, H200, mesh, agreed=agreement.agreed)))
    as_one = agreement.agreed._replace(exchange="symmetric")
    values = {"name": "exchange", "value": "'symmetric'", "expected": "'nccl'"}
    with raises_code("plan.rank_differs", ConfigError, **values):
        agreement.check(1, plan_runner(PlanRequest(config, model, H200, mesh, agreed=as_one)))
    with raises_code("plan.wrong_nodes", ConfigError, value=1, num_ranks=2, num_nodes=2):
        plan_ranks(replace(config, nnodes=1), model, (here, there))


@pytest.mark.parametrize(
    ("size", "num_stages", "nnodes", "kind"),
    [(8, 1, None, "symmetric"), (2, 1, 2, "nccl"), (8, 2, None, "linked"), (8, 2, 1, "symmetric"), (1, 3, 2, "nccl")],
)
def test_plan_takes_the_given_number_of_nodes(size: int, num_stages: int, nnodes: int | None, kind: str) -> None:
    _, plans = worst_request(config_of(size, num_stages, nnodes=nnodes), declared(MODEL), H200)
    assert plans is not None
    assert {plan.exchange_kind for plan in plans.plans} == {kind}

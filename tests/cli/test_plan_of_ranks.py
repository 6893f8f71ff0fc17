"""`holdfast plan` of several ranks: the worst one and what differs on others and in JSON; what ranks cannot share."""

import json
import shlex

import pytest

from cli.cli_models import Here
from holdfast.cli.plan_view import RankRow
from holdfast.cli.tables import rank_lines


def record(here: Here, words: str) -> dict:
    ended = here("plan", *shlex.split(words), "--json")
    assert (ended.code, ended.err) == (0, ""), ended
    return json.loads(ended.out)


def test_plan_ranks_marks_worst_and_lists_differences(here: Here) -> None:
    requested = "Qwen3-8B --gpu 4xh200 --pipeline-parallel-size 2"
    found = record(here, requested)
    ranks = found["ranks"]
    assert [one["rank"] for one in ranks] == [0, 1, 2, 3]
    assert [one["layers"] for one in ranks] == [[0, 18], [0, 18], [18, 36], [18, 36]]
    (worst,) = (one for one in ranks if one["is_worst"])
    assert worst["differs"] == {}
    assert worst["own_pages"] == min(one["own_pages"] for one in ranks)
    assert found["kv_tokens"] == 16 * worst["own_pages"]
    assert ranks[1]["differs"]["exchange/whole_logits"] < 0
    assert ranks[2]["differs"]["weights/lm_head"] == -ranks[2]["differs"]["weights/embed"] > 0
    assert {"exchange/rows", "exchange/signals", "pipeline/hidden"} <= {term["owner"] for term in found["terms"]}
    assert "--pipeline-parallel-size 2" in found["command"]
    assert "--tensor-parallel-size 2" in found["command"]
    text = here("plan", *shlex.split(requested)).out
    assert "Qwen3-8B on each of 4 x NVIDIA H200" in text
    assert "this is the one" in text
    assert "0 to 17" in text
    assert "18 to 35" in text


def test_ranks_on_two_nodes_have_a_line_for_nccl(here: Here) -> None:
    one, two = (
        record(here, f"Qwen3-8B --gpu 2xh200 --pipeline-parallel-size 2 {nodes}") for nodes in ("", "--nnodes 2")
    )
    nccl = {term["owner"]: term["bytes"] for term in two["terms"]}["collectives/nccl"]
    assert nccl > 2**27
    assert "collectives/nccl" not in {term["owner"] for term in one["terms"]}
    assert two["kv_tokens"] < one["kv_tokens"]
    assert "--nnodes 2" in two["command"]
    assert "--nnodes" not in one["command"]


def test_plan_one_rank_has_no_ranks_key(here: Here) -> None:
    assert "ranks" not in record(here, "Qwen3-8B --gpu h200")


def test_ranks_that_gather_are_planned_as_a_gpu_takes_them(here: Here) -> None:
    """On a GPU only with batch_invariant: the plan is of that, and both commands say it."""
    requested = "Qwen3-8B --gpu 2xh200"
    exact, both = (record(here, f"{requested} {way}") for way in ("--tensor-parallel-sums exact", "--batch-invariant"))
    assert exact["terms"] == both["terms"]
    assert "--batch-invariant" in exact["command"].split()
    assert "--batch-invariant" in both["command"].split()
    stages = record(
        here, "Qwen3-8B --gpu h200 --pipeline-parallel-size 2 --tensor-parallel-sums exact --quantization fp8"
    )
    assert "--batch-invariant" not in stages["command"].split(), "stages of one rank gather nothing"


def test_exact_ranks_of_v4_are_planned_without_batch_invariant(here: Here) -> None:
    requested = "DeepSeek-V4-Flash --gpu 4xh200 --tensor-parallel-sums exact --enable-expert-parallel"
    found = record(here, f"{requested} --max-num-batched-tokens 512")
    assert found["kv_tokens"] > found["max_model_len"] == 1_048_576
    assert "--tensor-parallel-sums exact" in found["command"]
    assert "--batch-invariant" not in found["command"]


@pytest.mark.parametrize("num_stages", [pytest.param(22, marks=pytest.mark.slow), 43])
def test_plan_stages_without_entries_have_numbers(here: Here, num_stages: int) -> None:
    """Some stages of V4-Flash have layers with a window alone, also the one with the fewest pages."""
    found = record(here, f"DeepSeek-V4-Flash --gpu h200 --pipeline-parallel-size {num_stages}")
    assert found["kv_tokens"] > 10 * found["max_model_len"]
    assert found["tokens_without_groups"] == 0


@pytest.mark.slow
def test_whole_experts_and_exact_sums_are_planned(here: Here) -> None:
    sliced, whole, exact = (
        {term["owner"]: term["bytes"] for term in record(here, f"Qwen3-30B-A3B --gpu 2xh200 {way}")["terms"]}
        for way in ("", "--enable-expert-parallel", "--tensor-parallel-sums exact")
    )
    assert whole["weights/experts"] == sliced["weights/experts"] == exact["weights/experts"]
    assert "workspace/gathered" not in sliced
    assert exact["workspace/gathered"] > 0
    assert exact["exchange/rows"] > sliced["exchange/rows"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("Qwen3-8B --gpu h200 --pipeline-parallel-size 40", "families.too_many_stages"),
        ("Qwen3-8B --gpu h200 -tp 2 --enable-expert-parallel", "plan.no_experts"),
        ("Qwen3-8B --gpu h200 --pipeline-parallel-size two", "pipeline_parallel_size"),
        ("Qwen3-8B --gpu h200 --tensor-parallel-sums fast", "tensor_parallel_sums"),
        ("Qwen3-8B --gpu 4xh200 --pipeline-parallel-size 3", "cli.exclusive"),
        ("Qwen3-8B --gpu 4xh200 -tp 4 --pipeline-parallel-size 2", "cli.exclusive"),
        ("Qwen3-8B --gpu 16xh200 --tensor-parallel-sums exact", "16 ranks"),
        ("Qwen3-8B --gpu 16xh200 --batch-invariant", "16 ranks"),
        ("Llama-2-7B --gpu 16xh200 --batch-invariant", "plan.exact_never_measured"),
        ("Qwen3-8B --gpu 8xh200 --batch-invariant --max-num-batched-tokens 40", "plan.exact_needs_more_rows"),
        ("Qwen3-8B --gpu 2xh200 --batch-invariant --quantization fp8", "plan.variant_weights"),
        ("Qwen3-8B --gpu h200 --batch-invariant --quantization fp8", "plan.variant_weights"),
        ("DeepSeek-V2-Lite --gpu h200 --batch-invariant", "plan.variant_attention"),
        ("Qwen3-8B --gpu 2xh200 --nnodes 3", "plan.more_nodes_than_ranks"),
        ("Qwen3-8B --gpu h200 --nnodes 2", "plan.more_nodes_than_ranks"),
        ("DeepSeek-V4-Flash --gpu h200 --pipeline-parallel-size 44", "families.too_many_stages"),
        ("DeepSeek-V4-Flash --gpu 16xh200", "families.indivisible"),
        ("DeepSeek-V4-Pro --gpu 16xh200", "families.indivisible"),
        ("gpt-oss-120b --gpu 4xh200", "families.indivisible"),
        ("DeepSeek-V4-Flash --gpu 2xh200 --batch-invariant", "plan.variant_weights"),
        ("DeepSeek-V4-Flash --gpu 4xh200 --tensor-parallel-sums exact", "plan.exact_needs_whole_experts"),
        (
            "DeepSeek-V4-Flash --gpu 4xh200 --tensor-parallel-sums exact --enable-expert-parallel",
            "plan.exact_needs_fewer_rows",
        ),
        (
            "DeepSeek-V4-Flash --gpu 8xh200 --tensor-parallel-sums exact --enable-expert-parallel",
            "plan.exact_never_measured",
        ),
    ],
)
def test_ranks_that_cannot_split_a_model_are_refused(here: Here, words: str, expected: str) -> None:
    ended = here("plan", *shlex.split(words))
    assert ended.code == 2
    assert ended.refuses(expected), ended
    assert ended.err.count("\n") == 1


def test_neighbours_that_are_alike_stand_on_one_line() -> None:
    rows = [RankRow(0, None, 100, 7, {}, True), *(RankRow(rank, None, 90, 8, {"x": -10}, False) for rank in (1, 2, 3))]
    text = [line.text for line in rank_lines(rows)]
    assert len(text) == 3
    assert text[2].startswith("1 to 3")
    assert text[2].endswith("x -10 B")
    assert rank_lines([]) == []

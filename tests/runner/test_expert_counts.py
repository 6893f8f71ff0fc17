"""Distinct experts of steps: dummy weights route as uniform choice would, in every family, layer and kind of step."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.api.llm import LLM
from holdfast.engine.core import EngineCore
from holdfast.models.catalogue import find_model
from holdfast.models.spec import uniform_experts
from holdfast.request.sampling_params import SamplingParams
from holdfast.runner.expert_counts import ExpertCounts, counting_experts, expert_layers
from holdfast.runner.runner import Runner

SHAPES = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 4096}
PLAIN = {**SHAPES, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64}
SMALL_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 32}
LATENTS = {
    **SHAPES,
    **SMALL_EXPERTS,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 32,
    "first_k_dense_replace": 1,
}
ENTRIES = {
    **SHAPES,
    **SMALL_EXPERTS,
    "hidden_size": 256,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 24,
    "num_hash_layers": 1,
    "n_routed_experts": 32,
    "moe_intermediate_size": 64,
}
KINDS = ["sliding_attention", "full_attention"] * 2
QWEN3 = {**PLAIN, **SMALL_EXPERTS, "num_experts": 32}
QUICK = [
    pytest.param("Qwen3-30B-A3B", QWEN3, {}, id="Qwen3"),
    pytest.param("gpt-oss-20b", {**PLAIN, "num_local_experts": 32, "layer_types": KINDS}, {}, id="gpt-oss"),
    pytest.param("DeepSeek-V3", {**LATENTS, "n_group": 8, "topk_group": 4}, {}, id="DeepSeek-V3, groups"),
]
SLOW = [
    pytest.param("DeepSeek-V4-Flash", {**ENTRIES, "num_experts_per_tok": 6}, {}, id="DeepSeek-V4, table"),
    *(pytest.param("Qwen3-30B-A3B", QWEN3, {"quantization": name}, id=name) for name in ("fp8", "int8", "mxfp4")),
    pytest.param("Qwen3-30B-A3B", QWEN3, {"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param("Qwen3-30B-A3B", {**QWEN3, "num_hidden_layers": 48}, {}, id="48 layers"),
    pytest.param(
        "Qwen3-30B-A3B",
        {**QWEN3, "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8},
        {},
        id="128 experts of 2048",
    ),
    pytest.param(
        "Qwen1.5-MoE-A2.7B",
        {**PLAIN, **SMALL_EXPERTS, "num_experts": 30, "shared_expert_intermediate_size": 64},
        {},
        id="Qwen2",
    ),
    pytest.param("DeepSeek-V3.2", {**LATENTS, "n_group": 8, "topk_group": 4}, {}, id="DeepSeek-V3.2"),
    pytest.param("GLM-4.7-Flash", LATENTS, {}, id="GLM"),
    pytest.param("Kimi-K2-Instruct", LATENTS, {}, id="Kimi"),
]
BATCHES = (1, 8, 64)
PROMPT_TOKENS, NUM_STEPS = 48, 5


def open_dummy(folder: Path, name: str, shapes: Mapping[str, Any], device: str, options: Mapping[str, Any]) -> LLM:
    (folder / "config.json").write_text(json.dumps({**find_model(name)[1], **shapes}))
    return LLM(
        str(folder),
        load_format="dummy",
        tokenizer="none",
        device=device,
        max_model_len=PROMPT_TOKENS + NUM_STEPS + 1,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=max(BATCHES) * PROMPT_TOKENS,
        on_progress=lambda done, total: None,
        **{"dtype": "float32" if device == "cpu" else "bfloat16", **options},
    )


def runner_of(llm: LLM) -> Runner:
    core = llm.engine.core
    assert isinstance(core, EngineCore)
    assert isinstance(core.runner, Runner)
    return core.runner


def routes(llm: LLM, num_sequences: int) -> list[list[torch.Tensor]]:
    """Expert ids of every sparse layer, a tensor for each step."""
    runner, dice = runner_of(llm), random.Random(0)
    found: list[list[torch.Tensor]] = [[] for _ in expert_layers(runner)]
    ids = [[dice.randrange(runner.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_sequences)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
    with counting_experts(runner):
        for layer, own in zip(expert_layers(runner), found, strict=True):
            layer.watch = lambda ids_TS, own=own: own.append(ids_TS.cpu().clone())
        llm.generate([{"prompt_token_ids": prompt} for prompt in ids], params, progress=False)
    return found


def assert_uniform(steps: list[torch.Tensor], num_experts: int, words: str) -> None:
    """Blocks of successive rows touch as many experts as uniform choice does."""
    for batch in BATCHES:
        blocks = [block for ids_TS in steps for block in ids_TS.split(batch) if len(block) == batch]
        distinct = [block.unique().numel() for block in blocks]
        top_k = steps[0].shape[1]
        if batch == 1:
            assert set(distinct) == {top_k}, words
            continue
        mean = sum(distinct) / len(distinct)
        assert mean == pytest.approx(uniform_experts(num_experts, top_k, batch), rel=0.05), f"{words}, {batch} rows"


def check_routes(llm: LLM) -> None:
    torch.manual_seed(0)
    num_experts = len(expert_layers(runner_of(llm))[0].router_EH)
    found = routes(llm, max(BATCHES))
    for layer in {0, len(found) // 2, len(found) - 1}:
        decode = [ids_TS for ids_TS in found[layer] if len(ids_TS) == max(BATCHES)]
        prefill = [ids_TS for ids_TS in found[layer] if len(ids_TS) > max(BATCHES)]
        assert len(decode) >= NUM_STEPS - 1
        shuffled = [ids_TS[torch.randperm(len(ids_TS))] for ids_TS in decode for _ in range(4)]
        assert_uniform(shuffled, num_experts, f"layer {layer}, decode")
        if layer < len(found) - 1:  # only the last rows of prompts reach the last layer's experts
            assert prefill
            assert_uniform(prefill, num_experts, f"layer {layer}, prefill")


@pytest.mark.parametrize(("name", "shapes", "options"), QUICK)
def test_dummy_routers_route_uniformly(tmp_path, name, shapes, options):
    check_routes(open_dummy(tmp_path, name, shapes, "cpu", options))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shapes", "options"), SLOW)
def test_dummy_routers_of_more_models_route_uniformly(tmp_path, name, shapes, options):
    check_routes(open_dummy(tmp_path, name, shapes, "cpu", options))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["bfloat16", "fp8"])
def test_dummy_routers_of_qwen3_30b_route_uniformly(tmp_path, options):
    check_routes(open_dummy(tmp_path, "Qwen3-30B-A3B", {"num_hidden_layers": 4}, "cuda", options))


def test_counting_experts_returns_rows_and_uniform_choice(tmp_path):
    llm = open_dummy(tmp_path, "Qwen3-30B-A3B", QWEN3, "cpu", {})
    runner = runner_of(llm)
    prompts = [{"prompt_token_ids": [3 + index, 5, 7 + index]} for index in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with counting_experts(runner) as counts:
        llm.generate(prompts, params, progress=False)
    found = counts.summary(8)
    assert found is not None
    assert (found["batch"], found["uniform"]) == (8, round(uniform_experts(32, 4, 8), 2))
    assert 12 < found["measured"] < 28
    assert counts.summary(9) is None
    seen = len(counts.rows)
    llm.generate(prompts, params, progress=False)
    assert len(counts.rows) == seen, "nothing is counted outside"
    assert all(layer.watch is None for layer in expert_layers(runner))


def test_expert_counts_mixed_rows_average_each_step():
    counts = ExpertCounts(4)
    counts.add(torch.tensor([[0], [0]]))
    counts.add(torch.tensor([[1]]))
    assert counts.summary() == {"batch": 1.5, "measured": 1.0, "uniform": round((4 * (1 - 0.75**2) + 1) / 2, 2)}


@pytest.mark.parametrize(("batch", "expected"), [(1, 8.0), (2, 15.5), (10**6, 128.0)])
def test_uniform_experts_of_rows_follow_the_formula(batch, expected):
    assert uniform_experts(128, 8, batch) == pytest.approx(expected)


def test_uniform_experts_are_near_the_mean_of_draws():
    dice = random.Random(0)
    draws = [len({e for _ in range(8) for e in dice.sample(range(60), 4)}) for _ in range(500)]
    assert uniform_experts(60, 4, 8) == pytest.approx(sum(draws) / len(draws), rel=0.02)

"""A rank's step by itself, of one stage or several: eager it neither allocates nor waits for the device, captured it is the same to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import EngineConfig
from holdfast.distributed.mesh import Mesh, meshes
from holdfast.loading.model_files import open_model
from holdfast.memory.ledger import Ledger
from holdfast.planning.plan import RunnerPlan
from holdfast.request.sequence import LiveStep
from holdfast.runner.build import BuiltRunner, build_runner
from holdfast.runner.graphs import StepGraphs
from kernels.triton_cases import assert_allocates_nothing
from runner.mirror_exchange import MirrorExchange
from runner.rank_runs import OPTIONS, states_of, steps_of, write_model

MODELS = pytest.mark.parametrize(
    ("name", "num_ranks", "whole_experts", "exact", "options"),
    [
        ("llama", 2, False, False, {}),
        ("llama", 2, False, True, {"batch_invariant": True}),
        ("llama_tied", 4, False, False, {"quantization": "fp8", "quantized_embeddings": "all"}),
        ("qwen3_moe", 4, True, False, {}),
        ("qwen3_moe", 2, False, True, {"batch_invariant": True}),
        ("gpt_oss", 2, True, False, {"kv_cache_dtype": "turboquant_4bit_nc"}),
        ("deepseek_v3", 4, True, False, {}),
        ("v4_flash", 2, False, False, {}),
        ("v4_flash", 4, True, False, {"kv_cache_dtype": "fp8"}),
    ],
)
# An odd vocabulary, or share of one, is one that cuBLAS multiplies otherwise among more rows, or than the whole: sizes of steps would be left out.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64, "num_hidden_layers": 2}
ENTRIES = {"num_hidden_layers": 4, "head_dim": 80, "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_lora_rank": 64}
OWN_SIZES: dict[str, dict[str, Any]] = {"deepseek_v3": {"num_hidden_layers": 3}, "v4_flash": ENTRIES}


def build(
    folder: Path, name: str, num_ranks: int, whole_experts: bool, exact: bool, device: str, options: dict[str, Any]
) -> BuiltRunner:
    """The first rank, without its peers."""
    mesh, *_ = meshes(num_ranks, has_expert_parallelism=whole_experts, is_exact=exact)
    sizes = WIDE | OWN_SIZES.get(name, {}) | ({"vocab_size": 512} if exact else {})
    return build_alone(write_model(folder, name, **sizes), mesh, device, options)


def build_alone(path: Path, mesh: Mesh, device: str, options: dict[str, Any]) -> BuiltRunner:
    """Any rank, without its peers."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    config = EngineConfig.from_options(**(OPTIONS | {"device": device, "dtype": dtype} | options))

    def connect(plan: RunnerPlan, ledger: Ledger, sizes: tuple[int, ...]) -> tuple[MirrorExchange, tuple[int, ...]]:
        assert plan.exchange_needs is not None, f"{plan.mesh} exchanges nothing"
        return MirrorExchange(mesh, plan.exchange_needs, torch.device(device)), sizes

    return build_runner(
        config,
        open_model(str(path), "dummy"),
        lambda done, total: None,
        mesh=mesh,
        connect=connect,
    )


@torch.inference_mode()
def eager_logits(built: BuiltRunner, checks: bool) -> list[torch.Tensor]:
    """For every step with any; a rank's share."""
    found, runner = [], built.runner
    for step, rows in steps_of(runner):
        batch = runner.fill_batch(step, rows)
        plan = runner.backend.plan(batch)
        if checks:
            assert_allocates_nothing(lambda: runner.model.hidden(batch, plan))  # noqa: B023 called at once
        else:
            runner.model.hidden(batch, plan)
        if rows:
            found.append(runner.model.step_logits(batch, plan)[: len(rows)].clone())
    return found


@MODELS
def test_rank_steps_on_cpu_are_finite_and_repeatable(tmp_path, name, num_ranks, whole_experts, exact, options):
    """Just the same calls, so that what follows is known to be sound without a GPU."""
    built = build(tmp_path, name, num_ranks, whole_experts, exact, "cpu", options)
    try:
        first = eager_logits(built, checks=False)
        for ours, theirs in zip(eager_logits(built, checks=False), first, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.isfinite().all()
            assert ours.shape[1] == -(-built.runner.vocab_size // num_ranks)
    finally:
        built.release()


@pytest.mark.gpu
@MODELS
def test_rank_step_neither_allocates_nor_waits(tmp_path, name, num_ranks, whole_experts, exact, options):
    built = build(tmp_path, name, num_ranks, whole_experts, exact, "cuda", options | {"enforce_eager": True})
    try:
        assert all(logits.isfinite().all() for logits in eager_logits(built, checks=True))
    finally:
        built.release()


@pytest.mark.gpu
@MODELS
def test_graphs_are_the_kernels_to_the_bit(tmp_path, name, num_ranks, whole_experts, exact, options):
    """Decode steps of every captured size, from the same pages and states."""
    built = build(tmp_path, name, num_ranks, whole_experts, exact, "cuda", options)
    try:
        runner, graphs = built.runner, built.runner.graphs
        assert graphs is not None
        eager_logits(built, checks=False)
        (step, rows), *_ = steps_of(runner)[2:]
        size = graphs.size_for(step.num_tokens, len(rows), True)
        assert size is not None
        batch = runner.buffers.fill(step, rows, size, graphs.logit_rows(size, True), is_listed=False)
        kept = [(state, state.clone()) for state in states_of(runner)]
        with torch.inference_mode():
            plan = runner.backend.plan(batch, captured=True)
            eager = runner.model.step_logits(batch, plan)[: len(rows)].clone()
            for _ in range(3):
                for state, before in kept:
                    state.copy_(before)
                assert torch.equal(graphs.replay(size, True)[: len(rows)], eager)
    finally:
        built.release()


STAGES = pytest.mark.parametrize(
    ("name", "num_stages", "stage", "tensor_size", "options"),
    [
        ("llama", 2, 0, 1, {}),
        ("llama", 2, 1, 1, {"batch_invariant": True}),
        ("llama_tied", 3, 1, 2, {"quantization": "fp8"}),
        ("qwen3_moe", 2, 1, 2, {}),
        ("gpt_oss", 3, 0, 1, {"kv_cache_dtype": "turboquant_4bit_nc"}),
        ("deepseek_v3", 3, 0, 1, {}),
        ("deepseek_v3", 3, 1, 2, {}),
        ("deepseek_v3", 3, 2, 1, {}),
    ],
)


@torch.inference_mode()
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@STAGES
def test_graphs_of_a_stage_are_its_kernels_to_the_bit(tmp_path, name, num_stages, stage, tensor_size, options, device):
    """What it sends on and the logits of the last one, of a decode step and a mixed one; on a CPU the same calls twice."""
    layers = {"num_hidden_layers": 3}
    windows = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} if name == "gpt_oss" else {}
    even = {"vocab_size": 512} if "batch_invariant" in options else {}
    path = write_model(tmp_path, name, **WIDE | layers | windows | even)
    ranks = meshes(tensor_size, [(0, 1), (1, 2), (2, 3)] if num_stages == 3 else [(0, 2), (2, 3)])
    built = build_alone(path, ranks[stage * tensor_size], device, options | {"max_num_batched_tokens": 128})
    try:
        runner: Any = built.runner
        exchange, graphs = runner.sampler.exchange, runner.graphs or StepGraphs((4,), (64, 128), 4)
        assert (runner.graphs is not None) == (device == "cuda")

        def found(step: LiveStep, logits_RV: torch.Tensor, num_logits: int) -> list[torch.Tensor]:
            sent_TH = exchange.sent_rows(step.num_tokens, WIDE["hidden_size"], getattr(torch, runner.model._dtype))
            return [sent_TH.clone(), logits_RV[:num_logits].clone()]

        eager_logits(built, checks=False)  # what steps read of pages is written now
        for step, rows in steps_of(runner)[1:]:
            is_decode = len(rows) == step.num_tokens
            size = graphs.size_for(step.num_tokens, len(rows), is_decode)
            assert size is not None
            num_logits = graphs.logit_rows(size, is_decode)
            batch = runner.buffers.fill(step, rows, size, num_logits, is_listed=not is_decode)
            plan = runner.backend.plan(batch, captured=True)
            eager = found(step, runner.run_captured(batch, plan), len(rows))
            assert eager[0].isfinite().all()
            assert eager[0].abs().sum() > 0 or stage == num_stages - 1, "nothing was sent on"
            for _ in range(3):
                logits_RV = runner.run_captured(batch, plan) if device == "cpu" else graphs.replay(size, is_decode)
                for ours, theirs in zip(found(step, logits_RV, len(rows)), eager, strict=True):
                    assert torch.equal(ours, theirs)
                    assert ours.isfinite().all()
    finally:
        built.release()

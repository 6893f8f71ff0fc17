"""Ranks in lock-step threads against one: logits and pages to the bit where they gather (exact), nearly so where they sum (reduce)."""

from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from holdfast.distributed.mesh import Mesh, meshes
from holdfast.errors import ConfigError
from holdfast.loading.model_files import find_default_model
from holdfast.request.sampling_params import SamplingParams
from kernels.exactness import require_native
from runner.rank_runs import (
    VOCAB,
    Built,
    Ranks,
    assert_pages_are_slices,
    one_rank,
    run_steps,
    steps_of,
    whole_logits,
    write_model,
)
from runner.stepping import Stepper, Wish, drive

slow = pytest.mark.slow
CASES = [
    pytest.param("llama", 2, False),
    pytest.param("llama", 4, False, marks=slow),
    pytest.param("llama_tied", 4, False),
    pytest.param("llama_tied", 2, False, marks=slow),
    pytest.param("qwen2", 3, False),
    pytest.param("qwen3", 4, False),  # two key heads
    pytest.param("qwen3", 2, False, marks=slow),
    pytest.param("gemma3", 2, False),
    pytest.param("gemma3", 4, False, marks=slow),
    pytest.param("opt", 3, False),
    pytest.param("opt", 2, False, marks=slow),
    pytest.param("opt", 4, False, marks=slow),
    pytest.param("qwen2_moe", 4, True),
    pytest.param("qwen2_moe", 2, False, marks=slow),
    pytest.param("qwen2_moe", 2, True, marks=slow),
    pytest.param("qwen2_moe", 4, False, marks=slow),
    pytest.param("qwen3_moe", 2, False),
    pytest.param("qwen3_moe", 2, True, marks=slow),
    pytest.param("qwen3_moe", 4, False, marks=slow),
    pytest.param("qwen3_moe", 4, True, marks=slow),
    pytest.param("gpt_oss", 2, True),
    pytest.param("gpt_oss", 4, False),
    pytest.param("gpt_oss", 2, False, marks=slow),
    pytest.param("gpt_oss", 4, True, marks=slow),
    pytest.param("deepseek_v3", 2, True),
    pytest.param("deepseek_v3", 3, False),
    pytest.param("deepseek_v3", 2, False, marks=slow),
    pytest.param("deepseek_v3", 4, False, marks=slow),
    pytest.param("deepseek_v3", 4, True, marks=slow),
    pytest.param("deepseek_v32", 3, False, marks=slow),  # tokens chosen by an index
    pytest.param("deepseek_v32", 4, True, marks=slow),
    pytest.param("v4_flash", 2, True),
    pytest.param("v4_flash", 2, False, marks=slow),
    pytest.param("v4_flash", 4, True, marks=slow),
    pytest.param("v4_flash", 4, False),
    pytest.param("v4_pro", 2, True, marks=slow),
    pytest.param("v4_pro", 2, False, marks=slow),
    pytest.param("v4_pro", 4, True),
    pytest.param("v4_pro", 8, False, marks=slow),
    pytest.param("opt_350m", 4, False, marks=slow),  # the embedding is projected, and norms come last
]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 256,
}
"""A rank of two still has whole blocks of every scheme."""
SCHEMES = pytest.mark.parametrize("scheme", [None, "fp8", "fp8_tensor", "fp8_block", "int8", "mxfp4"], ids=str)
FORMATS = pytest.mark.parametrize(
    "kv_format", ["auto", "fp8", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_native()
    return tmp_path_factory.mktemp("ranks")


def assert_same(alone: Built, ranks: Ranks) -> None:
    """Logits and pages, and which layers are protected."""
    expected = run_steps(alone).logits
    found = whole_logits(ranks.run(run_steps))
    assert [step.abs().max().item() > 0.1 for step in expected] == [True] * len(expected), "weights that do nothing"
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs), f"{(ours - theirs).abs().max()} apart"
    assert_pages_are_slices(alone, ranks.built)
    protected = alone.build.plan.resolved.protected.layers
    assert all(built.build.plan.resolved.protected.layers == protected for built in ranks.built)


@pytest.mark.parametrize(("name", "num_ranks", "whole_experts"), CASES)
def test_ranks_that_gather_give_what_one_gives(folder, name, num_ranks, whole_experts):
    path = write_model(folder / name, name)
    assert_same(one_rank(path), Ranks(path, num_ranks, exact=True, whole_experts=whole_experts))


@pytest.mark.parametrize(("name", "num_ranks", "whole_experts"), CASES)
def test_ranks_that_sum_are_near_and_equal_to_each_other(folder, name, num_ranks, whole_experts):
    path = write_model(folder / name, name)
    expected = run_steps(one_rank(path)).logits
    ran = Ranks(path, num_ranks, exact=False, whole_experts=whole_experts).run(run_steps)
    for ours, theirs in zip(whole_logits(ran), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for one in ran[1:]:
        for ours, theirs in zip(one.hidden, ran[0].hidden, strict=True):
            assert torch.equal(ours, theirs), "ranks differ from each other"


@pytest.mark.each_value
@SCHEMES
@FORMATS
@pytest.mark.parametrize(("name", "whole_experts"), [("llama", False), ("qwen2", False), ("qwen3_moe", True)])
def test_exact_ranks_match_one_rank_in_every_scheme_and_format(folder, name, whole_experts, scheme, kv_format):
    """Those made on the way; keys of Qwen2 have a bias, by which layers are protected, and keys are centred in all of them."""
    path = write_model(folder / f"wide {name}", name, **WIDE, num_hidden_layers=5 if name == "qwen2" else 2)
    embeddings = "all" if scheme in ("fp8", "int8") else "auto"
    options = {"quantization": scheme, "kv_cache_dtype": kv_format, "quantized_embeddings": embeddings}
    assert_same(one_rank(path, **options), Ranks(path, 2, exact=True, whole_experts=whole_experts, **options))


@pytest.mark.each_value
@pytest.mark.parametrize("whole_experts", [False, True], ids=["sliced", "whole"])
@pytest.mark.parametrize("kv_format", ["auto", "fp8_ds_mla", "turboquant_4bit_nc"])
def test_latents_are_the_same_on_all_ranks(folder, kv_format, whole_experts):
    """For a checkpoint that is stored in blocks of e4m3."""
    stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "v_head_dim": 32}
    widths = {"moe_intermediate_size": 256, "intermediate_size": 512, "qk_nope_head_dim": 48, "q_lora_rank": 128}
    path = write_model(folder / "stored v3", "deepseek_v3", **sizes, **widths, quantization_config=stored)
    options = {"kv_cache_dtype": kv_format}
    assert_same(one_rank(path, **options), Ranks(path, 2, exact=True, whole_experts=whole_experts, **options))


@pytest.mark.parametrize("whole_experts", [False, pytest.param(True, marks=slow)], ids=["sliced", "whole"])
def test_experts_that_are_stored_in_mxfp4(folder, whole_experts):
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path = write_model(folder / "stored oss", "gpt_oss", quantization_config=stored, intermediate_size=128)
    assert_same(one_rank(path), Ranks(path, 2, exact=True, whole_experts=whole_experts))


@pytest.mark.parametrize(
    ("name", "num_ranks", "whole_experts"),
    [("v4_flash", 2, False), *(pytest.param(name, 4, True, marks=slow) for name in ("v4_flash", "v4_pro"))],
)
@pytest.mark.parametrize("kv_format", ["auto", pytest.param("fp8", marks=slow)])
def test_ranks_match_one_rank_for_v4_as_stored(folder, name, num_ranks, whole_experts, kv_format):
    """fp8 in blocks, experts in MXFP4; a rank has whole blocks of columns and rows."""
    stored = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    sizes = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 128}
    sizes |= {"hidden_size": 128 * num_ranks, "moe_intermediate_size": 128 * num_ranks}
    path = write_model(
        folder / f"stored {name} {num_ranks}", name, **sizes, quantization_config=stored, expert_dtype="fp4"
    )
    alone, options = one_rank(path, kv_cache_dtype=kv_format), {"kv_cache_dtype": kv_format}
    assert_same(alone, Ranks(path, num_ranks, exact=True, whole_experts=whole_experts, **options))
    ran = Ranks(path, num_ranks, exact=False, whole_experts=whole_experts, **options).run(run_steps)
    for ours, theirs in zip(whole_logits(ran), run_steps(alone).logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.5)
        assert (ours - theirs).abs().median() < 0.02 * theirs.abs().median()


@slow
@pytest.mark.parametrize("quantization", [None, "int8"], ids=str)
def test_default_model_on_three_ranks_matches_one_rank(quantization):
    """A GGUF file: nine query heads, three key heads."""
    require_native()
    path, options = find_default_model(), {"load_format": "auto", "quantization": quantization}
    assert_same(one_rank(path, **options), Ranks(path, 3, exact=True, **options))
    ran = Ranks(path, 3, exact=False, **options).run(run_steps)
    expected = run_steps(one_rank(path, **options)).logits
    for ours, theirs in zip(whole_logits(ran), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("exact", [False, True], ids=["reduce", "exact"])
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=slow)])
def test_runner_row_has_same_bits_in_any_batch(folder, name, exact):
    ranks = Ranks(write_model(folder / name, name), 2, exact=exact)
    in_company = ranks.run(run_steps)

    def alone(built: Built) -> list[torch.Tensor]:
        """The first sequence, without the others."""
        steps = [(type(step)(step.scheduled[:1]), rows) for step, rows in steps_of(built.runner)]
        wanted = [[row for row in rows if row < step.num_tokens] for step, rows in steps]
        return run_steps(built, [(step, rows) for (step, _), rows in zip(steps, wanted, strict=True)]).logits

    for own, company in zip(ranks.run(alone), in_company, strict=True):
        assert torch.equal(own[0], company.logits[0][: len(own[0])])
        assert torch.equal(own[-1], company.logits[-1])


@pytest.mark.parametrize("mesh", meshes(3), ids=str)
def test_ranks_indivisible_heads_refused_before_reading(tmp_path, mesh: Mesh):
    path = write_model(tmp_path, "llama", num_key_value_heads=4)
    with pytest.raises(ConfigError, match="4 key heads"):
        Ranks(path, mesh.tensor_size, exact=False)


def wishes() -> list[Wish]:
    """Greedy requests, some with alternatives beside every token; ids are any."""
    dice = Random(5)
    return [
        Wish(
            [dice.randrange(3, VOCAB) for _ in range(dice.randint(1, 30))],
            SamplingParams(temperature=0.0, logprobs=2 if number % 2 else None),
            dice.randint(1, 12),
        )
        for number in range(7)
    ]


def answers(built: Built, requests: list[Wish], seed: int) -> list[tuple[list[int], list]]:
    """Tokens of each request, and on the first rank their log-probabilities, by steps of a random schedule."""
    runner = built.runner
    stepper = Stepper(runner.limits, runner.groups, runner.num_pages, requests, seed)
    people = drive(runner, stepper, 0).people
    return [(person.output, [] if built.mesh.rank else person.logprobs) for person in people]


@pytest.mark.parametrize("exact", [False, True], ids=["reduce", "exact"])
@pytest.mark.parametrize(
    ("name", "num_ranks", "whole_experts"),
    [
        ("llama", 2, False),
        pytest.param("gemma3", 4, False, marks=slow),
        pytest.param("gpt_oss", 2, True, marks=slow),
        pytest.param("opt", 3, False, marks=slow),
    ],
)
def test_answers_do_not_depend_on_the_schedule(folder, name, num_ranks, whole_experts, exact):
    """By any schedule every request has the same tokens on all ranks; in exact mode those of one rank, to the bit.

    Latents are not among them: attention to them depends on company on a CPU, on one rank too.
    """
    path, requests, found = write_model(folder / name, name), wishes(), []
    for seed in range(3):
        ranks = Ranks(path, num_ranks, exact=exact, whole_experts=whole_experts)
        first, *others = ranks.run(partial(answers, requests=requests, seed=seed))
        assert all([tokens for tokens, _ in other] == [tokens for tokens, _ in first] for other in others)
        found.append(first)
    found += [answers(one_rank(path), requests, 7)] if exact else []
    assert all(one == found[0] for one in found[1:])

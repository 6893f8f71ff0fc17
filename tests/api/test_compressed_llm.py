"""Compressed attention (DeepSeek-V4) through LLM: greedy tokens are those of transformers, alone and in company, on found and on lost pages."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from api.greedy_answers import answer_greedily, generate_greedily
from cli.cli_models import write_tokenizer
from error_codes import raises_code
from holdfast.api.llm import LLM
from holdfast.errors import ConfigError
from holdfast.request.sampling_params import SamplingParams
from models.tiny_compressed import tiny_compressed

MODELS = {"flash": "like V4-Flash", "windows": "windows"}
PROMPTS = [[(7 * number + 5 * place * place) % 120 + 3 for place in range(3 + 31 * number)] for number in range(4)]
"""For 3 to 96 tokens: shorter and longer than windows and blocks of the prefix cache."""
NUM_OUTPUT = 8
answers = partial(answer_greedily, num_tokens=NUM_OUTPUT)
greedy = partial(generate_greedily, num_tokens=NUM_OUTPUT)


class Case:
    """A model on disk, and what transformers says to every prompt."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.has_entries = name != "windows"
        model, _ = tiny_compressed(MODELS[name])
        model.save_pretrained(folder)
        write_tokenizer(folder)
        self.answers = [greedy(model, prompt) for prompt in PROMPTS]
        self.vectors = hidden_states(model, PROMPTS)

    def open(self, **options: Any) -> LLM:
        return LLM(model=str(self.folder), dtype="float32", page_tokens=1, max_model_len=128, device="cpu", **options)


@torch.no_grad()
def hidden_states(model: Any, prompts: list[list[int]]) -> list[list[float]]:
    """The last hidden state of each prompt, of unit length."""
    states = [model.model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return [torch.nn.functional.normalize(state_H, dim=-1).tolist() for state_H in states]


def embedded(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    outputs = llm.embed(prompt_token_ids=prompts, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("max_num_batched_tokens", [5, 128])
def test_llm_compressed_matches_transformers_in_any_chunks(case: Case, max_num_batched_tokens: int) -> None:
    llm = case.open(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=3)
    assert answers(llm, PROMPTS) == case.answers
    alone = case.open(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=1, enable_prefix_caching=False)
    assert answers(alone, PROMPTS[1:3]) == case.answers[1:3]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["flash"], indirect=True)
def test_llm_compressed_prefix_hits_match(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=19, max_num_seqs=12)
    scheduler = llm.engine.scheduler
    assert answers(llm, PROMPTS) == case.answers
    assert scheduler.num_prefix_hit_tokens == 0
    block, whole = scheduler.prefix.block_tokens, PROMPTS[3] + case.answers[3]
    longest = max(group.page_tokens for group in scheduler.groups)
    assert 8 <= block < longest <= 48, "so that a prompt has some of them, and ends inside pages"
    # At every block, and around it: what follows there is what follows without a cache.
    lengths = [len(whole), *(at + more for at in range(block, len(whole), block) for more in (0, 1))]
    prompts = [whole[:length] for length in lengths]
    lost = case.open(max_num_batched_tokens=64, max_num_seqs=3, enable_prefix_caching=False)
    expected, hits = answers(lost, prompts), []
    for prompt, right in zip(prompts, expected, strict=True):
        before = scheduler.num_prefix_hit_tokens
        assert answers(llm, [prompt]) == [right]
        hits.append(scheduler.num_prefix_hit_tokens - before)
    assert hits[1:] == [(length - 1) // block * block for length in lengths[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["flash"], indirect=True)
def test_completions_of_one_prompt_fork(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=4)
    params = SamplingParams(temperature=1.5, max_tokens=5, ignore_eos=True, seed=7)
    prompts: list[Any] = [{"prompt_token_ids": PROMPTS[0]}, {"prompt_token_ids": PROMPTS[3]}]
    together = llm.generate(prompts, replace(params, n=3))
    assert llm.engine.scheduler.num_prefix_hit_tokens >= 2 * 48, "all of a prompt but its last block"
    lost = case.open(max_num_batched_tokens=96, max_num_seqs=1, enable_prefix_caching=False)
    for own, alone in zip(together, lost.generate(prompts, replace(params, n=3)), strict=True):
        assert [one.token_ids for one in own.outputs] == [one.token_ids for one in alone.outputs]
    assert len({tuple(one.token_ids) for one in together[1].outputs}) == 3


def preempt_after(llm: LLM, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempt the last sequence once, before the step behind so many."""
    scheduler, schedule, countdown = llm.engine.scheduler, llm.engine.scheduler.schedule, num_steps

    def preempting(*given: Any) -> Any:
        nonlocal countdown
        if countdown == 0 and scheduler.num_running:
            scheduler.preempt_last()
        countdown -= 1
        return schedule(*given)

    monkeypatch.setattr(scheduler, "schedule", preempting)


@pytest.mark.slow
def test_llm_compressed_preempted_sequences_match(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=2)
    for number in (1, 2, 5, 8, 13):
        with monkeypatch.context() as patch:
            preempt_after(llm, number, patch)
            if number % 2:
                llm.reset_prefix_cache()
            assert answers(llm, [PROMPTS[1], PROMPTS[3]]) == [case.answers[1], case.answers[3]]
    assert llm.engine.scheduler.num_preemptions == 5


def passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Tokens and log-probabilities of all prompts: in chunks, behind cached prefixes, and with preemptions."""
    params, found = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2), []
    for num_steps in (None, None, 2, 7):
        with monkeypatch.context() as patch:
            if num_steps is not None:
                preempt_after(llm, num_steps, patch)
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
        found.append([(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs])
    assert llm.engine.scheduler.num_prefix_hit_tokens > 0
    assert llm.engine.scheduler.num_preemptions == 2
    return found


@pytest.mark.slow
@pytest.mark.parametrize("whole_experts", [False, True], ids=["sliced", "whole"])
@pytest.mark.parametrize("case", ["flash"], indirect=True)
def test_llm_compressed_ranks_match_one_process(
    case: Case, monkeypatch: pytest.MonkeyPatch, whole_experts: bool
) -> None:
    """With exact sums to the bit, log-probabilities too; ranks are processes."""
    options = {"max_num_batched_tokens": 19, "max_num_seqs": 3}
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": whole_experts}
    with case.open(**options) as llm:
        expected = passes(llm, monkeypatch)
    with case.open(**options, **ranks, tensor_parallel_sums="exact") as llm:
        assert passes(llm, monkeypatch) == expected
    assert [[tokens for tokens, _ in found] for found in expected] == 4 * [case.answers]
    if whole_experts:
        return
    with case.open(**options, **ranks, tensor_parallel_sums="reduce") as llm:
        for own, other in zip(passes(llm, monkeypatch), expected, strict=True):
            assert [tokens for tokens, _ in own] == [tokens for tokens, _ in other]


def test_llm_compressed_unsupported_options_are_refused(case: Case) -> None:
    with raises_code("plan.variant_attention", ConfigError, name="batch_invariant"):
        case.open(batch_invariant=True)
    if case.has_entries:
        with raises_code("plan.no_draft_tokens", ConfigError, value="ngram:4"):
            case.open(speculative="ngram:4")
    with raises_code("plan.one_kv_format", ConfigError, name="kv_protected_layers"):
        case.open(kv_protected_layers=1)


def test_memory_is_what_was_planned(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=2)
    rows = {row.owner: row for row in llm.memory.rows}
    states = {owner: row for owner, row in rows.items() if owner.startswith("kv state")}
    assert bool(states) is case.has_entries
    assert all(row.held_bytes == row.planned_bytes for row in states.values())
    pages = rows["kv pages"]
    assert pages.held_bytes is not None
    assert 0 <= pages.planned_bytes - pages.held_bytes < 1024, "what may lie unused behind planes"


@pytest.mark.parametrize("case", ["flash"], indirect=True)
def test_llm_compressed_turboquant_4bit_is_near_unquantized(case: Case) -> None:
    """Near what is not quantized, in this small a model; without the fold of the rotation it is more than 1 away."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kv_format in ("auto", "turboquant_4bit_nc"):
        llm = case.open(max_num_batched_tokens=64, max_num_seqs=2, kv_cache_dtype=kv_format)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[1:]], params)
        rows = [row for output in outputs for row in output.prompt_logprobs or () if row]
        found.append(torch.tensor([next(iter(row.values())).logprob for row in rows]))
    assert 0 < float((found[0] - found[1]).abs().mean()) < 0.5


@pytest.mark.slow
def test_embed_gives_the_last_hidden_state(case: Case) -> None:
    with case.open(max_num_batched_tokens=19, max_num_seqs=3) as llm:
        for _ in range(2):  # the second time on cached prefixes
            for vector, expected in zip(embedded(llm, PROMPTS), case.vectors, strict=True):
                assert vector == pytest.approx(expected, abs=1e-4)

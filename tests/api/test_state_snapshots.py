"""Gated delta nets through LLM: tokens and log-probabilities are equal to the bit however prompts are cut, found, forked or lost."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.greedy_answers import generate_greedily
from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from holdfast.request.sampling_params import SamplingParams
from models.tiny_states import save_state_model

GRID = 64
NUM_OUTPUT = 6
STEM = [(11 * place * place + 3 * place) % 250 + 3 for place in range(300)]
PROMPTS = [
    [9, 8, 7],
    STEM[:64],
    STEM[:65],
    STEM[:130],
    [*STEM[:70], *STEM[:60]],
    STEM[:193],
]
"""Alone on a chunk, whole chunks, beginnings of each other, and one that branches off inside a chunk."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
Answers = list[tuple[list[int], list[float]]]


class Case:
    """A model on disk, and what it says to every prompt alone, without a cache, in one step."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model = save_state_model(name, folder)
        write_tokenizer(folder)
        self.alone = self.open(max_num_seqs=1, enable_prefix_caching=False)
        self.answers = answers(self.alone, PROMPTS)

    def open(self, **options: Any) -> LLM:
        settings = {"max_model_len": 320, "max_num_batched_tokens": 320} | options
        return LLM(model=str(self.folder), dtype="float32", page_tokens=16, device="cpu", **settings)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = PARAMS) -> Answers:
    """Tokens of every completion, and their log-probabilities."""
    found: Answers = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        for one in output.outputs:
            assert one.logprobs is not None, "no log-probabilities"
            pairs = zip(one.logprobs, one.token_ids, strict=True)
            found.append((list(one.token_ids), [by_id[token].logprob for by_id, token in pairs]))
    return found


@pytest.fixture(scope="module", params=["3.5", pytest.param("next", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("state"))


def test_answers_are_those_of_transformers(case: Case) -> None:
    expected = [generate_greedily(case.model, prompt, NUM_OUTPUT) for prompt in PROMPTS[2:5]]
    assert [tokens for tokens, _ in case.answers[2:5]] == expected


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [64, 65, 100, 127, 128, 191, 320])
def test_every_chunk_size_and_company_give_the_same_bits(case: Case, budget: int) -> None:
    llm = case.open(max_num_batched_tokens=budget, max_num_seqs=4, state_snapshots=2)
    assert answers(llm, PROMPTS) == case.answers
    # What the first ones left is found by those that come now.
    assert answers(llm, PROMPTS[::-1]) == case.answers[::-1]
    assert llm.stats().num_snapshot_hits > 0


def test_prefix_hits_at_every_boundary_give_the_same_bits(case: Case) -> None:
    llm = case.open(max_num_seqs=2, state_snapshots=16, snapshot_tokens=GRID)
    whole = STEM[:260]
    answers(llm, [whole])
    lengths = [at + more for at in range(GRID, len(whole), GRID) for more in (0, 1, 2)]
    prompts = [[*whole[:length], 5] for length in lengths]
    expected, hits = answers(case.alone, prompts), []
    for prompt, right in zip(prompts, expected, strict=True):
        before = llm.stats().num_prefix_hit_tokens
        assert answers(llm, [prompt]) == [right]
        hits.append(llm.stats().num_prefix_hit_tokens - before)
    assert hits == [length // GRID * GRID for length in lengths]


@pytest.mark.each_value
@pytest.mark.parametrize("num_snapshots", [0, 1, 2, 40])
def test_any_number_of_snapshots_gives_the_same_bits(case: Case, num_snapshots: int) -> None:
    llm = case.open(max_num_batched_tokens=128, max_num_seqs=3, state_snapshots=num_snapshots, snapshot_tokens=GRID)
    for _ in range(2):
        assert answers(llm, PROMPTS) == case.answers
    scheduler = llm.engine.scheduler
    assert (llm.stats().num_snapshot_hits > 0) == (num_snapshots > 0)
    assert scheduler.snapshots is not None and scheduler.snapshots.num_held <= num_snapshots  # noqa: PT018
    scheduler.check()


def test_completions_of_one_prompt_fork_with_its_state(case: Case) -> None:
    params = replace(PARAMS, temperature=1.5, seed=7, n=3)
    prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[2]]
    together = case.open(max_num_seqs=4, max_num_batched_tokens=128, state_snapshots=2)
    assert answers(together, prompts, params) == answers(case.alone, prompts, params)
    assert together.stats().num_prompt_tokens < sum(map(len, prompts)) + 3 * GRID


def preempt_at(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Preempt the last sequence before one step; how many steps there were."""
    scheduler, schedule, num_steps = llm.engine.scheduler, llm.engine.scheduler.schedule, 0

    def preempting(*given: Any) -> Any:
        nonlocal num_steps
        if num_steps == number and scheduler.num_running:
            scheduler.preempt_last()
        num_steps += 1
        return schedule(*given)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    return lambda: num_steps


@pytest.mark.parametrize("num_snapshots", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_preemption_before_every_step_changes_no_bit(
    case: Case, num_snapshots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = case.open(max_num_batched_tokens=128, max_num_seqs=2, state_snapshots=num_snapshots)
    number, num_steps = 1, 2
    while number < num_steps:
        with monkeypatch.context() as patch:
            count = preempt_at(llm, number, patch)
            if number % 2:
                llm.reset_prefix_cache()
            assert answers(llm, [PROMPTS[1], PROMPTS[4]]) == [case.answers[1], case.answers[4]]
            num_steps = count()
        number += 1
    assert llm.stats().num_preemptions >= number - 2 > 3


def test_states_of_other_salts_and_of_a_reset_cache_are_not_found(case: Case) -> None:
    llm = case.open(state_snapshots=4)
    for salt, reset, hits in (("a", False, 0), ("b", False, 0), ("a", False, 192), ("a", True, 0)):
        before = llm.stats().num_prefix_hit_tokens
        if reset:
            llm.reset_prefix_cache()
        prompt: Any = {"prompt_token_ids": PROMPTS[5], "cache_salt": salt}
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == case.answers[5][0]
        assert llm.stats().num_prefix_hit_tokens - before == hits


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_every_rank_and_stage_copies_its_own_states(ranks: dict[str, int], tmp_path: Path) -> None:
    """Each stage has layers of both kinds. Sums of two ranks round otherwise, so tokens alone are compared."""
    linear, full = "linear_attention", "full_attention"
    save_state_model("3.5", tmp_path, layer_types=[linear, full, linear, full])
    write_tokenizer(tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "page_tokens": 16, "device": "cpu", "max_model_len": 320}
    alone = LLM(model=str(tmp_path), max_num_seqs=1, enable_prefix_caching=False, **settings)
    expected = [tokens for tokens, _ in answers(alone, PROMPTS)]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 128, "state_snapshots": 4, "snapshot_tokens": GRID}
    llm = LLM(model=str(tmp_path), **settings, **options, **ranks)
    for _ in range(2):
        assert [tokens for tokens, _ in answers(llm, PROMPTS)] == expected
    assert llm.stats().num_snapshot_hits > 3
    llm.shutdown()

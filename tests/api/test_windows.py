"""Sliding windows through LLM, over cache groups: greedy tokens are those of transformers, whatever happens to pages on the way."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from api.greedy_answers import answer_greedily
from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from holdfast.cache.groups import HOLE
from loading.tiny_models import save_tiny

WINDOW = 8
MODELS: dict[str, dict[str, Any]] = {
    "mistral_window": {},
    "qwen2_window": {
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention", "sliding_attention"],
    },
}
PROMPTS = [[(7 * number + 5 * place * place) % 250 + 3 for place in range(3 + 13 * number)] for number in range(6)]
"""For 3 to 68 tokens: several windows, none of them a multiple of a page."""
NUM_OUTPUT = 30
answers = partial(answer_greedily, num_tokens=NUM_OUTPUT)


class Case:
    """A model on disk, and what transformers says to every prompt."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        model = save_tiny(family, folder, max_position_embeddings=256, **MODELS[family])
        write_tokenizer(folder)
        self.answers = [greedy(model, prompt) for prompt in PROMPTS]

    def open(self, **options: Any) -> LLM:
        return LLM(model=str(self.folder), dtype="float32", page_tokens=4, max_model_len=128, device="cpu", **options)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_OUTPUT):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_llm_windows_match_transformers_in_any_chunks(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=3, max_num_seqs=3)
    assert answers(llm, PROMPTS) == case.answers
    alone = case.open(max_num_batched_tokens=128, max_num_seqs=1, enable_prefix_caching=False)
    assert answers(alone, PROMPTS) == case.answers


def test_llm_windows_prefix_hits_and_misses_match(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=32, max_num_seqs=3)
    scheduler = llm.engine.scheduler
    assert answers(llm, PROMPTS) == case.answers
    num_hits = 0
    for prompt, answer in zip(PROMPTS, case.answers, strict=True):
        assert answers(llm, [prompt]) == [answer]
        before = scheduler.num_prefix_hit_tokens
        assert answers(llm, [prompt]) == [answer]
        num_hits += scheduler.num_prefix_hit_tokens > before
        (found,) = answers(llm, [prompt + answer[:9]])
        assert found[: NUM_OUTPUT - 9] == answer[9:]
    assert num_hits >= 1, "nothing was found again"


@pytest.mark.each_value
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_llm_windows_preempted_sequences_match(
    case: Case, monkeypatch: pytest.MonkeyPatch, enable_prefix_caching: bool
) -> None:
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=2, enable_prefix_caching=enable_prefix_caching)
    scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule
    countdown = 0

    def preempting(*limits: Any) -> Any:
        nonlocal countdown
        if countdown == 0 and scheduler.num_running:
            scheduler.preempt_last()
        countdown -= 1
        return schedule(*limits)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    for number in range(1, 36, 4):
        countdown = number
        llm.reset_prefix_cache()
        chosen = [1, 4] if number % 8 == 1 else [5]
        assert answers(llm, [PROMPTS[index] for index in chosen]) == [case.answers[index] for index in chosen]
    assert scheduler.num_preemptions >= 7


def test_scheduler_frees_pages_that_left_the_window(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=1)
    scheduler = llm.engine.scheduler
    held: list[list[int]] = []
    schedule = scheduler.schedule

    def watched(*limits: Any) -> Any:
        step = schedule(*limits)
        for item in step.scheduled:
            for group, table in zip(scheduler.groups, item.sequence.tables, strict=True):
                count = sum(page != HOLE for page in table)
                assert count <= group.most_pages(len(table) * group.page_tokens, item.num_new_tokens)
            held.append([sum(page != HOLE for page in table) for table in item.sequence.tables])
        return step

    monkeypatch.setattr(scheduler, "schedule", watched)
    assert answers(llm, PROMPTS[-1:]) == case.answers[-1:]
    assert held[-1][-1] <= -(-WINDOW // scheduler.groups[-1].page_tokens) + 1

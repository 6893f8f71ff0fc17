"""Near tokens beside 3-bit pages through LLM: a short context is exact, and chunks, hits and preemptions change no token."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from api.greedy_answers import answer_greedily, generate_greedily
from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from loading.tiny_models import save_tiny

NEAR_TOKENS = 64
PROMPTS = [[(7 * number + 5 * place * place) % 250 + 3 for place in range(20 + 60 * number)] for number in range(4)]
"""For 20 to 200 tokens: within the first block, and up to the fourth."""
NUM_OUTPUT = 10
answers = partial(answer_greedily, num_tokens=NUM_OUTPUT)
greedy = partial(generate_greedily, num_tokens=NUM_OUTPUT)
SHAPE = {"max_position_embeddings": 256, "head_dim": 32, "hidden_size": 64, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2_window": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 40,
    },
}


class Case:
    """A model on disk, its short answers in transformers, and all of its answers alone."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.is_whole = family == "llama"
        model = save_tiny(family, folder, **{**SHAPE, **FAMILIES[family]})
        write_tokenizer(folder)
        self.exact = greedy(model, PROMPTS[0])
        alone = self.open(max_num_batched_tokens=256, max_num_seqs=1, enable_prefix_caching=False)
        self.answers = answers(alone, PROMPTS)

    def open(self, **options: Any) -> LLM:
        near = {"kv_cache_dtype": "turboquant_3bit_nc", "kv_near_tokens": NEAR_TOKENS, **options}
        return LLM(model=str(self.folder), dtype="float32", max_model_len=256, device="cpu", **near)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_llm_near_first_block_is_exact(case: Case) -> None:
    assert case.answers[0] == case.exact


def test_llm_near_chunks_and_company_change_no_token(case: Case) -> None:
    """Steps hold fewer tokens than key means are measured on."""
    llm = case.open(max_num_batched_tokens=33, max_num_seqs=4)
    assert answers(llm, PROMPTS) == case.answers


def test_llm_near_prefix_hits_change_no_token(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=256, max_num_seqs=2)
    scheduler = llm.engine.scheduler
    for prompt, answer in zip(PROMPTS, case.answers, strict=True):
        assert answers(llm, [prompt]) == [answer]
        before = scheduler.num_prefix_hit_tokens
        assert answers(llm, [prompt]) == [answer]
        if case.is_whole:  # else the pages that a window needs there may have been given back
            assert scheduler.num_prefix_hit_tokens - before == (len(prompt) - 1) // NEAR_TOKENS * NEAR_TOKENS
        (found,) = answers(llm, [prompt + answer[:3]])
        assert found[: NUM_OUTPUT - 3] == answer[3:]


def test_llm_near_preemptions_change_no_token(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of some steps the youngest sequence loses its pages, near ones too, and begins again."""
    llm = case.open(max_num_batched_tokens=256, max_num_seqs=4, enable_prefix_caching=False)
    scheduler = llm.engine.scheduler
    schedule, countdown = scheduler.schedule, 0

    def preempting(*limits: Any) -> Any:
        nonlocal countdown
        if countdown == 0 and scheduler.num_running:
            scheduler.preempt_last()
        countdown -= 1
        return schedule(*limits)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    for number in (1, 7):
        countdown = number
        assert answers(llm, PROMPTS) == case.answers
    assert scheduler.num_preemptions >= 2

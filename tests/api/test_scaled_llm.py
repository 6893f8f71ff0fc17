"""Scaled keys through LLM: chunks, prefix hits, preemptions and another start change no token; the tokenizer reads the text."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from api.greedy_answers import answer_greedily
from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from holdfast.text.key_text import key_text_ids
from loading.tiny_models import save_tiny
from runner.unbalanced_models import unbalance

HEAD_DIM = 32
PROMPTS = [[(7 * number + 5 * place * place) % 250 + 3 for place in range(20 + 60 * number)] for number in range(4)]
answers = partial(answer_greedily, num_tokens=10)


class Case:
    """A model on disk, and its answers alone, read in one chunk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_tiny("llama", folder, head_dim=HEAD_DIM, max_position_embeddings=640)
        unbalance(folder, HEAD_DIM, 4.0)
        write_tokenizer(folder)
        alone = self.open(max_num_batched_tokens=256, max_num_seqs=1, enable_prefix_caching=False)
        self.answers = answers(alone, PROMPTS)

    def open(self, **options: Any) -> LLM:
        scaled = {"kv_cache_dtype": "turboquant_3bit_nc", "kv_key_scale": True, "kv_protected_layers": 0, **options}
        return LLM(model=str(self.folder), dtype="float32", max_model_len=256, page_tokens=16, device="cpu", **scaled)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("llama"))


def test_llm_key_scale_changes_answers(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """The other tests would show nothing if no head had a scale."""
    with caplog.at_level("INFO"):
        case.open(max_num_seqs=1)
    assert "Keys of 4 heads are scaled, measured on 256 tokens of text" in caplog.text
    assert answers(case.open(kv_key_scale=False), PROMPTS) != case.answers


def test_llm_key_scale_chunks_and_company_change_no_token(case: Case) -> None:
    """Steps hold fewer tokens than keys are measured on."""
    assert answers(case.open(max_num_batched_tokens=17, max_num_seqs=4), PROMPTS) == case.answers


def test_llm_key_scale_prefix_hits_change_no_token(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=256, max_num_seqs=2)
    for _ in range(2):
        assert answers(llm, PROMPTS) == case.answers
    assert llm.engine.scheduler.num_prefix_hit_tokens > 0


def test_llm_key_scale_preemptions_change_no_token(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = case.open(max_num_batched_tokens=256, max_num_seqs=4, enable_prefix_caching=False)
    scheduler = llm.engine.scheduler
    schedule, countdown = scheduler.schedule, 4

    def preempting(*limits: Any) -> Any:
        nonlocal countdown
        if countdown == 0 and scheduler.num_running:
            scheduler.preempt_last()
        countdown -= 1
        return schedule(*limits)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    assert answers(llm, PROMPTS) == case.answers
    assert scheduler.num_preemptions >= 1


def test_key_text_is_long_enough_and_of_the_vocabulary(case: Case) -> None:
    """512 tokens even of the largest vocabularies, which read about 4.5 letters a token."""
    tokenizer = case.open(max_num_seqs=1).engine.tokenizer
    assert tokenizer is not None
    ids = key_text_ids(tokenizer, 10_000)
    assert len(ids) >= 4.5 * 512
    assert max(key_text_ids(tokenizer, 60)) == 59


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "tensor_parallel_sums": "exact"},
        {"pipeline_parallel_size": 2},
        {"core_process": True},
    ],
    ids=["tensor ranks", "stages", "core process"],
)
def test_llm_key_scale_ranks_and_processes_change_no_token(case: Case, options: dict[str, Any]) -> None:
    """Each reads the text with a tokenizer of its own; heads of other ranks have no part in a scale."""
    assert answers(case.open(max_num_batched_tokens=256, max_num_seqs=1, **options), PROMPTS) == case.answers

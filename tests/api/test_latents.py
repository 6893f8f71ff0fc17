"""Latent attention (MLA) through LLM: greedy tokens are those of transformers, alone and in company, on found and on lost pages."""

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
from holdfast.engine import front
from holdfast.engine.admission import derive_seed
from holdfast.errors import ConfigError
from holdfast.request.sampling_params import SamplingParams
from loading.tiny_models import VOCAB
from models.tiny_experts import make_random, save_tiny_experts
from models.tiny_latents import LATENT_MODELS

MODELS = {
    "v2": "v2 with groups and biases",
    "v3": "v3 like R1",
    "v32": "sparse like V3.2",
    "glm": "glm with listed layers and yarn",
    "glm5": "sparse like GLM-5",
}
PROMPTS = [[(7 * number + 5 * place * place) % 250 + 3 for place in range(3 + 13 * number)] for number in range(4)]
"""For 3 to 42 tokens, none of them a multiple of a page."""
NUM_OUTPUT = 8
answers = partial(answer_greedily, num_tokens=NUM_OUTPUT)
greedy = partial(generate_greedily, num_tokens=NUM_OUTPUT)


class Case:
    """A model on disk, and what transformers says to every prompt."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        prefix, settings = LATENT_MODELS[MODELS[name]]
        model = make_random(prefix, settings | {"vocab_size": VOCAB}, seed=2)
        save_tiny_experts(model, folder)
        write_tokenizer(folder)
        self.answers = [greedy(model, prompt) for prompt in PROMPTS]
        self.vectors = hidden_states(model, PROMPTS)

    def open(self, **options: Any) -> LLM:
        return LLM(model=str(self.folder), dtype="float32", page_tokens=4, max_model_len=96, device="cpu", **options)


@torch.no_grad()
def hidden_states(model: Any, prompts: list[list[int]]) -> list[list[float]]:
    """The last hidden state of each prompt, of unit length."""
    states = [model.model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return [torch.nn.functional.normalize(state_H, dim=-1).tolist() for state_H in states]


def embedded(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    outputs = llm.embed(prompt_token_ids=prompts, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


# GLM-5 attends as V3.2 does, and GLM as V3 does; their own layers are in tests/models/test_glm_dsa.py and test_glm4_lite.py.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name.startswith("glm") else ()) for name in MODELS],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_llm_latent_matches_transformers_in_any_chunks(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=3, max_num_seqs=3)
    assert answers(llm, PROMPTS) == case.answers
    alone = case.open(max_num_batched_tokens=96, max_num_seqs=1, enable_prefix_caching=False)
    assert answers(alone, PROMPTS[1:3]) == case.answers[1:3]


def test_llm_latent_batch_invariant_is_refused(case: Case) -> None:
    with raises_code("plan.variant_attention", ConfigError, name="batch_invariant"):
        case.open(batch_invariant=True)


def test_llm_latent_prefix_hits_match(case: Case) -> None:
    llm = case.open(max_num_batched_tokens=32, max_num_seqs=3)
    scheduler = llm.engine.scheduler
    assert answers(llm, PROMPTS) == case.answers
    assert scheduler.num_prefix_hit_tokens == 0
    assert answers(llm, PROMPTS) == case.answers
    assert scheduler.num_prefix_hit_tokens > 0
    (found,) = answers(llm, [PROMPTS[3] + case.answers[3][:5]])
    assert found[: NUM_OUTPUT - 5] == case.answers[3][5:]


@pytest.mark.parametrize("case", ["v32"], indirect=True)
@pytest.mark.each_value
@pytest.mark.parametrize("index", ["float32", "fp8"])
@pytest.mark.parametrize("temperature", [0.0, 1.5], ids=["greedy", "seeded"])
def test_llm_latent_completions_match_separate_requests(
    case: Case, temperature: float, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other they fork where their tokens differ; each by itself is computed from its first token on."""
    params = SamplingParams(temperature=temperature, max_tokens=NUM_OUTPUT, ignore_eos=True, seed=7)
    prompts = [PROMPTS[0], PROMPTS[3]]
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=4, index_cache_dtype=index)
    assert llm.memory.kv_note.startswith("index in fp8; ") == (index == "fp8")
    together = llm.generate(prompts, replace(params, n=3))
    assert llm.engine.scheduler.num_prefix_hit_tokens >= 2 * 40, "all of a prompt but its last page"
    again = llm.generate(prompts, replace(params, n=3))
    alone = case.open(max_num_batched_tokens=16, max_num_seqs=1, enable_prefix_caching=False, index_cache_dtype=index)
    for number in range(3):
        monkeypatch.setattr(front, "derive_seed", lambda seed, _, number=number: derive_seed(seed, number))
        for own in zip(together, again, alone.generate(prompts, params), strict=True):
            assert own[0].outputs[number].token_ids == own[1].outputs[number].token_ids == own[2].outputs[0].token_ids
    outputs = {tuple(output.token_ids) for output in together[1].outputs}
    assert len(outputs) == (1 if temperature == 0 else 3)
    assert index == "fp8" or temperature > 0 or outputs == {tuple(case.answers[3])}


def test_llm_latent_preempted_sequences_match(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = case.open(max_num_batched_tokens=16, max_num_seqs=2)
    scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule
    countdown = 0

    def preempting(*limits: Any) -> Any:
        nonlocal countdown
        if countdown == 0 and scheduler.num_running:
            scheduler.preempt_last()
        countdown -= 1
        return schedule(*limits)

    monkeypatch.setattr(scheduler, "schedule", preempting)
    for number in (1, 3, 5, 8):
        countdown = number
        llm.reset_prefix_cache()
        assert answers(llm, [PROMPTS[1], PROMPTS[3]]) == [case.answers[1], case.answers[3]]
    assert scheduler.num_preemptions == 4


def test_embed_gives_the_last_hidden_state(case: Case) -> None:
    with case.open(max_num_batched_tokens=16, max_num_seqs=3, kv_cache_memory="16MB") as llm:
        for _ in range(2):  # the second time on cached prefixes
            for vector, expected in zip(embedded(llm, PROMPTS), case.vectors, strict=True):
                assert vector == pytest.approx(expected, abs=1e-4)

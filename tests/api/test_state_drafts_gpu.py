"""Draft tokens of gated delta nets on a GPU, by graphs and kernel by kernel: answers do not depend on what was rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from api.test_state_drafts import NUM_DRAFTS, NumRight, Scripted, changing
from holdfast.api.llm import LLM
from holdfast.request.sampling_params import SamplingParams
from runner.gpu_traffic import num_compiled, write_model

NUM_OUTPUT = 24
PROMPTS = [[(7919 * place + place * place // 7) % 900 + 8 for place in range(length)] for length in (3, 65, 130, 200)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
LONGER = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT + NUM_DRAFTS, ignore_eos=True, logprobs=1)
TOLERANCE = 0.1
"""Largest difference of log-probabilities: steps of other sizes multiply by other kernels in bfloat16. A wrong state is off by more than 1."""
Answer = tuple[list[int], list[float]]


def answers(llm: LLM, params: SamplingParams = PARAMS) -> list[Answer]:
    """Tokens and their log-probabilities."""
    found = []
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False):
        (one,) = output.outputs
        assert one.logprobs is not None, "no log-probabilities"
        own = [by_id[token].logprob for by_id, token in zip(one.logprobs, one.token_ids, strict=True)]
        found.append((list(one.token_ids), own))
    return found


def open_llm(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "tokenizer": "none",
        "core_process": False,
        "page_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 512,
        "max_num_batched_tokens": 256,
        "state_snapshots": 2,
    }
    return LLM(model=str(write_model(folder, "states")), **(settings | options))


def script(llm: LLM, known: list[Answer], num_right: NumRight) -> None:
    scripted = Scripted(NUM_DRAFTS)
    scripted.follow([[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, known, strict=True)], num_right)
    llm.engine.core.proposer = scripted


def check(found: list[Answer], known: list[Answer]) -> int:
    """Compare up to the first token that another rounding has chosen; how many tokens were compared."""
    num_compared = 0
    for (tokens, logprobs), (right, expected) in zip(found, known, strict=True):
        same = next((at for at in range(NUM_OUTPUT) if tokens[at] != right[at]), NUM_OUTPUT)
        end = min(same + 1, NUM_OUTPUT)
        assert logprobs[:end] == pytest.approx(expected[:end], abs=TOLERANCE), "another state"
        num_compared += same
    return num_compared


def run_scripts(folder: Path, **options: Any) -> None:
    """Drafts rejected at each place, and at places that change: all as without a draft token."""
    plain = open_llm(folder, **options)
    known = answers(plain, LONGER)
    plain.shutdown()
    llm = open_llm(folder, speculative=f"ngram:{NUM_DRAFTS}", **options)
    scripts: list[NumRight] = [*((lambda *_, right=right: right) for right in range(NUM_DRAFTS + 1)), changing]
    for num_right in scripts:
        script(llm, known, num_right)
        before = llm.stats()
        num_compared = check(answers(llm), known)
        stats = llm.stats()
        assert num_compared > len(PROMPTS) * NUM_OUTPUT // 2, "answers part too early to compare"
        assert stats.num_proposed_tokens > before.num_proposed_tokens
        is_rejecting = num_right(0, 0) == 0 and num_right is not changing
        assert (stats.num_accepted_tokens == before.num_accepted_tokens) == is_rejecting
    llm.shutdown()


@pytest.mark.slow
def test_scripts_on_a_cpu_change_nothing(tmp_path: Path) -> None:
    """What the tests of a GPU run."""
    run_scripts(tmp_path, device="cpu", dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_drafts_on_a_gpu_change_nothing(enforce_eager: bool, tmp_path: Path) -> None:
    run_scripts(tmp_path, enforce_eager=enforce_eager)


@pytest.mark.gpu
def test_drafts_on_a_gpu_allocate_and_compile_nothing(tmp_path: Path) -> None:
    llm = open_llm(tmp_path, speculative=f"ngram:{NUM_DRAFTS}")
    known = answers(llm, LONGER)
    torch.cuda.synchronize()
    names = "allocation.all.allocated", "allocation.all.freed", "segment.all.allocated"
    before, compiled = [torch.cuda.memory_stats()[name] for name in names], num_compiled()
    script(llm, known, changing)
    answers(llm)
    torch.cuda.synchronize()
    assert [torch.cuda.memory_stats()[name] for name in names] == before
    assert num_compiled() == compiled, "a kernel was compiled after ready"
    llm.shutdown()

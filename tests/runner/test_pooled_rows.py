"""Pooled rows: copies of hidden states in order, in rounds, and beside other rows of a step."""

from collections import deque

import numpy as np
import pytest
import torch

from holdfast.memory.ledger import Ledger
from holdfast.planning.terms import POOLED_OWNER, POOLED_ROWS, pooled_spec
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep, ScheduledSequence, StepResult
from holdfast.request.step import Admitted, Step, StepItem
from holdfast.runner.pooled_rows import PooledRows
from holdfast.runner.runner import Runner

GREEDY = SamplingParams(temperature=0.0)
PAGE_TOKENS = 16


def vectors(rows: list[bytes]) -> np.ndarray:
    return np.stack([np.frombuffer(row, "<f4") for row in rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pooled_rows_on_a_cpu_are_copied_in_order(dtype):
    ledger, hidden_RH = Ledger(), torch.randn(9, 8, dtype=getattr(torch, dtype))
    rows = PooledRows(8, dtype, torch.device("cpu"), ledger)
    copy = rows.send(hidden_RH, [1, 2, 3, 7])
    assert np.array_equal(vectors(copy.read()), hidden_RH[[1, 2, 3, 7]].float().numpy())
    [entry] = ledger
    assert (
        (entry.owner, entry.num_bytes) == (POOLED_OWNER, pooled_spec(8, dtype, "cpu").num_bytes) == (POOLED_OWNER, 32)
    )


def pooled_step(number: int, prompts: list[list[int]], pooled: set[int], first_page: int = 0) -> Step:
    """All prompts at once, each on pages of its own."""
    admitted, items, page = [], [], first_page
    for slot, prompt in enumerate(prompts):
        num_pages = -(-(len(prompt) + 1) // PAGE_TOKENS)
        pages = (tuple(range(page, page + num_pages)),)
        page += num_pages
        admitted.append(
            Admitted(slot, 100 * number + slot, tuple(prompt), len(prompt), GREEDY, 0, is_pooled=slot in pooled)
        )
        items.append(StepItem(slot, 0, len(prompt), True, pages))
    released = tuple(range(len(prompts))) if number > 1 else ()
    return Step(number, released, tuple(admitted), tuple(items))


def reference(runner: Runner, prompt: list[int]) -> np.ndarray:
    """The final hidden state of the last row, by the unfused path without a graph."""
    sequence = runner.dummy_sequence(len(prompt), 0)
    sequence.token_ids[:] = prompt
    step = LiveStep((ScheduledSequence.of(sequence, 0, len(prompt)),))
    return runner.hidden_rows(step)[-1].float().cpu().numpy()


def run(runner: Runner, step: Step) -> StepResult:
    runner.launch(step)
    return runner.collect()


def test_runner_returns_the_hidden_state_of_pooled_rows(build):
    built = build("qwen3", page_tokens=16, max_num_batched_tokens=64)
    runner, prompts = built.runner, [[5], [7, 8, 9], list(range(3, 40))]
    result = run(runner, pooled_step(1, prompts, {0, 2}))
    assert [bool(own.pooled) for own in result.results] == [True, False, True]
    plain = run(runner, pooled_step(2, prompts, set()))
    assert [own.token_ids for own in plain.results] == [own.token_ids for own in result.results]
    runner.advance()
    for place in (0, 2):
        got = np.frombuffer(result.results[place].pooled, "<f4")
        assert np.abs(got - reference(runner, prompts[place])).max() < 1e-5


def test_runner_pools_beside_prompt_logprobs(build):
    built = build("qwen3", page_tokens=16, max_num_batched_tokens=64)
    runner, prompts = built.runner, [[5, 6, 7], [8, 9]]
    step = pooled_step(1, prompts, {1})
    asking = SamplingParams(temperature=0.0, prompt_logprobs=1)
    first = Admitted(0, 100, tuple(prompts[0]), 3, asking, 0)
    result = run(runner, Step(1, (), (first, step.admitted[1]), step.items))
    assert len(result.results[0].prompt_logprobs) == 2
    runner.advance()
    got = np.frombuffer(result.results[1].pooled, "<f4")
    assert np.abs(got - reference(runner, prompts[1])).max() < 1e-5


@pytest.mark.parametrize("count", [1, 4, 5, 8])
def test_pooled_rows_in_full_rounds_are_all_read(count):
    hidden_RH = torch.randn(count, 16)
    rows = PooledRows(16, "float32", torch.device("cpu"), Ledger())
    rows.buffers = deque([torch.zeros(4, 16)])  # as a GPU has it: several rows
    assert np.array_equal(vectors(rows.send(hidden_RH, range(count)).read()), hidden_RH.numpy())


@pytest.mark.gpu
def test_pooled_rows_beyond_the_buffer_come_in_rounds():
    device, count = torch.device("cuda"), 2 * POOLED_ROWS + 8
    places = [place for place in range(count) if place % 30]
    hidden_RH = torch.randn(count, 64, dtype=torch.bfloat16, device=device)
    rows = PooledRows(64, "bfloat16", device, Ledger())
    taken = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    copy = rows.send(hidden_RH, places)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == taken
    assert np.array_equal(vectors(copy.read()), hidden_RH.float().cpu().numpy()[places])

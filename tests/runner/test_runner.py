import math
import random
from pathlib import Path

import pytest
import torch

from holdfast.config import Limits
from holdfast.errors import WorkspaceError
from holdfast.kernels.gemm import linear as products
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, LiveStep, ScheduledSequence, Sequence
from holdfast.runner.graphs import StepGraphs
from holdfast.runner.runner import WantedRows
from kernels.exactness import require_native, same_bits
from loading.tiny_models import VOCAB, save_tiny
from runner.drive import LoadedModel, Rig, load_model

LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=256, max_model_len=200, page_tokens=4)
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return load_model(folder)


@pytest.fixture(params=["native_paged", "torch_paged"])
def rig(request, model) -> Rig:
    if request.param == "native_paged":
        require_native()
    return Rig(model, request.param, LIMITS, num_pages=100)


def make_sequence(number: int, num_tokens: int, first_page: int, num_prompt: int | None = None, **params) -> Sequence:
    dice = random.Random(number)
    token_ids = [dice.randrange(8, VOCAB) for _ in range(num_tokens)]
    pages = list(range(first_page, first_page + -(-num_tokens // 4) + 2))
    return Sequence(
        number,
        token_ids,
        num_prompt or num_tokens,
        SamplingParams(**(GREEDY | params)),
        0,
        max_tokens=9,
        tables=[pages],
    )


def run(rig: Rig, *parts: tuple[Sequence, int, int]):
    """One step over tokens [start, end) of each sequence."""
    return rig.execute(
        LiveStep(tuple(ScheduledSequence.of(sequence, start, end - start) for sequence, start, end in parts))
    ).results


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return float((left - right).abs().max()) < 1e-5


def test_runner_samples_only_at_last_known_token(rig):
    whole, part, decode = make_sequence(1, 9, 0), make_sequence(2, 20, 20), make_sequence(3, 6, 40)
    run(rig, (decode, 0, 5))
    results = run(rig, (part, 0, 7), (whole, 0, 9), (decode, 5, 6))
    assert results[0].token_id is None
    assert results[1].token_id == int(rig.logits[1][8].argmax())
    assert results[2].token_id == int(rig.logits[3][5].argmax())
    assert all(result.logprobs == () and result.prompt_logprobs == () for result in results)
    assert rig.logits[2] == {}


def test_runner_step_without_choice_gives_no_token(rig):
    (result,) = run(rig, (make_sequence(1, 20, 0), 0, 7))
    assert result.token_id is None


def test_chunks_give_what_the_whole_gives(rig):
    chunked, whole = make_sequence(1, 30, 0), make_sequence(1, 30, 20)
    for start, end in ((0, 1), (1, 2), (2, 13), (13, 29), (29, 30)):
        (last,) = run(rig, (chunked, start, end))
    expected = rig.logits[1][29]
    (result,) = run(rig, (whole, 0, 30))
    assert close(rig.logits[1][29], expected)
    assert result.token_id == last.token_id


def test_logprobs_of_the_chosen_token_where_requested(rig):
    asking, quiet = make_sequence(1, 9, 0, logprobs=3), make_sequence(2, 9, 20)
    first, second = run(rig, (asking, 0, 9), (quiet, 0, 9))
    expected = rig.logits[1][8].double().log_softmax(-1)
    assert second.logprobs == ()
    (measured,) = first.logprobs
    assert measured.token_id == first.token_id
    assert measured.rank == 1
    assert math.isclose(measured.logprob, float(expected.max()), abs_tol=1e-5)
    assert [token_id for token_id, _ in measured.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize("cuts", [(12,), (1, 12), (5, 6, 12), (11, 12), (3, 7, 10, 12)], ids=str)
def test_prompt_logprobs_cover_every_position_after_first(rig, cuts):
    """For position i + 1 in the step that computes position i; none of the first, and none behind the prompt."""
    sequence = make_sequence(1, 12, 0, prompt_logprobs=2)
    company = make_sequence(2, 40, 20)
    rows, start = [], 0
    for end in cuts:
        result, _ = run(rig, (sequence, start, end), (company, start, end))
        assert len(result.prompt_logprobs) == min(end, 11) - start
        assert (result.token_id is not None) == (end == 12)
        rows += result.prompt_logprobs
        start = end
    assert [row.token_id for row in rows] == sequence.token_ids[1:]
    for position, row in enumerate(rows):
        expected = rig.logits[1][position].double().log_softmax(-1)
        assert math.isclose(row.logprob, float(expected[row.token_id]), abs_tol=1e-5)
        assert [token_id for token_id, _ in row.top] == expected.topk(2).indices.tolist()


def test_prompt_logprobs_end_with_the_prompt(rig):
    """A sequence that was preempted computes its output again; that is no prompt."""
    sequence = make_sequence(1, 12, 0, num_prompt=7, prompt_logprobs=0)
    (result,) = run(rig, (sequence, 0, 12))
    assert [row.token_id for row in result.prompt_logprobs] == sequence.token_ids[1:7]
    assert result.token_id is not None


def test_prompt_logprobs_of_one_token_prompt_are_empty(rig):
    (result,) = run(rig, (make_sequence(1, 1, 0, prompt_logprobs=5), 0, 1))
    assert result.prompt_logprobs == ()
    assert result.token_id is not None


def test_prompts_beyond_what_is_computed_at_once(rig):
    length = 2 * PROMPT_ROWS + 9
    sequence = make_sequence(1, length, 0, prompt_logprobs=0)
    (result,) = run(rig, (sequence, 0, length))
    assert [row.token_id for row in result.prompt_logprobs] == sequence.token_ids[1:]
    again = make_sequence(1, length, 50, prompt_logprobs=0)
    rows = [row for start in range(length) for row in run(rig, (again, start, start + 1))[0].prompt_logprobs]
    for left, right in zip(rows, result.prompt_logprobs, strict=True):
        assert math.isclose(left.logprob, right.logprob, abs_tol=1e-4)


def test_several_who_ask_for_prompts_and_several_who_do_not(rig):
    parts = [
        (make_sequence(1, 9, 0, prompt_logprobs=1, logprobs=1), 0, 9),
        (make_sequence(2, 9, 10), 0, 9),
        (make_sequence(3, 20, 20, prompt_logprobs=0), 0, 13),
        (make_sequence(4, 5, 30), 0, 5),
    ]
    together = run(rig, *parts)
    assert [len(result.prompt_logprobs) for result in together] == [8, 0, 13, 0]
    assert [result.token_id is None for result in together] == [False, False, True, False]
    for index, part in enumerate(parts):
        (alone,) = run(rig, part)
        assert alone.token_id == together[index].token_id
        for left, right in zip(alone.prompt_logprobs, together[index].prompt_logprobs, strict=True):
            assert left.token_id == right.token_id
            assert math.isclose(left.logprob, right.logprob, abs_tol=1e-4)


def test_runner_nan_sequence_fails_alone(model):
    require_native()
    embedding = model.weights["embed.weight"].clone()
    embedding[7] = float("nan")
    hurt = LoadedModel(model.spec, {**model.weights, "embed.weight": embedding})
    rigs = [Rig(weights, "native_paged", LIMITS, 100) for weights in (model, hurt)]
    expected = run(rigs[0], (make_sequence(2, 9, 20), 0, 9))
    poisoned = make_sequence(1, 9, 0, logprobs=1, prompt_logprobs=1)
    poisoned.token_ids[4] = 7
    failed, healthy = run(rigs[1], (poisoned, 0, 9), (make_sequence(2, 9, 20), 0, 9))
    assert failed.token_id == NO_TOKEN
    assert failed.logprobs == ()
    assert len(failed.prompt_logprobs) == 8
    assert all(math.isfinite(row.logprob) for row in failed.prompt_logprobs[:4])
    assert healthy == expected[0]
    assert same_bits(rigs[1].logits[2][8], rigs[0].logits[2][8])


def test_running_a_step_again_changes_nothing(rig):
    """A step that Ctrl-C cut short comes again."""
    sequence = make_sequence(1, 30, 0)
    run(rig, (sequence, 0, 20))
    first = run(rig, (sequence, 20, 30))
    logits = rig.logits[1][29]
    assert run(rig, (sequence, 20, 30)) == first
    assert torch.equal(rig.logits[1][29], logits)


SIZES = ((2, 5, 64, 256), (16, 24, 64, 256), (64, 256))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_that_are_padded_to_sizes_of_steps_give_the_same(model, sizes):
    require_native()
    rigs = [Rig(model, "native_paged", LIMITS, 100, row_sizes=own) for own in ((), sizes)]
    steps = [
        [(make_sequence(1, 9, 0), 0, 1)],
        [(make_sequence(1, 9, 0), 1, 9), (make_sequence(2, 1, 20), 0, 1)],
        [(make_sequence(3, 12, 40, prompt_logprobs=1), 0, 12), (make_sequence(4, 3, 60), 0, 3)],
        [(make_sequence(5, 70, 70), 0, 70)],
    ]
    for parts in steps:
        plain, padded = (run(rig, *parts) for rig in rigs)
        assert plain == padded
    for sequence_id, rows in rigs[0].logits.items():
        assert all(same_bits(row, rigs[1].logits[sequence_id][position]) for position, row in rows.items())


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_runner_row_sizes_pad_every_product(model, sizes, monkeypatch):
    """Rows whose logits are wanted too, and where log-probabilities of prompts are and rows are taken block by block and one by one."""
    rig, plain = (Rig(model, "native_paged", LIMITS, 100, row_sizes=own) for own in (sizes, ()))
    multiply, requested = products.plain_linear, set()

    def watched(x_TK, weight_NK, *others):
        requested.add((len(x_TK), len(weight_NK)))
        return multiply(x_TK, weight_NK, *others)

    monkeypatch.setattr(products, "plain_linear", watched)
    steps = [
        [(make_sequence(1, 1, 0), 0, 1)],
        [(make_sequence(2, 40, 0), 0, 33)],
        [(make_sequence(number, 2, 4 * number), 0, 2) for number in range(1, 8)],
        [(make_sequence(3, 70, 40, prompt_logprobs=1), 0, 70), (make_sequence(4, 3, 60), 0, 3)],
        [(make_sequence(5, 180, 0, prompt_logprobs=0), 0, 180), (make_sequence(6, 3, 60), 0, 3)],
    ]
    for parts in steps:
        own, requested_by = [], {}
        for one in (plain, rig):
            requested.clear()
            own.append(run(one, *parts))
            requested_by[one] = {(num_rows, size_n) for num_rows, size_n in requested if num_rows}
        assert own[0] == own[1]
        assert {num_rows for num_rows, _ in requested_by[rig]} <= set(sizes)
        assert {size_n for _, size_n in requested_by[rig]} == {size_n for _, size_n in requested_by[plain]}, (
            "the head among them"
        )


@pytest.mark.parametrize(("sizes", "of_a_prompt"), [((), (16, True)), ((16, 64, 256), (64, False))], ids=str)
def test_graph_for_one_prompt_row_is_no_decode_step(model, sizes, of_a_prompt):
    """Its attention goes through large tiles there, which graphs of decode steps have none of."""
    runner = Rig(model, "torch_paged", LIMITS, 100, row_sizes=sizes).runner
    runner.graphs = StepGraphs((16,), (64,), 16)

    def graph_of(*items: tuple[Sequence, int, int]) -> tuple[int, bool] | None:
        step = LiveStep(tuple(ScheduledSequence.of(*item) for item in items))
        return runner.graph_for(step, WantedRows.of(step))

    decoding, prompt = (make_sequence(1, 9, 0, num_prompt=8), 8, 1), (make_sequence(2, 5, 20), 4, 1)
    assert graph_of(decoding) == (16, True)
    assert graph_of(prompt) == graph_of(decoding, prompt) == of_a_prompt


@pytest.mark.each_value
@pytest.mark.parametrize("backend", ["native_paged", "torch_paged", "triton_paged"])
@pytest.mark.parametrize(
    "limits",
    [Limits(1, 1, 1, 1), Limits(3, 2, 5, 16), Limits(2, 10, 7, 4), Limits(8, 6, 3, 2)],
    ids=lambda limits: "-".join(map(str, (limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len))),
)
def test_runner_warm_keeps_to_limits_and_results(model, backend, limits):
    """The largest step there can be, and the smallest; nothing that a step computes afterwards depends on it."""
    if backend == "native_paged":
        require_native()
    num_pages = -(-limits.max_model_len // limits.page_tokens)
    rigs = [Rig(model, backend, limits, num_pages) for _ in range(2)]
    rows = sorted({1, limits.max_num_batched_tokens})
    rigs[1].runner.warm(rows, None, lambda done, total: pytest.fail("there are no graphs"))
    sequence = Sequence(0, [9], 1, SamplingParams(temperature=0.0), 0, max_tokens=9, tables=[[0]])
    assert run(rigs[0], (sequence, 0, 1)) == run(rigs[1], (sequence, 0, 1))
    assert same_bits(rigs[0].logits[0][0], rigs[1].logits[0][0])


def test_hidden_rows_and_row_logits_match_prompt_logprobs(rig):
    """Just the same bits as those that prompt log-probabilities are made of, and the sampler is not requested."""
    tokens = make_sequence(1, 100, 0, prompt_logprobs=0)
    run(rig, (tokens, 0, 100))
    requested = rig.logits[1]
    rig.sampler.sampled.clear()
    rig.sampler.prompt.clear()
    other = make_sequence(1, 100, 40)
    pieces = []
    for start, end in ((0, 60), (60, 100)):
        rig.poison()
        hidden_TH = rig.runner.hidden_rows(LiveStep((ScheduledSequence.of(other, start, end - start),)))
        assert hidden_TH.shape[0] == end - start
        pieces += [rig.runner.row_logits(rows_RH).clone() for rows_RH in hidden_TH.split(PROMPT_ROWS // 3)]
    found_TV = torch.cat(pieces)
    assert found_TV.shape == (100, VOCAB)
    assert all(close(requested[position], found_TV[position]) for position in range(100))
    assert rig.sampler.sampled == rig.sampler.prompt == []


def test_rows_of_padding_are_not_among_those_that_are_given(model):
    rig, plain = (Rig(model, "torch_paged", LIMITS, num_pages=100, row_sizes=own) for own in ((16, 256), ()))
    step = LiveStep((ScheduledSequence.of(make_sequence(1, 5, 0), 0, 5),))
    padded_TH, alone_TH = rig.runner.hidden_rows(step), plain.runner.hidden_rows(step)
    assert padded_TH.shape == alone_TH.shape
    assert close(padded_TH, alone_TH)


def test_row_logits_more_rows_than_planned_refused(rig):
    hidden_TH = rig.runner.hidden_rows(
        LiveStep((ScheduledSequence.of(make_sequence(1, PROMPT_ROWS + 1, 0), 0, PROMPT_ROWS + 1),))
    )
    with pytest.raises(WorkspaceError, match="head"):
        rig.runner.row_logits(hidden_TH)

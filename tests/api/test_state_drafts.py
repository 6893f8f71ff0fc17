"""Draft tokens of gated delta nets through LLM: tokens, log-probabilities and states have the bits of one row a step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from api.test_state_snapshots import GRID, STEM, Answers, answers, preempt_at
from cli.cli_models import write_tokenizer
from holdfast.api.llm import LLM
from holdfast.engine.ngram import NgramProposer
from holdfast.request.sampling_params import SamplingParams
from models.tiny_states import STATE_MODELS, VOCAB, save_state_model

NUM_DRAFTS, NUM_OUTPUT = 3, 14
PROMPTS = [[9, 8, 7], STEM[:65], STEM[:130], [*STEM[:70], *STEM[:20]]]
"""The last row of the second is a piece of its own, so draft tokens may follow it."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
States = dict[tuple[int, ...], list[bytes]]
"""By all tokens of which a state holds something: the bytes of its parts."""
NumRight = Callable[[int, int], int]
"""How many draft tokens are right, by sequence and number of its tokens."""


class Case(NamedTuple):
    """A model on disk; its answers, longer than tests ask for, and its states, of one sequence without draft tokens."""

    folder: Path
    answers: Answers
    states: States

    def open(self, **options: Any) -> LLM:
        settings = {"max_model_len": 320, "max_num_batched_tokens": 128, "max_num_seqs": 3} | options
        return LLM(model=str(self.folder), dtype="float32", page_tokens=16, device="cpu", **settings)

    @property
    def expected(self) -> Answers:
        return [(tokens[:NUM_OUTPUT], logprobs[:NUM_OUTPUT]) for tokens, logprobs in self.answers]

    def continuations(self) -> list[list[int]]:
        return [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, self.answers, strict=True)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case_of(name: str) -> Case:
        if name not in made:
            folder = tmp_path_factory.mktemp("state")
            save_state_model(name, folder)
            write_tokenizer(folder)
            empty = Case(folder, [], {})
            alone = empty.open(max_num_seqs=1, enable_prefix_caching=False)
            states = record_states(alone)
            longer = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT + NUM_DRAFTS, ignore_eos=True, logprobs=1)
            made[name] = Case(folder, answers(alone, PROMPTS, longer), states)
        return made[name]

    return case_of


def record_states(llm: LLM) -> States:
    """Every state after every step: the bytes of all parts in all layers."""
    runner, found = llm.engine.core.runner, States()
    begin, backend = runner.begin, runner.backend.states

    def begin_and_look(flight: Any) -> None:
        begin(flight)
        for item in flight.step.scheduled:
            sequence = item.sequence
            key = tuple(sequence.token_ids[: item.num_tokens])
            parts = [part[sequence.slot] for layer in sorted(backend._places) for part in backend.layer(layer)[:2]]
            own = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
            assert found.setdefault(key, own) == own, f"two states of {len(key)} tokens"

    runner.begin = begin_and_look
    return found


class Scripted(NgramProposer):
    """Draft tokens that are right up to a place, and wrong there."""

    def follow(self, texts: Sequence[list[int]], num_right: NumRight) -> None:
        self.texts, self.num_right = texts, num_right

    def propose(self, sequence_id: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        known = len(token_ids)
        text = next((text for text in self.texts if text[:known] == list(token_ids)), [])
        drafts = text[known : known + self.num_proposals]
        first_wrong = self.num_right(sequence_id, known)
        if first_wrong < len(drafts):
            drafts[first_wrong] = (drafts[first_wrong] + 1) % VOCAB
        return tuple(drafts)

    def is_waiting(self, sequence_id: int, num_tokens: int) -> bool:
        return False


def speculating(case: Case, num_right: NumRight, **options: Any) -> tuple[LLM, States]:
    """An engine whose draft tokens follow a script."""
    llm = case.open(speculative=f"ngram:{NUM_DRAFTS}", **options)
    scripted = Scripted(NUM_DRAFTS)
    scripted.follow(case.continuations(), num_right)
    llm.engine.core.proposer = scripted
    return llm, record_states(llm)


def assert_states(found: States, case: Case) -> None:
    wrong = [len(key) for key, own in found.items() if case.states.get(key) != own]
    assert not wrong, f"states of {wrong} tokens differ"


def changing(sequence_id: int, num_tokens: int) -> int:
    return (5 * sequence_id + 3 * num_tokens + num_tokens // 4) % (NUM_DRAFTS + 1)


@pytest.mark.each_value
@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_drafts_rejected_at_any_place_change_no_bit(cases, num_right: int) -> None:
    case = cases("3.5")
    llm, states = speculating(case, lambda *_: num_right)
    assert answers(llm, PROMPTS, PARAMS) == case.expected
    assert_states(states, case)
    assert answers(llm, [PROMPTS[3]], PARAMS) == [case.expected[3]]
    assert_states(states, case)
    stats = llm.stats()
    assert stats.num_proposed_tokens > 2 * NUM_OUTPUT
    assert (stats.num_accepted_tokens == 0) == (num_right == 0)


@pytest.mark.each_value
@pytest.mark.parametrize("name", STATE_MODELS)
def test_drafts_of_every_model_change_no_bit(cases, name: str) -> None:
    case = cases(name)
    llm, states = speculating(case, changing)
    assert answers(llm, PROMPTS, PARAMS) == case.expected
    assert_states(states, case)
    assert llm.stats().num_accepted_tokens > NUM_OUTPUT


def test_ngrams_change_no_bit(cases) -> None:
    """The real proposer. The last row of the prompt, a piece of its own, has draft tokens from the prompt."""
    prompt, found = ([5, 6, 7, 8] * 17)[:65], []
    for options in ({"max_num_seqs": 1}, {"speculative": "ngram:3"}):
        llm = cases("3.5").open(**options)
        states = record_states(llm)
        found.append((answers(llm, [prompt], PARAMS), states))
    (plain, plain_states), (drafted, states) = found
    assert drafted == plain
    assert states.items() <= plain_states.items()
    assert llm.stats().num_proposed_tokens > 0


@pytest.mark.parametrize("num_snapshots", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_drafts_across_preemption_before_every_step(cases, num_snapshots: int, monkeypatch) -> None:
    case, length = cases("3.5"), NUM_OUTPUT // 2
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=1)
    expected = [(tokens[:length], logprobs[:length]) for tokens, logprobs in (case.expected[1], case.expected[3])]
    llm, states = speculating(case, changing, max_num_seqs=2, state_snapshots=num_snapshots)
    number, num_steps = 1, 2
    while number < num_steps:
        with monkeypatch.context() as patch:
            count = preempt_at(llm, number, patch)
            if number % 2:
                llm.reset_prefix_cache()
            assert answers(llm, [PROMPTS[1], PROMPTS[3]], params) == expected
            num_steps = count()
        number += 1
    assert_states(states, case)
    assert llm.stats().num_preemptions >= number - 2 >= 3


def test_drafts_beside_snapshots_and_hits(cases) -> None:
    """Slots change hands, and a sequence starts from a snapshot on a slot that kept draft tokens of another."""
    case = cases("3.5")
    llm, states = speculating(case, changing, max_num_seqs=2, state_snapshots=4, snapshot_tokens=GRID)
    for _ in range(2):
        assert answers(llm, PROMPTS, PARAMS) == case.expected
        assert answers(llm, PROMPTS[::-1], PARAMS) == case.expected[::-1]
    assert_states(states, case)
    assert llm.stats().num_snapshot_hits > 3


def test_drafts_of_completions_that_fork(cases) -> None:
    """Forks copy the state of a slot whose step may have draft tokens."""
    case = cases("3.5")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1, n=2)
    llm, states = speculating(case, changing, max_num_seqs=4)
    expected = [one for one in case.expected for _ in range(2)]
    assert answers(llm, PROMPTS, params) == expected
    assert_states(states, case)


def test_drafts_with_a_seed_change_no_bit(cases) -> None:
    """Random choices are verified too."""
    case = cases("3.5")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=1)
    plain = answers(case.open(), PROMPTS[:2], params)
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, plain, strict=False)]
    llm, _ = speculating(case, changing)
    llm.engine.core.proposer.follow(texts, changing)  # type: ignore[attr-defined]
    assert answers(llm, PROMPTS[:2], params) == plain
    assert llm.stats().num_accepted_tokens > NUM_OUTPUT // 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_drafts_on_ranks_and_stages(ranks: dict[str, int], tmp_path: Path) -> None:
    """Each rank keeps draft tokens of its own heads or layers. Sums of two ranks round otherwise: tokens are compared."""
    linear, full = "linear_attention", "full_attention"
    save_state_model("3.5", tmp_path, layer_types=[linear, full, linear, full])
    write_tokenizer(tmp_path)
    case = Case(tmp_path, [], {})
    longer = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT + NUM_DRAFTS, ignore_eos=True, logprobs=1)
    case = case._replace(answers=answers(case.open(max_num_seqs=1, enable_prefix_caching=False), PROMPTS, longer))
    llm = case.open(speculative=f"ngram:{NUM_DRAFTS}", state_snapshots=4, **ranks)
    scripted = Scripted(NUM_DRAFTS)
    scripted.follow(case.continuations(), changing)
    llm.engine.core.proposer = scripted
    for _ in range(2):
        found = [tokens for tokens, _ in answers(llm, PROMPTS, PARAMS)]
        assert found == [tokens for tokens, _ in case.expected]
    assert llm.stats().num_accepted_tokens > NUM_OUTPUT
    llm.shutdown()

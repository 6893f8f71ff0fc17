"""Proposals in the core: the same answers in fewer steps, ends inside of what was accepted, who may propose, and what is counted."""

import pytest

from engine.fakes import EOS, HashRunner, make_engine, run_all, text_of, tokens_of
from for_each import for_each
from holdfast.cache.groups import CacheGroup
from holdfast.config import Limits
from holdfast.engine.core import EngineCore
from holdfast.engine.engine import Engine
from holdfast.engine.ngram import NgramProposer
from holdfast.engine.scheduler import Scheduler
from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import NO_TOKEN, ScheduledSequence, SequenceResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


class GuessRunner(HashRunner):
    """Checks proposals one after the other, and leaves nonsense behind those that it rejects."""

    def __init__(self, limits: Limits, num_pages: int) -> None:
        super().__init__(limits, num_pages)
        self.proposed: list[tuple[int, int]] = []
        """(sequence id, number of proposals) of everybody that had some."""

    def _run(self, item: ScheduledSequence) -> SequenceResult:
        if not item.proposals:
            return super()._run(item)
        sequence, page_tokens = item.sequence, self.limits.page_tokens
        self.proposed.append((sequence.sequence_id, len(item.proposals)))
        assert item.num_new_tokens == 1 + len(item.proposals), f"{item} has other tokens too"
        for position in range(item.start, item.start + item.num_new_tokens):
            self.shadow[sequence.tables[0][position // page_tokens], position % page_tokens] = b"nonsense"
        known, results = list(sequence.token_ids), []
        for place in range(len(item.proposals) + 1):
            results.append(super()._run(ScheduledSequence.of(sequence, item.start + place, 1)))
            if place == len(item.proposals) or results[-1].token_id != item.proposals[place]:
                break
            sequence.token_ids.append(item.proposals[place])
        sequence.token_ids[:] = known
        token_ids = tuple(token for result in results for token in result.token_ids)
        return SequenceResult(token_ids, tuple(found for result in results for found in result.logprobs))


def guessing_engine(num_proposals: int = 4, run_ahead: int = 0, num_pages: int = 96, max_num_seqs: int = 8) -> Engine:
    plain = make_engine()
    limits = Limits(max_num_seqs, 32, 128, 4, max_sampled_rows=min(32, max_num_seqs * (1 + num_proposals)))
    runner, scheduler = GuessRunner(limits, num_pages), Scheduler(limits, num_pages, True, 64)
    core = EngineCore(runner, scheduler, run_ahead=run_ahead, proposer=NgramProposer(num_proposals))
    engine = Engine(core, plain.tokenizer, plain.chat_template, 0)
    engine.runner = runner  # type: ignore[attr-defined]
    return engine


def answers(engine: Engine, said: list[int], params: SamplingParams, prompt: str = "Q"):
    engine.runner.script[prompt] = said  # type: ignore[attr-defined]
    engine.add_request("one", prompt, params)
    deltas = run_all(engine)["one", 0]
    assert engine.core.proposer.num_sequences == 0, "its index stayed"
    return deltas


@for_each("run_ahead", [0, 1])
@for_each("num_proposals", [1, 4, 16])
def test_proposals_for_repeating_text_take_fewer_steps(num_proposals: int, run_ahead: int) -> None:
    said = list(b"abcabcabcabcabcabcabcxyabcabcabcabcabcab")
    plain = make_engine(run_ahead=0)
    expected = answers_plain(plain, said)
    engine = guessing_engine(num_proposals, run_ahead)
    deltas = answers(engine, said, GREEDY)
    assert (tokens_of(deltas), text_of(deltas)) == expected
    stats = engine.stats()
    assert stats.num_steps < plain.stats().num_steps
    assert stats.num_output_tokens == len(said)
    assert 0 < stats.num_accepted_tokens <= stats.num_proposed_tokens
    # Every step brings one token of its own.
    assert stats.num_steps + stats.num_accepted_tokens == len(said) + (
        0 if run_ahead == 0 else stats.num_steps - len(deltas)
    )


def answers_plain(engine: Engine, said: list[int]) -> tuple[list[int], str]:
    engine.runner.script["Q"] = said  # type: ignore[attr-defined]
    engine.add_request("one", "Q", GREEDY)
    deltas = run_all(engine)["one", 0]
    return tokens_of(deltas), text_of(deltas)


@for_each(
    "end, options, reason",
    [(EOS, {}, "stop"), (ord("X"), {"stop_token_ids": [ord("X")]}, "stop"), (ord("a"), {"max_tokens": 10}, "length")],
)
def test_accepted_drafts_after_end_are_cut(end: int, options: dict, reason: str) -> None:
    said = [*b"ab", end, *b"ab", end, *b"ab", end, *b"ab"]
    params = SamplingParams(temperature=0.0, min_tokens=8, logprobs=1, **({"max_tokens": 40} | options))
    engine = guessing_engine()
    deltas = answers(engine, said, params)
    # The third `end` is the first behind min_tokens, and the proposals went past it.
    num_tokens = options.get("max_tokens", 9)
    assert tokens_of(deltas) == said[:num_tokens]
    assert deltas[-1].finish_reason == reason
    assert len([place for delta in deltas for place in delta.logprobs or ()]) == num_tokens
    assert engine.stats().num_output_tokens == num_tokens
    assert engine.stats().num_accepted_tokens > 0


def test_accepted_drafts_after_stop_string_are_cut() -> None:
    said = list(b"abcdabcdabcdabcdabcd")
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["cdabcdab"], logprobs=0)
    engine = guessing_engine()
    deltas = answers(engine, said, params)
    assert text_of(deltas) == "ab"
    assert tokens_of(deltas) == said[:10]
    assert len([place for delta in deltas for place in delta.logprobs or ()]) == 10
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "cdabcdab")
    assert engine.stats().num_output_tokens == 10, "drafts after the stop string are no output"


def test_missing_token_among_accepted_ones_fails_one_request() -> None:
    engine = guessing_engine()
    engine.runner.answer = lambda item, result: (
        SequenceResult((*result.token_ids[:1], NO_TOKEN)) if len(result.token_ids) > 1 else result
    )
    deltas = answers(engine, list(b"ababababab"), GREEDY)
    assert deltas[-1].finish_reason == "error"
    assert "not finite" in str(deltas[-1].error)
    assert tokens_of(deltas) == list(b"ababababab")[: len(tokens_of(deltas))]


@for_each(
    "params, may",
    [
        (SamplingParams(temperature=0.0, max_tokens=20), True),
        (SamplingParams(temperature=0.9, seed=5, max_tokens=20), True),
        (SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, min_tokens=4, logit_bias={5: 1.0}), True),
        (SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0), True),
        (SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.1), False),
        (SamplingParams(temperature=0.0, max_tokens=20, presence_penalty=0.1), False),
        (SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=0.1), False),
        (SamplingParams(temperature=0.0, max_tokens=20, bad_words=["zq"]), False),
        (SamplingParams(temperature=0.0, max_tokens=1), False),
    ],
)
def test_proposals_depend_on_sampling_params(params: SamplingParams, may: bool) -> None:
    engine = guessing_engine()
    answers(engine, list(b"ababababababababababab"), params)
    assert bool(engine.runner.proposed) is may
    assert (engine.stats().num_proposed_tokens > 0) is may


def test_proposals_go_no_further_than_the_answer_may() -> None:
    engine = guessing_engine(num_proposals=16)
    deltas = answers(engine, list(b"abababababababababab"), SamplingParams(temperature=0.0, max_tokens=9))
    assert len(tokens_of(deltas)) == 9
    assert engine.stats().num_accepted_tokens == engine.stats().num_proposed_tokens, (
        "more was proposed than could be used"
    )


def test_core_runs_no_step_ahead_of_drafting_step() -> None:
    engine = guessing_engine(run_ahead=1)
    engine.runner.script["guessing"] = list(b"abab" * 9)
    engine.add_request("one", "guessing", GREEDY)
    run_all(engine)
    assert engine.runner.most_in_flight == 1
    # "ab" is followed by something new each time.
    engine.runner.script["rejected"] = [token for new in b"cdefghijklmn" for token in (*b"ab", new)]
    engine.add_request("two", "rejected", GREEDY)
    deltas = run_all(engine)["two", 0]
    assert tokens_of(deltas)[:36] == engine.runner.script["rejected"]
    assert engine.runner.most_in_flight == 2


def test_speculating_sequence_of_any_step_holds_the_next() -> None:
    engine = guessing_engine(run_ahead=2)
    engine.runner.script |= {"plain": list(b"abab" * 9), "guessing": list(b"abab" * 9)}
    engine.add_request("plain", "plain", SamplingParams(temperature=0.0, max_tokens=40, presence_penalty=0.5))
    for _ in range(4):
        engine.step()
    assert engine.runner.most_in_flight == 3
    engine.runner.most_in_flight = 0
    engine.add_request("guessing", "guessing", SamplingParams(temperature=0.0, max_tokens=30))
    engine.step()
    # One step without it is in flight, and one with it; a third is not launched.
    flights = [[item.sequence.may_speculate for item in step.scheduled] for step in engine.core.in_flight]
    assert flights == [[False], [False, True]]
    engine.step()
    assert len(engine.core.in_flight) == 1
    run_all(engine)


def test_prompt_logprobs_leave_no_row_to_drafts_before_an_answer() -> None:
    found = []
    for params in (GREEDY, SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0)):
        engine = guessing_engine()
        engine.runner.script["ab" * 16 + "a"] = list(b"ba" * 20)
        engine.add_request("one", "ab" * 16 + "a", params)
        run_all(engine)
        found.append((engine.runner.steps[1], engine.runner.proposed[0]))
    # 32 rows of the prompt are one step. The last row has drafts after it, unless the prompt is measured.
    assert found[0][0] == ((0, 32, 5),)
    assert found[1][0] == ((0, 32, 1),)
    assert found[1][1] == (0, 4), "they come with the answer"


def test_proposals_with_preemption_give_plain_answers() -> None:
    prompts = [f"{'pattern ' * (number % 3)}{number}" for number in range(14)]
    params = [SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=12 + number) for number in range(14)]
    found = []
    for engine in (make_engine(run_ahead=0), guessing_engine(3, 1, num_pages=18, max_num_seqs=5)):
        for prompt, own in zip(prompts, params, strict=True):
            engine.runner.script[prompt] = list(prompt.encode() * 9)
            engine.add_request(prompt, prompt, own)
        found.append({key: tokens_of(deltas) for key, deltas in run_all(engine).items()})
    assert found[0] == found[1]
    assert engine.stats().num_accepted_tokens > 50
    assert engine.stats().num_preemptions > 0
    assert engine.core.proposer.num_sequences == 0


def test_core_with_state_group_refuses_proposer() -> None:
    limits = Limits(2, 8, 32, 4)
    groups = (CacheGroup("whole", 4), CacheGroup("memory", 0, state_pages=1))
    scheduler = Scheduler(limits, 32, True, 8, groups=groups)
    with pytest.raises(AssertionError, match="the cache group memory keeps one state"):
        EngineCore(GuessRunner(limits, 32), scheduler, proposer=NgramProposer(2))

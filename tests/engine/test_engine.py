"""Engine over a fake runner: endings, seeds, log-probabilities, names, statistics, and aborts at every token."""

import math
import signal
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import pairwise

import pytest

from engine.fakes import (
    EOS,
    OTHER_EOS,
    VOCAB_SIZE,
    assert_at_rest,
    logprobs_at,
    make_engine,
    run_all,
    solo,
    text_of,
    tokens_of,
)
from error_codes import raises_code
from for_each import for_each
from holdfast.engine.outputs import OutputAssembler
from holdfast.errors import QueueFullError, RequestError
from holdfast.request.outputs import CompletionDelta, Logprob
from holdfast.request.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("run_ahead")


def test_engine_fresh_stats_are_zero():
    assert set(asdict(make_engine().stats()).values()) == {0}


def test_engine_stats_are_plain_numbers_and_grow():
    engine = make_engine()
    engine.add_request("r", "a prompt", SamplingParams(max_tokens=3))
    seen = []
    while engine.has_unfinished():
        engine.step()
        seen.append(engine.stats())
    assert [stats.num_output_tokens for stats in seen] == [1, 2, 3]
    assert [stats.num_steps for stats in seen] == [1, 2, 3]
    assert all(type(value) in (int, float) for stats in seen for value in asdict(stats).values())


GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def scripted(said: list[int], params: SamplingParams, **options):
    """One request whose answer is known: its deltas, and the engine afterwards."""
    engine = make_engine(**options)
    engine.runner.script["Q"] = said
    engine.add_request("r", "Q", params)
    deltas = run_all(engine)["r", 0]
    assert_at_rest(engine)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    return deltas, engine


def test_length_ends_after_max_tokens():
    deltas, engine = scripted(list(b"abcdef"), SamplingParams(max_tokens=4))
    assert (tokens_of(deltas), text_of(deltas)) == (list(b"abcd"), "abcd")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].error) == ("length", None, None)
    assert_at_rest(engine)


def test_engine_default_max_tokens_fills_context():
    deltas, _ = scripted(list(b"x"), SamplingParams(), max_model_len=20)
    assert len(tokens_of(deltas)) == 19
    assert deltas[-1].finish_reason == "length"


@for_each("eos", [EOS, OTHER_EOS])
def test_engine_eos_token_ends_without_text(eos):
    deltas, _ = scripted([*b"ab", eos, *b"zz"], SamplingParams(max_tokens=9))
    assert (tokens_of(deltas), text_of(deltas)) == ([*b"ab", eos], "ab")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_end_token_as_the_last_allowed_one_is_a_stop():
    deltas, _ = scripted([*b"ab", EOS], SamplingParams(max_tokens=3))
    assert deltas[-1].finish_reason == "stop"


def test_engine_ignore_eos_goes_on():
    deltas, _ = scripted([*b"ab", EOS, *b"cd"], SamplingParams(max_tokens=5, ignore_eos=True))
    assert (tokens_of(deltas), text_of(deltas)) == ([*b"ab", EOS, *b"cd"], "abcd")
    assert deltas[-1].finish_reason == "length"


def test_special_tokens_are_shown_on_request():
    params = SamplingParams(max_tokens=5, ignore_eos=True, skip_special_tokens=False)
    deltas, _ = scripted([*b"ab", EOS, *b"cd"], params)
    assert text_of(deltas) == "ab<eos>cd"


def test_stop_token_ends_and_is_named():
    deltas, _ = scripted(list(b"abXcd"), SamplingParams(max_tokens=9, stop_token_ids=[ord("Y"), ord("X")]))
    assert (tokens_of(deltas), text_of(deltas)) == (list(b"abX"), "ab")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ord("X"))


def test_stop_token_counts_even_if_it_is_an_ignored_eos():
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[EOS])
    deltas, _ = scripted([*b"ab", EOS, *b"cd"], params)
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", EOS)


@for_each("min_tokens", range(8))
def test_min_tokens_holds_off_end_tokens(min_tokens):
    deltas, _ = scripted([*b"ab", EOS, *b"c", EOS, *b"defg"], SamplingParams(max_tokens=8, min_tokens=min_tokens))
    ends_at = next((place for place in (3, 5) if place >= min_tokens), 8)
    assert len(tokens_of(deltas)) == ends_at
    assert deltas[-1].finish_reason == ("length" if ends_at == 8 else "stop")


@for_each("include", [False, True])
def test_engine_stop_string_across_tokens_ends_answer(include):
    params = SamplingParams(max_tokens=9, stop=["END", "zzz"], include_stop_str_in_output=include)
    deltas, _ = scripted(list(b"abENDcd"), params)
    assert (tokens_of(deltas), text_of(deltas)) == (list(b"abEND"), "abEND" if include else "ab")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")
    assert all("E" not in delta.text for delta in deltas[:-1]), "part of a stop string was shown"


def test_engine_partial_stop_string_is_shown_at_end():
    deltas, _ = scripted(list(b"abEN"), SamplingParams(max_tokens=4, stop=["END"]))
    assert [delta.text for delta in deltas] == ["a", "b", "", "EN"]
    assert deltas[-1].finish_reason == "length"
    deltas, _ = scripted([*b"abEN", EOS], SamplingParams(max_tokens=9, stop=["END"]))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("abEN", "stop")


def test_stop_string_in_the_last_allowed_token_is_a_stop():
    deltas, _ = scripted(list(b"ab\n"), SamplingParams(max_tokens=3, stop="\n"))
    assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("ab", "stop", "\n")


def test_min_tokens_holds_off_stop_strings():
    deltas, _ = scripted(list(b".a.b.c.d"), SamplingParams(max_tokens=8, stop=".", min_tokens=4))
    assert (text_of(deltas), len(tokens_of(deltas))) == (".a.b", 5)


def test_engine_multi_token_character_comes_whole():
    deltas, _ = scripted(list("é🎈".encode()), SamplingParams(max_tokens=6))
    assert [delta.text for delta in deltas] == ["", "é", "", "", "", "🎈"]


def test_engine_truncated_character_shows_replacement():
    deltas, _ = scripted(list("a🎈".encode()), SamplingParams(max_tokens=3))
    assert text_of(deltas) == "a\ufffd"


def test_engine_without_tokenizer_returns_ids_only():
    engine = make_engine(tokenizer=None)
    engine.add_request("r", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=3, logprobs=1))
    deltas = run_all(engine)["r", 0]
    assert (len(tokens_of(deltas)), text_of(deltas)) == (3, "")
    assert deltas[0].logprobs[0][deltas[0].token_ids[0]].decoded_token == ""
    with raises_code("request.no_tokenizer", RequestError):
        engine.add_request("r", "text", SamplingParams())
    with raises_code("request.no_tokenizer", RequestError):
        engine.add_request("r", {"prompt_token_ids": [1]}, SamplingParams(stop="x"))


def test_answers_do_not_depend_on_company_chunks_or_preemption():
    prompts = [f"prompt {number} " * (number % 4 + 1) for number in range(10)]
    alone = [solo(prompt, GREEDY) for prompt in prompts]
    for options in ({}, {"max_num_batched_tokens": 5}, {"num_pages": 32, "max_num_seqs": 4}, {"page_tokens": 1}):
        engine = make_engine(**options)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
        found = run_all(engine)
        assert [(tokens_of(found[str(n), 0]), text_of(found[str(n), 0])) for n in range(10)] == alone, options
        assert_at_rest(engine)


def test_preemption_happens_and_changes_nothing():
    engine = make_engine(num_pages=20, page_tokens=4, max_num_seqs=4, max_model_len=80)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, prompt_logprobs=1)
    prompts = [f"a prompt, number {number}" for number in range(4)]
    for prompt in prompts:
        engine.add_request(prompt, prompt, params)
    found = run_all(engine)
    assert engine.stats().num_preemptions > 0
    assert any(found[prompt, 0][-1].metrics.num_preemptions for prompt in prompts)
    for prompt in prompts:
        assert (tokens_of(found[prompt, 0]), text_of(found[prompt, 0])) == solo(prompt, params)
        assert len(found[prompt, 0][0].prompt_logprobs) == len(prompt)
    assert_at_rest(engine)


def test_n_completions_have_seeds_of_their_own():
    engine = make_engine()
    engine.add_request("four", "Q", SamplingParams(n=4, seed=7, max_tokens=10))
    found = run_all(engine)
    answers = [tuple(tokens_of(found["four", index])) for index in range(4)]
    assert len(set(answers)) == 4
    for n in (1, 2, 3):
        assert tokens_of(_only(SamplingParams(n=n, seed=7, max_tokens=10), 0)) == list(answers[0])
    assert tokens_of(_only(SamplingParams(n=2, seed=7, max_tokens=10), 1)) == list(answers[1])
    assert tokens_of(_only(SamplingParams(seed=8, max_tokens=10), 0)) not in map(list, answers)
    assert_at_rest(engine)


def _only(params: SamplingParams, index: int, **options):
    engine = make_engine(**options)
    engine.add_request("r", "Q", params)
    return run_all(engine)["r", index]


def test_unseeded_requests_follow_the_engine_seed():
    def answers(seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        names = [engine.add_request(None, "Q", SamplingParams(max_tokens=10)) for _ in range(3)]
        found = run_all(engine)
        return [tokens_of(found[name, 0]) for name in names]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)
    assert len(set(map(tuple, answers(1)))) == 3


def test_refused_request_leaves_later_seeds_unchanged():
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.add_request(None, "", SamplingParams(max_tokens=10))
    name = engine.add_request(None, "Q", SamplingParams(max_tokens=10))
    assert tokens_of(run_all(engine)[name, 0]) == tokens_of(_only(SamplingParams(max_tokens=10), 0))


def test_completions_of_one_request_end_one_by_one():
    engine = make_engine()
    params = SamplingParams(n=3, seed=1, max_tokens=30, stop_token_ids=[ord("e"), ord("t")])
    engine.add_request("r", "Q", params)
    assembler = OutputAssembler("Q", [ord("Q")], 3)
    ends = []
    while engine.has_unfinished():
        for delta in engine.step():
            assembler.add(delta)
            if delta.finish_reason:
                ends.append(delta.index)
    assert sorted(ends) == [0, 1, 2]
    assert assembler.finished
    assert len({len(output.token_ids) for output in assembler.output().outputs}) > 1
    assert_at_rest(engine)


def test_logprobs_have_the_chosen_and_the_likeliest_tokens():
    deltas, _ = scripted(list(b"ab"), SamplingParams(max_tokens=2, logprobs=3))
    for position, (delta, token) in enumerate(zip(deltas, b"ab", strict=True), start=1):
        (found,) = delta.logprobs
        measured = logprobs_at(token, position, 3)
        assert list(found) == [token, token + 2, token + 1]
        assert found[token] == Logprob(measured.logprob, 3, chr(token))
        assert found[token + 2] == Logprob(measured.top[0][1], 1, chr(token + 2))


def test_logprobs_zero_is_the_chosen_token_alone():
    deltas, _ = scripted(list(b"ab"), SamplingParams(max_tokens=2, logprobs=0))
    assert [list(delta.logprobs[0]) for delta in deltas] == [[ord("a")], [ord("b")]]


@for_each("chunk", [1, 2, 3, 7, 32])
def test_prompt_logprobs_are_complete_for_any_chunk_size(chunk):
    engine = make_engine(max_num_batched_tokens=chunk)
    prompt = "0123456789"
    engine.add_request("other", prompt, SamplingParams(max_tokens=1))
    run_all(engine)
    engine.add_request("r", prompt, SamplingParams(max_tokens=2, n=2, prompt_logprobs=1))
    found = run_all(engine)
    first, second = found["r", 0]
    assert second.prompt_logprobs is None
    assert [delta.prompt_logprobs for delta in found["r", 1]] == [None, None]
    assert first.num_cached_tokens == 0, "a cached prompt has no logits"
    assert first.prompt_logprobs[0] is None
    for position, entry in enumerate(first.prompt_logprobs[1:], start=1):
        token = ord(prompt[position])
        assert entry[token] == Logprob(-0.75 - position, 3, prompt[position])
        assert len(entry) == 2
    assert len(first.prompt_logprobs) == len(prompt)


def test_prompt_logprobs_of_a_single_token():
    deltas, _ = scripted(list(b"ab"), SamplingParams(max_tokens=2, prompt_logprobs=2))
    assert deltas[0].prompt_logprobs == (None,)


def test_prefix_hits_are_counted_and_salts_keep_apart():
    engine = make_engine()
    prompt = "the same beginning of every prompt"
    for salt in (None, "one", "two"):
        for _ in range(2):
            engine.add_request("r", prompt, GREEDY, cache_salt=salt)
            last = run_all(engine)["r", 0][-1]
            assert tokens_of([last])
        assert last.num_cached_tokens == last.metrics.num_cached_tokens == 32
    stats = engine.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens) == (96, 6 * len(prompt))
    engine.reset_prefix_cache()
    engine.add_request("r", prompt, GREEDY)
    assert run_all(engine)["r", 0][-1].num_cached_tokens == 0


def test_metrics_are_times_since_arrival():
    engine = make_engine(max_num_seqs=1)
    engine.add_request("first", "Q", GREEDY)
    engine.add_request("second", "Q", GREEDY)
    found = run_all(engine)
    first, second = (found[name, 0][-1].metrics for name in ("first", "second"))
    for metrics in (first, second):
        assert 0 <= metrics.queue_seconds < metrics.first_token_seconds < metrics.total_seconds
    assert second.queue_seconds > first.queue_seconds
    assert all(delta.metrics is None for delta in found["first", 0][:-1])


def test_engine_stats_count_requests_and_tokens():
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, "prompt", SamplingParams(max_tokens=3, n=2))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_unfinished_requests) == (2, 4, 3)
    assert stats.kv_usage == pytest.approx(3 / 96)
    run_all(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_unfinished_requests, stats.kv_usage) == (0, 0, 0, 0)
    assert (stats.num_requests, stats.num_output_tokens) == (3, 18)
    assert stats.num_prompt_tokens + stats.num_prefix_hit_tokens == 36


def test_engine_full_queue_refuses_all_or_nothing():
    engine = make_engine(max_queue=5, max_num_seqs=2)
    engine.add_request("a", "Q", SamplingParams(n=3, max_tokens=2))
    with raises_code("request.queue_full", QueueFullError):
        engine.add_request("b", "Q", SamplingParams(n=3, max_tokens=2))
    assert engine.stats().num_waiting == 3
    engine.add_request("b", "Q", SamplingParams(n=2, max_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add_request("c", "Q", SamplingParams(max_tokens=2))
    engine.step()
    engine.add_request("c", "Q", SamplingParams(n=2, max_tokens=2))
    assert len(run_all(engine)) == 7
    assert_at_rest(engine)


def test_engine_request_names_clash_only_while_live():
    engine = make_engine()
    engine.add_request("0", "Q", GREEDY)
    with raises_code("request.request_id_in_use", RequestError):
        engine.add_request("0", "R", GREEDY)
    assert engine.add_request(None, "R", GREEDY) == "1"
    engine.abort("0")
    engine.add_request("0", "S", GREEDY)
    found = run_all(engine)
    assert tokens_of(found["0", 0]) == solo("S", GREEDY)[0]
    engine.add_request("0", "Q", GREEDY)
    assert tokens_of(run_all(engine)["0", 0]) == solo("Q", GREEDY)[0]


def test_generated_names_avoid_given_ones():
    engine = make_engine()
    for name in ("1", "2"):
        engine.add_request(name, "Q", GREEDY)
    assert engine.add_request(None, "Q", GREEDY) == "3"


@for_each("name", ["", "x" * 257, 5, b"x", ["x"]])
def test_odd_names_are_refused(name):
    with raises_code("request.request_id", RequestError):
        make_engine().add_request(name, "Q", GREEDY)


def test_abort_of_an_unknown_request_is_a_no_op():
    engine = make_engine()
    assert engine.abort("unknown") == []
    engine.add_request("r", "Q", GREEDY)
    run_all(engine)
    assert engine.abort("r") == []


def test_step_of_an_idle_engine_is_nothing():
    engine = make_engine()
    assert engine.step() == []
    assert engine.runner.steps == []


NEIGHBOUR = SamplingParams(temperature=0.5, seed=5, max_tokens=64)
VICTIM = SamplingParams(temperature=0.5, seed=9, max_tokens=64)


@dataclass(frozen=True)
class AbortCase:
    """How to have a request in one state while another one runs beside it."""

    options: dict[str, int]
    prompt: str = "victim " * 3
    n: int = 1

    def engine(self):
        engine = make_engine(**{"max_model_len": 160, "num_pages": 200, **self.options})
        engine.add_request("neighbour", "neighbour", NEIGHBOUR)
        engine.add_request("victim", self.prompt, replace(VICTIM, n=self.n))
        return engine


ABORT_CASES = {
    "queued": AbortCase({"max_num_seqs": 1}),
    "prefill": AbortCase({"max_num_batched_tokens": 2}, "v" * 90),
    "decode": AbortCase({}),
    "preempted": AbortCase({"num_pages": 30}),
    "n": AbortCase({}, n=4),
}


QUICK_STEPS = (0, 1, 2, 3, 5, 8, 11, 18, 30, 45, 63, 64)
"""Before an abort: the first ones, some in the middle, and those around the end."""


@cache
def undisturbed(prompt: str, params: SamplingParams) -> tuple[list[int], str]:
    return solo(prompt, params, max_model_len=160, num_pages=200)


@pytest.mark.each_pair
@pytest.mark.parametrize("state", ABORT_CASES)
@pytest.mark.parametrize(
    "num_steps",
    [steps if steps in QUICK_STEPS else pytest.param(steps, marks=pytest.mark.slow) for steps in range(65)],
)
def test_abort_at_every_token_frees_pages(state, num_steps):
    case = ABORT_CASES[state]
    engine = case.engine()
    heard: dict[str, list[CompletionDelta]] = {"neighbour": [], "victim": []}
    for _ in range(num_steps):
        for delta in engine.step():
            heard[delta.request_id].append(delta)
    ended = {delta.index for delta in heard["victim"] if delta.finish_reason}
    last = engine.abort("victim")
    assert [delta.index for delta in last] == [index for index in range(case.n) if index not in ended]
    assert all(delta.finish_reason == "abort" and not delta.token_ids for delta in last)
    engine.scheduler.check()
    assert engine.scheduler.num_running + engine.scheduler.num_waiting <= 1, "it goes at once, not a step later"
    said = tokens_of([delta for delta in heard["victim"] if delta.index == 0])
    assert said == undisturbed(case.prompt, VICTIM)[0][: len(said)]
    rest = run_all(engine)
    assert set(rest) <= {("neighbour", 0)}
    heard["neighbour"] += rest.get(("neighbour", 0), [])
    assert (tokens_of(heard["neighbour"]), text_of(heard["neighbour"])) == undisturbed("neighbour", NEIGHBOUR)
    assert_at_rest(engine)


@for_each("state", ABORT_CASES)
def test_abort_cases_reach_their_states(state):
    engine = ABORT_CASES[state].engine()
    seen = set()
    for _ in range(65):
        engine.step()
        running = [sequence for sequence in engine.scheduler.running if sequence.params.seed == 9]
        waiting = [sequence for sequence in engine.scheduler.waiting if sequence.params.seed == 9]
        seen |= {"preempted" if sequence.num_preemptions else "queued" for sequence in waiting}
        seen |= {"prefill" if sequence.num_output_tokens == 0 else "decode" for sequence in running}
        seen |= {"n"} if len(running) == 4 else set()
    assert state in seen


def test_abort_tells_what_the_caller_has_not_heard_yet():
    engine = make_engine()
    engine.add_request("r", "Q", GREEDY)
    complete = engine.scheduler.complete

    def interrupted(step, token_ids):
        signal.raise_signal(signal.SIGINT)
        complete(step, token_ids)

    engine.scheduler.complete = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    reported = engine.abort("r")
    assert [len(delta.token_ids) for delta in reported] == [1, 0]
    engine.scheduler.complete = complete
    assert_at_rest(engine)


def test_engine_abort_all_ends_every_completion():
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, "Q", SamplingParams(n=2, max_tokens=9))
    engine.step()
    last = engine.abort_all()
    assert [(delta.request_id, delta.index) for delta in last] == [(name, index) for name in "abc" for index in (0, 1)]
    assert_at_rest(engine)


def test_engine_runs_every_admitted_request():
    engine = make_engine(max_model_len=16, num_pages=4, page_tokens=4)
    for prompt_len in range(1, 16):
        params = SamplingParams(max_tokens=16 - prompt_len, temperature=0.0)
        engine.add_request("r", {"prompt_token_ids": [VOCAB_SIZE - 1] * prompt_len}, params)
        assert len(tokens_of(run_all(engine)["r", 0])) == 16 - prompt_len
    assert_at_rest(engine)


def test_engine_is_at_rest_after_many_requests_and_aborts():
    engine = make_engine(max_num_seqs=4, num_pages=40, max_queue=1000)
    for number in range(100):
        params = SamplingParams(max_tokens=number % 7 + 1, n=number % 3 + 1)
        name = engine.add_request(None, f"{number}", params)
        engine.step()
        if number % 5 == 0:
            engine.abort(name)
    run_all(engine)
    assert_at_rest(engine)
    assert engine.stats().num_unfinished_requests == 0
    assert engine.step() == []
    assert not engine.is_dead, "a step without work finds every completion forgotten"


def test_cumulative_logprob_adds_up():
    deltas, _ = scripted(list(b"abc"), SamplingParams(max_tokens=3, logprobs=1))
    assembler = OutputAssembler("Q", [81], 1)
    for delta in deltas:
        assembler.add(delta)
    output = assembler.output().outputs[0]
    assert math.isclose(output.cumulative_logprob, sum(-0.75 - position for position in (1, 2, 3)))
    assert len(output.logprobs) == 3
    assert all(a is not b for a, b in pairwise(output.logprobs))

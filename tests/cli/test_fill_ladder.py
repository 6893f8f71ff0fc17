"""The fill ladder over a real scheduler and a runner that checks every page: shares of turns, what each rung reaches and counts, and how it ends."""

import itertools
from dataclasses import replace

import pytest

from engine.fakes import HashRunner, assert_at_rest, make_engine, solo
from error_codes import raises_code
from holdfast.cache.groups import CacheGroup
from holdfast.cli.bench_fill import Fill
from holdfast.cli.fill_ladder import (
    PROMPT,
    TRACE,
    TWO_TRACES,
    Climb,
    Ladder,
    Rung,
    choose_turns,
    make_rungs,
    turn_shares,
    whole_contexts,
)
from holdfast.config import Limits
from holdfast.engine.engine import Engine
from holdfast.errors import ConfigError
from holdfast.request.sampling_params import SamplingParams

DECLARED, TURNS, ANSWER = 128, 6, 5
IDS = range(97, 123)


class ScriptedMeter:
    """A device whose free bytes and allocations a test sets."""

    def __init__(self, free: list[int | None] | None = None) -> None:
        self.free, self.allocations, self.compilations = free or [1000], 0, 0

    def free_bytes(self) -> int | None:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    def take_allocations(self) -> int:
        taken, self.allocations = self.allocations, 0
        return taken

    def take_compilations(self) -> int:
        taken, self.compilations = self.compilations, 0
        return taken


class Submitted:
    """Prompts in the order in which an engine gets them."""

    def __init__(self, engine: Engine) -> None:
        self.prompts: list[list[int]] = []
        self._add = engine.add_request
        engine.add_request = self._noted  # type: ignore[method-assign]

    def _noted(self, request_id: str | None, prompt: object, params: SamplingParams) -> str:
        assert isinstance(prompt, dict), f"{prompt=}"
        self.prompts.append(list(prompt["prompt_token_ids"]))
        return self._add(request_id, prompt, params)


def engine_of(num_pages: int = 96, **options: object) -> Engine:
    return make_engine(max_model_len=DECLARED, num_pages=num_pages, **options)  # type: ignore[arg-type]


def runner_of(engine: Engine) -> HashRunner:
    return engine.runner  # type: ignore[attr-defined]


def quiet(num_done: int, num_full: int) -> None:
    assert 0 <= num_done <= num_full, f"{num_done=} {num_full=}"


def climbed(engine: Engine, meter: ScriptedMeter | None = None, num_agents: int = 2) -> list[Climb]:
    ladder = Ladder(engine, meter or ScriptedMeter(), 0, IDS)
    for rung in make_rungs(DECLARED, TURNS, ANSWER, num_agents):
        ladder.climb(rung, quiet)
    return ladder.climbs


@pytest.mark.parametrize("answer", [1, 5, 64])
@pytest.mark.parametrize("declared", [66, 128, 1000, 4097])
def test_turn_shares_with_answers_end_at_declared_context(declared: int, answer: int) -> None:
    for num_turns in (1, 2, 7, declared // (answer + 1)):
        if num_turns > declared // (answer + 1):
            continue
        shares = turn_shares(declared, num_turns, answer)
        assert len(shares) == num_turns
        assert sum(shares) + num_turns * answer == declared
        assert min(shares) >= 1
        assert max(shares) - min(shares) <= 1


def test_make_rungs_all_end_at_declared_context() -> None:
    rungs = make_rungs(DECLARED, TURNS, ANSWER, 2)
    assert [(rung.name, len(rung.added), rung.num_agents) for rung in rungs] == [
        (PROMPT, 1, 1),
        (TRACE, TURNS, 1),
        (TWO_TRACES, TURNS, 2),
    ]
    assert rungs[0].added == (DECLARED - ANSWER,)
    assert {rung.tokens for rung in rungs} == {DECLARED}
    assert make_rungs(DECLARED, TURNS, ANSWER, 1) == rungs[:2]


def test_choose_turns_short_context_takes_what_fits() -> None:
    assert choose_turns(1000, None, 64, 50) == 15
    assert choose_turns(100_000, None, 64, 50) == 50
    assert choose_turns(1000, 15, 64, 50) == 15


def test_choose_turns_impossible_numbers_refused() -> None:
    with raises_code("bench.fill_turns", ConfigError, value=16, most=15):
        choose_turns(1000, 16, 64, 50)
    with raises_code("bench.fill_no_prompt", ConfigError, declared=64, answer_tokens=64):
        choose_turns(64, None, 64, 50)


GROUPS = (CacheGroup("whole context", 4), CacheGroup("window of 9", 4, window=9))
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128, page_tokens=4)


@pytest.mark.parametrize(("num_pages", "expected"), [(35, 0), (36, 1), (71, 1), (72, 2), (1000, 8)])
def test_whole_contexts_counts_whole_pages_of_every_group(num_pages: int, expected: int) -> None:
    """32 pages of the whole context and 4 of the window."""
    assert whole_contexts(GROUPS, LIMITS, num_pages) == expected


def test_whole_contexts_partial_pages_do_not_count() -> None:
    """Two contexts of 10 tokens are 20 tokens, but 6 pages of 4."""
    limits = replace(LIMITS, max_model_len=10)
    assert [whole_contexts(GROUPS[:1], limits, pages) for pages in (5, 6)] == [1, 2]


def test_ladder_every_rung_uses_last_position() -> None:
    engine = engine_of()
    climbs = climbed(engine)
    assert [climb.tokens for climb in climbs] == [DECLARED] * 3
    assert all(climb.is_filled for climb in climbs)
    ends: dict[int, int] = {}
    for step in runner_of(engine).steps:
        ends |= {number: start + count for number, start, count in step}
    # The last token of a context is answered, and never computed.
    assert sorted(ends.values())[-4:] == [DECLARED - 1] * 4
    assert_at_rest(engine)


def test_ladder_last_answer_of_rung_is_whole() -> None:
    engine = engine_of()
    submitted = Submitted(engine)
    climbed(engine)
    lengths = list(map(len, submitted.prompts))
    assert lengths[0] == lengths[TURNS] == lengths[-1] == lengths[-2] == DECLARED - ANSWER
    assert len(lengths) == 1 + TURNS + 2 * TURNS


def test_ladder_turn_goes_on_from_prompt_and_answer() -> None:
    engine = engine_of()
    submitted = Submitted(engine)
    climbed(engine, num_agents=1)
    trace = submitted.prompts[1:]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for earlier, later in itertools.pairwise(trace):
        answer = solo({"prompt_token_ids": earlier}, params)[0]
        assert later[: len(earlier) + ANSWER] == earlier + answer


def test_ladder_counts_each_token_once() -> None:
    engine = engine_of()
    submitted = Submitted(engine)
    one, trace, two = climbed(engine)
    sizes = list(map(len, submitted.prompts))
    parts = sizes[:1], sizes[1 : 1 + TURNS], sizes[1 + TURNS :]
    for climb, prompts in zip((one, trace, two), parts, strict=True):
        assert climb.answered_tokens == ANSWER * len(prompts)
        assert climb.hit_tokens + climb.computed_tokens == sum(prompts)
        assert climb.num_turns == len(climb.rung.added)
    assert one.hit_tokens == 0
    # Of every earlier context all but an open page is found.
    assert trace.hit_tokens >= sum(parts[1][:-1]) + ANSWER * (TURNS - 1) - 4 * TURNS
    assert two.hit_tokens >= 2 * trace.hit_tokens - 8 * TURNS


def test_ladder_two_agents_run_at_once_with_own_tokens() -> None:
    engine = engine_of()
    submitted = Submitted(engine)
    climbed(engine)
    first, second = submitted.prompts[-2:]
    assert first != second
    ends = [[start + count for _, start, count in step] for step in runner_of(engine).steps]
    assert any(len(step) == 2 and min(step) > DECLARED - ANSWER for step in ends), "full contexts never met"


def test_ladder_one_context_of_pages_is_enough() -> None:
    """Pages of the rungs before are given up, and no sequence is preempted."""
    engine = engine_of(num_pages=DECLARED // 4)
    climbs = climbed(engine, num_agents=1)
    assert [climb.tokens for climb in climbs] == [DECLARED] * 2
    assert [climb.num_preemptions for climb in climbs] == [0, 0]
    assert climbs[1].hit_tokens > 0


def test_ladder_pages_for_less_than_declared_is_not_filled() -> None:
    engine = engine_of(num_pages=DECLARED // 4 - 1)
    climbs = climbed(engine, num_agents=1)
    assert not any(climb.is_filled for climb in climbs)
    assert all(climb.tokens < DECLARED for climb in climbs)
    fill = Fill(DECLARED, climbs, 2, {})
    assert not fill.is_ok
    assert fill.filled_tokens < DECLARED
    assert fill.verdict.startswith("NOT FILLED: ")


def test_ladder_failed_request_ends_rung_with_tokens_so_far() -> None:
    engine = engine_of()
    runner = runner_of(engine)

    def fail(step: object) -> None:
        if len(runner.steps) == 3:
            runner.script = {}
            runner.choose = lambda item, prefix: -1  # type: ignore[method-assign]

    runner.on_step = fail
    ladder = Ladder(engine, ScriptedMeter(), 0, IDS)
    climb = ladder.climb(make_rungs(DECLARED, TURNS, ANSWER, 1)[0], quiet)
    assert climb.error is not None
    assert "one prompt failed" in climb.error
    assert 96 <= climb.tokens < DECLARED
    assert not Fill(DECLARED, ladder.climbs, 2, {}).is_ok
    assert_at_rest(engine)


def test_ladder_dead_engine_ends_rung() -> None:
    engine = engine_of()

    def die(step: object) -> None:
        raise RuntimeError("out of memory")

    runner_of(engine).on_step = die
    ladder = Ladder(engine, ScriptedMeter(), 0, IDS)
    climb = ladder.climb(make_rungs(DECLARED, TURNS, ANSWER, 1)[0], quiet)
    assert engine.is_dead
    assert climb.error is not None
    assert "out of memory" in climb.error


def test_ladder_interrupt_keeps_rung_and_frees_engine() -> None:
    engine = engine_of()
    runner = runner_of(engine)

    def interrupt(step: object) -> None:
        if len(runner.steps) == 15:
            runner.on_step = lambda step: None
            raise KeyboardInterrupt

    runner.on_step = interrupt
    ladder = Ladder(engine, ScriptedMeter(), 0, IDS)
    one, trace = make_rungs(DECLARED, TURNS, ANSWER, 1)
    ladder.climb(one, quiet)
    with pytest.raises(KeyboardInterrupt):
        ladder.climb(trace, quiet)
    last = ladder.climbs[-1]
    assert not last.is_filled
    assert 0 < last.tokens < DECLARED
    assert_at_rest(engine)


def test_ladder_allocations_belong_to_their_rung() -> None:
    engine, meter = engine_of(), ScriptedMeter()
    meter.allocations = meter.compilations = 7  # before the first rung
    ladder = Ladder(engine, meter, 0, IDS)
    one, trace = make_rungs(DECLARED, TURNS, ANSWER, 1)
    ladder.climb(one, quiet)

    def allocate(step: object) -> None:
        meter.allocations += 1
        meter.compilations += 2

    num_steps, runner_of(engine).on_step = len(runner_of(engine).steps), allocate
    ladder.climb(trace, quiet)
    num_steps = len(runner_of(engine).steps) - num_steps
    assert [climb.allocations for climb in ladder.climbs] == [0, num_steps]
    assert [climb.compilations for climb in ladder.climbs] == [0, 2 * num_steps]
    fill = Fill(DECLARED, ladder.climbs, 2, {})
    assert (fill.filled_tokens, fill.num_allocations, fill.is_ok) == (DECLARED, num_steps, False)


def test_ladder_free_bytes_are_least_of_rung() -> None:
    meter = ScriptedMeter([900, 500, 800, 700, 600, 1000])
    one, trace = climbed(engine_of(), meter, num_agents=1)
    assert (one.free_bytes, trace.free_bytes) == (500, 600)
    assert climbed(engine_of(), ScriptedMeter([None]), num_agents=1)[0].free_bytes is None


def test_fill_without_all_rungs_is_not_ok() -> None:
    climbs = climbed(engine_of(), num_agents=1)
    assert Fill(DECLARED, climbs, 2, {}).is_ok
    assert not Fill(DECLARED, climbs[:1], 2, {}).is_ok
    assert not Fill(DECLARED, [], 2, {}).is_ok
    assert Fill(DECLARED, [], 2, {}).filled_tokens == 0


def test_fill_counts_least_filled_rung() -> None:
    rung = Rung("a", (60,), 1, 4)
    fill = Fill(64, [Climb(rung, tokens=64), Climb(rung, tokens=63)], 2, {})
    assert (fill.filled_tokens, fill.is_ok) == (63, False)


def test_climb_rates_leave_out_first_answered_tokens() -> None:
    climb = Climb(Rung("a", (10, 10), 2, 5), num_turns=2, computed_tokens=40, answered_tokens=20)
    climb.prefill_seconds, climb.decode_seconds = 2.0, 4.0
    assert (climb.tokens_per_s, climb.prefill_per_s, climb.decode_per_s) == (10.0, 20.0, 4.0)
    assert Climb(Rung("a", (1,), 1, 1)).tokens_per_s == 0.0

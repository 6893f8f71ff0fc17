"""Our engine in a race, without a model."""

import random

import pytest

from engine.fakes import assert_at_rest, make_engine, solo
from holdfast.cli.bench_cases import Case, throughput_case
from holdfast.cli.bench_holdfast import HoldfastContestant
from holdfast.errors import HoldfastError
from holdfast.request.sampling_params import SamplingParams


def test_tokens_come_back_in_the_order_of_the_prompts() -> None:
    engine = make_engine(enable_prefix_caching=False, max_num_seqs=3)
    case = throughput_case(9, (2, 40), (1, 20), random.Random(0), range(97, 122))
    timing = HoldfastContestant(engine).run(case)
    for prompt, num_new, token_ids in zip(case.prompts, case.num_new, timing.token_ids, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        assert list(token_ids) == solo({"prompt_token_ids": list(prompt)}, params)[0]
    assert 0 < timing.first_seconds <= timing.total_seconds
    assert_at_rest(engine)


def test_it_can_run_again() -> None:
    contestant = HoldfastContestant(make_engine(enable_prefix_caching=False))
    case = Case("decode", "decode", ((97, 98), (99, 100)), (4, 4))
    assert contestant.run(case).token_ids == contestant.run(case).token_ids


def test_a_failure_is_no_figure() -> None:
    engine = make_engine()
    engine.runner.script["ab"] = [-1]  # type: ignore[attr-defined]
    with pytest.raises(HoldfastError, match="not finite"):
        HoldfastContestant(engine).run(Case("decode", "decode", ((97, 98),), (4,)))

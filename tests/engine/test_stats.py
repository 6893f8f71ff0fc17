from dataclasses import asdict

from engine.fakes import make_engine
from holdfast.request.sampling_params import SamplingParams


def test_a_fresh_engine_has_done_nothing():
    assert set(asdict(make_engine().stats()).values()) == {0}


def test_numbers_are_plain_and_grow():
    engine = make_engine()
    engine.add_request("r", "a prompt", SamplingParams(max_tokens=3))
    seen = []
    while engine.has_unfinished():
        engine.step()
        seen.append(engine.stats())
    assert [stats.num_output_tokens for stats in seen] == [1, 2, 3]
    assert [stats.num_steps for stats in seen] == [1, 2, 3]
    assert all(type(value) in (int, float) for stats in seen for value in asdict(stats).values())

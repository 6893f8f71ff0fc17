"""A client that hangs up in the middle of a step: it stops at the next layer if no other sequence is in it."""

from engine.fakes import assert_at_rest, make_engine, run_all, solo, tokens_of
from holdfast.engine.engine import Engine
from holdfast.engine.pulse import NUM_PLACES, HangUps
from holdfast.request.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def with_layers(engine: Engine, at_layer: dict[int, str]) -> list[int]:
    """Steps of ten layers; at some of the first step's, a client hangs up. Layers that every step got to."""
    reached: list[int] = []

    def run(step) -> None:
        reached.append(0)
        for layer in range(10):
            if layer in at_layer and len(reached) == 1:
                engine.hang_up(at_layer[layer])
            engine.core.check_needed()  # type: ignore[attr-defined]
            reached[-1] += 1

    engine.runner.on_step = run  # type: ignore[attr-defined]
    return reached


def test_step_of_a_client_that_hangs_up_stops() -> None:
    engine = make_engine(run_ahead=0)
    reached = with_layers(engine, {3: "a"})
    engine.add_request("a", "a long prompt", GREEDY)
    assert engine.step() == []
    assert reached == [3]
    assert engine.core.stats().num_running == 0, "the core has ended it by itself"
    assert [delta.finish_reason for delta in engine.abort("a")] == ["abort"]
    assert_at_rest(engine)
    engine.add_request("b", "a long prompt", GREEDY)
    assert tokens_of(run_all(engine)["b", 0]) == solo("a long prompt", GREEDY)[0]
    assert_at_rest(engine)


def test_step_with_another_client_goes_on() -> None:
    engine = make_engine(run_ahead=0)
    reached = with_layers(engine, {2: "a"})
    engine.add_request("a", "first prompt", GREEDY)
    engine.add_request("b", "second prompt", GREEDY)
    found = engine.step()
    assert reached == [10]
    assert {delta.request_id for delta in found} == {"a", "b"}
    engine.abort("a")
    assert found[1].token_ids + tuple(tokens_of(run_all(engine)["b", 0])) == tuple(solo("second prompt", GREEDY)[0])
    assert_at_rest(engine)


def test_step_that_all_clients_leave_stops_at_the_last() -> None:
    engine = make_engine(run_ahead=0)
    reached = with_layers(engine, {2: "a", 7: "b"})
    for name in "ab":
        engine.add_request(name, f"prompt of {name}", SamplingParams(n=2, temperature=0.0, max_tokens=3))
    engine.step()
    assert reached == [7]
    engine.abort_all()
    assert_at_rest(engine)


def test_hang_ups_know_the_latest_of_a_place() -> None:
    gone = HangUps()
    assert gone.has_all(())
    assert not gone.has_all((0,))
    gone.add((0, 5))
    assert gone.has_all((0, 5))
    assert not gone.has_all((0, 5, 6))
    gone.add((5 + NUM_PLACES,))
    assert not gone.has_all((5,))
    assert gone.has_all((5 + NUM_PLACES,))

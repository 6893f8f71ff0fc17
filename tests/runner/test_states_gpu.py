"""Gated delta nets inside graphs, on the fused decode path: the bits of its kernels one by one, states included, and near the ordinary way."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.request.sampling_params import SamplingParams
from holdfast.request.sequence import LiveStep
from holdfast.runner.build import BuiltRunner
from runner.gpu_traffic import CheckedStates, Known, build_dummy, in_a_row, recorded

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
PAGES = 24
LENGTHS = (1, 63, 64, 65, 130, 7, 200, 128)
"""Tokens of prompts, around the ends of chunks."""
SIZES = (1, 8, 3, 1, 5, 2, 7, 4)
"""Sequences of each decode step."""
MODES = [
    pytest.param(name, quantization, id=f"{name}, {quantization}")
    for name in ("states_wide", "states_experts")
    for quantization in ("none", "fp8", "int8")
]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., BuiltRunner]]:
    """build(name, **options) -> a runner of a tiny model; all are released in the end."""
    made: list[BuiltRunner] = []

    def build_one(name: str, **options: Any) -> BuiltRunner:
        made.append(build_dummy(tmp_path, name, **options))
        return made[-1]

    yield build_one
    for built in made:
        built.release()


def run_steps(built: BuiltRunner) -> list[torch.Tensor]:
    """Prompts one by one, then decode steps of changing company: the logits of the latter."""
    runner, known = built.runner, []
    grows = [in_a_row(runner.groups, place * PAGES) for place in range(len(LENGTHS))]
    for place, length in enumerate(LENGTHS):
        one = Known(place, length, length + len(SIZES), 1000, GREEDY)
        one.sequence.slot = place
        runner.execute(LiveStep((one.schedule(length, grows[place]),)))
        known.append(one)
    with recorded(built) as logits:
        for size in SIZES:
            items = [known[place].schedule(1, grows[place]) for place in range(size)]
            runner.execute(LiveStep(tuple(items)))
    return logits


@pytest.mark.parametrize(("name", "quantization"), MODES)
def test_states_graph_replay_equals_eager_kernels_to_the_bit(build, name, quantization):
    built = build(name, quantization=quantization)
    runner: Any = built.runner
    assert runner.model.fused is not None, runner.model.fused_decode_declined()
    states = list(runner.backend.states._states._arena.tensors.values())
    checked = CheckedStates(built, states)
    logits = run_steps(built)
    assert {(size, True) for size in (1, 2, 4, 8)} <= set(checked.sizes)
    assert all(bool(rows.isfinite().all()) for rows in logits)
    assert all(bool(state.any()) for state in states), "no state has changed"


@pytest.mark.parametrize(("name", "quantization"), MODES)
def test_states_fused_logits_are_near_unfused(build, name, quantization):
    """Products of other sizes and orders round otherwise, and such a model amplifies that: the median counts.

    Another rounding may choose another code, or another expert.
    """
    built = build(name, quantization=quantization, enforce_eager=True)
    fused, runner = run_steps(built), built.runner
    assert runner.model.fused is not None, runner.model.fused_decode_declined()
    built.release()
    ordinary = build(name, quantization=quantization, enforce_eager=True)
    ordinary.runner.model.fused = None
    share = 0.1 if quantization == "fp8" else 0.05
    for mine, theirs in zip(fused, run_steps(ordinary), strict=True):
        assert float((mine - theirs).abs().median()) < share * float(theirs.std())

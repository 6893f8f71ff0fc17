"""Graphs of pipeline stages in lock-step threads: all stages replay the same ones, and answers are those of eager stages and of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.test_pipeline_ranks import BY_COMPANY, pipeline, run_alone
from holdfast.engine.core import EngineCore
from holdfast.engine.messages import CoreRequest
from holdfast.request.sampling_params import SamplingParams
from models.staged_runners import StagedRanks, cuts_of, find_model
from runner.rank_runs import Built
from runner.stand_in_graphs import SeenGraphs, capture_all, use_stand_ins

DECODE, MIXED, LOGIT_ROWS = (1, 4), (16, 40), 4
WARM_ROWS = (1, 17)


GREEDY = SamplingParams(temperature=0.0)
ALONE = [
    CoreRequest(1000, tuple(range(3, 58)), GREEDY, 1, 3),
    CoreRequest(1001, (5, 9, 7), replace(GREEDY, prompt_logprobs=1), 1, 4, use_prefix_cache=False),
    CoreRequest(1002, (8,), GREEDY, 1, 2),
]
"""One after the other: a prompt whose first chunk fits a graph and chooses nothing, one whose every row is wanted, one token."""


def make_graphs() -> SeenGraphs:
    return SeenGraphs(DECODE, MIXED, LOGIT_ROWS)


def run_each(core: EngineCore) -> list[tuple[tuple[int, ...], int]]:
    """Tokens of those above, and how many of their prompts' tokens have log-probabilities."""
    found = []
    for request in ALONE:
        core.submit([request])
        tokens, num_prompt = (), 0
        while core.has_unfinished:
            for output in core.step().outputs:
                tokens, num_prompt = tokens + tuple(output.token_ids), num_prompt + len(output.prompt_logprobs)
        found.append((tokens, num_prompt))
    return found


def capture_on(ranks: StagedRanks) -> dict[int, SeenGraphs]:
    """Graphs on every rank, by rank."""
    made: dict[int, SeenGraphs] = {}

    def capture(built: Built) -> None:
        graphs = made[built.mesh.rank] = make_graphs()
        capture_all(built.runner, graphs, WARM_ROWS)
        assert len(graphs) == len(DECODE) + len(MIXED)

    ranks.run(capture)
    return made


@pytest.mark.parametrize(
    ("family", "num_stages", "tensor_size"),
    [
        pytest.param("llama", 2, 1, marks=pytest.mark.slow),
        ("gpt_oss", 3, 1),
        ("llama_tied", 2, 2),
        pytest.param("gemma3", 3, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 3, 1, marks=pytest.mark.slow),
        ("v4_flash", 3, 1),
        pytest.param("v4_pro", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_answers_from_graphs_are_those_of_eager_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_stages: int, tensor_size: int
) -> None:
    """Greedy and random rows, penalties, log-probabilities of tokens and of prompts, chunks of prompts beside decoding rows."""
    use_stand_ins(monkeypatch)
    path = find_model(tmp_path, family)
    expected = run_alone(path)
    with pipeline(path, cuts_of(family, num_stages), tensor_size) as found:
        made = capture_on(found.ranks)
        assert all(built.runner.graphs is made[built.mesh.rank] for built in found.ranks.built)
        answers = found.run()
        assert found.framed.most_in_flight == num_stages
    first, *others = (made[rank].replayed for rank in sorted(made))
    assert all(other == first for other in others), "a step that one stage replays all of them replay"
    kinds = {is_decode for _, is_decode in first}
    assert kinds == {True, False}
    if family in BY_COMPANY:
        # Torch multiplies latents by other sums in steps of other rows, and steps of a pipeline have fewer of them.
        assert {number: own[0] for number, own in answers.items()} == {
            number: own[0] for number, own in expected.items()
        }
    else:
        assert answers == expected


def test_steps_that_no_graph_takes_are_eager_in_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses nothing, and what wants the logits of a prompt; the rest comes from graphs."""
    use_stand_ins(monkeypatch)
    path, found = find_model(tmp_path, "llama"), []
    for has_graphs in (False, True):
        with pipeline(path, cuts_of("llama", 2)) as one:
            made = capture_on(one.ranks) if has_graphs else {}
            found.append(one.run(run_each))
            replayed = [graphs.replayed for graphs in made.values()]
    assert found[1] == found[0]
    assert [num_prompt for _, num_prompt in found[0]] == [0, 2, 0]
    assert replayed[0] == replayed[1] == [(16, False), *[(1, True)] * 2, *[(1, True)] * 3, *[(1, True)] * 2]

"""Graphs of pipeline stages in lock-step threads: all stages replay the same ones, and answers are those of eager stages and of one process."""

from pathlib import Path

import pytest

from engine.test_pipeline_ranks import pipeline, run_alone
from models.staged_runners import cuts_of, find_model
from runner.rank_runs import Built
from runner.stand_in_graphs import SeenGraphs, capture_all, use_stand_ins

DECODE, MIXED, LOGIT_ROWS = (1, 2, 4), (8, 16, 32), 4
WARM_ROWS = (1, 2, 17)


def make_graphs() -> SeenGraphs:
    return SeenGraphs(DECODE, MIXED, LOGIT_ROWS)


@pytest.mark.parametrize(
    ("family", "num_stages", "tensor_size"),
    [
        ("llama", 2, 1),
        ("gpt_oss", 3, 1),
        ("llama_tied", 2, 2),
        pytest.param("gemma3", 3, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 3, 1, marks=pytest.mark.slow),
    ],
)
def test_answers_from_graphs_are_those_of_eager_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, num_stages: int, tensor_size: int
) -> None:
    """Greedy and random rows, penalties, log-probabilities of tokens and of prompts, chunks of prompts beside decoding rows."""
    use_stand_ins(monkeypatch)
    path, made = find_model(tmp_path, family), {}
    expected = run_alone(path)

    def capture(built: Built) -> None:
        graphs = made[built.mesh.rank] = make_graphs()
        capture_all(built.runner, graphs, WARM_ROWS)
        assert len(graphs) == len(DECODE) + len(MIXED)

    with pipeline(path, cuts_of(family, num_stages), tensor_size) as found:
        found.ranks.run(capture)
        assert all(built.runner.graphs is made[built.mesh.rank] for built in found.ranks.built)
        answers = found.run()
        assert found.framed.most_in_flight == num_stages
    first, *others = (made[rank].replayed for rank in sorted(made))
    assert all(other == first for other in others), "a step that one stage replays all of them replay"
    kinds = {is_decode for _, is_decode in first}
    assert kinds == {True, False}
    if family == "deepseek_v3":
        # Torch multiplies latents by other sums in steps of other rows, and steps of a pipeline have fewer of them.
        assert {number: own[0] for number, own in answers.items()} == {
            number: own[0] for number, own in expected.items()
        }
    else:
        assert answers == expected

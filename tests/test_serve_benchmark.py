"""The arithmetic of benchmarks/serve.py: rows of a comparison, and what the server costs."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from holdfast.cli.bench_client import Reply
from holdfast.cli.bench_load import Figures, Fit

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
serve = import_module("serve")


def figures(seconds: float, first: float, cpu_seconds: float = 0.0) -> Figures:
    """One answer of 10 tokens."""
    return Figures.of([Reply(0.0, seconds, [first, seconds], 5, 10, "length")], cpu_seconds)


def test_rows_of_a_comparison() -> None:
    rounds = {
        "holdfast": [figures(2.0, 0.1), figures(4.0, 0.1)],
        "transformers": [figures(10.0, 0.3), figures(10.0, 0.5)],
    }
    rate, first = serve.comparison_rows(8, rounds)
    assert (rate["measure"], rate["values"]) == ("output, 8 clients", {"holdfast": 3.75, "transformers": 1.0})
    assert rate["ratios"] == {"transformers": 3.75}
    assert (first["values"], first["ratios"]) == ({"holdfast": 100.0, "transformers": 400.0}, {"transformers": 4.0})
    assert serve.comparison_rows(1, rounds)[0]["measure"] == "output, 1 client"


def test_cost_row_has_cost_of_server() -> None:
    row = serve.cost_row([figures(11.0, 1.0, 0.5), figures(12.0, 1.0, 1.0)], [10.0, 10.0], [(10.5, 10.0), (10.7, 10.0)])
    assert row["values"] == {
        "client's CPU time taken off": pytest.approx(7.5),
        "as it is": pytest.approx(15.0),
        "by best runs, client's CPU time taken off": pytest.approx(5.0),
        "by best runs, as it is": pytest.approx(10.0),
        "processor time of both processes": pytest.approx(6.0),
    }


def test_serve_load_rounds_have_distinct_prompts() -> None:
    one, two = (serve.load(serve.Shape(), 8, Fit(), seed) for seed in (1, 2))
    assert len(one) == 8
    assert not {str(work.messages) for work in one} & {str(work.messages) for work in two}
    assert len(serve.load(serve.Shape(), 1, Fit(), 0)) == 4

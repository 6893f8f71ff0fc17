"""`holdfast bench`: figures, ratios, records, and what is refused."""

import json
from pathlib import Path

import pytest

from cli.cli_models import Here
from holdfast.cli import bench_command
from holdfast.cli.bench_cases import Case, Timing

SMALL = ("--prefill", "24,40", "--batch", "1,3", "--input-len", "8", "--output-len", "6", "--repeats", "2")


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_latency_against_transformers(here: Here, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    ended = here("bench", "latency", tiny, *SMALL, "--against", "transformers", "--json", file)
    assert ended.code == 0, ended
    title, heading, *rows = ended.out.splitlines()
    assert (
        title == f"{tiny.name}, float32, {json.loads(file.read_text())['num_threads']} threads, median of 2, tokens/s"
    )
    assert heading.split() == ["holdfast", "transformers", "against", "transformers", "best"]
    assert [row.partition("  ")[0] for row in rows] == [
        "prefill, 24 tokens",
        "prefill, 40 tokens",
        "decode, batch 1",
        "decode, batch 3",
    ]
    assert all("x  " in row for row in rows)
    made = json.loads(file.read_text(), parse_constant=refuse)
    assert made["greedy_tokens_agree"] is True
    for result in made["results"]:
        ours, theirs = result["values"]["holdfast"], result["values"]["transformers"]
        assert result["ratios"]["transformers"] == pytest.approx(ours / theirs, rel=0.02)
        assert [len(runs) for runs in result["runs"].values()] == [2, 2]
    assert made["command"].startswith("holdfast bench latency")
    assert "\x1b" not in ended.err


def test_throughput_alone_as_json_and_its_memory_as_a_page(here: Here, tiny: Path, tmp_path: Path) -> None:
    options = ("--num-prompts", "5", "--input-len", "4-20", "--output-len", "2-9", "--repeats", "1")
    ended = here("bench", "throughput", tiny, *options, "--json", "-", "--memory-report", tmp_path / "memory.html")
    assert ended.code == 0, ended
    assert (tmp_path / "memory.html").read_text().startswith("<!DOCTYPE html>")
    made = json.loads(ended.out, parse_constant=refuse)
    assert made["results"][0]["measure"] == "throughput, 5 requests"
    assert made["results"][0]["values"]["holdfast"] > 0
    assert "throughput, 5 requests" in ended.err


def test_throughput_against_transformers(here: Here, tiny: Path) -> None:
    options = (
        "--num-prompts",
        "5",
        "--input-len",
        "4-20",
        "--output-len",
        "2-9",
        "--repeats",
        "1",
        "--peer-batch",
        "2",
    )
    ended = here("bench", "throughput", tiny, *options, "--against", "transformers")
    assert ended.code == 0, ended
    assert "x  " in ended.out


def test_other_tokens_print_no_speed_up(here: Here, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    from holdfast.cli.bench_transformers import TransformersContestant

    def run(self: object, case: Case) -> Timing:
        return Timing(tuple((0,) * num_new for num_new in case.num_new), 1.0, 2.0)

    monkeypatch.setattr(TransformersContestant, "run", run)
    file = tmp_path / "record.json"
    ended = here("bench", "latency", tiny, *SMALL, "--against", "transformers", "--json", file)
    assert ended.code == 1
    assert ended.out == ""
    assert not file.exists()
    assert "greedy tokens differ in 'prefill, 24 tokens'" in ended.err.splitlines()[-1]


def test_prompts_are_computed_every_time(here: Here, tiny: Path, monkeypatch) -> None:
    opened = []
    monkeypatch.setattr(bench_command, "open_visibly", lambda *asked: opened.append(open_visibly(*asked)) or opened[-1])
    from holdfast.cli.opening import open_visibly

    assert here("bench", "latency", tiny, *SMALL).code == 0
    stats = opened[0].engine.stats()
    assert stats.num_prefix_hit_tokens == 0
    assert stats.num_prompt_tokens == 3 * (24 + 40 + 8 + 3 * 8)


REFUSED = [
    (("--prefill", "0"), "--prefill '0' was asked"),
    (("--batch", "x"), "--batch 'x' was asked"),
    (("--output-len", "1"), "ask for 2 or more"),
    (("--repeats", "0"), "--repeats '0' was asked"),
    (("--repeats", "1,2"), "one number"),
    (("--threads", "100000"), "cores are here"),
    (("--against", "vllm"), "transformers is known"),
    (("--against", "transformers", "--load-format", "dummy"), "made-up weights"),
    (("--enable-prefix-caching",), "not measured"),
    (("--json", "no/such/folder/record.json"), "its folder does not exist"),
    (("--memory-report", "no/such/folder/memory.html"), "its folder does not exist"),
    (("--dtype", "int3"), "the choices are"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_what_is_refused(here: Here, tiny: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("bench", "latency", tiny, *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert words in ended.err


def test_a_model_that_is_not_there(here: Here, tmp_path: Path) -> None:
    ended = here("bench", "throughput", tmp_path / "nothing")
    assert ended.code == 1
    assert ended.err.count("\n") == 1

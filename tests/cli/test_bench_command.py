"""`holdfast bench`: cases, rates and turns; the same tokens from every engine; figures, ratios, records, and what is refused."""

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import doc_tables
from cli.cli_models import Here
from engine.fakes import assert_at_rest, make_engine, solo
from error_codes import raises_code
from holdfast.cli import bench, bench_record, bench_transformers
from holdfast.cli.bench_cases import (
    Case,
    HoldfastContestant,
    Result,
    Timing,
    check_agreement,
    latency_cases,
    race,
    rate,
    throughput_case,
)
from holdfast.cli.bench_record import commit, cpu_name, make_record, versions
from holdfast.cli.bench_transformers import TransformersContestant, check_installed, open_transformers
from holdfast.cli.opened_model import open_quietly
from holdfast.cli.terminal import dumps
from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, HoldfastError, UnsupportedModelError
from holdfast.loading.model_files import open_model
from holdfast.request.sampling_params import SamplingParams
from loading.test_gguf_model import write_model as write_gguf

IDS = range(100)


class Fake:
    """An engine that says its name's length, again and again, and notes when it ran."""

    def __init__(self, name: str, log: list[str], wrong_at: int | None = None) -> None:
        self.name, self.log, self.wrong_at = name, log, wrong_at

    def run(self, case: Case) -> Timing:
        self.log.append(f"{self.name} {case.measure}")
        tokens = [[7] * num_new for num_new in case.num_new]
        if self.wrong_at is not None:
            tokens[-1][self.wrong_at] = 8
        return Timing(tuple(map(tuple, tokens)), 0.5, 2.5)


def test_latency_cases_cover_prefill_and_decode() -> None:
    cases = latency_cases([16, 32], [1, 4], 8, 5, random.Random(0), IDS)
    assert [case.measure for case in cases] == [
        "prefill, 16 tokens",
        "prefill, 32 tokens",
        "decode, batch 1",
        "decode, batch 4",
    ]
    assert [[len(prompt) for prompt in case.prompts] for case in cases] == [[16], [32], [8], [8] * 4]
    assert [case.longest for case in cases] == [17, 33, 13, 13]
    assert len({prompt for case in cases for prompt in case.prompts}) == 7, "no prompt is another's prefix"


def test_latency_cases_follow_from_seed() -> None:
    assert latency_cases([16], [2], 8, 5, random.Random(1), IDS) == latency_cases(
        [16], [2], 8, 5, random.Random(1), IDS
    )
    assert latency_cases([16], [2], 8, 5, random.Random(1), IDS) != latency_cases(
        [16], [2], 8, 5, random.Random(2), IDS
    )


def test_throughput_case_lengths_stay_in_ranges() -> None:
    case = throughput_case(200, (3, 9), (1, 4), random.Random(0), IDS)
    assert {len(prompt) for prompt in case.prompts} == set(range(3, 10))
    assert set(case.num_new) == {1, 2, 3, 4}


@pytest.mark.parametrize(("kind", "expected"), [("prefill", 60.0), ("decode", 9.0), ("throughput", 8.0)])
def test_rate_is_tokens_per_second_of_case(kind, expected: float) -> None:
    case = Case("", kind, ((1,) * 10, (1,) * 20), (10, 10))
    assert rate(case, Timing(((), ()), 0.5, 2.5)) == expected


def test_engines_take_turns() -> None:
    log: list[str] = []
    cases = latency_cases([4], [1], 4, 3, random.Random(0), IDS)
    results = race(cases, [Fake("ours", log), Fake("theirs", log)], 2, lambda words: None)
    assert log == [f"{name} {case.measure}" for case in cases for _ in range(2) for name in ("ours", "theirs")]
    assert [len(result.rates["theirs"]) for result in results] == [2, 2]


def test_check_agreement_warms_up_every_engine_on_every_case() -> None:
    log: list[str] = []
    reported: list[str] = []
    cases = latency_cases([4], [1], 4, 3, random.Random(0), IDS)
    check_agreement(cases, [Fake("ours", log), Fake("theirs", log)], reported.append)
    assert log == [f"{name} {case.measure}" for case in cases for name in ("ours", "theirs")]
    assert len(reported) == 4


@pytest.mark.parametrize("wrong_at", [0, 4])
def test_check_agreement_refuses_different_tokens(wrong_at: int) -> None:
    cases = latency_cases([], [3], 4, 5, random.Random(0), IDS)
    with pytest.raises(HoldfastError, match=rf"prompt 2, from token {wrong_at} on \(ours \[7.*theirs \[8"):
        check_agreement(cases, [Fake("ours", []), Fake("theirs", [], wrong_at)], lambda words: None)


def test_third_engine_with_other_tokens_is_named() -> None:
    cases = latency_cases([], [3], 4, 5, random.Random(0), IDS)
    engines = [Fake("ours", []), Fake("theirs", []), Fake("another", [], 2)]
    with raises_code("bench.tokens_differ", peer="another", place=2):
        check_agreement(cases, engines, lambda words: None)


def test_check_agreement_accepts_single_engine() -> None:
    check_agreement(latency_cases([4], [], 4, 5, random.Random(0), IDS), [Fake("ours", [])], lambda words: None)


def test_result_gives_median_and_best() -> None:
    result = Result(throughput_case(1, (1, 1), (1, 1), random.Random(0), IDS), {"ours": [1.0, 9.0, 3.0]})
    assert (result.median("ours"), result.best("ours")) == (3.0, 9.0)


def test_tokens_come_back_in_the_order_of_the_prompts() -> None:
    engine = make_engine(enable_prefix_caching=False, max_num_seqs=3)
    case = throughput_case(9, (2, 40), (1, 20), random.Random(0), range(97, 122))
    timing = HoldfastContestant(engine).run(case)
    for prompt, num_new, token_ids in zip(case.prompts, case.num_new, timing.token_ids, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
        assert list(token_ids) == solo({"prompt_token_ids": list(prompt)}, params)[0]
    assert 0 < timing.first_seconds <= timing.total_seconds
    assert_at_rest(engine)


def test_holdfast_contestant_second_run_gives_same_tokens() -> None:
    contestant = HoldfastContestant(make_engine(enable_prefix_caching=False))
    case = Case("decode", "decode", ((97, 98), (99, 100)), (4, 4))
    assert contestant.run(case).token_ids == contestant.run(case).token_ids


def test_holdfast_contestant_failed_request_raises() -> None:
    engine = make_engine()
    engine.runner.script["ab"] = [-1]  # type: ignore[attr-defined]
    with raises_code("bench.request_failed"):
        HoldfastContestant(engine).run(Case("decode", "decode", ((97, 98),), (4,)))


CASE = Case("decode, batch 1", "decode", ((1, 2),), (3,))


RESULTS = [Result(CASE, {"holdfast": [30.0, 20.0, 40.0], "transformers": [10.0, 20.0, 15.0]})]


def test_bench_record_renders_as_table(tmp_path: Path) -> None:
    made = make_record(
        "A-Model",
        "float32, 2 threads",
        [result.as_dict() for result in RESULTS],
        ["holdfast", "bench", "latency"],
        num_threads=2,
    )
    (tmp_path / "record.json").write_text(dumps(made))
    assert "| decode, batch 1 | tokens/s | 30 | 15 | 2.00x |" in doc_tables.tables(tmp_path)
    read = json.loads((tmp_path / "record.json").read_text())
    assert read["results"][0]["best"] == {"holdfast": 40.0, "transformers": 20.0}
    assert read["results"][0]["runs"]["holdfast"] == [30.0, 20.0, 40.0]
    assert read["results"][0]["ratios"] == {"transformers": 2.0}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", read["date"])
    assert read["command"] == "holdfast bench latency"
    assert read["num_threads"] == 2
    assert {"python", "torch", "holdfast", "transformers"} <= set(read["versions"])
    assert read["cpu"] in read["machine"]


def test_result_of_one_engine_has_no_ratios() -> None:
    assert Result(CASE, {"holdfast": [1.0]}).ratios() == {}


def test_cpu_name_is_not_empty() -> None:
    assert cpu_name()


def test_cpu_name_without_system_sources_is_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*requested: object, **options: object) -> None:
        raise FileNotFoundError("there is nothing here")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_name()
    assert commit() is None


def test_commit_marks_dirty_tree_with_plus(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ls-files": "bench_record.py", "rev-parse": "abc", "status": " M x"}
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 0, said[command[3]], "")
    )
    assert commit() == "abc+"
    said["status"] = ""
    assert commit() == "abc"


def test_packages_that_are_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_record, "PACKAGES", ("torch", "no-such-package-at-all"))
    assert list(versions()) == ["python", "torch"]


def contestants(
    model: str | None, max_batch: int, tokenizer: str | None = None
) -> tuple[HoldfastContestant, TransformersContestant]:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128}
    config = EngineConfig(model=model, tokenizer=tokenizer, dtype="float32", enable_prefix_caching=False, **sizes)
    opened = open_model(model, "auto")
    theirs = TransformersContestant(open_transformers(opened, "float32", "cpu"), max_batch)
    opened.source.close()
    return HoldfastContestant(open_quietly(config).engine), theirs


def test_contestants_folder_gives_same_tokens(tiny: Path) -> None:
    ours, theirs = contestants(str(tiny), max_batch=2)
    prompts = tuple(tuple(range(3 + start, 12 + 3 * start)) for start in range(5))
    case = Case("throughput", "throughput", prompts, (9, 1, 4, 12, 7))
    timing = theirs.run(case)
    assert timing.token_ids == ours.run(case).token_ids
    assert tuple(map(len, timing.token_ids)) == case.num_new
    assert 0 < timing.first_seconds <= timing.total_seconds


@pytest.mark.parametrize("is_tiny", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tiny", "default model"])
def test_contestants_gguf_file_gives_same_tokens(is_tiny: bool, tmp_path: Path) -> None:
    if is_tiny:
        write_gguf(tmp_path / "tiny.gguf", "llama")
        ours, theirs = contestants(str(tmp_path / "tiny.gguf"), max_batch=2, tokenizer="none")
    else:
        ours, theirs = contestants(None, max_batch=2)
    prompts = (
        ((54, 75, 28, 149, 31), (28, 98, 9, 12, 7)) if is_tiny else ((504, 3575, 282, 4649, 314), (28, 198, 9, 1012, 7))
    )
    case = Case("decode", "decode", prompts, (6, 6))
    assert theirs.run(case).token_ids == ours.run(case).token_ids


def test_transformers_contestant_ignores_end_tokens(tiny: Path) -> None:
    _, theirs = contestants(str(tiny), max_batch=8)
    assert [len(ids) for ids in theirs.run(Case("decode", "decode", ((5, 6),), (100,))).token_ids] == [100]


def test_copy_weights_names_unknown_tensors() -> None:
    opened = open_model(None, "auto")
    with raises_code("bench.other_tensors", UnsupportedModelError, names=["model.extra"]):
        bench_transformers.copy_weights(opened, dict.fromkeys([*opened.source.entries, "model.extra"]))  # type: ignore[arg-type]
    with raises_code("bench.other_tensors", UnsupportedModelError):
        bench_transformers.copy_weights(opened, {})
    opened.source.close()


def test_check_installed_without_transformers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_transformers, "find_spec", lambda name: None)
    with raises_code("bench.no_transformers", ConfigError):
        check_installed()


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


def test_bench_different_tokens_print_no_speed_up(here: Here, tiny: Path, tmp_path: Path, monkeypatch) -> None:
    from holdfast.cli.bench_transformers import TransformersContestant

    def run(self: object, case: Case) -> Timing:
        return Timing(tuple((0,) * num_new for num_new in case.num_new), 1.0, 2.0)

    monkeypatch.setattr(TransformersContestant, "run", run)
    file = tmp_path / "record.json"
    ended = here("bench", "latency", tiny, *SMALL, "--against", "transformers", "--json", file)
    assert ended.code == 1
    assert ended.out == ""
    assert not file.exists()
    assert "Greedy tokens differ from transformers in 'prefill, 24 tokens'" in ended.err.splitlines()[-1]


def test_prompts_are_computed_every_time(here: Here, tiny: Path, monkeypatch) -> None:
    opened = []
    monkeypatch.setattr(bench, "open_visibly", lambda *args: opened.append(open_visibly(*args)) or opened[-1])
    from holdfast.cli.opened_model import open_visibly

    assert here("bench", "latency", tiny, *SMALL).code == 0
    stats = opened[0].engine.stats()
    assert stats.num_prefix_hit_tokens == 0
    assert stats.num_prompt_tokens == 3 * (24 + 40 + 8 + 3 * 8)


REFUSED = [
    (("--prefill", "0"), "--prefill"),
    (("--batch", "x"), "--batch"),
    (("--output-len", "1"), "value.out_of_range"),
    (("--repeats", "0"), "--repeats"),
    (("--repeats", "1,2"), "value.out_of_range"),
    (("--threads", "100000"), "value.out_of_range"),
    (("--against", "vllm"), "value.not_one_of"),
    (("--against", "transformers", "--load-format", "dummy"), "bench.dummy_weights"),
    (("--enable-prefix-caching",), "bench.prefix_caching"),
    (("--json", "no/such/folder/record.json"), "its folder does not exist"),
    (("--memory-report", "no/such/folder/memory.html"), "its folder does not exist"),
    (("--dtype", "int3"), "dtype"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[" ".join(options) for options, _ in REFUSED])
def test_bench_latency_refuses_bad_options(here: Here, tiny: Path, options: tuple[str, ...], words: str) -> None:
    ended = here("bench", "latency", tiny, *options)
    assert ended.code == 2, ended
    assert ended.out == ""
    assert ended.err.count("\n") == 1, ended
    assert ended.refuses(words), ended


def test_bench_throughput_missing_model_prints_one_line(here: Here, tmp_path: Path) -> None:
    ended = here("bench", "throughput", tmp_path / "nothing")
    assert ended.code == 1
    assert ended.err.count("\n") == 1


def test_bench_of_experts_counts_distinct_ones(tmp_path: Path, capsys) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = bench.LatencyOptions(
        model=str(tmp_path),
        input_len="8",
        output_len="4",
        against=None,
        repeats="1",
        threads=None,
        json_file=str(tmp_path / "record.json"),
        prefill="16",
        batch="1,4",
    )
    bench.bench_latency(options, {"load_format": "dummy", "tokenizer": "none", "device": "cpu"})
    results = json.loads((tmp_path / "record.json").read_text())["results"]
    one, four = (result["distinct_experts"] for result in results[1:])
    assert one == {"batch": 1, "measured": 2, "uniform": 2}
    assert (four["batch"], four["uniform"]) == (4, 5.47)
    assert 2 <= four["measured"] <= 8
    assert "2.0, uniform 2.0" in capsys.readouterr().out

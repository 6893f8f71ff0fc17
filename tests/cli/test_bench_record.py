"""The record: what the README's tables need, and what a person needs to run it again."""

import json
import re
from pathlib import Path

import pytest

import readme_tables
from holdfast.cli import bench_record
from holdfast.cli.bench_cases import Case, Result
from holdfast.cli.bench_record import commit, cpu_name, num_cores, ratios, record, versions
from holdfast.cli.strict_json import dumps

CASE = Case("decode, batch 1", "decode", ((1, 2),), (3,))
RESULTS = [Result(CASE, {"holdfast": [30.0, 20.0, 40.0], "transformers": [10.0, 20.0, 15.0]})]


def test_a_record_becomes_a_table(tmp_path: Path) -> None:
    made = record(RESULTS, "A-Model", "float32, 2 threads", ["holdfast", "bench", "latency"], {"num_threads": 2})
    (tmp_path / "record.json").write_text(dumps(made))
    assert "| decode, batch 1 | tokens/s | 30 | 15 | 2.00x |" in readme_tables.tables(tmp_path)
    read = json.loads((tmp_path / "record.json").read_text())
    assert read["results"][0]["best"] == {"holdfast": 40.0, "transformers": 20.0}
    assert read["results"][0]["runs"]["holdfast"] == [30.0, 20.0, 40.0]
    assert read["results"][0]["ratios"] == {"transformers": 2.0}
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", read["date"])
    assert read["command"] == "holdfast bench latency"
    assert read["num_threads"] == 2
    assert {"python", "torch", "holdfast", "transformers"} <= set(read["versions"])
    assert read["cpu"] in read["machine"]


def test_one_engine_has_no_ratio() -> None:
    assert ratios(Result(CASE, {"holdfast": [1.0]})) == {}


def test_the_machine_has_a_name() -> None:
    assert cpu_name()
    assert num_cores() >= 1


def test_a_machine_that_tells_nothing_still_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_record, "_output", lambda *command: None)
    monkeypatch.setattr(bench_record, "_lines", lambda path: [])
    assert cpu_name()
    assert commit() is None


def test_the_commit_is_that_of_this_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ls-files": "bench_record.py", "rev-parse": "abc", "status": " M x"}
    monkeypatch.setattr(bench_record, "_output", lambda *command: said[command[3]])
    assert commit() == "abc+"
    said["status"] = ""
    assert commit() == "abc"


def test_packages_that_are_missing_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_record, "PACKAGES", ("torch", "no-such-package-at-all"))
    assert list(versions()) == ["python", "torch"]

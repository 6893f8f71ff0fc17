"""The record: strict JSON that the README's tables can be made of, with every figure in it."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

import readme_tables
from cli.eval_qualities import BROKEN, FEW, FP8, view
from holdfast.cli.eval_record import quality_record
from holdfast.cli.eval_table import KV_PAGES
from holdfast.cli.strict_json import dumps
from holdfast.engine.kv_quality import Quality


def written(*qualities: Quality) -> dict:
    made = quality_record(view(*qualities), ["holdfast", "eval", "kv", "--text", "a b.txt"], {"more": 1})
    return json.loads(dumps(made, indent=1))


def test_every_figure_is_kept() -> None:
    record = written(FP8, FEW)
    assert [result["measure"] for result in record["results"]] == ["float32", "fp8", "turboquant_3bit_nc"]
    names = {field.name for field in fields(Quality)} - {"name", "size_bytes"} | {"bytes_per_token"}
    for result in record["results"]:
        assert names <= result.keys()
    fp8 = record["results"][1]
    assert fp8["values"] == {"mean_kl": 0.000512}
    assert fp8["kl_by_place"] == [0.0004, 0.0006]
    assert fp8["perplexity_change"] == pytest.approx(0.01)
    assert record["results"][2]["ratio_to_16_bit"] == 5.12
    assert (record["window"], record["num_windows"], record["reference"], record["more"]) == (1024, 2, "float32", 1)
    assert record["command"] == "holdfast eval kv --text 'a b.txt'"
    assert {"date", "machine", "versions", "commit", "cpu", "num_cores", "text"} <= record.keys()


def test_a_record_can_be_read_by_the_readme(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps(written(FP8)))
    assert readme_tables.read_record(path)["section"] == KV_PAGES.section
    assert readme_tables.records(tmp_path, None) == [], "it would be taken for a race of engines"


def test_what_is_no_number_is_null() -> None:
    result = written(BROKEN)["results"][1]
    assert result["mean_kl"] is result["perplexity"] is result["kl_by_place"][1] is None
    assert result["num_broken"] == 1023

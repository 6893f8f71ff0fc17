"""The benchmark of weight schemes, once in a small way: a record that the README's tables can be made of."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

import doc_tables
from cli.cli_models import make_model

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
weight_quality = import_module("weight_quality")


@pytest.mark.slow
def test_weight_quality_tiny_run_writes_record_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", intermediate_size=128)
    text, out = tmp_path / "text.txt", tmp_path / "records"
    text.write_text("It is not known who first thought of it, but there it was. " * 20)
    options = ["--model", str(model), "--text", str(text), "--tokens", "80", "--window", "40", "--commit", "abc"]
    options += ["--schemes", "fp8,mxfp4"]
    argv = ["weight_quality.py", *options, "--out", str(out), "--html", str(tmp_path / "page.html")]
    monkeypatch.setattr(sys, "argv", argv)
    weight_quality.main()
    (path,) = out.iterdir()
    assert path.name.endswith("-weight-quality.json")
    record = json.loads(path.read_text())
    assert record["section"] == "weight-quality"
    assert record["commit"] == "abc"
    command = "python benchmarks/weight_quality.py --tokens 80 --window 40 --schemes fp8,mxfp4 --embeddings head"
    assert record["command"] == f"{command} --model model --text text.txt"
    names = [result["measure"] for result in record["results"]]
    assert names == ["float32", "fp8", "mxfp4"]
    shown = doc_tables.section_tables(out, "weight-quality")
    assert "| mxfp4 |" in shown
    assert "against 16 bit" in shown
    assert (tmp_path / "page.html").is_file()

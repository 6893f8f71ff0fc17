"""The scripts behind the two commands: what they refuse, and in which words."""

import json
import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import check_at_home
import check_no_cuda
import check_python
import check_vllm_examples
import compare_commits
import doc_tables
import home_files
import home_table
import pip_install
import probe_numbers

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvidia-cublas-cu12", "12.1"),
        ("nvidia_cudnn_cu13", "9.1"),
        ("NVIDIA-nccl-cu12", "2.2"),
        ("cuda-bindings", "13.0"),
        ("triton", "3.7.1"),
        ("pytorch-triton-rocm", "3.1"),
        ("torch", "2.13.0+cu130"),
    ],
)
def test_packages_for_a_gpu_are_found(name: str, version: str) -> None:
    assert check_no_cuda.cuda_packages({name: version, "numpy": "2.4.6"}, set()) == [f"{name} {version}"]


def test_packages_for_any_machine_are_left_alone() -> None:
    packages = {"torch": "2.13.0+cpu", "tokenizers": "0.23.3", "accuracy": "1.0", "triton": "3.7.1"}
    assert check_no_cuda.cuda_packages(packages, {"triton"}) == []


def test_planned_packages_reads_pip_report_and_requirements(tmp_path: Path) -> None:
    requires = [
        "filelock",
        "nvidia-nccl-cu12==2.2; platform_system == 'Linux'",
        "opt-einsum>=3.3; extra == 'opt-einsum'",
    ]
    metadata = {"name": "torch", "version": "2.13.0", "requires_dist": requires}
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"install": [{"metadata": metadata}]}))
    planned = check_no_cuda.planned_packages(report)
    assert planned == {"torch": "2.13.0", "filelock": "", "nvidia-nccl-cu12": ""}
    assert check_no_cuda.cuda_packages(planned, set()) == ["nvidia-nccl-cu12"]


def check_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_sign: str) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"install": [{"metadata": {"name": "nvidia-nccl-cu12", "version": "2"}}]}))
    monkeypatch.setattr(check_no_cuda, "GPU_SIGNS", (gpu_sign,))
    monkeypatch.setattr("sys.argv", ["check_no_cuda.py", "--planned", str(report)])
    check_no_cuda.main()


def test_cuda_on_a_machine_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"1 CUDA packages would be installed .*nvidia-nccl-cu12 2"):
        check_plan(tmp_path, monkeypatch, gpu_sign=str(tmp_path / "no such device"))


def test_cuda_on_a_machine_with_a_gpu_is_welcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    check_plan(tmp_path, monkeypatch, gpu_sign=str(tmp_path))
    assert "for the GPU of this machine" in capsys.readouterr().out


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 6, 9), (3, 10, 14)], ids=str)
def test_check_python_old_version_is_refused(version: tuple[int, int, int]) -> None:
    words = check_python.complaint(version, has_venv=True)
    assert f"this is Python {version[0]}.{version[1]}" in words
    assert words.count(";") == 2


def test_check_python_without_venv_is_refused() -> None:
    assert "python3.12-venv" in check_python.complaint((3, 12, 1), has_venv=False)
    assert check_python.complaint((3, 11, 0), has_venv=True) == ""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_lists_every_target_that_a_person_types() -> None:
    shown = make().stdout
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert all(re.search(rf"make {target}\s", shown) for target in phony.split()), shown


def test_make_demo_old_python_stops_before_venv(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'error: too old' >&2\nexit 1\n")
    python.chmod(0o755)
    done = make("demo", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "error: too old" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_run_script_ends_with_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert lines[-1] == "make test"


RECORD = {
    "date": "2026-01-31",
    "machine": "2 ARM cores",
    "model": "A-Model",
    "settings": "float32",
    "results": [
        {"measure": "prefill 512", "unit": "tokens/s", "values": {"holdfast": 300.4, "transformers": 200.0}},
        {"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 40.06}},
    ],
}


def test_records_become_tables_newest_first(tmp_path: Path) -> None:
    assert doc_tables.tables(tmp_path) == "No record is committed yet."
    (tmp_path / "a.json").write_text(json.dumps(RECORD))
    (tmp_path / "b.json").write_text(json.dumps({**RECORD, "date": "2026-02-01"}))
    text = doc_tables.tables(tmp_path)
    assert text.index("2026-02-01") < text.index("2026-01-31")
    assert "| prefill 512 | tokens/s | 300 | 200 | 1.50x |" in text
    assert "| decode, batch 1 | tokens/s | 40.1 |  |  |" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "every row has as many cells"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({**RECORD, "results": []}), json.dumps({**RECORD, "machine": ""})]
)
def test_doc_tables_broken_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(SystemExit, match=r"broken\.json"):
        doc_tables.tables(tmp_path)


@pytest.mark.parametrize("path", doc_tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_records_that_are_committed(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    assert document == doc_tables.written(document, doc_tables.RECORDS), "run: make docs"


@pytest.mark.parametrize("section", doc_tables.MAKERS)
def test_doc_tables_section_stands_in_one_document(section: str) -> None:
    begin, _ = doc_tables.section_marks(section)
    assert sum(begin in path.read_text(encoding="utf-8") for path in doc_tables.DOCUMENTS) == 1


def test_doc_tables_committed_records_have_section() -> None:
    found = {json.loads(path.read_text()).get("section", "records") for path in doc_tables.RECORDS.glob("*.json")}
    assert found <= doc_tables.MAKERS.keys()


def test_older_records_use_the_names_of_today(tmp_path: Path) -> None:
    old = {**RECORD, "settings": "made-up weights", "note": "It took the kernels for few rows."}
    (tmp_path / "a.json").write_text(json.dumps({**old, "section": "gpu-decode"}))
    text = doc_tables.section_tables(tmp_path, "gpu-decode")
    assert "A-Model, dummy weights, on 2 ARM cores" in text
    assert text.endswith("It took the GEMV path.")


def test_highlights_are_of_the_newest_record_that_has_both_sides(tmp_path: Path) -> None:
    assert doc_tables.highlight_table(tmp_path) == doc_tables.NO_RECORD
    race = {"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 40.06, "transformers": 20.0}}
    (tmp_path / "a.json").write_text(json.dumps({**RECORD, "results": [race], "model": "A-Model.gguf"}))
    (tmp_path / "b.json").write_text(json.dumps({**RECORD, "date": "2026-02-01"}))
    planned = [
        {"measure": name, "unit": "GiB", "values": {"planned": 1.0}, "total_percent": percent}
        for name, percent in (("one engine", 0.25), ("another", -0.5))
    ]
    (tmp_path / "c.json").write_text(json.dumps({**RECORD, "section": "gpu-memory", "results": planned}))
    _, _, *rows = doc_tables.highlight_table(tmp_path).splitlines()
    assert rows == [
        "| A-Model, decode, one stream | 2 ARM cores | 40.1 tokens/s | 2.00x transformers, in the same run |",
        "| memory, measured against planned | 2 ARM cores | within 0.50 % | the worst of 2 engines |",
    ]


def test_tables_are_written_between_their_marks() -> None:
    once = doc_tables.replaced("a\n<b>\nold\n<e>\nz\n", "new", "<b>", "<e>")
    assert once == "a\n<b>\nnew\n<e>\nz\n"
    assert doc_tables.replaced(once, "new", "<b>", "<e>") == once
    for broken in ("no marks", "<b>\n", "<e>\n<b>\n", "<b>\n<b>\n<e>\n"):
        with pytest.raises(SystemExit, match="put the marks back"):
            doc_tables.replaced(broken, "new", "<b>", "<e>")


MIB = 2**20
LOADED = {
    "measure": "A-Model, fp8",
    "unit": "GB/s",
    "values": {"holdfast": 31.42},
    "seconds": [1.8, 0.53, 0.5],
    "predicted_peak": 1000 * MIB,
    "peak": {"allocated": 1000 * MIB + 512, "reserved": 1002 * MIB, "used": 1004 * MIB},
    "over_final": {"allocated": 32 * MIB, "reserved": 34 * MIB, "used": 36 * MIB},
    "host": {"first load": {"RssAnon": 300 * MIB}, "second load": {"RssAnon": 192 * MIB}},
}
FAILED = {"measure": "B-Model, fp8", "unit": "GB/s", "values": {"holdfast": 0.0}, "error": "no room"}
DECODED = {
    "measure": "A-Model, batch 1",
    "unit": "tokens/s",
    "values": {"fp8": 110.04, "bfloat16": 62.51},
    "milliseconds": {"fp8": 9.09, "bfloat16": 16.0},
    "percent_of_roof": {"fp8": 84.2, "bfloat16": 91.7},
    "against_unquantized": {"fp8": 1.76},
}
QUALITY = {
    "measure": "mxfp4",
    "unit": "perplexity",
    "values": {"perplexity": 25.0},
    "weight_bytes": 85 * MIB,
    "ratio_to_16_bit": 3.164,
    "perplexity": 25.0,
}


def shown_section(folder: Path, section: str, *results: dict[str, object]) -> list[list[str]]:
    """The cells of a section's table, line by line; its title first."""
    (folder / "a.json").write_text(json.dumps({**RECORD, "section": section, "results": results}))
    lines = doc_tables.section_tables(folder, section).splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_loads_are_shown_with_their_peaks_and_failures(tmp_path: Path) -> None:
    titles, loaded, failed = shown_section(tmp_path, "gpu-load", LOADED, FAILED)
    assert dict(zip(titles, loaded, strict=True)) == {
        "": "A-Model, fp8",
        "GB/s": "31.4",
        "seconds": "0.5",
        "peak over final, MiB: allocated": "32",
        "reserved": "34",
        "used": "36",
        "peak against the plan, MiB": "+0.000",
        "host, MiB": "192",
    }
    assert failed == ["B-Model, fp8", "no room", *[""] * 6]


def test_first_load_stands_for_an_unwatched_second(tmp_path: Path) -> None:
    host = {"first load": {"RssAnon": 300 * MIB}, "second load": None}
    titles, loaded = shown_section(tmp_path, "gpu-load", {**LOADED, "host": host, "read_share": 0.5128})
    row = dict(zip(titles, loaded, strict=True))
    assert (row["host, MiB"], row["bytes read against the source"]) == ("300", "0.513")


def test_speeds_of_both_weights_stand_side_by_side(tmp_path: Path) -> None:
    titles, decoded = shown_section(tmp_path, "gpu-quantized", DECODED)
    row = dict(zip(titles, decoded, strict=True))
    assert (row["fp8, tokens/s"], row["bfloat16, tokens/s"]) == ("110", "62.5")
    assert (row["fp8, % of the roof"], row["fp8 against bfloat16"]) == ("84.2", "1.76")
    assert not any("as routed" in title for title in titles), "a column without a figure is left out"


def test_doc_tables_scheme_is_shown_with_size(tmp_path: Path) -> None:
    titles, scheme = shown_section(tmp_path, "weight-quality", QUALITY)
    assert dict(zip(titles, scheme, strict=True)) == {
        "": "mxfp4",
        "MiB": "85",
        "against 16 bit": "3.16",
        "perplexity": "25",
    }


@pytest.mark.parametrize("section", doc_tables.SECTIONS)
def test_section_tables_without_record_say_so(tmp_path: Path, section: str) -> None:
    assert doc_tables.section_tables(tmp_path, section) == doc_tables.NO_RECORD
    begin, end = doc_tables.section_marks(section)
    document = f"{begin}\nold\n{end}\n"
    assert "old" not in doc_tables.written(document, tmp_path)


def test_pip_install_keeps_errors_and_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    noise = f"WARNING: Location 'somewhere' {pip_install.NOISE}."
    python.write_text(f'#!/bin/sh\necho "$@" >&2\necho "{noise}" >&2\necho "ERROR: no such thing" >&2\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr("sys.argv", ["pip_install.py", "-e", "."])
    assert pip_install.main() == 3
    assert capsys.readouterr().err.splitlines() == ["-m pip install -e .", "ERROR: no such thing"]


# --- two commits


PLANTED = """

_public = __getattr__


def __getattr__(name):
    found = _public(name)
    return found if name != "LLM" else type("Wrong", (found,), {"generate": _off_by_one_bit(found.generate)})


def _off_by_one_bit(generate):
    from dataclasses import replace
    from math import inf, nextafter

    calls = []

    def wrong(*prompts, **options):
        outputs = generate(*prompts, **options)
        calls.append(prompts)
        if len(calls) == 1:
            return outputs
        place = outputs[-1].outputs[0].logprobs[-1]
        token = next(iter(place))
        place[token] = replace(place[token], logprob=nextafter(place[token].logprob, inf))
        return outputs

    return wrong
"""
CASES = ("--cases", "plans/OPT-125m, h200, as it is", "--cases", "numbers/llama, none, auto")


@pytest.mark.slow
def test_compare_commits_finds_planted_difference(tmp_path: Path, capsys) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src")
    package = tmp_path / "src" / "holdfast" / "__init__.py"
    package.write_text(package.read_text() + PLANTED)
    first, wrong = (compare_commits.probe(tree, CASES) for tree in (ROOT, tmp_path))
    assert sorted(first) == ["numbers/llama, none, auto", "plans/OPT-125m, h200, as it is"]
    assert json.loads(first["plans/OPT-125m, h200, as it is"]["stdout"])["fits"]
    (found,) = compare_commits.differences(first, wrong)
    assert found.case == "numbers/llama, none, auto"
    assert re.fullmatch(r"/again, in a mix\[5\]/outputs\[0\]/logprobs\[6\]\[0\]\[1\]", found.place)
    assert float.fromhex(found.old.strip("'")) != float.fromhex(found.new.strip("'"))
    compare_commits.show(first, wrong, [found])
    assert re.search(r"numbers +1 +1 +0 +0\nplans +1 +0 +0 +0", capsys.readouterr().out)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_probe_numbers_covers_pairs_of_family_scheme_and_format(device: str) -> None:
    cases = probe_numbers.list_cases(device)
    assert len({case.name for case in cases}) == len(cases)
    probed = {(case.model, case.options.get("quantization"), case.options.get("kv_cache_dtype")) for case in cases}
    axes = list(probe_numbers.FAMILIES), probe_numbers.SCHEMES, probe_numbers.KV_FORMATS
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert set(product(axes[one], axes[other])) <= {(case[one], case[other]) for case in probed}


def test_parts_are_all_cases_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_numbers, "probe_case", lambda case, folder, device: {"of": case.name})
    monkeypatch.setattr(probe_numbers, "probe_default_model", lambda device: {})
    parts = [list(probe_numbers.probe_numbers("cpu", (index, 7), lambda case: True)) for index in range(1, 8)]
    names = [name for part in parts for name, _ in part]
    (whole,) = [list(probe_numbers.probe_numbers("cpu", (1, 1), lambda case: True))]
    assert names == [name for name, _ in whole]
    assert len(names) >= len(probe_numbers.list_cases("cpu"))


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, None),
        ({"a": [1, 2]}, {"a": [1, 3]}, ("/a[1]", "2", "3")),
        ({"a": [1, 2]}, {"a": [1]}, ("/a", "[1, 2]", "[1]")),
        ({"a": 1}, {"a": True}, ("/a", "1", "True")),
        ({"a": "x\ny"}, {"a": "x\nz"}, ("/a:2", "'y'", "'z'")),
        ({"a": 1}, {"b": 1}, ("/a", "1", "'(nothing)'")),
        ("0x1p+0", "-0x1p+0", ("", "'0x1p+0'", "'-0x1p+0'")),
    ],
)
def test_first_difference_gives_its_place(old: object, new: object, place: tuple[str, str, str] | None) -> None:
    assert compare_commits.first_difference(old, new) == place


def test_without_sentences_keeps_numbers_keys_and_names() -> None:
    plan = {"stdout": '{"kv pages": {"num_bytes": 3, "reason": "two words", "owner": "weights"}}', "code": 0}
    assert compare_commits.without_sentences(plan) == {
        "stdout": {"kv pages": {"num_bytes": 3, "reason": "(a sentence)", "owner": "weights"}},
        "code": 0,
    }


def test_differences_list_case_of_one_tree() -> None:
    found = compare_commits.differences({"a": {}, "b": {}}, {"b": {}, "c": {}})
    assert [(one.case, one.old, one.new) for one in found] == [("a", "there", "(nothing)"), ("c", "(nothing)", "there")]


def test_compare_reports_case_failing_in_both_trees(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def raising() -> dict[str, object]:
        raise ZeroDivisionError("by chance")

    failed = probe_numbers.outcome(raising)
    monkeypatch.setattr(compare_commits, "probe", lambda *given: {"numbers/a": failed})
    options = SimpleNamespace(speed=False, what="numbers", device="cpu", cases=[], jobs=1, words=False)
    assert compare_commits.compare(ROOT, ROOT, options) == 1
    assert "failed: numbers/a\n  ZeroDivisionError: by chance" in capsys.readouterr().out


def test_merged_refuses_package_of_another_tree(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="was probed in place of"):
        compare_commits.merged([{"package": "/elsewhere/src/holdfast/__init__.py"}], tmp_path)


def test_speeds_are_medians_of_rounds_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    rates = {old: iter([100.0, 50.0, 90.0]), new: iter([99.0, 98.0, 45.0])}
    order: list[str] = []

    def bench(tree: Path, options: object) -> dict[str, float]:
        order.append(tree.name)
        return {"decode, batch 1": next(rates[tree])}

    monkeypatch.setattr(compare_commits, "bench", bench)
    assert compare_commits.compare_speed(old, new, 3) == {"decode, batch 1": pytest.approx(98 / 90)}
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert "1.089" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "-1/2"])
def test_parse_part_refuses_malformed_text(text: str) -> None:
    with pytest.raises(Exception, match="a part is written"):
        probe_numbers.parse_part(text)


def test_home_table_paragraphs_have_checks_that_can_fail() -> None:
    assert {check.paragraph for check in home_table.CHECKS} == set(home_table.PARAGRAPHS)
    said = [(check.paragraph, check.says) for check in home_table.CHECKS]
    assert len(set(said)) == len(said), "a promise stands twice"
    for check in home_table.CHECKS:
        assert check.timeout <= 60, check.says
        assert check.wants or check.refuses or check.number or check.codes != (0,), (
            f"{check.says}: its output is not checked"
        )
        check_at_home.missing_for(check)
        for pattern in (*check.wants, *check.refuses, *([check.number[0]] if check.number else [])):
            re.compile(pattern)
        syntax = subprocess.run(["bash", "-n", "-c", check.command], capture_output=True, text=True, check=False)
        assert syntax.returncode == 0, syntax.stderr
    assert sum(check.is_shown for check in home_table.CHECKS) == 10


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (check_at_home.Ended(0, "total 5 tokens\n", 1.0), ""),
        (check_at_home.Ended(1, "total 5 tokens\n", 1.0), "exit code 1, and not 0: total 5"),
        (check_at_home.Ended(None, "", 1.0), "it did not end within 60 s"),
        (check_at_home.Ended(0, "Traceback (most\ntotal 5 tokens", 1.0), "a traceback"),
        (check_at_home.Ended(0, "nothing", 1.0), "no '^total' in: nothing"),
        (check_at_home.Ended(0, "total 5 tokens\nerror", 1.0), "there is 'error'"),
        (check_at_home.Ended(0, "total 50 tokens\n", 1.0), "is 50.0, and not from 1 to 9"),
        (check_at_home.Ended(0, "total 5 tokens\n", 9.0), "it took 9.00 s, and not at most 2 s"),
    ],
)
def test_wrong_command_is_explained(ended: check_at_home.Ended, words: str) -> None:
    check = home_table.Check("plan", "a sum", "true", ("^total",), ("error",), number=(r"total (\d+)", 1, 9), seconds=2)
    wrong = check_at_home.complaint(check, ended, patience=1)
    assert words in wrong
    assert bool(wrong) == bool(words)


def test_home_runs_command_once_and_transcripts_hide_paths(tmp_path: Path) -> None:
    home = check_at_home.Home(tmp_path)
    first = home.run("date +%s%N; pwd", 20)
    assert home.run("date +%s%N; pwd", 20) is first
    assert check_at_home.shown(home, first.output)[1] == "~"
    check = home_table.Check("plan", "a folder", "date +%s%N; pwd")
    assert str(tmp_path) not in check_at_home.transcripts(home, [check])
    assert home.run("sleep 30", 0.2).code is None
    assert all(len(line) <= 80 for line in check_at_home.wrapped("word " * 100))


def test_write_raw_copies_gguf_byte_for_byte(tmp_path: Path) -> None:
    tensors = [
        home_files.RawTensor(name, 1, (8).to_bytes(8, "little") + bytes(4), bytes(range(32)))
        for name in (b"token_embd.weight", b"output_norm.weight")
    ]
    keys = home_files.split_keys(0, 2, 2)
    home_files.write_raw(tmp_path / "a.gguf", 3, keys, tensors)
    assert home_files.read_raw(tmp_path / "a.gguf") == (3, keys, tensors)


def test_check_vllm_examples_rewrites_package_model_and_port() -> None:
    text = """from vllm.utils import x
    import vllm
client = "http://localhost:8000/v1"
llm = LLM(model="facebook/opt-125m", dtype='text/plain')
words = "vLLM is from vllm"
"""
    assert (
        check_vllm_examples.rewrite(text, "/m.gguf", 9)
        == """from holdfast.utils import x
    import holdfast
client = "http://127.0.0.1:9/v1"
llm = LLM(model='/m.gguf', dtype='text/plain')
words = "vLLM is from vllm"
"""
    )


@pytest.mark.parametrize(
    ("code", "error", "outcome"),
    [
        (0, "a warning", "runs"),
        (None, "", "ran out of time"),
        (1, "Traceback\n  x\nholdfast.errors.ConfigError: a is wrong. Do c.\n", "stops: a is wrong. Do c."),
        (
            1,
            "Traceback\nAttributeError: 'X' object has no attribute 'y'\n",
            "breaks: AttributeError: 'X' object has no",
        ),
        (3, "", "breaks: exit code 3"),
    ],
)
def test_check_vllm_examples_tells_a_sentence_from_a_break(code: int | None, error: str, outcome: str) -> None:
    assert check_vllm_examples.outcome(code, error).startswith(outcome)


def test_check_vllm_examples_shortens_the_context_of_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    header = b"GGUF" + check_vllm_examples.CONTEXT_KEY + (4).to_bytes(4, "little")
    source.write_bytes(header + (8192).to_bytes(4, "little") + b"rest")
    made = check_vllm_examples.with_context(source, tmp_path, 256)
    assert made.read_bytes() == header + (256).to_bytes(4, "little") + b"rest"
    assert source.read_bytes().endswith((8192).to_bytes(4, "little") + b"rest")


def test_transcript_of_a_redrawn_line_shows_what_stayed() -> None:
    class Home:
        def private(self, text: str) -> str:
            return text

    output = "\rStarting  0 s\r\rImporting  1 s\r\r              \r\x1b[1mYES\x1b[0m\nab\rc\n"
    assert check_at_home.shown(Home(), output) == ["YES", "cb"]  # type: ignore[arg-type]

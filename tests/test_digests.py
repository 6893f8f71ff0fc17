"""Digests of what records measured: every kernel has one, a changed kernel marks its records, and a moved file none."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest

import digests
import doc_tables

ROOT = Path(__file__).parent.parent
RECORDS = digests.read_records()
CASES = ("layer norm", "routing of V4", "routing of V4 by a table", "rows placed")
ENGINES = {
    "bf16": {"model": "Qwen3-32B", "options": {}},
    "gpt": {"model": "gpt-oss-20b", "options": {}},
    "v4": {"model": "DeepSeek-V4-Flash", "options": {"kv_cache_dtype": "fp8"}},
    "k8v4": {"model": "Qwen3-32B", "options": {"kv_cache_dtype": "turboquant_k8v4"}},
}


def table() -> digests.Table:
    found = digests.read_table()
    assert found is not None
    return found


def test_table_has_every_case_of_every_group() -> None:
    assert table()["cases"].keys() == set(digests.grouped_cases())
    used = {name for names in digests.GROUPS["sections"].values() for name in names}
    used |= {name for rule in digests.GROUPS["engines"] for name in rule["groups"]}
    assert used == digests.GROUPS["groups"].keys()


def test_table_has_plans_of_every_record_with_engines() -> None:
    engines = {name: record.get("engine_settings", {}).keys() for name, record in RECORDS.items()}
    assert {name: labels for name, labels in engines.items() if labels} == {
        name: plans.keys() for name, plans in table()["plans"].items()
    }


@pytest.mark.parametrize("name", RECORDS)
def test_record_has_digests_or_is_from_before(name: str) -> None:
    assert ("digests" in RECORDS[name]) != (name in digests.GROUPS["before_digests"]), "run: make digests STAMP=1"


def test_before_digests_lists_existing_records() -> None:
    assert set(digests.GROUPS["before_digests"]) <= RECORDS.keys()


def stamped(section: str, *labels: str) -> dict:
    """A record that measured the kernels and plans of the table."""
    record = {"section": section, "engine_settings": {label: ENGINES[label] for label in labels}}
    groups = digests.groups_of(record)
    assert groups, section
    kernels = {name: digests.group_digest(name, WHOLE["cases"]) for name in groups}
    return {**record, "digests": {"kernels": kernels, "plans": dict.fromkeys(labels, "1")}}


WHOLE = {
    "cases": {case: {"key": case, "ptx": case} for case in digests.grouped_cases()},
    "plans": {"bf16": {"bf16": "1"}, "v4": {"v4": "1"}, "both": {"gpt": "1", "bf16": "1"}, "k8v4": {"k8v4": "1"}},
}
STAMPED = {
    "bf16": stamped("gpu-quantized", "bf16"),
    "v4": stamped("gpu-latent", "v4"),
    "both": stamped("gpu-groups", "gpt", "bf16"),
    "k8v4": stamped("gpu-quantized-kv", "k8v4"),
    "load": stamped("gpu-load"),
}


def states(found: digests.Table) -> dict[str, str]:
    return {name: digests.state_of(name, record, found).mark for name, record in STAMPED.items()}


@pytest.mark.parametrize(
    ("case", "marked"),
    [
        ("routing of V4 by a table", {"v4"}),
        ("rows placed", {"load"}),
        ("attention D128", {"bf16", "both", "k8v4"}),
        ("packed experts of 2880 by 2880, 30 rows", {"both"}),
        ("quantized 8/4 D128", {"k8v4"}),
        ("layer norm", set()),
    ],
)
def test_changed_kernel_marks_exactly_its_records(case: str, marked: set[str]) -> None:
    assert set(states(WHOLE).values()) == {""}
    found = deepcopy(WHOLE)
    found["cases"][case] = {"key": "new", "ptx": "new"}
    assert {name for name, mark in states(found).items() if mark == "†"} == marked
    found["cases"][case] = {"key": "new", "ptx": None}
    assert {name for name, mark in states(found).items() if mark == "‡"} == marked


def test_changed_plan_marks_its_record_alone() -> None:
    found = deepcopy(WHOLE)
    found["plans"]["both"]["gpt"] = "2"
    assert {name for name, mark in states(found).items() if mark} == {"both"}


def test_record_without_digest_says_so(tmp_path: Path) -> None:
    result = {"measure": "decode, batch 1", "unit": "tokens/s", "values": {"holdfast": 62.5}}
    record = {
        "date": "2026-01-31",
        "machine": "one GPU",
        "model": "M",
        "settings": "s",
        "commit": "abc",
        "results": [result],
    }
    records = tmp_path / "records"
    records.mkdir()
    (records / "bf16.json").write_text(json.dumps({**record, "section": "gpu-decode"}))
    (tmp_path / "digests.json").write_text(json.dumps(WHOLE))
    shown = doc_tables.section_tables(records, "gpu-decode")
    assert shown.startswith("M, s, on one GPU, 2026-01-31, commit abc, without a digest:\n")
    changed = {**STAMPED["bf16"], "section": "gpu-decode", "digests": {"kernels": {"rows": "old"}, "plans": {}}}
    (records / "bf16.json").write_text(json.dumps({**record, **changed}))
    shown = doc_tables.section_tables(records, "gpu-decode")
    assert shown.startswith("M, s, on one GPU, 2026-01-31 †:\n")
    assert shown.endswith("\n\n† measured before the kernels or the plan changed.")


def test_highlights_mark_old_figures(tmp_path: Path) -> None:
    rows = [
        {"measure": name, "unit": "tokens/s", "values": {"holdfast": 5.0}, "percent_of_roof": 50.0}
        for name in ("gpt-oss-20b, decode, batch 1", "gpt-oss-20b, decode, batch 64")
    ]
    record = {
        "date": "2026-01-31",
        "machine": "one GPU",
        "model": "M",
        "settings": "s",
        "commit": "abc",
        "results": rows,
    }
    records = tmp_path / "records"
    records.mkdir()
    (tmp_path / "digests.json").write_text(json.dumps({**WHOLE, "plans": {}}))
    (records / "both.json").write_text(json.dumps({**STAMPED["both"], **record}))
    header, _, row = doc_tables.highlight_table(records).splitlines()
    assert header == "| | on | Holdfast | † measured before the kernels or the plan changed |"
    assert row.endswith("| one GPU | 5 / 5 tokens/s † | 50 / 50 % of the memory roof |")


def test_stamp_reads_each_commit_once(tmp_path: Path, monkeypatch, capsys) -> None:
    trees = []
    records = {name: {key: value for key, value in STAMPED[name].items() if key != "digests"} for name in STAMPED}
    records = {name: {**record, "commit": "a" if name == "load" else "b"} for name, record in records.items()}
    records["k8v4"] = {**STAMPED["k8v4"], "commit": "c"}

    @contextmanager
    def checked_out(commit: str) -> Iterator[Path]:
        trees.append(commit)
        yield tmp_path

    monkeypatch.setattr(digests, "RECORDS", tmp_path)
    monkeypatch.setattr(digests, "read_records", lambda: records)
    monkeypatch.setattr(digests, "read_table", lambda: {**WHOLE, "triton": "1"})
    monkeypatch.setattr(digests.compare_ptx, "checked_out", checked_out)
    monkeypatch.setattr(digests, "case_digests", lambda tree, cases, known, jobs: {case: known[case] for case in cases})
    monkeypatch.setattr(
        digests, "record_plans", lambda tree, kept: {name: WHOLE["plans"].get(name, {}) for name in kept}
    )
    digests.stamp(1)
    assert sorted(trees) == ["a", "b"]
    assert "load: 1 groups of kernels and 0 plans of a" in capsys.readouterr().out
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["bf16", "both", "load", "v4"]
    for name in ("bf16", "both", "load", "v4"):
        written = json.loads((tmp_path / f"{name}.json").read_text())["digests"]
        assert written == {**STAMPED[name]["digests"], "triton": "1"}


# --- keys of sources


def tree_with(folder: Path, change: Callable[[Path], None]) -> Path:
    for part in ("src", "tests/kernels"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    change(folder)
    return folder


def replace(root: Path, file: str, old: str, new: str) -> None:
    path = root / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file}: {old}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_keys_change_with_a_kernel_but_not_with_a_moved_file(tmp_path: Path) -> None:
    def change(root: Path) -> None:
        home = root / "src" / "holdfast" / "kernels"
        (home / "fp8.py").rename(home / "load" / "moved.py")
        for path in root.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "kernels.fp8 import" in text:
                path.write_text(text.replace("kernels.fp8 import", "kernels.load.moved import"), encoding="utf-8")
        path = home / "load" / "moved.py"
        path.write_text(f'"""Moved."""\n\n# down by two lines\n{path.read_text(encoding="utf-8")}', encoding="utf-8")
        replace(root, "src/holdfast/kernels/moe/hash_routing.py", PLANTED, f"{PLANTED} + 1")

    before = digests.query(ROOT, "keys", list(CASES))
    after = digests.query(tree_with(tmp_path, change), "keys", list(CASES))
    assert {case for case in CASES if before[case] != after[case]} == {"routing of V4 by a table"}


PLANTED = "i_row = tl.program_id(0).to(tl.int64)"


@pytest.mark.slow
def test_table_is_that_of_this_tree() -> None:
    keys = digests.query(ROOT, "keys", digests.grouped_cases())
    assert {case: entry["key"] for case, entry in table()["cases"].items()} == keys, "run: make digests"
    assert all(entry["ptx"] for entry in table()["cases"].values()), "run: make digests"
    assert digests.record_plans(ROOT, RECORDS) == table()["plans"], "run: make digests"

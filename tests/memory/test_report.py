"""The memory table: planned, held and measured, owner by owner."""

import json

import pytest

from holdfast.memory.ledger import Ledger
from holdfast.memory.planner import Term, plan_memory
from holdfast.memory.report import memory_report

TERMS = (
    Term("weights", 1000, "two tensors"),
    Term("inputs/ids", 16, "ids"),
    Term("inputs/slots", 16, "slots"),
    Term("logits", 64, "temporary"),
)


def ledger_for_plan() -> Ledger:
    ledger = Ledger()
    ledger.record("weights/a", 600, "a")
    ledger.record("weights/b", 400, "b")
    ledger.record("inputs/ids", 16, "ids")
    ledger.record("inputs/slots", 16, "slots")
    ledger.record("kv pages/0.k", 5 * 32, "pages")
    return ledger


def report():
    plan = plan_memory(2000, "a test", TERMS, page_bytes=32, min_pages=1, max_pages=5)
    return memory_report(plan, ledger_for_plan(), page_tokens=4, max_model_len=20)


def test_rows_hold_the_plan_against_the_ledger():
    rows = {row.owner: (row.planned_bytes, row.held_bytes) for row in report().rows}
    assert rows == {"weights": (1000, 1000), "inputs": (32, 32), "kv pages": (160, 160), "logits": (64, None)}


def test_rows_come_largest_first():
    assert [row.owner for row in report().rows] == ["weights", "kv pages", "logits", "inputs"]


def test_totals_and_tokens():
    made = report()
    assert made.planned_bytes == 1000 + 32 + 160 + 64
    assert made.held_bytes == 1000 + 32 + 160
    assert (made.kv_tokens, made.kv_bytes_per_token, made.max_model_len) == (20, 8, 20)


def test_bytes_without_a_plan_are_found():
    plan = plan_memory(2000, "a test", TERMS, page_bytes=32, min_pages=1, max_pages=5)
    ledger = ledger_for_plan()
    ledger.record("surprise/buffer", 1, "not in the plan")
    with pytest.raises(AssertionError, match="surprise"):
        memory_report(plan, ledger, page_tokens=4, max_model_len=20)


def test_report_as_dict_is_json():
    parsed = json.loads(json.dumps(report().as_dict()))
    assert parsed["held_bytes"] == 1192
    assert parsed["rows"][0]["owner"] == "weights"
    assert parsed["rows"][0]["phases"] == ["load", "capture", "serve"]
    assert parsed["phase_bytes"] == {"load": 1096, "capture": 1256, "serve": 1256}
    assert parsed["measured_bytes"] is None
    assert parsed["unaccounted_bytes"] is None


PHASED = (
    Term("weights", 1000, "two tensors"),
    Term("inputs", 32, "buffers"),
    Term("staging", 300, "rows on their way", ("load",)),
    Term("kv pages/padding", 10, "alignment", ("capture", "serve")),
    Term("graphs/pool", 40, "what graphs keep", ("capture", "serve")),
    Term("graphs/recording", 50, "only while recording", ("capture",)),
)


def phased_report(measured_bytes=None):
    plan = plan_memory(2000, "a test", PHASED, page_bytes=32, min_pages=1, max_pages=5)
    ledger = Ledger()
    ledger.record("staging/rows", 280, "rows")
    ledger.release("staging/rows")
    ledger.record("weights/a", 1000, "a")
    ledger.record("kv pages/0.k", 168, "pages")
    return memory_report(plan, ledger, 4, 20, measured_bytes)


def test_report_released_owner_keeps_row_without_held_bytes():
    made = phased_report()
    rows = {row.owner: row for row in made.rows}
    staging = rows["staging"]
    assert (staging.planned_bytes, staging.held_bytes, staging.peak_bytes) == (300, None, 280)
    assert staging.phases == ("load",)
    assert made.planned_bytes == 1000 + 32 + 160 + 10 + 40 == made.phase_bytes["serve"]
    assert made.phase_bytes == {"load": 1332, "capture": 1292, "serve": 1242}
    assert [row.owner for row in made.rows] == ["weights", "staging", "kv pages", "graphs", "inputs"]


def test_report_row_has_planned_bytes_of_serve_phase():
    rows = {row.owner: row for row in phased_report().rows}
    assert (rows["graphs"].planned_bytes, rows["graphs"].phases) == (40, ("capture", "serve"))
    assert rows["kv pages"].planned_bytes == 5 * 32 + 10, "padding belongs to the pages"
    assert rows["kv pages"].reason.startswith("5 pages of 4 tokens")


def test_report_unaccounted_bytes_are_measured_minus_held():
    made = phased_report(measured_bytes=1200)
    assert made.held_bytes == 1168
    assert made.unaccounted_bytes == 32
    parsed = json.loads(json.dumps(made.as_dict()))
    assert (parsed["measured_bytes"], parsed["unaccounted_bytes"]) == (1200, 32)
    assert phased_report(measured_bytes=1000).unaccounted_bytes == -168

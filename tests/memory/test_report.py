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
    ledger.record("surprise/buffer", 1, "nobody planned it")
    with pytest.raises(AssertionError, match="surprise"):
        memory_report(plan, ledger, page_tokens=4, max_model_len=20)


def test_a_program_can_read_it():
    parsed = json.loads(json.dumps(report().as_dict()))
    assert parsed["held_bytes"] == 1192
    assert parsed["rows"][0]["owner"] == "weights"

"""One engine of each kind, in seconds: what `make test-changed` runs after the tests of a change."""

import json
from pathlib import Path

import pytest

from probe_numbers import Case, probe_case
from public_surface import run

CASES = (
    Case("llama", "llama", {}),
    Case("qwen3, quantized KV", "qwen3", {"kv_cache_dtype": "turboquant_4bit_nc", "quantization": "int8"}),
    Case("experts", "qwen3_moe", {"kv_cache_dtype": "fp8"}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_engine_with_cached_prompts_gives_equal_tokens(case: Case, tmp_path: Path) -> None:
    found = probe_case(case, tmp_path, "cpu")
    first = [answer["outputs"][0]["token_ids"] for answer in found["greedy"]]
    second = [answer["outputs"][0]["token_ids"] for answer in found["again, in a mix"]][::-1]
    params = [place % 3 for place in range(len(first))][::-1]
    assert all(ids for ids in first)
    assert [ids for ids, kind in zip(first, params, strict=True) if kind == 2] == [
        ids for ids, kind in zip(second, params, strict=True) if kind == 2
    ]


def test_plan_of_a_known_model_exits_with_zero() -> None:
    code, printed = run("plan", "Qwen/Qwen3-32B", "--gpu", "h200", "--json")
    assert code == 0
    assert json.loads(printed)

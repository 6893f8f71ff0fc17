"""Sweeps: the numbers of single plans, and bars that compare them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from cli.plan_wishes import wish
from holdfast.cli.plan_sweep import BAR_CELLS, EIGHTHS, Cell, bar, sweep, sweep_lines
from holdfast.quant.formats import DEFAULT_PROTECTED_LAYERS, KV_FORMATS
from holdfast.runner.planning.alternatives import in_scheme
from holdfast.runner.planning.plan_fit import Wish, find_fit, settle

ASKED = wish("Qwen3-8B", "rtx4090", max_num_seqs=64)
CELLS = sweep(ASKED)


def in_format(name: str) -> Wish:
    return ASKED._replace(config=replace(ASKED.config, kv_cache_dtype=name))


def test_every_cell_is_the_plan_of_its_formats() -> None:
    for cell in CELLS:
        alone = find_fit(in_scheme(in_format(cell.kv_cache_dtype), cell.quantization))
        assert cell.kv_tokens == alone.kv_tokens
        assert cell.kv_protected_layers == len(alone.resolved.protected.layers)
        assert cell.runs
    assert [cell for cell in CELLS if cell.is_asked] == [CELLS[0]]


def test_formats_go_from_the_asked_one_to_fewer_bytes() -> None:
    names = list(dict.fromkeys(cell.kv_cache_dtype for cell in CELLS))
    assert names[0] == "bfloat16"
    assert set(names) == {"bfloat16", *(name for name, value in KV_FORMATS.items() if value.is_coded)}
    sizes = [layout.bytes_per_token(resolved) for layout, resolved in (settle(in_format(name)) for name in names)]
    assert all(larger > smaller for larger, smaller in pairwise(sizes))
    assert {cell.quantization for cell in CELLS} == {"none", "fp8", "mxfp4"}


def test_what_was_asked_is_always_among_them() -> None:
    cells = sweep(wish("Qwen3-8B", "h200", quantization="int8", kv_cache_dtype="fp8"))
    assert [(cell.kv_cache_dtype, cell.quantization) for cell in cells if cell.is_asked] == [("fp8", "int8")]
    assert {cell.quantization for cell in cells if cell.runs} == {"none", "fp8", "mxfp4", "int8"}
    on_old = sweep(wish("Qwen3-8B", "a100-80g"))
    assert {cell.quantization for cell in on_old} == {"none", "int8", "mxfp4"}, "it has no products in fp8"
    assert not any(cell.runs for cell in sweep(wish("Qwen3-8B", "h200", tensor_parallel_size=2)))


def test_what_contradicts_another_option_is_left_out() -> None:
    """Protected layers in k8v4 are no wider than pages in k8v4."""
    cells = sweep(wish(kv_cache_dtype="fp8", kv_protected_layers=2, kv_protected_dtype="float32"))
    assert {cell.kv_protected_layers for cell in cells} == {2}
    narrow = sweep(
        wish(kv_cache_dtype="turboquant_k3v4_nc", kv_protected_layers=36, kv_protected_dtype="turboquant_k8v4")
    )
    names = {cell.kv_cache_dtype for cell in narrow}
    assert names == {"turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"}, "coded ones of equal size too"


def test_a_model_that_is_not_run_and_formats_that_it_does_not_take() -> None:
    cells = sweep(wish("DeepSeek-R1", "h200", tensor_parallel_size=8))
    assert not any(cell.runs for cell in cells)
    assert any(cell.kv_tokens for cell in cells)


def test_nothing_fits() -> None:
    cells = sweep(wish("DeepSeek-R1", "rtx3060"))
    assert {cell.kv_tokens for cell in cells} == {0}
    assert all("does not fit" in line.text for line in sweep_lines(cells, "a GPU")[2:])


def test_the_chart_has_a_bar_a_cell_and_a_name_a_format() -> None:
    title, heading, *lines = sweep_lines(CELLS, "NVIDIA H200")
    assert "NVIDIA H200" in title.text
    assert heading.text.split() == ["KV", "pages", "weights", "tokens"]
    assert len(lines) == len(CELLS)
    assert sum(line.text.startswith("bfloat16") for line in lines) == 1
    assert lines[0].text.endswith("asked")
    for cell, line in zip(CELLS[1:], lines[1:], strict=True):
        assert line.text.endswith("not in this version") == (line.style == "dim") == (not cell.runs)
    wider = [line.text for line in lines if "4 layers wider" in line.text]
    assert [text.split()[0] for text in wider] == [
        name for name in dict.fromkeys(cell.kv_cache_dtype for cell in CELLS) if DEFAULT_PROTECTED_LAYERS.get(name) == 4
    ]
    assert all(f"{cell.kv_tokens:,}" in line.text for cell, line in zip(CELLS, lines, strict=True))
    longest = max(range(len(CELLS)), key=lambda place: CELLS[place].kv_tokens)
    assert lines[longest].text.count(EIGHTHS[8]) == BAR_CELLS


@pytest.mark.parametrize(
    ("value", "cells"), [(0, ""), (1, "▏"), (500, "█" * 20), (512, "█" * 20 + "▌"), (1000, "█" * 40)]
)
def test_bars_count_eighths(value: int, cells: str) -> None:
    assert bar(value, 1000) == cells.ljust(BAR_CELLS)


def test_no_cells_are_no_chart() -> None:
    assert len(sweep_lines((), "a GPU")) == 2
    assert sweep_lines((Cell("bfloat16", "none", 0, True, True),), "a GPU")[2].text.split()[-1] == "asked"

"""Planes of every packed layout: their values equal the publisher's formula to the bit, and their bytes the scheme's."""

import pytest
import torch

from for_each import for_each
from holdfast.loading.packed import tiles
from holdfast.loading.packed.source import PackedSource
from holdfast.quant.packed_values import dequantize_rows
from holdfast.quant.packed_weight import PackedPart
from loading.packed.test_packed_source import CASES, NAME, packed, same
from loading.packed_reads import read_part


def values_of(part: PackedPart) -> torch.Tensor:
    return dequantize_rows(part, 0, (0, part.num_rows), torch.full(part.shape, 7.0))


def part_of(source: PackedSource, rows: tuple[int, int], columns: tuple[int, int]) -> PackedPart:
    scheme = source.entries[NAME].packed
    assert scheme is not None
    return read_part(source, NAME, scheme, rows, columns)


@for_each("case", CASES)
def test_planes_of_every_layout_equal_its_formula(case: str) -> None:
    source, made = packed(case, 40, 576)
    assert same(values_of(part_of(source, (0, 40), (0, 576))), made.weight), case


@for_each("case", CASES)
def test_planes_of_some_rows_and_whole_units_equal_the_formula(case: str) -> None:
    source, made = packed(case, 40, 768)
    scheme = source.entries[NAME].packed
    assert scheme is not None
    unit = scheme.unit_columns
    for rows, columns in (((3, 29), (0, 768)), ((8, 16), (384, 768)), ((39, 40), (256, 640))):
        if columns[0] % unit or columns[1] % unit:
            continue
        found = values_of(part_of(source, rows, columns))
        assert same(found, made.weight[slice(*rows), slice(*columns)]), f"{case}: {rows}, {columns}"


@for_each("case", [case for case in CASES if "awq" not in case])
def test_planes_of_odd_rows_and_columns_equal_the_formula(case: str) -> None:
    num_columns = 200 if "gptq" in case else 129 if case in ("int4-channel", "int8-rows", "fp8-block") else 192
    source, made = packed(case, 37, num_columns)
    assert same(values_of(part_of(source, (0, 37), (0, num_columns))), made.weight), case


@for_each("case", CASES)
def test_planes_hold_few_bytes_more_than_the_file(case: str) -> None:
    source, _ = packed(case, 64, 4096)
    scheme, entry = source.entries[NAME].packed, source.entries[NAME]
    assert scheme is not None
    held = sum(plane.num_bytes for plane in scheme.shaped((64, 4096)))
    by_row = case in ("fp8-block", "fp8-tensor", "int8-one")  # scales for several rows are kept by row
    assert held <= entry.num_bytes * (1.04 if by_row else 1.03), f"{case}: {held} for {entry.num_bytes}"


@pytest.mark.parametrize(("step", "tile"), [(32, 8), (96, 20)])
def test_planes_in_small_steps_are_equal(monkeypatch: pytest.MonkeyPatch, step: int, tile: int) -> None:
    monkeypatch.setattr(tiles, "STEP_ELEMENTS", step)
    monkeypatch.setattr(tiles, "SCALES_PER_TILE", tile)
    for case in ("awq", "gptq-v1", "gptq-order", "int4-asym", "int4-order", "nvfp4"):
        source, made = packed(case, 24, 192)
        assert same(values_of(part_of(source, (3, 21), (0, 192))), made.weight[3:21]), case

"""GGUF blocks to tiles and to planes: C equals the reference, keeps row orders, finds wrong scales, writes nothing else."""

import pytest
import torch

from holdfast.kernels.load import place_blocks as module
from holdfast.kernels.load.place_blocks import (
    SPLIT_TYPES,
    StoredRows,
    place_tiles,
    place_tiles_reference,
    split_rows,
    split_rows_reference,
)
from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.loading.gguf.dequantize import dequantize
from holdfast.loading.gguf.file import TYPES, GGMLType
from holdfast.quant.packed_schemes import BLOCK_SCHEMES
from holdfast.quant.packed_tiles import TILE_SCHEMES, TILE_TYPES
from holdfast.quant.tile_values import fill_tiles
from kernels.tile_cases import compiled_with, variants
from red_zones import RedZones

CPU = torch.device("cpu")
KINDS = {kind.name: kind for kind in TYPES.values()}
HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
    "NVFP4": (),
}
"""Places of float16 scales in a block; at its beginning if it is not here."""


def random_rows(title: str, num_rows: int, num_blocks: int) -> torch.Tensor:
    """Random bytes with finite scales, between red zones of 0xA5 that no read may reach unnoticed."""
    kind, generator = KINDS[title], torch.Generator().manual_seed(num_rows)
    raw = torch.randint(0, 256, (num_rows * num_blocks, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES.get(title, (0,)):
        scales = (torch.rand(len(raw), 1, generator=generator) + 0.5).half()
        raw[:, place : place + 2] = scales.view(torch.uint8)
    if title == "MXFP4":
        raw[:, 0] = raw[:, 0] % 40 + 100
    return raw.view(num_rows, -1)


def values_of(kind: GGMLType, rows_RB: torch.Tensor) -> torch.Tensor:
    out = torch.empty(rows_RB.numel() // kind.block_bytes * kind.block_elements)
    return dequantize(rows_RB.contiguous().view(-1), kind, out).view(len(rows_RB), -1)


def tiles_for(zones: RedZones, title: str, num_rows: int, num_blocks: int) -> torch.Tensor:
    scheme = TILE_SCHEMES[title]
    width = scheme.planes[0].row_elements(num_blocks * scheme.unit_columns)
    return zones.allocate(num_rows // 16, width, dtype=torch.uint8)


def model_order(num_rows: int, head_dim: int) -> list[int]:
    """Row of the file for each row of the model: in a head of 4 these are 0, 2, 1, 3."""
    heads = range(0, num_rows, head_dim)
    return [head + row for head in heads for row in (*range(0, head_dim, 2), *range(1, head_dim, 2))]


@pytest.mark.parametrize("title", TILE_TYPES)
def test_place_tiles_holds_the_values_of_the_blocks(title, native):
    kind, scheme, zones = KINDS[title], TILE_SCHEMES[title], RedZones(CPU)
    raw = random_rows(title, 96, 5)
    for first_row, num_rows, first_block, num_blocks, head_dim in (
        (0, 96, 0, 5, 0),
        (7, 16, 2, 3, 0),
        (24, 48, 1, 1, 12),
        (0, 96, 0, 5, 32),
    ):
        stored = StoredRows(raw, first_row, num_rows, first_block * kind.block_bytes, num_blocks, head_dim)
        tiles = tiles_for(zones, title, num_rows, num_blocks)
        assert place_tiles(stored, kind.block_bytes, tiles, scheme) == UNSEEN
        zones.check()
        order = model_order(96, head_dim) if head_dim else list(range(96))
        columns = slice(first_block * kind.block_elements, (first_block + num_blocks) * kind.block_elements)
        expected = values_of(kind, raw)[order][first_row : first_row + num_rows, columns]
        found = torch.empty(num_rows, expected.shape[1])
        fill_tiles(scheme, tiles, found)
        assert torch.equal(found, expected), f"{title} {stored[1:]}"
        again = torch.empty_like(tiles)
        assert place_tiles_reference(stored, kind.block_bytes, again, scheme) == UNSEEN
        assert torch.equal(tiles, again), f"{title} {stored[1:]}"


@pytest.mark.parametrize("flag", variants().values(), ids=variants())
def test_place_tiles_of_other_processors_gives_the_same_bytes(flag, monkeypatch, native):
    for title in TILE_TYPES:
        raw, block_bytes, scheme = random_rows(title, 32, 3), KINDS[title].block_bytes, TILE_SCHEMES[title]
        stored, zones = StoredRows(raw, 0, 32, 0, 3, 8), RedZones(CPU)
        tiles, expected = tiles_for(zones, title, 32, 3), tiles_for(zones, title, 32, 3)
        place_tiles_reference(stored, block_bytes, expected, scheme)
        monkeypatch.setattr(module, "native_library", lambda: compiled_with(flag))
        assert place_tiles(stored, block_bytes, tiles, scheme) == UNSEEN
        zones.check()
        assert torch.equal(tiles, expected), title


@pytest.mark.parametrize("title", [title for title in TILE_TYPES if title != "MXFP4"])
@pytest.mark.parametrize("head_dim", [0, 8])
def test_place_tiles_names_the_first_row_with_a_wrong_scale(title, head_dim, native):
    kind, scheme = KINDS[title], TILE_SCHEMES[title]
    order = model_order(48, head_dim) if head_dim else list(range(48))
    for place in HALVES.get(title, (0,)):
        for wrong, (row, block) in zip(
            (0x7C00, 0x7E01, 0xFC00, 0xFFFF), ((0, 2), (17, 0), (31, 1), (15, 2)), strict=True
        ):
            raw = random_rows(title, 48, 3)
            for wrong_row in (row, 47):
                start = block * kind.block_bytes + place
                raw[order[wrong_row], start : start + 2] = torch.tensor([wrong & 255, wrong >> 8], dtype=torch.uint8)
            for run in (place_tiles, place_tiles_reference):
                tiles = tiles_for(RedZones(CPU), title, 48, 3)
                assert run(StoredRows(raw, 0, 48, 0, 3, head_dim), kind.block_bytes, tiles, scheme) == row


def test_place_tiles_takes_exponents_up_to_252(native):
    raw, scheme = random_rows("MXFP4", 16, 2), TILE_SCHEMES["MXFP4"]
    for exponent, expected in ((252, UNSEEN), (253, 9), (255, 9)):
        raw[9, 17] = exponent
        for run in (place_tiles, place_tiles_reference):
            assert run(StoredRows(raw, 0, 16, 0, 2), 17, tiles_for(RedZones(CPU), "MXFP4", 16, 2), scheme) == expected


@pytest.mark.parametrize("title", SPLIT_TYPES)
def test_split_rows_equals_the_reference(title, native):
    kind, scheme, raw = KINDS[title], BLOCK_SCHEMES[title], random_rows(title, 24, 4)
    for stored in (StoredRows(raw, 0, 24, 0, 4), StoredRows(raw, 5, 9, kind.block_bytes, 2, 6)):
        zones, sizes = (
            RedZones(CPU),
            [plane.row_bytes(stored.num_blocks * scheme.unit_columns) for plane in scheme.planes],
        )
        found, expected = (
            [zones.allocate(stored.num_rows, size, dtype=torch.uint8) for size in sizes] for _ in range(2)
        )
        split_rows(stored, kind.block_bytes, found, title)
        split_rows_reference(stored, kind.block_bytes, expected, title)
        zones.check()
        for plane, ours, theirs in zip(scheme.planes, found, expected, strict=True):
            assert torch.equal(ours, theirs), f"{title} {plane.name}"


def test_without_compiler_references_run(monkeypatch):
    monkeypatch.setattr(module, "native_library", lambda: None)
    raw, scheme = random_rows("Q4_K", 16, 1), TILE_SCHEMES["Q4_K"]
    tiles = tiles_for(RedZones(CPU), "Q4_K", 16, 1)
    assert place_tiles(StoredRows(raw, 0, 16, 0, 1), 144, tiles, scheme) == UNSEEN
    planes = [torch.empty(16, plane.row_bytes(256), dtype=torch.uint8) for plane in BLOCK_SCHEMES["Q4_K"].planes]
    split_rows(StoredRows(raw, 0, 16, 0, 1), 144, planes, "Q4_K")
    values = torch.empty(16, 256)
    fill_tiles(scheme, tiles, values)
    assert torch.equal(values, values_of(KINDS["Q4_K"], raw))


def test_rows_that_are_not_there_are_refused():
    raw, scheme = random_rows("Q4_0", 24, 2), TILE_SCHEMES["Q4_0"]
    tiles = tiles_for(RedZones(CPU), "Q4_0", 16, 2)
    with pytest.raises(AssertionError, match="holds no row 24"):
        place_tiles(StoredRows(raw, 9, 16, 0, 2), 18, tiles, scheme)
    with pytest.raises(AssertionError, match="holds no row 31"):
        place_tiles(StoredRows(raw, 8, 16, 0, 2, 16), 18, tiles, scheme)
    with pytest.raises(AssertionError, match="holds no byte 53"):
        place_tiles(StoredRows(raw, 0, 16, 18, 2), 18, tiles, scheme)
    with pytest.raises(AssertionError, match="num_blocks"):
        place_tiles(StoredRows(raw, 0, 16, 0, 1), 18, tiles, scheme)

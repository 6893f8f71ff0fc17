"""Tiles read from a GGUF file: steps of every size, interleaved heads and shares of columns hold the rows of `read_into`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from for_each import for_each
from holdfast.loading.gguf import source as module
from holdfast.loading.gguf.file import read_gguf
from holdfast.loading.gguf.source import GGUFSource
from holdfast.loading.sources.source import read_rows
from holdfast.quant.packed_tiles import TILE_SCHEMES
from holdfast.quant.tile_values import fill_tiles
from loading.block_files import Stored, random_blocks, write_tensors

pytest.importorskip("gguf")
NAME, ROWS, HEAD_DIM = "model.layers.0.self_attn.q_proj.weight", 192, 24


def written(folder: Path, kind: str, wrong_rows: tuple[int, ...] = ()) -> GGUFSource:
    stored = random_blocks(kind, (ROWS, 1024), seed=5)
    for row in wrong_rows:
        stored.raw[row, :2] = np.array([np.nan], np.float16).view(np.uint8)
    write_tensors(folder / "a.gguf", {"blk.0.attn_q.weight": Stored(kind, stored.raw)})
    return GGUFSource(read_gguf(folder / "a.gguf"), HEAD_DIM)


def read(
    source: GGUFSource, kind: str, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[torch.Tensor, int | None]:
    scheme, shape = TILE_SCHEMES[kind], (rows[1] - rows[0], columns[1] - columns[0])
    tiles = torch.empty(shape[0] // 16, scheme.planes[0].row_elements(shape[1]), dtype=torch.uint8)
    wrong = source.read_tiles(NAME, scheme, rows, tiles, columns)
    values = torch.empty(shape)
    fill_tiles(scheme, tiles, values)
    return values, wrong


@for_each("kind", ["Q8_0", "IQ4_XS"])
def test_read_tiles_holds_the_rows_of_read_into(kind, tmp_path, monkeypatch):
    (tmp_path / kind).mkdir()
    source = written(tmp_path / kind, kind)
    expected = read_rows(source, NAME, 0, ROWS)
    for step_elements in (1, 2**16, 2**18):
        monkeypatch.setattr(module, "STEP_ELEMENTS", step_elements)
        for rows, columns in (((0, ROWS), (0, 1024)), ((48, 160), (256, 768)), ((100, 116), (768, 1024))):
            values, wrong = read(source, kind, rows, columns)
            assert torch.equal(values, expected[slice(*rows), slice(*columns)]), f"{step_elements} {rows} {columns}"
            assert wrong is None
            assert source.held_bytes <= source.scratch_bytes_per_reader
    source.close()


def test_read_tiles_names_the_first_wrong_row_of_all_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEP_ELEMENTS", 1)
    # Rows 2i of a head in the file are rows i here, so 72 + 2 * 5 is row 77.
    source = written(tmp_path, "Q8_0", (82, 191))
    assert read(source, "Q8_0", (0, ROWS), (0, 1024))[1] == 77
    assert read(source, "Q8_0", (48, ROWS), (0, 1024))[1] == 77
    assert read(source, "Q8_0", (80, ROWS), (0, 512))[1] == 191
    assert read(source, "Q8_0", (80, ROWS), (512, 1024))[1] is None
    source.close()

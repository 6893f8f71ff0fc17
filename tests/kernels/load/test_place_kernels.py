"""Kernels that place rows: the reference to the bit, for any strides, and started over addresses."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.kernels.fp8 import as_kernels_read
from holdfast.kernels.load.place_kernels import (
    UNSEEN,
    Pointer,
    RowLaunch,
    Tile,
    numbers_at,
    place_quantized_triton,
    report_rows,
    tile_place,
)
from holdfast.kernels.triton_compat import constexpr, jit, tl
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4
from kernels.exactness import random
from kernels.place_cases import FLOAT_TYPES, LAYOUTS, SCHEMES, hostile_rows, laid_out, new_findings, place_codes
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET

WIDTHS = (1, 7, 33, 576, 1408, 4099)


def width_for(scheme, width):
    """A width that the scheme can store."""
    return width if scheme is not MXFP4 else -(-width // 32) * 32


@pytest.mark.each_value
@SCHEMES
@pytest.mark.parametrize("width", WIDTHS, ids=lambda width: f"C{width}")
def test_place_quantized_matches_reference_in_any_width(device, scheme, width):
    rows = random(2, width_for(scheme, width))
    assert place_codes(laid_out(rows, "dense", device), scheme, device) == place_codes(rows, scheme)


@pytest.mark.each_value
@SCHEMES
@FLOAT_TYPES
def test_place_quantized_hostile_values_match_reference(device, scheme, dtype):
    rows = hostile_rows(96, dtype)
    placed = place_codes(laid_out(rows, "dense", device), scheme, device)
    assert placed == place_codes(rows, scheme)
    # The largest numbers of float64 are infinite in float32, in which scales are found.
    assert placed.nonfinite == (3 if dtype == torch.float64 else UNSEEN)


@pytest.mark.each_value
@SCHEMES
@LAYOUTS
def test_place_quantized_matches_reference_in_any_layout(device, scheme, layout):
    for shape in ((2, 576), (17, 33 if scheme is not MXFP4 else 64)):
        rows = random(*shape).half()
        assert place_codes(laid_out(rows, layout, device), scheme, device) == place_codes(rows, scheme)


@SCHEMES
def test_place_quantized_accepts_expanded_rows(device, scheme):
    rows = random(1, 64).expand(5, 64)
    assert place_codes(rows.to(device).expand(5, 64), scheme, device) == place_codes(rows, scheme)


@SCHEMES
@pytest.mark.parametrize("kept", [(0, 128), (128, 384), (384, 448)], ids=str)
def test_place_quantized_columns_match_those_of_the_whole(device, scheme, kept):
    rows = random(5, 448)
    everything = place_codes(rows, scheme)
    # The kernel gets the columns from which scales follow: here all.
    if scheme.block_columns == 0:
        seen, start = rows, 0
    else:
        seen, start = rows[:, kept[0] : kept[1]], kept[0]
    amax = rows.abs().amax().view(1) if scheme.is_whole_tensor else None
    columns = kept[0] - start, kept[1] - start
    some = place_codes(seen, scheme, None, columns, amax=amax)
    assert place_codes(laid_out(seen, "dense", device), scheme, device, columns, amax=amax and amax.to(device)) == some
    per_byte = scheme.codes_per_byte
    assert torch.equal(some.planes[0], everything.planes[0][:, kept[0] // per_byte : kept[1] // per_byte])


def test_place_quantized_inner_columns_use_scale_of_whole_block(device):
    rows = random(5, 100)
    some = place_codes(laid_out(rows, "dense", device), FP8_BLOCK, device, (40, 56))
    assert some == place_codes(rows, FP8_BLOCK, None, (40, 56))
    everything = place_codes(rows, FP8_BLOCK)
    assert torch.equal(some.planes[0], everything.planes[0][:, 40:56])
    assert torch.equal(some.planes[1], everything.planes[1])


@pytest.mark.each_value
@pytest.mark.parametrize("scheme", [FP8, FP8_TENSOR, INT8], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("width", [2000, 8000, 16384, 16390])
def test_place_quantized_long_rows_match_reference(device, scheme, width):
    rows = random(2, width)
    rows[1, -1] = 50.0
    for kept in ((0, width), (17, width - 1)):
        assert place_codes(laid_out(rows, "dense", device), scheme, device, kept) == place_codes(
            rows, scheme, None, kept
        )


@pytest.mark.parametrize("block_rows", [1, 2, 32, 128])
def test_place_quantized_blocks_of_fewer_rows_match_reference(device, block_rows):
    scheme = replace(FP8_BLOCK, block_rows=block_rows)
    rows = random(block_rows + (block_rows + 1) // 2, 130) * torch.linspace(0.1, 3, 130)
    assert place_codes(laid_out(rows, "dense", device), scheme, device) == place_codes(rows, scheme)


@SCHEMES
@pytest.mark.parametrize(
    "bad", [float("nan"), -float("nan"), float("inf"), -float("inf")], ids=["nan", "-nan", "inf", "-inf"]
)
def test_place_quantized_reports_and_stores_nonfinite_values(device, scheme, bad):
    rows = random(6, 64).half()
    rows[5, 3] = rows[4, 60] = bad
    mine = place_codes(laid_out(rows, "dense", device), scheme, device, first_row=100)
    assert mine == place_codes(rows, scheme, first_row=100)
    assert (mine.nonfinite, mine.differing) == (104, UNSEEN)


def test_place_quantized_reports_nonfinite_from_any_layout(device):
    for scheme in (FP8, FP8_TENSOR):
        rows = random(2, 16500)
        rows[1, 16499] = torch.inf
        assert place_codes(rows.to(device), scheme, device).nonfinite == 1
        rows = laid_out(rows[:, :600], "transposed", device)
        rows[0, 599] = torch.nan
        assert place_codes(rows, scheme, device).nonfinite == 0


@SCHEMES
def test_place_quantized_verify_compares_and_writes_nothing(device, scheme):
    rows = random(6, 192)
    there = place_codes(rows, scheme).planes
    same = place_codes(laid_out(rows, "dense", device), scheme, device, first_row=7, verify=there)
    assert (same.differing, same.nonfinite) == (UNSEEN, UNSEEN)
    for plane in (0, 1):
        changed = [tensor.clone() for tensor in there]
        changed[plane].view(-1)[-1] ^= 1
        other = place_codes(laid_out(rows, "dense", device), scheme, device, first_row=7, verify=tuple(changed))
        # A scale of several rows stands for the first of them.
        assert other.differing == (7 if plane == 1 and scheme.block_rows > 1 else 12)
        assert all(torch.equal(mine, given) for mine, given in zip(other.planes, changed, strict=True))
        assert other == place_codes(rows, scheme, first_row=7, verify=tuple(changed))


def test_place_quantized_verify_reports_the_lowest_row(device):
    rows = random(20, 64)
    there = place_codes(rows, FP8).planes
    there[0][17, 3] ^= 1
    there[0][5, 60] ^= 1
    assert place_codes(rows.to(device), FP8, device, verify=there).differing == 5


@SCHEMES
def test_place_quantized_without_rows_reports_nothing(device, scheme):
    placed = place_codes(torch.empty(0, 64, device=device), scheme, device)
    assert (placed.nonfinite, placed.differing) == (UNSEEN, UNSEEN)


def test_place_quantized_refuses_strided_planes(device):
    rows, found = random(4, 32).to(device), new_findings(device)
    codes, scales = torch.empty(4, 64, dtype=torch.int8, device=device), torch.empty(8, device=device)
    for planes in ((codes[:, ::2], scales[:4]), (codes[:, :32].contiguous(), scales[::2])):
        with pytest.raises(AssertionError, match="not dense"):
            place_quantized_triton(rows, (0, 32), INT8, *planes, None, 0, found, False)


@pytest.mark.gpu
@SCHEMES
@LAYOUTS
@pytest.mark.parametrize("shape", [(1408, 2048), (768, 2048), (2048, 768), (300, 25600), (1000, 5120)], ids=str)
def test_place_quantized_matches_reference_at_model_shapes(device, scheme, layout, shape):
    rows = random(*shape).bfloat16()
    assert place_codes(laid_out(rows, layout, device), scheme, device) == place_codes(rows, scheme)


@pytest.mark.gpu
@SCHEMES
def test_place_quantized_allocates_nothing(device, scheme):
    rows, found = random(256, 512).to(device, torch.bfloat16), new_findings(device)
    planes = [
        torch.empty(plane.shape, dtype=getattr(torch, plane.dtype), device=device)
        for plane in scheme.planes((256, 512))
    ]
    amax = torch.ones(1, device=device) if scheme.is_whole_tensor else None
    for verify in (False, True):
        assert_allocates_nothing(
            lambda verify=verify: place_quantized_triton(rows, (0, 512), scheme, *planes, amax, 0, found, verify)
        )


PROGRAM = Path(__file__).parent.parent / "row_launch_program.py"
TILE = Tile(4, 32, 2)


class Kernel:
    """Notes its launches, and gives a program that does."""

    def __init__(self, log, name="kernel"):
        self.log, self.name = log, name

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.log.append((self.name, grid, arguments, options))
            return Kernel(self.log, "program")

        return launch


def test_row_launch_covers_all_tiles_with_ordered_arguments():
    log = []
    RowLaunch(Kernel(log), TILE, 3, (64, 1), (True, "x")).start(9, "a", "b", 5)
    assert log == [("kernel", (9,), ("a", "b", 5, 9, 64, 1, True, "x"), {"num_warps": 2})]


def test_row_launch_without_rows_launches_nothing():
    log = []
    launch = RowLaunch(Kernel(log), TILE, 3, (), ())
    launch.start(0)
    for _ in range(2):
        launch.start_at(0, 16)
    assert log == []
    launch.start_at(1, 16)
    launch.start_at(0, 16)
    assert len(log) == 1
    RowLaunch(Kernel(log), TILE, 0, (), ()).start(5)
    assert len(log) == 1


def test_row_launch_looks_up_its_program_once_if_aligned():
    log = []
    launch = RowLaunch(Kernel(log), TILE, 1, (64,), ())
    for addresses in (8, 16, 32, 40, 48):
        launch.start_at(4, addresses, "a")
    assert [(name, grid) for name, grid, _, _ in log] == [
        ("kernel", (1,)),
        ("kernel", (1,)),
        ("program", (1, 1, 1)),
        ("kernel", (1,)),
        ("program", (1, 1, 1)),
    ]
    assert log[2][2:] == (("a", 4, 64), {})


def test_pointer_gives_address_and_dtype():
    pointer = Pointer(torch.int16)
    pointer.address = 48
    assert (pointer.data_ptr(), pointer.dtype) == (48, torch.int16)


def test_pointer_specializes_in_triton_like_a_tensor():
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    memory = torch.empty(64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :][:32]
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.float16, torch.float32):
        pointer = Pointer(dtype)
        for start in (0, 8):
            tensor = memory[start : start + 8].view(dtype)
            pointer.address = tensor.data_ptr()
            for is_given in (True, False):
                flags = False, is_given, True
                assert jit.native_specialize_impl(backend, pointer, *flags) == jit.native_specialize_impl(
                    backend, tensor, *flags
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [("plain", "amax"), pytest.param(("block", "row", "tensor", "power"), marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_row_launch_starts_compiled_kernels_over_addresses(tmp_path, cases):
    """A program that is at hand gets what the launch before it gave, in the same order."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(PROGRAM), *cases]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for case, (first, second, other) in json.loads(ran.stdout).items():
        assert first["program"] == second["program"] != other["program"], case
        assert first["types"] == second["types"] == other["types"], case
        assert first["aligned"] == ([0] if case == "amax" else [0, 1]), case
        assert other["aligned"] == [], "the program was compiled for addresses that it did not get"
        is_address = [kind.startswith("*") for kind in first["types"]]
        for late, shift, num_rows in ((second, 4096, 33), (other, 8, 100)):
            wanted = [
                value + shift if moved else num_rows if value == 100 else value
                for value, moved in zip(first["values"], is_address, strict=True)
            ]
            assert late["values"] == wanted, case
        assert first["values"].count(100) == 1, case
        assert second["grid"][0] <= first["grid"][0] == other["grid"][0], case


ROWS, BLOCK = 4, 16


@jit
def _tiles_kernel(
    p_x,
    p_out,
    p_finding,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    reported,
    ROWS: constexpr,
    BLOCK: constexpr,
):
    """Tiles as they lie, one behind the other in the output; rows from `reported` on are reported."""
    i_row, i_start = tile_place(num_columns, ROWS, BLOCK)
    p_rows = p_x + i_row.to(tl.int64)[:, None] * row_stride
    b_x = numbers_at(p_rows, i_start + tl.arange(0, BLOCK), i_row < num_rows, num_columns, column_stride)
    o_x = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(p_out + o_x, b_x)
    report_rows(p_finding, 100 + i_row, (i_row >= reported) & (i_row < num_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(4, 16), (5, 33), (1, 1)])
@pytest.mark.parametrize("is_tall", [False, True], ids=["rows", "columns"])
def test_row_tiles_cover_rows_and_columns_exactly(device, dtype, num_rows, num_columns, is_tall):
    values = random(num_rows, num_columns).to(dtype)
    x = amid_poison(values.t(), device).t() if is_tall else amid_poison(values, device)
    down, across = -(-num_rows // ROWS), -(-num_columns // BLOCK)
    out = torch.empty(down * across, ROWS, BLOCK, device=device)
    finding = torch.full((1,), UNSEEN, dtype=torch.int32, device=device)
    sizes = (num_rows, num_columns, *x.stride(), num_rows - 1)
    _tiles_kernel[(down * across,)](as_kernels_read(x), out, finding, *sizes, ROWS=ROWS, BLOCK=BLOCK)
    expected = torch.zeros(down * ROWS, across * BLOCK)
    expected[:num_rows, :num_columns] = values.float()
    tiles = expected.view(down, ROWS, across, BLOCK).transpose(1, 2).reshape(down * across, ROWS, BLOCK)
    assert torch.equal(out.cpu(), tiles)
    assert finding.item() == 100 + num_rows - 1


def test_tile_finding_is_the_lowest_reported_row(device):
    x, out = torch.zeros(9, 16, device=device), torch.empty(3, ROWS, BLOCK, device=device)
    finding = torch.full((1,), 106, dtype=torch.int32, device=device)
    for reported, expected in ((9, 106), (7, 106), (5, 105), (8, 105), (0, 100)):
        _tiles_kernel[(3,)](x, out, finding, 9, 16, 16, 1, reported, ROWS=ROWS, BLOCK=BLOCK)
        assert finding.item() == expected

"""Streamed products by row-scaled e4m3 weights: as exact as torch, with the same bits in any batch, amid poison."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.gemm import row_scaled_stream
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, TileScratch, quantize_rows_reference
from holdfast.kernels.gemm.row_scaled_stream import StreamForm, row_form, stream_gate, stream_linear, takes
from holdfast.kernels.geometry import ROW_SCALED_PROGRAMS, STREAM_ROWS, Stretches, stream_stretches
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8
from kernels.exactness import assert_as_exact_as_torch, random, same_bits
from kernels.gemm_references import (
    row_scaled_gate_reference,
    row_scaled_linear_reference,
    stream_linear_reference,
)
from kernels.quantized_cases import (
    codable_rows,
    exact_rows,
    exact_weight,
    random_weight,
    room_amid,
    slack,
    weight_amid,
    weight_on,
)
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

CPU = torch.device("cpu")
ROWS = pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32, 33, 64], ids=lambda count: f"{count} rows")
QWEN_32B = {(10240, 5120, False): 3, (5120, 8192, False): 5, (25600, 5120, True): 2, (5120, 25600, False): 5}
"""Products of Qwen3-32B, and the most programs that share a tile of each."""


def scratch_amid(zones, num_rows, size_n, size_k, gated) -> TileScratch:
    """Exactly what a product takes: partial sums and amax are poison, counters zeros."""
    stretches = stream_stretches(size_n, size_k, gated)
    partials = zones.allocate(row_form(num_rows) * stretches.num_partials).fill_(NAN)
    arrived = zones.allocate(stretches.num_tiles, dtype=torch.int32)
    return TileScratch(partials, arrived, zones.allocate(num_rows * stretches.num_tiles, dtype=torch.int32).fill_(-1))


def coded(zones, x_MK, weight) -> QuantizedRows:
    """Rows as the reference codes them, between red zones."""
    room = room_amid(zones, len(x_MK), weight)
    assert room is not None
    host = QuantizedRows(torch.empty(x_MK.shape, dtype=torch.float8_e4m3fn), torch.empty(len(x_MK), 1))
    quantize_rows_reference(x_MK, host)
    room.codes_TK.copy_(host.codes_TK)
    room.scales_TB.copy_(host.scales_TB)
    return room


def run(x_MK, weight, bias_N, device, out_dtype=torch.float32, form=None) -> torch.Tensor:
    """Run amid poison, twice over the same scratch."""
    zones, (size_n, size_k) = RedZones(device), weight.shape
    rows = coded(zones, x_MK, weight)._replace(scratch=scratch_amid(zones, len(x_MK), size_n, size_k, gated=False))
    bias, weight = None if bias_N is None else amid(bias_N, device), weight_amid(weight, device)
    results = []
    for _ in range(2):
        out = zones.allocate(len(x_MK), size_n, dtype=out_dtype).fill_(NAN)
        assert stream_linear(rows, weight, bias, out, form) is out
        results.append(out.cpu())
        assert rows.scratch is not None
        assert not rows.scratch.arrived.any()
    zones.check()
    assert same_bits(*results)
    return results[0]


def run_gate(x_MK, weight, bias_N, kind, device, out_dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the gated kernel stores, and the largest amax that it leaves for each row."""
    zones, size_i = RedZones(device), weight.shape[0] // 2
    scratch = scratch_amid(zones, len(x_MK), size_i, weight.shape[1], gated=True)
    rows = coded(zones, x_MK, weight)._replace(scratch=scratch)
    out = zones.allocate(len(x_MK), size_i, dtype=out_dtype).fill_(NAN)
    bias = None if bias_N is None else amid(bias_N, device)
    amax = stream_gate(rows, weight_amid(weight, device), bias, kind, out)
    zones.check()
    assert not scratch.arrived.any()
    return out.cpu(), amax.bits.view(len(x_MK), amax.num_amax).amax(-1).cpu()


def judge(x_MK, weight, bias_N, device, out_dtype=torch.float32) -> None:
    y = run(x_MK, weight, bias_N, device, out_dtype)
    rows = coded(RedZones(CPU), x_MK, weight)
    in_torch = row_scaled_linear_reference(rows, weight, bias_N, torch.empty(y.shape, dtype=out_dtype))
    exact = exact_rows(x_MK, weight.scheme) @ exact_weight(weight).T
    exact = exact if bias_N is None else exact + bias_N.double()
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=10.0 * slack(device, weight.scheme))


# --- how programs share a product


@given(size_n=st.integers(1, 9000), size_k=st.integers(1, 9000), gated=st.booleans())
def test_stream_stretches_cover_every_step_once(size_n, size_k, gated):
    """As the kernel divides: program p begins at step p * total // programs, and no stretch is empty."""
    stretches = stream_stretches(size_n, size_k, gated)
    num_tiles, num_steps, num_programs = stretches
    total, parts = num_tiles * num_steps, {}
    assert num_programs == min(ROW_SCALED_PROGRAMS, max(1, total // 4))
    begins = [program * total // num_programs for program in range(num_programs + 1)]
    for program, (begin, end) in enumerate(pairwise(begins)):
        assert begin < end
        tiles = range(begin // num_steps, -(-end // num_steps))
        assert all(stretches.owner(*divmod(unit, num_steps)) == program for unit in (begin, end - 1))
        for tile in tiles:
            parts.setdefault(tile, []).append(program)
    assert max(map(len, parts.values())) == stretches.most_parts()
    for tile, owners in parts.items():
        first = stretches.owner(tile, 0)
        assert owners == list(range(first, stretches.owner(tile, num_steps - 1) + 1))
    # A program's part of its first tile and of its last one have places of their own.
    places = [2 * p + (p == owners[0]) for owners in parts.values() if len(owners) > 1 for p in owners]
    assert len(places) == len(set(places))
    assert max(places, default=-1) * 128 < max(1, stretches.num_partials)


def test_stream_stretches_of_qwen3_32b_are_known():
    for (size_n, size_k, gated), most in QWEN_32B.items():
        stretches = stream_stretches(size_n, size_k, gated)
        assert (stretches.num_programs, stretches.most_parts()) == (132, most)
        assert stretches.num_partials == 2 * 132 * 128
    assert stream_stretches(24, 64, gated=False) == Stretches(1, 1, 1)
    assert stream_stretches(24, 64, gated=False).num_partials == 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size_n", "size_k"), [(70, 2112), (640, 1040), (130, 64)])
def test_stream_order_of_sums_is_as_exact_as_torch(size_n, size_k, gated):
    x, weight = codable_rows(5, size_k), random_weight(2 * size_n if gated else size_n, size_k, FP8)
    rows, bias = coded(RedZones(CPU), x, weight), random(weight.shape[0], seed=3)
    y = stream_linear_reference(rows, weight, bias, torch.empty(5, weight.shape[0]), gated)
    in_torch = row_scaled_linear_reference(rows, weight, bias, torch.empty(y.shape))
    exact = exact_rows(x, FP8) @ exact_weight(weight).T + bias.double()
    assert_as_exact_as_torch(y, in_torch, exact, magnitude=10.0)


def test_stream_row_form_follows_tile_heights():
    forms = [row_form(num_rows) for num_rows in range(1, 100)]
    assert [forms.index(form) + 1 for form in dict.fromkeys(forms)] == [1, 17, 33, 65]
    assert forms[:1] + forms[16:17] + forms[63:65] == [16, 32, 64, 0]


def test_stream_takes_chooses_by_weight_rows_and_device(monkeypatch):
    scratch, fits = scratch_amid(RedZones(CPU), 1, 64, 64, gated=False), random_weight(64, 64, FP8)
    assert not takes(fits, 2, scratch)
    monkeypatch.setattr(row_scaled_stream, "is_hopper", lambda tensor: True)
    for weight in (fits, random_weight(70, 80, FP8_TENSOR)):
        assert [takes(weight, num_rows, scratch) for num_rows in (1, STREAM_ROWS, STREAM_ROWS + 1)] == [1, 1, 0]
        assert not takes(weight, 2, None)
    others = random_weight(128, 128, FP8_BLOCK), random_weight(64, 64, INT8), random_weight(64, 72, FP8), random(64, 64)
    assert not any(takes(other, 2, scratch) for other in others)


# --- the kernel, on Hopper


@pytest.mark.gpu
@ROWS
@pytest.mark.parametrize(
    ("size_n", "size_k"), [(1, 16), (24, 64), (70, 4224), (128, 128), (129, 2064), (640, 1040), (5120, 1024)]
)
def test_stream_linear_is_exact_at_odd_sizes(device, num_rows, size_n, size_k):
    judge(codable_rows(num_rows, size_k), random_weight(size_n, size_k, FP8), random(size_n, seed=5), device)
    judge(codable_rows(num_rows, size_k), random_weight(size_n, size_k, FP8_TENSOR), None, device, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 40], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize(("size_n", "size_k"), [(5120, 8192), (2560, 25600), (10240, 5120)])
def test_stream_linear_is_exact_at_model_sizes(device, num_rows, size_n, size_k):
    x, weight = codable_rows(num_rows, size_k).bfloat16(), random_weight(size_n, size_k, FP8)
    judge(x, weight, random(size_n, seed=5).bfloat16(), device, torch.bfloat16)


@pytest.mark.gpu
def test_stream_linear_sums_of_integers_are_exact(device):
    """Sums stay below 2^12 in a step, so tensor cores lose nothing, and every order of parts gives the same."""
    weight = random_weight(300, 4224, FP8)
    weight.codes.copy_(torch.randint(-2, 3, weight.shape).to(torch.float8_e4m3fn))
    weight.scales.fill_(1.0)
    x = torch.randint(-3, 4, (20, 4224)).float()
    x[:, 0] = 448.0
    assert same_bits(run(x, weight, None, device), (x.double() @ weight.codes.double().T).float())


@pytest.mark.gpu
@pytest.mark.parametrize(("size_n", "size_k"), [(70, 2112), (5120, 1024)])
def test_stream_linear_is_batch_invariant(device, size_n, size_k):
    x, weight = codable_rows(64, size_k), random_weight(size_n, size_k, FP8)
    whole = run(x, weight, None, device)
    for some in ([63], [5, 3], list(range(17)), list(range(1, 34)), list(range(63, -1, -1))):
        assert same_bits(run(x[some], weight, None, device), whole[some])


@pytest.mark.gpu
@pytest.mark.parametrize("form", [StreamForm(2, 0, 0), StreamForm(4, 30, 3), StreamForm(3, 1, 10**6)], ids=str)
def test_stream_form_changes_no_bit(device, form):
    x, weight = codable_rows(9, 4224), random_weight(400, 4224, FP8)
    assert same_bits(run(x, weight, None, device, form=form), run(x, weight, None, device))


@pytest.mark.gpu
@ROWS
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu"])
@pytest.mark.parametrize(("size_i", "size_k"), [(1, 16), (70, 4224), (640, 1040)])
def test_stream_gate_matches_torch_and_leaves_row_amax(device, num_rows, kind, size_i, size_k):
    x, weight = codable_rows(num_rows, size_k), random_weight(2 * size_i, size_k, FP8)
    bias = random(2 * size_i, seed=7)
    y, amax = run_gate(x, weight, bias, kind, device)
    rows = coded(RedZones(CPU), x, weight)
    rows = rows._replace(scratch=TileScratch(*(torch.zeros(num_rows, dtype=torch.int32) for _ in range(3))))
    expected = torch.empty(num_rows, size_i)
    row_scaled_gate_reference(rows, weight, bias, kind, expected)
    assert (y - expected).norm() <= 2e-3 * expected.norm()
    assert torch.equal(amax, (y.view(torch.int32) & 0x7FFFFFFF).amax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_stream_nonfinite_input_stays_in_its_row(device, bad):
    weight, gate_up = random_weight(300, 1056, FP8), random_weight(160, 1056, FP8)
    x = codable_rows(18, 1056)
    clean, (clean_gate, clean_amax) = run(x, weight, None, device), run_gate(x, gate_up, None, "silu", device)
    x[1, 850] = bad
    y, (gate, amax) = run(x, weight, None, device), run_gate(x, gate_up, None, "silu", device)
    others = [row for row in range(18) if row != 1]
    assert y[1].isnan().all()
    assert gate[1].isnan().all()
    assert amax[1] > 0x7F800000
    assert same_bits(y[others], clean[others])
    assert same_bits(gate[others], clean_gate[others])
    assert torch.equal(amax[others], clean_amax[others])


@pytest.mark.gpu
def test_stream_nonfinite_weight_stays_in_its_outputs(device):
    x, weight = codable_rows(18, 1296), random_weight(180, 1296, FP8)
    clean = run(x, weight, None, device)
    weight.scales[177] = NAN
    weight.codes.view(torch.uint8)[3, 5] = 0x7F
    y, bad = run(x, weight, None, device), [3, 177]
    others = [column for column in range(180) if column not in bad]
    assert y[:, bad].isnan().all()
    assert same_bits(y[:, others].contiguous(), clean[:, others].contiguous())


@pytest.mark.gpu
def test_stream_products_in_a_row_keep_their_bits(device):
    """The next product's programs start early: they may touch neither rows nor parts of the one before."""
    shapes, zones = [(2560, 1024), (1024, 2560), (5120, 1024), (1024, 5120)], RedZones(device)
    weights = [weight_on(random_weight(*shape, FP8, seed=i), device) for i, shape in enumerate(shapes)]
    partials = zones.allocate(16 * stream_stretches(5120, 5120, gated=False).num_partials).fill_(NAN)
    scratch = TileScratch(partials, zones.allocate(64, dtype=torch.int32), zones.allocate(1, dtype=torch.int32))
    rows = [coded(zones, codable_rows(8, size_k), weight) for (_, size_k), weight in zip(shapes, weights, strict=True)]
    outs = [[torch.empty(8, size_n, device=device) for size_n, _ in shapes] for _ in range(30)]
    for out in outs:
        for one, weight, y in zip(rows, weights, out, strict=True):
            stream_linear(one._replace(scratch=scratch), weight, None, y)
    for out in outs[1:]:
        assert all(same_bits(y.cpu(), first.cpu()) for y, first in zip(out, outs[0], strict=True))
    assert not scratch.arrived.any()


@QUIET
def test_stream_linear_misfit_operands_are_refused(device):
    weight = weight_on(random_weight(300, 4224, FP8), device)
    rows = coded(RedZones(device), codable_rows(20, 4224), weight)
    empty = torch.zeros(1, device=device)
    small = TileScratch(empty, empty.int(), empty.int())
    out, half = torch.empty(20, 300, device=device), torch.empty(20, 150, device=device)
    with pytest.raises(AssertionError, match="partials"):
        stream_linear(rows._replace(scratch=small), weight, None, out)
    large = torch.zeros(2**20 * 2, device=device)
    with pytest.raises(AssertionError, match="arrived"):
        stream_linear(rows._replace(scratch=small._replace(partials=large)), weight, None, out)
    wide = TileScratch(large, large.int(), empty.int())
    with pytest.raises(AssertionError, match="amax"):
        stream_gate(rows._replace(scratch=wide), weight, None, "silu", half)
    with pytest.raises(AssertionError, match="needs amax"):
        stream_gate(rows, weight, None, "silu", half)
    with pytest.raises(AssertionError, match="need scratch"):
        stream_linear(rows, weight, None, out)
    with pytest.raises(AssertionError, match=r"weight\.shape"):
        stream_linear(rows, weight, None, half)
    many = coded(RedZones(device), codable_rows(65, 4224), weight)
    with pytest.raises(AssertionError, match="65 rows"):
        stream_linear(many, weight, None, torch.empty(65, 300, device=device))


@pytest.mark.gpu
def test_stream_products_allocate_nothing(device):
    zones = RedZones(device)
    x, weight = codable_rows(17, 4096), weight_on(random_weight(256, 4096, FP8), device)
    rows = coded(zones, x, weight)._replace(scratch=scratch_amid(zones, 17, 256, 4096, gated=False))
    out = torch.empty(17, 256, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: stream_linear(rows, weight, None, out))
    rows = rows._replace(scratch=scratch_amid(zones, 17, 128, 4096, gated=True))
    gated = torch.empty(17, 128, dtype=torch.bfloat16, device=device)
    assert_allocates_nothing(lambda: stream_gate(rows, weight, None, "silu", gated))

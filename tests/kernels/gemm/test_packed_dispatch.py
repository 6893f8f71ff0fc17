"""Products and lookups of packed weights as a GPU takes them: parts in tiles, in pieces, plain and by the reference."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from holdfast.kernels.gemm import embedding, packed_linear, packed_mma, packed_tiles
from holdfast.kernels.gemm.linear import fuses_gate, gated_linear, linear, linear_float32
from holdfast.kernels.gemm.packed_codes import EVEN_ODD_ASM
from holdfast.kernels.packed_kernels import ARRIVED_BYTES, PARTIAL_BYTES, has_tiles
from holdfast.quant.packed_schemes import PackedScheme
from holdfast.quant.packed_weight import PackedPart, PackedWeight
from kernels.gemm.test_packed_linear import SCHEMES, values_of, weight_of
from kernels.gemm.test_packed_mma import e4m3, gated
from kernels.gluon_tiles import modelled_tiles
from kernels.triton_cases import QUIET, assert_allocates_nothing

pytestmark = [QUIET, pytest.mark.any_device]
MIXED = ("Q4_K", "plain", "Q2_K", "int4 in order", "Q6_K")
"""Tiles, a product of its own, pieces by the kernel and by the reference, and tiles again."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device.type == "cuda":
        yield
        return
    monkeypatch.setattr(packed_linear, "can_run", lambda tensor: True)

    def takes(x_TK: torch.Tensor, scheme: PackedScheme, is_invariant: bool = False) -> bool:
        is_few = is_invariant or len(x_TK) <= packed_mma.MOST_ROWS
        return is_few and x_TK.dtype != torch.float32 and has_tiles(scheme, x_TK.shape[1])

    monkeypatch.setattr(packed_mma, "takes", takes)
    names = {"column_texts": (EVEN_ODD_ASM,), "e4m3_value": e4m3, "gated_numbers": gated}
    with modelled_tiles(packed_mma, "packed_mma_kernel", packed_tiles, **names):
        yield


def on(weight: PackedWeight, device: torch.device) -> PackedWeight:
    """With room whose counters are zero."""
    parts = tuple(
        PackedPart(part.scheme, part.row_start, part.shape, tuple(plane.to(device) for plane in part.planes))
        for part in weight.parts
    )
    room = torch.full((ARRIVED_BYTES + PARTIAL_BYTES,), 0xFF, dtype=torch.uint8, device=device)
    room[:ARRIVED_BYTES] = 0
    return replace(weight, parts=parts, room=room)


def judge(y_TN: torch.Tensor, x_TK: torch.Tensor, weight: PackedWeight, bias_N: torch.Tensor | None) -> None:
    exact = x_TK.double() @ values_of(weight).double().T
    exact = exact if bias_N is None else exact + bias_N.double()
    error = (y_TN.cpu().double() - exact).norm() / exact.norm()
    assert float(error) < (1e-5 if x_TK.dtype == torch.float32 else 8e-3), float(error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_linear_takes_every_part_its_own_way(dtype: torch.dtype, device: torch.device) -> None:
    weight = weight_of([(SCHEMES[name], 16) for name in MIXED])
    x, bias = torch.randn(5, 256).to(dtype), torch.randn(80).to(dtype)
    own = on(weight, device)
    for rows in (1, 5):
        judge(linear(x[:rows].to(device), own, bias.to(device)), x[:rows], weight, bias)
        judge(linear(x[:rows].to(device), own, None), x[:rows], weight, None)
    assert own.room is not None
    assert bool((own.room[:ARRIVED_BYTES] == 0).all())


def test_linear_of_many_rows_dequantizes_pieces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless every row is to be summed alike in any batch."""
    weight = weight_of([(SCHEMES["Q4_0"], 40)])
    x = torch.randn(9, 256).to(torch.float16)
    monkeypatch.setattr(packed_mma, "MOST_ROWS", 8)
    monkeypatch.setattr("holdfast.kernels.packed_kernels.KERNEL_PIECE_ELEMENTS", 7 * 256)
    calls: list[int] = []
    dequantize = packed_linear.packed_dequantize.dequantize_piece
    monkeypatch.setattr(
        packed_linear.packed_dequantize, "dequantize_piece", lambda *given: calls.append(1) or dequantize(*given)
    )
    judge(linear(x.to(device), on(weight, device), None), x, weight, None)
    assert len(calls) == 6
    judge(linear(x.to(device), replace(on(weight, device), is_invariant=True), None), x, weight, None)
    assert len(calls) == 6


def test_gated_linear_takes_one_part(device: torch.device) -> None:
    weight, down = weight_of([(SCHEMES["Q5_0"], 48)]), weight_of([(SCHEMES["Q4_0"], 8)])
    x, bias = torch.randn(3, 256).to(torch.float16), torch.randn(48).to(torch.float16)
    own = on(weight, device)
    if device.type == "cuda":
        assert fuses_gate(x.to(device), own, on(down, device), None)
        assert not fuses_gate(
            x.to(device), on(weight_of([(SCHEMES["Q5_0"], 24), (SCHEMES["Q4_0"], 24)]), device), own, None
        )
    out = torch.full((3, 24), float("nan"), dtype=torch.float16, device=device)
    gated_linear(x.to(device), own, bias.to(device), "silu", out, on(down, device), None)
    gate, up = (x.float() @ values_of(weight).T + bias.float()).chunk(2, 1)
    assert torch.allclose(out.cpu().float(), torch.nn.functional.silu(gate) * up, rtol=5e-3, atol=5e-3)


def test_lookup_takes_the_kernel(device: torch.device) -> None:
    table = weight_of([(SCHEMES["Q6_K"], 30)])
    ids = torch.tensor([29, 0, 5])
    found = embedding.lookup_rows(ids.to(device), on(table, device), torch.empty(3, 256, device=device))
    assert torch.equal(found.cpu(), values_of(table)[ids])


@pytest.mark.gpu
def test_linear_packed_allocates_nothing(device: torch.device) -> None:
    """In tiles, in pieces, and float32 results; none waits for the device."""
    weight = on(weight_of([(SCHEMES["Q4_K"], 256), (SCHEMES["Q6_K"], 64), (SCHEMES["plain"], 32)]), device)
    for rows in (1, 16, 600):
        x, bias = torch.randn(rows, 256, device=device).bfloat16(), torch.randn(352, device=device).bfloat16()
        out, wide = torch.empty(rows, 352, device=device).bfloat16(), torch.empty(rows, 352, device=device)
        assert_allocates_nothing(lambda x=x, bias=bias, out=out: linear(x, weight, bias, out))
        assert_allocates_nothing(lambda x=x, wide=wide: linear_float32(x, weight, wide))


@pytest.mark.gpu
def test_linear_packed_replays_in_a_graph(device: torch.device) -> None:
    """Split products: counters are zero again after every replay."""
    weight = on(weight_of([(SCHEMES["Q4_K"], 64)]), device)
    x, out = torch.randn(4, 256, device=device).bfloat16(), torch.empty(4, 64, device=device).bfloat16()
    linear(x, weight, None, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, weight, None, out)
    for _ in range(3):
        x.copy_(torch.randn(4, 256))
        graph.replay()
        judge(out, x.cpu(), weight_of([(SCHEMES["Q4_K"], 64)]), None)

"""Placing: pieces in any order and size become the rows of their weight, and what is wrong with them is found."""

import pytest
import torch

from holdfast.kernels.load.place_kernels import UNSEEN
from holdfast.loading.execution import place as placing
from holdfast.loading.execution.place import Placer, chunk_views
from holdfast.loading.execution.ring import cut_chunks
from holdfast.loading.planning.moves import Move
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4
from loading.mixed_model import bits
from loading.tensor_source import TensorSource
from quant.whole_weights import quantize


def place_all(tensors, final, moves, tied=(), chunk_bytes=700, backwards=False):
    """Read chunks into one of our own and place them; the placer, for what it found."""
    jobs = [*moves, *tied]
    findings, amax = torch.zeros(len(jobs), 2, dtype=torch.int32), torch.full((len(jobs),), 7.0)
    placer = Placer(moves, tied, final, findings, amax)
    assert (findings == UNSEEN).all()
    source = TensorSource(tensors=tensors)
    chunks = list(cut_chunks(moves, tied, chunk_bytes))
    memory = torch.zeros(1024 + max(chunk.num_bytes for chunk in chunks), dtype=torch.uint8)[1024:]
    views = chunk_views(memory, jobs)
    for chunk in reversed(chunks) if backwards else chunks:
        for piece in chunk.pieces:
            out = memory[piece.offset : piece.offset + piece.num_bytes].numpy().data
            source.read_into(jobs[piece.move].tensor, piece.read.row_start, piece.read.row_end, out, piece.read.columns)
        for piece in chunk.pieces:
            placer.place(piece, views)
    return placer


def empty_planes(scheme, shape):
    return {
        f"w{plane.suffix}": torch.zeros(plane.shape, dtype=getattr(torch, plane.dtype))
        for plane in scheme.planes(shape)
    }


@pytest.mark.parametrize("backwards", [False, True])
def test_placer_converts_rows_of_any_shape_in_any_order(backwards):
    tensors = {"v": torch.randn(50).double(), "a": torch.randn(20, 6), "b": torch.randn(3, 6, 10).half()}
    final = {"v": torch.zeros(50), "w": torch.zeros(50, 6)}
    moves = [
        Move("v", "float64", "v", Part("v", 0, (50,)), None, 0),
        Move("a", "float32", "w", Part("a", 0, (20, 6)), None, 0),
        Move("b", "float16", "w", Part("b", 20, (3, 6, 10), is_transposed=True), None, 0),
    ]
    placer = place_all(tensors, final, moves, chunk_bytes=128, backwards=backwards)
    assert torch.equal(final["v"], tensors["v"].float())
    assert torch.equal(final["w"], torch.cat([tensors["a"], tensors["b"].mT.reshape(30, 6).float()]))
    assert placer.wrong_rows() == []


def test_scales_that_are_exponents_become_numbers_or_stay_bytes():
    tensors = {"e": torch.tensor([[0, 1], [127, 254], [130, 255]], dtype=torch.uint8)}
    final = {"w": torch.zeros(6, 2)} | {name: torch.zeros(3, 2, dtype=torch.uint8) for name in ("b", "b.scale")}
    moves = [
        Move("e", "uint8", "w", Part("e", 0, (3, 2), repeats=2), None, 0),
        Move("e", "uint8", "b", Part("e", 0, (3, 2)), None, 0),
        Move("e", "uint8", "b.scale", Part("e", 0, (3, 2)), None, 0),
    ]
    placer = place_all(tensors, final, moves, chunk_bytes=128)
    assert final["w"][:4].tolist() == [[2.0**-127, 2.0**-126]] * 2 + [[1.0, 2.0**127]] * 2
    assert final["w"][4:, 0].tolist() == [8.0, 8.0]
    assert torch.equal(final["b"], tensors["e"])
    assert torch.equal(final["b.scale"], tensors["e"])
    assert placer.wrong_rows() == [(moves[0], 2, None), (moves[2], 2, None)], "in codes 255 is a byte like any other"


@pytest.mark.each_pair
@pytest.mark.parametrize("scheme", [FP8, FP8_TENSOR, FP8_BLOCK, INT8, MXFP4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("chunk_bytes", [700, 100_000])
def test_placer_puts_codes_and_scales_in_the_rows_of_the_part(scheme, is_transposed, chunk_bytes):
    upright = torch.randn(256, 64).bfloat16()
    tensors = {"t": upright.t().contiguous() if is_transposed else upright}
    shape = (64, 256) if is_transposed else (256, 64)
    final = empty_planes(scheme, (512, 64))
    move = Move("t", "bfloat16", "w", Part("t", 128, shape, is_transposed=is_transposed), scheme, 0)
    place_all(tensors, final, [move], chunk_bytes=chunk_bytes)
    amax = upright.float().abs().max().view(1) if scheme.is_whole_tensor else None
    codes, scales = quantize(upright.float(), scheme, amax)
    assert torch.equal(bits(final["w"][128:384]), bits(codes))
    first = 128 // scheme.block_rows
    assert torch.equal(bits(final["w.scale"][first : first + len(scales)]), bits(scales))
    assert not bits(final["w"][:128]).any(), "rows of others were written"
    assert not bits(final["w.scale"][first + len(scales) :]).any(), "scales of others were written"


def test_placer_reports_wrong_rows_by_move_and_row():
    tensors = {"a": torch.randn(30, 4), "b": torch.randn(30, 4)}
    tensors["b"][[12, 25], 1] = float("inf")
    head = tensors["a"].clone()
    head[[8, 9], 0] += 1
    moves = [
        Move("a", "float32", "a", Part("a", 0, (30, 4)), None, 0),
        Move("b", "float32", "b", Part("b", 0, (30, 4), rows=(10, 30)), None, 0),
    ]
    tied = [Move("c", "float32", "a", Part("c", 0, (30, 4)), None, 0)]
    final = {"a": torch.zeros(30, 4), "b": torch.zeros(20, 4)}
    placer = place_all(tensors | {"c": head}, final, moves, tied, chunk_bytes=64)
    assert placer.wrong_rows() == [(moves[1], 12, None), (tied[0], None, 8)]
    assert torch.equal(final["a"], tensors["a"]), "tied weights are compared, not written"


@pytest.mark.parametrize("chunk_bytes", [32, 4096])
def test_placer_repeats_a_stored_scale_over_its_rows(chunk_bytes):
    tensors = {"s": torch.rand(5, 3), "one": torch.rand(())}
    final = {"w.scale": torch.zeros(10, 3), "x.scale": torch.zeros(7)}
    moves = [
        Move("s", "float32", "w.scale", Part("s", 0, (5, 3), repeats=2), None, 0),
        Move("one", "float32", "x.scale", Part("one", 0, (), repeats=7), None, 0),
    ]
    place_all(tensors, final, moves, chunk_bytes=chunk_bytes)
    assert torch.equal(final["w.scale"], tensors["s"].repeat_interleave(2, 0))
    assert torch.equal(final["x.scale"], tensors["one"].expand(7))


@pytest.mark.parametrize(("on_gpu", "interpreted"), [(True, False), (True, True), (False, False)])
def test_placer_on_a_gpu_tries_addresses_before_tensors(on_gpu, interpreted, monkeypatch):
    requested = []

    class ByAddress:
        def __init__(self, *_):
            pass

        def place(self, piece, address):
            requested.append((piece.move, address))
            return piece.move == 0

    monkeypatch.setattr(placing, "AddressPlacer", ByAddress)
    monkeypatch.setattr(placing, "can_run", lambda tensor: on_gpu)
    monkeypatch.setattr(placing, "is_interpreted", lambda: interpreted)
    tensors = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    final = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}
    moves = [Move(name, "float32", name, Part(name, 0, (4, 4)), None, 0) for name in "ab"]
    place_all(tensors, final, moves)
    is_tried = on_gpu and not interpreted
    assert [move for move, _ in requested] == ([0, 1] if is_tried else [])
    assert all(address for _, address in requested)
    assert torch.equal(final["b"], tensors["b"])
    assert torch.equal(final["a"], tensors["a"]) != is_tried, "done twice, or not at all"

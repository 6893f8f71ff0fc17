"""Placing by addresses against placing by tensors: kernels run in the interpreter, over host memory at the addresses."""

import ctypes

import pytest
import torch

from for_each import for_each
from holdfast.kernels.load import place_kernels
from holdfast.kernels.load.place_kernels import UNSEEN, UNSPECIALIZED, Pointer
from holdfast.loading.execution.place import AddressPlacer, Placer, chunk_views
from holdfast.loading.execution.ring import cut_chunks
from holdfast.loading.planning.moves import Move
from holdfast.models.parameters import Part
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WEIGHT_SCHEMES
from kernels.triton_cases import QUIET
from loading.mixed_model import bits
from loading.tensor_source import TensorSource
from pointer_bounds import BOUNDS

pytestmark = [QUIET, pytest.mark.skipif(torch.cuda.is_available(), reason="test_execute_gpu.py has the real thing")]

KERNELS = ("_place_plain_kernel", "_find_amax_kernel", "_by_row_kernel", "_by_block_kernel", "_by_power_kernel")


class AtAddresses:
    """An interpreted kernel that takes pointers, and gives a program like a compiled one."""

    def __init__(self, kernel, log, is_program=False):
        self.kernel, self.log, self.is_program = kernel, log, is_program

    def __getitem__(self, grid):
        assert len(grid) == (3 if self.is_program else 1)

        def launch(*arguments, **options):
            assert set(options) == (set() if self.is_program else {"num_warps"})
            named = zip(self.kernel.arg_names, arguments, strict=False)
            pointers = [
                value.address for name, value in named if name not in UNSPECIALIZED and isinstance(value, Pointer)
            ]
            assert len(pointers) in (1, 2), "no pointers that the compiler specializes on"
            self.log.append((self.is_program, all(address % 16 == 0 for address in pointers)))
            self.kernel[grid[:1]](*map(self._tensor, arguments), **options)
            return AtAddresses(self.kernel, self.log, is_program=True)

        return launch

    @staticmethod
    def _tensor(argument):
        """The interpreter goes where the address says, however few elements a tensor has."""
        if not isinstance(argument, Pointer):
            return argument
        memory = (ctypes.c_uint8 * argument.dtype.itemsize).from_address(argument.address)
        return torch.frombuffer(memory, dtype=argument.dtype)


@pytest.fixture
def launches(monkeypatch):
    """For every launch: the program was cached, and all relevant addresses were aligned."""
    log = []
    monkeypatch.setattr(
        BOUNDS, "check", lambda verb, pointers, mask: None
    )  # an address does not tell how far it reaches
    for name in KERNELS:
        monkeypatch.setattr(place_kernels, name, AtAddresses(getattr(place_kernels, name), log))
    return log


def place_both_ways(tensors, planes, moves, tied=(), chunk_bytes=4096):
    """Final tensors and findings, by addresses and by tensors; and what the address placer said of every piece."""
    jobs, results, taken = [*moves, *tied], [], []
    source = TensorSource(tensors=tensors)
    chunks = list(cut_chunks(moves, tied, chunk_bytes))
    for by_address in (True, False):
        final = {name: plane.clone() for name, plane in planes.items()}
        findings, amax = torch.zeros(len(jobs), 2, dtype=torch.int32), torch.zeros(len(moves))
        placer = Placer(moves, tied, final, findings, amax)
        addresses = AddressPlacer(jobs, len(moves), final, findings, amax)
        memory = torch.zeros(1024 + max(chunk.num_bytes for chunk in chunks), dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256 :][: max(chunk.num_bytes for chunk in chunks)]
        views = chunk_views(memory, jobs)
        for chunk in chunks:
            for piece in chunk.pieces:
                out = memory[piece.offset : piece.offset + piece.num_bytes].numpy().data
                source.read_into(
                    jobs[piece.move].tensor, piece.read.row_start, piece.read.row_end, out, piece.read.columns
                )
            for piece in chunk.pieces:
                if by_address:
                    taken.append(addresses.place(piece, views.address))
                if not by_address or not taken[-1]:
                    placer.place(piece, views)
        results.append(({name: bits(plane).clone() for name, plane in final.items()}, findings, amax))
    (final, findings, amax), (wanted, wanted_findings, wanted_amax) = results
    assert all(torch.equal(final[name], wanted[name]) for name in wanted)
    assert torch.equal(findings, wanted_findings)
    assert torch.equal(amax, wanted_amax)
    return taken, findings


def planes_for(scheme, shape, dtype=torch.float16):
    if scheme is None:
        return {"w": torch.zeros(shape, dtype=dtype)}
    planes = scheme.planes(shape)
    return {f"w{plane.suffix}": torch.zeros(plane.shape, dtype=getattr(torch, plane.dtype)) for plane in planes}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "scheme", [None, *WEIGHT_SCHEMES.values()], ids=lambda scheme: scheme.name if scheme else "plain"
)
@pytest.mark.parametrize(
    ("columns", "chunk_bytes"), [(None, 3000), ((64, 192), 200_000)], ids=["rows in pieces", "columns at once"]
)
def test_place_by_addresses_matches_tensors(launches, scheme, columns, chunk_bytes):
    """Three tensors, of which two are parts of one weight and one has rows and columns taken from it."""
    scheme = scheme and scheme.with_parts((16,))
    tensors = {name: torch.randn(rows, 256).bfloat16() for name, rows in (("a", 16), ("b", 16), ("c", 40))}
    tensors["b"][7, 70] = torch.nan
    width = 256 if columns is None else 128
    moves = [
        Move("a", "bfloat16", "w", Part("a", 16, (16, 256), columns=columns), scheme, 0),
        Move("b", "bfloat16", "w", Part("b", 0, (16, 256), columns=columns), scheme, 0),
        Move("c", "bfloat16", "w", Part("c", 32, (40, 256), (20, 36), columns), scheme, 0),
    ]
    taken, findings = place_both_ways(tensors, planes_for(scheme, (48, width)), moves, chunk_bytes=chunk_bytes)
    assert all(taken)
    assert findings.tolist() == [[UNSEEN, UNSEEN], [7, UNSEEN], [UNSEEN, UNSEEN]]
    assert len(launches) >= len(taken)
    assert sum(is_program for is_program, _ in launches) > 0, "a program was found anew for every launch"
    assert all(is_aligned for is_program, is_aligned in launches if is_program)


def test_place_exponents_become_floats_or_stay_bytes(launches):
    tensors = {"a": torch.arange(6 * 40).to(torch.uint8).view(6, 40), "b": torch.full((3, 1), 130, dtype=torch.uint8)}
    tensors["a"][4, 3] = 255
    moves = [
        Move("a", "uint8", "w", Part("a", 2, (6, 40)), None, 0),
        Move("a", "uint8", "c", Part("a", 1, (6, 40)), None, 0),
        Move("a", "uint8", "c.scale", Part("a", 1, (6, 40)), None, 0),
        Move("b", "uint8", "v", Part("b", 0, (3, 1), repeats=4), None, 0),
    ]
    planes = {"w": torch.zeros(8, 40), "v": torch.zeros(12)}
    planes |= {name: torch.zeros(7, 40, dtype=torch.uint8) for name in ("c", "c.scale")}
    taken, findings = place_both_ways(tensors, planes, moves, chunk_bytes=256)
    assert taken[0]
    assert not taken[-1], "repeated rows go by tensors"
    assert findings.tolist() == [[4, UNSEEN], [UNSEEN, UNSEEN], [4, UNSEEN], [UNSEEN, UNSEEN]]
    assert launches


@for_each("scheme", [None, FP8, INT8, FP8_TENSOR])
def test_place_odd_width_rows_choose_the_program_by_alignment(launches, scheme):
    tensors = {"a": torch.randn(20, 33)}
    moves = [Move("a", "float32", "w", Part("a", 5, (20, 33)), scheme, 0)]
    taken, _ = place_both_ways(tensors, planes_for(scheme, (25, 33)), moves, chunk_bytes=400)
    assert all(taken)
    assert {is_aligned for is_program, is_aligned in launches if not is_program} >= {False}
    assert all(is_aligned for is_program, is_aligned in launches if is_program)


@for_each("stored", ["float64", "float32", "float16", "bfloat16"])
@for_each("final", [torch.float32, torch.float16])
def test_place_vector_converts_its_dtype(launches, stored, final):
    tensors = {"v": torch.randn(300).to(getattr(torch, stored))}
    moves = [Move("v", stored, "w", Part("v", 100, (300,)), None, 0)]
    taken, _ = place_both_ways(tensors, {"w": torch.zeros(400, dtype=final)}, moves, chunk_bytes=512)
    assert all(taken)


@for_each("scheme", [None, FP8, INT8, FP8_BLOCK, MXFP4])
def test_place_tied_weights_are_compared(launches, scheme):
    scheme = scheme and scheme.with_parts((16,))
    tensors = {"a": torch.randn(32, 64), "t": torch.zeros(32, 64), "u": torch.zeros(32, 64)}
    tensors["t"], tensors["u"] = tensors["a"].clone(), tensors["a"].clone()
    tensors["u"][[9, 30]] += 10
    moves = [Move("a", "float32", "w", Part("a", 0, (32, 64)), scheme, 0)]
    tied = [Move(name, "float32", "w", Part(name, 0, (32, 64)), scheme, 0) for name in "tu"]
    taken, findings = place_both_ways(tensors, planes_for(scheme, (32, 64), torch.float32), moves, tied, 3000)
    assert all(taken)
    assert findings[:, 1].tolist() == [UNSEEN, UNSEEN, 9 if scheme is None or scheme.block_rows == 1 else 0]


def test_place_transposed_or_repeated_rows_fall_back_to_tensors(launches):
    tensors = {"t": torch.randn(2, 8, 16), "s": torch.rand(5, 3)}
    moves = [
        Move("t", "float32", "w", Part("t", 0, (2, 8, 16), is_transposed=True), None, 0),
        Move("s", "float32", "r", Part("s", 0, (5, 3), repeats=2), None, 0),
    ]
    planes = {"w": torch.zeros(32, 8), "r": torch.zeros(10, 3)}
    taken, _ = place_both_ways(tensors, planes, moves)
    assert not any(taken)
    assert launches == []


def test_place_moves_of_unplaceable_types_are_refused(launches):
    tensors = {"a": torch.zeros(4, 8, dtype=torch.int32)}
    for scheme, dtype in ((None, torch.float32), (FP8, torch.float16)):
        moves = [Move("a", "int32", "w", Part("a", 0, (4, 8)), scheme, 0)]
        with pytest.raises(AssertionError, match=r"into torch\.float32|is not quantized"):
            place_both_ways(tensors, planes_for(scheme, (4, 8), dtype), moves)

"""AddressPlacer: pieces into their place on a GPU by addresses alone, for the rows that most of a checkpoint consists of.

A view costs about as much as a launch, and a piece would need half a dozen. Here everything about the moves of a target is
worked out once, and a piece is some sums of integers and one launch. The kernels, and so the results, are the same.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.kernels.numbers.number_bits import as_bits, as_kernels_read
from holdfast.kernels.placing.place_codes import codes_launch
from holdfast.kernels.placing.place_plain import peak_launch, plain_launch
from holdfast.kernels.placing.place_rows import E8M0, FLOATS, is_placeable, seen_columns
from holdfast.kernels.placing.row_launch import Pointer, RowLaunch
from holdfast.loading.execution.chunks import Piece
from holdfast.loading.planning.move import Move
from holdfast.quant.weight_schemes import SCALE_SUFFIX, WeightScheme

FINDING_BYTES = PEAK_BYTES = 4


class _Lane(NamedTuple):
    """Rows of one kind on their way to one target."""

    launch: RowLaunch
    find_peak: RowLaunch | None
    shift: int
    """Bytes from the begin of a row to the first column that the kernel sees."""
    target: int
    """The address of row 0; and of its scale."""
    row_bytes: int
    scales: int
    scale_row_bytes: int
    block_rows: int
    leading: tuple[Pointer | None, ...]
    """As the kernel takes them; these are among them, set before every launch."""
    p_x: Pointer
    p_y: Pointer
    p_scales: Pointer | None
    p_peak: Pointer | None
    p_nonfinite: Pointer
    p_differing: Pointer


class AddressPlacer:
    """Keeps no tensors: whoever has it keeps them, and starts kernels on one stream."""

    def __init__(
        self,
        jobs: Sequence[Move],
        num_moves: int,
        tensors: Mapping[str, torch.Tensor],
        findings: torch.Tensor,
        peaks: torch.Tensor,
    ) -> None:
        """`jobs` are the moves and the twins behind them; `findings` and `peaks` have a row for every one."""
        self._jobs = jobs
        self._num_moves = num_moves
        self._tensors = tensors
        self._findings = findings.data_ptr()
        self._peaks = peaks.data_ptr()
        self._lanes: dict[object, _Lane] = {}

    def place(self, piece: Piece, chunk: int) -> bool:
        """Start the kernels of a piece in the chunk at this address; False: its rows lie in a way that is not known here."""
        index = piece.move
        move = self._jobs[index]
        part = move.part
        if part.is_transposed or part.repeats != 1:
            return False
        verify = index >= self._num_moves
        key = move.target, move.tensor_dtype, id(move.scheme), part.columns, part.shape[-1:], part.joined_rows, verify
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._new_lane(move, verify)
        row = piece.row - (part.rows[0] if part.rows else 0)
        x = chunk + piece.offset
        if lane.p_peak is not None:
            lane.p_peak.address = self._peaks + PEAK_BYTES * index
            if piece.finds_peak:
                assert lane.find_peak is not None, f"{move} has no peak"
                lane.p_x.address = x
                lane.find_peak.start_at(piece.num_rows, x, lane.p_x, lane.p_peak)
        if not piece.places:
            return True
        place = part.row_start + row
        lane.p_x.address = x = x + lane.shift
        lane.p_y.address = y = lane.target + place * lane.row_bytes
        lane.p_nonfinite.address = finding = self._findings + 2 * FINDING_BYTES * index
        lane.p_differing.address = finding + FINDING_BYTES
        if lane.p_scales is not None:
            lane.p_scales.address = lane.scales + place // lane.block_rows * lane.scale_row_bytes
        lane.launch.start_at(piece.num_rows, x | y, *lane.leading, row)
        return True

    def _new_lane(self, move: Move, verify: bool) -> _Lane:
        source, target = getattr(torch, move.tensor_dtype), self._tensors[move.target]
        assert target.is_contiguous(), f"{move.target}: rows lie apart"
        num_columns, kept = move.num_read_columns, move.kept_columns
        x = torch.empty(0, dtype=source)
        assert is_placeable(source, target.dtype) or move.scheme is not None, f"{move}: into {target.dtype}"
        if move.scheme is not None:
            return self._new_codes_lane(move, move.scheme, x, target, verify)
        if move.keeps_exponents and target.dtype == torch.uint8:
            x, target = x.view(E8M0), target.view(E8M0)
        p_x = Pointer((as_bits(x) if x.dtype == target.dtype else as_kernels_read(x)).dtype)
        p_y, p_nonfinite, p_differing = Pointer(as_bits(target).dtype), Pointer(torch.int32), Pointer(torch.int32)
        width = kept[1] - kept[0]
        return _Lane(
            launch=plain_launch(x.dtype, target.dtype, width, (num_columns, 1), (width, 1), verify),
            find_peak=None,
            shift=kept[0] * x.element_size(),
            target=target.data_ptr(),
            row_bytes=width * target.element_size(),
            scales=0,
            scale_row_bytes=0,
            block_rows=1,
            leading=(p_x, p_y, p_nonfinite, p_differing),
            p_x=p_x,
            p_y=p_y,
            p_scales=None,
            p_peak=None,
            p_nonfinite=p_nonfinite,
            p_differing=p_differing,
        )

    def _new_codes_lane(
        self, move: Move, scheme: WeightScheme, x: torch.Tensor, target: torch.Tensor, verify: bool
    ) -> _Lane:
        num_columns, kept, width = move.num_read_columns, move.kept_columns, scheme.block_columns
        scales = self._tensors[move.target + SCALE_SUFFIX]
        seen = seen_columns(num_columns, kept, scheme)
        assert x.dtype in FLOATS, f"{move}: is not quantized"
        assert scales.is_contiguous(), f"{move.target}: scales lie apart"
        assert not width or scales.shape[-1] == -(-(kept[1] - kept[0]) // width), f"{move}: {scales.shape=}"
        assert not (verify and scheme.is_whole_tensor), f"{move}: a twin has no peak"
        p_x, p_y, p_scales = (Pointer(read.dtype) for read in (as_kernels_read(x), as_bits(target), as_bits(scales)))
        p_nonfinite, p_differing = Pointer(torch.int32), Pointer(torch.int32)
        p_peak = Pointer(torch.int32) if scheme.is_whole_tensor else None
        peaks = () if width else (p_peak,)
        return _Lane(
            launch=codes_launch(
                scheme, seen[1] - seen[0], (kept[0] - seen[0], kept[1] - seen[0]), (num_columns, 1), verify
            ),
            find_peak=peak_launch(num_columns, (num_columns, 1)) if scheme.is_whole_tensor else None,
            shift=seen[0] * x.element_size(),
            target=target.data_ptr(),
            row_bytes=(kept[1] - kept[0]) // scheme.codes_per_byte,
            scales=scales.data_ptr(),
            scale_row_bytes=(scales.shape[-1] if width else 1) * scales.element_size(),
            block_rows=scheme.block_rows,
            leading=(p_x, p_y, p_scales, *peaks, p_nonfinite, p_differing),
            p_x=p_x,
            p_y=p_y,
            p_scales=p_scales,
            p_peak=p_peak,
            p_nonfinite=p_nonfinite,
            p_differing=p_differing,
        )

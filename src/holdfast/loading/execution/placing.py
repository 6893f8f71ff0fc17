"""Placer: a piece of a chunk into its place among the final weights, and what was found wrong with it on the way.

R rows of a piece, C columns that are read of each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.kernels.placing.place_rows import E8M0, UNSEEN, Findings, find_peak, place_plain, place_quantized
from holdfast.kernels.triton_compat import can_run, is_interpreted
from holdfast.loading.execution.address_placing import AddressPlacer
from holdfast.loading.execution.chunks import Piece
from holdfast.loading.planning.move import Move
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.weight_schemes import SCALE_SUFFIX, WeightScheme


class ChunkViews(dict[str, torch.Tensor]):
    """The bytes of a chunk as flat tensors, by the name of their type; and where they lie."""

    address: int


def chunk_views(chunk: torch.Tensor, moves: Sequence[Move]) -> ChunkViews:
    """A chunk of bytes in every type that these moves read."""
    dtypes = {move.tensor_dtype for move in moves}
    views = ChunkViews({dtype: chunk.view(getattr(torch, dtype)) for dtype in dtypes})
    views.address = chunk.data_ptr()
    return views


class _Route(NamedTuple):
    """Where the pieces of one move go: worked out once, so that a piece costs a few views and a kernel."""

    dtype: str
    element_bytes: int
    num_columns: int
    """That are read."""
    kept: tuple[int, int]
    is_transposed: bool
    first_row: int
    """Of the move, in the tensor."""
    row_start: int
    """Of the target."""
    repeats: int
    scheme: WeightScheme | None
    target: torch.Tensor
    """All of it, as rows."""
    scales: torch.Tensor | None
    findings: Findings
    peak: torch.Tensor | None
    verify: bool


class Placer:
    """Knows the way of every move. `findings` and `peaks` are tensors of the staging, with a row for every move."""

    def __init__(
        self,
        moves: Sequence[Move],
        twins: Sequence[Move],
        tensors: Mapping[str, torch.Tensor],
        findings: torch.Tensor,
        peaks: torch.Tensor,
    ) -> None:
        self._jobs = (*moves, *twins)
        self._num_moves = len(moves)
        self._tensors = tensors
        self._findings = findings
        self._flat_findings = findings.view(-1)
        self._peaks = peaks
        self._route: _Route | None = None
        self._route_index = -1
        self._planes: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._by_address: AddressPlacer | None = None
        if can_run(findings) and not is_interpreted():
            self._by_address = AddressPlacer(self._jobs, len(moves), tensors, findings, peaks)
        findings.fill_(UNSEEN)
        peaks.zero_()

    def place(self, piece: Piece, views: ChunkViews) -> None:
        """Convert or quantize the piece, which lies in the chunk, into its place; or compare it with what lies there."""
        if self._by_address is not None and self._by_address.place(piece, views.address):
            return
        if piece.move != self._route_index:
            self._route, self._route_index = self._find_route(piece.move), piece.move
        route = self._route
        assert route is not None, f"no way for {piece}"
        rows_RC = _rows_of(piece, route, views[route.dtype])
        if route.target.dtype == E8M0:
            rows_RC = rows_RC.view(E8M0)
        if piece.finds_peak:
            assert route.peak is not None, f"{self._jobs[piece.move]} has no peak"
            find_peak(rows_RC, route.peak)
        if not piece.places:
            return
        row = piece.row - route.first_row
        if route.scales is not None:
            _quantize(rows_RC, route, row)
        elif route.repeats == 1:
            out_RK = route.target.narrow(0, route.row_start + row, piece.num_rows)
            place_plain(rows_RC, route.kept, out_RK, row, route.findings, route.verify)
        else:
            _repeat(rows_RC, route, row)

    def wrong_rows(self) -> list[tuple[Move, int | None, int | None]]:
        """Moves with which something was wrong: the first row that is not finite, and that differs, in the tensor's rows."""
        found: list[tuple[Move, int | None, int | None]] = []
        findings = self._findings.cpu()
        for index in (findings != UNSEEN).any(dim=1).nonzero().flatten().tolist():
            move = self._jobs[index]
            first = move.part.row_range[0]
            nonfinite, differing = (None if row == UNSEEN else first + row for row in findings[index].tolist())
            found.append((move, nonfinite, differing))
        return found

    def _find_route(self, index: int) -> _Route:
        move = self._jobs[index]
        scheme, part = move.scheme, move.part
        target, scales = self._planes.get(move.target) or self._find_planes(move)
        findings = self._flat_findings
        return _Route(
            dtype=move.tensor_dtype,
            element_bytes=DTYPE_BYTES[move.tensor_dtype],
            num_columns=move.num_read_columns,
            kept=move.kept_columns,
            is_transposed=part.is_transposed,
            first_row=part.row_range[0],
            row_start=part.row_start,
            repeats=part.repeats,
            scheme=scheme,
            target=target,
            scales=scales,
            findings=Findings(findings.narrow(0, 2 * index, 1), findings.narrow(0, 2 * index + 1, 1)),
            peak=self._peaks.narrow(0, index, 1) if scheme is not None and scheme.is_whole_tensor else None,
            verify=index >= self._num_moves,
        )

    def _find_planes(self, move: Move) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target and its scales as rows; one scale a row is a vector."""
        scheme, target = move.scheme, self._tensors[move.target]
        num_columns, scales = move.part.num_columns, None
        if scheme is not None:
            num_columns //= scheme.codes_per_byte
            scales = self._tensors[move.target + SCALE_SUFFIX]
            scales = scales.view(-1) if scheme.block_columns == 0 else scales.view(-1, scales.shape[-1])
        if move.keeps_exponents and target.dtype == torch.uint8:
            target = target.view(E8M0)
        self._planes[move.target] = target.view(-1, num_columns), scales
        return self._planes[move.target]


def _rows_of(piece: Piece, route: _Route, chunk: torch.Tensor) -> torch.Tensor:
    """The rows as they are meant, whichever way they lie in the chunk."""
    shape = (piece.num_rows, route.num_columns)
    strides = (1, piece.num_rows) if route.is_transposed else (route.num_columns, 1)
    return chunk.as_strided(shape, strides, chunk.storage_offset() + piece.offset // route.element_bytes)


def _quantize(rows_RC: torch.Tensor, route: _Route, row: int) -> None:
    scheme, scales = route.scheme, route.scales
    assert scheme is not None, f"{route} is not quantized"
    assert scales is not None, f"{route} has no scales"
    place, num_rows = route.row_start + row, rows_RC.shape[0]
    codes = route.target.narrow(0, place, num_rows)
    block_rows = scheme.block_rows
    scales = scales.narrow(0, place // block_rows, -(-num_rows // block_rows))
    place_quantized(rows_RC, route.kept, scheme, codes, scales, route.peak, row, route.findings, route.verify)


def _repeat(rows_RC: torch.Tensor, route: _Route, row: int) -> None:
    """Every row several times: stored scales, of which there are few."""
    for index in range(rows_RC.shape[0]):
        same_RC = rows_RC.narrow(0, index, 1).expand(route.repeats, -1)
        out_RK = route.target.narrow(0, route.row_start + (row + index) * route.repeats, route.repeats)
        place_plain(same_RC, route.kept, out_RK, row + index, route.findings, route.verify)

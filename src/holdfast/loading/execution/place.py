"""Placer: writes a piece of a chunk into the final weights, and records wrong rows.

Two paths launch the same kernels: with tensors on any device, with addresses on a GPU (AddressPlacer). A view costs
about as much as a launch, and a piece would need half a dozen. With addresses, all values of a target's moves are
computed once. A piece then costs a few integer additions and one launch.

R rows of a piece, C columns read of each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import torch

from holdfast.kernels.fp8 import as_bits, as_kernels_read
from holdfast.kernels.load.place_kernels import (
    UNSEEN,
    Findings,
    Pointer,
    RowLaunch,
    amax_launch,
    codes_launch,
    plain_launch,
)
from holdfast.kernels.load.place_planes import place_plane
from holdfast.kernels.load.place_rows import (
    E8M0,
    FLOATS,
    find_amax,
    is_placeable,
    place_plain,
    place_quantized,
    seen_columns,
)
from holdfast.kernels.native_library import native_library
from holdfast.kernels.triton_compat import can_run, is_interpreted
from holdfast.loading.execution.ring import Piece
from holdfast.loading.planning.moves import Move
from holdfast.loading.sources.source import TileSource, WeightSource
from holdfast.quant.formats import DTYPE_BYTES
from holdfast.quant.packed_weight import plane_bytes
from holdfast.quant.weight_schemes import SCALE_SUFFIX

FINDING_BYTES = AMAX_BYTES = 4


class _Lane(NamedTuple):
    """Prepared launch for one kind of rows of one target; its pointers are set before every launch."""

    launch: RowLaunch
    find_amax: RowLaunch | None
    shift: int
    """Bytes from the beginning of a row to the first column that the kernel reads."""
    target: int
    row_bytes: int
    scales: int
    scale_row_bytes: int
    block_rows: int
    leading: tuple[Pointer | None, ...]
    """Kernel arguments, including the pointers below."""
    p_x: Pointer
    p_y: Pointer
    p_scales: Pointer | None
    p_amax: Pointer | None
    p_nonfinite: Pointer
    p_differing: Pointer


class AddressPlacer:
    """Launches kernels with raw addresses. Its owner keeps the tensors alive and uses one stream."""

    def __init__(
        self,
        jobs: Sequence[Move],
        num_moves: int,
        tensors: Mapping[str, torch.Tensor],
        findings: torch.Tensor,
        amax: torch.Tensor,
    ) -> None:
        """`jobs` are `num_moves` moves, then tied ones. `findings` has a row per job, `amax` one per untied move."""
        self._jobs = jobs
        self._num_moves = num_moves
        self._tensors = tensors
        self._findings = findings.data_ptr()
        self._amax = amax.data_ptr()
        self._lanes: dict[object, _Lane] = {}

    def place(self, piece: Piece, chunk: int) -> bool:
        """Launch the kernels of a piece in the chunk at this address; return False for a layout that is not supported."""
        index = piece.move
        move = self._jobs[index]
        part = move.part
        if part.is_transposed or part.repeats != 1 or move.packed is not None:
            return False
        verify = index >= self._num_moves
        key = move.target, move.tensor_dtype, id(move.scheme), part.columns, part.shape[-1:], part.joined_rows, verify
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = self._new_lane(move, verify)
        row = piece.row - (part.rows[0] if part.rows else 0)
        x = chunk + piece.offset
        if lane.p_amax is not None:
            lane.p_amax.address = self._amax + AMAX_BYTES * index
            if piece.finds_amax:
                assert lane.find_amax is not None, f"{move} has no amax"
                lane.p_x.address = x
                lane.find_amax.start_at(piece.num_rows, x, lane.p_x, lane.p_amax)
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
        target, scheme = self._tensors[move.target], move.scheme
        num_columns, kept = move.num_read_columns, move.kept_columns
        x = torch.empty(0, dtype=getattr(torch, move.tensor_dtype))
        scales = find_amax = p_scales = p_amax = None
        width, seen, num_scales = kept[1] - kept[0], kept, 0
        assert target.is_contiguous(), f"{move.target}: rows are not adjacent"
        if scheme is None:
            assert is_placeable(x.dtype, target.dtype), f"{move}: into {target.dtype}"
            if move.keeps_exponents and target.dtype == torch.uint8:
                x, target = x.view(E8M0), target.view(E8M0)
            read = as_bits(x) if x.dtype == target.dtype else as_kernels_read(x)
            launch = plain_launch(x.dtype, target.dtype, width, (num_columns, 1), (width, 1), verify)
        else:
            scales, read = self._tensors[move.target + SCALE_SUFFIX], as_kernels_read(x)
            seen = seen_columns(num_columns, kept, scheme)
            num_scales = -(-width // scheme.block_columns) if scheme.block_columns else 1
            assert x.dtype in FLOATS, f"{move}: is not quantized"
            assert scales.is_contiguous(), f"{move.target}: scales are not adjacent"
            assert not scheme.block_columns or scales.shape[-1] == num_scales, f"{move}: {scales.shape=}"
            assert not (verify and scheme.is_whole_tensor), f"{move}: a tied weight has no amax"
            p_scales = Pointer(as_bits(scales).dtype)
            if scheme.is_whole_tensor:
                p_amax, find_amax = Pointer(torch.int32), amax_launch(num_columns, (num_columns, 1))
            columns = kept[0] - seen[0], kept[1] - seen[0]
            launch = codes_launch(scheme, seen[1] - seen[0], columns, (num_columns, 1), verify)
        p_x, p_y, p_nonfinite, p_differing = map(Pointer, (read.dtype, as_bits(target).dtype, torch.int32, torch.int32))
        row_amax = () if scheme is None or scheme.block_columns else (p_amax,)
        return _Lane(
            launch=launch,
            find_amax=find_amax,
            shift=seen[0] * x.element_size(),
            target=target.data_ptr(),
            row_bytes=width * target.element_size() if scheme is None else width // scheme.codes_per_byte,
            scales=0 if scales is None else scales.data_ptr(),
            scale_row_bytes=0 if scales is None else num_scales * scales.element_size(),
            block_rows=1 if scheme is None else scheme.block_rows,
            leading=(p_x, p_y, *(() if p_scales is None else (p_scales,)), *row_amax, p_nonfinite, p_differing),
            p_x=p_x,
            p_y=p_y,
            p_scales=p_scales,
            p_amax=p_amax,
            p_nonfinite=p_nonfinite,
            p_differing=p_differing,
        )


class ChunkViews(dict[str, torch.Tensor]):
    """Views of a chunk: flat tensors by type name, raw bytes, and the address."""

    raw: torch.Tensor
    address: int


def chunk_views(chunk: torch.Tensor, moves: Sequence[Move]) -> ChunkViews:
    """Return views of a chunk in every type that these moves read."""
    dtypes = {move.tensor_dtype for move in moves}
    views = ChunkViews({dtype: chunk.view(getattr(torch, dtype)) for dtype in dtypes})
    views.raw, views.address = chunk, chunk.data_ptr()
    return views


class _Route(NamedTuple):
    """Destination of the pieces of one move, computed once, so that a piece costs a few views and a kernel."""

    move: Move
    num_columns: int
    kept: tuple[int, int]
    target: torch.Tensor
    scales: torch.Tensor | None
    findings: Findings
    amax: torch.Tensor | None
    verify: bool


class Placer:
    """Places the pieces of every move. `findings` and `amax` are staging tensors with a row for every move."""

    def __init__(
        self,
        moves: Sequence[Move],
        tied: Sequence[Move],
        tensors: Mapping[str, torch.Tensor],
        findings: torch.Tensor,
        amax: torch.Tensor,
    ) -> None:
        self._jobs = (*moves, *tied)
        self._num_moves = len(moves)
        self._tensors = tensors
        self._findings = findings
        self._flat_findings = findings.view(-1)
        self._amax = amax
        self._route: _Route | None = None
        self._route_index = -1
        self._planes: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._by_address: AddressPlacer | None = None
        if can_run(findings) and not is_interpreted():
            self._by_address = AddressPlacer(self._jobs, len(moves), tensors, findings, amax)
        findings.fill_(UNSEEN)
        amax.zero_()

    def place(self, piece: Piece, views: ChunkViews) -> None:
        """Convert or quantize the piece into its target; compare it for a tied weight."""
        if self._by_address is not None and self._by_address.place(piece, views.address):
            return
        if self._jobs[piece.move].packed is not None:
            self._place_packed(piece, views)
            return
        if piece.move != self._route_index:
            self._route, self._route_index = self._find_route(piece.move), piece.move
        route = self._route
        assert route is not None, f"no way for {piece}"
        rows_RC = _rows_of(piece, route, views[route.move.tensor_dtype])
        if route.target.dtype == E8M0:
            rows_RC = rows_RC.view(E8M0)
        if piece.finds_amax:
            assert route.amax is not None, f"{self._jobs[piece.move]} has no amax"
            find_amax(rows_RC, route.amax)
        if not piece.places:
            return
        part = route.move.part
        row = piece.row - part.row_range[0]
        if route.scales is not None:
            _quantize(rows_RC, route, row)
        elif part.repeats == 1:
            out_RK = route.target.narrow(0, part.row_start + row, piece.num_rows)
            place_plain(rows_RC, route.kept, out_RK, row, route.findings, route.verify)
        else:
            _repeat(rows_RC, route, row)

    def _place_packed(self, piece: Piece, views: ChunkViews) -> None:
        """Copy the piece's rows of every plane. `TilePlacer` has placed rows of tiles, `check_tied` has compared tied ones."""
        move, index = self._jobs[piece.move], piece.move
        assert move.packed is not None, f"{move.target} is not packed"
        assert index < self._num_moves, f"{move.tensor} was not compared before the load"
        if move.packed.row_group > 1:
            return
        own = plane_bytes(
            move.packed, piece.num_rows, move.part.num_columns, views.raw.narrow(0, piece.offset, piece.num_bytes)
        )
        row = piece.row - move.part.row_range[0]
        finding = self._flat_findings.narrow(0, 2 * index, 1)
        planes = [plane for plane in move.packed.planes if not plane.is_shared]
        for plane, bytes_RB, (name, width) in zip(planes, own, move.planes, strict=True):
            target = self._tensors[name].view(-1, width).narrow(0, move.part.row_start + row, piece.num_rows)
            place_plane(bytes_RB, target, plane, row, finding)

    def wrong_rows(self) -> list[tuple[Move, int | None, int | None]]:
        """Return each wrong move, its first non-finite row and its first row that differs."""
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
        scheme = move.scheme
        target, scales = self._planes.get(move.target) or self._find_planes(move)
        findings = self._flat_findings
        return _Route(
            move=move,
            num_columns=move.num_read_columns,
            kept=move.kept_columns,
            target=target,
            scales=scales,
            findings=Findings(findings.narrow(0, 2 * index, 1), findings.narrow(0, 2 * index + 1, 1)),
            amax=self._amax.narrow(0, index, 1) if scheme is not None and scheme.is_whole_tensor else None,
            verify=index >= self._num_moves,
        )

    def _find_planes(self, move: Move) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the target and its scales as rows; one scale per row is a vector."""
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


class TilePlacer:
    """Places rows of tiles in the thread that reads them: blocks go from its buffer to their final place in one pass."""

    def __init__(
        self, source: WeightSource, moves: Sequence[Move], tensors: Mapping[str, torch.Tensor], findings: torch.Tensor
    ) -> None:
        """`findings` has a row per move, as for `Placer`."""
        self._source = source
        self._moves = moves
        self._tensors = tensors
        self._findings = findings
        self._lock = Lock()
        native_library()  # compiled before there are threads

    def place(self, piece: Piece) -> None:
        """Read a piece into its tiles. Thread-safe: no two pieces have a row in common."""
        move = self._moves[piece.move]
        assert isinstance(self._source, TileSource), f"{move.tensor} cannot be read into tiles"
        assert move.packed is not None, f"{move.target} is not packed"
        (name, width), group = move.planes[0], move.packed.row_group
        row = piece.row - move.part.row_range[0]
        first = (move.part.row_start + row) // group
        tiles_GX = self._tensors[name].view(-1, width)[first : first + piece.num_rows // group]
        rows = piece.read.row_start, piece.read.row_end
        wrong = self._source.read_tiles(move.tensor, move.packed, rows, tiles_GX, piece.read.columns)
        if wrong is not None:
            with self._lock:
                self._findings[piece.move, 0].clamp_max_(wrong - rows[0] + row)


def _rows_of(piece: Piece, route: _Route, chunk: torch.Tensor) -> torch.Tensor:
    """Return the rows of a piece; transpose them if the checkpoint stores them transposed."""
    shape = (piece.num_rows, route.num_columns)
    strides = (1, piece.num_rows) if route.move.part.is_transposed else (route.num_columns, 1)
    return chunk.as_strided(
        shape, strides, chunk.storage_offset() + piece.offset // DTYPE_BYTES[route.move.tensor_dtype]
    )


def _quantize(rows_RC: torch.Tensor, route: _Route, row: int) -> None:
    scheme, scales = route.move.scheme, route.scales
    assert scheme is not None, f"{route} is not quantized"
    assert scales is not None, f"{route} has no scales"
    place, num_rows = route.move.part.row_start + row, rows_RC.shape[0]
    codes = route.target.narrow(0, place, num_rows)
    block_rows = scheme.block_rows
    scales = scales.narrow(0, place // block_rows, -(-num_rows // block_rows))
    place_quantized(rows_RC, route.kept, scheme, codes, scales, route.amax, row, route.findings, route.verify)


def _repeat(rows_RC: torch.Tensor, route: _Route, row: int) -> None:
    """Place every row several times. Only stored scales repeat, and they are few."""
    start, repeats = route.move.part.row_start, route.move.part.repeats
    for index in range(rows_RC.shape[0]):
        same_RC = rows_RC.narrow(0, index, 1).expand(repeats, -1)
        out_RK = route.target.narrow(0, start + (row + index) * repeats, repeats)
        place_plain(same_RC, route.kept, out_RK, row + index, route.findings, route.verify)

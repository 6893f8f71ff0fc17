"""Pooling of a step's rows into compressed entries (DeepSeek-V4): each sequence keeps running sums instead of tokens.

T rows, R tokens of an entry (its ratio, and its window), D elements of an entry, X = D columns, or 2 D if entries overlap,
P places for states, K sums of a state (quant/entry_state.py)

An entry is a weighted mean of tokens per channel; the weights are a softmax over their gates. Its tokens are the R of a window.
If entries overlap, the R before them join: their first D columns and the window's last D count. So a state is a pair of sums:
E of the current entry, and A of this window's first columns. At the end of a window A becomes E.

Positions decide which part of a state is valid. Before a window's first token A is empty, and so is E unless entries
overlap and there is an earlier window. What another sequence left in a place is never read. A sequence that resumes at
the start of a window without its state has the true state again after that window.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.entry_rows import (
    finished_vectors,
    load_turn,
    rotate_index_queries,
    rotated_latents,
    store_vector,
    turn_heads,
    write_entries,
    write_index_entries,
)
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes, bits_of_rope
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.kernels.operation import operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, jit, jit_counting, next_power_of_two, release_then_wait, tl
from holdfast.quant.entry_state import num_sums, state_shape

ROWS = 8
"""Most rows per loop iteration of a pooling program."""
ELEMENTS_PER_PROGRAM = 2048
"""Elements of index heads per program."""
ELEMENTS_PER_WARP = 128
"""Elements of an entry per warp. With fewer, sums across more warps take twice as long on an H200."""


class Compressor(NamedTuple):
    """Weights and sizes of the compressor of one layer, or of its index."""

    ratio: int
    is_overlapped: bool
    positions_RX: Tensor
    """float32 bias of a token's gates, by its position in its entry."""
    weight_D: Tensor
    """Weight of the RMSNorm of an entry."""
    eps: float

    @property
    def norm(self) -> LatentNorm:
        return LatentNorm(self.weight_D, self.eps)

    @property
    def dim(self) -> int:
        return self.weight_D.shape[0]


class PooledRows(NamedTuple):
    """Rows of a step, and the states of their sequences."""

    pooled_TX: Tensor
    """float32: X columns of values, then X of gates; rows may be strided."""
    positions_T: Tensor
    slots_T: Tensor
    """Slot of the entry that a row completes."""
    states_T: Tensor
    """Place of a row's sequence in `state_PK3D`; -1: padding."""
    state_PK3D: Tensor


class Sums(NamedTuple):
    """Running softmax sums of pooled tokens per channel, [..., D] each: the content of a state."""

    m: Tensor
    l: Tensor  # noqa: E741 the field's letter
    acc: Tensor

    @classmethod
    def of(cls, x: Tensor, gates: Tensor) -> "Sums":
        """Pool the tokens of dimension -2."""
        m = gates.amax(-2)
        weights = (gates - _finite(m).unsqueeze(-2)).exp()
        return cls(m, weights.sum(-2), (weights * x).sum(-2))

    @classmethod
    def empty(cls, like: Tensor) -> "Sums":
        """Return the sums of no tokens."""
        return cls(torch.full_like(like, -torch.inf), torch.zeros_like(like), torch.zeros_like(like))

    def merge(self, other: "Sums") -> "Sums":
        """Return the sums of the tokens of both."""
        m = torch.maximum(self.m, other.m)
        mine, theirs = (self.m - _finite(m)).exp(), (other.m - _finite(m)).exp()
        return Sums(m, self.l * mine + other.l * theirs, self.acc * mine + other.acc * theirs)

    def at(self, index: int | slice) -> "Sums":
        """Index the first dimension."""
        return Sums(self.m[index], self.l[index], self.acc[index])


def _finite(m: Tensor) -> Tensor:
    """Replace -inf, the maximum of no tokens, by any number: their weights are zero."""
    return torch.where(m == -torch.inf, 0.0, m)


def compress_entries_reference(step: PooledRows, compressor: Compressor, rotary: Rotary, planes: LatentPlanes) -> None:
    """Like `compress_rows`, then norm and rotate the entry of each row that ends a window, and write it to its slot.

    A slot of -1 stores nothing. `rotary` rotates by the position of the first token of each row's window.
    """
    write_entries(*_ended_entries(step, compressor), compressor.norm, rotary, planes)


def compress_index_reference(
    step: PooledRows, q_TID: Tensor, compressor: Compressor, rotary: Rotary, q_rotary: Rotary, planes: IndexPlanes
) -> None:
    """Like `compress_entries` for an index; also rotate the last elements of every row's index heads in place, by `q_rotary`."""
    write_index_entries(*_ended_entries(step, compressor), compressor.norm, rotary, planes)
    rotate_index_queries(q_TID, step.states_T, q_rotary)


def _ended_entries(step: PooledRows, compressor: Compressor) -> tuple[Tensor, Tensor]:
    """Return the entries of rows, and their slots; -1 for rows that end no window and for padding."""
    entries_TD = step.pooled_TX.new_empty((len(step.pooled_TX), compressor.dim))
    compress_rows_reference(step, compressor, entries_TD)
    is_end_T = (step.states_T >= 0) & ((step.positions_T + 1) % compressor.ratio == 0)
    return entries_TD, torch.where(is_end_T, step.slots_T, -1)


def compress_rows_reference(step: PooledRows, compressor: Compressor, entries_TD: Tensor) -> None:
    """Add the rows of a step to their sequences' states; write the entry of each row that ends a window to `entries_TD`.

    The rows of a sequence are adjacent, and their positions consecutive.
    """
    _check_layout(step, compressor, entries_TD)
    pooled_TX, positions_T, _, states_T, state_PK3D = step
    places, counts = torch.unique_consecutive(states_T, return_counts=True)
    row = 0
    for place, num_rows in zip(places.tolist(), counts.tolist(), strict=True):
        if place >= 0:
            rows, start = slice(row, row + num_rows), int(positions_T[row])
            _compress_sequence(pooled_TX[rows], start, state_PK3D[place], compressor, entries_TD[rows])
        row += num_rows


def _compress_sequence(
    pooled_NX: Tensor, start: int, state_K3D: Tensor, compressor: Compressor, entries_ND: Tensor
) -> None:
    ratio, dim, num_rows = compressor.ratio, entries_ND.shape[1], len(pooled_NX)
    first, end = start % ratio, start + num_rows
    num_windows = -(-(first + num_rows) // ratio)
    x_WRX, gates_WRX = _windows(pooled_NX, first, num_windows, compressor)
    # The last columns make the entry of a window; the first ones, if any, join the next.
    current = Sums.of(x_WRX[..., -dim:], gates_WRX[..., -dim:])
    if compressor.is_overlapped:
        following = Sums.of(x_WRX[..., :dim], gates_WRX[..., :dim])
        if first > 0:
            _put(following, 0, Sums(*state_K3D[1]).merge(following.at(0)))
        if num_windows > 1:
            _put(current, slice(1, None), following.at(slice(None, -1)).merge(current.at(slice(1, None))))
    else:
        following = Sums.empty(current.m)
    if first > 0 or (compressor.is_overlapped and start > 0):
        _put(current, 0, Sums(*state_K3D[0]).merge(current.at(0)))
    ends_W = range(ratio - 1 - first, num_rows, ratio)
    entries_ND[ends_W.start :: ratio] = (current.acc / current.l)[: len(ends_W)]
    nothing = Sums.empty(current.m[0])
    sums = (following.at(-1), nothing) if end % ratio == 0 else (current.at(-1), following.at(-1))
    for k in range(num_sums(compressor.is_overlapped)):
        state_K3D[k] = torch.stack(tuple(sums[k]))


def _windows(pooled_NX: Tensor, first: int, num_windows: int, compressor: Compressor) -> tuple[Tensor, Tensor]:
    """View values and gates as [W, R, X]; gates of a window's tokens outside these rows are -inf."""
    width, ratio = pooled_NX.shape[1] // 2, compressor.ratio
    x_WRX = pooled_NX.new_zeros((num_windows * ratio, width))
    gates_WRX = torch.full_like(x_WRX, -torch.inf)
    own = slice(first, first + len(pooled_NX))
    x_WRX[own] = pooled_NX[:, :width]
    positions_NX = compressor.positions_RX.repeat(num_windows, 1)[own]
    gates_WRX[own] = pooled_NX[:, width:] + positions_NX
    return x_WRX.view(num_windows, ratio, width), gates_WRX.view(num_windows, ratio, width)


def _put(sums: Sums, index: int | slice, values: Sums) -> None:
    for mine, value in zip(sums, values, strict=True):
        mine[index] = value


def _check_layout(step: PooledRows, compressor: Compressor, entries_TD: Tensor) -> None:
    pooled_TX, state_PK3D = step.pooled_TX, step.state_PK3D
    dim, width = entries_TD.shape[1], compressor.positions_RX.shape[1]
    wanted = state_shape(dim, compressor.is_overlapped)
    assert state_PK3D.shape[1:] == wanted, f"{state_PK3D.shape=} for states of {wanted}"
    assert width == dim * wanted[0], f"{compressor.positions_RX.shape=} for entries of {dim} elements"
    assert pooled_TX.shape[1] == 2 * width, f"{pooled_TX.shape=} for {width} columns and as many gates"
    assert pooled_TX.stride(1) == 1, f"{pooled_TX.stride()=}: the columns of a row must lie side by side"
    assert pooled_TX.dtype == state_PK3D.dtype == torch.float32, f"{pooled_TX.dtype=}, {state_PK3D.dtype=}: not float32"
    assert state_PK3D.is_contiguous(), f"{state_PK3D.stride()=}: states must lie side by side"


def compress_rows_triton(step: PooledRows, compressor: Compressor, entries_TD: Tensor) -> None:
    """Launch the kernel of `compress_entries` without its last step."""
    _check_layout(step, compressor, entries_TD)
    _launch(step, compressor, None, "rows", Target(entries_TD), None, None)


compress_rows = operation(reference=compress_rows_reference, triton=compress_rows_triton)


def compress_entries_triton(step: PooledRows, compressor: Compressor, rotary: Rotary, planes: LatentPlanes) -> None:
    """Launch one program per row, which works if a window or its sequence's rows end there."""
    dim = planes.latent_dim + planes.rope_dim
    assert compressor.dim == dim, f"{compressor.dim=} for planes of {dim} elements"
    assert rotary.dim == planes.rope_dim, f"{rotary.dim=} for {planes.rope_dim=}"
    assert not planes.has_small_rope, "rotated elements in e4m3 have no kernel here"
    target = Target(planes.rows_SX, planes.scales_SC, bits_of_rope(planes))
    _launch(step, compressor, rotary, planes.kind, target, None, None)


compress_entries = operation(
    reference=compress_entries_reference,
    triton=compress_entries_triton,
    place=lambda step, compressor, rotary, planes: step.pooled_TX,
)


def compress_index_triton(
    step: PooledRows, q_TID: Tensor, compressor: Compressor, rotary: Rotary, q_rotary: Rotary, planes: IndexPlanes
) -> None:
    """Launch the kernel of `compress_entries`, with more programs for the index heads of a row."""
    rows_SD = planes.rows_SD.view(torch.uint8) if planes.is_quantized else planes.rows_SD
    assert compressor.dim == q_TID.shape[2] == rows_SD.shape[1], f"{compressor.dim=}, {q_TID.shape=}, {rows_SD.shape=}"
    assert q_TID.stride(2) == 1, f"{q_TID.stride()=}: the elements of a head must lie side by side"
    target, kind = Target(rows_SD, planes.scales_S1), "index" if planes.is_quantized else "plain"
    _launch(step, compressor, rotary, kind, target, q_TID, q_rotary)


compress_index = operation(reference=compress_index_reference, triton=compress_index_triton)


class Target(NamedTuple):
    """Output of entries: rows, and the other planes of their format."""

    rows: Tensor
    scales: Tensor | None = None
    rope: Tensor | None = None


def _launch(
    step: PooledRows,
    compressor: Compressor,
    rotary: Rotary | None,
    kind: str,
    target: Target,
    q_TID: Tensor | None,
    q_rotary: Rotary | None,
) -> None:
    pooled_TX, positions_T, slots_T, states_T, state_PK3D = step
    num_rows, dim = len(pooled_TX), compressor.dim
    _check_layout(step, compressor, compressor.weight_D[None])
    if num_rows == 0:
        return
    rope_dim = 0 if rotary is None else rotary.dim
    cosine, sine, rotary_stride = _tables(rotary, dim)
    q_cosine, q_sine, _ = _tables(q_rotary, dim)
    assert q_rotary is None or q_rotary.cos_TP.stride(0) == rotary_stride, "rows of entries and of queries differ"
    num_heads = 0 if q_TID is None else q_TID.shape[1]
    block_d, block_r = next_power_of_two(dim), next_power_of_two(max(rope_dim, 2))
    heads = min(next_power_of_two(max(num_heads, 1)), max(1, ELEMENTS_PER_PROGRAM // block_r))
    _compress_kernel[(num_rows * (1 + -(-num_heads // heads)),)](
        pooled_TX, positions_T, slots_T, states_T, state_PK3D, compressor.positions_RX, compressor.weight_D, cosine,
        sine, q_cosine, q_sine, *target, q_TID, compressor.eps, num_rows, pooled_TX.stride(0), rotary_stride,
        target.rows.stride(0), *((0, 0) if q_TID is None else q_TID.stride()[:2]),
        KIND=kind, RATIO=compressor.ratio, OVERLAPPED=compressor.is_overlapped, DIM=dim, ROPE_DIM=rope_dim,
        NUM_HEADS=num_heads, HEADS=heads, BLOCK_D=block_d, BLOCK_R=block_r,
        BLOCK_T=min(ROWS, next_power_of_two(compressor.ratio)),
        num_warps=min(8, max(1, block_d // ELEMENTS_PER_WARP)), **pdl_flags(pooled_TX),
    )  # fmt: skip


def _tables(rotary: Rotary | None, dim: int) -> tuple[Tensor | None, Tensor | None, int]:
    """Return cos, sin and the stride of their rows."""
    if rotary is None:
        return None, None, 0
    assert dim % 2 == 0 < rotary.dim <= dim, f"{rotary.dim=} of {dim=}: rope turns pairs"
    rotary.check_layout()
    return rotary.cos_TP, rotary.sin_TP, rotary.cos_TP.stride(0)


@jit_counting("num_rows")
def _compress_kernel(
    p_pooled, p_positions, p_slots, p_states, p_state, p_bias, p_norm, p_cosine, p_sine, p_q_cosine, p_q_sine, p_rows,
    p_scales, p_rope, p_q, eps, num_rows, pooled_stride, rotary_stride, row_stride, q_stride, head_stride,
    KIND: constexpr, RATIO: constexpr, OVERLAPPED: constexpr, DIM: constexpr, ROPE_DIM: constexpr, NUM_HEADS: constexpr,
    HEADS: constexpr, BLOCK_D: constexpr, BLOCK_R: constexpr, BLOCK_T: constexpr, PDL: constexpr,
):  # fmt: skip
    NUM_BLOCKS: constexpr = 1 + (NUM_HEADS + HEADS - 1) // HEADS
    i_program = tl.program_id(0)
    i_row = i_program // NUM_BLOCKS
    i_block = i_program % NUM_BLOCKS
    i_place = tl.load(p_states + i_row).to(tl.int64)
    is_row = i_place >= 0
    i_position = tl.where(is_row, tl.load(p_positions + i_row).to(tl.int64), 0)
    if i_block > 0:
        if NUM_HEADS > 0:
            if is_row:
                turn_heads(
                    p_q + i_row.to(tl.int64) * q_stride, head_stride, (i_block - 1) * HEADS, p_q_cosine, p_q_sine,
                    i_row.to(tl.int64), rotary_stride, 1, NUM_HEADS, HEADS, DIM, ROPE_DIM, BLOCK_R, PDL,
                )  # fmt: skip
            else:
                release_then_wait(PDL)
    else:
        # Programs without work wait too: later kernels rely on all kernels before this one.
        is_last = is_row & (tl.load(p_states + i_row + 1, mask=i_row + 1 < num_rows, other=-1) != i_place)
        # An entry whose tokens are all rows of this step needs no state and has its own program. The program of the
        # sequence's last row makes all others; it alone reads and writes the state.
        num_tokens = tl.minimum(i_position + 1, 2 * RATIO if OVERLAPPED else RATIO).to(tl.int32)
        i_back = i_row - num_tokens + 1
        is_whole = is_row & (tl.load(p_states + i_back, mask=is_row & (i_back >= 0), other=-1) == i_place)
        is_whole = is_whole & ((i_position + 1) % RATIO == 0)
        if is_last | is_whole:
            i_first = i_back
            if is_last:
                i_first = _first_row(p_states, i_row, i_place)
            _pool(
                p_pooled, p_slots, p_state + i_place * ((6 if OVERLAPPED else 3) * DIM), p_bias, p_norm, p_cosine,
                p_sine, p_rows, p_scales, p_rope, eps, pooled_stride, rotary_stride, row_stride, i_row, i_first,
                i_position, is_last, KIND, RATIO, OVERLAPPED, DIM, ROPE_DIM, BLOCK_D, BLOCK_T, PDL,
            )  # fmt: skip
        else:
            release_then_wait(PDL)


@jit
def _first_row(p_states, i_row, i_place):
    """Return the sequence's first row in the step, by binary search: its rows are adjacent."""
    i_first = i_row
    i_before = tl.maximum(i_row - 1, 0)
    if tl.load(p_states + i_before) == i_place:
        # Rows from i_first on are of the sequence, those before i_low are not.
        i_first = i_before
        i_low = i_row * 0
        while i_low < i_first:
            i_middle = (i_low + i_first) // 2
            is_same = tl.load(p_states + i_middle) == i_place
            i_first = tl.where(is_same, i_middle, i_first)
            i_low = tl.where(is_same, i_low, i_middle + 1)
    return i_first


@jit
def _pool(
    p_pooled, p_slots, p_state, p_bias, p_norm, p_cosine, p_sine, p_rows, p_scales, p_rope, eps, pooled_stride,
    rotary_stride, row_stride, i_row, i_first, i_position, is_last,
    KIND: constexpr, RATIO: constexpr, OVERLAPPED: constexpr, DIM: constexpr, ROPE_DIM: constexpr, BLOCK_D: constexpr,
    BLOCK_T: constexpr, PDL: constexpr,
):  # fmt: skip
    """Pool some windows of the rows `i_first` to `i_row` of a sequence: those at both ends that read or leave a state."""
    # Pool the windows that a state reaches into, the last one, and the one before it if entries overlap.
    HEAD: constexpr = 2 if OVERLAPPED else 1
    WIDTH: constexpr = 2 * DIM if OVERLAPPED else DIM
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < DIM
    i_start = i_position - (i_row - i_first)
    first_window, last_window = i_start // RATIO, i_position // RATIO
    num_windows = tl.minimum(last_window - first_window + 1, 2 * HEAD).to(tl.int32)
    release_then_wait(PDL)
    m_e = m_d & is_last & ((i_start > 0) if OVERLAPPED else (i_start % RATIO > 0))
    m_a = m_d & is_last & (i_start % RATIO > 0)
    e_m = tl.load(p_state + o_d, mask=m_e, other=float("-inf"))
    e_l = tl.load(p_state + DIM + o_d, mask=m_e, other=0.0)
    e_x = tl.load(p_state + 2 * DIM + o_d, mask=m_e, other=0.0)
    b_none, b_zero = tl.full((BLOCK_D,), float("-inf"), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    a_m, a_l, a_x = b_none, b_zero, b_zero
    if OVERLAPPED:
        a_m = tl.load(p_state + 3 * DIM + o_d, mask=m_a, other=float("-inf"))
        a_l = tl.load(p_state + 4 * DIM + o_d, mask=m_a, other=0.0)
        a_x = tl.load(p_state + 5 * DIM + o_d, mask=m_a, other=0.0)
    for i_window in range(num_windows):
        window = tl.where(i_window < HEAD, first_window + i_window, last_window - (num_windows - 1 - i_window))
        is_final = i_window == num_windows - 1
        if (i_window == HEAD) & (window > first_window + HEAD):
            # No sums reach across the skipped windows.
            e_m, e_l, e_x, a_m, a_l, a_x = b_none, b_zero, b_zero, b_none, b_zero, b_zero
        first_token = window * RATIO
        i_begin, i_end = tl.maximum(first_token, i_start), tl.minimum(first_token + RATIO - 1, i_position)
        has_state = tl.maximum(first_token - (HEAD - 1) * RATIO, 0) < i_start
        is_made = is_final | (is_last & has_state)
        for i_token in range(i_begin, i_end + 1, BLOCK_T):
            o_t = i_token + tl.arange(0, BLOCK_T)[:, None]
            m_t = (o_t <= i_end) & m_d[None, :]
            p_row = p_pooled + (i_row - (i_position - o_t)).to(tl.int64) * pooled_stride + o_d[None, :]
            p_place = p_bias + (o_t - first_token) * WIDTH + o_d[None, :]
            if OVERLAPPED:
                m_next = m_t & (is_last | (is_final == 0))
                a_m, a_l, a_x = _added(a_m, a_l, a_x, p_row, p_place, m_next, WIDTH)
                e_m, e_l, e_x = _added(e_m, e_l, e_x, p_row + DIM, p_place + DIM, m_t & is_made, WIDTH)
            else:
                e_m, e_l, e_x = _added(e_m, e_l, e_x, p_row, p_place, m_t, WIDTH)
        if i_end == first_token + RATIO - 1:
            if is_made:
                i_entry = i_row - (i_position - i_end)
                b_entry = tl.where(m_d, e_x / tl.where(m_d, e_l, 1.0), 0.0)[None, :]
                if KIND == "rows":
                    tl.store(p_rows + i_entry.to(tl.int64) * row_stride + o_d[None, :], b_entry, mask=m_d[None, :])
                else:
                    i_slot = tl.load(p_slots + i_entry).to(tl.int64)
                    b_cos, b_sin = load_turn(
                        p_cosine, p_sine, i_entry.to(tl.int64), rotary_stride, DIM, ROPE_DIM, BLOCK_D
                    )
                    b_weight = tl.load(p_norm + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
                    b_entry = finished_vectors(b_entry, b_weight, b_cos, b_sin, eps, DIM)
                    if KIND == "turboquant":
                        b_entry = rotated_latents(b_entry, DIM - ROPE_DIM)
                    store_vector(p_rows, p_scales, p_rope, i_slot, row_stride, b_entry, KIND, DIM - ROPE_DIM, DIM)
            e_m, e_l, e_x, a_m, a_l, a_x = a_m, a_l, a_x, b_none, b_zero, b_zero
    m_store = m_d & is_last
    tl.store(p_state + o_d, e_m, mask=m_store)
    tl.store(p_state + DIM + o_d, e_l, mask=m_store)
    tl.store(p_state + 2 * DIM + o_d, e_x, mask=m_store)
    if OVERLAPPED:
        tl.store(p_state + 3 * DIM + o_d, a_m, mask=m_store)
        tl.store(p_state + 4 * DIM + o_d, a_l, mask=m_store)
        tl.store(p_state + 5 * DIM + o_d, a_x, mask=m_store)


@jit
def _added(b_m, b_l, b_acc, p_x, p_bias, m_x, WIDTH: constexpr):
    """Add rows [T, D] to the sums of channels; gates are WIDTH columns after values."""
    b_x = tl.load(p_x, mask=m_x, other=0.0)
    b_gate = tl.load(p_x + WIDTH, mask=m_x, other=float("-inf")) + tl.load(p_bias, mask=m_x, other=0.0)
    b_top = tl.maximum(b_m, tl.max(b_gate, axis=0))
    b_base = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_share, b_weight = tl.exp(b_m - b_base), tl.exp(b_gate - b_base[None, :])
    return b_top, b_l * b_share + tl.sum(b_weight, axis=0), b_acc * b_share + tl.sum(b_weight * b_x, axis=0)

"""Rows of a step pooled into entries (DeepSeek-V4), by a state a sequence that holds sums instead of tokens.

T rows, R tokens of an entry (its ratio, and its window), D elements of an entry, X = D columns, or 2 D where entries overlap,
P places for states, K sums of a state (kernels/latent/compress_geometry.py)

An entry is a softmax over tokens, channel by channel, of the gates that stand beside what is pooled. Its tokens are the R of a
window; where entries overlap, also the R before them: of those the first D columns count, of its own the last D. So a state is
a pair of sums: E, the entry that is being made, and A, this window's first columns. When a window ends, A becomes E.

Positions alone tell what of a state counts: before a window's first token A is empty, and so is E, unless entries overlap and
there is a window before. What a place held of another sequence is never looked at; and a sequence that is resumed at the
beginning of a window, without its state, has the true state from that window's end on.
"""

from typing import NamedTuple

import torch

from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compress_geometry import num_sums, state_shape
from holdfast.kernels.latent.entry_rows import rotate_index_queries, write_entries, write_index_entries
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes
from holdfast.kernels.latent.write_latent import LatentNorm


class Compressor(NamedTuple):
    """How one layer, or its index, makes entries."""

    ratio: int
    is_overlapped: bool
    positions_RX: torch.Tensor
    """float32: added to the gates of a token by its place in its entry."""
    weight_D: torch.Tensor
    """Of the RMSNorm of an entry, before it is rotated and kept."""
    eps: float

    @property
    def norm(self) -> LatentNorm:
        """Of entries."""
        return LatentNorm(self.weight_D, self.eps)

    @property
    def dim(self) -> int:
        """D."""
        return self.weight_D.shape[0]


class Sums(NamedTuple):
    """Pooled tokens, channel by channel: what a state holds, as [..., D]."""

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 the field's letter
    acc: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, gates: torch.Tensor) -> "Sums":
        """Of the tokens of dimension -2."""
        m = gates.amax(-2)
        weights = (gates - _finite(m).unsqueeze(-2)).exp()
        return cls(m, weights.sum(-2), (weights * x).sum(-2))

    @classmethod
    def empty(cls, like: torch.Tensor) -> "Sums":
        """Of no tokens."""
        return cls(torch.full_like(like, -torch.inf), torch.zeros_like(like), torch.zeros_like(like))

    def merge(self, other: "Sums") -> "Sums":
        """Of the tokens of both."""
        m = torch.maximum(self.m, other.m)
        mine, theirs = (self.m - _finite(m)).exp(), (other.m - _finite(m)).exp()
        return Sums(m, self.l * mine + other.l * theirs, self.acc * mine + other.acc * theirs)

    def at(self, index: int | slice) -> "Sums":
        """Some of the first dimension."""
        return Sums(self.m[index], self.l[index], self.acc[index])


def _finite(m: torch.Tensor) -> torch.Tensor:
    """No tokens have no largest gate: any number does, since their weights are zero."""
    return torch.where(m == -torch.inf, 0.0, m)


def compress_rows(
    pooled_TX: torch.Tensor,
    positions_T: torch.Tensor,
    states_T: torch.Tensor,
    state_PK3D: torch.Tensor,
    compressor: Compressor,
    entries_TD: torch.Tensor,
) -> None:
    """Add the rows of a step to their sequences' states; a row that ends a window gets its entry in `entries_TD`, other rows nothing.

    `pooled_TX`: float32, X columns of what is pooled, then X of gates; rows may lie apart. `states_T`: the place of a row's
    sequence in `state_PK3D`, -1 for padding. The rows of a sequence are neighbours, and their positions rise one by one.
    """
    compress_rows_reference(pooled_TX, positions_T, states_T, state_PK3D, compressor, entries_TD)


def compress_entries(
    pooled_TX: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    states_T: torch.Tensor,
    state_PK3D: torch.Tensor,
    compressor: Compressor,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """The same, and the entry of a row that ends a window goes normed and rotated into its slot (-1: nowhere)."""
    compress_entries_reference(pooled_TX, positions_T, slots_T, states_T, state_PK3D, compressor, rotary, planes)


def compress_index(
    pooled_TX: torch.Tensor,
    q_TID: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    states_T: torch.Tensor,
    state_PK3D: torch.Tensor,
    compressor: Compressor,
    rotary: Rotary,
    planes: IndexPlanes,
) -> None:
    """The same of entries of an index; and the last elements of every row's index heads are rotated in place."""
    compress_index_reference(pooled_TX, q_TID, positions_T, slots_T, states_T, state_PK3D, compressor, rotary, planes)


def compress_entries_reference(
    pooled_TX: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    states_T: torch.Tensor,
    state_PK3D: torch.Tensor,
    compressor: Compressor,
    rotary: Rotary,
    planes: LatentPlanes,
) -> None:
    """The same in plain torch."""
    entries_TD = pooled_TX.new_empty((len(pooled_TX), compressor.dim))
    compress_rows_reference(pooled_TX, positions_T, states_T, state_PK3D, compressor, entries_TD)
    kept_T = kept_slots(positions_T, slots_T, states_T, compressor.ratio)
    write_entries(entries_TD, positions_T, kept_T, compressor.norm, compressor.ratio, rotary, planes)


def compress_index_reference(
    pooled_TX: torch.Tensor,
    q_TID: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    states_T: torch.Tensor,
    state_PK3D: torch.Tensor,
    compressor: Compressor,
    rotary: Rotary,
    planes: IndexPlanes,
) -> None:
    """The same in plain torch."""
    entries_TD = pooled_TX.new_empty((len(pooled_TX), compressor.dim))
    compress_rows_reference(pooled_TX, positions_T, states_T, state_PK3D, compressor, entries_TD)
    kept_T = kept_slots(positions_T, slots_T, states_T, compressor.ratio)
    write_index_entries(entries_TD, positions_T, kept_T, compressor.norm, compressor.ratio, rotary, planes)
    rotate_index_queries(q_TID, positions_T, states_T, rotary)


def kept_slots(positions_T: torch.Tensor, slots_T: torch.Tensor, states_T: torch.Tensor, ratio: int) -> torch.Tensor:
    """Slots, and -1 for rows that end no window, or are padding."""
    return torch.where((states_T >= 0) & ((positions_T + 1) % ratio == 0), slots_T, -1)


def compress_rows_reference(
    pooled_TX: torch.Tensor,
    positions_T: torch.Tensor,
    states_T: torch.Tensor,
    state_PK3D: torch.Tensor,
    compressor: Compressor,
    entries_TD: torch.Tensor,
) -> None:
    """The same in plain torch: a sequence at a time, all of its windows at once."""
    _check_layout(pooled_TX, state_PK3D, compressor, entries_TD)
    places, counts = torch.unique_consecutive(states_T, return_counts=True)
    row = 0
    for place, num_rows in zip(places.tolist(), counts.tolist(), strict=True):
        if place >= 0:
            rows, start = slice(row, row + num_rows), int(positions_T[row])
            _compress_sequence(pooled_TX[rows], start, state_PK3D[place], compressor, entries_TD[rows])
        row += num_rows


def _compress_sequence(
    pooled_NX: torch.Tensor, start: int, state_K3D: torch.Tensor, compressor: Compressor, entries_ND: torch.Tensor
) -> None:
    ratio, dim, num_rows = compressor.ratio, entries_ND.shape[1], len(pooled_NX)
    first, end = start % ratio, start + num_rows
    num_windows = -(-(first + num_rows) // ratio)
    x_WRX, gates_WRX = _windows(pooled_NX, first, num_windows, compressor)
    # The last columns make the entry of a window; the first ones, where there are such, help to make the next.
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


def _windows(
    pooled_NX: torch.Tensor, first: int, num_windows: int, compressor: Compressor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[W, R, X] of what is pooled and of gates; where a window has tokens before or behind these rows, gates are -inf."""
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


def _check_layout(
    pooled_TX: torch.Tensor, state_PK3D: torch.Tensor, compressor: Compressor, entries_TD: torch.Tensor
) -> None:
    dim, width = entries_TD.shape[1], compressor.positions_RX.shape[1]
    wanted = state_shape(dim, compressor.is_overlapped)
    assert state_PK3D.shape[1:] == wanted, f"{state_PK3D.shape=} for states of {wanted}"
    assert width == dim * wanted[0], f"{compressor.positions_RX.shape=} for entries of {dim} elements"
    assert pooled_TX.shape[1] == 2 * width, f"{pooled_TX.shape=} for {width} columns and as many gates"
    assert pooled_TX.stride(1) == 1, f"{pooled_TX.stride()=}: the columns of a row must lie side by side"
    assert pooled_TX.dtype == state_PK3D.dtype == torch.float32, f"{pooled_TX.dtype=}, {state_PK3D.dtype=}: not float32"
    assert state_PK3D.is_contiguous(), f"{state_PK3D.stride()=}: states must lie side by side"

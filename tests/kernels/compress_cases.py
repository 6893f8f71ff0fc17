"""Sequences whose rows are pooled into entries (DeepSeek-V4), step by step in any company, and what pooling whole windows gives."""

from dataclasses import dataclass

import torch

from holdfast.kernels.latent.compress import Compressor
from holdfast.quant.entry_state import pooled_width, state_shape
from kernels.triton_cases import amid_poison
from red_zones import RedZones

NUM_PLACES = 5
FAR = 10**9
"""The position of padding: outside of every table."""


def make_compressor(ratio: int, is_overlapped: bool, dim: int, seed: int = 0) -> Compressor:
    generator = torch.Generator().manual_seed(seed)
    width = pooled_width(dim, is_overlapped)
    positions_RX = torch.randn(ratio, width, generator=generator)
    return Compressor(ratio, is_overlapped, positions_RX, 0.5 + torch.rand(dim, generator=generator), 1e-6)


def make_rows(num_rows: int, compressor: Compressor, gate_size: float = 1.0, seed: int = 0) -> torch.Tensor:
    """What a sequence's tokens project to, and their gates."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rows_NX = torch.randn(num_rows, 2 * compressor.positions_RX.shape[1], generator=generator)
    rows_NX[:, compressor.positions_RX.shape[1] :] *= gate_size
    return rows_NX


def pooled_windows(rows_NX: torch.Tensor, compressor: Compressor) -> dict[int, torch.Tensor]:
    """The entry of every window that is whole, by its last position: a softmax over its rows in float64."""
    ratio, dim, width = compressor.ratio, compressor.dim, compressor.positions_RX.shape[1]
    num_windows = len(rows_NX) // ratio
    gates_WRX = rows_NX[: num_windows * ratio, width:].unflatten(0, (num_windows, ratio)) + compressor.positions_RX
    x_WRX = rows_NX[: num_windows * ratio, :width].unflatten(0, (num_windows, ratio)).double()
    entries = {}
    for window in range(num_windows):
        x, gates = x_WRX[window, :, -dim:], gates_WRX[window, :, -dim:].double()
        if compressor.is_overlapped and window > 0:
            x = torch.cat((x_WRX[window - 1, :, :dim], x))
            gates = torch.cat((gates_WRX[window - 1, :, :dim].double(), gates))
        entries[(window + 1) * ratio - 1] = (gates.softmax(0) * x).sum(0)
    return entries


@dataclass
class Part:
    """Some rows of a sequence in a step."""

    place: int
    start: int
    rows: torch.Tensor


@dataclass
class CompressStep:
    """Inputs of `compress_rows` on the CPU: parts, with padding behind each."""

    pooled: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor

    @classmethod
    def of(cls, parts: list[Part], width: int, num_padding: int = 1) -> "CompressStep":
        nowhere = torch.full((num_padding, width), torch.nan)
        pooled, positions, states = [], [], []
        for part in parts:
            pooled += [part.rows, nowhere]
            positions += [part.start + torch.arange(len(part.rows)), torch.full((num_padding,), FAR)]
            states += [torch.full((len(part.rows),), part.place), torch.full((num_padding,), -1)]
        return cls(torch.cat(pooled), torch.cat(positions), torch.cat(states))


class States:
    """Places of poison between red zones."""

    def __init__(self, compressor: Compressor, device: torch.device | str) -> None:
        self.zones = RedZones(torch.device(device))
        shape = state_shape(compressor.dim, compressor.is_overlapped)
        self.state_PK3D = self.zones.allocate(NUM_PLACES, *shape).fill_(torch.nan)


def compressor_on(compressor: Compressor, device: torch.device | str) -> Compressor:
    """Copy to a device, amid poison."""

    def alone(values: torch.Tensor) -> torch.Tensor:
        return amid_poison(values.reshape(1, -1), torch.device(device)).view(values.shape)

    return compressor._replace(positions_RX=alone(compressor.positions_RX), weight_D=alone(compressor.weight_D))


def in_steps(lengths: list[int], chunks: list[int], firsts: list[int]) -> list[list[tuple[int, int, int]]]:
    """(sequence, start, rows) of each step: sequence i takes `chunks[i]` rows a step from step `firsts[i]` on."""
    steps: list[list[tuple[int, int, int]]] = []
    starts, step = [0] * len(lengths), 0
    while any(start < length for start, length in zip(starts, lengths, strict=True)):
        taken = []
        for i, length in enumerate(lengths):
            num_rows = min(chunks[i], length - starts[i])
            if step >= firsts[i] and num_rows > 0:
                taken.append((i, starts[i], num_rows))
                starts[i] += num_rows
        steps.append(taken)
        step += 1
    return steps

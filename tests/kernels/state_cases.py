"""Steps of sequences with a state, their inputs, and the gated delta rule token by token in float64."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from holdfast.kernels.state.delta_inputs import DeltaInputs
from holdfast.kernels.state.state_geometry import state_list_specs
from holdfast.kernels.state.state_rows import DRAFT, Piece, StateRows, fill_lists
from kernels.triton_cases import amid_poison

FAR = 10**9
"""Position of padding."""
NUM_PLACES = 5


class Heads(NamedTuple):
    """Sizes of a layer."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 24
    by_channel: bool = False

    @property
    def num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def gate_shape(self) -> tuple[int, ...]:
        return (self.value_heads, self.key_dim) if self.by_channel else (self.value_heads,)


class Tokens(NamedTuple):
    """Inputs of a layer for all tokens of one sequence."""

    qkv_TC: torch.Tensor
    a_TH: torch.Tensor
    b_TH: torch.Tensor

    def at(self, rows: slice) -> "Tokens":
        return Tokens(*(x[rows] for x in self))


class Layer(NamedTuple):
    """A layer's own values."""

    heads: Heads
    A_log_H: torch.Tensor
    dt_bias_H: torch.Tensor

    def inputs(self, tokens: Tokens, device: torch.device | str = "cpu") -> DeltaInputs:
        """Inputs of a step on a device, between poison."""
        on = torch.device(device)
        qkv_TC, b_TH = amid_poison(tokens.qkv_TC, on), amid_poison(tokens.b_TH, on)
        a_TH = amid_poison(tokens.a_TH.flatten(1), on).unflatten(1, self.heads.gate_shape)
        weights = self.A_log_H.to(on), self.dt_bias_H.to(on)
        key_heads, value_heads, key_dim, value_dim, _ = self.heads
        return DeltaInputs.of(qkv_TC, key_heads, key_dim, value_heads, value_dim, a_TH, b_TH, *weights)


def make_layer(heads: Heads, seed: int = 0, strength: float = 0.0) -> Layer:
    """Random gates; a larger `strength` makes states decay faster."""
    generator = torch.Generator().manual_seed(seed)
    A_log_H = torch.rand(heads.value_heads, generator=generator) * 3 - 2 + strength
    return Layer(heads, A_log_H, torch.randn(heads.gate_shape, generator=generator))


def make_tokens(
    heads: Heads, num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tokens:
    generator = torch.Generator().manual_seed(100 + seed)
    sizes = ((heads.num_channels,), heads.gate_shape, (heads.value_heads,))
    qkv_TC, a_TH, b_TH = (torch.randn(num_tokens, *size, generator=generator) for size in sizes)
    return Tokens((qkv_TC * scale).to(dtype), a_TH.to(dtype), b_TH.to(dtype))


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_recurrence(layer: Layer, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state of a whole sequence in float64, token by token."""
    key_heads, value_heads, key_dim, value_dim, by_channel = layer.heads
    qkv_TC, a_TH, b_TH = (x.double() for x in tokens)
    parts = qkv_TC.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=1)
    q_THK, k_THK = (unit(x.unflatten(1, (key_heads, key_dim))) for x in parts[:2])
    owner_H = torch.arange(value_heads) // (value_heads // key_heads)
    v_THV = parts[2].unflatten(1, (value_heads, value_dim))
    beta_TH = 1 / (1 + (-b_TH).exp())
    rate_H = layer.A_log_H.double().exp()
    decay_TH = (-(rate_H.unsqueeze(1) if by_channel else rate_H) * F.softplus(a_TH + layer.dt_bias_H.double())).exp()
    state_HKV, outputs = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64), []
    for t in range(len(qkv_TC)):
        q_HK, k_HK = q_THK[t, owner_H] / key_dim**0.5, k_THK[t, owner_H]
        state_HKV = state_HKV * (decay_TH[t].unsqueeze(2) if by_channel else decay_TH[t].view(-1, 1, 1))
        read_HV = torch.einsum("hkv,hk->hv", state_HKV, k_HK)
        write_HV = beta_TH[t].unsqueeze(1) * (v_THV[t] - read_HV)
        state_HKV = state_HKV + k_HK.unsqueeze(2) * write_HV.unsqueeze(1)
        outputs.append(torch.einsum("hkv,hk->hv", state_HKV, q_HK))
    return torch.stack(outputs), state_HKV


class Part(NamedTuple):
    """Some tokens of a sequence in a step."""

    place: int
    start: int
    num_rows: int
    num_drafts: int = 0
    """Draft tokens among them, the last ones."""
    num_accepted: int = 0
    """Draft tokens of its last step that its state lacks."""


def make_rows(
    parts: Sequence[Part], num_padding: int, device: torch.device | str = "cpu", spare: int = 2, as_decode: bool = False
) -> StateRows:
    """Rows of parts, padding after all of them, and unused entries in the lists."""
    places, positions, drafts, pieces = [], [], [], []
    for part in parts:
        num_own = part.num_rows - part.num_drafts
        if part.num_rows:
            pieces.append(Piece(len(places), num_own, part.place, part.start))
        places += [part.place] * part.num_rows
        positions += range(part.start, part.start + part.num_rows)
        drafts += [part.num_accepted, *[0] * (num_own - 1), *[DRAFT] * part.num_drafts][: part.num_rows]
    places += [-1] * num_padding
    positions += [FAR] * num_padding
    drafts += [-1] * num_padding
    numbers = torch.tensor([places, positions, drafts]).view(3, -1).to(device)
    if as_decode:
        return StateRows(numbers[0], numbers[1], drafts_T=numbers[2])
    specs = state_list_specs(len(places), len(pieces) + spare)
    lists = [torch.full(spec.shape, 77, dtype=torch.int32) for spec in specs]
    fill_lists(pieces, *lists)
    return StateRows(numbers[0], numbers[1], *(table.to(device) for table in lists), drafts_T=numbers[2])


def join(parts: Sequence[torch.Tensor], num_padding: int) -> torch.Tensor:
    """Rows of a step; padding is NaN."""
    padding = torch.full((num_padding, *parts[0].shape[1:]), torch.nan, dtype=parts[0].dtype)
    return torch.cat([*parts, padding])

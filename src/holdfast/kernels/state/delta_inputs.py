"""Inputs of a gated delta net's recurrence, by head, and its gates: decay and write strength.

T rows, H value heads (G key heads), K elements of a key, V elements of a value

    decay = exp(-exp(A_log) * softplus(a + dt_bias))     one number a head, or one a channel of the key (KDA)
    beta = sigmoid(b)

Key head j serves value heads [j * r, (j + 1) * r), r = H / G. Kernels compute gates themselves, so they need no buffer.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.state.state_rows import by_whole_vectors
from holdfast.kernels.triton_compat import jit, tl

NORM_EPS = 1e-6
"""Added to the squared length of a query or key, inside the root."""


class DeltaInputs(NamedTuple):
    """A layer's inputs. Rows may lie apart; elements of a head lie side by side."""

    q_TGK: Tensor
    k_TGK: Tensor
    v_THV: Tensor
    a_TH: Tensor
    """[T, H], or [T, H, K] with gates by channel."""
    b_TH: Tensor
    A_log_H: Tensor
    """float32."""
    dt_bias_H: Tensor
    """float32 [H], or [H, K] with gates by channel."""

    @classmethod
    def of(
        cls, qkv_TC: Tensor, key_heads: int, key_dim: int, value_heads: int, value_dim: int,
        a_TH: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor,
    ) -> "DeltaInputs":  # fmt: skip
        """View the channels of a convolution as all queries, all keys, all values."""
        q_TX, k_TX, v_TX = qkv_TC.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=1)
        q_TGK, k_TGK = (x.unflatten(1, (key_heads, key_dim)) for x in (q_TX, k_TX))
        return cls(q_TGK, k_TGK, v_TX.unflatten(1, (value_heads, value_dim)), a_TH, b_TH, A_log_H, dt_bias_H)

    @property
    def by_channel(self) -> bool:
        """True if a gate is a vector over the key (KDA)."""
        return self.a_TH.dim() == 3

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.v_THV.shape[1] // self.k_TGK.shape[1]

    def at(self, rows: slice | Tensor) -> "DeltaInputs":
        """Select rows."""
        return self._replace(
            **{name: getattr(self, name)[rows] for name in ("q_TGK", "k_TGK", "v_THV", "a_TH", "b_TH")}
        )

    def check(self, state_PHKV: Tensor, out_THV: Tensor) -> None:
        """Assert that shapes agree and that kernels may address these tensors."""
        num_rows, value_heads, value_dim = self.v_THV.shape
        key_heads, key_dim = self.k_TGK.shape[1:]
        gate_shape = (value_heads, key_dim) if self.by_channel else (value_heads,)
        assert value_heads % key_heads == 0, f"{value_heads=} for {key_heads=}"
        assert self.q_TGK.shape == self.k_TGK.shape, f"{self.q_TGK.shape=}, {self.k_TGK.shape=}"
        assert self.a_TH.shape == (num_rows, *gate_shape), f"{self.a_TH.shape=} for gates of {gate_shape}"
        assert self.b_TH.shape == (num_rows, value_heads), f"{self.b_TH.shape=}"
        assert self.A_log_H.shape == (value_heads,), f"{self.A_log_H.shape=}"
        assert self.dt_bias_H.shape == gate_shape, f"{self.dt_bias_H.shape=} for gates of {gate_shape}"
        assert out_THV.shape == self.v_THV.shape, f"{out_THV.shape=} for {self.v_THV.shape=}"
        wanted = (value_heads, key_dim, value_dim)
        assert state_PHKV.shape[1:] == wanted, f"{state_PHKV.shape=} for states of {wanted}"
        assert state_PHKV.dtype == torch.float32, f"{state_PHKV.dtype=}"
        assert state_PHKV[:1].is_contiguous(), f"{state_PHKV.stride()=}: a state must be dense"
        heads = {"q": self.q_TGK, "k": self.k_TGK, "v": self.v_THV, "out": out_THV}
        for name, x in heads.items():
            assert x.stride()[1:] == (x.shape[2], 1), f"{name} has strides {x.stride()}: heads must lie side by side"
        assert self.a_TH.stride()[1:] == ((key_dim, 1) if self.by_channel else (1,)), f"{self.a_TH.stride()=}"
        assert self.b_TH.stride(1) == 1, f"{self.b_TH.stride()=}"
        assert self.A_log_H.dtype == self.dt_bias_H.dtype == torch.float32, "A_log and dt_bias must be float32"
        assert self.A_log_H.is_contiguous(), f"{self.A_log_H.stride()=}"
        assert self.dt_bias_H.is_contiguous(), f"{self.dt_bias_H.stride()=}"


def delta_gates(inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithm of the decay, like `a_TH`, the decay, and beta, in float32."""
    rate_H = inputs.A_log_H.exp()
    step_TH = by_whole_vectors(F.softplus, inputs.a_TH.float() + inputs.dt_bias_H)
    g_TH = -(rate_H.unsqueeze(1) if inputs.by_channel else rate_H) * step_TH
    return g_TH, by_whole_vectors(torch.exp, g_TH), by_whole_vectors(torch.sigmoid, inputs.b_TH.float())


def normed_heads(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return queries, scaled by 1 / sqrt(K), and keys of unit length, one for each value head, in float32."""
    q_THK, k_THK = (_unit(x).repeat_interleave(inputs.group, dim=1) for x in (inputs.q_TGK, inputs.k_TGK))
    return q_THK * inputs.k_TGK.shape[2] ** -0.5, k_THK


def _unit(x_TGK: Tensor) -> Tensor:
    x = x_TGK.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


@jit
def log_decay(b_a, b_bias, b_rate):
    """Return -rate * softplus(a + bias). log(1 + e) loses a small e, so it is divided by the e that was added."""
    b_x = b_a.to(tl.float32) + b_bias
    b_e = tl.exp(tl.minimum(b_x, 20.0))
    b_sum = 1.0 + b_e
    b_added = tl.where(b_sum == 1.0, 1.0, b_sum - 1.0)
    b_log = tl.where(b_sum == 1.0, b_e, tl.log(b_sum) * (b_e / b_added))
    return -b_rate * tl.where(b_x > 20.0, b_x, b_log)


@jit
def write_strength(b_b):
    """Return sigmoid(b)."""
    return 1.0 / (1.0 + tl.exp(-b_b.to(tl.float32)))

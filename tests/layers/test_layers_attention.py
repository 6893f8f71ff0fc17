import pytest
import torch

from holdfast.kernels.write_heads import HeadNorm, Rotary
from holdfast.layers.attention import AttentionLayer
from holdfast.layers.linear import Linear
from kernels.exactness import random


class RecordingBackend:
    """Gives the queries back and keeps what it was called with."""

    name = "recording"

    def __init__(self) -> None:
        self.calls = []

    def write(self, qkv_TX, batch, head_norm, rotary, layer):
        self.calls.append((qkv_TX, batch, head_norm, rotary, layer))
        return qkv_TX[:, :8].view(-1, 2, 4)

    def attend(self, q_RHD, layer, plan):
        self.calls.append((q_RHD, layer, plan))
        return 2 * q_RHD.reshape(-1, 8)


@pytest.mark.parametrize("rows", [None, [4, 1], []], ids=str)
def test_projection_backend_projection(rows):
    qkv_weight, qkv_bias, o_weight = random(24, 6), random(24, seed=1), random(6, 8, seed=2)
    head_norm, rotary = HeadNorm(torch.ones(4), torch.ones(4), 1e-5), Rotary(torch.ones(3, 4), torch.ones(3, 4))
    backend, batch, plan, x = RecordingBackend(), object(), object(), random(5, 6, seed=3)
    layer = AttentionLayer(7, Linear(qkv_weight, qkv_bias), Linear(o_weight), head_norm, rotary, backend)
    rows_R = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    y = layer(x, batch, plan, rows_R)
    (qkv, *written), (_, *attended) = backend.calls
    torch.testing.assert_close(qkv, x @ qkv_weight.T + qkv_bias)
    assert written == [batch, head_norm, rotary, 7]
    assert attended == [7, plan]
    wanted = qkv if rows_R is None else qkv[rows_R]
    torch.testing.assert_close(y, 2 * wanted[:, :8] @ o_weight.T)

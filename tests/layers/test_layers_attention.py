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

    def run(self, qkv_TX, head_norm, rotary, layer, plan):
        self.calls.append((qkv_TX, head_norm, rotary, layer, plan))
        return qkv_TX[:, :8] * 2


def test_projection_backend_projection():
    qkv_weight, qkv_bias, o_weight = random(24, 6), random(24, seed=1), random(6, 8, seed=2)
    head_norm, rotary = HeadNorm(torch.ones(4), torch.ones(4), 1e-5), Rotary(torch.ones(3, 4), torch.ones(3, 4))
    backend, plan, x = RecordingBackend(), object(), random(5, 6, seed=3)
    layer = AttentionLayer(7, Linear(qkv_weight, qkv_bias), Linear(o_weight), head_norm, rotary, backend)
    y = layer(x, plan)
    ((qkv, *rest),) = backend.calls
    torch.testing.assert_close(qkv, x @ qkv_weight.T + qkv_bias)
    assert rest == [head_norm, rotary, 7, plan]
    torch.testing.assert_close(y, 2 * qkv[:, :8] @ o_weight.T)

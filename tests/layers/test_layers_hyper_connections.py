"""Two layers of streams around made-up blocks, against transformers' hyper-connections."""

import pytest
import torch

from holdfast.kernels.hyper_connections import HeadMix, MixNumbers, StreamMix
from holdfast.kernels.stream_geometry import stream_specs
from holdfast.layers.hyper_connections import HyperConnection, StreamBuffers, StreamHead
from holdfast.layers.mlp import RMSNorm
from kernels.exactness import random

HIDDEN = 48
MIX_EPS, RMS_EPS, EPS = 0.01, 0.2, 0.05
"""Large and unlike, so that each shows where it is taken for another."""


def make_theirs(seed: int, is_head: bool):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=4, hc_sinkhorn_iters=7, hc_eps=MIX_EPS, rms_norm_eps=RMS_EPS)
    module = (theirs.DeepseekV4HyperHead if is_head else theirs.DeepseekV4HyperConnection)(config)
    for number, parameter in enumerate(module.parameters()):
        scale = 0.15 if parameter.dim() == 2 else 1.0
        parameter.data.copy_(random(*parameter.shape, seed=10 * seed + number, scale=scale))
    return module


@pytest.mark.parametrize("num_rows", [1, 5])
def test_hyper_connections_match_transformers_over_two_blocks(num_rows):
    x = random(num_rows, 4, HIDDEN)
    modules, head = [make_theirs(seed, False) for seed in (1, 2)], make_theirs(3, True)
    norms = [RMSNorm(1.0 + random(HIDDEN, seed=seed, scale=0.2), EPS) for seed in (4, 5, 6)]
    numbers = MixNumbers(RMS_EPS, MIX_EPS, 7)
    ours = [
        HyperConnection(StreamMix(module.fn.data, module.base.data, module.scale.data), numbers, norm)
        for module, norm in zip(modules, norms[:2], strict=True)
    ]
    last = StreamHead(HeadMix(head.hc_fn.data, head.hc_base.data, head.hc_scale.data), numbers, norms[2])
    held = {spec.name: torch.full(spec.shape, float("nan")) for spec in stream_specs(num_rows, 4)}
    buffers = StreamBuffers.of(held)

    def normed(y, norm):
        return y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.weight_H

    streams, expected, block_input = x.clone(), x.clone()[None], torch.empty(num_rows, HIDDEN)
    ours[0].begin(streams, buffers)
    with torch.no_grad():
        for connection, module, norm, following in zip(ours, modules, norms[:2], (ours[1], None), strict=True):
            connection.enter(streams, buffers, block_input)
            post, comb, collapsed = module(expected)
            torch.testing.assert_close(block_input, normed(collapsed, norm)[0], rtol=1e-5, atol=1e-5)
            connection.leave(streams, block_input.tanh(), buffers, following)
            y = normed(collapsed, norm).tanh()
            expected = post[..., None] * y[..., None, :] + comb.transpose(-1, -2) @ expected
            torch.testing.assert_close(streams, expected[0], rtol=1e-5, atol=1e-5)
        last(streams, buffers, block_input)
        torch.testing.assert_close(block_input, normed(head(expected), norms[2])[0], rtol=1e-5, atol=1e-5)

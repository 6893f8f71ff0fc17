"""The attention layer: projection, backend and output over tensors that are given."""

import pytest
import torch

from holdfast.attention.backend import Batch, LayerStep, LogitRows
from holdfast.families.grouped.layer import GroupedAttentionLayer, GroupedBuffers
from holdfast.kernels.attention.write_kv import HeadNorm, Rotary
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.layers.mlp import Linear
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8
from kernels.exactness import random, same_bits
from kernels.quantized_cases import exact_rows, exact_weight
from quant.whole_weights import quantize

NAN = float("nan")
NUM_ROWS, HIDDEN, HEADS, HEAD_DIM = 5, 6, 2, 4


class RecordingBackend:
    """Its queries are the first third of the projection, its answer twice of them; it keeps what it was called with."""

    name = "recording"

    def __init__(self) -> None:
        self.calls = []

    def write(self, qkv_TX, batch, head_norm, rotary, layer, out_THD):
        self.calls.append(("write", qkv_TX, batch, head_norm, rotary, layer, out_THD))
        out_THD.copy_(qkv_TX[:, :8].view(-1, HEADS, HEAD_DIM))

    def attend(self, q_THD, step: LayerStep, out_TX, wanted_only):
        self.calls.append(("attend", q_THD, *step, out_TX, wanted_only))
        out_TX.copy_(2 * q_THD.view(-1, 8))
        return out_TX[step.plan] if wanted_only else out_TX


@pytest.fixture
def parts():
    qkv_weight, qkv_bias, o_weight, o_bias = (
        random(24, HIDDEN),
        random(24, seed=1),
        random(HIDDEN, 8, seed=2),
        random(HIDDEN, seed=4),
    )
    head_norm = HeadNorm(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), 1e-5)
    rotary = Rotary(torch.ones(3, HEAD_DIM // 2), torch.ones(3, HEAD_DIM // 2))
    backend = RecordingBackend()
    layer = GroupedAttentionLayer(7, Linear(qkv_weight, qkv_bias), Linear(o_weight, o_bias), head_norm, rotary, backend)
    return layer, backend, head_norm, rotary, (qkv_weight, qkv_bias, o_weight, o_bias)


def buffers() -> GroupedBuffers:
    scratch = {"partial_out": torch.empty(3), "partial_lse": torch.empty(1)}
    return GroupedBuffers(
        torch.full((NUM_ROWS, 24), NAN),
        torch.full((NUM_ROWS, HEADS, HEAD_DIM), NAN),
        torch.full((NUM_ROWS, 8), NAN),
        scratch,
    )


def make_batch(rows: list[int] | None) -> Batch:
    nothing = torch.zeros(NUM_ROWS, dtype=torch.int64)
    logits = None if rows is None else LogitRows(torch.tensor(rows), ())
    return Batch(nothing, nothing, nothing.unsqueeze(0), (), logits)


@pytest.mark.parametrize("wanted", [None, [1, 4], [2]], ids=str)
def test_attention_layer_projects_attends_and_projects(parts, wanted):
    layer, backend, head_norm, rotary, (qkv_weight, qkv_bias, o_weight, o_bias) = parts
    batch, held, x = make_batch(wanted), buffers(), random(NUM_ROWS, HIDDEN, seed=3)
    plan = torch.tensor(wanted or [0])
    out = torch.full((NUM_ROWS, HIDDEN), NAN)
    y = layer(x, batch, plan, held, out, wanted_only=wanted is not None)
    (_, qkv, *written), (_, q, *attended) = backend.calls
    torch.testing.assert_close(qkv, x @ qkv_weight.T + qkv_bias)
    assert [a is b for a, b in zip(written, [batch, head_norm, rotary, 7, held.q_THD], strict=True)] == [True] * 5
    assert q is held.q_THD
    assert [
        a is b for a, b in zip(attended, [7, plan, held.scratch, held.attended_TX, wanted is not None], strict=True)
    ] == [True] * 5
    rows = list(range(NUM_ROWS)) if wanted is None else wanted
    assert y.data_ptr() == out.data_ptr(), "the result lies where it was wanted"
    assert y.shape == (len(rows), HIDDEN)
    torch.testing.assert_close(y, 2 * qkv[rows, :8] @ o_weight.T + o_bias)
    assert out[len(rows) :].isnan().all(), "rows that no one wants are not written"


def test_attention_layer_attend_takes_given_projection(parts):
    """The fused decode path computes the two products itself."""
    layer, backend, *_ = parts
    batch, held = make_batch(None), buffers()
    held.qkv_TX.copy_(random(NUM_ROWS, 24, seed=5))
    attended = layer.attend(batch, "plan", held)
    assert attended.data_ptr() == held.attended_TX.data_ptr()
    assert same_bits(attended, 2 * held.qkv_TX[:, :8])
    assert backend.calls[1][-1] is False, "all rows attend unless someone says otherwise"


def test_its_weights_are_within_reach(parts):
    layer, _, _, _, (qkv_weight, qkv_bias, o_weight, o_bias) = parts
    assert layer.qkv.weight_NK is qkv_weight
    assert layer.qkv.bias_N is qkv_bias
    assert layer.o.weight_NK is o_weight
    assert layer.o.bias_N is o_bias


def test_attention_layer_quantizes_rows_in_given_buffers(parts):
    """The projection of all rows, then that of the wanted ones, in the same room."""
    layer, backend, _, _, (qkv_weight, qkv_bias, o_weight, o_bias) = parts
    quantized = [
        QuantizedWeight(FP8, (len(weight), weight.shape[1]), *quantize(weight, FP8))
        for weight in (qkv_weight, o_weight)
    ]
    layer.qkv, layer.o = Linear(quantized[0], qkv_bias), Linear(quantized[1], o_bias)
    room = QuantizedRows(torch.zeros(NUM_ROWS * 8).to(torch.float8_e4m3fn), torch.zeros(NUM_ROWS))
    x, out = random(NUM_ROWS, HIDDEN, seed=3), torch.full((NUM_ROWS, HIDDEN), NAN)
    y = layer(x, make_batch([1, 4]), torch.tensor([1, 4]), buffers()._replace(quantized=room), out, wanted_only=True)
    qkv = backend.calls[0][1]
    expected = exact_rows(x, FP8) @ exact_weight(quantized[0]).T + qkv_bias
    torch.testing.assert_close(qkv.double(), expected, rtol=1e-5, atol=1e-5)
    attended = 2 * qkv[[1, 4], :8]
    expected = exact_rows(attended, FP8) @ exact_weight(quantized[1]).T + o_bias
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(room.scales_TB[:2], attended.abs().amax(-1) / 448), "two rows were quantized last"

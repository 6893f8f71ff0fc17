"""Latent attention layers: projections, backend and output over tensors that are given, with and without a latent of queries, and with an index."""

import pytest
import torch

from holdfast.attention.backend import Batch, LayerStep, LogitRows
from holdfast.families.latent.layer import LatentAttentionLayer, LatentBuffers, LatentWeights
from holdfast.families.sparse.layer import LatentIndex, SparseLatentAttentionLayer
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows
from holdfast.kernels.latent.write_index import IndexNorm
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.mlp import Linear, RMSNorm
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8
from kernels.exactness import random
from kernels.quantized_cases import exact_rows, exact_weight
from quant.whole_weights import quantize

NAN = float("nan")
NUM_ROWS, HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT, Q_RANK = 5, 6, 3, 4, 2, 5, 8, 7
QUERY, ROW = NOPE + ROPE, LATENT + ROPE
KV_B = random(HEADS, NOPE + VALUE, LATENT, seed=9)
NORM = LatentNorm(torch.ones(LATENT), 1e-6)
ROTARY = Rotary(torch.ones(3, ROPE // 2), torch.ones(3, ROPE // 2))


class RecordingBackend:
    """Its answer is the first elements of every head of the queries; it keeps what it was called with."""

    name = "recording"

    def __init__(self) -> None:
        self.calls = []

    def write(self, latent_TX, q_TND, batch, norm, rotary, layer):
        self.calls.append((latent_TX.clone(), q_TND, batch, norm, rotary, layer))

    def attend(self, q_TND, kv_b_NXL, step: LayerStep, out_TX, wanted_only):
        self.calls.append((q_TND, kv_b_NXL, *step, out_TX, wanted_only))
        out_TX.copy_(q_TND[..., :VALUE].flatten(1))
        return out_TX[step.plan] if wanted_only else out_TX


@pytest.fixture(params=[True, False], ids=["query latent", "no query latent"])
def parts(request):
    has_latent = request.param
    qkv_a = random(ROW + (Q_RANK if has_latent else 0), HIDDEN)
    q = random(HEADS * QUERY, Q_RANK if has_latent else HIDDEN, seed=1)
    o, bias = random(HIDDEN, HEADS * VALUE, seed=2), random(len(qkv_a), seed=3)
    q_norm = RMSNorm(1 + random(Q_RANK, seed=4), 0.3) if has_latent else None
    backend = RecordingBackend()
    products = Linear(qkv_a, bias), Linear(q), Linear(o)
    return LatentAttentionLayer(7, LatentWeights(*products, q_norm, NORM, KV_B), ROTARY, backend), backend, q_norm


def buffers(q_norm: RMSNorm | None) -> LatentBuffers:
    shapes = {"qkv_a": ROW, "q": HEADS * QUERY, "attended": HEADS * VALUE, "partial": 3}
    if q_norm is not None:
        shapes |= {"qkv_a": Q_RANK + ROW, "q_normed": Q_RANK}
    return LatentBuffers.of({name: torch.full((NUM_ROWS, width), NAN) for name, width in shapes.items()}, None)


def make_batch(rows: list[int] | None) -> Batch:
    nothing = torch.zeros(NUM_ROWS, dtype=torch.int64)
    logits = None if rows is None else LogitRows(torch.tensor(rows), ())
    return Batch(nothing, nothing, nothing.unsqueeze(0), (), logits)


@pytest.mark.parametrize("wanted", [None, [1, 4], [2], []], ids=str)
def test_attention_layer_projects_attends_and_projects(parts, wanted):
    layer, backend, q_norm = parts
    batch, held, x = make_batch(wanted), buffers(q_norm), random(NUM_ROWS, HIDDEN, seed=5)
    plan, out = torch.tensor(wanted or [], dtype=torch.int64), torch.full((NUM_ROWS, HIDDEN), NAN)
    y = layer(x, batch, plan, held, out, wanted_only=wanted is not None)
    written, attended = backend.calls
    qkv_a = x @ layer.qkv_a.weight_NK.T + layer.qkv_a.bias_N
    q_rank = 0 if q_norm is None else Q_RANK
    latent_q = qkv_a[:, :q_rank]
    if q_norm is not None:
        latent_q = latent_q * torch.rsqrt(latent_q.square().mean(-1, keepdim=True) + 0.3) * q_norm.weight_H
    q = (x if q_norm is None else latent_q) @ layer.q.weight_NK.T
    torch.testing.assert_close(written[0], qkv_a[:, q_rank:])
    torch.testing.assert_close(written[1], q.view(NUM_ROWS, HEADS, QUERY))
    assert [a is b for a, b in zip(written[2:], [batch, NORM, ROTARY, 7], strict=True)] == [True] * 4
    assert attended[0].data_ptr() == held.q_TX.data_ptr(), "queries are rotated where they are"
    assert [
        a is b
        for a, b in zip(attended[1:], [KV_B, 7, plan, held.scratch, held.attended_TX, wanted is not None], strict=True)
    ] == [True] * 6
    assert held.scratch.keys() == {"partial"}
    rows = list(range(NUM_ROWS)) if wanted is None else wanted
    assert not rows or y.data_ptr() == out.data_ptr(), "the result lies where it was wanted"
    heads = q.view(NUM_ROWS, HEADS, QUERY)[rows, :, :VALUE].flatten(1)
    torch.testing.assert_close(y, heads @ layer.o.weight_NK.T)
    assert out[len(rows) :].isnan().all(), "rows that no one wants are not written"


def coded(product: Linear) -> Linear:
    weight = product.weight_NK
    return Linear(QuantizedWeight(FP8, tuple(weight.shape), *quantize(weight, FP8)), product.bias_N)


def room() -> QuantizedRows:
    return QuantizedRows(torch.zeros(NUM_ROWS * HEADS * QUERY).to(torch.float8_e4m3fn), torch.zeros(NUM_ROWS))


def test_latent_layer_quantized_products_code_their_own_rows(parts):
    layer, backend, q_norm = parts
    layer.qkv_a, layer.q, layer.o = map(coded, (layer.qkv_a, layer.q, layer.o))
    x, held = random(NUM_ROWS, HIDDEN, seed=5), buffers(q_norm)._replace(quantized=room())
    y = layer(x, make_batch(None), None, held, torch.empty(NUM_ROWS, HIDDEN))
    inputs = x if q_norm is None else held.q_normed_TX
    for found, rows, product in (
        (held.qkv_a_TX, x, layer.qkv_a),
        (backend.calls[0][1].flatten(1), inputs, layer.q),
        (y, held.attended_TX, layer.o),
    ):
        expected = exact_rows(rows, FP8) @ exact_weight(product.weight_NK).T
        expected += 0.0 if product.bias_N is None else product.bias_N
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_room_for_codes_needs_all_products_of_x_quantized(parts):
    layer, _, q_norm = parts
    plain_q, quantized = layer.q, room()
    assert layer.room_for_codes(quantized, NUM_ROWS) is None
    layer.qkv_a = coded(layer.qkv_a)
    assert (layer.room_for_codes(quantized, NUM_ROWS) is None) == (q_norm is None), "one is plain"
    layer.q = coded(plain_q)
    codes = layer.room_for_codes(quantized, NUM_ROWS)
    assert codes is not None
    assert codes.codes_TK.shape == (NUM_ROWS, HIDDEN)


INDEX_HEADS, INDEX_DIM = 4, 6
INDEX_NORM = IndexNorm(torch.ones(INDEX_DIM), torch.zeros(INDEX_DIM), 1e-6)
PRODUCTS = ("qkv_a", "q", "index q", "index k")


class RecordingSparse(RecordingBackend):
    """A recording backend with an index."""

    def write_index(self, k_TD, q_TID, batch, norm, rotary, layer):
        self.calls.append((k_TD.clone(), q_TID, batch, norm, rotary, layer))

    def select(self, q_TID, weights_TI, step: LayerStep):
        self.calls.append((q_TID, weights_TI.clone(), *step))


def make_sparse(coded_products: tuple[str, ...] = ()) -> tuple[SparseLatentAttentionLayer, RecordingSparse, RMSNorm]:
    sizes = (Q_RANK + ROW, HIDDEN), (HEADS * QUERY, Q_RANK), (INDEX_HEADS * INDEX_DIM, Q_RANK), (INDEX_DIM, HIDDEN)
    qkv_a, q, index_q, index_k = (
        coded(Linear(random(*size, seed=seed))) if name in coded_products else Linear(random(*size, seed=seed))
        for seed, (name, size) in enumerate(zip(PRODUCTS, sizes, strict=True))
    )
    q_norm, o = RMSNorm(1 + random(Q_RANK, seed=4), 1e-6), Linear(random(HIDDEN, HEADS * VALUE, seed=5))
    index = LatentIndex(index_q, index_k, random(INDEX_HEADS, HIDDEN, seed=6), INDEX_NORM)
    backend = RecordingSparse()
    weights = LatentWeights(qkv_a, q, o, q_norm, NORM, KV_B)
    layer = SparseLatentAttentionLayer(7, weights, index, ROTARY, backend)
    return layer, backend, q_norm


def sparse_buffers() -> LatentBuffers:
    shapes = {"qkv_a": Q_RANK + ROW, "q_normed": Q_RANK, "q": HEADS * QUERY, "attended": HEADS * VALUE, "selected": 3}
    shapes |= {"index_q": INDEX_HEADS * INDEX_DIM, "index_k": INDEX_DIM, "index_weights": INDEX_HEADS}
    return LatentBuffers.of({name: torch.full((NUM_ROWS, width), NAN) for name, width in shapes.items()}, None)


def test_sparse_layer_writes_index_and_selects_before_attend():
    layer, backend, _ = make_sparse()
    batch, held, x, plan = make_batch(None), sparse_buffers(), random(NUM_ROWS, HIDDEN, seed=5), object()
    layer(x, batch, plan, held, torch.full((NUM_ROWS, HIDDEN), NAN))
    written, index_written, selected, attended = backend.calls
    torch.testing.assert_close(index_written[0], x @ layer.index.k.weight_NK.T)
    index_q = held.q_normed_TX @ layer.index.q.weight_NK.T
    torch.testing.assert_close(index_written[1], index_q.view(NUM_ROWS, INDEX_HEADS, INDEX_DIM))
    assert [a is b for a, b in zip(index_written[2:], [batch, INDEX_NORM, ROTARY, 7], strict=True)] == [True] * 4
    assert selected[0] is index_written[1], "index queries are rotated where they are"
    torch.testing.assert_close(selected[1], x @ layer.index.weights_IH.T * (INDEX_DIM * INDEX_HEADS) ** -0.5)
    assert [a is b for a, b in zip(selected[2:], [7, plan, held.scratch], strict=True)] == [True] * 3
    assert held.scratch.keys() == {"selected"}
    torch.testing.assert_close(written[0], x @ layer.qkv_a.weight_NK[Q_RANK:].T)
    assert attended[0].data_ptr() == held.q_TX.data_ptr()


@pytest.mark.parametrize(
    "names",
    [PRODUCTS, ("qkv_a", "q"), ("index q", "index k"), ("qkv_a", "index q"), ("q", "index k")],
    ids=" and ".join,
)
def test_sparse_layer_index_products_share_codes_of_equal_inputs(names):
    """Whichever are quantized, and whether a norm has left the codes of x before or not."""
    layer, backend, _ = make_sparse(names)
    x, held = random(NUM_ROWS, HIDDEN, seed=5), sparse_buffers()._replace(quantized=room())
    codes = layer.room_for_codes(held.quantized, NUM_ROWS)
    assert (codes is not None) == ({"qkv_a", "index k"} <= set(names))
    if codes is not None:
        quantize_rows(x, codes)
    layer(x, make_batch(None), None, held, torch.empty(NUM_ROWS, HIDDEN), is_coded=codes is not None)
    found = {
        "qkv_a": (held.qkv_a_TX, x, layer.qkv_a),
        "q": (held.q_TX, held.q_normed_TX, layer.q),
        "index q": (backend.calls[1][1].flatten(1), held.q_normed_TX, layer.index.q),
        "index k": (backend.calls[1][0], x, layer.index.k),
    }
    for name, (result, rows, product) in found.items():
        if name in names:
            expected = exact_rows(rows, FP8) @ exact_weight(product.weight_NK).T
        else:
            expected = rows.double() @ product.weight_NK.double().T
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5, msg=name)

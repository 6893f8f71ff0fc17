"""CompressedAttentionLayer: what a backend is given, in which order, the output projection in groups, and codes of inputs, over tensors that are given."""

from typing import Any

import pytest
import torch

from holdfast.attention.backend import Batch, LayerStep, LogitRows
from holdfast.families.compressed.layer import (
    CompressedAttentionLayer,
    CompressedBuffers,
    CompressedWeights,
    Entries,
    EntryIndex,
    OutputGroups,
)
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.kernels.latent.compress import Compressor
from holdfast.kernels.latent.write_latent import LatentNorm
from holdfast.layers.mlp import Linear, RMSNorm
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8
from kernels.exactness import random
from kernels.quantized_cases import exact_rows, exact_weight
from quant.whole_weights import quantize

NAN = float("nan")
NUM_ROWS, HIDDEN, HEADS, DIM, Q_RANK, GROUPS, RANK, INDEX_HEADS, INDEX_DIM = 5, 6, 4, 8, 7, 2, 3, 3, 4
EPS = 1e-3
NORM, ROTARY = LatentNorm(torch.ones(DIM), EPS), Rotary(torch.ones(3, 1), torch.ones(3, 1))
ENTRY_ROTARY = Rotary(torch.ones(3, 1), torch.zeros(3, 1))


class RecordingBackend:
    """Its answer is the queries; it keeps what it was called with, as it was then."""

    name = "recording"

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def _keep(self, name: str, *arguments: Any) -> None:
        assert name not in self.calls, f"{name} twice"
        self.calls[name] = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in arguments)

    def write(self, *arguments: Any) -> None:
        self._keep("write", *arguments)

    def compress(self, *arguments: Any) -> None:
        self._keep("compress", *arguments)

    def compress_index(self, *arguments: Any) -> None:
        self._keep("compress_index", *arguments)

    def select(self, q_TID, weights_TI, step: LayerStep) -> None:
        self._keep("select", q_TID, weights_TI, *step)

    def attend(self, q_TND, sinks_N, rotary, step: LayerStep, out_TX, wanted_only):
        self._keep("attend", q_TND, sinks_N, rotary, *step, wanted_only)
        rows = self.calls["write"][2].logits.rows_R if wanted_only else torch.arange(NUM_ROWS)
        out_TX[: len(rows)] = q_TND[rows].flatten(1)
        return out_TX[: len(rows)]


def compressor(dim: int, is_overlapped: bool) -> Compressor:
    return Compressor(4, is_overlapped, random(4, dim * (1 + is_overlapped)), torch.ones(dim), EPS)


def coded(product: Linear) -> Linear:
    weight = product.weight_NK
    assert isinstance(weight, torch.Tensor)
    return Linear(QuantizedWeight(FP8, tuple(weight.shape), *quantize(weight, FP8)), product.bias_N)


def make_layer(scopes: str) -> tuple[CompressedAttentionLayer, RecordingBackend]:
    entries = None
    if scopes == "all":
        entries = Entries(random(2 * DIM, HIDDEN, seed=6), compressor(DIM, False), ENTRY_ROTARY, None)
    elif scopes == "chosen":
        chooser = EntryIndex(Linear(random(INDEX_HEADS * INDEX_DIM, Q_RANK, seed=8)), compressor(INDEX_DIM, True), 3)
        pool = random(4 * DIM + 4 * INDEX_DIM + INDEX_HEADS, HIDDEN, seed=7)
        entries = Entries(pool, compressor(DIM, True), ENTRY_ROTARY, chooser)
    backend = RecordingBackend()
    weights = CompressedWeights(
        Linear(random(Q_RANK + DIM, HIDDEN)),
        Linear(random(HEADS * DIM, Q_RANK, seed=1)),
        OutputGroups(
            random(GROUPS, RANK, HEADS * DIM // GROUPS, seed=2), Linear(random(HIDDEN, GROUPS * RANK, seed=3))
        ),
        RMSNorm(1 + random(Q_RANK, seed=4), EPS),
        NORM,
        random(HEADS, seed=5),
        entries,
    )
    return CompressedAttentionLayer(3, weights, ROTARY, backend), backend  # type: ignore[arg-type]


def make_buffers() -> CompressedBuffers:
    widths = {"qkv_a": Q_RANK + DIM, "q_normed": Q_RANK, "q": HEADS * DIM, "attended": HEADS * DIM}
    widths |= {"grouped": GROUPS * RANK, "index_q": INDEX_HEADS * INDEX_DIM, "index_weights": INDEX_HEADS, "own": 3}
    held = {name: torch.full((NUM_ROWS, width), NAN) for name, width in widths.items()}
    return CompressedBuffers.of(held | {"pooled": torch.full((NUM_ROWS * 60,), NAN)}, None)


@pytest.mark.parametrize("scopes", ["window", "all", "chosen"])
@pytest.mark.parametrize("wanted", [None, [1, 4], []], ids=str)
def test_attention_layer_projects_attends_and_projects(scopes, wanted):
    layer, backend = make_layer(scopes)
    x, buffers, plan = random(NUM_ROWS, HIDDEN, seed=9), make_buffers(), object()
    nothing = torch.zeros(NUM_ROWS, dtype=torch.int64)
    logits = None if wanted is None else LogitRows(torch.tensor(wanted, dtype=torch.int64), ())
    batch = Batch(nothing, nothing, nothing.unsqueeze(0), (), logits)
    out = layer(x, batch, plan, buffers, torch.full((NUM_ROWS, HIDDEN), NAN), wanted_only=wanted is not None)
    calls = {"window": [], "all": ["compress"], "chosen": ["compress", "compress_index", "select"]}[scopes]
    assert list(backend.calls) == ["write", *calls, "attend"]
    qkv = x @ random(Q_RANK + DIM, HIDDEN).T
    latent = qkv[:, :Q_RANK]
    normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + EPS) * (1 + random(Q_RANK, seed=4))
    q = normed @ random(HEADS * DIM, Q_RANK, seed=1).T
    kv, q_TND, *others = backend.calls["write"]
    torch.testing.assert_close(kv, qkv[:, Q_RANK:])
    torch.testing.assert_close(q_TND.flatten(1), q)
    assert others == [batch, NORM, EPS, ROTARY, 3]
    rows = range(NUM_ROWS) if wanted is None else wanted
    groups = q[list(rows)].view(len(rows), GROUPS, HEADS * DIM // GROUPS)
    latents = torch.einsum("tgk,gnk->tgn", groups, layer.out.a_GNK).flatten(1)
    torch.testing.assert_close(out, latents @ random(HIDDEN, GROUPS * RANK, seed=3).T)
    assert list(buffers.scratch) == ["own"]
    assert backend.calls["attend"][4] is plan


def test_compressed_layer_splits_pooled_projection_by_columns():
    """Kv and gates of the layer, kv and gates of its index, and weights of index heads, with both roots in them."""
    layer, backend = make_layer("chosen")
    x, buffers = random(NUM_ROWS, HIDDEN, seed=9), make_buffers()
    nothing = torch.zeros(NUM_ROWS, dtype=torch.int64)
    batch = Batch(nothing, nothing, nothing.unsqueeze(0), (), None)
    layer(x, batch, None, buffers, torch.empty(NUM_ROWS, HIDDEN))
    pooled = x @ random(4 * DIM + 4 * INDEX_DIM + INDEX_HEADS, HIDDEN, seed=7).T
    own, keys, weights = pooled.split((4 * DIM, 4 * INDEX_DIM, INDEX_HEADS), dim=1)
    entries = layer.entries
    assert entries is not None
    assert entries.chooser is not None
    torch.testing.assert_close(backend.calls["compress"][0], own)
    assert backend.calls["compress"][2] is entries.compressor
    torch.testing.assert_close(backend.calls["compress_index"][0], keys)
    assert backend.calls["compress_index"][1].shape == (NUM_ROWS, INDEX_HEADS, INDEX_DIM)
    assert backend.calls["compress_index"][3] is entries.chooser.compressor
    torch.testing.assert_close(backend.calls["select"][1], weights * (INDEX_DIM * INDEX_HEADS) ** -0.5)
    assert [one is ENTRY_ROTARY for one in backend.calls["compress"][3:4]] == [True]
    rotaries = backend.calls["compress_index"][4:6]
    assert [one is two for one, two in zip(rotaries, (ENTRY_ROTARY, ROTARY), strict=True)] == [True, True]
    assert backend.calls["attend"][2] is ROTARY, "outputs are turned back by the positions of tokens"
    numbers = [
        backend.calls[name][at] for name, at in (("compress", 4), ("compress_index", 6), ("select", 2), ("attend", 3))
    ]
    assert numbers == [3, 3, 3, 3]


PRODUCTS = ("qkv_a", "q", "index q", "out")


@pytest.mark.parametrize("names", [PRODUCTS, ("qkv_a", "q"), ("qkv_a", "index q"), ("q",), ("out",)], ids=" and ".join)
def test_quantized_products_take_codes_of_their_own_rows(names):
    """Whichever are quantized: index queries share the codes of queries only if both take them."""
    layer, backend = make_layer("chosen")
    assert layer.entries is not None
    assert layer.entries.chooser is not None
    chooser = layer.entries.chooser
    plain = {"qkv_a": layer.qkv_a, "q": layer.q, "index q": chooser.q, "out": layer.out.b}
    own = {name: coded(product) if name in names else product for name, product in plain.items()}
    layer.qkv_a, layer.q, layer.out = own["qkv_a"], own["q"], layer.out._replace(b=own["out"])
    layer.entries = layer.entries._replace(chooser=chooser._replace(q=own["index q"]))
    x, held = random(NUM_ROWS, HIDDEN, seed=9), make_buffers()
    held = held._replace(quantized=QuantizedRows(torch.zeros(900).to(torch.float8_e4m3fn), torch.zeros(NUM_ROWS)))
    nothing = torch.zeros(NUM_ROWS, dtype=torch.int64)
    batch = Batch(nothing, nothing, nothing.unsqueeze(0), (), None)
    out = layer(x, batch, None, held, torch.empty(NUM_ROWS, HIDDEN))
    found = {
        "qkv_a": (held.qkv_a_TX, x),
        "q": (backend.calls["write"][1].flatten(1), held.q_normed_TX),
        "index q": (backend.calls["compress_index"][1].flatten(1), held.q_normed_TX),
        "out": (out, held.grouped_TX),
    }
    for name, (result, rows) in found.items():
        weight = own[name].weight_NK
        inputs = exact_rows(rows, FP8) if name in names else rows.double()
        expected = inputs @ (exact_weight(weight) if name in names else weight.double()).T
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5, msg=name)

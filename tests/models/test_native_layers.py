"""Layers as one call of C each: bits of the parts that run one by one, and every layer that C cannot run declines."""

from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch

from holdfast.config import Limits
from holdfast.layers.mlp import GatedMLP
from holdfast.models import native_layers
from holdfast.models.layer_stack import LayerStack
from holdfast.quant.packed_tiles import PART_BYTES, TILE_SCHEMES
from holdfast.quant.packed_weight import PackedPart, PackedWeight
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import INT8, MXFP4
from kernels.exactness import require_native, same_bits
from kernels.tile_cases import random_tiles
from loading.tiny_models import save_tiny
from models.test_decoder_workspace import EVERY_ROW
from quant.whole_weights import quantize
from runner.drive import Drive, LoadedModel, Request, Rig, load_model


@pytest.fixture(autouse=True)
def native() -> None:
    require_native()


LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=90, max_model_len=100, page_tokens=4)
PRODUCTS = ("qkv", "o", "gate_up", "down")
WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Rows in groups of 16, and columns in parts of 32."""
NATIVE = ("llama_tied", "llama_bias", "qwen3", "mistral_window", "qwen2_window")


@cache
def tiny(name: str) -> LoadedModel:
    """A model in float32 whose products tiles can hold."""
    with TemporaryDirectory() as folder:
        save_tiny(name, folder, **WIDTHS)
        return load_model(folder)


def with_products(model: LoadedModel, change) -> LoadedModel:
    """Replace the weights of all products of layers."""
    weights = {
        name: change(weight)
        if name.startswith("layers.") and name.split(".")[2] in PRODUCTS and weight.dim() == 2
        else weight
        for name, weight in model.weights.items()
    }
    return LoadedModel(model.spec, weights)


def coded(scheme):
    """Quantize a weight to a scheme."""

    def change(weight: torch.Tensor) -> QuantizedWeight:
        return QuantizedWeight(scheme, tuple(weight.shape), *quantize(weight, scheme))

    return change


def packed(activations: str, room_rows: int = 90):
    """Replace a weight by small random tiles in up to three types."""

    def change(weight: torch.Tensor) -> PackedWeight:
        size_n, size_k = weight.shape
        cuts = [0, 16, 48, size_n] if size_n > 64 else [0, size_n]
        parts = []
        for title, start, end in zip(("Q4_1", "Q8_0", "Q5_0"), cuts, cuts[1:], strict=False):
            scheme, tiles = random_tiles(title, end - start, size_k, seed=start)
            parts.append(PackedPart(TILE_SCHEMES[scheme.title], start, (end - start, size_k), (tiles,)))
        room = torch.empty(room_rows * (96 // 32) * PART_BYTES, dtype=torch.uint8)
        packed = PackedWeight((size_n, size_k), tuple(parts), room, activations)
        packed.check()
        return packed

    return change


def logits_of(rig: Rig) -> list[dict[int, torch.Tensor]]:
    """Drive prompts that arrive one after another; they are chunked, batched and decoded."""
    machine = Drive(rig, 100)
    requests = [
        Request(list(range(9, 9 + n)), 5, arrival, EVERY_ROW) for n, arrival in ((60, 0), (1, 0), (23, 2), (40, 3))
    ]
    machine.run(requests)
    return [machine.logits(request) for request in requests]


def assert_equal_to_parts(model: LoadedModel) -> None:
    """Compare the calls of C with the parts one by one."""
    rigs = [Rig(model, "native_paged", LIMITS, 100) for _ in range(2)]
    stack, parts = (rig.decoder for rig in rigs)
    assert isinstance(stack, LayerStack)
    assert isinstance(parts, LayerStack)
    assert stack.native is not None, native_layers.declined(stack.layers)
    parts.native = None
    for found, wanted in zip(*map(logits_of, rigs), strict=True):
        assert found.keys() == wanted.keys()
        for position, row in wanted.items():
            assert row.isfinite().all()
            assert same_bits(found[position], row), position


@pytest.mark.parametrize("name", NATIVE)
def test_native_layer_has_bits_of_its_parts(name):
    assert_equal_to_parts(tiny(name))


@pytest.mark.parametrize("name", ["llama_bias", "qwen3"])
@pytest.mark.parametrize(
    "change", [coded(INT8), coded(MXFP4), packed("int8"), packed("full"), packed("int8", room_rows=7)],
    ids=["int8", "mxfp4", "tiles", "tiles, full activations", "tiles, little room"],
)  # fmt: skip
def test_native_layer_with_codes_has_bits_of_its_parts(name, change):
    assert_equal_to_parts(with_products(tiny(name), change))


def test_native_layers_run_all_but_wanted_rows(monkeypatch):
    rig = Rig(tiny("llama"), "native_paged", LIMITS, 100)
    stack, calls = rig.decoder, []
    run = stack.native.run
    monkeypatch.setattr(stack.native, "run", lambda index, *others: calls.append(index) or run(index, *others))
    machine = Drive(rig, 100)
    machine.run([Request(list(range(9, 30)), 2)])
    # The prompt wants one row after its last layer; the next token wants all its rows.
    assert calls == [*range(stack.num_layers - 1), *range(stack.num_layers)]


def test_watched_projections_run_part_by_part(monkeypatch):
    rig, seen = Rig(tiny("llama"), "native_paged", LIMITS, 100), []
    rig.backend.on_write = lambda layer, *others: seen.append(layer)
    monkeypatch.setattr(rig.decoder.native, "run", lambda *arguments: pytest.fail("a watched step ran as one call"))
    Drive(rig, 100).run([Request(list(range(9, 30)), 1)])
    assert seen == list(range(rig.decoder.num_layers))


@pytest.mark.parametrize("name", ["opt", "gemma3"])
def test_other_layers_decline(name):
    with TemporaryDirectory() as folder:
        save_tiny(name, folder)
        rig = Rig(load_model(folder), "native_paged", LIMITS, 100)
    assert rig.decoder.native is None
    assert native_layers.declined(rig.decoder.layers)


def test_backend_in_torch_declines():
    rig = Rig(tiny("llama"), "torch_paged", LIMITS, 100)
    assert rig.decoder.native is None
    assert native_layers.declined(rig.decoder.layers) == "attention is not over plain pages in C"


def changed_mlp(**changes):
    """Return a function that replaces fields of every MLP."""

    def change(layer):
        mlp = GatedMLP(layer.mlp.gate_up, layer.mlp.down, layer.mlp.activation)
        for name, value in changes.items():
            setattr(mlp, name, value)
        return layer._replace(mlp=mlp)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed_mlp(activation="gelu"), "the MLP is not gated by silu alone"),
        (changed_mlp(limit=7.0), "the MLP is not gated by silu alone"),
        (lambda layer: layer._replace(mlp_out_norm=layer.mlp_norm), "outputs of blocks are normed"),
    ],
    ids=["gelu", "limit", "output norm"],
)
def test_unsupported_layer_declines(change, reason):
    layers = Rig(tiny("llama"), "native_paged", LIMITS, 100).decoder.layers
    assert native_layers.declined(layers) is None
    assert native_layers.declined([layers[0], change(layers[1])]) == reason


def test_tiles_without_room_decline():
    model = with_products(tiny("llama"), packed("int8"))
    weights = {
        name: replace(weight, room=None) if isinstance(weight, PackedWeight) else weight
        for name, weight in model.weights.items()
    }
    layers = Rig(LoadedModel(model.spec, weights), "native_paged", LIMITS, 100).decoder.layers
    assert native_layers.declined(layers) == "the workspace has no room for quantized activations"


def test_half_precision_declines():
    with TemporaryDirectory() as folder:
        save_tiny("llama", folder, **WIDTHS)
        model = load_model(folder, "bfloat16")
    rig = Rig(model, "torch_paged", LIMITS, 100, dtype="bfloat16")
    assert rig.decoder.native is None

"""Gated delta nets of model size on a GPU: against the references, in a captured graph, and without an allocation."""

import pytest
import torch

from holdfast.kernels.state.causal_conv import causal_conv_reference, causal_conv_triton
from holdfast.kernels.state.delta_chunks import delta_chunks_reference, delta_chunks_triton
from holdfast.kernels.state.delta_inputs import DeltaInputs
from holdfast.kernels.state.delta_step import delta_step_reference, delta_step_triton
from holdfast.kernels.state.state_geometry import delta_chunk_specs
from holdfast.kernels.state.state_rows import StateRows
from kernels.exactness import same_bits
from kernels.state_cases import NUM_PLACES, Heads, Layer, Part, Tokens, join, make_layer, make_rows, make_tokens
from kernels.triton_cases import assert_allocates_nothing

pytestmark = pytest.mark.gpu

MODELS = pytest.mark.parametrize(
    "heads",
    [Heads(16, 48, 128, 128), Heads(16, 32, 128, 128), Heads(8, 8, 128, 128, by_channel=True), Heads(3, 6, 96, 160)],
    ids=str,
)
PARTS = (Part(0, 0, 200), Part(4, 64, 64), Part(1, 7, 1), Part(2, 128, 67), Part(3, 0, 1))


def scratch_of(inputs: DeltaInputs, num_seqs: int, device) -> dict[str, torch.Tensor]:
    num_rows, value_heads, _ = inputs.v_THV.shape
    dtype, gate = str(inputs.v_THV.dtype).removeprefix("torch."), "channel" if inputs.by_channel else "head"
    specs = delta_chunk_specs(num_rows, num_seqs, value_heads, inputs.k_TGK.shape[2], dtype, gate)
    return {
        spec.name: torch.full(spec.shape, torch.nan, dtype=getattr(torch, spec.dtype), device=device) for spec in specs
    }


def make_states(layer: Layer) -> torch.Tensor:
    heads = layer.heads
    shape = NUM_PLACES, heads.value_heads, heads.key_dim, heads.value_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def run(layer: Layer, tokens: Tokens, parts, num_padding: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    rows = make_rows(parts, num_padding, device)
    state_PHKV, inputs = make_states(layer).to(device), layer.inputs(tokens, device)
    out_THV = torch.full_like(inputs.v_THV, torch.nan, memory_format=torch.contiguous_format)
    if torch.device(device).type == "cpu":
        delta_step_reference(inputs, rows, state_PHKV, out_THV)
        delta_chunks_reference(inputs, rows, state_PHKV, out_THV)
    else:
        delta_step_triton(inputs, rows, state_PHKV, out_THV)
        delta_chunks_triton(inputs, rows, state_PHKV, out_THV, scratch_of(inputs, len(parts) + 2, device))
    return out_THV.cpu(), state_PHKV.cpu()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@MODELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_delta_rule_of_model_size_matches_reference(device, heads, dtype) -> None:
    layer = make_layer(heads)
    sequences = [make_tokens(heads, part.num_rows, seed=i, dtype=dtype) for i, part in enumerate(PARTS)]
    tokens = Tokens(*(join(list(x), 3) for x in zip(*sequences, strict=True)))
    found_THV, found_PHKV = run(layer, tokens, PARTS, 3, device)
    wide = Tokens(*(x.float() for x in tokens))
    wanted_THV, wanted_PHKV = run(layer, wide, PARTS, 3, "cpu")
    rounded = off(wanted_THV[:-3].to(dtype), wanted_THV[:-3])
    assert off(found_THV[:-3], wanted_THV[:-3]) <= 2 * rounded + 1e-5
    assert off(found_PHKV, wanted_PHKV) <= (1e-5 if dtype == torch.float32 else 3e-5)
    assert not found_THV[-3:].any(), "padding is not zero"
    alone_THV, alone_PHKV = run(layer, sequences[3], PARTS[3:4], 0, device)
    assert same_bits(alone_THV, found_THV[265:332]), "neighbours change bits"
    assert same_bits(alone_PHKV[2], found_PHKV[2]), "neighbours change the bits of a state"


@MODELS
def test_decode_in_a_graph_replays_other_places(device, heads) -> None:
    """Rows, places and positions change between replays; so does the number of rows that are padding."""
    layer, num_rows = make_layer(heads), 4
    x_TC = torch.zeros(num_rows, heads.num_channels, device=device).bfloat16()
    weight_CW = torch.randn(heads.num_channels, 4, device=device).bfloat16()
    conv_PCW = torch.randn(NUM_PLACES, heads.num_channels, 3, device=device).bfloat16()
    tokens = make_tokens(heads, num_rows, dtype=torch.bfloat16)
    rows = make_rows([Part(0, 5, 1), Part(1, 5, 1)], 2, device, as_decode=True)
    qkv_TC, state_PHKV = torch.zeros_like(x_TC), make_states(layer).to(device)
    inputs = layer.inputs(tokens, device)
    sizes = heads.key_heads, heads.key_dim, heads.value_heads, heads.value_dim
    inputs = DeltaInputs.of(qkv_TC, *sizes, inputs.a_TH, inputs.b_TH, inputs.A_log_H, inputs.dt_bias_H)
    out_THV = torch.zeros(num_rows, heads.value_heads, heads.value_dim, device=device).bfloat16()

    def step() -> None:
        causal_conv_triton(x_TC, rows, weight_CW, conv_PCW, qkv_TC)
        delta_step_triton(inputs, rows, state_PHKV, out_THV)

    assert_allocates_nothing(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for number, places in enumerate(([3, 0, 4, -1], [2, -1, -1, -1], [1, 2, 3, 4])):
        x_TC.copy_(torch.randn(x_TC.shape, generator=torch.Generator().manual_seed(number)))
        rows.places_T.copy_(torch.tensor(places))
        rows.positions_T.copy_(torch.tensor([7, 0, 300, 2]))
        before = conv_PCW.cpu(), state_PHKV.cpu()
        graph.replay()
        copied = StateRows(rows.places_T.cpu(), rows.positions_T.cpu())
        wanted_TC, wanted_THV = torch.empty_like(x_TC, device="cpu"), torch.empty(out_THV.shape)
        causal_conv_reference(x_TC.cpu(), copied, weight_CW.cpu(), before[0], wanted_TC)
        on_host = DeltaInputs(*(x.cpu().float() for x in inputs))
        delta_step_reference(on_host, copied, before[1], wanted_THV)
        assert same_bits(conv_PCW.cpu(), before[0])
        torch.testing.assert_close(qkv_TC.cpu().float(), wanted_TC.float(), rtol=1e-2, atol=1e-5)
        assert off(out_THV.cpu(), wanted_THV) < 5e-3
        torch.testing.assert_close(state_PHKV.cpu(), before[1], rtol=1e-5, atol=1e-5)


@MODELS
def test_delta_chunks_allocates_nothing(device, heads) -> None:
    layer, tokens = make_layer(heads), make_tokens(heads, 130, dtype=torch.bfloat16)
    inputs, rows = layer.inputs(tokens, device), make_rows([Part(0, 0, 129), Part(1, 5, 1)], 0, device)
    scratch, state_PHKV = scratch_of(inputs, 4, device), make_states(layer).to(device)
    out_THV = torch.zeros_like(inputs.v_THV, memory_format=torch.contiguous_format)
    assert_allocates_nothing(lambda: delta_chunks_triton(inputs, rows, state_PHKV, out_THV, scratch))
    assert_allocates_nothing(lambda: delta_step_triton(inputs, rows, state_PHKV, out_THV))

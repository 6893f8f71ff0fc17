"""The gated delta rule in steps of any cut and company: against the token loop in float64, transformers, and itself to the bit."""

from collections.abc import Sequence

import pytest
import torch

from holdfast.kernels.state.delta_chunks import delta_chunks
from holdfast.kernels.state.delta_inputs import DeltaInputs, delta_gates
from holdfast.kernels.state.delta_step import delta_step
from holdfast.kernels.state.state_rows import StateRows
from kernels.exactness import same_bits
from kernels.state_cases import (
    NUM_PLACES,
    Heads,
    Layer,
    Part,
    Tokens,
    delta_recurrence,
    join,
    make_layer,
    make_rows,
    make_tokens,
)
from red_zones import RedZones

HEADS = pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(3, 3, 24, 16),
        Heads(1, 5, 48, 96),
        Heads(2, 4, 16, 24, by_channel=True),
        Heads(1, 2, 40, 8, by_channel=True),
    ],
    ids=lambda heads: "x".join(map(str, heads[:4])) + (" by channel" if heads.by_channel else ""),
)


class Model:
    """Places of poison between red zones, and the sequences that live in them."""

    def __init__(self, layer: Layer) -> None:
        heads = layer.heads
        self.layer, self.zones = layer, RedZones(torch.device("cpu"))
        self.state_PHKV = self.zones.allocate(NUM_PLACES, heads.value_heads, heads.key_dim, heads.value_dim)
        self.state_PHKV.fill_(torch.nan)

    def run(self, parts: Sequence[tuple[Part, Tokens]], num_padding: int = 2, as_decode: bool = False) -> torch.Tensor:
        """Outputs of a step; rows of tokens are those of each part."""
        tokens = Tokens(*(join(list(x), num_padding) for x in zip(*(one for _, one in parts), strict=True)))
        rows = make_rows([part for part, _ in parts], num_padding, as_decode=as_decode)
        heads = self.layer.heads
        out_THV = self.zones.allocate(len(tokens.qkv_TC), heads.value_heads, heads.value_dim, dtype=tokens.qkv_TC.dtype)
        out_THV.fill_(torch.nan)
        self.apply(self.layer.inputs(tokens), rows, out_THV)
        self.zones.check()
        taken = len(out_THV) - num_padding
        assert not out_THV[taken:].any(), "padding is not zero"
        return out_THV[:taken].clone()

    def apply(self, inputs: DeltaInputs, rows: StateRows, out_THV: torch.Tensor) -> None:
        delta_step(inputs, rows, self.state_PHKV, out_THV)
        delta_chunks(inputs, rows, self.state_PHKV, out_THV)


def in_pieces(layer: Layer, tokens: Tokens, cuts: Sequence[int], place: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state of a sequence in pieces that end at `cuts`."""
    model, outputs, start = Model(layer), [], 0
    for end in (*cuts, len(tokens.qkv_TC)):
        outputs.append(model.run([(Part(place, start, end - start), tokens.at(slice(start, end)))]))
        start = end
    others = [other for other in range(NUM_PLACES) if other != place]
    assert bool(model.state_PHKV[others].isnan().all()), "the state of another place was written"
    return torch.cat(outputs), model.state_PHKV[place]


@HEADS
@pytest.mark.parametrize("strength", [0.0, 6.0])
def test_delta_rule_in_any_pieces_matches_token_loop(heads, strength) -> None:
    layer, tokens = make_layer(heads, strength=strength), make_tokens(heads, 90)
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    for cuts in ((), (64,), (1, 2, 66), (17, 18, 19), range(1, 90)):
        out_THV, state_HKV = in_pieces(layer, tokens, cuts)
        torch.testing.assert_close(out_THV.double(), exact_THV, rtol=0, atol=1e-5)
        torch.testing.assert_close(state_HKV.double(), exact_HKV, rtol=0, atol=1e-5)


@HEADS
def test_delta_rule_cut_at_multiples_of_64_changes_no_bit(heads) -> None:
    layer, tokens = make_layer(heads), make_tokens(heads, 64 * 4 + 30)
    whole = in_pieces(layer, tokens, ())
    for cuts in ((64,), (128,), (64, 128, 192), (192, 256)):
        assert all(map(same_bits, in_pieces(layer, tokens, cuts), whole)), f"cut at {cuts}"


@HEADS
def test_delta_rule_is_batch_invariant(heads) -> None:
    """Prompts and single rows beside each other, in any order and place."""
    layer = make_layer(heads)
    lengths = (70, 1, 64, 1)
    sequences = [make_tokens(heads, 20 + length, seed=i) for i, length in enumerate(lengths)]
    alone, states = [], []
    for place, (length, tokens) in enumerate(zip(lengths, sequences, strict=True)):
        model = Model(layer)
        model.run([(Part(place, 0, 20), tokens.at(slice(20)))])
        alone.append(model.run([(Part(place, 20, length), tokens.at(slice(20, None)))]))
        states.append(model.state_PHKV[place])
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 2)):
        model = Model(layer)
        model.run([(Part(i, 0, 20), sequences[i].at(slice(20))) for i in order], 0)
        out_THV = model.run([(Part(i, 20, lengths[i]), sequences[i].at(slice(20, None))) for i in order], 5)
        for i, mine in zip(order, out_THV.split([lengths[i] for i in order]), strict=True):
            assert same_bits(mine, alone[i]), f"sequence {i} in {order}"
            assert same_bits(model.state_PHKV[i], states[i]), f"state {i} in {order}"


@HEADS
def test_delta_step_without_lists_equals_lists(heads) -> None:
    """A decode step: every row is a sequence, with padding between."""
    layer, places = make_layer(heads), (2, 0, 4)
    steps = [
        [(Part(place, start, 1), make_tokens(heads, 1, seed=10 * place + start)) for place in places]
        for start in range(3)
    ]
    listed, plain = Model(layer), Model(layer)
    for parts in steps:
        assert same_bits(listed.run(parts, 2), plain.run(parts, 2, as_decode=True))
    assert same_bits(listed.state_PHKV, plain.state_PHKV)


def test_delta_rule_of_repeated_keys_is_exact() -> None:
    """Equal keys, no decay and full strength: powers of the system grow to 1e17."""
    heads = Heads(1, 1, 16, 16)
    layer, tokens = make_layer(heads, strength=-30.0), make_tokens(heads, 128)
    tokens.qkv_TC[:, 16:32] = tokens.qkv_TC[0, 16:32]
    tokens.b_TH[:] = 20.0
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    out_THV, state_HKV = in_pieces(layer, tokens, ())
    torch.testing.assert_close(out_THV.double(), exact_THV, rtol=0, atol=1e-5)
    torch.testing.assert_close(state_HKV.double(), exact_HKV, rtol=0, atol=1e-5)


def test_delta_rule_zero_rows_stay_finite() -> None:
    heads = Heads()
    layer, tokens = make_layer(heads), make_tokens(heads, 70)
    tokens.qkv_TC.zero_()
    out_THV, state_HKV = in_pieces(layer, tokens, ())
    assert not out_THV.any()
    assert not state_HKV.any()


def grouped(layer: Layer, tokens: Tokens) -> dict[str, torch.Tensor]:
    """Arguments of transformers' functions."""
    inputs = layer.inputs(tokens)
    g_TH, _, beta_TH = delta_gates(inputs)
    group = inputs.group
    tensors = {"query": inputs.q_TGK, "key": inputs.k_TGK, "value": inputs.v_THV, "g": g_TH, "beta": beta_TH}
    for name in ("query", "key"):
        tensors[name] = tensors[name].repeat_interleave(group, dim=1)
    return {name: x.unsqueeze(0) for name, x in tensors.items()}


@HEADS
def test_delta_rule_matches_transformers(heads) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    functions = (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)
    if heads.by_channel:
        functions = (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention)
    layer, tokens = make_layer(heads), make_tokens(heads, 80)
    found = in_pieces(layer, tokens, ())
    rows = in_pieces(layer, tokens, range(1, 80))
    for function in functions:
        out, state = function(
            **grouped(layer, tokens), initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        for out_THV, state_HKV in (found, rows):
            torch.testing.assert_close(out_THV, out[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(state_HKV, state[0], rtol=0, atol=1e-5)

"""The gated delta rule in steps of any cut and company: against the token loop in float64, transformers, and itself to the bit."""

from collections.abc import Sequence

import pytest
import torch

from holdfast.kernels.state.delta_chunks import delta_chunks_reference, delta_chunks_triton
from holdfast.kernels.state.delta_inputs import DeltaInputs, delta_gates
from holdfast.kernels.state.delta_step import delta_step_reference, delta_step_triton
from holdfast.kernels.state.state_geometry import delta_chunk_specs
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
from kernels.triton_cases import QUIET
from red_zones import RedZones

pytestmark = QUIET

REFERENCES, KERNELS = (delta_step_reference, delta_chunks_reference), (delta_step_triton, delta_chunks_triton)
REFERENCE_HEADS = [
    Heads(),
    Heads(3, 3, 24, 16),
    Heads(1, 5, 48, 96),
    Heads(2, 4, 16, 24, by_channel=True),
    Heads(1, 2, 40, 8, by_channel=True),
]
KERNEL_HEADS = [Heads(1, 2, 24, 16), Heads(1, 1, 16, 40), Heads(1, 1, 8, 16, by_channel=True)]


def name_of(value: object) -> str:
    if isinstance(value, Heads):
        return "x".join(map(str, value[:4])) + (" by channel" if value.by_channel else "")
    return "kernels" if value is KERNELS else "references"


HEADS = pytest.mark.parametrize("heads", REFERENCE_HEADS, ids=name_of)
CASES = pytest.mark.parametrize(
    ("functions", "heads"),
    [(REFERENCES, heads) for heads in REFERENCE_HEADS] + [(KERNELS, heads) for heads in KERNEL_HEADS],
    ids=name_of,
)


class Model:
    """Places of poison between red zones, and the sequences that live in them."""

    def __init__(self, layer: Layer, functions=REFERENCES, device: torch.device | str = "cpu") -> None:
        heads = layer.heads
        self.functions, self.device = functions, torch.device("cpu" if functions is REFERENCES else device)
        self.layer, self.zones = layer, RedZones(self.device)
        self.state_PHKV = self.zones.allocate(NUM_PLACES, heads.value_heads, heads.key_dim, heads.value_dim)
        self.state_PHKV.fill_(torch.nan)

    def run(self, parts: Sequence[tuple[Part, Tokens]], num_padding: int = 2, as_decode: bool = False) -> torch.Tensor:
        """Outputs of a step; rows of tokens are those of each part."""
        tokens = Tokens(*(join(list(x), num_padding) for x in zip(*(one for _, one in parts), strict=True)))
        rows = make_rows([part for part, _ in parts], num_padding, self.device, as_decode=as_decode)
        heads = self.layer.heads
        out_THV = self.zones.allocate(len(tokens.qkv_TC), heads.value_heads, heads.value_dim, dtype=tokens.qkv_TC.dtype)
        out_THV.fill_(torch.nan)
        self.apply(self.layer.inputs(tokens, self.device), rows, out_THV)
        self.zones.check()
        taken = len(out_THV) - num_padding
        assert not out_THV[taken:].any(), "padding is not zero"
        return out_THV[:taken].cpu()

    def apply(self, inputs: DeltaInputs, rows: StateRows, out_THV: torch.Tensor) -> None:
        step, chunks = self.functions
        step(inputs, rows, self.state_PHKV, out_THV)
        num_seqs = len(out_THV) if rows.sequences_N4 is None else len(rows.sequences_N4)
        gate = "channel" if inputs.by_channel else "head"
        dtype = str(out_THV.dtype).removeprefix("torch.")
        heads = self.layer.heads
        scratch = {
            spec.name: self.zones.allocate(*spec.shape, dtype=getattr(torch, spec.dtype)).fill_(torch.nan)
            for spec in delta_chunk_specs(len(out_THV), num_seqs, heads.value_heads, heads.key_dim, dtype, gate)
        }
        chunks(inputs, rows, self.state_PHKV, out_THV, scratch)


def in_pieces(
    layer: Layer, tokens: Tokens, cuts: Sequence[int], functions=REFERENCES, device="cpu", place: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and state of a sequence in pieces that end at `cuts`."""
    model, outputs, start = Model(layer, functions, device), [], 0
    for end in (*cuts, len(tokens.qkv_TC)):
        outputs.append(model.run([(Part(place, start, end - start), tokens.at(slice(start, end)))]))
        start = end
    others = [other for other in range(NUM_PLACES) if other != place]
    assert bool(model.state_PHKV[others].isnan().all()), "the state of another place was written"
    return torch.cat(outputs), model.state_PHKV[place].cpu()


@pytest.mark.each_value
@CASES
@pytest.mark.parametrize("strength", [0.0, 6.0])
def test_delta_rule_in_any_pieces_matches_token_loop(device, functions, heads, strength) -> None:
    layer, tokens = make_layer(heads, strength=strength), make_tokens(heads, 80 if functions is REFERENCES else 67)
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    many = ((), (1, 2, 66), range(1, 80))
    for cuts in many if functions is REFERENCES else ((64,), (1, 2, 20)):
        out_THV, state_HKV = in_pieces(layer, tokens, cuts, functions, device)
        torch.testing.assert_close(out_THV.double(), exact_THV, rtol=0, atol=1e-5)
        torch.testing.assert_close(state_HKV.double(), exact_HKV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("heads", KERNEL_HEADS, ids=name_of)
def test_delta_rule_of_16_bit_inputs_keeps_exact_states(device, dtype, heads) -> None:
    """Only outputs are rounded: states are as if inputs were float32."""
    layer, tokens = make_layer(heads), make_tokens(heads, 67, dtype=dtype)
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    in_torch = in_pieces(layer, tokens, (1,))
    out_THV, state_HKV = in_pieces(layer, tokens, (1,), KERNELS, device)
    error, torch_error = ((out.double() - exact_THV).norm() / exact_THV.norm() for out in (out_THV, in_torch[0]))
    assert error <= 2 * torch_error, f"outputs are off by {error:.3g}, those of torch by {torch_error:.3g}"
    torch.testing.assert_close(state_HKV.double(), exact_HKV, rtol=0, atol=3e-5)


@pytest.mark.each_value
@CASES
def test_delta_rule_cut_at_multiples_of_64_changes_no_bit(device, functions, heads) -> None:
    is_long = functions is REFERENCES
    layer, tokens = make_layer(heads), make_tokens(heads, 64 * (4 if is_long else 2) + 3)
    whole = in_pieces(layer, tokens, (), functions, device)
    for cuts in ((64,), (128,), (64, 128, 192), (192, 256)) if is_long else ((64,), (128,)):
        found = in_pieces(layer, tokens, cuts, functions, device)
        assert all(map(same_bits, found, whole)), f"cut at {cuts}"


@pytest.mark.each_value
@CASES
def test_delta_rule_is_batch_invariant(device, functions, heads) -> None:
    """Prompts and single rows beside each other, in any order and place."""
    layer, before = make_layer(heads), 20 if functions is REFERENCES else 1
    lengths = (70, 1, 64, 1) if functions is REFERENCES else (66, 1, 2, 1)
    sequences = [make_tokens(heads, before + length, seed=i) for i, length in enumerate(lengths)]
    alone, states = [], []
    for place, (length, tokens) in enumerate(zip(lengths, sequences, strict=True)):
        model = Model(layer, functions, device)
        model.run([(Part(place, 0, before), tokens.at(slice(before)))])
        alone.append(model.run([(Part(place, before, length), tokens.at(slice(before, None)))]))
        states.append(model.state_PHKV[place].cpu())
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (1, 2))[: 3 if functions is REFERENCES else 2]:
        model = Model(layer, functions, device)
        model.run([(Part(i, 0, before), sequences[i].at(slice(before))) for i in order], 0)
        out_THV = model.run([(Part(i, before, lengths[i]), sequences[i].at(slice(before, None))) for i in order], 5)
        for i, mine in zip(order, out_THV.split([lengths[i] for i in order]), strict=True):
            assert same_bits(mine, alone[i]), f"sequence {i} in {order}"
            assert same_bits(model.state_PHKV[i].cpu(), states[i]), f"state {i} in {order}"


@CASES
def test_delta_step_without_lists_equals_lists(device, functions, heads) -> None:
    """A decode step: every row is a sequence, with padding after them."""
    layer, places = make_layer(heads), (2, 0, 4)
    listed, plain = (Model(layer, functions, device) for _ in range(2))
    for start in range(3):
        parts = [(Part(place, start, 1), make_tokens(heads, 1, seed=10 * place + start)) for place in places]
        assert same_bits(listed.run(parts, 2), plain.run(parts, 2, as_decode=True))
    assert same_bits(listed.state_PHKV.cpu(), plain.state_PHKV.cpu())
    assert bool(plain.state_PHKV[[1, 3]].isnan().all()), "the state of another place was written"


@pytest.mark.parametrize("functions", [REFERENCES, KERNELS], ids=name_of)
@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule_of_repeated_keys_is_exact(device, functions, by_channel) -> None:
    """Equal keys, no decay and full strength: powers of the system grow to 1e17."""
    heads = Heads(1, 1, 16, 16, by_channel)
    layer, tokens = make_layer(heads, strength=-30.0), make_tokens(heads, 70)
    tokens.qkv_TC[:, 16:32] = tokens.qkv_TC[0, 16:32]
    tokens.b_TH[:] = 20.0
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    out_THV, state_HKV = in_pieces(layer, tokens, (), functions, device)
    torch.testing.assert_close(out_THV.double(), exact_THV, rtol=0, atol=1e-5)
    torch.testing.assert_close(state_HKV.double(), exact_HKV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("functions", [REFERENCES, KERNELS], ids=name_of)
@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule_of_short_vectors_matches_token_loop(device, functions, by_channel) -> None:
    """Queries and keys so short that the number added to their square counts. Value heads share key heads."""
    heads = Heads(2, 4, 16, 16, by_channel)
    layer, tokens = make_layer(heads), make_tokens(heads, 5, scale=2e-4)
    tokens.qkv_TC[:, 64:] *= 5e3
    exact_THV, exact_HKV = delta_recurrence(layer, tokens)
    for cuts in ((1, 2), (2,)):
        out_THV, state_HKV = in_pieces(layer, tokens, cuts, functions, device)
        torch.testing.assert_close(out_THV.double(), exact_THV, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(state_HKV.double(), exact_HKV, rtol=1e-5, atol=1e-7)


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


@pytest.mark.each_value
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

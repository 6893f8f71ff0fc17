"""Draft tokens over states: whatever was proposed and accepted, outputs and states have the bits of one row a step."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from holdfast.kernels.state.causal_conv import causal_conv_reference, causal_conv_triton
from holdfast.kernels.state.delta_chunks import delta_chunks_reference, delta_chunks_triton
from holdfast.kernels.state.delta_drafts import delta_drafts_reference, delta_drafts_triton
from holdfast.kernels.state.delta_inputs import DeltaInputs
from holdfast.kernels.state.delta_step import delta_step_reference, delta_step_triton
from holdfast.kernels.state.kept_drafts import KeptDrafts
from holdfast.kernels.state.state_geometry import delta_chunk_specs, draft_specs
from holdfast.kernels.triton_compat import is_interpreted
from kernels.exactness import same_bits
from kernels.state_cases import NUM_PLACES, Heads, Layer, Part, Tokens, join, make_layer, make_rows, make_tokens
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET


class Functions(NamedTuple):
    """Operations of one kind."""

    conv: Callable[..., None]
    step: Callable[..., None]
    drafts: Callable[..., None]
    chunks: Callable[..., None]


REFERENCES = Functions(causal_conv_reference, delta_step_reference, delta_drafts_reference, delta_chunks_reference)
KERNELS = Functions(causal_conv_triton, delta_step_triton, delta_drafts_triton, delta_chunks_triton)


class Net:
    """A layer from inputs of the convolution on. All that no step has written is NaN, between red zones."""

    def __init__(
        self, layer: Layer, functions: Functions, device: Any, num_drafts: int, width: int = 4, dtype=torch.float32
    ) -> None:
        heads, self.functions = layer.heads, functions
        self.device = torch.device("cpu" if functions is REFERENCES else device)
        self.layer, self.num_drafts, self.dtype, self.zones = layer, num_drafts, dtype, RedZones(self.device)
        generator = torch.Generator().manual_seed(width)
        self.weight_CW = torch.randn(heads.num_channels, width, generator=generator).to(dtype).to(self.device)
        self.conv_PCW = self._filled(NUM_PLACES, heads.num_channels, width - 1, dtype=dtype)
        self.state_PHKV = self._filled(NUM_PLACES, heads.value_heads, heads.key_dim, heads.value_dim)
        names = str(dtype).removeprefix("torch.")
        specs = draft_specs(1, NUM_PLACES, num_drafts, heads.num_channels, heads.gate_shape, names)
        self.kept = tuple(self._filled(*one.shape[1:], dtype=getattr(torch, one.dtype)) for one in specs)

    def _filled(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.zones.allocate(*shape, dtype=dtype).fill_(torch.nan)

    def run(self, parts: Sequence[tuple[Part, Tokens]], num_padding: int = 1, as_decode: bool = False) -> torch.Tensor:
        """Outputs of a step."""
        tokens = Tokens(*(join(list(x), num_padding) for x in zip(*(one for _, one in parts), strict=True)))
        rows = make_rows([part for part, _ in parts], num_padding, self.device, as_decode=as_decode)
        x_TC, heads = amid_poison(tokens.qkv_TC, self.device), self.layer.heads
        mixed_TC = self._filled(*x_TC.shape, dtype=self.dtype)
        out_THV = self._filled(len(x_TC), heads.value_heads, heads.value_dim, dtype=self.dtype)
        kept = None
        if self.num_drafts:
            kept = KeptDrafts(*self.kept, accepted_SDC=self._filled(*self.kept[0].shape, dtype=self.dtype))
        self.functions.conv(x_TC, rows, self.weight_CW, self.conv_PCW, mixed_TC, kept=kept)
        inputs = self.layer.inputs(tokens._replace(qkv_TC=mixed_TC.cpu()), self.device)
        if kept is None:
            self.functions.step(inputs, rows, self.state_PHKV, out_THV)
        else:
            self.functions.drafts(inputs, rows, self.state_PHKV, out_THV, kept)
        if rows.chunks_M4 is not None and rows.sequences_N4 is not None:
            gate, name = "channel" if inputs.by_channel else "head", str(self.dtype).removeprefix("torch.")
            specs = delta_chunk_specs(
                len(out_THV), len(rows.sequences_N4), heads.value_heads, heads.key_dim, name, gate
            )
            scratch = {one.name: self._filled(*one.shape, dtype=getattr(torch, one.dtype)) for one in specs}
            self.functions.chunks(inputs, rows, self.state_PHKV, out_THV, scratch)
        self.zones.check()
        taken = len(out_THV) - num_padding
        assert not out_THV[taken:].any(), "padding is not zero"
        assert bool(out_THV[:taken].isfinite().all()), "something was read that no step has written"
        return out_THV[:taken].cpu()

    def states(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.conv_PCW[place].clone().cpu(), self.state_PHKV[place].clone().cpu()


class Client:
    """A sequence whose tokens are known; drafts that are to be rejected are other tokens."""

    def __init__(self, place: int, tokens: Tokens, wrong: Tokens, start: int) -> None:
        self.place, self.tokens, self.wrong, self.start = place, tokens, wrong, start
        self.num_accepted = 0

    def part(self, num_drafts: int, num_right: int) -> tuple[Part, Tokens]:
        """One row and draft tokens, of which the first `num_right` are right."""
        end = self.start + 1 + num_drafts
        given, right = [x[self.start : end].clone() for x in self.tokens], 1 + num_right
        for x, wrong in zip(given, self.wrong, strict=True):
            x[right:] = wrong[self.start + right : end]
        part = Part(self.place, self.start, 1 + num_drafts, num_drafts, self.num_accepted)
        self.start, self.num_accepted = self.start + right, num_right
        return part, Tokens(*given)


def truth(net: Net, place: int, tokens: Tokens, prompt: int) -> tuple[list[torch.Tensor], dict[int, Any]]:
    """Outputs by position, and states before each position after the prompt, of one row a step without draft tokens."""
    outputs, states = list(net.run([(Part(place, 0, prompt), tokens.at(slice(prompt)))])), {prompt: net.states(place)}
    for at in range(prompt, len(tokens.qkv_TC)):
        outputs += net.run([(Part(place, at, 1), tokens.at(slice(at, at + 1)))], as_decode=at % 2 == 0)
        states[at + 1] = net.states(place)
    return outputs, states


REFERENCE_HEADS = [Heads(), Heads(1, 3, 24, 16), Heads(1, 2, 16, 24, by_channel=True)]
KERNEL_HEADS = [Heads(1, 2, 8, 16), Heads(1, 1, 8, 40), Heads(1, 2, 8, 16, by_channel=True)]


def name_of(value: object) -> str:
    if isinstance(value, Heads):
        return "x".join(map(str, value[:4])) + (" by channel" if value.by_channel else "")
    return "kernels" if value is KERNELS else "references"


CASES = pytest.mark.parametrize(
    ("functions", "heads"),
    [(REFERENCES, heads) for heads in REFERENCE_HEADS] + [(KERNELS, heads) for heads in KERNEL_HEADS],
    ids=name_of,
)


@pytest.mark.each_value
@CASES
@pytest.mark.parametrize(("num_drafts", "width"), [(3, 4), (1, 2), (2, 5)])
def test_drafts_rejected_at_every_place_leave_the_bits_of_single_rows(
    device, functions, heads, num_drafts, width
) -> None:
    """Each number of drafts and of accepted ones follows each other; the state is that after the last row but drafts."""
    pairs = [(given, right) for given in range(num_drafts + 1) for right in range(given + 1)]
    if functions is KERNELS and is_interpreted():
        pairs = [(num_drafts, num_drafts), (num_drafts, 0), (num_drafts, num_drafts), (0, 0)]
    plan = [pair for one in pairs for pair in ((num_drafts, num_drafts), one)]
    layer, length = make_layer(heads), 3 + sum(1 + right for _, right in plan) + num_drafts + 1
    tokens, wrong = make_tokens(heads, length), make_tokens(heads, length, seed=9)
    outputs, states = truth(Net(layer, functions, device, num_drafts, width), 2, tokens, 3)
    net, client = Net(layer, functions, device, num_drafts, width), Client(2, tokens, wrong, 3)
    net.run([(Part(2, 0, 3), tokens.at(slice(3)))])
    for given, right in (*plan, (0, 0)):
        start = client.start
        found = net.run([client.part(given, right)], as_decode=given == 0)
        for at in range(right + 1):
            assert same_bits(found[at], outputs[start + at]), f"{given=} {right=} row {at}"
        assert all(map(same_bits, net.states(2), states[start + 1])), f"{given=} {right=}"


@pytest.mark.each_value
@CASES
def test_drafts_in_company_have_the_bits_of_single_rows(device, functions, heads) -> None:
    """Random drafts of several sequences beside prompts, on places that others have used."""
    num_drafts, dice = 3, Random(5)
    is_short = functions is KERNELS and is_interpreted()
    layer, num_steps, num_seqs = make_layer(heads), *((2, 2) if is_short else (5, 3))
    length = 2 + (num_drafts + 1) * (num_steps + 1)
    sequences = [(make_tokens(heads, length, seed=i), make_tokens(heads, length, seed=20 + i)) for i in range(num_seqs)]
    truths = [truth(Net(layer, functions, device, num_drafts), i, one, 2) for i, (one, _) in enumerate(sequences)]
    net = Net(layer, functions, device, num_drafts)
    clients = [Client(i, *pair, 2) for i, pair in enumerate(sequences)]
    net.run([(Part(i, 0, 2), one.at(slice(2))) for i, (one, _) in enumerate(sequences)])
    prompt = make_tokens(heads, 5, seed=40)
    for step in range(num_steps):
        own = dice.sample(clients, dice.randint(1, num_seqs))
        before = {client.place: client.start for client in own}
        parts = []
        for client in own:
            given = dice.randint(0, num_drafts)
            parts.append(client.part(given, dice.randint(0, given)))
        if step % 3 == 1:
            parts.insert(1, (Part(4, 0, 5), prompt))
        found = net.run(parts, num_padding=step % 3)
        row = 0
        for part, _ in parts:
            if part.place < 3:
                start, client = before[part.place], clients[part.place]
                for at in range(client.start - start):
                    assert same_bits(found[row + at], truths[part.place][0][start + at]), f"{step=} {part}"
                right = truths[part.place][1][start + 1]
                assert all(map(same_bits, net.states(part.place), right)), f"{step=} {part}"
            row += part.num_rows


@CASES
def test_first_row_with_drafts_starts_from_zeros(device, functions, heads) -> None:
    """A prompt of one token: its place may hold anything."""
    layer, tokens = make_layer(heads), make_tokens(heads, 4)
    outputs, states = truth(Net(layer, functions, device, 2), 1, tokens, 1)
    net = Net(layer, functions, device, 2)
    found = net.run([(Part(1, 0, 3, 2), tokens.at(slice(3)))])
    assert all(same_bits(found[at], outputs[at]) for at in range(3))
    assert all(map(same_bits, net.states(1), states[1]))
    found = net.run([(Part(1, 3, 1, 0, 2), tokens.at(slice(3, 4)))])
    assert same_bits(found[0], outputs[3])
    assert all(map(same_bits, net.states(1), states[4]))


@CASES
def test_single_rows_are_those_of_an_engine_without_drafts(device, functions, heads) -> None:
    """One row a step, through the functions of either: on a GPU these are other kernels."""
    layer, tokens = make_layer(heads), make_tokens(heads, 6)
    outputs, states = truth(Net(layer, functions, device, 0), 1, tokens, 2)
    others, other_states = truth(Net(layer, functions, device, 2), 1, tokens, 2)
    for own, other in ((outputs, others), (states[6], other_states[6])):
        for x, y in zip(own, other, strict=True):
            assert same_bits(x, y) if functions is REFERENCES else torch.allclose(x, y, rtol=1e-5, atol=1e-5)


def test_drafts_after_accepted_ones_leave_their_gates_to_other_programs(device) -> None:
    """Programs of a head come one after the other here: the second one reads gates after the first has written some."""
    heads = Heads(1, 1, 8, 40)
    layer, tokens = make_layer(heads), make_tokens(heads, 6)
    outputs, states = truth(Net(layer, KERNELS, device, 1), 0, tokens, 1)
    net, client = Net(layer, KERNELS, device, 1), Client(0, tokens, tokens, 1)
    net.run([(Part(0, 0, 1), tokens.at(slice(1)))])
    for given in (1, 1, 0):
        start = client.start
        found = net.run([client.part(given, given)])
        assert all(same_bits(found[at], outputs[start + at]) for at in range(given + 1))
        assert all(map(same_bits, net.states(0), states[start + 1]))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_drafts_of_16_bit_inputs_have_the_bits_of_single_rows(device, dtype) -> None:
    heads = Heads(1, 2, 8, 16)
    layer, tokens = make_layer(heads), make_tokens(heads, 8, dtype=dtype)
    for functions in (REFERENCES, KERNELS):
        outputs, states = truth(Net(layer, functions, device, 3, dtype=dtype), 0, tokens, 2)
        net = Net(layer, functions, device, 3, dtype=dtype)
        client = Client(0, tokens, make_tokens(heads, 8, seed=1, dtype=dtype), 2)
        net.run([(Part(0, 0, 2), tokens.at(slice(2)))])
        for given, right in ((3, 2), (2, 0), (0, 0)):
            start = client.start
            found = net.run([client.part(given, right)])
            assert all(same_bits(found[at], outputs[start + at]) for at in range(right + 1)), f"{given=} {right=}"
            assert all(map(same_bits, net.states(0), states[start + 1])), f"{given=} {right=}"


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(16, 48, 128, 128), Heads(8, 8, 128, 128, by_channel=True)], ids=name_of)
def test_drafts_of_model_size_have_the_bits_of_single_rows(device, heads) -> None:
    layer, tokens = make_layer(heads), make_tokens(heads, 40, dtype=torch.bfloat16)
    outputs, states = truth(Net(layer, KERNELS, device, 4, dtype=torch.bfloat16), 3, tokens, 2)
    net = Net(layer, KERNELS, device, 4, dtype=torch.bfloat16)
    client = Client(3, tokens, make_tokens(heads, 40, seed=1, dtype=torch.bfloat16), 2)
    net.run([(Part(3, 0, 2), tokens.at(slice(2)))])
    for given, right in ((4, 4), (4, 0), (3, 2), (0, 0), (4, 3), (4, 1), (1, 1), (0, 0), (0, 0)):
        start = client.start
        found = net.run([client.part(given, right)], as_decode=given == 0)
        assert all(same_bits(found[at], outputs[start + at]) for at in range(right + 1)), f"{given=} {right=}"
        assert all(map(same_bits, net.states(3), states[start + 1])), f"{given=} {right=}"


@pytest.mark.gpu
def test_drafts_replay_in_a_graph_and_allocate_nothing(device) -> None:
    """One captured launch serves steps with other drafts, accepted ones and none."""
    heads = Heads(2, 4, 64, 64)
    layer, tokens = make_layer(heads), make_tokens(heads, 24)
    outputs, states = truth(Net(layer, KERNELS, device, 3), 0, tokens, 2)
    net, client = Net(layer, KERNELS, device, 3), Client(0, tokens, make_tokens(heads, 24, seed=1), 2)
    net.run([(Part(0, 0, 2), tokens.at(slice(2)))])
    num_rows = 6
    x_TC = torch.zeros(num_rows, heads.num_channels, device=device)
    mixed_TC, out_THV = torch.empty_like(x_TC), torch.empty(num_rows, 4, 64, device=device)
    gates = [torch.zeros(num_rows, 4, device=device) for _ in range(2)]
    rows = make_rows([Part(0, 5, 1)], num_rows - 1, device)
    kept = KeptDrafts(*net.kept, accepted_SDC=torch.full_like(net.kept[0], torch.nan))
    weights = layer.A_log_H.to(device), layer.dt_bias_H.to(device)
    inputs = DeltaInputs.of(mixed_TC, 2, 64, 4, 64, *gates, *weights)

    def launch() -> None:
        causal_conv_triton(x_TC, rows, net.weight_CW, net.conv_PCW, mixed_TC, kept=kept)
        delta_drafts_triton(inputs, rows, net.state_PHKV, out_THV, kept)

    before = net.conv_PCW.clone(), net.state_PHKV.clone(), [x.clone() for x in net.kept]
    assert_allocates_nothing(launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    net.conv_PCW.copy_(before[0])
    net.state_PHKV.copy_(before[1])
    for own, old in zip(net.kept, before[2], strict=True):
        own.copy_(old)
    for given, right in ((3, 1), (2, 2), (0, 0), (3, 0), (1, 1), (0, 0)):
        start = client.start
        part, step = client.part(given, right)
        padding = num_rows - part.num_rows
        filled = make_rows([part], padding, device)
        for own, new in ((rows.places_T, filled.places_T), (rows.positions_T, filled.positions_T)):
            own.copy_(new)
        assert rows.drafts_T is not None and filled.drafts_T is not None  # noqa: PT018
        assert rows.sequences_N4 is not None and filled.sequences_N4 is not None  # noqa: PT018
        rows.drafts_T.copy_(filled.drafts_T)
        rows.sequences_N4.copy_(filled.sequences_N4)
        for own, new in zip((x_TC, *gates), step, strict=True):
            own[: part.num_rows].copy_(new)
        graph.replay()
        assert all(same_bits(out_THV[at].cpu(), outputs[start + at]) for at in range(right + 1)), f"{given=} {right=}"
        assert all(map(same_bits, net.states(0), states[start + 1])), f"{given=} {right=}"

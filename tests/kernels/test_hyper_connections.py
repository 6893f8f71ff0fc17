"""Hyper-connections: against transformers' modules and float64, amid poison, and batch invariant."""

import pytest
import torch

from holdfast.kernels import hyper_connections as hc
from holdfast.kernels import stream_geometry
from holdfast.kernels.hyper_connections import HeadMix, MixNumbers, StreamMix
from holdfast.kernels.stream_geometry import (
    chunks_of_split,
    num_shares,
    num_splits,
    row_block,
    stream_parts_spec,
    stream_specs,
    sum_columns,
)
from kernels.exactness import companies, random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import DTYPES, QUIET, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

CPU = torch.device("cpu")
NAN = float("nan")
NUMBERS = MixNumbers(1e-6, 1e-6, 20)
COARSE = MixNumbers(0.3, 0.02, 3)
"""Each number large enough, and unlike the others, so that its place shows."""
RMS_EPS = 0.07
SIZES = pytest.mark.parametrize(
    ("num_rows", "num_streams", "hidden"), [(1, 4, 64), (3, 4, 200), (17, 4, 96), (65, 4, 40), (2, 3, 33)], ids=str
)


def make_mix(num_streams: int, hidden: int, seed: int = 0) -> StreamMix:
    width = num_shares(num_streams)
    weight = random(width, num_streams * hidden, seed=seed, scale=2.0 * (num_streams * hidden) ** -0.5)
    return StreamMix(weight, random(width, seed=seed + 1), 1.0 + random(3, seed=seed + 2, scale=0.3))


def make_head(num_streams: int, hidden: int) -> HeadMix:
    mix = make_mix(num_streams, hidden, seed=9)
    return HeadMix(mix.weight_MX[:num_streams].contiguous(), mix.bias_M[:num_streams], mix.scale_3[:1])


def by_hand(x: torch.Tensor, mix: StreamMix | HeadMix, numbers: MixNumbers = NUMBERS) -> torch.Tensor:
    """Compute shares in float64, row by row."""
    num_streams, weight = x.shape[1], mix[0].double()
    bias, scale = mix[1].double(), mix[2].double()
    rows = []
    for streams in x.double():
        flat = streams.flatten()
        sums = weight @ (flat / (flat.square().mean() + numbers.norm_eps).sqrt())
        row = [*(torch.sigmoid(sums[:num_streams] * scale[0] + bias[:num_streams]) + numbers.eps)]
        if isinstance(mix, StreamMix):
            after = slice(num_streams, 2 * num_streams)
            row += [*(2 * torch.sigmoid(sums[after] * scale[1] + bias[after]))]
            comb = (sums[2 * num_streams :] * scale[2] + bias[2 * num_streams :]).view(num_streams, num_streams)
            comb = comb.softmax(1) + numbers.eps
            comb /= comb.sum(0) + numbers.eps
            for _ in range(numbers.num_iterations - 1):
                comb /= comb.sum(1)[:, None] + numbers.eps
                comb /= comb.sum(0) + numbers.eps
            row += [*comb.flatten()]
        rows.append(torch.stack(row))
    return torch.stack(rows)


def parts_for(zones: RedZones, x: torch.Tensor) -> torch.Tensor:
    spec = stream_parts_spec(x.shape[0], x.shape[1])
    return zones.allocate(*spec.shape).fill_(NAN)


def mixed(x, mix, device, fused=True):
    """Compute shares by kernels or references, between red zones."""
    zones, on_device = RedZones(device), type(mix)(*(among(tensor, device) for tensor in mix))
    x = among(x, device)
    parts, shares = parts_for(zones, x), zones.allocate(len(x), len(mix[0])).fill_(NAN)
    add_up, enter = (hc.combine_streams, hc.enter_block)
    kind = "triton" if fused else "reference"
    getattr(add_up, kind)(x, None, None, on_device[0], parts)
    norm, out = torch.ones(x.shape[2], device=device), torch.empty_like(x[:, 0])
    getattr(enter, kind)(x, parts, on_device, NUMBERS, shares, norm, RMS_EPS, out)
    zones.check()
    return shares.cpu()


@pytest.mark.each_value
@SIZES
@DTYPES
def test_stream_shares_match_float64(device, dtype, num_rows, num_streams, hidden):
    x = random(num_rows, num_streams, hidden, scale=3.0).to(dtype)
    for mix in (make_mix(num_streams, hidden), make_head(num_streams, hidden)):
        expected = by_hand(x, mix)
        for found in (mixed(x, mix, CPU, fused=False), mixed(x, mix, device)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.each_value
@SIZES
@DTYPES
def test_combine_streams_matches_float64(device, dtype, num_rows, num_streams, hidden):
    width = num_shares(num_streams)
    x, y = random(num_rows, num_streams, hidden).to(dtype), random(num_rows, hidden, seed=1).to(dtype)
    shares = random(num_rows, width, seed=2)
    post = shares[:, num_streams : 2 * num_streams].double()
    comb = shares[:, 2 * num_streams :].view(num_rows, num_streams, num_streams).double()
    combined = post[:, :, None] * y[:, None].double() + torch.einsum("tjk,tjh->tkh", comb, x.double())
    limits = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for where, combine in ((CPU, hc.combine_streams_reference), (device, hc.combine_streams_triton)):
        zones = RedZones(where)
        streams = zones.allocate(*x.shape, dtype=dtype).copy_(x)
        assert combine(streams, amid_poison(y, where), amid_poison(shares, where), None, None) is streams
        torch.testing.assert_close(streams.cpu().double(), combined, **limits)
        zones.check()


def run_block(fused: bool, device, x, y, shares, mix, norm, numbers=COARSE):
    """Streams combined, mixed anew and collapsed for the next block: (x, shares, input) by kernels, or by references."""
    zones, on_device = RedZones(device), type(mix)(*(among(tensor, device) for tensor in mix))
    x, y, shares, norm = (among(tensor, device) for tensor in (x, y, shares, norm))
    parts = parts_for(zones, x)
    made = zones.allocate(len(x), len(mix[0])).fill_(NAN)
    out = zones.allocate(*y.shape, dtype=x.dtype).fill_(NAN)
    combine, enter = (
        (hc.combine_streams_triton, hc.enter_block_triton)
        if fused
        else (hc.combine_streams_reference, hc.enter_block_reference)
    )
    assert combine(x, y, shares, on_device[0], parts) is x
    assert enter(x, parts, on_device, numbers, made, norm, RMS_EPS, out) is out
    zones.check()
    return x.cpu(), made.cpu(), out.cpu()


@pytest.mark.each_value
@SIZES
@DTYPES
@pytest.mark.parametrize("is_head", [False, True], ids=["layer", "head"])
def test_hyper_connections_two_launches_match_single_steps(device, dtype, num_rows, num_streams, hidden, is_head):
    x, y = random(num_rows, num_streams, hidden).to(dtype), random(num_rows, hidden, seed=1).to(dtype)
    norm = 1.0 + random(hidden, seed=3, scale=0.1)
    mix = make_head(num_streams, hidden) if is_head else make_mix(num_streams, hidden)
    shares = by_hand(x, make_mix(num_streams, hidden, seed=5)).float()
    expected = run_block(False, CPU, x, y, shares, mix, norm)
    streams = hc.combine_streams_reference(x.clone(), y, shares, None, None)
    torch.testing.assert_close(expected[1].double(), by_hand(streams, mix, COARSE), rtol=1e-5, atol=1e-6)
    collapsed = (expected[1][:, :num_streams, None].double() * streams.double()).sum(1).to(dtype).double()
    normed = collapsed * (collapsed.square().mean(-1, keepdim=True) + RMS_EPS).rsqrt() * norm.double()
    # A sum in float32 may round to the neighbour in bfloat16 of a sum in float64.
    neighbour = {"rtol": 2**-7, "atol": 1e-6} if dtype == torch.bfloat16 else limits_of(dtype)
    torch.testing.assert_close(expected[2].double(), normed, **neighbour)
    found = run_block(True, device, x, y, shares, mix, norm)
    is_gpu = device.type == "cuda"  # its sums have another order, and some numbers round to a neighbour
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, **limits_of(dtype, is_gpu))
    # The norm is that of rounded numbers: of others a third would round to a neighbour.
    assert is_gpu or float((found[2] == expected[2]).float().mean()) > (0.9 if dtype != torch.float32 else 0.0)


def limits_of(dtype: torch.dtype, is_gpu: bool = False) -> dict[str, float]:
    limit = 1e-5 if dtype == torch.float32 else 2e-2 if is_gpu else 2e-3
    return {"rtol": limit, "atol": limit}


@pytest.mark.parametrize("num_rows", [1, 2, 3, 17])
def test_combine_streams_several_chunks_a_split_match_reference(device, monkeypatch, num_rows):
    """Two splits of four chunks and a short last one."""
    monkeypatch.setattr(stream_geometry, "MAX_SPLITS", 2)
    x, y, mix, norm = random(num_rows, 4, 200), random(num_rows, 200, seed=1), make_mix(4, 200), torch.ones(200)
    shares = by_hand(x, make_mix(4, 200, seed=5)).float()
    expected = run_block(False, CPU, x, y, shares, mix, norm)
    for found, wanted in zip(run_block(True, device, x, y, shares, mix, norm), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_stream_shares_match_transformers(device):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=48, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    mix, head, x = make_mix(4, 48), make_head(4, 48), random(5, 4, 48)
    layer, last = theirs.DeepseekV4HyperConnection(config), theirs.DeepseekV4HyperHead(config)
    names = ("fn", "base", "scale")
    layer.load_state_dict(dict(zip(names, mix, strict=True)))
    last.load_state_dict({f"hc_{name}": tensor for name, tensor in zip(names, head, strict=True)})
    with torch.no_grad():
        post, comb, collapsed = layer(x[None])
        final = last(x[None])
    shares = mixed(x, mix, device)
    torch.testing.assert_close(shares[:, 4:8], post[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(shares[:, 8:].view(5, 4, 4), comb[0], rtol=1e-5, atol=1e-6)
    for pre, wanted in ((shares[:, :4], collapsed[0]), (mixed(x, head, device), final[0])):
        torch.testing.assert_close(torch.einsum("ts,tsh->th", pre, x), wanted, rtol=1e-5, atol=1e-6)


def test_stream_comb_is_doubly_stochastic_and_not_symmetric(device):
    shares = mixed(random(3, 4, 64), make_mix(4, 64), device)
    comb = shares[:, 8:].view(3, 4, 4)
    torch.testing.assert_close(comb.sum(1), torch.ones(3, 4), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(3, 4), rtol=1e-3, atol=1e-3)
    assert (comb - comb.transpose(1, 2)).abs().max() > 0.05


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_hyper_connections_are_batch_invariant_amid_poison(device):
    x, y, mix, norm = random(20, 4, 64), random(20, 64, seed=1), make_mix(4, 64), torch.ones(64)
    shares = by_hand(x, make_mix(4, 64, seed=5)).float()
    whole = run_block(True, device, x, y, shares, mix, norm)
    for rows in companies(20)[-4:]:
        for some, all_rows in zip(
            run_block(True, device, x[rows], y[rows], shares[rows], mix, norm), whole, strict=True
        ):
            torch.testing.assert_close(some, all_rows[rows], rtol=1e-6, atol=1e-6)
    again = run_block(True, device, x, y, shares, mix, norm)
    assert all(same_bits(left, right) for left, right in zip(whole, again, strict=True))
    x[7], y[3] = NAN, float("inf")
    clean = [row for row in range(20) if row not in (3, 7)]
    for found, wanted in zip(run_block(True, device, x, y, shares, mix, norm), whole, strict=True):
        assert same_bits(found[clean], wanted[clean])


def test_stream_shares_of_huge_and_vanishing_streams_are_exact(device):
    """What rms divides by cancels their size, until eps counts."""
    x = random(3, 4, 64) * torch.tensor([1e15, 1e-18, 0.0])[:, None, None]
    for mix in (make_mix(4, 64), make_head(4, 64)):
        torch.testing.assert_close(mixed(x, mix, device).double(), by_hand(x, mix), rtol=1e-5, atol=1e-6)


def test_hyper_connections_accept_no_rows(device):
    x, mix, parts = torch.empty(0, 4, 64), make_mix(4, 64), torch.empty(64)
    for launch in (hc.combine_streams_triton, hc.combine_streams_reference):
        launch(x, x[:, 0], torch.empty(0, 24), mix.weight_MX, parts)
    for enter in (hc.enter_block_triton, hc.enter_block_reference):
        enter(x, parts, mix, NUMBERS, torch.empty(0, 24), torch.ones(64), 1e-6, torch.empty(0, 64))


def test_stream_splits_and_blocks_are_known():
    """Up to 128 splits and 512 programs; chunks have 32 columns, and a split whole chunks."""
    assert [row_block(rows) for rows in (1, 2, 3, 64, 65)] == [1, 1, 16, 16, 64]
    assert [sum_columns(sums) for sums in (4, 15, 16, 24, 31, 32)] == [16, 16, 32, 32, 32, 64]
    found = [(rows, chunks_of_split(rows, 4128), num_splits(rows, 4128)) for rows in (1, 2, 64, 65, 512, 513, 40000)]
    assert found == [
        (1, 2, 65),
        (2, 2, 65),
        (64, 2, 65),
        (65, 2, 65),
        (512, 3, 43),
        (513, 3, 43),
        (40000, 129, 1),
    ]


@pytest.mark.parametrize("hidden", [40, 4096, 7168])
def test_stream_parts_are_enough_and_never_shrink(hidden):
    before = 0
    for num_rows in [*range(1, 700), 4096, 8192, 40000]:
        room = stream_parts_spec(num_rows, 4).shape[0]
        assert room >= max(before, num_splits(num_rows, hidden) * num_rows * sum_columns(num_shares(4)))
        before = room
    assert stream_parts_spec(8192, 4).num_bytes == 4 * 2**20
    assert [spec.shape for spec in stream_specs(3, 4)] == [(3, 24), (3 * 128 * 32,)]


def test_hyper_connections_refuse_wrong_shapes():
    x, mix = torch.ones(2, 4, 64), make_mix(4, 64)
    with pytest.raises(AssertionError, match="space for 5 sums"):
        hc.combine_streams_triton(x, None, None, mix.weight_MX, torch.empty(5))
    with pytest.raises(AssertionError, match="of 4 streams"):
        hc.combine_streams_triton(x, x[:, 0], torch.ones(2, 23), None, None)
    with pytest.raises(AssertionError, match="weight_MX"):
        hc.combine_streams_triton(x, None, None, mix.weight_MX[:, :-1], torch.empty(10**5))
    with pytest.raises(AssertionError, match="not dense"):
        hc.combine_streams_triton(
            x.transpose(0, 1).contiguous().transpose(0, 1), x[:, 0].clone(), torch.ones(2, 24), None, None
        )


@pytest.mark.gpu
def test_hyper_connections_allocate_nothing(device):
    x, y = random(9, 4, 4096).to(device), random(9, 4096).to(device)
    mix, norm = StreamMix(*(tensor.to(device) for tensor in make_mix(4, 4096))), torch.ones(4096, device=device)
    shares, parts = torch.rand(9, 24, device=device), torch.empty(stream_parts_spec(9, 4).shape, device=device)

    def layer():
        hc.enter_block(x, parts, mix, NUMBERS, shares, norm, 1e-6, y)
        hc.combine_streams(x, y, shares, mix.weight_MX, parts)

    hc.combine_streams(x, None, None, mix.weight_MX, parts)
    assert_allocates_nothing(layer)

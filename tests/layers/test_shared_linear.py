"""Output projections that ranks share: gathered ones give what one rank gives to the bit, summed ones nearly, and the same on all."""

import pytest
import torch

from distributed.lock_step import LockStep
from holdfast.distributed.mesh import meshes
from holdfast.kernels.gemm.linear import linear
from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.layers.shared_linear import Gathering, OutputSharing
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK
from kernels.exactness import random, require_native, same_bits
from quant.whole_weights import quantize

SIZE_N, SIZE_K = 24, 48
RANKS = pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
BIASES = pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])


def sharing_of(exchange, is_exact: bool, num_bytes: int) -> OutputSharing:
    room = torch.empty(num_bytes, dtype=torch.uint8)
    return OutputSharing(exchange, Gathering(exchange, room) if is_exact else None)


@RANKS
@BIASES
@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_shared_linear_gathered_equals_one_rank(num_ranks, has_bias, num_rows):
    require_native()
    x, weight = random(num_rows, SIZE_K, seed=1), random(SIZE_N, SIZE_K, seed=2)
    bias = random(SIZE_N, seed=3) if has_bias else None
    whole = linear(x, weight, bias)

    def summed(mesh, exchange):
        rank, out = mesh.tensor_rank, torch.full((num_rows, SIZE_N), torch.nan)
        own = weight.chunk(num_ranks, dim=1)[rank].contiguous()
        layer = sharing_of(exchange, False, 0).linear(own, bias)
        assert layer(x.chunk(num_ranks, dim=1)[rank].contiguous(), out) is out
        return out

    def gathered(mesh, exchange):
        rank, out = mesh.tensor_rank, torch.full((num_rows, SIZE_N), torch.nan)
        own, own_bias = (
            weight.chunk(num_ranks)[rank].contiguous(),
            None if bias is None else bias.chunk(num_ranks)[rank],
        )
        layer = sharing_of(exchange, True, x.nbytes).linear(own, own_bias)
        assert layer(x.chunk(num_ranks, dim=1)[rank].contiguous(), out) is out
        return out

    ranks = LockStep(meshes(num_ranks))
    for out in ranks.run(gathered):
        assert same_bits(out, whole)
    first, *others = ranks.run(summed)
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-5)
    assert all(same_bits(out, first) for out in others)


@pytest.mark.parametrize("is_exact", [False, True], ids=["reduce", "exact"])
def test_shared_linear_local_part_is_a_share_of_the_whole(is_exact):
    x, weight, bias = random(5, SIZE_K, seed=1), random(SIZE_N, SIZE_K, seed=2), random(SIZE_N, seed=3)
    whole = linear(x, weight, bias)

    def part(mesh, exchange):
        rank, split = mesh.tensor_rank, 0 if is_exact else 1
        own = weight.chunk(2, dim=split)[rank].contiguous()
        layer = sharing_of(exchange, is_exact, x.nbytes).linear(own, bias.chunk(2)[rank] if is_exact else bias, True)
        return layer(x.chunk(2, dim=1)[rank].contiguous(), torch.empty(5, len(own)))

    parts = LockStep(2).run(part)
    if is_exact:
        assert same_bits(torch.cat(parts, dim=1), whole)
    else:
        torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCK], ids=lambda scheme: scheme.name)
def test_shared_linear_codes_match_those_of_whole_rows(scheme):
    """Each rank has columns of another size: their own largest would give other scales."""
    require_native()
    size_k = 256
    x = random(6, size_k, seed=4) * torch.logspace(-2, 1, size_k)
    codes, scales = quantize(random(256, size_k, seed=5), scheme)
    whole = QuantizedWeight(scheme, (256, size_k), codes, scales)

    def room() -> QuantizedRows:
        return QuantizedRows(torch.empty(6 * size_k, dtype=torch.float8_e4m3fn), torch.empty(6 * 2))

    def gathered(mesh, exchange):
        rows = slice(128 * mesh.tensor_rank, 128 * (mesh.tensor_rank + 1))
        own_scales = scales.view(2, -1)[mesh.tensor_rank].reshape(scheme.scale_shape((128, size_k)))
        own = QuantizedWeight(scheme, (128, size_k), codes[rows].contiguous(), own_scales.contiguous())
        layer = sharing_of(exchange, True, x.nbytes).linear(own, None)
        assert not layer.takes_codes
        return layer(x.chunk(2, dim=1)[mesh.tensor_rank].contiguous(), torch.empty(6, 256), room())

    expected = linear(x, whole, None, torch.empty(6, 256), room())
    for out in LockStep(2).run(gathered):
        assert same_bits(out, expected)


def test_shared_linear_copies_no_rows_that_peers_can_read():
    """All of them, or the first ones, as where only some are wanted; then those that lie elsewhere again."""
    require_native()
    x, weight = random(7, SIZE_K, seed=1), random(SIZE_N, SIZE_K, seed=2)
    whole = linear(x, weight, None)

    def gathered(mesh, exchange):
        layer = sharing_of(exchange, True, x.nbytes).linear(weight.chunk(2)[mesh.tensor_rank].contiguous(), None)
        own = x.chunk(2, dim=1)[mesh.tensor_rank].contiguous()
        found = []
        for num_rows in (7, 3, 0, 7):
            rows = layer.room_for_inputs(torch.empty_like(own))
            assert rows.data_ptr() != own.data_ptr()
            rows.copy_(own)
            found.append(layer(rows[:num_rows], torch.empty(num_rows, SIZE_N)))
        return *found, layer(own, torch.empty(7, SIZE_N))

    for all_rows, some, none, again, copied in LockStep(2).run(gathered):
        assert same_bits(some, whole[:3])
        assert none.shape == (0, SIZE_N)
        assert all(same_bits(one, whole) for one in (all_rows, again, copied))

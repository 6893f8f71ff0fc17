"""Experts that ranks share, sliced and whole: gathered they give what one rank gives to the bit, summed nearly, and the same on all."""

import pytest
import torch

from distributed.lock_step import LockStep
from holdfast.distributed.mesh import meshes
from holdfast.kernels.activation import GateForm
from holdfast.kernels.geometry import order_specs
from holdfast.kernels.moe.routing import Routing
from holdfast.layers.mlp import GatedMLP, Linear, MLPBuffers
from holdfast.layers.moe import ExpertBiases, ExpertBuffers, ExpertLayer, SharedExpert
from holdfast.layers.shared_experts import ExpertSharing
from holdfast.layers.shared_linear import Gathering, OutputSharing
from kernels.exactness import random, require_native, same_bits

NAN = float("nan")
HIDDEN, INNER, SHARED, NUM_EXPERTS, TOP_K = 12, 8, 16, 8, 3
ROUTER = random(NUM_EXPERTS, HIDDEN, seed=1)
GATE_UP, DOWN = random(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=2), random(NUM_EXPERTS, HIDDEN, INNER, seed=3)
SHARED_GATE_UP, SHARED_DOWN = random(2 * SHARED, HIDDEN, seed=4), random(HIDDEN, SHARED, seed=5)
SHARED_GATE = random(1, HIDDEN, seed=6)
BIASES = ExpertBiases(
    random(NUM_EXPERTS, seed=7), random(NUM_EXPERTS, 2 * INNER, seed=8), random(NUM_EXPERTS, HIDDEN, seed=9)
)
FORM = GateForm(is_interleaved=True, limit=0.7)
"""Gates and ups alternate, so that some of both are neighbouring columns of a bias."""


def layer_alone(has_shared: bool) -> ExpertLayer:
    shared = None
    if has_shared:
        shared = SharedExpert(GatedMLP(Linear(SHARED_GATE_UP), Linear(SHARED_DOWN), "silu"), SHARED_GATE)
    return ExpertLayer(ROUTER, GATE_UP, DOWN, Routing(True), shared, BIASES, FORM)


def layer_of(mesh, exchange, has_shared: bool) -> ExpertLayer:
    """A rank's share, cut as models/sharding.py cuts it."""
    rank, size, is_exact, is_whole = mesh.tensor_rank, mesh.tensor_size, mesh.is_exact, mesh.expert_size > 1
    room = torch.empty(2**16, dtype=torch.uint8)
    outputs = OutputSharing(exchange, Gathering(exchange, room) if is_exact else None)
    router_E, gate_up_EX, down_EH, _ = BIASES
    assert gate_up_EX is not None
    assert down_EH is not None
    if is_whole:
        gate_up, down = (weight.chunk(size)[rank] for weight in (GATE_UP, DOWN))
        first, second = gate_up_EX.chunk(size)[rank], down_EH.chunk(size)[rank]
        sharing = ExpertSharing(outputs, rank * NUM_EXPERTS // size, NUM_EXPERTS // size)
    else:
        gate_up, down = GATE_UP.chunk(size, 1)[rank], DOWN.chunk(size, 1 if is_exact else 2)[rank]
        first, second = gate_up_EX.chunk(size, 1)[rank], down_EH.chunk(size, 1)[rank] if is_exact else down_EH
        sharing = ExpertSharing(outputs)
    own = ExpertBiases(router_E, first.contiguous(), second.contiguous())
    shared = None
    if has_shared:
        halves = torch.cat([half.chunk(size)[rank] for half in SHARED_GATE_UP.chunk(2)])
        last = SHARED_DOWN.chunk(size, 0 if is_exact else 1)[rank].contiguous()
        mlp = GatedMLP(Linear(halves), outputs.linear(last, None, not sharing.sums_pairs), "silu")
        shared = SharedExpert(mlp, SHARED_GATE)
    return ExpertLayer(
        ROUTER, gate_up.contiguous(), down.contiguous(), Routing(True), shared, own, FORM, sharing=sharing
    )


def buffers_of(num_rows: int, has_shared: bool, ranks: int = 1, num_local: int | None = None) -> ExpertBuffers:
    inner, shared = INNER if num_local else INNER // ranks, SHARED // ranks
    specs = order_specs(num_rows, TOP_K, NUM_EXPERTS, num_local)
    return ExpertBuffers(
        torch.full((num_rows, NUM_EXPERTS), NAN),
        torch.full((num_rows, TOP_K), -7, dtype=torch.int32),
        torch.full((num_rows, TOP_K), NAN),
        torch.full((num_rows * TOP_K, inner), NAN),
        torch.full((num_rows * TOP_K, HIDDEN), NAN),
        tuple(torch.full(spec.shape, -7, dtype=torch.int32) for spec in specs),
        MLPBuffers(torch.full((num_rows, 2 * shared), NAN), torch.full((num_rows, shared), NAN))
        if has_shared
        else None,
        torch.full((num_rows, HIDDEN), NAN) if has_shared else None,
        torch.full((num_rows, 1), NAN) if has_shared else None,
        local_ids_TS=torch.full((num_rows, TOP_K), -7, dtype=torch.int32) if num_local else None,
    )


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_whole", [False, True], ids=["sliced", "whole"])
@pytest.mark.parametrize("has_shared", [False, True], ids=["routed", "shared"])
@pytest.mark.parametrize("num_rows", [1, 9, 40])
def test_shared_experts_gathered_equal_one_rank(num_ranks, is_whole, has_shared, num_rows):
    require_native()
    x = random(num_rows, HIDDEN, seed=20)
    alone = layer_alone(has_shared)(x, buffers_of(num_rows, has_shared), torch.full_like(x, NAN))

    def give(mesh, exchange):
        num_local = NUM_EXPERTS // num_ranks if is_whole else None
        layer, buffers = layer_of(mesh, exchange, has_shared), buffers_of(num_rows, has_shared, num_ranks, num_local)
        out = torch.full_like(x, NAN)
        assert layer(x, buffers, out) is out
        return out

    for out in LockStep(meshes(num_ranks, has_expert_parallelism=is_whole, is_exact=True)).run(give):
        assert same_bits(out, alone)
    first, *others = LockStep(meshes(num_ranks, has_expert_parallelism=is_whole)).run(give)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-4)
    assert all(same_bits(out, first) for out in others)

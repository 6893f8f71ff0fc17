"""Routing by a table: against transformers' router and float64 by hand, with ids and entries that are none."""

import math

import pytest
import torch

from holdfast.kernels.moe.hash_routing import (
    route_by_table,
    route_by_table_reference,
    route_by_table_triton,
    table_problem,
)
from holdfast.kernels.moe.routing import Routing
from kernels.exactness import random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

CPU = torch.device("cpu")
V4 = Routing(True, "sqrtsoftplus", share_scale=1.5)
ROUTINGS = (V4, V4._replace(normalizes=False), Routing(True, "sigmoid"), Routing(), Routing(True, share_scale=2.0))


def make_table(vocab_size: int, top_k: int, num_experts: int) -> torch.Tensor:
    return torch.randint(num_experts, (vocab_size, top_k), generator=torch.Generator().manual_seed(vocab_size))


def run(route, logits, table, tokens, routing, device, bias=None):
    zones = RedZones(device)
    ids = zones.allocate(len(logits), table.shape[1], dtype=torch.int32).fill_(2**30)
    shares = zones.allocate(len(logits), table.shape[1]).fill_(float("nan"))
    placed = [among(each, device) for each in (logits, table, tokens)]
    route(*placed, routing, ids, shares, None if bias is None else among(bias, device))
    zones.check()
    return ids.cpu(), shares.cpu()


def both(device):
    return ((route_by_table_reference, CPU), (route_by_table_triton, device))


def scores_by_hand(row: list[float], scoring: str) -> list[float]:
    if scoring == "softmax":
        weights = [math.exp(x - max(row)) for x in row]
        return [x / sum(weights) for x in weights]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    return [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row]


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), [(5, 3, 12), (1, 6, 256), (2, 6, 384)], ids=str)
def test_route_by_table_matches_float64(device, routing, num_rows, top_k, num_experts):
    logits, table = random(num_rows, num_experts, scale=4.0), make_table(31, top_k, num_experts)
    bias, tokens = random(num_experts, seed=3), torch.arange(num_rows) * 17 % 31
    expected = []
    for row, token in zip((logits + bias).double().tolist(), tokens.tolist(), strict=True):
        scores = scores_by_hand(row, routing.scoring)
        chosen = [scores[expert] for expert in table[token].tolist()]
        total = sum(chosen) if routing.normalizes else 1.0
        expected.append([share / total * routing.share_scale for share in chosen])
    for route, where in both(device):
        for dtype in (torch.int32, torch.int64):
            ids, shares = run(route, logits, table.to(dtype), tokens.to(dtype), routing, where, bias)
            assert torch.equal(ids, table[tokens].int())
            torch.testing.assert_close(shares.double(), torch.tensor(expected).double(), rtol=4e-6, atol=1e-30)


def test_route_by_table_matches_transformers(device):
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    config = DeepseekV4Config(
        hidden_size=24, n_routed_experts=24, num_experts_per_tok=4, routed_scaling_factor=1.5, vocab_size=40
    )
    router, table, tokens = DeepseekV4HashRouter(config), make_table(40, 4, 24), torch.arange(33) * 7 % 40
    router.weight.data.copy_(torch.eye(24))
    router.tid2eid.copy_(table)
    logits = random(33, 24, seed=4, scale=3.0)
    with torch.no_grad():
        _, expected, expected_ids = router(logits, tokens)
    for route, where in both(device):
        ids, shares = run(route, logits, table, tokens, V4, where)
        assert torch.equal(ids, expected_ids.int())
        torch.testing.assert_close(shares, expected, rtol=4e-6, atol=1e-30)


def test_route_by_table_clamps_ids_outside_the_table(device):
    """Padding may hold any id; a damaged table is refused when it is loaded, and stays within its memory all the same."""
    table, tokens = make_table(9, 3, 12), torch.tensor([-1, 9, 2**40, -(2**40), 4])
    table[4] = torch.tensor([-5, 12, 2**40])
    for route, where in both(device):
        ids, shares = run(route, random(5, 12), table, tokens, V4, where)
        assert ids.tolist() == [table[row].tolist() for row in (0, 8, 8, 0)] + [[0, 11, 11]]
        assert shares.isfinite().all()


def test_route_by_table_nan_stays_in_its_token(device):
    logits, table, tokens = random(4, 12), make_table(9, 3, 12), torch.arange(4)
    clean = run(route_by_table_triton, logits, table, tokens, V4, device)
    logits[2] = float("nan")
    for route, where in both(device):
        ids, shares = run(route, logits, table, tokens, V4, where)
        assert torch.equal(ids, clean[0])
        assert shares[2].isnan().all()
        torch.testing.assert_close(shares[[0, 1, 3]], clean[1][[0, 1, 3]])
    again = run(route_by_table_triton, logits[:2], table, tokens[:2], V4, device)
    assert same_bits(again[1], clean[1][:2])


def test_route_by_table_without_rows_is_empty(device):
    for route, where in both(device):
        ids, _ = run(route, torch.empty(0, 12), make_table(9, 3, 12), torch.empty(0, dtype=torch.int64), V4, where)
        assert ids.shape == (0, 3)


def test_table_problem_names_the_fault():
    table = make_table(9, 3, 12)
    assert table_problem(table, 12) is None
    assert table_problem(table.int(), 12) is None
    assert table_problem(table[:0], 12) is None
    for named in (12, -1):
        table[4, 1] = named
        problem = table_problem(table, 12)
        assert problem is not None
        assert f"names expert {named} for token 4, as one of 1 entries" in problem
        assert "experts 0 to 11" in problem
    assert "it takes int32 or int64" in str(table_problem(table.float(), 12))


def test_route_by_table_refuses_mismatched_shapes():
    logits, table, tokens = torch.ones(2, 12), make_table(9, 3, 12), torch.arange(2)
    ids, shares = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, 3)
    with pytest.raises(AssertionError, match="and 3 experts of a token"):
        route_by_table(logits, table[:, :2].contiguous(), tokens, V4, ids, shares)
    with pytest.raises(AssertionError, match="for 2 tokens"):
        route_by_table(logits, table, tokens[:1], V4, ids, shares)
    with pytest.raises(AssertionError, match="has no groups"):
        route_by_table(logits, table, tokens, Routing(num_groups=2), ids, shares)


@pytest.mark.gpu
def test_route_by_table_allocates_nothing(device):
    logits, table, tokens = random(9, 256).to(device), make_table(99, 6, 256).to(device), torch.arange(9, device=device)
    ids, shares = torch.empty(9, 6, dtype=torch.int32, device=device), torch.empty(9, 6, device=device)
    assert_allocates_nothing(lambda: route_by_table(logits, table, tokens, V4, ids, shares))

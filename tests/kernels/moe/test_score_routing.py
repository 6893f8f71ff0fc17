"""Routing by scores and groups (DeepSeek, GLM): against transformers' routers and against float64 by hand, ties and NaN included."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from holdfast.kernels.moe.routing import Routing, route_tokens, route_tokens_reference, route_tokens_triton
from kernels.exactness import companies, random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

CPU = torch.device("cpu")
V2 = Routing(num_groups=4, groups_taken=2, share_scale=16.0)
V3 = Routing(True, "sigmoid", 4, 2, "two_largest", 2.5)
GLM = Routing(True, "sigmoid", 1, 1, "two_largest", 1.8)
V4 = Routing(True, "sqrtsoftplus", share_scale=1.5)
ROUTINGS = {
    "scaled": Routing(share_scale=2.5),
    "scaled and normalized": Routing(True, share_scale=2.5),
    "V2": V2,
    "V2 normalized": V2._replace(normalizes=True),
    "V3": V3,
    "V3 as they are": V3._replace(normalizes=False),
    "GLM": GLM,
    "sigmoid, largest of groups": V3._replace(group_score="largest"),
    "softmax, two of groups": V2._replace(group_score="two_largest"),
    "all groups taken": V3._replace(groups_taken=4),
    "V4": V4,
    "V4 as they are, two of groups": V3._replace(normalizes=False, scoring="sqrtsoftplus"),
}
EACH = pytest.mark.parametrize("routing", list(ROUTINGS.values()), ids=list(ROUTINGS))
BIASED = pytest.mark.parametrize("is_biased", [False, True], ids=["no bias", "biased"])


def run(route, logits, top_k, routing, device, bias=None, score_bias=None):
    zones = RedZones(device)
    ids = zones.allocate(len(logits), top_k, dtype=torch.int32).fill_(2**30)
    shares = zones.allocate(len(logits), top_k, dtype=torch.float32).fill_(float("nan"))
    biases = [None if each is None else among(each, device) for each in (bias, score_bias)]
    route(among(logits, device), routing, ids, shares, *biases)
    zones.check()
    return ids.cpu(), shares.cpu()


def both(device):
    return ((route_tokens_reference, CPU), (route_tokens_triton, device))


def route_by_hand(logits, top_k, routing, score_bias=None):
    """In float64, one token at a time, with lists."""
    all_ids, all_shares = [], []
    for row in logits.double().tolist():
        largest = max(row)
        scores = [math.exp(x - largest) for x in row]
        scores = [x / sum(scores) for x in scores]
        if routing.scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-x)) for x in row]
        if routing.scoring == "sqrtsoftplus":
            scores = [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row]
        bias = [0.0] * len(row) if score_bias is None else score_bias.double().tolist()
        ranked = [score + more for score, more in zip(scores, bias, strict=True)]
        size = len(row) // routing.num_groups
        best = 1 if routing.group_score == "largest" else 2
        groups = [sum(sorted(ranked[g * size :][:size])[-best:]) for g in range(routing.num_groups)]
        taken = sorted(range(routing.num_groups), key=lambda g: (-groups[g], g))[: routing.groups_taken]
        seen = [expert for expert in range(len(row)) if expert // size in taken]
        chosen = sorted(seen, key=lambda expert: (-ranked[expert], expert))[:top_k]
        shares = [scores[expert] for expert in chosen]
        total = sum(shares) if routing.normalizes else 1.0
        all_ids.append(chosen)
        all_shares.append([share / total * routing.share_scale for share in shares])
    return torch.tensor(all_ids, dtype=torch.int32), torch.tensor(all_shares, dtype=torch.float64)


@pytest.mark.each_pair
@EACH
@BIASED
@pytest.mark.parametrize(("num_rows", "top_k", "num_experts"), [(4, 3, 12), (1, 6, 160), (1, 8, 256)], ids=str)
def test_score_routing_matches_float64(device, routing, is_biased, num_rows, top_k, num_experts):
    logits = random(num_rows, num_experts, scale=2.0, seed=num_experts)
    score_bias = random(num_experts, seed=5, scale=0.3) if is_biased else None
    expected_ids, expected = route_by_hand(logits, top_k, routing, score_bias)
    for route, where in both(device):
        ids, shares = run(route, logits, top_k, routing, where, score_bias=score_bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(shares.double(), expected, rtol=4e-6, atol=1e-30)


def by_id(ids, shares):
    order = ids.sort(dim=1).indices
    return ids.gather(1, order).int(), shares.gather(1, order)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_score_routing_matches_deepseek_v2_router(device, method):
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=24, num_attention_heads=4, n_routed_experts=24, num_experts_per_tok=4, topk_method=method, n_group=4, topk_group=2,
        routed_scaling_factor=1.6,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    router.weight.data.copy_(torch.eye(24))
    logits = random(33, 24, seed=3)
    with torch.no_grad():
        _, shares, ids = router(logits)
    groups = (1, 1) if method == "greedy" else (4, 2)
    assert_chooses(device, logits, Routing(False, "softmax", *groups, share_scale=1.6), None, ids, shares)


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize("normalizes", [False, True], ids=["as they are", "normalized"])
def test_score_routing_matches_deepseek_v3_and_glm_routers(device, family, normalizes):
    """The bias makes most scores negative, so that what is masked must not look larger."""
    if family == "deepseek_v3":
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter as Router
    else:
        from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteConfig as Config
        from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteTopkRouter as Router
    config = Config(
        hidden_size=24, n_routed_experts=24, num_experts_per_tok=4, n_group=4, topk_group=2, norm_topk_prob=normalizes,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    router = Router(config)
    router.weight.data.copy_(torch.eye(24))
    bias, logits = random(24, seed=8) - 1.5, random(33, 24, seed=4)
    router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, shares, ids = router(logits)
    assert_chooses(device, logits, Routing(normalizes, "sigmoid", 4, 2, "two_largest", 2.5), bias, ids, shares)


def assert_chooses(device, logits, routing, score_bias, ids, shares) -> None:
    expected_ids, expected = by_id(ids, shares)
    for route, where in both(device):
        found_ids, found = by_id(*run(route, logits, ids.shape[1], routing, where, score_bias=score_bias))
        assert torch.equal(found_ids, expected_ids)
        torch.testing.assert_close(found, expected, rtol=4e-6, atol=1e-30)


def test_score_routing_tie_takes_the_lower_group_and_expert(device):
    """Groups and experts: zeros everywhere, then one group that is better."""
    logits = torch.zeros(2, 12)
    logits[1, 9] = 1.0
    for route, where in both(device):
        for routing in (V2, V3):
            ids, _ = run(route, logits, 4, routing, where)
            assert ids.tolist() == [[0, 1, 2, 3], [9, 0, 1, 2]]


def test_score_routing_ranks_groups_by_best_one_or_two(device):
    logits = torch.full((1, 12), -9.0)
    logits[0, 0], logits[0, 3:5], logits[0, 6:8], logits[0, 9] = 5.0, 2.0, 1.0, 6.0
    one, two = (V3._replace(group_score=score, num_groups=4) for score in ("largest", "two_largest"))
    for route, where in both(device):
        assert sorted(run(route, logits, 2, one, where)[0].tolist()[0]) == [0, 9]
        assert sorted(run(route, logits, 2, two, where)[0].tolist()[0]) == [3, 4]


@EACH
def test_score_routing_nan_stays_in_its_token_with_valid_ids(device, routing):
    logits = random(4, 12)
    clean = run(route_tokens_triton, logits, 5, routing, device)
    logits[1, 4] = float("nan")
    logits[2] = float("nan")
    for route, where in both(device):
        ids, shares = run(route, logits, 5, routing, where)
        assert ((ids >= 0) & (ids < 12)).all()
        assert all(len(set(row)) == 5 for row in ids.tolist())
        assert shares[1:3].isnan().all()
        scores_stay_apart = routing.scoring != "softmax" or routing.ranks_by_logits(False)
        assert not scores_stay_apart or 4 not in ids[1].tolist()
        assert torch.equal(ids[[0, 3]], clean[0][[0, 3]])
        torch.testing.assert_close(shares[[0, 3]], clean[1][[0, 3]])


@pytest.mark.parametrize("bad", [float("inf"), -float("inf")])
def test_score_routing_infinite_logits_choose_valid_experts(device, bad):
    logits, bias = random(3, 12), torch.zeros(12)
    logits[1, 4], logits[2] = bad, bad
    bias[:3] = -bad
    for routing in (V2, V3, V4):
        results = [run(route, logits, 5, routing, where, score_bias=bias) for route, where in both(device)]
        for ids, _ in results:
            assert ((ids >= 0) & (ids < 12)).all()
            assert all(len(set(row)) == 5 for row in ids.tolist())
        assert torch.equal(results[0][0], results[1][0])


def test_score_routing_all_zero_sigmoids_give_zero_shares(device):
    for route, where in both(device):
        ids, shares = run(route, torch.full((2, 8), -200.0), 2, GLM, where)
        assert ids.tolist() == [[0, 1]] * 2
        assert shares.tolist() == [[0.0, 0.0]] * 2


def test_score_routing_v4_scores_are_exact_over_the_whole_range(device):
    """Where 1 + exp(logit) rounds to 1, and where the logit itself is the softplus."""
    logits = torch.tensor([[-80.0, -30.0, -17.0, -9.0, -3.0, 0.0, 3.0, 19.9, 20.1, 90.0]])
    expected_ids, expected = route_by_hand(logits, 10, V4._replace(normalizes=False))
    for route, where in both(device):
        ids, shares = run(route, logits, 10, V4._replace(normalizes=False), where)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(shares.double(), expected, rtol=2e-5, atol=0.0)


def test_score_routing_matches_deepseek_v4_router(device):
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4TopKRouter

    config = DeepseekV4Config(hidden_size=24, n_routed_experts=24, num_experts_per_tok=6, routed_scaling_factor=1.5)
    router = DeepseekV4TopKRouter(config)
    router.weight.data.copy_(torch.eye(24))
    bias, logits = random(24, seed=8), random(33, 24, seed=4, scale=3.0)
    router.e_score_correction_bias.copy_(bias)
    with torch.no_grad():
        _, shares, ids = router(logits)
    assert_chooses(device, logits, V4, bias, ids, shares)


def test_score_routing_adds_logit_bias_before_scores(device):
    logits, bias, score_bias = random(7, 12), random(12, seed=5, scale=3.0), random(12, seed=6)
    expected_ids, expected = route_by_hand(logits + bias, 4, V3, score_bias)
    for route, where in both(device):
        ids, shares = run(route, logits, 4, V3, where, bias, score_bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(shares.double(), expected, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("routing", [V2, V3], ids=["V2", "V3"])
def test_score_routing_is_batch_invariant(device, routing):
    logits, bias = random(9, 12), random(12, seed=2)
    ids, shares = run(route_tokens_triton, logits, 4, routing, device, score_bias=bias)
    for rows in companies(9):
        some_ids, some = run(route_tokens_triton, logits[rows], 4, routing, device, score_bias=bias)
        assert torch.equal(some_ids, ids[rows])
        assert same_bits(some, shares[rows])


@hypothesis_settings(max_examples=15)
@given(st.integers(1, 7), st.integers(2, 9), st.integers(1, 7), st.sampled_from(list(ROUTINGS)), st.integers(0, 99))
def test_score_routing_is_exact_for_any_groups(device, num_groups, group_size, groups_taken, name, seed):
    routing = ROUTINGS[name]._replace(num_groups=num_groups, groups_taken=min(groups_taken, num_groups))
    logits, bias = random(2, num_groups * group_size, seed=seed), random(num_groups * group_size, seed=seed + 1)
    top_k = min(3, routing.groups_taken * group_size)
    expected_ids, expected = route_by_hand(logits, top_k, routing, bias)
    for route, where in both(device):
        ids, shares = run(route, logits, top_k, routing, where, score_bias=bias)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(shares.double(), expected, rtol=4e-6, atol=1e-30)


def test_routing_is_plain_without_scores_and_groups():
    assert Routing().is_plain
    assert Routing(True, "softmax", 8, 8).is_plain
    assert not any(routing.is_plain for routing in ROUTINGS.values())


def test_score_routing_refuses_impossible_groups():
    logits = torch.ones(1, 12)
    with pytest.raises(AssertionError, match="12 experts in 5 groups"):
        run(route_tokens_reference, logits, 1, V3._replace(num_groups=5), CPU)
    with pytest.raises(AssertionError, match="the 2 groups taken have 6"):
        run(route_tokens_reference, logits, 7, V3, CPU)
    with pytest.raises(AssertionError, match="groups that are not there"):
        run(route_tokens_reference, logits, 1, V3._replace(groups_taken=5), CPU)
    with pytest.raises(AssertionError, match="two scores of groups of 1"):
        run(route_tokens_reference, logits, 1, V3._replace(num_groups=12), CPU)
    with pytest.raises(AssertionError, match="for 12 experts"):
        run(route_tokens_reference, logits, 1, V3, CPU, score_bias=torch.ones(3))
    with pytest.raises(AssertionError, match="not float32"):
        run(route_tokens_reference, logits, 1, V3, CPU, score_bias=torch.ones(12).half())


@pytest.mark.gpu
def test_score_routing_allocates_nothing(device):
    logits, bias = random(9, 256).to(device), random(256).to(device)
    ids, shares = torch.empty(9, 8, dtype=torch.int32, device=device), torch.empty(9, 8, device=device)
    assert_allocates_nothing(lambda: route_tokens(logits, V3, ids, shares, None, bias))

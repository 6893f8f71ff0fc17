import pytest
import torch

from holdfast.kernels.moe.routing import route_tokens, route_tokens_reference, route_tokens_triton
from kernels.exactness import companies, random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

NORMALIZE = pytest.mark.parametrize("normalize", [False, True], ids=["as they are", "normalized"])
SIZES = [(1, 1, 1), (2, 1, 3), (17, 3, 3), (5, 4, 60), (2, 8, 128), (1, 7, 1000)]


def run(route, logits: torch.Tensor, top_k: int, normalize: bool, device: torch.device):
    zones = RedZones(device)
    ids = zones.allocate(len(logits), top_k, dtype=torch.int32).fill_(2**30)
    shares = zones.allocate(len(logits), top_k, dtype=torch.float32).fill_(float("nan"))
    route(among(logits, device), normalize, ids, shares)
    zones.check()
    return ids.cpu(), shares.cpu()


def by_hand(logits: torch.Tensor, top_k: int, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, one token at a time."""
    ids, shares = [], []
    for row in logits.double():
        chosen = sorted(range(len(row)), key=lambda expert: (-float(row[expert]), expert))[:top_k]
        weights = row.softmax(0)[chosen]
        ids.append(chosen)
        shares.append(weights / weights.sum() if normalize else weights)
    return torch.tensor(ids, dtype=torch.int32), torch.stack(shares)


@NORMALIZE
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_against_float64(device, sizes, normalize, scale):
    num_rows, top_k, num_experts = sizes
    logits = random(num_rows, num_experts, scale=scale)
    expected_ids, expected = by_hand(logits, top_k, normalize)
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, top_k, normalize, where)
        assert torch.equal(ids, expected_ids)
        # A GPU's exponential is as exact as its argument, which may be in the hundreds.
        tolerance = 2e-6 if where.type == "cpu" else 2e-6 * scale
        torch.testing.assert_close(shares.double(), expected, rtol=tolerance, atol=1e-30)


def test_of_equals_the_lower_comes_first(device):
    logits = torch.tensor([[0.0, 1, 1, 0, 1], [2, 2, 2, 2, 2], [-0.0, 0.0, -1, 0, -0.0]])
    logits = torch.cat([logits, torch.full((1, 5), -torch.inf)])
    expected = [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 3, 4], [0, 1, 2, 3]]
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, 4, False, where)
        assert ids.tolist() == expected
        torch.testing.assert_close(shares[:3], logits[:3].softmax(-1).gather(1, ids[:3].long()))


@NORMALIZE
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_token_and_chooses_experts_that_are_there(device, bad, normalize):
    logits = random(4, 6)
    clean = run(route_tokens_triton, logits, 3, normalize, device)
    logits[1, 4] = bad
    logits[2] = bad
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        ids, shares = run(route, logits, 3, normalize, where)
        assert ((ids >= 0) & (ids < 6)).all()
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert shares[2].isnan().all()
        assert shares[1].isfinite().all() == (bad == -float("inf"))
        assert torch.equal(ids[[0, 3]], clean[0][[0, 3]])
        torch.testing.assert_close(shares[[0, 3]], clean[1][[0, 3]])


def test_a_nan_is_chosen_last(device):
    logits = torch.tensor([[1.0, float("nan"), -torch.inf, 3.0]])
    for route, where in ((route_tokens_reference, torch.device("cpu")), (route_tokens_triton, device)):
        assert run(route, logits, 4, False, where)[0].tolist() == [[3, 0, 1, 2]]


def test_a_token_is_routed_the_same_in_any_company(device):
    logits = random(9, 12)
    ids, shares = run(route_tokens_triton, logits, 4, True, device)
    for rows in companies(9):
        some_ids, some = run(route_tokens_triton, logits[rows], 4, True, device)
        assert torch.equal(some_ids, ids[rows])
        assert same_bits(some, shares[rows])


def test_the_function_takes_the_reference_on_a_cpu():
    logits = random(5, 7)
    found, expected = (
        run(route, logits, 2, True, torch.device("cpu")) for route in (route_tokens, route_tokens_reference)
    )
    assert same_bits(found[1], expected[1])


def test_no_tokens(device):
    ids, shares = run(route_tokens_triton, torch.empty(0, 5), 2, True, device)
    assert ids.shape == shares.shape == (0, 2)


def test_more_experts_of_a_token_than_there_are_are_refused():
    with pytest.raises(AssertionError, match="3 experts of a token, and there are 2"):
        run(route_tokens_reference, torch.ones(1, 2), 3, True, torch.device("cpu"))


@pytest.mark.gpu
def test_nothing_is_allocated(device):
    logits = random(9, 128).to(device)
    ids, shares = torch.empty(9, 8, dtype=torch.int32, device=device), torch.empty(9, 8, device=device)
    assert_allocates_nothing(lambda: route_tokens(logits, True, ids, shares))

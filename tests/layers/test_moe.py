"""The expert layer: against float64 row by row, in memory that is NaN before it, alone and in company."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.kernels import operation
from holdfast.kernels.activation import GateForm
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows
from holdfast.kernels.geometry import order_specs
from holdfast.kernels.moe.routing import Routing
from holdfast.layers.mlp import GatedMLP, Linear, MLPBuffers
from holdfast.layers.moe import ExpertBiases, ExpertBuffers, ExpertLayer, SharedExpert
from holdfast.models.activations import experts_request
from holdfast.models.spec import ExpertsSpec
from kernels.exactness import assert_as_exact_as_torch, companies, random, require_native, same_bits
from kernels.expert_cases import quantized
from kernels.quantized_cases import weight_on
from kernels.triton_cases import QUIET

NAN = float("nan")
HIDDEN, INNER, SHARED, NUM_EXPERTS, TOP_K = 12, 5, 7, 6, 2
ROUTER = random(NUM_EXPERTS, HIDDEN, seed=1)
GATE_UP = random(NUM_EXPERTS, 2 * INNER, HIDDEN, seed=2)
DOWN = random(NUM_EXPERTS, HIDDEN, INNER, seed=3)
SHARED_GATE_UP = random(2 * SHARED, HIDDEN, seed=4)
SHARED_DOWN = random(HIDDEN, SHARED, seed=5)
SHARED_GATE = random(1, HIDDEN, seed=6)
KINDS = ("routed", "shared", "gated")
EACH = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, normalizes: bool = False) -> ExpertLayer:
    shared = None
    if kind != "routed":
        mlp = GatedMLP(Linear(SHARED_GATE_UP), Linear(SHARED_DOWN), "silu")
        shared = SharedExpert(mlp, SHARED_GATE if kind == "gated" else None)
    return ExpertLayer(ROUTER, GATE_UP, DOWN, Routing(normalizes), shared)


def make_buffers(num_rows: int, kind: str, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K) -> ExpertBuffers:
    order = tuple(torch.full(spec.shape, -7, dtype=torch.int32) for spec in order_specs(num_rows, top_k, num_experts))
    shared = None
    if kind != "routed":
        shared = MLPBuffers(torch.full((num_rows, 2 * SHARED), NAN), torch.full((num_rows, SHARED), NAN))
    return ExpertBuffers(
        torch.full((num_rows, num_experts), NAN),
        torch.full((num_rows, top_k), -7, dtype=torch.int32),
        torch.full((num_rows, top_k), NAN),
        torch.full((num_rows * top_k, INNER), NAN),
        torch.full((num_rows * top_k, HIDDEN), NAN),
        order,
        shared,
        None if shared is None else torch.full((num_rows, HIDDEN), NAN),
        torch.full((num_rows, 1), NAN) if kind == "gated" else None,
    )


def run(layer: ExpertLayer, x: torch.Tensor, kind: str) -> torch.Tensor:
    out, before = torch.full_like(x, NAN), x.clone()
    assert layer(x, make_buffers(len(x), kind), out) is out
    assert same_bits(x, before), "the input stays as it was"
    return out


def gated_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def expected(x: torch.Tensor, kind: str, normalizes: bool) -> torch.Tensor:
    """Row by row, in the type of x."""
    router, gate_up, down = (weight.to(x.dtype) for weight in (ROUTER, GATE_UP, DOWN))
    shared = [weight.to(x.dtype) for weight in (SHARED_GATE_UP, SHARED_DOWN)]
    rows = []
    for row in x:
        shares, chosen = F.linear(row, router).softmax(-1).topk(TOP_K)
        shares = shares / shares.sum() if normalizes else shares
        y = torch.zeros(HIDDEN, dtype=x.dtype)
        for share, i in zip(shares, chosen.tolist(), strict=True):
            y = y + share * gated_mlp(row, gate_up[i], down[i])
        if kind != "routed":
            factor = F.linear(row, SHARED_GATE.to(x.dtype)).sigmoid() if kind == "gated" else 1.0
            y = y + factor * gated_mlp(row, *shared)
        rows.append(y)
    return torch.stack(rows)


@EACH
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 37])
def test_expert_layer_sums_top_experts_by_their_shares(kind, normalizes, num_rows):
    x = random(num_rows, HIDDEN, seed=20 + num_rows)
    in_torch, exact = (expected(rows, kind, normalizes) for rows in (x, x.double()))
    assert_as_exact_as_torch(run(make(kind, normalizes), x, kind), in_torch, exact)


def test_expert_layer_watch_receives_experts_of_every_call():
    kind, seen = KINDS[0], []
    layer, x = make(kind), random(5, HIDDEN)
    layer.watch = lambda ids_TS: seen.append(ids_TS.clone())
    for rows in (x, x[:2]):
        buffers = make_buffers(len(rows), kind)
        layer(rows, buffers, torch.empty_like(rows))
        assert torch.equal(seen[-1], buffers.expert_ids_TS)
    assert [len(ids_TS) for ids_TS in seen] == [5, 2]


@EACH
def test_expert_layer_is_batch_invariant(kind):
    require_native()
    layer, x = make(kind, normalizes=True), random(40, HIDDEN, seed=9)
    alone = torch.cat([run(layer, row[None], kind) for row in x])
    for rows in companies(40):
        assert same_bits(run(layer, x[rows].contiguous(), kind), alone[rows])


@EACH
def test_expert_layer_nan_row_stays_alone(kind):
    layer, x = make(kind), random(9, HIDDEN, seed=9)
    clean = run(layer, x, kind)
    x[4] = NAN
    found = run(layer, x, kind)
    assert found[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert same_bits(found[others], clean[others])


def test_expert_layer_accepts_all_rows_on_one_expert():
    router = torch.zeros(NUM_EXPERTS, HIDDEN)
    router[3] = 1.0
    layer, x = ExpertLayer(router, GATE_UP, DOWN, Routing(True), None), random(11, HIDDEN, seed=3).abs()
    buffers = make_buffers(11, "routed", top_k=1)
    out = layer(x, buffers, torch.full_like(x, NAN))
    assert buffers.expert_ids_TS.flatten().tolist() == [3] * 11
    torch.testing.assert_close(out, gated_mlp(x, GATE_UP[3], DOWN[3]), rtol=1e-5, atol=1e-5)


def test_expert_layer_names_missing_tensors():
    layer, x = make("gated"), random(3, HIDDEN)
    buffers, out = make_buffers(3, "gated"), torch.empty(3, HIDDEN)
    with pytest.raises(AssertionError, match="no tensors for the shared expert"):
        layer(x, buffers._replace(shared=None), out)
    with pytest.raises(AssertionError, match="no place for what the shared expert gives"):
        layer(x, buffers._replace(shared_TH=None), out)
    with pytest.raises(AssertionError, match="no place for the logit"):
        layer(x, buffers._replace(shared_logit_T1=None), out)


ROUTER_BIAS, GATE_UP_BIAS, DOWN_BIAS = (
    random(NUM_EXPERTS, seed=7, scale=3.0),
    random(NUM_EXPERTS, 2 * INNER, seed=8),
    random(NUM_EXPERTS, HIDDEN, seed=9),
)


def gpt_oss_by_hand(x: torch.Tensor, limit: float) -> torch.Tensor:
    """Row by row: the choice and the softmax behind the bias, rows of gate and up in turn, and shares of biases too."""
    weights = (ROUTER, GATE_UP, DOWN, ROUTER_BIAS, GATE_UP_BIAS, DOWN_BIAS)
    router, gate_up, down, router_bias, gate_up_bias, down_bias = (weight.to(x.dtype) for weight in weights)
    rows = []
    for row in x:
        largest, chosen = (F.linear(row, router) + router_bias).topk(TOP_K)
        y = torch.zeros(HIDDEN, dtype=x.dtype)
        for share, i in zip(largest.softmax(-1), chosen.tolist(), strict=True):
            both = F.linear(row, gate_up[i]) + gate_up_bias[i]
            gate, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
            active = gate * (1.702 * gate).sigmoid() * (up + 1)
            y = y + share * (F.linear(active, down[i]) + down_bias[i])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 4, 5, 37])
def test_expert_layer_of_gpt_oss_is_exact(num_rows):
    biases, form = ExpertBiases(ROUTER_BIAS, GATE_UP_BIAS, DOWN_BIAS), GateForm(is_interleaved=True, limit=1.5)
    layer = ExpertLayer(ROUTER, GATE_UP, DOWN, Routing(True), None, biases, form)
    x = random(num_rows, HIDDEN, seed=20 + num_rows)
    in_torch, exact = (gpt_oss_by_hand(rows, 1.5) for rows in (x, x.double()))
    assert_as_exact_as_torch(run(layer, x, "routed"), in_torch, exact)


def deepseek_by_hand(x: torch.Tensor, score_bias: torch.Tensor) -> torch.Tensor:
    """Row by row: sigmoids, the better of two groups by its best two, the bias in the choice alone, and scaled shares."""
    router, gate_up, down = (weight.to(x.dtype) for weight in (ROUTER, GATE_UP, DOWN))
    rows = []
    for row in x:
        scores = F.linear(row, router).sigmoid()
        ranked = scores + score_bias.to(x.dtype)
        groups = ranked.view(2, -1).topk(2).values.sum(1)
        first = int(groups.argmax()) * (NUM_EXPERTS // 2)
        chosen = [first + int(i) for i in ranked[first : first + NUM_EXPERTS // 2].topk(TOP_K).indices]
        shares = scores[chosen] / scores[chosen].sum() * 2.5
        rows.append(sum(share * gated_mlp(row, gate_up[i], down[i]) for share, i in zip(shares, chosen, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 5, 37])
def test_expert_layer_of_deepseek_v3_is_exact(num_rows):
    routing, score_bias = Routing(True, "sigmoid", 2, 1, "two_largest", 2.5), random(NUM_EXPERTS, seed=11)
    layer = ExpertLayer(ROUTER, GATE_UP, DOWN, routing, None, ExpertBiases(score_E=score_bias))
    assert not layer.has_plain_routing
    x = random(num_rows, HIDDEN, seed=20 + num_rows)
    in_torch, exact = (deepseek_by_hand(rows, score_bias) for rows in (x, x.double()))
    assert_as_exact_as_torch(run(layer, x, "routed"), in_torch, exact)


TABLE = torch.randint(NUM_EXPERTS, (19, TOP_K), generator=torch.Generator().manual_seed(4))


def deepseek_v4_by_hand(x: torch.Tensor, tokens: torch.Tensor, limit: float) -> torch.Tensor:
    """Row by row: experts of the token, shares of sqrt(softplus), and gates with a limit, in the shared expert too."""
    weights = (ROUTER, GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN)
    router, gate_up, down, shared_gate_up, shared_down = (weight.to(x.dtype) for weight in weights)

    def expert(row: torch.Tensor, both: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(row, both).chunk(2, dim=-1)
        return F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), last)

    rows = []
    for row, token in zip(x, tokens.tolist(), strict=True):
        chosen = TABLE[token].tolist()
        scores = F.softplus(F.linear(row, router)).sqrt()[chosen]
        shares = scores / scores.sum() * 1.5
        y = sum(share * expert(row, gate_up[i], down[i]) for share, i in zip(shares, chosen, strict=True))
        rows.append(y + expert(row, shared_gate_up, shared_down))
    return torch.stack(rows)


@pytest.mark.parametrize("num_rows", [1, 5, 37])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_expert_layer_of_deepseek_v4_from_a_table_is_exact(num_rows, dtype):
    """Some tokens of which name one expert twice."""
    assert (TABLE[:, 0] == TABLE[:, 1]).any()
    shared = SharedExpert(GatedMLP(Linear(SHARED_GATE_UP), Linear(SHARED_DOWN), "silu", 0.5), None)
    form, routing = GateForm(limit=0.5, is_silu=True), Routing(True, "sqrtsoftplus", share_scale=1.5)
    layer = ExpertLayer(ROUTER, GATE_UP, DOWN, routing, shared, form=form, table_VS=TABLE.to(dtype))
    x, tokens = random(num_rows, HIDDEN, seed=20 + num_rows), torch.arange(num_rows) * 7 % 19
    found = layer(x, make_buffers(num_rows, "shared"), torch.full_like(x, NAN), tokens)
    in_torch, exact = (deepseek_v4_by_hand(rows, tokens, 0.5) for rows in (x, x.double()))
    assert_as_exact_as_torch(found, in_torch, exact)
    with pytest.raises(AssertionError, match="no token ids are here"):
        layer(x, make_buffers(num_rows, "shared"), torch.empty_like(x))


@pytest.mark.each_value
@QUIET
@pytest.mark.parametrize("scheme", [None, "mxfp4", "fp8_block"], ids=str)
@pytest.mark.parametrize("num_rows", [1, 6, 18])
def test_expert_layer_with_table_kernels_match_reference(device, monkeypatch, scheme, num_rows):
    """As GEMVs, unsorted and sorted blocks; codes are those that DeepSeek stores experts in."""
    hidden, inner, form = 64, 32, GateForm(limit=0.5, is_silu=True)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shapes = ((NUM_EXPERTS, 2 * inner, hidden), (NUM_EXPERTS, hidden, inner))
    weights = [random(*shape, seed=index, scale=0.2).to(dtype) for index, shape in enumerate(shapes)]
    if scheme is not None:
        weights = [quantized(weight, scheme, part) for weight, part in zip(weights, (inner, hidden), strict=True)]
    routing, router = Routing(True, "sqrtsoftplus", share_scale=1.5), random(NUM_EXPERTS, hidden, seed=7).to(dtype)
    x, tokens = random(num_rows, hidden, seed=8).to(dtype), torch.arange(num_rows) * 7 % 19
    found = []
    for where, launches in ((torch.device("cpu"), False), (device, True)):
        monkeypatch.setattr(operation, "can_run", lambda tensor, launches=launches: launches)
        placed = [
            weight.to(where) if isinstance(weight, torch.Tensor) else weight_on(weight, where) for weight in weights
        ]
        layer = ExpertLayer(router.to(where), *placed, routing, None, form=form, table_VS=TABLE.to(where))
        specs = experts_request(ExpertsSpec(NUM_EXPERTS, TOP_K, inner), hidden, num_rows, str(dtype)[6:]).specs
        held = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=where) for spec in specs}
        codes = torch.zeros(num_rows * TOP_K * hidden, device=where).to(torch.float8_e4m3fn)
        buffers = ExpertBuffers.of(held, QuantizedRows(codes, torch.zeros(num_rows * TOP_K, device=where)))
        out = torch.full_like(x, NAN, device=where)
        found.append(layer(x.to(where), buffers, out, tokens.to(where)).float().cpu())
    slack = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found[1], found[0], rtol=slack, atol=slack)


@QUIET
@pytest.mark.parametrize("launches", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("num_rows", [1, 6, 18])
def test_expert_layer_takes_codes_of_a_norm(device, monkeypatch, launches, num_rows):
    """Without a shared expert they are for the others, which then read no rows; the router does."""
    hidden, inner = 64, 32
    where = device if launches else torch.device("cpu")
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    monkeypatch.setattr(operation, "can_run", lambda tensor: launches)
    shapes = ((NUM_EXPERTS, 2 * inner, hidden), (NUM_EXPERTS, hidden, inner))
    plain = [random(*shape, seed=index, scale=0.2).to(dtype) for index, shape in enumerate(shapes)]
    weights = [weight_on(quantized(one, "fp8", part), where) for one, part in zip(plain, (inner, hidden), strict=True)]
    router, x = random(NUM_EXPERTS, hidden, seed=7).to(where, dtype), random(num_rows, hidden, seed=8).to(where, dtype)
    layer = ExpertLayer(router, *weights, Routing(True), None)
    specs = experts_request(ExpertsSpec(NUM_EXPERTS, TOP_K, inner), hidden, num_rows, str(dtype)[6:]).specs
    found = []
    for is_coded in (False, True):
        held = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=where) for spec in specs}
        codes = torch.zeros(num_rows * TOP_K * hidden, device=where).to(torch.float8_e4m3fn)
        buffers = ExpertBuffers.of(held, QuantizedRows(codes, torch.zeros(num_rows * TOP_K, device=where)))
        if is_coded:
            room = layer.room_for_codes(buffers, x)
            assert room is not None
            quantize_rows(x, room)
        found.append(layer(x, buffers, torch.full_like(x, NAN), is_coded=is_coded))
    assert found[0].isfinite().all()
    assert torch.equal(*found)


def test_expert_layer_of_plain_weights_takes_no_codes():
    assert make("routed").room_for_codes(make_buffers(3, "routed"), random(3, HIDDEN)) is None


def test_expert_layer_with_table_refuses_choice_biases():
    with pytest.raises(AssertionError, match="are not chosen"):
        ExpertLayer(ROUTER, GATE_UP, DOWN, Routing(), None, ExpertBiases(score_E=ROUTER[:, 0]), table_VS=TABLE)


def test_expert_layer_has_plain_routing_without_bias_and_scale():
    """A bias on scores alone is enough that it does not."""
    biases = ExpertBiases(score_E=random(NUM_EXPERTS))
    assert make("routed").has_plain_routing
    assert not ExpertLayer(ROUTER, GATE_UP, DOWN, Routing(), None, biases).has_plain_routing
    assert not ExpertLayer(ROUTER, GATE_UP, DOWN, Routing(share_scale=2.0), None).has_plain_routing

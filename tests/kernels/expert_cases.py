"""Products of experts, tried amid poison: operands between bytes that are NaN, results NaN before and between red zones."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from holdfast.kernels.activation import SILU_HALVES, GateForm
from holdfast.kernels.gemm.linear import dequantize_rows, quantized_view
from holdfast.kernels.gemm.quantize_activations import QuantizedRows, quantize_rows_reference
from holdfast.kernels.geometry import order_specs
from holdfast.kernels.moe.expert_linear import expert_linear_reference
from holdfast.kernels.moe.routing import ExpertOrder, ExpertProduct, order_experts
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import dequantize
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from kernels.exactness import assert_as_exact_as_torch, random
from kernels.quantized_cases import slack
from quant.whole_weights import quantize
from red_zones import RedZones

NAN = float("nan")
MOAT_BYTES = 1024
SCHEMES = (None, *WEIGHT_SCHEMES)
CPU = torch.device("cpu")
GPT_OSS = GateForm(is_interleaved=True, limit=0.5)
"""A limit that many of the numbers here are beyond, on every side."""
DEEPSEEK_V4 = GateForm(limit=0.5, is_silu=True)
FORMS = (SILU_HALVES, GateForm(is_interleaved=True), GateForm(limit=0.7), GPT_OSS, DEEPSEEK_V4)


@dataclass(frozen=True)
class ExpertCase:
    """One product, and everything that goes into it, in host memory."""

    x_XK: torch.Tensor
    weight: torch.Tensor | QuantizedWeight
    expert_ids_TS: torch.Tensor
    gated: bool
    bias_EN: torch.Tensor | None = None
    form: GateForm = SILU_HALVES

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[1] // (2 if self.gated else 1)

    def rows(self, which: list[int]) -> "ExpertCase":
        """Keep some of the tokens."""
        per_token = len(self.x_XK) // len(self.expert_ids_TS)
        x = self.x_XK.view(len(self.expert_ids_TS), per_token, -1)[which].flatten(0, 1)
        return replace(self, x_XK=x, expert_ids_TS=self.expert_ids_TS[which])


def expert_case(
    sizes: tuple[int, int, int, int, int],
    gated: bool = False,
    scheme: str | None = None,
    dtype: torch.dtype = torch.float32,
    by_pair: bool = False,
    choice: str = "any",
    seed: int = 0,
    has_bias: bool = False,
    form: GateForm = SILU_HALVES,
) -> ExpertCase:
    """(T, S, E, N, K). Choice: "any" experts, "same" for every token, or "some" of which many are unused.

    "twice": as a table may name them, the same one several times for a token.
    """
    num_rows, top_k, num_experts, size_n, size_k = sizes
    generator = torch.Generator().manual_seed(seed)
    reach = {"any": num_experts, "same": top_k, "some": max(top_k, num_experts // 3), "twice": 2}[choice]
    ids = torch.stack([torch.randperm(reach, generator=generator)[:top_k] for _ in range(num_rows)])
    if choice == "twice":
        ids = torch.randint(reach, (num_rows, top_k), generator=generator)
    x = random(num_rows * (top_k if by_pair else 1), size_k, seed=seed + 1).to(dtype)
    num_weight_rows = size_n * (2 if gated else 1)
    weight = random(num_experts, num_weight_rows, size_k, seed=seed + 2, scale=size_k**-0.5).to(dtype)
    part_rows = num_weight_rows if form.is_interleaved else size_n
    stored = weight if scheme is None else quantized(weight, scheme, part_rows)
    bias = random(num_experts, num_weight_rows, seed=seed + 3).to(dtype) if has_bias else None
    return ExpertCase(x, stored, (num_experts - 1 - ids).to(torch.int32), gated, bias, form)


def quantized(weight: torch.Tensor, name: str, part_rows: int) -> QuantizedWeight:
    """A weight [E, N, K] as codes and scales; blocks of rows end where gates end."""
    scheme = WEIGHT_SCHEMES[name].with_parts([part_rows])
    values = weight.float().view(-1, weight.shape[-1])
    codes, scales = quantize(values, scheme, values.abs().max().view(1))
    code_plane, scale_plane = scheme.planes(tuple(weight.shape))
    made = QuantizedWeight(
        scheme,
        tuple(weight.shape),
        codes.reshape(code_plane.shape).contiguous(),
        scales.reshape(scale_plane.shape).contiguous(),
    )
    made.check()
    return made


def among(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put values on the device between bytes that are NaN in every type that has it."""
    buffer = torch.full((values.nbytes + 2 * MOAT_BYTES,), 0xFF, dtype=torch.uint8, device=device)
    body = buffer[MOAT_BYTES : MOAT_BYTES + values.nbytes].view(values.dtype).view(values.shape)
    body.copy_(values)
    return body


def placed(case: ExpertCase, device: torch.device) -> ExpertCase:
    """Put the case on a device, amid poison."""
    if isinstance(case.weight, torch.Tensor):
        weight = among(case.weight, device)
    else:
        codes, scales = among(case.weight.codes, device), among(case.weight.scales, device)
        weight = replace(case.weight, codes=codes, scales=scales)
    bias = None if case.bias_EN is None else among(case.bias_EN, device)
    x, ids = among(case.x_XK, device), among(case.expert_ids_TS, device)
    return replace(case, x_XK=x, weight=weight, expert_ids_TS=ids, bias_EN=bias)


def order_of(case: ExpertCase) -> ExpertOrder:
    """As the reference has it, on the device of the ids; blocks without an expert hold pairs that are none."""
    ids = case.expert_ids_TS
    specs = order_specs(*ids.shape, case.weight.shape[0])
    tensors = [torch.empty(spec.shape, dtype=torch.int32, device=ids.device) for spec in specs]
    order = order_experts(ids, case.weight.shape[0], tensors)
    if order.block_rows > 1:
        order.pairs_BR[order.block_experts_B < 0] = 2**30
    return order


def room_for(case: ExpertCase) -> QuantizedRows | None:
    """Room for the rows as codes, where the scheme wants them so."""
    if isinstance(case.weight, torch.Tensor) or not case.weight.scheme.quantizes_activations:
        return None
    device, (num_rows, size_k) = case.x_XK.device, case.x_XK.shape
    codes = torch.empty(num_rows, size_k, dtype=torch.float8_e4m3fn, device=device)
    rows_fp8 = QuantizedRows(codes, torch.empty(num_rows, -(-size_k // 128), device=device))
    return quantized_view(rows_fp8, case.weight, num_rows)


def quantized_case_rows(case: ExpertCase) -> QuantizedRows | None:
    """The rows as codes, where the scheme wants them so."""
    room = room_for(case)
    return None if room is None else quantize_rows_reference(case.x_XK, room)


def run_kernel(launch, case: ExpertCase, device: torch.device) -> torch.Tensor:
    """`expert_gemv` or `grouped_gemm` over rows that are quantized already, if they are to be."""
    case = placed(case, device)
    zones = RedZones(device)
    out = zones.allocate(case.expert_ids_TS.numel(), case.num_outputs, dtype=case.x_XK.dtype).fill_(NAN)
    rows_fp8 = quantized_case_rows(case)
    if rows_fp8 is not None:
        rows_fp8 = QuantizedRows(among(rows_fp8.codes_TK, device), among(rows_fp8.scales_TB, device))
    operands = case.x_XK, case.weight, order_of(case), out, case.gated, rows_fp8, case.bias_EN, case.form
    assert launch(ExpertProduct(*operands)) is out
    zones.check()
    return out.cpu()


def in_torch(case: ExpertCase) -> torch.Tensor:
    """The reference's result in the type of x."""
    out = torch.full((case.expert_ids_TS.numel(), case.num_outputs), NAN, dtype=case.x_XK.dtype)
    room = room_for(case)
    operands = case.x_XK, case.weight, order_of(case), out, case.gated, room, case.bias_EN, case.form
    return expert_linear_reference(ExpertProduct(*operands))


def exact(case: ExpertCase) -> torch.Tensor:
    """In float64, from the numbers that codes stand for."""
    rows_fp8 = quantized_case_rows(case)
    x = (case.x_XK if rows_fp8 is None else dequantize_rows(rows_fp8)).double()
    weight = case.weight if isinstance(case.weight, torch.Tensor) else dequantize(case.weight).view(case.weight.shape)
    ids = case.expert_ids_TS.flatten()
    y = x.new_empty(len(ids), weight.shape[1])
    for expert in ids.unique().tolist():
        pairs = (ids == expert).nonzero().flatten()
        y[pairs] = x[pairs // (len(ids) // len(x))] @ weight[expert].double().T
        if case.bias_EN is not None:
            y[pairs] += case.bias_EN[expert].double()
    return gated_by_hand(y, case.form) if case.gated else y


def gated_by_hand(y: torch.Tensor, form: GateForm) -> torch.Tensor:
    """What becomes of gate and up."""
    gate, up = (y[:, 0::2], y[:, 1::2]) if form.is_interleaved else y.chunk(2, dim=-1)
    if form.limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    if form.is_silu:
        return F.silu(gate) * up
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


def judge(launch, case: ExpertCase, device: torch.device, extra: float = 1.0) -> None:
    """As exact as torch, in every element; `extra`: how much less a product of codes may be."""
    y = run_kernel(launch, case, device)
    assert y.isfinite().all(), "an element was not written, or read what lies outside"
    scheme = case.weight.scheme if isinstance(case.weight, QuantizedWeight) else None
    less = 1.0 if scheme is None else max(slack(device, scheme), extra if scheme.quantizes_activations else 1.0)
    assert_as_exact_as_torch(y, in_torch(case), exact(case), magnitude=10.0 * less)

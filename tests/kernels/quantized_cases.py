"""Quantized weights and the rows that meet them, for tests: made from seeds, read amid poison, and exact in float64."""

from dataclasses import replace

import torch

from holdfast.kernels.gemm.quantize_activations import QuantizedRows
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_quantize import E4M3_MAX, LEAST_E4M3_SCALE, dequantize
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, INT8, MXFP4, WeightScheme
from kernels.exactness import MOAT, random
from quant.whole_weights import quantize
from red_zones import RedZones

ROW_SCHEMES = (FP8, FP8_TENSOR, INT8)
"""Those with a scale for every row of a weight."""
EVERY_SCHEME = (*ROW_SCHEMES, *(replace(FP8_BLOCK, block_rows=rows) for rows in (128, 64, 8)), MXFP4)
E4M3_SLACK = 2**15
"""Tensor cores add products of e4m3 with some fourteen bits, where float32 has 24."""
HALF_SLACK = 2**10
"""For sums that are begun in half precision, and go on in float32 after a few products."""


def scheme_id(scheme: WeightScheme) -> str:
    return scheme.name if scheme.block_rows in (1, 128) else f"{scheme.name} of {scheme.block_rows} rows"


def quantized(values_NK: torch.Tensor, scheme: WeightScheme) -> QuantizedWeight:
    """Numbers as the scheme stores them."""
    codes, scales = quantize(values_NK.float(), scheme, values_NK.abs().max().float().view(1))
    weight = QuantizedWeight(scheme, tuple(values_NK.shape), codes, scales)
    weight.check()
    return weight


def random_weight(size_n: int, size_k: int, scheme: WeightScheme, seed: int = 1) -> QuantizedWeight:
    """Rows of every size around one over the root of K."""
    sizes_N1 = random(size_n, 1, seed=seed + 100, scale=0.3).exp()
    return quantized(random(size_n, size_k, seed=seed, scale=size_k**-0.5) * sizes_N1, scheme)


def codable_rows(num_rows: int, size_k: int, seed: int = 0, block_columns: int = 0) -> torch.Tensor:
    """float32 rows of numbers near one, which lie so close to e4m3 codes that no rounding on the way changes a code.

    Each block of columns has a size of its own, and a number that its scale follows from, at another place in every row; 0: the
    whole row is one.
    """
    width = block_columns or size_k
    x = (random(num_rows, size_k, seed=seed) * 150).clamp(-E4M3_MAX / 2, E4M3_MAX / 2)
    for start in range(0, size_k, width):
        places = (torch.arange(num_rows) + 1) * -(-width * 5 // 8) - 1
        x[torch.arange(num_rows), start + places % min(width, size_k - start)] = E4M3_MAX
    sizes = random(num_rows, -(-size_k // width), seed=seed + 200, scale=0.2).exp() / 150
    return x.to(torch.float8_e4m3fn).float() * sizes.repeat_interleave(width, dim=1)[:, :size_k]


def exact_rows(x_MK: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """Rows as a product takes them, in float64: as they are, or as the nearest codes times their scale."""
    if not scheme.quantizes_activations:
        return x_MK.double()
    width = scheme.block_columns or x_MK.shape[1]
    blocks = []
    for x_MB in x_MK.float().split(width, dim=1):
        scale_M1 = (x_MB.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(LEAST_E4M3_SCALE)
        codes = (x_MB.double() / scale_M1.double()).clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
        blocks.append(codes.double() * scale_M1.double())
    return torch.cat(blocks, dim=1)


def exact_weight(weight: QuantizedWeight) -> torch.Tensor:
    """In float64, which holds a code times a float32 scale."""
    scheme = weight.scheme
    if scheme.scale_is_power_of_two:
        return dequantize(weight).double()
    scales = weight.scales.double()
    if scheme.block_columns == 0:
        return weight.codes.double() * scales.unsqueeze(1)
    scales = scales.repeat_interleave(scheme.block_rows, 0).repeat_interleave(scheme.block_columns, 1)
    return weight.codes.double() * scales[: weight.shape[0], : weight.shape[1]]


def weight_on(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Move a weight to a device."""
    return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device))


def weight_amid(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Put a weight on the device with the worst of its codes and scales before and behind."""
    return replace(weight, codes=_bytes_amid(weight.codes, device), scales=_bytes_amid(weight.scales, device))


def _bytes_amid(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Between bytes of 0x7F and behind them 0xFF: NaN of e4m3, float32 and e8m0, and large as integers."""
    moat = MOAT * 4
    buffer = torch.full((values.nbytes + 2 * moat,), 0x7F, dtype=torch.uint8, device=device)
    buffer[moat + values.nbytes :] = 0xFF
    body = buffer[moat : moat + values.nbytes].view(values.dtype).view(values.shape)
    body.copy_(values)
    return body


def room_amid(zones: RedZones, num_rows: int, weight: QuantizedWeight) -> QuantizedRows | None:
    """Room for exactly these rows as codes, of NaN; None where the scheme takes them as they are."""
    scheme, size_k = weight.scheme, weight.shape[-1]
    if not scheme.quantizes_activations:
        return None
    num_blocks = -(-size_k // scheme.block_columns) if scheme.block_columns else 1
    codes = zones.allocate(num_rows, size_k, dtype=torch.uint8).fill_(0x7F).view(torch.float8_e4m3fn)
    return QuantizedRows(codes, zones.allocate(num_rows, num_blocks).fill_(float("nan")))


def slack(device: torch.device, scheme: WeightScheme) -> float:
    """How much less exact than float32 sums may be."""
    return 1.0 if device.type == "cpu" or not scheme.quantizes_activations else E4M3_SLACK


def widest_on(device: torch.device) -> torch.dtype:
    """Float32 in the interpreter. A GPU would multiply it as tf32, which is not requested: half precision there."""
    return torch.float32 if device.type == "cpu" else torch.float16

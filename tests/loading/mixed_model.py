"""A small model with everything that a load can meet, its checkpoint in any layout, and the weights that must come out."""

import torch

from holdfast.models.parameters import Parameter, Part
from holdfast.quant.quantized_weight import QuantizedWeight
from quant.whole_weights import quantize

EXPERTS, INNER, HIDDEN = 3, 128, 96


def experts_parts(layout):
    """gate_up of the experts: apart, fused [E, 2I, H], or the other way round [E, H, 2I]."""
    if layout == "apart":
        names = [f"experts.{expert}.{half}" for expert in range(EXPERTS) for half in ("gate", "up")]
        return tuple(Part(name, index * INNER, (INNER, HIDDEN)) for index, name in enumerate(names))
    is_transposed = layout == "transposed"
    shape = (EXPERTS, HIDDEN, 2 * INNER) if is_transposed else (EXPERTS, 2 * INNER, HIDDEN)
    return tuple(
        Part("experts.gate_up", start, shape, (start, start + INNER), is_transposed=is_transposed)
        for start in range(0, EXPERTS * 2 * INNER, INNER)
    )


def parameters_for(layout="apart"):
    """Matrices of several parts, stacked experts, vectors, and a type of its own."""
    return (
        Parameter("embed.weight", (300, HIDDEN), (Part("embed", 0, (300, HIDDEN)),), "embedding"),
        Parameter(
            "qkv.weight",
            (320, HIDDEN),
            (Part("q", 0, (192, HIDDEN)), Part("k", 192, (64, HIDDEN)), Part("v", 256, (64, HIDDEN))),
        ),
        Parameter("norm.weight", (HIDDEN,), (Part("norm", 0, (HIDDEN,)),), "norm"),
        Parameter("experts.weight", (EXPERTS, 2 * INNER, HIDDEN), experts_parts(layout), "expert"),
        Parameter(
            "router.weight", (EXPERTS, HIDDEN), (Part("router", 0, (EXPERTS, HIDDEN)),), "router", dtype="float32"
        ),
        Parameter("lm_head.weight", (300, HIDDEN), (Part("head", 0, (300, HIDDEN)),), "head"),
    )


def uprights(seed=0):
    """The values of all parameters, in float32, as they are meant."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        parameter.name: torch.randn(parameter.shape, generator=generator) for parameter in parameters_for("apart")
    }
    values["qkv.weight"][200] = 0.0  # a row of zeros has a scale too
    return values


def tensors_for(parameters, values, dtype=torch.bfloat16):
    """The checkpoint that holds these values."""
    tensors = {}
    for parameter in parameters:
        rows = values[parameter.name].to(dtype).reshape(-1, parameter.num_columns)
        for part in parameter.parts:
            stored = (*part.shape[:-2], part.shape[-1], part.shape[-2]) if part.is_transposed else part.shape
            upright = tensors.setdefault(part.tensor, torch.empty(stored, dtype=dtype))
            start, end = part.row_range
            upright.view(-1, part.source_columns)[start:end] = rows[part.row_start : part.row_start + part.num_rows]
    transposed = {part.tensor for parameter in parameters for part in parameter.parts if part.is_transposed}
    return {name: tensor.mT.contiguous() if name in transposed else tensor for name, tensor in tensors.items()}


def wanted_planes(weight, parameter, values, dtype=torch.bfloat16):
    """What must come out for a planned weight: its tensor, or its codes and scales, by the definition of the scheme."""
    stored = values[parameter.name].to(dtype)
    if weight.scheme is None:
        return (stored.to(getattr(torch, weight.dtype)),)
    rows = stored.float().reshape(-1, parameter.num_columns)
    codes, scales = [], []
    for part in parameter.parts:
        own = rows[part.row_start : part.row_start + part.num_rows]
        if parameter.name == "experts.weight" and "gate_up" not in part.tensor:
            assert len(own) == INNER
        amax = own.abs().amax().view(1) if weight.scheme.is_whole_tensor else None
        part_codes, part_scales = quantize(own, weight.scheme, amax)
        codes.append(part_codes)
        scales.append(part_scales)
    shapes = [plane.shape for plane in weight.scheme.planes(weight.shape)]
    return torch.cat(codes).view(shapes[0]), torch.cat(scales).view(shapes[1])


def planes_of(weight):
    return (weight.codes, weight.scales) if isinstance(weight, QuantizedWeight) else (weight,)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)

"""A small model on disk, its plan under a recipe, and weights as a load would give them, for tests of saving them."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from holdfast.loading.planning.open_model import GenerationDefaults, OpenModel
from holdfast.loading.planning.plan import LoadPlan, plan_load
from holdfast.loading.quantized.source import QuantizedSource
from holdfast.loading.sources.safetensors import SafetensorsFile, SafetensorsSource
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import FP8, WEIGHT_SCHEMES, WeightRecipe

K = 256
IN_FP8 = WeightRecipe(FP8)
PARAMETERS = (
    Parameter("embed.weight", (96, K), (Part("embed", 0, (96, K)),), "embedding"),
    Parameter("layers.0.norm.weight", (K,), (Part("norm", 0, (K,)),), "norm"),
    Parameter(
        "layers.0.qkv.weight",
        (1280, K),
        (Part("q", 0, (1024, K)), Part("k", 1024, (192, K)), Part("v", 1216, (64, K))),
    ),
    Parameter("layers.0.qkv.bias", (1280,), (Part("b", 0, (1280,)),), "bias"),
    Parameter("layers.0.router.weight", (4, K), (Part("router", 0, (4, K)),), "router", dtype="float32"),
    Parameter("layers.0.experts.weight", (4, 1024, K), (Part("experts", 0, (4, 1024, K)),), "expert"),
    Parameter("lm_head.weight", (96, K), (Part("lm_head", 0, (96, K)),), "head"),
)
RECIPES = [WeightRecipe(scheme, "all" if name == "int8" else "head") for name, scheme in WEIGHT_SCHEMES.items()]
FILES = {
    "model-a.safetensors": ("embed", "norm", "q", "k", "v"),
    "model-b.safetensors": ("b", "router", "experts", "lm_head"),
}


def write_model(folder: Path) -> OpenModel:
    """Settings, a tokenizer, and two files of zeros with every tensor that the parameters need."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "made up"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    shapes = {part.tensor: part.shape for parameter in PARAMETERS for part in parameter.parts}
    for name, tensors in FILES.items():
        header: dict[str, Any] = {}
        end = 0
        for tensor in tensors:
            start, end = end, end + 2 * prod(shapes[tensor])
            header[tensor] = {"dtype": "BF16", "shape": list(shapes[tensor]), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return open_written(folder)


def open_written(folder: Path) -> OpenModel:
    source = SafetensorsSource([SafetensorsFile(folder / name) for name in FILES])
    return OpenModel(folder, "directory", None, PARAMETERS, source, GenerationDefaults())  # type: ignore[arg-type]


def plan_of(model: OpenModel, recipe: WeightRecipe = IN_FP8, dtype: str = "bfloat16") -> LoadPlan:
    return plan_load(PARAMETERS, model.source, dtype, recipe)


def loaded(plan: LoadPlan) -> dict[str, torch.Tensor | QuantizedWeight]:
    """Random bits in every plane, in one arena as a load has it."""
    generator = torch.Generator().manual_seed(7)
    weights: dict[str, torch.Tensor | QuantizedWeight] = {}
    for weight in plan.weights:
        planes = []
        for spec in weight.specs:
            bits = torch.randint(0, 256, (spec.num_bytes,), dtype=torch.uint8, generator=generator)
            planes.append(bits.view(getattr(torch, spec.dtype)).view(spec.shape))
        plain = planes[0] if weight.scheme is None else None
        weights[weight.name] = QuantizedWeight(weight.scheme, weight.shape, *planes) if plain is None else plain  # type: ignore[arg-type]
    return weights


def planes_of(plan: LoadPlan, weights: Mapping[str, torch.Tensor | QuantizedWeight]) -> dict[str, torch.Tensor]:
    planes: dict[str, torch.Tensor] = {}
    for weight in plan.weights:
        held = weights[weight.name]
        tensors = (held.codes, held.scales) if isinstance(held, QuantizedWeight) else (held,)
        planes |= {spec.name: tensor for spec, tensor in zip(weight.specs, tensors, strict=True)}
    return planes


def read_all(source: QuantizedSource, plan: LoadPlan, max_bytes: int) -> dict[str, bytes]:
    """What a load reads under a plan, so many bytes at a time."""
    results: dict[str, bytes] = {}
    for move in plan.moves:
        assert move.target == move.tensor
        assert move.scheme is None
        data = bytearray(move.num_bytes)
        first = 0
        for start, end in move.row_ranges(max_bytes):
            read = move.read(start, end)
            last = first + (end - start) * move.row_bytes
            source.read_into(move.tensor, read.row_start, read.row_end, memoryview(data)[first:last], read.columns)
            first = last
        assert first == len(data)
        results[move.target] = bytes(data)
    return results


def bits(plane: torch.Tensor) -> bytes:
    return plane.view(-1).view(torch.uint8).numpy().tobytes()

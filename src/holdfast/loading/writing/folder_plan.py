"""Plans a folder of compressed-tensors: its tensors in int4 or NVFP4, its quantization_config; no torch.

X.weight [N, K] is stored as                                                       (loading/packed/layout.py reads them)

int4     X.weight_packed int32 [N, K / 8], X.weight_scale [N, K / 128], X.weight_shape [2]
nvfp4    X.weight_packed uint8 [N, K / 2], X.weight_scale e4m3 [N, K / 16], X.weight_global_scale [1]
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from holdfast.loading.planning.moves import Choice
from holdfast.loading.sources.source import TensorEntry
from holdfast.loading.writing.gguf_plan import part_bytes
from holdfast.loading.writing.written import Plane, WritePlan, Written
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.formats import DTYPE_BYTES

GROUPS: Mapping[str, int] = {"int4": 128, "nvfp4": 16}
"""Columns that share a scale, by target."""
FORMATS: Mapping[str, str] = {"int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized"}
WEIGHTS: Mapping[str, Mapping[str, object]] = {
    "int4": {"num_bits": 4, "type": "int", "strategy": "group"},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
}
PLAIN_REASONS: Mapping[str, str] = {
    "embedding": "the embedding",
    "head": "the head",
    "norm": "a norm",
    "bias": "a bias",
    "router": "a router",
    "absorbed": "the up-projection of latents",
}
"""Kinds of parameters that stay plain."""
SCALE_DTYPES = ("float16", "bfloat16", "float32")
WEIGHT = ".weight"
HEAD = "lm_head"


def plan_folder(
    fills: Iterable[Choice],
    parameters: Iterable[Parameter],
    entries: Mapping[str, TensorEntry],
    stored_types: Mapping[str, str],
    dtype: str,
    norm_added: float,
    target: str,
) -> WritePlan:
    """Plan the tensors of a folder; the names are those of checkpoints with a tensor for each expert.

    `stored_types` has the stored type of tensors that are expanded. `dtype` is that of scales, and of expanded tensors
    that stay plain. `norm_added` is added to the weights of norms.
    """
    names = {parameter.name: [part.tensor for part in parameter.parts] for parameter in parameters}
    tensors: list[Written] = []
    for fill in fills:
        own = names[fill.parameter.name]
        if len(own) < len(fill.parts):  # halves of one tensor
            tensors.append(_plain(fill, fill.parts, own[0], entries, stored_types, dtype))
            continue
        for alike in _multiplied_as_one(fill):
            for place in alike:
                part, name = fill.parts[place], own[place]
                reason = _plain_reason(fill, part, name, target)
                if reason:
                    plain = _plain(fill, (part,), name, entries, stored_types, dtype, reason)
                    tensors.append(replace(plain, added=norm_added) if fill.parameter.kind == "norm" else plain)
                    continue
                entry = entries[part.tensor]
                before = stored_types.get(entry.name, entry.dtype), part_bytes(part, entry)
                amax_parts = tuple(fill.parts[each] for each in alike) if target == "nvfp4" else ()
                planes = _planes(name.removesuffix(WEIGHT), part, target, dtype)
                tensors.append(Written(name, target, (part,), planes, *before, amax_parts=amax_parts))
    plan = WritePlan(target, tuple(tensors))
    plan.check()
    return plan


def _plain(
    fill: Choice,
    parts: tuple[Part, ...],
    name: str,
    entries: Mapping[str, TensorEntry],
    stored_types: Mapping[str, str],
    dtype: str,
    reason: str = "",
) -> Written:
    """Plan a tensor that keeps its type, or is expanded to `dtype`."""
    entry = entries[parts[0].tensor]
    before_type = stored_types.get(entry.name, entry.dtype)
    kept = dtype if entry.name in stored_types and len(entry.shape) > 1 else entry.dtype
    num_rows = sum(part.num_rows for part in parts)
    shape = (num_rows, parts[0].num_columns) if len(parts[0].shape) > 1 else (num_rows,)
    plane = Plane(name, kept, shape, prod(shape) * DTYPE_BYTES[kept])
    before_bytes = sum(part_bytes(part, entries[part.tensor]) for part in parts)
    reason = reason or PLAIN_REASONS[fill.parameter.kind]
    return Written(name, "plain", parts, (plane,), before_type, before_bytes, reason)


def _multiplied_as_one(fill: Choice) -> Iterator[Sequence[int]]:
    """Yield the places of parts that are multiplied as one: query, key and value; gate and up of an expert."""
    size = len(fill.parts)
    if fill.parameter.kind == "expert":
        size = 2 if fill.parameter.name.endswith("gate_up.weight") else 1
    for start in range(0, len(fill.parts), size):
        yield range(start, start + size)


def _plain_reason(fill: Choice, part: Part, name: str, target: str) -> str:
    """Return why a part stays plain; empty if it is quantized."""
    reason = PLAIN_REASONS.get(fill.parameter.kind, "")
    if reason or not name.endswith(WEIGHT):
        return reason or "stacked experts"
    if part.num_columns % GROUPS[target]:
        return f"rows of {part.num_columns} are no groups of {GROUPS[target]}"
    return ""


def _planes(module: str, part: Part, target: str, dtype: str) -> tuple[Plane, ...]:
    num_rows, num_columns, num_groups = part.num_rows, part.num_columns, part.num_columns // GROUPS[target]
    is_int = target == "int4"
    codes = ("int32", num_columns // 8) if is_int else ("uint8", num_columns // 2)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "weight_packed": (codes[0], (num_rows, codes[1])),
        "weight_scale": (dtype if is_int else "float8_e4m3fn", (num_rows, num_groups)),
        "weight_shape" if is_int else "weight_global_scale": ("int64", (2,)) if is_int else ("float32", (1,)),
    }
    return tuple(
        Plane(f"{module}.{suffix}", kind, shape, prod(shape) * DTYPE_BYTES[kind])
        for suffix, (kind, shape) in shapes.items()
    )


def quantization_config(plan: WritePlan) -> dict[str, object]:
    """Return the settings that describe the plan; modules with a plain matrix are listed in `ignore`."""
    plain = [
        tensor.name.removesuffix(WEIGHT)
        for tensor in plan.tensors
        if tensor.encoding == "plain" and tensor.num_columns > 1 and tensor.name.endswith(WEIGHT)
    ]
    weights = {
        **WEIGHTS[plan.target],
        "symmetric": True,
        "group_size": GROUPS[plan.target],
        "dynamic": False,
        "actorder": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": FORMATS[plan.target],
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[plan.target],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted({*plain, HEAD}),
        "kv_cache_scheme": None,
    }

"""Plans the tensors of a quantized GGUF file: their types as llama.cpp mixes them, and what fills them; no torch.

data/gguf_mixes.json has a row for each target:

file_type    its number in general.file_type
type         type of matrices
last         type of the head, or of an embedding that is the head as well
better       type of attn_v, attn_qkv and ffn_down in layers near both ends, and in every third layer between
short        types that take the place of those whose blocks do not divide a row
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from holdfast.errors import UnsupportedModelError
from holdfast.loading.gguf.config import SCORE_BIAS, TABLES
from holdfast.loading.gguf.file import TYPES, GGMLType, GGUFFile
from holdfast.loading.gguf.source import (
    CONVOLUTION,
    FACTOR,
    INPUT_FACTOR,
    LAYER_TENSORS,
    MODULES,
    SCALED_TYPE,
    SHARED_GATE,
    layer_modules,
)
from holdfast.loading.planning.moves import Choice
from holdfast.loading.sources.source import TensorEntry
from holdfast.loading.writing.written import Plane, WritePlan, Written
from holdfast.memory.devices import read_data
from holdfast.models.parameters import CheckpointNames, Part
from holdfast.models.spec import ModelSpec

PLAIN, FALLBACK = "F32", "F16"
"""Types of tensors that are no matrices, and of matrices whose rows no block divides."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
BETTER_MODULES = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
PLAIN_MODULES: Mapping[str, str] = {"ffn_gate_inp": "a router", SHARED_GATE: "a router", CONVOLUTION: "a convolution"}
VECTOR, SHORT = "a vector", "rows of"
PERMUTED_MODULES = ("attn_q", "attn_k")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(\w+)", re.ASCII)
_EXPERT_HALVES: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up.weight": ("ffn_gate_exps", "ffn_up_exps"),
    "experts.down.weight": ("ffn_down_exps",),
}
TYPES_BY_NAME: Mapping[str, GGMLType] = {kind.name: kind for kind in TYPES.values()}
TYPE_NUMBERS: Mapping[str, int] = {kind.name: number for number, kind in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Mix:
    """The types of one target."""

    file_type: int
    type: str
    last: str
    better: str
    short: Mapping[str, str] = field(default_factory=dict)

    def choose(self, name: str, shape: tuple[int, ...], num_layers: int, has_head: bool) -> tuple[str, str]:
        """Return the type of a tensor, and why it is not that of most matrices; no reason if it is."""
        match = _LAYER_NAME.fullmatch(name)
        module = "" if match is None else match[2]
        if len(shape) == 1 or not name.endswith(".weight"):
            return PLAIN, VECTOR
        if module in PLAIN_MODULES:
            return PLAIN, PLAIN_MODULES[module]
        wanted, reason = self.type, ""
        if name == HEAD or (name == EMBEDDING and not has_head):
            wanted, reason = self.last, "the head" if self.last != self.type else ""
        elif module in BETTER_MODULES and match is not None and is_better_layer(int(match[1]), num_layers):
            wanted, reason = self.better, "layers that lose most" if self.better != self.type else ""
        return self._fitting(wanted, shape[-1], reason)

    def _fitting(self, wanted: str, num_columns: int, reason: str) -> tuple[str, str]:
        """Return the type, or a shorter one whose blocks divide a row."""
        fitting = wanted
        while num_columns % TYPES_BY_NAME[fitting].block_elements:
            fitting = self.short.get(fitting, FALLBACK)
        if fitting == wanted:
            return wanted, reason
        return fitting, f"{SHORT} {num_columns} are no blocks of {TYPES_BY_NAME[wanted].block_elements}"


MIXES: Mapping[str, Mix] = {target: Mix(**row) for target, row in read_data("gguf_mixes.json").items()}
"""By the name of the target."""


def is_better_layer(layer: int, num_layers: int) -> bool:
    """Return True for the first and last eighth of the layers, and for every third one between."""
    first = num_layers // 8
    return layer < first or layer >= 7 * num_layers // 8 or (layer - first) % 3 == 2


def plan_file(file: GGUFFile, entries: Mapping[str, TensorEntry], names: Mapping[str, str], target: str) -> WritePlan:
    """Plan a file from another file. `names` has the entry of each tensor that is kept."""
    mix, num_layers = MIXES[target], 1 + max((_layer_of(name) for name in names), default=0)
    tensors: list[Written] = []
    for name, entry_name in names.items():
        stored, entry = file.tensors[name], entries[entry_name]
        kind, reason = mix.choose(name, stored.shape, num_layers, HEAD in file.tensors)
        is_copied = kind == stored.type.name and kind != PLAIN
        tensors.append(
            Written(
                name=name,
                encoding="copy" if is_copied else kind,
                parts=(Part(entry_name, 0, entry.shape),),
                planes=(_plane(name, kind, stored.shape),),
                before_type=stored.type.name,
                before_bytes=entry.num_bytes,
                reason=reason,
            )
        )
    return _plan(target, tensors)


def kept_names(file: GGUFFile, renamed: Iterable[str]) -> Iterator[str]:
    """Yield the tensors of a file, without factors beside NVFP4 weights, which the values include."""
    beside = {
        f"{name.removesuffix('.weight')}.{ending}"
        for name, tensor in file.tensors.items()
        if tensor.type.name == SCALED_TYPE
        for ending in (FACTOR, INPUT_FACTOR)
    }
    return (name for name in renamed if name not in beside)


def plan_checkpoint(
    fills: Iterable[Choice],
    entries: Mapping[str, TensorEntry],
    stored_types: Mapping[str, str],
    spec: ModelSpec,
    names: CheckpointNames,
    rope_factors: bytes,
    target: str,
) -> WritePlan:
    """Plan a file from a checkpoint of safetensors, with the names and the order of rows that llama.cpp reads.

    `stored_types` has the stored type of tensors that are expanded.
    """
    mix, tensors = MIXES[target], list[Written]()
    parts = dict[str, list[Part]]()
    for fill in fills:
        for name, part in _named_parts(fill, names):
            parts.setdefault(name, []).append(part)
    for name, own in parts.items():
        match = _LAYER_NAME.fullmatch(name)
        module = "" if match is None else match[2]
        shape = _shape(own, is_stacked=module.endswith("_exps"))
        shape = shape[1:] if module == SHARED_GATE else shape
        kind, reason = mix.choose(name, shape, spec.num_layers, HEAD in parts)
        is_permuted = architecture_of(spec) == "llama" and module in PERMUTED_MODULES
        is_norm = name.endswith("_norm.weight")
        tensors.append(
            Written(
                name=name,
                encoding=kind,
                parts=tuple(own),
                planes=(_plane(name, kind, shape),),
                before_type=stored_types.get(own[0].tensor, entries[own[0].tensor].dtype),
                before_bytes=sum(part_bytes(part, entries[part.tensor]) for part in own),
                reason=reason,
                head_dim=spec.head_dim if is_permuted else None,
                added=spec.norm_offset if is_norm else 0.0,
            )
        )
    if rope_factors:
        plane = _plane("rope_freqs.weight", PLAIN, (len(rope_factors) // 4,))
        tensors.append(Written(plane.name, PLAIN, (), (plane,), "settings", 0, VECTOR, constant=rope_factors))
    return _plan(target, tensors)


def architecture_of(spec: ModelSpec) -> str:
    """Return the name of the architecture in GGUF files; refuse one that files are not written for."""
    written: Mapping[str, list[str]] = TABLES["written"]
    for arch, known in written.items():
        if spec.architecture in known:
            return arch
    accepted = [name for known in written.values() for name in known]
    raise UnsupportedModelError("quantize.architecture", architecture=spec.architecture, accepted=accepted)


def _named_parts(fill: Choice, names: CheckpointNames) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a parameter, each with the name of the tensor that it belongs to in a GGUF file."""
    tensors = [part.tensor for part in fill.parts]
    return zip(part_names(fill.parameter.name, tensors, names), fill.parts, strict=True)


def part_names(parameter: str, tensors: Iterable[str], names: CheckpointNames) -> Iterator[str]:
    """Yield the tensor of a GGUF file that holds each part of a parameter, given the parts' tensors in a checkpoint."""
    _, _, rest = parameter.removeprefix("layers.").partition(".")
    halves = _EXPERT_HALVES.get(rest)
    if halves is None:
        yield from (gguf_name(tensor, names) for tensor in tensors)
        return
    layer = parameter.split(".")[1]
    for place, _ in enumerate(tensors):
        yield f"blk.{layer}.{halves[place % len(halves)]}.weight"


def gguf_name(tensor: str, names: CheckpointNames) -> str:
    """Return the name in a GGUF file of a tensor of a checkpoint."""
    module, _, kind = tensor.rpartition(".")
    ends = {theirs: ours for ours, theirs in MODULES.items()}
    if module in ends:
        return f"{ends[module]}.{kind}"
    start, _, end = names.layer.partition("{}")
    layer, _, rest = tensor.removeprefix(start).partition(end)
    for ours, theirs in LAYER_TENSORS.items():
        if rest == theirs:
            return f"blk.{layer}.{ours}"
    modules: dict[str, str] = {}
    for ours, theirs in layer_modules(names).items():
        modules.setdefault(theirs, ours)  # a norm before the MLP may have the name of one after attention
    if modules.get(rest) == SCORE_BIAS:
        return f"blk.{layer}.{SCORE_BIAS}.bias"
    module = rest.rpartition(".")[0]
    assert module in modules, f"{tensor}: no module of a GGUF file stands for {module}"
    return f"blk.{layer}.{modules[module]}.{kind}"


def _shape(parts: list[Part], is_stacked: bool) -> tuple[int, ...]:
    """Return the shape of a tensor of these parts; experts are stacked."""
    rows, columns = sum(part.num_rows for part in parts), parts[0].num_columns
    if is_stacked:
        return len(parts), rows // len(parts), columns
    return (rows,) if len(parts[0].shape) == 1 else (rows, columns)


def _plane(name: str, kind: str, shape: tuple[int, ...]) -> Plane:
    block = TYPES_BY_NAME[kind]
    return Plane(name, kind, shape, prod(shape) // block.block_elements * block.block_bytes)


def part_bytes(part: Part, entry: TensorEntry) -> int:
    """Return the stored bytes of a part of a tensor."""
    return entry.num_bytes * part.num_rows * part.num_columns // prod(entry.shape)


def _layer_of(name: str) -> int:
    match = _LAYER_NAME.fullmatch(name)
    return 0 if match is None else int(match[1])


def _plan(target: str, tensors: list[Written]) -> WritePlan:
    """Make the plan, with a line for blocks that do not fit."""
    short = [tensor for tensor in tensors if tensor.reason.startswith(SHORT)]
    kinds = ", ".join(sorted({tensor.stored_as for tensor in short}))
    note = (
        f"{len(short)} of {len(tensors)} tensors have rows that blocks do not divide: they are {kinds}, as in llama.cpp"
    )
    plan = WritePlan(target, tuple(tensors), (note,) if short else ())
    plan.check()
    return plan

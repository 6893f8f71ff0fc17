"""Packed weights of a release that is named, or whose settings are known, and that is not read: the scheme of every part; no torch."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from holdfast.families.state.spec import StateSpec
from holdfast.loading.gguf.config import ARCHITECTURES, SIGMOID_ARCHITECTURE, TABLES
from holdfast.loading.gguf.state_rows import TILED_ARCHITECTURES
from holdfast.loading.packed.layout import FLOATS, PackedLayout
from holdfast.loading.packed.matrices import layout_scheme
from holdfast.loading.packed.settings import PLAIN_BITS, PackedSettings, read_packed
from holdfast.loading.planning.stored_schemes import matches
from holdfast.loading.release_names import find_release
from holdfast.loading.writing.gguf_plan import EMBEDDING, MIXES, TYPES_BY_NAME, Mix, part_names
from holdfast.memory.on_disk import OnDisk, StoredType
from holdfast.models.declared_model import DeclaredModel
from holdfast.models.declared_weights import Weight
from holdfast.models.decoder_declaration import DecoderDeclaration
from holdfast.models.grouped_readers import FAMILIES
from holdfast.models.packed_rows import Schemes
from holdfast.models.parameters import CheckpointNames
from holdfast.models.spec import ModelSpec
from holdfast.quant.packed_schemes import BLOCK_SCHEMES, PackedScheme

SCALE_DTYPE = "float16"
"""Type of scales of AWQ and GPTQ; other formats have the checkpoint's."""
ORDER_DTYPE = "int32"
PACKED_KINDS = ("linear", "expert")
IGNORE_KEYS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
SKIPPED = "-:"
"""Prefix of an expression for modules that stay plain, among those with settings of their own (GPTQModel)."""


def as_named(declared: DeclaredModel, model: str) -> DeclaredModel:
    """Return the model with the weights that its name says; unchanged if the name or the architecture has none."""
    release = find_release(model)
    if release is None:
        return declared
    if release.config is None:
        packed = as_mixed(declared, MIXES[release.mix])
    else:
        settings = read_packed(release.config)
        assert settings is not None, f"{release.title}: {release.config} declares no packed weights"
        packed = as_declared(declared, settings, release.config)
    return declared if packed is None else replace(packed, release=release.title)


def as_mixed(declared: DeclaredModel, mix: Mix) -> DeclaredModel | None:
    """Return the model as a GGUF file of a mix holds it; None if there are no such files of its family."""
    declaration, spec = declared.declaration, declared.spec
    if spec is None or not isinstance(declaration, DecoderDeclaration) or not _has_files(spec):
        return None
    spec = replace(spec, state=_state_in_file(spec))
    plain = declaration._replace(decoder=spec, native=None, expert_native=None)
    model = replace(declared, spec=spec, declaration=plain, stored={}, open_weights=frozenset())
    packed: dict[str, Schemes] = {}
    tensors: dict[str, list[tuple[str, int]]] = {}
    for weight in model.parameters():
        schemes: list[PackedScheme | None] = []
        for name, kind, num_bytes in _parts_in_file(weight, mix, spec, declaration.names):
            schemes.append(BLOCK_SCHEMES.get(kind))
            tensors.setdefault(name, []).append((kind, num_bytes))
        if weight.part_rows and any(schemes):
            packed[weight.name] = tuple(schemes)
    return replace(model, packed=packed, on_disk=_on_disk(tensors))


def _has_files(spec: ModelSpec) -> bool:
    """Return True if GGUF files of the family are read."""
    read = {FAMILIES[one].name for one in (*ARCHITECTURES.values(), SIGMOID_ARCHITECTURE)}
    written: Mapping[str, list[str]] = TABLES["written"]
    family = FAMILIES[spec.architecture]
    return (family.text_type or family.name) in read or any(spec.architecture in one for one in written.values())


def _state_in_file(spec: ModelSpec) -> StateSpec | None:
    """Return gated delta nets as a file holds them: queries, keys and values in one tensor, value heads in turn."""
    if spec.state is None:
        return None
    tiled = {FAMILIES[ARCHITECTURES[arch]].name for arch in TILED_ARCHITECTURES}
    family = FAMILIES[spec.architecture]
    is_tiled = (family.text_type or family.name) in tiled and spec.state.value_heads > spec.state.key_heads
    return replace(spec.state, is_joined=False, is_tiled=is_tiled)


def _parts_in_file(weight: Weight, mix: Mix, spec: ModelSpec, names: CheckpointNames) -> Iterator[tuple[str, str, int]]:
    """Yield each part of a weight, in all of its matrices: the tensor that holds it, the tensor's type, and the bytes."""
    num_columns = weight.shape[-1] if len(weight.shape) > 1 else 1
    num_matrices = prod(weight.shape[:-2]) if len(weight.shape) > 2 else 1
    rows = weight.part_rows or _even(prod(weight.shape), len(weight.tensors))
    tensors = weight.tensors[: len(rows)]
    is_vector = len(weight.shape) == 1
    for name, num_rows in zip(part_names(weight.model_name, tensors, names), rows, strict=True):
        is_one_row = name.endswith("ffn_gate_inp_shexp.weight")
        shape = (num_rows,) if is_vector else (num_columns,) if is_one_row else (num_rows, num_columns)
        kind, _ = mix.choose(name, shape, spec.num_layers, not spec.tied_embeddings)
        block = TYPES_BY_NAME[kind]
        num_elements = num_matrices * num_rows * num_columns
        yield name, kind, num_elements // block.block_elements * block.block_bytes


def _even(total: int, num_parts: int) -> tuple[int, ...]:
    """Share elements among parts whose sizes do not matter: biases of query, key and value are all stored alike."""
    each, rest = divmod(total, num_parts)
    return (each + rest, *(each,) * (num_parts - 1))


def _on_disk(tensors: Mapping[str, list[tuple[str, int]]]) -> OnDisk:
    """Sum the bytes of tensors; a file has a header, too."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for parts in tensors.values():
        counts[parts[0][0]] += 1
        sizes[parts[0][0]] += sum(num_bytes for _, num_bytes in parts)
    embedding = tensors[EMBEDDING][0][0]
    return OnDisk(
        num_files=1,
        num_bytes=sizes.total(),
        types=tuple(StoredType(name, count, sizes[name]) for name, count in counts.most_common()),
        has_blocks=any(TYPES_BY_NAME[name].block_elements > 1 for name in counts),
        embedding_type=embedding if TYPES_BY_NAME[embedding].block_elements > 1 else None,
    )


def as_declared(
    declared: DeclaredModel, settings: PackedSettings, config: Mapping[str, object]
) -> DeclaredModel | None:
    """Return the model with the packed weights that its settings declare.

    None if modules differ in bits or groups, so that tensors alone tell, or if the weights are stored otherwise.
    """
    if not isinstance(declared.declaration, DecoderDeclaration) or declared.stored_recipe is not None:
        return None
    if len({(layout.bits, layout.group_size) for layout in settings.layouts}) != 1:
        return None
    plain = _Plain.of(config)
    packed: dict[str, Schemes] = {}
    for weight in declared.parameters():
        is_packed = weight.kind in PACKED_KINDS or (weight.kind == "head" and plain.packs_head)
        if not is_packed or not weight.part_rows:
            continue
        schemes = tuple(
            None if plain.has(tensor) else _scheme(settings.layouts[0], num_rows, weight.shape[-1], declared)
            for tensor, num_rows in zip(weight.tensors, weight.part_rows, strict=False)
        )
        if any(schemes):
            packed[weight.name] = schemes
    return replace(declared, packed=packed)


class _Plain(NamedTuple):
    """Modules that settings leave plain."""

    patterns: tuple[str, ...]
    skipped: tuple[re.Pattern[str], ...]
    packs_head: bool

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "_Plain":
        nested = config.get("quantization")
        found: list[str] = []
        for section in (config, nested if isinstance(nested, Mapping) else {}):
            for key in IGNORE_KEYS:
                value = section.get(key)
                found += [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
        dynamic, extra = config.get("dynamic"), config.get("extra_config")
        skipped = [name.removeprefix(SKIPPED) for name in _names(dynamic) if name.startswith(SKIPPED)]
        found += [name for name, own in _items(extra) if _bits(own) >= PLAIN_BITS]
        return cls(tuple(found), tuple(map(re.compile, skipped)), config.get("lm_head") is True)

    def has(self, tensor: str) -> bool:
        module = tensor.removesuffix(".weight")
        return any(matches(one, module) or fnmatchcase(module, one) for one in self.patterns) or any(
            one.match(module) for one in self.skipped
        )


def _names(value: object) -> Iterable[str]:
    return (name for name in value if isinstance(name, str)) if isinstance(value, Mapping) else ()


def _items(value: object) -> Iterable[tuple[str, object]]:
    return ((name, own) for name, own in value.items()) if isinstance(value, Mapping) else ()


def _bits(own: object) -> int:
    bits = own.get("bits") if isinstance(own, Mapping) else None
    return bits if isinstance(bits, int) else 0


def _scheme(layout: PackedLayout, num_rows: int, num_columns: int, declared: DeclaredModel) -> PackedScheme | None:
    """Return the scheme of a matrix; None if the layout cannot hold it, so that it stays plain."""
    if layout.indivisible(num_rows, num_columns) is not None:
        return None
    group = 0 if layout.group_size in (0, num_columns) else layout.group_size
    has_own = not layout.format.is_input_major and declared.checkpoint_dtype in FLOATS
    dtype = declared.checkpoint_dtype if has_own else SCALE_DTYPE
    scheme = layout_scheme(layout, group, dtype, has_zeros=layout.zeros not in ("none", "middle"))
    return scheme.ordered(layout.num_groups(num_columns), ORDER_DTYPE) if layout.has_order else scheme

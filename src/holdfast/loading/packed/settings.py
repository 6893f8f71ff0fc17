"""PackedSettings: the layouts that a config.json declares for packed weights; other formats are refused by name; no torch.

A module's layout follows from its tensors. Settings say which layouts occur, so that neither is believed alone; names
of plain modules (`ignore`, `modules_to_not_convert`) are not needed, because plain modules have plain tensors.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.errors import UnsupportedModelError, shown
from holdfast.loading.packed.layout import (
    AWQ,
    FP8,
    GPTQ,
    INT8,
    MODELOPT_NVFP4,
    MXFP4,
    NVFP4,
    PACKED_INT,
    PackedFormat,
    PackedLayout,
    Zeros,
)
from holdfast.loading.sources.files import CONFIG_FILE, QUANTIZATION_FILES, QUANTIZATION_KEY, read_json_object
from holdfast.loading.sources.safetensors import file_inside, has_file
from holdfast.memory.devices import read_data
from holdfast.models.settings import Settings, listed

TABLES = read_data("packed_formats.json")
METHODS = ("awq", "gptq", "compressed-tensors", "modelopt", "auto-round")
"""Values of quant_method with packed formats; compressed-tensors has others, too."""
METHOD_SPELLINGS = {"modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "intel/auto-round": "auto-round"}
STORED_METHODS = ("fp8", "fbgemm_fp8", "mxfp4")
"""Methods whose weights load unchanged (loading/planning/stored_schemes.py)."""
BYTE_FORMATS = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors whose weights may be e4m3 in bytes."""
NVFP4_GROUP, MXFP4_GROUP = 16, 32
ALL = -1
"""Size of a group of all inputs."""
PLAIN_BITS = 16
SIDE_KEYS = frozenset(("bits", "w_bit", "quant_method", "quant_algo", "quantization"))
"""Keys of which settings beside config.json have one."""
CACHE_NOTE = "scales of KV pages in the checkpoint (k_scale, v_scale) are unused; --kv-cache-dtype sets the pages"
NEUTRAL: Mapping[str, Sequence[object]] = TABLES["neutral"]


@dataclass(frozen=True, slots=True)
class PackedSettings:
    """What a checkpoint declares about its packed weights."""

    layouts: tuple[PackedLayout, ...]
    """Every layout that a module may have; the first is that of most. None if pages of KV alone are quantized."""
    file: str = CONFIG_FILE
    has_cache_scales: bool = False
    """True if the settings announce scales of KV pages."""

    @property
    def titles(self) -> str:
        return listed(list(dict.fromkeys(layout.title for layout in self.layouts)))

    @property
    def notes(self) -> tuple[str, ...]:
        """A plan's sentences on the storage."""
        if not self.layouts:
            return (CACHE_NOTE,) if self.has_cache_scales else ()
        stored = f"the checkpoint stores weights as {self.titles}"
        return (stored, CACHE_NOTE) if self.has_cache_scales else (stored,)


def read_side_settings(folder: Path, config: Mapping[str, object]) -> tuple[Mapping[str, object] | None, str]:
    """Return the settings of a folder and their file: of config.json, else of a file beside it."""
    if config.get(QUANTIZATION_KEY):
        return None, CONFIG_FILE
    for name, method in QUANTIZATION_FILES.items():
        if has_file(folder, name):
            values = read_json_object(file_inside(folder, name))
            known = {key: value for key, value in values.items() if value is not None}
            if known.keys() & SIDE_KEYS:  # others are files of another program
                return {"quant_method": method, **known}, name
    return None, CONFIG_FILE


def read_packed(config: Mapping[str, object] | None, file: str = CONFIG_FILE) -> PackedSettings | None:
    """Return the layouts that these settings declare; None if weights are plain or load unchanged."""
    if not config:
        return None
    section = f"{QUANTIZATION_KEY}." if file == CONFIG_FILE else ""
    settings = Settings(config, file, section)
    method = settings.text("quant_method", "")
    method = METHOD_SPELLINGS.get(method, method)
    if (reason := TABLES["declined_methods"].get(method.lower())) is not None:
        raise declined(settings, "quant_method", method, reason)
    if method in STORED_METHODS or (method == "compressed-tensors" and not _packs(settings)):
        return None
    if method not in METHODS:
        raise declined(settings, "quant_method", method, f"those read are {', '.join((*STORED_METHODS, *METHODS))}")
    for key, values in NEUTRAL.items():
        if config.get(key) is not None and config[key] not in values and not _is_dense(config[key]):
            raise declined(settings, key, config[key], "it changes what the codes mean")
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "auto-round": _auto_round,
    }
    layouts = tuple(dict.fromkeys(readers[method](settings)))
    nested = config.get("quantization")
    scales = [config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")]
    scales += [nested.get("kv_cache_quant_algo")] if isinstance(nested, dict) else []
    return PackedSettings(layouts, file, any(scales))


def _is_dense(value: object) -> bool:
    """Return True for a sparsity_config that leaves out nothing."""
    return isinstance(value, dict) and value.get("format") == "dense"


def declined(settings: Settings, key: str, value: object, reason: str) -> UnsupportedModelError:
    key = f"{settings.section}{key}"
    return UnsupportedModelError("weights.unsupported_setting", file=settings.file, key=key, value=value, reason=reason)


def _bits(settings: Settings, accepted: Iterable[int], key: str = "bits") -> int:
    value, accepted = settings.values.get(key, settings.values.get("w_bit")), tuple(accepted)
    if value is None:
        raise settings.missing(key, "it says how many bits a code has")
    if isinstance(value, bool) or not isinstance(value, int) or value not in accepted:
        raise declined(settings, key, value, f"{' and '.join(map(str, accepted))} bits are read")
    return value


def _word(settings: Settings, *keys: str) -> tuple[str, str | None]:
    """Return the first of these keys with a value, and the value, a string; else the first key and None."""
    key = next((key for key in keys if settings.values.get(key) is not None), keys[0])
    return key, None if settings.values.get(key) is None else settings.text(key, "")


def _group_size(settings: Settings, default: int = 128) -> int:
    """Read a number of inputs; -1 means all of them, as does null."""
    value = settings.values.get("group_size", settings.values.get("q_group_size", default))
    if value is None or value == ALL:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**20:
        raise settings.refuse("group_size", value, "a number of inputs, or -1 for all")
    return value


def _awq(settings: Settings) -> list[PackedLayout]:
    for key in ("version", "checkpoint_format", "format", "backend"):
        value = _word(settings, key)[1]
        is_version = value is not None and (key != "backend" or value == "llm-awq")
        if is_version and value is not None and value.lower() not in TABLES["awq_versions"]:
            reason = "its words have another order; the version gemm is read, so take such a checkpoint"
            raise declined(settings, key, value, reason)
    return [_awq_layout(settings)]


def _awq_layout(settings: Settings) -> PackedLayout:
    return PackedLayout(AWQ, _bits(settings, (4,)), _group_size(settings), "words")


def _gptq(settings: Settings) -> list[PackedLayout]:
    known: Mapping[str, Zeros] = TABLES["gptq_formats"]
    key, stored = _word(settings, "checkpoint_format", "format")
    stored = stored or "gptq"
    if stored not in known:
        reason = f"the formats read are {' and '.join(known)}; take such a checkpoint"
        raise declined(settings, key, stored, reason)
    return _own_layouts(settings, lambda own: _gptq_layout(own, known[stored]), "dynamic")


def _own_layouts(settings: Settings, make: Callable[[Settings], PackedLayout], overrides: str) -> list[PackedLayout]:
    """Return the base layout and those of modules with settings of their own."""
    base = make(settings)
    parts = settings.part(overrides)
    found = [base]
    for name in () if parts is None else parts.values:
        own = parts.part(name) if parts is not None else None
        if own is None or name.startswith("-:") or not _is_packed(own, base.bits):
            continue
        merged = {**settings.values, **own.values}
        found.append(make(Settings(merged, settings.file, own.section)))
    return _joined(found)


def _joined(layouts: Sequence[PackedLayout]) -> list[PackedLayout]:
    """Join layouts that differ in being symmetric, which headers do not show."""
    with_zeros = {replace(one, zeros="middle"): one for one in layouts if one.zeros != "middle"}
    found = [with_zeros.get(one, one) for one in layouts]
    mixed = {with_zeros[one] for one in layouts if one in with_zeros}
    return [replace(one, may_be_middle=one in mixed) for one in found]


def _is_packed(own: Settings, bits: int) -> bool:
    value = own.values.get("bits", bits)
    return not isinstance(value, int) or value < PLAIN_BITS


def _gptq_layout(settings: Settings, zeros: Zeros) -> PackedLayout:
    own_zeros: Zeros = "middle" if settings.flag("sym", True) else zeros
    bits, group_size = _bits(settings, (4, 8)), _group_size(settings)
    has_order = settings.values.get("desc_act") is not None and settings.flag("desc_act", False)
    return PackedLayout(GPTQ, bits, group_size, own_zeros, has_order)


def _auto_round(settings: Settings) -> list[PackedLayout]:
    packings: Mapping[str, str] = TABLES["auto_round_packings"]
    key, packing = _word(settings, "packing_format", "backend")
    if packing is None or packing not in packings:
        raise declined(settings, key, packing, f"those read are {', '.join(packings)}")
    way = packings[packing]
    if way == "awq":
        return _own_layouts(settings, _awq_layout, "extra_config")
    if way != "llm_compressor":
        zeros: Zeros = TABLES["gptq_formats"][way]
        return _own_layouts(settings, lambda own: _gptq_layout(own, zeros), "extra_config")
    return _own_layouts(settings, _llm_compressor_layout, "extra_config")


def _llm_compressor_layout(settings: Settings) -> PackedLayout:
    numbers = settings.text("data_type", "int")
    if numbers.startswith("nv_fp"):
        return PackedLayout(NVFP4, _bits(settings, (4,)), NVFP4_GROUP)
    if numbers.startswith("mx_fp"):
        return PackedLayout(MXFP4, _bits(settings, (4,)), MXFP4_GROUP)
    if numbers != "int":
        raise declined(settings, "data_type", numbers, "int, nv_fp and mx_fp are read")
    zeros: Zeros = "none" if settings.flag("sym", True) else "words"
    return PackedLayout(PACKED_INT, _bits(settings, (4, 8)), _group_size(settings), zeros)


def _packs(settings: Settings) -> bool:
    """Return True if some group of compressed-tensors is not e4m3 in bytes, or the format of groups that are missing."""
    groups = settings.part("config_groups")
    if groups is None or not groups.values:
        return _word(settings, "format")[1] in TABLES["compressed_formats"].keys() - set(BYTE_FORMATS)
    for name in () if groups is None else groups.values:
        group = groups.part(name) if groups is not None else None
        weights = None if group is None else group.part("weights")
        if weights is not None and (weights.values.get("type"), weights.values.get("num_bits")) != ("float", 8):
            numbers = weights.values.get("type", "int")
            return numbers == "int" or weights.values.get("num_bits") == 4
    return False


def _compressed(settings: Settings) -> list[PackedLayout]:
    groups, found = settings.part("config_groups"), []
    known: Mapping[str, Sequence[str]] = TABLES["compressed_formats"]
    _, outer = _word(settings, "format")
    if outer is not None and outer not in known:
        raise declined(settings, "format", outer, f"the formats read are {', '.join(known)}")
    for name in () if groups is None else groups.values:
        group = groups.part(name) if groups is not None else None
        weights = None if group is None else group.part("weights")
        if group is None or weights is None:
            continue  # a group of activations alone
        stored = _word(group, "format")[1] or outer
        if stored is not None and stored not in known:
            raise declined(group, "format", stored, f"the formats read are {', '.join(known)}")
        ways = _compressed_layouts(weights)
        fitting = [way for way in ways if stored is None or way.format.name in known[stored]]
        if not fitting:
            raise declined(group, "format", stored, f"its weights are {listed([way.title for way in ways])}")
        found += fitting
    if not found:
        raise settings.missing("config_groups", "it says how weights are stored")
    return found


def _compressed_layouts(weights: Settings) -> list[PackedLayout]:
    """Return the layouts that one group's weights may have; the group's format chooses."""
    numbers, strategy = weights.text("type", "int"), _word(weights, "strategy")[1]
    strategy = strategy or ("group" if _group_size(weights, ALL) else "channel")
    if weights.values.get("dynamic"):
        raise declined(weights, "dynamic", weights.values["dynamic"], "scales of weights are stored")
    if numbers == "float":
        bits, group_size = _bits(weights, (4, 8), "num_bits"), _group_size(weights, ALL)
        if weights.values.get("symmetric") is False:
            raise declined(weights, "symmetric", False, "floats are read without zero points")
        if bits == 8:
            return [PackedLayout(FP8, 8, 0)]
        by_group: dict[int, PackedFormat] = {NVFP4_GROUP: NVFP4, MXFP4_GROUP: MXFP4}
        if group_size not in by_group:
            raise declined(weights, "group_size", group_size, "4-bit floats are read in groups of 16 and 32")
        return [PackedLayout(by_group[group_size], 4, group_size)]
    if numbers != "int":
        raise declined(weights, "type", numbers, "int and float are read")
    if strategy not in ("group", "channel", "tensor"):
        raise declined(weights, "strategy", strategy, "integers are read by group, channel and tensor")
    bits, group_size = _bits(weights, (4, 8), "num_bits"), _group_size(weights, ALL) if strategy == "group" else 0
    if strategy == "group" and not group_size:
        raise declined(weights, "group_size", weights.values.get("group_size"), "groups need a number of inputs")
    is_symmetric, order = weights.flag("symmetric", True), weights.values.get("actorder") in ("group", True)
    in_words = PackedLayout(PACKED_INT, bits, group_size, "none" if is_symmetric else "words", order)
    in_bytes = PackedLayout(INT8, bits, group_size, "none" if is_symmetric else "plain")
    return [in_bytes] if strategy == "tensor" else [in_words, in_bytes]


def _modelopt(settings: Settings) -> list[PackedLayout]:
    section = settings.part("quantization") or settings
    algorithms: Mapping[str, str] = TABLES["modelopt_algorithms"]
    whole = _word(section, "quant_algo")[1]
    wanted = [] if whole is None and "quant_algo" in section.values else [(section, whole)]
    if whole == "MIXED_PRECISION":
        layers = section.part("quantized_layers")
        parts = [] if layers is None else [part for name in layers.values if (part := layers.part(name)) is not None]
        if not parts:
            raise section.missing("quantized_layers", "it says how the layers of MIXED_PRECISION are stored")
        wanted = [(part, _word(part, "quant_algo")[1]) for part in parts]
    found: list[PackedLayout] = []
    for part, algorithm in wanted:
        if algorithm is None or algorithm not in algorithms:
            reason = f"those read are {', '.join(algorithms)} and MIXED_PRECISION; {shown(algorithm)} is not"
            raise declined(part, "quant_algo", algorithm, reason)
        if algorithms[algorithm] == "fp8":
            found.append(PackedLayout(FP8, 8, 0))
            continue
        group_size = _group_size(part, NVFP4_GROUP) or NVFP4_GROUP
        if group_size != NVFP4_GROUP:
            raise declined(part, "group_size", group_size, f"NVFP4 has groups of {NVFP4_GROUP}")
        found.append(PackedLayout(MODELOPT_NVFP4, 4, NVFP4_GROUP))
    return found

"""Checkpoints that are already quantized: their settings, where codes and scales are, and dummies of both; no torch.

quant_method          a matrix X.weight of N rows and K columns is stored as
fp8, in blocks        X.weight e4m3, X.weight_scale_inv [N / 128, K / 128]
fp8, fbgemm_fp8,      X.weight e4m3, X.weight_scale [N, 1], [N], [1] or a single number; X.input_scale is not needed,
compressed-tensors    because activations get scales of their own (compressed-tensors has blocks too)
mxfp4, experts        X_blocks [E, N, K / 32, 16] bytes of two codes, X_scales [E, N, K / 32]
fp8 with experts in   other matrices X.weight e4m3, X.scale [N / 128, K / 128], exponents of two or float32; experts
fp4 (DeepSeek-V4)     X.weight [N, K / 2] bytes of two codes, the first in the low bits, X.scale [N, K / 32] exponents
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.moves import SIGNED_BYTES, Choice, choose, turn_squares
from holdfast.loading.sources.dummy import DummyPlane, DummySource
from holdfast.loading.sources.files import CONFIG_FILE, EXPERT_DTYPE_KEY, QUANTIZATION_KEY
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Kind, Parameter, Part
from holdfast.models.settings import EXPERT_DTYPES, Settings, listed
from holdfast.quant.weight_schemes import (
    FP8,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4,
    REGEX_PREFIX,
    SCALE_SUFFIX,
    WEIGHT_SCHEMES,
    WeightRecipe,
    WeightScheme,
)

UNNEEDED_ENDINGS = (".input_scale", ".input_scale_ub", ".input_scale_inv", ".activation_scale")
"""Suffixes of tensors that hold calibrated activation scales; they are not needed."""


class StoredWeight(NamedTuple):
    """A weight whose planes come from the checkpoint unchanged."""

    shape: tuple[int, ...]
    scheme: WeightScheme


@dataclass(frozen=True, slots=True)
class StoredPlanes:
    """Parameters with each stored weight replaced by its planes: codes as NAME, scales as NAME.scale."""

    parameters: tuple[Parameter, ...]
    weights: Mapping[str, StoredWeight]

    @property
    def scale_names(self) -> frozenset[str]:
        return frozenset(name + SCALE_SUFFIX for name in self.weights)


@dataclass(frozen=True, slots=True)
class StoredSchemes:
    """How a checkpoint stores matrices; a tensor with the type of codes is stored so."""

    scheme: WeightScheme
    scale_endings: tuple[str, ...] = ()
    """Suffixes that turn a matrix's name into its scales' name; the first that exists wins."""
    ignore: tuple[str, ...] = ()
    """Modules that stay plain: a name, a prefix or suffix of one, or a pattern after "re:"."""
    file: str = CONFIG_FILE
    expert_scheme: WeightScheme | None = None
    """The scheme of experts, if different."""
    packs_rows: bool = False
    """True if packed codes are rows under the matrix's name; else they are blocks under their own names."""

    def of(self, kind: str) -> "StoredSchemes":
        """Return the storage of one kind of parameters."""
        if kind != "expert" or self.expert_scheme is None:
            return self
        return replace(self, scheme=self.expert_scheme, expert_scheme=None, packs_rows=True)

    @property
    def code_dtypes(self) -> tuple[str, ...]:
        """Types of tensors that hold codes; bytes in rows may be signed."""
        return (self.scheme.code_dtype, SIGNED_BYTES) if self.packs_rows else (self.scheme.code_dtype,)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of parameters that this scheme may store. A head needs scales by row."""
        if self.scheme.codes_per_byte > 1:
            return ("expert",)
        return ("linear", "expert") if self.scheme.block_columns else ("linear", "expert", "head")

    def leaves_alone(self, tensors: Iterable[str]) -> bool:
        """Return True if the settings leave one of these tensors plain."""
        return any(matches(pattern, tensor.removesuffix(".weight")) for tensor in tensors for pattern in self.ignore)

    @property
    def unread_pattern(self) -> str | None:
        """The first pattern that cannot be evaluated, so plain modules are unknown; None if all can."""
        return next((pattern for pattern in self.ignore if not is_followed(pattern)), None)

    def refuse_unread(self) -> None:
        """Refuse an unknown pattern: without headers, only patterns tell the plain modules."""
        if self.unread_pattern is not None:
            reason = "such an expression is not evaluated, and there are no headers of weights to decide"
            raise UnsupportedModelError(
                "weights.unsupported_setting", file=self.file, key="ignore", value=self.unread_pattern, reason=reason
            )

    def used_by(self, entries: Mapping[str, TensorEntry]) -> "StoredSchemes | None":
        """Return self; None if no tensor has the type of codes, so the checkpoint is plain despite its settings."""
        others, dtypes = self.ignorable(entries), (*self.code_dtypes, *self.of("expert").code_dtypes)
        is_used = any(one.dtype in dtypes for name, one in entries.items() if name not in others)
        return self if is_used else None

    def refuse_left_alone(self, codes: TensorEntry, tensors: Iterable[str]) -> None:
        """Refuse codes of a parameter that the settings leave plain."""
        if self.leaves_alone(tensors):
            problem = f"{shown(codes.name)} is stored as {codes.dtype}, but {self.file} says that it is not quantized"
            raise ModelFormatError("model.mismatch", file=codes.file, problem=problem)

    def ignorable(self, names: Iterable[str]) -> frozenset[str]:
        """Return the tensors that may stay unused."""
        return frozenset(name for name in names if name.endswith(UNNEEDED_ENDINGS))

    def planes(
        self, parameters: Iterable[Parameter], entries: Mapping[str, TensorEntry], recipe: WeightRecipe
    ) -> StoredPlanes:
        """Replace stored weights by their planes; refuse to quantize a weight twice."""
        found: list[Parameter] = []
        weights: dict[str, StoredWeight] = {}
        for parameter in turn_squares(parameters, entries):
            own = self.of(parameter.kind)
            choice = own._stored_codes(parameter, entries)
            if choice is None:
                found.append(parameter)
                continue
            wanted, name, is_stored = recipe.of_kind(parameter.kind), parameter.name, own.scheme.name
            if wanted is not None and wanted.name != is_stored:
                raise ConfigError(
                    "weights.already_quantized",
                    weight=name,
                    stored=is_stored,
                    name="quantization",
                    requested=wanted.name,
                )
            scheme = own._settled(parameter, choice.parts)
            weights[parameter.name] = StoredWeight(parameter.shape, scheme)
            codes = choice.parameter
            whole = None if codes.whole is None else replace(codes.whole, parts=choice.whole_parts, layouts=())
            found.append(replace(codes, parts=choice.parts, layouts=(), whole=whole))
            found.append(own._scales(parameter, scheme, choice, entries))
        return StoredPlanes(tuple(found), weights)

    def is_declared(self, kind: str, tensors: Iterable[str]) -> bool:
        """Return True if the settings alone, without headers, declare such a parameter quantized.

        Every eligible parameter is, except those left plain and the head, which most checkpoints silently leave plain.
        """
        return kind in self.kinds and kind != "head" and not self.leaves_alone(tensors)

    def dummy_codes(self, parameter: Parameter) -> tuple[Part, ...]:
        """Return the codes of a parameter from the settings alone; empty if it is plain."""
        whole = parameter.whole or parameter
        if not self.is_declared(whole.kind, (part.tensor for part in whole.parts)):
            return ()
        codes = self._codes(whole)
        if self.scheme.codes_per_byte == 1:
            return codes.parts
        # Such experts are one stacked tensor if the family has that layout.
        return next((parts for parts in codes.layouts if len(parts[0].shape) > 3), codes.parts)

    def _stored_codes(self, parameter: Parameter, entries: Mapping[str, TensorEntry]) -> Choice | None:
        """Return the choice of a parameter's codes; None if it is not stored as codes."""
        if parameter.kind not in self.kinds or len(parameter.shape) < 2:
            self._refuse_codes(parameter, entries)
            return None
        if not self._has_codes(parameter, entries):  # its shape is not checked then
            return None
        choice = choose(self._codes(parameter), entries)
        tensors = dict.fromkeys(part.tensor for part in choice.whole_parts)
        present = [entries[tensor] for tensor in tensors if tensor in entries]
        stored = [entry for entry in present if entry.dtype in self.code_dtypes]
        if not stored:
            return None
        others = [entry for entry in present if entry.dtype not in self.code_dtypes]
        if others:
            entry, reason = others[0], f"{shown(stored[0].name)} of the same weight as {self.scheme.code_dtype}"
            raise UnsupportedModelError(
                "weights.unsupported_dtype", file=entry.file, tensor=entry.name, dtype=entry.dtype, reason=reason
            )
        self.refuse_left_alone(stored[0], tensors)
        return choice

    def _has_codes(self, parameter: Parameter, entries: Mapping[str, TensorEntry]) -> bool:
        """Return True if a tensor exists that could hold its codes, whatever its type."""
        name = mx_codes_name if self.scheme.codes_per_byte > 1 and not self.packs_rows else str
        whole = parameter.whole or parameter
        return any(name(part.tensor) in entries for parts in (whole.parts, *whole.layouts) for part in parts)

    def _refuse_codes(self, parameter: Parameter, entries: Mapping[str, TensorEntry]) -> None:
        """Refuse a stored matrix that no GEMM takes in this scheme, such as a head in blocks."""
        for part in (parameter.whole or parameter).parts:
            entry = entries.get(part.tensor)
            if entry is None or entry.dtype != self.scheme.code_dtype or self.scheme.codes_per_byte > 1:
                continue
            what = {"head": "a head", "embedding": "an embedding", "router": "a router"}.get(parameter.kind, "it")
            reason = f"{what} in {self.scheme.name} is not read"
            raise UnsupportedModelError(
                "weights.unsupported_dtype", file=entry.file, tensor=entry.name, dtype=entry.dtype, reason=reason
            )

    def _codes(self, parameter: Parameter) -> Parameter:
        whole = None if parameter.whole is None else self._codes(parameter.whole)
        if self.scheme.codes_per_byte == 1:
            return replace(parameter, dtype=self.scheme.code_dtype, whole=whole)
        if reason := self.scheme.unsupported(parameter.shape):
            raise _not_stored_so(parameter, self.scheme, reason)
        parts, *layouts = (
            tuple(code_rows(part, self.scheme, self.packs_rows) for part in parts)
            for parts in (parameter.parts, *parameter.layouts)
        )
        shape = self.scheme.planes(parameter.shape)[0].shape
        return replace(
            parameter, shape=shape, parts=parts, layouts=tuple(layouts), dtype=self.scheme.code_dtype, whole=whole
        )

    def _settled(self, parameter: Parameter, parts: tuple[Part, ...]) -> WeightScheme:
        """Return the scheme with row blocks that each lie in one stored block; a rank's columns are whole blocks."""
        for part in parts:
            width = self.scheme.block_columns // self.scheme.codes_per_byte
            columns = part.column_range
            if width and any(column != part.source_columns and column % width for column in columns):
                reason = f"a rank's share of {shown(part.tensor)} is the columns {columns[0]} to {columns[1] - 1}"
                raise _not_stored_so(parameter, self.scheme, f"{reason}, and {width} share a scale")
        starts = [part.row_range[0] % part.matrix_rows for part in parts]
        rows = gcd(parameter.seam_rows, *starts, *(part.row_start for part in parts))
        return self.scheme.with_parts((rows,))

    def _scales(
        self, parameter: Parameter, scheme: WeightScheme, codes: Choice, entries: Mapping[str, TensorEntry]
    ) -> Parameter:
        whole = None
        if parameter.whole is not None:
            whole_codes = Choice(parameter.whole, codes.whole_parts, codes.whole_parts)
            whole = self._scales(
                parameter.whole, self._settled(parameter.whole, codes.whole_parts), whole_codes, entries
            )
        shape = scheme.scale_shape(parameter.shape)
        if scheme.block_columns == 0:  # one scale per row, however many matrices are stacked
            shape = (parameter.num_rows,)
        parts = scale_parts(codes.parts, self.scheme, scheme, self.scale_endings, entries)
        return Parameter(
            parameter.name + SCALE_SUFFIX, shape, parts, parameter.kind, dtype=scheme.scale_dtype, whole=whole
        )


def _not_stored_so(parameter: Parameter, scheme: WeightScheme, reason: str) -> UnsupportedModelError:
    fewer = "Take fewer ranks, or use" if parameter.whole is not None else "Use"
    name, shape, fix = parameter.name, list(parameter.shape), f"{fewer} a checkpoint that is not quantized"
    return UnsupportedModelError(
        "weights.unsupported_scheme", weight=name, shape=shape, scheme=scheme.name, reason=reason, fix=fix
    )


SECTION = f"{QUANTIZATION_KEY}."
FP8_METHOD, FBGEMM, COMPRESSED, MX = "fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4"
METHODS = (FP8_METHOD, FBGEMM, COMPRESSED, MX)
IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
_TABLES = json.loads(resources.files("holdfast").joinpath("data", "stored_schemes.json").read_text(encoding="utf-8"))
NEUTRAL: Mapping[str, Sequence[object]] = {**_TABLES["neutral"], EXPERT_DTYPE_KEY: tuple(EXPERT_DTYPES)}
"""Keys with their supported or neutral values; null is always neutral."""
OTHER_KEYS = (*_TABLES["other"], *IGNORE_KEYS)
"""Keys that are read elsewhere, or do not change how weights are stored."""
STRATEGIES: Mapping[str, WeightScheme] = {"channel": FP8, "tensor": FP8_TENSOR, "block": FP8_BLOCK}
"""Schemes by compressed-tensors' strategy."""
E4M3_SETTINGS: Mapping[str, tuple[object, ...]] = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}
"""compressed-tensors' settings of e4m3 weights and activations."""
INVERSE, PLAIN, OWN = "_scale_inv", "_scale", ".scale"
"""Suffixes that turn a matrix's name into its scales' name; the last one replaces ".weight"."""


def quantization_of(config: Settings) -> Mapping[str, object] | None:
    """Return a model's quantization_config, with the expert dtype that is beside it; None if it has none."""
    value, experts = config.values.get(QUANTIZATION_KEY), config.values.get(EXPERT_DTYPE_KEY)
    if value is not None and not isinstance(value, dict):
        raise config.refuse(QUANTIZATION_KEY, value, "an object")
    if value and experts is not None and experts not in NEUTRAL[EXPERT_DTYPE_KEY]:
        raise _declined(config, EXPERT_DTYPE_KEY, experts, _understood(EXPERT_DTYPE_KEY))
    return {**value, EXPERT_DTYPE_KEY: experts} if value and experts is not None else value


def read_stored_schemes(config: Mapping[str, object] | None, file: str = CONFIG_FILE) -> StoredSchemes | None:
    """Return the storage of a checkpoint with this quantization_config; None for a plain one."""
    if not config:
        return None
    settings = Settings(config, file, SECTION)
    method = settings.text("quant_method", "")
    if method not in METHODS:
        raise _declined(settings, "quant_method", method, f"checkpoints quantized by {', '.join(METHODS)} are read")
    for key, value in config.items():
        if key in OTHER_KEYS or value is None:
            continue
        if key not in NEUTRAL or value not in NEUTRAL[key]:
            raise _declined(settings, key, value, _understood(key))
    ignore = tuple(pattern for key in IGNORE_KEYS for pattern in settings.texts(key) or ())
    scheme = _scheme(settings, method)
    if scheme is FP8_BLOCK:
        endings = (PLAIN, INVERSE) if method == COMPRESSED else (INVERSE, PLAIN, OWN)
    else:
        endings = () if scheme is MXFP4 else (PLAIN,)
    expert_dtype = settings.values.get(EXPERT_DTYPE_KEY)
    if expert_dtype is None:
        return StoredSchemes(scheme, endings, ignore, file)
    experts = EXPERT_DTYPES[settings.text(EXPERT_DTYPE_KEY, "")]
    return StoredSchemes(
        scheme,
        tuple(dict.fromkeys((OWN, *endings))),
        ignore,
        file,
        expert_scheme=None if experts is None else WEIGHT_SCHEMES[experts],
    )


def _scheme(settings: Settings, method: str) -> WeightScheme:
    if method == MX:
        return MXFP4
    if method == FBGEMM:
        return FP8
    if method == FP8_METHOD:
        return FP8_TENSOR if settings.values.get("weight_block_size") is None else FP8_BLOCK
    return _compressed_scheme(settings)


def _compressed_scheme(settings: Settings) -> WeightScheme:
    """Return the one scheme of all groups: e4m3 without zero points, for weights and activations of linear layers."""
    groups = settings.part("config_groups")
    if groups is None:
        raise settings.missing("config_groups", "it says how weights are stored")
    schemes = [_group_scheme(group) for name in groups.values if (group := groups.part(name)) is not None]
    if len(set(schemes)) != 1:
        names = listed(list(dict.fromkeys(scheme.name for scheme in schemes)))
        raise _declined(settings, "config_groups", list(groups.values), f"they store weights as {names or 'nothing'}")
    return schemes[0]


def _group_scheme(group: Settings) -> WeightScheme:
    targets = group.texts("targets") or ()
    if targets != ("Linear",):
        raise _declined(group, "targets", list(targets), "only a group of all linear layers ('Linear') is supported")
    weights = group.part("weights")
    if weights is None:
        raise group.missing("weights", "it says how weights are stored")
    activations = group.part("input_activations")
    if activations is None:
        raise _declined(group, "input_activations", None, "products with e4m3 weights need e4m3 activations")
    if group.values.get("output_activations") is not None:
        raise _declined(group, "output_activations", group.values["output_activations"], "outputs are never quantized")
    for part, wanted in ((weights, {**E4M3_SETTINGS, "dynamic": (False, None)}), (activations, E4M3_SETTINGS)):
        for key, values in wanted.items():
            if part.values.get(key, values[0]) not in values:
                raise _declined(part, key, part.values[key], f"only {shown(values[0])} is supported")
    strategy = weights.text("strategy", "tensor")
    if strategy not in STRATEGIES:
        raise _declined(weights, "strategy", strategy, f"the supported ones are {', '.join(STRATEGIES)}")
    if strategy == "block" and weights.values.get("block_structure") not in ([128, 128], "128x128"):
        raise _declined(
            weights, "block_structure", weights.values.get("block_structure"), "only [128, 128] is supported"
        )
    return STRATEGIES[strategy]


def _understood(key: str) -> str:
    known = " or ".join(shown(known) for known in NEUTRAL.get(key, ()))
    return f"{known or 'nothing'} is supported there"


def _declined(settings: Settings, key: str, value: object, reason: str) -> UnsupportedModelError:
    file, key = settings.file, f"{settings.section}{key}"
    return UnsupportedModelError("weights.unsupported_setting", file=file, key=key, value=value, reason=reason)


MX_CODES, MX_SCALES = "_blocks", "_scales"
"""Suffixes that turn a module's name into those of its mxfp4 tensors."""


def mx_codes_name(tensor: str) -> str:
    """Return the name of a matrix's codes, given its name in a plain checkpoint."""
    return tensor.removesuffix(".weight") + MX_CODES


def code_rows(part: Part, scheme: WeightScheme, packs_rows: bool) -> Part:
    """Return a part as bytes of codes, never transposed.

    [..., N, K] is stored as [..., N, K / 32, 16] under a name of its own, or with `packs_rows` as [..., N, K / 2].
    """
    leading = (*part.shape[:-2], part.shape[-1]) if part.is_transposed else part.shape[:-1]
    columns = _divided(part.columns, scheme.codes_per_byte)
    if packs_rows:
        shape = (*leading, part.source_columns // scheme.codes_per_byte)
        return part._replace(shape=shape, columns=columns, is_transposed=False)
    num_blocks, block_bytes = part.source_columns // scheme.block_columns, scheme.block_columns // scheme.codes_per_byte
    shape, name = (*leading, num_blocks, block_bytes), mx_codes_name(part.tensor)
    return part._replace(tensor=name, shape=shape, columns=columns, is_transposed=False, joined_rows=num_blocks)


def _scale_name(tensor: str, ending: str) -> str:
    return (tensor.removesuffix(".weight") if ending.startswith(".") else tensor) + ending


def scale_parts(
    codes: Iterable[Part],
    stored: WeightScheme,
    settled: WeightScheme,
    endings: tuple[str, ...],
    entries: Mapping[str, TensorEntry],
) -> tuple[Part, ...]:
    """Return the parts that hold the scales of these codes, in row order; `settled` has the final row blocks."""
    found: list[Part] = []
    row = 0
    for part in codes:
        for scales in _scales_of(part, stored, settled, endings, entries):
            found.append(scales._replace(row_start=row))
            row += scales.num_rows
    return tuple(found)


def _scales_of(
    part: Part,
    stored: WeightScheme,
    settled: WeightScheme,
    endings: tuple[str, ...],
    entries: Mapping[str, TensorEntry],
) -> Iterator[Part]:
    if stored.codes_per_byte > 1 and part.tensor.endswith(MX_CODES):
        name = part.tensor.removesuffix(MX_CODES) + MX_SCALES
        columns = _divided(part.columns, part.shape[-1])
        yield part._replace(tensor=name, shape=part.shape[:-1], columns=columns, joined_rows=1)
        return
    names = [_scale_name(part.tensor, ending) for ending in endings]
    name = next((name for name in names if name in entries), names[0])
    if stored.codes_per_byte > 1:
        width = stored.block_columns // stored.codes_per_byte
        shape = (*part.shape[:-1], part.shape[-1] // width)
        yield part._replace(tensor=name, shape=shape, columns=_divided(part.columns, width))
        return
    if stored.block_columns:
        num_rows, num_columns = (
            -(-part.matrix_rows // stored.block_rows),
            -(-part.source_columns // stored.block_columns),
        )
        tail = (num_columns, num_rows) if part.is_transposed else (num_rows, num_columns)
        columns = _divided(part.columns, stored.block_columns)
        scales = Part(name, 0, (*part.shape[:-2], *tail), None, columns, part.is_transposed)
        yield from _runs(scales, part, stored.block_rows, settled.block_rows)
        return
    entry = entries.get(name)
    shapes = _row_scale_shapes(part)
    shape = entry.shape if entry is not None and entry.shape in shapes else next(iter(shapes))
    rows_each = shapes[shape]
    if len(shape) == 2 and shape == (*part.shape[:-2], part.matrix_rows):
        yield from _rows_of_matrices(Part(name, 0, shape, is_transposed=True), part)
        return
    scales = Part(name, 0, shape, is_transposed=part.is_transposed and rows_each == 1 and len(shape) > 1)
    if rows_each == 1:
        yield scales._replace(rows=part.rows, whole_rows=part.whole_rows)
    else:
        yield from _runs(scales, part, rows_each, 1)


def _row_scale_shapes(part: Part) -> dict[tuple[int, ...], int]:
    """Return the possible shapes of scales by row or by matrix, and the rows per scale of each."""
    leading, num_rows = part.shape[:-2], part.matrix_rows
    by_row = {(*leading, 1, num_rows) if part.is_transposed else (*leading, num_rows, 1): 1}
    if not leading:
        return {**by_row, (num_rows,): 1, (1,): num_rows, (): num_rows}
    count = prod(leading)
    return {**by_row, (*leading, num_rows): 1, (*leading, 1, 1): num_rows, (count, 1): num_rows, (count,): num_rows}


def _rows_of_matrices(scales: Part, codes: Part) -> Iterator[Part]:
    """Yield parts of scales [E, N] of E matrices, each row read as a column."""
    row, end = codes.row_range
    while row < end:
        matrix, place = divmod(row, codes.matrix_rows)
        next_row = min(end, row - place + codes.matrix_rows)
        yield scales._replace(rows=(place, place + next_row - row), columns=(matrix, matrix + 1))
        row = next_row


def _runs(scales: Part, codes: Part, rows_each: int, our_rows: int) -> Iterator[Part]:
    """Split blocks of `rows_each` rows into blocks of `our_rows`; yield runs of scales that repeat equally often.

    Each matrix begins with its own scale, so its last scale may cover fewer rows.
    """
    in_matrix = -(-codes.matrix_rows // rows_each)
    row, end = codes.row_range
    runs: list[tuple[int, int]] = []
    while row < end:
        matrix, place = divmod(row, codes.matrix_rows)
        next_row = min(end, row - place + min(codes.matrix_rows, (place // rows_each + 1) * rows_each))
        runs.append((matrix * in_matrix + place // rows_each, -(-(next_row - row) // our_rows)))
        row = next_row
    breaks = [index for index, (one, two) in enumerate(pairwise(runs), 1) if two != (one[0] + 1, one[1])]
    for start, stop in pairwise((0, *breaks, len(runs))):
        first, repeats = runs[start]
        yield scales._replace(rows=(first, first + stop - start), repeats=repeats)


def _divided(columns: tuple[int, int] | None, width: int) -> tuple[int, int] | None:
    return None if columns is None else (columns[0] // width, -(-columns[1] // width))


def dummy_source(parameters: Iterable[Parameter], dtype: str, stored: StoredSchemes | None) -> DummySource:
    """Make dummy weights; matrices that the settings declare quantized get codes and scales, as in files."""
    if stored is not None:
        stored.refuse_unread()
    plain: list[Parameter] = []
    planes: dict[str, DummyPlane] = {}
    for parameter in parameters:
        own = None if stored is None else stored.of(parameter.kind)
        codes = () if own is None else own.dummy_codes(parameter)
        if own is None or not codes:
            plain.append(parameter)
            continue
        for plane in _planes_of(codes, own):
            planes[plane.name] = plane
    return DummySource(plain, dtype, planes.values())


def _planes_of(codes: Iterable[Part], stored: StoredSchemes) -> Iterable[DummyPlane]:
    scheme = stored.scheme
    for part in {part.tensor: part for part in codes}.values():
        yield DummyPlane.codes(part.tensor, part.shape, scheme)
        num_inputs = part.source_columns * scheme.codes_per_byte
        # The first part has the name and the shape of all scales.
        entries = _single_scales(part, scheme, stored.scale_endings)
        scales = scale_parts((part,), scheme, scheme, stored.scale_endings, entries)[0]
        yield DummyPlane.scales(scales.tensor, scales.shape, scheme, num_inputs)


def _single_scales(part: Part, scheme: WeightScheme, endings: tuple[str, ...]) -> dict[str, TensorEntry]:
    """Return the 0-dimensional entry of a matrix's single scale; empty if the scheme has other scales."""
    if not scheme.is_whole_tensor:
        return {}
    leading = part.shape[:-2]
    name, shape = _scale_name(part.tensor, endings[0]), (*leading, 1, 1) if leading else ()
    return {name: TensorEntry(name, scheme.scale_dtype, shape, "dummy weights", 0)}


# Patterns of plain modules come from untrusted files, and a regular expression can be made to run forever. So a pattern
# may only have names, dots (each matches itself), ".*", groups of alternatives, and "^" and "$" at the ends.
MAX_WAYS = 64
"""Most alternatives that one pattern may expand to."""
_GROUP = re.compile(r"\((?:\?:)?([^()]*)\)(?![*+?{])")
_ANYTHING = re.compile(r"(?<!\\)\.\*")
_NAME = re.compile(r"(?:[\w.-]|\\\.)*")


def matches(pattern: str, module: str) -> bool:
    """Match a module: a name as consecutive components, an expression from the start of the module's name."""
    if not _is_expression(pattern):
        return f".{pattern}." in f".{module}."
    return any(way.match(module) for way in _ways(pattern) or ())


def is_followed(pattern: str) -> bool:
    """Return True if the pattern can be evaluated."""
    return not _is_expression(pattern) or _ways(pattern) is not None


def _is_expression(pattern: str) -> bool:
    """Return True after "re:", or with ".*", which no module's name has; transformers does the same."""
    return pattern.startswith(REGEX_PREFIX) or ".*" in pattern


@lru_cache(maxsize=256)
def _ways(pattern: str) -> tuple[re.Pattern[str], ...] | None:
    """Expand alternatives: return one expression for each, names with anything between them; None if unknown."""
    whole, ways = [pattern.removeprefix(REGEX_PREFIX)], []
    while whole:
        text = whole.pop()
        group = _GROUP.search(text)
        options = group[1].split("|") if group else text.split("|")
        if group or len(options) > 1:
            before, after = (text[: group.start()], text[group.end() :]) if group else ("", "")
            whole += [before + option + after for option in options]
        else:
            ways.append(_way(text))
        if len(whole) + len(ways) > MAX_WAYS or None in ways:
            return None
    return tuple(way for way in ways if way is not None)


def _way(text: str) -> re.Pattern[str] | None:
    text = text.removeprefix("^")
    pieces = _ANYTHING.split(text.removesuffix("$"))
    if not all(map(_NAME.fullmatch, pieces)):
        return None
    first, *others = (re.escape(piece.replace("\\.", ".")) for piece in pieces)
    # Atomic groups never backtrack, so a match takes linear time.
    middle = "".join(f"(?>.*?{name})" for name in others[:-1])
    last = f".*{others[-1]}" if others else ""
    return re.compile(f"{first}{middle}{last}" + (r"\Z" if text.endswith("$") else ""), re.DOTALL)

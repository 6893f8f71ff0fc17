"""Checkpoints that are quantized already: the planes that their tensors become, and what cannot be done with them; no torch.

quant_method          a matrix X.weight of N rows and K columns is stored as
fp8, in blocks        X.weight e4m3, X.weight_scale_inv [N / 128, K / 128]
fp8, fbgemm_fp8,      X.weight e4m3, X.weight_scale [N, 1], [N], [1] or a single number; X.input_scale is not needed,
compressed-tensors    because activations get scales of their own (compressed-tensors has blocks too)
mxfp4, experts        X_blocks [E, N, K / 32, 16] bytes of two codes, X_scales [E, N, K / 32]
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from holdfast.errors import ConfigError, ModelFormatError, UnsupportedModelError, shown
from holdfast.loading.planning.layout_choice import Choice, choose, turn_squares
from holdfast.loading.planning.module_patterns import is_followed, matches
from holdfast.loading.planning.scale_parts import mx_codes, mx_codes_name, scale_parts
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Kind, Parameter, Part
from holdfast.quant.weight_recipe import WeightRecipe
from holdfast.quant.weight_schemes import SCALE_SUFFIX, WeightScheme

UNNEEDED_ENDINGS = (".input_scale", ".input_scale_ub", ".input_scale_inv", ".activation_scale")
"""Tensors beside a stored matrix that say how activations were scaled when it was made."""


class StoredWeight(NamedTuple):
    """A weight whose planes come from the checkpoint as they are."""

    shape: tuple[int, ...]
    scheme: WeightScheme


@dataclass(frozen=True, slots=True)
class StoredPlanes:
    """Parameters with every stored weight replaced by its planes: NAME for its codes and NAME.scale for its scales."""

    parameters: tuple[Parameter, ...]
    weights: Mapping[str, StoredWeight]

    @property
    def scale_names(self) -> frozenset[str]:
        return frozenset(name + SCALE_SUFFIX for name in self.weights)


@dataclass(frozen=True, slots=True)
class StoredSchemes:
    """How a checkpoint stores matrices. Which of them it stores so, its headers say: those that have the type of codes."""

    scheme: WeightScheme
    scale_endings: tuple[str, ...] = ()
    """What follows the name of a matrix in the name of its scales; the first that is there counts."""
    ignore: tuple[str, ...] = ()
    """Modules that are left as they were: a name, the beginning or the end of one, or a pattern behind "re:"."""
    file: str = "config.json"

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Parameters that may be stored so. Of a head, rows need scales of their own."""
        if self.scheme.codes_per_byte > 1:
            return ("expert",)
        return ("linear", "expert") if self.scheme.block_columns else ("linear", "expert", "head")

    def leaves_alone(self, tensors: Iterable[str]) -> bool:
        """Whether the makers of the checkpoint left one of these out."""
        return any(matches(pattern, tensor.removesuffix(".weight")) for tensor in tensors for pattern in self.ignore)

    @property
    def unread_pattern(self) -> str | None:
        """A pattern of theirs that is not followed, so that nobody knows what they left out; None: all are."""
        return next((pattern for pattern in self.ignore if not is_followed(pattern)), None)

    def refuse_unread(self) -> None:
        """Without headers, nothing but the patterns says what was left out: all of them have to be followed."""
        if self.unread_pattern is not None:
            raise UnsupportedModelError(
                f"{self.file} leaves out {shown(self.unread_pattern)} of what is quantized",
                "such an expression is not followed here, and there are no weights whose headers would tell",
                "take the folder with its weights, or write the names of the modules in its place",
            )

    def used_by(self, entries: Mapping[str, TensorEntry]) -> "StoredSchemes | None":
        """Itself; None where no tensor has the type of codes: such a checkpoint is a plain one, whatever its settings say."""
        others = self.ignorable(entries)
        is_used = any(one.dtype == self.scheme.code_dtype for name, one in entries.items() if name not in others)
        return self if is_used else None

    def ignorable(self, names: Iterable[str]) -> frozenset[str]:
        """Those of the tensors that may stay unused."""
        return frozenset(name for name in names if name.endswith(UNNEEDED_ENDINGS))

    def planes(
        self, parameters: Iterable[Parameter], entries: Mapping[str, TensorEntry], recipe: WeightRecipe
    ) -> StoredPlanes:
        """The parameters as the checkpoint has them; quantizing once more what is quantized already is refused."""
        found: list[Parameter] = []
        weights: dict[str, StoredWeight] = {}
        for parameter in turn_squares(parameters, entries):
            choice = self._stored_codes(parameter, entries)
            if choice is None:
                found.append(parameter)
                continue
            if recipe.scheme is not None and recipe.scheme.name != self.scheme.name:
                raise ConfigError(
                    f"quantization={recipe.scheme.name} was asked",
                    f"{parameter.name} is stored as {self.scheme.name} already, as {self.file} says",
                    "leave quantization out, or use a checkpoint that is not quantized",
                )
            scheme = self._settled(parameter, choice.parts)
            weights[parameter.name] = StoredWeight(parameter.shape, scheme)
            codes = choice.parameter
            whole = None if codes.whole is None else replace(codes.whole, parts=choice.whole_parts, layouts=())
            found.append(replace(codes, parts=choice.parts, layouts=(), whole=whole))
            found.append(self._scales(parameter, scheme, choice, entries))
        return StoredPlanes(tuple(found), weights)

    def is_said_of(self, kind: str, tensors: Iterable[str]) -> bool:
        """Whether settings alone, without headers, say that such a parameter is stored so.

        It is all that can be, except what the makers left out, and the head, which most leave out unsaid.
        """
        return kind in self.kinds and kind != "head" and not self.leaves_alone(tensors)

    def made_up_codes(self, parameter: Parameter) -> tuple[Part, ...]:
        """What a checkpoint stores of a parameter as codes, as far as its settings say; nothing: it leaves it plain."""
        whole = parameter.whole or parameter
        if not self.is_said_of(whole.kind, (part.tensor for part in whole.parts)):
            return ()
        codes = self._codes(whole)
        if self.scheme.codes_per_byte == 1:
            return codes.parts
        # Such experts are stored as one tensor, where a family can have them so.
        return next((parts for parts in codes.layouts if len(parts[0].shape) > 3), codes.parts)

    def _stored_codes(self, parameter: Parameter, entries: Mapping[str, TensorEntry]) -> Choice | None:
        """The codes of a parameter and the parts that they come from; None for one that is not stored as codes."""
        if parameter.kind not in self.kinds or len(parameter.shape) < 2:
            self._refuse_codes(parameter, entries)
            return None
        if not self._has_codes(parameter, entries):  # then its shape may be any
            return None
        choice = choose(self._codes(parameter), entries)
        tensors = dict.fromkeys(part.tensor for part in choice.whole_parts)
        present = [entries[tensor] for tensor in tensors if tensor in entries]
        stored = [entry for entry in present if entry.dtype == self.scheme.code_dtype]
        if not stored:
            return None
        others = [entry for entry in present if entry.dtype != self.scheme.code_dtype]
        if others:
            raise UnsupportedModelError(
                f"{others[0].file}: {shown(others[0].name)} is stored as {others[0].dtype}",
                f"{parameter.name} is made of it and of {shown(stored[0].name)}, which is {self.scheme.code_dtype}",
                "use a checkpoint that stores both alike",
            )
        if self.leaves_alone(tensors):
            raise ModelFormatError(
                f"{stored[0].file}: {shown(stored[0].name)} is stored as {stored[0].dtype}",
                f"{self.file} says that it is not quantized",
                "use weights and settings of the same model",
            )
        return choice

    def _has_codes(self, parameter: Parameter, entries: Mapping[str, TensorEntry]) -> bool:
        """Whether a tensor is there that would hold codes of it, were it of their type."""
        name = mx_codes_name if self.scheme.codes_per_byte > 1 else str
        whole = parameter.whole or parameter
        return any(name(part.tensor) in entries for parts in (whole.parts, *whole.layouts) for part in parts)

    def _refuse_codes(self, parameter: Parameter, entries: Mapping[str, TensorEntry]) -> None:
        """A matrix that no product here takes in this scheme, such as a head in blocks, and is stored so all the same."""
        for part in (parameter.whole or parameter).parts:
            entry = entries.get(part.tensor)
            if entry is None or entry.dtype != self.scheme.code_dtype or self.scheme.codes_per_byte > 1:
                continue
            what = {"head": "a head", "embedding": "an embedding", "router": "a router"}.get(parameter.kind, "it")
            raise UnsupportedModelError(
                f"{entry.file}: {shown(entry.name)} is stored as {entry.dtype}",
                f"{what} in {self.scheme.name} is not read",
                "use a checkpoint that leaves it unquantized",
            )

    def _codes(self, parameter: Parameter) -> Parameter:
        whole = None if parameter.whole is None else self._codes(parameter.whole)
        if self.scheme.codes_per_byte == 1:
            return replace(parameter, dtype=self.scheme.code_dtype, whole=whole)
        if reason := self.scheme.unsupported(parameter.shape):
            raise _not_stored_so(parameter, self.scheme, reason)
        parts, *layouts = (
            tuple(mx_codes(part, self.scheme) for part in parts) for parts in (parameter.parts, *parameter.layouts)
        )
        shape = self.scheme.planes(parameter.shape)[0].shape
        return replace(
            parameter, shape=shape, parts=parts, layouts=tuple(layouts), dtype=self.scheme.code_dtype, whole=whole
        )

    def _settled(self, parameter: Parameter, parts: tuple[Part, ...]) -> WeightScheme:
        """Blocks of rows so low that each of ours lies in one of theirs; shares of columns are in whole blocks."""
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
        if scheme.block_columns == 0:  # a scale a row, however many matrices are stacked
            shape = (parameter.num_rows,)
        parts = scale_parts(codes.parts, self.scheme, scheme, self.scale_endings, entries)
        return Parameter(
            parameter.name + SCALE_SUFFIX, shape, parts, parameter.kind, dtype=scheme.scale_dtype, whole=whole
        )


def _not_stored_so(parameter: Parameter, scheme: WeightScheme, reason: str) -> UnsupportedModelError:
    fewer = "take fewer ranks, or use" if parameter.whole is not None else "use"
    return UnsupportedModelError(
        f"{parameter.name} {list(parameter.shape)} is stored as {scheme.name}",
        reason,
        f"{fewer} a checkpoint that is not quantized",
    )

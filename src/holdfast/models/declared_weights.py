"""Weights of a plan: how each is stored and its bytes, and checks of a quantization recipe against them; no torch."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from holdfast.errors import ConfigError, did_you_mean
from holdfast.memory.workspace_plan import aligned
from holdfast.models.packed_rows import PackedForm, Schemes, packed_form
from holdfast.models.parameters import Kind, Parameter
from holdfast.quant.formats import bytes_for
from holdfast.quant.weight_schemes import (
    HEAD_SCHEME,
    WEIGHT_SCHEMES,
    QuantizedEmbeddings,
    WeightRecipe,
    WeightScheme,
)


class Weight(NamedTuple):
    """One tensor that a rank holds."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    native: str | WeightScheme | None = None
    """The scheme in which the checkpoint stores it, by name or as a load settles it; None: unquantized."""
    dtype: str | None = None
    """Its own type; None: the dtype of the engine."""
    tensors: tuple[str, ...] = ()
    """The checkpoint tensors that it is made of, if known."""
    seam_rows: int = 0
    """A divisor of every row at which two of them meet; 0 if none do."""
    whole_name: str = ""
    """Its name in the whole model, if a stage numbers its layer differently; empty: `name`."""
    part_rows: tuple[int, ...] = ()
    """Rows of each of its parts (q, k, v; gate, up) in one matrix; empty if unknown."""
    packed: Schemes | str = ()
    """Schemes in which the checkpoint packs these parts, or why it cannot stay packed; empty: it is not packed."""

    @property
    def group(self) -> str:
        """The plan's table line that counts its bytes: layers together, experts apart."""
        first = self.name.partition(".")[0]
        return "experts" if self.kind == "expert" and first == "layers" else first

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a pattern may match, the same on every rank."""
        return (self.model_name, *self.tensors)

    @property
    def model_name(self) -> str:
        """Its name in the whole model."""
        return self.whole_name or self.name

    def scheme(self, recipe: WeightRecipe) -> WeightScheme | None:
        """Return how it is stored: as in the checkpoint, else as the recipe says; None if unquantized."""
        given = self.stored_scheme or recipe.scheme_for(self.kind, self.names)
        if given is None:
            return None
        # Each stacked matrix ends at the end of a block. A rank's matrices may be lower than the whole model's.
        return given.with_parts((self.seam_rows, self.shape[-2] if len(self.shape) > 2 else 0))

    def form(self, dtype: str, recipe: WeightRecipe) -> PackedForm | None:
        """Return how it is held if the checkpoint packs it; None if it does not."""
        if not self.packed:
            return None
        return packed_form(self.kind, self.shape, self.part_rows, self.packed, self.dtype or dtype, recipe)

    @property
    def stored_scheme(self) -> WeightScheme | None:
        """The scheme in which the checkpoint stores it; None: unquantized."""
        return WEIGHT_SCHEMES[self.native] if isinstance(self.native, str) else self.native


def weight_of(parameter: Parameter, native: str | None = None) -> Weight:
    """Return a parameter of a decoder that runs, or a rank's share of one, as a weight."""
    whole = parameter.whole or parameter
    return Weight(
        parameter.name,
        parameter.shape,
        parameter.kind,
        native,
        parameter.dtype,
        tuple(part.tensor for part in whole.parts),
        parameter.seam_rows,
        "" if whole.name == parameter.name else whole.name,
        _part_rows(parameter),
    )


def _part_rows(parameter: Parameter) -> tuple[int, ...]:
    """Return the rows of each part of the first matrix. An expert has two parts at most, so few are looked at."""
    if len(parameter.shape) < 2:
        return ()
    return tuple(part.num_rows for part in takewhile(lambda one: one.row_start < parameter.shape[-2], parameter.parts))


def weight_bytes(weight: Weight, dtype: str, recipe: WeightRecipe) -> int:
    """Return the bytes of a weight in an arena, scales included."""
    return _bytes(weight, dtype, weight.scheme(recipe), weight.form(dtype, recipe))


class WeightGroup(NamedTuple):
    """Weights that share one line of a plan."""

    num_tensors: int
    num_bytes: int
    """Bytes in an arena, scales included."""
    stored_as: tuple[str, ...]
    """Every scheme, then every type, in which some are stored; the most common one comes first."""


def weight_groups(weights: Iterable[Weight], dtype: str, recipe: WeightRecipe) -> dict[str, WeightGroup]:
    """Group weights: embed, layers, experts, lm_head and so on."""
    sizes: Counter[str] = Counter()
    kinds: dict[str, Counter[tuple[bool, str]]] = {}
    for weight in weights:
        scheme, form = weight.scheme(recipe), weight.form(dtype, recipe)
        sizes[weight.group] += _bytes(weight, dtype, scheme, form)
        kind = (True, weight.dtype or dtype) if scheme is None else (False, scheme.name)
        if form is not None and form.rows:
            kind = (False, " and ".join(dict.fromkeys(rows.scheme.title for rows in form.rows)))
        kinds.setdefault(weight.group, Counter())[kind] += 1
    groups: dict[str, WeightGroup] = {}
    for name, counts in kinds.items():
        ordered = sorted(counts, key=lambda kind: (kind[0], -counts[kind]))
        groups[name] = WeightGroup(counts.total(), sizes[name], tuple(stored_as for _, stored_as in ordered))
    return groups


def _bytes(weight: Weight, dtype: str, scheme: WeightScheme | None, form: PackedForm | None) -> int:
    if form is not None and form.rows:
        return sum(
            aligned(plane.num_bytes)
            for rows in form.rows
            for plane in rows.scheme.shaped((*weight.shape[:-2], rows.num_rows, weight.shape[-1]))
        )
    if scheme is None:
        return aligned(bytes_for(weight.dtype or dtype, weight.shape))
    return sum(aligned(plane.num_bytes) for plane in scheme.planes(weight.shape))


QUANTIZED_KINDS = ("linear", "expert", "head", "embedding")
"""Kinds of weights that a scheme may apply to."""
HEAD_NAMES = ("lm_head", "lm_head.weight")
"""Names of a head, which also apply if it is tied to the embedding."""
BEFORE = "take the model as it was before it was quantized"


class Review(NamedTuple):
    """The effect of a recipe on a model."""

    num_weights: int
    num_quantized: int
    idle: tuple[str, ...]
    """Patterns that match only weights that would not be quantized anyway."""


def review_recipe(weights: Iterable[Weight], recipe: WeightRecipe) -> Review:
    """Count what is quantized. Wrong shapes and patterns without a match raise."""
    weights = tuple(weights)
    assert recipe.scheme is not None, "a recipe without a scheme does nothing"
    eager = replace(recipe, ignore=())
    idle = tuple(pattern for pattern in recipe.ignore if not _quiets(pattern, weights, eager))
    num_quantized = 0
    for weight in weights:
        scheme = recipe.scheme_for(weight.kind, weight.names)
        if scheme is None:
            continue
        num_quantized += 1
        reason = scheme.unsupported(weight.shape)
        if reason is not None:
            raise _unsupported(recipe.scheme, weight, reason, ", or try int8")
    return Review(len(weights), num_quantized, idle)


def review_stored(weights: Iterable[Weight], given: WeightRecipe, open_weights: Collection[str]) -> WeightRecipe:
    """Return the recipe of a load from a quantized checkpoint: the given recipe applies to the weights that it left open.

    The others stay as they are stored, and a recipe that would change them raises.
    """
    settled: list[Weight] = []
    for weight in weights:
        if weight.stored_scheme is None and weight.name in open_weights:
            scheme = given.scheme_for(weight.kind, weight.names)
            if scheme is not None and (reason := scheme.unsupported(weight.shape)) is not None:
                raise _unsupported(scheme, weight, reason, ", or leave quantization out")
            weight = weight._replace(native=scheme)
        settled.append(weight)
    _refuse_stored_patterns(tuple(settled), given)
    _refuse_stored_embeddings(settled, given)
    recipe = stored_recipe(settled)
    assert recipe is not None, "a checkpoint that is quantized already has a recipe"
    return recipe


def _refuse_stored_patterns(weights: tuple[Weight, ...], given: WeightRecipe) -> None:
    """Refuse patterns over weights that are already stored as codes."""
    for pattern in given.ignore:
        alone = WeightRecipe(ignore=(pattern,))
        matched = [weight for weight in weights if alone.is_ignored(weight.names)]
        if not matched:
            raise _nothing_matches(pattern, weights)
        quantized = next((weight for weight in matched if weight.stored_scheme is not None), None)
        if quantized is not None and quantized.stored_scheme is not None:
            values = {"weight": quantized.name, "stored": quantized.stored_scheme.name, "other": BEFORE}
            raise ConfigError("quant.stored_weight", name="quantization_ignore", value=pattern, **values)


def _refuse_stored_embeddings(weights: Iterable[Weight], given: WeightRecipe) -> None:
    """Refuse a choice other than the default if the load does not give it."""
    for weight in weights:
        scheme, reason = weight.stored_scheme, ""
        if given.embeddings == "none" and weight.kind in ("head", "embedding") and scheme is not None:
            reason = f"{weight.name} is stored as {scheme.name} already"
        is_plain_embedding = weight.kind == "embedding" and scheme is None
        if given.embeddings == "all" and is_plain_embedding and not given.is_ignored(weight.names):
            reason = f"{weight.name} is stored unquantized beside weights that are quantized, and stays so"
        if reason:
            values = {"value": given.embeddings, "reason": reason, "other": BEFORE}
            raise ConfigError("quant.stored_embedding", name="quantized_embeddings", **values)


def stored_recipe(weights: Iterable[Weight]) -> WeightRecipe | None:
    """Return the recipe by which the checkpoint stores each kind of weight; None if none is quantized.

    If there are several schemes, the one that quantizes activations represents all, since it needs most memory. Without
    one, that of the layers does: head and embedding have their own.
    """
    weights = [weight for weight in weights if weight.kind in QUANTIZED_KINDS]
    schemes = [weight.stored_scheme for weight in weights if weight.stored_scheme is not None]
    if not schemes:
        return None
    layers = [one.stored_scheme for one in weights if one.stored_scheme and one.kind in ("linear", "expert")]
    first = next((scheme for scheme in schemes if scheme.quantizes_activations), (layers or schemes)[0])
    kinds = {weight.kind for weight in weights if weight.stored_scheme is not None}
    embeddings: QuantizedEmbeddings = "all" if "embedding" in kinds else "head" if "head" in kinds else "none"
    plain = tuple(weight.name for weight in weights if weight.stored_scheme is None)
    head = next((one.stored_scheme for one in weights if one.stored_scheme and one.kind == "head"), HEAD_SCHEME)
    experts = next((one.stored_scheme for one in weights if one.stored_scheme and one.kind == "expert"), first)
    own = None if experts.name == first.name else WEIGHT_SCHEMES.get(experts.name, experts)
    return WeightRecipe(WEIGHT_SCHEMES.get(first.name, first), embeddings, plain, head, own)


def _quiets(pattern: str, weights: tuple[Weight, ...], eager: WeightRecipe) -> bool:
    """Return True if a pattern keeps a weight from being quantized. A pattern without a match raises."""
    alone = replace(eager, ignore=(pattern,))
    matched = [weight for weight in weights if alone.is_ignored(weight.names)]
    if not matched:
        raise _nothing_matches(pattern, weights)
    return any(eager.scheme_for(weight.kind, weight.names) is not None for weight in matched)


def _nothing_matches(pattern: str, weights: tuple[Weight, ...]) -> ConfigError:
    names = tuple(dict.fromkeys(name for weight in weights for name in weight.names))
    is_tied = not any(weight.kind == "head" and weight.name in HEAD_NAMES for weight in weights)
    hint = did_you_mean(_module(pattern.strip("*?.")), map(_module, names), 0.5, "*{}*") or "Leave it out."
    if is_tied and WeightRecipe(ignore=(pattern,)).is_ignored(HEAD_NAMES):
        hint = "The head of this model is tied to its embedding: use quantized_embeddings=none instead."
    values = {"name": "quantization_ignore", "value": pattern, "count": len(names)}
    return ConfigError("quant.no_such_weight", **values).hinting(hint)


def _unsupported(scheme: WeightScheme, weight: Weight, reason: str, instead: str) -> ConfigError:
    values = {"weight": weight.name, "reason": reason, "pattern": _in_every_layer(weight.name), "instead": instead}
    return ConfigError("quant.unsupported_shape", name="quantization", value=scheme.name, **values)


def _in_every_layer(name: str) -> str:
    """Return the pattern of a weight in every layer."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _module(name: str) -> str:
    """Return the module of a weight: down_proj of model.layers.0.mlp.down_proj.weight."""
    parts = [part for part in name.split(".") if part not in ("weight", "bias") and not part.isdecimal()]
    return parts[-1] if parts else name

"""Which weights are quantized here: what was asked, held against the model and against what the device can multiply; no torch."""

from holdfast.config import EngineConfig
from holdfast.errors import ConfigError, shown
from holdfast.models.blueprints.blueprint import Blueprint
from holdfast.models.blueprints.blueprint_recipe import BEFORE
from holdfast.quant.weight_recipe import WeightRecipe
from holdfast.quant.weight_schemes import WEIGHT_SCHEMES
from holdfast.runner.planning.target import Target

CODED_PRODUCTS = (8, 9)
"""The compute capability from which on a GPU multiplies e4m3 by e4m3."""
Note = tuple[str, str, str]
"""A setting, what it became, and why."""


def choose_recipe(config: EngineConfig, model: Blueprint, target: Target) -> tuple[WeightRecipe, tuple[Note, ...]]:
    """The recipe of a load, and what is worth telling of it; what cannot be done raises."""
    recipe = config.recipe
    if model.stored_recipe is not None:
        return _as_stored(recipe, model.stored_recipe, model, target)
    if recipe.scheme is None:
        if recipe.embeddings == WeightRecipe().embeddings:
            return recipe, ()
        return recipe, (
            ("quantized_embeddings", recipe.embeddings, "asked, but nothing is quantized without quantization"),
        )
    declined = unsupported_scheme(recipe.scheme.name, target)
    if declined is not None:
        raise ConfigError(f"quantization={recipe.scheme.name} was asked", declined, f"try {_works_on(target)}")
    notes: list[Note] = []
    found = model.review_recipe(recipe)
    if found.num_quantized == 0:
        reason = "asked, but no weight is quantized: quantization_ignore covers them all"
    else:
        reason = f"asked: {found.num_quantized} of {found.num_weights} weights are quantized as they load"
    notes.append(("quantization", recipe.scheme.name, reason))
    for pattern in found.idle:
        notes.append(("quantization_ignore", pattern, "asked, but what it matches is never quantized"))
    return recipe, tuple(notes)


def _as_stored(
    asked: WeightRecipe, stored: WeightRecipe, model: Blueprint, target: Target
) -> tuple[WeightRecipe, tuple[Note, ...]]:
    """A checkpoint that is quantized already stays as it is; its own scheme, where that is asked, is for what it left plain."""
    assert stored.scheme is not None, f"{model.name} is stored in no scheme"
    declined = stored.scheme.codes_activations and _lacks_coded_products(target)
    if declined and model.not_runnable is None:
        raise ConfigError(
            f"{model.name} was asked, whose weights are stored in {stored.scheme.name}",
            _lack_words(target),
            f"take the unquantized checkpoint, with {_works_on(target)}",
        )
    if asked.scheme is not None and asked.scheme.name != stored.scheme.name:
        raise ConfigError(
            f"quantization={asked.scheme.name} was asked",
            f"{model.name} has its weights in {stored.scheme.name} already",
            f"leave quantization out to load it as it is, or {BEFORE}",
        )
    if asked.scheme is not None and model.unread_pattern is not None:
        raise ConfigError(
            f"quantization={asked.scheme.name} was asked",
            f"{model.name} leaves out {shown(model.unread_pattern)}, an expression that is not followed here",
            "leave quantization out to load it as it is: which of its plain weights must stay so is not known",
        )
    recipe = model.review_stored(asked)
    reason = "the checkpoint's own" if asked.scheme is None else "asked, and the checkpoint's own"
    num_more = len(stored.ignore) - len(recipe.ignore)
    if num_more:
        reason += f"; {num_more} of its plain weights {'is' if num_more == 1 else 'are'} quantized on load"
    return recipe, (("quantization", stored.scheme.name, reason),)


def unsupported_scheme(name: str, target: Target) -> str | None:
    """None, or why a device cannot run products of a scheme, in words. A CPU runs all of them, through their references."""
    if not WEIGHT_SCHEMES[name].codes_activations or not _lacks_coded_products(target):
        return None
    return _lack_words(target)


def _works_on(target: Target) -> str:
    return " or ".join(name for name in WEIGHT_SCHEMES if unsupported_scheme(name, target) is None)


def _lacks_coded_products(target: Target) -> bool:
    return target.kind == "cuda" and target.capability is not None and target.capability < CODED_PRODUCTS


def _lack_words(target: Target) -> str:
    assert target.capability is not None, f"{target.name} lacks nothing that is known"
    major, minor = target.capability
    return f"{target.name} has compute capability {major}.{minor}, and products in fp8 take 8.9"

"""The quantization_config of a config.json as a stored scheme; what is not understood is declined in words; no torch."""

from collections.abc import Mapping

from holdfast.errors import UnsupportedModelError, shown
from holdfast.loading.planning.stored_schemes import StoredSchemes
from holdfast.models.settings import Settings, listed
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK, FP8_TENSOR, MXFP4, WeightScheme

SECTION = "quantization_config."
FP8_METHOD, FBGEMM, COMPRESSED, MX = "fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4"
METHODS = (FP8_METHOD, FBGEMM, COMPRESSED, MX)
IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": ([128, 128],),
    "scale_fmt": ("float", "ue8m0"),
    "format": ("float-quantized", "naive-quantized"),
    "quantization_status": ("compressed", "frozen"),
    "kv_cache_scheme": (),
    "sparsity_config": ({},),
    "transform_config": ({},),
    "dequantize": (False,),
}
"""Keys with the values that are understood, or change nothing; null always does."""
WORDS = ("quant_method", "version", "global_compression_ratio", "activation_scale_ub", "config_groups", *IGNORE_KEYS)
"""Keys that are read elsewhere, or say nothing about how weights are stored."""
STRATEGIES: Mapping[str, WeightScheme] = {"channel": FP8, "tensor": FP8_TENSOR, "block": FP8_BLOCK}
"""What compressed-tensors calls the ways to scale a matrix."""
CODED: Mapping[str, tuple[object, ...]] = {"num_bits": (8,), "type": ("float",), "symmetric": (True,)}
"""What it says of weights and of activations that are e4m3."""
INVERSE, PLAIN = "_scale_inv", "_scale"


def read_stored_schemes(config: Mapping[str, object] | None, file: str = "config.json") -> StoredSchemes | None:
    """How a checkpoint with this quantization_config stores its matrices; None for one that does not quantize them."""
    if not config:
        return None
    settings = Settings(config, file, SECTION)
    method = settings.text("quant_method", "")
    if method not in METHODS:
        raise _declined(settings, "quant_method", method, f"checkpoints quantized by {', '.join(METHODS)} are read")
    for key, value in config.items():
        if key in WORDS or value is None:
            continue
        if key not in NEUTRAL or value not in NEUTRAL[key]:
            known = " or ".join(shown(known) for known in NEUTRAL.get(key, ()))
            raise _declined(settings, key, value, f"{known or 'nothing'} is understood there")
    ignore = tuple(pattern for key in IGNORE_KEYS for pattern in settings.texts(key) or ())
    scheme = _scheme(settings, method)
    if scheme is FP8_BLOCK:
        endings = (PLAIN, INVERSE) if method == COMPRESSED else (INVERSE, PLAIN)
    else:
        endings = () if scheme is MXFP4 else (PLAIN,)
    return StoredSchemes(scheme, endings, ignore, file)


def _scheme(settings: Settings, method: str) -> WeightScheme:
    if method == MX:
        return MXFP4
    if method == FBGEMM:
        return FP8
    if method == FP8_METHOD:
        return FP8_TENSOR if settings.values.get("weight_block_size") is None else FP8_BLOCK
    return _compressed_scheme(settings)


def _compressed_scheme(settings: Settings) -> WeightScheme:
    """The one scheme of all groups: e4m3 without zero points, for weights and activations of linear layers."""
    groups = settings.part("config_groups")
    if groups is None:
        raise settings.missing("config_groups", "it says how weights are stored")
    schemes: list[WeightScheme] = []
    for name in groups.values:
        group = groups.part(name)
        if group is None:
            continue
        schemes.append(_group_scheme(group))
    if len(set(schemes)) != 1:
        names = listed(list(dict.fromkeys(scheme.name for scheme in schemes)))
        raise _declined(settings, "config_groups", list(groups.values), f"they store weights as {names or 'nothing'}")
    return schemes[0]


def _group_scheme(group: Settings) -> WeightScheme:
    targets = group.texts("targets") or ()
    if targets != ("Linear",):
        raise _declined(group, "targets", list(targets), "a group of all linear layers ('Linear') is read")
    weights = group.part("weights")
    if weights is None:
        raise group.missing("weights", "it says how weights are stored")
    activations = group.part("input_activations")
    if activations is None:
        raise _declined(group, "input_activations", None, "products with e4m3 weights take activations as e4m3 too")
    if group.values.get("output_activations") is not None:
        raise _declined(group, "output_activations", group.values["output_activations"], "none are quantized here")
    for part, wanted in ((weights, {**CODED, "dynamic": (False, None)}), (activations, CODED)):
        for key, values in wanted.items():
            if part.values.get(key, values[0]) not in values:
                raise _declined(part, key, part.values[key], f"{shown(values[0])} is understood there")
    strategy = weights.text("strategy", "tensor")
    if strategy not in STRATEGIES:
        raise _declined(weights, "strategy", strategy, f"{', '.join(STRATEGIES)} are understood")
    if strategy == "block" and weights.values.get("block_structure") not in ([128, 128], "128x128"):
        raise _declined(weights, "block_structure", weights.values.get("block_structure"), "[128, 128] is understood")
    return STRATEGIES[strategy]


def _declined(settings: Settings, key: str, value: object, has: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{settings.file} says {settings.section}{key} = {shown(value)}",
        has,
        "use the model's checkpoint before it was quantized, and quantize it on load",
    )

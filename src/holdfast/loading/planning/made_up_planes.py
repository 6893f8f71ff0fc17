"""Made-up weights of a checkpoint that its settings call quantized: the codes and scales that its files would hold; no torch."""

from collections.abc import Iterable

from holdfast.loading.planning.scale_parts import scale_parts
from holdfast.loading.planning.stored_schemes import StoredSchemes
from holdfast.loading.sources.dummy import DummyPlane, DummySource
from holdfast.loading.sources.source import TensorEntry
from holdfast.models.parameters import Parameter, Part
from holdfast.quant.weight_schemes import WeightScheme


def make_up_source(parameters: Iterable[Parameter], dtype: str, stored: StoredSchemes | None) -> DummySource:
    """Weights in a type, but for the matrices that are stored otherwise."""
    if stored is not None:
        stored.refuse_unread()
    plain: list[Parameter] = []
    planes: dict[str, DummyPlane] = {}
    for parameter in parameters:
        codes = () if stored is None else stored.made_up_codes(parameter)
        if stored is None or not codes:
            plain.append(parameter)
            continue
        for plane in _planes_of(codes, stored):
            planes[plane.name] = plane
    return DummySource(plain, dtype, planes.values())


def _planes_of(codes: Iterable[Part], stored: StoredSchemes) -> Iterable[DummyPlane]:
    """Of every tensor that codes come from: itself, and its scales."""
    scheme = stored.scheme
    for part in {part.tensor: part for part in codes}.values():
        yield DummyPlane.codes(part.tensor, part.shape, scheme)
        num_inputs = part.source_columns * scheme.codes_per_byte
        # Which rows a scale is for is no matter here: one part tells the name and the shape of them all.
        entries = _single_scales(part, scheme, stored.scale_endings)
        scales = scale_parts((part,), scheme, scheme, stored.scale_endings, entries)[0]
        yield DummyPlane.scales(scales.tensor, scales.shape, scheme, num_inputs)


def _single_scales(part: Part, scheme: WeightScheme, endings: tuple[str, ...]) -> dict[str, TensorEntry]:
    """The header of a scale that stands for a whole matrix, where a scheme has one; it is a number without dimensions."""
    if not scheme.is_whole_tensor:
        return {}
    leading = part.shape[:-2]
    name, shape = part.tensor + endings[0], (*leading, 1, 1) if leading else ()
    return {name: TensorEntry(name, scheme.scale_dtype, shape, "dummy weights", 0)}

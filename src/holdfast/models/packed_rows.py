"""Which weights stay packed, and as which parts: the one decision that plan, load and products share; no torch."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.kernels.packed_kernels import arranged, has_kernel, has_tiles
from holdfast.quant.packed_schemes import PackedRows, PackedScheme, join_rows, plain_scheme
from holdfast.quant.weight_schemes import WeightRecipe

PACKED_KINDS = ("linear", "expert", "head", "embedding")
"""Kinds of weights that products and row lookups take packed; all others are expanded."""
QUANTIZED_NAMES = ("int8", "mxfp4")
"""Families with the planes of a weight scheme (quant/packed_weight.py), which has kernels of its own."""
Schemes = tuple[PackedScheme | None, ...]
"""The scheme of each part of a weight (q, k, v; gate, up), the parts of one matrix; None: stored plain."""


class PackedForm(NamedTuple):
    """How a weight that a checkpoint packs is held."""

    rows: tuple[PackedRows, ...]
    """Empty if it is expanded."""
    reason: str = ""
    """Why it is expanded."""
    num_columns: int = 0


def packed_form(
    kind: str,
    shape: tuple[int, ...],
    part_rows: Sequence[int],
    schemes: Schemes | str,
    dtype: str,
    recipe: WeightRecipe,
) -> PackedForm | None:
    """Return how a weight is held, or a rank's share of `shape`; None if no part of it is packed.

    `part_rows` are the share's rows of each part in one matrix; `schemes` says why if a weight cannot stay packed.
    """
    if not any(schemes):
        return None
    if reason := _expanded_because(kind, recipe):
        return PackedForm((), reason)
    if isinstance(schemes, str):
        return PackedForm((), schemes)
    assert len(part_rows) == len(schemes), f"{part_rows} rows of {len(schemes)} parts"
    assert sum(part_rows) == shape[-2], f"{part_rows} rows of {shape}"
    device, plain = recipe.packed.device_kind, plain_scheme(dtype)
    held = [
        plain if scheme is None else arranged(scheme, num_rows, device)
        for scheme, num_rows in zip(schemes, part_rows, strict=True)
    ]
    parts = join_rows(zip(part_rows, held, strict=True))
    without = next((one.scheme for one in parts if not is_fast(kind, one.scheme, device, len(parts), shape[-1])), None)
    if recipe.packed.keeps == "with_kernel" and without is not None:
        return PackedForm((), f"no kernel on {device} takes {without.title} yet")
    return PackedForm(parts, num_columns=shape[-1])


def is_fast(kind: str, scheme: PackedScheme, device_kind: str, num_parts: int, num_columns: int) -> bool:
    """Return True if a kernel takes such a part, or none is needed: for plain rows, and for rows that are looked up.

    Experts on a GPU have tiles alone, and all their rows are packed alike.
    """
    if kind == "expert" and device_kind == "cuda":
        is_quantized = scheme.family in QUANTIZED_NAMES
        return num_parts == 1 and (is_quantized or has_tiles(scheme, num_columns))
    if kind in ("embedding", "head") and scheme.family == "mxfp4":
        return False  # a lookup needs scales by row
    is_lookup = kind == "embedding" and device_kind == "cpu"
    return is_lookup or scheme.family == "plain" or has_kernel(scheme, device_kind)


def _expanded_because(kind: str, recipe: WeightRecipe) -> str:
    if recipe.scheme is not None:
        return f"quantized again, to {recipe.scheme.name}"
    if recipe.packed.keeps == "none":
        return "packed_weights=expanded"
    if kind not in PACKED_KINDS:
        return f"weights of the kind {kind} are multiplied in the type of activations"
    return ""


def cut_group(rows: Sequence[PackedRows], num_columns: int, whole_columns: int) -> str | None:
    """Return why a rank's columns cut a group that shares a scale; None if they do not."""
    if num_columns == whole_columns:
        return None
    return next((why for one in rows if (why := one.scheme.unsupported(num_columns)) is not None), None)


class PackedAccount(NamedTuple):
    """What a recipe does to the weights that a checkpoint packs."""

    num_kept: int
    num_expanded: int
    reasons: tuple[str, ...]
    """Why some are expanded, the most frequent reason first."""
    by_reference: tuple[str, ...]
    """Names of schemes that are kept and have no kernel on the device."""
    takes_int8: bool = False
    """True if some are held in tiles, whose products take 8-bit activations."""

    @property
    def summary(self) -> str:
        """One sentence for the plan."""
        num_all = self.num_kept + self.num_expanded
        parts = [f"{self.num_kept} of {num_all} packed weights stay as stored"]
        if self.by_reference:
            parts.append(f"no kernel takes {' or '.join(self.by_reference)} yet, so pieces of rows are dequantized")
        if self.num_expanded:
            parts.append(f"{self.num_expanded} are expanded ({'; '.join(self.reasons)})")
        return "; ".join(parts)


def account_for(held: Sequence[tuple[str, PackedForm]], recipe: WeightRecipe) -> PackedAccount:
    """Sum up the forms of all packed weights, each with its kind."""
    forms, device = [form for _, form in held], recipe.packed.device_kind
    reasons = Counter(form.reason for form in forms if not form.rows)
    slow = (
        rows.scheme
        for kind, form in held
        for rows in form.rows
        if not is_fast(kind, rows.scheme, device, len(form.rows), form.num_columns)
    )
    titles = tuple(dict.fromkeys(scheme.title for scheme in slow))
    kept = sum(bool(form.rows) for form in forms)
    takes_int8 = any(rows.scheme.row_group > 1 for form in forms for rows in form.rows)
    most_common = tuple(reason for reason, _ in reasons.most_common())
    return PackedAccount(kept, len(forms) - kept, most_common, titles, takes_int8)

"""Whether products on this device give a row the same bits in any company: asked of every shape of weight at the start."""

from collections.abc import Iterable

import torch

from holdfast.errors import ConfigError
from holdfast.kernels.products.linear import linear
from holdfast.quant.quantized_weight import QuantizedWeight

COMPANIES = (24, 64, 200)
"""Rows of other products, of which the first are those of the smallest."""


def refuse_variant_products(weights: Iterable[torch.Tensor | QuantizedWeight], least_rows: int, most_rows: int) -> None:
    """Raise if a row of `least_rows` rows is multiplied otherwise among more rows, for any shape of matrix among the weights."""
    seen: set[tuple[int, ...]] = set()
    for weight_NK in weights:
        assert not isinstance(weight_NK, QuantizedWeight), (
            "quantized weights were to be declined before they were loaded"
        )
        if weight_NK.dim() != 2 or tuple(weight_NK.shape) in seen:
            continue
        seen.add(tuple(weight_NK.shape))
        generator = torch.Generator(weight_NK.device).manual_seed(0)
        rows = max(least_rows, min(most_rows, max(COMPANIES)))
        x_TK = torch.randn(rows, weight_NK.shape[1], generator=generator, device=weight_NK.device).to(weight_NK.dtype)
        alone_TN = linear(x_TK[:least_rows], weight_NK, None)
        for num_rows in (*(count for count in COMPANIES if least_rows <= count <= rows), rows):
            if not torch.equal(linear(x_TK[:num_rows], weight_NK, None)[:least_rows], alone_TN):
                raise ConfigError(
                    "batch_invariant=True was asked",
                    f"cuBLAS multiplies {least_rows} and {num_rows} rows by a weight of {list(weight_NK.shape)} differently",
                    "start the engine before anything else uses the GPU in this process, or leave it out",
                )

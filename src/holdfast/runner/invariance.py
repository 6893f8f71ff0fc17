"""Row counts that cuBLAS multiplies alike: compared at the start; steps are padded to them for batch invariance.

T rows, K inputs, N outputs

Exact ranks of compressed attention have no batch_invariant and pad nothing: `refuse_unequal_shares` compares a share
with the whole weight at every number of rows that a step can have.

With batch_invariant a row gives the same bits in any batch, and on exact ranks by a share of a weight as by the whole.
cuBLAS chooses kernels by shape and does not document their order of summation. So steps have few row counts
(planning/exactness.py, `row_sizes`). A start multiplies with each count and drops those whose bits differ from the
largest; a step is padded to the next one left. Each rank compares its own shares, and all take the counts that every
rank has left, because rows go from stage to stage in one size.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from holdfast.errors import ConfigError
from holdfast.kernels.gemm.linear import grouped_linear, linear, linear_float32
from holdfast.models.sharding import GROUP_NAME
from holdfast.observability.log import get_logger
from holdfast.planning.exactness import row_sizes
from holdfast.planning.plan import RunnerPlan
from holdfast.planning.terms import PROMPT_ROWS
from holdfast.quant.packed_weight import AnyWeight
from holdfast.quant.quantized_weight import QuantizedWeight

log = get_logger(__name__)

HEADS = ("lm_head.weight", "embed.weight")
LOOKED_UP = "positions.weight"
"""Looked up, never multiplied; so is the embedding if it is not the head."""


class Product(NamedTuple):
    """A product by a weight, or by a rank's share of its rows."""

    name: str
    size_n: int
    all_n: int
    """Rows of the whole weight if a share must match it; else `size_n`."""
    size_k: int
    has_bias: bool
    is_head: bool
    """Logits are float32, and only of wanted rows."""
    group_rows: int = 0
    """Rows of each group of heads, if every group has inputs of its own; 0: all rows have the same inputs."""

    def __str__(self) -> str:
        rows = f"{self.size_n}" if self.size_n == self.all_n else f"{self.size_n} of the {self.all_n}"
        return f"{rows} rows of {self.name}"

    def multiply(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """Multiply as a step does."""
        if self.group_rows:
            weight_GNK = weight_NK.unflatten(0, (-1, self.group_rows))
            return grouped_linear(x_TK, weight_GNK, x_TK.new_empty(len(x_TK), len(weight_NK)))
        if not self.is_head:
            return linear(x_TK, weight_NK, bias_N)
        return linear_float32(x_TK, weight_NK, x_TK.new_empty(len(x_TK), len(weight_NK), dtype=torch.float32))

    def alike(self, sizes: Sequence[int], most_rows: int, dtype: torch.dtype, device: torch.device) -> set[int]:
        """Return the row counts that give each row the same bits as `most_rows` rows times the whole weight.

        Tested on random numbers. A share is tested at its first and last place in the whole.
        """
        made = {"device": device, "dtype": dtype, "generator": torch.Generator(device).manual_seed(0)}
        weight_NK, x_TK = torch.randn(self.all_n, self.size_k, **made), torch.randn(most_rows, self.size_k, **made)
        bias_N = torch.randn(self.all_n, **made) if self.has_bias else None
        y_TN, found = self.multiply(x_TK, weight_NK, bias_N), set(sizes)
        for start in {0, self.all_n - self.size_n}:
            part = slice(start, start + self.size_n)
            own_bias_N = None if bias_N is None else bias_N[part]
            for size in sorted(found):
                own_TN = self.multiply(x_TK[:size], weight_NK[part], own_bias_N)
                if not torch.equal(own_TN, y_TN[:size, part]):
                    found.remove(size)
        return found

    def first_unequal(self, most_rows: int, dtype: torch.dtype, device: torch.device) -> int | None:
        """Return the first number of rows at which a share gives other bits than the whole weight; None: up to `most_rows` none does.

        Tested on random numbers, at the share's first and last place.
        """
        made = {"device": device, "dtype": dtype, "generator": torch.Generator(device).manual_seed(0)}
        unit, width = self.group_rows or self.all_n, self.size_k
        weight_NK = torch.randn(self.all_n, width, **made)
        x_TX = torch.randn(most_rows, width * (self.all_n // unit), **made)
        for size in range(1, most_rows + 1):
            y_TN = self.multiply(x_TX[:size], weight_NK, None)
            for start in {0, self.all_n - self.size_n}:
                end, columns = start + self.size_n, slice(None)
                if self.group_rows:
                    columns = slice(start // unit * width, end // unit * width)
                own_TN = self.multiply(x_TX[:size, columns].contiguous(), weight_NK[start:end], None)
                if not torch.equal(own_TN, y_TN[:, start:end]):
                    return size
        return None


def products(
    shares: Mapping[str, tuple[int, ...]],
    whole: Mapping[str, tuple[int, ...]],
    *,
    is_exact: bool,
    group_rows: int = 0,
) -> tuple[Product, ...]:
    """List one product for every shape among a rank's weights; if `is_exact`, a share must match the whole.

    Groups of heads have `group_rows` rows each.
    """
    found: dict[tuple[int | bool, ...], Product] = {}
    has_head = "lm_head.weight" in whole
    for name, shape in shares.items():
        is_looked_up = name == LOOKED_UP or (has_head and name == "embed.weight")
        if len(shape) != 2 or not name.endswith(".weight") or is_looked_up:
            continue
        (size_n, size_k), own = shape, whole.get(name, shape)
        all_n = own[0] if is_exact and own[1] == size_k else size_n
        has_bias = f"{name.removesuffix('.weight')}.bias" in shares
        of_group = group_rows if name.endswith(GROUP_NAME) else 0
        product = Product(name, size_n, all_n, size_k, has_bias, name in HEADS, of_group)
        found.setdefault(product[1:], product)
    return tuple(found.values())


def compared_sizes(
    plan: RunnerPlan,
    shares: Mapping[str, tuple[int, ...]],
    whole: Mapping[str, tuple[int, ...]],
    device: torch.device,
    on_compared: Callable[[int, int], None],
) -> tuple[int, ...]:
    """Return the row counts of a plan's steps that this device multiplies alike by weights of these shapes."""
    limits = plan.resolved.limits
    most_rows, most_logits = limits.max_num_batched_tokens, max(limits.sampled_rows, PROMPT_ROWS)
    sizes = invariant_sizes(
        products(shares, whole, is_exact=plan.mesh.is_exact),
        row_sizes(most_rows, most_logits),
        min(most_rows, most_logits),
        plan.resolved.dtype,
        device,
        on_compared,
    )
    torch.cuda.empty_cache()
    return sizes


def refuse_unequal_shares(
    plan: RunnerPlan,
    shares: Mapping[str, tuple[int, ...]],
    whole: Mapping[str, tuple[int, ...]],
    device: torch.device,
    on_compared: Callable[[int, int], None],
) -> None:
    """Raise if this device multiplies by an unquantized share otherwise than by the whole weight, at any number of rows.

    Quantized shares take the form of the whole weight (`multiply_like_whole`).
    """
    limits, compressed = plan.resolved.limits, plan.declared.spec and plan.declared.spec.compressed
    assert compressed is not None, f"{plan.declared.name} does not compress"
    found = products(shares, whole, is_exact=True, group_rows=compressed.output_rank)
    listed = [product for product in found if product.size_n != product.all_n]
    for num_done, product in enumerate(listed):
        on_compared(num_done, len(listed))
        most_rows = limits.max_num_batched_tokens
        if product.is_head:
            most_rows = min(most_rows, max(limits.sampled_rows, PROMPT_ROWS))
        size = product.first_unequal(most_rows, getattr(torch, plan.resolved.dtype), device)
        if size is not None:
            raise ConfigError("runner.shares_round_differently", num_rows=size, product=product)
    on_compared(len(listed), len(listed))
    torch.cuda.empty_cache()


def multiply_like_whole(weights: MutableMapping[str, AnyWeight], whole: Mapping[str, tuple[int, ...]]) -> None:
    """Let kernels choose the forms of quantized shares by the rows of the whole weights."""
    for name, weight in weights.items():
        if isinstance(weight, QuantizedWeight) and weight.shape != whole.get(name, weight.shape):
            *_, num_rows, _ = whole[name]
            weights[name] = replace(weight, whole_rows=num_rows)


def invariant_sizes(
    compared_products: Sequence[Product],
    sizes: Sequence[int],
    most_logits: int,
    dtype: str,
    device: torch.device,
    on_compared: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, ...]:
    """Return the `sizes` at which all products are alike; raise if the last, or `most_logits`, is not.

    The head multiplies at most `most_logits` rows, which is one of `sizes`. `on_compared` counts products.
    """
    left, most_rows = set(sizes), sizes[-1]
    assert most_logits in left, f"{most_logits=} is none of {sizes}"
    for num_done, product in enumerate(compared_products):
        on_compared(num_done, len(compared_products))
        most = most_logits if product.is_head else most_rows
        compared = [size for size in sizes if size <= most]
        alike = product.alike(compared, most, getattr(torch, dtype), device)
        if most not in alike:
            raise ConfigError("runner.shares_round_differently", num_rows=most, product=product)
        if most_logits not in alike:
            raise ConfigError("runner.rows_round_differently", num_rows=most_logits, product=product, most=most)
        different = left.intersection(compared) - alike
        if different:
            skipped = ", ".join(map(str, sorted(different)))
            log.info("skipping step sizes %s: cuBLAS rounds %s differently there (batch_invariant)", skipped, product)
        left -= different
    on_compared(len(compared_products), len(compared_products))
    return tuple(size for size in sizes if size in left)


def padded_rows(num_rows: int, sizes: Sequence[int]) -> int:
    """Return the least step size of at least `num_rows`; `num_rows` if there are no sizes."""
    return sizes[bisect_left(sizes, num_rows)] if sizes else num_rows


def common_sizes(of_ranks: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the sizes that all ranks have; empty if no rank pads its steps."""
    first, *others = of_ranks
    return tuple(size for size in first if all(size in other for other in others))

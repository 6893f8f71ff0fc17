"""Numbers of rows that cuBLAS multiplies alike: a start compares them, and steps are padded to them where batches or ranks are to change nothing.

T rows, K inputs, N outputs

With batch_invariant a row must be multiplied the same way in any company, and on exact ranks by a share of a weight as by all of
it. cuBLAS chooses kernels by shape, and nobody says which of them add up in one order. So steps have few numbers of rows
(planning/exactness.py, `row_sizes`). A start multiplies by each of them; those whose bits are not those of the most rows are left
out, and a step is padded to the next. Of several ranks each compares its own shares, and all take what is left on every one:
rows go from stage to stage in one size.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast.errors import ConfigError
from holdfast.kernels.gemm.linear import linear, linear_float32
from holdfast.observability.log import get_logger

log = get_logger(__name__)

HEADS = ("lm_head.weight", "embed.weight")
LOOKED_UP = "positions.weight"
"""As the embedding is where it is not the head: rows of it are taken, and nothing is multiplied."""


class Product(NamedTuple):
    """A product by a weight, or by a rank's share of its rows."""

    name: str
    size_n: int
    all_n: int
    """Rows of the whole weight, where a share is to give what all of it gives; else its own."""
    size_k: int
    has_bias: bool
    is_head: bool
    """Logits are float32, of rows that are wanted alone."""

    def __str__(self) -> str:
        rows = f"{self.size_n}" if self.size_n == self.all_n else f"{self.size_n} of the {self.all_n}"
        return f"{rows} rows of {self.name}"

    def multiply(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        """As a step does."""
        if not self.is_head:
            return linear(x_TK, weight_NK, bias_N)
        return linear_float32(x_TK, weight_NK, x_TK.new_empty(len(x_TK), len(weight_NK), dtype=torch.float32))

    def alike(self, sizes: Sequence[int], most_rows: int, dtype: torch.dtype, device: torch.device) -> set[int]:
        """Of these numbers of rows those by which every row comes out as it does among `most_rows` by the whole weight.

        Random numbers stand for all. Of a share the first and the last place in the whole are asked.
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


def products(
    shares: Mapping[str, tuple[int, ...]], whole: Mapping[str, tuple[int, ...]], *, is_exact: bool
) -> tuple[Product, ...]:
    """One of every shape among a rank's weights, by name; `is_exact`: a share is to give what the whole gives."""
    found: dict[tuple[int | bool, ...], Product] = {}
    has_head = "lm_head.weight" in whole
    for name, shape in shares.items():
        is_looked_up = name == LOOKED_UP or (has_head and name == "embed.weight")
        if len(shape) != 2 or not name.endswith(".weight") or is_looked_up:
            continue
        (size_n, size_k), own = shape, whole.get(name, shape)
        all_n = own[0] if is_exact and own[1] == size_k else size_n
        has_bias = f"{name.removesuffix('.weight')}.bias" in shares
        product = Product(name, size_n, all_n, size_k, has_bias, name in HEADS)
        found.setdefault(product[1:], product)
    return tuple(found.values())


def invariant_sizes(
    asked: Sequence[Product],
    sizes: Sequence[int],
    most_logits: int,
    dtype: str,
    device: torch.device,
    on_compared: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, ...]:
    """Of `sizes` those that all products are alike in; the last of them, and `most_logits`, are, or this raises.

    `most_logits` is one of them too: the head is multiplied by no more rows. `on_compared` counts products.
    """
    left, most_rows = set(sizes), sizes[-1]
    assert most_logits in left, f"{most_logits=} is none of {sizes}"
    for num_done, product in enumerate(asked):
        on_compared(num_done, len(asked))
        most = most_logits if product.is_head else most_rows
        compared = [size for size in sizes if size <= most]
        alike = product.alike(compared, most, getattr(torch, dtype), device)
        if most not in alike:
            raise ConfigError(
                "tensor_parallel_sums=exact was asked",
                f"cuBLAS multiplies {most} rows by {product} differently than by all",
                "take fewer ranks, or tensor_parallel_sums=reduce",
            )
        if most_logits not in alike:
            raise ConfigError(
                "batch_invariant=True was asked",
                f"cuBLAS multiplies {most_logits} rows, as many as are chosen from at once, by {product} differently than {most}",
                "start the engine before anything else uses the GPU in this process, take another max_num_seqs, or leave it out",
            )
        different = left.intersection(compared) - alike
        if different:
            words = ", ".join(map(str, sorted(different)))
            log.info("no step has %s rows because cuBLAS multiplies so many by %s differently", words, product)
        left -= different
    on_compared(len(asked), len(asked))
    return tuple(size for size in sizes if size in left)


def padded_rows(num_rows: int, sizes: Sequence[int]) -> int:
    """The least size of steps that takes so many; where there are no sizes, any number will do."""
    return sizes[bisect_left(sizes, num_rows)] if sizes else num_rows


def common_sizes(of_ranks: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """What every rank has left; nothing where no rank pads its steps."""
    first, *others = of_ranks
    return tuple(size for size in first if all(size in other for other in others))

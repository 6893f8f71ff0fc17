"""What is compiled before a runner is ready: the numbers of rows whose steps take, together, every form of every kernel.

A form is what Triton compiles a kernel for. Weights, formats and the model decide most of it, and any step shows that much.
What follows from the number of rows every launcher says of itself in `row_form`, and takes it from there when it launches;
numbers that are mere arguments, such as rows, are marked as counts (`jit_counting`), and change nothing.
"""

from collections.abc import Hashable

from holdfast.kernels.experts import expert_blocks, sum_experts
from holdfast.kernels.pages import coded_attention, tiled_attention
from holdfast.kernels.products import skinny_parts, tile_linear
from holdfast.models.spec import ExpertsSpec

LAUNCHERS = (tiled_attention, coded_attention, skinny_parts, tile_linear, sum_experts)
"""Those whose form follows from the number of rows alone, whether or not the model has a use for them."""


def step_form(num_rows: int, experts: ExpertsSpec | None) -> tuple[Hashable, ...]:
    """All that a step of so many rows decides about the kernels it launches."""
    forms: tuple[Hashable, ...] = tuple(launcher.row_form(num_rows) for launcher in LAUNCHERS)
    if experts is None:
        return forms
    return *forms, expert_blocks.row_form(num_rows, experts.top_k, experts.num_experts)


def warm_rows(least: int, most: int, experts: ExpertsSpec | None) -> tuple[int, ...]:
    """The fewest rows of each form among steps of `least` to `most` rows."""
    first: dict[tuple[Hashable, ...], int] = {}
    for num_rows in range(least, most + 1):
        first.setdefault(step_form(num_rows, experts), num_rows)
    return tuple(first.values())

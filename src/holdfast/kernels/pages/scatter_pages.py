"""Single entries of the page table, written from a list.

U entries of the list, each (place in the flat table, page id); N rows of P pages
"""

import torch

from holdfast.kernels.triton_compat import can_run, constexpr, jit, tl

PADDING = -1
"""The place of an entry that is skipped."""
BLOCK = 16
"""Entries of one program. A list comes in whole blocks: as an argument its length would be compiled for in several ways."""


def scatter_pages(updates_U2: torch.Tensor, table_NP: torch.Tensor) -> None:
    """table.flat[place] = page for each entry; no place may occur twice."""
    if can_run(table_NP):
        scatter_pages_triton(updates_U2, table_NP)
    else:
        scatter_pages_reference(updates_U2, table_NP)


def scatter_pages_reference(updates_U2: torch.Tensor, table_NP: torch.Tensor) -> None:
    """The same in plain torch."""
    places_U, pages_U = updates_U2[updates_U2[:, 0] != PADDING].unbind(1)
    table_NP.view(-1)[places_U] = pages_U.to(table_NP.dtype)


def scatter_pages_triton(updates_U2: torch.Tensor, table_NP: torch.Tensor) -> None:
    """The same as a Triton kernel, a program a block of the list."""
    num_updates = updates_U2.shape[0]
    assert num_updates % BLOCK == 0, f"{num_updates=} is not a multiple of {BLOCK=}"
    assert updates_U2.is_contiguous(), f"{updates_U2.stride()=} is not dense"
    assert table_NP.is_contiguous(), f"{table_NP.stride()=} is not dense"
    if num_updates:
        _scatter_pages_kernel[(num_updates // BLOCK,)](updates_U2, table_NP, PADDING=PADDING, BLOCK=BLOCK, num_warps=1)


@jit
def _scatter_pages_kernel(p_updates, p_table, PADDING: constexpr, BLOCK: constexpr):  # noqa: ANN001, ANN202 pointers have no types
    i_block = tl.program_id(0).to(tl.int64)
    o_update = i_block * BLOCK + tl.arange(0, BLOCK)
    b_place = tl.load(p_updates + 2 * o_update)
    b_page = tl.load(p_updates + 2 * o_update + 1)
    tl.store(p_table + b_place, b_page.to(p_table.dtype.element_ty), mask=b_place != PADDING)

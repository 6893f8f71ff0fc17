"""Long contexts without prefill: pages of finite random rows that the prefix cache finds for prompts.

The time of a decode step over a long context does not depend on the rows' values if they are finite. Computing 64 prompts
of 128 thousand tokens would take longer than the measurements after them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from holdfast.cache.groups import HOLE, by_position
from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes, store_latents

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

    from holdfast.engine.admission import TokensPrompt
    from holdfast.engine.scheduler import Scheduler

NUM_ROWS = 8192
"""Number of distinct rows; all others are copies of them."""


def lend_contexts(opened: "OpenEngine", prompts: Sequence["TokensPrompt"]) -> None:
    """Add all whole blocks before the last token of these prompts to the prefix cache. The model must use latents."""
    fill_pages(opened)
    lend_pages(opened.engine.scheduler, [prompt["prompt_token_ids"] for prompt in prompts])


def lend_pages(scheduler: "Scheduler", prompts: Sequence[Sequence[int]]) -> None:
    """Allocate their pages in every group; for windows only those visible from the end of the last block."""
    prefix, pool = scheduler.prefix, scheduler.pool
    for token_ids in prompts:
        num_tokens = lent_tokens(scheduler, len(token_ids))
        assert num_tokens, f"a prompt of {len(token_ids)} tokens has no whole block of {prefix.block_tokens}"
        tables: list[list[int]] = []
        for group in scheduler.groups:
            num_hidden = group.first_page(num_tokens)
            num_seen = group.pages_for(num_tokens) - num_hidden
            assert num_seen <= pool.num_free, (
                f"{len(prompts)} contexts of {num_tokens} tokens do not fit {pool.num_pages} pages"
            )
            tables.append([*[HOLE] * num_hidden, *pool.allocate_many(num_seen)])
        chain = prefix.chain(b"")
        prefix.share(chain, prefix.miss())
        prefix.register(chain, token_ids, tables, num_tokens)
        pool.release_many(by_position(scheduler.groups, tables))
        hit = prefix.match(chain, token_ids, len(token_ids) - 1)
        assert hit.num_tokens == num_tokens, f"{num_tokens} tokens were lent, and {hit.num_tokens} of them are found"


def lent_tokens(scheduler: "Scheduler", prompt_tokens: int) -> int:
    """Return a prompt's cached tokens. Each run computes the rest, so prompts should be one token longer than blocks."""
    block = scheduler.prefix.block_tokens
    return (prompt_tokens - 1) // block * block


@torch.inference_mode()
def fill_pages(opened: "OpenEngine") -> None:
    """Write random latents, entries and index keys into every slot of every layer.

    If groups share pages, each slot is written for each group. States need nothing, because computed tokens build them.
    """
    storage = opened.built.storage
    for place, cache in enumerate(storage.spec.layers):
        planes, page_tokens = storage.planes(place), storage.spec.page_tokens
        latents = LatentPlanes.of(planes, cache.format, cache.latent_dim, cache.rope_dim, page_tokens)
        device, num_slots = latents.rows_SX.device, len(latents.rows_SX)
        slots_L = torch.arange(min(NUM_ROWS, num_slots), device=device)
        rows_LX = torch.randn(len(slots_L), latents.latent_dim + latents.rope_dim, device=device)
        store_latents(latents, slots_L, *rows_LX.split((latents.latent_dim, latents.rope_dim), dim=1))
        for plane in (latents.rows_SX, latents.scales_SC, latents.rope_SR):
            if plane is not None:
                repeat_rows(plane, len(slots_L))
        if cache.index_dim:
            fill_index(IndexPlanes.of(planes, page_tokens))


def fill_index(index: IndexPlanes) -> None:
    """Write distinct index keys: ties between equal scores are selected differently."""
    if index.scales_S1 is None:
        index.rows_SD.normal_()
        return
    index.scales_S1.fill_(2.0**-6)
    # Bytes with this bit off are never NaN.
    index.rows_SD.view(torch.uint8).random_(0, 256).bitwise_and_(0xF7)


def repeat_rows(plane: torch.Tensor, count: int) -> None:
    """Copy the first rows of a plane over all others."""
    whole = plane.view(torch.uint8)
    for first in range(count, len(whole), count):
        part = whole[first : first + count]
        part.copy_(whole[: len(part)])

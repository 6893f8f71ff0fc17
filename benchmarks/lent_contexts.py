"""Long contexts without prefill: pages full of finite random rows, and prompts that the prefix cache finds on them.

What a decode step over a long context takes does not depend on what the rows hold, as long as they are numbers; and to compute
64 prompts of 128 thousand tokens would take longer than all that is measured behind them.
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
"""That differ; all others are copies of them."""


def lend_contexts(opened: "OpenEngine", prompts: Sequence["TokensPrompt"]) -> None:
    """Have the prefix cache know all whole blocks before the last token of these prompts. The model must keep latents."""
    fill_pages(opened)
    lend_pages(opened.engine.scheduler, [prompt["prompt_token_ids"] for prompt in prompts])


def lend_pages(scheduler: "Scheduler", prompts: Sequence[Sequence[int]]) -> None:
    """Pages for them in every group, of windows only those that are seen from the end of the last block on."""
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
    """For a prompt, what is found; the rest is computed with every run, so that prompts are best one token longer than blocks."""
    block = scheduler.prefix.block_tokens
    return (prompt_tokens - 1) // block * block


@torch.inference_mode()
def fill_pages(opened: "OpenEngine") -> None:
    """Random latents and entries, and random keys of an index, in every slot of every layer; where groups of layers share their
    memory page by page, each slot is written for each of them, always with rows. States need nothing: they are made of tokens that are computed.
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
    """Keys that all differ: equal scores would be chosen among in another way."""
    if index.scales_S1 is None:
        index.rows_SD.normal_()
        return
    index.scales_S1.fill_(2.0**-6)
    # Bytes with this bit off are never NaN.
    index.rows_SD.view(torch.uint8).random_(0, 256).bitwise_and_(0xF7)


def repeat_rows(plane: torch.Tensor, count: int) -> None:
    """The first rows of a plane over all others."""
    whole = plane.view(torch.uint8)
    for first in range(count, len(whole), count):
        part = whole[first : first + count]
        part.copy_(whole[: len(part)])

"""Long contexts that nobody computed: pages full of finite random rows, and prompts that the prefix cache finds on them.

What a decode step over a long context takes does not depend on what the rows hold, as long as they are numbers; and to compute
64 prompts of 128 thousand tokens would take longer than all that is measured behind them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from holdfast.kernels.latent.latent_planes import IndexPlanes, LatentPlanes, store_latents

if TYPE_CHECKING:
    from gpu_engines import OpenEngine

    from holdfast.engine.admission import TokensPrompt

NUM_ROWS = 8192
"""That differ; all others are copies of them."""


def lend_contexts(opened: "OpenEngine", prompts: Sequence["TokensPrompt"]) -> None:
    """Have the prefix cache know all whole pages of these prompts. The model must keep latents in one group."""
    fill_pages(opened)
    scheduler = opened.engine.scheduler
    (group,) = scheduler.groups
    for prompt in prompts:
        token_ids = prompt["prompt_token_ids"]
        pages = scheduler.pool.allocate_many(len(token_ids) // group.page_tokens)
        chain = scheduler.prefix.chain(b"")
        scheduler.prefix.share(chain, scheduler.prefix.miss())
        scheduler.prefix.register(chain, token_ids, [pages], len(pages) * group.page_tokens)
        scheduler.pool.release_many(pages)
        assert chain.num_blocks, f"a prompt of {len(token_ids)} tokens was lent no block"


@torch.inference_mode()
def fill_pages(opened: "OpenEngine") -> None:
    """Random latents, and random keys of an index, in every slot of every layer."""
    storage = opened.built.storage
    for layer, cache in enumerate(storage.spec.layers):
        planes, page_tokens = storage.planes(layer), storage.spec.page_tokens
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

"""LatentBackend: pages of every layer that keeps latents (MLA), and how a step is written into them; the base of its backends."""

from collections.abc import Sequence

import torch

from holdfast.attention.backend import AttentionBackend, Batch, LayerStep
from holdfast.cache.storage import PageStorage
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.write_latent import LatentNorm, write_latent


class LatentBackend(AttentionBackend):
    """One latent per token, shared by all query heads, beside a few rotated elements (MLA).

    N query heads of D = P + R elements: P meet the latent of L elements through kv_b, R are rotated; V elements of a head's
    output. kv_b is [N, P + V, L]: of a head first the rows of keys (W_UK), then those of values (W_UV).

    Attention is absorbed (queries go through W_UK, outputs through W_UV, and a token's row is read once for all heads) or
    up-projected (keys and values of every head), whichever is less work for the shape of a step.
    """

    def __init__(self, specs: Sequence[LatentAttentionSpec], storage: PageStorage) -> None:
        self._specs = tuple(specs)
        self.planes = tuple(
            LatentPlanes.of(
                storage.planes(layer),
                spec.cache.format,
                spec.cache.latent_dim,
                spec.cache.rope_dim,
                storage.spec.page_tokens,
            )
            for layer, spec in enumerate(specs)
        )
        self._device = self.planes[0].rows_SX.device

    def write(
        self, latent_TX: torch.Tensor, q_TND: torch.Tensor, batch: Batch, norm: LatentNorm, rotary: Rotary, layer: int
    ) -> None:
        """Norm and rotate the step's latents [T, L + R] and write them into their slots, in one pass.

        Rotate the last R elements of every query head in place. Rows of `latent_TX` may be strided.
        """
        slots_T = batch.slots_GT[self._specs[layer].group]
        write_latent(latent_TX, q_TND, slots_T, norm, rotary, self.planes[layer])

    def attend(
        self, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor, step: LayerStep, out_TX: torch.Tensor, wanted_only: bool
    ) -> torch.Tensor:
        """Attend to all stored tokens: [T, N * V], padding as zeros; or only with the rows whose logits are wanted."""
        raise NotImplementedError

"""Adapters of the kernels over latents, selected tokens and compressed entries."""

from kernels.every_attention import Attention

LATENT: tuple[Attention, ...] = ()

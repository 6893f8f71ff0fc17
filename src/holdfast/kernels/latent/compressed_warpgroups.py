"""Compressed attention (DeepSeek-V4) for tiles of up to 64 heads on a Hopper: warps gather, warpgroups multiply, in Gluon."""

import torch

from holdfast.kernels.latent.compressed_scopes import Scopes


def takes_warpgroups(q_TND: torch.Tensor, scopes: Scopes) -> bool:
    """Not yet."""
    return False


def attend_warpgroups(*arguments: object) -> None:
    """Not yet."""

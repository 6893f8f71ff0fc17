"""Parts of several ranks added up in float32, in the order of ranks, and rounded once; and laid side by side. Plain torch.

T rows, H columns, N their product; S ranks; X a rank's columns

What the kernels beside it are compared with, and what ranks on CPUs run.
"""

from collections.abc import Sequence

import torch


def add_parts_reference(
    parts: Sequence[torch.Tensor], out_TH: torch.Tensor, scratch_F: torch.Tensor | None = None
) -> torch.Tensor:
    """out = parts[0] + parts[1] + ... in float32, rounded once to the dtype of `out_TH`.

    The sum grows in `out_TH` where that is wide, else in `scratch_F` (float32, any length), piece by piece; without one in new memory.
    """
    if out_TH.dtype == torch.float32:
        return _add(parts, out_TH)
    if scratch_F is None:
        return out_TH.copy_(_add(parts, torch.empty(out_TH.shape, dtype=torch.float32, device=out_TH.device)))
    flat, out_N = [part.view(-1) for part in parts], out_TH.view(-1)
    for start in range(0, out_N.shape[0], scratch_F.shape[0]):
        piece = slice(start, start + scratch_F.shape[0])
        wide = scratch_F[: out_N[piece].shape[0]]
        out_N[piece].copy_(_add([part[piece] for part in flat], wide))
    return out_TH


def _add(parts: Sequence[torch.Tensor], wide: torch.Tensor) -> torch.Tensor:
    wide.copy_(parts[0])
    for part in parts[1:]:
        wide.add_(part)
    return wide


def gather_parts_reference(parts: Sequence[torch.Tensor], out_TY: torch.Tensor) -> torch.Tensor:
    """out[:, r * X : (r + 1) * X] = parts[r]."""
    for part_TX, slot_TX in zip(parts, out_TY.chunk(len(parts), dim=1), strict=True):
        slot_TX.copy_(part_TX)
    return out_TY

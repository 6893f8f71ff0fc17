"""The rotation that makes a head's coordinates alike: a Hadamard matrix, in blocks where the head is no power of two."""

import torch


def hadamard_block(head_dim: int) -> int:
    """The side of a block: the largest power of two that divides the head."""
    return head_dim & -head_dim


def hadamard_signs(head_dim: int) -> torch.Tensor:
    """[D, D], symmetric: +1 and -1 inside the blocks, 0 outside. Divided by the root of the block's side it is a rotation."""
    block = hadamard_block(head_dim)
    signs = torch.ones(1, 1)
    while signs.shape[0] < block:
        signs = torch.cat((torch.cat((signs, signs), dim=1), torch.cat((signs, -signs), dim=1)))
    return torch.block_diag(*(signs for _ in range(head_dim // block)))


def rotation_table(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """What kernels read, [D + 1, D]: the signs, and below them -1 for columns from D / 16 on, else 0.

    That last row tells words of values of 3 bits in the upper half of a head from the lower ones (kernels/pages/code_parts.py).
    """
    upper_1D = torch.where(torch.arange(head_dim) >= head_dim // 16, -1.0, 0.0).unsqueeze(0)
    return torch.cat((hadamard_signs(head_dim), upper_1D)).to(device, dtype)


def rotate_heads(x_XD: torch.Tensor) -> torch.Tensor:
    """Rotate the last dimension in float32; rotating twice gives x back."""
    head_dim = x_XD.shape[-1]
    signs_DD = hadamard_signs(head_dim).to(x_XD.device)
    return x_XD.float() @ signs_DD * hadamard_block(head_dim) ** -0.5

"""Models whose queries and keys do not share their size evenly, pair by pair: codes of keys lose more, and exact keys nothing."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from holdfast.kernels.attention.write_kv import in_pair_order

BIAS = 8.0


def unbalance(folder: Path, head_dim: int, most: float, rotary_dim: int | None = None) -> None:
    """Multiply queries and divide keys of each pair by a number of its own, up to `most`: no score changes.

    RoPE turns `rotary_dim` elements of a head, or all. Key biases, if there are any, become large first.
    """
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    order = in_pair_order(torch.arange(head_dim), rotary_dim or head_dim)
    places = torch.linspace(-1, 1, head_dim // 2)[torch.randperm(head_dim // 2, generator=torch.Generator())]
    for name in sorted(tensors):
        if ".q_proj." not in name and ".k_proj." not in name:
            continue
        heads = tensors[name].unflatten(0, (-1, head_dim))
        if name.endswith("k_proj.bias"):
            heads = torch.randn(heads.shape, generator=torch.Generator().manual_seed(len(name))) * BIAS
        factor = (most ** (places if ".q_proj." in name else -places)).repeat(2)[order.argsort()]
        heads = heads * (factor if heads.dim() == 2 else factor.unsqueeze(-1))
        tensors[name] = heads.to(tensors[name].dtype).flatten(0, 1).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})

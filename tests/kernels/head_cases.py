"""Rows of a fused projection with their cos and sin and scattered slots, and planes in which every slot is poison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from holdfast.kernels.attention.write_kv import HeadNorm, Rotary, write_kv
from kernels.exactness import random

POISON = float("nan")
FEATURES = pytest.mark.parametrize(
    ("with_norm", "with_rope"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["plain", "norm", "rope", "norm and rope"],
)


@dataclass
class Case:
    """Rows with their cos and sin and scattered slots, and planes in which every slot is poison."""

    qkv: torch.Tensor
    slots: torch.Tensor
    k_plane: torch.Tensor
    v_plane: torch.Tensor
    head_norm: HeadNorm | None
    rotary: Rotary | None

    @property
    def num_heads(self) -> int:
        _, num_kv_heads, head_dim = self.k_plane.shape
        return self.qkv.shape[1] // head_dim - 2 * num_kv_heads

    def rounded(self, dtype: torch.dtype) -> "Case":
        """Round values to the type."""
        return self._with(lambda tensor: tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor)

    def on(self, device: torch.device) -> "Case":
        return self._with(lambda tensor: tensor.to(device))

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Case":
        norm, rotary = self.head_norm, self.rotary
        return Case(
            *map(change, (self.qkv, self.slots, self.k_plane, self.v_plane)),
            norm and HeadNorm(change(norm.q_weight_D), change(norm.k_weight_D), norm.eps, norm.offset),
            rotary and Rotary(change(rotary.cos_TP), change(rotary.sin_TP)),
        )

    def float32_norms(self, offset: float) -> "Case":
        """Take norms with an `offset`, in float32 for rows of any type."""
        norm = self.head_norm
        assert norm is not None, "a case without norms"
        # With values that narrower types hold too: judges may take them in the type of the rows.
        weights = (random(len(norm.q_weight_D), seed=seed).bfloat16().float() for seed in (7, 8))
        return replace(self, head_norm=HeadNorm(*weights, norm.eps, offset))

    def padded(self, rows: Sequence[int]) -> "Case":
        """Make these rows padding full of poison."""
        qkv, slots, rotary = self.qkv.clone(), self.slots.clone(), self.rotary
        if rotary is not None:
            rotary = Rotary(rotary.cos_TP.clone(), rotary.sin_TP.clone())
            rotary.cos_TP[list(rows)], rotary.sin_TP[list(rows)] = POISON, POISON
        for number, row in enumerate(rows):
            qkv[row] = POISON
            slots[row] = (-1, -2, -(2**62))[number % 3]
        return replace(self, qkv=qkv, slots=slots, rotary=rotary)

    def run(self, function=write_kv, rows=None, dtype=torch.float32):
        """(queries, key plane, value plane) after the rows were written into fresh planes."""
        rows = list(range(len(self.slots))) if rows is None else rows
        case = self.rounded(dtype)
        planes = case.k_plane, case.v_plane
        rotary = case.rotary and case.rotary.at(rows)
        q = function(case.qkv[rows], case.slots[rows], *planes, case.head_norm, rotary)
        return q, *planes


def make_case(num_rows, head_dim, group=3, num_kv_heads=2, with_norm=True, with_rope=True, seed=0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    num_slots = 2 * num_rows + 3
    angles = torch.rand(num_rows, head_dim // 2, generator=generator) * 6
    planes = torch.full((2, num_slots, num_kv_heads, head_dim), POISON)
    return Case(
        qkv=random(num_rows, (group + 2) * num_kv_heads * head_dim, seed=seed + 1),
        slots=torch.randperm(num_slots, generator=generator)[:num_rows],
        k_plane=planes[0].clone(),
        v_plane=planes[1].clone(),
        head_norm=HeadNorm(random(head_dim, seed=seed + 2), random(head_dim, seed=seed + 3), 1e-5)
        if with_norm
        else None,
        rotary=Rotary(angles.cos(), angles.sin()) if with_rope else None,
    )

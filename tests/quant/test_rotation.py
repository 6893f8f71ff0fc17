"""The rotation: orthonormal, its own inverse, and confined to blocks where the head is no power of two."""

import pytest
import torch

from holdfast.quant.kv_quantize import hadamard_block, hadamard_signs, rotate_heads

BLOCKS = {16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 112: 16, 128: 128, 160: 32, 192: 64, 208: 16, 256: 256}


def written_out(head_dim: int) -> torch.Tensor:
    """From the definition: within a block the sign is the parity of the bits that row and column share."""
    block = BLOCKS[head_dim]
    signs = [
        [(-1.0) ** ((i & j) % block).bit_count() if i // block == j // block else 0.0 for j in range(head_dim)]
        for i in range(head_dim)
    ]
    return torch.tensor(signs)


@pytest.mark.parametrize(("head_dim", "block"), BLOCKS.items())
def test_the_block_is_the_largest_power_of_two_inside(head_dim: int, block: int) -> None:
    assert hadamard_block(head_dim) == block


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_signs_are_those_of_the_definition(head_dim: int) -> None:
    assert torch.equal(hadamard_signs(head_dim), written_out(head_dim))


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_it_is_symmetric_and_orthonormal(head_dim: int) -> None:
    signs_DD = hadamard_signs(head_dim)
    assert torch.equal(signs_DD, signs_DD.T)
    assert torch.equal(signs_DD @ signs_DD, BLOCKS[head_dim] * torch.eye(head_dim))


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192])
def test_nothing_leaves_its_block(head_dim: int) -> None:
    block = BLOCKS[head_dim]
    outside = ~torch.block_diag(*[torch.ones(block, block, dtype=torch.bool)] * (head_dim // block))
    assert not hadamard_signs(head_dim)[outside].any()
    x_XD = torch.zeros(3, head_dim)
    x_XD[:, block : 2 * block] = torch.randn(3, block, generator=torch.Generator().manual_seed(1))
    y_XD = rotate_heads(x_XD)
    assert not y_XD[:, :block].any()
    assert not y_XD[:, 2 * block :].any()


@pytest.mark.parametrize("head_dim", BLOCKS)
def test_twice_is_where_it_started_and_lengths_stay(head_dim: int) -> None:
    x_XD = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(head_dim))
    y_XD = rotate_heads(x_XD)
    torch.testing.assert_close(rotate_heads(y_XD), x_XD, rtol=0, atol=2e-6)
    torch.testing.assert_close(y_XD.norm(dim=-1), x_XD.norm(dim=-1), rtol=1e-6, atol=0)
    q_XD = torch.randn(7, head_dim, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close((rotate_heads(q_XD) * y_XD).sum(-1), (q_XD * x_XD).sum(-1), rtol=0, atol=3e-5)


def test_an_outlier_is_spread_over_its_block() -> None:
    x_D = torch.zeros(96)
    x_D[40] = 8.0
    y_D = rotate_heads(x_D)
    assert y_D[32:64].abs().unique().tolist() == pytest.approx([8 / 32**0.5])
    assert not y_D[:32].any()
    assert not y_D[64:].any()


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_shapes_stay_and_the_type_is_float32(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    x_XD = torch.randn(*leading, 80, generator=torch.Generator().manual_seed(2)).to(dtype)
    y_XD = rotate_heads(x_XD)
    assert y_XD.dtype == torch.float32
    assert y_XD.shape == x_XD.shape
    torch.testing.assert_close(y_XD, x_XD.float() @ written_out(80) / 4, rtol=0, atol=2e-6)


def test_a_head_without_numbers_spoils_no_other() -> None:
    x_XD = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    alone = rotate_heads(x_XD[2])
    x_XD[1, 5] = torch.nan
    y_XD = rotate_heads(x_XD)
    assert y_XD[1].isnan().all()
    torch.testing.assert_close(y_XD[2], alone)
    assert y_XD[0].isfinite().all()

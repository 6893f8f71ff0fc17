"""kv_b folded for latents that are kept rotated: the same attention as over latents as they are, in place or in copies."""

import pytest
import torch

from holdfast.attention.declarations import AttentionSpec
from holdfast.cache.spec import LayerCache
from holdfast.families.compressed.spec import CompressedAttentionSpec
from holdfast.families.latent.rotation import FOLDED_ROWS, fold_rotation, kv_b_name, o_a_name, rotate_rows
from holdfast.families.latent.spec import LatentAttentionSpec
from holdfast.families.latent.torch_backend import attend_latents
from holdfast.kernels.latent.latent_planes import LatentPlanes
from holdfast.kernels.latent.latent_projection import absorb_queries, project_values
from holdfast.quant.formats import COMPRESSED_FORMATS, MLA_FORMATS, formats_of
from holdfast.quant.kv_quantize import rotate_heads

NOPE, VALUE, ROPE, HEADS = 24, 16, 16, 3


def attended(rows_SX: torch.Tensor, q_TND: torch.Tensor, kv_b_NXL: torch.Tensor) -> torch.Tensor:
    """For rows at the end of a sequence whose latents these are."""
    latent_dim = kv_b_NXL.shape[-1]
    planes = LatentPlanes("plain", latent_dim, ROPE, 16, rows_SX)
    absorbed_TNX = absorb_queries(q_TND, kv_b_NXL, torch.empty(len(q_TND), HEADS, latent_dim + ROPE))
    slots_L, position = torch.arange(len(rows_SX)), len(rows_SX) - len(q_TND)
    latent_TNL = attend_latents(absorbed_TNX, planes, slots_L, position, (NOPE + ROPE) ** -0.5)
    return project_values(latent_TNL, kv_b_NXL, torch.empty(len(q_TND), HEADS, VALUE))


@pytest.mark.parametrize("latent_dim", [16, 48, 64, 192, 512])
def test_folded_equals_unfolded(latent_dim):
    torch.manual_seed(latent_dim)
    rows_SX = torch.randn(200, latent_dim + ROPE)
    q_TND = torch.randn(7, HEADS, NOPE + ROPE)
    kv_b_NXL = torch.randn(HEADS, NOPE + VALUE, latent_dim) / latent_dim**0.5
    plain = attended(rows_SX, q_TND, kv_b_NXL)
    rotated_SX = torch.cat((rotate_heads(rows_SX[:, :latent_dim]), rows_SX[:, latent_dim:]), dim=1)
    assert not torch.allclose(rotated_SX, rows_SX, atol=0.1)
    folded_NXL = rotate_rows(kv_b_NXL.flatten(0, 1).clone()).view_as(kv_b_NXL)
    torch.testing.assert_close(attended(rotated_SX, q_TND, folded_NXL), plain, rtol=1e-5, atol=1e-5)


def spec(name: str) -> AttentionSpec:
    cache = LayerCache(0, "latent", formats_of(is_latent=True)[name], 1, 64 + ROPE, ROPE)
    return LatentAttentionSpec(cache, HEADS, 1.0, None, 128, "float32", "cpu", nope_dim=NOPE, value_dim=VALUE)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_fold_rotation_folds_only_rotated_formats(is_shared):
    names = ["float32", *MLA_FORMATS, "float32"]
    rotated = [layer for layer, name in enumerate(names) if name.startswith("turboquant")]
    weights = {kv_b_name(layer): torch.randn(HEADS * (NOPE + VALUE), 64) for layer in range(len(names))}
    before = {name: weight.clone() for name, weight in weights.items()}
    folded = fold_rotation(weights, [spec(name) for name in names], is_shared)
    assert list(folded) == [kv_b_name(layer) for layer in rotated]
    for name, weight in weights.items():
        is_changed = name in folded and not is_shared
        assert torch.equal(weight, before[name]) is not is_changed
    for name, weight in folded.items():
        assert (weight is weights[name]) is not is_shared
        torch.testing.assert_close(weight, rotate_heads(before[name]))


@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_fold_rotation_of_o_a_undoes_compressed_rotation(is_shared):
    """For each head the elements before those that positions rotate: o_a times a rotated output is o_a times the plain one."""
    dim, own = 48 + ROPE, COMPRESSED_FORMATS["turboquant_mla_4bit"]
    compressed = CompressedAttentionSpec(
        LayerCache(0, "window", own, 1, dim, ROPE), HEADS, 1.0, 8, 128, "float32", "cpu"
    )
    weight, out_TX = torch.randn(10, 2 * dim), torch.randn(3, 2 * dim)
    expected, before = out_TX @ weight.T, weight.clone()
    rotated = out_TX.clone().view(3, 2, dim)
    rotated[..., :48] = rotate_heads(rotated[..., :48])
    folded = fold_rotation({o_a_name(0): weight}, [compressed], is_shared)[o_a_name(0)]
    torch.testing.assert_close(rotated.flatten(1) @ folded.T, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight, before) is is_shared


def test_rotate_rows_tall_weight_equals_rotate_heads():
    weight = torch.randn(FOLDED_ROWS + 5, 16)
    expected = rotate_heads(weight)
    torch.testing.assert_close(rotate_rows(weight), expected)

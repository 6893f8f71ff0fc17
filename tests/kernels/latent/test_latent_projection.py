"""kv_b on both sides of latent attention: against float64, for any rows, heads and odd sizes, amid poison, to the bit in any company."""

import pytest
import torch

from for_each import for_each
from holdfast.kernels.latent.latent_projection import (
    absorb_queries,
    absorb_queries_reference,
    absorb_queries_triton,
    project_values,
    project_values_reference,
    project_values_triton,
    projection_form,
    row_form,
)
from kernels.exactness import random, same_bits
from kernels.expert_cases import among
from kernels.triton_cases import DTYPES, assert_allocates_nothing
from red_zones import RedZones

NAN = float("nan")
CPU = torch.device("cpu")
SIZES = {
    "whole": (3, 32, 16, 64, 32),
    "odd": (2, 48, 16, 80, 16),
    "no rope": (2, 16, 0, 96, 48),
    "one head": (1, 32, 32, 144, 80),
}
"""N, P, R, L, V."""
EACH = pytest.mark.parametrize("sizes", list(SIZES.values()), ids=list(SIZES))


def apart(values: torch.Tensor, device: torch.device, moat: int = 32) -> torch.Tensor:
    """[T, N, X] with NaN between heads and around everything."""
    num_rows, num_heads, width = values.shape
    buffer = torch.full((num_rows + 2, num_heads + 1, width + moat), NAN, dtype=values.dtype, device=device)
    body = buffer[1:-1, 1:, :width]
    body.copy_(values)
    return body


def case(num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype):
    num_heads, nope_dim, rope_dim, latent_dim, value_dim = sizes
    q = random(num_rows, num_heads, nope_dim + rope_dim, seed=1).to(dtype)
    kv_b = random(num_heads, nope_dim + value_dim, latent_dim, seed=2, scale=latent_dim**-0.5).to(dtype)
    latent = random(num_rows, num_heads, latent_dim, seed=3).to(dtype)
    return q, kv_b, latent


def absorb(function, q, kv_b, rope_dim: int, device) -> torch.Tensor:
    zones = RedZones(device)
    out = zones.allocate(*q.shape[:2], kv_b.shape[2] + rope_dim, dtype=q.dtype).fill_(NAN)
    assert function(apart(q, device), among(kv_b, device), out) is out
    zones.check()
    return out.cpu()


def project(function, latent, kv_b, value_dim: int, device) -> torch.Tensor:
    zones = RedZones(device)
    out = zones.allocate(*latent.shape[:2], value_dim, dtype=latent.dtype).fill_(NAN)
    assert function(apart(latent, device), among(kv_b, device), out) is out
    zones.check()
    return out.cpu()


def check(device, num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    _, nope_dim, rope_dim, _, value_dim = sizes
    q, kv_b, latent = case(num_rows, sizes, dtype)
    absorbed = torch.einsum("tnp,npl->tnl", q[..., :nope_dim].double(), kv_b[:, :nope_dim].double())
    queries = torch.cat((absorbed, q[..., nope_dim:].double()), dim=-1)
    values = torch.einsum("tnl,nvl->tnv", latent.double(), kv_b[:, nope_dim:].double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for function, where in ((absorb_queries_reference, CPU), (absorb_queries_triton, device)):
        found = absorb(function, q, kv_b, rope_dim, where)
        torch.testing.assert_close(found.double(), queries, rtol=tolerance, atol=tolerance)
        assert same_bits(found[..., kv_b.shape[2] :], q[..., nope_dim:])
    for function, where in ((project_values_reference, CPU), (project_values_triton, device)):
        found = project(function, latent, kv_b, value_dim, where)
        torch.testing.assert_close(found.double(), values, rtol=tolerance, atol=tolerance)


@pytest.mark.each_value
@EACH
@DTYPES
def test_latent_projection_is_exact_for_every_size(device, sizes, dtype):
    check(device, 5, sizes, dtype)


@for_each("num_rows", [0, 1, 16, 17, 65, 520])
def test_latent_projection_is_exact_for_every_row_count(device, num_rows):
    check(device, num_rows, (2, 16, 16, 32, 16), torch.float32)


@for_each("num_rows", [17, 65, 520])
def test_latent_projection_several_blocks_are_exact(device, num_rows):
    """More columns than a program takes, and more than it multiplies at a time, in every form that has a loop."""
    check(device, num_rows, (2, 16, 16, 304, 144), torch.float32)


@for_each("num_rows", [3, 17])
def test_latent_projection_many_heads_are_exact(device, num_rows):
    check(device, num_rows, (64, 16, 16, 32, 48), torch.float32)


def test_projection_blocks_change_at_rows_and_heads():
    """(rows, columns, depth) of both products at each edge."""
    found = {
        (num_rows, num_heads): [tuple(blocks[:3]) for blocks in projection_form(num_rows, num_heads)]
        for num_rows in (1, 16, 17, 64, 65, 512, 513)
        for num_heads in (63, 64)
    }
    few, some, many = (16, 64, 0), (64, 64, 0), (64, 128, 0)
    values = {rows: (64, 64, 128) if rows <= 512 else (128, 128, 64) for rows in (17, 64, 65, 512, 513)}
    wanted = {(rows, heads): [few, (16, 32 if heads == 64 else 16, 0)] for rows in (1, 16) for heads in (63, 64)}
    wanted |= {(rows, 63): [some, (64, 32, 0)] for rows in (17, 64)}
    wanted |= {(rows, 64): [many, values[rows]] for rows in (17, 64)}
    wanted |= {(rows, heads): [many, values[rows]] for rows in (65, 512, 513) for heads in (63, 64)}
    assert found == wanted
    assert row_form(40) == (projection_form(40, 16), projection_form(40, 128))


def test_projection_blocks_grow_with_rows():
    for num_heads in (16, 128):
        forms = [projection_form(num_rows, num_heads) for num_rows in range(1, 600)]
        assert len(set(forms)) <= 4
        for blocks in ([form.absorb.rows for form in forms], [form.value.rows for form in forms]):
            assert sorted(blocks) == blocks


def test_latent_projection_head_group_matches_all_heads(device):
    """Views of some heads of everything give what all heads give, and leave the others alone."""
    q, kv_b, latent = case(5, (5, 32, 16, 64, 48), torch.float32)
    queries = absorb(absorb_queries_triton, q, kv_b, 16, device)
    values = project(project_values_triton, latent, kv_b, 48, device)
    kv_b, q, latent = kv_b.to(device), q.to(device), latent.to(device)
    group = slice(1, 4)
    some = torch.full((5, 3, 80), NAN, device=device)
    absorb_queries_triton(q[:, group], kv_b[group], some)
    assert same_bits(some.cpu(), queries[:, group])
    out = torch.full((5, 5, 48), NAN, device=device)
    project_values_triton(latent[:, group], kv_b[group], out[:, group])
    assert same_bits(out[:, group].cpu(), values[:, group])
    assert out[:, [0, 4]].isnan().all()


def test_latent_projection_is_batch_invariant(device):
    q, kv_b, latent = case(9, (2, 32, 16, 64, 48), torch.float32)
    queries = absorb(absorb_queries_triton, q, kv_b, 16, device)
    values = project(project_values_triton, latent, kv_b, 48, device)
    for rows in ([4], [8, 2, 5]):
        assert same_bits(absorb(absorb_queries_triton, q[rows], kv_b, 16, device), queries[rows])
        assert same_bits(project(project_values_triton, latent[rows], kv_b, 48, device), values[rows])


def test_latent_projection_nan_row_changes_no_other_row(device):
    q, kv_b, latent = case(4, (2, 32, 16, 64, 48), torch.float32)
    q[2], latent[2] = NAN, NAN
    for found in (
        absorb(absorb_queries_triton, q, kv_b, 16, device),
        project(project_values_triton, latent, kv_b, 48, device),
    ):
        assert found[2].isnan().all()
        assert found[[0, 1, 3]].isfinite().all()


def test_latent_projection_on_cpu_uses_reference():
    q, kv_b, latent = case(3, (2, 32, 16, 64, 48), torch.float16)
    assert same_bits(absorb(absorb_queries, q, kv_b, 16, CPU), absorb(absorb_queries_reference, q, kv_b, 16, CPU))
    assert same_bits(
        project(project_values, latent, kv_b, 48, CPU), project(project_values_reference, latent, kv_b, 48, CPU)
    )


def test_latent_projection_refuses_wrong_shapes():
    q, kv_b, latent = case(3, (2, 32, 16, 64, 48), torch.float32)
    with pytest.raises(AssertionError, match="by the weights of 1 heads"):
        absorb_queries_triton(q, kv_b[:1], torch.empty(3, 2, 80))
    with pytest.raises(AssertionError, match="dtype"):
        project_values_triton(latent.half(), kv_b, torch.empty(3, 2, 48))
    with pytest.raises(AssertionError, match="strides"):
        project_values_triton(latent[..., :32], kv_b[:, :, ::2], torch.empty(3, 2, 48))
    with pytest.raises(AssertionError, match="shape"):
        absorb_queries_triton(q, kv_b, torch.empty(2, 2, 80))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 16, 64, 200])
@pytest.mark.parametrize("sizes", [(16, 128, 64, 512, 128), (20, 192, 64, 512, 256)], ids=["V2-Lite", "GLM"])
def test_latent_projection_is_exact_at_model_sizes(device, num_rows, sizes):
    check(device, num_rows, sizes, torch.bfloat16)


@pytest.mark.gpu
def test_latent_projection_allocates_nothing(device):
    q, kv_b, latent = (x.to(device) for x in case(9, (2, 32, 16, 64, 48), torch.bfloat16))
    queries, values = (torch.empty(9, 2, size, dtype=torch.bfloat16, device=device) for size in (80, 48))
    assert_allocates_nothing(lambda: absorb_queries(q, kv_b, queries))
    assert_allocates_nothing(lambda: project_values(latent, kv_b, values))

"""Up-projected latent attention: against float64 over gathered latents, in chunks, splits and groups of heads, amid poison."""

from dataclasses import dataclass

import pytest
import torch

from for_each import for_each
from holdfast.kernels.latent.latent_planes import LatentPlanes, read_latents, store_latents
from holdfast.kernels.latent.latent_prefill import (
    attend_up_projected,
    attend_up_projected_reference,
    attend_up_projected_triton,
    gather_latents_reference,
    gather_latents_triton,
)
from holdfast.kernels.up_projection import CHUNK_STEP, SPLIT_TOKENS, UpProjection, expanded_specs
from kernels.exactness import random, same_bits
from kernels.expert_cases import among
from kernels.latent_page_cases import QUANTIZED_LATENTS, make_latent_planes, on_device
from kernels.triton_cases import DTYPES, assert_allocates_nothing
from red_zones import RedZones

NAN = float("nan")
CPU = torch.device("cpu")
BEYOND = 2**30
"""Page ids that no kernel may read."""
WHOLE = UpProjection(num_heads=2, latent_dim=64, rope_dim=16, nope_dim=32, value_dim=32)
ODD = UpProjection(num_heads=3, latent_dim=96, rope_dim=48, nope_dim=48, value_dim=80)
V2_LITE = UpProjection(num_heads=16, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128)
GLM = UpProjection(num_heads=20, latent_dim=512, rope_dim=64, nope_dim=192, value_dim=256)
SHAPES = pytest.mark.parametrize("shape", [WHOLE, ODD], ids=["whole", "odd"])
SCALE = 0.21


@dataclass
class Case:
    """Rows of a sequence behind `start` tokens, whose pages lie in any order."""

    shape: UpProjection
    start: int
    q: torch.Tensor
    kv_b: torch.Tensor
    planes: LatentPlanes
    page_row: torch.Tensor
    zones: RedZones


def make_case(shape, num_rows, start, dtype, name="auto", page_tokens=16, seed=0) -> Case:
    num_tokens, zones = start + num_rows, RedZones(CPU)
    num_pages = -(-num_tokens // page_tokens)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(num_pages + 3, generator=generator)[:num_pages].to(torch.int32)
    if name == "auto":
        rows = zones.allocate((num_pages + 3) * page_tokens, shape.latent_dim + shape.rope_dim, dtype=dtype).fill_(NAN)
        planes = LatentPlanes("plain", shape.latent_dim, shape.rope_dim, page_tokens, rows)
    else:
        planes = make_latent_planes(name, shape.latent_dim, shape.rope_dim, page_tokens, num_pages + 3, zones)
    token_S = torch.arange(num_tokens)
    slot_S = pages.long()[token_S // page_tokens] * page_tokens + token_S % page_tokens
    latents = random(num_tokens, shape.latent_dim, seed=seed + 1)
    store_latents(planes, slot_S, latents, random(num_tokens, shape.rope_dim, seed=seed + 2))
    page_row = torch.cat([pages, torch.full((4,), BEYOND, dtype=torch.int32)])
    q = random(num_rows, shape.num_heads, shape.nope_dim + shape.rope_dim, seed=seed + 3).to(dtype)
    kv_b = random(shape.num_heads, shape.expanded_dim, shape.latent_dim, seed=seed + 4, scale=shape.latent_dim**-0.5)
    return Case(shape, start, q, kv_b.to(dtype), planes, page_row, zones)


def exact(case: Case) -> torch.Tensor:
    """In float64, one row and head at a time."""
    shape, page_tokens = case.shape, case.planes.page_tokens
    out = torch.empty(*case.q.shape[:2], shape.value_dim, dtype=torch.float64)
    token_S = torch.arange(case.start + len(case.q))
    slot_S = case.page_row[token_S // page_tokens].long() * page_tokens + token_S % page_tokens
    latent_SL, rope_SR = read_latents(case.planes, slot_S, torch.float64).split(
        (shape.latent_dim, shape.rope_dim), dim=1
    )
    for head in range(shape.num_heads):
        keys, values = (latent_SL @ case.kv_b[head].double().t()).split((shape.nope_dim, shape.value_dim), dim=1)
        keys = torch.cat((keys, rope_SR), dim=1)
        for row, q in enumerate(case.q[:, head].double()):
            end = case.start + row + 1
            out[row, head] = (keys[:end] @ q * SCALE).softmax(0) @ values[:end]
    return out


def run(case: Case, device, tokens=None, state_rows=None, function=attend_up_projected_triton) -> torch.Tensor:
    """`tokens` of a chunk; `state_rows` of a head at a time."""
    shape, zones, dtype = case.shape, RedZones(device), case.q.dtype
    num_rows, num_tokens = len(case.q), case.start + len(case.q)
    specs = expanded_specs(shape, str(dtype).removeprefix("torch."), num_rows, num_tokens)
    sizes = [spec.shape[0] for spec in specs]
    if tokens is not None:
        sizes[0] = tokens * shape.token_elements(shape.group_heads(num_rows))
    if state_rows is not None:
        sizes[1] = state_rows * (shape.value_dim + 1)
    scratch = {
        spec.name: zones.allocate(size, dtype=getattr(torch, spec.dtype)).fill_(NAN)
        for spec, size in zip(specs, sizes, strict=True)
    }
    wide = torch.full((num_rows + 2, shape.num_heads + 1, case.q.shape[2] + 16), NAN, dtype=dtype, device=device)
    q = wide[1:-1, 1:, : case.q.shape[2]]
    q.copy_(case.q)
    out = zones.allocate(num_rows, shape.num_heads, shape.value_dim, dtype=dtype).fill_(NAN)
    planes = on_device(case.planes, device)
    found = function(q, among(case.kv_b, device), planes, among(case.page_row, device), case.start, SCALE, scratch, out)
    assert found is out
    zones.check()
    return out.cpu()


def check(case: Case, device, tokens=None, state_rows=None) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[case.q.dtype]
    if case.q.is_cpu and device.type == "cuda" and case.q.dtype == torch.float32:
        tolerance = 5e-3  # tensor cores round what they multiply
    found = run(case, device, tokens, state_rows)
    torch.testing.assert_close(found.double(), exact(case), rtol=tolerance, atol=tolerance)


@pytest.mark.each_value
@SHAPES
@DTYPES
@pytest.mark.parametrize(("num_rows", "start"), [(1, 0), (37, 0), (19, 150)], ids=["one", "prompt", "continued"])
def test_attend_up_projected_one_chunk_is_exact(device, shape, dtype, num_rows, start):
    check(make_case(shape, num_rows, start, dtype), device)


@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize(
    ("num_rows", "start"), [(300, 0), (150, 131), (1, 300), (40, 216)], ids=["prompt", "continued", "one row", "whole"]
)
def test_attend_up_projected_several_chunks_are_exact(device, shape, num_rows, start):
    """Rows that begin in the middle of a chunk, and rows that see nothing of the last."""
    check(make_case(shape, num_rows, start, torch.float32), device, tokens=CHUNK_STEP)


@for_each("start", [0, 131])
def test_attend_up_projected_small_state_batches_rows(device, start):
    """The first of a prompt see less of a chunk than those that come after them."""
    check(make_case(WHOLE, 150, start, torch.float32), device, tokens=CHUNK_STEP, state_rows=2 * 64)


@for_each("num_rows, start, tokens", [(5, 1500, None), (140, 1000, 2 * SPLIT_TOKENS)])
def test_attend_up_projected_split_chunks_are_exact(device, num_rows, start, tokens):
    check(make_case(WHOLE, num_rows, start, torch.float32, page_tokens=64), device, tokens=tokens)


def test_attend_up_projected_head_groups_are_exact(device):
    """Seventeen heads are two groups, and the second has one less."""
    shape = WHOLE._replace(num_heads=17)
    assert shape.group_heads(20) == 9
    check(make_case(shape, 20, 140, torch.float32), device, tokens=CHUNK_STEP)


@pytest.mark.each_value
@pytest.mark.parametrize("name", QUANTIZED_LATENTS)
@pytest.mark.parametrize("latent_dim", [64, 256])
def test_attend_up_projected_over_quantized_pages_is_exact(device, name, latent_dim):
    shape = WHOLE._replace(latent_dim=latent_dim)
    check(make_case(shape, 21, 30, torch.float32, name), device)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["auto", *QUANTIZED_LATENTS])
@pytest.mark.parametrize(("first", "count"), [(0, 40), (13, 9), (39, 1)], ids=str)
def test_gathered_latents_match_those_that_attention_reads(device, name, first, count):
    case = make_case(ODD._replace(latent_dim=144), 40, 0, torch.float32, name)
    token_W = torch.arange(first, first + count)
    slot_W = case.page_row[token_W // 16].long() * 16 + token_W % 16
    expected = read_latents(case.planes, slot_W, torch.float32)
    for gather, where in ((gather_latents_triton, device), (gather_latents_reference, CPU)):
        zones = RedZones(where)
        out = zones.allocate(count, 144 + 48).fill_(NAN)
        gather(on_device(case.planes, where), among(case.page_row, where), first, count, out)
        zones.check()
        assert same_bits(out.cpu(), expected)


@SHAPES
def test_attend_up_projected_reference_is_exact(shape):
    case = make_case(shape, 19, 30, torch.float32)
    found = run(case, CPU, function=attend_up_projected_reference)
    torch.testing.assert_close(found.double(), exact(case), rtol=1e-5, atol=1e-5)
    assert same_bits(run(case, CPU, function=attend_up_projected), found)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_attend_up_projected_nan_row_changes_no_other_row(device):
    case = make_case(WHOLE, 30, 200, torch.float32)
    clean = run(case, device, tokens=CHUNK_STEP)
    case.q[11] = NAN
    found = run(case, device, tokens=CHUNK_STEP)
    others = [row for row in range(30) if row != 11]
    assert found[11].isnan().all()
    assert same_bits(found[others], clean[others])


def test_attend_up_projected_refuses_wrong_shapes(device):
    case = make_case(WHOLE, 5, 10, torch.float32)
    with pytest.raises(AssertionError, match="a chunk has at least 128"):
        run(case, device, tokens=CHUNK_STEP - 1)
    case.kv_b = case.kv_b[:, :-16].contiguous()
    with pytest.raises(AssertionError, match="shape"):
        run(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [V2_LITE, GLM], ids=["V2-Lite", "GLM"])
@pytest.mark.parametrize(("num_rows", "start"), [(200, 0), (300, 1000)], ids=str)
@pytest.mark.parametrize("name", ["auto", *QUANTIZED_LATENTS])
def test_attend_up_projected_is_exact_at_model_sizes(device, shape, num_rows, start, name):
    case = make_case(shape, num_rows, start, torch.bfloat16, name, page_tokens=64)
    for tokens in (None, 512):
        found = run(case, device, tokens=tokens)
        expected = run(case, CPU, function=attend_up_projected_reference)
        error_TN = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert float(error_TN.max()) < 0.03, "of a head, where keys, values and weights are rounded to bfloat16"


@pytest.mark.gpu
def test_attend_up_projected_allocates_nothing(device):
    case = make_case(WHOLE, 200, 1200, torch.bfloat16, page_tokens=64)
    planes, q, kv_b = on_device(case.planes, device), case.q.to(device), case.kv_b.to(device)
    page_row, out = case.page_row.to(device), torch.empty(200, 2, 32, dtype=torch.bfloat16, device=device)
    scratch = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        for spec in expanded_specs(WHOLE, "bfloat16", 200, 1400)
    }
    assert_allocates_nothing(lambda: attend_up_projected(q, kv_b, planes, page_row, 1200, SCALE, scratch, out))

"""Absorbed attention to quantized latents: against its reference and float64 over what the pages hold, amid poison."""

from dataclasses import replace

import pytest
import torch

from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.latent.latent_attention import coded_blocks, latent_attention
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, read_latents, store_latents
from kernels.exactness import same_bits
from kernels.latent_cases import LatentCase, Scheduling, cut_work, latent_case
from kernels.latent_page_cases import QUANTIZED_LATENTS, make_latent_planes, on_device, tensors_of, unsplit_attention
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import assert_allocates_nothing
from red_zones import RedZones

# Numpy, on which the interpreter runs, warns of the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

FORMATS = pytest.mark.parametrize("name", QUANTIZED_LATENTS)
FEW_FORMATS = pytest.mark.parametrize("name", ["fp8_ds_mla", "turboquant_mla_4bit_r8"])
"""For what does not depend on how rotated elements are kept."""
TOLERANCE = {torch.float32: 3e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""For values around one: weights and queries are half precision."""
DECODE, MIXED = [(64, 1), (10, 1), (129, 1)], [(63, 1), (0, 17), (10, 3), (64, 1), (0, 1)]


def quantized(case: LatentCase, name: str) -> tuple[LatentCase, LatentPlanes]:
    """Pages of the format, poison where no token lies; and the case with what they hold in place of its tokens."""
    rope_dim = case.plane_SX.shape[1] - case.latent_dim
    num_pages = len(case.plane_SX) // case.page_tokens
    zones = RedZones(torch.device("cpu"))
    planes = make_latent_planes(name, case.latent_dim, rope_dim, case.page_tokens, num_pages, zones)
    tokens = []
    for pages, token_SX in zip(case.pages, case.tokens, strict=True):
        position = torch.arange(len(token_SX))
        slot_S = torch.tensor(pages)[position // case.page_tokens] * case.page_tokens + position % case.page_tokens
        store_latents(planes, slot_S, token_SX[:, : case.latent_dim], token_SX[:, case.latent_dim :])
        tokens.append(read_latents(planes, slot_S, torch.float32))
    return replace(case, tokens=tokens), planes


def attended(
    case: LatentCase,
    planes: LatentPlanes,
    work: TileWork,
    num_rows: int,
    max_partials: int,
    device,
    function,
    num_sms=1,
) -> torch.Tensor:
    """Everything that is written is NaN before and between red zones; so are queries of padding."""
    zones = RedZones(device)
    num_heads, latent_dim, dtype = case.num_heads, case.latent_dim, case.q_TNX.dtype
    out_TNL = zones.allocate(num_rows, num_heads, latent_dim, dtype=dtype).fill_(NAN)
    partial_out_CX = zones.allocate(max_partials, num_heads * latent_dim).fill_(NAN)
    partial_lse_CH = zones.allocate(max_partials, num_heads).fill_(NAN)
    padding = torch.full((num_rows - len(case.q_TNX), *case.q_TNX.shape[1:]), NAN, dtype=dtype)
    q_TNX = amid(torch.cat((case.q_TNX, padding)), device)
    table_NP = case.page_table().to(device)
    held = on_device(planes, device)
    call = LatentCall(q_TNX, held, table_NP, case.scale, partial_out_CX, partial_lse_CH, out_TNL, num_sms)
    result = function(call, work)
    assert result is out_TNL, "the output is the one that was given"
    zones.check()
    return out_TNL.cpu()


def judge(case: LatentCase, name: str, work: TileWork, num_rows: int, max_partials: int, device, num_sms: int) -> None:
    case, planes = quantized(case, name)
    filled, tolerance, exact = len(case.q_TNX), TOLERANCE[case.q_TNX.dtype], case.exact()
    arguments = (case, planes, work, num_rows, max_partials, device)
    for written in (
        attended(*arguments, latent_attention, num_sms),
        attended(*arguments, unsplit_attention),
    ):
        torch.testing.assert_close(written[:filled].double(), exact, rtol=tolerance, atol=tolerance)
        assert same_bits(written[filled:], torch.zeros_like(written[filled:])), "padding is zeros"


def judge_step(case: LatentCase, name: str, scheduling: Scheduling, device, dtype, num_padding: int = 0) -> None:
    case, num_rows = replace(case, q_TNX=case.q_TNX.to(dtype)), len(case.q_TNX) + num_padding
    work = scheduling.work(case, num_rows, device)
    judge(case, name, work, num_rows, scheduling.max_partials, device, scheduling.num_sms)


def judge_cut(case: LatentCase, name: str, splits: int, large: bool, device, dtype, num_padding: int = 0) -> None:
    case, num_rows = replace(case, q_TNX=case.q_TNX.to(dtype)), len(case.q_TNX) + num_padding
    work, num_partials = cut_work(case, splits, large, num_rows, device)
    judge(case, name, work, num_rows, num_partials, device, num_sms=2)


@pytest.fixture
def widest(device) -> torch.dtype:
    """Float32 in the interpreter; half precision on a GPU, which would multiply float32 as tf32."""
    return torch.float32 if device.type == "cpu" else torch.float16


@pytest.mark.each_pair
@FORMATS
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("scheduling", [Scheduling(num_sms=4), Scheduling(captured=True)], ids=["split", "captured"])
def test_quantized_latent_attention_is_exact_for_scheduled_steps(device, widest, name, rows, scheduling) -> None:
    judge_step(latent_case(rows), name, scheduling, device, widest, num_padding=2)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_quantized_latent_attention_half_precision_is_exact(device, name, dtype, large) -> None:
    case = latent_case([(64, 1), (10, 3), (0, 9)], 5, 64, 32)
    judge_cut(case, name, 2, large, device, dtype, num_padding=2)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("num_heads", [1, 20, 65], ids=lambda heads: f"{heads} heads")
def test_quantized_latent_attention_is_exact_for_any_head_count(device, widest, name, num_heads) -> None:
    for large in (False, True):
        judge_cut(latent_case([(33, 2)], num_heads, 16), name, 1, large, device, widest)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(48, 32), (192, 24), (512, 64)], ids=lambda size: str(size))
def test_quantized_latent_attention_is_exact_for_every_width(device, widest, name, latent_dim, rope_dim) -> None:
    for large in (False, True):
        judge_cut(latent_case([(69, 1), (30, 2)], 2, latent_dim, rope_dim), name, 1, large, device, widest)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("page_tokens", [1, 16, 128], ids=lambda size: f"pages of {size}")
def test_quantized_latent_attention_is_exact_for_every_page_size(device, widest, name, page_tokens) -> None:
    judge_cut(latent_case([(99, 1), (60, 3)], page_tokens=page_tokens), name, 2, False, device, widest)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("num_tokens", [1, 64, 65])
def test_quantized_latent_attention_is_exact_for_every_length(device, widest, name, num_tokens) -> None:
    count = min(5, num_tokens)
    case = latent_case([(num_tokens - 1, 1), (num_tokens - count, count)])
    judge_cut(case, name, 1, False, device, widest)
    judge_cut(case, name, 4, True, device, widest, num_padding=MERGE_BY_HEAD_ROWS)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("height", [16, 32])
def test_quantized_latent_blocks_fit_into_shared_memory(name, height) -> None:
    """Hopper takes the largest blocks; Ada smaller ones if needed."""
    planes = make_latent_planes(name, 512, 64, 64, 1, RedZones(torch.device("cpu")))
    large, small = (coded_blocks(height, planes, kib * 1024) for kib in (227, 99))
    assert large.tokens >= small.tokens
    row_bytes = sum(plane[0].numel() for plane in tensors_of(planes))
    assert small.tokens * (small.num_stages - 1) * row_bytes + height * 2 * 576 < 99 * 1024


@FEW_FORMATS
def test_quantized_latent_attention_mixed_magnitudes_are_exact(device, widest, name) -> None:
    """A token a thousand times larger than others beside it: half precision holds what its scale multiplies."""
    case = latent_case([(150, 1)], 4, 64, 16, q_scale=0.03)
    case.tokens[0][:, :64] *= torch.where(torch.arange(151) % 7 == 3, 300.0, 0.3).unsqueeze(1)
    case = replace(case, q_TNX=case.q_TNX.to(widest))
    work, num_partials = cut_work(case, 2, False, 1, device)
    held, planes = quantized(case, name)
    out = attended(held, planes, work, 1, num_partials, device, latent_attention)
    exact = held.exact()
    assert float((out.double() - exact).norm() / exact.norm()) < 3e-3


@FEW_FORMATS
def test_quantized_latent_attention_clamps_huge_queries(device, name) -> None:
    """To its largest number: an infinite query would make NaN of every score."""
    case, planes = quantized(latent_case([(20, 1)]), name)
    work, _ = cut_work(case, 1, False, 1, device)
    columns = slice(None) if name.endswith("_r8") else slice(case.latent_dim)
    outs = []
    for size in (65504.0, 1e6):
        case.q_TNX[..., columns] = case.q_TNX[..., columns].sign() * size
        outs.append(attended(case, planes, work, 1, 1, device, latent_attention))
    assert bool(outs[0].isfinite().all())
    assert same_bits(*outs)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [16, 20, 40, 128])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_quantized_latent_attention_is_exact_at_full_size(device, name, num_heads, large) -> None:
    judge_cut(latent_case([(700, 1), (250, 5)], num_heads, 512, 64), name, 2, large, device, torch.bfloat16)
    judge_cut(
        latent_case([(63, 1), (64, 1), (0, 19), (5, 2)], num_heads, 512, 64), name, 1, large, device, torch.float16
    )


@pytest.mark.gpu
@FORMATS
def test_quantized_latent_attention_allocates_nothing(device, name) -> None:
    case, planes = quantized(latent_case([(200, 1)], 16, 512, 64).rounded(torch.bfloat16), name)
    work, num_partials = cut_work(case, 2, False, 1, device)
    held, table_NP, q_TNX = on_device(planes, device), case.page_table().to(device), case.q_TNX.to(device)
    partial_out_CX = torch.empty(num_partials, 16 * 512, device=device)
    partial_lse_CH = torch.empty(num_partials, 16, device=device)
    out_TNL = torch.empty(1, 16, 512, dtype=torch.bfloat16, device=device)
    outputs = (partial_out_CX, partial_lse_CH, out_TNL)
    call = LatentCall(q_TNX, held, table_NP, case.scale, *outputs, num_sms=2)
    assert_allocates_nothing(lambda: latent_attention(call, work))

"""Absorbed attention to chosen tokens: against float64 and its reference in every format, amid poison and red zones."""

import pytest
import torch

from holdfast.kernels.attention.split_kv import MERGE_BY_HEAD_ROWS
from holdfast.kernels.attention.tile_work import TileWork
from holdfast.kernels.latent.latent_attention import (
    latent_attention_reference,
    sparse_attention,
    sparse_attention_reference,
)
from holdfast.kernels.latent.latent_geometry import MAX_SPLITS, low_splits, sparse_partials, sparse_splits
from holdfast.kernels.latent.latent_planes import LatentCall, LatentPlanes, read_latents
from holdfast.kernels.latent.latent_tiles import SPREAD_MERGE_ROWS, ListSplits, row_form
from kernels.exactness import same_bits
from kernels.latent_page_cases import QUANTIZED_LATENTS, on_device
from kernels.sparse_cases import BEFORE, SparseCase, run_sparse, sparse_case
from kernels.tiled_cases import NAN
from kernels.triton_cases import assert_allocates_nothing

# Numpy, on which the interpreter runs, warns of the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

FORMATS = pytest.mark.parametrize("name", ["plain", *QUANTIZED_LATENTS])
FEW_FORMATS = pytest.mark.parametrize("name", ["plain", "fp8_ds_mla", "turboquant_mla_4bit_r8"])
"""For what does not depend on how rotated elements are kept."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
QUANTIZED_TOLERANCE = {torch.float32: 3e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""For values around one: over codes, queries and weights are half precision."""
CONTEXTS = [100, 0, 37, 33, 7, 0]
"""Longer than the lists of 33 places, not choosing, as long, shorter."""


@pytest.fixture
def widest(device) -> torch.dtype:
    """Float32 in the interpreter; half precision on a GPU, which would multiply float32 as tf32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def judge(case: SparseCase, device, num_sms: int = 1) -> torch.Tensor:
    """Against plain attention in float64 to what the pages hold; rows that do not choose stay as they are."""
    out, exact, chooses = run_sparse(case, device, num_sms), case.exact(), case.num_tokens_T > 0
    tolerance = (TOLERANCE if case.planes.kind == "plain" else QUANTIZED_TOLERANCE)[case.q_TNX.dtype]
    torch.testing.assert_close(out[chooses].double(), exact[chooses], rtol=tolerance, atol=tolerance)
    assert (out[~chooses] == BEFORE).all(), "rows that do not choose stay as they are"
    return out


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("num_sms", [1, 9], ids=["whole", "split"])
def test_sparse_attention_rows_attend_to_their_lists(device, widest, name, num_sms) -> None:
    judge(sparse_case(CONTEXTS, 133, name, dtype=widest), device, num_sms)


@FORMATS
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_sparse_attention_half_precision_is_exact(device, name, dtype) -> None:
    judge(sparse_case([150, 0, 40], 70, name, 5, 64, 32, dtype=dtype), device, num_sms=3)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("num_heads", [1, 20, 65], ids=lambda heads: f"{heads} heads")
def test_sparse_attention_is_exact_for_every_head_count(device, widest, name, num_heads) -> None:
    """Also those that leave places of a block, or of the last one, empty."""
    judge(sparse_case([40], 20, name, num_heads, 16, dtype=widest), device)


@pytest.mark.parametrize(
    ("name", "latent_dim"),
    [
        ("fp8_ds_mla", 256),
        pytest.param("turboquant_mla_4bit", 64, marks=pytest.mark.slow),
        ("turboquant_mla_4bit_r8", 64),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("num_heads", [66], ids=lambda heads: f"{heads} heads")
def test_sparse_attention_high_tiles_over_codes_are_exact(device, widest, name, latent_dim, num_heads) -> None:
    """Up to 64 heads, split, with partial last blocks of tokens and heads."""
    case = sparse_case([150, 0, 3], 70, name, num_heads, latent_dim, 32, dtype=widest)
    judge(case, device, num_sms=8)


def test_sparse_attention_distant_scales_of_a_token_are_exact(device, widest) -> None:
    """A tile of a latent a million times smaller than its neighbour is lost beside it, not in the way."""
    case = sparse_case([40], 20, "fp8_ds_mla", 40, 256, 16, dtype=widest, q_scale=0.5)
    scales_S2 = case.planes.rows_SX[:, 256:264].view(torch.float32)
    tokens = case.tokens_TK[0].long()
    slots_S = case.table_NP[0, tokens // 16].long() * 16 + tokens % 16
    scales_S2[slots_S, 1] *= torch.where(torch.arange(20) % 3 == 0, 1e-6, 1.0)
    case.latents[0][tokens] = read_latents(case.planes, slots_S, torch.float32)
    judge(case, device)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize(("latent_dim", "rope_dim"), [(48, 32), (192, 24), (512, 64)], ids=lambda size: str(size))
def test_sparse_attention_is_exact_for_every_width(device, widest, name, latent_dim, rope_dim) -> None:
    judge(sparse_case([80], 40, name, 2, latent_dim, rope_dim, dtype=widest), device, num_sms=1)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("page_tokens", [1, 64], ids=lambda size: f"pages of {size}")
def test_sparse_attention_is_exact_for_every_page_size(device, widest, name, page_tokens) -> None:
    judge(sparse_case([200, 60], 65, name, 2, page_tokens=page_tokens, dtype=widest), device)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("top_k", [1, 63, 64, 65])
def test_sparse_attention_is_exact_for_every_list_length(device, widest, name, top_k) -> None:
    judge(sparse_case([200, top_k, 1], top_k, name, 2, dtype=widest), device, num_sms=4)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("num_heads", [2, 40], ids=["low tiles", "high tiles"])
def test_sparse_attention_lists_of_many_blocks_are_exact(device, widest, name, num_heads) -> None:
    """In one split: lists are read several blocks ahead."""
    case = sparse_case([400, 380], 330, name, num_heads, 128 if num_heads == 40 else 16, dtype=widest)
    judge(case, device, num_sms=1)


@pytest.mark.each_value
@FEW_FORMATS
@pytest.mark.parametrize("num_padding", [0, MERGE_BY_HEAD_ROWS, SPREAD_MERGE_ROWS], ids=lambda n: f"{n} padded")
def test_sparse_attention_empty_splits_weigh_nothing(device, widest, name, num_padding) -> None:
    """Rows of few tokens, with every shape of the merge, which skips padding."""
    case = sparse_case([300, 3, 129, *num_padding * [0]], 256, name, 2, 16, dtype=widest)
    judge(case, device, num_sms=150)


@FORMATS
def test_sparse_attention_reference_attends_to_the_list(name) -> None:
    case = sparse_case(CONTEXTS, 33, name)
    out, exact = run_sparse(case, torch.device("cpu"), function=sparse_attention_reference), case.exact()
    chooses = case.num_tokens_T > 0
    torch.testing.assert_close(out[chooses].double(), exact[chooses], rtol=1e-5, atol=1e-5)
    assert (out[~chooses] == BEFORE).all(), "rows that do not choose stay as they are"


@FORMATS
def test_sparse_attention_over_all_tokens_equals_dense(device, widest, name) -> None:
    """As the reference of the dense kernel has it, over the same pages."""
    case = sparse_case([20, 9], 32, name, dtype=widest)
    expected, tolerance = dense(case), QUANTIZED_TOLERANCE[widest]
    reference = run_sparse(case, torch.device("cpu"), function=sparse_attention_reference)
    torch.testing.assert_close(reference, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run_sparse(case, device), expected, rtol=tolerance, atol=tolerance)


@FEW_FORMATS
def test_sparse_attention_follows_no_place_without_a_token(device, widest, name) -> None:
    """Sentinels in a list, and positions past the context, are never looked up in the table."""
    case = sparse_case([90, 50, 70], 70, name, 2, 16, dtype=widest)
    case.tokens_TK[0, ::3] = -1
    case.tokens_TK[1, :] = -1
    without = run_sparse(case, device, num_sms=6)
    case.tokens_TK[0, ::3] = torch.tensor([-1, 2**30, 90, -(2**31)], dtype=torch.int32).repeat(6)
    assert same_bits(run_sparse(case, device, num_sms=6), without)
    case.tokens_TK[0, ::3] = -1
    exact = case.exact()
    torch.testing.assert_close(without[0].double(), exact[0], rtol=3e-3, atol=3e-3)
    assert not without[1].any(), "a list without tokens gives zeros"


@FEW_FORMATS
def test_sparse_attention_is_batch_invariant(device, widest, name) -> None:
    """In steps of as many rows; twice, too."""
    case = sparse_case([90, 80, 0, 70], 66, name, 2, 16, dtype=widest)
    out = run_sparse(case, device, num_sms=4)
    assert same_bits(out, run_sparse(case, device, num_sms=4))
    case.num_tokens_T[:3] = torch.tensor([0, 80, 0])
    assert same_bits(out[3], run_sparse(case, device, num_sms=4)[3])


def dense(case: SparseCase) -> torch.Tensor:
    tiles = [
        (int(table_row), row, 1, int(context) - 1, 0, int(context), -1, 1)
        for row, (table_row, context) in enumerate(zip(case.table_rows_T, case.num_tokens_T, strict=True))
    ]
    tiles_X8 = torch.tensor([(len(tiles), *7 * [0]), *tiles], dtype=torch.int32)
    work = TileWork(tiles_X8, torch.empty(0, 2, dtype=torch.int32), True, False, has_merge=False)
    out_TNL = torch.full((*case.q_TNX.shape[:2], case.planes.latent_dim), NAN, dtype=case.q_TNX.dtype)
    nothing = torch.empty(0)
    call = LatentCall(case.q_TNX, case.planes, case.table_NP, case.scale, nothing, nothing, out_TNL, 1)
    return latent_attention_reference(call, work)


@pytest.mark.each_value
@pytest.mark.parametrize("num_sms", [1, 20, 132, 160])
@pytest.mark.parametrize("num_heads", [1, 16, 20, 64, 65, 128])
def test_sparse_partials_suffice_for_every_number_of_rows(num_heads, num_sms) -> None:
    most = 0
    for num_rows in range(1, 600):
        splits = sparse_splits(num_rows, num_heads, num_sms)
        assert 1 <= splits <= MAX_SPLITS
        most = max(most, num_rows * splits if splits > 1 else 0)
        assert most <= sparse_partials(num_rows, num_heads)
    assert sparse_partials(600, num_heads) * num_heads <= 4 * 132 * 64


def test_sparse_splits_of_few_rows_fill_the_gpu() -> None:
    assert [sparse_splits(num_rows, 16, 132) for num_rows in (1, 16, 32, 64, 264, 265)] == [32, 17, 9, 5, 1, 1]
    assert [sparse_splits(num_rows, 64, 132) for num_rows in (1, 8, 32, 66, 132, 133)] == [32, 11, 4, 2, 1, 2]
    assert [sparse_splits(num_rows, 128, 132) for num_rows in (1, 16, 32, 64, 67, 1024)] == [32, 4, 2, 1, 2, 1]


def test_low_splits_fill_the_gpu_once() -> None:
    """A program has a multiprocessor for itself: no more of them than there are, unless there have to be."""
    assert [low_splits(num_rows, 16, 2048, 132, 128) for num_rows in (1, 8, 32, 64, 132, 133)] == [16, 16, 4, 2, 1, 2]
    for num_rows in range(1, 600):
        assert 1 <= low_splits(num_rows, 16, 2048, 132, 128) <= sparse_splits(num_rows, 16, 132)


def list_call(num_rows: int, partial_lse_CH: torch.Tensor) -> LatentCall:
    """Return a call whose queries and partials alone matter."""
    q_TNX, nothing = torch.empty(num_rows, 16, 0), torch.empty(0)
    planes = LatentPlanes("plain", 32, 16, 16, nothing)
    return LatentCall(q_TNX, planes, nothing, 1.0, nothing, partial_lse_CH, nothing, 132)


def test_list_splits_are_whole_blocks_and_never_empty() -> None:
    partials = torch.empty(sparse_partials(300, 16), 16)
    for num_places in (1, 64, 100, 2048):
        for num_rows in (1, 3, 32, 40, 300):
            for block_tokens in (16, 64):
                splits = ListSplits.of(list_call(num_rows, partials), num_places, block_tokens)
                assert splits.places % block_tokens == 0
                assert (splits.num_splits - 1) * splits.places < num_places <= splits.num_splits * splits.places
                assert splits.num_splits <= sparse_splits(num_rows, 16, 132)


def test_list_splits_without_room_for_partials_raise() -> None:
    with pytest.raises(AssertionError, match="1024 partials of rows and heads, room for 1023"):
        ListSplits.of(list_call(2, torch.empty(1023)), 2048, 64)
    assert ListSplits.of(list_call(2, torch.empty(1024)), 2048, 64) == (32, 64)


def test_sparse_row_form_is_constant_for_many_rows() -> None:
    assert {row_form(num_rows).merges_side_by_side for num_rows in range(16, 300)} == {False}


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [16, 20, 40, 64, 100, 128], ids=lambda heads: f"{heads} heads")
def test_sparse_attention_is_exact_at_model_sizes(device, name, num_heads) -> None:
    """Lists of 2,048 tokens, whole and split, beside rows that do not choose."""
    case = sparse_case([5000, 0, 2049, 2100], 2048, name, num_heads, 512, 64, 64, torch.bfloat16, q_scale=1.0)
    for num_sms in (1, 132):
        judge(case, device, num_sms)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [16, 64, 100], ids=lambda heads: f"{heads} heads")
def test_sparse_attention_odd_lists_are_exact_on_gpu(device, name, num_heads) -> None:
    """Short lists, lists of less than a block, lists with holes, pages of any size, both half precisions."""
    for dtype, page_tokens, top_k in ((torch.float16, 1, 1), (torch.bfloat16, 16, 65), (torch.float16, 256, 330)):
        case = sparse_case([700, 0, 3, 64, 400], top_k, name, num_heads, 512, 64, page_tokens, dtype, q_scale=1.0)
        case.tokens_TK[0, 1::3] = -1
        case.tokens_TK[4, :32] = -1
        for num_sms in (1, 132):
            judge(case, device, num_sms)
        without = run_sparse(case, device, num_sms=132)
        case.tokens_TK[0, 1::6], case.tokens_TK[4, :7] = 2**30, 400
        assert same_bits(run_sparse(case, device, num_sms=132), without)
        case.tokens_TK[2, :] = -1
        assert not run_sparse(case, device, num_sms=132)[2].any(), "a list without tokens gives zeros"


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [16, 128], ids=lambda heads: f"{heads} heads")
def test_sparse_attention_allocates_nothing(device, name, num_heads) -> None:
    case = sparse_case([300, 0], 128, name, num_heads, 512, 64, 64, torch.bfloat16)
    held, table_NP, q_TNX = on_device(case.planes, device), case.table_NP.to(device), case.q_TNX.to(device)
    rows, tokens_TK, count = case.rows_on(device), case.tokens_TK.to(device), sparse_partials(2, num_heads)
    partials = torch.empty(count, num_heads * 512, device=device), torch.empty(count, num_heads, device=device)
    out_TNL = torch.empty(2, num_heads, 512, dtype=torch.bfloat16, device=device)
    call = LatentCall(q_TNX, held, table_NP, case.scale, *partials, out_TNL, 132)
    assert_allocates_nothing(lambda: sparse_attention(call, rows, tokens_TK))


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [16, 128], ids=lambda heads: f"{heads} heads")
def test_sparse_attention_graph_serves_any_lengths(device, name, num_heads) -> None:
    """Captured where no row chooses; replayed where all do, and where some do: as launched, to the bit."""
    case = sparse_case([300, 150, 129], 128, name, num_heads, 512, 64, 64, torch.bfloat16)
    held, table_NP, q_TNX = on_device(case.planes, device), case.table_NP.to(device), case.q_TNX.to(device)
    rows, tokens_TK, count = case.rows_on(device), case.tokens_TK.to(device), sparse_partials(3, num_heads)
    partials = torch.empty(count, num_heads * 512, device=device), torch.empty(count, num_heads, device=device)
    out_TNL = torch.empty(3, num_heads, 512, dtype=torch.bfloat16, device=device)

    def step() -> None:
        sparse_attention(LatentCall(q_TNX, held, table_NP, case.scale, *partials, out_TNL, 132), rows, tokens_TK)

    rows.num_tokens_T[:3] = 0
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for contexts in ((300, 150, 129), (0, 150, 0), (300, 0, 129)):
        rows.num_tokens_T[:3] = torch.tensor(contexts, dtype=torch.int32)
        outs = []
        for run in (step, graph.replay):
            out_TNL.fill_(BEFORE)
            run()
            outs.append(out_TNL.cpu())
        assert same_bits(*outs)
        assert [bool((out == BEFORE).all()) for out in outs[0]] == [context == 0 for context in contexts]

"""Compressed attention: against float64 and its reference in every format, around every boundary of window, ratio and list, amid poison and red zones."""

from dataclasses import replace

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.write_kv import Rotary
from holdfast.kernels.latent.compressed_attention import compressed_attention, compressed_attention_reference
from holdfast.kernels.latent.compressed_scopes import MERGED_SPLITS, CompressedCall
from holdfast.kernels.latent.latent_geometry import ENTRY_SPLITS, compressed_partials, compressed_splits
from kernels.compressed_cases import PADDING, CompressedCase, Sizes, compressed_case, run_compressed, scopes_on
from kernels.exactness import same_bits
from kernels.triton_cases import assert_allocates_nothing

# Numpy, on which the interpreter runs, warns of the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")

FORMATS = pytest.mark.parametrize("name", ["plain", "fp8_ds_v4"])
FOUR_BITS = "turboquant_mla_4bit"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
AROUND = [0, 18, PADDING, 19, 20, 21, 39, 40, 41, 90]
"""Below, at and behind a window of 20, a list of 10 entries of 4 tokens, a page."""


@pytest.fixture
def widest(device) -> torch.dtype:
    """Float32 in the interpreter; half precision on a GPU, which would multiply float32 as tf32."""
    return torch.float32 if device.type == "cpu" else torch.float16


def sizes_of(name: str, **values: int) -> Sizes:
    """Tiles of 64 elements have a scale each in fp8."""
    return replace(Sizes(), name=name, **({} if name == "plain" else {"head_dim": 72}), **values)


def judge(case: CompressedCase, device, num_sms: int = 1) -> torch.Tensor:
    """Against plain attention in float64 to what the pages hold; padding comes out as zeros."""
    out, tolerance = run_compressed(case, device, num_sms), TOLERANCE[case.q_TND.dtype]
    torch.testing.assert_close(out.double(), case.exact(), rtol=tolerance, atol=tolerance)
    assert not out[case.positions_T < 0].any(), "padded rows are zeros"
    return out


@pytest.mark.each_pair
@FORMATS
@pytest.mark.parametrize("scope", [{"ratio": 0}, {"ratio": 8}, {"top_k": 10}], ids=["window", "all", "chosen"])
@pytest.mark.parametrize("num_sms", [1, 40], ids=["whole", "split"])
def test_compressed_attention_rows_attend_to_both_scopes(device, widest, name, scope, num_sms) -> None:
    judge(compressed_case(AROUND, sizes_of(name, **scope), widest), device, num_sms)


@for_each("head_dim, num_sms", [(72, 1), (56, 9)])
def test_compressed_attention_over_4_bit_codes_is_exact(device, widest, head_dim, num_sms) -> None:
    """In the rotated space, where queries are and outputs stay."""
    sizes = replace(sizes_of(FOUR_BITS, top_k=10, num_heads=5), head_dim=head_dim)
    judge(compressed_case(AROUND, sizes, widest), device, num_sms)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("num_heads", [1, 20, 66], ids=lambda heads: f"{heads} heads")
def test_compressed_attention_is_exact_for_every_head_count(device, widest, name, num_heads) -> None:
    """Also those that leave places of a block, or of the last one, empty."""
    judge(compressed_case([30, PADDING, 3], sizes_of(name, num_heads=num_heads), widest), device, num_sms=7)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize(("window", "pages"), [(1, (1, 1)), (16, (16, 8)), (17, (64, 2)), (128, (32, 64))], ids=str)
def test_compressed_attention_is_exact_for_every_window_and_page(device, widest, name, window, pages) -> None:
    sizes = sizes_of(name, window=window, window_page=pages[0], entries_page=pages[1])
    positions = [0, window - 1, window, 2 * window + 15, 70, 200]
    judge(compressed_case(positions, sizes, widest), device, num_sms=9)


@FORMATS
def test_compressed_attention_merge_skips_empty_splits(device, widest, name) -> None:
    """Splits are chosen for long rows: most splits of a short one are never written."""
    positions = [1500, 3, PADDING, 260]
    assert compressed_splits(4, 3, 132) > 8
    judge(compressed_case(positions, sizes_of(name, ratio=2), widest), device, num_sms=132)


@pytest.mark.each_value
@FORMATS
@pytest.mark.parametrize("num_padding", [9, 65], ids=lambda n: f"{n} padded")
def test_compressed_attention_merge_of_every_shape_is_exact(device, widest, name, num_padding) -> None:
    """Merge 11 rows also with more splits than fit at once; the last split has the largest score."""
    sizes = sizes_of(name, num_heads=2, ratio=2)
    case = compressed_case([800, *num_padding * [PADDING], 129], sizes, widest)
    case.q_TND[0] = case.seen[0][-1].to(widest)
    assert compressed_splits(11, 2, 600) > MERGED_SPLITS
    judge(case, device, num_sms=600)


@FORMATS
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=["float16", "bfloat16"]
)
def test_compressed_attention_half_precision_is_exact(device, name, dtype) -> None:
    judge(compressed_case([100, PADDING, 40], sizes_of(name, top_k=12, num_heads=5), dtype), device, num_sms=3)


@FORMATS
def test_compressed_attention_extreme_sink_takes_all_or_nothing(device, widest, name) -> None:
    for num_sms in (1, 30):
        case = compressed_case([50], sizes_of(name), widest)
        case.sinks_N = torch.tensor([1e4, -1e4, -torch.inf])
        out = judge(case, device, num_sms)
        assert not out[0, 0].any(), "nothing is left of a row beside such a sink"


@FORMATS
def test_compressed_attention_follows_no_place_without_an_entry(device, widest, name) -> None:
    """Sentinels in a list, and entries that the row does not see, are never looked up in the table."""
    case = compressed_case([90, 60], sizes_of(name, top_k=9), widest)
    listed_TK = case.scopes.selected_TK
    assert listed_TK is not None
    keep_K = torch.arange(9) % 3 != 0
    listed_TK[0, ::3] = -1
    case.seen[0] = torch.cat((case.seen[0][:20], case.seen[0][20:][keep_K]))
    without = judge(case, device, num_sms=6)
    listed_TK[0, ::3] = torch.tensor([2**30, 22, -(2**31)], dtype=torch.int32)
    assert same_bits(run_compressed(case, device, num_sms=6), without)


@FORMATS
def test_compressed_attention_reference_matches_float64(name) -> None:
    for scope in ({"ratio": 0}, {"top_k": 10}):
        case = compressed_case(AROUND, sizes_of(name, **scope))
        out = run_compressed(case, torch.device("cpu"), function=compressed_attention_reference)
        torch.testing.assert_close(out.double(), case.exact(), rtol=1e-5, atol=1e-5)


@FORMATS
def test_compressed_attention_is_batch_invariant(device, widest, name) -> None:
    """In steps of as many rows."""
    sizes = sizes_of(name, top_k=10)
    case = compressed_case([90, 80, PADDING, 70], sizes, widest)
    out = run_compressed(case, device, num_sms=20)
    case.positions_T[:3] = torch.tensor([PADDING, PADDING, 80])
    case.table_rows_T[2] = 2
    assert same_bits(out[3], run_compressed(case, device, num_sms=20)[3])


@pytest.mark.each_value
@pytest.mark.parametrize("num_sms", [1, 20, 132, 160])
@pytest.mark.parametrize("num_heads", [1, 64, 65, 128])
def test_compressed_partials_suffice_for_every_number_of_rows(num_heads, num_sms) -> None:
    most = 0
    for num_rows in range(1, 600):
        splits = compressed_splits(num_rows, num_heads, num_sms)
        assert 1 <= splits <= ENTRY_SPLITS
        most = max(most, num_rows * splits if splits > 1 else 0)
        assert most <= compressed_partials(num_rows, num_heads)


def test_compressed_splits_of_few_rows_fill_the_gpu() -> None:
    for num_heads in (64, 128):
        assert compressed_splits(1, num_heads, 132) >= 16
        assert compressed_splits(256, num_heads, 132) <= 2


REAL = {"head_dim": 512, "rope_dim": 64, "window": 128, "window_page": 64, "entries_page": 64}
LONG = [5000, PADDING, 0, 62, 63, 127, 128, 2047, 2051, 4099, 130]
"""Around the window, and around lists of 512 entries of 4 tokens."""


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [3, 16, 64, 100, 128], ids=lambda heads: f"{heads} heads")
def test_compressed_attention_is_exact_at_model_sizes(device, name, num_heads) -> None:
    """Every kind of layer, whole and split."""
    for scope in ({"ratio": 0}, {"ratio": 128}, {"ratio": 4, "top_k": 512}):
        sizes = replace(Sizes(), name=name, num_heads=num_heads, **REAL, **scope)
        case = compressed_case(LONG, sizes, torch.bfloat16, q_scale=1.0)
        for num_sms in (1, 132):
            judge(case, device, num_sms)


def last_heads(case: CompressedCase, num_heads: int) -> CompressedCase:
    """A rank's share of a step."""
    q_TND, sinks_N = case.q_TND[:, -num_heads:].contiguous(), case.sinks_N[-num_heads:].contiguous()
    return replace(case, q_TND=q_TND, sinks_N=sinks_N, form_heads=case.q_TND.shape[1])


@FORMATS
@pytest.mark.parametrize("num_heads", [20, 72], ids=lambda heads: f"{heads} heads")
def test_compressed_attention_of_a_share_takes_the_form_of_all(device, widest, name, num_heads) -> None:
    case = compressed_case([90, PADDING, 30], sizes_of(name, top_k=10, num_heads=num_heads), widest)
    judge(last_heads(case, num_heads // 4), device, num_sms=20)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize(("num_heads", "num_ranks"), [(64, 2), (64, 4), (128, 2), (128, 4)])
def test_compressed_attention_of_a_share_has_bits_of_all_heads(device, name, num_heads, num_ranks) -> None:
    """What exact ranks rely on."""
    for scope in ({"ratio": 0}, {"ratio": 128}, {"ratio": 4, "top_k": 512}):
        sizes = replace(Sizes(), name=name, num_heads=num_heads, **REAL, **scope)
        case = compressed_case(LONG, sizes, torch.bfloat16, q_scale=1.0)
        own = num_heads // num_ranks
        share, whole = run_compressed(last_heads(case, own), device, 132), run_compressed(case, device, 132)
        assert same_bits(share, whole[:, -own:].contiguous())


@pytest.mark.gpu
@FORMATS
def test_compressed_attention_odd_pages_and_lists_are_exact(device, name) -> None:
    for dtype, pages, top_k in (
        (torch.float16, (1, 1), 7),
        (torch.bfloat16, (16, 2), 65),
        (torch.float16, (256, 64), 330),
    ):
        sizes = replace(Sizes(), name=name, num_heads=40, **REAL, ratio=4, top_k=top_k)
        sizes = replace(sizes, window_page=pages[0], entries_page=pages[1])
        case = compressed_case([3000, 4 * top_k + 3, PADDING, 4 * top_k + 2, 7], sizes, dtype, q_scale=1.0)
        for num_sms in (1, 132):
            judge(case, device, num_sms)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("num_heads", [16, 64, 128], ids=lambda heads: f"{heads} heads")
def test_compressed_attention_graph_serves_any_lengths(device, name, num_heads) -> None:
    """Captured with padding alone, replayed at any lengths: as launched, to the bit, and nothing is allocated."""
    sizes = replace(Sizes(), name=name, num_heads=num_heads, **REAL, ratio=4, top_k=128)
    case = compressed_case([3000, 700, 129], sizes, torch.bfloat16)
    scopes, rows, q_TND = scopes_on(case.scopes, device), case.rows_on(device), case.q_TND.to(device)
    rotary = Rotary(case.rotary.cos_TP.to(device), case.rotary.sin_TP.to(device))
    count = compressed_partials(3, num_heads)
    partial_out_CX = torch.empty(count, num_heads * 512, dtype=torch.float16, device=device)
    partials = partial_out_CX, torch.empty(count, num_heads, device=device)
    out_TND, sinks_N = torch.empty_like(q_TND), case.sinks_N.to(device)

    def step() -> None:
        call = CompressedCall(q_TND, scopes, rows, sinks_N, rotary, case.scale, *partials, out_TND, 132)
        compressed_attention(call)

    positions_T = rows.positions_T[:3].clone()
    rows.positions_T[:3] = PADDING
    assert_allocates_nothing(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for is_there in ((1, 1, 1), (0, 1, 0), (1, 0, 1)):
        rows.positions_T[:3] = torch.where(torch.tensor(is_there, device=device) > 0, positions_T, PADDING)
        outs = []
        for run in (step, graph.replay):
            out_TND.fill_(torch.nan)
            run()
            outs.append(out_TND.cpu())
        assert same_bits(*outs)
        assert [bool(out.any()) for out in outs[0]] == [there > 0 for there in is_there]

"""Attention over float32 pages, in C and in torch: against float64, alone as in company, amid poison."""

import random as chance

import pytest
import torch

from for_each import for_each
from holdfast.kernels.attention.paged_attention import Scoring, paged_attention, paged_attention_reference
from kernels.exactness import assert_as_exact_as_torch, island, num_threads, random, same_bits
from kernels.paged_cases import PagedCase, paged_case

pytestmark = pytest.mark.usefixtures("native")

MIXED = [(0, 1), (63, 1), (0, 65), (10, 3), (64, 1), (100, 17), (0, 64), (65, 1)]
"""Decode steps and prefills, whole and chunked, around the tile of 64 tokens."""


def judge(case: PagedCase) -> None:
    out = case.run(paged_attention)
    assert_as_exact_as_torch(out, case.run(paged_attention_reference), case.exact(), magnitude=4.0)


@for_each("head_dim", [2, 16, 24, 64, 80, 96, 128, 256])
def test_paged_attention_is_exact_for_every_head_dim(head_dim):
    judge(paged_case(MIXED, head_dim=head_dim))


@pytest.mark.each_value
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 48, 49, 71], ids=lambda group: f"{group} queries a key")
def test_paged_attention_is_exact_for_every_grouping(group, num_kv_heads):
    judge(paged_case([(0, 5), (70, 1), (60, 9)], group=group, num_kv_heads=num_kv_heads))


@for_each("page_tokens", [1, 4, 16, 256])
def test_paged_attention_is_exact_for_every_page_size(page_tokens):
    judge(paged_case(MIXED, page_tokens=page_tokens))


@pytest.mark.each_value
@pytest.mark.parametrize("window", [1, 2, 5, 63, 64, 65, 100, 1000], ids=lambda window: f"window of {window}")
@pytest.mark.parametrize("group", [1, 3, 7], ids=lambda group: f"{group} queries a key")
def test_paged_attention_is_exact_for_every_window(window, group):
    judge(paged_case([*MIXED, (190, 1), (120, 70)], window=window, group=group))


@for_each("num_tokens", [1, 2, 63, 64, 65, 127, 128, 129, 1000])
def test_paged_attention_is_exact_for_every_length(num_tokens):
    judge(paged_case([(num_tokens - 1, 1)], page_tokens=16))
    judge(paged_case([(max(0, num_tokens - 70), min(70, num_tokens))], page_tokens=16))


@for_each("seed", range(16))
def test_paged_attention_is_exact_for_random_steps(seed):
    dice = chance.Random(seed)
    rows = [
        (dice.choice([0, 0, dice.randrange(200)]), dice.choice([1, 1, 2, 3, 17, dice.randrange(1, 80)]))
        for _ in range(dice.randrange(1, 7))
    ]
    judge(
        paged_case(
            rows,
            head_dim=dice.choice([4, 16, 24, 32, 64, 80]),
            group=dice.choice([1, 2, 3, 4, 7, 12]),
            num_kv_heads=dice.choice([1, 2, 3, 5]),
            page_tokens=dice.choice([1, 2, 4, 16, 64]),
            window=dice.choice([None, None, 1, 5, 64, 100]),
            seed=seed,
            q_scale=dice.choice([0.1, 3.0, 30.0]),
        )
    )


def test_paged_attention_distant_scores_pick_one_token():
    case = paged_case([(0, 70)])
    case.q *= 1e4
    out = case.run(paged_attention)
    assert out.isfinite().all()
    assert_as_exact_as_torch(out, case.run(paged_attention_reference), case.exact(), magnitude=1e5)


@for_each(
    "group, head_dim, window",
    [(1, 16, None), (3, 24, None), (7, 16, 5), (3, 64, 64), (3, 16, 100), (71, 16, None), (1, 80, 1)],
)
def test_paged_attention_chunks_give_the_same_bits(group, head_dim, window):
    """Chunks that end beside every edge of a tile and of a task; slots beyond a chunk hold NaN while it runs."""
    num_tokens = 140
    whole = paged_case([(0, num_tokens)], head_dim, group, page_tokens=4, window=window)
    expected = whole.run(paged_attention)
    slots = [whole.pages[0][i // 4] * 4 + i % 4 for i in range(num_tokens)]
    pages, _ = whole.tables()
    for chunk in (1, 3, 5, 31, 63, 64, 65, 97, 139):
        k_plane, v_plane = torch.full_like(whole.k_plane, float("nan")), torch.full_like(whole.v_plane, float("nan"))
        for start in range(0, num_tokens, chunk):
            end = min(start + chunk, num_tokens)
            k_plane[slots[start:end]], v_plane[slots[start:end]] = (
                whole.k_plane[slots[start:end]],
                whole.v_plane[slots[start:end]],
            )
            sequences = torch.tensor([[0, end - start, start, 0]])
            out = paged_attention(
                whole.q[start:end], k_plane, v_plane, pages, sequences, 4, Scoring(whole.scale, window)
            )
            assert same_bits(out, expected[start:end]), f"{chunk=} {start=}"


@for_each("window", [None, 5, 64])
def test_paged_attention_is_batch_invariant(window):
    case = paged_case(MIXED, group=3, window=window)
    expected = case.run(paged_attention)
    dice = chance.Random(0)
    for threads in (1, 2):
        with num_threads(threads):
            assert same_bits(case.run(paged_attention), expected)
            for _ in range(20):
                order = dice.sample(range(len(MIXED)), dice.randrange(1, len(MIXED) + 1))
                out = case.run(paged_attention, order)
                for index in order:
                    rows = slice(case.row_starts[index], case.row_starts[index] + case.rows[index][1])
                    assert same_bits(out[rows], expected[rows]), f"{threads=} {order=} {index=}"


@for_each("page_tokens", [1, 2, 16, 256])
def test_paged_attention_page_order_and_size_give_the_same_bits(page_tokens):
    expected = paged_case(MIXED, page_tokens=4).run(paged_attention)
    for seed in (0, 1):
        case = paged_case(MIXED, page_tokens=page_tokens)
        other = paged_case(MIXED, page_tokens=page_tokens, seed=seed)  # another order of pages
        for index, (start, count) in enumerate(MIXED):
            for position in range(start + count):
                slot = other.pages[index][position // page_tokens] * page_tokens + position % page_tokens
                k, v = case.tokens[index]
                other.k_plane[slot], other.v_plane[slot] = k[position], v[position]
        other.q = case.q
        assert same_bits(other.run(paged_attention), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("group", [1, 3, 71])
@pytest.mark.parametrize("head_dim", [2, 16, 24])
@pytest.mark.parametrize("window", [None, 5])
def test_native_paged_attention_stays_within_its_buffers(native, guarded_host, group, head_dim, window):
    case = paged_case([(0, 1), (61, 9), (0, 66)], head_dim, group, num_kv_heads=2, window=window)
    expected = case.run(paged_attention)
    num_rows, num_heads, _ = case.q.shape
    pages, sequences = case.tables()
    q, k_plane, v_plane = island(case.q), island(case.k_plane), island(case.v_plane)
    out = guarded_host(num_rows, num_heads * head_dim)
    native.holdfast_paged_attention(
        q.data_ptr(),
        k_plane.data_ptr(),
        v_plane.data_ptr(),
        out.data_ptr(),
        pages.data_ptr(),
        sequences.data_ptr(),
        None,
        len(sequences),
        num_heads,
        2,
        head_dim,
        case.page_tokens,
        window or 0,
        case.scale,
        0.0,
    )
    assert same_bits(out, expected)
    assert out.isfinite().all()


@for_each("bad", [float("nan"), float("inf")])
def test_paged_attention_nonfinite_query_stays_in_its_row(bad):
    case = paged_case([(0, 7), (66, 1)])
    clean = case.run(paged_attention)
    for row in range(8):
        hurt = case.q.clone()
        hurt[row] = bad
        pages, sequences = case.tables()
        out = paged_attention(hurt, case.k_plane, case.v_plane, pages, sequences, 4, Scoring(case.scale))
        others = [other for other in range(8) if other != row]
        assert not out[row].isfinite().any()
        assert same_bits(out[others], clean[others])


@pytest.mark.each_value
@pytest.mark.parametrize("plane", ["k_plane", "v_plane"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("position", [3, 63, 64, 80, 89])
def test_paged_attention_nonfinite_token_reaches_later_rows_only(plane, bad, position):
    """Earlier rows may be shared as a cached prefix, so a later token must not touch them."""
    case = paged_case([(0, 90), (80, 1), (0, 30)], group=3)
    clean = case.run(paged_attention)
    slot = case.pages[0][position // 4] * 4 + position % 4
    getattr(case, plane)[slot] = bad
    out = case.run(paged_attention)
    assert same_bits(out[:position], clean[:position])
    assert same_bits(out[90:], clean[90:])
    assert not out[position].isfinite().all()


def test_paged_attention_window_hides_older_tokens():
    case = paged_case([(99, 1), (50, 40)], window=8)
    clean = case.run(paged_attention)
    for index, first_seen in ((0, 92), (1, 43)):
        for position in range(first_seen):
            slot = case.pages[index][position // 4] * 4 + position % 4
            case.k_plane[slot], case.v_plane[slot] = random(2, 16), random(2, 16, seed=1)
    assert same_bits(case.run(paged_attention), clean)


def test_paged_attention_many_query_heads_fit_the_stack():
    """As many heads for one key as a config may ask for: the working set of a task must not grow with them."""
    case = paged_case([(5, 1)], head_dim=512, group=4096, num_kv_heads=1)
    out = case.run(paged_attention)
    assert_as_exact_as_torch(out, case.run(paged_attention_reference), case.exact(), magnitude=4.0)


def test_paged_attention_half_planes_use_torch():
    case = paged_case([(0, 9), (30, 1)])
    case.k_plane, case.v_plane = case.k_plane.half(), case.v_plane.half()
    assert same_bits(case.run(paged_attention), case.run(paged_attention_reference))


@pytest.mark.parametrize(
    "function", [paged_attention, paged_attention_reference], ids=lambda function: function.__name__
)
def test_paged_attention_writes_only_its_result(guarded_host, function):
    case = paged_case([(0, 9), (30, 1)])
    pages, sequences = case.tables()
    arguments = (case.q, case.k_plane, case.v_plane, pages, sequences, case.page_tokens, Scoring(case.scale))
    alone = function(*arguments)
    out = guarded_host(10, 96).fill_(float("nan"))
    result = function(*arguments, out)
    assert result.data_ptr() == out.data_ptr()
    assert same_bits(result, alone)
    wide = torch.full((10, 120), float("nan"))
    apart = wide[:, 12:108]
    function(*arguments, apart)
    torch.testing.assert_close(apart, alone, rtol=1e-5, atol=1e-5)
    assert wide[:, :12].isnan().all()
    assert wide[:, 108:].isnan().all()

"""Tokens chosen by score: the K largest, ties to the lower position, in rising order, whatever else is in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.kernels.latent.latent_planes import SparseRows
from holdfast.kernels.latent.top_k_geometry import (
    BLOCK_ITEMS,
    TOP_K_FORM,
    TopKForm,
    num_warps,
    top_k_specs,
    unsupported_top_k,
)
from holdfast.kernels.latent.top_k_tokens import top_k_tokens, top_k_tokens_reference, top_k_tokens_triton
from kernels.exactness import random
from kernels.triton_cases import QUIET, amid_poison, assert_allocates_nothing

pytestmark = QUIET

INF, NAN = float("inf"), float("nan")
SMALL = TopKForm(block_items=256, chunk_tokens=128, sample_tokens=64)
"""Borders of chunks and blocks within a few hundred tokens, samples that mislead, and lists that overflow."""
NOWHERE = 2**26
"""Marks a position or a key that was not written."""


def rows_of(num_tokens, device="cpu"):
    lengths = torch.tensor(num_tokens, dtype=torch.int32, device=device)
    return SparseRows(torch.zeros_like(lengths), lengths)


def by_python(scores, num_tokens, k):
    """The definition, a row at a time: NaN after everything, then by score, then by position."""
    taken = []
    for row, length in zip(scores.tolist(), num_tokens, strict=True):
        order = sorted(range(length), key=lambda p: (row[p] != row[p], 0.0 if row[p] != row[p] else -row[p], p))
        chosen = sorted(order[:k])
        taken.append(chosen + [-1] * (k - len(chosen)))
    return taken


def by_reference(scores, num_tokens, k):
    out = torch.empty(len(num_tokens), k, dtype=torch.int32, device=scores.device)
    return top_k_tokens_reference(scores, rows_of(num_tokens, scores.device), out).tolist()


def make_scratch(allocate, num_rows, context, k, form):
    specs = top_k_specs(num_rows, context, k, form)
    return {spec.name: allocate(*spec.shape, dtype=torch.int32).fill_(NOWHERE) for spec in specs}


def chosen(allocate, device, scores, num_tokens, k, form=SMALL, scratch=None):
    """Run the kernels amid scores that they must not read."""
    num_rows, context = scores.shape
    scores = amid_poison(scores, device)
    for row, length in enumerate(num_tokens):
        scores[row, length:] = INF
    if scratch is None:
        scratch = make_scratch(allocate, num_rows, context, k, form)
    out = allocate(num_rows, k, dtype=torch.int32).fill_(NOWHERE)
    assert top_k_tokens_triton(scores, rows_of(num_tokens, device), out, scratch, form) is out
    return out.tolist()


SPECIAL = torch.tensor(
    [
        [0.0, -0.0, 0.0, -0.0, 1e-45, -1e-45],
        [NAN, -INF, INF, NAN, -INF, 3.4e38],
        [NAN, NAN, NAN, NAN, NAN, NAN],
        [2.0, 1.0, 2.0, 1.0, 2.0, 1.0],
        [-1.0, -2.0, -1.0, -2.0, -1.0, -2.0],
    ]
)


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 9], ids=lambda k: f"K{k}")
@pytest.mark.parametrize("length", [0, 1, 4, 6], ids=lambda length: f"{length} tokens")
def test_top_k_reference_matches_the_definition(k, length):
    lengths = [length] * len(SPECIAL)
    out = torch.full((len(SPECIAL), k), 77, dtype=torch.int32)
    assert top_k_tokens(SPECIAL, rows_of(lengths), out) is out
    assert out.tolist() == by_python(SPECIAL, lengths, k)


def every(period, size):
    return (torch.arange(size) % period == 0).float() + random(size) * 0.01


KINDS = {
    "random": random,
    "rising": lambda size: torch.arange(size).float(),
    "falling": lambda size: -torch.arange(size).float(),
    "equal": lambda size: torch.full((size,), -3.25),
    "two values": lambda size: (random(size) > 0).float(),
    "whole numbers": lambda size: (random(size) * 3).round(),
    "neighbours in bits": lambda size: (random(size).argsort().int() // 2 + 0x3F7FFF00).view(torch.float32),
    "denormal": lambda size: random(size) * 1e-42,
    "of any size": lambda size: random(size).sign() * (random(size, seed=1) * 30).exp(),
    "infinite and NaN": lambda size: torch.where(random(size) > 0.1, NAN, -INF).index_fill(0, torch.tensor([7]), INF),
    "NaN": lambda size: torch.full((size,), NAN),
    "any NaN": lambda size: torch.where(
        random(size) > 1,
        random(size, seed=1),
        torch.tensor([0x7F800001, -1, -0x7FFFFF]).int().view(torch.float32)[torch.arange(size) % 3],
    ),
    "zeros of both signs": lambda size: torch.where(random(size) > 0, 0.0, -0.0),
    "all in one place": lambda size: random(size).index_fill(0, torch.arange(40, 62), 50.0),
    "every 32nd": lambda size: every(32, size),
}
"""What may mislead: keys, bins, lists, or the sample."""


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_top_k_kernels_select_like_the_reference(device, guarded, kind):
    scores = kind(600).expand(2, 600)
    # The second is short, and looked through by one program.
    assert chosen(guarded, device, scores, [600, 77], 20) == by_reference(scores, [600, 77], 20)


@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 599, 600, 601], ids=lambda k: f"K{k}")
def test_top_k_tokens_matches_reference_for_any_k(device, guarded, k):
    scores = (random(1, 600) * 9).round()
    assert chosen(guarded, device, scores, [600], k) == by_reference(scores, [600], k)


@pytest.mark.parametrize("context", [100, 300], ids=lambda context: f"{context} tokens")
def test_top_k_above_every_context_takes_all_tokens(device, guarded, context):
    lengths = [context, 0, context - 1]
    scores = random(3, context)
    assert chosen(guarded, device, scores, lengths, 700) == by_reference(scores, lengths, 700)


def test_top_k_on_used_scratch_chooses_as_on_fresh_scratch(device, guarded):
    """Zeros, integers that are too large, and what a call with other scores left: no call may read any of it."""
    first, second = random(3, 600), random(3, 600, seed=1)
    lengths, others = [600, 257, 600], [600, 600, 258]
    for left in (0, 1, NOWHERE):
        scratch = make_scratch(guarded, 3, 600, 20, SMALL)
        for tensor in scratch.values():
            tensor.fill_(left)
        for scores, counts in ((first, lengths), (second, others), (second.roll(5, 1), lengths), (first, others)):
            wanted = by_reference(scores, counts, 20)
            assert chosen(guarded, device, scores, counts, 20, scratch=scratch) == wanted


def test_top_k_of_random_scores_lists_a_few_near_tokens(device, guarded):
    """Between K and a block of tokens are near: else a row is gone through whole, and that is slow."""
    scores, lengths = random(12, 1200) * torch.logspace(-3, 3, 12)[:, None], [1200, 600, 300] * 4
    scratch = make_scratch(guarded, 12, 1200, 20, SMALL)
    assert chosen(guarded, device, scores, lengths, 20, scratch=scratch) == by_reference(scores, lengths, 20)
    num_near = scratch["near limits"][:, 1].tolist()
    assert all(20 <= count <= 256 for count in num_near), num_near


def test_top_k_of_any_row_length_matches_reference(device, guarded):
    lengths = [0, 1, 15, 16, 17, 64, 65, 0, 256, 257, 300]
    scores = random(len(lengths), 300)
    assert chosen(guarded, device, scores, lengths, 16) == by_reference(scores, lengths, 16)


@pytest.mark.parametrize("first", [61, 125, 253], ids=lambda first: f"from {first}")
def test_top_k_ties_across_chunk_border_take_lower_positions(device, guarded, first):
    scores = torch.zeros(1, 300)
    scores[0, first : first + 8] = 1.0
    assert chosen(guarded, device, scores, [300], 5) == [list(range(first, first + 5))]


def test_top_k_is_batch_invariant(device, guarded):
    scores, lengths = (random(4, 300) * 2).round(), [300, 40, 0, 260]
    together = chosen(guarded, device, scores, lengths, 24)
    order = [2, 0, 3, 1]
    assert chosen(guarded, device, scores[order], [lengths[row] for row in order], 24) == [together[r] for r in order]
    for row in (0, 1):
        assert chosen(guarded, device, scores[row : row + 1], lengths[row : row + 1], 24) == together[row : row + 1]


def test_top_k_chunks_of_any_length_match_reference(device, guarded):
    scores = random(8, 1000)
    assert chosen(guarded, device, scores, [1000] * 8, 40) == by_reference(scores, [1000] * 8, 40)


def test_top_k_tokens_full_tie_list_takes_lower_positions(device, guarded):
    scores = torch.zeros(1, 600)
    scores[0, 100:356] = 1.0
    assert chosen(guarded, device, scores, [600], 64) == [list(range(100, 164))]


class Misled(TopKForm):
    """Asks a sample for a rank that is wrong."""

    def wanted(self, k: int) -> int:
        return 1 if self.sample_tokens == 64 else 10**6


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["random", "rising", "falling", "neighbours in bits", "NaN"])
@pytest.mark.parametrize("sample", [64, 128], ids=["too few", "too many"])
def test_top_k_misleading_sample_scans_the_whole_row(device, guarded, kind, sample):
    scores = KINDS[kind](1200).view(1, -1)
    found = chosen(guarded, device, scores, [1200], 50, Misled(*SMALL)._replace(sample_tokens=sample))
    assert found == by_reference(scores, [1200], 50)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["random", "equal", "two values", "every 32nd"])
@pytest.mark.parametrize(
    ("context", "k"), [(7000, 500), (BLOCK_ITEMS + 999, 70), (20000, 4096)], ids=["short", "long", "most tokens"]
)
def test_top_k_of_real_sizes_matches(device, guarded, kind, context, k):
    scores = KINDS[kind](context).view(1, -1)
    assert chosen(guarded, device, scores, [context], k, TOP_K_FORM) == by_reference(scores, [context], k)


@settings(max_examples=25)
@given(st.data())
def test_top_k_tokens_matches_definition_for_any_scores(device, data):
    length = data.draw(st.integers(1, 150))
    numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, INF, -INF, NAN]) | st.floats(width=32)
    few = data.draw(st.lists(numbers, min_size=1, max_size=40))
    scores = torch.tensor([[few[p * p % len(few)] for p in range(length)]])
    k, form = data.draw(st.sampled_from([1, 7, 20])), SMALL._replace(block_items=data.draw(st.sampled_from([64, 256])))

    def allocate(*shape, dtype):
        return torch.empty(shape, dtype=dtype, device=device)

    assert chosen(allocate, device, scores, [length], k, form) == by_python(scores, [length], k)


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 512, 1024, 2048])
@pytest.mark.parametrize("context", [100, BLOCK_ITEMS, BLOCK_ITEMS + 1, 163840, 2**20])
def test_top_k_scratch_is_small_beside_the_scores(k, context):
    num_bytes = sum(spec.num_bytes for spec in top_k_specs(64, context, k))
    assert num_bytes <= 64 * (2**16 + 99 + context // 512)
    assert sum(spec.num_bytes for spec in top_k_specs(0, context, k)) == 0


def test_top_k_form_sizes_are_known():
    """Blocks of 4 K and more, one token in 64 sampled, ranks between K and a full list, 16 items a thread."""
    form = TOP_K_FORM
    assert [form.block(k) for k in (1, 2048, 2049, 4096)] == [8192, 8192, 16384, 16384]
    assert [form.sample(context) for context in (1, 131072, 131073, 10**6)] == [2048, 2048, 4096, 16384]
    assert [form.wanted(k) for k in (1, 512, 2048, 4096)] == [513, 2048, 4096, 8192]
    assert [num_warps(items) for items in (32, 128, 256, 512, 2048, 4096, 8192, 2**15)] == [1, 1, 2, 4, 4, 8, 16, 16]
    shapes = [[spec.shape for spec in top_k_specs(3, context, 2048)] for context in (8192, 8193)]
    assert shapes == [[(0, 2), (0, 2, 2), (0, 8192), (0, 8192)], [(3, 2), (3, 2, 3), (3, 8192), (3, 8192)]]
    most = 1024 * 4096
    assert unsupported_top_k(4096, most) is unsupported_top_k(5000, 5000) is unsupported_top_k(9, 9) is None
    assert unsupported_top_k(4097, 5000) == "a row may choose up to 4096 tokens, not 4097"
    assert unsupported_top_k(9, most + 1) == f"a row may choose among up to {most} tokens, not {most + 1}"


def test_top_k_of_wrong_shapes_is_refused(device, guarded):
    scores, rows = torch.zeros(2, 400, device=device), rows_of([300, 300], device)
    out, scratch = guarded(2, 5, dtype=torch.int32), make_scratch(guarded, 2, 400, 5, SMALL)
    for wrong, reason in (
        ((scores.half(), rows, out, scratch), "must be float32"),
        ((scores, rows, out.long(), scratch), "must be int32"),
        ((scores.T[:2, :2], rows, out, scratch), "scores of a row must lie side by side"),
        ((scores, rows, guarded(5, 2, dtype=torch.int32).T, scratch), "positions of a row must lie side by side"),
        ((scores, rows_of([1], device), out, scratch), "a number a row"),
        ((scores, rows, out[:1], scratch), "a row for each of 2"),
        ((scores, rows, out, make_scratch(guarded, 1, 400, 5, SMALL)), "num_rows=2 exceeds the scratch for 1"),
        ((scores, rows, out, make_scratch(guarded, 2, 700, 99, SMALL)), "need .2, 256."),
        ((scores, rows, out, make_scratch(guarded, 2, 300, 5, SMALL)), "near chunks: .* need .2, 2, 4."),
    ):
        with pytest.raises(AssertionError, match=reason):
            top_k_tokens_triton(*wrong, SMALL)
    assert top_k_tokens_triton(scores[:0], rows_of([], device), out[:0], scratch, SMALL).shape == (0, 5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "context", "k"),
    [(1, 131072, 2048), (64, 131072, 2048), (64, 8192, 2048), (3, 2**20, 512), (300, 163840, 1024), (2, 40000, 1)],
    ids=lambda size: str(size),
)
def test_top_k_of_long_contexts_in_graph_matches_reference(device, guarded, num_rows, context, k):
    specs = top_k_specs(num_rows, context, k)
    scratch = {spec.name: guarded(*spec.shape, dtype=torch.int32).fill_(NOWHERE) for spec in specs}
    scores, out = guarded(num_rows, context), guarded(num_rows, k, dtype=torch.int32)
    rows = rows_of([context] * num_rows, device)
    scores.copy_(random(num_rows, context))
    assert_allocates_nothing(lambda: top_k_tokens(scores, rows, out, scratch))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top_k_tokens(scores, rows, out, scratch)
    expected = torch.empty_like(out)
    fills = (
        random(num_rows, context, seed=1),
        (random(num_rows, context) * 20).round(),
        torch.zeros(1, 1),
        -torch.arange(context).float(),
    )
    for turn, fill in enumerate(fills):
        scores.copy_(fill)
        lengths = (torch.arange(num_rows) * 7919 * turn + context * (turn != 1)) % (context + 1)
        rows.num_tokens_T.copy_(lengths)
        graph.replay()
        for first in range(0, num_rows, 16):
            part = slice(first, first + 16)
            cut = SparseRows(rows.table_rows_T[part], rows.num_tokens_T[part])
            top_k_tokens_reference(scores[part], cut, expected[part])
        assert torch.equal(out, expected)

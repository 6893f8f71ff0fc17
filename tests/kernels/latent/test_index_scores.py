"""Scores of the index over every kind of page: the kernel against its reference, and that only what a row sees is read and written."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from for_each import for_each
from holdfast.kernels.latent import index_scores as index_scores_module
from holdfast.kernels.latent.index_scores import (
    OPERAND_BYTES,
    TOKENS_AT_ONCE,
    choose_operands,
    index_blocks,
    index_scores,
    index_scores_reference,
    index_scores_triton,
    num_splits,
    pages_of_block,
)
from holdfast.kernels.latent.latent_planes import SparseRows
from holdfast.kernels.triton_compat import counting_compiles
from kernels.index_cases import (
    ScoreCase,
    amid_bytes,
    make_index_planes,
    make_score_case,
    planes_to,
    slots_of,
    store_keys,
)
from kernels.triton_cases import QUIET, amid_echoes, amid_poison, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET

FORMATS = ["float32", "float16", "fp8", pytest.param("bfloat16", marks=pytest.mark.gpu)]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "fp8": torch.float32}
UNTOUCHED = -7.0
RUNS = [
    (0, 128),
    (0, 129),
    (0, 130),
    (1, 5),
    (1, 6),
    (1, 7),
    (2, 0),
    (2, 33),
    (2, 34),
    (2, 35),
    (3, 131),
    (3, 9),
    (4, 7),
]
"""Rows of sequences as steps have them: pairs of which either row has a block more, pairs apart, and one row that does not choose."""


def scored(function, case: ScoreCase, device="cpu") -> torch.Tensor:
    """Rows apart amid poison, scores between red zones: what was left behind, on the CPU."""
    zones = RedZones(torch.device(device))
    out_TC = zones.allocate(len(case.q), case.num_columns + 2).fill_(UNTOUCHED)
    flat_TX = case.q.flatten(1)
    q_TX = amid_bytes(flat_TX, device) if case.planes.is_quantized else amid_poison(flat_TX, device)
    function(
        q_TX.view(case.q.shape),
        amid_poison(case.weights, device),
        planes_to(case.planes, device),
        case.pages.to(device),
        SparseRows(*(amid_echoes(numbers, device) for numbers in case.rows)),
        out_TC[:, : case.num_columns],
    )
    zones.check()
    return out_TC.cpu()


def judge(case: ScoreCase, device) -> torch.Tensor:
    """What tokens have that a row sees, within the rounding of sums; all else stays as it was."""
    mine_TC, theirs_TC = scored(index_scores_triton, case, device), scored(index_scores_reference, case)
    seen_TC = torch.arange(mine_TC.shape[1]) < case.rows.num_tokens_T[:, None]
    for scores_TC in (mine_TC, theirs_TC):
        assert bool((scores_TC[~seen_TC] == UNTOUCHED).all()), "a score was written that no row has"
        assert bool(scores_TC[seen_TC].isfinite().all()), "poison reached a score"
    # Products of e4m3 numbers are added up with fewer bits on a Hopper.
    step = 2**-10 if case.planes.is_quantized else 2**-17
    torch.testing.assert_close(mine_TC[seen_TC], theirs_TC[seen_TC], rtol=step, atol=step)
    return mine_TC


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("num_heads", "dim"), [(64, 128), (32, 128), (64, 64), (3, 48), (1, 16)])
def test_index_scores_match_reference_for_every_shape(device, name, num_heads, dim) -> None:
    judge(make_score_case([(0, 70), (1, 1), (2, 0), (2, 131)], num_heads, dim, name, dtype=DTYPES[name]), device)


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("page_tokens", [1, 16, 24, 64, 256])
def test_index_scores_match_reference_for_every_page_size(device, name, page_tokens) -> None:
    """Several to a block of tokens, several blocks to a page, and neither."""
    judge(make_score_case([(1, 300), (0, 17), (1, 299)], 4, 32, name, page_tokens, DTYPES[name]), device)


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
def test_index_scores_of_neighbouring_rows_match_reference(device, name) -> None:
    judge(make_score_case(RUNS, 8, 32, name, dtype=DTYPES[name]), device)


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
def test_index_scores_are_batch_invariant(device, name) -> None:
    case = make_score_case(RUNS, 8, 32, name, dtype=DTYPES[name])
    together_TC = scored(index_scores_triton, case, device)
    for row, (_, count) in enumerate(RUNS):
        only = slice(row, row + 1)
        alone = replace(
            case, q=case.q[only], weights=case.weights[only], rows=SparseRows(*(numbers[only] for numbers in case.rows))
        )
        wide = replace(alone, num_columns=case.num_columns + 500)
        for other in (alone, wide):
            assert torch.equal(scored(index_scores_triton, other, device)[0, :count], together_TC[row, :count])


@for_each("function", [index_scores_triton, index_scores_reference])
def test_index_scores_of_long_contexts_match_reference(device, function) -> None:
    """Several blocks a program, and several programs a row; in the reference, several blocks of tokens."""
    count = TOKENS_AT_ONCE + 3 if function is index_scores_reference else 900
    case = make_score_case([(0, count), (1, 513), (0, count - 1)], 2, 16, "float32", 64)
    where = "cpu" if function is index_scores_reference else device
    mine_TC = scored(function, case, where)
    for row, (i_table, num_tokens) in enumerate(zip(*(numbers.tolist() for numbers in case.rows), strict=True)):
        keys_SD = case.planes.rows_SD[slots_of(case, i_table, num_tokens)]
        wanted_S = torch.einsum("i,is->s", case.weights[row], (case.q[row] @ keys_SD.T).clamp(min=0))
        torch.testing.assert_close(mine_TC[row, :num_tokens], wanted_S, rtol=2**-17, atol=2**-17)


@for_each("name", ["float32", "fp8"])
def test_index_scores_at_block_edges_match_the_reference(device, name) -> None:
    """Contexts of a block less two to two blocks and two, a lone row and a pair of rows each."""
    counts = [block * 128 + step for block in (1, 2) for step in (-2, -1, 0, 1, 2)]
    rows = [(i, count) for i, count in enumerate(counts)] + [(10, 256), (10, 257), (10, 258)]
    judge(make_score_case(rows, 3, 16, name, 32, DTYPES[name]), device)


def test_index_scores_of_mixed_dtypes_match_reference(device) -> None:
    judge(make_score_case([(0, 40), (1, 9)], 4, 32, "float32", dtype=torch.float16), device)


@pytest.mark.each_value
@pytest.mark.parametrize("name", FORMATS)
def test_index_scores_of_codes_are_near_exact_scores(name) -> None:
    rows = [(0, 200), (1, 150)]
    exact = scored(index_scores_reference, make_score_case(rows, 64, 128, "float32"))
    near = scored(index_scores_reference, make_score_case(rows, 64, 128, name, dtype=DTYPES[name]))
    assert float((near - exact).norm() / (exact - UNTOUCHED).norm()) < 0.02


@for_each("name", ["float32", "fp8"])
def test_index_scores_nan_key_spoils_one_score(device, name) -> None:
    case = make_score_case([(0, 40), (0, 41)], 8, 32, name)
    wanted_TC = scored(index_scores_triton, case, device)
    slot = slots_of(case, 0, 40)[13:14]
    store_keys(case.planes, slot, torch.full((1, 32), torch.nan))
    mine_TC = scored(index_scores_triton, case, device)
    assert bool(mine_TC[:, 13].isnan().all())
    mine_TC[:, 13] = wanted_TC[:, 13]
    assert torch.equal(mine_TC, wanted_TC)


def test_index_scores_rows_without_selection_write_nothing(device) -> None:
    for rows in ([(0, 0)], [(0, 0), (0, -3), (1, 0)]):
        mine_TC = scored(index_scores_triton, make_score_case(rows, 2, 16, "fp8"), device)
        assert bool((mine_TC == UNTOUCHED).all())


def test_index_scores_without_rows_launch_nothing(device) -> None:
    case = make_score_case([(0, 3)], 2, 16, "float32")
    none = SparseRows(*(numbers[:0] for numbers in case.rows))
    scored(index_scores_triton, replace(case, q=case.q[:0], weights=case.weights[:0], rows=none), device)


@for_each("num_rows", [1, 3, 8, 16, 64, 800, 8192])
def test_index_splits_follow_rows_and_longest_context(num_rows) -> None:
    blocks = index_blocks("e4m3", 128)
    at_once = 132 * blocks.programs_per_sm
    for num_columns in (1, 4096, 163_840):
        splits = num_splits(num_rows, num_columns, blocks, 132)
        assert 1 <= splits <= -(-num_columns // blocks.tokens)
        # Either all of them run at once, or so many follow each other that the last few do not matter; or there is no more work.
        num_programs, all_blocks = num_rows * splits, num_rows * -(-num_columns // blocks.tokens)
        assert num_programs <= at_once or num_programs > 3 * at_once or num_programs >= min(all_blocks, 3 * at_once)
        assert -(-num_columns // splits) <= 4096


def test_index_blocks_and_splits_are_known() -> None:
    """16 KiB of keys in a block of at most 128 tokens; whole pages make a block, or a block lies in one."""
    blocks = {(kind, dim): index_blocks(kind, dim) for kind in OPERAND_BYTES for dim in (16, 128)}
    assert {key: own.tokens for key, own in blocks.items() if own.tokens < 128} == {
        ("bytes", 128): 64,
        ("half", 128): 64,
        ("float32", 128): 32,
    }
    assert {kind for (kind, _), own in blocks.items() if not own.has_pairs} == {"float32"}
    assert {kind: blocks[kind, 128].programs_per_sm for kind in OPERAND_BYTES}.items() >= {("e4m3", 3), ("half", 2)}
    assert [pages_of_block(page, 64) for page in (1, 7, 8, 16, 24, 32, 64, 96, 128)] == [0, 0, 8, 4, 0, 2, 1, 0, 1]
    own = blocks["e4m3", 128]
    found = [num_splits(rows, columns, own, 132) for rows, columns in ((1, 300), (1, 10**6), (66, 10**5), (900, 10**5))]
    assert found == [3, 396, 25, 25]


def test_index_operands_follow_dtypes_and_device(monkeypatch) -> None:
    """Codes as they are from Ada on; 16 bits where queries and keys agree."""
    monkeypatch.setattr(index_scores_module, "is_interpreted", lambda: False)

    def operands(name: str, dtype: torch.dtype, capability: tuple[int, int] = (9, 0)) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        planes = make_index_planes(name, 16, 16, 1, RedZones(torch.device("cpu")))
        return choose_operands(cast(torch.Tensor, SimpleNamespace(dtype=dtype, is_cuda=True, device=0)), planes)

    codes = [operands("fp8", torch.float8_e4m3fn, version) for version in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))]
    assert codes == ["bytes", "bytes", "e4m3", "e4m3", "e4m3"]
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    assert [operands("float16", dtype) for dtype in (half, brain, full)] == ["half", "float32", "float32"]
    assert [operands("bfloat16", dtype) for dtype in (half, brain, full)] == ["float32", "half", "float32"]
    assert [operands("float32", dtype) for dtype in (half, brain, full)] == ["float32"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize(("num_heads", "dim"), [(64, 128), (32, 128), (16, 16)])
def test_index_scores_match_reference_at_model_sizes(device, name, num_heads, dim) -> None:
    """V3.2, GLM-5 and a tiny model: decode of several lengths, and neighbours of a prompt."""
    rows = [(0, 9000), (1, 2049), (2, 5000), (3, 0), (4, 7001), (4, 7002), (4, 7003), (5, 4097)]
    judge(make_score_case(rows, num_heads, dim, name, 64, DTYPES[name]), device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "fp8"])
def test_index_scores_graph_serves_any_lengths(device, name) -> None:
    case = make_score_case([(0, 5000), (1, 4000), (1, 4001)], 64, 128, name, 64, DTYPES[name])
    planes, pages = planes_to(case.planes, device), case.pages.to(device)
    q, weights = case.q.to(device), case.weights.to(device)
    rows = SparseRows(*(numbers.to(device) for numbers in case.rows))
    out_TC = torch.empty(3, case.num_columns, device=device)

    def score() -> object:
        return index_scores(q, weights, planes, pages, rows, out_TC)

    assert_allocates_nothing(score)
    graph = torch.cuda.CUDAGraph()
    rows.num_tokens_T.fill_(1)
    with torch.cuda.graph(graph):
        score()
    for lengths in ([5000, 4000, 4001], [3, 2, 0], [3, 2, 0], [0, 0, 0], [5000, 1, 4001]):
        rows.num_tokens_T.copy_(torch.tensor(lengths, dtype=torch.int32))
        out_TC.fill_(UNTOUCHED)
        graph.replay()
        replayed_TC = out_TC.clone()
        out_TC.fill_(UNTOUCHED)
        score()
        assert torch.equal(replayed_TC, out_TC)
        assert bool(((out_TC != UNTOUCHED).sum(-1).cpu() == torch.tensor(lengths)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfloat16", "fp8"])
def test_index_scores_compile_once_for_any_rows_and_widths(device, name) -> None:
    case = make_score_case([(0, 100), (1, 90), (1, 91), (2, 7)], 64, 128, name, 64, DTYPES[name])
    planes, pages = planes_to(case.planes, device), case.pages.to(device)
    q, weights = case.q.to(device), case.weights.to(device)
    rows, scores = SparseRows(*(numbers.to(device) for numbers in case.rows)), torch.empty(4 * 171, device=device)

    def score(num_rows: int, num_columns: int) -> None:
        out_TC = scores[: num_rows * num_columns].view(num_rows, num_columns)
        index_scores(q[:num_rows], weights[:num_rows], planes, pages, rows, out_TC)

    score(4, 160)
    with counting_compiles(lambda: None) as count:
        for num_rows in (1, 2, 3, 4):
            for num_columns in (128, 160, 171):
                score(num_rows, num_columns)
    assert count.num_compiled + count.num_found == 0

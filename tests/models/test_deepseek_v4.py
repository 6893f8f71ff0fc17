"""DeepSeek-V4 against transformers: windows, entries, choices and streams; chunks, company, prefixes, forks, preemption."""

import pytest
import torch

from holdfast.cache.chunks import chunk_shapes
from holdfast.cache.groups import block_tokens
from holdfast.families.compressed import torch_backend as torch_compressed
from holdfast.families.sparse.torch_backend import largest_tokens
from models.tiny_compressed import COMPRESSED_MODELS, alone, make_compressed_drive, tiny_compressed
from models.tiny_latents import fork, judge, make_request, preempt_after
from runner.drive import Request

BOTH = "both entries"
"""Two layers that have all there is: for what takes many runs."""
BLOCKS = {
    "like V4-Flash": 8,
    "both entries": 8,
    "like V4-Pro": 8,
    "windows": 1,
    "all entries": 8,
    "chosen entries": 4,
}
"""Tokens of a block of the prefix cache where a chunk has one row."""


@pytest.mark.parametrize("case", COMPRESSED_MODELS)
def test_logits_of_single_sequence_match_transformers(case):
    """Up to the first entries, around windows, and many more than are chosen."""
    for length, num_output in ((1, 8), (3, 2), (8, 2), (9, 2), (41, 8)):
        alone(case, length, num_output)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.startswith("like") else pytest.mark.slow) for case in COMPRESSED_MODELS],
)
def test_logits_batched_and_chunked_match_transformers(case):
    theirs, ours = tiny_compressed(case)
    requests = [make_request(length, 12, 3 * index) for index, length in enumerate((1, 2, 17, 33, 61))]
    drive = make_compressed_drive(ours, max_rows=11, page_tokens=4)
    drive.run(requests)
    for request in requests:
        judge(theirs, drive, request)


@pytest.mark.parametrize(
    ("page_tokens", "sizes"),
    [
        (4, (1, 2, 3, 4, 5, 7, 8, 9, 16, 21)),
        *(pytest.param(page, range(1, 22), marks=pytest.mark.slow) for page in (1, 4)),
    ],
    ids=["edges", "pages of 1", "pages of 4"],
)
def test_logits_match_at_every_chunk_size(page_tokens, sizes):
    """Around entries of four and eight tokens at once."""
    answer = alone(BOTH, 21, 3)
    for max_rows in sizes:
        drive = make_compressed_drive(tiny_compressed(BOTH)[1], max_rows, page_tokens)
        request = make_request(21, 3)
        drive.run([request])
        answer.check(drive, request)
        assert len(drive.logits(request)) == 23, f"{max_rows=}"


@pytest.mark.parametrize("case", [BOTH, "chosen entries"])
def test_decoder_finishes_only_rows_whose_logits_are_read(case):
    """The last layer takes its experts by score, or from a table by the ids of these rows."""
    answer = alone(case, 22, 4)
    drive = make_compressed_drive(tiny_compressed(case)[1], 9)
    request = Request(list(answer.prompt), 4)
    drive.run([request])
    answer.check(drive, request)
    assert len(drive.logits(request)) == 4


@pytest.mark.parametrize(
    "places", [(1, 2, 3, 6, 10), pytest.param(range(1, 11), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_preempted_at_every_position(places):
    answer = alone(BOTH, 33, 9)
    for place in places:
        drive = make_compressed_drive(tiny_compressed(BOTH)[1], 11)
        request = Request(list(answer.prompt), 9)
        preempt_after(drive, place)
        drive.run([request])
        drive.scheduler.check()
        assert request.sequence is not None
        assert request.sequence.num_preemptions == 1
        answer.check(drive, request)


@pytest.mark.slow
def test_preempted_by_neighbours_where_pages_are_few():
    answers = [alone(BOTH, length, 26) for length in (4, 6, 5)]
    drive = make_compressed_drive(tiny_compressed(BOTH)[1], 4, num_pages=28)
    requests = [Request(list(answer.prompt), 26) for answer in answers]
    drive.run(requests)
    assert drive.scheduler.num_preemptions > 0
    for answer, request in zip(answers, requests, strict=True):
        answer.check(drive, request)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPRESSED_MODELS)
def test_prefixes_are_hit_at_every_block_boundary(case):
    """Window, entries and index are found; the state of overlapped entries is made again of the last tokens of what is found."""
    theirs, ours = tiny_compressed(case)
    answer, block = alone(case, 70, 4), BLOCKS[case]
    drive = make_compressed_drive(ours, 16)
    assert block_tokens(drive.rig.groups) == block
    drive.run([Request(list(answer.prompt), 4)])
    places = range(block, 70, block)
    for place in places if len(places) < 20 else (1, 2, 7, 8, 9, 10, 31, 32, 33, 57, 69):
        request = Request([*answer.prompt[:place], *fork(answer, place % 32)[place % 32 :]], 4)
        drive.run([request])
        drive.scheduler.check()
        judge(theirs, drive, request)
        assert request.sequence is not None
        assert request.sequence.num_cached_tokens == place


@pytest.mark.slow
@pytest.mark.parametrize("case", ["both entries", pytest.param("chosen entries", marks=pytest.mark.slow)])
def test_forks_at_every_position_side_by_side(case):
    """Each goes on from the blocks that it has in common with the first, while the first still runs."""
    theirs, ours = tiny_compressed(case)
    answer = alone(case, 40, 4)
    drive = make_compressed_drive(ours, 16)
    first = Request(list(answer.prompt), 4)
    forks = [Request(fork(answer, place), 4, arrival=2 + place // 3) for place in range(1, 36)]
    drive.run([first, *forks])
    drive.scheduler.check()
    answer.check(drive, first)
    for place, request in enumerate(forks, 1):
        judge(theirs, drive, request)
        assert request.sequence is not None
        assert request.sequence.num_cached_tokens == place // BLOCKS[case] * BLOCKS[case]


@pytest.mark.parametrize("case", ["like V4-Flash", "like V4-Pro"])
def test_sequences_that_arrive_together_share_inside_a_page(case):
    """The second and the third wait for the step that computes their beginning, and get copies of its open rows."""
    theirs, ours = tiny_compressed(case)
    answer = alone(case, 61, 4)
    drive = make_compressed_drive(ours, 96)
    requests = [Request([*answer.prompt[:place], answer.prompt[place] ^ 1], 4) for place in (60, 47, 22)]
    drive.run(requests)
    drive.scheduler.check()
    assert max(group.page_tokens for group in drive.rig.groups) > 8
    for request, cached in zip(requests, (0, 40, 16), strict=True):
        judge(theirs, drive, request)
        assert request.sequence is not None
        assert request.sequence.num_cached_tokens == cached


@pytest.mark.parametrize("cut", [13, 24, 40, 50])
def test_pages_after_a_hit_are_those_without_a_cache(cut):
    """Windows, entries and the index, from the first row on; the sequence computes on, in chunks."""
    answer = alone(BOTH, 70, 4)
    kept = []
    for use_prefix_cache in (True, False):
        drive = make_compressed_drive(tiny_compressed(BOTH)[1], 7)
        drive.run([Request([*answer.prompt[:cut], 3, 4], 1)])
        request = Request(list(answer.prompt), 1)
        if not use_prefix_cache:
            drive.scheduler.reset_prefix_cache()
        seen = {}
        finish = drive.scheduler.finish
        drive.scheduler.finish = lambda one, seen=seen, finish=finish: (
            seen.update(tables=[list(table) for table in one.tables]),
            finish(one),
        )
        drive.run([request])
        assert request.sequence is not None
        assert request.sequence.num_cached_tokens == (cut // 8 * 8 if use_prefix_cache else 0)
        kept.append(rows_of(drive, seen["tables"], 70))
    assert kept[0].keys() == kept[1].keys()
    for name, rows in kept[0].items():
        torch.testing.assert_close(rows, kept[1][name], rtol=1e-4, atol=1e-5, msg=f"{name}")


def rows_of(drive, tables, num_tokens):
    """All complete rows of a sequence, by layer and plane, without those that a window has passed."""
    storage, found = drive.rig.storage, {}
    spec = storage.spec
    shapes = chunk_shapes(spec, storage.num_pages)
    for number, (group, shape, own) in enumerate(zip(spec.groups, shapes, drive.rig.groups, strict=True)):
        first = own.first_page(num_tokens) * own.page_tokens if own.window is not None else 0
        rows = range(first // own.tokens_per_row, num_tokens // own.tokens_per_row)
        slots = [shape.number(tables[number], row // spec.page_tokens) * spec.page_tokens for row in rows]
        assert spec.page_tokens == 1
        for layer in group.layers:
            for name, plane in storage.planes(layer).items():
                found[layer, name] = plane[slots].clone()
    return found


def test_top_k_choice_margin_exceeds_rounding(monkeypatch):
    """Between the last entry that is chosen and the first that is not lies far more than two ways to compute in float32 differ by."""
    gaps = []

    def measured(scores_nC: torch.Tensor, top_k: int) -> torch.Tensor:
        inside, outside = scores_nC.topk(top_k + 1, dim=1).values[:, -2:].unbind(1)
        gaps.append(float((inside - outside).min()))
        return largest_tokens(scores_nC, top_k)

    monkeypatch.setattr(torch_compressed, "largest_tokens", measured)
    for case in ("like V4-Flash", "like V4-Pro", "chosen entries"):
        for length in (21, 33, 41, 61, 70):
            make_compressed_drive(tiny_compressed(case)[1], 96).run([make_request(length, 1)])
    assert min(gaps) > 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["like V4-Flash", "like V4-Pro", "windows"])
def test_triton_compressed_over_references_matches_transformers(case):
    """The backend of a GPU over the references of its kernels: page tables and rows are what it gets there."""
    theirs, ours = tiny_compressed(case)
    answer = alone(case, 41, 8)
    drive = make_compressed_drive(ours, 9, page_tokens=2, backend="triton_compressed")
    requests = [make_request(41, 8), *(make_request(length, 6, 2 + index) for index, length in enumerate((1, 8, 25)))]
    drive.run(requests)
    answer.check(drive, requests[0])
    for request in requests[1:]:
        judge(theirs, drive, request)

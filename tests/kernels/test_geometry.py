"""Sizes that kernels and plans agree on: known numbers at every edge of a rule."""

from for_each import for_each
from holdfast.kernels.geometry import (
    ExpertOrderForm,
    TileGeometry,
    expert_block_rows,
    expert_order_form,
    key_turns_specs,
    logit_scratch_specs,
    num_chunks,
    num_expert_blocks,
    order_specs,
    pair_columns,
    row_scaled_splits,
)


@for_each(
    "size_n, size_k, splits",
    [
        (64, 128, 1),
        (128, 640, 2),
        (64, 4096, 8),
        (1024, 4096, 8),
        (4096, 4096, 3),
        (8448, 4096, 1),
        (4096, 16384, 3),
        (2048, 65536, 8),
    ],
)
def test_row_scaled_splits_fill_a_gpu_and_keep_four_blocks(size_n: int, size_k: int, splits: int) -> None:
    """132 programs of 64 outputs, twice as many where a split is long; at most eight splits of 512 columns and more."""
    assert row_scaled_splits(size_n, size_k) == splits


def test_expert_block_rows_follow_tokens_per_expert() -> None:
    """Up to 4 tokens one each, up to 16 one block, then by up to 8, 24 and 96 pairs for an expert."""
    found = [expert_block_rows(rows, 8, 128) for rows in (1, 4, 5, 16, 17, 128, 129, 384, 385, 1536, 1537)]
    assert found == [1, 1, 16, 16, 16, 16, 32, 32, 64, 64, 128]


def test_expert_order_form_has_a_launch_for_every_size() -> None:
    unsorted = [expert_order_form(rows, 8, 128) for rows in (4, 16)]
    assert unsorted == [ExpertOrderForm(rows, False, 0, False) for rows in (1, 16)]
    found = [expert_order_form(rows, 8, 128)[2:] for rows in (17, 32, 33, 256, 257, 512, 513)]
    assert found == [
        (256, False),
        (256, True),
        (1024, False),
        (1024, True),
        (0, False),
        (0, True),
        (0, False),
    ]


def test_expert_pair_scratch_is_the_maximum() -> None:
    assert [num_expert_blocks(*own) for own in ((10, 4, 1), (3, 8, 16), (8, 8, 16), (24, 8, 16), (100, 8, 16))] == [
        0,
        3,
        8,
        9,
        13,
    ]
    shapes = [
        [spec.shape for spec in order_specs(*own)]
        for own in ((16, 8, 128), (17, 8, 128), (256, 8, 128), (257, 8, 128), (257, 8, 128, 32))
    ]
    assert shapes == [
        [(0, 16), (0,), (0, 128)],
        [(128, 16), (128,), (0, 128)],
        [(188, 32), (188,), (0, 128)],
        [(188, 32), (188,), (2, 128)],
        [(95, 32), (95,), (2, 32)],
    ]


def test_key_turns_have_a_row_for_every_block() -> None:
    assert [pair_columns(head_dim) for head_dim in (16, 32, 34, 64, 66, 128, 256)] == [16, 16, 32, 32, 64, 64, 128]
    found = [
        [(spec.shape, spec.dtype) for spec in key_turns_specs(*own)]
        for own in ((64, 65, "float32"), (80, 64, "bfloat16"))
    ]
    wide, half = "float32", "float16"
    assert found == [
        [((2, 32), wide), ((2, 32), wide), ((2, 64, 32), wide), ((0,), half)],
        [((1, 40), wide), ((1, 40), wide), ((2, 64, 40), half), ((2 * 64 * 64,), half)],
    ]


def test_small_programs_are_fewer_in_small_batches() -> None:
    geometry = TileGeometry(1, 2, 3, 4, 64, small_batch_rows=8, small_batch_programs_per_sm=7)
    assert [geometry.small_programs(rows) for rows in (1, 8, 9)] == [7, 7, 3]


def test_logit_scratch_is_bounded_by_rows_and_candidates() -> None:
    """At most 128 rows at once and 4096 candidates; the first two tensors have every row."""
    assert [num_chunks(size) for size in (1, 8192, 8193)] == [1, 1, 2]
    found = [[spec.shape for spec in logit_scratch_specs(*own)] for own in ((200, 10000), (5, 300))]
    assert found == [
        [(200, 2), (200, 2), (128, 2), (128, 2), (128, 2, 128), (128,), (128, 4096), (128, 4096)],
        [(5, 1), (5, 1), (5, 1), (5, 1), (5, 1, 128), (5,), (5, 300), (5, 300)],
    ]

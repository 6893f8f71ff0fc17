"""Sizes of up-projected latent attention: scratch is bounded for any step, and the choice follows the work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.up_projection import (
    CHUNK_STEP,
    LEAST_ROWS,
    TILE_ROWS,
    UP_PROJECTED_BYTES,
    UpProjection,
    expanded_specs,
    num_splits,
    takes_up_projection,
    warm_steps,
)

V2_LITE = UpProjection(16, 512, 64, 128, 128)
V3 = V2_LITE._replace(num_heads=128)
GLM = UpProjection(20, 512, 64, 192, 256)
dims = st.integers(1, 32).map(lambda number: 16 * number)
shapes = st.builds(UpProjection, st.integers(1, 256), dims, dims, dims, dims)


@given(shapes, st.sampled_from(["bfloat16", "float32"]), st.integers(1, 10**6), st.integers(1, 10**7))
def test_expanded_specs_are_bounded_and_sufficient(shape, dtype, max_rows, max_context):
    chunk, state = expanded_specs(shape, dtype, max_rows, max_context)
    assert chunk.num_bytes + state.num_bytes <= UP_PROJECTED_BYTES
    for num_rows in {1, max_rows}:
        group = shape.group_heads(num_rows)
        assert shape.chunk_tokens(group, chunk.shape[0]) >= CHUNK_STEP
        assert shape.state_rows(state.shape[0]) >= group, "a row at a time is always possible"


@given(shapes, st.integers(1, 20000), st.integers(1, 10**6), st.integers(1, 10**6))
def test_up_projection_splits_fit_the_partials(shape, num_rows, num_tokens, state_rows):
    group = shape.group_heads(num_rows)
    splits = num_splits(num_rows, group, num_tokens, state_rows)
    assert splits == 1 or splits * num_rows * group <= state_rows
    assert splits == 1 or splits * group * -(-num_rows // TILE_ROWS) <= 132


@for_each(
    "num_rows, num_tokens, state_rows, splits",
    [
        (128, 10**6, 10**9, 8),
        (129, 10**6, 10**9, 4),
        (128, 1024, 10**9, 2),
        (128, 1023, 10**9, 1),
        (128, 10**6, 128 * 16 * 3, 3),
        (5000, 10**6, 10**9, 1),
    ],
)
def test_num_splits_is_bounded_by_programs_tokens_and_state(num_rows, num_tokens, state_rows, splits):
    """132 programs, 512 tokens of a split, and a state for each row and head."""
    assert num_splits(num_rows, 16, num_tokens, state_rows) == splits


def test_up_projection_groups_and_chunks_are_known():
    assert [shape.group_heads(rows) for rows in (1, 4095, 4096) for shape in (V3, GLM)] == [16, 10, 16, 10, 8, 7]
    assert V2_LITE.chunk_tokens(16, 4672 * 383 + 4671) == 256
    assert V2_LITE.state_rows(129 * 8 - 1) == 7
    small = UpProjection(4, 32, 8, 16, 16)
    sizes = [
        tuple(spec.shape[0] for spec in expanded_specs(shape, dtype, max_rows, max_context))
        for shape, dtype, max_rows, max_context in (
            (small, "float32", 64, 256),
            (small, "float32", 64, 1300),
            (V2_LITE, "bfloat16", 2048, 4096),
            (V2_LITE, "float32", 1, 10**6),
        )
    ]
    elements = [256 * 168, 1408 * 168, 4096 * 4672, 2**24]
    floats = [64 * 4 * 17, 2 * 64 * 4 * 17, 2**23, 132 * 16 * 129]
    assert sizes == list(zip(elements, floats, strict=True))


@given(st.integers(1, 300), st.integers(1, 5000))
def test_group_heads_makes_groups_equal_but_for_one_head(num_heads, num_rows):
    group = V3._replace(num_heads=num_heads).group_heads(num_rows)
    num_groups = -(-num_heads // group)
    assert 1 <= group <= 16
    assert num_heads > (num_groups - 1) * group


def test_expanded_specs_of_a_small_model_are_small():
    small = UpProjection(4, 32, 8, 16, 16)
    assert sum(spec.num_bytes for spec in expanded_specs(small, "float32", 64, 256)) < 300_000


@for_each("shape, least", [(V2_LITE, LEAST_ROWS), (V3, LEAST_ROWS), (GLM, 189)])
def test_takes_up_projection_after_long_context_follows_rows(shape, least):
    assert not takes_up_projection(least - 1, 10**7, shape)
    assert takes_up_projection(least, 10**7, shape)


@for_each("shape", [V2_LITE, V3, GLM])
def test_takes_up_projection_without_context_if_prompt_is_long(shape):
    takes = [takes_up_projection(num_rows, 0, shape) for num_rows in range(1, 4000)]
    assert takes == sorted(takes)
    assert not takes[512]
    assert takes[1100]


def test_takes_up_projection_needs_fewer_rows_for_longer_context():
    least = [
        next(num_rows for num_rows in range(1, 4000) if takes_up_projection(num_rows, start, V2_LITE))
        for start in (0, 1000, 8000, 100_000)
    ]
    assert least == sorted(least, reverse=True)
    assert least[-1] == LEAST_ROWS


def launches(num_rows: int, start: int, shape: UpProjection, max_rows: int, max_context: int) -> set[str]:
    """The kernels of such rows."""
    if not takes_up_projection(num_rows, start, shape):
        return set()
    chunk, state = expanded_specs(shape, "bfloat16", max_rows, max_context)
    group = shape.group_heads(num_rows)
    tokens = min(shape.chunk_tokens(group, chunk.shape[0]), start + num_rows)
    splits = num_splits(num_rows, group, tokens, shape.state_rows(state.shape[0]))
    return {"gather", "attend", "merge"} if splits > 1 else {"gather", "attend"}


@pytest.mark.each_value
@pytest.mark.parametrize("num_heads", [1, 4, 7, 16, 20, 128])
@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=str)
@pytest.mark.parametrize(("max_rows", "max_context"), [(100, 5000), (512, 2000), (2048, 4096), (8192, 163840)], ids=str)
def test_warm_steps_launch_every_kernel(num_heads, dims, max_rows, max_context):
    shape = UpProjection(num_heads, 512, 64, *dims)
    steps = warm_steps(shape, max_rows, max_context)
    warmed: set[str] = set()
    for start, num_rows in steps:
        assert num_rows <= max_rows
        assert 0 <= start <= max_context - num_rows
        found = launches(num_rows, start, shape, max_rows, max_context)
        assert found, "a step that is not up-projected warms nothing"
        warmed |= found
    row_counts = {
        *range(1, max_rows, 61),
        max_rows,
        *(TILE_ROWS * tiles for tiles in range(1, max_rows // TILE_ROWS + 1)),
    }
    for num_rows in (rows for rows in row_counts if rows <= max_context):
        for start in {0, 500, 1000, 4000, 30_000, max_context - num_rows}:
            if start <= max_context - num_rows:
                assert launches(num_rows, start, shape, max_rows, max_context) <= warmed

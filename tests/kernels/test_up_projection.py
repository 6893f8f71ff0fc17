"""Sizes of up-projected latent attention: the room is bounded whatever is asked, and the rule is that of the work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.up_projection import (
    CHUNK_STEP,
    LEAST_ROWS,
    TILE_ROWS,
    UP_PROJECTED_BYTES,
    UpProjection,
    expanded_specs,
    num_splits,
    takes_up_projection,
)

V2_LITE = UpProjection(16, 512, 64, 128, 128)
V3 = V2_LITE._replace(num_heads=128)
GLM = UpProjection(20, 512, 64, 192, 256)
dims = st.integers(1, 32).map(lambda number: 16 * number)
shapes = st.builds(UpProjection, st.integers(1, 256), dims, dims, dims, dims)


@given(shapes, st.sampled_from(["bfloat16", "float32"]), st.integers(1, 10**6), st.integers(1, 10**7))
def test_the_room_is_bounded_and_enough(shape, dtype, max_rows, max_context):
    chunk, state = expanded_specs(shape, dtype, max_rows, max_context)
    assert chunk.num_bytes + state.num_bytes <= UP_PROJECTED_BYTES
    for num_rows in {1, max_rows}:
        group = shape.group_heads(num_rows)
        assert shape.chunk_tokens(group, chunk.shape[0]) >= CHUNK_STEP
        assert shape.state_rows(state.shape[0]) >= group, "a row at a time is always possible"


@given(shapes, st.integers(1, 20000), st.integers(1, 10**6), st.integers(1, 10**6))
def test_splits_have_room(shape, num_rows, num_tokens, state_rows):
    group = shape.group_heads(num_rows)
    splits = num_splits(num_rows, group, num_tokens, state_rows)
    assert splits == 1 or splits * num_rows * group <= state_rows
    assert splits == 1 or splits * group * -(-num_rows // TILE_ROWS) <= 132


@given(st.integers(1, 300), st.integers(1, 5000))
def test_groups_are_equal_but_for_one_head(num_heads, num_rows):
    group = V3._replace(num_heads=num_heads).group_heads(num_rows)
    num_groups = -(-num_heads // group)
    assert 1 <= group <= 16
    assert num_heads > (num_groups - 1) * group


def test_a_small_model_takes_little():
    small = UpProjection(4, 32, 8, 16, 16)
    assert sum(spec.num_bytes for spec in expanded_specs(small, "float32", 64, 256)) < 300_000


@pytest.mark.parametrize(
    ("shape", "least"), [(V2_LITE, LEAST_ROWS), (V3, LEAST_ROWS), (GLM, 189)], ids=["V2-Lite", "V3", "GLM"]
)
def test_behind_a_long_context_rows_decide(shape, least):
    assert not takes_up_projection(least - 1, 10**7, shape)
    assert takes_up_projection(least, 10**7, shape)


def test_a_prompt_of_its_own_is_never_more_work():
    for num_rows in (LEAST_ROWS, 500, 8192):
        assert takes_up_projection(num_rows, 0, V2_LITE)
    assert not takes_up_projection(LEAST_ROWS - 1, 0, V2_LITE)

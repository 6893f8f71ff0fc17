"""How the products of a few rows cut a weight; their sums and tails run in the kernels' own tests."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.kernels.gemm import small_batch as skinny_linear
from holdfast.kernels.gemm import small_batch_quantized as skinny_coded
from holdfast.kernels.gemm.gemv import BLOCK_N, MAX_PARTS, PROGRAMS, num_parts


@given(
    size_n=st.integers(1, 200_000),
    size_k=st.integers(1, 500).map(lambda blocks: 64 * blocks),
    block_k=st.sampled_from([skinny_linear.BLOCK_K, skinny_coded.BLOCK_K]),
)
def test_parts_are_whole_blocks_and_no_more_than_are_needed(size_n: int, size_k: int, block_k: int) -> None:
    parts, num_blocks = num_parts(size_n, size_k, block_k), -(-size_n // BLOCK_N)
    assert parts in (1, 2, 4, 8)
    assert parts <= MAX_PARTS
    assert parts == 1 or size_k % (parts * block_k) == 0
    assert parts == 1 or num_blocks * parts // 2 < PROGRAMS, "half as many would have been enough"
    more = 2 * parts
    assert more > MAX_PARTS or num_blocks * parts >= PROGRAMS or size_k % (more * block_k), (
        "more would have been better"
    )

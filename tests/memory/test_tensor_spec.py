"""Tensors before they exist: their bytes, their places, and words for those that cannot be."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec, aligned, arena_bytes
from holdfast.quant.formats import DTYPE_BYTES

shapes = st.lists(st.integers(0, 50), max_size=4).map(tuple)


@given(shapes, st.sampled_from(sorted(DTYPE_BYTES)))
def test_bytes_are_those_of_the_tensor(shape: tuple[int, ...], dtype: str) -> None:
    spec = TensorSpec("x", shape, dtype)
    assert spec.problem is None
    assert spec.num_bytes == torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
    assert spec.aligned_bytes == aligned(spec.num_bytes)


@given(st.integers(0, 2**60))
def test_alignment_goes_up_to_the_next_place(num_bytes: int) -> None:
    assert aligned(num_bytes) % ALIGNMENT_BYTES == 0
    assert 0 <= aligned(num_bytes) - num_bytes < ALIGNMENT_BYTES


def test_an_arena_is_the_sum_of_aligned_tensors() -> None:
    specs = (TensorSpec("a", (1,), "int8"), TensorSpec("b", (64,), "float32"), TensorSpec("c", (0, 9), "int64"))
    assert arena_bytes(specs) == 256 + 256 + 0
    assert arena_bytes(()) == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((-1, 4), "float32", r"\(-1, 4\) is not a shape"),
        ((2.0, 4), "float32", "is not a shape"),
        ((True,), "float32", "is not a shape"),
        ((None, 4), "float32", "is not a shape"),
        ([2, 4], "float32", "is not a shape"),
        (7, "float32", "7 is not a shape"),
        ((10**5000, -1), "float32", "is not a shape"),
        ((2,), "half", "'half' is not the name of a type"),
        ((2,), "", "is not the name"),
        ((2,), torch.float16, "torch.float16 is not the name"),
        ((2,), ["float32"], "is not the name"),
        ((2,), None, "None is not the name"),
    ],
)
def test_what_cannot_be_is_told_in_words(shape: object, dtype: object, words: str) -> None:
    spec = TensorSpec("x", shape, dtype)  # type: ignore[arg-type]
    problem = spec.problem
    assert problem is not None
    assert re.search(words, problem), problem
    assert "\n" not in problem
    assert len(problem) < 250
    assert str(spec).startswith("x ")


def test_a_spec_reads_as_a_line() -> None:
    assert str(TensorSpec("qkv", (8, 64), "bfloat16")) == "qkv bfloat16 (8, 64)"

import pytest
import torch

from holdfast.loading.sources.read_rows import read_rows
from loading.made_up_source import MadeUpSource

TENSORS = {"matrix": torch.randn(5, 4), "stack": torch.randn(2, 3, 4).bfloat16(), "vector": torch.arange(7.0)}


def test_rows_of_matrices_stacks_and_vectors():
    source = MadeUpSource(tensors=TENSORS)
    assert torch.equal(read_rows(source, "matrix", 1, 4), TENSORS["matrix"][1:4])
    assert torch.equal(read_rows(source, "matrix", 1, 4, (1, 3)), TENSORS["matrix"][1:4, 1:3])
    assert torch.equal(read_rows(source, "stack", 2, 5), TENSORS["stack"].view(6, 4)[2:5])
    assert torch.equal(read_rows(source, "vector", 2, 5), TENSORS["vector"][2:5])
    assert read_rows(source, "matrix", 3, 3).shape == (0, 4)


def test_rows_that_are_not_there_are_our_own_mistake():
    with pytest.raises(AssertionError, match="rows 4 to 6 of 5"):
        read_rows(MadeUpSource(tensors=TENSORS), "matrix", 4, 6)

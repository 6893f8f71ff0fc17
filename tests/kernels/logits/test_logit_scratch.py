"""Scratch from the tensors that its specs describe."""

import torch

from holdfast.kernels.geometry import CHUNK_TOKENS, scratch_specs
from holdfast.kernels.sampling.argmax import LogitScratch


def test_every_tensor_is_in_its_place():
    specs = scratch_specs(3, 20_000)
    tensors = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
    scratch = LogitScratch.of(tensors)
    assert scratch.chunk_tokens == CHUNK_TOKENS
    fields = [getattr(scratch, name) for name in LogitScratch.__slots__ if name != "chunk_tokens"]
    assert [field.data_ptr() for field in fields] == [tensors[spec.name].data_ptr() for spec in specs]
    suffixes = [name.rpartition("_") for name in LogitScratch.__slots__ if name != "chunk_tokens"]
    assert [name for name, _, _ in suffixes] == [spec.name for spec in specs]
    assert [len(suffix) for _, _, suffix in suffixes] == [len(spec.shape) for spec in specs]

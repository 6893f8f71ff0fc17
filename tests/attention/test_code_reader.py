"""What is read fast is what the codes mean, to the bit, in an order that is told."""

import pytest
import torch

from holdfast.attention.declarations import code_table_bytes
from holdfast.attention.layer_pages import CodeReader
from holdfast.quant.kv_quantize import CodedHeads, decode_keys, decode_values, encode_keys, encode_values
from kernels.exactness import random, same_bits

CPU = torch.device("cpu")
BITS = pytest.mark.parametrize("bits", [8, 4, 3])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 192, 256])


def check(heads: CodedHeads, bits: int, head_dim: int, reader: CodeReader, which: str) -> None:
    if which == "keys":
        expected = decode_keys(heads, bits, head_dim)[..., reader.key_order_D]
        assert same_bits(reader.keys(heads), expected)
    else:
        expected = decode_values(heads, bits, head_dim)
        assert same_bits(reader.values(heads)[..., reader.value_places_D], expected)


@BITS
@HEAD_DIMS
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (2, 0)], ids=str)
def test_heads_that_were_coded(bits, head_dim, shape):
    reader = CodeReader(bits, bits, head_dim, CPU)
    y = random(*shape, head_dim, seed=head_dim, scale=3.0)
    check(encode_keys(y, bits), bits, head_dim, reader, "keys")
    check(encode_values(y, bits), bits, head_dim, reader, "values")


@BITS
@pytest.mark.parametrize("which", ["keys", "values"])
def test_any_bytes(bits, which):
    """Also those that nothing coded: every code meets every neighbour."""
    generator = torch.Generator().manual_seed(1)
    num_bytes = {8: 64, 4: 32, 3: 16}[bits]
    codes = torch.randint(0, 256, (7, 700, num_bytes), generator=generator, dtype=torch.uint8)
    if bits == 8:
        codes[codes & 127 == 127] = 0  # NaN, which no product keeps to the bit
    signs = torch.randint(0, 256, (7, 700, 8), generator=generator, dtype=torch.uint8) if bits == 3 else None
    heads = CodedHeads(codes, signs, torch.rand(7, 700, generator=generator).half())
    check(heads, bits, 64, CodeReader(bits, bits, 64, CPU), which)


@BITS
@pytest.mark.parametrize("which", ["keys", "values"])
def test_heads_that_lie_apart(bits, which):
    """As a window leaves them: some tokens in the middle of some pages."""
    y = random(2, 40, 64)
    whole = encode_keys(y, bits) if which == "keys" else encode_values(y, bits)
    part = CodedHeads(*(None if x is None else x[:, 3:17] for x in whole))
    check(part, bits, 64, CodeReader(bits, bits, 64, CPU), which)


@BITS
def test_orders_are_permutations(bits):
    reader = CodeReader(bits, bits, 80, CPU)
    assert sorted(reader.key_order_D.tolist()) == sorted(reader.value_places_D.tolist()) == list(range(80))


@pytest.mark.parametrize(("key_bits", "value_bits"), [(8, 8), (8, 4), (4, 4), (3, 4), (3, 3)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_what_it_holds_is_what_was_declared(key_bits, value_bits, head_dim):
    reader = CodeReader(key_bits, value_bits, head_dim, CPU)
    assert reader.num_bytes == code_table_bytes(key_bits, value_bits, head_dim)


def test_a_scale_that_is_no_number_shows():
    heads = encode_keys(random(3, 64), 4)
    heads.scale_X[1] = float("nan")
    numbers = CodeReader(4, 4, 64, CPU).keys(heads)
    assert numbers[1].isnan().all()
    assert numbers[[0, 2]].isfinite().all()

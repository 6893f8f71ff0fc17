"""One row by two weights in one launch: each result is that of its own product."""

import pytest
import torch

from holdfast.kernels.gemm.block_scaled_gemv import block_scaled_gemv
from holdfast.kernels.gemm.joint_row import MOST_OUTPUTS, joint_row, takes
from holdfast.kernels.gemm.linear import joint_linear
from holdfast.quant.weight_schemes import FP8, FP8_BLOCK
from kernels.exactness import random, same_bits
from kernels.gemm_references import block_scaled_gemv_reference
from kernels.quantized_cases import codable_rows, random_weight, room_amid, weight_amid, weight_on
from kernels.tiled_cases import NAN, amid
from kernels.triton_cases import QUIET, assert_allocates_nothing
from red_zones import RedZones

pytestmark = QUIET


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("size_n", "size_p", "size_k"),
    [(130, 1, 16), (1, 7, 272), (44, 9, 1200), (8, 257, 4096), (136, 3, 512)],
    ids=str,
)
def test_joint_row_gives_both_products(device, size_n, size_p, size_k):
    zones, x = RedZones(device), codable_rows(1, size_k, 3, 128).half()
    weight, plain = random_weight(size_n, size_k, FP8_BLOCK), random(size_p, size_k, seed=4).half()
    bias = random(size_n, seed=5).half()
    for has_bias in (False, True):
        out = zones.allocate(1, size_n, dtype=torch.float16).fill_(NAN)
        logits = zones.allocate(1, size_p).fill_(NAN)
        on_device, own, own_bias = amid(x, device), weight_amid(weight, device), amid(bias, device)
        assert joint_row(on_device, own, own_bias if has_bias else None, out, amid(plain, device), logits) is out
        zones.check()
        alone = block_scaled_gemv(on_device, own, own_bias if has_bias else None, torch.empty_like(out))
        if device.type == "cpu":
            assert same_bits(out, alone)
        torch.testing.assert_close(out, alone, rtol=2**-9, atol=1e-3)
        exact = x.double() @ plain.double().T
        torch.testing.assert_close(logits.cpu().double(), exact, rtol=1e-5, atol=1e-4)


def test_joint_row_nonfinite_weight_stays_in_its_output(device):
    x, weight, plain = codable_rows(1, 600, 3, 128), random_weight(40, 600, FP8_BLOCK), random(9, 600, seed=4)
    plain[5, 599] = NAN
    out, logits = torch.empty(1, 40, device=device), torch.empty(1, 9, device=device)
    joint_row(x.to(device), weight_on(weight, device), None, out, plain.to(device), logits)
    assert logits[0].isnan().nonzero().flatten().tolist() == [5]
    assert out.isfinite().all()


def test_joint_row_takes_one_row_and_no_head():
    weight, x, plain = random_weight(130, 512, FP8_BLOCK), random(1, 512), random(3, 512)
    assert takes(x, weight, plain)
    assert not takes(random(2, 512), weight, plain)
    assert not takes(x, random_weight(130, 512, FP8), plain)
    assert not takes(x, weight, plain.expand(MOST_OUTPUTS + 3, 3, 512)[:, 0])


@pytest.mark.parametrize("num_rows", [1, 3])
def test_joint_linear_on_a_cpu_is_two_products(num_rows):
    x, weight, plain = codable_rows(num_rows, 600, 3, 128), random_weight(40, 600, FP8_BLOCK), random(9, 600, seed=4)
    out, logits = torch.empty(num_rows, 40), torch.empty(num_rows, 9)
    room = room_amid(RedZones(torch.device("cpu")), num_rows, weight)
    joint_linear(x, weight, None, out, plain, logits, room)
    expected = block_scaled_gemv_reference(x, weight, None, torch.empty_like(out))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, x @ plain.T, rtol=1e-5, atol=1e-4)


def test_joint_row_refuses_misfit_operands(device):
    weight = weight_on(random_weight(40, 512, FP8_BLOCK), device)
    x, plain, out, logits = (torch.zeros(shape, device=device) for shape in ((1, 512), (9, 512), (1, 40), (1, 9)))
    for operands in ((x[:, :500], out, plain, logits), (x, out[:, 1:], plain, logits), (x, out, plain[:, 1:], logits)):
        with pytest.raises(AssertionError, match="shape"):
            joint_row(operands[0], weight, None, *operands[1:])
    with pytest.raises(AssertionError, match="shape"):
        joint_row(x, weight, None, out, plain, logits[:, 1:])


@pytest.mark.gpu
def test_joint_row_allocates_nothing(device):
    weight = weight_on(random_weight(1536, 4096, FP8_BLOCK), device)
    x, plain = (torch.zeros(rows, 4096, dtype=torch.bfloat16, device=device) for rows in (1, 256))
    out, logits = torch.empty(1, 1536, dtype=torch.bfloat16, device=device), torch.empty(1, 256, device=device)
    assert_allocates_nothing(lambda: joint_row(x, weight, None, out, plain, logits))

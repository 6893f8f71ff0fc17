import numpy as np
import pytest
import torch

from holdfast.kernels.gemm import quantized_tiles as weight_operands
from holdfast.kernels.gemm.quantized_tiles import Coding, e2m1_parts, e8m0_numbers, operands_of
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl
from holdfast.quant.quantized_weight import E2M1_VALUES, e8m0_values
from kernels.assembler import run_assembler
from kernels.expert_cases import SCHEMES, coded_rows, expert_case

VALUES = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
BYTES = torch.arange(256, dtype=torch.uint8)
LOW, HIGH = VALUES[BYTES.long() & 15], VALUES[BYTES.long() >> 4]


def test_the_assembler_looks_codes_up():
    low, high = run_assembler(weight_operands._E2M1_ASM, [BYTES.numpy()], 2)
    for found, expected in ((low, LOW), (high, HIGH)):
        assert torch.equal(torch.from_numpy(found.view(np.uint8)).view(torch.float8_e4m3fn).float(), expected)


def test_the_assembler_looks_both_bytes_of_wide_numbers_up():
    out = run_assembler(weight_operands._e2m1_wide_asm(), [BYTES.numpy()], 4)
    for first, expected in ((0, LOW), (2, HIGH)):
        words = np.stack(out[first : first + 2], axis=-1).view(np.int16).reshape(-1)
        assert torch.equal(torch.from_numpy(words).view(torch.bfloat16).float(), expected)


@jit
def _parts_kernel(p_codes, p_low, p_high, p_powers, PLAIN: constexpr):
    o = tl.arange(0, 256)
    b_codes = tl.load(p_codes + o)
    b_low, b_high = e2m1_parts(b_codes, PLAIN)
    tl.store(p_low + o, b_low.to(tl.float32))
    tl.store(p_high + o, b_high.to(tl.float32))
    tl.store(p_powers + o, e8m0_numbers(b_codes))


def test_every_byte_in_a_kernel(device):
    low, high, powers = (torch.full((256,), float("nan"), device=device) for _ in range(3))
    _parts_kernel[(1,)](BYTES.to(device), low, high, powers, PLAIN=is_interpreted(), num_warps=1)
    assert torch.equal(low.cpu(), LOW)
    assert torch.equal(high.cpu(), HIGH)
    assert torch.equal(powers.cpu()[:255], e8m0_values(BYTES[:255]))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_operands_say_how_the_weight_is_coded(scheme):
    case = expert_case((1, 1, 2, 6, 192), True, scheme)
    coded = coded_rows(case)
    found = operands_of(case.x_XK, case.weight, coded)
    expected = {
        None: (Coding.PLAIN_NUMBERS, 1, 0, 1),
        "fp8": (Coding.CODED_ROWS, 1, 0, 1),
        "fp8_tensor": (Coding.CODED_ROWS, 1, 0, 1),
        "fp8_block": (Coding.CODED_BLOCKS, 2, 128, 2),
        "int8": (Coding.INT8_ROWS, 1, 0, 1),
        "mxfp4": (Coding.E2M1_GROUPS, 1, 0, 1),
    }
    assert found[1:] == expected[scheme]
    rows = case.x_XK if coded is None else coded.codes_TK
    assert found.tensors[0].data_ptr() == rows.data_ptr()


def test_rows_as_codes_are_asked_for_where_the_scheme_wants_them():
    case = expert_case((1, 1, 2, 6, 64), scheme="fp8")
    with pytest.raises(AssertionError, match="fp8 with coded=None"):
        operands_of(case.x_XK, case.weight, None)

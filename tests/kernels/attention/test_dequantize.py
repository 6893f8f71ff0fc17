"""Codes taken apart: the assembler's bits, run step by step in numpy, and the kernels' way without it, against the codebooks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from holdfast.kernels.attention import dequantize
from holdfast.kernels.attention.dequantize import (
    fast_exp2,
    fast_log2,
    key_numbers,
    key_parts_3,
    key_parts_3_halves,
    key_parts_4,
    key_parts_5,
    key_parts_5_halves,
    upper_columns,
    value_parts_3,
    value_parts_4,
    value_parts_8,
)
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, tl
from holdfast.quant.kv_quantize import (
    CUBIC_3_BITS,
    CUBIC_4_BITS,
    KEY_CODEBOOKS,
    KEY_PARTS,
    VALUE_CODEBOOKS,
    VALUE_PARTS,
    QuantizedHeads,
    dequantize_keys,
    dequantize_values,
    part_dims,
    rotation_table,
)
from holdfast.quant.latent_quantize import LATENT_CODEBOOK, LATENT_STEP
from kernels.assembler import run_assembler
from kernels.quantized_kv_cases import HEAD_DIMS

# Numpy, on which the interpreter runs, warns of the logarithm of zero.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")

HEAD_DIM, NUM_TOKENS, BLOCK_N = 128, 256, 64
HALF = HEAD_DIM // 8
"""Columns of a half row of keys of 3 bits."""

KINDS = [("keys", 8), ("keys", 5), ("keys", 4), ("keys", 3), ("values", 8), ("values", 4), ("values", 3)]


def any_heads(what: str, bits: int) -> QuantizedHeads:
    """Random bytes, with which every code lies at every place; the scale is one. Bytes that are no number are left out."""
    generator = torch.Generator().manual_seed(bits)
    num_bytes = HEAD_DIM * {8: 8, 5: 4, 4: 4, 3: 2}[bits] // 8
    codes = torch.randint(256, (NUM_TOKENS, num_bytes), generator=generator, dtype=torch.uint8)
    if bits in (8, 5):
        codes = (torch.arange(256).unsqueeze(1) + torch.arange(num_bytes)).to(torch.uint8)
    if bits == 8:
        codes[codes & 127 == 127] = 0
    signs = torch.randint(256, (NUM_TOKENS, HEAD_DIM // 8), generator=generator, dtype=torch.uint8)
    return QuantizedHeads(codes, signs if bits in (3, 5) else None, torch.ones(NUM_TOKENS, dtype=torch.float16))


def expected_parts(heads: QuantizedHeads, what: str, bits: int) -> torch.Tensor:
    """[parts, tokens, columns]."""
    decode, num_parts = (dequantize_keys, KEY_PARTS[bits]) if what == "keys" else (dequantize_values, VALUE_PARTS[bits])
    return decode(heads, bits, HEAD_DIM)[:, part_dims(num_parts, HEAD_DIM)].transpose(0, 1)


@pytest.mark.each_value
@pytest.mark.parametrize(("what", "bits"), KINDS)
def test_dequantize_cases_hold_every_code_in_every_place(what, bits):
    heads = any_heads(what, bits)
    numbers = expected_parts(heads, what, bits)
    codebook = (KEY_CODEBOOKS if what == "keys" else VALUE_CODEBOOKS).get(bits)
    wanted = torch.tensor(codebook.values) if codebook else e4m3_numbers(range(256)).nan_to_num().unique()
    for place in numbers.transpose(1, 2).flatten(0, 1):
        assert torch.equal(place.unique(), wanted)


def e4m3_numbers(codes) -> torch.Tensor:
    return torch.tensor(list(codes), dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def test_fp8_word_constants_match_torch_bytes():
    for code, number in enumerate(e4m3_numbers(range(127))):
        if code >= 8:  # below are those without a leading one
            assert dequantize.fp8_byte(float(number)) == code
    for codebook in KEY_CODEBOOKS.values():
        for first in range(0, len(codebook.magnitudes), 4):
            magnitudes = codebook.magnitudes[first : first + 4]
            codes = torch.tensor(magnitudes).to(torch.float8_e4m3fn)
            assert codes.float().tolist() == list(magnitudes)
            assert int(dequantize.fp8_word(magnitudes), 16) == int(codes.view(torch.int32))


@given(st.floats(2.0**-14, 65504, width=16), st.sampled_from([1, -1]))
def test_fp16_twice_repeats_a_float16(number, sign):
    number = sign * number
    assert int(dequantize.fp16_twice(number), 16) == int(f16_word([number, number]))


@for_each("number", [CUBIC_4_BITS, CUBIC_3_BITS, 1.0, -519.5, -515.5])
def test_value_constants_are_exact_in_float16(number):
    assert int(dequantize.fp16_twice(number), 16) == int(f16_word([number, number]))
    assert float(torch.tensor(number).half()) == number


@for_each("number", [LATENT_STEP, -23.5 * LATENT_STEP, -263.5 * LATENT_STEP])
def test_latent_constants_are_exact_in_float16(number):
    assert float(torch.tensor(number).half()) == number


def test_latent_assembler_decodes_every_code_everywhere():
    """Every word of four codes, beside another."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    words = torch.stack((words, words.flip(0)), dim=1).contiguous()
    outputs = run_assembler(dequantize.latents_4_asm(), [words.numpy()], num_outputs=4)
    values = torch.tensor(LATENT_CODEBOOK.values)
    for part, output in enumerate(outputs):
        made = torch.from_numpy(output.copy().view(np.float16)).float().view(-1, 2)
        assert torch.equal(made, values[(words.int() >> 4 * part & 15).long()])


def f16_word(pair: list[float]) -> np.ndarray:
    return np.array(pair, dtype=np.float16).view(np.uint32)[0]


def from_e4m3(words: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(word.view(np.uint8)).view(torch.float8_e4m3fn).float() for word in words])


def from_f16(words: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(word.view(np.float16)).float() for word in words])


@for_each("bits", [5, 4, 3])
def test_key_asm_looks_up_every_code(bits):
    heads = any_heads("keys", bits)
    codes = heads.codes_XB.numpy()
    if bits == 4:
        out = run_assembler(dequantize.KEYS_4_TEXT, [codes], 2)
    else:
        assert heads.signs_XS is not None
        signs = np.tile(heads.signs_XS.numpy(), 2)
        upper = np.broadcast_to(np.repeat([0, 255], HALF).astype(np.uint8), signs.shape)
        text, pieces = (
            (dequantize.keys_5_asm(is_halved=False), 2) if bits == 5 else (dequantize.keys_3_asm(is_halved=False), 1)
        )
        out = run_assembler(text, [*np.split(codes, pieces, axis=1), signs, upper], 4)
    assert torch.equal(from_e4m3(out), expected_parts(heads, "keys", bits))


@for_each("bits", [5, 3])
def test_key_asm_looks_up_both_halves(bits):
    heads = any_heads("keys", bits)
    assert heads.signs_XS is not None
    pieces = np.split(heads.codes_XB.numpy(), bits - 1, axis=1)
    pieces = pieces[::2] + pieces[1::2]  # the lower half of columns first
    text = dequantize.keys_5_asm(is_halved=True) if bits == 5 else dequantize.keys_3_asm(is_halved=True)
    out = run_assembler(text, [*pieces, heads.signs_XS.numpy()], 8)
    assert torch.equal(torch.cat((from_e4m3(out[:4]), from_e4m3(out[4:])), -1), expected_parts(heads, "keys", bits))


@for_each("bits", [8, 4, 3])
def test_value_asm_computes_every_code(bits):
    heads = any_heads("values", bits)
    words = [heads.codes_XB.numpy()]
    if bits == 3:
        assert heads.signs_XS is not None
        words += [np.tile(heads.signs_XS.numpy(), 2)]
        upper = np.repeat([0, -1], HEAD_DIM // 16).astype(np.int16)
        words += [np.broadcast_to(upper, (NUM_TOKENS, HEAD_DIM // 8))]
    texts = {8: dequantize.VALUES_8_TEXT, 4: dequantize.values_4_asm(), 3: dequantize.values_3_asm()}
    out = run_assembler(texts[bits], words, VALUE_PARTS[bits])
    assert torch.equal(from_f16(out), expected_parts(heads, "values", bits))


@jit
def _key_kernel(
    p_codes, p_signs, p_out, BITS: constexpr, HEAD_DIM: constexpr, BLOCK_N: constexpr, COLUMNS: constexpr, HALVED: constexpr, PLAIN: constexpr
):  # fmt: skip
    """Parts [part, token, column], or [part, half, token, column]; as operands of a product with the identity, as elsewhere."""
    ROW: constexpr = HEAD_DIM * (8 if BITS == 8 else (2 if BITS == 3 else 4)) // 8
    SIGNS: constexpr = HEAD_DIM // 8
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_c = tl.arange(0, COLUMNS)
    b_one = (o_c[:, None] == o_c[None, :]).to(tl.float16)
    p_row = p_codes + o_n[:, None] * ROW + o_c[None, :]
    if PLAIN and BITS < 8:
        p_words = p_codes.to(tl.pointer_type(tl.int32)) + o_n[:, None] * (ROW // 4) + (o_c // 4)[None, :]
        b_codes = tl.load(p_words)
    else:
        b_codes = tl.load(p_row)
    if BITS == 8:
        b_parts = (key_numbers(b_codes, PLAIN),)
    else:
        if BITS == 4:
            b_parts = key_parts_4(b_codes, o_c, PLAIN)
        else:
            if HALVED:
                b_signs = tl.load(p_signs + o_n[:, None] * SIGNS + o_c[None, :])
                if BITS == 5:
                    b_codes_2, b_upper_2 = tl.load(p_row + 2 * SIGNS), tl.load(p_row + 3 * SIGNS)
                    b_parts = key_parts_5_halves(b_codes, b_codes_2, tl.load(p_row + SIGNS), b_upper_2, b_signs)
                else:
                    b_parts = key_parts_3_halves(b_codes, tl.load(p_row + SIGNS), b_signs)
            else:
                b_signs = tl.load(p_signs + o_n[:, None] * SIGNS + (o_c % SIGNS)[None, :])
                if BITS == 5:
                    p_upper = p_words + HEAD_DIM // 16 if PLAIN else p_row + HEAD_DIM // 4
                    b_parts = key_parts_5(b_codes, tl.load(p_upper), b_signs, o_c, SIGNS, PLAIN)
                else:
                    b_parts = key_parts_3(b_codes, b_signs, o_c, SIGNS, PLAIN)
    NUM_PARTS: constexpr = 1 if BITS == 8 else (2 if BITS == 4 else (8 if HALVED else 4))
    for part in tl.static_range(NUM_PARTS):
        p_part = p_out + (part * tl.num_programs(0) * BLOCK_N + o_n)[:, None] * COLUMNS + o_c[None, :]
        tl.store(p_part, tl.dot(b_parts[part], b_one))


@jit
def _value_kernel(
    p_words, p_signs, p_upper, p_out, BITS: constexpr, HEAD_DIM: constexpr, BLOCK_N: constexpr, COLUMNS: constexpr, PLAIN: constexpr
):  # fmt: skip
    """Parts [part, token, column]; as operands of a product with the identity, as elsewhere."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_i = tl.arange(0, BLOCK_N)
    o_c = tl.arange(0, COLUMNS)
    b_one = (o_i[:, None] == o_i[None, :]).to(tl.float16)
    b_words = tl.load(p_words + o_n[None, :] * COLUMNS + o_c[:, None])
    if BITS == 8:
        b_parts = value_parts_8(b_words, PLAIN)
    else:
        if BITS == 4:
            b_parts = value_parts_4(b_words, PLAIN)
        else:
            SIGNS: constexpr = HEAD_DIM // 16
            b_signs = tl.load(p_signs + o_n[None, :] * SIGNS + (o_c % SIGNS)[:, None])
            b_parts = value_parts_3(b_words, b_signs, upper_columns(p_upper, o_c), PLAIN)
    NUM_PARTS: constexpr = 2 if BITS == 8 else (4 if BITS == 4 else 8)
    for part in tl.static_range(NUM_PARTS):
        p_part = p_out + (part * tl.num_programs(0) * BLOCK_N + o_n)[None, :] * COLUMNS + o_c[:, None]
        tl.store(p_part, tl.dot(b_parts[part], b_one))


def run_parts(what: str, bits: int, device: torch.device, halved: bool = False) -> tuple[torch.Tensor, QuantizedHeads]:
    heads = any_heads(what, bits)
    codes, signs = (None if x is None else x.to(device) for x in heads[:2])
    num_parts = (KEY_PARTS if what == "keys" else VALUE_PARTS)[bits]
    columns = HEAD_DIM // num_parts
    if halved:
        num_parts, columns = 2 * num_parts, columns // 2
    out = torch.full((num_parts, NUM_TOKENS, columns), float("nan"), device=device)
    sizes = {"BITS": bits, "HEAD_DIM": HEAD_DIM, "BLOCK_N": BLOCK_N, "COLUMNS": columns}
    sizes |= {"PLAIN": is_interpreted(), "num_warps": 1}
    grid = (NUM_TOKENS // BLOCK_N,)
    if what == "keys":
        _key_kernel[grid](codes, signs, out, HALVED=halved, **sizes)
    else:
        assert codes is not None
        table = rotation_table(HEAD_DIM, torch.float16, device)
        signs = None if signs is None else signs.view(torch.int16)
        _value_kernel[grid](codes.view(torch.int16), signs, table[HEAD_DIM], out, **sizes)
    return out.cpu(), heads


@pytest.mark.each_value
@pytest.mark.parametrize(("what", "bits"), KINDS)
def test_dequantized_parts_equal_codebook_values(device, what, bits):
    parts, heads = run_parts(what, bits, device)
    assert torch.equal(parts, expected_parts(heads, what, bits))


@pytest.mark.gpu
@for_each("bits", [5, 3])
def test_dequantized_halves_equal_codebook_values(device, bits):
    parts, heads = run_parts("keys", bits, device, halved=True)
    assert torch.equal(torch.cat((parts[:4], parts[4:]), -1), expected_parts(heads, "keys", bits))


@jit
def _upper_kernel(p_upper, p_out, COLUMNS: constexpr):
    o_c = tl.arange(0, COLUMNS)
    tl.store(p_out + o_c[:, None], upper_columns(p_upper, o_c))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=lambda size: f"D{size}")
def test_column_table_marks_columns_of_the_upper_half(device, head_dim, dtype):
    columns = max(16, 1 << (head_dim // 8 - 1).bit_length())
    out = torch.full((columns,), 7, dtype=torch.int16, device=device)
    _upper_kernel[(1,)](rotation_table(head_dim, dtype, device)[head_dim], out, COLUMNS=columns)
    assert out.tolist() == [0 if column < head_dim // 16 else -1 for column in range(columns)]


@jit
def _power_kernel(p_x, p_exp2, p_log2, BLOCK: constexpr, PLAIN: constexpr):
    o_x = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o_x)
    tl.store(p_exp2 + o_x, fast_exp2(b_x, PLAIN))
    tl.store(p_log2 + o_x, fast_log2(tl.abs(b_x), PLAIN))


def test_exp2_and_log2_are_exact_at_their_edges(device):
    """exp2 of -inf is 0, and log2 of a zero scale is bounded."""
    infinity = float("inf")
    x = torch.tensor([-infinity, -200, -126, -24.5, -1, -(2.0**-24), 0, 2.0**-24, 0.3, 1, 24, 38.25, 127, 3, 5, 7])
    exp2, log2 = torch.full((2, 16), float("nan"), device=device)
    _power_kernel[(1,)](x.to(device), exp2, log2, BLOCK=16, PLAIN=is_interpreted())
    torch.testing.assert_close(exp2.cpu(), torch.exp2(x), rtol=1e-6, atol=1e-38)
    torch.testing.assert_close(log2.cpu(), torch.log2(x.abs()), rtol=1e-6, atol=1e-6)

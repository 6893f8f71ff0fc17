"""CodedTokens: what goes in comes out as the format codes it, however it was cut, grown, cropped or shuffled."""

import pytest
import torch

from holdfast.integrations import transformers as coded_tokens
from holdfast.integrations.transformers import ROOM_STEP, CodedTokens
from holdfast.quant.formats import KV_FORMATS
from holdfast.quant.kv_quantize import decode_keys, decode_values, encode_keys, encode_values, rotate_heads

FORMATS = [name for name, kv_format in KV_FORMATS.items() if kv_format.is_coded]
every_format = pytest.mark.parametrize("name", FORMATS)
every_side = pytest.mark.parametrize("side", ["k", "v"])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bits_of(name: str, side: str) -> int:
    bits = KV_FORMATS[name].key_bits if side == "k" else KV_FORMATS[name].value_bits
    assert bits is not None
    return bits


def empty(name: str, side: str, like_NKTD: torch.Tensor) -> CodedTokens:
    num_heads, head_dim = like_NKTD.shape[1], like_NKTD.shape[-1]
    planes = [plane for plane in KV_FORMATS[name].planes(num_heads, head_dim) if plane.name.startswith(side)]
    bits = bits_of(name, side)
    return CodedTokens(planes, bits, like_NKTD, rotate_heads(torch.eye(head_dim)) if bits < 8 else None)


def read(coded: CodedTokens, like_NKTD: torch.Tensor) -> torch.Tensor:
    out = torch.full((*like_NKTD.shape[:2], coded.length, like_NKTD.shape[-1]), torch.nan, dtype=like_NKTD.dtype)
    coded.read(out)
    return out


def round_trip(x_NKTD: torch.Tensor, name: str, side: str) -> torch.Tensor:
    """By the functions of quant alone."""
    bits, head_dim = bits_of(name, side), x_NKTD.shape[-1]
    y_NKTD = rotate_heads(x_NKTD) if bits < 8 else x_NKTD
    if side == "k":
        found = decode_keys(encode_keys(y_NKTD, bits), bits, head_dim)
    else:
        found = decode_values(encode_values(y_NKTD, bits), bits, head_dim)
    return rotate_heads(found) if bits < 8 else found


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@every_side
@every_format
def test_it_is_the_arithmetic_of_the_format(name: str, side: str, head_dim: int) -> None:
    x_NKTD = numbers(2, 3, 21, head_dim)
    coded = empty(name, side, x_NKTD)
    coded.append(x_NKTD)
    torch.testing.assert_close(read(coded, x_NKTD), round_trip(x_NKTD, name, side), rtol=0, atol=2e-5)
    error = (read(coded, x_NKTD) - x_NKTD).square().mean() / x_NKTD.square().mean()
    assert error < {8: 0.001, 4: 0.012, 3: 0.04}[bits_of(name, side)]


@every_side
@every_format
def test_how_tokens_are_cut_does_not_matter(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x_NKTD = numbers(2, 3, 37, 32)
    whole = empty(name, side, x_NKTD)
    whole.append(x_NKTD)
    wanted = read(whole, x_NKTD)
    one_by_one = empty(name, side, x_NKTD)
    for token in range(37):
        one_by_one.append(x_NKTD[:, :, token : token + 1])
    torch.testing.assert_close(read(one_by_one, x_NKTD), wanted, rtol=0, atol=2e-5)
    monkeypatch.setattr(coded_tokens, "MAX_NUMBERS", 1)
    in_pieces = empty(name, side, x_NKTD)
    in_pieces.append(x_NKTD)
    torch.testing.assert_close(read(in_pieces, x_NKTD), wanted, rtol=0, atol=2e-5)


@every_side
@every_format
def test_bytes_are_those_of_the_format(name: str, side: str) -> None:
    x_NKTD = numbers(2, 3, ROOM_STEP + 1, 32)
    coded = empty(name, side, x_NKTD)
    planes = {p.name: p.bytes_per_token for p in KV_FORMATS[name].planes(3, 32) if p.name.startswith(side)}
    assert coded.used_bytes == dict.fromkeys(planes, 0)
    assert coded.held_bytes == 0
    for length, room in [(1, ROOM_STEP), (ROOM_STEP, ROOM_STEP), (ROOM_STEP + 1, 2 * ROOM_STEP)]:
        coded.append(x_NKTD[:, :, coded.length : length])
        assert coded.used_bytes == {plane: 2 * length * size for plane, size in planes.items()}
        assert coded.held_bytes == 2 * room * sum(planes.values())


@every_side
def test_nothing_is_lost_when_room_is_made(side: str) -> None:
    x_NKTD = numbers(1, 2, 2 * ROOM_STEP + 3, 16)
    coded = empty("turboquant_3bit_nc", side, x_NKTD)
    coded.append(x_NKTD[:, :, :5])
    first = read(coded, x_NKTD)
    coded.append(x_NKTD[:, :, 5:])
    assert torch.equal(read(coded, x_NKTD)[:, :, :5], first)
    torch.testing.assert_close(read(coded, x_NKTD), round_trip(x_NKTD, "turboquant_3bit_nc", side), rtol=0, atol=2e-5)


@every_side
def test_what_was_cut_off_is_written_over(side: str) -> None:
    x_NKTD = numbers(2, 2, 30, 16)
    coded = empty("turboquant_k8v4", side, x_NKTD)
    coded.append(x_NKTD)
    coded.truncate(11)
    assert read(coded, x_NKTD).shape[2] == 11
    coded.append(x_NKTD[:, :, 20:])
    kept = torch.cat((x_NKTD[:, :, :11], x_NKTD[:, :, 20:]), dim=2)
    torch.testing.assert_close(read(coded, x_NKTD), round_trip(kept, "turboquant_k8v4", side), rtol=0, atol=2e-5)
    coded.truncate(0)
    assert read(coded, x_NKTD).shape[2] == 0
    with pytest.raises(AssertionError, match="1 of 0 tokens"):
        coded.truncate(1)


@every_side
def test_sequences_change_places(side: str) -> None:
    x_NKTD = numbers(3, 2, 9, 16)
    coded = empty("turboquant_3bit_nc", side, x_NKTD)
    coded.append(x_NKTD)
    before = read(coded, x_NKTD)
    order = torch.tensor([2, 0, 0, 1])
    coded.select(lambda plane: plane.index_select(0, order))
    assert torch.equal(read(coded, x_NKTD[order]), before[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_side
@every_format
def test_it_comes_out_in_the_type_of_the_reader(name: str, side: str, dtype: torch.dtype) -> None:
    x_NKTD = numbers(1, 2, 5, 48).to(dtype)
    coded = empty(name, side, x_NKTD)
    coded.append(x_NKTD)
    wanted = round_trip(x_NKTD.float(), name, side).to(dtype)
    torch.testing.assert_close(read(coded, x_NKTD), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@every_side
def test_a_token_without_numbers_spoils_no_other(side: str) -> None:
    x_NKTD = numbers(2, 2, 6, 16)
    sound = round_trip(x_NKTD, "turboquant_4bit_nc", side)
    x_NKTD[1, 0, 3, 7] = torch.nan
    coded = empty("turboquant_4bit_nc", side, x_NKTD)
    coded.append(x_NKTD)
    found = read(coded, x_NKTD)
    assert found[1, 0, 3].isnan().all()
    found[1, 0, 3] = sound[1, 0, 3]
    torch.testing.assert_close(found, sound, rtol=0, atol=2e-5)


def test_gradients_end_here() -> None:
    x_NKTD = numbers(1, 1, 4, 16).requires_grad_()
    coded = empty("turboquant_k8v4", "v", x_NKTD)
    coded.append(x_NKTD)
    assert not read(coded, x_NKTD).requires_grad


def test_a_rotation_belongs_to_few_bits() -> None:
    x_NKTD = numbers(1, 1, 1, 16)
    planes = KV_FORMATS["fp8"].planes(1, 16)[:2]
    with pytest.raises(AssertionError, match="8 bits"):
        CodedTokens(planes, 8, x_NKTD, torch.eye(16))

"""Values of IQ2 and IQ3 blocks, which stay as stored: an index selects several magnitudes from a grid, and bits give their signs.

data/ggml_grids.json holds the grids. Each block has 256 elements and begins with a float16 scale. A magnitude has six bits,
a sub-scale five and a scale 11, so every product is exact in float32.

N blocks, S sub-blocks in a block, E elements in a block, G indices in a block, R rows of a grid, W magnitudes in a row
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources

import torch


@cache
def _grids(device: torch.device) -> Mapping[str, torch.Tensor]:
    """Return each grid as one integer a row [R]: bytes of W magnitudes."""
    text = resources.files("holdfast").joinpath("data", "ggml_grids.json").read_text(encoding="utf-8")
    tables: dict[str, torch.Tensor] = {}
    for name, grid in json.loads(text)["grids"].items():
        values = bytes(grid["values"])
        digits = "".join(grid["rows"]).encode().translate(bytes.maketrans(b"01234567"[: len(values)], values))
        row_type = {4: torch.int32, 8: torch.int64}[grid["width"]]
        tables[name] = torch.frombuffer(bytearray(digits), dtype=torch.uint8).view(row_type).to(device)
    return tables


@cache
def _signs(device: torch.device) -> torch.Tensor:
    """Return eight signs for each byte, as one integer [256]: bit i is set if element i is negative."""
    bits = torch.arange(256, dtype=torch.int16).unsqueeze(1) >> torch.arange(8, dtype=torch.int16) & 1
    return bits.mul_(-2).add_(1).to(torch.int8).view(torch.int64).view(-1).to(device)


def _even_signs(seven_bits: torch.Tensor) -> torch.Tensor:
    """Seven bits of signs -> eight: the last makes the number of negative elements even."""
    folded = seven_bits ^ seven_bits >> 4
    folded = folded ^ folded >> 2
    return seven_bits | ((folded ^ folded >> 1) & 1) << 7


def _fill(
    name: str, indices_NG: torch.Tensor, signs: torch.Tensor, scales_NS: torch.Tensor, out_NE: torch.Tensor
) -> None:
    """Set values to scale * magnitude * sign. `signs` are bytes, one for eight elements."""
    magnitudes = _grids(out_NE.device)[name].index_select(0, indices_NG.reshape(-1).to(torch.int32)).view(torch.int8)
    magnitudes.mul_(_signs(out_NE.device).index_select(0, signs.reshape(-1).to(torch.int32)).view(torch.int8))
    out_NE.copy_(magnitudes.view(out_NE.shape))
    num_sub_blocks = scales_NS.shape[1]
    out_NE.view(-1, num_sub_blocks, 256 // num_sub_blocks).mul_(scales_NS.unsqueeze(2))


def _scales(blocks: torch.Tensor, sub_scales_NS: torch.Tensor, unit: float) -> torch.Tensor:
    """Return scale * (2 * sub-scale + 1) * unit, [N, S]."""
    return sub_scales_NS.float().mul_(2).add_(1).mul_(unit).mul_(blocks.view(torch.float16)[:, :1].float())


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Low and high halves of each byte, the low one first: [N, S / 2] -> [N, S]."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=2).flatten(1)


def _words(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:
    """Bytes from `first_byte` on as 32-bit words. They are copied, since those words lie at multiples of two bytes."""
    return blocks[:, first_byte:].clone(memory_format=torch.contiguous_format).view(torch.int32)


def _packed_signs(words: torch.Tensor) -> torch.Tensor:
    """Four times seven bits of signs in the low 28 bits of each word."""
    return _even_signs(words.unsqueeze(2) >> torch.arange(0, 28, 7, dtype=torch.int32, device=words.device) & 0x7F)


def _fill_iq2_xxs(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """By 32 elements: four indices, then a word with four times seven signs and a four-bit sub-scale on top."""
    words = _words(blocks, 2)[:, 1::2]
    indices_NG = blocks[:, 2:].unflatten(1, (8, 8))[:, :, :4]
    _fill("IQ2_XXS", indices_NG, _packed_signs(words), _scales(blocks, words >> 28 & 0x0F, 1 / 8), out_NE)


def _fill_iq2_xs(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """32 halfwords of a nine-bit index below seven signs, then eight bytes of sub-scales; by 16 elements."""
    codes = blocks.view(torch.int16)[:, 1:33].to(torch.int32)
    scales_NS = _scales(blocks, _halves(blocks[:, 66:]), 1 / 8)
    _fill("IQ2_XS", codes & 0x1FF, _even_signs(codes >> 9 & 0x7F), scales_NS, out_NE)


def _fill_iq2_s(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """32 bytes of indices, 32 of signs, eight with two high bits of each index, eight of sub-scales; by 16 elements."""
    high_bits = blocks[:, 66:74].unsqueeze(2) >> torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device) & 3
    indices_NG = blocks[:, 2:34].to(torch.int32) | high_bits.flatten(1).to(torch.int32) << 8
    _fill("IQ2_S", indices_NG, blocks[:, 34:66], _scales(blocks, _halves(blocks[:, 74:]), 1 / 8), out_NE)


def _fill_iq3_xxs(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """64 bytes of indices, then a word for 32 elements: four times seven signs and a four-bit sub-scale on top."""
    words = _words(blocks, 66)
    scales_NS = _scales(blocks, words >> 28 & 0x0F, 1 / 4)
    _fill("IQ3_XXS", blocks[:, 2:66], _packed_signs(words), scales_NS, out_NE)


def _fill_iq3_s(blocks: torch.Tensor, out_NE: torch.Tensor) -> None:
    """64 bytes of indices, eight with a ninth bit of each, 32 of signs, four of sub-scales; by 32 elements."""
    ninth_bits = blocks[:, 66:74].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    indices_NG = blocks[:, 2:66].to(torch.int32) | ninth_bits.flatten(1).to(torch.int32) << 8
    _fill("IQ3_S", indices_NG, blocks[:, 74:106], _scales(blocks, _halves(blocks[:, 106:]), 1), out_NE)


_FILLS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "IQ2_XXS": _fill_iq2_xxs,
    "IQ2_XS": _fill_iq2_xs,
    "IQ2_S": _fill_iq2_s,
    "IQ3_XXS": _fill_iq3_xxs,
    "IQ3_S": _fill_iq3_s,
}


def fill_grid(name: str) -> Callable[[Sequence[torch.Tensor], torch.Tensor], None]:
    """Return the function that fills `out_NE` from the one plane of this type."""
    return lambda planes, out_NE: _FILLS[name](planes[0], out_NE)

"""The few assembler instructions of a GPU that kernels have inline, over arrays of registers: what they do where none is."""

import re
from collections.abc import Sequence

import numpy as np
import torch

Register = np.ndarray
"""uint32, one for every thread."""


def run_assembler(text: str, inputs: Sequence[np.ndarray], num_outputs: int) -> list[Register]:
    """Outputs are $0 and on, inputs those behind them, whose bytes are cut into registers."""
    registers = {f"${num_outputs + i}": np.ascontiguousarray(x).view(np.uint32) for i, x in enumerate(inputs)}
    shape = next(iter(registers.values())).shape

    def read(name: str) -> Register:
        return (
            registers[name] if name in registers else np.full(shape, int(re.sub("^0f", "0x", name), 0), dtype=np.uint32)
        )

    for line in text.strip().removeprefix("{").removesuffix("}").strip().split("\n"):
        name, out, *sources = re.findall(r"\{.*?\}|[\w.$]+", line)
        if name == ".reg":
            continue
        if out.startswith("{"):
            assert name == "mov.b32", f"{name} into two registers is not known here"
            for i, half in enumerate(re.findall(r"\w+", out)):
                registers[half] = read(sources[0]) >> np.uint32(16 * i) & np.uint32(0xFFFF)
        else:
            registers[out] = _result(name, [read(source) for source in sources])
            assert registers[out].dtype == np.uint32
    return [registers[f"${i}"] for i in range(num_outputs)]


def _result(name: str, sources: list[Register]) -> Register:
    if name == "mov.b32":
        return sources[0]
    if name == "and.b32":
        return sources[0] & sources[1]
    if name == "or.b32":
        return sources[0] | sources[1]
    if name == "xor.b32":
        return sources[0] ^ sources[1]
    if name == "shl.b32":
        return sources[0] << sources[1]
    if name == "shr.u32":
        return sources[0] >> sources[1]
    if name == "mad.lo.u32":
        return sources[0] * sources[1] + sources[2]
    if name == "mul.lo.u32":
        return sources[0] * sources[1]
    if name == "lop3.b32":
        return _by_table(sources[:3], int(sources[3].flat[0]))
    if name == "prmt.b32":
        return _permuted(*sources)
    if name == "cvt.rn.f16x2.e4m3x2":
        pairs = np.ascontiguousarray(sources[0].astype(np.uint16)).view(np.uint8)
        return torch.from_numpy(pairs).view(torch.float8_e4m3fn).half().numpy().view(np.uint32)
    if name == "cvt.f32.f16":
        return sources[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    if name == "cvt.rn.f16x2.f32":
        high, low = (source.view(np.float32).astype(np.float16).view(np.uint16).astype(np.uint32) for source in sources)
        return low | high << np.uint32(16)
    if name == "sub.f32":
        return (sources[0].view(np.float32) - sources[1].view(np.float32)).view(np.uint32)
    if name in ("cvt.rn.bf16x2.f32", "fma.rn.bf16x2"):
        return _in_bfloat16(name, sources)
    if name == "add.f32":
        return (sources[0].view(np.float32) + sources[1].view(np.float32)).view(np.uint32)
    if name == "cvt.rn.satfinite.e4m3x2.f32":
        high, low = (torch.from_numpy(source.view(np.float32)).clamp(-448, 448) for source in sources)
        codes = [part.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32) for part in (low, high)]
        return codes[0] | codes[1] << np.uint32(8)
    # Exact in float64, so each instruction rounds once.
    a, b, *c = (np.ascontiguousarray(source).view(np.float16).astype(np.float64) for source in sources)
    results = {"add.rn.f16x2": a + b, "mul.rn.f16x2": a * b, "fma.rn.f16x2": a * b + sum(c)}
    return results[name].astype(np.float16).view(np.uint32)


def _in_bfloat16(name: str, sources: list[Register]) -> Register:
    """Exact in float64, so each instruction rounds once."""
    if name == "cvt.rn.bf16x2.f32":
        high, low = (source.view(np.float32).astype(np.float64) for source in sources)
        halves = [low, high]
    else:
        a, b, c = (
            [(source >> np.uint32(shift) << np.uint32(16)).view(np.float32).astype(np.float64) for shift in (0, 16)]
            for source in sources
        )
        halves = [a[i] * b[i] + c[i] for i in range(2)]
    bits = [torch.from_numpy(half).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16) for half in halves]
    return bits[0].astype(np.uint32) | bits[1].astype(np.uint32) << np.uint32(16)


def _by_table(sources: list[Register], table: int) -> Register:
    """Bit by bit: the bits of three sources, the first of them the highest, say which bit of the table it is."""
    result = np.zeros_like(sources[0])
    for case in range(8):
        if table >> case & 1:
            a, b, c = (x if case >> 2 - i & 1 else ~x for i, x in enumerate(sources))
            result |= a & b & c
    return result


def _permuted(low: Register, high: Register, selector: Register) -> Register:
    """Four bytes of eight; a selector of 8 and above fills a byte with the sign of its own."""
    both = np.stack((low, high), axis=-1).view(np.uint8)
    chosen = []
    for i in range(4):
        place = (selector >> np.uint32(4 * i) & 15)[..., None]
        number = np.take_along_axis(both, place & 7, -1)
        chosen.append(np.where(place & 8, number.view(np.int8) >> 7, number.view(np.int8)).view(np.uint8))
    return np.concatenate(chosen, axis=-1).view(np.uint32)[..., 0]

"""Activations (silu, relu, both gelus), the gate of a gated MLP, and the clamped gates of gpt-oss and DeepSeek-V4.

T rows, I columns, X = 2 I of gate and up
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.kernels.fp8 import BLOCK_COLUMNS, as_bits, store_coded_groups
from holdfast.kernels.native_library import native_for
from holdfast.kernels.operation import DECLINED, operation, pdl_flags
from holdfast.kernels.triton_compat import constexpr, is_interpreted, jit, kernel_constant, release_then_wait, tl

REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""Activations by their name in models/spec.py."""
NATIVE_KINDS = ("silu", "gelu", "gelu_tanh")
"""Activations in the C function's numbering; relu is exact, so torch computes it."""
COLUMNS_PER_PROGRAM = 2048
NUM_WARPS = 8
"""A thread loads 16 bytes each of gate and up: a full multiprocessor has 64 KiB in flight, and one row of 25,600 columns
still spreads over 13 of them."""

LOG2_E = kernel_constant(1.4426950408889634)
EXP2_ASM = kernel_constant("ex2.approx.ftz.f32 $0, $1;")


def activate_reference(x_TI: Tensor, kind: str, out_TI: Tensor | None = None) -> Tensor:
    """Apply an activation, into `out_TI` if given, which may be x itself. Rows may be strided."""
    y_TI = REFERENCES[kind](x_TI)
    return y_TI if out_TI is None else out_TI.copy_(y_TI)


def activate_native(x_TI: Tensor, kind: str, out_TI: Tensor | None = None) -> Tensor:
    """Batch invariant: torch rounds the last elements of a float32 tensor differently."""
    places = (x_TI[:0], None if out_TI is None else out_TI[:0])  # strided rows are copied first
    library = native_for(*places) if kind in NATIVE_KINDS else None
    if library is None:
        return DECLINED
    if out_TI is not None and out_TI.is_contiguous():
        y_TI = out_TI if out_TI is x_TI else out_TI.copy_(x_TI)
    else:
        y_TI = x_TI.clone(memory_format=torch.contiguous_format)
    library.holdfast_activate(y_TI.data_ptr(), y_TI.numel(), NATIVE_KINDS.index(kind))
    return y_TI if out_TI is None or y_TI is out_TI else out_TI.copy_(y_TI)


def activate_triton(x_TI: Tensor, kind: str, out_TI: Tensor | None = None) -> Tensor:
    """Launch one program for some columns of a row."""
    num_rows, size = x_TI.shape
    y_TI = x_TI.new_empty(num_rows, size) if out_TI is None else out_TI
    assert kind in REFERENCES, f"{kind=} is none of {', '.join(REFERENCES)}"
    assert x_TI.stride(1) == y_TI.stride(1) == 1, f"{x_TI.stride()=} {y_TI.stride()=}: columns lie apart"
    if y_TI.numel():
        num_blocks = -(-size // COLUMNS_PER_PROGRAM)
        _activate_kernel[(num_rows * num_blocks,)](
            x_TI, y_TI, x_TI.stride(0), y_TI.stride(0), size,
            KIND=kind, NUM_BLOCKS=num_blocks, BLOCK=COLUMNS_PER_PROGRAM, num_warps=NUM_WARPS,
        )  # fmt: skip
    return y_TI


activate = operation(reference=activate_reference, triton=activate_triton, native=activate_native)


@jit
def _activate_kernel(p_x, p_y, x_stride, y_stride, size, KIND: constexpr, NUM_BLOCKS: constexpr, BLOCK: constexpr):
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    o_i = (i_program % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < size
    b_x = tl.load(p_x + i_row * x_stride + o_i, mask=m_i, other=0.0).to(tl.float32)
    tl.store(p_y + i_row * y_stride + o_i, activated_numbers(b_x, KIND).to(p_y.dtype.element_ty), mask=m_i)


@jit
def gated_columns(b_gate, b_up, KIND: constexpr, LIMIT: constexpr, PLAIN: constexpr):
    """Return what `gate_mul` rounds, to the bit."""
    if LIMIT > 0:
        b_gate, b_up = _clamped_numbers(b_gate, b_up, LIMIT)
    if KIND == "silu" and not PLAIN:
        # Like tl.sigmoid, whose exponential also scales results below 2^-126: 1 is added to them here.
        b_power = tl.inline_asm_elementwise(EXP2_ASM, "=f,f", [b_gate * -LOG2_E], tl.float32, is_pure=True, pack=1)
        b_y = b_gate * (1.0 / (1.0 + b_power)) * b_up
    else:
        b_y = activated_numbers(b_gate, KIND) * b_up
    return b_y


@jit
def activated_numbers(b_x, KIND: constexpr):
    if KIND == "silu":
        b_y = b_x * tl.sigmoid(b_x)
    elif KIND == "gelu":
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), without cancellation
        b_y = b_x * tl.sigmoid(1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x))
    else:
        b_y = tl.where(b_x < 0.0, 0.0, b_x)  # a maximum would drop NaN
    return b_y


def gate_mul_reference(gate_up_TX: Tensor, kind: str, out_TI: Tensor, limit: float | None = None) -> Tensor:
    """Multiply the activation of the left half by the right half: [T, 2 I] -> [T, I], into `out_TI`.

    A limit bounds the left half from above, and the right half on both sides.
    """
    if limit is not None:
        gate_up_TX = clamped_halves(gate_up_TX, limit)
    if kind == "silu":
        return silu_mul(gate_up_TX, out_TI)
    gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
    return activate(gate_TI, kind, out_TI).mul_(up_TI)


def clamped_halves(gate_up_TX: Tensor, limit: float) -> Tensor:
    """Clamp gates from above and ups on both sides; NaN stays NaN."""
    gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
    return torch.cat((gate_TI.clamp(max=limit), up_TI.clamp(-limit, limit)), dim=-1)


def silu_mul_reference(gate_up_TX: Tensor, out_TI: Tensor | None = None) -> Tensor:
    """Multiply silu of the left half by the right half: [T, 2 I] -> [T, I], into `out_TI` if given."""
    gate_TI, up_TI = gate_up_TX.chunk(2, dim=-1)
    return torch.mul(F.silu(gate_TI), up_TI, out=out_TI)


def silu_mul_native(gate_up_TX: Tensor, out_TI: Tensor | None = None) -> Tensor:
    y_TI = _halved(gate_up_TX) if out_TI is None else out_TI
    library = native_for(gate_up_TX, y_TI)
    if library is None:
        return DECLINED
    library.holdfast_silu_mul(gate_up_TX.data_ptr(), y_TI.data_ptr(), len(gate_up_TX), gate_up_TX.shape[1] // 2)
    return y_TI


def silu_mul_triton(gate_up_TX: Tensor, out_TI: Tensor | None = None) -> Tensor:
    return gate_mul_triton(gate_up_TX, "silu", _halved(gate_up_TX) if out_TI is None else out_TI)


def _halved(gate_up_TX: Tensor) -> Tensor:
    return gate_up_TX.new_empty(len(gate_up_TX), gate_up_TX.shape[1] // 2)


silu_mul = operation(reference=silu_mul_reference, triton=silu_mul_triton, native=silu_mul_native)


def gate_mul_triton(gate_up_TX: Tensor, kind: str, out_TI: Tensor, limit: float | None = None) -> Tensor:
    """Launch one program for some columns of a row. It rounds once; torch rounds the activation too."""
    return launch_gate_mul(gate_up_TX, kind, out_TI, limit)


def launch_gate_mul(
    gate_up_TX: Tensor,
    kind: str,
    out_TI: Tensor,
    limit: float | None,
    codes: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Launch the kernel of `gate_mul`. `codes` receive the result as e4m3 too, with a scale for every BLOCK_COLUMNS."""
    num_rows, width = gate_up_TX.shape
    assert gate_up_TX.stride(1) == out_TI.stride(1) == 1, (
        f"{gate_up_TX.stride()=} {out_TI.stride()=}: columns lie apart"
    )
    codes_TI, scales_TB = (None, None) if codes is None else (as_bits(codes[0]), codes[1])
    assert scales_TB is None or scales_TB.shape[1] == -(-width // (2 * BLOCK_COLUMNS)), f"{scales_TB.shape=} {width=}"
    if out_TI.numel():
        num_blocks = -(-width // 2 // COLUMNS_PER_PROGRAM)
        _gate_mul_kernel[(num_rows * num_blocks,)](
            gate_up_TX, out_TI, codes_TI, scales_TB, gate_up_TX.stride(0), out_TI.stride(0),
            *(None if rows is None else rows.stride(0) for rows in (codes_TI, scales_TB)),
            None if scales_TB is None else scales_TB.stride(1), width // 2,
            KIND=kind, LIMIT=limit or 0.0, NUM_BLOCKS=num_blocks, BLOCK=COLUMNS_PER_PROGRAM, GROUP=BLOCK_COLUMNS,
            PLAIN=is_interpreted(), num_warps=NUM_WARPS, **pdl_flags(gate_up_TX),
        )  # fmt: skip
    return out_TI


gate_mul = operation(reference=gate_mul_reference, triton=gate_mul_triton)


@jit
def _gate_mul_kernel(
    p_gate_up, p_y, p_codes, p_scales, x_stride, y_stride, code_stride, scale_stride, group_stride, size,
    KIND: constexpr, LIMIT: constexpr, NUM_BLOCKS: constexpr, BLOCK: constexpr, GROUP: constexpr, PLAIN: constexpr,
    PDL: constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    i_row = (i_program // NUM_BLOCKS).to(tl.int64)
    first = (i_program % NUM_BLOCKS) * BLOCK
    o_i = first + tl.arange(0, BLOCK)
    m_i = o_i < size
    release_then_wait(PDL)
    b_gate = tl.load(p_gate_up + i_row * x_stride + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate_up + i_row * x_stride + size + o_i, mask=m_i, other=0.0).to(tl.float32)
    if LIMIT > 0:
        b_gate, b_up = _clamped_numbers(b_gate, b_up, LIMIT)
    b_y = (activated_numbers(b_gate, KIND) * b_up).to(p_y.dtype.element_ty)
    tl.store(p_y + i_row * y_stride + o_i, b_y, mask=m_i)
    if p_codes is not None:
        p_row_scales = p_scales + i_row * scale_stride + (first // GROUP) * group_stride
        p_row_codes = p_codes + i_row * code_stride + o_i
        b_y = tl.where(m_i, b_y.to(tl.float32), 0.0)
        IS_HALF: constexpr = p_y.dtype.element_ty.primitive_bitwidth == 16
        store_coded_groups(p_row_codes, p_row_scales, b_y, m_i, group_stride, size - first, GROUP, PLAIN, IS_HALF)


SWIGLU_ALPHA = 1.702
"""Factor of the clamped gate before the sigmoid."""
ALPHA = kernel_constant(SWIGLU_ALPHA)


class GateForm(NamedTuple):
    """Layout of gate and up, and how they are combined."""

    is_interleaved: bool = False
    """gate 0, up 0, gate 1, ...; else all gates come first."""
    limit: float | None = None
    """Upper bound of gate, and bound of |up|: gate * sigmoid(1.702 * gate) * (up + 1). None: silu(gate) * up."""
    is_silu: bool = False
    """Compute silu(gate) * up even with a limit."""

    @property
    def is_scaled(self) -> bool:
        """True for gate * sigmoid(1.702 * gate) * (up + 1)."""
        return self.limit is not None and not self.is_silu

    def flags(self, gated: bool) -> dict[str, bool | float]:
        """Return the constants of kernels with a gate in their epilogue."""
        is_interleaved = gated and self.is_interleaved
        limit = self.limit or 0.0
        return {"GATED": gated, "INTERLEAVED": is_interleaved, "LIMIT": limit, "IS_SCALED": self.is_scaled}


SILU_HALVES = GateForm()


def gate_up_product(gate_up_TX: Tensor, form: GateForm) -> Tensor:
    """Combine gate and up on a CPU: [T, 2 I] -> [T, I]. On a GPU the epilogue of products does it (`gated_numbers`)."""
    if form == SILU_HALVES:
        return silu_mul(gate_up_TX)
    library = native_for(gate_up_TX) if form.is_scaled else None
    if library is None or form.limit is None:
        return gate_up_product_reference(gate_up_TX, form)
    num_rows, width = gate_up_TX.shape
    y_TI = gate_up_TX.new_empty(num_rows, width // 2)
    steps = (2, 1) if form.is_interleaved else (1, width // 2)
    library.holdfast_clamped_gate(gate_up_TX.data_ptr(), y_TI.data_ptr(), num_rows, width // 2, *steps, form.limit)
    return y_TI


def gate_up_product_reference(gate_up_TX: Tensor, form: GateForm) -> Tensor:
    """Like `gate_up_product`, without C."""
    halves = (gate_up_TX[:, ::2], gate_up_TX[:, 1::2]) if form.is_interleaved else gate_up_TX.chunk(2, dim=-1)
    gate_TI, up_TI = (half.contiguous() for half in halves)
    if form.limit is None:
        return silu_mul(torch.cat((gate_TI, up_TI), dim=-1))
    if form.is_silu:
        return silu_mul(clamped_halves(torch.cat((gate_TI, up_TI), dim=-1), form.limit))
    gate_TI, up_TI = gate_TI.clamp(max=form.limit), up_TI.clamp(-form.limit, form.limit)
    return gate_TI * (SWIGLU_ALPHA * gate_TI).sigmoid() * (up_TI + 1.0)


@jit
def _clamped_numbers(b_gate, b_up, LIMIT: constexpr):
    # A minimum would drop NaN.
    b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)
    b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up))
    return b_gate, b_up


@jit
def gated_numbers(b_gate, b_up, LIMIT: constexpr, IS_SCALED: constexpr):
    """Combine gate and up in registers; LIMIT is 0 if there is none."""
    if LIMIT > 0:
        b_gate, b_up = _clamped_numbers(b_gate, b_up, LIMIT)
    if IS_SCALED:
        b_y = b_gate * tl.sigmoid(b_gate * ALPHA) * (b_up + 1.0)
    else:
        b_y = b_gate * tl.sigmoid(b_gate) * b_up
    return b_y

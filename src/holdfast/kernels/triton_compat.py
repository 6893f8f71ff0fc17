"""Triton and Gluon, imported if a GPU or the interpreter can run them; None otherwise. No other module imports them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def _import() -> tuple[ModuleType | None, ModuleType | None]:
    # Importing Triton takes a second, so a plain CPU run skips it even if it is installed.
    if not torch.cuda.is_available() and os.environ.get(INTERPRET_VARIABLE) != "1":
        return None, None
    try:
        import triton
        import triton.language
    except ImportError:
        return None, None
    return triton, triton.language


triton, language = _import()
tl: Any = language
"""triton.language inside kernels."""


def _import_gluon() -> tuple[Any, Any, Any, Any]:
    # The interpreter cannot run Gluon, and a Triton version may lack it: it is experimental.
    if triton is None or os.environ.get(INTERPRET_VARIABLE) == "1":
        return None, None, None, None
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gluon_language
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    except ImportError:
        return None, None, None, None
    return gluon, gluon_language, hopper, TensorDescriptor


gluon, gl, hopper, TensorDescriptor = _import_gluon()
"""Gluon: explicit layouts, shared memory, barriers and warpgroups. All four are None if it is absent."""

if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr if tl is not None else None
"""Annotation of a compile-time argument. Triton recognizes it by this name."""


def kernel_constant(value: Any) -> Any:  # noqa: ANN401 any type that a kernel can read
    """Wrap a module constant so that kernels can read it."""
    return value if tl is None else tl.constexpr(value)


def jit(function: Callable[..., Any]) -> Any:  # noqa: ANN401 a kernel is launched by subscript, which no type describes
    """Apply triton.jit if Triton is present."""
    return triton.jit(function) if triton is not None else function


def gluon_jit(function: Callable[..., Any]) -> Any:  # noqa: ANN401 as jit
    """Apply gluon.jit if Gluon is present."""
    return gluon.jit(function) if gluon is not None else function


def gluon_jit_counting(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """Like `jit_counting`, for a kernel in Gluon."""
    return gluon_jit if gluon is None else gluon.jit(do_not_specialize=counts)


def jit_counting(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """Like `jit`, without a specialization for the arguments named: counts of rows or blocks that change every step.

    Never name a width or a stride: their divisors decide how wide Triton's loads are. Name a pointer only if it need
    not be aligned, such as one to a row of a block table.
    """
    return jit if triton is None else triton.jit(do_not_specialize=counts)


def kernel_value(function: Callable[..., Any]) -> Any:  # noqa: ANN401 as jit
    """Let kernels call a plain function of constants at compile time, such as one that makes a layout."""
    return triton.constexpr_function(function) if triton is not None else function


class CompileCount:
    """Counts of kernels compiled and of kernels found in Triton's cache."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_found = 0


@contextmanager
def counting_compiles(on_compile: Callable[[], None]) -> Iterator[CompileCount]:
    """Count Triton's compilations inside the context. Call `on_compile` after each one that was no cache hit."""
    count = CompileCount()
    knobs = getattr(getattr(triton, "knobs", None), "compilation", None)
    before = getattr(knobs, "listener", None)
    if knobs is None:
        yield count
        return

    def listen(*, cache_hit: bool, **facts: Any) -> None:  # noqa: ANN401 forwarded
        if before is not None:
            before(cache_hit=cache_hit, **facts)
        if cache_hit:
            count.num_found += 1
        else:
            count.num_compiled += 1
            on_compile()

    knobs.listener = listen
    try:
        yield count
    finally:
        knobs.listener = before


def compiled_folder() -> str:
    """Return the folder of Triton's cache, or the text "Triton's cache" if this Triton version does not expose it."""
    return str(getattr(getattr(getattr(triton, "knobs", None), "cache", None), "dir", "Triton's cache"))


def can_run(tensor: Tensor) -> bool:
    """Return True if Triton kernels run on this tensor's device."""
    return triton is not None and tensor.is_cuda


def is_interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, which has no inline assembler."""
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def supports_pdl(tensor: Tensor) -> bool:
    """Return True if the device supports programmatic dependent launch (sm_90+): kernels must then call gdc_wait."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """Return the launch option of programmatic dependent launch. It is absent if off: the interpreter rejects it."""
    return {"launch_pdl": True} if pdl else {}


@jit
def wait_then_release(PDL: constexpr):
    """Wait for the kernel before this one, then let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def release_then_wait(PDL: constexpr):
    """Let the next kernel start, then wait for the one before this."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def shared_bytes(tensor: Tensor) -> int:
    """Return the shared memory that one program may use on this tensor's device: 227 KiB on Hopper, 99 KiB on Ada."""
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin if tensor.is_cuda else 2**18


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def check_dense(*tensors: Tensor | None) -> None:
    """Assert that kernels may address these tensors by shape alone; None is skipped."""
    for tensor in tensors:
        assert tensor is None or tensor.is_contiguous(), f"{tensor.shape} with strides {tensor.stride()} is not dense"

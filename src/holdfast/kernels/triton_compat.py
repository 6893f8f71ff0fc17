"""The one door to Triton: imported where a GPU or the interpreter can run it, absent elsewhere."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def _import() -> tuple[ModuleType | None, ModuleType | None]:
    # Importing Triton takes a second, so a plain CPU run does without even where it is installed.
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
    # The interpreter does not know it; and it is an experiment of Triton's, so a version without it is no fault.
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
"""Triton's language below its compiler's choices: layouts, shared memory, barriers, warpgroups; all None where there is none."""

if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr if tl is not None else None
"""The annotation of a compile-time argument; Triton knows it by this name."""


def kernel_constant(value: Any) -> Any:  # noqa: ANN401 whatever a kernel may read
    """A constant of a module that kernels may read: Triton lets them read no other."""
    return value if tl is None else tl.constexpr(value)


def jit(function: Callable[..., Any]) -> Any:  # noqa: ANN401 a kernel is launched by subscript, which no type describes
    """triton.jit, or the plain function where there is no Triton to call it."""
    return triton.jit(function) if triton is not None else function


def gluon_jit(function: Callable[..., Any]) -> Any:  # noqa: ANN401 as jit
    """gluon.jit, or the plain function where there is no Gluon to call it."""
    return gluon.jit(function) if gluon is not None else function


def gluon_jit_counting(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """jit_counting of a kernel in Gluon."""
    return gluon_jit if gluon is None else gluon.jit(do_not_specialize=counts)


def jit_counting(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """The same for a kernel whose arguments of these names change from step to step: numbers of rows, of blocks.

    Triton compiles anew for a number that is 1 and for a multiple of 16; counts are exempt, so that one compiled kernel takes
    all of them. No width or stride is a count: a load is as wide as their divisors are known to allow. A pointer may be named too
    where it begins anywhere, such as a row of a page table: it is compiled for whether it is aligned.
    """
    if triton is None:
        return jit
    return triton.jit(do_not_specialize=counts)


def kernel_value(function: Callable[..., Any]) -> Any:  # noqa: ANN401 as jit
    """A plain function of constants that kernels may call while they are compiled, such as one that makes a layout."""
    return triton.constexpr_function(function) if triton is not None else function


class CompileCount:
    """Kernels that were compiled, and others that an earlier start had left compiled."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_found = 0


@contextmanager
def counting_compiles(on_compile: Callable[[], None]) -> Iterator[CompileCount]:
    """Count what Triton compiles meanwhile; `on_compile` is called after each kernel that was not found compiled."""
    count = CompileCount()
    knobs = getattr(getattr(triton, "knobs", None), "compilation", None)
    before = getattr(knobs, "listener", None)
    if knobs is None:
        yield count
        return

    def listen(*, cache_hit: bool, **told: Any) -> None:  # noqa: ANN401 handed on as it is
        if before is not None:
            before(cache_hit=cache_hit, **told)
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
    """Where Triton keeps what it has compiled, as far as it says so."""
    return str(getattr(getattr(getattr(triton, "knobs", None), "cache", None), "dir", "Triton's cache"))


def can_run(tensor: Tensor) -> bool:
    """Whether Triton kernels run where this tensor lies."""
    return triton is not None and tensor.is_cuda


def is_interpreted() -> bool:
    """Whether kernels run in the interpreter, which knows no assembler."""
    return os.environ.get(INTERPRET_VARIABLE) == "1"


def supports_pdl(tensor: Tensor) -> bool:
    """Whether a kernel may be brought up while the one before it ends: GPUs from Hopper on.

    Such a kernel waits for its inputs by itself (gdc_wait); without that it would read what is not written yet.
    """
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9


def pdl_launch(pdl: bool) -> dict[str, bool]:
    """The option of a launch that asks for it; nothing where it is not asked, which the interpreter does not know."""
    return {"launch_pdl": True} if pdl else {}


def shared_bytes(tensor: Tensor) -> int:
    """Shared memory that one program may have where this tensor lies: 227 KiB on a Hopper, 99 KiB on an Ada."""
    return torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin if tensor.is_cuda else 2**18


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()

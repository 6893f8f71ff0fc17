"""Triton's interpreter without what it does again for nothing: half of the time of kernel tests on a CPU.

At every call of a device function it looks through the whole language and wraps what it wrapped already: once for each
module and launch is enough. And it looks for overflows of every sum and product, and tells nobody.
Where a version of Triton is built otherwise, nothing is changed.
"""

import sys
from functools import cache
from types import ModuleType
from typing import Any

MODULE = "triton.runtime.interpreter"


def quicken_interpreter() -> bool:
    """Whether the interpreter is there and was quickened, now or before; call it as often as you like."""
    interpreter = sys.modules.get(MODULE)
    if interpreter is None:
        return False
    if not hasattr(interpreter, "is_quick"):
        interpreter.is_quick = _quicken(interpreter)  # type: ignore[attr-defined]
    return interpreter.is_quick  # type: ignore[attr-defined]


def _quicken(interpreter: ModuleType) -> bool:
    names = ("GridExecutor", "InterpretedFunction", "InterpreterError", "_patch_lang", "_get_np_dtype")
    names += ("interpreter_semantic",)
    if not all(hasattr(interpreter, name) for name in names):
        return False
    launch = interpreter.GridExecutor.__call__
    wrapped: set[int] = set()

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> Any:
        wrapped.clear()
        return launch(executor, *args, **kwargs)

    def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(function.fn.__globals__)
        if module not in wrapped:
            interpreter._patch_lang(function.fn)
            wrapped.add(module)
        rewritten = function.rewrite()
        try:
            return rewritten(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    # Its finding is asserted with a debug option that is never set here.
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda left, right, operation: None
    interpreter.GridExecutor.__call__ = launch_afresh
    interpreter.InterpretedFunction.__call__ = call_device_function
    # Blocks and pointers cannot be kept in a dict.
    dtype_of, dtype_of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (  # type: ignore[attr-defined]
        dtype_of(dtype) if dtype.scalar.is_ptr() else dtype_of_scalar(dtype.scalar)
    )
    return True

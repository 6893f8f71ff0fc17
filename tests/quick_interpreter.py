"""Triton's interpreter without what it does again for nothing: most of the time of kernel tests on a CPU.

At every call of a device function it looks through the whole language and wraps what it wrapped already: once for each
module and launch is enough. It looks for overflows of every sum and product, and tells nobody. And for every value it
builds types, shapes and constants that it has built before: types are shared while a launch runs.
Where a version of Triton is built otherwise, nothing is changed.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

MODULE = "triton.runtime.interpreter"
CORE = "triton.language.core"


def quicken_interpreter() -> bool:
    """Whether the interpreter is there and was quickened, now or before; call it as often as you like."""
    interpreter = sys.modules.get(MODULE)
    if interpreter is None:
        return False
    if not hasattr(interpreter, "is_quick"):
        interpreter.is_quick = _quicken(interpreter)  # type: ignore[attr-defined]
    return interpreter.is_quick  # type: ignore[attr-defined]


def _quicken(interpreter: ModuleType) -> bool:
    names = ("GridExecutor", "InterpretedFunction", "InterpreterError", "_patch_lang", "_get_np_dtype", "_patch_attr")
    names += ("interpreter_semantic", "interpreter_builder", "TensorHandle")
    if not all(hasattr(interpreter, name) for name in names):
        return False
    launch = interpreter.GridExecutor.__call__
    wrapped: set[int] = set()
    forget: list[Callable[[], None]] = [wrapped.clear]

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> Any:
        for clear in forget:
            clear()
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
    # The compiler reads the same classes: where kernels are compiled they stay as they are.
    core = sys.modules[CORE]
    names = ("block_type", "pointer_type", "dtype", "tensor", "tuple", "constexpr", "_unwrap_if_constexpr")
    if os.environ.get("TRITON_INTERPRET") == "1" and all(hasattr(core, name) for name in names):
        forget.append(_share_types(core, interpreter.interpreter_builder))
        forget.append(_share_constants(interpreter))
        _shorten_calls(core, interpreter)
    return True


def _share_types(core: Any, builder: Any) -> Callable[[], None]:
    """Equal types of blocks become one object, which knows what tensors of it hold; returns what forgets them."""
    block_type, pointer_type, constexpr = core.block_type, core.pointer_type, core.constexpr
    build_type, build_tensor, to_ir = block_type.__init__, core.tensor.__init__, block_type.to_ir
    # A type keeps that of its elements alive, so that the id stays its own.
    known: dict[tuple[int, ...], Any] = {}

    def find_type(kind: type, element_ty: Any, shape: Any) -> Any:
        if kind is not block_type:
            return object.__new__(kind)
        sizes = [size.value if type(size) is constexpr else size for size in shape]
        if any(type(size) is not int for size in sizes):
            return object.__new__(kind)
        key = (id(element_ty), *sizes)
        found = known.get(key)
        if found is None:
            found = object.__new__(kind)
            build_type(found, element_ty, shape)
            found.is_shared = True
            known[key] = found
        return found

    def finish_type(block: Any, element_ty: Any, shape: Any) -> None:
        if "is_shared" not in block.__dict__:
            build_type(block, element_ty, shape)

    def fill_tensor(tensor: Any, handle: Any, type: Any) -> None:
        common = type.__dict__.get("of_its_tensors")
        if common is None:
            build_tensor(tensor, handle, type)
            type.of_its_tensors = {name: value for name, value in tensor.__dict__.items() if name != "handle"}
        else:
            tensor.__dict__.update(common)
            tensor.handle = handle

    def find_ir(block: Any, asked: Any) -> Any:
        if asked is not builder:
            return to_ir(block, asked)
        if "its_ir" not in block.__dict__:
            block.its_ir = to_ir(block, asked)
        return block.its_ir

    block_type.__new__, block_type.__init__, block_type.to_ir = find_type, finish_type, find_ir
    core.tensor.__init__ = fill_tensor
    for kind in (core.dtype, pointer_type, block_type):
        kind.__eq__ = _same_or(kind.__eq__)
    return known.clear


def _same_or(equals: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: one is other or equals(one, other)


def _share_constants(interpreter: Any) -> Callable[[], None]:
    """Numbers become tensors once a launch: no operation writes into what it reads. Returns what forgets them."""
    semantic = interpreter.interpreter_semantic
    constant, promote = semantic.scalar_constant, semantic.computation_type_impl
    known: dict[tuple[type, Any, str], Any] = {}
    promoted: dict[tuple[Any, ...], Any] = {}

    def find_constant(value: Any, dtype: Any) -> Any:
        # 1, 1.0 and True are one key without their types; both zeros are one value to the language too.
        key = (type(value), value, dtype.name) if dtype is not None else None
        found = known.get(key) if key else None
        if found is None:
            found = constant(value, dtype)
            if key:
                known[key] = found
        return found

    def find_promotion(a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in promoted:
            promoted[key] = promote(a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return promoted[key]

    semantic.scalar_constant, semantic.computation_type_impl = find_constant, find_promotion
    return known.clear


def _shorten_calls(core: Any, interpreter: Any) -> None:
    """The same answers by fewer calls, where nothing needs to be done."""
    semantic, handle, constexpr = interpreter.interpreter_semantic, interpreter.TensorHandle, core.constexpr
    unwrap, broadcast, check_size = core._unwrap_if_constexpr, semantic.broadcast_impl_value, handle.__post_init__
    plain = {int, float, bool, str, type(None), core.dtype, core.pointer_type, core.block_type, core.tensor}
    bytes_of = {getattr(core, name).name: max(1, getattr(core, name).primitive_bitwidth // 8) for name in _NUMBERS}

    def unwrap_at_once(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    def widen(tensor: Any, sizes: list[int]) -> Any:
        if tensor.type.shape.values == sizes:
            return tensor
        return core.tensor(
            semantic.builder.create_broadcast(tensor.handle, sizes), core.block_type(tensor.type.scalar, sizes)
        )

    def broadcast_what_differs(lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if left.is_block() and right.is_block():
            pairs = list(zip(left.shape.values, right.shape.values, strict=False))
            if len(left.shape.values) == len(right.shape.values) and all(a == b or 1 in (a, b) for a, b in pairs):
                sizes = [b if a == 1 else a for a, b in pairs]
                return widen(lhs, sizes), widen(rhs, sizes)
        return broadcast(lhs, rhs)

    def fill_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > bytes_of.get(dtype.name, 0):
            check_size(self)

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        scope.set_attr(owner, name, call)

    core._unwrap_if_constexpr, interpreter._patch_attr = unwrap_at_once, patch_attr
    semantic.broadcast_impl_value, handle.__init__ = broadcast_what_differs, fill_handle


_NUMBERS = ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NUMBERS += ("float16", "bfloat16", "float32", "float64", "float8e5", "float8e4nv")

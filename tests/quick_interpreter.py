"""Triton's interpreter without what it does again for nothing: most of the time of kernel tests on a CPU.

At every call of a device function it looks through the whole language and wraps what it wrapped already: once a launch is
enough. It checks every sum and product for overflow and discards the result. For every value it builds types, shapes and
constants that it has built before: types are shared while a launch runs. And before every operation it settles types anew
and writes out what numpy broadcasts by itself: what was settled of two types holds for all tensors of them.
Where a version of Triton is built otherwise, nothing is changed.
"""

import inspect
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
    names += ("interpreter_semantic", "interpreter_builder", "TensorHandle", "_patch_builtin", "tl")
    if not all(hasattr(interpreter, name) for name in names):
        return False
    launch = interpreter.GridExecutor.__call__
    languages = _Languages(interpreter)
    forget: list[Callable[[], None]] = []

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> Any:
        for clear in forget:
            clear()
        languages.wrapped = languages.seen_by(executor.fn)
        return launch(executor, *args, **kwargs)

    def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not languages.seen_by(function.fn) <= languages.wrapped:
            interpreter._patch_lang(function.fn)
            languages.wrapped |= languages.seen_by(function.fn)
        rewritten = function.rewrite()
        try:
            return rewritten(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    # Its finding is asserted with a debug option that is never set here.
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda left, right, operation: None
    interpreter._patch_builtin = languages.wrap_builtins  # type: ignore[attr-defined]
    interpreter.GridExecutor.__call__ = launch_afresh
    interpreter.InterpretedFunction.__call__ = call_device_function
    # Blocks and pointers cannot be kept in a dict.
    dtype_of = interpreter._get_np_dtype
    dtype_of_scalar = cache(dtype_of)
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
        forget.append(_share_settlements(core, interpreter.interpreter_semantic))
    return True


class _Languages:
    """Modules of the language that functions see, and the names of what is wrapped in each."""

    def __init__(self, interpreter: Any) -> None:
        self.wrapped: frozenset[int] = frozenset()
        """Those of the launch that runs."""
        self._interpreter = interpreter
        self._both = (interpreter.tl, interpreter.tl.core)
        self._seen: dict[int, tuple[Any, frozenset[int]]] = {}
        self._names: dict[int, list[str]] = {}

    def seen_by(self, function: Any) -> frozenset[int]:
        module = function.__globals__
        found = self._seen.get(id(module))
        if found is None:
            values = list(module.values())
            seen = frozenset(id(one) for one in self._both if any(value is one for value in values))
            found = self._seen[id(module)] = (module, seen)
        return found[1]

    def wrap_builtins(self, package: Any, builder: Any, scope: Any) -> None:
        is_builtin = self._interpreter.tl.core.is_builtin
        if id(package) not in self._names:
            members = inspect.getmembers(package)
            self._names[id(package)] = [name for name, member in members if is_builtin(member)]
        for name in self._names[id(package)]:
            member = getattr(package, name)
            if is_builtin(member):
                self._interpreter._patch_attr(package, name, member, builder, scope)


def _share_types(core: Any, builder: Any) -> Callable[[], None]:
    """Equal types of blocks become one object, which knows what tensors of it hold; returns what forgets them."""
    block_type, pointer_type, constexpr = core.block_type, core.pointer_type, core.constexpr
    build_type, build_tensor, to_ir = block_type.__init__, core.tensor.__init__, block_type.to_ir
    # A type keeps that of its elements alive, so that the id stays its own. Every launch has pointers of its own.
    known: dict[tuple[int, ...], Any] = {}
    of_pointers: dict[tuple[int, ...], Any] = {}
    no_pointers = {id(getattr(core, name)) for name in _NUMBERS}

    def find_type(kind: type, element_ty: Any, shape: Any) -> Any:
        if kind is not block_type:
            return object.__new__(kind)
        sizes = [size.value if type(size) is constexpr else size for size in shape]
        if any(type(size) is not int for size in sizes):
            return object.__new__(kind)
        key = (id(element_ty), *sizes)
        own = known if key[0] in no_pointers else of_pointers
        found = own.get(key)
        if found is None:
            found = object.__new__(kind)
            build_type(found, element_ty, shape)
            found.is_shared, found.is_lasting, found.others = True, own is known, {}
            own[key] = found
        return found

    def find_other(block: Any, element_ty: Any) -> Any:
        """Return a block type of equal shape with other elements."""
        others = block.__dict__.get("others")
        if others is None or id(element_ty) not in no_pointers:
            return block_type(element_ty, block.shape)
        found = others.get(id(element_ty))
        if found is None:
            found = others[id(element_ty)] = block_type(element_ty, block.shape)
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

    def find_ir(block: Any, wanted: Any) -> Any:
        if wanted is not builder:
            return to_ir(block, wanted)
        if "its_ir" not in block.__dict__:
            block.its_ir = to_ir(block, wanted)
        return block.its_ir

    block_type.__new__, block_type.__init__, block_type.to_ir = find_type, finish_type, find_ir
    block_type.with_element_ty = find_other
    core.tensor.__init__ = fill_tensor
    for kind in (core.dtype, pointer_type, block_type):
        kind.__eq__ = _same_or(kind.__eq__)
    return of_pointers.clear


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
    """Shortcuts for calls that change nothing; results are equal."""
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

    to_tensor, cast = semantic.to_tensor, semantic.cast
    deeper: dict[tuple[int, int], tuple[Any, Any]] = {}

    def to_tensor_at_once(value: Any, check_type: bool = True) -> Any:
        return value if type(value) is core.tensor else to_tensor(value, check_type)

    def cast_what_differs(value: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        return value if value.type.scalar is dst_ty.scalar else cast(value, dst_ty, fp_downcast_rounding)

    def expand_dims(value: Any, axis: int) -> Any:
        kind = value.type
        key = (id(kind), axis)
        found = deeper.get(key)
        if found is None or found[0] is not kind:
            result = expand(value, axis)
            if kind.__dict__.get("is_lasting"):
                deeper[key] = (kind, result.type)
            return result
        data = value.handle.data
        return core.tensor(handle(data.reshape(found[1].shape.values), value.handle.dtype), found[1])

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        called = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return called(*args, **kwargs)

        scope.set_attr(owner, name, call)

    expand, semantic.expand_dims = semantic.expand_dims, expand_dims
    semantic.to_tensor, semantic.cast = to_tensor_at_once, cast_what_differs
    core._unwrap_if_constexpr, interpreter._patch_attr = unwrap_at_once, patch_attr
    semantic.broadcast_impl_value, handle.__init__ = broadcast_what_differs, fill_handle


def _share_settlements(core: Any, semantic: Any) -> Callable[[], None]:
    """What two operands become before an operation is found once for their types; returns what forgets it.

    Operands get the type of all of the result and keep the numbers that they have: numpy broadcasts those, and every
    operation between two operands is numpy's. So no scalar is written out as a block of equal numbers.
    """
    settle, cast, tensor = semantic.binary_op_type_checking_impl, semantic.cast, core.tensor
    # Keys are ids, and values keep the types whose ids they are. What concerns pointers is forgotten with a launch.
    of_types: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    of_numbers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    of_pointers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    plain = (int, float)

    def is_lasting(kind: Any) -> bool:
        return kind.__dict__.get("is_lasting", False) if kind.is_block() else not kind.is_ptr()

    def change(before: Any, after: Any) -> tuple[Any, Any]:
        """What an operand is cast to and the type it gets then; None where it has that already."""
        kind = None if after.type.scalar == before.type.scalar else after.type.scalar
        sizes = [one.type.shape.values if one.type.is_block() else None for one in (before, after)]
        return kind, None if sizes[0] == sizes[1] else after.type

    def one_number(constant: Any) -> Any:
        """A block of equal numbers as one of them."""
        held = constant.handle
        return tensor(type(held)(held.data.ravel()[:1].copy(), held.dtype), constant.type)

    def with_number(operand: Any, number: Any, is_left: bool, how: tuple[bool, ...]) -> tuple[Any, Any]:
        key = (id(operand.type), type(number), number, is_left, how)
        found = of_numbers.get(key) or of_pointers.get(key)
        if found is None:
            left, right = settle(*((operand, number) if is_left else (number, operand)), *how)
            after, other = (left, right) if is_left else (right, left)
            found = (operand.type, change(operand, after)[0], one_number(other))
            (of_numbers if is_lasting(operand.type) else of_pointers)[key] = found
        _, kind, other = found
        return operand if kind is None else cast(operand, kind), other

    def settle_once(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        how = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if type(lhs) is not tensor:
            if type(lhs) not in plain or type(rhs) is not tensor:
                return settle(lhs, rhs, *how)
            right, left = with_number(rhs, lhs, False, how)
            return left, right
        if type(rhs) is not tensor:
            return with_number(lhs, rhs, True, how) if type(rhs) in plain else settle(lhs, rhs, *how)
        key = (id(lhs.type), id(rhs.type), how)
        found = of_types.get(key) or of_pointers.get(key)
        if found is None:
            left, right = settle(lhs, rhs, *how)
            found = (lhs.type, rhs.type, *change(lhs, left), *change(rhs, right))
            (of_types if is_lasting(lhs.type) and is_lasting(rhs.type) else of_pointers)[key] = found
        _, _, left_kind, left_type, right_kind, right_type = found
        if left_kind is not None:
            lhs = cast(lhs, left_kind)
        if left_type is not None:
            lhs = tensor(lhs.handle, left_type)
        if right_kind is not None:
            rhs = cast(rhs, right_kind)
        if right_type is not None:
            rhs = tensor(rhs.handle, right_type)
        return lhs, rhs

    semantic.binary_op_type_checking_impl = settle_once
    return of_pointers.clear


_NUMBERS = ("int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_NUMBERS += ("float16", "bfloat16", "float32", "float64", "float8e5", "float8e4nv")

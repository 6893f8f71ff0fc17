"""Bounds of pointers in Triton's interpreter: a kernel loads and stores only inside of the tensors that its launch got.

A load past the last row is silent on a CPU if the result does not depend on it; on a GPU it may fault. A tensor covers the bytes
from its first element to its last, with the gaps between its rows; tensors of one launch are taken together.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np

MODULE = "triton.runtime.interpreter"


def bound_pointers() -> bool:
    """Whether the interpreter is there and checks its pointers, now or before; call it as often as you like."""
    interpreter = sys.modules.get(MODULE)
    names = ("GridExecutor", "interpreter_builder", "_implicit_cvt")
    if interpreter is None or not all(hasattr(interpreter, name) for name in names):
        return False
    if not hasattr(interpreter, "has_bounds"):
        _bound(interpreter, BOUNDS)
        interpreter.has_bounds = True  # type: ignore[attr-defined]
    return True


class _Bounds:
    """Ranges of addresses of the launch that runs, sorted and disjoint."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.kernel = ""

    def take(self, kernel: str, arguments: Iterable[Any]) -> None:
        """Begin a launch."""
        merged: list[list[int]] = []
        for start, end in sorted(_ranges(arguments)):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.kernel = kernel
        self.starts, self.ends = ([one[side] for one in merged] for side in (0, 1))

    def check(self, verb: str, pointers: Any, mask: Any) -> None:
        """Raise if a pointer under the mask, which has the shape of all pointers or of one, is outside."""
        addresses, num_bytes = pointers.data, max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        place = bisect_right(self.starts, int(addresses.min())) - 1
        if place >= 0 and int(addresses.max()) + num_bytes <= self.ends[place]:
            return  # whatever the mask is
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask, addresses.shape)]
        starts, ends = np.array(self.starts, np.uint64), np.array(self.ends, np.uint64)
        places = np.searchsorted(starts, addresses, side="right") - 1
        is_inside = (places >= 0) & (addresses + np.uint64(num_bytes) <= ends[np.maximum(places, 0)])
        if not is_inside.all():
            outside = addresses[~is_inside]
            after = int(outside[0]) - self.ends[max(0, int(places[~is_inside][0]))]
            raise IndexError(
                f"{self.kernel} {verb} {outside.size} of {addresses.size} elements outside of its tensors, "
                f"the first {after} bytes after the end of the nearest before it"
            )


BOUNDS = _Bounds()


def _ranges(arguments: Iterable[Any]) -> Iterable[tuple[int, int]]:
    for one in arguments:
        if isinstance(one, tuple):
            yield from _ranges(one)
        elif hasattr(one, "block_shape") and hasattr(one, "base"):  # the descriptor of a tensor
            yield from _ranges((one.base,))
        elif hasattr(one, "data_ptr") and hasattr(one, "stride") and one.numel():
            last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            yield one.data_ptr(), one.data_ptr() + (last + 1) * one.element_size()


def _bound(interpreter: Any, bounds: _Bounds) -> None:
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    launch = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    exchange, compare = builder.create_atomic_rmw, builder.create_atomic_cas

    def begin(self: Any, arguments: Any, named: Any) -> Any:
        there = launch(self, arguments, named)
        bounds.take(getattr(self.fn, "__name__", "a kernel"), (*there[0], *there[1].values()))
        return there

    def checked_load(pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
        bounds.check("loads", pointers, mask.data)
        return load(pointers, mask, *more, **named)

    def checked_store(pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        bounds.check("stores", pointers, mask.data)
        return store(pointers, value, mask, *more)

    def checked_exchange(operation: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        bounds.check("changes", pointers, mask.data)
        return exchange(operation, pointers, value, mask, *more)

    def checked_compare(pointers: Any, *more: Any) -> Any:
        bounds.check("changes", pointers, None)
        return compare(pointers, *more)

    executor._init_args_hst = begin
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = checked_exchange, checked_compare

"""Runs the source of a Gluon kernel without partitions in plain torch, program by program.

Gluon has no interpreter. Here registers are tensors, layouts are nothing, and shared memory is a tensor that begins as
poison. A copy lands when its group is awaited, no earlier. Assembler over four neighbours is computed register by register.

Not modelled: warps, barriers, and what the compiler does. Layouts are checked where kernels are compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kernels.assembler import run_assembler
from kernels.gluon_model import Pointer, Scalar, named, plain, tensor_pointer, with_names

CAST = torch.Tensor.to
NEIGHBOURS = 4
"""Elements that a call of assembler takes."""


class Shared:
    """Shared memory, or a view of some."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.dtype, self.layout, self.shape = values, values.dtype, None, values.shape

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < len(self.values), f"block {int(i)} of {len(self.values)}"
        return Shared(self.values[int(i)])

    def slice(self, start: Any, length: Any, dim: Any) -> "Shared":
        start, length, dim = plain(start), plain(length), plain(dim)
        assert 0 <= start <= start + length <= self.values.shape[dim], f"{start} and {length} of {self.values.shape}"
        return Shared(self.values.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.values.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> "Shared":
        found = self.values.view(dtype)
        assert list(found.shape) == [plain(n) for n in shape], f"{found.shape} as {shape}"
        return Shared(found)

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.values.clone()

    def store(self, values: torch.Tensor) -> None:
        assert values.shape == self.values.shape, f"{values.shape} into {self.values.shape}"
        assert values.dtype == self.values.dtype, f"{values.dtype} into {self.values.dtype}"
        self.values.copy_(values)


class Copies:
    """Copies to shared memory that are under way, by group."""

    def __init__(self) -> None:
        self._groups: list[list[Callable[[], None]]] = []
        self._open: list[Callable[[], None]] = []

    def begin(self, target: Shared, pointer: Pointer, mask: Any = True) -> None:
        def land() -> None:
            m = torch.broadcast_to(torch.as_tensor(mask), pointer.offset.shape)
            target.store(pointer.load(m, 0))

        self._open.append(land)

    def commit(self) -> None:
        self._groups.append(self._open)
        self._open = []

    def wait(self, count: Any) -> None:
        while len(self._groups) > plain(count):
            for land in self._groups.pop(0):
                land()


def cast(tensor: torch.Tensor, dtype: Any, bitcast: bool = False) -> torch.Tensor:
    """Tensor.to, with a change of type alone."""
    return tensor.view(dtype) if bitcast else CAST(tensor, dtype)


def assembler(text: Any, arguments: Sequence[torch.Tensor], dtype: Any, axis: int) -> Any:
    """Assembler over neighbours along an axis, in registers of 32 bits."""
    shape = torch.broadcast_shapes(*(one.shape for one in arguments))
    registers = []
    for one in arguments:
        rows = torch.broadcast_to(one, shape).movedim(axis, -1).contiguous()
        words = rows.view(torch.int32).reshape(-1, NEIGHBOURS * one.element_size() // 4)
        registers += [words[:, i].contiguous().numpy().view(np.uint32) for i in range(words.shape[1])]
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    per_output = [NEIGHBOURS * one.itemsize // 4 for one in dtypes]
    found = run_assembler(text, registers, sum(per_output))
    outputs = []
    moved = [shape[i] for i in range(len(shape)) if i != axis] + [shape[axis]]
    for one, count in zip(dtypes, per_output, strict=True):
        own, found = found[:count], found[count:]
        words = torch.from_numpy(np.stack(own, axis=-1).view(np.int32).copy())
        outputs.append(words.view(one).reshape(moved).movedim(-1, axis).contiguous())
    return tuple(outputs) if isinstance(dtype, tuple) else outputs[0]


def language(place: Sequence[int], num_warps: int, column_texts: Sequence[str]) -> SimpleNamespace:
    """`gl`, as far as tiles take it; `column_texts` is assembler over neighbours of the first axis."""

    def in_line(text: Any, _: Any, arguments: Any, dtype: Any, *__: Any) -> Any:
        text = plain(text)
        if text.startswith(("griddepcontrol.", "bar.sync")):
            return None
        return assembler(text, arguments, dtype, 0 if text in column_texts else 1)

    def allocate(dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> Shared:
        sizes = [plain(n) for n in shape]
        return Shared(
            torch.full((int(np.prod(sizes)) * dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).view(sizes)
        )

    def chosen(mask: Any, first: Any, second: Any) -> Any:
        if not isinstance(mask, torch.Tensor):
            return first if mask else second
        if isinstance(first, int) and isinstance(second, int):
            first = torch.tensor(first, dtype=torch.int32)  # as a compiler takes small constants
        return torch.where(mask, first, second)

    def least(first: Any, second: Any) -> Any:
        return first.clamp(max=second) if isinstance(first, torch.Tensor) else min(first, second)

    def add(pointer: Pointer, value: int, sem: str) -> int:
        before = int(pointer.flat[pointer.offset])
        pointer.flat[pointer.offset] += value
        return before

    shape_of = lambda shape: [plain(n) for n in shape]  # noqa: E731
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in ("uint8", "int32", "int64", "float16", "bfloat16", "float32")},
        **dict.fromkeys(
            (
                "SliceLayout",
                "SwizzledSharedLayout",
                "NVMMASharedLayout",
                "NVMMADistributedLayout",
                "DotOperandLayout",
                "BlockedLayout",
            ),
            named,
        ),
        program_id=lambda axis: Scalar(place[axis]),
        num_warps=lambda: num_warps,
        static_range=lambda *ends: range(*(plain(end) for end in ends)),
        static_assert=lambda holds: None,
        arange=lambda start, end, layout=None: torch.arange(plain(start), plain(end), dtype=torch.int32),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape_of(shape), dtype=dtype),
        zeros_like=torch.zeros_like,
        full=lambda shape, value, dtype, layout=None: torch.full(shape_of(shape), value, dtype=dtype),
        where=chosen,
        minimum=least,
        maximum=lambda first, second: first.clamp(min=second),
        min=lambda values, axis: values.amin(axis),
        max=lambda values, axis: values.amax(axis),
        sum=lambda values, axis: values.sum(axis, dtype=values.dtype),
        rsqrt=torch.rsqrt,
        full_like=torch.full_like,
        expand_dims=lambda values, axis: values.unsqueeze(axis),
        convert_layout=lambda values, layout: values,
        split=lambda values: (values[..., 0], values[..., 1]),
        broadcast=torch.broadcast_tensors,
        atomic_add=add,
        load=lambda pointer, mask=True, other=None, cache_modifier="": torch.as_tensor(pointer.load(mask, other)),
        store=lambda pointer, values, mask=True: (
            pointer.store(values, mask)
            if isinstance(pointer.offset, torch.Tensor)
            else pointer.flat.__setitem__(pointer.offset, values)
        ),
        inline_asm_elementwise=in_line,
        allocate_shared_memory=allocate,
    )


class Product:
    """A product of a warpgroup, computed as late as a wait allows: operands that change before show."""

    def __init__(self, a: torch.Tensor, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.value: torch.Tensor | None = None

    def compute(self) -> None:
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        made = self.a.float() @ self.b.load().float()
        assert acc is not None, "a product waits for another one"
        self.value = acc + made if self.use_acc else made


class Products:
    """Products that run, the oldest first."""

    def __init__(self) -> None:
        self._running: list[Product] = []

    def begin(self, a: torch.Tensor, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async, "products that are waited for at once are not modelled"
        self._running.append(Product(a, b, acc, use_acc))
        return self._running[-1]

    def wait(self, count: int, deps: Sequence[Any]) -> Any:
        while len(self._running) > count:
            self._running.pop(0).compute()
        assert all(one.value is not None for one in deps), "a product still runs"
        return deps[0].value if len(deps) == 1 else tuple(one.value for one in deps)


def hopper_of() -> SimpleNamespace:
    """`hopper`: copies and products."""
    copies, products = Copies(), Products()
    return SimpleNamespace(
        fence_async_shared=lambda: None,
        warpgroup_mma=products.begin,
        warpgroup_mma_wait=products.wait,
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=copies.begin, commit_group=copies.commit, wait_group=copies.wait
        ),
        mma_v2=lambda a, b, acc: acc + a.float() @ b.float(),
    )


class TileLauncher:
    """Runs a kernel's source over its grid."""

    def __init__(self, kernel: Any, modules: Sequence[ModuleType], column_texts: Sequence[str]) -> None:
        self._kernel, self._modules, self._column_texts = getattr(kernel, "fn", kernel), modules, column_texts

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            given = [
                tensor_pointer(one) if isinstance(one, torch.Tensor) else Scalar(one) if isinstance(one, int) else one
                for one in arguments
            ]
            typed = patch.object(torch.Tensor, "type", SimpleNamespace(layout=None))
            casting = patch.object(torch.Tensor, "to", cast)
            for place in product(*(range(size) for size in reversed(grid))):
                gl = language(place[::-1], num_warps, self._column_texts)
                with typed, casting, with_names(self._modules, gl=gl, hopper=hopper_of()):
                    self._kernel(*given, **constants)

        return launch


@contextmanager
def modelled_tiles(
    module: ModuleType, kernel: str, *others: ModuleType, column_texts: Sequence[str] = (), **names: Any
) -> Iterator[None]:
    """Replace a module's kernel by its model, and names of the module by those given; `others` hold functions that it calls."""
    launcher = TileLauncher(getattr(module, kernel), (module, *others), column_texts)
    with patch.object(module, kernel, launcher), with_names([module], **names):
        yield

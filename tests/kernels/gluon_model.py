"""Runs the source of a warp-specialized Gluon kernel in plain torch: threads stand for its partitions, one at a time.

Gluon has no interpreter. Here its functions act on CPU tensors: registers are tensors, layouts are names, and shared memory
is in the order of its panels of 64 columns, without the swizzle. A random schedule decides who runs next. It switches where
partitions meet: at barriers. Copies by TMA arrive at any time after their start. A product is computed at once, or as late as
its wait allows. So a buffer that is read or given back too early shows in some schedules. A deadlock is an error.

Not modelled: warps of a partition, fences, and what the compiler does.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

PANEL = 64
WARPGROUP_THREADS = 128
SWITCHES = 20_000
"""Most switches between partitions of a program: more are a livelock."""


def plain(value: Any) -> Any:
    """A constant as Python has it."""
    return value.value if type(value).__name__ == "constexpr" else value


class Scalar(int):
    """A number that was loaded."""

    def to(self, dtype: torch.dtype) -> "Scalar":
        return self


@dataclass
class Pointer:
    """Elements of a tensor. An access outside of it is an error."""

    flat: torch.Tensor
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + plain(offset))

    def load(self, mask: Any, other: Any) -> Any:
        if not isinstance(self.offset, torch.Tensor) and not isinstance(mask, torch.Tensor):
            assert not mask or 0 <= self.offset < len(self.flat), f"a load at {self.offset}"
            value = self.flat[self.offset] if mask else other
            return value if isinstance(value, torch.Tensor) and value.is_floating_point() else Scalar(value)
        index, m = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(mask))
        index = torch.where(m, index, 0).long()
        assert 0 <= int(index.min()) <= int(index.max()) < len(self.flat), f"a load at {index.min()} to {index.max()}"
        values = self.flat.index_select(0, index.flatten()).view(index.shape) if bool(m.any()) else None
        filler = torch.full(index.shape, 0 if other is None else other, dtype=self.flat.dtype)
        return filler if values is None else torch.where(m, values, filler)

    def store(self, values: Any, mask: Any) -> None:
        index, m, values = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(mask), values)
        index = index[m].long()
        assert index.numel() == 0 or 0 <= int(index.min()) <= int(index.max()) < len(self.flat), "a store outside"
        self.flat[index] = values[m].to(self.flat.dtype)


def tensor_pointer(tensor: torch.Tensor) -> Pointer:
    """Return a pointer to a tensor that may be a slice of rows."""
    return Pointer(
        tensor.as_strided((sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1,), (1,))
    )


class Shared:
    """Shared memory: blocks of rows by columns, in panels of 64 columns."""

    def __init__(self, flat: torch.Tensor, shape: Sequence[int], transposed: bool = False) -> None:
        self.flat, self.shape, self.dtype, self.layout = flat, [plain(n) for n in shape], flat.dtype, None
        self._transposed = transposed
        assert prod(self.shape) == flat.numel(), f"{shape} in {flat.numel()} elements"

    def index(self, i: Any) -> "Shared":
        size = prod(self.shape[1:])
        assert 0 <= int(i) < self.shape[0], f"block {int(i)} of {self.shape[0]}"
        return Shared(self.flat[int(i) * size : (int(i) + 1) * size], self.shape[1:])

    def slice(self, start: int, length: int, dim: int) -> "Rows":
        assert plain(dim) == 0, "only rows are cut"
        return Rows(self, plain(start), plain(length))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> "Shared":
        assert dtype == self.dtype, "no change of type is modelled"
        return Shared(self.flat, shape)

    def permute(self, order: Sequence[int]) -> "Shared":
        assert tuple(order) == (1, 0), "a block is only transposed"
        return Shared(self.flat, self.shape, not self._transposed)

    def load(self, layout: Any = None) -> torch.Tensor:
        (rows, columns), width = self.shape, min(self.shape[1], PANEL)
        block = self.flat.view(columns // width, rows, width).transpose(0, 1).reshape(rows, columns)
        return block.t() if self._transposed else block.clone()

    def store(self, values: torch.Tensor) -> None:
        rows, columns = self.shape
        width = min(columns, PANEL)
        assert values.shape == (rows, columns), f"{values.shape} into {self.shape}"
        assert values.dtype == self.dtype, f"{values.dtype} into {self.dtype}"
        self.flat.view(columns // width, rows, width).copy_(values.view(rows, columns // width, width).transpose(0, 1))


class Rows(NamedTuple):
    """Some rows of a block."""

    block: Shared
    start: int
    length: int

    def store(self, values: torch.Tensor) -> None:
        whole = self.block.load()
        whole[self.start : self.start + self.length] = values
        self.block.store(whole)


class Barrier:
    """A barrier of arrivals and bytes in shared memory."""

    def __init__(self) -> None:
        self.count = self.pending = self.num_bytes = self.phase = 0
        self.shape = [1]

    def begin(self, count: int) -> None:
        self.count = self.pending = count

    def settle(self) -> None:
        """End the phase if nothing is missing."""
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == self.num_bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


class Barriers(NamedTuple):
    """An array of barriers."""

    all: list[Barrier]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Descriptor:
    """A tensor that is copied in boxes; elements outside of it are zeros."""

    def __init__(self, tensor: torch.Tensor, block_shape: list[int], layout: Any) -> None:
        assert all(tensor.stride(d) * tensor.element_size() % 16 == 0 for d in range(tensor.dim() - 1)), "strides"
        assert len(block_shape) == tensor.dim(), "a box has the dimensions of its tensor"
        self.tensor, self.block_shape, self.layout = tensor, block_shape, layout
        self.block_type = SimpleNamespace(nbytes=prod(block_shape) * tensor.element_size())

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, block_shape: list[int], layout: Any) -> "Descriptor":
        return cls(tensor, block_shape, layout)

    def read(self, coordinate: list[int]) -> torch.Tensor:
        box = torch.zeros(self.block_shape, dtype=self.tensor.dtype)
        sizes = list(zip(coordinate, self.block_shape, self.tensor.shape, strict=True))
        inside = [slice(max(0, -at), max(0, min(width, size - at))) for at, width, size in sizes]
        outside = [slice(max(0, at), max(0, min(size, at + width))) for at, width, size in sizes]
        if all(one.stop > one.start for one in inside):
            box[tuple(inside)] = self.tensor[tuple(outside)]
        return box


class Product:
    """A product that runs; its result exists after a wait."""

    def __init__(self, a: Any, b: Shared, acc: torch.Tensor, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.value: torch.Tensor | None = None

    def compute(self) -> None:
        a = self.a.load() if isinstance(self.a, Shared) else self.a
        made = a.float() @ self.b.load().float()
        self.value = self.acc + made if self.use_acc else made


@dataclass
class Partition:
    """A thread that runs when it is its turn."""

    body: Callable[[], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    until: Callable[[], bool] | None = None
    is_done: bool = False
    error: BaseException | None = None
    products: list[Product] = field(default_factory=list)


class Ended(BaseException):
    """Ends a partition after an error elsewhere."""


class Program:
    """One program of the grid: its partitions, pending copies and barriers by number."""

    def __init__(self, place: int, num_programs: int, seed: int) -> None:
        self.place, self.num_programs = place, num_programs
        self.chance = random.Random(seed)
        self._back = threading.Semaphore(0)
        self._copies: list[Callable[[], None]] = []
        self._partitions: list[Partition] = []
        self._current: Partition | None = None
        self._ending = False
        self._numbered: dict[int, list[int]] = {}
        self.products: list[Product] = []
        """Products outside of partitions."""

    @property
    def running(self) -> Any:
        return self if self._current is None else self._current

    def start_copy(self, copy: Callable[[], None]) -> None:
        self._copies.append(copy)

    def wait(self, until: Callable[[], bool]) -> None:
        """Let others run, at least until the condition holds."""
        own = self._current
        if own is None:
            while not until():
                assert self._copies, "nothing can end this wait"
                self._copies.pop(0)()
            return
        own.until = until
        self._back.release()
        own.turn.acquire()
        if self._ending:
            raise Ended

    def meet(self, number: int, count: int, stays: bool) -> None:
        """Arrive at a numbered barrier of `count` threads; wait for the others if `stays`."""
        state = self._numbered.setdefault(number, [0, 0])
        generation = state[1]
        state[0] += WARPGROUP_THREADS
        assert state[0] <= count, f"barrier {number} has {state[0]} of {count} threads"
        if state[0] == count:
            state[:] = 0, generation + 1
        self.wait((lambda: state[1] > generation) if stays else lambda: True)

    def run(self, bodies: Sequence[Callable[[], None]]) -> None:
        """Run all partitions to their end."""
        self._partitions = [Partition(body) for body in bodies]
        threads = [threading.Thread(target=self._enter, args=(one,), daemon=True) for one in self._partitions]
        for thread in threads:
            thread.start()
        try:
            self._schedule()
        finally:
            self._ending = True
            for one in self._partitions:
                one.turn.release()
            for thread in threads:
                thread.join()
            self._current = None

    def _enter(self, own: Partition) -> None:
        own.turn.acquire()
        try:
            if not self._ending:
                own.body()
                assert not own.products, "a product has no wait"
        except Ended:
            pass
        except BaseException as error:
            own.error = error
        own.is_done = True
        self._back.release()

    def _schedule(self) -> None:
        for _ in range(SWITCHES):
            if all(one.is_done for one in self._partitions):
                assert not self._copies, f"{len(self._copies)} copies were never awaited"
                left = [number for number, (arrived, _) in self._numbered.items() if arrived]
                assert not left, f"barriers {left} still wait for threads"
                return
            ready: list[Any] = [
                one for one in self._partitions if not one.is_done and (one.until is None or one.until())
            ]
            ready += ["copy"] * min(2, len(self._copies))
            assert ready, "deadlock: every partition waits"
            chosen = self.chance.choice(ready)
            if chosen == "copy":
                self._copies.pop(self.chance.randrange(len(self._copies)))()
                continue
            self._current, chosen.until = chosen, None
            chosen.turn.release()
            self._back.acquire()
            self._current = None
            if chosen.error is not None:
                raise chosen.error
        raise AssertionError(f"no end after {SWITCHES} switches")


def assembler(program: Program, text: str, arguments: list[Any], dtype: Any) -> Any:
    """Compute what a line of inline assembler does."""
    words = text.replace(",", " ").replace(";", " ").split()
    simple: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ex2.approx.ftz.f32": torch.exp2,
        "lg2.approx.ftz.f32": torch.log2,
        "rcp.approx.ftz.f32": torch.reciprocal,
    }
    if words[0] in simple:
        return simple[words[0]](arguments[0])
    if words[0] in ("bar.sync", "bar.arrive"):
        return program.meet(int(words[1]), int(words[2]), stays=words[0] == "bar.sync")
    assert "%clock" in text or words[0].startswith("griddepcontrol."), f"not modelled: {text}"
    return None


class BlockedLayout(NamedTuple):
    """The layout that kernels take sizes from."""

    size_per_thread: list[int]
    threads_per_warp: list[int]
    warps_per_cta: list[int]
    order: list[int]


def named(*_: Any, **__: Any) -> None:
    """Stand for a layout."""


def chosen(mask: Any, first: Any, second: Any) -> Any:
    mask, first, second = (plain(one) for one in (mask, first, second))
    if not isinstance(mask, torch.Tensor):
        return first if mask else second
    return torch.where(mask, first, second)


def greater(first: Any, second: Any) -> Any:
    """Ignore NaN, as the hardware does."""
    first, second = plain(first), plain(second)
    return torch.fmax(first, second) if isinstance(first, torch.Tensor) else max(first, second)


def largest(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Ignore NaN, as the hardware does."""
    return torch.where(values.isnan(), -torch.inf, values).amax(axis)


def language(program: Program) -> SimpleNamespace:
    """`gl`, as far as attention takes it."""

    def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        shape = [plain(n) for n in shape]
        if dtype == torch.int64:
            return Barriers([Barrier() for _ in range(shape[0])])
        return Shared(torch.full((prod(shape),), float("nan"), dtype=dtype), shape)

    def specialize(parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        program.run([lambda part=part: part[0](*part[1]) for part in parts])

    shape_of = lambda shape: [plain(n) for n in shape]  # noqa: E731
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in ("int32", "int64", "float16", "float32")},
        **dict.fromkeys(("SliceLayout", "NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout"), named),
        BlockedLayout=lambda *sizes: BlockedLayout(*([plain(n) for n in one] for one in sizes)),
        program_id=lambda axis: program.place,
        num_programs=lambda axis: program.num_programs,
        num_warps=lambda: 4,
        static_range=lambda *ends: range(*(plain(end) for end in ends)),
        arange=lambda start, end, layout=None: torch.arange(plain(start), plain(end), dtype=torch.int32),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape_of(shape), dtype=dtype),
        full=lambda shape, value, dtype, layout=None: torch.full(shape_of(shape), value, dtype=dtype),
        zeros_like=torch.zeros_like,
        where=chosen,
        maximum=greater,
        minimum=min,
        max=largest,
        sum=lambda values, axis: values.sum(axis),
        fma=lambda a, b, c: a * b + c,
        expand_dims=lambda values, axis: values.unsqueeze(axis),
        split=lambda values: (values[..., 0], values[..., 1]),
        join=lambda first, second: torch.stack((first, second), -1),
        convert_layout=lambda values, layout: values,
        load=lambda pointer, mask=True, other=None: pointer.load(mask, other),
        store=lambda pointer, values, mask=True: pointer.store(values, mask),
        inline_asm_elementwise=lambda text, _, arguments, dtype, *__: assembler(program, plain(text), arguments, dtype),
        allocate_shared_memory=allocate,
        warp_specialize=specialize,
    )


def hopper_of(program: Program) -> SimpleNamespace:
    """`hopper`: barriers, copies and products."""

    def expect(bar: Barrier, num_bytes: Any) -> None:
        bar.num_bytes += int(num_bytes)
        bar.pending -= 1
        program.wait(lambda: True)

    def arrive(bar: Barrier, count: int) -> None:
        bar.pending -= count
        bar.settle()
        program.wait(lambda: True)

    def wait(bar: Barrier, phase: Any) -> None:
        # A new barrier counts as if the phase before its first one had ended.
        program.wait(lambda: (bar.phase - 1) % 2 == int(phase))

    def copy(source: Descriptor, coordinate: list[Any], bar: Barrier, target: Shared) -> None:
        place = [int(one) for one in coordinate]

        def land() -> None:
            target.flat.copy_(source.read(place).flatten())
            bar.num_bytes -= source.block_type.nbytes
            bar.settle()

        assert target.shape == source.block_shape, f"{source.block_shape} into {target.shape}"
        program.start_copy(land)

    def multiply(a: Any, b: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Any:
        product = Product(a, b, acc, use_acc)
        assert is_async, "products that are waited for at once are not modelled"
        products = program.running.products
        products.append(product)
        if program.chance.random() < 0.5:
            while products:
                products.pop(0).compute()
        return product

    def wait_for_products(count: int, deps: list[Any]) -> Any:
        products = program.running.products
        program.wait(lambda: True)
        while len(products) > count:
            products.pop(0).compute()
        for one in deps:
            assert not isinstance(one, Product) or one.value is not None, "its product still runs"
        values = tuple(one.value if isinstance(one, Product) else one for one in deps)
        return values[0] if len(values) == 1 else values

    barriers = SimpleNamespace(
        init=lambda bar, count: bar.begin(count), expect=expect, arrive=arrive, wait=wait,
        invalidate=lambda bar: None, MBarrierLayout=named,
    )  # fmt: skip
    return SimpleNamespace(
        mbarrier=barriers,
        tma=SimpleNamespace(async_copy_global_to_shared=copy),
        warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_for_products,
        fence_async_shared=lambda: None,
    )


class Launcher:
    """Runs a kernel's source program by program."""

    def __init__(self, kernel: Callable[..., None], modules: Sequence[ModuleType], seed: int) -> None:
        self._kernel, self._modules, self._seed = getattr(kernel, "fn", kernel), modules, seed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            given = [tensor_pointer(one) if isinstance(one, torch.Tensor) else one for one in arguments]
            for place in range(grid[0]):
                program = Program(place, grid[0], self._seed + place)
                # Kernels read the layout of a tensor at x.type.layout.
                typed = patch.object(torch.Tensor, "type", SimpleNamespace(layout=None))
                with typed, with_names(self._modules, gl=language(program), hopper=hopper_of(program)):
                    self._kernel(*given, **constants)

        return launch


@contextmanager
def with_names(modules: Sequence[ModuleType], **names: Any) -> Iterator[None]:
    """Give modules these globals, if they have them, and plain constants."""
    patches = []
    for module in modules:
        constants = {name: plain(value) for name, value in vars(module).items() if plain(value) is not value}
        for name, value in (constants | {name: names[name] for name in names if hasattr(module, name)}).items():
            patches.append(patch.object(module, name, value))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


@contextmanager
def modelled(module: ModuleType, *others: ModuleType, kernel: str = "_attend_kernel", seed: int = 0) -> Iterator[None]:
    """Replace a module's kernel by its model; `others` hold functions that it calls."""
    modules = (module, *others)
    launcher = Launcher(getattr(module, kernel), modules, seed)
    layouts = SimpleNamespace(NVMMASharedLayout=named)
    with with_names([module], TensorDescriptor=Descriptor, gl=layouts), patch.object(module, kernel, launcher):
        yield

"""Arena and MirroredTensor: tensors apart and aligned, bytes held and given back, copies that arrive in order; what a device that has failed leaves."""

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.memory import arena as arena_module
from holdfast.memory.arena import (
    UNWRITTEN,
    Arena,
    MirroredTensor,
    allocate_bytes,
    has_failed,
    keep_with_process,
    views_of,
)
from holdfast.memory.ledger import Ledger
from holdfast.memory.workspace_plan import ALIGNMENT_BYTES, TensorSpec, arena_bytes
from holdfast.quant.formats import DTYPE_BYTES
from scratch_memory import Poison

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20
sizes = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(sorted(DTYPE_BYTES))), max_size=6
)


def specs_for(shapes: list[tuple[tuple[int, ...], str]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"t{number}", shape, dtype) for number, (shape, dtype) in enumerate(shapes))


def interval(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@given(sizes)
def test_arena_tensors_are_aligned_and_disjoint(shapes: list[tuple[tuple[int, ...], str]]) -> None:
    specs, ledger = specs_for(shapes), Ledger()
    made = Arena("things", specs, CPU, ledger, "a test")
    assert list(made.tensors) == [spec.name for spec in specs]
    for spec, tensor in zip(specs, made.tensors.values(), strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, getattr(torch, spec.dtype))
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT_BYTES == 0
        assert tensor.untyped_storage().nbytes() == made.num_bytes == arena_bytes(specs), "one storage, not a byte more"
    places = sorted(interval(tensor) for tensor in made.tensors.values() if tensor.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert not places or places[-1][1] - places[0][0] <= made.num_bytes
    assert {entry.owner: entry.num_bytes for entry in ledger} == {f"things/{s.name}": s.aligned_bytes for s in specs}
    assert ledger.total_bytes == made.num_bytes
    made.release()
    assert list(ledger) == []
    assert made.tensors == {}
    made.release()


def test_arena_fill_of_one_tensor_leaves_neighbours_intact(guarded, device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "allocate_bytes", lambda num_bytes, _: guarded(num_bytes, dtype=torch.uint8))
    shapes = [
        ((3, 5), "float16"),
        ((), "int64"),
        ((0, 4), "float32"),
        ((257,), "uint8"),
        ((64,), "float32"),
        ((1,), "bool"),
    ]
    tensors = list(Arena("things", specs_for(shapes), device, Ledger(), "").tensors.values())
    for tensor in tensors:
        tensor.fill_(1)
        others = [other for other in tensors if other is not tensor]
        assert not any(bool(other.any()) for other in others), "a write went into a neighbour"
        tensor.fill_(0)


def test_memory_of_a_cpu_is_really_held() -> None:
    """Something is written into every page, so that the system has to find memory for it now and not in the midst of a step."""
    buffer = allocate_bytes(40 * MIB, CPU)
    assert bool((buffer[::4096] == UNWRITTEN).all())


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("poison", [Poison.NAN], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_poison_reaches_every_element(dtype: str) -> None:
    """Touching memory must not hide that it was never written."""
    made = Arena("things", (TensorSpec("a", (3,), dtype), TensorSpec("b", (20_000,), dtype)), CPU, Ledger(), "")
    assert all(bool(tensor.isnan().all()) for tensor in made.tensors.values())


def test_views_keep_the_memory_alive_and_nothing_else_does() -> None:
    made = Arena("things", (TensorSpec("a", (1000,), "float32"),), CPU, Ledger(), "")
    tensor = made.tensors["a"]
    base = weakref.ref(tensor.untyped_storage())
    tensor.fill_(3)
    made.release()
    assert tensor.unique().tolist() == [3]
    del made, tensor
    gc.collect()
    assert base() is None


def test_arena_failed_allocation_leaves_ledger_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(arena_module, "allocate_bytes", refuse)
    ledger = Ledger()
    with pytest.raises(torch.OutOfMemoryError):
        Arena("things", (TensorSpec("a", (1,), "int8"),), CPU, ledger, "")
    assert list(ledger) == []


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ((TensorSpec("a", (1,), "int8"), TensorSpec("a", (2,), "int8")), "comes twice"),
        ((TensorSpec("a", (-1,), "int8"),), "not a shape"),
        ((TensorSpec("a", (1,), "int7"),), "not the name of a type"),
    ],
    ids=["twice", "shape", "type"],
)
def test_arena_invalid_specs_raise_assertion(specs: tuple[TensorSpec, ...], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        Arena("things", specs, CPU, Ledger(), "")


def test_views_begin_where_the_bytes_begin() -> None:
    buffer = allocate_bytes(512, CPU)
    first, second = views_of(buffer, (TensorSpec("a", (2,), "int16"), TensorSpec("b", (64,), "float32")))
    assert first.data_ptr() == buffer.data_ptr()
    assert second.data_ptr() == buffer.data_ptr() + 256
    assert interval(second)[1] == interval(buffer)[1]
    assert allocate_bytes(0, CPU).numel() == 0


@pytest.mark.gpu
def test_arena_on_gpu_takes_one_allocation() -> None:
    cuda = torch.device("cuda")
    before = torch.cuda.memory_allocated()
    counts = torch.cuda.memory_stats()["allocation.all.allocated"]
    specs = tuple(TensorSpec(f"t{number}", (1000 + number,), "bfloat16") for number in range(50))
    made = Arena("things", specs, cuda, Ledger(), "")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == counts + 1
    assert 0 <= torch.cuda.memory_allocated() - before - made.num_bytes < 512
    assert all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in made.tensors.values())
    made.release()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_mirrored_tensor_copies_only_sent_ranges():
    mirrored = MirroredTensor((3, 4), torch.int32, CPU, is_shared=False)
    mirrored.host[:] = 7
    assert mirrored.tensor.tolist() == [[0] * 4] * 3
    mirrored.send([(1, 3), (6, 9)])
    assert mirrored.tensor.view(-1).tolist() == [0, 7, 7, 0, 0, 0, 7, 7, 7, 0, 0, 0]
    mirrored.wait()
    mirrored.host[:] = 8
    assert mirrored.tensor.view(-1).tolist() == [0, 7, 7, 0, 0, 0, 7, 7, 7, 0, 0, 0]


@pytest.mark.parametrize("ranges", [[], [(0, 0)], [(12, 12)]])
def test_mirrored_tensor_empty_ranges_send_nothing(ranges):
    mirrored = MirroredTensor((3, 4), torch.int64, CPU, is_shared=False)
    mirrored.host[:] = 7
    mirrored.send(ranges)
    assert not mirrored.tensor.any()


def test_shared_memory_needs_no_sending():
    mirrored = MirroredTensor((2, 2), torch.int64, CPU, is_shared=True)
    mirrored.host[1] = 5
    assert mirrored.tensor.tolist() == [[0, 0], [5, 5]]
    mirrored.send([(0, 4)])
    mirrored.wait()
    assert mirrored.tensor.tolist() == [[0, 0], [5, 5]]


@pytest.mark.gpu
def test_mirrored_tensor_copy_in_flight_is_not_overwritten(device):
    mirrored = MirroredTensor((1024,), torch.int64, device, is_shared=False)
    seen = [torch.zeros(1024, dtype=torch.int64, device=device) for _ in range(5)]
    for value, copy in enumerate(seen):
        torch.cuda._sleep(20_000_000)  # the copy below starts some 10 ms after the request
        mirrored.wait()
        mirrored.host[:] = value + 1
        mirrored.send([(0, 1024)])
        copy.copy_(mirrored.tensor)
    assert [copy.unique().tolist() for copy in seen] == [[1], [2], [3], [4], [5]]


@pytest.mark.gpu
def test_mirrored_tensor_host_is_pinned_and_send_is_async(device):
    mirrored = MirroredTensor((1024,), torch.int64, device, is_shared=False)
    assert torch.from_numpy(mirrored.host).is_pinned()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    mirrored.send([(0, 1024)])
    assert not torch.cuda.current_stream().query()
    mirrored.wait()
    assert torch.cuda.current_stream().query()


class Held:
    """Something with a place that can be watched."""


class Stream:
    """A stream of a device in a given state."""

    def __init__(self, error: str | None) -> None:
        self._error = error

    def query(self) -> bool:
        if self._error is not None:
            raise RuntimeError(self._error)
        return False


def test_keep_with_process_outlives_every_other_reference() -> None:
    kept, dropped = Held(), Held()
    places = weakref.ref(kept), weakref.ref(dropped)
    keep_with_process(kept)
    del kept, dropped
    gc.collect()
    assert places[0]() is not None
    assert places[1]() is None


def test_has_failed_is_false_on_cpu_and_unused_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not has_failed(CPU)
    assert not has_failed(CUDA)


@pytest.mark.parametrize(
    ("error", "is_capturing", "expected"),
    [(None, False, False), ("CUDA error", False, True), ("CUDA error", True, False), (None, None, True)],
)
def test_has_failed_queries_gpu_only_outside_capture(monkeypatch, error, is_capturing, expected) -> None:
    """One that is busy has not failed; while a graph is captured a question would be an error by itself."""

    def capturing() -> bool:
        if is_capturing is None:
            raise RuntimeError("CUDA error: not even this is known")
        return is_capturing

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(error))
    assert has_failed(CUDA) is expected

"""Carries out a load plan: one arena is allocated once, and row chunks stream from the source straight into their place."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod

import torch

from holdfast.errors import MemoryPlanError, ModelFormatError, shown
from holdfast.loading.plan import CHUNK_BYTES, PINNED_CHUNKS, LoadPlan, Move
from holdfast.loading.source import RowWriter, WeightSource, WritingSource
from holdfast.memory.arena import Arena
from holdfast.memory.ledger import Ledger
from holdfast.memory.sizes import format_bytes
from holdfast.quant.formats import DTYPE_BYTES

WRITE_BYTES = 256 * 2**20
"""Most bytes that a source writes itself at once: few calls for a large model, and progress all the same."""


class PinnedLink:
    """The way to a GPU: through a fixed pair of pinned chunks, of which one is filled while the other travels."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(PINNED_CHUNKS)]
        self._arrivals = [torch.cuda.Event() for _ in self._chunks] if is_cuda else None
        self._stream = torch.cuda.current_stream(device) if is_cuda else None
        self._next = 0

    def send(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write rows of any type into their place. They may be overwritten as soon as this returns."""
        step = CHUNK_BYTES // out.element_size()  # a row may be longer than a chunk
        for values, place in zip(rows.reshape(-1).split(step), out.view(-1).split(step), strict=True):
            chunk = self._free_chunk(out.dtype)[: place.numel()]
            chunk.copy_(values)
            place.copy_(chunk, non_blocking=True)
            self._mark_travelling()

    def _free_chunk(self, dtype: torch.dtype) -> torch.Tensor:
        if self._arrivals is not None:
            self._arrivals[self._next].synchronize()
        return self._chunks[self._next].view(dtype)

    def _mark_travelling(self) -> None:
        if self._arrivals is not None:
            self._arrivals[self._next].record(self._stream)
        self._next = (self._next + 1) % PINNED_CHUNKS


def load_weights(
    plan: LoadPlan,
    source: WeightSource,
    device: str,
    ledger: Ledger,
    on_progress: Callable[[int, int], None],
) -> dict[str, torch.Tensor]:
    """Every parameter by name, on the device, in the plan's dtype; each is in the ledger as weights/NAME.

    `on_progress` gets the bytes read so far and in all. Whatever stops a load leaves no entry and no tensor behind.
    """
    target = torch.device(device)
    with _lack_of_memory_in_words(plan, target, "as much in one piece"):
        arena = Arena("weights", plan.specs, target, ledger, f"{plan.dtype} as the model computes with them")
    try:
        _fill(plan, source, target, ledger, arena.tensors, on_progress)
    except BaseException as error:
        # Frames that the error has left behind still name rows of the arena.
        traceback.clear_frames(error.__traceback__)
        arena.release()
        raise
    finally:
        if target.type == "cuda":
            torch.cuda.empty_cache()  # what has been freed goes back to the device, not into a hoard
    return arena.tensors


def _fill(
    plan: LoadPlan,
    source: WeightSource,
    device: torch.device,
    ledger: Ledger,
    weights: dict[str, torch.Tensor],
    on_progress: Callable[[int, int], None],
) -> None:
    with _row_writer(plan, source, device, ledger) as write:
        _move_all(plan, source, write, weights, on_progress)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


@contextmanager
def _row_writer(plan: LoadPlan, source: WeightSource, device: torch.device, ledger: Ledger) -> Iterator[RowWriter]:
    """How rows get to their place, and the staging that it takes."""
    if not isinstance(source, WritingSource):
        with _lack_of_memory_in_words(plan, device, "the pinned host memory to load them through"):
            link = PinnedLink(device) if device.type == "cuda" else None
        yield partial(_read_and_copy, source, link)
        return
    with _lack_of_memory_in_words(plan, device, "the staging to make them with"):
        staging = Arena("staging", source.writer_specs, device, ledger, "tables of made-up rows")
    try:
        yield source.writer(staging.tensors)
    finally:
        staging.release()


def _read_and_copy(source: WeightSource, link: PinnedLink | None, name: str, row_start: int, out: torch.Tensor) -> None:
    rows = _read(source, name, row_start, out)
    if link is None:
        out.copy_(rows)
    else:
        link.send(rows, out)


@contextmanager
def _lack_of_memory_in_words(plan: LoadPlan, device: torch.device, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        told = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in told and "out of memory" not in told:
            raise
        raise MemoryPlanError(
            f"the weights need {format_bytes(plan.final_bytes)} on {device}",
            f"{what} could not be allocated",
            "free some memory, or take a smaller model or dtype",
        ) from error


def _move_all(
    plan: LoadPlan,
    source: WeightSource,
    write: RowWriter,
    weights: dict[str, torch.Tensor],
    on_progress: Callable[[int, int], None],
) -> None:
    num_done = 0
    on_progress(0, plan.read_bytes)
    at_once_bytes = CHUNK_BYTES if plan.writer_bytes is None else WRITE_BYTES
    for move in plan.moves:
        for row_start, row_end in _row_ranges(move, source, at_once_bytes):
            write(move.tensor, row_start, _rows(weights, move, row_start, row_end))
            on_progress(num_done + move.num_bytes * row_end // move.shape[0], plan.read_bytes)
        num_done += move.num_bytes
    for twin in plan.twins:
        for row_start, row_end in _row_ranges(twin, source, CHUNK_BYTES):
            _check_twin(twin, row_start, _rows(weights, twin, row_start, row_end), source)
            on_progress(num_done + twin.num_bytes * row_end // twin.shape[0], plan.read_bytes)
        num_done += twin.num_bytes


def _row_ranges(move: Move, source: WeightSource, at_once_bytes: int) -> Iterator[tuple[int, int]]:
    """The rows of a tensor, as many at a time as the bytes allow, but at least one."""
    row_bytes = prod(move.shape[1:]) * DTYPE_BYTES[source.entries[move.tensor].dtype]
    step = max(1, at_once_bytes // row_bytes)
    return ((start, min(start + step, move.shape[0])) for start in range(0, move.shape[0], step))


def _rows(weights: dict[str, torch.Tensor], move: Move, row_start: int, row_end: int) -> torch.Tensor:
    return weights[move.parameter][move.row_start + row_start : move.row_start + row_end]


def _read(source: WeightSource, name: str, row_start: int, like_rows: torch.Tensor) -> torch.Tensor:
    """As many rows as are asked for, valid until the next read."""
    rows = source.read_rows(name, row_start, row_start + like_rows.shape[0])
    assert rows.shape == like_rows.shape, f"{name}: {rows.shape=} from {row_start=} for {like_rows.shape=}"
    return rows


def _check_twin(twin: Move, row_start: int, loaded: torch.Tensor, source: WeightSource) -> None:
    """Bits are compared, in the final dtype: a difference that rounding removes changes no result.

    The loaded rows come to the host for it, so that a GPU holds nothing but them.
    """
    bits = torch.int16 if loaded.element_size() == 2 else torch.int32
    rows = _read(source, twin.tensor, row_start, loaded).to(loaded.dtype)
    differs = (loaded.cpu().view(bits) != rows.view(bits)).flatten(1).any(dim=1)
    if bool(differs.any()):
        raise ModelFormatError(
            f"{source.entries[twin.tensor].file}: {shown(twin.tensor)} differs from the embedding "
            f"in row {row_start + int(differs.nonzero()[0])}",
            "the model's settings say that they are one tensor (tie_word_embeddings)",
            "set tie_word_embeddings to false, or use the model's own weights",
        )

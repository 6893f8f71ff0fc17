"""load_weights executes a load plan: rows stream in chunks through a staging arena into the weights' arena."""

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from holdfast.errors import MemoryPlanError, ModelFormatError
from holdfast.kernels.load.checksum import add_checksum, as_unsigned
from holdfast.loading.execution.feeds import Feed, HostFeed, PinnedFeed, WriterFeed
from holdfast.loading.execution.place import ChunkViews, Placer, TilePlacer
from holdfast.loading.execution.ring import Chunk, Piece, cut_chunks
from holdfast.loading.execution.tied import check_tied
from holdfast.loading.planning.moves import EMBEDDING, HEAD, Move, PlannedWeight, part_name
from holdfast.loading.planning.plan import CPU_READERS, PINNED_CHUNKS, LoadPlan
from holdfast.loading.sources.source import (
    CheckedSource,
    PackedWritingSource,
    ValueCheckedSource,
    WeightSource,
    WritingSource,
)
from holdfast.memory.arena import Arena, is_out_of_memory
from holdfast.memory.ledger import Ledger
from holdfast.memory.profiler import anonymous_bytes
from holdfast.memory.sizes import format_bytes
from holdfast.observability.log import get_logger
from holdfast.quant.packed_weight import AnyWeight, PackedPart, PackedWeight, as_quantized
from holdfast.quant.quantized_weight import QuantizedWeight
from holdfast.quant.weight_schemes import SCALE_SUFFIX

log = get_logger(__name__)

Progress = Callable[[int, int], None]
"""progress(done_bytes, total_bytes) of the checkpoint."""
SECONDS_BETWEEN_PROGRESS = 0.05


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Times and peak memory of a load. Reading, copying and placing overlap, so they do not sum to `seconds`."""

    seconds: float
    read_bytes: int
    read_seconds: float
    """Summed over the readers; 0 if the source writes the rows itself."""
    num_readers: int
    copy_seconds: float
    """GPU time of copies, from a sample of the chunks."""
    place_seconds: float
    """Time of converting and quantizing; on a GPU from a sample of the chunks."""
    final_bytes: int
    staging_bytes: int
    pinned_bytes: int
    peak_allocated_bytes: int | None
    """Peak bytes of live tensors on the device, from the allocator; None on a CPU."""
    peak_reserved_bytes: int | None
    device_used_bytes: int | None
    """Bytes in use on the device, by all processes, with all weights and the staging."""
    peak_anonymous_bytes: int | None
    """Peak anonymous host memory of the process, sampled a few times a second; None if unknown."""

    @property
    def bytes_per_second(self) -> float:
        return self.read_bytes / max(self.seconds, 1e-9)

    @property
    def summary(self) -> str:
        """One line for the log."""
        parts = [f"{self.read_bytes / 1e9:.2f} GB in {self.seconds:.2f} s, {self.bytes_per_second / 1e9:.1f} GB/s"]
        if self.num_readers:
            parts.append(f"reading {self.read_seconds:.2f} s in {self.num_readers} threads")
        if self.copy_seconds:
            parts.append(f"copying {self.copy_seconds:.2f} s")
        parts.append(f"placing {self.place_seconds:.2f} s")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Every weight by name, on the device, and the report of the load."""

    weights: dict[str, AnyWeight]
    report: LoadReport
    is_finite: bool = True
    """False if rows hold a NaN or an infinity, and the user allowed that."""


def load_weights(
    plan: LoadPlan,
    source: WeightSource,
    device: str,
    ledger: Ledger,
    on_progress: Progress,
    allow_nonfinite: bool = False,
) -> LoadedWeights:
    """Read, convert and quantize every weight into one arena; book each tensor in the ledger as weights/NAME.

    An error leaves no entry, no tensor and no thread.
    """
    target = torch.device(device)
    start = time.perf_counter()
    if isinstance(source, ValueCheckedSource):
        source.check_values({move.tensor: move.packed for move in (*plan.moves, *plan.tied)})
    tied = check_tied(plan, source)
    with _out_of_memory_as_error(plan, target, "as much in one piece"):
        arena = Arena("weights", plan.specs, target, ledger, f"{plan.dtype} as the model computes with them")
    try:
        load = _Load(plan, tied, source, target, arena.tensors, on_progress)
        is_finite = load.run(ledger, allow_nonfinite)
        _refuse_beyond(plan, source, arena.tensors)
        return LoadedWeights(_assemble(plan, arena.tensors), load.report(time.perf_counter() - start), is_finite)
    except BaseException as error:
        # Frames of the error still hold rows of the arena.
        traceback.clear_frames(error.__traceback__)
        arena.release()
        raise
    finally:
        if target.type == "cuda":
            torch.cuda.empty_cache()  # give freed memory back to the device


class _Load:
    """One running load."""

    def __init__(
        self,
        plan: LoadPlan,
        tied: tuple[Move, ...],
        source: WeightSource,
        device: torch.device,
        tensors: dict[str, torch.Tensor],
        on_progress: Progress,
    ) -> None:
        self._plan = plan
        self._source = source
        self._device = device
        self._tensors = tensors
        self._tied = tied
        self._moves = (*plan.moves, *tied)
        self._progress = _Progress(plan.read_bytes, on_progress)
        self._num_readers = _count_readers(plan, device)
        self._seconds = (0.0, 0.0, 0.0)
        self._peaks: tuple[int, int, int] | None = None

    def run(self, ledger: Ledger, allow_nonfinite: bool) -> bool:
        """Place all rows; return True if all of them are finite."""
        plan, device = self._plan, self._device
        with _out_of_memory_as_error(plan, device, "the staging to load them through"):
            staging = Arena("staging", plan.staging_specs(device.type), device, ledger, "rows in flight")
        try:
            chunks = cut_chunks(plan.moves, self._tied, plan.chunk_bytes(device.type))
            return self._stream(staging.tensors, chunks, allow_nonfinite)
        finally:
            staging.release()

    def _stream(self, staging: dict[str, torch.Tensor], chunks: Iterator[Chunk], allow_nonfinite: bool) -> bool:
        placer = Placer(self._plan.moves, self._tied, self._tensors, staging["findings"], staging["amax"])
        checks = _Checks(self._plan.moves, self._source, staging["checksums"]) if self._plan.is_checked else None
        self._progress.report(0)
        with _current(self._device), closing(self._open_feed(staging, chunks)) as feed:
            for chunk, views in feed:
                for piece in chunk.pieces:
                    if checks is not None:
                        checks.add(piece, views)
                    placer.place(piece, views)
                self._progress.add(chunk.done_bytes)
        self._seconds = feed.read_seconds, feed.copy_seconds, feed.place_seconds
        if self._device.type == "cuda":
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            allocated = torch.cuda.max_memory_allocated(self._device)
            self._peaks = allocated, torch.cuda.max_memory_reserved(self._device), total_bytes - free_bytes
        if checks is not None:
            checks.judge()
        is_finite = _judge(placer.wrong_rows(), self._source, allow_nonfinite)
        self._progress.report(self._plan.read_bytes)
        return is_finite

    def _open_feed(self, staging: dict[str, torch.Tensor], chunks: Iterator[Chunk]) -> Feed:
        places = [tensor for name, tensor in staging.items() if name.startswith("chunk.")]
        tiles = None
        if self._device.type == "cpu":
            tiles = TilePlacer(self._source, self._plan.moves, self._tensors, staging["findings"])
        if isinstance(self._source, WritingSource):
            packed = self._source.packed_writer(staging) if isinstance(self._source, PackedWritingSource) else None
            return WriterFeed(self._source.writer(staging), self._moves, chunks, places, packed, tiles)
        if tiles is not None:
            return HostFeed(self._source, self._moves, chunks, places, self._num_readers, tiles)
        with _out_of_memory_as_error(self._plan, self._device, "the pinned host memory to load them through"):
            return PinnedFeed(self._source, self._moves, chunks, places, self._num_readers, PINNED_CHUNKS)

    def report(self, seconds: float) -> LoadReport:
        read_seconds, copy_seconds, place_seconds = self._seconds
        allocated, reserved, used = self._peaks or (None, None, None)
        return LoadReport(
            seconds=seconds,
            read_bytes=self._plan.read_bytes,
            read_seconds=read_seconds,
            num_readers=self._num_readers,
            copy_seconds=copy_seconds,
            place_seconds=place_seconds,
            final_bytes=self._plan.final_bytes,
            staging_bytes=self._plan.staging_bytes(self._device.type),
            pinned_bytes=self._plan.pinned_bytes(self._device.type),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            device_used_bytes=used,
            peak_anonymous_bytes=self._progress.peak_anonymous_bytes,
        )


class _Checks:
    """Checksums of every tensor, summed on the device and compared with those of the source."""

    def __init__(self, moves: Sequence[Move], source: WeightSource, sums_M: torch.Tensor) -> None:
        assert isinstance(source, CheckedSource), f"{type(source).__name__} knows no checksums"
        self._moves = moves
        self._source = source
        self._sums = sums_M.zero_().split(1)
        self._sums_M = sums_M

    def add(self, piece: Piece, views: ChunkViews) -> None:
        """Add a piece: some whole rows of its tensor, as they are stored."""
        bytes_N = views.raw.narrow(0, piece.offset, piece.num_bytes)
        add_checksum(bytes_N, piece.row * (piece.num_bytes // piece.num_rows), self._sums[piece.move])

    def judge(self) -> None:
        """Raise for the first tensor with a wrong checksum."""
        wanted = self._source.checksums
        for move, found in zip(self._moves, self._sums_M.tolist(), strict=True):
            if as_unsigned(found) != wanted[move.tensor]:
                raise self._source.damaged(move.tensor)


class _Progress:
    """Reports the progress of a load a few times a second, and samples host memory."""

    def __init__(self, total_bytes: int, report: Progress) -> None:
        self._total_bytes = total_bytes
        self._report = report
        self._done = 0.0
        self._next_seconds = 0.0
        self.peak_anonymous_bytes: int | None = None

    def add(self, num_bytes: float) -> None:
        self._done += num_bytes
        if time.monotonic() >= self._next_seconds:
            self.report(min(int(self._done), self._total_bytes))

    def report(self, done_bytes: int) -> None:
        self._next_seconds = time.monotonic() + SECONDS_BETWEEN_PROGRESS
        anonymous = anonymous_bytes()
        if anonymous is not None:
            self.peak_anonymous_bytes = max(anonymous, self.peak_anonymous_bytes or 0)
        self._report(done_bytes, self._total_bytes)


def _count_readers(plan: LoadPlan, device: torch.device) -> int:
    if plan.writer_specs:
        return 0
    num_processors = os.cpu_count() or 1
    return min(plan.num_readers, num_processors, CPU_READERS if device.type == "cpu" else PINNED_CHUNKS)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device current: kernels launch there, whatever device their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _assemble(plan: LoadPlan, tensors: dict[str, torch.Tensor]) -> dict[str, AnyWeight]:
    weights: dict[str, AnyWeight] = {}
    for weight in plan.weights:
        if weight.packed:
            weights[weight.name] = _packed(weight, tensors)
            continue
        held = tensors[weight.name]
        weights[weight.name] = held
        if weight.scheme is not None:
            quantized = QuantizedWeight(weight.scheme, weight.shape, held, tensors[weight.name + SCALE_SUFFIX])
            quantized.check()
            weights[weight.name] = quantized
    return weights


def _packed(weight: PlannedWeight, tensors: dict[str, torch.Tensor]) -> PackedWeight | QuantizedWeight:
    """Join the planes of a weight's parts. A table is looked up by rows, which codes in blocks of a scheme do not allow."""
    parts = []
    for index, rows in enumerate(weight.packed):
        prefix, shape = part_name(weight, index), (*weight.shape[:-2], rows.num_rows, weight.shape[-1])
        planes = tuple(tensors[f"{prefix}.{plane.name}"] for plane in rows.scheme.planes)
        parts.append(PackedPart(rows.scheme, rows.row_start, shape, planes))
    packed = PackedWeight(weight.shape, tuple(parts))
    packed.check()
    quantized = as_quantized(packed)
    if quantized is None or (quantized.scheme.block_columns and weight.name in (EMBEDDING, HEAD)):
        return packed
    quantized.check()
    return quantized


def _judge(wrong: list[tuple[Move, int | None, int | None]], source: WeightSource, allow_nonfinite: bool) -> bool:
    """Raise for wrong rows, unless only finiteness fails and `allow_nonfinite`; return True if all are finite."""
    nonfinite = [(move, row) for move, row, _ in wrong if row is not None]
    if nonfinite:
        move, row = nonfinite[0]
        file = source.entries[move.tensor].file
        # A stacked tensor comes in many moves.
        num_others = len({other.tensor for other, _ in nonfinite}) - 1
        others = f", nor {num_others} more tensor{'s' * (num_others > 1)}" if num_others else ""
        error = ModelFormatError("weights.not_finite", file=file, tensor=move.tensor, row=row, others=others)
        if not allow_nonfinite:
            raise error
        log.warning("loaded with --allow-nonfinite: %s", error)
    for move, _, row in wrong:
        if row is not None:
            file = source.entries[move.tensor].file
            raise ModelFormatError("weights.not_tied", file=file, tensor=move.tensor, row=row)
    return not nonfinite


def _refuse_beyond(plan: LoadPlan, source: WeightSource, tensors: dict[str, torch.Tensor]) -> None:
    """Raise if a table of experts holds an integer out of range."""
    for weight in plan.weights:
        if not weight.limit:
            continue
        table = tensors[weight.name]
        wrong = (table < 0) | (table >= weight.limit)
        if not bool(wrong.any()):
            continue
        row = int(wrong.any(dim=-1).to(torch.uint8).argmax())
        tensor = next(move.tensor for move in plan.moves if move.target == weight.name)
        expert = next(number for number in table[row].tolist() if not 0 <= number < weight.limit)
        file, count = source.entries[tensor].file, weight.limit
        raise ModelFormatError("weights.wrong_expert", file=file, tensor=tensor, expert=expert, row=row, count=count)


@contextmanager
def _out_of_memory_as_error(plan: LoadPlan, device: torch.device, what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        needed = format_bytes(plan.final_bytes)
        raise MemoryPlanError("weights.no_memory", needed=needed, device=str(device), what=what) from error
